#include <cstdio>
#include <kvq/cpu/simd.hpp>
#include <kvq/kvq.hpp>
#include <kvq/schemes/presets.hpp>
#include <vector>

int main() {
    constexpr int layers = 2, kv_heads = 8, heads = 32, dim = 128, n = 500;
    kvq::cache cache({.layers = layers, .kv_heads = kv_heads, .head_dim = dim},
                     kvq::preset_options(kvq::make_formats<kvq::std4>()));
    std::vector<float> x(n * heads * dim), out(x.size());  // x stands for k, v and q of a model
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 37 % 101) / 50.0f - 1.0f;
    auto sequence = cache.new_sequence();
    for (int layer = 0; layer < layers; ++layer)  // out = softmax(q Kᵀ) V, on the codes
        sequence.prefill(layer, {x.data(), n, kv_heads, dim}, {x.data() + 7, n, kv_heads, dim},
                         {x.data(), n, heads, dim}, {out.data(), n, heads, dim});
    auto other = sequence.fork();  // shares every page, copies on write
    sequence.trim(200);            // what stays keeps its codes
    std::printf("%d and %d tokens in %zu bytes, 16 bit: %d\n", sequence.tokens(), other.tokens(),
                cache.bytes_in_use(), layers * n * kv_heads * dim * 4);
    return 0;
}
