// What a prompt's attention takes: new tokens of every sequence, the pages before them, options; and how
// tiles are counted.
//
//   rows    the queries of a kv head: row r of a sequence is its new token r / group, query head r % group of
//           the kv head
//   block   `prefill_rows` rows of one sequence and kv head: what a thread block, or a cluster of two, works
//           on
//   tiles   of the pages, part after part, from the first token that a row of the block sees; then of the new
//           tokens
//
// Contract: see prefill() in prefill.cuh.
#pragma once

#include "../decode/attention_args.cuh"
#include "../layout/held_tokens.cuh"
#include "prefill_cells.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda { namespace detail {

/// More rows share each dequantized tile, but need registers for their outputs.
template <int Dim>
inline constexpr int prefill_rows = Dim <= 128   ? 256
                                    : Dim <= 256 ? 128
                                                 : 64;

/// Are keys of several widths among the parts?
template <class Args>
inline constexpr bool has_widths = false;
template <class T, class... Parts>
struct prefill_args;
template <class T, class... Parts>
inline constexpr bool has_widths<prefill_args<T, Parts...>> =
    (codec<typename Parts::pair_type::keys>.several_widths() || ...);

/// Arguments of kernels that change scores: `score` as in score_modifiers.cuh.
template <class Score, class Args>
struct scored_args : Args {
    Score score;
};
template <class Score, class Args>
inline constexpr bool has_widths<scored_args<Score, Args>> = has_widths<Args>;
template <class Args>
inline constexpr bool is_scored = requires(const Args& a) {
    a.score;
};

/// Rows of a block, and what they see.
struct prefill_block {
    int sequence, kv_head;
    int start, queries, new_tokens;  // of the sequence
    int history;          // paged length before the new tokens: positions below are paged (page_cuts.cuh)
    int cut_end;          // pages before it may be cut
    int first_row, rows;  // of the block; rows: of the sequence
    int first_query, last_query;  // the newest of the new tokens that these rows see
    /// Where queries and keys have each channel; null: channels stand in their own order.
    const std::uint16_t* order = nullptr;

    template <class Args>
    __device__ __forceinline__ prefill_block(const Args& a, int block_rows, int number, int head, int b)
        : sequence(b),
          kv_head(head),
          start(a.starts == nullptr ? 0 : __ldg(a.starts + b)),
          queries(a.starts == nullptr ? a.q.tokens : __ldg(a.starts + b + 1) - start),
          new_tokens(a.starts == nullptr ? a.k.tokens : queries),
          history(__ldg(a.tokens + b)),
          cut_end(cut_of(a.cuts, b).end),
          rows(queries * a.group) {
        // The last blocks see the most: they start first.
        const int blocks = kvq::detail::ceil_div(rows, block_rows);
        first_row = (blocks - 1 - number) * block_rows;
        first_query = a.newest_of_row(first_row);
        last_query = a.newest_of_row(kvq::detail::smaller(first_row + block_rows, rows) - 1);
    }
    __device__ __forceinline__ bool empty() const { return first_row < 0 || rows <= 0; }
};

/// The new tokens that rows of a block see, in tiles: [0, sinks) and [first, end). `first` is a whole number
/// of tiles.
struct new_range {
    int sinks, first, end;

    __device__ __forceinline__ int begin() const { return sinks > 0 ? 0 : first; }
    /// The tile behind the one that begins at `at`.
    __device__ __forceinline__ int behind(int at, int tile) const {
        at += tile;
        return at >= sinks && at < first ? first : at;
    }
    __device__ __forceinline__ int tiles(int tile) const {
        return kvq::detail::ceil_div(sinks, tile) + kvq::detail::ceil_div(end - first, tile);
    }
};

/// Of a call, without its pages.
template <class T>
struct prefill_args<T> {
    token_view<const T> q, k, v;
    token_view<T> out;
    const int* starts;  // [sequences + 1], or null: one sequence, all rows of q, and of k and v
    const int* tokens;  // [sequences], before the new ones
    int recent, group;
    float scale, softcap;
    row_window window;
    bool keep_sinks;
    int sinks;  // so many first tokens are seen in spite of a window, also those that are new
    const float* sink_logits;
    float* lse;
    page_cuts cuts;
    float* state_out;
    int lead;
    bool text_positions;  // scores depend on positions of the text, so on the shifts of pages

