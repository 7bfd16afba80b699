// block_gtq: keys whose pairs of channels that RoPE turns together get widths by their energy.
//
//   s_i = (E[|q_i|^2] + E[|k_i|^2]) / 2 of pair i, per layer and kv head, from statistics
//   widths: every pair has 1 bit a channel at first; then the pair with the largest s_i 4^-b_i gets the next
//   bit, up to 8, until the average is B. Pairs of one width are a group, with its own length and its own
//   codes:
//   g = |x|, as float16;   y = H S x sqrt(n) / g;   x^ = S H level[code] g / sqrt(n)      of n channels
//   H S: Hadamard with random signs; levels: Lloyd-Max for a channel of a uniform unit vector of n channels
//   block = [codes][g: float16 per token and group], each section padded to 16 bytes
//
// Bits of keys, with everything counted: B + 16 G / D with G groups (3 to 6), the largest number of all
// heads, since the blocks of a shape are alike. Values are TurboQuant's of B bits: B + 16 / D. Widths by
// head, a byte a pair, do not grow with the context and are not counted. Without statistics there is one
// group: TurboQuant without renormalizing.
// Assumed: which channels are a pair is not known to a scheme; it is half a head apart or side by side, and
// RoPE makes the energies of both alike, so the arrangement with the more similar energies is taken, for all
// heads together.
//
// Contract: head_dim is even. NaN and infinities become 0 and are counted. Not foldable.
// Source: Block-GTQ, arXiv 2606.24033, algorithm 1.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <kvq/core/rounding.hpp>
#include <kvq/quant/calibration.hpp>
#include <kvq/quant/hadamard.hpp>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bit_stream.hpp"
#include "half_section.hpp"
#include "lloyd_max.hpp"

namespace baselines {

/// Widths of channels of every layer and kv head.
struct pair_plan {
    struct group {
        int bits;
        std::vector<int> channels;
    };
    int layers = 0, kv_heads = 0, head_dim = 0;
    bool half_apart = true;
    std::vector<std::vector<group>> heads;  // [layers * kv_heads]

    int groups() const noexcept {
        std::size_t most = 1;
        for (const auto& head : heads) most = std::max(most, head.size());
        return static_cast<int>(most);
    }
};

/// Widths of pairs with these energies, `average` bits on average, from 1 to 8.
inline std::vector<int> pair_widths(const std::vector<double>& energy, int average) {
    std::vector<int> bits(energy.size(), 1);
    for (std::size_t left = energy.size() * static_cast<std::size_t>(average - 1); left > 0; --left) {
        std::size_t best = energy.size();
        double most = -1.0;
        for (std::size_t i = 0; i < energy.size(); ++i) {
            const double gain = std::ldexp(energy[i], -2 * bits[i]);
            if (bits[i] < 8 && gain > most) most = gain, best = i;
        }
        if (best == energy.size()) break;
        ++bits[best];
    }
    return bits;
}

inline pair_plan make_pair_plan(const kvq::calibration& statistics, int average) {
    const kvq::cache_shape& shape = statistics.shape();
    const int pairs = shape.head_dim / 2;
    const auto energy = [&](int layer, int head, int c) {
        return 0.5 * (statistics.query_power(layer, head, c) + statistics.key_power(layer, head, c));
    };
    double apart = 0.0, beside = 0.0;
    const auto difference = [](double a, double b) {
        return a > 0.0 && b > 0.0 ? std::fabs(std::log(a / b)) : 0.0;
    };
    for (int layer = 0; layer < shape.layers; ++layer)
        for (int head = 0; head < shape.kv_heads; ++head)
            for (int i = 0; i < pairs; ++i) {
                apart += difference(energy(layer, head, i), energy(layer, head, i + pairs));
                beside += difference(energy(layer, head, 2 * i), energy(layer, head, 2 * i + 1));
            }
    pair_plan plan{shape.layers, shape.kv_heads, shape.head_dim, apart <= beside, {}};
    for (int layer = 0; layer < shape.layers; ++layer)
        for (int head = 0; head < shape.kv_heads; ++head) {
            std::vector<double> energies;
            for (int i = 0; i < pairs; ++i)
                energies.push_back(plan.half_apart
                                       ? energy(layer, head, i) + energy(layer, head, i + pairs)
                                       : energy(layer, head, 2 * i) + energy(layer, head, 2 * i + 1));
            const std::vector<int> bits = pair_widths(energies, average);
            std::vector<pair_plan::group> groups;
            for (int width = 8; width >= 1; --width) {
                pair_plan::group group{width, {}};
                for (int i = 0; i < pairs; ++i) {
                    if (bits[static_cast<std::size_t>(i)] != width) continue;
                    group.channels.push_back(plan.half_apart ? i : 2 * i);
                    group.channels.push_back(plan.half_apart ? i + pairs : 2 * i + 1);
                }
                if (!group.channels.empty()) groups.push_back(std::move(group));
            }
            plan.heads.push_back(std::move(groups));
        }
    return plan;
}

template <int Bits>
class block_gtq_keys {
    static_assert(Bits >= 1 && Bits <= 8, "baselines::block_gtq_keys: 1 to 8 bits");

public:
    block_gtq_keys() = default;
    explicit block_gtq_keys(const kvq::calibration& statistics)
        : plan_(std::make_shared<const pair_plan>(make_pair_plan(statistics, Bits))) {}

