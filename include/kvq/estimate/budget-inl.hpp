// Definitions of budget.hpp.
#pragma once

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <vector>

#include "../cache/chunk.hpp"
#include "../cache/sequence.hpp"
#include "../core/error.hpp"
#include "../page/page_arena.hpp"
#include "budget.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

class budget_search {
public:
    /// Of the layers with a window. A layer that has freed n whole pages takes the bytes of one that is so
    /// much shorter and has freed none.
    budget_search(const cache& of, const budget_use& use, std::size_t multiple, const key_window& window)
        : of_(of),
          use_(use),
          g_(of.geometry()),
          rollback_(of.options().rollback),
          multiple_(multiple),
          stock_(of.pool().memory()) {
        if (window.cross) use_.tokens = use_.chunk = use.cross_tokens;
        if (window)
            use_.tokens = static_cast<int>(
                smaller(std::int64_t{use.tokens},
                        std::int64_t{g_.sinks} + window.tokens + rollback_ + 2 * g_.page_tokens + use.chunk));
        for (int layer = 0; layer < of.layer_count(); ++layer) {
            if (!of.holds_tokens(layer) || of.geometry(layer).window != window) continue;
            const std::array<int, 2> targets{of.target_format(tensor::key, layer),
                                             of.target_format(tensor::value, layer)};
            const auto known = std::find_if(kinds_.begin(), kinds_.end(), [&](const kind& k) {
                return k.targets == targets && alike(k.layer, layer) && k.shared == of.is_shared(layer);
            });
            if (known == kinds_.end())
                kinds_.push_back({targets, layer, 1, of.is_shared(layer), of.geometry(layer).commits_from});
            else
                ++known->layers;
        }
    }

    std::size_t of_sequence() {
        std::size_t most = most_in_step(0);
        if (use_.cuts == 0) return most;
        // Behind a cut, pages begin at any position, and 16-bit pages end at multiples of window_step.
        for (int offset = 1; offset < smaller(page_geometry::window_step, g_.page_tokens); ++offset)
            most = larger(most, most_in_step(offset));
        for (const kind& k : kinds_)
            for (std::size_t role = 0; role < of_.tensors(k.layer).size(); ++role)
                most += static_cast<std::size_t>(smaller(use_.cuts, use_.tokens)) *
                        static_cast<std::size_t>(k.layers) *
                        (page(k, role, 0, larger(g_.page_tokens, g_.sinks)) +
                         (k.targets[role] == 0 ? 0 : page(k, role, k.targets[role], g_.page_tokens)));
        return most;
    }

private:
    /// Layers with the same formats and shapes.
    struct kind {
        std::array<int, 2> targets;
        int layer, layers;  // the first of them, and their number
        bool shared;        // by other layers
        int commits_from;
    };
    bool alike(int a, int b) const noexcept {
        const cache_shape &x = of_.shape(a), &y = of_.shape(b);
        return x.kv_heads == y.kv_heads && x.head_dim == y.head_dim &&
               x.dim(tensor::value) == y.dim(tensor::value) && of_.tensors(a).size() == of_.tensors(b).size();
    }
    /// After so many tokens pages lie alike among the steps of 16-bit pages again.
    std::int64_t period() const noexcept {
        return std::lcm(std::int64_t{g_.page_tokens}, std::int64_t{page_geometry::window_step});
    }
    /// Tokens among which some are not committed or have copies, and two periods.
    std::int64_t reach() const noexcept { return 2 * period() + first_ + g_.recent + rollback_; }
    std::size_t page(const kind& k, std::size_t role, int format, int tokens) const {
        return allocation(of_.page_bytes(static_cast<tensor>(role), k.layer, format, tokens));
    }
    std::size_t allocation(std::size_t bytes) const noexcept {
        return round_up(page_pool::allocation(bytes), multiple_);
    }

