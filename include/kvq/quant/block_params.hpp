// Storage of scales and biases, and of token scales, in a block.
//
//   block_parameters<params<P>>          [scales][biases], each [group][slot] of type P, padded to 16 bytes
//   block_parameters<packed_params<P>>   the same without padding
//   block_parameters<byte_params>        one byte each (quant/byte_params.hpp), then 3 bfloat16 per group:
//                                        scale unit, first bias, bias step
//   token_scales<byte_params>            one byte per token: 31/16 for the token with the largest token
//                                        scale, down to 2^-15
//   token_scales<params<P>>              one P per token
//
// Groups and slots: schemes/block_layout.hpp; token scales are indexed by token slot. Functions that store
// return the stored parameters for the wanted ones; codes are then computed from the stored ones. Order for a
// group: `scale_line` or `bias_line` from the range of the wanted parameters, written by `store_line`; then
// one scale or bias after the other.
#pragma once

#include "../core/text.hpp"
#include "byte_params.hpp"
#include "params.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

namespace detail {

/// Nearest value of P, clamped to its largest finite value.
template <class P>
KVQ_HD P round_nearest(float x) noexcept {
    return P(larger(-max_finite<P>, smaller(x, max_finite<P>)));
}

}  // namespace detail

template <class Params>
struct block_parameters;

namespace detail {

/// Parameters of type P; scales and biases are each padded to a multiple of `Padding` bytes.
template <class P, std::size_t Padding>
struct parameters_of_type {
    using stored = typename params<P>::type;
    static short_text name() { return float_name<P>; }
    /// Bytes from a scale to its bias.
    KVQ_HD static constexpr std::size_t section_bytes(int groups, int slot_count) noexcept {
        return round_up(sizeof(P) * static_cast<std::size_t>(groups * slot_count), Padding);
    }
    KVQ_HD static constexpr std::size_t bytes(int groups, int slot_count) noexcept {
        return 2 * section_bytes(groups, slot_count);
    }
    struct nothing {};
    KVQ_HD static nothing scale_line(float, parameter_rounding = {}) noexcept { return {}; }
    KVQ_HD static nothing bias_line(float, float, parameter_rounding = {}) noexcept { return {}; }
    KVQ_HD static void store_line(std::byte*, int, int, int, nothing) noexcept {}
    KVQ_HD static float store_scale(std::byte* at, int, int slot_count, int group, int slot, float scale,
                                    nothing, parameter_rounding rounding) noexcept {
        const float wanted = scale > 0.0f ? larger(scale, 1.17549435e-38f) : 0.0f;
        const P p =
            rounding == parameter_rounding::outside ? round_up_to<P>(wanted) : round_nearest<P>(wanted);
        store_as(at + offset(slot_count, group, slot), p);
        return static_cast<float>(p);
    }
    KVQ_HD static float store_bias(std::byte* at, int groups, int slot_count, int group, int slot, float bias,
                                   nothing, parameter_rounding rounding) noexcept {
        const float wanted = bias + 0.0f;
        const P p =
            rounding == parameter_rounding::outside ? round_down<P>(wanted) : round_nearest<P>(wanted);
        store_as(at + section_bytes(groups, slot_count) + offset(slot_count, group, slot), p);
        return static_cast<float>(p);
    }
    static void store_scales(std::byte* at, int groups, int slot_count, int group, float* scales, int n,
                             parameter_rounding rounding) noexcept {
        for (int i = 0; i < n; ++i)
            scales[i] = store_scale(at, groups, slot_count, group, i, scales[i], {}, rounding);
    }
    static void store_biases(std::byte* at, int groups, int slot_count, int group, float* biases, int n,
                             parameter_rounding rounding) noexcept {
        for (int i = 0; i < n; ++i)
            biases[i] = store_bias(at, groups, slot_count, group, i, biases[i], {}, rounding);
    }
    /// Scale and bias of one slot.
    KVQ_HD static float scale(const std::byte* at, int, int slot_count, int group, int slot) noexcept {
        return static_cast<float>(load_as<P>(at + offset(slot_count, group, slot)));
    }
    KVQ_HD static float bias(const std::byte* at, int groups, int slot_count, int group, int slot) noexcept {
        return scale(at + section_bytes(groups, slot_count), groups, slot_count, group, slot);
    }
    template <class Backend>
    static void load_scales(const std::byte* at, int, int slot_count, int group, int first, int n, float* out,
                            const float* factor = nullptr) {
        Backend::template load_floats<P>(at + offset(slot_count, group, first), n, out);
        if (factor)
            for (int i = 0; i < n; ++i) out[i] *= factor[i];
    }
    template <class Backend>
    static void load_biases(const std::byte* at, int groups, int slot_count, int group, int first, int n,
                            float* out) {
        Backend::template load_floats<P>(
            at + section_bytes(groups, slot_count) + offset(slot_count, group, first), n, out);
    }

private:
    KVQ_HD static constexpr std::size_t offset(int slot_count, int group, int slot) noexcept {
        return sizeof(P) * static_cast<std::size_t>(group * slot_count + slot);
    }
};

}  // namespace detail

