// New tokens into pages: prefill (many) and decode (one per sequence), through a slot mapping.
//
//   slot = page * page_tokens + position; negative: skip          K and V of one call go to the same slots
//
// For full<T> formats and for schemes with parameters per token. (Parameters per channel need a whole group of tokens: such
// tokens go to 16-bit window pages first and are coded when a page is full: pages.cuh.)
// One warp takes 32 input tokens of one head. Where 32 of them fill 32 slots in a row, it codes them as a tile from shared
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
    static constexpr bool tiles = PageTokens % 32 == 0 && Dim % 16 == 0 &&
                                  (group == Dim ? Dim % (4 * words::units_per_step) == 0
                                                : Dim % group == 0 && group % (4 * words::units_per_step) == 0) &&
                                  (!words::full || words::columns_per_unit == 2);
};

template <class T, int Dim>
struct store_memory {
    static constexpr int row_bytes = Dim * static_cast<int>(sizeof(T)) + 16;  // rows start in different banks
    static constexpr int warp_bytes = 32 * row_bytes;
    static constexpr int warps = larger(1, smaller(4, 40960 / warp_bytes));
};

/// One token of one head, by a warp, whatever its neighbours are.
template <tensor Role, class Format, class T>
__device__ __noinline__ unsigned store_token(const cache_ref<Format>& cache, const T* from, int slot, int head) {
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
                const float other_lo = __shfl_xor_sync(~0u, lo, step), other_hi = __shfl_xor_sync(~0u, hi, step);
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
            const float bias = static_cast<float>(stored.bias), inverse = inverse_scale(static_cast<float>(stored.scale));
            for (int c = g * group + lane; c < end; c += warp_size)
                store_code_shared<S>(s, block, token, c,
                                     static_cast<unsigned>(
                                         S::levels::template code<S::code_bits>(to_float(from[c]), bias, inverse)));
        }
    }
    return not_finite;
}

/// Writes the words of one step of units of a row, in all planes. `unit` is the step's first, `stride` the tile's height.
template <class S>
__device__ __forceinline__ void store_step(std::uint32_t* row, int unit, int units,
                                           const unsigned (&codes)[4 * word_traits<S>::units_per_step], int stride) {
    using planes = code_planes<S::code_bits>;
    static_for<planes::count>([&](auto plane) {
        constexpr int p = decltype(plane)::value;
        constexpr int per = planes::quads_per_word(p), width = planes::width(p), shift = planes::shift(p);
        constexpr std::uint32_t mask = (1u << width) - 1u;
#pragma unroll
        for (int v = 0; v < word_traits<S>::units_per_step / per; ++v) {
            std::uint32_t word = 0;
#pragma unroll
            for (int q = 0; q < per; ++q)
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    word |= ((codes[4 * (v * per + q) + k] >> shift) & mask) << (8 * k + width * q);
            row[(planes::first_vector(p, units) + unit / per + v) * stride] = word;
        }
    });
}

