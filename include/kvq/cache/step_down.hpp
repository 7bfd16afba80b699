// Stepping down: older pages are kept in fewer bits, by age, and further under a byte budget as the context
// fills.
//
//   step_down_policy policy{.tiers = {{.age = 0, .format = {0, 0}},         // 16 bit
//                                     {.age = 1024, .format = {1, 1}},      // int8 from 1024 tokens behind
//                                                                           // the end
//                                     {.age = 8192, .format = {2, 2}}},     // 4 bit from 8192
//                           .byte_budget = std::size_t{1} << 30};
//   plan_step_down(cache, sequence, policy);                                // dry run: the report that
//                                                                           // step_down() would give
//   step_down(cache, sequence, policy);                                     // between decode steps
//
// By age: a page takes the format of the last tier whose age all tokens of the page have reached, in any
// sequence that holds the page, unless a sequence holds it that is not given: then it would not be freed.
// By budget: while the pool holds more than `byte_budget` bytes, the oldest page of the widest tier goes one
// tier down, unless it would not be freed: another sequence holds it too, or the sequence would keep a 16-bit
// copy. Each tier is a request to requantize (cache/requantize.hpp) that only shrinks pages: same pages, same
// peak, same error. The result depends on the pages, on their holders and on the number of tokens, not on
// time or threads. Call it after drafted tokens were accepted or trimmed, so that speculation does not change
// the pages.
#pragma once

#include <span>
#include <vector>

#include "requantize.hpp"
#include "sequence.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// One format of the ladder, and the age from which it applies.
struct tier {
    int age = 0;            ///< least number of tokens behind the newest token of a page
    layer_format format{};  ///< 0-based in cache_options::keys and values
};

struct step_down_policy {
    /// ages ascending, formats from wide to narrow (a page that would not shrink does not change)
    std::vector<tier> tiers;
    std::size_t byte_budget = page_pool::no_budget;  ///< for the whole pool
    /// First and last layers that no tier touches (they are the most sensitive ones in most models).
    int first_layers_kept = 0, last_layers_kept = 0;
};

/// One step, for all sequences: pages that cover tokens [first_token, last_token) went to tier `tier`.
struct step_down_step {
    int tier = 0;
    int first_token = 0, last_token = 0;
    std::size_t pages = 0;
    std::size_t bytes_after = 0;  ///< in the pool
};

struct step_down_report {
    std::vector<step_down_step> steps;
    std::size_t bytes_before = 0, bytes_after = 0, bytes_peak = 0;  ///< in the pool
    /// False: the budget is still exceeded, though every page that would be freed is in the last tier.
    bool fits = true;
};

namespace detail {

/// Raises kvq::error for a policy that does not fit the cache.
void check_policy(const cache& of, const step_down_policy& policy);

}  // namespace detail

/// Applies the policy to sequences of one cache; pages that they share stay shared. O(pages) of all sequences
/// and tiers, plus the quantizing. Raises kvq::error for an impossible policy before anything changes. Raises
/// kvq::out_of_memory when the pool has no room for one more page per thread (keep the policy's budget that
/// far below the pool's); the steps until then stay done.
step_down_report step_down(cache& of, std::span<sequence* const> sequences, const step_down_policy& policy,
                           executor_view executor = serial_executor{});
step_down_report step_down(cache& of, sequence& s, const step_down_policy& policy);

/// Dry run of step_down() on `threads` threads: its report, byte for byte, as long as no other sequence takes
/// or drops references to these pages in between. Nothing changes, and a pool without room is no error:
/// bytes_peak says what a run would need. Takes memory for a copy of the tables and 64 bytes a page.
[[nodiscard]] step_down_report plan_step_down(const cache& of, std::span<const sequence* const> sequences,
                                              const step_down_policy& policy, int threads = 1);
[[nodiscard]] step_down_report plan_step_down(const cache& of, const sequence& s,
                                              const step_down_policy& policy, int threads = 1);

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "step_down-inl.hpp"
#endif
