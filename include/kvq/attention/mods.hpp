// Masks and score modifiers of attention, as hooks of a type: FlexAttention's mask_mod and score_mod. Any
// type with any of
//
//   bool mask(int q_pos, int k_pos) const
//       mask: does the query attend to the key?
//   void mask_row(float* scores, int n, int q_pos, int first_k) const
//       the same for keys first_k, first_k + 1, ...: sets the scores of hidden keys to -infinity
//   page_visibility mask_page(int first_q, int last_q, int first_k, int end_k) const
//       whether queries [first_q, last_q] see none, some or all of keys [first_k, end_k); without it: some
//   float score(float score, int q_head, int q_pos, int k_pos) const
//       score modifier, on the scaled score
//   void score_row(float* scores, int n, int q_head, int q_pos, int first_k) const
//       the same for n keys, in place
//   float scale(int head_dim) const             instead of 1 / sqrt(head_dim)
//   float sink_logit(int q_head) const          more in the softmax sum of the head's rows, without a value
//   const listed_tokens* lists() const          only tokens that the caller lists are read
//   const selected_pages* selection() const     only the best pages are read (selection.hpp)
//   const skipped_values* skipping() const      values of pages with hardly any weight are not read
//   bool upper_only() const
//       of pages with two planes (format/planes.hpp) the upper one alone is read
//   int text_position(int place) const          by which windows of layers count the token in a place of the
//                                               sequence, at most the place; where it is the place, so it is
//                                               in front of it (token_tree.hpp)
//   void check(int q_heads) const               raises kvq::error for parameters out of range; called first
//   static constexpr bool is_causal = false     lifts the causal mask, which holds otherwise
//   static constexpr bool has_query_positions = false
//       q_pos is the number of the query in q, not its position in the sequence
//
// Masks are joined with AND, score modifiers follow one another, then masks apply: mods{softcap{30.f},
// sliding_window{4096}}. Pages of which no query sees a key are not read. A hook that no part has costs
// nothing: without a score modifier the scale is folded into the query, without a mask no key behind the
// diagonal is tested. Source: Dong et al., arXiv 2412.05496.
#pragma once

#include <concepts>
#include <limits>
#include <tuple>
#include <utility>

#include "../core/bits.hpp"
#include "../core/error.hpp"
#include "../page/key_window.hpp"
#include "selection.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// What the queries of a block see of a page. The smaller one of two is the answer of both masks together.
enum class page_visibility {
    none,  ///< no query sees a key: the page is not read
    some,  ///< rows are asked
    all,   ///< every query sees every key: rows are not asked
};

/// The score of a key that the mask hides.
inline constexpr float hidden_score = -std::numeric_limits<float>::infinity();

}}  // namespace kvq

