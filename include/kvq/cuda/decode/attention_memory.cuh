// Shared memory of the fused attention kernel: how many tokens a warp takes at a time, and what a thread
// block of it holds.
//
//   block = warps * (ring of units on their way, query, notes) + states of the merge; as many blocks per
//     multiprocessor as fit
//
// Contract: sizes are constants of (format, query rows / 4, devices of less shared memory or not). no_warps
// says which formats the kernel handles on devices of most shared memory; attention of others runs in
// attend_any.cuh.
#pragma once

#include <initializer_list>

#include "../layout/channel_bands.cuh"
#include "../layout/page_cuts.cuh"
#include "attention_args.cuh"
#include "band_scores.cuh"
#include "half_values.cuh"
#include "merge.cuh"
#include "mixed_keys.cuh"
#include "query_rows.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda { namespace detail {

/// Of a page and head, what a unit copies: both planes.
template <tensor Role, class Pair>
inline constexpr std::size_t unit_bytes_of = [] {
    std::size_t bytes = Role == tensor::key ? Pair::key_block_bytes : Pair::value_block_bytes;
    if constexpr (has_lower<Pair>)
        bytes += Role == tensor::key ? Pair::lower_key_bytes : Pair::lower_value_bytes;
    return bytes;
}();

/// Tokens a warp takes at a time: as many as give units of at most 9 KB, so that several fit into flight; two
/// pages where pages are small. 16 query rows have no registers for the scores of more than 64 tokens, 8 rows
/// only where units are small: 2 bits of 128 channels, and 3 without a plan.
template <class Pair, int Rows4, int Bands = bands_of<Pair>>
constexpr int warp_tile_tokens() {
    constexpr int page = Pair::page_tokens;
    int tokens = smaller(page, Rows4 == 4 ? 64 : 128);
    constexpr int least = smaller(32, page);  // a tile of keys
    constexpr int widest =
        static_cast<int>(larger(unit_bytes_of<tensor::key, Pair>, unit_bytes_of<tensor::value, Pair>)) /
        page / Bands;
    // Keys of mixed widths need shared memory for the query. Rows take more instructions than codes, which
    // begin when a unit has come.
    constexpr bool rows = token_row_scheme<typename Pair::keys> || token_row_scheme<typename Pair::values>;
    constexpr int most = codec<typename Pair::keys>.several_widths() ? 8192 : rows ? 5120 : 9216;
    while (tokens > least && tokens * widest > most) tokens /= 2;
    if (joins_pages<Pair> && 2 * page * widest <= most) return 2 * page;
    using values = warp_tile<tensor::value, Pair, page>;
    constexpr int most_of_8_rows = [] {
        if constexpr (!codec<typename Pair::keys>.several_widths() && !values::full)
            if (values::scheme::code_bits <= 3) return 7680;
        return 5120;
    }();
    if (Rows4 == 2 && tokens > 64 && tokens * widest > most_of_8_rows) tokens /= 2;
    if (!values::full && !values::token_parameters)
        while (tokens > least && tokens > values::group) tokens /= 2;
    // What their numbers become takes registers.
    if (Rows4 > 1 && rows) tokens = least;
    while (tokens > least && page % tokens != 0) tokens /= 2;
    return tokens;
}

/// What a warp needs once per item; it waits in shared memory.
struct warp_notes {
    walk_state reader, feeder;
    share_plan plan;
    share_span span;  // of the current item, where it has several parts; those of a team's first warp count
    warp_team team;
    sequence_cut cut;  // of the current item
};

/// Where a warp's memory begins: shared addresses.
struct warp_memory {
    std::uint32_t ring, weights, scratch, query;  // query: of the team's item, and of the warp's band
    const std::uint16_t* order;  // in which 16-bit keys find its channels (cache_ref::key_plan), or null
    band_place band;
};

/// May a block of so many warps have so many teams, each with an output? All bands of a warp tile are in one
/// team.
template <int Rows4, int Bands>
constexpr bool takes_teams(int warps, int teams) {
    return warps % (teams * Bands) == 0 && !(Rows4 == 4 && teams == 4) && (teams > 1 || Bands > 1);
}

