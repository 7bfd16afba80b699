// Tokens of one head into a block of window values (16 or 32 bit), and back.
//
//   V   lanes are channels, as in the tokens: values are rounded and stored, two tokens to a word
//   K   rows are tokens: words of a square of tokens and columns are transposed in registers; values of
//       another type are rounded first, some rows at a time
//
// Contract: Window(static_cast<float>(x)). Values that already have the format are copied as words. Where a
// written word has a NaN or an infinity, the caller writes all values once more, one by one: that makes NaN
// quiet, and counts them.
#pragma once

#include "../../config.hpp"
#include "../../core/float_formats.hpp"
#include "../../core/float_type.hpp"
#include "../../pack/value_layout.hpp"
#include "../special_values.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <class Lanes, float_format Window>
class token_writer {
    static constexpr int width = Lanes::width;
    static constexpr int per_word = value_layout<Window>::values_per_word;
    static constexpr int square_columns = width * per_word;
    using ints = typename Lanes::ints;
    using special = special_values<Lanes, Window>;

public:
    /// stride: values from one token to the next where they are read.
    token_writer(const block_shape& shape, std::byte* block, std::ptrdiff_t stride)
        : layout_(shape), to_(block), stride_(stride) {}

    /// Writes `channels` channels of `count` tokens; the first one becomes token `at` of the block, and its
    /// first value channel `channel`, which begins a word. Are all written values finite?
    KVQ_NOINLINE bool write_keys(const Window* from, int count, int at, int channel, int channels) const {
        const int whole = channels / square_columns * square_columns, end = at + count;
        search found;
        for (int t = at; t < end;) {
            const int in_tile = t % tile_layout::tile_rows;
            const int height =
                detail::smaller(tile_layout::tile_rows, layout_.tiles.rows.padded_size() - (t - in_tile));
            std::byte* const to = to_ + 4 * layout_.tiles.word(t, channel / per_word);
            if (end - t >= width && height - in_tile >= width) {
                for (int c = 0; c < whole; c += square_columns)
                    square(from + c, to + c / per_word * 4 * height, height, found);
                for (int i = 0; i < width; ++i, from += stride_)
                    if (whole < channels) row(from, whole, channels, to + 4 * i, height, found);
                t += width;
            } else {
                row(from, 0, channels, to, height, found);
                ++t;
                from += stride_;
            }
        }
        return !special::any(found.words, found.rest);
    }

    /// Writes `count` tokens of `channels` channels; the first one becomes token `at`. Are all written values
    /// finite?
    template <float_format T>
    KVQ_NOINLINE bool write_values(const T* from, int count, int at, int channels) const {
        const std::ptrdiff_t stride = stride_;
        const int end = at + count;
        search found;
        const std::ptrdiff_t tile_bytes =
            4 * std::ptrdiff_t{tile_layout::tile_rows} * layout_.tiles.words_per_row;
        // All tokens of one tile after those of the other: tiles of long pages lie whole pages of memory
        // apart.
        std::byte* tile = to_;
        for (int left = channels; left > 0;
             left -= tile_layout::tile_rows, tile += tile_bytes, from += tile_layout::tile_rows) {
            const int rows = detail::smaller(tile_layout::tile_rows, left);
            const T* token = from;
            for (int t = at, n; t < end; t += n, token += n * stride) {
                // One token alone is the second of its word, or the last one.
                n = per_word == 2 && t % 2 == 0 && t + 1 < end ? 2 : 1;
                std::byte* const to = tile + 4 * std::ptrdiff_t{t / per_word} * detail::round_up(rows, 4);
                int r = 0;
                if (n == per_word)
                    for (; r + width <= rows; r += width)
                        Lanes::store(to + 4 * r, words(token + r, stride, found));
                else
                    for (; r + width <= rows; r += width)
                        Lanes::store(to + 4 * r, half_words(token + r, t % 2, to + 4 * r, found));
                for (int i = 0; i < n && r < rows; ++i)
                    found.rest |= put_some(token + i * stride, r, rows, to, (t + i) % per_word);
            }
        }
        return !special::any(found.words, found.rest);
    }

private:
    /// Collects words that hold a value with all bits of the exponent set.
    struct search {
        ints words = Lanes::splat(0);
        std::uint32_t rest = 0;  // of values outside of vectors

        KVQ_INLINE void look_at(ints w) { words = Lanes::bit_or(words, special::marks(w)); }
        KVQ_INLINE void look_at(std::uint32_t word) { rest |= special::mark(word); }
    };
    /// Stores a value, and returns its mark.
    static KVQ_INLINE std::uint32_t put(std::byte* to, Window value) {
        detail::store_as(to, value);
        if constexpr (per_word == 2)
            return special::mark(value.bits);
        else
            return special::mark(detail::bit_cast<std::uint32_t>(value));
    }
    /// Channels [r, rows) of a token, to one half of each word or all of it. A function of its own leaves
    /// registers to vectors.
    template <float_format T>
    static KVQ_NOINLINE std::uint32_t put_some(const T* token, int r, int rows, std::byte* to, int half) {
        std::uint32_t marks = 0;
        for (to += static_cast<int>(sizeof(Window)) * half; r < rows; ++r)
            marks |= put(to + 4 * r, Window(static_cast<float>(token[r])));
        return marks;
    }

