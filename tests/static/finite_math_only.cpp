// expect: kvq needs infinities and NaN: compile without -ffast-math
// SPDX-License-Identifier: MIT
// What -ffast-math and -Ofast define.
#undef __FINITE_MATH_ONLY__
#define __FINITE_MATH_ONLY__ 1
#include <kvq/config.hpp>
