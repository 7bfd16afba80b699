// Steps and prompts of a cache (cache.hpp): pages are named, tables are sent, tokens of a prompt go to their
// pages.
//
// A step's tokens are found on the device (store_new_tokens.cuh, commit_due_pages.cuh); those of a prompt go
// where layer_group::begin_prompt() says.
#pragma once

#include "cache_class.hpp"
#include "group_plans.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

inline status cache::check_batch(std::span<const sequence_id> ids, bool holes) {
    ++stamp_;
    for (const sequence_id id : ids) {
        if (holes && id == sequence_id{}) continue;
        if (status s = check_here(id); !s) return s;
        if (entry_of(id).stamp == stamp_)
            return detail::bad_value("sequence %d is in the batch twice", id.index);
        entry_of(id).stamp = stamp_;
    }
    return {};
}

inline status cache::check_rows(std::span<const sequence_id> batch) const {
    if (!is_open()) return detail::bad_value("the cache is not open");
    if (batch.empty() || static_cast<int>(batch.size()) > options_.max_batch)
        return detail::bad_value("a step of %zu sequences, but max_batch is %d", batch.size(),
                                 options_.max_batch);
    return {};
}

/// cross: in layers with cross attention.
inline status cache::check_growth(sequence_id id, int new_tokens, bool cross) const {
    const int held = cross ? 0 : tokens(id);
    if (new_tokens > options_.max_tokens - held)
        return detail::bad_value("sequence %d holds %d tokens and cannot take %d more: max_tokens is %d",
                                 id.index, held, new_tokens, options_.max_tokens);
    for (std::size_t i = 0; i < groups_.size(); ++i) {
        const detail::device_geometry& g = groups_[i].geometry;
        const detail::sequence_pages& s = entry_of(id).pages[i];
        if (g.window.cross != cross) continue;
        if (new_tokens > g.first_token(groups_[i].columns) - s.paged_tokens(g) - s.drafted)
            return detail::bad_value(
                "sequence %d holds %d tokens and %d pages that trims have cut, and cannot take %d tokens "
                "more: "
                "max_tokens is %d and cut_pages %d",
                id.index, held, s.cut_pages(g), new_tokens, options_.max_tokens, options_.cut_pages);
    }
    return {};
}

inline status cache::check_whole(std::span<const sequence_id> ids) const {
    const int lacking = missing();
    if (lacking == 0 || std::ranges::find(ids, step_.id) == ids.end()) return {};
    if (step_.cross)
        return detail::bad_value(
            "%d layers lack the %d tokens of begin_cross() for sequence %d: append them first, or free the "
            "sequence",
            lacking, step_.new_tokens, step_.id.index);
    const int held = tokens(step_.id);
    return detail::bad_value(
        "%d layers lack tokens %d to %d of sequence %d, a prompt that has begun: append it to them, or trim "
        "the sequence to %d",
        lacking, held - step_.new_tokens, held, step_.id.index, held - step_.new_tokens);
}

/// Free pages for new_tokens tokens more, or drafted tokens.
inline status cache::ensure_pages(std::span<const sequence_id> batch, int new_tokens, bool draft, bool cross,
                                  cudaStream_t stream) {
    for (std::size_t i = 0; i < groups_.size(); ++i) {
        detail::layer_group& of = groups_[i];
        const detail::device_geometry& g = of.geometry;
        if (of.takes_steps() == cross) continue;
        std::vector<int> quantized(of.format.kinds.size(), 0);
        int window = 0, sinks = 0;
        for (const sequence_id id : batch) {
            if (id == sequence_id{}) continue;
            const detail::sequence_pages& s = entry_of(id).pages[i];
            if (!draft) quantized[static_cast<std::size_t>(s.target())] += s.missing_quantized(new_tokens, g);
            window += draft ? s.missing_draft_pages(new_tokens, g) : s.missing_pages(new_tokens, g);
            sinks += common::larger(
                0, g.sink_pages(s.tokens() + s.drafted + new_tokens) - static_cast<int>(s.sinks.size()));
        }
        if (status s = of.ensure_free(quantized, window, sinks, stream); !s) return s;
    }
    return {};
}

