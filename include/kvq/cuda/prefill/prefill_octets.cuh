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
// Contract: as in prefill_tile.cuh, with the same numbers; hide() comes after all strips of a tile of values
// that lacks tokens.
#pragma once

#include "prefill_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// The block that holds all tokens of a tile, by its address. Tokens of a tile are counted from the block's
/// first one.
struct block_of_tile {
    const std::byte* at;

    __device__ __forceinline__ int page(const tile_tokens&, int) const { return 0; }
    __device__ __forceinline__ block_in_memory block(int, int) const { return {at}; }
};

/// Bytes of a warp's table: twice [scales, biases, low parts, token scales] of 32 halves each.
inline constexpr int octet_table_bytes = 2 * 256;

/// Where strips stand in a tile. Stride: rows of the tile in shared memory.
template <bool Key, int Stride>
struct octet_strips {
    static constexpr bool key = Key;

    __device__ __forceinline__ static unsigned first_row(unsigned strip) { return key ? 0 : strip / 2 * 64; }
    __device__ __forceinline__ static unsigned first_column(unsigned strip) {
        return (key ? strip : strip % 2) * 32;
    }
    /// Where a lane's four rows of a strip stand in the tile at `to`: octet_offset(). Tiles start on 128
    /// bytes, and the next rows flip bits.
    __device__ __forceinline__ static void places(std::uint32_t (&place)[4], std::uint32_t to, int strip,
                                                  int lane) {
        const unsigned column = first_column(strip), own = lane & 31;
        const unsigned lane_place = ((own & 28) * 128 + ((own & 3) ^ (own & 4)) * 16) ^ column % 64 * 2;
#pragma unroll
        for (unsigned j = 0; j < 4; ++j)
            place[j] =
                to + column / 64 * (Stride * 128) + first_row(strip) * 128 + (lane_place ^ j * 16) + j * 128;
    }
    /// Zeros in place of what does not exist of a strip of values: its bytes may be no numbers. existing:
    /// that of the tile.
    __device__ __forceinline__ static void hide(const std::uint32_t (&place)[4], std::uint32_t existing,
                                                int lane) {
        existing >>= (lane & 3) * 8;
        const auto shown = [existing](std::uint32_t number, int k) {
            return __uint_as_float(number & ((existing >> 2 * k & 1u ? 0xffffu : 0u) |
                                             (existing >> 2 * k & 2u ? 0xffff0000u : 0u)));
        };
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (unsigned at : {place[j], place[j] + 32 * 128}) {
                const uint4 x = load_shared_16(at);
                store_shared_16(at, {shown(x.x, 0), shown(x.y, 1), shown(x.z, 2), shown(x.w, 3)});
            }
    }
};

