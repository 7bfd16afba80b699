// Attention over keys that have moved since they were rotated (erase, shift, splice): R(p + m) k · R(q) x =
// R(p) k · R(q - m) x, so the query turns, not the keys (attention/rotary.hpp).
//
//   run          the pages of a sequence whose keys have moved by the same m: launches of their own
//   turn_rows    queries for a run; new keys that a page takes whose others have moved
//   join_states the softmax states of two launches become one, where a launch takes none (prefill)
//
// Contract: rows are turned as on the CPU, in float, and rounded once. Sequences whose keys have not moved
// need none of this.
#pragma once

#include "../../core/rounding.hpp"
#include "../../core/sine_and_cosine.hpp"
#include "../layout/launch.cuh"
#include "moved_keys.hpp"
#include "state_exchange.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Block: a token.
template <class T>
__global__ void __launch_bounds__(128) turn_rows_kernel(const __grid_constant__ turn_args a) {
    const int token = static_cast<int>(blockIdx.x), sequence = token / a.of_sequence;
    const int place = a.ends == nullptr ? 0 : a.lengths[sequence] - a.of_sequence + token % a.of_sequence;
    const bool turns = a.ends == nullptr || place < a.ends[sequence];
    const long long by = turns ? static_cast<long long>(a.by[2 * sequence + 1]) * (1LL << 32) +
                                     static_cast<unsigned>(a.by[2 * sequence])
                               : 0;
    const auto* const from = static_cast<const std::byte*>(a.from) + token * a.token_bytes;
    T* const to = static_cast<T*>(a.to) + static_cast<std::ptrdiff_t>(token) * a.heads * a.dim;
    const auto at = [&](int head, int channel) {
        return reinterpret_cast<const T*>(from + head * a.head_bytes)[channel];
    };
    const int first = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const rotary_pairs& p = a.pairs;
    for (int i = first; i < p.count; i += threads) {
        float sine = 0.0f, cosine = 1.0f;
        if (by != 0) kvq::detail::sine_and_cosine(static_cast<double>(by) * p.turns[i], sine, cosine);
        const int x = p.first + i * p.step, y = x + p.apart;
        for (int head = 0; head < a.heads; ++head) {
            T* const row = to + static_cast<std::ptrdiff_t>(head) * a.dim;
            const T u = at(head, x), v = at(head, y);
            const auto product = [](float f, float g) { return kvq::detail::rounded_product(f, g); };
            const float f = static_cast<float>(u), g = static_cast<float>(v);
            row[x] = by == 0 ? u : T(product(f, cosine) - product(g, sine));
            row[y] = by == 0 ? v : T(product(g, cosine) + product(f, sine));
        }
    }
    for (int channel = first; channel < a.dim; channel += threads)
        if (channel < p.first || channel >= p.first + 2 * p.count)
            for (int head = 0; head < a.heads; ++head)
                to[static_cast<std::ptrdiff_t>(head) * a.dim + channel] = at(head, channel);
}
template <class T>
status turn_rows(const turn_args& a, cudaStream_t stream) noexcept {
    if (a.tokens == 0) return {};
    return launch("turning rows", overlap::no, turn_rows_kernel<T>, dim3(static_cast<unsigned>(a.tokens)),
                  128, 0, stream, a);
}

/// Block: a row.
template <class T>
__global__ void __launch_bounds__(128) join_states_kernel(const __grid_constant__ join_args a) {
    const int row = static_cast<int>(blockIdx.x), token = row / a.heads, head = row % a.heads;
    const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(row) * (a.dim + 2);
    const float *const x = a.first + at, *const y = a.second + at;
    const float top = fmaxf(x[0], y[0]), of_x = x[0] == -INFINITY ? 0.0f : exp2_fast(x[0] - top),
                of_y = y[0] == -INFINITY ? 0.0f : exp2_fast(y[0] - top), sum = x[1] * of_x + y[1] * of_y;
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // NaN stays NaN
    const std::ptrdiff_t place = token * a.token_bytes + head * a.head_bytes;
    for (int channel = static_cast<int>(threadIdx.x); channel < a.dim;
         channel += static_cast<int>(blockDim.x)) {
        const float value = x[2 + channel] * of_x + y[2 + channel] * of_y;
        if (a.out != nullptr)
            reinterpret_cast<T*>(static_cast<std::byte*>(a.out) + place)[channel] = T(value * inverse);
        if (a.state != nullptr) a.state[at + 2 + channel] = value;
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    if (a.lse != nullptr) a.lse[row] = natural_log(top, sum);
    if (a.state == nullptr) return;
    a.state[at] = top;
    a.state[at + 1] = sum;
}
template <class T>
status join_states(const join_args& a, cudaStream_t stream) noexcept {
    if (a.tokens == 0) return {};
    return launch("joining softmax states", overlap::no, join_states_kernel<T>,
                  dim3(static_cast<unsigned>(a.tokens * a.heads)), 128, 0, stream, a);
}

}}}  // namespace kvq::cuda::detail
