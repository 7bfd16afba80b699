// Compiles the kernels of a format for caches on the device (device_format.hpp).
//
//   const kvq::cuda::device_format compiled[] = {
//       make_device_format<float16, kivi_pair<4, 64, 128, 64>>(),
//       make_device_format<float16, preset_pair<std4, 128>, preset_pair<low2, 128>>()};
//
// The kernels of one entry take keys, values and queries of type T, keep sinks and recent window in T, and
// quantize to the first format that a cache names. Pages of all formats of an entry may be in one sequence:
// requantizing and stepping down go from one to another.
// Names: those of find_format, "kivi-4-g64", "affine-4-g64", "int8", "std4"; of keys in another format than
// values both, "int8/std4".
// Contract: an entry costs a program the kernels of a mix of its formats (docs/guide/gpu.md).
#pragma once

#include "../decode/attend_lists.cuh"
#include "../decode/attend_new_tokens.cuh"
#include "../decode/moved_keys.cuh"
#include "../latent/latent_lists.cuh"
#include "../prefill/prefill.cuh"
#include "../quantize/commit_due_pages.cuh"
#include "../select/best_pages.cuh"
#include "../select/index_scores.cuh"
#include "../select/resident_pages.cuh"
#include "../select/select_top.cuh"
#include "../store/bookkeeping.cuh"
#include "../store/keep_tokens.cuh"
#include "../store/state_snapshots.cuh"
#include "../store/store_new_tokens.cuh"
#include "block_names.cuh"
#include "make_conversion.cuh"
#include "make_key_plans.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

/// 16-bit pages beside those of Pair.
template <class T, class Pair, int PageTokens>
struct window_of {
    using type = block_pair<full<T>, full<T>, Pair::head_dim, PageTokens, Pair::value_dim>;
};
template <class T, class Pair, int PageTokens>
requires is_latent_pair<Pair>
struct window_of<T, Pair, PageTokens> {
    using type = latent_pair<full<T>, Pair::head_dim, 0, Pair::value_dim, PageTokens>;
};

/// The format in whose pages the upper planes of Pair lie: its number among Pairs, -1: Pair has one plane.
template <class Pair, class... Pairs>
constexpr int upper_format() {
    int found = -1;
    if constexpr (has_lower<Pair>) {
        int i = 0;
        ((std::is_same_v<Pairs, typename Pair::upper> ? void(found = i) : void(), ++i), ...);
    }
    return found;
}
/// Read by its upper plane, where it has two.
template <class Pair>
struct upper_plane_of {
    using type = Pair;
};
template <class Upper>
struct upper_plane_of<plane_pair<Upper>> {
    using type = upper_plane_pair<Upper>;
};

template <class Score, class T, class... Pairs>
struct device_table {
    using first = std::tuple_element_t<0, std::tuple<Pairs...>>;
    static constexpr int head_dim = first::head_dim, value_dim = first::value_dim,
                         page_tokens = first::page_tokens;
    static_assert(sizeof...(Pairs) <= most_formats,
                  "kvq::cuda::make_device_format: at most 4 formats may be in one sequence");
    static_assert(((same_geometry<first, Pairs>)&&...),
                  "kvq::cuda::make_device_format: formats of one sequence have the same head sizes and page "
                  "size");
    static constexpr bool index = is_index_pair<first>, latent = is_latent_pair<first> && !index;
    static_assert(((is_latent_pair<Pairs> == (latent || index) && is_index_pair<Pairs> == index) && ...),
                  "kvq::cuda::make_device_format: formats of one sequence are of latents, of an index, or of "
                  "neither");
    static_assert(!latent || std::is_same_v<Score, unmodified>,
                  "kvq::cuda::make_scored_format: latent attention takes no score modifier");
    static_assert(!latent || !(codec<typename Pairs::keys>.several_widths() || ...),
                  "kvq::cuda::make_device_format: keys of several widths need a plan, which latents have on "
                  "the CPU only");
    static constexpr bool planes = (has_lower<Pairs> || ...);
    static_assert(
        ((!has_lower<Pairs> || upper_format<Pairs, Pairs...>() >= 0) && ...),
        "kvq::cuda::make_device_format: plane_pair<P> comes with P, in whose pages its upper planes "
        "lie");
    static_assert(!full_precision<typename first::keys>,
                  "kvq::cuda::make_device_format: the window is 16 bit already; formats are quantized ones");
    using window_pair = typename window_of<T, first, page_tokens>::type;
    using sinks_pair = typename window_of<T, first, 16>::type;