template <class P>
struct block_parameters<params<P>> : detail::parameters_of_type<P, 16> {};
template <class P>
struct block_parameters<packed_params<P>> : detail::parameters_of_type<P, 1> {};

template <>
struct block_parameters<byte_params> {
    using stored = byte_params;
    static short_text name() { return byte_params::name; }
    KVQ_HD static constexpr std::size_t section_bytes(int groups, int slot_count) noexcept {
        return static_cast<std::size_t>(groups) * static_cast<std::size_t>(slot_count);
    }
    KVQ_HD static constexpr std::size_t bytes(int groups, int slot_count) noexcept {
        return static_cast<std::size_t>(2 * groups * slot_count) +
               shared_bytes * static_cast<std::size_t>(groups);
    }
    /// The scale unit of a group, for scales up to `largest`.
    KVQ_HD static bfloat16 scale_line(float largest,
                                      parameter_rounding rounding = parameter_rounding::nearest) noexcept {
        return rounding == parameter_rounding::settled ? detail::scale_float::settled_unit_for(largest)
                                                       : detail::scale_float::unit_for(largest);
    }
    KVQ_HD static detail::bias_line bias_line(
        float lo, float hi, parameter_rounding rounding = parameter_rounding::nearest) noexcept {
        return rounding == parameter_rounding::settled ? detail::bias_line::settled(lo, hi)
                                                       : detail::bias_line::through(lo, hi);
    }
    KVQ_HD static void store_line(std::byte* at, int groups, int slot_count, int group,
                                  bfloat16 unit) noexcept {
        detail::store_as(shared(at, groups, slot_count, group), unit);
    }
    KVQ_HD static void store_line(std::byte* at, int groups, int slot_count, int group,
                                  const detail::bias_line& line) noexcept {
        detail::store_as(shared(at, groups, slot_count, group) + 2, line.first);
        detail::store_as(shared(at, groups, slot_count, group) + 4, line.step);
    }
    KVQ_HD static float store_scale(std::byte* at, int, int slot_count, int group, int slot, float scale,
                                    bfloat16 unit, parameter_rounding rounding) noexcept {
        const unsigned code = detail::scale_float::code(scale, static_cast<float>(unit), rounding);
        at[group * slot_count + slot] = static_cast<std::byte>(code);
        return static_cast<float>(unit) * detail::scale_float::value(code);
    }
    KVQ_HD static float store_bias(std::byte* at, int groups, int slot_count, int group, int slot, float bias,
                                   const detail::bias_line& line, parameter_rounding rounding) noexcept {
        const unsigned code = line.code(bias, rounding);
        at[(groups + group) * slot_count + slot] = static_cast<std::byte>(code);
        return line.at(code);
    }
    static void store_scales(std::byte* at, int groups, int slot_count, int group, float* scales, int n,
                             parameter_rounding rounding) noexcept {
        float largest = 0.0f;
        for (int i = 0; i < n; ++i) largest = detail::larger(largest, scales[i]);
        const bfloat16 unit = scale_line(largest, rounding);
        store_line(at, groups, slot_count, group, unit);
        for (int i = 0; i < n; ++i)
            scales[i] = store_scale(at, groups, slot_count, group, i, scales[i], unit, rounding);
    }
    static void store_biases(std::byte* at, int groups, int slot_count, int group, float* biases, int n,
                             parameter_rounding rounding) noexcept {
        float lo = n > 0 ? biases[0] : 0.0f, hi = lo;
        for (int i = 1; i < n; ++i) {
            lo = detail::smaller(lo, biases[i]);
            hi = detail::larger(hi, biases[i]);
        }
        const auto line = bias_line(lo, hi, rounding);
        store_line(at, groups, slot_count, group, line);
        for (int i = 0; i < n; ++i)
            biases[i] = store_bias(at, groups, slot_count, group, i, biases[i], line, rounding);
    }
    /// Bytes of the parameters that all channels of a group share.
    static constexpr std::size_t shared_bytes = 6;
    template <class Byte>
    KVQ_HD static Byte* shared(Byte* at, int groups, int slot_count, int group) noexcept {
        return at + 2 * groups * slot_count + static_cast<int>(shared_bytes) * group;
    }
    /// Scale and bias of one slot.
    KVQ_HD static float scale(const std::byte* at, int groups, int slot_count, int group, int slot) noexcept {
        return static_cast<float>(detail::load_as<bfloat16>(shared(at, groups, slot_count, group))) *
               detail::scale_float::value(static_cast<unsigned>(at[group * slot_count + slot]));
    }
    KVQ_HD static float bias(const std::byte* at, int groups, int slot_count, int group, int slot) noexcept {
        const std::byte* const line = shared(at, groups, slot_count, group) + 2;
        return detail::bias_line{detail::load_as<bfloat16>(line), detail::load_as<bfloat16>(line + 2)}.at(
            static_cast<unsigned>(at[(groups + group) * slot_count + slot]));
    }
    template <class Backend>
    static void load_scales(const std::byte* at, int groups, int slot_count, int group, int first, int n,
                            float* out, const float* factor = nullptr) {
        const float unit = detail::load_as<bfloat16>(shared(at, groups, slot_count, group));
        const std::byte* const codes = at + group * slot_count + first;
        const auto scale = [&](int i) {
            return unit * detail::scale_float::value(static_cast<unsigned>(codes[i]));
        };
        if (factor)
            for (int i = 0; i < n; ++i) out[i] = scale(i) * factor[i];
        else
            for (int i = 0; i < n; ++i) out[i] = scale(i);
    }
    template <class Backend>
    static void load_biases(const std::byte* at, int groups, int slot_count, int group, int first, int n,
                            float* out) {
        const detail::bias_line line{detail::load_as<bfloat16>(shared(at, groups, slot_count, group) + 2),
                                     detail::load_as<bfloat16>(shared(at, groups, slot_count, group) + 4)};
        const std::byte* const codes = at + (groups + group) * slot_count + first;
        const float begin = line.first, step = line.step;
        for (int i = 0; i < n; ++i) out[i] = begin + step * static_cast<float>(static_cast<int>(codes[i]));
    }
};

