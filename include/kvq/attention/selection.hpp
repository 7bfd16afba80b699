// Reading only what matters: three parts of `mods` beside masks and score modifiers, each off unless asked
// for.
//
//   listed_tokens{{positions, 2048}}   the tokens that the caller lists for every query: models that select
//                                      tokens (DeepSeek V3.2, NSA)
//   selected_pages{.tokens = 4096}   the best pages of every kv head, about so many tokens, and all pages of
//                                    16 bit
//   skipped_values{.mass = 1e-3f}    values of pages whose weights are at most so much of a row, together,
//                                    are not read
//
// listed_tokens reads the codes of the listed tokens and nothing else, so that the time grows with the list
// and not with the context. selected_pages acts like a mask that attention makes: its outputs are those of
// dense attention under a mask that shows the chosen pages, bit for bit. Pages are ranked by an estimate of
// their scores from parameters alone (format_functions::estimate_scores), or from stored minima and maxima of
// channels (format/bounds.hpp); Tang et al., arXiv 2406.10774, rank by the upper bound of minima and maxima.
// skipped_values keeps all scores, so that maximum, sum and log-sum-exp of a row stay exact: |error of a
// channel| <= mass left out * largest |value| of the channel, and mass left out <= `mass` for every row.
// Contract: which pages are read depends on the sequence, the queries and the options, not on threads or
// other members of a batch.
#pragma once

#include <cstdint>
#include <vector>

#include "../core/bits.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// Tokens [begin, end) of a sequence.
struct token_range {
    int begin = 0, end = 0;
    bool operator==(const token_range&) const = default;
};

/// `count` positions of tokens for every list, in any order; -1: none. A token that is listed twice counts
/// twice.
struct token_lists {
    const std::int32_t* tokens = nullptr;  ///< [queries][kv_heads][count], positions below tokens(layer)
    int count = 0;
};

/// Queries attend to the tokens of their lists, as far as masks and the window of the layer show them; the
/// causal mask among them. The lists are not copied. Without pages that are selected, or values that are
/// skipped.
struct listed_tokens {
    token_lists selected;
    token_lists window = {};  ///< a second list of the same softmax, such as the last tokens
    int queries = 1;          ///< query tokens of the call
    int kv_heads = 1;         ///< lists of a query: one for each kv head of the layer, or 1 for all of them

    /// Of one list of both kinds together.
    int count() const noexcept { return selected.count + window.count; }
    /// Entry i of the lists of a query and kv head, the window behind the selected tokens.
    int token(int query, int head, int i) const noexcept {
        const token_lists& of = i < selected.count ? selected : window;
        const std::ptrdiff_t list =
            std::ptrdiff_t{query} * kv_heads + (kv_heads == 1 ? 0 : std::ptrdiff_t{head});
        return of.tokens[list * of.count + (i < selected.count ? i : i - selected.count)];
    }

    const listed_tokens* lists() const noexcept { return this; }
    void check(int) const;
};

/// Tokens that queries [first_query, last_query] of the call read in a kv head.
struct chosen_tokens {
    int layer, kv_head, first_query, last_query;
    token_range tokens;
};

/// Queries read the upper plane alone of pages that have two (format/planes.hpp), as if they had its format:
/// drafts of speculative decoding, which a pass over both planes then checks.
struct upper_plane {
    bool only = true;

    bool upper_only() const noexcept { return only; }
};

/// What selected_pages did. Calls add to it after their last task; set it to {} to begin again.
struct selection_report {
    std::int64_t pages = 0;  ///< pages that masks show, once for every kv head and block of query rows
    std::int64_t read = 0;   ///< those that were read
    /// Runs of read pages are appended, if it is not null. They lie in the order of requests, kv heads,
    /// blocks of rows and tokens.
    std::vector<chosen_tokens>* chosen = nullptr;
};

/// What skipped_values did. Calls add to it after their last task; set it to {} to begin again.
struct skipping_report {
    std::int64_t pages = 0;    ///< value pages that were seen, once for every kv head and block of query rows
    std::int64_t skipped = 0;  ///< those that were not read
    std::int64_t rows = 0;     ///< query tokens x query heads
    double left_out = 0.0;     ///< sum over rows of the share of weights that was left out
    float most_left_out = 0.0f;  ///< of one row
};

/// Queries attend to the best pages. A page is chosen for all query heads of a kv head and all rows of a
/// block of queries (one token in decode), by its estimated weight in all of them. Always read: 16-bit pages
/// (sinks and recent tokens), the first page, the last two, and pages that hold tokens of the queries.
/// Where a page of keys has a format without an estimate (neither parameters per channel nor with_bounds()),
/// pages are ranked by their scores themselves, so that keys are read and values of other pages are not.
struct selected_pages {
    int tokens;  ///< at least 1: the best ceil(tokens / page_tokens) pages
    selection_report* report = nullptr;

    const selected_pages* selection() const noexcept { return this; }
    void check(int) const;
};

/// Values of the pages with the smallest weights are not read, as long as their weights are at most `mass` of
/// the sum of every row. `mass` is shared out by tokens, so that it bounds the whole row. The sum is bounded
/// from below by what is known when a key split of about 2048 tokens has all its scores: the sum of the
/// split, and that of the first page and the last two.
struct skipped_values {
    float mass;  ///< at least 0, less than 1; with 0 the outputs are those without it, bit for bit
    skipping_report* report = nullptr;

    const skipped_values* skipping() const noexcept { return this; }
    void check(int) const;
};

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "selection-inl.hpp"
#endif
