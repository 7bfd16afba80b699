// The query rows of a prompt's block: to shared memory, through the softmax, and out.
//
//   registers   lane (g, t) of a warp has rows g and g + 8 of its 16: of scores, columns 8 i + 2 t + k in s[4
//               i + 2 r + k]; of outputs the same with channels. So do wgmma and mma.
//   softmax     m' = max(m, s) where s lies far above m, else m; weights 2^(s - m'), sum and output times
//               2^(m - m') (online softmax)
//
// Contract: rows that do not exist are zero and are not written. A row that sees nothing gives zeros and a
// log-sum of -infinity.
#pragma once

#include "../decode/score_modifiers.cuh"
#include "../layout/transform_row.cuh"
#include "prefill_args.cuh"
#include "prefill_new_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// What consumers need to know of a tile.
struct tile_note {
    int position;  // of its first token
    int count;     // tokens that exist
    int slices;    // bit i: tokens 16 i to 16 i + 15 are held
    // some row does not see all of it; 2: the tile is sinks, which every row sees; + 4:
    // prefill_args::hides_tokens
    int cut;

    __device__ __forceinline__ void store(std::uint32_t at) const {
        store_shared_16(at, {__int_as_float(position), __int_as_float(count), __int_as_float(slices),
                             __int_as_float(cut)});
    }
    __device__ __forceinline__ static tile_note load(std::uint32_t at) {
        const uint4 v = load_shared_16(at);
        return {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z), static_cast<int>(v.w)};
    }
};

/// `count` queries of a block from `first` on as half floats, in tiles of `Rows` rows (prefill_tile.cuh),
/// behind the transform of the keys of `cache`: a warp has a row. Rows that do not exist are zero.
template <int Dim, int Rows, class Args, class Pair>
__device__ __forceinline__ void load_turned_rows(const Args& a, const prefill_block& block, int first,
                                                 int count, std::uint32_t to, int thread, int threads,
                                                 const cache_ref<Pair>& cache) {
    constexpr int N = token_numbers<Dim>;
    const int lane = thread % 32;
#pragma unroll 1
    for (int i = thread / 32; i < count; i += threads / 32) {
        const int row = block.first_row + first + i, held = kvq::detail::smaller(row, block.rows - 1);
        const auto* const from =
            a.q.at(block.start + held / a.group, block.kv_head * a.group + held % a.group);
        float x[N];
        bool odd = false;
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const int c = k * 32 + lane;
            x[k] = c < Dim && row < block.rows ? to_float(from[c]) : 0.0f;
            odd = odd || !kvq::detail::is_finite(x[k]);
        }
        odd = __any_sync(~0u, odd);  // a row whose q is not finite is NaN
        transform_row<token_channels, Dim>(x, transform_of<tensor::key>(cache), block.kv_head);
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const int c = k * 32 + lane;
            if (c >= Dim) continue;
            const int at = place_of_channel<Args>(block, c);
            store_half_word(to + static_cast<std::uint32_t>(i / Rows * (Rows * Dim * 2)) +
                                octet_offset<Rows>(i % Rows, at / 8) + static_cast<std::uint32_t>(at % 8 * 2),
                            odd ? std::uint16_t{0x7fff} : to_half(x[k]));
        }
    }
}

