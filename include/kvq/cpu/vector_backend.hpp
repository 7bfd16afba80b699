// What a backend with vectors does with the blocks of a scheme: the kernel that the registry names, and
// portable code of the scheme for the blocks and values that are left.
//
// Kernels: simd<...> (simd.hpp), whose kernels are compiled with the file, or `library`, whose kernels
// kvq::library has (library_kernels.hpp). It gives
//   width(), missing<Scheme>()                floats of a vector; kernels that the registry names and it
//                                             lacks
//   read_window, read_values, write_values    blocks of values to tokens and back (window/tokens.hpp)
//   round_tokens, hadamard_tokens             transformed.hpp
//   quantize_ranges, dequantize_groups        group_kernels.hpp
//   quantize_channels, dequantize_channels    quantize/quantize_channels.hpp,
//                                             dequantize/dequantize_channels.hpp
#pragma once

#include <cstring>

#include "describe.hpp"
#include "kernel_table.hpp"
#include "scalar.hpp"
#include "transformed.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

template <class Kernels>
struct vector_backend {
    template <kv_scheme Scheme>
    static std::uint32_t quantize(const Scheme& scheme, const block_shape& shape, block_id id,
                                  float_type window, const std::byte* from, std::byte* block, float* values) {
        if constexpr (kernels::range_scheme<Scheme>)
            if (quantizes_ranges(scheme, shape, {from, window, false}, block)) return 0;
        if (!Kernels::read_window(window, shape, from, values))
            scalar::read_window(window, shape, from, values);
        return quantize_values(scheme, shape, id, values, block);
    }

    template <kv_scheme Scheme>
    static std::uint32_t quantize_values(const Scheme& scheme, const block_shape& shape, block_id id,
                                         float* values, std::byte* block) {
        if constexpr (kernels::transformed_scheme<Scheme>) {
            const std::uint32_t not_finite = kernels::transform_tokens<Kernels>(scheme, shape, id, values);
            quantize_values<typename Scheme::inner_scheme>(scheme, shape, id, values, block);
            return not_finite;
        } else if constexpr (full_precision<Scheme>) {
            std::memset(block, 0, scheme.block_bytes(shape));  // odd rows and columns leave gaps
            return write_tokens<typename Scheme::value_type>(shape, block, float_type::fp32, values,
                                                             shape.dim, shape.tokens, 0);
        } else {
            if (quantizes_in_vectors(scheme, shape, id, values, block)) return 0;
            return scheme.quantize(shape, id, values, block);
        }
    }

    template <kv_scheme Scheme>
    static std::uint32_t requantize_values(const Scheme& scheme, const block_shape& shape, block_id id,
                                           float* values, float* token_scales, std::byte* block) {
        if constexpr (kernels::transformed_scheme<Scheme>) {
            const std::uint32_t not_finite = kernels::transform_tokens<Kernels>(scheme, shape, id, values);
            requantize_values<typename Scheme::inner_scheme>(scheme, shape, id, values, token_scales, block);
            return not_finite;
        } else if constexpr (kernels::channel_scheme<Scheme>) {
            if (quantizes_channels(scheme, shape, id, values, block, true, token_scales)) return 0;
            return scheme.requantize(shape, id, values, token_scales, block);
        } else if constexpr (detail::requantizing<Scheme>) {
            return scheme.requantize(shape, id, values, token_scales, block);
        } else {
            return quantize_values(scheme, shape, id, values, block);
        }
    }

    template <kv_scheme Scheme>
    static void dequantize(const Scheme& scheme, const block_shape& shape, block_id id,
                           const std::byte* block, float_type type, void* out, std::ptrdiff_t stride,
                           float* values) {
        if constexpr (full_precision<Scheme>) {
            if (Kernels::template read_values<typename Scheme::value_type>(shape, block, type, out, stride))
                return;
        } else if constexpr (kernels::transformed_scheme<Scheme>) {
            dequantize<typename Scheme::inner_scheme>(scheme, shape, id, block, float_type::fp32, values,
                                                      shape.dim, values);
            kernels::restore_tokens<Kernels>(scheme, shape, id, values);
            return Kernels::round_tokens(shape, values, type, out, stride);
        } else if (dequantizes_in_vectors(scheme, shape, id, block, type, out, stride, values)) {
            return;
        }
        scheme.dequantize(shape, id, block, values);
        Kernels::round_tokens(shape, values, type, out, stride);
    }

    template <class Window>
    static std::uint32_t write_tokens(const block_shape& shape, std::byte* block, float_type type,
                                      const void* tokens, std::ptrdiff_t stride, int count, int at) {
        return Kernels::template write_values<Window>(shape, block, type, tokens, stride, count, at);
    }

    template <kv_scheme Scheme>
    static format_description describe(const Scheme& scheme, const block_shape& shape, float_type window) {
        return kernels::described(codec_of(scheme), kernels::transform_of<Scheme>, shape, window,
                                  Kernels::width(), Kernels::template missing<Scheme>());
    }

    /// Was the block quantized? False: no kernel takes it, or its values, and the contents of the block are
    /// undefined.
    template <kernels::range_scheme Scheme>
    static bool quantizes_ranges(const Scheme& scheme, const block_shape& shape, const block_input& values,
                                 std::byte* block) {
        const codec_spec codec = codec_of(scheme);
        return kernels::quantize_choice(codec, shape) &&
               Kernels::template quantize_ranges<Scheme>(codec, shape, values, block);
    }
    /// The same for tokens as floats.
    template <kv_scheme Scheme>
    static bool quantizes_in_vectors(const Scheme& scheme, const block_shape& shape, block_id id,
                                     float* values, std::byte* block) {
        if constexpr (kernels::range_scheme<Scheme>)
            return quantizes_ranges(
                scheme, shape, {reinterpret_cast<const std::byte*>(values), float_type::fp32, true}, block);
        else if constexpr (kernels::channel_scheme<Scheme>)
            return quantizes_channels(scheme, shape, id, values, block, false, nullptr);
        else
            return false;
    }
    template <kernels::channel_scheme Scheme>
    static bool quantizes_channels(const Scheme& scheme, const block_shape& shape, block_id id, float* values,
                                   std::byte* block, bool again, float* token_scales) {
        return kernels::quantize_choice(codec_of(scheme), shape) &&
               Kernels::quantize_channels(scheme, shape, id, values, block, again, token_scales);
    }
    /// Were all tokens written by the kernel of the registry? False: there is none for the block, and nothing
    /// was written.
    template <kv_scheme Scheme>
    static bool dequantizes_in_vectors(const Scheme& scheme, const block_shape& shape, block_id id,
                                       const std::byte* block, float_type type, void* out,
                                       std::ptrdiff_t stride, float* values) {
        const codec_spec codec = codec_of(scheme);
        if (!kernels::dequantize_choice(codec, shape, Kernels::width())) return false;
        if constexpr (kernels::composed_scheme<Scheme>)
            return Kernels::template dequantize_groups<Scheme>(codec, shape, block, type, out, stride,
                                                               values);
        else if constexpr (kernels::dequantized_by_channels<Scheme>)
            return Kernels::dequantize_channels(scheme, shape, id, block, type, out, stride, values);
        else
            return false;
    }
};

}}  // namespace kvq
