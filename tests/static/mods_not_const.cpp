// expect: the hooks of a mask or score modifier must be const
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

struct halved {
    float scale(int) const { return 1.0f; }
    float score(float score, int, int, int) { return score / 2; }
};

void f(kvq::sequence& s, kvq::token_view<float> x) { s.attend(0, x, x, halved{}); }