    template <class Pair>
    static cache_ref<Pair> ref(const layer_view& l, const layer_memory& pages, const int* table, int columns,
                               int first_token) noexcept {
        cache_ref<Pair> c;
        c.key_pages = pages.keys;
        c.value_pages = pages.values;
        c.key_page_bytes = pages.key_page_bytes;
        c.value_page_bytes = pages.value_page_bytes;
        c.block_table = table;
        c.tokens = l.tokens;
        c.sequences = l.sequences;
        c.table_columns = columns;
        c.kv_heads = l.kv_heads;
        c.first_token = first_token;
        return c;
    }
    static cache_ref<window_pair> window(const layer_view& l) noexcept {
        return ref<window_pair>(l, l.window, l.window_table, l.ring, l.first_token);
    }
    static cache_ref<sinks_pair> sinks(const layer_view& l) noexcept {
        return ref<sinks_pair>(l, l.sinks, l.sink_table, l.sink_columns, 0);
    }
    template <class Pair>
    static cache_ref<Pair> quantized(const layer_view& l, int number, const int* table) noexcept {
        const layer_view::part& p = l.quantized[number];
        auto c = ref<Pair>(l, p.pages, table, l.columns, l.first_token);
        c.key_plans = p.key_plans;
        c.plan_numbers = p.plan_numbers;
        c.plan_words = p.plan_words;
        c.key_feedback = p.key_feedback;
        c.head_tables = l.head_tables;
        if constexpr (has_lower<Pair>) static_cast<layer_memory&>(c.lower) = p.lower;
        if constexpr (token_row_scheme<typename Pair::keys>)
            c.own_keys.scheme = typename Pair::keys(p.scales[0]);
        if constexpr (token_row_scheme<typename Pair::values>)
            c.own_values.scheme = typename Pair::values(p.scales[1]);
        if constexpr (is_strided<Pair>) {
            c.own_keys.memory = place_of<tensor::key, Pair>(p, c.key_pages, c.key_page_bytes);
            c.own_values.memory = place_of<tensor::value, Pair>(p, c.value_pages, c.value_page_bytes);
        }
        for (const tensor role : {tensor::key, tensor::value})
            c.set_transform(role, l.layer, p.columns[static_cast<int>(role)], p.rows[static_cast<int>(role)]);
        return c;
    }
    template <class Pair>
    static cache_part<Pair> part(const layer_view& l, int number) noexcept {
        const layer_view::part& p = l.quantized[number];
        const auto pages = quantized<Pair>(l, number, p.table);
        return {pages, page_range::all, p.first_page, p.end_page, -1, p.span, l.cuts};
    }
    template <int... I>
    static auto mix(const layer_view& l, std::integer_sequence<int, I...>) noexcept {
        cache_part<window_pair> recent = in_window(window(l));
        if (l.run < 0) {
            recent.first_page = l.committed;
        } else {
            recent.range = page_range::all;
            recent.cache.first_token += l.run * page_tokens;
        }
        recent.cuts = l.cuts;
        sink_part<sinks_pair> first_tokens = sink_tokens(sinks(l), l.first_token);
        first_tokens.cuts = l.cuts;
        // Pages are in the window from `committed` on; the length says too much while a draft waits, so its
        // own rule has the whole ring.
        return make_mixed((l.ring - 1) * page_tokens + 1, part<Pairs>(l, I)..., recent, first_tokens);
    }
    /// Why there is no attention over lists; null: there is.
    static constexpr const char* lists = [] {
        if constexpr (index)
            return "an index has no values to attend to";
        else if constexpr (!std::is_same_v<Score, unmodified>)
            return "these kernels have a score modifier";
        else if constexpr (planes)
            return "pages have two planes";
        else
            return no_lists<Pairs...>;
    }();
    using plans = key_plan_functions<window_pair, sinks_pair, T, Pairs...>;
    using numbers = std::make_integer_sequence<int, static_cast<int>(sizeof...(Pairs))>;
    using mix_type = decltype(mix(std::declval<const layer_view&>(), numbers{}));

