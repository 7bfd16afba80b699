// Attention over packed pages, one query token (decode) or a block of them at the end of the cache (prefill):
// time, bytes, share of the read bandwidth measured in the same run, ratio to this library's 16-bit pages (or
// to --baseline), and two errors: of the kernel (against double precision on the dequantized values) and of
// the scheme (the same against the 16-bit values; random data is a hard case, since attention then averages
// noise). All schemes are measured in turns, so all their caches are in memory at once. Where CMake finds
// ggml, its attention runs on the same tensors: flash attention on a cache that lies head after head (what
// its kernel reads fastest) or token after token (llama.cpp's), and products of matrices without it.
// Other tables: --select, --skip, --documents, --masks (attention_parts.hpp).
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <kvq/attention/reference.hpp>
#include <kvq/cpu/simd.hpp>
#include <kvq/kvq.hpp>
#include <kvq/schemes/token_rows.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "attention_parts.hpp"
#include "support.hpp"

#if defined(KVQ_BENCH_GGML)
#include "ggml_attention.hpp"
#endif

namespace {

struct shape {
    int q_heads = 32, kv_heads = 8, head_dim = 128, tokens = 16384, q_tokens = 1, threads = 1,
        page_tokens = 128;
    float outliers = 1.0f, query_scale = 1.0f;
    bool peaked = false;  // one key of every page dominates
};

struct row {
    std::string scheme;
    double bits, bytes;
    double ns = 0.0, roofline = 0.0, rel_error = 0.0;
    std::vector<double> exact{};  // attention over the dequantized values
};

/// A scheme with its cache filled. Calls of all schemes are timed in turns.
struct candidate {
    row result;
    std::function<void()> call;
    std::function<void(row&)> judge;  // fills in exact and rel_error
};

double relative_error(const std::vector<double>& exact, const auto& approximate) {
    double error = 0.0, power = 0.0;
    for (std::size_t i = 0; i < exact.size(); ++i) {
        error += std::pow(exact[i] - static_cast<double>(approximate[i]), 2.0);
        power += exact[i] * exact[i];
    }
    return std::sqrt(error / power);
}

/// Of a channel, of the queries that dominant keys answer.
float direction(int channel) { return channel % 3 == 0 ? -1.0f : 1.0f; }

/// Calls use(first token, count, k, v) for pieces of the same random tokens every time.
template <class Use>
void for_random_tokens(const shape& s, Use use) {
    const int step = 1024;
    for (int done = 0; done < s.tokens; done += step) {
        const int n = std::min(step, s.tokens - done);
        const auto values = static_cast<std::size_t>(n * s.kv_heads * s.head_dim);
        auto k = bench::random_floats(values, static_cast<unsigned>(2 * done + 1));
        for (std::size_t i = 0; i < values; ++i)
            if (static_cast<int>(i) % s.head_dim < 3) k[i] *= s.outliers;
        // A score of 11.2: the other weights are half a step of 16-bit numbers below its own.
        if (s.peaked)
            for (int t = 5; t < n; t += s.page_tokens)
                for (int c = 0; c < s.kv_heads * s.head_dim; ++c)
                    k[static_cast<std::size_t>(t * s.kv_heads * s.head_dim + c)] +=
                        direction(c % s.head_dim) * 11.2f /
                        (s.query_scale * std::sqrt(static_cast<float>(s.head_dim)));
        const auto v = bench::random_floats(values, static_cast<unsigned>(2 * done + 2));
        use(done, n, k, v);
    }
}

std::vector<float> random_query(const shape& s) {
    auto q = bench::random_floats(static_cast<std::size_t>(s.q_tokens * s.q_heads * s.head_dim), 7);
    if (s.peaked)
        for (std::size_t i = 0; i < q.size(); ++i)
            q[i] = 0.5f * q[i] + direction(static_cast<int>(i) % s.head_dim);
    for (float& x : q) x *= s.query_scale;
    return q;
}

std::vector<double> exact_attention(const shape& s, const std::vector<float>& k, const std::vector<float>& v,
                                    const std::vector<float>& q) {
    std::vector<double> out(q.size());
    kvq::reference_attend<kvq::causal>(
        kvq::token_view<const float>(k.data(), s.tokens, s.kv_heads, s.head_dim),
        kvq::token_view<const float>(v.data(), s.tokens, s.kv_heads, s.head_dim),
        kvq::token_view<const float>(q.data(), s.q_tokens, s.q_heads, s.head_dim),
        kvq::token_view<double>(out.data(), s.q_tokens, s.q_heads, s.head_dim));
    return out;
}

/// A fourth of the channels matters, a fourth hardly.
kvq::calibration make_statistics(const shape& s) {
    kvq::calibration statistics({1, s.kv_heads, s.head_dim});
    auto q = bench::random_floats(static_cast<std::size_t>(64 * s.kv_heads * s.head_dim), 5);
    for (std::size_t i = 0; i < q.size(); ++i) q[i] *= i % 4 == 1 ? 30.0f : i % 4 == 2 ? 0.2f : 1.0f;
    statistics.add_queries(0, kvq::token_view<const float>(q.data(), 64, s.kv_heads, s.head_dim));
    const auto k = bench::random_floats(q.size(), 6);
    statistics.add_keys(0, kvq::token_view<const float>(k.data(), 64, s.kv_heads, s.head_dim));
    return statistics;
}

class filled_cache {
public:
    filled_cache(const char* name, const kvq::format_pair& formats, const shape& s)
        : shape_(s),
          mods_{kvq::causal{}, kvq::upper_plane{std::string_view(name).ends_with("/upper")}},
          memory_(static_cast<std::size_t>(s.tokens) * values() * 6 + (64u << 20), &huge_),
          cache_({1, s.kv_heads, s.head_dim}, {.keys = formats.keys,
                                               .values = formats.values,
                                               .page_tokens = s.page_tokens,
                                               .memory = &memory_}),
          sequence_(cache_.new_sequence()),
          q_(random_query(s)),
          out_(q_.size()),
          threads_(s.threads) {
        for_random_tokens(s, [&](int, int n, const std::vector<float>& k, const std::vector<float>& v) {
            sequence_.append(0, kvq::token_view(k.data(), n, s.kv_heads, s.head_dim),
                             kvq::token_view(v.data(), n, s.kv_heads, s.head_dim));
        });
    }

