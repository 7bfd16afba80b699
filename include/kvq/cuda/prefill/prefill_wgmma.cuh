// A prompt's attention on tensor cores of compute capability 9.0: clusters of two thread blocks share every
// dequantized tile.
//
//   block      128 rows of a cluster's 256. It dequantizes half of the tokens of every tile and copies them
//              to the other block
//   producers  warpgroups 0 (keys) and 1 (values): blocks of pages come by bulk copies, half floats go to
//              both blocks' tiles, two stages each
//   consumers  warpgroups 2 and 3, 64 rows each: S = Q K^T of the next tile, O += P V of this one, softmax
//
//   256, 512 channels   tiles of 64 tokens; words come right from pages, and a block dequantizes half of the
//                       channels. 256: two warps produce keys, two values. 512: four warps each, blocks of 64
//                       rows; each consumer has the scores of 32 tokens of a tile, both get all weights
//                       through shared memory, and have 256 channels of the output each
//
// Of a thread block and tile of 128 tokens, head_dim 128, 4 bits: 9 KB from device memory, 16384 values
// dequantized, 32 KB to the other block and as much from it, 4.2 M products (2048 cycles). Keys and values
// have warpgroups of their own because a stage of keys is free a tile earlier (docs/lab/gpu.md). Not compiled
// for sm_90a, the kernel is empty, its bound is 32 threads, and prefill() takes the other one.
// Contract: prefill() in prefill.cuh. Shared memory: 227, 194, 205 KB for head_dim 128, 256, 512. sm_90a.
// Source: warp specialization and overlapped softmax: FlashAttention-3, arXiv 2407.08608.
#pragma once

#include "prefill_consumers.cuh"
#include "prefill_ready.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

#if KVQ_WARPGROUP_PRODUCTS

/// Writes its half of all key tiles of a cluster, or of all value tiles, in order: tokens half_tile * rank on
/// of every tile; or (wide) its share of the channels of every unit.
template <tensor Role, int Dim, class Args>
struct tile_producer {
    using memory = wgmma_memory<Dim>;
    using shape = wgmma_shape<Dim>;
    static constexpr bool key = Role == tensor::key, wide = shape::wide;
    static constexpr int tile = shape::tile, half_tile = shape::half_tile, role_warps = shape::role_warps;
    template <class Pair>
    using own_cells = cells_of<Role, Pair, key ? half_tile : Dim, key ? Dim : half_tile, role_warps,
                               key ? tile : Dim, has_widths<Args>>;
    static constexpr int stages = shape::stages, units = shape::units, passes = shape::passes;
    /// How far behind a warp's first strip of a tile is that of a pass over a unit?
    KVQ_HD static constexpr int strips_behind(int unit, int pass) {
        return unit * (shape::share * shape::cluster) + pass * role_warps;
    }
    const Args& a;
    const prefill_block& block;
    wgmma_place place;
    int warp, lane;  // of this role
    int made = 0, read = 0;

