// The memory in which prefill() holds pages as half floats (prefill_scratch), of a cache.
//
//   open            the limit, and what one kv head of max_tokens needs at least
//   begin_prompt    takes it for all layers, behind the slots of the prompt's tokens; where the device lacks
//                   memory, for one kv head at a time, and then none: kernels without it are slower
//   spans           each format makes tiles from its first page to its last one, so that formats whose pages
//                   stand in turns make some twice
//
// Contract: never more than the limit. Graphs of steps have no place in it, since prompts move it.
#pragma once

#include <bit>

#include "cache_class.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

/// How much memory prefill() may take besides pages.
inline status cache::open_scratch() {
    std::size_t bytes[2] = {}, free = 0;  // of all heads, of one
    for (const detail::layer_group& g : groups_) {
        detail::layer_view view = g.view(0, 1);
        for (int heads : {0, 1}) {
            bytes[heads] = common::larger(
                bytes[heads],
                g.format.functions->prompt_scratch_bytes(view, g.geometry.first_token(g.columns), 1, heads));
            // One has all pages, and each other one begins a tile of its own.
            for (int f = 1; f < g.kinds(); ++f) view.quantized[f].span = options_.page_tokens;
        }
    }
    most_scratch_ = options_.prompt_scratch;
    if (bytes[0] > 0 && most_scratch_ == automatic_scratch) {
        if (const cudaError_t code = cudaMemGetInfo(&free, &most_scratch_); code != cudaSuccess)
            return detail::runtime_error(code, "asking for the device's memory");
        most_scratch_ = common::larger(bytes[1], most_scratch_ / 128);
    }
    if (most_scratch_ != 0 && most_scratch_ < bytes[1])
        return detail::bad_value("prompt_scratch is %zu bytes, but one kv head of max_tokens (%d) needs %zu",
                                 most_scratch_, options_.max_tokens, bytes[1]);
    most_scratch_ = common::smaller(most_scratch_, bytes[0]);
    return {};
}

/// Of prefill() in layers of this kind, where formats have these spans: at most `most`, and at least what a
/// kv head needs. 0: it takes none, also where spans overlap so much that the limit is no room for a head.
inline std::size_t cache::scratch_bytes(const detail::layer_group& g, int tokens,
                                        const detail::format_spans& spans, int new_tokens,
                                        std::size_t most) const {
    if (most == 0 || most_scratch_ == 0) return 0;
    detail::layer_view view = g.view(0, 1);
    for (int f = 0; f < g.kinds(); ++f) view.quantized[f].span = spans.of[f];
    const auto of_heads = [&](int heads) {  // of 0 tokens: those that tables name
        return g.format.functions->prompt_scratch_bytes(view, common::larger(1, tokens), new_tokens, heads);
    };
    const std::size_t all = of_heads(0), one = of_heads(1);
    // Powers of two, so that few of a long text's chunks take larger memory.
    return all == 0 || one > most_scratch_ ? 0
                                           : common::larger(one, common::smaller(std::bit_ceil(all), most));
}
/// Memory that begin_text() has found for a layer of the prompt, before append_prompt() has pages there.
inline prefill_scratch cache::scratch_of(int layer) const {
    const detail::layer_group& g = group_of(layer);
    const std::size_t room = staging_.bytes() - step_.slot_bytes,
                      least = scratch_bytes(g, g.now.paged_before, g.now.spans, step_.new_tokens, 1);
    if (least == 0 || least > room) return {};
    return {staging_.as<>() + step_.slot_bytes, room, common::larger(1, g.now.paged_before)};
}

inline status cache::prefill_part(int layer, const input_view& k, const input_view& v, const query_view& q,
                                  prefill_options options, cudaStream_t stream) {
    if (status s = check_layer(layer, {k.type, v.type, q.type}); !s) return s;
    if (status s = check_score(layer, detail::score_mark::of<unmodified>(), true); !s) return s;
    if (is_shared(layer) || is_cross(layer) || keys_alone(layer) || shared_chunk(layer) != nullptr)
        return detail::bad_value(
            "%s: parts of prompts are not for layers that share keys and values, or have cross or latent "
            "attention",
            describe(layer).c_str());
    if (step_.rows != 1 || k.tokens > (step_.prompt ? step_.new_tokens : 0))
        return detail::bad_value("a part of a prompt of %d sequences with %d of %d new tokens", step_.rows,
                                 k.tokens, step_.prompt ? step_.new_tokens : 0);
    if (step_.prompt)
        if (status s = check_lacks(layer); !s) return s;
    const auto nowhere = common::visit_float_type(
        q.type, [&]<class T>(T) -> output_view { return token_view<T>(nullptr, q.tokens, q.heads, q.dim); });
    const detail::layer_group& g = group_of(layer);
    if (g.now.runs > 1)
        return detail::bad_value("a part of a prompt behind keys that erase, shift or splice have moved");
    if (status s = g.add_window(options, member_of(layer)); !s) return s;
    if (step_.prompt) {
        options.scratch = scratch_of(layer);
        return g.format.functions->prefill(g.view_before_prompt(member_of(layer)), k, v, q, nowhere, nullptr,
                                           q.tokens, options, stream, nullptr);
    }
    // Lengths of the step as it is now. A graph takes no memory: a later prompt may give it back.
    detail::layer_view pages = view(layer);
    const int tokens = g.word(g.tokens_at(0));
    detail::format_spans spans;
    for (int f = 0; f < g.kinds(); ++f)
        pages.quantized[f].span = spans.of[f] =
            (g.word(g.end_at(f, 0)) - g.word(g.first_at(f, 0))) * g.geometry.page_tokens;
    cudaStreamCaptureStatus captured = cudaStreamCaptureStatusNone;
    if (const cudaError_t code = cudaStreamIsCapturing(stream, &captured); code != cudaSuccess)
        return detail::runtime_error(code, "asking for a graph's capture");
    for (const std::size_t most : {most_scratch_, std::size_t{1}}) {
        if (captured != cudaStreamCaptureStatusNone) break;
        detail::larger_memories larger;
        const std::size_t bytes = scratch_bytes(g, tokens, spans, k.tokens, most);
        if (bytes == 0 || !larger.find(staging_, options_.memory, bytes, "a part of a prompt", stream))
            continue;
        if (status s = larger.take(stream); !s) return s;
        options.scratch = {staging_.as<>(), staging_.bytes(), common::larger(1, tokens)};
        break;
    }
    return g.format.functions->prefill(pages, k, v, q, nowhere, nullptr, q.tokens, options, stream, nullptr);
}

}}}  // namespace kvq::cuda
