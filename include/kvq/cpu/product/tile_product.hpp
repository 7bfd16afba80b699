// Products of codes with many operands at once, on architectures that multiply tiles of bytes (AMX): the
// integer sums of code_product.hpp, up to 16 operands to an instruction.
//
//   C[byte of query][row] = sum over columns of byte * code        tiles of 16 query bytes x 64 columns by 64
//                                                                  columns x 16 rows
//
// A step takes 64 columns of one tile of the block's layout (32 rows, two halves of 16), and registers hold
// the sums of 32 bytes of queries. If that is all, a step's codes are unpacked to bytes in the workspace
// while steps before it are multiplied, so that loads of tiles do not wait for stores. (Codes of 8 bits are
// copied as well: tile loads from the block wait longer for memory than a copy takes.) For more queries, all
// steps of four tiles of the block are unpacked, and multiplied with 32 bytes of queries after the other,
// which are folded just before. Sums become floats while tiles multiply the next ones.
// Contract: the same integers as in registers, hence the same bits. Every code is unpacked once
// for all operands.
#pragma once

#include <utility>

#include "code_sums.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Configures the tile registers for n operands during its lifetime. Attention has one for all products of a
/// task, since the configuration takes as long as a product of a few tiles.
template <class Lanes, class Backend>
class tile_session {
public:
    explicit tile_session(int) {}
    tile_session(const tile_session&) = delete;
    tile_session& operator=(const tile_session&) = delete;
};

template <has_tiles Lanes, class Backend>
class tile_session<Lanes, Backend> {
public:
    explicit tile_session(int n) : lines_(n * query_bytes_in_tiles<Lanes, Backend>(n)) {
        if (lines_ == 0) return;
        const bool several = lines_ > 2 * tile_lines;  // the last ones load whole tiles, too
        before_ = tiles::begin(detail::smaller(lines_, tile_lines),
                               several ? tile_lines : detail::larger(lines_ - tile_lines, 1));
    }
    ~tile_session() {
        if (lines_ > 0) tiles::end(before_);
    }
    tile_session(const tile_session&) = delete;
    tile_session& operator=(const tile_session&) = delete;

private:
    using tiles = typename Lanes::architecture::tiles;

    int lines_;
    typename tiles::shapes before_;
};

/// The workspace of products in tiles, and its sizes.
struct tile_space {
    static constexpr int half_rows = 16;
    static constexpr int quad_bytes = 4 * half_rows;              // of a half
    static constexpr int half_bytes = tile_columns * half_rows;   // of a step
    static constexpr int sum_bytes = 4 * half_rows * tile_lines;  // of a half and a query block
    static constexpr int ahead = 2, ring = 4;  // steps unpacked in advance; steps in memory
    static constexpr int most_tiles = 4;       // of rows, whose steps are unpacked at once for many operands

    static constexpr std::size_t bytes(const fold_layout& layout) noexcept {
        if (layout.tile_query_bytes == 0) return 0;
        const auto steps =
            static_cast<std::size_t>(layout.several() ? most_tiles * layout.tile_steps() : ring);
        return 8 * std::size_t{sum_bytes} + 2 * std::size_t{half_bytes} * steps +
               detail::round_up(steps * sizeof(std::int32_t), std::size_t{64});
    }
    /// place: 0 or 1.
    static std::byte* sums(std::byte* space, int place) noexcept { return space + place * 4 * sum_bytes; }
    static std::byte* codes(std::byte* space, int step) noexcept {
        return space + 8 * sum_bytes + step * 2 * half_bytes;
    }
    /// How many steps every group of columns has, where `steps` are unpacked at once.
    static std::int32_t* parts(std::byte* space, int steps) noexcept {
        return reinterpret_cast<std::int32_t*>(codes(space, steps));
    }
};

/// A step: a tile of the block's rows and 64 columns of one of their groups.
struct tile_step {
    int row_group = 0;
    int slot = 0;         ///< first row slot of the tile
    int height = 0;       ///< slots
    int row = 0;          ///< first row
    int rows = 0;         ///< from `row` to the end of the group
    int group = 0;        ///< of columns
    int part = 0;         ///< index in the group's columns
    int parts = 0;        ///< number of parts of the group
    int column_tile = 0;  ///< counted over all groups

