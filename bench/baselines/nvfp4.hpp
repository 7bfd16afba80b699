// NVFP4: 4-bit floats, one 8-bit scale for every 16 channels of a token, and one float for the tensor.
//
//   scale = e4m3(max|x| / 6 / global)              of 16 channels
//   code  = e2m1(x / (scale * global))             0 where scale * global is 0
//   x^    = e2m1 value * (scale * global)          each product rounded to float
//
//   nvfp4_rows     the published bytes: rows of tokens, [tokens][dim / 2] codes, two in a byte, the even channel in its low half;
//                  then [tokens][dim / 16] scales
//   nvfp4          the same codes and scales in the library's tiles: a block of codes, then scales [dim / 16][token slot]
//
// to_tiles and to_rows turn blocks of one into blocks of the other: no value changes.
// Contract: NaN gets the code 0, infinities saturate, and neither sets a scale. Scales saturate at 448. |x - x^| is at most half the
// distance of the two values of e2m1 beside x / (scale * global), times scale * global; beyond the largest value at most
// scale * global, as long as the scale neither saturates nor is below the normal numbers of e4m3. head_dim is a multiple of 16.
// Sources: NVIDIA, Introducing NVFP4 (developer.nvidia.com, 2025); FlashInfer, nvfp4_kv_quantize (linear scales). They multiply by
// rounded reciprocals, so that a code between two values may differ.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <kvq/core/error.hpp>
#include <kvq/core/float_formats.hpp>
#include <kvq/core/rounding.hpp>
#include <kvq/pack/bit_pack.hpp>
#include <kvq/schemes/concepts.hpp>
#include <stdexcept>
#include <string>

namespace baselines {

/// What both layouts share: 16 channels of a token at a time.
struct nvfp4_groups {
    static constexpr int group = 16;

    float global = 1.0f;  ///< of the tensor; positive and finite

    /// The scale of 16 values and their codes. Returns how many of them are not finite.
    std::uint32_t quantize_group(const float* x, kvq::e4m3& scale, std::uint8_t (&codes)[group]) const {
        constexpr float most = std::numeric_limits<float>::max();
        float largest = 0.0f;
        std::uint32_t finite = 0;
        for (int i = 0; i < group; ++i) {
            const float magnitude = std::fabs(x[i]);
            finite += magnitude <= most;
            largest = magnitude <= most && magnitude > largest ? magnitude : largest;
        }
        scale = kvq::e4m3(largest / 6.0f / global);
        const float step = this->step(scale);
        if (step == 0.0f) {
            std::memset(codes, 0, group);
            return group - finite;
        }
        for (int i = 0; i < group; ++i) {
            // e2m1::from_float, without branches: compilers make vectors of it. Even codes take both ends of their range.
            const float y = std::fabs(x[i]) / step;
            const int code = (y > 0.25f) + (y >= 0.75f) + (y > 1.25f) + (y >= 1.75f) + (y > 2.5f) +
                             (y >= 3.5f) + (y > 5.0f);
            const auto sign = static_cast<int>(std::bit_cast<std::uint32_t>(x[i]) >> 28) & 8;
            codes[i] = static_cast<std::uint8_t>(code | (x[i] == x[i] ? sign : 0));
        }
        return group - finite;
    }
    void dequantize_group(const std::uint8_t (&codes)[group], kvq::e4m3 scale, float* x) const {
        const float step = this->step(scale);
        for (int i = 0; i < group; ++i) x[i] = kvq::rounded_product(kvq::e2m1::to_float(codes[i]), step);
    }
    float step(kvq::e4m3 scale) const { return kvq::rounded_product(static_cast<float>(scale), global); }

    /// Raises std::invalid_argument unless head_dim is a multiple of 16.
    void check(const kvq::cache_shape& shape, kvq::tensor role) const {
        if (shape.dim(role) % group != 0)
            throw std::invalid_argument("NVFP4 has a scale for 16 channels, but head_dim is " +
                                        std::to_string(shape.dim(role)));
    }
    std::uint64_t fingerprint() const noexcept { return std::bit_cast<std::uint32_t>(global); }
};

struct nvfp4_rows : nvfp4_groups {
    explicit nvfp4_rows(float global_scale = 1.0f) : nvfp4_groups{global_scale} {}