    /// All tiles of a part.
    template <class Part>
    __device__ __forceinline__ void pages(const Part& part) {
        const bool sinks = a.template keeps<Part>();
        const token_range range = tokens_of(a, part, block, tile);
        if (range.first >= range.end) return;
        if constexpr (wide)
            wide_pages(part, range, sinks);
        else
            whole_pages(part, range, sinks);
    }
    __device__ __forceinline__ void new_tokens() {
        const new_range range = a.new_tokens(block, tile);
        const auto& all = key ? a.k : a.v;
#pragma unroll 1
        for (int first = range.begin(); first < range.end; first = range.behind(first, tile)) {
            const int count = kvq::detail::smaller(tile, block.new_tokens - first),
                      position = block.history + first;
            wgmma_stage s = next_stage();
            if (key && warp == 0) {
                const tile_note note{position, count, -1, a.cut(block, position, count, -1, false, tile)};
                if (lane == 0) note.store(s.note);
            }
            if constexpr (wide) {
                copy_share(0, block.start + first, count, s);
#pragma unroll 1
                for (int unit = 1; unit < units; ++unit) {
                    share(s);
                    s = next_stage();
                    copy_share(unit, block.start + first, count, s);
                }
            } else {
                copy_new_tile<Role, key ? half_tile : Dim, key ? Dim : half_tile, role_warps,
                              key ? tile : Dim>(all, block.kv_head,
                                                block.start + first + place.rank * half_tile,
                                                count - place.rank * half_tile, own_half(s), warp, lane,
                                                has_widths<Args> ? block.order : nullptr);
            }
            share(s);
        }
    }

private:
    /// Blocks of the next tile are under way while this one is dequantized; the first warp asks for them.
    template <class Part>
    __device__ __forceinline__ void whole_pages(const Part& part, const token_range& range, bool sinks) {
        using pair = typename Part::pair_type;
        using blocks = blocks_in_slot<Role, pair>;
        const bool leads = warp == 0;
        const typename own_cells<pair>::lane_channel channel(part.cache, block.sequence, block.kv_head, warp,
                                                             lane, has_widths<Args> ? block.order : nullptr);
        const auto page_at = [&](int first) {
            return leads || !blocks::fit ? page_of_lane(part, block.sequence, first, range.end, tile, lane)
                                         : -1;
        };
        int page = page_at(range.first), next_page = page_at(range.first + tile);
        if (leads) ask(part.cache, page, read);
#pragma unroll 1
        for (int first = range.first; first < range.end; first += tile) {
            const int page_behind = page_at(first + 2 * tile);
            if (leads && first + tile < range.end) ask(part.cache, next_page, read + 1);
            const int count = kvq::detail::smaller(tile, range.end - first);
            own_cells<pair> cells(channel);
            with_half(part.cache, first, count - place.rank * half_tile, page,
                      [&](const auto& source, const tile_tokens& half) {
                          cells.fetch(source, half, warp, lane);
                          const wgmma_stage s = next_stage();
                          if (key && leads)
                              note_tile(s, part.cache.first_token + first, count,
                                        __ballot_sync(0xffffffffu, page >= 0), sinks);
                          cells.store(source, own_half(s), half, table(), warp, lane);
                          share(s);
                      });
            page = next_page;
            next_page = page_behind;
        }
    }
    /// What consumers must know of a tile of pages. held: bit i, are tokens 16 i on?
    __device__ __forceinline__ void note_tile(const wgmma_stage& s, int position, int count, unsigned held,
                                              bool sinks) const {
        const int slices = static_cast<int>(held);
        const tile_note note{position, count, slices, a.cut(block, position, count, slices, sinks, tile)};
        if (lane == 0) note.store(s.note);
    }
    /// This block's channels of a unit of new tokens.
    __device__ __forceinline__ void copy_share(int unit, int first, int count, const wgmma_stage& s) const {
        constexpr int channels = shape::share * 32;
        auto from = key ? a.k : a.v;
        from.data += (unit * shape::cluster + place.rank) * channels;
        copy_new_tile<Role, key ? tile : channels, key ? channels : tile, role_warps>(
            from, block.kv_head, first, count, own_half(s), warp, lane);
    }
    /// All tiles of a part. As soon as a batch is dequantized, its registers are asked for what they hold
    /// next.
    template <class Part>
    __device__ __forceinline__ void wide_pages(const Part& part, const token_range& range, bool sinks) {
        using pair = typename Part::pair_type;
        using octets = octets_of<Role, pair, key ? tile : Dim>;
        constexpr int of_unit = passes * octets::batches, of_tile = units * of_unit;
        constexpr int ahead = kvq::detail::smaller(octets::most_ahead, of_tile);  // batches under way
        static_assert(of_tile % ahead == 0 && role_warps % 2 == 0);
        const auto page_at = [&](int first) {
            return page_of_lane(part, block.sequence, first, range.end, tile, lane);
        };
        const int strip = place.rank * shape::share + warp;  // the first of every unit
        int first = range.first;
        const auto tile_of = [&](int page) {
            return
                typename octets::lane_tile(part.cache, block.kv_head, first,
                                           kvq::detail::smaller(tile, range.end - first), page, strip, lane);
        };
        // Numbers of pages are asked for two tiles ahead.
        auto own = tile_of(page_at(first));
        int next_page = page_at(first + tile);
        octets batches[ahead];
        const auto fetch = [&](auto number) {  // a batch of a tile, by its number
            constexpr int n = decltype(number)::value;
            if (first < range.end && own.any())
                batches[n % ahead]
                    .template fetch<strips_behind(n / of_unit, n % of_unit / octets::batches),
                                    n % octets::batches, n % ahead>(own, table(), lane);
            if constexpr (octets::direct) copy_commit();
        };
        static_for<ahead>(fetch);
#pragma unroll 1
        while (first < range.end) {
            const int page_behind = page_at(first + 2 * tile);
            const std::uint32_t existing = own.existing;
            const bool any = own.any();
            static_for<units>([&](auto unit) {
                constexpr int u = decltype(unit)::value;
                const wgmma_stage s = next_stage();
                if constexpr (u == 0) {
                    if (key && warp == 0)
                        note_tile(s, part.cache.first_token + first, own.tokens.count, own.held(), sinks);
                }
                std::uint32_t places[4];
                octets::places(places, key ? s.keys : s.values, strip, lane);
                static_for<of_unit>([&](auto number) {
                    constexpr int k = decltype(number)::value, n = u * of_unit + k;
                    if (any) {
                        batches[n % ahead].template wait<ahead - 1>();
                        batches[n % ahead]
                            .template store<k / octets::batches * role_warps, k % octets::batches, n % ahead>(
                                places, table(), lane);
                    }
                    if constexpr (n + ahead == of_tile) {
                        first += tile;
                        own = tile_of(next_page);
                        next_page = page_behind;
                    }
                    fetch(std::integral_constant<int, (n + ahead) % of_tile>{});
                });
                if (!key && existing != 0xffffffffu)
#pragma unroll 1
                    for (int pass = 0; pass < passes; ++pass) {
                        octets::places(places, s.values, strip + pass * role_warps, lane);
                        octets::hide(places, existing, lane);
                    }
                share(s);
            });
        }
    }
    __device__ __forceinline__ std::uint32_t table() const {
        return place.tiles +
               static_cast<std::uint32_t>(
                   memory::tables + (key ? warp * memory::key_table
                                         : role_warps * memory::key_table + warp * memory::value_table));
    }
    /// Waits until consumers of both blocks have read what the next stage held.
    __device__ __forceinline__ wgmma_stage next_stage() {
        const wgmma_stage s = wgmma_stage::of(place, made % stages, memory{});
        barrier_wait(key ? s.free_keys : s.free_values, static_cast<std::uint32_t>(made / stages + 1) & 1u);
        ++made;
        return s;
    }
    __device__ __forceinline__ std::uint32_t own_half(const wgmma_stage& s) const {
        return (key ? s.keys : s.values) +
               static_cast<std::uint32_t>(place.rank * (wide  ? tile * shape::unit_channels
                                                        : key ? half_tile * 128
                                                              : Dim * 128));
    }
    __device__ __forceinline__ std::uint32_t slot(int i) const {
        return place.tiles +
               static_cast<std::uint32_t>(memory::slots_at +
                                          ((key ? 0 : block_slots) + i % block_slots) * block_slot_bytes);
    }
    __device__ __forceinline__ std::uint32_t slot_barrier(int i) const {
        return place.tiles + static_cast<std::uint32_t>(memory::slot_barriers +
                                                        ((key ? 0 : block_slots) + i % block_slots) * 8);
    }
    /// Asks for this half's blocks of a tile. What its slot held was read before the last barrier of this
    /// role.
    template <class Pair>
    __device__ __forceinline__ void ask(const cache_ref<Pair>& cache, int page, int number) {
        using blocks = blocks_in_slot<Role, Pair>;
        if constexpr (blocks::fit) {
            constexpr int slices = kvq::detail::smaller(half_tile, Pair::page_tokens) / slice_tokens;
            const int own =
                __shfl_sync(0xffffffffu, page, place.rank * (half_tile / slice_tokens) + lane * slices);
            const bool held = lane < blocks::count && own >= 0;
            const unsigned all = __ballot_sync(0xffffffffu, held);
            const std::uint32_t to = slot(number), barrier = slot_barrier(number);
            if (!key &&
                __popc(all) !=
                    blocks::count) {  // weights of tokens that are not held are 0: values must be finite
#pragma unroll 1
                for (int i = lane * 16; i < blocks::count * blocks::block_bytes; i += 512)
                    if ((all >> i / blocks::block_bytes & 1u) == 0)
                        store_shared_16(to + static_cast<std::uint32_t>(i), {0.0f, 0.0f, 0.0f, 0.0f});
                publish_to_products();
                __syncwarp();
            }
            if (lane == 0) barrier_expect(barrier, __popc(all) * blocks::block_bytes);
            __syncwarp();
            if (held)
                copy_bulk(to + static_cast<std::uint32_t>(lane * blocks::block_bytes),
                          cache.template block<Role>(own, block.kv_head), blocks::block_bytes, barrier);
        }
    }
    /// Calls f(source, half) for this block's half of a tile, once its words can be read.
    template <class Pair, class F>
    __device__ __forceinline__ void with_half(const cache_ref<Pair>& cache, int first, int count, int page,
                                              F&& f) {
        using blocks = blocks_in_slot<Role, Pair>;
        if constexpr (blocks::fit) {
            barrier_wait(slot_barrier(read), static_cast<std::uint32_t>(read / block_slots) & 1u);
            const blocks source{slot(read)};
            ++read;
            // Tokens are counted from the slot's first one.
            f(source, tile_tokens{blocks::page_tokens == tile ? place.rank * half_tile : 0, count, 0, 0});
        } else {
            const int own_page =
                __shfl_sync(0xffffffffu, page, lane + place.rank * (half_tile / slice_tokens));
            f(blocks_in_memory<Role, Pair>{&cache, block.kv_head},
              tile_tokens::of(first + place.rank * half_tile, count,
                              lane < half_tile / slice_tokens ? own_page : -1));
        }
    }
    /// This half is there: the other block of the cluster gets a copy, and this one waits for the other half.
    __device__ __forceinline__ void share(const wgmma_stage& s) const {
        // Wide: consumers publish it. Here the fence would wait for the words that are under way.
        if constexpr (!wide) publish_to_products();
        __syncwarp();
        wait_at_barrier(key ? 1 : 2, role_warps * 32);
        if (warp != role_warps - 1 || lane != 0) return;
        constexpr int copies = key && !wide ? Dim / 64 : 1,
                      bytes = half_tile * shape::unit_channels * 2 / copies;
        if constexpr (wide) publish_to_products();  // to copies
        const std::uint32_t barrier = key ? s.full_keys : s.full_values, from = own_half(s);
        const int other = place.rank ^ 1;
        const std::uint32_t to = place_in(other, from), there = place_in(other, barrier);
        barrier_expect(barrier, copies * bytes);
#pragma unroll
        for (int i = 0; i < copies; ++i) {
            const auto behind = static_cast<std::uint32_t>(i * tile * 128);
            copy_bulk_to(to + behind, from + behind, bytes, there);
        }
    }
};

