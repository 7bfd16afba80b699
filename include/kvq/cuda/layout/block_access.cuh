// Single numbers of a block on the device, for every scheme: the slow, certain way in and out of a page.
//
//   read     x^ of (token, channel): the code through unpack_code, its parameters through scheme::value
//            (schemes/block_layout.hpp)
//   quantize   one line of parameters and its codes, with the same functions as the CPU, so that bytes are
//              the same
//
// Contract: dequantizing equals the CPU's bit for bit; quantizing gives the CPU's bytes (core/rounding.hpp),
// also with --use_fast_math, but for numbers below 1.2e-38, which that makes zeros.
#pragma once

#include "../arch/ptx.cuh"
#include "cache_ref.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

template <class S>
KVQ_HD stored_parameters<typename S::parameter> read_parameters(const block_shape& s, const std::byte* block,
                                                                int group, int slot) noexcept {
    using P = typename S::parameter;
    const std::byte* const at = block + typename S::layout_type{}.parameter_offset(s, group, slot);
    stored_parameters<P> stored;
    stored.scale = kvq::detail::load_as<P>(at);
    if constexpr (S::levels::has_bias)
        stored.bias = kvq::detail::load_as<P>(at + typename S::layout_type{}.section_bytes(s));
    return stored;
}

/// (The scheme's own function does not know that blocks are aligned.)
template <class S>
__device__ __forceinline__ void write_parameters(const block_shape& s, std::byte* block, int group, int slot,
                                                 const stored_parameters<typename S::parameter>& stored) {
    auto* const at = reinterpret_cast<typename S::parameter*>(
        block + typename S::layout_type{}.parameter_offset(s, group, slot));
    *at = stored.scale;
    if constexpr (S::levels::has_bias)
        at[typename S::layout_type{}.section_bytes(s) / sizeof *at] = stored.bias;
}

/// x^ of one number.
template <class S>
KVQ_HD float read_value(const block_shape& s, const std::byte* block, int token, int channel) noexcept {
    if constexpr (full_precision<S>) {
        using T = typename S::value_type;
        return static_cast<float>(
            kvq::detail::load_as<T>(block + sizeof(T) * S::element(value_layout<T>(s), s, token, channel)));
    } else if constexpr (token_record_scheme<S>) {
        return S::device_value(s, block, token, channel);
    } else if constexpr (float_row_scheme<S>) {
        return S{}.device_value(s, block, token, channel);
    } else {
        return S::value(s, block, token, channel);
    }
}

/// What the codes of one number of a block mean: x^ = (scale * code + bias) * token scale.
struct code_meaning_of_number {
    float scale, bias, token_scale;

    KVQ_HD float step() const noexcept { return kvq::detail::rounded_product(scale, token_scale); }
    KVQ_HD float value(float code) const noexcept {
        return kvq::detail::rounded_product(kvq::detail::rounded_product(scale, code) + bias, token_scale);
    }
};
template <class S>
KVQ_HD code_meaning_of_number meaning_of_number(const block_shape& s, const std::byte* block, int token,
                                                int channel) noexcept {
    constexpr typename S::layout_type at{};
    const std::byte* const stored = block + at.scale_offset(s);
    const int groups = at.groups(s), slot_count = at.slot_count(s);
    constexpr bool by_token = codec<S>.per_token;
    const int line = by_token ? token : channel, group = (by_token ? channel : token) / at.cut(s).group;
    code_meaning_of_number m{S::parameters::scale(stored, groups, slot_count, group, line),
                             S::parameters::bias(stored, groups, slot_count, group, line), 1.0f};
    if constexpr (S::token_scale_type::present)
        m.token_scale =
            S::token_scale_type::token_scale(block + at.token_scale_offset(s), at.cut(s).slot(token));
    return m;
}
/// x^ of both planes (cpu/product/plane_codes.hpp).
template <class S>
KVQ_HD float read_planes(const block_shape& s, const std::byte* upper, const std::byte* lower, int token,
                         int channel) noexcept {
    const auto codes = typename S::layout_type{}.codes(s);
    const bool key = s.role == tensor::key;
    const int row = key ? token : channel, col = key ? channel : token;
    const unsigned both = unpack_code(codes, upper, row, col) << 4 | unpack_code(codes, lower, row, col);
    return meaning_of_number<S>(s, upper, token, channel)
        .value((static_cast<float>(static_cast<int>(both)) - 7.5f) * 0.0625f);
}

/// Quads of every width of a head with this plan (cache_ref::key_plan).
template <class S, int Dim>
KVQ_HD typename S::width_quads quads_of(const std::uint16_t* plan) noexcept {
    typename S::width_quads quads = S::even_quads(Dim);
    if (plan != nullptr)
        for (int w = 0; w < S::width_list::count; ++w) quads.of[w] = plan[Dim + w];
    return quads;
}

/// Does a block have parts, so that its pair reads it?
template <class Pair>
concept divides_blocks = requires(const std::byte* block) {
    Pair::number(block, 0, 0);
};

