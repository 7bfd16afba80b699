// A prompt's attention on tensor cores of compute capability 9.0: clusters of two thread blocks share every
// dequantized tile, up to 256 channels.
//
//   block      128 rows of a cluster's 256. It dequantizes half of the tokens of every tile and copies them
//              to the other block
//   producers  warpgroups 0 (keys) and 1 (values): blocks of pages come by bulk copies, half floats go to
//              both blocks' tiles, two stages each
//   consumers  warpgroups 2 and 3, 64 rows each: S = Q K^T of the next tile, O += P V of this one, softmax
//
//   256, 512 channels   tiles of 64 tokens; two warps produce keys, two values, and words come right from
//                       pages. 256: a block dequantizes half of the channels. 512: blocks of 64 rows without
//                       clusters, since copies of twice the size take longer than to dequantize the tile;
//                       each consumer has 256 channels of the output, and all scores
//
// Of a thread block and tile of 128 tokens, head_dim 128, 4 bits: 9 KB from device memory, 16384 values
// dequantized, 32 KB to the other block and as much from it, 4.2 M products (2048 cycles). Keys and values
// have warpgroups of their own because a stage of keys is free a tile earlier (docs/lab/gpu.md). Not compiled
// for sm_90a, the kernel is empty, its bound is 32 threads, and prefill() takes the other one.
// Contract: prefill() in prefill.cuh. Shared memory: 227, 194, 226 KB for head_dim 128, 256, 512. sm_90a.
// Source: warp specialization and overlapped softmax: FlashAttention-3, arXiv 2407.08608.
#pragma once