namespace kvq { inline namespace KVQ_TAGGED {

namespace detail {
// M is const in the concepts that decide what is called; without const they find hooks that are not.
template <class M>
concept pair_mask = requires(M& m) {
    { m.mask(0, 0) } -> std::convertible_to<bool>;
};
template <class M>
concept row_mask = requires(M& m, float* scores) {
    m.mask_row(scores, 0, 0, 0);
};
template <class M>
concept page_mask = requires(M& m) {
    { m.mask_page(0, 0, 0, 0) } -> std::same_as<page_visibility>;
};
template <class M>
concept pair_score = requires(M& m) {
    { m.score(0.0f, 0, 0, 0) } -> std::convertible_to<float>;
};
template <class M>
concept row_score = requires(M& m, float* scores) {
    m.score_row(scores, 0, 0, 0, 0);
};
template <class M>
concept own_scale = requires(M& m) {
    { m.scale(1) } -> std::convertible_to<float>;
};
template <class M>
concept own_sink = requires(M& m) {
    { m.sink_logit(0) } -> std::convertible_to<float>;
};
template <class M>
concept own_selection = requires(M& m) {
    { m.selection() } -> std::same_as<const selected_pages*>;
};
template <class M>
concept own_skipping = requires(M& m) {
    { m.skipping() } -> std::same_as<const skipped_values*>;
};
template <class M>
concept own_lists = requires(M& m) {
    { m.lists() } -> std::same_as<const listed_tokens*>;
};
template <class M>
concept own_planes = requires(M& m) {
    { m.upper_only() } -> std::same_as<bool>;
};
template <class M>
concept own_check = requires(M& m) {
    m.check(1);
};
template <class M>
concept own_position = requires(M& m) {
    { m.text_position(0) } -> std::same_as<int>;
};

template <class M>
concept masking = pair_mask<const M> || row_mask<const M>;
template <class M>
concept scoring = pair_score<const M> || row_score<const M>;

/// Does the type say whether the causal mask holds?
template <class M>
concept own_direction = requires {
    { M::is_causal } -> std::convertible_to<bool>;
};
template <class M>
constexpr bool lifts_causal() noexcept {
    if constexpr (own_direction<M>)
        return !M::is_causal;
    else
        return false;
}
template <class M>
constexpr bool keeps_causal() noexcept {
    return own_direction<M> && !lifts_causal<M>();
}
/// What the parts of mods say about the causal mask, if any does.
template <bool Said, bool Causal>
struct direction {};
template <bool Causal>
struct direction<true, Causal> {
    static constexpr bool is_causal = Causal;
};
template <class M>
constexpr bool has_query_positions() noexcept {
    if constexpr (requires { M::has_query_positions; })
        return M::has_query_positions;
    else
        return true;
}

template <class M>
concept any_hook = masking<M> || scoring<M> || own_scale<const M> || own_sink<const M> ||
    own_selection<const M> || own_skipping<const M> || own_lists<const M> || own_planes<const M> ||
    own_check<const M> || own_direction<M>;
template <class M>
constexpr bool const_hooks() noexcept {
    return pair_mask<M> == pair_mask<const M> && row_mask<M> == row_mask<const M> &&
           page_mask<M> == page_mask<const M> && pair_score<M> == pair_score<const M> &&
           row_score<M> == row_score<const M> && own_scale<M> == own_scale<const M> &&
           own_sink<M> == own_sink<const M> && own_selection<M> == own_selection<const M> &&
           own_skipping<M> == own_skipping<const M> && own_lists<M> == own_lists<const M> &&
           own_planes<M> == own_planes<const M> && own_check<M> == own_check<const M> &&
           own_position<M> == own_position<const M>;
}

/// Says at compile time what is wrong with a type.
template <class M>
constexpr void require_mods() noexcept {
    static_assert(const_hooks<M>(), "kvq: the hooks of a mask or score modifier must be const");
    static_assert(any_hook<M> || !const_hooks<M>(),
                  "kvq: a mask has mask(int, int) or mask_row(float*, int, int, int), a score modifier has "
                  "score(float, "
                  "int, int, int) or score_row(float*, int, int, int, int), all const; use kvq::causal for "
                  "none of them");
    static_assert(!page_mask<const M> || masking<M>,
                  "kvq: mask_page answers for whole pages only, it needs a mask or mask_row for the others");
}

template <class M>
bool visible(const M& m, int q_pos, int k_pos) {
    if constexpr (pair_mask<const M>) {
        return m.mask(q_pos, k_pos);
    } else {
        float score = 0.0f;
        m.mask_row(&score, 1, q_pos, k_pos);
        return score == 0.0f;
    }
}
template <class M>
void hide_row(const M& m, float* scores, int n, int q_pos, int first_k) {
    if constexpr (row_mask<const M>)
        m.mask_row(scores, n, q_pos, first_k);
    else
        for (int t = 0; t < n; ++t) scores[t] = m.mask(q_pos, first_k + t) ? scores[t] : hidden_score;
}
template <class M>
page_visibility visible_page(const M& m, int first_q, int last_q, int first_k, int end_k) {
    if constexpr (page_mask<const M>)
        return m.mask_page(first_q, last_q, first_k, end_k);
    else
        return page_visibility::some;
}
template <class M>
float changed_score(const M& m, float score, int q_head, int q_pos, int k_pos) {
    if constexpr (pair_score<const M>)
        return m.score(score, q_head, q_pos, k_pos);
    else
        m.score_row(&score, 1, q_head, q_pos, k_pos);
    return score;
}
template <class M>
void change_row(const M& m, float* scores, int n, int q_head, int q_pos, int first_k) {
    if constexpr (row_score<const M>)
        m.score_row(scores, n, q_head, q_pos, first_k);
    else
        for (int t = 0; t < n; ++t) scores[t] = m.score(scores[t], q_head, q_pos, first_k + t);
}

/// The hooks of M, called through a pointer to it. Here, so that they have the name of the instruction set,
/// whoever M is from.
template <class M>
struct hooks_of {
    static const M& of(const void* object) noexcept { return *static_cast<const M*>(object); }

