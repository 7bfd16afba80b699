// How the library's own encoders fit grids, for backends that fit many channels at once.
//
//   encoder_traits<E>::known       true for the library's encoders, false for types derived from them, which
//                                  may differ
//   encoder_traits<E>::fits        the fit of a channel, by its width; for encoders with feedback: the fit
//                                  with matrices
//   encoder_traits<E>::alone       the fit without matrices
//   encoder_traits<E>::feedback    true for encoders with feedback
//
// Contract: a backend that fits every channel in this way, by the formulas of quant/encoders.hpp, gets E's
// grids.
#pragma once

#include "encoders.hpp"
#include "error_feedback.hpp"

namespace kvq { inline namespace v0_3 {

/// range: the range; search: the best of shrink_search's candidates; squares: that candidate, refitted by
/// least squares.
enum class grid_fit : unsigned char { range, search, squares };

/// The fit of channels with less than 3 bits, and of other channels.
struct grid_fits {
    grid_fit narrow, wide;

    KVQ_HD KVQ_NO_COPY constexpr grid_fit of(int top) const noexcept { return top < 7 ? narrow : wide; }
    KVQ_HD KVQ_NO_COPY constexpr bool any(grid_fit least) const noexcept {
        return narrow >= least || wide >= least;
    }
    KVQ_NO_COPY friend constexpr bool operator==(const grid_fits&, const grid_fits&) noexcept = default;
};

}}  // namespace kvq

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

template <class Encoder>
struct encoder_traits {
    static constexpr bool known = false, feedback = false;
    static constexpr grid_fits fits{grid_fit::range, grid_fit::range}, alone = fits;
};
template <grid_fit Narrow, grid_fit Wide = Narrow>
struct fitted_as {
    static constexpr bool known = true, feedback = false;
    static constexpr grid_fits fits{Narrow, Wide}, alone = fits;
};
template <>
struct encoder_traits<min_max> : fitted_as<grid_fit::range> {};
template <>
struct encoder_traits<enclosing> : fitted_as<grid_fit::range> {};
template <>
struct encoder_traits<shrink_search> : fitted_as<grid_fit::search> {};
template <>
struct encoder_traits<least_squares> : fitted_as<grid_fit::squares> {};
template <>
struct encoder_traits<least_squares_below_3_bits> : fitted_as<grid_fit::squares, grid_fit::range> {};
template <class Encoder>
struct encoder_traits<mean_corrected<Encoder>> : encoder_traits<Encoder> {};
template <class Encoder, class Alone>
requires(encoder_traits<Encoder>::known&&
             encoder_traits<Alone>::known) struct encoder_traits<error_feedback<Encoder, Alone>> {
    static constexpr bool known = true, feedback = true;
    static constexpr grid_fits fits = encoder_traits<Encoder>::fits, alone = encoder_traits<Alone>::fits;
};

}}}  // namespace kvq::detail
