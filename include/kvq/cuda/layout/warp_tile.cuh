// A warp_tile: the tokens of one block that a warp handles at a time, as a matrix for tensor cores, and its
// way into shared memory.
//
//   keys    rows = tokens,   columns = channels        one block's warp tile is one contiguous run of bytes
//                                                      (+ parameters)
//   values  rows = channels, columns = tokens          one run per tile of 32 channels (+ parameters)
//
// Lane (g, t) owns rows 4g..4g+3 of every tile (one 16-byte load: rows g and g+8 of two m16 tiles) and the
// t-th quarter of the columns. The four quarters of a plane lie whole lines of 128 bytes apart, that is in
// the same banks; so the 16-byte vectors of a line are stored at vector ^ 2t, which makes every load of a
// warp conflict-free. Copies are fastest where bytes lie as far behind a line of 128 bytes in shared memory
// as in device memory and sectors of 32 bytes stay whole. So a warp tile of blocks that do not start on lines
// begins as far behind its slot ("skewed"), its copies start on lines, and t is that of the line of shared
// memory that a vector falls into.
// Contract: bytes arrive unchanged; rows or columns beyond the block may hold any finite codes, never foreign
// memory.
#pragma once

#include "unpack_codes.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// What the channels of run `r` share, in a warp tile at `at` whose first token is `first` of its page.
template <class WarpTile>
__device__ __forceinline__ group_line<typename WarpTile::parameter> line_of(std::uint32_t at, int first,
                                                                            int r) {
    if constexpr (WarpTile::has_byte_params)
        return group_line<kvq::byte_params>::load(
            at + WarpTile::shared_at +
            6u * static_cast<std::uint32_t>(
                     (WarpTile::tokens == WarpTile::page ? 0 : first / WarpTile::group) + r));
    else
        return {};
}

/// MaySkew: may it begin behind its slot, as the blocks of Pair do behind lines? Bands: neighbouring warps
/// that share the channels of their tokens. A warp tile has those of one band, `dim` of them.
template <tensor Role, class Pair, int Tokens, bool MaySkew = true, int Bands = 1>
struct code_warp_tile {
    using scheme = scheme_of<Role, Pair>;
    using traits = word_traits<scheme>;
    using parameter = typename traits::parameter;
    static constexpr bool key = Role == tensor::key;
    static constexpr bool mixed = false;   // as in mixed_keys.cuh
    static constexpr bool joined = false;  // as in joined_warp_tile.cuh
    static constexpr bool full = traits::full;
    static constexpr int all_channels = dim_of<Role, Pair>, dim = all_channels / Bands;
    static constexpr int page = Pair::page_tokens, tokens = Tokens;
    static constexpr block_shape shape = shape_of<Role, Pair>;

    /// What differs between heads: nothing.
    struct head_type {};
    __device__ __forceinline__ static head_type head_of(const std::uint16_t*) { return {}; }

    // Parameters: `runs` runs of `run` numbers each.
    static constexpr bool token_parameters = traits::token_parameters;
    static constexpr int axis = token_parameters ? dim : page;  // the axis that is cut into groups
    static constexpr int group = traits::group == 0 || traits::group > axis ? axis : traits::group;
    static constexpr int runs = full               ? 0
                                : token_parameters ? ceil_div(dim, group)
                                                   : larger(1, Tokens / group);
    /// Channels that share the parameters of a token, in any band.
    static constexpr int page_group =
        traits::group == 0 || traits::group > all_channels ? all_channels : traits::group;
    static constexpr int run = token_parameters ? Tokens : dim;
    static constexpr int width = parameter_width<parameter>;
    static constexpr int run_bytes = run * width;
    static constexpr int section = runs * run_bytes;
    static constexpr bool has_byte_params = std::is_same_v<parameter, kvq::byte_params>;
    static constexpr int shared_bytes = has_byte_params ? 6 * ceil_div(page, group) : 0;  // in the page

