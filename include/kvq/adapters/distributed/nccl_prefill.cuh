// A prompt's chunk on several GPUs: its keys and values, and the tokens before it, are divided among ranks
// (split.hpp says how).
//
//   cuda::context_prefill prompt;  s = prompt.open(group, q_heads);
//   s = prompt.begin(cache, id, split, n, stream);                       the next n tokens; this rank
//                                                                        computes K, V, Q of prompt.own()
//   for each layer: s = prompt.prefill(layer, k, v, q, out, {}, stream);      rows of own()
//   s = group.wait(stream, "for the outputs");
//
// A layer: queries go to the ranks that hold keys in front of them; each attends over its pages and over its
// new tokens in 16 bit (prefill.cuh), stores and quantizes its own, and sends softmax states back; the rank
// of a query merges them in the order of ranks.
// Contract: outputs are those of cache::prefill() of one cache within its error (states are float, so 1e-3 of
// the norm in half floats is a bound for both); pages of all ranks together are those of one cache, byte for
// byte. Timing changes no bit. prefill() puts work on the stream; begin() and wait() wait for it, no longer
// than the limit of the group. After an error the sequence is to be freed.
// Bytes of a layer: for each query and each other rank with keys in front of it, q_heads * (head_dim * 2 +
// (value_dim + 2) * 4).
#pragma once

#include "nccl_attention.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

/// Rows of a view to dense ones. Block: a token.
template <class T>
__global__ void __launch_bounds__(256) pack_rows_kernel(token_view<const T> from, T* to) {
    const int token = static_cast<int>(blockIdx.x), row = from.heads * from.dim;
    to += static_cast<std::size_t>(token) * static_cast<std::size_t>(row);
    for (int i = static_cast<int>(threadIdx.x); i < row; i += static_cast<int>(blockDim.x))
        to[i] = from.at(token, i / from.dim)[i % from.dim];
}

/// States of rows that see no token.
template <int = 0>
__global__ void __launch_bounds__(256) empty_states_kernel(float* states, int rows, int width) {
    const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (row >= rows) return;
    states += static_cast<std::size_t>(row) * static_cast<std::size_t>(width);
    states[0] = -INFINITY;
    states[1] = 0.0f;
}

}  // namespace detail

class context_prefill {
public:
    context_prefill() = default;
    context_prefill(const context_prefill&) = delete;
    context_prefill& operator=(const context_prefill&) = delete;

    /// The same q_heads on every rank. The group outlives it.
    status open(nccl_group& group, int q_heads, const device_allocator& from = {}) {
        if (group_ != nullptr) return detail::bad_value("prefill of a divided context is open already");
        if (q_heads < 1) return detail::bad_value("prefill with %d query heads", q_heads);
        group_ = &group;
        heads_ = q_heads;
        from_ = from;
        return {};
    }

    /// The next n tokens of a sequence, on every rank with the same n and the same split. own: a cache whose
    /// sinks, recent and page_tokens are split.geometry(rank); id: its sequence with split.tokens(rank)
    /// tokens, or sequence_id{} on a rank that gets none and has none. All layers of earlier tokens must have
    /// been appended. Waits for the stream. An error leaves the split as it was.
    status begin(cache& own, sequence_id id, context_split& split, int n, cudaStream_t stream) {
        if (status s = check_begin(own, id, split, n); !s) return s;
        if (status s = group_->wait(stream, "for the chunk before"); !s) return s;
        begun_ = false;
        cache_ = &own;
        const int before = split.tokens();
        plan(split, n);
        status s = reserve(stream);
        if (s && own_tokens_ > 0) s = own.begin_prompt(id, own_tokens_, stream);
        if (s && own_tokens_ == 0 && seen_from(me()) < end_) s = own.begin_step(std::span(&id, 1), 0, stream);
        if (!s) split.trim(before);
        begun_ = static_cast<bool>(s);
        return s;
    }
    /// Positions whose keys, values and queries this rank computes, at most three ranges; it gives them to
    /// prefill() in this order.
    std::span<const index_range> own() const noexcept { return own_; }
    int own_tokens() const noexcept { return own_tokens_; }
    /// What this rank sends per layer.
    std::size_t sent_bytes() const noexcept {
        std::size_t bytes = 0;
        for (int r = 0; r < ranks(); ++r)
            if (r != me())
                bytes += static_cast<std::size_t>(rows(me(), r)) * query_bytes() +
                         static_cast<std::size_t>(rows(r, me())) * state_bytes();
        return bytes;
    }
    /// Device memory of it.
    std::size_t bytes() const noexcept { return memory_.bytes(); }

