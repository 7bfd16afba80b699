// centred<Inner>: keys without their mean. Each block stores the mean of every channel and codes what differs from it.
//
//   m_c = mean over the block's tokens, as float16;   k^ = Inner(k - m) + m;   q . k^ = q . Inner(k - m) + q . m
//   block = [block of Inner][m: float16 per channel, padded to 16 bytes]
//
// Keys have large channel means (a bias of the projection, low rotary frequencies), which ruin groups of channels of one token.
// q . m is one number per query and block. Softmax would not notice it if the same m served every key that a query sees; with
// a mean per block, and with sinks and recent tokens in 16 bit, it must be added, and is.
//
// Folding: m is a bias of columns, so centred<Inner> is foldable where Inner is, has no factors on the rows of keys (per-channel
// schemes) and no transform, since m is the mean of what was before it. Elsewhere attention dequantizes block by block.
// Contract: that of Inner for k - m; NaN and infinities do not enter the mean.
#pragma once

#include <type_traits>

#include "../core/float_formats.hpp"
#include "../core/text.hpp"
#include "concepts.hpp"

namespace kvq::inline KVQ_TAGGED {
namespace detail {

template <class S>
constexpr bool folds_columns_only = false;
template <foldable S>
constexpr bool folds_columns_only<S> =
    !S::fold(tensor::key).row_scale && !S::fold(tensor::key).row_bias && !transforming<S>;

}  // namespace detail

template <kv_scheme Inner>
struct centred : Inner {
    using attends_as = std::conditional_t<detail::folds_columns_only<Inner>, centred, void>;

    short_text name() const { return "centred-" + Inner::name(); }

    static constexpr bool supports(tensor role) noexcept {
        return role == tensor::key && detail::supports<Inner>(role);
    }

    constexpr std::size_t block_bytes(const block_shape& s) const noexcept {
        return Inner::block_bytes(s) + detail::round_up(2 * static_cast<std::size_t>(s.dim), std::size_t{16});
    }

    std::uint32_t quantize(const block_shape& s, const block_id& id, float* values, std::byte* block) const {
        std::byte* const means = block + Inner::block_bytes(s);
        for (std::size_t i = 0; i < block_bytes(s) - Inner::block_bytes(s); ++i) means[i] = std::byte{0};
        for (int c = 0; c < s.dim; ++c) {
            double sum = 0.0;
            int n = 0;
            for (int t = 0; t < s.tokens; ++t)
                if (const float x = values[t * s.dim + c]; detail::is_finite(x)) {
                    sum += static_cast<double>(x);
                    ++n;
                }
            float mean = n ? static_cast<float>(sum / n) : 0.0f;
            mean = detail::smaller(detail::larger(mean, -float16::max_finite), float16::max_finite);
            detail::store_as(means + 2 * static_cast<std::size_t>(c), float16(mean));
            for (int t = 0; t < s.tokens; ++t) values[t * s.dim + c] -= static_cast<float>(float16(mean));
        }
        return Inner::quantize(s, id, values, block);
    }

    void dequantize(const block_shape& s, const block_id& id, const std::byte* block, float* values) const {
        Inner::dequantize(s, id, block, values);
        for (int t = 0; t < s.tokens; ++t)
            for (int c = 0; c < s.dim; ++c) values[t * s.dim + c] += mean(s, block, c);
    }

    static constexpr fold_use fold(tensor) noexcept requires detail::folds_columns_only<Inner> {
        return {false, false, Inner::fold(tensor::key).col_scale, true};
    }
    template <class Backend>
    void col_parameters(const block_shape& s, const block_id& id, const std::byte* block, int row_group,
                        float* scale, float* bias) const requires detail::folds_columns_only<Inner> {
        Inner::template col_parameters<Backend>(s, id, block, row_group, scale, bias);
        const grouped_axis cols = Inner::codes(s).cols;
        for (int c = 0; c < s.dim; ++c) {
            float& at = bias[cols.slot(c)];
            at = (Inner::fold(tensor::key).col_bias ? at : 0.0f) + mean(s, block, c);
        }
        if constexpr (!Inner::fold(tensor::key).col_bias)
            for (int i = s.dim; i < cols.padded_size(); ++i) bias[i] = 0.0f;
    }

private:
    float mean(const block_shape& s, const std::byte* block, int channel) const noexcept {
        return detail::load_as<float16>(block + Inner::block_bytes(s) +
                                        2 * static_cast<std::size_t>(channel));
    }
};

}  // namespace kvq::inline KVQ_TAGGED
