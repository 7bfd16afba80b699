// Levels of one's own: what a type must have to stand for `asymmetric` or `symmetric`, and whether attention
// may multiply its codes.
//
//   struct my_levels {
//       static constexpr bool has_bias;                 // is a bias stored?
//       static constexpr int min_bits;                  // the least width
//       static constexpr const char* name;              // letters, digits, - and _; part of the scheme's
//                                                       // name
//       template <int Bits> static constexpr int zero_code;
//       // Parameters of finite values in [lo, hi], and the code of x, which may be NaN.
//       template <int Bits, class P> static stored_parameters<P> fit(float lo, float hi);
//       template <int Bits> static int code(float x, float bias, float inverse);
//       template <int Bits> static float value(int code, float scale, float bias);          // x^
//   };
//
// Attention sums codes and applies parameters afterwards. That is right where, for every code,
//
//   value(code, scale, bias) = scale * (code - zero_code) + bias          0 <= zero_code < 2^Bits
//
// `affine_levels` evaluates both sides at compile time, over all codes, for scales and biases with which both
// are exact. Levels that differ, or whose value() is not constexpr, are right, too: their blocks are
// dequantized by value() before they are multiplied.
// Contract: codes are in [0, 2^Bits - 1]. Parameters are finite, and scales at least 0, so that scores can be
// bounded. scheme::quantize raises kvq::error for others.
#pragma once

#include <concepts>

#include "affine.hpp"
#include "params.hpp"
#include "symmetric.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

/// The levels that kernels know.
template <class Levels>
inline constexpr bool library_levels = std::same_as<Levels, asymmetric> || std::same_as<Levels, symmetric>;

/// Has the type a name of its own? It stands in the scheme's name, which tells formats apart.
template <class Levels>
inline constexpr bool levels_named = library_levels<Levels>;
template <class Levels>
requires(!library_levels<Levels> &&
         requires {
             { Levels::name } -> std::convertible_to<const char*>;
         })  //
    inline constexpr bool levels_named<Levels> = [] {
        const std::string_view name = Levels::name;
        for (const char c : name)
            if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
                  c == '_'))
                return false;
        return !name.empty() && name != asymmetric::name && name != symmetric::name;
    }();

/// Has the type what quantizing calls?
template <class Levels, int Bits, class P>
concept quantizing_levels = requires(float x) {
    { Levels::template fit<Bits, P>(x, x) } -> std::same_as<stored_parameters<P>>;
    { Levels::template code<Bits>(x, x, x) } -> std::same_as<int>;
};

template <class Levels, int Bits>
constexpr bool is_affine() noexcept {
    constexpr int zero = Levels::template zero_code<Bits>;
    if (zero < 0 || zero >= 1 << Bits) return false;
    // Products of 8-bit integers with these are exact in float, and so are the sums.
    for (const float scale : {1.0f, 0.0f, 0.375f, 1024.0f})
        for (const float bias : {0.0f, -5.0f, 24.25f})
            for (int code = 0; code < 1 << Bits; ++code) {
                const float stored = Levels::has_bias ? bias : 0.0f;
                if (Levels::template value<Bits>(code, scale, stored) !=
                    scale * static_cast<float>(code - zero) + stored)
                    return false;
            }
    return true;
}
/// May attention multiply codes of these levels? False also where that is not known at compile time.
template <class Levels, int Bits>
inline constexpr bool affine_levels = false;
template <class Levels, int Bits>
requires(library_levels<Levels> || requires { typename std::bool_constant<is_affine<Levels, Bits>()>; })  //
    inline constexpr bool affine_levels<Levels, Bits> = library_levels<Levels> || is_affine<Levels, Bits>();

/// Equal for two types of one name only if their codes stand for the same values.
template <class Levels, int Bits>
std::uint64_t levels_fingerprint() {
    fingerprint_hash hash;
    hash.add(Levels::has_bias);
    for (int code = 0; code < 1 << Bits; ++code) {
        hash.add(bit_cast<std::uint32_t>(Levels::template value<Bits>(code, 1.0f, 0.0f)));
        hash.add(bit_cast<std::uint32_t>(Levels::template value<Bits>(code, 3.0f, 5.0f)));
    }
    return hash.value;
}

}}}  // namespace kvq::detail
