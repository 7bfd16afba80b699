// Rows of tokens in the bytes of other systems (schemes/row_layout.hpp) as tiles of half floats, as
// prefill_tile.cuh makes them of the library's blocks.
//
//   keys     a lane takes 8 channels of a token, neighbouring lanes those behind them: 16 bytes of the tile
//   values   a lane takes 4 channels of 8 tokens, and joins the bytes of two tokens: 16 bytes of four rows
//
// Lanes of values begin with different channels of their four, so that 8 of them that store 16 bytes meet all
// banks.
// Pages of any size: where they do not hold whole slices (pages of 1), a table names every token's.
// Contract: tiles as in prefill_tile.cuh; a token that the table of such pages does not name makes keys of
// NaN. x^ is number times scale as half floats: the scale is that of the group times that of the tensor,
// rounded once; of keys that have the tensor's alone, in two parts.
#pragma once

#include "../layout/row_numbers.cuh"
#include "prefill_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Why a prompt's attention does not read such rows; null: it does.
template <class S>
constexpr const char* no_row_tiles(const block_shape& s) noexcept {
    if (!row_reader<S>::reads) return own_blocks;
    if (s.dim % 32 != 0 || (s.dim > 256 && s.dim != 512))
        return "head_dim is not a multiple of 32 up to 256, or 512";
    return nullptr;
}

template <tensor Role, class Pair, int TileRows, int TileColumns, int Warps, bool Ordered>
struct row_cells {
    using S = scheme_of<Role, Pair>;
    using reader = row_reader<S>;
    static constexpr bool key = Role == tensor::key, fours = reader::fours;
    static constexpr block_shape shape = shape_of<Role, Pair>;
    static constexpr int page = Pair::page_tokens, dim = shape.dim;
    static constexpr int row_bytes = S::fixed_layout().row_bytes(dim),
                         scale_count = S::fixed_layout().scales_behind(dim), scales_at = page * row_bytes;
    /// Pieces of the tile: 8 channels of a token, or 4 channels of 8 tokens.
    static constexpr int in_line = key ? TileColumns / 8 : TileRows / 4,
                         pieces = in_line * (key ? TileRows : TileColumns / 8),
                         count = kvq::detail::ceil_div(pieces, 32 * Warps);
    static constexpr bool all_exist = count * 32 * Warps == pieces;
    static constexpr int words = key ? (fours ? 1 : 2) : 8, scales = !reader::scaled ? 0 : key ? 1 : 2;

    struct lane_channel {
        float tensor_scale;
        [[no_unique_address]] std::conditional_t<key && Ordered, const std::uint16_t*, no_set> order;
        __device__ __forceinline__ lane_channel(const cache_ref<Pair>& cache, int, int, int, int,
                                                [[maybe_unused]] const std::uint16_t* places = nullptr)
            : tensor_scale(detail::tensor_scale<Role>(cache)) {
            if constexpr (key && Ordered) order = places;
        }
    };
    __device__ __forceinline__ explicit row_cells(const lane_channel& own)
        : tensor_scale(own.tensor_scale), order(own.order) {}

    template <class Source>
    __device__ __forceinline__ void fetch(const Source& source, const tile_tokens& tile, int warp, int lane) {
#pragma unroll
        for (int n = 0; n < count; ++n) words_of[n].load(source, tile, piece(n, warp, lane));
    }

    template <class Source>
    __device__ __forceinline__ void store(const Source& source, std::uint32_t to, const tile_tokens& tile,
                                          std::uint32_t, int warp, int lane) const {
#pragma unroll
        for (int n = 0; n < count; ++n) {
            const piece own(n, warp, lane);
            if constexpr (key)
                store_key(to, own, words_of[n]);
            else  // all lanes: they ask each other
                store_values(
                    to, own, words_of[n],
                    source.existing(tile, own.token & ~(slice_tokens - 1)) >> own.token % slice_tokens &
                        0xffu);
        }
    }

private:
    struct piece {
        int channel, token;  // the first ones
        bool exists;
        __device__ __forceinline__ piece(int n, int warp, int lane) {
            const int i = (n * Warps + warp) * 32 + lane, held = kvq::detail::smaller(i, pieces - 1);
            exists = i < pieces;
            channel = held % in_line * (key ? 8 : 4);
            token = held / in_line * (key ? 1 : 8);
            // Where a token has four pieces, 8 lanes have those of tokens t and t + 4: they meet all banks.
            if (key && in_line == 4) token = (token & ~7) | (token & 1) << 2 | (token & 6) >> 1;
        }
    };

