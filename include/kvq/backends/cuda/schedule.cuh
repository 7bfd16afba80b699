// Who does what: all chunks of all sequences, heads and row blocks in one line, cut into equal shares, one per thread block.
//
//   item      (sequence, kv head, block of query rows); its chunks follow each other in the line
//   share     chunks [W * i / n, W * (i + 1) / n) of thread block i of n; touches a few items, most of them whole
//   warp w    of a thread block takes chunks w, w + warps, ... of the block's part of an item
//
// The lengths of the sequences are read on the device, so a captured graph stays valid while they grow. An item that
// spans several shares leaves one partial softmax state per share; who arrives last merges them, in token order.
// A sequence without tokens counts as one chunk, so that its output is written too.
// Contract: shares differ by at most one chunk; the result does not depend on the order in which blocks run.
#pragma once

#include "chunk.cuh"

namespace kvq::inline v0_1::cuda::detail {

/// What the schedule must know about a call.
struct work_shape {
    const int* tokens;  // [sequences]
    int sequences;
    int lines;  // items of a sequence: kv_heads * row_blocks
    int row_blocks;
    int first_token;  // position of the first token of this format's first page
    int capacity;     // tokens that the block table can name
    int query_tokens;
    int window;  // 0: none

    struct span {
        int first, count;  // chunks; count is at least 1
        int real;          // chunks that exist
    };
    /// Chunks of sequence b that hold a token that some query sees.
    template <int Tokens>
    __device__ __forceinline__ span chunks(int b) const {
        const int length = tokens[b];
        const int end = smaller(length - first_token, capacity);
        // The oldest query sits at position length - query_tokens and sees `window` tokens.
        const int begin = window > 0 ? larger(0, length - query_tokens - window + 1 - first_token) : 0;
        const int first = begin / Tokens;
        const int real = ceil_div(larger(end, 0), Tokens) - first;
        return {first, larger(1, real), real};
    }
};

/// The part of one item that a thread block handles.
struct item_part {
    int sequence;
    int line;  // kv_head * row_blocks + row_block
    int kv_head, row_block;
    int begin;     // of the item, in the line of all chunks
    int count;     // chunks of the item
    int first;     // chunk of the sequence with which the item begins
    int real;      // chunks that exist: 0 or less where count is 1 for an empty sequence
    int from, to;  // the thread block's chunks, relative to `first`
};

/// Walks the items of a share.
template <int Tokens>
struct item_walk {
    const work_shape& work;
    int share_begin, share_end;
    item_part item;

    __device__ __forceinline__ bool done() const { return item.begin >= share_end; }
    __device__ __forceinline__ void clip() {
        item.from = larger(share_begin - item.begin, 0);
        item.to = smaller(share_end - item.begin, item.count);
    }
    __device__ __forceinline__ void next() {
        item.begin += item.count;
        if (++item.row_block == work.row_blocks) {
            item.row_block = 0;
            ++item.kv_head;
        }
        if (++item.line == work.lines) {
            item.line = item.kv_head = 0;
            if (++item.sequence < work.sequences) {
                const auto span = work.template chunks<Tokens>(item.sequence);
                item.first = span.first;
                item.count = span.count;
                item.real = span.real;
            }
        }
        clip();
    }
};

/// How the line is cut; the same for all thread blocks.
struct share_plan {
    int total;   // chunks
    int shares;  // thread blocks that get some

    __device__ __forceinline__ int begin(int share) const {
        return static_cast<int>(static_cast<long long>(total) * share / shares);
    }
    /// The share that holds a chunk.
    __device__ __forceinline__ int holder(int chunk) const {
        return static_cast<int>(((static_cast<long long>(chunk) + 1) * shares - 1) / total);
    }
};

/// Counts all chunks and finds where the share of this thread block begins. Every warp does it for itself: no barrier.
template <int Tokens>
__device__ __forceinline__ share_plan find_share(const work_shape& work, int least_chunks,
                                                 item_walk<Tokens>& walk) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    // Lane i adds up sequences [i * each, (i + 1) * each).
    const int each = ceil_div(work.sequences, warp_size);
    const int from = smaller(lane * each, work.sequences), to = smaller(from + each, work.sequences);
    int sum = 0;
    for (int b = from; b < to; ++b) sum += work.template chunks<Tokens>(b).count;
    sum *= work.lines;
    int before = sum;
#pragma unroll
    for (int step = 1; step < warp_size; step *= 2) {
        const int other = __shfl_up_sync(~0u, before, step);
        if (lane >= step) before += other;
    }
    const int total = __shfl_sync(~0u, before, warp_size - 1);
    before -= sum;
    const share_plan plan{total, smaller(static_cast<int>(gridDim.x), ceil_div(total, least_chunks))};
    const int share = static_cast<int>(blockIdx.x);
    if (share >= plan.shares) {
        walk.share_begin = walk.share_end = walk.item.begin = 0;
        return plan;
    }
    walk.share_begin = plan.begin(share);
    walk.share_end = plan.begin(share + 1);
    // The lane whose sequences hold the share's first chunk finds the item and tells the others.
    int sequence = 0, line = 0, begin = 0;
    const bool mine = walk.share_begin >= before && walk.share_begin < before + sum;
    if (mine) {
        for (int b = from; b < to; ++b) {
            const int count = work.template chunks<Tokens>(b).count;
            if (walk.share_begin < before + count * work.lines) {
                sequence = b;
                line = (walk.share_begin - before) / count;
                begin = before + line * count;
                break;
            }
            before += count * work.lines;
        }
    }
    const int source = __ffs(static_cast<int>(__ballot_sync(~0u, mine))) - 1;
    item_part& item = walk.item;
    item.sequence = __shfl_sync(~0u, sequence, source);
    item.line = __shfl_sync(~0u, line, source);
    item.begin = __shfl_sync(~0u, begin, source);
    item.kv_head = item.line / work.row_blocks;
    item.row_block = item.line % work.row_blocks;
    const auto span = work.template chunks<Tokens>(item.sequence);
    item.first = span.first;
    item.count = span.count;
    item.real = span.real;
    walk.clip();
    return plan;
}

}  // namespace kvq::inline v0_1::cuda::detail
