// A 4-bit cache: a prompt, decode steps, a draft that is rolled back, a fork.
#include <algorithm>
#include <cstdio>
#include <kvq/cpu/simd.hpp>
#include <kvq/kvq.hpp>
#include <random>
#include <vector>

int main() {
    constexpr int layers = 2, kv_heads = 2, q_heads = 8, dim = 64, tokens = 1000;
    using keys = kvq::affine<4, kvq::per_channel<64>>;  // KIVI keys
    using values = kvq::affine<4, kvq::per_token<64>>;  // KIVI values
    kvq::cache cache(
        {.layers = layers, .kv_heads = kv_heads, .head_dim = dim},
        {.keys = kvq::make_format<keys>(), .values = kvq::make_format<values>(), .sinks = 4, .recent = 64});

    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> k(tokens * kv_heads * dim), v(k.size()), q(tokens * q_heads * dim), out(q.size());
    for (auto* x : {&k, &v, &q})
        for (float& f : *x) f = normal(random);

    auto sequence = cache.new_sequence();
    // One call for each layer of a step: a chunk of the prompt, later a token. Attention reads the chunk in
    // 16 bit.
    const auto step = [&](int first, int count) {
        for (int layer = 0; layer < layers; ++layer) {
            const auto all = [&](std::vector<float>& x, int heads) {
                return kvq::token_view(x.data(), tokens, heads, dim).slice(first, count);
            };
            sequence.prefill(layer, all(k, kv_heads), all(v, kv_heads), all(q, q_heads), all(out, q_heads));
        }
    };
    const int prompt = 900, chunk = 512;
    for (int first = 0; first < prompt; first += chunk) step(first, std::min(chunk, prompt - first));
    for (int token = prompt; token < tokens; ++token) step(token, 1);
    std::printf("%d tokens in %zu bytes (16 bit: %zu); out[0] = %f\n", sequence.tokens(),
                sequence.usage().bytes, 2 * 2 * k.size() * layers, static_cast<double>(out[0]));

    // Speculative decoding: draft five tokens, accept two.
    auto other = sequence.fork();  // shares every page
    for (int layer = 0; layer < layers; ++layer)
        other.append(layer, kvq::token_view(k.data(), 5, kv_heads, dim),
                     kvq::token_view(v.data(), 5, kv_heads, dim));
    other.trim(tokens + 2);
    std::printf("fork has %d tokens; both together hold %zu bytes\n", other.tokens(), cache.bytes_in_use());

    try {
        other.trim(5000);
    } catch (const kvq::error& e) {
        std::printf("%s\n", e.what());
    }
    return 0;
}
