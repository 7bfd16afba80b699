// The halves of a conversion of pages as functions of a device_format (make_device_format.cuh): any format
// and page size to any other, each compiled for its own side alone.
//
//   gather     x^ of a turn's pages as floats, in the target's page size
//   quantize   those to pages of the target
//
// Contract: quantize/convert.cuh. Rows of tokens may lie in pages of another system, with any strides.
#pragma once

#include "../quantize/convert.cuh"
#include "device_format.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Do rows of Pair lie in pages of other systems with any strides?
template <class Pair>
inline constexpr bool lies_anywhere = [] {
    if constexpr (token_row_scheme<typename Pair::keys> && token_row_scheme<typename Pair::values>) {
        const auto can = [](const kvq::row_layout& l, int dim) {
            return l.row_bytes(dim) % 16 == 0 && l.scales_behind(dim) % 4 == 0;
        };
        return can(Pair::keys::fixed_layout(), Pair::head_dim) &&
               can(Pair::values::fixed_layout(), Pair::value_dim);
    }
    return false;
}();

/// Where strided rows lie: as a view says, or in the blocks of these pages.
template <tensor Role, class Pair>
row_memory place_of(const layer_view::part& p, const std::byte* pages, std::size_t page_bytes) noexcept {
    const row_memory& given = p.places[static_cast<int>(Role)];
    if (given.token_bytes != 0) return given;
    constexpr auto layout = scheme_of<Role, Pair>::fixed_layout();
    constexpr auto row = static_cast<std::size_t>(layout.row_bytes(dim_of<Role, Pair>)),
                   scales = static_cast<std::size_t>(layout.scales_behind(dim_of<Role, Pair>));
    constexpr std::size_t block = Role == tensor::key ? Pair::key_block_bytes : Pair::value_block_bytes;
    if constexpr (scales == 0) return {row, block};
    return {row, block, pages + Pair::page_tokens * row, page_bytes, scales, block};
}

/// Table: device_table<...>.
template <class Table>
struct convert_functions {
    /// Calls f with the pages of a format as they lie.
    template <class F>
    static status with_pages(const layer_view& l, int number, F&& f) {
        return Table::with_pair(number, [&]<class Pair>(std::type_identity<Pair>) -> status {
            const layer_view::part& p = l.quantized[number];
            if (p.places[0].token_bytes != 0 || p.places[1].token_bytes != 0) {
                if constexpr (lies_anywhere<Pair>)
                    return f(Table::template quantized<strided_rows<Pair>>(l, number, p.table));
                else
                    return bad_value("format %d has no strides of tokens", number);
            }
            return f(Table::template quantized<Pair>(l, number, p.table));
        });
    }
    static status gather(const layer_view& l, int from, const target_columns& target,
                         const convert_turn& turn, cudaStream_t stream) {
        if constexpr (Table::latent || Table::index || Table::planes) {
            return bad_value("there is no conversion of such pages");
        } else {
            const auto run = [&](const auto& source) -> status {
                if (status s = check_ref(source, true); !s) return s;
                return gather_pages(source, target, turn, stream);
            };
            return from < 0 ? run(Table::window(l)) : with_pages(l, from, run);
        }
    }
    static status quantize(const layer_view& l, int to, const convert_turn& turn, cudaStream_t stream) {
        if constexpr (Table::latent || Table::index || Table::planes)
            return bad_value("there is no conversion of such pages");
        else
            return with_pages(
                l, to, [&](const auto& target) { return quantize_turn(target, turn, l.not_finite, stream); });
    }
};

}}}  // namespace kvq::cuda::detail
