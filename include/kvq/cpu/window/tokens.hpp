// Tokens of one head into a block of window values (16 or 32 bit), and back.
//
//   V   lanes are channels, as in the tokens: values are rounded and stored, two tokens to a word
//   K   rows are tokens: words of a square of tokens and columns are transposed in registers
//
// Contract: Window(static_cast<float>(x)), NaN payloads included. Values that already have the format are copied as words.
// Only words with NaN or infinities are converted again through float, which makes NaN quiet. Written words
// are searched for them on the way; only where there are some, the values are counted one by one.
#pragma once

#include "../../config.hpp"
#include "../../core/float_formats.hpp"
#include "../../pack/value_layout.hpp"
#include "../special_values.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <class Lanes, float_format Window, float_format T>
class token_writer {
public:
    /// tokens: `count` tokens, `stride` apart; the first one becomes token `at` of the block.
    token_writer(const block_shape& shape, std::byte* block, const T* tokens, std::ptrdiff_t stride,
                 int count, int at)
        : shape_(shape), layout_(shape), to_(block), from_(tokens), stride_(stride), count_(count), at_(at) {}

    /// Returns how many of the written values are not finite.
    std::uint32_t run() {
        write();
        if (!special::any(found_.words, found_.rest)) return 0;
        if (copies() && sizeof(T) == 2) {
            copies_ = false;
            write();
        }
        std::uint32_t n = 0;
        for (int t = 0; t < count_; ++t)
            for (int c = 0; c < shape_.dim; ++c)
                n += !detail::is_finite(static_cast<float>(rounded(from_[t * stride_ + c])));
        return n;
    }

private:
    using ints = typename Lanes::ints;
    using floats = typename Lanes::floats;
    using special = special_values<Lanes, Window>;
    static constexpr int width = Lanes::width;
    static constexpr int per_word = value_layout<Window>::values_per_word;
    static constexpr int square_columns = width * per_word;

    void write() {
        if (shape_.role == tensor::key)
            keys();
        else
            values();
    }
    /// Are words taken as they are? Where the types differ, no copy is compiled.
    KVQ_INLINE bool copies() const noexcept {
        if constexpr (std::same_as<T, Window>)
            return copies_;
        else
            return false;
    }
    static KVQ_INLINE Window rounded(T x) {
        if constexpr (std::same_as<T, float> && std::same_as<Window, float>)
            return x;
        else
            return Window(static_cast<float>(x));
    }
    /// Collects words that hold a value with all bits of the exponent set. Loops keep one of their own: a member would be stored
    /// and loaded again beside every store of bytes.
    struct search {
        ints words = Lanes::splat(0);
        std::uint32_t rest = 0;  // of values outside of vectors

        KVQ_INLINE void look_at(ints w) { words = Lanes::bit_or(words, special::marks(w)); }
        KVQ_INLINE void look_at(std::uint32_t word) { rest |= special::mark(word); }
        KVQ_INLINE void add(const search& other) {
            words = Lanes::bit_or(words, other.words);
            rest |= other.rest;
        }
    };
    /// Rounds and stores one value.
    static KVQ_INLINE void put(std::byte* to, T x, search& found) {
        const Window value = rounded(x);
        if constexpr (per_word == 2)
            found.look_at(std::uint32_t{value.bits});
        else
            found.look_at(detail::bit_cast<std::uint32_t>(value));
        detail::store_as(to, value);
    }
    static KVQ_INLINE void put_word(std::byte* to, const Window* values, search& found) {
        const auto word = detail::load_as<std::uint32_t>(values);
        found.look_at(word);
        detail::store_as(to, word);
    }
    const T* token(int t) const { return from_ + (t - at_) * stride_; }

    void keys() {
        const int whole = shape_.dim / square_columns * square_columns, end = at_ + count_;
        search found;
        for (int t = at_; t < end;) {
            const int in_tile = t % tile_layout::tile_rows;
            const int height =
                detail::smaller(tile_layout::tile_rows, layout_.tiles.rows.padded_size() - (t - in_tile));
            if (end - t >= width && height - in_tile >= width) {
                for (int c = 0; c < whole; c += square_columns) square(t, c, height, found);
                for (int i = 0; i < width; ++i) row(t + i, whole, height);
                t += width;
            } else {
                row(t++, 0, height);
            }
        }
        found_.add(found);
    }

