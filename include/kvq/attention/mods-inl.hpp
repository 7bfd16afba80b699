// Definitions of mods.hpp.
#pragma once

#include <cmath>

#include "../core/bits.hpp"
#include "../core/error.hpp"
#include "mods.hpp"

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC void mods_view::check(int q_heads) const {
    if (check_) check_(object_, q_heads);
}

KVQ_FUNC float mods_view::scale(int head_dim) const {
    return scale_ ? scale_(object_, head_dim) : 1.0f / std::sqrt(static_cast<float>(head_dim));
}

KVQ_FUNC page_visibility mods_view::in_window(int first_q, int last_q, int first_k, int end_k) const {
    if (text_position_) {
        if (text_position(end_k - 1) < end_k - 1) return page_visibility::some;
        int first = last_q, last = 0;
        for (int q = first_q; q <= last_q; ++q) {
            first = detail::smaller(first, text_position(q));
            last = detail::larger(last, text_position(q));
        }
        first_q = first;
        last_q = last;
    }
    if (first_k >= window_.first_seen(last_q) || end_k <= window_.sinks) return page_visibility::all;
    return first_k >= window_.sinks && end_k <= window_.first_seen(first_q) ? page_visibility::none
                                                                            : page_visibility::some;
}

KVQ_FUNC page_visibility mods_view::page(int first_q, int last_q, int first_k, int end_k) const {
    page_visibility seen = window_ ? in_window(first_q, last_q, first_k, end_k) : page_visibility::all;
    if (is_causal_) {
        if (first_k > last_q) return page_visibility::none;
        if (end_k - 1 > first_q) seen = detail::smaller(seen, page_visibility::some);
    }
    if (seen == page_visibility::none || !mask_row_) return seen;
    const page_visibility own =
        mask_page_ ? mask_page_(object_, first_q, last_q, first_k, end_k) : page_visibility::some;
    return detail::smaller(own, seen);
}

KVQ_FUNC void mods_view::hide_outside_window(float* scores, int n, int q_pos, int first_k) const {
    const int first_seen = window_.first_seen(text_position(q_pos)), last_k = first_k + n - 1;
    if (text_position(last_k) == last_k) {
        for (int t = detail::larger(0, window_.sinks - first_k); t < detail::smaller(n, first_seen - first_k);
             ++t)
            scores[t] = hidden_score;
        return;
    }
    for (int t = 0; t < n; ++t)
        if (const int k = text_position(first_k + t); k >= window_.sinks && k < first_seen)
            scores[t] = hidden_score;
}

KVQ_FUNC void mods_view::hide(float* scores, int n, int q_pos, int first_k) const {
    if (is_causal_)
        for (int t = detail::larger(0, q_pos + 1 - first_k); t < n; ++t) scores[t] = hidden_score;
    if (window_) hide_outside_window(scores, n, q_pos, first_k);
    if (mask_row_) mask_row_(object_, scores, n, q_pos, first_k);
}

KVQ_FUNC bool mods_view::shows(int q_pos, int k_pos) const {
    const page_visibility seen = page(q_pos, q_pos, k_pos, k_pos + 1);
    if (seen != page_visibility::some) return seen == page_visibility::all;
    float score = 0.0f;
    hide(&score, 1, q_pos, k_pos);
    return score == 0.0f;
}

KVQ_FUNC void mods_view::change_scores(float* scores, int n, int q_head, int q_pos, int first_k,
                                       float factor) const {
    score_row_(object_, scores, n, q_head, q_pos, first_k, factor);
}

}}
