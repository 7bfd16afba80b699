// Definitions of rotary.hpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>

#include "../core/bits.hpp"
#include "../core/sine_and_cosine.hpp"
#include "rotary.hpp"

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC std::vector<double> rotary_frequencies(int dims, double base) {
    detail::expect(dims >= 0 && dims % 2 == 0, "a rotary embedding rotates pairs of channels, not ", dims,
                   " channels");
    detail::expect(base > 0.0 && std::isfinite(base), "the base of a rotary embedding is ", base);
    std::vector<double> f(static_cast<std::size_t>(dims) / 2);
    for (std::size_t j = 0; j < f.size(); ++j) f[j] = std::pow(base, -2.0 * static_cast<double>(j) / dims);
    return f;
}

KVQ_FUNC std::vector<double> llama3_frequencies(int dims, double base, const llama3_scaling& s) {
    detail::expect(s.factor > 0.0 && s.original_context > 0.0 && s.low_freq_factor > 0.0 &&
                       s.high_freq_factor > s.low_freq_factor,
                   "Llama 3 scaling by ", s.factor, " with factors ", s.low_freq_factor, " and ",
                   s.high_freq_factor, " of a context of ", s.original_context);
    std::vector<double> f = rotary_frequencies(dims, base);
    for (double& x : f) {
        const double turns = s.original_context * x / 6.283185307179586;
        const double kept = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
        const double part = std::fmin(1.0, std::fmax(0.0, kept));
        x = (1.0 - part) * x / s.factor + part * x;
    }
    return f;
}

KVQ_FUNC std::vector<double> yarn_frequencies(int dims, double base, const yarn_scaling& s) {
    detail::expect(s.factor > 0.0 && s.original_context > 0.0 && s.beta_slow > 0.0 &&
                       s.beta_fast > s.beta_slow && base > 1.0,
                   "YaRN scaling by ", s.factor, " with betas ", s.beta_fast, " and ", s.beta_slow,
                   " of a context of ", s.original_context, " and base ", base);
    std::vector<double> f = rotary_frequencies(dims, base);
    const auto pair_of = [&](double turns) {
        return dims * std::log(s.original_context / (turns * 6.283185307179586)) / (2.0 * std::log(base));
    };
    const double low = std::fmax(0.0, std::floor(pair_of(s.beta_fast)));
    double high = std::fmin(dims - 1.0, std::ceil(pair_of(s.beta_slow)));
    if (high == low) high += 0.001;
    for (std::size_t j = 0; j < f.size(); ++j) {
        const double ramp = std::fmin(1.0, std::fmax(0.0, (static_cast<double>(j) - low) / (high - low)));
        f[j] = ramp * f[j] / s.factor + (1.0 - ramp) * f[j];
    }
    return f;
}

