// The query rows of an item: from device memory to floats in shared memory.
//
//   fetch   asks for them, into registers        store   writes [band][row][channel], times the scale, where
//                                                        query_byte() says
//   turn_query_rows   applies the transform of the keys to rows that are stored
//
// Contract: values that are not finite are stored as zeros and reported; rows that do not exist are zeros.
// `Memory` is attention_memory<...>.
#pragma once

#include "../layout/transform_row.cuh"
#include "attention_args.cuh"
#include "key_product.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// The query rows of an item on their way to shared memory: fetched early, stored late. Rows that do not
/// exist are zero, and so are values that are not finite: store() returns a bit for every row in which this
/// thread has met one.
template <class Memory, class Pair, class T>
struct query_rows {
    static constexpr int per_load = 8;  // channels of one thread
    static constexpr int vectors = Memory::rows * Pair::head_dim / per_load;
    static constexpr int loads = ceil_div(vectors, Memory::team_threads);  // of the smallest teams
    T values[loads][per_load];

    __device__ __forceinline__ void fetch(const attention_args<Pair, T>& a, const item_part& item,
                                          const warp_team& team) {
        const int first_row = item.row_block * Memory::rows;
#pragma unroll
        for (int i = 0; i < loads; ++i) {
            const int vector = i * team.threads() + team.thread();
            const int row = first_row + vector / (Pair::head_dim / per_load);
            const int channel = vector % (Pair::head_dim / per_load) * per_load;
            if (vector < vectors && row < a.rows) {
                const T* const from =
                    a.q.at(a.row_token(item.sequence, row), a.row_head(item.kv_head, row)) + channel;
                if (reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
                    constexpr int words = per_load * static_cast<int>(sizeof(T)) / 16;
                    uint4 raw[words];
#pragma unroll
                    for (int w = 0; w < words; ++w) raw[w] = __ldg(reinterpret_cast<const uint4*>(from) + w);
                    __builtin_memcpy(values[i], raw, sizeof raw);
                } else {
#pragma unroll
                    for (int k = 0; k < per_load; ++k) values[i][k] = from[k];
                }
            } else {
#pragma unroll
                for (int k = 0; k < per_load; ++k) values[i][k] = T(0.0f);
            }
        }
    }
    /// plan: of keys of mixed widths, which want channels in another order; or null. Behind a transform
    /// turn_query_rows gives them that order.
    __device__ __forceinline__ unsigned store(float* query, float scale, const std::uint16_t* plan,
                                              const warp_team& team) const {
        return store_for<Memory>(query, scale, plan, team);
    }
    /// The query as kernels with the memory `Reads` expect it.
    template <class Reads>
    __device__ __forceinline__ unsigned store_for(float* query, float scale, const std::uint16_t* plan,
                                                  const warp_team& team) const {
        unsigned bad = 0;
        // A rolled loop that moves the next values to the first place would be shorter, but nvcc 13.0 then
        // loses the third load.
#pragma unroll
        for (int i = 0; i < loads; ++i) {
            const int vector = i * team.threads() + team.thread();
            if (vector < vectors) bad |= store_vector<Reads>(values[i], query, vector, scale, plan);
        }
        return bad;
    }

private:
    template <class Reads>
    __device__ __forceinline__ static unsigned store_vector(const T (&from)[per_load], float* query,
                                                            int vector, float scale,
                                                            [[maybe_unused]] const std::uint16_t* plan) {
        constexpr int dim = Reads::query_stride;  // of a band
        const int row = vector / (Pair::head_dim / per_load),
                  channel = vector % (Pair::head_dim / per_load) * per_load, byte = channel % dim * 4;
        std::byte* const to =
            reinterpret_cast<std::byte*>(query + channel / dim * Reads::query_floats + row * dim);
        float x[per_load], zero = 0.0f;
#pragma unroll
        for (int k = 0; k < per_load; ++k) {
            x[k] = to_float(from[k]) * (Reads::dequantizes ? 1.0f : scale);
            zero = fmaf(x[k], 0.0f, zero);
        }
        const unsigned bad = zero != 0.0f ? 1u << row : 0u;
        if (bad != 0)
#pragma unroll
            for (int k = 0; k < per_load; ++k)
                if (!kvq::detail::is_finite(x[k])) x[k] = 0.0f;
        if constexpr (Reads::keys::mixed && !has_transform<typename Reads::keys::scheme>)
            if (plan != nullptr) {
#pragma unroll
                for (int k = 0; k < per_load; ++k) {
                    const int channel_byte = 4 * static_cast<int>(plan[byte / 4 + k]);
                    *reinterpret_cast<float*>(to + query_byte<dim>(row, channel_byte)) = x[k];
                }
                return bad;
            }
#pragma unroll
        for (int k = 0; k < per_load; k += 4)
            *reinterpret_cast<float4*>(to + query_byte<dim>(row, byte + 4 * k)) = {x[k], x[k + 1], x[k + 2],
                                                                                   x[k + 3]};
        return bad;
    }
};

/// Query rows that store() has written become T q, in the order that keys of `cache` want; without a
/// transform there is nothing to do. All threads of the team, which has waited before.
template <class Memory, class Pair>
__device__ __forceinline__ void turn_query_rows([[maybe_unused]] float* query,
                                                [[maybe_unused]] const cache_ref<Pair>& cache,
                                                [[maybe_unused]] int sequence, [[maybe_unused]] int head,
                                                [[maybe_unused]] const warp_team& team) {
    if constexpr (has_transform<typename Pair::keys>) {
        constexpr int dim = Pair::head_dim, N = token_numbers<dim>;
        const int lane = static_cast<int>(threadIdx.x) % warp_size;
        [[maybe_unused]] const std::uint16_t* const plan = cache.key_plan(sequence, head);
#pragma unroll 1
        for (int row = team.member; row < Memory::rows; row += team.warps) {
            const auto at = [&](int channel) -> float& {
                return *reinterpret_cast<float*>(reinterpret_cast<std::byte*>(query + row * dim) +
                                                 query_byte<dim>(row, 4 * channel));
            };
            float x[N];
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] = i * warp_size + lane < dim ? at(i * warp_size + lane) : 0.0f;
            __syncwarp();
            transform_row<token_channels, dim>(x, transform_of<tensor::key>(cache), head);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                int place = i * warp_size + lane;
                if (place >= dim) continue;
                if constexpr (codec<typename Pair::keys>.several_widths())
                    if (plan != nullptr) place = static_cast<int>(plan[place]);
                at(place) = x[i];
            }
        }
        team.wait();
    }
}

}}}  // namespace kvq::cuda::detail
