// The kernels of floats of a layout of rows.
//
//   row_functions_for<Lanes>(layout)   null: none; those that are multiplied as codes (row_codes.hpp) need
//                                      none where the instruction set has such products
//
// Contract: kernels are those of row_kernels.hpp, for one operand and for as many as a call takes.
#pragma once

#include "row_codes.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Kernels of one kind of rows.
struct row_functions {
    void (*keys[2])(const row_pass&, const float* const* x, float* y, std::ptrdiff_t y_stride);
    void (*values[2])(const row_pass&, const float* w, std::ptrdiff_t w_stride, float* y,
                      std::ptrdiff_t y_stride);
    void (*decode)(const row_pass&, float* to, std::ptrdiff_t stride);
    float unit;
    bool pairs, checks_nan;
};

/// Operands of a call for values: as many sums as there are registers.
template <class Lanes>
inline constexpr int row_value_operands = Lanes::width >= 16  ? 4
                                          : Lanes::width >= 8 ? 2
                                                              : 1;
inline constexpr int row_key_operands = 4;

template <class Lanes, row_layout::number Kind, row_scales Scales>
inline constexpr row_functions row_functions_of{
    {&row_keys<Lanes, Kind, Scales, 1>, &row_keys<Lanes, Kind, Scales, row_key_operands>},
    {&row_values<Lanes, Kind, Scales, 1>, &row_values<Lanes, Kind, Scales, row_value_operands<Lanes>>},
    &decode_rows<Lanes, Kind, Scales>,
    row_numbers<Lanes, Kind>::unit,
    row_numbers<Lanes, Kind>::pairs,
    row_numbers<Lanes, Kind>::checks_nan};

/// Null: no kernel reads the layout.
template <class Lanes>
const row_functions* row_functions_for(const row_layout& l) {
    using number = row_layout::number;
    const bool scaled = l.scale != row_layout::stored::none;
    if (multiplies_codes<Lanes> && code_rows(l)) return nullptr;
    if (scaled && l.channels % row_chunk != 0 && !(l.numbers == number::e2m1 && l.channels == 16))
        return nullptr;
    if (l.scale == row_layout::stored::fp16 && l.channels != row_chunk) return nullptr;
    const auto found = [&]<number Kind, row_scales Scales>() -> const row_functions* {
        const auto wanted = !scaled            ? row_scales::none
                            : l.minimum        ? row_scales::scale_and_minimum
                            : l.channels == 16 ? row_scales::scale_of_16
                                               : row_scales::scale;
        return wanted == Scales ? &row_functions_of<Lanes, Kind, Scales> : nullptr;
    };
    // Those of codes elsewhere.
    const auto found_unless_codes = [&]<number Kind, row_scales Scales>() -> const row_functions* {
        if constexpr (multiplies_codes<Lanes>)
            return nullptr;
        else
            return found.template operator()<Kind, Scales>();
    };
    switch (l.numbers) {
        case number::e4m3:
            return scaled ? found.template operator()<number::e4m3, row_scales::scale>()
                          : found.template operator()<number::e4m3, row_scales::none>();
        case number::e5m2:
            return found.template operator()<number::e5m2, row_scales::none>();
        case number::e2m1:
            return l.channels == 16
                       ? found_unless_codes.template operator()<number::e2m1, row_scales::scale_of_16>()
                       : found_unless_codes.template operator()<number::e2m1, row_scales::scale>();
        case number::int8:
            return found_unless_codes.template operator()<number::int8, row_scales::scale>();
        case number::centred4:
            return found_unless_codes.template operator()<number::centred4, row_scales::scale>();
        case number::centred5:
            return found.template operator()<number::centred5, row_scales::scale>();
        case number::centred6:
            return found.template operator()<number::centred6, row_scales::scale>();
        case number::iq4_nl:
            return found_unless_codes.template operator()<number::iq4_nl, row_scales::scale>();
        case number::unsigned4:
            return found_unless_codes.template operator()<number::unsigned4, row_scales::scale_and_minimum>();
        case number::unsigned5:
            return found.template operator()<number::unsigned5, row_scales::scale_and_minimum>();
    }
    return nullptr;
}

}}}  // namespace kvq::kernels
