// The tokens with the largest scores, on the device and in any stream.
//
//   group   a thread block finds the best of 16384 scores of a row, which its threads hold in registers:
//           three histograms of digits of 11, 11 and 10 bits, then the positions. On sm_90 and later two or
//           four blocks of a cluster do, of 32768 each, with histograms of all of them
//   level   all groups of all rows; what they have found is the next level's scores, until a row has one
//           group
//
// Contract: exactly the `count` largest scores. Of equal scores those of lower positions; NaN comes last;
// -0 and 0 are equal. Positions are in ascending order, then -1: the same on every run.
// Complexity: every score is read once; a level has count / 16384 times the scores of the one before for
// every group.
#pragma once

#include "../store/store_token.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

inline constexpr int top_threads = 1024, top_warps = top_threads / warp_size, top_group = 16384,
                     top_each = top_group / top_threads,  // scores of a thread
    cluster_each = 2 * top_each;                          // and in a cluster

/// What selecting keeps in shared memory, in each block of a cluster of so many. What lanes of a warp count
/// is often alike: in clusters each of four has counters of its own.
template <int Blocks = 1>
struct top_memory {
    static constexpr int copies = Blocks > 1 ? 4 : 1, bins = 2 * top_threads;
    alignas(
        16) unsigned histogram[bins * copies];  // of bin b: b * copies on; then the first of them has the sum
    unsigned of_cluster[Blocks > 1 ? bins : 1];
    unsigned of_warp[2][top_warps];  // sums
    unsigned above, equal;           // of the block
    unsigned digit, left, in_digit;
};

/// The order of scores as that of integers above 0; NaN is the lowest.
__device__ __forceinline__ unsigned score_order(float x) { return x == x ? ordered_bits(x + 0.0f) : 1u; }

/// Finds the digit with the `left`-th largest key: sets memory.digit, how many keys of it are chosen
/// (memory.left), and how many there are (memory.in_digit). Thread i has the i-th two bins of 2048 from the
/// largest one on. Returns the number of all keys. All threads.
template <class Memory>
__device__ __forceinline__ unsigned find_digit(Memory& memory, unsigned high, unsigned low, unsigned left) {
    const int thread = static_cast<int>(threadIdx.x), warp = thread / warp_size, lane = thread % warp_size;
    unsigned sum = high + low;
#pragma unroll
    for (int step = 1; step < warp_size; step *= 2) {
        const unsigned lower = __shfl_up_sync(0xffffffffu, sum, static_cast<unsigned>(step));
        if (lane >= step) sum += lower;
    }
    if (lane == warp_size - 1) memory.of_warp[0][warp] = sum;
    __syncthreads();
    const unsigned of_lane = memory.of_warp[0][lane], all = __reduce_add_sync(0xffffffffu, of_lane),
                   before = sum - high - low + __reduce_add_sync(0xffffffffu, lane < warp ? of_lane : 0u);
    if (before < left && before + high + low >= left) {
        const bool upper = before + high >= left;
        memory.digit = static_cast<unsigned>(upper ? 2047 - 2 * thread : 2046 - 2 * thread);
        memory.left = left - before - (upper ? 0u : high);
        memory.in_digit = upper ? high : low;
    }
    __syncthreads();
    return all;
}

/// Those keys of a warp that are above `floor`, and the first `left` that equal it.
template <int Each>
struct largest_keys {
    const unsigned (&keys)[Each];
    unsigned floor, left;

    /// Numbers of the warp's, into of_warp[0][warp] and of_warp[1][warp].
    __device__ __forceinline__ void count(unsigned (&of_warp)[2][top_warps], int warp, int lane) const {
        unsigned above = 0, equal = 0;
#pragma unroll
        for (int j = 0; j < Each; ++j) {
            const uint2 v = votes(keys[j]);
            above += static_cast<unsigned>(__popc(v.x));
            equal += static_cast<unsigned>(__popc(v.y));
        }
        if (lane == 0) {
            of_warp[0][warp] = above;
            of_warp[1][warp] = equal;
        }
    }
    /// above, equal: of warps before.
    template <class Emit>
    __device__ __forceinline__ void give(unsigned above, unsigned equal, int lane, const Emit& put) const {
        const unsigned lower_lanes = (1u << lane) - 1u;
#pragma unroll
        for (int j = 0; j < Each; ++j) {
            const uint2 v = votes(keys[j]);
            const unsigned above_before = above + static_cast<unsigned>(__popc(v.x & lower_lanes)),
                           equal_before = equal + static_cast<unsigned>(__popc(v.y & lower_lanes));
            if (keys[j] > floor || (keys[j] != 0 && keys[j] == floor && equal_before < left))
                put(static_cast<int>(above_before + kvq::detail::smaller(equal_before, left)), j);
            above += static_cast<unsigned>(__popc(v.x));
            equal += static_cast<unsigned>(__popc(v.y));
        }
    }

private:
    __device__ __forceinline__ uint2 votes(unsigned key) const {
        return {__ballot_sync(0xffffffffu, key > floor),
                __ballot_sync(0xffffffffu, key != 0 && key == floor)};
    }
};

