// Products with rows of tokens in the layouts of other systems, where they lie: in pages of kvq, or in memory
// of their owner.
//
//   row_product<Lanes> p(layout, tensor_scale, {role, tokens, dim}, n)     n operands; tokens at most
//   p.begin(x, x_stride, workspace)                                        keys: prepares the operands
//   p.keys(rows, tokens, y, ...)      y[i][t] (+)= sum_c x^[t][c] x[i][c]
//   p.values(rows, tokens, w, ...)    y[i][c] (+)= sum_t w[i][t] x^[t][c]
//
// One class for all layouts, which are values: kernels are chosen by the kind of numbers and of scales
// (row_kernels.hpp). More than four operands share one copy of the rows as floats. Layouts that no kernel
// reads, and rows with NaN where kernels have none, are read number by number.
// Contract: sums of floats, of at most tokens_of_pass tokens; nothing outside of the rows and their scales is
// read.
#pragma once

#include <cstring>

#include "../../core/row_place.hpp"
#include "../../core/shape.hpp"
#include "row_kernels.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Kernels of one kind of rows.
struct row_functions {
    void (*keys[2])(const row_pass&, const float* const* x, float* y, std::ptrdiff_t y_stride);
    void (*values[2])(const row_pass&, const float* w, std::ptrdiff_t w_stride, float* y,
                      std::ptrdiff_t y_stride);
    void (*decode)(const row_pass&, float* to, std::ptrdiff_t stride);
    float unit;
    bool pairs, checks_nan;
};

/// Operands of a call for values: as many sums as there are registers.
template <class Lanes>
inline constexpr int row_value_operands = Lanes::width >= 16  ? 4
                                          : Lanes::width >= 8 ? 2
                                                              : 1;
inline constexpr int row_key_operands = 4;

template <class Lanes, row_layout::number Kind, row_scales Scales>
inline constexpr row_functions row_functions_of{
    {&row_keys<Lanes, Kind, Scales, 1>, &row_keys<Lanes, Kind, Scales, row_key_operands>},
    {&row_values<Lanes, Kind, Scales, 1>, &row_values<Lanes, Kind, Scales, row_value_operands<Lanes>>},
    &decode_rows<Lanes, Kind, Scales>,
    row_numbers<Lanes, Kind>::unit,
    row_numbers<Lanes, Kind>::pairs,
    row_numbers<Lanes, Kind>::checks_nan};

/// Null: no kernel reads the layout.
template <class Lanes>
const row_functions* row_functions_for(const row_layout& l) {
    using number = row_layout::number;
    const bool scaled = l.scale != row_layout::stored::none;
    if (scaled && l.channels % row_chunk != 0 && !(l.numbers == number::e2m1 && l.channels == 16))
        return nullptr;
    if (l.scale == row_layout::stored::fp16 && l.channels != row_chunk) return nullptr;
    const auto found = [&]<number Kind, row_scales Scales>() -> const row_functions* {
        const auto wanted = !scaled            ? row_scales::none
                            : l.minimum        ? row_scales::scale_and_minimum
                            : l.channels == 16 ? row_scales::scale_of_16
                                               : row_scales::scale;
        return wanted == Scales ? &row_functions_of<Lanes, Kind, Scales> : nullptr;
    };
    switch (l.numbers) {
        case number::e4m3:
            return scaled ? found.template operator()<number::e4m3, row_scales::scale>()
                          : found.template operator()<number::e4m3, row_scales::none>();
        case number::e5m2:
            return found.template operator()<number::e5m2, row_scales::none>();
        case number::e2m1:
            return l.channels == 16 ? found.template operator()<number::e2m1, row_scales::scale_of_16>()
                                    : found.template operator()<number::e2m1, row_scales::scale>();
        case number::int8:
            return found.template operator()<number::int8, row_scales::scale>();
        case number::centred4:
            return found.template operator()<number::centred4, row_scales::scale>();
        case number::centred5:
            return found.template operator()<number::centred5, row_scales::scale>();
        case number::centred6:
            return found.template operator()<number::centred6, row_scales::scale>();
        case number::iq4_nl:
            return found.template operator()<number::iq4_nl, row_scales::scale>();
        case number::unsigned4:
            return found.template operator()<number::unsigned4, row_scales::scale_and_minimum>();
        case number::unsigned5:
            return found.template operator()<number::unsigned5, row_scales::scale_and_minimum>();
    }
    return nullptr;
}

