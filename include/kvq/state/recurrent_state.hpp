// The recurrent state of a sequence: what an engine reads and writes in place, and its snapshots.
//
//   kvq::recurrent_state state(layout, pool, {.every = 1024, .most_bytes = std::size_t{1} << 30});
//   float* s = state.values<float>(layer, 0).data();   the engine's kernel runs on it
//   state.advance(n, prompt_ends);                  the step is done in all layers; takes a snapshot if it is
//                                                   due
//   int again = state.trim(900);                    goes to the newest snapshot at or before token 900:
//                                                   the last `again` of these 900 tokens must run again
//   kvq::recurrent_state other = state.fork();      shares everything until one of the two writes
//
// State cannot be cut as keys and values can: after token n it is one sum over all tokens before. So a
// snapshot is kept at some tokens.
//
//   live      a page per layer, with values as the engine has them; without one all values are zero
//   snapshot  a page per layer: that of the live state, or a copy in the snapshot type of the part
//
// A page with several holders is copied, or dequantized, by the next access to the live state of its layer.
// So a trim, a fork and an exact snapshot copy no state. A layer that has not changed since a quantized
// snapshot is not quantized again.
// Guarantees: arguments are checked and memory is taken before anything changes. Memory is that of the pool,
// within its budget.
// Thread safety: const members may run together; one writer per state; different states are independent, also
// those that share pages. The layout and the pool outlive the state.
#pragma once

#include <span>

#include "../core/error.hpp"
#include "../core/executor.hpp"
#include "../core/resource_vector.hpp"
#include "../page/page.hpp"
#include "snapshot_policy.hpp"
#include "state_device.hpp"
#include "state_layout.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {
struct state_access;
}

/// Bytes of a recurrent_state. Pages that other sequences hold, too, count in each of them.
struct state_usage {
    std::size_t live = 0;         ///< data of live pages that no snapshot holds
    std::size_t snapshots = 0;    ///< data of pages of snapshots
    std::size_t bookkeeping = 0;  ///< page headers and tables
    std::size_t bytes = 0;        ///< sum of the above
    std::size_t shared = 0;       ///< part of `live` and `snapshots` that other sequences hold as well
    std::size_t pages = 0;
    std::size_t not_finite = 0;  ///< NaN and infinities that quantized snapshots lost
    std::size_t skipped = 0;     ///< snapshots that were due and had no memory
};

class recurrent_state {
public:
    /// All zeros, 0 tokens. Takes no page. Raises kvq::error for a policy that is out of range, or under
    /// which no snapshot fits.
    recurrent_state(const state_layout& layout, page_pool& pool, const snapshot_policy& policy = {})
        : recurrent_state(layout, pool, policy, nullptr) {}
    /// With pages on a device, and tables in the memory of the pool. part() and what reads pages is not for
    /// such a state: live_page() is. Its snapshots are quantized when the live state is written again, or by
    /// a trim: until then they hold the page of the live state.
    recurrent_state(const state_layout& layout, page_pool& pool, const snapshot_policy& policy,
                    detail::state_device* device);
    recurrent_state(recurrent_state&&) noexcept;
    recurrent_state& operator=(recurrent_state&& other) noexcept;
    recurrent_state(const recurrent_state&) = delete;  // use fork()
    ~recurrent_state();

    const state_layout& layout() const noexcept { return *layout_; }
    const snapshot_policy& policy() const noexcept { return policy_; }