/// Adds the counters of lanes, and those of all blocks of the cluster. All threads of the cluster.
template <int Blocks>
__device__ __forceinline__ void add_histograms(top_memory<Blocks>& memory) {
    constexpr int bins = top_memory<Blocks>::bins, copies = top_memory<Blocks>::copies, slice = bins / Blocks;
    static_assert(copies == 4);
    const int thread = static_cast<int>(threadIdx.x), rank = cluster_rank();
    auto* const own = reinterpret_cast<uint4*>(memory.histogram) + 2 * thread;  // of two bins
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint4 v = own[i];
        own[i].x = v.x + v.y + v.z + v.w;
    }
    cluster_wait();
    // A part of the bins of all blocks, for all blocks.
#pragma unroll 1
    for (int bin = rank * slice + thread; bin < (rank + 1) * slice; bin += top_threads) {
        unsigned of_block[Blocks], all = 0;
#pragma unroll
        for (int b = 0; b < Blocks; ++b) of_block[b] = *in_block(b, memory.histogram + bin * copies);
#pragma unroll
        for (int b = 0; b < Blocks; ++b) all += of_block[b];
#pragma unroll
        for (int b = 0; b < Blocks; ++b) *in_block(b, memory.of_cluster + bin) = all;
    }
    cluster_wait();
}

/// Calls put(place, j) for keys[j] among the `count` largest of a block, or of a cluster, whose lower blocks
/// come first. Thread `lane` of warp w has keys 32 Each w + 32 j + lane: places follow this order, and of
/// equal keys the first are chosen. Key 0 never is. Returns how many were chosen. All threads of all blocks.
template <int Blocks, int Each, class Emit>
__device__ __forceinline__ int select_largest(top_memory<Blocks>& memory, const unsigned (&keys)[Each],
                                              int count, const Emit& put) {
    constexpr int bins = top_memory<Blocks>::bins, copies = top_memory<Blocks>::copies;
    const int thread = static_cast<int>(threadIdx.x), warp = thread / warp_size, lane = thread % warp_size;
    unsigned floor = 0,
             left = static_cast<unsigned>(count);  // the digits so far; how many of them are chosen
    int found = count;
#pragma unroll 1
    for (int pass = 0; pass < 3; ++pass) {
        const int bits = pass < 2 ? 11 : 10, shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
        if constexpr (Blocks == 1) {
            memory.histogram[thread] = memory.histogram[thread + top_threads] = 0;
        } else {
            auto* const own = reinterpret_cast<uint4*>(memory.histogram) + 2 * thread;
            own[0] = own[1] = {0, 0, 0, 0};
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < Each; ++j)
            if (keys[j] != 0 && (pass == 0 || keys[j] >> (shift + bits) == floor))
                atomicAdd(&memory.histogram[(keys[j] >> shift & ((1u << bits) - 1u)) * copies +
                                            static_cast<unsigned>(lane % copies)],
                          1u);
        __syncthreads();
        const unsigned* counts = memory.histogram;
        if constexpr (Blocks > 1) {
            add_histograms(memory);
            counts = memory.of_cluster;
        }
        const unsigned all =
            find_digit(memory, counts[bins - 1 - 2 * thread], counts[bins - 2 - 2 * thread], left);
        if (pass == 0 && all <= left) {  // every one is chosen
            found = static_cast<int>(all);
            left = 0;
            break;
        }
        floor = floor << bits | memory.digit;
        left = memory.left;
        if (left == memory.in_digit) {  // all of this digit
            floor <<= shift;
            left = Each * top_threads * Blocks;
            break;
        }
    }
    const largest_keys<Each> chosen{keys, floor, left};
    __syncthreads();
    chosen.count(memory.of_warp, warp, lane);
    __syncthreads();
    const unsigned of_lane[2] = {memory.of_warp[0][lane], memory.of_warp[1][lane]};
    unsigned before[2] = {lane < warp ? of_lane[0] : 0u, lane < warp ? of_lane[1] : 0u};
    if constexpr (Blocks > 1) {
        if (warp == 0) {
            memory.above = __reduce_add_sync(0xffffffffu, of_lane[0]);
            memory.equal = __reduce_add_sync(0xffffffffu, of_lane[1]);
        }
        cluster_wait();
        if (lane < cluster_rank()) {
            before[0] += *in_block(lane, &memory.above);
            before[1] += *in_block(lane, &memory.equal);
        }
    }
    chosen.give(__reduce_add_sync(0xffffffffu, before[0]), __reduce_add_sync(0xffffffffu, before[1]), lane,
                put);
    if constexpr (Blocks > 1) cluster_wait();  // others may still read this block's memory
    return found;
}

