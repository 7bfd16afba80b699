// Fitting grids to channels on the device: quant/encoders.hpp, many channels at a time.
//
//   line       the finite numbers of a channel and group, in shared memory; 1, 2 or 4 lanes share a line
//   parts      number i of a line belongs to part i % 8, as on the CPU; a lane has 8, 4 or 2 neighbouring
//              parts
//   search     all candidates in one go, with sums of floats; those that cannot be told from the best one by
//              these are compared again, by the CPU's sums of doubles
//   refit      errors from sums of codes, squares and products, which the next grid needs anyway; where the
//              error has not certainly changed, or a grid has not certainly been rounded as on the CPU, by
//              the CPU's sums again
//
// What makes a decision certain, u = 2^-24, R the range of a line of n numbers, M its largest magnitude:
//   search     Errors of a candidate in real arithmetic, in code order, e, differ in size from the CPU's by
//              at most u (24 R + 10 M), and from those of the sums of floats by 36 u R. So the roots of both
//              sums differ by sqrt(n) u (60 R + 10 M), apart from the relative error of the sum, (n + 16) u.
//   refit      The CPU's e and x - first - scale code differ by at most u (scale top + largest value of the
//              grid) and u e. The latter's sum of squares is a polynomial in exact sums.
// Sums of codes and of their squares are integers and may be added in any order.
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

/// The finite numbers of a channel, 16-byte aligned, and its largest code.
struct grid_line {
    const float* x = nullptr;
    int top = 1;
    grid_range range;
};

/// Lines that a warp has at a time. Lane l has line l % together and is lane l / together of it: lanes that
/// read at the same time then meet no bank conflict, since lines start 4 banks apart.
template <int Lanes>
inline constexpr int lines_together = warp_size / Lanes;

