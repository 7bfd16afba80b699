// SPDX-License-Identifier: MIT
// Comparison family: exact. Rows of tokens in the bytes of other systems, against row_bytes.inc, which
// row_bytes.py makes from the published definitions: tests/CMakeLists.txt compares them.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <kvq/schemes/rotated_records.hpp>

#include "support/golden.hpp"

namespace row_bytes_tests {

namespace {

constexpr int row_tokens = 9, row_dim = 96;

/// As row_input() of row_bytes.py.
std::vector<float> row_input(int dim = row_dim) {
    std::vector<float> x;
    std::uint32_t state = 12345;
    for (int i = 0; i < row_tokens * dim; ++i) {
        state = (state * 1103515245u + 12345u) % (1u << 31);
        const int token = i / dim;
        float value =
            std::ldexp(static_cast<float>(static_cast<int>((state >> 7) % 4001u) - 2000), token - 10);
        if (i % 37 == 5) value *= 16.0f;
        if (token == 3 && i % dim < 32) value = 0.0f;
        if (token == 4 && i % dim < 32) value = -2.5f;
        x.push_back(value);
    }
    x[static_cast<std::size_t>(2 * dim + 7)] = NAN;
    x[static_cast<std::size_t>(5 * dim + 40)] = INFINITY;
    x[static_cast<std::size_t>(6 * dim + 70)] = -INFINITY;
    return x;
}

struct row_golden {
    const char* name;
    float tensor_scale;
    std::size_t bytes;
    std::uint64_t of_bytes, of_values;  // FNV-1a
    const char* first;                  // 16 bytes
};
// clang-format off
const row_golden row_table[] = {
#include "row_bytes.inc"
};
struct record_golden {
    const char* name;
    int dim;
    std::size_t bytes;
    std::uint64_t of_bytes, of_values;  // FNV-1a
    const char* first;                  // 16 bytes
};
const record_golden record_table[] = {
#include "record_bytes.inc"
};
// clang-format on

template <class Scheme, class Golden>
void check_bytes(const Scheme& scheme, const Golden& g, int dim) {
    for (const auto role : {kvq::tensor::key, kvq::tensor::value}) {
        const kvq::block_shape shape{role, row_tokens, dim};
        const auto block = test::block_of(scheme, shape, row_input(dim));
        CHECK(block.size() == g.bytes);
        CHECK(test::hex(block, 16) == g.first);
        CHECK(test::fnv1a(block) == g.of_bytes);
        std::vector<float> values(shape.values());
        scheme.dequantize(shape, {}, block.data(), values.data());
        std::vector<std::byte> of_values(4 * values.size());
        std::memcpy(of_values.data(), values.data(), of_values.size());
        CHECK(test::fnv1a(of_values) == g.of_values);
    }
}

}  // namespace

TEST_CASE("rows of other systems: bytes and values are those of their definitions") {
    REQUIRE(std::size(row_table) == std::size(kvq::row_layouts));
    for (std::size_t i = 0; i < std::size(row_table); ++i) {
        const row_golden& g = row_table[i];
        const kvq::token_rows scheme(kvq::row_layouts[i], g.tensor_scale);
        REQUIRE(scheme.name() == g.name);
        INFO(scheme.name());
        check_bytes(scheme, g, row_dim);
    }
}

TEST_CASE("records of other systems: bytes and values are those of their definitions") {
    REQUIRE(std::size(record_table) == std::size(kvq::record_layouts) + 1);
    const record_golden& rotated = record_table[std::size(kvq::record_layouts)];
    const kvq::rotated_records int4(kvq::int4_token_head);
    REQUIRE(int4.name() == rotated.name);
    check_bytes(int4, rotated, rotated.dim);
    for (std::size_t i = 0; i < std::size(kvq::record_layouts); ++i) {
        const kvq::token_records scheme(kvq::record_layouts[i]);
        REQUIRE(scheme.name() == record_table[i].name);
        INFO(scheme.name());
        scheme.check({1, 1, record_table[i].dim}, kvq::tensor::key);
        check_bytes(scheme, record_table[i], record_table[i].dim);
    }
}

}  // namespace row_bytes_tests
