// Snapshots of recurrent state on the device: parts of a live page to codes and back, with the bytes of the
// CPU's (state/snapshot_codec.hpp).
//
// A block quantizes a part: 16 lanes take a head, first for the scales, then for codes and sums. Lane i adds
// what the CPU's lane i adds, in the same order; heads are added one after the other.
// Contract: ordered by the stream. live and snapshot are at a multiple of 16 bytes. With --use_fast_math what
// is below 2^-126 counts as zero.
#pragma once

#include "../../state/snapshot_codes.hpp"
#include "../layout/launch.cuh"
#include "page_memory.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

inline constexpr int state_threads = 512, state_lanes = 16, state_heads = state_threads / state_lanes;

/// What quantizing did to a head.
struct head_losses {
    double error, values;
    unsigned not_finite;
};

/// The largest of 16 lanes.
__device__ inline int largest_of_lanes(int x) {
    for (int step = state_lanes / 2; step > 0; step /= 2)
        x = common::larger(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
/// The sum over 16 lanes, in their order.
__device__ inline double sum_of_lanes(float x) {
    double sum = 0;
    for (int lane = 0; lane < state_lanes; ++lane)
        sum += static_cast<double>(__shfl_sync(~0u, x, lane, state_lanes));
    return sum;
}

/// A head for 16 lanes, all of which call it, also where it writes nothing.
template <class Codes, class T>
__device__ head_losses quantize_head(const state_parts::part& p, const T* x, std::uint8_t* codes,
                                     float* scales, bool writes) {
    const int lane = static_cast<int>(threadIdx.x) % state_lanes, values = p.rows * p.columns;
    const bool by_column = p.snapshot == snapshot_type::int8_columns;
    const int run = p.snapshot == snapshot_type::e4m3 ? common::e4m3_group_rows * p.columns : p.columns;
    int amax = 0;
    if (by_column) {
        for (int c = lane; c < p.columns; c += state_lanes) {
            int most = 0;
            for (int at = c; at < values; at += p.columns)
                most = common::larger(most, common::finite_magnitude_bits(static_cast<float>(x[at])));
            amax = common::larger(amax, most);
            if (writes) scales[c] = common::scale_of<Codes>(common::bit_cast<float>(most));
        }
    } else {
        for (int at = 0, g = 0; at < values; at += run, ++g) {
            int most = 0;
            const int end = common::smaller(at + run, values);
            for (int i = at + lane; i < end; i += state_lanes)
                most = common::larger(most, common::finite_magnitude_bits(static_cast<float>(x[i])));
            most = largest_of_lanes(most);
            amax = common::larger(amax, most);
            if (writes && lane == 0) scales[g] = common::scale_of<Codes>(common::bit_cast<float>(most));
        }
    }
    amax = largest_of_lanes(amax);
    __syncwarp();
    const float largest = common::larger(common::bit_cast<float>(amax), 0x1p-126f),
                unit = common::rounded_quotient(1.0f, largest);
    const common::rounded_products product;
    float squares = 0, errors = 0;
    unsigned not_finite = 0;
    for (int at = 0, g = 0; at < values; at += run, ++g) {
        const int end = common::smaller(at + run, values);
        for (int i = at + lane; i < end; i += state_lanes) {
            const float scale = writes ? scales[by_column ? i - at : g] : 1.0f;
            const auto q = common::quantize_value<Codes>(x[i], scale, unit, product);
            if (writes) codes[i] = q.code;
            squares += q.square;
            errors += q.error;
            not_finite += q.not_finite;
        }
    }
    for (int step = state_lanes / 2; step > 0; step /= 2)
        not_finite += __shfl_xor_sync(~0u, not_finite, step);
    const double squared =
        common::rounded_product(static_cast<double>(largest), static_cast<double>(largest));
    return {common::rounded_product(sum_of_lanes(errors), squared),
            common::rounded_product(sum_of_lanes(squares), squared), not_finite};
}

template <class Codes, class T>
__device__ void quantize_part_of_block(const state_parts::part& p, const std::byte* live, std::byte* to) {
    __shared__ head_losses losses[state_heads];
    const common::snapshot_places places(p.heads, p.rows, p.columns, p.snapshot);
    const auto values = static_cast<std::size_t>(p.rows) * static_cast<std::size_t>(p.columns);
    const int thread = static_cast<int>(threadIdx.x);
    // Between codes, scales and sums there are zeros.
    const std::size_t bytes = common::round_up(places.bytes, common::state_alignment);
    for (std::size_t i = static_cast<std::size_t>(p.heads) * values + threadIdx.x; i < bytes;
         i += state_threads)
        to[i] = std::byte{};
    __syncthreads();
    common::snapshot_sums sums;
    for (int first = 0; first < p.heads; first += state_heads) {
        const int head = first + thread / state_lanes;
        const bool writes = head < p.heads;
        const auto at = static_cast<std::size_t>(writes ? head : first);
        const head_losses of =
            quantize_head<Codes>(p, reinterpret_cast<const T*>(live) + at * values,
                                 reinterpret_cast<std::uint8_t*>(to) + at * values,
                                 reinterpret_cast<float*>(to + places.scales) + at * places.per_head, writes);
        if (thread % state_lanes == 0) losses[thread / state_lanes] = of;
        __syncthreads();
        for (int i = 0; i < common::smaller(state_heads, p.heads - first) && thread == 0; ++i) {
            sums.values += losses[i].values;
            sums.error += losses[i].error;
            sums.not_finite += losses[i].not_finite;
        }
        __syncthreads();
    }
    if (thread == 0) *reinterpret_cast<common::snapshot_sums*>(to + places.sums) = sums;
}

template <class Codes, class T>
__device__ void dequantize_part_of_blocks(const state_parts::part& p, const std::byte* from,
                                          std::byte* live) {
    const common::snapshot_places places(p.heads, p.rows, p.columns, p.snapshot);
    const auto values = static_cast<std::size_t>(p.rows) * static_cast<std::size_t>(p.columns),
               columns = static_cast<std::size_t>(p.columns),
               group = p.snapshot == snapshot_type::e4m3 ? common::e4m3_group_rows * columns : columns;
    const auto* const codes = reinterpret_cast<const std::uint8_t*>(from);
    const auto* const scales = reinterpret_cast<const float*>(from + places.scales);
    const common::rounded_products product;
    const std::size_t all = static_cast<std::size_t>(p.heads) * values;
    for (std::size_t i = std::size_t{blockIdx.y} * state_threads + threadIdx.x; i < all;
         i += std::size_t{gridDim.y} * state_threads) {
        const std::size_t head = i / values, at = i % values;
        const std::size_t scale =
            head * places.per_head + (p.snapshot == snapshot_type::int8_columns ? at % columns : at / group);
        reinterpret_cast<T*>(live)[i] = T(product(Codes::value(codes[i]), scales[scale]));
    }
}

/// Calls f(Codes{}, T{}).
template <class F>
__device__ void visit_part(const state_parts::part& p, F&& f) {
    const auto of_type = [&](auto codes) {
        if (p.type == float_type::fp32)
            f(codes, float{});
        else if (p.type == float_type::fp16)
            f(codes, float16{});
        else
            f(codes, bfloat16{});
    };
    if (p.snapshot == snapshot_type::e4m3)
        of_type(common::e4m3_codes{});
    else
        of_type(common::int8_codes{});
}

/// Block x: a part, y: its share of the way back.
template <bool Quantize>
__global__ void __launch_bounds__(state_threads)
    convert_state_kernel(const __grid_constant__ state_parts parts, const std::byte* from, std::byte* to) {
    const state_parts::part& p = parts.data[blockIdx.x];
    const std::byte* const source = from + (Quantize ? p.live : p.held);
    std::byte* const target = to + (Quantize ? p.held : p.live);
    if (p.snapshot == snapshot_type::exact) {
        const std::size_t words = common::round_up(p.bytes, common::state_alignment) / sizeof(uint4);
        for (std::size_t i = std::size_t{blockIdx.y} * state_threads + threadIdx.x; i < words;
             i += std::size_t{gridDim.y} * state_threads)
            reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(source)[i];
        return;
    }
    visit_part(p, [&](auto codes, auto type) {
        if constexpr (Quantize)
            quantize_part_of_block<decltype(codes), decltype(type)>(p, source, target);
        else
            dequantize_part_of_blocks<decltype(codes), decltype(type)>(p, source, target);
    });
}
inline status convert_state(const state_parts& parts, bool quantize, const std::byte* from, std::byte* to,
                            cudaStream_t stream) noexcept {
    const auto count = static_cast<unsigned>(parts.count);
    return quantize ? launch("launching a snapshot of state", overlap::no, convert_state_kernel<true>,
                             dim3(count), state_threads, 0, stream, parts, from, to)
                    : launch("launching the state of a snapshot", overlap::no, convert_state_kernel<false>,
                             dim3(count, 16), state_threads, 0, stream, parts, from, to);
}

}}}  // namespace kvq::cuda::detail