/// Tokens in shared memory (`rows`, row_bytes apart) to slots [slot, slot + 32), which share a page.
template <tensor Role, class Format, class T>
__device__ __forceinline__ unsigned store_tile(const cache_ref<Format>& cache, const std::byte* rows, int slot, int head,
                                               float2* parameters) {
    using S = scheme_of<Role, Format>;
    using traits = word_traits<S>;
    constexpr block_shape s = shape_of<Role, Format>;
    constexpr int dim = dim_of<Role, Format>, page = Format::page_tokens;
    using store = store_traits<S, dim, page>;
    constexpr int row_bytes = store_memory<T, dim>::row_bytes;
    constexpr int units = (Role == tensor::key ? dim : page) / traits::columns_per_unit;
    constexpr int lines = traits::lines(units);  // of a tile of 32 rows
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const int first = slot % page;
    std::byte* const block = cache.template block<Role>(slot / page, head);
    const auto input = [&](int token, int channel) {
        return *reinterpret_cast<const T*>(rows + token * row_bytes + channel * static_cast<int>(sizeof(T)));
    };
    unsigned not_finite = 0;
    float bias[store::groups], inverse[store::groups];
    if constexpr (store::coded) {
        using P = typename S::parameter;
#pragma unroll
        for (int g = 0; g < store::groups; ++g) {
            value_range range;
#pragma unroll 2
            for (int c = 0; c < store::group; c += 8) {
                T piece[8];
                __builtin_memcpy(piece, __builtin_assume_aligned(
                                            rows + lane * row_bytes + (g * store::group + c) * static_cast<int>(sizeof(T)), 16),
                                 sizeof piece);
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    const float x = to_float(piece[k]);
                    not_finite += !kvq::detail::is_finite(x);
                    range.add(x);
                }
            }
            const auto stored = S::levels::template fit<S::code_bits, P>(range.lo, range.hi);
            S{}.store_parameters(s, block, g, first + lane, stored);
            bias[g] = static_cast<float>(stored.bias);
            inverse[g] = inverse_scale(static_cast<float>(stored.scale));
            if constexpr (Role == tensor::value) parameters[g * 32 + lane] = {bias[g], inverse[g]};
        }
        __syncwarp();
    }
    if constexpr (Role == tensor::key) {
        // lane = token; the tile of these 32 tokens is one run of lines
        auto* const to = reinterpret_cast<std::uint32_t*>(block) + first * lines + lane;
        if constexpr (!store::coded) {
            using W = typename S::value_type;
#pragma unroll 8
            for (int v = 0; v < lines; ++v) {
                const T a = input(lane, 2 * v), b = input(lane, 2 * v + 1);
                not_finite += !kvq::detail::is_finite(to_float(a)) + !kvq::detail::is_finite(to_float(b));
                to[v * 32] = window_value<W>(a).bits | static_cast<std::uint32_t>(window_value<W>(b).bits) << 16;
            }
        } else {
            constexpr int step = traits::units_per_step;
#pragma unroll
            for (int u = 0; u < units; u += step) {
                unsigned codes[4 * step];
#pragma unroll
                for (int k = 0; k < 4 * step; ++k)
                    codes[k] = static_cast<unsigned>(S::levels::template code<S::code_bits>(
                        to_float(input(lane, 4 * u + k)), bias[4 * u / store::group], inverse[4 * u / store::group]));
                store_step<S>(to, u, units, codes, 32);
            }
        }
    } else {
        // lane = channel of a tile of 32 channels
        constexpr int tiles = ceil_div(dim, 32);
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
            const int height = smaller(32, dim - tile * 32);
            if (lane >= height) continue;
            const int channel = tile * 32 + lane, g = channel / store::group;
            auto* const to = reinterpret_cast<std::uint32_t*>(block) + tile * 32 * lines + lane;
            if constexpr (!store::coded) {
                using W = typename S::value_type;
#pragma unroll 8
                for (int t = 0; t < 32; t += 2) {
                    const T a = input(t, channel), b = input(t + 1, channel);
                    not_finite += !kvq::detail::is_finite(to_float(a)) + !kvq::detail::is_finite(to_float(b));
                    to[(first + t) / 2 * height] =
                        window_value<W>(a).bits | static_cast<std::uint32_t>(window_value<W>(b).bits) << 16;
                }
            } else {
                constexpr int step = traits::units_per_step;
#pragma unroll
                for (int u = 0; u < 8; u += step) {
                    unsigned codes[4 * step];
#pragma unroll
                    for (int k = 0; k < 4 * step; ++k) {
                        const float2 p = parameters[g * 32 + 4 * u + k];
                        codes[k] = static_cast<unsigned>(
                            S::levels::template code<S::code_bits>(to_float(input(4 * u + k, channel)), p.x, p.y));
                    }
                    store_step<S>(to, first / 4 + u, units, codes, height);
                }
            }
        }
    }
    return not_finite;
}

