// Requantizing: grids and token scales that quantized values keep, so that a chain of formats does not drift.
//
//   grids         A channel whose values already lie on a grid of the wanted width keeps that grid, refitted
//                 to the values by least squares. Other channels are fitted like 16-bit values.
//   token scales  Tokens keep their last token scales. Tokens without any get fitted ones; each is then
//                 replaced by the near stored value for which the token's values lie best on the channels'
//                 grids.
//
// With parameters that are `settled` (quant/byte_params.hpp), values from a page of the format that went
// through other formats of smaller steps get their first codes back.
// Contract: an encoder that stores its parameters outside of the range does so here as well, and keeps no
// grids. Sums are double over exact products, in a fixed order: the same bits from every compiler. Cost:
// grids about 3 passes, token scales 6 in each of 4 turns.
#pragma once

#include "block_params.hpp"
#include "encoders.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

/// Rounding of the biases after the mean is corrected.
template <class Encoder>
inline constexpr parameter_rounding corrected_rounding =
    Encoder::rounding == parameter_rounding::settled ? parameter_rounding::settled
                                                     : parameter_rounding::nearest;

/// Guesses of the grid of values that need not reach both of its ends.
struct grid_guess {
    static constexpr int guesses = 3;
    /// The grid whose code 0 is the first value and whose code top - i is the last; false: no such grid.
    KVQ_HD static bool candidate(const grid_range& whole, int top, int i, grid_range& r) noexcept {
        const int steps = top - i;
        if (2 * steps <= top) return false;
        r.first = whole.first;
        r.last = whole.first +
                 rounded_product(whole.last - whole.first,
                                 rounded_quotient(static_cast<float>(top), static_cast<float>(steps)));
        return true;
    }
    /// Do n values with these squared errors lie on the grid? Rounding of arbitrary values costs a twelfth of
    /// a squared step each.
    KVQ_HD static bool fits(double errors, int n, const grid_range& r, int top) noexcept {
        const auto step = static_cast<double>(grid_steps(r, top).scale);
        return errors <= rounded_product(step, step) / 64 * n;
    }
};

/// The grid on which n values already lie; false if there is none. codes: scratch.
inline bool find_grid(const float* x, int n, int top, float* codes, grid_range& found) noexcept {
    found = range_of(x, n);
    if (!(found.last > found.first)) return true;
    const grid_range whole = found;
    for (int i = 0; i < grid_guess::guesses && grid_guess::candidate(whole, top, i, found); ++i) {
        code_on_grid(x, n, found, top, codes);
        interleaved_sum codes_sum, values, squares, products;
        for (int k = 0; k < n; ++k) {
            const auto code = static_cast<double>(codes[k]), value = static_cast<double>(x[k]);
            const int part = k % interleaved_sum::parts;
            codes_sum.part[part] += code;
            values.part[part] += value;
            squares.part[part] += code * code;
            products.part[part] += code * value;
        }
        if (least_squares::refit(n, codes_sum.total(), values.total(), squares.total(), products.total(), top,
                                 found) &&
            grid_guess::fits(code_on_grid(x, n, found, top, codes), n, found, top))
            return true;
    }
    return false;
}

/// Any encoder, for values that were quantized before.
template <class Encoder>
struct grid_keeper {
    const Encoder& encoder;
    static constexpr bool keeps = Encoder::rounding != parameter_rounding::outside;
    static constexpr parameter_rounding rounding = keeps ? parameter_rounding::settled : Encoder::rounding;
    static constexpr bool corrects_mean = Encoder::corrects_mean;

    grid_range fit(const float* x, int n, int top, float* codes) const noexcept {
        grid_range r;
        if (keeps && find_grid(x, n, top, codes, r)) return r;
        return encoder.fit(x, n, top, codes);
    }
    template <class Id>
    const float* feedback_row(Id id, int dim, int i) const noexcept requires requires(const Encoder& e) {
        e.feedback_row(id, dim, i);
    }
    { return encoder.feedback_row(id, dim, i); }
};

/// Grids of up to `most` channels, fitted to tokens that are divided by their token scales.
class token_scale_grids {
public:
    static constexpr int most = 1024;

    void fit(const float* values, int tokens, int dim, int top, const float* token_scales) noexcept {
        dim_ = dim;
        top_ = static_cast<float>(top);
        for (int c = 0; c < dim; c += column_block)
            fit_column_block(values + c, tokens, dim, smaller(column_block, dim - c), top, token_scales, c);
    }
    /// Sum of squared errors of a token with token scale `token_scale`.
    double error(const float* x, float token_scale) const noexcept {
        const rounded_products product;
        const float inverse = 1.0f / token_scale;
        interleaved_sum sum;
        const auto add = [&](int c, int part) {
            const float value = is_finite(x[c]) ? x[c] : 0.0f;
            const float code = code_of(product(value, inverse), first_[c], inverse_[c], top_, product);
            const auto e =
                static_cast<double>(value - product(token_scale, first_[c] + product(scale_[c], code)));
            sum.part[part] += e * e;
        };
        int c = 0;
        for (; c + interleaved_sum::parts <= dim_; c += interleaved_sum::parts)
            for (int k = 0; k < interleaved_sum::parts; ++k) add(c + k, k);
        for (int k = 0; c + k < dim_; ++k) add(c + k, k);
        return sum.total();
    }

private:
    static constexpr int column_block = 64;

