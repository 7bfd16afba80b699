// Host side of fused attention: out = softmax(q K^T) V over packed pages, for a batch of sequences, in one
// launch.
//
//   kvq::cuda::attend(cache, q, out, options, workspace, workspace_bytes, stream);
//
// q: [sequences * query_tokens][q_heads][head_dim], out: [sequences * query_tokens][q_heads][value_dim], any
// strides.
// Workspace: attend_workspace_bytes(), 16-byte aligned, zeroed once before its first use; calls leave it
// ready for the next one. Launches that may run at the same time need workspaces of their own. Nothing is
// allocated, nothing waits, graphs can capture it. A kernel is instantiated for every (format, type of q)
// that a program names: pairs are chosen by the user, here. So is one for a score modifier of the user's
// (score_modifiers.cuh), which goes behind the stream; attend_workspace_bytes takes its type, too.
#pragma once

#include "attend_any.cuh"
#include "attend_mixed.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

/// Launches of a kernel whose thread blocks walk shares. Derived: has the `memory` and the `kernel`.
template <class Derived>
struct share_launch {
    /// Thread blocks that the current device holds at a time; 0 if the kernel cannot run there.
    static int grid(cudaError_t& code) noexcept {
        using memory = typename Derived::memory;
        int device = 0, multiprocessors = 0, blocks = 0;
        code = cudaGetDevice(&device);
        if (code == cudaSuccess)
            code = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
        if (code == cudaSuccess)
            code = cudaFuncSetAttribute(Derived::kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        memory::bytes);
        if (code == cudaSuccess)
            code = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, Derived::kernel, memory::threads,
                                                                 memory::bytes);
        return code == cudaSuccess ? multiprocessors * blocks : 0;
    }
    static std::size_t workspace(int blocks) noexcept {
        using memory = typename Derived::memory;
        return static_cast<std::size_t>(blocks) * memory::most_teams * 2 * memory::partial_words * 4;
    }
    /// Launches with `args`, once set(cut, partials) and the lines and row blocks of `work` have made them
    /// ready. warp_tiles: of one item at most.
    /// trees: does the launch have them?
    template <class Work, class Args, class Score, class Set>
    static status go(Work& work, int kv_heads, int rows, bool trees, int warp_tiles, const Args& args,
                     const Score& score, const Set& set, std::byte* space, std::size_t bytes,
                     cudaStream_t stream) noexcept {
        using memory = typename Derived::memory;
        if (reinterpret_cast<std::uintptr_t>(space) % 16 != 0)
            return bad_value("the workspace must start on 16 bytes");
        if (trees && !takes_trees<memory::rows / 4>)
            return bad_value("trees of drafted tokens need more shared memory than the device has");
        if constexpr (exchanges<Score>)
            if (score.exchange.ranks > 0 && work.query_tokens != 1)
                return bad_value("attention across ranks takes one query token per sequence, got %d",
                                 work.query_tokens);
        cudaError_t code = cudaSuccess;
        const int blocks = grid(code);
        if (blocks == 0) {
            char what[64];
            std::snprintf(what, sizeof what, "attention needs %d bytes of shared memory per block",
                          memory::bytes);
            return runtime_error(code != cudaSuccess ? code : cudaErrorInvalidConfiguration, what);
        }
        work.row_blocks = kvq::detail::ceil_div(rows, memory::rows);
        work.lines = kv_heads * work.row_blocks;
        const long long items = static_cast<long long>(work.sequences) * work.lines;
        warp_tiles = kvq::detail::larger(1, warp_tiles);
        if (items * (static_cast<long long>(warp_tiles) + memory::end_warp_tiles) > 2147483647LL)
            return bad_value(
                "%lld blocks of query rows x %d warp tiles of tokens are too many for one launch", items,
                warp_tiles);
        if (bytes < workspace(blocks) || space == nullptr)
            return bad_value("attention needs a workspace of %zu bytes, got %zu", workspace(blocks), bytes);
        set(item_shares(work.sequences * work.lines, blocks, memory::most_teams),
            reinterpret_cast<std::uint32_t*>(space));
        return launch("launching attention", overlap::yes, Derived::kernel,
                      dim3(static_cast<unsigned>(blocks)), memory::threads, memory::bytes, stream, args,
                      score);
    }
};

