// The SIMD backend, on xsimd: kvq::simd<> is the best architecture of this build, kvq::simd<arch::avx2> a
// chosen one.
//
// The same kernels as the scalar backend (cpu/), in vectors of the architecture; the same bytes. Include
// simd.hpp.
#pragma once

#include "arch/lanes.hpp"
#include "channel_kernels.hpp"
#include "float_rows.hpp"
#include "group_kernels.hpp"
#include "vector_backend.hpp"
#include "window/tokens.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// Bytes of a fixed-point query or weight in products with codes.
///   query_bytes<2>   16-bit fixed point, as accurate as 16-bit floats: the default
///   query_bytes<1>   8 bits: half of the products, and an additional error that bench/attention prints
///                    beside the speed
template <int N>
struct query_bytes {
    static_assert(N == 1 || N == 2, "kvq::query_bytes<N>: N is 1 or 2");
    static constexpr int value = N;
};

template <class Arch = arch::best, class QueryBytes = query_bytes<2>>
struct simd : vector_backend<simd<Arch, QueryBytes>> {
    static constexpr int query_bytes = QueryBytes::value;
    static constexpr bool has_all_kernels = true;
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

    // The kernels of vector_backend.hpp.

    static constexpr int width() noexcept { return lanes::width; }
    template <class>
    static constexpr kernels::missing_kernels missing() noexcept {
        return {};
    }
    static bool read_window(float_type type, const block_shape& shape, const std::byte* from, float* values) {
        return detail::visit_float_type(type, [&]<class Window>(Window) {
            return kernels::read_tokens<lanes, Window>(shape, from, values, shape.dim);
        });
    }
    template <class T>
    static bool read_values(const block_shape& shape, const std::byte* block, float_type type, void* out,
                            std::ptrdiff_t stride) {
        return detail::visit_float_type(type, [&]<class To>(To) {
            return kernels::read_tokens<lanes, T>(shape, block, static_cast<To*>(out), stride);
        });
    }
    template <class T>
    static std::uint32_t write_values(const block_shape& shape, std::byte* block, float_type type,
                                      const void* tokens, std::ptrdiff_t stride, int count, int at) {
        const bool finite = detail::visit_float_type(type, [&]<class From>(From) {
            return kernels::write_tokens<lanes, T>(shape, block, static_cast<const From*>(tokens), stride,
                                                   count, at);
        });
        return finite ? 0 : scalar::write_tokens<T>(shape, block, type, tokens, stride, count, at);
    }
    static void round_tokens(const block_shape& shape, const float* values, float_type type, void* out,
                             std::ptrdiff_t stride) {
        detail::visit_float_type(type, [&]<class T>(T) {
            kernels::round_tokens<lanes>(shape, values, static_cast<T*>(out), stride);
        });
    }
    static bool hadamard_tokens(const block_shape& shape, const block_id& id, float* values,
                                std::ptrdiff_t stride, const token_transform& t, bool back) {
        return kernels::hadamard_tokens<lanes>(shape, id, values, stride, t, back);
    }
    template <kernels::range_scheme Scheme>
    static bool quantize_ranges(const codec_spec& codec, const block_shape& shape, const block_input& values,
                                std::byte* block) {
        if constexpr (rows_of_floats<Scheme>)
            return kernels::quantize_rows<lanes, typename Scheme::row_code>(codec, {}, shape, values, block);
        else
            return kernels::quantize_ranges<lanes, typename Scheme::levels, Scheme::code_bits>(
                codec, parameters_of<Scheme>, shape, values, block);
    }
    template <kernels::composed_scheme Scheme>
    static bool dequantize_groups(const codec_spec& codec, const block_shape& shape, const std::byte* block,
                                  float_type type, void* out, std::ptrdiff_t stride, float* values) {
        if constexpr (rows_of_floats<Scheme>)
            return kernels::dequantize_rows<lanes, typename Scheme::row_code>(codec, {}, shape, block, type,
                                                                              out, stride, values);
        else
            return kernels::dequantize_groups<lanes, typename Scheme::levels, Scheme::code_bits,
                                              Scheme::by_token>(codec, parameters_of<Scheme>, shape, block,
                                                                type, out, stride, values);
    }
    template <kernels::channel_scheme Scheme>
    static bool quantize_channels(const Scheme& scheme, const block_shape& shape, block_id id, float* values,
                                  std::byte* block, bool again, const float* token_scales) {
        int order[kernels::most_channels];
        const auto of = kernels::channel_blocks_of<simd>(scheme, shape, id, nullptr, order);
        const channel_encoding encoding = kernels::channel_encoding_of(scheme, shape, id, again);
        return with_widths<Scheme>([&]<int... Widths>() {
            return kernels::quantize_channels<lanes, Widths...>(of, encoding, values, token_scales, block);
        });
    }
    template <kernels::dequantized_by_channels Scheme>
    static bool dequantize_channels(const Scheme& scheme, const block_shape& shape, block_id id,
                                    const std::byte* block, float_type type, void* out, std::ptrdiff_t stride,
                                    float* values) {
        int order[kernels::most_channels];
        const auto of = kernels::channel_blocks_of<simd>(scheme, shape, id, block, order);
        with_widths<Scheme>([&]<int... Widths>() {
            kernels::dequantize_channels<lanes, Widths...>(of, type, out, stride, values);
        });
        return true;
    }

private:
    /// Calls f<widths of the codes>.
    template <class Scheme, class F>
    static auto with_widths(F&& f) {
        if constexpr (segmented<Scheme>)
            return with_list(static_cast<const typename Scheme::width_list*>(nullptr), f);
        else
            return f.template operator()<Scheme::code_bits>();
    }
    template <int... Widths, class F>
    static auto with_list(const code_widths<Widths...>*, F& f) {
        return f.template operator()<Widths...>();
    }
    template <class Scheme>
    static constexpr parameter_functions parameters_of =
        kernels::functions_of_parameters<simd, typename Scheme::levels, Scheme::code_bits,
                                         typename Scheme::parameter>;
};

}}  // namespace kvq
