// SPDX-License-Identifier: MIT
// Comparison family: exact. Every backend writes the bytes that scheme::quantize writes. Built for several
// -march.
#include <doctest/doctest.h>

#include <cmath>
#include <kvq/cpu/scalar.hpp>
#include <kvq/cpu/simd.hpp>
#include <kvq/schemes/presets.hpp>
#include <limits>

#include "support/blocks.hpp"
#include "support/quantized_blocks.hpp"
#include "support/scheme_list.hpp"

namespace quantize_tests {

namespace {

using native = kvq::simd<>;

#if defined(KVQ_TEST_FEWER_SCHEMES)
constexpr bool few = true;
#else
constexpr bool few = false;
#endif

template <class S, class Window, bool Scalar = true>
void check_scheme(test::generator& random, int usual_rounds) {
    const S scheme = test::make_scheme<S>();
    const std::string from = kvq::float_name<Window>, on = native::name();
    INFO(scheme.name(), " from ", from, " on ", on);
    for (int round = 0; round < test::rounds(usual_rounds); ++round) {
        const auto shape = random.one_in(3) ? test::whole_shape(random) : test::random_shape(random);
        const int kind = random.between(0, 3);
        INFO(shape, ", kind of numbers ", kind);
        const auto x =
            kind < 2 ? test::random_block(random, shape) : test::hostile_block(random, shape, kind == 2);
        const kvq::block_id id{random.between(0, 3), random.between(0, 3)};
        test::check_block<Window, native>(scheme, shape, id, x);
        if constexpr (Scalar) test::check_block<Window, kvq::scalar>(scheme, shape, id, x);
    }
}

}  // namespace

TEST_CASE_TEMPLATE("same bytes from every backend", S, KVQ_TEST_BACKEND_SCHEMES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    check_scheme<S, kvq::float16, !few>(random, 60);  // few: the scalar backend below
}

TEST_CASE_TEMPLATE("same bytes from 32-bit and bfloat16 windows", S, KVQ_TEST_WINDOW_SCHEMES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    check_scheme<S, float>(random, 40);
    check_scheme<S, kvq::bfloat16>(random, 40);
}

TEST_CASE_TEMPLATE("one value that is not finite among tokens that fill vectors", T, float, kvq::float16,
                   kvq::bfloat16) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(60); ++round) {
        const auto shape = test::whole_shape(random);
        auto x = test::random_block(random, shape);
        const auto at = static_cast<std::size_t>(random.between(0, static_cast<int>(x.size()) - 1));
        constexpr float infinity = std::numeric_limits<float>::infinity();
        constexpr float nan = std::numeric_limits<float>::quiet_NaN();
        const float values[] = {infinity, -infinity, nan, -nan, 1e30f, -60000.0f};
        x[at] = values[random.between(0, 5)];
        INFO(shape, ", ", x[at], " at ", at);
        test::check_block<T, native>(kvq::int8{}, shape, {}, x);
        test::check_block<T, native>(kvq::affine<4>{}, shape, {}, x);
        test::check_block<T, native>(kvq::affine<4, kvq::per_channel<16>>{}, shape, {}, x);
        test::check_block<T, native>(kvq::affine<2, kvq::per_token<32>>{}, shape, {}, x);
    }
}

TEST_CASE_TEMPLATE("a kernel quantizes head sizes that are no power of two, from any window and from tokens",
                   S, kvq::int8, kvq::affine<4>, test::affine_scheme<3, kvq::per_channel<32>>) {
    using levels = typename S::levels;
    using lanes = native::lanes;
    namespace kernels = kvq::kernels;
    test::generator random(1);
    const S scheme;
    for (const int dim : {48, 64, 80, 96, 112, 128, 160, 192, 256})
        for (const auto role : {kvq::tensor::key, kvq::tensor::value})
            for (const int tokens : {16, 64, 128}) {
                const kvq::block_shape shape{role, tokens, dim};
                INFO(scheme.name(), ", ", shape, " on ", native::name());
                for (const auto window :
                     {kvq::float_type::fp16, kvq::float_type::bf16, kvq::float_type::fp32})
                    CHECK(native::describe(scheme, shape, window).quantize);
                const kernels::range_block<S::code_bits> of(
                    scheme.layout(),
                    kernels::functions_of_parameters<native, levels, S::code_bits, typename S::parameter>,
                    shape);
                CHECK(kernels::quantize_choice(kvq::codec_of<S>(), shape));
                const auto x = test::random_block(random, shape);
                std::vector<std::byte> block(scheme.block_bytes(shape)), window(4 * shape.values());
                kernels::float_values<lanes> from_tokens(shape, x.data());
                CHECK(kernels::block_quantizer<lanes, levels, S::code_bits, kernels::float_values<lanes>>(
                          of, from_tokens, block.data())
                          .run());
                test::check_block<float, native>(scheme, shape, {}, x);
            }
}

TEST_CASE("every 16-bit pattern, one page of each") {
    // All finite fp16 values appear as somebody's neighbour; groups of 32 see magnitudes close together and
    // far apart.
    const kvq::block_shape shape{kvq::tensor::key, 64, 64};
    const kvq::affine<4, kvq::per_token<32>> rows;
    const kvq::affine<4, kvq::per_channel<32>> columns;
    for (std::uint32_t first = 0; first < 0x10000; first += 64 * 64)
        for (const std::uint32_t step : {1u, 4099u}) {
            std::vector<float> x(shape.values());
            for (std::size_t i = 0; i < x.size(); ++i) {
                auto bits = static_cast<std::uint16_t>(first + step * i);
                if ((bits & 0x7c00u) == 0x7c00u) bits = static_cast<std::uint16_t>(bits & 0x83ffu);
                x[i] = kvq::float16::from_bits(bits);
            }
            test::check_block<kvq::float16, native>(rows, shape, {}, x);
            test::check_block<kvq::float16, native>(columns, shape, {}, x);
        }
}

TEST_CASE_TEMPLATE("stored parameters load as the same floats", P, float, kvq::float16, kvq::bfloat16,
                   test::log8, test::float24) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int n = 0; n <= 70; ++n) {
        std::vector<std::byte> bytes(static_cast<std::size_t>(n) * sizeof(P));
        for (std::byte& b : bytes) b = static_cast<std::byte>(random.bits());
        std::vector<float> expected(static_cast<std::size_t>(n) + 8, 3.0f), got = expected;
        kvq::scalar::load_floats<P>(bytes.data(), n, expected.data());
        native::load_floats<P>(bytes.data(), n, got.data());
        int wrong = 0;
        for (std::size_t i = 0; i < got.size(); ++i)
            wrong += kvq::detail::bit_cast<std::uint32_t>(got[i]) !=
                         kvq::detail::bit_cast<std::uint32_t>(expected[i]) &&
                     !(std::isnan(got[i]) && std::isnan(expected[i]));
        CHECK(wrong == 0);
    }
}

}  // namespace quantize_tests
