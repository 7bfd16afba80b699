// Packed pages as tiles of half floats in shared memory, as tensor cores read them: what a prompt's attention
// is made of.
//
//   keys    rows = tokens,   columns = channels         S = Q K^T sums over columns
//   values  rows = channels, columns = tokens           O = P V   sums over columns
//
// A block of a page is a matrix of that form already (docs/reference/format.md): a word holds neighbouring
// columns of one row, so nothing is transposed. A tile is cut into blocks of 64 columns, [block][row][64
// halves]; the 16 bytes of columns 8c to 8c + 7 of row r stand at place c ^ (r % 8) of the row's 128 bytes
// (the 128-byte swizzle of wgmma; loads of 8 rows meet all banks). A warp dequantizes cells of 32 rows and 32
// columns: a lane has a row. Parameters of columns go through a small table of the warp.
//
// Contract: x^ is computed in half floats: code, scale, bias and token scale are rounded to half floats
// first, then scale * code + bias is rounded once, times the token scale once more. |x^| must be below 65504;
// what is smaller than 6e-5 has an absolute error of 3e-8. Columns of value tiles that hold no token are
// zero; rows of key tiles that hold none are anything.
#pragma once

#include "prefill_numbers.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Tokens per entry of the list of pages of a tile; page sizes are multiples of it.
inline constexpr int slice_tokens = 16;

/// Pages of rows that do not hold whole slices: each token is looked up in the table.
template <class Pair>
inline constexpr bool split_slices =
    token_row_scheme<typename Pair::keys>&& Pair::page_tokens != 16 && Pair::page_tokens % 32 != 0;

/// Where a tile's columns 8 octet to 8 octet + 7 of a row stand.
template <int Rows>
__device__ __forceinline__ std::uint32_t octet_offset(int row, int octet) {
    return static_cast<std::uint32_t>(octet / 8 * (Rows * 128) + row * 128 + ((octet % 8 ^ (row & 7)) << 4));
}

/// Places of 8 neighbouring channels in keys and queries, two in a word.
struct octet_places {
    std::uint32_t pair[4];

    __device__ __forceinline__ static octet_places of(const std::uint16_t* places) {
        octet_places p;
#pragma unroll
        for (int k = 0; k < 4; ++k)
            p.pair[k] = __ldg(places + 2 * k) | static_cast<std::uint32_t>(__ldg(places + 2 * k + 1)) << 16;
        return p;
    }
    /// Stores numbers of a row of the tile at `to` one by one.
    template <int Rows>
    __device__ __forceinline__ void store(std::uint32_t to, int row, const std::uint32_t (&x)[4]) const {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const int place = static_cast<int>(pair[k / 2] >> 16 * (k % 2) & 0xffffu);
            store_half_word(
                to + octet_offset<Rows>(row, place / 8) + static_cast<std::uint32_t>(place % 8 * 2),
                static_cast<std::uint16_t>(x[k / 2] >> 16 * (k % 2)));
        }
    }
};

/// Tokens of a sequence that a tile holds, and the pages that they lie in.
struct tile_tokens {
    int first;  // of the part
    int count;  // tokens that exist
    int page;   // lane i: the number of the page of tokens 16 i to 16 i + 15; negative: not held
    int any;    // a page that is held, which is read in place of those that are not; negative: there is none

    __device__ __forceinline__ static tile_tokens of(int first, int count, int page) {
        const unsigned held = __ballot_sync(0xffffffffu, page >= 0);
        return {first, count, page,
                held == 0 ? -1 : __shfl_sync(0xffffffffu, page, __ffs(static_cast<int>(held)) - 1)};
    }
};

/// A block of a page in device memory. Cells read it through get<bytes of a number>(byte).
struct block_in_memory {
    const std::byte* at;

    __device__ __forceinline__ block_in_memory from(std::size_t byte) const { return {at + byte}; }
    template <int Bytes>
    __device__ __forceinline__ std::uint32_t get(int byte) const {
        using number = std::conditional_t<Bytes == 1, std::uint8_t,
                                          std::conditional_t<Bytes == 2, std::uint16_t, std::uint32_t>>;
        return fetch_word(reinterpret_cast<const number*>(at + byte));
    }
    /// Two words; the place is a multiple of 8 bytes.
    __device__ __forceinline__ uint2 two(int byte) const {
        return fetch_two_words(reinterpret_cast<const uint2*>(at + byte));
    }
};
/// Bits of the first `count` of 32 columns.
__device__ __forceinline__ std::uint32_t existing_columns(int count) {
    return count >= 32 ? 0xffffffffu : count <= 0 ? 0u : (1u << count) - 1u;
}

