// SPDX-License-Identifier: MIT
// What the scenarios in C++ share with scenario.c: shapes, inputs and the hash of outputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

constexpr int layers = 2, kv_heads = 2, q_heads = 4, dim = 64, chunk = 100;

inline std::uint64_t hash = 14695981039346656037u;
inline void add_to_hash(const std::vector<float>& x) {
    const auto* const bytes = reinterpret_cast<const unsigned char*>(x.data());
    for (std::size_t i = 0; i < x.size() * sizeof(float); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
}

/// Values of n tokens, made from their number.
inline std::vector<float> values(int n, int heads) {
    static std::uint32_t made = 0;
    std::vector<float> x(static_cast<std::size_t>(n * heads * dim));
    for (float& y : x) y = static_cast<float>((made++ * 2654435761u) >> 8) / 8388608.0f - 1.0f;
    return x;
}