/// Kernels take 16, 8 or 4 query rows of a kv head: the fewest that do for a launch. Of both sizes, the
/// larger one is for devices that have the budget.
template <class Memory, int Budget, bool Small>
constexpr kernel_facts attention_facts(const char* name) noexcept {
    const int least = Small || !two_sizes<Budget> ? 0 : Budget;
    return {name, Memory::rows, Memory::rows == 4 ? 0 : Memory::rows / 2, Memory::bytes,
            kvq::detail::larger(Memory::bytes, least)};
}

template <class Pair, class T, class Score, int Rows4, bool Small>
struct warp_launch : share_launch<warp_launch<Pair, T, Score, Rows4, Small>> {
    using memory = attention_memory<Pair, Rows4, Small>;
    static constexpr auto* kernel = attend_warps_kernel<Pair, T, Rows4, Small, Score>;
    static constexpr kernel_facts facts =
        attention_facts<memory, budget_on<Pair, false>, Small>("attend_warps_kernel");

    static status run(attention_args<Pair, T> a, const Score& score, std::byte* space, std::size_t bytes,
                      cudaStream_t stream) noexcept {
        const auto set = [&](const item_shares& cut, std::uint32_t* partials) {
            a.cut = cut;
            a.partials = partials;
        };
        return warp_launch::go(a.work, a.cache.kv_heads, a.rows, a.ancestors != nullptr,
                               kvq::detail::ceil_div(a.work.capacity, memory::step_tokens), a, score, set,
                               space, bytes, stream);
    }
};

template <class T, class Score, int Rows4, bool Small, class... Pairs>
struct mixed_launch : share_launch<mixed_launch<T, Score, Rows4, Small, Pairs...>> {
    using memory = mixed_memory<Rows4, Small, Pairs...>;
    static constexpr auto* kernel = attend_mixed_kernel<Rows4, Small, T, Score, Pairs...>;
    static constexpr kernel_facts facts =
        attention_facts<memory, mixed_memory<1, false, Pairs...>::budget, Small>("attend_mixed_kernel");

    static status run(mixed_args<T, Pairs...> m, const Score& score, std::byte* space, std::size_t bytes,
                      cudaStream_t stream) noexcept {
        auto& first = get<0>(m.parts).a;
        long long units = 0;  // of an item, at most
        for_each_part(m.parts, [&]<class Pair>(const part_args<Pair, T>& part) {
            const long long tokens =
                static_cast<long long>(part.a.cache.table_columns) * Pair::page_tokens + part.sink_tokens;
            constexpr int step = memory::template of<Pair>::step_tokens;
            units += memory::template start_of<Pair>(1) +
                     ((tokens + step - 1) / step + 1) * memory::template units<Pair>;
        });
        const auto set = [&](const item_shares& cut, std::uint32_t* partials) {
            first.cut = cut;
            first.partials = partials;
        };
        return mixed_launch::go(first.work, first.cache.kv_heads, first.rows, first.ancestors != nullptr,
                                static_cast<int>(kvq::detail::smaller(units, 2147483647LL)), m, score, set,
                                space, bytes, stream);
    }
};

/// Rows of the kernel that a launch takes: those for 16 have trees of drafted tokens.
inline int kernel_rows(int rows, bool trees) noexcept { return trees ? kvq::detail::larger(rows, 16) : rows; }

/// The launches of a format, and of a mix.
template <class Pair, class T, class Score, bool Small>
using warp_launches =
    kernel_list<warp_launch<Pair, T, Score, 4, Small>, warp_launch<Pair, T, Score, 2, Small>,
                warp_launch<Pair, T, Score, 1, Small>>;
template <class T, class Score, bool Small, class... Pairs>
using mixed_launches =
    kernel_list<mixed_launch<T, Score, 4, Small, Pairs...>, mixed_launch<T, Score, 2, Small, Pairs...>,
                mixed_launch<T, Score, 1, Small, Pairs...>>;
