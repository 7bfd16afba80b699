// The lower plane of codes of 4 bits: portable, in loops over the rows of a tile that compilers vectorise.
//
//   x = b + s (u + (l - 7.5) / 16),  u = 0 .. 15 the code of the block, l = 0 .. 15
//
// s and b are the parameters of the block, token scales included. The plane has the words of the codes, in
// the same places. So 16 u + l is a code of 8 bits with the scale s / 16 and the zero 7.5: of_both().
// Contract: what lies beyond the plane is limited to it; numbers that are not finite get l = 8. Padding is
// zero.
#pragma once

#include "../../core/rounding.hpp"
#include "../../core/tagged_vector.hpp"
#include "../../pack/code_layout.hpp"
#include "product_blocks.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// What products multiply when both planes are read.
inline code_meaning of_both(code_meaning upper) noexcept {
    upper.top_code = 16.0f * upper.top_code + 15.0f;
    upper.zero_code = 16.0f * upper.zero_code + 7.5f;
    upper.unit *= 0.0625f;
    return upper;
}

class plane_codes {
public:
    plane_codes(const plane_codes&) = delete;
    plane_codes(const product_blocks& of, const block_shape& shape, const block_id& id,
                const std::byte* block)
        : shape_(shape),
          use_(of.meaning.use),
          zero_(of.meaning.zero_code),
          codes_({shape.rows(), of.row_group}, {shape.cols(), of.col_group}),
          block_(block),
          lower_(id.lower) {
        const parameter_source source = of.source.of(id, block);
        const auto line = [](const grouped_axis& axis) { return axis.padded_size() + 64; };
        row_line_ = line(codes_.rows());
        col_line_ = line(codes_.cols);
        const auto floats = [](int of_line, int groups) {
            return static_cast<std::size_t>(of_line) * static_cast<std::size_t>(groups);
        };
        const std::size_t of_rows = floats(row_line_, codes_.cols.groups()),
                          of_columns = floats(col_line_, codes_.rows().groups()),
                          all = 2 * (of_rows + of_columns);
        if (all > most_here) beyond_.resize(all);
        row_scale_ = all > most_here ? beyond_.data() : here_;
        row_bias_ = fill(row_scale_, of_rows, 1.0f);
        col_scale_ = fill(row_bias_, of_rows, 0.0f);
        col_bias_ = fill(col_scale_, of_columns, 1.0f);
        fill(col_bias_, of_columns, 0.0f);
        if (use_.row_scale || use_.row_bias)
            for (int g = 0; g < codes_.cols.groups(); ++g)
                source.rows(source, g, row_scale_ + g * row_line_, row_bias_ + g * row_line_);
        if (use_.columns())
            for (int g = 0; g < codes_.rows().groups(); ++g)
                source.columns(source, g, col_scale_ + g * col_line_, col_bias_ + g * col_line_);
    }

    /// values: [token][channel].
    void write(const float* values) const {
        each_strip([&](const strip& at) {
            std::uint32_t upper[most_rows], lower[most_rows] = {};
            load(block_, at, upper);
            for (int j = 0; j < in_word; ++j) {
                if (at.col[j] < 0) continue;
                float x[most_rows] = {};
                for (int r = 0; r < at.height; ++r) x[r] = values[place(at.row + r, at.col[j])];
                const numbers of = numbers_of(at, j);
                const detail::rounded_products rounded;
                const int shift = shift_of(j);
                constexpr auto of_15 = detail::bit_cast<std::int32_t>(15.0f),
                               of_8 = detail::bit_cast<std::int32_t>(8.0f), of_infinity = 0x7f800000;
                for (int r = 0; r < most_rows; ++r) {
                    const auto code = static_cast<float>(static_cast<std::int32_t>(upper[r] >> shift & 15u));
                    const float step = of.outer[r] * of.inner[r],
                                left = x[r] - value(rounded, of.inner[r], of.bias[r], of.outer[r], code);
                    // In bits, since comparisons of floats are branches to compilers. A quotient that is not
                    // a number, or no step, is in the middle.
                    const auto l = detail::bit_cast<std::int32_t>(left / step * 16.0f + 7.5f);
                    const std::int32_t most = detail::smaller(l, of_15), limited = detail::larger(most, 0),
                                       number = (l & 0x7fffffff) > of_infinity ? of_8 : limited,
                                       chosen = detail::bit_cast<std::int32_t>(step) > 0 ? number : of_8;
                    const float in_last_place = detail::bit_cast<float>(chosen) + 0x1p23f;
                    lower[r] |= (detail::bit_cast<std::uint32_t>(in_last_place) & 15u) << shift;
                }
            }
            std::memcpy(lower_ + 4 * at.word, lower, static_cast<std::size_t>(at.height) * 4);
        });
    }
    /// x^ of both planes, to values [token][channel].
    void read(float* values) const {
        each_strip([&](const strip& at) {
            std::uint32_t upper[most_rows], lower[most_rows];
            load(block_, at, upper);
            load(lower_, at, lower);
            for (int j = 0; j < in_word; ++j) {
                if (at.col[j] < 0) continue;
                const numbers of = numbers_of(at, j);
                const detail::rounded_products rounded;
                const int shift = shift_of(j);
                float x[most_rows];
                for (int r = 0; r < most_rows; ++r) {
                    const auto both =
                        static_cast<std::int32_t>((upper[r] >> shift & 15u) << 4 | (lower[r] >> shift & 15u));
                    x[r] = value(rounded, of.inner[r], of.bias[r], of.outer[r],
                                 (static_cast<float>(both) - 7.5f) * 0.0625f);
                }
                for (int r = 0; r < at.height; ++r) values[place(at.row + r, at.col[j])] = x[r];
            }
        });
    }

private:
    static constexpr int in_word = 8, most_rows = tile_layout::tile_rows;
    static constexpr std::size_t most_here = 8192;
    /// Neighbouring rows of a tile, and a word of each: `word` is that of the first. Padding has column -1.
    struct strip {
        int row, height, slot, set;
        std::size_t word;
        int col[in_word], first_column;
    };
    /// Parameters of the rows of a strip in one of its columns, by whose scale codes are multiplied first.
    struct numbers {
        float inner[most_rows], bias[most_rows], outer[most_rows];
    };

