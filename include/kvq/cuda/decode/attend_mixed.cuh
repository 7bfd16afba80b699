// Fused attention over pages of several formats in one launch: sinks, quantized pages and recent window of
// every sequence.
//
//   line     the warp tiles of an item: those of its first part, then those of the second, ...
//            (mixed_cache.cuh), measured in units of about 1 KB; shares are cut as in schedule.cuh, wherever
//            parts begin. A warp tile belongs to who has its first unit
//   warp     has a part of its team's share: mostly warp tiles of one format, so that warps of a block fetch
//            the instructions of all formats at the same time. attend_part, one function per format, has a
//            ring of its own in the same shared memory and leaves finished rows, which are added up: they do
//            not depend on the format
//   team     merged as in merge.cuh
//
// Sinks in pages of 16 tokens are the window's first warp tiles, two pages each. New tokens may come with the
// launch: the warp that has their warp tile stores them before it copies that. attend_part as a function
// that mixes share would read a launch's parameters through memory: 5 to 20 % slower
// (docs/lab/gpu_experiments.md).
// Contract: as attend_warps.cuh.
#pragma once

#include "../layout/mixed_cache.cuh"
#include "../layout/window_copy.cuh"
#include "../store/store_new_tokens.cuh"
#include "attend_warps.cuh"
#include "mixed_memory.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda { namespace detail {

/// Does a part of this format read sinks as well, as warp tiles of a window in the same 16-bit format?
template <class Pair>
inline constexpr bool reads_sinks = copies_windows<Pair>&& warp_tile_tokens<Pair, 1>() == 32 &&
                                    warp_tile_tokens<Pair, 2>() == 32 && warp_tile_tokens<Pair, 4>() == 32;
template <class Pair, bool Reads = reads_sinks<Pair>>
struct own_sinks {
    cache_ref<sink_pair<Pair>> cache;  // no sequences: no sinks
};
template <class Pair>
struct own_sinks<Pair, false> {};

/// A part as kernels see it. `a` has what is common to all parts as well.
template <class Pair, class T>
struct part_args {
    using pair_type = Pair;
    attention_args<Pair, T> a;
    page_range range;
    int recent;
    const int *first_page, *end_page;
    int sink_tokens;  // that the part reads besides
    own_sinks<Pair> sinks;

    /// Warp tiles of a sequence: `sinks` of sinks, then those from number `first` on; `count` in all. Pages
    /// outside [first_page, end_page) are not of this part.
    struct warp_tile_range {
        int first, count, sinks;
        int first_page, end_page;
    };
    /// skipped: tokens of the sequence that no span shows, if there is a sliding window.
    template <int Tokens>
    __device__ __forceinline__ warp_tile_range warp_tiles(int b, int length, int skipped) const {
        constexpr int page = Pair::page_tokens;
        const int behind_sinks = length - a.work.first_token;
        int end = smaller(behind_sinks, a.work.capacity), from = 0,
            until = kvq::detail::ceil_div(larger(end, 0), page);
        if (range != page_range::all) {
            const int committed = committed_pages(behind_sinks, recent, page);
            if (range == page_range::window)
                from = committed;
            else
                until = smaller(until, committed);
        }
        if (first_page != nullptr) from = larger(from, __ldcg(first_page + b));
        if (end_page != nullptr) until = smaller(until, __ldcg(end_page + b));
        end = smaller(end, until * page);
        const int seen_from = a.begin_at(length - a.work.oldest, skipped, skipped_tokens{skipped});
        const int first = larger(larger(seen_from, 0), from * page) / Tokens;
        int of_sinks = 0;
        if constexpr (reads_sinks<Pair>)
            if (sink_tokens > 0 && (a.window_sinks || seen_from < 0))
                of_sinks = kvq::detail::ceil_div(larger(smaller(sink_tokens, length), 0), Tokens);
        const int count = larger(0, kvq::detail::ceil_div(larger(end, 0), Tokens) - first);
        return {first, of_sinks + count, of_sinks, from, until};
    }
    /// Where the table names a page.
    __device__ __forceinline__ const int* entry(int sequence, int page) const {
        const int column = range == page_range::window ? page % a.cache.table_columns : page;
        return a.cache.block_table + a.cache.table_entry(sequence, column);
    }
};

