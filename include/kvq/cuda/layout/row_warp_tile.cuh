// A warp tile of rows of tokens in the bytes of other systems (schemes/row_layout.hpp): attention reads it as
// one of half floats.
//
//   numbers   [tokens][row bytes], one run of bytes of the page
//   scales    [tokens][scales of a token], another one; also as half floats: of values [scale][tokens], of
//             keys whose scales are powers of two [tokens][scales]
//
// Keys and values lie in the same way: a word holds channels of one token. Products take channels of keys and
// tokens of values along their sum, so words of values are joined with those of the next token, byte by byte.
// Vectors of 16 bytes are permuted within 128 bytes, so that the lanes of a load meet all banks: of keys
// those of tokens 4g and 4g + 4, of values those of the four quarters of the tokens.
// Contract: as warp_tile.cuh; numbers: row_numbers.cuh.
#pragma once

#include "joined_warp_tile.cuh"
#include "row_numbers.cuh"
#include "warp_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// The pair of 16-bit values with the sizes of Pair.
template <class Pair>
using values_like =
    block_pair<kvq::full<float16>, kvq::full<float16>, Pair::head_dim, Pair::page_tokens, Pair::value_dim>;

/// The same of the pages of a warp tile: one, or two that are joined (joined_warp_tile.cuh).
template <class Pair, int Tokens>
using values_of_tile = values_like<std::conditional_t<(Tokens > Pair::page_tokens), two_pages<Pair>, Pair>>;

template <tensor Role, class Pair, int Tokens>
struct row_warp_tile : code_warp_tile<Role, values_of_tile<Pair, Tokens>, Tokens, false> {
    using base = code_warp_tile<Role, values_of_tile<Pair, Tokens>, Tokens, false>;
    using rows_type = scheme_of<Role, Pair>;
    using reader = row_reader<rows_type>;
    using base::dim, base::key, base::page, base::lane_units, base::tile_height, base::last_height,
        base::tiles;
    static constexpr bool in_rows = true, joined = Tokens > Pair::page_tokens;

    static constexpr int row_bytes = rows_type::fixed_layout().row_bytes(dim),
                         scale_count = rows_type::fixed_layout().scales_behind(dim),
                         scale_channels = larger(1, rows_type::channels);
    static constexpr int quarter_bytes = row_bytes / 4;  // of a lane's channels of keys
    static constexpr int load_bytes = quarter_bytes % 16 == 0 ? 16 : quarter_bytes % 8 == 0 ? 8 : 4;
    static constexpr int number_bytes = Tokens * row_bytes, scales_at = number_bytes,
                         halves_at = round_up(scales_at + Tokens * scale_count, 16),
                         factors_at = round_up(
                             halves_at + (key && !reader::by_exponent ? 0 : Tokens * scale_count * 2), 16);
    static constexpr int bytes = factors_at + (key && reader::by_exponent ? Tokens * 4 : 0),
                         slot_bytes = bytes;

    static constexpr const char* no_tile = []() -> const char* {
        if (base::no_tile != nullptr) return base::no_tile;
        if (!reader::reads) return own_blocks;
        if (row_bytes % 16 != 0 || quarter_bytes % 4 != 0)
            return "rows of tokens are not a multiple of 16 bytes";
        if (is_strided<Pair> && scale_count % 4 != 0)
            return "scales of a token that lie anywhere are not a multiple of 4 bytes";
        return nullptr;
    }();

    /// Where byte `at` of the numbers stands.
    __device__ __forceinline__ static std::uint32_t place(int at) {
        const int line = at / 128;
        int turned = 0;
        if constexpr (!key)
            turned = line / larger(1, Tokens / 4 * row_bytes / 128) % 4 << 5;
        else if constexpr (row_bytes % 128 == 0)
            turned = (line / (row_bytes / 128) >> 2 & 1) << 4 | (line % (row_bytes / 128) & 1) << 5;
        else if constexpr (row_bytes == 64)
            turned = (line >> 1 & 1) << 6;
        else if constexpr (row_bytes == 32)
            turned = (line & 3) << 5;
        return static_cast<std::uint32_t>(at ^ turned);
    }