    /// Returns what is behind.
    static float* fill(float* to, std::size_t n, float x) noexcept {
        for (std::size_t i = 0; i < n; ++i) to[i] = x;
        return to + n;
    }
    /// The bits of byte j % 4, in its low or its high half.
    static int shift_of(int j) noexcept { return 8 * (j % 4) + 4 * (j / 4); }
    static void load(const std::byte* from, const strip& at, std::uint32_t (&words)[most_rows]) noexcept {
        std::memset(words, 0, sizeof words);
        std::memcpy(words, from + 4 * at.word, static_cast<std::size_t>(at.height) * 4);
    }
    std::size_t place(int row, int col) const noexcept {
        return shape_.role == tensor::key ? static_cast<std::size_t>(row * shape_.dim + col)
                                          : static_cast<std::size_t>(col * shape_.dim + row);
    }
    /// As the scheme rounds it: scale times code, plus bias, times the scale of the other axis.
    KVQ_INLINE float value(const detail::rounded_products& rounded, float inner, float bias, float outer,
                           float code) const noexcept {
        return rounded(rounded(inner, code - zero_) + bias, outer);
    }
    KVQ_INLINE numbers numbers_of(const strip& at, int j) const noexcept {
        const int c = at.first_column + j,
                  line = (codes_.cols.count == 1 ? 0 : c / codes_.cols.stride) * row_line_ + at.slot;
        const float *const row_scale = row_scale_ + line, *const row_bias = row_bias_ + line;
        const auto column = static_cast<std::size_t>(at.set) + static_cast<std::size_t>(c);
        const float col_scale = col_scale_[column], col_bias = col_bias_[column];
        const bool rows_first = use_.row_bias || !use_.col_bias;
        numbers of;
        for (int r = 0; r < most_rows; ++r) {
            of.inner[r] = rows_first ? row_scale[r] : col_scale;
            of.bias[r] = rows_first ? row_bias[r] : col_bias;
            of.outer[r] = rows_first ? col_scale : row_scale[r];
        }
        return of;
    }
    template <class F>
    void each_strip(F&& f) const {
        const grouped_axis &rows = codes_.rows(), &cols = codes_.cols;
        strip at;
        for (at.row = 0; at.row < rows.size; at.row += at.height) {
            const int group = rows.count == 1 ? 0 : at.row / rows.group,
                      in_group = at.row - group * rows.group;
            at.height = detail::smaller(most_rows, rows.group_size(group) - in_group);
            at.slot = rows.slot(at.row);
            at.set = group * col_line_;
            for (int w = 0; w < codes_.tiles.words_per_row; ++w) {
                at.first_column = in_word * w;
                for (int j = 0; j < in_word; ++j) {
                    const int c = at.first_column + j;
                    at.col[j] = c < cols.padded_size() ? cols.index(c) : -1;
                }
                at.word = codes_.tiles.word(at.row, w);
                f(at);
            }
        }
    }

    block_shape shape_;
    fold_use use_;
    float zero_;
    code_layout<4> codes_;
    const std::byte* block_;
    std::byte* lower_;
    int row_line_, col_line_;
    // Parameters in the places of rows and of columns, group by group. Those of nested8 in pages of up to 256
    // tokens and 512 channels take no memory, as a reserved step promises.
    float *row_scale_, *row_bias_, *col_scale_, *col_bias_;
    alignas(64) float here_[most_here];
    detail::tagged_vector<float> beyond_;
};

}}}  // namespace kvq::kernels
