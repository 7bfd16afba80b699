// Scores by which pages are chosen (best_pages.cuh): exact ones of the first page and the last two, estimates
// of all others.
//
//   exact      a warp takes a token; a thread block leaves the softmax states of its tokens
//   estimates  of eight pages by a warp where they are products of matrices (range_products), else of one
//
// Contract: reads the parameters of all pages that are ranked, codes of none but the first and the last two.
// Source: cpu/product/score_estimate.hpp, attention/page_choice.hpp.
#pragma once

#include "../decode/score_modifiers.cuh"
#include "../layout/mixed_cache.cuh"
#include "../store/page_memory.hpp"
#include "score_estimate.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda { namespace detail {

/// Where a launch writes the smaller cache.
struct chosen_tables {
    int *tokens, *committed;  // [sequences]
    int* window;              // [sequences][ring]
    int* quantized;           // [formats][sequences][kv_heads][columns]
    int columns;

    template <class Plan>
    int* of_format(int f, const Plan& p) const noexcept {
        return quantized + static_cast<std::size_t>(f) * static_cast<std::size_t>(p.sequences) *
                               static_cast<std::size_t>(p.kv_heads) * static_cast<std::size_t>(columns);
    }
};

/// As attention/page_choice.hpp has it.
__device__ __forceinline__ float rough_exp2(float x) {
    const float bounded = x > -126.0f ? fminf(x, 110.0f) : -127.0f;
    return __uint_as_float(static_cast<unsigned>((bounded + 127.0f) * 0x1p23f));
}

inline constexpr int choice_threads = 1024, choice_warps = choice_threads / warp_size, choice_ends = 3,
                     most_choice_rows = 16, most_choice_bytes = 40960, most_choice_parts = warp_size;

template <class T, class Score, class Window, class Sinks, class... Pairs>
struct choice_args {
    static constexpr int dim = Window::head_dim, page_tokens = Window::page_tokens,
                         formats = sizeof...(Pairs);
    using value_type = T;
    using score_type = Score;
    object_list<cache_ref<Pairs>...> pages;
    cache_ref<Window> window;
    cache_ref<Sinks> sinks;  // window.first_token of them
    const int* committed;    // [sequences]
    token_view<const T> q;   // [sequences][heads][dim]
    float scale, softcap;
    Score score;
    int group, wanted, room;   // room: pages of a row of estimates
    int parts;                 // blocks of a head
    bool early;                // as in attention_options
    float* estimates;          // [sequences][kv_heads][room][group]
    float2* ends;              // [sequences][kv_heads][parts][group]: maximum and sum of exact scores
    unsigned* tickets;         // [sequences][kv_heads], zero before and after
    resident_memory resident;  // of one of the formats
    chosen_tables to;
};

/// The rows of one kv head, as all formats want them: [1 + formats][group][dim] in shared memory, first as
/// the 16-bit pages want them.
template <class Args>
struct choice_rows {
    float* query;
    bool* bad;  // [group] in shared memory: the row has a number that is not finite

    template <int F>
    __device__ __forceinline__ float* of(const Args& a) const {
        return query + (F + 1) * a.group * Args::dim;
    }
    static constexpr int numbers = token_numbers<Args::dim>;
    /// The row of a warp, on its way from memory.
    __device__ __forceinline__ void ask(const Args& a, int sequence, int head, float (&x)[numbers]) const {
        const int r = static_cast<int>(threadIdx.x) / warp_size,
                  lane = static_cast<int>(threadIdx.x) % warp_size;
        if (r >= a.group) return;
        const auto* const from = a.q.at(sequence, head * a.group + r);
#pragma unroll
        for (int i = 0; i < numbers; ++i) {
            const int c = i * warp_size + lane;
            x[i] = c < Args::dim ? to_float(from[c]) : 0.0f;
        }
    }
    /// asked: by ask(). All threads.
    __device__ __forceinline__ void load(const Args& a, int sequence, int head,
                                         const float (&asked)[numbers]) {
        constexpr int dim = Args::dim;
        const int warp = static_cast<int>(threadIdx.x) / warp_size,
                  lane = static_cast<int>(threadIdx.x) % warp_size;
        static_assert(most_choice_rows <= choice_warps);
        if (const int r = warp; r < a.group) {
            float x[numbers], zero = 0.0f;
#pragma unroll
            for (int i = 0; i < numbers; ++i) {
                const int c = i * warp_size + lane;
                x[i] = c < dim ? asked[i] * a.scale : 0.0f;
                zero = fmaf(x[i], 0.0f, zero);
                if (!kvq::detail::is_finite(x[i])) x[i] = 0.0f;
            }
            const bool not_finite = __any_sync(0xffffffffu, zero != 0.0f);
            if (lane == 0) bad[r] = not_finite;
            const auto store = [&](float* to, const float(&y)[numbers], const std::uint16_t* plan) {
#pragma unroll
                for (int i = 0; i < numbers; ++i)
                    if (const int c = i * warp_size + lane; c < dim)
                        to[r * dim + (plan == nullptr ? c : static_cast<int>(plan[c]))] = y[i];
            };
            store(query, x, nullptr);
            static_for<Args::formats>([&](auto f) {
                const auto& cache = get<decltype(f)::value>(a.pages);
                using keys = typename std::remove_cvref_t<decltype(cache)>::pair_type::keys;
                float y[numbers];
#pragma unroll
                for (int i = 0; i < numbers; ++i) y[i] = x[i];
                if constexpr (has_transform<keys>)
                    transform_row<token_channels, dim>(y, transform_of<tensor::key>(cache), head);
                store(of<decltype(f)::value>(a), y,
                      codec<keys>.several_widths() ? cache.key_plan(sequence, head) : nullptr);
            });
        }
        __syncthreads();
    }
};

