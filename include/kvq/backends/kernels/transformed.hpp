// Which schemes are coded from tokens as floats: those with parameters per channel, and known ones behind a transform.
#pragma once

#include "../../schemes/transformed.hpp"
#include "channel_encode.hpp"
#include "composed.hpp"

namespace kvq::inline v0_1::kernels {

template <class S>
inline constexpr bool is_transformed = false;
template <class Transform, class Inner>
inline constexpr bool is_transformed<transformed<Transform, Inner>> =
    channel_scheme<Inner> || composed_scheme<Inner>;
/// A scheme that the kernels can code, behind a transform, and not a type derived from that, which may do something else.
template <class S>
concept transformed_scheme = is_transformed<S>;

template <class S>
concept codes_values = channel_scheme<S> || transformed_scheme<S>;

}  // namespace kvq::inline v0_1::kernels