    void attend() {
        const shape& s = shape_;
        const kvq::token_view<const float> query(q_.data(), s.q_tokens, s.q_heads, s.head_dim);
        const kvq::token_view<float> output(out_.data(), s.q_tokens, s.q_heads, s.head_dim);
        s.threads == 1 ? sequence_.attend(0, query, output, mods_, kvq::serial_executor{}, space_)
                       : sequence_.attend(0, query, output, mods_, threads_, space_);
        benchmark::DoNotOptimize(out_.data());
    }
    double bytes() const {
        const kvq::usage_report u = sequence_.usage();
        return static_cast<double>(u.quantized + u.window - u.slack);
    }
    void judge(row& r) {
        attend();
        const shape& s = shape_;
        std::vector<float> k(static_cast<std::size_t>(s.tokens) * values()), v(k.size());
        sequence_.dequantize(0, kvq::tensor::key, 0,
                             kvq::token_view(k.data(), s.tokens, s.kv_heads, s.head_dim));
        sequence_.dequantize(0, kvq::tensor::value, 0,
                             kvq::token_view(v.data(), s.tokens, s.kv_heads, s.head_dim));
        r.exact = exact_attention(s, k, v, q_);
        r.rel_error = relative_error(r.exact, out_);
    }

private:
    std::size_t values() const { return static_cast<std::size_t>(shape_.kv_heads * shape_.head_dim); }

