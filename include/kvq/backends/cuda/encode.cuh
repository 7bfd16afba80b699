// Coding whole blocks on the device, one thread block each: the CPU's bytes.
//
//   lines      tokens or channels, whichever has parameters; each is cut into groups along the other axis
//   word       one 32-bit word of codes is put together by one thread: no atomics, no read-modify-write
//
// A thread block codes one block (one head of one page): first all parameters, then all words, from values that a source
// functor returns: a 16-bit window page (commit), a page in another scheme (requantize) or a strided tensor.
// Contract: every byte of the block is written and equals what scheme::encode writes for the same values.
#pragma once

#include "block_access.cuh"
#include "chunk.cuh"

namespace kvq::inline v0_1::cuda::detail {

inline constexpr int encode_threads = 256;

/// Codes a block. `value(token, channel)` returns floats. Returns this thread's count of numbers that are not finite.
template <class S, class Source>
__device__ __forceinline__ unsigned encode_block(const block_shape& s, std::byte* block,
                                                 const Source& value) {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    unsigned not_finite = 0;
    if constexpr (full_precision<S>) {
        using T = typename S::value_type;
        const value_layout<T> layout(s);
        constexpr int per_word = value_layout<T>::values_per_word;
        const int words = static_cast<int>(layout.tiles.words());
        const int padded = static_cast<int>(S{}.block_bytes(s) / 4);
        const int rows = s.rows(), cols = s.cols(), row_slots = layout.tiles.rows.slots();
        for (int w = thread; w < padded; w += threads) {
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
                    not_finite += !kvq::detail::is_finite(x);
                    const T rounded = T(x);
                    if constexpr (sizeof(T) == 4)
                        word = __float_as_uint(static_cast<float>(rounded));
                    else
                        word |= static_cast<std::uint32_t>(rounded.bits) << (16 * k);
                }
            }
            reinterpret_cast<std::uint32_t*>(block)[w] = word;
        }
    } else {
        static_assert(!is_grid<S> && !is_mixed<S>,
                      "kvq::cuda: channel_grid and mixed_width are coded on the CPU; the device reads them");
        using P = typename S::parameter;
        using planes = code_planes<S::code_bits>;
        const auto layout = S{}.codes(s);
        const bool on_rows = kvq::detail::on_rows<typename S::granularity_type>(s.role);
        const grouped_axis lines = on_rows ? layout.rows() : layout.cols;
        const grouped_axis cut = on_rows ? layout.cols : layout.rows();
        const auto at = [&](int row, int col) {
            return s.role == tensor::key ? value(row, col) : value(col, row);
        };
        // Padding between and behind the sections, and slots without a line.
        const std::size_t bytes = S{}.block_bytes(s);
        for (std::size_t i = layout.bytes() / 4 + static_cast<std::size_t>(thread); i < bytes / 4;
             i += static_cast<std::size_t>(threads))
            reinterpret_cast<std::uint32_t*>(block)[i] = 0;
        __syncthreads();
        for (int i = thread; i < lines.size * cut.groups(); i += threads) {
            const int line = i % lines.size, g = i / lines.size;
            value_range range;
            for (int k = 0; k < cut.group_size(g); ++k) {
                const int other = g * cut.group + k;
                const float x = on_rows ? at(line, other) : at(other, line);
                not_finite += !kvq::detail::is_finite(x);
                range.add(x);
            }
            S{}.store_parameters(s, block, g, lines.slot(line),
                                 S::levels::template fit<S::code_bits, P>(range.lo, range.hi));
        }
        __syncthreads();
        // Words of codes.
        const int words_per_row = layout.tiles.words_per_row;
        const int words = static_cast<int>(layout.bytes() / 4);
        const grouped_axis& rows = layout.rows();
        for (int w = thread; w < words; w += threads) {
            // slot of the first row of the tile, found from the tile's first word
            const int group = w / (round_up(rows.group, 4) * words_per_row);
            const int in_group = w - group * round_up(rows.group, 4) * words_per_row;
            const int tile = in_group / (tile_layout::tile_rows * words_per_row);
            const int in_tile = in_group - tile * tile_layout::tile_rows * words_per_row;
            const int height =
                smaller(tile_layout::tile_rows, rows.group_slots(group) - tile * tile_layout::tile_rows);
            const int vector = in_tile / height;
            const int row_in_group = tile * tile_layout::tile_rows + in_tile % height;
            const int row = group * rows.group + row_in_group;
            std::uint32_t word = 0;
            if (row_in_group < rows.group_size(group)) {
                int plane = 0;
                while (plane + 1 < planes::count && vector >= planes::first_vector(plane + 1, layout.quads()))
                    ++plane;
                const int width = planes::width(plane), per_word = planes::quads_per_word(plane);
                const int first_quad = (vector - planes::first_vector(plane, layout.quads())) * per_word;
                for (int q = 0; q < per_word; ++q)
                    for (int k = 0; k < 4; ++k) {
                        const int slot = (first_quad + q) * 4 + k;
                        const int slots_of_group = round_up(layout.cols.group, 4);
                        const int col_group = slot / slots_of_group, in_col_group = slot % slots_of_group;
                        if (col_group >= layout.cols.groups() ||
                            in_col_group >= layout.cols.group_size(col_group))
                            continue;
                        const int col = col_group * layout.cols.group + in_col_group;
                        const int g = on_rows ? col / cut.group : row / cut.group;
                        const auto p = read_parameters<S>(s, block, g, lines.slot(on_rows ? row : col));
                        const float scale = static_cast<float>(p.scale);
                        const auto code = static_cast<unsigned>(S::levels::template code<S::code_bits>(
                            at(row, col), static_cast<float>(p.bias), inverse_scale(scale)));
                        const unsigned part = (code >> planes::shift(plane)) & ((1u << width) - 1u);
                        word |= part << (8 * k + width * q);
                    }
            }
            reinterpret_cast<std::uint32_t*>(block)[w] = word;
        }
    }
    return not_finite;
}

}  // namespace kvq::inline v0_1::cuda::detail
