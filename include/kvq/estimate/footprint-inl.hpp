// Definitions of footprint.hpp.
#pragma once

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "../cache/chunk.hpp"
#include "../core/error.hpp"
#include "footprint.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

/// Number of committed pages whose age in a layer of n tokens is at least `age`.
KVQ_FUNC int pages_of_age(const page_geometry& g, int age, int n) noexcept {
    return smaller(g.committed(n), larger(0, n - age - g.sinks) / g.page_tokens);
}

/// Does a step that ends or begins at `tokens` make a plan of keys, and commit the pages that waited for it?
/// `rollback` tokens later it drops their copies.
KVQ_FUNC bool makes_plan(const page_geometry& g, int tokens, int chunk) noexcept {
    return g.commits_from > 0 && tokens >= g.commits_from - larger(1, chunk) &&
           tokens - g.commits_from < larger(g.page_tokens, chunk);
}

KVQ_FUNC void add_layer(const cache& of, tensor role, int layer, int tokens, int chunk,
                        const step_down_policy& policy, std::array<std::size_t, 2>& shared,
                        footprint_report& f) {
    const page_geometry g = of.geometry(layer);
    const int target = of.target_format(role, layer);
    const int pages = g.pages(tokens), committed = g.committed(tokens);
    const auto bytes = [&](int format, int page_tokens) {
        return of.page_bytes(role, layer, format, page_tokens);
    };
    const std::size_t window_page = bytes(0, g.page_tokens);
    std::vector<changed_pages> changes;
    if (layer >= policy.first_layers_kept && layer < of.layer_count() - policy.last_layers_kept)
        for (const tier& t : policy.tiers) {
            // A page only ever shrinks.
            const int now = changes.empty() ? target : changes.back().format,
                      own = of.table(role).index_of(role == tensor::key ? t.format.key : t.format.value);
            if (bytes(own, g.page_tokens) < bytes(now, g.page_tokens))
                changes.push_back({pages_of_age(g, t.age, tokens), own});
        }
    const auto add = [&](const alike_pages& p) {
        std::size_t& part = p.copies ? f.rollback : p.format == 0 ? f.window : f.quantized;
        for (const auto& [sum, size] :
             {std::pair{&part, bytes(p.format, p.tokens)}, {&f.bookkeeping, sizeof(page)}})
            *sum = bounded_sum(*sum, bounded_product(static_cast<std::size_t>(p.count), size));
    };
    for_each_alike(g, g.sinks, tokens, of.options().rollback, target, changes, add);
    // Window pages that a call frees only after it has all its new pages: recent pages that it quantizes,
    // copies that `rollback` no longer covers, one page that was begun, and one that serves as scratch or, in
    // a chunk of prefill(), the pages of the chunk.
    // Without pages to quantize: only the page that was begun, if it was shared or is enlarged.
    const int reach = of.options().rollback == 0 ? 0 : ceil_div(of.options().rollback, g.page_tokens);
    // Never more than the pages there are: a chunk may be any number.
    const int chunk_pages = ceil_div(smaller(larger(0, chunk), tokens), g.page_tokens) + 1;
    const auto held = static_cast<std::size_t>(
        makes_plan(g, tokens, chunk) || makes_plan(g, tokens - of.options().rollback, chunk) ? pages + 1
        : committed == 0 || target == 0
            ? 1
            : smaller(ceil_div(g.recent, g.page_tokens) + 2 + reach + chunk_pages, pages + 1));
    // A layer that others share holds the chunk while the next layers have theirs.
    const std::size_t bytes_held = bounded_product(held, page_pool::allocation(window_page));
    std::size_t& sum = shared[static_cast<std::size_t>(role)];
    if (of.is_shared(layer)) sum = bounded_sum(sum, bytes_held);
    f.transient = larger(f.transient, bytes_held);
}

