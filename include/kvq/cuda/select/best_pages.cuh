// The pages of a sequence that are worth reading, chosen on the device for every kv head: selected_pages
// (attention/selection.hpp) of the CPU, with its formula.
//
//   rank of a page   sum over the head's query rows of 2^(estimate - L)
//   estimate         of the page's scores, from its parameters alone (cpu/product/score_estimate.hpp)
//   L                log2 of the row's sum over the first page and the last two
//
// One launch. Thread block (sequence, kv head, part): a part of the scores (page_scores.cuh). Who comes last
// of a head ranks and chooses. What comes out is a smaller cache: tables with the chosen pages, one row for
// each kv head (cache_ref::head_tables), behind them the window as it is. Attention reads that with its own
// kernels, since the order of keys does not matter to one query that sees all of them.
// Contract: always read are 16-bit pages, the first page and the last two; of equal ranks later pages. Reads
// the parameters of every page, codes of none but the first and the last two.
// Bytes: of 128 channels and 4 bits in groups of 64 tokens 1/16 of the pages.
#pragma once

#include "page_scores.cuh"
#include "select_top.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda { namespace detail {

/// Ranks the pages of a head, chooses and writes the tables. All threads of one block, behind all others.
template <class Args>
__device__ __forceinline__ void choose_pages(const Args& a, const bool* bad, const page_classes& of,
                                             int sequence, int head, top_memory<>& memory) {
    __shared__ float floors[most_choice_rows];
    const int thread = static_cast<int>(threadIdx.x);
    const auto line = static_cast<std::size_t>(sequence * a.window.kv_heads + head);
    const int candidates = of.end - of.first, count = kvq::detail::smaller(candidates, a.wanted);
    float* const estimates =
        a.estimates + line * static_cast<std::size_t>(a.group) * static_cast<std::size_t>(a.room);
    const auto quad_of = [&](int page, int r) {
        return __ldcg(
            reinterpret_cast<const float4*>(estimates + static_cast<std::ptrdiff_t>(page) * a.group + r));
    };
    // A page for each thread, of equal ranks the later one first. What is known of it is on its way while
    // the ends are added.
    const bool few = candidates <= choice_threads, quads = a.group % 4 == 0,
               has_page = few && thread < candidates;
    const int own_page = of.end - 1 - thread;
    float4 own_quad{};
    int own_number[Args::formats];
    if (has_page) {
        if (quads) own_quad = quad_of(own_page, 0);
        static_for<Args::formats>([&](auto f) {
            constexpr int F = decltype(f)::value;
            const auto& cache = get<F>(a.pages);
            own_number[F] = cache.block_table[cache.table_entry(sequence, own_page)];
        });
    }
    if (const int row = thread / warp_size, part = thread % warp_size; row < a.group) {
        const float2 sum = add_lanes(part < a.parts ? __ldcg(a.ends +
                                                             (line * static_cast<std::size_t>(a.parts) +
                                                              static_cast<std::size_t>(part)) *
                                                                 static_cast<std::size_t>(a.group) +
                                                             row)
                                                    : float2{-INFINITY, 0.0f});
        float floor = sum.y > 0.0f ? sum.x + log2f(sum.y) : -INFINITY;
        if constexpr (has_sinks<typename Args::score_type>)
            floor = fmaxf(floor, sink_score(a.score.sink_logit(head * a.group + row)));
        if (part == 0) floors[row] = floor > -INFINITY ? floor : 0.0f;
    }
    __syncthreads();
    const auto weight = [&](int r, float x) { return bad[r] ? 0.0f : rough_exp2(x - floors[r]); };
    const auto weights = [&](int r, const float4& x) {
        return weight(r, x.x) + weight(r + 1, x.y) + weight(r + 2, x.z) + weight(r + 3, x.w);
    };
    // rank: of the first four rows, where quads are read.
    const auto rank_of = [&](int page, float rank) {
        if (quads) {
#pragma unroll 1
            for (int r = 4; r < a.group; r += 4) rank += weights(r, quad_of(page, r));
        } else {
#pragma unroll 1
            for (int r = 0; r < a.group; ++r)
                rank += weight(r, __ldcg(estimates + static_cast<std::ptrdiff_t>(page) * a.group + r));
        }
        return rank;
    };
    const int front = of.first, behind = of.committed - of.end, held = front + count + behind;
    const auto row_of = [&](int f) {
        return a.to.quantized + (static_cast<std::size_t>(f) *
                                     static_cast<std::size_t>(a.window.sequences * a.window.kv_heads) +
                                 line) *
                                    static_cast<std::size_t>(a.to.columns);
    };
    const auto write = [&](int column, int page) {
        static_for<Args::formats>([&](auto f) {
            constexpr int F = decltype(f)::value;
            const auto& cache = get<F>(a.pages);
            row_of(F)[column] = cache.block_table[cache.table_entry(sequence, page)];
        });
    };
    if (few) {
        const unsigned key =
            has_page ? score_order(rank_of(own_page, quads ? weights(0, own_quad) : 0.0f)) : 0;
        take_largest(memory, key, count, [&](int at, int) {
            static_for<Args::formats>([&](auto f) {
                constexpr int F = decltype(f)::value;
                row_of(F)[front + count - 1 - at] = own_number[F];
            });
        });
    } else {
        // Ranks take the place of the first row's estimates.
        for (int page = of.first + thread; page < of.end; page += choice_threads)
            estimates[static_cast<std::ptrdiff_t>(page) * a.group] =
                rank_of(page, quads ? weights(0, quad_of(page, 0)) : 0.0f);
        __syncthreads();
        const int place = thread / warp_size * (warp_size * top_each) + thread % warp_size;
        unsigned keys[top_each];
#pragma unroll
        for (int j = 0; j < top_each; ++j) {
            const int page = of.end - 1 - place - j * warp_size;
            keys[j] = page >= of.first
                          ? score_order(__ldcg(estimates + static_cast<std::ptrdiff_t>(page) * a.group))
                          : 0;
        }
        select_largest(memory, keys, count, [&](int at, int j) {
            write(front + count - 1 - at, of.end - 1 - place - j * warp_size);
        });
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
union choice_memory {
    top_memory<> top;
    struct {
        product_rows<Args> products;
        float2 states[choice_warps * most_choice_rows];
    } scores;
};

template <class Args>
__global__ void __launch_bounds__(choice_threads, 1) choose_pages_kernel(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) std::byte shared[];
    __shared__ choice_memory<Args> memory;
    __shared__ bool last, bad[most_choice_rows];
    launch_dependents();
    const int line = static_cast<int>(blockIdx.x) / a.parts,
              part = static_cast<int>(blockIdx.x) - line * a.parts, sequence = line / a.window.kv_heads,
              head = line - sequence * a.window.kv_heads;
    choice_rows<Args> rows{reinterpret_cast<float*>(shared), bad};
    float row[choice_rows<Args>::numbers];
    const auto ask_for_row = [&] {
        wait_for_predecessor();
        rows.ask(a, sequence, head, row);
    };
    if (!a.early) ask_for_row();
    const page_classes of(a, sequence);
    ask_for_parameters(a, of, sequence, head, part);
    if (a.early) ask_for_row();
    rows.load(a, sequence, head, row);
    estimate_pages(a, rows, of, sequence, head, part, memory.scores.products);
    score_ends(a, rows, of, sequence, head, part, memory.scores.states);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(a.tickets + line, 1u) == static_cast<unsigned>(a.parts - 1);
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
    std::size_t end_floats() const noexcept { return times(q_heads, 2 * most_choice_parts); }
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
inline int choice_parts(const choice_plan& p) noexcept {
    int device = 0, processors = 0;
    cudaError_t code = cudaGetDevice(&device);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (code != cudaSuccess) {
        (void)cudaGetLastError();
        processors = 1;
    }
    const int lines = p.sequences * p.kv_heads, each = processors / lines,
              most = kvq::detail::smaller(most_choice_parts, kvq::detail::ceil_div(p.room, choice_warps));
    return kvq::detail::larger(
        1, kvq::detail::smaller(each >= 2 * choice_ends ? each : 2 * processors / lines, most));
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
    a.parts = choice_parts(p);
    a.early = options.early && resident.places == 0;
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
    constexpr std::size_t usual = 48 * 1024, own = sizeof(choice_memory<args_type>) + 1024;
    if (shared + own > usual)
        if (const cudaError_t code =
                cudaFuncSetAttribute(choose_pages_kernel<args_type>,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
            code != cudaSuccess)
            return runtime_error(code, "preparing the selection of pages");
    const long long blocks = 1LL * p.sequences * p.kv_heads * a.parts;
    if (blocks > 2147483647LL) return bad_value("%d sequences are too many for one launch", p.sequences);
    return launch("launching the selection of pages", overlap::yes, choose_pages_kernel<args_type>,
                  dim3(static_cast<unsigned>(blocks)), choice_threads, shared, stream, a);
}

}  // namespace detail
}}}  // namespace kvq::cuda