/// The words of a strip, or of half a strip of 16-bit numbers, on their way from pages to a tile.
template <tensor Role, class Pair, int Stride>
struct octet_batch : octet_strips<Role == tensor::key, Stride> {
    using strips = octet_strips<Role == tensor::key, Stride>;
    using strips::first_row, strips::first_column;
    using cells = cell_batch<Role, Pair, 32, 32, 1, Stride>;
    using S = typename cells::S;
    using traits = typename cells::traits;
    using set_type = typename cells::set_type;
    static constexpr bool key = strips::key, full = cells::full;
    static constexpr int page = cells::page, group = cells::group, height = cells::height;
    static constexpr int cells_of_batch = full ? 1 : 2, batches = 2 / cells_of_batch;  // of a strip
    static constexpr bool row_parameters = cells::row_parameters,
                          column_parameters = cells::column_parameters,
                          row_token_scales = cells::row_token_scales, token_scales = cells::token_scales;
    /// Do columns share halves that are copied as they are, past registers?
    static constexpr bool direct = [] {
        if constexpr (column_parameters && !cells::has_token_scales && cells::tables == 1)
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

    /// So many batches may be under way: registers, and places for their scales and biases, suffice.
    static constexpr int slot_bytes = sets * 128, most_ahead = direct && sets == 1 && lines == 1 ? 4 : 2;

    uint4 word[cells_of_batch][lines];  // of four rows
    [[no_unique_address]] std::conditional_t<column_parameters && !direct, set_type[sets][tables], no_set>
        of_columns;
    [[no_unique_address]] std::conditional_t<row_parameters, set_type[cells_of_batch], no_set> of_rows;
    std::uint32_t token_scale[row_token_scales ? cells_of_batch : 1];

    static constexpr bool one_block = page % 64 == 0;  // that has all tokens of a tile
    static constexpr int blocks = key && !one_block ? 2 : 1, planes = traits::plane_count;
    using source_type = std::conditional_t<one_block, block_of_tile, blocks_in_memory<Role, Pair>>;

    /// What a lane reads of a tile, from one of its strips on; found once a tile.
    struct lane_tile {
        tile_tokens tokens;
        source_type source;
        const std::byte* words[planes][blocks];  // of the lane's rows and columns
        const std::byte* parameters[blocks];     // direct: of the lane's columns, scales before biases
        unsigned token[blocks];                  // of the block: the first of 32 of the tile, or of its 16
        unsigned row, column;                    // of the strip
        std::uint32_t existing = 0xffffffffu;    // values: bit i, is column i of the strip there?

        /// `count` tokens from `first` on of a part. page_number: as in tile_tokens.
        __device__ __forceinline__ lane_tile(const cache_ref<Pair>& cache, int head, int first, int count,
                                             int page_number, int strip, int lane)
            : tokens(tile_tokens::of(page == 64  ? 0
                                     : one_block ? first % page
                                                 : first,
                                     count, page_number)),
              source([&] {
                  if constexpr (one_block)
                      return block_of_tile{
                          cache.template block<Role>(kvq::detail::larger(tokens.any, 0), head)};
                  else
                      return blocks_in_memory<Role, Pair>{&cache, head};
              }()),
              row(first_row(strip)),
              column(first_column(strip)) {
            const unsigned lane_row = lane & 28;
#pragma unroll
            for (int i = 0; i < blocks; ++i) {
                const int first_in_tile = key ? 32 * i : static_cast<int>(column);
                const int own = first_in_tile + (key ? lane & 28 : (lane & 3) * 8);
                const std::byte* const block = source.block(source.page(tokens, own), own).at;
                token[i] = page % 32 == 0 ? static_cast<unsigned>(tokens.first + first_in_tile) % page : 0;
                static_for<planes>([&](auto plane) {
                    constexpr int p = decltype(plane)::value;
                    const unsigned line = (key ? column : token[i]) / columns_of_line(p) +
                                          (key ? lane_column(lane) : lane_token(lane)) / columns_of_line(p);
                    words[p][i] = block + ((key ? token[i] : row) * cells::row_words +
                                           (key ? lane_token(lane) : lane_row) + line * height) *
                                              4;
                });
                parameters[i] =
                    block + (key ? token[i] / group * cells::shape.dim + column + lane_column(lane)
                                 : row / group * page + token[i] + lane_token(lane)) *
                                2;
            }
            if constexpr (!key) {
                if constexpr (one_block)
                    existing = any() ? existing_columns(tokens.count - static_cast<int>(column)) : 0;
                else
                    existing = source.existing(tokens, static_cast<int>(column));
            }
        }
        /// Bit i: are tokens 16 i on held?
        __device__ __forceinline__ unsigned held() const {
            if constexpr (one_block)
                return any() ? 0xfu : 0u;
            else
                return __ballot_sync(0xffffffffu, tokens.page >= 0);
        }
        /// Is any of its tokens held?
        __device__ __forceinline__ bool any() const { return tokens.any >= 0; }
    };

    /// Batch `Batch` of the strip `Ahead` strips behind that of the tile; Ahead: an even number. What the
    /// compiler knows becomes part of instructions. Direct: scales and biases go to slot `Slot` of the warp's
    /// table, and the lane's next group of copies has them (copy_commit).
    template <int Ahead, int Batch, int Slot>
    __device__ __forceinline__ void fetch(const lane_tile& tile, [[maybe_unused]] std::uint32_t table,
                                          int lane) {
        const unsigned row = tile.row, column = tile.column;
        if constexpr (direct) __syncwarp();  // what the slot had is read
        constexpr int behind_rows = key ? 0 : Ahead * 32, behind_columns = key ? Ahead * 32 : 0;
#pragma unroll
        for (int i = 0; i < cells_of_batch; ++i) {
            const int cell = Batch * cells_of_batch + i, own_block = blocks == 2 ? cell : 0;
            const int cell_rows = blocks == 2 ? 0 : 32 * cell;
            static_for<planes>([&](auto plane) {
                constexpr int p = decltype(plane)::value;
                const int behind =
                    (behind_rows + cell_rows) * cells::row_words +
                    (traits::first_line(p, cells::columns / 4) + behind_columns / columns_of_line(p)) *
                        height;
#pragma unroll
                for (int k = 0; k < plane_lines(p); ++k)
                    word[i][local_line(p) + k] =
                        block_in_memory{tile.words[p][own_block]}.four((behind + k * height) * 4);
            });
            if constexpr (direct) {
                if (i % cells_of_set == 0) {
                    // So many sets behind those of the tile's strip; known to the compiler where groups are
                    // parts of 64, or 64 parts of them.
                    const unsigned token = tile.token[own_block];
                    const unsigned sets_behind =
                        64 % group == 0 ? (key ? cell_rows : behind_rows + 32 * cell) / group
                        : key           ? (token + cell_rows) / group - token / group
                                        : (row + behind_rows + 32 * cell) / group - row / group;
                    const std::byte* const own = tile.parameters[own_block] +
                                                 sets_behind * (key ? cells::shape.dim : page) * 2 +
                                                 behind_columns * 2;
                    // 64 bytes each: lanes 0 to 3 copy scales, 4 to 7 biases.
                    if (lane < (traits::has_bias ? 8 : 4))
                        copy_async(table + static_cast<std::uint32_t>(Slot * slot_bytes +
                                                                      i / cells_of_set * 128 + lane * 16),
                                   own + (lane < 4 ? traits::scale_offset(cells::shape)
                                                   : traits::bias_offset(cells::shape)));
                }
            }
            // What goes through the table: a lane has a column or a row.
            const int tile_row = static_cast<int>(row) + behind_rows + 32 * cell,
                      tile_column = static_cast<int>(column) + behind_columns;
            if constexpr (column_parameters && !direct)
                if (i % cells_of_set == 0)
#pragma unroll
                    for (int t = 0; t < tables; ++t)
                        load_set(of_columns[i / cells_of_set][t], tile.source, tile.tokens,
                                 key ? tile_row + t * slice_tokens : tile_column + lane,
                                 key ? tile_column + lane : tile_row);
            if constexpr (row_parameters)
                load_set(of_rows[i], tile.source, tile.tokens, key ? tile_row + lane : tile_column,
                         key ? tile_column : tile_row + lane);
            if constexpr (row_token_scales)
                token_scale[i] = cells::stored_token_scale(tile.source, tile.tokens, tile_row + lane);
        }
        if constexpr (token_scales)
            token_scale[0] =
                cells::stored_token_scale(tile.source, tile.tokens, static_cast<int>(column) + lane);
    }

    /// Waits until what was fetched is there. To be called before the next batch is asked for: one counter of
    /// a warp has the loads of both, and would be waited for until all of them are there.
    template <int Behind>
    __device__ __forceinline__ void wait() const {
        wait_for(word[cells_of_batch - 1][lines - 1].w);
        if constexpr (direct) {
            copy_wait<Behind>();
            __syncwarp();
        }
    }

    /// Dequantizes what was fetched, of a strip `Ahead` strips behind that of the places. `table`: of this
    /// warp.
    template <int Ahead, int Batch, int Slot>
    __device__ __forceinline__ void store(const std::uint32_t (&place)[4], std::uint32_t table,
                                          int lane) const {
        constexpr int behind = key ? Ahead / 2 * (Stride * 128) : Ahead * 32 * 128;
        static_for<sets>([&](auto of_set) {
            constexpr int set = decltype(of_set)::value;
            if constexpr (has_table) {
                __syncwarp();
                fill_table(table, set, lane);
                __syncwarp();
            }
            const octet_parameters columns =
                of_octet(table + static_cast<std::uint32_t>(direct ? Slot * slot_bytes : 0), set, lane);
            static_for<cells_of_set>([&](auto of_cell) {
                constexpr int i = decltype(of_cell)::value, cell = set * cells_of_set + i;
                const row_parameters_of_four rows = of_rows_of_lane(table, i, lane);
                std::uint32_t x[4][4];
#pragma unroll
                for (int j = 0; j < 4; ++j) row_of(cell, j, lane, columns, rows, x[j]);
                store_shared_4x16<behind + (Batch * cells_of_batch + cell) * 32 * 128>(place, x);
            });
        });
    }

private:
    KVQ_HD static constexpr int columns_of_line(int plane) {
        return full ? 2 : 4 * traits::units_per_word(plane);
    }
    __device__ __forceinline__ static unsigned lane_column(int lane) { return (lane & 3) * 8; }
    __device__ __forceinline__ static unsigned lane_token(int lane) {
        return (key ? lane & 28 : (lane & 3) * 8) % kvq::detail::smaller(page, 32);
    }
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
            const std::uint32_t own = at + static_cast<std::uint32_t>(set * 128);
            p.scale = load_shared_16(own);
            if constexpr (traits::has_bias) p.bias = load_shared_16(own + 64);
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
