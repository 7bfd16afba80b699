// Keys of mixed widths (schemes/mixed_width.hpp) as a chunk of the warp kernel: as chunk.cuh and key_product.cuh, except that
// where one width ends and the next begins differs between heads.
//
//   query    permuted once per item (place = order of the plan), folded once per group of tokens, as everywhere
//   pieces   lie in shared memory, [4n + h: high, low][quad of the segment], not in registers: their numbers are found at run time
//   scores   one width after the other, the narrowest first; before a wider one, sums are shifted by the difference, so that
//            codes count as if they were shifted left to the widest (and scales are those of such codes)
//
// Steps of a segment (code_planes::quads_per_step) go round the four lanes t; a segment's pieces start at a multiple of a step,
// what lies between is zero, and lanes without a step read zeros.
// Contract: as key_product.cuh; any plan of the scheme, and none.
#pragma once

#include "block_access.cuh"
#include "key_product.cuh"

namespace kvq::inline v0_1::cuda::detail {

template <class Format, int Tokens>
struct mixed_chunk {
    using scheme = typename Format::keys;
    using width_list = typename scheme::width_list;
    using quads_type = typename scheme::width_quads;
    static constexpr bool key = true, full = false, mixed = true, token_parameters = false;
    static constexpr int count = width_list::count;
    static constexpr int widest = width_list::values[0];
    static constexpr int dim = Format::head_dim;
    static constexpr int page = Format::page_tokens;
    static constexpr block_shape shape = Format::key_shape();
    static constexpr int group = scheme::group == 0 || scheme::group > page ? page : scheme::group;
    static constexpr int quads = dim / 4;

    // Tiles of 32 tokens; all widths of a tile do not lie together, but all tiles of a width.
    static constexpr int tile_height = 32;
    static constexpr int tiles = ceil_div(Tokens, tile_height);
    static constexpr int row_words = scheme::row_words(dim);

    using parameter = stored_as<typename scheme::params_type>;
    static constexpr bool coded = std::is_same_v<parameter, kvq::coded>;
    static constexpr int width = parameter_width<parameter>;
    static constexpr int runs = larger(1, Tokens / group);
    static constexpr int run_bytes = dim * width;
    static constexpr int page_groups = ceil_div(page, group);
    static constexpr int shared_bytes = coded ? 6 * page_groups : 0;

    // Shared memory: as in the page, with Tokens rows.
    static constexpr int scale_at = Tokens * row_words * 4;
    static constexpr int bias_at = scale_at + runs * run_bytes;
    static constexpr int shared_at = bias_at + runs * run_bytes;
    static constexpr int bytes = shared_at + round_up(shared_bytes, 16);

    // Scratch: pieces of 4 query rows for every n, and zeros.
    static constexpr int step_of(int bits) {  // quads
        int narrowest = 1;
        while ((bits & narrowest) == 0) narrowest *= 2;
        return 8 / narrowest;
    }
    /// Pieces of a column with any plan: the most that the first widths can take with so many quads, width by width.
    static constexpr int most_pieces = [] {
        int most[quads + 1] = {}, all = 0;
        for (const int bits : width_list::values) {
            if (bits == 0) break;
            const int step = step_of(bits);
            for (int used = quads; used >= 0; --used) {
                int best = 0;
                for (int n = 0; n <= used; ++n)
                    best = larger(best, round_up(round_up(most[used - n], step) + n, step));
                most[used] = best;
                all = larger(all, best);
            }
        }
        return all;
    }();
    /// Words of a column; columns start in different banks.
    static constexpr int stride = round_up(larger(most_pieces, 16) - 16, 32) + 16;
    static constexpr int zeros = 8;
    KVQ_HD static constexpr int scratch_bytes(int rows4) { return (rows4 * 8 * stride + zeros) * 4; }

    static constexpr bool supported =
        widest < 8 && dim % 16 == 0 && page % 32 == 0 && Tokens % 32 == 0 && page % Tokens == 0 &&
        (group == page ||
         (group % 32 == 0 && page % group == 0 && (Tokens % group == 0 || group % Tokens == 0)));

