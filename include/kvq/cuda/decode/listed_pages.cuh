// Lists of tokens for every query, and where these tokens lie in the pages of a sequence.
//
// A position of the sequence is a paged position as well, unless pages are cut (page_cuts.hpp): then the page
// is found by bisection.
// Contract: a position below 0, behind the query's own, of a drafted token that the query does not see, or in
// no page is none. A token that is listed twice counts twice.
#pragma once

#include "../layout/held_tokens.cuh"
#include "attention_args.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Lists of all queries of a launch.
struct listed_queries {
    token_lists lists[2];
    int kv_heads, query_tokens, behind, drafted;
    const std::uint64_t* ancestors;
    bool places;

    listed_queries() = default;
    explicit listed_queries(const list_options& o)
        : lists{o.selected, o.window},
          kv_heads(o.kv_heads),
          query_tokens(o.query_tokens),
          behind(o.behind),
          drafted(o.drafted == 0 ? o.query_tokens + o.behind : o.drafted),
          ancestors(o.ancestors),
          places(o.places) {}

    /// Of a query.
    KVQ_HD int count() const noexcept { return lists[0].count + lists[1].count; }
    /// Token i of both lists.
    __device__ __forceinline__ int token(int query, int kv_head, int i) const {
        const auto at = [&](const token_lists& list, int number) {
            const int row = query * kv_heads + (kv_heads == 1 ? 0 : kv_head);
            return __ldg(list.tokens + static_cast<std::size_t>(row) * static_cast<std::size_t>(list.count) +
                         static_cast<std::size_t>(number));
        };
        if (i < lists[0].count) return at(lists[0], i);
        i -= lists[0].count;
        return i < lists[1].count ? at(lists[1], i) : -1;
    }
};

/// Where a listed token lies.
struct listed_token {
    int part = -1;  // none
    int page = 0, in_page = 0;
};

/// Finds the tokens of a query. Args: parts, recent, lists, and the lengths of sequences.
template <class Args>
struct listed_pages {
    static constexpr int parts = decltype(Args::parts)::count;
    const Args& args;
    int sequence, seen;  // tokens before this position
    int draft;           // positions from here on are seen if their bit of `visible` is set
    std::uint64_t visible = ~std::uint64_t{0};
    sequence_cut cut;
    token_range held[parts];

    __device__ __forceinline__ listed_pages(const Args& a, int query)
        : args(a), sequence(query / a.lists.query_tokens), cut(cut_of(get<0>(a.parts).cuts, sequence)) {
        const int length = __ldg(a.a.work.tokens + sequence);
        seen = length - cut.skipped - a.lists.behind - a.lists.query_tokens +
               (query - sequence * a.lists.query_tokens) + 1;
        draft = seen;
        if (a.lists.ancestors != nullptr) {
            draft = length - cut.skipped - a.lists.drafted;
            visible = __ldg(reinterpret_cast<const unsigned long long*>(a.lists.ancestors) + query);
        }
        static_for<parts>([&](auto number) {
            constexpr int i = decltype(number)::value;
            held[i] = held_tokens(get<i>(a.parts), sequence, length, a.recent);
        });
    }
    /// What the table says of a position, in every part: read early, used late.
    struct entries {
        int page[parts], in_page[parts];
    };
    __device__ __forceinline__ entries look_up(int position) const {
        entries e;
#pragma unroll
        for (int i = 0; i < parts; ++i) e.page[i] = -1;
        if (position < 0) return e;
        const bool places = args.lists.places;
        if (!places) {
            if (position >= seen) return e;
            if (position >= draft && (visible >> (position - draft & 63) & 1) == 0) return e;
            if (cut.skipped != 0)
                position = first_seen(get<0>(args.parts).cuts, sequence, position + cut.skipped);
        }
        static_for<parts>([&](auto number) {
            constexpr int i = decltype(number)::value;
            const auto& part = get<i>(args.parts);
            constexpr int page_tokens = std::remove_cvref_t<decltype(part)>::pair_type::page_tokens;
            const int at = places ? position : position - part.cache.first_token,
                      page_number = at / page_tokens;
            e.in_page[i] = at - page_number * page_tokens;
            if (places) {
                if (i == 0) e.page[i] = page_number;
            } else if (at >= held[i].first && at < held[i].end) {
                const int column =
                    part.range == page_range::window ? page_number % part.cache.table_columns : page_number;
                e.page[i] = __ldg(part.cache.block_table + part.cache.table_entry(sequence, column));
            }
        });
        return e;
    }
    __device__ __forceinline__ static listed_token found(const entries& e) {
        listed_token token;
#pragma unroll
        for (int i = 0; i < parts; ++i)
            if (e.page[i] >= 0) token = {i, e.page[i], e.in_page[i]};
        return token;
    }
    __device__ __forceinline__ listed_token find(int position) const { return found(look_up(position)); }
};

}}}  // namespace kvq::cuda::detail
