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

#include "../../core/shape.hpp"
#include "row_kernels.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// The rows of one head, from some token on. Strides in bytes; scales beside the numbers: of a group.
struct row_place {
    const std::byte* rows;
    std::ptrdiff_t row_stride;
    const std::byte* scales = nullptr;
    std::ptrdiff_t scale_stride = 0, group_stride = 1;

    row_place from(int token) const {
        return {rows + token * row_stride, row_stride, scales ? scales + token * scale_stride : nullptr,
                scale_stride, group_stride};
    }
};

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
        scale_line_ = !scaled                 ? 0
                      : layout.channels == 16 ? detail::round_up(groups_, 2)
                                              : detail::ceil_div(dim_, row_chunk);
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
        bytes_ = at;
    }

    std::size_t workspace_bytes() const { return bytes_; }

    void begin(const float* x, std::ptrdiff_t x_stride, std::byte* workspace) const {
        auto* const to = reinterpret_cast<float*>(workspace);
        std::memset(to, 0, static_cast<std::size_t>(n_) * static_cast<std::size_t>(padded_) * sizeof(float));
        for (int i = 0; i < n_; ++i)
            for (int c = 0; c < dim_; ++c) to[i * padded_ + place(c)] = x[i * x_stride + c];
    }

    /// ahead: distance to the rows that are read next; 0: none.
    void keys(const row_place& rows, int tokens, float* y, std::ptrdiff_t y_stride, bool add,
              std::ptrdiff_t ahead, std::byte* workspace) const {
        const auto* const x = reinterpret_cast<const float*>(workspace);
        auto* const lines = reinterpret_cast<float*>(workspace + lines_);
        for (int first = 0; first < tokens; first += tokens_of_pass) {
            const int here = detail::smaller(tokens - first, tokens_of_pass);
            const prepared p = prepare(rows.from(first), here, ahead, workspace);
            const float factor = factor_ * p.functions->unit;
            for (int i = 0; i < n_; i += row_key_operands) {
                const int count = detail::smaller(n_ - i, row_key_operands);
                const float* operands[row_key_operands];
                for (int k = 0; k < row_key_operands; ++k)
                    operands[k] = x + (i + detail::smaller(k, count - 1)) * padded_;
                p.functions->keys[count > 1](p.pass, operands, lines, line_);
                for (int k = 0; k < count; ++k) {
                    float* const to = y + (i + k) * y_stride + first;
                    const float* const from = lines + k * line_;
                    for (int t = 0; t < here; ++t) to[t] = (add ? to[t] : 0.0f) + from[t] * factor;
                }
            }
        }
    }

    void values(const row_place& rows, int tokens, const float* w, std::ptrdiff_t w_stride, float* y,
                std::ptrdiff_t y_stride, bool add, std::ptrdiff_t ahead, std::byte* workspace) const {
        auto* const sums = reinterpret_cast<float*>(workspace);
        auto* const lines = reinterpret_cast<float*>(workspace + lines_);
        constexpr int most = row_value_operands<Lanes>;
        for (int first = 0; first < tokens; first += tokens_of_pass) {
            const int here = detail::smaller(tokens - first, tokens_of_pass);
            const prepared p = prepare(rows.from(first), here, ahead, workspace);
            std::memset(sums, 0,
                        static_cast<std::size_t>(detail::round_up(n_, 4)) *
                            static_cast<std::size_t>(padded_) * sizeof(float));
            for (int i = 0; i < n_; i += most) {
                const int count = detail::smaller(n_ - i, most);
                const float* from = w + i * w_stride + first;
                std::ptrdiff_t stride = w_stride;
                if (count > 1 && count < most) {
                    std::memset(lines, 0, static_cast<std::size_t>(most * line_) * sizeof(float));
                    for (int k = 0; k < count; ++k)
                        std::memcpy(lines + k * line_, from + k * w_stride,
                                    static_cast<std::size_t>(here) * sizeof(float));
                    from = lines;
                    stride = line_;
                }
                p.functions->values[count > 1](p.pass, from, stride, sums + i * padded_, padded_);
            }
            add_sums(sums, factor_ * p.functions->unit, y, y_stride, add || first > 0);
        }
    }

