// expect: the hooks of a mask or score modifier must be const
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

// As a part of mods.
struct even {
    bool mask(int, int k_pos) const { return k_pos % 2 == 0; }
    kvq::page_visibility mask_page(int, int, int, int) { return kvq::page_visibility::some; }
};

void f(kvq::sequence& s, kvq::token_view<float> x) {
    s.attend(0, x, x, kvq::mods{kvq::softcap{30.0f}, even{}});
}
