// SPDX-License-Identifier: MIT
// The architecture that a build takes when none is named.
#include <doctest/doctest.h>

#include <kvq/cpu/simd.hpp>
#include <string>

TEST_CASE("the best architecture of this build is one that this CPU has") {
    CHECK(kvq::arch::best::available());
    CHECK(std::string(kvq::simd<>::name()) == kvq::arch::best::name());
}
