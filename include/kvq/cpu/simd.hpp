// The SIMD backend, on xsimd: kvq::simd<> is the best architecture of this build, kvq::simd<arch::avx2> a chosen one.
//
// The same kernels as the scalar backend (cpu/), in vectors of the architecture; the same bytes.
// The only header that includes xsimd. CUDA code must not include it.
#pragma once

#include <cstring>

#include "../format/make_format.hpp"
#include "arch/lanes.hpp"
#include "dequantize/dequantize_block.hpp"
#include "dequantize/dequantize_channels.hpp"
#include "dequantize/dequantize_table.hpp"
#include "describe.hpp"
#include "quantize/quantize_block.hpp"
#include "quantize/quantize_channels.hpp"
#include "scalar.hpp"
#include "transformed.hpp"
#include "window/tokens.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// Bytes of a fixed-point query or weight in products with codes.
///   query_bytes<2>   16-bit fixed point, as accurate as 16-bit floats: the default
///   query_bytes<1>   8 bits: half of the products, and an additional error that bench/attention prints beside the speed
template <int N>
struct query_bytes {
    static_assert(N == 1 || N == 2, "kvq::query_bytes<N>: N is 1 or 2");
    static constexpr int value = N;
};

template <class Arch = arch::best, class QueryBytes = query_bytes<2>>
struct simd {
    static constexpr int query_bytes = QueryBytes::value;
    using architecture = Arch;
    using lanes = simd_lanes<Arch>;
    static constexpr const char* name() noexcept { return Arch::name(); }

    template <class P>
    static void load_floats(const std::byte* from, int n, float* out) {
        int i = 0;
        if constexpr (float_format<P>) {
            for (; i + lanes::width <= n; i += lanes::width)
                lanes::store_floats(
                    out + i, lanes::template load_values<P>(from + static_cast<std::size_t>(i) * sizeof(P)));
            if (i < n)
                lanes::store_floats(
                    out + i,
                    lanes::template load_values<P>(from + static_cast<std::size_t>(i) * sizeof(P), n - i),
                    n - i);
        } else {
            scalar::load_floats<P>(from, n, out);
        }
    }

    template <class Window, kv_scheme Scheme>
    static std::uint32_t quantize(const Scheme& scheme, const block_shape& shape, block_id id,
                                  const std::byte* window, std::byte* block, float* values) {
        // Directly from blocks of fp16, the usual window, and fp32; from bfloat16 as fp32, so that fewer kernels are compiled.
        if constexpr (kernels::range_scheme<Scheme>) {
            if constexpr (std::same_as<Window, float16>)
                if (quantizes_ranges(scheme, shape, kernels::half_values<lanes>(shape, window), block))
                    return 0;
            if constexpr (std::same_as<Window, bfloat16>)
                if (kernels::widens(shape)) {
                    kernels::widen_block<lanes>(shape, window, values);
                    if (quantizes_ranges(
                            scheme, shape,
                            kernels::float_values<lanes>(shape, reinterpret_cast<const std::byte*>(values)),
                            block))
                        return 0;
                }
            if constexpr (std::same_as<Window, float>)
                if (quantizes_ranges(scheme, shape, kernels::float_values<lanes>(shape, window), block))
                    return 0;
        }
        if constexpr (kernels::transformed_scheme<Scheme> ||
                      kernels::plain_codec<Scheme>.content != block_content::own) {
            if (!kernels::read_tokens<lanes, Window>(shape, window, values, shape.dim))
                full<Window>{}.dequantize(shape, id, window, values);
            return quantize_values(scheme, shape, id, values, block);
        }
        return scalar::quantize<Window>(scheme, shape, id, window, block, values);
    }

    template <kv_scheme Scheme>
    static std::uint32_t quantize_values(const Scheme& scheme, const block_shape& shape, block_id id,
                                         float* values, std::byte* block) {
        if constexpr (kernels::transformed_scheme<Scheme>) {
            const std::uint32_t not_finite = kernels::transform_tokens<lanes>(scheme, shape, id, values);
            quantize_values<typename Scheme::inner_scheme>(scheme, shape, id, values, block);
            return not_finite;
        }
        if constexpr (full_precision<Scheme>) {
            std::memset(block, 0, scheme.block_bytes(shape));  // odd rows and columns leave gaps
            return write_tokens<typename Scheme::value_type>(shape, block, values, shape.dim, shape.tokens,
                                                             0);
        }
        if (quantizes_in_vectors(scheme, shape, id, values, block)) return 0;
        return scheme.quantize(shape, id, values, block);
    }

    template <kv_scheme Scheme>
    static std::uint32_t requantize_values(const Scheme& scheme, const block_shape& shape, block_id id,
                                           float* values, float* token_scales, std::byte* block) {
        if constexpr (kernels::transformed_scheme<Scheme>) {
            const std::uint32_t not_finite = kernels::transform_tokens<lanes>(scheme, shape, id, values);
            requantize_values<typename Scheme::inner_scheme>(scheme, shape, id, values, token_scales, block);
            return not_finite;
        } else if constexpr (kernels::channel_scheme<Scheme>) {
            if (kernels::quantize_choice(codec_of(scheme), shape) &&
                kernels::channel_quantizer<lanes, Scheme>(scheme, shape, id, values, block, true,
                                                          token_scales)
                    .run())
                return 0;
            return scheme.requantize(shape, id, values, token_scales, block);
        } else if constexpr (detail::requantizing<Scheme>) {
            return scheme.requantize(shape, id, values, token_scales, block);
        } else {
            return quantize_values(scheme, shape, id, values, block);
        }
    }

