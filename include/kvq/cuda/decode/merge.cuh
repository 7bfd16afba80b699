// From the warps' softmax states to the output: merged within a team, then across the teams of an item.
//
//   state {max, sum, output}: max = max of maxes, sum and output = those of the parts times 2^(max of the
//     part - max)
//
// A team that handled a whole item writes its rows, or sends them to all ranks that share the sequences
// (state_exchange.cuh). Otherwise it leaves a partial state in the workspace; the team with the item's last
// part merges all of them in token order when its share is done. Every word of a state says itself whether it
// has arrived, so nothing is fenced or counted. A team waits for shares of lower numbers only: of its block,
// or of blocks dispatched before it. Loops that need no constants are not unrolled: code that runs once per
// share waits for its instructions.
// Contract: the order of additions is fixed by the shares. `Memory` is attention_memory<...>.
// Source: words that carry their own flag are the "LL" protocol of NCCL; waiting for lower numbers: decoupled
// look-back (CUB).
#pragma once

#include "../layout/transform_row.cuh"
#include "score_modifiers.cuh"
#include "value_product.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// The shares that have a part of an item.
struct share_span {
    int from, to;        // first and last
    int from_is_second;  // the item is the second one that share `from` has a part of
};
__device__ __forceinline__ share_span find_span(const share_plan& plan, const item_part& item) {
    const int from = plan.holder(item.begin);
    return {from, plan.holder(item.begin + item.warp_tiles() - 1), plan.begin(from) != item.begin};
}

/// What a team notes for the end of its share.
struct merge_note {
    int pending;  // does it merge an item?
    share_span span;
    item_part item;
    int begin_row, end_row;  // by number: those that it sends to all ranks

    __device__ __forceinline__ void clear() { pending = begin_row = end_row = 0; }
};

/// What the warps of a team share, in shared memory.
struct team_memory {
    float* output;  // [parts][output_part], each [rows][output_stride]; before, the query of the item at hand
    int parts;      // that add up to the output
    float *max, *sum;  // [rows] of the merged state
    float* warp_max;   // [warps of the team][rows]
    float* warp_sum;
    unsigned* warp_bad;  // [warps of the team] bit per row: has the warp met values that are not finite?
    merge_note* later;

    /// In a block's shared memory, behind what warps have for themselves.
    template <class Memory>
    static __device__ __forceinline__ team_memory of(std::byte* shared, const warp_team& team) {
        constexpr int warps = Memory::warps, rows = Memory::rows, most = Memory::most_teams;
        static_assert(sizeof(merge_note) <= 4 * Memory::note_words);
        float* const outputs = reinterpret_cast<float*>(shared + warps * Memory::warp_bytes);
        float* const notes = outputs + Memory::output_bytes / 4;
        float* const states = notes + most * Memory::note_words;
        float* const of_warps = states + 2 * most * rows;
        const int parts = most * team.warps / warps, first = team.index * team.warps;
        return {outputs + team.index * parts * Memory::output_part,
                parts,
                states + 2 * team.index * rows,
                states + (2 * team.index + 1) * rows,
                of_warps + first * rows,
                of_warps + (warps + first) * rows,
                reinterpret_cast<unsigned*>(of_warps + 2 * warps * rows) + first,
                reinterpret_cast<merge_note*>(notes + team.index * Memory::note_words)};
    }
};

