// Conversations that wait leave memory for files, and come back when the next question comes: a prefix cache
// over two tiers.
#include <cstdio>
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>
#include <kvq/policy/prefix_tiers.hpp>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int layers = 2, kv_heads = 2, dim = 64, people = 6;
constexpr const char* tiers[] = {"nothing", "memory", "a file"};
using tokens = std::vector<kvq::token_id>;

/// Stands for the model: computes K and V of the tokens that the sequence lacks.
void prefill(kvq::sequence& sequence, const tokens& text) {
    const int first = sequence.tokens(), n = static_cast<int>(text.size()) - first;
    std::vector<float> x(static_cast<std::size_t>(n) * kv_heads * dim);
    for (int t = 0; t < n; ++t) {
        std::minstd_rand random(static_cast<unsigned>(text[static_cast<std::size_t>(first + t)]) + 1);
        for (int i = 0; i < kv_heads * dim; ++i)
            x[static_cast<std::size_t>(t * kv_heads * dim + i)] =
                static_cast<float>(random() % 2000) / 1000.0F - 1.0F;
    }
    for (int layer = 0; layer < layers; ++layer)
        sequence.append(layer, {x.data(), n, kv_heads, dim}, {x.data(), n, kv_heads, dim});
}

}  // namespace

int main() {
    const kvq::format_pair four_bit = kvq::make_formats<kvq::kivi<4, 64>, kvq::scalar>();
    kvq::cache cache({.layers = layers, .kv_heads = kv_heads, .head_dim = dim},
                     {.keys = four_bit.keys, .values = four_bit.values, .sinks = 4, .recent = 64});
    kvq::prefix_tiers store(cache, {.memory = {.byte_limit = 1 << 20},
                                    .folder = ".",
                                    .file_bytes = 3 << 20,
                                    .model = "example-model-7"});

    tokens texts[people];
    int reused = 0, asked = 0;
    for (int round = 0; round < 3; ++round)
        for (int who = 0; who < people; ++who) {
            tokens& text = texts[who];
            for (int i = 0; i < 600; ++i) text.push_back(1000 * who + static_cast<int>(text.size()));
            auto [match, n, sequence, tier] = store.fetch(text);
            std::printf("round %d, person %d: %4d of %4zu tokens from %s\n", round, who, n, text.size(),
                        tiers[static_cast<int>(tier)]);
            reused += n;
            asked += static_cast<int>(text.size());
            prefill(sequence, text);
            store.store(text, sequence);
        }
    const auto now = store.statistics();
    std::printf(
        "%d of %d tokens were not computed again; memory %zu KiB, %zu files of %zu KiB; %zu written, %zu "
        "read, %zu failed\n",
        reused, asked, store.memory().bytes() >> 10, now.files, now.file_bytes >> 10, now.written, now.read,
        now.failed);
    return now.read > 0 && now.failed == 0 ? 0 : 1;
}
