// The pages of a sequence that are worth reading, chosen on the device for every kv head: selected_pages
// (attention/selection.hpp) of the CPU, with its formula.
//
//   rank of a page   sum over the head's query rows of 2^(estimate - L)
//   estimate         of the page's scores, from its parameters alone (cpu/product/score_estimate.hpp)
//   L                log2 of the row's sum over the first page and the last two
//
// One launch. Thread block (sequence, kv head, part): a warp estimates a page at a time; three blocks more
// have the exact scores of one page each. Who comes last of a head ranks and chooses. What comes out is a
// smaller cache: tables with the chosen pages, one row for each kv head (cache_ref::head_tables), behind them
// the window as it is. Attention reads that with its own kernels, since the order of keys does not matter to
// one query that sees all of them.
// Contract: always read are 16-bit pages, the first page and the last two; of equal ranks later pages. Reads
// the parameters of every page, codes of none but the first and the last two.
// Bytes: of 128 channels and 4 bits in groups of 64 tokens 1/16 of the pages.
#pragma once

#include "../decode/score_modifiers.cuh"
#include "../layout/mixed_cache.cuh"
#include "../store/page_memory.hpp"
#include "score_estimate.cuh"
#include "select_top.cuh"

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

inline constexpr int choice_threads = top_threads, choice_warps = top_warps, choice_ends = 3,
                     most_choice_rows = 16, most_choice_bytes = 40960;

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
    int parts, end_blocks;     // blocks of a head: for estimates, and for exact scores
    float* estimates;          // [sequences][kv_heads][group][room]
    float2* ends;              // [sequences][kv_heads][3][group]: maximum and sum of the exact scores
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
    /// All threads.
    __device__ __forceinline__ void load(const Args& a, int sequence, int head) {
        constexpr int dim = Args::dim, numbers = token_numbers<dim>;
        const int warp = static_cast<int>(threadIdx.x) / warp_size,
                  lane = static_cast<int>(threadIdx.x) % warp_size;
        for (int r = warp; r < a.group; r += choice_warps) {
            float x[numbers], zero = 0.0f;
            const auto* const from = a.q.at(sequence, head * a.group + r);
#pragma unroll
            for (int i = 0; i < numbers; ++i) {
                const int c = i * warp_size + lane;
                x[i] = c < dim ? to_float(from[c]) * a.scale : 0.0f;
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

/// The softmax state of one page's scores, by all threads, as `states`: [warps][group].
template <class Args, class Read>
__device__ __forceinline__ void score_tokens(const Args& a, const float* query, int tokens, float2* states,
                                             const Read& read) {
    constexpr int dim = Args::dim, numbers = token_numbers<dim>, batch = 4;
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    for (int r = lane; r < a.group; r += warp_size) states[warp * a.group + r] = {-INFINITY, 0.0f};
#pragma unroll 1
    for (int first = batch * warp; first < tokens; first += batch * choice_warps) {
        float k[batch][numbers];
#pragma unroll
        for (int b = 0; b < batch; ++b)
#pragma unroll
            for (int i = 0; i < numbers; ++i) {
                const int c = i * warp_size + lane;
                const float number =
                    read(kvq::detail::smaller(first + b, tokens - 1), kvq::detail::smaller(c, dim - 1));
                k[b][i] = c < dim ? number : 0.0f;
            }
#pragma unroll 1
        for (int r = 0; r < a.group; ++r) {
            float x[batch] = {};
#pragma unroll
            for (int i = 0; i < numbers; ++i) {
                const int c = i * warp_size + lane;
                const float q = c < dim ? query[r * dim + c] : 0.0f;
#pragma unroll
                for (int b = 0; b < batch; ++b) x[b] = fmaf(q, k[b][i], x[b]);
            }
            float s = sum_lanes(x);
            if (a.softcap > 0.0f) s = capped(s, a.softcap);
            // A token for each of the first lanes.
            float2 own{lane < batch && first + lane < tokens ? s : -INFINITY, 1.0f};
#pragma unroll
            for (int step = 1; step < batch; step *= 2)
                own = add_states(own, {__shfl_xor_sync(0xffffffffu, own.x, step),
                                       __shfl_xor_sync(0xffffffffu, own.y, step)});
            __syncwarp();
            if (lane == 0) states[warp * a.group + r] = add_states(states[warp * a.group + r], own);
        }
    }
    __syncthreads();
}
/// Which pages of a sequence are ranked, and which are read anyway. Pages count from behind the sinks.
struct page_classes {
    int pages, committed;
    int first, end;  // of those that are ranked; others before `committed` are always read
    bool sinks;

    template <class Args>
    __device__ __forceinline__ page_classes(const Args& a, int sequence) {
        const int length = a.window.tokens[sequence];
        sinks = a.window.first_token > 0 && length > 0;
        pages = ceil_div(larger(0, length - a.window.first_token), Args::page_tokens);
        committed = kvq::detail::smaller(a.committed[sequence], pages);
        first = kvq::detail::smaller(sinks ? 0 : 1, committed);
        end = larger(first, kvq::detail::smaller(committed, pages - 2));
    }
    __device__ __forceinline__ int entries() const { return pages + (sinks ? 1 : 0); }
};

/// The exact scores of the first page (which = 0), the last but one or the last.
template <class Args>
__device__ __forceinline__ void score_end(const Args& a, const choice_rows<Args>& rows,
                                          const page_classes& of, int sequence, int head, int which,
                                          float2* states) {
    const int entries = of.entries(), entry = which == 0 ? 0 : entries - 3 + which;
    const bool there = which == 0 ? entries > 0 : entry > 0;
    if (!there) {
        score_tokens(a, rows.query, 0, states, [](int, int) { return 0.0f; });
    } else if (of.sinks && entry == 0) {
        const int tokens = kvq::detail::smaller(a.window.first_token, a.window.tokens[sequence]);
        const int* const table = a.sinks.block_table + a.sinks.table_entry(sequence, 0);
        constexpr int room = std::remove_cvref_t<decltype(a.sinks)>::pair_type::page_tokens;
        score_tokens(a, rows.query, tokens, states,
                     [&](int t, int c) { return full_key(a.sinks, table[t / room], head, t % room, c); });
    } else {
        const int page = entry - (of.sinks ? 1 : 0);
        const int tokens = kvq::detail::smaller(
            Args::page_tokens, a.window.tokens[sequence] - a.window.first_token - page * Args::page_tokens);
        if (page >= of.committed) {
            const int number =
                a.window.block_table[a.window.table_entry(sequence, page % a.window.table_columns)];
            score_tokens(a, rows.query, tokens, states,
                         [&](int t, int c) { return full_key(a.window, number, head, t, c); });
        } else {
            bool there_is = false;
            static_for<Args::formats>([&](auto f) {
                constexpr int F = decltype(f)::value;
                const auto& cache = get<F>(a.pages);
                const int number = cache.block_table[cache.table_entry(sequence, page)];
                if (number < 0) return;
                there_is = true;
                score_tokens(a, rows.template of<F>(a), tokens, states,
                             [&](int t, int c) { return stored_key(cache, sequence, number, head, t, c); });
            });
            if (!there_is) score_tokens(a, rows.query, 0, states, [](int, int) { return 0.0f; });
        }
    }
    const std::size_t at = (static_cast<std::size_t>(sequence) * static_cast<std::size_t>(a.window.kv_heads) +
                            static_cast<std::size_t>(head)) *
                               choice_ends +
                           static_cast<std::size_t>(which);
    // A lane for the state of each warp.
    static_assert(choice_warps == warp_size);
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    for (int r = warp; r < a.group; r += choice_warps) {
        float2 sum = states[lane * a.group + r];
#pragma unroll
        for (int step = 1; step < warp_size; step *= 2)
            sum = add_states(
                sum, {__shfl_xor_sync(0xffffffffu, sum.x, step), __shfl_xor_sync(0xffffffffu, sum.y, step)});
        if (lane == 0) a.ends[at * static_cast<std::size_t>(a.group) + static_cast<std::size_t>(r)] = sum;
    }
    __syncthreads();
}

/// A key block in host memory, as if it lay where device memory has its parameters, which end it from byte
/// `At` on. All lanes.
template <std::size_t At>
__device__ __forceinline__ const std::byte* resident_parameters(const resident_memory& r,
                                                                const std::byte* block, int page, int head,
                                                                int heads, int lane) {
    const std::size_t at =
        static_cast<std::size_t>(page) * static_cast<std::size_t>(heads) + static_cast<std::size_t>(head);
    std::byte* const held = r.parameters + at * r.parameter_bytes;
    // Another thread block may have just copied them, beside those of a head that were read before.
    if (const unsigned generation = r.generations[page]; load_acquired(r.tags + at) != generation) {
        for (std::size_t i = static_cast<std::size_t>(lane); i < r.parameter_bytes / 4; i += warp_size)
            reinterpret_cast<unsigned*>(held)[i] = reinterpret_cast<const unsigned*>(block + At)[i];
        __threadfence();
        __syncwarp();
        if (lane == 0) r.tags[at] = generation;
    }
    return held - At;
}

/// Estimates of part `part` of the pages that are ranked.
template <class Args>
__device__ __forceinline__ void estimate_pages(const Args& a, const choice_rows<Args>& rows,
                                               const page_classes& of, int sequence, int head, int part) {
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    const int line = sequence * a.window.kv_heads + head, step = a.parts * choice_warps;
    static_for<Args::formats>([&](auto f) {
        constexpr int F = decltype(f)::value;
        const auto& cache = get<F>(a.pages);
        using pair = typename std::remove_cvref_t<decltype(cache)>::pair_type;
        if constexpr (no_estimate<pair> == nullptr) {
            const key_ranges<pair> ranges(cache, sequence, head);
            const int* const table = cache.block_table + cache.table_entry(sequence, 0);
            const auto estimates = [&](int r) {
                return a.estimates + (static_cast<std::size_t>(line) * static_cast<std::size_t>(a.group) +
                                      static_cast<std::size_t>(r)) *
                                         static_cast<std::size_t>(a.room);
            };
#pragma unroll 1
            for (int page = of.first + warp * a.parts + part; page < of.end; page += step) {
                const int number = table[page];
                if (number < 0) continue;
                const std::byte* block = cache.key_block(number, head);
                if (a.resident.places > 0 && a.resident.format == F)
                    block = resident_parameters<key_ranges<pair>::parameters_at>(
                        a.resident, block, number, head, a.window.kv_heads, lane);
                ranges.estimate_block(block, rows.template of<F>(a), a.group, [&](int r, float x) {
                    if (a.softcap > 0.0f) x = capped(x, a.softcap);
                    if (lane < 4 && r + lane < a.group) estimates(r + lane)[page] = x;
                });
            }
        }
    });
}

/// Ranks the pages of a head, chooses and writes the tables. All threads of one block, behind all others.
template <class Args>
__device__ __forceinline__ void choose_pages(const Args& a, const bool* bad, const page_classes& of,
                                             int sequence, int head, top_memory& memory) {
    __shared__ float floors[most_choice_rows];
    const int thread = static_cast<int>(threadIdx.x);
    const auto line = static_cast<std::size_t>(sequence * a.window.kv_heads + head);
    if (thread < a.group) {
        const float2* const ends = a.ends + line * choice_ends * static_cast<std::size_t>(a.group) + thread;
        float2 of_end[choice_ends];
#pragma unroll
        for (int i = 0; i < choice_ends; ++i) of_end[i] = __ldcg(ends + i * a.group);
        const float2 sum = add_states(add_states(of_end[0], of_end[1]), of_end[2]);
        float floor = sum.y > 0.0f ? sum.x + log2f(sum.y) : -INFINITY;
        if constexpr (has_sinks<typename Args::score_type>)
            floor = fmaxf(floor, sink_score(a.score.sink_logit(head * a.group + thread)));
        floors[thread] = floor > -INFINITY ? floor : 0.0f;
    }
    __syncthreads();
    const int candidates = of.end - of.first, count = kvq::detail::smaller(candidates, a.wanted);
    // Ranks take the place of the first row's estimates.
    float* const estimates =
        a.estimates + line * static_cast<std::size_t>(a.group) * static_cast<std::size_t>(a.room);
    const auto rank_of = [&](int page) {
        float rank = 0.0f;
#pragma unroll 4
        for (int r = 0; r < a.group; ++r) {
            const float x = __ldcg(estimates + static_cast<std::ptrdiff_t>(r) * a.room + page);
            if (!bad[r]) rank += rough_exp2(x - floors[r]);
        }
        return rank;
    };
    const int front = of.first, behind = of.committed - of.end, held = front + count + behind;
    const auto write = [&](int column, int page) {
        static_for<Args::formats>([&](auto f) {
            constexpr int F = decltype(f)::value;
            const auto& cache = get<F>(a.pages);
            const std::size_t row = (static_cast<std::size_t>(F) *
                                         static_cast<std::size_t>(a.window.sequences * a.window.kv_heads) +
                                     line) *
                                    static_cast<std::size_t>(a.to.columns);
            a.to.quantized[row + static_cast<std::size_t>(column)] =
                cache.block_table[cache.table_entry(sequence, page)];
        });
    };
    // Of equal ranks the later page: pages are counted from the last one.
    const auto take = [&](int at, int number) { write(front + count - 1 - at, of.end - 1 - number); };
    if (candidates <= choice_threads) {
        const unsigned key = thread < candidates ? score_order(rank_of(of.end - 1 - thread)) : 0;
        take_largest(memory, key, count, take);
    } else {
        for (int page = of.first + thread; page < of.end; page += choice_threads)
            estimates[page] = rank_of(page);
        __syncthreads();
        const int place = thread / warp_size * (warp_size * top_each) + thread % warp_size;
        unsigned keys[top_each];
#pragma unroll
        for (int j = 0; j < top_each; ++j) {
            const int page = of.end - 1 - place - j * warp_size;
            keys[j] = page >= of.first ? score_order(__ldcg(estimates + page)) : 0;
        }
        select_largest(memory, keys, count, [&](int at, int j) { take(at, place + j * warp_size); });
    }
    if (thread < front) write(thread, thread);
    if (thread < behind) write(front + count + thread, of.end + thread);
    if (head > 0) return;
    const int ring = a.window.table_columns;
    for (int i = thread; i < ring; i += choice_threads)
        a.to.window[static_cast<std::ptrdiff_t>(sequence) * ring + (held + i) % ring] =
            a.window.block_table[a.window.table_entry(sequence, (of.committed + i) % ring)];
    if (thread == 0) {
        a.to.committed[sequence] = held;
        a.to.tokens[sequence] = a.window.tokens[sequence] - (of.committed - held) * Args::page_tokens;
    }
}

template <class Args>
__global__ void __launch_bounds__(choice_threads, 1) choose_pages_kernel(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) std::byte shared[];
    __shared__ union {
        top_memory top;
        float2 states[choice_warps * most_choice_rows];
    } memory;
    __shared__ bool last, bad[most_choice_rows];
    launch_dependents();
    wait_for_predecessor();
    const int blocks = a.parts + a.end_blocks, line = static_cast<int>(blockIdx.x) / blocks,
              part = static_cast<int>(blockIdx.x) - line * blocks, sequence = line / a.window.kv_heads,
              head = line - sequence * a.window.kv_heads;
    const page_classes of(a, sequence);
    choice_rows<Args> rows{reinterpret_cast<float*>(shared), bad};
    rows.load(a, sequence, head);
    if (part >= a.end_blocks) {
        estimate_pages(a, rows, of, sequence, head, part - a.end_blocks);
    } else {
#pragma unroll 1
        for (int which = part; which < choice_ends; which += a.end_blocks)
            score_end(a, rows, of, sequence, head, which, memory.states);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(a.tickets + line, 1u) == static_cast<unsigned>(blocks - 1);
        if (last) a.tickets[line] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    choose_pages(a, bad, of, sequence, head, memory.top);
}

/// A warp's estimates need the memory of the query rows for all formats.
template <class Pair>
constexpr std::size_t choice_query_bytes(int formats, int group) noexcept {
    return static_cast<std::size_t>(1 + formats) * static_cast<std::size_t>(group) * Pair::head_dim *
           sizeof(float);
}

/// The numbers of a launch, and the workspace that it needs.
struct choice_plan {
    int sequences, q_heads, kv_heads, formats;
    int room, ring;           // columns of the tables
    int page_tokens, tokens;  // to be read besides what always is

    int wanted() const noexcept { return 1 + (tokens - 1) / page_tokens; }
    /// Of the tables that come out: the first page and the last two may be among those that are always read.
    int columns() const noexcept { return kvq::detail::smaller(wanted() + 3, room); }
    /// Are all pages read?
    bool takes_all() const noexcept { return wanted() >= room; }

    std::size_t estimate_floats() const noexcept { return times(q_heads, room); }
    std::size_t end_floats() const noexcept { return times(q_heads, 2 * choice_ends); }
    std::size_t table_words() const noexcept {
        return times(kv_heads, formats * columns()) + times(1, ring) + times(2, 1);
    }
    std::size_t bytes() const noexcept { return 4 * (end_floats() + estimate_floats() + table_words()); }

private:
    std::size_t times(int a, int b) const noexcept {
        return static_cast<std::size_t>(sequences) * static_cast<std::size_t>(a) *
               static_cast<std::size_t>(b);
    }
};

/// Blocks of a head: as many as keep the device busy once, or twice where heads are many.
inline void choice_blocks(const choice_plan& p, int& parts, int& end_blocks) noexcept {
    int device = 0, processors = 0;
    cudaError_t code = cudaGetDevice(&device);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (code != cudaSuccess) {
        (void)cudaGetLastError();
        processors = 1;
    }
    const int lines = p.sequences * p.kv_heads, each = processors / lines;
    end_blocks = each >= 2 * choice_ends ? choice_ends : 1;
    parts = (each >= 2 * choice_ends ? each : 2 * processors / lines) - end_blocks;
    parts = kvq::detail::larger(1, kvq::detail::smaller(parts, kvq::detail::ceil_div(p.room, choice_warps)));
}

template <class Pair>
status check_choice(const choice_plan& p) noexcept {
    const int group = p.q_heads / p.kv_heads;
    if (const std::size_t shared = choice_query_bytes<Pair>(p.formats, group);
        group > most_choice_rows || shared > most_choice_bytes)
        return bad_value(
            "pages are selected for up to %d query heads of a kv head, whose rows take up to %d "
            "bytes; here are %d, which take %zu",
            most_choice_rows, most_choice_bytes, group, shared);
    if (p.room > top_group)
        return bad_value("pages are selected from up to %d of a sequence, which may have %d here", top_group,
                         p.room);
    return {};
}

/// Chooses the pages of all heads, behind check_choice(). pages: as kernels read them; memory: p.bytes(), on
/// a multiple of 16; tickets: [sequences][kv_heads], zero before and after.
template <class T, class Score, class Window, class Sinks, class... Pairs>
status choose_pages(const choice_plan& p, const object_list<cache_ref<Pairs>...>& pages,
                    const cache_ref<Window>& window, const cache_ref<Sinks>& sinks, const int* committed,
                    const token_view<const T>& q, const attention_options& options, const Score& score,
                    const resident_memory& resident, std::byte* memory, unsigned* tickets, chosen_tables& to,
                    cudaStream_t stream) noexcept {
    using args_type = choice_args<T, Score, Window, Sinks, Pairs...>;
    const int group = p.q_heads / p.kv_heads;
    const std::size_t shared = choice_query_bytes<Window>(args_type::formats, group);
    args_type a{};
    a.pages = pages;
    a.window = window;
    a.sinks = sinks;
    a.committed = committed;
    a.q = q;
    a.scale = options.scale != 0.0f ? options.scale : 1.0f / std::sqrt(static_cast<float>(Window::head_dim));
    if (options.softcap == 0.0f) a.scale *= log2e;
    a.softcap = options.softcap;
    a.score = score;
    a.group = group;
    a.wanted = p.wanted();
    a.room = p.room;
    choice_blocks(p, a.parts, a.end_blocks);
    auto* words = reinterpret_cast<float*>(memory);
    const auto take = [&](std::size_t count) {
        float* const at = words;
        words += count;
        return at;
    };
    a.ends = reinterpret_cast<float2*>(take(p.end_floats()));
    a.estimates = take(p.estimate_floats());
    a.tickets = tickets;
    a.resident = resident;
    const auto numbers = [&](int a, int b) {
        return reinterpret_cast<int*>(take(static_cast<std::size_t>(p.sequences) *
                                           static_cast<std::size_t>(a) * static_cast<std::size_t>(b)));
    };
    to = {numbers(1, 1), numbers(1, 1), numbers(1, p.ring), numbers(p.kv_heads, p.formats * p.columns()),
          p.columns()};
    a.to = to;
    const long long blocks = 1LL * p.sequences * p.kv_heads * (a.parts + a.end_blocks);
    if (blocks > 2147483647LL) return bad_value("%d sequences are too many for one launch", p.sequences);
    return launch("launching the selection of pages", overlap::yes, choose_pages_kernel<args_type>,
                  dim3(static_cast<unsigned>(blocks)), choice_threads, shared, stream, a);
}

}  // namespace detail
}}}  // namespace kvq::cuda
