// Reading and writing tokens in window pages (16 or 32 bit).
//
// A window page is a block of full<Window> per kv head (pack/value_layout.hpp). Contract: a token is rounded to Window once, when
// it is written; copies are exact. Nothing here looks at reference counts: who writes holds the page's only reference.
#pragma once

#include "../core/float_environment.hpp"
#include "../core/token_view.hpp"
#include "../page/page.hpp"
#include "../schemes/full.hpp"

namespace kvq::inline v0_1::detail {

/// Writes tokens [from, from + count) of `source` to positions [at, at + count) of every block of a window page.
template <class Backend, class Window, class T>
void write_tokens(page& p, tensor role, int dim, const token_view<const T>& source, int from, int count,
                  int at) {
    const block_shape shape{role, p.tokens, dim};
    const std::size_t block_bytes = full<Window>{}.block_bytes(shape);
    const default_arithmetic arithmetic;
    for (int h = 0; h < source.heads && count > 0; ++h)
        Backend::template write_tokens<Window>(shape, p.data() + block_bytes * static_cast<std::size_t>(h),
                                               source.at(from, h), source.token_stride, count, at);
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
