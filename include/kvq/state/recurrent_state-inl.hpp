// Definitions of recurrent_state.hpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <utility>

#include "recurrent_state.hpp"
#include "snapshot_codec.hpp"

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC recurrent_state::recurrent_state(const state_layout& layout, page_pool& pool,
                                          const snapshot_policy& policy, detail::state_device* device)
    : layout_(&layout),
      pool_(&pool),
      device_(device),
      policy_(policy),
      live_(pool.memory()),
      pages_(pool.memory()),
      marks_(pool.memory()) {
    detail::expect(policy.every >= 0, "snapshots every ", policy.every, " tokens");
    detail::expect((policy.every == 0 && !policy.prompt_end) || policy.most_bytes >= layout.snapshot_bytes(),
                   "snapshots of at most ", policy.most_bytes, " bytes: one has ", layout.snapshot_bytes());
    live_.resize(layout.layers().size());
}

KVQ_FUNC recurrent_state::recurrent_state(recurrent_state&& other) noexcept
    : layout_(other.layout_),
      pool_(other.pool_),
      device_(other.device_),
      policy_(other.policy_),
      tokens_(std::exchange(other.tokens_, 0)),
      accessed_(std::exchange(other.accessed_, false)),
      skipped_(other.skipped_),
      live_(std::move(other.live_)),
      pages_(std::move(other.pages_)),
      marks_(std::move(other.marks_)) {}
KVQ_FUNC recurrent_state::~recurrent_state() = default;

KVQ_FUNC recurrent_state& recurrent_state::operator=(recurrent_state&& other) noexcept {
    // Assignment member by member would keep the memory resource of the former pool.
    if (this != &other) {
        this->~recurrent_state();
        ::new (this) recurrent_state(std::move(other));
    }
    return *this;
}

KVQ_FUNC recurrent_state::recurrent_state(const recurrent_state& other, int)
    : layout_(other.layout_),
      pool_(other.pool_),
      device_(other.device_),
      policy_(other.policy_),
      tokens_(other.tokens_),
      accessed_(other.accessed_),
      live_(other.live_.begin(), other.live_.end(), pool_->memory()),
      pages_(other.pages_.begin(), other.pages_.end(), pool_->memory()),
      marks_(other.marks_.begin(), other.marks_.end(), pool_->memory()) {}

KVQ_FUNC recurrent_state recurrent_state::fork() const { return {*this, 0}; }

KVQ_FUNC page_ref recurrent_state::new_page(std::size_t layer, detail::state_form form) const {
    if (device_) return device_->allocate(form);
    const detail::state_layer& l = layout_->layers()[layer];
    page_ref p = pool_->allocate(l.page_bytes(form), static_cast<int>(form), 0);
    // Between parts, so that the bytes of a page are those of its values.
    for (std::size_t i = 0; i < l.parts.size(); ++i) {
        const detail::state_place& place = l.place(form, i);
        std::memset(p->data() + place.offset + place.bytes, 0,
                    detail::round_up(place.bytes, detail::state_alignment) - place.bytes);
    }
    return p;
}

KVQ_FUNC void recurrent_state::make_live(std::size_t layer, const page_ref& from, page& to) const noexcept {
    if (device_) return from ? device_->copy(*from, to) : device_->zero(to);
    const detail::state_layer& l = layout_->layers()[layer];
    if (!from || form_of(*from) == detail::state_form::live) {
        if (from)
            std::memcpy(to.data(), from->data(), to.bytes);
        else
            std::memset(to.data(), 0, to.bytes);
        return;
    }
    for (std::size_t i = 0; i < l.parts.size(); ++i)
        detail::dequantize_part(l.parts[i], from->data() + l.place(detail::state_form::snapshot, i).offset,
                                to.data() + l.place(detail::state_form::live, i).offset);
}

