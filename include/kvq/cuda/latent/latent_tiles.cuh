// Latents as tiles of half floats in shared memory, as tensor cores read them: once for both products.
//
//   tile     [block of 64 channels][64 tokens][64 halves], swizzled as tiles of keys (prefill_tile.cuh)
//   scores   rows = tokens, columns = channels:        S^T = K Q^T sums over columns
//   output   the same bytes, read transposed:          O^T = V^T P^T sums over tokens
//   unit     64 channels of a tile, or of 32 of its tokens (16-bit values, and codes of 8 bits, which would
//            take more registers than a warp has). A warp copies what a page has of it to where it is to
//            stand, reads all of that, and writes halves in its place
//
// A lane has 8 channels (an octet) and eight of every 32 tokens: two times four neighbours. Pages hold
// neighbouring tokens side by side and tiles neighbouring channels, so that both are accesses of 16 bytes;
// which tokens a lane has is chosen so that those of 8 lanes meet all banks.
// Contract: x^ as in prefill_tile.cuh. Tokens that are not shown are zeros. R and P are multiples of 64.
#pragma once

#include "../arch/wgmma.cuh"
#include "latent_records.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Bytes that a block has behind its scales and biases: numbers that channels share, scales of tokens.
template <class Pair>
struct latent_tail {
    using layout = typename Pair::keys::layout_type;
    static constexpr block_shape shape = Pair::key_shape();
    static constexpr codec_spec spec = codec<typename Pair::keys>;
    static constexpr std::size_t at =
        layout{}.scale_offset(shape) + (spec.has_bias ? 2 : 1) * layout{}.section_bytes(shape);
    static constexpr bool exists =
        spec.parameters == parameter_storage::bytes || spec.token_scales != parameter_storage::none;
    static constexpr int bytes = exists ? static_cast<int>(layout{}.bytes(shape) - at) : 0;
};

/// Why tiles are not made of blocks of so many channels; null: they are.
template <class Pair>
constexpr const char* no_latent_units() {
    constexpr codec_spec c = codec<typename Pair::keys>;
    if (c.several_widths()) return "codes have several widths";
    if (c.per_token && has_odd_groups(c, Pair::head_dim)) return odd_groups;
    if (const char* const reason = no_tiles(c, {tensor::key, Pair::page_tokens, 64})) return reason;
    if constexpr (c.content == block_content::codes) {
        if (Pair::page_tokens % 32 != 0) return odd_pages;
        if (latent_tail<Pair>::bytes > 1024) return "scales of a block's tokens have more than 1 KB";
    }
    return nullptr;
}

/// Why tiles are not made of these pages; null: they are.
template <class Pair>
inline constexpr const char* no_latent_tiles = []() -> const char* {
    constexpr int first = Pair::first_channels, second = Pair::second_channels;
    if (first % 64 != 0 || second % 64 != 0 || Pair::value_dim % 64 != 0)
        return "latent, rotary or value channels are not multiples of 64";
    if (Pair::head_dim > 576) return "there are more than 576 channels";
    if constexpr (token_record_scheme<typename Pair::keys>)
        return no_record_tiles(Pair::keys::fixed_layout(), first, Pair::page_tokens);
    else {
        const char* const reason = no_latent_units<typename Pair::first_pair>();
        return reason || second == 0 ? reason : no_latent_units<typename Pair::second_pair>();
    }
}();

/// What a lane has of every 32 tokens of 64 channels.
struct latent_lane {
    int lane, octet, low, first;

    __device__ __forceinline__ latent_lane(int number)
        : lane(number),
          octet(number % 4 + number / 8 % 2 * 4),
          low(number / 4 % 2),
          first(number / 16 * 2 + number % 4) {}
    /// The four tokens of step 0 or 1: from 4 * quad(step) on.
    __device__ __forceinline__ int quad(int step) const { return (first + step) % 4 * 2 + low; }
};

/// A run of tokens of a tile that lie in one page. bytes: of a copy of 16, 0 if the page is not held.
struct latent_run {
    const std::byte* block;
    int token;  // of the page
    std::uint32_t bytes;
};
template <class Pair>
struct latent_runs {
    static constexpr int tokens = kvq::detail::smaller(32, Pair::page_tokens), count = latent_tile / tokens;
    latent_run run[count];

