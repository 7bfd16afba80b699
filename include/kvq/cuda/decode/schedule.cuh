// Who does what: all warp tiles of all sequences, heads and row blocks in one line, cut into equal shares,
// one per team of warps.
//
//   item      (sequence, kv head, block of query rows); its warp tiles follow each other in the line
//   team      all warps of a thread block, or a half or a quarter of them where there are many items: the end
//             of an item, where its warps wait for each other, comes half or a quarter as often
//   share     warp tiles [W * i / n, W * (i + 1) / n) of team i of n; touches a few items, most of them whole
//   warp w    of a team takes warp tiles w, w + warps, ... of the team's part of an item
//
// The lengths of the sequences are read on the device, so a captured graph stays valid while they grow. An
// item that spans several shares leaves one partial softmax state per share; who has the last one merges
// them, in token order. A sequence without tokens counts as one warp tile, so that its output is written too.
// Contract: shares differ by at most one warp tile (in ragged batches with what ends of items count); the
// result does not depend on the order in which blocks run.
#pragma once

#include "../layout/warp_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// a / b for a >= 0, b > 0. Launches begin with a chain of divisions; most numbers are small enough for
/// floats.
__device__ __forceinline__ int divide(int a, int b) {
    if ((a | b) >> 22) return a / b;
    const int q = static_cast<int>(static_cast<float>(a) * reciprocal(static_cast<float>(b)));
    const int rest = a - q * b;  // off by one at most
    return q + (rest >= b) - (rest < 0);
}
__device__ __forceinline__ int divide_up(int a, int b) { return divide(a + b - 1, b); }

/// How many tokens of a sequence no span shows (page_cuts.hpp). Feeds of pages look it up where it is asked
/// for, since registers are few.
struct skipped_tokens {
    int count = 0;
    __device__ __forceinline__ int skipped() const { return count; }
};

/// What a query sees through the window of a layer (page/key_window.hpp).
struct row_window {
    int tokens = 0;        // 0: all
    unsigned inverse = 0;  // of chunks of `tokens` tokens: 2^32 / tokens, rounded up; 0: a sliding window

    row_window() = default;
    /// A chunk of one token is a sliding window of one.
    row_window(int of_tokens, bool chunked)
        : tokens(smaller(of_tokens, most_tokens)),
          inverse(chunked && tokens > 1 ? 0xffffffffu / static_cast<unsigned>(tokens) + 1u : 0u) {}
    /// The first paged position that the query at this one sees, if tokens are not 0. Chunks are counted
    /// without the skipped tokens of the sequence. No branch: one is slower for sliding windows.
    template <class Cuts>
    __device__ __forceinline__ int first_seen(int query, const Cuts& cuts) const {
        const auto at = static_cast<unsigned>(query - cuts.skipped());
        int rest = static_cast<int>(at - __umulhi(at, inverse) * static_cast<unsigned>(tokens));
        rest += rest < 0 ? tokens : 0;  // the quotient may be one too large
        return query - (inverse == 0 ? tokens - 1 : rest);
    }
};

/// What the schedule must know about a call.
struct work_shape {
    const int* tokens;  // [sequences]
    int sequences;
    int lines;  // items of a sequence: kv_heads * row_blocks
    int row_blocks;
    int first_token;  // position of the first token of this format's first page
    int capacity;     // tokens that the block table can name
    int query_tokens;
    int oldest;  // queries are at positions from length - oldest on
    row_window window;

    struct span {
        int first, count;  // warp tiles; count is at least 1
        int real;          // warp tiles that exist
    };
    /// Where the tokens of sequence b that this format may hold end, counted from first_token.
    __device__ __forceinline__ int end(int b) const { return smaller(tokens[b] - first_token, capacity); }
    /// The first one that some query sees.
    __device__ __forceinline__ int begin(int length) const {
        if (window.tokens == 0) return 0;
        return larger(0, window.first_seen(length - oldest, skipped_tokens{}) - first_token);
    }
    /// hint: while the previous launch may still write lengths; what is read then stays out of the
    /// first-level cache.
    __device__ __forceinline__ int length(int b, bool hint) const {
        return hint ? __ldcg(tokens + b) : tokens[b];
    }
    /// Calls f with what warp tiles of a sequence depend on besides its length, if launches may write it.
    template <class F>
    __device__ __forceinline__ void for_each_other(int, F&&) const {}
    /// Warp tiles of a sequence that hold a token that some query sees.
    template <int Tokens>
    __device__ __forceinline__ span warp_tiles(int, int of_length) const {
        const int end = smaller(of_length - first_token, capacity);
        const int first = begin(of_length) / Tokens;
        const int real = ceil_div(larger(end, 0), Tokens) - first;
        return {first, larger(1, real), real};
    }
};

