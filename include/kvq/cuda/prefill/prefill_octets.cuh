// Packed pages of heads with 256 and 512 channels as tiles: a lane has 8 columns, not a row.
//
//   strip   64 rows and 32 columns of a tile: 64 tokens and 32 channels of keys, 64 channels and 32 tokens of
//           values
//   lane    columns 8 (lane % 4) to + 7, rows 4 (lane / 4) to + 3 of every 32
//
// A lane loads the words of its four rows in one go, and what its columns share once for all of its rows:
// half floats come right from the page, other parameters through a table of the warp. 8 lanes that store 16
// bytes each meet all banks: they have rows r and r + 4 and four octets, whose places differ (the swizzle).
//
// Per lane of a strip of 4-bit codes with half-float parameters: 4 loads, 8 stores, 64 fused multiply-adds of
// two numbers, 56 instructions to unpack.
// Contract: that of prefill_tile.cuh, and the same numbers.
#pragma once

#include "prefill_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// The block that holds all tokens of a tile, by its address: null if it is not held. Tokens of a tile are
/// counted from the block's first one.
struct block_of_tile {
    const std::byte* at;

    __device__ __forceinline__ int page(const tile_tokens&, int) const { return 0; }
    __device__ __forceinline__ bool any(const tile_tokens&) const { return at != nullptr; }
    __device__ __forceinline__ std::uint32_t existing(const tile_tokens& tile, int first) const {
        return at == nullptr ? 0u : existing_columns(tile.count - first);
    }
    __device__ __forceinline__ block_in_memory block(int, int) const { return {at}; }
};

/// Bytes of a warp's table: twice [scales, biases, low parts, token scales] of 32 halves each.
inline constexpr int octet_table_bytes = 2 * 256;

/// The words of a strip, or of half a strip of 16-bit numbers, on their way from pages to a tile. Stride:
/// rows of the tile in shared memory.
template <tensor Role, class Pair, int Stride>
struct octet_batch {
    using cells = cell_batch<Role, Pair, 32, 32, 1, Stride>;
    using S = typename cells::S;
    using traits = typename cells::traits;
    using set_type = typename cells::set_type;
    static constexpr bool key = cells::key, full = cells::full;
    static constexpr int page = cells::page, group = cells::group, height = cells::height;
    static constexpr int cells_of_batch = full ? 1 : 2, batches = 2 / cells_of_batch;  // of a strip
    static constexpr bool row_parameters = cells::row_parameters,
                          column_parameters = cells::column_parameters,
                          row_token_scales = cells::row_token_scales, token_scales = cells::token_scales;
    /// Do columns share halves that a lane loads itself?
    static constexpr bool direct = [] {
        if constexpr (column_parameters)
            return set_type::exact;
        else
            return false;
    }();
    static constexpr bool has_table =
        row_parameters || (column_parameters && !direct) || row_token_scales || token_scales;
    /// Cells below each other whose columns have the same parameters.
    static constexpr bool one_set = !column_parameters || (group % 64 == 0 && (!key || page % group == 0));
    static constexpr int sets = one_set ? 1 : cells_of_batch, cells_of_set = cells_of_batch / sets;
    static constexpr int tables = cells::tables;

    /// Lines of a plane, or of 16-bit numbers, that 8 columns lie in.
    KVQ_HD static constexpr int plane_lines(int plane) {
        return full ? 4 : ceil_div(2, traits::units_per_word(plane));
    }
    KVQ_HD static constexpr int local_line(int plane) {
        int n = 0;
        for (int p = 0; p < plane; ++p) n += plane_lines(p);
        return n;
    }
    static constexpr int lines = local_line(traits::plane_count);

    using nothing = typename cells::nothing;
    uint4 word[cells_of_batch][lines];                                                 // of four rows
    [[no_unique_address]] std::conditional_t<direct, uint4[sets][2], nothing> shared;  // scales, biases
    [[no_unique_address]] std::conditional_t<column_parameters && !direct, set_type[sets][tables], nothing>
        of_columns;
    [[no_unique_address]] std::conditional_t<row_parameters, set_type[cells_of_batch], nothing> of_rows;
    std::uint32_t token_scale[row_token_scales ? cells_of_batch : 1];

