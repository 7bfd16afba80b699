// SPDX-License-Identifier: MIT
#include <kvq/backends/simd.hpp>

#include "attend.hpp"

std::vector<float> attend_wide() { return attend<kvq::simd<>>(); }
