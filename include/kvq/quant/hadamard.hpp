// Walsh-Hadamard transform with random signs: H S x, orthonormal, for any number of channels.
//
//   S = diag(+-1), fixed by seed, layer and head;
//     H = blocks of size 2^k, each the Sylvester matrix divided by sqrt(2^k)
//
// The transform spreads an outlier channel over all channels of its block, so that groups of channels become
// alike. Channels are cut into the largest powers of two that fit (48 = 32 + 16), or into blocks of at most
// `Largest`.
//
// Contract: the order of additions is part of the format. Steps go over distances 1, 2, 4, ... n/2 between
// channels, in this order; a step replaces channels j and j + distance by their float sum and difference; the
// factor 1/sqrt(n) is applied once at the end. The same bits on every compiler, CPU and GPU.
// backward(forward(x)) = x up to (log2 n + 2) roundings. O(dim log dim), in place.
// Sources: QuaRot, arXiv 2404.00456, section 4; random signs: QuIP#, arXiv 2402.04396, section 3.
#pragma once

#include <cstdint>
#include <string>

#include "../core/shape.hpp"
#include "../core/text.hpp"
#include "token_transform.hpp"

namespace kvq { inline namespace KVQ_TAGGED {
namespace detail {

/// +1 or -1 of a channel. Seed 0: all +1.
KVQ_HD constexpr float random_sign(std::uint32_t seed, const block_id& id, int channel) noexcept {
    if (seed == 0) return 1.0f;
    std::uint32_t h = (seed - 1u) * 0x9e3779b9u ^ static_cast<std::uint32_t>(id.layer) * 73856093u ^
                      static_cast<std::uint32_t>(id.head) * 19349663u ^
                      static_cast<std::uint32_t>(channel) * 83492791u;
    h = (h ^ (h >> 15)) * 0x2c1b3c6du;
    return (h >> 13) & 1u ? -1.0f : 1.0f;
}

/// 1 / sqrt(n) of a power of two, both the root and the quotient rounded to float.
KVQ_HD constexpr float hadamard_norm(int n) noexcept {
    constexpr float of_two = 1.0f / 1.41421356f;
    float norm = 1.0f;
    for (; n >= 4; n /= 4) norm *= 0.5f;
    return n == 2 ? norm * of_two : norm;
}

/// Size of the Hadamard block of a channel: channels are cut into the powers of two in `dim`, the largest
/// first; larger ones than `largest` into pieces of it (0: none). It is the highest bit in which channel and
/// dim differ.
KVQ_HD constexpr int hadamard_block(int dim, int largest, int channel) noexcept {
    int block = 1;
    for (int rest = (dim ^ channel) >> 1; rest > 0; rest >>= 1) block *= 2;
    return largest > 0 && block > largest ? largest : block;
}

/// Sums and differences in place, without the factor; n is a power of two.
inline void hadamard_sums(float* x, int n) noexcept {
    for (int half = 1; half < n; half *= 2)
        for (int i = 0; i < n; i += 2 * half)
            for (int j = i; j < i + half; ++j) {
                const float a = x[j], b = x[j + half];
                x[j] = a + b;
                x[j + half] = a - b;
            }
}
/// In place, orthonormal; n is a power of two. The transform is its own inverse.
inline void walsh_hadamard(float* x, int n) noexcept {
    hadamard_sums(x, n);
    const float norm = hadamard_norm(n);
    for (int i = 0; i < n; ++i) x[i] *= norm;
}

/// Calls f(first, n) for every block of channels: the largest powers of two that fit, and are at most
/// `largest` (0: no limit).
template <class F>
void each_hadamard_block(int dim, int largest, F&& f) {
    for (int first = 0, n; first < dim; first += n) f(first, n = hadamard_block(dim, largest, first));
}

}  // namespace detail

/// The transform as a policy of transformed<> (schemes/transformed.hpp). Largest: 0 or a power of two; Seed
/// 0: no signs.
template <int Largest = 0, std::uint32_t Seed = 1>
struct hadamard_transform {
    static_assert(Largest >= 0 && (Largest & (Largest - 1)) == 0,
                  "kvq::hadamard_transform: Largest must be a power of two, or 0 for no limit");

    static constexpr token_transform value{transform_kind::hadamard, Largest, Seed};

    short_text name() const { return "hadamard" + (Largest ? short_text::of(Largest) : short_text()); }

    /// Fingerprint of the signs.
    static constexpr std::uint64_t fingerprint() noexcept { return Seed; }

    static constexpr float sign(const block_id& id, int channel) noexcept {
        return detail::random_sign(Seed, id, channel);
    }

    /// x = H S x.
    void forward(int dim, const block_id& id, float* x) const noexcept {
        for (int c = 0; c < dim; ++c) x[c] *= sign(id, c);
        blocks(dim, x);
    }
    /// x = S H x, the inverse.
    void backward(int dim, const block_id& id, float* x) const noexcept {
        blocks(dim, x);
        for (int c = 0; c < dim; ++c) x[c] *= sign(id, c);
    }

private:
    static void blocks(int dim, float* x) noexcept {
        detail::each_hadamard_block(dim, Largest,
                                    [x](int first, int n) { detail::walsh_hadamard(x + first, n); });
    }
};

}}  // namespace kvq
