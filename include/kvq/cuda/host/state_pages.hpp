// Recurrent state of a cache on the device (cache.hpp): memory for it, and where a layer's parts lie.
//
// A page holds the state of all layers that have it, layer by layer, each as on the CPU
// (state/state_layout.hpp): so a sequence has one page, and one more for each snapshot that the live state
// has left. The host counts and shares them (state/recurrent_state.hpp). Snapshots have pages of their own
// where some part is quantized.
// Contract: pages are zeroed, copied and quantized in the order of the step's stream, by the begin of a step
// and by trims.
#pragma once

#include <limits>
#include <memory_resource>
#include <vector>

#include "../../state/recurrent_state.hpp"
#include "device_format.hpp"
#include "page_pool.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

/// A part of the state of a layer for the rows of a step: that of row b begins at data + row_slots[b] *
/// slot_bytes. A slot of -1 is a row that is not there.
struct state_view {
    std::byte* data = nullptr;       ///< device memory, a multiple of 64
    std::size_t slot_bytes = 0;      ///< from one sequence to the next
    std::size_t bytes = 0;           ///< of a sequence
    int slot_count = 0;              ///< slots that there is memory for
    const int* row_slots = nullptr;  ///< device memory, [rows]
    int rows = 0;
};

namespace detail {

class state_pages final : public common::state_device {
public:
    using state_form = common::state_form;

    state_pages(const state_layout& layers, const device_allocator& from)
        : layers_(layers), page_(joined(layers)) {
        const common::state_layer& page = page_.layers()[0];
        std::size_t first = 0;
        for (const common::state_layer& l : layers_.layers()) {
            first_parts_.push_back(first);
            first += l.parts.size();
        }
        for (const state_form form : {state_form::live, state_form::snapshot})
            pages_[index(form)].open(from, form == state_form::live ? "states of sequences" : "snapshots",
                                     index(form), 0, 1, page.page_bytes(form), 0);
        for (std::size_t i = 0; i < page.parts.size(); ++i) {
            if (parts_.empty() || parts_.back().count == state_parts::room) parts_.emplace_back();
            const state_part& p = page.parts[i];
            const common::state_place& live = page.place(state_form::live, i);
            parts_.back().data[parts_.back().count++] = {
                live.offset, page.place(state_form::snapshot, i).offset,
                live.bytes,  p.heads,
                p.rows,      p.columns,
                p.type,      p.snapshot};
        }
    }
    /// Kernels of any format: all have these.
    void use(const device_functions& functions) noexcept { functions_ = &functions; }

    const state_layout& layers() const noexcept { return layers_; }
    bool is_exact() const noexcept { return page_.layers()[0].is_exact; }
    /// Where the bytes of layers().layers()[i] begin in a page.
    std::size_t offset(std::size_t i, state_form form = state_form::live) const noexcept {
        return page_.layers()[0].place(form, first_parts_[i]).offset;
    }
    const device_pages& pages(state_form form = state_form::live) const noexcept {
        return pages_[index(form)];
    }
    /// Bytes of a snapshot.
    std::size_t snapshot_bytes() const noexcept {
        return pages(is_exact() ? state_form::live : state_form::snapshot).page_bytes();
    }
    std::size_t used_bytes() const noexcept { return pages_[0].used_bytes() + pages_[1].used_bytes(); }
    std::size_t allocated() const noexcept { return pages_[0].allocated() + pages_[1].allocated(); }
    std::size_t used() const noexcept {
        return static_cast<std::size_t>(pages_[0].pages().used() + pages_[1].pages().used());
    }
    std::byte* data(const page& p) const noexcept {
        return pages_[p.format].memory().page(tensor::key, 0, p.number);
    }

    status grow(int pages, cudaStream_t stream) {
        if (status s = pages_[0].grow(pages, stream); !s || is_exact()) return s;
        return pages_[1].grow(pages, stream);
    }
    /// Free pages for so many sequences that write, or are restored, and for so many snapshots. Pages are
    /// zeroed, copied and quantized on this stream from now on.
    status ensure(std::size_t live, std::size_t snapshots, bool may_grow, cudaStream_t stream) {
        stream_ = stream;
        if (status s = pages_[0].ensure(static_cast<int>(live), may_grow, stream); !s) return s;
        return pages_[1].ensure(static_cast<int>(snapshots), may_grow, stream);
    }
    /// The same on the stream of the last call.
    status ensure_here(std::size_t live, std::size_t snapshots, bool may_grow) {
        return ensure(live, snapshots, may_grow, stream_);
    }
    /// An empty state.
    recurrent_state make(const snapshot_policy& policy) {
        return recurrent_state(page_, tables_, policy, this);
    }
    /// The first error since the last call.
    status take_error() noexcept { return std::exchange(error_, status{}); }

    page_ref allocate(state_form form) noexcept override { return pages_[index(form)].pages().take(); }
    void zero(const page& to) noexcept override { note(cudaMemsetAsync(data(to), 0, to.bytes, stream_)); }
    void copy(const page& from, const page& to) noexcept override {
        if (from.format == to.format)
            return note(cudaMemcpyAsync(data(to), data(from), to.bytes, cudaMemcpyDeviceToDevice, stream_));
        const bool quantize = from.format == index(state_form::live);
        for (const state_parts& some : parts_)
            if (status s = functions_->convert_state(some, quantize, data(from), data(to), stream_);
                !s && error_)
                error_ = s;
    }

private:
    static constexpr int index(state_form form) noexcept { return static_cast<int>(form); }
    void note(cudaError_t code) noexcept {
        if (error_ && code != cudaSuccess) error_ = runtime_error(code, "copying state");
    }
    /// All layers as one, whose page the device has.
    static state_layout joined(const state_layout& layers) {
        std::vector<state_part> parts;
        for (const common::state_layer& l : layers.layers())
            for (const state_part& p : l.parts) {
                common::expect(p.values() / static_cast<std::size_t>(p.heads) <=
                                   static_cast<std::size_t>((std::numeric_limits<int>::max)()) / 2,
                               "layer ", l.number, ", part ", p.name, ": ", p.rows, " rows of ", p.columns,
                               " columns are more than a device has");
                parts.push_back(p);
                parts.back().name = std::to_string(parts.size());
            }
        return state_layout{{parts}};
    }

    state_layout layers_, page_;
    std::vector<std::size_t> first_parts_;  // by layer with state
    std::vector<state_parts> parts_;
    const device_functions* functions_ = nullptr;
    device_pages pages_[2];  // by form
    page_pool tables_{std::pmr::new_delete_resource()};
    cudaStream_t stream_ = nullptr;
    status error_;
};

}  // namespace detail
}}}  // namespace kvq::cuda
