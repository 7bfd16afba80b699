// Rows of tokens in the bytes of other systems (schemes/row_layout.hpp) as tiles of half floats, as
// prefill_tile.cuh makes them of the library's blocks.
//
//   keys     a lane takes 8 channels of a token, neighbouring lanes those behind them: 16 bytes of the tile
//   values   a lane takes 4 channels of 8 tokens, and joins the bytes of two tokens: 16 bytes of four rows
//
// Lanes of values begin with different channels of their four, so that 8 of them that store 16 bytes meet all
// banks.
// Contract: tiles as in prefill_tile.cuh. x^ is number times scale as half floats: the scale is that of the
// group times that of the tensor, rounded once; of keys that have the tensor's alone, in two parts.
#pragma once

#include "../layout/row_numbers.cuh"
#include "prefill_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Why a prompt's attention does not read such rows; null: it does.
template <class S>
constexpr const char* no_row_tiles(const block_shape& s) noexcept {
    if (!row_reader<S>::reads) return own_blocks;
    if (s.dim % 32 != 0 || s.dim > 128) return "head_dim of rows of tokens is not a multiple of 32 up to 128";
    return s.tokens != 16 && s.tokens % 32 != 0 ? odd_pages : nullptr;
}

template <tensor Role, class Pair, int TileRows, int TileColumns, int Warps, int Stride>
struct row_cells {
    using S = scheme_of<Role, Pair>;
    using reader = row_reader<S>;
    static constexpr bool key = Role == tensor::key, fours = reader::fours;
    static constexpr block_shape shape = shape_of<Role, Pair>;
    static constexpr int page = Pair::page_tokens, dim = shape.dim;
    static constexpr int row_bytes = S::fixed_layout().row_bytes(dim),
                         scale_count = S::fixed_layout().scales_behind(dim), scales_at = page * row_bytes;
    /// Pieces of the tile: 8 channels of a token, or 4 channels of 8 tokens.
    static constexpr int in_line = key ? dim / 8 : dim / 4,
                         pieces = in_line * (key ? TileRows : TileColumns / 8),
                         count = kvq::detail::ceil_div(pieces, 32 * Warps);
    static constexpr bool all_exist = count * 32 * Warps == pieces;
    static constexpr int words = key ? (fours ? 1 : 2) : 8, scales = !reader::scaled ? 0 : key ? 1 : 2;

    struct lane_channel {
        float tensor_scale;
        __device__ __forceinline__ lane_channel(const cache_ref<Pair>& cache, int, int, int)
            : tensor_scale(detail::tensor_scale<Role>(cache)) {}
    };
    float tensor_scale;
    std::uint32_t word[count][words];
    std::uint32_t scale[count][scales + 1];  // codes, a byte each

    __device__ __forceinline__ explicit row_cells(const lane_channel& own) : tensor_scale(own.tensor_scale) {}

    template <class Source>
    __device__ __forceinline__ void fetch(const Source& source, const tile_tokens& tile, int warp, int lane) {
        const bool any = source.any(tile);
#pragma unroll
        for (int n = 0; n < count; ++n) {
#pragma unroll
            for (int k = 0; k < words; ++k) word[n][k] = 0;
#pragma unroll
            for (int k = 0; k < scales; ++k) scale[n][k] = 0;
            if (!any) continue;
            const piece own(n, warp, lane);
            const auto block = source.block(source.page(tile, own.token), own.token);
            const int token = (tile.first + own.token) % page;
            if constexpr (key) {
                const auto from =
                    block.from(static_cast<std::size_t>(token * row_bytes + own.channel / (fours ? 2 : 1)));
                if constexpr (fours) {
                    word[n][0] = from.template get<4>(0);
                } else {
                    const uint2 both = from.two(0);
                    word[n][0] = both.x, word[n][1] = both.y;
                }
                if constexpr (reader::scaled)
                    scale[n][0] =
                        block.template get<1>(scales_at + token * scale_count + own.channel / S::channels);
            } else {
                const auto from =
                    block.from(static_cast<std::size_t>(token * row_bytes + own.channel / (fours ? 2 : 1)));
#pragma unroll
                for (int k = 0; k < 8; ++k) word[n][k] = from.template get < fours ? 2 : 4 > (k * row_bytes);
                if constexpr (reader::scaled)
#pragma unroll
                    for (int k = 0; k < 8; ++k)
                        scale[n][k / 4] |= block.template get<1>(scales_at + (token + k) * scale_count +
                                                                 own.channel / S::channels)
                                           << 8 * (k % 4);
            }
        }
    }

