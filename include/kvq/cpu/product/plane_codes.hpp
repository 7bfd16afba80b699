// The lower plane of codes of 4 bits: portable, word by word.
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
        fill(row_scale_, row_line_ * codes_.cols.groups(), 1.0f);
        fill(row_bias_, row_line_ * codes_.cols.groups(), 0.0f);
        fill(col_scale_, col_line_ * codes_.rows().groups(), 1.0f);
        fill(col_bias_, col_line_ * codes_.rows().groups(), 0.0f);
        if (use_.row_scale || use_.row_bias)
            for (int g = 0; g < codes_.cols.groups(); ++g)
                source.rows(source, g, row_scale_.data() + g * row_line_, row_bias_.data() + g * row_line_);
        if (use_.columns())
            for (int g = 0; g < codes_.rows().groups(); ++g)
                source.columns(source, g, col_scale_.data() + g * col_line_,
                               col_bias_.data() + g * col_line_);
    }

    /// values: [token][channel].
    void write(const float* values) const {
        each_word([&](int row, std::size_t word, const cells& at) {
            const std::uint32_t upper = load(block_, word);
            float x[in_word];
            for (int j = 0; j < in_word; ++j) x[j] = values[place(row, at.col[j])];
            std::uint32_t lower = 0;
            for (int j = 0; j < in_word; ++j) {
                const float step = at.row_scale[j] * at.col_scale[j];
                const float left = x[j] - value(at, j, static_cast<float>(upper >> shift_of(j) & 15u));
                // A quotient that is not a number, or no step, is in the middle.
                const float l = step > 0.0f ? left / step * 16.0f + 7.5f : 8.0f;
                const float limited = l > 0.0f ? detail::smaller(l, 15.0f) : l == l ? 0.0f : 8.0f;
                const auto code =
                    static_cast<std::uint32_t>(static_cast<std::int32_t>((limited + 0x1p23f) - 0x1p23f));
                lower |= (code & at.keep[j]) << shift_of(j);
            }
            std::memcpy(lower_ + 4 * word, &lower, 4);
        });
    }
    /// x^ of both planes, to values [token][channel].
    void read(float* values) const {
        each_word([&](int row, std::size_t word, const cells& at) {
            const std::uint32_t upper = load(block_, word), lower = load(lower_, word);
            float x[in_word];
            for (int j = 0; j < in_word; ++j) {
                const auto both = static_cast<std::int32_t>((upper >> shift_of(j) & 15u) << 4 |
                                                            (lower >> shift_of(j) & 15u));
                x[j] = value(at, j, (static_cast<float>(both) - 7.5f) * 0.0625f);
            }
            for (int j = 0; j < in_word; ++j)
                if (at.keep[j] != 0) values[place(row, at.col[j])] = x[j];
        });
    }

private:
    static constexpr int in_word = 8;
    /// The columns of a word, and the parameters of a row there. Padding has column 0, and nothing to keep.
    struct cells {
        int col[in_word];
        std::uint32_t keep[in_word];
        float row_scale[in_word], row_bias[in_word], col_scale[in_word], col_bias[in_word];
    };

    static void fill(detail::tagged_vector<float>& v, int n, float x) {
        v.resize(static_cast<std::size_t>(n));
        for (float& f : v) f = x;
    }
    /// The bits of byte j % 4, in its low or its high half.
    static int shift_of(int j) noexcept { return 8 * (j % 4) + 4 * (j / 4); }
    static std::uint32_t load(const std::byte* from, std::size_t word) noexcept {
        std::uint32_t w;
        std::memcpy(&w, from + 4 * word, 4);
        return w;
    }
    std::size_t place(int row, int col) const noexcept {
        return shape_.role == tensor::key ? static_cast<std::size_t>(row * shape_.dim + col)
                                          : static_cast<std::size_t>(col * shape_.dim + row);
    }
    /// As the scheme rounds it: scale times code, plus bias, times the scale of the other axis.
    KVQ_INLINE float value(const cells& at, int j, float code) const noexcept {
        if (use_.row_bias || !use_.col_bias)
            return detail::rounded_product(
                detail::rounded_product(at.row_scale[j], code - zero_) + at.row_bias[j], at.col_scale[j]);
        return detail::rounded_product(
            detail::rounded_product(at.col_scale[j], code - zero_) + at.col_bias[j], at.row_scale[j]);
    }
    template <class F>
    void each_word(F&& f) const {
        const grouped_axis &rows = codes_.rows(), &cols = codes_.cols;
        const int words = codes_.tiles.words_per_row;
        for (int row = 0; row < rows.size; ++row) {
            const int slot = rows.slot(row), set = (rows.count == 1 ? 0 : row / rows.group) * col_line_;
            for (int w = 0; w < words; ++w) {
                cells at;
                for (int j = 0; j < in_word; ++j) {
                    const int c = in_word * w + j, col = c < cols.padded_size() ? cols.index(c) : -1;
                    const int line = (cols.count == 1 || col < 0 ? 0 : c / cols.stride) * row_line_ + slot;
                    at.col[j] = detail::larger(col, 0);
                    at.keep[j] = col < 0 ? 0u : 15u;
                    at.row_scale[j] = row_scale_[static_cast<std::size_t>(line)];
                    at.row_bias[j] = row_bias_[static_cast<std::size_t>(line)];
                    const std::size_t column = static_cast<std::size_t>(set) + static_cast<std::size_t>(c);
                    at.col_scale[j] = col_scale_[column];
                    at.col_bias[j] = col_bias_[column];
                }
                f(row, codes_.tiles.word(row, w), at);
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
    detail::tagged_vector<float> row_scale_, row_bias_, col_scale_, col_bias_;
};

}}}  // namespace kvq::kernels
