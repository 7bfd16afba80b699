// NVFP4: 4-bit floats, one 8-bit scale for every 16 channels of a token, and one float for the tensor.
//
//   scale = e4m3(max|x| / 6 / global)              of 16 channels
//   code  = e2m1(x / (scale * global))             0 where scale * global is 0
//   x^    = e2m1 value * (scale * global)          each product rounded to float
//
// The library's format nvfp4 (kvq/schemes/row_layout.hpp) has the published bytes, rows of tokens. This has
// the same codes and scales in the library's tiles: a block of codes, then scales [dim / 16][token slot].
// Attention multiplies 2 e2m1 + 12, which is an integer, in place of a code.
//
// to_tiles() and to_rows() turn blocks of one into blocks of the other: no value changes.
// Contract: NaN gets the code 0, infinities saturate, and neither sets a scale. Scales saturate at 448. |x -
// x^| is at most half the distance of the two values of e2m1 beside x / (scale * global), times scale *
// global; beyond the largest value at most scale * global, as long as the scale neither saturates nor is
// below the normal numbers of e4m3. head_dim is a multiple of 16.
// Sources: NVIDIA, Introducing NVFP4 (developer.nvidia.com, 2025); FlashInfer, nvfp4_kv_quantize (linear
// scales). They multiply by rounded reciprocals, so that a code between two values may differ.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <kvq/core/float_formats.hpp>
#include <kvq/core/rounding.hpp>
#include <kvq/pack/bit_pack.hpp>
#include <kvq/schemes/token_rows.hpp>
#include <stdexcept>
#include <string>

namespace baselines {

/// Where a group of 16 channels of a token lies in the published bytes. Byte: std::byte, const or not.
template <class Byte>
struct nvfp4_row_view {
    int groups;  ///< of a token
    Byte *codes, *scales;

    nvfp4_row_view(const kvq::block_shape& s, Byte* block) noexcept
        : groups(s.dim / 16), codes(block), scales(block + s.values() / 2) {}

    void put(int token, int g, kvq::e4m3 scale, const std::uint8_t (&of_group)[16]) const {
        const int at = token * groups + g;
        for (int i = 0; i < 8; ++i)
            codes[8 * at + i] = static_cast<std::byte>(of_group[2 * i] | of_group[2 * i + 1] << 4);
        scales[at] = std::byte{scale.bits};
    }
    kvq::e4m3 get(int token, int g, std::uint8_t (&of_group)[16]) const {
        const int at = token * groups + g;
        for (int i = 0; i < 8; ++i) {
            const auto both = static_cast<std::uint8_t>(codes[8 * at + i]);
            of_group[2 * i] = both & 15;
            of_group[2 * i + 1] = both >> 4;
        }
        return kvq::e4m3::from_bits(static_cast<std::uint8_t>(scales[at]));
    }
};

/// The same in tiles: groups of channels are columns of keys and rows of values (pack/code_layout.hpp).
template <class Byte>
struct nvfp4_tile_view {
    bool key;
    kvq::code_layout<4> layout;
    int slots;  ///< of tokens, for the scales of a group of channels
    Byte *codes, *scales;

    nvfp4_tile_view(const kvq::block_shape& s, Byte* block) noexcept
        : key(s.role == kvq::tensor::key),
          layout(layout_of(s)),
          slots(slots_of(s)),
          codes(block),
          scales(block + layout.bytes()) {}

    KVQ_HD static constexpr std::size_t scale_offset(const kvq::block_shape& s) noexcept {
        return layout_of(s).bytes();
    }
    KVQ_HD static constexpr int slots_of(const kvq::block_shape& s) noexcept {
        return (s.tokens + 3) / 4 * 4;
    }
    KVQ_HD static unsigned code(const kvq::block_shape& s, const std::byte* block, int token,
                                int channel) noexcept {
        const bool of_key = s.role == kvq::tensor::key;
        return kvq::unpack_code(layout_of(s), block, of_key ? token : channel, of_key ? channel : token);
    }
    KVQ_HD static int scale_at(const kvq::block_shape& s, int token, int channel) noexcept {
        return channel / 16 * slots_of(s) + token;
    }

