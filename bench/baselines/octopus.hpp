// octopus<B>: directions of three channels each on a square, by the octahedral map, and their lengths.
//
//   g = |x|, u = x / g;   t_i = (u_3i, u_3i+1, u_3i+2), channels beyond the last are 0;   n = t / |t|
//   map of n to [-1, 1]^2: p = n / (|n_x| + |n_y| + |n_z|); (p_x, p_y) if p_z >= 0, else (sign(p_x)(1 -
//   |p_y|), sign(p_y)(1 - |p_x|)) codes: B + 1 bits for each coordinate of the square, B - 1 for the length,
//   all on Lloyd-Max levels of what a uniform direction of D channels gives; of the 3 x 3 cells around the
//   nearest levels the one whose direction n' has the largest t . n', then the level of the length nearest to
//   t . n'
//   x^ = g * length * n'
//   block = [codes][g: float32 per token], each section padded to 16 bytes
//
// Bits, with everything counted: (ceil(D / 3) (3 B + 1) + 32) / D; B = 2: 2.60 at D = 128, 2.91 at D = 64.
// Behind a Hadamard transform, for keys and values. Assumed: levels by head_dim; ties of codes go up.
//
// Contract: NaN and infinities become 0 and are counted (the transform in front has already done so). Not
// foldable.
// Source: OCTOPUS, arXiv 2605.21226; the map: Cigolle et al., JCGT 3(2), 2014.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <kvq/core/rounding.hpp>
#include <kvq/schemes/transformed.hpp>
#include <string>
#include <utility>
#include <vector>

#include "bit_stream.hpp"
#include "half_section.hpp"
#include "lloyd_max.hpp"

namespace baselines {

namespace octahedron {

struct square {
    float x, y;
};
using direction = std::array<float, 3>;

inline float sign(float x) noexcept { return x < 0.0f ? -1.0f : 1.0f; }

/// n: of any length but 0.
inline square to_square(const direction& n) noexcept {
    const float sum = std::fabs(n[0]) + std::fabs(n[1]) + std::fabs(n[2]);
    const float x = n[0] / sum, y = n[1] / sum;
    if (n[2] >= 0.0f) return {x, y};
    return {sign(x) * (1.0f - std::fabs(y)), sign(y) * (1.0f - std::fabs(x))};
}

/// Unit length.
inline direction to_sphere(square p) noexcept {
    const float z = 1.0f - std::fabs(p.x) - std::fabs(p.y);
    float x = p.x, y = p.y;
    if (z < 0.0f) {
        x = sign(p.x) * (1.0f - std::fabs(p.y));
        y = sign(p.y) * (1.0f - std::fabs(p.x));
    }
    const float length = std::sqrt(x * x + y * y + z * z);
    return {x / length, y / length, z / length};
}

/// Of a coordinate of the square for uniform directions: an area of a face counts 1 / r^3 on the sphere.
inline weighted_points coordinate() {
    constexpr int steps = 1024;
    weighted_points p;
    for (int i = 0; i < steps; ++i) {
        const double x = 2.0 * (i + 0.5) / steps - 1.0;
        double weight = 0.0;
        for (int j = 0; j < steps; ++j) {
            double a = std::fabs(x), b = (j + 0.5) / steps;  // |y|
            if (a + b > 1.0) a = 1.0 - std::exchange(b, 1.0 - a);
            const double c = 1.0 - a - b;
            weight += std::pow(a * a + b * b + c * c, -1.5);
        }
        p.points.push_back(x);
        p.weights.push_back(weight);
    }
    return p;
}

/// Of the length of 3 of n >= 4 channels of a uniform unit vector: density r^2 (1 - r^2)^((n - 5) / 2), with
/// r = sin(phi).
inline weighted_points length(int n) {
    constexpr int steps = 8192;
    const double half_pi = std::acos(0.0);
    weighted_points p;
    for (int i = 0; i < steps; ++i) {
        const double phi = half_pi * (i + 0.5) / steps;
        p.points.push_back(std::sin(phi));
        p.weights.push_back(std::sin(phi) * std::sin(phi) * std::pow(std::cos(phi), std::max(n, 4) - 4));
    }
    return p;
}

inline const std::vector<float>& coordinate_levels(int bits) {
    static std::map<std::pair<int, int>, std::vector<float>> kept;
    static std::mutex mutex;
    return kept_levels(kept, mutex, 3, 1 << bits, [](int) { return coordinate(); });
}
inline const std::vector<float>& length_levels(int dim, int bits) {
    static std::map<std::pair<int, int>, std::vector<float>> kept;
    static std::mutex mutex;
    return kept_levels(kept, mutex, dim, 1 << bits, [](int n) { return length(n); });
}

}  // namespace octahedron

template <int Bits>
struct octopus_codes {
    static_assert(Bits >= 2 && Bits <= 6, "baselines::octopus_codes: 2 to 6 bits");
    static constexpr int side_bits = Bits + 1, length_bits = Bits - 1;

