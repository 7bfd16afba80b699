// A server that reuses earlier results: requests with a common system prompt share its pages, and entries are
// stored in 4 bit while the engine computes in 16 bit. Token ids and K/V are made up; the measured bytes are
// real.
#include <cstdio>
#include <kvq/cpu/simd.hpp>
#include <kvq/kvq.hpp>
#include <kvq/policy/prefix_cache.hpp>
#include <string>
#include <vector>

namespace {

constexpr kvq::cache_shape shape{.layers = 4, .kv_heads = 2, .head_dim = 64};
constexpr std::size_t bytes_per_token =
    2 * sizeof(kvq::float16) * shape.layers * shape.kv_heads * shape.head_dim;

using tokens = std::vector<kvq::token_id>;

tokens text(int first, int count) {
    tokens t;
    for (int i = 0; i < count; ++i) t.push_back((first + i) * 7919 % 32000);
    return t;
}
tokens operator+(tokens a, const tokens& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

/// Replaces the model: K and V of one token and layer. Returns a row of kv_heads * head_dim values in [-1,
/// 1).
void compute(kvq::token_id token, int layer, unsigned what, float* row) {
    auto state =
        static_cast<std::uint32_t>(token) * 2654435761u + static_cast<unsigned>(layer) * 40503u + what;
    for (int c = 0; c < shape.kv_heads * shape.head_dim; ++c) {
        state = state * 1664525u + 1013904223u;
        row[c] = static_cast<float>(state >> 8) * 0x1p-23f - 1.0f;
    }
}

/// Computes the tokens that the sequence does not hold yet.
void prefill(kvq::sequence& sequence, const tokens& all) {
    const auto first = static_cast<std::size_t>(sequence.tokens());
    const int n = static_cast<int>(all.size() - first);
    const std::size_t width = shape.kv_heads * shape.head_dim;
    std::vector<float> k(static_cast<std::size_t>(n) * width), v(k.size());
    for (int layer = 0; layer < shape.layers; ++layer) {
        for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
            compute(all[first + i], layer, 0, &k[i * width]);
            compute(all[first + i], layer, 1, &v[i * width]);
        }
        sequence.append(layer, kvq::token_view(k.data(), n, shape.kv_heads, shape.head_dim),
                        kvq::token_view(v.data(), n, shape.kv_heads, shape.head_dim));
    }
}

}  // namespace

int main() {
    // Format 0: the engine's. Format 1: that of stored entries.
    const kvq::format_list formats{kvq::make_format<kvq::full<kvq::float16>>(),
                                   kvq::make_format<kvq::affine<4>>()};
    kvq::cache cache(shape, {.keys = formats, .sinks = 4, .recent = 32, .rollback = 0});
    kvq::prefix_cache store(cache,
                            {.byte_limit = 5u << 19, .format = kvq::layer_format{.key = 1, .value = 1}});

    const tokens system = text(0, 1000), tools = text(5000, 600);
    const tokens hello = system + text(10000, 40), weather = system + text(11000, 80);
    const struct {
        const char* who;
        tokens prompt;
        int answer;  // tokens
    } requests[] = {
        {"Ann: hello", hello, 100},
        {"Bob: weather", weather, 150},
        {"Ann: goes on", hello + text(20000, 100) + text(12000, 60), 200},
        {"Bob: goes on", weather + text(21000, 150) + text(13000, 50), 120},
        {"Cem: hello", hello, 100},
        {"warm-up", system, 0},
        {"Dee: with tools", system + tools + text(14000, 30), 90},
        {"Eve: no system", text(15000, 400), 80},
        {"Fay: tiny", text(15000, 20), 10},
        {"Ann: edits", hello + text(20000, 100) + text(16000, 70), 180},
    };

    std::printf(
        "16 bit: %zu bytes per token; entries are stored in 4 bit, at most %zu KiB of them\n\n%-16s %7s  "
        "%-18s %7s %9s %9s %9s\n",
        bytes_per_token, store.options().byte_limit >> 10, "request", "prompt", "found", "reused",
        "store KiB", "pool KiB", "alone KiB");
    std::size_t alone = 0, asked = 0;
    std::vector<tokens> stored;
    int answer_id = 20000;
    for (const auto& r : requests) {
        auto [match, reused, sequence] = store.fetch(r.prompt);
        prefill(sequence, r.prompt);
        // After the answer, the whole conversation is stored.
        const tokens all = r.prompt + text(answer_id, r.answer);
        answer_id += 1000;
        prefill(sequence, all);
        store.store(all, sequence);
        sequence = cache.new_sequence();  // frees the sequence of the request
        // For comparison: the same entries in 16 bit, without sharing.
        stored.push_back(all);
        alone = 0;
        for (const tokens& t : stored)
            if (store.lookup(t).match == kvq::prefix_match::exact) alone += t.size() * bytes_per_token;
        asked += r.prompt.size();
        std::printf("%-16s %7zu  %-18s %7d %9zu %9zu %9zu\n", r.who, r.prompt.size(), kvq::name(match),
                    reused, store.bytes() >> 10, cache.bytes_in_use() >> 10, alone >> 10);
    }

    const kvq::prefix_cache_statistics s = store.statistics();
    std::printf(
        "\n%zu hits, %zu misses; %zu of %zu prompt tokens were not computed again; %zu entries, %zu "
        "replaced, %zu evicted\n",
        s.hits(), s.misses(), s.tokens_saved, asked, store.entries(), s.replaced, s.evictions);
    std::printf("%.1f times less memory than in 16 bit without sharing\n",
                static_cast<double>(alone) / static_cast<double>(cache.bytes_in_use()));
    return 0;
}
