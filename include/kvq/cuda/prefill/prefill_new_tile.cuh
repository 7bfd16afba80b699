// Tokens that are not stored yet as tiles of half floats in shared memory.
//
//   keys    8 neighbouring channels of a token a lane, 16 bytes
//   values  transposed: a lane has a channel and loads it of 32 tokens
//
// Contract: tiles as in prefill_tile.cuh. Columns of values that hold no token are zero; rows of keys that
// hold none are anything.
#pragma once

#include "prefill_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Do all rows of these tensors start on 16 bytes?
template <class T>
__device__ __forceinline__ bool rows_aligned(const token_view<const T>& x) {
    return ((reinterpret_cast<std::uintptr_t>(x.data) |
             static_cast<std::uintptr_t>(x.token_stride | x.head_stride) * sizeof(T)) %
            16) == 0;
}
/// 8 neighbouring numbers in device memory as halves. Aligned: they start on 16 bytes.
template <bool Aligned, class T>
__device__ __forceinline__ void load_halves(const T* from, std::uint32_t (&x)[4]) {
    if constexpr (Aligned && sizeof(T) == 2) {
        const uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
        const std::uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int k = 0; k < 4; ++k)
            x[k] = std::is_same_v<T, float16>
                       ? w[k]
                       : pack_halves<float16>(unpack_half<T, 0>(w[k]), unpack_half<T, 1>(w[k]));
    } else {
#pragma unroll
        for (int k = 0; k < 4; ++k)
            x[k] = pack_halves<float16>(to_float(from[2 * k]), to_float(from[2 * k + 1]));
    }
}

/// A tile of new tokens in 16 bit: `count` tokens from `first` on of a head. Keys go row by row, values are
/// transposed by lanes that have a channel each. No load hangs on a condition, so that all of a lane are
/// under way together.
template <tensor Role, int TileRows, int TileColumns, int Warps, class T>
__device__ __forceinline__ void copy_new_tile(const token_view<const T>& from, int head, int first, int count,
                                              std::uint32_t to, int warp, int lane,
                                              [[maybe_unused]] const std::uint16_t* order = nullptr) {
    if constexpr (Role == tensor::key) {
        if (count <= 0) return;
        constexpr int octets = TileColumns / 8;
        const auto copy = [&]<bool Aligned>(std::bool_constant<Aligned>) {
#pragma unroll(Aligned ? 4 : 1)
            for (int i = warp * 32 + lane; i < TileRows * octets; i += Warps * 32) {
                const int token = kvq::detail::smaller(i / octets, count - 1), octet = i % octets;
                std::uint32_t x[4];
                load_halves<Aligned>(from.at(first + token, head) + octet * 8, x);
                if (order != nullptr) {
                    octet_places::of(order + octet * 8).template store<TileRows>(to, i / octets, x);
                    continue;
                }
                store_shared_16(to + octet_offset<TileRows>(i / octets, octet),
                                {__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]),
                                 __uint_as_float(x[3])});
            }
        };
        if (rows_aligned(from))
            copy(std::true_type{});
        else
            copy(std::false_type{});
    } else {
        constexpr int column_cells = TileColumns / 32, cells = TileRows / 32 * column_cells;
#pragma unroll 1
        for (int number = warp; number < cells; number += Warps) {
            const int channel = number / column_cells * 32 + lane, column = number % column_cells * 32;
            const int last = count - column - 1;
            std::uint32_t x[4][4] = {};
            if (last >= 0) {
                const T* const at = from.at(first + column, head) + channel;
                T own[32];
#pragma unroll
                for (int i = 0; i < 32; ++i) own[i] = at[kvq::detail::smaller(i, last) * from.token_stride];
#pragma unroll
                for (int i = 0; i < 16; ++i)
                    x[i / 4][i % 4] = pack_halves<float16>(2 * i <= last ? to_float(own[2 * i]) : 0.0f,
                                                           2 * i < last ? to_float(own[2 * i + 1]) : 0.0f);
            }
#pragma unroll
            for (int octet = 0; octet < 4; ++octet)
                store_shared_16(to + octet_offset<TileRows>(channel, column / 8 + octet),
                                {__uint_as_float(x[octet][0]), __uint_as_float(x[octet][1]),
                                 __uint_as_float(x[octet][2]), __uint_as_float(x[octet][3])});
        }
    }
}

}}}  // namespace kvq::cuda::detail
