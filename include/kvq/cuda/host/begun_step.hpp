// What a begin of a cache on the device has started (cache_step.hpp).
#pragma once

#include <algorithm>
#include <vector>

#include "../../core/row_view.hpp"
#include "cache_options.hpp"
#include "page_pool.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda { namespace detail {

/// Of all groups.
struct begun_step {
    bool begun = false, prompt = false;
    bool cross = false;  // the prompt is of the layers with cross attention
    int draft = 0;       // drafted tokens of every sequence
    sequence_id id;      // of a prompt
    int rows = 0, new_tokens = 0;
    std::size_t slot_bytes = 0;  // of a prompt, before its pages
    std::uint64_t number = 0;    // of a prompt: lengths of its launches are its own, so that no graph replays
};
/// The tokens of a prompt in a layer that others share: [tokens][kv_heads][dim] in memory of the cache.
struct shared_chunk {
    int owner;
    std::vector<int> readers;     // layers
    std::vector<char> waits_for;  // of each reader: it has not attended yet
    device_memory keys, values;
    input_view k = token_view<const float16>(nullptr, 0, 1, 1), v = k;

    int waiting() const noexcept { return static_cast<int>(std::ranges::count(waits_for, char{1})); }
    bool waits() const noexcept { return waiting() > 0; }
};

}}}}  // namespace kvq::cuda::detail
