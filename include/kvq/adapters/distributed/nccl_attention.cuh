// Decode on several GPUs: a context divided among ranks, or kv heads divided among ranks.
//
//   context parallel   every rank has a cuda::cache with its tokens of each sequence (split.hpp says which), and all query heads
//     cuda::context_attention merge;  s = merge.open(group, max_batch, q_heads, value_dim);       once
//     s = cache.begin_step(batch, is_home ? 1 : 0, stream);  if (is_home) s = cache.append(layer, k, v, stream);
//     s = merge.attend(cache, layer, q, out, {}, stream);                                          all ranks get all outputs
//   head parallel      every rank has a cuda::cache with its kv heads of all tokens
//     s = cache.attend(layer, own queries, own outputs, {}, stream);                               no message
//     s = cuda::gather_heads(group, heads, own outputs, all outputs, scratch, stream);             only where all ranks need all
//
//   merged = sum_r 2^(max_r - max) output_r / sum_r 2^(max_r - max) sum_r     over ranks r in order, max the largest max_r
//
// Contract: partial softmax states (attention_args.cuh) go to all ranks in one all-gather and are added in the order of ranks, so every
// rank has the same bits, whatever came first. A rank without tokens of a sequence (sequence_id{} in its batch) adds nothing. Outputs
// over heads are those of one cache, bit for bit. Calls put work on the stream and do not wait for it; graphs can capture them.
// Bytes sent and received by a rank: ranks * rows * (value_dim + 2) * 4.
#pragma once

#include <span>

#include "../../backends/cuda/cache.cuh"
#include "nccl.cuh"
#include "split.hpp"

namespace kvq::inline KVQ_TAGGED::cuda {

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
    if (lse != nullptr && lane == 0) lse[row] = sum == 0.0f ? -INFINITY : (max + log2f(sum)) / log2e;
}

/// [rank][tokens][heads of the rank][dim] to [tokens][all heads][dim]. Block: a token and a head.
template <class T>
__global__ void __launch_bounds__(128)
    spread_heads_kernel(const T* from, std::size_t rank_first, int first, int count, token_view<T> out) {
    const int token = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
    const T* const row = from + (rank_first + static_cast<std::size_t>(token) * static_cast<std::size_t>(count) +
                                 static_cast<std::size_t>(head)) *
                                    static_cast<std::size_t>(out.dim);
    for (int i = static_cast<int>(threadIdx.x); i < out.dim; i += static_cast<int>(blockDim.x))
        out.at(token, first + head)[i] = row[i];
}

}  // namespace detail

/// Attention over a context whose tokens are divided among the ranks of a group.
class context_attention {
public:
    context_attention() = default;
    context_attention(const context_attention&) = delete;
    context_attention& operator=(const context_attention&) = delete;
    ~context_attention() { close(); }

    /// On every rank, with the same numbers. max_batch: sequences of a step. The group outlives it. registered: the memory of the states
    /// becomes a window of NCCL (2.27 and later), whose small messages take less time.
    status open(nccl_group& group, int max_batch, int q_heads, int value_dim, bool registered = true) {
        if (group_ != nullptr) return detail::bad_value("attention over a divided context is open already");
        if (max_batch < 1 || q_heads < 1 || value_dim < 1)
            return detail::bad_value("a divided context of %d sequences, %d query heads and value_dim %d",
                                     max_batch, q_heads, value_dim);
        rows_ = max_batch * q_heads;
        dim_ = value_dim;
        bytes_ = (static_cast<std::size_t>(group.ranks()) + 1) * own_bytes();
        void* memory = nullptr;
        if (ncclMemAlloc(&memory, bytes_) != ncclSuccess) {
            status s = detail::bad_value("%zu bytes of device memory for partial outputs are not there", bytes_);
            s.code = cudaErrorMemoryAllocation;
            return s;
        }
        memory_ = static_cast<float*>(memory);
        group_ = &group;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
        if (registered)
            return group.call("registering the memory of partial outputs", [&](ncclComm_t c) {
                return ncclCommWindowRegister(c, memory_, bytes_, &window_, NCCL_WIN_COLL_SYMMETRIC);
            });
#endif
        (void)registered;
        return {};
    }
    /// The ranks' launches must have ended.
    void close() noexcept {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
        if (window_ != nullptr && group_->communicator() != nullptr)
            (void)group_->call("giving up a window", [&](ncclComm_t c) {
                return ncclCommWindowDeregister(c, window_);
            });
        window_ = nullptr;
#endif
        if (memory_ != nullptr) (void)ncclMemFree(memory_);
        memory_ = nullptr;
        group_ = nullptr;
    }
    /// Device memory of it.
    std::size_t bytes() const noexcept { return memory_ == nullptr ? 0 : bytes_; }

