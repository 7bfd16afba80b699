// Rotary position embedding: what a cache must know to move keys that were rotated before they were stored.
//
//   pair j of a row at position p:   (x, y) -> (x cos a - y sin a, y cos a + x sin a),   a = p * frequency[j]
//
// Rotations add up: keys that were rotated at position p and now sit at p + m need no new codes, since R(p + m) k · R(q) x =
// R(p) k · R(q - m) x. Attention rotates the query by -m for these pages.
// Contract: sine and cosine are within 2e-7; the angle of a move by m is within |m| * frequency * 4e-16 radians, so moves by
// 2^31 positions are exact enough. A rotation of 0 positions changes no bit.
// Source: Su et al., arXiv 2104.09864; Llama 3 scaling as in Meta's reference code; YaRN, Peng et al., arXiv 2309.00071, section 3.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "../core/bits.hpp"
#include "../core/error.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// Which channels are the pairs of a rotation of `dims` channels.
enum class rotary_layout : unsigned char {
    half_split,  ///< (j, j + dims / 2): GPT-NeoX, Llama in Hugging Face's order
    interleaved  ///< (2 j, 2 j + 1): GPT-J, Llama in Meta's order
};

/// The rotary embedding of one layer. The default rotates nothing: a layer without positions.
struct rotary_embedding {
    int dims = 0;           ///< rotated channels of a head, even; 0: none
    int first_channel = 0;  ///< the first of them
    rotary_layout layout = rotary_layout::half_split;
    double base = 10000.0;
    /// Radians per position of each pair, [dims / 2]; empty: base^(-2 j / dims). Scaled models: llama3_frequencies(),
    /// yarn_frequencies(). (The attention factor of YaRN scales queries and keys; a move does not change it.)
    std::vector<double> frequencies = {};
    /// Instead of all of the above: rotates a row of head_dim channels by `by` positions more. Called from all threads. Functions cannot
    /// be compared: in files and messages the numbers above tell them apart, base first of all.
    std::function<void(float* row, int head_dim, std::int64_t by)> rotate = {};
};

/// base^(-2 j / dims) for every pair j.
[[nodiscard]] inline std::vector<double> rotary_frequencies(int dims, double base) {
    detail::expect(dims >= 0 && dims % 2 == 0, "a rotary embedding rotates pairs of channels, not ", dims,
                   " channels");
    detail::expect(base > 0.0 && std::isfinite(base), "the base of a rotary embedding is ", base);
    std::vector<double> f(static_cast<std::size_t>(dims) / 2);
    for (std::size_t j = 0; j < f.size(); ++j) f[j] = std::pow(base, -2.0 * static_cast<double>(j) / dims);
    return f;
}

/// rope_scaling of type "llama3".
struct llama3_scaling {
    double factor = 8.0;
    double low_freq_factor = 1.0;
    double high_freq_factor = 4.0;
    double original_context = 8192.0;
};

