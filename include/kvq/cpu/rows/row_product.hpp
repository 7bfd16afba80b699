// Products with rows of tokens in the layouts of other systems, where they lie: in pages of kvq, or in memory
// of their owner.
//
//   row_product<Lanes> p(layout, tensor_scale, {role, tokens, dim}, n)     n operands; tokens at most
//   p.begin(x, x_stride, workspace)                                        keys: prepares the operands
//   p.keys(rows, tokens, y, ...)      y[i][t] (+)= sum_c x^[t][c] x[i][c]
//   p.values(rows, tokens, w, ...)    y[i][c] (+)= sum_t w[i][t] x^[t][c]
//
// One class for all layouts, which are values: kernels are chosen by the kind of numbers and of scales
// (row_functions.hpp), or products are those of bytes (row_codes.hpp). More than four operands share one copy
// of the rows. Layouts that no kernel reads, and rows or operands that are not finite where kernels need it,
// are read number by number.
// Contract: sums of floats, of at most tokens_of_pass tokens, or with operands of 16 bits; nothing outside of
// the rows and their scales is read.
#pragma once

#include <cstring>

#include "../../core/row_place.hpp"
#include "../../core/shape.hpp"
#include "row_functions.hpp"
#include "row_pairs.hpp"
#include "row_scales.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <class Lanes>
class row_product {
public:
    row_product(const row_layout& layout, float tensor_scale, const block_shape& s, int n)
        : layout_(layout),
          codes_of_layout_(layout),
          of_layout_(row_functions_for<Lanes>(layout)),
          n_(n),
          dim_(s.dim),
          by_codes_(multiplies_codes<Lanes> && codes_of_layout_),
          scale_reader_(layout, tensor_scale, s.dim, by_codes_) {
        const bool scaled = layout.scale != row_layout::stored::none;
        by_pairs_ = multiplies_pairs(layout) && dim_ % pair_channels == 0;
        pairs_ = of_layout_ && of_layout_->pairs;
        factor_ = (scaled ? 1.0f : tensor_scale);
        padded_ = detail::round_up(dim_, row_chunk);
        chunk_bytes_ = layout.front_bytes() + row_chunk * layout.bits() / 8;
        const int tokens = detail::smaller(s.tokens, tokens_of_pass), groups = scale_reader_.groups(),
                  scales = scale_reader_.floats(tokens);
        std::size_t at = 0;
        const auto take = [&](int rows, int floats) {
            const std::size_t here = at;
            at += detail::round_up(
                static_cast<std::size_t>(rows) * static_cast<std::size_t>(floats) * sizeof(float),
                std::size_t{64});
            return here;
        };
        take(detail::round_up(n, 4), padded_);  // operands, or sums
        scales_ = take(1, scales + Lanes::width);
        minima_ = take(1, layout.minimum ? scales + Lanes::width : 0);
        // Codes of scales, and floats of them before they are spread.
        codes_ = take(1, scaled ? detail::larger(2 * tokens * groups, scales) + 64 : 0);
        end_ = take(tokens, dim_ % row_chunk != 0 ? row_chunk : 0);
        line_ = detail::round_up(tokens, 2 * Lanes::width);
        lines_ = take(row_key_operands, line_);
        decoded_ = at;
        at += detail::round_up(detail::larger(static_cast<std::size_t>(tokens) *
                                                  static_cast<std::size_t>(padded_) * sizeof(float),
                                              by_codes_ ? code_bytes() : 0),
                               std::size_t{64});
        if (by_codes_) {
            operands_ = take(detail::ceil_div(n, row_key_operands), operand_floats());
            weights_ = take(1, sizeof(code_weight_space) / sizeof(float));
        }
        // Operands of keys, or weights of values.
        if (by_pairs_)
            operands_ = take(1, detail::larger(detail::ceil_div(n, row_key_operands) * dim_ * 4 + 1,
                                               row_key_operands * tokens_of_pass));
        addresses_ = at;
        bytes_ = at + detail::round_up(sizeof(addresses), std::size_t{64});
    }

    std::size_t workspace_bytes() const { return bytes_; }

