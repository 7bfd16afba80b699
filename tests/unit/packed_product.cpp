// SPDX-License-Identifier: MIT
// Products of codes with operands that are not finite: any result for these operands, no other one, and no
// undefined behaviour on the way (preset sanitize).
#include <doctest/doctest.h>

#include <kvq/cpu/scalar.hpp>
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>
#include <kvq/schemes/int8.hpp>
#include <limits>

#include "support/random.hpp"

TEST_CASE("an operand that is not finite changes no other operand's product") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    constexpr float infinity = std::numeric_limits<float>::infinity();
    constexpr int tokens = 64, dim = 32, stride = 80;
    const kvq::int8 scheme;
    const kvq::block_id id{0, 0};
    for (const kvq::tensor role : {kvq::tensor::key, kvq::tensor::value})
        for (const float bad : {std::numeric_limits<float>::quiet_NaN(), infinity, -infinity, 3e38f})
            for (const int every : {1, 3, 200})
                for (const int n : {2, 4, 5}) {
                    const kvq::block_shape shape{role, tokens, dim};
                    const kvq::kernels::block_product<kvq::scalar, kvq::int8> product(
                        kvq::kernels::product_blocks_of<kvq::scalar>(scheme, shape, id), shape, n);
                    std::vector<float> values = random.normals(tokens * dim),
                                       x = random.normals(static_cast<std::size_t>(n * stride)), y(x.size()),
                                       clean(x.size()), space(product.workspace_bytes() / sizeof(float) + 32);
                    std::vector<std::byte> block(scheme.block_bytes(shape) + 64);
                    scheme.quantize(shape, id, values.data(), block.data());
                    const auto multiply = [&](std::vector<float>& to) {
                        auto* const memory = reinterpret_cast<std::byte*>(
                            (reinterpret_cast<std::uintptr_t>(space.data()) + 63) / 64 * 64);
                        product.begin(shape, id, block.data(), x.data(), stride, memory);
                        product.finish(shape, id, block.data(), x.data(), stride, shape.rows(), shape.cols(),
                                       to.data(), stride, false, 0, memory);
                    };
                    multiply(clean);
                    for (int c = 0; c < shape.cols(); c += every) x[static_cast<std::size_t>(c)] = bad;
                    multiply(y);
                    for (int i = 1; i < n; ++i)
                        for (int r = 0; r < shape.rows(); ++r) {
                            const auto at = static_cast<std::size_t>(i * stride + r);
                            REQUIRE(y[at] == clean[at]);
                        }
                }
}
