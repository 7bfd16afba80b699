// Warp tiles of two planes (plane_pair.cuh): the warp tile of the upper format, and behind it in shared
// memory the words of the lower plane, as those of its codes lie.
//
//   code = 16 u + l      two words of four bits become two quads of bytes, one of each half
//   x^ = b + s (code - 7.5) / 16
//
// Contract: as warp_tile.cuh. Blocks of the upper format may begin behind lines of 128 bytes; lower planes
// start on lines.
#pragma once

#include "warp_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

template <tensor Role, class Pair, int Tokens, int Bands = 1>
struct plane_warp_tile : code_warp_tile<Role, Pair, Tokens, true, Bands> {
    using base = code_warp_tile<Role, Pair, Tokens, true, Bands>;
    using lower = code_warp_tile<Role, Pair, Tokens, false, Bands>;
    using traits = typename base::traits;
    /// As products see it.
    struct scheme : base::scheme {
        static constexpr int code_bits = 8;
    };
    static constexpr bool centred = true;
    /// Codes stand for so much of a scale each, from here on.
    static constexpr float code_unit = 0.0625f, code_zero = 7.5f;
    static constexpr int lower_at = round_up(base::slot_bytes, 128);
    static constexpr int slot_bytes = lower_at + base::codes_bytes;

    KVQ_HD static constexpr int sets(int) { return 1; }
    KVQ_HD static constexpr int raised(int) { return 0; }
    KVQ_HD static constexpr int set_weight(int) { return 1; }

    static constexpr const char* no_tile =
        base::no_tile != nullptr                           ? base::no_tile
        : base::token_parameters || !base::has_byte_params ? "two planes have 8-bit parameters of channels"
        : base::sharers(0) > 1 ? "words of two planes have columns of several lanes"
                               : nullptr;

    __device__ __forceinline__ static void copy(std::uint32_t to, const std::byte* block,
                                                const std::byte* lower_block, int first, int lane,
                                                std::uint32_t vector_bytes, int band) {
        base::copy(to, block, first, lane, vector_bytes, {}, band);
        lower::copy_codes(lower_place(to), lower_block, first, lane, vector_bytes, band);
    }
    /// As code_warp_tile::for_pairs.
    template <int Tile, int Group, int Sets, class F>
    __device__ __forceinline__ static void for_pairs(std::uint32_t at, const lane_id& id, F&& f) {
        constexpr std::integral_constant<int, 0> first;
        const std::uint32_t lower_at_lane = lower_place(at);
        static_for<base::lane_steps>([&](auto j) {
            constexpr int J = decltype(j)::value;
            constexpr std::integral_constant<int, 2 * J> unit_a;
            constexpr std::integral_constant<int, 2 * J + 1> unit_b;
            const uint4 u = base::template line_words<Tile, Group, J, 0, 0>(at, id),
                        l = lower::template line_words<Tile, Group, J, 0, 0>(lower_at_lane, id);
            f(first, unit_a, unit_b,
              uint4{low_quad(u.x, l.x), low_quad(u.y, l.y), low_quad(u.z, l.z), low_quad(u.w, l.w)},
              uint4{high_quad(u.x, l.x), high_quad(u.y, l.y), high_quad(u.z, l.z), high_quad(u.w, l.w)});
        });
    }

private:
    __device__ __forceinline__ static std::uint32_t lower_place(std::uint32_t at) {
        return (base::skewed ? at & ~127u : at) + static_cast<std::uint32_t>(lower_at);
    }
    __device__ __forceinline__ static std::uint32_t low_quad(std::uint32_t u, std::uint32_t l) {
        return (u << 4 & 0xf0f0f0f0u) | (l & 0x0f0f0f0fu);
    }
    __device__ __forceinline__ static std::uint32_t high_quad(std::uint32_t u, std::uint32_t l) {
        return (u & 0xf0f0f0f0u) | (l >> 4 & 0x0f0f0f0fu);
    }
};

}}}  // namespace kvq::cuda::detail
