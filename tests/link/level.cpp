// SPDX-License-Identifier: MIT
// Compiled once for each instruction set, with its flags and -DLEVEL=sse2, avx2, avx512vnni or amx.
#include <kvq/cpu/simd.hpp>
#include <kvq/schemes/kivi.hpp>
#include <kvq/schemes/presets.hpp>
#include <span>

#include "formats.hpp"

#define JOIN_NAMES(a, b) a##b
#define JOINED(a, b) JOIN_NAMES(a, b)

kvq::format JOINED(keys_, LEVEL)() {
    return kvq::make_format<kvq::kivi<4, 32>::keys, kvq::simd<kvq::arch::LEVEL>>();
}
kvq::format JOINED(values_, LEVEL)() {
    return kvq::make_format<kvq::std4::values, kvq::simd<kvq::arch::LEVEL>>();
}
// What is computed from statistics, once for a cache. Its kernels are the portable ones, which compile fast.
kvq::format JOINED(planned_, LEVEL)(const std::byte* statistics, std::size_t bytes) {
    return kvq::make_format<kvq::scalar>(
        kvq::low2::keys(kvq::calibration::load(std::span(statistics, bytes))));
}
