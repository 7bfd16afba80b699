// SPDX-License-Identifier: MIT
// Pages of kvq.h against pages of the headers.
#pragma once

#include <doctest/doctest.h>
#include <kvq/kvq.h>

#include <cstring>
#include <kvq/kvq.hpp>
#include <vector>

namespace test {

/// The pages of one layer, by both interfaces.
inline void check_same_pages(const std::vector<kvq_page>& held, const kvq::layer_pages& pages) {
    REQUIRE(static_cast<int>(held.size()) == pages.entries());
    for (int e = 0; e < pages.entries(); ++e) {
        const kvq::layer_pages::entry entry = pages.at(e);
        const kvq_page& p = held[static_cast<std::size_t>(e)];
        CHECK(p.key_format == entry.keys->format);
        CHECK(p.value_format == entry.values->format);
        CHECK(p.skip == entry.skip);
        CHECK(p.tokens == entry.tokens);
        CHECK(p.shift == entry.shift);
        CHECK(std::memcmp(p.keys, entry.keys->data(), entry.keys->bytes) == 0);
        CHECK(std::memcmp(p.values, entry.values->data(), entry.values->bytes) == 0);
    }
}

}  // namespace test
