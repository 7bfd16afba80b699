// calibrate(); and plans of widths that sequences of a cache on the device make of their own first keys
// (cache/key_plan.hpp): the plans of the CPU, bit for bit.
//
//   first T tokens of a sequence                    16 bit
//   a prompt that completes them                    plans a layer's keys and quantizes, in append()
//   a step, or keep(), that completes them          quantizes nothing: the next begin does, in all layers
//
// The begin that follows such a step, fork(), requantize(), step_down() and offload() do it as well. Pages of
// a sequence have one plan. One that has quantized pages before it has a plan, and one whose pages come to a
// format with plans later, has even widths for good.
// Contract: of plans launches alone, nothing waits. A call that fails changes no plan. calibrate() sends
// plans and matrices of feedback, and waits for the stream.
#pragma once

#include "cache_open.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

/// Sees to a free plan page for each of these sequences that will make one with new_tokens tokens more.
inline status cache::ensure_plans(std::span<const sequence_id> ids, int new_tokens, bool cross,
                                  cudaStream_t stream) {
    for (std::size_t i = 0; i < groups_.size(); ++i) {
        detail::layer_group& g = groups_[i];
        if (g.geometry.commits_from == 0 || g.takes_steps() == cross) continue;
        int count = 0;
        for (const sequence_id id : ids)
            if (id != sequence_id{}) {
                const detail::sequence_pages& s = entry_of(id).pages[i];
                count += !s.plan && s.tokens() + new_tokens >= g.geometry.commits_from;
            }
        if (status s = g.plans.pages.ensure(count, options_.growing, stream); !s) return s;
    }
    return {};
}

/// Behind a step that completed the tokens of a plan: makes it, and quantizes what waits.
inline status cache::settle(std::span<const sequence_id> ids, cudaStream_t stream) {
    for (std::size_t i = 0; i < groups_.size(); ++i) {
        detail::layer_group& g = groups_[i];
        if (g.plans.tokens == 0) continue;
        std::vector<int> wanted(g.quantized.size(), 0);
        std::vector<sequence_id> waiting;
        for (const sequence_id id : ids) {
            if (id == sequence_id{}) continue;
            detail::sequence_pages& s = entry_of(id).pages[i];
            if (g.plans.takes(s.target()) && g.geometry.commits_from == 0) (void)detail::take_plan(g, s);
            const bool plans = g.plans.takes(s.target()) && !s.plan && s.tokens() >= g.geometry.commits_from;
            if (!plans && !s.has_due(g.geometry)) continue;
            waiting.push_back(id);
            for (int k = s.table.committed; k < s.table.due(s.tokens(), g.geometry); ++k)
                wanted[static_cast<std::size_t>(s.target())] += !s.table[k].sinks;
        }
        if (waiting.empty()) continue;
        if (status s = g.ensure_free(wanted, 0, 0, stream); !s) return s;
        if (status s = ensure_plans(waiting, 0, !g.takes_steps(), stream); !s) return s;
        for (const sequence_id id : waiting) {
            entry& e = entry_of(id);
            detail::sequence_pages& s = e.pages[i];
            const bool makes = g.plans.takes(s.target()) && detail::take_plan(g, s);
            status result;
            const input_view none = no_rows();
            if (makes) {
                detail::word_writer to = writer(stream);
                g.send_planned(s, s.tokens(), to);
                result = to.flush();
                for (int member = 0; member < g.shape.layers && result; ++member)
                    result = g.plan_layer(member, s.plan->number, g.plans.tokens, none, none, stream);
            }
            std::vector<page_ref> fresh;
            std::vector<detail::page_pair> pages;
            for (int k = s.table.committed; k < s.table.due(s.tokens(), g.geometry); ++k) {
                if (s.table[k].sinks) continue;
                fresh.push_back(g.quantized[static_cast<std::size_t>(s.target())].pages().take());
                pages.push_back({s.table[k].pages[0]->number, fresh.back()->number});
            }
            if (result) result = convert_pages(g, -1, s.target(), pages, s.plan, stream);
            if (!result) {
                if (makes) s.plan = {};
                return result;
            }
            s.commit_due(g.geometry, fresh);
            if (makes) detail::adopt_plan(g, s.plan);
            e.version = ++versions_;
        }
    }
    return {};
}

/// Can a format get statistics of this shape now?
inline status cache::check_statistics(std::string_view format, const cache_shape& of) const {
    if (status s = check_format(format); !s) return s;
    for (const detail::layer_group& g : groups_)
        for (int f = 0; f < g.kinds(); ++f) {
            if (!g.is_named(f, format)) continue;
            if (g.format.latent)
                return detail::bad_value("%s: statistics for keys of latents are for caches on the CPU",
                                         g.describe(0).c_str());
            if (of.layers != layer_count() || of.kv_heads != g.shape.kv_heads ||
                of.head_dim != g.shape.head_dim)
                return detail::bad_value(
                    "statistics of %d layers, %d kv heads and head_dim %d, but the cache has %d, %d, %d",
                    of.layers, of.kv_heads, of.head_dim, layer_count(), g.shape.kv_heads, g.shape.head_dim);
            if (g.quantized[static_cast<std::size_t>(f)].pages().used() > 0)
                return detail::bad_value("pages of %.60s are in use; statistics come before the first page",
                                         std::string(format).c_str());
        }
    return {};
}

inline status cache::calibrate(std::string_view format, const calibration& statistics, cudaStream_t stream) {
    if (status s = check_statistics(format, statistics.shape()); !s) return s;
    const std::vector<named_format> named = find_named(format);
    struct made_keys {
        detail::device_memory plans, feedback;
        std::uint64_t fingerprint;
    };
    std::vector<made_keys> made;
    for (const auto& [g, f] : named) {
        const detail::key_state state = g.format.functions->make_keys(f, statistics);
        made_keys& m = made.emplace_back(made_keys{{}, {}, state.plans.empty() ? 0 : state.fingerprint});
        status s = put_layers<std::uint16_t>(m.plans, g, {state.plans.data()}, state.plans.size(), stream);
        if (s) s = put_layers<float>(m.feedback, g, {state.feedback.data()}, state.feedback.size(), stream);
        if (!s) return s;
    }
    for (std::size_t i = 0; i < named.size(); ++i) {
        detail::device_keys& held = named[i].group.keys[static_cast<std::size_t>(named[i].number)];
        held.plans = std::move(made[i].plans);
        held.feedback = std::move(made[i].feedback);
        if (made[i].fingerprint != 0) held.fingerprints[0] = made[i].fingerprint;
        if (held.plans.bytes() > 0) detail::give_plans(named[i].group, named[i].number);
    }
    step_.begun = false;
    return {};
}

}}}  // namespace kvq::cuda