    std::string name() const { return "block-gtq" + std::to_string(Bits); }
    static constexpr bool supports(kvq::tensor role) noexcept { return role == kvq::tensor::key; }
    const pair_plan* plan() const noexcept { return plan_.get(); }

    /// Fingerprint of the widths (FNV-1a).
    std::uint64_t fingerprint() const noexcept {
        std::uint64_t hash = 14695981039346656037ULL;
        const auto add = [&](int x) { hash = (hash ^ static_cast<std::uint64_t>(x)) * 1099511628211ULL; };
        if (plan_)
            for (const auto& head : plan_->heads)
                for (const auto& group : head) {
                    add(group.bits);
                    for (const int c : group.channels) add(c);
                }
        return hash;
    }

    /// Raises std::invalid_argument unless there are widths for every layer and head of such a cache.
    void check(const kvq::cache_shape& s, kvq::tensor) const {
        if (plan_ &&
            (s.layers > plan_->layers || s.kv_heads != plan_->kv_heads || s.head_dim != plan_->head_dim))
            throw std::invalid_argument("Block-GTQ: statistics of " + std::to_string(plan_->layers) +
                                        " layers, " + std::to_string(plan_->kv_heads) + " heads and " +
                                        std::to_string(plan_->head_dim) + " channels in a cache of " +
                                        std::to_string(s.layers) + ", " + std::to_string(s.kv_heads) +
                                        " and " + std::to_string(s.head_dim));
    }

    std::size_t block_bytes(const kvq::block_shape& s) const noexcept {
        return code_section(s) + half_section(s.tokens * groups());
    }

    std::uint32_t quantize(const kvq::block_shape& s, const kvq::block_id& id, float* values,
                           std::byte* block) const {
        std::memset(block, 0, block_bytes(s));
        std::uint32_t not_finite = 0;
        std::vector<float> x;
        std::size_t at = 0;
        for (int t = 0; t < s.tokens; ++t) {
            float* const token = values + t * s.dim;
            for (int c = 0; c < s.dim; ++c)
                if (!std::isfinite(token[c])) token[c] = 0.0f, ++not_finite;
            int number = 0;
            for_each_group(s, id, [&](const pair_plan::group& group) {
                double squares = 0.0;
                x.clear();
                for (const int c : group.channels) {
                    x.push_back(token[c]);
                    squares += static_cast<double>(token[c]) * static_cast<double>(token[c]);
                }
                store_half(block + code_section(s), t * groups() + number++, std::sqrt(squares));
                const auto n = static_cast<int>(x.size());
                hadamard_.forward(n, id, x.data());
                const double scale = squares > 0.0 ? std::sqrt(n / squares) : 0.0;
                const auto& levels = unit_levels(n, group.bits);
                for (const float y : x)
                    put_bits(block, at, group.bits,
                             static_cast<unsigned>(
                                 nearest_of(levels, static_cast<float>(static_cast<double>(y) * scale))));
            });
        }
        return not_finite;
    }

    void dequantize(const kvq::block_shape& s, const kvq::block_id& id, const std::byte* block,
                    float* values) const {
        std::vector<float> x;
        std::size_t at = 0;
        for (int t = 0; t < s.tokens; ++t) {
            int number = 0;
            for_each_group(s, id, [&](const pair_plan::group& group) {
                const auto n = static_cast<int>(group.channels.size());
                const float length = load_half(block + code_section(s), t * groups() + number++);
                const float scale = length / std::sqrt(static_cast<float>(n));
                const auto& levels = unit_levels(n, group.bits);
                x.clear();
                for (int i = 0; i < n; ++i)
                    x.push_back(kvq::rounded_product(scale, levels[get_bits(block, at, group.bits)]));
                hadamard_.backward(n, id, x.data());
                for (int i = 0; i < n; ++i)
                    values[t * s.dim + group.channels[static_cast<std::size_t>(i)]] =
                        x[static_cast<std::size_t>(i)];
            });
        }
    }

private:
    int groups() const noexcept { return plan_ ? plan_->groups() : 1; }
    static constexpr std::size_t code_section(const kvq::block_shape& s) noexcept {
        return padded((s.values() * static_cast<std::size_t>(Bits) + 7) / 8);
    }
    template <class F>
    void for_each_group(const kvq::block_shape& s, const kvq::block_id& id, F&& f) const {
        if (plan_) {
            for (const auto& group :
                 plan_->heads[static_cast<std::size_t>(id.layer * plan_->kv_heads + id.head)])
                f(group);
            return;
        }
        pair_plan::group all{Bits, {}};
        for (int c = 0; c < s.dim; ++c) all.channels.push_back(c);
        f(all);
    }

    std::shared_ptr<const pair_plan> plan_;
    kvq::hadamard_transform<> hadamard_;
};

}  // namespace baselines
