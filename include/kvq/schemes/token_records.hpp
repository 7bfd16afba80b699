// The scheme of records of tokens in the bytes of other systems: latents of DeepSeek, index keys, vLLM's
// scales per token and head, MLX.
//
//   token_records scheme(record_layout_named("mla-656"));      make_format<simd<>>(scheme), or find_format
//
// One type for all layouts, which are values: schemes/record_layout.hpp has their bytes, formulas, contract
// and sources. Its code is portable, and attention dequantizes blocks first, or records where their owner
// keeps them (attention/attend_rows.hpp).
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

    KVQ_HD constexpr std::size_t block_bytes(const block_shape& s) const noexcept {
        const auto tokens = static_cast<std::size_t>(s.tokens);
        return detail::round_up(tokens * static_cast<std::size_t>(layout_.token_bytes(s.dim)),
                                static_cast<std::size_t>(layout_.page_multiple));
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
        const int n = layout_.group_of(s.dim), scaled = layout_.scaled_channels(s.dim);
        for (int t = 0; t < s.tokens; ++t) {
            const float* const x = values + std::ptrdiff_t{t} * s.dim;
            for (int g = 0; g < layout_.groups(s.dim); ++g)
                not_finite += quantize_group(s, x + g * n, block, t, g);
            not_finite += store_wide(s, x + scaled, block, t);
        }
        return not_finite;
    }
    void dequantize(const block_shape& s, const block_id&, const std::byte* block, float* values) const {
        const record_layout& l = layout_;
        const int row = l.row_bytes(s.dim);
        for (int t = 0; t < s.tokens; ++t) {
            const std::byte* const scales = scale_at(s, block, t, 0);
            read(block + std::ptrdiff_t{t} * row, scales, bias_at(s, scales),
                 l.in_turns ? detail::smaller(4, s.tokens - t / 4 * 4) : l.scale_bytes(), s.dim,
                 values + std::ptrdiff_t{t} * s.dim);
        }
    }
    /// x^ of tokens [from, from + tokens) where their owner keeps them. False: a scale or bias is NaN or
    /// infinite.
    bool read(const row_place& of, int dim, int from, int tokens, float* values) const {
        const record_layout& l = layout_;
        const row_bytes bytes = l.bytes(dim);
        const int turns = bytes.together;
        const std::ptrdiff_t group = of.group_stride != 0 ? of.group_stride : bytes.group;
        bool finite = true;
        for (int t = from; t < from + tokens; ++t, values += dim) {
            const std::ptrdiff_t block = of.blocks ? of.blocks[t / of.block_tokens] : 0,
                                 in = of.blocks ? t % of.block_tokens : t;
            const std::byte* const row = of.rows + block * of.block_stride + in * of.row_stride;
            const std::ptrdiff_t scale =
                block * of.scale_block_stride + in / turns * turns * of.scale_stride + in % turns;
            if (l.behind)
                finite = read(row, of.scales + scale, l.biased() ? of.biases + scale : nullptr, group, dim,
                              values) &&
                         finite;
            else
                finite =
                    read(row, row + l.number_bytes(dim), nullptr, l.scale_bytes(), dim, values) && finite;
        }
        return finite;
    }

    /// One number, as dequantize() gives it: what kernels of a GPU read (cuda/layout/cache_ref.cuh).
    KVQ_HD KVQ_INLINE float device_value(const block_shape& s, const std::byte* block, int token,
                                         int channel) const noexcept {
        const record_layout& l = layout_;
        const int scaled = l.scaled_channels(s.dim);
        if (channel >= scaled)
            return bfloat16::to_float(
                detail::load_as<std::uint16_t>(wide_at(s, block, token, channel - scaled)));
        const std::byte* const scale = scale_at(s, block, token, channel / l.group_of(s.dim));
        const grid of(*this, scale, bias_at(s, scale));
        return of.value(number_of(code_at(block + std::ptrdiff_t{token} * l.row_bytes(s.dim), channel)),
                        l.biased());
    }

    /// Writes the channels of group `group` of a token, x[0] being the first of them. Returns how many were
    /// not finite.
    template <class X>
    KVQ_HD KVQ_INLINE std::uint32_t quantize_group(const block_shape& s, const X& x, std::byte* block,
                                                   int token, int group) const {
        const record_layout& l = layout_;
        const int n = l.group_of(s.dim);
        std::byte* const scale = scale_at(s, block, token, group);
        const detail::row_range range(x, n);
        code_writer codes(block + std::ptrdiff_t{token} * l.row_bytes(s.dim) + group * n * l.bits / 8,
                          l.bits);
        if (l.biased()) {
            quantize_between(range, x, n, codes, scale, bias_at(s, scale));
            return range.not_finite;
        }
        if (l.fit == rule::zero_point) {
            quantize_from_zero(range, x, n, codes, scale);
            return range.not_finite;
        }
        float step = 0.0f;
        if (l.fit == rule::quotient)
            step = detail::rounded_quotient(detail::larger(limited(range.magnitude()), l.least), most());
        else if (l.fit == rule::power_of_two)
            step = power_above(
                detail::larger(detail::rounded_quotient(limited(range.magnitude()), most()), 1e-4f));
        else if (l.fit == rule::halves_up)
            step = power_above(
                detail::larger(detail::rounded_quotient(limited(range.magnitude()), most()), l.least));
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
        for (int i = 0; i < n; ++i) {
            const float y = limited(x[i]);
            codes.put(!(step > 0.0f)              ? 0
                      : l.fit == rule::halves_up  ? e2m1_halves_up(detail::rounded_quotient(y, step))
                      : l.fit == rule::by_inverse ? code_of(rounded_product(y, inverse))
                                                  : code_of(detail::rounded_quotient(y, step)));
        }
        return range.not_finite;
    }
    /// Writes the wide channels of a token, and what pads its scales.
    template <class X>
    KVQ_HD KVQ_INLINE std::uint32_t store_wide(const block_shape& s, const X& x, std::byte* block,
                                               int token) const {
        std::uint32_t not_finite = 0;
        for (int c = 0; c < layout_.wide; ++c) {
            not_finite += !detail::is_finite(x[c]);
            detail::store_as(wide_at(s, block, token, c), bfloat16(limited(x[c])).bits);
        }
        for (int i = 0; i < layout_.padding; ++i)
            scale_at(s, block, token, layout_.groups(s.dim))[i] = std::byte{0};
        return not_finite;
    }

