// What the rest of a program sees: the same formats, once per instruction set. A format is a value that any object may use.
#pragma once

#include <kvq/format/format.hpp>

// Defined by formats.cpp, which is compiled once for each.
kvq::format keys_sse2();
kvq::format values_sse2();
kvq::format keys_avx2();
kvq::format values_avx2();
kvq::format keys_avx512vnni();
kvq::format values_avx512vnni();
kvq::format keys_amx();
kvq::format values_amx();
