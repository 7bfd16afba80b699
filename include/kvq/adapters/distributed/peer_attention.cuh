// A divided context on the GPUs of one machine: partial states are written straight into the memory of the other GPUs (NVLink, PCIe).
//
//   cuda::peer_context_attention merge;  s = merge.open(group, max_batch, q_heads, value_dim, stream);      as context_attention
//   s = merge.attend(cache, layer, q, out, {}, stream);   ...   s = merge.wait(stream, "for the outputs");
//
// One launch sends, waits and merges: 5 us on two H100 where a collective and a merge take 10. NCCL brings the handles of the memory once.
// Every word of a state says itself whether it has arrived (merge.cuh); two sets of slots take turns, so that a rank never writes what
// another one still reads: it gets to the next step but one only when that one has sent the next.
// Contract: the bits of context_attention. A rank whose states do not come within the limit of the group: kernels end, outputs are NaN,
// and wait(), attend() and merge() say so. Ranks are threads of one process, or processes (CUDA IPC), at most 16, with peer access.
// Source: words that carry their own flag are the "LL" protocol of NCCL.
#pragma once

#include <unistd.h>

#include "../../cuda/decode/merge.cuh"
#include "nccl_attention.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

struct peer_pointers {
    static constexpr int most = 16;
    uint4* of[most];  // slots of each rank: [2][ranks][rows][vectors]
};

/// Words that another device reads, or has written.
__device__ __forceinline__ void store_system(uint4* to, const uint4& v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}
__device__ __forceinline__ uint4 load_system(const uint4* from) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}
__device__ __forceinline__ unsigned long long nanoseconds() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

/// Four words when they have arrived; NaN, and *failed, when they have not within `limit` nanoseconds. *failed is memory of the host: it
/// is not looked at while the words may still come in time.
__device__ __forceinline__ float4 await(const uint4* from, unsigned long long limit, volatile int* failed) {
    uint4 v = load_system(from);
    if (!arrived(v)) {
        const unsigned long long start = nanoseconds();
        while (!arrived(v)) {
            if (nanoseconds() - start > limit) {
                *failed = 1;
                return {NAN, NAN, NAN, NAN};
            }
            v = load_system(from);
        }
    }
    return {opened(v.x), opened(v.y), opened(v.z), opened(v.w)};
}

