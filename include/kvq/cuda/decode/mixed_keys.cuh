// Keys of mixed widths (schemes/scheme_codes.hpp) as a warp tile of the warp kernel: as warp_tile.cuh and
// key_product.cuh, except that where one width ends and the next begins differs between heads.
//
//   query
//     permuted once per item (place = order of the plan), folded once per group of tokens, as everywhere
//   bytes    high and low ones lie in shared memory, [tile of columns][column][quad], since their numbers are
//            found at run time
//   scores   one width after the other, a step of 8 quads (one product) at a time: lane (g, t) takes quads 2t
//            and 2t + 1 of the step, at any width but 8 bits: there t and t + 4, whose words lie in different
//            banks. Codes are shifted to the top of their bytes (scales are those of such codes), so that a
//            fixed-point step weighs the same in every column and all widths share their sums.
//
// A segment's bytes start at a multiple of a step; what lies between is zero, and with it whatever a step
// reads behind the codes.
// Contract: as key_product.cuh; any plan of the scheme, and none.
#pragma once

#include "../layout/block_access.cuh"
#include "../layout/joined_warp_tile.cuh"
#include "../layout/plane_warp_tile.cuh"
#include "half_keys.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

template <class Pair, int Tokens>
struct mixed_warp_tile {
    using scheme = typename Pair::keys;
    using width_list = typename scheme::width_list;
    using head_type = typename scheme::width_quads;
    static constexpr bool key = true, full = false, mixed = true, joined = false, token_parameters = false;
    static constexpr int count = width_list::count;
    static constexpr int dim = Pair::head_dim;
    static constexpr int page = Pair::page_tokens, tokens = Tokens;
    static constexpr block_shape shape = Pair::key_shape();
    static constexpr int group =
        scheme::granularity_type::group == 0 || scheme::granularity_type::group > page
            ? page
            : scheme::granularity_type::group;
    static constexpr int quads = dim / 4;
    /// Bits of the codes that products see. Sums stay below 2^31.
    static constexpr int code_bits = dim <= 256 ? 8 : width_list::values[0];
    static constexpr bool centred = width_list::values[0] > 4;  // as in warp_tile.cuh

    // Tiles of 32 tokens; all widths of a tile do not lie together, but all tiles of a width.
    static constexpr int tile_height = 32;
    static constexpr int tiles = ceil_div(Tokens, tile_height);
    static constexpr int row_words = scheme::row_words(dim);

    using parameter = typename scheme::parameter;
    static constexpr bool has_byte_params = std::is_same_v<parameter, kvq::byte_params>;
    static constexpr int width = parameter_width<parameter>;
    static constexpr int runs = larger(1, Tokens / group);
    static constexpr int run_bytes = dim * width, section = runs * run_bytes;
    static constexpr int page_section = ceil_div(page, group) * run_bytes;
    static constexpr int shared_bytes = has_byte_params ? 6 * ceil_div(page, group) : 0;

    // Shared memory: as in the page, with Tokens rows. Where blocks do not start on lines of 128 bytes, the
    // codes' last one is not shared with parameters, since its vectors are permuted. The last step of the
    // last width may read three lines too many, of 8 bits seven.
    static constexpr bool skewed = Pair::key_block_bytes % std::size_t{128} != 0;  // as in warp_tile.cuh
    static constexpr int codes_bytes = Tokens * row_words * 4;
    static constexpr int scale_at = codes_bytes + (skewed ? 128 : 0);
    static constexpr int bias_at = scale_at + section;
    static constexpr int shared_at = bias_at + section;
    static constexpr int bytes = larger(shared_at + round_up(shared_bytes, 16),
                                        codes_bytes + (width_list::values[0] == 8 ? 7 : 3) * 128);
    static constexpr int slot_bytes = bytes + (skewed ? 112 : 0);

