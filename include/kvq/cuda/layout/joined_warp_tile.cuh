// Warp tiles of two pages of 16 tokens: in shared memory they look like one of a page of 32 tokens, so that
// all that follows is the same.
//
//   keys    a line of 32 tokens is a line of the first page beside one of the second
//   values  a plane's words of the first page, then those of the second
//   tokens' parameters: 16 of the first page, then 16 of the second
//
// (Alone, warp tiles of 16 tokens leave half of the lanes idle where scores become weights, and twice as many
// warp tiles each have a fixed cost.) For numbers whose parameters belong to tokens, and 16-bit ones:
// channels would have other parameters in every page.
// Contract: as warp_tile.cuh; of a page that is not there nothing is read, and what stands for it may be
// anything.
#pragma once

#include "warp_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// The format whose pages hold the tokens of two pages.
template <class Pair>
using two_pages = block_pair<typename Pair::keys, typename Pair::values, Pair::head_dim,
                             2 * Pair::page_tokens, Pair::value_dim>;

template <tensor Role, class Pair>
inline constexpr bool joins_role = [] {
    if constexpr (read_by_numbers<scheme_of<Role, Pair>>) {
        return token_row_scheme<scheme_of<Role, Pair>>;  // row_warp_tile.cuh
    } else {
        using traits = word_traits<scheme_of<Role, Pair>>;
        bool whole_words = true;  // none holds tokens of both pages
        if constexpr (Role == tensor::value && traits::token_parameters)
            for (int p = 0; p < traits::plane_count; ++p)
                whole_words = whole_words &&
                              Pair::page_tokens % (traits::columns_per_unit * traits::units_per_word(p)) == 0;
        return traits::token_parameters && whole_words;
    }
}();
template <class Pair>
inline constexpr bool joins_pages =
    Pair::page_tokens == 16 && joins_role<tensor::key, Pair>&& joins_role<tensor::value, Pair>;

template <tensor Role, class Pair, int Bands = 1>
struct joined_warp_tile : code_warp_tile<Role, two_pages<Pair>, 2 * Pair::page_tokens, false, Bands> {
    using base = code_warp_tile<Role, two_pages<Pair>, 2 * Pair::page_tokens, false, Bands>;
    using traits = typename base::traits;
    static constexpr bool joined = true;
    static constexpr block_shape page_shape = shape_of<Role, Pair>;

    /// Starts copying the blocks of the two pages, either of which may be null. All lanes of a warp together.
    __device__ __forceinline__ static void copy(std::uint32_t to, const std::byte* first,
                                                const std::byte* second, int lane,
                                                [[maybe_unused]] int band = 0) {
        static_for<base::tiles>([&](auto tile) {
            constexpr int T = decltype(tile)::value;
            constexpr int height = T + 1 == base::tiles ? base::last_height : base::tile_height;
            static_for<traits::plane_count>([&](auto plane) {
                constexpr int p = decltype(plane)::value;
                constexpr int n = base::plane_lines(p), of_quarter = base::lane_lines(p);
                const std::uint32_t begin = to + T * base::tile_height * base::lines * 4 +
                                            traits::first_line(p, base::units) * height * 4;
                constexpr int of_line = height / 4, vectors = n * of_line;
                // Where the plane begins in a page's block.
                constexpr int page_units = base::key ? base::page_units : base::units / 2;
                constexpr int page_height = base::key ? 16 : height, page_lines = traits::lines(page_units);
                const int source =
                    T * base::tile_height * page_lines * 4 +
                    traits::first_line(p, page_units) * page_height * 4 +
                    (Bands == 1 ? 0 : band * (base::key ? n * page_height : base::dim * page_lines) * 4);
                static_for<ceil_div(vectors, warp_size)>([&](auto i) {
                    const int number = decltype(i)::value * warp_size + lane;
                    const int line = number / of_line, vector = number % of_line;
                    const bool behind = base::key ? vector >= of_line / 2 : line >= n / 2;
                    const std::byte* const block = behind ? second : first;
                    const int from = base::key
                                         ? line * 64 + vector % (of_line / 2) * 16
                                         : (line - (behind ? n / 2 : 0)) * page_height * 4 + vector * 16;
                    const int turned = height == 32 ? (line / of_quarter & base::last_quarter(p)) << 5 : 0;
                    if (block != nullptr && (vectors % warp_size == 0 || number < vectors))
                        copy_async(begin + static_cast<std::uint32_t>((number * 16) ^ turned),
                                   block + source + from);
                });
            });
        });
        if constexpr (!base::full) copy_parameters(to, first, second, lane, band);
    }

private:
    __device__ __forceinline__ static void copy_parameters(std::uint32_t to, const std::byte* first,
                                                           const std::byte* second, int lane,
                                                           [[maybe_unused]] int band) {
        constexpr int of_section = base::section / 16, vectors = (traits::has_bias ? 2 : 1) * of_section;
        constexpr int of_page = base::run_bytes / 2;  // of one run
        const int before =
            base::page_group < base::all_channels ? band * base::dim / base::page_group * of_page : 0;
        static_for<ceil_div(vectors, warp_size)>([&](auto i) {
            const int number = decltype(i)::value * warp_size + lane;
            const bool bias = number >= of_section;
            const int byte = (number - (bias ? of_section : 0)) * 16;
            const bool behind = byte / of_page % 2 != 0;
            const std::byte* const block = behind ? second : first;
            const std::size_t section =
                bias ? traits::bias_offset(page_shape) : traits::scale_offset(page_shape);
            if (block != nullptr && (vectors % warp_size == 0 || number < vectors))
                copy_async(to + static_cast<std::uint32_t>((bias ? base::bias_at : base::scale_at) + byte),
                           block + section + before + byte / base::run_bytes * of_page + byte % of_page);
        });
    }
};

}}}  // namespace kvq::cuda::detail
