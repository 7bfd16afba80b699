// Token sequences as keys: a compressed radix tree that finds prefixes, common prefixes and extensions of a
// query.
//
//        (root)--[7 7 1]--*--[4]----*        a node per branch or key; an edge holds all tokens up to the
//                                            next one
//                         '--[9 9]--*        * holds a value
//
// Cost, with n the tokens of a query that match a stored key and b the branches passed: find O(n + b
// log(children)), plus the branches below the point where the match ends (to reach a key there); insert the
// same plus one copy of the key and O(children) to insert a child; erase O(children). find and erase allocate
// nothing. Edges are slices of a key that passes through them, so splitting and joining them copies nothing;
// up to one key per node may outlive its own erasure. Thread safety: const members may run together.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "../core/bits.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

using token_id = std::int32_t;
/// Token ids in the caller's memory, not owned.
using token_ids = std::span<const token_id>;

template <class Value>
class radix_tree {
public:
    /// A stored key. Its address stays the same until it is erased.
    class node {
    public:
        Value value{};

        token_ids tokens() const noexcept { return {key_.get(), end_}; }
        /// The stored key that is the longest proper prefix of this one, or null.
        const node* shorter() const noexcept {
            const node* n = parent_;
            while (n && !n->stored_) n = n->parent_;
            return n;
        }
        node* shorter() noexcept { return const_cast<node*>(std::as_const(*this).shorter()); }

    private:
        friend radix_tree;
        struct child {
            token_id first;
            std::unique_ptr<node> down;
        };
        std::shared_ptr<const token_id[]> key_;  // a key that passes here, from its first token on
        std::size_t begin_ = 0, end_ = 0;        // the edge above this node is key_[begin_, end_)
        node* parent_ = nullptr;
        bool stored_ = false;
        std::vector<child> children_;  // by first token

        typename std::vector<child>::iterator slot(token_id first) noexcept {
            return std::lower_bound(children_.begin(), children_.end(), first,
                                    [](const child& c, token_id t) { return c.first < t; });
        }
        const node* follow(token_id first) const noexcept {
            const auto at = const_cast<node*>(this)->slot(first);
            return at != children_.end() && at->first == first ? at->down.get() : nullptr;
        }
    };

    /// The stored keys near a query.
    struct match {
        std::size_t tokens = 0;       ///< longest common prefix of the query with any key
        const node* exact = nullptr;  ///< the query itself
        const node* prefix =
            nullptr;  ///< longest key that is a proper prefix of the query; never the empty key
        const node* extension =
            nullptr;  ///< a key that continues beyond the common prefix (the smallest next token first)
    };

    radix_tree() = default;
    radix_tree(const radix_tree&) = delete;
    radix_tree& operator=(const radix_tree&) = delete;
    ~radix_tree() { clear(); }

    std::size_t size() const noexcept { return size_; }

    match find(token_ids query) const noexcept {
        match m;
        const node* at = &root_;
        for (;;) {
            if (m.tokens == query.size()) {
                if (at->stored_) m.exact = at;
                m.extension = first_below(at);
                return m;
            }
            if (at->stored_ && m.tokens > 0) m.prefix = at;
            const node* const next = at->follow(query[m.tokens]);
            if (!next) {
                m.extension = first_below(at);
                return m;
            }
            m.tokens = common(query, *next);
            if (m.tokens < next->end_) {
                m.extension = first_at_or_below(next);
                return m;
            }
            at = next;
        }
    }

    /// Calls f(key, tokens that it has in common with the query) for stored keys, those with most in common
    /// first and a key before those that it begins, while f returns true. None with no token in common. O(n +
    /// keys that are visited * log(children))
    template <class F>
    void visit_closest(token_ids query, F&& f) const {
        const node* top = &root_;
        std::size_t same = 0;
        while (same < query.size() && same == top->end_) {
            const node* const next = top->follow(query[same]);
            if (!next) break;
            same = common(query, *next);
            top = next;
        }
        for (const node* done = nullptr; top->parent_;
             done = std::exchange(top, top->parent_), same = top->end_)
            for (const node* n = top; n; n = behind(n, top, done))
                if (n != done && n->stored_ && !f(n, same)) return;
    }

