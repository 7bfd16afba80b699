// Latent attention (MLA, as in DeepSeek V3): a prompt and decode steps over a cache of latents in 4 bits,
// beside attention in double over the keys and values of all heads, which a program need not make.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <kvq/attention/score_modifiers.hpp>
#include <kvq/cpu/simd.hpp>
#include <kvq/kvq.hpp>
#include <random>
#include <vector>

namespace {

// DeepSeek V3: 128 heads, 128 + 64 channels of a query, 512 latent channels.
constexpr int heads = 8, nope = 32, rotary = 16, latent = 128, tokens = 700;
constexpr int channels = latent + rotary;

using numbers = std::vector<float>;

/// The part of a layer that makes queries, latents and outputs.
struct weights {
    numbers up_keys, up_values;  // [heads][nope][latent]: a head's key and value are these times a latent

    /// A query [nope | rotary] of a head as one of latents: [up_keys^T nope | rotary].
    void absorb(const float* query, int head, float* to) const {
        const float* const up = up_keys.data() + head * nope * latent;
        std::fill_n(to, latent, 0.0f);
        for (int i = 0; i < nope; ++i)
            for (int c = 0; c < latent; ++c) to[c] += up[i * latent + c] * query[i];
        std::copy_n(query + nope, rotary, to + latent);
    }
    /// The output of a head: up_values times the sum of latents.
    void expand(const float* sum, int head, float* to) const {
        const float* const up = up_values.data() + head * nope * latent;
        for (int i = 0; i < nope; ++i) {
            to[i] = 0.0f;
            for (int c = 0; c < latent; ++c) to[i] += up[i * latent + c] * sum[c];
        }
    }
};

/// The output of the last token of a head, from all keys and values, in double.
void reference(const weights& w, const numbers& latents, const float* query, int head, double* out) {
    std::vector<double> scores(tokens);
    double largest = -1e30, sum = 0.0;
    for (int t = 0; t < tokens; ++t) {
        const float* const x = latents.data() + t * channels;
        double score = 0.0;
        for (int i = 0; i < nope; ++i) {
            double key = 0.0;
            for (int c = 0; c < latent; ++c)
                key += static_cast<double>(w.up_keys[(head * nope + i) * latent + c] * x[c]);
            score += key * static_cast<double>(query[i]);
        }
        for (int c = 0; c < rotary; ++c) score += static_cast<double>(query[nope + c] * x[latent + c]);
        scores[t] = score / std::sqrt(nope + rotary);
        largest = std::max(largest, scores[t]);
    }
    for (double& s : scores) sum += s = std::exp(s - largest);
    for (int i = 0; i < nope; ++i) {
        out[i] = 0.0;
        for (int t = 0; t < tokens; ++t)
            for (int c = 0; c < latent; ++c)
                out[i] += scores[t] / sum *
                          static_cast<double>(w.up_values[(head * nope + i) * latent + c] *
                                              latents[t * channels + c]);
    }
}

}  // namespace

int main() {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const auto make = [&](int n, float size) {
        numbers x(static_cast<std::size_t>(n));
        for (float& f : x) f = size * normal(random);
        return x;
    };
    const weights w{make(heads * nope * latent, 0.1f), make(heads * nope * latent, 0.1f)};
    numbers latents =
        make(tokens * channels, 1.0f);  // normed, and rotated behind the first `latent` channels
    const numbers queries = make(tokens * heads * (nope + rotary), 1.0f);

    // 4 bits for the latent channels, 16 for the last ones. By name: find_format("std4-fp16x16",
    // tensor::key).
    kvq::cache_options options;
    options.keys = kvq::with_fp16_channels(kvq::make_format<kvq::affine<4, kvq::per_channel<64>>>(), rotary);
    options.sinks = 4;
    options.recent = 32;
    kvq::cache cache({kvq::latent_attention(latent, rotary)}, options);
    auto sequence = cache.new_sequence();

    numbers q(tokens * heads * channels), sums(tokens * heads * latent);
    for (int row = 0; row < tokens * heads; ++row)
        w.absorb(queries.data() + row * (nope + rotary), row % heads, q.data() + row * channels);
    // The scale of the model: its heads have nope + rotary channels.
    const kvq::score_scale scale{1.0f / std::sqrt(static_cast<float>(nope + rotary))};
    kvq::workspace space;
    const auto step = [&](int first, int count) {
        const kvq::token_view k(latents.data() + first * channels, count, 1, channels);
        const kvq::token_view rows(q.data() + first * heads * channels, count, heads, channels);
        const kvq::token_view out(sums.data() + first * heads * latent, count, heads, latent);
        sequence.prefill(0, k, kvq::no_rows(), rows, out, scale, kvq::serial_executor{}, space);
    };
    const int prompt = 650, chunk = 256;
    for (int first = 0; first < prompt; first += chunk) step(first, std::min(chunk, prompt - first));
    for (int token = prompt; token < tokens; ++token) step(token, 1);

    double difference = 0.0, norm = 0.0;
    for (int head = 0; head < heads; ++head) {
        const int row = (tokens - 1) * heads + head;
        float out[nope];
        double want[nope];
        w.expand(sums.data() + row * latent, head, out);
        reference(w, latents, queries.data() + row * (nope + rotary), head, want);
        for (int i = 0; i < nope; ++i) {
            const double d = static_cast<double>(out[i]) - want[i];
            difference += d * d;
            norm += want[i] * want[i];
        }
    }
    const double error = std::sqrt(difference / norm);
    std::printf("%d tokens in %zu bytes; keys and values of all heads in 16 bits would take %d\n",
                sequence.tokens(), sequence.usage().bytes, 2 * tokens * heads * (2 * nope + rotary));
    std::printf("outputs are off by %.1f %%\n", 100.0 * error);
    return error < 0.12 ? 0 : 1;
}
