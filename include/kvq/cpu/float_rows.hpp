// Kernels of blocks of 8-bit floats in rows of tokens (schemes/float_rows.hpp).
//
//   quantize_rows      tokens to a block
//   dequantize_rows    a block to tokens
//   float_row_product  the product of such a block with n operands: few in place (rows/row_product.hpp), more
//                      through a copy as bfloat16
//
// Contract: the bytes and values of the scheme.
#pragma once

#include "../schemes/float_rows.hpp"
#include "kernel_table.hpp"
#include "product/folded.hpp"
#include "rows/row_product.hpp"
#include "special_values.hpp"
#include "transformed.hpp"
#include "window/tokens.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// values: [tokens][channels]. False: some are not finite.
template <class Lanes, class Code>
bool quantize_rows(const codec_spec&, const parameter_functions&, const block_shape& s,
                   const block_input& from, std::byte* block) {
    using rows = float_rows<Code>;
    constexpr int width = Lanes::width;
    if (!from.tokens) return false;
    const auto* token = reinterpret_cast<const float*>(from.from);
    if (!all_finite<Lanes>(token, s.values())) return false;
    std::byte* scales = block + rows::scale_offset(s);
    std::memset(scales, 0, rows{}.block_bytes(s) - rows::scale_offset(s));
    for (int t = 0; t < s.tokens; ++t, token += s.dim, block += s.dim, scales += sizeof(float)) {
        auto largest = Lanes::splat_float(0.0f);
        int c = 0;
        for (; c + width <= s.dim; c += width)
            largest = Lanes::larger(largest, Lanes::abs(Lanes::load_floats(token + c)));
        float most = Lanes::largest(largest);
        for (; c < s.dim; ++c) most = detail::larger(most, token[c] < 0.0f ? -token[c] : token[c]);
        const float scale = rows::scale_of(most);
        detail::store_as(scales, scale);
        c = 0;
        for (; scale > 0.0f && c + width <= s.dim; c += width) {
            const auto codes = float_lanes<Lanes, Code>::codes(
                Lanes::divide(Lanes::load_floats(token + c), Lanes::splat_float(scale)));
            // Word 0 of every 128 bits.
            std::byte words[4 * width];
            Lanes::store(words, Lanes::template pack_bytes<false>(codes, codes, codes, codes));
            for (int i = 0; i < width; i += 4) std::memcpy(block + c + i, words + 4 * i, 4);
        }
        for (; c < s.dim; ++c) detail::store_as(block + c, rows::code_of(token[c], scale));
    }
    return true;
}

template <class Lanes, class Code>
bool dequantize_rows(const codec_spec&, const parameter_functions&, const block_shape& s,
                     const std::byte* block, float_type type, void* out, std::ptrdiff_t stride,
                     float* scratch) {
    using rows = float_rows<Code>;
    run_in_type<Lanes>(s, type, out, stride, scratch, [&]<class T>(T* to, std::ptrdiff_t to_stride) {
        const std::byte *codes = block, *scales = block + rows::scale_offset(s);
        for (int t = 0; t < s.tokens; ++t, codes += s.dim, scales += sizeof(float), to += to_stride) {
            const auto scale = detail::load_as<float>(scales);
            int c = 0;
            for (; c + Lanes::width <= s.dim; c += Lanes::width)
                Lanes::template store_values<T>(
                    reinterpret_cast<std::byte*>(to + c),
                    Lanes::multiply(float_lanes<Lanes, Code>::values(Lanes::load_bytes(codes + c)),
                                    Lanes::splat_float(scale)));
            for (; c < s.dim; ++c) to[c] = T(rows::value_of(detail::load_as<Code>(codes + c), scale));
        }
    });
    return true;
}

/// to[t] (+)= from[t] * scale of token t, of n tokens.
template <class Lanes>
void scale_tokens(const std::byte* scales, const float* from, int n, float* to, bool add) {
    constexpr int width = Lanes::width;
    for (int t = 0; t < n; t += width) {
        const int here = detail::smaller(width, n - t);
        const std::byte* const at = scales + static_cast<std::size_t>(t) * sizeof(float);
        const auto x = Lanes::multiply(load_rows<Lanes>(from + t, here),
                                       here == width ? Lanes::template load_values<float>(at)
                                                     : Lanes::template load_values<float>(at, here));
        Lanes::store_floats(to + t, add ? Lanes::add(x, load_rows<Lanes>(to + t, here)) : x, here);
    }
}

/// Products with such blocks. Inner: the product with bfloat16, which holds each code exactly; it gets a copy
/// of the codes. The scales of tokens are multiplied apart, into scores or weights.
template <class Inner, class Code>
class float_row_product {
public:
    using lanes = typename Inner::lanes;

