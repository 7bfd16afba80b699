// Keys that move: erase and shift of a cache on the device (cache.hpp), and what steps, prompts and attention
// do for sequences whose keys have moved.
//
// The page table moves (page_table::take); no byte of a page changes. Attention takes a launch for each
// number of positions by which keys have moved, with queries that are turned for it (moved_runs.hpp), in
// graphs as well. New keys that go to a page with moved ones turn like them, as on the CPU.
// Contract: a refused call changes nothing. Steps of sequences without moved keys make no launch more.
#pragma once

#include "cache_class.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

// ---- the table ----

/// Gives a sequence the spans that build(take) makes in every group; take(first, last, by) appends tokens of
/// the old ones, moved.
template <class Build>
status cache::rearrange(sequence_id id, const char* verb, int first, int last, Build&& build) {
    entry& e = entry_of(id);
    std::vector<detail::sequence_pages> made;
    for (std::size_t i = 0; i < step_groups(); ++i) {
        const detail::layer_group& group = groups_[i];
        const detail::device_geometry& g = group.geometry;
        const common::page_table& held = e.pages[i].table;
        detail::sequence_pages& next = made.emplace_back(e.pages[i]);
        next.leaving.clear();
        next.table = common::page_table(std::pmr::new_delete_resource(), held.targets[0], held.targets[1]);
        common::page_table& table = next.table;
        status result;
        build([&](int from, int to, std::int64_t by) {
            for (const page_span& s : held.spans)
                if (result && s.first_token < to && s.end() > from &&
                    (s.shift > common::farthest_shift - by || s.shift < -common::farthest_shift - by))
                    result = detail::bad_value("keys cannot move from %lld by %lld positions",
                                               static_cast<long long>(s.shift), static_cast<long long>(by));
            if (!result) return;
            if (const auto cut = table.take(held, from, to, by, g); cut.span >= 0)
                result = detail::bad_value(
                    "cannot %s tokens %d to %d: token %d is within a 16-bit page of the recent window, whose "
                    "tokens "
                    "from %d on move as one",
                    verb, first, last, from, from - cut.skip);
        });
        if (!result) return result;
        if (!table.shows_sinks(g.window.sinks))
            return detail::bad_value(
                "%s: every query sees the first %d tokens, its sinks: they cannot be erased or replaced, nor "
                "cut "
                "before all of them are there",
                group.describe(0).c_str(), g.window.sinks);
        if (!table.is_whole(table.tokens, g))
            return detail::bad_value(
                "tokens cannot be taken out of %s: token %d would see tokens from %d on, but those before "
                "token %d "
                "are freed",
                group.describe(0).c_str(), table.tokens, g.window.first_seen(table.tokens), table.front());
        table.uncommit(g);
        table.copies_from = table.committed;
        for (int k = 0; k < table.size(); ++k)
            if (status s = detail::check_span(table[k], k, k < table.committed, table.tokens, g); !s)
                return s;
        if (table.due(table.tokens, g) > table.committed)
            return detail::bad_value("cannot %s tokens %d to %d: pages of the recent window would leave it",
                                     verb, first, last);
        table.free_unseen(g, g.rollback, [](page_ref&&) {});
        next.gone_pages = common::ceil_div(common::larger(0, table.front() - g.sinks), g.page_tokens);
        table.freed = common::smaller(next.gone_pages, common::page_table::most_freed);
        if (next.pages() > group.columns)
            return detail::bad_value(
                "cannot %s tokens %d to %d: the %d tokens that stay are in %d pages, of which cuts show a "
                "part, but "
                "max_tokens is %d and cut_pages %d",
                verb, first, last, table.tokens, next.pages(), options_.max_tokens, options_.cut_pages);
        next.find_moved();
    }
    for (std::size_t i = 0; i < made.size(); ++i) e.pages[i] = std::move(made[i]);
    e.version = ++versions_;
    end_step(id);
    return {};
}

