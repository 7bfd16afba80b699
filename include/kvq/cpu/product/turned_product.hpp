// y = X^T x on the codes of a block of keys: weights times the values of a latent layer, which are the first
// channels of its keys (format/latent.hpp).
//
//   keys    x^[t][c] = row_scale[t] (col_scale[c] (code - zero) + col_bias[c]) + row_bias[t] col_scale[c]
//   values  the same with rows and columns, and their parameters, in each other's places
//
// A word of keys holds four channels of a token, and one of values four tokens of a channel. So codes are
// unpacked, a tile of tokens and one of channels at a time, and 4 x 4 bytes turned in registers: into a block
// of values with codes of 8 bits in the workspace, which code_product multiplies. Narrow codes of several
// widths are raised to the widest one (segment_product.hpp). 16-bit values are turned in the same way, two to
// a word.
// Contract: that of code_product.hpp. Every code is unpacked once for all operands. Nothing is dequantized,
// so values of schemes with a transform are those of transformed keys: the caller restores outputs.
#pragma once

#include <cstring>
#include <utility>

#include "../../pack/value_layout.hpp"
#include "segment_product.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Turns `quads` quads of `height` rows, as unpack_codes writes them, into words of four rows: to + 4 c for
/// column c, word_bytes from four rows to the next.
template <class Lanes>
void turn_codes(const std::byte* from, int height, int quads, std::byte* to, std::ptrdiff_t word_bytes) {
    alignas(16) static constexpr std::uint8_t columns_first[16] = {0, 4, 8,  12, 1, 5, 9,  13,
                                                                   2, 6, 10, 14, 3, 7, 11, 15};
    const auto order = Lanes::sixteen_bytes(columns_first);
    for (int row = 0; row < height; row += Lanes::width) {
        const std::byte* const half =
            from + row / tile_space::half_rows * tile_space::half_bytes + row % tile_space::half_rows * 4;
        const int words = detail::smaller(height - row, Lanes::width) / 4;
        std::byte* const first = to + row / 4 * word_bytes;
        for (int q = 0; q < quads; ++q) {
            const auto turned = [&](int quad) KVQ_INLINE_LAMBDA {
                return Lanes::lookup_bytes(Lanes::load(half + quad * tile_space::quad_bytes), order);
            };
            if constexpr (requires(typename Lanes::ints v[4]) { Lanes::store_lanes(first, word_bytes, v); }) {
                if (words == Lanes::width / 4 && quads - q >= 4) {
                    const typename Lanes::ints four[4] = {turned(q), turned(q + 1), turned(q + 2),
                                                          turned(q + 3)};
                    Lanes::store_lanes(first + 16 * q, word_bytes, four);
                    q += 3;
                    continue;
                }
            }
            alignas(64) std::byte room[4 * Lanes::width];
            Lanes::store(room, turned(q));
            for (int w = 0; w < words; ++w) std::memcpy(first + w * word_bytes + 16 * q, room + 16 * w, 16);
        }
    }
}

/// Turns `words` words of two columns, `height` words apart, of `rows` rows, a multiple of two, into words of
/// two rows: to + 4 c for column c, word_bytes from two rows to the next.
template <class Lanes>
void turn_values(const std::byte* from, int height, int rows, int words, std::byte* to,
                 std::ptrdiff_t word_bytes) {
    alignas(16) static constexpr std::uint8_t columns_first[16] = {0, 1, 4,  5,  2,  3,  6,  7,
                                                                   8, 9, 12, 13, 10, 11, 14, 15};
    using ints = typename Lanes::ints;
    const auto order = Lanes::sixteen_bytes(columns_first);
    for (int row = 0; row < rows; row += Lanes::width) {
        const int left = detail::smaller(rows - row, Lanes::width);
        std::byte* const first = to + row / 2 * word_bytes;
        // Of four rows: two words of the first two, and two of the others.
        const auto turned = [&](int w) KVQ_INLINE_LAMBDA {
            const std::byte* const at = from + (w * height + row) * 4;
            return Lanes::lookup_bytes(left == Lanes::width ? Lanes::load(at) : Lanes::load(at, left), order);
        };
        for (int w = 0; w < words; ++w) {
            if constexpr (requires(ints v[4], ints(&pair)[2]) {
                              Lanes::store_lanes(first, word_bytes, v);
                              Lanes::split_lanes(pair);
                          }) {
                if (left == Lanes::width && words - w >= 8) {
                    ints first_two[4], last_two[4];
                    KVQ_UNROLL
                    for (int i = 0; i < 4; ++i) {
                        ints pair[2] = {turned(w + 2 * i), turned(w + 2 * i + 1)};
                        Lanes::split_lanes(pair);
                        first_two[i] = pair[0];
                        last_two[i] = pair[1];
                    }
                    Lanes::store_lanes(first + 8 * w, 2 * word_bytes, first_two);
                    Lanes::store_lanes(first + word_bytes + 8 * w, 2 * word_bytes, last_two);
                    w += 7;
                    continue;
                }
            }
            alignas(64) std::byte room[4 * Lanes::width];
            Lanes::store(room, turned(w));
            for (int i = 0; i < left / 2; ++i) std::memcpy(first + i * word_bytes + 8 * w, room + 8 * i, 8);
        }
    }
}

