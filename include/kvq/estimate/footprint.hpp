// Footprint: the bytes of a cache, before it exists, and the longest context that fits; also for older pages
// that step down by age (cache/step_down.hpp).
//
//   total = sequences * (pages + rollback + bookkeeping + workspace) + attention workspace
//   With cache_options::preallocate pages, rollback and page headers lie in byte_budget bytes; `unused` is
//     the rest of them.
//
// Contract: equal to the allocations of the cache, byte for byte, after tokens were appended, in whole
// prompts or one by one (tests/unit/footprint.cpp counts with a memory resource). Cuts add to it: pages hold
// at most footprint / cache_options::repack bytes and one page per layer after any trims, erases, shifts and
// splices (cache/repack.hpp).
// A step that cache::reserve takes ahead of it needs more: estimate/budget.hpp is the byte_budget of an
// engine. `transient` is an upper bound of temporary bytes of a call: while append() quantizes pages, or
// while prefill() has a chunk of one layer in 16 bit.
#pragma once

#include "../cache/sequence.hpp"
#include "../cache/step_down.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// Calls on the cache: for the attention workspace, and for the temporary bytes of prefill().
struct attention_use {
    int q_heads = 0;  ///< 0: leave the attention workspace out
    int q_tokens = 1;
    int threads = 1;
    int chunk = 0;         ///< most tokens of one prefill() call; 0: append() only
    int cross_tokens = 0;  ///< tokens of every layer with cross attention
    /// Masks and score modifiers of attention; null: causal. Selected pages and skipped values take
    /// workspace. Read during the call.
    const mods_view* mods = nullptr;
};

struct footprint_report {
    std::size_t quantized = 0;    ///< data of quantized pages
    std::size_t window = 0;       ///< data of 16/32-bit pages
    std::size_t rollback = 0;     ///< 16-bit copies of committed pages
    std::size_t bookkeeping = 0;  ///< page headers and tables
    std::size_t workspace = 0;    ///< scratch for quantizing
    /// recurrent state: live pages, and snapshots that cache_options::snapshots takes every so many tokens
    std::size_t state = 0;
    std::size_t attention = 0;  ///< workspace of one attention call
    std::size_t unused = 0;     ///< of the byte budget, if it is allocated up front: bytes without a page
    std::size_t total = 0;      ///< the sum of the above
    /// Upper bound of the bytes that a call adds temporarily, to those held before or after it.
    std::size_t transient = 0;
};

/// Bytes for `sequences` sequences of `tokens` tokens each. O(layers * tiers). With a policy: after
/// step_down() by age at that length (the byte budget of the policy is ignored).
[[nodiscard]] footprint_report footprint(const cache& of, int tokens, int sequences = 1,
                                         const attention_use& use = {}, const step_down_policy& policy = {});

/// Longest context for which every length up to it fits `budget` bytes, temporary bytes included; -1 if even
/// an empty cache does not fit. `transient` is an upper bound, so decode token by token may reach some pages
/// more.
/// With a policy: for step_down() after every append. O(log(result)) footprints.
[[nodiscard]] int longest_context(const cache& of, std::size_t budget, int sequences = 1,
                                  const attention_use& use = {}, const step_down_policy& policy = {});

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "footprint-inl.hpp"
#endif
