// SPDX-License-Identifier: MIT
// scenario.c in C++, on the headers: the same arguments, the same hash, the same file.
#include <cstdio>
#include <kvq/format/find_format.hpp>
#include <kvq/io/file.hpp>
#include <kvq/kvq.hpp>
#include <vector>

#include "scenario.hpp"

namespace {

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
