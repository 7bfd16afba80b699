// Reading and writing tokens in window pages (16 or 32 bit).
//
// A window page is a block of full<Window> per kv head (pack/value_layout.hpp). Contract: a token is rounded
// to Window once, when it is written; copies are exact; a rotation of keys rounds once more. These functions
// do not check reference counts: the writer holds the page's only reference.
#pragma once

#include <cstring>

#include "../attention/rotary.hpp"
#include "../core/float_environment.hpp"
#include "../core/row_view.hpp"
#include "../format/format.hpp"
#include "../page/page.hpp"
#include "../schemes/full.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

/// Adds to page::not_finite; on several threads.
inline void add_not_finite(page& p, std::uint32_t n) noexcept {
    if (n > 0) __atomic_fetch_add(&p.not_finite, n, __ATOMIC_RELAXED);
}

/// Writes tokens [from, from + count) of head `h` of `source` to positions [at, at + count) of block `h` of a
/// window page.
inline void write_tokens(const format& window, page& p, tensor role, int dim, const input_view& source, int h,
                         int from, int count, int at) {
    if (count == 0) return;
    const block_shape shape{role, p.tokens, dim};
    const default_arithmetic arithmetic;
    add_not_finite(p, window.functions().write_tokens(
                          shape, p.data() + window.block_bytes(shape) * static_cast<std::size_t>(h),
                          source.type, source.at(from, h), source.token_stride(), count, at));
}
/// The same for all heads.
inline void write_tokens(const format& window, page& p, tensor role, int dim, const input_view& source,
                         int from, int count, int at) {
    for (int h = 0; h < source.heads; ++h) write_tokens(window, p, role, dim, source, h, from, count, at);
}

/// NaN and infinities of a page of any format; of a window page, those of its first `count` tokens. Window
/// pages without any, nearly all, are not read.
inline std::uint32_t held_not_finite(float_type window, const page& p, tensor role, int dim, int heads,
                                     int count) {
    if (p.format != 0 || p.not_finite == 0) return p.not_finite;
    std::uint32_t n = 0;
    visit_float_type(window, [&]<class Window>(Window) {
        const block_shape shape{role, p.tokens, dim};
        const value_layout<Window> layout(shape);
        for (int h = 0; h < heads; ++h) {
            const std::byte* const block =
                p.data() + full<Window>{}.block_bytes(shape) * static_cast<std::size_t>(h);
            for (int t = 0; t < count; ++t)
                for (int c = 0; c < dim; ++c)
                    n += !is_finite(static_cast<float>(load_as<Window>(
                        block + sizeof(Window) * full<Window>::element(layout, shape, t, c))));
        }
    });
    return smaller(n, p.not_finite);  // a rotation of keys makes two of one
}

/// Copies the first `count` tokens of a window page to a new (zeroed) page, which may have memory for more or
/// fewer tokens.
template <class Window>
void copy_values(const page& from, page& to, tensor role, int dim, int heads, int count) {
    const block_shape from_shape{role, from.tokens, dim}, to_shape{role, to.tokens, dim};
    const value_layout<Window> from_layout(from_shape), to_layout(to_shape);
    const tile_layout &source = from_layout.tiles, &target = to_layout.tiles;
    const std::size_t from_bytes = full<Window>{}.block_bytes(from_shape),
                      to_bytes = full<Window>{}.block_bytes(to_shape);
    constexpr int per_word = value_layout<Window>::values_per_word;
    for (int h = 0; h < heads && count > 0; ++h) {
        const std::byte* const block = from.data() + from_bytes * static_cast<std::size_t>(h);
        std::byte* const copy = to.data() + to_bytes * static_cast<std::size_t>(h);
        const auto copy_words = [&](int row, int vector, std::size_t words) {
            std::memcpy(copy + 4 * target.word(row, vector), block + 4 * source.word(row, vector), 4 * words);
        };
        if (role == tensor::key) {  // a vector of a tile holds one word of each token
            for (int t = 0; t < count; t += tile_layout::tile_rows)
                for (int vector = 0; vector < source.words_per_row; ++vector)
                    copy_words(t, vector,
                               static_cast<std::size_t>(smaller(tile_layout::tile_rows, count - t)));
            continue;
        }
        // V: a vector of a tile holds `per_word` tokens of its channels; vectors follow each other.
        const int whole = count / per_word;
        for (int c = 0; c < dim; c += tile_layout::tile_rows) {
            const int height = smaller(tile_layout::tile_rows, source.rows.padded_size() - c);
            copy_words(c, 0, static_cast<std::size_t>(whole) * static_cast<std::size_t>(height));
        }
        for (int t = whole * per_word; t < count; ++t)
            for (int c = 0; c < dim; ++c)
                store_as(copy + sizeof(Window) * full<Window>::element(to_layout, to_shape, t, c),
                         load_as<Window>(block + sizeof(Window) *
                                                     full<Window>::element(from_layout, from_shape, t, c)));
    }
}

inline void copy_tokens(float_type window, const page& from, page& to, tensor role, int dim, int heads,
                        int count) {
    to.not_finite = held_not_finite(window, from, role, dim, heads, count);
    visit_float_type(window,
                     [&]<class Window>(Window) { copy_values<Window>(from, to, role, dim, heads, count); });
}

/// Copies tokens [first, first + count) of a window page to tokens [at, at + count) of a page, which may be
/// the same one. Value by value: for the few tokens of a cut.
inline void move_tokens(float_type window, const page& from, int first, page& to, int at, tensor role,
                        int dim, int heads, int count) {
    if (from.not_finite > 0) to.not_finite = from.not_finite;
    visit_float_type(window, [&]<class Window>(Window) {
        const block_shape from_shape{role, from.tokens, dim}, to_shape{role, to.tokens, dim};
        const value_layout<Window> from_layout(from_shape), to_layout(to_shape);
        const auto bytes = [](const block_shape& s, int h) {
            return full<Window>{}.block_bytes(s) * static_cast<std::size_t>(h);
        };
        for (int h = 0; h < heads; ++h)
            for (int t = 0; t < count; ++t)
                for (int c = 0; c < dim; ++c)
                    std::memcpy(
                        to.data() + bytes(to_shape, h) +
                            sizeof(Window) * full<Window>::element(to_layout, to_shape, at + t, c),
                        from.data() + bytes(from_shape, h) +
                            sizeof(Window) * full<Window>::element(from_layout, from_shape, first + t, c),
                        sizeof(Window));
    });
}

/// Rotates tokens [first, first + count) of a window page of keys by `by` positions more, each value rounded
/// once. row: dim floats.
inline void rotate_tokens(float_type window, page& p, const rotation& rotate, std::int64_t by, int dim,
                          int heads, int first, int count, float* row) {
    visit_float_type(window, [&]<class Window>(Window) {
        const block_shape shape{tensor::key, p.tokens, dim};
        const value_layout<Window> layout(shape);
        const default_arithmetic arithmetic;
        for (int h = 0; h < heads; ++h) {
            std::byte* const block =
                p.data() + full<Window>{}.block_bytes(shape) * static_cast<std::size_t>(h);
            const auto at = [&](int t, int c) {
                return block + sizeof(Window) * full<Window>::element(layout, shape, t, c);
            };
            for (int t = first; t < first + count; ++t) {
                for (int c = 0; c < dim; ++c) row[c] = static_cast<float>(load_as<Window>(at(t, c)));
                rotate(row, 1, dim, by);
                for (int c = 0; c < dim; ++c) store_as(at(t, c), Window(row[c]));
            }
        }
    });
}

}}}  // namespace kvq::detail
