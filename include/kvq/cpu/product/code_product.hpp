// y = X^ x on the codes of a block: an integer matrix times fixed-point operands (cpu/product/folded.hpp).
//
//   y[r] = row_scale[r] * (step * sum_c (code - zero) * byte + bias_dot) + row_bias[r] * sum
//
// In registers, up to 4 operands at a time (code_sums.hpp), or, on architectures with tile instructions, in
// tiles (tile_product.hpp). Contract: that of code_sums.hpp; both give the same bits if registers take bytes
// as well.
#pragma once

#include "tile_product.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Common plan of products of n operands with blocks of one shape.
template <int Bits>
struct code_plan {
    code_meaning meaning;
    code_layout<Bits> codes;
    fold_layout fold;
    std::size_t parameters;  ///< offset of the parameters in a block
    std::ptrdiff_t line;     ///< floats of the row parameters of one column group
    /// bytes of all row parameters; in the workspace, the output of fold() follows them
    std::size_t parameter_bytes;

    /// row_slots: those that the parameters of rows have, if they are more than those of the codes.
    code_plan(const code_meaning& codes_mean, const code_layout<Bits>& layout, int n, int tile_query_bytes,
              int row_slots = 0)
        : meaning(codes_mean),
          codes(layout),
          fold(codes, meaning.use.columns(), n, tile_query_bytes),
          parameters(codes.bytes()),
          line(detail::larger(codes.rows().padded_size(), row_slots) + 16),
          parameter_bytes(detail::round_up(
              static_cast<std::size_t>((meaning.use.row_scale ? 1 : 0) + (meaning.use.row_bias ? 1 : 0)) *
                  static_cast<std::size_t>(codes.cols.groups()) * static_cast<std::size_t>(line) *
                  sizeof(float),
              std::size_t{64})) {}

    std::size_t workspace_bytes() const { return parameter_bytes + fold.bytes + tile_space::bytes(fold); }
    /// Are operands folded while tiles multiply, some of them at a time?
    bool folds_in_tiles() const { return fold.several() && meaning.use.columns(); }
};

/// Operands that a product folds itself (code_plan::folds_in_tiles).
struct unfolded {
    const float* x = nullptr;
    std::ptrdiff_t x_stride = 0;
};

/// y[i][r] (+)= sum_c x^[r][c] x[i][c] for the n operands that were folded for this block. Codes:
/// plain_codes, or table_codes where the plan has entries.
template <class Lanes, class Backend, int Bits, class Codes = plain_codes<Lanes>>
class code_product {
public:
    code_product(const code_plan<Bits>& plan, const parameter_source& source, std::byte* workspace,
                 const unfolded& operands = {})
        : code_product(plan, source, source.block, workspace, false) {
        operands_ = operands;
    }
    /// codes: of the block, where they do not lie before its parameters. In tiles, bytes are read from there
    /// for every operand, and not copied.
    code_product(const code_plan<Bits>& plan, const parameter_source& source, const std::byte* codes,
                 std::byte* workspace, bool in_place = true)
        : codes_(plan.codes),
          meaning_(plan.meaning),
          layout_(plan.fold),
          source_(source),
          columns_(plan.meaning.use.columns()),
          in_place_(in_place && Bits == 8 && codes_.cols.group % tile_columns == 0 &&
                    codes_.cols.size % tile_columns == 0),
          entries_(plan.meaning.entries),
          block_(codes),
          lower_(source.id.lower),
          words_(layout_.words(workspace + plan.parameter_bytes)),
          scalars_(layout_.scalars(workspace + plan.parameter_bytes)),
          memory_(workspace + plan.parameter_bytes),
          line_(plan.line),
          scales_(plan.meaning.use.row_scale ? reinterpret_cast<float*>(workspace) : nullptr),
          biases_(plan.meaning.use.row_bias
                      ? reinterpret_cast<float*>(workspace) +
                            (plan.meaning.use.row_scale ? line_ * codes_.cols.groups() : 0)
                      : nullptr) {
        if (scales_ || biases_)
            for (int g = 0; g < codes_.cols.groups(); ++g)
                source.rows(source, g, scales_ ? scales_ + g * line_ : nullptr,
                            biases_ ? biases_ + g * line_ : nullptr);
    }

