// expect: a mask has mask(int, int) or mask_row(float*, int, int, int), a score modifier has score(float, int, int, int)
// SPDX-License-Identifier: MIT
#include <kvq/attention/mods.hpp>

// A name that attention does not know.
struct halved {
    float scores(float score, int, int, int) const { return score / 2; }
};

void attend(const kvq::mods_view& mods);
void f() { attend(halved{}); }