/// All blocks of a head, by the numbers of their pages: what cells are read from.
template <tensor Role, class Pair>
struct blocks_in_memory {
    const cache_ref<Pair>* cache;
    int head, sequence;

    /// The page to read for a token of a tile, if there is any.
    __device__ __forceinline__ int page(const tile_tokens& tile, int token_of_tile) const {
        const int number = __shfl_sync(0xffffffffu, tile.page, token_of_tile / slice_tokens);
        return number < 0 ? tile.any : number;
    }
    __device__ __forceinline__ static bool any(const tile_tokens& tile) { return tile.any >= 0; }
    /// Bit i: token first + i of a tile exists and is held. `first` begins a slice.
    __device__ __forceinline__ static std::uint32_t existing(const tile_tokens& tile, int first) {
        const unsigned slices = __ballot_sync(0xffffffffu, tile.page >= 0) >> first / slice_tokens;
        return existing_columns(tile.count - first) &
               ((slices & 1u ? 0xffffu : 0u) | (slices & 2u ? 0xffff0000u : 0u));
    }

    __device__ __forceinline__ block_in_memory block(int number, int) const {
        return {cache->template block<Role>(number, head)};
    }
    /// Its lower plane, of a format with two.
    __device__ __forceinline__ block_in_memory lower_block(int number) const {
        return {cache->template lower_block<Role>(number, head)};
    }
};

/// Bytes of a warp's table: for 32 columns scales, biases, low parts (of keys for up to two pages) and token
/// scales (of values), 64 bytes each.
inline constexpr int key_table_bytes = 2 * 192, value_table_bytes = 256;

/// How a tile is cut into cells: warp w has column w % column_cells and `each` rows of cells below each
/// other.
template <int TileRows, int TileColumns, int Warps>
struct tile_cells {
    static constexpr int columns = TileColumns / 32, rows = TileRows / 32;
    static_assert(TileRows % 32 == 0 && TileColumns % 32 == 0 && columns <= Warps);
    static constexpr int each = kvq::detail::ceil_div(rows, Warps / columns);
    static constexpr bool all_exist = each * (Warps / columns) == rows && Warps % columns == 0;

    __device__ __forceinline__ static int column(int warp) { return warp % columns * 32; }
    __device__ __forceinline__ static int row(int warp, int i) { return (warp / columns * each + i) * 32; }
    __device__ __forceinline__ static bool exists(int warp, int i) {
        return all_exist || row(warp, i) < TileRows;
    }
};

/// The words of a warp's cells, on their way from pages to a tile.
template <tensor Role, class Pair, int TileRows, int TileColumns, int Warps, bool Ordered>
struct cell_batch {
    using S = scheme_of<Role, Pair>;
    using traits = word_traits<S>;
    using cells = tile_cells<TileRows, TileColumns, Warps>;
    static constexpr int count = cells::each;
    static constexpr bool key = Role == tensor::key;
    static constexpr bool full = traits::full;
    static constexpr block_shape shape = shape_of<Role, Pair>;
    static constexpr int page = Pair::page_tokens, dim = shape.dim;
    static constexpr int rows = key ? page : dim, columns = key ? dim : page;
    static constexpr int height = kvq::detail::smaller(32, rows);
    /// A cell has columns of one page, or of two of 16 tokens.
    static constexpr int page_columns = kvq::detail::smaller(32, columns), parts = 32 / page_columns;
    static constexpr int axis = traits::token_parameters ? dim : page;
    static constexpr int group = traits::group == 0 || traits::group > axis ? axis : traits::group;

    static constexpr int row_words = [] {
        if constexpr (full)
            return columns / 2;
        else
            return traits::lines(columns / 4);
    }();
    static constexpr int part_words = [] {
        if constexpr (full) {
            return page_columns / 2;
        } else {
            int n = 0;
            for (int p = 0; p < traits::plane_count; ++p)
                n += kvq::detail::ceil_div(page_columns / 4, traits::units_per_word(p));
            return n;
        }
    }();
    static constexpr int words = parts * part_words;