    void begin(const float* x, std::ptrdiff_t x_stride, std::byte* workspace) const {
        auto* const to = reinterpret_cast<float*>(workspace);
        [[maybe_unused]] auto* const decoded = reinterpret_cast<float*>(workspace + decoded_);
        std::memset(to, 0, static_cast<std::size_t>(n_) * static_cast<std::size_t>(padded_) * sizeof(float));
        for (int i = 0; i < n_; ++i)
            for (int c = 0; c < dim_; ++c) to[i * padded_ + place(c)] = x[i * x_stride + c];
        if constexpr (multiplies_codes<Lanes>)
            for (int i = 0; by_codes_ && i < n_; i += row_key_operands)
                begin_code_operands<Lanes>(codes_of_layout_, x + i * x_stride, x_stride,
                                           detail::smaller(n_ - i, row_key_operands), dim_, layout_.minimum,
                                           operands_of(i, workspace), decoded);
        if constexpr (has_pairs<Lanes>) {
            if (!by_pairs_) return;
            pairs_are_finite(workspace) = std::byte{
                all_finite<Lanes>(to, static_cast<std::size_t>(n_) * static_cast<std::size_t>(padded_), 1)};
            for (int i = 0; i < n_; i += row_key_operands)
                begin_pair_operands<Lanes>(
                    x + i * x_stride, x_stride, detail::smaller(n_ - i, row_key_operands), dim_,
                    workspace + operands_ + i / row_key_operands * pair_operand_bytes(),
                    workspace + decoded_);
        }
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
            prepared p = prepare(rows, from + first, here, ahead, workspace);
            finite = finite && p.finite;
            if (keys_by_codes(p, y + first, y_stride, add, workspace) ||
                keys_by_pairs(p, y + first, y_stride, add, workspace))
                continue;
            prepare_floats(rows, p, workspace);
            const float factor = factor_ * p.functions->unit;
            for (int i = 0; i < n_; i += row_key_operands) {
                const int count = detail::smaller(n_ - i, row_key_operands);
                const float* operands[row_key_operands];
                for (int k = 0; k < row_key_operands; ++k)
                    operands[k] = x + (i + detail::smaller(k, count - 1)) * padded_;
                p.functions->keys[count > 1](p.pass, operands, lines, line_);
                for (int k = 0; k < count; ++k)
                    put(lines + k * line_, here, factor, y + (i + k) * y_stride + first, add);
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
            prepared p = prepare(rows, from + first, here, ahead, workspace);
            finite = finite && p.finite;
            const bool by_codes = values_by_codes(p, w + first, w_stride, workspace);
            if (by_codes || values_by_pairs(p, w + first, w_stride, workspace)) {
                add_sums(sums, by_codes ? 1.0f : factor_, 0, y, y_stride, add || first > 0);
                continue;
            }
            prepare_floats(rows, p, workspace);
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
            add_sums(sums, factor_ * p.functions->unit, pairs_ ? Lanes::width : 0, y, y_stride,
                     add || first > 0);
        }
        return finite;
    }

private:
    /// Where the tokens of a pass lie.
    struct addresses {
        const std::byte* rows[tokens_of_pass];
        const std::byte* scales[tokens_of_pass];
        const std::byte* next[tokens_of_pass];
    };
    struct prepared {
        row_pass pass;
        const row_functions* functions;
        bool finite, by_codes;
        addresses& at;
    };

    static bool multiplies_pairs([[maybe_unused]] const row_layout& l) {
        if constexpr (has_pairs<Lanes>)
            return l.numbers == row_layout::number::e4m3 && l.scale == row_layout::stored::none &&
                   Lanes::multiplies_pairs();
        else
            return false;
    }
    int place(int c) const {
        return c / row_chunk * row_chunk + place_in_chunk(pairs_, Lanes::width, c % row_chunk);
    }
    static void put(const float* sums, int n, float factor, float* y, bool add) {
        for (int k = 0; k < n; ++k) y[k] = (add ? y[k] : 0.0f) + sums[k] * factor;
    }
    /// pairs: even channels in as many lanes, then odd ones; 0: in order.
    void add_sums(const float* sums, float factor, int pairs, float* y, std::ptrdiff_t y_stride,
                  bool add) const {
        for (int i = 0; i < n_; ++i, sums += padded_, y += y_stride) {
            if (pairs == 0) {
                put(sums, dim_, factor, y, add);
                continue;
            }
            for (int c = 0; c < dim_; c += 2 * pairs) {
                const int rest = detail::smaller(dim_ - c, 2 * pairs), here = rest / 2;
                for (int k = 0; k < here; ++k) {
                    float* const to = y + c + 2 * k;
                    to[0] = (add ? to[0] : 0.0f) + sums[c + k] * factor;
                    to[1] = (add ? to[1] : 0.0f) + sums[c + pairs + k] * factor;
                }
                if (rest % 2 != 0) put(sums + c + here, 1, factor, y + c + 2 * here, add);
            }
        }
    }