inline status cache::begin_step(std::span<const sequence_id> batch, int new_tokens, cudaStream_t stream) {
    if (status s = check_rows(batch); !s) return s;
    if (new_tokens < 0 || new_tokens > options_.step_tokens)
        return detail::bad_value("a step of %d tokens, but step_tokens is %d", new_tokens,
                                 options_.step_tokens);
    if (status s = check_batch(batch, true); !s) return s;
    if (status s = check_no_draft(batch); !s) return s;
    for (const sequence_id id : batch)
        if (id != sequence_id{})
            if (status s = check_growth(id, new_tokens); !s) return s;
    if (status s = check_whole(std::span(&step_.id, 1)); !s) return s;
    if (status s = settle(batch, stream); !s) return s;
    if (status s = ensure_pages(batch, new_tokens, false, false, stream); !s) return s;
    if (status s = ensure_states(batch, new_tokens, stream); !s) return s;
    if (status s = ensure_runs(batch, new_tokens, stream); !s) return s;
    if (status s = append_chunks(stream); !s) return s;
    return send_step(batch, new_tokens, false, stream);
}

/// The batch's sequences grow, and the device hears of it. All pages are there.
inline status cache::send_step(std::span<const sequence_id> batch, int new_tokens, bool draft,
                               cudaStream_t stream) {
    step next;
    next.begun = true;
    next.rows = static_cast<int>(batch.size());
    next.new_tokens = new_tokens;
    detail::word_writer to = writer(stream);
    status moved;
    for (std::size_t i = 0; i < groups_.size(); ++i) {
        detail::layer_group& g = groups_[i];
        g.new_step();
        std::vector<detail::moved_row> moved_rows(batch.size());
        for (int b = 0; b < next.rows; ++b) {
            const sequence_id id = batch[static_cast<std::size_t>(b)];
            if (id == sequence_id{}) {
                g.empty_row(b, to);
                continue;
            }
            entry& e = entry_of(id);
            const bool grows = g.takes_steps();
            moved_rows[static_cast<std::size_t>(b)] = {e.pages[i], e.version, g.geometry};
            g.now.runs = common::larger(g.now.runs, g.runs.runs_of(e.pages[i]));
            g.grow_row(b, id, e.version, e.pages[i], grows ? new_tokens : 0, grows && draft, to);
            g.now.targets |= 1u << e.pages[i].target();
            if (grows) next.draft = e.pages[i].drafted;
        }
        if (g.now.targets == 0) g.now.targets = 1u << g.target;
        if (moved) moved = g.runs.send(moved_rows, g.now.runs, g.geometry, *g.format.functions, stream);
    }
    step_ = next;
    write_states(batch, new_tokens, false, to);
    status sent = to.flush();
    if (sent) sent = moved;
    if (!sent) forget_rows();
    return sent && states_ ? states_->take_error() : sent;
}

inline status cache::begin_prompt(sequence_id id, int new_tokens, cudaStream_t stream) {
    if (status s = check_prompt(id, new_tokens); !s) return s;
    return begin_text(id, new_tokens, false, stream);
}

inline status cache::begin_cross(sequence_id id, int new_tokens, cudaStream_t stream) {
    if (status s = check_prompt(id, new_tokens); !s) return s;
    if (step_groups() == groups_.size())
        return detail::bad_value("no layer of the cache has cross attention: kvq::cross_layer makes one");
    for (std::size_t i = step_groups(); i < groups_.size(); ++i)
        if (const int held = entry_of(id).pages[i].tokens(); held > 0)
            return detail::bad_value(
                "sequence %d holds %d tokens in its layers with cross attention already: they are appended "
                "once",
                id.index, held);
    return begin_text(id, new_tokens, true, stream);
}