/// `count` queries of a block from `first` on as half floats, in tiles of `Rows` rows (prefill_tile.cuh).
/// Rows that do not exist are zero.
template <int Dim, int Rows, class Args>
__device__ __forceinline__ void load_query_rows(const Args& a, const prefill_block& block, int first,
                                                int count, std::uint32_t to, int thread, int threads) {
    const auto load = [&]<bool Aligned>(std::bool_constant<Aligned>) {
#pragma unroll(Aligned ? 2 : 1)
        for (int i = thread; i < count * (Dim / 8); i += threads) {
            const int row_of_tiles = i / (Dim / 8), octet = i % (Dim / 8),
                      row = block.first_row + first + row_of_tiles,
                      held = kvq::detail::smaller(row, block.rows - 1);
            std::uint32_t x[4];
            load_halves<Aligned>(
                a.q.at(block.start + held / a.group, block.kv_head * a.group + held % a.group) + octet * 8,
                x);
            if (row >= block.rows) x[0] = x[1] = x[2] = x[3] = 0;
            const std::uint32_t rows =
                to + static_cast<std::uint32_t>(row_of_tiles / Rows * (Rows * Dim * 2));
            if constexpr (has_widths<Args>)
                if (block.order != nullptr) {
                    octet_places::of(block.order + octet * 8)
                        .template store<Rows>(rows, row_of_tiles % Rows, x);
                    continue;
                }
            store_shared_16(
                rows + octet_offset<Rows>(row_of_tiles % Rows, octet),
                {__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]), __uint_as_float(x[3])});
        }
    };
    if (rows_aligned(a.q))
        load(std::true_type{});
    else
        load(std::false_type{});
}

/// Outputs of a thread's two rows to where values are behind a transform, or back.
template <int Dim, class Pair, bool Back>
__device__ __forceinline__ void turn_outputs(float (&o)[Dim / 2], const cache_ref<Pair>& cache, int head) {
    using channels = row_layout<1, 2, 0>;
    static_for<2>([&](auto number) {
        constexpr int r = decltype(number)::value;
        float x[Dim / 4];
#pragma unroll
        for (int i = 0; i < Dim / 4; ++i) x[i] = o[i / 2 * 4 + 2 * r + i % 2];
        const device_transform& t = transform_of<tensor::value>(cache);
        if constexpr (Back)
            restore_row<channels, Dim, float>(x, t, head);
        else
            transform_row<channels, Dim, float>(x, t, head);
#pragma unroll
        for (int i = 0; i < Dim / 4; ++i) o[i / 2 * 4 + 2 * r + i % 2] = x[i];
    });
}

/// Two rows of a thread: g and g + 8 of its warp's 16.
struct row_pair {
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
};

/// Caps or changes scores (Softcap: they are then in powers of two already) and hides what the thread's rows
/// do not see: `row` of the block, 8 rows further, at `position`. All lanes of a warp.
template <bool Softcap, int N, class Args>
__device__ __forceinline__ void mask_scores(const Args& a, const prefill_block& block, const tile_note& note,
                                            const int (&position)[2], [[maybe_unused]] int row, int t,
                                            float (&s)[N]) {
    if constexpr (is_scored<Args>) {
#pragma unroll
        for (int i = 0; i < N; ++i)
            s[i] = a.softcap > 0.0f ? capped(s[i] * a.scale, a.softcap) : s[i] * (a.scale * log2e);
    } else if constexpr (Softcap) {
#pragma unroll
        for (int i = 0; i < N; ++i) s[i] = capped(s[i] * a.scale, a.softcap);
    }
    if (!is_scored<Args> && note.cut == 0) return;
    // A lane has what 16 tokens show: bit i for token i.
    const auto bits_below = [](int n) {
        return (1u << kvq::detail::larger(kvq::detail::smaller(n, 16), 0)) - 1u;
    };
    const int lane = static_cast<int>(threadIdx.x) % 32;
    typename Args::shown_slice own;
    if ((note.cut & 4) != 0) own = a.slice(block, note.position, lane, 2 * N);
    if constexpr (is_scored<Args>) {
        const int skipped = cut_of(a.cuts, block.sequence).skipped;
#pragma unroll
        for (int slice = 0; slice < N / 8; ++slice) {
            const int key = note.position + 16 * slice + __shfl_sync(0xffffffffu, own.shift, slice) - skipped;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int r = i / 2 % 2,
                          head = block.kv_head * a.group + (block.first_row + row + 8 * r) % a.group;
                float& x = s[8 * slice + i];
                x = log2e * a.score.score(x * (1.0f / log2e), head, position[r] - skipped,
                                          key + i / 4 * 8 + i % 2 + 2 * t);
            }
        }
        if (note.cut == 0) return;
    }
    own.tokens = (note.slices >> lane & 1) == 0 ? 0u : own.tokens & bits_below(note.count - 16 * lane);
    int begin[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
        begin[r] = (note.cut & 2) != 0 ? -most_tokens : a.first_seen(block, position[r]);
#pragma unroll
    for (int slice = 0; slice < N / 8; ++slice) {
        const int at = note.position + 16 * slice + __shfl_sync(0xffffffffu, own.shift, slice);
        const unsigned shown = __shfl_sync(0xffffffffu, own.tokens, slice), sinks = bits_below(a.sinks - at);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int end = position[r] + 1 - at;
            const unsigned seen = (shown & bits_below(end) & ~(bits_below(begin[r] - at) & ~sinks)) >> 2 * t;
#pragma unroll
            for (int k = 0; k < 4; ++k)
                if ((seen & 1u << (k / 2 * 8 + k % 2)) == 0)
                    s[8 * slice + k / 2 * 4 + 2 * r + k % 2] = -INFINITY;
        }
    }
}

