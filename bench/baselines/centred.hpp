// centred<Inner>: keys without their mean. Each block stores the mean of every channel, and Inner quantizes
// the differences.
//
//   m_c = mean over the block's tokens, as float16;   k^ = Inner(k - m) + m;
//     q . k^ = q . Inner(k - m) + q . m
//   block = [block of Inner][m: float16 per channel, padded to 16 bytes]
//
// Keys have large channel means (a bias of the projection, low rotary frequencies), which ruin groups of
// channels of one token. q . m is one value per query and block, and attention adds it: blocks have different
// means, sinks and recent tokens none.
//
// Folding: m is a bias of columns. centred<Inner> is foldable if Inner is foldable, has no scales on the rows
// of keys (per-channel schemes) and no transform, since m is the mean of the values before it. Otherwise
// attention dequantizes block by block.
// Contract: that of Inner for k - m. NaN and infinities do not enter the mean.
#pragma once

#include <cmath>
#include <cstring>
#include <kvq/schemes/concepts.hpp>
#include <string>
#include <type_traits>

#include "half_section.hpp"

namespace baselines {

/// Is S foldable, for keys with parameters on columns only, and without a transform?
template <class S>
constexpr bool folds_columns_only = false;
template <kvq::foldable S>
constexpr bool folds_columns_only<S> =
    !S::fold(kvq::tensor::key).row_scale && !S::fold(kvq::tensor::key).row_bias && !kvq::transforming<S>;

template <kvq::kv_scheme Inner>
struct centred : Inner {
    using attends_as = std::conditional_t<folds_columns_only<Inner>, centred, void>;

    std::string name() const {
        const std::string inner = Inner::name();
        return "centred-" + inner;
    }

    static constexpr bool supports(kvq::tensor role) noexcept {
        return role == kvq::tensor::key && kvq::key_scheme<Inner>;
    }

    constexpr std::size_t block_bytes(const kvq::block_shape& s) const noexcept {
        return Inner::block_bytes(s) + half_section(s.dim);
    }

    /// values: [tokens][dim], overwritten by k - m. Writes the whole block. Returns how many values were not
    /// finite.
    std::uint32_t quantize(const kvq::block_shape& s, const kvq::block_id& id, float* values,
                           std::byte* block) const {
        std::byte* const means = block + Inner::block_bytes(s);
        std::memset(means, 0, half_section(s.dim));
        for (int c = 0; c < s.dim; ++c) {
            double sum = 0.0;
            int n = 0;
            for (int t = 0; t < s.tokens; ++t)
                if (const float x = values[t * s.dim + c]; std::isfinite(x)) {
                    sum += static_cast<double>(x);
                    ++n;
                }
            store_half(means, c, n ? sum / n : 0.0);
            for (int t = 0; t < s.tokens; ++t) values[t * s.dim + c] -= load_half(means, c);
        }
        return Inner::quantize(s, id, values, block);
    }

    /// values: [tokens][dim], written.
    void dequantize(const kvq::block_shape& s, const kvq::block_id& id, const std::byte* block,
                    float* values) const {
        Inner::dequantize(s, id, block, values);
        for (int t = 0; t < s.tokens; ++t)
            for (int c = 0; c < s.dim; ++c) values[t * s.dim + c] += mean(s, block, c);
    }

    static constexpr kvq::fold_use fold(kvq::tensor) noexcept requires folds_columns_only<Inner> {
        return {false, false, Inner::fold(kvq::tensor::key).col_scale, true};
    }
    template <class Backend>
    void col_parameters(const kvq::block_shape& s, const kvq::block_id& id, const std::byte* block,
                        int row_group, float* scale, float* bias) const requires folds_columns_only<Inner> {
        Inner::template col_parameters<Backend>(s, id, block, row_group, scale, bias);
        const kvq::grouped_axis cols = Inner::codes(s).cols;
        for (int c = 0; c < s.dim; ++c) {
            float& at = bias[cols.slot(c)];
            at = (Inner::fold(kvq::tensor::key).col_bias ? at : 0.0f) + mean(s, block, c);
        }
        if constexpr (!Inner::fold(kvq::tensor::key).col_bias)
            for (int i = s.dim; i < cols.padded_size(); ++i) bias[i] = 0.0f;
    }

private:
    float mean(const kvq::block_shape& s, const std::byte* block, int channel) const noexcept {
        return load_half(block + Inner::block_bytes(s), channel);
    }
};

}  // namespace baselines
