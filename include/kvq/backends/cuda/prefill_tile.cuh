// Packed pages as tiles of half floats in shared memory, as tensor cores read them: what a prompt's attention is made of.
//
//   keys    rows = tokens,   columns = channels         S = Q K^T sums over columns
//   values  rows = channels, columns = tokens           O = P V   sums over columns
//
// A block of a page is a matrix of that form already (docs/format.md): a word holds neighbouring columns of one row, so nothing is
// transposed. A tile is cut into pieces of 64 columns, [piece][row][64 halves]; the 16 bytes of columns 8c to 8c + 7 of row r stand at
// place c ^ (r % 8) of the row's 128 bytes (the 128-byte swizzle of wgmma; loads of 8 rows meet all banks).
// A warp dequantizes cells of 32 rows and 32 columns: a lane has a row. Parameters of columns go through a small table of the warp.
//
// Contract: x^ is computed in half floats: code, scale, bias and token scale are rounded to half floats first, then
// scale * code + bias is rounded once, times the token scale once more. |x^| must be below 65504; what is smaller than 6e-5 has an absolute
// error of 3e-8. Columns of value tiles that hold no token are zero; rows of key tiles that hold none are anything.
#pragma once

#include "code_words.cuh"
#include "mixed_cache.cuh"

namespace kvq::inline KVQ_TAGGED::cuda::detail {

/// Tokens per entry of the list of pages of a tile; page sizes are multiples of it.
inline constexpr int piece_tokens = 16;

/// Where a tile's columns 8 octet to 8 octet + 7 of a row stand.
template <int Rows>
__device__ __forceinline__ std::uint32_t octet_offset(int row, int octet) {
    return static_cast<std::uint32_t>(octet / 8 * (Rows * 128) + row * 128 + ((octet % 8 ^ (row & 7)) << 4));
}

/// The same number twice.
__device__ __forceinline__ std::uint32_t twice(std::uint16_t half) { return half * 0x00010001u; }

__device__ __forceinline__ std::uint16_t to_half(float x) {
    return static_cast<std::uint16_t>(pack_halves<float16>(x, 0.0f));
}

/// Scale and bias of a set of codes as halves; low: what the scale lost by being rounded.
struct half_parameters {
    std::uint16_t scale, bias, low;
};

/// Parameters of a set as they are stored: loaded early, converted late. S: the scheme.
template <class S>
struct stored_set {
    using traits = word_traits<S>;
    using P = typename traits::parameter;
    static constexpr bool exact = std::is_same_v<P, float16>;  // halves already
    /// Codes are counted from here: biases are then about the middle of a channel's values, and lose less by being rounded.
    static constexpr int centre =
        traits::zero_code != 0 || exact ? traits::zero_code : 1 << (S::code_bits - 1);
    /// Scales of tokens scale whole scores, so that their rounding would not average out.
    static constexpr bool has_low = traits::token_parameters && !exact;

    std::uint32_t scale = 0, bias = 0;
    std::uint32_t numbers[3] = {};  // of the group, for coded parameters: scale unit, first bias, bias step

