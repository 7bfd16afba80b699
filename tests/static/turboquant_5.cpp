// expect: baselines::normal_levels<B>: there are tables for codes of 2, 3 and 4 bits (turboquant<2> to <4>)
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>

#include "baselines/published.hpp"

const auto made = kvq::make_format<baselines::turboquant<5>, kvq::scalar>();