/// The first part's arguments say what is common to all.
template <class T, class... Pairs>
struct mixed_args {
    page_cuts cuts;
    /// [sequences]: tokens that are not shown. Null: none, or there is no sliding window. (To search for the
    /// window's first page would make the kernel a sixth longer; so it reads at most this many tokens more,
    /// and skips them.)
    const int* skipped;
    new_token_rows<T> stored;  // by this launch; without keys: none
    object_list<part_args<Pairs, T>...> parts;
};

/// Units of all parts of a sequence.
template <int Rows4, bool Small, class T, class... Pairs>
__device__ __forceinline__ int count_units(const mixed_args<T, Pairs...>& m, int b, int length) {
    using memory = mixed_memory<Rows4, Small, Pairs...>;
    const int skipped = m.skipped == nullptr ? 0 : __ldcg(m.skipped + b);
    int count = 0;
    static_for<static_cast<int>(sizeof...(Pairs))>([&](auto i) {
        const auto& part = get<decltype(i)::value>(m.parts);
        using pair = typename std::remove_cvref_t<decltype(part)>::pair_type;
        const auto warp_tiles =
            part.template warp_tiles<memory::template of<pair>::step_tokens>(b, length, skipped);
        if (warp_tiles.count > 0)
            count += memory::template start_of<pair>(warp_tiles.sinks) +
                     warp_tiles.count * memory::template units<pair>;
    });
    return count;
}

/// What the schedule must know.
template <int Rows4, bool Small, class T, class... Pairs>
struct mixed_work {
    const mixed_args<T, Pairs...>& args;
    int sequences, lines, row_blocks;

    __device__ __forceinline__ explicit mixed_work(const mixed_args<T, Pairs...>& m) : args(m) {
        const work_shape& work = get<0>(m.parts).a.work;
        sequences = work.sequences;
        lines = work.lines;
        row_blocks = work.row_blocks;
    }
    __device__ __forceinline__ int length(int b, bool hint) const {
        return get<0>(args.parts).a.work.length(b, hint);
    }
    template <class F>
    __device__ __forceinline__ void for_each_other(int b, F&& f) const {
        const auto call = [&](const int* numbers) {
            if (numbers != nullptr) f(__ldcg(numbers + b));
        };
        call(args.skipped);
        static_for<static_cast<int>(sizeof...(Pairs))>([&](auto i) {
            const auto& part = get<decltype(i)::value>(args.parts);
            call(part.first_page);
            call(part.end_page);
        });
    }
    template <int>
    __device__ __forceinline__ work_shape::span warp_tiles(int b, int of_length) const {
        const int count = count_units<Rows4, Small>(args, b, of_length);
        return {0, larger(1, count), count};
    }
};

/// A warp's warp tiles of one part: those from `index` up to `to`, `sinks` of which are warp tiles of sinks
/// (of the part: numbers 0, 1, ...); the next one is warp tile `first` of the sequence.
struct part_job {
    int first, index, to, sinks;
    int first_page, end_page;
    const item_part* item;    // in shared memory
    const sequence_cut* cut;  // likewise
    const page_cuts& cuts;
    warp_memory at;
};

/// Feeds a warp's ring with the units of such warp tiles. Page numbers are fetched a warp tile ahead.
template <class Memory, class Pair, class T>
struct part_feed : unit_ring<Memory, Pair, T> {
    using base = unit_ring<Memory, Pair, T>;
    using base::a, base::page, base::first, base::head, base::second;
    using typename base::keys;
    static constexpr bool reads_sinks = detail::reads_sinks<Pair>, reads_cuts = true;
    static constexpr int stride = 1;
    const part_args<Pair, T>& part;
    const part_job& job;
    int index;     // of the warp tile that follows the current one
    int sequence;  // of tables with a row for every kv head: this row
    int next_page = -1, next_second = -1, next_first = 0;
    bool of_sinks = false, next_of_sinks = false;
    int left = 0;  // warp tiles of its step that follow the current one

