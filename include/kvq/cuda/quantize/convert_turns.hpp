// Conversion of pages by pages of floats, in turns of as many pages as a workspace holds (convert.cuh).
//
//   workspace   keys, values: floats of the target's pages; then two lists of page numbers
//
// Contract: nothing is launched where the workspace has no room for a page.
#pragma once

#include <cstdint>

#include "../../core/bits.hpp"
#include "../../schemes/full.hpp"
#include "../layout/layer_memory.hpp"
#include "../layout/status.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda { namespace detail {

/// Columns of the block table that pages are written to.
struct target_columns {
    const int* block_table;
    int sequences, columns, page_tokens, first_token;
};
/// A turn: pages of floats, the numbers of their pages and of the target's (negative: skip), and the first
/// column, counted over all sequences.
struct convert_turn {
    layer_memory floats;
    int *from, *to;
    int first, count;
};

/// Bytes of a page of floats. value_dim 0: of latents.
struct float_page {
    std::size_t keys, values, bytes;
    float_page(int kv_heads, int page_tokens, int head_dim, int value_dim)
        : keys(static_cast<std::size_t>(kv_heads) *
               full<float>{}.block_bytes({tensor::key, page_tokens, head_dim})),
          values(value_dim == 0 ? 0
                                : static_cast<std::size_t>(kv_heads) *
                                      full<float>{}.block_bytes({tensor::value, page_tokens, value_dim})),
          bytes(keys + values) {}
    std::size_t workspace(std::size_t pages) const {
        return pages * bytes + common::round_up(2 * pages * sizeof(int), std::size_t{16});
    }
};

template <class Turn>
status convert_in_turns(const float_page& page, const target_columns& target, void* workspace,
                        std::size_t workspace_bytes, const Turn& run) {
    const long long all = 1LL * target.sequences * target.columns;
    const std::size_t of_page = page.workspace(1);
    if (workspace == nullptr || workspace_bytes < of_page ||
        reinterpret_cast<std::uintptr_t>(workspace) % 16 != 0)
        return bad_value(
            "converting pages needs at least %zu bytes of workspace on a multiple of 16, got %zu at %p",
            of_page, workspace_bytes, workspace);
    const auto most = static_cast<int>(
        common::smaller(common::smaller(all, 1LL << 20), static_cast<long long>(workspace_bytes / of_page)));
    auto* const memory = static_cast<std::byte*>(workspace);
    const auto pages = static_cast<std::size_t>(most);
    auto* const from = reinterpret_cast<int*>(memory + pages * page.bytes);
    for (long long first = 0; first < all; first += most) {
        const convert_turn turn{{memory, memory + pages * page.keys, page.keys, page.values},
                                from,
                                from + most,
                                static_cast<int>(first),
                                static_cast<int>(common::smaller<long long>(most, all - first))};
        if (status s = run(turn); !s) return s;
    }
    return {};
}

}  // namespace detail
}}}  // namespace kvq::cuda
