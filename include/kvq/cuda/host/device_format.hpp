// Formats of a cache on the device as values, chosen by name when the program runs.
//
//   const kvq::cuda::device_format compiled[] = {make_device_format<...>(), ...};     the program's own:
//     make_device_format.cuh, with nvcc
//   kvq::cuda::library_formats()                                                      those of kvq::library:
//     any C++ compiler
//
// Contract: a value is a table of functions and what it was made for. The functions do all that needs a
// kernel; whoever calls them is plain C++.
#pragma once

#include <algorithm>
#include <concepts>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "../../core/error.hpp"
#include "../../core/row_view.hpp"
#include "../../quant/calibration.hpp"
#include "../decode/attention_options.hpp"
#include "../decode/moved_keys.hpp"
#include "../layout/page_cuts.hpp"
#include "../layout/status.hpp"
#include "../quantize/convert_turns.hpp"
#include "../quantize/kept_tensors.hpp"
#include "../store/page_memory.hpp"

namespace kvq {
inline namespace v0_3 {

/// Values of cuda::device_format of the library, how many, and the size of one.
struct library_format_list {
    const void* formats;
    std::size_t count, format_bytes;
};
/// Defined by kvq::library with KVQ_LIBRARY_CUDA. Read it by cuda::library_formats().
KVQ_EXPORT library_format_list library_device_formats() noexcept;

}  // namespace v0_3

inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

/// Formats of one device_format at most.
inline constexpr int most_formats = 4;

/// Tokens from the first page of each of them to the last one; negative: not known.
struct format_spans {
    int of[most_formats] = {-1, -1, -1, -1};
};

/// One layer as kernels see it, before its formats are known. Sequences are the rows of the current step.
struct layer_view {
    struct part {
        layer_memory pages;
        // [sequences][columns]; commit_table: without pages that are quantized already
        const int *table = nullptr, *commit_table = nullptr;
        // [sequences]: pages outside of them are not of this format
        const int *first_page = nullptr, *end_page = nullptr;
        const std::uint16_t* key_plans = nullptr;  // of the layer, or null
        const int* plan_numbers = nullptr;         // [sequences], or null: there is one plan
        int plan_words = 0;                        // from one plan to the next
        const float* key_feedback = nullptr;
        const float *columns[2] = {}, *rows[2] = {};  // of the layer's rotations of K and V, or null
        layer_memory lower = {};                      // planes, of a format with two
        // Of rows of tokens: scales of the tensors, and where K and V lie in pages of another system; tokens
        // 0 bytes apart: as in pages of kvq.
        float scales[2] = {1.0f, 1.0f};
        row_memory places[2] = {};
        int span = -1;  // as cache_part has it
    };
    part quantized[most_formats];
    resident_memory resident;
    layer_memory window, sinks;
    const int *window_table, *sink_table;
    const int *tokens, *committed;  // [sequences], tokens: paged lengths
    bool head_tables = false;       // quantized pages: a table for every kv head (cache_ref)
    page_cuts cuts;
    int layer, sequences, columns, ring, sink_columns, kv_heads, first_token, recent;
    /// Of the prompt of a layer with latents: the window is a run of pages from this one on, which the table
    /// names one after the other. Otherwise -1: it is a ring.
    int run = -1;
    unsigned* not_finite;  // of the layer; those of other layers follow
};

template <class X>
inline constexpr char type_mark = 0;

/// Tells types of score modifiers apart when the program runs: by their names, also where the library and the
/// program have been compiled for different CPUs, or as types of one program.
class score_mark {
public:
    template <class Score>
    static constexpr score_mark of() noexcept {
        if constexpr (requires {
                          { Score::name } -> std::convertible_to<const char*>;
                      })
            return score_mark(Score::name);
        else
            return score_mark(&type_mark<Score>);
    }
    friend bool operator==(score_mark a, score_mark b) noexcept {
        return a.mark_ == b.mark_ || (*a.mark_ != 0 && std::string_view(a.mark_) == b.mark_);
    }

private:
    explicit constexpr score_mark(const char* mark) noexcept : mark_(mark) {}
    const char* mark_;
};

/// Rows of T of a device_format, whose caller has checked the type.
using input_rows = common::row_view<const void>;
using output_rows = common::row_view<void>;

/// Blocks of one tensor in a format, as pages in host memory have them.
struct host_blocks {
    std::size_t (*bytes)(const block_shape&);        ///< of both planes, where there are two
    std::size_t (*lower_bytes)(const block_shape&);  ///< of the lower one; null: there is none
    /// x^, [tokens][dim]; null where the scheme needs state for it.
    void (*dequantize)(const block_shape&, block_id, const std::byte* block, float* values);
    bool has_fingerprint;  ///< as format_record says it of the CPU's format
};

/// What keys that were made from statistics need on the device: [layers][kv_heads] plans and matrices, or
/// nothing.
struct key_state {
    std::vector<std::uint16_t> plans;
    std::vector<float> feedback;
    std::uint64_t fingerprint = 0;  // of the plan
};

/// The first keys of a sequence in a layer, of which a plan is made (quantize/plan_keys.cuh).
struct plan_source {
    int tokens = 0, before = 0;                                // of the plan; those in pages
    const int *window_pages = nullptr, *sink_pages = nullptr;  // numbers, device memory
    input_rows opened, rows;                                   // the tokens behind them
};

/// What select() chooses, from tokens at positions before `room`.
struct selection {
    int query_tokens = 1, behind = 0, count = 0, room = 0;
};

struct device_functions {
    // What the host changes: words of tables, pages of a fork, slots of a prompt (store/bookkeeping.cuh).
    status (*write_words)(const word_runs&, int* words, cudaStream_t) noexcept;
    status (*copy_pages)(const page_copies&, const pool_memory&, int layers, cudaStream_t) noexcept;
    status (*find_prompt_slots)(const prompt_slots&, cudaStream_t) noexcept;
    /// A live page of recurrent state to one of a snapshot, or back.
    status (*convert_state)(const state_parts&, bool quantize, const std::byte* from, std::byte* to,
                            cudaStream_t) noexcept;
    /// All layers of a cache. counts: new tokens of every sequence, at most new_tokens; null: new_tokens.
    status (*commit)(std::span<const layer_view>, int target, int new_tokens, const int* counts,
                     cudaStream_t);
    status (*keep)(const keep_args&, int sequences, int layers, cudaStream_t);
    status (*store_new)(const layer_view&, const input_rows& k, const input_rows& v, int new_tokens,
                        cudaStream_t);
    status (*store)(const layer_view&, const layer_memory&, bool sinks, const input_rows& k,
                    const input_rows& v, const long long* slot_list, cudaStream_t);
    /// from: a format of this entry, or -1 for 16-bit pages in window_pages. kept: schemes of both formats.
    status (*requantize)(const layer_view&, int from, const layer_memory& window_pages, int to,
                         kept_tensors kept, const int* from_pages, const int* to_pages, int count,
                         cudaStream_t);
    // The halves of a conversion (quantize/convert.cuh). from: a format, or -1 for pages of the window, whose
    // table is no ring here.
    status (*gather)(const layer_view&, int from, const target_columns&, const convert_turn&, cudaStream_t);
    status (*quantize_turn)(const layer_view&, int to, const convert_turn&, cudaStream_t);
    /// Tokens of format `part` to rows starts[sequence] + token; no sinks, no plans.
    status (*dequantize)(const layer_view&, int part, const output_rows& keys, const output_rows& values,
                         const int* starts, cudaStream_t);
    status (*attend)(const layer_view&, const input_rows& q, const output_rows& out, const attention_options&,
                     void* workspace, std::size_t workspace_bytes, cudaStream_t, const void* score);
    /// store_new, then attend.
    status (*store_and_attend)(const layer_view&, const input_rows& k, const input_rows& v, int new_tokens,
                               const input_rows& q, const output_rows& out, const attention_options&,
                               void* workspace, std::size_t workspace_bytes, cudaStream_t, const void* score);
    status (*attend_lists)(const layer_view&, const input_rows& q, const output_rows& out,
                           const list_options&, void* workspace, std::size_t workspace_bytes, cudaStream_t);
    /// attend() over the best pages of each kv head: options.selected_tokens. Where out has no data, they are
    /// chosen and fetched alone. Behind check_selection(). selection: page_selection_bytes() of memory;
    /// tickets: [sequences][kv_heads], zero before and after.
    status (*attend_pages)(const layer_view&, const input_rows& q, const output_rows& out,
                           const attention_options&, std::byte* selection, unsigned* tickets, void* workspace,
                           std::size_t workspace_bytes, cudaStream_t, const void* score);
    /// Of an index: positions of the best tokens of every query.
    status (*select)(const layer_view&, const input_rows& q, const float* weights, const selection&,
                     int* positions, void* workspace, std::size_t workspace_bytes, cudaStream_t);
    /// Sequences as they are before their new tokens. starts: [sequences + 1], device memory.
    status (*prefill)(const layer_view&, const input_rows& k, const input_rows& v, const input_rows& q,
                      const output_rows& out, const int* starts, int new_tokens, const prefill_options&,
                      cudaStream_t, const void* score);
    // Of sequences whose keys have moved (decode/moved_keys.cuh).
    status (*turn_rows)(const turn_args&, cudaStream_t) noexcept;
    status (*join_states)(const join_args&, cudaStream_t) noexcept;
    score_mark score;
    bool has_score;        ///< that score modifier changes scores, of prompts as well
    bool has_sinks;        ///< and adds a logit to every sum
    const char* no_pages;  ///< why attend_pages() is not there; null: it is
    /// Of attend(). Where it does not depend on them, sequences do not count; q_heads are those of a kv head.
    std::size_t (*workspace_bytes)(int sequences, int q_heads, int query_tokens);
    /// Of attend_lists(); of layers with keys and values it may be less.
    std::size_t (*list_workspace_bytes)(int queries, int q_heads, int kv_heads, int count);
    std::size_t (*select_workspace_bytes)(int queries, int room, int count);
    /// As prefill_scratch_bytes().
    std::size_t (*prompt_scratch_bytes)(const layer_view&, int tokens, int new_tokens, int heads);
    /// Of attend_pages(), for tables of so many columns.
    std::size_t (*page_selection_bytes)(int sequences, int q_heads, int kv_heads, int columns, int ring,
                                        int tokens);
    /// Can attend_pages() do that? places: of resident pages, 0: pages are in device memory.
    status (*check_selection)(int sequences, int q_heads, int kv_heads, int columns, int ring, int tokens,
                              int places);
    /// Keys of a format made from statistics; an empty state if the scheme takes none.
    key_state (*make_keys)(int number, const calibration& statistics);
    /// Writes the plans of a layer's heads, of keys in 16 bit.
    status (*plan_keys)(const layer_view&, int number, const plan_source&, std::uint16_t* plans,
                        cudaStream_t);
    /// That of a head with even widths, in host memory.
    void (*even_plan)(int number, std::uint16_t* words);
    /// Of a format's scheme with the fingerprint of a rotation; 0 if it is not rotated.
    std::uint64_t (*rotated_fingerprint)(int number, tensor role, std::uint64_t rotation);
};

/// Of pages in memory of the caller that lie as another system has them (make_strided_format.cuh).
struct strided_functions {
    unsigned formats;  // bit f: format f may lie so
    decltype(device_functions::attend) attend;
    decltype(device_functions::prefill) prefill;
    decltype(device_functions::dequantize) dequantize;
    decltype(device_functions::workspace_bytes) workspace_bytes;
    decltype(device_functions::prompt_scratch_bytes) prompt_scratch_bytes;
    /// Quantizes tokens to slots of the pages of format `part`, one of `formats`.
    status (*store)(const layer_view&, int part, const input_rows& k, const input_rows& v,
                    const long long* slot_list, cudaStream_t);
    const strided_functions* tokens;  // for pages of one token, of an entry of one format; null: none
};

}  // namespace detail

