// Attention over keys and values in the memory of another system, in its bytes and where they lie: nothing
// is copied.
//
//   out = softmax(q K^T) V        K, V: rows of tokens in a format of schemes/row_layout.hpp
//
//   kvq::rows_view keys{.rows = kvq::find_format("fp8"), .data = k, .token_stride = 8 * 128,
//                       .head_stride = 128, .block_stride = 16 * 8 * 128};      vLLM, NHD, blocks of 16
//   kvq::attend_rows(keys, values, {table, n, 16, all}, {.tokens = t, .kv_heads = 8, .head_dim = 128}, q,
//                    out, memory);
//
// Strides are bytes, so that one struct says every layout: NHD and HND, blocks of 1 to any number of tokens,
// K and V in one allocation, scales inside of the rows (ggml) or beside them (NVFP4, MX), heads or tokens
// outermost. Masks and score modifiers: mods.hpp, without selections, lists and skipped values.
// Contract: float products; with AVX-512 VNNI integer ones of q8_0, q4_0, q4_1, iq4_nl, mxfp4 and nvfp4,
// where queries and weights have 16 bits (an error as with int8 pages). Results do not depend on the
// executor. Calls of up to 32 query rows of a kv head are split every 2048 tokens, so that more threads
// than kv heads have work. Raises kvq::error for shapes, blocks and formats that do not fit, before rows
// are read, and for scales that are NaN or infinite; out is not complete then. Of every 128 tokens, those
// before and behind all that are seen are not read. Complexity: linear in tokens.
#pragma once

#include "../core/executor.hpp"
#include "../core/row_view.hpp"
#include "../core/workspace.hpp"
#include "../format/format.hpp"
#include "masks.hpp"
#include "mods.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// Keys or values of a sequence. Strides: bytes from one token, head and block to the next.
struct rows_view {
    format
        rows;  ///< of rows of tokens: fp8, nvfp4, q8_0, ... (make_format(token_rows(layout, tensor_scale)))
    const void* data = nullptr;
    std::ptrdiff_t token_stride = 0, head_stride = 0, block_stride = 0;
    /// Scales that lie beside the rows, from one group of channels to the next as well.
    const void* scales = nullptr;
    std::ptrdiff_t scale_token_stride = 0, scale_head_stride = 0, scale_block_stride = 0,
                   scale_group_stride = 1;
};

/// Blocks of a sequence, in its order. Without a table all tokens are one block.
struct row_blocks {
    const std::int32_t* table = nullptr;
    int blocks = 0;
    int block_tokens = 0;
    int all_blocks = 0;  ///< of the memory: numbers in the table are below
};

struct rows_shape {
    int tokens = 0, kv_heads = 0, head_dim = 0;
    int value_dim = 0;  ///< 0: head_dim
};

/// Attends to all tokens: query i is at position tokens - q.tokens + i. memory: at least as large as
/// the largest call; one call at a time uses it.
void attend_rows(const rows_view& keys, const rows_view& values, const row_blocks& blocks,
                 const rows_shape& shape, query_view q, output_view out, workspace& memory,
                 const mods_view& mods = causal{}, executor_view threads = serial_executor{});

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "attend_rows-inl.hpp"
#endif
