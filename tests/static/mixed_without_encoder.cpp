// expect: kvq::channel_grid<grid{...}, encoder, parameters, token scales>: the second argument must be an encoder
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/channel_grid.hpp>

const auto made = kvq::make_format<
    kvq::channel_grid<kvq::grid{.bits = {4, 2, 0}, .average_eighths = 16, .group = 64}, kvq::byte_params>,
    kvq::scalar>();