/// Calls visit(first slot, slots) for every tile of an axis of rows.
template <class F>
void for_each_tile(const grouped_axis& axis, const F& visit) {
    for (int g = 0; g < axis.groups(); ++g)
        for (int in_group = 0; in_group < axis.group_slots(g); in_group += tile_layout::tile_rows)
            visit(axis.group_begin(g) + in_group,
                  detail::smaller(tile_layout::tile_rows, axis.group_slots(g) - in_group));
}

/// Common plan of products of n operands with blocks of keys of one shape. Widths: of the codes, the widest
/// first.
template <int... Widths>
struct turned_plan {
    struct widths {
        static constexpr int count = sizeof...(Widths);
        static constexpr int values[count] = {Widths...};
    };
    tile_layout keys;     ///< of the codes, but for their words
    code_plan<8> values;  ///< of the turned block
    int channel_slots;    ///< of the parameters
    const std::uint8_t* entries;
    code_segment segments[sizeof...(Widths)];

    /// shape: of the values. of: of the keys.
    turned_plan(const product_blocks& of, const block_shape& shape, int n, int tile_query_bytes)
        : keys{{shape.tokens, of.row_group}},
          values(turned_meaning(of.meaning),
                 {{shape.dim, detail::smaller(shape.dim, of.col_group)}, keys.rows}, n, tile_query_bytes,
                 channels_of(of).padded_size()),
          channel_slots(channels_of(of).padded_size()),
          entries(of.meaning.entries) {
        if constexpr (widths::count == 1)
            segments[0] = {0, channel_slots, 0};
        else
            for (int w = 0; w < widths::count; ++w) segments[w] = of.segments[w];
    }

    /// Order of the workspace: that of the product, the turned block, units.
    std::size_t codes_at() const { return values.workspace_bytes(); }
    std::size_t units_at() const {
        return codes_at() + detail::round_up(values.codes.bytes(), std::size_t{64});
    }
    std::size_t workspace_bytes() const {
        return units_at() + (widths::count == 1
                                 ? 0
                                 : detail::round_up(static_cast<std::size_t>(channel_slots) * sizeof(float),
                                                    std::size_t{64}));
    }

private:
    static grouped_axis channels_of(const product_blocks& of) { return {of.source.shape.dim, of.col_group}; }
    static code_meaning turned_meaning(code_meaning m) {
        m.use = {m.use.col_scale, m.use.col_bias, m.use.row_scale, m.use.row_bias};
        m.weights = true;
        m.entries = nullptr;  // turned codes are the entries
        return m;
    }
};

/// The product with turned codes, the same for all widths: kvq::library compiles it once
/// (src/builtin_part.cpp). source: of the keys.
template <class Backend>
void multiply_turned(const code_plan<8>& plan, parameter_source source, const std::byte* codes,
                     const float* x, std::ptrdiff_t x_stride, float* y, std::ptrdiff_t y_stride, bool add,
                     std::byte* workspace) {
    using lanes = typename Backend::lanes;
    std::swap(source.rows, source.columns);
    fold<lanes, Backend>(plan.meaning, plan.fold, source, x, x_stride, workspace + plan.parameter_bytes);
    code_product<lanes, Backend, 8>(plan, source, codes, workspace).run(y, y_stride, add, 0);
}

/// Table: codes of 4 bits that stand for entries of a table.
template <class Backend, bool Table, int... Widths>
class turned_block_product {
public:
    using lanes = typename Backend::lanes;

    turned_block_product(const product_blocks& of, const block_shape& shape, int n)
        : plan_(of, shape, n, query_bytes_in_tiles<lanes, Backend>(n)), source_(of.source) {}

    std::size_t workspace_bytes() const { return plan_.workspace_bytes(); }

