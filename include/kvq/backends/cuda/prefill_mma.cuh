// A prompt's attention on tensor cores of every device from compute capability 8.0 on: 8 warps with 16 query rows each.
//
//   while S = Q K^T of a tile of 64 tokens is computed, the words of the next tile come from memory; its keys are dequantized before, its
//   values behind O += P V. Two tiles each of keys and values in shared memory, one barrier a tile.
//
// Contract: prefill() in prefill.cuh. Shared memory: 97 KB for head_dim 128.
// Source: tiles of online softmax: FlashAttention-2, arXiv 2307.08691.
#pragma once

#include "prefill_rows.cuh"

namespace kvq::inline KVQ_TAGGED::cuda::detail {

inline constexpr int mma_tile = 64, mma_warps = 8, mma_threads = 32 * mma_warps;

template <int Dim>
struct mma_memory {
    static constexpr int pieces = kvq::detail::ceil_div(Dim, 64);  // of 64 columns
    static constexpr int query = 0, query_bytes = prefill_rows * pieces * 128;
    static constexpr int key_bytes = mma_tile * pieces * 128, value_bytes = Dim * 128;
    static constexpr int keys = query + query_bytes, values = keys + 2 * key_bytes;
    static constexpr int tables = values + 2 * value_bytes;
    static constexpr int bytes = tables + mma_warps * cell_table_bytes + 128;
};

/// All cells of a warp: of the next tile's keys or values.
template <tensor Role, class Format, int TileRows, int TileColumns>
using warp_cells = cell_batch<Role, Format, TileRows, TileColumns, mma_warps,
                              tile_cells<TileRows, TileColumns, mma_warps>::each>;

template <int Dim, bool Softcap, class Args>
struct mma_rows {
    using memory = mma_memory<Dim>;
    const Args& a;
    const prefill_block& block;
    std::uint32_t base, table;
    int warp, lane, own_row;
    int position[2];
    float o[Dim / 2];
    row_pair rows;
    int buffer = 0;

