// The fused attention kernel: every warp walks its warp tiles with tensor cores and its own ring of
// asynchronous copies.
//
//   warp:   K warp tile -> scores -> weights -> V warp tile -> output, while the next two or three units are
//           on their way
//   team:   all 4, 8 or 12 warps of a block, or a half or a quarter of them, share an item; their softmax
//           states are merged in shared memory, in the order of the warps
//   grid:
//     as many blocks as fit; an item that spans teams is merged by the team with its last part (same launch)
//
// Nothing is dequantized to memory, warps wait for each other only at the end of an item, and copies run on
// across items.
// Contract: error against double arithmetic on the dequantized values below 2e-3 (measured:
// docs/reference/gpu_kernels.md); deterministic for a given grid. Instantiated once per (format, type of q,
// 4, 8 or 16 query rows), for one or two sizes of shared memory.
// Source: split keys with a merge, Flash-Decoding; shares of equal size over ragged work: stream-K, arXiv
// 2301.03598.
#pragma once

#include "score_modifiers.cuh"
#include "unit_feed.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda { namespace detail {

/// A warp's warp tiles of an item: those at index, index + feed.stride, ... before to_warp_tile, counted from
/// warp tile first_warp_tile of the sequence. The ring holds the first ones, the next unit is in `slot`.
/// item: in shared memory, where it costs no registers.
template <class memory, int Rows4, class Pair, class T, class Feed, class Score>
__device__ __forceinline__ void attend_warp_tiles(const attention_args<Pair, T>& a, Feed& feed,
                                                  typename memory::state& state, int& slot,
                                                  int first_warp_tile, int index, int to_warp_tile,
                                                  const item_part* item, const warp_memory& at_warp,
                                                  const Score& score, const lane_id& id) {
    using keys = typename memory::keys;
    using values = typename memory::values;
    constexpr int rows = memory::rows;
    const std::uint32_t query_at = at_warp.query;
    // Into the slot of a used unit of keys goes one of values, or keys again, depending on the number of
    // slots.
    constexpr bool turns = memory::slot_count % 2 == 1;
    constexpr std::integral_constant<tensor, turns ? tensor::value : tensor::key> after_keys;
    constexpr std::integral_constant<tensor, turns ? tensor::key : tensor::value> after_values;
    const auto next_unit = [&](auto role) {
        __syncwarp();
        feed.template issue<decltype(role)::value>(at_warp.ring, slot, id.lane);
        slot = slot + 1 == memory::slot_count ? 0 : slot + 1;
    };
    const auto wait_unit = [&] {
        copy_wait<memory::slot_count - 1>();
        __syncwarp();
        std::uint32_t at = at_warp.ring + static_cast<std::uint32_t>(slot * memory::slot_bytes);
        if constexpr (keys::skewed || values::skewed) at += (feed.skews >> 4 * slot & 7u) * 16u;
        return at;
    };
    span seen_by_all = seen_tokens<Pair, T>(a, *item, rows, 0, feed).common;
    // Warp tiles before it are looked at again (page_cuts.cuh).
    if constexpr (Feed::reads_cuts && !Feed::reads_sinks)
        seen_by_all.begin = larger(seen_by_all.begin, feed.cut_end());
    if constexpr (takes_trees<Rows4>)
        if (a.ancestors != nullptr)
            seen_by_all.end = smaller(seen_by_all.end, a.draft_begin(a.work.tokens[item->sequence]));
    const head_keys<keys, Rows4> key_head(at_warp.scratch, a.cache.key_plan(item->sequence, item->kv_head),
                                          id);
    const query_of<keys, Rows4, T> row_query(query_at, memory::query_stride, a.scale, id);
    folded_row<keys> folded[Rows4];
    if constexpr (fold_once<keys>)
        fold_rows(folded, query_at, memory::query_stride, 0, 0, 0, row_query, id, at_warp.order);

    // The warp tile at hand: step of the item, warp tile of the step; its keys; its first token, in the
    // sequence and in its page.
    int in_step = 0;
    std::uint32_t at;
    int first, in_page;
    bool present, masked, plain;
    int held_begin = 0, held_end = memory::tokens;  // its tokens whose pages are there
    const auto look = [&] {
        at = wait_unit();
        present = ((feed.present >> slot) & 1u) != 0;  // held in this format
        first = (first_warp_tile + index) * memory::step_tokens + in_step * memory::tokens;
        in_page = first % keys::page;
        if constexpr (keys::joined) {
            const unsigned there = feed.halves >> 2 * slot & 3u;
            held_begin = there == 2 ? Pair::page_tokens : 0;
            held_end = there == 1 ? Pair::page_tokens : memory::tokens;
        }
        if constexpr (Feed::reads_sinks) {
            held_end = memory::tokens;
            if (feed.is_of_sinks(index)) [[unlikely]] {
                first = index * memory::tokens - a.cache.first_token;
                held_end = smaller(memory::tokens, -first);
            }
        }
        masked = first + memory::tokens > seen_by_all.end || first < seen_by_all.begin ||
                 held_end - held_begin < memory::tokens;
        plain = !has_score<Score> && present && !masked && !(a.softcap > 0.0f);
    };
    // Does the warp tile hold sinks? Rows see sinks through any window.
    const auto sees_sinks = [&] { return Feed::reads_sinks && a.window_sinks && first < 0; };
    // What the warp tile shows, unless it shows all. Looked up wherever it is needed: registers are few.
    const auto shown_here = [&] {
        int shift = 0;
        if constexpr (Feed::reads_sinks)
            shift = feed.shift_of_full(first);
        else if constexpr (Feed::reads_cuts)
            if (first < feed.cut_end()) [[unlikely]]
                return feed.shown(first, id);
        return shown_tokens{0, memory::tokens, shift};
    };
    // Once for warp tiles that every row sees all of, and once for others: branches around what is rare would
    // cut the instructions of the first loop into parts. Windows have few warp_tiles: for them less code
    // counts more.
    const auto handle = [&](auto kind) {
        constexpr bool rare = decltype(kind)::value;
        if constexpr (Feed::reads_cuts && !keys::joined && !Feed::reads_sinks) {
            if (rare && masked && first < feed.cut_end()) [[unlikely]] {
                const shown_tokens shown = shown_here();
                const seen_tokens<Pair, T> seen(a, *item, rows, shown.shift, feed);
                present = present && shown.begin < shown.end && first + memory::tokens > seen.any.begin;
                masked = shown.end - shown.begin < memory::tokens || first < seen.common.begin ||
                         first + memory::tokens > seen.common.end;
            }
        }
        float scores[keys::tiles][Rows4][4];
        warp_tile_factors<values, Rows4> factors;
        if (!rare || present) {
            float unit = 1.0f;
            if constexpr (reads_rows<keys>) {
                unit = keys::prepare(at, id, tensor_scale<tensor::key>(a.cache));
                __syncwarp();
            }
            score_warp_tile(scores, folded, query_at, memory::query_stride, at, in_page,
                            memory::warp_tiles_of_step == 1 || in_step == 0, key_head, row_query, id);
            scale_scores<keys, Rows4>(scores, at, id, unit);
            add_bands<memory::bands>(scores,
                                     at_warp.ring + static_cast<std::uint32_t>(slot * memory::slot_bytes),
                                     at_warp.band, id);
            if constexpr (rare) {
                if (a.softcap > 0.0f) {
#pragma unroll
                    for (int i = 0; i < keys::tiles * Rows4 * 4; ++i) {
                        float& s = scores[i / (4 * Rows4)][i / 4 % Rows4][i % 4];
                        s = capped(s, a.softcap);
                    }
                }
                if constexpr (has_score<Score>)
                    modify_scores<keys, Rows4>(scores, a, score, *item, first, feed.skipped(),
                                               shown_here().shift, id);
                if (masked) {
                    const shown_tokens shown = shown_here();
                    const seen_tokens<Pair, T> seen(a, *item, rows, shown.shift, feed);
#pragma unroll
                    for (int n = 0; n < Rows4; ++n) {
                        const int row = seen.first_row + lane_row<Rows4>(n, id.t);
                        const span of_row = seen.of(a, row, feed);
                        const int begin = larger(sees_sinks() ? first : of_row.begin,
                                                 first + larger(held_begin, shown.begin)),
                                  end = smaller(of_row.end, first + smaller(held_end, shown.end));
#pragma unroll
                        for (int tile = 0; tile < keys::tiles; ++tile)
#pragma unroll
                            for (int r = 0; r < 4; ++r) {
                                const int token = first + tile * keys::tile_height + 4 * id.g + r;
                                if (token < begin || token >= end) scores[tile][n][r] = -INFINITY;
                            }
                    }
                    if constexpr (takes_trees<Rows4>) {
                        if (a.ancestors != nullptr) [[unlikely]]
                            hide_scores<keys, Rows4>(scores, a, item, first, shown.shift, feed.skipped());
                    }
                }
            }
            soften<keys, values, Rows4>(scores, state, factors, id);
            wait_for_bands<memory::bands>(at_warp.band);
        }
        next_unit(after_keys);
        const std::uint32_t value_at = wait_unit();
        if (!rare || present) {
            if (rare && masked) {  // what tokens outside hold may be anything, even NaN
                const shown_tokens shown = shown_here();
                int shift = shown.shift;
                if constexpr (Feed::reads_cuts && keys::joined) shift = feed.shift_of_full(first);
                const span any = seen_tokens<Pair, T>(a, *item, rows, shift, feed).any;
                int from = larger(sees_sinks() ? 0 : any.begin - first, held_begin),
                    to = smaller(any.end - first, held_end);
                if constexpr (Feed::reads_cuts && keys::joined) {
                    // `shown` is that of the lane's page. Quantized pages are full, and hold finite numbers.
                    if (!values::full && first < feed.cut_end()) from = held_begin, to = held_end;
                } else if constexpr (Feed::reads_cuts && !Feed::reads_sinks) {
                    from = larger(from, shown.begin);
                    to = smaller(to, shown.end);
                }
                if constexpr (values::full)
                    values::clear_columns(value_at, id, from, to);
                else if constexpr (values::clears_parameters)
                    values::clear_parameters(value_at, id, from, to);
                __syncwarp();
            }
            store_weights<keys, values, Rows4>(scores, state, factors, value_at, at_warp.weights, id);
            if constexpr (reads_rows<values>) {
                const float factor = values::prepare(value_at, id, tensor_scale<tensor::value>(a.cache));
#pragma unroll
                for (int n = 0; n < Rows4; ++n) factors.step[0][n] *= factor;
            }
            __syncwarp();
            add_values<values, Rows4>(state, factors, value_at, in_page, at_warp.weights, id);
        }
    };
    bool more = index < to_warp_tile;
    const auto advance = [&] {
        next_unit(after_values);
        if (++in_step == memory::warp_tiles_of_step) {
            in_step = 0;
            index += feed.stride;
        }
        more = index < to_warp_tile;
        if (more) look();
    };
    if (more) look();
    while (more) {
        while (!Feed::reads_sinks && more && plain) {
            handle(std::false_type{});
            advance();
        }
        if (more) {
            handle(std::true_type{});
            advance();
        }
    }
}