    static void check(const void* object, int q_heads) { of(object).check(q_heads); }
    static float scale(const void* object, int head_dim) {
        return static_cast<float>(of(object).scale(head_dim));
    }
    static float sink_logit(const void* object, int q_head) {
        return static_cast<float>(of(object).sink_logit(q_head));
    }
    static int text_position(const void* object, int place) { return of(object).text_position(place); }
    static page_visibility page(const void* object, int first_q, int last_q, int first_k, int end_k) {
        return of(object).mask_page(first_q, last_q, first_k, end_k);
    }
    static void hide(const void* object, float* scores, int n, int q_pos, int first_k) {
        hide_row(of(object), scores, n, q_pos, first_k);
    }
    static void change(const void* object, float* scores, int n, int q_head, int q_pos, int first_k,
                       float factor) {
        change_row(of(object), scores, n, q_head, q_pos, first_k);
        for (int t = 0; t < n; ++t) scores[t] *= factor;
    }
};

}  // namespace detail

/// Several masks and score modifiers as one. At most one part each has a scale, a sink_logit, lists, a
/// selection, a skipping, a text_position. The causal mask holds unless a part lifts it; `causal{}` among the
/// parts keeps it in any case.
template <class... Parts>
class mods : public detail::direction<(detail::own_direction<Parts> || ...),
                                      (detail::keeps_causal<Parts>() || ...)> {
    static_assert((0 + ... + int{detail::own_scale<const Parts>}) <= 1, "kvq::mods: two parts have a scale");
    static_assert((0 + ... + int{detail::own_sink<const Parts>}) <= 1,
                  "kvq::mods: two parts have a sink_logit");
    static_assert((0 + ... + int{detail::own_selection<const Parts>}) <= 1,
                  "kvq::mods: two parts have a selection");
    static_assert((0 + ... + int{detail::own_skipping<const Parts>}) <= 1,
                  "kvq::mods: two parts have a skipping");
    static_assert((0 + ... + int{detail::own_lists<const Parts>}) <= 1, "kvq::mods: two parts have lists");
    static_assert((0 + ... + int{detail::own_position<const Parts>}) <= 1,
                  "kvq::mods: two parts have a text_position");

public:
    constexpr explicit mods(Parts... parts) : parts_(std::move(parts)...) {
        (detail::require_mods<Parts>(), ...);
    }

    static constexpr bool has_query_positions = (detail::has_query_positions<Parts>() && ...);

    bool mask(int q_pos, int k_pos) const requires(detail::masking<Parts> || ...) {
        bool seen = true;
        each([&](const auto& part) {
            if constexpr (detail::masking<std::remove_cvref_t<decltype(part)>>)
                seen = seen && detail::visible(part, q_pos, k_pos);
        });
        return seen;
    }
    void mask_row(float* scores, int n, int q_pos, int first_k) const
        requires(detail::masking<Parts> || ...) {
        each([&](const auto& part) {
            if constexpr (detail::masking<std::remove_cvref_t<decltype(part)>>)
                detail::hide_row(part, scores, n, q_pos, first_k);
        });
    }
    page_visibility mask_page(int first_q, int last_q, int first_k, int end_k) const
        requires(detail::masking<Parts> || ...) {
        page_visibility seen = page_visibility::all;
        each([&](const auto& part) {
            if constexpr (detail::masking<std::remove_cvref_t<decltype(part)>>)
                if (seen != page_visibility::none)
                    seen = detail::smaller(seen, detail::visible_page(part, first_q, last_q, first_k, end_k));
        });
        return seen;
    }
    float score(float score, int q_head, int q_pos, int k_pos) const requires(detail::scoring<Parts> || ...) {
        each([&](const auto& part) {
            if constexpr (detail::scoring<std::remove_cvref_t<decltype(part)>>)
                score = detail::changed_score(part, score, q_head, q_pos, k_pos);
        });
        return score;
    }
    void score_row(float* scores, int n, int q_head, int q_pos, int first_k) const
        requires(detail::scoring<Parts> || ...) {
        each([&](const auto& part) {
            if constexpr (detail::scoring<std::remove_cvref_t<decltype(part)>>)
                detail::change_row(part, scores, n, q_head, q_pos, first_k);
        });
    }
    float scale(int head_dim) const requires(detail::own_scale<const Parts> || ...) {
        float of_part = 0.0f;
        each([&](const auto& part) {
            if constexpr (detail::own_scale<decltype(part)>) of_part = part.scale(head_dim);
        });
        return of_part;
    }
    float sink_logit(int q_head) const requires(detail::own_sink<const Parts> || ...) {
        float of_part = 0.0f;
        each([&](const auto& part) {
            if constexpr (detail::own_sink<decltype(part)>) of_part = part.sink_logit(q_head);
        });
        return of_part;
    }
    const selected_pages* selection() const requires(detail::own_selection<const Parts> || ...) {
        const selected_pages* of_part = nullptr;
        each([&](const auto& part) {
            if constexpr (detail::own_selection<decltype(part)>) of_part = part.selection();
        });
        return of_part;
    }
    const skipped_values* skipping() const requires(detail::own_skipping<const Parts> || ...) {
        const skipped_values* of_part = nullptr;
        each([&](const auto& part) {
            if constexpr (detail::own_skipping<decltype(part)>) of_part = part.skipping();
        });
        return of_part;
    }
    const listed_tokens* lists() const requires(detail::own_lists<const Parts> || ...) {
        const listed_tokens* of_part = nullptr;
        each([&](const auto& part) {
            if constexpr (detail::own_lists<decltype(part)>) of_part = part.lists();
        });
        return of_part;
    }
    bool upper_only() const requires(detail::own_planes<const Parts> || ...) {
        bool any = false;
        each([&](const auto& part) {
            if constexpr (detail::own_planes<decltype(part)>) any = any || part.upper_only();
        });
        return any;
    }
    int text_position(int place) const requires(detail::own_position<const Parts> || ...) {
        int of_part = place;
        each([&](const auto& part) {
            if constexpr (detail::own_position<decltype(part)>) of_part = part.text_position(place);
        });
        return of_part;
    }
    void check(int q_heads) const {
        each([&](const auto& part) {
            if constexpr (detail::own_check<decltype(part)>) part.check(q_heads);
        });
    }

private:
    template <class Use>
    void each(Use use) const {
        std::apply([&](const auto&... part) { (use(part), ...); }, parts_);
    }
    std::tuple<Parts...> parts_;
};

}}  // namespace kvq

