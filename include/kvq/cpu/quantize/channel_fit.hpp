// Grids of channels, one channel to a lane: the fits of quant/encoders.hpp, bit for bit.
//
// A pass reads all tokens of the channels once, for one grid per channel: errors of its codes, or sums for a
// better grid. Sums have parts (interleaved_sum: token t belongs to part t % 8), each part in order of
// tokens, so lanes do not change the result.
// Contract: all values are finite and at most 2^100; tokens <= most_tokens. Cost of least squares: 10 to 15
// passes.
#pragma once

#include <cstddef>

#include "../../quant/encoder_traits.hpp"
#include "../../quant/grid_keeper.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <class Lanes>
class channel_fits {
public:
    static constexpr int width = Lanes::width;
    static constexpr int most_tokens = 256;

    /// Grids, one per lane; lanes behind the last channel have grids of zeros.
    struct grids {
        alignas(64) float first[width] = {}, last[width] = {};
    };

    /// values: `channels` <= width values of every token, `stride` apart; top: the largest code of each
    /// channel.
    channel_fits(const float* values, std::ptrdiff_t stride, int tokens, int channels, const int* top)
        : tokens_(tokens), channels_(channels) {
        for (int t = 0; t < tokens; ++t)
            Lanes::store_floats(x_ + t * width, channels == width
                                                    ? Lanes::load_floats(values + t * stride)
                                                    : Lanes::load_floats(values + t * stride, channels));
        for (int i = 0; i < width; ++i) top_[i] = i < channels ? top[i] : 1;
    }

    /// First and last values of the grids. keep: channels that already lie on a grid keep it, as in
    /// detail::grid_keeper.
    grids fit(const grid_fits& fits, bool keep = false) {
        using kvq::grid_fit;
        const grids range = range_of();
        bool means = false;
        for (int i = 0; i < width; ++i) means = means || top_[i] == 0;
        if (!keep && !means && !fits.any(grid_fit::search)) return range;
        bool kept[width] = {};
        grids own;
        if (keep) own = find_grids(range, kept);
        bool searched = false, refitted = false;
        for (int i = 0; i < channels_; ++i) {
            const grid_fit f = fits.of(top_[i]);
            const bool fitted = top_[i] > 0 && !kept[i];
            searched = searched || (fitted && f != grid_fit::range);
            refitted = refitted || (fitted && f == grid_fit::squares);
        }
        const grids found = searched ? search(range) : range, refit = refitted ? refine(found) : found,
                    mean = means ? mean_of() : range;
        grids r;
        for (int i = 0; i < channels_; ++i) {
            const grid_fit f = fits.of(top_[i]);
            copy(r,
                 top_[i] == 0            ? mean
                 : kept[i]               ? own
                 : f == grid_fit::range  ? range
                 : f == grid_fit::search ? found
                                         : refit,
                 i);
        }
        return r;
    }

private:
    using floats = typename Lanes::floats;
    using doubles = typename Lanes::doubles;
    static constexpr int half = width / 2, parts = detail::interleaved_sum::parts;

    /// One double per channel.
    struct column {
        alignas(64) double of[width] = {};

        KVQ_INLINE void add(doubles low, doubles high) {
            Lanes::store_doubles(of, Lanes::add(Lanes::load_doubles(of), low));
            Lanes::store_doubles(of + half, Lanes::add(Lanes::load_doubles(of + half), high));
        }
        bool any_below(const column& limit) const {
            bool any = false;
            for (int i = 0; i < width; ++i) any = any || of[i] < limit.of[i];
            return any;
        }
    };
    struct sums {
        column errors, codes, squares, products;
    };

    static void copy(grids& to, const grids& from, int i) {
        to.first[i] = from.first[i];
        to.last[i] = from.last[i];
    }
    KVQ_INLINE floats x(int token) const { return Lanes::load_floats(x_ + token * width); }

