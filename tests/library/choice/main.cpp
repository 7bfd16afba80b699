// SPDX-License-Identifier: MIT
// Which instruction set kvq::library chooses: its list of formats, with parts of every level that only say
// their names. Run on this CPU and, under qemu, on one without AVX.
#include <doctest/doctest.h>

#include <cstdlib>
#include <string>

#include "../../../src/builtin_formats.cpp"

#define DEFINE_PART(level, part)                                                          \
    extern "C" void kvq_builtin_##level##_##part(void* list, add_entry add) {             \
        const kvq::builtin_format entry{#level " " #part, true, true, false, 0, nullptr}; \
        add(list, &entry);                                                                \
    }
#define DEFINE_LEVEL(level) KVQ_PARTS(DEFINE_PART, level)
KVQ_LEVELS(DEFINE_LEVEL)

TEST_CASE("all parts of the best level that the CPU has, and of no other") {
    std::string best;
#define NAME_BEST(level) \
    if (best.empty() && kvq::arch::level::available()) best = #level;
    KVQ_LEVELS(NAME_BEST)
    if (const char* const expected = std::getenv("KVQ_EXPECTED_LEVEL")) CHECK(best == expected);
    std::size_t count = 0;
    const kvq::builtin_format* const list = kvq::builtin_formats(&count);
    REQUIRE(count == 2);
    CHECK(list[0].name == best + " 0");
    CHECK(list[1].name == best + " 10");
}
