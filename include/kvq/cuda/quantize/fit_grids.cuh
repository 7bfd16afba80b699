// Fitting grids to channels on the device: quant/encoders.hpp, many channels at a time.
//
//   search    10 lanes per channel, a candidate each; a lane adds up all eight parts of its sum of squared errors
//   refit     4 lanes per channel, two parts of every sum each; totals go from lane to lane in the order of the parts
//
// Numbers lie in shared memory, the finite ones of a channel one after the other, so that number i belongs to
// part i % 8 as on the CPU. Sums of codes and of their squares are integers below 2^24 and may be added in
// any order.
// Contract: the same grids as on the CPU, bit for bit.
#pragma once

#include "../../quant/encoder_traits.hpp"
#include "../layout/warp_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

using kvq::grid_fit;
using kvq::detail::encoder_traits;

/// Does the encoder fit some channels so, or with more effort?
template <class Encoder>
inline constexpr bool may_search = encoder_traits<Encoder>::fits.any(grid_fit::search) ||
                                   encoder_traits<Encoder>::alone.any(grid_fit::search);
template <class Encoder>
inline constexpr bool may_refit = encoder_traits<Encoder>::fits.any(grid_fit::squares) ||
                                  encoder_traits<Encoder>::alone.any(grid_fit::squares);

template <class Encoder>
__device__ __forceinline__ grid_fit fit_of(int top, bool feedback) {
    constexpr auto fits = encoder_traits<Encoder>::fits, alone = encoder_traits<Encoder>::alone;
    return feedback ? fits.of(top) : alone.of(top);
}

/// The finite numbers of a channel, 16-byte aligned, and its largest code. Without numbers there is nothing
/// to do.
struct grid_line {
    const float* x = nullptr;
    int n = 0, top = 1;
    grid_range range;    // of the numbers, or what a search has found
    double error = 0.0;  // of what a search has found
};

/// Calls put(line, grid, sum of squared errors) with the best candidate of every line. get(line): a
/// grid_line. All threads of a block; put is called by one thread per line.
template <int Threads, class Get, class Put>
__device__ __forceinline__ void search_grids(int lines, const Get& get, const Put& put) {
    constexpr int candidates = shrink_search::candidates, together = warp_size / candidates;
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    const int own = lane / candidates, number = lane % candidates;
    for (int first = warp * together; first < lines; first += Threads / warp_size * together) {
        grid_line line;
        if (own < together && first + own < lines) line = get(first + own);
        const grid_range r = shrink_search::candidate(line.range, number);
        const kvq::detail::grid_steps grid(r, line.top);
        kvq::detail::interleaved_sum error;
        const auto add = [&](float x, int part) {
            const double e = grid.error(x, grid.code(x));
            error.part[part] += e * e;
        };
        int i = 0;
        for (; i + 8 <= line.n; i += 8) {
            const float4 a = *reinterpret_cast<const float4*>(line.x + i),
                         b = *reinterpret_cast<const float4*>(line.x + i + 4);
            const float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int k = 0; k < 8; ++k) add(x[k], k);
        }
#pragma unroll
        for (int k = 0; k < 7; ++k)
            if (i + k < line.n) add(line.x[i + k], k);
        const double total = error.total();
        // The first of the best ones.
        double least = __shfl_sync(~0u, total, own * candidates);
        int best = 0;
        for (int c = 1; c < candidates; ++c) {
            const double other = __shfl_sync(~0u, total, own * candidates + c);
            if (other < least) {
                least = other;
                best = c;
            }
        }
        __syncwarp();  // behind all lanes' get(), which reads what put() writes
        if (line.n > 0 && number == best) put(first + own, r, least);
    }
}

/// Sums over the numbers of a line that its grid's codes are refitted with.
struct refit_sums {
    double error, products;
    int codes, squares;
};

/// A sum of eight parts of which lane q of four has parts 2q and 2q + 1, in order, for all of them.
__device__ __forceinline__ double ordered_total(double low, double high) {
    double sum = 0.0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const double here = (sum + low) + high;
        sum = __shfl_sync(~0u, here, k, 4);
    }
    return sum;
}
__device__ __forceinline__ int total_of_four(int x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/// Calls visit(x, part) with this lane's numbers: parts 2q (0) and 2q + 1 (1).
template <class Visit>
__device__ __forceinline__ void visit_parts(const grid_line& line, int n, int q, const Visit& visit) {
    const float* const x = line.x + (n > 0 ? 2 * q : 0);  // without a line, x is null
    int i = 0;
#pragma unroll 4
    for (; i + 8 <= n; i += 8) {
        const float2 v = *reinterpret_cast<const float2*>(x + i);
        visit(v.x, 0);
        visit(v.y, 1);
    }
    if (i + 2 * q < n) visit(x[i], 0);
    if (i + 2 * q + 1 < n) visit(x[i + 1], 1);
}

/// A small integer that is held as a float, exactly.
__device__ __forceinline__ double widened_code(float code) {
    const int bits = __float_as_int(code + 0x1p23f) & 0x7fffff;
    return __hiloint2double(0x43300000, bits) - 0x1p52;
}

/// Sums of n numbers of a line (0: none) quantized on a grid. All lanes of a warp.
__device__ __forceinline__ refit_sums sums_on_grid(const grid_line& line, int n, const grid_range& r, int q) {
    const kvq::detail::grid_steps grid(r, line.top);
    double error[2] = {}, products[2] = {};
    float codes = 0.0f, squares = 0.0f;
    visit_parts(line, n, q, [&](float x, int part) {
        const float code = grid.code(x);
        const double e = grid.error(x, code);
        error[part] += e * e;
        products[part] += widened_code(code) * static_cast<double>(x);
        codes += code;
        squares += code * code;
    });
    return {ordered_total(error[0], error[1]), ordered_total(products[0], products[1]),
            total_of_four(static_cast<int>(codes)), total_of_four(static_cast<int>(squares))};
}

/// Calls put(line, grid) with what turns of refitting make of the grid that a search found. As search_grids.
template <int Threads, class Get, class Put>
__device__ __forceinline__ void refit_grids(int lines, const Get& get, const Put& put) {
    constexpr int together = warp_size / 4;
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    const int q = lane % 4;
    for (int first = warp * together; first < lines; first += Threads / warp_size * together) {
        const int number = first + lane / 4;
        grid_line line;
        if (number < lines) line = get(number);
        double values[2] = {};
        visit_parts(line, line.n, q, [&](float x, int part) { values[part] += static_cast<double>(x); });
        const double y = ordered_total(values[0], values[1]);
        refit_sums s = sums_on_grid(line, line.n, line.range, q);
        double least = line.error;
        bool active = line.n > 0;
        for (int turn = 0; turn < least_squares::turns; ++turn) {
            grid_range r;
            active = active && least_squares::refit(line.n, s.codes, y, s.squares, s.products, line.top, r);
            if (!__any_sync(~0u, active)) break;
            s = sums_on_grid(line, active ? line.n : 0, r, q);
            active = active && s.error < least;
            if (active) {
                least = s.error;
                line.range = r;
            }
        }
        __syncwarp();
        if (line.n > 0 && q == 0) put(number, line.range);
    }
}

}}}  // namespace kvq::cuda::detail