    // Whose are the parameters: the rows' or the columns'?
    static constexpr bool row_parameters = !full && key == traits::token_parameters;
    static constexpr bool column_parameters = !full && !row_parameters;
    static constexpr bool has_token_scales = !std::is_same_v<typename traits::token_scale_type, void>;
    static constexpr bool token_scales = !key && has_token_scales;  // of columns
    static constexpr bool row_token_scales = key && has_token_scales;
    static constexpr bool has_table = column_parameters || token_scales;
    static constexpr int tables = key && page == 16 ? 2 : 1;  // rows of two pages
    /// Cells below each other whose columns have the same parameters.
    static constexpr int cells_per_set = [] {
        if (!column_parameters) return count;
        if (key && page % group != 0) return 1;  // a group ends where a page does
        const int together = group % 128 == 0 ? 4 : group % 64 == 0 ? 2 : 1;
        return count % together == 0 ? together : 1;
    }();
    static constexpr int sets = count / cells_per_set;

    static constexpr bool planes = has_lower<Pair>;
    using set_type = typename set_of<S, planes>::type;
    /// What scales of values lose by being rounded averages out over the tokens.
    static constexpr bool has_low = key && set_type::has_low;

    /// Nothing of a head has to be known before its pages are read.
    struct lane_channel {
        [[no_unique_address]] std::conditional_t<key && Ordered, const std::uint16_t*, no_set> order;
        __device__ __forceinline__ lane_channel(const cache_ref<Pair>&, int, int, int, int,
                                                [[maybe_unused]] const std::uint16_t* places = nullptr) {
            if constexpr (key && Ordered) order = places;
        }
    };
    cell_batch() = default;
    __device__ __forceinline__ explicit cell_batch(const lane_channel& own) : order(own.order) {}

    [[no_unique_address]] decltype(lane_channel::order) order = {};

    std::uint32_t word[count][words];
    [[no_unique_address]] std::conditional_t<planes, std::uint32_t[count][words], no_set> lower_word;
    [[no_unique_address]] std::conditional_t<row_parameters, set_type[count][parts], no_set> of_rows;
    [[no_unique_address]] std::conditional_t<column_parameters, set_type[sets][tables], no_set> of_columns;
    std::uint32_t token_scale[row_token_scales ? count : 1];

    /// Asks for the parameters of (token, channel).
    template <class Set, class Block>
    __device__ __forceinline__ static void load_set(Set& set, const Block& block, int token, int channel) {
        const int at =
            traits::token_parameters ? channel / group * page + token : token / group * dim + channel;
        constexpr std::size_t scales = traits::scale_offset(shape), biases = traits::bias_offset(shape);
        const int numbers =
            static_cast<int>(biases) + kvq::detail::ceil_div(page, group) * dim + token / group * 6;
        set.load(block, scales, biases, at, numbers);
    }

    template <class Source>
    __device__ __forceinline__ static std::uint32_t stored_token_scale(const Source& source,
                                                                       const tile_tokens& tile, int token) {
        constexpr int width = parameter_width<typename traits::token_scale_type>;
        return source.block(source.page(tile, token), token)
            .from(static_cast<std::size_t>((tile.first + token) % page * width))
            .template get<width>(static_cast<int>(typename S::layout_type{}.token_scale_offset(shape)));
    }

    /// Source: page(tile, token of the tile), block(page, token of the tile), any(tile), existing(tile, first
    /// token). No load hangs on a condition of its own, and none is waited for here: store() zeroes values of
    /// tokens that do not exist.
    template <class Source>
    __device__ __forceinline__ void fetch(const Source& source, const tile_tokens& tile, int warp, int lane) {
        if (!source.any(tile)) {
            const auto places = order;
            *this = {};
            order = places;
            return;
        }
        const int column = cells::column(warp);
#pragma unroll
        for (int i = 0; i < count; ++i) {
            if (!cells::exists(warp, i)) break;
            const int row = cells::row(warp, i);
            fetch_words(source, tile, row, column, lane, i);
            if constexpr (column_parameters)
                if (i % cells_per_set == 0)
#pragma unroll
                    for (int t = 0; t < tables; ++t) {
                        const int token_in_tile = key ? row + t * slice_tokens : column + lane;
                        load_set(of_columns[i / cells_per_set][t],
                                 source.block(source.page(tile, token_in_tile), token_in_tile),
                                 (tile.first + token_in_tile) % page, key ? column + lane : row);
                    }
            if constexpr (row_token_scales) token_scale[i] = stored_token_scale(source, tile, row + lane);
        }
        if constexpr (token_scales) token_scale[0] = stored_token_scale(source, tile, column + lane);
    }