template <class Lanes>
class row_product {
public:
    row_product(const row_layout& layout, float tensor_scale, const block_shape& s, int n)
        : layout_(layout), of_layout_(row_functions_for<Lanes>(layout)), n_(n), dim_(s.dim) {
        const bool scaled = layout.scale != row_layout::stored::none;
        pairs_ = of_layout_ && of_layout_->pairs;
        factor_ = (scaled ? 1.0f : tensor_scale);
        scale_factor_ = tensor_scale;
        groups_ = scaled ? s.dim / layout.group_of(s.dim) : 0;
        padded_ = detail::round_up(dim_, row_chunk);
        chunk_bytes_ = layout.front_bytes() + row_chunk * layout.bits() / 8;
        scale_channels_ = layout.channels % row_chunk == 0 && layout.scale != row_layout::stored::fp16
                              ? row_chunk
                              : layout.channels;
        scale_line_ = scaled ? detail::ceil_div(dim_, scale_channels_) : 0;
        if (layout.channels == 16) scale_line_ = detail::round_up(scale_line_, 2);
        const int tokens = detail::smaller(s.tokens, tokens_of_pass);
        std::size_t at = 0;
        const auto take = [&](int rows, int floats) {
            const std::size_t here = at;
            at += detail::round_up(
                static_cast<std::size_t>(rows) * static_cast<std::size_t>(floats) * sizeof(float),
                std::size_t{64});
            return here;
        };
        take(detail::round_up(n, 4), padded_);  // operands, or sums
        scales_ = take(1, tokens * scale_line_ + Lanes::width);
        minima_ = take(1, layout.minimum ? tokens * scale_line_ + Lanes::width : 0);
        // Codes of scales, and floats of them before they are spread.
        codes_ = take(1, scaled ? 2 * tokens * groups_ + 64 : 0);
        end_ = take(tokens, dim_ % row_chunk != 0 ? row_chunk : 0);
        line_ = tokens;
        lines_ = take(row_key_operands, line_);
        decoded_ = take(tokens, padded_);
        addresses_ = at;
        bytes_ = at + detail::round_up(sizeof(addresses), std::size_t{64});
    }

    std::size_t workspace_bytes() const { return bytes_; }

    void begin(const float* x, std::ptrdiff_t x_stride, std::byte* workspace) const {
        auto* const to = reinterpret_cast<float*>(workspace);
        std::memset(to, 0, static_cast<std::size_t>(n_) * static_cast<std::size_t>(padded_) * sizeof(float));
        for (int i = 0; i < n_; ++i)
            for (int c = 0; c < dim_; ++c) to[i * padded_ + place(c)] = x[i * x_stride + c];
    }

    /// ahead: distance to the rows that are read next; 0: none.
    /// Of tokens [from, from + tokens). Returns whether all scales are finite.
    bool keys(const row_place& rows, int from, int tokens, float* y, std::ptrdiff_t y_stride, bool add,
              std::ptrdiff_t ahead, std::byte* workspace) const {
        bool finite = true;
        const auto* const x = reinterpret_cast<const float*>(workspace);
        auto* const lines = reinterpret_cast<float*>(workspace + lines_);
        for (int first = 0; first < tokens; first += tokens_of_pass) {
            const int here = detail::smaller(tokens - first, tokens_of_pass);
            const prepared p = prepare(rows, from + first, here, ahead, workspace);
            finite = finite && p.finite;
            const float factor = factor_ * p.functions->unit;
            for (int i = 0; i < n_; i += row_key_operands) {
                const int count = detail::smaller(n_ - i, row_key_operands);
                const float* operands[row_key_operands];
                for (int k = 0; k < row_key_operands; ++k)
                    operands[k] = x + (i + detail::smaller(k, count - 1)) * padded_;
                p.functions->keys[count > 1](p.pass, operands, lines, line_);
                for (int k = 0; k < count; ++k) {
                    float* const to = y + (i + k) * y_stride + first;
                    const float* const sums = lines + k * line_;
                    for (int t = 0; t < here; ++t) to[t] = (add ? to[t] : 0.0f) + sums[t] * factor;
                }
            }
        }
        return finite;
    }

