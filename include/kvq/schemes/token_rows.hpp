// The scheme of rows of tokens in the bytes of other systems: FP8, NVFP4, MX, ggml.
//
//   token_rows scheme(row_layouts[0], tensor_scale);      make_format<simd<>>(scheme), or find_format("fp8")
//
// One type for all layouts, which are values: schemes/row_layout.hpp has their bytes, formulas, contract and
// sources. Its code is portable; attention multiplies the rows in place (cpu/rows/row_product.hpp).
#pragma once

#include <array>
#include <cstring>

#include "../core/error.hpp"
#include "../core/rounding.hpp"
#include "../core/text.hpp"
#include "codec_spec.hpp"
#include "row_layout.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

namespace detail {

/// Codes of a group, one in a byte, as the layout stores them; n: channels of the group.
KVQ_HD KVQ_INLINE void store_codes(row_layout::number numbers, int n, const std::uint8_t* codes,
                                   std::byte* to) {
    const auto put = [&](int at, unsigned byte) { to[at] = static_cast<std::byte>(byte); };
    switch (numbers) {
        case row_layout::number::e2m1:
            for (int i = 0; i < n / 2; ++i) put(i, codes[2 * i] | unsigned{codes[2 * i + 1]} << 4);
            return;
        case row_layout::number::centred5:
        case row_layout::number::unsigned5: {
            std::uint32_t fifth = 0;
            for (int i = 0; i < 32; ++i) fifth |= std::uint32_t{codes[i]} >> 4 << i;
            for (int i = 0; i < 4; ++i) put(i, fifth >> 8 * i & 255u);
            to += 4;
            [[fallthrough]];
        }
        case row_layout::number::centred4:
        case row_layout::number::unsigned4:
        case row_layout::number::iq4_nl:
            for (int i = 0; i < 16; ++i) put(i, (codes[i] & 15u) | (codes[i + 16] & 15u) << 4);
            return;
        case row_layout::number::centred6:
            for (int i = 0; i < 8; ++i)
                put(i, unsigned{codes[i]} >> 4 | unsigned{codes[i + 16]} >> 4 << 2 |
                           unsigned{codes[i + 8]} >> 4 << 4 | unsigned{codes[i + 24]} >> 4 << 6);
            for (int i = 0; i < 16; ++i) put(8 + i, (codes[i] & 15u) | (codes[i + 16] & 15u) << 4);
            return;
        default:
            std::memcpy(to, codes, static_cast<std::size_t>(n));
    }
}

/// Code i of a group of 32, or of pairs.
KVQ_HD KVQ_INLINE std::uint8_t code_at(row_layout::number numbers, const std::byte* from, int i) noexcept {
    const auto half = [&](int at, int high) {
        return static_cast<std::uint8_t>(static_cast<unsigned>(from[at]) >> 4 * high & 15u);
    };
    switch (numbers) {
        case row_layout::number::e2m1:
            return half(i / 2, i % 2);
        case row_layout::number::centred4:
        case row_layout::number::unsigned4:
        case row_layout::number::iq4_nl:
            return half(i % 16, i / 16);
        case row_layout::number::centred6:
            return static_cast<std::uint8_t>(
                half(8 + i % 16, i / 16) |
                (static_cast<unsigned>(from[i % 8]) >> (4 * (i / 8 % 2) + 2 * (i / 16)) & 3u) << 4);
        case row_layout::number::centred5:
        case row_layout::number::unsigned5:
            return static_cast<std::uint8_t>(half(4 + i % 16, i / 16) |
                                             (static_cast<unsigned>(from[i / 8]) >> i % 8 & 1u) << 4);
        default:
            return static_cast<std::uint8_t>(from[i]);
    }
}
/// ggml's table of 16 numbers.
KVQ_HD KVQ_INLINE constexpr float iq4_nl_value(int code) noexcept {
    constexpr signed char values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                        1,    13,   25,  38,  53,  69,  89,  113};
    return static_cast<float>(values[code]);
}
/// The number of a code, as a float that is exact.
KVQ_HD KVQ_INLINE constexpr float number_of_code(row_layout::number numbers, std::uint8_t code) noexcept {
    switch (numbers) {
        case row_layout::number::e4m3:
            return e4m3::to_float(code);
        case row_layout::number::e5m2:
            return e5m2::to_float(code);
        case row_layout::number::e2m1:
            return e2m1::to_float(code);
        case row_layout::number::int8:
            return static_cast<float>(static_cast<std::int8_t>(code));
        case row_layout::number::centred4:
            return static_cast<float>(code - 8);
        case row_layout::number::centred5:
            return static_cast<float>(code - 16);
        case row_layout::number::centred6:
            return static_cast<float>(code - 32);
        case row_layout::number::iq4_nl:
            return iq4_nl_value(code);
        default:
            return static_cast<float>(code);
    }
}