    int key_passes() const { return 2 * detail::ceil_div(dim_, 128); }
    int operand_floats() const {
        return detail::round_up(code_operands::floats(key_passes(), scale_reader_.groups()), 16);
    }
    /// Of begin_code_operands.
    std::size_t code_bytes() const {
        return static_cast<std::size_t>(key_passes()) * 13 * 64 * sizeof(float);
    }
    code_operands operands_of(int i, std::byte* workspace) const {
        auto* const all = reinterpret_cast<float*>(workspace + operands_);
        return {all + i / row_key_operands * operand_floats(), key_passes(), scale_reader_.groups()};
    }
    /// False: not by codes.
    bool keys_by_codes(const prepared& p, float* y, std::ptrdiff_t y_stride, bool add,
                       std::byte* workspace) const {
        if constexpr (multiplies_codes<Lanes>) {
            if (!p.by_codes) return false;
            for (int i = 0; i < n_; i += row_key_operands)
                if (!operands_of(i, workspace).finite()) return false;
            auto* const lines = reinterpret_cast<float*>(workspace + lines_);
            const bool nibbles = codes_of_layout_.of_nibbles;
            for (int i = 0; i < n_; i += row_key_operands) {
                const int count = detail::smaller(n_ - i, row_key_operands);
                const code_operands x = operands_of(i, workspace);
                const auto of = !nibbles ? (count > 1 ? &code_keys<Lanes, row_key_operands, false, true>
                                                      : &code_keys<Lanes, 1, false, true>)
                                : p.pass.front > 0
                                    ? (count > 1 ? &code_keys<Lanes, row_key_operands, true, true>
                                                 : &code_keys<Lanes, 1, true, true>)
                                : count > 1 ? &code_keys<Lanes, row_key_operands, true, false>
                                            : &code_keys<Lanes, 1, true, false>;
                of(p.pass, codes_of_layout_, layout_.channels, x, lines, line_);
                for (int k = 0; k < count; ++k)
                    put(lines + k * line_, p.pass.tokens, x.steps()[k] * factor_ * codes_of_layout_.unit,
                        y + (i + k) * y_stride, add);
            }
            return true;
        } else {
            return false;
        }
    }
    /// False: not by codes.
    bool values_by_codes(const prepared& p, const float* w, std::ptrdiff_t w_stride,
                         std::byte* workspace) const {
        if constexpr (multiplies_codes<Lanes>) {
            if (!p.by_codes) return false;
            if (!all_finite<Lanes>(w, static_cast<std::size_t>(p.pass.tokens), 0, n_, w_stride)) return false;
            auto& weights = *reinterpret_cast<code_weight_space*>(workspace + weights_);
            auto* const sums = reinterpret_cast<float*>(workspace);
            const bool nibbles = codes_of_layout_.of_nibbles, sixteens = layout_.channels == 16;
            const std::byte* const half = half_chunk(p.pass, workspace + end_);
            // Groups of a chunk.
            const int sets = sixteens ? 2 : 1;
            for (int i = 0; i < n_; i += row_key_operands) {
                const int count = detail::smaller(n_ - i, row_key_operands);
                for (int g = 0; g < scale_reader_.groups(); g += weight_groups) {
                    const int here = detail::smaller(scale_reader_.groups() - g, weight_groups),
                              at = g * tokens_of_pass;
                    const float* const minima = p.pass.minima ? p.pass.minima + at : nullptr;
                    const auto prepare_weights =
                        sixteens ? (count > 1 ? &code_weights<Lanes, 4, 2> : &code_weights<Lanes, 1, 2>)
                                 : (count > 1 ? &code_weights<Lanes, 4, 1> : &code_weights<Lanes, 1, 1>);
                    if (!prepare_weights(w + i * w_stride, w_stride, count, p.pass.tokens, here,
                                         p.pass.scales + at, minima, tokens_of_pass, codes_of_layout_.offset,
                                         weights))
                        return false;
                    const auto of =
                        !nibbles ? (count > 1 ? &code_values<Lanes, 4, false, 1>
                                              : &code_values<Lanes, 1, false, 1>)
                        : sixteens
                            ? (count > 1 ? &code_values<Lanes, 4, true, 2> : &code_values<Lanes, 1, true, 2>)
                        : count > 1 ? &code_values<Lanes, 4, true, 1>
                                    : &code_values<Lanes, 1, true, 1>;
                    of(p.pass, codes_of_layout_, g / sets, detail::ceil_div(here, sets), half, weights,
                       minima != nullptr, sums + i * padded_ + g / sets * row_chunk, padded_);
                }
            }
            return true;
        } else {
            return false;
        }
    }

