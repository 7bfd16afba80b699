// 16-bit warp tiles of 32 tokens on their way to shared memory in few instructions: window pages, and sinks
// in pages of 16 tokens.
//
//   keys     a line of 128 bytes is two channels of 32 tokens; of two pages of 16 tokens, its halves are 64 bytes of each
//   values   a line is two tokens of 32 channels; the second page follows the first one
//
// What a warp needs of a window is a few warp tiles a launch: the copies of warp_tile.cuh and
// joined_warp_tile.cuh, unrolled wherever a unit is asked for, would be five times the code of everything
// else and take longer to fetch than to run. So this is a loop, and a function.
// Contract: as warp_tile.cuh, whose places in shared memory these are. Of a page that is null nothing is
// read.
#pragma once

#include "joined_warp_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Pages of 16 tokens in the scheme of a 16-bit format: its sinks.
template <class Pair>
using sink_pair = block_pair<typename Pair::keys, typename Pair::values, Pair::head_dim, 16, Pair::value_dim>;

template <class Pair>
inline constexpr bool copies_windows = [] {
    if constexpr (full_precision<typename Pair::keys> && full_precision<typename Pair::values>) {
        constexpr bool pages =
            Pair::page_tokens % 32 == 0 && Pair::head_dim % 16 == 0 && Pair::value_dim % 32 == 0;
        if constexpr (pages && joins_pages<sink_pair<Pair>>) {
            using keys = code_warp_tile<tensor::key, Pair, 32>;
            using values = code_warp_tile<tensor::value, Pair, 32>;
            return keys::no_tile == nullptr && values::no_tile == nullptr && keys::aligned &&
                   values::aligned && !keys::skewed && !values::skewed &&
                   keys::traits::columns_per_unit == 2 && values::traits::columns_per_unit == 2;
        }
    }
    return false;
}();

/// Starts copying the warp tile that begins at token `first` of `page`, or two pages of sinks. All lanes of a
/// warp.
template <tensor Role, class Pair>
__device__ __attribute__((noinline)) void copy_window(std::uint32_t to, const std::byte* page,
                                                      const std::byte* second, int first, bool sinks) {
    using unit = code_warp_tile<Role, Pair, 32>;
    constexpr int lines = unit::lines, of_line = 8, vectors = unit::tiles * lines * of_line;
    constexpr int of_quarter = unit::lane_lines(0), last = unit::last_quarter(0);
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x) % warp_size; i < vectors; i += warp_size) {
        const int vector = i % of_line, line = i / of_line % lines, tile = i / (of_line * lines);
        const std::byte* block = page;
        int at;  // in units of 16 bytes
        if (Role == tensor::key) {
            at = (first / 32 * lines + line) * of_line + vector;
            if (sinks) {
                at = line * (of_line / 2) + vector % (of_line / 2);
                if (vector >= of_line / 2) block = second;
            }
        } else {
            at = (tile * unit::page_lines + first / 2 + line) * of_line + vector;
            if (sinks) {
                at = (tile * (lines / 2) + line % (lines / 2)) * of_line + vector;
                if (line >= lines / 2) block = second;
            }
        }
        const int turned = (line / of_quarter & last) << 5;
        if (block != nullptr) copy_async(to + static_cast<std::uint32_t>((i * 16) ^ turned), block + at * 16);
    }
}

}}}  // namespace kvq::cuda::detail