/// What a byte behind the numbers stands for.
KVQ_HD KVQ_INLINE constexpr float scale_of_code(row_layout::stored kind, std::byte code) noexcept {
    const auto bits = static_cast<std::uint8_t>(code);
    return kind == row_layout::stored::e8m0 ? e8m0::to_float(bits) : e4m3::to_float(bits);
}

/// Numbers of a group, one loop for each kind: floats by a table.
template <row_layout::number Kind>
void load_numbers_of(const std::byte* from, int n, float* to) {
    constexpr bool of_bytes = Kind == row_layout::number::e4m3 || Kind == row_layout::number::e5m2,
                   by_table = of_bytes || Kind == row_layout::number::e2m1;
    if constexpr (by_table) {
        static constexpr auto table = [] {
            std::array<float, of_bytes ? 256 : 16> of{};
            for (std::size_t code = 0; code < of.size(); ++code)
                of[code] = number_of_code(Kind, static_cast<std::uint8_t>(code));
            return of;
        }();
        for (int i = 0; i < n; ++i) to[i] = table[static_cast<std::size_t>(code_at(Kind, from, i))];
    } else {
        for (int i = 0; i < n; ++i) to[i] = number_of_code(Kind, code_at(Kind, from, i));
    }
}
inline void load_numbers(row_layout::number numbers, const std::byte* from, int n, float* to) {
    using kind = row_layout::number;
    switch (numbers) {
        case kind::e4m3:
            return load_numbers_of<kind::e4m3>(from, n, to);
        case kind::e5m2:
            return load_numbers_of<kind::e5m2>(from, n, to);
        case kind::e2m1:
            return load_numbers_of<kind::e2m1>(from, n, to);
        case kind::int8:
            return load_numbers_of<kind::int8>(from, n, to);
        case kind::centred4:
            return load_numbers_of<kind::centred4>(from, n, to);
        case kind::centred5:
            return load_numbers_of<kind::centred5>(from, n, to);
        case kind::unsigned4:
            return load_numbers_of<kind::unsigned4>(from, n, to);
        case kind::unsigned5:
            return load_numbers_of<kind::unsigned5>(from, n, to);
        case kind::centred6:
            return load_numbers_of<kind::centred6>(from, n, to);
        case kind::iq4_nl:
            return load_numbers_of<kind::iq4_nl>(from, n, to);
    }
}

/// What sets the scale of a group: its values without NaN and infinities.
struct row_range {
    float low = 0.0f, high = 0.0f;  ///< of all finite values
    float largest = 0.0f;           ///< of the largest magnitude, the first one of several
    std::uint32_t not_finite = 0;

    /// X: float*, or what gives number i of a row by [i].
    template <class X>
    KVQ_HD KVQ_INLINE row_range(const X& x, int n) {
        bool none = true;
        float magnitude = 0.0f;
        for (int i = 0; i < n; ++i) {
            const float v = x[i], size = v < 0.0f ? -v : v;
            if (!is_finite(size)) {
                ++not_finite;
                continue;
            }
            low = none || v < low ? v : low;
            high = none || v > high ? v : high;
            none = false;
            if (size > magnitude) magnitude = size, largest = v;
        }
    }
    KVQ_HD KVQ_INLINE float magnitude() const { return largest < 0.0f ? -largest : largest; }
};

/// 1 / x, or 0 where that is no number.
KVQ_HD KVQ_INLINE float inverse_or_zero(float x) noexcept {
    const float inverse = x == 0.0f ? 0.0f : rounded_inverse(x);
    return is_finite(inverse) ? inverse : 0.0f;
}

}  // namespace detail