    /// The bytes of a part of a layer, [heads][rows][columns], to read and to write, until the next call that
    /// is not a part() or a const one. At a multiple of 64 bytes. The first access after a snapshot, fork or
    /// trim takes a page for the layer and copies or dequantizes it: kvq::out_of_memory or std::bad_alloc,
    /// and nothing changes; else O(log layers). From an access until advance() or snapshot() a step is under
    /// way, and some layers may be further than others: a trim goes back to a snapshot.
    std::span<std::byte> part(int layer, int part);
    /// The same as values. T: float, float16 or bfloat16, as the layout says.
    template <float_format T>
    std::span<T> values(int layer, int part) {
        const std::span<const state_part> parts = layout_->parts(layer);
        detail::expect(part >= 0 && static_cast<std::size_t>(part) < parts.size() &&
                           parts[static_cast<std::size_t>(part)].type == float_type_of<T>,
                       "part ", part, " of layer ", layer, " is not one of its ", parts.size(),
                       " parts with values of this type");
        const std::span<std::byte> bytes = this->part(layer, part);
        return {reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T)};
    }
    /// Every layer gets a live page of its own, so that a step takes no memory. Layers are tasks.
    void reserve(executor_view executor = serial_executor{});
    /// Pages that reserve() takes. O(layers)
    std::size_t missing_pages() const noexcept;
    /// Pages of snapshots that trim(n) takes. 0 without a device.
    std::size_t missing_snapshots(int n) const noexcept;
    /// Snapshots that hold the live page of layer `at` and are to be quantized. 0 without a device.
    std::size_t unsettled(std::size_t at) const noexcept;
    /// The live page of layer `at` of layout().layers(), to be written as through part().
    const page& live_page(std::size_t at);
    /// The page of layer `at` in snapshots()[holder], and for holder = snapshots().size() in the live state.
    /// Null: zeros. A page that neighbours hold is one.
    const page_ref& held_page(std::size_t at, std::size_t holder) const noexcept {
        return holder < marks_.size() ? pages_of(holder)[at] : live_[at];
    }

    /// Tokens that the live state has taken.
    int tokens() const noexcept { return tokens_; }
    /// A step of n tokens is done: the live state of all layers has taken them. Takes a snapshot where the
    /// policy says so, and returns whether it did: without memory for it none is taken (usage().skipped
    /// counts them), and the step counts all the same.
    bool advance(int n, bool prompt_ends = false, executor_view executor = serial_executor{});
    /// Tokens to the next snapshot by policy().every, where a prompt is best cut; 0: there is none.
    int tokens_to_snapshot() const noexcept {
        return policy_.every > 0 ? policy_.every - tokens_ % policy_.every : 0;
    }

    /// Takes a snapshot of the live state. tokens must be tokens(): within a step some layers are further
    /// than others. Replaces one at the same token. Then drops others, down to policy().most_bytes. Layers
    /// are tasks. Strong exception guarantee.
    void snapshot(int tokens, executor_view executor = serial_executor{});
    /// Ascending by tokens. Valid until the state changes.
    std::span<const snapshot_mark> snapshots() const noexcept { return marks_; }
    /// sqrt(sum (x - x^)^2 / sum x^2) over the finite values of a part of a layer in snapshots()[i]; 0 where
    /// it is exact.
    double snapshot_error(std::size_t i, int layer, int part) const;
    /// The same over all quantized parts of all layers.
    double snapshot_error(std::size_t i) const;

    /// The least n from which on every trim(n) goes to a token that can_reach(token), of a sequence of so
    /// many tokens; tokens + 1: none. O(snapshots)
    template <class CanReach>
    int trim_limit(int tokens, const CanReach& can_reach) const noexcept {
        // If a snapshot, or the live state, is out of reach, so is every token up to the next one.
        int limit = 0, from = 0;
        const auto next = [&](int token) {
            if (!can_reach(from)) limit = token;
            from = token;
        };
        for (const snapshot_mark& mark : marks_) next(mark.tokens);
        if (reach(tokens_) == tokens_) next(tokens_);
        next(tokens + 1);
        return limit;
    }
    /// The token to which trim(n) goes: tokens() if n is not less and no step is under way, else that of the
    /// newest snapshot at or before n, or 0. O(log snapshots)
    int reach(int n) const noexcept;
    /// Goes back to token reach(n), and drops later snapshots. Returns how many tokens before n, of those
    /// that the state had taken, must run again. Takes no memory. Raises kvq::error for n < 0. O(layers)
    int trim(int n);
    /// The same tokens, snapshots and live state; shares all pages. O(layers * snapshots)
    [[nodiscard]] recurrent_state fork() const;

    /// Gives the live pages back: the state continues from the snapshot at tokens(), which must exist. For
    /// sequences that are stored, and after a step that failed when some layers had taken it.
    void drop_live();
    /// Gives all snapshots back.
    void drop_snapshots() noexcept;

    /// O(layers * snapshots)
    [[nodiscard]] state_usage usage() const noexcept;
    /// Makes an empty state one with the tokens and snapshots of `from`, whose pages lie elsewhere: copy(at,
    /// holder) returns what held_page(at, holder) is to be, holder by holder. Then drops snapshots that
    /// policy() has no room for. Basic guarantee.
    template <class Copy>
    void assign(const recurrent_state& from, const Copy& copy) {
        marks_.reserve(from.marks_.size());
        pages_.reserve(from.marks_.size() * layers());
        for (std::size_t holder = 0; holder <= from.marks_.size(); ++holder) {
            std::size_t bytes = 0;
            for (std::size_t at = 0; at < layers(); ++at) {
                page_ref p = copy(at, holder);
                bytes += p ? page_pool::allocation(p->bytes) : 0;
                if (holder < from.marks_.size())
                    pages_.push_back(std::move(p));
                else
                    live_[at] = std::move(p);
            }
            if (holder == from.marks_.size()) break;
            marks_.push_back(from.marks_[holder]);
            marks_.back().bytes = bytes;
        }
        tokens_ = from.tokens_;
        accessed_ = from.accessed_;
        drop_to_budget();
    }
    /// Calls f(const page&) for every holder of a page: layers of the live state and of snapshots.
    template <class F>
    void for_each_page(F&& f) const {
        for (const resource_vector<page_ref>* list : {&live_, &pages_})
            for (const page_ref& p : *list)
                if (p) f(std::as_const(*p));
    }
    /// usage() with the live state of all layers and so many snapshots that were taken before the last step:
    /// the bytes that the pool and its memory resource have given. Raises kvq::error for snapshots < 0.
    [[nodiscard]] static state_usage footprint(const state_layout& layout, int snapshots);