    // Scratch: high and low bytes.
    static constexpr int step_quads = 8;
    /// Widths fall: only the last one may be 0.
    static constexpr int widths_with_codes = width_list::values[count - 1] > 0 ? count : count - 1;
    /// Most steps that a plan can have.
    static constexpr int most_steps = (quads + (step_quads - 1) * widths_with_codes) / step_quads;
    /// Words of a column: an odd number of steps, so that those of four neighbouring columns fall into
    /// different banks.
    static constexpr int stride = step_quads * (most_steps | 1);
    /// Groups whose scores are found together: half as many loops, each with more to do at a time. 16 rows
    /// have no registers for it, and where 12 warps fit (narrow codes with 4 rows), or 8 in place of 4 (wide
    /// codes with 8 rows), these are worth more than what it takes of their memory.
    KVQ_HD static constexpr int runs_together(int rows4) {
        constexpr bool narrow = codes_bytes <= 4096;
        return rows4 == 4 || runs % 2 != 0 || (rows4 == 1 && narrow) || (rows4 == 2 && !narrow) ? 1 : 2;
    }
    KVQ_HD static constexpr int run_scratch(int rows4) { return rows4 * 8 * stride * 4; }
    KVQ_HD static constexpr int scratch_bytes(int rows4) { return runs_together(rows4) * run_scratch(rows4); }

    static constexpr const char* no_tile = []() -> const char* {  // as in warp_tile.cuh
        if (dim % 16 != 0) return "a head size is not a multiple of 16";
        if (step_quads * most_steps >= 256) return "keys of several widths have more than 900 channels";
        if (page % 32 != 0) return "pages of keys of several widths are not a multiple of 32 tokens";
        if (Tokens % 32 != 0 || page % Tokens != 0)
            return "the tokens that a warp takes do not divide a page";
        if (width_list::values[0] == 8 && dim > 256)
            return "8 bits are among several widths of keys of more than 256 channels";
        if (group != page) {
            if (group % 32 != 0) return odd_groups;
            if (page % group != 0) return "groups do not divide a page";
            if (Tokens % group != 0 && group % Tokens != 0)
                return "groups and the tokens that a warp takes do not divide each other";
        }
        return nullptr;
    }();

    /// Where the word of a width's i-th quad stands among the bytes: the two of a lane side by side.
    template <int Bits>
    KVQ_HD static constexpr int place_of(int i) {
        return Bits == 8 ? (i & ~7) + 2 * (i & 3) + (i >> 2 & 1) : i;
    }
    /// Quads of every width of a head.
    __device__ __forceinline__ static head_type head_of(const std::uint16_t* plan) {
        return quads_of<scheme, dim>(plan);
    }
    /// Of addresses: neighbouring lines of 128 bytes, which lanes of different t read, differ in their banks.
    __device__ __forceinline__ static std::uint32_t swizzle(std::uint32_t at) {
        return at ^ (at >> 2 & 0x60u);
    }

    /// Starts copying, as code_warp_tile::copy does.
    __device__ __forceinline__ static void copy(std::uint32_t to, const std::byte* block, int first, int lane,
                                                std::uint32_t vector_bytes, const head_type& head,
                                                int /*band*/ = 0) {
        constexpr int vectors = codes_bytes / 16, turns = ceil_div(vectors, warp_size);
        // Where widths begin in the slot, and how much farther they begin in the block.
        unsigned begin[widths_with_codes];
        int distance[widths_with_codes];
        if constexpr (Tokens != page) {
            int words = 0;
            static_for<widths_with_codes>([&](auto w) {
                constexpr int W = decltype(w)::value;
                const int own = kvq::detail::code_words(width_list::values[W], head.of[W]);
                begin[W] = static_cast<unsigned>(words * Tokens * 4);
                distance[W] = (words * (page - Tokens) + own * first) * 4;
                words += own;
            });
        }
        int vector = lane;
        if constexpr (skewed) vector -= static_cast<int>(reinterpret_cast<std::uintptr_t>(block) >> 4 & 7u);
        // Turns are 512 bytes apart, which swizzle() does not look at.
        const std::uint32_t first_to = swizzle(to + 16u * static_cast<unsigned>(vector));
        static_for<turns>([&](auto i) {
            constexpr int I = decltype(i)::value;
            int ahead = I * warp_size;
            if constexpr (I == 0 && skewed) {
                if (vector < 0) ahead = turns * warp_size;
            }
            const auto at = static_cast<unsigned>(vector + ahead) * 16;
            if (vectors % warp_size == 0 || at < vectors * 16) {
                int source = static_cast<int>(at);
                if constexpr (Tokens != page) {
                    int farther = distance[0];
#pragma unroll
                    for (int w = 1; w < widths_with_codes; ++w)
                        if (at >= begin[w]) farther = distance[w];
                    source += farther;
                }
                copy_async(first_to + 16u * static_cast<unsigned>(ahead), block + source, vector_bytes);
            }
        });
        constexpr int section_vectors = section / 16,
                      all = 2 * section_vectors + round_up(shared_bytes, 16) / 16;
        const std::byte* const parameters =
            block + typename scheme::layout_type{}.scale_offset(shape) + first / group * run_bytes;
        static_for<ceil_div(all, warp_size)>([&](auto i) {
            const int at = (decltype(i)::value * warp_size + lane) * 16;
            int source = at;
            if (at >= section) source += page_section - section;
            if (at >= 2 * section) source += page_section - section - first / group * run_bytes;
            if (all % warp_size == 0 || at < all * 16)
                copy_async(to + static_cast<std::uint32_t>(scale_at + at), parameters + source, vector_bytes);
        });
    }

