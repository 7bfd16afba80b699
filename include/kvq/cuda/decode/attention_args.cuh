// What an attention call takes besides the cache, as a flat struct for kernels.
//
// Softmax states: [sequence * query_tokens + i][q_head][value_dim + 2] floats: max (powers of two), sum,
// output * sum. A state that was written by one launch and read by the next makes one softmax out of several
// page formats, several devices or several caches. An empty state has max = -infinity and sum = 0.
#pragma once

#include "../../core/token_view.hpp"
#include "attention_options.hpp"
#include "schedule.cuh"
#include "state_exchange.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda { namespace detail {

/// A learned sink in powers of two. Logits above 2.3586e38 count as that: the next ones have no float in
/// powers of two.
__device__ __forceinline__ float sink_score(float logit) {
    constexpr float largest_score = 2.3586e38f;
    return (logit > largest_score ? largest_score : logit) * log2e;
}

/// How the places of query rows follow from their numbers: masks of all bits or none, so that no kernel
/// branches.
struct row_order {
    // query 0 is so many places before the end: query_tokens; without a causal mask all queries are at place
    // 1
    int behind;
    int causal;  // does each query have a place of its own?
    int text;    // is its place also its position in the text? Not in a tree
};

/// Kernel arguments. T: of query and output.
template <class Pair, class T>
struct attention_args {
    cache_ref<Pair> cache;
    work_shape work;
    token_view<const T> q;  // tokens = sequences * query_tokens
    token_view<T> out;
    float scale;  // on the query; log2 e included unless there is a softcap
    float softcap;
    const std::uint64_t* ancestors;
    int drafted;
    row_order order;
    bool window_sinks;  // rows see the sinks before position 0 through a window
    float* lse;
    const float* state_in;
    float* state_out;
    int group;                // query heads per kv head
    unsigned group_inverse;   // 2^32 / group, rounded up; 0 for groups of 1
    int rows;                 // group * query_tokens: row r is query token r / group, head r % group
    std::uint32_t* partials;  // [2 * shares] states of one item's row block, zero before and after
    item_shares cut;          // of the batch, if all sequences are equally long
    bool early;  // read lengths, tables and old tokens before the stream's previous launch has ended

    void set_group(int query_heads) {
        group = query_heads / cache.kv_heads;
        group_inverse = group == 1 ? 0u : 0xffffffffu / static_cast<unsigned>(group) + 1u;
        rows = group * work.query_tokens;
    }
    /// Which of the sequence's query tokens a row belongs to. Exact for row * group < 2^32.
    __device__ __forceinline__ int row_query(int row) const {
        return group_inverse == 0 ? row
                                  : static_cast<int>(__umulhi(static_cast<unsigned>(row), group_inverse));
    }
    __device__ __forceinline__ int row_token(int sequence, int row) const {
        return sequence * work.query_tokens + row_query(row);
    }
    __device__ __forceinline__ int row_head(int kv_head, int row) const {
        return kv_head * group + row - row_query(row) * group;
    }
    /// The paged position of a row's query; of a tree, the place of its token.
    __device__ __forceinline__ int row_place(int length, int row) const {
        return length - order.behind + (row_query(row) & order.causal);
    }
    /// The position that score modifiers get: without a causal mask queries have none but their number.
    __device__ __forceinline__ int row_position(int length, int row) const {
        return (length - work.query_tokens & order.causal) + row_query(row);
    }
    /// Where windows end at the earliest that are those of this row or later ones: tokens of a tree are at
    /// least as deep as its first one.
    __device__ __forceinline__ int oldest_place(int length, int row) const {
        return length - work.oldest + (row_query(row) & order.text);
    }
    /// The paged position that a token of a tree has as accepted text. visible: its word.
    __device__ __forceinline__ int text_place(int length, std::uint64_t visible) const {
        return length - drafted + __popcll(visible) - 1;
    }
    /// Place of an item's first head among all rows of the launch, of one query token per sequence.
    __device__ __forceinline__ int row_number(const item_part& item) const {
        return item.sequence * q.heads + item.kv_head * group;
    }
    /// Keys of this row end before this position of the format (position 0 is first_token). shift: of their
    /// page (page_cuts.cuh).
    __device__ __forceinline__ int row_end(int length, int row, int shift = 0) const {
        return smaller(row_place(length, row) - shift + 1 - cache.first_token, work.capacity);
    }
    /// Where the draft begins.
    __device__ __forceinline__ int draft_begin(int length) const {
        return length - drafted - cache.first_token;
    }
    /// Keys of a query at a place begin here; before position 0 are the sinks that attend_mixed.cuh reads
    /// together with the window. cuts: as in row_window.
    template <class Cuts>
    __device__ __forceinline__ int begin_at(int place, int shift, const Cuts& cuts) const {
        if (work.window.tokens == 0) return -most_tokens;
        return work.window.first_seen(place, cuts) - cache.first_token - shift;
    }
};

