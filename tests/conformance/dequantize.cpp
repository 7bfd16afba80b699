// SPDX-License-Identifier: MIT
// Comparison family: exact. Every backend dequantizes the bits that scheme::dequantize says, and writes the
// same window values. Built for several -march.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <kvq/cpu/scalar.hpp>
#include <kvq/cpu/simd.hpp>

#include "support/quantized_blocks.hpp"
#include "support/scheme_list.hpp"

namespace dequantize_tests {

namespace {

using native = kvq::simd<>;

std::vector<float> some_block(test::generator& random, const kvq::block_shape& shape) {
    return random.one_in(2) ? test::random_block(random, shape) : test::hostile_block(random, shape);
}

}  // namespace

TEST_CASE_TEMPLATE("same bits from every backend", S, KVQ_TEST_BACKEND_SCHEMES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const S scheme = test::make_scheme<S>();
    INFO(scheme.name(), " on ", std::string(native::name()));
    for (int round = 0; round < test::rounds(60); ++round) {
        const auto shape = random.one_in(3) ? test::whole_shape(random) : test::random_shape(random);
        INFO(shape);
        const auto block = test::quantized(scheme, shape, some_block(random, shape));
        test::check_tokens<native, float>(random, scheme, shape, block);
    }
}

TEST_CASE_TEMPLATE("same 16-bit values", S, KVQ_TEST_WINDOW_SCHEMES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const S scheme = test::make_scheme<S>();
    for (int round = 0; round < test::rounds(60); ++round) {
        const auto shape = random.one_in(3) ? test::whole_shape(random) : test::random_shape(random);
        INFO(shape);
        const auto block = test::quantized(scheme, shape, some_block(random, shape));
        test::check_tokens<native, kvq::float16>(random, scheme, shape, block);
        test::check_tokens<native, kvq::bfloat16>(random, scheme, shape, block);
    }
}

TEST_CASE_TEMPLATE("tokens become the same window bytes", T, float, kvq::float16, kvq::bfloat16) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const auto check = [&]<class Window>(Window) {
        for (int round = 0; round < test::rounds(150); ++round) {
            const auto shape = test::random_shape(random);
            const int at = random.between(0, shape.tokens - 1), count = random.between(1, shape.tokens - at);
            const int stride = shape.dim + random.between(0, 40);
            INFO(shape, ", ", count, " tokens at ", at);
            std::vector<T> tokens(static_cast<std::size_t>(count * stride));
            const bool patterns = random.one_in(4);
            for (T& x : tokens) {
                x = T(random.normal());
                // Any bits, signalling NaN among them.
                if (patterns && random.one_in(50)) {
                    const auto bits = random.bits();
                    std::memcpy(static_cast<void*>(&x), &bits, sizeof(T));
                }
            }
            std::vector<std::byte> expected(kvq::full<Window>{}.block_bytes(shape));
            for (std::byte& b : expected) b = static_cast<std::byte>(random.bits());
            auto got = expected;
            const auto type = kvq::float_type_of<T>;
            const auto not_finite = kvq::scalar::write_tokens<Window>(shape, expected.data(), type,
                                                                      tokens.data(), stride, count, at);
            CHECK(native::write_tokens<Window>(shape, got.data(), type, tokens.data(), stride, count, at) ==
                  not_finite);
            CHECK(got == expected);
        }
    };
    check(kvq::float16{});
    check(kvq::bfloat16{});
    check(float{});
}

TEST_CASE_TEMPLATE("queries: every value times the scale, and whether all products are finite", T, float,
                   kvq::float16, kvq::bfloat16) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::format of[] = {kvq::make_format<kvq::full<kvq::float16>, kvq::scalar>(),
                              kvq::make_format<kvq::full<kvq::float16>, kvq::simd<>>()};
    for (int round = 0; round < test::rounds(400); ++round) {
        const auto n = static_cast<std::size_t>(random.between(1, 140)),
                   first = static_cast<std::size_t>(random.between(0, 3));
        std::vector<float> x = random.normals(n);
        if (round % 4 == 0) test::fill_hostile(random, x.data(), n);
        if (round % 4 == 1)
            x[static_cast<std::size_t>(random.between(0, static_cast<int>(n) - 1))] = std::nanf("");
        const float scale = random.any_magnitude(-8, 4);
        std::vector<T> q(first + n);
        bool finite = true;
        for (std::size_t i = 0; i < n; ++i) {
            q[first + i] = T(x[i]);
            x[i] = static_cast<float>(q[first + i]) * scale;
            finite = finite && kvq::detail::is_finite(x[i]);
        }
        for (const kvq::format& f : of) {
            INFO(f.functions().backend->name, ", ", n, " values from ", first);
            std::vector<float> to(n + 1, 7.0f);
            CHECK(f.functions().backend->load_query(kvq::float_type_of<T>, q.data() + first,
                                                    static_cast<int>(n), scale, to.data()) == finite);
            for (std::size_t i = 0; i < n; ++i)
                REQUIRE((to[i] == x[i] || (std::isnan(to[i]) && std::isnan(x[i]))));
            CHECK(to[n] == 7.0f);
        }
    }
}

}  // namespace dequantize_tests
