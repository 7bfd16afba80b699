// SPDX-License-Identifier: MIT
// A million random operations on sequences of one cache, against a plain model that keeps every token as
// 16-bit values and adds up what each requantizing may lose. Nothing may drift beyond that, no page may leak,
// no byte may be unaccounted for.
//
// KVQ_FUZZ_OPERATIONS sets their number, KVQ_SEED where they start.
#include <doctest/doctest.h>

#include <kvq/cache/sequence_access.hpp>
#include <kvq/io/restore.hpp>
#include <kvq/io/save.hpp>
#include <set>

#include "support/attention_error.hpp"
#include "support/memory.hpp"
#include "support/typed_cache.hpp"

namespace fuzz_tests {

namespace {

// Tiny pages of tiny heads: what matters are the transitions.
using fuzz_cache =
    test::typed_cache<test::formats<kvq::full<kvq::float16>, kvq::affine<8, kvq::per_token<0>>,
                                    kvq::affine<4, kvq::per_channel<0>>, kvq::affine<2, kvq::per_channel<0>>>,
                      test::formats<kvq::full<kvq::float16>, kvq::affine<8, kvq::per_token<0>>,
                                    kvq::affine<4, kvq::per_token<0>>, kvq::affine<2, kvq::per_token<0>>>>;
using sequence_type = fuzz_cache::sequence_type;
constexpr int layers = 1, heads = 1, dim = 4, longest = 48;
constexpr kvq::tensor roles[] = {kvq::tensor::key, kvq::tensor::value};

/// Half a step of a format whose group spans at most [-reach, reach], with fp16 parameters.
double half_step(int format, double reach) {
    if (format == 0) return reach * 0x1p-11;
    constexpr double top[] = {0, 0, 255, 15, 3};
    return 0.5 * (2 * reach + reach * 0x1p-10) / top[format] * (1 + 0x1p-10) + 1e-6;
}

/// What a sequence should hold.
struct model {
    struct token {
        float values[2][dim];
        double bound[2] = {0, 0};
    };
    std::vector<token> tokens;
    struct held {
        const kvq::page* page;
        int format;
    };
    std::vector<held> pages[2];
};

class fuzzer {
public:
    fuzzer(std::uint64_t seed)
        : random_(seed), cache_({layers, heads, dim, 0}, options()), in_use_(memory_.bytes()) {}

    void step() {
        switch (random_.between(0, 15)) {
            case 0:
                return create();
            case 1:
                return fork();
            case 2:
                return drop();
            case 3:
            case 4:
                return trim();
            case 5:
            case 6:
                return requantize();
            case 7:
                return step_down();
            case 8:
                return speculate();
            case 9:
                return attend();
            case 10:
                return save_and_load();
            default:
                return append();
        }
    }

    void check_everything() {
        for (std::size_t i = 0; i < sequences_.size(); ++i) check(i);
        std::set<const kvq::page*> pages;
        for (const sequence_type& s : sequences_) {
            for (const kvq::page_span& span : kvq::detail::sequence_access::tables(s)[0].spans)
                for (int role = 0; role < 2; ++role) {
                    pages.insert(span.pages[role].get());
                    if (span.copies[role]) pages.insert(span.copies[role].get());
                }
        }
        std::size_t bytes = 0;
        for (const kvq::page* p : pages) bytes += kvq::page_pool::allocation(p->bytes);
        REQUIRE(cache_.bytes_in_use() == bytes);
        REQUIRE(cache_.pool().pages_in_use() == pages.size());
        REQUIRE(bytes <= budget);
    }

    /// Everything is given back.
    void finish() {
        sequences_.clear();
        REQUIRE(cache_.bytes_in_use() == 0);
        REQUIRE(memory_.bytes() == in_use_);
    }

    std::size_t refused() const { return refused_; }

private:
    static constexpr std::size_t budget = 6000;

    kvq::cache_options options() {
        kvq::cache_options o;
        o.sinks = random_.between(0, 3);
        o.recent = random_.between(0, 9);
        o.page_tokens = random_.pick(std::vector<int>{4, 5, 8});
        o.rollback = random_.pick(std::vector<int>{0, 4, 12});
        o.byte_budget = budget;
        o.layers = {{random_.between(0, 3), random_.between(0, 3)}};
        o.memory = &memory_;
        return o;
    }

    std::size_t any() {
        if (sequences_.empty()) create();
        return static_cast<std::size_t>(random_.between(0, static_cast<int>(sequences_.size()) - 1));
    }
    /// Runs an operation that may run out of budget; true if it went through.
    template <class F>
    bool attempt(F&& f) {
        try {
            f();
            return true;
        } catch (const kvq::out_of_memory&) {
            ++refused_;
            drop();
            return false;
        }
    }