/// The layout of a name. Raises std::invalid_argument if there is none.
constexpr const row_layout& row_layout_named(const char* name) {
    for (const row_layout& l : row_layouts) {
        int i = 0;
        while (name[i] != 0 && name[i] == l.name[i]) ++i;
        if (name[i] == l.name[i]) return l;
    }
    detail::fail("there are no rows of the name ", name);
}

/// One tensor of one head in a page, in the bytes of a layout: one of row_layouts, or your own, with a name
/// that no other has: files and messages tell layouts apart by it.
struct token_rows {
    using attends_as = token_rows;

    /// tensor_scale: what values are divided by first (fp8, nvfp4); positive, and no number times it is
    /// infinite, else std::invalid_argument. Other layouts take 1 only. Of a layout that is not possible too.
    constexpr explicit token_rows(const row_layout& layout, float tensor_scale = 1.0f)
        : layout_(layout), tensor_scale_(tensor_scale) {
        using stored = row_layout::stored;
        if (!layout.is_possible())
            detail::fail(layout.name, ": no rows have such numbers with ", layout.channels,
                         " channels for a scale of this kind");
        const bool takes = layout.scale == stored::none || layout.scale == stored::e4m3;
        if (!(tensor_scale > 0.0f) || !detail::is_finite(e5m2::max_finite * tensor_scale) ||
            (!takes && tensor_scale != 1.0f))
            detail::fail(layout.name, " takes ",
                         takes ? "a positive scale of the tensor" : "no scale of the tensor", ", but got ",
                         tensor_scale);
    }

    short_text name() const { return layout_.name; }
    const row_layout& layout() const noexcept { return layout_; }
    std::uint64_t fingerprint() const noexcept { return detail::bit_cast<std::uint32_t>(tensor_scale_); }

    KVQ_HD constexpr std::size_t block_bytes(const block_shape& s) const noexcept {
        const int of_token = layout_.row_bytes(s.dim) + layout_.scales_behind(s.dim);
        return detail::round_up(static_cast<std::size_t>(s.tokens) * static_cast<std::size_t>(of_token),
                                std::size_t{16});
    }
    /// Raises std::invalid_argument unless head_dim is a multiple of what a scale is for.
    void check(const cache_shape& shape, tensor role) const {
        const int n = layout_.channels, dim = shape.dim(role);
        if (n > 0 && dim % n != 0)
            detail::fail(layout_.name, " has a scale for ", n, " channels, but head_dim is ", dim);
    }

    /// values: [tokens][dim]. Returns how many were not finite.
    std::uint32_t quantize(const block_shape& s, const block_id&, const float* values,
                           std::byte* block) const {
        std::memset(block, 0, block_bytes(s));
        std::uint32_t not_finite = 0;
        each_group(s, block, [&](int first, int n, std::byte* numbers, std::byte* scale) {
            not_finite += quantize_group(values + first, n, numbers, scale);
        });
        return not_finite;
    }
    void dequantize(const block_shape& s, const block_id&, const std::byte* block, float* values) const {
        each_group(s, block, [&](int first, int n, const std::byte* numbers, const std::byte* scale) {
            dequantize_group(numbers, scale, n, values + first);
        });
    }

    /// One number, as dequantize() gives it: what kernels of a GPU read (cuda/layout/cache_ref.cuh).
    KVQ_HD KVQ_INLINE float device_value(const block_shape& s, const std::byte* block, int token,
                                         int channel) const noexcept {
        const int bytes = layout_.row_bytes(s.dim);
        return value_of(
            s.dim, block + std::ptrdiff_t{token} * bytes,
            block + std::ptrdiff_t{s.tokens} * bytes + std::ptrdiff_t{token} * layout_.scales_behind(s.dim),
            channel);
    }
    /// The same of a row whose scales lie anywhere.
    KVQ_HD KVQ_INLINE float value_of(int dim, const std::byte* row, const std::byte* scales,
                                     int channel) const noexcept {
        const row_layout& l = layout_;
        const int size = l.group_of(dim), group = channel / size, i = channel - group * size;
        const std::byte* const numbers = row + group * l.group_bytes(size);
        const std::byte* const scale = scales + group;
        const float x = rounded_product(
            detail::number_of_code(l.numbers, detail::code_at(l.numbers, numbers + l.front_bytes(), i)),
            step_of(numbers, scale));
        return l.minimum ? x + half_at(numbers, 2) : x;
    }