    /// Attention of the step that cache.begin_step() has begun, on all ranks with the same rows in the same order. q: [rows][q_heads]
    /// [head_dim], the same on every rank. out: [rows][q_heads][value_dim] of any float type. Of the options scale, softcap and early count;
    /// lse is that of the whole context. One query token per sequence.
    template <class T, class Out>
    status attend(cache& own, int layer, const token_view<const T>& q, const token_view<Out>& out,
                  attention_options options, cudaStream_t stream) {
        float* const lse = std::exchange(options.lse, nullptr);
        if (status s = check(q.tokens, q.heads, out.tokens, out.heads, out.dim, options); !s) return s;
        options.state_out = memory_;
        if (status s = own.attend(layer, q, token_view<T>{}, options, stream); !s) return s;
        return merge(out, lse, stream);
    }
    /// For engines that compute partial states themselves: where a rank writes its own, [rows][q_heads][value_dim + 2], before merge().
    float* own_states() const noexcept { return memory_; }
    /// Sends the rank's states to all others and merges those of all.
    template <class Out>
    status merge(const token_view<Out>& out, float* lse, cudaStream_t stream) {
        if (status s = check(out.tokens, out.heads, out.tokens, out.heads, out.dim, {}); !s) return s;
        const int rows = out.tokens * out.heads;
        const std::size_t count = static_cast<std::size_t>(rows) * static_cast<std::size_t>(dim_ + 2);
        float* const all = memory_ + own_bytes() / sizeof(float);
        if (rows == 0) return {};
        if (status s = group_->call("gathering partial outputs",
                                    [&](ncclComm_t c) {
                                        return ncclAllGather(memory_, all, count, ncclFloat32, c, stream);
                                    });
            !s)
            return s;
        return detail::launch("launching the merge of partial outputs", detail::overlap::yes,
                              detail::merge_states_kernel<Out>, dim3(static_cast<unsigned>((rows + 3) / 4)), 128,
                              0, stream, static_cast<const float*>(all), group_->ranks(), rows, out, lse);
    }

private:
    std::size_t own_bytes() const noexcept {
        return kvq::detail::round_up(
            static_cast<std::size_t>(rows_) * static_cast<std::size_t>(dim_ + 2) * sizeof(float),
            std::size_t{256});
    }
    status check(int q_tokens, int q_heads, int tokens, int heads, int dim,
                 const attention_options& o) const {
        if (group_ == nullptr) return detail::bad_value("attention over a divided context is not open");
        if (o.query_tokens != 1 || o.window != 0 || o.state_in != nullptr || o.state_out != nullptr)
            return detail::bad_value(
                "a divided context takes one query token per sequence (got %d), no sliding window (got %d) and no "
                "states",
                o.query_tokens, o.window);
        if (dim != dim_ || q_tokens != tokens || q_heads != heads || tokens * heads > rows_)
            return detail::bad_value(
                "q is %d x %d and out %d x %d x %d, but a divided context was opened for %d rows of %d", q_tokens,
                q_heads, tokens, heads, dim, rows_, dim_);
        return {};
    }

    nccl_group* group_ = nullptr;
    int rows_ = 0, dim_ = 0;
    std::size_t bytes_ = 0;
    float* memory_ = nullptr;  // the rank's states, then those of all ranks
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    ncclWindow_t window_ = nullptr;
#endif
};

/// heads: query heads of each rank, consecutive from 0 on (split.hpp). own: dense [tokens][heads of this rank][dim]. all: [tokens][all
/// heads][dim]. scratch: device memory for as many values as `all` has.
template <class T>
status gather_heads(nccl_group& group, std::span<const index_range> heads, const token_view<const T>& own,
                    const token_view<T>& all, T* scratch, cudaStream_t stream) {
    const int me = group.rank();
    if (static_cast<int>(heads.size()) != group.ranks())
        return detail::bad_value("heads of %zu ranks do not fit %d ranks", heads.size(), group.ranks());
    const index_range mine = heads[static_cast<std::size_t>(me)];
    if (own.heads != mine.size() || all.heads != heads.back().end || own.tokens != all.tokens ||
        (own.heads > 0 && own.dim != all.dim))
        return detail::bad_value("rank %d has %d of %d heads, but outputs are %d x %d x %d of %d x %d x %d", me,
                                 mine.size(), heads.back().end, own.tokens, own.heads, own.dim, all.tokens,
                                 all.heads, all.dim);
    if (own.heads > 0 && (own.head_stride != own.dim || own.token_stride != own.heads * own.dim))
        return detail::bad_value("outputs of own heads must be dense");
    if (all.tokens == 0) return {};
    const auto row = static_cast<std::size_t>(all.dim), tokens = static_cast<std::size_t>(all.tokens);
    const auto first_row = [&](const index_range& r) { return static_cast<std::size_t>(r.first) * tokens; };
    status s = group.call("gathering heads", [&](ncclComm_t c) {
        ncclResult_t result = ncclGroupStart();
        for (std::size_t r = 0; r < heads.size(); ++r) {
            const std::size_t bytes = static_cast<std::size_t>(heads[r].size()) * tokens * row * sizeof(T);
            T* const to = scratch + first_row(heads[r]) * row;
            if (bytes == 0) continue;
            const ncclResult_t one = ncclBroadcast(static_cast<int>(r) == me ? own.data : to, to, bytes, ncclUint8,
                                                   static_cast<int>(r), c, stream);
            if (result == ncclSuccess && one != ncclInProgress) result = one;
        }
        const ncclResult_t end = ncclGroupEnd();
        return result == ncclSuccess ? end : result;
    });
    for (const index_range& r : heads)
        if (s && r.size() > 0)
            s = detail::launch("launching a copy of heads", detail::overlap::no, detail::spread_heads_kernel<T>,
                               dim3(static_cast<unsigned>(all.tokens), static_cast<unsigned>(r.size())), 128, 0,
                               stream, static_cast<const T*>(scratch), first_row(r), r.first, r.size(), all);
    return s;
}

}  // namespace kvq::inline KVQ_TAGGED::cuda