    /// ahead: distance in bytes from this block to the one that is read
    /// next; 0: none.
    void run(float* y, std::ptrdiff_t y_stride, bool add, std::ptrdiff_t ahead) const {
        if constexpr (has_tiles<Lanes>)
            if (layout_.tile_query_bytes > 0)
                return multiply_in_tiles<typename Lanes::architecture::tiles>(
                    in_tiles(*this, y, y_stride, add, ahead), codes_.rows(), {layout_, memory_},
                    memory_ + layout_.bytes);
        const grouped_axis& rows = codes_.rows();
        const std::uint32_t* block_words = words_;
        for (int first = 0; first < layout_.n;) {
            const int queries = next_query_block(layout_.n - first);
            for (int rg = 0; rg < rows.groups(); ++rg) {
                const int set = columns_ ? rg : 0;
                const std::uint32_t* x = block_words + static_cast<std::size_t>(set) *
                                                           static_cast<std::size_t>(layout_.set_words) *
                                                           static_cast<std::size_t>(layout_.n);
                const fold_scalars* scalars = scalars_ + set * layout_.parts.groups() * layout_.n + first;
                for (int p = 0; p < layout_.parts.groups(); ++p, scalars += layout_.n)
                    x += run_part(p, rg, queries, x, scalars, y + first * y_stride, y_stride, add || p > 0,
                                  ahead);
            }
            block_words += layout_.set_words * queries;
            first += queries;
        }
    }

private:
    using planes = code_planes<Bits>;

    /// The rows of a row group times a part of the columns, for `queries` operands whose words of the part
    /// are at x. Returns the number of these words.
    std::ptrdiff_t run_part(int p, int rg, int queries, const std::uint32_t* x, const fold_scalars* scalars,
                            float* y, std::ptrdiff_t y_stride, bool add, std::ptrdiff_t ahead) const {
        const grouped_axis& rows = codes_.rows();
        const int from = layout_.first_step(p), steps = layout_.last_step(p) - from,
                  slots_of_rows = rows.group_slots(rg);
        const std::byte* first[planes::count];
        code_part what{
            first, 0, ahead,   source_.id.lower_ahead, steps, codes_.quads() - from * planes::quads_per_step,
            0,     x, entries_};
        code_target to{y + rg * rows.group, y_stride, rows.group_size(rg), nullptr, nullptr, scalars, add};
        std::ptrdiff_t line = layout_.group_of(p) * line_ + rows.group_begin(rg);
        for (int tile = 0; tile < slots_of_rows; tile += tile_layout::tile_rows) {
            what.slot_count = detail::smaller(tile_layout::tile_rows, slots_of_rows - tile);
            what.vector_bytes = what.slot_count * 4;
            find_part(rows.group_begin(rg) + tile, what.slot_count, p, first);
            while (what.slot_count > 0) {
                if (scales_) to.row_scale = scales_ + line;
                if (biases_) to.row_bias = biases_ + line;
                // Slots are a multiple of 4: registers of 4 lanes are always full.
                const bool several = what.slot_count >= Lanes::row_vectors * Lanes::width;
                if (several)
                    multiply<Lanes::row_vectors, false>(queries, what, to);
                else
                    multiply<1, (Lanes::width > 4)>(queries, what, to);
                const int done = several ? Lanes::row_vectors * Lanes::width : Lanes::width;
                for (const std::byte*& plane : first) plane += done * 4;
                what.slot_count -= done;
                line += done;
                to.y += done;
                to.rows -= done;
            }
        }
        return std::ptrdiff_t{steps} * planes::quads_per_step * queries * 2;
    }

    /// The functions that multiply_in_tiles calls.
    class in_tiles {
    public:
        in_tiles(const code_product& product, float* y, std::ptrdiff_t y_stride, bool add,
                 std::ptrdiff_t ahead)
            : p_(product), y_(y), y_stride_(y_stride), add_(add), ahead_(ahead) {}

        int column_groups() const { return p_.layout_.parts.groups(); }
        int column_tiles(int part) const { return p_.layout_.tile_blocks(part); }

