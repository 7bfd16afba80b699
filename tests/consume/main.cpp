// SPDX-License-Identifier: MIT
// A user of kvq, as small as it gets: the last token of a short text attends over a packed cache.
#include <cstdio>
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>
#include <vector>

#ifdef CONSUME_SIMD
#include <kvq/cpu/simd.hpp>
using backend = kvq::simd<>;
#else
using backend = kvq::scalar;
#endif
#ifdef CONSUME_EIGEN
#include <kvq/adapters/eigen.hpp>
#endif
#ifdef CONSUME_IO
#include <kvq/io/file.hpp>
#endif

int main() {
    constexpr int tokens = 100, heads = 2, dim = 64;
    using scheme = kvq::kivi<4, 32>;
    const auto formats = kvq::make_formats<scheme, backend>();
    kvq::cache cache({.layers = 1, .kv_heads = heads, .head_dim = dim},
                     {.keys = formats.keys, .values = formats.values});
    auto sequence = cache.new_sequence();

    const std::vector<float> ones(tokens * heads * dim, 1.0F);
    std::vector<float> out(heads * dim);
    sequence.append(0, kvq::token_view<const float>(ones.data(), tokens, heads, dim),
                    kvq::token_view<const float>(ones.data(), tokens, heads, dim));
    sequence.attend(0, kvq::token_view<const float>(ones.data(), 1, heads, dim),
                    kvq::token_view<float>(out.data(), 1, heads, dim));

    // Every value is 1, so every weighted mean of them is 1.
    for (float x : out)
        if (!(x > 0.99F && x < 1.01F)) {
            std::printf("expected 1, got %g\n", static_cast<double>(x));
            return 1;
        }
#ifdef CONSUME_IO
    std::size_t saved = 0;
    kvq::save(sequence, [&](const void*, std::size_t bytes) { saved += bytes; });
    if (saved <= cache.bytes_in_use() / 2) return 1;
#endif
    std::printf("kvq %d.%d.%d works\n", KVQ_VERSION_MAJOR, KVQ_VERSION_MINOR, KVQ_VERSION_PATCH);
    return 0;
}