    /// A layer of n tokens whose spans have no pages: the sinks, `offset` tokens of a page that was cut, then
    /// pages that begin at first_. Of the committed spans only the last one.
    page_table outline(const kind& k, int n) const {
        page_table table(of_.pool().memory(), k.targets[0], k.targets[1]);
        table.tokens = n;
        const auto add = [&](int first, int end, int room, bool committed, bool sinks) {
            table.spans.push_back({first, end - first, room, {}, {}, 0, sinks});
            table.committed += committed;
        };
        if (g_.sinks > 0 && n > 0) add(0, smaller(n, g_.sinks), g_.sinks, n >= g_.sinks, true);
        if (first_ > g_.sinks && n >= first_) add(g_.sinks, first_, first_ - g_.sinks, true, false);
        const page_geometry behind{first_, g_.recent, g_.page_tokens, {}, k.commits_from};
        const int committed = behind.committed(n);
        for (int i = larger(0, committed - 1); i < behind.pages(n); ++i)
            add(behind.first_token(i), smaller(n, behind.first_token(i + 1)), g_.page_tokens, i < committed,
                false);
        return table;
    }

    /// Bytes that a step from n to `after` tokens adds.
    std::size_t stock(const std::vector<page_table>& tables, int added) {
        stock_.clear();
        for (std::size_t i = 0; i < kinds_.size(); ++i) {
            chunk::count_reserved(of_, kinds_[i].layer, tables[i], added, stock_);
            stock_.end_layer(0, 0, kinds_[i].layers, kinds_[i].shared);
        }
        return stock_.bytes_to_fill(multiple_);
    }

    /// Bytes of pages of n tokens.
    std::size_t held(int n) const {
        std::size_t bytes = 0;
        page_geometry g = g_;
        for (const kind& k : kinds_)
            for (std::size_t role = 0; role < of_.tensors(k.layer).size(); ++role) {
                g.commits_from = k.commits_from;
                for_each_alike(g, first_, n, rollback_, k.targets[role], {}, [&](const alike_pages& p) {
                    bytes += static_cast<std::size_t>(k.layers) * static_cast<std::size_t>(p.count) *
                             page(k, role, p.format, p.tokens);
                });
            }
        return bytes;
    }

    /// May a layer of n tokens hold or need other bytes than one of n - 1?
    bool changes(int n) const noexcept {
        const auto at = [&](std::int64_t from, int step) { return (n - from) % step == 0; };
        const std::int64_t first = first_, commit = first + g_.recent;
        // 16-bit pages grow in steps, of positions or of their own tokens.
        const bool grows = at(1, page_geometry::window_step) ||
                           (n > first && (n - first - 1) % g_.page_tokens % page_geometry::window_step == 0);
        return n == g_.sinks || n == g_.sinks + 1 || grows || at(first, g_.page_tokens) ||
               at(first + 1, g_.page_tokens) || at(commit, g_.page_tokens) ||
               at(commit + rollback_, g_.page_tokens) || begins(n) || begins(n - rollback_);
    }
    /// Are pages committed from n tokens on that waited for a plan of their keys?
    bool begins(int n) const noexcept {
        return n > 0 &&
               std::any_of(kinds_.begin(), kinds_.end(), [n](const kind& k) { return k.commits_from == n; });
    }
    /// May a step to n tokens begin where pages wait for a plan, or have copies since?
    bool waits(int n) const noexcept {
        return std::any_of(kinds_.begin(), kinds_.end(), [&](const kind& k) {
            return k.commits_from > 0 && n >= k.commits_from - period() &&
                   n <= std::int64_t{k.commits_from} + rollback_ + use_.chunk;
        });
    }