/// Tokens [begin, end), counted from the format's first one.
struct span {
    int begin, end;
};
/// What the query rows of an item see, of pages with this shift.
template <class Pair, class T>
struct seen_tokens {
    int length, first_row, shift;
    span common;  // what every row sees, or less
    span any;     // what some row sees, or of trees more

    /// cuts: as in row_window.
    template <class Cuts>
    __device__ __forceinline__ seen_tokens(const attention_args<Pair, T>& a, const item_part& item, int rows,
                                           int of_page, const Cuts& cuts)
        : length(a.work.tokens[item.sequence]), first_row(item.row_block * rows), shift(of_page) {
        const int last_row = kvq::detail::smaller(first_row + rows, a.rows) - 1;
        common = {a.begin_at(a.row_place(length, last_row), shift, cuts),
                  a.row_end(length, first_row, shift)};
        any = {a.begin_at(a.oldest_place(length, first_row), shift, cuts),
               a.row_end(length, last_row, shift)};
    }
    /// Of one row; nothing where there is no such row. hidden_scores() hides more of a tree's.
    template <class Cuts>
    __device__ __forceinline__ span of(const attention_args<Pair, T>& a, int row, const Cuts& cuts) const {
        return {a.begin_at(a.oldest_place(length, row), shift, cuts),
                row < a.rows ? a.row_end(length, row, shift) : 0};
    }
};

/// Writes N neighbouring channels of a finished row, merged with the state that came in. `output` belongs to
/// {max, sum}.
template <int N, class Pair, class T>
__device__ __forceinline__ void finish_channels(const attention_args<Pair, T>& a, int token, int head,
                                                int channel, float max, float sum, float (&output)[N]) {
    const std::size_t row = static_cast<std::size_t>(token) * static_cast<std::size_t>(a.q.heads) +
                            static_cast<std::size_t>(head);
    constexpr int width = Pair::value_dim + 2;
    if (a.state_in) {
        const float* const in = a.state_in + row * width;
        const float in_max = in[0];
        const float top = fmaxf(max, in_max);
        const float mine = max == -INFINITY ? 0.0f : exp2_fast(max - top);
        const float theirs = in_max == -INFINITY ? 0.0f : exp2_fast(in_max - top);
        sum = sum * mine + in[1] * theirs;
#pragma unroll
        for (int i = 0; i < N; ++i) output[i] = output[i] * mine + in[2 + channel + i] * theirs;
        max = top;
    }
    if (a.out.data) {
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // NaN stays NaN
        float divided[N];
#pragma unroll
        for (int i = 0; i < N; ++i) divided[i] = output[i] * inverse;
        write_channels(a.out.at(token, head) + channel, divided);
    }
    if (a.lse && channel == 0) a.lse[row] = natural_log(max, sum);
    // max and sum are read by the threads of other channels: they are written by attention's last step
    // (finish_header).
    if (a.state_out)
#pragma unroll
        for (int i = 0; i < N; ++i)
            a.state_out[row * width + 2 + static_cast<std::size_t>(channel + i)] = output[i];
}

/// Writes max and sum of a row's state; all threads of the row must have passed finish_channels.
template <class Pair, class T>
__device__ __forceinline__ void finish_header(const attention_args<Pair, T>& a, int token, int head,
                                              float max, float sum) {
    if (!a.state_out) return;
    const std::size_t row = static_cast<std::size_t>(token) * static_cast<std::size_t>(a.q.heads) +
                            static_cast<std::size_t>(head);
    constexpr int width = Pair::value_dim + 2;
    if (a.state_in) {
        const float in_max = a.state_in[row * width], in_sum = a.state_in[row * width + 1];
        const float top = fmaxf(max, in_max);
        sum = sum * (max == -INFINITY ? 0.0f : exp2_fast(max - top)) +
              in_sum * (in_max == -INFINITY ? 0.0f : exp2_fast(in_max - top));
        max = top;
    }
    a.state_out[row * width] = max;
    a.state_out[row * width + 1] = sum;
}

}  // namespace detail
}}}  // namespace kvq::cuda
