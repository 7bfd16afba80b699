// Scores of a warp tile whose channels are cut into bands: each warp has a sum over its own, and all get the
// whole.
//
//   scores = sum of the bands' scores      2 bands: a + b     4 bands: (a + b) + (c + d)
//
// Scores of a band go to where its keys were. So every tile has two waits: all scores are there; all have
// been read, before the next unit is copied to their place.
// Contract: all warps of a warp tile get the same bits, and so have the same weights and maxima.
#pragma once

#include "schedule.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Which band a warp has, of warps that are neighbours.
struct band_place {
    int band;
    int barrier;     // of the warps that have the other bands of the same warp tiles
    int warp_bytes;  // from a warp's memory to the next one's

    /// Teams have the first barriers (warp_team::wait).
    template <class Memory>
    __device__ __forceinline__ static band_place of(int warp) {
        return {warp % Memory::bands, 5 + warp / Memory::bands, Memory::warp_bytes};
    }
};

template <int Bands>
__device__ __forceinline__ void wait_for_bands(const band_place& place) {
    if constexpr (Bands > 1) wait_at_barrier(place.barrier, Bands * warp_size);
}

/// slot: of the warp's keys, which nothing reads any more. wait_for_bands() must follow before it is used
/// again.
template <int Bands, int Tiles, int Rows4>
__device__ __forceinline__ void add_bands([[maybe_unused]] float (&scores)[Tiles][Rows4][4],
                                          [[maybe_unused]] std::uint32_t slot,
                                          [[maybe_unused]] const band_place& place,
                                          [[maybe_unused]] const lane_id& id) {
    if constexpr (Bands > 1) {
        const std::uint32_t own = slot + 16u * static_cast<std::uint32_t>(id.lane);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < Tiles * Rows4; ++i) {
            const float(&s)[4] = scores[i / Rows4][i % Rows4];
            store_shared_16(own + 512u * static_cast<std::uint32_t>(i), {s[0], s[1], s[2], s[3]});
        }
        wait_for_bands<Bands>(place);
        // Of the band whose number differs in these bits.
        const auto load = [&](int bits, int i) {
            const int warps = (place.band ^ bits) - place.band;
            return load_parameters<float>(own + static_cast<std::uint32_t>(warps * place.warp_bytes) +
                                          512u * static_cast<std::uint32_t>(i));
        };
        const auto add = [](float(&to)[4], const float4& v) {
            to[0] += v.x, to[1] += v.y, to[2] += v.z, to[3] += v.w;
        };
#pragma unroll
        for (int i = 0; i < Tiles * Rows4; ++i) {
            float(&s)[4] = scores[i / Rows4][i % Rows4];
            add(s, load(1, i));
            if constexpr (Bands == 4) {
                const float4 v = load(2, i);
                float others[4] = {v.x, v.y, v.z, v.w};
                add(others, load(3, i));
                add(s, {others[0], others[1], others[2], others[3]});
            }
        }
    }
}

}}}  // namespace kvq::cuda::detail