namespace kvq { inline namespace KVQ_COMMON {

/// Masks and score modifiers of a type that is known only at run time, as the walk over pages takes them. The
/// view must not outlive the object.
class mods_view {
public:
    template <class M>
    requires(!std::same_as<M, mods_view>) KVQ_NO_COPY mods_view(const M& m)
    noexcept
        : object_(&m),
          is_causal_(!detail::lifts_causal<M>()),
          has_query_positions_(detail::has_query_positions<M>()) {
        detail::require_mods<M>();
        using hooks = detail::hooks_of<M>;
        if constexpr (detail::own_selection<const M>) selection_ = m.selection();
        if constexpr (detail::own_skipping<const M>) skipping_ = m.skipping();
        if constexpr (detail::own_lists<const M>) lists_ = m.lists();
        if constexpr (detail::own_planes<const M>) upper_only_ = m.upper_only();
        if constexpr (detail::own_check<const M>) check_ = &hooks::check;
        if constexpr (detail::own_scale<const M>) scale_ = &hooks::scale;
        if constexpr (detail::own_sink<const M>) sink_logit_ = &hooks::sink_logit;
        if constexpr (detail::own_position<const M>) text_position_ = &hooks::text_position;
        if constexpr (detail::page_mask<const M>) mask_page_ = &hooks::page;
        if constexpr (detail::masking<M>) mask_row_ = &hooks::hide;
        if constexpr (detail::scoring<M>) score_row_ = &hooks::change;
    }

