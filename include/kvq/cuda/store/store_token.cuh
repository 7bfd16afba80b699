// Quantizing one new token of one head by a warp, whatever its neighbours are: only the bits of its own codes
// change.
//
//   quickly     finite numbers whose codes need no clamping. A lane has quads of neighbouring channels; the
//               lanes of a group share its range by shuffles, and each makes its parameters. Neighbouring
//               lanes put words of keys together; codes of values go to lanes whose words are neighbours,
//               which change their bits
//   carefully   everything else, one number at a time
//
// A launch with one token per sequence is mostly partly written sectors of 32 bytes: of keys one for every
// word.
// Contract: the bytes that the CPU writes for the same token (core/rounding.hpp).
#pragma once

#include "store_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Is one of two 16-bit floats NaN or infinite? Then the result is not 0.
template <class T>
__device__ __forceinline__ std::uint32_t odd_halves(std::uint32_t word) {
    constexpr std::uint32_t exponent = std::is_same_v<T, float16> ? 0x7c007c00u : 0x7f807f80u;
    constexpr std::uint32_t one = std::is_same_v<T, float16> ? 0x04000400u : 0x00800080u;
    return ((word & exponent) + one) & 0x80008000u;
}

/// The numbers of a token of a 16- or 32-bit format: channel i * 32 + lane is number i of a lane.
template <tensor Role, class Pair, class T>
struct plain_row {
    using W = typename scheme_of<Role, Pair>::value_type;
    static constexpr int dim = dim_of<Role, Pair>, per_lane = ceil_div(dim, warp_size);
    T numbers[per_lane];

    __device__ __forceinline__ void fetch(const T* from, int lane) {
#pragma unroll
        for (int i = 0; i < per_lane; ++i)
            if (i * warp_size + lane < dim) numbers[i] = from[i * warp_size + lane];
    }
    /// Stores the token. False: it must be quantized carefully, and nothing was stored.
    __device__ __forceinline__ bool store(std::byte* block, int token, int lane) const {
        std::uint32_t odd = 0;
#pragma unroll
        for (int i = 0; i < per_lane; ++i)
            if (i * warp_size + lane < dim) {
                if constexpr (sizeof(T) == 2)
                    odd |= odd_halves<T>(numbers[i].bits);
                else
                    odd |= !kvq::detail::is_finite(numbers[i]);
            }
        if (__any_sync(~0u, odd != 0)) return false;
        store_as(block, token, lane, [](T x) {
            if constexpr (std::is_same_v<W, T>)
                return x;
            else
                return from_float<W>(to_float(x));
        });
        return true;
    }
    /// Any token. Returns how many numbers of this lane are not finite.
    __device__ __forceinline__ unsigned store_any(std::byte* block, int token, int lane) const {
        unsigned not_finite = 0;
        store_as(block, token, lane, [&](T x) {
            not_finite += !kvq::detail::is_finite(to_float(x));
            return window_value<W>(x);
        });
        return not_finite;
    }

private:
    template <class F>
    __device__ __forceinline__ void store_as(std::byte* block, int token, int lane,
                                             const F& as_stored) const {
        constexpr block_shape s = shape_of<Role, Pair>;
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
            const int c = i * warp_size + lane;
            if (c >= dim) continue;
            auto* const to = reinterpret_cast<W*>(
                block + sizeof(W) * kvq::full<W>::element(value_layout<W>(s), s, token, c));
            *to = as_stored(numbers[i]);
        }
    }
};

/// The numbers of a token that is quantized: quad i * 32 + lane is quad i of a lane.
template <tensor Role, class Pair, class T>
struct quantized_row {
    using S = scheme_of<Role, Pair>;
    using planes = code_planes<S::code_bits>;
    using store_type = store_traits<S, dim_of<Role, Pair>, Pair::page_tokens>;
    static constexpr int dim = dim_of<Role, Pair>, group = store_type::group, groups = store_type::groups;
    static constexpr int quads = ceil_div(dim, 4), per_lane = ceil_div(quads, warp_size);
    /// Do neighbouring lanes have the quads of a group?
    static constexpr bool whole_lanes =
        groups == 1 || (dim % group == 0 && (group == 4 || group == 8 || group == 16 || group == 32 ||
                                             group == 64 || group == 128));
    static constexpr bool quick = dim % 4 == 0 && whole_lanes;
    static constexpr int group_lanes = groups == 1 ? warp_size : group / 4;
    std::uint32_t words[per_lane][sizeof(T)];