    // Token scales, which stand behind parameters of channels.
    using token_scale_type = typename traits::token_scale_type;
    static constexpr bool has_token_scales = !std::is_same_v<token_scale_type, void>;
    static constexpr int token_scale_width = [] {
        if constexpr (has_token_scales)
            return parameter_width<token_scale_type>;
        else
            return 0;
    }();
    static constexpr int token_scale_skew =
        shared_bytes % 16;  // they start so far behind a vector of 16 bytes
    /// x^ = b + s (code - code_zero) code_unit, where codes have a bias.
    static constexpr float code_unit = 1.0f, code_zero = 0.0f;
    static constexpr bool centred = token_parameters || full || scheme::code_bits > 4;  // see fold_rows
    /// Are the weights of tokens multiplied by anything?
    static constexpr bool scales_tokens = token_parameters || has_token_scales;
    /// By how much these numbers are too large where they are read.
    static constexpr int scale_lift = [] {
        if constexpr (has_token_scales)
            return token_scale_lift<token_scale_type>;
        else
            return 1;
    }();

    // Rows and columns.
    static constexpr int rows = key ? Tokens : dim;
    static constexpr int column_groups = key && token_parameters && !full ? runs : 1;
    static constexpr int units = (key ? dim : Tokens) / traits::columns_per_unit;
    static constexpr int page_units = (key ? all_channels : page) / traits::columns_per_unit;
    static constexpr int group_units = units / column_groups;
    static constexpr int step_units = traits::units_per_step;
    static constexpr int group_steps = ceil_div(group_units, step_units);
    static constexpr int lane_steps = ceil_div(group_steps, 4);
    /// Where there are fewer than four steps, neighbouring lanes share words: each takes a part of a step.
    static constexpr bool shares_words = column_groups == 1 && group_units % 8 == 0 &&
                                         group_units / 4 < step_units && step_units % (group_units / 4) == 0;
    static constexpr int lane_units =
        shares_words ? group_units / 4 : lane_steps * step_units;  // of one column group
    static constexpr int pairs = ceil_div(lane_units, 2);          // products of k = 2 units per lane
    static constexpr int lines = traits::lines(units);             // of a tile in shared memory
    static constexpr int page_lines = traits::lines(page_units);   // of a tile in the page
    static constexpr int tile_height = key ? smaller(32, page) : 32;
    static constexpr int tiles = ceil_div(rows, tile_height);
    static constexpr int last_height = rows - (tiles - 1) * tile_height;

    /// Do sums of products with codes of up to 8 bits stay below 2^31? The query has 15 bits and a sign,
    /// weights have 16.
    static constexpr bool byte_sums_fit = 4 * group_units <= (key ? 256 : 128);
    /// Products may leave the upper quads of a word where they are, as codes times set_weight, and add them
    /// to sums of their own ("set" 1): that saves the shifts. Quads q and q + 2 of 2-bit words need one shift
    /// for both; 4-bit words go by two. More than 4 query rows have no registers for two sets.
    KVQ_HD static constexpr int sets(int rows4) {
        if (rows4 > 1 || full || traits::plane_count != 1 || !byte_sums_fit || sharers(0) > 1) return 1;
        const int per_word = traits::units_per_word(0);
        return per_word == 4 || (per_word == 2 && lane_steps % 2 == 0) ? 2 : 1;
    }
    /// By how many bits for_pairs leaves codes too high in the sums of `sets` sets. Narrow ones go to the top
    /// of their bytes: shifts to the left can be multiplications, which spares the integer pipe (4 bits with
    /// fp16 parameters and more: 0 to 1 % slower).
    KVQ_HD static constexpr int raised(int sets) {
        if constexpr (full) {
            return 0;
        } else {
            constexpr int bits = scheme::code_bits;
            if (sets == 2) return bits == 2 ? 4 : 0;
            return byte_sums_fit && bits < (has_byte_params ? 5 : 4) ? 8 - bits : 0;
        }
    }
    KVQ_HD static constexpr int set_weight(int sets) {
        return sets == 1 ? 1 : traits::units_per_word(0) == 2 ? 16 : 4;
    }

