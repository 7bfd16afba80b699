// The node of adapters/ggml.hpp beside ggml's own attention, in graphs of ggml in one process: one layer,
// decode and prefill.
//
// ggml     attention alone, over a cache as llama.cpp lays it out: f16 without flash attention (V
//          transposed), and f16, q8_0 and q4_0 with it
// kvq      storing the new tokens, attention, and quantizing pages that fall behind the recent window
// step     what begin() and end() take beside the node, once per step of all layers
//
// All of them run in turns. Medians, and the least times, to which other work of the machine has added least.
// On one thread CPU time is measured, so that such work counts less; on several, real time, which it makes
// longer and uncertain.
#if !defined(KVQ_BENCH_GGML)
#include <cstdio>
int main() {
    std::puts("bench_ggml_node: built without ggml; CMake finds it with CMAKE_PREFIX_PATH");
    return 77;
}
#else
#include <time.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <functional>
#include <kvq/adapters/ggml.hpp>
#include <kvq/cache/preset_options.hpp>
#include <kvq/cpu/simd.hpp>
#include <kvq/estimate/footprint.hpp>
#include <kvq/schemes/int8.hpp>
#include <kvq/schemes/kivi.hpp>
#include <kvq/schemes/presets.hpp>
#include <nlohmann/json.hpp>

#include "ggml_attention.hpp"
#include "support.hpp"

namespace {

struct settings {
    int q_heads = 32, kv_heads = 8, head_dim = 128;
    std::vector<int> threads{1, 2};
    std::vector<std::string> cases{"1x4096", "1x16384", "512x4096"};
    int rounds = 15;
    bool json = false;
};

double now_ms(int threads) {
    timespec t{};
    clock_gettime(threads == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return 1e3 * static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_nsec);
}

template <auto Free>
struct freed_by {
    template <class T>
    void operator()(T* p) const {
        Free(p);
    }
};

/// A graph of one node over a sequence that has `tokens` tokens after each step of n.
class kvq_graph {
public:
    kvq_graph(const kvq::format_pair& formats, const settings& s, int n, int tokens, int threads)
        : cache_({1, s.kv_heads, s.head_dim}, options(formats, s, tokens)),
          memory_(cache_, 1),
          s_(s),
          n_(n),
          before_(tokens - n),
          threads_(threads),
          backend_(ggml_backend_cpu_init()),
          context_(ggml_init({16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true})) {
        ggml_backend_cpu_set_n_threads(backend_.get(), threads);
        ggml_threadpool_params params = ggml_threadpool_params_default(threads);
        pool_.reset(ggml_threadpool_new(&params));
        ggml_backend_cpu_set_threadpool(backend_.get(), pool_.get());
        prompt();
        ggml_context* const c = context_.get();
        ggml_tensor *q = ggml_new_tensor_3d(c, GGML_TYPE_F32, s.head_dim, s.q_heads, n),
                    *k = ggml_new_tensor_3d(c, GGML_TYPE_F32, s.head_dim, s.kv_heads, n),
                    *v = ggml_new_tensor_3d(c, GGML_TYPE_F32, s.head_dim, s.kv_heads, n);
        ggml_tensor* const out = memory_.attend(c, 0, q, k, v);
        graph_ = ggml_new_graph(c);
        ggml_build_forward_expand(graph_, out);
        buffer_.reset(ggml_backend_alloc_ctx_tensors(c, backend_.get()));
        if (!buffer_) throw std::runtime_error("ggml finds no memory");
        for (ggml_tensor* t : {q, k, v}) {
            const std::vector<float> x = bench::random_floats(static_cast<std::size_t>(ggml_nelements(t)), 3);
            ggml_backend_tensor_set(t, x.data(), 0, ggml_nbytes(t));
        }
    }

