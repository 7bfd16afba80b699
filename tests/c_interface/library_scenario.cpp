// SPDX-License-Identifier: MIT
// scenario.c in C++, on kvq/library.hpp: the same arguments, the same hash, the same file.
#include <cstdio>
#include <kvq/library.hpp>
#include <vector>

#include "scenario.hpp"

namespace {

namespace library = kvq::library;

void step(library::sequence& s, int n) {
    for (int layer = 0; layer < layers; ++layer) {
        const auto k = values(n, kv_heads), v = values(n, kv_heads), q = values(n, q_heads);
        std::vector<float> out(q.size());
        s.prefill(layer, library::input(k.data(), n, kv_heads, dim),
                  library::input(v.data(), n, kv_heads, dim), library::input(q.data(), n, q_heads, dim),
                  library::output(out.data(), n, q_heads, dim));
        add_to_hash(out);
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) return 2;
    library::cache_options options;
    options.layers = layers;
    options.kv_heads = kv_heads;
    options.head_dim = dim;
    options.keys = argv[1];
    options.values = argv[2];
    library::cache cache(options);
    auto s = cache.new_sequence();
    for (int i = 0; i < 3; ++i) step(s, chunk);
    for (int i = 0; i < 40; ++i) step(s, 1);
    s.trim(330);
    auto fork = s.fork();
    step(fork, 5);
    s.save_file(argv[3]);
    auto restored = cache.restore_file(argv[3]);
    step(restored, 3);
    step(s, 3);
    std::printf("%s %s: outputs %016llx\n", argv[1], argv[2], static_cast<unsigned long long>(hash));
}
