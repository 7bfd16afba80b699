// Access to the tables of a sequence, for what is built on it: requantizing, saving, sending, policies.
// Contract: a sequence with a draft, or with a chunk that waits for layers that share it, is refused: its last spans are in no state
// that lasts.
#pragma once

#include <span>

#include "../core/error.hpp"
#include "sequence.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

/// Access to the members of a sequence.
struct sequence_access {
    /// Sequence: const or not.
    template <class Sequence>
    static auto& tables(Sequence& s) {
        check_no_draft(s);
        for (int i = 0; i < cache(s).layer_count(); ++i) {
            if (s.tables_[static_cast<std::size_t>(i)].waits && cache(s).holds_tokens(i))
                fail(s.describe(i),
                     ": its last chunk waits in 16 bit for the layers that share it; trim() to ", s.tokens(),
                     ", all tokens, commits it");
        }
        return s.tables_;
    }
    /// Commits chunks that wait for layers that share them.
    static void commit_shared(sequence& s) { s.commit_shared(); }
    /// The same of several, after all of them were checked for drafts.
    static void commit_shared(std::span<sequence* const> all) {
        for (const sequence* const s : all) check_no_draft(*s);
        for (sequence* const s : all) s->commit_shared();
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

private:
    static void check_no_draft(const sequence& s) {
        expect(!s.tables_.empty(), "a sequence that was moved from has no layers");
        for (const page_table& table : s.tables_) sequence::check_no_draft(table);
    }
};

}}}  // namespace kvq::detail