    /// Of addresses: neighbouring lines of 128 bytes, which lanes of different t read, differ in their banks.
    __device__ __forceinline__ static std::uint32_t swizzle(std::uint32_t byte) {
        return byte ^ ((byte >> 7 & 3u) << 5);
    }

    /// Starts copying, as code_chunk::copy does; `plan`: of the block's head.
    __device__ __forceinline__ static void copy(std::uint32_t to, const std::byte* block, int first, int lane,
                                                const std::uint16_t* plan) {
        constexpr int parameters = static_cast<int>(scheme::parameter_offset(shape));
        if constexpr (Tokens == page) {
            copy_run(to, block, scale_at, lane, true);
            copy_run(to + scale_at, block + parameters, bytes - scale_at, lane, false);
        } else {
            const quads_type n = quads_of<scheme, dim>(plan);
            int words = 0;
            static_for<count>([&](auto w) {
                constexpr int W = decltype(w)::value, bits = width_list::values[W];
                const int own = kvq::detail::code_words(bits, n.of[W]);
                copy_run(to + static_cast<std::uint32_t>(words * Tokens * 4),
                         block + (words * page + first * own) * 4, own * Tokens * 4, lane, true);
                words += own;
            });
            const std::byte* const from = block + parameters + first / group * run_bytes;
            copy_run(to + scale_at, from, runs * run_bytes, lane, false);
            copy_run(to + bias_at, from + page_groups * run_bytes, runs * run_bytes, lane, false);
            copy_run(to + shared_at, block + parameters + 2 * page_groups * run_bytes,
                     round_up(shared_bytes, 16), lane, false);
        }
    }

