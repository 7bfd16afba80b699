// SPDX-License-Identifier: MIT
// The same formats, compiled for several instruction sets in one program.
#pragma once

#include <cstddef>
#include <kvq/format/format.hpp>

// Defined by level.cpp, which is compiled once for each. planned_: made from the bytes of a calibration.
kvq::format keys_sse2();
kvq::format values_sse2();
kvq::format planned_sse2(const std::byte* statistics, std::size_t bytes);
kvq::format keys_avx2();
kvq::format values_avx2();
kvq::format planned_avx2(const std::byte* statistics, std::size_t bytes);
kvq::format keys_avx512vnni();
kvq::format values_avx512vnni();
kvq::format planned_avx512vnni(const std::byte* statistics, std::size_t bytes);
kvq::format keys_amx();
kvq::format values_amx();
kvq::format planned_amx(const std::byte* statistics, std::size_t bytes);