/// Calls f with the one for so many rows on the current device.
template <class Pair, class T, class Score, class F>
auto with_launch(int rows, F&& f, kernel_choice* choice = nullptr) {
    return with_kernel(both_sizes<budget_on<Pair, false>, warp_launches<Pair, T, Score, false>,
                                  warp_launches<Pair, T, Score, true>>{},
                       rows, f, choice);
}
template <class T, class Score, class... Pairs, class F>
auto with_mixed_launch(int rows, F&& f, kernel_choice* choice = nullptr) {
    return with_kernel(
        both_sizes<mixed_memory<1, false, Pairs...>::budget, mixed_launches<T, Score, false, Pairs...>,
                   mixed_launches<T, Score, true, Pairs...>>{},
        rows, f, choice);
}

/// Keys of several widths without a plan have one width where the average is one of the widths. Then their
/// blocks are those of one width, byte for byte, and its kernel reads them: widths are constants there, and
/// the other kernel looks them up.
template <class Pair>
struct even_keys {
    static constexpr bool known = false;
};
template <class Pair>
requires(codec<typename Pair::keys>.several_widths() &&
         !has_transform<typename Pair::keys>) struct even_keys<Pair> {
    static constexpr codec_spec mixed = codec<typename Pair::keys>;
    struct even {
        static constexpr codec_spec value = [] {
            codec_spec c = mixed;
            c.reading = block_reading::codes;
            for (unsigned char& width : c.widths) width = 0;
            c.set_width(mixed.average_eighths / 8);
            return c;
        }();
    };
    static constexpr bool known = [] {
        bool one_width = false;
        if constexpr (mixed.average_eighths >= 8 && mixed.average_eighths % 8 == 0) {
            constexpr auto quads = Pair::keys::even_quads(Pair::head_dim);
            for (int w = 0; w < mixed.width_count; ++w)
                one_width = one_width ||
                            (mixed.widths[w] == even::value.widths[0] && 4 * quads.of[w] == Pair::head_dim);
            constexpr block_layout a{mixed}, b{even::value};
            one_width = one_width && a.scale_offset(Pair::key_shape()) == b.scale_offset(Pair::key_shape()) &&
                        a.bytes(Pair::key_shape()) == b.bytes(Pair::key_shape());
        }
        return one_width;
    }();
    using pair_type =
        typename pair_like<Pair,
                           codec_scheme<std::conditional_t<known, even, codec_constant<typename Pair::keys>>>,
                           typename Pair::values>::type;
};

template <class Pair, class T>
attention_args<Pair, T> make_arguments(const cache_ref<Pair>& cache, const token_view<const T>& q,
                                       const token_view<T>& out, const attention_options& o) noexcept {
    attention_args<Pair, T> a{};
    a.cache = cache;
    a.work = {cache.tokens,
              cache.sequences,
              0,
              0,
              cache.first_token,
              cache.table_columns * Pair::page_tokens,
              o.query_tokens,
              o.query_tokens,
              row_window(o.window, o.chunked)};
    a.q = q;
    a.out = out;
    a.scale = o.scale != 0.0f ? o.scale : 1.0f / std::sqrt(static_cast<float>(Pair::head_dim));
    if (o.softcap == 0.0f) a.scale *= log2e;
    a.softcap = o.softcap;
    a.ancestors = o.ancestors;
    a.drafted = o.drafted == 0 ? o.query_tokens : o.drafted;
    if (a.ancestors != nullptr) a.work.oldest = a.drafted;
    a.order = {o.all_keys ? 1 : o.query_tokens, o.all_keys ? 0 : -1, a.ancestors != nullptr ? 0 : -1};
    a.window_sinks = o.window_sinks;
    a.lse = o.lse;
    a.state_in = o.state_in;
    a.state_out = o.state_out;
    a.early = o.early;
    a.set_group(q.heads);
    return a;
}

