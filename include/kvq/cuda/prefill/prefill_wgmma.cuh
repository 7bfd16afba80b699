// A prompt's attention on tensor cores of compute capability 9.0, over tiles of half floats in device memory
// (prefill_ready.cuh): clusters of two thread blocks share every tile that they read.
//
//   block      128 rows of a cluster's 256 (512 channels: 64 of 128). It has half of every tile copied to
//              both blocks
//   producers  a warp for keys and one for values: bulk copies, two stages each
//   consumers  two warpgroups, 64 rows each: S = Q K^T of the next tile, O += P V of this one, softmax
//
//   256, 512 channels   tiles of 64 tokens in place of 128. 512: each consumer has the scores of 32 tokens of
//                       a tile, both get all weights through shared memory, and have 256 channels of the
//                       output each
//
// Of a cluster and tile of 128 tokens, head_dim 128: 64 KB, mostly from the second-level cache, 8.4 M
// products of a block (4096 cycles). Not compiled for sm_90a, the kernel is empty, its bound is 32 threads,
// and prefill() takes the other one.
// Contract: prefill() in prefill.cuh. Shared memory: 161, 194, 205 KB for head_dim 128, 256, 512. sm_90a.
// Source: warp specialization and overlapped softmax: FlashAttention-3, arXiv 2407.08608.
#pragma once

#include "prefill_consumers.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

#if KVQ_WARPGROUP_PRODUCTS

/// Has keys, or values, of all tiles of a cluster copied: each block its half, to both blocks.
template <tensor Role, int Dim, class Args>
__device__ __forceinline__ void copy_tiles(const Args& a, const prefill_block& block,
                                           const wgmma_place& place, int lane) {
    using memory = wgmma_memory<Dim>;
    using shape = typename memory::shape;
    constexpr bool key = Role == tensor::key;
    int made = 0;
    each_ready_tile(a, block, shape::tile, [&](int tile) {
        const std::byte* const from =
            a.ready.tile(block.sequence, block.kv_head, tile) + (key ? 0 : shape::units * memory::unit_bytes);
        tile_note note{};
        if constexpr (key) {
            note = load_written(a.ready.note(block.sequence, tile));
            note.cut = a.cut(block, note.position, note.count, note.slices, note.cut != 0, shape::tile);
        }
#pragma unroll 1
        for (int unit = 0; unit < shape::units; ++unit) {
            const wgmma_stage s = wgmma_stage::of(place, made % shape::stages, memory{});
            // Until consumers of both blocks have read what the stage held.
            barrier_wait(key ? s.free_keys : s.free_values,
                         static_cast<std::uint32_t>(made / shape::stages + 1) & 1u);
            ++made;
            if (lane == 0) {
                if (key && unit == 0) note.store(s.note);
                const std::uint32_t full = key ? s.full_keys : s.full_values;
                constexpr int bytes = memory::unit_bytes, half = bytes / shape::cluster;
                const int behind = place.rank * half;
                barrier_expect(full, bytes);
                copy_bulk_to_all((key ? s.keys : s.values) + static_cast<std::uint32_t>(behind),
                                 from + unit * bytes + behind, half, full, shape::cluster);
            }
            __syncwarp();
        }
    });
}

#endif

template <int Dim, bool Softcap, class Args>
__global__ void __launch_bounds__((warpgroup_threads<wgmma_shape<Dim>::threads>), 1)
    prefill_wgmma_kernel([[maybe_unused]] const __grid_constant__ Args a) {
#if KVQ_WARPGROUP_PRODUCTS
    using memory = wgmma_memory<Dim>;
    using shape = typename memory::shape;
    // 1024: the swizzle of tiles. A name of its own, since one name has one alignment in a program.
    extern __shared__ __align__(1024) std::byte swizzled_memory[];
    std::byte* const shared = swizzled_memory;
    const wgmma_place place{shared_address(shared), cluster_rank()};
    prefill_block block(a, shape::cluster_rows, static_cast<int>(blockIdx.x) / shape::cluster,
                        a.ready.first_head + static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z));
    if (block.empty()) {
        wait_for_predecessor();  // no launch behind this one may begin before
        return;
    }
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    // By a shuffle, what depends on the warp is known to be the same for all lanes.
    const int warp = shape::wide ? __shfl_sync(0xffffffffu, thread / 32, 0) : thread / 32;
    if (thread == 0) {
        constexpr int arrivals = shape::cluster * shape::consumer_warps;  // at what is free
        for (int i = 0; i < shape::stages; ++i) {
            const wgmma_stage s = wgmma_stage::of(place, i, memory{});
            barrier_init(s.full_keys, 1);
            barrier_init(s.full_values, 1);
            barrier_init(s.free_keys, arrivals);
            barrier_init(s.free_values, shape::split ? arrivals / 2 : arrivals);
        }
    }
    wait_for_predecessor();  // which writes tiles, and the order of channels
    block.order = *a.ready.order(block.sequence, block.kv_head);
    load_query_rows<Dim, 64>(a, block, place.rank * shape::rows, shape::rows, place.tiles + memory::query,
                             thread, shape::threads);
    publish_to_products();
    __syncthreads();
    cluster_wait();

    if (warp < shape::producer_warps) {
        leave_registers<shape>();
        if (warp == 0)
            copy_tiles<tensor::key, Dim>(a, block, place, lane);
        else if (warp == 1)
            copy_tiles<tensor::value, Dim>(a, block, place, lane);
        __syncwarp();
    } else {
        take_registers<shape>();
        int tiles = 0;
        each_ready_tile(a, block, shape::tile, [&](int) { ++tiles; });
        consume_tiles<Dim, Softcap>(a, block, place, tiles, (warp - shape::producer_warps) / 4);
    }
    cluster_wait();  // the other block may still write to this one's shared memory
#endif
}

}}}  // namespace kvq::cuda::detail
