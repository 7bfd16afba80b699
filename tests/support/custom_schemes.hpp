// SPDX-License-Identifier: MIT
// Schemes that a user could write, chosen to be inconvenient. Pages, cache and attention must take them as
// they are.
//
//   log8, float24     parameter types of 1 and 3 bytes for the composed scheme
//   magnitude_bytes   models the concept directly: no folding, no default constructor, state, codes that
//                     depend on where the block sits, and it scribbles over its input
//   product_scheme    per-channel affine codes times one scale per token; 8-bit log scales under one
//                     super-scale
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <kvq/schemes/affine.hpp>
#include <kvq/schemes/transformed.hpp>
#include <limits>
#include <string>

namespace test {

/// Sign and magnitude 0 or 2^((m - 64) / 4), m = 1..127, in one byte. Rounds to the nearest magnitude.
struct log8 {
    static constexpr const char* name = "log8";
    std::uint8_t code = 0;

    log8() = default;
    explicit log8(float x) noexcept {
        const float wanted = std::fabs(x);
        float best = wanted;
        for (int m = 1; m < 128; ++m) {
            const float distance = std::fabs(magnitude(m) - wanted);
            if (distance < best) {
                best = distance;
                code = static_cast<std::uint8_t>(m);
            }
        }
        if (x < 0.0f && code != 0) code = static_cast<std::uint8_t>(code | 0x80);
    }
    operator float() const noexcept {
        const float m = magnitude(code & 0x7f);
        return code & 0x80 ? -m : m;
    }

private:
    static float magnitude(int m) noexcept {
        // Computed once: tests convert each parameter many times.
        static const auto all = [] {
            constexpr float quarter[4] = {1.0f, 1.18920712f, 1.41421356f, 1.68179283f};
            std::array<float, 128> values{};
            for (int i = 1; i < 128; ++i)
                values[static_cast<std::size_t>(i)] = std::ldexp(quarter[i & 3], i / 4 - 16);
            return values;
        }();
        return all[static_cast<std::size_t>(m)];
    }
};
static_assert(sizeof(log8) == 1 && kvq::parameter_type<log8>);

/// The upper three bytes of a float, rounded to nearest even. Its size is no power of two.
struct float24 {
    static constexpr const char* name = "float24";
    unsigned char bytes[3] = {};

    float24() = default;
    explicit float24(float x) noexcept {
        auto u = std::bit_cast<std::uint32_t>(x);
        u += 0x7fu + ((u >> 8) & 1u);
        for (int i = 0; i < 3; ++i) bytes[i] = static_cast<unsigned char>(u >> (8 * (i + 1)));
    }
    operator float() const noexcept {
        std::uint32_t u = 0;
        for (int i = 0; i < 3; ++i) u |= static_cast<std::uint32_t>(bytes[i]) << (8 * (i + 1));
        return std::bit_cast<float>(u);
    }
};
static_assert(sizeof(float24) == 3 && kvq::parameter_type<float24>);

using odd_keys = kvq::scheme<kvq::bits<3>, kvq::asymmetric, kvq::per_channel<7>, kvq::params<log8>>;
using odd_values = kvq::scheme<kvq::bits<5>, kvq::asymmetric, kvq::per_token<5>, kvq::params<float24>>;
static_assert(kvq::foldable<odd_keys> && kvq::foldable<odd_values>);

/// One byte per number: sign and magnitude in steps of `step`, xored with a key of layer and head.
struct magnitude_bytes {
    float step;

    explicit magnitude_bytes(float s) noexcept : step(s) {}

    std::string name() const { return "magnitude-bytes"; }
    std::uint64_t fingerprint() const { return std::bit_cast<std::uint32_t>(step); }

    std::size_t block_bytes(const kvq::block_shape& s) const noexcept { return (s.values() + 15) / 16 * 16; }

    std::uint32_t quantize(const kvq::block_shape& s, const kvq::block_id& id, float* values,
                           std::byte* block) const {
        std::uint32_t not_finite = 0;
        for (std::size_t i = 0; i < s.values(); ++i) {
            float x = values[i];
            if (!std::isfinite(x)) ++not_finite;
            if (std::isnan(x)) x = 0.0f;
            const float levels = std::fabs(x) / step;
            const int level = levels >= 127.0f ? 127 : static_cast<int>(levels + 0.5f);
            block[i] = static_cast<std::byte>((level | (x < 0.0f ? 0x80 : 0)) ^ key(id));
            values[i] = std::numeric_limits<float>::quiet_NaN();
        }
        for (std::size_t i = s.values(); i < block_bytes(s); ++i) block[i] = std::byte{0x5a};
        return not_finite;
    }