template <class Pair, class T>
status check_attention(const cache_ref<Pair>& cache, const token_view<const T>& q, const token_view<T>& out,
                       const attention_options& o) noexcept {
    if (status s = check_ref(cache, true); !s) return s;
    if (o.query_tokens < 1) return bad_value("query_tokens is %d, must be at least 1", o.query_tokens);
    if (o.selected_tokens != 0)
        return bad_value("%d selected tokens, but only caches select pages", o.selected_tokens);
    if (q.heads < 1 || q.heads % cache.kv_heads != 0)
        return bad_value("q has %d heads, not a multiple of the %d kv heads", q.heads, cache.kv_heads);
    if (q.dim != Pair::head_dim)
        return bad_value("q has head_dim %d but keys have %d", q.dim, Pair::head_dim);
    const long long tokens = static_cast<long long>(cache.sequences) * o.query_tokens;
    if (q.tokens != tokens)
        return bad_value("q has %d tokens but %d sequences x %d query tokens are %lld", q.tokens,
                         cache.sequences, o.query_tokens, tokens);
    if (tokens * q.heads > 2147483647LL)
        return bad_value("%lld query rows are too many for one launch", tokens * q.heads);
    const long long group = q.heads / cache.kv_heads;
    if (group * group * o.query_tokens > 4294967295LL)  // see attention_args::row_query
        return bad_value("%d query tokens are too many for one launch with %lld query heads per kv head",
                         o.query_tokens, group);
    if (q.tokens > 0 && q.data == nullptr) return bad_value("q is a null pointer");
    if (q.tokens > 0 && out.data == nullptr && o.state_out == nullptr)
        return bad_value("neither out nor state_out is given");
    if (out.data != nullptr && (out.tokens != q.tokens || out.heads != q.heads || out.dim != Pair::value_dim))
        return bad_value("out is %d x %d x %d but must be %d x %d x %d", out.tokens, out.heads, out.dim,
                         q.tokens, q.heads, Pair::value_dim);
    if (o.sink_logits != nullptr && has_values<Pair>)
        return bad_value("sink_logits are for latents, other attention takes learned_sinks");
    if (status s = check_numbers(o); !s) return s;
    if (o.ancestors != nullptr) {
        const int drafted = o.drafted == 0 ? o.query_tokens : o.drafted;
        if (drafted < o.query_tokens || drafted > 64)
            return bad_value("%d drafted tokens for %d query tokens: a tree has %d to 64", drafted,
                             o.query_tokens, o.query_tokens);
    }
    return {};
}

}  // namespace detail

/// Bytes of workspace that attend() needs on the current device for any batch with this many query heads per
/// kv head and query tokens. 0 where no workspace is needed, and where the kernel cannot run: attend() says
/// why.
template <class Pair, class T, class Score = unmodified>
std::size_t attend_workspace_bytes(int group, int query_tokens = 1) noexcept {
    using read = detail::read_pair<Pair>;
    std::size_t bytes = 0;
    if constexpr (detail::warps_can<read>)
        bytes = detail::with_launch<read, T, Score>(
            detail::kernel_rows(group * query_tokens, query_tokens > 1), [](auto launch) {
                cudaError_t code = cudaSuccess;
                const int blocks = decltype(launch)::grid(code);
                if (code != cudaSuccess) (void)cudaGetLastError();
                return decltype(launch)::workspace(blocks);
            });
    if constexpr (detail::even_keys<read>::known)
        bytes = kvq::detail::larger(
            bytes, attend_workspace_bytes<typename detail::even_keys<read>::pair_type, T, Score>(
                       group, query_tokens));
    return bytes;
}

/// The kernel that attend() takes on the current device for so many query heads per kv head and query tokens,
/// and why. Keys of several widths: the kernel with a plan.
template <class Pair, class T, class Score = unmodified>
kernel_choice attend_kernel(int group, int query_tokens = 1) noexcept {
    using read = detail::read_pair<Pair>;
    kernel_choice choice;
    if constexpr (detail::warps_can<read>)
        detail::with_launch<read, T, Score>(
            group * query_tokens, [](auto) {}, &choice);
    else
        detail::add_words(choice = {"attend_any_kernel", 1}, "attend_warps_kernel takes no such pages: %s",
                          detail::no_warps<read>);
    return choice;
}

