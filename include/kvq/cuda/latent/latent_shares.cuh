// Who does what of latent attention, and the states that shares leave behind.
//
//   tile    64 neighbouring tokens of a part (mixed_cache.cuh)
//   item    (sequence, block of query rows): its tiles follow each other, part after part
//   share   of thread block i of n: where items are few and about as long as each other, an equal part of
//           one of them; otherwise tiles [T i / n, T (i + 1) / n) of the line of all items, which may begin
//           and end within items
//   piece   what a share has of an item: one softmax state {max, sum, output} of every row of the block in
//           the workspace
//
// A second launch merges the pieces of every item (merge_latents_kernel). Item k and share i together have
// piece k + i: the number grows with every piece, so that there are fewer than items + shares. Lengths are
// read on the device: a captured graph stays valid while they grow.
// Contract: an item without tokens has one empty piece. The order of additions is fixed by the shares.
#pragma once

#include "../decode/score_modifiers.cuh"
#include "../layout/latent_pair.cuh"
#include "../prefill/prefill_args.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

inline constexpr int latent_tile = 64;
/// A piece takes as long as so many tiles before its first and behind its last one.
inline constexpr int piece_tiles = 4;
/// A state has the maximum and the sum, then the output, on a multiple of 32 bytes: writes of a warp fill
/// whole sectors.
inline constexpr int state_header = 8;

/// Bits 0 to n - 1.
__device__ __forceinline__ std::uint64_t bits_below(int n) {
    return n >= 64 ? ~std::uint64_t{0} : n <= 0 ? 0 : (std::uint64_t{1} << n) - 1;
}

/// The shares that have pieces of an item.
struct share_bounds {
    int first, last;
};

/// Kernel arguments. First: the pair of the first part.
template <class First, class T, class... Parts>
struct latent_args {
    using first_pair = First;
    using query_type = T;
    attention_args<First, T> a;
    object_list<Parts...> parts;
    int recent;
    int sinks;                 // so many first tokens are seen in spite of a window
    const float* sink_logits;  // [q_heads]: learned sinks. Null: none
    int row_blocks;            // of a sequence
    int block_rows;
    float* states;         // [pieces][block_rows][state_header + value_dim]
    share_bounds* bounds;  // [items]

