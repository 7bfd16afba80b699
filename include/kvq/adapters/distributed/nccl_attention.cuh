// Decode on several GPUs: a context divided among ranks, or kv heads divided among ranks.
//
//   context parallel   every rank has a cuda::cache with its tokens of each sequence (split.hpp says which),
//                      and all query heads
//     cuda::context_attention merge;  s = merge.open(group, max_batch, q_heads, value_dim, stream);
//     s = cache.begin_step(batch, is_home ? 1 : 0, stream);
//     if (is_home) s = cache.append(layer, k, v, stream);
//     s = merge.attend(cache, layer, q, out, {}, stream);                                          all ranks
//       get all outputs
//   head parallel      every rank has a cuda::cache with its kv heads of all tokens
//     s = cache.attend(layer, own queries, own outputs, {}, stream);                               no message
//     s = cuda::gather_heads(group, heads, own outputs, all outputs, scratch, stream);             only where
//       all ranks need all
//
//   merged = sum_r 2^(max_r - max) output_r / sum_r 2^(max_r - max) sum_r     over ranks r in order, max the
//                                                                             largest max_r
//
// Contract: partial softmax states (attention_args.cuh) go to all ranks in one all-gather and are added in
// the order of ranks, so every rank has the same bits, whatever came first. A rank without tokens of a
// sequence (sequence_id{} in its batch) adds nothing. Outputs over heads are those of one cache, bit for bit.
// Calls put work on the stream and do not wait for it; graphs can capture them.
// Bytes that a rank sends to each other one: rows * (value_dim + 2) * 4. peer_attention.cuh: the same with
// less latency on one machine. nccl_prefill.cuh: prompts of a divided context.
#pragma once

#include <span>

#include "../../cuda/decode/attention_args.cuh"
#include "../../cuda/host/cache.hpp"
#include "nccl.cuh"
#include "split.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

/// A warp per row. states: [ranks][rows][dim + 2].
template <class T>
__global__ void __launch_bounds__(128)
    merge_states_kernel(const float* states, int ranks, int rows, token_view<T> out, float* lse) {
    launch_dependents();
    const int row = static_cast<int>(blockIdx.x) * 4 + static_cast<int>(threadIdx.x) / 32,
              lane = static_cast<int>(threadIdx.x) % 32;
    wait_for_predecessor();
    if (row >= rows) return;
    const auto width = static_cast<std::size_t>(out.dim + 2);
    const auto state = [&](int rank) {
        return states + (static_cast<std::size_t>(rank) * static_cast<std::size_t>(rows) +
                         static_cast<std::size_t>(row)) *
                            width;
    };
    float max = -INFINITY, sum = 0.0f;
    for (int r = 0; r < ranks; ++r) max = fmaxf(max, state(r)[0]);
    for (int r = 0; r < ranks; ++r)
        if (state(r)[0] > -INFINITY) sum = fmaf(state(r)[1], exp2_fast(state(r)[0] - max), sum);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    T* const to = out.at(row / out.heads, row % out.heads);
    for (int channel = lane; channel < out.dim; channel += 32) {
        float output = 0.0f;
        for (int r = 0; r < ranks; ++r)
            if (state(r)[0] > -INFINITY)
                output = fmaf(state(r)[2 + channel], exp2_fast(state(r)[0] - max), output);
        to[channel] = from_float<T>(output * inverse);
    }
    if (lse != nullptr && lane == 0) lse[row] = natural_log(max, sum);
}

/// [tokens][heads of a rank][dim] to their place in [tokens][all heads][dim]. Block: a token and a head.
template <class T>
__global__ void __launch_bounds__(128)
    spread_heads_kernel(const T* from, int first, int count, token_view<T> out) {
    const int token = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
    const T* const row = from + (static_cast<std::size_t>(token) * static_cast<std::size_t>(count) +
                                 static_cast<std::size_t>(head)) *
                                    static_cast<std::size_t>(out.dim);
    for (int i = static_cast<int>(threadIdx.x); i < out.dim; i += static_cast<int>(blockDim.x))
        out.at(token, first + head)[i] = row[i];
}

}  // namespace detail

