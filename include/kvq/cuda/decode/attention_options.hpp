// Options of attention over a cache on the device, and the score modifiers that every program has.
//
// Softmax states (state_in, state_out) and score modifiers: attention_args.cuh and score_modifiers.cuh say
// what kernels make of them.
// Contract: plain values; pointers are to device memory.
#pragma once

#include <cmath>
#include <cstdint>

#include "../../config.hpp"
#include "../layout/status.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

struct attention_options {
    float scale = 0.0f;    ///< of scores; 0: 1/sqrt(head_dim)
    float softcap = 0.0f;  ///< cap * tanh(score / cap); 0: none
    int window = 0;        ///< a query sees itself and the window - 1 tokens before it; 0: all
    bool chunked = false;  ///< instead the tokens of its own chunk, from the last multiple of `window` on
    bool window_sinks = false;  ///< and the tokens of a mixed cache's sink_tokens()
    int query_tokens = 1;       ///< per sequence: the last ones of it, with a causal mask among them
    /// No causal mask: queries see all tokens. Score modifiers get their numbers, from 0 on, as positions.
    bool all_keys = false;
    /// Trees of drafted tokens: [sequences][query_tokens] words, a query sees those of the last `drafted`
    /// tokens of its sequence whose bit is set (bit 0: the first of them; token_tree::ancestors()) and all
    /// before; later tokens never. Windows count depths: with one, a sequence has no tokens or at least
    /// `drafted`. Null: a causal mask.
    const std::uint64_t* ancestors = nullptr;
    int drafted = 0;  ///< query_tokens to 64; 0: query_tokens
    /// Of caches: every kv head reads its best ceil(selected_tokens / page_tokens) quantized pages, and those
    /// that are always read (selected_pages of the CPU, select/best_pages.cuh). One query of a sequence, no
    /// window; no pages that are cut, and no moved keys. 0: all pages are read.
    int selected_tokens = 0;
    /// Of caches: of pages with two planes (plane_pair) the upper one alone is read.
    bool upper_only = false;
    /// Of latents: as learned_sinks, which is for all others. [q_heads], device memory. Null: none
    const float* sink_logits = nullptr;
    float* lse = nullptr;             ///< [sequences * query_tokens][q_heads], natural log of the softmax sum
    const float* state_in = nullptr;  ///< softmax states to start from (see above)
    float* state_out = nullptr;       ///< softmax states to write; may be state_in
    /// Promises that lengths, block tables and all tokens but the newest query_tokens of every sequence were
    /// written before the launches of kvq that directly precede this one in the stream (q, states and the
    /// newest tokens may come from those), not by a kernel that lets its successor start before it has
    /// written them. Then this launch fetches its first pages while they run out. Compute capability 9.0 and
    /// later. With a mixed_cache_ref only lengths (and first_page, end_page) must be old: it holds behind
    /// store_new_tokens.
    bool early = false;
};

/// Device memory in which prefill() holds tiles as half floats while it runs (prefill_scratch_bytes); null:
/// none.
struct prefill_scratch {
    void* memory = nullptr;  ///< starts on 16 bytes
    std::size_t bytes = 0;
    /// No sequence has more before its new ones, hidden ones too; 0: as its tables name. Rows of one that has
    /// more are NaN.
    int tokens = 0;
};

struct prefill_options {
    float scale = 0.0f;    ///< of scores; 0: 1/sqrt(head_dim)
    float softcap = 0.0f;  ///< cap * tanh(score / cap); 0: none
    int window = 0;        ///< a query sees itself and the window - 1 tokens before it; 0: all
    bool chunked = false;  ///< instead the tokens of its own chunk, from the last multiple of `window` on
    /// The sequence's first tokens, as many as a sink_part may hold, are seen in spite of a window.
    bool window_sinks = false;
    const float* sink_logits =
        nullptr;  ///< [q_heads], device memory: a logit in every softmax sum, without a value. Null: none
    float* lse = nullptr;        ///< [new tokens][q_heads], natural log of the softmax sum
    float* state_out = nullptr;  ///< softmax states of all rows, as attention_options::state_out
    /// Where starts is null, of one sequence: query i sees the new tokens up to i + lead of it, none where
    /// that is below 0.
    int lead = 0;
    /// On sm_90a every page is then dequantized once, not once for 256 / group new tokens, and products are
    /// those of warpgroups. At least what one kv head needs.
    prefill_scratch scratch = {};
};

/// `count` tokens for every list, in any order: [queries][kv_heads][count], device memory; negative: none.
struct token_lists {
    const int* tokens = nullptr;
    int count = 0;
};

