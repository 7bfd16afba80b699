// What a cache on the device is told: options, handles of sequences, requests.
//
// Contract: cache::open() checks every option and names the one that is out of range.
#pragma once

#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "../../cache/key_statistics.hpp"
#include "../../cache/layers.hpp"
#include "../../core/float_type.hpp"
#include "../../state/snapshot_policy.hpp"
#include "page_pool.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

/// What a prompt can use, up to 1/128 of the device's memory; or what one kv head needs, where that is more.
inline constexpr std::size_t automatic_scratch = ~std::size_t{0};

struct cache_options {
    std::vector<std::string> formats = {};  ///< by name; pages are committed to the first one
    int page_tokens = default_page_tokens;  ///< that of the compiled formats
    float_type type = float_type::fp16;     ///< of the window, and of k, v, q and out: fp16 or bf16
    int sinks = 0;                          ///< first tokens, always 16 bit
    int recent = 64;        ///< at least this many newest tokens are 16 bit; at least step_tokens
    int rollback = 16;      ///< a trim by up to this many tokens is exact
    int max_batch = 1;      ///< sequences of one step
    int max_tokens = 4096;  ///< of one sequence
    int cut_pages = 64;     ///< a sequence of max_tokens may have so many pages more, which trims have cut
    int draft_tokens = 0;   ///< of one sequence at most: up to 64, to page_tokens and to recent
    int step_tokens = 1;    ///< new tokens that a step gives to every sequence, at most; 0: prompts only
    /// Of layers with latent attention, and of steps of sequences whose keys have moved, at most: memory for
    /// so many.
    int query_heads = 128;
    /// Of a query, in attend_lists(), select() and attend() with selected_tokens: a workspace for so many.
    int listed_tokens = 0;
    /// Of each layer and kv head that selects pages: device memory for so many tokens. All quantized pages of
    /// layers that see all tokens then lie in pinned host memory, in a pool of pool_tokens that does not grow
    /// (select/resident_pages.cuh). 0: they lie in device memory.
    int resident_tokens = 0;
    int pool_tokens = 0;     ///< quantized pages for so many tokens are allocated up front, and
    int pool_sequences = 0;  ///< 16-bit pages for so many sequences
    int pool_states = 0;     ///< and so many states: one for a sequence, and one for each of its snapshots
    bool growing = true;     ///< pools that are full grow, between steps
    /// For prefill() on sm_90a: a layer's pages as half floats (prefill_scratch), in the memory of prompts
    /// (prompt_bytes), which begin_prompt() takes. Bytes at most, and at least those of one kv head of
    /// max_tokens; 0: none.
    std::size_t prompt_scratch = automatic_scratch;
    /// Whose keys say the widths of channels, for formats that take a plan and get no statistics (calibrate).
    /// A sequence is 16 bit up to statistics_tokens, if the first format is one.
    key_statistics statistics = key_statistics::own;
    int statistics_tokens = 512;  ///< at least 64; in layers with a window at most its tokens
    /// Of layers with state. prompt_end: at the end of every begin_prompt(); where prompts come in parts,
    /// snapshot() behind the last one instead.
    snapshot_policy snapshots = {};
    /// How keys were rotated before they were appended: one for all layers, or one per layer, as on the CPU.
    /// Empty: keys cannot move (cache::erase, shift and splice). No functions (rotary_embedding::rotate).
    std::vector<rotary_embedding> rotary = {};
    device_allocator memory = {};
};

/// A sequence of a cache. The default is none: a row of a batch that is not there.
struct sequence_id {
    int index = -1;
    unsigned generation = 0;
    bool operator==(const sequence_id&) const = default;
};

/// Pages of host memory that selections of pages have read, and those that had to be fetched.
struct fetch_report {
    std::int64_t read = 0, fetched = 0;
};

/// Quantized pages that change their format. Sinks, window and 16-bit values for rollback stay as they are.
struct requantize_request {
    static constexpr int all = (std::numeric_limits<int>::max)();

    /// To this one, K and V. "int8/": keys alone, "/std4": values alone; the other tensor keeps its format
    /// and its bytes. The pair of both must be compiled.
    std::string_view format = {};
    int first_token = 0, last_token = all;  ///< pages that lie wholly in tokens [first_token, last_token)
    bool only_smaller = false;              ///< skip pages that would not shrink
    bool new_pages = false;                 ///< pages committed from now on take the format, too
};

/// Pages whose tokens are all `age` tokens or more behind the end of the sequence get this format.
struct tier {
    int age = 0;
    std::string_view format = {};
};

}}}  // namespace kvq::cuda
