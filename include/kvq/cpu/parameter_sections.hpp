// What kernels that work group by group know of the parameters of a block: where they lie, and how they are
// loaded.
#pragma once

#include "../schemes/scheme.hpp"
#include "kernel_table.hpp"
#include "registry.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Where a block's parameters lie (schemes/block_layout.hpp), computed once per block.
struct parameter_sections {
    std::size_t first, bytes;
    int slot_count, size;
    bool on_rows;  ///< or on columns

    parameter_sections(const block_layout& of, const block_shape& shape)
        : first(of.scale_offset(shape)),
          bytes(of.section_bytes(shape)),
          slot_count(of.slot_count(shape)),
          size(of.codec.parameter_bytes),
          on_rows(of.codec.on_rows(shape.role)) {}

    KVQ_INLINE std::size_t offset(int group, int slot) const {
        return first + static_cast<std::size_t>((group * slot_count + slot) * size);
    }
};

/// Loads n parameters as floats, by a function of their type; whole vectors of fp16, the usual type, without
/// a call.
struct parameter_load {
    void (*any)(const std::byte* from, int n, float* to);
    bool fp16;

    template <class Lanes>
    KVQ_INLINE void run(const std::byte* from, int n, float* to) const {
        if (!fp16 || n % Lanes::width != 0) [[unlikely]]
            return any(from, n, to);
        for (int i = 0; i < n; i += Lanes::width)
            Lanes::store_floats(to + i, Lanes::template load_values<float16>(from + 2 * i));
    }
};

/// What dequantizing needs to know of a block.
template <int Bits>
struct group_block {
    code_layout<Bits> codes;
    parameter_sections sections;
    parameter_load load;

    group_block(const block_layout& of, const parameter_functions& p, const block_shape& shape)
        : codes(of.rows(shape), of.cols(shape)), sections(of, shape), load{p.load, p.fp16} {}
};

}}}  // namespace kvq::kernels
