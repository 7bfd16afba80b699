// expect: average bits must be a multiple of 1/8
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>
#include <kvq/schemes/channel_grid.hpp>

using scheme = kvq::channel_grid<kvq::grid{.bits = {4, 2}, .average = 2.3, .group = 64}>;
scheme made;