    struct piece_words {
        std::uint32_t word[words] = {}, scale[scales + 1] = {};  // scale: codes, a byte each
        [[no_unique_address]] std::conditional_t<split_slices<Pair>, bool, no_set> lacks{};

        template <class Source>
        __device__ __forceinline__ void load(const Source& source, const tile_tokens& tile,
                                             const piece& own) {
            if (!source.any(tile)) return;
            const auto& cache = *source.cache;
            if constexpr (split_slices<Pair>) {
                const int* const table = cache.block_table + cache.table_entry(source.sequence, 0);
                int number[key ? 1 : 8];
#pragma unroll
                for (int k = 0; k < (key ? 1 : 8); ++k)
                    number[k] = __ldg(table + token_of(tile, own, k) / page);
                if constexpr (reader::scaled)
#pragma unroll
                    for (int k = 0; k < scales; ++k) scale[k] = 0;
#pragma unroll
                for (int k = 0; k < (key ? 1 : 8); ++k) {
                    lacks = lacks || number[k] < 0;
                    if (number[k] < 0) continue;
                    const row_address at = address(source, number[k], token_of(tile, own, k) % page);
                    load_token(own, k, block_in_memory{at.row}, block_in_memory{at.scales});
                }
            } else {
                const int number = source.page(tile, own.token), token = (tile.first + own.token) % page;
                const row_address at = address(source, number, token);
                int to_next = row_bytes, to_scales = scale_count;
                if constexpr (is_strided<Pair>) {
                    const row_memory& m = cache.template row_memory_of<Role>();
                    to_next = static_cast<int>(m.token_bytes);
                    to_scales = static_cast<int>(m.scale_token_bytes);
                }
                load(own, block_in_memory{at.row}, to_next, block_in_memory{at.scales}, to_scales);
            }
        }
        __device__ __forceinline__ static int token_of(const tile_tokens& tile, const piece& own, int k) {
            return tile.first + kvq::detail::smaller(own.token + k, tile.count - 1);
        }
        template <class Source>
        __device__ __forceinline__ static row_address address(const Source& source, int number, int token) {
            if constexpr (is_strided<Pair>) {
                return source.cache->template row<Role>(number, source.head, token);
            } else {
                std::byte* const block = source.cache->template block<Role>(number, source.head);
                return {block + token * row_bytes, block + scales_at + token * scale_count};
            }
        }
        /// From a token's row, and its scales, on; to_next, to_scales: bytes to those of the next token.
        __device__ __forceinline__ void load(const piece& own, const block_in_memory& row, int to_next,
                                             const block_in_memory& scales_of_row, int to_scales) {
            if constexpr (reader::scaled)
#pragma unroll
                for (int k = 0; k < scales; ++k) scale[k] = 0;
#pragma unroll
            for (int k = 0; k < (key ? 1 : 8); ++k)
                load_token(own, k, row.from(static_cast<std::size_t>(k * to_next)),
                           scales_of_row.from(static_cast<std::size_t>(k * to_scales)));
        }
        /// Token k of the piece.
        __device__ __forceinline__ void load_token(const piece& own, int k, const block_in_memory& row,
                                                   [[maybe_unused]] const block_in_memory& scales_of_row) {
            const auto from = row.from(static_cast<std::size_t>(own.channel / (fours ? 2 : 1)));
            if constexpr (!key) {
                word[k] = from.template get < fours ? 2 : 4 > (0);
            } else if constexpr (fours) {
                word[0] = from.template get<4>(0);
            } else {
                const uint2 both = from.two(0);
                word[0] = both.x, word[1] = both.y;
            }
            if constexpr (reader::scaled)
                scale[k / 4] |=
                    scales_of_row.from(static_cast<std::size_t>(own.channel / S::channels)).template get<1>(0)
                    << 8 * (k % 4);
        }
    };
    float tensor_scale;
    [[no_unique_address]] decltype(lane_channel::order) order;
    piece_words words_of[count];

