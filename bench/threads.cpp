// How attention and decode steps gain from threads: the time of one layer on 1, 2, 4 ... threads of a
// kvq::thread_pool, and of a kvq::team as large (threads that enter every operation), and how many times as
// fast as on one thread. All of them in turns; the least time of each counts, since everything else that a
// machine does only adds to it.
//
// attend   cache.attend of --batch sequences of --tokens tokens, one query token each
// step     cache.prefill of one more token each; every --page tokens it quantizes a page per sequence
// prefill  cache.prefill of --chunk tokens behind --tokens tokens, one sequence
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <kvq/core/team.hpp>
#include <kvq/core/thread_pool.hpp>
#include <kvq/cpu/simd.hpp>
#include <kvq/kvq.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "support.hpp"

namespace {

struct settings {
    int q_heads = 32, kv_heads = 8, head_dim = 128, page_tokens = 128, chunk = 256;
    std::vector<int> batch{1}, tokens{4096, 16384}, threads;
    double seconds = 1.0;
    bool json = false;
};

/// Sequences of one length, and an operation on them.
class working_set {
public:
    working_set(const kvq::format_pair& formats, const settings& s, const std::string& what, int batch,
                int tokens)
        : cache_({1, s.kv_heads, s.head_dim}, {.keys = formats.keys,
                                               .values = formats.values,
                                               .recent = what == "attend" ? 0 : 128,
                                               .page_tokens = s.page_tokens,
                                               .rollback = 0,
                                               .memory = &memory_}),
          n_(what == "prefill" ? s.chunk : 1),
          tokens_(tokens),
          attend_only_(what == "attend"),
          k_(bench::random_floats(static_cast<std::size_t>(1024 * s.kv_heads * s.head_dim), 1)),
          q_(bench::random_floats(static_cast<std::size_t>(n_ * s.q_heads * s.head_dim), 2)),
          out_(static_cast<std::size_t>(batch) * q_.size()) {
        sequences_.reserve(static_cast<std::size_t>(batch));
        for (int i = 0; i < batch; ++i) {
            auto& sequence = sequences_.emplace_back(cache_.new_sequence());
            for (int done = 0; done < tokens; done += 1024) {
                const kvq::token_view<const float> k(k_.data(), std::min(1024, tokens - done), s.kv_heads,
                                                     s.head_dim);
                sequence.append(0, k, k);
            }
            const kvq::token_view<const float> k(k_.data(), n_, s.kv_heads, s.head_dim),
                q(q_.data(), n_, s.q_heads, s.head_dim);
            const kvq::token_view<float> out(out_.data() + static_cast<std::size_t>(i) * q_.size(), n_,
                                             s.q_heads, s.head_dim);
            attends_.push_back({&sequence, q, out});
            prefills_.push_back({&sequence, k, k, q, out});
        }
    }
    void run(const kvq::executor_view& threads) {
        if (attend_only_)
            cache_.attend(0, attends_, kvq::causal{}, threads, space_);
        else
            cache_.prefill(0, prefills_, kvq::causal{}, threads, space_);
        benchmark::DoNotOptimize(out_.data());
        if (!attend_only_ && ++calls_ % (n_ > 1 ? 1 : 256) == 0)
            for (kvq::sequence& sequence : sequences_) sequence.trim(tokens_);
    }

private:
    bench::huge_page_resource huge_;
    std::pmr::unsynchronized_pool_resource memory_{&huge_};
    kvq::cache cache_;
    int n_, tokens_, calls_ = 0;
    bool attend_only_;
    std::vector<float> k_, q_, out_;
    std::vector<kvq::sequence> sequences_;
    std::vector<kvq::attention_request> attends_;
    std::vector<kvq::prefill_request> prefills_;
    kvq::workspace space_;
};

double microseconds(const auto& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

/// Threads of an engine that enter one operation after another. The time of one is that from the first to the
/// last, divided.
class engine {
public:
    explicit engine(int threads) : threads_(threads) {}
    double microseconds_of(working_set& set, int operations) {
        std::vector<std::thread> others;
        const auto enter = [&] {
            for (int i = 0; i < operations; ++i)
                team_.enter(threads_, [&](kvq::executor_view all) { set.run(all); });
        };
        for (int i = 1; i < threads_; ++i)
            others.emplace_back([&] {
                team_.enter(threads_, [](kvq::executor_view) {});
                enter();
            });
        team_.enter(threads_, [](kvq::executor_view) {});  // all threads have started
        const double us = microseconds(enter);
        for (std::thread& t : others) t.join();
        return us / operations;
    }

private:
    kvq::team team_;
    int threads_;
};

}  // namespace

int main(int count, char** arguments) {
    settings s;
    std::string schemes = "fp16,int8,std4", kinds = "attend";
    CLI::App program("Attention and decode steps on several threads");
    const auto list = [&](const char* name, std::vector<int>& to, const char* text) {
        program.add_option(name, to, text)->delimiter(',')->check(CLI::PositiveNumber);
    };
    list("--batch", s.batch, "sequences: 1,64");
    list("--tokens", s.tokens, "tokens of each");
    list("--threads", s.threads, "numbers of threads; default: 1, 2, 4 ... those of the machine");
    program.add_option("--schemes", schemes, "fp16, int8, std4");
    program.add_option("--what", kinds, "attend, step, prefill");
    program.add_option("--chunk", s.chunk, "tokens of prefill")->check(CLI::PositiveNumber);
    program.add_option("--seconds", s.seconds, "time for each row")->check(CLI::PositiveNumber);
    program.add_flag("--json", s.json, "one JSON object a line");
    CLI11_PARSE(program, count, arguments);
    const int most = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    if (s.threads.empty()) {
        for (int n = 1; n < most; n *= 2) s.threads.push_back(n);
        s.threads.push_back(most);
    }
    if (s.threads.front() != 1) s.threads.insert(s.threads.begin(), 1);

    const auto wants = [](const std::string& all, const char* one) {
        return all.find(one) != std::string::npos;
    };
    std::vector<std::pair<const char*, kvq::format_pair>> formats;
    if (wants(schemes, "fp16")) formats.emplace_back("fp16", kvq::make_formats<kvq::full<kvq::float16>>());
    if (wants(schemes, "int8")) formats.emplace_back("int8", kvq::make_formats<kvq::int8>());
    if (wants(schemes, "std4")) formats.emplace_back("std4", kvq::make_formats<kvq::std4>());
    if (!s.json)
        std::printf(
            "%s, q/kv heads %d/%d, head_dim %d, pages of %d\n%-8s %-6s %5s %7s %8s %11s %8s %11s %8s\n",
            kvq::simd<>::name(), s.q_heads, s.kv_heads, s.head_dim, s.page_tokens, "what", "scheme", "batch",
            "tokens", "threads", "pool us", "times", "team us", "times");
    for (const char* what : {"attend", "step", "prefill"}) {
        if (!wants(kinds, what)) continue;
        for (const int batch : s.batch)
            for (const int tokens : s.tokens)
                for (const auto& [name, pair] : formats) {
                    working_set set(pair, s, what, std::string(what) == "prefill" ? 1 : batch, tokens);
                    struct times {
                        double pool = 1e300, team = 1e300;
                    };
                    std::vector<times> least(s.threads.size());
                    std::vector<std::unique_ptr<kvq::thread_pool>> pools;
                    std::vector<std::unique_ptr<engine>> engines;
                    for (const int n : s.threads) {
                        pools.push_back(std::make_unique<kvq::thread_pool>(n));
                        engines.push_back(std::make_unique<engine>(n));
                    }
                    const auto start = std::chrono::steady_clock::now();
                    do {
                        for (std::size_t i = 0; i < s.threads.size(); ++i) {
                            for (int call = 0; call < 8; ++call)
                                least[i].pool =
                                    std::min(least[i].pool, microseconds([&] { set.run(*pools[i]); }));
                            least[i].team = std::min(least[i].team, engines[i]->microseconds_of(set, 8));
                        }
                    } while (
                        std::chrono::steady_clock::now() - start <
                        std::chrono::duration<double>(s.seconds * static_cast<double>(s.threads.size())));
                    for (std::size_t i = 0; i < s.threads.size(); ++i) {
                        const double by_pool = least[0].pool / least[i].pool,
                                     by_team = least[0].team / least[i].team;
                        if (s.json) {
                            const nlohmann::json line{{"what", what},
                                                      {"scheme", name},
                                                      {"batch", batch},
                                                      {"tokens", tokens},
                                                      {"threads", s.threads[i]},
                                                      {"pool_us", least[i].pool},
                                                      {"pool_times", by_pool},
                                                      {"team_us", least[i].team},
                                                      {"team_times", by_team}};
                            std::printf("%s\n", line.dump().c_str());
                        } else {
                            std::printf("%-8s %-6s %5d %7d %8d %11.1f %7.2fx %11.1f %7.2fx\n", what, name,
                                        batch, tokens, s.threads[i], least[i].pool, by_pool, least[i].team,
                                        by_team);
                        }
                        std::fflush(stdout);
                    }
                }
    }
}