    /// The most bytes at a time of a sequence whose pages begin behind the sinks and `offset` tokens.
    std::size_t most_in_step(int offset) {
        first_ = g_.sinks + offset;
        if (offset > 0 && use_.tokens <= first_) return 0;
        const int base = offset > 0 ? first_ : 0;
        const auto bounded = [&](std::int64_t n) {
            return static_cast<int>(larger(std::int64_t{base}, smaller(n, std::int64_t{use_.tokens})));
        };
        // Behind the sinks, one more period of tokens only adds pages: the longest sequences, of the last
        // period, and the longest chunks need most. The page of the sinks is held twice while it grows.
        std::vector<int> afters;
        const int last_period = bounded(use_.tokens - period()), behind_sinks = bounded(first_ + period());
        for (int n = base + 1; n <= use_.tokens; ++n) {
            if (n > behind_sinks && n <= last_period && !waits(n)) continue;
            if (changes(n) || n == base + 1) afters.push_back(n);
        }
        if (afters.empty()) return 0;
        std::size_t most = 0;
        std::vector<page_table> tables;
        const int last = afters.back();
        for (int before = bounded(std::int64_t{afters.front()} - use_.chunk); before < last; ++before) {
            if (!changes(before + 1)) continue;
            tables.clear();
            std::size_t bytes = 0;
            for (const int after : afters) {
                if (after <= before || after - before > use_.chunk) continue;
                if (before > larger(std::int64_t{base}, std::int64_t{after} - use_.chunk) + reach()) continue;
                if (tables.empty()) {
                    for (const kind& k : kinds_) tables.push_back(outline(k, before));
                    bytes = held(before);
                }
                most = larger(most, bytes + stock(tables, after - before));
            }
        }
        return most;
    }

    const cache& of_;
    budget_use use_;
    page_geometry g_;
    int rollback_;
    std::size_t multiple_;
    page_stock stock_;
    std::vector<kind> kinds_;
    int first_ = 0;  // where pages begin
};

/// Upper bound of the bytes of recurrent state: live pages, the snapshots that cache_options::snapshots
/// keeps, and one more that is taken before another one goes. Sizes of pages are multiples of
/// page_arena::alignment.
KVQ_FUNC std::size_t state_budget(const cache& of, const budget_use& use) {
    if (!of.state_layout() || use.tokens == 0) return 0;
    const snapshot_policy& policy = of.options().snapshots;
    const std::size_t one = of.state_layout()->snapshot_bytes(),
                      due = (policy.every == 0 ? 0 : static_cast<std::size_t>(use.tokens / policy.every)) +
                            (policy.prompt_end ? 1 : 0),
                      kept = smaller(due, policy.most_bytes / one);
    return bounded_sum(of.state_layout()->live_bytes(), bounded_product(due == 0 ? 0 : kept + 1, one));
}

}  // namespace detail

KVQ_FUNC std::size_t budget(const cache_options& options, const cache_shape& shape, const budget_use& use) {
    return budget(options, detail::equal_layers(shape), use);
}

KVQ_FUNC std::size_t budget(const cache_options& options, const std::vector<layer>& layers,
                            const budget_use& use) {
    cache_options plain = options;
    plain.byte_budget = page_pool::no_budget;
    plain.preallocate = false;
    const cache of(layers, plain);
    detail::expect(use.tokens >= 0, "a budget needs at least 0 tokens, got ", use.tokens);
    detail::expect(use.tokens <= (std::numeric_limits<int>::max)() - of.options().page_tokens,
                   "a budget for ", use.tokens, " tokens: no sequence takes that many");
    detail::expect(use.cross_tokens >= 0 &&
                       use.cross_tokens <= (std::numeric_limits<int>::max)() - of.options().page_tokens,
                   "a budget for ", use.cross_tokens, " tokens in layers with cross attention");
    detail::expect(use.sequences >= 0, "a budget needs at least 0 sequences, got ", use.sequences);
    detail::expect(use.chunk >= 1, "a budget for chunks of ", use.chunk, " tokens");
    detail::expect(use.cuts >= 0, "a budget needs at least 0 cuts, got ", use.cuts);
    const std::size_t multiple = options.preallocate ? detail::page_arena::alignment : 1;
    std::vector<key_window> windows;
    for (int layer = 0; layer < of.layer_count(); ++layer)
        if (const key_window w = of.geometry(layer).window;
            of.holds_tokens(layer) && std::find(windows.begin(), windows.end(), w) == windows.end())
            windows.push_back(w);
    std::size_t bytes = detail::state_budget(of, use);
    for (const key_window& w : windows)
        bytes = detail::bounded_sum(bytes, detail::budget_search(of, use, multiple, w).of_sequence());
    detail::expect(
        use.sequences == 0 || bytes <= (std::size_t{1} << 60) / static_cast<std::size_t>(use.sequences),
        "a budget for ", use.sequences, " sequences with ", bytes, " bytes each is too large");
    return bytes * static_cast<std::size_t>(use.sequences);
}

}}
