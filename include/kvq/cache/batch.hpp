// One step of many sequences: the requests of a batch.
//
//   cache.attend(layer, attention requests, ...)     sequences of any length, any number of queries each
//   cache.prefill(layer, prefill requests, ...)      chunks of prompts beside sequences that decode one token
//   cache.reserve(step requests, ...)                the memory of prefill and attend in all layers, ahead of
//                                                    them
//
// Contract: every sequence gets the same outputs and pages as alone, bit for bit.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "../attention/masks.hpp"
#include "../attention/score_modifiers.hpp"
#include "../attention/token_tree.hpp"
#include "../core/error.hpp"
#include "../core/row_view.hpp"

namespace kvq { inline namespace KVQ_COMMON {

class sequence;

/// One sequence's part of a batch: attention for its last q.tokens tokens, as in sequence::attend.
struct attention_request {
    const kvq::sequence* sequence;
    query_view q;
    output_view out;
    std::optional<mods_view> mods = {};  ///< instead of those of the call; not copied: keep the object
};

/// One sequence's part of a step: the arguments of sequence::prefill. K and V have one type.
struct prefill_request {
    kvq::sequence* sequence;
    input_view k, v;
    query_view q;
    output_view out;
    std::optional<mods_view> mods = {};  ///< as in attention_request
};

/// One sequence's part of a batch: the best tokens of an index for its last q.tokens tokens.
struct select_request {
    const kvq::sequence* sequence;
    query_view q;          ///< [n][heads][channels of the index]
    const float* weights;  ///< [n][heads]
    std::int32_t* out;     ///< [n][best]: positions, the best first; -1 where there are no more tokens
};

/// One sequence's part of a step over all layers, for cache::reserve.
struct step_request {
    kvq::sequence* sequence;
    int tokens;                          ///< new tokens in every layer
    int q_tokens = 1;                    ///< query tokens in every layer; 0: no attention
    std::optional<mods_view> mods = {};  ///< as in attention_request
};

namespace detail {

/// Sequence i of a list is none of those before it. sequence_of(j): sequence j. O(i)
template <class SequenceOf>
void expect_distinct(std::size_t i, const char* list, const SequenceOf& sequence_of) {
    for (std::size_t j = 0; j < i; ++j)
        expect(sequence_of(j) != sequence_of(i), "sequence ", i, " of the ", list, " is sequence ", j,
               " again");
}
/// The number of a list, which its sequences keep: one that has it already is in the list twice. No other
/// list of this process has it.
inline std::uint64_t next_list() noexcept {
    static std::atomic<std::uint64_t> last{0};
    return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace detail
}}  // namespace kvq
