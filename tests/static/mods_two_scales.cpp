// expect: kvq::mods: two parts have a scale
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

void f(kvq::sequence& s, kvq::token_view<float> x) {
    s.attend(0, x, x, kvq::mods{kvq::score_scale{0.1f}, kvq::score_scale{0.2f}});
}
