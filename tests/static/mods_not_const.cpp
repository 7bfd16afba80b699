// expect: the hooks of a mask or score modifier must be const
// SPDX-License-Identifier: MIT
#include <kvq/attention/mods.hpp>

struct halved {
    float scale(int) const { return 1.0f; }
    float score(float score, int, int, int) { return score / 2; }
};

void attend(const kvq::mods_view& mods);
void f() { attend(halved{}); }