    bool values(const row_place& rows, int from, int tokens, const float* w, std::ptrdiff_t w_stride,
                float* y, std::ptrdiff_t y_stride, bool add, std::ptrdiff_t ahead,
                std::byte* workspace) const {
        bool finite = true;
        auto* const sums = reinterpret_cast<float*>(workspace);
        auto* const lines = reinterpret_cast<float*>(workspace + lines_);
        constexpr int most = row_value_operands<Lanes>;
        for (int first = 0; first < tokens; first += tokens_of_pass) {
            const int here = detail::smaller(tokens - first, tokens_of_pass);
            const prepared p = prepare(rows, from + first, here, ahead, workspace);
            finite = finite && p.finite;
            std::memset(sums, 0,
                        static_cast<std::size_t>(detail::round_up(n_, 4)) *
                            static_cast<std::size_t>(padded_) * sizeof(float));
            for (int i = 0; i < n_; i += most) {
                const int count = detail::smaller(n_ - i, most);
                const float* weights = w + i * w_stride + first;
                std::ptrdiff_t stride = w_stride;
                if (count > 1 && count < most) {
                    std::memset(lines, 0, static_cast<std::size_t>(most * line_) * sizeof(float));
                    for (int k = 0; k < count; ++k)
                        std::memcpy(lines + k * line_, weights + k * w_stride,
                                    static_cast<std::size_t>(here) * sizeof(float));
                    weights = lines;
                    stride = line_;
                }
                p.functions->values[count > 1](p.pass, weights, stride, sums + i * padded_, padded_);
            }
            add_sums(sums, factor_ * p.functions->unit, y, y_stride, add || first > 0);
        }
        return finite;
    }

private:
    struct prepared {
        row_pass pass;
        const row_functions* functions;
        bool finite;
    };
    /// Where the tokens of a pass lie.
    struct addresses {
        const std::byte* rows[tokens_of_pass];
        const std::byte* scales[tokens_of_pass];
        const std::byte* next[tokens_of_pass];
    };

    int place(int c) const {
        return c / row_chunk * row_chunk + place_in_chunk(pairs_, Lanes::width, c % row_chunk);
    }
    void add_sums(const float* sums, float factor, float* y, std::ptrdiff_t y_stride, bool add) const {
        for (int i = 0; i < n_; ++i, sums += padded_, y += y_stride) {
            if (pairs_) {
                for (int c = 0; c < dim_; c += 2 * Lanes::width) {
                    const int pairs = detail::smaller(dim_ - c, 2 * Lanes::width) / 2;
                    for (int k = 0; k < pairs; ++k) {
                        float* const to = y + c + 2 * k;
                        to[0] = (add ? to[0] : 0.0f) + sums[c + k] * factor;
                        to[1] = (add ? to[1] : 0.0f) + sums[c + Lanes::width + k] * factor;
                    }
                }
            } else {
                for (int c = 0; c < dim_; ++c) y[c] = (add ? y[c] : 0.0f) + sums[c] * factor;
            }
        }
    }

    static void find(const row_place& of, int first, int n, const std::byte** rows,
                     const std::byte** scales) {
        const bool of_scales = scales && of.scales;
        for (int t = 0; t < n;) {
            const int block = of.blocks ? (first + t) / of.block_tokens : 0,
                      in_block = of.blocks ? (first + t) % of.block_tokens : first + t,
                      here = of.blocks ? detail::smaller(n - t, of.block_tokens - in_block) : n;
            const std::ptrdiff_t number = of.blocks ? of.blocks[block] : 0;
            const std::byte* row = of.rows + number * of.block_stride + in_block * of.row_stride;
            for (int i = 0; i < here; ++i, row += of.row_stride) rows[t + i] = row;
            if (of_scales) {
                const std::byte* scale =
                    of.scales + number * of.scale_block_stride + in_block * of.scale_stride;
                for (int i = 0; i < here; ++i, scale += of.scale_stride) scales[t + i] = scale;
            }
            t += here;
        }
    }
    addresses& find(const row_place& of, int first, int n, std::ptrdiff_t ahead, std::byte* workspace) const {
        auto& at = *reinterpret_cast<addresses*>(workspace + addresses_);
        find(of, first, n, at.rows, at.scales);
        const int follow = ahead != 0 ? 0 : detail::larger(detail::smaller(of.end - first - n, n), 0);
        find(of, first + n, follow, at.next, nullptr);
        for (int t = follow; t < n; ++t) at.next[t] = at.rows[t] + ahead;
        if (ahead != 0 && of.scales)
            for (std::ptrdiff_t line = 0; line < n * of.scale_stride; line += 64)
                detail::prefetch(at.scales[0] + line + ahead);
        return at;
    }

