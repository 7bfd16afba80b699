// kvq_mods as a mask and score modifier of attention.
//
//   const held_mods mods(options.mods, "mods");
//     checks and copies the struct (its arrays stay the caller's)
//   sequence.attend(layer, q, out, mods.view(), ...);
//   mods.use([](const auto& m) { ring.attend(layer, q, out, m, ...); });      where a type is needed
//
// hooks<Flags> has those hooks that a struct uses: a hook that attention does not find costs nothing.
#pragma once

#include <array>
#include <cmath>
#include <kvq/attention/masks.hpp>
#include <kvq/attention/score_modifiers.hpp>
#include <kvq/attention/token_tree.hpp>
#include <optional>
#include <vector>

#include "structs.hpp"

namespace kvq::c {

/// A struct whose members were checked.
class mods_parts {
public:
    enum flag : unsigned { causal = 1, positions = 2, masks = 4, scores = 8, sinks = 16, all_flags = 32 };

    mods_parts(const kvq_mods* given, const char* name) : m_(read_optional(given, name)) {
        const auto check = [&](bool holds, const auto&... what) {
            expect(holds, KVQ_ERROR_ARGUMENT, name, ": ", what...);
        };
        check(m_.direction >= KVQ_CAUSAL && m_.direction <= KVQ_CROSS, "direction is ", m_.direction,
              ", not one of KVQ_CAUSAL, KVQ_BIDIRECTIONAL and KVQ_CROSS");
        check(m_.window >= 0 && m_.window_sinks >= 0 && (m_.window > 0 || m_.window_sinks == 0),
              "a window of ", m_.window, " tokens with ", m_.window_sinks, " sinks");
        check(m_.prefix >= 0, "a prefix of ", m_.prefix, " tokens");
        check(std::isfinite(m_.scale) && std::isfinite(m_.softcap), "scale ", m_.scale, " and softcap ",
              m_.softcap, " must be finite");
        check(m_.mask_page == nullptr || m_.mask_row != nullptr, "mask_page needs mask_row");
        expect_list(m_.document_starts, m_.documents, "document_starts");
        expect_list(m_.tree_parents, m_.tree_tokens, "tree_parents");
        expect_list(m_.alibi_slopes, m_.alibi_heads, "alibi_slopes");
        expect_list(m_.sink_logits, m_.sink_heads, "sink_logits");
        expect_list(m_.token_ranges, m_.range_count, "token_ranges");
        expect_list(m_.range_starts, m_.range_start_count, "range_starts");
        check(m_.selected_tokens >= 0, "selected_tokens is ", m_.selected_tokens);
        check(m_.upper_only == 0 || m_.upper_only == 1, "upper_only is ", m_.upper_only, ", not 0 or 1");
        if (m_.selection != nullptr) {
            expect_struct(m_.selection, "the selection report");
            const kvq_selection_report& r = *m_.selection;
            expect_list(r.chosen, r.chosen_capacity, "chosen tokens");
            check(r.chosen_count >= 0, "the selection report has ", r.chosen_count,
                  " runs: set it with KVQ_INIT");
            if (r.chosen != nullptr) selection_found_.chosen = &chosen_;
        }
        if (m_.skipping != nullptr) expect_struct(m_.skipping, "the skipping report");
        for (std::int32_t i = 0; i < m_.range_count; ++i)
            ranges_.push_back({m_.token_ranges[i].begin, m_.token_ranges[i].end});
        check(m_.list_queries != 0 || (m_.listed_tokens == nullptr && m_.listed_window == nullptr &&
                                       m_.listed_count == 0 && m_.listed_window_count == 0),
              "there are lists of ", m_.listed_count, " and ", m_.listed_window_count,
              " tokens, and list_queries is 0");
        if (m_.list_queries != 0)
            lists_ = {{m_.listed_tokens, m_.listed_count},
                      {m_.listed_window, m_.listed_window_count},
                      m_.list_queries,
                      m_.list_kv_heads == 0 ? 1 : m_.list_kv_heads};
        if (m_.documents > 0)
            documents_.starts = {m_.document_starts, static_cast<std::size_t>(m_.documents)};
        if (m_.tree_tokens > 0)
            tree_.emplace(m_.tree_first,
                          std::span(m_.tree_parents, static_cast<std::size_t>(m_.tree_tokens)));
    }
    mods_parts(const mods_parts&) = delete;
    mods_parts& operator=(const mods_parts&) = delete;