    /// Behind the operands: whether they, rounded up, are finite.
    std::byte& pairs_are_finite(std::byte* workspace) const {
        return workspace[operands_ + detail::ceil_div(n_, row_key_operands) * pair_operand_bytes()];
    }
    /// Of four operands.
    std::size_t pair_operand_bytes() const { return static_cast<std::size_t>(dim_) * 16; }
    /// False: not by pairs.
    bool keys_by_pairs(const prepared& p, float* y, std::ptrdiff_t y_stride, bool add,
                       std::byte* workspace) const {
        if constexpr (has_pairs<Lanes>) {
            if (!by_pairs_ || pairs_are_finite(workspace) == std::byte{0}) return false;
            auto* const lines = reinterpret_cast<float*>(workspace + lines_);
            for (int i = 0; i < n_; i += row_key_operands) {
                const int count = detail::smaller(n_ - i, row_key_operands);
                const auto of = count > 1 ? &pair_keys<Lanes, row_key_operands> : &pair_keys<Lanes, 1>;
                of(p.pass, workspace + operands_ + i / row_key_operands * pair_operand_bytes(), lines, line_);
                for (int k = 0; k < count; ++k)
                    put(lines + k * line_, p.pass.tokens, factor_, y + (i + k) * y_stride, add);
            }
            return true;
        } else {
            return false;
        }
    }
    /// False: not by pairs.
    bool values_by_pairs(const prepared& p, const float* w, std::ptrdiff_t w_stride,
                         std::byte* workspace) const {
        if constexpr (has_pairs<Lanes>) {
            if (!by_pairs_ || !all_finite<Lanes>(w, static_cast<std::size_t>(p.pass.tokens), 1, n_, w_stride))
                return false;
            auto* const sums = reinterpret_cast<float*>(workspace);
            for (int i = 0; i < n_; i += row_key_operands) {
                const int count = detail::smaller(n_ - i, row_key_operands);
                const auto of = count > 1 ? &pair_values<Lanes, row_key_operands> : &pair_values<Lanes, 1>;
                of(p.pass, w + i * w_stride, w_stride, count, sums + i * padded_, padded_,
                   workspace + operands_);
            }
            return true;
        } else {
            return false;
        }
    }

    /// The rows of the last chunk if it is half of one, with as many bytes as a whole one.
    const std::byte* half_chunk(const row_pass& r, std::byte* to) const {
        constexpr int bytes = row_chunk / 2;
        if (dim_ % row_chunk == 0) return nullptr;
        for (int t = 0; t < detail::round_up(r.tokens, 4); ++t)
            std::memcpy(to + bytes * t,
                        r.rows[t] + std::ptrdiff_t{r.whole_chunks()} * r.chunk_bytes + r.front, bytes / 2);
        return to;
    }

