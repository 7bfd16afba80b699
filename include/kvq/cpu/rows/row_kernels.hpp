// Products with rows of tokens, in place: one pass over the bytes for up to four operands.
//
//   row_keys<Lanes, Kind, Scales, Q>       y[i][t] = unit * sum_c x^[t][c] x[i][c]
//   row_values<Lanes, Kind, Scales, Q>     y[i][c] += sum_t w[i][t] x^[t][c]
//   decode_rows                            x^ as floats, in the order of the vectors
//
//   x^ = scale * number + minimum          scale and minimum of a group of channels, where there are any
//
// Keys: all channels of some tokens are summed in lanes, as many sums as a vector has lanes, which are then
// added up together. Values: a chunk of channels of all tokens is summed in registers.
// Contract: float products and sums; a pass is over at most tokens_of_pass tokens. Nothing outside of the
// rows is read.
#pragma once

#include <cstring>

#include "row_numbers.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Tokens of a pass.
inline constexpr int tokens_of_pass = 128;

/// What a chunk is multiplied by and what is added to it.
enum class row_scales { none, scale, scale_and_minimum, scale_of_16 };

/// Rows of a pass.
struct row_pass {
    const std::byte* const* rows;  ///< one for each token
    const std::byte* const* next;  ///< rows that are prefetched meanwhile
    int tokens, dim;
    int front, chunk_bytes;  ///< bytes before the numbers of a chunk, and of a chunk
    const float* scales;     ///< [token][chunk], of 16 channels [token][2 * chunk], and a vector beyond them
    const float* minima;
    std::ptrdiff_t scale_stride;
    const float* end;  ///< [token][row_chunk]: the numbers of the last chunk, if it is no whole one

    int whole_chunks() const { return dim / row_chunk; }
    int chunks() const { return (dim + row_chunk - 1) / row_chunk; }
};

template <class Lanes, row_layout::number Kind, row_scales Scales>
struct row_reader {
    using floats = typename Lanes::floats;
    using numbers = row_numbers<Lanes, Kind>;
    static constexpr int width = Lanes::width, vectors = numbers::vectors;

    /// Chunk c of token t.
    static KVQ_INLINE void load(const row_pass& r, const std::byte* row, const std::byte* next,
                                const float* scales, const float* minima, int c, floats (&v)[vectors]) {
        const std::ptrdiff_t at = std::ptrdiff_t{c} * r.chunk_bytes;
        detail::prefetch(next + at);
        numbers::load(row + at + r.front, v);
        scale(scales, minima, c, v);
    }
    static KVQ_INLINE void load_end(const row_pass& r, int t, const float* scales, const float* minima,
                                    floats (&v)[vectors]) {
        KVQ_UNROLL
        for (int i = 0; i < vectors; ++i)
            v[i] = Lanes::load_floats(r.end + std::ptrdiff_t{t} * row_chunk + i * width);
        scale(scales, minima, r.whole_chunks(), v);
    }

private:
    static KVQ_INLINE void scale([[maybe_unused]] const float* scales, [[maybe_unused]] const float* minima,
                                 [[maybe_unused]] int c, [[maybe_unused]] floats (&v)[vectors]) {
        if constexpr (Scales == row_scales::scale_of_16) {
            scale_sixteens(scales + 2 * c, v);
        } else if constexpr (Scales != row_scales::none) {
            const auto by = Lanes::splat_float(scales[c]);
            KVQ_UNROLL
            for (int i = 0; i < vectors; ++i)
                if constexpr (Scales == row_scales::scale)
                    v[i] = Lanes::multiply(v[i], by);
                else
                    v[i] = Lanes::multiply_add(v[i], by, Lanes::splat_float(minima[c]));
        }
    }
    static KVQ_INLINE void scale_sixteens(const float* scales, floats (&v)[vectors]) {
        if constexpr (width == 16) {
            alignas(64) static constexpr std::int32_t halves[16] = {0, 0, 0, 0, 0, 0, 0, 0,
                                                                    1, 1, 1, 1, 1, 1, 1, 1};
            const auto by = Lanes::lookup(Lanes::load_floats(scales),
                                          Lanes::load(reinterpret_cast<const std::byte*>(halves)));
            KVQ_UNROLL
            for (int i = 0; i < vectors; ++i) v[i] = Lanes::multiply(v[i], by);
        } else {
            KVQ_UNROLL
            for (int i = 0; i < vectors; ++i)
                v[i] = Lanes::multiply(v[i], Lanes::splat_float(scales[i / (vectors / 2)]));
        }
    }
};

