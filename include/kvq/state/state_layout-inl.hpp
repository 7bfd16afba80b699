// Definitions of state_layout.hpp.
#pragma once

#include <algorithm>

#include "../core/allocate.hpp"
#include "../core/error.hpp"
#include "../page/page.hpp"
#include "snapshot_codec.hpp"
#include "state_layout.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

/// In files and messages the length of a name has 16 bits.
inline constexpr std::size_t most_part_name = 1024;

/// Bytes of a part as the engine has it; SIZE_MAX where they do not fit.
KVQ_FUNC std::size_t live_bytes_of(const state_part& p) noexcept {
    return bounded_product(
        bounded_product(bounded_product(static_cast<std::size_t>(p.heads), static_cast<std::size_t>(p.rows)),
                        static_cast<std::size_t>(p.columns)),
        size_of(p.type));
}

KVQ_FUNC void check_part(int layer, std::span<const state_part> parts, std::size_t i) {
    const state_part& p = parts[i];
    expect(!p.name.empty() && p.name.size() <= most_part_name, "part ", i, " of layer ", layer,
           " has a name of ", p.name.size(), " bytes, not 1 to ", most_part_name);
    for (std::size_t other = 0; other < i; ++other)
        expect(parts[other].name != p.name, "layer ", layer, " has two parts of the name ", p.name);
    expect(p.type <= float_type::bf16, "part ", p.name, " of layer ", layer, " has type ",
           static_cast<int>(p.type), ", not fp32 (0), fp16 (1) or bf16 (2)");
    expect(p.snapshot <= snapshot_type::e4m3, "snapshots of part ", p.name, " of layer ", layer,
           " have type ", static_cast<int>(p.snapshot),
           ", not exact (0), int8-rows (1), int8-columns (2) or e4m3 (3)");
    expect(p.heads >= 1 && p.rows >= 1 && p.columns >= 1, "part ", p.name, " of layer ", layer, " has ",
           p.heads, " heads of ", p.rows, " rows and ", p.columns, " columns: 0 bytes or less");
    // With room for scales, which are no more than the values.
    expect(live_bytes_of(p) <= most_bytes / 16, "part ", p.name, " of layer ", layer, " has ", p.heads,
           " heads of ", p.rows, " rows and ", p.columns, " columns of ", size_of(p.type),
           " bytes, more than a memory has");
}

}  // namespace detail

KVQ_FUNC state_layout::state_layout(std::span<const std::vector<state_part>> layers) {
    detail::expect(layers.size() <= std::size_t{1} << 20, "a state for ", layers.size(),
                   " layers: the limit is ", 1 << 20);
    for (std::size_t number = 0; number < layers.size(); ++number) {
        const std::vector<state_part>& parts = layers[number];
        if (parts.empty()) continue;
        detail::state_layer& layer = layers_.emplace_back();
        layer.number = static_cast<int>(number);
        for (std::size_t i = 0; i < parts.size(); ++i) {
            detail::check_part(layer.number, parts, i);
            if (parts[i].snapshot != snapshot_type::exact) layer.is_exact = false;
            const std::size_t bytes[] = {detail::live_bytes_of(parts[i]),
                                         detail::snapshot_bytes_of(parts[i])};
            for (int form = 0; form < 2; ++form) {
                layer.places[form].push_back({layer.bytes[form], bytes[form]});
                layer.bytes[form] = detail::bounded_sum(
                    layer.bytes[form], detail::round_up(bytes[form], detail::state_alignment));
            }
        }
        layer.parts = parts;
        for (int form = 0; form < 2; ++form)
            bytes_[form] = detail::bounded_sum(
                bytes_[form], detail::bounded_sum(page_pool::allocation(0), layer.bytes[form]));
        detail::expect(bytes_[0] <= detail::most_bytes && bytes_[1] <= detail::most_bytes,
                       "the state of layers 0 to ", number, " has more bytes than a memory has: ", bytes_[0]);
    }
    detail::expect(!layers_.empty(), "a state of 0 bytes: none of ", layers.size(), " layers has a part");
}

KVQ_FUNC std::size_t state_layout::index(int layer) const {
    const auto found = std::lower_bound(layers_.begin(), layers_.end(), layer,
                                        [](const detail::state_layer& l, int n) { return l.number < n; });
    detail::expect(found != layers_.end() && found->number == layer, "layer ", layer,
                   " has no state: layers with state are ", layers_.size(), ", from ", layers_.front().number,
                   " to ", layers_.back().number);
    return static_cast<std::size_t>(found - layers_.begin());
}

KVQ_FUNC int state_layout::part(int layer, std::string_view name) const {
    const std::vector<state_part>& list = layers_[index(layer)].parts;
    std::string names;
    for (std::size_t i = 0; i < list.size(); ++i) {
        if (list[i].name == name) return static_cast<int>(i);
        names += (i > 0 ? ", " : "") + list[i].name;
    }
    detail::fail("layer ", layer, " has no part ", std::string(name), ": it has ", names);
}

}}