/// A warp per row. own: [rows][dim + 2].
template <class T>
__global__ void __launch_bounds__(128)
    merge_peers_kernel(const __grid_constant__ peer_pointers peers, const float* own, int me, int ranks,
                       int most_rows, int rows, token_view<T> out, float* lse, unsigned* steps,
                       unsigned long long limit, volatile int* failed) {
    launch_dependents();
    const int row = static_cast<int>(blockIdx.x) * 4 + static_cast<int>(threadIdx.x) / 32,
              lane = static_cast<int>(threadIdx.x) % 32;
    wait_for_predecessor();
    if (row >= rows) return;
    const int width = out.dim + 2, vectors = kvq::detail::ceil_div(width, 4);
    const unsigned step = steps[row];
    const auto slot = [&](int on, int of) {
        return peers.of[on] + ((static_cast<std::size_t>(step % 2) * static_cast<std::size_t>(ranks) +
                                static_cast<std::size_t>(of)) *
                                   static_cast<std::size_t>(most_rows) +
                               static_cast<std::size_t>(row)) *
                                  static_cast<std::size_t>(vectors);
    };
    own += static_cast<std::size_t>(row) * static_cast<std::size_t>(width);
    for (int v = lane; v < vectors; v += 32) {
        const auto word = [&](int i) { return i < width ? own[i] : 0.0f; };
        const uint4 x = sealed(float4{word(4 * v), word(4 * v + 1), word(4 * v + 2), word(4 * v + 3)});
        for (int r = 0; r < ranks; ++r) store_system(slot(r, me) + v, x);
    }
    // As merge_states_kernel, with the same bits. Lane 0 has max and sum of a rank in its first words.
    float max = -INFINITY, sum = 0.0f;
    const int own_vector = kvq::detail::smaller(lane, vectors - 1);
    for (int r = 0; r < ranks; ++r)
        max = fmaxf(max, __shfl_sync(~0u, await(slot(me, r) + own_vector, limit, failed).x, 0));
    T* const to = out.at(row / out.heads, row % out.heads);
    for (int first = 0; first < vectors; first += 32) {
        const int v = first + lane;
        float output[4] = {};
        float total = 0.0f;
        for (int r = 0; r < ranks; ++r) {
            const float4 x = await(slot(me, r) + kvq::detail::smaller(v, vectors - 1), limit, failed);
            const float4 head = first == 0 ? x : await(slot(me, r), limit, failed);
            const float of_rank = __shfl_sync(~0u, head.x, 0), rank_sum = __shfl_sync(~0u, head.y, 0);
            if (of_rank == -INFINITY) continue;
            const float factor = exp2_fast(of_rank - max);
            total = fmaf(rank_sum, factor, total);
            output[0] = fmaf(x.x, factor, output[0]);
            output[1] = fmaf(x.y, factor, output[1]);
            output[2] = fmaf(x.z, factor, output[2]);
            output[3] = fmaf(x.w, factor, output[3]);
        }
        sum = total;
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        for (int i = 0; i < 4; ++i) {
            const int channel = 4 * v + i - 2;
            if (v < vectors && channel >= 0 && channel < out.dim)
                to[channel] = from_float<T>(output[i] * inverse);
        }
    }
    if (lse != nullptr && lane == 0) lse[row] = sum == 0.0f ? -INFINITY : (max + log2f(sum)) / log2e;
    __syncwarp();
    for (int r = 0; r < ranks; ++r)
        for (int v = lane; v < vectors; v += 32) store_system(slot(me, r) + v, uint4{0, 0, 0, 0});
    if (lane == 0) steps[row] = step + 1;
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
        if (group.ranks() > detail::peer_pointers::most)
            return detail::bad_value("%d ranks, but at most %d write to each other's memory", group.ranks(),
                                     detail::peer_pointers::most);
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
        const auto rows = static_cast<std::size_t>(rows_);
        const std::size_t slots = 2 * static_cast<std::size_t>(ranks) * rows *
                                  kvq::detail::ceil_div(static_cast<std::size_t>(dim_ + 2), std::size_t{4}) *
                                  sizeof(uint4),
                          places = static_cast<std::size_t>(ranks) * sizeof(place);
        bytes_ = slots + rows * sizeof(unsigned) + own_values() * sizeof(float) + places + 512;
        std::byte* memory = nullptr;
        cudaError_t code = cudaMalloc(&memory_, bytes_);
        memory = static_cast<std::byte*>(memory_);
        if (code == cudaSuccess) code = cudaMemsetAsync(memory, 0, bytes_, stream);
        if (code == cudaSuccess) code = cudaMallocHost(&failed_, sizeof(int));
        place own{machine(), static_cast<int>(getpid()), 0, memory_, {}};
        if (code == cudaSuccess) code = cudaGetDevice(&own.device);
        if (code == cudaSuccess) code = cudaIpcGetMemHandle(&own.handle, memory_);
        if (code != cudaSuccess)
            return detail::runtime_error(code, "memory for partial outputs of all ranks");
        *failed_ = 0;
        states_ = reinterpret_cast<float*>(memory + kvq::detail::round_up(slots, std::size_t{256}));
        steps_ = reinterpret_cast<unsigned*>(states_ + own_values());
        std::byte* const told = reinterpret_cast<std::byte*>(steps_ + rows_);
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
            peers_.of[r] = static_cast<uint4*>(at);
        }
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

    template <class Out>
    status exchange(int rows, const token_view<Out>& out, float* lse, cudaStream_t stream) {
        if (status s = check_peers(); !s) return s;
        const auto limit = static_cast<unsigned long long>(group_->limit().count()) * 1000000ULL;
        return detail::launch("launching the merge of partial outputs", detail::overlap::yes,
                              detail::merge_peers_kernel<Out>, dim3(static_cast<unsigned>((rows + 3) / 4)),
                              128, 0, stream, peers_, static_cast<const float*>(states_), group_->rank(),
                              group_->ranks(), rows_, rows, out, lse, steps_, limit,
                              static_cast<volatile int*>(failed_));
    }

    void* memory_ = nullptr;
    void* opened_[detail::peer_pointers::most] = {};
    detail::peer_pointers peers_ = {};
    unsigned* steps_ = nullptr;
    int* failed_ = nullptr;  // of the host
};

}}}  // namespace kvq::cuda
