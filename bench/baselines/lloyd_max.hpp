// Lloyd-Max levels of a density that is given at points of a line.
//
//   levels[i] = mean of the density over cell i,   cells end half-way between levels
//
// Contract: points ascend, weights are >= 0. Starts at quantiles and iterates until no level moves by more
// than 1e-9 of the range, at most 2000 times. Levels ascend. exp, pow and sqrt of the platform enter the
// densities: levels may differ in the last digits.
// Source: Max, IRE Trans. IT-6, 1960; Lloyd, IEEE Trans. IT-28, 1982.
#pragma once

#include <cmath>
#include <cstddef>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace baselines {

struct weighted_points {
    std::vector<double> points, weights;
};

inline std::vector<float> lloyd_max(const weighted_points& of, int count) {
    const std::size_t n = of.points.size(), levels = static_cast<std::size_t>(count);
    double total = 0.0;
    for (const double w : of.weights) total += w;
    std::vector<double> level;
    double seen = 0.0;
    for (std::size_t i = 0; i < n && level.size() < levels; ++i) {
        seen += of.weights[i];
        while (level.size() < levels && seen >= total * (static_cast<double>(level.size()) + 0.5) / count)
            level.push_back(of.points[i]);
    }
    while (level.size() < levels) level.push_back(of.points.back());
    const double range = of.points.back() - of.points.front();
    for (int turn = 0; turn < 2000; ++turn) {
        double moved = 0.0;
        std::size_t at = 0;
        const std::vector<double> old = level;
        for (std::size_t i = 0; i < levels; ++i) {
            double sum = 0.0, weight = 0.0;
            const double end = i + 1 < levels ? 0.5 * (old[i] + old[i + 1]) : HUGE_VAL;
            for (; at < n && of.points[at] < end; ++at)
                sum += of.weights[at] * of.points[at], weight += of.weights[at];
            if (weight > 0.0) level[i] = sum / weight;
            moved = std::fmax(moved, std::fabs(level[i] - old[i]));
        }
        if (moved <= 1e-9 * range) break;
    }
    return {level.begin(), level.end()};
}

/// A coordinate of a uniform unit vector of n >= 2 channels, times sqrt(n): x = sin(phi), density cos(phi)^(n
/// - 2).
inline weighted_points unit_coordinate(int n) {
    constexpr int steps = 16384;
    const double pi = std::acos(-1.0);
    weighted_points p;
    for (int i = 0; i < steps; ++i) {
        const double phi = pi * ((i + 0.5) / steps - 0.5);
        p.points.push_back(std::sqrt(static_cast<double>(n)) * std::sin(phi));
        p.weights.push_back(std::pow(std::cos(phi), n - 2));
    }
    return p;
}

/// Levels made once per key, for the whole program. Thread-safe.
template <class Make>
const std::vector<float>& kept_levels(std::map<std::pair<int, int>, std::vector<float>>& kept,
                                      std::mutex& mutex, int n, int count, Make&& make) {
    const std::lock_guard lock(mutex);
    auto [at, fresh] = kept.try_emplace({n, count});
    if (fresh) at->second = lloyd_max(make(n), count);
    return at->second;  // a map moves no element
}

/// Levels of 2^bits codes for a channel of a uniform unit vector of n channels, times sqrt(n).
inline const std::vector<float>& unit_levels(int n, int bits) {
    static std::map<std::pair<int, int>, std::vector<float>> kept;
    static std::mutex mutex;
    return kept_levels(kept, mutex, n, 1 << bits, [](int dim) { return unit_coordinate(dim); });
}

/// Index of the nearest of ascending levels.
inline int nearest_of(const std::vector<float>& levels, float x) noexcept {
    std::size_t first = 0, last = levels.size() - 1;
    while (first < last) {
        const std::size_t middle = (first + last) / 2;
        if (x < 0.5f * (levels[middle] + levels[middle + 1]))
            last = middle;
        else
            first = middle + 1;
    }
    return static_cast<int>(first);
}

}  // namespace baselines
