// A divided context on the GPUs of one machine: partial states are written straight into the memory of the
// other GPUs (NVLink, PCIe).
//
//   cuda::peer_context_attention merge;
//     s = merge.open(group, max_batch, q_heads, value_dim, stream);      as context_attention
//   s = merge.attend(cache, layer, q, out, {}, stream);   ...   s = merge.wait(stream, "for the outputs");
//
// Of a cache whose formats make_scored_format<across_ranks, ...>() has compiled, with outputs of the cache's
// type, the launch of attention itself sends, waits and merges (state_exchange.cuh). Otherwise a second
// launch does. NCCL brings the handles of the memory once.
// Contract: the bits of context_attention. A rank whose states do not come within the limit of the group:
// kernels end, outputs are NaN, and wait(), attend() and merge() say so. Ranks are threads of one process, or
// processes (CUDA IPC), at most 8, with peer access.
#pragma once

#include <unistd.h>

#include "../../cuda/decode/state_exchange.cuh"
#include "nccl_attention.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

/// States that are there already, [rows][value_dim + 2]. A warp per row.
template <class T>
__global__ void __launch_bounds__(128)
    exchange_states_kernel(const __grid_constant__ state_exchange x, const float* own, int rows,
                           token_view<T> out, float* lse) {
    launch_dependents();
    const int row = static_cast<int>(blockIdx.x) * 4 + static_cast<int>(threadIdx.x) / 32,
              lane = static_cast<int>(threadIdx.x) % 32;
    wait_for_predecessor();
    if (row >= rows) return;
    own += static_cast<std::size_t>(row) * static_cast<std::size_t>(out.dim + 2);
    x.send(row, lane, [&](int vector) {
        const int channel = 4 * (vector - 1);
        const auto value = [&](int i) { return channel + i < out.dim ? own[2 + channel + i] : 0.0f; };
        return vector == 0 ? float4{own[0], own[1], 0.0f, 0.0f}
                           : float4{value(0), value(1), value(2), value(3)};
    });
    __syncwarp();
    merge_ranks(x, row, lane, out.at(row / out.heads, row % out.heads), out.dim, lse);
}

}  // namespace detail

class peer_context_attention : public divided_context<peer_context_attention> {
public:
    peer_context_attention() = default;
    peer_context_attention(const peer_context_attention&) = delete;
    peer_context_attention& operator=(const peer_context_attention&) = delete;
    ~peer_context_attention() { close(); }

    /// On every rank, with the same numbers. Waits for all ranks.
    status open(nccl_group& group, int max_batch, int q_heads, int value_dim, cudaStream_t stream) {
        if (group.ranks() > detail::state_exchange::most_ranks)
            return detail::bad_value("%d ranks, but at most %d write to each other's memory", group.ranks(),
                                     detail::state_exchange::most_ranks);
        if (status s = prepare(group, max_batch, q_heads, value_dim); !s) return s;
        const status s = connect(stream);
        if (!s) close();
        return s;
    }
    /// The launches of all ranks must have ended.
    void close() noexcept {
        for (void*& p : opened_)
            if (p != nullptr) (void)cudaIpcCloseMemHandle(std::exchange(p, nullptr));
        if (memory_ != nullptr) (void)cudaFree(std::exchange(memory_, nullptr));
        if (failed_ != nullptr) (void)cudaFreeHost(std::exchange(failed_, nullptr));
        states_ = nullptr;
        exchange_ = {};
        group_ = nullptr;
    }
    /// Waits until the stream has done all of its work. An error if a rank's states have not come.
    status wait(cudaStream_t stream, const char* what) {
        if (group_ == nullptr) return detail::bad_value("attention over a divided context is not open");
        if (status s = group_->wait(stream, what); !s) return s;
        return check_peers();
    }

private:
    friend divided_context;