    __device__ __forceinline__ void fetch(const T* from, int lane) {
        if constexpr (quick) {
#pragma unroll
            for (int i = 0; i < per_lane; ++i) {
                const int quad = i * warp_size + lane;
                if (quad >= quads) continue;
                const T* const at = from + 4 * quad;
                if (reinterpret_cast<std::uintptr_t>(from) % (4 * sizeof(T)) == 0) {
                    std::conditional_t<sizeof(T) == 2, uint2, uint4> v =
                        *reinterpret_cast<const decltype(v)*>(at);
                    __builtin_memcpy(words[i], &v, sizeof v);
                } else {
#pragma unroll
                    for (int k = 0; k < 4; ++k)
                        if constexpr (sizeof(T) == 4)
                            words[i][k] = __float_as_uint(at[k]);
                        else if (k % 2 == 0)
                            words[i][k / 2] = at[k].bits | static_cast<std::uint32_t>(at[k + 1].bits) << 16;
                }
            }
        }
    }
    __device__ __forceinline__ bool store(std::byte* block, int token, int lane) const {
        if constexpr (quick) {
            constexpr block_shape s = shape_of<Role, Pair>;
            stored_parameters<typename S::parameter> stored[per_lane];
            std::uint32_t codes[per_lane];
            float bias = 0.0f, inverse = 0.0f;
            bool clean = true;
#pragma unroll
            for (int i = 0; i < per_lane; ++i) {
                if (groups > 1 || i == 0) {
                    const float2 range = range_from(i, lane);
                    stored[i] = fit_range<S>(range.x, range.y);
                    bias = to_float(stored[i].bias), inverse = inverse_scale(to_float(stored[i].scale));
                    const bool finite = range.x > -INFINITY && range.y < INFINITY;
                    clean = clean && ((finite && fits_grid<S>(range.x, range.y, bias, inverse)) ||
                                      (groups > 1 && i * warp_size + lane >= quads));
                }
                const float x[4] = {number<0>(i), number<1>(i), number<2>(i), number<3>(i)};
                const float biases[4] = {bias, bias, bias, bias},
                            inverses[4] = {inverse, inverse, inverse, inverse};
                codes[i] = quad_of_codes<S>(x, biases, inverses, true);
            }
            if (!__all_sync(~0u, clean)) return false;
#pragma unroll
            for (int i = 0; i < (groups > 1 ? per_lane : 1); ++i) {
                const int quad = i * warp_size + lane;
                if (quad < quads && lane % group_lanes == 0)
                    write_parameters<S>(s, block, groups == 1 ? 0 : quad / (group / 4), token, stored[i]);
            }
            if constexpr (Role == tensor::key)
                store_words(block, token, lane, codes);
            else
                store_codes(block, token, lane, codes);
        }
        return quick;
    }

private:
    /// Range of the group of quad i of this lane, of all quads if there is one group.
    __device__ __forceinline__ float2 range_from(int i, int lane) const {
        if constexpr (sizeof(T) == 2) {
            // (minimum, -maximum), both of which are minima; NaN stays.
            constexpr std::uint32_t infinity = std::is_same_v<T, float16> ? 0x7c007c00u : 0x7f807f80u;
            std::uint32_t range = infinity;
#pragma unroll
            for (int j = 0; j < per_lane; ++j) {
                if ((groups > 1 && j != i) || j * warp_size + lane >= quads) continue;
                const std::uint32_t low = min_halves<T>(words[j][0], words[j][1]),
                                    high = max_halves<T>(words[j][0], words[j][1]) ^ 0x80008000u;
                range = min_halves<T>(
                    range, min_halves<T>(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632)));
            }
#pragma unroll
            for (int distance = 1; distance < group_lanes; distance *= 2)
                range = min_halves<T>(range, __shfl_xor_sync(~0u, range, distance));
            return {unpack_half<T, 0>(range), -unpack_half<T, 1>(range)};
        } else {
            float lo = INFINITY, hi = -INFINITY;
#pragma unroll
            for (int j = 0; j < per_lane; ++j) {
                if ((groups > 1 && j != i) || j * warp_size + lane >= quads) continue;
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const float x = __uint_as_float(words[j][k]);
                    const bool finite = kvq::detail::is_finite(x);
                    lo = fminf(lo, finite ? x : -INFINITY);
                    hi = fmaxf(hi, finite ? x : INFINITY);
                }
            }
#pragma unroll
            for (int distance = 1; distance < group_lanes; distance *= 2) {
                lo = fminf(lo, __shfl_xor_sync(~0u, lo, distance));
                hi = fmaxf(hi, __shfl_xor_sync(~0u, hi, distance));
            }
            return {lo, hi};
        }
    }
    template <int K>
    __device__ __forceinline__ float number(int i) const {
        if constexpr (sizeof(T) == 2)
            return unpack_half<T, K % 2>(words[i][K / 2]);
        else
            return __uint_as_float(words[i][K]);
    }
    /// Keys: words hold codes of one token.
    __device__ __forceinline__ static void store_words(std::byte* block, int token, int lane,
                                                       const std::uint32_t (&codes)[per_lane]) {
        constexpr block_shape s = shape_of<Role, Pair>;
        const auto layout = typename S::layout_type{}.codes(s);
        static_for<planes::count>([&](auto plane) {
            constexpr int p = decltype(plane)::value, per = planes::quads_per_word(p);
            constexpr std::uint32_t mask = ((1u << planes::width(p)) - 1u) * 0x01010101u;
#pragma unroll
            for (int i = 0; i < per_lane; ++i) {
                const int quad = i * warp_size + lane;
                std::uint32_t word = quad < quads ? ((codes[i] >> planes::shift(p)) & mask)
                                                        << (planes::width(p) * (lane % per))
                                                  : 0;
#pragma unroll
                for (int distance = 1; distance < per; distance *= 2)
                    word |= __shfl_xor_sync(~0u, word, distance);
                if (quad < quads && lane % per == 0)
                    reinterpret_cast<std::uint32_t*>(
                        block)[layout.tiles.word(token, planes::first_vector(p, quads) + quad / per)] = word;
            }
        });
    }
    /// Values: words hold codes of several tokens of a channel; only the bits of this one change.
    __device__ __forceinline__ static void store_codes(std::byte* block, int token, int lane,
                                                       const std::uint32_t (&codes)[per_lane]) {
        constexpr block_shape s = shape_of<Role, Pair>;
        const auto layout = typename S::layout_type{}.codes(s);
        const int slot = layout.cols.slot(token), quad = slot / 4, byte = slot % 4;
#pragma unroll
        for (int i = 0; i < ceil_div(dim, warp_size); ++i) {
            const int c = i * warp_size + lane;
            const std::uint32_t code =
                __shfl_sync(~0u, codes[i / 4], i % 4 * 8 + lane / 4) >> (lane % 4 * 8) & 0xffu;
            if (c >= dim) continue;
            static_for<planes::count>([&](auto plane) {
                constexpr int p = decltype(plane)::value, width = planes::width(p);
                constexpr int per = planes::quads_per_word(p);
                constexpr std::uint32_t mask = (1u << width) - 1u;
                const int vector = planes::first_vector(p, layout.quads()) + quad / per;
                // Tiles of 32 rows are a constant distance from each other.
                constexpr bool whole = dim % warp_size == 0 && (groups == 1 || group % warp_size == 0);
                auto* const word = reinterpret_cast<std::uint32_t*>(block) +
                                   (whole ? static_cast<std::size_t>(vector * warp_size + lane)
                                          : layout.tiles.word(c, vector)) +
                                   (whole ? i * warp_size * layout.tiles.words_per_row : 0);
                if constexpr (width == 8) {
                    reinterpret_cast<std::byte*>(word)[byte] = static_cast<std::byte>(code);
                } else {
                    const int shift = byte * 8 + width * (quad % per);
                    atomicAnd(word, ~(mask << shift));
                    atomicOr(word, (code >> planes::shift(p) & mask) << shift);
                }
            });
        }
    }
};