/// Merges the warps' states into `to`; sums of bad rows are NaN where there is a token to see. All threads of
/// the team.
template <class Memory, int Rows4, int Tiles>
__device__ __forceinline__ void merge_warps(const finished_rows<Tiles, Rows4>& state, const team_memory& to,
                                            const warp_team& team, const lane_id& id) {
    constexpr int rows = Memory::rows;
    const int band = team.member % Memory::bands;
    if (id.g == 0)
#pragma unroll
        for (int n = 0; n < Rows4; ++n) {
            const int at = team.member * rows + lane_row<Rows4>(n, id.t);
            to.warp_max[at] = state.max[n];
            to.warp_sum[at] = band == 0 ? state.sum[n] : 0.0f;  // all bands have the same
        }
    team.wait();  // from here on no warp needs the query
    unsigned bad = 0;
    if (team.member == 0) bad = __reduce_or_sync(~0u, id.lane < team.warps ? to.warp_bad[id.lane] : 0u);
    // Lane (g, t) looks at warps g, g + 8, ... of its rows.
    float factor[Rows4];
#pragma unroll
    for (int n = 0; n < Rows4; ++n) {
        const int row = lane_row<Rows4>(n, id.t);
        constexpr int each = ceil_div(Memory::warps, 8);
        float m[each], top = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const int w = id.g + 8 * i;
            m[i] = w < team.warps ? to.warp_max[w * rows + row] : -INFINITY;
            top = fmaxf(top, m[i]);
        }
        top = over_tokens(top, max_floats{});
#pragma unroll
        for (int i = 0; i < each; ++i)
            if (m[i] > -INFINITY) sum += to.warp_sum[(id.g + 8 * i) * rows + row] * exp2_fast(m[i] - top);
        sum = over_tokens(sum, add_floats{});
        factor[n] = kept(state.max[n], top);
        if (team.member == 0 && id.g == 0) {
            to.max[row] = top;
            to.sum[row] = (bad >> row & 1u) != 0 && top > -INFINITY ? NAN : sum;
        }
    }
    // The warps of a part add to it in turn, the last ones first, those of all bands together; parts are
    // added when they are read.
    constexpr int turns = Memory::warps / (Memory::most_teams * Memory::bands);
    const int taker = team.taker(Memory::bands);
#pragma unroll 1
    for (int turn = turns - 1; turn >= 0; --turn) {
        if (taker % turns == turn) {
            float* const part = to.output + taker / turns * Memory::output_part;
#pragma unroll
            for (int n = 0; n < Rows4; ++n)
#pragma unroll
                for (int tile = 0; tile < Tiles; ++tile) {
                    const int channel = 32 * tile + 4 * id.g;
                    if (channel < Memory::values::dim) {
                        float4* const at = reinterpret_cast<float4*>(
                            part + lane_row<Rows4>(n, id.t) * Memory::output_stride +
                            band * Memory::values::dim + channel);
                        float4 v = turn == turns - 1 ? float4{0.0f, 0.0f, 0.0f, 0.0f} : *at;
                        v.x = fmaf(state.output[tile][n][0], factor[n], v.x);
                        v.y = fmaf(state.output[tile][n][1], factor[n], v.y);
                        v.z = fmaf(state.output[tile][n][2], factor[n], v.z);
                        v.w = fmaf(state.output[tile][n][3], factor[n], v.w);
                        *at = v;
                    }
                }
        }
        team.wait();
    }
}

/// Rows of a warp whose values are behind a transform, as outputs. All lanes.
template <class Pair, class T, int Tiles, int Rows4>
__device__ __forceinline__ finished_rows<Tiles, Rows4> restored(
    finished_rows<Tiles, Rows4> rows, [[maybe_unused]] const attention_args<Pair, T>& a,
    [[maybe_unused]] int head) {
    if constexpr (has_transform<typename Pair::values>) {
        using channels = row_layout<2, 3, 2>;
        static_for<Rows4>([&](auto number) {
            constexpr int n = decltype(number)::value;
            float x[4 * Tiles];
#pragma unroll
            for (int i = 0; i < 4 * Tiles; ++i) x[i] = rows.output[i / 4][n][i % 4];
            restore_row<channels, Pair::value_dim, float>(x, transform_of<tensor::value>(a.cache), head);
#pragma unroll
            for (int i = 0; i < 4 * Tiles; ++i) rows.output[i / 4][n][i % 4] = x[i];
        });
    }
    return rows;
}

/// Four channels of a row: the sum of the parts.
template <class Memory>
__device__ __forceinline__ float4 read_output(const team_memory& state, int parts, int row, int channel) {
    float4 sum{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < Memory::most_teams; ++i) {
        float4 v{0.0f, 0.0f, 0.0f, 0.0f};
        if (i < parts)
            v = *reinterpret_cast<const float4*>(state.output + i * Memory::output_part +
                                                 row * Memory::output_stride + channel);
        sum = {sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w};
    }
    return sum;
}