    __device__ __forceinline__ float* state(int piece, int row) const {
        return states + (static_cast<std::size_t>(piece) * static_cast<std::size_t>(block_rows) +
                         static_cast<std::size_t>(row)) *
                            (state_header + First::value_dim);
    }
    /// Paged length of sequence b.
    __device__ __forceinline__ int length(int b) const { return __ldg(a.work.tokens + b); }
    /// All rows see the tokens before this paged position, as far as windows and trees go.
    __device__ __forceinline__ int common_end(int length) const {
        return length - a.work.oldest - a.order.text;
    }
    /// Tokens that a row sees end before this paged position.
    __device__ __forceinline__ int row_end(int length, int row) const {
        return length - a.work.query_tokens + a.row_query(row) + 1;
    }
    /// Do rows not see all tokens before their end?
    __device__ __forceinline__ bool masked() const {
        return a.ancestors != nullptr || a.work.window.tokens > 0;
    }
    __device__ __forceinline__ int skipped(int sequence) const {
        const page_cuts& cuts = get<0>(parts).cuts;
        return cuts.skipped == nullptr ? 0 : __ldg(cuts.skipped + sequence);
    }
    /// Where the first token that the query at a place sees through the window would lie if no page before it
    /// hid any: at most skipped() behind where it is.
    __device__ __forceinline__ int begin_at(int sequence, int place) const {
        return a.work.window.first_seen(place, skipped_tokens{skipped(sequence)});
    }
    /// Those of 64 tokens from this paged position on that a row sees through its window and in its tree: bit
    /// i, token i.
    __device__ __forceinline__ std::uint64_t mask(int sequence, int length, int row, int first) const {
        const int draft = length - a.drafted;
        int place = a.row_place(length, row);
        std::uint64_t seen = ~std::uint64_t{0}, path = seen;
        if (a.ancestors != nullptr) {
            const int token = a.row_token(sequence, kvq::detail::smaller(row, a.rows - 1));
            path = __ldg(reinterpret_cast<const unsigned long long*>(a.ancestors) + token);
            place = a.text_place(length, path);
        }
        if (a.work.window.tokens > 0) {
            const int begin = begin_at(sequence, place);
            if (a.ancestors != nullptr)
                for (int n = begin - draft; n > 0; --n) path &= path - 1;
            seen =
                ~bits_below(first_seen(get<0>(parts).cuts, sequence, kvq::detail::larger(0, begin)) - first) |
                bits_below(sinks - first);
        }
        if (a.ancestors == nullptr) return seen;
        const int begin = draft - first;
        if (begin >= 0) return seen & (bits_below(begin) | (begin < 64 ? path << begin : 0));
        return seen & (begin > -64 ? path >> -begin : 0);
    }
    /// Those that a row sees.
    __device__ __forceinline__ std::uint64_t seen_by(int sequence, int length, int row, int first) const {
        const std::uint64_t seen = bits_below(row_end(length, row) - first);
        return masked() ? seen & mask(sequence, length, row, first) : seen;
    }
    /// Do all rows see all of a tile?
    template <class Note>
    __device__ __forceinline__ bool all_see(const Note& note, int sequence, int length) const {
        return note.is_whole(common_end(length)) &&
               (a.work.window.tokens == 0 || note.position >= begin_at(sequence, length - 1));
    }
    /// Tokens of a part that some row may see, or more.
    template <class Part>
    __device__ __forceinline__ token_range held(const Part& part, int b, int length) const {
        token_range range = held_tokens(part, b, length, recent);
        if (a.work.window.tokens > 0 && !(a.window_sinks && part.capacity >= 0)) [[unlikely]] {
            const int unseen =
                begin_at(b, length - a.work.oldest) - skipped(b) - part.cache.first_token - range.first;
            if (unseen > 0) range.first += unseen / latent_tile * latent_tile;
        }
        return range;
    }
    /// Tiles of all parts of sequence b.
    __device__ __forceinline__ int tiles(int b, int length) const {
        int n = 0;
        each_part(*this, [&](const auto& part) { n += held(part, b, length).tiles(latent_tile); });
        return n;
    }
};
/// The same of kernels without windows.
template <class First, class T, class... Parts>
struct latent_chain_args : latent_args<First, T, Parts...> {
    using base = latent_args<First, T, Parts...>;
    template <class Part>
    __device__ __forceinline__ token_range held(const Part& part, int b, int length) const {
        return held_tokens(part, b, length, base::recent);
    }
    __device__ __forceinline__ int tiles(int b, int length) const {
        int n = 0;
        each_part(*this, [&](const auto& part) { n += held(part, b, length).tiles(latent_tile); });
        return n;
    }
};

/// The piece of an item that a share has. All numbers are those of a whole warp.
struct latent_piece {
    int sequence, row_block;
    int length;    // paged, of the sequence
    int from, to;  // tiles of the item
    int number;    // of the piece
    int item, share;
    bool begins, ends;  // has it the item's first tile, its last one?
};

/// Calls f(part, first, end) with what a piece has of every part: tokens of the part, `first` begins a tile.
template <class Args, class F>
__device__ __forceinline__ void each_held(const Args& args, const latent_piece& piece, F&& f) {
    int before = 0;  // tiles of parts before
    each_part(args, [&](const auto& part) {
        const token_range range = args.held(part, piece.sequence, piece.length);
        const int count = range.tiles(latent_tile), from = kvq::detail::larger(piece.from - before, 0),
                  to = kvq::detail::smaller(piece.to - before, count);
        if (from < to)
            f(part, range.first + from * latent_tile,
              kvq::detail::smaller(range.end, range.first + to * latent_tile));
        before += count;
    });
}

