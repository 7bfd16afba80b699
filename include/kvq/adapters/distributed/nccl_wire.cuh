// What nccl_transfer.cuh is made of: messages, checksums, which page of a sequence lies where in which slice, two buffers that take turns.
//
//   request    receiver to sender: shape, window, format          offer   sender to receiver: tokens, formats, bytes, or a refusal
//   formats    a byte per quantized page                           answer  receiver to sender: nothing, or a refusal
//   slice      header of 64 bytes, then for each kind of page all keys and all values; kinds are the sender's formats, the window,
//              sinks. Pages in their order: quantized ones, window, sinks, cut into slices of as many pages
//   checksum   sum over 32-bit words w_i of w_i * ((i + 1) * 0x9e3779b97f4a7c15 | 1), modulo 2^64: a single damaged word always changes it
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "../../backends/cuda/cache.cuh"
#include "nccl.cuh"

namespace kvq::inline KVQ_TAGGED::cuda::detail {

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

__global__ void write_header_kernel(const __grid_constant__ slice_header header, slice_header* to) {
    *to = header;
}
__global__ void note_header_kernel(const slice_header* from, slice_header* to) {
    *to = *from;
    to->computed = 0;
}
/// Adds the checksum of `count` times 16 bytes to *sum.
__global__ void __launch_bounds__(256)
    checksum_kernel(const uint4* data, std::size_t count, unsigned long long* sum) {
    unsigned long long own = 0;
    for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
         i += static_cast<std::size_t>(gridDim.x) * blockDim.x) {
        const uint4 v = data[i];
        own += v.x * checksum_factor(4 * i) + v.y * checksum_factor(4 * i + 1) +
               v.z * checksum_factor(4 * i + 2) + v.w * checksum_factor(4 * i + 3);
    }
    for (int step = 16; step > 0; step /= 2) own += __shfl_xor_sync(~0u, own, step);
    if (threadIdx.x % 32 == 0) atomicAdd(sum, own);
}
inline status add_checksum(const std::byte* slice, std::size_t bytes, unsigned long long* sum,
                           cudaStream_t stream) {
    const std::size_t count = (bytes - sizeof(slice_header)) / sizeof(uint4);
    const std::size_t blocks = std::clamp<std::size_t>(count / 2048, 1, 528);
    return launch("launching a checksum", overlap::no, checksum_kernel, dim3(static_cast<unsigned>(blocks)), 256,
                  0, stream, reinterpret_cast<const uint4*>(slice + sizeof(slice_header)), count, sum);
}
/// Writes the header of a slice.
inline status seal(std::byte* slice, std::size_t bytes, int layer, int number, cudaStream_t stream) {
    slice_header header;
    header.layer = layer;
    header.slice = number;
    header.bytes = bytes;
    auto* const to = reinterpret_cast<slice_header*>(slice);
    if (status s = launch("launching a header", overlap::no, write_header_kernel, dim3(1), 1, 0, stream, header, to);
        !s)
        return s;
    return add_checksum(slice, bytes, &to->checksum, stream);
}
/// Keeps the header of a slice that came, and the checksum that it should have.
inline status note(const std::byte* slice, std::size_t bytes, slice_header* to, cudaStream_t stream) {
    if (status s = launch("launching a header", overlap::no, note_header_kernel, dim3(1), 1, 0, stream,
                          reinterpret_cast<const slice_header*>(slice), to);
        !s)
        return s;
    return add_checksum(slice, bytes, &to->computed, stream);
}
inline status check_header(const slice_header& h, int from, int layer, int slice, std::size_t bytes) {
    const status damaged = bad_value(
        "slice %d of layer %d from rank %d is damaged: its checksum is %llx, not %llx", slice, layer, from,
        h.computed, h.checksum);
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
        std::memcpy(&word, static_cast<const std::byte*>(data) + 4 * i, kvq::detail::smaller<std::size_t>(4, bytes - 4 * i));
        sum += word * checksum_factor(i);
    }
    return sum;
}

