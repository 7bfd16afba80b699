// What products and estimates take of a scheme, so that schemes of one width share them: what its codes mean,
// where they lie, and where the parameters of a block come from.
//
//   product_blocks_of<Backend>(scheme, shape, id)      of the blocks of one layer and head
//
// Contract: plain values, so that kernels may be compiled for another instruction set than the scheme. They
// point to the scheme.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../schemes/block_layout.hpp"
#include "../../schemes/codec_spec.hpp"
#include "../../schemes/row_layout.hpp"

namespace kvq { inline namespace v0_3 {

/// What products know of a codec besides the layout of its codes, on one axis.
struct code_meaning {
    fold_use use;
    bool weights;                           ///< are the operands weights, and no queries?
    float top_code;                         ///< the largest number that is multiplied
    float zero_code;                        ///< what is subtracted from every such number
    const std::uint8_t* entries = nullptr;  ///< of the table, 16 of them
    float unit;                             ///< of such numbers in steps of the scale, a power of two
};

/// The parameters of a block as floats, in slots: of its rows for a group of columns, of its columns for a
/// group of rows.
struct parameter_source {
    using load = void (*)(const parameter_source&, int group, float* scale, float* bias);
    /// Where they lie in a block of the library's codecs.
    struct place {
        std::size_t scales, token_scales;
        int groups, slot_count, token_slots;
        bool has_bias;
    };

    load rows, columns;
    const void* owner;  ///< a scheme
    block_shape shape;
    block_id id;
    const std::byte* block;
    const float* factor;  ///< with which scales of columns are multiplied, where columns form segments
    place at;

    KVQ_NO_COPY parameter_source of(const block_id& i, const std::byte* b, const float* f = nullptr) const {
        return {rows, columns, owner, shape, i, b, f, at};
    }
};

struct product_blocks {
    code_meaning meaning;
    parameter_source source;
    int row_group, col_group;  ///< rows, and columns, that share parameters
    std::size_t parameters;    ///< their offset in a block
    std::size_t bytes;         ///< of a block
    /// Ranges of columns, one of each width of the codec, where it has several.
    int segment_count;
    code_segment segments[codec_spec::most_widths];
    /// Rows of tokens: their layout.
    row_layout rows;
    float tensor_scale;
    /// Blocks that are dequantized first.
    void (*dequantize)(const void* owner, const block_shape&, block_id, const std::byte* block,
                       float* values);

    KVQ_NO_COPY product_blocks() noexcept = default;
};

}}  // namespace kvq

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Does a product read the blocks of a scheme?
template <class Scheme>
inline constexpr bool has_product = foldable<Scheme> || segmented<Scheme> || full_precision<Scheme> ||
                                    rows_of_floats<Scheme> || rows_of_tokens<Scheme>;

template <class Scheme>
constexpr code_meaning meaning_of(tensor role) noexcept {
    const std::uint8_t* entries = nullptr;
    if constexpr (detail::with_code_entries<Scheme>) {
        static_assert(Scheme::code_bits == 4 && detail::largest_multiplied<Scheme> <= 127,
                      "kvq: code_entries are 16 numbers from 0 to 127, for codes of 4 bits");
        entries = Scheme::code_entries.data();
    }
    return {Scheme::fold(role),
            role == tensor::value,
            static_cast<float>(detail::largest_multiplied<Scheme>),
            static_cast<float>(Scheme::zero_code),
            entries,
            1.0f};
}

/// Loads of parameters by their storage, and of token scales by theirs, for all schemes.
template <class Backend, class Parameters>
void load_parameters(const parameter_source& s, int group, float* scale, float* bias) {
    const auto& [scales, token_scales, groups, slot_count, token_slots, has_bias] = s.at;
    Parameters::template load_scales<Backend>(s.block + scales, groups, slot_count, group, 0, slot_count,
                                              scale, s.factor);
    if (has_bias)
        Parameters::template load_biases<Backend>(s.block + scales, groups, slot_count, group, 0, slot_count,
                                                  bias);
}
template <class Backend, class TokenScales>
void load_token_scales(const parameter_source& s, int, float* scale, float*) {
    TokenScales::template load<Backend>(s.block + s.at.token_scales, s.at.token_slots, scale);
}