/// Where the block table names the page of a warp's first warp tile, or null.
template <class Memory, class Pair, class T>
__device__ __forceinline__ const int* first_entry(const attention_args<Pair, T>& a,
                                                  const item_walk<Memory::step_tokens>& walk,
                                                  const warp_team& team) {
    const item_part& item = walk.item;
    const int index = item.from + team.taker(Memory::bands),
              column = (item.first + index) * Memory::step_tokens / Pair::page_tokens;
    if (walk.share_begin >= walk.share_end || index >= item.to || index >= item.real ||
        column >= a.cache.table_columns)
        return nullptr;
    return a.cache.block_table + a.cache.table_entry(item.sequence, column);
}

/// Asks for the page of a warp's first warp tile in the second-level cache while the previous launch still
/// runs. Whatever that launch writes arrives there as well, so this changes no result. What it finds in
/// lengths and tables may be out of date: then it asks in vain, for other pages or (where a launch that lets
/// its successor start early is just writing tables) for addresses that do not exist; such hints were seen to
/// be ignored.
template <class Memory, class Pair, class T>
__device__ __forceinline__ void prefetch_page(const attention_args<Pair, T>& a,
                                              const item_walk<Memory::step_tokens>& walk, const int* entry,
                                              const warp_team& team, int lane) {
    // Of the warps whose warp tiles share a page, the first one asks for all of it. More than one page a warp
    // took longer.
    const item_part& item = walk.item;
    const int taker = team.taker(Memory::bands);
    if (entry == nullptr || team.member % Memory::bands != 0 ||
        (taker > 0 && (item.first + item.from + taker) * Memory::step_tokens % Pair::page_tokens != 0))
        return;
    const int page = __ldcg(entry);
    if (page < 0 || is_strided<Pair>) return;
    prefetch_lines(a.cache.key_block(page, item.kv_head), static_cast<int>(Pair::key_block_bytes), lane);
    prefetch_lines(a.cache.value_block(page, item.kv_head), static_cast<int>(Pair::value_block_bytes), lane);
    if constexpr (has_lower<Pair>) {
        prefetch_lines(a.cache.template lower_block<tensor::key>(page, item.kv_head),
                       static_cast<int>(Pair::lower_key_bytes), lane);
        prefetch_lines(a.cache.template lower_block<tensor::value>(page, item.kv_head),
                       static_cast<int>(Pair::lower_value_bytes), lane);
    }
}