    __device__ __forceinline__ mma_rows(const Args& args, const prefill_block& b, std::uint32_t at,
                                        int thread)
        : a(args), block(b), base(at), warp(thread / 32), lane(thread % 32) {
        table = base + static_cast<std::uint32_t>(memory::tables + warp * cell_table_bytes);
        own_row = warp * 16 + lane / 4;
#pragma unroll
        for (int r = 0; r < 2; ++r)
            position[r] = block.history + (block.first_row + own_row + 8 * r) / a.group;
#pragma unroll
        for (float& x : o) x = 0.0f;
    }
    __device__ __forceinline__ std::uint32_t keys(int i) const {
        return base + static_cast<std::uint32_t>(memory::keys + i * memory::key_bytes);
    }
    __device__ __forceinline__ std::uint32_t values(int i) const {
        return base + static_cast<std::uint32_t>(memory::values + i * memory::value_bytes);
    }
    /// Four 8 x 8 matrices of 16 rows from `row` on and columns 16 step to 16 step + 15, as B (two columns of 8 rows) or A wants them.
    template <int Rows, bool A>
    __device__ __forceinline__ uint4 matrices(std::uint32_t tile, int row, int step) const {
        const int quarter = lane / 8;
        const int r = row + lane % 8 + (A ? quarter % 2 : quarter / 2) * 8;
        return load_matrices(tile + octet_offset<Rows>(r, 2 * step + (A ? quarter / 2 : quarter % 2)));
    }
    __device__ __forceinline__ void scores(float (&s)[mma_tile / 2]) const {
#pragma unroll
        for (float& x : s) x = 0.0f;
#pragma unroll
        for (int step = 0; step < Dim / 16; ++step) {
            const uint4 q = matrices<prefill_rows, true>(base + memory::query, warp * 16, step);
#pragma unroll
            for (int n = 0; n < mma_tile / 16; ++n) {
                const uint4 k = matrices<mma_tile, false>(keys(buffer), n * 16, step);
                multiply(s, 2 * n, q, k.x, k.y);
                multiply(s, 2 * n + 1, q, k.z, k.w);
            }
        }
    }
    __device__ __forceinline__ void weigh(float (&s)[mma_tile / 2], const tile_note& note) {
        float factor[2];
        mask_scores<Softcap>(a, block, note, position, lane % 4, s);
        softmax_step(s, rows, factor, Softcap ? 1.0f : a.scale);
#pragma unroll
        for (int i = 0; i < Dim / 2; ++i) o[i] *= factor[i / 2 % 2];
    }
    __device__ __forceinline__ void add_values(const float (&s)[mma_tile / 2]) {
#pragma unroll
        for (int step = 0; step < mma_tile / 16; ++step) {
            uint4 p;
            p.x = pack_halves<float16>(s[8 * step], s[8 * step + 1]);
            p.y = pack_halves<float16>(s[8 * step + 2], s[8 * step + 3]);
            p.z = pack_halves<float16>(s[8 * step + 4], s[8 * step + 5]);
            p.w = pack_halves<float16>(s[8 * step + 6], s[8 * step + 7]);
#pragma unroll
            for (int c = 0; c < Dim / 16; ++c) {
                const uint4 v = matrices<Dim, false>(values(buffer), c * 16, step);
                multiply(o, 2 * c, p, v.x, v.y);
                multiply(o, 2 * c + 1, p, v.z, v.w);
            }
        }
    }
    /// All tiles of a part.
    template <class Part>
    __device__ __forceinline__ void pages(const Part& part) {
        using format = typename Part::format_type;
        const bool sinks = a.keep_sinks && is_sink_part<Part>;
        const token_range range = tokens_of(part, sinks, block, a.recent, a.window, mma_tile);
        if (range.first >= range.end) return;
        const auto tile_at = [&](int first) {
            return tile_tokens{first, kvq::detail::smaller(mma_tile, range.end - first),
                               page_of_lane(part, block.sequence, first, range.end, mma_tile, lane)};
        };
        warp_cells<tensor::key, format, mma_tile, Dim> key_cells;
        warp_cells<tensor::value, format, Dim, mma_tile> value_cells;
        tile_tokens next = tile_at(range.first);
        key_cells.fetch(part.cache, block.kv_head, next, 0, warp, lane);
        value_cells.fetch(part.cache, block.kv_head, next, 0, warp, lane);
        __syncthreads();
        key_cells.store(keys(buffer), next, 0, table, warp, lane);
        value_cells.store(values(buffer), next, 0, table, warp, lane);
        __syncthreads();
#pragma unroll 1
        for (int first = range.first; first < range.end; first += mma_tile) {
            const tile_tokens tile = next;
            const bool more = first + mma_tile < range.end;
            if (more) {
                next = tile_at(first + mma_tile);
                key_cells.fetch(part.cache, block.kv_head, next, 0, warp, lane);
                value_cells.fetch(part.cache, block.kv_head, next, 0, warp, lane);
            }
            const int pieces = static_cast<int>(__ballot_sync(0xffffffffu, tile.page >= 0));
            const int at = part.cache.first_token + first;
            const tile_note note{at, tile.count, pieces,
                                 a.cut(block, at, tile.count, pieces, sinks, mma_tile)};
            float s[mma_tile / 2];
            scores(s);
            if (more) key_cells.store(keys(buffer ^ 1), next, 0, table, warp, lane);
            weigh(s, note);
            add_values(s);
            if (more) value_cells.store(values(buffer ^ 1), next, 0, table, warp, lane);
            __syncthreads();
            buffer ^= 1;
        }
    }
    __device__ __forceinline__ void new_tokens() {
#pragma unroll 1
        for (int first = block.new_from(a.window, mma_tile); first <= block.last_query; first += mma_tile) {
            const int count = kvq::detail::smaller(mma_tile, block.new_tokens - first),
                      at = block.history + first;
            copy_new_tile<tensor::key, mma_tile, Dim, mma_warps>(a.k, block.kv_head, block.start + first,
                                                                 count, keys(buffer), warp, lane);
            copy_new_tile<tensor::value, Dim, mma_tile, mma_warps>(a.v, block.kv_head, block.start + first,
                                                                   count, values(buffer), warp, lane);
            __syncthreads();
            float s[mma_tile / 2];
            scores(s);
            weigh(s, {at, count, -1, a.cut(block, at, count, -1, false, mma_tile)});
            add_values(s);
            buffer ^= 1;  // the other tile was read before the last barrier
        }
    }
    __device__ __forceinline__ void finish() const {
        finish_rows<Dim>(a, block, own_row, lane % 4, rows, Softcap ? 1.0f : a.scale, o);
    }

private:
    template <int N>
    __device__ __forceinline__ static void multiply(float (&d)[N], int tile, const uint4& x, std::uint32_t b0,
                                                    std::uint32_t b1) {
        mma_values<float16>(reinterpret_cast<float(&)[4]>(d[4 * tile]), x.x, x.y, x.z, x.w, b0, b1);
    }
};

template <int Dim, bool Softcap, class Args>
__global__ void __launch_bounds__(mma_threads, 1) prefill_mma_kernel(const __grid_constant__ Args a) {
    using memory = mma_memory<Dim>;
    extern __shared__ std::byte shared[];
    const std::uint32_t base = (shared_address(shared) + 127u) & ~127u;
    const prefill_block block(a, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y),
                              static_cast<int>(blockIdx.z));
    if (block.empty()) return;
    load_query_rows<Dim, prefill_rows>(a, block, base + memory::query, static_cast<int>(threadIdx.x),
                                       mma_threads);
    mma_rows<Dim, Softcap, Args> rows(a, block, base, static_cast<int>(threadIdx.x));
    __syncthreads();
    each_part(a, [&](const auto& part) { rows.pages(part); });
    rows.new_tokens();
    rows.finish();
}

}  // namespace kvq::inline KVQ_TAGGED::cuda::detail
