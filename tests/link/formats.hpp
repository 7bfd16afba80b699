// SPDX-License-Identifier: MIT
// The same formats, compiled for several instruction sets in one program.
#pragma once

#include <kvq/format/format.hpp>

// Defined by level.cpp, which is compiled once for each.
kvq::format keys_sse2();
kvq::format values_sse2();
kvq::format keys_avx2();
kvq::format values_avx2();
kvq::format keys_avx512vnni();
kvq::format values_avx512vnni();
kvq::format keys_amx();
kvq::format values_amx();
