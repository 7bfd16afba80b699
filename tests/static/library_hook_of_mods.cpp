// expect: kvq: this hook is a member of kvq_mods
// SPDX-License-Identifier: MIT
// What a type says of the causal mask would be ignored: kvq_mods.direction says it.
#include <kvq/library.hpp>

struct everything {
    static constexpr bool is_causal = false;
    bool mask(int, int) const { return true; }
};

void use(const everything& hooks) { kvq::library::mods().use(hooks); }
