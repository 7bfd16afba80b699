// expect: kvq::input_view: keys and values must be float, float16 or bfloat16
// SPDX-License-Identifier: MIT
#include <kvq/cache/sequence.hpp>

void append(kvq::sequence& sequence, const double* x) {
    const kvq::token_view<const double> view(x, 1, 1, 8);
    sequence.append(0, view, view);
}
