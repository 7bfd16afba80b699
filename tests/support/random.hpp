// SPDX-License-Identifier: MIT
// Random inputs. Every random test starts with
//
//   const auto seed = test::seed();
//   INFO("KVQ_SEED=", seed);
//   test::generator random(seed);
//
// so that a failure prints how to replay it. Numbers do not depend on the standard library or on the
// instruction set.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <utility>
#include <vector>

namespace test {

/// KVQ_SEED of the environment, or a fixed number.
inline std::uint64_t seed() {
    const char* const text = std::getenv("KVQ_SEED");
    return text ? std::strtoull(text, nullptr, 10) : 20240207;
}

/// Is every instruction emulated or instrumented?
#if defined(KVQ_TEST_SLOW)
inline constexpr bool is_slow = true;
#else
inline constexpr bool is_slow = false;
#endif

/// Rounds of a long test: KVQ_ROUNDS times as many as usual, a third of them where is_slow.
inline int rounds(int usual) {
    if (const char* const factor = std::getenv("KVQ_ROUNDS")) usual *= std::atoi(factor);
    return is_slow ? (usual + 2) / 3 : usual;
}

/// Numbers [first, last) of random histories: KVQ_HISTORIES of them, or only number KVQ_HISTORY.
inline std::pair<int, int> histories(int usual) {
    if (const char* const one = std::getenv("KVQ_HISTORY")) return {std::atoi(one), std::atoi(one) + 1};
    const char* const wanted = std::getenv("KVQ_HISTORIES");
    return {0, wanted ? std::atoi(wanted) : rounds(usual)};
}

/// splitmix64.
class generator {
public:
    explicit generator(std::uint64_t seed) noexcept : state_(seed) {}

    std::uint64_t bits() noexcept {
        state_ += 0x9e3779b97f4a7c15u;
        std::uint64_t z = state_;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    /// An integer in [low, high].
    int between(int low, int high) noexcept {
        const long long span = static_cast<long long>(high) - low + 1;
        return static_cast<int>(low + static_cast<long long>(bits() % static_cast<std::uint64_t>(span)));
    }
    bool one_in(int n) noexcept { return between(1, n) == 1; }
    template <class Container>
    auto pick(const Container& from) noexcept {
        return from[bits() % std::size(from)];
    }
    /// [0, 1), 24 bits.
    float uniform() noexcept { return static_cast<float>(bits() >> 40) * 0x1p-24f; }
    /// Mean 0, variance 1: twelve uniform numbers, so that no library function is needed.
    float normal() noexcept {
        float sum = -6.0f;
        for (int i = 0; i < 12; ++i) sum += uniform();
        return sum;
    }
    /// Magnitudes from 2^low to 2^high, either sign.
    float any_magnitude(int low, int high) noexcept {
        float x = 1.0f + uniform();
        for (int e = between(low, high); e != 0; e += e < 0 ? 1 : -1) x *= e < 0 ? 0.5f : 2.0f;
        return one_in(2) ? x : -x;
    }
    std::vector<float> normals(std::size_t n, float factor = 1.0f) {
        std::vector<float> x(n);
        for (float& v : x) v = factor * normal();
        return x;
    }

private:
    std::uint64_t state_;
};

/// What real tensors should not hold, but do.
inline const std::vector<float>& hostile_values() {
    using limits = std::numeric_limits<float>;
    static const std::vector<float> values = {limits::quiet_NaN(),
                                              -limits::quiet_NaN(),
                                              limits::infinity(),
                                              -limits::infinity(),
                                              limits::denorm_min(),
                                              -limits::denorm_min(),
                                              1e-40f,
                                              limits::min(),
                                              -limits::min(),
                                              6.1e-5f,
                                              5.9e-8f,
                                              65504.0f,
                                              -65504.0f,
                                              65519.9f,
                                              65520.0f,
                                              -70000.0f,
                                              0.0f,
                                              -0.0f,
                                              1.0f,
                                              -1.0f,
                                              1e30f,
                                              -1e30f,
                                              -2.5e38f,
                                              limits::max(),
                                              -limits::max(),
                                              3e-8f};
    return values;
}

/// Fills x with one of several kinds of trouble: constants, zeros of both signs, subnormals, +-65504, mixed
/// magnitudes, hostile values among normal ones, nothing but NaN. `finite`: finite even as 16-bit floats.
inline void fill_hostile(generator& random, float* x, std::size_t n, bool finite = false) {
    const int kind = random.between(0, 9);
    const float constant = random.one_in(3) ? 0.0f : random.any_magnitude(-10, 10);
    for (std::size_t i = 0; i < n; ++i) {
        switch (kind) {
            case 0:
                x[i] = constant;
                break;
            case 1:
                x[i] = random.any_magnitude(-149, -120);
                break;
            case 2:
                x[i] = random.one_in(2) ? 65504.0f : -65504.0f;
                break;
            case 3:
                x[i] = random.any_magnitude(-60, 60);
                break;
            case 4:
                x[i] = random.pick(hostile_values());
                break;
            case 5:
                x[i] = random.one_in(4) ? random.pick(hostile_values()) : random.normal();
                break;
            case 6:
                x[i] = std::numeric_limits<float>::quiet_NaN();
                break;
            case 7:
                x[i] = 1000.0f + random.normal() * 1e-3f;
                break;
            case 8:  // as a rectifier leaves it, zeros of either sign
                x[i] = random.normal();
                if (x[i] < 0.5f) x[i] = random.one_in(2) ? 0.0f : -0.0f;
                break;
            default:
                x[i] = random.normal();
                break;
        }
        if (finite && !(x[i] >= -65504.0f && x[i] <= 65504.0f)) x[i] = x[i] < 0.0f ? -65504.0f : 65504.0f;
    }
}

}  // namespace test
