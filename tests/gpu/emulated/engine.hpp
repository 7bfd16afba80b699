// Runs kernels of CUDA on the CPU, one thread block after the other: every thread is a fiber, and fibers
// change where threads wait for each other. So the kernels themselves can be tested where there is no GPU; it
// says nothing about speed.
//
//   warp    32 threads that meet at every instruction that exchanges numbers (shuffles, votes, products of
//           tensor cores)
//   block   the first warp that can runs, up to the next barrier: later warps may wait for parts of earlier
//           ones
//   cluster blocks of it run in turn
//   grid    blocks in the order of their numbers, so a block may wait for parts of earlier ones
//   device  a thread of the host: kernels of several run at the same time, and may wait for each other
//
// Asynchronous copies take place when they are waited for, not before, and shared memory is NaN at first:
// whoever forgets to wait or to write does not find what he looks for. Stops the program where threads of a
// warp meet at different instructions or wait for threads that have left, where copies are not waited for,
// at wrong addresses of shared memory, and where an awaited word is written that was not zero.
// Source: the programming model of the CUDA C++ Programming Guide; fibers by Boost.Context.
#pragma once

#include <boost/context/detail/fcontext.hpp>

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

inline constexpr int warp_size = 32, exchange_words = 12, barriers = 16, most_cluster = 8;
inline constexpr std::size_t most_shared_memory = 227 * 1024;
inline constexpr std::uint32_t block_bytes = 256 * 1024;  // from the memory of a block to the next one's
/// What the device says that it has, and what launches may ask for: tests may set less.
inline std::size_t device_shared_memory = most_shared_memory;
/// What the launch before does to memory: called where a thread lets the next launch start (false) and behind
/// its wait for the launch before (true).
inline std::function<void(bool over)> predecessor;

/// What a thread waits at. Threads of a warp must meet at the same.
enum class meeting { none, shuffle, vote, warp, product, block };

struct async_copy {
    std::byte* to;
    const void* from;
    std::size_t bytes;  // the others are zeros
    std::size_t size = 16;
};

/// Copies of a thread that are under way, in groups.
class async_copies {
public:
    void add(const async_copy& c) { copies_.push_back(c); }
    void end_group() { ends_.push_back(copies_.size()); }
    /// Until at most this many groups are under way.
    void wait(std::size_t pending) {
        while (ends_.size() - finished_groups_ > pending) {
            const std::size_t end = ends_[finished_groups_++];
            for (; finished_ < end; ++finished_) {
                const async_copy& c = copies_[finished_];
                std::byte piece[16] = {};
                if (c.bytes != 0) std::memcpy(piece, c.from, c.bytes);
                std::memcpy(c.to, piece, c.size);
            }
        }
        if (none()) {
            copies_.clear();
            ends_.clear();
            finished_ = finished_groups_ = 0;
        }
    }
    /// A group may be empty.
    bool none() const { return finished_ == copies_.size(); }

private:
    std::vector<async_copy> copies_;
    std::vector<std::size_t> ends_;  // of groups
    std::size_t finished_ = 0, finished_groups_ = 0;
};

struct thread_state;

struct warp_state {
    // Words of the lanes, in turn for every other meeting: nobody overwrites what others still read.
    std::uint32_t words[2][warp_size][exchange_words];
    thread_state *first, *end;
    int live, waiting;  // threads that have not ended, that wait at barriers
    meeting at;         // of the threads that have met so far
};

using context = boost::context::detail::fcontext_t;

/// Threads have the fibers of those of the same number of the block before.
struct thread_state {
    std::unique_ptr<std::byte[]> stack;
    context own = nullptr;  // where it goes on
    dim3 index;
    int number = 0, lane = 0;
    warp_state* warp = nullptr;
    bool done = false;
    int turn = 0;  // of warp_state::words
    // At a barrier: its number, and what it has found out.
    bool waits = false, any = false, all = false;
    int barrier = 0, votes = 0;
    std::function<bool()> until;  // what it waits for in place of a barrier
    async_copies copies;
};

struct barrier_state {
    int there = 0, awaited = 0;  // 0: all threads of the block
    bool any = false, all = true;
    int votes = 0;
};

struct block_state {
    std::vector<warp_state> warps;
    barrier_state barriers[emulated::barriers];
    int live = 0;
    void (*run)(const void* kernel) = nullptr;
    const void* kernel = nullptr;
    context scheduler = nullptr;
    dim3 index;
    int rank = 0;  // in its cluster
    thread_state *first = nullptr, *end = nullptr;
};
/// Threads that wait for all others of their cluster.
struct cluster_state {
    int threads = 0, there = 0, phase = 0;
};