private:
    friend struct detail::state_access;

    recurrent_state(const recurrent_state& other, int);

    /// With state; none after a move.
    std::size_t layers() const noexcept { return live_.size(); }
    const page_ref* pages_of(std::size_t snapshot) const noexcept {
        return pages_.data() + snapshot * layers();
    }
    detail::state_form form_of(const page& p) const noexcept {
        return static_cast<detail::state_form>(p.format);
    }
    page_ref new_page(std::size_t layer, detail::state_form form) const;
    /// Is the live page of a layer there, in the form that the engine has, with no other holder?
    bool is_own(std::size_t layer) const noexcept {
        const page_ref& p = live_[layer];
        return p && form_of(*p) == detail::state_form::live && !p.shared();
    }
    /// Sees to it.
    void own(std::size_t layer);
    /// Quantizes unsettled() snapshots.
    void settle(std::size_t layer);
    void make_live(std::size_t layer, const page_ref& from, page& to) const noexcept;
    void erase_snapshots(std::size_t first, std::size_t last) noexcept;
    void go_to_last_snapshot() noexcept;
    void drop_to_budget() noexcept;
    /// Snapshots at or before token n.
    std::size_t count_to(int n) const noexcept;

    const state_layout* layout_;
    page_pool* pool_;
    detail::state_device* device_;  // null: pages are those of the pool
    snapshot_policy policy_;
    int tokens_ = 0;
    bool accessed_ = false;  // since the end of the last step
    std::size_t skipped_ = 0;
    resource_vector<page_ref> live_;   // of layers; null: zeros
    resource_vector<page_ref> pages_;  // of snapshots, layer by layer; null: zeros
    resource_vector<snapshot_mark> marks_;
};

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "recurrent_state-inl.hpp"
#endif