    float_row_product(const product_blocks& of, const block_shape& s, int n)
        : inner_(of, s, n),
          few_(row_layouts[0], 1.0f, s, n <= row_key_operands ? n : 1),
          n_(n),
          tokens_(s.tokens) {
        static_assert(std::same_as<Code, e4m3> && row_layouts[0].numbers == row_layout::number::e4m3);
        const auto aligned = [](std::size_t bytes) { return detail::round_up(bytes, std::size_t{64}); };
        copy_ = aligned(detail::larger(inner_.workspace_bytes(), few_.workspace_bytes()));
        rows_ = copy_ + aligned(value_layout<bfloat16>(s).bytes());
        numbers_ = rows_ + aligned(sizeof(bfloat16) * some_tokens * static_cast<std::size_t>(s.dim));
    }

    std::size_t workspace_bytes() const {
        return numbers_ + sizeof(float) * static_cast<std::size_t>(n_) * static_cast<std::size_t>(tokens_);
    }

    void begin(const block_shape& s, block_id id, const std::byte* block, const float* x,
               std::ptrdiff_t x_stride, std::byte* workspace) const {
        if (n_ > row_key_operands)
            inner_.begin(s, id, block, x, x_stride, workspace);
        else if (s.role == tensor::key)
            few_.begin(x, x_stride, workspace);
    }
    void finish(const block_shape& s, block_id id, const std::byte* block, const float* x,
                std::ptrdiff_t x_stride, int rows, int cols, float* y, std::ptrdiff_t y_stride, bool add,
                std::ptrdiff_t ahead, std::byte* workspace) const {
        std::byte* const copy = workspace + copy_;
        const bool in_place = n_ <= row_key_operands;
        if (!in_place) copy_codes(s, block, ahead, copy, reinterpret_cast<bfloat16*>(workspace + rows_));
        const std::byte* const scales = block + float_rows<Code>::scale_offset(s);
        auto* const numbers = reinterpret_cast<float*>(workspace + numbers_);
        const auto multiply = [&](const float* from, std::ptrdiff_t from_stride, float* to,
                                  std::ptrdiff_t to_stride, bool sum) {
            if (!in_place)
                inner_.finish(s, id, copy, from, from_stride, rows, cols, to, to_stride, sum, 0, workspace);
            else if (s.role == tensor::key)
                few_.keys({block, s.dim}, 0, rows, to, to_stride, sum, ahead, workspace);
            else
                few_.values({block, s.dim}, 0, cols, from, from_stride, to, to_stride, sum, ahead, workspace);
        };
        const auto each = [&](int count, const float* from, std::ptrdiff_t from_stride, float* to,
                              std::ptrdiff_t to_stride, bool sum) {
            for (int i = 0; i < n_; ++i)
                scale_tokens<lanes>(scales, from + i * from_stride, count, to + i * to_stride, sum);
        };
        if (s.role == tensor::key) {
            multiply(x, x_stride, numbers, tokens_, false);
            each(rows, numbers, tokens_, y, y_stride, add);
        } else {
            each(cols, x, x_stride, numbers, tokens_, false);
            multiply(numbers, tokens_, y, y_stride, add);
        }
    }

private:
    static constexpr int some_tokens = tile_layout::tile_rows;

    /// rows: room for some_tokens tokens.
    static void copy_codes(const block_shape& s, const std::byte* codes, std::ptrdiff_t ahead,
                           std::byte* copy, bfloat16* rows) {
        // Padding is multiplied, and must be finite.
        if (s.rows() % 4 != 0 || s.cols() % 2 != 0) std::memset(copy, 0, value_layout<bfloat16>(s).bytes());
        for (int t = 0; t < s.tokens; t += some_tokens) {
            const int count = detail::smaller(some_tokens, s.tokens - t), n = count * s.dim;
            int i = 0;
            for (; i + lanes::width <= n; i += lanes::width) {
                if (i % 64 == 0) detail::prefetch(codes + i + ahead);
                lanes::store_halfwords(reinterpret_cast<std::byte*>(rows + i),
                                       lanes::template half_bits<bfloat16>(
                                           float_lanes<lanes, Code>::values(lanes::load_bytes(codes + i))));
            }
            for (; i < n; ++i) rows[i] = bfloat16(static_cast<float>(detail::load_as<Code>(codes + i)));
            write_tokens<lanes, bfloat16>(s, copy, rows, s.dim, count, t);
            codes += n;
        }
    }

    Inner inner_;
    row_product<lanes> few_;  ///< of so few operands that rows are read in place
    int n_, tokens_;
    std::size_t copy_, rows_, numbers_;
};

}}}  // namespace kvq::kernels