/// f over the lanes of a line.
template <int Lanes, class T, class F>
__device__ __forceinline__ T over_line(T x, const F& f) {
#pragma unroll
    for (int step = lines_together<Lanes>; step < warp_size; step *= 2)
        x = f(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
template <int Lanes, class T>
__device__ __forceinline__ T line_sum(T x) {
    return over_line<Lanes>(x, [](T a, T b) { return a + b; });
}
/// What the first lane of a line has.
template <int Lanes, class T>
__device__ __forceinline__ T of_first_lane(T x) {
    return __shfl_sync(~0u, x, static_cast<int>(threadIdx.x) % lines_together<Lanes>);
}
/// A sum of eight parts of which lane q of a line has parts 8 q / Lanes and the following ones, in order, for
/// all lanes.
template <int Lanes>
__device__ __forceinline__ double ordered_total(const double (&part)[8 / Lanes]) {
    double sum = 0.0;
#pragma unroll
    for (int k = 0; k < Lanes; ++k) {
        double here = sum;
#pragma unroll
        for (const double p : part) here += p;
        constexpr int together = lines_together<Lanes>;
        sum = Lanes == 1 ? here
                         : __shfl_sync(~0u, here, k * together + static_cast<int>(threadIdx.x) % together);
    }
    return sum;
}

/// Calls visit(x, part) with the numbers of lane q among the first n of a line.
template <int Lanes, class Visit>
__device__ __forceinline__ void visit_parts(const float* x, int n, int q, const Visit& visit) {
    constexpr int parts = 8 / Lanes, aligned = parts < 4 ? 4 * parts : 16;
    if (n > 0) x += parts * q;  // without a line, x is null
    int i = 0;
#pragma unroll 2
    for (; i + 8 <= n; i += 8) {
        float v[parts];
        __builtin_memcpy(v, __builtin_assume_aligned(x + i, aligned), sizeof v);
#pragma unroll
        for (int p = 0; p < parts; ++p) visit(v[p], p);
    }
#pragma unroll
    for (int p = 0; p < parts; ++p)
        if (i + parts * q + p < n) visit(x[i + p], p);
}

/// The root of a line's squared errors is known within `slack`.
struct least_error {
    float root = INFINITY, slack = INFINITY;
};

/// A bit for every candidate that may be the best one. Numbers of ordinary size. own: the range of this
/// lane's.
template <int Lanes>
__device__ __forceinline__ unsigned best_candidates(const grid_line& line, int n, int q,
                                                    const grid_range& own, least_error& least) {
    constexpr int candidates = shrink_search::candidates, first_ones = 6;
    const float lo = line.range.first, range = line.range.last - lo,
                per_range = kvq::detail::rounded_quotient(1.0f, range);
    const auto top = static_cast<float>(line.top);
    const float per_top = kvq::detail::rounded_quotient(1.0f, top);
    float sum[candidates];
    const auto add_up = [&](auto from, auto to) {
        constexpr int First = decltype(from)::value, Last = decltype(to)::value;
#pragma unroll
        for (int i = First; i < Last; ++i) sum[i] = 0.0f;
        visit_parts<Lanes>(line.x, n, q, [&](float x, int) {
            const float z = (x - lo) * per_range;
#pragma unroll
            for (int i = First; i < Last; ++i) {
                const float cut = 0.025f * static_cast<float>(i), widened = 1.0f / (1.0f - 2.0f * cut);
                const float position = z * widened - cut * widened;
                const float code = (__saturatef(position) * top + 0x1p23f) - 0x1p23f;
                const float error = position - code * per_top;
                sum[i] += error * error;
            }
        });
#pragma unroll
        for (int i = First; i < Last; ++i) {
            const float width = 1.0f - 0.05f * static_cast<float>(i);
            sum[i] = line_sum<Lanes>(sum[i]) * (width * width);
        }
    };
    const auto numbers = static_cast<float>(n);
    const float magnitude = fmaxf(fabsf(lo), fabsf(line.range.last));
    least.slack = sqrtf(numbers) * 0x1p-24f * (64.0f + 16.0f * magnitude * per_range);
    float smallest = INFINITY, bound = INFINITY;
    const auto compare = [&](int from, int to) {
#pragma unroll
        for (int i = 0; i < candidates; ++i)
            if (i >= from && i < to) smallest = fminf(smallest, sum[i]);
        least.root = sqrtf(smallest);
        bound = smallest * (1.0f + (numbers + 16.0f) * 0x1p-22f) +
                4.0f * least.slack * (least.root + least.slack);
    };
    add_up(std::integral_constant<int, 0>{}, std::integral_constant<int, first_ones>{});
    compare(0, first_ones);
#pragma unroll
    for (int i = first_ones; i < candidates; ++i) sum[i] = INFINITY;
    // What other candidates cut off a few numbers is an error by itself.
    constexpr float cut = 0.025f * first_ones;
    const float low = fmaxf(cut - (own.first - lo) * per_range, 0.0f),
                high = fmaxf((own.last - lo) * per_range - (1.0f - cut), 0.0f);
    const float cut_off = line_sum<Lanes>(low * low + high * high);
    if (__any_sync(~0u, n > 0 && 0.99f * cut_off <= bound)) {
        add_up(std::integral_constant<int, first_ones>{}, std::integral_constant<int, candidates>{});
        compare(first_ones, candidates);
    }
    unsigned possible = 0;
#pragma unroll
    for (int i = 0; i < candidates; ++i) possible |= sum[i] <= bound ? 1u << i : 0u;
    least.root *= range * 1.001f;
    least.slack *= range;
    return possible;
}

/// Numbers of a line that a lane may have: squares of so many codes of 8 bits add up exactly in a float.
inline constexpr int most_lane_numbers = 256;
static_assert(most_lane_numbers * 255 * 255 < 1 << 24);

/// Sums over the numbers of a line that its grid's codes are refitted with.
struct refit_sums {
    double products = 0.0;
    int codes = 0, squares = 0;
    float slack = 0.0f;  // how far `products` may be from the CPU's
};
struct exact_sums : refit_sums {
    double error;
};

/// A small integer that is held as a float, exactly.
__device__ __forceinline__ double widened_code(float code) {
    const int bits = __float_as_int(code + 0x1p23f) & 0x7fffff;
    return __hiloint2double(0x43300000, bits) - 0x1p52;
}

/// The CPU's sums of the first n numbers at x (0: none) quantized on a grid. All lanes of a warp. Rarely
/// called: not inlined.
template <int Lanes>
__device__ __noinline__ exact_sums exact_sums_at(const float* x, int n, int top, float first, float last,
                                                 int q) {
    const kvq::detail::grid_steps grid({first, last}, top);
    double error[8 / Lanes] = {}, products[8 / Lanes] = {};
    float codes = 0.0f, squares = 0.0f;
    visit_parts<Lanes>(x, n, q, [&](float x, int part) {
        const float code = grid.code(x);
        const double e = grid.error(x, code);
        error[part] += e * e;
        products[part] += widened_code(code) * static_cast<double>(x);
        codes += code;
        squares += code * code;
    });
    exact_sums s;
    s.error = ordered_total<Lanes>(error);
    s.products = ordered_total<Lanes>(products);
    s.codes = line_sum<Lanes>(static_cast<int>(codes));
    s.squares = line_sum<Lanes>(static_cast<int>(squares));
    return s;
}
template <int Lanes>
__device__ __forceinline__ exact_sums sums_on_grid(const grid_line& line, int n, const grid_range& r, int q) {
    return exact_sums_at<Lanes>(line.x, n, line.top, r.first, r.last, q);
}

/// The same codes, with products that may differ in their last bits: a code c is multiplied as 1 + c / (top +
/// 1), a double that takes one instruction to make. values: the sum of the numbers. ordinary: are they of
/// ordinary size?
template <int Lanes>
__device__ __forceinline__ refit_sums quick_sums(const grid_line& line, int n, const grid_range& r,
                                                 const kvq::detail::grid_steps& grid, int q, double values,
                                                 bool ordinary) {
    // Positions are rounded by adding a number whose last place is 1.
    constexpr float whole = 12582912.0f;
    const float farthest = fmaxf(line.range.last - r.first, r.first - line.range.first);
    const bool quick = ordinary && farthest * grid.inverse < 0x1p21f;
    const int unit = 0x100000 >> __popc(static_cast<unsigned>(line.top));
    refit_sums s;
    double products[8 / Lanes] = {};
    visit_parts<Lanes>(line.x, quick ? n : 0, q, [&](float x, int part) {
        const float position = __fmul_rn(x - grid.first, grid.inverse);
        const int code = clamped_sum(__float_as_int(__fadd_rn(position, whole)), -0x4b400000, line.top);
        products[part] += __hiloint2double(code * unit + 0x3ff00000, 0) * static_cast<double>(x);
        s.codes += code;
        s.squares += code * code;
    });
    s.products = (ordered_total<Lanes>(products) - values) * (line.top + 1);
    s.codes = line_sum<Lanes>(s.codes);
    s.squares = line_sum<Lanes>(s.squares);
    const float magnitude = fmaxf(fabsf(line.range.first), fabsf(line.range.last));
    s.slack = magnitude * static_cast<float>(line.top + 1) * static_cast<float>(n * (n + 64)) * 0x1p-53f;
    if (__any_sync(~0u, n > 0 && !quick)) {
        const exact_sums exact = sums_on_grid<Lanes>(line, quick ? 0 : n, r, q);
        if (!quick) s = exact;
    }
    return s;
}

/// The squared errors of a grid less those of all codes 0, in real arithmetic but for `slack`.
__device__ __forceinline__ double relative_error(const grid_range& r, float scale, int n, double values,
                                                 const refit_sums& s) {
    const double first = r.first, step = scale, codes = s.codes;
    return first * (n * first - 2.0 * values) +
           step * (step * s.squares - 2.0 * s.products + 2.0 * first * codes);
}

/// What turns of refitting make of the grid that a search found. All lanes of a warp; n = 0: nothing to do.
template <int Lanes>
__device__ __forceinline__ grid_range refitted(const grid_line& line, int n, int q, grid_range range,
                                               const least_error& least, bool ordinary) {
    double parts[8 / Lanes] = {};
    visit_parts<Lanes>(line.x, n, q, [&](float x, int part) { parts[part] += static_cast<double>(x); });
    const double values = ordered_total<Lanes>(parts), per_n = 1.0 / larger(n, 1);
    const auto top = static_cast<float>(line.top);
    const float magnitude = fmaxf(fabsf(line.range.first), fabsf(line.range.last)),
                numbers = static_cast<float>(n);
    const auto sums = [&](const grid_range& r, int some, float& scale) {
        const kvq::detail::grid_steps grid(r, line.top);
        scale = grid.scale;
        return quick_sums<Lanes>(line, some, r, grid, q, values, ordinary);
    };
    float scale = 0.0f;
    refit_sums s = sums(range, n, scale);
    double error = relative_error(range, scale, n, values, s);
    bool active = n > 0;
    for (int turn = 0; turn < least_squares::turns; ++turn) {
        grid_range next;
        double first = 0.0, last = 0.0;
        // least_squares::refit without divisions.
        const double spread = static_cast<double>(n) * s.squares - static_cast<double>(s.codes) * s.codes;
        bool fits = active && spread > 0.0;
        const float rough = reciprocal(static_cast<float>(spread));
        double per_spread = static_cast<double>(rough);
        per_spread += per_spread * (1.0 - spread * per_spread);
        per_spread += per_spread * (1.0 - spread * per_spread);
        const double step = (n * s.products - s.codes * values) * per_spread;
        first = (values - step * s.codes) * per_n;
        last = first + step * line.top;
        // Would the CPU's products and divisions make the same floats?
        const float size_of_ends =
            magnitude + fabsf(static_cast<float>(first)) + fabsf(static_cast<float>(last));
        const auto off =
            static_cast<double>(4.1f * top * numbers * s.slack * rough + size_of_ends * 0x1p-46f);
        next = {static_cast<float>(first - off), static_cast<float>(last - off)};
        const bool rounded = s.slack > 0.0f && next.first == static_cast<float>(first + off) &&
                             next.last == static_cast<float>(last + off);
        if (__any_sync(~0u, fits && !rounded)) {
            const exact_sums exact = sums_on_grid<Lanes>(line, fits && !rounded ? n : 0, range, q);
            if (fits && !rounded) {
                fits = least_squares::refit(n, s.codes, values, s.squares, exact.products, line.top, first,
                                            last);
                next = {static_cast<float>(first), static_cast<float>(last)};
            }
        }
        // The same grid again has the same error.
        active = fits && next.last > next.first && !(next.first == range.first && next.last == range.last);
        if (!__any_sync(~0u, active)) break;
        float next_scale = 0.0f;
        s = sums(next, active ? n : 0, next_scale);
        const double next_error = relative_error(next, next_scale, n, values, s);
        const float gain = static_cast<float>(error - next_error);
        const float size = fmaxf(fabsf(range.first) + 2.0f * scale * top,
                                 fabsf(next.first) + 2.0f * next_scale * top),
                    all = magnitude + size, root = least.root + least.slack;
        const float off_root = sqrtf(numbers) * 0x1.02p-24f * size;
        const float unsure_below = 4.1f * off_root * (root + off_root) + 0x1p-21f * root * root +
                                   all * all * numbers * (numbers + 64.0f) * 0x1p-48f;
        bool better = gain > unsure_below;
        const bool unsure = active && (!ordinary || !(fabsf(gain) > unsure_below));
        if (__any_sync(~0u, unsure)) {
            const int some = unsure ? n : 0;
            const double old_error = sums_on_grid<Lanes>(line, some, range, q).error,
                         new_error = sums_on_grid<Lanes>(line, some, next, q).error;
            if (unsure) better = new_error < old_error;
        }
        active = active && better;
        if (active) {
            range = next;
            scale = next_scale;
            error = next_error;
        }
    }
    return range;
}

/// The best candidate of a search, or that one refitted. own: the range of this lane's numbers. All lanes of
/// a warp; n = 0: nothing to do.
template <int Lanes, bool Refits>
__device__ __forceinline__ grid_range fitted(const grid_line& line, int n, int q, const grid_range& own,
                                             bool refits) {
    constexpr int candidates = shrink_search::candidates;
    const float range = line.range.last - line.range.first,
                magnitude = fmaxf(fabsf(line.range.first), fabsf(line.range.last));
    if (!(range > 0.0f)) n = 0;  // one value: its range is its grid
    const bool ordinary = range >= 0x1p-30f && magnitude <= 0x1p30f && range >= magnitude * 0x1p-12f;
    least_error least;
    unsigned possible = 1;
    if (__any_sync(~0u, n > 0 && ordinary))
        possible = best_candidates<Lanes>(line, ordinary ? n : 0, q, own, least);
    if (!ordinary) possible = (1u << candidates) - 1u, least = {};
    if (n == 0) possible = 1;
    int best = __ffs(static_cast<int>(possible)) - 1;
    const bool unsure = (possible & (possible - 1)) != 0;
    if (__any_sync(~0u, unsure)) {
        double error = INFINITY;
#pragma unroll 1
        for (int i = 0; i < candidates; ++i) {
            const bool wanted = unsure && (possible >> i & 1u) != 0;
            if (!__any_sync(~0u, wanted)) continue;
            const double other =
                sums_on_grid<Lanes>(line, wanted ? n : 0, shrink_search::candidate(line.range, i), q).error;
            if (wanted && other < error) {
                error = other;
                best = i;
            }
        }
    }
    const grid_range r = shrink_search::candidate(line.range, best);
    if constexpr (Refits)
        if (__any_sync(~0u, refits && n > 0))
            return refitted<Lanes>(line, refits ? n : 0, q, r, least, ordinary);
    return r;
}

/// Calls f(line number, lane of the line) for all lines, all lanes of a warp at the same time: with a number
/// of `lines` or above where there is none.
template <int Threads, int Lanes, class F>
__device__ __forceinline__ void for_each_line(int lines, const F& f) {
    constexpr int together = lines_together<Lanes>;
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    for (int first = warp * together; first < lines; first += Threads / warp_size * together)
        f(first + lane % together, lane / together);
}

}}}  // namespace kvq::cuda::detail