    /// One layer. q, out: [own_tokens][q_heads][head_dim], k, v: [own_tokens][kv_heads][head_dim]; T: the
    /// type of the cache, Out: any float type. Of the options scale, softcap and lse count; lse:
    /// [own_tokens][q_heads], of the whole context.
    template <class T, class Out>
    status prefill(int layer, const token_view<const T>& k, const token_view<const T>& v,
                   const token_view<const T>& q, const token_view<Out>& out, prefill_options options,
                   cudaStream_t stream) {
        if (status s = check(layer, float_type_of<T>, q, k, v, out, options); !s) return s;
        float* const lse = std::exchange(options.lse, nullptr);
        T* const queries = memory_.as<T>();
        status s = send_queries(q, queries, stream);
        if (s) s = attend(layer, queries, k, v, options, stream);
        if (s && own_tokens_ > 0) s = cache_->append(layer, k, v, stream);
        if (s) s = send_states(stream);
        if (s && own_tokens_ > 0)
            s = detail::launch("launching the merge of partial outputs", detail::overlap::yes,
                               detail::merge_states_kernel<Out>,
                               dim3(static_cast<unsigned>((own_tokens_ * heads_ + 3) / 4)), 128, 0, stream,
                               static_cast<const float*>(gathered_), ranks(), own_tokens_ * heads_, out, lse);
        if (!s) begun_ = false;
        return s;
    }

private:
    int me() const noexcept { return group_->rank(); }
    int ranks() const noexcept { return static_cast<int>(first_seen_.size()); }
    /// The first position of the chunk from which keys of a rank are seen; its end if none are.
    int seen_from(int rank) const noexcept { return first_seen_[static_cast<std::size_t>(rank)]; }
    /// Queries of rank `of` that see keys of rank `on`.
    int rows(int of, int on) const noexcept {
        int n = 0;
        each_part(of, on, [&](int first, int end) { n += end - first; });
        return n;
    }
    std::size_t query_bytes() const noexcept {
        return static_cast<std::size_t>(heads_) * static_cast<std::size_t>(cache_->shape(0).head_dim) * 2;
    }
    int width() const noexcept { return cache_->formats(0).value_dim + 2; }
    std::size_t state_bytes() const noexcept {
        return static_cast<std::size_t>(heads_) * static_cast<std::size_t>(width()) * sizeof(float);
    }
    /// Calls f(first, end) for the positions of rank `of` whose queries see keys of rank `on`, in order.
    template <class F>
    void each_part(int of, int on, F&& f) const {
        for (const context_split::part& p : chunk_)
            if (p.rank == of && p.end > seen_from(on)) f(kvq::detail::larger(p.first, seen_from(on)), p.end);
    }

    status check_begin(const cache& own, sequence_id id, const context_split& split, int n) const {
        if (group_ == nullptr) return detail::bad_value("prefill of a divided context is not open");
        if (status s = own.check_equal_layers("a divided context"); !s) return s;
        if (split.ranks() != group_->ranks())
            return detail::bad_value("a context divided among %d ranks does not fit %d ranks", split.ranks(),
                                     group_->ranks());
        const page_geometry want = split.geometry(me());
        const cache_options& o = own.options();
        if (o.sinks != want.sinks || o.recent != want.recent || o.page_tokens != want.page_tokens)
            return detail::bad_value(
                "the cache of rank %d has %d sinks, %d recent tokens and pages of %d, its part of the "
                "context has %d, %d and %d",
                me(), o.sinks, o.recent, o.page_tokens, want.sinks, want.recent, want.page_tokens);
        if (heads_ % own.shape(0).kv_heads != 0)
            return detail::bad_value("%d query heads do not fit %d kv heads", heads_, own.shape(0).kv_heads);
        if (own.tokens(id) != split.tokens(me()))
            return detail::bad_value("sequence %d of rank %d holds %d tokens, its part of the context has %d",
                                     id.index, me(), own.tokens(id), split.tokens(me()));
        if (n < 1 || n > detail::most_tokens / heads_ || n > detail::most_tokens - split.tokens())
            return detail::bad_value("a chunk of %d tokens with %d query heads behind %d tokens", n, heads_,
                                     split.tokens());
        return {};
    }
    void plan(context_split& split, int n) {
        begin_ = split.tokens();
        end_ = begin_ + n;
        first_seen_.assign(static_cast<std::size_t>(split.ranks()), end_);
        for (int r = 0; r < split.ranks(); ++r)
            if (split.tokens(r) > 0) first_seen_[static_cast<std::size_t>(r)] = begin_;
        chunk_ = split.add(n);
        own_.clear();
        own_tokens_ = 0;
        for (const context_split::part& p : chunk_) {
            int& first = first_seen_[static_cast<std::size_t>(p.rank)];
            first = kvq::detail::smaller(first, p.first);
            if (p.rank != me()) continue;
            own_.push_back({p.first, p.end});
            own_tokens_ += p.size();
        }
    }
    /// Queries of the chunk, states of those that see keys of this rank, states of own queries from all
    /// ranks.
    status reserve(cudaStream_t stream) {
        const auto aligned = [](std::size_t bytes) { return kvq::detail::round_up(bytes, std::size_t{256}); };
        const std::size_t queries = aligned(static_cast<std::size_t>(end_ - begin_) * query_bytes()),
                          states = aligned(static_cast<std::size_t>(end_ - seen_from(me())) * state_bytes()),
                          gathered = static_cast<std::size_t>(ranks()) *
                                     static_cast<std::size_t>(own_tokens_) * state_bytes();
        const std::size_t bytes = queries + states + gathered;
        detail::larger_memories larger;
        if (status s = larger.find(memory_, from_, bytes, "a chunk of a divided context", stream); !s)
            return s;
        if (status s = larger.take(stream); !s) return s;
        states_ = reinterpret_cast<float*>(memory_.as<>() + queries);
        gathered_ = reinterpret_cast<float*>(memory_.as<>() + queries + states);
        return {};
    }