    void create() {
        if (sequences_.size() >= 12) drop();
        sequences_.push_back(cache_.new_sequence());
        models_.emplace_back();
    }
    void fork() {
        if (sequences_.size() >= 12) drop();
        const std::size_t i = any();
        sequences_.push_back(sequences_[i].fork());
        models_.push_back(model(models_[i]));
    }
    void drop() {
        if (sequences_.empty()) return;
        const std::size_t i = any();
        sequences_.erase(sequences_.begin() + static_cast<std::ptrdiff_t>(i));
        models_.erase(models_.begin() + static_cast<std::ptrdiff_t>(i));
    }

    void append_to(std::size_t i, int n) {
        const kvq::float16 none{};
        std::vector<kvq::float16> k(static_cast<std::size_t>(n * dim), none), v(k);
        std::vector<model::token> added(static_cast<std::size_t>(n));
        for (int t = 0; t < n; ++t)
            for (int c = 0; c < dim; ++c) {
                const auto at = static_cast<std::size_t>(t * dim + c);
                k[at] = kvq::float16(2 * random_.uniform() - 1);
                v[at] = kvq::float16(2 * random_.uniform() - 1);
                added[static_cast<std::size_t>(t)].values[0][c] = static_cast<float>(k[at]);
                added[static_cast<std::size_t>(t)].values[1][c] = static_cast<float>(v[at]);
            }
        if (!attempt([&] {
                sequences_[i].append(0, kvq::token_view<const kvq::float16>(k.data(), n, heads, dim),
                                     kvq::token_view<const kvq::float16>(v.data(), n, heads, dim));
            }))
            return;
        auto& tokens = models_[i].tokens;
        tokens.insert(tokens.end(), added.begin(), added.end());
        account(i);
    }
    void append() {
        const std::size_t i = any();
        const int room = longest - static_cast<int>(models_[i].tokens.size());
        if (room == 0) return trim();
        append_to(i, random_.between(0, std::min(room, 9)));
    }
    void trim() {
        const std::size_t i = any();
        const int n = random_.between(0, static_cast<int>(models_[i].tokens.size()));
        if (!attempt([&] { sequences_[i].trim(n); })) return;
        models_[i].tokens.resize(static_cast<std::size_t>(n));
        account(i);
    }
    void speculate() {
        const std::size_t i = any();
        const int before = static_cast<int>(models_[i].tokens.size());
        if (before + 8 > longest) return;
        append_to(i, random_.between(1, 8));
        if (i >= models_.size() || static_cast<int>(models_[i].tokens.size()) <= before) return;
        const int n = random_.between(before, static_cast<int>(models_[i].tokens.size()));
        if (!attempt([&] { sequences_[i].trim(n); })) return;
        models_[i].tokens.resize(static_cast<std::size_t>(n));
        account(i);
    }
    void requantize() {
        const std::size_t i = any();
        kvq::requantize_request r;
        r.key = random_.between(-1, 3);
        r.value = random_.between(-1, 3);
        const int n = static_cast<int>(models_[i].tokens.size());
        r.first_token = random_.one_in(2) ? 0 : random_.between(0, n);
        r.last_token = random_.one_in(2) ? r.all : random_.between(r.first_token, n);
        r.only_smaller = random_.one_in(2);
        r.new_pages = random_.one_in(4);
        kvq::requantize_limit limit;
        if (random_.one_in(2)) limit.pages = static_cast<std::size_t>(random_.between(1, 3));
        std::vector<sequence_type*> set{&sequences_[i]};
        if (random_.one_in(2))
            for (std::size_t other = 0; other < sequences_.size(); ++other)
                if (other != i) set.push_back(&sequences_[other]);
        kvq::workspace space(&memory_);
        try {
            cache_.requantize(set, r, limit, kvq::serial_executor{}, space);
        } catch (const kvq::out_of_memory&) {
            ++refused_;  // some pages may have changed
        }
        for (std::size_t s = 0; s < sequences_.size(); ++s) account(s);
        if (cache_.bytes_in_use() > budget / 2) drop();
    }
    void step_down() {
        kvq::step_down_policy policy;
        policy.tiers = {{0, {0, 0}}, {random_.between(0, 16), {1, 1}}, {24, {2, 2}}, {32, {3, 3}}};
        if (random_.one_in(2)) policy.byte_budget = static_cast<std::size_t>(random_.between(0, 6000));
        std::vector<sequence_type*> set;
        for (sequence_type& s : sequences_)
            if (random_.one_in(2)) set.push_back(&s);
        try {
            kvq::step_down(cache_, std::span<sequence_type* const>(set), policy);
        } catch (const kvq::out_of_memory&) {
            ++refused_;
        }
        for (std::size_t s = 0; s < sequences_.size(); ++s) account(s);
    }
    void save_and_load() {
        const std::size_t i = any();
        if (!random_.one_in(4)) return check(i);
        std::vector<char> file;
        kvq::save(sequences_[i], [&](const void* data, std::size_t bytes) {
            const auto* const p = static_cast<const char*>(data);
            file.insert(file.end(), p, p + bytes);
        });
        std::size_t at = 0;
        const auto read = [&](void* to, std::size_t bytes) {
            const std::size_t n = std::min(bytes, file.size() - at);
            std::memcpy(to, file.data() + at, n);
            at += n;
            return n;
        };
        const auto before = test::contents(cache_, sequences_[i]);
        if (!attempt([&] { sequences_.push_back(kvq::restore(cache_, read)); })) return;
        REQUIRE(test::contents(cache_, sequences_.back()) == before);
        models_.push_back(model(models_[i]));
        // The same values in pages of its own.
        remember_pages(sequences_.size() - 1);
        if (sequences_.size() > 12) drop();
    }
    void attend() {
        const std::size_t i = any();
        if (models_[i].tokens.empty() || !random_.one_in(8)) return check(i);
        const auto q = test::random_tensor(random_, 1, 2, dim);
        const double error = test::measure_attention(cache_, sequences_[i], 0, q).of_terms;
        REQUIRE(error < 5e-4);
    }

