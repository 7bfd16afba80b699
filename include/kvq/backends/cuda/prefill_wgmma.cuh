// A prompt's attention on tensor cores of compute capability 9.0: one warpgroup dequantizes, two multiply.
//
//   producers   warpgroups 0, 1   tile after tile: pages (or new tokens) to half floats in shared memory, two stages of keys and of values
//   consumers   2 and 3           64 rows each: S = Q K^T of the next tile, O += P V of this one, softmax
//
// Bytes and operations of a tile of 128 tokens, head_dim 128, 4 bits: 17 KB read (mostly from the second-level cache), 32768 values
// dequantized, 4.2 M products for 128 rows, which are 2048 cycles of the tensor cores. docs/lab/gpu.md says what limits it.
// Where this is not compiled for sm_90a, the kernel is empty and has no shared memory of its own: prefill() then takes the other one.
// Contract: prefill() in prefill.cuh. Shared memory: 165 KB for head_dim 128. sm_90a.
// Source: warp specialization and overlapped softmax: FlashAttention-3, arXiv 2407.08608.
#pragma once

#include "prefill_rows.cuh"
#include "wgmma.cuh"

namespace kvq::inline KVQ_TAGGED::cuda::detail {

inline constexpr int wgmma_tile = 128, wgmma_stages = 2;
inline constexpr int producer_warps = 8, wgmma_threads = 512;

template <int Dim>
struct wgmma_memory {
    static constexpr int query = 0, query_bytes = prefill_rows * Dim * 2;
    static constexpr int tile_bytes = wgmma_tile * Dim * 2;
    static constexpr int keys = query + query_bytes, values = keys + wgmma_stages * tile_bytes;
    static constexpr int tables = values + wgmma_stages * tile_bytes;
    static constexpr int bytes =
        tables + producer_warps * cell_table_bytes + 1024;  // tiles start on 1024 bytes
    // Notes and barriers of the stages, in shared memory of their own.
    static constexpr int control_bytes = wgmma_stages * (static_cast<int>(sizeof(tile_note)) + 32);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/// Addresses in shared memory.
struct wgmma_place {
    std::uint32_t tiles, control;
};

/// Barriers of a stage: keys there, keys read, values there, values read.
struct wgmma_stage {
    std::uint32_t keys, values, note, full_keys, free_keys, full_values, free_values;

    template <class Memory>
    __device__ __forceinline__ static wgmma_stage of(const wgmma_place& place, int i, Memory) {
        const auto u = [](int x) { return static_cast<std::uint32_t>(x); };
        const std::uint32_t control = place.control + u(i * (static_cast<int>(sizeof(tile_note)) + 32)),
                            b = control + u(sizeof(tile_note));
        return {place.tiles + u(Memory::keys + i * Memory::tile_bytes),
                place.tiles + u(Memory::values + i * Memory::tile_bytes),
                control,
                b,
                b + 8,
                b + 16,
                b + 24};
    }
};

/// Writes all tiles of a block, in order.
template <int Dim, class Args>
struct tile_producer {
    using memory = wgmma_memory<Dim>;
    const Args& a;
    const prefill_block& block;
    wgmma_place place;
    int warp, lane, made = 0;
    std::uint32_t parity = 0;