#include "prefill_wgmma_memory.cuh"

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
    using own_cells =
        cells_of<Role, Pair, key ? half_tile : Dim, key ? Dim : half_tile, role_warps, key ? tile : Dim>;
    static constexpr int stages = key ? shape::key_stages : shape::value_stages;
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
                for (int unit = 1; unit < shape::units; ++unit) {
                    share(s);
                    s = next_stage();
                    copy_share(unit, block.start + first, count, s);
                }
            } else {
                copy_new_tile<Role, key ? half_tile : Dim, key ? Dim : half_tile, role_warps,
                              key ? tile : Dim>(all, block.kv_head,
                                                block.start + first + place.rank * half_tile,
                                                count - place.rank * half_tile, own_half(s), warp, lane);
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
        const typename own_cells<pair>::lane_channel channel(part.cache, block.kv_head, warp, lane);
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
            const wgmma_stage s = next_stage();
            if (key && leads)
                note_tile(s, part.cache.first_token + first, count, __ballot_sync(0xffffffffu, page >= 0),
                          sinks);
            own_cells<pair> cells(channel);
            dequantize(cells, part.cache, first, count - place.rank * half_tile, page, s);
            share(s);
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
    /// All tiles of a part. The words of a batch are under way while the one before is dequantized; blocks of
    /// the next tile come to the second-level cache.
    template <class Part>
    __device__ __forceinline__ void wide_pages(const Part& part, const token_range& range, bool sinks) {
        using pair = typename Part::pair_type;
        using octets = octet_batch<Role, pair, key ? tile : Dim>;
        constexpr int count = shape::passes * octets::batches;  // of a unit
        static_assert(count % 2 == 0 && role_warps % 2 == 0);
        const auto page_at = [&](int first) {
            return page_of_lane(part, block.sequence, first, range.end, tile, lane);
        };
        const int strip = place.rank * shape::share + warp;  // the first of every unit
        int first = range.first, unit = 0;
        const auto tile_of = [&](int page) {
            return
                typename octets::lane_tile(part.cache, block.kv_head, first,
                                           kvq::detail::smaller(tile, range.end - first), page, strip, lane);
        };
        // Numbers of pages are asked for two tiles ahead.
        auto own = tile_of(page_at(first));
        int next_page = page_at(first + tile), page_behind = -1;
        octets batches[2];
        const auto fetch_first = [&] {
            if (first < range.end && own.any()) batches[0].template fetch<0, 0>(own, lane);
        };
        const auto next_unit = [&] {
            if (++unit < shape::units) {
                own.template next<shape::unit_channels>();
            } else {
                unit = 0;
                first += tile;
                own = tile_of(next_page);
                next_page = page_behind;
            }
            fetch_first();
        };
        fetch_first();
#pragma unroll 1
        while (first < range.end) {
            if (unit == 0) page_behind = page_at(first + 2 * tile);
            const wgmma_stage s = next_stage();
            if (unit == 0) {
                if (key && warp == 0)
                    note_tile(s, part.cache.first_token + first, own.tokens.count, own.held(), sinks);
                if (shape::cluster == 1 && warp == role_warps - 1) prefetch_blocks(part.cache, next_page);
            }
            const std::uint32_t existing = own.existing;
            if (own.any()) {
                std::uint32_t places[4];
                octets::places(places, key ? s.keys : s.values, strip, lane);
                static_for<count>([&](auto number) {
                    constexpr int n = decltype(number)::value, next = n + 1;
                    batches[n % 2].wait();
                    if constexpr (next < count)
                        batches[next % 2]
                            .template fetch<next / octets::batches * role_warps, next % octets::batches>(
                                own, lane);
                    else
                        next_unit();
                    wait_for(places[0]);  // the loads come before what follows
                    batches[n % 2].template store<n / octets::batches * role_warps, n % octets::batches>(
                        places, table(), lane);
                });
            } else {
                next_unit();
            }
            if (!key && existing != 0xffffffffu)
#pragma unroll 1
                for (int pass = 0; pass < shape::passes; ++pass) {
                    std::uint32_t places[4];
                    octets::places(places, s.values, strip + pass * role_warps, lane);
                    octets::hide(places, existing, lane);
                }
            share(s);
        }
    }
    /// Blocks of the next tile to the second-level cache. page: of lane i, of its tokens 16 i on.
    template <class Pair>
    __device__ __forceinline__ void prefetch_blocks(const cache_ref<Pair>& cache, int page) const {
        constexpr int slices = kvq::detail::smaller(tile, Pair::page_tokens) / slice_tokens;
        if (lane < tile / slice_tokens && lane % slices == 0 && page >= 0)
            prefetch_bulk(cache.template block<Role>(page, block.kv_head),
                          static_cast<int>(key ? Pair::key_block_bytes : Pair::value_block_bytes));
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
        return (key ? s.keys : s.values) + static_cast<std::uint32_t>(place.rank * (wide  ? tile * Dim
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
    template <class Cells, class Pair>
    __device__ __forceinline__ void dequantize(Cells& cells, const cache_ref<Pair>& cache, int first,
                                               int count, int page, const wgmma_stage& s) {
        using blocks = blocks_in_slot<Role, Pair>;
        if constexpr (blocks::fit) {
            barrier_wait(slot_barrier(read), static_cast<std::uint32_t>(read / block_slots) & 1u);
            // Tokens are counted from the slot's first one.
            dequantize_from(cells, blocks{slot(read)},
                            {blocks::page_tokens == tile ? place.rank * half_tile : 0, count, 0, 0}, s);
            ++read;
        } else {
            const int own_page =
                __shfl_sync(0xffffffffu, page, lane + place.rank * (half_tile / slice_tokens));
            dequantize_from(cells, blocks_in_memory<Role, Pair>{&cache, block.kv_head},
                            tile_tokens::of(first + place.rank * half_tile, count,
                                            lane < half_tile / slice_tokens ? own_page : -1),
                            s);
        }
    }
    template <class Cells, class Source>
    __device__ __forceinline__ void dequantize_from(Cells& cells, const Source& source,
                                                    const tile_tokens& half, const wgmma_stage& s) {
        cells.fetch(source, half, warp, lane);
        cells.store(source, own_half(s), half, table(), warp, lane);
    }
    /// This half is there: the other block of the cluster gets a copy, and this one waits for the other half.
    __device__ __forceinline__ void share(const wgmma_stage& s) const {
        publish_to_products();
        __syncwarp();
        if constexpr (shape::cluster == 1) {
            if (lane == 0) barrier_arrive(key ? s.full_keys : s.full_values);
            return;
        }
        wait_at_barrier(key ? 1 : 2, role_warps * 32);
        if (warp != role_warps - 1 || lane != 0) return;
        constexpr int copies = key && !wide ? Dim / 64 : 1, bytes = half_tile * Dim * 2 / copies;
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

template <int Dim, bool Softcap, class Args>
__device__ __forceinline__ void consume_tiles(const Args& a, const prefill_block& block,
                                              const wgmma_place& place, int tiles, int group) {
    using memory = wgmma_memory<Dim>;
    using shape = wgmma_shape<Dim>;
    constexpr int tile_tokens = shape::tile, own_channels = shape::unit_channels, units = shape::units;
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
    const int g = lane / 4, t = lane % 4;
    const int first_row = units > 1 ? 0 : group * 64, first_channel = units > 1 ? group * own_channels : 0;
    const int own_row = place.rank * shape::rows + first_row + warp * 16 + g;  // and 8 rows further
    std::uint32_t q =
        operand_at(place.tiles + static_cast<std::uint32_t>(memory::query + first_row * Dim * 2));
    // Positions of both rows.
    int position[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
        position[r] = block.history + a.newest_of_row(block.first_row + own_row + 8 * r);

    float o[own_channels / 2], factor[2];
    std::uint32_t p[tile_tokens / 4] = {};
    row_pair rows;
    const float scale = Softcap ? 1.0f : a.scale;

    // Every tile has its own scores: their registers would otherwise stay taken between tiles, which spills
    // others.
    using tile_scores = float[tile_tokens / 2];
    const auto key_stage = [&](int tile, int unit) {
        return wgmma_stage::of(place, (tile * units + unit) % shape::key_stages, memory{});
    };
    const auto value_stage = [&](int tile) {  // of this warpgroup's channels
        return wgmma_stage::of(place, (units > 1 ? group : tile) % shape::value_stages, memory{});
    };
    const auto wait_for_keys = [&](int tile, int unit) {
        barrier_wait(key_stage(tile, unit).full_keys,
                     static_cast<std::uint32_t>((tile * units + unit) / shape::key_stages) & 1u);
    };
    const auto wait_for_values = [&](int tile, const wgmma_stage& stage) {
        barrier_wait(stage.full_values,
                     static_cast<std::uint32_t>(units > 1 ? tile : tile / shape::value_stages) & 1u);
    };
    const auto ask_scores = [&](int tile, const wgmma_stage& first, tile_scores& s) {
        static_for<units>([&](auto unit) {
            constexpr int u = decltype(unit)::value, steps = own_channels / 16;
            const wgmma_stage stage = u > 0 ? key_stage(tile, u) : first;
            if constexpr (u > 0) wait_for_keys(tile, u);
            const std::uint32_t k = operand_at(stage.keys);
            asm volatile("" : "+r"(q));  // otherwise the descriptors of all steps take registers
            products_begin();
            static_for<steps>([&](auto step) {
                constexpr int i = decltype(step)::value, of_row = u * steps + i;
                multiply_shared<of_row != 0>(s, operand(q, of_row / 4 * 64 * 128 + i % 4 * 32),
                                             operand(k, i / 4 * tile_tokens * 128 + i % 4 * 32));
            });
            products_commit();
        });
    };
    const auto ask_output = [&](const wgmma_stage& stage) {
        const std::uint32_t v = operand_at(stage.values);
        products_begin();
        static_for<tile_tokens / 16>([&](auto step) {
            constexpr int i = decltype(step)::value, at_once = kvq::detail::smaller(own_channels, 128);
            static_for<own_channels / at_once>([&](auto part) {
                constexpr int n = decltype(part)::value * at_once;  // the first channel
                multiply_registers(reinterpret_cast<float(&)[at_once / 2]>(o[n / 2]), p[4 * i], p[4 * i + 1],
                                   p[4 * i + 2], p[4 * i + 3],
                                   operand(v, (i / 4 * own_channels + n) * 128 + i % 4 * 32));
            });
        });
        products_commit();
    };
    const auto weigh = [&](const tile_note& note, tile_scores& s) {
        mask_scores<Softcap>(a, block, note, position, t, s);
        softmax_step(s, rows, factor, scale);
    };
    const auto pack = [&](const tile_scores& s) {
#pragma unroll
        for (int i = 0; i < tile_tokens / 4; ++i) p[i] = pack_halves<float16>(s[2 * i], s[2 * i + 1]);
    };
    const auto done_with = [&](std::uint32_t barrier) {  // of a stage that all of the cluster write to
        __syncwarp();
        if constexpr (shape::cluster > 1) {
            if (lane < 2) barrier_arrive_cluster(place_in(lane, barrier));
        } else if (lane == 0) {
            barrier_arrive(barrier);
        }
    };
    // Of the newest scores, behind which `Behind` groups of products were asked for.
    const auto wait_for_scores = [&]<int Behind>(int tile, const wgmma_stage& first, tile_scores& s,
                                                 std::integral_constant<int, Behind>) {
        static_for<units>([&](auto unit) {
            constexpr int u = decltype(unit)::value;
            products_wait<units - 1 - u + Behind>();
            if constexpr (u == units - 1) products_there(s);
            done_with((u > 0 ? key_stage(tile, u) : first).free_keys);
        });
    };

#pragma unroll
    for (float& x : o) x = 0.0f;
    if (tiles == 0) return finish_rows<Dim>(a, block, own_row, t, rows, scale, o, first_channel);
    {
        const wgmma_stage first = key_stage(0, 0);
        wait_for_keys(0, 0);
        const tile_note note = tile_note::load(first.note);
        tile_scores s;
        ask_scores(0, first, s);
        wait_for_scores(0, first, s, std::integral_constant<int, 0>{});
        weigh(note, s);
        pack(s);
    }
#pragma unroll 1
    for (int tile = 1; tile < tiles; ++tile) {
        const wgmma_stage now = key_stage(tile, 0), before = value_stage(tile - 1);
        wait_for_keys(tile, 0);
        const tile_note note = tile_note::load(now.note);
        tile_scores s;
        ask_scores(tile, now, s);
        wait_for_values(tile - 1, before);
        ask_output(before);
        wait_for_scores(tile, now, s, std::integral_constant<int, 1>{});
        weigh(note, s);
        products_there(s);
        // Most tiles raise no maximum, so outputs need no factor. The condition names the sums too (which are
        // never below zero), so that the softmax is over before the wait. The wait itself has no condition:
        // all warps of a warpgroup must take the same one.
        const bool raised = __any_sync(
            0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f || !(rows.sum[0] + rows.sum[1] >= 0.0f));
        products_wait_behind<0>(raised);
        products_there(o);
        if (raised)
#pragma unroll
            for (int i = 0; i < own_channels / 2; ++i) o[i] *= factor[i / 2 % 2];
        done_with(before.free_values);
        pack(s);
    }
    {
        const wgmma_stage last = value_stage(tiles - 1);
        wait_for_values(tiles - 1, last);
        ask_output(last);
        products_wait<0>();
        products_there(o);
    }

    finish_rows<Dim>(a, block, own_row, t, rows, scale, o, first_channel);
}

#endif

template <int Dim, bool Softcap, class Args>
__global__ void __launch_bounds__((warpgroup_threads<wgmma_shape<Dim>::threads>), 1)
    prefill_wgmma_kernel([[maybe_unused]] const __grid_constant__ Args a) {
#if KVQ_WARPGROUP_PRODUCTS
    using memory = wgmma_memory<Dim>;
    using shape = wgmma_shape<Dim>;
    // 1024: the swizzle of tiles. A name of its own, since one name has one alignment in a program.
    extern __shared__ __align__(1024) std::byte swizzled_memory[];
    std::byte* const shared = swizzled_memory;
    const wgmma_place place{shared_address(shared), cluster_rank()};
    const prefill_block block(a, shape::cluster_rows, static_cast<int>(blockIdx.x) / shape::cluster,
                              static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z));
    if (block.empty()) return;
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    // By a shuffle, what depends on the warp is known to be the same for all lanes.
    const int warp = shape::wide ? __shfl_sync(0xffffffffu, thread / 32, 0) : thread / 32;
    if (thread == 0) {
        constexpr int arrivals = shape::cluster * shape::consumer_warps;  // at what is free
        for (int i = 0; i < memory::stages; ++i) {
            const wgmma_stage s = wgmma_stage::of(place, i, memory{});
            barrier_init(s.full_keys, shape::cluster > 1 ? 1 : shape::role_warps);
            barrier_init(s.full_values, shape::cluster > 1 ? 1 : shape::role_warps);
            barrier_init(s.free_keys, arrivals);
            barrier_init(s.free_values, arrivals / shape::units);
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
        const auto produce = [&]<tensor Role>(std::integral_constant<tensor, Role>) {
            tile_producer<Role, Dim, Args> producer{a, block, place, warp % shape::role_warps, lane};
            each_part(a, [&](const auto& part) { producer.pages(part); });
            producer.new_tokens();
        };
        if (warp < shape::role_warps)
            produce(std::integral_constant<tensor, tensor::key>{});
        else
            produce(std::integral_constant<tensor, tensor::value>{});
    } else {
        take_registers<shape>();
        const int tiles = count_tiles(a, block, shape::tile);
        consume_tiles<Dim, Softcap>(a, block, place, tiles, (warp - shape::producer_warps) / 4);
    }
    cluster_wait();  // the other block may still write to this one's shared memory
#endif
}

}}}  // namespace kvq::cuda::detail