    static void find(const row_place& of, int first, int n, const std::byte** rows,
                     const std::byte** scales) {
        const bool of_scales = scales && of.scales;
        if (of.blocks && of.block_tokens == 1) {
            for (int t = 0; t < n; ++t) rows[t] = of.rows + of.blocks[first + t] * of.block_stride;
            for (int t = 0; t < n && of_scales; ++t)
                scales[t] = of.scales + of.blocks[first + t] * of.scale_block_stride;
            return;
        }
        int block = of.blocks ? first / of.block_tokens : 0,
            in_block = of.blocks ? first % of.block_tokens : first;
        for (int t = 0; t < n; ++block, in_block = 0) {
            const int here = of.blocks ? detail::smaller(n - t, of.block_tokens - in_block) : n;
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
        // Kernels read tokens a few at a time.
        for (int t = n; t < detail::round_up(n, 32); ++t) at.rows[t] = at.rows[n - 1];
        const int follow = ahead != 0 ? 0 : detail::larger(detail::smaller(of.end - first - n, n), 0);
        find(of, first + n, follow, at.next, nullptr);
        for (int t = follow; t < detail::round_up(n, 32); ++t) at.next[t] = at.rows[t] + ahead;
        if (ahead != 0 && of.scales)
            for (std::ptrdiff_t line = 0; line < n * of.scale_stride; line += 64)
                detail::prefetch(at.scales[0] + line + ahead);
        return at;
    }

    /// The rows of a pass, and their scales as floats.
    prepared prepare(const row_place& of, int first, int tokens, std::ptrdiff_t ahead,
                     std::byte* workspace) const {
        addresses& at = find(of, first, tokens, ahead, workspace);
        prepared p{{at.rows, at.next, tokens, dim_, layout_.front_bytes(), chunk_bytes_, nullptr, nullptr, 0,
                    nullptr},
                   of_layout_,
                   true,
                   false,
                   at};
        if (scale_reader_.line() > 0) {
            auto* const scales = reinterpret_cast<float*>(workspace + scales_);
            auto* const minima = reinterpret_cast<float*>(workspace + minima_);
            const bool far_below =
                scale_reader_.read(of, at.rows, at.scales, tokens, workspace + codes_, scales, minima);
            const auto finite = [&](int power) {
                return scale_reader_.finite(scales, tokens, power) &&
                       (!layout_.minimum || scale_reader_.finite(minima, tokens, 0));
            };
            // Sums of codes, below 2^31, are multiplied with them before operands' steps make them small.
            p.by_codes = by_codes_ && (far_below || finite(31));
            p.finite = p.by_codes || finite(0);
            p.pass.scales = scales;
            p.pass.minima = layout_.minimum ? minima : nullptr;
            p.pass.scale_stride = scale_reader_.line();
        }
        return p;
    }
    /// For kernels of floats: all numbers, if there are many operands.
    void prepare_floats(const row_place& of, prepared& p, std::byte* workspace) const {
        const int tokens = p.pass.tokens;
        auto* const decoded = reinterpret_cast<float*>(workspace + decoded_);
        if (!of_layout_ || (of_layout_->checks_nan && any_nan(of, p.at, tokens))) {
            read_numbers(p.at, tokens, p.pass.scales, p.pass.minima, decoded);
        } else {
            if (dim_ % row_chunk != 0) {
                auto* const end = reinterpret_cast<float*>(workspace + end_);
                read_ends(p.at, tokens, end);
                p.pass.end = end;
            }
            if (n_ <= row_key_operands) return;
            of_layout_->decode(p.pass, decoded, padded_);
            const float unit = of_layout_->unit;
            if (unit != 1.0f)
                for (int i = 0; i < tokens * padded_; ++i) decoded[i] *= unit;
        }
        for (int t = 0; t < tokens; ++t)
            p.at.rows[t] = p.at.next[t] = reinterpret_cast<const std::byte*>(decoded + t * padded_);
        p.pass = {p.at.rows, p.at.next, tokens, padded_, 0, row_chunk * int{sizeof(float)},
                  nullptr,   nullptr,   0,      nullptr};
        p.functions = &row_functions_of<Lanes, plain_floats, row_scales::none>;
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
                const int scale = scale_reader_.place(t, c);
                to[place(c)] = (scale_reader_.line() > 0 ? detail::rounded_product(x, scales[scale]) : x) +
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
            const auto look = [&](const std::byte* from) KVQ_INLINE_LAMBDA {
                found = Lanes::bit_or(found,
                                      Lanes::add(Lanes::bit_and(Lanes::load(from), Lanes::splat(0x7f7f7f7f)),
                                                 Lanes::splat(0x01010101)));
            };
            for (; c + 4 * bytes <= length; c += 4 * bytes) {
                KVQ_UNROLL
                for (int k = 0; k < 4; ++k) look(row + c + k * bytes);
            }
            for (; c + bytes <= length; c += bytes) look(row + c);
            for (; c < length; ++c) rest |= (static_cast<std::uint32_t>(row[c]) & 127u) + 1u;
        }
        std::byte words[bytes];
        Lanes::store(words, found);
        for (const std::byte b : words) rest |= static_cast<std::uint32_t>(b);
        return (rest & 128u) != 0;
    }

    row_layout layout_;
    code_rows codes_of_layout_;
    const row_functions* of_layout_;
    int n_, dim_, padded_, chunk_bytes_, line_;
    bool by_codes_, by_pairs_, pairs_;
    row_scale_reader<Lanes> scale_reader_;
    float factor_;
    std::size_t scales_, minima_, codes_, end_, lines_, decoded_, operands_, weights_, addresses_, bytes_;
};

}}}  // namespace kvq::kernels
