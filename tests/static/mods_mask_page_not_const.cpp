// expect: the hooks of a mask or score modifier must be const
// SPDX-License-Identifier: MIT
#include <kvq/attention/mods.hpp>
#include <kvq/attention/score_modifiers.hpp>

// As a part of mods.
struct even {
    bool mask(int, int k_pos) const { return k_pos % 2 == 0; }
    kvq::page_visibility mask_page(int, int, int, int) { return kvq::page_visibility::some; }
};

void attend(const kvq::mods_view& mods);
void f() { attend(kvq::mods{kvq::softcap{30.0f}, even{}}); }
