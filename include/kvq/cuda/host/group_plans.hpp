// Plans of keys of a group of layers (cache_plans.hpp): their memory, and which one a sequence gets.
//
// Contract: a plan page is taken where ensure_plans() has seen to a free one. A sequence that has quantized
// pages before it has a plan, or whose first tokens a window has freed, gets the even one.
#pragma once

#include "layer_group.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// How many plan pages are there for sequences of a group, and what they are of.
inline status open_plans(layer_group& g) {
    const cache_options& o = *g.options;
    key_plans& plans = g.plans;
    plans.first.assign(g.format.kinds.size(), -1);
    std::size_t numbers = 0;
    for (std::size_t f = 0; f < plans.first.size(); ++f)
        if (const int words = g.format.kinds[f].plan_words; words > 0) {
            plans.first[f] = static_cast<int>(numbers);
            numbers += static_cast<std::size_t>(words) * static_cast<std::size_t>(g.shape.kv_heads);
        }
    if (o.statistics == key_statistics::off || numbers == 0 || g.format.latent) return {};
    const int tokens = g.geometry.window && !g.geometry.window.cross
                           ? common::smaller(o.statistics_tokens, g.geometry.window.tokens)
                           : o.statistics_tokens;
    if (tokens < calibration::group) return {};
    plans.tokens = tokens;
    if (plans.takes(g.target)) g.geometry.commits_from = tokens;
    plans.pages.open(o.memory, "plans of keys", 0, 0, g.shape.layers, numbers * sizeof(std::uint16_t), 0);
    return {};
}

/// Allocates them, and writes the even one.
inline status make_plans(layer_group& g, cudaStream_t stream) {
    const cache_options& o = *g.options;
    key_plans& plans = g.plans;
    if (plans.tokens == 0) return {};
    const int count = 1 + common::larger(o.pool_sequences, o.max_batch);
    if (status s = plans.pages.grow(count, stream); !s) return s;
    plans.even = plans.pages.pages().take();
    std::vector<std::uint16_t> all(plans.pages.memory().key_page_bytes / sizeof(std::uint16_t));
    for (int f = 0; f < g.kinds(); ++f)
        for (int head = 0; plans.takes(f) && head < g.shape.kv_heads; ++head) {
            const int words = g.format.kinds[static_cast<std::size_t>(f)].plan_words;
            g.format.functions->even_plan(
                f, &all[static_cast<std::size_t>(plans.first[static_cast<std::size_t>(f)] + head * words)]);
        }
    cudaError_t code = cudaSuccess;
    for (int member = 0; member < g.shape.layers && code == cudaSuccess; ++member)
        code = cudaMemcpyAsync(plans.pages.memory().page(tensor::key, member, plans.even->number), all.data(),
                               all.size() * sizeof(std::uint16_t), cudaMemcpyHostToDevice, stream);
    if (code == cudaSuccess) code = cudaStreamSynchronize(stream);
    return code == cudaSuccess ? status{} : runtime_error(code, "copying plans");
}

/// Keys of a format have statistics: sequences make no plans for it.
inline void give_plans(layer_group& g, int format) noexcept {
    g.plans.first[static_cast<std::size_t>(format)] = -1;
    if (!g.plans.takes(g.target)) g.geometry.commits_from = 0;
}

/// Gives a sequence its plan, of which a page is free. Returns whether the plan is still to be made.
inline bool take_plan(layer_group& g, sequence_pages& s) noexcept {
    if (s.plan) return false;
    bool late = g.geometry.commits_from == 0 || s.gone() > 0;
    for (int i = 0; i < s.table.committed; ++i)
        late = late || (s.table[i].pages[0] && s.table[i].pages[0]->format != 0);
    if (late)
        s.plan = g.plans.even;
    else if (g.plans.shared)
        s.plan = g.plans.shared;
    else
        s.plan = g.plans.pages.pages().take();
    return !late && !g.plans.shared;
}

/// A plan that is made becomes that of all sequences, if they are to have one.
inline void adopt_plan(layer_group& g, const page_ref& made) noexcept {
    if (g.options->statistics == key_statistics::shared && !g.plans.shared) g.plans.shared = made;
}

}}}  // namespace kvq::cuda::detail
