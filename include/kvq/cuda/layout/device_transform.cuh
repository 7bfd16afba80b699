// Which transform stands in front of the blocks of a cache on the device: a value, which kernels are given.
//
//   device_transform       T: member of a cache_ref, for keys and for values (own_state)
//   behind_transform<S>    the scheme of kernels for blocks S of T x; what T is, they learn when they run
//
// Kernels of a codec without a transform are others: they have no code for it. How T is applied:
// transform_row.cuh.
#pragma once

#include "../../schemes/transformed.hpp"

namespace kvq { inline namespace KVQ_TAGGED {
namespace cuda {

/// The transform of the blocks of one layer.
struct device_transform {
    token_transform what;
    int layer = -1;  ///< signs depend on it; -1: not said
    /// Of a rotation, in device memory: [kv_heads][dim][dim] of this layer, rotation::columns() and
    /// rotation::rows().
    const float *columns = nullptr, *rows = nullptr;
};

namespace detail {

/// Why kernels do not apply a transform; null: they do.
constexpr const char* no_transform(const token_transform& t) noexcept {
    return t.kind == transform_kind::hadamard || t.kind == transform_kind::matrix
               ? nullptr
               : "the transform in front of it is not the library's";
}

/// Inner's blocks hold T x. Kernels are compiled for it, whatever T is.
template <class Inner>
struct behind_transform : Inner {};

/// The transform that a type of schemes stands for.
template <class S>
inline constexpr token_transform transform_in{};
template <class Transform, class Inner>
inline constexpr token_transform transform_in<transformed<Transform, Inner>> =
    kvq::detail::value_of_transform<Transform>();
/// Of kernels' schemes: whatever they are given.
template <class Inner>
inline constexpr token_transform transform_in<behind_transform<Inner>>{transform_kind::hadamard};
template <class S>
inline constexpr bool has_transform = transform_in<S>.kind != transform_kind::none;

}  // namespace detail
}  // namespace cuda

namespace detail {
/// Blocks are those of Inner.
template <class Inner>
struct codec_maker<cuda::detail::behind_transform<Inner>> : codec_maker<Inner> {};
}  // namespace detail
}}  // namespace kvq
