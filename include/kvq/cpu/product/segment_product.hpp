// y = X^ x for ranges of columns with codes of different widths: the product of code_product.hpp, one range
// after the other into the same integer sums. Narrow codes are unpacked to the upper bits of the widest
// width: no float operation per range, and no bits lost.
//
// Compiled for an instruction set and a list of widths; parameters come from a source (folded.hpp). Operands
// are folded once for all columns; the scales of narrow codes are divided by the same power of two. Contract:
// that of code_product.hpp for a block of one width.
#pragma once

#include "code_product.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// For every column 2^-(widest width - width of its codes); 0 for a column without codes.
template <class Widths>
void write_units(const code_segment* segments, int columns, float* unit) {
    for (int c = 0; c < columns; ++c) unit[c] = 0.0f;
    for (int w = 0; w < Widths::count; ++w) {
        if (Widths::values[w] == 0) continue;
        const float one = 1.0f / static_cast<float>(1 << (Widths::values[0] - Widths::values[w]));
        for (int c = 0; c < segments[w].columns; ++c) unit[segments[w].first + c] = one;
    }
}

/// Common plan of products of n operands with one head's blocks of one shape. Workspaces are the same for
/// every head. Widths: code_widths<...>.
template <class Widths>
struct segment_plan {
    code_meaning meaning;
    code_layout<8> codes;
    fold_layout fold;
    std::size_t parameters;  ///< offset of the parameters in a block
    code_segment segments[static_cast<std::size_t>(Widths::count)];

    segment_plan(const product_blocks& of, const block_shape& shape, int n, int tile_query_bytes)
        : meaning(of.meaning),
          codes({shape.rows(), of.row_group}, {shape.cols(), of.col_group}),
          fold(codes, true, n, tile_query_bytes, false),
          parameters(of.parameters) {
        for (int w = 0; w < Widths::count; ++w) segments[w] = of.segments[w];
    }

    /// Order of the workspace: the output of fold(), tiles, units.
    std::size_t workspace_bytes() const {
        return fold.bytes + tile_space::bytes(fold) +
               detail::round_up(static_cast<std::size_t>(codes.cols.padded_size()) * sizeof(float),
                                std::size_t{64});
    }
    float* units(std::byte* workspace) const noexcept {
        return reinterpret_cast<float*>(workspace + fold.bytes + tile_space::bytes(fold));
    }
    void write_units(std::byte* workspace) const {
        kernels::write_units<Widths>(segments, codes.cols.padded_size(), units(workspace));
    }
};

/// Address of a segment's codes of the tile of `height` slots that begins at `slot`, from slot `in_tile` of
/// it on.
template <int Bits>
struct segment_in_tile {
    using P = code_planes<Bits>;

    const std::byte* first[P::count];
    std::ptrdiff_t vector_bytes;
    int quads;

    segment_in_tile(const std::byte* block, const code_segment& s, int slot, int height, int in_tile)
        : vector_bytes(height * 4), quads(detail::ceil_div(s.columns, 4)) {
        const std::byte* const begin =
            block + s.offset + 4 * (static_cast<std::ptrdiff_t>(slot) * P::vectors(quads) + in_tile);
        for (int i = 0; i < P::count; ++i) first[i] = begin + P::first_vector(i, quads) * vector_bytes;
    }
    code_part part(std::ptrdiff_t ahead, int slot_count, const std::uint32_t* x,
                   const std::uint8_t* entries = nullptr) const {
        return {first, vector_bytes, ahead, 0,      detail::ceil_div(quads, P::quads_per_step),
                quads, slot_count,   x,     entries};
    }
};

/// Unpacks the codes of a segment that lie in quads [from, to) of the columns, times 2^Raise, for a tile of
/// `height` slots from `slot` on; quad `from` goes to `out` (unpack_codes).
template <class Lanes, int Bits, int Raise, class Codes = plain_codes<Lanes>>
KVQ_INLINE void unpack_segment(const std::byte* block, const code_segment& s, int slot, int height, int from,
                               int to, std::byte* out, std::ptrdiff_t ahead,
                               const std::uint8_t* entries = nullptr) {
    const int first = s.first / 4, begin = detail::larger(first, from),
              end = detail::smaller(first + detail::ceil_div(s.columns, 4), to);
    if (begin >= end) return;
    const segment_in_tile<Bits> codes(block, s, slot, height, 0);
    unpack_codes<Lanes, Bits, Raise, Codes>(codes.part(ahead, height, nullptr, entries), begin - first,
                                            end - first, out + (begin - from) * tile_space::quad_bytes);
}

