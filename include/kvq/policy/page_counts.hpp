// Bytes of the pages that several sequences hold together: each page counts once, as in page_pool.
//
// A page leaves the sum with the last of these sequences that holds it. Other holders do not matter.
#pragma once

#include <cstddef>
#include <unordered_map>

#include "../cache/sequence.hpp"
#include "../cache/sequence_access.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

/// How often the entries of a store hold each page, and the bytes of these pages.
class page_counts {
public:
    using counts = std::unordered_map<const page*, std::size_t>;

    /// The pages of one sequence, to be added: everything that needs memory.
    template <class Sequence>
    static counts of(const Sequence& s) {
        counts pages;
        for_each_page(s, [&](const page& p) { pages.try_emplace(&p, 0); });
        return pages;
    }
    static std::size_t bytes_of(const counts& pages) noexcept {
        std::size_t sum = 0;
        for (const auto& [p, held] : pages) sum += page_pool::allocation(p->bytes);
        return sum;
    }

    void reserve(std::size_t more) { held_.reserve(held_.size() + more); }
    /// Call reserve(pages.size()) before.
    template <class Sequence>
    void add(const Sequence& s, counts& pages) noexcept {
        held_.merge(pages);
        for_each_page(s, [&](const page& p) {
            if (held_.find(&p)->second++ == 0) bytes_ += page_pool::allocation(p.bytes);
        });
    }
    template <class Sequence>
    void remove(const Sequence& s) noexcept {
        for_each_page(s, [&](const page& p) {
            const auto at = held_.find(&p);
            if (--at->second > 0) return;
            bytes_ -= page_pool::allocation(p.bytes);
            held_.erase(at);
        });
    }
    void clear() noexcept {
        held_.clear();
        bytes_ = 0;
    }
    std::size_t bytes() const noexcept { return bytes_; }

private:
    template <class Sequence, class F>
    static void for_each_page(const Sequence& s, F&& f) {
        for (const page_table& table : sequence_access::tables(s))
            for (const page_span& span : table.spans)
                for (int role = 0; role < 2; ++role) {
                    if (span.pages[role]) f(*span.pages[role]);
                    if (span.copies[role]) f(*span.copies[role]);
                }
        if (sequence_access::cache(s).state_layout()) s.state().for_each_page(f);
    }

    counts held_;
    std::size_t bytes_ = 0;
};

}}}  // namespace kvq::detail