    KVQ_HD KVQ_INLINE float tensor_scale() const noexcept { return tensor_scale_; }
    float tensor_scale(const block_id&) const noexcept { return tensor_scale_; }

    /// Of a group here: rows without scales are taken in pieces.
    static constexpr int most_channels = 32;
    /// Writes the n channels at x and their scale, if they have one. Returns how many were not finite.
    KVQ_HD KVQ_INLINE std::uint32_t quantize_group(const float* x, int n, std::byte* numbers,
                                                   std::byte* scale) const {
        using number = row_layout::number;
        const row_layout& l = layout_;
        const detail::row_range range(x, n);
        float y[most_channels];
        std::uint8_t codes[most_channels] = {};
        for (int i = 0; i < n; ++i)
            y[i] = x[i] != x[i]
                       ? 0.0f
                       : detail::smaller(detail::larger(x[i], -detail::max_float), detail::max_float);
        const auto floats = [&]<class Number>(Number, float step) {
            for (int i = 0; i < n; ++i) codes[i] = 0;
            if (!(step > 0.0f)) return;
            for (int i = 0; i < n; ++i) codes[i] = Number::from_float(detail::rounded_quotient(y[i], step));
        };
        const auto put_half = [&](int at, float v) {
            constexpr float most = float16::max_finite;
            detail::store_as(numbers + at, float16(detail::smaller(detail::larger(v, -most), most)).bits);
        };
        // The codes floor((y - minimum) * inverse + half) from 0 to top.
        const auto integers = [&](float minimum, float inverse, float half, int top) {
            for (int i = 0; i < n; ++i) {
                const float at = rounded_product(y[i] - minimum, inverse) + half;
                codes[i] = static_cast<std::uint8_t>(!(at > 0.0f)                    ? 0
                                                     : at >= static_cast<float>(top) ? top
                                                                                     : static_cast<int>(at));
            }
        };
        const auto by_range = [&](int top) {
            constexpr float most = float16::max_finite;
            const float low = detail::smaller(detail::larger(range.low, -most), most),
                        step = detail::larger(
                            detail::rounded_quotient(range.high - low, static_cast<float>(top)), 0.0f);
            put_half(0, step);
            put_half(2, low);
            integers(low, detail::inverse_or_zero(step), 0.5f, top);
        };
        switch (l.numbers) {
            case number::int8: {
                const float step = detail::rounded_quotient(range.magnitude(), 127.0f),
                            inverse = detail::inverse_or_zero(step);
                put_half(0, step);
                for (int i = 0; i < n; ++i) codes[i] = signed_code(rounded_product(y[i], inverse));
                break;
            }
            case number::centred4:
            case number::centred5: {
                const int half = l.bits() == 4 ? 8 : 16;
                const float step = detail::rounded_quotient(range.largest, static_cast<float>(-half));
                put_half(0, step);
                integers(0.0f, detail::inverse_or_zero(step), static_cast<float>(half) + 0.5f, 2 * half - 1);
                break;
            }
            case number::unsigned4:
                by_range(15);
                break;
            case number::unsigned5:
                by_range(31);
                break;
            case number::e5m2:
                floats(e5m2{}, tensor_scale_);
                break;
            case number::e4m3:
                floats(e4m3{}, put_scale(range.magnitude(), 8, scale));
                break;
            case number::e2m1: {
                floats(e2m1{}, put_scale(range.magnitude(), 2, scale));
                if (!l.four_over_six) break;
                std::uint8_t other[most_channels];
                std::memcpy(other, codes, sizeof(other));
                const std::byte of_six = *scale;
                const float error = squared_error(y, n, codes, step_of(numbers, scale));
                floats(e2m1{}, put_scale(range.magnitude(), 2, scale, 4.0f));
                if (squared_error(y, n, codes, step_of(numbers, scale)) < error) break;
                std::memcpy(codes, other, sizeof(other));
                *scale = of_six;
                break;
            }
            case number::centred6: {
                const float step = detail::rounded_quotient(range.largest, -32.0f),
                            inverse = detail::inverse_or_zero(step);
                integers(0.0f, inverse, 32.5f, 63);
                float products = 0.0f, squares = 0.0f;
                for (int i = 0; i < 16; ++i) {  // in ggml's order
                    float p[2], q[2];
                    for (int j = 0; j < 2; ++j) {
                        const float v = y[i + 16 * j], at = rounded_product(v, inverse),
                                    w = rounded_product(at, at),
                                    of_code = detail::number_of_code(l.numbers, codes[i + 16 * j]);
                        p[j] = rounded_product(rounded_product(w, v), of_code);
                        q[j] = rounded_product(rounded_product(w, of_code), of_code);
                    }
                    products += p[0] + p[1];
                    squares += q[0] + q[1];
                }
                put_half(0, fitted_step(products, squares, step));
                break;
            }
            case number::iq4_nl: {
                constexpr float smallest = 1e-15f;  // ggml's
                if (!(range.magnitude() >= smallest)) {
                    put_half(0, 0.0f);
                    break;
                }
                const float step = detail::rounded_quotient(range.largest, detail::iq4_nl_value(0)),
                            inverse = detail::rounded_inverse(step);
                float products = 0.0f, squares = 0.0f;
                for (int i = 0; i < n; ++i) {
                    codes[i] = nearest_iq4_nl(rounded_product(y[i], inverse));
                    const float of_code = detail::iq4_nl_value(codes[i]),
                                wq = rounded_product(rounded_product(y[i], y[i]), of_code);
                    products += rounded_product(wq, y[i]);
                    squares += rounded_product(wq, of_code);
                }
                put_half(0, fitted_step(products, squares, step));
                break;
            }
        }
        detail::store_codes(l.numbers, n, codes, numbers + l.front_bytes());
        return range.not_finite;
    }

protected:
    /// Of a scale that was checked before.
    KVQ_HD KVQ_INLINE static constexpr token_rows unchecked(const row_layout& layout, float tensor_scale) {
        return {layout, tensor_scale, nullptr};
    }

private:
    KVQ_HD KVQ_INLINE constexpr token_rows(const row_layout& layout, float tensor_scale, std::nullptr_t)
        : layout_(layout), tensor_scale_(tensor_scale) {}

