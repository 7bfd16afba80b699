// What products take of a scheme, so that schemes of one width share them: what its codes mean, and where the parameters of a block come from.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../schemes/concepts.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// What products know of a codec besides the layout of its codes, on one axis.
struct code_meaning {
    fold_use use;
    float top_code;                         ///< the largest number that is multiplied
    float zero_code;                        ///< what is subtracted from every such number
    const std::uint8_t* entries = nullptr;  ///< of the table, 16 of them
};

template <class Scheme>
constexpr code_meaning meaning_of(tensor role) noexcept {
    const std::uint8_t* entries = nullptr;
    if constexpr (detail::with_code_entries<Scheme>) {
        static_assert(Scheme::code_bits == 4 && detail::largest_multiplied<Scheme> <= 127,
                      "kvq: code_entries are 16 numbers from 0 to 127, for codes of 4 bits");
        entries = Scheme::code_entries.data();
    }
    return {Scheme::fold(role), static_cast<float>(detail::largest_multiplied<Scheme>),
            static_cast<float>(Scheme::zero_code), entries};
}

/// The parameters of a block as floats, in slots: of its rows for a group of columns, of its columns for a group of rows.
struct parameter_source {
    using load = void (*)(const parameter_source&, int group, float* scale, float* bias);

    const void* owner;  ///< a scheme
    block_shape shape;
    block_id id;
    const std::byte* block;
    load rows, columns;
    const float* factor;  ///< with which scales of columns are multiplied, where columns form segments

    KVQ_INLINE parameter_source of(const block_shape& s, const block_id& i, const std::byte* b,
                                   const float* f = nullptr) const {
        return {owner, s, i, b, rows, columns, f};
    }
};

/// The source of the parameters of a scheme's blocks. Functions that no axis calls may lack in the scheme.
template <class Backend, class Scheme>
parameter_source parameters_of(const Scheme& scheme) {
    parameter_source source{&scheme, {}, {}, nullptr, nullptr, nullptr, nullptr};
    if constexpr (segmented<Scheme>) {
        source.columns = [](const parameter_source& s, int group, float* scale, float* bias) {
            static_cast<const Scheme*>(s.owner)->columns(s.shape).template load<Backend>(
                s.block, group, scale, bias, s.factor);
        };
    } else {
        constexpr bool has_rows =
            requires(const block_shape& shape, const block_id& id, const std::byte* block, float* out) {
            scheme.template row_parameters<Backend>(shape, id, block, 0, out, out);
        };
        constexpr bool has_columns =
            requires(const block_shape& shape, const block_id& id, const std::byte* block, float* out) {
            scheme.template col_parameters<Backend>(shape, id, block, 0, out, out);
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

}}}  // namespace kvq::kernels
