// expect: kvq::channel_grid<bits, group, encoder, parameters, factors>: the third argument must be an encoder
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>

const auto made = kvq::make_format<kvq::channel_grid<4, 64, kvq::params<kvq::float16>>, kvq::scalar>();