    /// The node of `key`, and whether it is new. Strong exception guarantee.
    std::pair<node*, bool> insert(token_ids key) {
        node* at = &root_;
        std::size_t done = 0;
        node* next = nullptr;
        while (done < key.size() && (next = const_cast<node*>(at->follow(key[done])))) {
            done = common(key, *next);
            if (done < next->end_) break;
            at = next;
            next = nullptr;
        }
        if (done == key.size() && !next) return {at, store(*at)};

        const std::shared_ptr<token_id[]> copy(new token_id[key.size()]);
        std::copy(key.begin(), key.end(), copy.get());
        const auto make = [&](node* parent, std::size_t begin, std::size_t end) {
            auto made = std::make_unique<node>();
            made->key_ = copy;
            made->begin_ = begin;
            made->end_ = end;
            made->parent_ = parent;
            return made;
        };
        std::unique_ptr<node> fork = next ? make(at, next->begin_, done) : nullptr;
        std::unique_ptr<node> leaf =
            done < key.size() ? make(fork ? fork.get() : at, done, key.size()) : nullptr;
        if (fork)
            fork->children_.reserve(2);
        else
            at->children_.reserve(at->children_.size() + 1 > at->children_.capacity()
                                      ? 2 * at->children_.size() + 1
                                      : at->children_.capacity());
        // No step after this line can fail.
        nodes_ += (fork ? 1u : 0u) + (leaf ? 1u : 0u);
        if (fork) {
            auto& slot = *at->slot(key[fork->begin_]);
            next->begin_ = done;
            next->parent_ = fork.get();
            fork->children_.push_back({next->key_[done], std::move(slot.down)});
            slot.down = std::move(fork);
            at = slot.down.get();
        }
        if (leaf) {
            node* const made = leaf.get();
            at->children_.insert(at->slot(key[done]), {key[done], std::move(leaf)});
            at = made;
        }
        return {at, store(*at)};
    }

    /// Removes a stored key; joins edges that no longer branch.
    void erase(node* n) noexcept {
        n->stored_ = false;
        n->value = Value{};
        --size_;
        if (n->children_.empty() && n->parent_) {
            node* const parent = n->parent_;
            parent->children_.erase(parent->slot(n->key_[n->begin_]));
            n = parent;
            --nodes_;
        }
        if (n->parent_ && !n->stored_ && n->children_.size() == 1) {
            std::unique_ptr<node> only = std::move(n->children_.front().down);
            only->begin_ = n->begin_;
            only->parent_ = n->parent_;
            n->parent_->slot(only->key_[only->begin_])->down = std::move(only);
            --nodes_;
        }
    }

    void clear() noexcept {
        // Leaves first, without recursion: the tree can be as deep as the number of keys.
        node* n = &root_;
        for (;;) {
            if (!n->children_.empty()) {
                n = n->children_.back().down.get();
            } else if (n->parent_) {
                n = n->parent_;
                n->children_.pop_back();
            } else {
                break;
            }
        }
        root_.stored_ = false;
        root_.value = Value{};
        size_ = nodes_ = 0;
    }

    /// Number of nodes below the root: fewer than two per key.
    std::size_t nodes() const noexcept { return nodes_; }

private:
    /// Number of tokens that a query has in common with the path to a node. The query must match up to the
    /// edge above the node.
    static std::size_t common(token_ids query, const node& n) noexcept {
        const std::size_t end = detail::smaller(query.size(), n.end_);
        const auto from = static_cast<std::ptrdiff_t>(n.begin_), to = static_cast<std::ptrdiff_t>(end);
        return static_cast<std::size_t>(
            std::mismatch(query.begin() + from, query.begin() + to, n.key_.get() + from).first -
            query.begin());
    }
    static const node* first_below(const node* n) noexcept {
        return n->children_.empty() ? nullptr : first_at_or_below(n->children_.front().down.get());
    }
    /// Every node without children holds a key.
    static const node* first_at_or_below(const node* n) noexcept {
        while (!n->stored_) n = n->children_.front().down.get();
        return n;
    }
    /// The node after n among those at and below top, without those below `done`.
    static const node* behind(const node* n, const node* top, const node* done) noexcept {
        if (n != done && !n->children_.empty()) return n->children_.front().down.get();
        for (; n != top; n = n->parent_) {
            const auto next = const_cast<node*>(n->parent_)->slot(n->key_[n->begin_]) + 1;
            if (next != n->parent_->children_.end()) return next->down.get();
        }
        return nullptr;
    }
    bool store(node& n) noexcept {
        const bool fresh = !n.stored_;
        n.stored_ = true;
        size_ += fresh;
        return fresh;
    }

    node root_;
    std::size_t size_ = 0;
    std::size_t nodes_ = 0;
};

}}  // namespace kvq