    grids range_of() const {
        floats lo = x(0), hi = lo;
        for (int t = 1; t < tokens_; ++t) {
            lo = Lanes::smaller(lo, x(t));
            hi = Lanes::larger(hi, x(t));
        }
        grids r;
        const floats zero = Lanes::splat_float(0.0f);  // turns -0 into +0
        Lanes::store_floats(r.first, Lanes::add(lo, zero));
        Lanes::store_floats(r.last, Lanes::add(hi, zero));
        return r;
    }

    grids mean_of() const {
        doubles low = Lanes::splat_double(0.0), high = low;
        for (int t = 0; t < tokens_; ++t) {
            low = Lanes::add(low, Lanes::template widen<0>(x(t)));
            high = Lanes::add(high, Lanes::template widen<1>(x(t)));
        }
        alignas(64) double sum[width];
        Lanes::store_doubles(sum, low);
        Lanes::store_doubles(sum + half, high);
        grids r;
        for (int i = 0; i < width; ++i) r.first[i] = r.last[i] = static_cast<float>(sum[i] / tokens_);
        return r;
    }

    /// detail::find_grid for every channel; kept: whether it found a grid.
    // Functions of their own, here and below: what most channels do not need would slow down their ranges.
    KVQ_NOINLINE grids find_grids(const grids& range, bool* kept) const {
        using detail::grid_guess;
        grids best = range;
        bool open[width];
        for (int i = 0; i < width; ++i) {
            kept[i] = i < channels_ && top_[i] > 0 && !(range.last[i] > range.first[i]);
            open[i] = i < channels_ && top_[i] > 0 && !kept[i];
        }
        column values;
        sum_values(values);
        for (int guess = 0; guess < grid_guess::guesses; ++guess) {
            grids r = range;
            bool any = false;
            for (int i = 0; i < width; ++i) {
                if (!open[i]) continue;
                grid_range candidate;
                open[i] = grid_guess::candidate({range.first[i], range.last[i]}, top_[i], guess, candidate);
                if (!open[i]) continue;
                r.first[i] = candidate.first;
                r.last[i] = candidate.last;
                any = true;
            }
            if (!any) break;
            sums of;
            pass<false, true>(r, of);
            bool refitted[width] = {};
            for (int i = 0; i < width; ++i) {
                if (!open[i]) continue;
                grid_range found;
                refitted[i] = least_squares::refit(tokens_, of.codes.of[i], values.of[i], of.squares.of[i],
                                                   of.products.of[i], top_[i], found);
                if (!refitted[i]) continue;
                r.first[i] = found.first;
                r.last[i] = found.last;
            }
            sums after;
            pass<true, false>(r, after);
            for (int i = 0; i < width; ++i) {
                if (!refitted[i] ||
                    !grid_guess::fits(after.errors.of[i], tokens_, {r.first[i], r.last[i]}, top_[i]))
                    continue;
                kept[i] = true;
                open[i] = false;
                copy(best, r, i);
            }
        }
        return best;
    }

    /// The range, or a narrower grid with less error.
    KVQ_NOINLINE grids search(const grids& range) {
        grids best = range;
        sums of;
        pass<true, false>(range, of);
        least_ = of.errors;
        for (int n = 1; n < shrink_search::candidates; ++n) {
            grids r;
            for (int i = 0; i < width; ++i) {
                const grid_range narrow = shrink_search::candidate({range.first[i], range.last[i]}, n);
                r.first[i] = narrow.first;
                r.last[i] = narrow.last;
            }
            sums here;
            pass<true, false>(r, here, &least_);
            for (int i = 0; i < width; ++i)
                if (here.errors.of[i] < least_.of[i]) {
                    least_.of[i] = here.errors.of[i];
                    copy(best, r, i);
                }
        }
        return best;
    }