    /// Pages that are not what they were have been quantized anew: their tokens may be off by half a step
    /// more.
    void account(std::size_t i) {
        model& m = models_[i];
        const auto& spans = kvq::detail::sequence_access::tables(sequences_[i])[0].spans;
        for (std::size_t role = 0; role < 2; ++role) {
            std::vector<model::held> now;
            for (std::size_t p = 0; p < spans.size(); ++p) {
                now.push_back({spans[p].pages[role].get(), spans[p].pages[role]->format});
                const bool known = p < m.pages[role].size();
                if (known && m.pages[role][p].page == now[p].page && m.pages[role][p].format == now[p].format)
                    continue;
                // 16-bit pages grow, are copied when they are shared, and come back from copies: all of it
                // exact.
                if (now[p].format == 0 && (!known || m.pages[role][p].format == 0)) continue;
                double reach = 1;
                for (int t = spans[p].first_token; t < spans[p].end(); ++t)
                    reach = std::max(reach, 1 + m.tokens[static_cast<std::size_t>(t)].bound[role]);
                for (int t = spans[p].first_token; t < spans[p].end(); ++t)
                    m.tokens[static_cast<std::size_t>(t)].bound[role] += half_step(now[p].format, reach);
            }
            m.pages[role] = std::move(now);
        }
    }

    void remember_pages(std::size_t i) {
        const auto& spans = kvq::detail::sequence_access::tables(sequences_[i])[0].spans;
        for (std::size_t role = 0; role < 2; ++role)
            for (std::size_t p = 0; p < models_[i].pages[role].size(); ++p)
                models_[i].pages[role][p] = {spans[p].pages[role].get(), spans[p].pages[role]->format};
    }

    /// Dequantized values lie within the bound; tokens that are exact again (16-bit copies) forget theirs.
    void check(std::size_t i) {
        model& m = models_[i];
        const int n = static_cast<int>(m.tokens.size());
        REQUIRE(sequences_[i].tokens() == n);
        for (int role = 0; role < 2; ++role) {
            std::vector<float> x(static_cast<std::size_t>(n * dim));
            sequences_[i].dequantize(0, roles[role], 0, kvq::token_view<float>(x.data(), n, heads, dim));
            for (int t = 0; t < n; ++t) {
                model::token& token = m.tokens[static_cast<std::size_t>(t)];
                double worst = 0;
                for (int c = 0; c < dim; ++c)
                    worst = std::max(worst,
                                     std::fabs(static_cast<double>(x[static_cast<std::size_t>(t * dim + c)]) -
                                               token.values[role][c]));
                REQUIRE(worst <= token.bound[role]);
                if (worst == 0) token.bound[role] = 0;
            }
        }
    }

    test::generator random_;
    test::counting_resource memory_;
    fuzz_cache cache_;
    std::size_t in_use_;
    std::vector<sequence_type> sequences_;
    std::vector<model> models_;
    std::size_t refused_ = 0;
};

}  // namespace

TEST_CASE("a million random operations") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    const char* const wanted = std::getenv("KVQ_FUZZ_OPERATIONS");
    const long operations = wanted ? std::atol(wanted) : 1000000, rounds = 40;
    std::size_t refused = 0;
    for (long round = 0; round < rounds; ++round) {
        INFO("round ", round);
        fuzzer f(seed + static_cast<std::uint64_t>(round));
        for (long i = 0; i < operations / rounds; ++i) {
            f.step();
            if (i % 64 == 0) f.check_everything();
        }
        refused += f.refused();
        f.finish();
    }
    // The budget was met, too.
    CHECK(refused > 0);
}

}  // namespace fuzz_tests
