// SPDX-License-Identifier: MIT
// Choosing an architecture at run time: the first one of the list that the CPU has, the last one if it has none.
#include <doctest/doctest.h>

#include <kvq/backends/simd.hpp>
#include <string>

namespace {

struct absent {
    static bool available() { return false; }
    static const char* name() { return "absent"; }
};
struct present {
    static bool available() { return true; }
    static const char* name() { return "present"; }
};

constexpr auto name_of = []<class Arch>(Arch) { return std::string(Arch::name()); };

}  // namespace

TEST_CASE("dispatch takes the first architecture that is available") {
    CHECK(kvq::arch::dispatch<absent, present, absent>(name_of) == "present");
    CHECK(kvq::arch::dispatch<present, absent>(name_of) == "present");
    CHECK(kvq::arch::dispatch<absent, kvq::arch::best>(name_of) == kvq::arch::best::name());
}

TEST_CASE("dispatch falls back to the last architecture, whatever it says") {
    CHECK(kvq::arch::dispatch<absent>(name_of) == "absent");
}

TEST_CASE("the best architecture of this build is one that this CPU has") {
    CHECK(kvq::arch::best::available());
    CHECK(std::string(kvq::simd<>::name()) == kvq::arch::best::name());
}
