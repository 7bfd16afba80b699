// Records of tokens behind a Hadamard matrix with signs: vLLM's int4 with a scale per token and head.
//
//   y = H (D x)          y[i] = sum_j (-1)^bits(i & j) d[j] x[j],   d[j] = 1 or -1
//   x^ = D (H y^) / n    n channels, a power of two; y^ = s (code - z) of schemes/record_layout.hpp
//
//   rotated_records(int4_token_head)              vLLM's signs: find_format("int4-token-head")
//   rotated_records(int4_token_head, signs)       signs of your own, one for each channel
//
//   format           bytes of a token, in order
//   int4-token-head  4 bit x n, fp32 whose lowest four bits are z
//
// vLLM draws its signs by torch.bernoulli with p = 1/2 from a generator with the seed 0x9E3779B9: bit 23 of
// the numbers of a Mersenne twister, 1 where it is zero. They do not depend on the number of channels.
// Contract: that of schemes/record_layout.hpp; sums of H by stages of neighbours 1, 2, 4, ... apart, each
// rounded (as vLLM does on a CPU; its GPUs round to 16 bits before, so that a code may differ by one). Values
// above 2^100 saturate. Own signs are part of the fingerprint. Attention dequantizes blocks first.
// Source: vLLM, int4_per_token_head.
#pragma once

#include <span>

#include "../quant/hadamard.hpp"
#include "token_records.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// What is stored behind the matrix.
inline constexpr record_layout int4_token_head{"int4-token-head",
                                               0,
                                               record_layout::number::bits,
                                               4,
                                               0,
                                               record_layout::stored::fp32,
                                               record_layout::rule::zero_point,
                                               1e-6f};

struct rotated_records {
    static constexpr int most_channels = 512;

    explicit rotated_records(const record_layout& layout) : records_(layout) { draw_signs(0x9E3779B9u); }
    /// Raises std::invalid_argument for more than most_channels, and for signs that are neither 1 nor -1.
    rotated_records(const record_layout& layout, std::span<const float> signs)
        : records_(layout), channels_(static_cast<int>(signs.size())) {
        if (signs.empty() || signs.size() > most_channels)
            detail::fail(layout.name, " has signs of 1 to ", most_channels, " channels, but got ",
                         signs.size());
        for (std::size_t i = 0; i < signs.size(); ++i) {
            if (signs[i] != 1.0f && signs[i] != -1.0f)
                detail::fail(layout.name, ": sign ", i, " is ", signs[i], ", neither 1 nor -1");
            set_sign(static_cast<int>(i), signs[i] < 0.0f);
        }
    }

    short_text name() const { return records_.name(); }
    const record_layout& layout() const noexcept { return records_.layout(); }
    std::uint64_t fingerprint() const noexcept {
        std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
        if (channels_ == 0) return hash;
        hash = (hash ^ static_cast<std::uint64_t>(channels_)) * 0x100000001b3u;
        for (const std::uint64_t word : negative_) hash = (hash ^ word) * 0x100000001b3u;
        return hash;
    }
    std::size_t block_bytes(const block_shape& s) const noexcept { return records_.block_bytes(s); }
    void check(const cache_shape& shape, tensor role) const {
        const int dim = shape.dim(role);
        if (dim < 2 || dim > most_channels || (dim & (dim - 1)) != 0 || (channels_ != 0 && dim != channels_))
            detail::fail(layout().name, " has ", channels_ != 0 ? channels_ : most_channels, " channels",
                         channels_ != 0 ? "" : " at most and a power of two", ", but head_dim is ", dim);
    }

    std::uint32_t quantize(const block_shape& s, const block_id& id, float* values, std::byte* block) const {
        std::uint32_t not_finite = 0;
        for (int t = 0; t < s.tokens; ++t) {
            float* const x = values + std::ptrdiff_t{t} * s.dim;
            for (int c = 0; c < s.dim; ++c) {
                not_finite += !detail::is_finite(x[c]);
                x[c] = x[c] != x[c] ? 0.0f : detail::smaller(detail::larger(x[c], -0x1p100f), 0x1p100f);
                if (negative(c)) x[c] = -x[c];
            }
            detail::hadamard_sums(x, s.dim);
        }
        records_.quantize(s, id, values, block);
        return not_finite;
    }
    void dequantize(const block_shape& s, const block_id& id, const std::byte* block, float* values) const {
        records_.dequantize(s, id, block, values);
        restore(values, s.dim, s.tokens);
    }
    /// As token_records::read.
    bool read(const row_place& of, int dim, int from, int tokens, float* values) const {
        const bool finite = records_.read(of, dim, from, tokens, values);
        restore(values, dim, tokens);
        return finite;
    }

private:
    bool negative(int c) const noexcept { return (negative_[c / 64] >> (c % 64) & 1u) != 0; }
    void set_sign(int c, bool below_zero) noexcept {
        if (below_zero) negative_[c / 64] |= std::uint64_t{1} << (c % 64);
    }
    /// By the first numbers of MT19937.
    void draw_signs(std::uint32_t seed) {
        constexpr int size = 624;
        std::uint32_t state[size];
        state[0] = seed;
        for (int i = 1; i < size; ++i)
            state[i] = 1812433253u * (state[i - 1] ^ state[i - 1] >> 30) + static_cast<std::uint32_t>(i);
        for (int c = 0; c < most_channels; ++c) {
            std::uint32_t y = (state[c] & 0x80000000u) | (state[(c + 1) % size] & 0x7fffffffu);
            state[c] = state[(c + 397) % size] ^ y >> 1 ^ ((y & 1u) != 0 ? 0x9908b0dfu : 0u);
            y = state[c];
            y ^= y >> 11;
            y ^= y << 7 & 0x9d2c5680u;
            y ^= y << 15 & 0xefc60000u;
            set_sign(c, ((y ^ y >> 18) >> 23 & 1u) != 0);
        }
    }
    void restore(float* values, int dim, int tokens) const noexcept {
        const float inverse = 1.0f / static_cast<float>(dim);  // exact
        for (int t = 0; t < tokens; ++t, values += dim) {
            detail::hadamard_sums(values, dim);
            for (int c = 0; c < dim; ++c) values[c] *= negative(c) ? -inverse : inverse;
        }
    }

    token_records records_;
    int channels_ = 0;  ///< that signs were given for; 0: vLLM's
    std::uint64_t negative_[most_channels / 64] = {};
};

static_assert(key_scheme<rotated_records> && value_scheme<rotated_records>);

}}  // namespace kvq
