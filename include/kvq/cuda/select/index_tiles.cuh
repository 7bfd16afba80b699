// Products of an index: queries of a row and tiles of 32 tokens in shared memory, as tensor cores multiply
// them.
//
//   int8   heads of queries are rounded to 8 bits, their largest number to 127; products (m16n8k32) are exact
//   e4m3   keys become half floats, which is exact; heads are half floats of their numbers over a power of
//          two. Products are m16n8k16, on sm_90a those of warpgroups, in float sums
//
// Lane 4 g + t: of a tile tokens 4 g to 4 g + 3, which are rows g and g + 8 of two products; of queries head
// g of 8. Keys and queries have channels in the same order, the one in which a lane reads 16 bytes.
// Contract: the same bits in every batch, of int8 on every device. A number of a query that is not finite
// makes all scores of its row NaN. Queries of 16 bits are exact beside keys of e4m3, down to 2^-24 of the
// largest number of the head.
#pragma once

#include "../arch/wgmma.cuh"
#include "../layout/warp_tile.cuh"
#include "index_pages.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

inline constexpr int index_tile = 32, index_warps = 4, index_heads = 64;

/// Of the heads of a row.
struct index_weights {
    float weights[index_heads];  // times the scales of the queries
    float own_weights[index_heads];

    /// The numbers of head `first` + 8 n + g that a lane has: four of each of `Fours` places. Returns what
    /// they are to be multiplied by; unit(largest): that and its inverse, the scale.
    template <int Fours, class T, class Channel, class Unit>
    __device__ __forceinline__ float load_head(float (&x)[Fours][4], const token_view<const T>& q,
                                               const float* w, int row, int first, int n, int lane,
                                               const Channel& channel, const Unit& unit) {
        const int g = lane / 4, t = lane % 4, head = first + 8 * n + g;
        const bool there = head < q.heads;
        const T* const from = q.at(row, there ? head : 0);
        float top = 0.0f;
        bool finite = true;
#pragma unroll
        for (int i = 0; i < Fours; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const float number = there ? to_float(from[channel(i, t) + c]) : 0.0f;
                finite = finite && kvq::detail::is_finite(number);
                x[i][c] = number;
                top = fmaxf(top, fabsf(number));
            }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        finite = (__ballot_sync(0xffffffffu, finite) >> (4 * g) & 15u) == 15u;
        const float2 of = unit(top);  // inverse and scale
        if (t == 0) {
            const float own = !there   ? 0.0f
                              : finite ? w[static_cast<std::size_t>(row) * static_cast<std::size_t>(q.heads) +
                                           static_cast<std::size_t>(head)]
                                       : NAN;
            own_weights[8 * n + g] = own;
            weights[8 * n + g] = own * (there && finite ? of.y : 1.0f);
        }
        return top > 0.0f && finite ? of.x : 0.0f;
    }
};

/// Of four lanes with sums of four tokens each gets one.
__device__ __forceinline__ float own_sum(const float (&sums)[4], int lane) {
    const int t = lane % 4;
    const bool upper = t >= 2, odd = t % 2 != 0;
    const float kept0 = upper ? sums[2] : sums[0], kept1 = upper ? sums[3] : sums[1];
    const float sum0 = kept0 + __shfl_xor_sync(0xffffffffu, upper ? sums[0] : sums[2], 2),
                sum1 = kept1 + __shfl_xor_sync(0xffffffffu, upper ? sums[1] : sums[3], 2);
    return (odd ? sum1 : sum0) + __shfl_xor_sync(0xffffffffu, odd ? sum0 : sum1, 1);
}

/// Operands of tensor cores: they stand first, as those of warpgroups begin on multiples of 1024 bytes.
template <int Count>
struct index_words {
    uint4 words[Count];
};

template <class Scheme, int Channels>
struct index_queries;
/// Of head 8 n + g and words 16 p + {0, 4, 8, 12} + t lane 4 g + t has word (n * pairs + p) * 32 + its
/// number.
template <int Channels>
struct index_queries<int8, Channels> : index_words<index_heads * Channels / 16>, index_weights {
    static constexpr int pairs = Channels / 64, blocks = index_heads / 8;