/// Kernels for caches of one head_dim and page size, whose quantized pages have one or several formats.
struct device_format {
    struct kind {
        std::string name;  ///< that of find_format; where keys and values have different ones, "keys/values"
        std::vector<std::string> key_names, value_names;  ///< all names that find_format has for the schemes
        std::string keys, values;            ///< names of the schemes: format::name() of the CPU's formats
        std::size_t key_block, value_block;  ///< bytes of one head's block
        std::uint64_t fingerprints[2];       ///< K, V: of schemes whose types say their transforms; else 0
        int key_bits = 0;                    ///< of a code of a latent
        /// Of a head's plan: 16-bit numbers, 0: keys have none; widths in its list.
        int plan_words = 0, plan_widths = 0;
        /// Of a key block with an estimate: where its parameters begin, up to its end.
        std::size_t parameters_at = 0;
        /// Why such pages are not ranked (select/best_pages.cuh); null: they are.
        const char* no_estimate = nullptr;
        detail::host_blocks blocks[2] = {};  ///< K, V
        /// Of a format with two planes: the format of the upper ones, in whose pages they lie, and bytes of a
        /// block's lower plane, K and V. -1: it has one.
        int upper = -1;
        std::size_t lower_blocks[2] = {};
        bool turned = false;  ///< behind transforms, whose signs depend on the layer
    };
    int head_dim = 0, value_dim = 0, page_tokens = 0;
    float_type type = float_type::fp16;  ///< of the window, and of k, v, q and out
    std::vector<kind> kinds;
    std::size_t window_block[2] = {}, sink_block[2] = {};  ///< K, V
    const detail::device_functions* functions = nullptr;
    const detail::strided_functions* strided = nullptr;  ///< null: pages have no strides
    bool latent = false;  ///< of keys alone: values are read from their blocks, or there are none
    bool index = false;   ///< of keys that select tokens, which have no values

