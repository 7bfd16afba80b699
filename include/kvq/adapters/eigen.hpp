// Eigen: views of K, V, queries and outputs in Eigen matrices. The only header that includes Eigen.
//
// A row-major matrix holds one token per row, a column-major one (Eigen's default) one token per column; the
// other axis is heads * dim. Eigen::half and Eigen::bfloat16 are read as kvq::float16 and kvq::bfloat16 (same
// bits). No copies, no alignment requirements; no view keeps a reference to an Eigen object.
#pragma once

#include <Eigen/Core>
#include <limits>

#include "../core/error.hpp"
#include "../core/token_view.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

namespace detail {
template <class T>
struct eigen_scalar {
    using type = T;
};
template <>
struct eigen_scalar<Eigen::half> {
    using type = float16;
};
template <>
struct eigen_scalar<Eigen::bfloat16> {
    using type = bfloat16;
};
static_assert(sizeof(Eigen::half) == sizeof(float16) && sizeof(Eigen::bfloat16) == sizeof(bfloat16));
}  // namespace detail

/// The tokens of a matrix, Map, Ref or Block with direct access. Raises kvq::error when the feature axis is
/// not a multiple of `heads`, when its elements are not contiguous, or when either axis does not fit an int.
template <class Derived>
auto tokens_of(Derived&& matrix, int heads) {
    using plain = std::remove_cvref_t<Derived>;
    using stored = typename plain::Scalar;
    using element = typename detail::eigen_scalar<stored>::type;
    constexpr bool writable = !std::is_const_v<std::remove_pointer_t<decltype(matrix.data())>>;
    using T = std::conditional_t<writable, element, const element>;
    const auto tokens = plain::IsRowMajor ? matrix.rows() : matrix.cols();
    const auto features = plain::IsRowMajor ? matrix.cols() : matrix.rows();
    constexpr auto most = (std::numeric_limits<int>::max)();
    detail::expect(tokens <= most && features <= most, "a matrix of ", tokens, " tokens x ", features,
                   " features is too large, the limit is ", most);
    detail::expect(heads >= 1 && features % heads == 0, "a matrix with ", features,
                   " features per token cannot hold ", heads, " heads");
    detail::expect(matrix.innerStride() == 1, "features of a token must be contiguous, but their stride is ",
                   matrix.innerStride());
    return token_view<T>(reinterpret_cast<T*>(matrix.data()), static_cast<int>(tokens), heads,
                         static_cast<int>(features) / heads, matrix.outerStride(), features / heads);
}

}}  // namespace kvq
