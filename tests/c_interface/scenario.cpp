// SPDX-License-Identifier: MIT
// scenario.c in C++, on the headers: the same arguments, the same hash, the same file.
#include <cstdio>
#include <cstdlib>
#include <kvq/format/find_format.hpp>
#include <kvq/io/file.hpp>
#include <kvq/kvq.hpp>
#include <vector>

namespace {

constexpr int layers = 2, kv_heads = 2, q_heads = 4, dim = 64, chunk = 100, prompt = 300, decode = 40;

std::uint64_t hash = 14695981039346656037u;
void add_to_hash(const std::vector<float>& x) {
    const auto* const bytes = reinterpret_cast<const unsigned char*>(x.data());
    for (std::size_t i = 0; i < x.size() * sizeof(float); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
}

float value(std::uint32_t layer, std::uint32_t role, std::uint32_t token, std::uint32_t i) {
    std::uint32_t h = (((token * layers + layer) * 3 + role) * 256 + i) * 2654435761u;
    h = (h ^ (h >> 15)) * 2246822519u;
    h ^= h >> 13;
    return static_cast<float>(h >> 8) / 8388608.0f - 1.0f;
}

std::vector<float> values(int layer, int role, int first, int n, int heads) {
    std::vector<float> x;
    for (int t = 0; t < n; ++t)
        for (int i = 0; i < heads * dim; ++i)
            x.push_back(value(static_cast<std::uint32_t>(layer), static_cast<std::uint32_t>(role),
                              static_cast<std::uint32_t>(first + t), static_cast<std::uint32_t>(i)));
    return x;
}

void step(kvq::sequence& s, int n) {
    const int first = s.tokens();
    for (int layer = 0; layer < layers; ++layer) {
        const auto k = values(layer, 0, first, n, kv_heads), v = values(layer, 1, first, n, kv_heads),
                   q = values(layer, 2, first, n, q_heads);
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
    for (int i = 0; i < prompt; i += chunk) step(s, chunk);
    for (int i = 0; i < decode; ++i) step(s, 1);
    s.trim(prompt + 30);
    auto fork = s.fork();
    for (int i = 0; i < 5; ++i) step(fork, 1);
    kvq::save(s, argv[3], {.model = "scenario"});
    auto restored = kvq::restore(cache, std::string(argv[3]), {.model = "scenario"});
    step(restored, 3);
    step(s, 3);
    std::printf("%s %s: outputs %016llx\n", argv[1], argv[2], static_cast<unsigned long long>(hash));
}
