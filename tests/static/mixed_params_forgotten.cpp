// expect: kvq::channel_grid, kvq::mixed_width: parameters are `coded` or params<P>, such as params<float16>
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>

const auto made =
    kvq::make_format<kvq::mixed_width<kvq::widths<4, 2, 0>, 16, 64, kvq::min_max, float>, kvq::scalar>();
