// expect: kvq::mixed_width<widths, eighths, group, encoder, parameters>: the fourth argument must be an encoder
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>

const auto made = kvq::make_format<kvq::mixed_width<kvq::widths<4, 2, 0>, 16, 64, kvq::coded>, kvq::scalar>();
