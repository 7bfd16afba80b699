// expect: kvq::scheme: several widths are per channel
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

const auto made = kvq::make_format<
    kvq::mixed_affine<kvq::width_mix{.bits = {4, 2, 0}, .average_eighths = 16}, kvq::per_token<64>>,
    kvq::scalar>();