/// The greatest of `top` and of a thread's scores of row r.
template <int N>
__device__ __forceinline__ float greatest(const float (&s)[N], int r, float top) {
#pragma unroll
    for (int i = 0; i < N; i += 4) top = fmaxf(top, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
    return top;
}
/// The greatest of a row's four lanes.
__device__ __forceinline__ float greatest_of_lanes(float top) {
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    return fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
}

/// Scores to weights of row r, in place, where `top` is the greatest score up to now; factor: what earlier
/// sums and outputs are multiplied by. scale: of scores, in powers of two.
template <int N>
__device__ __forceinline__ void weigh_row(float (&s)[N], row_pair& rows, float (&factor)[2], float scale,
                                          int r, float top) {
    const float raised = top == -INFINITY ? 0.0f : top * scale;
    factor[r] =
        exp2_fast((rows.max[r] - (top == -INFINITY ? 0.0f : top)) * scale);  // 1 if nothing was raised
    rows.max[r] = top;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        s[i + 2 * r] = exp2_fast(fmaf(s[i + 2 * r], scale, -raised));
        s[i + 2 * r + 1] = exp2_fast(fmaf(s[i + 2 * r + 1], scale, -raised));
        sum += s[i + 2 * r] + s[i + 2 * r + 1];
    }
    rows.sum[r] = rows.sum[r] * factor[r] + sum;
}

/// So far, in powers of two, a score may lie above the maximum that weights are relative to.
inline constexpr float most_above = 8.0f;

/// Both rows; was a maximum raised in any row of the warp? A maximum stays as it is until a score of its row
/// lies `most_above` above it: weights are then 256 at most, and few tiles multiply earlier outputs. Lanes
/// compare their maxima, and factors are found, only where one of the warp's rows has such a score: shuffles
/// wait behind stores to shared memory.
template <int N>
__device__ __forceinline__ bool softmax_step(float (&s)[N], row_pair& rows, float (&factor)[2], float scale) {
    const float above = fminf(most_above / scale, 3e38f);
    float top[2];
    bool raised = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        top[r] = greatest(s, r, rows.max[r]);
        raised = raised || top[r] > rows.max[r] + above;
    }
    raised = __any_sync(0xffffffffu, raised);
    if (raised)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float before = rows.max[r];
            top[r] = greatest_of_lanes(top[r]);
            if (top[r] > before + above) rows.max[r] = top[r];
            factor[r] = rows.max[r] == -INFINITY ? 1.0f : exp2_fast((before - rows.max[r]) * scale);
            rows.sum[r] *= factor[r];
        }
    // Both rows in turns, and two sums of each: exponentials take 8 cycles each, and sums wait for them.
    float less[2], sum[2][2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) less[r] = rows.max[r] == -INFINITY ? 0.0f : rows.max[r] * scale;