    unsigned flags() const noexcept {
        const bool masked = m_.window > 0 || m_.prefix > 0 || m_.documents > 0 || tree_ || has_ranges() ||
                            m_.mask_row != nullptr;
        const bool scored = m_.softcap != 0.0f || m_.alibi_heads > 0 || m_.score_row != nullptr;
        return (m_.direction == KVQ_CAUSAL && m_.prefix == 0 ? causal : 0u) |
               (m_.direction != KVQ_CROSS ? positions : 0u) | (masked ? masks : 0u) | (scored ? scores : 0u) |
               (m_.sink_heads > 0 ? sinks : 0u);
    }
    bool has_window() const noexcept { return m_.window > 0; }

    float scale(int head_dim) const {
        return m_.scale != 0.0f ? m_.scale : 1.0f / std::sqrt(static_cast<float>(head_dim));
    }
    const selected_pages* selection() const noexcept { return m_.selected_tokens > 0 ? &selected_ : nullptr; }
    const skipped_values* skipping() const noexcept { return m_.skipped_mass != 0.0f ? &skipped_ : nullptr; }
    const listed_tokens* lists() const noexcept { return lists_ ? &*lists_ : nullptr; }
    bool upper_only() const noexcept { return m_.upper_only != 0; }
    /// After a call that succeeded: adds what it did to the reports of the caller.
    void report() const noexcept {
        if (kvq_selection_report* const to = m_.selection) {
            count(to->pages, selection_found_.pages);
            count(to->read, selection_found_.read);
            for (const chosen_tokens& c : chosen_) {
                if (to->chosen_count == std::numeric_limits<std::int32_t>::max()) break;
                if (to->chosen_count < to->chosen_capacity)
                    to->chosen[to->chosen_count] = {
                        c.layer, c.kv_head, c.first_query, c.last_query, {c.tokens.begin, c.tokens.end}};
                ++to->chosen_count;
            }
        }
        if (kvq_skipping_report* const to = m_.skipping) {
            count(to->pages, skipping_found_.pages);
            count(to->skipped, skipping_found_.skipped);
            count(to->rows, skipping_found_.rows);
            to->left_out += skipping_found_.left_out;
            to->most_left_out = detail::larger(to->most_left_out, skipping_found_.most_left_out);
        }
    }
    void check(int q_heads) const {
        if (has_ranges()) ranges().check(q_heads);
        if (selection()) selected_.check(q_heads);
        if (skipping()) skipped_.check(q_heads);
        if (lists_) lists_->check(q_heads);
        if (m_.documents > 0) documents_.check(q_heads);
        if (m_.alibi_heads > 0) slopes().check(q_heads);
        if (m_.sink_heads > 0) logits().check(q_heads);
    }
    page_visibility mask_page(int first_q, int last_q, int first_k, int end_k) const {
        page_visibility seen = page_visibility::all;
        each_mask([&](const auto& mask) {
            if (seen != page_visibility::none)
                seen = detail::smaller(seen, mask.mask_page(first_q, last_q, first_k, end_k));
        });
        if (m_.mask_row == nullptr || seen == page_visibility::none) return seen;
        return detail::smaller(seen, own_page(first_q, last_q, first_k, end_k));
    }
    int text_position(int place) const noexcept { return tree_ ? tree_->text_position(place) : place; }
    void mask_row(float* row, int n, int q_pos, int first_k) const {
        each_mask([&](const auto& mask) { detail::hide_row(mask, row, n, q_pos, first_k); });
        if (m_.mask_row != nullptr) m_.mask_row(m_.user, row, n, q_pos, first_k);
    }
    void score_row(float* row, int n, int q_head, int q_pos, int first_k) const {
        if (m_.softcap != 0.0f) detail::change_row(softcap{m_.softcap}, row, n, q_head, q_pos, first_k);
        if (m_.alibi_heads > 0) detail::change_row(slopes(), row, n, q_head, q_pos, first_k);
        if (m_.score_row != nullptr) m_.score_row(m_.user, row, n, q_head, q_pos, first_k);
    }
    float sink_logit(int q_head) const { return logits().sink_logit(q_head); }

private:
    /// Adds to a count of the caller, which stays at the largest number that it can be.
    static void count(std::int64_t& to, std::int64_t n) noexcept {
        if (__builtin_add_overflow(to, n, &to)) to = std::numeric_limits<std::int64_t>::max();
    }
    template <class Use>
    void each_mask(Use use) const {
        if (m_.window > 0) use(sink_window{m_.window, m_.window_sinks});
        if (m_.prefix > 0) use(prefix_lm{m_.prefix});
        if (m_.documents > 0) use(documents_);
        if (tree_) use(*tree_);
        if (has_ranges()) use(ranges());
    }
    bool has_ranges() const noexcept { return m_.range_count > 0 || m_.range_start_count > 0; }
    token_ranges ranges() const noexcept {
        return {
            ranges_, {m_.range_starts, static_cast<std::size_t>(m_.range_start_count)}, m_.range_first_query};
    }
    page_visibility own_page(int first_q, int last_q, int first_k, int end_k) const {
        if (m_.mask_page == nullptr) return page_visibility::some;
        const std::int32_t seen = m_.mask_page(m_.user, first_q, last_q, first_k, end_k);
        return seen == KVQ_PAGE_NONE  ? page_visibility::none
               : seen == KVQ_PAGE_ALL ? page_visibility::all
                                      : page_visibility::some;
    }
    alibi slopes() const noexcept { return {{m_.alibi_slopes, static_cast<std::size_t>(m_.alibi_heads)}}; }
    learned_sinks logits() const noexcept {
        return {{m_.sink_logits, static_cast<std::size_t>(m_.sink_heads)}};
    }