    std::string name() const { return "nvfp4-rows"; }
    std::size_t block_bytes(const kvq::block_shape& s) const noexcept {
        return (scales(s) + static_cast<std::size_t>(s.tokens * (s.dim / group)) + 15) / 16 * 16;
    }

    /// values: [tokens][dim]. Returns how many were not finite.
    std::uint32_t quantize(const kvq::block_shape& s, const kvq::block_id&, const float* values,
                           std::byte* block) const {
        std::memset(block, 0, block_bytes(s));
        std::uint32_t not_finite = 0;
        for (int t = 0; t < s.tokens; ++t)
            for (int g = 0; g < s.dim / group; ++g) {
                kvq::e4m3 scale;
                std::uint8_t codes[group];
                not_finite += quantize_group(values + t * s.dim + g * group, scale, codes);
                put(s, block, t, g, scale, codes);
            }
        return not_finite;
    }
    void dequantize(const kvq::block_shape& s, const kvq::block_id&, const std::byte* block,
                    float* values) const {
        for (int t = 0; t < s.tokens; ++t)
            for (int g = 0; g < s.dim / group; ++g) {
                std::uint8_t codes[group];
                const kvq::e4m3 scale = get(s, block, t, g, codes);
                dequantize_group(codes, scale, values + t * s.dim + g * group);
            }
    }

    static void put(const kvq::block_shape& s, std::byte* block, int token, int g, kvq::e4m3 scale,
                    const std::uint8_t (&codes)[group]) {
        std::byte* const row = block + (token * s.dim + g * group) / 2;
        for (int i = 0; i < group / 2; ++i)
            row[i] = static_cast<std::byte>(codes[2 * i] | codes[2 * i + 1] << 4);
        block[scales(s) + static_cast<std::size_t>(token * (s.dim / group) + g)] = std::byte{scale.bits};
    }
    static kvq::e4m3 get(const kvq::block_shape& s, const std::byte* block, int token, int g,
                         std::uint8_t (&codes)[group]) {
        const std::byte* const row = block + (token * s.dim + g * group) / 2;
        for (int i = 0; i < group / 2; ++i) {
            codes[2 * i] = static_cast<std::uint8_t>(row[i]) & 15;
            codes[2 * i + 1] = static_cast<std::uint8_t>(row[i]) >> 4;
        }
        return kvq::e4m3::from_bits(static_cast<std::uint8_t>(
            block[scales(s) + static_cast<std::size_t>(token * (s.dim / group) + g)]));
    }

private:
    static std::size_t scales(const kvq::block_shape& s) noexcept {
        return static_cast<std::size_t>(s.tokens * s.dim / 2);
    }
};

struct nvfp4 : nvfp4_groups {
    explicit nvfp4(float global_scale = 1.0f) : nvfp4_groups{global_scale} {}

    std::string name() const { return "nvfp4"; }
    /// Groups of channels are columns of keys and rows of values.
    constexpr kvq::code_layout<4> codes(const kvq::block_shape& s) const noexcept {
        const kvq::grouped_axis tokens{s.tokens, s.tokens}, channels{s.dim, group};
        return s.role == kvq::tensor::key ? kvq::code_layout<4>{tokens, channels}
                                          : kvq::code_layout<4>{channels, tokens};
    }
    std::size_t block_bytes(const kvq::block_shape& s) const noexcept {
        return (codes(s).bytes() + static_cast<std::size_t>(slots(s) * (s.dim / group)) + 15) / 16 * 16;
    }