    /// Words of `width` tokens and square_columns columns. The stride is a member, so that g++ computes where
    /// a token lies for every square. With sixteen pointers to tokens it reads every token twice.
    KVQ_INLINE void square(const Window* from, std::byte* to, int height, search& found) const {
        ints words[width];
        KVQ_UNROLL
        for (int i = 0; i < width; ++i)
            words[i] = Lanes::load(reinterpret_cast<const std::byte*>(from + i * stride_));
        KVQ_UNROLL
        for (int i = 0; i < width; ++i) found.look_at(words[i]);
        Lanes::transpose(words);
        KVQ_UNROLL
        for (int i = 0; i < width; ++i) Lanes::store(to + i * height * 4, words[i]);
    }

    /// Columns from c on of one token, word by word: they lie a tile's height apart. to: the first word of
    /// the token.
    static void row(const Window* from, int c, int channels, std::byte* to, int height, search& found) {
        to += c / per_word * 4 * height;
        for (; c + per_word <= channels; c += per_word, to += 4 * height) {
            const auto word = detail::load_as<std::uint32_t>(from + c);
            found.look_at(word);
            detail::store_as(to, word);
        }
        if (c < channels) found.rest |= put(to, from[c]);
    }

    /// The words of `width` channels: one token, or two in 16 bits.
    template <class T>
    static KVQ_INLINE ints words(const T* from, std::ptrdiff_t stride, search& found) {
        ints all = bits(from);
        if constexpr (per_word == 2)
            all = Lanes::bit_or(all, Lanes::template shift_left<16>(bits(from + stride)));
        found.look_at(all);
        return all;
    }
    /// The words of `width` channels with one half replaced by a token.
    template <class T>
    static KVQ_INLINE ints half_words(const T* from, int half, const std::byte* old, search& found) {
        const ints now = Lanes::load(old), one = bits(from);
        found.look_at(one);
        return half == 0 ? Lanes::bit_or(one, Lanes::bit_and(now, Lanes::splat(-65536)))
                         : Lanes::bit_or(Lanes::bit_and(now, Lanes::splat(65535)),
                                         Lanes::template shift_left<16>(one));
    }
    /// `width` values as the window stores them, one to a lane.
    template <class T>
    static KVQ_INLINE ints bits(const T* from) {
        const auto* const p = reinterpret_cast<const std::byte*>(from);
        if constexpr (sizeof(Window) == 4)
            return Lanes::as_ints(Lanes::template load_values<T>(p));
        else if constexpr (std::same_as<T, Window>)
            return Lanes::load_halfwords(p);
        else
            return Lanes::template half_bits<Window>(Lanes::template load_values<T>(p));
    }

    const value_layout<Window> layout_;
    std::byte* to_;
    std::ptrdiff_t stride_;
};

/// Writes `count` rows, `stride` values apart, as tokens from `at` on. Are all written values finite? If not,
/// NaN are as they come.
template <class Lanes, float_format Window, float_format T>
bool write_tokens(const block_shape& shape, std::byte* block, const T* tokens, std::ptrdiff_t stride,
                  int count, int at) {
    using writer = token_writer<Lanes, Window>;
    if (shape.role == tensor::value)
        return writer(shape, block, stride).write_values(tokens, count, at, shape.dim);
    if constexpr (std::same_as<T, Window>) {
        return writer(shape, block, stride).write_keys(tokens, count, at, 0, shape.dim);
    } else {
        // Some channels of the tokens of a tile at a time.
        constexpr int width = Lanes::width, tile = tile_layout::tile_rows, most = 128;
        alignas(64) std::byte room[sizeof(Window) * tile * most];  // no values, which would be set to 0
        bool finite = true;
        for (int t = 0, n; t < count; t += n) {
            n = detail::smaller(tile - (at + t) % tile, count - t);
            for (int c = 0, channels; c < shape.dim; c += channels) {
                channels = detail::smaller(most, shape.dim - c);
                for (int i = 0; i < n; ++i) {
                    const T* const from = tokens + (t + i) * stride + c;
                    std::byte* const to = room + static_cast<int>(sizeof(Window)) * i * channels;
                    int k = 0;
                    for (; k + width <= channels; k += width)
                        Lanes::template store_values<Window>(
                            to + static_cast<int>(sizeof(Window)) * k,
                            Lanes::template load_values<T>(reinterpret_cast<const std::byte*>(from + k)));
                    for (; k < channels; ++k)
                        detail::store_as(to + static_cast<int>(sizeof(Window)) * k,
                                         Window(static_cast<float>(from[k])));
                }
                finite &= writer(shape, block, channels)
                              .write_keys(reinterpret_cast<const Window*>(room), n, at + t, c, channels);
            }
        }
        return finite;
    }
}

/// Reads a square of keys: Lanes::width tokens of Columns channels, at most as many as a register has values.
/// from: its first word; word_step: bytes to the next word of a token. Calls store(token, channel, floats).
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

/// Writes all tokens of a block of values to out, token t at out + t * stride. False if columns do not fill
/// vectors.
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
