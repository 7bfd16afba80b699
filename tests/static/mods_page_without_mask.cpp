// expect: mask_page answers for whole pages only, it needs a mask or mask_row
// SPDX-License-Identifier: MIT
#include <kvq/attention/mods.hpp>

struct nothing {
    static constexpr bool is_causal = false;
    kvq::page_visibility mask_page(int, int, int, int) const { return kvq::page_visibility::none; }
};

void attend(const kvq::mods_view& mods);
void f() { attend(nothing{}); }