    /// Are all tokens of a part seen in spite of a window?
    template <class Part>
    __device__ __forceinline__ bool keeps() const {
        return keep_sinks && is_sink_part<Part>;
    }
    /// The newest of the new tokens that a row sees; -1: none.
    __device__ __forceinline__ int newest_of_row(int row) const {
        return kvq::detail::larger(row / group + lead, -1);
    }
    /// The first paged position that the query at this one sees; sinks aside.
    __device__ __forceinline__ int first_seen(const prefill_block& block, int position) const {
        if (window.tokens == 0) return -most_tokens;
        const bool skips = window.inverse != 0 && cuts.skipped != nullptr;
        return window.first_seen(position, skipped_tokens{skips ? __ldg(cuts.skipped + block.sequence) : 0});
    }
    /// That a row of the block sees.
    __device__ __forceinline__ int seen_from(const prefill_block& block) const {
        return first_seen(block, block.history + block.first_query);
    }
    __device__ __forceinline__ new_range new_tokens(const prefill_block& block, int tile) const {
        // A whole number of tiles from the first one.
        const int first = kvq::detail::larger(0, seen_from(block) - block.history) / tile * tile;
        return {kvq::detail::smaller(kvq::detail::larger(sinks - block.history, 0), first), first,
                kvq::detail::smaller(block.last_query + 1, block.new_tokens)};
    }
    /// What tokens 16 lane to 16 lane + 15 of a tile of pages show: bit i, does token i? Whole where no page
    /// hides a token.
    struct shown_slice {
        int shift = 0;
        unsigned tokens = 0xffffu;
    };
    __device__ __forceinline__ shown_slice slice(const prefill_block& block, int position, int lane,
                                                 int tile) const {
        if (lane >= tile / 16) return {};
        const shown_tokens s =
            shown_at(cuts, block.sequence, cut_of(cuts, block.sequence), position + 16 * lane, 16);
        return {s.shift, ((1u << s.end) - 1u) & ~((1u << s.begin) - 1u)};
    }
    /// Does a tile hide tokens, or is it to be masked with the shifts of its pages? All lanes of a warp.
    __device__ __forceinline__ bool hides_tokens(const prefill_block& block, int position, int tile) const {
        if (position >= block.cut_end) return false;
        const int lane = static_cast<int>(threadIdx.x) % 32;
        return __any_sync(0xffffffffu, window.tokens > 0 || text_positions ||
                                           slice(block, position, lane, tile).tokens != 0xffffu);
    }
    /// tile_note::cut of a tile. All lanes of a warp.
    __device__ __forceinline__ int cut(const prefill_block& block, int position, int count, int slices,
                                       bool sinks, int tile) const {
        const int all = (1 << tile / 16) - 1;
        const bool partly = count < tile || (slices & all) != all ||
                            position + tile - 1 > block.history + block.first_query ||
                            (!sinks && position < first_seen(block, block.history + block.last_query));
        const bool hides = hides_tokens(block, position, tile);
        return partly || hides ? (sinks ? 2 : 1) | (hides ? 4 : 0) : 0;
    }
};

template <class T, class... Parts>
requires(sizeof...(Parts) > 0) struct prefill_args<T, Parts...> : prefill_args<T> {
    object_list<Parts...> parts;
};

/// The place of a channel of queries and keys.
template <class Args>
__device__ __forceinline__ int place_of_channel(const prefill_block& block, int channel) {
    if constexpr (has_widths<Args>)
        return block.order == nullptr ? channel : static_cast<int>(__ldg(block.order + channel));
    else
        return channel;
}

template <class Args, class Part>
__device__ __forceinline__ token_range tokens_of(const Args& a, const Part& part, const prefill_block& block,
                                                 int tile) {
    const int b = block.sequence;
    auto [from, end] = held_tokens(part, b, block.history, a.recent);
    if (a.window.tokens > 0 && !a.template keeps<Part>()) {
        const int unseen = first_seen(part.cuts, b, kvq::detail::larger(0, a.seen_from(block))) -
                           part.cache.first_token - from;
        if (unseen > 0) from += unseen / tile * tile;
    }
    return {from, end};
}

/// The order in which a block has channels: that of the first keys of several widths that the sequence holds,
/// whose codes of a width lie together. Not of those that the rows see: bits of a row do not depend on the
/// rows beside it.
template <class Args>
__device__ __forceinline__ void find_order(const Args& a, prefill_block& block) {
    if constexpr (has_widths<Args>)
        each_part(a, [&]<class Part>(const Part& part) {
            if constexpr (codec<typename Part::pair_type::keys>.several_widths()) {
                const token_range range = held_tokens(part, block.sequence, block.history, a.recent);
                if (block.order == nullptr && range.first < range.end)
                    block.order = part.cache.key_plan(block.sequence, block.kv_head);
            }
        });
}

/// The pages of a tile, one entry of 16 tokens a lane; of split_slices, 0 where there are tokens.
template <class Pair>
__device__ __forceinline__ int page_of_lane(const cache_part<Pair>& part, int sequence, int first, int end,
                                            int tile, int lane) {
    const int token = first + lane * 16;
    if (lane >= tile / 16 || token >= end) return -1;
    if constexpr (split_slices<Pair>) return 0;
    const int page = token / Pair::page_tokens;
    const int column = part.range == page_range::window ? page % part.cache.table_columns : page;
    return __ldg(part.cache.block_table + part.cache.table_entry(sequence, column));
}

}  // namespace detail
}}}  // namespace kvq::cuda