    /// The exponent of a factor 2^-shift, as the bits of what it multiplies: of 8-bit scales as half floats,
    /// or of a float. 0: the factor is zero.
    KVQ_HD static constexpr unsigned factor_exponent(int shift) {
        if constexpr (has_byte_params) return half_lowest<kvq::detail::scale_float> + 15 - shift;
        return 127 - shift;
    }
    /// Scales of four channels, times such a factor.
    __device__ __forceinline__ static float4 scales(std::uint32_t at, int r, int channel, unsigned exponent) {
        at += static_cast<std::uint32_t>(scale_at + r * run_bytes + channel * width);
        if constexpr (has_byte_params) {
            const std::uint32_t codes = load_shared_4(at);
            return small_halves<kvq::detail::scale_float>(exponent == 0 ? 0u : codes, exponent * 0x04000400u)
                .floats();
        } else {
            if (exponent == 0) return {0.0f, 0.0f, 0.0f, 0.0f};  // the page may hold anything there
            const float4 s = load_parameters<parameter>(at);
            const float factor = __uint_as_float(exponent << 23);
            return {s.x * factor, s.y * factor, s.z * factor, s.w * factor};
        }
    }
    __device__ __forceinline__ static float4 biases(std::uint32_t at, int r,
                                                    int channel) requires(!has_byte_params) {
        return load_parameters<parameter>(
            at + static_cast<std::uint32_t>(bias_at + r * run_bytes + channel * width));
    }
    /// Codes of 8-bit biases, four to a word.
    __device__ __forceinline__ static std::uint32_t bias_bytes(std::uint32_t at, int r, int channel) {
        return load_shared_4(at + static_cast<std::uint32_t>(bias_at + r * run_bytes + channel));
    }
};

/// Of rows of tokens, or of blocks of the library. More tokens than a page has: of two pages.
template <tensor Role, class Pair, int Tokens, int Bands>
struct choose_warp_tile {
    using type = std::conditional_t<
        Role == tensor::key && codec<typename Pair::keys>.several_widths(), mixed_warp_tile<Pair, Tokens>,
        std::conditional_t<(Tokens > Pair::page_tokens), joined_warp_tile<Role, Pair, Bands>,
                           code_warp_tile<Role, Pair, Tokens, true, Bands>>>;
};
template <tensor Role, class Pair, int Tokens, int Bands>
requires has_lower<Pair>
struct choose_warp_tile<Role, Pair, Tokens, Bands> {
    using type = plane_warp_tile<Role, Pair, Tokens, Bands>;
};
template <tensor Role, class Pair, int Tokens, int Bands>
requires token_row_scheme<scheme_of<Role, Pair>>
struct choose_warp_tile<Role, Pair, Tokens, Bands> {
    using type = row_warp_tile<Role, Pair, Tokens>;
};
template <tensor Role, class Pair, int Tokens, int Bands = 1>
using warp_tile = typename choose_warp_tile<Role, Pair, Tokens, Bands>::type;

/// What a fold leaves in registers; high and low bytes are in scratch.
template <class Pair, int Tokens>
struct folded_row<mixed_warp_tile<Pair, Tokens>> {
    static constexpr int runs = smaller(mixed_warp_tile<Pair, Tokens>::runs, 2);
    float step[runs], offset[runs];
};