/// What attention over a divided context is, however states go to other ranks. Derived: exchange(rows, out,
/// lse, stream), and attend_divided(), which may be attend_and_exchange().
template <class Derived>
class divided_context {
public:
    /// Attention of the step that cache.begin_step() has begun, on all ranks with the same rows in the same
    /// order. q: [rows][q_heads] [head_dim], the same on every rank. out: [rows][q_heads][value_dim] of any
    /// float type. Of the options scale, softcap and early count; lse is that of the whole context. One query
    /// token per sequence.
    template <class T, class Out>
    status attend(cache& own, int layer, const token_view<const T>& q, const token_view<Out>& out,
                  attention_options options, cudaStream_t stream) {
        if (status s = check(q.tokens, q.heads, out, options); !s) return s;
        return static_cast<Derived*>(this)->attend_divided(own, layer, q, out, options, stream);
    }
    /// For engines that compute partial states themselves: where a rank writes its own,
    /// [rows][q_heads][value_dim + 2], before merge().
    float* own_states() const noexcept { return states_; }
    /// Sends the rank's states to all others and merges those of all.
    template <class Out>
    status merge(const token_view<Out>& out, float* lse, cudaStream_t stream) {
        if (status s = check(out.tokens, out.heads, out, {}); !s) return s;
        const int rows = out.tokens * out.heads;
        return rows == 0 ? status{} : static_cast<Derived*>(this)->exchange(rows, out, lse, stream);
    }
    /// Device memory of it.
    std::size_t bytes() const noexcept { return bytes_; }

protected:
    /// Memory for the rank's states is the first part of `bytes`.
    status prepare(nccl_group& group, int max_batch, int q_heads, int value_dim) {
        if (group_ != nullptr) return detail::bad_value("attention over a divided context is open already");
        if (max_batch < 1 || q_heads < 1 || value_dim < 1)
            return detail::bad_value("a divided context of %d sequences, %d query heads and value_dim %d",
                                     max_batch, q_heads, value_dim);
        group_ = &group;
        rows_ = max_batch * q_heads;
        dim_ = value_dim;
        return {};
    }
    /// Was the cache opened with formats that make_scored_format<across_ranks, ...>() has compiled?
    static bool in_one_launch(const cache& own, int layer) {
        return layer >= 0 && layer < own.layer_count() &&
               own.formats(layer).functions->score == detail::score_mark::of<across_ranks>();
    }
    /// In two launches.
    template <class T, class Out>
    status attend_and_exchange(cache& own, int layer, const token_view<const T>& q,
                               const token_view<Out>& out, attention_options options, cudaStream_t stream) {
        float* const lse = std::exchange(options.lse, nullptr);
        options.state_out = states_;
        const token_view<T> nowhere{};
        const status s = in_one_launch(own, layer)
                             ? own.attend(layer, q, nowhere, options, stream, across_ranks{})
                             : own.attend(layer, q, nowhere, options, stream);
        if (!s) return s;
        return merge(out, lse, stream);
    }
    std::size_t own_values() const noexcept {
        return kvq::detail::round_up(static_cast<std::size_t>(rows_) * static_cast<std::size_t>(dim_ + 2),
                                     std::size_t{64});
    }

    nccl_group* group_ = nullptr;
    int rows_ = 0, dim_ = 0;
    std::size_t bytes_ = 0;
    float* states_ = nullptr;  // of this rank

private:
    template <class Out>
    status check(int q_tokens, int q_heads, const token_view<Out>& out, const attention_options& o) const {
        if (group_ == nullptr) return detail::bad_value("attention over a divided context is not open");
        if (o.query_tokens != 1 || o.window != 0 || o.state_in != nullptr || o.state_out != nullptr)
            return detail::bad_value(
                "a divided context takes one query token per sequence (got %d), no sliding window (got %d) "
                "and no "
                "states",
                o.query_tokens, o.window);
        if (out.dim != dim_ || q_tokens != out.tokens || q_heads != out.heads ||
            out.tokens * out.heads > rows_)
            return detail::bad_value(
                "q is %d x %d and out %d x %d x %d, but a divided context was opened for %d rows of %d",
                q_tokens, q_heads, out.tokens, out.heads, out.dim, rows_, dim_);
        return {};
    }
};

/// Attention over a context whose tokens are divided among the ranks of a group. States go through
/// ncclAllGather.
class context_attention : public divided_context<context_attention> {
public:
    context_attention() = default;
    context_attention(const context_attention&) = delete;
    context_attention& operator=(const context_attention&) = delete;

    /// On every rank, with the same numbers. max_batch: sequences of a step. The group outlives it.
    status open(nccl_group& group, int max_batch, int q_heads, int value_dim, cudaStream_t stream,
                const device_allocator& from = {}) {
        if (status s = prepare(group, max_batch, q_heads, value_dim); !s) return s;
        bytes_ = static_cast<std::size_t>(group.ranks() + 1) * own_values() * sizeof(float);
        const status s = memory_.allocate(from, bytes_, "partial outputs", stream);
        states_ = memory_.as<float>();
        if (!s) group_ = nullptr;
        return s;
    }

private:
    friend divided_context;