    /// Calls f(std::type_identity<format number i>{}).
    template <class F>
    static status with_pair(int number, F&& f) {
        status result;
        int i = 0;
        ((i++ == number ? void(result = f(std::type_identity<Pairs>{})) : void()), ...);
        return result;
    }

    static status commit(std::span<const layer_view> layers, int target, int new_tokens, const int* counts,
                         cudaStream_t stream) {
        return with_pair(target, [&]<class Pair>(std::type_identity<Pair>) {
            std::vector<cache_ref<Pair>> pages;
            std::vector<cache_ref<window_pair>> windows;
            for (const layer_view& l : layers) {
                pages.push_back(quantized<Pair>(l, target, l.quantized[target].commit_table));
                windows.push_back(window(l));
            }
            return commit_due_pages(std::span<const cache_ref<Pair>>(pages),
                                    std::span<const cache_ref<window_pair>>(windows), layers[0].recent,
                                    new_tokens, layers[0].not_finite, stream, counts);
        });
    }
    static status keep(const keep_args& a, int sequences, int layers, cudaStream_t stream) {
        return keep_tokens<window_pair, sinks_pair>(a, sequences, layers, stream);
    }
    static status store_new(const layer_view& l, const input_rows& k, const input_rows& v, int new_tokens,
                            cudaStream_t stream) {
        return store_new_tokens(window(l), sinks(l), k.as<const T>(), v.as<const T>(), new_tokens, nullptr,
                                stream);
    }
    static status store(const layer_view& l, const layer_memory& pages, bool in_sinks, const input_rows& k,
                        const input_rows& v, const long long* slot_list, cudaStream_t stream) {
        if (in_sinks)
            return cuda::store(ref<sinks_pair>(l, pages, nullptr, 0, 0), k.as<const T>(), v.as<const T>(),
                               slot_list, nullptr, stream);
        return cuda::store(ref<window_pair>(l, pages, nullptr, 0, 0), k.as<const T>(), v.as<const T>(),
                           slot_list, nullptr, stream);
    }
    static status requantize(const layer_view& l, int from, const layer_memory& window_pages, int to,
                             kept_tensors kept, const int* from_pages, const int* to_pages, int count,
                             cudaStream_t stream) {
        return with_pair(to, [&]<class To>(std::type_identity<To>) {
            const auto target = quantized<To>(l, to, nullptr);
            if (from < 0)
                return requantize_pages(ref<window_pair>(l, window_pages, nullptr, 0, 0), target, from_pages,
                                        to_pages, count, l.not_finite, stream);
            return with_pair(from, [&]<class From>(std::type_identity<From>) -> status {
                if constexpr (std::is_same_v<From, To>)
                    return bad_value("pages have format %d already", from);
                else if constexpr (has_lower<To> && pair_turns<From>)
                    return bad_value("pages behind a transform do not get a lower plane on a device");
                else
                    return requantize_pages(quantized<From>(l, from, nullptr), target, from_pages, to_pages,
                                            count, nullptr, stream, kept);
            });
        });
    }
    static status dequantize(const layer_view& l, int part, const output_rows& keys,
                             const output_rows& values, const int* starts, cudaStream_t stream) {
        return with_pair(part, [&]<class Pair>(std::type_identity<Pair>) {
            return dequantize_tokens(quantized<Pair>(l, part, l.quantized[part].table), keys.as<T>(),
                                     values.as<T>(), starts, stream);
        });
    }
    static status attend(const layer_view& l, const input_rows& q, const output_rows& out,
                         const attention_options& options, void* workspace, std::size_t bytes,
                         cudaStream_t stream, const void* score) {
        if constexpr (index)
            return bad_value("an index selects tokens, and has no values to attend to");
        else if constexpr (latent)
            return attend_latents<T>(mix(l, numbers{}), q.as<const T>(), out.as<T>(), options, workspace,
                                     bytes, stream);
        else if (planes && options.upper_only)
            return of_upper<>::attend(l, q, out, both(options), workspace, bytes, stream, score);
        else
            return cuda::attend<T>(mix(l, numbers{}), q.as<const T>(), out.as<T>(), options, workspace, bytes,
                                   stream, *static_cast<const Score*>(score));
    }
    /// The functions that read upper planes alone.
    template <class S = Score>
    using of_upper = device_table<S, T, typename upper_plane_of<Pairs>::type...>;
    static attention_options both(attention_options o) noexcept {
        o.upper_only = false;
        return o;
    }
    static status store_and_attend(const layer_view& l, const input_rows& k, const input_rows& v,
                                   int new_tokens, const input_rows& q, const output_rows& out,
                                   const attention_options& options, void* workspace, std::size_t bytes,
                                   cudaStream_t stream, const void* score) {
        if constexpr (latent || index) {
            if (status s = store_new(l, k, v, new_tokens, stream); !s) return s;
            return attend(l, q, out, options, workspace, bytes, stream, score);
        } else if (planes && options.upper_only) {
            return of_upper<>::store_and_attend(l, k, v, new_tokens, q, out, both(options), workspace, bytes,
                                                stream, score);
        } else {
            return cuda::attend(mix(l, numbers{}),
                                new_token_rows<T>{k.as<const T>(), v.as<const T>(), new_tokens},
                                q.as<const T>(), out.as<T>(), options, workspace, bytes, stream,
                                *static_cast<const Score*>(score));
        }
    }
    static status prefill(const layer_view& l, const input_rows& k, const input_rows& v, const input_rows& q,
                          const output_rows& out, const int* starts, int new_tokens,
                          const prefill_options& options, cudaStream_t stream,
                          [[maybe_unused]] const void* score) {
        constexpr const char* reason = [] {
            if constexpr (index)
                return "an index has none";
            else if constexpr (latent)
                return "their prompts go through attention";
            else
                return no_prefill<window_pair, Pairs...>;
        }();
        if constexpr (reason == nullptr) {
            const auto launch = [&](const auto& with) {
                return cuda::prefill<T>(mix(l, numbers{}), k.as<const T>(), v.as<const T>(), q.as<const T>(),
                                        out.as<T>(), starts, new_tokens, options, stream, with);
            };
            if constexpr (has_score<Score>)
                return launch(*static_cast<const Score*>(score));
            else
                return launch(unmodified{});
        } else
            return bad_value("prefill has no kernels for the formats of this cache (%s): append, then attend",
                             reason);
    }
    static status attend_lists(const layer_view& l, const input_rows& q, const output_rows& out,
                               const list_options& options, void* workspace, std::size_t bytes,
                               cudaStream_t stream) {
        if constexpr (latent)
            return attend_latent_lists<T>(mix(l, numbers{}), q.as<const T>(), out.as<T>(), options, workspace,
                                          bytes, stream);
        else if constexpr (lists == nullptr)
            return cuda::attend_lists<T>(mix(l, numbers{}), q.as<const T>(), out.as<T>(), options, workspace,
                                         bytes, stream);
        else
            return bad_value("no lists of tokens: %s", lists);
    }
    static status attend_pages(const layer_view& l, const input_rows& q, const output_rows& out,
                               const attention_options& options, std::byte* selection, unsigned* tickets,
                               void* workspace, std::size_t bytes, cudaStream_t stream, const void* score) {
        if constexpr (no_pages == nullptr) {
            const choice_plan plan =
                choice_plan_of(l.sequences, q.heads, l.kv_heads, l.columns, l.ring, options.selected_tokens);
            attention_options all = options;
            all.selected_tokens = 0;
            if (plan.takes_all()) {
                if (out.data == nullptr) return {};
                return attend(l, q, out, all, workspace, bytes, stream, score);
            }
            const auto queries = q.as<const T>();
            attention_options checked = all;
            if (out.data == nullptr) checked.state_out = reinterpret_cast<float*>(selection);  // not written
            if (status s = check_attention(window(l), queries, out.as<T>(), checked); !s) return s;
            chosen_tables chosen;
            const auto& with = *static_cast<const Score*>(score);
            const auto pages = pages_of(l, numbers{});
            if (status s = choose_pages(plan, pages, window(l), sinks(l), l.committed, queries, all, with,
                                        l.resident, selection, tickets, chosen, stream);
                !s)
                return s;
            if (status s = fetch(l, pages, chosen.of_format(l.resident.format, plan), chosen, stream); !s)
                return s;
            if (out.data == nullptr) return {};
            layer_view smaller = l;
            smaller.tokens = chosen.tokens;
            smaller.committed = chosen.committed;
            smaller.window_table = chosen.window;
            smaller.columns = chosen.columns;
            smaller.head_tables = true;
            smaller.cuts = {};
            if (l.resident.places > 0) smaller.quantized[l.resident.format].pages = l.resident.pool;
            for (int f = 0; f < plan.formats; ++f) {
                smaller.quantized[f].table = chosen.of_format(f, plan);
                smaller.quantized[f].first_page = nullptr;
                smaller.quantized[f].end_page = chosen.committed;
            }
            all.early = false;  // lengths have just been written
            return cuda::attend<T>(mix(smaller, numbers{}), queries, out.as<T>(), all, workspace, bytes,
                                   stream, with);
        } else {
            return bad_value("no pages are selected: %s", no_pages);
        }
    }
    template <class Pages>
    static status fetch(const layer_view& l, const Pages& pages, int* table, const chosen_tables& chosen,
                        cudaStream_t stream) {
        status result;
        if (l.resident.places == 0) return result;
        int number = 0;
        for_each_part(pages, [&](const auto& of) {
            if (number++ == l.resident.format) result = fetch_pages(of, l.resident, chosen, table, stream);
        });
        return result;
    }
    static std::size_t page_selection_bytes(int sequences, int q_heads, int kv_heads, int columns, int ring,
                                            int tokens) {
        return no_pages == nullptr
                   ? choice_plan_of(sequences, q_heads, kv_heads, columns, ring, tokens).bytes()
                   : 0;
    }
    static status check_selection(int sequences, int q_heads, int kv_heads, int columns, int ring, int tokens,
                                  int places) {
        status result;
        if constexpr (no_pages == nullptr) {
            const choice_plan plan = choice_plan_of(sequences, q_heads, kv_heads, columns, ring, tokens);
            if (plan.takes_all()) return result;
            result = check_choice<window_pair>(plan);
            if (result && places > 0) result = check_fetch(plan, places);
        }
        return result;
    }
    /// Why attention reads all pages; null: it can select some.
    static constexpr const char* no_pages = [] {
        if constexpr (index)
            return "an index has no values to attend to";
        else if constexpr (latent)
            return "layers with latent attention read all of them";
        else if constexpr (has_score<Score> || exchanges<Score>)
            return "these kernels have a score modifier that needs positions";
        else if constexpr (planes)
            return "pages have two planes";
        else if constexpr (!(warps_can<read_pair<Pairs>> && ...))
            return "these formats have one launch each";
        else
            return static_cast<const char*>(nullptr);
    }();
    static choice_plan choice_plan_of(int sequences, int q_heads, int kv_heads, int columns, int ring,
                                      int tokens) {
        return {sequences, q_heads, kv_heads,    static_cast<int>(sizeof...(Pairs)),
                columns,   ring,    page_tokens, tokens};
    }
    template <int... I>
    static auto pages_of(const layer_view& l, std::integer_sequence<int, I...>) noexcept {
        return object_list<cache_ref<read_pair<Pairs>>...>{
            {{as_pair<read_pair<Pairs>>(quantized<Pairs>(l, I, l.quantized[I].table))}...}};
    }
    static status select(const layer_view& l, const input_rows& q, const float* weights, const selection& of,
                         int* positions, void* workspace, std::size_t bytes, cudaStream_t stream) {
        if constexpr (index) {
            auto* const scores = static_cast<float*>(workspace);
            const std::size_t row_bytes = score_bytes(q.tokens, of.room);
            if (bytes < row_bytes) return bad_value("the scores need %zu bytes of workspace", row_bytes);
            if (status s = index_scores<T>(mix(l, numbers{}), q.as<const T>(), weights,
                                           {of.query_tokens, of.behind, of.room}, scores, stream);
                !s || of.count == 0)
                return s;
            return select_top(
                {scores, l.tokens, l.sequences, of.query_tokens, of.room, of.behind, l.cuts.skipped},
                of.count, positions, static_cast<std::byte*>(workspace) + row_bytes, bytes - row_bytes,
                stream);
        } else {
            return bad_value("no index, which selects tokens");
        }
    }
    static std::size_t score_bytes(int queries, int room) {
        return kvq::detail::round_up(
            static_cast<std::size_t>(queries) * static_cast<std::size_t>(room) * sizeof(float),
            std::size_t{16});
    }
    static std::size_t select_workspace_bytes(int queries, int room, int count) {
        return score_bytes(queries, room) +
               row_scores{nullptr, nullptr, queries, 1, room}.workspace_bytes(count);
    }
    static std::size_t list_bytes(int queries, int q_heads, int kv_heads, int count) {
        if constexpr (latent)
            return latent_list_workspace_bytes<mix_type, T>(queries, q_heads);
        else if constexpr (lists == nullptr)
            return list_workspace_bytes<mix_type, T>(queries, q_heads, kv_heads, count);
        else
            return 0;
    }
    static std::size_t workspace_bytes(int sequences, int q_heads, int query_tokens) {
        if constexpr (index)
            return 0;
        else if constexpr (latent)
            return latent_workspace_bytes<mix_type, T>(sequences, q_heads, query_tokens);
        else if constexpr (planes)
            return kvq::detail::larger(attend_workspace_bytes<mix_type, T, Score>(q_heads, query_tokens),
                                       of_upper<>::workspace_bytes(sequences, q_heads, query_tokens));
        else
            return attend_workspace_bytes<mix_type, T, Score>(q_heads, query_tokens);
    }
    static std::size_t prompt_scratch_bytes(const layer_view& l, int tokens, int new_tokens, int heads) {
        if constexpr (!index && !latent)
            return prefill_scratch_bytes<T>(mix(l, numbers{}), tokens, new_tokens, heads);
        else
            return 0;
    }
    static std::uint64_t rotated_fingerprint(int number, tensor role, std::uint64_t rotation) {
        std::uint64_t fingerprint = 0;
        const auto ask = [&]<class S>(std::type_identity<S>) {
            using inner = typename inner_of<S>::type;
            if constexpr (transform_in<S>.kind == transform_kind::matrix)
                fingerprint = S::fingerprint(rotation, inner());
        };
        int i = 0;
        const auto ask_pair = [&]<class Pair>(std::type_identity<Pair>) {
            if (i++ != number) return;
            if (role == tensor::key)
                ask(std::type_identity<typename Pair::keys>());
            else
                ask(std::type_identity<typename Pair::values>());
        };
        (ask_pair(std::type_identity<Pairs>()), ...);
        return fingerprint;
    }
    static constexpr device_functions functions{&write_words,
                                                &copy_pages,
                                                &find_prompt_slots,
                                                &convert_state,
                                                &commit,
                                                &keep,
                                                &store_new,
                                                &store,
                                                &requantize,
                                                &convert_functions<device_table>::gather,
                                                &convert_functions<device_table>::quantize,
                                                &dequantize,
                                                &attend,
                                                &store_and_attend,
                                                &attend_lists,
                                                &attend_pages,
                                                &select,
                                                &prefill,
                                                &turn_rows<T>,
                                                &join_states<T>,
                                                score_mark::of<Score>(),
                                                has_score<Score>,
                                                has_sinks<Score>,
                                                no_pages,
                                                &workspace_bytes,
                                                &list_bytes,
                                                &select_workspace_bytes,
                                                &prompt_scratch_bytes,
                                                &page_selection_bytes,
                                                &check_selection,
                                                &plans::make_keys,
                                                &plans::plan,
                                                &plans::even_plan,
                                                &rotated_fingerprint};
};

}  // namespace detail

