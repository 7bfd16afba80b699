// A prompt's attention on tensor cores of every device from compute capability 8.0 on: 8 warps with 32 query
// rows each, or fewer if head_dim is above 128 or thread blocks have little shared memory.
//
//   while S = Q K^T of a tile of 64 tokens is computed, the words of the next tile's keys come from memory,
//   and while the softmax and O += P V are, those of its values. Two tiles each of keys and values in shared
//   memory, one barrier a tile.
//
//   fewer rows           2 or 4 warps have the same 16 rows, each some channels of the output, and all of the
//                        scores. Shared memory has one
//   than warps x 16      tile, of keys or of values.
//
// More rows share each dequantized tile and each load of it than with 16 rows a warp.
// Contract: prefill() in prefill.cuh. Shared memory: 131 KB for head_dim 128 and 512, 195 KB for 256. On
// devices with less, half as many rows: 67 (256) to 99 KB (all that 8.6, 8.9 and 12.x have).
// Source: tiles of online softmax: FlashAttention-2, arXiv 2307.08691.
#pragma once

#include "prefill_rows.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

inline constexpr int mma_tile = 64, mma_warps = 8, mma_threads = 32 * mma_warps;

/// In which a warp dequantizes its cells of a tile: of keys, a warp has cells of the same 32 channels in
/// each.
template <int Dim>
inline constexpr int mma_passes = kvq::detail::ceil_div(Dim, 32 * mma_warps);

template <int Dim, int Rows>
struct mma_shape {
    static constexpr bool large = Rows < 16 * mma_warps;
    static constexpr int value_bands = large ? 16 * mma_warps / Rows : 1;  // of channels of the output
    static constexpr int row_warps = mma_warps / value_bands, warp_rows = Rows / row_warps;
    static constexpr int own_channels = Dim / value_bands;
    static constexpr int passes = mma_passes<Dim>;
    static constexpr int strips = warp_rows / 16;                         // of 16 rows
    static constexpr int column_blocks = kvq::detail::ceil_div(Dim, 64);  // of 64 columns
    static constexpr int query = 0, query_bytes = Rows * column_blocks * 128;
    static constexpr int key_bytes = mma_tile * column_blocks * 128, value_bytes = Dim * 128;
    static constexpr int buffers = large ? 1 : 2;
    static constexpr int keys = query + query_bytes, values = large ? keys : keys + buffers * key_bytes;
    static constexpr int tables = values + buffers * value_bytes;
    static constexpr int bytes = tables + mma_warps * key_table_bytes;
};

/// Rows of a block on devices of little shared memory: fewer where as many as on others do not fit.
template <int Dim>
inline constexpr int small_mma_rows =
    mma_shape<Dim, prefill_rows<Dim>>::bytes <= most_shared_memory<true> ? prefill_rows<Dim>
                                                                         : prefill_rows<Dim> / 2;

/// All cells of a warp: of the next tile's keys or values.
template <tensor Role, class Pair, int TileRows, int TileColumns, bool Ordered>
using warp_cells = cells_of<Role, Pair, TileRows, TileColumns,
                            mma_warps * mma_passes<kvq::detail::larger(TileRows, TileColumns)>, Ordered>;

template <int Dim, int Rows, bool Softcap, class Args>
struct mma_rows {
    using shape = mma_shape<Dim, Rows>;
    static constexpr int strips = shape::strips, tile = mma_tile, own_channels = shape::own_channels;
    const Args& a;
    const prefill_block& block;
    std::uint32_t base, table, query_offset, offset;
    int warp, lane, own_row, value_warp;
    int row_warp, first_channel;  // whose rows, and of which channels, the warp has
    float o[strips][own_channels / 2];
    row_pair rows[strips];
    int buffer = 0;

