// expect: kvq::mixed_bits: .bits are different widths of 0 to 8 bits, the widest first
// SPDX-License-Identifier: MIT
#include <kvq/schemes/affine.hpp>

kvq::mixed_affine<kvq::width_mix{.bits = {2, 4}, .average_eighths = 24}> made;