    template <class T>
    __device__ __forceinline__ void load(const token_view<const T>& q, const float* w, int row, int first,
                                         int warp, int lane) {
#pragma unroll 1
        for (int n = warp; n < blocks; n += index_warps) {
            float x[pairs * 4][4];
            const float inverse = load_head(
                x, q, w, row, first, n, lane, [](int i, int t) { return 16 * i + 4 * t; },
                [](float top) {
                    return float2{127.0f / top, top / 127.0f};
                });
            std::uint32_t packed[pairs * 4];
#pragma unroll
            for (int i = 0; i < pairs * 4; ++i) {
                packed[i] = 0;
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    // The last byte of x + 1.5 * 2^23 is that of the nearest integer.
                    const float code = fminf(fmaxf(x[i][c] * inverse, -127.0f), 127.0f) + 12582912.0f;
                    packed[i] |= (__float_as_uint(code) & 0xffu) << 8 * c;
                }
            }
#pragma unroll
            for (int p = 0; p < pairs; ++p)
                this->words[(n * pairs + p) * warp_size + lane] = {packed[4 * p], packed[4 * p + 1],
                                                                   packed[4 * p + 2], packed[4 * p + 3]};
        }
    }
};
/// Lane 4 g + t has channels 64 p + 16 t to 64 p + 16 t + 15 of head 8 n + g: words (n * eights + 2 p) * 32 +
/// its number and the 32nd further, eight channels each. Of warpgroups: row 8 n + g of blocks of 64 columns
/// with the 128-byte swizzle; step 4 p + k has channels 64 p + 16 t + 4 k and the next one as columns 2 t and
/// 2 t + 1, two further ones as 2 t + 8 and 2 t + 9.
template <int Channels>
struct index_queries<float_rows<e4m3>, Channels> : index_words<index_heads * Channels / 8>, index_weights {
    static constexpr int eights = Channels / 32, blocks = index_heads / 8;

    template <class T>
    __device__ __forceinline__ void load(const token_view<const T>& q, const float* w, int row, int first,
                                         int warp, int lane) {
#pragma unroll 1
        for (int n = warp; n < blocks; n += index_warps) {
            float x[eights * 2][4];
            const float inverse = load_head(
                x, q, w, row, first, n, lane,
                [](int i, int t) { return 64 * (i / 4) + 16 * t + 4 * (i % 4); },
                [](float top) {
                    // The power of two below it, of those with an inverse.
                    const std::uint32_t bits = __float_as_uint(top) & 0x7f800000u,
                                        unit = bits < 0x00800000u   ? 0x00800000u
                                               : bits > 0x7e800000u ? 0x7e800000u
                                                                    : bits;
                    return float2{__uint_as_float(0x7f000000u - unit), __uint_as_float(unit)};
                });
            std::uint32_t packed[eights * 4];
#pragma unroll
            for (int i = 0; i < eights * 2; ++i)
#pragma unroll
                for (int c = 0; c < 4; c += 2)
                    packed[2 * i + c / 2] =
                        inverse == 0.0f ? 0u : pack_halves<float16>(x[i][c] * inverse, x[i][c + 1] * inverse);
#if KVQ_WARPGROUP_PRODUCTS
            const int g = lane / 4, t = lane % 4;
#pragma unroll
            for (int step = 0; step < eights * 2; ++step)
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const int octet = step % 4 * 2 + k;
                    store_word(shared_address(this->words) +
                                   static_cast<std::uint32_t>(step / 4 * index_heads * 128 +
                                                              (8 * n + g) * 128 + (octet ^ g) * 16 + t * 4),
                               packed[2 * step + k]);
                }
            publish_to_products();
#else
#pragma unroll
            for (int i = 0; i < eights; ++i)
                this->words[(n * eights + i) * warp_size + lane] = {packed[4 * i], packed[4 * i + 1],
                                                                    packed[4 * i + 2], packed[4 * i + 3]};
#endif
        }
    }
};

/// Codes of 32 tokens, and a scale of each. 16 bytes stand where 8 lanes that read together meet all banks.
template <class Scheme, int Channels>
struct index_stage {
    static constexpr bool floats = float_row_scheme<Scheme>;
    uint4 words[Channels / 16 * index_tile];
    float scales[index_tile];

