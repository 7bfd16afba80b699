// expect: kvq::channel_grid: .bits is a width of 1 to 8, or different widths of 0 to 8 bits, the widest first
// SPDX-License-Identifier: MIT
#include <kvq/schemes/channel_grid.hpp>

kvq::channel_grid<kvq::grid{.bits = {2, 4}, .average_eighths = 24, .group = 64}> made;
