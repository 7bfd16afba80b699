// Policies to step down, as caches and prefix caches of the C interface take them.
#pragma once

#include <kvq/cache/step_down.hpp>

#include "objects.hpp"

namespace kvq::c {

step_down_policy policy_of(const kvq_step_down_policy* given, const cache_state& of);
/// to: NULL, or checked.
void write_report(kvq_step_down_report* to, const step_down_report& r);

}  // namespace kvq::c