struct transfer_request {
    static constexpr std::uint64_t right_magic = 0x31717266'6e61726bULL;
    std::uint64_t magic = right_magic;
    std::int32_t layers = 0, kv_heads = 0, head_dim = 0, value_dim = 0, type = 0, page_tokens = 0;
    std::int32_t sinks = 0, recent = 0, rollback = 0, ring = 0;
    char format[64] = {};
    std::uint64_t checksum = 0;
};
struct transfer_offer {
    static constexpr std::uint64_t right_magic = 0x31666f66'6e61726bULL;
    std::uint64_t magic = right_magic;
    std::int32_t tokens = 0, committed = 0, first_copy = 0, target = 0;
    char names[most_formats][64] = {};
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

// ---- which page lies where ----

inline constexpr int window_kind = most_formats, sink_kind = most_formats + 1, page_kinds = most_formats + 2;

/// A page and its place in a slice. number -1: it is quantized to its place.
struct moved_page {
    int kind, number;  // of this rank's cache
    long long key_at, value_at;
};
/// Pages of a slice that are quantized from one kind to a format.
struct slice_conversion {
    int source;  // -1: the window
    int target, first, count;
    std::size_t key_at, value_at;  // of the target's pages in the slice
};
struct transfer_plan {
    static constexpr std::size_t slice_limit = std::size_t{64} << 20;
    struct slice {
        int first, end;  // pages
        std::size_t bytes;
        int first_conversion, end_conversion;
    };
    std::vector<std::int8_t> formats;  // of quantized pages, as the sender numbers them
    std::vector<slice> list;
    std::vector<slice_conversion> conversions;