/// Warps of a thread block that share items.
struct warp_team {
    int index;   // of the team, in its block
    int warps;   // of the team
    int member;  // the warp's number in its team
    int share;   // the team's
    int teams;   // of the grid

    warp_team() = default;
    /// 1 << split teams in a block of so many warps.
    __device__ __forceinline__ warp_team(int warp, int block_warps, int split)
        : index((warp << split) / block_warps),
          warps(block_warps >> split),
          member(warp - index * warps),
          share((static_cast<int>(blockIdx.x) << split) + index),
          teams(static_cast<int>(gridDim.x) << split) {}
    __device__ __forceinline__ int threads() const { return warps * warp_size; }
    /// Warps that take different warp tiles, and the number of the warp among them, where neighbours have the
    /// bands of the same ones (channel_bands.cuh).
    __device__ __forceinline__ int takers(int bands) const { return warps / bands; }
    __device__ __forceinline__ int taker(int bands) const { return member / bands; }
    /// The thread's number in its team.
    __device__ __forceinline__ int thread() const {
        return member * warp_size + static_cast<int>(threadIdx.x) % warp_size;
    }
    /// Waits for all threads of the team.
    __device__ __forceinline__ void wait() const { wait_at_barrier(1 + index, threads()); }
};

/// The part of one item that a team handles.
struct item_part {
    int sequence;
    int line;  // kv_head * row_blocks + row_block
    int kv_head, row_block;
    int begin;     // of the item, in the line of all warp tiles
    int count;     // warp tiles of the item, and what its end counts
    int first;     // warp tile of the sequence with which the item begins
    int real;      // warp tiles that exist: 0 or less where count is 1 for an empty sequence
    int from, to;  // the team's warp tiles, relative to `first`

    /// A sequence without tokens has one warp tile as well.
    __device__ __forceinline__ int warp_tiles() const { return larger(1, real); }
    __device__ __forceinline__ bool is_whole() const { return from == 0 && has_end(); }
    __device__ __forceinline__ bool has_end() const { return to == warp_tiles(); }
};

/// Where a walk over the items of a share stands.
struct walk_state {
    int share_begin, share_end;
    int end_counts;  // the end of an item counts like so many warp tiles, which follow it in the line
    int item_size;   // warp tiles that every item takes in the line; 0: its own and end_counts
    item_part item;
};

/// Walks the items of a share. Work: work_shape, or the type with the warp tiles of several formats
/// (attend_mixed.cuh).
template <int Tokens, class Work = work_shape>
struct item_walk : walk_state {
    const Work& work;
    __device__ __forceinline__ explicit item_walk(const Work& w) : walk_state{}, work(w) {}
    /// Parks the state in shared memory, where it costs no registers, and fetches it again. All lanes of a
    /// warp.
    __device__ __forceinline__ void park(walk_state* at) const {
        __syncwarp();
        if (threadIdx.x % warp_size == 0) *at = *this;
        __syncwarp();
    }
    __device__ __forceinline__ void fetch(const walk_state* at) { static_cast<walk_state&>(*this) = *at; }

    __device__ __forceinline__ bool done() const { return item.begin >= share_end; }
    __device__ __forceinline__ void clip() {
        item.from = smaller(larger(share_begin - item.begin, 0), item.warp_tiles());
        item.to = smaller(share_end - item.begin, item.warp_tiles());
    }
    /// Which warp tiles the item's sequence has. hint: while the previous launch may still write lengths.
    __device__ __forceinline__ void measure(bool hint = false) {
        const auto span = work.template warp_tiles<Tokens>(item.sequence, work.length(item.sequence, hint));
        item.first = span.first;
        item.real = span.real;
        item.count = item_size > 0 ? item_size : span.count + end_counts;
    }
    /// hint: as measure().
    __device__ __forceinline__ void next(bool hint = false) {
        item.begin += item.count;
        if (++item.row_block == work.row_blocks) {
            item.row_block = 0;
            ++item.kv_head;
        }
        if (++item.line == work.lines) {
            item.line = item.kv_head = 0;
            ++item.sequence;
            if (!done() && item.sequence < work.sequences) measure(hint);
        }
        clip();
    }
};

/// How the line is cut; the same for all teams. Where sequences have about the same number of warp tiles,
/// each item takes as many as the longest one, and cuts fall on items: `unit` warp tiles (an item, or a few
/// whole ones) make `parts` shares. Otherwise the whole line is one unit.
struct share_plan {
    int shares;  // teams that get some
    int unit, parts;
    int size, longer;  // of a share of a unit: the first `longer` ones have one warp tile more

