// Bits of a code and type of the parameters: the two smallest policies of a scheme.
//
//   scheme<bits<3>, asymmetric, per_channel<32>, params<bfloat16>>     3-bit codes; scales and biases in
//                                                                      bfloat16
//
// bits<B>: 1 to 8. params<P>: float16, bfloat16, float, or a type of your own that is made from a float and
// read back as one. packed_params<P>: the same without padding between scales and biases, as the presets have
// it. byte_params: quant/byte_params.hpp.
// Contract: P is trivially copyable, because its bytes are stored in pages. A type of your own has a `name`,
// which is part of the scheme's name: two types of one size are two formats, also in files.
#pragma once

#include <concepts>
#include <cstddef>
#include <string_view>
#include <type_traits>

#include "../core/float_formats.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// Width of a code, 1 to 8 bits.
template <int Bits>
struct bits {
    static_assert(Bits >= 1 && Bits <= 8, "kvq::bits<B>: a code has 1 to 8 bits");
    static constexpr int value = Bits;
    static constexpr bool several_widths = false;
};

/// A type that can store a scale or bias: trivially copyable, constructible from float and convertible to
/// float; with a name such as `static constexpr const char* name = "log8"` (letters and digits) if it is not
/// a float_format.
template <class P>
concept parameter_type = std::is_trivially_copyable_v<P> && std::is_default_constructible_v<P> &&
    std::constructible_from<P, float> && std::convertible_to<P, float> &&(float_format<P> || requires {
        { P::name } -> std::convertible_to<const char*>;
    });

namespace detail {
/// Letters and digits, and not the name of a float_format.
constexpr bool is_type_name(std::string_view name) noexcept {
    for (const char c : name)
        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9'))) return false;
    return !name.empty() && name != "fp32" && name != "fp16" && name != "bf16";
}
template <class P>
inline constexpr bool has_own_name = true;
template <parameter_type P>
requires(!float_format<P>) inline constexpr bool has_own_name<P> = is_type_name(P::name);
}  // namespace detail

/// Scales and biases are stored as `P`: float16, bfloat16, float, or a type of your own.
template <class P>
struct params {
    using type = P;
    static_assert(parameter_type<P>,
                  "kvq::params<P>: P must be trivially copyable, constructible from float and convertible to "
                  "float, and have a name (static constexpr const char*)");
    static_assert(
        detail::has_own_name<P>,
        "kvq::params<P>: the name of P has letters and digits alone, and is not fp32, fp16 or bf16");
};

/// The same without padding between scales and biases.
template <class P>
struct packed_params : params<P> {};

/// Are parameters stored as params<P>, which every granularity and all levels take?
template <class Params>
inline constexpr bool plain_params = false;
template <class P>
inline constexpr bool plain_params<params<P>> = true;

namespace detail {

/// Parameter loads for backends without vectors, and for functions that have no backend.
struct plain_loads {
    template <class P>
    static void load_floats(const std::byte* from, int n, float* out) {
        for (int i = 0; i < n; ++i)
            out[i] = static_cast<float>(load_as<P>(from + sizeof(P) * static_cast<std::size_t>(i)));
    }
};

}  // namespace detail
}}  // namespace kvq