/// A key of a 16-bit page.
template <class Pair>
__device__ __forceinline__ float full_key(const cache_ref<Pair>& cache, int page, int head, int token,
                                          int channel) {
    using S = typename Pair::keys;
    using T = typename S::value_type;
    constexpr block_shape shape = shape_of<tensor::key, Pair>;
    return to_float(reinterpret_cast<const T*>(
        cache.key_block(page, head))[S::element(value_layout<T>(shape), shape, token, channel)]);
}
/// x^ of a key, of mixed widths by place, behind a transform as it is stored.
template <class Pair>
__device__ __forceinline__ float stored_key(const cache_ref<Pair>& cache, int sequence, int page, int head,
                                            int token, int place) {
    using S = typename inner_of<typename Pair::keys>::type;
    constexpr block_shape shape = shape_of<tensor::key, Pair>;
    const std::byte* const block = cache.key_block(page, head);
    if constexpr (codec<S>.several_widths())
        return S::value(shape, quads_of<S, shape.dim>(cache.key_plan(sequence, head)), block, token, place);
    else if constexpr (read_by_numbers<S>)
        return own_scheme<tensor::key>(cache).device_value(shape, block, token, place);
    else
        return read_value<S>(shape, block, token, place);
}

/// The maximum and the sum of two softmax states together.
__device__ __forceinline__ float2 add_states(float2 a, float2 b) {
    const float top = fmaxf(a.x, b.x);
    if (top == -INFINITY) return {top, 0.0f};
    return {top, (a.x == -INFINITY ? 0.0f : a.y * exp2_fast(a.x - top)) +
                     (b.x == -INFINITY ? 0.0f : b.y * exp2_fast(b.x - top))};
}

