// Tokens in the memory of another system, in its bytes: to floats, from floats, and to memory of a third one.
//
//   out = x^ of tokens [first, first + out.tokens)              read_rows(keys, blocks, first, out, memory)
//   tokens [first, first + x.tokens) get the bytes of x         write_rows(keys, blocks, first, x, memory)
//   tokens [0, n) of one memory become those of another one     convert_rows(from, of_from, to, of_to, ...)
//
//   read_rows(keys, {table, n, 16, all}, 0, {floats, t, heads, dim}, memory);     vLLM's pages to floats, and
//   sequence.append(layer, {floats, t, heads, dim}, values);                        to pages of kvq
//   convert_rows(keys, {table, n, 16, all}, others, {}, {t, heads, dim}, memory);   fp8 pages to q8_0 rows
//
// Views and blocks: attend_rows.hpp; heads and channels are those of the floats. What is written lies in
// memory that may be written to, apart from what is read, and no block of it twice. Between views of one
// format, of one name, rows are copied, bytes and all; else a row is quantized from the floats that it stands
// for, by its format's rule (schemes/row_layout.hpp).
// Contract: shapes, blocks and strides are checked before anything is read or written. Scales that are NaN or
// infinite raise kvq::error where rows are read as floats; what was written until then stays. Bytes do not
// depend on the executor. Complexity: linear.
#pragma once

#include "attend_rows.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// memory: as in attend_rows().
void read_rows(const rows_view& rows, const row_blocks& blocks, int first, output_view out, workspace& memory,
               executor_view threads = serial_executor{});

/// Returns how many values were not finite: NaN becomes the number nearest to zero, infinities saturate.
std::int64_t write_rows(const rows_view& rows, const row_blocks& blocks, int first, input_view x,
                        workspace& memory, executor_view threads = serial_executor{});

/// Tokens, heads and channels of both: shape; value_dim is not read. Returns what write_rows() returns.
std::int64_t convert_rows(const rows_view& from, const row_blocks& of_from, const rows_view& to,
                          const row_blocks& of_to, const rows_shape& shape, workspace& memory,
                          executor_view threads = serial_executor{});

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "copy_rows-inl.hpp"
#endif
