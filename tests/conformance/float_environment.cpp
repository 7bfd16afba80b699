// SPDX-License-Identifier: MIT
// Comparison family: exact. The scope guard of kernels that quantize keeps subnormal floats, and gives the
// program its setting back.
// That caches hold the same bytes: cache_bytes.cpp.
#include <doctest/doctest.h>

#include <bit>
#include <cstdint>
#include <kvq/core/float_environment.hpp>

#include "support/flushed_subnormals.hpp"

namespace float_environment_tests {

namespace {

/// Is the product of a subnormal float and one that float? Volatile, so that it is computed here.
bool keeps_subnormals() {
    volatile float small = 1e-40f, one = 1.0f;
    volatile float product = small * one;
    const float result = product;
    return std::bit_cast<std::uint32_t>(result) == std::bit_cast<std::uint32_t>(1e-40f);
}

}  // namespace

TEST_CASE("subnormal floats are kept in the guard, and flushed again behind it") {
    CHECK(keeps_subnormals());
#if defined(KVQ_TEST_FLUSHES)
    {
        const test::flushed_subnormals flushed;
        CHECK_FALSE(keeps_subnormals());
        {
            const kvq::detail::default_arithmetic arithmetic;
            CHECK(keeps_subnormals());
        }
        CHECK_FALSE(keeps_subnormals());
    }
    CHECK(keeps_subnormals());
#endif
}

}  // namespace float_environment_tests
