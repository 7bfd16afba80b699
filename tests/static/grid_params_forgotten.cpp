// expect: kvq::channel_grid: parameters are `byte_params` or params<P>, such as params<float16>
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/channel_grid.hpp>

const auto made =
    kvq::make_format<kvq::channel_grid<kvq::grid{.bits = {4}, .group = 64}, kvq::min_max, kvq::float16>,
                     kvq::scalar>();
