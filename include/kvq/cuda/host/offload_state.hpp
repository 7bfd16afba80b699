// Recurrent states from a device to the CPU, and back (offload.hpp): live state and snapshots.
//
// A page of the device holds all layers (state_pages.hpp), one of the CPU a layer: its bytes are a range of
// the other's. What snapshots share stays shared. Snapshots are the same bytes on both sides. Where only the
// CPU's layout quantizes them, that happens on the way there, and on the device they are exact again.
// Contract: the device has free pages for all that come (state_pages_of_device). The caller waits for the
// stream behind offload_state(); onload_state() does it itself. Memory of the CPU's pool as in offload.hpp.
// O(bytes)
#pragma once

#include "../../state/snapshot_codec.hpp"
#include "state_pages.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

inline status copy_state(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                         cudaStream_t stream) {
    const cudaError_t code = cudaMemcpyAsync(to, from, bytes, kind, stream);
    return code == cudaSuccess ? status{} : runtime_error(code, "moving state");
}

/// Does the page of any layer differ from that of the holder before?
inline bool is_new_page(const recurrent_state& s, std::size_t holder) noexcept {
    bool held = false, differs = holder == 0;
    for (std::size_t at = 0; at < s.layout().layers().size(); ++at) {
        const page* const p = s.held_page(at, holder).get();
        held = held || p != nullptr;
        differs = differs || p != s.held_page(at, holder - 1).get();
    }
    return held && differs;
}
/// The form of the device's page that holds what a holder has on the CPU: codes, where all that can be
/// quantized is.
inline common::state_form form_on_device(const recurrent_state& s, std::size_t holder, bool exact) noexcept {
    using common::state_form;
    bool some = false;
    for (std::size_t at = 0; at < s.layout().layers().size() && !exact; ++at) {
        const page* const p = s.held_page(at, holder).get();
        if (p == nullptr || s.layout().layers()[at].is_exact) continue;
        if (p->format == static_cast<int>(state_form::live)) return state_form::live;
        some = true;
    }
    return some ? state_form::snapshot : state_form::live;
}
/// How many pages of a device hold the state.
struct state_pages_of_device {
    std::size_t live = 0, snapshots = 0;

    state_pages_of_device(const recurrent_state& s, bool exact) noexcept {
        for (std::size_t holder = 0; holder <= s.snapshots().size(); ++holder)
            if (is_new_page(s, holder))
                ++(form_on_device(s, holder, exact) == common::state_form::live ? live : snapshots);
    }
};

/// Copies a state of the device to an empty one of the CPU, in pages of its pool.
inline status offload_state(const recurrent_state& from, const state_pages& device, recurrent_state& to,
                            page_pool& pool, cudaStream_t stream) {
    using common::state_form;
    const std::size_t snapshots = from.snapshots().size();
    std::vector<page_ref> before(to.layout().layers().size());
    page_pool scratch(pool.memory());
    status result;
    to.assign(from, [&](std::size_t at, std::size_t holder) -> page_ref {
        const common::state_layer& l = to.layout().layers()[at];
        const page* const p = from.held_page(0, holder).get();
        if (p == nullptr) return {};
        const bool codes = p->format == static_cast<int>(state_form::snapshot);
        const state_form form =
            (codes || holder < snapshots) && !l.is_exact ? state_form::snapshot : state_form::live;
        page_ref& last = before[at];
        if (holder > 0 && p == from.held_page(0, holder - 1).get() && last->format == static_cast<int>(form))
            return last;
        const std::byte* const at_device =
            device.data(*p) + device.offset(at, static_cast<state_form>(p->format));
        if (codes || form == state_form::live) {
            last = pool.allocate(l.page_bytes(form), static_cast<int>(form), 0);
            if (result)
                result = copy_state(last->data(), at_device, last->bytes, cudaMemcpyDeviceToHost, stream);
            return last;
        }
        const std::size_t bytes = l.page_bytes(state_form::live);
        const page_ref live = scratch.allocate(bytes, 0, 0);
        last = pool.allocate(l.page_bytes(form), static_cast<int>(form), 0);
        if (result) result = copy_state(live->data(), at_device, bytes, cudaMemcpyDeviceToHost, stream);
        if (const cudaError_t code = cudaStreamSynchronize(stream); result && code != cudaSuccess)
            result = runtime_error(code, "moving state");
        std::memset(last->data(), 0, last->bytes);
        for (std::size_t i = 0; i < l.parts.size(); ++i)
            common::quantize_part(l.parts[i], live->data() + l.place(state_form::live, i).offset,
                                  last->data() + l.place(form, i).offset);
        return last;
    });
    return result;
}

/// Copies a state of the CPU to an empty one of the device.
inline status onload_state(const recurrent_state& from, state_pages& device, recurrent_state& to,
                           cudaStream_t stream) {
    using common::state_form;
    page_pool scratch(std::pmr::new_delete_resource());
    std::vector<page_ref> until_copied;
    page_ref last;
    status result;
    to.assign(from, [&](std::size_t, std::size_t holder) -> page_ref {
        const auto layers = from.layout().layers();
        bool held = false;
        for (std::size_t at = 0; at < layers.size(); ++at) held = held || from.held_page(at, holder);
        if (!held) return last = {};
        if (!is_new_page(from, holder)) return last;
        const state_form form = form_on_device(from, holder, device.is_exact());
        last = device.allocate(form);
        for (std::size_t at = 0; at < layers.size(); ++at) {
            const common::state_layer& l = layers[at];
            const std::size_t bytes = l.page_bytes(form);
            std::byte* const at_device = device.data(*last) + device.offset(at, form);
            page_ref p = from.held_page(at, holder);
            if (!p) {
                const cudaError_t code = cudaMemsetAsync(at_device, 0, bytes, stream);
                if (result && code != cudaSuccess) result = runtime_error(code, "moving state");
                continue;
            }
            if (form == state_form::live && static_cast<state_form>(p->format) != state_form::live) {
                page_ref live = scratch.allocate(bytes, 0, 0);
                std::memset(live->data(), 0, bytes);
                for (std::size_t i = 0; i < l.parts.size(); ++i)
                    common::dequantize_part(l.parts[i], p->data() + l.place(state_form::snapshot, i).offset,
                                            live->data() + l.place(state_form::live, i).offset);
                until_copied.push_back(live);
                p = std::move(live);
            }
            if (result) result = copy_state(at_device, p->data(), bytes, cudaMemcpyHostToDevice, stream);
        }
        return last;
    });
    if (const cudaError_t code = cudaStreamSynchronize(stream); result && code != cudaSuccess)
        result = runtime_error(code, "moving state");
    return result;
}

}}}  // namespace kvq::cuda::detail