    __device__ __forceinline__ mma_rows(const Args& args, const prefill_block& b, std::uint32_t at,
                                        int thread)
        : a(args), block(b), base(at), warp(thread / 32), lane(thread % 32) {
        table = base + static_cast<std::uint32_t>(shape::tables + warp * key_table_bytes);
        row_warp = warp % shape::row_warps;
        first_channel = warp / shape::row_warps * own_channels;
        own_row = row_warp * shape::warp_rows + lane / 4;
        const int quarter = lane / 8;
        query_offset = octet_offset<8>(lane % 8 + quarter % 2 * 8, quarter / 2);
        offset = octet_offset<8>(lane % 8 + quarter / 2 * 8, quarter % 2);
        value_warp =
            warp ^ (mma_warps / 2);  // where half of the warps have cells, keys and values are others'
#pragma unroll
        for (auto& strip : o)
#pragma unroll
            for (float& x : strip) x = 0.0f;
    }
    __device__ __forceinline__ std::uint32_t keys(int i) const {
        return base + static_cast<std::uint32_t>(shape::keys + i * shape::key_bytes);
    }
    __device__ __forceinline__ std::uint32_t values(int i) const {
        return base + static_cast<std::uint32_t>(shape::values + i * shape::value_bytes);
    }
    /// Four 8 x 8 matrices of 16 rows from `row` on and columns 16 step to 16 step + 15, as B (two columns of
    /// 8 rows) or A wants them.
    template <int TileRows, bool A>
    __device__ __forceinline__ uint4 matrices(std::uint32_t from, int row, int step) const {
        // octet_offset(row + own row, 2 step + own octet): tiles start on 128 bytes, so a step flips bits of
        // the lane's own offset.
        const auto u = [](int x) { return static_cast<std::uint32_t>(x); };
        return load_matrices(from + ((A ? query_offset : offset) ^ u(step % 4 * 32)) +
                             u(row * 128 + step / 4 * (TileRows * 128)));
    }
    __device__ __forceinline__ void scores(float (&s)[strips][tile / 2]) const {
#pragma unroll
        for (auto& strip : s)
#pragma unroll
            for (float& x : strip) x = 0.0f;
#pragma unroll
        for (int step = 0; step < Dim / 16; ++step) {
            uint4 q[strips];
#pragma unroll
            for (int m = 0; m < strips; ++m)
                q[m] = matrices<Rows, true>(base + shape::query, row_warp * shape::warp_rows + m * 16, step);
#pragma unroll
            for (int n = 0; n < tile / 16; ++n) {
                const uint4 k = matrices<tile, false>(keys(buffer), n * 16, step);
#pragma unroll
                for (int m = 0; m < strips; ++m) {
                    multiply(s[m], 2 * n, q[m], k.x, k.y);
                    multiply(s[m], 2 * n + 1, q[m], k.z, k.w);
                }
            }
        }
    }
    __device__ __forceinline__ void weigh(float (&s)[strips][tile / 2], const tile_note& note) {
#pragma unroll
        for (int m = 0; m < strips; ++m) {
            int position[2];
#pragma unroll
            for (int r = 0; r < 2; ++r)
                position[r] = block.history + a.newest_of_row(block.first_row + own_row + 16 * m + 8 * r);
            float factor[2];
            mask_scores<Softcap>(a, block, note, position, own_row + 16 * m, lane % 4, s[m]);
            if (softmax_step(s[m], rows[m], factor, Softcap ? 1.0f : a.scale))
#pragma unroll
                for (int i = 0; i < own_channels / 2; ++i) o[m][i] *= factor[i / 2 % 2];
        }
    }
    __device__ __forceinline__ void add_values(const float (&s)[strips][tile / 2]) {
#pragma unroll
        for (int step = 0; step < tile / 16; ++step) {
            uint4 p[strips];
#pragma unroll
            for (int m = 0; m < strips; ++m) {
                const float* const x = s[m] + 8 * step;
                p[m].x = pack_halves<float16>(x[0], x[1]);
                p[m].y = pack_halves<float16>(x[2], x[3]);
                p[m].z = pack_halves<float16>(x[4], x[5]);
                p[m].w = pack_halves<float16>(x[6], x[7]);
            }
#pragma unroll
            for (int c = 0; c < own_channels / 16; ++c) {
                const uint4 v = matrices<Dim, false>(values(buffer), first_channel + c * 16, step);
#pragma unroll
                for (int m = 0; m < strips; ++m) {
                    multiply(o[m], 2 * c, p[m], v.x, v.y);
                    multiply(o[m], 2 * c + 1, p[m], v.z, v.w);
                }
            }
        }
    }
    /// All tiles of a part.
    template <class Part>
    __device__ __forceinline__ void pages(const Part& part) {
        using pair = typename Part::pair_type;
        const bool sinks = a.template keeps<Part>();
        const token_range range = tokens_of(a, part, block, tile);
        if (range.first >= range.end) return;
        // Queries and outputs are behind the part's transform while it is read.
        if constexpr (has_transform<typename pair::keys>)
            load_turned_rows<Dim, Rows>(a, block, 0, Rows, base + shape::query, static_cast<int>(threadIdx.x),
                                        mma_threads, part.cache);
        if constexpr (has_transform<typename pair::values>)
#pragma unroll
            for (auto& strip : o) turn_outputs<Dim, pair, false>(strip, part.cache, block.kv_head);
        const auto page_at = [&](int first) {
            return page_of_lane(part, block.sequence, first, range.end, tile, lane);
        };
        const blocks_in_memory<tensor::key, pair> keys_of{&part.cache, block.kv_head, block.sequence};
        const blocks_in_memory<tensor::value, pair> values_of{&part.cache, block.kv_head, block.sequence};
        using key_cells_type = warp_cells<tensor::key, pair, tile, Dim, has_widths<Args>>;
        if constexpr (shape::large) return large_pages(part, range, sinks, keys_of, values_of, page_at);
        const typename key_cells_type::lane_channel channel(part.cache, block.sequence, block.kv_head, warp,
                                                            lane, has_widths<Args> ? block.order : nullptr);
        key_cells_type key_cells(channel);
        using value_cells_type = warp_cells<tensor::value, pair, Dim, tile, has_widths<Args>>;
        const typename value_cells_type::lane_channel value_channel(part.cache, block.sequence, block.kv_head,
                                                                    value_warp, lane);
        value_cells_type value_cells(value_channel);
        tile_tokens next = tile_tokens::of(range.first, kvq::detail::smaller(tile, range.end - range.first),
                                           page_at(range.first));
        int next_page = page_at(range.first + tile);
        key_cells.fetch(keys_of, next, warp, lane);
        value_cells.fetch(values_of, next, value_warp, lane);
        __syncthreads();
        key_cells.store(keys_of, keys(buffer), next, table, warp, lane);
        value_cells.store(values_of, values(buffer), next, table, value_warp, lane);
        __syncthreads();
#pragma unroll 1
        for (int first = range.first; first < range.end; first += tile) {
            const int count = next.count,
                      slices = static_cast<int>(__ballot_sync(0xffffffffu, next.page >= 0));
            const bool more = first + tile < range.end;
            next = tile_tokens::of(first + tile, kvq::detail::smaller(tile, range.end - first - tile),
                                   next_page);
            next_page = page_at(first + 2 * tile);
            if (more) key_cells.fetch(keys_of, next, warp, lane);
            const int at = part.cache.first_token + first;
            const tile_note note{at, count, slices, a.cut(block, at, count, slices, sinks, tile)};
            float s[strips][tile / 2];
            scores(s);
            if (more) {
                key_cells.store(keys_of, keys(buffer ^ 1), next, table, warp, lane);
                value_cells.fetch(values_of, next, value_warp, lane);
            }
            weigh(s, note);
            add_values(s);
            if (more) value_cells.store(values_of, values(buffer ^ 1), next, table, value_warp, lane);
            __syncthreads();
            buffer ^= 1;
        }
        if constexpr (has_transform<typename pair::values>)
#pragma unroll
            for (auto& strip : o) turn_outputs<Dim, pair, true>(strip, part.cache, block.kv_head);
        if constexpr (has_transform<typename pair::keys>) {
            load_query_rows<Dim, Rows>(a, block, 0, Rows, base + shape::query, static_cast<int>(threadIdx.x),
                                       mma_threads);
            __syncthreads();
        }
    }
    __device__ __forceinline__ void new_tokens() {
        const new_range range = a.new_tokens(block, tile);
#pragma unroll 1
        for (int first = range.begin(); first < range.end; first = range.behind(first, tile)) {
            const int count = kvq::detail::smaller(tile, block.new_tokens - first),
                      at = block.history + first;
            copy_new_tile<tensor::key, tile, Dim, mma_warps>(a.k, block.kv_head, block.start + first, count,
                                                             keys(buffer), warp, lane,
                                                             has_widths<Args> ? block.order : nullptr);
            const auto copy_values = [&] {
                copy_new_tile<tensor::value, Dim, tile, mma_warps>(a.v, block.kv_head, block.start + first,
                                                                   count, values(buffer), warp, lane);
                __syncthreads();
            };
            float s[strips][tile / 2];
            if constexpr (shape::large) {
                __syncthreads();
                scores(s);
                __syncthreads();
                copy_values();
            } else {
                copy_values();
                scores(s);
            }
            weigh(s, {at, count, -1, a.cut(block, at, count, -1, false, tile)});
            add_values(s);
            if constexpr (shape::large)
                __syncthreads();
            else
                buffer ^= 1;  // the other tile was read before the last barrier
        }
    }
    __device__ __forceinline__ void finish() const {
#pragma unroll
        for (int m = 0; m < strips; ++m)
            finish_rows<Dim>(a, block, own_row + 16 * m, lane % 4, rows[m], Softcap ? 1.0f : a.scale, o[m],
                             first_channel);
    }

private:
    /// All tiles of a part where shared memory has one at a time.
    template <class Part, class Keys, class Values, class PageAt>
    __device__ __forceinline__ void large_pages(const Part& part, const token_range& range, bool sinks,
                                                const Keys& keys_of, const Values& values_of,
                                                const PageAt& page_at) {
        using pair = typename Part::pair_type;
        const auto dequantize = [&]<class Cells>(std::type_identity<Cells>, const auto& source,
                                                 const tile_tokens& tokens) {
#pragma unroll 1
            for (int pass = 0; pass < shape::passes; ++pass) {
                const int number = warp + pass * mma_warps;
                const typename Cells::lane_channel channel(part.cache, block.sequence, block.kv_head, number,
                                                           lane, has_widths<Args> ? block.order : nullptr);
                Cells cells(channel);
                cells.fetch(source, tokens, number, lane);
                cells.store(source, keys(0), tokens, table, number, lane);
            }
            __syncthreads();
        };
#pragma unroll 1
        for (int first = range.first; first < range.end; first += tile) {
            const int count = kvq::detail::smaller(tile, range.end - first);
            const tile_tokens tokens = tile_tokens::of(first, count, page_at(first));
            const int slices = static_cast<int>(__ballot_sync(0xffffffffu, tokens.page >= 0));
            dequantize(std::type_identity<warp_cells<tensor::key, pair, tile, Dim, has_widths<Args>>>{},
                       keys_of, tokens);
            float s[strips][tile / 2];
            scores(s);
            __syncthreads();
            dequantize(std::type_identity<warp_cells<tensor::value, pair, Dim, tile, has_widths<Args>>>{},
                       values_of, tokens);
            const int at = part.cache.first_token + first;
            weigh(s, {at, count, slices, a.cut(block, at, count, slices, sinks, tile)});
            add_values(s);
            __syncthreads();
        }
    }
    template <int N>
    __device__ __forceinline__ static void multiply(float (&d)[N], int tile, const uint4& x, std::uint32_t b0,
                                                    std::uint32_t b1) {
        mma_values<float16>(reinterpret_cast<float(&)[4]>(d[4 * tile]), x.x, x.y, x.z, x.w, b0, b1);
    }
};

template <int Dim, int Rows, bool Softcap, class Args>
__global__ void __launch_bounds__(mma_threads, 1) prefill_mma_kernel(const __grid_constant__ Args a) {
    if constexpr (never_taken<(Rows < prefill_rows<Dim>), mma_shape<Dim, prefill_rows<Dim>>::bytes>) return;
    using shape = mma_shape<Dim, Rows>;
    extern __shared__ __align__(128) std::byte shared[];
    const std::uint32_t base = shared_address(shared);
    prefill_block block(a, Rows, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y),
                        static_cast<int>(blockIdx.z));
    if (block.empty()) return;
    find_order(a, block);
    load_query_rows<Dim, Rows>(a, block, 0, Rows, base + shape::query, static_cast<int>(threadIdx.x),
                               mma_threads);
    mma_rows<Dim, Rows, Softcap, Args> rows(a, block, base, static_cast<int>(threadIdx.x));
    __syncthreads();
    each_part(a, [&](const auto& part) { rows.pages(part); });
    rows.new_tokens();
    rows.finish();
}

}}}  // namespace kvq::cuda::detail
