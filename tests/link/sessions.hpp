// SPDX-License-Identifier: MIT
// Caches of the library, and formats with its kernels (KVQ_COMPILED), in files of several instruction sets.
#pragma once

#include "attend.hpp"

// Defined by sessions.cpp, which is compiled once for each. attend() of attend.hpp.
void attend_compiled_sse2(const kvq::format& keys, const kvq::format& values, const prompt& of, float* out);
void attend_compiled_avx2(const kvq::format& keys, const kvq::format& values, const prompt& of, float* out);
void attend_compiled_avx512vnni(const kvq::format& keys, const kvq::format& values, const prompt& of,
                                float* out);
void attend_compiled_amx(const kvq::format& keys, const kvq::format& values, const prompt& of, float* out);

// The schemes of level.cpp.
kvq::format library_keys_sse2();
kvq::format library_values_sse2();
kvq::format library_keys_avx2();
kvq::format library_values_avx2();
kvq::format library_keys_avx512vnni();
kvq::format library_values_avx512vnni();
kvq::format library_keys_amx();
kvq::format library_values_amx();