    /// Words of `width` tokens and square_columns columns.
    KVQ_INLINE void square(int t, int c, int height, search& found) const {
        ints words[width];
        if (copies()) {
            KVQ_UNROLL
            for (int i = 0; i < width; ++i) {
                words[i] = Lanes::load(reinterpret_cast<const std::byte*>(token(t + i) + c));
                found.look_at(words[i]);
            }
        } else {
            alignas(64) Window rounded_row[width][square_columns];
            for (int i = 0; i < width; ++i)
                for (int part = 0; part < square_columns; part += width)
                    Lanes::template store_values<Window>(
                        reinterpret_cast<std::byte*>(rounded_row[i] + part),
                        Lanes::template load_values<T>(
                            reinterpret_cast<const std::byte*>(token(t + i) + c + part)));
            KVQ_UNROLL
            for (int i = 0; i < width; ++i) {
                words[i] = Lanes::load(reinterpret_cast<const std::byte*>(rounded_row[i]));
                found.look_at(words[i]);
            }
        }
        Lanes::transpose(words);
        std::byte* const to = to_ + 4 * layout_.tiles.word(t, c / per_word);
        KVQ_UNROLL
        for (int i = 0; i < width; ++i) Lanes::store(to + i * height * 4, words[i]);
    }

    /// Columns from c on of one token, word by word: they lie a tile's height apart.
    void row(int t, int c, int height) {
        const T* const from = token(t);
        search found;
        std::byte* to = to_ + 4 * layout_.tiles.word(t, c / per_word);
        if constexpr (!std::same_as<T, Window>)
            for (; c + width <= shape_.dim; c += width) {
                Window some[width];
                Lanes::template store_values<Window>(
                    reinterpret_cast<std::byte*>(some),
                    Lanes::template load_values<T>(reinterpret_cast<const std::byte*>(from + c)));
                for (int i = 0; i < width; i += per_word, to += 4 * height) put_word(to, some + i, found);
            }
        for (; c + per_word <= shape_.dim; c += per_word, to += 4 * height) {
            Window word[per_word];
            for (int i = 0; i < per_word; ++i) word[i] = rounded(from[c + i]);
            put_word(to, word, found);
        }
        if (c < shape_.dim) put(to, from[c], found);
        found_.add(found);
    }

    void values() {
        // Copies of members: stores of bytes could change those.
        const int dim = shape_.dim, at = at_, end = at_ + count_;
        const std::ptrdiff_t stride = stride_;
        const bool copied = copies();
        search found;
        for (int tile = 0; tile < dim; tile += tile_layout::tile_rows) {
            const int rows = detail::smaller(tile_layout::tile_rows, dim - tile);
            std::byte* const first = to_ + 4 * layout_.tiles.word(tile, 0);
            const std::ptrdiff_t step = layout_.tiles.vector_bytes(tile);
            const T* from = from_ + tile;
            for (int t = at; t < end;) {
                std::byte* const to = first + t / per_word * step;
                const int count = per_word == 2 && t % 2 == 0 && t + 1 < end ? 2 : 1;
                int r = 0;
                if (count == per_word)
                    for (; r + width <= rows; r += width)
                        Lanes::store(to + 4 * r, words(from + r, stride, copied, found));
                else
                    for (; r + width <= rows; r += width)
                        Lanes::store(to + 4 * r, half_words(from + r, t % 2, to + 4 * r, copied, found));
                for (; r < rows; ++r)
                    for (int i = 0; i < count; ++i)
                        put(to + 4 * r + static_cast<int>(sizeof(Window)) * ((t + i) % per_word),
                            from[i * stride + r], found);
                t += count;
                from += count * stride;
            }
        }
        found_.add(found);
    }