    /// values: [tokens][dim]. Returns how many were not finite.
    std::uint32_t quantize(const kvq::block_shape& s, const kvq::block_id&, const float* values,
                           std::byte* block) const {
        std::memset(block, 0, block_bytes(s));
        std::uint32_t not_finite = 0;
        for (int t = 0; t < s.tokens; ++t)
            for (int g = 0; g < s.dim / group; ++g) {
                kvq::e4m3 scale;
                std::uint8_t of_group[group];
                not_finite += quantize_group(values + t * s.dim + g * group, scale, of_group);
                put(s, block, t, g, scale, of_group);
            }
        return not_finite;
    }
    void dequantize(const kvq::block_shape& s, const kvq::block_id&, const std::byte* block,
                    float* values) const {
        for (int t = 0; t < s.tokens; ++t)
            for (int g = 0; g < s.dim / group; ++g) {
                std::uint8_t of_group[group];
                const kvq::e4m3 scale = get(s, block, t, g, of_group);
                dequantize_group(of_group, scale, values + t * s.dim + g * group);
            }
    }

    /// Of a block of zeros.
    void put(const kvq::block_shape& s, std::byte* block, int token, int g, kvq::e4m3 scale,
             const std::uint8_t (&of_group)[group]) const {
        each_code(s, block, token, g,
                  [&](int i, std::byte& b, int shift) { b |= static_cast<std::byte>(of_group[i] << shift); });
        block[scale_at(s, token, g)] = std::byte{scale.bits};
    }
    kvq::e4m3 get(const kvq::block_shape& s, const std::byte* block, int token, int g,
                  std::uint8_t (&of_group)[group]) const {
        each_code(s, block, token, g, [&](int i, std::byte b, int shift) {
            of_group[i] = static_cast<std::uint8_t>(static_cast<int>(b) >> shift & 15);
        });
        return kvq::e4m3::from_bits(static_cast<std::uint8_t>(block[scale_at(s, token, g)]));
    }

private:
    static int slots(const kvq::block_shape& s) noexcept { return (s.tokens + 3) / 4 * 4; }
    std::size_t scale_at(const kvq::block_shape& s, int token, int g) const noexcept {
        return codes(s).bytes() + static_cast<std::size_t>(g * slots(s) + token);
    }
    /// f(i, byte, shift) for the 16 channels of a group. A word holds two quads of columns, four bytes of one row: the first quad in
    /// the low halves. Words of neighbouring rows follow one another.
    template <class Byte, class F>
    void each_code(const kvq::block_shape& s, Byte* block, int token, int g, F f) const {
        const auto layout = codes(s);
        if (s.role == kvq::tensor::key) {
            for (int i = 0; i < group; i += 8) {
                Byte* const word = block + kvq::code_byte(layout, token, g * group + i, 0);
                for (int j = 0; j < 4; ++j) f(i + j, word[j], 0), f(i + 4 + j, word[j], 4);
            }
        } else {
            Byte* const first = block + kvq::code_byte(layout, g * group, token, 0);
            for (int i = 0; i < group; ++i) f(i, first[4 * i], token / 4 % 2 * 4);
        }
    }
};

/// The block of `tiles` with the codes and scales of a block of rows.
inline void to_tiles(const kvq::block_shape& s, const std::byte* rows, const nvfp4& scheme,
                     std::byte* tiles) {
    std::memset(tiles, 0, scheme.block_bytes(s));
    for (int t = 0; t < s.tokens; ++t)
        for (int g = 0; g < s.dim / nvfp4::group; ++g) {
            std::uint8_t codes[nvfp4::group];
            const kvq::e4m3 scale = nvfp4_rows::get(s, rows, t, g, codes);
            scheme.put(s, tiles, t, g, scale, codes);
        }
}
/// And back.
inline void to_rows(const kvq::block_shape& s, const std::byte* tiles, const nvfp4& scheme, std::byte* rows) {
    std::memset(rows, 0, nvfp4_rows(scheme.global).block_bytes(s));
    for (int t = 0; t < s.tokens; ++t)
        for (int g = 0; g < s.dim / nvfp4::group; ++g) {
            std::uint8_t codes[nvfp4::group];
            const kvq::e4m3 scale = scheme.get(s, tiles, t, g, codes);
            nvfp4_rows::put(s, rows, t, g, scale, codes);
        }
}

static_assert(kvq::kv_scheme<nvfp4_rows> && kvq::kv_scheme<nvfp4>);

}  // namespace baselines
