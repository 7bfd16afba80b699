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
    static auto& tracks(Sequence& s) {
        expect(!s.tracks_.empty(), "a sequence that was moved from has no layers");
        for (const page_table& track : s.tracks_) sequence::check_no_draft(track);
        return s.tracks_;
    }
    static kvq::cache& cache(const sequence& s) noexcept { return *s.cache_; }
};

}}}  // namespace kvq::detail