/// Tokens [first, last) of a sequence are to go or to move, and keys by `by` positions.
inline status cache::check_move(sequence_id id, const char* verb, int first, int last,
                                std::int64_t by) const {
    if (status s = check_here(id); !s) return s;
    if (status s = check_states(std::span(&id, 1), verb); !s) return s;
    if (first < 0 || first > last || last > tokens(id))
        return detail::bad_value("cannot %s tokens %d to %d: sequence %d holds %d", verb, first, last,
                                 id.index, tokens(id));
    if (first == last || by == 0) return {};
    constexpr std::int64_t farthest = std::int64_t{1} << 40;
    if (by < -farthest || by > farthest)
        return detail::bad_value("keys cannot move by %lld positions, the limit is %lld",
                                 static_cast<long long>(by), static_cast<long long>(farthest));
    if (!rotations_.known())
        return detail::bad_value(
            "keys cannot move by %lld positions: set cache_options::rotary to say how they are rotated",
            static_cast<long long>(by));
    for (const detail::layer_group& g : groups_)
        if (g.format.latent)
            return detail::bad_value("%s: keys of latents move on the CPU only", g.describe(0).c_str());
    if (status s = check_no_draft(std::span(&id, 1)); !s) return s;
    if (status s = check_whole(std::span(&id, 1)); !s) return s;
    if (const int shared = waiting(); shared > 0)
        return detail::bad_value(
            "cannot %s tokens: %d layers share the keys of a prompt and have not attended to it; give them "
            "prefill(), or begin the next step first",
            verb, shared);
    return {};
}

inline status cache::erase(sequence_id id, int first, int last) {
    const bool to_end = last == tokens(id);
    const std::int64_t by = std::int64_t{first} - last;
    if (status s = check_move(id, "erase", first, last, to_end ? 0 : by); !s) return s;
    if (first == last) return {};
    if (to_end) return trim(id, first);
    const int held = tokens(id);
    return rearrange(id, "erase", first, last, [&](const auto& take) {
        take(0, first, 0);
        take(last, held, by);
    });
}
inline status cache::shift(sequence_id id, int first, int last, std::int64_t by) {
    if (status s = check_move(id, "shift", first, last, by); !s || first == last || by == 0) return s;
    const int held = tokens(id);
    return rearrange(id, "shift", first, last, [&](const auto& take) {
        take(0, first, 0);
        take(first, last, by);
        take(last, held, 0);
    });
}
inline status cache::splice(sequence_id id, sequence_id other, int first, int last) {
    if (status s = check_here(id); !s) return s;
    if (status s = check_move(other, "splice", first, last, 0); !s || first == last) return s;
    return detail::bad_value(
        "cannot splice tokens %d to %d of sequence %d: splice on the CPU, and onload() the sequence", first,
        last, other.index);
}

// ---- memory of steps ----