private:
    struct prepared {
        row_pass pass;
        const row_functions* functions;
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

    /// The rows of a pass for kernels: their scales as floats, all their numbers if there are many operands.
    prepared prepare(const row_place& rows, int tokens, std::ptrdiff_t ahead, std::byte* workspace) const {
        const int chunk_bytes = layout_.front_bytes() + row_chunk * layout_.bits() / 8;
        row_pass pass{rows.rows,   rows.row_stride, ahead,   tokens, dim_,   layout_.front_bytes(),
                      chunk_bytes, nullptr,         nullptr, 0,      nullptr};
        if (ahead != 0 && rows.scales)
            for (std::ptrdiff_t at = 0; at < tokens * rows.scale_stride; at += 64)
                detail::prefetch(rows.scales + at + ahead);
        auto* const decoded = reinterpret_cast<float*>(workspace + decoded_);
        if (!of_layout_ || (of_layout_->checks_nan && any_nan(rows, tokens))) {
            read_numbers(rows, tokens, decoded);
        } else {
            if (scale_line_ > 0) {
                pass.scales = reinterpret_cast<float*>(workspace + scales_);
                pass.minima = layout_.minimum ? reinterpret_cast<float*>(workspace + minima_) : nullptr;
                pass.scale_stride = scale_line_;
                read_scales(rows, tokens, workspace + codes_, reinterpret_cast<float*>(workspace + scales_),
                            reinterpret_cast<float*>(workspace + minima_));
            }
            if (dim_ % row_chunk != 0) {
                auto* const end = reinterpret_cast<float*>(workspace + end_);
                read_ends(rows, tokens, chunk_bytes, end);
                pass.end = end;
            }
            if (n_ <= row_key_operands) return {pass, of_layout_};
            of_layout_->decode(pass, decoded, padded_);
            const float unit = of_layout_->unit;
            if (unit != 1.0f)
                for (int i = 0; i < tokens * padded_; ++i) decoded[i] *= unit;
        }
        return {{reinterpret_cast<const std::byte*>(decoded), padded_ * std::ptrdiff_t{sizeof(float)}, 0,
                 tokens, padded_, 0, row_chunk * int{sizeof(float)}, nullptr, nullptr, 0, nullptr},
                &row_functions_of<Lanes, plain_floats, row_scales::none>};
    }
    /// Collects the scales of all tokens, then converts them a vector at a time.
    void read_scales(const row_place& rows, int tokens, std::byte* codes, float* scales,
                     float* minima) const {
        constexpr int width = Lanes::width;
        if (layout_.scale == row_layout::stored::fp16) {
            read_halves(rows.rows, rows.row_stride, tokens, codes, scales);
            if (layout_.minimum) read_halves(rows.rows + 2, rows.row_stride, tokens, codes, minima);
            return;
        }
        const int all = tokens * groups_;
        if (rows.group_stride == 1 && rows.scale_stride == groups_) {
            std::memcpy(codes, rows.scales, static_cast<std::size_t>(all));
        } else {
            for (int t = 0; t < tokens; ++t)
                for (int g = 0; g < groups_; ++g)
                    codes[t * groups_ + g] = rows.scales[t * rows.scale_stride + g * rows.group_stride];
        }
        const int copies = layout_.channels > row_chunk ? layout_.channels / row_chunk : 1;
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
    /// The fp16 before each group of the rows.
    void read_halves(const std::byte* row, std::ptrdiff_t stride, int tokens, std::byte* bits,
                     float* to) const {
        constexpr int width = Lanes::width;
        const int step = layout_.front_bytes() + row_chunk * layout_.bits() / 8;
        std::byte* out = bits;
        for (int t = 0; t < tokens; ++t, row += stride) {
            const std::byte* from = row;
            for (int g = 0; g < groups_; ++g, from += step, out += 2) std::memcpy(out, from, 2);
        }
        for (int i = 0; i < tokens * groups_; i += width)
            Lanes::store_floats(to + i, Lanes::template load_values<float16>(bits + 2 * i));
    }
    /// The numbers of the last channels, which are no whole chunk, divided by the unit.
    void read_ends(const row_place& rows, int tokens, int chunk_bytes, float* to) const {
        const int whole = dim_ / row_chunk, n = dim_ % row_chunk;
        for (int t = 0; t < tokens; ++t, to += row_chunk) {
            float all[row_chunk] = {};
            detail::load_numbers(layout_.numbers, rows.rows + t * rows.row_stride + whole * chunk_bytes, n,
                                 all);
            for (int c = 0; c < row_chunk; ++c)
                to[place_in_chunk(pairs_, Lanes::width, c)] = all[c] / of_layout_->unit;
        }
    }
    /// Number by number, with scales, in the order of vectors.
    void read_numbers(const row_place& rows, int tokens, float* to) const {
        const int n = layout_.group_of(dim_), bytes = layout_.group_bytes(n);
        for (int t = 0; t < tokens; ++t, to += padded_) {
            for (int c = 0; c < padded_; ++c) to[c] = 0.0f;
            const std::byte* from = rows.rows + t * rows.row_stride;
            for (int c = 0; c < dim_; ++c) {
                const std::byte* const group = from + c / n * bytes;
                const float x = detail::number_of_code(
                    layout_.numbers, detail::code_at(layout_.numbers, group + layout_.front_bytes(), c % n));
                float scale = 1.0f, minimum = 0.0f;
                if (layout_.scale == row_layout::stored::fp16) {
                    scale = float16::to_float(detail::load_as<std::uint16_t>(group));
                    if (layout_.minimum)
                        minimum = float16::to_float(detail::load_as<std::uint16_t>(group + 2));
                } else if (layout_.scale != row_layout::stored::none) {
                    scale =
                        detail::scale_of_code(
                            layout_.scale, rows.scales[t * rows.scale_stride + c / n * rows.group_stride]) *
                        scale_factor_;
                }
                to[place(c)] = detail::rounded_product(x, scale) + minimum;
            }
        }
    }
    /// Is a code of e4m3 NaN?
    bool any_nan(const row_place& rows, int tokens) const {
        using ints = typename Lanes::ints;
        constexpr int bytes = 4 * Lanes::width;
        ints found = Lanes::splat(0);
        std::uint32_t rest = 0;
        for (int t = 0; t < tokens; ++t) {
            const std::byte* const row = rows.rows + t * rows.row_stride;
            int c = 0;
            for (; c + bytes <= dim_; c += bytes)
                found = Lanes::bit_or(
                    found, Lanes::add(Lanes::bit_and(Lanes::load(row + c), Lanes::splat(0x7f7f7f7f)),
                                      Lanes::splat(0x01010101)));
            for (; c < dim_; ++c) rest |= (static_cast<std::uint32_t>(row[c]) & 127u) + 1u;
        }
        std::byte words[bytes];
        Lanes::store(words, found);
        for (const std::byte b : words) rest |= static_cast<std::uint32_t>(b);
        return (rest & 128u) != 0;
    }

    row_layout layout_;
    const row_functions* of_layout_;
    int n_, dim_, padded_, groups_, scale_line_, line_;
    bool pairs_;
    float factor_, scale_factor_;
    std::size_t scales_, minima_, codes_, end_, lines_, decoded_, bytes_;
};

}}}  // namespace kvq::kernels