    /// All tiles of a part. The words of a batch of cells are under way while the batch before it is dequantized.
    template <class Part>
    __device__ __forceinline__ void pages(const Part& part) {
        using format = typename Part::format_type;
        using key_batch = batch_of<tensor::key, format, wgmma_tile, Dim>;
        using value_batch = batch_of<tensor::value, format, Dim, wgmma_tile>;
        const bool sinks = a.keep_sinks && is_sink_part<Part>;
        const token_range range = tokens_of(part, sinks, block, a.recent, a.window, wgmma_tile);
        if (range.first >= range.end) return;
        const std::uint32_t table =
            place.tiles + static_cast<std::uint32_t>(memory::tables + warp * cell_table_bytes);
        const auto tile_at = [&](int first, int page) {
            return tile_tokens{first, kvq::detail::smaller(wgmma_tile, range.end - first), page};
        };
        const auto page_at = [&](int first) {
            return page_of_lane(part, block.sequence, first, range.end, wgmma_tile, lane);
        };
        tile_tokens tile = tile_at(range.first, page_at(range.first));
        int next_page = page_at(range.first + wgmma_tile);
        key_batch key[2];
        value_batch value[2];
        key[0].fetch(part.cache, block.kv_head, tile, 0, warp, lane);
#pragma unroll 1
        for (int first = range.first; first < range.end; first += wgmma_tile) {
            const tile_tokens next = tile_at(first + wgmma_tile, next_page);
            next_page = page_at(first + 2 * wgmma_tile);
            const int pieces = static_cast<int>(__ballot_sync(0xffffffffu, tile.page >= 0));
            const int position = part.cache.first_token + first;
            const int cut = a.cut(block, position, tile.count, pieces, sinks, wgmma_tile);
            constexpr int key_batches = batches<tensor::key, format, wgmma_tile, Dim>,
                          value_batches = batches<tensor::value, format, Dim, wgmma_tile>;
            wgmma_stage s;
            static_for<key_batches>([&](auto number) {
                constexpr int i = decltype(number)::value;
                if constexpr (i + 1 < key_batches)
                    key[(i + 1) % 2].fetch(part.cache, block.kv_head, tile, (i + 1) * key_batch::count, warp,
                                           lane);
                else
                    value[0].fetch(part.cache, block.kv_head, tile, 0, warp, lane);
                if constexpr (i == 0) s = begin({position, tile.count, pieces, cut});
                key[i % 2].store(s.keys, tile, i * key_batch::count, table, warp, lane);
            });
            finish(s.full_keys);
            static_for<value_batches>([&](auto number) {
                constexpr int i = decltype(number)::value;
                if constexpr (i + 1 < value_batches)
                    value[(i + 1) % 2].fetch(part.cache, block.kv_head, tile, (i + 1) * value_batch::count,
                                             warp, lane);
                else if (next.count > 0)
                    key[0].fetch(part.cache, block.kv_head, next, 0, warp, lane);
                if constexpr (i == 0) wait_for_values(s);
                value[i % 2].store(s.values, tile, i * value_batch::count, table, warp, lane);
            });
            finish(s.full_values);
            tile = next;
        }
    }
    __device__ __forceinline__ void new_tokens(int from) {
#pragma unroll 1
        for (int first = from; first <= block.last_query; first += wgmma_tile) {
            const int count = kvq::detail::smaller(wgmma_tile, block.new_tokens - first),
                      position = block.history + first;
            const wgmma_stage s =
                begin({position, count, -1, a.cut(block, position, count, -1, false, wgmma_tile)});
            copy_new_tile<tensor::key, wgmma_tile, Dim, producer_warps>(
                a.k, block.kv_head, block.start + first, count, s.keys, warp, lane);
            finish(s.full_keys);
            wait_for_values(s);
            copy_new_tile<tensor::value, Dim, wgmma_tile, producer_warps>(
                a.v, block.kv_head, block.start + first, count, s.values, warp, lane);
            finish(s.full_values);
        }
    }

private:
    /// Cells of a warp whose words are asked for together: up to 16 words a lane.
    template <tensor Role, class Format, int Rows, int Columns>
    static constexpr int together = [] {
        constexpr int each = tile_cells<Rows, Columns, producer_warps>::each,
                      words = cell_batch<Role, Format, Rows, Columns, producer_warps, 1>::words;
        return kvq::detail::smaller(each, words <= 8 ? 4 : 1);
    }();
    template <tensor Role, class Format, int Rows, int Columns>
    struct batch_of
        : cell_batch<Role, Format, Rows, Columns, producer_warps, together<Role, Format, Rows, Columns>> {
        static constexpr int count = together<Role, Format, Rows, Columns>;
    };
    template <tensor Role, class Format, int Rows, int Columns>
    static constexpr int batches = kvq::detail::ceil_div(tile_cells<Rows, Columns, producer_warps>::each,
                                                         together<Role, Format, Rows, Columns>);

