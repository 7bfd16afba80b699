// The backend without intrinsics: portable, and the reference for the bytes of every other backend.
//
// A backend is a type with
//   lanes                              the vector type of the kernels (cpu/plain_lanes.hpp)
//   query_bytes                        bytes of a fixed-point query or weight in products with codes (cpu/product/folded.hpp): 2 or 1
//   load_floats<P>(bytes, n, out)      n stored parameters as floats
//   quantize(scheme, shape, id, window, block, values)
//       quantizes a full block of Window values; `values` is scratch for shape.values() floats
//   dequantize(scheme, shape, id, block, T* out, stride, values)
//       x^ of all tokens, rounded once to T: token t starts at out + t * stride
//   quantize_values(scheme, shape, id, values, block)
//       scheme::quantize; values: [tokens][dim], scratch afterwards
//   requantize_values(scheme, shape, id, values, token_scales, block)
//       the same for values that were quantized before: scheme::requantize, or quantize for a scheme without it; token_scales: the token
//       scales of their last block, scratch afterwards, or null
//   write_tokens<Window>(shape, block, tokens, stride, count, at)
//       writes `count` tokens, `stride` elements apart, to tokens [at, at + count) of a window block; returns
//       how many of the written values are not finite
//   describe(scheme, shape, window)    which of these are vectorised (format/format.hpp)
//   name()
#pragma once

#include "../format/format.hpp"
#include "../quant/params.hpp"
#include "../schemes/full.hpp"
#include "describe.hpp"
#include "plain_lanes.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

struct scalar : detail::plain_loads {
    using lanes = plain_lanes;
    static constexpr int query_bytes = 2;
    static constexpr const char* name() noexcept { return "scalar"; }

    template <class Window, kv_scheme Scheme>
    static std::uint32_t quantize(const Scheme& scheme, const block_shape& shape, block_id id,
                                  const std::byte* window, std::byte* block, float* values) {
        full<Window>{}.dequantize(shape, id, window, values);
        return scheme.quantize(shape, id, values, block);
    }

    template <kv_scheme Scheme, float_format T>
    static void dequantize(const Scheme& scheme, const block_shape& shape, block_id id,
                           const std::byte* block, T* out, std::ptrdiff_t stride, float* values) {
        scheme.dequantize(shape, id, block, values);
        for (int t = 0; t < shape.tokens; ++t)
            for (int c = 0; c < shape.dim; ++c) out[t * stride + c] = T(values[t * shape.dim + c]);
    }

    template <kv_scheme Scheme>
    static std::uint32_t quantize_values(const Scheme& scheme, const block_shape& shape, block_id id,
                                         float* values, std::byte* block) {
        return scheme.quantize(shape, id, values, block);
    }

    template <kv_scheme Scheme>
    static std::uint32_t requantize_values(const Scheme& scheme, const block_shape& shape, block_id id,
                                           float* values, float* token_scales, std::byte* block) {
        if constexpr (detail::requantizing<Scheme>)
            return scheme.requantize(shape, id, values, token_scales, block);
        else
            return scheme.quantize(shape, id, values, block);
    }

    template <kv_scheme Scheme>
    static format_description describe(const Scheme&, const block_shape&, float_type) {
        return kernels::described_as_portable("the backend has no vectors");
    }

    template <class Window, class T>
    static std::uint32_t write_tokens(const block_shape& shape, std::byte* block, const T* tokens,
                                      std::ptrdiff_t stride, int count, int at) {
        const value_layout<Window> layout(shape);
        std::uint32_t not_finite = 0;
        for (int t = 0; t < count; ++t)
            for (int c = 0; c < shape.dim; ++c) {
                const Window x(static_cast<float>(tokens[t * stride + c]));
                not_finite += !detail::is_finite(static_cast<float>(x));
                detail::store_as(block + sizeof(Window) * full<Window>::element(layout, shape, at + t, c), x);
            }
        return not_finite;
    }
};

}}  // namespace kvq
