// Recurrent state of a cache on the device (cache.hpp): begins, snapshots, and where parts lie.
//
//   s = cache.begin_step(batch, 1, stream);
//   cuda::state_view v;
//   s = cache.state(layer, 0, v);         a kernel of the engine: v.data + v.row_slots[row] * v.slot_bytes
//   s = cache.snapshot(id);               keeps what the step makes of it
//   int from = cache.reach(id, n);        s = cache.trim(id, n) goes there; tokens [from, n) must run again
//
// A begin gives every row a page of its own, counts its tokens and takes the snapshots that are due. A
// snapshot shares the page that the launches of the step write, and the next begin copies or quantizes it.
// Contract: as cache.hpp. Drafts are refused: a state cannot take back a part of them.
#pragma once

#include <map>

#include "cache_class.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

inline status cache::check_states(std::span<const sequence_id> ids, const char* verb) const {
    if (!states_) return {};
    for (const sequence_id id : ids)
        if (is_here(id))
            return detail::bad_value("%s: cannot %s tokens of a state; a trim goes back to a snapshot of it",
                                     describe(states_->layers().layers()[0].number).c_str(), verb);
    return {};
}

inline status cache::check_part(int layer, int part) const {
    if (layer < 0 || layer >= layer_count())
        return detail::bad_value("layer %d is not among the %d layers of the cache", layer, layer_count());
    const auto parts = static_cast<int>(layers_[static_cast<std::size_t>(layer)].parts.size());
    if (!has_state(layer)) return detail::bad_value("%s: it has no state", describe(layer).c_str());
    if (part < 0 || part >= parts)
        return detail::bad_value("layer %d has no part %d: it has %d", layer, part, parts);
    return {};
}

inline status cache::ensure_states(std::span<const sequence_id> batch, int new_tokens, cudaStream_t stream) {
    if (!states_ || new_tokens == 0) return {};
    std::size_t missing = 0, quantized = 0;
    std::map<const page*, std::uint32_t> gone;  // holders
    for (const sequence_id id : batch) {
        if (id == sequence_id{} || entry_of(id).state->missing_pages() == 0) continue;
        ++missing;
        const recurrent_state& s = *entry_of(id).state;
        const std::size_t leaving = s.unsettled(0);
        quantized += leaving > 0 ? 1 : 0;
        // The last writer of a page that forks of the batch hold, and nothing else, keeps it.
        const page_ref& p = s.held_page(0, s.snapshots().size());
        if (!p || p->format != static_cast<int>(common::state_form::live)) continue;
        if ((gone[p.get()] += static_cast<std::uint32_t>(1 + leaving)) == p.references()) --missing;
    }
    return states_->ensure(missing, quantized, options_.growing, stream);
}

/// The states of the rows take their tokens. Pages are there.
inline void cache::write_states(std::span<const sequence_id> batch, int new_tokens, bool prompt,
                                detail::word_writer& to) {
    if (!states_ || new_tokens == 0) return;
    for (std::size_t b = 0; b < batch.size(); ++b) {
        int slot = -1;
        if (batch[b] != sequence_id{}) {
            recurrent_state& s = *entry_of(batch[b]).state;
            slot = s.live_page(0).number;
            (void)s.advance(new_tokens, prompt);
        }
        if (std::exchange(slots_[b], slot) != slot) to.put(first_slot_ + static_cast<int>(b), slot);
    }
}

inline status cache::state(int layer, int part, state_view& view) const {
    if (status s = check_part(layer, part); !s) return s;
    if (!step_.begun || step_.new_tokens == 0 || step_.cross)
        return detail::bad_value(
            "no step with new tokens has begun since the sequences of the cache were changed");
    const std::size_t at = states_->layers().index(layer);
    const common::state_place& of_part =
        states_->layers().layers()[at].place(common::state_form::live, static_cast<std::size_t>(part));
    const detail::pool_memory& pages = states_->pages().memory();
    // None while no sequence has a state.
    std::byte* const first =
        pages.data == nullptr ? nullptr : pages.data + states_->offset(at) + of_part.offset;
    view = {first,     pages.page_bytes(), of_part.bytes, pages.pages, words_.as<int>() + first_slot_,
            step_.rows};
    return {};
}

inline status cache::state(sequence_id id, int layer, int part, std::byte*& data) {
    if (status s = check_part(layer, part); !s) return s;
    if (status s = check_here(id); !s) return s;
    const std::size_t at = states_->layers().index(layer);
    recurrent_state& of = *entry_of(id).state;
    const auto live = [&] { return of.held_page(0, of.snapshots().size()).get(); };
    if (live() != nullptr && live()->format != static_cast<int>(common::state_form::live)) {
        if (status s = states_->ensure_here(1, 0, options_.growing); !s) return s;
        of.reserve();  // from the codes of a snapshot
        if (status s = states_->take_error(); !s) return s;
    }
    const page* const held = live();
    data = held == nullptr ? nullptr
                           : states_->data(*held) + states_->offset(at) +
                                 states_->layers()
                                     .layers()[at]
                                     .place(common::state_form::live, static_cast<std::size_t>(part))
                                     .offset;
    return {};
}

inline status cache::snapshot(sequence_id id) {
    if (status s = check_here(id); !s) return s;
    if (!states_) return detail::bad_value("no layer of the cache has state: kvq::state_layer makes one");
    recurrent_state& s = *entry_of(id).state;
    const std::size_t room = s.policy().most_bytes, bytes = page_pool::allocation(states_->snapshot_bytes());
    if (s.held_page(0, s.snapshots().size()) && bytes > room)
        return detail::bad_value("a snapshot of %zu bytes: the policy has room for %zu", bytes, room);
    s.snapshot(s.tokens());
    return {};
}

inline status cache::drop_snapshots(sequence_id id) {
    if (status s = check_here(id); !s) return s;
    if (states_) entry_of(id).state->drop_snapshots();
    return {};
}

inline std::span<const snapshot_mark> cache::snapshots(sequence_id id) const noexcept {
    if (!states_ || !is_here(id)) return {};
    return entry_of(id).state->snapshots();
}

inline int cache::reach(sequence_id id, int n) const noexcept {
    return states_ && is_here(id) ? entry_of(id).state->reach(n) : n;
}

}}}  // namespace kvq::cuda