    void begin(const block_shape&, block_id, const std::byte*, const float*, std::ptrdiff_t,
               std::byte* workspace) const {
        if constexpr (plan::widths::count > 1)
            write_units<typename plan::widths>(plan_.segments, plan_.channel_slots, units(workspace));
    }
    void finish(const block_shape&, block_id id, const std::byte* block, const float* x,
                std::ptrdiff_t x_stride, int, int, float* y, std::ptrdiff_t y_stride, bool add,
                std::ptrdiff_t, std::byte* workspace) const {
        std::byte* const codes = workspace + plan_.codes_at();
        turn(block, codes);
        multiply_turned<Backend>(plan_.values,
                                 source_.of(id, block, plan::widths::count > 1 ? units(workspace) : nullptr),
                                 codes, x, x_stride, y, y_stride, add, workspace);
    }

private:
    using plan = turned_plan<Widths...>;

    float* units(std::byte* workspace) const {
        return reinterpret_cast<float*>(workspace + plan_.units_at());
    }
    void turn(const std::byte* block, std::byte* to) const {
        alignas(64) std::byte unpacked[2 * tile_space::half_bytes];
        // Channels without codes.
        if constexpr (plan::widths::count > 1) std::memset(unpacked, 0, sizeof unpacked);
        const auto row_bytes = 4 * static_cast<std::ptrdiff_t>(plan_.values.codes.tiles.words_per_row);
        for_each_tile(plan_.keys.rows, [&](int token, int tokens) {
            for_each_tile(plan_.values.codes.rows(), [&](int channel, int channels) {
                unpack<0>(block, token, tokens, channel / 4, (channel + channels) / 4, unpacked);
                turn_codes<lanes>(unpacked, tokens, channels / 4, to + channel * row_bytes + token * channels,
                                  4 * channels);
            });
        });
    }
    template <int Width>
    void unpack(const std::byte* block, int token, int tokens, int from, int to, std::byte* out) const {
        constexpr int bits = plan::widths::values[Width], widest = plan::widths::values[0];
        if constexpr (bits > 0)
            unpack_segment<lanes, bits, widest - bits, codes_meant<lanes, Table>>(
                block, plan_.segments[Width], token, tokens, from, to, out, 0, plan_.entries);
        if constexpr (Width + 1 < plan::widths::count) unpack<Width + 1>(block, token, tokens, from, to, out);
    }

    plan plan_;
    parameter_source source_;
};

/// Keys of 16-bit values of type T. Product: of blocks of values (block_product.hpp).
template <class T, class Product>
class turned_value_product {
public:
    using lanes = typename Product::lanes;

    turned_value_product(const product_blocks& of, const block_shape& shape, int n)
        : product_(of, shape, n), dim_(of.source.shape.dim), turned_bytes_(turned_bytes(shape)) {}

    std::size_t workspace_bytes() const { return turned_bytes_ + product_.workspace_bytes(); }

    void begin(const block_shape&, block_id, const std::byte*, const float*, std::ptrdiff_t,
               std::byte*) const {}
    void finish(const block_shape& shape, block_id id, const std::byte* block, const float* x,
                std::ptrdiff_t x_stride, int rows, int cols, float* y, std::ptrdiff_t y_stride, bool add,
                std::ptrdiff_t, std::byte* workspace) const {
        const tile_layout keys = value_layout<T>({tensor::key, shape.tokens, dim_}).tiles,
                          values = value_layout<T>(shape).tiles;
        const auto key_bytes = 4 * static_cast<std::ptrdiff_t>(keys.words_per_row),
                   value_bytes = 4 * static_cast<std::ptrdiff_t>(values.words_per_row);
        // Channels of the last values that no key has.
        if (shape.dim % 4 != 0) std::memset(workspace, 0, turned_bytes(shape));
        for_each_tile(keys.rows, [&](int token, int tokens) {
            if (token >= cols) return;
            // Slots beyond the last two tokens have no words of values.
            const int some = detail::smaller(tokens, 2 * values.words_per_row - token);
            for_each_tile(values.rows, [&](int channel, int channels) {
                const int words = detail::smaller(channels / 2, keys.words_per_row - channel / 2);
                turn_values<lanes>(block + token * key_bytes + channel / 2 * 4 * tokens, tokens, some, words,
                                   workspace + channel * value_bytes + token / 2 * 4 * channels,
                                   4 * channels);
            });
        });
        product_.begin(shape, id, workspace, x, x_stride, workspace + turned_bytes_);
        product_.finish(shape, id, workspace, x, x_stride, rows, cols, y, y_stride, add, 0,
                        workspace + turned_bytes_);
    }

private:
    static std::size_t turned_bytes(const block_shape& shape) {
        return detail::round_up(value_layout<T>(shape).bytes(), std::size_t{64});
    }

    Product product_;
    int dim_;
    std::size_t turned_bytes_;
};

}}}  // namespace kvq::kernels