    /// Number of the format with this name, or with these of keys and values, "int8/std4"; -1 if there is
    /// none.
    int find(std::string_view name) const noexcept {
        const std::size_t cut = name.find('/');
        const std::string_view keys = name.substr(0, cut),
                               values = cut == name.npos ? name : name.substr(cut + 1);
        for (std::size_t i = 0; i < kinds.size(); ++i)
            if (std::ranges::find(kinds[i].key_names, keys) != kinds[i].key_names.end() &&
                std::ranges::find(kinds[i].value_names, values) != kinds[i].value_names.end())
                return static_cast<int>(i);
        return -1;
    }
    /// Pages of a pool that pages of these numbers take, those whose upper planes they are included.
    int taken(std::span<const int> pages, std::size_t number) const noexcept {
        int sum = pages[number];
        for (std::size_t i = 0; i < kinds.size(); ++i)
            if (kinds[i].upper == static_cast<int>(number)) sum += pages[i];
        return sum;
    }
    /// The tensors of which pages of both formats have the same scheme.
    kept_tensors same_schemes(int a, int b) const noexcept {
        if (latent || a < 0 || b < 0) return {};
        const kind &x = kinds[static_cast<std::size_t>(a)], &y = kinds[static_cast<std::size_t>(b)];
        return {x.keys == y.keys && x.fingerprints[0] == y.fingerprints[0],
                x.values == y.values && x.fingerprints[1] == y.fingerprints[1]};
    }
};