    __device__ __forceinline__ part_feed(const part_args<Pair, T>& args, const part_job& jobs)
        : base(args.a),
          part(args),
          job(jobs),
          index(jobs.index - 1),
          sequence(args.a.cache.table_row(jobs.item->sequence, jobs.item->kv_head)) {
        this->band = job.at.band.band, head = job.item->kv_head;
        if constexpr (keys::mixed) this->key_head = keys::head_of(a.cache.key_plan(job.item->sequence, head));
#pragma unroll 1
        for (int i = 0; i < 2; ++i) step();
        left = Memory::warp_tiles_of_step - 1;
    }
    /// Starts the next unit's copy into `slot` of the ring at `ring`.
    template <tensor Role>
    __device__ __forceinline__ void issue(std::uint32_t ring, int slot, int lane) {
        if constexpr (reads_sinks)
            copy_full<Role>(ring, slot, lane);
        else
            this->template copy_unit<Role>(ring, slot, lane);
        if constexpr (Role == tensor::value) advance();
    }
    /// Is the warp tile with this number one of sinks?
    __device__ __forceinline__ bool is_of_sinks(int number) const {
        return reads_sinks && number < job.sinks;
    }
    /// Where the sequence's pages that are cut end, counted from the format's first token.
    __device__ __forceinline__ int cut_end() const { return cut().end - a.cache.first_token; }
    __device__ __forceinline__ int skipped() const { return cut().skipped; }
    /// Of 16-bit pages: sinks, or pages behind cut_end().
    __device__ __forceinline__ int shift_of_full(int token) const {
        if constexpr (reads_sinks) return token < 0 ? skipped() : 0;
        return token + a.cache.first_token < job.cuts.first_token ? skipped() : 0;
    }
    /// What the warp tile at `token`, before cut_end(), shows. Of a warp tile of two pages: what the page
    /// shows of which the lane has scores.
    __device__ __forceinline__ shown_tokens shown(int token, const lane_id& id) const {
        constexpr int count = smaller(Memory::tokens, Pair::page_tokens);
        const int half = keys::joined && 4 * id.g >= count ? count : 0;
        shown_tokens s = call_shown_at(job.cuts, sequence, cut(), token + half + a.cache.first_token, count);
        s.begin += half;
        s.end += half;
        return s;
    }

private:
    __device__ __forceinline__ const sequence_cut& cut() const { return *job.cut; }
    template <tensor Role>
    __device__ __forceinline__ void copy_full(std::uint32_t ring, int slot, int lane) {
        const bool there = page >= 0 || second >= 0;
        this->present = there ? this->present | 1u << slot : this->present & ~(1u << slot);
        const std::uint32_t to = ring + static_cast<std::uint32_t>(slot * Memory::slot_bytes);
        if (of_sinks) [[unlikely]] {
            const auto block = [&](int number) -> const std::byte* {
                return number < 0 ? nullptr : part.sinks.cache.template block<Role>(number, head);
            };
            copy_sinks<Role, Pair, Memory::bands>(to, block(page), block(second), lane, this->band);
        } else if (there) {
            copy_window<Role, Pair, Memory::bands>(to, a.cache.template block<Role>(page, head), first, lane,
                                                   this->band);
        }
        copy_commit();
    }
    __device__ __forceinline__ void advance() {
        if (Memory::warp_tiles_of_step > 1 && left > 0) {
            --left;
            first += Memory::tokens;
            return;
        }
        left = Memory::warp_tiles_of_step - 1;
        step();
    }
    __device__ __forceinline__ void step() {
        page = next_page;
        second = next_second;
        first = next_first;
        of_sinks = next_of_sinks;
        ++index;
        next_page = next_second = -1;
        next_of_sinks = false;
        if (index >= job.to) return;
        if constexpr (reads_sinks)
            if (index < job.sinks) {
                const auto& cache = part.sinks.cache;
                const int* const entry = cache.block_table + cache.table_entry(sequence, 2 * index);
                next_of_sinks = true;
                next_page = __ldg(entry);
                if (32 * index + 16 < part.sink_tokens) next_second = __ldg(entry + 1);
                return;
            }
        const int token = (job.first + index - job.sinks) * Memory::step_tokens;
        const int number = token / Pair::page_tokens;
        if constexpr (keys::joined) {
            if (number >= job.first_page) next_page = __ldg(part.entry(sequence, number));
            if (number + 1 < job.end_page) next_second = __ldg(part.entry(sequence, number + 1));
        } else {
            next_page = __ldg(part.entry(sequence, number));
            next_first = token % Pair::page_tokens;
        }
    }
};

