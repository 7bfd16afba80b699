// expect: kvq::channel_grid<bits, group, encoder, parameters, factors>: factors are no_token_scales, token_scales<coded>
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>

const auto made =
    kvq::make_format<kvq::channel_grid<4, 64, kvq::min_max, kvq::coded, kvq::coded>, kvq::scalar>();
