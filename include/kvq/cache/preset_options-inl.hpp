// Definitions of preset_options.hpp.
#pragma once

#include "../core/bits.hpp"
#include "../core/error.hpp"
#include "preset_options.hpp"

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC cache_options preset_options(int recent) {
    detail::expect(recent >= 0, "recent must not be negative, got ", recent);
    cache_options options;
    options.sinks = 4;
    options.recent = recent;
    options.statistics = key_statistics::own;
    return options;
}

KVQ_FUNC cache_options preset_options(const format_pair& formats, int recent) {
    cache_options options = preset_options(recent);
    options.keys = formats.keys;
    options.values = formats.values;
    return options;
}

KVQ_FUNC cache_options protect_layers(int layers, int protect, cache_options options) {
    detail::expect(layers >= 1, "a cache needs at least 1 layer, got ", layers);
    detail::expect(protect >= 0, "a negative number of layers cannot be protected: ", protect);
    options.layers.assign(static_cast<std::size_t>(layers), layer_format{0, 0});
    for (int i = 0; i < detail::smaller(protect, layers); ++i)
        options.layers[static_cast<std::size_t>(i)] =
            options.layers[static_cast<std::size_t>(layers - 1 - i)] = layer_format{1, 1};
    return options;
}

}}