    __device__ __forceinline__ static void copy(std::uint32_t to, const std::byte* block, int first, int lane,
                                                std::uint32_t vector_bytes,
                                                const typename base::head_type& = {}, int = 0) {
        const std::byte* const rows = block + static_cast<std::size_t>(first * row_bytes);
        const std::byte* const scales =
            block + Pair::page_tokens * row_bytes + static_cast<std::size_t>(first * scale_count);
        copy_vectors<number_bytes>(lane,
                                   [&](int at) { copy_async(to + place(at), rows + at, vector_bytes); });
        copy_vectors<Tokens * scale_count>(lane, [&](int at) {
            copy_async(to + static_cast<std::uint32_t>(scales_at + at), scales + at, vector_bytes);
        });
    }
    /// Of two pages, either of which may be null.
    __device__ __forceinline__ static void copy(std::uint32_t to, const std::byte* first,
                                                const std::byte* second, int lane, int = 0) requires joined {
        constexpr int rows = number_bytes / 2, scales = Tokens * scale_count / 2;
        copy_vectors<number_bytes>(lane, [&](int at) {
            const std::byte* const block = at < rows ? first : second;
            if (block != nullptr) copy_async(to + place(at), block + at % rows);
        });
        copy_vectors<Tokens * scale_count>(lane, [&](int at) {
            const std::byte* const block = at < scales ? first : second;
            if (block != nullptr)
                copy_async(to + static_cast<std::uint32_t>(scales_at + at),
                           block + rows + (at < scales ? at : at - scales));
        });
    }
    /// From another system's memory; of two pages, where they are joined. Rows may be null then.
    __device__ __forceinline__ static void copy_strided(std::uint32_t to, const row_address& first,
                                                        const row_address& second, const row_memory& m,
                                                        int lane, std::uint32_t vector_bytes) {
        constexpr int page = joined ? Pair::page_tokens : Tokens, of_row = row_bytes / 16;
        const auto stride = static_cast<std::uint32_t>(m.token_bytes);
        const auto page_of = [&](int token) -> const row_address& { return token < page ? first : second; };
        if constexpr (warp_size % of_row == 0 &&
                      page * of_row % warp_size == 0) {  // the same page for all lanes
            constexpr int tokens = warp_size / of_row;
            const std::uint32_t own = static_cast<std::uint32_t>(lane / of_row) * stride +
                                      static_cast<std::uint32_t>(lane % of_row * 16);
            static_for<number_bytes / 16 / warp_size>([&](auto i) {
                constexpr int I = decltype(i)::value, token = I * tokens;
                const std::byte* const row = page_of(token).row;
                if (!joined || row != nullptr)
                    copy_async(to + place(16 * (I * warp_size + lane)),
                               row + own + static_cast<std::uint32_t>(token % page) * stride, vector_bytes);
            });
        } else {
            copy_vectors<number_bytes>(lane, [&](int at) {
                const int token = at / row_bytes;
                const std::byte* const row = page_of(token).row;
                if (!joined || row != nullptr)
                    copy_async(to + place(at),
                               row + static_cast<std::uint32_t>(token % page) * stride + at % row_bytes,
                               vector_bytes);
            });
        }
        constexpr int of_token = larger(scale_count / 4, 1), words = Tokens * scale_count / 4;
        static_for<ceil_div(words, warp_size)>([&](auto i) {
            const int word = decltype(i)::value * warp_size + lane, token = word / of_token;
            const row_address& of = page_of(token);
            if ((words % warp_size == 0 || word < words) && (!joined || of.row != nullptr))
                copy_word_async(to + static_cast<std::uint32_t>(scales_at + 4 * word),
                                of.scales +
                                    static_cast<std::uint32_t>(token % page) *
                                        static_cast<std::uint32_t>(m.scale_token_bytes) +
                                    word % of_token * 4,
                                vector_bytes / 4);
        });
    }