/// Attention over listed tokens (decode/listed_pages.cuh).
struct list_options {
    float scale = 0.0f;            ///< of scores; 0: 1/sqrt(head_dim)
    token_lists selected, window;  ///< positions of the sequence
    int query_tokens = 1;          ///< per sequence: the last ones of it, with a causal mask among them
    int kv_heads = 1;              ///< lists of a query: one for each kv head, or 1 for all of them
    int behind = 0;                ///< so many tokens of every sequence stand behind its last query
    const std::uint64_t* ancestors = nullptr;  ///< as attention_options has them
    int drafted = 0;                           ///< query_tokens + behind to 64; 0: query_tokens + behind
    /// Lists name places in pages: page * page_tokens + offset, of the first part. They are not checked.
    bool places = false;
    const float* sink_logits = nullptr;  ///< [q_heads], device memory: as learned_sinks. Null: none
    float* lse = nullptr;                ///< as attention_options has them
    const float* state_in = nullptr;
    float* state_out = nullptr;
};

namespace detail {

/// What lists do not say.
inline attention_options without_lists(const list_options& o) noexcept {
    attention_options plain{.scale = o.scale, .query_tokens = o.query_tokens};
    plain.lse = o.lse;
    plain.state_in = o.state_in;
    plain.state_out = o.state_out;
    return plain;
}
/// Can lists for layers of so many kv heads be read?
inline status check_lists(const list_options& o, int kv_heads) noexcept {
    if (o.kv_heads != 1 && o.kv_heads != kv_heads)
        return bad_value(kv_heads == 1
                             ? "tokens are listed for %d kv heads, the cache has %d"
                             : "tokens are listed for %d kv heads, not for 1 or the %d of the cache",
                         o.kv_heads, kv_heads);
    if (o.behind < 0) return bad_value("%d tokens behind the last query", o.behind);
    const long long least = 0LL + o.query_tokens + o.behind;
    if (o.ancestors != nullptr &&
        (o.places || least > 64 || o.drafted > 64 || (o.drafted != 0 && o.drafted < least)))
        return bad_value(
            "%d drafted tokens, of which %lld are queries or behind them: a tree has up to 64, and lists of "
            "positions",
            o.drafted, least);
    for (const token_lists& list : {o.selected, o.window}) {
        if (list.count < 0) return bad_value("a list has %d tokens", list.count);
        if (list.count > 0 && list.tokens == nullptr)
            return bad_value("a list of %d tokens is a null pointer", list.count);
    }
    if (const long long all = 0LL + o.selected.count + o.window.count; all > 1LL << 28)
        return bad_value("%lld listed tokens are more than 2^28", all);
    return {};
}

/// What options say of scores, of themselves.
inline status check_numbers(const attention_options& o) noexcept {
    if (!std::isfinite(o.scale)) return bad_value("scale is %g", static_cast<double>(o.scale));
    if (o.window < 0) return bad_value("the window is %d tokens", o.window);
    if (o.all_keys && (o.window > 0 || o.ancestors != nullptr))
        return bad_value("queries that see all keys have no window (%d tokens) and no tree", o.window);
    if (!(o.softcap >= 0.0f && o.softcap < INFINITY))
        return bad_value("softcap is %g", static_cast<double>(o.softcap));
    return {};
}
/// Does latent attention take these options?
inline status check_latent_options(const attention_options& o) noexcept {
    if (o.all_keys) return bad_value("latent attention has a causal mask or a tree");
    return check_numbers(o);
}

}  // namespace detail

/// No score modifier. One is a struct with one or both of
///   __device__ float score(float score, int q_head, int q_pos, int k_pos) const    scores are scaled and
///     behind softcap, positions those of
///                                                                                  the sequence; -infinity
///                                                                                    hides a key
///   __device__ float sink_logit(int q_head) const                                  as learned_sinks
/// It travels in the parameters of the launch. A cache tells types of modifiers apart by a static `const
/// char* name`, if they have one.
struct unmodified {
    static constexpr const char* name = "no score modifier";
};

/// score - slopes[q_head] * (q_pos - k_pos). Press et al., arXiv 2108.12409.
struct alibi {
    static constexpr const char* name = "alibi";
    const float* slopes;  ///< [q_heads], device memory

    KVQ_HD KVQ_NO_COPY float score(float score, int q_head, int q_pos, int k_pos) const {
        return score - slopes[q_head] * static_cast<float>(q_pos - k_pos);
    }
};

/// exp(logits[q_head]) more in the softmax sum of a row, without a value; also in lse and state_out: of
/// launches whose states are merged, only one takes it. Rows without keys stay empty. -infinity: none; logits
/// above 2.3586e38 count as that; NaN gives NaN. gpt-oss, arXiv 2508.10925.
struct learned_sinks {
    static constexpr const char* name = "learned sinks";
    const float* logits;  ///< [q_heads], device memory

    KVQ_HD KVQ_NO_COPY float sink_logit(int q_head) const { return logits[q_head]; }
};

}}}  // namespace kvq::cuda
