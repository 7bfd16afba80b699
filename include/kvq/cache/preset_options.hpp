// What a cache of a preset should be told: window, page size, and which layers deserve more bits.
//
//   cache<std4, std4, simd<>> cache(shape, preset_options());
//
//   using pair = protected_layers<low2, std5>;                      first and last layers in std5, the others in low2
//   cache<pair::key_formats, pair::value_formats, simd<>> cache(shape, protect_layers(shape.layers, 2));
#pragma once

#include "../page/formats.hpp"
#include "options.hpp"

namespace kvq::inline v0_1 {

/// 4 sinks, at least `recent` tokens in 16 bit, pages of 128 tokens (values of presets share parameters over a page).
/// Less than 32 recent tokens cost more error than they save bytes.
inline cache_options preset_options(int recent = 32) {
    detail::expect(recent >= 0, "recent must not be negative, got ", recent);
    cache_options options;
    options.sinks = 4;
    options.recent = recent;
    options.page_tokens = 128;
    return options;
}

/// The formats of two presets (or pairs like kivi<4>), the inner one first.
template <class Inner, class Outer>
struct protected_layers {
    using key_formats = formats<typename Inner::keys, typename Outer::keys>;
    using value_formats = formats<typename Inner::values, typename Outer::values>;
};

/// Options whose first and last `protect` layers use the second formats of the lists, for K and V. protect may reach to the middle.
inline cache_options protect_layers(int layers, int protect, cache_options options = preset_options()) {
    detail::expect(layers >= 1, "a cache needs at least 1 layer, got ", layers);
    detail::expect(protect >= 0, "a negative number of layers cannot be protected: ", protect);
    options.layers.assign(static_cast<std::size_t>(layers), layer_format{0, 0});
    for (int i = 0; i < detail::smaller(protect, layers); ++i)
        options.layers[static_cast<std::size_t>(i)] =
            options.layers[static_cast<std::size_t>(layers - 1 - i)] = layer_format{1, 1};
    return options;
}

}  // namespace kvq::inline v0_1