KVQ_FUNC std::size_t recurrent_state::unsettled(std::size_t at) const noexcept {
    const page* const live = live_[at].get();
    if (device_ == nullptr || layout_->layers()[at].is_exact || live == nullptr ||
        form_of(*live) != detail::state_form::live)
        return 0;
    std::size_t count = 0;
    while (count < marks_.size() && pages_of(marks_.size() - 1 - count)[at].get() == live) ++count;
    return count;
}

KVQ_FUNC void recurrent_state::settle(std::size_t layer) {
    const std::size_t count = unsettled(layer);
    if (count == 0) return;
    page_ref to = new_page(layer, detail::state_form::snapshot);
    device_->copy(*live_[layer], *to);
    for (std::size_t i = marks_.size() - count; i < marks_.size(); ++i) pages_[i * layers() + layer] = to;
}

KVQ_FUNC void recurrent_state::own(std::size_t layer) {
    settle(layer);
    if (is_own(layer)) return;
    page_ref fresh = new_page(layer, detail::state_form::live);
    make_live(layer, live_[layer], *fresh);
    live_[layer] = std::move(fresh);
}

KVQ_FUNC const page& recurrent_state::live_page(std::size_t at) {
    own(at);
    accessed_ = true;
    return *live_[at];
}

KVQ_FUNC std::size_t recurrent_state::missing_pages() const noexcept {
    std::size_t missing = 0;
    for (std::size_t i = 0; i < layers(); ++i) missing += is_own(i) ? 0 : 1;
    return missing;
}

KVQ_FUNC std::span<std::byte> recurrent_state::part(int layer, int part) {
    const std::size_t at = layout_->index(layer);
    const detail::state_layer& l = layout_->layers()[at];
    detail::expect(part >= 0 && static_cast<std::size_t>(part) < l.parts.size(), "layer ", layer,
                   " has no part ", part, ": it has ", l.parts.size());
    detail::expect(!live_.empty(), "a state that was moved from has no layers");
    const detail::state_place& place = l.place(detail::state_form::live, static_cast<std::size_t>(part));
    (void)live_page(at);
    return {live_[at]->data() + place.offset, place.bytes};
}

KVQ_FUNC void recurrent_state::reserve(executor_view executor) {
    executor.parallel_for(static_cast<int>(layers()), [&](int i) { own(static_cast<std::size_t>(i)); });
}

KVQ_FUNC bool recurrent_state::advance(int n, bool prompt_ends, executor_view executor) {
    detail::expect(n >= 0 && n <= (std::numeric_limits<int>::max)() - tokens_, "a step of ", n,
                   " tokens behind ", tokens_);
    const int before = std::exchange(tokens_, tokens_ + n);
    accessed_ = false;
    if (!detail::is_due(policy_, before, tokens_, prompt_ends)) return false;
    const bool taken = detail::has_memory([&] { snapshot(tokens_, executor); });
    skipped_ += taken ? 0 : 1;
    return taken;
}

KVQ_FUNC void recurrent_state::snapshot(int tokens, executor_view executor) {
    detail::expect(tokens == tokens_, "a snapshot at token ", tokens, ": the state has taken ", tokens_,
                   " tokens");
    resource_vector<page_ref> taken(live_.begin(), live_.end(), pool_->memory());
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < taken.size(); ++i) {
        if (!taken[i]) continue;
        std::size_t of_page = taken[i]->bytes;
        if (form_of(*taken[i]) == detail::state_form::live && !layout_->layers()[i].is_exact) {
            of_page = layout_->layers()[i].page_bytes(detail::state_form::snapshot);
            if (!device_) taken[i] = new_page(i, detail::state_form::snapshot);
        }
        bytes += page_pool::allocation(of_page);
    }
    detail::expect(bytes <= policy_.most_bytes, "a snapshot of ", bytes, " bytes: the policy has room for ",
                   policy_.most_bytes);
    // One at the same token is the last one, and goes.
    const std::size_t others = marks_.size() - (!marks_.empty() && marks_.back().tokens == tokens ? 1 : 0);
    const std::size_t gone = detail::surplus(std::span(marks_).first(others), bytes, policy_.most_bytes),
                      kept = others - gone;
    marks_.reserve(kept + 1);
    pages_.reserve((kept + 1) * layers());

    executor.parallel_for(static_cast<int>(layers()), [&](int task) {
        const auto i = static_cast<std::size_t>(task);
        if (!taken[i] || taken[i].get() == live_[i].get()) return;
        const detail::state_layer& l = layout_->layers()[i];
        for (std::size_t part = 0; part < l.parts.size(); ++part)
            detail::quantize_part(l.parts[part],
                                  live_[i]->data() + l.place(detail::state_form::live, part).offset,
                                  taken[i]->data() + l.place(detail::state_form::snapshot, part).offset);
    });

    accessed_ = false;
    erase_snapshots(others, marks_.size());
    erase_snapshots(0, gone);
    marks_.push_back({tokens, bytes});
    for (page_ref& p : taken) pages_.push_back(std::move(p));
}

