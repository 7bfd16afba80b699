// Coding whole blocks on the device, one thread block each: the CPU's bytes.
//
//   lines      tokens or channels, whichever has parameters; each is cut into groups along the other axis
//   word       one 32-bit word of codes is put together by one thread: no atomics, no read-modify-write
//
// A thread block quantizes one block (one head of one page): first all parameters, then all words, from
// values that a source functor returns: of a 16-bit window page (commit) or a page in another scheme
// (requantize), in shared memory where they fit. Blocks whose channels an encoder fits: quantize_grid.cuh.
// Contract: every byte of the block is written and equals what scheme::quantize writes for the same values.
#pragma once

#include "../layout/code_words.cuh"
#include "page_numbers.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Writes the words of a matrix of codes for which wanted(row, first slot of the columns) holds. quad(row,
/// slot): the codes of four columns from that slot on, as the bytes of a word. All threads of a block.
template <int Threads, int Bits, class Wanted, class Quad>
__device__ __forceinline__ void pack_code_words(const code_layout<Bits>& layout, std::byte* to,
                                                const Wanted& wanted, const Quad& quad) {
    using planes = code_planes<Bits>;
    const int words_per_row = layout.tiles.words_per_row;
    const int words = static_cast<int>(layout.bytes() / 4);
    const grouped_axis& rows = layout.rows();
    const bool whole = rows.size % tile_layout::tile_rows == 0 &&
                       (rows.group % tile_layout::tile_rows == 0 || rows.groups() == 1);  // tiles
    for (int w = static_cast<int>(threadIdx.x); w < words; w += Threads) {
        int row = 0, vector = 0;
        bool real = true;
        if (whole) {
            constexpr int height = tile_layout::tile_rows;
            const int tile = w / (height * words_per_row), in_tile = w - tile * (height * words_per_row);
            row = tile * height + in_tile % height;
            vector = in_tile / height;
        } else {
            // slot of the first row of the tile, found from the tile's first word
            const int group = w / (round_up(rows.group, 4) * words_per_row);
            const int in_group = w - group * round_up(rows.group, 4) * words_per_row;
            const int tile = in_group / (tile_layout::tile_rows * words_per_row);
            const int in_tile = in_group - tile * tile_layout::tile_rows * words_per_row;
            const int height =
                smaller(tile_layout::tile_rows, rows.group_slots(group) - tile * tile_layout::tile_rows);
            const int row_in_group = tile * tile_layout::tile_rows + in_tile % height;
            vector = in_tile / height;
            row = group * rows.group + row_in_group;
            real = row_in_group < rows.group_size(group);
        }
        int plane = 0;
        while (plane + 1 < planes::count && vector >= planes::first_vector(plane + 1, layout.quads()))
            ++plane;
        const int width = planes::width(plane), per_word = planes::quads_per_word(plane);
        const int slot = (vector - planes::first_vector(plane, layout.quads())) * per_word * 4;
        if (!wanted(real ? row : -1, slot)) continue;
        std::uint32_t word = 0;
        if (real) {
            const std::uint32_t mask = ((1u << width) - 1u) * 0x01010101u;
            for (int q = 0; q < per_word && slot + 4 * q < layout.cols.padded_size(); ++q)
                word |= ((quad(row, slot + 4 * q) >> planes::shift(plane)) & mask) << (width * q);
        }
        reinterpret_cast<std::uint32_t*>(to)[w] = word;
    }
}

