// Attention that reads a part of the cache: bench_attention --select, --skip, --documents and --masks.
//
//   select      the best pages (kvq::selected_pages), and values that hardly weigh left out
//               (kvq::skipped_values), against dense attention in the same format
//   documents   a prompt as several documents in one sequence (kvq::document_mask), against the same tokens
//               without a mask
//   masks       one token under masks and score modifiers, and over moved keys, against causal attention
//
// Keys of --select have structure, as those of text have: the tokens are cut into segments of 96, which do
// not lie at the limits of pages; the keys of a segment share a random vector, and each adds noise of the
// same size. Queries of a kv head point to 8 segments, every query head to 2 of them. The first 4 tokens take
// about half of the weights, as attention sinks do, with small values; of 131072 tokens, those outside of
// sinks and the two segments have a few hundredths of the weights together. Values are normal. The first 4
// tokens and the last 128 are in 16 bit; the other tables have no window.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <kvq/cpu/simd.hpp>
#include <kvq/kvq.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support.hpp"

namespace bench {

struct part_settings {
    int q_heads = 32, kv_heads = 8, head_dim = 128, page_tokens = 128, threads = 1, repetitions = 7;
    bool json = false;
};
using named_formats = std::vector<std::pair<std::string, kvq::format_pair>>;

/// A cache of one layer, filled by `fill`, and queries.
class part_cache {
public:
    using fill_function = std::function<void(int first, int n, std::vector<float>& k, std::vector<float>& v)>;

    part_cache(const kvq::format_pair& formats, const part_settings& s, int tokens, int q_tokens,
               std::vector<float> q, const fill_function& fill, int sinks = 0, int recent = 0)
        : settings_(s),
          q_tokens_(q_tokens),
          memory_(static_cast<std::size_t>(tokens) * values() * 6 + (64u << 20), &huge_),
          cache_({1, s.kv_heads, s.head_dim}, {.keys = formats.keys,
                                               .values = formats.values,
                                               .sinks = sinks,
                                               .recent = recent,
                                               .page_tokens = s.page_tokens,
                                               .rotary = {rotary(s)},
                                               .memory = &memory_}),
          sequence_(cache_.new_sequence()),
          q_(std::move(q)),
          out_(q_.size()),
          threads_(s.threads) {
        const int step = 1024;
        for (int done = 0; done < tokens; done += step) {
            const int n = std::min(step, tokens - done);
            std::vector<float> k(static_cast<std::size_t>(n) * values()), v(k.size());
            fill(done, n, k, v);
            sequence_.append(0, kvq::token_view<const float>(k.data(), n, s.kv_heads, s.head_dim),
                             kvq::token_view<const float>(v.data(), n, s.kv_heads, s.head_dim));
        }
    }

    const std::vector<float>& attend(const kvq::mods_view& mods) {
        const part_settings& s = settings_;
        const kvq::token_view<const float> query(q_.data(), q_tokens_, s.q_heads, s.head_dim);
        const kvq::token_view<float> output(out_.data(), q_tokens_, s.q_heads, s.head_dim);
        s.threads == 1 ? sequence_.attend(0, query, output, mods, kvq::serial_executor{}, space_)
                       : sequence_.attend(0, query, output, mods, threads_, space_);
        benchmark::DoNotOptimize(out_.data());
        return out_;
    }
    kvq::sequence& sequence() { return sequence_; }

private:
    std::size_t values() const {
        return static_cast<std::size_t>(settings_.kv_heads) * static_cast<std::size_t>(settings_.head_dim);
    }
    static kvq::rotary_embedding rotary(const part_settings& s) {
        kvq::rotary_embedding r;
        r.dims = s.head_dim;
        return r;
    }

    part_settings settings_;
    int q_tokens_;
    huge_page_resource huge_;
    std::pmr::monotonic_buffer_resource memory_;
    kvq::cache cache_;
    kvq::sequence sequence_;
    std::vector<float> q_, out_;
    kvq::thread_pool threads_;
    kvq::workspace space_;
};

/// Keys in segments, see above.
class segmented_tokens {
public:
    segmented_tokens(const part_settings& s, int tokens) : s_(s), tokens_(tokens) {}