/// Of `compiled`, the entry that has all these formats, and as few others as possible; null if there is none.
/// score: of its score modifier; null: any. latent: for layers of keys alone; index: for
/// indexes among them.
inline const device_format* find_device_format(std::span<const device_format> compiled,
                                               std::span<const std::string> names, int head_dim,
                                               int value_dim, int page_tokens, float_type type,
                                               const detail::score_mark* score = nullptr, bool latent = false,
                                               bool index = false) noexcept {
    const device_format* best = nullptr;
    for (const device_format& f : compiled) {
        bool fits = f.head_dim == head_dim && f.value_dim == value_dim && f.page_tokens == page_tokens &&
                    f.type == type && f.latent == latent && f.index == index &&
                    (score == nullptr || f.functions->score == *score);
        for (const std::string& name : names) fits = fits && f.find(name) >= 0;
        if (fits && (best == nullptr || f.kinds.size() < best->kinds.size())) best = &f;
    }
    return best;
}

/// What kvq::library was compiled with: the formats, head sizes and page sizes of its CMake options
/// KVQ_CUDA_FORMATS, KVQ_CUDA_HEAD_DIMS and KVQ_CUDA_PAGE_TOKENS. cache::open() takes the list; a program
/// that links the library needs no nvcc and compiles no kernel.
/// Raises kvq::error if the library was built with another C++ standard library.
inline std::span<const device_format> library_formats() {
    const library_format_list list = library_device_formats();
    common::expect(list.format_bytes == sizeof(device_format), "a device_format has ", list.format_bytes,
                   " bytes in kvq::library but ", sizeof(device_format),
                   " here: both need the same C++ standard library");
    return {static_cast<const device_format*>(list.formats), list.count};
}

/// The entry of kvq::library with this format for keys and values of head_dim channels; null: it was not
/// compiled.
inline const device_format* find_device_format(std::string_view name, int head_dim, int page_tokens,
                                               float_type type = float_type::fp16) {
    const std::string names[] = {std::string(name)};
    constexpr auto plain = detail::score_mark::of<unmodified>();
    return find_device_format(library_formats(), names, head_dim, head_dim, page_tokens, type, &plain);
}

}}  // namespace cuda
}  // namespace kvq