/// x: Q operands in the order of the vectors, whole chunks. y[i][t]: y_stride apart.
template <class Lanes, row_layout::number Kind, row_scales Scales, int Q>
KVQ_NOINLINE void row_keys(const row_pass& pass, const float* const* operands, float* y,
                           std::ptrdiff_t y_stride) {
    using floats = typename Lanes::floats;
    using ints = typename Lanes::ints;
    using reader = row_reader<Lanes, Kind, Scales>;
    constexpr int width = Lanes::width, vectors = reader::vectors, together = width / Q > 0 ? width / Q : 1;
    // Operands stay in registers, where there are as many: else compilers load them for every token.
    constexpr bool holds = width >= 16 && Q * (together + vectors) <= 24;
    const auto held = [](floats a) KVQ_INLINE_LAMBDA {
        return Lanes::as_floats(Lanes::in_register(Lanes::as_ints(a)));
    };
    const row_pass r = pass;  // a copy that no store can alias
    const float* x[Q];
    KVQ_UNROLL
    for (int i = 0; i < Q; ++i) x[i] = operands[i];
    const int chunks = r.whole_chunks();
    for (int t = 0; t < r.tokens; t += together) {
        floats sum[Q * together];
        KVQ_UNROLL
        for (int i = 0; i < Q * together; ++i) sum[i] = Lanes::splat_float(0.0f);
        const std::byte *row[together], *next[together];
        const float *scales[together], *minima[together];
        KVQ_UNROLL
        for (int k = 0; k < together; ++k) {
            const std::ptrdiff_t at = detail::smaller(t + k, r.tokens - 1);
            row[k] = r.rows[at];
            next[k] = r.next[at];
            scales[k] = r.scales + (Scales != row_scales::none ? at * r.scale_stride : 0);
            minima[k] = r.minima + (Scales == row_scales::scale_and_minimum ? at * r.scale_stride : 0);
        }
        const auto multiply = [&](int c, const auto& load) KVQ_INLINE_LAMBDA {
            floats of_x[Q][vectors];
            KVQ_UNROLL
            for (int i = 0; i < Q; ++i) {
                KVQ_UNROLL
                for (int j = 0; j < vectors; ++j) {
                    of_x[i][j] = Lanes::load_floats(x[i] + c * row_chunk + j * width);
                    if constexpr (holds) of_x[i][j] = held(of_x[i][j]);
                }
            }
            KVQ_UNROLL
            for (int k = 0; k < together; ++k) {
                floats v[vectors];
                load(k, v);
                KVQ_UNROLL
                for (int j = 0; j < vectors; ++j) {
                    KVQ_UNROLL
                    for (int i = 0; i < Q; ++i)
                        sum[i * together + k] = Lanes::multiply_add(v[j], of_x[i][j], sum[i * together + k]);
                }
            }
        };
        for (int c = 0; c < chunks; ++c)
            multiply(c, [&](int k, floats(&v)[vectors]) KVQ_INLINE_LAMBDA {
                reader::load(r, row[k], next[k], scales[k], minima[k], c, v);
            });
        if (r.end)
            multiply(chunks, [&](int k, floats(&v)[vectors]) KVQ_INLINE_LAMBDA {
                reader::load_end(r, detail::smaller(t + k, r.tokens - 1), scales[k], minima[k], v);
            });
        float sums[Q * together];
        if constexpr (Q * together == width) {
            ints lanes[width];
            KVQ_UNROLL
            for (int i = 0; i < width; ++i) lanes[i] = Lanes::as_ints(sum[i]);
            Lanes::store_floats(
                sums, Lanes::merge_lanes(lanes, [](floats a, floats b) { return Lanes::add(a, b); }));
        } else {
            KVQ_UNROLL
            for (int i = 0; i < Q * together; ++i) sums[i] = Lanes::sum(sum[i]);
        }
        const int here = detail::smaller(together, r.tokens - t);
        if (here == together) {
            KVQ_UNROLL
            for (int i = 0; i < Q; ++i)
                std::memcpy(y + i * y_stride + t, sums + i * together, sizeof(float) * together);
        } else {
            for (int i = 0; i < Q; ++i)
                for (int k = 0; k < here; ++k) y[i * y_stride + t + k] = sums[i * together + k];
        }
    }
}

