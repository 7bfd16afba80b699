// Runs kernels of CUDA on the CPU, one thread block after the other: every thread is a fiber, and fibers change where threads wait
// for each other. So the kernels themselves can be tested where there is no GPU; it says nothing about speed.
//
//   warp    32 threads that meet at every instruction that exchanges numbers (shuffles, votes, products of tensor cores)
//   block   the first warp that can runs, up to the next barrier: later warps may wait for parts of earlier ones
//   grid    blocks in the order of their numbers, so a block may wait for parts of earlier ones
//
// Asynchronous copies take place when they are waited for, not before, and shared memory is NaN at first: whoever forgets to wait or to
// write does not find what he looks for. Stops the program where threads of a warp meet at different instructions or wait for
// threads that have left, where copies are not waited for, and at wrong addresses of shared memory.
// Source: the programming model of the CUDA C++ Programming Guide; fibers by Boost.Context.
#pragma once

#include <boost/context/fiber.hpp>
#include <boost/context/pooled_fixedsize_stack.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

namespace emulated {

inline constexpr int warp_size = 32, exchange_words = 12, barriers = 16;
inline constexpr std::size_t most_shared_memory = 227 * 1024;
/// What the device says that it has, and what launches may ask for: tests may set less.
inline std::size_t device_shared_memory = most_shared_memory;

/// What a thread waits at. Threads of a warp must meet at the same.
enum class meeting { none, shuffle, vote, warp, product, block };

struct async_copy {
    std::byte* to;
    const void* from;
    std::size_t bytes;  // the others of 16 are zeros
};

struct warp_state {
    // Words of the lanes, in turn for every other meeting: nobody overwrites what others still read.
    std::uint32_t words[2][warp_size][exchange_words];
};

struct thread_state {
    boost::context::fiber fiber, scheduler;
    dim3 index;
    int number = 0, lane = 0;
    warp_state* warp = nullptr;
    meeting at = meeting::none;
    bool done = false;
    int turn = 0;  // of warp_state::words
    // At a barrier: its number, how many threads it waits for (0: all of the block), the thread's vote, and the result.
    bool waits = false;
    int barrier = 0, awaited = 0, value = 0;
    int any = 0, all = 1;
    std::vector<async_copy> open;
    std::vector<std::vector<async_copy>> groups;  // of copies, the oldest first
};

struct block_state {
    std::vector<thread_state> threads;
    std::vector<warp_state> warps;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;
inline block_state* block = nullptr;
inline thread_state* thread = nullptr;
/// A block finds nothing useful in the first bytes of shared memory.
inline void (*spoil_shared_memory)(std::size_t bytes) = [](std::size_t) {};
inline thread_local std::size_t used_shared_memory =
    most_shared_memory;  ///< what the block before may have written

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "emulated kernel: %s (block %u, thread %d)\n", what, blockIdx.x,
                 thread ? thread->number : -1);
    std::exit(3);
}

/// The current thread waits for the others of its warp or block.
inline void meet(meeting at) {
    thread->at = at;
    thread->scheduler = std::move(thread->scheduler).resume();
}

/// The current thread waits for others of the block; `value` is its vote.
inline void wait_at_barrier(int number, int threads, int value = 0) {
    thread->barrier = number;
    thread->awaited = threads;
    thread->value = value;
    thread->waits = true;
    meet(meeting::block);
}

/// All lanes' words at a meeting of the warp.
using exchanged = const std::uint32_t (*)[exchange_words];
template <class... Words>
exchanged exchange(meeting at, Words... words) {
    static_assert(sizeof...(Words) <= exchange_words);
    thread_state& t = *thread;
    auto& of_warp = t.warp->words[t.turn];
    t.turn ^= 1;
    const std::uint32_t own[] = {static_cast<std::uint32_t>(words)...};
    std::memcpy(of_warp[t.lane], own, sizeof own);
    meet(at);
    return of_warp;
}

inline void finish_copies(std::vector<async_copy>& copies) {
    for (const async_copy& c : copies) {
        std::byte piece[16] = {};
        if (c.bytes != 0) std::memcpy(piece, c.from, c.bytes);
        std::memcpy(c.to, piece, sizeof piece);
    }
    copies.clear();
}

