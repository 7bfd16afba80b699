// Ready-made masks (attention/mods.hpp): which keys a query attends to.
//
//   causal            itself and the tokens before it; the mask that holds when none lifts it
//   bidirectional     all tokens of the sequence                           an encoder, or a block of
//                                                                          diffusion
//   cross_attention   the same for queries that are no tokens of the sequence
//   sliding_window    the last W tokens up to itself                       sink_window: and the first S
//   prefix_lm         causal, and the first P tokens for all queries       Raffel et al., arXiv 1910.10683,
//                                                                          section 3.2
//   token_ranges      tokens of given ranges, per query or for all         models that choose by themselves,
//                                                                          block-sparse masks
//   document_mask     tokens of its own document                           several documents packed into one
//                                                                          sequence
//   leading_keys      the first n tokens, n given for each query           a part of a context: its later
//                                                                          tokens lie behind the query
//
// Positions are those of the sequence: 0 is its first token. Every mask answers for pages in O(1), documents
// and ranges in O(log) of their number, ranges that differ between queries for every query of a block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "mods.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

namespace detail {

/// The first i below n for which above(i) holds, or n; it holds for all later ones. O(log n)
template <class Above>
std::size_t first_place(std::size_t n, Above above) noexcept {
    std::size_t low = 0, high = n;
    while (low < high) {
        const std::size_t middle = low + (high - low) / 2;
        if (above(middle))
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

}  // namespace detail

/// A query attends to itself and all tokens before it.
struct causal {
    static constexpr bool is_causal = true;
};

/// A query attends to all tokens of the sequence, later ones too.
struct bidirectional {
    static constexpr bool is_causal = false;
};

/// Queries without positions attend to all tokens; their number is not limited by the length of the sequence.
/// Score modifiers and other masks get the number of the query, from 0 on, as its position.
struct cross_attention {
    static constexpr bool is_causal = false;
    static constexpr bool has_query_positions = false;
};

/// A query attends to itself and the `tokens - 1` keys before it.
struct sliding_window {
    int tokens;  ///< at least 1

    bool mask(int q_pos, int k_pos) const noexcept { return k_pos > q_pos - tokens; }
    page_visibility mask_page(int first_q, int last_q, int first_k, int end_k) const noexcept {
        if (end_k <= first_q - tokens + 1) return page_visibility::none;
        return first_k > last_q - tokens ? page_visibility::all : page_visibility::some;
    }
    void check(int) const {
        detail::expect(tokens >= 1, "a sliding window has at least 1 token, got ", tokens);
    }
};

/// The same, and always the first `sinks` keys; Xiao et al., arXiv 2309.17453.
struct sink_window {
    int tokens;  ///< at least 1
    int sinks;   ///< at least 0

    bool mask(int q_pos, int k_pos) const noexcept { return k_pos > q_pos - tokens || k_pos < sinks; }
    page_visibility mask_page(int first_q, int last_q, int first_k, int end_k) const noexcept {
        if (end_k <= sinks) return page_visibility::all;
        if (first_k >= sinks && end_k <= first_q - tokens + 1) return page_visibility::none;
        return detail::larger(first_k, sinks) > last_q - tokens ? page_visibility::all
                                                                : page_visibility::some;
    }
    void check(int) const {
        detail::expect(tokens >= 1 && sinks >= 0, "a sliding window has at least 1 token and 0 sinks, got ",
                       tokens, " and ", sinks);
    }
};

/// Every query attends to the first `prefix` tokens, and causally to the others.
struct prefix_lm {
    int prefix;  ///< at least 0

    static constexpr bool is_causal = false;
    bool mask(int q_pos, int k_pos) const noexcept { return k_pos <= q_pos || k_pos < prefix; }
    page_visibility mask_page(int first_q, int last_q, int first_k, int end_k) const noexcept {
        if (end_k <= prefix || end_k - 1 <= first_q) return page_visibility::all;
        return first_k > last_q && first_k >= prefix ? page_visibility::none : page_visibility::some;
    }
    void check(int) const { detail::expect(prefix >= 0, "a prefix has at least 0 tokens, got ", prefix); }
};

/// A query attends to the tokens of its own document, causally unless `bidirectional` is a part as well.
/// starts: position of the first token of each document, in order, the first one 0; documents may be empty.
/// Tokens from the last start on are one document, so cu_seqlens of other engines can be given as they are.
/// The span is not copied.
struct document_mask {
    std::span<const int> starts;

    /// Positions [begin, end) of the document that holds position `of`.
    struct range {
        int begin, end;
    };
    range document(int of) const noexcept {
        const std::size_t next =
            detail::first_place(starts.size(), [&](std::size_t i) { return starts[i] > of; });
        return {next == 0 ? 0 : starts[next - 1],
                next == starts.size() ? (std::numeric_limits<int>::max)() : starts[next]};
    }

    bool mask(int q_pos, int k_pos) const noexcept {
        const range own = document(q_pos);
        return k_pos >= own.begin && k_pos < own.end;
    }
    void mask_row(float* scores, int n, int q_pos, int first_k) const noexcept {
        const range own = document(q_pos);
        for (int t = 0; t < detail::smaller(n, own.begin - first_k); ++t) scores[t] = hidden_score;
        for (int t = detail::larger(0, own.end - first_k); t < n; ++t) scores[t] = hidden_score;
    }
    page_visibility mask_page(int first_q, int last_q, int first_k, int end_k) const noexcept {
        const range first = document(first_q), last = document(last_q);
        if (end_k <= first.begin || first_k >= last.end) return page_visibility::none;
        return first_k >= last.begin && end_k <= first.end ? page_visibility::all : page_visibility::some;
    }
    /// O(documents)
    void check(int) const {
        detail::expect(!starts.empty(), "a document mask needs the start of at least one document");
        detail::expect(starts[0] == 0, "the first document starts at 0, not at ", starts[0]);
        for (std::size_t i = 1; i < starts.size(); ++i)
            detail::expect(starts[i - 1] <= starts[i], "document ", i, " starts at ", starts[i],
                           ", before document ", i - 1, " at ", starts[i - 1]);
    }
};

/// A query attends to the tokens of given ranges, causally unless `bidirectional` or `cross_attention` is a
/// part as well. Pages without such a token are not read. The spans are not copied.
struct token_ranges {
    std::span<const token_range>
        ranges;  ///< of a query: ascending, without overlap, each with at least one token
    /// Empty: all queries attend to all `ranges`. Else query i attends to ranges [starts[i], starts[i + 1]):
    /// one entry per query, and the end.
    std::span<const int> starts = {};
    /// With `starts`: the position of query 0, tokens() - q.tokens after the tokens were appended (0 for
    /// cross_attention). Queries at other positions attend to nothing.
    int first_query = 0;

    std::span<const token_range> of(int q_pos) const noexcept {
        if (starts.empty()) return ranges;
        // 64 bits: first_query is the caller's, and may be any.
        const std::int64_t i = std::int64_t{q_pos} - first_query;
        if (i < 0 || i + 1 >= static_cast<std::int64_t>(starts.size())) return {};
        const auto at = static_cast<std::size_t>(i);
        return ranges.subspan(static_cast<std::size_t>(starts[at]),
                              static_cast<std::size_t>(starts[at + 1] - starts[at]));
    }

    bool mask(int q_pos, int k_pos) const noexcept {
        return page_of(q_pos, k_pos, k_pos + 1) != page_visibility::none;
    }
    void mask_row(float* scores, int n, int q_pos, int first_k) const noexcept {
        const auto own = of(q_pos);
        int t = 0;
        for (auto r = ending_after(own, first_k); r != own.end() && r->begin < first_k + n; ++r) {
            for (; t < r->begin - first_k; ++t) scores[t] = hidden_score;
            t = r->end - first_k;
        }
        for (; t < n; ++t) scores[t] = hidden_score;
    }
    page_visibility mask_page(int first_q, int last_q, int first_k, int end_k) const noexcept {
        if (starts.empty()) return page_of(first_q, first_k, end_k);
        page_visibility seen = page_of(first_q, first_k, end_k);
        for (int q = first_q + 1; q <= last_q && seen != page_visibility::some; ++q)
            if (page_of(q, first_k, end_k) != seen) seen = page_visibility::some;
        return seen;
    }
    /// O(ranges)
    void check(int) const {
        const auto all = static_cast<int>(ranges.size());
        std::size_t query = 0;
        for (std::size_t i = 0; i < starts.size(); ++i)
            detail::expect(starts[i] >= 0 && starts[i] <= all && (i == 0 || starts[i - 1] <= starts[i]),
                           "the ranges of query ", i, " start at ", starts[i], " of ", all,
                           " ranges: starts ascend");
        for (std::size_t i = 0; i < ranges.size(); ++i) {
            const token_range& r = ranges[i];
            bool first = i == 0;
            for (; query < starts.size() && starts[query] <= static_cast<int>(i); ++query)
                first = first || starts[query] == static_cast<int>(i);
            detail::expect(r.begin >= 0 && r.begin < r.end && (first || ranges[i - 1].end <= r.begin),
                           "range ", i, " of tokens is [", r.begin, ", ", r.end,
                           "): ranges of a query have at least one token and ascend");
        }
    }

private:
    static std::span<const token_range>::iterator ending_after(std::span<const token_range> own,
                                                               int token) noexcept {
        return own.begin() + static_cast<std::ptrdiff_t>(detail::first_place(
                                 own.size(), [&](std::size_t i) { return own[i].end > token; }));
    }
    /// What one query sees.
    page_visibility page_of(int q_pos, int first_k, int end_k) const noexcept {
        const auto own = of(q_pos);
        const auto r = ending_after(own, first_k);
        if (r == own.end() || r->begin >= end_k) return page_visibility::none;
        return r->begin <= first_k && r->end >= end_k ? page_visibility::all : page_visibility::some;
    }
};

/// Query i attends to the first counts[i] tokens of the sequence; the counts do not fall. Queries have no
/// positions, so that they may be tokens of another sequence. The span is not copied.
struct leading_keys {
    std::span<const int> counts;  ///< one per query

    static constexpr bool is_causal = false;
    static constexpr bool has_query_positions = false;
    bool mask(int q_pos, int k_pos) const noexcept { return k_pos < counts[static_cast<std::size_t>(q_pos)]; }
    page_visibility mask_page(int first_q, int last_q, int first_k, int end_k) const noexcept {
        if (first_k >= counts[static_cast<std::size_t>(last_q)]) return page_visibility::none;
        return end_k <= counts[static_cast<std::size_t>(first_q)] ? page_visibility::all
                                                                  : page_visibility::some;
    }
    /// O(queries)
    void check(int) const {
        for (std::size_t i = 1; i < counts.size(); ++i)
            detail::expect(counts[i - 1] <= counts[i], "query ", i, " sees ", counts[i],
                           " leading keys, fewer than the ", counts[i - 1], " of the query before it");
    }
};

}}  // namespace kvq
