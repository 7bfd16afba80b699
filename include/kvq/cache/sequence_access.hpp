// Access to the tables of a sequence, for what is built on it: requantizing, saving, sending, policies.
// Contract: a sequence with a draft is refused, since its last span is in no state that lasts. So is one with
// a chunk that waits for layers that share it, unless the sequence changes anyway: its chunk is committed
// then.
#pragma once

#include <algorithm>
#include <span>

#include "../core/error.hpp"
#include "sequence.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

/// Access to the members of a sequence.
struct sequence_access {
    /// Sequence: const or not.
    template <class Sequence>
    static auto& tables(Sequence& s) {
        expect_no_draft(s);
        expect_not_held(s);
        for (int i = 0; i < cache(s).layer_count(); ++i)
            if (waits(s, i) && cache(s).holds_tokens(i))
                fail(s.describe(i),
                     ": its last chunk waits in 16 bit for the layers that share it; trim() to ", s.tokens(),
                     ", all tokens, commits it");
        return s.tables_;
    }
    /// Of a sequence that changes: chunks that wait for layers that share them are committed first.
    static auto& committed_tables(sequence& s) {
        expect_no_draft(s);
        expect_not_held(s);
        s.commit_shared();
        return s.tables_;
    }
    /// Commits what waited in another cache for a plan of its keys, and does not in this one.
    static void commit_due(sequence& s) { s.commit_due(); }
    static void expect_no_draft(const sequence& s) {
        expect(!s.tables_.empty(), "a sequence that was moved from has no layers");
        for (const page_table& table : s.tables_) sequence::check_no_draft(table);
    }
    static bool is_held(const sequence& s) noexcept {
        return std::ranges::any_of(s.tables_, &page_table::held);
    }
    static void expect_not_held(const sequence& s) {
        for (std::size_t i = 0; i < s.tables_.size(); ++i)
            if (s.tables_[i].held)
                fail(s.describe(static_cast<int>(i)),
                     ": its tokens are held in 16 bit until retain() or release()");
    }
    /// Raises kvq::error if tokens were dropped from a layer. verb: "erase".
    static void expect_none_dropped(const sequence& s, const char* verb) {
        for (std::size_t i = 0; i < s.tables_.size(); ++i)
            if (s.tables_[i].dropped > 0)
                fail("cannot ", verb, " tokens: ", s.describe(static_cast<int>(i)),
                     ", dropped some of its first ", s.tables_[i].dropped);
    }
    /// Raises kvq::error unless sequences of a call are those of a cache, without drafts. whose: "of the
    /// request".
    static void expect_members(const kvq::cache& of, std::span<sequence* const> sequences,
                               const char* whose) {
        for (std::size_t i = 0; i < sequences.size(); ++i) {
            expect(sequences[i] != nullptr, "sequence ", i, " ", whose, " is null");
            expect(&cache(*sequences[i]) == &of, "sequence ", i, " ", whose, " belongs to another cache");
            expect_no_draft(*sequences[i]);
        }
    }
    /// Of a layer that shares those of another one: its queries have not come.
    static bool waits(const sequence& s, int layer) noexcept {
        return s.tables_[static_cast<std::size_t>(layer)].waits;
    }
    static bool waits(const sequence& s) noexcept {
        bool some = false;
        for (const page_table& table : s.tables_) some = some || table.waits;
        return some;
    }
    /// Raises kvq::error for a cache with state: `what` holds keys and values alone.
    static void expect_no_state(const kvq::cache& of, const char* what) {
        if (!of.state_layout()) return;
        const int layer = of.state_layout()->layers()[0].number;
        fail(describe_layer(layer, of.layers()[static_cast<std::size_t>(layer)]), ": ", what,
             " has layers with keys and values only");
    }
    static kvq::cache& cache(const sequence& s) noexcept { return *s.cache_; }
};

}}}  // namespace kvq::detail