protected:
    KVQ_HD KVQ_INLINE static constexpr token_records of(const record_layout& layout) {
        return {layout, nullptr};
    }

private:
    KVQ_HD KVQ_INLINE constexpr token_records(const record_layout& layout, std::nullptr_t)
        : layout_(layout) {}

    using number = record_layout::number;
    using stored = record_layout::stored;
    using rule = record_layout::rule;
    static constexpr std::uint32_t zero_bits = 15;
    template <int Codes>
    struct code_table {
        float of[Codes];
    };
    template <class Number, int Codes>
    static constexpr code_table<Codes> numbers_of_codes = [] {
        code_table<Codes> table{};
        for (int i = 0; i < Codes; ++i) table.of[i] = Number::to_float(static_cast<std::uint8_t>(i));
        return table;
    }();

    template <class Byte>
    KVQ_HD KVQ_INLINE Byte* scale_at(const block_shape& s, Byte* block, int token, int group) const noexcept {
        const record_layout& l = layout_;
        const int row = l.row_bytes(s.dim);
        if (!l.behind)
            return block + std::ptrdiff_t{token} * row + l.number_bytes(s.dim) + group * l.scale_bytes();
        Byte* const behind = block + std::ptrdiff_t{s.tokens} * row;
        if (!l.in_turns)
            return behind + std::ptrdiff_t{token} * l.bytes_behind(s.dim) + group * l.scale_bytes();
        const int first = token / 4 * 4, turns = detail::smaller(4, s.tokens - first);
        return behind + std::ptrdiff_t{first} * l.bytes_behind(s.dim) + group * turns + (token - first);
    }
    template <class Byte>
    KVQ_HD KVQ_INLINE Byte* bias_at(const block_shape& s, Byte* scale) const noexcept {
        return scale + std::ptrdiff_t{s.tokens} * layout_.bytes_behind(s.dim);
    }
    /// What numbers of a group stand for.
    struct grid {
        float step, zero = 0.0f, add = 0.0f;

        KVQ_HD KVQ_INLINE grid(const token_records& r, const std::byte* scale, const std::byte* bias) noexcept
            : step(r.stored_scale(scale)) {
            if (r.layout_.biased()) add = r.half(bias);
            if (r.layout_.fit == rule::zero_point)
                zero = static_cast<float>(detail::load_as<std::uint32_t>(scale) & zero_bits);
        }
        KVQ_HD KVQ_INLINE float value(float number, bool biased) const noexcept {
            const float x = rounded_product(number - zero, step);
            return biased ? x + add : x;
        }
    };
    /// x^ of a token. False: a scale or bias is NaN or infinite.
    bool read(const std::byte* row, const std::byte* scales, const std::byte* biases,
              std::ptrdiff_t group_stride, int dim, float* values) const {
        const record_layout& l = layout_;
        const int n = l.group_of(dim), scaled = l.scaled_channels(dim);
        bool finite = true;
        const auto groups = [&](const auto& number_at) {
            const std::byte *scale = scales, *bias = biases;
            for (int g = 0; g < l.groups(dim); ++g, scale += group_stride) {
                const grid of(*this, scale, bias);
                if (l.biased()) bias += group_stride;
                finite = finite && detail::is_finite(of.step) && detail::is_finite(of.add);
                if (l.biased())
                    for (int i = g * n; i < (g + 1) * n; ++i) values[i] = of.value(number_at(i), true);
                else
                    for (int i = g * n; i < (g + 1) * n; ++i) values[i] = (number_at(i) - of.zero) * of.step;
            }
        };
        const auto* const bytes = reinterpret_cast<const std::uint8_t*>(row);
        switch (l.numbers) {
            case number::e4m3:
                groups([&](int i) { return numbers_of_codes<e4m3, 256>.of[bytes[i]]; });
                break;
            case number::e2m1:
                groups([&](int i) { return numbers_of_codes<e2m1, 16>.of[bytes[i / 2] >> i % 2 * 4 & 15]; });
                break;
            case number::int8:
                groups([&](int i) { return static_cast<float>(static_cast<std::int8_t>(bytes[i])); });
                break;
            default:
                groups([&](int i) { return static_cast<float>(code_at(row, i)); });
        }
        const std::byte* const wide = row + (l.row_bytes(dim) - 2 * l.wide);
        for (int c = 0; c < l.wide; ++c)
            values[scaled + c] = bfloat16::to_float(detail::load_as<std::uint16_t>(wide + 2 * c));
        return finite;
    }
    template <class Byte>
    KVQ_HD KVQ_INLINE Byte* wide_at(const block_shape& s, Byte* block, int token, int channel) const {
        const int row = layout_.row_bytes(s.dim);
        return block + std::ptrdiff_t{token} * row + (row - 2 * (layout_.wide - channel));
    }

    /// Numbers whose products with a scale, rounded up, are finite.
    KVQ_HD KVQ_INLINE static float limited(float x) noexcept {
        return x != x ? 0.0f : detail::smaller(detail::larger(x, -0x1p126f), 0x1p126f);
    }
    /// Scales and biases of 16 bits.
    KVQ_HD KVQ_INLINE float half(const std::byte* from) const noexcept {
        const auto bits = detail::load_as<std::uint16_t>(from);
        return layout_.scale == stored::bf16 ? bfloat16::to_float(bits) : float16::to_float(bits);
    }
    KVQ_HD KVQ_INLINE void put_half(std::byte* to, float x) const noexcept {
        if (layout_.scale == stored::bf16) {
            detail::store_as(to, bfloat16(x).bits);
            return;
        }
        constexpr float most = float16::max_finite;
        detail::store_as(to, float16(detail::smaller(detail::larger(x, -most), most)).bits);
    }

    /// Codes lie one behind the other, from the lowest bit of a byte on.
    KVQ_HD KVQ_INLINE unsigned code_at(const std::byte* row, int i) const noexcept {
        const int bit = i * layout_.bits, rest = bit % 8;
        unsigned bits = static_cast<unsigned>(row[bit / 8]) >> rest;
        if (rest + layout_.bits > 8) bits |= static_cast<unsigned>(row[bit / 8 + 1]) << (8 - rest);
        return bits & ((1u << layout_.bits) - 1u);
    }
    /// The codes of a group, which are whole bytes.
    class code_writer {
    public:
        KVQ_HD KVQ_INLINE code_writer(std::byte* to, int bits) noexcept : to_(to), bits_(bits) {}
        KVQ_HD KVQ_INLINE void put(unsigned code) noexcept {
            waiting_ |= code << filled_;
            for (filled_ += bits_; filled_ >= 8; filled_ -= 8, waiting_ >>= 8)
                *to_++ = static_cast<std::byte>(waiting_ & 255u);
        }

    private:
        std::byte* to_;
        int bits_, filled_ = 0;
        unsigned waiting_ = 0;
    };
    KVQ_HD KVQ_INLINE float number_of(unsigned code) const noexcept {
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
    KVQ_HD KVQ_INLINE float most() const noexcept {
        return layout_.numbers == number::e4m3   ? e4m3::max_finite
               : layout_.numbers == number::e2m1 ? e2m1::max_finite
                                                 : 127.0f;
    }
    KVQ_HD KVQ_INLINE float stored_scale(const std::byte* from) const noexcept {
        switch (layout_.scale) {
            case stored::fp32:
                return layout_.fit == rule::zero_point
                           ? detail::bit_cast<float>(detail::load_as<std::uint32_t>(from) & ~zero_bits)
                           : detail::load_as<float>(from);
            case stored::fp16:
            case stored::bf16:
                return half(from);
            case stored::e4m3:
                return e4m3::to_float(static_cast<std::uint8_t>(*from));
            default:
                return e8m0::to_float(static_cast<std::uint8_t>(*from));
        }
    }
    /// 2^ceil(log2(x)) of a positive normal number.
    KVQ_HD KVQ_INLINE static float power_above(float x) noexcept {
        const auto bits = detail::bit_cast<std::uint32_t>(x);
        return detail::bit_cast<float>((bits + 0x7fffffu) & 0x7f800000u);
    }

    KVQ_HD KVQ_INLINE unsigned code_of(float q) const noexcept {
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
    KVQ_HD KVQ_INLINE static unsigned e2m1_halves_up(float q) noexcept {
        const float size = q < 0.0f ? -q : q;
        unsigned code = q < 0.0f ? 8u : 0u;
        for (unsigned i = 0; i < 7; ++i)  // the middles of neighbours
            code += size >= (e2m1::to_float(static_cast<std::uint8_t>(i)) +
                             e2m1::to_float(static_cast<std::uint8_t>(i + 1))) /
                                2.0f;
        return code;
    }
    /// MLX's rule.
    template <class X>
    KVQ_HD KVQ_INLINE void quantize_between(const detail::row_range& range, const X& x, int n,
                                            code_writer& codes, std::byte* scale, std::byte* bias) const {
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
            codes.put(static_cast<unsigned>(q > 0.0f ? detail::smaller(q, top) : 0.0f));
        }
    }
    /// vLLM's rule of int4: halves away from zero.
    template <class X>
    KVQ_HD KVQ_INLINE void quantize_from_zero(const detail::row_range& range, const X& x, int n,
                                              code_writer& codes, std::byte* scale) const {
        const auto code = [](float q) {
            return static_cast<unsigned>(q > 0.0f ? detail::smaller(q + 0.5f, 15.0f) : 0.0f);
        };
        const float low = limited(range.low), high = limited(range.high);
        const float step = detail::larger(detail::rounded_quotient(high - low, 15.0f), layout_.least),
                    inverse = detail::rounded_inverse(step);
        const unsigned zero = code(detail::rounded_quotient(-low, step));
        for (int i = 0; i < n; ++i)
            codes.put(code(rounded_product(limited(x[i]), inverse) + static_cast<float>(zero)));
        detail::store_as(scale, (detail::bit_cast<std::uint32_t>(step) & ~zero_bits) | zero);
    }
    /// Nearest integer, ties to even.
    KVQ_HD KVQ_INLINE static float nearest(float q) noexcept {
        const float magnitude = q < 0.0f ? -q : q;
        if (!(magnitude < 0x1p22f)) return q;
        const auto rounded = static_cast<float>(detail::round_half_even(magnitude));
        return q < 0.0f ? -rounded : rounded;
    }

    record_layout layout_;
};

