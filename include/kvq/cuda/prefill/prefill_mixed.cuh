// Keys of mixed widths (schemes/scheme_codes.hpp) as tiles of half floats, as prefill_tile.cuh makes them of
// one width.
//
//   tile      columns are places of the plan of the head, in which codes of a width lie together: queries and
//             all other keys of a block have that order (prefill_block::order), or channels have places of
//             their own in it
//   lane      a lane has one place of its warp's cells: with it width, words and bits
//   cell      the warp writes what its 8 quads of places need to its table; then a lane has a row, and takes
//             the codes of a quad from a word of each plane
//
// A code of B bits lies in up to two planes (pack/code_layout.hpp): words of four places, which a rotation
// and a mask of the table make the codes' bytes. All lanes do the same at a time, for any widths.
// Contract: tiles as in prefill_tile.cuh; any plan of the scheme, and none. Channels without codes are their
// bias. Codes are read in store() alone, which waits for them.
#pragma once

#include "../layout/block_access.cuh"
#include "prefill_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Key cells of a warp: all those that tile_cells gives it.
template <class Pair, int TileRows, int TileColumns, int Warps>
struct mixed_cells {
    using S = typename Pair::keys;
    using P = typename S::parameter;
    using cells = tile_cells<TileRows, TileColumns, Warps>;
    static constexpr block_shape shape = Pair::key_shape();
    static constexpr int page = Pair::page_tokens, dim = Pair::head_dim, count = cells::each;
    static constexpr int group = S::granularity_type::group == 0 || S::granularity_type::group > page
                                     ? page
                                     : S::granularity_type::group;
    static constexpr int groups = kvq::detail::ceil_div(page, group), planes = most_planes(codec<S>);
    static constexpr bool exact = std::is_same_v<P, float16>;  // parameters are halves already
    /// Of the table: entries of the 8 quads for every plane, their centres, scales, biases, places.
    static constexpr int centres_at = planes * 64, scales_at = centres_at + 32, biases_at = scales_at + 64,
                         places_at = biases_at + 64;
    static_assert(places_at + 64 <= key_table_bytes);

    /// The place of a lane, in all pages of a head.
    struct lane_channel {
        int place = 0;
        float centre = 0.0f;  // codes are counted from here, as in stored_set
        /// Where the quad's word of a plane is in tokens 0 to 31: offset in the block << 16 | mask of a byte
        /// << 8 | by how much the word is rotated to the left.
        std::uint32_t entry[planes] = {};
        std::uint32_t tile_step = 0;  // of entries, from 32 tokens to the next
        int at = -1;                  // the place in the tile, where it is another one
        bool two_planes = false;      // has a code of the warp's cells two?

        __device__ __forceinline__ lane_channel(const cache_ref<Pair>& cache, int sequence, int head,
                                                int warp, int lane, const std::uint16_t* order) {
            place = cells::column(warp) + lane;
            const std::uint16_t* const plan = cache.key_plan(sequence, head);
            if (plan != order) {
                int channel = place;
                if (plan != nullptr)
#pragma unroll 1
                    for (int c = 0; c < dim; ++c)
                        if (static_cast<int>(__ldg(plan + c)) == place) channel = c;
                at = order == nullptr ? channel : static_cast<int>(__ldg(order + channel));
            }
            const auto quads = quads_of<S, dim>(plan);
            int first = 0, words = 0;  // quads and words of a row before those of the width
            static_for<S::width_list::count>([&](auto number) {
                constexpr int bits = S::width_list::values[decltype(number)::value];
                const int n = quads.of[decltype(number)::value], quad = place / 4 - first;
                if constexpr (bits > 0) {
                    const int own = kvq::detail::code_words(bits, n);
                    if (quad >= 0 && quad < n) {
                        centre = exact ? 0.0f : static_cast<float>(1 << (bits - 1));
                        tile_step = static_cast<std::uint32_t>(own * 128) << 16;
                        static_for<code_planes<bits>::count>([&](auto plane) {
                            using code = code_planes<bits>;
                            constexpr int p = decltype(plane)::value, per = code::quads_per_word(p);
                            constexpr int width = code::width(p), shift = code::shift(p);
                            const int line = code::first_vector(p, n) + quad / per;
                            const int offset = 4 * page * words + 128 * line;
                            const int left = (shift - width * (quad % per)) & 31;
                            constexpr std::uint32_t mask = ((1u << width) - 1u) << shift;
                            entry[p] = static_cast<std::uint32_t>(offset) << 16 | mask << 8 |
                                       static_cast<std::uint32_t>(left);
                        });
                    }
                    words += own;
                }
                first += n;
            });
            two_planes = __any_sync(0xffffffffu, planes == 2 && entry[planes - 1] != 0);
        }
    };
    /// Cells below each other that have the same parameters.
    static constexpr int per_set = page % group == 0 && group % 64 == 0 && count % 2 == 0 ? 2 : 1;

    const lane_channel& channel;
    stored_pair<P, true> parameters[count / per_set];  // of the lane's place

    __device__ __forceinline__ explicit mixed_cells(const lane_channel& own) : channel(own) {}

    /// Asks for parameters.
    template <class Source>
    __device__ __forceinline__ void fetch(const Source& source, const tile_tokens& tile, int warp, int) {
        if (!source.any(tile)) return;
        constexpr std::size_t scales = typename S::layout_type{}.scale_offset(shape),
                              biases = scales + std::size_t{groups * dim * parameter_width<P>};
#pragma unroll
        for (int i = 0; i < count; i += per_set) {
            if (!cells::exists(warp, i)) break;
            const int row = cells::row(warp, i), of_group = (tile.first + row) % page / group;
            parameters[i / per_set].load(source.block(source.page(tile, row), row), scales, biases,
                                         of_group * dim + channel.place,
                                         static_cast<int>(biases) + groups * dim + of_group * 6);
        }
    }