    KVQ_INLINE static float code_of(float y, float first, float inverse, float top,
                                    const rounded_products& product) noexcept {
        const float position = product(y - first, inverse);
        return ((position > 0.0f ? smaller(position, top) : 0.0f) + 0x1p23f) - 0x1p23f;
    }

    /// Fits the range and refits it once.
    void fit_column_block(const float* values, int tokens, int dim, int n, int top, const float* token_scales,
                          int at) noexcept {
        const rounded_products product;
        float lo[column_block], hi[column_block];
        double codes[column_block] = {}, sums[column_block] = {}, squares[column_block] = {},
               products[column_block] = {};
        float *const first = first_ + at, *const scale = scale_ + at, *const inverse = inverse_ + at;
        const auto y = [&](int t, int c) {
            const float x = values[t * dim + c];
            return product(is_finite(x) ? x : 0.0f, 1.0f / token_scales[t]);
        };
        for (int c = 0; c < n; ++c) lo[c] = hi[c] = y(0, c);
        for (int t = 1; t < tokens; ++t)
            for (int c = 0; c < n; ++c) {
                lo[c] = smaller(lo[c], y(t, c));
                hi[c] = larger(hi[c], y(t, c));
            }
        for (int c = 0; c < n; ++c) store({lo[c], hi[c]}, top, first[c], scale[c], inverse[c]);
        for (int t = 0; t < tokens; ++t)
            for (int c = 0; c < n; ++c) {
                const auto value = static_cast<double>(y(t, c));
                const auto code = static_cast<double>(
                    code_of(static_cast<float>(value), first[c], inverse[c], top_, product));
                codes[c] += code;
                sums[c] += value;
                squares[c] += code * code;
                products[c] += code * value;
            }
        for (int c = 0; c < n; ++c) {
            grid_range r;
            if (least_squares::refit(tokens, codes[c], sums[c], squares[c], products[c], top, r))
                store(r, top, first[c], scale[c], inverse[c]);
        }
    }
    static void store(const grid_range& r, int top, float& first, float& scale, float& inverse) noexcept {
        const grid_steps grid(r, top);
        first = grid.first;
        scale = grid.scale;
        inverse = grid.inverse;
    }

    int dim_ = 0;
    float top_ = 0.0f;
    float first_[most], scale_[most], inverse_[most];
};

/// Replaces token scales by near stored ones for which values lie on grids of `top` steps. If all token
/// scales are already stored values, they do not change: they were settled before. Equal token scales replace
/// them if they have less error. values: [tokens][dim], at most 1024 tokens and channels. Grids of more than
/// 6 bits are too fine to distinguish token scales: nothing changes.
inline void settle_token_scales(const float* values, int tokens, int dim, int top,
                                float* token_scales) noexcept {
    constexpr int turns = 4, widest = 63;
    if (top > widest) return;
    bool stored = true;
    for (int t = 0; t < tokens; ++t) {
        const float token_scale = token_scale_float::value(
            token_scale_float::code(token_scales[t], 1.0f, parameter_rounding::nearest));
        stored = stored && token_scale == token_scales[t];
        token_scales[t] = token_scale;
    }
    if (stored) return;
    token_scale_grids grids;
    // A fit can fail for a channel with few values other than zero.
    float equal[token_scale_grids::most];
    for (int t = 0; t < tokens; ++t) equal[t] = token_scale_float::largest;
    const auto errors_of = [&](const float* tried) {
        grids.fit(values, tokens, dim, top, tried);
        double sum = 0.0;
        for (int t = 0; t < tokens; ++t) sum += grids.error(values + t * dim, tried[t]);
        return sum;
    };
    if (errors_of(equal) < errors_of(token_scales))
        for (int t = 0; t < tokens; ++t) token_scales[t] = equal[t];
    for (int turn = 0; turn < turns; ++turn) {
        grids.fit(values, tokens, dim, top, token_scales);
        bool moved = false;
        for (int t = 0; t < tokens; ++t) {
            const auto code =
                static_cast<int>(token_scale_float::code(token_scales[t], 1.0f, parameter_rounding::nearest));
            double least = grids.error(values + t * dim, token_scales[t]);
            for (const int beside : {code - 1, code + 1}) {
                if (beside < 0 || beside > 255) continue;
                const float token_scale = token_scale_float::value(static_cast<unsigned>(beside));
                const double error = grids.error(values + t * dim, token_scale);
                if (!(error < least)) continue;
                least = error;
                token_scales[t] = token_scale;
                moved = true;
            }
        }
        if (!moved) return;
    }
}

}}}  // namespace kvq::detail
