// expect: kvq::code_widths: 2 to 8 different widths of 0 to 8 bits, the widest first
// SPDX-License-Identifier: MIT
#include <kvq/schemes/affine.hpp>

kvq::mixed_affine<kvq::code_widths<2, 4>, kvq::average_eighths<24>> made;
