// Keys of mixed widths (schemes/scheme_codes.hpp) as tiles of half floats, as prefill_tile.cuh makes them of
// one width.
//
//   tile      columns are channels in their own order, since the query and all other keys of a prompt have
//             that order too
//   channel   a lane has one channel of its warp's cells: its place in the plan of the head, and with it
//             width, words and bits
//   cell      the warp writes that of 32 channels to its table; then a lane has a row, and gathers the codes
//             of four channels at a time
//
// A code of B bits lies in up to two planes (pack/code_layout.hpp): a byte of each, from which a shift and a
// mask of the table take the bits. All lanes do the same at a time, whatever the widths are: rows differ in
// nothing but the address.
// Contract: tiles as in prefill_tile.cuh; any plan of the scheme, and none. Channels without codes are their
// bias. Codes are read in store() alone: where blocks are in device memory, it waits for them.
#pragma once

#include "../layout/block_access.cuh"
#include "prefill_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Key cells of a warp: all those that tile_cells gives it.
template <class Pair, int TileRows, int TileColumns, int Warps, int Stride>
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
    /// Of the table: entries of every plane, scales, biases.
    static constexpr int scales_at = planes * 128, biases_at = scales_at + 64;
    static_assert(biases_at + 64 <= key_table_bytes);

    /// The channel of a lane, in all pages of a head.
    struct lane_channel {
        int place = 0;
        float centre = 0.0f;  // codes are counted from here, as in stored_set
        /// Where the channel's byte of a plane is in tokens 0 to 31: offset in the block << 16 | mask << 8 |
        /// shift. Shifted to the left, the byte has its bits of the code in the second byte of a word, where
        /// the mask is.
        std::uint32_t entry[planes] = {};
        std::uint32_t tile_step = 0;  // of entries, from 32 tokens to the next
        std::uint32_t raised =
            0;  // -(1024 + centre) of channels 2 lane and 2 lane + 1, for the first 16 lanes

        __device__ __forceinline__ lane_channel(const cache_ref<Pair>& cache, int head, int warp, int lane) {
            const int channel = cells::column(warp) + lane;
            const std::uint16_t* const plan = cache.key_plan(head);
            place = plan == nullptr ? channel : static_cast<int>(__ldg(plan + channel));
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
                            const int offset = 4 * page * words + 128 * line + place % 4;
                            const int left = 8 + shift - width * (quad % per);
                            constexpr std::uint32_t mask = ((1u << width) - 1u) << shift;
                            entry[p] = static_cast<std::uint32_t>(offset) << 16 | mask << 8 |
                                       static_cast<std::uint32_t>(left);
                        });
                    }
                    words += own;
                }
                first += n;
            });
            const std::uint32_t own = 0xe400u + static_cast<std::uint32_t>(centre);
            raised = __shfl_sync(0xffffffffu, own, 2 * lane % 32) |
                     __shfl_sync(0xffffffffu, own, (2 * lane + 1) % 32) << 16;
        }
    };

    const lane_channel& channel;
    stored_pair<P, true> parameters[count];  // of the lane's channel

    __device__ __forceinline__ explicit mixed_cells(const lane_channel& own) : channel(own) {}

    /// Asks for parameters.
    template <class Source>
    __device__ __forceinline__ void fetch(const Source& source, const tile_tokens& tile, int warp, int) {
        if (!source.any(tile)) return;
        constexpr std::size_t scales = typename S::layout_type{}.scale_offset(shape),
                              biases = scales + std::size_t{groups * dim * parameter_width<P>};
#pragma unroll
        for (int i = 0; i < count; ++i) {
            if (!cells::exists(warp, i)) break;
            const int row = cells::row(warp, i), of_group = (tile.first + row) % page / group;
            parameters[i].load(source.block(source.page(tile, row), row), scales, biases,
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
            fill_table(table, parameters[i].floats(), (tile.first + row) % page / 32, lane);
            __syncwarp();
            const auto codes =
                source.block(source.page(tile, row), row).from(static_cast<std::size_t>(lane * 4));
            const std::uint32_t place = to + octet_offset<Stride>(row + lane, cells::column(warp) / 8);
            static_for<4>([&](auto number) {
                constexpr int octet = decltype(number)::value;
                const uint2 front = four_channels<2 * octet>(codes, table),
                            back = four_channels<2 * octet + 1>(codes, table);
                store_shared_16(place ^ (octet * 16u), {__uint_as_float(front.x), __uint_as_float(front.y),
                                                        __uint_as_float(back.x), __uint_as_float(back.y)});
            });
        }
    }

private:
    /// tile: of 32 tokens of the page.
    __device__ __forceinline__ void fill_table(std::uint32_t table, const float2& p, int tile,
                                               int lane) const {
        const auto own = static_cast<std::uint32_t>(lane);
#pragma unroll
        for (int plane = 0; plane < planes; ++plane)
            store_word(table + static_cast<std::uint32_t>(plane * 128) + own * 4,
                       channel.entry[plane] + static_cast<std::uint32_t>(tile) * channel.tile_step);
        store_half_word(table + scales_at + own * 2, to_half(p.x));
        store_half_word(table + biases_at + own * 2, to_half(fmaf(channel.centre, p.x, p.y)));
    }
    /// x^ of channels 4 Quad to 4 Quad + 3 of the cell. codes: the block, from the lane's row on.
    template <int Quad, class Block>
    __device__ __forceinline__ uint2 four_channels(const Block& codes, std::uint32_t table) const {
        std::uint32_t code[4] = {};  // in the second byte; the last one is zero
#pragma unroll
        for (int plane = 0; plane < planes; ++plane) {
            const uint4 e = load_shared_16(table + static_cast<std::uint32_t>(plane * 128 + Quad * 16));
            const std::uint32_t entry[4] = {e.x, e.y, e.z, e.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const std::uint32_t byte = codes.template get<1>(static_cast<int>(entry[k] >> 16));
                code[k] |= __funnelshift_l(0u, byte, static_cast<int>(entry[k])) & entry[k];
            }
        }
        const uint2 scale = load_shared_8(table + static_cast<std::uint32_t>(scales_at + Quad * 8)),
                    bias = load_shared_8(table + static_cast<std::uint32_t>(biases_at + Quad * 8));
        return {pair<2 * Quad>(code[0], code[1], scale.x, bias.x),
                pair<2 * Quad + 1>(code[2], code[3], scale.y, bias.y)};
    }
    /// Number: of the pair in the cell.
    template <int Number>
    __device__ __forceinline__ std::uint32_t pair(std::uint32_t a, std::uint32_t b, std::uint32_t scale,
                                                  std::uint32_t bias) const {
        const std::uint32_t raised = __shfl_sync(0xffffffffu, channel.raised, Number);
        const std::uint32_t code =
            multiply_add_halves(__byte_perm(a, b, 0x7531) | 0x64006400u, 0x3c003c00u, raised);
        return multiply_add_halves(code, scale, bias);
    }
};

}}}  // namespace kvq::cuda::detail