/// Quantizes a block. `value(token, channel)` returns floats. parameters: scratch of one pair (bias, 1 /
/// scale) for every line and group, or null: then they are read from the block. Returns this thread's count
/// of values that are not finite.
template <class S, int Threads, class Source, class Scratch>
__device__ __forceinline__ unsigned quantize_block(const block_shape& s, std::byte* block,
                                                   const Source& value, [[maybe_unused]] Scratch parameters) {
    const int thread = static_cast<int>(threadIdx.x);
    unsigned not_finite = 0;
    if constexpr (full_precision<S>) {
        using T = typename S::value_type;
        const value_layout<T> layout(s);
        constexpr int per_word = value_layout<T>::values_per_word;
        const int words = static_cast<int>(layout.tiles.words());
        const int padded = static_cast<int>(S{}.block_bytes(s) / 4);
        const int rows = s.rows(), cols = s.cols(), row_slots = layout.tiles.rows.padded_size();
        for (int w = thread; w < padded; w += Threads) {
            std::uint32_t word = 0;
            if (w < words) {
                const int tile = w / (tile_layout::tile_rows * layout.tiles.words_per_row);
                const int in_tile = w - tile * tile_layout::tile_rows * layout.tiles.words_per_row;
                const int height = smaller(tile_layout::tile_rows, row_slots - tile * tile_layout::tile_rows);
                const int row = tile * tile_layout::tile_rows + in_tile % height, vector = in_tile / height;
                for (int k = 0; k < per_word; ++k) {
                    const int col = vector * per_word + k;
                    if (row >= rows || col >= cols) continue;
                    const float x = s.role == tensor::key ? value(row, col) : value(col, row);
                    const T rounded = T(x);
                    not_finite += !kvq::detail::is_finite(to_float(rounded));
                    if constexpr (sizeof(T) == 4)
                        word = __float_as_uint(static_cast<float>(rounded));
                    else
                        word |= static_cast<std::uint32_t>(rounded.bits) << (16 * k);
                }
            }
            reinterpret_cast<std::uint32_t*>(block)[w] = word;
        }
    } else {
        constexpr bool scratch = !std::is_same_v<Scratch, std::nullptr_t>;
        const auto layout = typename S::layout_type{}.codes(s);
        const bool on_rows = kvq::detail::on_rows<typename S::granularity_type>(s.role);
        const grouped_axis lines = on_rows ? layout.rows() : layout.cols;
        const grouped_axis cut = on_rows ? layout.cols : layout.rows();
        const auto at = [&](int row, int col) {
            return s.role == tensor::key ? value(row, col) : value(col, row);
        };
        // Padding between and behind the sections, and slots without a line.
        const std::size_t bytes = typename S::layout_type{}.bytes(s);
        for (std::size_t i = layout.bytes() / 4 + static_cast<std::size_t>(thread); i < bytes / 4;
             i += std::size_t{Threads})
            reinterpret_cast<std::uint32_t*>(block)[i] = 0;
        __syncthreads();
        for (int i = thread; i < lines.size * cut.groups(); i += Threads) {
            const int line = i % lines.size, g = i / lines.size;
            value_range range;
            for (int k = 0; k < cut.group_size(g); ++k) {
                const int other = g * cut.group + k;
                const float x = on_rows ? at(line, other) : at(other, line);
                not_finite += !kvq::detail::is_finite(x);
                range.add(x);
            }
            const auto p = fit_range<S>(range.lo, range.hi);
            write_parameters<S>(s, block, g, lines.slot(line), p);
            if constexpr (scratch)
                parameters[i] = {static_cast<float>(p.bias), inverse_scale(static_cast<float>(p.scale))};
        }
        __syncthreads();
        pack_code_words<Threads>(
            layout, block, [](int, int) { return true; },
            [&](int row, int slot) {
                std::uint32_t quad = 0;
                for (int k = 0; k < 4; ++k) {
                    const int col = layout.cols.index(slot + k);
                    if (col < 0) continue;
                    const int g = on_rows ? col / cut.group : row / cut.group;
                    const int line = on_rows ? row : col;
                    float2 p;
                    if constexpr (scratch) {
                        p = parameters[g * lines.size + line];
                    } else {
                        const auto stored = read_parameters<S>(s, block, g, lines.slot(line));
                        p = {static_cast<float>(stored.bias),
                             inverse_scale(static_cast<float>(stored.scale))};
                    }
                    quad |=
                        static_cast<unsigned>(S::levels::template code<S::code_bits>(at(row, col), p.x, p.y))
                        << (8 * k);
                }
                return quad;
            });
    }
    return not_finite;
}

/// Shared memory for blocks of scheme<...>: numbers and pairs of parameters, where they fit.
template <class Pair, tensor Role>
struct composed_memory {
    using S = scheme_of<Role, Pair>;
    static constexpr block_shape shape = shape_of<Role, Pair>;
    static constexpr int lines = [] {
        const auto layout = typename S::layout_type{}.codes(shape);
        return kvq::detail::on_rows<typename S::granularity_type>(Role)
                   ? layout.rows().size * layout.cols.groups()
                   : layout.cols.size * layout.rows().groups();
    }();
    static constexpr int parameters = 4 * shape.dim * numbers_stride(shape.tokens);
    static constexpr bool fits = parameters + 8 * lines <= quantizer_budget<Pair>;
    static constexpr int bytes = fits ? parameters + 8 * lines : 0;
};

}}}  // namespace kvq::cuda::detail