    __device__ __forceinline__ static int first_row(int strip, int batch) {
        return (key ? 0 : strip / 2 * 64) + batch * 32;
    }
    __device__ __forceinline__ static int first_column(int strip) { return (key ? strip : strip % 2) * 32; }

    /// Batch `batch` of a strip. Source: block_of_tile or blocks_in_memory.
    template <class Source>
    __device__ __forceinline__ void fetch(const Source& source, const tile_tokens& tile, int strip, int batch,
                                          int lane) {
        if (!source.any(tile)) {
            *this = {};
            return;
        }
        const int row = first_row(strip, batch), column = first_column(strip);
        // What a lane adds to numbers that all lanes share, which are multiples of 32.
        const int lane_row = lane & 28, lane_column = (lane & 3) * 8;
        const int lane_token = (key ? lane_row : lane_column) % kvq::detail::smaller(page, 32);
#pragma unroll
        for (int i = 0; i < cells_of_batch; ++i) {
            const int first_in_tile = key ? row + 32 * i : column;
            const int token = page % 32 == 0 ? (tile.first + first_in_tile) % page : 0;
            const int token_in_tile = first_in_tile + (key ? lane_row : lane_column);
            const auto block = source.block(source.page(tile, token_in_tile), token_in_tile);
            const int block_row = key ? token : row + 32 * i, block_column = key ? column : token;
            const auto at = block.from(
                static_cast<std::size_t>((block_row * cells::row_words + (key ? lane_token : lane_row)) * 4));
            static_for<traits::plane_count>([&](auto plane) {
                constexpr int p = decltype(plane)::value, per = traits::units_per_word(p);
                constexpr int columns_of_line = full ? 2 : 4 * per;
                const int line = traits::first_line(p, cells::columns / 4) + block_column / columns_of_line +
                                 (key ? lane_column : lane_token) / columns_of_line;
#pragma unroll
                for (int k = 0; k < plane_lines(p); ++k)
                    word[i][local_line(p) + k] = at.four((line + k) * height * 4);
            });
            if constexpr (direct) {
                if (i % cells_of_set == 0) {
                    const int number = key ? token / group * cells::shape.dim + column + lane_column
                                           : (row + 32 * i) / group * page + token + lane_token;
                    const auto own = block.from(static_cast<std::size_t>(number * 2));
                    shared[i / cells_of_set][0] =
                        own.four(static_cast<int>(traits::scale_offset(cells::shape)));
                    if constexpr (traits::has_bias)
                        shared[i / cells_of_set][1] =
                            own.four(static_cast<int>(traits::bias_offset(cells::shape)));
                }
            }
            // What goes through the table: a lane has a column or a row.
            if constexpr (column_parameters && !direct)
                if (i % cells_of_set == 0)
#pragma unroll
                    for (int t = 0; t < tables; ++t)
                        load_set(of_columns[i / cells_of_set][t], source, tile,
                                 key ? row + 32 * i + t * slice_tokens : column + lane,
                                 key ? column + lane : row + 32 * i);
            if constexpr (row_parameters)
                load_set(of_rows[i], source, tile, key ? row + 32 * i + lane : column,
                         key ? column : row + 32 * i + lane);
            if constexpr (row_token_scales)
                token_scale[i] = cells::stored_token_scale(source, tile, row + 32 * i + lane);
        }
        if constexpr (token_scales) token_scale[0] = cells::stored_token_scale(source, tile, column + lane);
    }

    /// Waits until what was fetched is there. To be called before the next batch is asked for: one counter of
    /// a warp has the loads of both, and would be waited for until all of them are there.
    __device__ __forceinline__ void wait() const { wait_for(word[cells_of_batch - 1][lines - 1].w); }