/// Stores the new tokens that lie in a warp's warp tiles of sinks and window. Where several warps have the
/// same ones (row blocks, bands), all store the same bytes. All lanes.
template <int Tokens, class Pair, class T>
__device__ __forceinline__ void store_own_tokens(const part_args<Pair, T>& part, const part_job& job,
                                                 const new_token_rows<T>& rows) {
    const item_part& item = *job.item;
    const cache_ref<Pair>& window = part.a.cache;
    const int first_position = window.tokens[item.sequence] - rows.count, head = item.kv_head;
#pragma unroll 1
    for (int i = 0; i < rows.count; ++i) {
        const int position = first_position + i, behind_sinks = position - window.first_token;
        const bool of_sinks = behind_sinks < 0;
        const int warp_tile = of_sinks ? position / Tokens : behind_sinks / Tokens - job.first + job.sinks;
        if (position < 0 || warp_tile < job.index || warp_tile >= job.to ||
            of_sinks != (warp_tile < job.sinks))
            continue;
        const store_place place = find_place(window, part.sinks.cache, item.sequence, position);
        if (place.page < 0) continue;
        const auto store_in = [&]<class Pages>(const cache_ref<Pages>& cache) {
            const int token = item.sequence * rows.count + i;
            return store_key_and_value<Pages>(rows.k.at(token, head), rows.v.at(token, head),
                                              cache.key_block(place.page, head),
                                              cache.value_block(place.page, head), place.slot);
        };
        const unsigned bad = of_sinks ? store_in(part.sinks.cache) : store_in(window);
        if (bad != 0 && rows.not_finite != nullptr && item.row_block == 0 && job.at.band.band == 0)
            atomicAdd(rows.not_finite, bad);
    }
    __syncwarp();
}

/// A warp's warp tiles of one part; their sums are added to `rows`. stored: new tokens that come with the
/// launch.
template <class memory, class Pair, class T, int Rows4, class Score>
__device__ __forceinline__ void attend_part(const part_args<Pair, T>& part, const part_job& job,
                                            const new_token_rows<T>& stored, const Score& score,
                                            finished_rows<memory::values::tiles, Rows4>& rows) {
    const lane_id id;
    __syncwarp();
    if constexpr (reads_sinks<Pair>)
        if (stored.k.data != nullptr && part.range == page_range::window)
            store_own_tokens<memory::tokens>(part, job, stored);
    part_feed<memory, Pair, T> feed(part, job);
#pragma unroll 1
    for (int i = 0; i < memory::slot_count; ++i) {
        if (i % 2 == 0)
            feed.template issue<tensor::key>(job.at.ring, i, id.lane);
        else
            feed.template issue<tensor::value>(job.at.ring, i, id.lane);
    }
    // Weights of units that no token fills stay zero.
#pragma unroll 1
    for (int i = id.lane; i < memory::weight_bytes / 4; i += warp_size)
        store_word(job.at.weights + 4u * static_cast<std::uint32_t>(i), 0);
    typename memory::state state;
    state.clear();
    int slot = 0;
    attend_warp_tiles<memory, Rows4>(part.a, feed, state, slot, job.first - job.sinks, job.index, job.to,
                                     job.item, job.at, score, id);
    copy_wait<0>();
    __syncwarp();
    rows.add(restored(state.finished(), part.a, job.item->kv_head));
}

/// A warp's share of its team's part of an item: units [begin, end) of the item. Where the last format begins
/// within it (`last`), warps of the team have warp tiles of that format only or none of it, if that makes no
/// share much longer than equal ones: instructions and the ring's first warp tile would be waited for twice.
struct warp_share {
    int begin, end;