    /// f(first value, channels, numbers of the group, its scale)
    template <class Byte, class F>
    void each_group(const block_shape& s, Byte* block, F f) const {
        const row_layout& l = layout_;
        const int step = l.channels > 0 ? l.channels : most_channels, row = l.row_bytes(s.dim),
                  behind = l.scales_behind(s.dim);
        Byte* const scales = block + std::ptrdiff_t{s.tokens} * row;
        for (int t = 0; t < s.tokens; ++t) {
            Byte* numbers = block + std::ptrdiff_t{t} * row;
            for (int c = 0, g = 0; c < s.dim; c += step, ++g) {
                const int n = detail::smaller(step, s.dim - c);
                f(t * s.dim + c, n, numbers, behind > 0 ? scales + std::ptrdiff_t{t} * behind + g : numbers);
                numbers += l.group_bytes(n);
            }
        }
    }

    /// Nearest integer, halves away from zero, from -127 to 127, in two's complement.
    KVQ_HD KVQ_INLINE static std::uint8_t signed_code(float at) noexcept {
        const float magnitude = at < 0.0f ? -at : at;
        int level = magnitude >= 127.0f ? 127 : static_cast<int>(magnitude);
        if (level < 127 && magnitude - static_cast<float>(level) >= 0.5f) ++level;
        return static_cast<std::uint8_t>(at < 0.0f ? -level : level);
    }
    KVQ_HD KVQ_INLINE static std::uint8_t nearest_iq4_nl(float at) noexcept {
        int code = 0;
        while (code < 15 && !(at - detail::iq4_nl_value(code) < detail::iq4_nl_value(code + 1) - at)) ++code;
        return static_cast<std::uint8_t>(code);
    }
    /// The factor of the numbers with the least error, or the one before where there is none.
    KVQ_HD KVQ_INLINE static float fitted_step(float products, float squares, float before) noexcept {
        const float step = squares > 0.0f ? detail::rounded_quotient(products, squares) : before;
        return detail::is_finite(step) ? step : before;
    }
    KVQ_HD KVQ_INLINE float squared_error(const float* y, int n, const std::uint8_t* codes,
                                          float step) const noexcept {
        float sum = 0.0f;
        for (int i = 0; i < n; ++i) {
            const float d = y[i] - rounded_product(detail::number_of_code(layout_.numbers, codes[i]), step);
            sum += rounded_product(d, d);
        }
        return sum;
    }
    /// Writes the scale of a group with this largest magnitude, if it has one; gives what numbers are
    /// multiplied by. exponent: of the largest number. most: what the largest magnitude becomes with an e4m3.
    KVQ_HD KVQ_INLINE float put_scale(float magnitude, int exponent, std::byte* to,
                                      float most = e2m1::max_finite) const {
        switch (layout_.scale) {
            case row_layout::stored::e4m3: {
                const e4m3 scale(
                    detail::rounded_quotient(detail::rounded_quotient(magnitude, most), tensor_scale_));
                *to = std::byte{scale.bits};
                return rounded_product(static_cast<float>(scale), tensor_scale_);
            }
            case row_layout::stored::e8m0: {
                const int of_largest = static_cast<int>(detail::bit_cast<std::uint32_t>(magnitude) >> 23);
                const e8m0 scale =
                    e8m0::from_bits(static_cast<std::uint8_t>(detail::larger(of_largest - exponent, 0)));
                *to = std::byte{scale.bits};
                return static_cast<float>(scale);
            }
            default:
                return tensor_scale_;
        }
    }

