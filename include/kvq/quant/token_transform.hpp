// What kernels on CPUs and GPUs know of a transform of a token's channels: a value.
//
//   order      an order of channels, in which kernels read and write them
//   hadamard   H S x: random signs, then Walsh-Hadamard matrices (quant/hadamard.hpp)
//   matrix     R x: a given matrix for each layer and head (quant/rotation.hpp)
//   own        a type of a user's: it transforms tokens one by one, on the CPU
//
// A transform says its value as `static constexpr token_transform value`; a type that says none is `own`.
// Contract: fixed orders of additions, the same on every CPU and GPU (docs/reference/architecture.md, "Same
// bytes everywhere").
#pragma once

#include <concepts>
#include <cstdint>

#include "../config.hpp"

namespace kvq { inline namespace v0_3 {

enum class transform_kind : unsigned char { none, order, hadamard, matrix, own };

struct token_transform {
    transform_kind kind = transform_kind::none;
    int largest = 0;         ///< channels of a Hadamard block at most; 0: as many as fit
    std::uint32_t seed = 0;  ///< of the signs; 0: none
};

}}  // namespace kvq

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

/// What kernels know of a type of transforms.
template <class Transform>
constexpr token_transform value_of_transform() noexcept {
    if constexpr (requires {
                      { Transform::value } -> std::convertible_to<token_transform>;
                  })
        return Transform::value;
    else
        return {transform_kind::own};
}

}  // namespace detail
}}  // namespace kvq