/// What a warp has read of the keys of an item's head.
template <class WarpTile, int Rows4>
struct head_keys {
    __device__ __forceinline__ head_keys(std::uint32_t, const std::uint16_t*, const lane_id&) {}
};
/// Widths, and where the lane's quads go when it folds: the word of a column, and the factor's exponent by
/// which codes are shifted. Quads without codes are zeros, for a word that no quad has.
template <class Pair, int Tokens, int Rows4>
struct head_keys<mixed_warp_tile<Pair, Tokens>, Rows4> {
    using keys = mixed_warp_tile<Pair, Tokens>;
    static constexpr int lanes = split_rows<Rows4> ? 4 : 8;  // that fold a row together
    static constexpr int own = ceil_div(keys::quads, lanes), words = ceil_div(own, 4);
    typename keys::head_type quads;
    std::uint32_t scratch;
    std::uint32_t word_of[words], exponent_of[words];  // four to a register

    /// Also zeroes the scratch. All lanes of a warp.
    __device__ __forceinline__ head_keys(std::uint32_t scratch_at, const std::uint16_t* plan,
                                         const lane_id& id)
        : quads(keys::head_of(plan)), scratch(scratch_at) {
        const int lane_of_row = lanes == 4 ? id.t : 2 * id.t + (id.g & 1);
        // A word between pieces, or behind the last one. If quads fill all words, none is without codes.
        int none = 0, begin = 0;
        static_for<keys::widths_with_codes>([&](auto w) {
            const int n = quads.of[decltype(w)::value];
            begin += round_up(n, keys::step_quads);
            if (n % keys::step_quads != 0) none = begin - 1;
        });
        if (begin < keys::stride) none = begin;
#pragma unroll
        for (int i = 0; i < words; ++i) word_of[i] = exponent_of[i] = 0;
#pragma unroll
        for (int i = 0; i < own; ++i) {
            const int quad = i * lanes + lane_of_row;
            unsigned word = static_cast<unsigned>(none), exponent = 0;
            int from = 0, start = 0;
            static_for<keys::widths_with_codes>([&](auto w) {
                constexpr int W = decltype(w)::value, bits = keys::width_list::values[W];
                if (quad >= from && quad < smaller(from + quads.of[W], keys::quads)) {
                    word = static_cast<unsigned>(start + keys::template place_of<bits>(quad - from));
                    exponent = keys::factor_exponent(keys::code_bits - bits);
                }
                from += quads.of[W];
                start += round_up(quads.of[W], keys::step_quads);
            });
            word_of[i / 4] |= word << 8 * (i % 4);
            exponent_of[i / 4] |= exponent << 8 * (i % 4);
        }
        __syncwarp();
        for (int i = id.lane; i < keys::scratch_bytes(Rows4) / 16; i += warp_size)
            store_shared_16(scratch + 16u * static_cast<std::uint32_t>(i), {0.0f, 0.0f, 0.0f, 0.0f});
        __syncwarp();
    }
    __device__ __forceinline__ unsigned word(int i) const {
        return __byte_perm(word_of[i / 4], 0u, 0x4440u | static_cast<unsigned>(i % 4));
    }
    __device__ __forceinline__ unsigned exponent(int i) const {
        return __byte_perm(exponent_of[i / 4], 0u, 0x4440u | static_cast<unsigned>(i % 4));
    }
};

/// fold_part of key_product.cuh: quads i * lanes + lane_of_row.
template <class WarpTile, int Rows4>
struct mixed_part {
    using head_type = head_keys<WarpTile, Rows4>;
    static constexpr bool split = split_rows<Rows4>;
    static constexpr int rows = split ? Rows4 / 2 : Rows4, units = head_type::own;
    static constexpr int rows_of_tile = split ? 8 : 4;
    int row, lane_of_row;
    bool inside[units];

    __device__ __forceinline__ explicit mixed_part(const lane_id& id)
        : row(split ? id.g : id.g / 2), lane_of_row(split ? id.t : 2 * id.t + (id.g & 1)) {
#pragma unroll
        for (int i = 0; i < units; ++i)
            inside[i] = WarpTile::quads % head_type::lanes == 0 ||
                        i * head_type::lanes + lane_of_row < WarpTile::quads;
    }
    __device__ __forceinline__ int channel(int i, int) const {
        return inside[i] ? 4 * (i * head_type::lanes + lane_of_row) : 0;
    }
};
template <class Pair, int Tokens, int Rows4>
requires(
    mixed_warp_tile<Pair, Tokens>::has_byte_params) struct key_query<mixed_warp_tile<Pair, Tokens>, Rows4>
    : query_bytes<mixed_part<mixed_warp_tile<Pair, Tokens>, Rows4>> {
    __device__ __forceinline__ key_query(std::uint32_t rows, int stride, float, const lane_id& id) {
        this->template prepare<Pair::head_dim>(rows, stride,
                                               mixed_part<mixed_warp_tile<Pair, Tokens>, Rows4>(id));
    }
};