    template <class T, class Out>
    status check(int layer, float_type type, const token_view<const T>& q, const token_view<const T>& k,
                 const token_view<const T>& v, const token_view<Out>& out, const prefill_options& o) const {
        if (!begun_) return detail::bad_value("no chunk of a divided context has begun");
        const cache_shape shape = cache_->shape(0);
        if (layer < 0 || layer >= shape.layers)
            return detail::bad_value("layer %d is not among the %d layers of the cache", layer, shape.layers);
        if (type != cache_->formats(0).type)
            return detail::bad_value("q, k and v have another type than the cache");
        if (o.window != 0 || o.sink_logits != nullptr || o.state_out != nullptr || o.lead != 0)
            return detail::bad_value(
                "a divided context takes no sliding window (got %d), no learned sinks, "
                "no states and no lead",
                o.window);
        if (!(o.softcap >= 0.0f) || !(o.scale >= 0.0f))
            return detail::bad_value("scale %g, softcap %g", static_cast<double>(o.scale),
                                     static_cast<double>(o.softcap));
        if (q.tokens != own_tokens_ || k.tokens != own_tokens_ || v.tokens != own_tokens_ ||
            out.tokens != own_tokens_)
            return detail::bad_value("rank %d has %d tokens of the chunk, but q has %d, k %d, v %d, out %d",
                                     me(), own_tokens_, q.tokens, k.tokens, v.tokens, out.tokens);
        if (own_tokens_ == 0) return {};
        if (q.heads != heads_ || out.heads != heads_ || k.heads != shape.kv_heads ||
            v.heads != shape.kv_heads)
            return detail::bad_value("q, k, v, out have %d, %d, %d, %d heads, expected %d and %d", q.heads,
                                     k.heads, v.heads, out.heads, heads_, shape.kv_heads);
        if (q.dim != shape.head_dim || k.dim != shape.head_dim || v.dim != width() - 2 ||
            out.dim != width() - 2)
            return detail::bad_value("q, k, v, out have %d, %d, %d, %d channels, but the cache %d and %d",
                                     q.dim, k.dim, v.dim, out.dim, shape.head_dim, width() - 2);
        if (q.data == nullptr || k.data == nullptr || v.data == nullptr || out.data == nullptr)
            return detail::bad_value("q, k, v or out is a null pointer");
        return {};
    }

    /// Makes sends and receives of NCCL as one group: `f` calls one(result of a call).
    template <class F>
    status exchange(const char* what, F&& f) {
        return group_->call(what, [&](ncclComm_t c) {
            ncclResult_t result = ncclGroupStart();
            f(c, [&](ncclResult_t r) {
                if (result == ncclSuccess && r != ncclInProgress) result = r;
            });
            const ncclResult_t end = ncclGroupEnd();
            return result == ncclSuccess ? end : result;
        });
    }

    template <class T>
    status send_queries(const token_view<const T>& q, T* queries, cudaStream_t stream) {
        const auto at = [&](int position) {
            return reinterpret_cast<std::byte*>(queries) +
                   static_cast<std::size_t>(position - begin_) * query_bytes();
        };
        int row = 0;
        for (const index_range& p : own_) {
            if (status s =
                    detail::launch("launching a copy of queries", detail::overlap::no,
                                   detail::pack_rows_kernel<T>, dim3(static_cast<unsigned>(p.size())), 256, 0,
                                   stream, q.slice(row, p.size()), reinterpret_cast<T*>(at(p.first)));
                !s)
                return s;
            row += p.size();
        }
        return exchange("exchanging queries", [&](ncclComm_t c, auto&& one) {
            for (int r = 0; r < ranks(); ++r)
                if (r != me())
                    each_part(me(), r, [&](int first, int end) {
                        one(ncclSend(at(first), static_cast<std::size_t>(end - first) * query_bytes(),
                                     ncclUint8, r, c, stream));
                    });
            for (int r = 0; r < ranks(); ++r)
                if (r != me())
                    each_part(r, me(), [&](int first, int end) {
                        one(ncclRecv(at(first), static_cast<std::size_t>(end - first) * query_bytes(),
                                     ncclUint8, r, c, stream));
                    });
        });
    }