    /// Returns milliseconds of the graph; those of begin() and end() are added to `beside`.
    double run(double& beside) {
        const double first = now_ms(threads_);
        memory_.begin(batch(before_, n_), s_.q_heads, threads_);
        const double begun = now_ms(threads_);
        if (ggml_backend_graph_compute(backend_.get(), graph_) != GGML_STATUS_SUCCESS)
            throw std::runtime_error("ggml does not compute");
        const double computed = now_ms(threads_);
        memory_.end();
        beside += begun - first + now_ms(threads_) - computed;
        memory_.sequences().remove(0, before_, -1);
        return computed - begun;
    }
    std::size_t bytes() const { return cache_.bytes_in_use(); }

private:
    /// All pages lie in one allocation, as ggml's tensors do.
    static kvq::cache_options options(const kvq::format_pair& formats, const settings& s, int tokens) {
        kvq::cache_options o = kvq::preset_options();
        o.keys = formats.keys;
        o.values = formats.values;
        const kvq::cache same({1, s.kv_heads, s.head_dim}, o);
        const kvq::footprint_report f = kvq::footprint(same, tokens, 1, {.chunk = 512});
        o.byte_budget = f.total + f.total / 4 + 4 * f.transient;  // free ranges between pages
        o.preallocate = true;
        return o;
    }
    kvq::token_batch batch(int first, int n) {
        static const std::int32_t id = 0;
        positions_.clear();
        for (int i = 0; i < n; ++i) positions_.push_back(first + i);
        ids_.assign(static_cast<std::size_t>(n), &id);
        return {n, positions_.data(), nullptr, ids_.data()};
    }
    void prompt() {
        kvq::workspace space;
        const std::vector<float> x =
            bench::random_floats(static_cast<std::size_t>(512 * s_.kv_heads * s_.head_dim), 1);
        std::vector<float> out(static_cast<std::size_t>(512 * s_.kv_heads * s_.head_dim));
        for (int done = 0; done < before_; done += 512) {
            const int n = std::min(512, before_ - done);
            const kvq::token_view<const float> rows(x.data(), n, s_.kv_heads, s_.head_dim);
            // The fewest query heads: what they give does not matter.
            memory_.sequences().begin(batch(done, n), s_.kv_heads, 1, space);
            memory_.sequences().prefill(0, rows, rows, rows,
                                        kvq::token_view<float>(out.data(), n, s_.kv_heads, s_.head_dim),
                                        kvq::sliding_window{1}, kvq::serial_executor{}, space);
            memory_.sequences().end();
        }
    }

    kvq::cache cache_;
    kvq::ggml_memory memory_;
    settings s_;
    int n_, before_, threads_;
    std::unique_ptr<ggml_backend, freed_by<ggml_backend_free>> backend_;
    std::unique_ptr<ggml_context, freed_by<ggml_free>> context_;
    std::unique_ptr<ggml_threadpool, freed_by<ggml_threadpool_free>> pool_;
    std::unique_ptr<ggml_backend_buffer, freed_by<ggml_backend_buffer_free>> buffer_;
    ggml_cgraph* graph_ = nullptr;
    std::vector<std::int32_t> positions_;
    std::vector<const std::int32_t*> ids_;
};

double median(std::vector<double> x) {
    std::nth_element(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2), x.end());
    return x[x.size() / 2];
}

struct row {
    std::string name;
    bool ggml;
    std::function<double(double&)> run;
    std::size_t bytes;
    std::vector<double> ms{}, beside{};
};