    /// Dequantizes the cells that were fetched to the tile at `to`; `table`: of this warp.
    template <class Source>
    __device__ __forceinline__ void store(const Source& source, std::uint32_t to, const tile_tokens& tile,
                                          std::uint32_t table, int warp, int lane) const {
        const int column = cells::column(warp);
        std::uint32_t existing = 0xffffffffu;  // columns of values
        if constexpr (!key) existing = source.existing(tile, column);
#pragma unroll
        for (int set = 0; set < sets; ++set) {
            if (!cells::exists(warp, set * cells_per_set)) break;
            if constexpr (has_table) {
                __syncwarp();
                fill_table(table, set, lane);
                __syncwarp();
            }
            half_parameters of_row[cells_per_set][parts];
            if constexpr (row_parameters)
#pragma unroll
                for (int i = 0; i < cells_per_set; ++i)
#pragma unroll
                    for (int part = 0; part < parts; ++part)
                        of_row[i][part] = of_rows[set * cells_per_set + i][part].halves();
            const int row = cells::row(warp, set * cells_per_set);
            const std::uint32_t parameters = table + (tables == 2 && lane >= slice_tokens ? 192u : 0u);
            // Tiles start on 128 bytes and columns on 64 bytes: an octet flips bits of the first one's place.
            const std::uint32_t place = to + octet_offset<TileRows>(row + lane, column / 8);
            octet_parameters shared[2];  // those of the next octet are under way
            shared[0] = octet_from(parameters);
            static_for<4>([&](auto number) {
                constexpr int octet = decltype(number)::value;
                if constexpr (octet < 3) shared[(octet + 1) % 2] = octet_from(parameters + (octet + 1) * 16);
#pragma unroll
                for (int i = 0; i < cells_per_set; ++i) {
                    const int cell = set * cells_per_set + i;
                    if (!cells::exists(warp, cell)) break;
                    const std::uint32_t at =
                        (place ^ (octet * 16u)) + static_cast<std::uint32_t>(i * 32 * 128);
                    std::uint32_t x[4];
                    make_octet<octet>(x, shared[octet % 2], of_row[i], cell);
                    if constexpr (key && Ordered)
                        if (order != nullptr) {
                            octet_places::of(order + column + octet * 8)
                                .template store<TileRows>(to, row + i * 32 + lane, x);
                            continue;
                        }
                    store_shared_16(at, {__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]),
                                         __uint_as_float(x[3])});
                }
            });
        }
        if (!key && existing != 0xffffffffu) hide_columns(to, existing, column / 8, warp, lane);
    }

