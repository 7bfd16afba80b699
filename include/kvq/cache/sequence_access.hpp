// Access to the tables of a sequence, for what is built on it: requantizing, saving, sending, policies.
// Contract: a sequence with a draft is refused, since its last span is in no state that lasts.
#pragma once

#include "../core/error.hpp"
#include "sequence.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

/// Access to the members of a sequence.
struct sequence_access {
    /// Sequence: const or not.
    template <class Sequence>
    static auto& tables(Sequence& s) {
        expect(!s.tables_.empty(), "a sequence that was moved from has no layers");
        for (const page_table& table : s.tables_) sequence::check_no_draft(table);
        return s.tables_;
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