/// fold_rows() of key_product.cuh for mixed widths. Index: of the run among those whose bytes are there
/// together.
template <int Index, class WarpTile, int Rows4>
__device__ __forceinline__ void fold_mixed(folded_row<WarpTile> (&to)[Rows4], std::uint32_t rows, int stride,
                                           std::uint32_t slot, int first, int run,
                                           const head_keys<WarpTile, Rows4>& head,
                                           [[maybe_unused]] const key_query<WarpTile, Rows4>& query,
                                           const lane_id& id) {
    using part_type = mixed_part<WarpTile, Rows4>;
    constexpr bool split = split_rows<Rows4>;
    constexpr int dim = WarpTile::dim, own = part_type::units;
    const part_type part(id);
    const int own_row = part.row;
    const auto line = line_of<WarpTile>(slot, first, run);
    float4 scale[own];
    [[maybe_unused]] float4 bias[own];
    [[maybe_unused]] std::uint32_t codes[own];  // of 8-bit biases
#pragma unroll
    for (int i = 0; i < own; ++i) {
        const int channel = part.channel(i, 0);
        scale[i] = WarpTile::scales(slot, run, channel, head.exponent(i));
        if constexpr (WarpTile::has_byte_params)
            codes[i] = WarpTile::bias_bytes(slot, run, channel);
        else
            bias[i] = WarpTile::biases(slot, run, channel);
    }
    if constexpr (Index == 0) __syncwarp();  // other lanes may still read the bytes before
#pragma unroll
    for (int m = 0; m < part_type::rows; ++m) {
        const std::uint32_t row =
            rows + static_cast<std::uint32_t>(4 * (part_type::rows_of_tile * m + own_row) * stride);
        float x[own][4];
        float sum = 0.0f, dot = 0.0f;
#pragma unroll
        for (int i = 0; i < own; ++i) {
            float4 q = load_parameters<float>(row + query_byte<dim>(own_row, 4 * part.channel(i, 0)));
            if (!part.inside[i]) q = {0.0f, 0.0f, 0.0f, 0.0f};
            if constexpr (!WarpTile::has_byte_params)
                dot += fmaf(q.x, bias[i].x, q.y * bias[i].y) + fmaf(q.z, bias[i].z, q.w * bias[i].w);
            x[i][0] = q.x * scale[i].x, x[i][1] = q.y * scale[i].y;
            x[i][2] = q.z * scale[i].z, x[i][3] = q.w * scale[i].w;
            sum += (x[i][0] + x[i][1]) + (x[i][2] + x[i][3]);
        }
        std::uint32_t high[own], low[own];
        int total = 0;
        const float step = fixed_point<split>(x, high, low, total);
        const int column = split ? 16 * m + id.g : 8 * m + 2 * own_row;  // of the high bytes
        constexpr int to_low = (split ? 8 : 1) * WarpTile::stride;       // words
        const std::uint32_t at = head.scratch + Index * WarpTile::run_scratch(Rows4) +
                                 4u * static_cast<std::uint32_t>(column * WarpTile::stride);
#pragma unroll
        for (int i = 0; i < own; ++i) {
            const unsigned word = head.word(i);
            store_word(at + 4u * word, high[i]);
            store_word(at + 4u * (word + to_low), low[i]);
        }
        [[maybe_unused]] constexpr float middle = 0.5f * static_cast<float>((1 << WarpTile::code_bits) - 1);
        if constexpr (WarpTile::has_byte_params) dot = query.dot(codes, m) * (query.step[m] * line.step);
        if constexpr (WarpTile::centred)
            dot = fmaf(middle * line.unit, fmaf(-step, static_cast<float>(total), sum), dot);
        float offset = over_row<split>(dot, add_floats{});
        if constexpr (WarpTile::has_byte_params) offset += query.rest(line, m);
#pragma unroll
        for (int i = 0; i < (split ? 2 : 1); ++i) {
            folded_row<WarpTile>& own_of = to[split ? 2 * m + i : m];
            own_of.step[Index] = to_owner<split>(step * line.unit, i, id);
            own_of.offset[Index] = to_owner<split>(offset, i, id);
        }
    }
}