    /// Of the tile from `first` on; pages: of lane i, of tokens 16 i to 16 i + 15.
    __device__ __forceinline__ latent_runs(const cache_ref<Pair>& cache, int first, int pages) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const int page = __shfl_sync(0xffffffffu, pages, i * tokens / slice_tokens);
            run[i] = {cache.key_block(kvq::detail::larger(page, 0), 0),
                      (first + i * tokens) % Pair::page_tokens, page < 0 ? 0u : 16u};
        }
    }
};

/// The units of some channels of a tile. Pair: of their blocks, which are so many bytes behind those of runs.
/// Whole: units of codes of 8 bits have all tokens, too.
template <class Pair, int Channels, std::size_t Behind, bool Whole>
struct latent_units {
    using S = typename Pair::keys;
    using traits = word_traits<S>;
    static constexpr bool full = full_precision<S>, records = token_record_scheme<S>;
    static constexpr block_shape shape = Pair::key_shape();
    static constexpr int page = Pair::page_tokens, dim = shape.dim;
    static constexpr bool half_codes = [] {
        if constexpr (Whole || full || records)
            return false;
        else
            return traits::units_per_word(0) == 1;
    }();
    static constexpr bool halves = full || half_codes;
    static constexpr int of_block = halves ? 2 : 1, count = Channels / 64 * of_block;  // of 64 channels

    /// Asks for what pages have of a unit.
    template <class Runs>
    __device__ __forceinline__ static void fetch(const Runs& runs, int unit, std::uint32_t tile,
                                                 const latent_lane& own) {
        if constexpr (full)
            fetch_values(runs, unit, place(tile, unit), own);
        else if constexpr (records)
            record_units<Pair>::fetch(runs, unit, place(tile, unit), own.lane);
        else
            fetch_codes(runs, unit, place(tile, unit), own);
    }
    /// Makes halves of what has arrived for all lanes.
    template <class Runs>
    __device__ __forceinline__ static void store(const Runs& runs, int unit, std::uint32_t tile,
                                                 std::uint64_t shown, const latent_lane& own) {
        if constexpr (full) {
            store_values(place(tile, unit), own);
            if (~shown != 0)
                clear(place(tile, unit), static_cast<std::uint32_t>(shown >> unit % 2 * 32), own.lane);
        } else {
            if constexpr (records)
                record_units<Pair>::store(unit, place(tile, unit), own.lane);
            else
                store_codes(runs, unit, place(tile, unit), own);
            if (~shown != 0)
#pragma unroll
                for (int i = 0; i < 2 / of_block; ++i)
                    clear(place(tile, unit) + i * 4096u,
                          static_cast<std::uint32_t>(shown >> (half_codes ? unit % 2 : i) * 32), own.lane);
        }
    }