/// Fused attention of a batch; see the top of this file. `options` name what is not the default.
template <class Pair, class T, class Score = unmodified>
status attend(const cache_ref<Pair>& cache, const token_view<const T>& q, const token_view<T>& out,
              const attention_options& options, void* workspace, std::size_t workspace_bytes,
              cudaStream_t stream, const Score& score = {}) noexcept {
    static_assert(float_format<T>, "kvq::cuda::attend: q and out must be float16, bfloat16 or float");
    static_assert(detail::is_modifier<Score>,
                  "kvq::cuda::attend: a score modifier has score(score, q_head, q_pos, k_pos) or "
                  "sink_logit(q_head)");
    static_assert(detail::has_values<Pair>, "kvq::cuda::attend: pages of latents are for attend_latents()");
    using read = detail::read_pair<Pair>;
    using even = detail::even_keys<read>;
    if constexpr (even::known)
        if (cache.key_plans == nullptr)
            return attend(detail::as_pair<typename even::pair_type>(cache), q, out, options, workspace,
                          workspace_bytes, stream, score);
    if (status s = detail::check_attention(cache, q, out, options); !s) return s;
    if (options.window_sinks)
        return detail::bad_value("window_sinks is for a mixed cache with sink_tokens()");
    if (q.tokens == 0) return {};
    const auto a = detail::make_arguments(detail::as_pair<read>(cache), q, out, options);
    if constexpr (detail::warps_can<read>)
        return detail::with_launch<read, T, Score>(
            detail::kernel_rows(a.rows, a.ancestors != nullptr), [&](auto launch) {
                return decltype(launch)::run(a, score, static_cast<std::byte*>(workspace), workspace_bytes,
                                             stream);
            });
    else
        return detail::run_any(a, score, stream);
}