/// Shared memory of a thread block. Small: on devices of little shared memory.
template <class Pair, int Rows4, bool Small = false, int Bands = bands_of<Pair>>
struct attention_memory {
    static constexpr int bands = Bands;
    static constexpr int tokens = warp_tile_tokens<Pair, Rows4, Bands>();
    using keys = warp_tile<tensor::key, Pair, tokens, Bands>;
    using values = warp_tile<tensor::value, Pair, tokens, Bands>;
    static constexpr bool halves = takes_halves<values, Rows4>, dequantizes = dequantizes_keys<keys, Rows4>;
    using words = std::conditional_t<halves, half_words<values>, weight_words<values>>;
    using state = std::conditional_t<halves, half_state<values, Rows4>, warp_state<values, Rows4>>;
    /// Tokens that a warp takes one after the other: two warp tiles where keys share their parameters, which
    /// are folded once.
    static constexpr int warp_tiles_of_step = [] {
        if constexpr (!fold_once<keys>) return keys::group % (2 * tokens) == 0 ? 2 : 1;
        return 1;
    }();
    static constexpr int step_tokens = warp_tiles_of_step * tokens;
    static constexpr int rows = 4 * Rows4;
    static constexpr int scores_bytes =
        Bands > 1 ? keys::tiles* Rows4 * 16 * warp_size : 0;  // band_scores.cuh
    static constexpr int slot_bytes =
        round_up(larger(scores_bytes, larger(keys::slot_bytes, values::slot_bytes)), 128);
    static constexpr int weight_bytes = round_up(words::words(Rows4) * 4, 128);
    static constexpr int scratch_bytes = round_up(keys::scratch_bytes(Rows4), 128);
    static constexpr int notes_bytes = round_up(static_cast<int>(sizeof(warp_notes)), 128);
    static constexpr int query_stride = keys::dim, query_floats = rows * query_stride;   // of a band
    static constexpr int output_stride = Pair::value_dim + (split_rows<Rows4> ? 4 : 8);  // banks
    static constexpr int output_part = rows * larger(output_stride, Pair::head_dim);     // floats
    static constexpr int note_words = 16;  // what a team notes for merge_parts
    struct size {
        int warps, slot_count;
        int parts;  // that add up to the output of a block's team; each can be that of a team of its own
        constexpr int warp_bytes() const {
            return slot_count * slot_bytes + weight_bytes + scratch_bytes + notes_bytes;
        }
        constexpr int output_bytes() const { return round_up(parts * output_part * 4, 128); }
        constexpr int bytes() const {
            return warps * warp_bytes() + output_bytes() +
                   round_up((parts * (note_words + 2 * rows) + warps * (1 + 2 * rows)) * 4, 128);
        }
    };
    /// 12 warps instead of 8 pay where units are small, and where instructions are many (8-bit parameters)
    /// and warp tiles are short enough for an item to be shared well; keys of mixed widths wait so often that
    /// they pay for every warp tile.
    static constexpr bool many_pay =
        Rows4 == 1 && (keys::mixed || slot_bytes <= 3072 || (keys::has_byte_params && tokens <= 64));
    /// One large thread block per multiprocessor leaves the fewest partial states and shares the work of an
    /// item best. Two units per warp are under way instead of three where memory is short, then warps take
    /// turns with the output.
    static constexpr size chosen = [] {
        for (const int warps : {many_pay ? 12 : 8, 8, 4})
            for (const int parts : {4, 2, 1})
                for (const int slot_count : {3, 2})
                    if (takes_teams<Rows4, Bands>(warps, parts) &&
                        size{warps, slot_count, parts}.bytes() <= budget_on<Pair, Small>)
                        return size{warps, slot_count, parts};
        return size{4, 2, Bands > 2 ? 1 : 2};
    }();
    static constexpr int warps = chosen.warps, slot_count = chosen.slot_count;
    // Of a warp: its ring, then its weights, scratch and notes.
    static constexpr int ring_bytes = slot_count * slot_bytes, weights_at = ring_bytes,
                         scratch_at = weights_at + weight_bytes, part_bytes = scratch_at + scratch_bytes;
    static constexpr int most_teams = chosen.parts;  // of a block
    /// The end of an item, with masks for its last tokens, takes as long as so many warp tiles (measured with
    /// ragged batches).
    static constexpr int end_warp_tiles = Rows4 == 4 ? 24 : 16;
    static constexpr int threads = warps * warp_size, team_threads = threads / most_teams;
    static constexpr int warp_bytes = chosen.warp_bytes(), output_bytes = chosen.output_bytes(),
                         bytes = chosen.bytes();
    /// Thread blocks per multiprocessor: what registers (at most 128 to 255 per thread) and memory allow.
    static constexpr int blocks = larger(
        1, smaller((Rows4 == 1 ? 12 : 8) / warps,
                   (most_shared_memory<Small> + reserved_shared_memory) / (bytes + reserved_shared_memory)));
    /// Of one partial state in the workspace.
    static constexpr int partial_words = rows * (Pair::value_dim + 2);
};

/// Why a warp tile of so many tokens does not fit; null: it does.
template <class Pair, int Tokens>
inline constexpr const char* no_warp_tile = warp_tile<tensor::key, Pair, Tokens>::no_tile != nullptr
                                                ? warp_tile<tensor::key, Pair, Tokens>::no_tile
                                                : warp_tile<tensor::value, Pair, Tokens>::no_tile;

/// Why the kernels of warps do not take this format, with 4 rows a thread block on the devices of most shared
/// memory; null: they do.
template <class Pair>
inline constexpr const char* no_warps = []() -> const char* {
    if constexpr ((read_by_numbers<typename Pair::keys> && !token_row_scheme<typename Pair::keys>) ||
                  (read_by_numbers<typename Pair::values> && !token_row_scheme<typename Pair::values>)) {
        return own_blocks;
    } else {
        constexpr int most = warp_tile_tokens<Pair, 1>(), fewest = warp_tile_tokens<Pair, 4>();
        if constexpr (no_warp_tile<Pair, most> != nullptr)
            return no_warp_tile<Pair, most>;
        else if constexpr (no_warp_tile<Pair, fewest> != nullptr)
            return no_warp_tile<Pair, fewest>;
        else
            return attention_memory<Pair, 1>::bytes <= most_shared_memory<false>
                       ? nullptr
                       : "warps' units of pages need more shared memory than a thread block has";
    }
}();
template <class Pair>
inline constexpr bool warps_can = no_warps<Pair> == nullptr;

}  // namespace detail
}}}  // namespace kvq::cuda