    /// Dequantizes what was fetched to the tile at `to`; `table`: of this warp.
    template <class Source>
    __device__ __forceinline__ void store(const Source& source, std::uint32_t to, const tile_tokens& tile,
                                          std::uint32_t table, int strip, int batch, int lane) const {
        const int row = first_row(strip, batch), column = first_column(strip), octet = lane & 3;
        std::uint32_t existing = 0xffffffffu;
        if constexpr (!key) existing = source.existing(tile, column);
        // octet_offset() of the first of four rows: tiles start on 128 bytes, and the next rows flip bits.
        const int lane_place = (lane & 28) * 128 + (((lane & 3) ^ (lane & 4)) << 4);
        const std::uint32_t place = to + static_cast<std::uint32_t>(column / 64 * (Stride * 128) + row * 128 +
                                                                    (lane_place ^ column % 64 * 2));
#pragma unroll
        for (int set = 0; set < sets; ++set) {
            if constexpr (has_table) {
                __syncwarp();
                fill_table(table, set, lane);
                __syncwarp();
            }
            octet_parameters columns = of_octet(table, set, lane);
            if (!key && existing != 0xffffffffu) hide(columns, existing >> octet * 8);
#pragma unroll
            for (int i = 0; i < cells_of_set; ++i) {
                const int cell = set * cells_of_set + i;
                const row_parameters_of_four rows = of_rows_of_lane(table, i, lane);
                static_for<4>([&](auto number) {
                    constexpr int j = decltype(number)::value;
                    std::uint32_t x[4];
                    row_of(cell, j, lane, columns, rows, x);
                    if constexpr (!key && !column_parameters && !token_scales)
                        if (existing != 0xffffffffu) hide_all(x, existing >> octet * 8);
                    store_shared_16((place ^ (j * 16u)) + static_cast<std::uint32_t>((cell * 32 + j) * 128),
                                    {__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]),
                                     __uint_as_float(x[3])});
                });
            }
        }
    }