inline status cache::check_prompt(sequence_id id, int new_tokens) const {
    if (!is_open()) return detail::bad_value("the cache is not open");
    if (new_tokens < 1) return detail::bad_value("a prompt of %d tokens", new_tokens);
    if (status s = check_here(id); !s) return s;
    return check_no_draft(std::span(&id, 1));
}

/// new_tokens tokens more in the layers that take steps, or with `cross` in the others. Queries of all layers
/// find the sequence in row 0.
inline status cache::begin_text(sequence_id id, int new_tokens, bool cross, cudaStream_t stream) {
    const int of_steps = cross ? 0 : new_tokens;
    if (status s = check_growth(id, new_tokens, cross); !s) return s;
    if (status s = check_whole(std::span(&step_.id, 1)); !s) return s;
    if (status s = settle(std::span(&id, 1), stream); !s) return s;
    if (status s = ensure_plans(std::span(&id, 1), new_tokens, cross, stream); !s) return s;
    if (status s = ensure_pages(std::span(&id, 1), new_tokens, false, cross, stream); !s) return s;
    if (status s = ensure_states(std::span(&id, 1), of_steps, stream); !s) return s;
    if (status s =
            ensure_runs(std::span(&id, 1), common::larger(options_.page_tokens, options_.sinks), stream);
        !s)
        return s;
    // All memory is found before a prompt that waits is appended and the sequence changes. Nothing is refused
    // behind it, since a prompt that has begun before writes to the scratch that it was given.
    detail::larger_memories larger;
    if (status s = find_chunks(of_steps, larger, stream); !s) return s;
    entry& e = entry_of(id);
    std::size_t staged = 0, lists = 0;
    std::vector<detail::format_spans> spans(groups_.size());
    for (std::size_t i = 0; i < groups_.size(); ++i) {
        const detail::layer_group& g = groups_[i];
        for (int f = 0; f < g.kinds(); ++f) {
            const auto [first, last] = e.pages[i].pages_of(f);
            // Of the target, kernels do not know the last page before the prompt (view_before_prompt).
            const int end = first < last && f == e.pages[i].target() ? e.pages[i].committed() : last;
            spans[i].of[f] = (end - first) * g.geometry.page_tokens;
        }
        lists += static_cast<std::size_t>(g.slot_lists());
        if (g.takes_steps() == cross) continue;
        const detail::pool_memory& m = g.window.memory();
        const auto pages = static_cast<std::size_t>(g.scratch_pages(e.pages[i], new_tokens));
        staged = common::larger(staged, pages * m.page_bytes());
    }
    const std::size_t slot_bytes =
        common::round_up(lists * static_cast<std::size_t>(new_tokens) * sizeof(long long), std::size_t{256});
    status there;
    for (const std::size_t most : {most_scratch_, std::size_t{1}, std::size_t{0}}) {
        std::size_t bytes = staged;
        for (std::size_t i = 0; i < groups_.size() && !cross; ++i)
            bytes =
                common::larger(bytes, scratch_bytes(groups_[i], e.pages[i].paged_tokens(groups_[i].geometry),
                                                    spans[i], new_tokens, most));
        there = larger.find(staging_, options_.memory, slot_bytes + bytes, "a prompt", stream);
        if (there) break;
    }
    if (!there) return there;
    if (status r = append_chunks(stream); !r) return r;
    if (status r = larger.take(stream); !r) return r;
    step next;
    next.begun = next.prompt = true;
    next.number = ++versions_;
    next.cross = cross;
    next.rows = 1;
    next.new_tokens = new_tokens;
    next.id = id;
    next.slot_bytes = slot_bytes;
    step_ = next;
    detail::word_writer to = writer(stream);
    std::vector<detail::prompt_slots> found;
    auto* slot_list = staging_.as<long long>();
    status moved;
    for (std::size_t i = 0; i < groups_.size(); ++i) {
        detail::layer_group& g = groups_[i];
        const detail::moved_row row{e.pages[i], e.version, g.geometry};
        const int runs = g.runs.runs_of(e.pages[i]), before = e.pages[i].paged_tokens(g.geometry);
        if (moved && g.takes_steps() != cross)
            moved = g.runs.send_before_prompt(e.pages[i], g.geometry, *g.format.functions, stream);
        if (g.takes_steps() == cross) {
            g.new_step();
            g.now.spans = spans[i];
            g.now.paged_before = before;
            std::ranges::fill(g.appended, char{1});  // there is nothing to append
            g.grow_row(0, id, e.version, e.pages[i], 0, false, to);
            continue;
        }
        const bool plans_keys = g.plans.takes(e.pages[i].target()) &&
                                e.pages[i].completes(new_tokens, g.geometry) &&
                                detail::take_plan(g, e.pages[i]);
        g.plans.begun = plans_keys ? e.pages[i].plan : page_ref{};
        found.push_back(g.begin_prompt(id, e.version, e.pages[i], new_tokens, staging_.as<>() + slot_bytes,
                                       slot_list, plans_keys, to));
        g.now.spans = spans[i];
        g.now.paged_before = before;
        if (g.format.latent) found.push_back(g.run_slots(found.back()));
        slot_list += g.slot_lists() * new_tokens;
        g.now.runs = runs;
        if (moved) moved = g.runs.send({&row, 1}, runs, g.geometry, *g.format.functions, stream);
    }
    write_states(std::span(&id, 1), of_steps, true, to);
    status s = to.flush();
    if (s) s = moved;
    if (!s) forget_rows();
    if (s && states_) s = states_->take_error();
    for (const detail::prompt_slots& of : found)
        if (s) s = groups_[0].format.functions->find_prompt_slots(of, stream);
    return s;
}

