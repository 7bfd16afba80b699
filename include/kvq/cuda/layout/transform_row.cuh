// A row of channels times a transform, where lanes of a warp share the row: queries, outputs, tokens that are
// quantized or dequantized.
//
//   transform_row   x = T x        restore_row   x = T^-1 x
//
// Whoever has a row says how its channels are spread: `Low` bits of a channel's number tell registers apart,
// the next `Lanes` bits lanes (from bit `First` of the lane's number on), the rest again registers. So a step
// of a Hadamard matrix is sums and differences of registers, or one exchange of lanes.
// Contract: the bits of the CPU (quant/hadamard.hpp, quant/rotation.hpp), also with --use_fast_math; of
// rotations where Sum is double and channels follow each other by lanes (token_channels). Values are finite.
// All lanes of a warp take part.
#pragma once

#include <bit>

#include "unpack_codes.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

template <int Low, int Lanes, int First>
struct row_layout {
    static constexpr int low = Low, lanes = Lanes, first = First;

    __device__ __forceinline__ static int channel(int number, int lane) {
        return (number >> Low) << (Low + Lanes) | (lane >> First & ((1 << Lanes) - 1)) << Low |
               (number & ((1 << Low) - 1));
    }
};
/// Lane l has channels l, l + 32, ...
using token_channels = row_layout<0, 5, 0>;
template <int Dim>
inline constexpr int token_numbers = kvq::detail::ceil_div(Dim, 32);

/// Of the largest block: distances 1, 2, 4, ...
template <int Dim>
inline constexpr int hadamard_steps = std::bit_width(static_cast<unsigned>(Dim)) - 1;

template <class Layout, int Dim, int N>
__device__ __forceinline__ void hadamard_row(float (&x)[N], int largest) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    constexpr bool alike = (Dim & (Dim - 1)) == 0;  // all channels have blocks of one size
    int blocks[alike ? 1 : N];
#pragma unroll
    for (int i = 0; i < (alike ? 1 : N); ++i)
        blocks[i] = kvq::detail::hadamard_block(Dim, largest, alike ? 0 : Layout::channel(i, lane));
    const auto inside = [&](int number, int half) {
        return Layout::channel(number, lane) < Dim && half < blocks[alike ? 0 : number];
    };
    static_for<hadamard_steps<Dim>>([&](auto step) {
        constexpr int bit = decltype(step)::value, half = 1 << bit;
        if constexpr (bit >= Layout::low && bit < Layout::low + Layout::lanes) {
            constexpr int other = 1 << (bit - Layout::low + Layout::first);
            const bool upper = (lane & other) != 0;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float y = __shfl_xor_sync(~0u, x[i], other), sum = upper ? y - x[i] : x[i] + y;
                if (inside(i, half)) x[i] = sum;
            }
        } else {
            constexpr int other = bit < Layout::low ? half : half >> Layout::lanes;
#pragma unroll
            for (int i = 0; i < N; ++i)
                if ((i & other) == 0 && i + other < N && inside(i, half)) {
                    const float a = x[i], b = x[i + other];
                    x[i] = a + b;
                    x[i + other] = a - b;
                }
        }
    });
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (inside(i, 0)) x[i] = __fmul_rn(x[i], kvq::detail::hadamard_norm(blocks[alike ? 0 : i]));
}
template <class Layout, int Dim, int N>
__device__ __forceinline__ void sign_row(float (&x)[N], const device_transform& t, int head) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (kvq::detail::random_sign(t.what.seed, {t.layer, head}, Layout::channel(i, lane)) < 0.0f)
            x[i] = -x[i];
}

/// x[i] = sum of columns[c][i] x[c] over c. A loop, since it takes many instructions.
template <class Layout, int Dim, class Sum, int N>
__device__ __forceinline__ void multiply_row(float (&x)[N], const float* columns) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    constexpr int all = (1 << Layout::lanes) - 1;
    Sum sums[N] = {};
    float row[N];
#pragma unroll
    for (int i = 0; i < N; ++i) row[i] = x[i];
#pragma unroll 1
    for (int i = 0; i < N << Layout::lanes; ++i) {
        const int number = i >> Layout::lanes,
                  holder = (lane & ~(all << Layout::first)) | (i & all) << Layout::first,
                  c = Layout::channel(number, holder);
        const float y = __shfl_sync(~0u, row[number], holder);
        if (c >= Dim) continue;
#pragma unroll
        for (int k = 0; k < N; ++k)
            if (const int to = Layout::channel(k, lane); to < Dim)
                sums[k] += static_cast<Sum>(__ldg(columns + c * Dim + to)) * static_cast<Sum>(y);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = static_cast<float>(sums[i]);
}

/// x = T x. Sum: of products with matrices.
template <class Layout, int Dim, class Sum = double, int N>
__device__ __forceinline__ void transform_row(float (&x)[N], const device_transform& t, int head) {
    if (t.what.kind == transform_kind::matrix) {
        multiply_row<Layout, Dim, Sum>(x, t.columns + static_cast<std::size_t>(head) * Dim * Dim);
    } else {
        sign_row<Layout, Dim>(x, t, head);
        hadamard_row<Layout, Dim>(x, t.what.largest);
    }
}
/// x = T^-1 x.
template <class Layout, int Dim, class Sum = double, int N>
__device__ __forceinline__ void restore_row(float (&x)[N], const device_transform& t, int head) {
    if (t.what.kind == transform_kind::matrix) {
        multiply_row<Layout, Dim, Sum>(x, t.rows + static_cast<std::size_t>(head) * Dim * Dim);
    } else {
        hadamard_row<Layout, Dim>(x, t.what.largest);
        sign_row<Layout, Dim>(x, t, head);
    }
}

}}}  // namespace kvq::cuda::detail
