// Keys that move: erase and shift of a cache on the device (cache.hpp), and what steps, prompts and attention
// do for sequences whose keys have moved.
//
// The page table moves (page_table::take); no byte of a page changes. Attention takes a launch for each
// number of positions by which keys have moved, with queries that are turned for it (moved_runs.hpp), in
// graphs as well. New keys that go to a page with moved ones turn like them, as on the CPU.
// Contract: a refused call changes nothing. Steps of sequences without moved keys make no launch more.
#pragma once

#include "cache_pages.hpp"
#include "group_plans.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

// ---- the table ----

namespace detail {

/// Appends tokens [from, to) of `held` to a table, moved by `by`.
inline status take_tokens(common::page_table& table, const common::page_table& held, const char* does,
                          int from, int to, std::int64_t by, const device_geometry& g) {
    for (const page_span& s : held.spans)
        if (s.first_token < to && s.end() > from &&
            (s.shift > common::farthest_shift - by || s.shift < -common::farthest_shift - by))
            return bad_value("keys cannot move from %lld by %lld positions", static_cast<long long>(s.shift),
                             static_cast<long long>(by));
    if (const auto cut = table.take(held, from, to, by, g); cut.span >= 0)
        return bad_value(
            "cannot %s: token %d is within a 16-bit page of the recent window, whose tokens from %d on move "
            "as one",
            does, from, from - cut.skip);
    return {};
}
/// Completes a group's table whose spans have come, unless the device cannot have it: as finish() of
/// cache/rearrange-inl.hpp, in its order. Spans before `quantized` are to be quantized.
inline status finish_table(const layer_group& group, sequence_pages& next, const char* does,
                           int quantized = 0) {
    const device_geometry& g = group.geometry;
    common::page_table& table = next.table;
    if (!table.shows_sinks(g.window.sinks))
        return bad_value(
            "%s: every query sees the first %d tokens, its sinks: they cannot be erased or replaced, nor "
            "cut before all of them are there",
            group.describe(0).c_str(), g.window.sinks);
    if (!table.is_whole(table.tokens, g))
        return bad_value(
            "tokens cannot be taken out of %s: token %d would see tokens from %d on, but those before "
            "token %d are freed",
            group.describe(0).c_str(), table.tokens, g.window.first_seen(table.tokens), table.front());
    if (table.due(table.tokens, g) > table.committed)
        return bad_value("cannot %s: pages of the recent window would leave it", does);
    table.uncommit(g, quantized);
    for (int k = 0; k < table.size(); ++k)
        if (status s = check_span(table[k], k, k < table.committed, table.tokens, g); !s) return s;
    table.free_unseen(g, g.rollback, [](page_ref&&) {});
    next.gone_pages = common::ceil_div(common::larger(0, table.front() - g.sinks), g.page_tokens);
    table.freed = common::smaller(next.gone_pages, common::page_table::most_freed);
    if (next.pages() > group.columns)
        return bad_value(
            "cannot %s: the %d tokens are in %d pages, of which cuts show a part, but max_tokens is %d and "
            "cut_pages %d",
            does, table.tokens, next.pages(), group.options->max_tokens, group.options->cut_pages);
    next.find_moved();
    return {};
}
/// The pages of a group for new spans: no spans yet.
inline sequence_pages without_spans(const sequence_pages& of) {
    sequence_pages next = of;
    next.leaving.clear();
    next.table =
        common::page_table(std::pmr::new_delete_resource(), of.table.targets[0], of.table.targets[1]);
    return next;
}

/// "erase tokens 4 to 9".
inline std::string moving(const char* verb, int first, int last) {
    return std::string(verb) + " tokens " + std::to_string(first) + " to " + std::to_string(last);
}

/// What a splice does in a group, before anything changes.
struct splice_plan {
    sequence_pages next;
    std::vector<int> quantize;  // spans of the sequence itself in 16 bit
    std::vector<int> copy;      // those of the other one
};

inline status plan_splice(const layer_group& group, const sequence_pages& mine, const sequence_pages& theirs,
                          int first, int last, const char* does, splice_plan& plan) {
    const device_geometry& g = group.geometry;
    plan.next = without_spans(mine);
    common::page_table& table = plan.next.table;
    const int held = mine.table.tokens;
    if (!theirs.table.holds(first, last))
        return bad_value("cannot %s: %s has freed tokens before %d", does, group.describe(0).c_str(),
                         theirs.table.front());
    if (mine.plan.get() != theirs.plan.get()) {
        // One that has no plan yet would get the other's.
        const bool shared =
            group.options->statistics == key_statistics::shared && !(mine.plan && theirs.plan);
        if (held > 0 && !shared)
            return bad_value(
                "cannot %s: keys of both sequences get plans of their own, and a sequence has one "
                "(key_statistics::shared)",
                does);
        plan.next.plan = theirs.plan ? theirs.plan : mine.plan;
    }
    if (status s = take_tokens(table, mine.table, does, 0, held, 0, g); !s) return s;
    if (held < g.sinks && held > 0)
        return bad_value("cannot %s: the sequence holds %d tokens, fewer than its %d sinks", does, held,
                         g.sinks);
    // The whole text so far is committed, also what is within the recent window.
    if (table.has_open_span() && !table.spans.back().sinks)
        return bad_value(
            "cannot %s behind token %d: the last page has %d of its %d tokens, and the device quantizes "
            "whole pages; trim to %d before",
            does, held, table.spans.back().tokens, g.page_tokens, table.spans.back().first_token);
    table.close_last();
    table.committed = table.size();
    const auto in_16_bit = [&](int i) { return !table[i].sinks && table[i].pages[0]->format == 0; };
    int quantized = table.size();
    while (quantized > 0 && !in_16_bit(quantized - 1)) --quantized;
    if (status s = take_tokens(table, theirs.table, does, first, last, std::int64_t{held} - first, g); !s)
        return s;
    if (status s = finish_table(group, plan.next, does, quantized); !s) return s;
    for (int i = 0; i < table.size(); ++i)
        if (in_16_bit(i)) (i < table.committed ? plan.quantize : plan.copy).push_back(i);
    if (!plan.quantize.empty() && group.plans.takes(plan.next.target()) && !plan.next.plan)
        plan.next.plan = group.plans.even;  // too few tokens for one of its own
    return {};
}

}  // namespace detail