/// The `count` largest of one key for each thread: calls take(place, thread) as select_largest() does. Digits
/// of 8 bits, the first one of the range of the keys, so that two are mostly enough. All threads.
template <class Take>
__device__ __forceinline__ void take_largest(top_memory<>& memory, unsigned key, int count,
                                             const Take& take) {
    constexpr int bins = 256;
    static_assert(4 * bins == top_threads && sizeof memory.histogram >= 4 * 4 * bins);
    if (count <= 0) return;
    const int thread = static_cast<int>(threadIdx.x), warp = thread / warp_size, lane = thread % warp_size;
    memory.histogram[thread] = 0;
    const unsigned least = __reduce_min_sync(0xffffffffu, key != 0 ? key : ~0u),
                   largest = __reduce_max_sync(0xffffffffu, key);
    if (lane == 0) {
        memory.of_warp[0][warp] = least;
        memory.of_warp[1][warp] = largest;
    }
    __syncthreads();
    const unsigned base = __reduce_min_sync(0xffffffffu, memory.of_warp[0][lane]),
                   range = __reduce_max_sync(0xffffffffu, memory.of_warp[1][lane]) - base, value = key - base;
    // Values above `floor` are taken, and the first `left` that equal it.
    unsigned floor = 0, left = static_cast<unsigned>(count);
    unsigned* of_digit = memory.histogram;
    int bits = 32;  // behind the digits so far
#pragma unroll 1
    for (int shift = larger(0, 24 - __clz(static_cast<int>(range)));;) {
        // Digits of a warp are often alike, and their counter would be met by all at once.
        const bool counts_here = key != 0 && (bits == 32 || value >> bits == floor);
        const unsigned own = value >> shift & (bits == 32 ? ~0u : (1u << (bits - shift)) - 1u),
                       all = __ballot_sync(0xffffffffu, counts_here);
        if (all != 0) {
            const int first = __ffs(static_cast<int>(all)) - 1;
            const unsigned digit = __shfl_sync(0xffffffffu, own, first),
                           alike = __ballot_sync(0xffffffffu, counts_here && own == digit);
            if (lane == first)
                atomicAdd(of_digit + own, static_cast<unsigned>(__popc(alike)));
            else if (counts_here && (alike >> lane & 1u) == 0)
                atomicAdd(of_digit + own, 1u);
        }
        __syncthreads();
        // A digit for each of the first threads, from the largest one on. (Were every warp to look for
        // itself, instructions would take five times as long.)
        unsigned in_digit = 0, before = 0;
        if (thread < bins) {
            before = in_digit = of_digit[bins - 1 - thread];
#pragma unroll
            for (int step = 1; step < warp_size; step *= 2) {
                const unsigned lower = __shfl_up_sync(0xffffffffu, before, static_cast<unsigned>(step));
                if (lane >= step) before += lower;
            }
            if (lane == warp_size - 1) memory.of_warp[0][warp] = before;
        }
        __syncthreads();
        if (thread < bins) {
            before += __reduce_add_sync(0xffffffffu, lane < warp ? memory.of_warp[0][lane] : 0u) - in_digit;
            if (before < left && before + in_digit >= left) {
                memory.digit = static_cast<unsigned>(bins - 1 - thread);
                memory.left = left - before;
                memory.in_digit = in_digit;
            } else if (thread == bins - 1 && before + in_digit < left) {
                memory.digit = bins;
            }
        }
        __syncthreads();
        if (memory.digit == bins) {  // every one is taken
            floor = 0;
            left = top_threads;
            break;
        }
        floor = (bits == 32 ? 0u : floor << (bits - shift)) | memory.digit;
        left = memory.left;
        if (left == memory.in_digit) {  // all of this digit
            floor <<= shift;
            left = top_threads;
            break;
        }
        if (shift == 0) break;
        bits = shift;
        shift = larger(0, shift - 8);
        of_digit += bins;
    }
    const unsigned larger_ones = __ballot_sync(0xffffffffu, key != 0 && value > floor),
                   equal_ones = __ballot_sync(0xffffffffu, key != 0 && value == floor);
    if (lane == 0) {
        memory.of_warp[0][warp] = static_cast<unsigned>(__popc(larger_ones));
        memory.of_warp[1][warp] = static_cast<unsigned>(__popc(equal_ones));
    }
    __syncthreads();
    const unsigned before = (1u << lane) - 1u,
                   first_larger = __reduce_add_sync(0xffffffffu, lane < warp ? memory.of_warp[0][lane] : 0u),
                   first_equal = __reduce_add_sync(0xffffffffu, lane < warp ? memory.of_warp[1][lane] : 0u);
    const unsigned equal = first_equal + static_cast<unsigned>(__popc(equal_ones & before));
    if (key != 0 && (value > floor || (value == floor && equal < left)))
        take(static_cast<int>(first_larger + static_cast<unsigned>(__popc(larger_ones & before)) +
                              kvq::detail::smaller(equal, left)),
             thread);
}

