// SPDX-License-Identifier: MIT
// Blocks of one head, outside of any cache.
#pragma once

#include <doctest/doctest.h>

#include <kvq/core/shape.hpp>
#include <ostream>
#include <vector>

#include "random.hpp"

namespace kvq { inline namespace KVQ_TAGGED {
inline std::ostream& operator<<(std::ostream& out, const block_shape& s) {
    return out << (s.role == tensor::key ? "key" : "value") << " block of " << s.tokens << " x " << s.dim;
}
}}  // namespace kvq

namespace test {

/// Sizes around words (4), tiles (32) and groups, and anything else.
inline kvq::block_shape random_shape(generator& random, int largest = 160) {
    constexpr int corners[] = {1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 48, 63, 64, 65, 96, 128};
    const auto size = [&] { return random.one_in(2) ? random.pick(corners) : random.between(1, largest); };
    return {random.one_in(2) ? kvq::tensor::key : kvq::tensor::value, size(), size()};
}

/// Shapes that fill vectors and tiles, which kernels have shorter ways for.
inline kvq::block_shape whole_shape(generator& random) {
    return {random.one_in(2) ? kvq::tensor::key : kvq::tensor::value, 16 * random.between(1, 6),
            64 * random.between(1, 4)};
}

/// check(random, shape) for random shapes; what fails names the seed, the scheme and the shape.
template <class Scheme, class Check>
void for_random_shapes(const Scheme& scheme, int rounds, int largest, Check check) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    INFO(scheme.name());
    generator random(seed);
    for (int round = 0; round < rounds; ++round) {
        const kvq::block_shape shape = random_shape(random, largest);
        INFO(shape);
        check(random, shape);
    }
}

inline std::vector<float> random_block(generator& random, const kvq::block_shape& shape) {
    return random.normals(shape.values());
}

/// Every token, or every channel, gets its own kind of trouble.
inline std::vector<float> hostile_block(generator& random, const kvq::block_shape& shape,
                                        bool finite = false) {
    std::vector<float> x(shape.values());
    const bool by_token = random.one_in(2);
    const auto tokens = static_cast<std::size_t>(shape.tokens), dim = static_cast<std::size_t>(shape.dim);
    std::vector<float> line(by_token ? dim : tokens);
    for (std::size_t i = 0; i < (by_token ? tokens : dim); ++i) {
        fill_hostile(random, line.data(), line.size(), finite);
        for (std::size_t j = 0; j < line.size(); ++j) x[by_token ? i * dim + j : j * dim + i] = line[j];
    }
    return x;
}

template <class Scheme>
std::vector<std::byte> quantized(const Scheme& scheme, const kvq::block_shape& shape,
                                 std::vector<float> values, std::uint32_t* not_finite = nullptr,
                                 kvq::block_id id = {}) {
    std::vector<std::byte> block(scheme.block_bytes(shape), std::byte{0xcd});
    const std::uint32_t count = scheme.quantize(shape, id, values.data(), block.data());
    if (not_finite) *not_finite = count;
    return block;
}

template <class Scheme>
std::vector<float> dequantized(const Scheme& scheme, const kvq::block_shape& shape,
                               const std::vector<std::byte>& block, kvq::block_id id = {}) {
    std::vector<float> values(shape.values());
    scheme.dequantize(shape, id, block.data(), values.data());
    return values;
}

}  // namespace test