/// Gives a sequence the spans that build(take) makes in every group; take(first, last, by) appends tokens of
/// the old ones, moved. does: the verb and its tokens.
template <class Build>
status cache::rearrange(sequence_id id, const char* does, Build&& build) {
    entry& e = entry_of(id);
    std::vector<detail::sequence_pages> made;
    for (std::size_t i = 0; i < step_groups(); ++i) {
        detail::sequence_pages& next = made.emplace_back(detail::without_spans(e.pages[i]));
        status result;
        build([&](int from, int to, std::int64_t by) {
            if (result)
                result = detail::take_tokens(next.table, e.pages[i].table, does, from, to, by,
                                             groups_[i].geometry);
        });
        if (result) result = detail::finish_table(groups_[i], next, does);
        if (!result) return result;
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
    for (int layer = 0; layer < layer_count(); ++layer)
        if (const kvq::layer& l = layers_[static_cast<std::size_t>(layer)];
            l.kind == layer_kind::latent && rotations_.at(layer) &&
            l.value_dim > l.head_dim - l.rotary_channels)
            return detail::bad_value(
                "%s: its %d values have rotary channels, which do not turn when keys move by %lld positions",
                describe(layer).c_str(), l.value_dim, static_cast<long long>(by));
    return check_still(id, verb);
}
/// Is a sequence not within a step?
inline status cache::check_still(sequence_id id, const char* verb) const {
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
    return rearrange(id, detail::moving("erase", first, last).c_str(), [&](const auto& take) {
        take(0, first, 0);
        take(last, held, by);
    });
}
inline status cache::shift(sequence_id id, int first, int last, std::int64_t by) {
    if (status s = check_move(id, "shift", first, last, by); !s || first == last || by == 0) return s;
    const int held = tokens(id);
    return rearrange(id, detail::moving("shift", first, last).c_str(), [&](const auto& take) {
        take(0, first, 0);
        take(first, last, by);
        take(last, held, 0);
    });
}

/// The pages that the new spans need. They are free.
inline status cache::fill_spliced(detail::layer_group& g, detail::splice_plan& plan,
                                  const detail::sequence_pages& theirs, cudaStream_t stream) {
    detail::sequence_pages& next = plan.next;
    const int target = next.target();
    std::vector<detail::page_pair> pages;
    for (const int i : plan.quantize) {
        page_ref fresh = g.quantized[static_cast<std::size_t>(target)].pages().take();
        pages.push_back({next.table[i].pages[0]->number, fresh->number});
        next.table[i].pages[0] = std::move(fresh);
    }
    if (status s = convert_pages(g, -1, target, pages, next.plan, stream); !s) return s;
    detail::page_copier copies{g, stream};
    for (const int i : plan.copy) copies.add(next.table[i].pages[0], g.window);
    copies.launch(g.window);
    if (next.sinks.empty()) {
        next.sinks = theirs.sinks;
        next.sinks.resize(static_cast<std::size_t>(g.geometry.sink_pages(next.tokens())));
        for (page_ref& p : next.sinks) copies.add(p, g.sinks);
        copies.launch(g.sinks);
    }
    return copies.result;
}

inline status cache::splice(sequence_id id, sequence_id other, int first, int last, cudaStream_t stream) {
    if (status s = check_here(id); !s) return s;
    const std::int64_t by = std::int64_t{tokens(id)} - first;
    if (status s = check_move(other, "splice", first, last, by); !s) return s;
    if (status s = check_states(std::span(&id, 1), "splice"); !s || first == last) return s;
    for (const sequence_id of : {id, other})
        if (status s = check_still(of, "splice"); !s) return s;
    if (step_groups() < groups_.size())
        return detail::bad_value("%s: tokens of another sequence belong to another text",
                                 groups_.back().describe(0).c_str());
    if (last - first > options_.max_tokens - tokens(id))
        return detail::bad_value("sequence %d holds %d tokens and cannot take %d more: max_tokens is %d",
                                 id.index, tokens(id), last - first, options_.max_tokens);
    const std::string does =
        detail::moving("splice", first, last) + " of sequence " + std::to_string(other.index);
    const sequence_id both[] = {id, other};
    if (status s = settle(both, stream); !s) return s;
    std::vector<detail::splice_plan> plans(groups_.size());
    for (std::size_t i = 0; i < groups_.size(); ++i)
        if (status s = detail::plan_splice(groups_[i], entry_of(id).pages[i], entry_of(other).pages[i], first,
                                           last, does.c_str(), plans[i]);
            !s)
            return s;
    for (std::size_t i = 0; i < groups_.size(); ++i) {
        const detail::splice_plan& p = plans[i];
        detail::layer_group& g = groups_[i];
        std::vector<int> fresh(g.quantized.size(), 0);
        fresh[static_cast<std::size_t>(p.next.target())] = static_cast<int>(p.quantize.size());
        const int sinks = tokens(id) == 0 ? g.geometry.sink_pages(last) : 0;
        if (status s = g.ensure_free(fresh, static_cast<int>(p.copy.size()), sinks, stream); !s) return s;
    }
    step_.begun = false;
    for (std::size_t i = 0; i < groups_.size(); ++i)
        if (status s = fill_spliced(groups_[i], plans[i], entry_of(other).pages[i], stream); !s) return s;
    entry& e = entry_of(id);
    for (std::size_t i = 0; i < groups_.size(); ++i) e.pages[i] = std::move(plans[i].next);
    e.version = ++versions_;
    end_step(id);
    return {};
}

inline status cache::drop_front(sequence_id id, int window, bool move_sinks, int& dropped) {
    dropped = 0;
    if (status s = check_move(id, "drop", 0, tokens(id), move_sinks ? 1 : 0); !s) return s;
    if (status s = check_still(id, "drop"); !s) return s;
    if (window < 1) return detail::bad_value("a window has at least 1 token, got %d", window);
    if (step_groups() < groups_.size())
        return detail::bad_value("%s: its queries see all tokens of another text, so that none are dropped",
                                 groups_.back().describe(0).c_str());
    std::vector<detail::sequence_pages>& pages = entry_of(id).pages;
    const long long seen = 1LL * tokens(id) - options_.rollback - window + 1;
    int first = options_.sinks;
    for (const page_span& s : pages[0].table.spans) {
        if (s.first_token > seen) break;
        const auto begins = [&](const detail::sequence_pages& of) {
            return std::ranges::any_of(of.table.spans,
                                       [&](const page_span& t) { return t.first_token == s.first_token; });
        };
        if (s.first_token > first && std::ranges::all_of(pages, begins)) first = s.first_token;
    }
    dropped = first - options_.sinks;
    if (dropped == 0) return {};
    for (std::size_t i = 0; i < pages.size(); ++i) {
        common::page_table& table = pages[i].table;
        pages[i].leaving.clear();
        table.drop_front(dropped, groups_[i].geometry);
        if (move_sinks && pages[i].sink_spans() > 0) {
            table[0].shift += dropped;
            table.rearranged = true;
        }
        pages[i].find_moved();
    }
    entry_of(id).version = ++versions_;
    end_step(id);
    return {};
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

/// Memory for a launch of so many queries, where keys have moved: of a step it is there.
inline status cache::ensure_query_runs(int layer, int tokens, int q_heads, cudaStream_t stream) {
    if (runs_of(layer) == 1) return {};
    if (status s = check_runs(layer, tokens, q_heads); !s || !step_.prompt) return s;
    return ensure_moving(
        moving_bytes(layer, 0, static_cast<std::size_t>(tokens) * static_cast<std::size_t>(q_heads)), stream);
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

/// Behind turned queries of so many rows.
inline float* cache::run_states(int layer, std::size_t rows) const noexcept {
    const auto dim = static_cast<std::size_t>(group_of(layer).shape.head_dim);
    return reinterpret_cast<float*>(moving_.as<>() + common::round_up(rows * dim * 2, std::size_t{256}));
}
/// What run r of an attention takes and writes: softmax states go from one run to the next.
template <class Options>
status cache::chain_run(int layer, int r, query_view& q, output_view& out, Options& options, int of_sequence,
                        cudaStream_t stream) const {
    const int runs = runs_of(layer);
    if (runs == 1) return {};
    float* const states =
        run_states(layer, static_cast<std::size_t>(q.tokens) * static_cast<std::size_t>(q.heads));
    if (status s = turn_query(layer, r, q, of_sequence, stream); !s) return s;
    if (r > 0) options.state_in = states;
    if (r + 1 < runs) {
        options.state_out = states;
        options.lse = nullptr;
        out.data = nullptr;
    }
    return {};
}

inline status cache::attend_runs(int layer, const query_view& q, const output_view& out,
                                 const attention_options& options, cudaStream_t stream, const void* score) {
    const detail::layer_group& g = group_of(layer);
    if (q.data == nullptr || q.heads < 1 || q.dim != g.shape.head_dim ||
        q.tokens != step_.rows * options.query_tokens)
        return g.format.functions->attend(view(layer), q, out, options, workspace_of(layer).as<>(),
                                          workspace_of(layer).bytes(), stream, score);  // says what is wrong
    if (status s = ensure_query_runs(layer, q.tokens, q.heads, stream); !s) return s;
    for (int r = 0; r < runs_of(layer); ++r) {
        query_view turned = q;
        output_view to = out;
        attention_options o = options;
        if (r > 0) o.early = false;
        if (r + 1 < runs_of(layer)) o.sink_logits = nullptr;
        if (status s = chain_run(layer, r, turned, to, o, options.query_tokens, stream); !s) return s;
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
                                  const output_view& out, const prefill_options& options, cudaStream_t stream,
                                  const void* score) {
    const detail::layer_group& g = group_of(layer);
    if (g.format.functions->has_sinks && g.format.functions->has_score)
        return detail::bad_value(
            "%s: keys have moved, and every launch would count the score modifier's sinks",
            describe(layer).c_str());
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
                r == 0 ? g.words + g.prompt_at() + 2 : nullptr, step_.new_tokens, o, stream, score);
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
    if (status s = g.append_prompt(member_of(layer), opened, k, v, stream); !s) return s;
    if (g.missing_layers() == 0) detail::adopt_plan(g, std::exchange(g.plans.begun, {}));
    return {};
}

}}}  // namespace kvq::cuda