    // Shared memory.
    /// Neighbouring lanes that share the words of plane `p`.
    KVQ_HD static constexpr int sharers(int p) { return larger(1, traits::units_per_word(p) / lane_units); }
    /// Lines of a quarter of plane `p`: those of a lane, of one column group.
    KVQ_HD static constexpr int lane_lines(int p) {
        return larger(1, lane_units / traits::units_per_word(p));
    }
    KVQ_HD static constexpr int plane_lines(int p) { return ceil_div(units, traits::units_per_word(p)); }
    /// Quarters that hold the same number of lines, 0 if they do not. Short warp tiles may have only one or
    /// two: then other lanes read the same lines, and their weights are zero.
    static constexpr int quarters =
        group_units == 4 * lane_units ? 4
        : column_groups == 1 && (group_units == 2 * lane_units || group_units == lane_units)
            ? group_units / lane_units
            : 0;
    static constexpr bool aligned = quarters > 0;
    /// The number of plane p's last quarter.
    KVQ_HD static constexpr int last_quarter(int p) { return (aligned ? quarters : 4) / sharers(p) - 1; }
    static constexpr int codes_bytes = rows * lines * 4;
    static constexpr int scale_at = round_up(codes_bytes, 16);
    static constexpr int bias_at = scale_at + section;
    static constexpr int shared_at = bias_at + (traits::has_bias ? section : 0);
    static constexpr bool whole =
        has_byte_params && Tokens == page && Bands == 1;  // all behind the codes in one run, as in the page
    static constexpr int token_scale_at =
        shared_at + (whole ? shared_bytes : round_up(shared_bytes, 16) + token_scale_skew);
    static constexpr int bytes = round_up(token_scale_at + Tokens * token_scale_width, 16);
    /// Blocks that do not start on lines of 128 bytes, see above; not where quarters differ, which is rare.
    static constexpr bool skewed =
        MaySkew && aligned && tile_height == 32 && last_height == 32 &&
        (key ? Pair::key_block_bytes : Pair::value_block_bytes) % std::size_t{128} != 0;
    static constexpr int slot_bytes = bytes + (skewed ? 112 : 0);

    /// Why the kernels of warps do not take this shape; null: they do. (Everything else goes through
    /// attend_any.cuh.)
    static constexpr const char* no_tile = []() -> const char* {
        if (dim % 16 != 0) return "a head size is not a multiple of 16";
        if (page != 16 && page % 32 != 0) return odd_pages;
        if (Tokens < 16 || page % Tokens != 0 || (key && Tokens % tile_height != 0))
            return "the tokens that a warp takes do not divide a page";
        if (full) return traits::columns_per_unit == 2 ? nullptr : wide_values;
        if (has_token_scales && has_byte_params != (token_scale_width == 1))
            return "either parameters or token scales have 8 bits, not both";
        if (token_parameters && group != dim) {
            if (!key && group % 32 != 0) return odd_groups;
            if (key && dim % group != 0) return "groups do not divide the channels of keys";
            if (key && group % (4 * step_units) != 0) return "words of codes have channels of two groups";
        }
        if (!token_parameters && group != page) {
            if (group % 32 != 0) return odd_groups;
            if (page % group != 0) return "groups do not divide a page";
        }
        if (!token_parameters && group % Tokens != 0 && (!key || Tokens % group != 0))
            return "groups and the tokens that a warp takes do not divide each other";
        if (!key && Tokens != page && (Tokens / 4) % step_units != 0)
            return "words of codes have tokens of two warps";
        return nullptr;
    }();

    /// Channel parameters of keys are read by lanes 128 bytes apart, so their 16-byte vectors are permuted as
    /// well.
    static constexpr bool permuted =
        key && !full && !token_parameters && !has_byte_params && run_bytes % 64 == 0;
    __device__ __forceinline__ static std::uint32_t parameter_byte(int at) {
        return static_cast<std::uint32_t>(permuted ? at ^ ((at >> 7 & 3) << 4) : at);
    }

    // ---- to shared memory ----