    /// parts_of(g): steps of column group g.
    template <class Parts>
    tile_step(const grouped_axis& axis, const Parts& parts_of) noexcept : parts(parts_of(0)) {
        enter(axis, 0, 0);
    }
    bool exists(const grouped_axis& axis) const noexcept { return row_group < axis.groups(); }
    template <class Parts>
    void advance(const grouped_axis& axis, int groups, const Parts& parts_of) noexcept {
        ++column_tile;
        if (++part < parts) return;
        part = 0;
        if (++group < groups) {
            parts = parts_of(group);
            return;
        }
        group = column_tile = 0;
        if (groups > 1) parts = parts_of(0);
        const int after = slot - axis.group_begin(row_group) + tile_layout::tile_rows;
        if (after < axis.group_slots(row_group))
            enter(axis, row_group, after);
        else
            enter(axis, row_group + 1, 0);
    }

private:
    void enter(const grouped_axis& axis, int g, int in_group) noexcept {
        row_group = g;
        if (!exists(axis)) return;
        slot = axis.group_begin(g) + in_group;
        height = detail::smaller(tile_layout::tile_rows, axis.group_slots(g) - in_group);
        row = g * axis.group + in_group;
        rows = axis.group_size(g) - in_group;
    }
};

template <class Lanes, int Bits, int Raise, bool Partial, class Codes, int... Quads>
KVQ_INLINE void unpack_quads(const std::byte* const* planes, std::ptrdiff_t vector_bytes, int from, int to,
                             std::ptrdiff_t offset, int slot_count, std::byte* out, const Codes& meant,
                             std::integer_sequence<int, Quads...>) {
    ((Quads >= from && Quads < to ? Lanes::store(out + Quads * tile_space::quad_bytes,
                                                 meant(unpack_quad<Lanes, Bits, Quads, Partial, Raise>(
                                                     planes, vector_bytes, offset, slot_count)))
                                  : void()),
     ...);
}

/// A whole step of whole vectors: 64 columns of 32 rows. planes: at its first quad.
template <class Lanes, int Bits, int Raise, class Codes>
KVQ_INLINE void unpack_step(const std::byte* const* planes, std::ptrdiff_t vector_bytes, std::ptrdiff_t ahead,
                            std::ptrdiff_t lower_ahead, std::byte* out, const Codes& meant) {
    using P = code_planes<Bits>;
    using all = std::make_integer_sequence<int, P::quads_per_step>;
    constexpr int vectors = tile_layout::tile_rows / Lanes::width, quads = P::quads_per_step;
    KVQ_UNROLL
    for (int s = 0; s < tile_columns / 4 / quads; ++s) {
        const std::byte* at[P::count];
        for (int p = 0; p < P::count; ++p)
            at[p] = planes[p] + s * (quads / P::quads_per_word(p)) * vector_bytes;
        fetch_ahead<Lanes, Bits, vectors>(at, vector_bytes, ahead, lower_ahead);
        KVQ_UNROLL
        for (int v = 0; v < vectors; ++v) {
            const int row = v * Lanes::width;
            unpack_quads<Lanes, Bits, Raise, false>(
                at, vector_bytes, 0, quads, row * 4, Lanes::width,
                out + row / tile_space::half_rows * tile_space::half_bytes + row % tile_space::half_rows * 4 +
                    s * quads * tile_space::quad_bytes,
                meant, all{});
        }
    }
}