/// Runs the threads from `first` on until all of the warp stand at a barrier of the block or have ended. Did any run?
inline bool run_warp(std::vector<thread_state>& threads, std::size_t first, std::size_t last) {
    bool can = false;
    for (std::size_t i = first; i < last; ++i) {
        if (threads[i].waits) return false;
        can = can || !threads[i].done;
    }
    while (can) {
        meeting at = meeting::none;
        std::size_t ended = 0;
        for (std::size_t i = first; i < last; ++i) {
            thread_state& t = threads[i];
            if (!t.done) {
                thread = &t;
                threadIdx = t.index;
                t.fiber = std::move(t.fiber).resume();
            }
            if (t.done) {
                ++ended;
                continue;
            }
            if (at != meeting::none && at != t.at) fail("threads of a warp meet at different instructions");
            at = t.at;
        }
        if (at == meeting::none || at == meeting::block) return true;
        if (ended > 0) fail("a warp waits for threads that have ended");
    }
    return false;
}

/// Lets the threads at a barrier go on if all that it waits for are there.
inline void open_barrier(std::vector<thread_state>& threads, int number) {
    std::size_t there = 0, left = 0, awaited = 0;
    int any = 0, all = 1;
    for (const thread_state& t : threads) {
        left += t.done ? 0 : 1;
        if (!t.waits || t.barrier != number) continue;
        if (there > 0 && awaited != static_cast<std::size_t>(t.awaited))
            fail("threads at a barrier wait for different numbers of others");
        awaited = static_cast<std::size_t>(t.awaited);
        ++there;
        any |= t.value != 0;
        all &= t.value != 0;
    }
    if (there == 0 || there != (awaited == 0 ? left : awaited)) return;
    for (thread_state& t : threads)
        if (t.waits && t.barrier == number) t.waits = false, t.any = any, t.all = all;
}

template <class Kernel>
void run_block(const dim3& index, const dim3& grid, const dim3& size, std::size_t shared_bytes,
               const Kernel& kernel) {
    static boost::context::pooled_fixedsize_stack stacks(256 * 1024);
    block_state own;
    block = &own;
    spoil_shared_memory(std::max(shared_bytes, std::exchange(used_shared_memory, shared_bytes)));
    blockIdx = index;
    blockDim = size;
    gridDim = grid;
    const std::size_t count = std::size_t{size.x} * size.y * size.z;
    own.threads.resize(count);
    own.warps.resize((count + warp_size - 1) / warp_size);
    std::memset(own.warps.data(), 0xff, own.warps.size() * sizeof(warp_state));
    for (std::size_t i = 0; i < count; ++i) {
        thread_state& t = own.threads[i];
        t.number = static_cast<int>(i);
        t.lane = t.number % warp_size;
        t.index = {static_cast<unsigned>(i) % size.x, static_cast<unsigned>(i) / size.x % size.y,
                   static_cast<unsigned>(i) / size.x / size.y};
        t.warp = &own.warps[i / warp_size];
        t.fiber =
            boost::context::fiber(std::allocator_arg, stacks, [&t, &kernel](boost::context::fiber&& from) {
                t.scheduler = std::move(from);
                kernel();
                t.done = true;
                return std::move(t.scheduler);
            });
    }
    const auto left = [&] {
        for (const thread_state& t : own.threads)
            if (!t.done) return true;
        return false;
    };
    while (left()) {
        bool ran = false;
        for (std::size_t first = 0; first < count && !ran; first += warp_size)
            ran = run_warp(own.threads, first, first + warp_size < count ? first + warp_size : count);
        if (!ran) fail("threads wait at barriers for each other");
        for (int barrier = 0; barrier < barriers; ++barrier) open_barrier(own.threads, barrier);
    }
    for (const thread_state& t : own.threads)
        if (!t.open.empty() || !t.groups.empty()) fail("copies are still under way at the end of the kernel");
    block = nullptr;
    thread = nullptr;
}

}  // namespace emulated
