// Memory that a sequence holds for its next step (cache::reserve): pages, tables of spans, the lists of a chunk.
//
//   shelf   pages of one size, as many as a step over all layers holds at a time, in any order of the layers:
//           the sum over layers of what stays, and the most that one layer gives back at its end
//
// Contract: what a step takes, it takes from here first, and what it gives back it gives back here, until every layer has done its
// step; then the rest goes to the pool. Pages on a shelf are pages of the pool: its budget and its counters include them.
#pragma once

#include <memory_resource>
#include <utility>
#include <vector>

#include "../core/resource_vector.hpp"
#include "../core/shape.hpp"
#include "../page/layer_pages.hpp"
#include "options.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

class page_stock {
public:
    resource_vector<page_ref> shorter,
        quantized;  ///< empty lists of a chunk, with room for one layer's commits

    explicit page_stock(std::pmr::memory_resource* memory) noexcept
        : shorter(memory), quantized(memory), shelves_(memory), pages_(memory), tables_(memory) {}

    /// What one step needs, layer by layer: takes(bytes) and gives_back(bytes) of pages' data, then end_layer(). Then fill().
    void takes(std::size_t bytes) { ++shelf_of(bytes).taken; }
    void gives_back(std::size_t bytes) { ++shelf_of(bytes).back; }
    /// table: spans that the layer must have room for, if it has not; commits: spans that it commits; alike: number of such layers.
    void end_layer(std::size_t table, std::size_t commits, int alike = 1) {
        for (shelf& s : shelves_) {
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
    /// Bytes of pages that fill() takes, where each takes a multiple of `multiple` bytes.
    std::size_t bytes_to_fill(std::size_t multiple) const noexcept {
        std::size_t bytes = 0;
        for (const shelf& s : shelves_)
            bytes += static_cast<std::size_t>(s.stay + s.most_back) *
                     round_up(page_pool::allocation(s.bytes), multiple);
        return bytes;
    }
    /// Takes the memory. Raises out_of_memory or std::bad_alloc; the caller then drops the stock.
    void fill(page_pool& pool) {
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
            for (int i = 0; i < s.room; ++i) pages_.push_back(pool.allocate(s.bytes, 0, 0));
    }

    /// A page of the stock; null if it has none of this size.
    page_ref take(std::size_t bytes, int format, int tokens) noexcept {
        for (shelf& s : shelves_) {
            if (s.bytes != bytes || s.held == 0) continue;
            page_ref p = std::move(pages_[s.place(--s.held)]);
            p->format = format;
            p->tokens = tokens;
            p->not_finite = 0;
            return p;
        }
        return {};
    }
    /// Takes a page that is not needed any more: to its shelf, if there is room, else to the pool.
    void give_back(page_ref p) noexcept {
        if (!p || p.shared()) return;
        for (shelf& s : shelves_) {
            if (s.bytes != p->bytes || s.held == s.room) continue;
            pages_[s.place(s.held++)] = std::move(p);
            return;
        }
    }
    /// Gives `spans` room for n spans.
    void grow(resource_vector<page_span>& spans, std::size_t layer, std::size_t n) {
        if (n <= spans.capacity()) return;
        if (layer >= tables_.size() || tables_[layer].capacity() < n) return spans.reserve(n);
        for (page_span& s : spans) tables_[layer].push_back(std::move(s));
        spans.swap(tables_[layer]);
        tables_[layer].clear();
    }
    /// Does it hold a step that is not done yet?
    bool reserved() const noexcept { return layers_ > 0; }
    /// A layer has done its step. After the last one, all that is left goes back.
    void end_step() noexcept {
        if (reserved() && --layers_ == 0) clear();
    }
    void clear() noexcept {
        page_stock empty(pages_.get_allocator().resource());
        swap(empty);
    }
    void swap(page_stock& other) noexcept {
        shelves_.swap(other.shelves_);
        pages_.swap(other.pages_);
        tables_.swap(other.tables_);
        shorter.swap(other.shorter);
        quantized.swap(other.quantized);
        std::swap(layers_, other.layers_);
        std::swap(commits_, other.commits_);
    }

    /// Bytes of pages, and of everything else.
    std::size_t page_bytes() const noexcept {
        std::size_t bytes = 0;
        for (const shelf& s : shelves_)
            bytes += static_cast<std::size_t>(s.held) * page_pool::allocation(s.bytes);
        return bytes;
    }
    std::size_t list_bytes() const noexcept {
        std::size_t bytes =
            shelves_.capacity() * sizeof(shelf) + tables_.capacity() * sizeof(resource_vector<page_span>) +
            (pages_.capacity() + shorter.capacity() + quantized.capacity()) * sizeof(page_ref);
        for (const auto& table : tables_) bytes += table.capacity() * sizeof(page_span);
        return bytes;
    }

private:
    struct shelf {
        std::size_t bytes;                  // of data
        int taken = 0, back = 0;            // by the layer that is counted
        int stay = 0, most_back = 0;        // of all layers
        int first = 0, held = 0, room = 0;  // places in pages_

        std::size_t place(int i) const noexcept {
            return static_cast<std::size_t>(first) + static_cast<std::size_t>(i);
        }
    };
    shelf& shelf_of(std::size_t bytes) {
        for (shelf& s : shelves_)
            if (s.bytes == bytes) return s;
        shelves_.push_back({bytes});
        return shelves_.back();
    }

    resource_vector<shelf> shelves_;
    resource_vector<page_ref> pages_;
    resource_vector<resource_vector<page_span>> tables_;
    int layers_ = 0;
    std::size_t commits_ = 0;
};

}}}  // namespace kvq::detail