/// Learned sinks become a part of the states of an item's rows. All threads of the team.
template <class Memory, class Pair, class T, class Score>
__device__ __forceinline__ void add_sinks(const attention_args<Pair, T>& a, const Score& score,
                                          const item_part& item, const team_memory& state, int parts,
                                          const warp_team& team) {
    const int first_row = item.row_block * Memory::rows;
    const int rows = smaller(Memory::rows, a.rows - first_row);
    const auto add = [&](int row, float& max, float& sum) {
        return add_sink(score.sink_logit(a.row_head(item.kv_head, first_row + row)), max, sum);
    };
#pragma unroll 1
    for (int i = team.thread(); i < rows * Pair::value_dim; i += team.threads()) {
        const int row = i / Pair::value_dim, channel = i % Pair::value_dim;
        float max = state.max[row], sum = state.sum[row];
        const float factor = add(row, max, sum);
        for (int p = 0; p < parts; ++p)
            state.output[p * Memory::output_part + row * Memory::output_stride + channel] *= factor;
    }
    team.wait();
#pragma unroll 1
    for (int row = team.thread(); row < rows; row += team.threads())
        (void)add(row, state.max[row], state.sum[row]);
    team.wait();
}

/// Writes the rows of a finished item, or sends them to all ranks. All threads of the team.
template <class Memory, class Pair, class T, class Score>
__device__ __forceinline__ void write_rows(const attention_args<Pair, T>& a, const Score& score,
                                           const item_part& item, const team_memory& state, int parts,
                                           const warp_team& team) {
    const int kv_head = item.kv_head;
    const int first_row = item.row_block * Memory::rows;
    const int rows = smaller(Memory::rows, a.rows - first_row);
    if constexpr (has_sinks<Score>) add_sinks<Memory>(a, score, item, state, parts, team);
    if constexpr (exchanges<Score>)
        if (score.exchange.ranks > 0) {
            const int first = a.row_number(item);
#pragma unroll 1
            for (int row = team.member; row < rows; row += team.warps)
                score.exchange.send(first + first_row + row, team.thread() % warp_size, [&](int vector) {
                    return vector == 0 ? float4{state.max[row], state.sum[row], 0.0f, 0.0f}
                                       : read_output<Memory>(state, parts, row, 4 * (vector - 1));
                });
            return;
        }
#pragma unroll 1
    for (int i = team.thread(); i < rows * Pair::value_dim / 4; i += team.threads()) {
        const int row = i / (Pair::value_dim / 4), channel = i % (Pair::value_dim / 4) * 4;
        const float4 v = read_output<Memory>(state, parts, row, channel);
        float output[4] = {v.x, v.y, v.z, v.w};
        finish_channels(a, a.row_token(item.sequence, first_row + row), a.row_head(kv_head, first_row + row),
                        channel, state.max[row], state.sum[row], output);
    }
    if (a.state_out) {
        team.wait();
#pragma unroll 1
        for (int row = team.thread(); row < rows; row += team.threads())
            finish_header(a, a.row_token(item.sequence, first_row + row),
                          a.row_head(kv_head, first_row + row), state.max[row], state.sum[row]);
    }
}

template <class Memory, class Pair, class T>
__device__ __forceinline__ std::uint32_t* partial_state(const attention_args<Pair, T>& a, int slot) {
    return a.partials + static_cast<std::size_t>(slot) * static_cast<std::size_t>(Memory::partial_words);
}