KVQ_FUNC void recurrent_state::erase_snapshots(std::size_t first, std::size_t last) noexcept {
    const auto at = [](auto& v, std::size_t i) { return v.begin() + static_cast<std::ptrdiff_t>(i); };
    pages_.erase(at(pages_, first * layers()), at(pages_, last * layers()));
    marks_.erase(at(marks_, first), at(marks_, last));
}

KVQ_FUNC std::size_t recurrent_state::count_to(int n) const noexcept {
    const auto after = std::upper_bound(marks_.begin(), marks_.end(), n,
                                        [](int t, const snapshot_mark& m) { return t < m.tokens; });
    return static_cast<std::size_t>(after - marks_.begin());
}

KVQ_FUNC int recurrent_state::reach(int n) const noexcept {
    if (n >= tokens_ && !accessed_) return tokens_;
    const std::size_t count = count_to(n);
    return count == 0 ? 0 : marks_[count - 1].tokens;
}

KVQ_FUNC std::size_t recurrent_state::missing_snapshots(int n) const noexcept {
    if (reach(n) == tokens_ && !accessed_) return 0;
    const std::size_t kept = count_to(n);
    std::size_t missing = 0;
    for (std::size_t i = 0; i < layers() && kept > 0; ++i) missing += kept + unsettled(i) > marks_.size();
    return missing;
}

KVQ_FUNC int recurrent_state::trim(int n) {
    detail::expect(n >= 0, "cannot trim a state to ", n, " tokens: it has taken ", tokens_);
    const int wanted = detail::smaller(n, tokens_);
    if (reach(n) == tokens_ && !accessed_) return 0;
    if (missing_snapshots(n) > 0)
        for (std::size_t i = 0; i < layers(); ++i) settle(i);
    erase_snapshots(count_to(n), marks_.size());
    go_to_last_snapshot();
    return wanted - tokens_;
}

KVQ_FUNC void recurrent_state::go_to_last_snapshot() noexcept {
    const bool none = marks_.empty();
    for (std::size_t i = 0; i < layers(); ++i) live_[i] = none ? page_ref() : pages_of(marks_.size() - 1)[i];
    tokens_ = none ? 0 : marks_.back().tokens;
    accessed_ = false;
}

KVQ_FUNC void recurrent_state::drop_to_budget() noexcept {
    erase_snapshots(0, detail::surplus(marks_, 0, policy_.most_bytes));
}

KVQ_FUNC void recurrent_state::drop_live() {
    detail::expect(!marks_.empty() && marks_.back().tokens == tokens_, "the live state of token ", tokens_,
                   " has no snapshot to continue from: the last of ", marks_.size(), " is at token ",
                   marks_.empty() ? 0 : marks_.back().tokens);
    go_to_last_snapshot();
}

KVQ_FUNC void recurrent_state::drop_snapshots() noexcept { erase_snapshots(0, marks_.size()); }