    std::string name() const { return "octahedral" + std::to_string(Bits); }

    static constexpr std::size_t block_bytes(const kvq::block_shape& s) noexcept {
        return code_section(s) + padded(4 * static_cast<std::size_t>(s.tokens));
    }

    std::uint32_t quantize(const kvq::block_shape& s, const kvq::block_id&, float* values,
                           std::byte* block) const {
        std::memset(block, 0, block_bytes(s));
        const auto& side = octahedron::coordinate_levels(side_bits);
        const auto& lengths = octahedron::length_levels(s.dim, length_bits);
        std::uint32_t not_finite = 0;
        for (int t = 0; t < s.tokens; ++t) {
            float* const x = values + t * s.dim;
            double squares = 0.0;
            for (int c = 0; c < s.dim; ++c) {
                if (!std::isfinite(x[c])) x[c] = 0.0f, ++not_finite;
                squares += static_cast<double>(x[c]) * static_cast<double>(x[c]);
            }
            const auto length = static_cast<float>(std::sqrt(squares));
            std::memcpy(block + code_section(s) + 4 * t, &length, 4);
            std::size_t at = token_bits(s.dim) * static_cast<std::size_t>(t);
            for (int c = 0; c < s.dim; c += 3) {
                octahedron::direction part{};
                for (int i = 0; i < 3 && c + i < s.dim && length > 0.0f; ++i)
                    part[static_cast<std::size_t>(i)] = x[c + i] / length;
                put_triplet(side, lengths, part, block, at);
            }
        }
        return not_finite;
    }

    void dequantize(const kvq::block_shape& s, const kvq::block_id&, const std::byte* block,
                    float* values) const {
        const auto& side = octahedron::coordinate_levels(side_bits);
        const auto& lengths = octahedron::length_levels(s.dim, length_bits);
        for (int t = 0; t < s.tokens; ++t) {
            float length;
            std::memcpy(&length, block + code_section(s) + 4 * t, 4);
            std::size_t at = token_bits(s.dim) * static_cast<std::size_t>(t);
            for (int c = 0; c < s.dim; c += 3) {
                const unsigned x = get_bits(block, at, side_bits), y = get_bits(block, at, side_bits),
                               r = get_bits(block, at, length_bits);
                const octahedron::direction n = octahedron::to_sphere({side[x], side[y]});
                const float scale = kvq::rounded_product(length, lengths[r]);
                for (int i = 0; i < 3 && c + i < s.dim; ++i)
                    values[t * s.dim + c + i] = kvq::rounded_product(scale, n[static_cast<std::size_t>(i)]);
            }
        }
    }

private:
    static constexpr std::size_t token_bits(int dim) noexcept {
        return static_cast<std::size_t>((dim + 2) / 3) * (2 * side_bits + length_bits);
    }
    static constexpr std::size_t code_section(const kvq::block_shape& s) noexcept {
        return padded((token_bits(s.dim) * static_cast<std::size_t>(s.tokens) + 7) / 8);
    }

    static void put_triplet(const std::vector<float>& side, const std::vector<float>& lengths,
                            const octahedron::direction& part, std::byte* block, std::size_t& at) {
        constexpr int top = (1 << side_bits) - 1;
        const bool some = part[0] != 0.0f || part[1] != 0.0f || part[2] != 0.0f;
        const octahedron::square p =
            octahedron::to_square(some ? part : octahedron::direction{0.0f, 0.0f, 1.0f});
        const int x = nearest_of(side, p.x), y = nearest_of(side, p.y);
        int best_x = x, best_y = y;
        float most = -1.0f;
        for (int i = std::max(0, x - 1); i <= std::min(top, x + 1); ++i)
            for (int j = std::max(0, y - 1); j <= std::min(top, y + 1); ++j) {
                const octahedron::direction n = octahedron::to_sphere(
                    {side[static_cast<std::size_t>(i)], side[static_cast<std::size_t>(j)]});
                const float along = part[0] * n[0] + part[1] * n[1] + part[2] * n[2];
                if (along > most) most = along, best_x = i, best_y = j;
            }
        put_bits(block, at, side_bits, static_cast<unsigned>(best_x));
        put_bits(block, at, side_bits, static_cast<unsigned>(best_y));
        put_bits(block, at, length_bits, static_cast<unsigned>(nearest_of(lengths, most)));
    }
};

/// OCTOPUS for keys and values.
template <int Bits>
struct octopus {
    using keys = kvq::hadamard<octopus_codes<Bits>>;
    using values = keys;
};

}  // namespace baselines