namespace detail {

/// Calls f with the parts of a mix as kernels take them: those of mixed widths without a plan become those of
/// even_keys.
template <class F>
auto with_even_parts(F&& f) {
    return f();
}
template <class F, class First, class... Rest>
auto with_even_parts(F&& f, const First& first, const Rest&... rest) {
    const auto go = [&](const auto& part) {
        return with_even_parts([&](const auto&... others) { return f(part, others...); }, rest...);
    };
    using even = even_keys<typename First::pair_type>;
    if constexpr (even::known)
        if (first.cache.key_plans == nullptr) return go(as_pair<typename even::pair_type>(first));
    return go(first);
}

/// Sinks that a window's kernel reads.
template <class Part, class Pair>
inline constexpr bool are_sinks_of =
    is_sink_part<Part>&& reads_sinks<Pair>&& std::is_same_v<typename Part::pair_type, sink_pair<Pair>>;
/// Is this part read together with one of those?
template <class Part, class... Parts>
inline constexpr bool joins_window = (are_sinks_of<Part, typename Parts::pair_type> || ...);

/// Calls f with some of the parts: those of windows, or the others but for sinks that have joined a window.
template <bool Windows, class... All, class F>
auto with_some_parts(F&& f) {
    return f();
}
template <bool Windows, class... All, class F, class First, class... Rest>
auto with_some_parts(F&& f, const First& first, const Rest&... rest) {
    using pair = typename First::pair_type;
    if constexpr (reads_sinks<pair> == Windows && !joins_window<First, All...>)
        return with_some_parts<Windows, All...>(
            [&](const auto&... others) { return f(static_cast<const cache_part<pair>&>(first), others...); },
            rest...);
    else
        return with_some_parts<Windows, All...>(f, rest...);
}
/// Calls f with the parts as a kernel takes them: windows first (16 x 2048: 3 to 5 us).
template <class... All, class F>
auto with_kernel_parts(F&& f, const All&... all) {
    return with_some_parts<true, All...>(
        [&](const auto&... windows) {
            return with_some_parts<false, All...>(
                [&](const auto&... others) { return f(windows..., others...); }, all...);
        },
        all...);
}

template <class Pair, class T, class Part>
void take_sinks(part_args<Pair, T>& p, const Part& other) noexcept {
    if constexpr (are_sinks_of<Part, Pair>) {
        p.sink_tokens = other.capacity;
        p.sinks.cache = other.cache;
    }
}
template <class Pair, class T, class... All>
part_args<Pair, T> make_part(const cache_part<Pair>& part, int recent, const token_view<const T>& q,
                             const token_view<T>& out, const attention_options& options,
                             const All&... all) noexcept {
    part_args<Pair, T> p{make_arguments(part.cache, q, out, options),
                         part.range,
                         recent,
                         part.first_page,
                         part.end_page,
                         0,
                         {}};
    if (part.range == page_range::window) p.a.work.capacity = most_tokens;  // the table is a ring
    if (options.window_sinks && part.capacity >= 0) p.a.work.window = {};   // sink_tokens()
    if (part.capacity >= 0) p.a.work.capacity = kvq::detail::smaller(p.a.work.capacity, part.capacity);
    (take_sinks(p, all), ...);
    return p;
}

/// Launches the kernel for the parts that stay; `all` are those of the mix.
template <class T, class... Kept, class... All, class Score>
status attend_parts(int recent, const new_token_rows<T>& stored, const token_view<const T>& q,
                    const token_view<T>& out, const attention_options& options, void* workspace,
                    std::size_t workspace_bytes, cudaStream_t stream, const Score& score,
                    const object_list<const All*...>& all, const cache_part<Kept>&... kept) noexcept {
    static_assert(
        (warps_can<Kept> && ...),
        "kvq::cuda::attend: a mix takes formats of attend_warps.cuh only; others have one launch each");
    const page_cuts& cuts = get<0>(all)->cuts;
    const mixed_args<T, Kept...> m = [&]<int... I>(std::integer_sequence<int, I...>) {
        return mixed_args<T, Kept...>{cuts,
                                      options.window > 0 ? cuts.skipped : nullptr,
                                      stored,
                                      {{{make_part(kept, recent, q, out, options, *get<I>(all)...)}...}}};
    }
    (std::make_integer_sequence<int, sizeof...(All)>{});
    const auto& first = get<0>(m.parts).a;
    return with_mixed_launch<T, Score, Kept...>(
        kernel_rows(first.rows, first.ancestors != nullptr), [&](auto launch) {
            return decltype(launch)::run(m, score, static_cast<std::byte*>(workspace), workspace_bytes,
                                         stream);
        });
}

template <class T, class Score, class... Pairs>
std::size_t mixed_workspace_bytes(int rows) noexcept {
    return with_mixed_launch<T, Score, Pairs...>(rows, [](auto launch) {
        cudaError_t code = cudaSuccess;
        const int blocks = decltype(launch)::grid(code);
        if (code != cudaSuccess) (void)cudaGetLastError();
        return decltype(launch)::workspace(blocks);
    });
}

/// Sinks that are read with a window must be what stands before it.
template <class Sinks, class... Parts>
status check_sinks(const Sinks& sinks, const mixed_cache_ref<Parts...>& cache) noexcept {
    status result;
    for_each_part(cache.parts, [&](const auto& part) {
        using pair = typename std::remove_cvref_t<decltype(part)>::pair_type;
        if (result && are_sinks_of<Sinks, pair> &&
            (part.cache.first_token != sinks.capacity ||
             sinks.cache.table_columns * Sinks::pair_type::page_tokens < sinks.capacity))
            result = bad_value("%d sinks in %d pages, but the window begins at token %d", sinks.capacity,
                               sinks.cache.table_columns, part.cache.first_token);
    });
    return result;
}

/// Of parts as kernels read them. stored: new tokens that the launch stores (attend_new_tokens.cuh), or none.
template <class T, class... Parts, class Score>
status attend_mix(const mixed_cache_ref<Parts...>& cache, const new_token_rows<T>& stored,
                  const token_view<const T>& q, const token_view<T>& out, const attention_options& options,
                  void* workspace, std::size_t workspace_bytes, cudaStream_t stream,
                  const Score& score) noexcept {
    static_assert((has_values<typename Parts::pair_type> && ...),
                  "kvq::cuda::attend: pages of latents are for attend_latents()");
    if (status s = check_mix(cache); !s) return s;
    status checked;
    for_each_part(cache.parts, [&](const auto& part) {
        if (checked) checked = check_attention(part.cache, q, out, options);
        using part_type = std::remove_cvref_t<decltype(part)>;
        if (checked && joins_window<part_type, Parts...>) checked = check_sinks(part, cache);
    });
    if (!checked || q.tokens == 0) return checked;
    const auto go = [&](const auto&... parts) {
        return with_kernel_parts(
            [&](const auto&... kept) {
                return attend_parts<T>(
                    cache.recent, stored, q, out, options, workspace, workspace_bytes, stream, score,
                    object_list<const std::remove_cvref_t<decltype(parts)>*...>{{{&parts}...}}, kept...);
            },
            parts...);
    };
    return [&]<int... I>(std::integer_sequence<int, I...>) {
        return with_even_parts(go, get<I>(cache.parts)...);
    }
    (std::make_integer_sequence<int, sizeof...(Parts)>{});
}

/// Calls f with objects of the types of a mix's parts.
template <class... Parts, class F>
auto with_part_types(const mixed_cache_ref<Parts...>&, F&& f) {
    return f(Parts{}...);
}

}  // namespace detail