template <class Format, class T, tensor Role>
__global__ void __launch_bounds__(32 * store_memory<T, dim_of<Role, Format>>::warps)
    store_kernel(const __grid_constant__ cache_ref<Format> cache, token_view<const T> x, const long long* slots,
                 unsigned* not_finite) {
    using S = scheme_of<Role, Format>;
    constexpr int dim = dim_of<Role, Format>;
    using memory = store_memory<T, dim>;
    using store = store_traits<S, dim, Format::page_tokens>;
    __shared__ __align__(16) std::byte shared[memory::warps * memory::warp_bytes];
    __shared__ float2 shared_parameters[memory::warps][Role == tensor::value && store::coded ? store::groups * 32 : 1];
    const int warp = static_cast<int>(threadIdx.x) / warp_size, lane = static_cast<int>(threadIdx.x) % warp_size;
    const int head = static_cast<int>(blockIdx.y) * memory::warps + warp;
    if (head >= x.heads) return;
    const int begin = static_cast<int>(blockIdx.x) * 32;
    const auto slot_of = [&](int token) {
        return token >= 0 && token < x.tokens ? static_cast<int>(slots[token]) : -1;
    };
    const int here = slot_of(begin + lane);
    unsigned bad = 0;
    unsigned covered = 0;
    if constexpr (store::tiles) {
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
        const unsigned leads_before = leads(before, run_before, run_here), leads_here = leads(here, run_here, run_behind);
        const int lead = lane - here % 32;  // of this lane's token, if it has one
        covered = __ballot_sync(~0u, here >= 0 && ((lead >= 0 ? leads_here >> lead : leads_before >> (32 + lead)) & 1u));
        std::byte* const rows = shared + warp * memory::warp_bytes;
        for (unsigned left = leads_here; left; left &= left - 1) {
            const int first = begin + __ffs(static_cast<int>(left)) - 1;
            constexpr int per_row = dim * static_cast<int>(sizeof(T)) / 16;
            __syncwarp();
            if ((reinterpret_cast<std::uintptr_t>(x.at(first, head)) |
                 static_cast<std::uintptr_t>(x.token_stride) * sizeof(T)) % 16 == 0) {
#pragma unroll 8
                for (int i = lane; i < 32 * per_row; i += warp_size)
                    *reinterpret_cast<uint4*>(rows + i / per_row * memory::row_bytes + i % per_row * 16) = __ldg(
                        reinterpret_cast<const uint4*>(x.at(first + i / per_row, head)) + i % per_row);
            } else {
                for (int i = lane; i < 32 * dim; i += warp_size)
                    *reinterpret_cast<T*>(rows + i / dim * memory::row_bytes + i % dim * static_cast<int>(sizeof(T))) =
                        x.at(first + i / dim, head)[i % dim];
            }
            __syncwarp();
            bad += store_tile<Role, Format, T>(cache, rows, static_cast<int>(slots[first]), head, shared_parameters[warp]);
        }
    }
    for (unsigned left = __ballot_sync(~0u, here >= 0) & ~covered; left; left &= left - 1) {
        const int at = __ffs(static_cast<int>(left)) - 1;
        bad += store_token<Role, Format, T>(cache, x.at(begin + at, head), __shfl_sync(~0u, here, at), head);
    }
    if (not_finite && bad) atomicAdd(not_finite, bad);
}

template <class Format, class T, tensor Role>
status launch_store(const cache_ref<Format>& cache, const token_view<const T>& x, const long long* slots,
                    unsigned* not_finite, cudaStream_t stream) noexcept {
    constexpr int warps = store_memory<T, dim_of<Role, Format>>::warps;
    const dim3 grid(static_cast<unsigned>((x.tokens + 31) / 32), static_cast<unsigned>((x.heads + warps - 1) / warps));
    store_kernel<Format, T, Role><<<grid, 32 * warps, 0, stream>>>(cache, x, slots, not_finite);
    return launched("store");
}

}  // namespace detail

/// Stores token i of k and v at slots[i] (device memory); negative slots skip. k: [n][kv_heads][head_dim], v likewise with
/// value_dim; any strides, channels contiguous. not_finite, if given, adds up NaN and infinities.
template <class Format, class T>
status store(const cache_ref<Format>& cache, const token_view<const T>& k, const token_view<const T>& v,
             const long long* slots, unsigned* not_finite, cudaStream_t stream) noexcept {
    static_assert(detail::word_traits<typename Format::keys>::token_parameters &&
                      detail::word_traits<typename Format::values>::token_parameters,
                  "kvq::cuda::store: schemes with parameters per channel are coded a page at a time; store into 16-bit "
                  "window pages and use commit_full_pages or requantize_pages");
    if (status s = detail::check_ref(cache, false); !s) return s;
    if (k.tokens != v.tokens) return detail::bad_value("k has %d tokens but v has %d", k.tokens, v.tokens);
    if (k.heads != cache.kv_heads || v.heads != cache.kv_heads || k.dim != Format::head_dim || v.dim != Format::value_dim)
        return detail::bad_value("k is %d x %d and v %d x %d but the cache holds %d heads of %d and %d", k.heads, k.dim,
                                 v.heads, v.dim, cache.kv_heads, Format::head_dim, Format::value_dim);
    if (k.tokens < 0) return detail::bad_value("k has %d tokens", k.tokens);
    if (k.tokens == 0) return {};
    if (k.data == nullptr || v.data == nullptr || slots == nullptr) return detail::bad_value("k, v or slots is a null pointer");
    if (status s = detail::launch_store<Format, T, tensor::key>(cache, k, slots, not_finite, stream); !s) return s;
    return detail::launch_store<Format, T, tensor::value>(cache, v, slots, not_finite, stream);
}

}  // namespace kvq::inline v0_1::cuda
