// Messages of nccl_transfer.cuh, their checksums, and two buffers that take turns.
//
//   request    receiver to sender: shape, window, format          offer   sender to receiver: tokens,
//                                                                         formats, bytes, or a refusal
//   formats    a byte per quantized page, and 12 for each that hides tokens      answer  receiver to sender:
//                                                                                nothing, or a refusal
//   slice      header of 64 bytes, then for each kind of page all keys and all values; kinds are the sender's
//              formats, the window, sinks. Pages in their order: quantized ones, window, sinks, cut into
//              slices of as many pages
//   checksum   sum over 32-bit words w_i of w_i * ((i + 1) * 0x9e3779b97f4a7c15 | 1), modulo 2^64: a single
//              damaged word always changes it
#pragma once

#include <cstring>
#include <vector>

#include "../../cuda/host/cache.hpp"
#include "nccl.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

KVQ_HD constexpr std::uint64_t checksum_factor(std::uint64_t word) noexcept {
    return (word + 1) * 0x9e3779b97f4a7c15ULL | 1;
}

struct slice_header {
    static constexpr std::uint64_t right_magic = 0x31656369'6c73766bULL;
    std::uint64_t magic = right_magic;
    std::int32_t layer = 0, slice = 0;
    std::uint64_t bytes = 0;
    unsigned long long checksum = 0;
    unsigned long long computed = 0;  // by the receiver
    std::uint64_t unused[3] = {};
};
static_assert(sizeof(slice_header) == 64);

template <int = 0>
__global__ void write_header_kernel(const __grid_constant__ slice_header header, slice_header* to) {
    *to = header;
}
template <int = 0>
__global__ void note_header_kernel(const slice_header* from, slice_header* to) {
    *to = *from;
    to->computed = 0;
}
/// What 16 bytes add to a checksum; place: of their first word among the words of the slice.
__device__ __forceinline__ unsigned long long checksum_of(const uint4& v, std::uint64_t place) {
    return v.x * checksum_factor(place) + v.y * checksum_factor(place + 1) +
           v.z * checksum_factor(place + 2) + v.w * checksum_factor(place + 3);
}
/// Writes the header of a slice; its checksum is added by what packs the pages.
inline status write_header(std::byte* slice, std::size_t bytes, int layer, int number, cudaStream_t stream) {
    slice_header header;
    header.layer = layer;
    header.slice = number;
    header.bytes = bytes;
    return launch("launching a header", overlap::no, write_header_kernel<>, dim3(1), 1, 0, stream, header,
                  reinterpret_cast<slice_header*>(slice));
}
/// Keeps the header of a slice that came; the checksum that it should have is added by what unpacks the
/// pages.
inline status note_header(const std::byte* slice, slice_header* to, cudaStream_t stream) {
    return launch("launching a header", overlap::no, note_header_kernel<>, dim3(1), 1, 0, stream,
                  reinterpret_cast<const slice_header*>(slice), to);
}
inline status check_header(const slice_header& h, int from, int layer, int slice, std::size_t bytes) {
    const status damaged =
        bad_value("slice %d of layer %d from rank %d is damaged: its checksum is %llx, not %llx", slice,
                  layer, from, h.computed, h.checksum);
    const bool right = h.magic == slice_header::right_magic && h.layer == layer && h.slice == slice &&
                       h.bytes == bytes && h.computed == h.checksum;
    return right ? status{} : damaged;
}
inline status check_peer(const nccl_group& group, int peer) {
    if (peer >= 0 && peer < group.ranks() && peer != group.rank()) return {};
    return bad_value("rank %d exchanges no pages with rank %d of %d", group.rank(), peer, group.ranks());
}

// ---- small messages: flat structs whose last member is a checksum ----

inline std::uint64_t host_checksum(const void* data, std::size_t bytes) noexcept {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i * 4 < bytes; ++i) {
        std::uint32_t word = 0;
        std::memcpy(&word, static_cast<const std::byte*>(data) + 4 * i,
                    kvq::detail::smaller<std::size_t>(4, bytes - 4 * i));
        sum += word * checksum_factor(i);
    }
    return sum;
}

inline constexpr std::size_t most_name = 128;  ///< bytes of a format's name, its end included

struct transfer_request {
    static constexpr std::uint64_t right_magic = 0x32717266'6e61726bULL;
    std::uint64_t magic = right_magic;
    std::int32_t layers = 0, kv_heads = 0, head_dim = 0, value_dim = 0, type = 0, page_tokens = 0;
    std::int32_t sinks = 0, recent = 0, rollback = 0, ring = 0;
    char format[most_name] = {};
    std::uint64_t checksum = 0;
};
struct transfer_offer {
    static constexpr std::uint64_t right_magic = 0x33666f66'6e61726bULL;
    std::uint64_t magic = right_magic;
    std::int32_t tokens = 0, committed = 0, first_copy = 0, target = 0;
    std::int32_t cut_pages = 0, unused = 0;  ///< pages that hide tokens
    char names[most_formats][most_name] = {};
    std::uint64_t fingerprints[most_formats] = {};
    std::uint64_t bytes = 0, bytes_as_is = 0, formats_checksum = 0;
    char refusal[192] = {};
    std::uint64_t checksum = 0;
};
struct transfer_answer {
    static constexpr std::uint64_t right_magic = 0x31736e61'6e61726bULL;
    std::uint64_t magic = right_magic;
    char refusal[192] = {};
    std::uint64_t checksum = 0;
};

/// Two buffers that take turns, a stream for messages and one for pages.
struct transfer_pipe {
    nccl_group* group = nullptr;
    int peer = 0;
    cudaStream_t messages = nullptr, pages = nullptr;