/// Quads [from, to) of a part's columns, times 2^Raise; quad `from` goes to `out`. Tiles are multiplied
/// whole: bytes beyond the last quad are multiplied with zeros of the operands, and sums beyond the last row
/// are not read.
template <class Lanes, int Bits, int Raise, class Codes = plain_codes<Lanes>>
void unpack_codes(const code_part& part, int from, int to, std::byte* out) {
    using P = code_planes<Bits>;
    using all = std::make_integer_sequence<int, P::quads_per_step>;
    constexpr int vectors = tile_layout::tile_rows / Lanes::width, in_step = P::quads_per_step;
    const std::byte* planes[P::count];
    const int first = from / in_step;
    for (int p = 0; p < P::count; ++p)
        planes[p] = part.planes[p] + first * (in_step / P::quads_per_word(p)) * part.vector_bytes;
    const std::ptrdiff_t vector_bytes = part.vector_bytes, ahead = part.ahead;
    const int slot_count = part.slot_count;
    const Codes meant(part.entries);
    if (slot_count == tile_layout::tile_rows && from == first * in_step && to - from == tile_columns / 4)
        return unpack_step<Lanes, Bits, Raise>(planes, vector_bytes, ahead, part.lower_ahead, out, meant);
    out -= (from - first * in_step) * tile_space::quad_bytes;
    const auto place = [&](int v) {
        const int row = v * Lanes::width;
        return out + row / tile_space::half_rows * tile_space::half_bytes + row % tile_space::half_rows * 4;
    };
    for (int quad = first * in_step; quad < to; quad += in_step) {
        if (quad >= from && quad + in_step <= to && slot_count == tile_layout::tile_rows) {
            fetch_ahead<Lanes, Bits, vectors>(planes, vector_bytes, ahead, part.lower_ahead);
            KVQ_UNROLL
            for (int v = 0; v < vectors; ++v)
                unpack_quads<Lanes, Bits, Raise, false>(planes, vector_bytes, 0, in_step,
                                                        v * Lanes::width * 4, Lanes::width, place(v), meant,
                                                        all{});
        } else {
            for (int v = 0; v * Lanes::width < slot_count; ++v)
                unpack_quads<Lanes, Bits, Raise, (Lanes::width > 4)>(
                    planes, vector_bytes, from - quad, to - quad, v * Lanes::width * 4,
                    detail::smaller(slot_count - v * Lanes::width, Lanes::width), place(v), meant, all{});
        }
        for (int p = 0; p < P::count; ++p) planes[p] += (in_step / P::quads_per_word(p)) * vector_bytes;
        out += in_step * tile_space::quad_bytes;
    }
}

/// The codes of a step: words of four columns of 16 rows, quad_bytes apart, and those of the other half.
struct step_codes {
    const std::byte* at;
    std::ptrdiff_t quad_bytes = tile_space::quad_bytes, half_bytes = tile_space::half_bytes;

    step_codes operator+(int steps) const noexcept {
        return {at + steps * 2 * tile_space::half_bytes, quad_bytes, half_bytes};
    }
};

/// Addresses of the bytes of operands (fold_layout), and the number of their tile rows.
struct tile_vectors {
    const std::byte* begin;
    std::ptrdiff_t set_bytes;    ///< from the operands of one row group to the next; 0: the same for all
    std::ptrdiff_t block_bytes;  ///< from one query block to the next
    int lines;
    int queries, together;  ///< operands; those of two blocks
    int steps;              ///< of a tile of rows

    tile_vectors(const fold_layout& layout, std::byte* memory) noexcept
        : begin(reinterpret_cast<const std::byte*>(layout.words(memory))),
          set_bytes(layout.sets > 1 ? 4 * static_cast<std::ptrdiff_t>(layout.set_words) * layout.n : 0),
          block_bytes(4 * static_cast<std::ptrdiff_t>(layout.set_words) * layout.tile_queries()),
          lines(layout.n * layout.tile_query_bytes),
          queries(layout.n),
          together(2 * layout.tile_queries()),
          steps(layout.tile_steps()) {}

    /// The i-th two query blocks.
    tile_vectors pair(int i) const noexcept {
        tile_vectors v = *this;
        v.begin += 2 * i * block_bytes;
        v.lines = detail::smaller(lines - 2 * i * tile_lines, 2 * tile_lines);
        v.queries = detail::smaller(queries - i * together, together);
        return v;
    }
    int pairs() const noexcept { return detail::ceil_div(queries, together); }
};

template <class Tiles>
KVQ_INLINE void multiply_step(const step_codes& codes, const tile_step& step, const tile_vectors& x) {
    const bool two_halves = step.height > tile_space::half_rows;
    const int first = detail::smaller(x.lines, tile_lines), second = x.lines - first;
    if (step.part == 0) {
        Tiles::template zero<0>();
        Tiles::template zero<1>();
        if (second > 0) {
            Tiles::template zero<2>();
            Tiles::template zero<3>();
        }
    }
    const std::byte* const from = x.begin + step.row_group * x.set_bytes;
    Tiles::template load<4>(from + step.column_tile * first * tile_columns, tile_columns);
    Tiles::template load<6>(codes.at, codes.quad_bytes);
    Tiles::template multiply<0, 4, 6>();
    if (two_halves) {
        Tiles::template load<7>(codes.at + codes.half_bytes, codes.quad_bytes);
        Tiles::template multiply<1, 4, 7>();
    }
    if (second > 0) {
        Tiles::template load<5>(from + x.block_bytes + step.column_tile * second * tile_columns,
                                tile_columns);
        Tiles::template multiply<2, 5, 6>();
        if (two_halves) Tiles::template multiply<3, 5, 7>();
    }
}

