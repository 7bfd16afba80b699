// SPDX-License-Identifier: MIT
#include <kvq/backends/simd.hpp>

#include "attend.hpp"

std::vector<float> attend_narrow() { return attend<kvq::simd<>>(); }
