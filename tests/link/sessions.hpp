// SPDX-License-Identifier: MIT
// Caches of the library (KVQ_COMPILED) in files of several instruction sets.
#pragma once

#include "attend.hpp"

// Defined by sessions.cpp, which is compiled once for each. attend() of attend.hpp.
void attend_compiled_sse2(const kvq::format& keys, const kvq::format& values, const prompt& of, float* out);
void attend_compiled_avx2(const kvq::format& keys, const kvq::format& values, const prompt& of, float* out);
void attend_compiled_avx512vnni(const kvq::format& keys, const kvq::format& values, const prompt& of,
                                float* out);
void attend_compiled_amx(const kvq::format& keys, const kvq::format& values, const prompt& of, float* out);