    /// States of all queries that see keys of this rank. Between two of its ranges queries see the same keys:
    /// a launch per range.
    template <class T>
    status attend(int layer, const T* queries, const token_view<const T>& k, const token_view<const T>& v,
                  prefill_options options, cudaStream_t stream) {
        const cache_shape shape = cache_->shape(0);
        int first = seen_from(me()), keys = 0;
        for (std::size_t i = 0; first < end_; ++i) {
            const bool holds = i < own_.size();
            const int end = i + 1 < own_.size() ? own_[i + 1].first : end_;
            options.lead = holds ? keys + first - own_[i].first : 0;
            options.state_out = states_ + static_cast<std::size_t>(first - seen_from(me())) *
                                              static_cast<std::size_t>(heads_) *
                                              static_cast<std::size_t>(width());
            keys += holds ? own_[i].size() : 0;
            const token_view<const T> q(queries + static_cast<std::size_t>(first - begin_) *
                                                      static_cast<std::size_t>(heads_) *
                                                      static_cast<std::size_t>(shape.head_dim),
                                        end - first, heads_, shape.head_dim);
            const auto part = [&](const token_view<const T>& x, int dim) {
                return keys > 0 ? x.slice(0, keys) : token_view<const T>(nullptr, 0, shape.kv_heads, dim);
            };
            if (status s = cache_->prefill_part(layer, part(k, shape.head_dim), part(v, width() - 2), q,
                                                options, stream);
                !s)
                return s;
            first = end;
        }
        return {};
    }

    status send_states(cudaStream_t stream) {
        const auto heads = static_cast<std::size_t>(heads_);
        const auto computed = [&](int position) {
            return states_ + static_cast<std::size_t>(position - seen_from(me())) * heads *
                                 static_cast<std::size_t>(width());
        };
        // Where the state of an own query from a rank goes. Queries before it see nothing of that rank.
        const auto expected = [&](int rank, int row) {
            return gathered_ + static_cast<std::size_t>(rank * own_tokens_ + row) * heads *
                                   static_cast<std::size_t>(width());
        };
        for (int r = 0; r < ranks(); ++r) {
            const int unseen = (own_tokens_ - rows(me(), r)) * heads_;
            if (unseen == 0) continue;
            if (status s = detail::launch("launching empty states", detail::overlap::no,
                                          detail::empty_states_kernel<>,
                                          dim3(static_cast<unsigned>((unseen + 255) / 256)), 256, 0, stream,
                                          expected(r, 0), unseen, width());
                !s)
                return s;
        }
        int row = 0;  // own queries see own keys
        cudaError_t code = cudaSuccess;
        each_part(me(), me(), [&](int first, int end) {
            const std::size_t bytes = static_cast<std::size_t>(end - first) * state_bytes();
            if (code == cudaSuccess)
                code = cudaMemcpyAsync(expected(me(), row), computed(first), bytes, cudaMemcpyDeviceToDevice,
                                       stream);
            row += end - first;
        });
        if (code != cudaSuccess) return detail::runtime_error(code, "copying partial outputs");
        return exchange("exchanging partial outputs", [&](ncclComm_t c, auto&& one) {
            for (int r = 0; r < ranks(); ++r)
                if (r != me())
                    each_part(r, me(), [&](int first, int end) {
                        one(ncclSend(computed(first), static_cast<std::size_t>(end - first) * state_bytes(),
                                     ncclUint8, r, c, stream));
                    });
            for (int r = 0; r < ranks(); ++r) {
                if (r == me()) continue;
                int to = own_tokens_ - rows(me(), r);
                each_part(me(), r, [&](int first, int end) {
                    one(ncclRecv(expected(r, to), static_cast<std::size_t>(end - first) * state_bytes(),
                                 ncclUint8, r, c, stream));
                    to += end - first;
                });
            }
        });
    }

    nccl_group* group_ = nullptr;
    cache* cache_ = nullptr;
    int heads_ = 0, begin_ = 0, end_ = 0, own_tokens_ = 0;
    bool begun_ = false;
    std::vector<context_split::part> chunk_;
    std::vector<index_range> own_;
    std::vector<int> first_seen_;  // by rank
    device_allocator from_;
    detail::device_memory memory_;
    float *states_ = nullptr, *gathered_ = nullptr;
};

}}}  // namespace kvq::cuda
