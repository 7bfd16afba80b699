// Reducing N numbers over the lanes of a warp so that lanes end with different ones: in every turn a lane
// gives half of its numbers to another lane, whose other half it takes. N / 2 + N / 4 + ... + 1 exchanges in
// place of N for every turn.
#pragma once

#include "../layout/warp_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// The number that a lane has when all turns are over, in [0, N); N a power of two of at most 32. Lanes N
/// apart have the same one.
template <int N>
KVQ_HD constexpr int number_of_lane(int lane) noexcept {
    int number = 0;
    for (int distance = 1; distance < N; distance *= 2)
        number += (lane & distance) != 0 ? N / distance / 2 : 0;
    return number;
}
/// The first lane that has a number.
template <int N>
KVQ_HD constexpr int lane_of_number(int number) noexcept {
    int lane = 0;
    for (int distance = 1; distance < N; distance *= 2)
        lane += (number & (N / distance / 2)) != 0 ? distance : 0;
    return lane;
}

/// x[0]: what f makes of this lane's number in all lanes. The other numbers are lost.
template <int N, class T, class F>
__device__ __forceinline__ void reduce_over_lanes(T (&x)[N], int lane, const F& f) {
    static_assert(N <= warp_size && (N & (N - 1)) == 0);
    static_for<6>([&](auto turn) {
        constexpr int distance = 1 << decltype(turn)::value, half = N / distance / 2;
        if constexpr (half > 0) {
            const bool upper = (lane & distance) != 0;
#pragma unroll
            for (int i = 0; i < half; ++i) {
                const T other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + half], distance);
                x[i] = f(upper ? x[i + half] : x[i], other);
            }
        } else if constexpr (distance < warp_size) {
            x[0] = f(x[0], __shfl_xor_sync(~0u, x[0], distance));
        }
    });
}

}}}  // namespace kvq::cuda::detail