/// Walks the pieces of a share. Every warp does it for itself.
template <class Args>
class latent_walk {
public:
    __device__ __forceinline__ latent_walk(const Args& args, int share, int shares)
        : a_(args), share_(share) {
        const int lane = static_cast<int>(threadIdx.x) % 32, sequences = a_.a.work.sequences;
        long long all = 0;
        int longest = 1;
#pragma unroll 1
        for (int b = lane; b < sequences; b += 32) {
            const int size = size_of(b);
            all += size;
            longest = kvq::detail::larger(longest, size);
        }
        for (int step = 16; step > 0; step /= 2) {
            all += __shfl_xor_sync(0xffffffffu, all, step);
            longest = kvq::detail::larger(longest, __shfl_xor_sync(0xffffffffu, longest, step));
        }
        all *= a_.row_blocks;
        const int items = sequences * a_.row_blocks, per = shares / items;
        if (per > 0 && ceil_div(longest, per) <= all / shares + piece_tiles) {
            if (share >= items * per) return;
            const int item = share / per, part = share - item * per;
            sequence_ = item / a_.row_blocks;
            row_block_ = item - sequence_ * a_.row_blocks;
            measure();
            const int parts = kvq::detail::smaller(per, size_);  // a share has a tile
            if (part >= parts) return;
            at_ = static_cast<int>(1LL * size_ * part / parts);
            left_ = static_cast<int>(1LL * size_ * (part + 1) / parts) - at_;
            return;
        }
        if (all < shares) shares = static_cast<int>(all);
        if (share >= shares) return;
        const long long begin = all * share / shares;
        left_ = static_cast<int>(all * (share + 1) / shares - begin);
        // The sequence with the share's first tile.
        long long before = 0;
#pragma unroll 1
        for (int first = 0; first < sequences; first += 32) {
            const int b = first + lane;
            const long long own = b < sequences ? 1LL * size_of(b) * a_.row_blocks : 0;
            long long end = own;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const long long lower = __shfl_up_sync(0xffffffffu, end, static_cast<unsigned>(step));
                if (lane >= step) end += lower;
            }
            const unsigned behind = __ballot_sync(0xffffffffu, b < sequences && before + end > begin);
            if (behind != 0) {
                const int found = __ffs(static_cast<int>(behind)) - 1;
                sequence_ = first + found;
                const int at = static_cast<int>(begin - before - __shfl_sync(0xffffffffu, end - own, found));
                measure();
                row_block_ = at / size_;
                at_ = at - row_block_ * size_;
                return;
            }
            before += __shfl_sync(0xffffffffu, end, 31);
        }
    }
    /// The next piece, if there is one.
    __device__ __forceinline__ bool next(latent_piece& piece) {
        if (left_ <= 0) return false;
        const int count = kvq::detail::smaller(left_, size_ - at_),
                  item = sequence_ * a_.row_blocks + row_block_;
        piece = {sequence_,     row_block_, length_, at_,      kvq::detail::smaller(at_ + count, real_),
                 item + share_, item,       share_,  at_ == 0, at_ + count == size_};
        left_ -= count;
        at_ = 0;
        if (++row_block_ == a_.row_blocks && left_ > 0) {
            row_block_ = 0;
            ++sequence_;
            measure();
        }
        return true;
    }

private:
    /// Tiles in the line: an empty sequence counts as one.
    __device__ __forceinline__ int size_of(int b) const {
        return kvq::detail::larger(1, a_.tiles(b, a_.length(b)));
    }
    __device__ __forceinline__ void measure() {
        length_ = a_.length(sequence_);
        real_ = a_.tiles(sequence_, length_);
        size_ = kvq::detail::larger(1, real_);
    }
    const Args& a_;
    int share_, left_ = 0, sequence_ = 0, row_block_ = 0, at_ = 0, size_ = 1, real_ = 0, length_ = 0;
};

/// Notes for the merge which shares have pieces of an item. One thread.
template <class Args>
__device__ __forceinline__ void note_bounds(const Args& a, const latent_piece& piece) {
    if (piece.begins) a.bounds[piece.item].first = piece.share;
    if (piece.ends) a.bounds[piece.item].last = piece.share;
}

/// Lets the merge take its place when the products of a piece are done. Earlier, all of its thread blocks
/// would wait on the few multiprocessors that have no share.
__device__ __forceinline__ void launch_merge() { launch_dependents(); }

/// What 64 tokens of a tile show: bit i, is token i held, and seen by somebody? page: of lane i, of tokens
/// 16 i to 16 i + 15. All lanes of a warp.
template <class Pair>
__device__ __forceinline__ std::uint64_t shown_of_tile(const cache_part<Pair>& part, int sequence,
                                                       const sequence_cut& cut, int first, int count,
                                                       int page, int lane) {
    constexpr unsigned all = (1u << latent_tile / slice_tokens) - 1u;
    if (count >= latent_tile && part.cache.first_token + first >= cut.end &&
        (__ballot_sync(0xffffffffu, page >= 0) & all) == all)
        return ~std::uint64_t{0};
    unsigned own = 0;
    if (lane < latent_tile / slice_tokens && page >= 0) {
        const int at = first + lane * slice_tokens;
        const shown_tokens s = shown_at(part.cuts, sequence, cut, part.cache.first_token + at, slice_tokens);
        const int end = kvq::detail::smaller(s.end, kvq::detail::larger(count - lane * slice_tokens, 0));
        own = ((1u << end) - 1u) & ~((1u << s.begin) - 1u);
    }
    const auto slice = [&](int i) { return __shfl_sync(0xffffffffu, own, i); };
    const unsigned low = slice(0) | slice(1) << 16, high = slice(2) | slice(3) << 16;
    return static_cast<std::uint64_t>(high) << 32 | low;
}