    /// The same for two units of 16-bit values: reads of both are under way at once.
    __device__ __forceinline__ static void store_two(int a, int b, std::uint32_t tile, std::uint64_t shown,
                                                     const latent_lane& own) {
        uint4 word[2][2][4];
        load_words(word[0], place(tile, a), own);
        load_words(word[1], place(tile, b), own);
        __syncwarp();
        store_words(word[0], place(tile, a), own);
        store_words(word[1], place(tile, b), own);
        if (~shown != 0) {
            clear(place(tile, a), static_cast<std::uint32_t>(shown >> a % 2 * 32), own.lane);
            clear(place(tile, b), static_cast<std::uint32_t>(shown >> b % 2 * 32), own.lane);
        }
    }
    static constexpr int bytes = halves ? 4096 : 8192;
    __device__ __forceinline__ static std::uint32_t place(std::uint32_t tile, int unit) {
        return tile + static_cast<std::uint32_t>(unit * bytes);
    }

private:
    /// Copies `Bytes` that lie side by side.
    template <int Bytes>
    __device__ __forceinline__ static void copy(std::uint32_t to, const std::byte* from, std::uint32_t bytes,
                                                int lane) {
        static_assert(Bytes % 16 == 0);
#pragma unroll
        for (int i = 0; i < ceil_div(Bytes, 512); ++i)
            if ((i + 1) * 512 <= Bytes || lane < (Bytes - i * 512) / 16)
                copy_async(to + static_cast<std::uint32_t>(i * 512 + lane * 16), from + i * 512 + lane * 16,
                           bytes);
    }
    /// Zeros in the rows of 32 tokens that are not shown.
    __device__ __forceinline__ static void clear(std::uint32_t to, std::uint32_t shown, int lane) {
        __syncwarp();
        if ((shown >> lane & 1u) != 0) return;
#pragma unroll
        for (int octet = 0; octet < 8; ++octet)
            store_shared_16(to + octet_offset<latent_tile>(lane, octet), {0.0f, 0.0f, 0.0f, 0.0f});
    }
    __device__ __forceinline__ static std::uint32_t word_of(const uint4& v, int i) {
        return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
    }
    __device__ __forceinline__ static void store_octet(std::uint32_t half, const latent_lane& own, int step,
                                                       int j, const std::uint32_t (&x)[4]) {
        store_shared_16(
            half + octet_offset<latent_tile>(own.quad(step) * 4 + j, own.octet),
            {__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]), __uint_as_float(x[3])});
    }

    // 16-bit values: a word has two channels of a token; [32 words of 64 channels][tokens of a run].
    template <class Runs>
    __device__ __forceinline__ static void fetch_values(const Runs& runs, int unit, std::uint32_t to,
                                                        const latent_lane& own) {
        constexpr int per_unit = Runs::count / 2, bytes = 4096 / per_unit;
#pragma unroll
        for (int i = 0; i < per_unit; ++i) {
            const latent_run run = unit % 2 == 0 ? runs.run[i] : runs.run[per_unit + i];
            copy<bytes>(to + static_cast<std::uint32_t>(i * bytes),
                        run.block + Behind + (run.token & ~31) * (dim * 2) + unit / 2 * bytes, run.bytes,
                        own.lane);
        }
    }
    __device__ __forceinline__ static void store_values(std::uint32_t at, const latent_lane& own) {
        uint4 word[2][4];
        load_words(word, at, own);
        __syncwarp();
        store_words(word, at, own);
    }
    __device__ __forceinline__ static void load_words(uint4 (&word)[2][4], std::uint32_t at,
                                                      const latent_lane& own) {
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int line = own.octet * 4 + i, quad = own.quad(step);
                word[step][i] = load_shared_16(
                    at + static_cast<std::uint32_t>(page == 16 ? quad / 4 * 2048 + line * 64 + quad % 4 * 16
                                                               : line * 128 + quad * 16));
            }
    }
    __device__ __forceinline__ static void store_words(const uint4 (&word)[2][4], std::uint32_t at,
                                                       const latent_lane& own) {
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                std::uint32_t x[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    x[i] = as_halves<typename S::value_type>(word_of(word[step][i], j));
                store_octet(at, own, step, j, x);
            }
    }

    // Codes: of every plane [32 tokens, once or twice][lines of 64 channels][tokens]; then scales, biases,
    // tails, and a table of scales and biases as halves, of the first and the second 32 tokens where they
    // differ.
    template <class>
    struct code_places;
    template <class X>
    requires(!full_precision<X>) struct code_places<X> {
        static constexpr int width = parameter_width<typename traits::parameter>;
        static constexpr bool rows = traits::token_parameters;  // of tokens, not of channels
        static constexpr bool bytes = std::is_same_v<typename traits::parameter, byte_params>;
        static constexpr bool exact = std::is_same_v<typename traits::parameter, float16>;
        static constexpr bool token_scales = !std::is_same_v<typename traits::token_scale_type, void>;
        static constexpr int parts = 2 / of_block;  // of 32 tokens
        static constexpr int axis = rows ? dim : page;
        static constexpr int group = traits::group == 0 || traits::group > axis ? axis : traits::group;
        /// Sets of parameters: of the first and the second 32 tokens, or channels.
        static constexpr int sets =
            (group % 64 == 0 && (rows || page % 64 == 0)) || (!rows && parts == 1) ? 1 : 2;
        static constexpr int set_bytes = (rows ? 32 * parts : 64) * width;  // of tokens, of channels
        static constexpr int tail_bytes = latent_tail<Pair>::bytes,
                             tails = page % 64 == 0 || parts == 1 ? 1 : 2;
        static_assert(!(rows && bytes) && latent_tail<Pair>::at % 16 == 0);

        static constexpr int row_words = traits::lines(dim / 4);
        KVQ_HD static constexpr int lines(int plane) { return 16 / traits::units_per_word(plane); }
        KVQ_HD static constexpr int plane_at(int plane) {
            int at = 0;
            for (int p = 0; p < plane; ++p) at += parts * lines(p) * 128;
            return at;
        }
        static constexpr int scales = 2048 * parts, biases = scales + sets * set_bytes,
                             tail = biases + sets * set_bytes, table = tail + tails * tail_bytes;
        static_assert(plane_at(traits::plane_count) <= scales && table + sets * 256 <= 4096 * parts);
    };
    using places = code_places<S>;

    /// The run of part `i` of a unit.
    template <class Runs>
    __device__ __forceinline__ static latent_run run_of(const Runs& runs, int unit, int i) {
        if constexpr (half_codes)
            return unit % 2 == 0 ? runs.run[0] : runs.run[1];
        else
            return runs.run[i];
    }

    template <class Runs>
    __device__ __forceinline__ static void fetch_codes(const Runs& runs, int unit, std::uint32_t to,
                                                       const latent_lane& own) {
        using p = places;
        const auto at = [&](int offset) { return to + static_cast<std::uint32_t>(offset); };
        const int number = unit / of_block;  // of the block of 64 channels
#pragma unroll
        for (int half = 0; half < p::parts; ++half) {
            const latent_run run = run_of(runs, unit, half);
            const std::byte* const block = run.block + Behind;
            const std::byte* const words = block + (run.token & ~31) * (p::row_words * 4);
            static_for<traits::plane_count>([&](auto plane) {
                constexpr int n = p::lines(decltype(plane)::value) * 128;
                copy<n>(at(p::plane_at(decltype(plane)::value) + half * n),
                        words + traits::first_line(decltype(plane)::value, dim / 4) * 128 + number * n,
                        run.bytes, own.lane);
            });
            const auto copy_set = [&]<int N>(std::integral_constant<int, N>, int to_set, int first) {
                const std::byte* const from = block + first * p::width;
                copy<N * p::width>(at(p::scales + to_set), from + traits::scale_offset(shape), run.bytes,
                                   own.lane);
                if constexpr (traits::has_bias)
                    copy<N * p::width>(at(p::biases + to_set), from + traits::bias_offset(shape), run.bytes,
                                       own.lane);
            };
            if constexpr (p::rows)
#pragma unroll
                for (int set = 0; set < p::sets; ++set)
                    copy_set(std::integral_constant<int, 32>{}, set * p::set_bytes + half * 32 * p::width,
                             (number * 64 + set * 32) / p::group * page + run.token);
            else if (half < p::sets)
                copy_set(std::integral_constant<int, 64>{}, half * p::set_bytes,
                         run.token / p::group * dim + number * 64);
            if constexpr (p::tail_bytes > 0)
                if (half < p::tails)
                    copy<p::tail_bytes>(at(p::tail + half * p::tail_bytes), block + latent_tail<Pair>::at,
                                        run.bytes, own.lane);
        }
    }
    /// Parameters of two channels a lane as halves, to the table.
    template <class Runs>
    __device__ __forceinline__ static void fill_table(const Runs& runs, int unit, std::uint32_t to,
                                                      const latent_lane& own) {
        using p = places;
#pragma unroll
        for (int set = 0; set < p::sets; ++set) {
            const auto numbers = [&](int section, std::uint32_t(&of)[2]) {
                const std::uint32_t at =
                    to + static_cast<std::uint32_t>(section + set * p::set_bytes + own.lane * 2 * p::width);
                if constexpr (p::width == 4) {
                    const uint2 v = load_shared_8(at);
                    of[0] = v.x;
                    of[1] = v.y;
                } else {
                    const std::uint32_t both = p::width == 2 ? load_shared_4(at) : load_shared_2(at);
                    of[0] = both & (p::width == 2 ? 0xffffu : 0xffu);
                    of[1] = both >> p::width * 8;
                }
            };
            std::uint32_t scale[2], bias[2] = {}, shared[3] = {};
            numbers(p::scales, scale);
            if constexpr (traits::has_bias) numbers(p::biases, bias);
            if constexpr (p::bytes) {
                const int first = p::tail + (p::tails == 2 ? set * p::tail_bytes : 0) +
                                  run_of(runs, unit, set).token / p::group * 6;
#pragma unroll
                for (int i = 0; i < 3; ++i)
                    shared[i] = load_shared_2(to + static_cast<std::uint32_t>(first + 2 * i));
            }
            half_parameters halves[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                stored_set<S> of;
                of.scale = scale[i];
                of.bias = bias[i];
#pragma unroll
                for (int k = 0; k < 3; ++k) of.numbers[k] = shared[k];
                halves[i] = of.halves();
            }
            const std::uint32_t at = to + static_cast<std::uint32_t>(p::table + set * 256 + own.lane * 4);
            store_word(at, halves[0].scale | static_cast<std::uint32_t>(halves[1].scale) << 16);
            store_word(at + 128, halves[0].bias | static_cast<std::uint32_t>(halves[1].bias) << 16);
        }
        __syncwarp();
    }
    /// Numbers of four neighbouring tokens, on a multiple of two bytes, or of as many as they have.
    template <int Width, bool Aligned = true>
    __device__ __forceinline__ static void load_four(std::uint32_t (&of)[4], std::uint32_t at) {
        if constexpr (Width == 4 && Aligned) {
            const uint4 v = load_shared_16(at);
#pragma unroll
            for (int i = 0; i < 4; ++i) of[i] = word_of(v, i);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const std::uint32_t from = at + static_cast<std::uint32_t>(i * Width);
                of[i] = Width == 1 ? load_shared_1(from) : load_shared_2(from);
                if constexpr (Width == 4) of[i] |= load_shared_2(from + 2) << 16;
            }
        }
    }
    template <class Runs>
    __device__ __forceinline__ static void store_codes(const Runs& runs, int unit, std::uint32_t to,
                                                       const latent_lane& own) {
        using p = places;
        const auto at = [&](int offset) { return to + static_cast<std::uint32_t>(offset); };
        constexpr bool table = !p::rows && !p::exact;
        if constexpr (table) fill_table(runs, unit, to, own);
        // Of every plane the words of an octet: two of 8 bits, otherwise one, which others may share.
        constexpr int most_words = traits::units_per_word(0) == 1 ? 2 : 1;
        uint4 word[p::parts][2][traits::plane_count][most_words];
        octet_parameters of_set[p::sets] = {};
        std::uint32_t scale[p::parts][2][4], bias[p::parts][2][4] = {}, token_scale[p::parts][2][4];
#pragma unroll
        for (int half = 0; half < p::parts; ++half)
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                const int quad = own.quad(step);
                static_for<traits::plane_count>([&](auto plane) {
                    constexpr int n = decltype(plane)::value, per = traits::units_per_word(n);
#pragma unroll
                    for (int i = 0; i < (per == 1 ? 2 : 1); ++i)
                        word[half][step][n][i] =
                            load_shared_16(at(p::plane_at(n) + half * p::lines(n) * 128 +
                                              (own.octet * 2 / per + i) * 128 + quad * 16));
                });
                const int token = half * 32 + quad * 4;
                if constexpr (p::rows) {
                    const int set = p::sets == 2 ? own.octet / 4 * p::set_bytes : 0;
                    load_four<p::width>(scale[half][step], at(p::scales + set + token * p::width));
                    if constexpr (traits::has_bias)
                        load_four<p::width>(bias[half][step], at(p::biases + set + token * p::width));
                }
                if constexpr (p::token_scales) {
                    constexpr int width = parameter_width<typename traits::token_scale_type>;
                    constexpr int behind = static_cast<int>(
                        typename S::layout_type{}.token_scale_offset(shape) - latent_tail<Pair>::at);
                    load_four<width, behind % 16 == 0>(
                        token_scale[half][step],
                        at(p::tail + (p::tails == 2 ? half * p::tail_bytes : 0) + behind +
                           (run_of(runs, unit, half).token + quad * 4) * width));
                }
            }
        if constexpr (!p::rows)