    /// Iterates: the best grid for the codes of the last grid; least_ has the errors of `best`.
    KVQ_NOINLINE grids refine(const grids& start) {
        grids best = start;
        bool open[width];
        for (int i = 0; i < width; ++i) open[i] = i < channels_ && top_[i] > 0;
        column values;
        sum_values(values);
        sums now;
        pass<false, true>(best, now);
        for (int turn = 0; turn < least_squares::turns; ++turn) {
            grids r = best;
            bool any = false;
            for (int i = 0; i < width; ++i) {
                if (!open[i]) continue;
                grid_range found;
                open[i] = least_squares::refit(tokens_, now.codes.of[i], values.of[i], now.squares.of[i],
                                               now.products.of[i], top_[i], found);
                if (!open[i]) continue;
                r.first[i] = found.first;
                r.last[i] = found.last;
                any = true;
            }
            if (!any) break;
            now = {};
            pass<true, true>(r, now);
            for (int i = 0; i < width; ++i) {
                open[i] = open[i] && now.errors.of[i] < least_.of[i];
                if (!open[i]) continue;
                least_.of[i] = now.errors.of[i];
                copy(best, r, i);
            }
        }
        return best;
    }

    void sum_values(column& total) const {
        for (int part = 0; part < parts; ++part) {
            doubles low = Lanes::splat_double(0.0), high = low;
            for (int t = part; t < tokens_; t += parts) {
                low = Lanes::add(low, Lanes::template widen<0>(x(t)));
                high = Lanes::add(high, Lanes::template widen<1>(x(t)));
            }
            total.add(low, high);
        }
    }

    /// Codes of all values on the channels' grids: their squared errors, and the sums for a better grid.
    /// Codes and their squares are integers, whose sums are exact in any order, also in floats: one part is
    /// at most 32 * 255^2.
    /// Sums only grow: a pass ends early when no channel is below its limit any more.
    template <bool Errors, bool Products>
    void pass(const grids& r, sums& total, const column* limit = nullptr) const {
        alignas(64) float tops[width];
        for (int i = 0; i < width; ++i) tops[i] = static_cast<float>(detail::larger(top_[i], 1));
        const floats zero = Lanes::splat_float(0.0f), whole = Lanes::splat_float(0x1p23f),
                     top = Lanes::load_floats(tops), first = Lanes::load_floats(r.first),
                     scale = Lanes::divide(Lanes::subtract(Lanes::load_floats(r.last), first), top),
                     inverse = Lanes::keep_above(Lanes::divide(Lanes::splat_float(1.0f), scale), scale, 0.0f);
        for (int part = 0; part < parts; ++part) {
            doubles error_low = Lanes::splat_double(0.0), error_high = error_low, product_low = error_low,
                    product_high = error_low;
            floats codes = zero, squares = zero;
            for (int t = part; t < tokens_; t += parts) {
                const floats value = x(t),
                             position = Lanes::rounded_product(Lanes::subtract(value, first), inverse),
                             bounded = Lanes::limited(position, top),
                             code = Lanes::subtract(Lanes::add(bounded, whole), whole);
                if constexpr (Errors) {
                    const floats error =
                        Lanes::subtract(value, Lanes::add(first, Lanes::rounded_product(scale, code)));
                    const doubles low = Lanes::template widen<0>(error),
                                  high = Lanes::template widen<1>(error);
                    error_low = Lanes::multiply_add(low, low, error_low);
                    error_high = Lanes::multiply_add(high, high, error_high);
                }
                if constexpr (Products) {
                    codes = Lanes::add(codes, code);
                    squares = Lanes::multiply_add(code, code, squares);
                    product_low = Lanes::multiply_add(Lanes::template widen<0>(code),
                                                      Lanes::template widen<0>(value), product_low);
                    product_high = Lanes::multiply_add(Lanes::template widen<1>(code),
                                                       Lanes::template widen<1>(value), product_high);
                }
            }
            if constexpr (Errors) {
                total.errors.add(error_low, error_high);
                if (limit && !total.errors.any_below(*limit)) return;
            }
            if constexpr (Products) {
                total.codes.add(Lanes::template widen<0>(codes), Lanes::template widen<1>(codes));
                total.squares.add(Lanes::template widen<0>(squares), Lanes::template widen<1>(squares));
                total.products.add(product_low, product_high);
            }
        }
    }

    int tokens_, channels_;
    int top_[width];
    column least_;
    alignas(64) float x_[most_tokens * width];  // [token][channel]
};

}}}  // namespace kvq::kernels