/// Sums of a tile's rows: [query block][half][line][16 rows].
template <class Tiles>
KVQ_INLINE void store_tile_sums(std::byte* to, const tile_step& step, const tile_vectors& x) {
    const bool two_halves = step.height > tile_space::half_rows, two_blocks = x.lines > tile_lines;
    Tiles::template store<0>(to, tile_space::quad_bytes);
    if (two_halves) Tiles::template store<1>(to + tile_space::sum_bytes, tile_space::quad_bytes);
    if (two_blocks) Tiles::template store<2>(to + 2 * tile_space::sum_bytes, tile_space::quad_bytes);
    if (two_blocks && two_halves)
        Tiles::template store<3>(to + 3 * tile_space::sum_bytes, tile_space::quad_bytes);
}

/// All steps of a block. Product:
///   column_groups(), column_tiles(group)      steps of a tile of rows
///   unpack(step, out)                         the step's codes; steps come in their order
///   codes_of_tile(step)                       the codes of all steps of a tile of rows, if they lie in the
///                                             block as bytes; else null
///   fold(step, first, queries)                where operands are many: folds `queries` of them, from `first`
///                                             on, for the row group of the step, unless that is done
///   finish(step, sums, first, queries)        sums over all columns of the step's group, of `queries`
///                                             operands from `first` on
template <class Tiles, class Product>
void multiply_in_tiles(Product product, const grouped_axis& rows, const tile_vectors& x, std::byte* space) {
    const int groups = product.column_groups();
    const auto parts = [&](int g) { return product.column_tiles(g); };
    tile_step next(rows, parts), last = next;
    // Sums become floats while tiles multiply the next ones: they have two places in turn.
    int last_first = 0, last_queries = 0, place = 0;
    const auto finish_last = [&] {
        if (last_queries > 0)
            product.finish(last, tile_space::sums(space, 1 - place), last_first, last_queries);
    };
    const auto multiply = [&](const step_codes& codes, const tile_step& step, const tile_vectors& of,
                              int first) {
        multiply_step<Tiles>(codes, step, of);
        if (step.part + 1 < step.parts) return;
        finish_last();
        store_tile_sums<Tiles>(tile_space::sums(space, place), step, of);
        place = 1 - place;
        last = step;
        last_first = first;
        last_queries = of.queries;
    };
    if (x.pairs() > 1) {
        // Some tiles of rows for every two blocks of operands, which then are in the nearest cache.
        std::int32_t* const parts_of = tile_space::parts(space, tile_space::most_tiles * x.steps);
        while (next.exists(rows)) {
            tile_step begin[tile_space::most_tiles] = {next, next, next, next};
            step_codes codes[tile_space::most_tiles] = {};
            int tiles = 0;
            for (; tiles < tile_space::most_tiles && next.exists(rows); ++tiles) {
                begin[tiles] = next;
                codes[tiles] = {product.codes_of_tile(next), 4 * next.height, 4 * tile_space::half_rows};
                std::byte* const unpacked = tile_space::codes(space, tiles * x.steps);
                const bool in_place = codes[tiles].at != nullptr;
                if (!in_place) codes[tiles] = {unpacked};
                while (next.exists(rows) && next.slot == begin[tiles].slot) {
                    if (!in_place)
                        product.unpack(next, unpacked + next.column_tile * 2 * tile_space::half_bytes);
                    parts_of[next.group] = next.parts;
                    next.advance(rows, groups, parts);
                }
            }
            for (int pair = 0; pair < x.pairs(); ++pair) {
                const tile_vectors of = x.pair(pair);
                for (int tile = 0; tile < tiles; ++tile) {
                    tile_step now = begin[tile];
                    if (now.slot == rows.group_begin(now.row_group))
                        product.fold(now, pair * x.together, of.queries);
                    for (now.group = 0; now.group < groups; ++now.group) {
                        now.parts = parts_of[now.group];
                        for (now.part = 0; now.part < now.parts; ++now.part, ++now.column_tile)
                            multiply(codes[tile] + now.column_tile, now, of, pair * x.together);
                    }
                }
            }
        }
        return finish_last();
    }
    tile_step now = next;
    int unpacked = 0;
    const auto unpack_next = [&] {
        if (!next.exists(rows)) return;
        product.unpack(next, tile_space::codes(space, unpacked++ % tile_space::ring));
        next.advance(rows, groups, parts);
    };
    for (int i = 0; i < tile_space::ahead; ++i) unpack_next();
    for (int i = 0; now.exists(rows); ++i) {
        unpack_next();
        multiply({tile_space::codes(space, i % tile_space::ring)}, now, x, 0);
        now.advance(rows, groups, parts);
    }
    finish_last();
}

