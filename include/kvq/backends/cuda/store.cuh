// New tokens into pages: prefill (many) and decode (one per sequence), through a slot mapping.
//
//   slot = page * page_tokens + position; negative: skip          K and V of one call go to the same slots
//
// For full<T> formats and for schemes with parameters per token. (Parameters per channel need a whole group of tokens: such
// tokens go to 16-bit window pages first and are coded when a page is full: pages.cuh.)
// One thread block takes 32 input tokens of one head and tensor. Where 32 of them fill 32 slots in a row, it codes them as a tile from shared
// memory: lane = token for parameters and keys, lane = channel for values, whole words, no atomics. Other tokens go one by
// one; only the bits of their own codes are changed, so tokens of a call may share bytes.
// Contract: a page whose slots have all been written holds the bytes that the CPU writes for the same tokens.
#pragma once

#include "../../core/token_view.hpp"
#include "block_access.cuh"
#include "chunk.cuh"

namespace kvq::inline v0_1::cuda {

namespace detail {

/// W(float(x)) as the CPU rounds it, NaN payloads included.
template <class W, class T>
__device__ __forceinline__ W window_value(T x) {
    if constexpr (std::is_same_v<W, T> && !std::is_same_v<W, float>) {
        constexpr std::uint16_t infinity = std::is_same_v<W, float16> ? 0x7c00 : 0x7f80;
        constexpr std::uint16_t quiet = std::is_same_v<W, float16> ? 0x200 : 0x40;
        return (x.bits & 0x7fffu) > infinity ? W::from_bits(static_cast<std::uint16_t>(x.bits | quiet)) : x;
    }
    const float f = to_float(x);
    if constexpr (std::is_same_v<W, float>)
        return f;
    else if (kvq::detail::is_nan(f))
        return W(static_cast<float>(x));
    else
        return from_float<W>(f);
}

/// What a scheme's tile needs to know at compile time.
template <class S, int Dim, int PageTokens>
struct store_traits {
    using words = word_traits<S>;
    static constexpr bool coded = !words::full;
    static constexpr int group = !coded || words::group == 0 || words::group > Dim ? Dim : words::group;
    static constexpr int groups = coded ? ceil_div(Dim, group) : 1;
    /// Whole tiles: 32 tokens of a page, groups and words that do not overlap.
    static constexpr bool tiles =
        PageTokens % 32 == 0 && Dim % 16 == 0 && group % 8 == 0 &&
        (group == Dim ? Dim % (4 * words::units_per_step) == 0
                      : Dim % group == 0 && group % (4 * words::units_per_step) == 0) &&
        (!words::full || words::columns_per_unit == 2);
};

inline constexpr int store_warps = 4;
inline constexpr int store_threads = store_warps * warp_size;

template <class T, int Dim>
struct store_memory {
    static constexpr int row_bytes = Dim * static_cast<int>(sizeof(T)) + 16;  // rows start in different banks
};

/// The code of x in the low byte, for a finite x of a group that fits its grid (no NaN, no infinity, no clamping): the
/// rounding of core/rounding.hpp by adding a number whose last place is 1.
template <class S>
__device__ __forceinline__ std::uint32_t quick_code(float x, float bias, float inverse) {
    if constexpr (S::levels::has_bias)
        return __float_as_uint(__fadd_rn(__fmul_rn(x - bias, inverse), 8388608.0f));
    else
        return __float_as_uint(
            __fadd_rn(__fmul_rn(x, inverse), 12582912.0f + static_cast<float>(S::zero_code)));
}
/// Does no number of [lo, hi] need clamping?
template <class S>
__device__ __forceinline__ bool fits_grid(float lo, float hi, float bias, float inverse) {
    constexpr float top = static_cast<float>(S::levels::template top<S::code_bits>);
    if constexpr (S::levels::has_bias)
        return lo >= bias && (hi - bias) * inverse < top + 0.25f;
    else
        return fmaxf(fabsf(lo), fabsf(hi)) * inverse < top - static_cast<float>(S::zero_code) + 0.25f;
}

/// Four codes as the bytes of a word.
template <class S>
__device__ __forceinline__ std::uint32_t quad_of_codes(const float (&x)[4], const float (&bias)[4],
                                                       const float (&inverse)[4], bool clean) {
    std::uint32_t y[4];
    if (clean) {
#pragma unroll
        for (int k = 0; k < 4; ++k) y[k] = quick_code<S>(x[k], bias[k], inverse[k]);
    } else {
#pragma unroll
        for (int k = 0; k < 4; ++k)
            y[k] =
                static_cast<std::uint32_t>(S::levels::template code<S::code_bits>(x[k], bias[k], inverse[k]));
    }
    return __byte_perm(__byte_perm(y[0], y[1], 0x0040), __byte_perm(y[2], y[3], 0x0040), 0x5410);
}

/// Writes the words of one step of quads of a row, in all planes. `unit` is the step's first, `stride` the tile's height.
template <class S>
__device__ __forceinline__ void store_step(std::uint32_t* row, int unit, int units,
                                           const std::uint32_t (&quads)[word_traits<S>::units_per_step],
                                           int stride) {
    using planes = code_planes<S::code_bits>;
    static_for<planes::count>([&](auto plane) {
        constexpr int p = decltype(plane)::value;
        constexpr int per = planes::quads_per_word(p), width = planes::width(p), shift = planes::shift(p);
        constexpr std::uint32_t mask = ((1u << width) - 1u) * 0x01010101u;
#pragma unroll
        for (int v = 0; v < word_traits<S>::units_per_step / per; ++v) {
            std::uint32_t word = 0;
#pragma unroll
            for (int q = 0; q < per; ++q) word |= ((quads[v * per + q] >> shift) & mask) << (width * q);
            row[(planes::first_vector(p, units) + unit / per + v) * stride] = word;
        }
    });
}

/// One token of one head, by a warp, whatever its neighbours are.
template <tensor Role, class Format, class T>
__device__ __noinline__ unsigned store_token(const cache_ref<Format>& cache, const T* from, int slot,
                                             int head) {
    using S = scheme_of<Role, Format>;
    constexpr block_shape s = shape_of<Role, Format>;
    constexpr int dim = dim_of<Role, Format>;
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const int token = slot % Format::page_tokens;
    std::byte* const block = cache.template block<Role>(slot / Format::page_tokens, head);
    unsigned not_finite = 0;
    if constexpr (full_precision<S>) {
        using W = typename S::value_type;
        for (int c = lane; c < dim; c += warp_size) {
            not_finite += !kvq::detail::is_finite(to_float(from[c]));
            kvq::detail::store_as(block + sizeof(W) * S::element(value_layout<W>(s), s, token, c),
                                  window_value<W>(from[c]));
        }
    } else {
        using P = typename S::parameter;
        constexpr int group = store_traits<S, dim, Format::page_tokens>::group;
        for (int g = 0; g * group < dim; ++g) {
            const int end = smaller(dim, (g + 1) * group);
            // The first of equal minima counts, as on the CPU: -0 and +0 make different bytes.
            float lo = 0.0f, hi = 0.0f;
            int at = dim;
            for (int c = g * group + lane; c < end; c += warp_size) {
                const float x = to_float(from[c]);
                if (!kvq::detail::is_finite(x)) {
                    ++not_finite;
                    continue;
                }
                if (at == dim || x < lo) {
                    lo = x;
                    hi = at == dim ? x : hi;
                    at = c;
                }
                hi = fmaxf(hi, x);
            }
#pragma unroll
            for (int step = 1; step < warp_size; step *= 2) {
                const float other_lo = __shfl_xor_sync(~0u, lo, step),
                            other_hi = __shfl_xor_sync(~0u, hi, step);
                const int other = __shfl_xor_sync(~0u, at, step);
                if (other == dim) continue;
                hi = at == dim ? other_hi : fmaxf(hi, other_hi);
                if (at == dim || other_lo < lo || (other_lo == lo && other < at)) {
                    lo = other_lo;
                    at = other;
                }
            }
            const auto stored = S::levels::template fit<S::code_bits, P>(lo, hi);
            if (lane == 0) S{}.store_parameters(s, block, g, token, stored);
            const float bias = static_cast<float>(stored.bias),
                        inverse = inverse_scale(static_cast<float>(stored.scale));
            for (int c = g * group + lane; c < end; c += warp_size)
                store_code_shared<S>(s, block, token, c,
                                     static_cast<unsigned>(S::levels::template code<S::code_bits>(
                                         to_float(from[c]), bias, inverse)));
        }
    }
    return not_finite;
}

/// What the threads of a tile tell each other: [group][token] bias and 1 / scale; parts of ranges.
template <int Groups>
struct tile_parameters {
    float2 of[Groups][32];
    float lo[store_warps][32], hi[store_warps][32];
};

/// Tokens in shared memory (`rows`, row_bytes apart) to slots [slot, slot + 32), which share a page. All threads of a block.
template <tensor Role, class Format, class T>
__device__ __forceinline__ unsigned store_tile(
    const cache_ref<Format>& cache, const std::byte* rows, int slot, int head,
    tile_parameters<store_traits<scheme_of<Role, Format>, dim_of<Role, Format>, Format::page_tokens>::groups>&
        shared) {
    using S = scheme_of<Role, Format>;
    using traits = word_traits<S>;
    constexpr block_shape s = shape_of<Role, Format>;
    constexpr int dim = dim_of<Role, Format>, page = Format::page_tokens;
    using store = store_traits<S, dim, page>;
    constexpr int row_bytes = store_memory<T, dim>::row_bytes;
    constexpr int units = (Role == tensor::key ? dim : page) / traits::columns_per_unit;
    constexpr int lines = traits::lines(units);  // of a tile of 32 rows
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    const int first = slot % page;
    std::byte* const block = cache.template block<Role>(slot / page, head);
    const auto input = [&](int token, int channel) {
        return *reinterpret_cast<const T*>(rows + token * row_bytes + channel * static_cast<int>(sizeof(T)));
    };
    // Eight numbers of this lane's token.
    const auto piece = [&](int channel, float(&x)[8]) {
        T raw[8];
        __builtin_memcpy(
            raw,
            __builtin_assume_aligned(rows + lane * row_bytes + channel * static_cast<int>(sizeof(T)), 16),
            sizeof raw);
#pragma unroll
        for (int k = 0; k < 8; ++k) x[k] = to_float(raw[k]);
    };
    unsigned not_finite = 0;
    bool clean = true;
    if constexpr (store::coded) {
        using P = typename S::parameter;
        for (int g = 0; g < store::groups; ++g) {
            // lane = token; the warps take a quarter of the group's channels each, in order
            constexpr int pieces = store::group / 8;
            const int begin = warp * pieces / store_warps, end = (warp + 1) * pieces / store_warps;
            float lo = INFINITY, hi = -INFINITY, poison = 0.0f;
#pragma unroll 4
            for (int i = begin; i < end; ++i) {
                float x[8];
                piece(g * store::group + 8 * i, x);
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    lo = fminf(lo, x[k]);
                    hi = fmaxf(hi, x[k]);
                    poison = fmaf(x[k], 0.0f, poison);  // NaN once x is NaN or infinite
                }
            }
            // Not every number finite, or zero the smallest: then of -0 and +0 the first counts, as on the CPU.
            if (!(poison == 0.0f) || lo == 0.0f) {
                lo = INFINITY, hi = -INFINITY;
                for (int i = begin; i < end; ++i) {
                    float x[8];
                    piece(g * store::group + 8 * i, x);
                    for (int k = 0; k < 8; ++k) {
                        const bool finite = kvq::detail::is_finite(x[k]);
                        not_finite += !finite;
                        if (finite && x[k] < lo) lo = x[k];
                        if (finite && x[k] > hi) hi = x[k];
                    }
                }
            }
            clean = clean && not_finite == 0;
            shared.lo[warp][lane] = lo;
            shared.hi[warp][lane] = hi;
            __syncthreads();
            if (warp == g % store_warps) {
#pragma unroll
                for (int w = 0; w < store_warps; ++w) {
                    lo = w == 0 || shared.lo[w][lane] < lo ? shared.lo[w][lane] : lo;
                    hi = w == 0 || shared.hi[w][lane] > hi ? shared.hi[w][lane] : hi;
                }
                if (lo > hi) lo = hi = 0.0f;  // nothing finite
                const auto stored = S::levels::template fit<S::code_bits, P>(lo, hi);
                S{}.store_parameters(s, block, g, first + lane, stored);
                const float bias = static_cast<float>(stored.bias),
                            inverse = inverse_scale(static_cast<float>(stored.scale));
                shared.of[g][lane] = {bias, inverse};
                clean = clean && fits_grid<S>(lo, hi, bias, inverse);
            }
            __syncthreads();
        }
        clean = __syncthreads_and(clean) != 0;
    }
    if constexpr (Role == tensor::key) {
        // lane = token; the tile of these 32 tokens is one run of lines, of which every warp writes some
        auto* const to = reinterpret_cast<std::uint32_t*>(block) + first * lines + lane;
        if constexpr (!store::coded) {
            using W = typename S::value_type;
#pragma unroll 4
            for (int i = warp; i < dim / 8; i += store_warps) {
                T raw[8];
                __builtin_memcpy(raw,
                                 __builtin_assume_aligned(
                                     rows + lane * row_bytes + i * 8 * static_cast<int>(sizeof(T)), 16),
                                 sizeof raw);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const T a = raw[2 * k], b = raw[2 * k + 1];
                    not_finite += !kvq::detail::is_finite(to_float(a)) + !kvq::detail::is_finite(to_float(b));
                    to[(4 * i + k) * 32] =
                        window_value<W>(a).bits | static_cast<std::uint32_t>(window_value<W>(b).bits) << 16;
                }
            }
        } else {
            constexpr int step = traits::units_per_step, at_once = larger(step, 2);  // quads
#pragma unroll 2
            for (int u = warp * at_once; u < units; u += store_warps * at_once) {
                const float2 p = shared.of[4 * u / store::group][lane];
                const float bias[4] = {p.x, p.x, p.x, p.x}, inverse[4] = {p.y, p.y, p.y, p.y};
                std::uint32_t quads[at_once];
#pragma unroll
                for (int q = 0; q < at_once; q += 2) {
                    float x[8];
                    piece(4 * (u + q), x);
                    const float a[4] = {x[0], x[1], x[2], x[3]}, b[4] = {x[4], x[5], x[6], x[7]};
                    quads[q] = quad_of_codes<S>(a, bias, inverse, clean);
                    quads[q + 1] = quad_of_codes<S>(b, bias, inverse, clean);
                }
#pragma unroll
                for (int q = 0; q < at_once; q += step) {
                    std::uint32_t part[step];
#pragma unroll
                    for (int k = 0; k < step; ++k) part[k] = quads[q + k];
                    store_step<S>(to, u + q, units, part, 32);
                }
            }
        }
    } else {
        // lane = channel of a tile of 32 channels; the warps share tiles and tokens
        constexpr int tiles = ceil_div(dim, 32), parts = larger(1, store_warps / tiles);
        constexpr int step = traits::units_per_step;
        constexpr int steps = store::coded ? 8 / step : 16;  // of a tile: words of quads, or pairs of tokens
        for (int job = warp; job < tiles * parts; job += store_warps) {
            const int tile = job / parts, part = job % parts;
            const int height = smaller(32, dim - tile * 32);
            if (lane >= height) continue;
            const int channel = tile * 32 + lane;
            auto* const to = reinterpret_cast<std::uint32_t*>(block) + tile * 32 * lines + lane;
#pragma unroll 2
            for (int i = part * steps / parts; i < (part + 1) * steps / parts; ++i) {
                if constexpr (!store::coded) {
                    using W = typename S::value_type;
                    const T a = input(2 * i, channel), b = input(2 * i + 1, channel);
                    not_finite += !kvq::detail::is_finite(to_float(a)) + !kvq::detail::is_finite(to_float(b));
                    to[(first / 2 + i) * height] =
                        window_value<W>(a).bits | static_cast<std::uint32_t>(window_value<W>(b).bits) << 16;
                } else {
                    std::uint32_t quads[step];
#pragma unroll
                    for (int q = 0; q < step; ++q) {
                        float x[4], bias[4], inverse[4];
#pragma unroll
                        for (int k = 0; k < 4; ++k) {
                            const int token = 4 * (i * step + q) + k;
                            const float2 p = shared.of[channel / store::group][token];
                            x[k] = to_float(input(token, channel));
                            bias[k] = p.x;
                            inverse[k] = p.y;
                        }
                        quads[q] = quad_of_codes<S>(x, bias, inverse, clean);
                    }
                    store_step<S>(to, first / 4 + i * step, units, quads, height);
                }
            }
        }
    }
    return not_finite;
}

