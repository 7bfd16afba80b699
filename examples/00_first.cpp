#include <cstdio>
#include <kvq/cpu/simd.hpp>
#include <kvq/kvq.hpp>
#include <kvq/schemes/presets.hpp>
#include <vector>

int main() {
    constexpr int layers = 2, kv_heads = 8, heads = 32, dim = 128, n = 500;
    kvq::cache cache({.layers = layers, .kv_heads = kv_heads, .head_dim = dim},
                     kvq::preset_options(kvq::make_formats<kvq::std4>()));
    std::vector<float> x(n * heads * dim, 0.5f), out(x.size());  // x stands for k, v and q of a model
    auto sequence = cache.new_sequence();
    for (int layer = 0; layer < layers; ++layer)  // out = softmax(q Kᵀ) V, on the codes
        sequence.prefill(layer, {x.data(), n, kv_heads, dim}, {x.data(), n, kv_heads, dim},
                         {x.data(), n, heads, dim}, {out.data(), n, heads, dim});
    std::printf("%zu bytes, in 16 bit %d\n", cache.bytes_in_use(), layers * n * kv_heads * dim * 4);
    sequence.trim(200);  // the first 200 tokens stay as they are
    return 0;
}