/// Codes of two neighbouring quads of a segment of `Bits`, at the top of bytes of `Top` bits, from words of
/// all planes. The first of the quads, of lane t, is 2t of a step: `turn` says by how many bits a plane's
/// word is to be rotated, or what it is multiplied by where all its quads move to the left, which spares the
/// integer pipe.
template <int Bits, int Top>
struct quad_pair {
    using planes = code_planes<Bits>;
    template <int P>
    static constexpr bool multiplies =
        planes::quads_per_word(P) > 2 && Top - Bits + planes::shift(P) + planes::width(P) == 8;
    /// Left, so that the first quad's bits of plane P stand where they belong in a code; of factors, the
    /// second one's.
    template <int P>
    __device__ __forceinline__ static unsigned turn(int t) {
        constexpr int width = planes::width(P), to = Top - Bits + planes::shift(P);
        const int left = to - 2 * t % planes::quads_per_word(P) * width;
        return multiplies<P> ? opaque_factor(1u << (left - width)) : static_cast<unsigned>(left) & 31u;
    }
    template <int P>
    __device__ __forceinline__ static void add(std::uint32_t word, unsigned turn, std::uint32_t& a,
                                               std::uint32_t& b) {
        constexpr int width = planes::width(P), to = Top - Bits + planes::shift(P);
        constexpr std::uint32_t mask = (((1u << width) - 1u) << to) * 0x01010101u;
        if constexpr (planes::quads_per_word(P) == 2) {  // the same for all t
            a |= (word << to) & mask;
            b |=
                (to > width ? word << (to > width ? to - width : 0) : word >> (to > width ? 0 : width - to)) &
                mask;
        } else if constexpr (multiplies<P>) {
            const std::uint32_t second = word * turn;
            a |= (second << width) & mask;
            b |= second & mask;
        } else {
            a |= __funnelshift_l(word, word, turn) & mask;
            b |= __funnelshift_l(word, word, turn - width) & mask;
        }
    }
};

/// Scores of tiles First .. First + Runs * tiles of a run - 1.
template <class WarpTile, int Rows4, int First, int Runs>
__device__ __forceinline__ void score_mixed(float (&scores)[WarpTile::tiles][Rows4][4],
                                            const folded_row<WarpTile> (&query)[Rows4], std::uint32_t slot,
                                            const head_keys<WarpTile, Rows4>& head, const lane_id& id) {
    constexpr int tiles_of_run = WarpTile::tiles / WarpTile::runs, Count = Runs * tiles_of_run;
    std::uint32_t query_at =
        head.scratch + 4u * static_cast<std::uint32_t>(id.g * WarpTile::stride + 2 * id.t);
    int sums[Count][2][Rows4][4] = {};
    std::uint32_t segment = slot + 16u * static_cast<std::uint32_t>(id.g);
    static_for<WarpTile::count>([&](auto w) {
        constexpr int W = decltype(w)::value, bits = WarpTile::width_list::values[W];
        if constexpr (bits > 0) {
            using pair = quad_pair<bits, WarpTile::code_bits>;
            using planes = code_planes<bits>;
            const int n = head.quads.of[W], own_words = kvq::detail::code_words(bits, n);
            const auto tile_bytes = static_cast<std::uint32_t>(own_words * 128);
            std::uint32_t at[planes::count];  // of the lane's word in tile First
            unsigned turn[planes::count];
            int line = First * own_words;
            static_for<planes::count>([&](auto plane) {
                constexpr int P = decltype(plane)::value, per = planes::quads_per_word(P);
                at[P] =
                    segment + 128u * static_cast<std::uint32_t>(line + (per == 1 ? id.t : 2 * id.t / per));
                turn[P] = pair::template turn<P>(id.t);
                line += ceil_div(n, per);
            });
#pragma unroll 1
            for (int quad = 0; quad < n; quad += WarpTile::step_quads) {
                uint2 b[Runs][Rows4];
#pragma unroll
                for (int i = 0; i < Runs * Rows4; ++i)
                    b[i / Rows4][i % Rows4] = load_shared_8(
                        query_at + static_cast<std::uint32_t>(i / Rows4 * WarpTile::run_scratch(Rows4) +
                                                              i % Rows4 * (32 * WarpTile::stride)));
                static_for<Count>([&](auto in_run) {
                    constexpr int I = decltype(in_run)::value;
                    uint4 c{0, 0, 0, 0}, d{0, 0, 0, 0};
                    if constexpr (bits == 8) {
                        c = load_shared_16(WarpTile::swizzle(at[0] + I * tile_bytes));
                        d = load_shared_16(WarpTile::swizzle(at[0] + I * tile_bytes + 4 * 128));
                    } else {
                        static_for<planes::count>([&](auto plane) {
                            constexpr int P = decltype(plane)::value;
                            const uint4 v = load_shared_16(WarpTile::swizzle(at[P] + I * tile_bytes));
                            pair::template add<P>(v.x, turn[P], c.x, d.x);
                            pair::template add<P>(v.y, turn[P], c.y, d.y);
                            pair::template add<P>(v.z, turn[P], c.z, d.z);
                            pair::template add<P>(v.w, turn[P], c.w, d.w);
                        });
                    }
#pragma unroll
                    for (int m = 0; m < Rows4; ++m) {
                        const uint2 q = b[I / tiles_of_run][m];
                        mma_codes_signed(sums[I][0][m], c.x, c.y, d.x, d.y, q.x, q.y);
                        mma_codes_signed(sums[I][1][m], c.z, c.w, d.z, d.w, q.x, q.y);
                    }
                });
                query_at += 4 * WarpTile::step_quads;
                static_for<planes::count>([&](auto plane) {
                    constexpr int P = decltype(plane)::value;
                    at[P] += 128 * (WarpTile::step_quads / planes::quads_per_word(P));
                });
            }
            segment += static_cast<std::uint32_t>(WarpTile::tiles) * tile_bytes;
        }
    });
#pragma unroll
    for (int i = 0; i < Count; ++i)
#pragma unroll
        for (int m = 0; m < Rows4; ++m)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const byte_sums<Rows4, int> both(sums[i][r / 2], m, 2 * (r % 2));
                scores[First + i][m][r] =
                    fmaf(static_cast<float>(256 * both.high + both.low), query[m].step[i / tiles_of_run],
                         query[m].offset[i / tiles_of_run]);
            }
}

