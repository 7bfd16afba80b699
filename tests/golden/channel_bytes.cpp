// SPDX-License-Identifier: MIT
// Comparison family: exact. The bytes of channel grids and mixed widths, pinned like those of
// tests/golden/page_bytes.cpp; encoders are pinned with them, since every compiler must choose the same
// codes.
#include <doctest/doctest.h>

#include <cstdlib>
#include <kvq/quant/error_feedback.hpp>
#include <kvq/schemes/presets.hpp>

#include "support/golden.hpp"
#include "support/random.hpp"

namespace channel_bytes_tests {

namespace {

// clang-format off
const std::vector<test::golden> table = {
#include "channel_bytes.inc"
};
// clang-format on

/// Numbers that use every bit of a float, so that a fused or reordered operation shows: normal, in channels
/// of different size and offset, with one tiny token, one NaN and one infinity.
std::vector<float> input() {
    test::generator random(5);
    std::vector<float> x;
    for (int t = 0; t < test::golden_tokens; ++t)
        for (int c = 0; c < test::golden_dim; ++c) {
            const float v = random.normal() * static_cast<float>(1 << c % 7) * (t == 12 ? 0x1p-9f : 1.0f);
            x.push_back(c % 10 == 3 ? v + 50.0f : v);
        }
    x[3 * test::golden_dim + 5] = kvq::detail::bit_cast<float>(0x7fc00000u);
    x[20 * test::golden_dim + 6] = kvq::detail::bit_cast<float>(0x7f800000u);
    return x;
}

template <class S>
void check(const char* label, const S& scheme) {
    for (const auto role : {kvq::tensor::key, kvq::tensor::value}) {
        if (!kvq::detail::supports<S>(role)) continue;
        const char letter = role == kvq::tensor::key ? 'K' : 'V';
        const auto block = test::block_of(scheme, {role, test::golden_tokens, test::golden_dim}, input());
        if (std::getenv("KVQ_PRINT_GOLDEN")) {
            std::printf("    {\"%s\", '%c', %zu, 0x%016llxu, \"%s\"},\n", label, letter, block.size(),
                        static_cast<unsigned long long>(test::fnv1a(block)), test::hex(block, 16).c_str());
            continue;
        }
        INFO(label, " ", letter);
        bool found = false;
        for (const test::golden& g : table) {
            if (std::string(g.name) != label || g.role != letter) continue;
            found = true;
            CHECK(block.size() == g.bytes);
            CHECK(test::hex(block, 16) == g.first);
            CHECK(test::fnv1a(block) == g.hash);
        }
        CHECK(found);
    }
}

kvq::calibration statistics() {
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = test::golden_dim};
    test::generator random(6);
    std::vector<float> k, q;
    for (int t = 0; t < 64; ++t) {
        // Channels that go together, so that feedback has something to feed back.
        const float common = random.normal();
        for (int c = 0; c < test::golden_dim; ++c) {
            k.push_back(random.normal() * static_cast<float>(1 << c % 5));
            q.push_back((random.normal() + common) * static_cast<float>(1 << c % 3));
        }
    }
    kvq::calibration s(shape, true);
    s.add_keys(0, kvq::token_view<const float>(k.data(), 64, 1, test::golden_dim));
    s.add_queries(0, kvq::token_view<const float>(q.data(), 64, 1, test::golden_dim));
    return s;
}

}  // namespace

TEST_CASE("bytes of channel grids, encoders and presets") {
    using kvq::byte_params;
    using kvq::packed_params;
    using kvq::params;
    using kvq::token_scales;
    check("channel_grid<4>", kvq::affine<4, kvq::per_channel<>, kvq::byte_params, kvq::min_max>{});
    check("channel_grid<3, 7>", kvq::affine<3, kvq::per_channel<7>, kvq::byte_params, kvq::min_max>{});
    check("channel_grid<4, 32, enclosing>",
          kvq::affine<4, kvq::per_channel<32>, kvq::byte_params, kvq::enclosing>{});
    check("channel_grid<2, 0, shrink_search>",
          kvq::affine<2, kvq::per_channel<>, kvq::byte_params, kvq::shrink_search>{});
    check("channel_grid<5, 0, min_max, float16>",
          kvq::affine<5, kvq::per_channel<>, packed_params<kvq::float16>, kvq::min_max>{});
    check("channel_grid<4, 7, dual>",
          kvq::affine<4, kvq::per_channel<7>, byte_params, kvq::min_max, token_scales<byte_params>>{});
    kvq::for_each_preset([]<class P>(P) {
        const std::string name = P::name;
        check((name + "::keys").c_str(), typename P::keys{});
        check((name + "::values").c_str(), typename P::values{});
    });
    const auto s = statistics();
    check("mix4 with a plan", kvq::mix4::keys(s));
    check("mix5 with a plan", kvq::mix5::keys(s));
    check("mix6 with a plan", kvq::mix6::keys(s));
    check("low3 with a plan", kvq::low3::keys(s));
    check("low2 with a plan", kvq::low2::keys(s));
    using feedback = kvq::error_feedback<kvq::min_max>;
    kvq::affine<3, kvq::per_channel<>, kvq::byte_params, feedback> grid;
    grid.encoder = feedback(s);
    check("channel_grid<3, 0, error_feedback>", grid);
}

}  // namespace channel_bytes_tests