static_assert(key_scheme<token_records> && value_scheme<token_records>);

/// The number of the layout of a name in record_layouts. Raises as record_layout_named.
constexpr int record_layout_number(const char* name) {
    const record_layout& named = record_layout_named(name);
    int number = 0;
    while (&record_layouts[number] != &named) ++number;
    return number;
}
/// The same where the type says which layout, number `Layout` of record_layouts: for kernels of a GPU.
template <int Layout>
struct records_of : token_records {
    static constexpr record_layout known = record_layouts[Layout];

    constexpr records_of() : token_records(record_layouts[Layout]) {}

    KVQ_HD KVQ_INLINE static constexpr record_layout fixed_layout() noexcept {
        return {nullptr,       known.head_dim,      known.numbers, known.bits,   known.channels,
                known.scale,   known.fit,           known.least,   known.behind, known.wide,
                known.padding, known.page_multiple, known.in_turns};
    }
    /// The same scheme, of which compilers of kernels know the layout.
    KVQ_HD KVQ_INLINE static constexpr token_records fixed() noexcept { return of(fixed_layout()); }
    KVQ_HD KVQ_INLINE static constexpr std::size_t block_bytes(const block_shape& s) noexcept {
        return fixed().block_bytes(s);
    }
    KVQ_HD KVQ_INLINE static float device_value(const block_shape& s, const std::byte* block, int token,
                                                int channel) noexcept {
        return fixed().device_value(s, block, token, channel);
    }
};

}}  // namespace kvq