    __device__ __forceinline__ warp_share(const item_part& item, const warp_team& team, int bands, int last) {
        const int share = item.to - item.from, before = larger(0, last - item.from),
                  behind = item.to - kvq::detail::larger(last, item.from);
        begin = item.from, end = item.to;
        // Warps 4 apart have the same scheduler. The later teams of a block count their warps from the last
        // one: otherwise two of four schedulers would have the windows of all teams, which take fewer
        // instructions.
        int warps = team.takers(bands), member = team.taker(bands);
        if (team.index * team.warps % 8 >= 4) member = warps - 1 - member;
        if (before > 0 && behind > 0 && warps > 1) {
            const int others =
                kvq::detail::smaller(larger(1, divide(behind * warps + share / 2, share)), warps - 1);
            const int longest = larger(divide_up(before, warps - others), divide_up(behind, others));
            if (4 * longest * warps <= 5 * share) {
                if (member < warps - others) {
                    warps -= others;
                    end = last;
                } else {
                    member -= warps - others;
                    warps = others;
                    begin = last;
                }
            }
        }
        const int first = begin, count = end - begin;
        begin = first + divide(count * member, warps);
        end = first + divide(count * (member + 1), warps);
    }
};

/// Calls f(part, its number, warp tiles of the part, first one of the warp, one behind the last) for the
/// parts of which a warp has warp tiles.
template <int Rows4, bool Small, class T, class... Pairs, class F>
__device__ __forceinline__ void visit_parts(const mixed_args<T, Pairs...>& m, const item_part& item,
                                            const warp_team& team, int skipped, F&& f) {
    using memory = mixed_memory<Rows4, Small, Pairs...>;
    constexpr int parts = static_cast<int>(sizeof...(Pairs));
    const int length = get<0>(m.parts).a.work.tokens[item.sequence];
    object_list<typename part_args<Pairs, T>::warp_tile_range...> ranges;
    int part_begin[parts];  // where the first warp tile begins
    int before = 0;         // units of parts before
    int last_pair = 0;      // where the last part begins
    static_for<parts>([&](auto i) {
        constexpr int I = decltype(i)::value;
        const auto& part = get<I>(m.parts);
        using pair = typename std::remove_cvref_t<decltype(part)>::pair_type;
        auto& warp_tiles = get<I>(ranges);
        warp_tiles =
            part.template warp_tiles<memory::template of<pair>::step_tokens>(item.sequence, length, skipped);
        part_begin[I] = before + memory::template start_of<pair>(warp_tiles.sinks);
        if (warp_tiles.count > 0) before = part_begin[I] + warp_tiles.count * memory::template units<pair>;
        if (I + 1 < parts) last_pair = before;
    });
    const warp_share share(item, team, memory::bands, last_pair);
    static_for<parts>([&](auto i) {
        constexpr int I = decltype(i)::value;
        const auto& part = get<I>(m.parts);
        using pair = typename std::remove_cvref_t<decltype(part)>::pair_type;
        constexpr int units = memory::template units<pair>;
        const auto& warp_tiles = get<I>(ranges);
        const int from = ceil_div(larger(share.begin - part_begin[I], 0), units),
                  to = smaller(ceil_div(larger(share.end - part_begin[I], 0), units), warp_tiles.count);
        if (from < to) f(part, i, warp_tiles, from, to);
    });
}

