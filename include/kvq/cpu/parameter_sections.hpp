// Where the parameters of a block lie that kernels take group by group: offsets, computed once per block.
#pragma once

#include "../schemes/scheme.hpp"
#include "registry.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Offsets of a block's parameters (schemes/block_layout.hpp), computed once per block.
struct parameter_sections {
    std::size_t first, bytes;
    int slot_count, size;

    template <composed_scheme S>
    parameter_sections(const S& scheme, const block_shape& shape)
        : first(scheme.layout().scale_offset(shape)),
          bytes(scheme.layout().section_bytes(shape)),
          slot_count(scheme.layout().slot_count(shape)),
          size(sizeof(typename S::parameter)) {}

    KVQ_INLINE std::size_t offset(int group, int slot) const {
        return first + static_cast<std::size_t>((group * slot_count + slot) * size);
    }
};

}}}  // namespace kvq::kernels