/// The recurrent state of a sequence of so many tokens, after steps of one token. Returns the bytes of its
/// tables.
KVQ_FUNC std::size_t add_state(const cache& of, int tokens, footprint_report& f) {
    const state_layout& layout = *of.state_layout();
    const snapshot_policy& policy = of.options().snapshots;
    const std::size_t due = policy.every == 0 ? 0 : static_cast<std::size_t>(tokens / policy.every),
                      kept = smaller(due, policy.most_bytes / layout.snapshot_bytes());
    const state_usage u = recurrent_state::footprint(layout, static_cast<int>(kept));
    const std::size_t headers = u.pages * sizeof(page);
    if (tokens > 0) {
        f.state = u.live + u.snapshots;
        f.bookkeeping = bounded_sum(f.bookkeeping, headers);
    }
    return u.bookkeeping - headers;
}

}

KVQ_FUNC footprint_report footprint(const cache& of, int tokens, int sequences, const attention_use& use,
                                    const step_down_policy& policy) {
    detail::check_policy(of, policy);
    detail::expect(tokens >= 0, "a footprint needs at least 0 tokens, got ", tokens);
    detail::expect(tokens <= (std::numeric_limits<int>::max)() - of.options().page_tokens, "a footprint of ",
                   tokens, " tokens: no sequence takes that many");
    detail::expect(use.chunk >= 0, "a chunk of ", use.chunk, " tokens");
    detail::expect(use.cross_tokens >= 0 &&
                       use.cross_tokens <= (std::numeric_limits<int>::max)() - of.options().page_tokens,
                   "a footprint of ", use.cross_tokens, " tokens in layers with cross attention");
    detail::expect(sequences >= 0, "a footprint needs at least 0 sequences, got ", sequences);
    footprint_report f;
    std::array<std::size_t, 2> shared{};  // temporary bytes of K and V
    // The capacity of the tables of spans, and the lists of a chunk.
    std::size_t tables = 0, most_spans = 0, plan = 0;
    for (int layer = 0; layer < of.layer_count(); ++layer) {
        if (!of.holds_tokens(layer)) continue;
        const bool cross = of.geometry(layer).window.cross;
        const int n = cross ? use.cross_tokens : tokens, chunk = cross && use.chunk > 0 ? n : use.chunk;
        const page_geometry g = of.geometry(layer);
        const auto spans = static_cast<std::size_t>(g.spans(n));
        const int front = g.first_needed(n, of.options().rollback),
                  left = detail::larger(0, front - g.sinks) / g.page_tokens;
        const auto uncounted = static_cast<std::size_t>(left - detail::page_table::freed_spans(front, g));
        tables = detail::bounded_sum(tables, detail::table_capacity(spans - uncounted) * sizeof(page_span));
        most_spans = detail::larger(most_spans, spans);
        if (detail::makes_plan(g, n, chunk)) plan = detail::larger(plan, detail::plan_bytes(of, layer));
        for (const tensor role : of.tensors(layer))
            detail::add_layer(of, role, layer, n, chunk, cross ? step_down_policy{} : policy, shared, f);
    }
    f.transient = detail::bounded_sum(f.transient, detail::larger(shared[0], shared[1]));
    const std::size_t state_tables = of.state_layout() ? detail::add_state(of, tokens, f) : 0;
    const std::size_t headers = f.bookkeeping;
    const std::size_t table = detail::table_capacity(most_spans) * sizeof(page_span);
    // Far above any address space, and sums of a few such numbers do not overflow.
    constexpr std::size_t most = std::size_t{1} << 60;
    detail::expect(f.transient <= most / 4, "a footprint of ", tokens, " tokens is larger than memory");
    f.transient =
        2 * f.transient + table / 2 + 2 * most_spans * 2 * sizeof(page_ref) + sizeof(detail::chunk) + plan;
    // A snapshot is taken before another one goes, and beside copies of the tables.
    if (of.state_layout() && of.options().snapshots.every > 0)
        f.transient = detail::larger(f.transient, of.state_layout()->snapshot_bytes() + 2 * state_tables);
    const auto layers = static_cast<std::size_t>(of.layer_count());
    for (const std::size_t more :
         {detail::bounded_product(layers, sizeof(detail::page_table)), tables, state_tables})
        f.bookkeeping = detail::bounded_sum(f.bookkeeping, more);
    f.workspace = of.scratch_floats() * sizeof(float);
    for (std::size_t* part : {&f.quantized, &f.window, &f.rollback, &f.state, &f.bookkeeping, &f.workspace}) {
        detail::expect(
            *part <= most && (sequences == 0 || *part <= most / static_cast<std::size_t>(sequences)),
            "a footprint of ", sequences, " sequences with ", *part, " bytes each is too large");
        *part *= static_cast<std::size_t>(sequences);
    }
    if (use.q_heads > 0)
        f.attention =
            of.attention_workspace(detail::larger(tokens, use.cross_tokens), use.q_heads, use.q_tokens,
                                   use.threads, use.mods ? *use.mods : mods_view(causal{}));
    if (of.options().preallocate) {
        const std::size_t used =
            f.quantized + f.window + f.rollback + f.state + headers * static_cast<std::size_t>(sequences);
        f.unused = of.options().byte_budget - detail::smaller(used, of.options().byte_budget);
    }
    f.total =
        f.quantized + f.window + f.rollback + f.state + f.bookkeeping + f.workspace + f.attention + f.unused;
    return f;
}

