// expect: kvq needs sums in the order in which they are written
// SPDX-License-Identifier: MIT
#define __ASSOCIATIVE_MATH__ 1
#include <kvq/config.hpp>
