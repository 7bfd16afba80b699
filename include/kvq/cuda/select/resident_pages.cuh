// Quantized pages in pinned host memory, of which device memory holds those that were read last: blocks of
// single kv heads, in slots.
//
//   parameters   of all keys lie in device memory, so that pages are ranked without the bus (best_pages.cuh);
//                those of a page are copied when it is ranked for the first time
//   slot         room for a block of keys and one of values of a kv head. Each head replaces its own slots,
//                the one that was not read for the longest time first
//   fetch        one launch behind the choice of pages, a thread block for each kv head: chosen pages without
//                a slot are copied from host memory, and tables get the numbers of slots
//
// Contract: a page is known by its number and by how often that was taken (`generations`), so that what was
// copied of a page that is gone is never read. Fetches of a layer follow each other; those of different
// layers may run at the same time.
#pragma once

#include "../store/page_memory.hpp"
#include "best_pages.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda { namespace detail {

template <class Pair>
struct fetch_args {
    cache_ref<Pair> pages;  // in host memory
    resident_memory resident;
    chosen_tables chosen;
    int* table;  // of the format
    int sequences;
};

/// Copies a block, 16 or 4 bytes at a time. all: of so many blocks, as [blocks][words].
template <std::size_t Bytes, class From, class To>
__device__ __forceinline__ void copy_blocks(int count, const From& from, const To& to) {
    using word = std::conditional_t<Bytes % 16 == 0, uint4, unsigned>;
    static_assert(Bytes % sizeof(word) == 0);
    constexpr int words = static_cast<int>(Bytes / sizeof(word)), batch = 4;
    const int all = count * words;
    for (int first = static_cast<int>(threadIdx.x); first < all; first += batch * top_threads) {
        word held[batch];
#pragma unroll
        for (int i = 0; i < batch; ++i)
            if (const int at = first + i * top_threads; at < all)
                held[i] = reinterpret_cast<const word*>(from(at / words))[at % words];
#pragma unroll
        for (int i = 0; i < batch; ++i)
            if (const int at = first + i * top_threads; at < all)
                reinterpret_cast<word*>(to(at / words))[at % words] = held[i];
    }
}

inline constexpr int most_fetched = 2048;  // pages of a head

/// Thread block: kv head.
template <class Pair>
__global__ void __launch_bounds__(top_threads, 1)
    fetch_pages_kernel(const __grid_constant__ fetch_args<Pair> a) {
    __shared__ top_memory<> memory;
    __shared__ int missing[most_fetched], numbers[most_fetched], slots_of[most_fetched];
    __shared__ int count;
    launch_dependents();
    wait_for_predecessor();
    const resident_memory& r = a.resident;
    const int thread = static_cast<int>(threadIdx.x), head = static_cast<int>(blockIdx.x),
              heads = a.pages.kv_heads;
    int* const slot_of = r.slot_of + static_cast<std::ptrdiff_t>(head) * r.pages;
    held_block* const page_of = r.page_of + static_cast<std::ptrdiff_t>(head) * r.places;
    unsigned* const stamps = r.stamps + static_cast<std::ptrdiff_t>(head) * r.places;
    const unsigned now = r.clocks[head] + 1;
    cache_ref<Pair> resident = a.pages;
    resident.key_pages = r.pool.keys;
    resident.value_pages = r.pool.values;
    resident.key_page_bytes = r.pool.key_page_bytes;
    resident.value_page_bytes = r.pool.value_page_bytes;
#pragma unroll 1
    for (int sequence = 0; sequence < a.sequences; ++sequence) {
        int* const table = a.table + static_cast<std::ptrdiff_t>(sequence * heads + head) * a.chosen.columns;
        const int held = a.chosen.committed[sequence];
        __syncthreads();
        if (thread == 0) count = 0;
        __syncthreads();
        for (int i = thread; i < held; i += top_threads) {
            const int page = table[i];
            if (page < 0) continue;
            const int slot = slot_of[page] - 1;
            const held_block of = slot < 0 ? held_block{} : page_of[slot];
            if (slot >= 0 && of.page == static_cast<unsigned>(page) && of.generation == r.generations[page]) {
                stamps[slot] = now;
                table[i] = slot;
            } else {
                const int at = atomicAdd(&count, 1);
                missing[at] = i;
                numbers[at] = page;
            }
        }
        __syncthreads();
        const int misses = count;
        if (thread == 0) {
            r.counts[2 * head] += static_cast<unsigned>(held);
            r.counts[2 * head + 1] += static_cast<unsigned>(misses);
        }
        if (misses == 0) continue;
        // The slots that were not read for the longest time. There are as many that this launch has not read.
        const int place = thread / warp_size * (warp_size * top_each) + thread % warp_size;
        unsigned keys[top_each];
#pragma unroll
        for (int j = 0; j < top_each; ++j) {
            const int slot = place + j * warp_size;
            keys[j] = slot < r.places && stamps[slot] != now ? ~stamps[slot] : 0;
        }
        select_largest(memory, keys, misses, [&](int at, int j) { slots_of[at] = place + j * warp_size; });
        __syncthreads();
        for (int i = thread; i < misses; i += top_threads) {
            const int slot = slots_of[i], page = numbers[i];
            page_of[slot] = {static_cast<unsigned>(page), r.generations[page]};
            slot_of[page] = slot + 1;
            stamps[slot] = now;
            table[missing[i]] = slot;
        }
        copy_blocks<Pair::key_block_bytes>(
            misses, [&](int i) { return a.pages.key_block(numbers[i], head); },
            [&](int i) { return resident.key_block(slots_of[i], head); });
        copy_blocks<Pair::value_block_bytes>(
            misses, [&](int i) { return a.pages.value_block(numbers[i], head); },
            [&](int i) { return resident.value_block(slots_of[i], head); });
    }
    if (thread == 0) r.clocks[head] = now;
}

/// places: of a kv head.
inline status check_fetch(const choice_plan& p, int places) noexcept {
    if (p.columns() <= most_fetched && 1LL * p.columns() * p.sequences <= places) return {};
    return bad_value(
        "%d sequences may read %d pages of a kv head each, but up to %d can be fetched and device memory "
        "is for %d",
        p.sequences, p.columns(), most_fetched, places);
}
/// Behind check_fetch().
template <class Pair>
status fetch_pages(const cache_ref<Pair>& pages, const resident_memory& resident, const chosen_tables& chosen,
                   int* table, cudaStream_t stream) noexcept {
    const fetch_args<Pair> a{pages, resident, chosen, table, pages.sequences};
    return launch("fetching pages", overlap::yes, fetch_pages_kernel<Pair>,
                  dim3(static_cast<unsigned>(pages.kv_heads)), top_threads, 0, stream, a);
}

}}}}  // namespace kvq::cuda::detail