    template <kv_scheme Scheme, float_format T>
    static void dequantize(const Scheme& scheme, const block_shape& shape, block_id id,
                           const std::byte* block, T* out, std::ptrdiff_t stride, float* values) {
        if constexpr (full_precision<Scheme>) {
            if (kernels::read_tokens<lanes, typename Scheme::value_type>(shape, block, out, stride)) return;
        } else if constexpr (std::same_as<T, bfloat16>) {
            // Through floats, so that fewer kernels are compiled.
            dequantize(scheme, shape, id, block, values, shape.dim, values);
            kernels::round_tokens<lanes>(shape, values, out, stride);
            return;
        } else if constexpr (kernels::transformed_scheme<Scheme>) {
            dequantize<typename Scheme::inner_scheme>(scheme, shape, id, block, values, shape.dim, values);
            kernels::restore_tokens<lanes>(scheme, shape, id, values);
            kernels::round_tokens<lanes>(shape, values, out, stride);
            return;
        } else {
            if (dequantizes_in_vectors(scheme, shape, id, block, kernels::token_rows<lanes, T>(out, stride)))
                return;
        }
        scheme.dequantize(shape, id, block, values);
        kernels::round_tokens<lanes>(shape, values, out, stride);
    }

    template <kv_scheme Scheme>
    static format_description describe(const Scheme& scheme, const block_shape& shape, float_type window) {
        return kernels::described(codec_of(scheme), kernels::transform_of<Scheme>, shape, window,
                                  lanes::width);
    }

    template <class Window, class T>
    static std::uint32_t write_tokens(const block_shape& shape, std::byte* block, const T* tokens,
                                      std::ptrdiff_t stride, int count, int at) {
        return kernels::token_writer<lanes, Window, T>(shape, block, tokens, stride, count, at).run();
    }

    /// Was the block quantized? False: no kernel takes it, or its values, and the contents of the block are undefined.
    template <kernels::range_scheme Scheme, class Values>
    static bool quantizes_ranges(const Scheme& scheme, const block_shape& shape, Values&& values,
                                 std::byte* block) {
        if (!kernels::quantize_choice(codec_of(scheme), shape)) return false;
        constexpr int bits = Scheme::code_bits;
        const auto of = kernels::range_block<bits>::template of<lanes>(scheme, shape);
        return kernels::block_quantizer<lanes, typename Scheme::levels, bits, Values>(of, values, block)
            .run();
    }
    /// The same for tokens as floats, by the kernel of the registry.
    template <kv_scheme Scheme>
    static bool quantizes_in_vectors(const Scheme& scheme, const block_shape& shape, block_id id,
                                     float* values, std::byte* block) {
        if constexpr (kernels::range_scheme<Scheme>)
            return quantizes_ranges(
                scheme, shape, kernels::float_values<lanes>(shape, const_cast<const float*>(values)), block);
        else if constexpr (kernels::channel_scheme<Scheme>)
            return kernels::quantize_choice(codec_of(scheme), shape) &&
                   kernels::channel_quantizer<lanes, Scheme>(scheme, shape, id, values, block).run();
        else
            return false;
    }
    /// Were all tokens written by the kernel of the registry? False: there is none for the block, and nothing was written.
    template <kv_scheme Scheme, class T>
    static bool dequantizes_in_vectors(const Scheme& scheme, const block_shape& shape, block_id id,
                                       const std::byte* block, const kernels::token_rows<lanes, T>& out) {
        if (!kernels::dequantize_choice(codec_of(scheme), shape, lanes::width)) return false;
        if constexpr (kernels::composed_scheme<Scheme>) {
            using levels = typename Scheme::levels;
            constexpr int bits = Scheme::code_bits;
            const auto of = kernels::group_block<bits>::template of<simd>(scheme, shape);
            if constexpr (Scheme::by_token)
                if (kernels::table_dequantizer<lanes, levels, bits, T>(of, shape, block, out.at(0, 0),
                                                                       out.stride())
                        .run())
                    return true;
            kernels::block_dequantizer<lanes, levels, bits, Scheme::by_token>(of, shape, block).run(out);
        } else if constexpr (kernels::dequantized_by_channels<Scheme>)
            kernels::channel_dequantizer<simd, Scheme>(scheme, shape, id, block).run(out);
        else
            return false;
        return true;
    }
};

/// A format on the best architecture of this build.
template <class Scheme>
[[nodiscard]] format make_format() {
    return make_format<Scheme, simd<>>();
}
/// A format of a scheme with state; the format keeps the state.
template <kv_scheme Scheme>
[[nodiscard]] format make_format(Scheme scheme) {
    return make_format<simd<>>(std::move(scheme));
}
/// Formats of a pair such as kivi<4> or a preset; or of one scheme for both tensors.
template <class Pair>
[[nodiscard]] format_pair make_formats() {
    return make_formats<Pair, simd<>>();
}

}}  // namespace kvq