    /// Starts copying the warp tile that begins at token `first` of `block` to `to`, which is as far behind
    /// its slot as the block is behind a line if the warp tile is skewed. vector_bytes: 16, or 0 where there
    /// is no block. All lanes of a warp together.
    __device__ __forceinline__ static void copy(std::uint32_t to, const std::byte* block, int first, int lane,
                                                std::uint32_t vector_bytes, const head_type& = {},
                                                [[maybe_unused]] int band = 0) {
        copy_codes(to, block, first, lane, vector_bytes, band);
        if constexpr (!full)
            copy_parameters(to, block + traits::scale_offset(shape), first, lane, vector_bytes, band);
    }
    /// The codes alone.
    __device__ __forceinline__ static void copy_codes(std::uint32_t to, const std::byte* block, int first,
                                                      int lane, std::uint32_t vector_bytes,
                                                      [[maybe_unused]] int band) {
        const int skew = skewed ? static_cast<int>(to >> 4 & 7u) : 0;
        const std::uint32_t slot = to - 16u * static_cast<std::uint32_t>(skew);
        const std::byte* const from = block + (lane - skew) * 16;
        if constexpr (key && aligned && traits::plane_count == 1 && tile_height == 32 && Bands == 1) {
            // Tiles follow each other.
            copy_lines<0, tiles * lines, 32>(slot, from + static_cast<std::size_t>(first) * (lines * 4), skew,
                                             lane, vector_bytes);
        } else {
            static_for<tiles>([&](auto tile) {
                constexpr int T = decltype(tile)::value;
                constexpr int height = T + 1 == tiles ? last_height : tile_height;
                static_for<traits::plane_count>([&](auto plane) {
                    constexpr int p = decltype(plane)::value;
                    constexpr int n = plane_lines(p), before = traits::first_line(p, units);
                    std::size_t line;  // in units of its bytes
                    if constexpr (key) {
                        line =
                            static_cast<std::size_t>((first / tile_height + T) * page_lines +
                                                     traits::first_line(p, page_units) + band_lines(p, band));
                    } else {
                        constexpr int behind =
                            T * (tile_height / height) * page_lines + traits::first_line(p, page_units);
                        constexpr int columns = traits::columns_per_unit * traits::units_per_word(p);
                        line = static_cast<std::size_t>(behind + band_lines(p, band) +
                                                        (Tokens == page ? 0 : first / columns));
                    }
                    copy_lines<p, n, height>(slot + T * tile_height * lines * 4 + before * (height * 4),
                                             from + line * (height * 4), skew, lane, vector_bytes);
                });
            });
        }
    }
    /// How many lines of a tile of keys (plane `p`), or of all tiles of values, lie before those of a band.
    KVQ_HD static constexpr int band_lines(int p, int band) {
        return Bands == 1 ? 0 : band * (key ? plane_lines(p) : tiles * page_lines);
    }

    // ---- from shared memory ----

