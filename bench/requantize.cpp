// Requantizing a live cache: how much memory it takes beside the cache, and how fast it is against quantizing
// the same pages.
//
// The peak is measured by the memory resource that all pages and all scratch come from, not computed; the dry
// run stands beside it. `quantize` is the time of quantizing the same blocks into one buffer, the least that
// this work can take.
#include <CLI/CLI.hpp>
#include <chrono>
#include <kvq/core/thread_pool.hpp>
#include <kvq/cpu/simd.hpp>
#include <kvq/kvq.hpp>
#include <nlohmann/json.hpp>

#include "support.hpp"

namespace {

constexpr int widths[] = {16, 8, 4, 2};
kvq::format_list formats() {
    return {kvq::make_format<kvq::full<kvq::float16>>(), kvq::make_format<kvq::affine<8>>(),
            kvq::make_format<kvq::affine<4>>(), kvq::make_format<kvq::affine<2>>()};
}

/// Passes on and keeps the largest sum.
class peak_resource : public std::pmr::memory_resource {
public:
    std::size_t peak() const { return peak_; }
    std::size_t bytes() const { return bytes_; }
    void reset() { peak_ = bytes_.load(); }

private:
    void* do_allocate(std::size_t bytes, std::size_t alignment) override {
        void* const p = ::operator new(bytes, std::align_val_t(alignment));
        const std::size_t now = bytes_ += bytes;
        std::size_t peak = peak_;
        while (now > peak && !peak_.compare_exchange_weak(peak, now)) {
        }
        return p;
    }
    void do_deallocate(void* p, std::size_t bytes, std::size_t alignment) override {
        bytes_ -= bytes;
        ::operator delete(p, std::align_val_t(alignment));
    }
    bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
        return this == &other;
    }
    std::atomic<std::size_t> bytes_{0}, peak_{0};
};

double seconds_of(const std::function<void()>& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Quantizes every block of the cache's 16-bit pages into one buffer. format: 0-based in the list.
double quantize_seconds(const kvq::cache& cache, const kvq::sequence& s, int format, int threads) {
    const kvq::format& f = cache.options().keys[format];
    const kvq::cache_shape& shape = cache.shape();
    const kvq::thread_pool executor(threads);
    const kvq::block_shape block{kvq::tensor::key, cache.options().page_tokens, shape.head_dim};
    return seconds_of([&] {
        executor.parallel_for(threads, [&](int t) {
            std::vector<float> scratch(block.values());
            std::vector<std::byte> out(block.values() * 4);
            for (int layer = t; layer < shape.layers; layer += threads) {
                const kvq::layer_pages pages = s.pages(layer);
                for (int i = 0; i < pages.geometry.committed(pages.tokens); ++i)
                    for (const kvq::page* p : {pages.at(i).keys, pages.at(i).values}) {
                        const std::size_t bytes = p->bytes / static_cast<std::size_t>(shape.kv_heads);
                        // Values have blocks of their own shape.
                        kvq::block_shape own = block;
                        if (p != pages.at(i).keys) own.role = kvq::tensor::value;
                        for (int h = 0; h < shape.kv_heads; ++h)
                            f.functions().quantize(
                                f.scheme(), own, kvq::block_id{layer, h}, kvq::float_type::fp16,
                                p->data() + bytes * static_cast<std::size_t>(h), out.data(), scratch.data());
                        benchmark::DoNotOptimize(out.data());
                    }
            }
        });
    });
}

void fill(kvq::sequence& sequence, const kvq::cache_shape& shape, int tokens) {
    const int chunk = 1024;
    const auto x = bench::random_floats(
        static_cast<std::size_t>(chunk) * static_cast<std::size_t>(shape.kv_heads * shape.head_dim), 3);
    for (int n = 0; n < tokens; n += chunk)
        for (int layer = 0; layer < shape.layers; ++layer) {
            const kvq::token_view<const float> view(x.data(), std::min(chunk, tokens - n), shape.kv_heads,
                                                    shape.head_dim);
            sequence.append(layer, view, view);
        }
}

}  // namespace