    transfer_pipe() = default;
    transfer_pipe(const transfer_pipe&) = delete;
    transfer_pipe& operator=(const transfer_pipe&) = delete;
    ~transfer_pipe() { close(); }

    status open(nccl_group& of, int with, const device_allocator& memory, cudaStream_t stream) {
        // Kernels of NCCL go first: they take few multiprocessors, and the other rank waits for them.
        int least = 0, greatest = 0;
        cudaError_t code = cudaDeviceGetStreamPriorityRange(&least, &greatest);
        if (code == cudaSuccess)
            code = cudaStreamCreateWithPriority(&messages, cudaStreamNonBlocking, greatest);
        if (code == cudaSuccess) code = cudaStreamCreateWithFlags(&pages, cudaStreamNonBlocking);
        for (cudaEvent_t* e : {&passed_, &done_[0], &done_[1]})
            if (code == cudaSuccess) code = cudaEventCreateWithFlags(e, cudaEventDisableTiming);
        status s = code == cudaSuccess ? small_.allocate(memory, small_bytes, "messages", stream)
                                       : runtime_error(code, "making a stream for messages");
        group = &of;
        peer = with;
        if (s) s = follow(stream);
        if (!s) close();
        return s;
    }
    /// Memory for slices.
    status reserve(std::size_t bytes, const device_allocator& memory, cudaStream_t stream) {
        for (device_memory& b : buffers_)
            if (status s = b.allocate(memory, bytes, "slices of a layer", stream); !s) return s;
        return follow(stream);
    }
    void close() noexcept {
        if (group == nullptr) return;
        // Launches still use what is given back. After an error the communicator is gone, and so are kernels
        // that waited.
        for (cudaStream_t* s : {&messages, &pages})
            if (*s != nullptr) {
                if (!group->wait(*s, "until messages have ended")) (void)cudaStreamSynchronize(*s);
                (void)cudaStreamDestroy(std::exchange(*s, nullptr));
            }
        for (cudaEvent_t* e : {&passed_, &done_[0], &done_[1]})
            if (*e != nullptr) (void)cudaEventDestroy(std::exchange(*e, nullptr));
        for (device_memory* m : {&buffers_[0], &buffers_[1], &small_}) *m = device_memory();
        group = nullptr;
    }

    /// Both streams wait for what is on this one.
    status follow(cudaStream_t stream) {
        cudaError_t code = cudaEventRecord(passed_, stream);
        for (cudaStream_t s : {messages, pages})
            if (code == cudaSuccess) code = cudaStreamWaitEvent(s, passed_, 0);
        return checked(code);
    }
    status pass(cudaStream_t from, cudaStream_t to) {
        cudaError_t code = cudaEventRecord(passed_, from);
        if (code == cudaSuccess) code = cudaStreamWaitEvent(to, passed_, 0);
        return checked(code);
    }
    std::byte* next() const noexcept { return buffers_[turn_].as<>(); }
    status wait_for_buffer(cudaStream_t stream) {
        return checked(cudaStreamWaitEvent(stream, done_[turn_], 0));
    }
    status buffer_done(cudaStream_t stream) {
        const cudaError_t code = cudaEventRecord(done_[turn_], stream);
        turn_ ^= 1;
        return checked(code);
    }

    template <class Words>
    status send_words(Words& words, const char* what) {
        words.checksum = 0;
        words.checksum = host_checksum(&words, sizeof words);
        return send_bytes(&words, sizeof words, what);
    }
    template <class Words>
    status receive_words(Words& words, const char* what) {
        if (status s = receive_bytes(&words, sizeof words, what); !s) return s;
        const std::uint64_t sent = std::exchange(words.checksum, 0),
                            right = host_checksum(&words, sizeof words);
        if (words.magic == Words::right_magic && sent == right) return {};
        return bad_value("a message from rank %d is damaged: its checksum is %llx, not %llx", peer,
                         static_cast<unsigned long long>(right), static_cast<unsigned long long>(sent));
    }
    status send_list(const std::vector<std::int8_t>& list, const char* what) {
        for (std::size_t at = 0; at < list.size(); at += small_bytes)
            if (status s = send_bytes(&list[at], kvq::detail::smaller(small_bytes, list.size() - at), what);
                !s)
                return s;
        return {};
    }
    status receive_list(std::vector<std::int8_t>& list, const char* what) {
        for (std::size_t at = 0; at < list.size(); at += small_bytes)
            if (status s =
                    receive_bytes(&list[at], kvq::detail::smaller(small_bytes, list.size() - at), what);
                !s)
                return s;
        return {};
    }

private:
    static constexpr std::size_t small_bytes = 4096;

    static status checked(cudaError_t code) {
        return code == cudaSuccess ? status{} : runtime_error(code, "ordering streams of messages");
    }
    status send_bytes(const void* from, std::size_t bytes, const char* what) {
        const cudaError_t code =
            cudaMemcpyAsync(small_.as<>(), from, bytes, cudaMemcpyHostToDevice, messages);
        if (code != cudaSuccess) return runtime_error(code, "copying a message");
        if (status s = group->send(small_.as<>(), bytes, peer, messages); !s) return s;
        return group->wait(messages, what);
    }
    status receive_bytes(void* to, std::size_t bytes, const char* what) {
        if (status s = group->receive(small_.as<>(), bytes, peer, messages); !s) return s;
        if (status s = group->wait(messages, what); !s) return s;
        const cudaError_t code = cudaMemcpy(to, small_.as<>(), bytes, cudaMemcpyDeviceToHost);
        return code == cudaSuccess ? status{} : runtime_error(code, "copying a message");
    }

    cudaEvent_t passed_ = nullptr, done_[2] = {};
    device_memory buffers_[2], small_;
    int turn_ = 0;
};

}}}  // namespace kvq::cuda::detail