    /// Units of the lane in tile `Tile`, column group `Group`, two at a time: f(set, number of unit a, of
    /// unit b, rows of unit a, of unit b). Those of set 1 are multiplied by set_weight, all by 2^raised.
    template <int Tile, int Group, int Sets, class F>
    __device__ __forceinline__ static void for_pairs(std::uint32_t at, const lane_id& id, F&& f) {
        constexpr std::integral_constant<int, 0> first;
        constexpr std::integral_constant<int, 1> second;
        if constexpr (step_units == 1) {
            static_for<pairs>([&](auto i) {
                constexpr int A = 2 * decltype(i)::value, B = A + 1;
                constexpr std::integral_constant<int, A> unit_a;
                constexpr std::integral_constant<int, B> unit_b;
                const uint4 a = line_words<Tile, Group, A, 0, 0>(at, id);
                if constexpr (B < lane_units)
                    f(first, unit_a, unit_b, a, line_words<Tile, Group, B, 0, 0>(at, id));
                else
                    f(first, unit_a, unit_b, a, uint4{0, 0, 0, 0});
            });
        } else if constexpr (Sets == 2 && step_units == 2) {
            static_for<lane_steps / 2>([&](auto j) {
                constexpr int J = 2 * decltype(j)::value;
                constexpr std::integral_constant<int, 2 * J> low_a;
                constexpr std::integral_constant<int, 2 * J + 1> high_a;
                constexpr std::integral_constant<int, 2 * J + 2> low_b;
                constexpr std::integral_constant<int, 2 * J + 3> high_b;
                const uint4 a = line_words<Tile, Group, J, 0, 0>(at, id),
                            b = line_words<Tile, Group, J + 1, 0, 0>(at, id);
                f(first, low_a, low_b, masked(a, 0x0f0f0f0fu), masked(b, 0x0f0f0f0fu));
                f(second, high_a, high_b, masked(a, 0xf0f0f0f0u), masked(b, 0xf0f0f0f0u));
            });
        } else if constexpr (Sets == 2) {
            static_for<lane_steps>([&](auto j) {
                constexpr int J = 4 * decltype(j)::value;
                constexpr std::integral_constant<int, J> unit_0;
                constexpr std::integral_constant<int, J + 1> unit_1;
                constexpr std::integral_constant<int, J + 2> unit_2;
                constexpr std::integral_constant<int, J + 3> unit_3;
                const uint4 a = line_words<Tile, Group, decltype(j)::value, 0, 0>(at, id);
                const uint4 b{a.x << 4, a.y << 4, a.z << 4, a.w << 4};
                f(first, unit_0, unit_2, masked(b, 0x30303030u), masked(a, 0x30303030u));
                f(second, unit_1, unit_3, masked(b, 0xc0c0c0c0u), masked(a, 0xc0c0c0c0u));
            });
        } else {
            static_for<lane_steps>([&](auto j) {
                constexpr int J = decltype(j)::value;
                uint4 words[traits::lines(step_units)];
                static_for<traits::plane_count>([&](auto plane) {
                    constexpr int p = decltype(plane)::value;
                    constexpr int n = smaller(lane_lines(p), step_units / traits::units_per_word(p));
                    static_for<n>([&](auto x) {
                        words[traits::first_line(p, step_units) + decltype(x)::value] =
                            own_part<p>(line_words<Tile, Group, J, p, decltype(x)::value>(at, id), id);
                    });
                });
                static_for<smaller(step_units, lane_units) / 2>([&](auto x) {
                    constexpr int X = decltype(x)::value;
                    constexpr std::integral_constant<int, J * step_units + 2 * X> unit_a;
                    constexpr std::integral_constant<int, J * step_units + 2 * X + 1> unit_b;
                    f(first, unit_a, unit_b, traits::template unpack<2 * X, raised(Sets) != 0>(words),
                      traits::template unpack<2 * X + 1, raised(Sets) != 0>(words));
                });
            });
        }
    }
    /// The lane's units of words of plane `Plane` that it shares come first.
    template <int Plane>
    __device__ __forceinline__ static uint4 own_part(const uint4& v, const lane_id& id) {
        if constexpr (sharers(Plane) == 1) return v;
        const int right = id.t % sharers(Plane) * (8 / traits::units_per_word(Plane) * lane_units);
        return {v.x >> right, v.y >> right, v.z >> right, v.w >> right};
    }
    __device__ __forceinline__ static uint4 masked(const uint4& v, std::uint32_t mask) {
        return {v.x & mask, v.y & mask, v.z & mask, v.w & mask};
    }

    /// By how many bits the codes of a unit of one plane lie too high where for_half_units leaves them.
    KVQ_HD static constexpr int place(int unit) {
        constexpr int per_word = traits::units_per_word(0);
        return 8 / per_word * (unit % per_word);
    }
    /// Units of the lane's line `Line` in tile `Tile`, codes as 16-bit numbers: f(number of the unit, columns
    /// 0 and 2 of four rows, columns 1 and 3), times 2^place.
    template <int Tile, int Line, class F>
    __device__ __forceinline__ static void for_line_halves(std::uint32_t at, const lane_id& id,
                                                           F&& f) requires(!full &&
                                                                           traits::plane_count == 1) {
        constexpr int per_word = traits::units_per_word(0);
        const uint4 a = own_part<0>(line_words<Tile, 0, Line, 0, 0>(at, id), id),
                    b{a.x >> 8, a.y >> 8, a.z >> 8, a.w >> 8};
        static_for<smaller(per_word, lane_units)>([&](auto x) {
            constexpr std::integral_constant<int, Line * per_word + decltype(x)::value> unit;
            constexpr std::uint32_t mask = ((1u << 8 / per_word) - 1u) * 0x00010001u << place(unit.value);
            f(unit, masked(a, mask), masked(b, mask));
        });
    }
    /// Of all lines.
    template <int Tile, class F>
    __device__ __forceinline__ static void for_half_units(std::uint32_t at, const lane_id& id, F&& f) {
        static_for<larger(1, lane_units / traits::units_per_word(0))>(
            [&](auto line) { for_line_halves<Tile, decltype(line)::value>(at, id, f); });
    }

