// expect: mask_page answers for whole pages only, it needs a mask or mask_row
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

struct nothing {
    static constexpr bool is_causal = false;
    kvq::page_visibility mask_page(int, int, int, int) const { return kvq::page_visibility::none; }
};

void f(kvq::sequence& s, kvq::token_view<float> x) { s.attend(0, x, x, nothing{}); }