/// Frequencies of Llama 3.1: wavelengths above original_context / low_freq_factor are stretched by `factor`, those below
/// original_context / high_freq_factor stay, those between are blended.
[[nodiscard]] inline std::vector<double> llama3_frequencies(int dims, double base, const llama3_scaling& s) {
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

/// rope_scaling of type "yarn".
struct yarn_scaling {
    double factor = 1.0;
    double original_context = 4096.0;
    double beta_fast = 32.0;
    double beta_slow = 1.0;
};

/// Frequencies of YaRN: pairs that turn more than beta_fast times within the original context stay, those that turn less than beta_slow
/// times are stretched by `factor`, a linear ramp over the (whole) indices of the pairs lies between.
[[nodiscard]] inline std::vector<double> yarn_frequencies(int dims, double base, const yarn_scaling& s) {
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

/// A rotary embedding outside of its cache: its numbers as text, and a fingerprint of them. Frequencies count as floats, since powers of
/// one base differ in their last bit from one C library to another.
struct rotary_identity {
    std::string text;
    std::uint64_t fingerprint = 0;
};

namespace detail {

inline std::string short_number(double x) {
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%.9g", x);
    return digits;
}

/// frequencies: those of e, also if it has only a base.
inline rotary_identity rotary_identity_of(const rotary_embedding& e, const std::vector<double>& frequencies) {
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

/// Sine and cosine of an angle in turns. No library function, so that a loop over pairs runs in vectors.
inline void sine_and_cosine(double turns, float& sine, float& cosine) noexcept {
    const double quarter = std::floor(4.0 * turns + 0.5);
    const double x = (4.0 * turns - quarter) * 1.5707963267948966, y = x * x;
    const double s =
        x * (1.0 + y * (-1.0 / 6 +
                        y * (1.0 / 120 + y * (-1.0 / 5040 + y * (1.0 / 362880 - y * (1.0 / 39916800))))));
    const double c =
        1.0 + y * (-1.0 / 2 + y * (1.0 / 24 + y * (-1.0 / 720 + y * (1.0 / 40320 - y * (1.0 / 3628800)))));
    const double of_four = quarter - 4.0 * std::floor(0.25 * quarter);
    const bool odd = of_four == 1.0 || of_four == 3.0;
    const double sign_s = of_four >= 2.0 ? -1.0 : 1.0;
    const double sign_c = of_four == 1.0 || of_four == 2.0 ? -1.0 : 1.0;
    sine = static_cast<float>(sign_s * (odd ? c : s));
    cosine = static_cast<float>(sign_c * (odd ? s : c));
}

/// The rotary embedding of one layer, ready to rotate rows.
class rotation {
public:
    rotation() = default;
    /// Raises kvq::error if it does not fit a head. what: "the rotary embedding of layer 3".
    rotation(const rotary_embedding& e, int head_dim, const std::string& what)
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

    /// Does it rotate anything?
    explicit operator bool() const noexcept { return rotate_ || !turns_.empty(); }
    const rotary_identity& identity() const noexcept { return identity_; }

    /// Rotates `rows` rows of `dim` channels, one after the other, by `by` positions more.
    void operator()(float* row, int rows, int dim, std::int64_t by) const {
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

private:
    int first_ = 0;
    rotary_layout layout_ = rotary_layout::half_split;
    std::vector<double> turns_;  // per position, of each pair
    std::function<void(float*, int, std::int64_t)> rotate_;
    rotary_identity identity_;
};

/// The rotary embeddings of the layers of a cache.
class rotation_table {
public:
    rotation_table() = default;
    /// list: empty, one for all layers, or one per layer.
    rotation_table(const std::vector<rotary_embedding>& list, int layers, int head_dim) {
        expect(list.size() <= 1 || static_cast<int>(list.size()) == layers,
               "rotary embeddings are given for ", list.size(), " layers of a cache with ", layers);
        for (std::size_t i = 0; i < list.size(); ++i)
            of_.emplace_back(list[i], head_dim, "the rotary embedding of layer " + std::to_string(i));
    }

    /// False: cache_options::rotary is empty.
    bool known() const noexcept { return !of_.empty(); }
    /// Does any layer rotate?
    bool any() const noexcept {
        bool some = false;
        for (const rotation& r : of_) some = some || r;
        return some;
    }
    /// The rotation of a layer, or null if it does not rotate.
    const rotation* at(int layer) const noexcept {
        if (of_.empty()) return nullptr;
        const rotation& r = of_layer(layer);
        return r ? &r : nullptr;
    }
    /// That of a layer of a cache whose rotations are known.
    const rotary_identity& identity(int layer) const noexcept { return of_layer(layer).identity(); }

private:
    const rotation& of_layer(int layer) const noexcept {
        return of_.size() == 1 ? of_.front() : of_[static_cast<std::size_t>(layer)];
    }
    std::vector<rotation> of_;
};

/// The farthest that keys may have moved since they were rotated: as a double, whole numbers up to here are exact.
inline constexpr std::int64_t farthest_shift = std::int64_t{1} << 52;

/// Raises kvq::error for keys that moved farther than that, or in a cache that cannot rotate them. keys: "keys of pages 3".
template <class... Keys>
void expect_shift(const rotation_table& rotations, std::int64_t shift, const Keys&... keys) {
    expect(shift == 0 || rotations.known(), keys..., " moved by ", shift,
           " positions: set cache_options::rotary to say how they are rotated");
    expect(shift >= -farthest_shift && shift <= farthest_shift, keys..., " moved by ", shift,
           " positions, the limit is ", farthest_shift);
}

}  // namespace detail
}}  // namespace kvq