/// Bytes of workspace that attend() of this mixed_cache_ref needs.
template <class Mix, class T, class Score = unmodified>
requires detail::is_mix<Mix> std::size_t attend_workspace_bytes(int group, int query_tokens = 1)
noexcept {
    std::size_t bytes = 0;
    const auto count = [&]<class... Parts>(const Parts&... parts) {
        detail::with_kernel_parts(
            [&]<class... Kept>(const cache_part<Kept>&...) {
                bytes = kvq::detail::larger(bytes,
                                            detail::mixed_workspace_bytes<T, Score, Kept...>(
                                                detail::kernel_rows(group * query_tokens, query_tokens > 1)));
            },
            parts...);
    };
    const auto mix = detail::read_mix(Mix{});
    detail::with_part_types(mix, count);
    detail::with_part_types(mix, [&](const auto&... parts) { detail::with_even_parts(count, parts...); });
    return bytes;
}

/// The kernel that attend() of this mixed_cache_ref takes, as above.
template <class Mix, class T, class Score = unmodified>
requires detail::is_mix<Mix> kernel_choice attend_kernel(int group, int query_tokens = 1)
noexcept {
    kernel_choice choice;
    detail::with_part_types(detail::read_mix(Mix{}), [&](const auto&... parts) {
        detail::with_kernel_parts(
            [&]<class... Kept>(const cache_part<Kept>&...) {
                detail::with_mixed_launch<T, Score, Kept...>(
                    group * query_tokens, [](auto) {}, &choice);
            },
            parts...);
    });
    return choice;
}

/// Fused attention over all parts of a mixed cache in one launch; see mixed_cache.cuh. Everything else is as
/// above. While a tree of drafted tokens is checked, a mix whose `recent` is larger by their number commits
/// no page for them.
template <class T, class... Parts, class Score = unmodified>
status attend(const mixed_cache_ref<Parts...>& cache, const token_view<const T>& q, const token_view<T>& out,
              const attention_options& options, void* workspace, std::size_t workspace_bytes,
              cudaStream_t stream, const Score& score = {}) noexcept {
    static_assert(float_format<T>, "kvq::cuda::attend: q and out must be float16, bfloat16 or float");
    static_assert(detail::is_modifier<Score>,
                  "kvq::cuda::attend: a score modifier has score(score, q_head, q_pos, k_pos) or "
                  "sink_logit(q_head)");
    return detail::attend_mix<T>(detail::read_mix(cache), {}, q, out, options, workspace, workspace_bytes,
                                 stream, score);
}

}}}  // namespace kvq::cuda
