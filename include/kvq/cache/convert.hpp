// A whole page in another format: coded from window values, back to window values, or from one scheme to another.
//
//   window -> coded   the backend's encoder on the 16/32-bit values
//   coded  -> window  x^ rounded once to the window format
//   coded  -> coded   requantize() of the target scheme on x^ in float, encode() where it has none; transforms are undone and
//                     applied on the way
//
// Error, with e the error that the source page already has:
//   min-max fits      |x - x''| <= e + scale''/2, so a chain is off by at most the sum of its half steps. A proof.
//   presets           A channel that lies on a grid of the target's width keeps the grid, tokens keep their factors, and parameters
//                     settle on values that are stored again without a change (quant/grid_keeper.hpp). A chain of ten among presets
//                     loses at most 1.5 times the sum of what its formats, each counted once, lose alone (root of the squares of a
//                     page); one that goes back and forth between a preset of 4 bits or less and 8 bits at most 1.25 times.
//   any formats       at most 2 times the sum over all links. Two formats without a common grid, such as values per channel
//                     and values per token at equal width, do add something every time.
// The last two are measured, on pages of 16 tokens and channels or more (tests/properties/requantize_chains.cpp). Values that were
// 16 bit in between are fitted as new ones.
#pragma once

#include "../core/float_environment.hpp"
#include "../core/token_view.hpp"
#include "../page/formats.hpp"
#include "../page/page.hpp"
#include "../quant/channel_coder.hpp"

namespace kvq::inline v0_1::detail {

/// Fills `to` (its format says how) with the values of `from`. scratch: shape.values() floats of one block.
template <class Backend, class Window, tensor Role, class List>
void convert_page(const format_table<Role, Window, List>& table, const cache_shape& shape, int layer,
                  const page& from, page& to, float* scratch) {
    const block_shape block{Role, from.tokens, shape.dim(Role)};
    const std::size_t from_bytes = table.block_bytes(from.format, block),
                      to_bytes = table.block_bytes(to.format, block);
    to.not_finite = from.not_finite;
    const default_arithmetic arithmetic;
    for (int h = 0; h < shape.kv_heads; ++h) {
        const block_id id{layer, h};
        const std::byte* const source = from.data() + from_bytes * static_cast<std::size_t>(h);
        std::byte* const target = to.data() + to_bytes * static_cast<std::size_t>(h);
        if (from.format == 0) {
            to.not_finite += table.visit(to.format, [&](const auto& s) {
                return Backend::template encode<Window>(s, block, id, source, target, scratch);
            });
        } else if (to.format == 0) {
            to.not_finite += table.visit(from.format, [&](const auto& s) {
                return Backend::template decode_to_window<Window>(s, block, id, source, target, scratch);
            });
        } else {
            const bool done = table.visit(from.format, [&](const auto& s) {
                return Backend::decode_block(s, block, source, scratch);
            }) && table.visit(to.format, [&](const auto& s) {
                return Backend::encode_block(s, block, scratch, target);
            });
            if (done) continue;
            float factors[most_coded];
            const bool known = table.visit(from.format, [&](const auto& s) {
                Backend::decode(s, block, id, source, scratch, block.dim, scratch);
                if constexpr (with_factors<std::remove_cvref_t<decltype(s)>>) {
                    s.read_factors(block, source, factors);
                    return true;
                }
                return false;
            });
            to.not_finite += table.visit(to.format, [&](const auto& s) {
                return Backend::requantize_values(s, block, id, scratch, known ? factors : nullptr, target);
            });
        }
    }
}

/// Codes a whole page of tokens that have just arrived, source tokens [first, first + to.tokens), a head at a time; `window`,
/// a window page, is scratch.
template <class Backend, class Window, tensor Role, class List, class T>
void code_tokens(const format_table<Role, Window, List>& table, const cache_shape& shape, int layer,
                 const token_view<const T>& source, int first, page& window, page& to, float* scratch) {
    const block_shape block{Role, to.tokens, shape.dim(Role)};
    const std::size_t to_bytes = table.block_bytes(to.format, block);
    to.not_finite = 0;
    const default_arithmetic arithmetic;
    for (int h = 0; h < shape.kv_heads; ++h) {
        to.not_finite += table.visit(to.format, [&](const auto& s) {
            return Backend::template encode_tokens<Window>(
                s, block, block_id{layer, h}, source.at(first, h), source.token_stride, window.data(),
                to.data() + to_bytes * static_cast<std::size_t>(h), scratch);
        });
    }
}

}  // namespace kvq::inline v0_1::detail