KVQ_FUNC int longest_context(const cache& of, std::size_t budget, int sequences, const attention_use& use,
                             const step_down_policy& policy) {
    const page_geometry g = of.geometry();
    const int rollback = of.options().rollback;
    std::vector<page_geometry> windows;
    int commits_from = 0;
    for (int layer = 0; layer < of.layer_count(); ++layer) {
        const page_geometry own = of.geometry(layer);
        commits_from = detail::larger(commits_from, own.commits_from);
        const auto same = [&](const page_geometry& w) { return w.window == own.window; };
        if (own.window && std::none_of(windows.begin(), windows.end(), same)) windows.push_back(own);
    }
    // 16-bit pages grow in steps of positions: after so many tokens, pages lie alike among these steps again.
    const long long period = std::lcm(static_cast<long long>(g.page_tokens), page_geometry::window_step);
    const auto fits = [&](int n) {
        // Bytes fall when a page is quantized or steps down and when its 16-bit copy is freed. So the lengths
        // just before such a fall have the peaks; the lengths of the last period are enough.
        const auto falls = [&](int m) {
            bool steps = std::any_of(windows.begin(), windows.end(), [&](const page_geometry& w) {
                return w.first_needed(m + 1, rollback) > w.first_needed(m, rollback);
            });
            steps = steps || g.committed(m + 1) > g.committed(m) ||
                    g.committed(m + 1 - rollback) > g.committed(m - rollback) || m + 1 == commits_from ||
                    m + 1 - rollback == commits_from;
            for (const tier& t : policy.tiers)
                steps = steps || detail::pages_of_age(g, t.age, m + 1) > detail::pages_of_age(g, t.age, m);
            return steps;
        };
        const auto holds = [&](int m) {
            const footprint_report f = footprint(of, m, sequences, use, policy);
            const std::size_t more = m > 0 ? f.transient : 0;
            if (of.options().preallocate) return f.total <= budget && more <= f.unused;
            return f.total + more <= budget;
        };
        const auto period_holds = [&](int end) {
            for (int m = static_cast<int>(detail::larger(0LL, end - period)); m <= end; ++m)
                if ((m == end || falls(m)) && !holds(m)) return false;
            return true;
        };
        if (!period_holds(n)) return false;
        // Pages wait in 16 bit for a plan of their keys, and have copies a little longer.
        if (commits_from > 0 && n > commits_from + rollback &&
            !(period_holds(commits_from) && period_holds(commits_from + rollback)))
            return false;
        // A layer with chunks holds most just before a trim by `rollback` tokens cannot reach its chunk any
        // more.
        for (const page_geometry& w : windows)
            if (const int begins = w.first_needed(n, rollback); w.window.chunked && begins > 0)
                if (!period_holds(begins + rollback)) return false;
        return true;
    };
    if (!fits(0)) return -1;
    int low = 0, high = 1;
    while (high < (1 << 29) && fits(high)) {
        low = high;
        high *= 2;
    }
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        (fits(middle) ? low : high) = middle;
    }
    return low;
}

}}