/// Sets `walk` to the team's share, and returns the team. Without `early` the share is found while the
/// previous launch runs out, and it stays what it is if the numbers that it was found from have not changed
/// since. found(): what the caller knows of the share is out of date. meanwhile(team): waits for the previous
/// launch; what it asks for comes while those numbers are looked at again. ring: of the warp, still empty.
template <class Memory, int Tokens, class Work, class Found, class Meanwhile>
__device__ __forceinline__ warp_team find_own_share(const Work& work, item_walk<Tokens, Work>& walk,
                                                    const item_shares& cut, bool early, int warp,
                                                    warp_notes* notes, std::byte* ring, const lane_id& id,
                                                    const Found& found, const Meanwhile& meanwhile) {
    const found_numbers numbers(ring, Memory::ring_bytes);
    for (bool waits = !early;; waits = false) {
        const batch_count count = count_warp_tiles<Tokens>(work, waits, numbers);
        const int split = split_block(walk, cut, count);
        const warp_team team(warp, Memory::warps, split);
        const share_plan plan = find_share(work, cut, team, team.takers(Memory::bands),
                                           Memory::end_warp_tiles >> split, count, walk, waits);
        if (id.lane == 0) notes->plan = plan;
        found();
        if (!waits) return team;
        meanwhile(team);
        if (numbers.hold(work, count)) return team;
    }
}