    __device__ __forceinline__ share_plan(int units, int unit_warp_tiles, int parts_of_unit)
        : shares(units * parts_of_unit), unit(unit_warp_tiles), parts(parts_of_unit) {
        size = parts == 1 ? unit : divide(unit, parts);
        longer = unit - size * parts;
    }
    /// Where part `part` of unit `whole` begins; part `parts` is the next unit's first.
    __device__ __forceinline__ int begin(int whole, int part) const {
        return whole * unit + part * size + smaller(part, longer);
    }
    __device__ __forceinline__ int begin(int share) const {
        const int whole = divide(share, parts);
        return begin(whole, share - whole * parts);
    }
    /// Items are not longer than `most` warp tiles: is the longest share shorter than those of `even` warp
    /// tiles would be, which begin and end within items? An end of an item counts like end_counts warp tiles,
    /// a cut within one like an end.
    __device__ __forceinline__ bool pays(int most, int end_counts, int even) const {
        const int items = larger(1, divide(unit, most));  // of a unit
        if (parts > 1 && items > 1) return false;
        return size + (longer > 0) + items * end_counts <= even + 2 * end_counts;
    }
    /// The share that holds a warp tile.
    __device__ __forceinline__ int holder(int warp_tile) const {
        const int whole = divide(warp_tile, unit), rest = warp_tile - whole * unit,
                  in_longer = longer * (size + 1);
        return whole * parts + (rest < in_longer ? divide(rest, size + 1)
                                                 : longer + divide(rest - in_longer, larger(size, 1)));
    }
};

/// Shares for `items` items of equal size, from numbers on the host: each item makes up to `parts` shares, or
/// `each` items make one; both 0: cuts cannot fall on items without leaving more than an eighth of the teams
/// idle.
struct item_shares {
    int split = 0;  // 1 << split teams in a thread block
    int parts = 0, each = 0;
    bool few = false;  // one share per item and round leaves teams idle, whatever the number of warp tiles

    item_shares() = default;
    /// A block can have up to most_teams, a power of two. As many are taken as items keep busy.
    item_shares(int items, int blocks, int most_teams) {
        while (2 << split <= most_teams && 8LL * items >= 7LL * (2 * blocks << split)) ++split;
        const int teams = blocks << split;
        if (items <= teams) {
            parts = teams / items;
            few = items * parts * 8 < teams * 7;
        } else {
            const int fit = ceil_div(items, teams);
            if (items % fit == 0 && items / fit * 8 >= teams * 7) each = fit;
        }
    }
    /// The plan for items of `count` warp tiles, of which a share handles `warps` at a time. Fewer shares
    /// leave fewer partial states, so no more are taken than make the work shorter.
    __device__ __forceinline__ share_plan plan(int items, int count, int teams, int warps) const {
        if (parts > 0) {
            const int rounds = divide_up(count, parts * warps);
            if (rounds == 1 || !few) return {items, count, divide_up(count, rounds * warps)};
        }
        if (each > 0) return {divide(items, each), count * each, 1};
        return {1, items * count, smaller(teams, items * count)};
    }
};

/// Warp tiles of all sequences; lane i adds up sequences [from, to).
struct batch_count {
    int from, to, sum;
    int first;  // of the first sequence
    int most;   // of the longest sequence
    bool same;  // are all alike?
};
/// The numbers from which a warp has found its share while the previous launch might still have written them:
/// lengths, and what work.for_each_other() names. In shared memory of the warp.
struct found_numbers {
    int* of_lane;  // of the lane's sequences, 32 apart
    int most;      // of a lane

    __device__ __forceinline__ found_numbers(std::byte* memory, int bytes)
        : of_lane(reinterpret_cast<int*>(memory) + static_cast<int>(threadIdx.x) % warp_size),
          most(bytes / (4 * warp_size)) {}
    __device__ __forceinline__ void keep(int number, int value) const {
        if (number < most) of_lane[number * warp_size] = value;
    }
    /// Are they what they were? Where memory has no room for all: false. All lanes.
    template <class Work>
    __device__ __forceinline__ bool hold(const Work& work, const batch_count& n) const {
        bool same = true;
        int number = 0;
        const auto compare = [&](int value) {
            same = same && number < most && value == of_lane[number * warp_size];
            ++number;
        };
#pragma unroll 2
        for (int b = n.from; b < n.to; ++b) {
            compare(work.length(b, false));  // from here on in the first-level cache
            work.for_each_other(b, compare);
        }
        return __all_sync(~0u, same);
    }
};

template <int Tokens, class Work>
__device__ __forceinline__ batch_count count_warp_tiles(const Work& work, bool hint,
                                                        const found_numbers& found) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const int each = ceil_div(work.sequences, warp_size);
    batch_count n{};
    n.from = smaller(lane * each, work.sequences);
    n.to = smaller(n.from + each, work.sequences);
    int first = 0;  // of the lane's sequences
    int number = 0;
    n.same = true;
