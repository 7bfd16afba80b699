// A tree of drafted tokens, as a mask: several guesses of the next tokens are checked in one attention.
//
//   token i attends to the accepted tokens before the draft, to its ancestors and to itself:  bit j of
//     ancestors(i)
//
// parents[i] < i is the token before token i in its guess, -1 for the accepted text. Drafted tokens are
// positions [first_token, first_token + size()) of the sequence (sequence::append_draft); their rotary
// positions are the engine's, which rotates with first_token + depth(i). Windows of layers count depths, too,
// so that a token sees what it would see as accepted text. Masks and score modifiers beside the tree get
// places in the sequence.
// Source: SpecInfer, arXiv 2305.09781, section 4.2.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "mods.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

class token_tree {
public:
    static constexpr int most_tokens = 64;

    /// first_token: the length of the layer before the draft. Raises kvq::error for more than 64 tokens, or a
    /// parent that does not come before its child. O(tokens)
    token_tree(int first_token, std::span<const int> parents)
        : first_(first_token), size_(static_cast<int>(detail::smaller(parents.size(), std::size_t{65}))) {
        detail::expect(parents.size() <= std::size_t{most_tokens}, "a tree has at most ", most_tokens,
                       " tokens, got ", parents.size());
        detail::expect(first_token >= 0, "a tree begins at position 0 or later, got ", first_token);
        for (int i = 0; i < size_; ++i) {
            const int parent = parents[static_cast<std::size_t>(i)];
            detail::expect(parent >= -1 && parent < i, "token ", i, " of a tree has parent ", parent,
                           ", which is not a token before it and not -1");
            const auto at = static_cast<std::size_t>(i);
            parents_[at] = static_cast<std::int8_t>(parent);
            ancestors_[at] =
                std::uint64_t{1} << at | (parent < 0 ? 0 : ancestors_[static_cast<std::size_t>(parent)]);
            depths_[at] =
                static_cast<std::int8_t>(parent < 0 ? 0 : depths_[static_cast<std::size_t>(parent)] + 1);
        }
    }

    int size() const noexcept { return size_; }
    int first_token() const noexcept { return first_; }
    /// i: 0 to size() - 1
    int parent(int i) const noexcept { return parents_[static_cast<std::size_t>(i)]; }
    /// Bit j is set for token i itself and for its ancestors j.
    std::uint64_t ancestors(int i) const noexcept { return ancestors_[static_cast<std::size_t>(i)]; }
    /// 0 for a token whose parent is the accepted text.
    int depth(int i) const noexcept { return depths_[static_cast<std::size_t>(i)]; }
    /// Is each token of the path the child of the token before it, and the first one a child of the accepted
    /// text?
    bool is_path(std::span<const int> path) const noexcept {
        int before = -1;
        for (const int i : path) {
            if (i < 0 || i >= size_ || parent(i) != before) return false;
            before = i;
        }
        return true;
    }

    /// The position in the text of the token in a place of the sequence, as a path through the draft has it.
    int text_position(int place) const noexcept {
        return holds(place) ? first_ + depth(place - first_) : place;
    }
    bool mask(int q_pos, int k_pos) const noexcept {
        return k_pos < first_ || !holds(q_pos) ||
               (holds(k_pos) && (ancestors(q_pos - first_) >> (k_pos - first_) & 1) != 0);
    }
    page_visibility mask_page(int, int last_q, int, int end_k) const noexcept {
        return end_k <= first_ || last_q < first_ ? page_visibility::all : page_visibility::some;
    }

private:
    bool holds(int pos) const noexcept { return pos >= first_ && pos - first_ < size_; }

    int first_, size_;
    std::array<std::int8_t, most_tokens> parents_{}, depths_{};
    std::array<std::uint64_t, most_tokens> ancestors_{};
};

}}  // namespace kvq
