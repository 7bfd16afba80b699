// Estimates the bytes of a cache and the longest context that fits, before anything is allocated: of a model
// with equal layers, and of one whose layers differ.
//
//   04_estimate_memory [TOKENS]
//
// TOKENS: the second model is also filled with so many tokens, to compare (131072: 3 GB and many minutes).
#include <cstdio>
#include <cstdlib>
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>
#include <kvq/schemes/presets.hpp>
#include <memory_resource>
#include <random>
#include <vector>

void show(const char* name, const kvq::format_pair& formats) {
    const kvq::cache_shape llama_3_8b{.layers = 32, .kv_heads = 8, .head_dim = 128};
    const kvq::cache cache(llama_3_8b,
                           {.keys = formats.keys, .values = formats.values, .sinks = 4, .recent = 64});
    const kvq::attention_use use{.q_heads = 32, .q_tokens = 1, .threads = 8};
    const kvq::footprint_report f = kvq::footprint(cache, 32768, 1, use);
    std::printf(
        "%-8s %8.1f MiB at 32768 tokens (%.1f quantized, %.1f window, %.2f bookkeeping, %.2f scratch)"
        "   longest context in 4 GiB: %d\n",
        name, static_cast<double>(f.total) / 1048576.0, static_cast<double>(f.quantized) / 1048576.0,
        static_cast<double>(f.window + f.rollback) / 1048576.0,
        static_cast<double>(f.bookkeeping) / 1048576.0,
        static_cast<double>(f.workspace + f.attention) / 1048576.0,
        kvq::longest_context(cache, std::size_t{4} << 30, 1, use));
}

// Gemma 4 31B: 50 layers with a window of 1024 tokens, 16 kv heads of 256; 10 of full attention, 4 kv heads
// of 512.
constexpr int window = 1024;
std::vector<kvq::layer> mixed_layers(bool windows) {
    std::vector<kvq::layer> model;
    for (int i = 0; i < 60; ++i) {
        const kvq::layer many{.kv_heads = 16, .head_dim = 256};
        if (i % 6 == 5)
            model.push_back(kvq::full_attention({.kv_heads = 4, .head_dim = 512}));
        else
            model.push_back(windows ? kvq::sliding_attention(window, many) : kvq::full_attention(many));
    }
    return model;
}

/// Counts the bytes that a cache holds.
class counted_memory : public std::pmr::memory_resource {
public:
    std::size_t bytes() const { return bytes_; }

private:
    void* do_allocate(std::size_t n, std::size_t alignment) override {
        void* const p = std::pmr::new_delete_resource()->allocate(n, alignment);
        bytes_ += n;
        return p;
    }
    void do_deallocate(void* p, std::size_t n, std::size_t alignment) override {
        bytes_ -= n;
        std::pmr::new_delete_resource()->deallocate(p, n, alignment);
    }
    bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

    std::size_t bytes_ = 0;
};

double gigabytes(double bytes) { return bytes / 1e9; }

void show_mixed(int filled) {
    const int tokens = 131072;
    const auto formats = kvq::make_formats<kvq::std4, kvq::scalar>();
    const kvq::cache cache(mixed_layers(true),
                           {.keys = formats.keys, .values = formats.values, .sinks = 4, .recent = 32});
    const double full_numbers = 10.0 * 2 * 4 * 512, window_numbers = 50.0 * 2 * 16 * 256;  // of a token
    const double in_16_bit = 2 * tokens * (full_numbers + window_numbers),
                 freed = 2 * (tokens * full_numbers + window * window_numbers),
                 // A page of the layers with full attention takes as many bytes as one of the others.
        fp8 = tokens * window_numbers / 5 + window * window_numbers,
                 std4 = static_cast<double>(kvq::footprint(cache, tokens).total);
    std::printf(
        "Gemma 4 31B, one sequence of %d tokens: 16 bit, all tokens in all layers, %.1f GB; 16 bit, windows "
        "freed, %.2f GB; FP8 in pages of one size, windows freed, %.2f GB; std4 %.3f GB (%.1f, %.2f and %.2f "
        "times fewer)\n",
        tokens, gigabytes(in_16_bit), gigabytes(freed), gigabytes(fp8), gigabytes(std4), in_16_bit / std4,
        freed / std4, fp8 / std4);
    if (filled <= 0) return;
    counted_memory memory;
    kvq::cache_options options = cache.options();
    options.memory = &memory;
    kvq::cache live(mixed_layers(true), options);
    auto sequence = live.new_sequence();
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const int chunk = 512;
    std::vector<float> rows(std::size_t{chunk} * 16 * 256);
    for (float& x : rows) x = normal(random);
    for (int begin = 0; begin < filled; begin += chunk)
        for (int layer = 0; layer < live.layer_count(); ++layer) {
            const kvq::cache_shape shape = live.shape(layer);
            const int n = filled - begin < chunk ? filled - begin : chunk;
            const auto view = kvq::token_view(rows.data(), n, shape.kv_heads, shape.head_dim);
            sequence.append(layer, view, view);
        }
    std::printf("%d tokens: %zu bytes estimated, %zu allocated\n", filled, kvq::footprint(live, filled).total,
                memory.bytes());
}

int main(int argc, char** argv) {
    show("fp16", kvq::make_formats<kvq::full<kvq::float16>, kvq::scalar>());
    show("int8", kvq::make_formats<kvq::int8, kvq::scalar>());
    show("affine-4", kvq::make_formats<kvq::affine<4>, kvq::scalar>());
    show("kivi-4", kvq::make_formats<kvq::kivi<4>, kvq::scalar>());
    show("kivi-2", kvq::make_formats<kvq::kivi<2>, kvq::scalar>());
    show_mixed(argc > 1 ? std::atoi(argv[1]) : 0);
    return 0;
}