/// w[i][t]: w_stride apart. y: Q rows in the order of the vectors, whole chunks.
template <class Lanes, row_layout::number Kind, row_scales Scales, int Q>
KVQ_NOINLINE void row_values(const row_pass& pass, const float* w, std::ptrdiff_t w_stride, float* y,
                             std::ptrdiff_t y_stride) {
    using floats = typename Lanes::floats;
    using reader = row_reader<Lanes, Kind, Scales>;
    constexpr int width = Lanes::width, vectors = reader::vectors;
    // Chunks that share the loads of weights, and sums that do not wait for each other.
    constexpr int most = width >= 16 && Q > 1 ? 2 : 1, apart = Q * vectors < 8 ? 8 / (Q * vectors) : 1;
    const row_pass r = pass;
    const auto sums_of = [&]<int Chunks>(std::integral_constant<int, Chunks>, int c,
                                         const auto& load) KVQ_INLINE_LAMBDA {
        constexpr int all = Chunks * vectors;
        floats sum[apart][Q][all];
        KVQ_UNROLL
        for (int a = 0; a < apart; ++a) {
            KVQ_UNROLL
            for (int i = 0; i < Q; ++i) {
                KVQ_UNROLL
                for (int j = 0; j < all; ++j) sum[a][i][j] = Lanes::splat_float(0.0f);
            }
        }
        const auto add = [&](int t, floats(&of)[Q][all]) KVQ_INLINE_LAMBDA {
            floats v[Chunks][vectors];
            KVQ_UNROLL
            for (int k = 0; k < Chunks; ++k) load(t, c + k, v[k]);
            KVQ_UNROLL
            for (int i = 0; i < Q; ++i) {
                const auto weight = Lanes::splat_float(w[i * w_stride + t]);
                KVQ_UNROLL
                for (int j = 0; j < all; ++j)
                    of[i][j] = Lanes::multiply_add(v[j / vectors][j % vectors], weight, of[i][j]);
            }
        };
        int t = 0;
        for (; t + apart <= r.tokens; t += apart) {
            KVQ_UNROLL
            for (int a = 0; a < apart; ++a) add(t + a, sum[a]);
        }
        for (; t < r.tokens; ++t) add(t, sum[0]);
        KVQ_UNROLL
        for (int i = 0; i < Q; ++i) {
            KVQ_UNROLL
            for (int j = 0; j < all; ++j) {
                float* const to = y + i * y_stride + c * row_chunk + j * width;
                auto whole = sum[0][i][j];
                KVQ_UNROLL
                for (int a = 1; a < apart; ++a) whole = Lanes::add(whole, sum[a][i][j]);
                Lanes::store_floats(to, Lanes::add(Lanes::load_floats(to), whole));
            }
        }
    };
    const auto load = [&](int t, int c, floats(&v)[vectors]) KVQ_INLINE_LAMBDA {
        reader::load(r, r.rows[t], r.next[t], r.scales + t * r.scale_stride, r.minima + t * r.scale_stride, c,
                     v);
    };
    int c = 0;
    for (; c + most <= r.whole_chunks(); c += most) sums_of(std::integral_constant<int, most>(), c, load);
    const std::integral_constant<int, 1> one;
    if (most > 1 && c < r.whole_chunks()) sums_of(one, c++, load);
    if (r.end)
        sums_of(one, c, [&](int t, int, floats(&v)[vectors]) KVQ_INLINE_LAMBDA {
            reader::load_end(r, t, r.scales + t * r.scale_stride, r.minima + t * r.scale_stride, v);
        });
}

/// [token][whole chunks], `stride` floats apart.
template <class Lanes, row_layout::number Kind, row_scales Scales>
KVQ_NOINLINE void decode_rows(const row_pass& pass, float* to, std::ptrdiff_t stride) {
    using reader = row_reader<Lanes, Kind, Scales>;
    const row_pass r = pass;
    typename Lanes::floats v[reader::vectors];
    for (int t = 0; t < r.tokens; ++t) {
        const float *const scales = r.scales + t * r.scale_stride, *const minima =
                                                                       r.minima + t * r.scale_stride;
        float* out = to + t * stride;
        const auto store = [&] {
            KVQ_UNROLL
            for (int j = 0; j < reader::vectors; ++j, out += Lanes::width) Lanes::store_floats(out, v[j]);
        };
        for (int c = 0; c < r.whole_chunks(); ++c) {
            reader::load(r, r.rows[t], r.next[t], scales, minima, c, v);
            store();
        }
        if (r.end) {
            reader::load_end(r, t, scales, minima, v);
            store();
        }
    }
}

}}}  // namespace kvq::kernels