    void fill(int first, int n, std::vector<float>& k, std::vector<float>& v) const {
        k = random_floats(k.size(), static_cast<unsigned>(2 * first + 1));
        v = random_floats(v.size(), static_cast<unsigned>(2 * first + 2));
        const std::size_t row = static_cast<std::size_t>(s_.kv_heads * s_.head_dim);
        std::vector<float> shared;
        for (int t = 0, of = -1; t < n; ++t) {
            if (of != (first + t) / length) shared = segment(of = (first + t) / length);
            for (std::size_t i = 0; i < row; ++i) k[static_cast<std::size_t>(t) * row + i] += shared[i];
        }
        const std::vector<float> of_sinks = segment(-1);
        for (std::size_t i = 0; i < 4 * row && first == 0; ++i) {
            k[i] = 1.4f * of_sinks[i % row];
            v[i] *= 0.02f;
        }
    }
    std::vector<float> queries() const {
        const int segments = std::max(1, tokens_ / length), group = s_.q_heads / s_.kv_heads;
        std::vector<float> q = random_floats(static_cast<std::size_t>(s_.q_heads * s_.head_dim), 7);
        const std::vector<float> of_sinks = segment(-1);
        std::mt19937 random(11);
        for (int h = 0; h < s_.kv_heads; ++h) {
            std::vector<float> of[8];
            for (auto& one : of) one = segment(static_cast<int>(random() % static_cast<unsigned>(segments)));
            for (int g = 0; g < group; ++g)
                for (int c = 0; c < s_.head_dim; ++c) {
                    const auto channel = static_cast<std::size_t>(h * s_.head_dim + c);
                    float& x = q[static_cast<std::size_t>((h * group + g) * s_.head_dim + c)];
                    x = 1.25f * (0.5f * x + of[2 * g % 8][channel] + of[(2 * g + 1) % 8][channel] +
                                 of_sinks[channel]);
                }
        }
        return q;
    }

private:
    static constexpr int length = 96;
    std::vector<float> segment(int i) const {
        return random_floats(static_cast<std::size_t>(s_.kv_heads * s_.head_dim),
                             1000003u + static_cast<unsigned>(i));
    }
    part_settings s_;
    int tokens_;
};

inline double relative_difference(const std::vector<float>& a, const std::vector<float>& exact) {
    double error = 0.0, power = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        error += std::pow(static_cast<double>(a[i]) - static_cast<double>(exact[i]), 2.0);
        power += std::pow(static_cast<double>(exact[i]), 2.0);
    }
    return std::sqrt(error / power);
}