    KVQ_HD static constexpr kvq::code_layout<4> layout_of(const kvq::block_shape& s) noexcept {
        const kvq::grouped_axis tokens{s.tokens, s.tokens}, channels{s.dim, 16};
        return s.role == kvq::tensor::key ? kvq::code_layout<4>{tokens, channels}
                                          : kvq::code_layout<4>{channels, tokens};
    }
    /// Of a block of zeros.
    void put(int token, int g, kvq::e4m3 scale, const std::uint8_t (&of_group)[16]) const {
        each_code(token, g,
                  [&](int i, std::byte& b, int shift) { b |= static_cast<std::byte>(of_group[i] << shift); });
        scales[g * slots + token] = std::byte{scale.bits};
    }
    kvq::e4m3 get(int token, int g, std::uint8_t (&of_group)[16]) const {
        each_code(token, g, [&](int i, std::byte b, int shift) {
            of_group[i] = static_cast<std::uint8_t>(static_cast<int>(b) >> shift & 15);
        });
        return kvq::e4m3::from_bits(static_cast<std::uint8_t>(scales[g * slots + token]));
    }

private:
    /// f(i, byte, shift) for the 16 channels. A word holds two quads of columns of one row, the first one in
    /// the low halves of its bytes. Words of neighbouring rows follow one another.
    template <class F>
    void each_code(int token, int g, F f) const {
        if (key) {
            for (int i = 0; i < 16; i += 8) {
                Byte* const word = codes + kvq::code_byte(layout, token, 16 * g + i, 0);
                for (int j = 0; j < 4; ++j) {
                    f(i + j, word[j], 0);
                    f(i + 4 + j, word[j], 4);
                }
            }
        } else {
            Byte* const first = codes + kvq::code_byte(layout, 16 * g, token, 0);
            for (int i = 0; i < 16; ++i) f(i, first[4 * i], token / 4 % 2 * 4);
        }
    }
};

struct nvfp4 {
    using attends_as = nvfp4;
    static constexpr int code_bits = 4;
    /// Twice the value of every code, and 12, so that none is negative.
    static constexpr std::array<std::uint8_t, 16> code_entries{12, 13, 14, 15, 16, 18, 20, 24,
                                                               12, 11, 10, 9,  8,  6,  4,  0};
    static constexpr int zero_code = 12;

    float global = 1.0f;  ///< of the tensor; positive and finite

    nvfp4() = default;
    constexpr explicit nvfp4(float global_scale) : global(global_scale) {}
    std::string name() const { return "nvfp4-tiles"; }

    /// values: [tokens][dim]. Returns how many were not finite.
    std::uint32_t quantize(const kvq::block_shape& s, const kvq::block_id&, const float* values,
                           std::byte* block) const {
        std::memset(block, 0, block_bytes(s));
        const nvfp4_tile_view<std::byte> to(s, block);
        std::uint32_t not_finite = 0;
        for (int t = 0; t < s.tokens; ++t)
            for (int g = 0; g < s.dim / 16; ++g) {
                std::uint8_t codes[16];
                kvq::e4m3 scale;
                not_finite += quantize_group(values + t * s.dim + 16 * g, scale, codes);
                to.put(t, g, scale, codes);
            }
        return not_finite;
    }
    void dequantize(const kvq::block_shape& s, const kvq::block_id&, const std::byte* block,
                    float* values) const {
        const nvfp4_tile_view<const std::byte> from(s, block);
        for (int t = 0; t < s.tokens; ++t)
            for (int g = 0; g < s.dim / 16; ++g) {
                std::uint8_t codes[16];
                const float step = this->step(from.get(t, g, codes));
                float* const x = values + t * s.dim + 16 * g;
                for (int i = 0; i < 16; ++i) x[i] = kvq::rounded_product(levels[codes[i]], step);
            }
    }

    /// One number, as dequantize() gives it: what kernels of a GPU read (cuda/layout/cache_ref.cuh).
    KVQ_HD float device_value(const kvq::block_shape& s, const std::byte* block, int token,
                              int channel) const noexcept {
        using view = nvfp4_tile_view<const std::byte>;
        const auto code = static_cast<std::uint8_t>(view::code(s, block, token, channel));
        const std::byte scale =
            block[view::scale_offset(s) + static_cast<std::size_t>(view::scale_at(s, token, channel))];
        return kvq::rounded_product(
            kvq::e2m1::to_float(code),
            kvq::rounded_product(kvq::e4m3::to_float(static_cast<std::uint8_t>(scale)), global));
    }

    constexpr std::size_t block_bytes(const kvq::block_shape& s) const noexcept {
        return (nvfp4_tile_view<std::byte>::scale_offset(s) +
                static_cast<std::size_t>(nvfp4_tile_view<std::byte>::slots_of(s) * (s.dim / 16)) + 15) /
               16 * 16;
    }
    /// Raises std::invalid_argument unless head_dim is a multiple of 16.
    void check(const kvq::cache_shape& shape, kvq::tensor role) const {
        if (shape.dim(role) % 16 != 0)
            throw std::invalid_argument("NVFP4 has a scale for 16 channels, but head_dim is " +
                                        std::to_string(shape.dim(role)));
    }
    std::uint64_t fingerprint() const noexcept { return std::bit_cast<std::uint32_t>(global); }