#pragma unroll 1
    for (int b = n.from; b < n.to; ++b) {
        const int length = work.length(b, hint);
        found.keep(number++, length);
        work.for_each_other(b, [&](int value) { found.keep(number++, value); });
        const int count = work.template warp_tiles<Tokens>(b, length).count;
        if (b == n.from) first = count;
        n.sum += count;
        n.most = larger(n.most, count);
        n.same = n.same && count == first;
    }
    n.first = __shfl_sync(~0u, first, 0);
    n.same = n.same && (n.from == n.to || first == n.first);
    n.same = __all_sync(~0u, n.same);
    n.most = n.same ? n.first : __reduce_max_sync(~0u, n.most);
    return n;
}

/// How many teams a thread block has: 1 << the result. An item that is much longer than a share of a small
/// team would make too many parts, which the small team with the last one merges.
template <int Tokens, class Work>
__device__ __forceinline__ int split_block(const item_walk<Tokens, Work>& walk, const item_shares& cut,
                                           const batch_count& n) {
    if (n.same || cut.split == 0) [[likely]]
        return cut.split;
    const long long total = 1LL * __reduce_add_sync(~0u, n.sum) * walk.work.lines,
                    shares = 1LL * static_cast<int>(gridDim.x) << cut.split;
    return n.most * shares <= 4 * total ? cut.split : 0;
}

/// Finds where the share of a team begins. Every warp does it for itself: no barrier. end_counts: for
/// sequences of different lengths, since shares of short ones would have more ends of items than others.
template <int Tokens, class Work>
__device__ __forceinline__ share_plan find_share(const Work& work, const item_shares& cut,
                                                 const warp_team& team, int takers, int end_counts,
                                                 const batch_count& n, item_walk<Tokens, Work>& walk,
                                                 bool hint) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const int share = team.share;
    item_part& item = walk.item;
    const auto start = [&] {
        item.kv_head = work.row_blocks == 1 ? item.line : item.line / work.row_blocks;
        item.row_block = item.line - item.kv_head * work.row_blocks;
        walk.measure(hint);
        walk.clip();
    };
    const auto skip_empty = [&] {
        if (item.from < item.warp_tiles()) return;  // otherwise the share before has them
        walk.next(hint);
        if (walk.done()) walk.share_begin = walk.share_end;
    };
    walk.end_counts = 0;
    walk.item_size = 0;
    const int items = work.sequences * work.lines,
              all = n.same ? 0 : (__reduce_add_sync(~0u, n.sum) + work.sequences * end_counts) * work.lines;
    // Where one sequence is much longer than others, there are fewer teams than `cut` counts (split_block).
    const auto plan_of_items = cut.plan(items, n.most, team.teams, takers);
    if (n.same || (plan_of_items.shares <= team.teams &&
                   plan_of_items.pays(n.most, end_counts, divide_up(all, team.teams)))) {
        const share_plan plan = plan_of_items;
        walk.item_size = n.most;
        item.begin = 0;
        walk.share_begin = walk.share_end = 0;
        if (share >= plan.shares) return plan;
        const int whole = plan.parts == 1 ? share : divide(share, plan.parts),
                  part = share - whole * plan.parts;
        walk.share_begin = plan.begin(whole, part);
        walk.share_end = plan.begin(whole, part + 1);
        const int index = plan.unit == n.most ? whole : divide(walk.share_begin, n.most);
        item.sequence = divide(index, work.lines);
        item.line = index - item.sequence * work.lines;
        item.begin = index * n.most;
        start();
        skip_empty();
        return plan;
    }
    walk.end_counts = end_counts;
    const int sum = (n.sum + (n.to - n.from) * walk.end_counts) * work.lines;
    int before = sum;
#pragma unroll
    for (int step = 1; step < warp_size; step *= 2) {
        const int other = __shfl_up_sync(~0u, before, step);
        if (lane >= step) before += other;
    }
    const int total = __shfl_sync(~0u, before, warp_size - 1);
    before -= sum;
    const share_plan plan{1, total, smaller(team.teams, ceil_div(total, takers))};
    item.begin = 0;
    walk.share_begin = walk.share_end = 0;
    if (share >= plan.shares) return plan;
    walk.share_begin = plan.begin(0, share);
    walk.share_end = plan.begin(0, share + 1);
    // The lane whose sequences hold the share's first warp tile finds the item and tells the others.
    int sequence = 0, line = 0, begin = 0;
    const bool mine = walk.share_begin >= before && walk.share_begin < before + sum;
    if (mine) {
#pragma unroll 1
        for (int b = n.from; b < n.to; ++b) {
            const int count =
                work.template warp_tiles<Tokens>(b, work.length(b, hint)).count + walk.end_counts;
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
    item.sequence = __shfl_sync(~0u, sequence, source);
    item.line = __shfl_sync(~0u, line, source);
    item.begin = __shfl_sync(~0u, begin, source);
    start();
    skip_empty();
    return plan;
}

}}}  // namespace kvq::cuda::detail
