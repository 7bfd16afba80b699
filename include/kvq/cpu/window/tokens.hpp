// Tokens of one head into a block of window values (16 or 32 bit), and back.
//
//   V   lanes are channels, as in the tokens: values are rounded and stored, two tokens to a word
//   K   rows are tokens: words of a square of tokens and columns are transposed in registers
//
// Contract: Window(static_cast<float>(x)), NaN payloads included. Values that already have the format are copied as words, floats are
// rounded on the way, and other values become floats first. So do, in a second pass, all values where a written word has a NaN or an
// infinity: that makes NaN quiet, and then values are counted one by one.
#pragma once

#include "../../config.hpp"
#include "../../core/float_formats.hpp"
#include "../../core/float_type.hpp"
#include "../../pack/value_layout.hpp"
#include "../special_values.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Writes rows of values of the type of the block, as they are, or of floats.
template <class Lanes, float_format Window, float_format T>
class token_writer {
    static_assert(std::same_as<T, Window> || std::same_as<T, float>);

public:
    /// from: rows, `stride` apart; the first one becomes token `at` of the block, and its first value channel `channel`, which begins
    /// a tile.
    token_writer(const block_shape& shape, std::byte* block, const T* from, std::ptrdiff_t stride, int at,
                 int channel)
        : role_(shape.role),
          layout_(shape),
          to_(block),
          from_(from),
          stride_(stride),
          at_(at),
          channel_(channel) {}

    /// Is one of the written values not finite?
    KVQ_NOINLINE bool run(int tokens, int channels) const {
        search found;
        if (role_ == tensor::key)
            keys(tokens, channels, found);
        else
            values(tokens, channels, found);
        return special::any(found.words, found.rest);
    }

private:
    using ints = typename Lanes::ints;
    using floats = typename Lanes::floats;
    using special = special_values<Lanes, Window>;
    static constexpr int width = Lanes::width;
    static constexpr int per_word = value_layout<Window>::values_per_word;
    static constexpr int square_columns = width * per_word;

    /// Collects words that hold a value with all bits of the exponent set.
    struct search {
        ints words = Lanes::splat(0);
        std::uint32_t rest = 0;  // of values outside of vectors

