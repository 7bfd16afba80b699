// Rows of tokens (schemes/row_layout.hpp) in another system's memory: heads and tokens as far apart as they
// lie there, scales in a tensor of their own.
//
//   row of (page, token, head)      pages + page * page_bytes + token * token_bytes + head * head_bytes
//   scales of it                    scales + page * scale_page_bytes + token * ..., where they are not null
//
//   using fp8 = kvq::rows_of<kvq::row_layout_number("fp8")>;
//   kvq::cuda::cache_ref<kvq::cuda::strided_rows<block_pair<fp8, fp8, 128, 16>>> cache;      vLLM, NHD
//   cache.own_keys.memory = {.token_bytes = 8 * 128, .head_bytes = 128};
//
// Contract: rows of a multiple of 16 bytes, and strides of rows that are, are read by the kernels of warps;
// prompts take them where they take the format's own pages. Scales that lie beside the rows have a tensor of
// their own. Other engines' block tables are page numbers as they are.
#pragma once

#include "device_codec.cuh"
#include "layer_memory.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

/// A pair of rows of tokens whose pages are another system's.
template <class Rows>
struct strided_rows : Rows {
    static_assert(detail::token_row_scheme<typename Rows::keys> &&
                      detail::token_row_scheme<typename Rows::values>,
                  "kvq::cuda::strided_rows: keys and values are rows of tokens (rows_of<>)");
};

namespace detail {

template <class Pair>
inline constexpr bool is_strided = false;
template <class Rows>
inline constexpr bool is_strided<strided_rows<Rows>> = true;

/// A row, and its scales.
struct row_address {
    std::byte* row;
    const std::byte* scales;
};

}  // namespace detail
}}}  // namespace kvq::cuda
