// SPDX-License-Identifier: MIT
// Comparison family: exact. What the host keeps of a sequence on the GPU (cuda/host/sequence_pages.hpp) against a CPU cache that did
// the same: which pages are quantized, which tokens they show, which have 16-bit copies; and every page has the right holders.
#include <doctest/doctest.h>

#include <algorithm>
#include <kvq/cache/sequence.hpp>
#include <kvq/cuda/host/sequence_pages.hpp>
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/int8.hpp>
#include <set>

#include "support/random.hpp"

namespace gpu = kvq::cuda::detail;

namespace gpu_sequence_pages_tests {

namespace {

struct pools {
    gpu::free_pages quantized_pages, window_pages, sink_pages;
};
struct pools_of {
    pools* all;
    gpu::free_pages& quantized(int) const { return all->quantized_pages; }
    gpu::free_pages& window() const { return all->window_pages; }
    gpu::free_pages& sinks() const { return all->sink_pages; }
};

struct both {
    gpu::sequence_pages pages;
    kvq::sequence host;
};

/// Room for what a growth to n places takes.
void ensure(pools& p, const gpu::sequence_pages& s, int n, const gpu::page_rules& r) {
    const auto room = [](gpu::free_pages& pool, int more) {
        if (pool.available() < more) pool.grow(pool.used() + more);
    };
    room(p.quantized_pages, s.committed_at(n, r) - s.committed());
    room(p.window_pages, s.missing_columns(n, r));
    room(p.sink_pages, r.sink_pages(n) - static_cast<int>(s.sinks.size()));
}

void require_same(const both& b, const gpu::page_rules& r) {
    const auto& track = kvq::detail::sequence_access::tracks(b.host).front();
    const int sinks = r.sinks > 0 && b.pages.tokens > 0 ? 1 : 0,
              whole_sinks = sinks != 0 && b.pages.tokens >= r.sinks ? 1 : 0;
    const int pages = r.pages(b.pages.places());
    REQUIRE(b.pages.tokens == track.tokens);
    REQUIRE(b.pages.committed() + whole_sinks == track.committed);
    REQUIRE(pages + sinks == track.size());
    REQUIRE(b.pages.first_copy + whole_sinks == track.first_copy);
    int cut_end = 0;
    for (int i = 0; i < b.pages.committed(); ++i) {
        const gpu::held_page& page = b.pages.quantized[static_cast<std::size_t>(i)];
        const kvq::page_span& span = track[i + sinks];
        REQUIRE((i >= b.pages.first_copy) == static_cast<bool>(span.copies[0]));
        REQUIRE(page.position == span.first_token);
        REQUIRE(page.begin == span.skip);
        REQUIRE(page.shown() == span.tokens);
        if (page.shown() < r.page_tokens) cut_end = i + 1;
    }
    REQUIRE(b.pages.cut_end == cut_end);
    // 16-bit values of different pages lie in different columns of the ring, which all have a page.
    REQUIRE(pages - b.pages.first_copy <= r.ring);
    for (int i = b.pages.first_copy; i < pages; ++i)
        REQUIRE(b.pages.window[static_cast<std::size_t>(i % r.ring)] >= 0);
    REQUIRE(static_cast<int>(b.pages.sinks.size()) >= r.sink_pages(b.pages.tokens));
}

}  // namespace

TEST_CASE("the host's part of a sequence on the GPU commits and trims as the CPU's cache") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    constexpr int dim = 4, most = 400;
    const std::vector<float> values(most * dim, 1.0f);
    int all_cuts = 0;
    for (int round = 0; round < 30; ++round) {
        const int page = random.pick(std::vector{4, 16, 7}), step = random.between(1, 4);
        gpu::page_rules r{random.one_in(3) ? 0 : random.between(1, 40), random.between(0, 30),
                          random.one_in(3) ? 0 : random.between(1, 40), page, 0};
        // As cache::open() chooses it (window_columns of mixed_cache.cuh).
        r.ring = (std::max(r.recent + r.rollback, r.recent + step) + page - 2) / page + 1;
        kvq::cache cache({.layers = 1, .kv_heads = 1, .head_dim = dim},
                         {.keys = kvq::make_format<kvq::int8, kvq::scalar>(),
                          .sinks = r.sinks,
                          .recent = r.recent,
                          .page_tokens = page,
                          .rollback = r.rollback,
                          .repack = 0.0f});  // the device does not repack
        pools p;
        std::vector<both> all;
        all.push_back({{}, cache.new_sequence()});
        all[0].pages.window.assign(static_cast<std::size_t>(r.ring), -1);
        for (int i = 0; i < 300; ++i) {
            both& b = all[static_cast<std::size_t>(random.between(0, static_cast<int>(all.size()) - 1))];
            const int tokens = b.pages.tokens, places = b.pages.places(), what = random.between(0, 9);
            if (what < 6) {
                const int n = what == 0 ? random.between(1, 100) : random.between(1, step);
                if (tokens + n > most) continue;
                ensure(p, b.pages, places + n, r);
                b.pages.grow(places + n, r, pools_of{&p});
                b.host.append(0, kvq::token_view<const float>(values.data(), n, 1, dim),
                              kvq::token_view<const float>(values.data(), n, 1, dim));
            } else if (what < 9) {
                const int n = std::max(0, tokens - random.between(0, random.one_in(2) ? r.rollback : tokens));
                const int left = b.pages.behind_trim(n, r).committed;
                b.pages.trim(n, r, pools_of{&p});
                REQUIRE(b.pages.committed() == left);
                all_cuts += b.pages.cut_pages(r);
                b.host.trim(n);
            } else if (all.size() < 4) {
                // As cache::fork(): quantized pages are shared, others are copied.
                both copy{b.pages, b.host.fork()};
                for (const gpu::held_page& q : copy.pages.quantized) p.quantized_pages.share(q.number);
                for (auto* list : {&copy.pages.window, &copy.pages.sinks})
                    for (int& number : *list) {
                        gpu::free_pages& pool = list == &copy.pages.window ? p.window_pages : p.sink_pages;
                        if (pool.available() == 0) pool.grow(pool.size() + 1);
                        if (number >= 0) number = pool.take();
                    }
                all.push_back(std::move(copy));
            } else {
                all.back().pages.free(r, pools_of{&p});
                all.pop_back();
            }
            std::vector<int> holders(static_cast<std::size_t>(p.quantized_pages.size()), 0);
            std::set<int> window;
            for (const both& one : all) {
                require_same(one, r);
                for (const gpu::held_page& q : one.pages.quantized)
                    ++holders[static_cast<std::size_t>(q.number)];
                for (const int number : one.pages.window)
                    if (number >= 0) REQUIRE(window.insert(number).second);
            }
            REQUIRE(static_cast<int>(window.size()) == p.window_pages.used());
            for (std::size_t q = 0; q < holders.size(); ++q)
                REQUIRE(holders[q] == p.quantized_pages.holders(static_cast<int>(q)));
        }
        for (both& b : all) b.pages.free(r, pools_of{&p});
        CHECK(p.quantized_pages.used() + p.window_pages.used() + p.sink_pages.used() == 0);
    }
    CHECK(all_cuts > 0);
}

}  // namespace gpu_sequence_pages_tests