    /// Set `at` of a block's scales and biases; group_numbers: where its group's three numbers are.
    __device__ __forceinline__ void load(const std::byte* scales, const std::byte* biases, int at,
                                         const std::byte* group_numbers) {
        scale = read(scales, at);
        if constexpr (traits::has_bias) bias = read(biases, at);
        if constexpr (std::is_same_v<P, coded>)
#pragma unroll
            for (int i = 0; i < 3; ++i)
                numbers[i] = fetch_word(reinterpret_cast<const std::uint16_t*>(group_numbers) + i);
    }
    __device__ __forceinline__ half_parameters halves() const {
        if constexpr (exact) {
            return {static_cast<std::uint16_t>(scale), static_cast<std::uint16_t>(bias), 0};
        } else {
            float s, b = 0.0f;
            if constexpr (std::is_same_v<P, coded>) {
                s = unpack_half<bfloat16, 0>(numbers[0]) * kvq::detail::scale_float::value(scale);
                b = fmaf(unpack_half<bfloat16, 0>(numbers[2]), static_cast<float>(bias),
                         unpack_half<bfloat16, 0>(numbers[1]));
            } else if constexpr (std::is_same_v<P, bfloat16>) {
                s = unpack_half<bfloat16, 0>(scale);
                b = unpack_half<bfloat16, 0>(bias);
            } else {
                s = __uint_as_float(scale);
                b = __uint_as_float(bias);
            }
            const std::uint16_t high = to_half(s);
            return {high,
                    traits::has_bias ? to_half(fmaf(static_cast<float>(centre), s, b)) : std::uint16_t{0},
                    has_low ? to_half(s - half_bits_to_float(high)) : std::uint16_t{0}};
        }
    }

private:
    __device__ __forceinline__ static std::uint32_t read(const std::byte* from, int i) {
        if constexpr (parameter_width<P> == 1)
            return fetch_word(reinterpret_cast<const std::uint8_t*>(from) + i);
        else if constexpr (parameter_width<P> == 2)
            return fetch_word(reinterpret_cast<const std::uint16_t*>(from) + i);
        else
            return fetch_word(reinterpret_cast<const std::uint32_t*>(from) + i);
    }
};

/// Tokens of a sequence that a tile holds, and the pages that they lie in.
struct tile_tokens {
    int first;  // of the part
    int count;  // tokens that exist
    int page;   // lane i: the number of the page of tokens 16 i to 16 i + 15; negative: not held
};

/// Bytes of a warp's table: for 32 columns of up to two pages scales, biases, low parts and token scales, 64 bytes each.
inline constexpr int cell_table_bytes = 2 * 256;

/// How a tile is cut into cells: warp w has column w % column_cells and `each` rows of cells below each other.
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

/// The words of cells first to first + Count - 1 of a warp, on their way from pages to a tile.
template <tensor Role, class Format, int TileRows, int TileColumns, int Warps, int Count>
struct cell_batch {
    using S = scheme_of<Role, Format>;
    using traits = word_traits<S>;
    using cells = tile_cells<TileRows, TileColumns, Warps>;
    static constexpr bool key = Role == tensor::key;
    static constexpr bool full = traits::full;
    static constexpr block_shape shape = shape_of<Role, Format>;
    static constexpr int page = Format::page_tokens, dim = shape.dim;
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
    static constexpr bool token_scales = !key && !std::is_same_v<typename traits::factor, void>;
    static constexpr bool has_table = column_parameters || token_scales;
    static constexpr int tables = key && page == 16 ? 2 : 1;  // rows of two pages
    /// Cells below each other whose columns have the same parameters.
    static constexpr int cells_per_set = [] {
        if (!column_parameters) return Count;
        if (key && page % group != 0) return 1;  // a group ends where a page does
        const int together = group % 128 == 0 ? 4 : group % 64 == 0 ? 2 : 1;
        return Count % together == 0 && cells::each % together == 0 ? together : 1;
    }();
    static constexpr int sets = Count / cells_per_set;

    struct nothing {
        using P = void;
        static constexpr bool has_low = false;
        static constexpr int centre = 0;
    };
    template <class X, bool Full>
    struct set_of {
        using type = stored_set<X>;
    };
    template <class X>
    struct set_of<X, true> {
        using type = nothing;
    };
    using set_type = typename set_of<S, full>::type;

    std::uint32_t word[Count][words];
    [[no_unique_address]] std::conditional_t<row_parameters, set_type[Count][parts], nothing> of_rows;
    [[no_unique_address]] std::conditional_t<column_parameters, set_type[sets][tables], nothing> of_columns;
    std::uint32_t token_scale;

    /// Asks for the parameters of (token, channel).
    template <class Set>
    __device__ __forceinline__ static void load_set(Set& set, const std::byte* block, int token,
                                                    int channel) {
        const int at =
            traits::token_parameters ? channel / group * page + token : token / group * dim + channel;
        constexpr std::size_t scales = traits::scale_offset(shape), biases = traits::bias_offset(shape);
        const std::byte* numbers = nullptr;
        if constexpr (std::is_same_v<typename Set::P, coded>)
            numbers = block + biases +
                      static_cast<std::size_t>(kvq::detail::ceil_div(page, group) * dim + token / group * 6);
        set.load(block + scales, block + biases, at, numbers);
    }