void measure(const settings& s, int n, int tokens, int threads) {
    std::vector<row> rows;
    const auto count = [&](int t, int h) { return static_cast<std::size_t>(t * h * s.head_dim); };
    const auto add_ggml = [&](const char* name, bench::ggml_path path, ggml_type type) {
        const auto of = std::make_shared<bench::ggml_attention>(path, type, n, s.q_heads, s.kv_heads,
                                                                s.head_dim, tokens, threads);
        std::vector<float> k = bench::random_floats(count(tokens, s.kv_heads), 1),
                           v = bench::random_floats(count(tokens, s.kv_heads), 2);
        of->fill(bench::random_floats(count(n, s.q_heads), 3), k, v);
        rows.push_back({name, true,
                        [of, threads](double&) {
                            const double first = now_ms(threads);
                            of->run();
                            return now_ms(threads) - first;
                        },
                        of->cache_bytes()});
    };
    add_ggml("ggml f16, no flash", bench::ggml_path::no_flash, GGML_TYPE_F16);
    add_ggml("ggml f16", bench::ggml_path::token_major, GGML_TYPE_F16);
    add_ggml("ggml q8_0", bench::ggml_path::token_major, GGML_TYPE_Q8_0);
    add_ggml("ggml q4_0", bench::ggml_path::token_major, GGML_TYPE_Q4_0);
    const auto add_kvq = [&](const char* name, const kvq::format_pair& formats) {
        const auto of = std::make_shared<kvq_graph>(formats, s, n, tokens, threads);
        rows.push_back({name, false, [of](double& beside) { return of->run(beside); }, of->bytes()});
    };
    add_kvq("kvq fp16", kvq::make_formats<kvq::full<kvq::float16>>());
    add_kvq("kvq int8", kvq::make_formats<kvq::int8>());
    add_kvq("kvq kivi-4-g64", kvq::make_formats<kvq::kivi<4, 64>>());
    add_kvq("kvq std4", kvq::make_formats<kvq::std4>());
    for (int round = -2; round < s.rounds; ++round)
        for (row& r : rows) {
            double beside = 0.0;
            const double ms = r.run(beside);
            if (round < 0) continue;
            r.ms.push_back(ms);
            r.beside.push_back(beside);
        }
    const auto least = [](const row& r) { return *std::min_element(r.ms.begin(), r.ms.end()); };
    const double f16 = std::min(median(rows[0].ms), median(rows[1].ms)), q4 = median(rows[3].ms),
                 least_f16 = std::min(least(rows[0]), least(rows[1])), least_q4 = least(rows[3]);
    if (!s.json) {
        std::printf(
            "\n%d x %d tokens, %d/%d heads of %d channels, %d thread%s, %s time, median and least of %d\n", n,
            tokens, s.q_heads, s.kv_heads, s.head_dim, threads, threads == 1 ? "" : "s",
            threads == 1 ? "CPU" : "real", s.rounds);
        std::printf("%-20s %9s %10s %10s %9s %10s %10s %9s %9s\n", "", "ms", "best f16/", "q4_0/", "least",
                    "best f16/", "q4_0/", "step, ms", "MB");
    }
    for (const row& r : rows) {
        const double ms = median(r.ms), low = least(r), beside = median(r.beside);
        if (s.json)
            std::printf("%s\n", nlohmann::json{{"name", r.name},
                                               {"query_tokens", n},
                                               {"tokens", tokens},
                                               {"threads", threads},
                                               {"ms", ms},
                                               {"times_best_f16", f16 / ms},
                                               {"times_q4_0", q4 / ms},
                                               {"least_ms", low},
                                               {"least_times_best_f16", least_f16 / low},
                                               {"least_times_q4_0", least_q4 / low},
                                               {"step_ms", beside},
                                               {"cache_bytes", r.bytes}}
                                    .dump()
                                    .c_str());
        else
            std::printf("%-20s %9.3f %9.2fx %9.2fx %9.3f %9.2fx %9.2fx %9.3f %9.2f\n", r.name.c_str(), ms,
                        f16 / ms, q4 / ms, low, least_f16 / low, least_q4 / low, beside,
                        static_cast<double>(r.bytes) / 1e6);
    }
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    settings s;
    CLI::App app{"The node of adapters/ggml.hpp beside ggml's own attention"};
    app.add_option("--cases", s.cases, "new tokens x tokens after the step");
    app.add_option("--threads", s.threads);
    app.add_option("--q-heads", s.q_heads);
    app.add_option("--kv-heads", s.kv_heads);
    app.add_option("--head-dim", s.head_dim);
    app.add_option("--rounds", s.rounds, "measurements of each")->check(CLI::PositiveNumber);
    app.add_flag("--json", s.json, "one object a line");
    CLI11_PARSE(app, argc, argv);
    for (const int threads : s.threads)
        for (const std::string& c : s.cases) {
            int n = 0, tokens = 0;
            if (std::sscanf(c.c_str(), "%dx%d", &n, &tokens) != 2 || n < 1 || tokens < n) {
                std::fprintf(stderr, "\"%s\" is no case such as 1x4096\n", c.c_str());
                return 1;
            }
            measure(s, n, tokens, threads);
        }
}
#endif