/// One tensor: 32 input tokens of one head. `part` of `parts`: blocks that share tokens which go one by one.
template <class Format, class T, tensor Role>
__device__ __forceinline__ void store_tokens(const cache_ref<Format>& cache, const token_view<const T>& x,
                                             const long long* slots, unsigned* not_finite, int part,
                                             int parts) {
    using S = scheme_of<Role, Format>;
    constexpr int dim = dim_of<Role, Format>;
    using memory = store_memory<T, dim>;
    using store = store_traits<S, dim, Format::page_tokens>;
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    const int head = static_cast<int>(blockIdx.y);
    const int begin = static_cast<int>(blockIdx.x) / parts * 32;
    const auto slot_of = [&](int token) {
        return token >= 0 && token < x.tokens ? static_cast<int>(slots[token]) : -1;
    };
    const int here = slot_of(begin + lane);
    unsigned bad = 0;
    unsigned covered = 0;
    if constexpr (store::tiles) {
        __shared__ __align__(16) std::byte rows[32 * memory::row_bytes];
        __shared__ tile_parameters<store::groups> parameters;
        // Which tokens continue the slot of the token before them: 32 before, here, 32 behind.
        const int before = slot_of(begin - 32 + lane), behind = slot_of(begin + 32 + lane);
        const auto runs = [&](int slot, int previous_last) {
            int previous = __shfl_up_sync(~0u, slot, 1);
            if (lane == 0) previous = previous_last;
            return __ballot_sync(~0u, slot >= 0 && previous >= 0 && slot == previous + 1);
        };
        const unsigned run_before = runs(before, -1), run_here = runs(here, __shfl_sync(~0u, before, 31)),
                       run_behind = runs(behind, __shfl_sync(~0u, here, 31));
        const auto leads = [&](int slot, unsigned low, unsigned high) {
            const unsigned follow = static_cast<unsigned>(
                ((static_cast<unsigned long long>(high) << 32 | low) >> (lane + 1)) & 0x7fffffffu);
            return __ballot_sync(~0u, slot >= 0 && slot % 32 == 0 && follow == 0x7fffffffu);
        };
        const unsigned leads_before = leads(before, run_before, run_here),
                       leads_here = leads(here, run_here, run_behind);
        const int lead = lane - here % 32;  // of this lane's token, if it has one
        covered = __ballot_sync(
            ~0u, here >= 0 && ((lead >= 0 ? leads_here >> lead : leads_before >> (32 + lead)) & 1u));
        for (unsigned left = part == 0 ? leads_here : 0u; left; left &= left - 1) {
            const int first = begin + __ffs(static_cast<int>(left)) - 1;
            constexpr int per_row = dim * static_cast<int>(sizeof(T)) / 16;
            __syncthreads();
            if ((reinterpret_cast<std::uintptr_t>(x.at(first, head)) |
                 static_cast<std::uintptr_t>(x.token_stride) * sizeof(T)) %
                    16 ==
                0) {
#pragma unroll
                for (int i = static_cast<int>(threadIdx.x); i < 32 * per_row; i += store_threads)
                    copy_async(shared_address(rows) + static_cast<std::uint32_t>(
                                                          i / per_row * memory::row_bytes + i % per_row * 16),
                               reinterpret_cast<const uint4*>(x.at(first + i / per_row, head)) + i % per_row);
                copy_commit();
                copy_wait<0>();
            } else {
                for (int i = static_cast<int>(threadIdx.x); i < 32 * dim; i += store_threads)
                    *reinterpret_cast<T*>(rows + i / dim * memory::row_bytes +
                                          i % dim * static_cast<int>(sizeof(T))) =
                        x.at(first + i / dim, head)[i % dim];
            }
            __syncthreads();
            bad += store_tile<Role, Format, T>(cache, rows, static_cast<int>(slots[first]), head, parameters);
        }
    }
    for (unsigned left = __ballot_sync(~0u, here >= 0) & ~covered; left; left &= left - 1) {
        const int at = __ffs(static_cast<int>(left)) - 1;
        if (at % (parts * store_warps) == part * store_warps + warp)
            bad +=
                store_token<Role, Format, T>(cache, x.at(begin + at, head), __shfl_sync(~0u, here, at), head);
    }
    if (not_finite && bad) atomicAdd(not_finite, bad);
}

