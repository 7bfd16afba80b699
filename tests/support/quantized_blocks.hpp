// SPDX-License-Identifier: MIT
// Blocks as a scheme quantizes them itself, and as a backend does.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <kvq/cpu/listed_tokens.hpp>
#include <kvq/schemes/full.hpp>
#include <vector>

#include "blocks.hpp"

namespace test {

/// The bytes of a block, nothing behind them, and nothing behind the scratch memory. No template: checks take
/// long to compile.
inline void check_written(const std::vector<std::byte>& expected, const std::vector<std::byte>& got,
                          const std::vector<float>& scratch, std::size_t values) {
    const auto difference = std::mismatch(expected.begin(), expected.end(), got.begin());
    CHECK(difference.first - expected.begin() == static_cast<std::ptrdiff_t>(expected.size()));
    CHECK(std::count(got.end() - 64, got.end(), std::byte{0xcd}) == 64);
    for (std::size_t i = values; i < scratch.size(); ++i) CHECK(scratch[i] == 1e30f);
}

/// The same bytes and count from a block of 16- or 32-bit values and from float values, and nothing else
/// written.
template <class Window, class Backend, class S>
void check_block(const S& scheme, const kvq::block_shape& shape, const kvq::block_id& id,
                 const std::vector<float>& x) {
    const kvq::full<Window> full;
    std::vector<std::byte> window(full.block_bytes(shape));
    full.quantize(shape, id, x.data(), window.data());

    std::vector<float> rounded(shape.values());
    full.dequantize(shape, id, window.data(), rounded.data());
    const auto rounded_before = rounded;
    std::vector<std::byte> expected(scheme.block_bytes(shape)), got(expected.size() + 64, std::byte{0xcd});
    const std::uint32_t not_finite = scheme.quantize(shape, id, rounded.data(), expected.data());

    std::vector<float> scratch(shape.values() + 16, 1e30f);
    const std::uint32_t counted = Backend::quantize(scheme, shape, id, kvq::float_type_of<Window>,
                                                    window.data(), got.data(), scratch.data());
    CHECK(counted == not_finite);
    check_written(expected, got, scratch, shape.values());

    // The same from float values.
    std::fill(got.begin(), got.end(), std::byte{0xcd});
    std::copy(rounded_before.begin(), rounded_before.end(), scratch.begin());
    const std::uint32_t of_values = Backend::quantize_values(scheme, shape, id, scratch.data(), got.data());
    CHECK(of_values == not_finite);
    check_written(expected, got, scratch, shape.values());
}

/// Equal bits; where both are NaN, equal payloads too.
template <class T>
int different(const std::vector<T>& a, const std::vector<T>& b) {
    int n = 0;
    for (std::size_t i = 0; i < a.size(); ++i) n += std::memcmp(&a[i], &b[i], sizeof(T)) != 0;
    return n;
}

/// Tokens from a backend, all or some of them, are what the scheme dequantizes, rounded once; gaps between
/// rows stay.
template <class Backend, class T, class S>
void check_tokens(generator& random, const S& scheme, const kvq::block_shape& shape,
                  const std::vector<std::byte>& block, kvq::block_id id = {}) {
    const int stride = shape.dim + random.between(0, 9);
    std::vector<T> expected(static_cast<std::size_t>(shape.tokens * stride + 8), T(-7.0f)), got = expected;
    const auto x = dequantized(scheme, shape, block, id);
    for (int t = 0; t < shape.tokens; ++t)
        for (int c = 0; c < shape.dim; ++c)
            expected[static_cast<std::size_t>(t * stride + c)] =
                T(x[static_cast<std::size_t>(t * shape.dim + c)]);
    std::vector<float> scratch(shape.values());
    Backend::dequantize(scheme, shape, id, block.data(), kvq::float_type_of<T>, got.data(), stride,
                        scratch.data());
    CHECK(different(expected, got) == 0);
    if constexpr (std::is_same_v<T, float>) {
        std::vector<std::int32_t> listed;
        for (int t = 0; t < shape.tokens; ++t)
            if (random.one_in(2)) listed.push_back(t);
        for (std::size_t i = 0; i < listed.size(); ++i)
            std::swap(listed[i], listed[static_cast<std::size_t>(random.between(0, static_cast<int>(i)))]);
        std::vector<float> rows(listed.size() * static_cast<std::size_t>(stride) + 8, -7.0f), wanted = rows;
        for (std::size_t i = 0; i < listed.size(); ++i)
            std::copy_n(x.begin() + std::ptrdiff_t{listed[i]} * shape.dim, shape.dim,
                        wanted.begin() + static_cast<std::ptrdiff_t>(i) * stride);
        scratch.resize(shape.values() + 4 * static_cast<std::size_t>(shape.dim) + 64);
        kvq::kernels::dequantize_tokens<Backend>(scheme, shape, id, block.data(), listed.data(),
                                                 static_cast<int>(listed.size()), rows.data(), stride,
                                                 scratch.data());
        CHECK(different(wanted, rows) == 0);
    }
}

}  // namespace test
