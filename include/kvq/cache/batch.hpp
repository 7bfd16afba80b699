// One step of many sequences: what each of them asks for.
//
//   cache.attend(layer, attention requests, ...)     sequences of any length, any number of queries each
//   cache.prefill(layer, prefill requests, ...)      chunks of prompts beside sequences that decode one token
//
// Contract: outputs and pages are those that every sequence gets alone, bit for bit.
#pragma once

#include "../attention/attend.hpp"

namespace kvq::inline KVQ_TAGGED {

class sequence;

/// One sequence's part of a batch: attention for its last q.tokens tokens, as sequence::attend says.
struct attention_request {
    const kvq::sequence* sequence;
    query_view q;
    output_view out;
};

/// One sequence's part of a step: as the arguments of sequence::prefill. K and V have one type.
struct prefill_request {
    kvq::sequence* sequence;
    input_view k, v;
    query_view q;
    output_view out;
};

}  // namespace kvq::inline KVQ_TAGGED
