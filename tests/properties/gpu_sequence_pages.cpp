// SPDX-License-Identifier: MIT
// Comparison family: exact. What the host keeps of a sequence on the GPU (cuda/host/sequence_pages.hpp)
// against a CPU cache that did the same: which pages are quantized, which tokens they show, which have 16-bit
// copies, which a window has freed; every page has the right holders, and no sequence takes more pages than
// it said. What queries of a step see is held until the next one.
#include <doctest/doctest.h>

#include <algorithm>
#include <kvq/cache/sequence.hpp>
#include <kvq/cache/sequence_access.hpp>
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

    explicit pools(int page_tokens)
        : quantized_pages(1, page_tokens, 0), window_pages(0, page_tokens, 0), sink_pages(0, 16, 0) {}
    operator gpu::sequence_pools() { return {quantized_pages, window_pages, sink_pages}; }
};
struct both {
    gpu::sequence_pages pages;
    kvq::sequence host;
};

void make_room(gpu::free_pages& pool, int more) {
    if (pool.available() < more) pool.grow(pool.used() + more);
}
/// Room for exactly what a growth by n tokens is said to take.
void ensure(pools& p, const gpu::sequence_pages& s, int n, const gpu::device_geometry& g) {
    make_room(p.quantized_pages, s.missing_quantized(n, g));
    make_room(p.window_pages, s.missing_pages(n, g));
    make_room(p.sink_pages, g.sink_pages(s.tokens() + n) - static_cast<int>(s.sinks.size()));
}

void require_same(const both& b, const gpu::device_geometry& g) {
    const kvq::detail::page_table& host = kvq::detail::sequence_access::tables(b.host).front();
    const kvq::detail::page_table& device = b.pages.table;
    REQUIRE(device.tokens == host.tokens);
    REQUIRE(device.committed == host.committed);
    REQUIRE(device.copies_from == host.copies_from);
    REQUIRE(device.size() == host.size());
    const int gone = b.pages.gone();
    int skipped = gone == 0 ? 0 : g.first_token(gone) - device.front();
    REQUIRE((gone > 0) == (host.front() > 0));
    REQUIRE(device.trim_limit(g) == b.host.trim_limit());
    for (int i = 0; i < host.size(); ++i) {
        const kvq::page_span &mine = device[i], &theirs = host[i];
        REQUIRE(mine.first_token == theirs.first_token);
        REQUIRE(mine.tokens == theirs.tokens);
        REQUIRE(mine.room == theirs.room);
        REQUIRE(mine.skip == theirs.skip);
        REQUIRE(mine.sinks == theirs.sinks);
        REQUIRE(static_cast<bool>(mine.copies[0]) == static_cast<bool>(theirs.copies[0]));
        REQUIRE(mine.sinks == !mine.pages[0]);
        if (mine.sinks) continue;
        REQUIRE((mine.pages[0]->format == 0) == (theirs.pages[0]->format == 0));
        // Kernels find a token by its page.
        const int page = i - b.pages.sink_spans() + gone;
        REQUIRE(mine.first_token + skipped == g.first_token(page));
        if (i < device.committed) skipped += g.page_tokens - mine.tokens;
    }
    REQUIRE(skipped == b.pages.skipped(g));
    // 16-bit values of different pages lie in different columns of the ring.
    const int pages = b.pages.pages();
    REQUIRE(pages - b.pages.first_in_window() <= g.ring);
    for (int i = b.pages.first_in_window(); i < pages; ++i) REQUIRE(b.pages.window_page(i) != nullptr);
    for (int i = gone; i < b.pages.first_in_window(); ++i) REQUIRE(!b.pages[i].copies[0]);
    int in_window = 0;
    for (int i = 0; i < pages; ++i) in_window += b.pages.window_page(i) != nullptr;
    REQUIRE(in_window <= g.ring);
    REQUIRE(static_cast<int>(b.pages.sinks.size()) == g.sink_pages(b.pages.tokens()));
}

}  // namespace

