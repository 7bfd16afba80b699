// The kernels of one backend as plain functions, in the parts of builtin_schemes.hpp: what kvq::library gives
// to programs that make formats of schemes of their own (cpu/library_kernels.hpp).
//
//   vectors_of<Backend>::functions             what does not depend on a codec, compiled with one of the
//                                              parts
//   add_kernels<Backend, Part>(list, add)      calls add(list, &entry) for every entry of a part
#pragma once

#include "../cpu/channel_kernels.hpp"
#include "../cpu/group_kernels.hpp"
#include "../schemes/token_rows.hpp"
#include "make_format.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

template <class Backend>
struct vectors_of {
    using lanes = typename Backend::lanes;

    static void load_floats(float_type type, const std::byte* from, int n, float* out) {
        visit_float_type(type, [&]<class P>(P) { Backend::template load_floats<P>(from, n, out); });
    }
    static bool read_tokens(float_type values, const block_shape& shape, const std::byte* block,
                            float_type type, void* out, std::ptrdiff_t stride) {
        return visit_float_type(values, [&]<class T>(T) {
            return Backend::template read_values<T>(shape, block, type, out, stride);
        });
    }
    static std::uint32_t write_tokens(float_type values, const block_shape& shape, std::byte* block,
                                      float_type type, const void* tokens, std::ptrdiff_t stride, int count,
                                      int at) {
        return visit_float_type(values, [&]<class T>(T) {
            return Backend::template write_tokens<T>(shape, block, type, tokens, stride, count, at);
        });
    }
    template <class Levels, class P>
    static constexpr parameter_functions parameters =
        kernels::functions_of_parameters<Backend, Levels, 8, P>;  // of float types the same for all widths

    static constexpr kernel_vectors functions{
        &backend_table<Backend>::functions,
        lanes::width,
        &load_floats,
        {{parameters<asymmetric, float>, parameters<asymmetric, float16>, parameters<asymmetric, bfloat16>},
         {parameters<symmetric, float>, parameters<symmetric, float16>, parameters<symmetric, bfloat16>}},
        &read_tokens,
        &write_tokens,
        &Backend::round_tokens,
        &kernels::hadamard_tokens<lanes>,
        &kernels::estimate_scores<lanes>,
        kernels::product_table<kernels::dequantized_block_product<Backend>>::functions};
};

template <class Lanes, class Levels, int Bits, bool PerToken>
inline constexpr group_functions functions_of_groups{
    &kernels::quantize_ranges<Lanes, Levels, Bits>,
    &kernels::dequantize_groups<Lanes, Levels, Bits, PerToken>};

template <class Lanes, class Code>
inline constexpr group_functions functions_of_rows{&kernels::quantize_rows<Lanes, Code>,
                                                   &kernels::dequantize_rows<Lanes, Code>};

template <class Lanes, int... Widths>
inline constexpr channel_functions functions_of_channels{&kernels::quantize_channels<Lanes, Widths...>,
                                                         &kernels::dequantize_channels<Lanes, Widths...>};
template <class Lanes, int... Widths>
constexpr const channel_functions* channels_of(const code_widths<Widths...>*) {
    return &functions_of_channels<Lanes, Widths...>;
}

template <class Backend, int Part, class Add>
void add_kernels(void* list, Add* add) {
    using lanes = typename Backend::lanes;
    using kernels::product_table;
    [[maybe_unused]] const auto entry = [&](const codec_spec& of, const product_functions* product,
                                            const group_functions* groups = nullptr,
                                            const channel_functions* channels = nullptr) {
        const codec_kernels all{of, product, groups, channels};
        add(list, &all);
    };
    if constexpr (Part == 0) {
        entry(codec_of<full<float16>>(),
              &product_table<kernels::window_block_product<Backend, float16>>::functions);
        entry(codec_of<full<bfloat16>>(),
              &product_table<kernels::window_block_product<Backend, bfloat16>>::functions);
        entry(codec_of<full<float>>(),
              &product_table<kernels::window_block_product<Backend, float>>::functions);
        entry(codec_of<float_rows<e4m3>>(),
              &product_table<kernels::block_product<Backend, float_rows<e4m3>>>::functions,
              &functions_of_rows<lanes, e4m3>);
    }
    if constexpr (Part >= 1 && Part <= 8) {
        const auto* const product =
            &product_table<kernels::code_block_product<Backend, Part, false>>::functions;
        entry(codec_of<affine<Part, per_token<>>>(), product,
              &functions_of_groups<lanes, asymmetric, Part, true>);
        entry(codec_of<affine<Part, per_channel<>>>(), product,
              &functions_of_groups<lanes, asymmetric, Part, false>);
        if constexpr (Part == 8)
            entry(codec_of<int8>(), product, &functions_of_groups<lanes, symmetric, Part, true>);
    }
    if constexpr (Part == 4) {
        codec_spec table = codec_of<affine<4>>();
        table.levels = level_kind::table;
        entry(table, &product_table<kernels::code_block_product<Backend, 4, true>>::functions);
    }
    // The widths of presets.
    if constexpr (Part == 9) {
        entry(codec_of<std4::values>(), nullptr, nullptr, &functions_of_channels<lanes, 4>);
        entry(codec_of<std5::values>(), nullptr, nullptr, &functions_of_channels<lanes, 5>);
        entry(codec_of<hi6::values>(), nullptr, nullptr, &functions_of_channels<lanes, 6>);
        entry(codec_of<ref8::values>(), nullptr, nullptr, &functions_of_channels<lanes, 8>);
    }
    if constexpr (Part == 10) {
        entry(codec_of<low2::values>(), nullptr, nullptr, &functions_of_channels<lanes, 2>);
        entry(codec_of<low3::values>(), nullptr, nullptr, &functions_of_channels<lanes, 3>);
        const auto segments = [&]<class Preset>(Preset) {
            using scheme = typename Preset::keys;
            entry(codec_of<scheme>(), &product_table<kernels::block_product<Backend, scheme>>::functions,
                  nullptr, channels_of<lanes>(static_cast<const typename scheme::width_list*>(nullptr)));
        };
        segments(low2{});
        segments(low3{});
        segments(mix4{});
        segments(mix5{});
        segments(mix6{});
    }
    if constexpr (Part == 11)
        entry(codec_of<token_rows>(), &product_table<kernels::token_row_product<Backend>>::functions);
}

}}}  // namespace kvq::detail
