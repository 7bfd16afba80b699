// Rounding of scaled values to codes: the only place with this formula.
//
//   code = clamp(round_half_even((x - bias) * inverse), 0, top)
//
// Contract: the subtraction, the product and the rounding each happen once, in float, and are never fused, so
// that every backend and every compiler gives the same code. (Compilers contract a*b+c into one fused
// operation if the instruction set has it; about one 4-bit code in ten million changes. The expression above
// has nothing to fuse.) NaN is quantized as the value nearest zero; infinities saturate.
#pragma once

#include <concepts>

#include "float_formats.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

/// a*b rounded on its own: never fused with a following sum. (Two floats multiplied in double: exact, nothing
/// to round.)
template <std::floating_point T>
KVQ_HD KVQ_INLINE constexpr T rounded_product(T a, T b) noexcept {
#if defined(__CUDA_ARCH__)
    if constexpr (std::same_as<T, double>) {
        return __dmul_rn(a, b);
    } else {
        return __fmul_rn(a, b);
    }
#else
    T product = a * b;
    if (!__builtin_is_constant_evaluated()) {
#if defined(__SSE2__) && defined(__GNUC__)
        __asm__("" : "+x"(product));
#elif defined(__aarch64__) && defined(__GNUC__)
        __asm__("" : "+w"(product));
#elif defined(__GNUC__)
        __asm__("" : "+m"(product));
#else
        volatile T barrier = product;
        product = barrier;
#endif
    }
    return product;
#endif
}

/// The same for loops that compilers vectorise: a zero that is opaque to the compiler follows each product.
/// (Products in double do not help: GCC recognizes a product of floats and fuses it.)
class rounded_products {
public:
    KVQ_HD KVQ_INLINE rounded_products() noexcept {
#if !defined(__CUDA_ARCH__)
        __asm__("" : "+r"(zero_));
#endif
    }
    KVQ_HD KVQ_INLINE float operator()(float a, float b) const noexcept {
#if defined(__CUDA_ARCH__)
        return __fmul_rn(a, b);
#else
        return bit_cast<float>(bit_cast<std::uint32_t>(a * b) ^ zero_);
#endif
    }

private:
    std::uint32_t zero_ = 0;
};

/// a / b rounded to nearest, also with fast division in CUDA (--use_fast_math).
KVQ_HD KVQ_INLINE constexpr float rounded_quotient(float a, float b) noexcept {
#if defined(__CUDA_ARCH__)
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

KVQ_HD KVQ_INLINE constexpr float rounded_inverse(float x) noexcept {
#if defined(__CUDA_ARCH__)
    return __frcp_rn(x);
#else
    return 1.0f / x;
#endif
}

/// Nearest integer, ties to even, for 0 <= v < 2^23.
KVQ_HD KVQ_INLINE constexpr int round_half_even(float v) noexcept {
#if defined(__CUDA_ARCH__)
    return __float2int_rn(v);
#else
    const int below = static_cast<int>(v);
    const float rest = v - static_cast<float>(below);
    return below + ((rest > 0.5f || (rest == 0.5f && (below & 1))) ? 1 : 0);
#endif
}

/// The code of x under x^ = scale * code + bias, with inverse = 1 / scale.
KVQ_HD KVQ_INLINE constexpr int affine_code(float x, float bias, float inverse, int top) noexcept {
    if (is_nan(x)) x = 0.0f;
    const float position = rounded_product(x - bias, inverse);
    if (!(position > 0.0f)) return 0;
    if (position >= static_cast<float>(top)) return top;
    return round_half_even(position);
}

/// scale * code + bias with the product rounded first, on every backend.
KVQ_HD KVQ_INLINE constexpr float affine_value(int code, float scale, float bias) noexcept {
    return rounded_product(scale, static_cast<float>(code)) + bias;
}

}}}  // namespace kvq::detail

namespace kvq { inline namespace KVQ_TAGGED {

/// For your own schemes: rounded_product(a, b) is the product of two floats or doubles, rounded to nearest.
/// No compiler fuses it with a sum that follows, so the scheme gives the same bits on every platform.
using detail::rounded_product;

}}  // namespace kvq