    /// Dequantizes the cells whose parameters were fetched to the tile at `to`; `table`: of this warp.
    template <class Source>
    __device__ __forceinline__ void store(const Source& source, std::uint32_t to, const tile_tokens& tile,
                                          std::uint32_t table, int warp, int lane) const {
        if (!source.any(tile)) return;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            if (!cells::exists(warp, i)) break;
            const int row = cells::row(warp, i);
            __syncwarp();
            if (i % per_set == 0) fill_parameters(table, parameters[i / per_set].floats(), lane);
            fill_entries(table, (tile.first + row) % page / 32, lane);
            __syncwarp();
            const auto codes =
                source.block(source.page(tile, row), row).from(static_cast<std::size_t>(lane * 4));
            const std::uint32_t place = to + octet_offset<TileRows>(row + lane, cells::column(warp) / 8);
            if (__any_sync(0xffffffffu, channel.at >= 0)) {
                static_for<4>([&](auto number) {
                    constexpr unsigned octet = decltype(number)::value;
                    std::uint32_t x[4];
                    make_octet<octet, planes>(x, codes, table);
                    const uint4 p = load_shared_16(table + places_at + octet * 16);
                    octet_places{{p.x, p.y, p.z, p.w}}.template store<TileRows>(to, row + lane, x);
                });
                continue;
            }
            const auto all = [&]<int Planes>(std::integral_constant<int, Planes>) {
                static_for<4>([&](auto number) {
                    constexpr unsigned octet = decltype(number)::value;
                    std::uint32_t x[4];
                    make_octet<octet, Planes>(x, codes, table);
                    store_shared_16(place ^ (octet * 16u), {__uint_as_float(x[0]), __uint_as_float(x[1]),
                                                            __uint_as_float(x[2]), __uint_as_float(x[3])});
                });
            };
            if (channel.two_planes)
                all(std::integral_constant<int, planes>{});
            else
                all(std::integral_constant<int, 1>{});
        }
    }

private:
    /// tile: of 32 tokens of the page.
    __device__ __forceinline__ void fill_entries(std::uint32_t table, int tile, int lane) const {
        const auto own = static_cast<std::uint32_t>(lane);
        if (lane % 4 == 0)
#pragma unroll
            for (int plane = 0; plane < planes; ++plane) {
                const std::uint32_t e = channel.entry[plane],
                                    to = table + static_cast<std::uint32_t>(plane * 64) + own * 2;
                store_word(to, e + static_cast<std::uint32_t>(tile) * channel.tile_step);
                store_word(to + 4, (e >> 8 & 0xffu) * 0x01010101u);
            }
    }
    __device__ __forceinline__ void fill_parameters(std::uint32_t table, const float2& p, int lane) const {
        const auto own = static_cast<std::uint32_t>(lane);
        if (lane % 4 == 0)
            store_word(
                table + centres_at + own,
                twice(static_cast<std::uint16_t>(0xe400u + static_cast<std::uint32_t>(channel.centre))));
        store_half_word(table + scales_at + own * 2, to_half(p.x));
        store_half_word(table + biases_at + own * 2, to_half(fmaf(channel.centre, p.x, p.y)));
        store_half_word(table + places_at + own * 2, static_cast<std::uint16_t>(channel.at));
    }
    /// x^ of places 8 Octet to 8 Octet + 7 of the cell. codes: the block, from the lane's row on.
    template <unsigned Octet, int Planes, class Block>
    __device__ __forceinline__ static void make_octet(std::uint32_t (&x)[4], const Block& codes,
                                                      std::uint32_t table) {
        std::uint32_t code[2] = {};
#pragma unroll
        for (unsigned plane = 0; plane < Planes; ++plane) {
            const uint4 e = load_shared_16(table + plane * 64 + Octet * 16);
            const std::uint32_t entry[2] = {e.x, e.z}, mask[2] = {e.y, e.w};
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const std::uint32_t word = codes.template get<4>(static_cast<int>(entry[k] >> 16));
                code[k] |= __funnelshift_l(word, word, static_cast<int>(entry[k])) & mask[k];
            }
        }
        const uint2 raised = load_shared_8(table + centres_at + Octet * 8);  // -(1024 + centre)
        const uint4 scale = load_shared_16(table + scales_at + Octet * 16),
                    bias = load_shared_16(table + biases_at + Octet * 16);
        const auto pair = [](std::uint32_t halves, std::uint32_t centre, std::uint32_t s, std::uint32_t b) {
            return multiply_add_halves(multiply_add_halves(halves, 0x3c003c00u, centre), s, b);
        };
        x[0] = pair(__byte_perm(code[0], 0x64646464u, 0x4140), raised.x, scale.x, bias.x);
        x[1] = pair(__byte_perm(code[0], 0x64646464u, 0x4342), raised.x, scale.y, bias.y);
        x[2] = pair(__byte_perm(code[1], 0x64646464u, 0x4140), raised.y, scale.z, bias.z);
        x[3] = pair(__byte_perm(code[1], 0x64646464u, 0x4342), raised.y, scale.w, bias.w);
    }
};

}}}  // namespace kvq::cuda::detail