    shape shape_;
    kvq::mods<kvq::causal, kvq::upper_plane> mods_;
    bench::huge_page_resource huge_;
    // One piece for the pages of any format; what is not touched costs nothing.
    std::pmr::monotonic_buffer_resource memory_;
    kvq::cache cache_;
    kvq::sequence sequence_;
    std::vector<float> q_, out_;
    kvq::thread_pool threads_;
    kvq::workspace space_;
};

candidate prepare(const char* name, const kvq::format_pair& formats, const shape& s) {
    const auto cache = std::make_shared<filled_cache>(name, formats, s);
    const double bytes = cache->bytes();
    return {{name, 8.0 * bytes / (2.0 * s.tokens * s.kv_heads * s.head_dim), bytes},
            [cache] { cache->attend(); },
            [cache](row& r) { cache->judge(r); }};
}

#if defined(KVQ_BENCH_GGML)
/// The same tensors in a cache of ggml's type.
template <ggml_type Type, bench::ggml_path Path>
candidate prepare_ggml(const char* name, const shape& s) {
    const auto values = static_cast<std::size_t>(s.tokens * s.kv_heads * s.head_dim);
    const auto attention = std::make_shared<bench::ggml_attention>(
        Path, Type, s.q_tokens, s.q_heads, s.kv_heads, s.head_dim, s.tokens, s.threads);
    std::vector<float> k(values), v(values);
    for_random_tokens(
        s, [&](int first, int n, const std::vector<float>& part_k, const std::vector<float>& part_v) {
            const auto at = static_cast<std::ptrdiff_t>(first * s.kv_heads * s.head_dim);
            std::copy_n(part_k.begin(), n * s.kv_heads * s.head_dim, k.begin() + at);
            std::copy_n(part_v.begin(), n * s.kv_heads * s.head_dim, v.begin() + at);
        });
    const auto q = random_query(s);
    attention->fill(q, k, v);  // and gives back what its types made of them
    const auto bytes = static_cast<double>(attention->cache_bytes());
    return {{name, 8.0 * bytes / (2.0 * static_cast<double>(values)), bytes},
            [attention] { attention->run(); },
            [attention, exact = exact_attention(s, k, v, q)](row& r) {
                attention->run();
                r.exact = exact;
                r.rel_error = relative_error(exact, attention->output());
            }};
}
#endif

using schemes = std::vector<std::pair<const char*, std::function<candidate(const char*, const shape&)>>>;

void add(schemes& list, const char* name, const kvq::format_pair& formats) {
    list.emplace_back(name, [formats](const char* n, const shape& s) { return prepare(n, formats, s); });
}
/// A preset whose keys have a plan of widths, from statistics.
template <class Preset>
void add_planned(schemes& list, const char* name) {
    list.emplace_back(name, [](const char* n, const shape& s) {
        kvq::format_pair formats = kvq::make_formats<Preset>();
        formats.keys = kvq::make_format<kvq::simd<>>(typename Preset::keys(make_statistics(s)));
        return prepare(n, formats, s);
    });
}

}  // namespace

