// SPDX-License-Identifier: MIT
// Comparison family: bounded rounding. Weights times the first channels of blocks of keys, whose codes or
// values are turned (cpu/product/turned_product.hpp), against double arithmetic on the dequantized keys.
#include <doctest/doctest.h>

#include <cmath>
#include <kvq/cpu/simd.hpp>
#include <kvq/kvq.hpp>

#include "support/channel_plans.hpp"

namespace turned_tests {

namespace {

std::byte* aligned(std::vector<std::byte>& memory) {
    return reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(memory.data()) + 63) / 64 * 64);
}

template <class Scheme>
Scheme make(test::generator& random, int dim) {
    if constexpr (std::constructible_from<Scheme, const kvq::calibration&>)
        return test::with_random_plan<Scheme>(random, {1, 1, dim});
    else
        return Scheme{};
}

template <class Backend, class Scheme>
void check(test::generator& random) {
    constexpr int sizes[] = {160, 128, 96, 64, 36, 31, 5, 1};
    const kvq::block_shape keys{kvq::tensor::key, random.pick(sizes), random.pick(sizes)};
    // Outputs in an order of channels are restored as a whole.
    const bool whole = kvq::transforming<Scheme> || random.one_in(2);
    const int channels = whole ? keys.dim : random.between(1, keys.dim), n = random.between(1, 20),
              x_stride = keys.tokens + 16, y_stride = channels + 3;
    // Of a block that is not quantized some tokens may be written.
    const int tokens = kvq::full_precision<Scheme> ? random.between(1, keys.tokens) : keys.tokens;
    const Scheme scheme = make<Scheme>(random, keys.dim);
    INFO(std::string(scheme.name()), " on ", std::string(Backend::name()), ", ", channels, " channels of ",
         keys.tokens, " x ", keys.dim, ", ", tokens, " tokens, ", n, " rows");
    std::vector<float> values(keys.values()), x(static_cast<std::size_t>(n * x_stride)),
        y(static_cast<std::size_t>(n * y_stride), 0.5f);
    for (float& f : values) f = random.normal();
    for (float& f : x) f = random.uniform();
    for (int i = 0; i < n; ++i) std::fill_n(x.begin() + i * x_stride + tokens, x_stride - tokens, 0.0f);
    std::vector<std::byte> block(scheme.block_bytes(keys) + 64);
    scheme.quantize(keys, {}, values.data(), block.data());
    scheme.dequantize(keys, {}, block.data(), values.data());

    const kvq::product_functions* const product =
        kvq::kernels::product_table<kvq::kernels::block_product<Backend, Scheme>>::functions.of_key_values;
    REQUIRE(product != nullptr);
    const kvq::product_blocks blocks = kvq::kernels::product_blocks_of<Backend>(scheme, keys, {});
    const kvq::block_shape shape{kvq::tensor::value, keys.tokens, channels};
    std::vector<std::byte> plan(product->plan_bytes + 64);
    std::vector<std::byte> space(product->make_plan(blocks, shape, n, aligned(plan)) + 64, std::byte{0xff});
    const bool add = random.one_in(2);
    {
        const kvq::kernels::tile_session<typename Backend::lanes, Backend> tiles(n);
        product->begin(aligned(plan), shape, {}, block.data(), x.data(), x_stride, aligned(space));
        product->finish(aligned(plan), shape, {}, block.data(), x.data(), x_stride, channels, tokens,
                        y.data(), y_stride, add, 0, aligned(space));
    }
    if constexpr (kvq::transforming<Scheme>)
        for (int i = 0; i < n; ++i) scheme.restore_output(keys, {}, y.data() + i * y_stride);
    double difference = 0.0, norm = 0.0;
    for (int i = 0; i < n; ++i) {
        for (int c = 0; c < channels; ++c) {
            double exact = add ? 0.5 : 0.0, terms = exact;
            for (int t = 0; t < tokens; ++t) {
                const double term = static_cast<double>(x[static_cast<std::size_t>(i * x_stride + t)]) *
                                    static_cast<double>(values[static_cast<std::size_t>(t * keys.dim + c)]);
                exact += term;
                terms += std::fabs(term);
            }
            const double d = static_cast<double>(y[static_cast<std::size_t>(i * y_stride + c)]) - exact;
            difference += d * d;
            norm += terms * terms;
        }
        for (int c = channels; c < y_stride; ++c)
            REQUIRE(y[static_cast<std::size_t>(i * y_stride + c)] == 0.5f);
    }
    CHECK(difference <= 1e-8 * norm);
}

template <class Backend, class Scheme>
struct on {
    static void run(test::generator& random) { check<Backend, Scheme>(random); }
};

using mixed = kvq::mixed_affine<kvq::code_widths<6, 4, 3, 0>, kvq::average_eighths<26>, kvq::per_channel<64>>;

}  // namespace

TEST_CASE_TEMPLATE("keys that are turned, as values", Case,
                   on<kvq::simd<>, kvq::affine<3, kvq::per_channel<7>>>,
                   on<kvq::simd<>, kvq::affine<4, kvq::per_token<20>>>, on<kvq::simd<>, mixed>,
                   on<kvq::simd<>, kvq::full<kvq::float16>>, on<kvq::simd<>, kvq::full<kvq::bfloat16>>,
                   on<kvq::scalar, kvq::affine<4, kvq::per_channel<7>>>,
                   on<kvq::scalar, kvq::full<kvq::float16>>) {
    INFO("KVQ_SEED=", test::seed());
    test::generator random(test::seed());
    for (int round = 0; round < 20; ++round) Case::run(random);
}

}  // namespace turned_tests