    /// Of 16 bytes number j * 32 + lane of the tile.
    __device__ __forceinline__ static int copied(int j, int lane) {
        if constexpr (!floats)
            return 32 * j + (lane ^ lane / 8 * 2);
        else if constexpr (Channels == 128)
            return 32 * j + (lane ^ j % 2 * 4);
        else
            return 32 * j + (lane ^ lane / 16 * 4);
    }
    /// int8: words 4 j + t of tokens 4 g to 4 g + 3.
    __device__ __forceinline__ static int of_word(int j, int lane) {
        return (4 * j + lane % 4) * 8 + (lane / 4 ^ lane % 4 * 2);
    }
    /// e4m3: channels 64 j + 16 t to 64 j + 16 t + 15 of token 4 g + i.
    __device__ __forceinline__ static int of_token(int i, int j, int lane) {
        return ((lane / 4 * 4 + i) * (Channels / 16) + 4 * j + lane % 4) ^ lane / 4 % 2 * 4;
    }
};

/// Adds the products of all heads to those of tokens 4 g to 4 g + 3.
template <class Keys, class Queries>
__device__ __forceinline__ void add_products(float (&sums)[4], const Keys& keys, const Queries& q, int heads,
                                             int lane) {
#pragma unroll
    for (int n = 0; n < q.blocks; ++n) {
        if (8 * n >= heads) break;
        float products[4][2];
        keys.multiply(q, n, lane, products);
        const float2 w = *reinterpret_cast<const float2*>(q.weights + 8 * n + lane % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sums[i] = fmaf(w.x, fmaxf(products[i][0], 0.0f), sums[i]);
            sums[i] = fmaf(w.y, fmaxf(products[i][1], 0.0f), sums[i]);
        }
    }
}

/// What a lane multiplies of a tile.
template <class Scheme, int Channels>
struct index_keys;
template <int Channels>
struct index_keys<int8, Channels> {
    static constexpr int columns = Channels / 16;
    uint4 words[columns];  // of word 4 j + t of tokens 4 g to 4 g + 3
    float scale;           // of token `lane`

    /// Codes are 128 above their numbers.
    __device__ __forceinline__ index_keys(const index_stage<int8, Channels>& from, int lane) {
#pragma unroll
        for (int j = 0; j < columns; ++j) {
            const uint4 v = from.words[from.of_word(j, lane)];
            words[j] = {v.x ^ 0x80808080u, v.y ^ 0x80808080u, v.z ^ 0x80808080u, v.w ^ 0x80808080u};
        }
        scale = from.scales[lane];
    }
    /// Products with heads 8 n to 8 n + 7: of token 4 g + i and head 2 t + k.
    __device__ __forceinline__ void multiply(const index_queries<int8, Channels>& q, int n, int lane,
                                             float (&products)[4][2]) const {
        // Integers as floats: bits of 1.5 * 2^23 + n are those of 1.5 * 2^23 and n added up.
        constexpr int zero_bits = 0x4b400000;
        constexpr float zero = 12582912.0f;
        int d[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) d[i / 4][i % 4] = zero_bits;
#pragma unroll
        for (int p = 0; p < q.pairs; ++p) {
            const uint4 b = q.words[(n * q.pairs + p) * warp_size + lane];
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const uint4 &low = words[4 * p + 2 * s], &high = words[4 * p + 2 * s + 1];
                const std::uint32_t b0 = s == 0 ? b.x : b.z, b1 = s == 0 ? b.y : b.w;
                mma_signed(d[0], low.x, low.y, high.x, high.y, b0, b1);
                mma_signed(d[1], low.z, low.w, high.z, high.w, b0, b1);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int k = 0; k < 2; ++k) products[i][k] = __int_as_float(d[i / 2][i % 2 * 2 + k]) - zero;
    }
    __device__ __forceinline__ void add_heads(float (&sums)[4], const index_queries<int8, Channels>& q,
                                              int heads, int lane) const {
        add_products(sums, *this, q, heads, lane);
    }
};
#if KVQ_WARPGROUP_PRODUCTS
/// All warps of a warpgroup multiply at the same time, each tokens of its own.
template <int Channels>
struct index_keys<float_rows<e4m3>, Channels> {
    static constexpr int parts = Channels / 64, steps = 4 * parts;
    uint4 words[4][parts];  // of token 4 g + i
    float scale;            // of token `lane`

