// The float types of tensors as a value, for functions that are compiled once and get the type at run time.
//
//   float_type_of<float16> == float_type::fp16
//   visit_float_type(type, f)     f(T{}) with the type itself
#pragma once

#include "float_formats.hpp"

namespace kvq { inline namespace v0_3 {

enum class float_type : unsigned char { fp32, fp16, bf16 };

}}  // namespace kvq

namespace kvq { inline namespace KVQ_TAGGED {

template <float_format T>
inline constexpr float_type float_type_of = std::same_as<T, float>     ? float_type::fp32
                                            : std::same_as<T, float16> ? float_type::fp16
                                                                       : float_type::bf16;

/// Bytes of one value.
constexpr std::size_t size_of(float_type type) noexcept { return type == float_type::fp32 ? 4 : 2; }

namespace detail {

/// Returns f(T{}) with the type T of `type`.
template <class F>
constexpr decltype(auto) visit_float_type(float_type type, F&& f) {
    if (type == float_type::fp32) return f(float{});
    if (type == float_type::fp16) return f(float16{});
    return f(bfloat16{});
}

}  // namespace detail
}}  // namespace kvq
