// SPDX-License-Identifier: MIT
// A cache whose pages may be 16, 8, 4 or 2 bit, for tests that change formats.
#pragma once

#include "caches.hpp"

namespace test {

/// The last one is 8 bits in two planes; the upper one alone is the format of 4 bits.
using ladder_cache = test::typed_cache<
    test::formats<kvq::full<kvq::float16>, kvq::affine<8, kvq::per_token<32>>,
                  kvq::affine<4, kvq::per_channel<32>>, kvq::affine<2, kvq::per_channel<16>>,
                  with_planes<kvq::affine<4, kvq::per_channel<32>>>>,
    test::formats<kvq::full<kvq::float16>, kvq::affine<8, kvq::per_token<32>>,
                  kvq::affine<4, kvq::per_token<32>>, kvq::affine<2, kvq::per_token<16>>,
                  with_planes<kvq::affine<4, kvq::per_token<32>>>>>;
/// Those that get smaller from one to the next.
inline constexpr int ladder_formats = 4;

/// Layers that start in random formats.
inline kvq::cache_options ladder_options(generator& random, int layers) {
    kvq::cache_options options = random_options(random);
    for (int i = 0; i < layers; ++i) options.layers.push_back({random.between(0, 3), random.between(0, 3)});
    return options;
}

/// A request that makes sense for a cache of `layers` layers and a sequence of `tokens` tokens.
inline kvq::requantize_request random_request(generator& random, int layers, int tokens) {
    kvq::requantize_request r;
    r.key = random.between(-1, ladder_formats);
    r.value = random.between(-1, ladder_formats);
    if (random.one_in(2)) {
        r.first_layer = random.between(0, layers);
        r.last_layer = random.between(r.first_layer, layers);
    }
    if (random.one_in(2)) {
        r.first_token = random.between(0, tokens);
        r.last_token = random.between(r.first_token, tokens + 10);
    }
    r.only_smaller = random.one_in(2);
    r.new_pages = random.one_in(3);
    return r;
}

inline bool same(const kvq::requantize_report& a, const kvq::requantize_report& b) {
    return a.pages == b.pages && a.pages_left == b.pages_left && a.bytes_before == b.bytes_before &&
           a.bytes_after == b.bytes_after && a.bytes_peak == b.bytes_peak && a.bytes_freed == b.bytes_freed &&
           a.workspace == b.workspace;
}

}  // namespace test