    /// The rows of a pass for kernels: their scales as floats, all their numbers if there are many operands.
    prepared prepare(const row_place& of, int first, int tokens, std::ptrdiff_t ahead,
                     std::byte* workspace) const {
        addresses& at = find(of, first, tokens, ahead, workspace);
        row_pass pass{at.rows,      at.next, tokens,  dim_, layout_.front_bytes(),
                      chunk_bytes_, nullptr, nullptr, 0,    nullptr};
        auto* const decoded = reinterpret_cast<float*>(workspace + decoded_);
        auto* const scales = reinterpret_cast<float*>(workspace + scales_);
        auto* const minima = reinterpret_cast<float*>(workspace + minima_);
        bool finite = true;
        if (scale_line_ > 0) {
            read_scales(of, at, tokens, workspace + codes_, scales, minima);
            finite = all_finite(scales, tokens * scale_line_) &&
                     (!layout_.minimum || all_finite(minima, tokens * scale_line_));
            pass.scales = scales;
            pass.minima = layout_.minimum ? minima : nullptr;
            pass.scale_stride = scale_line_;
        }
        if (!of_layout_ || (of_layout_->checks_nan && any_nan(of, at, tokens))) {
            read_numbers(at, tokens, scales, minima, decoded);
        } else {
            if (dim_ % row_chunk != 0) {
                auto* const end = reinterpret_cast<float*>(workspace + end_);
                read_ends(at, tokens, end);
                pass.end = end;
            }
            if (n_ <= row_key_operands) return {pass, of_layout_, finite};
            of_layout_->decode(pass, decoded, padded_);
            const float unit = of_layout_->unit;
            if (unit != 1.0f)
                for (int i = 0; i < tokens * padded_; ++i) decoded[i] *= unit;
        }
        for (int t = 0; t < tokens; ++t)
            at.rows[t] = at.next[t] = reinterpret_cast<const std::byte*>(decoded + t * padded_);
        return {{at.rows, at.next, tokens, padded_, 0, row_chunk * int{sizeof(float)}, nullptr, nullptr, 0,
                 nullptr},
                &row_functions_of<Lanes, plain_floats, row_scales::none>,
                finite};
    }
    static bool all_finite(const float* x, int n) {
        constexpr int width = Lanes::width;
        auto zeros = Lanes::splat_float(0.0f);
        int i = 0;
        for (; i + width <= n; i += width)
            zeros = Lanes::multiply_add(Lanes::load_floats(x + i), Lanes::splat_float(0.0f), zeros);
        float zero = Lanes::sum(zeros);
        for (; i < n; ++i) zero += x[i] * 0.0f;
        return zero == 0.0f;
    }