// Threads of the host, which are ranks, run kernels at the same time.
inline constinit thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;
inline constinit thread_local block_state* block = nullptr;
inline constinit thread_local thread_state* thread = nullptr;
inline thread_local cluster_state cluster;
/// A block finds nothing useful in the first bytes of shared memory.
inline void (*spoil_shared_memory)(std::size_t bytes, int blocks) = [](std::size_t, int) {};
inline thread_local std::size_t used_shared_memory =
    most_shared_memory;  ///< what the block before may have written

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "emulated kernel: %s (block %u, thread %d)\n", what, blockIdx.x,
                 thread ? thread->number : -1);
    std::exit(3);
}

/// Goes on at `next`; comes back when somebody goes on at `own`.
inline void go_on(context& own, context next) {
    const boost::context::detail::transfer_t from = boost::context::detail::jump_fcontext(next, &own);
    *static_cast<context*>(from.data) = from.fctx;
}

/// The current thread waits or has ended: the next one of its warp runs. After the last one either the first
/// one goes on, behind what all have met at, or the block's next warp does.
inline void next_thread() {
    thread_state& own = *thread;
    warp_state& warp = *own.warp;
    thread_state* next = &own + 1;
    while (next != warp.end && next->done) ++next;
    if (next == warp.end) {
        if (warp.at == meeting::none || warp.at == meeting::block) return go_on(own.own, block->scheduler);
        if (warp.live < warp.end - warp.first) fail("a warp waits for threads that have ended");
        warp.at = meeting::none;
        next = warp.first;
    }
    if (next == &own) return;
    thread = next;
    threadIdx = next->index;
    go_on(own.own, next->own);
}

/// The current thread waits for the others of its warp or block.
inline void meet(meeting at) {
    warp_state& warp = *thread->warp;
    if (warp.at != meeting::none && warp.at != at) fail("threads of a warp meet at different instructions");
    warp.at = at;
    next_thread();
}

/// The current thread waits for others of the block; `value` is its vote.
inline void wait_at_barrier(int number, int threads, int value = 0) {
    barrier_state& b = block->barriers[number];
    if (b.there > 0 && b.awaited != threads)
        fail("threads at a barrier wait for different numbers of others");
    ++b.there;
    b.awaited = threads;
    b.any = b.any || value != 0;
    b.all = b.all && value != 0;
    b.votes += value != 0 ? 1 : 0;
    thread->barrier = number;
    thread->waits = true;
    ++thread->warp->waiting;
    meet(meeting::block);
}

/// The same without waiting.
inline void arrive_at_barrier(int number, int threads) {
    barrier_state& b = block->barriers[number];
    if (b.there > 0 && b.awaited != threads)
        fail("threads at a barrier wait for different numbers of others");
    ++b.there;
    b.awaited = threads;
}

/// The current thread waits until what others do makes this true.
inline void wait_until(std::function<bool()> there) {
    thread->until = std::move(there);
    thread->waits = true;
    ++thread->warp->waiting;
    meet(meeting::block);
}

/// The current thread waits for those of all blocks of its cluster.
inline void wait_for_cluster() {
    cluster_state& c = cluster;
    const int phase = c.phase;
    if (++c.there == c.threads) {
        c.there = 0;
        ++c.phase;
    }
    wait_until([phase] { return cluster.phase != phase; });
}

/// All lanes' words at a meeting of the warp.
using exchanged = const std::uint32_t (*)[exchange_words];
template <class Number, std::size_t Count>
exchanged exchange_numbers(meeting at, const Number (&own)[Count]) {
    static_assert(Count <= exchange_words && sizeof(Number) == 4);
    thread_state& t = *thread;
    auto& of_warp = t.warp->words[t.turn];
    t.turn ^= 1;
    std::memcpy(of_warp[t.lane], own, sizeof own);
    meet(at);
    return of_warp;
}
template <class... Words>
exchanged exchange(meeting at, Words... words) {
    const std::uint32_t own[] = {static_cast<std::uint32_t>(words)...};
    return exchange_numbers(at, own);
}

/// Lets threads of the current block go on at barriers whose others are there.
inline void open_barriers() {
    thread_state *const first = block->first, *const end = block->end;
    for (thread_state* t = first; t != end; ++t) {
        if (!t->waits || !t->until || !t->until()) continue;
        t->until = nullptr;
        t->waits = false;
        --t->warp->waiting;
    }
    for (int number = 0; number < barriers; ++number) {
        barrier_state& b = block->barriers[number];
        if (b.there == 0 || b.there != (b.awaited == 0 ? block->live : b.awaited)) continue;
        for (thread_state* t = first; t != end; ++t) {
            if (!t->waits || t->until || t->barrier != number) continue;
            t->waits = false;
            t->any = b.any;
            t->all = b.all;
            t->votes = b.votes;
            --t->warp->waiting;
        }
        b = {};
    }
}

/// A fiber: a thread of every block.
inline void run_threads(boost::context::detail::transfer_t from) {
    *static_cast<context*>(from.data) = from.fctx;
    while (true) {
        block->run(block->kernel);
        thread->done = true;
        --thread->warp->live;
        --block->live;
        next_thread();
    }
}

