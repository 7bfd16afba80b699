// Encoders: the fit of a grid to the values of a group. The block format and dequantizing do not depend on
// the encoder.
//
//   min_max          the range itself
//   enclosing        the range itself, with parameters rounded outside it, so that no value is clamped
//   shrink_search    the range or one of 9 narrower ones around its middle, whichever has the least squared
//                    error
//   least_squares    the same, then up to 4 iterations: codes for the grid, best grid for the codes
//   mean_corrected<E>  afterwards the bias moves by the mean error of the group, so that errors of a page
//                      average out
//
// Contract, y the value and y^ the dequantized one, both before multiplication by the token scale:
//   enclosing                   |y - y^| <= scale / 2
//   min_max
//     |y - y^| <= scale / 2 + the loss from rounding the stored parameters to nearest: half a step of
//                               stored biases and 1/64 of the range for 8-bit parameters, one rounding of
//                                 each for other types
//   mean_corrected<either>      in addition at most scale / 2, the correction, and half a step of stored
//                               biases
//   the others                  may clamp; the group's sum of squared errors is at most that of its range,
//                               before storing
// All arithmetic is float without operations that a compiler could fuse, or double over exact products in a
// fixed order: every compiler gives the same codes.
// Source: search and refits: HQQ- and ggml-like; correction of the mean: bias correction (Nagel et al., arXiv
// 1906.04721, section 4.2), for a page instead of a layer.
#pragma once

#include <string>

#include "../core/text.hpp"
#include "byte_params.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// The first and last value of a grid: code 0 and code top.
struct grid_range {
    float first = 0.0f;
    float last = 0.0f;
};

namespace detail {

/// The encoder argument of schemes; it also has the constants that quant/quantize_group.hpp reads.
template <class E>
concept grid_encoder = requires(const E e, const float* x, int n, float* codes) {
    { e.fit(x, n, n, codes) } -> std::same_as<grid_range>;
    { E::name() } -> std::convertible_to<std::string>;
    { E::rounding } -> std::convertible_to<parameter_rounding>;
    { E::corrects_mean } -> std::convertible_to<bool>;
};

inline grid_range range_of(const float* x, int n) noexcept {
    grid_range r;
    for (int i = 0; i < n; ++i) {
        r.first = i == 0 ? x[i] : smaller(r.first, x[i]);
        r.last = i == 0 ? x[i] : larger(r.last, x[i]);
    }
    return {r.first + 0.0f, r.last + 0.0f};
}

inline grid_range mean_of(const float* x, int n) noexcept {
    double sum = 0.0;
    for (int i = 0; i < n; ++i) sum += static_cast<double>(x[i]);
    const auto mean = static_cast<float>(sum / n);
    return {mean, mean};
}

/// Sums of doubles in eight interleaved parts, added at the end: the only order of the sums, which compilers
/// can vectorise.
struct interleaved_sum {
    static constexpr int parts = 8;
    double part[parts] = {};
    KVQ_HD double total() const noexcept {
        double sum = 0.0;
        for (const double p : part) sum += p;
        return sum;
    }
};

/// A grid in the form that fitting uses; codes are floats.
struct grid_steps {
    float first, scale, inverse, last_code;
    rounded_products product;

    KVQ_HD grid_steps(const grid_range& r, int top) noexcept
        : first(r.first),
          scale(rounded_quotient(r.last - r.first, static_cast<float>(top))),
          inverse(scale > 0.0f ? rounded_inverse(scale) : 0.0f),
          last_code(static_cast<float>(top)) {}
    KVQ_HD KVQ_INLINE float code(float x) const noexcept {
        const float position = product(x - first, inverse);
#if defined(__CUDA_ARCH__)
        const float bounded = fminf(fmaxf(position, 0.0f), last_code);
#else
        const float bounded = position > 0.0f ? smaller(position, last_code) : 0.0f;
#endif
        // Adding 2^23 drops the fraction: round half even, in a form that compilers vectorise.
        return (bounded + 0x1p23f) - 0x1p23f;
    }
    KVQ_HD KVQ_INLINE float error(float x, float code) const noexcept {
        return x - (first + product(scale, code));
    }
};

/// Codes of n values on a grid, as floats, and the sum of squared errors.
inline double code_on_grid(const float* x, int n, const grid_range& r, int top, float* codes) noexcept {
    const grid_steps grid(r, top);
    interleaved_sum error;
    const auto one = [&](int i, int part) {
        codes[i] = grid.code(x[i]);
        const auto e = static_cast<double>(grid.error(x[i], codes[i]));
        error.part[part] += e * e;
    };
    int i = 0;
    for (; i + interleaved_sum::parts <= n; i += interleaved_sum::parts)
        for (int k = 0; k < interleaved_sum::parts; ++k) one(i + k, k);
    for (int k = 0; i + k < n; ++k) one(i + k, k);
    return error.total();
}

}  // namespace detail

