// The interface for the rest of the program: the same formats, once per instruction set. Any object may use a
// format.
#pragma once

#include <kvq/format/format.hpp>

// Defined by formats.cpp, which is compiled once for each instruction set.
kvq::format keys_sse2();
kvq::format values_sse2();
kvq::format keys_avx2();
kvq::format values_avx2();
kvq::format keys_avx512vnni();
kvq::format values_avx512vnni();
kvq::format keys_amx();
kvq::format values_amx();
