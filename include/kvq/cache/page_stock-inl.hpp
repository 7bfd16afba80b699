// Definitions of page_stock.hpp.
#pragma once

#include <utility>

#include "page_stock.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

KVQ_FUNC page_stock::page_stock(std::pmr::memory_resource* memory) noexcept
    : shorter(memory), quantized(memory), shelves_(memory), pages_(memory), tables_(memory) {}

KVQ_FUNC void page_stock::end_layer(std::size_t table, std::size_t commits, int alike, bool shared) {
    for (shelf& s : shelves_) {
        if (shared) s.back = 0;
        s.stay += alike * (std::exchange(s.taken, 0) - s.back);
        s.most_back = larger(s.most_back, std::exchange(s.back, 0));
    }
    if (table > 0) {
        while (tables_.size() <= static_cast<std::size_t>(layers_))
            tables_.emplace_back(tables_.get_allocator());
        tables_.back().reserve(table);
    }
    commits_ = larger(commits_, commits);
    layers_ += alike;
}

KVQ_FUNC std::size_t page_stock::bytes_to_fill(std::size_t multiple) const noexcept {
    std::size_t bytes = 0;
    for (const shelf& s : shelves_)
        bytes += static_cast<std::size_t>(s.stay + s.most_back) * s.bytes.rounded(multiple);
    return bytes;
}

KVQ_FUNC void page_stock::fill(page_pool& pool) {
    shorter.reserve(2 * commits_);
    quantized.reserve(2 * commits_);
    int n = 0;
    for (shelf& s : shelves_) {
        s.first = n;
        s.room = s.held = s.stay + s.most_back;
        n += s.room;
    }
    pages_.reserve(static_cast<std::size_t>(n));
    for (const shelf& s : shelves_)
        for (int i = 0; i < s.room; ++i) pages_.push_back(pool.allocate(s.bytes.all, 0, 0, s.bytes.lower));
}

KVQ_FUNC page_ref page_stock::take(const plane_bytes& bytes, int format, int tokens) noexcept {
    for (shelf& s : shelves_) {
        if (s.bytes != bytes || s.held == 0) continue;
        page_ref p = std::move(pages_[s.place(--s.held)]);
        p->format = format;
        p->tokens = tokens;
        p->not_finite = 0;
        p->plan = {};
        return p;
    }
    return {};
}

KVQ_FUNC void page_stock::give_back(page_ref p) noexcept {
    if (!p || p.shared()) return;
    for (shelf& s : shelves_) {
        if (s.bytes != plane_bytes{p->bytes, p->lower_bytes()} || s.held == s.room) continue;
        pages_[s.place(s.held++)] = std::move(p);
        return;
    }
}

KVQ_FUNC void page_stock::grow(resource_vector<page_span>& spans, std::size_t layer, std::size_t n) {
    if (n <= spans.capacity()) return;
    if (layer >= tables_.size() || tables_[layer].capacity() < n) return spans.reserve(n);
    for (page_span& s : spans) tables_[layer].push_back(std::move(s));
    spans.swap(tables_[layer]);
    tables_[layer].clear();
}

KVQ_FUNC void page_stock::end_step() noexcept {
    if (reserved() && --layers_ == 0) clear();
}

KVQ_FUNC void page_stock::clear() noexcept {
    page_stock empty(pages_.get_allocator().resource());
    swap(empty);
}

KVQ_FUNC void page_stock::swap(page_stock& other) noexcept {
    shelves_.swap(other.shelves_);
    pages_.swap(other.pages_);
    tables_.swap(other.tables_);
    shorter.swap(other.shorter);
    quantized.swap(other.quantized);
    std::swap(layers_, other.layers_);
    std::swap(commits_, other.commits_);
}

KVQ_FUNC std::size_t page_stock::page_bytes() const noexcept {
    std::size_t bytes = 0;
    for (const shelf& s : shelves_)
        bytes += static_cast<std::size_t>(s.held) * page_pool::allocation(s.bytes.all);
    return bytes;
}

KVQ_FUNC std::size_t page_stock::list_bytes() const noexcept {
    std::size_t bytes = shelves_.capacity() * sizeof(shelf) +
                        tables_.capacity() * sizeof(resource_vector<page_span>) +
                        (pages_.capacity() + shorter.capacity() + quantized.capacity()) * sizeof(page_ref);
    for (const auto& table : tables_) bytes += table.capacity() * sizeof(page_span);
    return bytes;
}

KVQ_FUNC std::size_t page_stock::shelf::place(int i) const noexcept {
    return static_cast<std::size_t>(first) + static_cast<std::size_t>(i);
}

KVQ_FUNC page_stock::shelf& page_stock::shelf_of(const plane_bytes& bytes) {
    for (shelf& s : shelves_)
        if (s.bytes == bytes) return s;
    shelves_.push_back({bytes});
    return shelves_.back();
}

}}}
