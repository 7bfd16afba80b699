// The scheme of records of tokens in the bytes of other systems: latents of DeepSeek, index keys, vLLM's
// scales per token and head, MLX.
//
//   token_records scheme(record_layout_named("mla-656"));      make_format<simd<>>(scheme), or find_format
//
// One type for all layouts, which are values: schemes/record_layout.hpp has their bytes, formulas, contract
// and sources. Its code is portable, and attention dequantizes blocks first.
#pragma once

#include <cstring>

#include "record_layout.hpp"
#include "token_rows.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// The layout of a name. Raises std::invalid_argument if there is none.
constexpr const record_layout& record_layout_named(const char* name) {
    for (const record_layout& l : record_layouts) {
        int i = 0;
        while (name[i] != 0 && name[i] == l.name[i]) ++i;
        if (name[i] == l.name[i]) return l;
    }
    detail::fail("there are no records of the name ", name);
}

/// One tensor of one head in a page, in records of one of record_layouts.
struct token_records {
    constexpr explicit token_records(const record_layout& layout) : layout_(layout) {}

    short_text name() const { return layout_.name; }
    const record_layout& layout() const noexcept { return layout_; }
    /// Layouts of one name are one layout.
    std::uint64_t fingerprint() const noexcept { return 0; }

    std::size_t block_bytes(const block_shape& s) const noexcept {
        const auto tokens = static_cast<std::size_t>(s.tokens);
        const record_layout& l = layout_;
        const int of_token = l.row_bytes(s.dim) + l.bytes_behind(s.dim) * (l.biased() ? 2 : 1);
        return detail::round_up(tokens * static_cast<std::size_t>(of_token),
                                static_cast<std::size_t>(l.page_multiple));
    }
    /// Raises std::invalid_argument unless the layout has this head_dim.
    void check(const cache_shape& shape, tensor role) const {
        const int dim = shape.dim(role);
        if (layout_.head_dim > 0 && dim != layout_.head_dim)
            detail::fail(layout_.name, " has ", layout_.head_dim, " channels, but head_dim is ", dim);
        if (layout_.channels > 0 && (dim - layout_.wide) % layout_.channels != 0)
            detail::fail(layout_.name, " has a scale for ", layout_.channels, " channels, but head_dim is ",
                         dim);
        if (dim * layout_.bits % 8 != 0)
            detail::fail(layout_.name, " has rows of whole bytes, but head_dim is ", dim);
    }

    /// values: [tokens][dim]. Returns how many were not finite.
    std::uint32_t quantize(const block_shape& s, const block_id&, const float* values,
                           std::byte* block) const {
        std::memset(block, 0, block_bytes(s));
        std::uint32_t not_finite = 0;
        each_group(s, block,
                   [&](int first, int n, std::byte* row, int at, std::byte* scale, std::byte* bias) {
                       not_finite += quantize_group(values + first, n, row, at, scale, bias);
                   });
        const int scaled = layout_.scaled_channels(s.dim);
        for (int t = 0; t < s.tokens; ++t)
            for (int c = 0; c < layout_.wide; ++c) {
                const float x = values[std::ptrdiff_t{t} * s.dim + scaled + c];
                not_finite += !detail::is_finite(x);
                detail::store_as(wide_at(s, block, t, c), bfloat16(limited(x)).bits);
            }
        return not_finite;
    }
    void dequantize(const block_shape& s, const block_id&, const std::byte* block, float* values) const {
        each_group(s, block,
                   [&](int first, int n, const std::byte* row, int at, const std::byte* scale,
                       const std::byte* bias) {
                       const float step = stored_scale(scale), add = layout_.biased() ? half(bias) : 0.0f;
                       for (int i = 0; i < n; ++i) {
                           const float x = rounded_product(number_of(code_at(row, at + i)), step);
                           values[first + i] = layout_.biased() ? x + add : x;
                       }
                   });
        const int scaled = layout_.scaled_channels(s.dim);
        for (int t = 0; t < s.tokens; ++t)
            for (int c = 0; c < layout_.wide; ++c)
                values[std::ptrdiff_t{t} * s.dim + scaled + c] =
                    bfloat16::to_float(detail::load_as<std::uint16_t>(wide_at(s, block, t, c)));
    }

private:
    using number = record_layout::number;
    using stored = record_layout::stored;
    using rule = record_layout::rule;