namespace detail {

/// Adds what quantizing did to a part in a page of a snapshot.
KVQ_FUNC void add_sums(snapshot_sums& to, const state_layer& l, const page_ref& p,
                       std::size_t part) noexcept {
    if (!p || static_cast<state_form>(p->format) == state_form::live ||
        l.parts[part].snapshot == snapshot_type::exact)
        return;
    const snapshot_sums sums =
        sums_of_part(l.parts[part], p->data() + l.place(state_form::snapshot, part).offset);
    to.error += sums.error;
    to.values += sums.values;
    to.not_finite += sums.not_finite;
}
KVQ_FUNC double relative_error(const snapshot_sums& s) noexcept {
    return s.values > 0 ? std::sqrt(s.error / s.values) : 0.0;
}

}  // namespace detail

KVQ_FUNC double recurrent_state::snapshot_error(std::size_t i, int layer, int part) const {
    const std::size_t at = layout_->index(layer);
    const detail::state_layer& l = layout_->layers()[at];
    detail::expect(i < marks_.size() && part >= 0 && static_cast<std::size_t>(part) < l.parts.size(),
                   "snapshot ", i, " of ", marks_.size(), ", part ", part, " of ", l.parts.size(),
                   " of layer ", layer, ": out of range");
    detail::snapshot_sums sums;
    detail::add_sums(sums, l, pages_of(i)[at], static_cast<std::size_t>(part));
    return detail::relative_error(sums);
}

KVQ_FUNC double recurrent_state::snapshot_error(std::size_t i) const {
    detail::expect(i < marks_.size(), "snapshot ", i, " of ", marks_.size(), ": out of range");
    detail::snapshot_sums sums;
    for (std::size_t layer = 0; layer < layers(); ++layer)
        for (std::size_t part = 0; part < layout_->layers()[layer].parts.size(); ++part)
            detail::add_sums(sums, layout_->layers()[layer], pages_of(i)[layer], part);
    return detail::relative_error(sums);
}

KVQ_FUNC state_usage recurrent_state::usage() const noexcept {
    state_usage u;
    u.skipped = skipped_;
    for (std::size_t layer = 0; layer < layers(); ++layer) {
        const detail::state_layer& l = layout_->layers()[layer];
        // Holders of a page are neighbours, the live state behind the snapshots: a page that was left never
        // comes back.
        for (std::size_t i = 0, end = 1; i <= marks_.size(); i = end++) {
            const page_ref& p = held_page(layer, i);
            while (end <= marks_.size() && held_page(layer, end).get() == p.get()) ++end;
            if (!p) continue;
            (i < marks_.size() ? u.snapshots : u.live) += p->bytes;
            u.shared += p.references() > end - i ? p->bytes : 0;
            ++u.pages;
            detail::snapshot_sums sums;
            for (std::size_t part = 0; part < l.parts.size() && !device_; ++part)
                detail::add_sums(sums, l, p, part);
            u.not_finite += static_cast<std::size_t>(sums.not_finite);
        }
    }
    u.bookkeeping = u.pages * sizeof(page) + (live_.capacity() + pages_.capacity()) * sizeof(page_ref) +
                    marks_.capacity() * sizeof(snapshot_mark);
    u.bytes = u.live + u.snapshots + u.bookkeeping;
    return u;
}

KVQ_FUNC state_usage recurrent_state::footprint(const state_layout& layout, int snapshots) {
    detail::expect(snapshots >= 0, "a footprint with ", snapshots, " snapshots");
    const std::size_t layers = layout.layers().size(), n = static_cast<std::size_t>(snapshots);
    const std::size_t headers = layers * sizeof(page);
    state_usage u;
    u.live = layout.live_bytes() - headers;
    u.snapshots = n * (layout.snapshot_bytes() - headers);
    u.pages = (n + 1) * layers;
    u.bookkeeping = (n + 1) * (headers + layers * sizeof(page_ref)) + n * sizeof(snapshot_mark);
    u.bytes = u.live + u.snapshots + u.bookkeeping;
    return u;
}

}}