TEST_CASE("the host's part of a sequence on the GPU commits and trims as the CPU's cache") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    constexpr int dim = 4, most = 400;
    const std::vector<float> values(most * dim, 1.0f);
    int all_cuts = 0, all_gone = 0;
    for (int round = 0; round < 30; ++round) {
        const int page = random.pick(std::vector{4, 16, 7}), step = random.between(1, 4);
        gpu::device_geometry g{{random.one_in(3) ? 0 : random.between(1, 40), random.between(0, 30), page},
                               random.one_in(3) ? 0 : random.between(1, 40),
                               0};
        if (round % 3 == 1) g.window = {random.between(1, 120)};
        if (round % 6 == 1) g.window.sinks = g.sinks;
        if (round % 6 == 2) g.window = {random.between(1, 120), true};
        const int drafts = random.one_in(2) ? 0 : random.between(1, page);
        // As cache::open() chooses it (window_columns of cuda/layout/window_columns.hpp).
        g.ring = std::max((g.recent + g.rollback + drafts + page - 2) / page,
                          (g.recent + step + page - 2) / page) +
                 1;
        kvq::layer layer = kvq::full_attention({.kv_heads = 1, .head_dim = dim});
        if (g.window)
            layer =
                (g.window.chunked ? kvq::chunked_attention : kvq::sliding_attention)(g.window.tokens, layer);
        layer.sinks = g.window.sinks;
        kvq::cache cache({layer}, {.keys = kvq::make_format<kvq::int8, kvq::scalar>(),
                                   .sinks = g.sinks,
                                   .recent = g.recent,
                                   .page_tokens = page,
                                   .rollback = g.rollback,
                                   .repack = 0.0f});  // the device does not repack
        const auto append = [&](both& b, int n) {
            const kvq::token_view<const float> x(values.data(), n, 1, dim);
            b.host.append(0, x, x);
        };
        pools p(page);
        std::vector<both> all;
        const auto add = [&](kvq::sequence host) {
            all.push_back({{}, std::move(host)});
            all.back().pages.set_target(0);
        };
        add(cache.new_sequence());
        for (int i = 0; i < 300; ++i) {
            const auto at = static_cast<std::size_t>(random.between(0, static_cast<int>(all.size()) - 1));
            both& b = all[at];
            const int tokens = b.pages.tokens(), what = random.between(0, 11);
            if (what < 6) {
                const int n = what == 0 ? random.between(1, 100) : random.between(1, step);
                if (tokens + n > most) continue;
                ensure(p, b.pages, n, g);
                const int pages = b.pages.pages_after(n, g), before = b.pages.committed(),
                          committed = b.pages.committed_after(n, g), held = b.pages.pages();
                // What the first new query sees of pages.
                int seen = b.pages.gone();
                while (seen < held && b.pages[seen].end() <= g.window.first_seen(tokens)) ++seen;
                b.pages.grow(n, g, p);
                REQUIRE(b.pages.pages() == pages);
                REQUIRE(b.pages.committed() == committed);
                for (int page_of = seen; n <= step && page_of < held; ++page_of)
                    REQUIRE((page_of < b.pages.first_in_16_bit() ? b.pages.quantized_page(page_of)
                                                                 : b.pages.window_page(page_of)) != nullptr);
                all_gone += b.pages.gone();
                // What a step quantizes has its 16-bit values until the next one.
                if (n <= step)
                    for (int page_of = before; page_of < committed; ++page_of)
                        REQUIRE(b.pages.window_page(page_of) != nullptr);
                append(b, n);
            } else if (what < 9) {
                const int n = std::max(0, tokens - random.between(0, random.one_in(2) ? g.rollback : tokens));
                if (!b.pages.table.reaches(n, g)) {
                    CHECK_THROWS_AS(b.host.trim(n), kvq::argument_error);
                    continue;
                }
                const int left = b.pages.committed_after_trim(n, g);
                b.pages.trim(n, g);
                REQUIRE(b.pages.committed() == left);
                all_cuts += b.pages.cut_pages(g);
                b.host.trim(n);
            } else if (what < 10 && drafts > 0) {
                // As cache::begin_draft() and keep().
                const int n = random.between(1, drafts), kept = random.between(0, n);
                if (tokens + n > most) continue;
                make_room(p.window_pages, b.pages.missing_draft_pages(n, g));
                make_room(p.sink_pages, g.sink_pages(tokens + n));
                b.pages.draft(n, g, p);
                for (int page_of = b.pages.first_in_window(); page_of < g.pages(b.pages.paged_tokens(g) + n);
                     ++page_of)
                    REQUIRE(b.pages.window_page(page_of) != nullptr);
                REQUIRE(g.pages(b.pages.paged_tokens(g) + n) - b.pages.first_in_window() <= g.ring);
                ensure(p, b.pages, kept, g);
                b.pages.drafted = 0;
                b.pages.grow(kept, g, p);
                b.pages.release_unused(g);
                if (kept > 0) append(b, kept);
            } else if (all.size() < 4) {
                // As cache::fork(): quantized pages are shared, others are copied.
                add(b.host.fork());
                both& copy = all.back();
                copy.pages = all[at].pages;
                copy.pages.leaving.clear();
                const auto own = [](kvq::page_ref& page_of, gpu::free_pages& pool) {
                    if (!page_of || page_of->format != 0) return;
                    make_room(pool, 1);
                    page_of = pool.take();
                };
                for (kvq::page_span& span : copy.pages.table.spans)
                    for (auto* list : {&span.pages, &span.copies}) own((*list)[0], p.window_pages);
                for (kvq::page_ref& page_of : copy.pages.sinks) own(page_of, p.sink_pages);
            } else {
                all.pop_back();
            }
            std::set<const kvq::page*> quantized, window;
            for (const both& one : all) {
                require_same(one, g);
                for (const kvq::page_span& span : one.pages.table.spans)
                    for (const auto* list : {&span.pages, &span.copies}) {
                        const kvq::page* const held = (*list)[0].get();
                        if (held == nullptr) continue;
                        if (held->format == 0)
                            REQUIRE(window.insert(held).second);
                        else
                            quantized.insert(held);
                    }
                for (const auto& l : one.pages.leaving) {
                    if (l.held->format == 0)
                        REQUIRE(window.insert(l.held.get()).second);
                    else
                        quantized.insert(l.held.get());
                }
            }
            REQUIRE(static_cast<int>(window.size()) == p.window_pages.used());
            REQUIRE(static_cast<int>(quantized.size()) == p.quantized_pages.used());
        }
        all.clear();
        CHECK(p.quantized_pages.used() + p.window_pages.used() + p.sink_pages.used() == 0);
    }
    CHECK(all_cuts > 0);
    CHECK(all_gone > 0);
}

TEST_CASE("pages on the GPU keep their numbers in a text of any length") {
    gpu::device_geometry g{{2, 8, 4, {20}}, 4, 6};
    pools p(g.page_tokens);
    gpu::sequence_pages s;
    s.set_target(0);
    constexpr int step = 64, last = (kvq::detail::page_table::most_freed + 50) * 4 / step;
    for (int i = 0; i < last; ++i) {
        ensure(p, s, step, g);
        s.grow(step, g, p);
        REQUIRE(s.skipped(g) == 0);
        REQUIRE(s[s.gone()].first_token == g.first_token(s.gone()));
    }
    CHECK(s.gone() > kvq::detail::page_table::most_freed);
    s.trim(0, g);
    CHECK(s.gone() == 0);
}

}  // namespace gpu_sequence_pages_tests