struct top_args {
    const float* scores;   // [rows][room]
    const int* positions;  // the same, -1: none. Null: of the first level
    const int* tokens;     // [sequences]
    const int* skipped;    // [sequences], or null
    int query_tokens, behind, room, count, groups;
    float* best_scores;   // [rows][groups][count]; null: of the last level
    int* best_positions;  // the same

    /// Scores of a row.
    __device__ __forceinline__ int size(int row) const {
        if (positions != nullptr) return room;
        const int sequence = row / query_tokens, query = row - sequence * query_tokens;
        const int length = tokens[sequence] - (skipped == nullptr ? 0 : skipped[sequence]);
        return kvq::detail::smaller(room, length - behind - query_tokens + query + 1);
    }
};

/// Blocks: of a cluster. Blocks Blocks * row on of column `group`.
template <int Blocks, class Args>
__global__ void __launch_bounds__(top_threads, 1) select_top_kernel(const __grid_constant__ Args a) {
    launch_dependents();
    wait_for_predecessor();
    const int row = static_cast<int>(blockIdx.x) / Blocks, group = static_cast<int>(blockIdx.y),
              rank = static_cast<int>(blockIdx.x) % Blocks, thread = static_cast<int>(threadIdx.x),
              size = a.size(row);
    constexpr int each = Blocks == 1 ? top_each : cluster_each;
    const int first = (group * Blocks + rank) * (top_threads * each) +
                      thread / warp_size * (warp_size * each) + thread % warp_size;
    const std::size_t begin = static_cast<std::size_t>(row) * static_cast<std::size_t>(a.room);
    const auto number = [&](int j) { return begin + static_cast<std::size_t>(first + j * warp_size); };
    unsigned keys[each] = {};
    if (first < size) {
        // All loads are under way at once: those behind the last score read it again.
        float score[each];
#pragma unroll
        for (int j = 0; j < each; ++j)
            score[j] = a.scores[begin + static_cast<std::size_t>(
                                            kvq::detail::smaller(first + j * warp_size, size - 1))];
        if (a.positions == nullptr) {
#pragma unroll
            for (int j = 0; j < each; ++j)
                if (first + j * warp_size < size) keys[j] = score_order(score[j]);
        } else {
#pragma unroll
            for (int j = 0; j < each; ++j)
                if (first + j * warp_size < size && a.positions[number(j)] >= 0)
                    keys[j] = score_order(score[j]);
        }
    }
    const std::size_t to = (static_cast<std::size_t>(row) * static_cast<std::size_t>(a.groups) +
                            static_cast<std::size_t>(group)) *
                           static_cast<std::size_t>(a.count);
    const auto put = [&](int at, int j) {
        const std::size_t place = to + static_cast<std::size_t>(at);
        a.best_positions[place] = a.positions == nullptr ? first + j * warp_size : a.positions[number(j)];
        if (a.best_scores != nullptr) a.best_scores[place] = a.scores[number(j)];
    };
    extern __shared__ __align__(16) std::byte page_memory[];
    auto& memory = *reinterpret_cast<top_memory<Blocks>*>(own_memory(page_memory));
    const int found = select_largest(memory, keys, a.count, put);
    if (rank != 0) return;
    for (int i = found + thread; i < a.count; i += top_threads)
        a.best_positions[to + static_cast<std::size_t>(i)] = -1;
}

inline constexpr int most_selected = top_group / 2;

}  // namespace detail