        KVQ_INLINE void look_at(ints w) { words = Lanes::bit_or(words, special::marks(w)); }
        KVQ_INLINE void look_at(std::uint32_t word) { rest |= special::mark(word); }
    };
    /// Rounds and stores one value.
    static KVQ_INLINE void put(std::byte* to, T x, search& found) {
        const Window value(x);
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

    void keys(int tokens, int channels, search& all_found) const {
        const int whole = channels / square_columns * square_columns, end = at_ + tokens;
        const T* from = from_;
        search found;  // a copy: what is stored cannot change it
        for (int t = at_; t < end;) {
            const int in_tile = t % tile_layout::tile_rows;
            const int height =
                detail::smaller(tile_layout::tile_rows, layout_.tiles.rows.padded_size() - (t - in_tile));
            if (end - t >= width && height - in_tile >= width) {
                for (int c = 0; c < whole; c += square_columns) square(from + c, t, c, height, found);
                for (int i = 0; i < width; ++i, ++t, from += stride_)
                    if (whole < channels) row(from, t, whole, channels, height, found);
            } else {
                row(from, t++, 0, channels, height, found);
                from += stride_;
            }
        }
        all_found = found;
    }

    /// Words of `width` tokens and square_columns columns.
    KVQ_INLINE void square(const T* from, int t, int c, int height, search& found) const {
        ints words[width];
        if constexpr (std::same_as<T, Window>) {
            KVQ_UNROLL
            for (int i = 0; i < width; ++i)
                words[i] = Lanes::load(reinterpret_cast<const std::byte*>(from + i * stride_));
        } else {
            alignas(64) Window rounded[width][square_columns];
            for (int i = 0; i < width; ++i)
                for (int part = 0; part < square_columns; part += width)
                    Lanes::template store_values<Window>(reinterpret_cast<std::byte*>(rounded[i] + part),
                                                         Lanes::load_floats(from + i * stride_ + part));
            KVQ_UNROLL
            for (int i = 0; i < width; ++i)
                words[i] = Lanes::load(reinterpret_cast<const std::byte*>(rounded[i]));
        }
        KVQ_UNROLL
        for (int i = 0; i < width; ++i) found.look_at(words[i]);
        Lanes::transpose(words);
        std::byte* const to = to_ + 4 * layout_.tiles.word(t, (channel_ + c) / per_word);
        KVQ_UNROLL
        for (int i = 0; i < width; ++i) Lanes::store(to + i * height * 4, words[i]);
    }

    /// Columns from c on of one token, word by word: they lie a tile's height apart.
    void row(const T* from, int t, int c, int channels, int height, search& found) const {
        std::byte* to = to_ + 4 * layout_.tiles.word(t, (channel_ + c) / per_word);
        if constexpr (std::same_as<T, Window>)
            for (; c + per_word <= channels; c += per_word, to += 4 * height) put_word(to, from + c, found);
        else
            for (; c + width <= channels; c += width) {
                alignas(64) Window some[width];
                Lanes::template store_values<Window>(reinterpret_cast<std::byte*>(some),
                                                     Lanes::load_floats(from + c));
                for (int i = 0; i < width; i += per_word, to += 4 * height) put_word(to, some + i, found);
            }
        for (; c < channels; ++c) {
            put(to + c % per_word * static_cast<int>(sizeof(Window)), from[c], found);
            if (c % per_word == per_word - 1) to += 4 * height;
        }
    }

    void values(int tokens, int channels, search& all_found) const {
        const std::ptrdiff_t stride = stride_;
        const int end = at_ + tokens;
        search found;  // a copy: what is stored cannot change it
        for (int tile = 0; tile < channels; tile += tile_layout::tile_rows) {
            const int rows = detail::smaller(tile_layout::tile_rows, channels - tile);
            std::byte* const first = to_ + 4 * layout_.tiles.word(channel_ + tile, 0);
            const std::ptrdiff_t step = layout_.tiles.vector_bytes(channel_ + tile);
            const T* from = from_ + tile;
            for (int t = at_; t < end;) {
                std::byte* const to = first + t / per_word * step;
                const int count = per_word == 2 && t % 2 == 0 && t + 1 < end ? 2 : 1;
                int r = 0;
                if (count == per_word)
                    for (; r + width <= rows; r += width)
                        Lanes::store(to + 4 * r, words(from + r, stride, found));
                else
                    for (; r + width <= rows; r += width)
                        Lanes::store(to + 4 * r, half_words(from + r, t % 2, to + 4 * r, found));
                for (; r < rows; ++r)
                    for (int i = 0; i < count; ++i)
                        put(to + 4 * r + static_cast<int>(sizeof(Window)) * ((t + i) % per_word),
                            from[i * stride + r], found);
                t += count;
                from += count * stride;
            }
        }
        all_found = found;
    }

    /// The words of `width` channels: one token, or two in 16 bits.
    static KVQ_INLINE ints words(const T* from, std::ptrdiff_t stride, search& found) {
        ints all;
        if constexpr (per_word == 2)
            all = Lanes::bit_or(bits(from), Lanes::template shift_left<16>(bits(from + stride)));
        else
            all = Lanes::load(reinterpret_cast<const std::byte*>(from));
        found.look_at(all);
        return all;
    }
    /// The words of `width` channels with one half replaced by a token.
    static KVQ_INLINE ints half_words(const T* from, int half, const std::byte* old, search& found) {
        if constexpr (per_word == 2) {
            const ints now = Lanes::load(old), one = bits(from);
            found.look_at(one);
            return half == 0 ? Lanes::bit_or(one, Lanes::bit_and(now, Lanes::splat(-65536)))
                             : Lanes::bit_or(Lanes::bit_and(now, Lanes::splat(65535)),
                                             Lanes::template shift_left<16>(one));
        } else {
            return words(from, 0, found);
        }
    }
    static KVQ_INLINE ints bits(const T* from) {
        if constexpr (std::same_as<T, Window>)
            return Lanes::load_halfwords(reinterpret_cast<const std::byte*>(from));
        else
            return Lanes::template half_bits<Window>(Lanes::load_floats(from));
    }

    const tensor role_;
    const value_layout<Window> layout_;
    std::byte* to_;
    const T* from_;
    std::ptrdiff_t stride_;
    int at_, channel_;
};

/// Writes `count` rows of any type, `stride` values apart, as tokens from `at` on; returns how many of the written values are not finite.
/// Backend: has lanes and load_floats<P>.
template <class Backend, float_format Window>
std::uint32_t write_tokens(const block_shape& shape, std::byte* block, float_type type, const void* tokens,
                           std::ptrdiff_t stride, int count, int at) {
    using lanes = typename Backend::lanes;
    const auto writes_all = [&]<class T>(const T* from) {
        return !token_writer<lanes, Window, T>(shape, block, from, stride, at, 0).run(count, shape.dim);
    };
    if (type == float_type_of<Window> && writes_all(static_cast<const Window*>(tokens))) return 0;
    if (type == float_type::fp32 && !std::same_as<Window, float> &&
        writes_all(static_cast<const float*>(tokens)))
        return 0;
    // Some channels of the tokens of a tile at a time.
    constexpr int tile = tile_layout::tile_rows, most = 128;
    alignas(64) float values[tile][most];
    std::uint32_t not_finite = 0;
    for (int t = 0, n; t < count; t += n) {
        n = detail::smaller(tile - (at + t) % tile, count - t);
        for (int c = 0, channels; c < shape.dim; c += channels) {
            channels = detail::smaller(most, shape.dim - c);
            for (int i = 0; i < n; ++i)
                detail::visit_float_type(type, [&]<class T>(T) {
                    const T* const row = static_cast<const T*>(tokens) + (t + i) * stride + c;
                    Backend::template load_floats<T>(reinterpret_cast<const std::byte*>(row), channels,
                                                     values[i]);
                });
            if (token_writer<lanes, Window, float>(shape, block, values[0], most, at + t, c).run(n, channels))
                for (int i = 0; i < n; ++i)
                    for (int k = 0; k < channels; ++k)
                        not_finite += !detail::is_finite(static_cast<float>(Window(values[i][k])));
        }
    }
    return not_finite;
}

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