    /// Parameters of the four tokens or channels that start at `index` of run `r`; scales in units of the
    /// line's.
    __device__ __forceinline__ static float4 scales(std::uint32_t at, int r, int index) {
        return load_scales<parameter>(at + scale_at + parameter_byte((r * run + index) * width));
    }
    __device__ __forceinline__ static float4 biases(std::uint32_t at, int r,
                                                    int index) requires(!has_byte_params) {
        return load_parameters<parameter>(at + bias_at + parameter_byte((r * run + index) * width));
    }
    /// Of eight, where `index` is a multiple of eight.
    __device__ __forceinline__ static void eight_scales(std::uint32_t at, int r, int index, float4& a,
                                                        float4& b) {
        if constexpr (has_byte_params) {
            const uint2 v = load_shared_8(at + static_cast<std::uint32_t>(scale_at + r * run + index));
            a = small_halves<kvq::detail::scale_float>(v.x).floats();
            b = small_halves<kvq::detail::scale_float>(v.y).floats();
        } else {
            load_eight<parameter>(at + scale_at, (r * run + index) * width, a, b);
        }
    }
    __device__ __forceinline__ static void eight_biases(std::uint32_t at, int r, int index, float4& a,
                                                        float4& b) requires(!has_byte_params) {
        load_eight<parameter>(at + bias_at, (r * run + index) * width, a, b);
    }
    /// Codes of 8-bit biases, four to a word.
    __device__ __forceinline__ static std::uint32_t bias_bytes(std::uint32_t at, int r, int index) {
        return load_shared_4(at + static_cast<std::uint32_t>(bias_at + r * run + index));
    }
    __device__ __forceinline__ static void eight_bias_bytes(std::uint32_t at, int r, int index,
                                                            std::uint32_t& a, std::uint32_t& b) {
        const uint2 v = load_shared_8(at + static_cast<std::uint32_t>(bias_at + r * run + index));
        a = v.x, b = v.y;
    }
    /// What the weights of four tokens are multiplied by (of keys with token scales: their scores), in run
    /// `r`, times scale_lift.
    __device__ __forceinline__ static float4 token_scales(std::uint32_t at, int r, int token) {
        if constexpr (has_token_scales)
            return load_token_scales<token_scale_type, token_scale_skew % 4>(
                at + static_cast<std::uint32_t>(token_scale_at + token * token_scale_width));
        else
            return scales(at, r, token);
    }
    template <class P>
    __device__ __forceinline__ static void load_eight(std::uint32_t at, int byte, float4& a, float4& b) {
        if constexpr (sizeof(P) == 2) {
            const uint4 v = load_shared_16(at + parameter_byte(byte));
            a = {unpack_half<P, 0>(v.x), unpack_half<P, 1>(v.x), unpack_half<P, 0>(v.y),
                 unpack_half<P, 1>(v.y)};
            b = {unpack_half<P, 0>(v.z), unpack_half<P, 1>(v.z), unpack_half<P, 0>(v.w),
                 unpack_half<P, 1>(v.w)};
        } else {
            a = load_parameters<P>(at + parameter_byte(byte));
            b = load_parameters<P>(at + parameter_byte(byte + 16));
        }
    }

    /// Only keys of mixed widths need scratch.
    KVQ_HD static constexpr int scratch_bytes(int) { return 0; }

    /// Zeroes the columns (tokens of values) outside [from, to): what a page holds there may be anything,
    /// even NaN.
    __device__ __forceinline__ static void clear_columns(std::uint32_t at, const lane_id& id, int from,
                                                         int to) requires(!key && full) {
        from = smaller(larger(from, 0), Tokens);
        to = smaller(larger(to, from), Tokens);
        // A line holds two tokens of the channels of a tile. Lines before and behind that are not all inside:
        const int before = (from + 1) / 2, outside = before + lines - to / 2;
#pragma unroll 1
        for (int i = 0; i < outside; ++i) {
            const int line = i < before ? i : to / 2 + i - before, token = 2 * line;
            const std::uint32_t keep = (token >= from && token < to ? 0xffffu : 0u) |
                                       (token + 1 >= from && token + 1 < to ? 0xffff0000u : 0u);
            static_for<tiles>([&](auto tile) {
                constexpr int T = decltype(tile)::value;
                constexpr int height = T + 1 == tiles ? last_height : tile_height;
                const std::uint32_t turned =
                    height == 32 ? static_cast<std::uint32_t>(line / lane_lines(0) & last_quarter(0)) << 5
                                 : 0u;
                const std::uint32_t address =
                    at +
                    (static_cast<std::uint32_t>(4 * (T * tile_height * lines + line * height + id.lane)) ^
                     turned);
                if (id.lane < height) store_word(address, load_shared_4(address) & keep);
            });
        }
    }