/// The source of the parameters of a scheme's blocks of a shape. Functions that no axis calls may lack in a
/// scheme of one's own.
template <class Backend, class Scheme>
parameter_source parameters_of(const Scheme& scheme, const block_shape& shape) {
    parameter_source source{nullptr, nullptr, &scheme, shape, {}, nullptr, nullptr, {}};
    if constexpr (codec_of<Scheme>().content == block_content::codes) {
        const block_layout of = scheme.layout();
        source.at = {of.scale_offset(shape), 0, of.groups(shape), of.slot_count(shape), 0, of.codec.has_bias};
        const bool rows = of.codec.on_rows(shape.role);
        (rows ? source.rows : source.columns) = &load_parameters<Backend, typename Scheme::parameters>;
        if constexpr (codec_of<Scheme>().has_token_scales()) {
            source.at.token_scales = of.token_scale_offset(shape);
            source.at.token_slots = of.cut(shape).padded_size();
            (rows ? source.columns : source.rows) =
                &load_token_scales<Backend, typename Scheme::token_scale_type>;
        }
    } else if constexpr (segmented<Scheme>) {
        source.columns = [](const parameter_source& s, int group, float* scale, float* bias) {
            static_cast<const Scheme*>(s.owner)->columns(s.shape).template load<Backend>(
                s.block, group, scale, bias, s.factor);
        };
    } else {
        constexpr bool has_rows =
            requires(const block_shape& of, const block_id& id, const std::byte* block, float* out) {
            scheme.template row_parameters<Backend>(of, id, block, 0, out, out);
        };
        constexpr bool has_columns =
            requires(const block_shape& of, const block_id& id, const std::byte* block, float* out) {
            scheme.template col_parameters<Backend>(of, id, block, 0, out, out);
        };
        if constexpr (has_rows)
            source.rows = [](const parameter_source& s, int group, float* scale, float* bias) {
                static_cast<const Scheme*>(s.owner)->template row_parameters<Backend>(s.shape, s.id, s.block,
                                                                                      group, scale, bias);
            };
        if constexpr (has_columns)
            source.columns = [](const parameter_source& s, int group, float* scale, float* bias) {
                static_cast<const Scheme*>(s.owner)->template col_parameters<Backend>(s.shape, s.id, s.block,
                                                                                      group, scale, bias);
            };
    }
    return source;
}

/// The blocks of a scheme for products and estimates. Parameters are loaded, and blocks dequantized, by
/// functions of Backend.
template <class Backend, class Scheme>
product_blocks product_blocks_of(const Scheme& scheme, const block_shape& shape,
                                 [[maybe_unused]] const block_id& id) {
    product_blocks b;
    b.source.shape = shape;
    b.segment_count = 0;
    b.dequantize = nullptr;
    if constexpr (foldable<Scheme>) {
        const auto codes = scheme.codes(shape);
        b.meaning = meaning_of<Scheme>(shape.role);
        b.source = parameters_of<Backend>(scheme, shape);
        b.row_group = codes.rows().group;
        b.col_group = codes.cols.group;
        b.parameters = codes.bytes();
        b.bytes = scheme.block_bytes(shape);
    } else if constexpr (segmented<Scheme>) {
        const auto columns = scheme.columns(shape);
        b.meaning = {columns.fold(shape.role), shape.role == tensor::value, 255.0f, 0.0f, nullptr, 1.0f};
        b.source = parameters_of<Backend>(scheme, shape);
        b.row_group = columns.codes(shape).rows().group;
        b.col_group = columns.codes(shape).cols.group;
        b.parameters = columns.parameters;
        b.bytes = scheme.block_bytes(shape);
        b.segment_count = Scheme::width_list::count;
        scheme.for_each_segment(shape, id, [&]<int Bits>(const code_segment& segment) {
            int w = 0;
            while (Scheme::width_list::values[w] != Bits) ++w;
            b.segments[w] = segment;
        });
    }
    if constexpr (rows_of_tokens<Scheme>) {
        b.rows = scheme.layout();
        b.tensor_scale = scheme.tensor_scale(id);
    }
    // Where there may be no kernel that reads the codes, too.
    if constexpr (!has_product<Scheme> || !Backend::has_all_kernels) {
        b.source.owner = &scheme;
        b.dequantize = [](const void* s, const block_shape& of, block_id i, const std::byte* block,
                          float* values) {
            Backend::dequantize(*static_cast<const Scheme*>(s), of, i, block, float_type::fp32, values,
                                std::ptrdiff_t{of.dim}, values);
        };
    }
    return b;
}

}}}  // namespace kvq::kernels