    /// The scale of a code.
    __device__ __forceinline__ float step(std::uint32_t code) const {
        constexpr float unit = fours ? 64.0f : 1.0f;
        if constexpr (!reader::scaled)
            return tensor_scale * unit;
        else if constexpr (reader::by_exponent)
            return e8m0::to_float(static_cast<std::uint8_t>(code)) * unit;
        else
            return half_bits_to_float(static_cast<std::uint16_t>(halves_of_e4m3<0>(code))) *
                   (tensor_scale * unit);
    }
    /// Times two steps.
    template <int N>
    __device__ __forceinline__ void multiply(std::uint32_t (&x)[N], float a, float b) const {
        if constexpr (fours)
            if (fmaxf(fabsf(a), fabsf(b)) > 65504.0f) {  // with the 64 that numbers lack no half float
                a *= 0x1p-6f, b *= 0x1p-6f;
#pragma unroll
                for (int i = 0; i < N; ++i) x[i] = multiply_halves(x[i], 0x54005400u);  // 64
            }
        const std::uint32_t high = pack_halves<float16>(a, b);
        if constexpr (!reader::scaled) {
            if (tensor_scale == 1.0f) return;
            // The same for all scores: what it loses by being rounded would not average out.
            const std::uint32_t low =
                pack_halves<float16>(a - unpack_half<float16, 0>(high), b - unpack_half<float16, 1>(high));
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] = multiply_add_halves(x[i], high, multiply_halves(x[i], low));
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] = multiply_halves(x[i], high);
        }
    }

    __device__ __forceinline__ void store_key(std::uint32_t to, const piece& own,
                                              const piece_words& w) const {
        std::uint32_t bytes[2] = {w.word[0], w.word[words - 1]}, x[4];
        if constexpr (fours) {
            const std::uint32_t even = e2m1_as_e4m3<0>(w.word[0]), odd = e2m1_as_e4m3<1>(w.word[0]);
            bytes[0] = __byte_perm(even, odd, 0x5140);
            bytes[1] = __byte_perm(even, odd, 0x7362);
        }
        reader::of_bytes(bytes[0], x[0], x[1]);
        reader::of_bytes(bytes[1], x[2], x[3]);
        const float own_step = step(w.scale[0]);
        multiply(x, own_step, own_step);
        if constexpr (split_slices<Pair>)
            if (w.lacks) x[0] = x[1] = x[2] = x[3] = 0x7fff7fffu;
        if constexpr (key && Ordered)
            if (order != nullptr) {
                if (own.exists)
                    octet_places::of(order + own.channel).template store<TileRows>(to, own.token, x);
                return;
            }
        if (all_exist || own.exists)
            store_shared_16(
                to + octet_offset<TileRows>(own.token, own.channel / 8),
                {__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]), __uint_as_float(x[3])});
    }

    __device__ __forceinline__ void store_values(std::uint32_t to, const piece& own, const piece_words& w,
                                                 std::uint32_t existing) const {
        // The lane's four rows, from the one on that differs from those of other lanes.
        const unsigned turn = static_cast<unsigned>(own.channel >> 3) & 3u;
        const auto bytes_of =
            [](unsigned first) {  // of two words, for __byte_perm: channels first, first + 1
                const unsigned second = first + 1 & 3u;
                first &= 3u;
                return first | (first + 4) << 4 | second << 8 | (second + 4) << 12;
            };
        [[maybe_unused]] const unsigned front = bytes_of(turn), back = bytes_of(turn + 2);
        std::uint32_t x[4][4];  // of 8 tokens, two in a word: channels turn, turn + 1, ... modulo 4
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const std::uint32_t a = w.word[2 * k], b = w.word[2 * k + 1];
            std::uint32_t two[4];
            if constexpr (fours) {
                const std::uint32_t joined =
                    __byte_perm(a * 0x10001u >> 4 * turn, b * 0x10001u >> 4 * turn, 0x5140);
                reader::of_bytes(e2m1_as_e4m3<0>(joined), two[0], two[2]);
                reader::of_bytes(e2m1_as_e4m3<1>(joined), two[1], two[3]);
            } else {
                reader::of_bytes(__byte_perm(a, b, front), two[0], two[1]);
                reader::of_bytes(__byte_perm(a, b, back), two[2], two[3]);
            }
            const auto code = [&](int token) {
                return reader::scaled ? w.scale[token / 4 % (scales + 1)] >> 8 * (token % 4) & 0xffu : 0u;
            };
            multiply(two, step(code(2 * k)), step(code(2 * k + 1)));
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i][k] = two[i];
        }
        if (existing != 0xffu)  // weights of other tokens are 0, but their bytes may be no numbers
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    x[i][k] &=
                        (existing >> 2 * k & 1u ? 0xffffu : 0u) | (existing >> 2 * k & 2u ? 0xffff0000u : 0u);
        if (all_exist || own.exists)
#pragma unroll
            for (unsigned i = 0; i < 4; ++i)
                store_shared_16(
                    to + octet_offset<TileRows>(own.channel + static_cast<int>(turn + i & 3u), own.token / 8),
                    {__uint_as_float(x[i][0]), __uint_as_float(x[i][1]), __uint_as_float(x[i][2]),
                     __uint_as_float(x[i][3])});
    }
};

}}}  // namespace kvq::cuda::detail