    __device__ __forceinline__ void fetch(const cache_ref<Format>& cache, int head, const tile_tokens& tile,
                                          int first, int warp, int lane) {
        const int column = cells::column(warp);
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            if (!cells::exists(warp, first + i)) break;
            const int row = cells::row(warp, first + i);
            fetch_words(cache, head, tile, row, column, lane, i);
            if constexpr (column_parameters)
                if (i % cells_per_set == 0)
#pragma unroll
                    for (int t = 0; t < tables; ++t) {
                        const int token_in_tile = key ? row + t * piece_tokens : column + lane;
                        const int number = page_of(tile, token_in_tile);
                        set_type& set = of_columns[i / cells_per_set][t];
                        set = {};
                        if (number >= 0 && (key || token_in_tile < tile.count))
                            load_set(set, cache.template block<Role>(number, head),
                                     (tile.first + token_in_tile) % page, key ? column + lane : row);
                    }
        }
        if constexpr (token_scales) {
            using factor = typename traits::factor;
            const int number = page_of(tile, column + lane);
            token_scale = 0;
            if (number >= 0 && column + lane < tile.count) {
                const std::byte* const from = cache.template block<Role>(number, head) +
                                              S::token_scale_offset(shape) +
                                              (tile.first + column + lane) % page * parameter_width<factor>;
                if constexpr (std::is_same_v<factor, coded>)
                    // Code 0 is a number too: the bits of the float say whether there is a token.
                    token_scale = __float_as_uint(kvq::detail::token_scale_float::value(
                        fetch_word(reinterpret_cast<const std::uint8_t*>(from))));
                else if constexpr (sizeof(factor) == 2)
                    token_scale = __float_as_uint(
                        unpack_half<factor, 0>(fetch_word(reinterpret_cast<const std::uint16_t*>(from))));
                else
                    token_scale = fetch_word(reinterpret_cast<const std::uint32_t*>(from));
            }
        }
    }

