// expect: kvq: hooks are const: mask(int, int) or score(float, int, int, int), or such a lambda
// SPDX-License-Identifier: MIT
#include <kvq/library.hpp>

struct counts {
    int n = 0;
    bool mask(int, int) { return ++n > 0; }
};

void use(const counts& hooks) { kvq::library::mods().use(hooks); }
