// expect: a mask has mask(int, int) or mask_row(float*, int, int, int), a score modifier has score(float, int, int, int)
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

// A name that attention does not know.
struct halved {
    float scores(float score, int, int, int) const { return score / 2; }
};

void f(kvq::sequence& s, kvq::token_view<float> x) { s.attend(0, x, x, halved{}); }