/// Where several teams have parts of the item, the first warp notes which.
__device__ __forceinline__ void note_span(warp_notes* notes, const warp_team& team, const item_part& item,
                                          const lane_id& id) {
    if (team.member == 0 && !item.is_whole()) {
        const share_span span = find_span(notes->plan, item);
        if (id.lane == 0) notes->span = span;
    }
}

/// Merges the rows of the team's warps, writes them or a partial state, and goes to the next item. state():
/// the warp's rows. store_query(team): of the next item. False: it was the share's last item.
template <class Memory, int Rows4, class Walk, class Query, class Pair, class T, class Score, class State,
          class StoreQuery>
__device__ __forceinline__ bool end_item(const attention_args<Pair, T>& a, const Score& score, Walk& walk,
                                         Query& query_part, warp_notes* notes, std::byte* shared,
                                         const warp_team& team, const lane_id& id, const State& state,
                                         const StoreQuery& store_query) {
    walk.fetch(&notes->reader);
    const item_part done = walk.item;
    const bool first_of_share = done.begin <= walk.share_begin;
    walk.next();
    const bool last = walk.done();
    walk.park(&notes->reader);
    const warp_team own = team;
    const team_memory common = team_memory::of<Memory>(shared, own);
    if (!last) [[unlikely]]
        query_part.fetch(a, walk.item, own);
    merge_warps<Memory, Rows4>(state(), common, own, id);
    if (done.is_whole())
        write_rows<Memory>(a, score, done, common, common.parts, own);
    else
        leave_part<Memory>(a, common, first_of_share, done, notes->span, own);
    if constexpr (exchanges<Score>) note_rows<Memory>(a, score, done, *common.later, own);
    own.wait();
    if (last) return false;
    store_query(own);
    return true;
}

template <class Memory, class Pair, class T, class Score>
__device__ __forceinline__ void end_share(const attention_args<Pair, T>& a, const Score& score,
                                          const warp_notes* notes, std::byte* shared) {
    const warp_team own = notes->team;
    const team_memory common = team_memory::of<Memory>(shared, own);
    if (common.later->pending) merge_parts<Memory>(a, score, common, own);
    if constexpr (exchanges<Score>) merge_sent_rows(a, score, *common.later, own);
}

template <class Pair, class T, int Rows4, bool Small, class Score>
__global__ void __launch_bounds__((attention_memory<Pair, Rows4, Small>::threads),
                                  attention_memory<Pair, Rows4, Small>::blocks)
    attend_warps_kernel(const __grid_constant__ attention_args<Pair, T> a,
                        const __grid_constant__ Score score) {
    if constexpr (never_taken<Small, budget_on<Pair, false>>) return;
    using memory = attention_memory<Pair, Rows4, Small>;
    extern __shared__ __align__(128) std::byte shared[];
    launch_dependents();
    const lane_id id;
    // The shuffle tells the compiler that all lanes have the same number.
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / warp_size, 0);

    std::byte* const warp_memory = shared + warp * memory::warp_bytes;
    const std::uint32_t ring = shared_address(warp_memory);
    const std::uint32_t weights = ring + memory::weights_at, scratch = ring + memory::scratch_at;
    warp_notes* const notes =
        reinterpret_cast<warp_notes*>(warp_memory + memory::warp_bytes - memory::notes_bytes);
    // Weights of units that no token fills stay zero.
