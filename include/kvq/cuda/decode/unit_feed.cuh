// How a warp's ring is filled: its key and value units are copied while the ones before them are multiplied.
//
//   unit_ring   copies a unit of a warp tile into a slot, and says for every slot what of the tile is there
//   unit_feed   which warp tile comes next: a walk over the team's items, with page numbers a warp tile ahead
//
// Contract: one warp calls all members together. A slot may be read once its copies are waited for
// (copy_wait).
#pragma once

#include "attention_memory.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda { namespace detail {

/// The ring of a warp: key and value units of warp tiles on their way, and what is known of them.
template <class Memory, class Pair, class T>
struct unit_ring {
    using keys = typename Memory::keys;
    using values = typename Memory::values;
    const attention_args<Pair, T>& a;
    int page, first, head = -1;  // of the current warp tile
    int second = -1, band = 0;   // the other page of a warp tile of two pages; which band the warp has
    unsigned halves = 0;         // 2 bits per slot, of warp tiles of two pages: which are there?
    unsigned present = 0;        // bit per slot: does it hold a warp tile?
    unsigned skews = 0;  // 4 bits per slot: how many times 16 bytes its warp tile begins behind the slot
    typename keys::head_type key_head{};

    __device__ __forceinline__ explicit unit_ring(const attention_args<Pair, T>& args) : a(args) {}
    /// Starts the copy of the current warp tile's keys or values into `slot` of the ring at `ring`.
    template <tensor Role>
    __device__ __forceinline__ void copy_unit(std::uint32_t ring, int slot, int lane) {
        const std::uint32_t to_slot = ring + static_cast<std::uint32_t>(slot * Memory::slot_bytes);
        const unsigned bit = 1u << slot;
        if constexpr (keys::joined) {
            const unsigned there = (page >= 0 ? 1u : 0u) | (second >= 0 ? 2u : 0u);
            halves = (halves & ~(3u << 2 * slot)) | there << 2 * slot;
            present = there != 0 ? present | bit : present & ~bit;
            using unit = std::conditional_t<Role == tensor::key, keys, values>;
            if constexpr (is_strided<Pair>) {
                const auto rows = [&](int of) {
                    return of < 0 ? row_address{} : a.cache.template row<Role>(of, head, 0);
                };
                if (there != 0)
                    unit::copy_strided(to_slot, rows(page), rows(second),
                                       a.cache.template row_memory_of<Role>(), lane, 16);
            } else if (there != 0)
                unit::copy(to_slot, page < 0 ? nullptr : a.cache.template block<Role>(page, head),
                           second < 0 ? nullptr : a.cache.template block<Role>(second, head), lane, band);
        } else if (Memory::halves || page >= 0) {
            // A branch around copies cuts the instructions in two. Builds without were faster for kernels
            // with half floats only.
            const bool there = !Memory::halves || page >= 0;
            present = there ? present | bit : present & ~bit;
            const std::byte* const block =
                a.cache.template block<Role>(Memory::halves ? larger(page, 0) : page, head);
            std::uint32_t to_warp_tile = to_slot;
            if constexpr (Role == tensor::key ? keys::skewed : values::skewed) {
                const auto skew = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(block) >> 4 & 7u);
                skews = (skews & ~(15u << 4 * slot)) | skew << 4 * slot;
                to_warp_tile += 16 * skew;
            } else if constexpr (keys::skewed || values::skewed) {
                skews &= ~(15u << 4 * slot);
            }
            if constexpr (is_strided<Pair>)
                std::conditional_t<Role == tensor::key, keys, values>::copy_strided(
                    to_warp_tile,
                    a.cache.template row<Role>(Memory::halves ? larger(page, 0) : page, head, first), {},
                    a.cache.template row_memory_of<Role>(), lane, there ? 16 : 0);
            else if constexpr (has_lower<Pair>)
                std::conditional_t<Role == tensor::key, keys, values>::copy(
                    to_warp_tile, block,
                    a.cache.template lower_block<Role>(Memory::halves ? larger(page, 0) : page, head), first,
                    lane, there ? 16 : 0, band);
            else if constexpr (Role == tensor::key)
                keys::copy(to_warp_tile, block, first, lane, there ? 16 : 0, key_head, band);
            else
                values::copy(to_warp_tile, block, first, lane, there ? 16 : 0, {}, band);
        } else {
            present &= ~bit;
        }
        copy_commit();
    }
};