/// Of keys and queries that are turned, and of softmax states, in a layer.
inline std::size_t cache::moving_bytes(int layer, std::size_t keys, std::size_t query_rows) const noexcept {
    const detail::layer_group& g = group_of(layer);
    const auto dim = static_cast<std::size_t>(g.shape.head_dim),
               width = static_cast<std::size_t>(g.shape.dim(tensor::value)) + 2;
    const auto whole = [](std::size_t bytes) { return common::round_up(bytes, std::size_t{256}); };
    return whole(keys * static_cast<std::size_t>(g.shape.kv_heads) * dim * 2) + whole(query_rows * dim * 2) +
           whole(query_rows * width * sizeof(float));
}
inline status cache::ensure_moving(std::size_t bytes, cudaStream_t stream) {
    if (bytes <= moving_.bytes()) return {};
    detail::larger_memories larger;
    if (status s = larger.find(moving_, options_.memory, bytes, "queries of moved keys", stream); !s)
        return s;
    if (status s = larger.take(stream); !s) return s;
    ++moving_generation_;
    return {};
}
/// Memory for steps of these sequences, with so many new keys of one.
inline status cache::ensure_runs(std::span<const sequence_id> batch, int keys, cudaStream_t stream) {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < step_groups(); ++i) {
        int runs = 1;
        for (const sequence_id id : batch)
            if (id != sequence_id{})
                runs = common::larger(runs, detail::moved_runs::runs_of(entry_of(id).pages[i]));
        if (status s = groups_[i].runs.ensure(runs, options_.memory, stream); !s) return s;
        if (runs == 1) continue;
        const std::size_t rows = batch.size(), queries = static_cast<std::size_t>(most_queries()) *
                                                         static_cast<std::size_t>(options_.query_heads);
        bytes = common::larger(bytes, moving_bytes(groups_[i].members[0],
                                                   rows * static_cast<std::size_t>(keys), rows * queries));
    }
    return ensure_moving(bytes, stream);
}
inline status cache::check_runs(int layer, int tokens, int q_heads) const {
    const detail::layer_group& g = group_of(layer);
    if (g.format.functions->has_sinks)
        return detail::bad_value("%s: keys have moved, and logits of sinks are for keys in their place",
                                 describe(layer).c_str());
    const std::size_t bytes =
        moving_bytes(layer, 0, static_cast<std::size_t>(tokens) * static_cast<std::size_t>(q_heads));
    if (step_.prompt || bytes <= moving_.bytes()) return {};
    return detail::bad_value(
        "%s: keys have moved, and attention of %d tokens with %d query heads needs %zu bytes; there are %zu, "
        "for "
        "steps of %d heads (query_heads)",
        describe(layer).c_str(), tokens, q_heads, bytes, moving_.bytes(), options_.query_heads);
}

// ---- launches ----

/// Without positions.
inline detail::turn_args cache::turn_of(int layer, const detail::input_rows& from,
                                        std::byte* to) const noexcept {
    const common::rotation& r = *rotations_.at(layer);
    const auto count = static_cast<int>(r.turns().size());
    const bool split = r.layout() == rotary_layout::half_split;
    return {from.data,
            from.token_bytes,
            from.head_bytes,
            to,
            from.tokens,
            from.heads,
            from.dim,
            from.tokens,
            nullptr,
            nullptr,
            nullptr,
            {turns_.as<const double>() + first_turn_[static_cast<std::size_t>(layer)], count,
             r.first_channel(), split ? 1 : 2, split ? count : 1}};
}
inline status cache::turn_keys(int layer, input_view& k, int of_sequence, const int* lengths,
                               cudaStream_t stream) const {
    if (runs_of(layer) == 1 || k.tokens == 0 || k.data == nullptr) return {};
    const detail::layer_group& g = group_of(layer);
    if (k.dim != g.shape.head_dim || k.heads != g.shape.kv_heads) return {};  // the store refuses them
    detail::turn_args a = turn_of(layer, k, moving_.as<>());
    a.of_sequence = of_sequence;
    a.by = g.runs.key_turn();
    a.lengths = lengths;
    a.ends = lengths != nullptr ? g.runs.open_ends() : nullptr;
    k.data = a.to;
    k.head_bytes = 2 * k.dim;
    k.token_bytes = k.heads * k.head_bytes;
    return g.format.functions->turn_rows(a, stream);
}
/// Behind run 0, whose queries are those of the caller.
inline status cache::turn_query(int layer, int run, query_view& q, int of_sequence,
                                cudaStream_t stream) const {
    if (run == 0) return {};
    const detail::layer_group& g = group_of(layer);
    detail::turn_args a = turn_of(layer, q, moving_.as<>());
    a.of_sequence = of_sequence;
    a.by = g.runs.query_turn(run);
    q.data = a.to;
    q.head_bytes = 2 * q.dim;
    q.token_bytes = q.heads * q.head_bytes;
    return g.format.functions->turn_rows(a, stream);
}