struct min_max {
    static constexpr parameter_rounding rounding = parameter_rounding::nearest;
    static constexpr bool corrects_mean = false;
    static short_text name() { return ""; }

    /// Grid for n >= 1 finite values; codes: scratch of n floats.
    static grid_range fit(const float* x, int n, int, float*) noexcept { return detail::range_of(x, n); }
};

struct enclosing : min_max {
    static constexpr parameter_rounding rounding = parameter_rounding::outside;
    static short_text name() { return "-enclosing"; }
};

struct shrink_search {
    static constexpr parameter_rounding rounding = parameter_rounding::nearest;
    static constexpr bool corrects_mean = false;
    static short_text name() { return "-search"; }

    static constexpr int candidates = 10;
    /// Candidate i: the range, cut by i / 40 of its width at both ends. Candidate 0 is the whole range.
    KVQ_HD static grid_range candidate(const grid_range& whole, int i) noexcept {
        if (i == 0) return whole;
        const float cut = detail::rounded_product(0.025f * static_cast<float>(i), whole.last - whole.first);
        return {whole.first + cut, whole.last - cut};
    }

    static grid_range fit(const float* x, int n, int top, float* codes) noexcept {
        const grid_range whole = detail::range_of(x, n);
        grid_range best = whole;
        double least = detail::code_on_grid(x, n, whole, top, codes);
        for (int i = 1; i < candidates; ++i) {
            const grid_range r = candidate(whole, i);
            const double error = detail::code_on_grid(x, n, r, top, codes);
            if (error < least) {
                least = error;
                best = r;
            }
        }
        return best;
    }
};

struct least_squares {
    static constexpr parameter_rounding rounding = parameter_rounding::nearest;
    static constexpr bool corrects_mean = false;
    static short_text name() { return "-ls"; }

    static constexpr int turns = 4;
    /// The best grid for codes of n values: sums of codes c, values y, squares of codes cc and products cy.
    /// False: no such grid.
    KVQ_HD static bool refit(int n, double c, double y, double cc, double cy, int top, double& first,
                             double& last) noexcept {
        const double spread =
            detail::rounded_product(static_cast<double>(n), cc) - detail::rounded_product(c, c);
        if (!(spread > 0.0)) return false;
        const double scale =
            (detail::rounded_product(static_cast<double>(n), cy) - detail::rounded_product(c, y)) / spread;
        first = (y - detail::rounded_product(scale, c)) / n;
        last = first + detail::rounded_product(scale, static_cast<double>(top));
        return true;
    }
    KVQ_HD static bool refit(int n, double c, double y, double cc, double cy, int top,
                             grid_range& r) noexcept {
        double first = 0.0, last = 0.0;
        if (!refit(n, c, y, cc, cy, top, first, last)) return false;
        r = {static_cast<float>(first), static_cast<float>(last)};
        return r.last > r.first;
    }

    static grid_range fit(const float* x, int n, int top, float* codes) noexcept {
        grid_range best = shrink_search::fit(x, n, top, codes);
        double least = detail::code_on_grid(x, n, best, top, codes);
        for (int turn = 0; turn < turns; ++turn) {
            detail::interleaved_sum codes_sum, values_sum, squares, products;
            const auto add = [&](int i, int part) {
                const auto code = static_cast<double>(codes[i]), value = static_cast<double>(x[i]);
                codes_sum.part[part] += code;
                values_sum.part[part] += value;
                squares.part[part] += code * code;
                products.part[part] += code * value;
            };
            constexpr int parts = detail::interleaved_sum::parts;
            int i = 0;
            for (; i + parts <= n; i += parts)
                for (int k = 0; k < parts; ++k) add(i + k, k);
            for (int k = 0; i + k < n; ++k) add(i + k, k);
            grid_range r;
            if (!refit(n, codes_sum.total(), values_sum.total(), squares.total(), products.total(), top, r))
                break;
            const double error = detail::code_on_grid(x, n, r, top, codes);
            if (!(error < least)) break;
            least = error;
            best = r;
        }
        return best;
    }
};

/// Least squares for channels of at most 2 bits, the range for channels of more bits: there, clipping
/// outliers of keys costs more than it gains (docs/lab/presets.md).
struct least_squares_below_3_bits {
    static constexpr parameter_rounding rounding = parameter_rounding::nearest;
    static constexpr bool corrects_mean = false;
    static short_text name() { return "-ls2"; }

    static grid_range fit(const float* x, int n, int top, float* codes) noexcept {
        return top < 7 ? least_squares::fit(x, n, top, codes) : min_max::fit(x, n, top, codes);
    }
};

template <class Encoder>
struct mean_corrected : Encoder {
    static constexpr bool corrects_mean = true;
    static short_text name() { return Encoder::name() + "-mean"; }
};

}}  // namespace kvq