    /// The same, within the window of a layer.
    mods_view within(const key_window& window) const noexcept {
        mods_view both = *this;
        both.window_ = window;
        if (window.cross) both.is_causal_ = both.has_query_positions_ = false;
        return both;
    }

    bool is_causal() const noexcept { return is_causal_; }
    bool has_query_positions() const noexcept { return has_query_positions_; }
    bool has_sink() const noexcept { return sink_logit_ != nullptr; }
    bool changes_scores() const noexcept { return score_row_ != nullptr; }
    /// Null: all pages are read.
    const selected_pages* selection() const noexcept { return selection_; }
    /// Null: all values are read.
    const skipped_values* skipping() const noexcept { return skipping_; }

    /// Null: all tokens are read.
    const listed_tokens* lists() const noexcept { return lists_; }
    /// Is the lower plane of pages left out?
    bool upper_only() const noexcept { return upper_only_; }
    /// Does the query in this place see the key?
    bool shows(int q_pos, int k_pos) const;

    /// Raises kvq::error for parameters out of range, or for another number of query heads.
    void check(int q_heads) const;
    float scale(int head_dim) const;
    float sink_logit(int q_head) const { return sink_logit_(object_, q_head); }
    /// What queries [first_q, last_q] see of keys [first_k, end_k), the causal mask and the window included.
    page_visibility page(int first_q, int last_q, int first_k, int end_k) const;
    /// Hides keys of one row, the causal mask and the window included.
    void hide(float* scores, int n, int q_pos, int first_k) const;
    /// scores[t] = factor * modified score of key first_k + t, for n keys.
    void change_scores(float* scores, int n, int q_head, int q_pos, int first_k, float factor) const;

private:
    /// Of the token in this place of the sequence: where windows count it.
    int text_position(int place) const { return text_position_ ? text_position_(object_, place) : place; }
    page_visibility in_window(int first_q, int last_q, int first_k, int end_k) const;
    void hide_outside_window(float* scores, int n, int q_pos, int first_k) const;

    const void* object_;
    bool is_causal_, has_query_positions_;
    bool upper_only_ = false;
    key_window window_ = {};
    const selected_pages* selection_ = nullptr;
    const skipped_values* skipping_ = nullptr;
    const listed_tokens* lists_ = nullptr;
    void (*check_)(const void*, int) = nullptr;
    float (*scale_)(const void*, int) = nullptr;
    float (*sink_logit_)(const void*, int) = nullptr;
    int (*text_position_)(const void*, int) = nullptr;
    page_visibility (*mask_page_)(const void*, int, int, int, int) = nullptr;
    void (*mask_row_)(const void*, float*, int, int, int) = nullptr;
    void (*score_row_)(const void*, float*, int, int, int, int, float) = nullptr;
};

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "mods-inl.hpp"
#endif