    template <class T, class Out>
    status attend_divided(cache& own, int layer, const token_view<const T>& q, const token_view<Out>& out,
                          const attention_options& options, cudaStream_t stream) {
        return attend_and_exchange(own, layer, q, out, options, stream);
    }
    template <class Out>
    status exchange(int rows, const token_view<Out>& out, float* lse, cudaStream_t stream) {
        const std::size_t count = static_cast<std::size_t>(rows) * static_cast<std::size_t>(dim_ + 2);
        float* const all = states_ + own_values();
        if (status s = group_->call(
                "gathering partial outputs",
                [&](ncclComm_t c) { return ncclAllGather(states_, all, count, ncclFloat32, c, stream); });
            !s)
            return s;
        return detail::launch("launching the merge of partial outputs", detail::overlap::yes,
                              detail::merge_states_kernel<Out>, dim3(static_cast<unsigned>((rows + 3) / 4)),
                              128, 0, stream, static_cast<const float*>(all), group_->ranks(), rows, out,
                              lse);
    }

    detail::device_memory memory_;  // the rank's states, then those of all ranks
};

/// heads: query heads of each rank, consecutive from 0 on (split.hpp). own: dense [tokens][heads of this
/// rank][dim]. all: [tokens][all heads][dim]. scratch: device memory for as many values as `all` has.
template <class T>
status gather_heads(nccl_group& group, std::span<const index_range> heads, const token_view<const T>& own,
                    const token_view<T>& all, T* scratch, cudaStream_t stream) {
    const int me = group.rank();
    if (static_cast<int>(heads.size()) != group.ranks())
        return detail::bad_value("heads of %zu ranks do not fit %d ranks", heads.size(), group.ranks());
    const index_range mine = heads[static_cast<std::size_t>(me)];
    if (own.heads != mine.size() || all.heads != heads.back().end || own.tokens != all.tokens ||
        (own.heads > 0 && own.dim != all.dim))
        return detail::bad_value("rank %d has %d of %d heads, but outputs are %d x %d x %d of %d x %d x %d",
                                 me, mine.size(), heads.back().end, own.tokens, own.heads, own.dim,
                                 all.tokens, all.heads, all.dim);
    if (own.heads > 0 && (own.head_stride != own.dim || own.token_stride != own.heads * own.dim))
        return detail::bad_value("outputs of own heads must be dense");
    if (all.tokens == 0) return {};
    const auto row = static_cast<std::size_t>(all.dim), tokens = static_cast<std::size_t>(all.tokens);
    bool equal = true;
    for (const index_range& r : heads) equal = equal && r.size() == heads[0].size();
    const bool in_place = all.tokens == 1 && all.head_stride == all.dim;
    T* const gathered = in_place ? all.data : scratch;
    const auto first_value = [&](const index_range& r) {
        return static_cast<std::size_t>(r.first) * tokens * row;
    };
    const auto values = [&](const index_range& r) {
        return static_cast<std::size_t>(r.size()) * tokens * row;
    };
    status s = group.call("gathering heads", [&](ncclComm_t c) {
        if (equal) return ncclAllGather(own.data, gathered, values(mine) * sizeof(T), ncclUint8, c, stream);
        ncclResult_t result = ncclGroupStart();
        for (std::size_t r = 0; r < heads.size(); ++r) {
            T* const to = gathered + first_value(heads[r]);
            if (heads[r].size() == 0) continue;
            const ncclResult_t one =
                ncclBroadcast(static_cast<int>(r) == me ? own.data : to, to, values(heads[r]) * sizeof(T),
                              ncclUint8, static_cast<int>(r), c, stream);
            if (result == ncclSuccess && one != ncclInProgress) result = one;
        }
        const ncclResult_t end = ncclGroupEnd();
        return result == ncclSuccess ? end : result;
    });
    for (const index_range& r : heads)
        if (s && r.size() > 0 && !in_place)
            s = detail::launch(
                "launching a copy of heads", detail::overlap::no, detail::spread_heads_kernel<T>,
                dim3(static_cast<unsigned>(all.tokens), static_cast<unsigned>(r.size())), 128, 0, stream,
                static_cast<const T*>(gathered + first_value(r)), r.first, r.size(), all);
    return s;
}

}}}  // namespace kvq::cuda
