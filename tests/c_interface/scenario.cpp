// SPDX-License-Identifier: MIT
// scenario.c in C++, on the headers: the same arguments, the same hash, the same file.
#include <cstdio>
#include <kvq/format/find_format.hpp>
#include <kvq/io/file.hpp>
#include <kvq/kvq.hpp>
#include <vector>

namespace {

constexpr int layers = 2, kv_heads = 2, q_heads = 4, dim = 64, chunk = 100;

std::uint64_t hash = 14695981039346656037u;
void add_to_hash(const std::vector<float>& x) {
    const auto* const bytes = reinterpret_cast<const unsigned char*>(x.data());
    for (std::size_t i = 0; i < x.size() * sizeof(float); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
}

/// Values of n tokens, made from their number.
std::vector<float> values(int n, int heads) {
    static std::uint32_t made = 0;
    std::vector<float> x(static_cast<std::size_t>(n * heads * dim));
    for (float& y : x) y = static_cast<float>((made++ * 2654435761u) >> 8) / 8388608.0f - 1.0f;
    return x;
}

void step(kvq::sequence& s, int n) {
    for (int layer = 0; layer < layers; ++layer) {
        const auto k = values(n, kv_heads), v = values(n, kv_heads), q = values(n, q_heads);
        std::vector<float> out(q.size());
        s.prefill(layer, kvq::token_view(k.data(), n, kv_heads, dim),
                  kvq::token_view(v.data(), n, kv_heads, dim), kvq::token_view(q.data(), n, q_heads, dim),
                  kvq::token_view(out.data(), n, q_heads, dim));
        add_to_hash(out);
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) return 2;
    kvq::cache cache({.layers = layers, .kv_heads = kv_heads, .head_dim = dim},
                     kvq::preset_options({kvq::find_format(argv[1], kvq::tensor::key),
                                          kvq::find_format(argv[2], kvq::tensor::value)}));
    auto s = cache.new_sequence();
    for (int i = 0; i < 3; ++i) step(s, chunk);
    for (int i = 0; i < 40; ++i) step(s, 1);
    s.trim(330);
    auto fork = s.fork();
    step(fork, 5);
    kvq::save(s, argv[3]);
    auto restored = kvq::restore(cache, std::string(argv[3]));
    step(restored, 3);
    step(s, 3);
    std::printf("%s %s: outputs %016llx\n", argv[1], argv[2], static_cast<unsigned long long>(hash));
}