    int slices() const noexcept { return static_cast<int>(list.size()); }
    const slice& slice_at(int i) const noexcept { return list[static_cast<std::size_t>(i)]; }
    std::size_t most_bytes() const noexcept {
        std::size_t most = 0;
        for (const slice& s : list) most = kvq::detail::larger(most, s.bytes);
        return most;
    }
};
/// The plan's lists on the device.
struct plan_memory {
    device_memory pages, from, to;
};

struct layer_kinds {
    layer_memory of[page_kinds];
};
/// Block: a page, K or V. Packs pages into a slice, or takes them out of it.
template <bool Pack>
__global__ void __launch_bounds__(256)
    move_pages_kernel(const __grid_constant__ layer_kinds kinds, const moved_page* pages, std::byte* slice) {
    const moved_page p = pages[blockIdx.x];
    if (p.number < 0) return;
    const layer_memory& m = kinds.of[p.kind];
    const bool keys = blockIdx.y == 0;
    const std::size_t bytes = keys ? m.key_page_bytes : m.value_page_bytes;
    auto* const page =
        reinterpret_cast<uint4*>((keys ? m.keys : m.values) + static_cast<std::size_t>(p.number) * bytes);
    auto* const place = reinterpret_cast<uint4*>(slice + (keys ? p.key_at : p.value_at));
    for (std::size_t i = threadIdx.x; i < bytes / sizeof(uint4); i += blockDim.x) {
        if (Pack)
            place[i] = page[i];
        else
            page[i] = place[i];
    }
}

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
        cudaError_t code = cudaStreamCreateWithFlags(&messages, cudaStreamNonBlocking);
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
        // Launches still use what is given back. After an error the communicator is gone, and so are kernels that waited.
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
    status wait_for_buffer(cudaStream_t stream) { return checked(cudaStreamWaitEvent(stream, done_[turn_], 0)); }
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
        const std::uint64_t sent = std::exchange(words.checksum, 0), right = host_checksum(&words, sizeof words);
        if (words.magic == Words::right_magic && sent == right) return {};
        return bad_value("a message from rank %d is damaged: its checksum is %llx, not %llx", peer,
                         static_cast<unsigned long long>(right), static_cast<unsigned long long>(sent));
    }
    status send_list(const std::vector<std::int8_t>& list, const char* what) {
        for (std::size_t at = 0; at < list.size(); at += small_bytes)
            if (status s = send_bytes(&list[at], kvq::detail::smaller(small_bytes, list.size() - at), what); !s)
                return s;
        return {};
    }
    status receive_list(std::vector<std::int8_t>& list, const char* what) {
        for (std::size_t at = 0; at < list.size(); at += small_bytes)
            if (status s = receive_bytes(&list[at], kvq::detail::smaller(small_bytes, list.size() - at), what); !s)
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

/// Reads and makes sequences of a cache.
struct transfer_access {
    static status check(const cache& c, sequence_id id) {
        if (c.format_.functions == nullptr) return bad_value("the cache is not open");
        return c.check_here(id);
    }
    static std::uint64_t generation(const cache& c) {
        std::uint64_t sum = c.window_.generation() + c.sinks_.generation();
        for (const device_pages& p : c.quantized_) sum += p.generation();
        return sum;
    }
    static const sequence_pages& pages_of(const cache& c, sequence_id id) { return c.entry_of(id).pages; }
    static const device_pages& pool(const cache& c, int kind) {
        return kind == window_kind ? c.window_
               : kind == sink_kind ? c.sinks_
                                   : c.quantized_[static_cast<std::size_t>(kind)];
    }

    static status make_request(const cache& c, std::string_view format, transfer_request& r) {
        if (c.format_.functions == nullptr) return bad_value("the cache is not open");
        const std::string name(format);
        if (!name.empty() && (c.format_.find(name) < 0 || name.size() >= sizeof r.format))
            return bad_value("%.60s is not a format of the receiving cache", name.c_str());
        r.layers = c.shape_.layers;
        r.kv_heads = c.shape_.kv_heads;
        r.head_dim = c.shape_.head_dim;
        r.value_dim = c.shape_.dim(tensor::value);
        r.type = static_cast<int>(c.format_.type);
        r.page_tokens = c.rules_.page_tokens;
        r.sinks = c.rules_.sinks;
        r.recent = c.rules_.recent;
        r.rollback = c.rules_.rollback;
        r.ring = c.rules_.ring;
        std::memcpy(r.format, name.data(), name.size());
        return {};
    }

    /// What a page of the sequence is, here and on its way.
    struct entry {
        int kind, number;         // here, or where it goes to
        int wire;                 // as it travels, in the sender's numbers
        bool converted = false;   // kind and number are those of its source
    };
    static status plan_sending(const cache& c, sequence_id id, const transfer_request& r, transfer_offer& offer,
                               transfer_plan& plan, plan_memory& memory, cudaStream_t stream) {
        transfer_request own;
        (void)make_request(c, {}, own);
        if (r.layers != own.layers || r.kv_heads != own.kv_heads || r.head_dim != own.head_dim ||
            r.value_dim != own.value_dim || r.type != own.type)
            return bad_value("the receiver has %d layers of %d x %d and %d, the sender %d of %d x %d and %d, or "
                             "another type",
                             r.layers, r.kv_heads, r.head_dim, r.value_dim, own.layers, own.kv_heads, own.head_dim,
                             own.value_dim);
        if (r.sinks != own.sinks || r.page_tokens != own.page_tokens || r.recent > own.recent)
            return bad_value("sinks, page_tokens and recent are %d, %d, %d at the receiver, %d, %d, %d at the sender",
                             r.sinks, r.page_tokens, r.recent, own.sinks, own.page_tokens, own.recent);
        int asked = -1;
        if (r.format[0] != '\0') {
            asked = c.format_.find(r.format);
            if (asked < 0) return bad_value("%.60s is not a format of the sending cache", r.format);
        }
        const sequence_pages& s = c.entry_of(id).pages;
        const page_rules rules{r.sinks, r.recent, r.rollback, r.page_tokens, r.ring};
        const int n = s.tokens, pages = rules.pages(n),
                  committed = kvq::detail::larger(s.committed(), rules.due(n));
        // 16-bit values that the receiver would have kept for its rollback, where the sender has them.
        int first_copy = kvq::detail::larger(s.first_copy, pages - r.ring);
        while (first_copy < committed && rules.first_token(first_copy + 1) + r.recent <= n - r.rollback) ++first_copy;
        first_copy = kvq::detail::smaller(first_copy, committed);

        std::vector<entry> entries;
        const auto in_window = [&](int page) { return s.window[static_cast<std::size_t>(page % c.rules_.ring)]; };
        plan.formats.clear();
        for (int i = 0; i < committed; ++i) {
            const bool quantized = i < s.committed();
            const held_page p = quantized ? s.quantized[static_cast<std::size_t>(i)]
                                          : held_page{window_kind, in_window(i)};
            const int wire = asked >= 0 ? asked : quantized ? p.format : s.target;
            entries.push_back({p.format, p.number, wire, wire != p.format});
            plan.formats.push_back(static_cast<std::int8_t>(wire));
        }
        for (int i = first_copy; i < pages; ++i) entries.push_back({window_kind, in_window(i), window_kind});
        for (const int number : s.sinks) entries.push_back({sink_kind, number, sink_kind});

        offer.tokens = n;
        offer.committed = committed;
        offer.first_copy = first_copy;
        offer.target = asked >= 0 ? asked : s.target;
        offer.bytes = 0;
        for (const entry& e : entries) offer.bytes += pool(c, e.wire).page_bytes();
        offer.bytes_as_is = 0;
        for (const held_page& p : s.quantized) offer.bytes_as_is += pool(c, p.format).page_bytes();
        for (int i = s.first_copy; i < pages; ++i) offer.bytes_as_is += c.window_.page_bytes();
        offer.bytes_as_is += s.sinks.size() * c.sinks_.page_bytes();
        for (std::size_t f = 0; f < c.format_.kinds.size(); ++f) {
            std::snprintf(offer.names[f], sizeof offer.names[f], "%s", c.format_.kinds[f].name.c_str());
            offer.fingerprints[f] = c.keys_[f].fingerprint;
        }
        offer.formats_checksum = host_checksum(plan.formats.data(), plan.formats.size());
        std::vector<int> same(page_kinds);
        for (int k = 0; k < page_kinds; ++k) same[static_cast<std::size_t>(k)] = k;
        return lay_out(c, entries, same, plan, memory, stream);
    }

    /// Takes pages for the sequence of an offer. An error has changed nothing.
    static status plan_receiving(cache& c, const transfer_offer& offer, transfer_plan& plan, plan_memory& memory,
                                 sequence_id& made, cudaStream_t stream) {
        if (offer.formats_checksum != host_checksum(plan.formats.data(), plan.formats.size()))
            return bad_value("the formats of %zu pages came damaged", plan.formats.size());
        if (offer.tokens > c.options_.max_tokens)
            return bad_value("a sequence of %d tokens, but max_tokens is %d", offer.tokens, c.options_.max_tokens);
        const page_rules& rules = c.rules_;
        const int pages = rules.pages(offer.tokens), sinks = rules.sink_pages(offer.tokens);
        if (pages - offer.first_copy > rules.ring || offer.first_copy > offer.committed)
            return bad_value("%d pages from page %d on do not fit a window of %d pages", pages, offer.first_copy,
                             rules.ring);
        std::vector<int> local(page_kinds, -1);
        local[window_kind] = window_kind;
        local[sink_kind] = sink_kind;
        sequence_pages s;
        s.tokens = offer.tokens;
        s.first_copy = offer.first_copy;
        const auto map = [&](int wire) -> status {
            if (wire < 0 || wire >= most_formats) return bad_value("a page has format %d of the sender", wire);
            int& f = local[static_cast<std::size_t>(wire)];
            if (f < 0) f = c.format_.find(offer.names[wire]);
            if (f < 0) return bad_value("%.60s is not a format of the receiving cache", offer.names[wire]);
            if (c.keys_[static_cast<std::size_t>(f)].fingerprint != offer.fingerprints[wire])
                return bad_value("keys of %.60s were made from other statistics", offer.names[wire]);
            return {};
        };
        if (status r = map(offer.target); !r) return r;
        s.target = local[static_cast<std::size_t>(offer.target)];
        std::vector<int> wanted(c.quantized_.size(), 0);
        for (const std::int8_t wire : plan.formats) {
            if (status r = map(wire); !r) return r;
            const int f = local[static_cast<std::size_t>(wire)];
            s.quantized.push_back({f, -1});
            ++wanted[static_cast<std::size_t>(f)];
        }
        const bool grows = c.options_.growing;
        for (std::size_t f = 0; f < wanted.size(); ++f)
            if (status r = c.quantized_[f].ensure(wanted[f], grows, stream); !r) return r;
        if (status r = c.window_.ensure(pages - s.first_copy, grows, stream); !r) return r;
        if (status r = c.sinks_.ensure(sinks, grows, stream); !r) return r;
        const sequence_id id = c.new_sequence();
        s.window.assign(static_cast<std::size_t>(rules.ring), -1);
        std::vector<entry> entries;
        for (std::size_t i = 0; i < s.quantized.size(); ++i) {
            held_page& p = s.quantized[i];
            p.number = c.quantized_[static_cast<std::size_t>(p.format)].numbers.take();
            entries.push_back({p.format, p.number, plan.formats[i]});
        }
        for (int i = s.first_copy; i < pages; ++i) {
            int& number = s.window[static_cast<std::size_t>(i % rules.ring)];
            number = c.window_.numbers.take();
            entries.push_back({window_kind, number, window_kind});
        }
        for (int i = 0; i < sinks; ++i) {
            s.sinks.push_back(c.sinks_.numbers.take());
            entries.push_back({sink_kind, s.sinks.back(), sink_kind});
        }
        c.entry_of(id).pages = s;
        const status result = lay_out(c, entries, local, plan, memory, stream);
        if (result)
            made = id;
        else
            (void)c.free(id);
        return result;
    }

    /// Slices, places and conversions. local: this cache's kind of each of the sender's.
    static status lay_out(const cache& c, const std::vector<entry>& entries, const std::vector<int>& local,
                          transfer_plan& plan, plan_memory& memory, cudaStream_t stream) {
        const auto layers = static_cast<std::size_t>(c.shape_.layers);
        std::size_t all = 0;
        for (const entry& e : entries) all += pool(c, local[static_cast<std::size_t>(e.wire)]).page_bytes() / layers;
        const std::size_t count = entries.size(), slices = all / transfer_plan::slice_limit + 1,
                          per_slice = kvq::detail::larger<std::size_t>(1, (count + slices - 1) / slices);
        std::vector<moved_page> moved;
        std::vector<int> from, to;
        plan.list.clear();
        plan.conversions.clear();
        for (std::size_t first = 0; first < count; first += per_slice) {
            const std::size_t end = kvq::detail::smaller(count, first + per_slice);
            std::size_t pages[page_kinds] = {}, key_at[page_kinds] = {}, value_at[page_kinds] = {},
                        at = sizeof(slice_header);
            for (std::size_t i = first; i < end; ++i) ++pages[entries[i].wire];
            for (int k = 0; k < page_kinds; ++k) {
                if (pages[k] == 0) continue;
                const pool_memory& m = pool(c, local[static_cast<std::size_t>(k)]).memory();
                key_at[k] = at;
                value_at[k] = key_at[k] + pages[k] * m.key_page_bytes;
                at = value_at[k] + pages[k] * m.value_page_bytes;
                pages[k] = 0;
            }
            const auto first_conversion = static_cast<int>(plan.conversions.size());
            for (std::size_t i = first; i < end; ++i) {
                const entry& e = entries[i];
                const pool_memory& m = pool(c, local[static_cast<std::size_t>(e.wire)]).memory();
                const std::size_t number = pages[e.wire]++;
                moved.push_back({e.kind, e.converted ? -1 : e.number,
                                 static_cast<long long>(key_at[e.wire] + number * m.key_page_bytes),
                                 static_cast<long long>(value_at[e.wire] + number * m.value_page_bytes)});
                if (!e.converted) continue;
                const int source = e.kind == window_kind ? -1 : e.kind;
                if (static_cast<int>(plan.conversions.size()) == first_conversion ||
                    plan.conversions.back().source != source || plan.conversions.back().target != e.wire)
                    plan.conversions.push_back({source, e.wire, static_cast<int>(from.size()), 0, key_at[e.wire],
                                                value_at[e.wire]});
                ++plan.conversions.back().count;
                from.push_back(e.number);
                to.push_back(static_cast<int>(number));
            }
            plan.list.push_back({static_cast<int>(first), static_cast<int>(end), at, first_conversion,
                                 static_cast<int>(plan.conversions.size())});
        }
        status result;
        const auto put = [&](device_memory& m, const auto& list) {
            const std::size_t bytes = list.size() * sizeof(list[0]);
            m = device_memory();
            if (result) result = m.allocate(c.options_.memory, bytes, "a list of pages", stream);
            if (!result || bytes == 0) return;
            const cudaError_t code = cudaMemcpyAsync(m.as<>(), list.data(), bytes, cudaMemcpyHostToDevice, stream);
            if (code != cudaSuccess) result = runtime_error(code, "copying a list of pages");
        };
        put(memory.pages, moved);
        put(memory.from, from);
        put(memory.to, to);
        return result;
    }

    static layer_kinds kinds_of(const cache& c, int layer) {
        layer_kinds k;
        for (int i = 0; i < page_kinds; ++i)
            if (i >= most_formats || i < c.kinds())
                k.of[i] = pool(c, i).memory().layer(layer);
        return k;
    }
    static status pack(const cache& c, const transfer_plan& plan, const transfer_plan::slice& of, int layer,
                       std::byte* slice, const plan_memory& memory, cudaStream_t stream) {
        if (of.first_conversion < of.end_conversion) {
            // Bytes that no value has are zero.
            const cudaError_t code = cudaMemsetAsync(slice, 0, of.bytes, stream);
            if (code != cudaSuccess) return runtime_error(code, "zeroing a slice");
        }
        if (status s = launch("launching the packing of pages", overlap::no, move_pages_kernel<true>,
                              dim3(static_cast<unsigned>(of.end - of.first), 2), 256, 0, stream, kinds_of(c, layer),
                              static_cast<const moved_page*>(memory.pages.as<const moved_page>() + of.first), slice);
            !s)
            return s;
        for (int i = of.first_conversion; i < of.end_conversion; ++i) {
            const slice_conversion& x = plan.conversions[static_cast<std::size_t>(i)];
            layer_view l = c.view(layer);
            layer_memory& to = l.quantized[x.target].pages;
            to.keys = slice + x.key_at;
            to.values = slice + x.value_at;
            if (status s = c.format_.functions->requantize(l, x.source, l.window, x.target,
                                                           memory.from.as<const int>() + x.first,
                                                           memory.to.as<const int>() + x.first, x.count, stream);
                !s)
                return s;
        }
        return {};
    }
    static status unpack(const cache& c, const transfer_plan&, const transfer_plan::slice& of, int layer,
                         std::byte* slice, const plan_memory& memory, cudaStream_t stream) {
        return launch("launching the unpacking of pages", overlap::no, move_pages_kernel<false>,
                      dim3(static_cast<unsigned>(of.end - of.first), 2), 256, 0, stream, kinds_of(c, layer),
                      static_cast<const moved_page*>(memory.pages.as<const moved_page>() + of.first), slice);
    }
};

}  // namespace kvq::inline KVQ_TAGGED::cuda::detail