    /// The two channels of unit `unit` of a lane's quarter, counted from the quarter's first.
    KVQ_HD static constexpr int unit_channel(int unit) {
        constexpr int per_word = reader::word_channels / 2;
        return unit / per_word * reader::word_channels + reader::first_channel(unit % per_word);
    }
    static constexpr int pair_step = reader::pair_step;

    /// As code_warp_tile::for_pairs.
    template <int Tile, int Group, int Sets, class F>
    __device__ __forceinline__ static void for_pairs(std::uint32_t at, const lane_id& id, F&& f) {
        if constexpr (key)
            for_key_pairs<Tile>(at, id, f);
        else
            for_value_pairs<Tile>(at, id, f);
    }

    static constexpr bool has_token_factors = key && reader::by_exponent;
    /// Makes half floats of the scales, for all lanes behind the next __syncwarp(). Returns what the products
    /// are multiplied by; of keys that do not have token_factors().
    __device__ __forceinline__ static float prepare(std::uint32_t at, const lane_id& id, float tensor_scale) {
        float factor = reader::unit * tensor_scale;
        if constexpr (has_token_factors)
            prepare_keys(at, id, factor);
        else if constexpr (!key && reader::scaled)
            factor *= prepare_values(at, id);
        return factor;
    }
    __device__ __forceinline__ static float4 token_factors(std::uint32_t at, int token) {
        return load_parameters<float>(at + static_cast<std::uint32_t>(factors_at + 4 * token));
    }

    /// Zeroes what tokens of values outside [from, to) hold.
    __device__ __forceinline__ static void clear_columns(std::uint32_t at, const lane_id& id, int from,
                                                         int to) {
        const auto inside = [&](int token) { return token >= from && token < to; };
#pragma unroll 1
        for (int i = id.lane; i < number_bytes / 16; i += warp_size)
            if (!inside(16 * i / row_bytes))
                store_shared_16(at + place(16 * i), float4{0.0f, 0.0f, 0.0f, 0.0f});
        if constexpr (scale_count > 0)
#pragma unroll 1
            for (int i = id.lane; i < Tokens * scale_count / 4; i += warp_size) {
                std::uint32_t keep = 0;
#pragma unroll
                for (int k = 0; k < 4; ++k) keep |= inside((4 * i + k) / scale_count) ? 0xffu << 8 * k : 0u;
                const std::uint32_t word = at + static_cast<std::uint32_t>(scales_at + 4 * i);
                store_word(word, load_shared_4(word) & keep);
            }
        __syncwarp();
    }

private:
    /// Calls f with where each vector of 16 bytes begins.
    template <int Bytes, class F>
    __device__ __forceinline__ static void copy_vectors(int lane, const F& f) {
        constexpr int vectors = Bytes / 16;
        static_for<ceil_div(vectors, warp_size)>([&](auto i) {
            const int vector = decltype(i)::value * warp_size + lane;
            if (vectors % warp_size == 0 || vector < vectors) f(16 * vector);
        });
    }