inline status cache::append(int layer, const input_view& k, const input_view& v, cudaStream_t stream) {
    if (status s = check_append(layer, k, v); !s) return s;
    detail::layer_group& g = group_of(layer);
    const int member = member_of(layer);
    if (step_.prompt) return append_prompt(layer, k, v, stream);
    if (status s = commit_due(layer, stream); !s) return s;
    input_view keys = k;
    if (status s = turn_keys(layer, keys, step_.new_tokens, g.words + g.tokens_at(0), stream); !s) return s;
    if (status s = g.format.functions->store_new(view(layer), keys, v, step_.new_tokens, stream); !s)
        return s;
    g.appended[static_cast<std::size_t>(member)] = 1;
    return {};
}

/// Of a step or a draft whose arguments are checked, but for those that the launches check: where they refuse
/// some, what is stored already counts as not appended.
inline status cache::append_and_attend(int layer, const input_view& k, const input_view& v,
                                       const query_view& q, const output_view& out,
                                       const attention_options& options, cudaStream_t stream,
                                       const void* score) {
    detail::layer_group& g = group_of(layer);
    status s;
    if (options.selected_tokens != 0) {
        s = append(layer, k, v, stream);
        if (s) s = attend_pages(layer, q, out, options, stream, score);
    } else if (runs_of(layer) > 1) {
        s = check_runs(layer, q.tokens, q.heads);
        if (s) s = append(layer, k, v, stream);
        if (s) s = attend_runs(layer, q, out, options, stream, score);
    } else {
        const detail::device_memory& space = workspace_of(layer);
        s = commit_due(layer, stream);
        if (s)
            s = g.format.functions->store_and_attend(view(layer), k, v, step_.new_tokens, q, out, options,
                                                     space.as<>(), space.bytes(), stream, score);
    }
    g.appended[static_cast<std::size_t>(member_of(layer))] = s ? 1 : 0;
    return s;
}

inline std::size_t cache::prompt_bytes() const noexcept {
    std::size_t sum = staging_.bytes();
    for (const chunk& c : chunks_) sum += c.keys.bytes() + c.values.bytes();
    return sum;
}
inline std::size_t cache::step_groups() const noexcept {
    std::size_t n = groups_.size();
    while (n > 0 && !groups_[n - 1].takes_steps()) --n;
    return n;
}