    constexpr kvq::code_layout<4> codes(const kvq::block_shape& s) const noexcept {
        return nvfp4_tile_view<std::byte>::layout_of(s);
    }
    /// Tokens are rows of keys and columns of values.
    static constexpr kvq::fold_use fold(kvq::tensor role) noexcept {
        return {role == kvq::tensor::key, false, role == kvq::tensor::value, false};
    }
    template <class Backend>
    void row_parameters(const kvq::block_shape& s, const kvq::block_id&, const std::byte* block, int g,
                        float* scale, float*) const {
        load_scales(s, block, g, scale);
    }
    template <class Backend>
    void col_parameters(const kvq::block_shape& s, const kvq::block_id&, const std::byte* block, int g,
                        float* scale, float*) const {
        load_scales(s, block, g, scale);
    }

private:
    static constexpr std::array<float, 16> levels = [] {
        std::array<float, 16> values{};
        for (std::uint8_t c = 0; c < 16; ++c) values[c] = kvq::e2m1::to_float(c);
        return values;
    }();
    float step(kvq::e4m3 scale) const { return kvq::rounded_product(static_cast<float>(scale), global); }

    /// The scale of 16 values and their codes. Returns how many of them are not finite.
    std::uint32_t quantize_group(const float* x, kvq::e4m3& scale, std::uint8_t (&codes)[16]) const {
        // Magnitudes as integers, which have the same order: compilers make vectors of such loops.
        constexpr std::uint32_t infinity = 0x7f800000;
        std::uint32_t magnitude[16], most = 0;
        int finite = 0, code[16];
        for (int i = 0; i < 16; ++i) magnitude[i] = std::bit_cast<std::uint32_t>(x[i]) & 0x7fffffff;
        for (int i = 0; i < 16; ++i) finite += magnitude[i] < infinity;
        for (int i = 0; i < 16; ++i) most = std::max(most, magnitude[i] < infinity ? magnitude[i] : 0);
        const auto largest = std::bit_cast<float>(most);
        scale = kvq::e4m3(largest / 6.0f / global);
        const float step = this->step(scale);
        if (!(step > 0.0f)) {
            std::memset(codes, 0, 16);
            return static_cast<std::uint32_t>(16 - finite);
        }
        // e2m1::from_float without branches. Codes whose lowest bit is 0 take both ends of their range.
        for (int i = 0; i < 16; ++i) {
            const float y = std::fabs(x[i]) / step;
            code[i] = (y > 0.25f) + (y >= 0.75f) + (y > 1.25f) + (y >= 1.75f) + (y > 2.5f) + (y >= 3.5f) +
                      (y > 5.0f);
        }
        for (int i = 0; i < 16; ++i) {
            const int sign = static_cast<int>(std::bit_cast<std::uint32_t>(x[i]) >> 28) & 8;
            codes[i] = static_cast<std::uint8_t>(code[i] | (x[i] == x[i] ? sign : 0));
        }
        return static_cast<std::uint32_t>(16 - finite);
    }
    /// Half of each step of a group of channels, since entries are twice the values.
    void load_scales(const kvq::block_shape& s, const std::byte* block, int g, float* scale) const {
        static constexpr auto values = [] {
            std::array<float, 256> v{};
            for (int b = 0; b < 256; ++b)
                v[static_cast<std::size_t>(b)] = kvq::e4m3::to_float(static_cast<std::uint8_t>(b));
            return v;
        }();
        const nvfp4_tile_view<const std::byte> from(s, block);
        for (int t = 0; t < from.slots; ++t)
            scale[t] = 0.5f * kvq::rounded_product(
                                  values[static_cast<std::size_t>(from.scales[g * from.slots + t])], global);
    }
};

/// The codes and scales of a block in the other layout: from rows to tiles, or back. `bytes`: of the new
/// block, which is overwritten.
template <template <class> class To, template <class> class From>
void convert(const kvq::block_shape& s, const From<const std::byte>& from, std::byte* block,
             std::size_t bytes) {
    std::memset(block, 0, bytes);
    const To<std::byte> to(s, block);
    for (int t = 0; t < s.tokens; ++t)
        for (int g = 0; g < s.dim / 16; ++g) {
            std::uint8_t codes[16];
            const kvq::e4m3 scale = from.get(t, g, codes);
            to.put(t, g, scale, codes);
        }
}
/// rows: a block of the format nvfp4; tiles: nvfp4().block_bytes(s) bytes, written.
inline void to_tiles(const kvq::block_shape& s, const std::byte* rows, std::byte* tiles) {
    convert<nvfp4_tile_view>(s, nvfp4_row_view<const std::byte>(s, rows), tiles, nvfp4().block_bytes(s));
}
/// The published bytes.
struct nvfp4_rows : kvq::token_rows {
    constexpr explicit nvfp4_rows(float global = 1.0f) : token_rows(kvq::row_layout_named("nvfp4"), global) {}
};
/// tiles: a block of nvfp4; rows: nvfp4_rows().block_bytes(s) bytes, written.
inline void to_rows(const kvq::block_shape& s, const std::byte* tiles, std::byte* rows) {
    convert<nvfp4_row_view>(s, nvfp4_tile_view<const std::byte>(s, tiles), rows, nvfp4_rows().block_bytes(s));
}

static_assert(kvq::foldable<nvfp4>);

}  // namespace baselines
