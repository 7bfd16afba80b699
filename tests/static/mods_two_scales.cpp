// expect: kvq::mods: two parts have a scale
// SPDX-License-Identifier: MIT
#include <kvq/attention/mods.hpp>
#include <kvq/attention/score_modifiers.hpp>

void attend(const kvq::mods_view& mods);
void f() { attend(kvq::mods{kvq::score_scale{0.1f}, kvq::score_scale{0.2f}}); }