    __device__ __forceinline__ index_keys(const index_stage<float_rows<e4m3>, Channels>& from, int lane) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < parts; ++j) words[i][j] = from.words[from.of_token(i, j, lane)];
        scale = from.scales[lane];
    }
    __device__ __forceinline__ void add_heads(float (&sums)[4],
                                              const index_queries<float_rows<e4m3>, Channels>& q, int,
                                              int lane) const {
        const std::uint32_t heads = operand_at(shared_address(q.words));
        using step_halves = std::uint32_t[steps][4];
        const auto convert = [&](step_halves& a, int p) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int j = 0; j < parts; ++j) {
                    const uint4& v = words[2 * p + r][j];
                    const std::uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        a[4 * j + k][r] = halves_of_e4m3<0>(word[k]);
                        a[4 * j + k][2 + r] = halves_of_e4m3<1>(word[k]);
                    }
                }
        };
        const auto ask = [&](float(&d)[32], const step_halves& a) {
#pragma unroll
            for (int i = 0; i < 32; ++i) d[i] = 0.0f;
            products_begin();
            static_for<steps>([&](auto step) {
                constexpr int i = decltype(step)::value;
                multiply_registers(d, a[i][0], a[i][1], a[i][2], a[i][3],
                                   operand(heads, i / 4 * index_heads * 128 + i % 4 * 32));
            });
            products_commit();
        };
        const auto add = [&](const float(&d)[32], float& even, float& odd) {
#pragma unroll
            for (int n = 0; n < index_heads / 8; ++n) {
                const float2 w = *reinterpret_cast<const float2*>(q.weights + 8 * n + lane % 4 * 2);
                even = fmaf(w.x, fmaxf(d[4 * n], 0.0f), even);
                even = fmaf(w.y, fmaxf(d[4 * n + 1], 0.0f), even);
                odd = fmaf(w.x, fmaxf(d[4 * n + 2], 0.0f), odd);
                odd = fmaf(w.y, fmaxf(d[4 * n + 3], 0.0f), odd);
            }
        };
        step_halves first, second;
        float of_first[32], of_second[32];
        convert(first, 0);
        ask(of_first, first);
        convert(second, 1);
        products_wait<0>();
        products_there(of_first);
        ask(of_second, second);
        add(of_first, sums[0], sums[1]);
        products_wait<0>();
        products_there(of_second);
        add(of_second, sums[2], sums[3]);
    }
};
#else
template <int Channels>
struct index_keys<float_rows<e4m3>, Channels> {
    static constexpr int parts = Channels / 64, steps = 4 * parts;
    std::uint32_t halves[4][steps][2];  // of token 4 g + i
    float scale;                        // of token `lane`

    __device__ __forceinline__ index_keys(const index_stage<float_rows<e4m3>, Channels>& from, int lane) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < parts; ++j) {
                const uint4 v = from.words[from.of_token(i, j, lane)];
                const std::uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    halves[i][4 * j + k][0] = halves_of_e4m3<0>(word[k]);
                    halves[i][4 * j + k][1] = halves_of_e4m3<1>(word[k]);
                }
            }
        scale = from.scales[lane];
    }
    __device__ __forceinline__ void multiply(const index_queries<float_rows<e4m3>, Channels>& q, int n,
                                             int lane, float (&products)[4][2]) const {
        float d[2][4] = {};
#pragma unroll
        for (int i = 0; i < steps / 2; ++i) {
            const uint4 b = q.words[(n * q.eights + i) * warp_size + lane];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const std::uint32_t b0 = k == 0 ? b.x : b.z, b1 = k == 0 ? b.y : b.w;
#pragma unroll
                for (int p = 0; p < 2; ++p) {
                    const auto &even = halves[2 * p][2 * i + k], &odd = halves[2 * p + 1][2 * i + k];
                    mma_values<float16>(d[p], even[0], odd[0], even[1], odd[1], b0, b1);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int k = 0; k < 2; ++k) products[i][k] = d[i / 2][i % 2 * 2 + k];
    }
    __device__ __forceinline__ void add_heads(float (&sums)[4],
                                              const index_queries<float_rows<e4m3>, Channels>& q, int heads,
                                              int lane) const {
        add_products(sums, *this, q, heads, lane);
    }
};
#endif

/// Shared memory of a thread block: queries, and the tiles of a warp that are on their way.
template <class Scheme, int Channels>
struct index_memory : index_queries<Scheme, Channels> {
    static constexpr int stages = 2;
    index_stage<Scheme, Channels> ring[index_warps][stages];
};

}}}  // namespace kvq::cuda::detail