template <class Format, class T>
__global__ void __launch_bounds__(store_threads)
    store_kernel(const __grid_constant__ cache_ref<Format> cache, token_view<const T> k,
                 token_view<const T> v, const long long* slots, unsigned* not_finite, int parts) {
    const int part = static_cast<int>(blockIdx.x) % parts;
    if (blockIdx.z == 0)
        store_tokens<Format, T, tensor::key>(cache, k, slots, not_finite, part, parts);
    else
        store_tokens<Format, T, tensor::value>(cache, v, slots, not_finite, part, parts);
}

}  // namespace detail

/// Stores token i of k and v at slots[i] (device memory); negative slots skip. k: [n][kv_heads][head_dim], v likewise with
/// value_dim; any strides, channels contiguous. not_finite, if given, adds up NaN and infinities.
template <class Format, class T>
status store(const cache_ref<Format>& cache, const token_view<const T>& k, const token_view<const T>& v,
             const long long* slots, unsigned* not_finite, cudaStream_t stream) noexcept {
    static_assert(
        detail::word_traits<typename Format::keys>::token_parameters &&
            detail::word_traits<typename Format::values>::token_parameters,
        "kvq::cuda::store: schemes with parameters per channel are coded a page at a time; store into 16-bit "
        "window pages and use commit_full_pages or requantize_pages");
    if (status s = detail::check_ref(cache, false); !s) return s;
    if (k.tokens != v.tokens) return detail::bad_value("k has %d tokens but v has %d", k.tokens, v.tokens);
    if (k.heads != cache.kv_heads || v.heads != cache.kv_heads || k.dim != Format::head_dim ||
        v.dim != Format::value_dim)
        return detail::bad_value("k is %d x %d and v %d x %d but the cache holds %d heads of %d and %d",
                                 k.heads, k.dim, v.heads, v.dim, cache.kv_heads, Format::head_dim,
                                 Format::value_dim);
    if (k.tokens < 0) return detail::bad_value("k has %d tokens", k.tokens);
    if (k.tokens == 0) return {};
    if (k.data == nullptr || v.data == nullptr || slots == nullptr)
        return detail::bad_value("k, v or slots is a null pointer");
    // Few tokens are usually one per sequence: then more blocks share the tokens that do not make tiles.
    const int parts = k.tokens <= 512 ? 8 : 1;
    const dim3 grid(static_cast<unsigned>((k.tokens + 31) / 32 * parts),
                    static_cast<unsigned>(cache.kv_heads), 2);
    detail::store_kernel<Format, T>
        <<<grid, detail::store_threads, 0, stream>>>(cache, k, v, slots, not_finite, parts);
    return detail::launched("store");
}

}  // namespace kvq::inline v0_1::cuda