inline constexpr int merge_latents_threads = 128;

/// Merges the pieces of rows and writes them; see finish_channels. So many warps of a thread block share a
/// row of a sequence: few rows would otherwise be merged by few multiprocessors, since thread blocks take
/// their places where others have ended first.
template <int RowWarps, class Args>
__global__ void __launch_bounds__(merge_latents_threads)
    merge_latents_kernel(const __grid_constant__ Args args) {
    constexpr int dim = Args::first_pair::value_dim, own = dim % 128 == 0 ? 4 : 2,
                  steps = ceil_div(dim, 32 * own * RowWarps),
                  batch = kvq::detail::larger(1, 8 / steps);  // pieces that are read at once
    wait_for_predecessor();
    launch_dependents();
    const auto& a = args.a;
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32,
              sequence = static_cast<int>(blockIdx.y),
              row = static_cast<int>(blockIdx.x) * (merge_latents_threads / 32 / RowWarps) + warp / RowWarps,
              first_step = warp % RowWarps * steps;
    if (row >= a.rows) return;  // all warps of it
    const int row_block = row / args.block_rows, of_block = row - row_block * args.block_rows,
              item = sequence * args.row_blocks + row_block;
    const share_bounds bounds = args.bounds[item];
    const int token = a.row_token(sequence, row), head = a.row_head(0, row);
    struct alignas(own * sizeof(float)) numbers {
        float x[own];
    };
    float top = -INFINITY, sum = 0.0f, output[steps][own] = {};
    const auto channel_of = [&](int step) { return ((first_step + step) * 32 + lane) * own; };
    const auto raise = [&](float high) {
        const float factor = top == -INFINITY ? 0.0f : exp2_fast(top - high);
        sum *= factor;
#pragma unroll
        for (int i = 0; i < steps; ++i)
#pragma unroll
            for (int k = 0; k < own; ++k) output[i][k] *= factor;
        top = high;
    };
#pragma unroll 1
    for (int first = bounds.first; first <= bounds.last; first += batch) {
        const int count = kvq::detail::smaller(batch, bounds.last - first + 1);
        // Of piece `first + lane`.
        float2 header = {-INFINITY, 0.0f};
        if (lane < count)
            header = *reinterpret_cast<const float2*>(args.state(item + first + lane, of_block));
        numbers v[batch][steps] = {};
#pragma unroll
        for (int k = 0; k < batch; ++k) {
            if (k >= count) break;
            const float* const state = args.state(item + first + k, of_block) + state_header;
#pragma unroll
            for (int i = 0; i < steps; ++i)
                if (channel_of(i) < dim) v[k][i] = *reinterpret_cast<const numbers*>(state + channel_of(i));
        }
        float high = header.x;
#pragma unroll
        for (int step = batch / 2; step > 0; step /= 2)
            high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, step));
        raise(fmaxf(top, __shfl_sync(0xffffffffu, high, 0)));
        const float factor = header.x == -INFINITY ? 0.0f : exp2_fast(header.x - top);
#pragma unroll
        for (int k = 0; k < batch; ++k) {
            const float own_factor = __shfl_sync(0xffffffffu, factor, k);
            sum = fmaf(__shfl_sync(0xffffffffu, header.y, k), own_factor, sum);
#pragma unroll
            for (int i = 0; i < steps; ++i)
#pragma unroll
                for (int c = 0; c < own; ++c) output[i][c] = fmaf(v[k][i].x[c], own_factor, output[i][c]);
        }
    }
    if (args.sink_logits != nullptr) {
        const std::size_t at = static_cast<std::size_t>(token) * static_cast<std::size_t>(a.q.heads) +
                               static_cast<std::size_t>(head);
        // Of a row that sees no token here, and has seen some before.
        const float before = a.state_in == nullptr ? -INFINITY : a.state_in[at * (dim + 2)];
        if (fmaxf(top, before) != -INFINITY) {
            const float sink = sink_score(args.sink_logits[head]);
            raise(fmaxf(top, sink));
            sum += exp2_fast(sink - top);
        }
    }
#pragma unroll
    for (int i = 0; i < steps; ++i)
        if (channel_of(i) < dim) finish_channels(a, token, head, channel_of(i), top, sum, output[i]);
    if constexpr (RowWarps > 1)
        wait_at_barrier(1 + warp / RowWarps, 32 * RowWarps);
    else
        __syncwarp();
    if (first_step == 0 && lane == 0) finish_header(a, token, head, top, sum);
}

}}}  // namespace kvq::cuda::detail