int main(int argc, char** argv) {
    CLI::App app("Decode attention over packed pages");
    shape s;
    std::vector<int> tokens;
    int select = 0, documents = 0;
    float skip = 0.0f;
    bool masks = false;
    std::vector<std::string> only;
    std::string baseline = "fp16";
    int repetitions = 7;
    bool json = false;
    app.add_option(
        "--tokens", tokens,
        "context lengths; default: 4096, 16384 and 65536, with --documents 2048, with --masks 8192");
    app.add_option("--q-heads", s.q_heads);
    app.add_option("--kv-heads", s.kv_heads);
    app.add_option("--head-dim", s.head_dim);
    app.add_option("--query-tokens", s.q_tokens, "more than 1: a block of the last tokens of a prompt")
        ->check(CLI::PositiveNumber);
    app.add_option("--page-tokens", s.page_tokens);
    app.add_option("--threads", s.threads);
    app.add_option("--outliers", s.outliers,
                   "three channels of the keys are so many times as large as the others");
    app.add_option("--query-scale", s.query_scale, "times the standard normal query");
    app.add_flag("--peaked", s.peaked, "one key of every page dominates: the error is that of small weights");
    app.add_option("--scheme", only, "only schemes whose names contain one of these")->delimiter(',');
    app.add_option("--baseline", baseline, "the scheme that ratios of times are taken to")
        ->capture_default_str();
    app.add_option("--repetitions", repetitions, "of every timing, of which the median counts")
        ->check(CLI::Range(2, 1000))  // of a single one Google Benchmark gives no median
        ->capture_default_str();
    app.add_option("--select", select, "the best so many tokens against all of them, of keys in segments")
        ->check(CLI::PositiveNumber);
    app.add_option("--skip", skip, "values with at most this share of the weights are not read")
        ->check(CLI::Range(0.0f, 0.99f));
    app.add_option("--documents", documents, "a prompt as so many documents against one")
        ->check(CLI::PositiveNumber);
    app.add_flag("--masks", masks, "masks, score modifiers and moved keys against causal attention");
    app.add_flag("--json", json, "one JSON object a line");
    CLI11_PARSE(app, argc, argv);
    if (select > 0 || skip > 0.0f || documents > 0 || masks) {
        const auto wanted = [&](const std::string& name) {
            return only.empty() ? name.starts_with("kivi-4-")
                                : std::any_of(only.begin(), only.end(), [&](const std::string& part) {
                                      return name.find(part) != std::string::npos;
                                  });
        };
        bench::named_formats formats;
        const auto take = [&]<class Scheme>(const char* name, const Scheme*) {
            if (wanted(name)) formats.emplace_back(name, kvq::make_formats<Scheme>());
        };
        const auto take_bounded = [&]<class Scheme>(const char* name, const char* bounded_name,
                                                    const Scheme* scheme) {
            take(name, scheme);
            if (!wanted(bounded_name)) return;
            const kvq::format f = kvq::make_format<Scheme>();
            formats.emplace_back(bounded_name, kvq::format_pair{kvq::with_bounds(f), f});
        };
        take_bounded("fp16", "fp16-bounds", static_cast<const kvq::full<kvq::float16>*>(nullptr));
        take_bounded("int8", "int8-bounds", static_cast<const kvq::int8*>(nullptr));
        take_bounded("affine-4-g64", "affine-4-g64-bounds",
                     static_cast<const kvq::affine<4, kvq::per_token<64>>*>(nullptr));
        take("kivi-4-g64", static_cast<const kvq::kivi<4, 64>*>(nullptr));
        take("kivi-4-g128", static_cast<const kvq::kivi<4, 128>*>(nullptr));
        take("kivi-2-g64", static_cast<const kvq::kivi<2, 64>*>(nullptr));
        take("std4", static_cast<const kvq::std4*>(nullptr));
        take("low2", static_cast<const kvq::low2*>(nullptr));
        const bench::part_settings part{s.q_heads, s.kv_heads,  s.head_dim, s.page_tokens,
                                        s.threads, repetitions, json};
        const auto lengths = [&](std::vector<int> usual) { return tokens.empty() ? usual : tokens; };
        if (select > 0 || skip > 0.0f)
            bench::bench_select(formats, part, lengths({4096, 16384, 65536}), select, skip);
        if (documents > 0) bench::bench_documents(formats, part, lengths({2048}), documents);
        if (masks) bench::bench_masks(formats, part, lengths({8192}));
        return 0;
    }
    if (tokens.empty()) tokens = {4096, 16384, 65536};

    schemes list;
    add(list, "fp16", kvq::make_formats<kvq::full<kvq::float16>>());
    add(list, "int8", kvq::make_formats<kvq::int8>());
    for (const char* const name : {"fp8", "nvfp4", "mxfp8", "q8_0", "q4_0"}) {
        const kvq::row_layout& rows = kvq::row_layout_named(name);
        if (rows.channels > 0 && s.head_dim % rows.channels != 0) continue;
        const kvq::format f = kvq::make_format<kvq::simd<>>(kvq::token_rows(rows));
        add(list, rows.name, {f, f});
    }
    add(list, "affine-4-g64", kvq::make_formats<kvq::affine<4, kvq::per_token<64>>>());
    add(list, "kivi-4-g64", kvq::make_formats<kvq::kivi<4, 64>>());
    add(list, "kivi-4-g128", kvq::make_formats<kvq::kivi<4, 128>>());
    add(list, "kivi-3-g64", kvq::make_formats<kvq::kivi<3, 64>>());
    add(list, "kivi-3-g128", kvq::make_formats<kvq::kivi<3, 128>>());
    add(list, "kivi-2-g64", kvq::make_formats<kvq::kivi<2, 64>>());
    add(list, "kivi-2-g128", kvq::make_formats<kvq::kivi<2, 128>>());
    add(list, "std4", kvq::make_formats<kvq::std4>());
    add(list, "std4-h", kvq::make_formats<kvq::std4_h>());
    const kvq::format_pair upper = kvq::make_formats<kvq::nested4>();
    const kvq::format_pair both{kvq::with_lower_plane(upper.keys), kvq::with_lower_plane(upper.values)};
    add(list, "nested8", both);
    add(list, "nested8/upper", both);
    add(list, "ref8", kvq::make_formats<kvq::ref8>());
    add(list, "mix4", kvq::make_formats<kvq::mix4>());
    add_planned<kvq::mix4>(list, "mix4-plan");
    add_planned<kvq::mix5>(list, "mix5-plan");
    add_planned<kvq::mix6>(list, "mix6-plan");
    add(list, "low3", kvq::make_formats<kvq::low3>());
    add_planned<kvq::low3>(list, "low3-plan");
    add(list, "low2", kvq::make_formats<kvq::low2>());
    add_planned<kvq::low2>(list, "low2-plan");
    // Queries and weights in 8 bits instead of 16: mind the column of the kernel's error.
    using one_byte = kvq::simd<kvq::arch::best, kvq::query_bytes<1>>;
    add(list, "kivi-4-g128/1", kvq::make_formats<kvq::kivi<4, 128>, one_byte>());
    add(list, "int8/1", kvq::make_formats<kvq::int8, one_byte>());
#if defined(__AMX_INT8__) || defined(__AMXINT8__)
    // The same pages without tiles, which more than four query rows are multiplied with.
    using registers = kvq::simd<kvq::arch::avx512vnni>;
    add(list, "int8/vnni", kvq::make_formats<kvq::int8, registers>());
    add(list, "kivi-4-g128/vnni", kvq::make_formats<kvq::kivi<4, 128>, registers>());
    add(list, "kivi-2-g128/vnni", kvq::make_formats<kvq::kivi<2, 128>, registers>());
    add(list, "std4/vnni", kvq::make_formats<kvq::std4, registers>());
#endif
#if defined(KVQ_BENCH_GGML)
    constexpr auto head_major = bench::ggml_path::head_major, token_major = bench::ggml_path::token_major,
                   no_flash = bench::ggml_path::no_flash;
    list.emplace_back(PEER " f16", &prepare_ggml<GGML_TYPE_F16, head_major>);
    list.emplace_back(PEER " f16, token-major", &prepare_ggml<GGML_TYPE_F16, token_major>);
    list.emplace_back(PEER " f16, no flash", &prepare_ggml<GGML_TYPE_F16, no_flash>);
    list.emplace_back(PEER " bf16", &prepare_ggml<GGML_TYPE_BF16, head_major>);
    list.emplace_back(PEER " bf16, token-major", &prepare_ggml<GGML_TYPE_BF16, token_major>);
    list.emplace_back(PEER " bf16, no flash", &prepare_ggml<GGML_TYPE_BF16, no_flash>);
    if (s.head_dim % ggml_blck_size(GGML_TYPE_Q4_0) == 0) {  // both have blocks of 32 channels
        list.emplace_back(PEER " q8_0", &prepare_ggml<GGML_TYPE_Q8_0, head_major>);
        list.emplace_back(PEER " q8_0, token-major", &prepare_ggml<GGML_TYPE_Q8_0, token_major>);
        list.emplace_back(PEER " q4_0", &prepare_ggml<GGML_TYPE_Q4_0, head_major>);
        list.emplace_back(PEER " q4_0, token-major", &prepare_ggml<GGML_TYPE_Q4_0, token_major>);
    }
#endif

    if (std::none_of(list.begin(), list.end(), [&](const auto& one) { return one.first == baseline; })) {
        std::fprintf(stderr, "no scheme is called %s\n", baseline.c_str());
        return 1;
    }
    // The 16-bit values are what errors of schemes are measured by.
    std::erase_if(list, [&](const auto& one) {
        const std::string name = one.first;
        return name != "fp16" && name != baseline && !only.empty() &&
               std::none_of(only.begin(), only.end(),
                            [&](const std::string& part) { return name.find(part) != std::string::npos; });
    });

    if (!json)
        std::printf(
            "%s, q/kv heads %d/%d, head_dim %d, %d query token(s), pages of %d, %d thread(s)\n"
            "%-22s %8s %6s %12s %10s %9s %9s %*s %8s %8s\n",
            kvq::simd<>::name(), s.q_heads, s.kv_heads, s.head_dim, s.q_tokens, s.page_tokens, s.threads,
            "scheme", "tokens", "bits", "bytes/token", "us", "GB/s", "roofline",
            static_cast<int>(std::max<std::size_t>(8, baseline.size() + 4)), ("vs " + baseline).c_str(),
            "kernel", "scheme");
    for (const int n : tokens) {
        s.tokens = n;
        std::vector<candidate> candidates;
        std::vector<std::function<void()>> calls;
        for (const auto& [name, prepare_one] : list) {
            candidates.push_back(prepare_one(name, s));
            calls.push_back(candidates.back().call);
        }
        const std::vector<double> ns = bench::median_ns(calls, s.threads, repetitions);
        double baseline_ns = 0.0;
        std::vector<double> values;  // what the 16-bit cache attends to
        for (std::size_t i = 0; i < candidates.size(); ++i)
            if (candidates[i].result.scheme == baseline) baseline_ns = ns[i];
        for (std::size_t i = 0; i < candidates.size(); ++i) {
            row& r = candidates[i].result;
            r.ns = ns[i];
            r.roofline = r.bytes / r.ns / bench::read_bandwidth(static_cast<std::size_t>(r.bytes), s.threads);
            candidates[i].judge(r);
            if (r.scheme == "fp16") values = r.exact;
            const double speed = baseline_ns / r.ns, scheme_error = relative_error(values, r.exact);
            if (json) {
                const nlohmann::json line{{"scheme", r.scheme},
                                          {"q_heads", s.q_heads},
                                          {"kv_heads", s.kv_heads},
                                          {"head_dim", s.head_dim},
                                          {"tokens", n},
                                          {"q_tokens", s.q_tokens},
                                          {"threads", s.threads},
                                          {"ns", r.ns},
                                          {"bytes", r.bytes},
                                          {"bits", r.bits},
                                          {"roofline", r.roofline},
                                          {"vs_" + baseline, speed},
                                          {"rel_error", r.rel_error},
                                          {"scheme_error", scheme_error}};
                std::printf("%s\n", line.dump().c_str());
            } else {
                std::printf("%-22s %8d %6.2f %12.0f %10.1f %9.2f %8.0f%% %*.2fx %8.0e %8.0e\n",
                            r.scheme.c_str(), n, r.bits, r.bytes / n, r.ns * 1e-3, r.bytes / r.ns,
                            r.roofline * 100.0,
                            static_cast<int>(std::max<std::size_t>(7, baseline.size() + 3)), speed,
                            r.rel_error, scheme_error);
            }
            std::fflush(stdout);
            candidates[i] = {};
            calls[i] = {};
        }
    }
}