    kvq_mods m_;
    document_mask documents_{};
    std::optional<token_tree> tree_;
    std::vector<token_range> ranges_;
    std::optional<listed_tokens> lists_;
    selection_report selection_found_;
    skipping_report skipping_found_;
    std::vector<chosen_tokens> chosen_;
    selected_pages selected_{m_.selected_tokens, &selection_found_};
    skipped_values skipped_{m_.skipped_mass, &skipping_found_};
};

template <unsigned Flags>
struct hooks {
    const mods_parts* of;

    static constexpr bool is_causal = (Flags & mods_parts::causal) != 0;
    static constexpr bool has_query_positions = (Flags & mods_parts::positions) != 0;

    float scale(int head_dim) const { return of->scale(head_dim); }
    void check(int q_heads) const { of->check(q_heads); }
    void mask_row(float* row, int n, int q_pos, int first_k) const
        requires((Flags & mods_parts::masks) != 0) {
        of->mask_row(row, n, q_pos, first_k);
    }
    int text_position(int place) const noexcept requires((Flags & mods_parts::masks) != 0) {
        return of->text_position(place);
    }
    page_visibility mask_page(int first_q, int last_q, int first_k, int end_k) const
        requires((Flags & mods_parts::masks) != 0) {
        return of->mask_page(first_q, last_q, first_k, end_k);
    }
    void score_row(float* row, int n, int q_head, int q_pos, int first_k) const
        requires((Flags & mods_parts::scores) != 0) {
        of->score_row(row, n, q_head, q_pos, first_k);
    }
    const selected_pages* selection() const { return of->selection(); }
    const skipped_values* skipping() const { return of->skipping(); }
    const listed_tokens* lists() const { return of->lists(); }
    bool upper_only() const { return of->upper_only(); }
    float sink_logit(int q_head) const requires((Flags & mods_parts::sinks) != 0) {
        return of->sink_logit(q_head);
    }
};

class held_mods {
public:
    held_mods(const kvq_mods* given, const char* name) : parts_(given, name) {
        use([&]<class Hooks>(const Hooks& h) {
            static_assert(sizeof(Hooks) == sizeof(memory_));
            view_.emplace(*::new (static_cast<void*>(memory_)) Hooks(h));
        });
    }
    held_mods(const held_mods&) = delete;
    held_mods& operator=(const held_mods&) = delete;

    const mods_view& view() const noexcept { return *view_; }
    bool has_window() const noexcept { return parts_.has_window(); }
    void report() const noexcept { parts_.report(); }

    /// Calls f(hooks<flags>).
    template <class F>
    void use(F&& f) const {
        const unsigned flags = parts_.flags();
        [&]<std::size_t... Flags>(std::index_sequence<Flags...>) {
            (void)((Flags == flags && (f(hooks<unsigned{Flags}>{&parts_}), true)) || ...);
        }
        (std::make_index_sequence<mods_parts::all_flags>{});
    }

private:
    mods_parts parts_;
    alignas(void*) std::byte memory_[sizeof(void*)];
    std::optional<mods_view> view_;
};

}  // namespace kvq::c