    /// What a rank tells the others.
    struct place {
        std::uint64_t machine;
        int process, device;
        void* memory;
        cudaIpcMemHandle_t handle;
    };
    status check_peers() const {
        if (*static_cast<volatile int*>(failed_) == 0) return {};
        status s = detail::bad_value(
            "rank %d waited %lld ms for partial outputs, which is the time limit: another rank has failed or "
            "is silent",
            group_->rank(), static_cast<long long>(group_->limit().count()));
        s.code = cudaErrorTimeout;
        return s;
    }
    status connect(cudaStream_t stream) {
        const int ranks = group_->ranks(), me = group_->rank();
        detail::state_exchange x{};
        x.limit = static_cast<unsigned long long>(group_->limit().count()) * 1000000ULL;
        x.rank = me;
        x.ranks = ranks;
        x.vectors = 1 + static_cast<unsigned>(kvq::detail::ceil_div(dim_, 4));
        const auto rows = static_cast<std::size_t>(rows_);
        const std::size_t vectors = 2 * static_cast<std::size_t>(ranks) * rows * x.vectors;
        if (vectors > 0xffffffffu)
            return detail::bad_value("%d rows of value_dim %d on %d ranks are too many for one launch", rows_,
                                     dim_, ranks);
        x.stride = static_cast<unsigned>(rows * x.vectors);
        const std::size_t inboxes = kvq::detail::round_up(vectors * sizeof(uint4), std::size_t{256}),
                          states = own_values() * sizeof(float),
                          steps = kvq::detail::round_up(rows * sizeof(unsigned), std::size_t{256}),
                          places = static_cast<std::size_t>(ranks) * sizeof(place);
        bytes_ = inboxes + states + steps + places;
        cudaError_t code = cudaMalloc(&memory_, bytes_);
        std::byte* const memory = static_cast<std::byte*>(memory_);
        if (code == cudaSuccess) code = cudaMemsetAsync(memory, 0, bytes_, stream);
        if (code == cudaSuccess) code = cudaMallocHost(&failed_, sizeof(int));
        place own{machine(), static_cast<int>(getpid()), 0, memory_, {}};
        if (code == cudaSuccess) code = cudaGetDevice(&own.device);
        if (code == cudaSuccess) code = cudaIpcGetMemHandle(&own.handle, memory_);
        if (code != cudaSuccess)
            return detail::runtime_error(code, "memory for partial outputs of all ranks");
        *failed_ = 0;
        states_ = reinterpret_cast<float*>(memory + inboxes);
        x.steps = reinterpret_cast<unsigned*>(memory + inboxes + states);
        x.failed = failed_;
        std::byte* const told = memory + bytes_ - places;
        std::vector<place> all(static_cast<std::size_t>(ranks));
        code = cudaMemcpyAsync(told + static_cast<std::size_t>(me) * sizeof(place), &own, sizeof own,
                               cudaMemcpyHostToDevice, stream);
        if (code != cudaSuccess) return detail::runtime_error(code, "handles of memory");
        if (status s = group_->call("telling handles of memory",
                                    [&](ncclComm_t c) {
                                        return ncclAllGather(
                                            told + static_cast<std::size_t>(me) * sizeof(place), told,
                                            sizeof(place), ncclUint8, c, stream);
                                    });
            !s)
            return s;
        if (status s = group_->wait(stream, "for handles of memory"); !s) return s;
        code = cudaMemcpy(all.data(), told, places, cudaMemcpyDeviceToHost);
        for (int r = 0; r < ranks && code == cudaSuccess; ++r) {
            const place& other = all[static_cast<std::size_t>(r)];
            void* at = other.memory;
            if (other.machine != own.machine)
                return detail::bad_value(
                    "rank %d is on another machine, whose memory rank %d cannot write to", r, me);
            if (r != me && other.process == own.process) {
                code = cudaDeviceEnablePeerAccess(other.device, 0);
                if (code == cudaErrorPeerAccessAlreadyEnabled) {
                    (void)cudaGetLastError();
                    code = cudaSuccess;
                }
            } else if (r != me) {
                code = cudaIpcOpenMemHandle(&at, other.handle, cudaIpcMemLazyEnablePeerAccess);
                if (code == cudaSuccess) opened_[r] = at;
            }
            x.inboxes[r] = static_cast<uint4*>(at);
        }
        x.own = x.inboxes[me];
        exchange_ = x;
        return code == cudaSuccess ? status{} : detail::runtime_error(code, "memory of another GPU");
    }
    static std::uint64_t machine() noexcept {
        char name[256] = {};
        (void)gethostname(name, sizeof name - 1);
        std::uint64_t hash = 1469598103934665603ULL;
        for (const char* c = name; *c != '\0'; ++c)
            hash = (hash ^ static_cast<unsigned char>(*c)) * 1099511628211ULL;
        return hash;
    }

    template <class T, class Out>
    status attend_divided(cache& own, int layer, const token_view<const T>& q, const token_view<Out>& out,
                          attention_options options, cudaStream_t stream) {
        if constexpr (std::is_same_v<T, Out>)
            if (in_one_launch(own, layer)) {
                if (status s = check_peers(); !s) return s;
                return own.attend(layer, q, out, options, stream, across_ranks{exchange_});
            }
        return attend_and_exchange(own, layer, q, out, options, stream);
    }
    template <class Out>
    status exchange(int rows, const token_view<Out>& out, float* lse, cudaStream_t stream) {
        if (status s = check_peers(); !s) return s;
        return detail::launch("launching the merge of partial outputs", detail::overlap::yes,
                              detail::exchange_states_kernel<Out>,
                              dim3(static_cast<unsigned>((rows + 3) / 4)), 128, 0, stream, exchange_,
                              static_cast<const float*>(states_), rows, out, lse);
    }

    void* memory_ = nullptr;
    void* opened_[detail::state_exchange::most_ranks] = {};
    detail::state_exchange exchange_ = {};
    int* failed_ = nullptr;  // of the host
};

}}}  // namespace kvq::cuda