    void dequantize(const kvq::block_shape& s, const kvq::block_id& id, const std::byte* block,
                    float* values) const {
        for (std::size_t i = 0; i < s.values(); ++i) {
            const int code = static_cast<int>(block[i]) ^ key(id);
            const float magnitude = step * static_cast<float>(code & 0x7f);
            values[i] = code & 0x80 ? -magnitude : magnitude;
        }
    }

private:
    static int key(const kvq::block_id& id) noexcept { return (17 * id.layer + 5 * id.head + 1) & 0xff; }
};
static_assert(kvq::key_scheme<magnitude_bytes> && kvq::value_scheme<magnitude_bytes>);
static_assert(!kvq::foldable<magnitude_bytes> && !std::is_default_constructible_v<magnitude_bytes>);

/// x^[t][c] = token_scale[t] * (scale[c] * code + bias[c]),  scale[c] = super * 2^(-step[c] / 8).
///
///   block = [codes][super: float, padded][steps: 1 byte][biases: float16][token_scales: float16]
template <int Bits>
struct product_scheme {
    using attends_as = product_scheme;
    static constexpr int code_bits = Bits;
    static constexpr int zero_code = 0;
    static constexpr int top = (1 << Bits) - 1;

    std::string name() const { return "product" + std::to_string(Bits); }

    constexpr kvq::code_layout<Bits> codes(const kvq::block_shape& s) const noexcept {
        return {{s.rows(), s.rows()}, {s.cols(), s.cols()}};
    }
    static constexpr kvq::fold_use fold(kvq::tensor role) noexcept {
        return role == kvq::tensor::key ? kvq::fold_use{true, false, true, true}
                                        : kvq::fold_use{true, true, true, false};
    }
    std::size_t block_bytes(const kvq::block_shape& s) const noexcept { return sections(s).end; }

    std::uint32_t quantize(const kvq::block_shape& s, const kvq::block_id&, float* values,
                           std::byte* block) const {
        std::memset(block, 0, block_bytes(s));
        const auto at = sections(s);
        const auto layout = codes(s);
        std::uint32_t not_finite = 0;
        for (int t = 0; t < s.tokens; ++t) {
            float* const row = values + t * s.dim;
            float largest = 0.0f;
            for (int c = 0; c < s.dim; ++c)
                if (std::isfinite(row[c])) {
                    row[c] = std::clamp(row[c], -0x1p100f, 0x1p100f);
                    largest = std::fmax(largest, std::fabs(row[c]));
                } else {
                    ++not_finite;
                }
            const kvq::float16 token_scale = rounded_up(largest > 0.0f ? largest : 1.0f);
            std::memcpy(block + at.token_scales + 2 * static_cast<std::size_t>(t), &token_scale,
                        sizeof token_scale);
            for (int c = 0; c < s.dim; ++c) row[c] = row[c] / static_cast<float>(token_scale);
        }
        float super = 0.0f;
        for (int c = 0; c < s.dim; ++c) super = std::fmax(super, wanted_scale(s, values, c));
        std::memcpy(block + at.super, &super, sizeof super);
        for (int c = 0; c < s.dim; ++c) {
            const float wanted = wanted_scale(s, values, c);
            int step = 255;
            if (wanted > 0.0f) step = std::min(255, 1 + static_cast<int>(8.0f * std::log2(super / wanted)));
            while (step > 0 && dequantized_scale(super, step) < wanted) --step;
            block[at.scales + static_cast<std::size_t>(c)] = static_cast<std::byte>(step);
            const kvq::float16 bias = rounded_down(lowest(s, values, c));
            std::memcpy(block + at.biases + 2 * static_cast<std::size_t>(c), &bias, sizeof bias);
            const float scale = dequantized_scale(super, step), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
            for (int t = 0; t < s.tokens; ++t) {
                const int code = affine_code(values[t * s.dim + c], bias, inverse);
                const bool key = s.role == kvq::tensor::key;
                kvq::pack_code(layout, block, key ? t : c, key ? c : t, static_cast<unsigned>(code));
            }
        }
        return not_finite;
    }

    void dequantize(const kvq::block_shape& s, const kvq::block_id&, const std::byte* block,
                    float* values) const {
        const auto layout = codes(s);
        const bool key = s.role == kvq::tensor::key;
        for (int t = 0; t < s.tokens; ++t)
            for (int c = 0; c < s.dim; ++c)
                values[t * s.dim + c] =
                    token_scale(s, block, t) *
                    affine_value(static_cast<int>(kvq::unpack_code(layout, block, key ? t : c, key ? c : t)),
                                 scale(s, block, c), bias(s, block, c));
    }