/// x^ of one number of a page. sequence: whose plan its keys have.
template <tensor Role, class Pair>
KVQ_HD float read_value(const cache_ref<Pair>& cache, int page, int head, int token, int channel,
                        [[maybe_unused]] int sequence = 0) noexcept {
    using S = scheme_of<Role, Pair>;
    constexpr block_shape shape = shape_of<Role, Pair>;
    if constexpr (is_strided<Pair>) {
        const row_address at = cache.template row<Role>(page, head, token);
        return own_scheme<Role>(cache).fixed().value_of(shape.dim, at.row, at.scales, channel);
    }
    const std::byte* const block = cache.template block<Role>(page, head);
    if constexpr (has_lower<Pair>) {
        return read_planes<S>(shape, block, cache.template lower_block<Role>(page, head), token, channel);
    } else if constexpr (divides_blocks<Pair>) {
        return Pair::number(block, token, channel);
    } else if constexpr (read_by_numbers<S>) {
        return own_scheme<Role>(cache).device_value(shape, block, token, channel);
    } else if constexpr (codec<S>.several_widths()) {
        const std::uint16_t* const plan = cache.key_plan(sequence, head);
        return S::value(shape, quads_of<S, shape.dim>(plan), block, token,
                        plan == nullptr ? channel : static_cast<int>(plan[channel]));
    } else {
        return read_value<S>(shape, block, token, channel);
    }
}

/// Neighbours of x in P below or above it, as core/float_formats.hpp has them, with hardware conversion where
/// there is one.
template <class P>
__device__ __forceinline__ P round_outside(float x, bool up) {
    if constexpr (std::is_same_v<P, float16>) {
        const float clamped = fminf(fmaxf(x, -P::max_finite), P::max_finite);
        return P::from_bits(up ? half_above(clamped) : half_below(clamped));
    } else {
        return up ? kvq::detail::round_up_to<P>(x) : kvq::detail::round_down<P>(x);
    }
}
/// Where parameters of type P saturate below it anyway, nothing.
template <class P>
__device__ __forceinline__ float bound_range(float x) {
    if constexpr (std::is_same_v<P, float16>)
        return x;
    else
        return kvq::detail::bound_range(x);
}
/// Levels::fit(lo, hi), the same bits in fewer instructions.
template <class S>
__device__ __forceinline__ stored_parameters<typename S::parameter> fit_range(float lo, float hi) {
    using P = typename S::parameter;
    using levels = typename S::levels;
    constexpr float least = 1.17549435e-38f;
    constexpr int top = levels::template top<S::code_bits>;
    if constexpr (std::is_same_v<levels, asymmetric>) {
        const P bias = round_outside<P>(bound_range<P>(lo + 0.0f), false);
        const float range = bound_range<P>(hi) - to_float(bias);
        if (!(range > 0.0f)) return {P{}, bias};
        return {round_outside<P>(fmaxf(__fdiv_rn(range, static_cast<float>(top)), least), true), bias};
    } else {
        const float largest = bound_range<P>(fmaxf(-lo, hi));
        if (!(largest > 0.0f)) return {P{}, P{}};
        constexpr float steps = static_cast<float>(top - levels::template zero_code<S::code_bits>);
        return {round_outside<P>(fmaxf(__fdiv_rn(largest, steps), least), true), P{}};
    }
}

/// 1 / scale as encoders use it.
__device__ __forceinline__ float inverse_scale(float scale) {
    return scale > 0.0f ? __fdiv_rn(1.0f, scale) : 0.0f;
}

/// Smallest and largest finite number of a set, met in order.
struct value_range {
    float lo = 0.0f, hi = 0.0f;
    bool any = false;

    KVQ_HD void add(float x) noexcept {
        if (!kvq::detail::is_finite(x)) return;
        lo = any ? kvq::detail::smaller(lo, x) : x;
        hi = any ? kvq::detail::larger(hi, x) : x;
        any = true;
    }
};

/// Sets one code of a page that other threads may be writing to. Only its own bits change.
template <class S>
__device__ __forceinline__ void store_code_shared(const block_shape& s, std::byte* block, int token,
                                                  int channel, unsigned code) {
    using planes = typename code_layout<S::code_bits>::planes;
    const auto layout = typename S::layout_type{}.codes(s);
    const int row = s.role == tensor::key ? token : channel, col = s.role == tensor::key ? channel : token;
    [[maybe_unused]] const int quad = layout.cols.slot(col) / 4;
    if constexpr (planes::count == 1 && planes::width(0) == 8) {  // a byte of its own
        block[code_byte(layout, row, col, 0)] = static_cast<std::byte>(code);
    } else {
        for (int p = 0; p < planes::count; ++p) {
            const int width = planes::width(p);
            const unsigned part = (code >> planes::shift(p)) & ((1u << width) - 1u);
            const std::size_t byte = code_byte(layout, row, col, p);
            const int shift = static_cast<int>(byte % 4) * 8 + width * (quad % planes::quads_per_word(p));
            auto* const word = reinterpret_cast<unsigned*>(block) + byte / 4;
            atomicAnd(word, ~(((1u << width) - 1u) << shift));
            atomicOr(word, part << shift);
        }
    }
}

}}}  // namespace kvq::cuda::detail