/// Scores to select from.
struct row_scores {
    const float* scores = nullptr;  ///< [sequences * query_tokens][room], device memory
    const int* tokens = nullptr;    ///< [sequences], device memory: lengths
    int sequences = 0, query_tokens = 1;
    int room = 0;                  ///< scores of a row, seen or not
    int behind = 0;                ///< so many tokens of every sequence stand behind its last query
    const int* skipped = nullptr;  ///< page_cuts::skipped, where `tokens` are paged lengths

    /// Bytes of workspace that select_top() needs: what all levels but the last one have found. 0 for a
    /// count that it refuses.
    std::size_t workspace_bytes(int count) const noexcept {
        std::size_t found = 0;
        if (count < 1 || count > detail::most_selected) return 0;
        for (int groups = groups_of(room); groups > 1; groups = groups_of(groups * count))
            found += static_cast<std::size_t>(groups) * static_cast<std::size_t>(count);
        return found * static_cast<std::size_t>(sequences) * static_cast<std::size_t>(query_tokens) *
               (sizeof(float) + sizeof(int));
    }
    static int groups_of(int scores) noexcept {
        return kvq::detail::larger(1, kvq::detail::ceil_div(scores, detail::top_group));
    }
};

/// Positions of the `count` largest scores that query i of a sequence sees, those of tokens up to its own:
/// [sequences * query_tokens][count], device memory, ascending, -1 behind the last one. count: 1 to 8192.
inline status select_top(const row_scores& rows, int count, int* positions, void* workspace,
                         std::size_t workspace_bytes, cudaStream_t stream) noexcept {
    if (rows.sequences < 0 || rows.query_tokens < 1 || rows.room < 0 || rows.room > detail::most_tokens)
        return detail::bad_value("%d sequences of %d query tokens with %d scores", rows.sequences,
                                 rows.query_tokens, rows.room);
    if (count < 1 || count > detail::most_selected)
        return detail::bad_value("%d tokens are to be selected, 1 to %d can be", count,
                                 detail::most_selected);
    const long long all = 1LL * rows.sequences * rows.query_tokens;
    if (all > 2147483647LL / 4) return detail::bad_value("%lld rows are too many for one launch", all);
    if (all == 0) return {};
    if (rows.scores == nullptr || rows.tokens == nullptr || positions == nullptr)
        return detail::bad_value("scores, tokens or positions is a null pointer");
    const std::size_t needed = rows.workspace_bytes(count);
    if (needed > 0 && (workspace == nullptr || workspace_bytes < needed ||
                       reinterpret_cast<std::uintptr_t>(workspace) % 16 != 0))
        return detail::bad_value(
            "selecting %d of %d needs %zu bytes of workspace on a multiple of 16, got %zu", count, rows.room,
            needed, workspace_bytes);
    detail::top_args args{
        rows.scores, nullptr, rows.tokens, rows.skipped, rows.query_tokens, rows.behind, rows.room,
        count,       1,       nullptr,     nullptr};
    auto* place = static_cast<float*>(workspace);
    const bool clusters = detail::lacks(detail::compute_capability(), detail::feature::clusters) == 0;
    for (bool last = false; !last;) {
        const int of_cluster = !clusters || args.room <= detail::top_group ? 1
                               : args.room <= 4 * detail::top_group        ? 2
                                                                           : 4;
        const auto launch = [&]<int Blocks>(std::integral_constant<int, Blocks>) {
            return detail::launch<Blocks>(
                "launching the selection of tokens", detail::overlap::yes,
                detail::select_top_kernel<Blocks, detail::top_args>,
                dim3(static_cast<unsigned>(all * Blocks), static_cast<unsigned>(args.groups)),
                detail::top_threads, sizeof(detail::top_memory<Blocks>), stream, args);
        };
        args.groups = row_scores::groups_of(kvq::detail::ceil_div(
            args.room, of_cluster == 1 ? 1 : of_cluster * detail::cluster_each / detail::top_each));
        last = args.groups == 1;
        const std::size_t found = static_cast<std::size_t>(all) * static_cast<std::size_t>(args.groups) *
                                  static_cast<std::size_t>(count);
        args.best_scores = last ? nullptr : place;
        args.best_positions = last ? positions : reinterpret_cast<int*>(place + found);
        const status s = of_cluster == 1   ? launch(std::integral_constant<int, 1>{})
                         : of_cluster == 2 ? launch(std::integral_constant<int, 2>{})
                                           : launch(std::integral_constant<int, 4>{});
        if (!s) return s;
        args.scores = args.best_scores;
        args.positions = args.best_positions;
        args.room = args.groups * count;
        if (!last) place += 2 * found;
    }
    return {};
}

}}}  // namespace kvq::cuda
