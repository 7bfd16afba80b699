// Codes of a channel's grid, and of many tokens with error feedback (quant/error_feedback.hpp) on the device.
//
//   one thread per token; eight or four channels at a time, from the last ones to the first
//   carried from channels behind these: their errors times matrix rows, added from the last channel on, as
//   the CPU adds them; among them: one after the other, in registers
//
// The matrix rows of the next channels are on their way while these are quantized.
// Contract: the same codes as on the CPU; errors take the place of numbers, 0 where a number is not finite.
#pragma once

#include "../../core/rounding.hpp"
#include "../layout/code_words.cuh"
#include "grid_memory.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Stored parameters of a channel and its largest code.
struct stored_grid {
    float bias, scale, inverse;
    int top;

    __device__ __forceinline__ int code(float x) const {
        return kvq::detail::affine_code(x, bias, inverse, top);
    }
    /// What is lost; nothing where x is not finite.
    __device__ __forceinline__ float error(float x, int code) const {
        return kvq::detail::is_finite(x) ? x - kvq::detail::affine_value(code, scale, bias) : 0.0f;
    }
};

/// Codes of a lane of a line of `Group` finite numbers (fit_grids.cuh), four neighbouring ones as the bytes
/// of a word. Mean: returns the sum of the line's errors, for a mean that is added to the bias and rounded to
/// a float. The CPU adds one error after the other; where the order could matter to that float, so does this.
template <int Lanes, int Group, bool Mean, int Quads>
__device__ __forceinline__ double code_line(const float* x, int q, const stored_grid& grid,
                                            std::uint32_t (&quads)[Quads]) {
    const auto top = static_cast<float>(grid.top);
    double sum = 0.0;
    float size = 0.0f;
#pragma unroll
    for (int j = 0; j < Quads; ++j) {
        const auto v = *reinterpret_cast<const float4*>(x + 4 * (q + Lanes * j));
        const float y[4] = {v.x, v.y, v.z, v.w};
        std::uint32_t codes[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float position = __fmul_rn(y[k] - grid.bias, grid.inverse);
            const float code = __fadd_rn(fminf(fmaxf(position, 0.0f), top), 0x1p23f);
            codes[k] = __float_as_uint(code);
            if constexpr (Mean) {
                const float error = y[k] - (__fmul_rn(grid.scale, code - 0x1p23f) + grid.bias);
                sum += static_cast<double>(error);
                size += fabsf(error);
            }
        }
        quads[j] = bytes_as_word(codes);
    }
    if constexpr (Mean) {
        const auto bias = static_cast<double>(grid.bias);
        sum = line_sum<Lanes>(sum);
        const double mean = bias + sum / Group,
                     off = (static_cast<double>(line_sum<Lanes>(size)) + fabs(bias)) * 0x1p-48;
        if (static_cast<float>(mean - off) != static_cast<float>(mean + off)) {
            sum = 0.0;
            for (int t = 0; t < Group; ++t) sum += static_cast<double>(grid.error(x[t], grid.code(x[t])));
        }
    }
    return sum;
}

/// matrix: [dim][dim], row c: what an error of channel c adds to those before it. rows: scratch of 2 *
/// feedback_channels * dim doubles. numbers, codes: [dim][stride]. grid(channel, slot): a stored_grid. All
/// threads of a block; ends with a barrier.
template <int Threads, int Dim, class Valid, class Grid>
__device__ __forceinline__ void code_with_feedback(const float* matrix, double* rows, float* numbers,
                                                   int stride, std::uint8_t* codes, int count,
                                                   const Valid& valid, const Grid& grid) {
    constexpr int some = feedback_channels<Dim>, share = ceil_div(some * Dim, Threads);
    const int thread = static_cast<int>(threadIdx.x);
    float next[share];
    // Columns [first, first + some) of the rows from first on.
    const auto fetch = [&](int first) {
#pragma unroll
        for (int i = 0; i < share; ++i) {
            const int c = first + (i * Threads + thread) / some, j = first + (i * Threads + thread) % some;
            next[i] = c < Dim && j < Dim ? matrix[c * Dim + j] : 0.0f;
        }
    };
    const auto keep = [&](double* to) {
#pragma unroll
        for (int i = 0; i < share; ++i)
            if (i * Threads + thread < some * Dim) to[i * Threads + thread] = static_cast<double>(next[i]);
    };
    constexpr int last = (Dim - 1) / some * some;
    fetch(last);
    keep(rows);
    __syncthreads();
    for (int first = last, buffer = 0; first >= 0; first -= some, buffer ^= 1) {
        const double* const own = rows + buffer * some * Dim;
        if (first > 0) fetch(first - some);
        for (int t = thread; t < count; t += Threads) {
            double carried[some] = {};
#pragma unroll 4
            for (int c = Dim - 1; c >= first + some; --c) {
                const double error = static_cast<double>(numbers[c * stride + t]);
                const auto* const row = reinterpret_cast<const double2*>(own + (c - first) * some);
#pragma unroll
                for (int k = 0; k < some; k += 2) {
                    const double2 r = row[k / 2];
                    carried[k] += r.x * error;
                    carried[k + 1] += r.y * error;
                }
            }
            const bool real = valid(t);
#pragma unroll
            for (int k = some - 1; k >= 0; --k) {
                const int c = first + k;
                if (c >= Dim) continue;
                const stored_grid g = grid(c, t);
                const float x = numbers[c * stride + t];
                const int code = g.code(x + static_cast<float>(carried[k]));
                const float lost = real ? g.error(x, code) : 0.0f;
                const double error = static_cast<double>(lost);
#pragma unroll
                for (int j = 0; j < k; ++j) carried[j] += own[k * some + j] * error;
                numbers[c * stride + t] = lost;
                codes[c * stride + t] = static_cast<std::uint8_t>(code);
            }
        }
        if (first > 0) keep(rows + (buffer ^ 1) * some * Dim);
        __syncthreads();
    }
}

}}}  // namespace kvq::cuda::detail
