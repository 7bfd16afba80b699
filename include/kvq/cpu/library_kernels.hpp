// The backend of programs that link kvq::library: its kernels, for the best instruction set of the CPU,
// whatever a file is compiled for.
//
//   make_format<affine<4>>()      with KVQ_COMPILED: a format on this backend
//
// A file compiles what depends on a type alone: portable code of the scheme, for blocks and values that
// kernels leave, and loads of parameters of one's own. The library has kernels of the codecs of its formats:
// products with codes of 1 to 8 bits, of tables, of e4m3, and of the widths of its presets; quantizing and
// dequantizing of asymmetric codes of 1 to 8 bits, symmetric ones of 8, and e4m3, group by group; channel by
// channel those of 2 to 6 and of 8 bits, and of the widths of its presets. What it lacks is done by portable
// code, and format::describe gives that as the reason; a file that defines KVQ_HEADER_ONLY compiles kernels
// of its own.
// Contract: the same bytes and results as the other backends.
#pragma once

#include "channels.hpp"
#include "quantize/fit.hpp"
#include "vector_backend.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

struct library : vector_backend<library> {
    static constexpr bool has_all_kernels = false;
    static const kernel_vectors& vectors() {
        static const kernel_vectors& all = library_vectors();
        return all;
    }
    template <class P>
    static void load_floats(const std::byte* from, int n, float* out) {
        if constexpr (float_format<P>)
            vectors().load_floats(float_type_of<P>, from, n, out);
        else
            detail::plain_loads::load_floats<P>(from, n, out);
    }

    /// Does attention read the blocks of a scheme? Otherwise they are dequantized first.
    template <class Scheme>
    static bool reads() {
        return &product<Scheme>() != &vectors().dequantized;
    }
    template <class Scheme>
    static const product_functions& product() {
        static const product_functions* const found = codec_of<Scheme>().reading == block_reading::dequantized
                                                          ? nullptr
                                                          : library_product(codec_of<Scheme>());
        return found ? *found : vectors().dequantized;
    }
    static void estimate_scores(const product_blocks& of, const parameter_source& source, const float* x,
                                std::ptrdiff_t x_stride, int count, int first, int end, float spread,
                                float* out, std::ptrdiff_t ahead, float* scratch) {
        vectors().estimate_scores(of, source, x, x_stride, count, first, end, spread, out, ahead, scratch);
    }

    // The kernels of vector_backend.hpp.

    static int width() { return vectors().width; }
    template <class Scheme>
    static kernels::missing_kernels missing() {
        constexpr codec_spec codec = codec_of<Scheme>();
        constexpr kernels::quantizer quantizer = kernels::quantizer_of(codec);
        constexpr kernels::dequantizer dequantizer = kernels::dequantizer_of(codec);
        const bool groups = library_groups(codec) != nullptr, channels = library_channels(codec) != nullptr;
        const auto lacks = [&](bool by_groups, bool by_channels) {
            return (by_groups && !groups) || (by_channels && !channels);
        };
        return {
            lacks(quantizer == kernels::quantizer::ranges || quantizer == kernels::quantizer::rows,
                  quantizer == kernels::quantizer::channels),
            lacks(dequantizer == kernels::dequantizer::groups || dequantizer == kernels::dequantizer::rows,
                  dequantizer == kernels::dequantizer::channels),
            !reads<Scheme>()};
    }
    static bool read_window(float_type type, const block_shape& shape, const std::byte* from, float* values) {
        return vectors().read_tokens(type, shape, from, float_type::fp32, values, shape.dim);
    }
    template <class T>
    static bool read_values(const block_shape& shape, const std::byte* block, float_type type, void* out,
                            std::ptrdiff_t stride) {
        return vectors().read_tokens(float_type_of<T>, shape, block, type, out, stride);
    }
    template <class T>
    static std::uint32_t write_values(const block_shape& shape, std::byte* block, float_type type,
                                      const void* tokens, std::ptrdiff_t stride, int count, int at) {
        return vectors().write_tokens(float_type_of<T>, shape, block, type, tokens, stride, count, at);
    }
    static void round_tokens(const block_shape& shape, const float* values, float_type type, void* out,
                             std::ptrdiff_t stride) {
        vectors().round_tokens(shape, values, type, out, stride);
    }
    static bool hadamard_tokens(const block_shape& shape, const block_id& id, float* values,
                                std::ptrdiff_t stride, const token_transform& t, bool back) {
        return vectors().transform(shape, id, values, stride, t, back);
    }
    template <kernels::range_scheme Scheme>
    static bool quantize_ranges(const codec_spec& codec, const block_shape& shape, const block_input& values,
                                std::byte* block) {
        static const group_functions* const found = library_groups(codec_of<Scheme>());
        return found && found->quantize(codec, parameters_of<Scheme>(), shape, values, block);
    }
    template <kernels::channel_scheme Scheme>
    static bool quantize_channels(const Scheme& scheme, const block_shape& shape, block_id id, float* values,
                                  std::byte* block, bool again, const float* token_scales) {
        static const channel_functions* const found = library_channels(codec_of<Scheme>());
        if (found == nullptr) return false;
        int order[kernels::most_channels];
        return found->quantize(kernels::channel_blocks_of<library>(scheme, shape, id, nullptr, order),
                               kernels::channel_encoding_of(scheme, shape, id, again), values, token_scales,
                               block);
    }
    template <kernels::dequantized_by_channels Scheme>
    static bool dequantize_channels(const Scheme& scheme, const block_shape& shape, block_id id,
                                    const std::byte* block, float_type type, void* out, std::ptrdiff_t stride,
                                    float* values) {
        static const channel_functions* const found = library_channels(codec_of<Scheme>());
        if (found == nullptr) return false;
        int order[kernels::most_channels];
        found->dequantize(kernels::channel_blocks_of<library>(scheme, shape, id, block, order), type, out,
                          stride, values);
        return true;
    }
    template <kernels::composed_scheme Scheme>
    static bool dequantize_groups(const codec_spec& codec, const block_shape& shape, const std::byte* block,
                                  float_type type, void* out, std::ptrdiff_t stride, float* values) {
        static const group_functions* const found = library_groups(codec_of<Scheme>());
        return found &&
               found->dequantize(codec, parameters_of<Scheme>(), shape, block, type, out, stride, values);
    }

private:
    template <class Scheme>
    static parameter_functions parameters_of() {
        if constexpr (rows_of_floats<Scheme>) {
            return {};
        } else {
            using levels = typename Scheme::levels;
            using parameter = typename Scheme::parameter;
            if constexpr (float_format<parameter>)
                return vectors().parameters[std::same_as<levels, symmetric> ? 1 : 0]
                                           [static_cast<int>(float_type_of<parameter>)];
            else
                return {&kernels::fit_own<levels, Scheme::code_bits, parameter>,
                        kernels::range_limit<parameter>(), &load_floats<parameter>, false};
        }
    }
};

}}  // namespace kvq
