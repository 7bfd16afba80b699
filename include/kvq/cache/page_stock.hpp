// Memory that a sequence holds for its next step (cache::reserve): pages, tables of spans, the lists of a
// chunk.
//
//   shelf   pages of one size, as many as a step over all layers holds at a time, in any order of the layers:
//           the sum over layers of what stays, and the most that one layer gives back at its end
//
// Contract: what a step takes, it takes from here first, and what it gives back it gives back here, until
// every layer has done its step; then the rest goes to the pool. Pages on a shelf are pages of the pool: its
// budget and its counters include them.
#pragma once

#include <memory_resource>

#include "../core/resource_vector.hpp"
#include "../page/layer_pages.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

/// Bytes of the data of a page, and those of them in a lower plane.
struct plane_bytes {
    std::size_t all, lower;

    std::size_t rounded(std::size_t multiple) const noexcept {
        return round_up(page_pool::allocation(all - lower), multiple) + round_up(lower, multiple);
    }
    friend bool operator==(const plane_bytes&, const plane_bytes&) = default;
};

class page_stock {
public:
    resource_vector<page_ref> shorter,
        quantized;  ///< empty lists of a chunk, with room for one layer's commits

    explicit page_stock(std::pmr::memory_resource* memory) noexcept;

    /// What one step needs, layer by layer: takes(bytes) and gives_back(bytes) of pages' data, then
    /// end_layer(). Then fill().
    void takes(const plane_bytes& bytes) { ++shelf_of(bytes).taken; }
    void gives_back(const plane_bytes& bytes) { ++shelf_of(bytes).back; }
    /// table: spans that the layer must have room for, if it has not; commits: spans that it commits; alike:
    /// number of such layers; shared: others share its chunk, so that what it gives back comes too late for
    /// them.
    void end_layer(std::size_t table, std::size_t commits, int alike = 1, bool shared = false);
    /// Bytes of pages that fill() takes, where each takes a multiple of `multiple` bytes.
    std::size_t bytes_to_fill(std::size_t multiple) const noexcept;
    /// Takes the memory. Raises out_of_memory or std::bad_alloc; the caller then drops the stock.
    void fill(page_pool& pool);

    /// A page of the stock; null if it has none of this size.
    page_ref take(const plane_bytes& bytes, int format, int tokens) noexcept;
    /// Takes a page that is not needed any more: to its shelf, if there is room, else to the pool.
    void give_back(page_ref p) noexcept;
    /// Gives `spans` room for n spans.
    void grow(resource_vector<page_span>& spans, std::size_t layer, std::size_t n);
    /// Does it hold a step that is not done yet?
    bool reserved() const noexcept { return layers_ > 0; }
    /// A layer has done its step. After the last one, all that is left goes back.
    void end_step() noexcept;
    void clear() noexcept;
    void swap(page_stock& other) noexcept;

    /// Bytes of pages, and of everything else.
    std::size_t page_bytes() const noexcept;
    std::size_t list_bytes() const noexcept;

private:
    struct shelf {
        plane_bytes bytes;
        int taken = 0, back = 0;            // by the layer that is counted
        int stay = 0, most_back = 0;        // of all layers
        int first = 0, held = 0, room = 0;  // places in pages_

        std::size_t place(int i) const noexcept;
    };
    shelf& shelf_of(const plane_bytes& bytes);

    resource_vector<shelf> shelves_;
    resource_vector<page_ref> pages_;
    resource_vector<resource_vector<page_span>> tables_;
    int layers_ = 0;
    std::size_t commits_ = 0;
};

}}}  // namespace kvq::detail

#if !defined(KVQ_COMPILED)
#include "page_stock-inl.hpp"
#endif
