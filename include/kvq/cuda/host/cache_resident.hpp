// A cache whose quantized pages lie in pinned host memory (cache_options::resident_tokens,
// select/resident_pages.cuh): what it refuses, and pages that are fetched ahead.
//
// Contract: pages in host memory are read and written by the same kernels, over the bus. Attention that
// selects pages fetches them first, so its results are those of pages in device memory, bit for bit.
#pragma once

#include "cache_class.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

/// Before the pages of a group are opened: where they lie.
inline status cache::place_pages(detail::layer_group& g) const {
    const cache_options& o = options_;
    if (o.resident_tokens == 0) return {};
    if (o.resident_tokens < 0 || o.listed_tokens < 1 || o.pool_tokens < 1 || o.growing)
        return detail::bad_value(
            "resident_tokens is %d: pages in host memory need listed_tokens (%d) and pool_tokens (%d) above "
            "0, and "
            "pools that do not grow",
            o.resident_tokens, o.listed_tokens, o.pool_tokens);
    if (g.format.latent || g.format.index || g.geometry.window || !g.takes_steps()) return {};
    const device_format::kind& kind = g.format.kinds[static_cast<std::size_t>(g.target)];
    if (const char* const why = kind.no_estimate != nullptr ? kind.no_estimate : g.format.functions->no_pages)
        return detail::bad_value("%s: pages in %s do not lie in host memory, since %s", g.describe(0).c_str(),
                                 kind.name.c_str(), why);
    g.host_pages = pool_pages(g);
    return {};
}

inline status cache::open_resident(cudaStream_t stream) {
    std::size_t scratch = 0;
    ahead_ = {};
    for (detail::layer_group& g : groups_) {
        if (g.host_pages == 0) continue;
        const device_format::kind& kind = g.format.kinds[static_cast<std::size_t>(g.target)];
        const long long most = 1LL * detail::most_places * options_.page_tokens;
        if (options_.resident_tokens > most)
            return detail::bad_value("resident_tokens is %d, but must be at most %lld",
                                     options_.resident_tokens, most);
        const int heads = g.shape.kv_heads,
                  places = 1 + (options_.resident_tokens - 1) / options_.page_tokens;
        if (status s = g.resident.open(options_.memory, g.shape.layers, heads, g.target, g.host_pages, places,
                                       {kind.key_block, kind.value_block},
                                       common::round_up(kind.key_block - kind.parameters_at, std::size_t{16}),
                                       stream);
            !s)
            return s;
        scratch = common::larger(
            scratch, g.format.functions->page_selection_bytes(
                         options_.max_batch, common::larger(1, options_.query_heads / heads) * heads, heads,
                         g.columns, g.geometry.ring, options_.listed_tokens));
    }
    if (scratch == 0) return {};
    return ahead_.allocate(options_.memory, common::round_up(tickets_.bytes(), std::size_t{16}) + scratch,
                           "pages that are fetched ahead", stream);
}

inline status cache::fetch_ahead(int layer, const query_view& q, int tokens, cudaStream_t stream) const {
    if (status s = check_layer(layer, {q.type}); !s) return s;
    const detail::layer_group& g = group_of(layer);
    if (g.host_pages == 0)
        return detail::bad_value("%s: its pages are not in host memory", describe(layer).c_str());
    attention_options options{.selected_tokens = tokens};
    if (tokens < 1)
        return detail::bad_value("%s: %d selected tokens, but 1 to listed_tokens, %d, can be",
                                 describe(layer).c_str(), tokens, options_.listed_tokens);
    if (step_.prompt || (step_.new_tokens > 0 && g.missing_layers() == g.shape.layers))
        return detail::bad_value(
            "%s: pages are fetched ahead behind the append() of the first layer of a step",
            describe(layer).c_str());
    if (status s = check_pages(layer, q.heads, options); !s) return s;
    const std::size_t before = common::round_up(tickets_.bytes(), std::size_t{16});
    static const unmodified plain{};
    const output_view nothing = token_view<float16>(nullptr, q.tokens, q.heads, g.shape.dim(tensor::value));
    return g.format.functions->attend_pages(view(layer), q, nothing, options, ahead_.as<>() + before,
                                            ahead_.as<unsigned>(), nullptr, 0, stream, &plain);
}

inline status cache::fetches(int layer, fetch_report& report, cudaStream_t stream) const {
    if (status s = check_keys(layer); !s) return s;
    const detail::layer_group& g = group_of(layer);
    report = {};
    if (g.host_pages == 0) return {};
    std::vector<unsigned> counts(2 * static_cast<std::size_t>(g.shape.kv_heads));
    cudaError_t code = cudaMemcpyAsync(counts.data(), view(layer).resident.counts,
                                       counts.size() * sizeof(unsigned), cudaMemcpyDeviceToHost, stream);
    if (code == cudaSuccess) code = cudaStreamSynchronize(stream);
    if (code != cudaSuccess) return detail::runtime_error(code, "reading counts of pages");
    for (std::size_t i = 0; i < counts.size(); i += 2) {
        report.read += counts[i];
        report.fetched += counts[i + 1];
    }
    return {};
}

}}}  // namespace kvq::cuda
