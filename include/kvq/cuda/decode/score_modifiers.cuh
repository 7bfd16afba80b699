// What changes scores between the product of keys and the softmax.
//
//   s = cap tanh(q . k / cap);   s = score.score(s, q_head, q_pos, k_pos);   hidden: -infinity
//   softmax sum + exp(score.sink_logit(q_head))
//
// A score modifier is a template argument of attend(): without one there is no code of it. Where it has
// score(), all warp tiles take the rare twin of the loop (attend_warps.cuh), as they do with softcap. Trees
// of drafted tokens hide scores of the few warp tiles that hold a draft.
// Contract: names and order of arguments are those of the CPU's score modifiers
// (attention/score_modifiers.hpp), so one struct can be both.
#pragma once

#include "attention_args.cuh"
#include "key_product.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda { namespace detail {

template <class Score>
inline constexpr bool has_score = requires(const Score& s) {
    s.score(0.0f, 0, 0, 0);
};
template <class Score>
inline constexpr bool has_sinks = requires(const Score& s) {
    s.sink_logit(0);
};
template <class Score>
inline constexpr bool exchanges = std::is_same_v<Score, across_ranks>;
template <class Score>
inline constexpr bool is_modifier =
    has_score<Score> || has_sinks<Score> || exchanges<Score> || std::is_same_v<Score, unmodified>;

/// A row's learned sink becomes a part of its state: one more score, without a value. Returns the factor of
/// the row's output.
__device__ __forceinline__ float add_sink(float logit, float& max, float& sum) {
    if (max == -INFINITY) return 1.0f;
    const float score = sink_score(logit), top = fmaxf(max, score), factor = exp2_fast(max - top);
    sum = sum * factor + exp2_fast(score - top);
    max = top;
    return factor;
}

/// cap * tanh(s / cap) in powers of two.
__device__ __forceinline__ float capped(float s, float cap) {
    const float e = exp2_fast(fminf(__fdividef(2.0f * log2e * s, cap), 126.0f));
    return log2e * cap * (1.0f - __fdividef(2.0f, 1.0f + e));
}

/// One score, which kernels have in powers of two. Positions are counted from the format's first token.
template <class Pair, class T, class Score>
__device__ __forceinline__ float modified_score(const attention_args<Pair, T>& a, const Score& score, float s,
                                                int head, int query, int key) {
    return log2e *
           score.score(s * (1.0f / log2e), head, query + a.cache.first_token, key + a.cache.first_token);
}
/// The scores of a warp tile whose first token is `first`. skipped: tokens of the sequence that no span
/// shows; shift: of the page (page_cuts.cuh).
template <class Keys, int Rows4, class Pair, class T, class Score>
__device__ __forceinline__ void modify_scores(float (&scores)[Keys::tiles][Rows4][4],
                                              const attention_args<Pair, T>& a, const Score& score,
                                              const item_part& item, int first, int skipped, int shift,
                                              const lane_id& id) {
    const int length = a.work.tokens[item.sequence] - skipped;
    first += shift - skipped;
#pragma unroll
    for (int n = 0; n < Rows4; ++n) {
        const int row = item.row_block * 4 * Rows4 + lane_row<Rows4>(n, id.t);
        if (row >= a.rows) continue;
        const int head = a.row_head(item.kv_head, row),
                  query = a.row_position(length, row) - a.cache.first_token;
#pragma unroll
        for (int tile = 0; tile < Keys::tiles; ++tile)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                float& s = scores[tile][n][r];
                s = modified_score(a, score, s, head, query, first + tile * Keys::tile_height + 4 * id.g + r);
            }
    }
}

/// Does a token of a tree, which sees text from `begin` on, not see a token with this shift? `visible`: the
/// query's word. Drafted tokens count as the text that the query's path makes of them. Tokens behind the
/// query: anything.
template <class Pair, class T>
__device__ __forceinline__ bool is_hidden(const attention_args<Pair, T>& a, std::uint64_t visible, int token,
                                          int shift, int draft_begin, int begin) {
    int place = token;
    if (token >= draft_begin) {
        const std::uint64_t bit = std::uint64_t{1} << (token - draft_begin & 63);
        if ((visible & bit) == 0) return true;
        place = draft_begin + __popcll(visible & (bit - 1));
    }
    return place + shift < begin && !(a.window_sinks && place < 0);
}
/// Are these kernels also for trees of drafted tokens? Others would become longer, and slower by up to 4 %
/// where caches of instructions are full (low2).
template <int Rows4>
inline constexpr bool takes_trees = Rows4 == 4;
/// A bit for each of a lane's scores.
template <class Keys, int Rows4>
using score_bits = std::conditional_t<(Keys::tiles * Rows4 * 4 > 32), std::uint64_t, std::uint32_t>;
/// For each of a lane's rows and tokens of a warp tile a bit: does the row, a token of a tree, not see it?
/// Bit (tile * Rows4 + n) * 4 + r. A call: inline it would make windows' loops a fifth longer.
template <class Keys, int Rows4, class Pair, class T>
__device__ __noinline__ score_bits<Keys, Rows4> hidden_scores(const attention_args<Pair, T>& a,
                                                              const item_part* item, int first, int shift,
                                                              int skipped) {
    static_assert(Keys::tiles * Rows4 * 4 <= 64);
    using bits = score_bits<Keys, Rows4>;
    const lane_id id;
    const int length = a.work.tokens[item->sequence], draft_begin = a.draft_begin(length);
    bits hidden = 0;
#pragma unroll 1
    for (int n = 0; n < Rows4; ++n) {
        const int row = item->row_block * 4 * Rows4 + lane_row<Rows4>(n, id.t);
        if (row >= a.rows) continue;
        const std::uint64_t visible = a.ancestors[a.row_token(item->sequence, row)];
        const int begin = a.begin_at(a.text_place(length, visible), 0, skipped_tokens{skipped});
#pragma unroll 1
        for (int i = 0; i < 4 * Keys::tiles; ++i)
            if (is_hidden(a, visible, first + i / 4 * Keys::tile_height + 4 * id.g + i % 4, shift,
                          draft_begin, begin))
                hidden |= bits{1} << ((i / 4 * Rows4 + n) * 4 + i % 4);
    }
    return hidden;
}
template <class Keys, int Rows4, class Pair, class T>
__device__ __forceinline__ void hide_scores(float (&scores)[Keys::tiles][Rows4][4],
                                            const attention_args<Pair, T>& a, const item_part* item,
                                            int first, int shift, int skipped) {
    const auto hidden = hidden_scores<Keys, Rows4>(a, item, first, shift, skipped);
#pragma unroll
    for (int i = 0; i < Keys::tiles * Rows4 * 4; ++i)
        if ((hidden >> i & 1) != 0) scores[i / (4 * Rows4)][i / 4 % Rows4][i % 4] = -INFINITY;
}

}  // namespace detail
}}}  // namespace kvq::cuda