    __device__ __forceinline__ static group_line<parameter> line(std::uint32_t at, int first, int r) {
        if constexpr (coded)
            return group_line<parameter>::load(
                at + shared_at + 6u * static_cast<std::uint32_t>((Tokens == page ? 0 : first / group) + r));
        else
            return {};
    }
    __device__ __forceinline__ static float4 scales(std::uint32_t at, int r, int channel) {
        return load_scales<parameter>(at +
                                      static_cast<std::uint32_t>(scale_at + r * run_bytes + channel * width));
    }
    __device__ __forceinline__ static float4 biases(std::uint32_t at, int r, int channel,
                                                    const group_line<parameter>& line_of) {
        return load_biases<parameter>(
            at + static_cast<std::uint32_t>(bias_at + r * run_bytes + channel * width), line_of);
    }

private:
    /// Runs start on lines of 128 bytes where they are swizzled.
    __device__ __forceinline__ static void copy_run(std::uint32_t to, const std::byte* from, int size,
                                                    int lane, bool swizzled) {
        // Copies of a warp start on lines of 128 bytes, as in chunk.cuh.
        const int skew = static_cast<int>(reinterpret_cast<std::uintptr_t>(from) & 112u);
        for (int at = lane * 16 - skew; at < size; at += warp_size * 16) {
            if (at < 0) continue;
            const std::uint32_t byte = to + static_cast<std::uint32_t>(at);
            copy_async(swizzled ? swizzle(byte) : byte, from + at);
        }
    }
};

template <tensor Role, class Format, int Tokens>
using chunk = std::conditional_t<Role == tensor::key && is_mixed<typename Format::keys>,
                                 mixed_chunk<Format, Tokens>, code_chunk<Role, Format, Tokens>>;

/// Words of a row of codes with these widths.
template <class Chunk>
__device__ __forceinline__ int row_words_of(const typename Chunk::quads_type& n) {
    int words = 0;
    static_for<Chunk::count>([&](auto w) {
        constexpr int W = decltype(w)::value, bits = Chunk::width_list::values[W];
        words += kvq::detail::code_words(bits, n.of[W]);
    });
    return words;
}

/// Pieces of the quads of a step.
template <int N>
__device__ __forceinline__ void load_pieces(std::uint32_t (&b)[N], std::uint32_t at) {
    if constexpr (N == 2) {
        const uint2 v = load_shared_8(at);
        b[0] = v.x, b[1] = v.y;
    } else {
        load_weights<N>(b, at);
    }
}

/// What a fold leaves in registers; the pieces are in scratch.
template <class Format, int Tokens>
struct folded_row<mixed_chunk<Format, Tokens>> {
    float step, offset;
};

/// First piece of every width, in words of a column.
template <class Chunk>
struct piece_starts {
    int of[Chunk::count];
    bool gaps = false;  // words between the segments
    __device__ __forceinline__ explicit piece_starts(const typename Chunk::quads_type& n) {
        int at = 0;
        static_for<Chunk::count>([&](auto w) {
            constexpr int W = decltype(w)::value, bits = Chunk::width_list::values[W];
            if constexpr (bits > 0) {
                constexpr int step = code_planes<bits>::quads_per_step;
                of[W] = round_up(at, step);
                at = round_up(of[W] + n.of[W], step);
                gaps = gaps || n.of[W] % step != 0;
            } else {
                of[W] = 0;
            }
        });
    }
};

/// fold_rows() of key_product.cuh for mixed widths. n: quads of every width.
template <class Chunk, int Rows4>
__device__ __forceinline__ void fold_mixed(folded_row<Chunk> (&to)[Rows4], std::uint32_t rows, int stride,
                                           std::uint32_t slot, int first, int run, std::uint32_t scratch,
                                           const typename Chunk::quads_type& n, const lane_id& id) {
    constexpr int dim = Chunk::dim, own = ceil_div(Chunk::quads, 8);  // quads of a lane, of one query row
    const auto line = Chunk::line(slot, first, run);
    const piece_starts<Chunk> starts(n);
    const int lane_of_row = 2 * id.t + (id.g & 1);
    float4 scale[own], bias[own];
    int piece[own];  // word of a column; negative: none
#pragma unroll
    for (int i = 0; i < own; ++i) {
        const int quad = i * 8 + lane_of_row;
        const bool inside = Chunk::quads % 8 == 0 || quad < Chunk::quads;
        scale[i] = Chunk::scales(slot, run, inside ? 4 * quad : 0);
        bias[i] = Chunk::biases(slot, run, inside ? 4 * quad : 0, line);
        float unit = 0.0f;
        piece[i] = -1;
        int from = 0;
        static_for<Chunk::count>([&](auto w) {
            constexpr int W = decltype(w)::value, bits = Chunk::width_list::values[W];
            if constexpr (bits > 0) {
                if (inside && quad >= from && quad < from + n.of[W]) {
                    unit = 1.0f / static_cast<float>(1 << (Chunk::widest - bits));
                    piece[i] = starts.of[W] + quad - from;
                }
                from += n.of[W];
            }
        });
        scale[i] = {scale[i].x * unit, scale[i].y * unit, scale[i].z * unit, scale[i].w * unit};
    }
    // Other lanes may still read what lies in scratch. What no piece fills is zero.
    __syncwarp();
    constexpr int all = (Rows4 * 8 * Chunk::stride + Chunk::zeros) / 4, zeros = Chunk::zeros / 4;
    if (starts.gaps) {
        for (int i = id.lane; i < all - zeros; i += warp_size)
            store_shared_16(scratch + 16u * static_cast<std::uint32_t>(i), {0.0f, 0.0f, 0.0f, 0.0f});
        __syncwarp();
    }
    if (id.lane < zeros)
        store_shared_16(scratch + 16u * static_cast<std::uint32_t>(all - zeros + id.lane),
                        {0.0f, 0.0f, 0.0f, 0.0f});
#pragma unroll
    for (int m = 0; m < Rows4; ++m) {
        const std::uint32_t row = rows + static_cast<std::uint32_t>(16 * m * stride);
        float x[own][4];
        float sum = 0.0f, dot = 0.0f;
#pragma unroll
        for (int i = 0; i < own; ++i) {
            const int quad = i * 8 + lane_of_row;
            const bool inside = Chunk::quads % 8 == 0 || quad < Chunk::quads;
            float4 q = load_parameters<float>(row + query_byte<dim>(16 * (inside ? quad : 0)));
            if (!inside) q = {0.0f, 0.0f, 0.0f, 0.0f};
            dot += fmaf(q.x, bias[i].x, q.y * bias[i].y) + fmaf(q.z, bias[i].z, q.w * bias[i].w);
            x[i][0] = q.x * scale[i].x, x[i][1] = q.y * scale[i].y;
            x[i][2] = q.z * scale[i].z, x[i][3] = q.w * scale[i].w;
            sum += (x[i][0] + x[i][1]) + (x[i][2] + x[i][3]);
        }
        std::uint32_t high[own], low[own];
        int total = 0;
        const float step = fixed_point(x, high, low, total);
        const std::uint32_t column =
            scratch + 4u * static_cast<std::uint32_t>((8 * m + 2 * (id.g / 2)) * Chunk::stride);
#pragma unroll
        for (int i = 0; i < own; ++i)
            if (piece[i] >= 0) {
                store_word(column + 4u * static_cast<std::uint32_t>(piece[i]), high[i]);
                store_word(column + 4u * static_cast<std::uint32_t>(piece[i] + Chunk::stride), low[i]);
            }
        constexpr float middle = 0.5f * static_cast<float>((1 << Chunk::widest) - 1);
        const float part = fmaf(middle * line.unit, fmaf(-step, static_cast<float>(total), sum), dot);
        to[m].step = __shfl_sync(~0u, step * line.unit, 8 * id.t);
        to[m].offset = __shfl_sync(~0u, over_row(part, add_floats{}), 8 * id.t);
    }
    __syncwarp();
}

/// Scores of tiles First .. First + Count - 1, which share their parameters.
template <class Chunk, int Rows4, int First, int Count>
__device__ __forceinline__ void score_mixed(float (&scores)[Chunk::tiles][Rows4][4],
                                            const folded_row<Chunk> (&query)[Rows4], std::uint32_t slot,
                                            std::uint32_t scratch, const typename Chunk::quads_type& n,
                                            const lane_id& id) {
    const piece_starts<Chunk> starts(n);
    const std::uint32_t pieces = scratch + 4u * static_cast<std::uint32_t>(id.g * Chunk::stride);
    const std::uint32_t nothing = scratch + 4u * static_cast<std::uint32_t>(Rows4 * 8 * Chunk::stride);
    int sums[Count][2][Rows4][4] = {};
    int words = row_words_of<Chunk>(n);  // of the segments up to the current one
    static_for<Chunk::count>([&](auto reversed) {
        constexpr int W = Chunk::count - 1 - decltype(reversed)::value, bits = Chunk::width_list::values[W];
        if constexpr (bits > 0) {
            using layout = code_words_of<bits>;
            constexpr int step_quads = layout::units_per_step;
            constexpr int narrower = W + 1 < Chunk::count ? Chunk::width_list::values[W + 1] : 0;
            if constexpr (narrower > 0) {
#pragma unroll
                for (int i = 0; i < Count * 2 * Rows4 * 4; ++i)
                    sums[i / (8 * Rows4)][i / (4 * Rows4) % 2][i / 4 % Rows4][i % 4] <<= bits - narrower;
            }
            const int own_words = kvq::detail::code_words(bits, n.of[W]);
            words -= own_words;
            const std::uint32_t segment =
                slot + 4u * static_cast<std::uint32_t>(words * Chunk::tiles * Chunk::tile_height);
            const int steps = ceil_div(n.of[W], step_quads);
            for (int j = 0; j < steps; j += 4) {
                const bool live = j + id.t < steps;
                const int step = live ? j + id.t : 0;
                std::uint32_t b[Rows4][step_quads];
#pragma unroll
                for (int m = 0; m < Rows4; ++m) {
                    const std::uint32_t at =
                        live ? pieces + 4u * static_cast<std::uint32_t>(m * 8 * Chunk::stride + starts.of[W] +
                                                                        step * step_quads)
                             : nothing;
                    load_pieces(b[m], at);
                }
                static_for<Count>([&](auto in_run) {
                    constexpr int I = decltype(in_run)::value;
                    const int tile_line = (First + I) * own_words;  // lines of 32 words
                    uint4 codes[layout::lines(step_quads)];
                    int plane_line = 0;
                    static_for<layout::plane_count>([&](auto plane) {
                        constexpr int p = decltype(plane)::value;
                        constexpr int per = step_quads / layout::units_per_word(p);
                        static_for<per>([&](auto k) {
                            constexpr int K = decltype(k)::value;
                            const auto line =
                                static_cast<std::uint32_t>(tile_line + plane_line + step * per + K);
                            codes[layout::first_line(p, step_quads) + K] = load_shared_16(Chunk::swizzle(
                                segment + 128u * line + 16u * static_cast<std::uint32_t>(id.g)));
                        });
                        plane_line += ceil_div(n.of[W], layout::units_per_word(p));
                    });
                    static_for<step_quads / 2>([&](auto x) {
                        constexpr int X = 2 * decltype(x)::value;
                        const uint4 c = layout::template codes<X>(codes),
                                    d = layout::template codes<X + 1>(codes);
#pragma unroll
                        for (int m = 0; m < Rows4; ++m) {
                            mma_codes_signed(sums[I][0][m], c.x, c.y, d.x, d.y, b[m][X], b[m][X + 1]);
                            mma_codes_signed(sums[I][1][m], c.z, c.w, d.z, d.w, b[m][X], b[m][X + 1]);
                        }
                    });
                });
            }
        }
    });
#pragma unroll
    for (int i = 0; i < Count; ++i)
#pragma unroll
        for (int m = 0; m < Rows4; ++m)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int at = 2 * (r % 2);
                const int whole = 256 * sums[i][r / 2][m][at] + sums[i][r / 2][m][at + 1];
                scores[First + i][m][r] = fmaf(static_cast<float>(whole), query[m].step, query[m].offset);
            }
}