#pragma unroll 1
    for (int i = id.lane; i < memory::weight_bytes / 4; i += warp_size)
        store_word(weights + 4u * static_cast<std::uint32_t>(i), 0);
    query_rows<memory, Pair, T> query_part;
    bool asked = false;  // for the query of the first item
    item_walk<memory::step_tokens> walk(a.work);
    const int* entry = nullptr;  // of the first page, and what it says
    int first_page = -1;
    const warp_team team = find_own_share<memory>(
        a.work, walk, a.cut, a.early, warp, notes, warp_memory, id,
        [&] {
            entry = nullptr;
            asked = false;
        },
        [&](const warp_team& of_share) {
            entry = first_entry<memory>(a, walk, of_share);
            // Thread blocks take their places in the order of their numbers, the second half hardly before
            // the previous launch has ended: these would only start later, by the time that the page number
            // takes to come.
            if (2 * blockIdx.x < gridDim.x)
                prefetch_page<memory>(a, walk, entry, of_share, id.lane);
            else if (entry != nullptr)
                prefetch_line(entry);
            wait_for_predecessor();
            if (entry != nullptr) first_page = __ldcg(entry);
            asked = walk.share_begin < walk.share_end;
            if (asked) query_part.fetch(a, walk.item, of_share);
        });
    if (walk.share_begin >= walk.share_end) return;
    if (id.lane == 0) notes->team = team;
    __syncwarp();
    float* const query = team_memory::of<memory>(shared, team).output;
    if (team.thread() == 0) team_memory::of<memory>(shared, team).later->clear();

    unit_feed<memory, Pair, T> feed(a, walk, team, notes, entry, first_page);
    walk.park(&notes->reader);
    if (a.early) {  // the warp's first two warp tiles may hold tokens that are just being written
        const int last = walk.item.from + team.taker(memory::bands) + team.takers(memory::bands);
        if (last >= walk.item.to || (walk.item.first + last + 1) * memory::step_tokens >
                                        a.work.end(walk.item.sequence) - a.work.query_tokens)
            wait_for_predecessor();
    }
    // One unit is on its way until it is there: more would keep warps from the barrier behind the query,
    // since copies that memory has no room for stop the warp that asks, and would hold up the first units of
    // others. The second half of the warps starts behind that barrier, so that the two warps of a scheduler
    // are not busy with the same all the time. With `early` there is time for all.
    const auto issue_units = [&](auto wanted) {
#pragma unroll
        for (int i = 0; i < memory::slot_count; ++i) {
            if (!wanted(i)) continue;
            if (i % 2 == 0)
                feed.template issue<tensor::key>(ring, i, id.lane);
            else
                feed.template issue<tensor::value>(ring, i, id.lane);
        }
    };
    const bool starts_later = 2 * warp >= memory::warps && !a.early;
    issue_units([&](int i) { return (i == 0 && !starts_later) || a.early; });
    if (a.early) wait_for_predecessor();
    if (!asked) query_part.fetch(a, walk.item, team);
    int slot = 0;
    const auto store_query = [&](const warp_team& of_team) {
        const unsigned bad = __reduce_or_sync(
            ~0u, query_part.store(query, a.scale, a.cache.key_plan(walk.item.sequence, walk.item.kv_head),
                                  of_team));
        if (id.lane == 0) team_memory::of<memory>(shared, of_team).warp_bad[of_team.member] = bad;
        of_team.wait();
        turn_query_rows<memory>(query, a.cache, walk.item.sequence, walk.item.kv_head, of_team);
    };
    store_query(team);
    if (!a.early) {
        issue_units([&](int i) { return i == 0 && starts_later; });
        copy_wait<0>();
        issue_units([](int i) { return i > 0; });
    }
    while (true) {
        walk.fetch(&notes->reader);
        const item_part item = walk.item;
        note_span(notes, notes->team, item,
                  id);  // while the first units are on their way: it takes a few divisions
        typename memory::state state;
        state.clear();
        const auto band = band_place::of<memory>(warp);
        attend_warp_tiles<memory, Rows4>(
            a, feed, state, slot, item.first, item.from + notes->team.taker(memory::bands), item.to,
            &notes->reader.item,
            {ring, weights, scratch, shared_address(query + band.band * memory::query_floats), nullptr, band},
            score, id);

        if (!end_item<memory, Rows4>(
                a, score, walk, query_part, notes, shared, notes->team, id,
                [&] { return restored(state.finished(), a, item.kv_head); }, store_query))
            break;
    }
    copy_wait<0>();
    end_share<memory>(a, score, notes, shared);
}

}  // namespace detail
}}}  // namespace kvq::cuda