    __device__ __forceinline__ static std::uint32_t scale_code(std::uint32_t at, int i) {
        return load_shared_1(at + static_cast<std::uint32_t>(scales_at + i));
    }
    __device__ __forceinline__ static float power_of_exponent(std::uint32_t exponent) {
        return e8m0::to_float(static_cast<std::uint8_t>(exponent));
    }
    /// Half floats of keys: [tokens][scales].
    __device__ __forceinline__ static void prepare_keys(std::uint32_t at, const lane_id& id, float factor) {
#pragma unroll
        for (int first = 0; first < Tokens; first += warp_size) {
            const int token = first + id.lane;
            if (Tokens % warp_size != 0 && token >= Tokens) break;
            std::uint32_t code[scale_count], largest = 0;
#pragma unroll
            for (int s = 0; s < scale_count; ++s) {
                code[s] = scale_code(at, token * scale_count + s);
                largest = reader::larger_exponent(largest, code[s]);
            }
#pragma unroll
            for (int s = 0; s < scale_count; ++s)
                store_half_word(at + static_cast<std::uint32_t>(halves_at + 2 * (token * scale_count + s)),
                                static_cast<std::uint16_t>(reader::scale_halves(code[s], largest)));
            store_word(at + static_cast<std::uint32_t>(factors_at + 4 * token),
                       __float_as_uint(factor * power_of_exponent(largest)));
        }
    }
    /// Those of values: [scale][tokens]. Returns the power of two that they are relative to.
    __device__ __forceinline__ static float prepare_values(std::uint32_t at, const lane_id& id) {
        std::uint32_t largest = 0;
        if constexpr (reader::by_exponent) {
#pragma unroll
            for (int i = 0; i < ceil_div(Tokens * scale_count, warp_size); ++i)
                largest = reader::larger_exponent(
                    largest, scale_code(at, smaller(i * warp_size + id.lane, Tokens * scale_count - 1)));
            largest = __reduce_max_sync(~0u, largest);
        }
        constexpr int pairs_of_scale = Tokens / 2, all = pairs_of_scale * scale_count;
#pragma unroll
        for (int i = 0; i < ceil_div(all, warp_size); ++i) {
            const int number = i * warp_size + id.lane;
            if (all % warp_size != 0 && number >= all) break;
            const int pair = number % pairs_of_scale, s = number / pairs_of_scale;
            const std::uint32_t a = scale_code(at, 2 * pair * scale_count + s),
                                b = scale_code(at, (2 * pair + 1) * scale_count + s);
            std::uint32_t halves;
            if constexpr (reader::by_exponent)
                halves =
                    __byte_perm(reader::scale_halves(a, largest), reader::scale_halves(b, largest), 0x5410);
            else
                halves = halves_of_e4m3<0>(a | b << 8);
            store_word(at + static_cast<std::uint32_t>(halves_at + s * Tokens * 2 + 4 * pair), halves);
        }
        return reader::by_exponent ? power_of_exponent(largest) : 1.0f;
    }

    /// Words of the numbers in shared memory.
    __device__ __forceinline__ static void load_words(std::uint32_t (&words)[load_bytes / 4],
                                                      std::uint32_t at) {
        if constexpr (load_bytes == 16) {
            const uint4 v = load_shared_16(at);
            words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        } else if constexpr (load_bytes == 8) {
            const uint2 v = load_shared_8(at);
            words[0] = v.x, words[1] = v.y;
        } else {
            words[0] = load_shared_4(at);
        }
    }