/// Is the query folded once per item? Where channels have parameters, once per group of tokens.
template <class Chunk>
inline constexpr bool fold_once = Chunk::full || Chunk::token_parameters;

/// Scores of a chunk of any kind, whose first token is `first` of its page; `plan`: of the head.
template <class Chunk, int Rows4>
__device__ __forceinline__ void score_chunk(float (&scores)[Chunk::tiles][Rows4][4],
                                            folded_row<Chunk> (&folded)[Rows4], std::uint32_t rows,
                                            int stride, std::uint32_t slot, int first, std::uint32_t,
                                            const std::uint16_t*, const lane_id& id) requires(!Chunk::mixed) {
    constexpr int tiles_of_run =
        fold_once<Chunk> ? Chunk::tiles : smaller(Chunk::tiles, Chunk::group / Chunk::tile_height);
    static_for<Chunk::tiles>([&](auto tile) {
        constexpr int Tile = decltype(tile)::value;
        if constexpr (!fold_once<Chunk> && Tile % tiles_of_run == 0)
            fold_rows(folded, rows, stride, slot, first, Tile / tiles_of_run, id);
        score_tile<Chunk, Rows4, Tile>(scores[Tile], folded, slot, id);
    });
}
template <class Chunk, int Rows4>
__device__ __forceinline__ void score_chunk(float (&scores)[Chunk::tiles][Rows4][4],
                                            folded_row<Chunk> (&folded)[Rows4], std::uint32_t rows,
                                            int stride, std::uint32_t slot, int first, std::uint32_t scratch,
                                            const std::uint16_t* plan,
                                            const lane_id& id) requires(Chunk::mixed) {
    constexpr int tiles_of_run = smaller(Chunk::tiles, Chunk::group / Chunk::tile_height);
    const auto quads = quads_of<typename Chunk::scheme, Chunk::dim>(plan);
    static_for<Chunk::tiles / tiles_of_run>([&](auto run) {
        constexpr int R = decltype(run)::value;
        fold_mixed(folded, rows, stride, slot, first, R, scratch, quads, id);
        score_mixed<Chunk, Rows4, R * tiles_of_run, tiles_of_run>(scores, folded, slot, scratch, quads, id);
    });
}

}  // namespace kvq::inline v0_1::cuda::detail
