// Which schemes are coded from tokens as floats: those with parameters per channel, and known ones behind a transform; and back:
// floats to tokens of any type.
//
// Contract: round_tokens() writes T(x) for every number.
#pragma once

#include "../../schemes/transformed.hpp"
#include "channel_encode.hpp"
#include "composed.hpp"
#include "special_values.hpp"

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

/// values: [tokens][dim]; out: rows `stride` apart, which may be the same memory.
template <class Lanes, float_format T>
void round_tokens(const block_shape& shape, const float* values, T* out, std::ptrdiff_t stride) {
    constexpr int width = Lanes::width;
    const bool finite = all_finite<Lanes>(values, shape.values());
    for (int t = 0; t < shape.tokens; ++t, values += shape.dim, out += stride) {
        int c = 0;
        if (finite)
            for (; c + width <= shape.dim; c += width)
                Lanes::template store_values<T>(reinterpret_cast<std::byte*>(out + c),
                                                Lanes::load_floats(values + c));
        for (; c < shape.dim; ++c) out[c] = T(values[c]);
    }
}

}  // namespace kvq::inline v0_1::kernels