    /// Dequantizes the cells to the tile at `to`; `table`: of this warp.
    __device__ __forceinline__ void store(std::uint32_t to, const tile_tokens& tile, int first,
                                          std::uint32_t table, int warp, int lane) const {
        const int column = cells::column(warp);
#pragma unroll
        for (int set = 0; set < sets; ++set) {
            if (!cells::exists(warp, first + set * cells_per_set)) break;
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
            static_for<4>([&](auto number) {
                constexpr int octet = decltype(number)::value;
                const octet_parameters shared = load_octet(table, octet, lane);
#pragma unroll
                for (int i = 0; i < cells_per_set; ++i) {
                    const int cell = set * cells_per_set + i;
                    if (!cells::exists(warp, first + cell)) break;
                    store_octet<octet>(to + octet_offset<TileRows>(cells::row(warp, first + cell) + lane,
                                                                   column / 8 + octet),
                                       tile, column, shared, of_row[i], cell);
                }
            });
        }
    }

private:
    __device__ __forceinline__ static int page_of(const tile_tokens& tile, int token_in_tile) {
        return __shfl_sync(0xffffffffu, tile.page, token_in_tile / piece_tokens);
    }
    __device__ __forceinline__ void fetch_words(const cache_ref<Format>& cache, int head,
                                                const tile_tokens& tile, int row, int column, int lane,
                                                int i) {
#pragma unroll
        for (int part = 0; part < parts; ++part) {
            const int token_in_tile = key ? row + lane : column + part * page_columns;
            const int number = page_of(tile, token_in_tile);
            const int token = (tile.first + token_in_tile) % page;
            const std::byte* const block = cache.template block<Role>(number < 0 ? 0 : number, head);
            const int block_row = key ? token : row + lane, block_column = key ? column : token;
            const auto* const at =
                reinterpret_cast<const std::uint32_t*>(block) +
                static_cast<std::size_t>((block_row & ~31) * row_words + block_row % height);
            const auto load = [&](int vector) { return number < 0 ? 0u : fetch_word(at + vector * height); };
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
            if constexpr (row_parameters) {
                of_rows[i][part] = {};
                if (number >= 0) load_set(of_rows[i][part], block, token, key ? column : row + lane);
            }
        }
    }
    /// [scales, biases, low parts, token scales][32 halves], for rows of up to two pages.
    __device__ __forceinline__ void fill_table(std::uint32_t table, int set, int lane) const {
#pragma unroll
        for (int t = 0; t < tables; ++t) {
            const std::uint32_t at = table + static_cast<std::uint32_t>(t * 256 + lane * 2);
            if constexpr (column_parameters) {
                const half_parameters h = of_columns[set][t].halves();
                store_half_word(at, h.scale);
                if constexpr (traits::has_bias) store_half_word(at + 64, h.bias);
                if constexpr (set_type::has_low) store_half_word(at + 128, h.low);
            }
            if constexpr (token_scales) store_half_word(at + 192, to_half(__uint_as_float(token_scale)));
        }
    }
    /// What the columns of an octet share.
    struct octet_parameters {
        uint4 scale, bias, low, factor;
    };
    __device__ __forceinline__ static octet_parameters load_octet([[maybe_unused]] std::uint32_t table,
                                                                  int octet, int lane) {
        octet_parameters p{};
        if constexpr (has_table) {
            const std::uint32_t from = table + (tables == 2 && lane >= piece_tokens ? 256u : 0u) +
                                       16u * static_cast<unsigned>(octet);
            if constexpr (column_parameters) {
                p.scale = load_shared_16(from);
                if constexpr (traits::has_bias) p.bias = load_shared_16(from + 64);
                if constexpr (set_type::has_low) p.low = load_shared_16(from + 128);
            }
            if constexpr (token_scales) p.factor = load_shared_16(from + 192);
        }
        return p;
    }
    template <int Octet>
    __device__ __forceinline__ void store_octet(std::uint32_t to, const tile_tokens& tile, int column,
                                                const octet_parameters& shared,
                                                [[maybe_unused]] const half_parameters (&of_row)[parts],
                                                int i) const {
        constexpr int part = Octet * 8 / page_columns;
        std::uint32_t x[4];
        if constexpr (full) {
            constexpr int first = part * part_words + Octet * 4 % part_words;
#pragma unroll
            for (int k = 0; k < 4; ++k) x[k] = as_halves<typename S::value_type>(word[i][first + k]);
            if (!key && tile.count < column + 32)  // bytes of tokens that do not exist are no numbers
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int left = tile.count - (column + Octet * 8 + 2 * k);
                    if (left < 2) x[k] = left < 1 ? 0u : x[k] & 0xffffu;
                }
        } else {
            constexpr int quads = page_columns / 4, first_quad = Octet * 2 % quads;
            const std::uint32_t low_quad = quad<part, first_quad>(i),
                                high_quad = quad<part, first_quad + 1>(i);
            x[0] = __byte_perm(low_quad, 0x64646464u, 0x4140);
            x[1] = __byte_perm(low_quad, 0x64646464u, 0x4342);
            x[2] = __byte_perm(high_quad, 0x64646464u, 0x4140);
            x[3] = __byte_perm(high_quad, 0x64646464u, 0x4342);
            uint4 scale = shared.scale, bias = shared.bias, low = shared.low;
            if constexpr (row_parameters) {
                const auto all = [](std::uint16_t half) {
                    const std::uint32_t w = twice(half);
                    return uint4{w, w, w, w};
                };
                scale = all(of_row[part].scale);
                bias = all(of_row[part].bias);
                low = all(of_row[part].low);
            }
            constexpr std::uint32_t raised =
                0xe400e400u + 0x00010001u * set_type::centre;  // -(1024 + centre)
            const std::uint32_t s[4] = {scale.x, scale.y, scale.z, scale.w};
            [[maybe_unused]] const std::uint32_t b[4] = {bias.x, bias.y, bias.z, bias.w},
                                                 l[4] = {low.x, low.y, low.z, low.w},
                                                 f[4] = {shared.factor.x, shared.factor.y, shared.factor.z,
                                                         shared.factor.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const std::uint32_t code = multiply_add_halves(x[k], 0x3c003c00u, raised);
                if constexpr (set_type::has_low)
                    x[k] = multiply_add_halves(code, s[k], multiply_add_halves(code, l[k], b[k]));
                else if constexpr (traits::has_bias)
                    x[k] = multiply_add_halves(code, s[k], b[k]);
                else
                    x[k] = multiply_halves(code, s[k]);
                if constexpr (token_scales) x[k] = multiply_halves(x[k], f[k]);
            }
        }
        store_shared_16(
            to, {__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]), __uint_as_float(x[3])});
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
    template <class T>
    __device__ __forceinline__ static std::uint32_t as_halves(std::uint32_t w) {
        if constexpr (std::is_same_v<T, float16>)
            return w;
        else
            return pack_halves<float16>(unpack_half<T, 0>(w), unpack_half<T, 1>(w));
    }
};

