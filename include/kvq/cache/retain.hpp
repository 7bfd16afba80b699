// Tokens that are dropped head by head: retain() keeps the listed tokens of a layer, others for every kv
// head, and as many of each.
//
//   before    [sinks][0 1 2 3][4 5 6 7][8 9 . .]       10 tokens behind the sinks, 16 bit or quantized
//   head 0    keeps 0 3 4 9
//   head 1    keeps 2 5 8 9
//   after     [sinks]              [0 3 4 9]           one page of 4 tokens: row 0 of its block of head 1 is
//                                                      token 2
//
// The rows lie side by side in front of the next token, so that pages, kernels, files and all that counts
// tokens need no mask, and the memory of the others goes back. Behind the sinks there is a gap, as in a layer
// with a window. Keys stay as they are rotated, and the next token keeps its number.
//   16-bit pages      rows are moved, and quantized as if they had been appended alone; hold() keeps a prompt
//                     in 16 bit until then
//   quantized pages   those that every head keeps whole stay, with all of their codes; rows of others are
//                     dequantized and quantized once more (usage_report::repacked). Where codes are symmetric
//                     and their scale is per token (int8), or there is none (e4m3), they come out as they
//                     were
// Contract: sinks are always kept. Trims reach back to this point, not behind it.
#pragma once

#include "sequence.hpp"

#if !defined(KVQ_COMPILED)
#include "retain-inl.hpp"
#endif
