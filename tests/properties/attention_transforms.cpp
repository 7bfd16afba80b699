// SPDX-License-Identifier: MIT
// Comparison family: mixed-precision reduction. Attention over transformed, centred and codebook pages, and
// what trims, copies and layers do to them. The bound is that of attention.cpp.
#include <doctest/doctest.h>

#include "baselines/centred.hpp"
#include "baselines/clipped.hpp"
#include "baselines/octopus.hpp"
#include "baselines/progressive.hpp"
#include "baselines/published.hpp"
#include "baselines/token_normalized.hpp"
#include "support/attention_error.hpp"
#include "support/typed_cache.hpp"

namespace attention_transforms_tests {

namespace {

/// What it inherits says that attention may read its codes; its own functions say that they are those of 2 x.
struct doubled : kvq::affine<4> {
    using base = kvq::affine<4>;
    std::uint32_t quantize(const kvq::block_shape& s, kvq::block_id id, float* values,
                           std::byte* block) const {
        for (std::size_t i = 0; i < s.values(); ++i) values[i] *= 2.0f;
        return base::quantize(s, id, values, block);
    }
    void dequantize(const kvq::block_shape& s, kvq::block_id id, const std::byte* block,
                    float* values) const {
        base::dequantize(s, id, block, values);
        for (std::size_t i = 0; i < s.values(); ++i) values[i] /= 2.0f;
    }
};
static_assert(!kvq::foldable<doubled>);

using symmetric_channels = kvq::scheme<kvq::bits<5>, kvq::symmetric, kvq::per_channel<32>>;
/// Foldable and not, transforming and not, for keys and values: every way that attention can take.
using transformed_cache = test::typed_cache<
    test::formats<baselines::kvarn<4>::keys, baselines::centred<symmetric_channels>,
                  kvq::hadamard<baselines::centred<kvq::affine<4, kvq::per_token<>>>>,
                  baselines::turboquant<3>::keys>,
    test::formats<baselines::kvarn<3>::values, baselines::turboquant<4>::values, kvq::affine<5>>>;

/// Wrappers around what is read otherwise than by folding, and what inherits from a scheme.
using wrapped_cache = test::typed_cache<
    test::formats<baselines::centred<kvq::mixed_affine<kvq::code_widths<4, 2, 0>, kvq::average_eighths<16>,
                                                       kvq::per_channel<64>>>,
                  kvq::hadamard<kvq::mixed_affine<kvq::code_widths<4, 2, 0>, kvq::average_eighths<16>,
                                                  kvq::per_channel<64>>>,
                  baselines::centred<kvq::full<kvq::float16>>, kvq::hadamard<kvq::full<float>>,
                  baselines::centred<kvq::hadamard<symmetric_channels>>, kvq::std4_h::keys, doubled>,
    test::formats<kvq::hadamard<kvq::full<float>>,
                  kvq::hadamard<kvq::affine<4, kvq::per_channel<>, kvq::byte_params, kvq::min_max>>,
                  doubled>>;

/// Methods of 2026: lengths of tokens in front of channels, clipped tokens, what went through wider codes,
/// and one that is not foldable.
using recent_cache = test::typed_cache<
    test::formats<baselines::oscar_scaled<2>::keys,
                  baselines::token_normalized<kvq::affine<4, kvq::per_channel<16>>>,
                  kvq::hadamard<baselines::clipped<kvq::affine<3, kvq::per_token<>>, 960>>,
                  baselines::progressive_kivi<4, 8>::keys>,
    test::formats<baselines::octopus<3>::values, baselines::progressive_kivi<4, 8>::values>>;

template <class Cache>
void check_against_dequantized_values() {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 12; ++round) {
        kvq::cache_shape shape{.layers = 12, .kv_heads = random.between(1, 2), .head_dim = 0};
        shape.head_dim = random.pick(std::vector<int>{8, 48, 64, 80, 128});
        auto options = test::random_options(random);
        options.page_tokens = random.pick(std::vector<int>{8, 32, 33, 64});
        options.layers = test::rotate_formats<Cache>(shape.layers);
        const int n = random.between(80, 400);
        const test::stream s(random, shape, n);
        auto cache = test::make_cache<Cache>(shape, options);
        auto sequence = cache.new_sequence();
        const int layer = random.between(0, shape.layers - 1);
        sequence.append(layer, s.k.slice(0, n), s.v.slice(0, n));
        if (random.one_in(2)) {
            const int kept = random.between(n / 2, n);
            sequence.trim(kept);
            sequence.append(layer, s.k.slice(kept, n - kept), s.v.slice(kept, n - kept));
        }
        INFO("layer ", layer, ", ", n, " tokens of ", shape.head_dim, ", pages of ", options.page_tokens);
        const auto q = test::random_tensor(random, 3, 4 * shape.kv_heads, shape.head_dim);
        const auto error = test::measure_attention(cache, sequence, layer, q);
        CHECK(error.of_terms <= 5e-4);
        CHECK(error.relative <= 5e-4);
    }
}

}  // namespace

TEST_CASE("attention cannot tell a transform from its dequantized values") {
    check_against_dequantized_values<transformed_cache>();
}

TEST_CASE("attention reads codes only of schemes that say so themselves") {
    check_against_dequantized_values<wrapped_cache>();
}

TEST_CASE("attention reads the codes of the methods of 2026") {
    check_against_dequantized_values<recent_cache>();
}

}  // namespace attention_transforms_tests
