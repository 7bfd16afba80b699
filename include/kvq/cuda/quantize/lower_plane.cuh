// The lower plane of a block whose upper one has just been written (plane_pair.cuh): what is left of every
// number, as a code of 4 bits.
//
//   l = round(16 (x - x^) / s + 7.5), limited to 0 .. 15;  x^ and s of the upper plane, token scales included
//
// Contract: the bytes of cpu/product/plane_codes.hpp. All threads of a block; the upper plane is in device
// memory and was written by them.
#pragma once

#include "../layout/block_access.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// x: what the upper plane stands for as `m` says, `rest`: what is left of a number.
__device__ __forceinline__ std::uint32_t lower_code(const code_meaning_of_number& m, unsigned upper,
                                                    float x) {
    const float step = m.step(), left = x - m.value(static_cast<float>(static_cast<int>(upper)));
    const float l = step > 0.0f ? fmaf(__fdiv_rn(left, step), 16.0f, 7.5f) : 8.0f;
    // A quotient that is not a number is in the middle.
    const float limited = l > 0.0f ? kvq::detail::smaller(l, 15.0f) : l == l ? 0.0f : 8.0f;
    return __float_as_uint(__fadd_rn(limited, 8388608.0f)) & 15u;
}

/// number(token, channel): x.
template <class S, int Threads, class Number>
__device__ __forceinline__ void write_lower_plane(const block_shape& s, const std::byte* upper,
                                                  std::byte* lower, std::size_t bytes, const Number& number) {
    const auto codes = typename S::layout_type{}.codes(s);
    const bool key = s.role == tensor::key;
    const int words = codes.tiles.words_per_row, rows = codes.rows().size;
    const std::size_t of_codes = codes.bytes();
    // Gaps of odd rows, and what rounds the plane up.
    if (rows != codes.rows().padded_size() || of_codes != bytes) {
        for (std::size_t i = threadIdx.x; i < bytes / 4; i += Threads)
            reinterpret_cast<std::uint32_t*>(lower)[i] = 0;
        __syncthreads();
    }
    for (int i = static_cast<int>(threadIdx.x); i < rows * words; i += Threads) {
        const int row = i % rows, vector = i / rows;
        const std::size_t word = codes.tiles.word(row, vector);
        const std::uint32_t of_upper = reinterpret_cast<const std::uint32_t*>(upper)[word];
        std::uint32_t of_lower = 0;
#pragma unroll 1
        for (int j = 0; j < 8; ++j) {
            const int column =
                8 * vector + j < codes.cols.padded_size() ? codes.cols.index(8 * vector + j) : -1;
            if (column < 0) continue;
            const int token = key ? row : column, channel = key ? column : row,
                      shift = 8 * (j % 4) + 4 * (j / 4);
            of_lower |= lower_code(meaning_of_number<S>(s, upper, token, channel), of_upper >> shift & 15u,
                                   number(token, channel))
                        << shift;
        }
        reinterpret_cast<std::uint32_t*>(lower)[word] = of_lower;
    }
}

}}}  // namespace kvq::cuda::detail