    void dequantize_group(const std::byte* numbers, const std::byte* scale, int n, float* to) const {
        const row_layout& l = layout_;
        detail::load_numbers(l.numbers, numbers + l.front_bytes(), n, to);
        const float step = step_of(numbers, scale);
        if (l.minimum) {
            const detail::rounded_products product;
            const float minimum = half_at(numbers, 2);
            for (int i = 0; i < n; ++i) to[i] = product(to[i], step) + minimum;
        } else {
            for (int i = 0; i < n; ++i) to[i] *= step;
        }
    }
    KVQ_HD KVQ_INLINE static float half_at(const std::byte* from, int at) noexcept {
        return float16::to_float(detail::load_as<std::uint16_t>(from + at));
    }
    /// What the numbers of a group are multiplied by.
    KVQ_HD KVQ_INLINE float step_of(const std::byte* numbers, const std::byte* scale) const noexcept {
        switch (layout_.scale) {
            case row_layout::stored::fp16:
                return half_at(numbers, 0);
            case row_layout::stored::e8m0:
                return e8m0::to_float(static_cast<std::uint8_t>(*scale));
            case row_layout::stored::e4m3:
                return rounded_product(e4m3::to_float(static_cast<std::uint8_t>(*scale)), tensor_scale_);
            default:
                return tensor_scale_;
        }
    }

    row_layout layout_;
    float tensor_scale_;
};

template <>
struct detail::codec_maker<token_rows> {
    static constexpr codec_spec of_type() noexcept {
        codec_spec c;
        c.reading = block_reading::token_rows;
        return c;
    }
    static constexpr codec_spec of(const token_rows&) noexcept { return of_type(); }
};

static_assert(key_scheme<token_rows> && value_scheme<token_rows>);

/// The number of the layout of a name in row_layouts. Raises as row_layout_named.
constexpr int row_layout_number(const char* name) {
    const row_layout& named = row_layout_named(name);
    int number = 0;
    while (&row_layouts[number] != &named) ++number;
    return number;
}
/// The same where the type says which layout, number `Layout` of row_layouts: for kernels of a GPU.
template <int Layout>
struct rows_of : token_rows {
    static constexpr row_layout::number numbers = row_layouts[Layout].numbers;
    static constexpr row_layout::stored scale = row_layouts[Layout].scale;
    static constexpr int channels = row_layouts[Layout].channels;
    static constexpr bool minimum = row_layouts[Layout].minimum,
                          four_over_six = row_layouts[Layout].four_over_six;

    constexpr explicit rows_of(float tensor_scale = 1.0f) : token_rows(row_layouts[Layout], tensor_scale) {}

    KVQ_HD KVQ_INLINE static constexpr row_layout fixed_layout() noexcept {
        return {nullptr, channels, numbers, scale, minimum, four_over_six};
    }
    /// The same scheme, of which compilers of kernels know the layout.
    KVQ_HD KVQ_INLINE token_rows fixed() const noexcept { return unchecked(fixed_layout(), tensor_scale()); }
    KVQ_HD float device_value(const block_shape& s, const std::byte* block, int token,
                              int channel) const noexcept {
        return fixed().device_value(s, block, token, channel);
    }
};

}}  // namespace kvq