    /// Collects the scales of all tokens, then converts them a vector at a time.
    void read_scales(const row_place& of, const addresses& at, int tokens, std::byte* codes, float* scales,
                     float* minima) const {
        constexpr int width = Lanes::width;
        if (layout_.scale == row_layout::stored::fp16) {
            read_halves(at, 0, tokens, codes, scales);
            if (layout_.minimum) read_halves(at, 2, tokens, codes, minima);
            return;
        }
        const int all = tokens * groups_;
        if (of.group_stride == 1 && of.scale_stride == groups_ && !of.blocks) {
            std::memcpy(codes, at.scales[0], static_cast<std::size_t>(all));
        } else {
            for (int t = 0; t < tokens; ++t)
                for (int g = 0; g < groups_; ++g) codes[t * groups_ + g] = at.scales[t][g * of.group_stride];
        }
        const int copies = layout_.channels / scale_channels_;
        const bool dense = copies == 1 && scale_line_ == groups_;
        float* const to = dense ? scales : reinterpret_cast<float*>(codes + detail::round_up(all, 64));
        const auto factor = Lanes::splat_float(scale_factor_);
        for (int i = 0; i < all; i += width) {
            const auto bytes = Lanes::load_bytes(codes + i);
            const auto x = layout_.scale == row_layout::stored::e4m3 ? float_lanes<Lanes, e4m3>::values(bytes)
                                                                     : powers_of_two(bytes);
            Lanes::store_floats(to + i, Lanes::multiply(x, factor));
        }
        for (int t = 0; t < tokens && !dense; ++t)
            for (int g = 0; g < scale_line_; ++g)
                scales[t * scale_line_ + g] = g / copies < groups_ ? to[t * groups_ + g / copies] : 0.0f;
    }
    /// 2^(code - 127); the code 255 is NaN.
    static typename Lanes::floats powers_of_two(typename Lanes::ints codes) {
        const auto where_negative = [](typename Lanes::ints a) {
            return Lanes::bit_and(Lanes::template shift_right_signed<31>(a), Lanes::splat(1 << 22));
        };
        const auto special = Lanes::bit_or(where_negative(Lanes::subtract(codes, Lanes::splat(1))),
                                           where_negative(Lanes::subtract(Lanes::splat(254), codes)));
        return Lanes::as_floats(Lanes::bit_or(Lanes::template shift_left<23>(codes), special));
    }
    /// The fp16 `offset` bytes behind the beginning of each group.
    void read_halves(const addresses& at, int offset, int tokens, std::byte* bits, float* to) const {
        constexpr int width = Lanes::width;
        const int step = layout_.group_bytes(layout_.channels);
        std::byte* out = bits;
        for (int t = 0; t < tokens; ++t) {
            const std::byte* from = at.rows[t] + offset;
            for (int g = 0; g < groups_; ++g, from += step, out += 2) std::memcpy(out, from, 2);
        }
        for (int i = 0; i < tokens * groups_; i += width)
            Lanes::store_floats(to + i, Lanes::template load_values<float16>(bits + 2 * i));
    }
    /// The numbers of the last channels, which are no whole chunk, divided by the unit.
    void read_ends(const addresses& at, int tokens, float* to) const {
        const int whole = dim_ / row_chunk, n = dim_ % row_chunk;
        for (int t = 0; t < tokens; ++t, to += row_chunk) {
            float all[row_chunk] = {};
            detail::load_numbers(layout_.numbers, at.rows[t] + whole * chunk_bytes_, n, all);
            for (int c = 0; c < row_chunk; ++c)
                to[place_in_chunk(pairs_, Lanes::width, c)] = all[c] / of_layout_->unit;
        }
    }
    /// Number by number, with scales, in the order of vectors.
    void read_numbers(const addresses& at, int tokens, const float* scales, const float* minima,
                      float* to) const {
        const int n = layout_.group_of(dim_), bytes = layout_.group_bytes(n);
        for (int t = 0; t < tokens; ++t, to += padded_) {
            for (int c = 0; c < padded_; ++c) to[c] = 0.0f;
            for (int c = 0; c < dim_; ++c) {
                const std::byte* const group = at.rows[t] + c / n * bytes;
                const float x = detail::number_of_code(
                    layout_.numbers, detail::code_at(layout_.numbers, group + layout_.front_bytes(), c % n));
                const int scale = t * scale_line_ + c / scale_channels_;
                to[place(c)] = (scale_line_ > 0 ? detail::rounded_product(x, scales[scale]) : x) +
                               (layout_.minimum ? minima[scale] : 0.0f);
            }
        }
    }
    /// Is a code of e4m3 NaN?
    bool any_nan(const row_place& of, const addresses& at, int tokens) const {
        // Rows of a page follow each other.
        const bool follow = of.row_stride == dim_ && !of.blocks;
        const int rows = follow ? 1 : tokens, length = follow ? tokens * dim_ : dim_;
        using ints = typename Lanes::ints;
        constexpr int bytes = 4 * Lanes::width;
        ints found = Lanes::splat(0);
        std::uint32_t rest = 0;
        for (int t = 0; t < rows; ++t) {
            const std::byte* const row = at.rows[t];
            int c = 0;
            for (; c + bytes <= length; c += bytes)
                found = Lanes::bit_or(
                    found, Lanes::add(Lanes::bit_and(Lanes::load(row + c), Lanes::splat(0x7f7f7f7f)),
                                      Lanes::splat(0x01010101)));
            for (; c < length; ++c) rest |= (static_cast<std::uint32_t>(row[c]) & 127u) + 1u;
        }
        std::byte words[bytes];
        Lanes::store(words, found);
        for (const std::byte b : words) rest |= static_cast<std::uint32_t>(b);
        return (rest & 128u) != 0;
    }

    row_layout layout_;
    const row_functions* of_layout_;
    int n_, dim_, padded_, groups_, chunk_bytes_, scale_channels_, scale_line_, line_;
    bool pairs_;
    float factor_, scale_factor_;
    std::size_t scales_, minima_, codes_, end_, lines_, decoded_, addresses_, bytes_;
};

}}}  // namespace kvq::kernels
