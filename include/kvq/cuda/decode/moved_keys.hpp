// What the host says to the small kernels of sequences whose keys have moved (moved_keys.cuh).
//
// Contract: plain values that travel in the parameters of a launch. Pointers are to device memory.
#pragma once

#include <cstddef>

#include "../../config.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// The pairs of a rotary embedding: channels first + i * step and `apart` behind it.
struct rotary_pairs {
    const double* turns = nullptr;  ///< [count], per position
    int count = 0, first = 0, step = 1, apart = 0;
};
/// Rows of 16-bit numbers, and the same rows at other rotary positions.
struct turn_args {
    const void* from;
    std::ptrdiff_t token_bytes, head_bytes;
    void* to;  ///< [tokens][heads][dim]
    int tokens, heads, dim;
    int of_sequence;  ///< tokens of a sequence, one after the other
    const int* by;    ///< [sequences]: positions, low and high word
    /// [sequences] paged lengths, which count these tokens: those from `ends` on stay as they are. Null: all
    /// tokens turn.
    const int *lengths, *ends;
    rotary_pairs pairs;
};
/// Two softmax states of the same rows (attention_args.cuh) become one.
struct join_args {
    const float *first, *second;
    float* state;  ///< may be `first`; null: none
    void* out;     ///< rows of 16-bit numbers; null: none
    std::ptrdiff_t token_bytes, head_bytes;
    float* lse;  ///< or null
    int tokens, heads, dim;
};

}}}  // namespace kvq::cuda::detail