/// Feeds a warp's ring with the units of its warp tiles, across items. Page numbers are fetched a warp tile
/// ahead.
template <class Memory, class Pair, class T>
struct unit_feed : unit_ring<Memory, Pair, T> {
    static constexpr bool reads_sinks = false, reads_cuts = false;
    using base = unit_ring<Memory, Pair, T>;
    using base::a, base::page, base::first, base::head, base::second;
    using typename base::keys;
    warp_notes* notes;     // with where the walk stands: at the step after the current one
    int stride;            // warps of the team
    int index, to;         // of that step, relative to its item; where the item's part ends
    int item_first, real;  // as in item_part
    const int* table;      // row of the item's sequence
    int next_page = -1, next_first = 0, next_head;
    int plan_of = 0, next_plan_of = 0;      // the sequence whose plan keys of mixed widths have
    int next_second = -1;                   // the second page of a warp tile of two
    int first_column = 0, last_column = 0;  // which columns of the table it may be read from
    int left = 0;                           // warp tiles of its step that follow it

    /// first_page: what is known to stand at `entry` of the block table.
    __device__ __forceinline__ unit_feed(const attention_args<Pair, T>& args,
                                         const item_walk<Memory::step_tokens>& start, const warp_team& team,
                                         warp_notes* of_warp, const int* entry, int first_page)
        : base(args), notes(of_warp), stride(team.takers(Memory::bands)) {
        if constexpr (Memory::bands > 1) this->band = team.member % Memory::bands;
        start.park(&notes->feeder);
        take(start, team.taker(Memory::bands));
        index -= stride;
#pragma unroll 1
        for (int i = 0; i < 2; ++i) step(entry, first_page);
        left = Memory::warp_tiles_of_step - 1;
    }
    /// Starts the next unit's copy into `slot` of the ring at `ring`.
    template <tensor Role>
    __device__ __forceinline__ void issue(std::uint32_t ring, int slot, int lane) {
        this->template copy_unit<Role>(ring, slot, lane);
        if constexpr (Role == tensor::value) advance();
    }
    __device__ __forceinline__ static int skipped() { return 0; }

private:
    __device__ __forceinline__ void take(const item_walk<Memory::step_tokens>& walk, int member) {
        index = walk.item.from + member;
        to = walk.item.to;
        item_first = walk.item.first;
        real = walk.item.real;
        table = a.cache.block_table + a.cache.table_entry(walk.item.sequence, 0);
        next_head = walk.item.kv_head;
        if constexpr (keys::mixed) next_plan_of = a.cache.plan_numbers == nullptr ? 0 : walk.item.sequence;
        if constexpr (keys::joined) {
            const int length = a.work.tokens[walk.item.sequence];
            first_column = a.work.begin(length) / Pair::page_tokens;
            last_column = ceil_div(larger(a.work.end(walk.item.sequence), 0), Pair::page_tokens) - 1;
        }
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
    /// The next warp tile becomes the current one. first_page: what is known to stand at `entry` of the block
    /// table.
    __device__ __forceinline__ void step(const int* entry = nullptr, int first_page = -1) {
        page = next_page;
        second = next_second;
        first = next_first;
        if constexpr (keys::mixed)
            if (head != next_head || plan_of != next_plan_of)
                this->key_head = keys::head_of(a.cache.key_plan(plan_of = next_plan_of, next_head));
        head = next_head;
        seek(entry, first_page);
    }
    __device__ __forceinline__ void seek(const int* entry, int first_page) {
        index += stride;
        if (index >= to) {
            item_walk<Memory::step_tokens> walk(a.work);
            walk.fetch(&notes->feeder);
            do {
                walk.next();
                if (walk.done()) {
                    to = 0x7fffffff;
                    index = real = 0;
                    break;
                }
                take(walk, notes->team.taker(Memory::bands));
            } while (index >= to);
            walk.park(&notes->feeder);
        }
        next_page = -1;
        const int token = (item_first + index) * Memory::step_tokens;
        const int column = token / Pair::page_tokens;
        if constexpr (keys::joined) {
            next_second = -1;
            if (index >= real) return;
            if (column >= first_column)
                next_page = entry != nullptr && table + column == entry ? first_page : __ldg(table + column);
            if (column < last_column) next_second = __ldg(table + column + 1);
        } else if (index < real && column < a.cache.table_columns) {
            next_page = entry != nullptr && table + column == entry ? first_page : __ldg(table + column);
            next_first = token % Pair::page_tokens;
        }
    }
};

}  // namespace detail
}}}  // namespace kvq::cuda