#pragma unroll
            for (int set = 0; set < p::sets; ++set) {
                const int from =
                    (table ? p::table + set * 256 : p::scales + set * p::set_bytes) + own.octet * 16;
                of_set[set].scale = load_shared_16(at(from));
                if constexpr (traits::has_bias)
                    of_set[set].bias = load_shared_16(at(table ? from + 128 : from + p::biases - p::scales));
            }
        __syncwarp();
#pragma unroll
        for (int half = 0; half < p::parts; ++half)
#pragma unroll
            for (int step = 0; step < 2; ++step)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    octet_parameters of = of_set[p::sets == 2 && !p::rows ? half : 0];
                    if constexpr (p::rows) {
                        stored_set<S> row;
                        row.scale = scale[half][step][j];
                        row.bias = bias[half][step][j];
                        of.set_all(row.halves());
                    }
                    if constexpr (p::token_scales)
                        of.token_scale = four_times(twice(
                            half_token_scale<typename traits::token_scale_type>(token_scale[half][step][j])));
                    std::uint32_t quads[2] = {}, x[4];
                    static_for<traits::plane_count>([&](auto plane) {
                        constexpr int n = decltype(plane)::value;
                        add_quads<n>(quads, word[half][step][n], j, own.octet);
                    });
                    dequantize_octet<S, stored_set<S>::has_low, p::token_scales>(x, quads[0], quads[1], of);
                    store_octet(to + half * 4096u, own, step, j, x);
                }
    }
    /// What a plane has of the codes of a token's octet, a byte each.
    template <int Plane, int Words>
    __device__ __forceinline__ static void add_quads(std::uint32_t (&quads)[2], const uint4 (&word)[Words],
                                                     int j, int octet) {
        constexpr int per = traits::units_per_word(Plane), width = 8 / per, to = traits::planes::shift(Plane);
        constexpr std::uint32_t mask = (((1u << width) - 1u) << to) * 0x01010101u;
        static_for<2>([&](auto number) {
            constexpr int i = decltype(number)::value, left = to - width * (i % per);
            std::uint32_t w = word_of(word[per == 1 ? i : 0], j);
            if constexpr (per > 2) w >>= static_cast<unsigned>(octet * 2 % per * width);
            if constexpr (left >= 0)
                quads[i] |= w << left & mask;
            else
                quads[i] |= w >> -left & mask;
        });
    }
};

