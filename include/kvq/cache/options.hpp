// The options of a cache.
//
// Of n tokens the first `sinks` and at least the last `recent` stay in the window format; whole pages between
// them are quantized.
// Contract: cache() checks every option and names the one that is out of range.
#pragma once

#include <cstddef>
#include <memory_resource>
#include <vector>

#include "../attention/rotary.hpp"
#include "../format/format.hpp"
#include "../page/layer_pages.hpp"
#include "../state/snapshot_policy.hpp"
#include "key_statistics.hpp"
#include "layers.hpp"

namespace kvq { inline namespace KVQ_COMMON {

struct cache_options {
    format_list keys = {};    ///< formats of K pages; at least one
    format_list values = {};  ///< formats of V pages; empty: the same as keys
    format window = {};       ///< fp32, fp16 or bf16, for sinks and recent tokens; empty: fp16
    int sinks = 0;            ///< first tokens, always kept in the window format
    int recent = 0;           ///< at least this many newest tokens are kept in the window format
    int page_tokens = default_page_tokens;  ///< tokens per page; multiples of 32 waste no bytes
    int rollback = 16;  ///< a trim by up to this many tokens is exact even if their pages are quantized
    std::size_t byte_budget = page_pool::no_budget;  ///< for all pages, headers included
    /// Allocates byte_budget when the cache is made, at once; pages take multiples of 64 bytes of it. Pages
    /// of several sizes may leave free ranges that fit none of them: then kvq::out_of_memory comes before the
    /// budget is used up.
    bool preallocate = false;
    std::vector<layer_format> layers =
        {};  ///< one per layer; empty: layer::formats, the first listed ones by default
    /// How the model rotates keys before they are appended: once for all layers, or once per layer; a layer
    /// without positions has a rotary_embedding{}. Empty: layer::rotary, and if no layer says it, not known,
    /// so that keys cannot move (sequence::erase, shift and splice).
    std::vector<rotary_embedding> rotary = {};
    /// Pages that show less than this part of the tokens that their bytes could hold are repacked after an
    /// erase, shift, splice or a trim deeper than `rollback`: their tokens are quantized once more, in
    /// shorter pages (cache/repack.hpp). 0 to 0.5; 0: never, codes stay for ever.
    float repack = 0.25f;
    /// A preset has `own` (cache/preset_options.hpp). Sequences whose keys have a plan stay in 16 bit up to
    /// statistics_tokens.
    key_statistics statistics = key_statistics::off;
    int statistics_tokens = 512;     ///< at least 64; in layers with a window at most its tokens
    snapshot_policy snapshots = {};  ///< of layers with state
    std::pmr::memory_resource* memory = std::pmr::get_default_resource();  ///< must be thread-safe
};

}}  // namespace kvq