    /// f(first value, channels, row of the token, first channel in it, scale, bias)
    template <class Byte, class F>
    void each_group(const block_shape& s, Byte* block, F f) const {
        const record_layout& l = layout_;
        const int n = l.group_of(s.dim), groups = l.groups(s.dim), row = l.row_bytes(s.dim);
        Byte* const behind = block + std::ptrdiff_t{s.tokens} * row;
        for (int t = 0; t < s.tokens; ++t) {
            Byte* const numbers = block + std::ptrdiff_t{t} * row;
            Byte* const scales = l.behind ? behind + std::ptrdiff_t{t} * l.bytes_behind(s.dim)
                                          : numbers + l.number_bytes(s.dim);
            for (int g = 0; g < groups; ++g) {
                Byte* scale = scales + g * l.scale_bytes();
                if (l.in_turns) {
                    const int first = t / 4 * 4, turns = detail::smaller(4, s.tokens - first);
                    scale = behind + std::ptrdiff_t{first} * l.bytes_behind(s.dim) + g * turns + (t - first);
                }
                f(t * s.dim + g * n, n, numbers, g * n, scale,
                  l.biased() ? scale + std::ptrdiff_t{s.tokens} * l.bytes_behind(s.dim) : scale);
            }
        }
    }
    template <class Byte>
    Byte* wide_at(const block_shape& s, Byte* block, int token, int channel) const {
        const int row = layout_.row_bytes(s.dim);
        return block + std::ptrdiff_t{token} * row + (row - 2 * (layout_.wide - channel));
    }

    /// Numbers whose products with a scale, rounded up, are finite.
    static float limited(float x) noexcept {
        return x != x ? 0.0f : detail::smaller(detail::larger(x, -0x1p126f), 0x1p126f);
    }
    static float half(const std::byte* from) noexcept {
        return float16::to_float(detail::load_as<std::uint16_t>(from));
    }
    static void put_half(std::byte* to, float x) noexcept {
        constexpr float most = float16::max_finite;
        detail::store_as(to, float16(detail::smaller(detail::larger(x, -most), most)).bits);
    }

    /// Codes lie one behind the other, from the lowest bit of a byte on.
    unsigned code_at(const std::byte* row, int i) const noexcept {
        const int bit = i * layout_.bits, rest = bit % 8;
        unsigned bits = static_cast<unsigned>(row[bit / 8]) >> rest;
        if (rest + layout_.bits > 8) bits |= static_cast<unsigned>(row[bit / 8 + 1]) << (8 - rest);
        return bits & ((1u << layout_.bits) - 1u);
    }
    void put_code(std::byte* row, int i, unsigned code) const noexcept {
        const int bit = i * layout_.bits, rest = bit % 8;
        const auto add = [&](int at, unsigned bits) {
            row[at] = static_cast<std::byte>(static_cast<unsigned>(row[at]) | bits);
        };
        add(bit / 8, code << rest & 255u);
        if (rest + layout_.bits > 8) add(bit / 8 + 1, code >> (8 - rest));
    }
    float number_of(unsigned code) const noexcept {
        const auto bits = static_cast<std::uint8_t>(code);
        switch (layout_.numbers) {
            case number::e4m3:
                return e4m3::to_float(bits);
            case number::e2m1:
                return e2m1::to_float(bits);
            case number::int8:
                return static_cast<float>(static_cast<std::int8_t>(bits));
            default:
                return static_cast<float>(code);
        }
    }
    float most() const noexcept {
        return layout_.numbers == number::e4m3   ? e4m3::max_finite
               : layout_.numbers == number::e2m1 ? e2m1::max_finite
                                                 : 127.0f;
    }
    float stored_scale(const std::byte* from) const noexcept {
        switch (layout_.scale) {
            case stored::fp32:
                return detail::load_as<float>(from);
            case stored::fp16:
                return half(from);
            case stored::e4m3:
                return e4m3::to_float(static_cast<std::uint8_t>(*from));
            default:
                return e8m0::to_float(static_cast<std::uint8_t>(*from));
        }
    }
    /// 2^ceil(log2(x)) of a positive normal number.
    static float power_above(float x) noexcept {
        const auto bits = detail::bit_cast<std::uint32_t>(x);
        return detail::bit_cast<float>((bits + 0x7fffffu) & 0x7f800000u);
    }