/// Dense attention against the best `select` tokens, values of `mass` left out, and both.
inline void bench_select(const named_formats& formats, const part_settings& s,
                         const std::vector<int>& lengths, int select, float mass) {
    if (!s.json)
        std::printf(
            "%s, q/kv heads %d/%d, head_dim %d, pages of %d, %d thread(s), keys in segments\n"
            "%-20s %8s %-22s %10s %9s %8s %8s %9s\n",
            kvq::simd<>::name(), s.q_heads, s.kv_heads, s.head_dim, s.page_tokens, s.threads, "scheme",
            "tokens", "reads", "us", "vs dense", "K pages", "V pages", "error");
    for (const int tokens : lengths)
        for (const auto& [name, pair] : formats) {
            const segmented_tokens data(s, tokens);
            part_cache cache(
                pair, s, tokens, 1, data.queries(),
                [&](int first, int n, auto& k, auto& v) { data.fill(first, n, k, v); }, 4, 128);
            const kvq::selected_pages best{.tokens = std::max(1, select)};
            const kvq::skipped_values skipped{.mass = mass};
            const kvq::mods both{best, skipped};
            std::vector<std::function<void()>> calls{[&] { cache.attend(kvq::causal{}); }};
            if (select > 0) calls.emplace_back([&] { cache.attend(best); });
            if (mass > 0.0f) calls.emplace_back([&] { cache.attend(skipped); });
            if (select > 0 && mass > 0.0f) calls.emplace_back([&] { cache.attend(both); });
            const std::vector<double> ns = median_ns(calls, s.threads, s.repetitions);
            const std::vector<float> dense = cache.attend(kvq::causal{});
            const auto show = [&, &scheme = name](const std::string& what, double time, double key_share,
                                                  double value_share, double error, double left_out) {
                if (s.json)
                    std::printf("%s\n", nlohmann::ordered_json{{"scheme", scheme},
                                                               {"tokens", tokens},
                                                               {"reads", what},
                                                               {"select", select},
                                                               {"mass", mass},
                                                               {"threads", s.threads},
                                                               {"ns", time},
                                                               {"vs_dense", ns[0] / time},
                                                               {"key_share", key_share},
                                                               {"value_share", value_share},
                                                               {"left_out", left_out},
                                                               {"rel_error", error}}
                                            .dump()
                                            .c_str());
                else
                    std::printf("%-20s %8d %-22s %10.1f %8.2fx %7.1f%% %7.1f%% %9.1e\n", scheme.c_str(),
                                tokens, what.c_str(), time * 1e-3, ns[0] / time, 100.0 * key_share,
                                100.0 * value_share, error);
                std::fflush(stdout);
            };
            show("all", ns[0], 1.0, 1.0, 0.0, 0.0);
            std::size_t row = 1;
            const auto judge = [&](const std::string& what, const auto& mods,
                                   const kvq::selection_report& pages, const kvq::skipping_report& values) {
                const double error = relative_difference(cache.attend(mods), dense);
                const double of_keys =
                    pages.pages > 0 ? static_cast<double>(pages.read) / static_cast<double>(pages.pages)
                                    : 1.0;
                const double of_values = values.pages > 0
                                             ? static_cast<double>(values.pages - values.skipped) /
                                                   static_cast<double>(values.pages)
                                             : 1.0;
                show(what, ns[row++], of_keys, of_keys * of_values, error,
                     static_cast<double>(values.most_left_out));
            };
            char budget[32], limit[32];
            std::snprintf(budget, sizeof budget, "best %d", select);
            std::snprintf(limit, sizeof limit, "without %g", static_cast<double>(mass));
            kvq::selection_report pages, none;
            kvq::skipping_report values, all;
            const kvq::selected_pages best_counted{best.tokens, &pages};
            const kvq::skipped_values skipped_counted{mass, &values};
            if (select > 0) judge(budget, best_counted, pages, all);
            if (mass > 0.0f) judge(limit, skipped_counted, none, values);
            pages = {};
            values = {};
            if (select > 0 && mass > 0.0f)
                judge(std::string(budget) + ", " + limit, kvq::mods{best_counted, skipped_counted}, pages,
                      values);
        }
}

inline part_cache::fill_function random_tokens() {
    return [](int first, int, std::vector<float>& k, std::vector<float>& v) {
        k = random_floats(k.size(), static_cast<unsigned>(2 * first + 1));
        v = random_floats(v.size(), static_cast<unsigned>(2 * first + 2));
    };
}
inline std::vector<float> random_queries(const part_settings& s, int q_tokens) {
    return random_floats(static_cast<std::size_t>(q_tokens * s.q_heads * s.head_dim), 7);
}
/// A row of --documents or --masks; `than`: what time is compared with.
inline void show_mask(const part_settings& s, const std::string& scheme, int tokens, const std::string& what,
                      double ns, const std::string& than, double than_ns) {
    if (s.json)
        std::printf("%s\n", nlohmann::ordered_json{{"scheme", scheme},
                                                   {"tokens", tokens},
                                                   {"mask", what},
                                                   {"ns", ns},
                                                   {"than", than},
                                                   {"time_ratio", ns / than_ns},
                                                   {"times_as_fast", than_ns / ns}}
                                .dump()
                                .c_str());
    else
        std::printf("%-14s %8d %-36s %12.1f us  %6.3f of the time of %s, %.2f times as fast\n",
                    scheme.c_str(), tokens, what.c_str(), ns * 1e-3, ns / than_ns, than.c_str(),
                    than_ns / ns);
    std::fflush(stdout);
}