/// No token scales: parameters of channels alone.
struct no_token_scales {
    static constexpr bool present = false;
    static short_text name() { return ""; }
    KVQ_HD static constexpr std::size_t bytes(int) noexcept { return 0; }
};

/// A scale per token, stored in the type that Params gives.
template <class Params>
struct token_scales;

namespace detail {
template <class F>
inline constexpr bool is_token_scales = false;
template <>
inline constexpr bool is_token_scales<no_token_scales> = true;
template <class Params>
inline constexpr bool is_token_scales<token_scales<Params>> = true;
}  // namespace detail

/// Token scales of a scheme: no_token_scales or token_scales<...>. Kernels know no others.
template <class F>
concept token_scale_policy = detail::is_token_scales<F>;

template <>
struct token_scales<byte_params> {
    static constexpr bool present = true;
    static short_text name() { return "-dual"; }
    KVQ_HD static constexpr std::size_t bytes(int slot_count) noexcept {
        return static_cast<std::size_t>(slot_count);
    }
    KVQ_HD static void store(std::byte* at, int first, float* scales, int n) noexcept {
        for (int i = 0; i < n; ++i) {
            const unsigned code =
                detail::token_scale_float::code(scales[i], 1.0f, parameter_rounding::nearest);
            at[first + i] = static_cast<std::byte>(code);
            scales[i] = detail::token_scale_float::value(code);
        }
    }
    KVQ_HD static float token_scale(const std::byte* at, int slot) noexcept {
        return detail::token_scale_float::value(static_cast<unsigned>(at[slot]));
    }
    template <class Backend>
    static void load(const std::byte* at, int n, float* out) {
        for (int i = 0; i < n; ++i) out[i] = detail::token_scale_float::value(static_cast<unsigned>(at[i]));
    }
};

template <class P>
struct token_scales<params<P>> {
    static constexpr bool present = true;
    static short_text name() { return short_text("-dual-") + float_name<P>; }
    KVQ_HD static constexpr std::size_t bytes(int slot_count) noexcept {
        return sizeof(P) * static_cast<std::size_t>(slot_count);
    }
    KVQ_HD static void store(std::byte* at, int first, float* scales, int n) noexcept {
        for (int i = 0; i < n; ++i) {
            const P p(detail::larger(scales[i], detail::token_scale_float::smallest));
            detail::store_as(at + sizeof(P) * static_cast<std::size_t>(first + i), p);
            scales[i] = static_cast<float>(p);
        }
    }
    KVQ_HD static float token_scale(const std::byte* at, int slot) noexcept {
        return static_cast<float>(detail::load_as<P>(at + sizeof(P) * static_cast<std::size_t>(slot)));
    }
    template <class Backend>
    static void load(const std::byte* at, int n, float* out) {
        Backend::template load_floats<P>(at, n, out);
    }
};

template <class Params>
struct block_parameters : block_parameters<params<float16>> {
    static_assert(std::is_void_v<Params>,
                  "kvq::scheme: parameters are params<P>, packed_params<P> or byte_params: params<float16>, "
                  "not float16");
};

}}  // namespace kvq
