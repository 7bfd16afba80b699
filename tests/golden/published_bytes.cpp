// SPDX-License-Identifier: MIT
// Comparison family: exact. The bytes of transformed, centred, codebook and KVarN blocks, pinned like those
// of page_bytes.cpp.
#include <doctest/doctest.h>

#include "baselines/centred.hpp"
#include "baselines/published.hpp"
#include "support/golden.hpp"
#include "support/random.hpp"

namespace published_bytes_tests {

namespace {

// clang-format off
const std::vector<test::golden> table = {
#include "published_bytes.inc"
};
// clang-format on

/// Every bit of a float is used, so that a fused or reordered operation shows; one NaN and one infinity.
std::vector<float> input() {
    test::generator random(11);
    auto x = random.normals(test::golden_tokens * test::golden_dim, 0.7f);
    for (std::size_t i = 0; i < x.size(); ++i)
        if (i % test::golden_dim % 10 == 3) x[i] = 4.0f * x[i] + 9.0f;
    x[155] = kvq::detail::bit_cast<float>(0x7fc00000u);
    x[1006] = kvq::detail::bit_cast<float>(0xff800000u);
    return x;
}

}  // namespace

TEST_CASE_TEMPLATE("published methods: bytes", P, baselines::turboquant<4>, baselines::turboquant_plain<3>,
                   baselines::quarot<4>, baselines::vllm_int4, baselines::exllamav3<3>,
                   baselines::nf4_groups<64>, baselines::ggml_iq4_nl, baselines::ggml_q4_0,
                   baselines::fp8_per_token_head, baselines::rotating<baselines::ggml_q8_0>,
                   baselines::kvarn<4>, baselines::kvarn<2>) {
    for (const auto role : {kvq::tensor::key, kvq::tensor::value}) {
        const bool same = role == kvq::tensor::key
                              ? test::is_golden(table, typename P::keys{}, role, input())
                              : test::is_golden(table, typename P::values{}, role, input());
        INFO(typename P::keys{}.name(), role == kvq::tensor::key ? " K" : " V");
        CHECK(same);
    }
}

TEST_CASE("centred keys: bytes") {
    CHECK(test::is_golden(table, baselines::centred<kvq::affine<4>>{}, kvq::tensor::key, input()));
    CHECK(test::is_golden(table, kvq::hadamard<baselines::centred<kvq::affine<3, kvq::per_token<>>>>{},
                          kvq::tensor::key, input()));
}

}  // namespace published_bytes_tests
