// Bits per channel: the allocation of least expected error within a fixed number of words per row of codes.
//
//   error = sum_c importance_c * noise(width of c),
//     importance_c = E[q_c^2] var(k_c): the channel's share of the logits' variance
//                  ~ E[k_c^2] sd(k_c) where no query is known (`key_importance`)
//   noise(B) = 1, 0.363, 0.119, 0.037 for 0 to 3 bits     the best uniform grid for normally distributed
//                                                         values
//              1.92 / (2^B - 1)^2 for more                a grid over the range of 64 of them (4.8 sigma):
//                                                         step^2 / 12
//
// Channels are sorted by importance and cut into runs of one width each, the widest first, in quads of 4
// channels; since noise falls with the width, that order is optimal, and the cuts are found exactly by
// dynamic programming.
//
// Statistics of one text are used on another. A channel that wrongly loses its bits costs more than a channel
// that rightly loses them gains. So importances are first shrunk towards each other, by the part of their
// spread that may be due to the text (`steady_importance`):
//
//   importance_c -> importance_c^g,
//     g = 1 - doubt / var(log importance over the channels of the head), not below 0
//
// Heads whose channels hardly differ get even widths; importances of heads with outlier channels hardly
// change.
// Source: shrinkage: James & Stein 1961, on logarithms. Uniform quantizers: Max, IRE Trans. Inf. Theory 1960,
// table II; reverse water-filling (Cover & Thomas, section 10.3.3); per-channel key widths: Kitty-like
// schemes.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "../core/error.hpp"
#include "../core/rounding.hpp"
#include "../core/tagged_vector.hpp"
#include "../pack/code_layout.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

namespace detail {

KVQ_HD constexpr double width_noise(int width) noexcept {
    constexpr double narrow[4] = {1.0, 0.363, 0.119, 0.037};
    const double steps = static_cast<double>((1 << width) - 1);
    return width < 4 ? narrow[width] : 1.92 / (steps * steps);
}

/// log2(x) for x >= 1, to 2^-24 below. It uses products alone, so that the result is the same everywhere.
/// (std::log2 differs.)
KVQ_HD inline double floor_log2(double x) noexcept {
    int whole = 0;
    double rest = 2.0 * std::frexp(x, &whole), result = whole - 1;
    for (int place = 1; place <= 24; ++place) {
        rest *= rest;
        if (rest >= 2.0) {
            rest /= 2;
            result += std::ldexp(1.0, -place);
        }
    }
    return result;
}
/// 2^x for a multiple of 2^-24 that is not negative. It uses products and roots alone.
KVQ_HD inline double exact_exp2(double x) noexcept {
    const double whole = std::floor(x);
    double rest = x - whole, result = 1.0, factor = 2.0;
    for (int place = 1; place <= 24; ++place) {
        const double bit = std::ldexp(1.0, -place);
        factor = std::sqrt(factor);
        if (rest >= bit) {
            rest -= bit;
            result *= factor;
        }
    }
    return std::ldexp(result, static_cast<int>(whole));
}

// Steps of kvq::steady_importance(), which a device takes as well.
KVQ_HD inline double importance_log(double x, double top) noexcept {
    return floor_log2(larger(1.0, x / top * 0x1p20));
}
/// The exponent of importances with these logarithms.
KVQ_HD inline double steady_power(const double* logs, int count, double doubt) noexcept {
    constexpr double ln2 = 0.6931471805599453;
    double mean = 0.0, variance = 0.0;
    for (int i = 0; i < count; ++i) mean += logs[i];
    mean /= count;
    for (int i = 0; i < count; ++i) variance += rounded_product(logs[i] - mean, logs[i] - mean);
    variance = rounded_product(variance / count, ln2 * ln2);
    return variance > doubt ? 1.0 - doubt / variance : 0.0;
}
KVQ_HD inline double steadied(double log, double power) noexcept {
    return exact_exp2(std::floor(rounded_product(log, power) * 0x1p24) * 0x1p-24);
}

}  // namespace detail

/// Expected variance, from one text to another, of the logarithm of a channel's importance. Measured: 0.01 to
/// 0.02 between two parts of one text, 0.05 to 0.64 between texts of different kinds (docs/lab/quality.md).
/// At averages of 4 bits and more, plans gain less over even widths than a mistake costs, so the worst case
/// is expected.
constexpr double text_doubt(double average_bits) noexcept { return average_bits < 4.0 ? 0.2 : 0.6; }

/// The importance that a channel's keys let expect, in some unit: models make queries larger where keys are,
/// and smaller where keys vary (docs/lab/presets.md).
KVQ_HD inline double key_importance(double mean_square, double variance) noexcept {
    return mean_square * std::sqrt(variance);
}