#pragma unroll
    for (int i = 0; i < N; i += 4)
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                float& x = s[i + 2 * r + k];
                x = exp2_fast(fmaf(x, scale, -less[r]));
                sum[r][k] += x;
            }
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.sum[r] += sum[r][0] + sum[r][1];
    return raised;
}

/// Writes `Channels` channels of a finished row from `first` on: 8 i + 2 t and the one behind it of this
/// lane; output(channel, k) belongs to `max` and `sum`.
template <int Dim, int Channels, class Args, class Output>
__device__ __forceinline__ void finish_row(const Args& a, int token, int head, float max, float sum,
                                           Output&& output, int t, int first) {
    float factor = 1.0f;
    const auto add_sink_of = [&](float logit) {
        const float sink = sink_score(logit), top = fmaxf(max, sink), f = exp2_fast(max - top);
        sum = sum * f + exp2_fast(sink - top);
        factor *= f;
        max = top;
    };
    if (a.sink_logits != nullptr) add_sink_of(__ldg(a.sink_logits + head));
    if constexpr (is_scored<Args>)
        if constexpr (has_sinks<std::remove_cvref_t<decltype(a.score)>>)
            add_sink_of(a.score.sink_logit(head));
    const std::size_t number = static_cast<std::size_t>(token) * static_cast<std::size_t>(a.q.heads) +
                               static_cast<std::size_t>(head);
    if (a.state_out != nullptr) {
        float* const state = a.state_out + number * (Dim + 2);
        if (t == 0 && first == 0) {
            // A row of NaN has no maximum, but is not empty.
            state[0] = max == -INFINITY && sum != 0.0f ? 0.0f : max;
            state[1] = sum;
        }
#pragma unroll
        for (int channel = 0; channel < Channels; channel += 8)
            *reinterpret_cast<float2*>(state + 2 + first + channel + 2 * t) = {output(channel, 0) * factor,
                                                                               output(channel, 1) * factor};
    }
    if (a.lse != nullptr && t == 0 && first == 0)
        a.lse[number] = sum == 0.0f ? -INFINITY : (max + log2f(sum)) / log2e;
    if (a.out.data == nullptr) return;
    factor = sum == 0.0f ? 0.0f : factor / sum;
    auto* const to = a.out.at(token, head) + first;
    using T = std::remove_pointer_t<decltype(to)>;
#pragma unroll
    for (int channel = 0; channel < Channels; channel += 8) {
        const float x = output(channel, 0) * factor, y = output(channel, 1) * factor;
        if constexpr (sizeof(T) == 2) {
            if (reinterpret_cast<std::uintptr_t>(to) % 4 == 0) {
                *reinterpret_cast<std::uint32_t*>(to + channel + 2 * t) = pack_halves<T>(x, y);
                continue;
            }
        }
        to[channel + 2 * t] = from_float<T>(x);
        to[channel + 2 * t + 1] = from_float<T>(y);
    }
}

/// Writes both rows of a thread, 2 N channels from `first` on. own_row: of the block; the other one is 8
/// further.
template <int Dim, int N, class Args>
__device__ __forceinline__ void finish_rows(const Args& a, const prefill_block& block, int own_row, int t,
                                            const row_pair& rows, float scale, const float (&o)[N],
                                            int first = 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = block.first_row + own_row + 8 * r;
        float sum = rows.sum[r];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (row >= block.rows) continue;
        finish_row<Dim, 2 * N>(
            a, block.start + row / a.group, block.kv_head * a.group + row % a.group, rows.max[r] * scale, sum,
            [&](int channel, int k) { return o[channel / 8 * 4 + 2 * r + k]; }, t, first);
    }
}

}}}  // namespace kvq::cuda::detail