template <int Rows4, bool Small, class T, class Score, class... Pairs>
__global__ void __maxnreg__((mixed_memory<Rows4, Small, Pairs...>::registers))
    attend_mixed_kernel(const __grid_constant__ mixed_args<T, Pairs...> m,
                        const __grid_constant__ Score score) {
    if constexpr (never_taken<Small, mixed_memory<1, false, Pairs...>::budget>) return;
    using memory = mixed_memory<Rows4, Small, Pairs...>;
    using work_type = mixed_work<Rows4, Small, T, Pairs...>;
    using first_pair = typename memory::first_pair;
    constexpr int parts = static_cast<int>(sizeof...(Pairs));
    extern __shared__ __align__(128) std::byte shared[];
    launch_dependents();
    const lane_id id;
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / warp_size, 0);
    std::byte* const own_memory = shared + warp * memory::warp_bytes;
    warp_notes* const notes =
        reinterpret_cast<warp_notes*>(own_memory + memory::warp_bytes - memory::notes_bytes);
    const auto& common_args = get<0>(m.parts).a;

    const work_type work(m);
    item_walk<1, work_type> walk(work);
    query_rows<memory, first_pair, T> query_part;
    bool asked = false;  // for the query of the first item
    const warp_team team = find_own_share<memory>(
        work, walk, common_args.cut, common_args.early, warp, notes, own_memory, id, [&] { asked = false; },
        [&](const warp_team& of_share) {
            wait_for_predecessor();
            asked = walk.share_begin < walk.share_end;
            if (asked) query_part.fetch(common_args, walk.item, of_share);
        });
    if (common_args.early) wait_for_predecessor();
    if (walk.share_begin >= walk.share_end) return;
    if (id.lane == 0) notes->team = team;
    __syncwarp();
    if (team.thread() == 0) team_memory::of<memory>(shared, team).later->clear();
    if (!asked) query_part.fetch(common_args, walk.item, team);
    walk.park(&notes->reader);

    const auto store_query = [&](const warp_team& of_team) {
        unsigned bad = 0;
        static_for<parts>([&](auto i) {
            constexpr int I = decltype(i)::value;
            if constexpr (I == memory::main_part || memory::places.of[I] > 0) {
                const auto& part = get<I>(m.parts);
                using pair = typename std::remove_cvref_t<decltype(part)>::pair_type;
                bad |= query_part.template store_for<typename memory::template of<pair>>(
                    memory::template query<I>(shared, of_team), part.a.scale,
                    part.a.cache.key_plan(walk.item.sequence, walk.item.kv_head), of_team);
            }
        });
        bad = __reduce_or_sync(~0u, bad);
        if (id.lane == 0) team_memory::of<memory>(shared, of_team).warp_bad[of_team.member] = bad;
        of_team.wait();
        static_for<parts>([&](auto i) {
            constexpr int I = decltype(i)::value;
            turn_query_rows<memory>(memory::template query<I>(shared, of_team), get<I>(m.parts).a.cache,
                                    walk.item.sequence, walk.item.kv_head, of_team);
        });
    };
    store_query(team);
    while (true) {
        walk.fetch(&notes->reader);
        const item_part item = walk.item;
        const warp_team own = notes->team;
        note_span(notes, own, item, id);
        finished_rows<memory::values::tiles, Rows4> rows;
        rows.clear();
        const std::uint32_t ring = shared_address(own_memory);
        const auto band = band_place::of<memory>(warp);
        const sequence_cut cut = cut_of(m.cuts, item.sequence);
        if (id.lane == 0) notes->cut = cut;  // attend_part begins with a barrier
        visit_parts<Rows4, Small>(
            m, item, own, cut.skipped,
            [&](const auto& part, auto i, const auto& warp_tiles, int from, int to) {
                using pair = typename std::remove_cvref_t<decltype(part)>::pair_type;
                using part_memory = typename memory::template of<pair>;
                const part_job job{warp_tiles.first,
                                   from,
                                   to,
                                   warp_tiles.sinks,
                                   warp_tiles.first_page,
                                   warp_tiles.end_page,
                                   &notes->reader.item,
                                   &notes->cut,
                                   m.cuts,
                                   {ring, ring + part_memory::weights_at, ring + part_memory::scratch_at,
                                    shared_address(memory::template query<decltype(i)::value>(shared, own) +
                                                   band.band * part_memory::query_floats),
                                    memory::order(m.parts, item.sequence, item.kv_head), band}};
                attend_part<part_memory>(part, job, m.stored, score, rows);
            });

        if (!end_item<memory, Rows4>(
                common_args, score, walk, query_part, notes, shared, own,
                id, [&]() -> const auto& { return rows; }, store_query))
            break;
    }
    end_share<memory>(common_args, score, notes, shared);
}

}  // namespace detail
}}}  // namespace kvq::cuda