inline void make_fiber(thread_state& t) {
    // Frames of different threads lie in different lines of the caches.
    constexpr std::size_t size = 256 * 1024, line = 64, lines = 17, offsets = 64;
    t.stack.reset(new std::byte[size + offsets * lines * line]);
    const std::size_t offset = static_cast<std::size_t>(t.number) % offsets * lines * line;
    t.own = boost::context::detail::make_fcontext(t.stack.get() + offset + size, size, run_threads);
}

/// Runs the blocks of a cluster, whose threads call run(kernel).
inline void run_cluster(const dim3& index, int blocks, const dim3& grid, const dim3& size,
                        std::size_t shared_bytes, void (*run)(const void* kernel), const void* kernel) {
    constexpr std::size_t most_threads = 1024;
    struct fibers {
        thread_state* first[most_cluster] = {};
        block_state of_block[most_cluster];
        fibers() = default;
        fibers(const fibers&) = delete;
        fibers& operator=(const fibers&) = delete;
        ~fibers() {
            if (thread != nullptr) return;  // exit() may be called on a fiber
            for (thread_state* const f : first) delete[] f;
        }
    };
    static thread_local fibers of_thread;
    if (blocks > most_cluster) fail("too many blocks of a cluster");
    spoil_shared_memory(std::max(shared_bytes, std::exchange(used_shared_memory, shared_bytes)), blocks);
    blockDim = size;
    gridDim = grid;
    const std::size_t count = std::size_t{size.x} * size.y * size.z;
    if (count > most_threads) fail("too many threads");
    cluster = {static_cast<int>(count) * blocks, 0, 0};
    for (int rank = 0; rank < blocks; ++rank) {
        if (of_thread.first[rank] == nullptr) of_thread.first[rank] = new thread_state[most_threads];
        thread_state* const first = of_thread.first[rank];
        block_state& own = of_thread.of_block[rank];
        own.index = {index.x + static_cast<unsigned>(rank), index.y, index.z};
        own.rank = rank;
        own.first = first;
        own.end = first + count;
        own.warps.resize((count + warp_size - 1) / warp_size);
        std::memset(static_cast<void*>(own.warps.data()), 0xff, own.warps.size() * sizeof(warp_state));
        own.live = static_cast<int>(count);
        for (barrier_state& b : own.barriers) b = {};  // some may have arrived for whom none has waited
        own.run = run;
        own.kernel = kernel;
        for (std::size_t i = 0; i < own.warps.size(); ++i) {
            warp_state& w = own.warps[i];
            w.first = first + i * warp_size;
            w.end = std::min(w.first + warp_size, own.end);
            w.live = static_cast<int>(w.end - w.first);
            w.waiting = 0;
            w.at = meeting::none;
        }
        for (std::size_t i = 0; i < count; ++i) {
            thread_state& t = first[i];
            t.number = static_cast<int>(i);
            t.lane = t.number % warp_size;
            t.index = {static_cast<unsigned>(i) % size.x, static_cast<unsigned>(i) / size.x % size.y,
                       static_cast<unsigned>(i) / size.x / size.y};
            t.warp = &own.warps[i / warp_size];
            t.done = t.waits = false;
            t.turn = 0;
            if (t.own == nullptr) make_fiber(t);
        }
    }
    const auto enter = [](block_state& b) {
        block = &b;
        blockIdx = b.index;
    };
    for (bool live = true; live;) {
        live = false;
        bool ran = false;
        for (int rank = 0; rank < blocks; ++rank) {
            block_state& own = of_thread.of_block[rank];
            if (own.live == 0) continue;
            live = true;
            const auto warp = std::find_if(own.warps.begin(), own.warps.end(),
                                           [](const warp_state& w) { return w.live > 0 && w.waiting == 0; });
            if (warp == own.warps.end()) continue;
            enter(own);
            warp->at = meeting::none;
            thread = warp->first;
            while (thread->done) ++thread;
            threadIdx = thread->index;
            go_on(own.scheduler, thread->own);
            for (int other = 0; other < blocks; ++other) {
                enter(of_thread.of_block[other]);
                open_barriers();
            }
            ran = true;
        }
        if (live && !ran) fail("threads wait at barriers for each other");
    }
    for (int rank = 0; rank < blocks; ++rank)
        for (const thread_state* t = of_thread.of_block[rank].first; t != of_thread.of_block[rank].end; ++t)
            if (!t->copies.none()) fail("copies are still under way at the end of the kernel");
    block = nullptr;
    thread = nullptr;
}

/// Every block of a kernel, one cluster after the other.
inline void run_grid(const dim3& grid, const dim3& size, std::size_t shared_bytes,
                     void (*run)(const void* kernel), const void* kernel, int cluster_blocks = 1) {
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; x += static_cast<unsigned>(cluster_blocks))
                run_cluster({x, y, z}, cluster_blocks, grid, size, shared_bytes, run, kernel);
}

}  // namespace emulated