    template <int Tile, class F>
    __device__ __forceinline__ static void for_key_pairs(std::uint32_t at, const lane_id& id, F& f) {
        constexpr std::integral_constant<int, 0> first;
        constexpr int height = Tile + 1 == tiles ? last_height : tile_height, words = load_bytes / 4,
                      word_pairs = reader::word_channels / 2;
        const int token = Tile * tile_height + smaller(4 * id.g, height - 4);
        [[maybe_unused]] std::uint32_t scale[4];  // of the four tokens, for the channels at hand
        // Channels of a lane that share a scale, from its quarter's first one on.
        constexpr int quarter = dim / 4, channels_of_scale = [] {
            int n = rows_type::channels;
            while (n > 0 && quarter % n != 0) n /= 2;
            return larger(n, reader::word_channels);
        }();
        static_for<quarter_bytes / load_bytes>([&](auto vector) {
            constexpr int V = decltype(vector)::value;
            std::uint32_t rows[4][words];
#pragma unroll
            for (int r = 0; r < 4; ++r)
                load_words(rows[r],
                           at + place((token + r) * row_bytes + id.t * quarter_bytes + V * load_bytes));
            static_for<words>([&](auto word) {
                constexpr int W = decltype(word)::value, in_quarter = V * words + W;
                if constexpr (reader::scaled && in_quarter * reader::word_channels % channels_of_scale == 0) {
                    const int of_row =
                        (id.t * (dim / 4) + in_quarter * reader::word_channels) / scale_channels;
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        const int number = (token + r) * scale_count + of_row;
                        if constexpr (reader::by_exponent)
                            scale[r] =
                                load_shared_2(at + static_cast<std::uint32_t>(halves_at + 2 * number)) *
                                0x10001u;
                        else
                            scale[r] = halves_of_e4m3<0>(scale_code(at, number) * 0x0101u);
                    }
                }
                std::uint32_t halves[4][word_pairs];
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    reader::of_word(rows[r][W], halves[r]);
                    if constexpr (reader::scaled)
#pragma unroll
                        for (int i = 0; i < word_pairs; ++i)
                            halves[r][i] = multiply_halves(halves[r][i], scale[r]);
                }
                static_for<word_pairs / 2>([&](auto pair) {
                    constexpr int I = 2 * decltype(pair)::value, U = in_quarter * word_pairs + I;
                    f(first, std::integral_constant<int, U>{}, std::integral_constant<int, U + 1>{},
                      uint4{halves[0][I], halves[1][I], halves[2][I], halves[3][I]},
                      uint4{halves[0][I + 1], halves[1][I + 1], halves[2][I + 1], halves[3][I + 1]});
                });
            });
        });
    }

    template <int Tile, class F>
    __device__ __forceinline__ static void for_value_pairs(std::uint32_t at, const lane_id& id, F& f) {
        constexpr std::integral_constant<int, 0> first;
        constexpr int height = Tile + 1 == tiles ? last_height : tile_height;
        const int channel = Tile * 32 + smaller(4 * id.g, height - 4),
                  byte = reader::fours ? channel / 8 * 4 : channel;
        // Of 4 bits a lane has a half of the word.
        const unsigned low = reader::fours && channel % 8 != 0 ? 0x7362u : 0x5140u;
        const auto unit = [&](int u) {
            const int token = 2 * (id.t * lane_units + u);
            const std::uint32_t a = load_shared_4(at + place(token * row_bytes + byte)),
                                b = load_shared_4(at + place((token + 1) * row_bytes + byte));
            uint4 v;
            const std::uint32_t joined = __byte_perm(a, b, low);
            if constexpr (reader::fours) {
                reader::of_bytes(e2m1_as_e4m3<0>(joined), v.x, v.z);
                reader::of_bytes(e2m1_as_e4m3<1>(joined), v.y, v.w);
            } else {
                reader::of_bytes(joined, v.x, v.y);
                reader::of_bytes(__byte_perm(a, b, 0x7362), v.z, v.w);
            }
            if constexpr (reader::scaled) {
                const int s = channel / scale_channels;
                const std::uint32_t scale =
                    load_shared_4(at + static_cast<std::uint32_t>(halves_at + s * Tokens * 2 + 2 * token));
                v = {multiply_halves(v.x, scale), multiply_halves(v.y, scale), multiply_halves(v.z, scale),
                     multiply_halves(v.w, scale)};
            }
            return v;
        };
        static_for<base::pairs>([&](auto i) {
            constexpr int A = 2 * decltype(i)::value, B = A + 1;
            constexpr std::integral_constant<int, A> unit_a;
            constexpr std::integral_constant<int, B> unit_b;
            const uint4 a = unit(A);
            if constexpr (B < lane_units)
                f(first, unit_a, unit_b, a, unit(B));
            else
                f(first, unit_a, unit_b, a, uint4{0, 0, 0, 0});
        });
    }
};

template <class WarpTile>
inline constexpr bool reads_rows = requires {
    WarpTile::in_rows;
};

}}}  // namespace kvq::cuda::detail
