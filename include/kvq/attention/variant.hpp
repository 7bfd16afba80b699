// Masks and score modifiers of attention, as hooks of a type: FlexAttention's mask_mod and score_mod. A variant is any type with any of
//
//   float scale(int head_dim) const                                   instead of 1/sqrt(head_dim)
//   float logit(float score, int q_head, int q_pos, int k_pos) const  score modifier, on the scaled score
//   int first_key(int q_pos) const                                    mask: hides the keys before it
//   int kept_keys() const                                             mask: never hides the keys before this one
//
// Hooks are const and have these parameters; a type without any of them, other than `causal`, does not compile.
// An absent hook costs nothing: without `logit` the scale is folded into the query, without `first_key` no
// key is tested. Combine with variant{softcap{30.f}, sliding_window{4096}}: score modifiers are applied in that order.
#pragma once

#include <cmath>
#include <concepts>
#include <limits>

#include "../core/bits.hpp"
#include "../core/error.hpp"

namespace kvq::inline KVQ_TAGGED {

/// Causal attention without modifiers.
struct causal {};

/// scores * value
struct score_scale {
    float value;
    float scale(int) const noexcept { return value; }
};

/// cap * tanh(score / cap); Gemma 2, arXiv 2408.00118, section 2.
struct softcap {
    float cap;
    float logit(float score, int, int, int) const noexcept { return cap * std::tanh(score / cap); }
};

/// A query attends to itself and the `tokens - 1` keys before it.
struct sliding_window {
    int tokens;  ///< at least 1
    int first_key(int q_pos) const noexcept { return detail::larger(0, q_pos - tokens + 1); }
};

/// The same, and always the first `sinks` keys; Xiao et al., arXiv 2309.17453.
struct sink_window {
    int tokens;  ///< at least 1
    int sinks;   ///< at least 0
    int first_key(int q_pos) const noexcept { return detail::larger(0, q_pos - tokens + 1); }
    int kept_keys() const noexcept { return sinks; }
};

/// score - slope[q_head] * distance; Press et al., arXiv 2108.12409. `slopes` has one entry per query head.
struct alibi {
    const float* slopes;
    float logit(float score, int q_head, int q_pos, int k_pos) const noexcept {
        return score - slopes[q_head] * static_cast<float>(q_pos - k_pos);
    }
};

namespace detail {
template <class V>
concept scaling = requires(const V v) {
    v.scale(1);
};
template <class V>
concept changing_logits = requires(const V v) {
    v.logit(0.0f, 0, 0, 0);
};
template <class V>
concept limiting_keys = requires(const V v) {
    v.first_key(0);
};
/// Only a mask that hides keys can keep some.
template <class V>
concept keeping_keys = limiting_keys<V> && requires(const V v) {
    v.kept_keys();
};
template <class V>
concept attention_variant =
    std::derived_from<V, causal> || scaling<V> || changing_logits<V> || limiting_keys<V>;

/// A hook that is not const, which would not be called.
template <class V>
concept hooks_are_const = (scaling<V> || !requires(V & v) { v.scale(1); }) &&
                          (changing_logits<V> || !requires(V & v) { v.logit(0.0f, 0, 0, 0); }) &&
                          (limiting_keys<V> || !requires(V & v) { v.first_key(0); }) &&
                          (keeping_keys<V> || !requires(V & v) { v.kept_keys(); });

/// The mask never hides the keys before this one, for any result of first_key().
template <class V>
constexpr int kept_keys(const V& v) noexcept {
    if constexpr (keeping_keys<V>)
        return v.kept_keys();
    else
        return 0;
}

/// Raises kvq::error for a variant of this library whose parameters are out of range.
template <class V>
void expect_variant(const V& v) {
    static_assert(attention_variant<V>,
                  "kvq::attend: a variant has scale(int), logit(float, int, int, int) or first_key(int), all "
                  "const; use "
                  "kvq::causal for none of them");
    static_assert(
        hooks_are_const<V>,
        "kvq::attend: scale, logit, first_key and kept_keys of a variant must be const, and kept_keys "
        "needs a first_key");
    if constexpr (std::derived_from<V, sliding_window>)
        expect(v.sliding_window::tokens >= 1, "a sliding window has at least 1 token, got ",
               v.sliding_window::tokens);
    if constexpr (std::derived_from<V, sink_window>)
        expect(v.sink_window::tokens >= 1 && v.sink_window::sinks >= 0,
               "a sliding window has at least 1 token and 0 sinks, got ", v.sink_window::tokens, " and ",
               v.sink_window::sinks);
}

}  // namespace detail

/// Several variants as one.
template <class... Parts>
struct variant : Parts... {
    float scale(int head_dim) const noexcept requires(detail::scaling<Parts> || ...) {
        float s = 0.0f;
        (pick_scale<Parts>(s, head_dim), ...);
        return s;
    }
    float logit(float score, int q_head, int q_pos, int k_pos) const noexcept
        requires(detail::changing_logits<Parts> || ...) {
        (change<Parts>(score, q_head, q_pos, k_pos), ...);
        return score;
    }
    int first_key(int q_pos) const noexcept requires(detail::limiting_keys<Parts> || ...) {
        int first = 0;
        (limit<Parts>(first, q_pos), ...);
        return first;
    }
    /// Keys that every part with a mask keeps.
    int kept_keys() const noexcept requires(detail::keeping_keys<Parts> || ...) {
        int kept = (std::numeric_limits<int>::max)();
        (keep<Parts>(kept), ...);
        return kept;
    }

private:
    template <class P>
    void pick_scale(float& s, int head_dim) const noexcept {
        if constexpr (detail::scaling<P>) s = P::scale(head_dim);
    }
    template <class P>
    void change(float& score, int q_head, int q_pos, int k_pos) const noexcept {
        if constexpr (detail::changing_logits<P>) score = P::logit(score, q_head, q_pos, k_pos);
    }
    template <class P>
    void limit(int& first, int q_pos) const noexcept {
        if constexpr (detail::limiting_keys<P>) first = detail::larger(first, P::first_key(q_pos));
    }
    template <class P>
    void keep(int& kept) const noexcept {
        if constexpr (detail::limiting_keys<P>)
            kept = detail::smaller(kept, detail::kept_keys(static_cast<const P&>(*this)));
    }
};
template <class... Parts>
variant(Parts...) -> variant<Parts...>;

/// A variant of a type that is known only at run time. The view must not outlive the variant. Absent hooks are null.
class variant_view {
public:
    /// Raises kvq::error for a variant of this library whose parameters are out of range.
    template <class V>
    requires(!std::same_as<V, variant_view>) variant_view(const V& v) : variant_(&v) {
        detail::expect_variant(v);
        kept_ = detail::kept_keys(v);
        if constexpr (detail::scaling<V>)
            scale_ = [](const void* of, int head_dim) { return static_cast<const V*>(of)->scale(head_dim); };
        if constexpr (detail::limiting_keys<V>)
            first_key_ = [](const void* of, int q_pos) {
                return static_cast<const V*>(of)->first_key(q_pos);
            };
        if constexpr (detail::changing_logits<V>)
            logits_ = [](const void* of, float* scores, int n, int q_head, int q_pos, int k_pos,
                         float factor) {
                for (int t = 0; t < n; ++t)
                    scores[t] =
                        factor * static_cast<const V*>(of)->logit(scores[t], q_head, q_pos, k_pos + t);
            };
    }

    bool changes_logits() const noexcept { return logits_ != nullptr; }
    bool limits_keys() const noexcept { return first_key_ != nullptr; }
    float scale(int head_dim) const {
        return scale_ ? scale_(variant_, head_dim) : 1.0f / std::sqrt(static_cast<float>(head_dim));
    }
    /// 0 for a variant that hides no keys.
    int first_key(int q_pos) const { return first_key_ ? first_key_(variant_, q_pos) : 0; }
    int kept_keys() const noexcept { return kept_; }
    /// scores[t] = factor * logit of the score of key k_pos + t, for n keys.
    void change_logits(float* scores, int n, int q_head, int q_pos, int k_pos, float factor) const {
        logits_(variant_, scores, n, q_head, q_pos, k_pos, factor);
    }

private:
    const void* variant_;
    int kept_;
    float (*scale_)(const void*, int) = nullptr;
    int (*first_key_)(const void*, int) = nullptr;
    void (*logits_)(const void*, float*, int, int, int, int, float) = nullptr;
};

}  // namespace kvq::inline KVQ_TAGGED