/// Expected variance of the logarithm of a channel's importance, from what keys say to what queries do.
inline constexpr double key_doubt = 0.3;

/// Shrinks importances (>= 0, in any unit) by what may be chance; their order stays. doubt: expected variance
/// of the natural logarithm of a channel's importance; 0 changes nothing. An importance below 2^-20 of the
/// largest counts as 2^-20 of it.
inline void steady_importance(std::span<double> importance, double doubt) {
    double top = 0.0;
    for (const double x : importance) top = detail::larger(top, x);
    if (!(top > 0.0) || doubt == 0.0) return;
    detail::tagged_vector<double> logs;
    for (const double x : importance) logs.push_back(detail::importance_log(x, top));
    const double power = detail::steady_power(logs.data(), static_cast<int>(logs.size()), doubt);
    for (std::size_t c = 0; c < logs.size(); ++c) importance[c] = detail::steadied(logs[c], power);
}

/// A permutation of channels (place -> channel) and the number of quads of each width, in the order of
/// places.
struct channel_allocation {
    std::vector<std::uint16_t> order;
    std::vector<std::uint16_t> quads;
};

/// Orders and widths of channels for every layer and head.
struct width_plan {
    int kv_heads = 0;
    int head_dim = 0;
    std::vector<channel_allocation> blocks;  ///< [layer][head]
    bool of_every_layer = false;             ///< one layer, whose plan serves every layer: [head]
};

/// importance: one value >= 0 per channel. widths: falling. words: of a row of codes; must hold the narrowest
/// width. O(widths * quads^2 * words).
inline channel_allocation allocate_widths(std::span<const double> importance, std::span<const int> widths,
                                          int words) {
    const int channels = static_cast<int>(importance.size()), quads = detail::ceil_div(channels, 4);
    detail::tagged_vector<std::uint16_t> order(importance.size());
    std::iota(order.begin(), order.end(), std::uint16_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::uint16_t a, std::uint16_t b) { return importance[a] > importance[b]; });
    detail::tagged_vector<double> below(static_cast<std::size_t>(quads) + 1,
                                        0.0);  // importance of the first quads
    for (int q = 0; q < quads; ++q) {
        double sum = 0.0;
        for (int c = 4 * q; c < detail::smaller(4 * q + 4, channels); ++c)
            sum += importance[order[static_cast<std::size_t>(c)]];
        below[static_cast<std::size_t>(q) + 1] = below[static_cast<std::size_t>(q)] + sum;
    }

    // least[w][q][u]: error of the first q quads with the first w widths in u words.
    constexpr double never = std::numeric_limits<double>::infinity();
    const auto index = [&](int q, int u) {
        return static_cast<std::size_t>(q) * static_cast<std::size_t>(words + 1) +
               static_cast<std::size_t>(u);
    };
    detail::tagged_vector<double> least(index(quads, words) + 1, never), next(least.size());
    detail::tagged_vector<std::uint16_t> taken(widths.size() * least.size());  // [w][q][u]
    least[0] = 0.0;
    for (std::size_t w = 0; w < widths.size(); ++w) {
        for (double& x : next) x = never;
        for (int q = 0; q <= quads; ++q)
            for (int u = 0; u <= words; ++u) {
                if (least[index(q, u)] == never) continue;
                for (int n = 0; q + n <= quads && u + detail::code_words(widths[w], n) <= words; ++n) {
                    const std::size_t to = index(q + n, u + detail::code_words(widths[w], n));
                    const int end = q + n;
                    const double share =
                        below[static_cast<std::size_t>(end)] - below[static_cast<std::size_t>(q)];
                    const double error =
                        least[index(q, u)] + detail::rounded_product(detail::width_noise(widths[w]), share);
                    if (error < next[to]) {
                        next[to] = error;
                        taken[w * least.size() + to] = static_cast<std::uint16_t>(n);
                    }
                }
            }
        std::swap(least, next);
    }
    int u = 0;
    for (int i = 0; i <= words; ++i)
        if (least[index(quads, i)] < least[index(quads, u)]) u = i;
    detail::expect(least[index(quads, u)] != never, words, " words do not hold ", channels, " channels");
    channel_allocation result;
    result.order.assign(order.begin(), order.end());
    result.quads.resize(widths.size());
    for (int w = static_cast<int>(widths.size()) - 1, q = quads; w >= 0; --w) {
        const auto n = taken[static_cast<std::size_t>(w) * least.size() + index(q, u)];
        result.quads[static_cast<std::size_t>(w)] = n;
        q -= n;
        u -= detail::code_words(widths[static_cast<std::size_t>(w)], n);
    }
    return result;
}

}}  // namespace kvq