/// Those of all lanes.
__device__ __forceinline__ float2 add_lanes(float2 x) {
    float top = x.x;
#pragma unroll
    for (int step = 1; step < warp_size; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    float sum = x.x == -INFINITY ? 0.0f : x.y * exp2_fast(x.x - top);
#pragma unroll
    for (int step = 1; step < warp_size; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return {top, sum};
}
/// Which pages of a sequence are ranked, and which are read anyway. Pages count from behind the sinks.
struct page_classes {
    int length, pages, committed;
    int first, end;  // of those that are ranked; others before `committed` are always read
    bool sinks;

    template <class Args>
    __device__ __forceinline__ page_classes(const Args& a, int sequence) {
        length = a.window.tokens[sequence];
        sinks = a.window.first_token > 0 && length > 0;
        pages = ceil_div(larger(0, length - a.window.first_token), Args::page_tokens);
        committed = kvq::detail::smaller(a.committed[sequence], pages);
        first = kvq::detail::smaller(sinks ? 0 : 1, committed);
        end = larger(first, kvq::detail::smaller(committed, pages - 2));
    }
    __device__ __forceinline__ int entries() const { return pages + (sinks ? 1 : 0); }
};

/// A part of the exact scores of the first page, the last but one and the last: a token for each warp.
/// states: [warps][group] in shared memory. All threads.
template <class Args>
__device__ __forceinline__ void score_ends(const Args& a, const choice_rows<Args>& rows,
                                           const page_classes& of, int sequence, int head, int part,
                                           float2* states) {
    constexpr int dim = Args::dim, numbers = token_numbers<dim>, page_tokens = Args::page_tokens;
    // A lane for the state of each warp.
    static_assert(choice_warps == warp_size);
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    const int entries = of.entries(), sinks = a.window.first_token, room = larger(page_tokens, sinks);
    for (int r = lane; r < a.group; r += warp_size) states[warp * a.group + r] = {-INFINITY, 0.0f};
    __syncwarp();
#pragma unroll 1
    for (int i = (choice_warps - 1 - warp) * a.parts + part; i < choice_ends * room;
         i += a.parts * choice_warps) {
        const int which = i / room, token = i - which * room, entry = which == 0 ? 0 : entries - 3 + which;
        if (which == 0 ? entries == 0 : entry <= 0) continue;
        const int page = of.sinks ? entry - 1 : entry, first = page < 0 ? 0 : sinks + page * page_tokens;
        if (token >= kvq::detail::smaller(page < 0 ? sinks : page_tokens, of.length - first)) continue;
        float k[numbers] = {};
        const float* query = rows.query;
        const auto full = [&](const auto& cache, int number, int at) {
#pragma unroll
            for (int j = 0; j < numbers; ++j)
                if (const int c = j * warp_size + lane; c < dim) k[j] = full_key(cache, number, head, at, c);
        };
        if (page < 0) {
            constexpr int each = std::remove_cvref_t<decltype(a.sinks)>::pair_type::page_tokens;
            full(a.sinks, a.sinks.block_table[a.sinks.table_entry(sequence, token / each)], token % each);
        } else if (page >= of.committed) {
            full(a.window,
                 a.window.block_table[a.window.table_entry(sequence, page % a.window.table_columns)], token);
        } else {
            static_for<Args::formats>([&](auto f) {
                constexpr int F = decltype(f)::value;
                const auto& cache = get<F>(a.pages);
                const int number = cache.block_table[cache.table_entry(sequence, page)];
                if (number < 0) return;
                query = rows.template of<F>(a);
#pragma unroll 1
                for (int j = 0; j < numbers; ++j) {
                    const int c = j * warp_size + lane;
                    const float x =
                        stored_key(cache, sequence, number, head, token, kvq::detail::smaller(c, dim - 1));
#pragma unroll
                    for (int n = 0; n < numbers; ++n)
                        if (n == j && c < dim) k[n] = x;
                }
            });
        }
#pragma unroll 1
        for (int r = 0; r < a.group; r += 4) {
            float x[4] = {};
#pragma unroll
            for (int n = 0; n < 4; ++n)
#pragma unroll
                for (int j = 0; j < numbers; ++j)
                    if (const int c = j * warp_size + lane; c < dim)
                        x[n] = fmaf(query[kvq::detail::smaller(r + n, a.group - 1) * dim + c], k[j], x[n]);
            float s = sum_lanes(x);
            if (a.softcap > 0.0f) s = capped(s, a.softcap);
            if (lane < 4 && r + lane < a.group) {
                float2& sum = states[warp * a.group + r + lane];
                sum = add_states(sum, {s, 1.0f});
            }
        }
    }
    __syncthreads();
    const std::size_t line = static_cast<std::size_t>(sequence * a.window.kv_heads + head),
                      at = (line * static_cast<std::size_t>(a.parts) + static_cast<std::size_t>(part)) *
                           static_cast<std::size_t>(a.group);
    if (warp < a.group) {
        const float2 sum = add_lanes(states[lane * a.group + warp]);
        if (lane == 0) a.ends[at + static_cast<std::size_t>(warp)] = sum;
    }
}

/// Key blocks in host memory, as if they lay where device memory has their parameters, which end them from
/// byte `At` on. A page for each lane, which may be that of others, or negative. All lanes.
template <std::size_t At, class Pair>
__device__ __forceinline__ const std::byte* resident_parameters(const resident_memory& r,
                                                                const cache_ref<Pair>& pages, int page,
                                                                int head, int lane) {
    const auto place = [&](int number) {
        return static_cast<std::size_t>(number) * static_cast<std::size_t>(pages.kv_heads) +
               static_cast<std::size_t>(head);
    };
    // Another thread block may have just copied them, beside those of a head that were read before.
    bool missing = page >= 0 && load_acquired(r.tags + place(page)) != r.generations[page];
    while (const unsigned votes = __ballot_sync(0xffffffffu, missing)) {
        const int number = __shfl_sync(0xffffffffu, page, __ffs(static_cast<int>(votes)) - 1);
        auto* const to = reinterpret_cast<unsigned*>(r.parameters + place(number) * r.parameter_bytes);
        const auto* const from = reinterpret_cast<const unsigned*>(pages.key_block(number, head) + At);
        for (std::size_t i = static_cast<std::size_t>(lane); i < r.parameter_bytes / 4; i += warp_size)
            to[i] = from[i];
        __threadfence();
        __syncwarp();
        if (lane == 0) r.tags[place(number)] = r.generations[number];
        missing = missing && page != number;
    }
    return page < 0 ? nullptr : r.parameters + place(page) * r.parameter_bytes - At;
}

/// Parameters on their way from memory, so that estimate_pages() waits once for all.
template <class Args>
__device__ __forceinline__ void ask_for_parameters(const Args& a, const page_classes& of, int sequence,
                                                   int head, int part) {
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    static_for<Args::formats>([&](auto f) {
        constexpr int F = decltype(f)::value;
        const auto& cache = get<F>(a.pages);
        using pair = typename std::remove_cvref_t<decltype(cache)>::pair_type;
        if constexpr (no_estimate<pair> == nullptr) {
            constexpr std::size_t from = key_ranges<pair>::parameters_at;
            if (a.resident.places > 0 && a.resident.format == F) return;
            const int* const table = cache.block_table + cache.table_entry(sequence, 0);
#pragma unroll 1
            for (int page = of.first + warp * a.parts + part; page < of.end; page += a.parts * choice_warps)
                if (const int number = table[page]; number >= 0)
                    prefetch_lines(cache.key_block(number, head) + from,
                                   static_cast<int>(pair::key_block_bytes - from), lane);
        }
    });
}

template <class Pair>
constexpr std::size_t product_bytes() noexcept {
    if constexpr (no_estimate<Pair> != nullptr)
        return 1;
    else if constexpr (!range_products<Pair>::can)
        return 1;
    else
        return sizeof(typename range_products<Pair>::query_rows);
}
/// What a format's estimates keep in shared memory.
template <class Args>
struct product_rows;
template <class T, class Score, class Window, class Sinks, class... Pairs>
struct product_rows<choice_args<T, Score, Window, Sinks, Pairs...>> {
    static constexpr std::size_t size = [] {
        std::size_t most = 1;
        ((most = larger(most, product_bytes<Pairs>())), ...);
        return most;
    }();
    alignas(16) std::byte bytes[size];
};

/// Estimates of part `part` of the pages that are ranked. All threads.
template <class Args>
__device__ __forceinline__ void estimate_pages(const Args& a, const choice_rows<Args>& rows,
                                               const page_classes& of, int sequence, int head, int part,
                                               product_rows<Args>& memory) {
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    const int line = sequence * a.window.kv_heads + head, index = warp * a.parts + part,
              step = a.parts * choice_warps;
    float* const estimates = a.estimates + static_cast<std::size_t>(line) *
                                               static_cast<std::size_t>(a.group) *
                                               static_cast<std::size_t>(a.room);
    const auto write = [&](int page, int row, float x) {
        if (a.softcap > 0.0f) x = capped(x, a.softcap);
        if (row < a.group) estimates[static_cast<std::ptrdiff_t>(page) * a.group + row] = x;
    };
    static_for<Args::formats>([&](auto f) {
        constexpr int F = decltype(f)::value;
        const auto& cache = get<F>(a.pages);
        using pair = typename std::remove_cvref_t<decltype(cache)>::pair_type;
        if constexpr (no_estimate<pair> == nullptr) {
            const key_ranges<pair> ranges(cache, sequence, head);
            const int* const table = cache.block_table + cache.table_entry(sequence, 0);
            const float* const query = rows.template of<F>(a);
            const auto block_of = [&](int number) -> const std::byte* {
                if (a.resident.places > 0 && a.resident.format == F)
                    return resident_parameters<key_ranges<pair>::parameters_at>(a.resident, cache, number,
                                                                                head, lane);
                return number < 0 ? nullptr : cache.key_block(number, head);
            };
            if constexpr (range_products<pair>::can) {
                using products = range_products<pair>;
                auto& of_query = *reinterpret_cast<typename products::query_rows*>(memory.bytes);
#pragma unroll 1
                for (int r = 0; r < a.group; r += products::columns) {
                    if (F > 0 || r > 0) __syncthreads();
                    of_query.store(cache, sequence, head, ranges, query + r * Args::dim,
                                   kvq::detail::smaller(a.group - r, products::columns));
                    __syncthreads();
#pragma unroll 1
                    for (int first = of.first + products::blocks * index; first < of.end;
                         first += products::blocks * step) {
                        const int page = first + lane / 4, number = page < of.end ? table[page] : -1;
                        const float2 x = products::estimate(block_of(number), of_query);
                        if (number < 0) continue;
                        write(page, r + 2 * (lane % 4), x.x);
                        write(page, r + 2 * (lane % 4) + 1, x.y);
                    }
                }
            } else {
#pragma unroll 1
                for (int page = of.first + index; page < of.end; page += step) {
                    const int number = table[page];
                    if (number < 0) continue;
                    ranges.estimate_block(block_of(number), query, a.group, [&](int r, float x) {
                        if (lane < 4) write(page, r + lane, x);
                    });
                }
            }
        }
    });
}

}}}}  // namespace kvq::cuda::detail
