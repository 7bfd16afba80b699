// Cache options for presets: window, page size, and the layers that get more bits.
//
//   cache cache(shape, preset_options(make_formats<std4>()));
//
//   options = protect_layers(shape.layers, 2);      first and last layers: second format of both lists; other
//                                                   layers: first format
#pragma once

#include "options.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// 4 sinks, at least `recent` tokens in 16 bit, pages of default_page_tokens, key_statistics::own.
/// With less than 32 recent tokens the error grows more than the bytes shrink.
cache_options preset_options(int recent = 32);

cache_options preset_options(const format_pair& formats, int recent = 32);

/// Options whose first and last `protect` layers use the second formats of the lists, for K and V. From half
/// of the layers on: all layers.
cache_options protect_layers(int layers, int protect, cache_options options = preset_options());

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "preset_options-inl.hpp"
#endif