/// Is the query folded once per item? Where channels have parameters, once per group of tokens.
template <class WarpTile>
inline constexpr bool fold_once = WarpTile::full || WarpTile::token_parameters;

/// Scores of a warp tile of any kind, whose first token is `first` of its page. fold: unless the warp tile
/// before had the same parameters.
template <class WarpTile, int Rows4, class Query>
__device__ __forceinline__ void score_warp_tile(float (&scores)[WarpTile::tiles][Rows4][4],
                                                folded_row<WarpTile> (&folded)[Rows4], std::uint32_t rows,
                                                int stride, std::uint32_t slot, int first, bool fold,
                                                [[maybe_unused]] const head_keys<WarpTile, Rows4>& head,
                                                const Query& query, const lane_id& id) {
    constexpr int tiles_of_run = fold_once<WarpTile>
                                     ? WarpTile::tiles
                                     : smaller(WarpTile::tiles, WarpTile::group / WarpTile::tile_height);
    if constexpr (WarpTile::mixed) {
        constexpr int together = WarpTile::runs_together(Rows4);
        static_for<WarpTile::runs / together>([&](auto runs) {
            constexpr int R = decltype(runs)::value * together;
            if (fold) {
                static_for<together>([&](auto run) {
                    constexpr int I = decltype(run)::value;
                    fold_mixed<I>(folded, rows, stride, slot, first, R + I, head, query, id);
                });
                __syncwarp();
            }
            score_mixed<WarpTile, Rows4, R * tiles_of_run, together>(scores, folded, slot, head, id);
        });
    } else {
        static_for<WarpTile::tiles / tiles_of_run>([&](auto run) {
            constexpr int R = decltype(run)::value;
            if constexpr (dequantizes_keys<WarpTile, Rows4>) {
                score_dequantized<R * tiles_of_run, tiles_of_run>(scores, query, slot, R, id);
            } else {
                if constexpr (!fold_once<WarpTile>) {
                    if (fold) fold_rows(folded, rows, stride, slot, first, R, query, id);
                }
                static_for<tiles_of_run>([&](auto in_run) {
                    constexpr int Tile = R * tiles_of_run + decltype(in_run)::value;
                    score_tile<WarpTile, Rows4, Tile>(scores[Tile], folded, slot, id);
                });
            }
        });
    }
}

}}}  // namespace kvq::cuda::detail