/// Leaves the team's part of an item in the workspace. All threads of the team.
template <class Memory, class Pair, class T>
__device__ __forceinline__ void write_partial(const attention_args<Pair, T>& a, const team_memory& state,
                                              bool first_of_share, const warp_team& team) {
    constexpr int rows = Memory::rows, dim = Pair::value_dim;
    std::uint32_t* const mine = partial_state<Memory>(a, 2 * team.share + (first_of_share ? 0 : 1));
#pragma unroll 1
    for (int i = team.thread(); i < rows * dim / 4; i += team.threads()) {
        const int row = i / (dim / 4), channel = i % (dim / 4) * 4;
        store_relaxed(reinterpret_cast<uint4*>(mine + 2 * rows) + i,
                      sealed(read_output<Memory>(state, state.parts, row, channel)));
    }
#pragma unroll 1
    for (int i = team.thread(); i < rows; i += team.threads()) {
        store_relaxed(mine + i, sealed(state.max[i]));
        store_relaxed(mine + rows + i, sealed(state.sum[i]));
    }
}

/// Likewise; the team that has the item's last part notes that it merges all of them.
template <class Memory, class Pair, class T>
__device__ __forceinline__ void leave_part(const attention_args<Pair, T>& a, const team_memory& state,
                                           bool first_of_share, const item_part& item, const share_span& span,
                                           const warp_team& team) {
    write_partial<Memory>(a, state, first_of_share, team);
    if (!item.has_end() || team.thread() > 0) return;
    state.later->pending = 1;
    state.later->span = span;
    state.later->item = item;
}

