// SPDX-License-Identifier: MIT
// A page that was closed before it was full holds its own tokens, and is fitted to them alone.
#include <doctest/doctest.h>

#include <cmath>
#include <kvq/cpu/scalar.hpp>
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>
#include <kvq/schemes/presets.hpp>
#include <string>

#include "support/tensors.hpp"

namespace closed_page_tests {

namespace {

constexpr int page_tokens = 64, dim = 32;

/// Relative error of the values of the first `count` tokens of a sequence.
double error_of_values(const kvq::sequence& sequence, const test::tensor<float>& wanted, int count) {
    test::tensor<float> got(count, 1, dim);
    sequence.dequantize(0, kvq::tensor::value, 0, got.view());
    double difference = 0, size = 0;
    for (int t = 0; t < count; ++t)
        for (int c = 0; c < dim; ++c) {
            const double x = wanted.view().at(t, 0)[c], d = static_cast<double>(got.view().at(t, 0)[c]) - x;
            difference += d * d;
            size += x * x;
        }
    return std::sqrt(difference / size);
}

}  // namespace

TEST_CASE_TEMPLATE("tokens of a closed page have no larger errors than those of a full one", Preset,
                   kvq::low2, kvq::std4, kvq::hi6) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed, ", ", std::string(Preset::name));
    test::generator random(seed);
    kvq::cache_options options{.sinks = 0, .recent = 0, .page_tokens = page_tokens};
    options.keys = kvq::make_format<kvq::scalar>(typename Preset::keys{});
    options.values = kvq::make_format<kvq::scalar>(typename Preset::values{});
    kvq::rotary_embedding rotary;
    rotary.dims = dim;
    options.rotary = {rotary};
    kvq::cache cache({.layers = 1, .kv_heads = 1, .head_dim = dim}, options);
    for (const int tokens : {2, 5, 20, 40, 63}) {
        double errors[2] = {};  // of a closed page, of a full one
        constexpr int rounds = 8;
        for (int round = 0; round < rounds; ++round) {
            const auto x = test::random_tensor(random, page_tokens, 1, dim);
            auto closed = cache.new_sequence(), full = cache.new_sequence();
            full.append(0, x.slice(0, page_tokens), x.slice(0, page_tokens));
            closed.append(0, x.slice(0, tokens), x.slice(0, tokens));
            closed.splice(full, 0, page_tokens);
            CHECK(closed.pages(0).at(0).values->tokens == tokens);
            errors[0] += error_of_values(closed, x, tokens) / rounds;
            errors[1] += error_of_values(full, x, page_tokens) / rounds;
        }
        INFO(tokens, " tokens");
        CHECK(errors[0] > 1e-3);  // they are quantized
        CHECK(errors[0] <= 1.05 * errors[1]);
    }
}

TEST_CASE("a value of a closed page that is not finite is counted once") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    kvq::cache_options options{.sinks = 0, .recent = 0, .page_tokens = page_tokens};
    options.keys = kvq::make_format<kvq::scalar>(kvq::std4::keys{});
    options.values = kvq::make_format<kvq::scalar>(kvq::std4::values{});
    kvq::rotary_embedding rotary;
    rotary.dims = dim;
    options.rotary = {rotary};
    kvq::cache cache({.layers = 1, .kv_heads = 1, .head_dim = dim}, options);
    for (int broken = 0; broken < 3; ++broken) {
        const auto k = test::random_tensor(random, page_tokens, 1, dim);
        auto v = test::random_tensor(random, page_tokens, 1, dim);
        v.view().at(broken, 0)[7] = NAN;
        auto closed = cache.new_sequence(), rest = cache.new_sequence();
        closed.append(0, k.slice(0, 3), v.slice(0, 3));
        CHECK(closed.usage().not_finite == 1);
        rest.append(0, k.slice(3, page_tokens - 3), v.slice(3, page_tokens - 3));
        closed.splice(rest, 0, page_tokens - 3);
        CHECK(closed.usage().not_finite == 1);
    }
}

}  // namespace closed_page_tests