namespace detail {

KVQ_FUNC std::string short_number(double x) {
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%.9g", x);
    return digits;
}

/// frequencies: those of e, also if it has only a base.
KVQ_FUNC rotary_identity rotary_identity_of(const rotary_embedding& e,
                                            const std::vector<double>& frequencies) {
    fingerprint_hash hash;
    if (!e.rotate && e.dims == 0) return {"no rotation", hash.value};
    const bool split = e.layout == rotary_layout::half_split;
    for (const int number : {e.rotate ? 1 : 0, e.dims, e.first_channel, split ? 0 : 1})
        hash.add(static_cast<std::uint64_t>(static_cast<std::int64_t>(number)));
    if (e.rotate) hash.add(bit_cast<std::uint32_t>(static_cast<float>(e.base)));
    for (const double f : frequencies) hash.add(bit_cast<std::uint32_t>(static_cast<float>(f)));
    std::string text = e.rotate ? "a function, " : "";
    text += std::to_string(e.dims) + " channels from " + std::to_string(e.first_channel) + " on";
    text += split ? ", half split" : ", interleaved";
    text += e.frequencies.empty() ? ", base " + short_number(e.base)
                                  : ", frequencies " + short_number(e.frequencies.front()) + " to " +
                                        short_number(e.frequencies.back());
    return {text, hash.value};
}

KVQ_FUNC rotation::rotation(const rotary_embedding& e, int head_dim, const std::string& what)
    : first_(e.first_channel), layout_(e.layout), rotate_(e.rotate) {
    if (rotate_) {
        identity_ = rotary_identity_of(e, e.frequencies);
        return;
    }
    expect(e.dims >= 0 && e.dims % 2 == 0 && e.first_channel >= 0 && e.dims <= head_dim &&
               e.first_channel <= head_dim - e.dims,
           what, " rotates ", e.dims, " channels from ", e.first_channel, " on, in pairs, of a head of ",
           head_dim);
    turns_ = e.frequencies.empty() ? rotary_frequencies(e.dims, e.base) : e.frequencies;
    expect(turns_.size() == static_cast<std::size_t>(e.dims) / 2, what, " has ", turns_.size(),
           " frequencies for ", e.dims, " channels");
    identity_ = rotary_identity_of(e, turns_);
    for (double& f : turns_) {
        expect(std::isfinite(f), what, " has a frequency of ", f);
        f /= 6.283185307179586;
    }
}

// KVQ_FUNC stands at its declaration.
void rotation::operator()(float* row, int rows, int dim, std::int64_t by) const {
    if (rotate_) {
        for (int i = 0; i < rows; ++i) rotate_(row + static_cast<std::ptrdiff_t>(i) * dim, dim, by);
        return;
    }
    constexpr int step = 32;
    float sine[step], cosine[step];
    const auto pairs = static_cast<int>(turns_.size());
    const double positions = static_cast<double>(by);
    for (int first = 0; first < pairs; first += step) {
        const double* const turns = turns_.data() + first;
        const int n = smaller(step, pairs - first);
        for (int j = 0; j < n; ++j) sine_and_cosine(positions * turns[j], sine[j], cosine[j]);
        const int apart = layout_ == rotary_layout::half_split ? pairs : 1, next = apart == 1 ? 2 : 1;
        for (int i = 0; i < rows; ++i) {
            float* const x = row + static_cast<std::ptrdiff_t>(i) * dim + first_ + first * next;
            for (int j = 0; j < n; ++j) {
                const float a = x[j * next], b = x[j * next + apart];
                x[j * next] = a * cosine[j] - b * sine[j];
                x[j * next + apart] = b * cosine[j] + a * sine[j];
            }
        }
    }
}

KVQ_FUNC rotation_table::rotation_table(const std::vector<rotary_embedding>& list,
                                        const std::vector<int>& head_dims) {
    const std::size_t layers = head_dims.size();
    expect(list.size() <= 1 || list.size() == layers, "rotary embeddings are given for ", list.size(),
           " layers of a cache with ", layers);
    if (list.empty()) return;
    // One of all layers is held once, unless head sizes differ.
    const bool alike =
        std::adjacent_find(head_dims.begin(), head_dims.end(), std::not_equal_to<>()) == head_dims.end();
    for (std::size_t i = 0; i < (alike ? list.size() : layers); ++i)
        of_.emplace_back(list[list.size() == 1 ? 0 : i], head_dims[i],
                         "the rotary embedding of layer " + std::to_string(i));
}

KVQ_FUNC bool rotation_table::any() const noexcept {
    bool some = false;
    for (const rotation& r : of_) some = some || r;
    return some;
}

KVQ_FUNC const rotation* rotation_table::at(int layer) const noexcept {
    if (of_.empty()) return nullptr;
    const rotation& r = of_layer(layer);
    return r ? &r : nullptr;
}

KVQ_FUNC const rotation& rotation_table::of_layer(int layer) const noexcept {
    return of_.size() == 1 ? of_.front() : of_[static_cast<std::size_t>(layer)];
}

}

}}
