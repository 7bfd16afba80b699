// The transform of a block's tokens, before a scheme that kernels quantize (registry.hpp), and the conversion
// of floats to tokens of any type.
//
// Contract: the bits of transformed::transform_values() and restore_values(); round_tokens() writes T(x) for
// every value.
#pragma once

#include "../schemes/transformed.hpp"
#include "quantize/hadamard.hpp"
#include "registry.hpp"
#include "special_values.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <transformed_scheme Scheme>
inline constexpr bool is_hadamard = transform_of<Scheme>.kind == transform_kind::hadamard;

/// H S x of every token in place, or, back, S H x; tokens are `stride` values apart. False for values that
/// are not finite.
template <class Lanes>
bool hadamard_tokens(const block_shape& shape, const block_id& id, float* values, std::ptrdiff_t stride,
                     const token_transform& t, bool back) {
    for (int token = 0; token < shape.tokens; ++token)
        if (!all_finite<Lanes>(values + token * stride, static_cast<std::size_t>(shape.dim))) return false;
    const hadamard_rows<Lanes> rows(values, shape.tokens, shape.dim, stride);
    const auto multiply = [&] {
        rows.multiply([&](int channel) { return detail::random_sign(t.seed, id, channel); });
    };
    if (!back) multiply();
    detail::each_hadamard_block(shape.dim, t.largest, [&](int first, int n) { rows.transform(first, n); });
    if (back) multiply();
    return true;
}

/// T x for every token, in place; returns how many values were not finite. Backend: has hadamard_tokens.
template <class Backend, transformed_scheme Scheme>
std::uint32_t transform_tokens(const Scheme& scheme, const block_shape& shape, const block_id& id,
                               float* values) {
    if constexpr (is_hadamard<Scheme>)
        if (Backend::hadamard_tokens(shape, id, values, shape.dim, transform_of<Scheme>, false)) return 0;
    return scheme.transform_values(shape, id, values);
}
/// T^-1 y for every token, in place.
template <class Backend, transformed_scheme Scheme>
void restore_tokens(const Scheme& scheme, const block_shape& shape, const block_id& id, float* values) {
    if constexpr (is_hadamard<Scheme>)
        if (Backend::hadamard_tokens(shape, id, values, shape.dim, transform_of<Scheme>, true)) return;
    scheme.restore_values(shape, id, values);
}

/// Transforms `count` queries, `stride` apart, or, back, restores outputs: of all channels of a block.
template <class Backend, class Scheme>
void transform_rows(const Scheme& scheme, const block_shape& shape, const block_id& id, float* x,
                    std::ptrdiff_t stride, int count, bool back) {
    if constexpr (transformed_scheme<Scheme>) {
        if constexpr (is_hadamard<Scheme> && requires {
                          Backend::hadamard_tokens(shape, id, x, stride, transform_of<Scheme>, back);
                      }) {
            using inner = typename Scheme::inner_scheme;
            // Inner may have an order of channels, which is applied second.
            const auto order = [&] {
                if constexpr (transforming<inner>)
                    transform_rows<Backend, inner>(scheme, shape, id, x, stride, count, back);
            };
            const block_shape all{shape.role, count, shape.dim};
            if (back) order();
            if (Backend::hadamard_tokens(all, id, x, stride, transform_of<Scheme>, back)) {
                if (!back) order();
                return;
            }
            if (back) {
                for (int i = 0; i < count; ++i, x += stride) scheme.transform.backward(shape.dim, id, x);
                return;
            }
        }
    }
    for (int i = 0; i < count; ++i, x += stride)
        if (back)
            scheme.restore_output(shape, id, x);
        else
            scheme.transform_query(shape, id, x);
}

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
/// Calls run(to, stride) with the rows of the output. To bfloat16 through floats in `scratch`, so that fewer
/// kernels are compiled.
template <class Lanes, class Run>
void run_in_type(const block_shape& shape, float_type type, void* out, std::ptrdiff_t stride, float* scratch,
                 const Run& run) {
    if (type == float_type::fp16)
        run(static_cast<float16*>(out), stride);
    else if (type == float_type::fp32)
        run(static_cast<float*>(out), stride);
    else {
        run(scratch, shape.dim);
        round_tokens<Lanes>(shape, scratch, static_cast<bfloat16*>(out), stride);
    }
}

}}}  // namespace kvq::kernels
