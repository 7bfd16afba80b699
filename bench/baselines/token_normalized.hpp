// token_normalized<Inner>: keys of one length each before another scheme, so that one small or large token
// sets no range of a channel.
//
//   r_t = |k_t| / sqrt(D), as float16;   k^_t = r_t Inner(k_t / r_t)
//   block = [block of Inner][r: float16 per token, padded to 16 bytes]
//
// oscar_scaled<B, G> is OScaR: keys behind a Hadamard transform ("canalized rotation"), then of one length
// ("omni-token scaling"), then B bits per channel over G tokens; values behind a Hadamard transform, B bits
// per token over G channels. Bits of keys, with everything counted: B + 32 / G + 16 / D (2 bits, G = 32, D =
// 64: 3.25), of values B + 32 / G. The paper has G = 32 and 128 recent tokens in 16 bit. Assumed: range and
// minimum in fp16, the length as fp16 root mean square.
//
// Contract: that of Inner for k / r. NaN and infinities do not enter r. A foldable Inner without parameters
// on the rows of keys stays foldable: r is a scale of rows.
// Source: OScaR, arXiv 2605.19660.
#pragma once

#include <cmath>
#include <cstring>
#include <kvq/schemes/affine.hpp>
#include <kvq/schemes/transformed.hpp>
#include <string>

#include "half_section.hpp"

namespace baselines {

template <kvq::foldable Inner>
requires(!Inner::fold(kvq::tensor::key).row_scale && !Inner::fold(kvq::tensor::key).row_bias &&
         !kvq::transforming<Inner>) struct token_normalized : Inner {
    using attends_as = token_normalized;

    std::string name() const {
        const std::string inner = Inner::name();
        return "normalized-" + inner;
    }

    static constexpr bool supports(kvq::tensor role) noexcept {
        return role == kvq::tensor::key && kvq::key_scheme<Inner>;
    }

    constexpr std::size_t block_bytes(const kvq::block_shape& s) const noexcept {
        return Inner::block_bytes(s) + section(s);
    }

    /// values: [tokens][dim], overwritten by k / r. Writes the whole block. Returns how many values were not
    /// finite.
    std::uint32_t quantize(const kvq::block_shape& s, const kvq::block_id& id, float* values,
                           std::byte* block) const {
        std::byte* const lengths = block + Inner::block_bytes(s);
        std::memset(lengths, 0, section(s));
        for (int t = 0; t < s.tokens; ++t) {
            float* const token = values + t * s.dim;
            double squares = 0.0;
            int n = 0;
            for (int c = 0; c < s.dim; ++c)
                if (const auto x = static_cast<double>(token[c]); std::isfinite(x)) squares += x * x, ++n;
            const int slot = Inner::codes(s).rows().slot(t);
            store_half(lengths, slot, n ? std::sqrt(squares / n) : 0.0);
            const float length = load_half(lengths, slot);
            for (int c = 0; c < s.dim; ++c) token[c] = length > 0.0f ? token[c] / length : 0.0f * token[c];
        }
        return Inner::quantize(s, id, values, block);
    }

    /// values: [tokens][dim], written.
    void dequantize(const kvq::block_shape& s, const kvq::block_id& id, const std::byte* block,
                    float* values) const {
        Inner::dequantize(s, id, block, values);
        for (int t = 0; t < s.tokens; ++t) {
            const float length = load_half(block + Inner::block_bytes(s), Inner::codes(s).rows().slot(t));
            for (int c = 0; c < s.dim; ++c)
                values[t * s.dim + c] = kvq::rounded_product(length, values[t * s.dim + c]);
        }
    }

    static constexpr kvq::fold_use fold(kvq::tensor) noexcept {
        return {true, false, Inner::fold(kvq::tensor::key).col_scale, Inner::fold(kvq::tensor::key).col_bias};
    }
    template <class Backend>
    void row_parameters(const kvq::block_shape& s, const kvq::block_id&, const std::byte* block, int,
                        float* scale, float*) const {
        Backend::template load_floats<kvq::float16>(block + Inner::block_bytes(s),
                                                    Inner::codes(s).rows().padded_size(), scale);
    }

private:
    static constexpr std::size_t section(const kvq::block_shape& s) noexcept {
        return half_section(Inner().codes(s).rows().padded_size());
    }
};

/// OScaR. Bits of keys and values, tokens or channels that share parameters.
template <int Bits, int Group = 32>
struct oscar_scaled {
    using keys = kvq::hadamard<token_normalized<kvq::affine<Bits, kvq::per_channel<Group>>>>;
    using values = kvq::hadamard<kvq::affine<Bits, kvq::per_token<Group>>>;
};

}  // namespace baselines