    /// The next stage, once its keys are free.
    __device__ __forceinline__ wgmma_stage begin(const tile_note& note) {
        const wgmma_stage s = wgmma_stage::of(place, made % wgmma_stages, memory{});
        parity = static_cast<std::uint32_t>(made / wgmma_stages + 1) & 1u;
        ++made;
        barrier_wait(s.free_keys, parity);
        if (warp == 0 && lane == 0) note.store(s.note);
        return s;
    }
    __device__ __forceinline__ void wait_for_values(const wgmma_stage& s) const {
        barrier_wait(s.free_values, parity);
    }
    __device__ __forceinline__ void finish(std::uint32_t barrier) const {
        publish_to_products();
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
    }
};

template <int Dim, bool Softcap, class Args>
__device__ __forceinline__ void consume_tiles(const Args& a, const prefill_block& block,
                                              const wgmma_place& place, int tiles, int group) {
    using memory = wgmma_memory<Dim>;
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
    const int g = lane / 4, t = lane % 4;
    const int own_row = group * 64 + warp * 16 + g;  // and 8 rows further
    const std::uint32_t query =
        place.tiles + static_cast<std::uint32_t>(memory::query + group * 64 * Dim * 2);
    // Positions of both rows.
    int position[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) position[r] = block.history + (block.first_row + own_row + 8 * r) / a.group;

    float s[wgmma_tile / 2], o[Dim / 2], factor[2];
    std::uint32_t p[wgmma_tile / 4] = {};
    row_pair rows;
    const float scale = Softcap ? 1.0f : a.scale;

    const auto ask_scores = [&](const wgmma_stage& stage) {
        const std::uint64_t q = operand_at(query), k = operand_at(stage.keys);
        products_begin();
        static_for<Dim / 16>([&](auto step) {
            constexpr int i = decltype(step)::value;
            multiply_shared<i != 0>(
                s, q + static_cast<std::uint64_t>((i / 4 * 64 * 128 + i % 4 * 32) >> 4),
                k + static_cast<std::uint64_t>((i / 4 * wgmma_tile * 128 + i % 4 * 32) >> 4));
        });
        products_commit();
    };
    const auto ask_output = [&](const wgmma_stage& stage) {
        const std::uint64_t v = operand_at(stage.values);
        products_begin();
        static_for<wgmma_tile / 16>([&](auto step) {
            constexpr int i = decltype(step)::value;
            multiply_registers(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3],
                               v + static_cast<std::uint64_t>((i / 4 * Dim * 128 + i % 4 * 32) >> 4));
        });
        products_commit();
    };
    const auto weigh = [&](const tile_note& note) {
        mask_scores<Softcap>(a, block, note, position, t, s);
        softmax_step(s, rows, factor, scale);
    };
    const auto pack = [&] {
#pragma unroll
        for (int i = 0; i < wgmma_tile / 4; ++i) p[i] = pack_halves<float16>(s[2 * i], s[2 * i + 1]);
    };
    const auto wait_for_keys = [&](int tile) {
        barrier_wait(wgmma_stage::of(place, tile % wgmma_stages, memory{}).full_keys,
                     static_cast<std::uint32_t>(tile / wgmma_stages) & 1u);
    };
    const auto done_with = [&](std::uint32_t barrier) {
        if (lane == 0) barrier_arrive(barrier);
    };

#pragma unroll
    for (float& x : o) x = 0.0f;
    {
        const wgmma_stage first = wgmma_stage::of(place, 0, memory{});
        wait_for_keys(0);
        const tile_note note = tile_note::load(first.note);
        ask_scores(first);
        products_wait<0>();
        products_there(s);
        done_with(first.free_keys);
        weigh(note);
        pack();
    }
#pragma unroll 1
    for (int tile = 1; tile < tiles; ++tile) {
        const wgmma_stage now = wgmma_stage::of(place, tile % wgmma_stages, memory{}),
                          before = wgmma_stage::of(place, (tile - 1) % wgmma_stages, memory{});
        wait_for_keys(tile);
        const tile_note note = tile_note::load(now.note);
        ask_scores(now);
        barrier_wait(before.full_values, static_cast<std::uint32_t>((tile - 1) / wgmma_stages) & 1u);
        ask_output(before);
        products_wait<1>();
        products_there(s);
        done_with(now.free_keys);
        weigh(note);
        products_there(s);
        // Most tiles raise no maximum, so outputs need no factor. The condition names the sums too (which are never below zero), and both
        // branches wait, so that the softmax is over before the wait: otherwise the compiler moves it behind.
        if (__any_sync(0xffffffffu,
                       factor[0] != 1.0f || factor[1] != 1.0f || !(rows.sum[0] + rows.sum[1] >= 0.0f))) {
            products_wait<0>();
            products_there(o);
#pragma unroll
            for (int i = 0; i < Dim / 2; ++i) o[i] *= factor[i / 2 % 2];
        } else {
            products_wait<0, 1>();
            products_there(o);
        }
        done_with(before.free_values);
        pack();
    }
    {
        const wgmma_stage last = wgmma_stage::of(place, (tiles - 1) % wgmma_stages, memory{});
        barrier_wait(last.full_values, static_cast<std::uint32_t>((tiles - 1) / wgmma_stages) & 1u);
        ask_output(last);
        products_wait<0>();
        products_there(o);
    }

    finish_rows<Dim>(a, block, own_row, t, rows, scale, o);
}

#endif

template <int Dim, bool Softcap, class Args>
__global__ void __launch_bounds__(wgmma_threads, 1)
    prefill_wgmma_kernel([[maybe_unused]] const __grid_constant__ Args a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using memory = wgmma_memory<Dim>;
    extern __shared__ std::byte shared[];
    __shared__ alignas(16) std::byte control[memory::control_bytes];
    const wgmma_place place{(shared_address(shared) + 1023u) & ~1023u, shared_address(control)};
    const prefill_block block(a, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y),
                              static_cast<int>(blockIdx.z));
    if (block.empty()) return;
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    if (thread == 0) {
        for (int i = 0; i < wgmma_stages; ++i) {
            const wgmma_stage s = wgmma_stage::of(place, i, memory{});
            barrier_init(s.full_keys, producer_warps);
            barrier_init(s.full_values, producer_warps);
            barrier_init(s.free_keys, 8);
            barrier_init(s.free_values, 8);
        }
    }
    load_query_rows<Dim, 64>(a, block, place.tiles + memory::query, thread, wgmma_threads);
    publish_to_products();
    __syncthreads();

    const int from_new = block.new_from(a.window, wgmma_tile);
    if (warp < producer_warps) {
        leave_registers<72>();
        tile_producer<Dim, Args> producer{a, block, place, warp, lane};
        each_part(a, [&](const auto& part) { producer.pages(part); });
        producer.new_tokens(from_new);
    } else {
        take_registers<184>();
        const int tiles = count_tiles(a, block, wgmma_tile);
        consume_tiles<Dim, Softcap>(a, block, place, tiles, (warp - producer_warps) / 4);
    }
#endif
}

}  // namespace kvq::inline KVQ_TAGGED::cuda::detail
