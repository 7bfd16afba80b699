// A page as it is saved or sent: without the values of trimmed tokens, in as many bytes as a new page would have.
//
//   span that is not committed    a 16-bit page for page_geometry::window_tokens(); hidden tokens are zero
//   committed span                the page itself: tokens hidden by a deep trim or an erase share parameters with the others
//
// So two sequences in the same state give the same bytes.
#pragma once

#include <cstring>

#include "../cache/layer_track.hpp"
#include "../cache/window.hpp"

namespace kvq::inline KVQ_TAGGED::detail {

/// The page of tensor `role` of span i, or a clean copy of it from `scratch`.
inline page_ref clean_page(const format& window, const layer_track& track, int i, tensor role,
                           const cache_shape& shape, const page_geometry& g, page_pool& scratch) {
    const page_span& s = track[i];
    const page_ref& p = s.pages[static_cast<int>(role)];
    if (i < track.committed) return p;
    const int tokens = g.window_tokens(s.first_token, s.tokens, s.room);
    if (s.tokens == p->tokens && tokens == p->tokens) return p;
    const std::size_t bytes =
        window.block_bytes({role, tokens, shape.dim(role)}) * static_cast<std::size_t>(shape.kv_heads);
    page_ref copy = scratch.allocate(bytes, 0, tokens);
    std::memset(copy->data(), 0, bytes);
    copy_tokens(window.functions().value_type, *p, *copy, role, shape.dim(role), shape.kv_heads, s.tokens);
    return copy;
}

}  // namespace kvq::inline KVQ_TAGGED::detail
