// expect: kvq::channel_grid<grid{...}, encoder, parameters, token scales>: token scales are no_token_scales, token_scales<byte_params>
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/channel_grid.hpp>

const auto made = kvq::make_format<
    kvq::channel_grid<kvq::grid{.bits = {4}, .group = 64}, kvq::min_max, kvq::byte_params, kvq::byte_params>,
    kvq::scalar>();
