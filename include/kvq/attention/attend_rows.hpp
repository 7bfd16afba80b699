// Attention over keys and values in the memory of another system, in its bytes and where they lie: nothing
// is copied.
//
//   out = softmax(q K^T) V        K, V: rows of tokens in a format of schemes/row_layout.hpp, with a scale of
//                                 the tensor or of each head (head_rows.hpp), or of record_layout.hpp
//
//   kvq::rows_view keys{.rows = kvq::find_format("fp8"), .data = k, .token_stride = 8 * 128,
//                       .head_stride = 128, .block_stride = 16 * 8 * 128};      vLLM, NHD, blocks of 16
//   kvq::attend_rows(keys, values, {table, n, 16, all}, {.tokens = t, .kv_heads = 8, .head_dim = 128}, q,
//                    out, memory);
//
// Strides are bytes, so that one struct says every layout: NHD and HND, blocks of 1 to any number of tokens,
// K and V in one allocation, scales inside of the rows (ggml) or beside them (NVFP4, MX), padded pages, heads
// or tokens outermost. Masks and score modifiers: mods.hpp, without selections, lists and skipped values;
// tokens that a model selects are a table of blocks of one token, under cross_attention.
// Records are read as floats, 128 tokens at a time. Values of a latent are the first channels of its keys:
// where both views are the same, they are read once, and value_dim may be less than head_dim.
// Contract: float products; on AMD's CPUs with AVX-512 BF16 queries and weights of fp8 are two bfloat16,
// at most 2^-17 of their magnitude off; with AVX-512 VNNI integer ones of q8_0, q4_0, q4_1, iq4_nl, mxfp4
// and nvfp4, for which queries and weights are rounded to 16 bits: a row of queries to steps of max|q| /
// 32512, weights to steps of max w_t s_t / (32512 s_t) in 128 tokens with scales s_t of a group of
// channels. Let C be the largest number of a code (127; q4_0 8, q4_1 15, mxfp4 and nvfp4 6), A = C max
// s_t, p_t = w_t / sum w, and S the factor of scores. Then the first line holds always, and the second is
// a standard deviation for data whose roundings are random:
//   |out' - out| <= (e^(2d) - 1) max|v| + A / 508                   d = S max|q| max_t sum_c|k_tc| / 65024
//   sqrt((S max|q|)^2 sum_t p_t^2 |k_t|^2 (v_t - out)^2 + sum over 128s of n (C max_t p_t s_t)^2) / 112625
// Results do not depend on the executor. Calls of up to 32 query rows of a kv head are split every 2048
// tokens, so that more threads than kv heads have work. Raises kvq::error for shapes, blocks and formats that
// do not fit, before rows are read, and for scales that are NaN or infinite; out is not complete then. Of
// every 128 tokens, those before and behind all that are seen are not read; a value of the others that is NaN
// or infinite (FP8) makes NaN of all queries, also of those that do not see it. Complexity: linear in tokens.
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
                   scale_group_stride = 0;  ///< 0: one behind the other
    /// Of formats that have them (MLX), with the strides of scales.
    const void* biases = nullptr;
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