inline status cache::attend_runs(int layer, const query_view& q, const output_view& out,
                                 const attention_options& options, cudaStream_t stream, const void* score) {
    const detail::layer_group& g = group_of(layer);
    if (status s = check_runs(layer, q.tokens, q.heads); !s) return s;
    if (q.data == nullptr || q.heads < 1 || q.dim != g.shape.head_dim ||
        q.tokens != step_.rows * options.query_tokens)
        return g.format.functions->attend(view(layer), q, out, options, workspace_of(layer).as<>(),
                                          workspace_of(layer).bytes(), stream, score);  // says what is wrong
    const std::size_t rows = static_cast<std::size_t>(q.tokens) * static_cast<std::size_t>(q.heads);
    if (step_.prompt)
        if (status s = ensure_moving(moving_bytes(layer, 0, rows), stream); !s) return s;
    auto* const states = reinterpret_cast<float*>(
        moving_.as<>() + common::round_up(rows * static_cast<std::size_t>(q.dim) * 2, std::size_t{256}));
    const int runs = runs_of(layer);
    for (int r = 0; r < runs; ++r) {
        const bool last = r + 1 == runs;
        query_view turned = q;
        output_view to = out;
        attention_options o = options;
        if (status s = turn_query(layer, r, turned, options.query_tokens, stream); !s) return s;
        if (r > 0) {
            o.state_in = states;
            o.early = false;
        }
        if (!last) {
            o.state_out = states;
            o.lse = nullptr;
            to.data = nullptr;
        }
        if (status s = g.format.functions->attend(g.view(member_of(layer), step_.rows, r), turned, to, o,
                                                  workspace_of(layer).as<>(), workspace_of(layer).bytes(),
                                                  stream, score);
            !s)
            return s;
    }
    return {};
}

/// The history of every run, and the new tokens with the first one.
inline status cache::prefill_runs(int layer, const input_view& k, const input_view& v, const query_view& q,
                                  const output_view& out, const prefill_options& options,
                                  cudaStream_t stream) {
    const detail::layer_group& g = group_of(layer);
    const std::size_t rows = static_cast<std::size_t>(q.tokens) * static_cast<std::size_t>(q.heads),
                      states = rows * static_cast<std::size_t>(g.shape.dim(tensor::value) + 2),
                      query_bytes =
                          common::round_up(rows * static_cast<std::size_t>(q.dim) * 2, std::size_t{256});
    if (status s = ensure_moving(query_bytes + 2 * states * sizeof(float), stream); !s) return s;
    auto* const first = reinterpret_cast<float*>(moving_.as<>() + query_bytes);
    float* const other = first + states;
    output_view nowhere = out;
    nowhere.data = nullptr;
    const int runs = runs_of(layer);
    for (int r = 0; r < runs; ++r) {
        query_view turned = q;
        input_view keys = k, values = v;
        prefill_options o = options;
        o.lse = nullptr;
        o.state_out = r == 0 ? first : other;
        if (r > 0) {
            o.sink_logits = nullptr;
            for (input_view* const x : {&keys, &values}) x->tokens = 0;
        }
        if (status s = turn_query(layer, r, turned, q.tokens, stream); !s) return s;
        if (status s = g.format.functions->prefill(
                g.view_before_prompt(member_of(layer), r), keys, values, turned, nowhere,
                r == 0 ? g.words + g.prompt_at() + 2 : nullptr, step_.new_tokens, o, stream);
            !s)
            return s;
        if (r == 0) continue;
        const bool last = r + 1 == runs;
        detail::join_args merge{first,          other,   first,    nullptr, out.token_bytes,
                                out.head_bytes, nullptr, q.tokens, q.heads, g.shape.dim(tensor::value)};
        if (last) {
            merge.state = options.state_out;
            merge.out = out.data;
            merge.lse = options.lse;
        }
        if (status s = g.format.functions->join_states(merge, stream); !s) return s;
    }
    return {};
}

inline status cache::append_prompt(int layer, const input_view& k, const input_view& v, cudaStream_t stream) {
    detail::layer_group& g = group_of(layer);
    input_view opened = k;
    opened.tokens = g.now.opened;
    if (status s = turn_keys(layer, opened, common::larger(1, opened.tokens), nullptr, stream); !s) return s;
    return g.append_prompt(member_of(layer), opened, k, v, stream);
}

}}}  // namespace kvq::cuda