    std::uint32_t quantize_group(const float* x, int n, std::byte* row, int at, std::byte* scale,
                                 std::byte* bias) const {
        const record_layout& l = layout_;
        const detail::row_range range(x, n);
        if (l.biased()) {
            quantize_between(range, x, n, row, at, scale, bias);
            return range.not_finite;
        }
        float step = 0.0f;
        if (l.fit == rule::quotient)
            step = detail::rounded_quotient(detail::larger(limited(range.magnitude()), l.least), most());
        else if (l.fit == rule::power_of_two)
            step = power_above(
                detail::larger(detail::rounded_quotient(limited(range.magnitude()), most()), 1e-4f));
        else
            step = detail::larger(detail::rounded_quotient(limited(range.magnitude()), most()), 1e-6f);
        if (l.scale == stored::fp32)
            detail::store_as(scale, detail::bit_cast<std::uint32_t>(step));
        else if (l.scale == stored::e4m3)
            *scale = std::byte{e4m3(step).bits};
        else
            *scale = std::byte{e8m0(step).bits};
        step = stored_scale(scale);
        const float inverse = detail::inverse_or_zero(step);
        for (int i = 0; i < n && step > 0.0f; ++i) {
            const float y = limited(x[i]), q = l.fit == rule::by_inverse ? rounded_product(y, inverse)
                                                                         : detail::rounded_quotient(y, step);
            put_code(row, at + i, code_of(q));
        }
        return range.not_finite;
    }
    unsigned code_of(float q) const noexcept {
        switch (layout_.numbers) {
            case number::e4m3:
                return e4m3::from_float(q);
            case number::e2m1:
                return e2m1::from_float(q);
            default:
                return static_cast<std::uint8_t>(
                    static_cast<std::int8_t>(detail::smaller(detail::larger(q, -128.0f), 127.0f)));
        }
    }
    /// MLX's rule.
    void quantize_between(const detail::row_range& range, const float* x, int n, std::byte* row, int at,
                          std::byte* scale, std::byte* bias) const {
        const auto top = static_cast<float>((1u << layout_.bits) - 1u);
        const float low = limited(range.low), high = limited(range.high);
        const bool from_low = (low < 0.0f ? -low : low) > (high < 0.0f ? -high : high);
        float step = detail::larger(detail::rounded_quotient(high - low, top), 1e-7f);
        if (!from_low) step = -step;
        const float edge = from_low ? low : high, steps = nearest(detail::rounded_quotient(edge, step));
        const float start = steps == 0.0f ? 0.0f : edge;
        if (steps != 0.0f) step = detail::rounded_quotient(edge, steps);
        put_half(scale, step);
        put_half(bias, start);
        for (int i = 0; i < n; ++i) {
            const float q = nearest(detail::rounded_quotient(limited(x[i]) - start, step));
            put_code(row, at + i, static_cast<unsigned>(q > 0.0f ? detail::smaller(q, top) : 0.0f));
        }
    }
    /// Nearest integer, ties to even.
    static float nearest(float q) noexcept {
        const float magnitude = q < 0.0f ? -q : q;
        if (!(magnitude < 0x1p22f)) return q;
        const auto rounded = static_cast<float>(detail::round_half_even(magnitude));
        return q < 0.0f ? -rounded : rounded;
    }

    record_layout layout_;
};

static_assert(key_scheme<token_records> && value_scheme<token_records>);

}}  // namespace kvq
