// Prefix cache under many long entries: how long a lookup takes, by what it finds, and what fetching and
// storing take. Single calls are timed (CPU time), with other tokens each time, so that percentiles can be
// shown.
// All entries are forks of one sequence: the store looks at token ids alone, and this fits into memory.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>
#include <kvq/policy/prefix_cache.hpp>
#include <nlohmann/json.hpp>
#include <random>

namespace {

using key = std::vector<kvq::token_id>;

struct sizes {
    int entries = 10000, tokens = 4096, system_tokens = 1024, systems = 100, calls = 2000;
    int layers = 8;  // what a fork copies grows with them
};

class workload {
public:
    explicit workload(const sizes& s) : sizes_(s) {}

    /// Entry i: one of the system prompts, then its own tokens, the same at every call.
    key entry(int i) const {
        std::mt19937 system(static_cast<unsigned>(i % sizes_.systems)),
            own(static_cast<unsigned>(i + 1000000));
        key k(static_cast<std::size_t>(sizes_.tokens));
        for (int t = 0; t < sizes_.tokens; ++t)
            k[static_cast<std::size_t>(t)] =
                static_cast<kvq::token_id>((t < sizes_.system_tokens ? system() : own()) % 128000);
        return k;
    }
    key any_entry() { return entry(static_cast<int>(random_() % static_cast<unsigned>(sizes_.entries))); }

    key request(kvq::prefix_match kind) {
        key k = any_entry();
        if (kind == kvq::prefix_match::miss) k.front() = 128001;
        const auto cut = static_cast<std::size_t>(sizes_.system_tokens) +
                         random_() % static_cast<unsigned>(sizes_.tokens - sizes_.system_tokens);
        if (kind == kvq::prefix_match::supersequence) k.resize(cut);
        if (kind == kvq::prefix_match::lcp)
            for (std::size_t i = cut; i < k.size(); ++i) k[i] = 128001;
        if (kind == kvq::prefix_match::prefix) k.insert(k.end(), 256, 128001);
        return k;
    }

private:
    sizes sizes_;
    std::mt19937 random_{1};
};

/// CPU time of this thread: what else the machine does then does not count.
double now() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) * 1e6 + static_cast<double>(t.tv_nsec) * 1e-3;
}
template <class F>
double microseconds(F&& f) {
    const double start = now();
    f();
    return now() - start;
}

void print(const char* what, const char* kind, std::vector<double> us, bool json) {
    std::sort(us.begin(), us.end());
    const auto at = [&](double share) {
        return us[static_cast<std::size_t>(share * static_cast<double>(us.size() - 1))];
    };
    if (json) {
        const nlohmann::json line{{"call", what},       {"finds", kind},      {"us_p50", at(0.5)},
                                  {"us_p90", at(0.9)},  {"us_p99", at(0.99)}, {"us_p99.9", at(0.999)},
                                  {"us_max", us.back()}};
        std::printf("%s\n", line.dump().c_str());
    } else {
        std::printf("%-8s %-14s %9.2f %9.2f %9.2f %9.2f %9.2f\n", what, kind, at(0.5), at(0.9), at(0.99),
                    at(0.999), us.back());
    }
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    CLI::App app("Prefix cache: times of single calls in microseconds");
    sizes s;
    bool json = false;
    app.add_option("--entries", s.entries)->check(CLI::PositiveNumber);
    app.add_option("--tokens", s.tokens, "of each entry")->check(CLI::PositiveNumber);
    app.add_option("--system-tokens", s.system_tokens, "that entries have in common, by one of --systems");
    app.add_option("--systems", s.systems)->check(CLI::PositiveNumber);
    app.add_option("--layers", s.layers)->check(CLI::PositiveNumber);
    app.add_option("--calls", s.calls)->check(CLI::PositiveNumber);
    app.add_flag("--json", json, "one JSON object a line");
    CLI11_PARSE(app, argc, argv);
    s.system_tokens = std::clamp(s.system_tokens, 1, s.tokens - 1);

    kvq::cache cache({.layers = s.layers, .kv_heads = 1, .head_dim = 64},
                     {.keys = kvq::make_format<kvq::affine<4>, kvq::scalar>(), .page_tokens = 64});
    kvq::prefix_cache store(cache, {.max_entries = s.entries + 1});
    workload work(s);
    auto sequence = cache.new_sequence();
    const std::vector<float> ones(static_cast<std::size_t>(s.tokens + 256) * 64, 1.0f);
    const kvq::token_view<const float> values(ones.data(), s.tokens + 256, 1, 64);
    for (int layer = 0; layer < s.layers; ++layer) sequence.append(layer, values, values);

    if (!json)
        std::printf(
            "%d entries of %d tokens, %d of them one of %d system prompts; %d layers\n"
            "%-8s %-14s %9s %9s %9s %9s %9s\n",
            s.entries, s.tokens, s.system_tokens, s.systems, s.layers, "call", "finds", "p50 us", "p90",
            "p99", "p99.9", "max");
    std::vector<double> us;
    for (int i = 0; i < s.entries; ++i) {
        const key tokens = work.entry(i);
        us.push_back(microseconds([&] { store.store(tokens, sequence); }));
    }
    print("store", "new", us, json);

    using match = kvq::prefix_match;
    for (const match kind : {match::exact, match::supersequence, match::prefix, match::lcp, match::miss}) {
        std::vector<double> lookups, fetches;
        int wrong = 0;
        for (int i = 0; i < s.calls; ++i) {
            const key tokens = work.request(kind);
            // Tokens come from a tokenizer, hence from the processor's caches; the tree does not.
            lookups.push_back(microseconds([&] { wrong += store.lookup(tokens).match != kind; }));
            fetches.push_back(microseconds([&] { wrong += store.fetch(tokens).match != kind; }));
        }
        if (wrong > 0) {
            std::fprintf(stderr, "%d of %d calls did not find '%s'\n", wrong, 2 * s.calls, kvq::name(kind));
            return 1;
        }
        print("lookup", kvq::name(kind), lookups, json);
        print("fetch", kvq::name(kind), fetches, json);
    }
}
