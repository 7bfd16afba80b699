// expect: kept_keys needs a first_key
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

struct kept : kvq::causal {
    int kept_keys() const { return 4; }
};

void f(kvq::sequence& s, kvq::token_view<float> x) { s.attend(0, x, x, kept{}); }