/// Can tiles be made of pages of this format?
template <tensor Role, class Format>
inline constexpr bool makes_tiles = [] {
    using S = scheme_of<Role, Format>;
    using traits = word_traits<S>;
    constexpr int page = Format::page_tokens, dim = dim_of<Role, Format>;
    constexpr bool shape_fits = (page == 16 || page % 32 == 0) && dim % 32 == 0 && dim <= 256;
    if constexpr (is_mixed<S>) {
        return false;
    } else if constexpr (traits::full) {
        return shape_fits && sizeof(typename S::value_type) == 2;
    } else {
        constexpr int axis = traits::token_parameters ? dim : page;
        return shape_fits && (traits::group == 0 || traits::group >= axis || traits::group % 32 == 0) &&
               !(Role == tensor::key && !std::is_same_v<typename traits::factor, void>);
    }
}();

/// 8 neighbouring numbers in device memory as halves.
template <class T>
__device__ __forceinline__ void load_halves(const T* from, std::uint32_t (&x)[4]) {
    if constexpr (sizeof(T) == 2) {
        if (reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
            const uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
            const std::uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int k = 0; k < 4; ++k)
                x[k] = std::is_same_v<T, float16>
                           ? w[k]
                           : pack_halves<float16>(unpack_half<T, 0>(w[k]), unpack_half<T, 1>(w[k]));
            return;
        }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) x[k] = pack_halves<float16>(to_float(from[2 * k]), to_float(from[2 * k + 1]));
}

/// A tile of new tokens in 16 bit: `count` tokens from `first` on of a head. Keys go row by row, values are transposed by lanes that have
/// a channel each.
template <tensor Role, int TileRows, int TileColumns, int Warps, class T>
__device__ __forceinline__ void copy_new_tile(const token_view<const T>& from, int head, int first, int count,
                                              std::uint32_t to, int warp, int lane) {
    if constexpr (Role == tensor::key) {
        constexpr int octets = TileColumns / 8;
#pragma unroll 4
        for (int i = warp * 32 + lane; i < TileRows * octets; i += Warps * 32) {
            const int token = i / octets, octet = i % octets;
            std::uint32_t x[4] = {};
            if (token < count) load_halves(from.at(first + token, head) + octet * 8, x);
            store_shared_16(
                to + octet_offset<TileRows>(token, octet),
                {__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]), __uint_as_float(x[3])});
        }
    } else {
        constexpr int column_cells = TileColumns / 32, cells = TileRows / 32 * column_cells;
#pragma unroll 1
        for (int number = warp; number < cells; number += Warps) {
            const int channel = number / column_cells * 32 + lane, column = number % column_cells * 32;
            const T* const at = from.at(first + column, head) + channel;
            std::uint32_t x[4][4];
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const auto number_at = [&](int token) {
                    return column + token < count ? to_float(at[token * from.token_stride]) : 0.0f;
                };
                x[i / 4][i % 4] = pack_halves<float16>(number_at(2 * i), number_at(2 * i + 1));
            }
#pragma unroll
            for (int octet = 0; octet < 4; ++octet)
                store_shared_16(to + octet_offset<TileRows>(channel, column / 8 + octet),
                                {__uint_as_float(x[octet][0]), __uint_as_float(x[octet][1]),
                                 __uint_as_float(x[octet][2]), __uint_as_float(x[octet][3])});
        }
    }
}

}  // namespace kvq::inline KVQ_TAGGED::cuda::detail