int main(int argc, char** argv) {
    CLI::App app("Requantizing a live cache");
    kvq::cache_shape shape{32, 8, 128, 0};
    int tokens = 8192, page_tokens = 128, threads = 1;
    bool json = false;
    app.add_option("--layers", shape.layers)->capture_default_str();
    app.add_option("--kv-heads", shape.kv_heads)->capture_default_str();
    app.add_option("--head-dim", shape.head_dim)->capture_default_str();
    app.add_option("--tokens", tokens)->capture_default_str();
    app.add_option("--page-tokens", page_tokens)->capture_default_str();
    app.add_option("--threads", threads)->capture_default_str();
    app.add_flag("--json", json, "one JSON object a line");
    CLI11_PARSE(app, argc, argv);

    const std::size_t page = kvq::page_pool::allocation(
        static_cast<std::size_t>(page_tokens * shape.kv_heads * shape.head_dim) * 2);
    if (!json)
        std::printf(
            "%s, %d layers, %d kv heads, head_dim %d, %d tokens, pages of %zu bytes in 16 bit, %d thread(s)\n"
            "%-9s %11s %10s %10s %11s %9s %10s\n",
            kvq::simd<>::name(), shape.layers, shape.kv_heads, shape.head_dim, tokens, page, threads, "bits",
            "MiB before", "MiB after", "peak +pages", "planned", "Gvalues/s", "vs quantize");

    const std::vector<std::vector<int>> chains{{2}, {1, 2, 3}};
    for (const std::vector<int>& chain : chains) {
        peak_resource memory;
        kvq::cache cache(shape,
                         {.keys = formats(), .page_tokens = page_tokens, .rollback = 0, .memory = &memory});
        auto sequence = cache.new_sequence();
        fill(sequence, shape, tokens);
        double quantize[4] = {};
        for (const int format : chain) quantize[format] = quantize_seconds(cache, sequence, format, threads);
        int from = 0;
        for (const int format : chain) {
            const kvq::requantize_request request{.key = format, .value = format};
            const auto planned = cache.plan_requantize(sequence, request, threads);
            kvq::workspace space(&memory);
            memory.reset();
            const std::size_t before = memory.bytes();
            kvq::sequence* const one = &sequence;
            kvq::requantize_report done;
            const double seconds = seconds_of([&] {
                done = cache.requantize(std::span(&one, 1), request, {}, kvq::thread_pool(threads), space);
            });
            // Above the pages that there were, in 16-bit pages; and what the dry run said of it.
            const double peak = (static_cast<double>(memory.peak()) - static_cast<double>(before)) /
                                static_cast<double>(page);
            const double plan =
                static_cast<double>(planned.bytes_peak + planned.workspace - planned.bytes_before) /
                static_cast<double>(page);
            const double values = 2.0 * tokens * shape.layers * shape.kv_heads * shape.head_dim;
            const std::string name = std::to_string(widths[from]) + " -> " + std::to_string(widths[format]);
            if (json) {
                const nlohmann::json line{{"step", name},
                                          {"threads", threads},
                                          {"bytes_before", done.bytes_before},
                                          {"bytes_after", done.bytes_after},
                                          {"peak_pages", peak},
                                          {"planned_peak_pages", plan},
                                          {"seconds", seconds},
                                          {"values_per_ns", values / seconds * 1e-9},
                                          {"vs_quantize", quantize[format] / seconds}};
                std::printf("%s\n", line.dump().c_str());
            } else {
                std::printf("%-9s %11.1f %10.1f %11.3f %10.3f %9.2f %9.2fx\n", name.c_str(),
                            static_cast<double>(done.bytes_before) / 0x1p20,
                            static_cast<double>(done.bytes_after) / 0x1p20, peak, plan,
                            values / seconds * 1e-9, quantize[format] / seconds);
            }
            std::fflush(stdout);
            from = format;
        }
    }
}