    template <class Source>
    __device__ __forceinline__ void store(const Source& source, std::uint32_t to, const tile_tokens& tile,
                                          std::uint32_t, int warp, int lane) const {
#pragma unroll
        for (int n = 0; n < count; ++n) {
            const piece own(n, warp, lane);
            const bool exists = all_exist || own.exists;
            if constexpr (key) {
                store_key(to, own, n, exists);
            } else {
                // All lanes: they ask each other.
                const std::uint32_t existing =
                    source.existing(tile, own.token & ~(slice_tokens - 1)) >> own.token % slice_tokens;
                store_values(to, own, n, exists, existing & 0xffu);
            }
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
        }
    };

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
    struct factor {
        std::uint32_t high, low;
        /// Of two steps.
        __device__ __forceinline__ factor(float a, float b) : high(pack_halves<float16>(a, b)), low(0) {
            if constexpr (key && !reader::scaled)
                low = pack_halves<float16>(a - unpack_half<float16, 0>(high),
                                           b - unpack_half<float16, 1>(high));
        }
        __device__ __forceinline__ std::uint32_t times(std::uint32_t x) const {
            if constexpr (key && !reader::scaled)
                return multiply_add_halves(x, high, multiply_halves(x, low));
            else
                return multiply_halves(x, high);
        }
    };

    __device__ __forceinline__ void store_key(std::uint32_t to, const piece& own, int n, bool exists) const {
        const float own_step = step(scale[n][0]);
        const factor f(own_step, own_step);
        std::uint32_t bytes[2] = {word[n][0], word[n][words - 1]}, x[4];
        if constexpr (fours) {
            const std::uint32_t even = reader::lower(word[n][0]), odd = reader::upper(word[n][0]);
            bytes[0] = __byte_perm(even, odd, 0x5140);
            bytes[1] = __byte_perm(even, odd, 0x7362);
        }
        reader::of_bytes(bytes[0], x[0], x[1]);
        reader::of_bytes(bytes[1], x[2], x[3]);
#pragma unroll
        for (int k = 0; k < 4; ++k) x[k] = f.times(x[k]);
        if (exists)
            store_shared_16(
                to + octet_offset<Stride>(own.token, own.channel / 8),
                {__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]), __uint_as_float(x[3])});
    }

    __device__ __forceinline__ void store_values(std::uint32_t to, const piece& own, int n, bool exists,
                                                 std::uint32_t existing) const {
        // Rows 4 q to 4 q + 3 of the tile; the lane's first one is the one that differs from those of the
        // other lanes.
        const unsigned turn = static_cast<unsigned>(own.channel >> 3) & 3u;
        std::uint32_t x[4][4];  // of channels turn, turn + 1, ... modulo 4: 8 tokens
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            std::uint32_t a = word[n][2 * k], b = word[n][2 * k + 1];
            if constexpr (fours) {
                a = (a * 0x10001u) >> 4 * turn;
                b = (b * 0x10001u) >> 4 * turn;
                const std::uint32_t joined = __byte_perm(a, b, 0x5140);
                reader::of_bytes(reader::lower(joined), x[0][k], x[2][k]);
                reader::of_bytes(reader::upper(joined), x[1][k], x[3][k]);
            } else {
                const unsigned second = turn + 1 & 3u, third = turn + 2 & 3u, fourth = turn + 3 & 3u;
                reader::of_bytes(__byte_perm(a, b, turn | (turn + 4) << 4 | second << 8 | (second + 4) << 12),
                                 x[0][k], x[1][k]);
                reader::of_bytes(
                    __byte_perm(a, b, third | (third + 4) << 4 | fourth << 8 | (fourth + 4) << 12), x[2][k],
                    x[3][k]);
            }
            float steps[2];
#pragma unroll
            for (int j = 0; j < 2; ++j)
                steps[j] = step(reader::scaled ? scale[n][k / 2] >> 8 * (2 * k % 4 + j) & 0xffu : 0u);
            const factor f(steps[0], steps[1]);
            const std::uint32_t shown =
                (existing >> 2 * k & 1u ? 0xffffu : 0u) | (existing >> 2 * k & 2u ? 0xffff0000u : 0u);
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i][k] = f.times(x[i][k]) & shown;
        }
        if (exists)
#pragma unroll
            for (unsigned i = 0; i < 4; ++i)
                store_shared_16(
                    to + octet_offset<Stride>(own.channel + static_cast<int>(turn + i & 3u), own.token / 8),
                    {__uint_as_float(x[i][0]), __uint_as_float(x[i][1]), __uint_as_float(x[i][2]),
                     __uint_as_float(x[i][3])});
    }
};

}}}  // namespace kvq::cuda::detail