/// Is it the modifier that the kernels were compiled for? Those of prompts take such that change scores.
inline status cache::check_score(int layer, detail::score_mark score, bool prompt) const {
    if (status s = check_keys(layer); !s) return s;
    const detail::device_functions& f = *group_of(layer).format.functions;
    if (score == (prompt && !f.has_score ? detail::score_mark::of<unmodified>() : f.score)) return {};
    return detail::bad_value(
        "the cache was opened with kernels for another score modifier: add make_scored_format<its "
        "type, ...>()%s",
        prompt ? "; prompts take learned sinks as sink_logits" : "");
}

inline status cache::prefill_prompt(int layer, const input_view& k, const input_view& v, const query_view& q,
                                    const output_view& out, prefill_options options, cudaStream_t stream,
                                    const void* score) {
    if (status s = check_layer(layer, {type_of(k, q), type_of(v, q), q.type, out.type}); !s) return s;
    if (!step_.prompt)
        return detail::bad_value("prefill is for the tokens of begin_prompt(): append, then attend");
    if (step_.cross)
        return detail::bad_value("begin_cross() is for append() alone; queries come in steps and prompts");
    const int own = is_shared(layer) || is_cross(layer) ? 0 : step_.new_tokens;
    if (q.tokens != step_.new_tokens || k.tokens != own || v.tokens != (keys_alone(layer) ? 0 : own) ||
        out.tokens != step_.new_tokens)
        return detail::bad_value(
            "q, k, v, out have %d, %d, %d, %d tokens, but the prompt has %d%s", q.tokens, k.tokens, v.tokens,
            out.tokens, step_.new_tokens,
            own == 0            ? ", and a layer that is shared or has cross attention takes 0 of k and v"
            : keys_alone(layer) ? ", and these layers have keys alone"
                                : "");
    detail::layer_group& g = group_of(layer);
    if (g.format.index)
        return detail::bad_value("%s: it selects tokens: append, then select", describe(layer).c_str());
    const int member = member_of(layer);
    options.scratch = scratch_of(layer);
    if (is_cross(layer)) {
        if (status s = g.add_window(options, member); !s) return s;
        return g.format.functions->prefill(view(layer), k, v, q, out, nullptr, step_.new_tokens, options,
                                           stream, score);
    }
    chunk* const c = shared_chunk(layer);
    std::size_t reader = 0;
    if (own == 0) {
        reader = static_cast<std::size_t>(std::ranges::find(c->readers, layer) - c->readers.begin());
        if (c->waits_for[reader] == 0)
            return detail::bad_value("%s: no prompt of its owner waits for it", describe(layer).c_str());
    }
    if (own > 0)
        if (status s = check_lacks(layer); !s) return s;
    if (keys_alone(layer)) return prefill_latents(layer, k, v, q, out, options, stream);
    if (status s = g.add_window(options, member); !s) return s;
    if (status s = runs_of(layer) > 1
                       ? prefill_runs(layer, own == 0 ? c->k : k, own == 0 ? c->v : v, q, out, options,
                                      stream, score)
                       : g.format.functions->prefill(g.view_before_prompt(member), own == 0 ? c->k : k,
                                                     own == 0 ? c->v : v, q, out, g.words + g.prompt_at() + 2,
                                                     step_.new_tokens, options, stream, score);
        !s)
        return s;
    if (c == nullptr) return append_prompt(layer, k, v, stream);
    if (own > 0) return hold(*c, k, v, stream);
    c->waits_for[reader] = 0;
    return c->waits() ? status{} : append_prompt(layer, c->k, c->v, stream);
}

