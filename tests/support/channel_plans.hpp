// SPDX-License-Identifier: MIT
// Plans of channel widths from random statistics.
#pragma once

#include <kvq/schemes/affine.hpp>
#include <utility>

#include "blocks.hpp"
#include "tensors.hpp"

namespace test {

/// Channels of very different size, in keys and queries.
inline kvq::calibration random_statistics(generator& random, const kvq::cache_shape& shape,
                                          bool products = false) {
    kvq::calibration statistics(shape, products);
    for (int layer = 0; layer < shape.layers; ++layer) {
        auto k = random_tensor(random, 64, shape.kv_heads, shape.head_dim),
             q = random_tensor(random, 20, 2 * shape.kv_heads, shape.head_dim);
        for (int h = 0; h < shape.kv_heads; ++h)
            for (int c = 0; c < shape.head_dim; ++c) {
                const float size = random.any_magnitude(-5, 3);
                for (int t = 0; t < 64; ++t) k.view().at(t, h)[c] *= size;
                for (int t = 0; t < 20; ++t) q.view().at(t, 2 * h)[c] *= random.any_magnitude(-3, 3);
            }
        statistics.add_keys(layer, std::as_const(k).view());
        statistics.add_queries(layer, std::as_const(q).view());
    }
    return statistics;
}

template <class Scheme>
Scheme with_random_plan(generator& random, const kvq::cache_shape& shape) {
    return Scheme(random_statistics(random, shape));
}

}  // namespace test
