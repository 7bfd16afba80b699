// expect: a variant has scale(int), logit(float, int, int, int) or first_key(int), all const
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

// A name that attention does not know.
struct halved {
    float logits(float score, int, int, int) const { return score / 2; }
};

void f(kvq::sequence& s, kvq::token_view<float> x) { s.attend(0, x, x, halved{}); }
