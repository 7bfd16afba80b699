// Device memory of a group whose quantized pages lie in pinned host memory (select/resident_pages.cuh).
//
//   of every layer   parameters of all keys, slots for blocks of single kv heads, and what is in which slot
//
// Contract: sizes are fixed when the cache is opened: the pool of pages does not grow. Without slots there is
// no memory.
#pragma once

#include "page_pool.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda { namespace detail {

/// Pinned host memory, which kernels read and write as if it were the device's.
inline device_allocator pinned_allocator() noexcept {
    device_allocator a;
    a.allocate = [](std::size_t bytes, void*) {
        void* p = nullptr;
        if (cudaMallocHost(&p, bytes) == cudaSuccess) return p;
        (void)cudaGetLastError();
        return static_cast<void*>(nullptr);
    };
    a.release = [](void* p, std::size_t, void*) { (void)cudaFreeHost(p); };
    return a;
}

inline constexpr int most_places = 16384;  // of a kv head

class resident_pages {
public:
    int places() const noexcept { return places_; }
    int format() const noexcept { return format_; }
    std::size_t allocated() const noexcept { return memory_.bytes(); }

    /// blocks: bytes of a key block and of a value block of a kv head; parameters: those of a key block.
    status open(const device_allocator& from, int layers, int heads, int format, int pages, int of_places,
                const std::size_t (&blocks)[2], std::size_t parameters, cudaStream_t stream) {
        places_ = of_places;
        pages_ = pages;
        format_ = format;
        heads_ = heads;
        blocks_[0] = blocks[0];
        blocks_[1] = blocks[1];
        parameters_ = parameters;
        return memory_.allocate(from,
                                common::bounded_product(static_cast<std::size_t>(layers), layer_bytes()),
                                "resident pages", stream);
    }
    resident_memory layer(int i, const unsigned* generations) const noexcept {
        resident_memory r;
        if (places_ == 0) return r;
        std::byte* at = memory_.as<>() + static_cast<std::size_t>(i) * layer_bytes();
        r.places = places_;
        r.pages = pages_;
        r.format = format_;
        r.generations = generations;
        r.parameter_bytes = parameters_;
        const auto take = [&]<class T>(T*& to, std::size_t bytes) {
            to = reinterpret_cast<T*>(at);
            at += common::round_up(bytes, std::size_t{16});
        };
        r.pool.key_page_bytes = times(heads_, blocks_[0]);
        r.pool.value_page_bytes = times(heads_, blocks_[1]);
        take(r.pool.keys, times(places_, r.pool.key_page_bytes));
        take(r.pool.values, times(places_, r.pool.value_page_bytes));
        take(r.parameters, times(pages_, times(heads_, parameters_)));
        take(r.tags, times(pages_, times(heads_, sizeof(unsigned))));
        take(r.slot_of, times(pages_, times(heads_, sizeof(int))));
        take(r.page_of, times(places_, times(heads_, 2 * sizeof(unsigned))));
        take(r.stamps, times(places_, times(heads_, sizeof(unsigned))));
        take(r.clocks, times(heads_, sizeof(unsigned)));
        take(r.counts, times(heads_, 2 * sizeof(unsigned)));
        return r;
    }

private:
    static std::size_t times(int n, std::size_t bytes) noexcept {
        return common::bounded_product(static_cast<std::size_t>(n), bytes);
    }
    std::size_t layer_bytes() const noexcept {
        const std::size_t of_page = blocks_[0] + blocks_[1];
        return common::round_up(times(places_, times(heads_, of_page + 3 * sizeof(unsigned))) +
                                    times(pages_, times(heads_, parameters_ + 2 * sizeof(unsigned))) +
                                    times(heads_, 3 * sizeof(unsigned)) + 9 * 16,
                                std::size_t{256});
    }

    int places_ = 0, pages_ = 0, heads_ = 0, format_ = 0;
    std::size_t blocks_[2] = {}, parameters_ = 0;
    device_memory memory_;
};

}}}}  // namespace kvq::cuda::detail