        KVQ_INLINE void unpack(const tile_step& step, std::byte* out) {
            constexpr int step_quads = tile_columns / 4;
            const std::ptrdiff_t vector_bytes = step.height * 4;
            if (step.part == 0) {
                left_ = p_.quads_of(step.group);
                p_.find_part(step.slot, step.height, step.group, planes_);
            }
            const int quads = detail::smaller(left_, step_quads);
            unpack_codes<Lanes, Bits, 0, Codes>({planes_, vector_bytes, ahead_, p_.source_.id.lower_ahead, 0,
                                                 0, step.height, nullptr, p_.entries_},
                                                0, quads, out);
            for (int i = 0; i < planes::count; ++i)
                planes_[i] += step_quads / planes::quads_per_word(i) * vector_bytes;
            left_ -= step_quads;
        }
        const std::byte* codes_of_tile(const tile_step& step) const {
            return p_.in_place_ && step.height == tile_layout::tile_rows ? p_.tile_at(step.slot) : nullptr;
        }
        void fold(const tile_step& step, int first, int queries) const {
            if (!p_.operands_.x) return;
            if (first == 0) load_columns(p_.layout_, p_.source_, step.row_group, p_.memory_);
            fold_operands<Lanes, byte_form<Backend>, true>(p_.meaning_, p_.layout_, step.row_group, first,
                                                           queries, p_.operands_.x, p_.operands_.x_stride,
                                                           p_.memory_);
        }
        void finish(const tile_step& step, const std::byte* sums, int first, int queries) const {
            const std::ptrdiff_t line = p_.layout_.group_of(step.group) * p_.line_ + step.slot;
            const int set = p_.columns_ ? step.row_group : 0;
            finish_tile<byte_form<Backend>, Lanes>(
                sums, step.height, queries,
                {y_ + first * y_stride_ + step.row, y_stride_, step.rows,
                 p_.scales_ ? p_.scales_ + line : nullptr, p_.biases_ ? p_.biases_ + line : nullptr,
                 p_.scalars_ + (set * column_groups() + step.group) * p_.layout_.n + first,
                 add_ || step.group > 0});
        }

    private:
        const code_product& p_;
        float* y_;
        std::ptrdiff_t y_stride_;
        bool add_;
        std::ptrdiff_t ahead_;
        const std::byte* planes_[planes::count];  // of the next step
        int left_ = 0;                            // quads left in its part
    };

    /// Quads from the part's first step to the end of its last one, or of the row.
    int quads_of(int part) const {
        const int from = layout_.first_step(part);
        return detail::smaller((layout_.last_step(part) - from) * planes::quads_per_step,
                               codes_.quads() - from * planes::quads_per_step);
    }
    const std::byte* tile_at(int slot) const {
        return block_ +
               4 * static_cast<std::size_t>(slot) * static_cast<std::size_t>(codes_.tiles.words_per_row);
    }
    /// Finds each plane's vector of the first step of a part of the columns, for a tile of `height` slots.
    void find_part(int slot, int height, int part, const std::byte** first) const {
        const std::byte* const begin = tile_at(slot);
        const int from = layout_.first_step(part);
        for (int i = 0; i < planes::count; ++i) {
            first[i] = begin + (planes::first_vector(i, codes_.quads()) +
                                from * (planes::quads_per_step / planes::quads_per_word(i))) *
                                   (height * 4);
            if (Bits == two_planes && i == 1) first[i] += lower_ - block_;
        }
    }

    template <int Vectors, bool Partial>
    static void multiply(int queries, const code_part& what, const code_target& to) {
        with_queries(queries, [&](auto n) {
            multiply_part<form_of<Lanes, Backend>, Lanes, Bits, Vectors, decltype(n)::value, Partial, Codes>(
                what, to);
        });
    }

    const code_layout<Bits>& codes_;
    const code_meaning& meaning_;
    const fold_layout& layout_;
    const parameter_source& source_;
    unfolded operands_;
    bool columns_;   // whether columns carry parameters
    bool in_place_;  // whether tiles are loaded from the block
    const std::uint8_t* entries_;
    const std::byte* block_;
    const std::byte* lower_;  // the lower plane of two_planes
    const std::uint32_t* words_;
    const fold_scalars* scalars_;
    std::byte* memory_;  // the output of fold(), then the memory of tiles
    std::ptrdiff_t line_;
    float* scales_;
    float* biases_;
};

}}}  // namespace kvq::kernels