    /// Zeroes the parameters of tokens outside [from, to), for the same reason. 8-bit token scales are never
    /// NaN.
    static constexpr bool clears_parameters =
        !full &&
        (token_parameters || (has_token_scales && !std::is_same_v<token_scale_type, kvq::byte_params>));
    __device__ __forceinline__ static void clear_parameters(std::uint32_t at, const lane_id& id, int from,
                                                            int to) requires(clears_parameters) {
        constexpr int size = token_parameters ? width : token_scale_width;
        constexpr int n = token_parameters ? runs * run : Tokens;
#pragma unroll 1
        for (int i = id.lane; i < n; i += warp_size) {
            const int token = i % Tokens;
            if (token >= from && token < to) continue;
            for (int part = 0; part < (token_parameters && traits::has_bias ? 2 : 1); ++part) {
                const int section_at = !token_parameters ? token_scale_at : part ? bias_at : scale_at;
                const std::uint32_t address = at + static_cast<std::uint32_t>(section_at + i * size);
                if constexpr (size == 4)
                    store_word(address, 0);
                else
                    store_half_word(address, 0);
            }
        }
    }

protected:
    /// Copies `Lines` lines of plane `Plane` that follow each other to `to`; `from`: of the lane's first
    /// vector. Lanes whose first vector lies before the lines take one behind the others: there t is 0.
    template <int Plane, int Lines, int Height>
    __device__ __forceinline__ static void copy_lines(std::uint32_t to, const std::byte* from,
                                                      [[maybe_unused]] int skew, int lane,
                                                      std::uint32_t vector_bytes) {
        constexpr int vectors = Lines * Height / 4, turns = ceil_div(vectors, warp_size);
        constexpr int of_quarter = lane_lines(Plane), last = last_quarter(Plane);
        constexpr bool full_turns = vectors % warp_size == 0;
        static_assert(!skewed || Lines % ((last + 1) * of_quarter) == 0);
        static_for<turns>([&](auto i) {
            constexpr int I = decltype(i)::value;
            int t = 0;
            if constexpr (Height == 32) {
                if constexpr (of_quarter % 4 == 0)
                    t = (I / (of_quarter / 4)) & last;
                else if constexpr (4 % of_quarter == 0)
                    t = (lane / (8 * of_quarter) + I * (4 / of_quarter)) & last;
                else
                    t = ((lane / 8 + 4 * I) / of_quarter) & last;
            }
            int at = ((lane * 16) ^ (t << 5)) + I * 512, distance = I * 512;
            bool inside = full_turns || I * warp_size + lane - skew < vectors;
            if constexpr (skewed && I == 0) {
                if (lane < skew) {
                    inside = full_turns;
                    at = lane * 16 + turns * 512;
                    distance = turns * 512;
                }
            }
            if (inside) copy_async(to + static_cast<std::uint32_t>(at), from + distance, vector_bytes);
        });
    }