template <tensor Role, class Pair, class T>
using token_row = std::conditional_t<full_precision<scheme_of<Role, Pair>>, plain_row<Role, Pair, T>,
                                     quantized_row<Role, Pair, T>>;

/// Numbers of a float whose order as unsigned integers is that of the floats, -0 before +0.
__device__ __forceinline__ unsigned ordered_bits(float x) {
    const unsigned bits = __float_as_uint(x);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ float from_ordered_bits(unsigned bits) {
    return __uint_as_float(bits ^ (bits >> 31 ? 0x80000000u : 0xffffffffu));
}

/// Any token, whatever its numbers are. Returns how many this lane has met that are not finite.
template <tensor Role, class Pair, class T>
__device__ __forceinline__ unsigned store_carefully(const T* from, std::byte* block, int token, int lane) {
    using S = scheme_of<Role, Pair>;
    constexpr block_shape s = shape_of<Role, Pair>;
    constexpr int dim = dim_of<Role, Pair>;
    unsigned not_finite = 0;
    if constexpr (full_precision<S>) {
        plain_row<Role, Pair, T> row;
        row.fetch(from, lane);
        return row.store_any(block, token, lane);
    } else {
        using store = store_traits<S, dim, Pair::page_tokens>;
        for (int g = 0; g < store::groups; ++g) {
            const int begin = g * store::group, end = smaller(dim, begin + store::group);
            unsigned low = ~0u, high = 0u;
            for (int c = begin + lane; c < end; c += warp_size) {
                const float x = to_float(from[c]);
                if (!kvq::detail::is_finite(x)) {
                    ++not_finite;
                    continue;
                }
                low = smaller(low, ordered_bits(x));
                high = larger(high, ordered_bits(x));
            }
            low = __reduce_min_sync(~0u, low);
            high = __reduce_max_sync(~0u, high);
            const bool any = low <= high;  // anything finite
            const auto stored =
                fit_range<S>(any ? from_ordered_bits(low) : 0.0f, any ? from_ordered_bits(high) : 0.0f);
            if (lane == 0) write_parameters<S>(s, block, g, token, stored);
            const float bias = to_float(stored.bias), inverse = inverse_scale(to_float(stored.scale));
            for (int c = begin + lane; c < end; c += warp_size)
                store_code_shared<S>(s, block, token, c,
                                     static_cast<unsigned>(S::levels::template code<S::code_bits>(
                                         to_float(from[c]), bias, inverse)));
        }
    }
    return not_finite;
}

/// One token from memory, out of line: tokens that make no tile are rare where there are many. (With
/// -rdc=true a function out of line has registers of its own, more than the kernel may have.)
template <tensor Role, class Pair, class T>
#ifdef __CUDACC_RDC__
__device__ __forceinline__ unsigned store_token(
#else
__device__ __attribute__((noinline)) unsigned store_token(
#endif
    const T* from, std::byte* block, int token) {
    const int lane = static_cast<int>(threadIdx.x % warp_size);
    token_row<Role, Pair, T> row;
    row.fetch(from, lane);
    return row.store(block, token, lane) ? 0u : store_carefully<Role, Pair, T>(from, block, token, lane);
}

/// A key and a value of a 16-bit format, out of line as well: attention kernels have no registers for it.
template <class Pair, class T>
__device__ __attribute__((noinline)) unsigned store_key_and_value(const T* k, const T* v,
                                                                  std::byte* key_block,
                                                                  std::byte* value_block, int token) {
    const int lane = static_cast<int>(threadIdx.x % warp_size);
    plain_row<tensor::key, Pair, T> key;
    plain_row<tensor::value, Pair, T> value;
    key.fetch(k, lane);
    value.fetch(v, lane);
    return key.store_any(key_block, token, lane) + value.store_any(value_block, token, lane);
}

}}}  // namespace kvq::cuda::detail