/// Merges all parts of an item, as they arrive in the workspace, in token order, writes its rows, and leaves
/// zeros. All threads of the team that has the item's last part, when they have nothing else to do.
template <class Memory, class Pair, class T, class Score>
__device__ __forceinline__ void merge_parts(const attention_args<Pair, T>& a, const Score& score,
                                            const team_memory& state, const warp_team& team) {
    constexpr int rows = Memory::rows, dim = Pair::value_dim;
    const share_span span = state.later->span;
    const int from = span.from, count = span.to - from + 1, second = span.from_is_second;
    const auto part = [&](int i) { return partial_state<Memory>(a, 2 * (from + i) + (i == 0 ? second : 0)); };
    // A row belongs to `width` neighbouring lanes; each takes every so-manieth group of 4 channels. Small
    // teams take some rows after the other; with twice as many threads as rows need, and memory for two
    // outputs, there are two sets, which take turns with the parts. All loads of a step are under way
    // together; those of parts that have not arrived are repeated.
    constexpr int width = smaller(warp_size, 128 / rows), groups = ceil_div(dim / 4, width);
    constexpr int at_once = larger(1, smaller(8 / groups, width / 2));  // parts of a set
    static_assert(2 * at_once <= width && dim % 4 == 0);
    const int lines = team.threads() / width, sets = Memory::most_teams >= 2 && lines >= 2 * rows ? 2 : 1,
              at_a_time = smaller(lines, rows);
    const int line = team.thread() / width, lane = team.thread() % width;
    const int set = line / rows;  // the second one where lines are too few for rows
#pragma unroll 1
    for (int first_row = 0; first_row < rows; first_row += at_a_time) {
        const int row = first_row + line - set * rows;
        const bool active = set < sets && row < rows;
        const int own_row = active ? row : 0;
        float top = -INFINITY, sum = 0.0f;
        float4 output[groups] = {};
#pragma unroll 1
        for (int begin = 0; begin < count; begin += at_once * sets) {
            // Max and sum of a part per lane; they are read by all sets and zeroed below.
            const bool has_own = lane < at_once * sets && begin + lane < count;
            const std::uint32_t* const own = part(smaller(begin + lane, count - 1)) + own_row;
            std::uint32_t m_word = 0, l_word = 0;
            // Outputs: each word is read by one thread, which then zeroes it.
            uint4 v[at_once][groups] = {};
            uint4* from_part[at_once];
            bool wanted[at_once][groups];
#pragma unroll
            for (int k = 0; k < at_once; ++k) {
                const int p = begin + k * sets + set;
                from_part[k] = reinterpret_cast<uint4*>(part(p) + 2 * rows + own_row * dim) + lane;
#pragma unroll
                for (int i = 0; i < groups; ++i)
                    wanted[k][i] = active && p < count && (i * width + lane) * 4 < dim;
            }
            while (true) {
                bool missing = has_own && (m_word == 0 || l_word == 0);
                load_relaxed_if(missing, m_word, own);
                load_relaxed_if(missing, l_word, own + rows);
#pragma unroll
                for (int k = 0; k < at_once; ++k)
#pragma unroll
                    for (int i = 0; i < groups; ++i) {
                        const bool again = wanted[k][i] & !arrived(v[k][i]);
                        load_relaxed_if(again, v[k][i], from_part[k] + i * width);
                        missing = missing | again;
                    }
                if (!missing) break;
            }
            __syncwarp();
            const float m = has_own ? opened(m_word) : -INFINITY;
            float next = m;
#pragma unroll
            for (int step = width / 2; step > 0; step /= 2)
                next = fmaxf(next, __shfl_xor_sync(~0u, next, step));
            next = fmaxf(next, top);
            const float keep = top == -INFINITY ? 0.0f : exp2_fast(top - next);
            const float take = m == -INFINITY ? 0.0f : exp2_fast(m - next);
            top = next;
            sum = fmaf(sum, keep, m == -INFINITY ? 0.0f : opened(l_word) * take);
#pragma unroll
            for (int i = 0; i < groups; ++i)
                output[i] = {output[i].x * keep, output[i].y * keep, output[i].z * keep, output[i].w * keep};
#pragma unroll
            for (int k = 0; k < at_once; ++k) {
                const float factor = __shfl_sync(~0u, take, k * sets + (active ? set : 0), width);
#pragma unroll
                for (int i = 0; i < groups; ++i) {
                    if (wanted[k][i]) store_relaxed(from_part[k] + i * width, uint4{0, 0, 0, 0});
                    if (factor == 0.0f) continue;  // no such part, or an empty one
                    output[i].x = fmaf(opened(v[k][i].x), factor, output[i].x);
                    output[i].y = fmaf(opened(v[k][i].y), factor, output[i].y);
                    output[i].z = fmaf(opened(v[k][i].z), factor, output[i].z);
                    output[i].w = fmaf(opened(v[k][i].w), factor, output[i].w);
                }
            }
        }
#pragma unroll
        for (int step = width / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
#pragma unroll
        for (int i = 0; i < groups; ++i) {
            const int channel = (i * width + lane) * 4;
            if (active && channel < dim) {
                float* const at = state.output + row * Memory::output_stride + channel;
                *reinterpret_cast<float4*>(at + set * Memory::output_part) = output[i];
            }
        }
        if (active && set == 0 && lane == 0) {
            state.max[row] = top;
            state.sum[row] = sum;
        }
    }
    team.wait();
    write_rows<Memory>(a, score, state.later->item, state, sets, team);
#pragma unroll 1
    for (int i = team.thread(); i < count * 2 * rows; i += team.threads())
        store_relaxed(part(i / (2 * rows)) + i % (2 * rows), 0u);
}

/// Notes which rows the share has sent: they follow each other, since a sequence has one query token.
template <class Memory, class Pair, class T>
__device__ __forceinline__ void note_rows(const attention_args<Pair, T>& a, const across_ranks& score,
                                          const item_part& item, merge_note& note, const warp_team& team) {
    if (!item.has_end() || team.thread() + 1 < team.threads() || score.exchange.ranks == 0) return;
    const int first = item.row_block * Memory::rows, row = a.row_number(item) + first;
    if (note.end_row == 0) note.begin_row = row;
    note.end_row = row + smaller(Memory::rows, a.rows - first);
    prefetch_line(score.exchange.steps + row);
}
/// Writes these rows, merged with those of the other ranks. All threads of the team, when they have nothing
/// else to do.
template <class Pair, class T>
__device__ __forceinline__ void merge_sent_rows(const attention_args<Pair, T>& a, const across_ranks& score,
                                                const merge_note& note, const warp_team& team) {
    team.wait();
#pragma unroll 1
    for (int row = note.begin_row + team.member; row < note.end_row; row += team.warps) {
        const int token = divide(row, a.q.heads), head = row - token * a.q.heads;
        merge_ranks(score.exchange, row, team.thread() % warp_size, a.out.at(token, head), Pair::value_dim,
                    a.lse);
    }
}

}}}  // namespace kvq::cuda::detail