    template <class Backend>
    void row_parameters(const kvq::block_shape& s, const kvq::block_id&, const std::byte* block, int,
                        float* scales, float* biases) const {
        for (int r = 0; r < s.rows(); ++r)
            if (s.role == kvq::tensor::key) {
                scales[r] = token_scale(s, block, r);
            } else {
                scales[r] = scale(s, block, r);
                biases[r] = bias(s, block, r);
            }
    }
    template <class Backend>
    void col_parameters(const kvq::block_shape& s, const kvq::block_id&, const std::byte* block, int,
                        float* scales, float* biases) const {
        for (int c = 0; c < s.cols(); ++c)
            if (s.role == kvq::tensor::key) {
                scales[c] = scale(s, block, c);
                biases[c] = bias(s, block, c);
            } else {
                scales[c] = token_scale(s, block, c);
            }
    }

private:
    template <class T>
    static T load(const std::byte* from) noexcept {
        T value;
        std::memcpy(&value, from, sizeof value);
        return value;
    }
    /// float16 is sign and magnitude, so the next value away from zero has the next bits.
    static kvq::float16 moved(kvq::float16 x, bool up) noexcept {
        if ((x.bits & 0x7fff) == 0) return kvq::float16::from_bits(up ? 0x0001 : 0x8001);
        const bool away = up == (x.bits < 0x8000);
        return kvq::float16::from_bits(static_cast<std::uint16_t>(x.bits + (away ? 1 : -1)));
    }
    /// The largest float16 that is at most x, and the smallest that is at least x.
    static kvq::float16 rounded_down(float x) noexcept {
        const float held = std::clamp(x, -65504.0f, 65504.0f);
        const kvq::float16 nearest(held);
        return static_cast<float>(nearest) > held ? moved(nearest, false) : nearest;
    }
    static kvq::float16 rounded_up(float x) noexcept {
        const float held = std::clamp(x, -65504.0f, 65504.0f);
        const kvq::float16 nearest(held);
        return static_cast<float>(nearest) < held ? moved(nearest, true) : nearest;
    }
    /// kvq::rounded_product: the same bits on CPUs that fuse a product with a sum.
    static int affine_code(float x, float bias, float inverse) noexcept {
        const float position = kvq::rounded_product((std::isnan(x) ? 0.0f : x) - bias, inverse);
        if (!(position > 0.0f)) return 0;  // also an infinity times zero
        return static_cast<int>(std::nearbyint(std::fmin(position, static_cast<float>(top))));
    }
    static float affine_value(int code, float scale, float bias) noexcept {
        return kvq::rounded_product(scale, static_cast<float>(code)) + bias;
    }
    struct section_offsets {
        std::size_t super, scales, biases, token_scales, end;
    };
    section_offsets sections(const kvq::block_shape& s) const noexcept {
        const auto padded = [](std::size_t n) { return (n + 15) / 16 * 16; };
        const auto dim = static_cast<std::size_t>(s.dim), tokens = static_cast<std::size_t>(s.tokens);
        section_offsets o{};
        o.super = padded(codes(s).bytes());
        o.scales = o.super + 16;
        o.biases = o.scales + padded(dim);
        o.token_scales = o.biases + padded(2 * dim);
        o.end = o.token_scales + padded(2 * tokens);
        return o;
    }
    static float dequantized_scale(float super, int step) noexcept {
        constexpr float eighth[8] = {1.0f,        0.917004043f, 0.840896415f, 0.771105413f,
                                     0.70710678f, 0.648419777f, 0.594603558f, 0.545253866f};
        return super * std::ldexp(eighth[step & 7], -(step / 8));
    }
    static float lowest(const kvq::block_shape& s, const float* values, int c) noexcept {
        float lo = std::numeric_limits<float>::infinity();
        for (int t = 0; t < s.tokens; ++t)
            if (std::isfinite(values[t * s.dim + c])) lo = std::fmin(lo, values[t * s.dim + c]);
        return std::isinf(lo) ? 0.0f : lo;
    }
    static float wanted_scale(const kvq::block_shape& s, const float* values, int c) noexcept {
        const float bias = rounded_down(lowest(s, values, c));
        float hi = bias;
        for (int t = 0; t < s.tokens; ++t)
            if (std::isfinite(values[t * s.dim + c])) hi = std::fmax(hi, values[t * s.dim + c]);
        return (hi - bias) / static_cast<float>(top);
    }
    float token_scale(const kvq::block_shape& s, const std::byte* block, int t) const noexcept {
        return load<kvq::float16>(block + sections(s).token_scales + 2 * static_cast<std::size_t>(t));
    }
    float bias(const kvq::block_shape& s, const std::byte* block, int c) const noexcept {
        return load<kvq::float16>(block + sections(s).biases + 2 * static_cast<std::size_t>(c));
    }
    float scale(const kvq::block_shape& s, const std::byte* block, int c) const noexcept {
        const auto at = sections(s);
        return dequantized_scale(load<float>(block + at.super),
                                 static_cast<int>(block[at.scales + static_cast<std::size_t>(c)]));
    }
};
static_assert(kvq::foldable<product_scheme<4>>);

/// A transform in front: foldable, and transforming.
using rotated = kvq::hadamard<kvq::affine<6, kvq::per_token<32>>>;
static_assert(kvq::foldable<rotated> && kvq::transforming<rotated>);

}  // namespace test
