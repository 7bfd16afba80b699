// Rotary position embedding: what a cache must know to move keys that were rotated before they were stored.
//
//   pair j of a row at position p:   (x, y) -> (x cos a - y sin a, y cos a + x sin a),   a = p * frequency[j]
//
// Rotations add up: keys that were rotated at position p and now sit at p + m need no new codes, since R(p +
// m) k · R(q) x = R(p) k · R(q - m) x. Attention rotates the query by -m for these pages.
// Contract: sine and cosine are within 2e-7; the angle of a move by m is within |m| * frequency * 4e-16
// radians, so moves by 2^31 positions are exact enough. A rotation of 0 positions changes no bit.
// Source: Su et al., arXiv 2104.09864; Llama 3 scaling as in Meta's reference code; YaRN, Peng et al., arXiv
// 2309.00071, section 3.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "../core/error.hpp"

namespace kvq { inline namespace KVQ_COMMON {

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
    /// Radians per position of each pair, [dims / 2]; empty: base^(-2 j / dims). Scaled models:
    /// llama3_frequencies(), yarn_frequencies(). (The attention factor of YaRN scales queries and keys; a
    /// move does not change it.)
    std::vector<double> frequencies = {};
    /// Instead of all of the above: rotates a row of head_dim channels by `by` positions more. Called from
    /// all threads. Functions cannot be compared: in files and messages the numbers above tell them apart,
    /// base first of all.
    std::function<void(float* row, int head_dim, std::int64_t by)> rotate = {};
};

/// base^(-2 j / dims) for every pair j.
[[nodiscard]] std::vector<double> rotary_frequencies(int dims, double base);

/// rope_scaling of type "llama3".
struct llama3_scaling {
    double factor = 8.0;
    double low_freq_factor = 1.0;
    double high_freq_factor = 4.0;
    double original_context = 8192.0;
};

/// Frequencies of Llama 3.1: wavelengths above original_context / low_freq_factor are stretched by `factor`,
/// those below original_context / high_freq_factor stay, those between are blended.
[[nodiscard]] std::vector<double> llama3_frequencies(int dims, double base, const llama3_scaling& s);

/// rope_scaling of type "yarn".
struct yarn_scaling {
    double factor = 1.0;
    double original_context = 4096.0;
    double beta_fast = 32.0;
    double beta_slow = 1.0;
};

/// Frequencies of YaRN: pairs that turn more than beta_fast times within the original context stay, those
/// that turn less than beta_slow times are stretched by `factor`, a linear ramp over the (whole) indices of
/// the pairs lies between.
[[nodiscard]] std::vector<double> yarn_frequencies(int dims, double base, const yarn_scaling& s);

/// A rotary embedding outside of its cache: its numbers as text, and a fingerprint of them. Frequencies count
/// as floats, since powers of one base differ in their last bit from one C library to another.
struct rotary_identity {
    std::string text;
    std::uint64_t fingerprint = 0;
};

namespace detail {

/// The rotary embedding of one layer, ready to rotate rows.
class rotation {
public:
    rotation() = default;
    /// Raises kvq::error if it does not fit a head. what: "the rotary embedding of layer 3".
    rotation(const rotary_embedding& e, int head_dim, const std::string& what);

    /// Does it rotate anything?
    explicit operator bool() const noexcept { return rotate_ || !turns_.empty(); }
    const rotary_identity& identity() const noexcept { return identity_; }
    /// Is it a function of the engine's?
    bool is_function() const noexcept { return rotate_ != nullptr; }
    /// Of every pair: turns per position. And where the pairs are.
    const std::vector<double>& turns() const noexcept { return turns_; }
    int first_channel() const noexcept { return first_; }
    rotary_layout layout() const noexcept { return layout_; }

    /// Rotates `rows` rows of `dim` channels, one after the other, by `by` positions more.
    KVQ_FUNC KVQ_NOINLINE void operator()(float* row, int rows, int dim, std::int64_t by) const;

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
    /// head_dims: of each layer.
    rotation_table(const std::vector<rotary_embedding>& list, const std::vector<int>& head_dims);

    /// False: cache_options::rotary is empty.
    bool known() const noexcept { return !of_.empty(); }
    /// Does any layer rotate?
    bool any() const noexcept;
    /// The rotation of a layer, or null if it does not rotate.
    const rotation* at(int layer) const noexcept;
    /// That of a layer of a cache whose rotations are known.
    const rotary_identity& identity(int layer) const noexcept { return of_layer(layer).identity(); }

private:
    const rotation& of_layer(int layer) const noexcept;
    std::vector<rotation> of_;
};

/// The farthest that keys may have moved since they were rotated: as a double, whole numbers up to here are
/// exact.
inline constexpr std::int64_t farthest_shift = std::int64_t{1} << 52;

/// Raises kvq::error for keys that moved farther than that, or in a cache that cannot rotate them. keys:
/// "keys of pages 3".
template <class... Keys>
void expect_shift(const rotation_table& rotations, std::int64_t shift, const Keys&... keys) {
    expect(shift == 0 || rotations.known(), keys..., " moved by ", shift,
           " positions: set cache_options::rotary to say how they are rotated");
    expect(shift >= -farthest_shift && shift <= farthest_shift, keys..., " moved by ", shift,
           " positions, the limit is ", farthest_shift);
}

}  // namespace detail
}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "rotary-inl.hpp"
#endif
