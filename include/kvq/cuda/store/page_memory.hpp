// What the host says to the small kernels of a cache (bookkeeping.cuh, keep_tokens.cuh): where pages lie,
// which words and pages change.
//
// Contract: plain values that travel in the parameters of a launch. Pointers are to device memory.
#pragma once

#include <cstddef>

#include "../../core/shape.hpp"
#include "../../state/state_part.hpp"
#include "../layout/layer_memory.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Runs of words: index of the first one, their count, the words.
struct word_runs {
    static constexpr int room = 960;
    int count = 0;
    int data[room];
};
/// What a place holds: blocks of this page. generation 0: nothing.
struct alignas(8) held_block {
    unsigned page, generation;
};
/// Of a layer whose quantized pages lie in host memory: what device memory holds of them
/// (select/resident_pages.cuh). slot_of is only a hint: page_of says what a slot holds.
struct resident_memory {
    int places = 0, pages = 0;              ///< 0: the pages are in device memory
    int format = 0;                         ///< the one whose pages are in host memory
    layer_memory pool = {};                 ///< slots, each as a page: [places][kv_heads] blocks
    std::byte* parameters = nullptr;        ///< [pages][kv_heads][parameter_bytes]: ends of key blocks
    std::size_t parameter_bytes = 0;        ///< a multiple of 16
    const unsigned* generations = nullptr;  ///< [pages]: how often a page was taken
    unsigned* tags = nullptr;       ///< [pages][kv_heads]: generation whose parameters are there; 0: none
    int* slot_of = nullptr;         ///< [kv_heads][pages]: slot + 1, or 0
    held_block* page_of = nullptr;  ///< [kv_heads][places]: in two words
    unsigned* stamps = nullptr;     ///< [kv_heads][places]: the clock when it was read last
    unsigned* clocks = nullptr;     ///< [kv_heads]
    unsigned* counts = nullptr;     ///< [kv_heads][2]: pages that were read, those that were fetched
};

/// Memory of all pages of one format: all key pages of layer 0, its value pages, those of layer 1, ...
struct pool_memory {
    std::byte* data = nullptr;
    std::size_t key_page_bytes = 0, value_page_bytes = 0;
    int pages = 0;  ///< of a layer

    KVQ_HD std::size_t page_bytes() const noexcept { return key_page_bytes + value_page_bytes; }
    KVQ_HD std::size_t layer_bytes() const noexcept { return static_cast<std::size_t>(pages) * page_bytes(); }
    KVQ_HD layer_memory layer(int i) const noexcept {
        std::byte* const keys = data + static_cast<std::size_t>(i) * layer_bytes();
        return {keys, keys + static_cast<std::size_t>(pages) * key_page_bytes, key_page_bytes,
                value_page_bytes};
    }
    KVQ_HD std::size_t page_bytes(tensor role) const noexcept {
        return role == tensor::key ? key_page_bytes : value_page_bytes;
    }
    KVQ_HD std::byte* page(tensor role, int of_layer, int number) const noexcept {
        const layer_memory l = layer(of_layer);
        return (role == tensor::key ? l.keys : l.values) +
               static_cast<std::size_t>(number) * page_bytes(role);
    }
};

struct page_copies {
    static constexpr int room = 64;
    int count = 0;
    int from[room], to[room];
};
/// A prompt of one sequence: its tokens in the order of where they go.
///
///   [0, open)       sinks
///   [open, staged)  the rest of a window page that has tokens already
///   [staged, kept)  pages that are quantized at once: 16-bit pages of the layer's scratch, from page
///                   `first_staged` of the sequence on
///   [kept, count)   window pages
struct prompt_ranges {
    int open = 0, staged = 0, kept = 0, count = 0;
    int first_staged = 0;
};
/// What finds the slots of a prompt's tokens. Pointers: device memory.
struct prompt_slots {
    prompt_ranges ranges;
    int before, sinks, page_tokens, ring;  // tokens before the prompt; of the cache
    const int *window, *sink_pages;        // page numbers
    long long* slot_list;                  // [ranges.count]
};

/// Parts of recurrent state: where they lie in live pages and in those of snapshots.
struct state_parts {
    static constexpr int room = 72;
    struct part {
        std::size_t live, held, bytes;  // bytes: live
        int heads, rows, columns;
        float_type type;
        snapshot_type snapshot;
    };
    int count = 0;
    part data[room];
};

/// Accepted tokens of drafts.
struct keep_args {
    pool_memory window, sinks;
    const int *window_table, *sink_table;  // [sequences][columns]
    const int* tokens;                     // [sequences]
    const int* counts;                     // [sequences]
    const int* paths;                      // [sequences][most]
    int ring, sink_columns, first_token, kv_heads, most;
};

}}}  // namespace kvq::cuda::detail