inline status cache::check_layer(int layer, std::initializer_list<float_type> types) const {
    if (!step_.begun)
        return detail::bad_value("no step has begun since the sequences of the cache were changed");
    if (status s = check_keys(layer); !s) return s;
    for (const float_type type : types)
        if (type != options_.type)
            return detail::bad_value(
                "the cache takes another type; open it with options.type, and add "
                "make_device_format<that type, ...>()");
    return {};
}
inline status cache::check_append(int layer, const input_view& k, const input_view& v) {
    if (status s = check_layer(layer, {k.type, type_of(v, k)}); !s) return s;
    if (is_shared(layer)) return detail::bad_value("%s: it takes queries only", describe(layer).c_str());
    if (step_.new_tokens == 0) return detail::bad_value("the step has no new tokens");
    if (is_cross(layer) != step_.cross)
        return detail::bad_value("%s: it takes the tokens of begin_%s()", describe(layer).c_str(),
                                 is_cross(layer) ? "cross" : "step, begin_prompt or begin_draft");
    const int tokens = step_.rows * step_.new_tokens;
    if (k.tokens != tokens || v.tokens != (keys_alone(layer) ? 0 : tokens))
        return detail::bad_value("k has %d and v %d tokens, but the step has %d x %d%s", k.tokens, v.tokens,
                                 step_.rows, step_.new_tokens,
                                 keys_alone(layer) ? ", and these layers have keys alone" : "");
    return check_lacks(layer);
}

/// Slices of the prompt's queries that the workspace has room for, one after the other.
inline status cache::prefill_latents(int layer, const input_view& k, const input_view& v, const query_view& q,
                                     const output_view& out, const prefill_options& options,
                                     cudaStream_t stream) {
    detail::layer_group& g = group_of(layer);
    const int member = member_of(layer), n = q.tokens, dim = g.shape.head_dim,
              width = g.shape.dim(tensor::value);
    attention_options slice{.scale = options.scale,
                            .softcap = options.softcap,
                            .window = options.window,
                            .chunked = options.chunked,
                            .window_sinks = options.window_sinks};
    if (k.data == nullptr || q.data == nullptr || (out.data == nullptr && options.state_out == nullptr))
        return detail::bad_value("%s: q, k or out is a null pointer", describe(layer).c_str());
    if (k.heads != 1 || k.dim != dim || q.heads < 1 || q.dim != dim ||
        (out.data != nullptr && (out.heads != q.heads || out.dim != width)))
        return detail::bad_value("%s: k is %d x %d, q %d x %d and out %d x %d", describe(layer).c_str(),
                                 k.heads, k.dim, q.heads, q.dim, out.heads, out.dim);
    if (status s = check_latents(layer, 1, q.heads, slice); !s) return s;
    int most = n;
    while (g.format.functions->workspace_bytes(1, q.heads, most) > scratch_.bytes()) most = (most + 1) / 2;
    const int runs = runs_of(layer);
    const detail::sequence_pages& pages =
        entry_of(step_.id).pages[static_cast<std::size_t>(places_[static_cast<std::size_t>(layer)].group)];
    if (status s = ensure_query_runs(layer, most, q.heads, stream); !s) return s;
    input_view opened = k;
    opened.tokens = g.now.opened;
    if (status s = turn_keys(layer, opened, common::larger(1, opened.tokens), nullptr, stream); !s) return s;
    if (status s = g.make_run(member, opened, k, v, stream); !s) return s;
    const int before = pages.paged_tokens(g.geometry) - n;
    /// The pages of run r among those in the scratch; of -1 all.
    const auto name_pages = [&](detail::word_writer& to, int r) {
        for (int i = 0; i < g.now.run_pages && runs > 1; ++i) {
            const bool there =
                r < 0 || pages.shift_of(g.now.committed_before + i) == detail::moved_runs::shift_of(pages, r);
            g.send(to, g.run_at(i), there ? i : -1);
        }
    };
    for (int first = 0; first < n; first += most) {
        const int count = common::smaller(most, n - first);
        const std::ptrdiff_t row = std::ptrdiff_t{first} * q.heads;
        slice.query_tokens = count;
        if (options.lse != nullptr) slice.lse = options.lse + row;
        if (options.state_out != nullptr) slice.state_out = options.state_out + row * (width + 2);
        for (int r = 0; r < runs; ++r) {
            detail::word_writer to = writer(stream);
            g.send(to, g.seen_at(), before + first + count);
            name_pages(to, r);
            if (status s = to.flush(); !s) return s;
            query_view queries = g.slice(q, first, count);
            output_view outputs = g.slice(out, first, count);
            attention_options o = slice;
            if (status s = chain_run(layer, r, queries, outputs, o, count, stream); !s) return s;
            o.sink_logits = r + 1 == runs ? options.sink_logits : nullptr;
            constexpr unmodified none;
            if (status s =
                    g.format.functions->attend(g.view_of_run(member, runs == 1 ? -1 : r), queries, outputs, o,
                                               scratch_.as<>(), scratch_.bytes(), stream, &none);
                !s)
                return s;
        }
    }
    detail::word_writer to = writer(stream);
    name_pages(to, -1);
    if (status s = to.flush(); !s) return s;
    return append_prompt(layer, k, v, stream);
}

