// Reading and writing tokens in window pages (16 or 32 bit).
#pragma once

#include "../core/token_view.hpp"
#include "../page/page.hpp"
#include "../schemes/full.hpp"

namespace kvq::inline v0_1::detail {

/// Writes tokens [from, from + count) of `source` to positions [at, at + count) of every block of a window page.
template <class Window, class T>
void write_tokens(page& p, tensor role, int dim, const token_view<const T>& source, int from, int count,
                  int at) {
    const block_shape shape{role, p.tokens, dim};
    const value_layout<Window> layout(shape);
    const std::size_t block_bytes = full<Window>{}.block_bytes(shape);
    for (int h = 0; h < source.heads; ++h) {
        std::byte* const block = p.data() + block_bytes * static_cast<std::size_t>(h);
        for (int t = 0; t < count; ++t) {
            const T* const row = source.at(from + t, h);
            if (role == tensor::key) {
                // Words of one token lie one tile height apart.
                constexpr int per_word = value_layout<Window>::values_per_word;
                const std::size_t first = layout.element(at + t, 0);
                const std::size_t step = dim > per_word ? layout.element(at + t, per_word) - first : 0;
                for (int c = 0; c < dim; ++c)
                    store_as(block + sizeof(Window) * (first + static_cast<std::size_t>(c / per_word) * step +
                                                       static_cast<std::size_t>(c % per_word)),
                             Window(static_cast<float>(row[c])));
            } else {
                for (int c = 0; c < dim; ++c)
                    store_as(block + sizeof(Window) * layout.element(c, at + t),
                             Window(static_cast<float>(row[c])));
            }
        }
    }
}

/// Copies the first `count` tokens of a window page to a fresh (zeroed) one.
template <class Window>
void copy_tokens(const page& from, page& to, tensor role, int dim, int heads, int count) {
    const block_shape shape{role, from.tokens, dim};
    const value_layout<Window> layout(shape);
    const std::size_t block_bytes = full<Window>{}.block_bytes(shape);
    for (int h = 0; h < heads; ++h) {
        const std::size_t offset = block_bytes * static_cast<std::size_t>(h);
        for (int t = 0; t < count; ++t)
            for (int c = 0; c < dim; ++c) {
                const std::size_t at = offset + sizeof(Window) * full<Window>::element(layout, shape, t, c);
                store_as(to.data() + at, load_as<Window>(from.data() + at));
            }
    }
}

}  // namespace kvq::inline v0_1::detail