/// Sums of 32 rows, if these fill vectors.
template <vector_form Form, class Lanes, bool Scale, bool Bias>
void finish_whole_tile(const std::byte* sums, int n, const code_target& to) {
    constexpr int bytes_each = Form == vector_form::byte ? 1 : 2, in_block = tile_lines / bytes_each;
    const row_finish<Form, Lanes, true, Scale, Bias, 2> rows(to);
    for (int first = 0; first < n; first += in_block, sums += 2 * tile_space::sum_bytes) {
        const std::byte* at = sums;
        for (int i = first; i < detail::smaller(first + in_block, n); ++i) {
            const typename Lanes::ints high[2] = {Lanes::load(at), Lanes::load(at + tile_space::sum_bytes)};
            at += tile_space::quad_bytes;
            typename Lanes::ints low[2] = {high[0], high[1]};
            if constexpr (bytes_each == 2) {
                low[0] = Lanes::load(at);
                low[1] = Lanes::load(at + tile_space::sum_bytes);
                at += tile_space::quad_bytes;
            }
            rows.write(i, high, low);
        }
    }
}

/// The n operands' integer sums of a row tile, as floats. to: of the tile's first row and the first operand.
template <vector_form Form, class Lanes>
void finish_tile(const std::byte* sums, int height, int n, const code_target& to) {
    constexpr int bytes_each = Form == vector_form::byte ? 1 : 2, in_block = tile_lines / bytes_each;
    if constexpr (Lanes::width == tile_space::half_rows)
        if (height == tile_layout::tile_rows && to.rows >= height && (to.row_scale || !to.row_bias)) {
            if (to.row_bias) return finish_whole_tile<Form, Lanes, true, true>(sums, n, to);
            if (to.row_scale) return finish_whole_tile<Form, Lanes, true, false>(sums, n, to);
            return finish_whole_tile<Form, Lanes, false, false>(sums, n, to);
        }
    for (int part = 0; part < height;) {
        const bool several = height - part >= Lanes::row_vectors * Lanes::width;
        const auto finish = [&](int first, auto vectors, auto queries) {
            constexpr int V = decltype(vectors)::value, Q = decltype(queries)::value;
            code_sums<Lanes, V, Q> s;
            KVQ_UNROLL
            for (int i = 0; i < Q; ++i) {
                const int block = (first + i) / in_block, first_byte = (first + i) % in_block * bytes_each;
                KVQ_UNROLL
                for (int v = 0; v < V; ++v) {
                    const int row = part + v * Lanes::width, half = row / tile_space::half_rows;
                    const std::byte* const at =
                        sums + (2 * block + half) * tile_space::sum_bytes +
                        (first_byte * tile_space::half_rows + row % tile_space::half_rows) * 4;
                    s.high[i][v] = Lanes::load(at);
                    s.low[i][v] =
                        bytes_each == 2 ? Lanes::load(at + 4 * tile_space::half_rows) : Lanes::splat(0);
                }
            }
            finish_sums<Form, Lanes>(
                s, {to.y + first * to.y_stride + part, to.y_stride, to.rows - part,
                    to.row_scale ? to.row_scale + part : nullptr, to.row_bias ? to.row_bias + part : nullptr,
                    to.scalars + first, to.add});
        };
        for (int first = 0; first < n;) {
            const int queries = next_query_block(n - first);
            with_queries(queries, [&](auto q) {
                if (several)
                    finish(first, std::integral_constant<int, Lanes::row_vectors>{}, q);
                else
                    finish(first, std::integral_constant<int, 1>{}, q);
            });
            first += queries;
        }
        part += several ? Lanes::row_vectors * Lanes::width : Lanes::width;
    }
}

}}}  // namespace kvq::kernels