private:
    /// Zeroes values of tokens that do not exist: their weights are 0, but their bytes may be no numbers. A
    /// pass of its own, because a branch at each octet would take longer than its numbers.
    __device__ __forceinline__ static void hide_columns(std::uint32_t to, std::uint32_t existing, int octet,
                                                        int warp, int lane) {
#pragma unroll 1
        for (int n = 0; n < count * 4; ++n) {
            if (!cells::exists(warp, n / 4)) break;
            const std::uint32_t at =
                to + octet_offset<TileRows>(cells::row(warp, n / 4) + lane, octet + n % 4);
            const uint4 v = load_shared_16(at);
            std::uint32_t x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const std::uint32_t bits = existing >> (n % 4 * 8 + 2 * k);
                x[k] &= (bits & 1u ? 0xffffu : 0u) | (bits & 2u ? 0xffff0000u : 0u);
            }
            store_shared_16(at, {__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]),
                                 __uint_as_float(x[3])});
        }
    }
    template <class Source>
    __device__ __forceinline__ void fetch_words(const Source& source, const tile_tokens& tile, int row,
                                                int column, int lane, int i) {
#pragma unroll
        for (int part = 0; part < parts; ++part) {
            const int token_in_tile = key ? row + lane : column + part * page_columns;
            const int token = (tile.first + token_in_tile) % page;
            const auto block = source.block(source.page(tile, token_in_tile), token_in_tile);
            const int block_row = key ? token : row + lane, block_column = key ? column : token;
            const auto at =
                block.from(static_cast<std::size_t>((block_row & ~31) * row_words + block_row % height) * 4);
            const auto load = [&](int vector) { return at.template get<4>(vector * height * 4); };
            if constexpr (full) {
#pragma unroll
                for (int k = 0; k < part_words; ++k)
                    word[i][part * part_words + k] = load(block_column / 2 + k);
            } else {
                static_for<traits::plane_count>([&](auto plane) {
                    constexpr int p = decltype(plane)::value, per = traits::units_per_word(p);
                    constexpr int first = traits::first_line(p, columns / 4);
                    constexpr int behind = local_line(p), n = kvq::detail::ceil_div(page_columns / 4, per);
#pragma unroll
                    for (int k = 0; k < n; ++k)
                        word[i][part * part_words + behind + k] = load(first + block_column / 4 / per + k);
                });
            }
            if constexpr (planes) {
                const auto lower =
                    source.lower_block(source.page(tile, token_in_tile))
                        .from(static_cast<std::size_t>((block_row & ~31) * row_words + block_row % height) *
                              4);
#pragma unroll
                for (int k = 0; k < part_words; ++k)
                    lower_word[i][part * part_words + k] =
                        lower.template get<4>((block_column / 8 + k) * height * 4);
            }
            if constexpr (row_parameters) load_set(of_rows[i][part], block, token, key ? column : row + lane);
        }
    }
    /// [scales, biases, low parts, token scales][32 halves], for rows of up to two pages.
    __device__ __forceinline__ void fill_table(std::uint32_t table, int set, int lane) const {
#pragma unroll
        for (int t = 0; t < tables; ++t) {
            const std::uint32_t at = table + static_cast<std::uint32_t>(t * 192 + lane * 2);
            if constexpr (column_parameters) {
                const half_parameters h = of_columns[set][t].halves();
                store_half_word(at, h.scale);
                if constexpr (traits::has_bias) store_half_word(at + 64, h.bias);
                if constexpr (has_low) store_half_word(at + 128, h.low);
            }
            if constexpr (token_scales)
                store_half_word(at + 192,
                                half_token_scale<typename traits::token_scale_type>(token_scale[0]));
        }
    }
    /// From an octet's place in the table.
    __device__ __forceinline__ static octet_parameters octet_from([[maybe_unused]] std::uint32_t at) {
        octet_parameters p{};
        if constexpr (column_parameters) {
            p.scale = load_shared_16(at);
            if constexpr (traits::has_bias) p.bias = load_shared_16(at + 64);
            if constexpr (has_low) p.low = load_shared_16(at + 128);
        }
        if constexpr (token_scales) p.token_scale = load_shared_16(at + 192);
        return p;
    }
    template <int Octet>
    __device__ __forceinline__ void make_octet(std::uint32_t (&x)[4], const octet_parameters& shared,
                                               [[maybe_unused]] const half_parameters (&of_row)[parts],
                                               int i) const {
        constexpr int part = Octet * 8 / page_columns;
        if constexpr (full) {
            constexpr int first = part * part_words + Octet * 4 % part_words;
#pragma unroll
            for (int k = 0; k < 4; ++k) x[k] = as_halves<typename S::value_type>(word[i][first + k]);
        } else {
            constexpr int quads = page_columns / 4, first_quad = Octet * 2 % quads;
            octet_parameters p = shared;
            if constexpr (row_parameters) p.set_all(of_row[part]);
            if constexpr (row_token_scales)
                p.token_scale =
                    four_times(twice(half_token_scale<typename traits::token_scale_type>(token_scale[i])));
            dequantize_octet<S, has_low, token_scales || row_token_scales, planes>(
                x, quad<part, first_quad>(i), quad<part, first_quad + 1>(i), p);
        }
    }
    /// The first of a part's words of a plane.
    KVQ_HD static constexpr int local_line(int plane) {
        int n = 0;
        for (int p = 0; p < plane; ++p)
            n += kvq::detail::ceil_div(page_columns / 4, traits::units_per_word(p));
        return n;
    }
    /// Codes of a quad, a byte each.
    template <int Part, int Quad>
    __device__ __forceinline__ std::uint32_t quad(int i) const {
        if constexpr (planes) {
            const int at = Part * part_words + Quad / 2;
            const std::uint32_t u = word[i][at], l = lower_word[i][at];
            return Quad % 2 == 0 ? (u << 4 & 0xf0f0f0f0u) | (l & 0x0f0f0f0fu)
                                 : (u & 0xf0f0f0f0u) | (l >> 4 & 0x0f0f0f0fu);
        }
        std::uint32_t result = 0;
        static_for<traits::plane_count>([&](auto plane) {
            constexpr int p = decltype(plane)::value, per = traits::units_per_word(p), width = 8 / per;
            constexpr int left = traits::planes::shift(p) - width * (Quad % per);
            constexpr std::uint32_t mask = (((1u << width) - 1u) << traits::planes::shift(p)) * 0x01010101u;
            const std::uint32_t w = word[i][Part * part_words + local_line(p) + Quad / per];
            if constexpr (left >= 0)
                result |= (w << left) & mask;
            else
                result |= (w >> -left) & mask;
        });
        return result;
    }
};

}}}  // namespace kvq::cuda::detail
