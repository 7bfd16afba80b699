// Recurrent state of a cache on the device (cache.hpp): memory for it, and where a layer's parts lie.
//
// A page holds the state of all layers that have it, layer by layer, each as on the CPU
// (state/state_layout.hpp): so a sequence has one page, and one more for each snapshot that the live state
// has left. The host counts and shares them (state/recurrent_state.hpp).
// Contract: snapshots are exact here. Pages are zeroed and copied in the order of the step's stream, by the
// begin of a step.
#pragma once

#include <limits>
#include <memory_resource>
#include <vector>

#include "../../state/recurrent_state.hpp"
#include "../../state/snapshot_codec.hpp"
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
    /// Raises kvq::error for snapshots that are not exact.
    state_pages(const state_layout& layers, const device_allocator& from)
        : layers_(layers), page_(whole_page(layers)) {
        std::size_t bytes = 0;
        for (const common::state_layer& l : layers_.layers()) {
            offsets_.push_back(bytes);
            bytes += l.page_bytes(common::state_form::live);
        }
        pages_.open(from, "states of sequences", 0, 0, 1, bytes, 0);
    }

    const state_layout& layers() const noexcept { return layers_; }
    /// Where the bytes of layers().layers()[i] begin in a page.
    std::size_t offset(std::size_t i) const noexcept { return offsets_[i]; }
    const device_pages& pages() const noexcept { return pages_; }
    std::byte* data(const page& p) const noexcept { return pages_.memory().page(tensor::key, 0, p.number); }

    status grow(int pages, cudaStream_t stream) { return pages_.grow(pages, stream); }
    /// Free pages for so many sequences that write, or are restored. Pages are zeroed and copied on this
    /// stream from now on.
    status ensure(std::size_t more, bool may_grow, cudaStream_t stream) {
        stream_ = stream;
        return more == 0 ? status{} : pages_.ensure(static_cast<int>(more), may_grow, stream);
    }
    /// An empty state.
    recurrent_state make(const snapshot_policy& policy) {
        return recurrent_state(page_, tables_, policy, this);
    }
    /// The first error since the last call.
    status take_error() noexcept {
        const cudaError_t code = std::exchange(error_, cudaSuccess);
        return code == cudaSuccess ? status{} : runtime_error(code, "copying state");
    }

    page_ref allocate() noexcept override { return pages_.pages().take(); }
    void zero(const page& to) noexcept override { note(cudaMemsetAsync(data(to), 0, to.bytes, stream_)); }
    void copy(const page& from, const page& to) noexcept override {
        note(cudaMemcpyAsync(data(to), data(from), to.bytes, cudaMemcpyDeviceToDevice, stream_));
    }

private:
    static constexpr int columns = 16;  // fp32 numbers of state_alignment bytes

    void note(cudaError_t code) noexcept {
        if (error_ == cudaSuccess) error_ = code;
    }
    /// The layout of a page as one tensor.
    static state_layout whole_page(const state_layout& layers) {
        std::size_t bytes = 0;
        for (const common::state_layer& l : layers.layers()) {
            bytes += l.page_bytes(common::state_form::live);
            for (const state_part& p : l.parts)
                common::expect(p.snapshot == snapshot_type::exact, "layer ", l.number, ", part ", p.name,
                               ": a device keeps snapshots exact, not in ", name(p.snapshot),
                               "; offload() quantizes them for the CPU");
        }
        const std::size_t rows = bytes / common::state_alignment;
        common::expect(rows <= static_cast<std::size_t>((std::numeric_limits<int>::max)()),
                       "the state of a sequence has ", bytes, " bytes, more than a device has");
        return {{{.name = "layers", .rows = static_cast<int>(rows), .columns = columns}}};
    }

    state_layout layers_, page_;
    std::vector<std::size_t> offsets_;  // by layer with state
    device_pages pages_;
    page_pool tables_{std::pmr::new_delete_resource()};
    cudaStream_t stream_ = nullptr;
    cudaError_t error_ = cudaSuccess;
};

}  // namespace detail
}}}  // namespace kvq::cuda