    /// Everything behind the codes; `from`: the scales of the block. As few copies as there are lanes for.
    __device__ __forceinline__ static void copy_parameters(std::uint32_t to, const std::byte* from, int first,
                                                           int lane, std::uint32_t vector_bytes,
                                                           [[maybe_unused]] int band) {
        constexpr int sections = traits::has_bias ? 2 : 1, section_vectors = section / 16;
        constexpr int page_section =
            static_cast<int>(traits::bias_offset(shape) - traits::scale_offset(shape));
        constexpr int shared_vectors = (whole ? bytes - shared_at : round_up(shared_bytes, 16)) / 16;
        constexpr int last_vectors =
            has_token_scales && !whole ? round_up(token_scale_skew + Tokens * token_scale_width, 16) / 16 : 0;
        constexpr int behind = sections * section_vectors, vectors = behind + shared_vectors + last_vectors;
        static_for<ceil_div(vectors, warp_size)>([&](auto i) {
            const int vector = decltype(i)::value * warp_size + lane;
            const bool bias = sections == 2 && vector >= section_vectors;
            const int byte = (vector - (bias ? section_vectors : 0)) * 16;
            int at = scale_at + (bias ? section : 0) + static_cast<int>(parameter_byte(byte)),
                source = (bias ? page_section : 0) + byte;
            if constexpr (token_parameters) {
                source += (runs == 1 ? 0 : byte / run_bytes * ((page - run) * width)) + first * width;
                if constexpr (page_group < all_channels) source += band * dim / page_group * (page * width);
            } else {
                source += first / group * (Bands * run_bytes);
                if constexpr (Bands > 1)
                    source +=
                        (runs == 1 ? 0 : byte / run_bytes * ((Bands - 1) * run_bytes)) + band * run_bytes;
            }
            if constexpr (shared_vectors + last_vectors > 0) {
                constexpr int end = sections * page_section;  // of the parameters
                if (vector >= behind) {
                    at = shared_at + (vector - behind) * 16;
                    source = end + (vector - behind) * 16;
                }
                if constexpr (last_vectors > 0) {
                    if (vector >= behind + shared_vectors) {
                        const int distance = (vector - behind - shared_vectors) * 16 - token_scale_skew;
                        at = token_scale_at + distance;
                        source = end + shared_bytes + distance + first * token_scale_width;
                    }
                }
            }
            if (vectors % warp_size == 0 || vector < vectors)
                copy_async(to + static_cast<std::uint32_t>(at), from + source, vector_bytes);
        });
    }

public:
    /// The four rows' words of one line of the lane.
    template <int Tile, int Group, int Step, int Plane, int X>
    __device__ __forceinline__ static uint4 line_words(std::uint32_t at, const lane_id& id) {
        constexpr int per = step_units / traits::units_per_word(Plane);
        constexpr int height = Tile + 1 == tiles ? last_height : tile_height;
        constexpr int of_quarter = lane_lines(Plane), before = traits::first_line(Plane, units);
        constexpr int line = (Group * group_steps + Step) * per + X;  // of the first quarter
        if constexpr (aligned && height == 32) {
            constexpr int offset = Tile * tile_height * lines * 4 + (before + line) * 128;
            const int quarter = id.t / sharers(Plane) & last_quarter(Plane);
            const auto behind = static_cast<std::uint32_t>(quarter * (of_quarter * 128));
            if constexpr (skewed) {
                // The vector may fall into the next line, and behind the quarter's last one into the next
                // quarter.
                const std::uint32_t in_line = (at & 127u) + 16u * static_cast<std::uint32_t>(id.g);
                std::uint32_t t = static_cast<std::uint32_t>(quarter);
                if constexpr ((line + 1) % of_quarter == 0)
                    t = (t + (in_line >> 7)) & static_cast<std::uint32_t>(last_quarter(Plane));
                return load_shared_16((at & ~127u) + behind + (in_line ^ (t << 5)) + offset);
            } else {
                return load_shared_16(at + behind + static_cast<std::uint32_t>((id.g * 16) ^ (quarter << 5)) +
                                      offset);
            }
        } else {
            constexpr int last = plane_lines(Plane) - 1;
            const int own = smaller(line + id.t / sharers(Plane) * of_quarter, last);
            const std::uint32_t tile = at + Tile * tile_height * lines * 4 + before * (height * 4);
            if constexpr (height == 32)
                return load_shared_16(
                    tile + static_cast<std::uint32_t>(own * 128) +
                    static_cast<std::uint32_t>((id.g * 16) ^ ((own / of_quarter & 3) << 5)));
            else
                return load_shared_16(tile + static_cast<std::uint32_t>(own * height * 4 +
                                                                        smaller(id.g * 16, height * 4 - 16)));
        }
    }
};

}}}  // namespace kvq::cuda::detail
