// SPDX-License-Identifier: MIT
// Compiled once for each instruction set, with its flags, -DLEVEL=sse2, avx2,
// avx512vnni or amx, and KVQ_COMPILED.
#include "sessions.hpp"

#include <kvq/cpu/simd.hpp>

#define JOIN_NAMES(a, b) a##b
#define JOINED(a, b) JOIN_NAMES(a, b)

void JOINED(attend_compiled_, LEVEL)(const kvq::format& keys, const kvq::format& values, const prompt& of,
                                     float* out) {
    attend(keys, values, of, out);
}
kvq::format JOINED(library_keys_, LEVEL)() { return kvq::make_format<kvq::kivi<4, 32>::keys>(); }
kvq::format JOINED(library_values_, LEVEL)() { return kvq::make_format<kvq::std4::values>(); }
