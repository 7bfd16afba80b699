// The backend without intrinsics: portable, and the reference for the bytes of every other backend.
//
// A backend is a type with
//   lanes                              the vector type of the kernels (cpu/plain_lanes.hpp)
//   has_all_kernels                    of products; if not, some codecs are dequantized first
//                                      (library_kernels.hpp)
//   query_bytes                        bytes of a fixed-point query or weight in products with codes
//                                      (cpu/product/folded.hpp): 2 or 1
//   load_floats<P>(bytes, n, out)      n stored parameters as floats
//   quantize(scheme, shape, id, window type, window, block, values)
//       quantizes a full block of values of the type; `values` is scratch for shape.values() floats
//   dequantize(scheme, shape, id, block, type, out, stride, values)
//       x^ of all tokens, rounded once to the type: token t starts at out + t * stride
//   quantize_values(scheme, shape, id, values, block)
//       scheme::quantize; values: [tokens][dim], scratch afterwards
//   requantize_values(scheme, shape, id, values, token_scales, block)
//       the same for values that were quantized before: scheme::requantize, or quantize for a scheme without
//       it; token_scales: the token scales of their last block, scratch afterwards, or null
//   write_tokens<Window>(shape, block, type, tokens, stride, count, at)
//       writes `count` tokens of the type, `stride` elements apart, to tokens [at, at + count) of a window
//       block; returns how many of the written values are not finite
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
    static constexpr bool has_all_kernels = true;
    static constexpr const char* name() noexcept { return "scalar"; }

    /// A block of values as floats [token][channel].
    static void read_window(float_type type, const block_shape& shape, const std::byte* from, float* values) {
        detail::visit_float_type(
            type, [&]<class Window>(Window) { full<Window>{}.dequantize(shape, {}, from, values); });
    }

    template <kv_scheme Scheme>
    static std::uint32_t quantize(const Scheme& scheme, const block_shape& shape, block_id id,
                                  float_type window, const std::byte* from, std::byte* block, float* values) {
        read_window(window, shape, from, values);
        return scheme.quantize(shape, id, values, block);
    }

    template <kv_scheme Scheme>
    static void dequantize(const Scheme& scheme, const block_shape& shape, block_id id,
                           const std::byte* block, float_type type, void* out, std::ptrdiff_t stride,
                           float* values) {
        scheme.dequantize(shape, id, block, values);
        detail::visit_float_type(type, [&]<class T>(T) {
            for (int t = 0; t < shape.tokens; ++t)
                for (int c = 0; c < shape.dim; ++c)
                    static_cast<T*>(out)[t * stride + c] = T(values[t * shape.dim + c]);
        });
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

    template <class Window>
    KVQ_NOINLINE static std::uint32_t write_tokens(const block_shape& shape, std::byte* block,
                                                   float_type type, const void* tokens, std::ptrdiff_t stride,
                                                   int count, int at) {
        const value_layout<Window> layout(shape);
        std::uint32_t not_finite = 0;
        for (int t = 0; t < count; ++t)
            for (int c = 0; c < shape.dim; ++c) {
                const Window x(detail::visit_float_type(type, [&]<class T>(T) {
                    return static_cast<float>(static_cast<const T*>(tokens)[t * stride + c]);
                }));
                not_finite += !detail::is_finite(static_cast<float>(x));
                detail::store_as(block + sizeof(Window) * full<Window>::element(layout, shape, at + t, c), x);
            }
        return not_finite;
    }
};

}}  // namespace kvq