    /// The words of `width` channels: one token, or two in 16 bits.
    static KVQ_INLINE ints words(const T* from, std::ptrdiff_t stride, bool copied, search& found) {
        ints all;
        if constexpr (per_word == 2)
            all = Lanes::bit_or(bits(from, copied),
                                Lanes::template shift_left<16>(bits(from + stride, copied)));
        else
            all = Lanes::as_ints(Lanes::template load_values<T>(reinterpret_cast<const std::byte*>(from)));
        found.look_at(all);
        return all;
    }
    /// The words of `width` channels with one half replaced by a token.
    static KVQ_INLINE ints half_words(const T* from, int half, const std::byte* old, bool copied,
                                      search& found) {
        if constexpr (per_word == 2) {
            const ints now = Lanes::load(old), one = bits(from, copied);
            found.look_at(one);
            return half == 0 ? Lanes::bit_or(one, Lanes::bit_and(now, Lanes::splat(-65536)))
                             : Lanes::bit_or(Lanes::bit_and(now, Lanes::splat(65535)),
                                             Lanes::template shift_left<16>(one));
        } else {
            return words(from, 0, copied, found);
        }
    }
    static KVQ_INLINE ints bits(const T* from, bool copied) {
        const auto* const p = reinterpret_cast<const std::byte*>(from);
        if (std::same_as<T, Window> && copied)
            return Lanes::load_halfwords(p);
        else
            return Lanes::template half_bits<Window>(Lanes::template load_values<T>(p));
    }

    const block_shape shape_;
    const value_layout<Window> layout_;
    std::byte* to_;
    const T* from_;
    std::ptrdiff_t stride_;
    int count_, at_;
    bool copies_ = true;  // until a special value is found
    search found_;
};

/// Reads a square of keys: Lanes::width tokens of Columns channels, at most as many as a register has values. from: its first word;
/// word_step: bytes to the next word of a token. Calls store(token, channel, floats).
template <class Lanes, float_format Window, int Columns, class Store>
KVQ_INLINE void read_square(const std::byte* from, int word_step, const Store& store) {
    constexpr int width = Lanes::width, word_count = Columns / value_layout<Window>::values_per_word;
    typename Lanes::ints words[width];
    for (int i = 0; i < width; ++i) words[i] = Lanes::load(from + (i < word_count ? i : 0) * word_step);
    Lanes::transpose(words);
    for (int i = 0; i < width; ++i) {
        std::byte row[4 * width];
        Lanes::store(row, words[i]);
        for (int k = 0; k < Columns; k += width)
            store(i, k, Lanes::template load_values<Window>(row + k * static_cast<int>(sizeof(Window))));
    }
}

/// Writes all tokens of a block of values to out, token t at out + t * stride. False if columns do not fill vectors.
template <class Lanes, float_format Window, float_format T>
bool read_tokens(const block_shape& shape, const std::byte* block, T* out, std::ptrdiff_t stride) {
    constexpr int width = Lanes::width, per_word = value_layout<Window>::values_per_word;
    constexpr int square_columns = width * per_word;
    const value_layout<Window> layout(shape);
    const auto store = [&](int t, int c, typename Lanes::floats x) {
        Lanes::template store_values<T>(reinterpret_cast<std::byte*>(out + t * stride + c), x);
    };
    // Bytes from one word of a row to the next: the height of its tile.
    const auto step = [&](int row) {
        const int first = row / tile_layout::tile_rows * tile_layout::tile_rows;
        return 4 * detail::smaller(tile_layout::tile_rows, layout.tiles.rows.padded_size() - first);
    };
    if (shape.role == tensor::key) {
        if (shape.tokens % width != 0 || shape.dim % width != 0) return false;
        for (int t = 0; t < shape.tokens; t += width) {
            int c = 0;
            const auto store_at = [&](int row, int column, typename Lanes::floats x) {
                store(t + row, c + column, x);
            };
            const auto first_word = [&] { return block + 4 * layout.tiles.word(t, c / per_word); };
            for (; c + square_columns <= shape.dim; c += square_columns)
                read_square<Lanes, Window, square_columns>(first_word(), step(t), store_at);
            // Half a square of 16-bit values: 48 and 80 channels in registers of 512 bits.
            for (; c < shape.dim; c += width)
                read_square<Lanes, Window, width>(first_word(), step(t), store_at);
        }
    } else {
        if (shape.dim % width != 0 || shape.tokens % per_word != 0) return false;
        for (int t = 0; t < shape.tokens; t += per_word)
            for (int c = 0; c < shape.dim; c += width) {
                const auto words = Lanes::load(block + 4 * layout.tiles.word(c, t / per_word));
                if constexpr (per_word == 2) {
                    store(t, c, Lanes::template halves<Window, 0>(words));
                    store(t + 1, c, Lanes::template halves<Window, 1>(words));
                } else {
                    store(t, c, Lanes::as_floats(words));
                }
            }
    }
    return true;
}

}}}  // namespace kvq::kernels