inline status cache::check_latents(int layer, int rows, int q_heads, const attention_options& options) const {
    if (status s = detail::check_latent_options(options); !s) return s;
    const int query_tokens = options.query_tokens;
    if (q_heads <= options_.query_heads && query_tokens <= most_queries()) return {};
    const std::size_t bytes = group_of(layer).format.functions->workspace_bytes(rows, q_heads, query_tokens);
    if (bytes <= scratch_.bytes()) return {};
    return detail::bad_value(
        "%s: attention of %d query heads and %d tokens of %d sequences needs a workspace of %zu bytes, but "
        "that of %d heads (query_heads) and a step has %zu",
        describe(layer).c_str(), q_heads, query_tokens, rows, bytes, options_.query_heads, scratch_.bytes());
}

/// Memory for chunks of so many tokens.
inline status cache::find_chunks(int new_tokens, detail::larger_memories& larger, cudaStream_t stream) {
    for (chunk& c : chunks_) {
        const cache_shape of = shape(c.owner);
        for (const tensor role : {tensor::key, tensor::value}) {
            const std::size_t bytes = std::size_t{2} * static_cast<std::size_t>(new_tokens) *
                                      static_cast<std::size_t>(of.kv_heads) *
                                      static_cast<std::size_t>(of.dim(role));
            detail::device_memory& memory = role == tensor::key ? c.keys : c.values;
            if (status s = larger.find(memory, options_.memory, bytes, "a shared prompt", stream); !s)
                return s;
        }
    }
    return {};
}

/// The tokens of a prompt wait for the layers that share them.
inline status cache::hold(chunk& c, const input_view& k, const input_view& v, cudaStream_t stream) {
    const auto copy = [&](const input_view& from, detail::device_memory& to, input_view& held) -> status {
        held = from;
        const std::size_t row = std::size_t{2} * static_cast<std::size_t>(from.dim);
        held.data = to.as<>();
        held.head_bytes = static_cast<std::ptrdiff_t>(row);
        held.token_bytes = from.heads * held.head_bytes;
        for (int head = 0; head < from.heads; ++head) {
            const cudaError_t code = cudaMemcpy2DAsync(
                to.as<>() + static_cast<std::size_t>(head) * row, row * static_cast<std::size_t>(from.heads),
                from.at(0, head), static_cast<std::size_t>(from.token_bytes), row,
                static_cast<std::size_t>(from.tokens), cudaMemcpyDeviceToDevice, stream);
            if (code != cudaSuccess) return detail::runtime_error(code, "holding a shared prompt");
        }
        return {};
    };
    if (status s = copy(k, c.keys, c.k); !s) return s;
    if (status s = copy(v, c.values, c.v); !s) return s;
    std::ranges::fill(c.waits_for, char{1});
    return {};
}

inline status cache::append_chunks(cudaStream_t stream) {
    for (chunk& c : chunks_) {
        if (!c.waits()) continue;
        if (status s = append_prompt(c.owner, c.k, c.v, stream); !s) return s;
        std::ranges::fill(c.waits_for, char{0});
    }
    return {};
}

}}}  // namespace kvq::cuda