/// T: float16 or bfloat16, of the window and of k, v, q and out. Pairs: block pairs of quantized schemes, up
/// to 4 that may be in one sequence; they have the same head sizes and page size. Of layers with latent
/// attention all are of latent_pair.
/// Score: the type of score modifier that cache::attend() takes (score_modifiers.cuh).
template <class Score, class T, class... Pairs>
device_format make_scored_format() {
    static_assert(std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>,
                  "kvq::cuda::make_device_format: the window is float16 or bfloat16");
    using table = detail::device_table<Score, T, Pairs...>;
    using window = typename table::window_pair;
    using sinks = typename table::sinks_pair;
    constexpr bool is_keys_alone = table::latent || table::index;
    device_format f{table::head_dim,
                    table::value_dim,
                    table::page_tokens,
                    float_type_of<T>,
                    {},
                    {window::key_block_bytes, window::value_block_bytes},
                    {sinks::key_block_bytes, sinks::value_block_bytes},
                    &table::functions,
                    nullptr,
                    is_keys_alone,
                    table::index};
    const auto add = [&]<class Pair>(std::type_identity<Pair>) {
        device_format::kind k{
            {},
            detail::names_of_blocks<tensor::key, Pair>(),
            detail::names_of_blocks<tensor::value, Pair>(),
            detail::block_name<tensor::key, Pair>(),
            detail::block_name<tensor::value, Pair>(),
            Pair::key_block_bytes,
            Pair::value_block_bytes,
            {detail::scheme_fingerprint<typename Pair::keys>(),
             detail::scheme_fingerprint<typename Pair::values>()},
            table::latent ? detail::code_bits_of<typename Pair::keys>() : 0,
            table::plans::template words<Pair>,
            table::plans::template widths<Pair>,
            detail::parameters_of<Pair>(),
            detail::no_estimate<Pair>,
            {detail::host_blocks_of<tensor::key, Pair>(), detail::host_blocks_of<tensor::value, Pair>()},
            detail::upper_format<Pair, Pairs...>(),
            {}};
        if constexpr (detail::has_lower<Pair>) {
            k.lower_blocks[0] = Pair::lower_key_bytes;
            k.lower_blocks[1] = Pair::lower_value_bytes;
        }
        k.turned = detail::pair_turns<Pair>;
        k.name = k.key_names[0] + "/" + k.value_names[0];
        for (const std::string& name : k.key_names)
            if (std::ranges::find(k.value_names, name) != k.value_names.end()) {
                k.name = name;
                break;
            }
        f.kinds.push_back(std::move(k));
    };
    (add(std::type_identity<Pairs>{}), ...);
    return f;
}
/// The same without a score modifier.
template <class T, class... Pairs>
device_format make_device_format() {
    return make_scored_format<unmodified, T, Pairs...>();
}

}}}  // namespace kvq::cuda
