// SPDX-License-Identifier: MIT
// Bytes of blocks against pinned ones.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <kvq/core/float_formats.hpp>
#include <kvq/core/shape.hpp>
#include <string>
#include <vector>

namespace test {

/// 45 tokens of 50 channels (neither fills its tiles), exact in every format: multiples of 1/16 in [-8, 8]
/// with two outlier channels, one constant and one zero token, one NaN and one infinity.
inline constexpr int golden_tokens = 45, golden_dim = 50;

inline std::vector<float> golden_input() {
    constexpr int tokens = golden_tokens, dim = golden_dim;
    std::vector<float> x;
    for (int t = 0; t < tokens; ++t)
        for (int c = 0; c < dim; ++c) {
            float v = static_cast<float>((37 * t + 101 * c + 13 * t * c) % 257 - 128) / 16.0f;
            if (c == 7 || c == 33) v *= 8.0f;
            if (t == 11) v = 2.5f;
            if (t == 12) v = 0.0f;
            x.push_back(v);
        }
    x[3 * dim + 5] = kvq::detail::bit_cast<float>(0x7fc00000u);
    x[20 * dim + 6] = kvq::detail::bit_cast<float>(0x7f800000u);
    return x;
}

struct golden {
    const char* name;
    char role;
    std::size_t bytes;
    std::uint64_t hash;  // FNV-1a
    const char* first;   // 16 bytes
};

inline std::uint64_t fnv1a(const std::vector<std::byte>& bytes) {
    std::uint64_t h = 0xcbf29ce484222325u;
    for (const std::byte b : bytes) h = (h ^ static_cast<std::uint64_t>(b)) * 0x100000001b3u;
    return h;
}
inline std::string hex(const std::vector<std::byte>& bytes, std::size_t n) {
    std::string text;
    for (std::size_t i = 0; i < n && i < bytes.size(); ++i) {
        char two[3];
        std::snprintf(two, sizeof two, "%02x", static_cast<unsigned>(bytes[i]));
        text += two;
    }
    return text;
}

template <class S>
std::vector<std::byte> block_of(const S& scheme, const kvq::block_shape& shape, std::vector<float> x) {
    std::vector<std::byte> block(scheme.block_bytes(shape), std::byte{0xcd});
    scheme.quantize(shape, {}, x.data(), block.data());
    return block;
}

/// Prints the line that belongs into the table (KVQ_PRINT_GOLDEN=1), or says whether it is there.
template <class S>
bool is_golden(const std::vector<golden>& table, const S& scheme, kvq::tensor role,
               const std::vector<float>& x) {
    const char letter = role == kvq::tensor::key ? 'K' : 'V';
    const auto block = block_of(scheme, {role, golden_tokens, golden_dim}, x);
    if (std::getenv("KVQ_PRINT_GOLDEN")) {
        std::printf("    {\"%s\", '%c', %zu, 0x%016llxu, \"%s\"},\n", scheme.name().c_str(), letter,
                    block.size(), static_cast<unsigned long long>(fnv1a(block)), hex(block, 16).c_str());
        return true;
    }
    for (const golden& g : table)
        if (scheme.name() == g.name && g.role == letter)
            return block.size() == g.bytes && hex(block, 16) == g.first && fnv1a(block) == g.hash;
    return false;
}

}  // namespace test