template <class Lanes, class Backend, class Widths>
class segment_product {
public:
    /// y[i][r] (+)= sum_c x^[r][c] x[i][c] for all rows of the block of `source`; plan.write_units has been
    /// called, and the units are the factor of `source`: codes count as if shifted to the widest width. Other
    /// arguments: block_product.hpp.
    static void run(const segment_plan<Widths>& plan, const parameter_source& source, const float* x,
                    std::ptrdiff_t x_stride, float* y, std::ptrdiff_t y_stride, bool add,
                    std::ptrdiff_t ahead, std::byte* workspace) {
        const int n = plan.fold.n;
        kernels::fold<Lanes, Backend>(plan.meaning, plan.fold, source, x, x_stride, workspace);
        const segment_product p{plan, source.block, ahead};
        if constexpr (has_tiles<Lanes>)
            if (plan.fold.tile_query_bytes > 0)
                return multiply_in_tiles<typename Lanes::architecture::tiles>(
                    in_tiles{p, p.layout_.scalars(workspace), y, y_stride, add}, p.rows_,
                    {p.layout_, workspace}, workspace + plan.fold.bytes);
        const std::uint32_t* words = p.layout_.words(workspace);
        for (int first = 0; first < n;) {
            const int queries = next_query_block(n - first);
            for (int rg = 0; rg < p.rows_.groups(); ++rg) {
                const std::uint32_t* const set =
                    words + static_cast<std::size_t>(rg) * static_cast<std::size_t>(p.layout_.set_words * n);
                for (int tile = 0; tile < p.rows_.group_slots(rg); tile += tile_layout::tile_rows) {
                    const int height =
                        detail::smaller(tile_layout::tile_rows, p.rows_.group_slots(rg) - tile);
                    const code_target to{y + first * y_stride + rg * p.rows_.group + tile,
                                         y_stride,
                                         p.rows_.group_size(rg) - tile,
                                         nullptr,
                                         nullptr,
                                         p.layout_.scalars(workspace) + rg * n + first,
                                         add};
                    p.run_tile(p.rows_.group_begin(rg) + tile, height, set, queries, to);
                }
            }
            words += p.layout_.set_words * queries;
            first += queries;
        }
    }

private:
    using every_width = std::make_integer_sequence<int, Widths::count>;

    segment_product(const segment_plan<Widths>& plan, const std::byte* block, std::ptrdiff_t ahead)
        : rows_(plan.codes.rows()),
          layout_(plan.fold),
          segments_(plan.segments),
          block_(block),
          ahead_(ahead) {}

    /// The functions that multiply_in_tiles calls.
    struct in_tiles {
        const segment_product& p;
        const fold_scalars* scalars;
        float* y;
        std::ptrdiff_t y_stride;
        bool add;

        int column_groups() const { return 1; }
        /// Columns without codes are last. They are skipped.
        int column_tiles(int) const {
            int end = 1;
            for (int w = 0; w < Widths::count; ++w)
                if (Widths::values[w] > 0 && p.segments_[w].columns > 0)
                    end = p.segments_[w].first + p.segments_[w].columns;
            return detail::ceil_div(end, tile_columns);
        }
        void unpack(const tile_step& step, std::byte* out) const { unpack(step, out, every_width{}); }
        static const std::byte* codes_of_tile(const tile_step&) { return nullptr; }
        static void fold(const tile_step&, int, int) {}
        void finish(const tile_step& step, const std::byte* sums, int first, int queries) const {
            finish_tile<byte_form<Backend>, Lanes>(
                sums, step.height, queries,
                {y + first * y_stride + step.row, y_stride, step.rows, nullptr, nullptr,
                 scalars + step.row_group * p.layout_.n + first, add});
        }

    private:
        template <int... Width>
        void unpack(const tile_step& step, std::byte* out, std::integer_sequence<int, Width...>) const {
            (unpack_width<Width>(step, out), ...);
        }
        template <int Width>
        void unpack_width(const tile_step& step, std::byte* out) const {
            constexpr int bits = Widths::values[Width], step_quads = tile_columns / 4;
            if constexpr (bits > 0)
                unpack_segment<Lanes, bits, Widths::values[0] - bits>(
                    p.block_, p.segments_[Width], step.slot, step.height, step.part * step_quads,
                    (step.part + 1) * step_quads, out, p.ahead_);
        }
    };

    void run_tile(int slot, int height, const std::uint32_t* x, int queries, const code_target& tile) const {
        for (int part = 0; part < height;) {
            const int slot_count = height - part;
            const bool several = slot_count >= Lanes::row_vectors * Lanes::width;
            // Built from its fields: a wide copy of an object that narrow stores have just written would
            // stall.
            const code_target to{tile.y + part, tile.y_stride, tile.rows - part, nullptr,
                                 nullptr,       tile.scalars,  tile.add};
            // Slots are a multiple of 4: registers of 4 lanes are always full.
            with_queries(queries, [&](auto n) {
                constexpr int q = decltype(n)::value;
                if (several)
                    multiply<Lanes::row_vectors, q, false>(slot, height, part, x, to, every_width{});
                else
                    multiply<1, q, (Lanes::width > 4)>(slot, height, part, x, to, every_width{});
            });
            part += several ? Lanes::row_vectors * Lanes::width : Lanes::width;
        }
    }

    template <int Vectors, int Queries, bool Partial, int... Width>
    void multiply(int slot, int height, int part, const std::uint32_t* x, const code_target& to,
                  std::integer_sequence<int, Width...>) const {
        code_sums<Lanes, Vectors, Queries> sums;
        clear(sums);
        (add_width<Width, Vectors, Queries, Partial>(slot, height, part, x, sums), ...);
        finish_sums<form_of<Lanes, Backend>, Lanes>(sums, to);
    }

    template <int Width, int Vectors, int Queries, bool Partial>
    KVQ_INLINE void add_width(int slot, int height, int part, const std::uint32_t* x,
                              code_sums<Lanes, Vectors, Queries>& sums) const {
        constexpr int bits = Widths::values[Width];
        if constexpr (bits > 0) {
            const code_segment& s = segments_[Width];
            const int quads = detail::ceil_div(s.columns, 4);
            if (quads == 0) return;
            const segment_in_tile<bits> first(block_, s, slot, height, part);
            sum_codes<form_of<Lanes, Backend>, Lanes, bits, Widths::values[0] - bits, Vectors, Queries,
                      Partial>(first.part(ahead_, height - part, x + s.first / 4 * Queries * 2), sums);
        }
    }

    const grouped_axis& rows_;
    const fold_layout& layout_;
    const code_segment* segments_;
    const std::byte* block_;
    std::ptrdiff_t ahead_;
};

}}}  // namespace kvq::kernels