private:
    template <class Set, class Source>
    __device__ __forceinline__ static void load_set(Set& set, const Source& source, const tile_tokens& tile,
                                                    int token_in_tile, int channel) {
        cells::load_set(set, source.block(source.page(tile, token_in_tile), token_in_tile),
                        (tile.first + token_in_tile) % page, channel);
    }
    /// Sections of a table: parameters of 32 columns (of rows of two pages), or of the rows of a cell.
    __device__ __forceinline__ void fill_table(std::uint32_t table, int set, int lane) const {
        const std::uint32_t own = table + static_cast<std::uint32_t>(lane * 2);
        const auto put = [&](std::uint32_t at, const half_parameters& h) {
            store_half_word(at, h.scale);
            if constexpr (traits::has_bias) store_half_word(at + 64, h.bias);
            if constexpr (cells::has_low) store_half_word(at + 128, h.low);
        };
        if constexpr (column_parameters && !direct)
#pragma unroll
            for (int t = 0; t < tables; ++t)
                put(own + static_cast<std::uint32_t>(t * 256), of_columns[set][t].halves());
#pragma unroll
        for (int i = 0; i < cells_of_set; ++i) {
            [[maybe_unused]] const std::uint32_t at = own + static_cast<std::uint32_t>(i * 256);
            [[maybe_unused]] const int cell = set * cells_of_set + i;
            if constexpr (row_parameters) put(at, of_rows[cell].halves());
            if constexpr (row_token_scales)
                store_half_word(at + 192,
                                half_token_scale<typename traits::token_scale_type>(token_scale[cell]));
        }
        if constexpr (token_scales)
            store_half_word(own + 192, half_token_scale<typename traits::token_scale_type>(token_scale[0]));
    }
    __device__ __forceinline__ octet_parameters of_octet(std::uint32_t table, int set, int lane) const {
        octet_parameters p{};
        const std::uint32_t at = table + static_cast<std::uint32_t>((lane & 3) * 16);
        if constexpr (direct) {
            p.scale = shared[set][0];
            if constexpr (traits::has_bias) p.bias = shared[set][1];
        } else if constexpr (column_parameters) {
            const std::uint32_t own = at + (tables == 2 && lane >= slice_tokens ? 256u : 0u);
            p.scale = load_shared_16(own);
            if constexpr (traits::has_bias) p.bias = load_shared_16(own + 64);
            if constexpr (cells::has_low) p.low = load_shared_16(own + 128);
        }
        if constexpr (token_scales) p.token_scale = load_shared_16(at + 192);
        return p;
    }
    /// Halves of a lane's four rows.
    struct row_parameters_of_four {
        uint2 scale, bias, low, token_scale;
    };
    __device__ __forceinline__ static row_parameters_of_four of_rows_of_lane(std::uint32_t table, int i,
                                                                             int lane) {
        row_parameters_of_four p{};
        const std::uint32_t at = table + static_cast<std::uint32_t>(i * 256 + (lane & 28) * 2);
        if constexpr (row_parameters) {
            p.scale = load_shared_8(at);
            if constexpr (traits::has_bias) p.bias = load_shared_8(at + 64);
            if constexpr (cells::has_low) p.low = load_shared_8(at + 128);
        }
        if constexpr (row_token_scales) p.token_scale = load_shared_8(at + 192);
        return p;
    }
    /// Numbers of tokens that do not exist are zero; their bytes may be no numbers. existing: bit i, does
    /// column i of the octet exist?
    __device__ __forceinline__ static void hide_all(std::uint32_t (&x)[4], std::uint32_t existing) {
#pragma unroll
        for (int k = 0; k < 4; ++k)
            x[k] &= (existing >> 2 * k & 1u ? 0xffffu : 0u) | (existing >> 2 * k & 2u ? 0xffff0000u : 0u);
    }
    __device__ __forceinline__ static void hide(uint4& v, std::uint32_t existing) {
        std::uint32_t x[4] = {v.x, v.y, v.z, v.w};
        hide_all(x, existing);
        v = {x[0], x[1], x[2], x[3]};
    }
    __device__ __forceinline__ static void hide(octet_parameters& p, std::uint32_t existing) {
        if constexpr (column_parameters) {
            hide(p.scale, existing);
            if constexpr (traits::has_bias) hide(p.bias, existing);
        }
        if constexpr (token_scales) hide(p.token_scale, existing);
    }
    /// Row j of a lane's four.
    __device__ __forceinline__ void row_of(int cell, int j, int lane, const octet_parameters& columns,
                                           const row_parameters_of_four& rows, std::uint32_t (&x)[4]) const {
        const auto part = [j](const uint4& v) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; };
        if constexpr (full) {
#pragma unroll
            for (int k = 0; k < 4; ++k) x[k] = as_halves<typename S::value_type>(part(word[cell][k]));
        } else {
            std::uint32_t low_quad = 0, high_quad = 0;
            static_for<traits::plane_count>([&](auto plane) {
                constexpr int p = decltype(plane)::value, per = traits::units_per_word(p), width = 8 / per;
                constexpr std::uint32_t mask =
                    (((1u << width) - 1u) << traits::planes::shift(p)) * 0x01010101u;
                const auto quad = [&](std::uint32_t w, auto number) {
                    constexpr int left = traits::planes::shift(p) - width * decltype(number)::value;
                    if constexpr (left >= 0)
                        return (w << left) & mask;
                    else
                        return (w >> -left) & mask;
                };
                std::uint32_t w = part(word[cell][local_line(p)]);
                // Narrow planes: a word has more than these 8 columns.
                if constexpr (per > 2)
                    w >>= (lane & 3) * 2 % kvq::detail::smaller(per, cells::page_columns / 4) * width;
                low_quad |= quad(w, std::integral_constant<int, 0>{});
                if constexpr (per == 1)
                    high_quad |= quad(part(word[cell][local_line(p) + 1]), std::integral_constant<int, 0>{});
                else
                    high_quad |= quad(w, std::integral_constant<int, 1>{});
            });
            octet_parameters p = columns;
            const auto all = [j](const uint2& v) {
                return four_times(__byte_perm(j < 2 ? v.x : v.y, 0u, j % 2 == 0 ? 0x1010 : 0x3232));
            };
            if constexpr (row_parameters) {
                p.scale = all(rows.scale);
                p.bias = all(rows.bias);
                p.low = all(rows.low);
            }
            if constexpr (row_token_scales) p.token_scale = all(rows.token_scale);
            dequantize_octet<S, cells::has_low, token_scales || row_token_scales>(x, low_quad, high_quad, p);
        }
    }
};

}}}  // namespace kvq::cuda::detail