/// All tokens of a prompt as queries: dense, and as equal documents.
inline void bench_documents(const named_formats& formats, const part_settings& s,
                            const std::vector<int>& lengths, int documents) {
    for (const int tokens : lengths)
        for (const auto& [name, pair] : formats) {
            part_cache cache(pair, s, tokens, tokens, random_queries(s, tokens), random_tokens());
            std::vector<int> starts;
            for (int i = 0; i < documents; ++i)
                starts.push_back(static_cast<int>(static_cast<long>(tokens) * i / documents));
            const kvq::document_mask mask{starts};
            const std::vector<double> ns =
                median_ns({[&] { cache.attend(kvq::causal{}); }, [&] { cache.attend(mask); },
                           [&] { cache.attend(kvq::bidirectional{}); },
                           [&] {
                               cache.attend(kvq::mods{kvq::bidirectional{}, mask});
                           }},
                          s.threads, s.repetitions);
            const std::string parts = std::to_string(documents) + " documents, ";
            show_mask(s, name, tokens, parts + "causal", ns[1], "dense causal", ns[0]);
            show_mask(s, name, tokens, parts + "bidirectional", ns[3], "dense bidirectional", ns[2]);
        }
}

/// One token under masks and score modifiers, and over keys that moved; 64 queries under a tree.
inline void bench_masks(const named_formats& formats, const part_settings& s,
                        const std::vector<int>& lengths) {
    for (const int tokens : lengths)
        for (const auto& [name, pair] : formats) {
            part_cache cache(pair, s, tokens, 1, random_queries(s, 1), random_tokens());
            part_cache moved(pair, s, tokens, 1, random_queries(s, 1), random_tokens());
            // Both hold pages of the same lengths; only their rotary positions differ.
            moved.sequence().shift(0, tokens / 2, 5);
            cache.sequence().shift(0, tokens / 2, 5);
            cache.sequence().shift(0, tokens / 2, -5);
            const int drafted = std::min(64, tokens);
            part_cache block(pair, s, tokens, drafted, random_queries(s, drafted), random_tokens());
            std::vector<int> parents;
            for (int i = 0; i < drafted; ++i) parents.push_back((i - 1) / 2 - (i == 0));
            const kvq::token_tree tree(tokens - drafted, parents);
            const std::vector<float> sinks(static_cast<std::size_t>(s.q_heads), 0.5f),
                slopes(static_cast<std::size_t>(s.q_heads), 0.01f);
            const kvq::learned_sinks with_sinks{sinks};
            const kvq::alibi with_slopes{slopes};
            const kvq::softcap capped{50.0f};
            const kvq::sliding_window window{1024};
            const std::vector<double> ns =
                median_ns({[&] { cache.attend(kvq::causal{}); }, [&] { cache.attend(with_sinks); },
                           [&] { cache.attend(with_slopes); }, [&] { cache.attend(capped); },
                           [&] { cache.attend(window); }, [&] { moved.attend(kvq::causal{}); },
                           [&] { block.attend(kvq::causal{}); }, [&] { block.attend(tree); }},
                          s.threads, s.repetitions);
            const char* const what[] = {"causal",  "learned sinks",  "ALiBi",
                                        "softcap", "window of 1024", "half of the keys moved by 5"};
            for (std::size_t i = 0; i < std::size(what); ++i)
                show_mask(s, name, tokens, what[i], ns[i], "causal", ns[0]);
            show_mask(s, name, tokens, std::to_string(drafted) + " queries under a tree", ns[7],
                      std::to_string(drafted) + " queries, causal", ns[6]);
        }
}

}  // namespace bench
