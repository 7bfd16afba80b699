// The layout of recurrent state: what layers without keys and values keep of a sequence (Gated DeltaNet,
// Mamba, Kimi Linear, RWKV).
//
//   std::vector<std::vector<kvq::state_part>> layers(64);       a model of 64 layers; none has state yet
//   layers[0] = {{.name = "recurrent", .heads = 48, .rows = 128, .columns = 128,
//                 .snapshot = kvq::snapshot_type::int8_columns},
//                {.name = "convolution", .type = kvq::float_type::bf16, .rows = 10240, .columns = 3}};
//   kvq::state_layout layout(layers);
//
// The parts of a layer (state/state_part.hpp) lie in one page, each at a multiple of 64 bytes. Snapshots hold
// the same page, or one in which some parts are quantized (state/snapshot_codec.hpp).
// Contract: kvq::error for sizes that are out of range or that no memory has, with the layer, the part and
// the numbers.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "state_part.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

/// The two pages that can hold a layer: as the engine has it, and as snapshots have it.
enum class state_form : unsigned char { live, snapshot };

/// Where a part lies in a page.
struct state_place {
    std::size_t offset = 0, bytes = 0;
};

/// A layer with state.
struct state_layer {
    int number = 0;  ///< in the list of the model's layers
    std::vector<state_part> parts = {};
    std::vector<state_place> places[2] = {};  ///< of the parts, by form
    std::size_t bytes[2] = {};                ///< of the pages, by form
    bool is_exact = true;                     ///< both forms are the same

    std::size_t page_bytes(state_form form) const noexcept { return bytes[static_cast<int>(form)]; }
    const state_place& place(state_form form, std::size_t part) const noexcept {
        return places[static_cast<int>(form)][part];
    }
};

}  // namespace detail

class state_layout {
public:
    /// The parts of every layer of a model; none for a layer of another kind. Raises kvq::error for a list
    /// without any part, a size below 1, a type that does not exist, a name that is empty or used twice in a
    /// layer, and bytes that no memory has.
    explicit state_layout(std::span<const std::vector<state_part>> layers);
    state_layout(std::initializer_list<std::vector<state_part>> layers)
        : state_layout(std::span<const std::vector<state_part>>(layers.begin(), layers.size())) {}

    /// Layers with state, in the order of the model.
    std::span<const detail::state_layer> layers() const noexcept { return layers_; }
    /// The parts of a layer of the model. Raises kvq::error where it has none. O(log layers), as the next
    /// two.
    std::span<const state_part> parts(int layer) const { return layers_[index(layer)].parts; }
    /// The number of a part of a layer. Raises kvq::error for a name that the layer does not have.
    int part(int layer, std::string_view name) const;
    /// The place of a layer of the model in layers(). Raises kvq::error where it has no state.
    std::size_t index(int layer) const;

    /// Bytes of the pages of all layers, headers included: of a live state, and of a snapshot.
    std::size_t live_bytes() const noexcept { return bytes_[0]; }
    std::size_t snapshot_bytes() const noexcept { return bytes_[1]; }

private:
    std::vector<detail::state_layer> layers_;
    std::size_t bytes_[2] = {};
};

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "state_layout-inl.hpp"
#endif
