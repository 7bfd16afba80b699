// Cache options for presets: window, page size, and the layers that get more bits.
//
//   cache cache(shape, preset_options(make_formats<std4>()));
//
//   options = protect_layers(shape.layers, 2);      first and last layers: second format of both lists; other layers: first format
#pragma once

#include "options.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// 4 sinks, at least `recent` tokens in 16 bit, pages of default_page_tokens.
/// With less than 32 recent tokens the error grows more than the bytes shrink.
inline cache_options preset_options(int recent = 32) {
    detail::expect(recent >= 0, "recent must not be negative, got ", recent);
    cache_options options;
    options.sinks = 4;
    options.recent = recent;
    return options;
}

inline cache_options preset_options(const format_pair& formats, int recent = 32) {
    cache_options options = preset_options(recent);
    options.keys = formats.keys;
    options.values = formats.values;
    return options;
}

/// Options whose first and last `protect` layers use the second formats of the lists, for K and V. From half of the layers on: all layers.
inline cache_options protect_layers(int layers, int protect, cache_options options = preset_options()) {
    detail::expect(layers >= 1, "a cache needs at least 1 layer, got ", layers);
    detail::expect(protect >= 0, "a negative number of layers cannot be protected: ", protect);
    options.layers.assign(static_cast<std::size_t>(layers), layer_format{0, 0});
    for (int i = 0; i < detail::smaller(protect, layers); ++i)
        options.layers[static_cast<std::size_t>(i)] =
            options.layers[static_cast<std::size_t>(layers - 1 - i)] = layer_format{1, 1};
    return options;
}

}}  // namespace kvq