#endif

template <int Dim, bool Softcap, class Args>
__global__ void __launch_bounds__((warpgroup_threads<wgmma_shape<Dim, has_ready_tiles<Args>>::threads>), 1)
    prefill_wgmma_kernel([[maybe_unused]] const __grid_constant__ Args a) {
#if KVQ_WARPGROUP_PRODUCTS
    using memory = wgmma_memory<Dim, has_ready_tiles<Args>>;
    using shape = typename memory::shape;
    // 1024: the swizzle of tiles. A name of its own, since one name has one alignment in a program.
    extern __shared__ __align__(1024) std::byte swizzled_memory[];
    std::byte* const shared = swizzled_memory;
    const wgmma_place place{shared_address(shared), cluster_rank()};
    int head = static_cast<int>(blockIdx.y);
    if constexpr (shape::ready) head += a.ready.first_head;
    prefill_block block(a, shape::cluster_rows, static_cast<int>(blockIdx.x) / shape::cluster, head,
                        static_cast<int>(blockIdx.z));
    if (block.empty()) return;
    if constexpr (shape::ready)
        block.order = *a.ready.order(block.sequence, head);
    else
        find_order(a, block);
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
        for (int i = 0; i < 2 * block_slots; ++i)
            barrier_init(place.tiles + static_cast<std::uint32_t>(memory::slot_barriers + i * 8), 1);
    }
    load_query_rows<Dim, 64>(a, block, place.rank * shape::rows, shape::rows, place.tiles + memory::query,
                             thread, shape::threads);
    publish_to_products();
    __syncthreads();
    cluster_wait();

    if (warp < shape::producer_warps) {
        leave_registers<shape>();
        if constexpr (shape::ready) {
            if (warp == 0)
                feed_ready_tiles<tensor::key, Dim>(a, block, place, lane);
            else if (warp == shape::role_warps)
                feed_ready_tiles<tensor::value, Dim>(a, block, place, lane);
            __syncwarp();
        } else {
            const auto produce = [&]<tensor Role>(std::integral_constant<tensor, Role>) {
                tile_producer<Role, Dim, Args> producer{a, block, place, warp % shape::role_warps,
                                                        shape::wide ? read_lane() : lane};
                each_part(a, [&](const auto& part) { producer.pages(part); });
                producer.new_tokens();
            };
            if (warp < shape::role_warps)
                produce(std::integral_constant<tensor, tensor::key>{});
            else
                produce(std::integral_constant<tensor, tensor::value>{});
        }
    } else {
        take_registers<shape>();
        int tiles = 0;
        if constexpr (shape::ready)
            each_ready_tile(a, block, shape::tile, [&](int) { ++tiles; });
        else
            tiles = count_tiles(a, block, shape::tile);
        consume_tiles<Dim, Softcap>(a, block, place, tiles, (warp - shape::producer_warps) / 4);
    }
    cluster_wait();  // the other block may still write to this one's shared memory
#endif
}

}}}  // namespace kvq::cuda::detail