/// All units of a tile of pages of Pair: those of its first block, then those of its second one. Whole: of
/// the first block.
template <class Pair, bool Whole = false>
struct tile_units {
    static constexpr bool two = Pair::second_channels > 0;
    using first = latent_units<typename Pair::first_pair, Pair::first_channels, 0, Whole>;
    using second =
        latent_units<std::conditional_t<two, typename Pair::second_pair, typename Pair::first_pair>,
                     two ? Pair::second_channels : 64, Pair::second_block, false>;
    static constexpr int count = first::count + (two ? second::count : 0);
    static constexpr std::uint32_t second_tile = Pair::first_channels * latent_tile * 2;

    template <class Runs>
    __device__ __forceinline__ static void fetch(const Runs& runs, int unit, std::uint32_t tile,
                                                 const latent_lane& own) {
        if (unit < first::count)
            first::fetch(runs, unit, tile, own);
        else if constexpr (two)
            second::fetch(runs, unit - first::count, tile + second_tile, own);
    }
    template <class Runs>
    __device__ __forceinline__ static void store(const Runs& runs, int unit, std::uint32_t tile,
                                                 std::uint64_t shown, const latent_lane& own) {
        if (unit < first::count)
            first::store(runs, unit, tile, shown, own);
        else if constexpr (two)
            second::store(runs, unit - first::count, tile + second_tile, shown, own);
    }
};

}}}  // namespace kvq::cuda::detail
