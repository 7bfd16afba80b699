// SPDX-License-Identifier: MIT
// Comparison family: exact. Channels fitted and quantized in lanes are the bytes of scheme::quantize, and
// dequantized in lanes the bits of scheme::dequantize. Built for several -march.
#include <doctest/doctest.h>

#include <kvq/cpu/simd.hpp>
#include <kvq/schemes/presets.hpp>
#include <kvq/schemes/transformed.hpp>

#include "support/channel_plans.hpp"
#include "support/quantized_blocks.hpp"

namespace channel_codec_tests {

namespace {

using native = kvq::simd<>;
using kvq::byte_params, kvq::float16, kvq::packed_params, kvq::params, kvq::token_scales;

template <class S>
constexpr bool codes(kvq::tensor role) {
    if constexpr (requires { S::supports(role); })
        return S::supports(role);
    else
        return true;
}

/// Numbers with channels and tokens of different size, as encoders like them.
std::vector<float> uneven_block(test::generator& random, const kvq::block_shape& shape) {
    auto x = random.normals(shape.values());
    const auto dim = static_cast<std::size_t>(shape.dim), tokens = static_cast<std::size_t>(shape.tokens);
    for (std::size_t c = 0; c < dim; ++c) {
        const float size = random.any_magnitude(-3, 3), shift = random.one_in(3) ? random.normal() : 0.0f;
        for (std::size_t t = 0; t < tokens; ++t) x[t * dim + c] = size * (x[t * dim + c] + shift);
    }
    for (std::size_t t = 0; t < tokens; ++t)
        if (random.one_in(5))
            for (std::size_t c = 0; c < dim; ++c) x[t * dim + c] *= 8.0f;
    return x;
}

/// Queries whose channels go with each other, enough of them to be believed.
kvq::calibration statistics_with_products(test::generator& random, const kvq::cache_shape& shape) {
    kvq::calibration statistics(shape, true);
    for (int layer = 0; layer < shape.layers; ++layer) {
        auto k = test::random_tensor(random, 64, shape.kv_heads, shape.head_dim),
             q = test::random_tensor(random, 200, shape.kv_heads, shape.head_dim);
        for (int t = 0; t < 200; ++t)
            for (int h = 0; h < shape.kv_heads; ++h)
                for (int c = 1; c < shape.head_dim; ++c)
                    q.view().at(t, h)[c] += 0.8f * q.view().at(t, h)[c - 1];
        statistics.add_keys(layer, std::as_const(k).view());
        statistics.add_queries(layer, std::as_const(q).view());
    }
    return statistics;
}

/// An eighth of the rounds where every instruction is emulated or instrumented: fitting takes long.
int rounds(int usual) { return test::is_slow ? (usual + 7) / 8 : test::rounds(usual); }

template <class S, class Window>
void check_scheme(const S& scheme, test::generator& random, const kvq::block_shape& shape,
                  const kvq::block_id& id) {
    const int kind = random.between(0, 4);
    INFO(scheme.name(), " from ", std::string(kvq::float_name<Window>), " on ", std::string(native::name()),
         ", ", shape, ", kind of numbers ", kind);
    const auto x = kind < 3 ? uneven_block(random, shape) : test::hostile_block(random, shape, kind == 3);
    test::check_block<Window, native>(scheme, shape, id, x);

    const auto block = test::quantized(scheme, shape, x, nullptr, id);
    test::check_tokens<native, float>(random, scheme, shape, block, id);
    test::check_tokens<native, float16>(random, scheme, shape, block, id);

    // From scheme to scheme.
    auto values = test::dequantized(scheme, shape, block, id), same = values;
    std::vector<std::byte> expected(block.size()), got(block.size());
    const std::uint32_t not_finite = scheme.quantize(shape, id, values.data(), expected.data());
    CHECK(native::quantize_values(scheme, shape, id, same.data(), got.data()) == not_finite);
    CHECK(got == expected);
    // Values that were quantized before: on a grid of the scheme, near one, or on none; with token scales and
    // without.
    if constexpr (kvq::detail::requantizing<S>) {
        values = random.one_in(2) ? test::dequantized(scheme, shape, block, id) : x;
        if (random.one_in(2))
            for (float& v : values) v *= 1.0f + 0.01f * random.normal();
        std::vector<float> token_scales(static_cast<std::size_t>(shape.tokens)), same_token_scales;
        for (float& f : token_scales) f = random.one_in(3) ? std::fabs(random.any_magnitude(-3, 0)) : 1.5f;
        if constexpr (kvq::detail::with_token_scales<S>)
            if (random.one_in(2)) scheme.read_token_scales(shape, block.data(), token_scales.data());
        same = values;
        same_token_scales = token_scales;
        const bool known = random.one_in(2);
        const auto bad = scheme.requantize(shape, id, values.data(), known ? token_scales.data() : nullptr,
                                           expected.data());
        CHECK(native::requantize_values(scheme, shape, id, same.data(),
                                        known ? same_token_scales.data() : nullptr, got.data()) == bad);
        CHECK(got == expected);
    }
}

#define KVQ_TEST_SOME_CHANNEL_SCHEMES                                                                   \
    kvq::std4::values, kvq::low2::keys,                                                                 \
        kvq::affine<3, kvq::per_channel<5>, packed_params<float16>, kvq::enclosing>,                    \
        kvq::affine<7, kvq::per_channel<32>, byte_params, kvq::least_squares,                           \
                    token_scales<params<kvq::bfloat16>>>,                                               \
        kvq::mixed_affine<kvq::code_widths<8, 5, 2, 1>, kvq::average_eighths<28>, kvq::per_channel<16>, \
                          kvq::byte_params, kvq::mean_corrected<kvq::least_squares>>
#define KVQ_TEST_SOME_CHANNEL_KEYS                                                \
    kvq::low3::keys, kvq::affine<3, kvq::per_channel<16>, packed_params<float16>, \
                                 kvq::error_feedback<kvq::least_squares>, token_scales<byte_params>>
#define KVQ_TEST_SOME_TRANSFORMED_SCHEMES kvq::std4_h::keys, kvq::hadamard<kvq::affine<4, kvq::per_token<64>>>
#if defined(KVQ_TEST_FEWER_SCHEMES)
#define KVQ_TEST_TRANSFORMED_SCHEMES KVQ_TEST_SOME_TRANSFORMED_SCHEMES
#define KVQ_TEST_CHANNEL_SCHEMES KVQ_TEST_SOME_CHANNEL_SCHEMES
#define KVQ_TEST_CHANNEL_KEYS KVQ_TEST_SOME_CHANNEL_KEYS
#else
#define KVQ_TEST_TRANSFORMED_SCHEMES                                                                      \
    KVQ_TEST_SOME_TRANSFORMED_SCHEMES, kvq::hadamard<kvq::std4::values>,                                  \
        kvq::hadamard<                                                                                    \
            kvq::mixed_affine<kvq::code_widths<5, 2, 0>, kvq::average_eighths<20>, kvq::per_channel<64>>, \
            16>
#define KVQ_TEST_CHANNEL_SCHEMES                                                                          \
    KVQ_TEST_SOME_CHANNEL_SCHEMES, kvq::std4::keys, kvq::hi6::values, kvq::low3::keys, kvq::low3::values, \
        kvq::low2::values, kvq::mix4::keys, kvq::ref8::values,                                            \
        kvq::affine<1, kvq::per_channel<>, kvq::byte_params, kvq::min_max>,                               \
        kvq::affine<8, kvq::per_channel<64>, params<float>, kvq::shrink_search>,                          \
        kvq::affine<4, kvq::per_channel<kvq::any_group>, params<float16>,                                 \
                    kvq::mean_corrected<kvq::least_squares>>,                                             \
        kvq::affine<2, kvq::per_channel<64>, kvq::byte_params, kvq::mean_corrected<kvq::enclosing>>,      \
        kvq::affine<5, kvq::per_channel<>, packed_params<float16>, kvq::least_squares_below_3_bits,       \
                    token_scales<byte_params>>,                                                           \
        kvq::mixed_affine<kvq::code_widths<7, 3, 0>, kvq::average_eighths<20>, kvq::per_channel<>,        \
                          kvq::byte_params, kvq::error_feedback<kvq::shrink_search, kvq::min_max>>
#define KVQ_TEST_CHANNEL_KEYS                                                                      \
    KVQ_TEST_SOME_CHANNEL_KEYS, kvq::hi6::keys, kvq::std4::keys, kvq::mix4::keys, kvq::low2::keys, \
        kvq::mixed_affine<kvq::code_widths<7, 3, 0>, kvq::average_eighths<20>, kvq::per_channel<>, \
                          kvq::byte_params, kvq::error_feedback<kvq::shrink_search, kvq::min_max>>
#endif

template <class S>
void check_shapes() {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < rounds(30); ++round) {
        auto shape = random.one_in(3) ? test::random_shape(random) : test::whole_shape(random);
        if (!codes<S>(shape.role)) shape.role = kvq::tensor::key;
#if !defined(KVQ_TEST_FEWER_SCHEMES)  // quantize_values reads floats, too
        if (random.one_in(3)) {
            check_scheme<S, float>(S{}, random, shape, {});
            continue;
        }
#endif
        check_scheme<S, float16>(S{}, random, shape, {});
    }
    // Latents have up to 512 channels.
    const bool values = codes<S>(kvq::tensor::value) && random.one_in(2);
    const kvq::block_shape wide{values ? kvq::tensor::value : kvq::tensor::key, test::is_slow ? 4 : 64,
                                16 * random.between(17, 32)};
    check_scheme<S, float16>(S{}, random, wide, {});
}

}  // namespace

TEST_CASE_TEMPLATE("channels: same bytes from every backend", S, KVQ_TEST_CHANNEL_SCHEMES) {
    check_shapes<S>();
}

// A transform is applied token by token, then the channels are quantized as above.
TEST_CASE_TEMPLATE("channels behind a transform: same bytes from every backend", S,
                   KVQ_TEST_TRANSFORMED_SCHEMES) {
    check_shapes<S>();
    static_assert(kvq::kernels::transformed_scheme<S>);
    struct derived : S {};  // may do something else
    static_assert(!kvq::kernels::transformed_scheme<derived>);
}

TEST_CASE_TEMPLATE("channels with plans and feedback: same bytes from every backend", S,
                   KVQ_TEST_CHANNEL_KEYS) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < rounds(20); ++round) {
        auto shape = test::whole_shape(random);
        shape.role = kvq::tensor::key;
        shape.dim = 16 * random.between(1, 8);
        const kvq::cache_shape model{2, 2, shape.dim};
        const S scheme(random.one_in(2) ? statistics_with_products(random, model)
                                        : test::random_statistics(random, model));
        check_scheme<S, float16>(scheme, random, shape, {random.between(0, 1), random.between(0, 1)});
    }
}

TEST_CASE("token scales of short groups have more slots than the block has tokens") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::affine<6, kvq::per_channel<1>, byte_params, kvq::min_max, token_scales<byte_params>> scheme;
    for (const int tokens : {3, 65, 256})
        check_scheme<std::remove_const_t<decltype(scheme)>, float16>(scheme, random,
                                                                     {kvq::tensor::key, tokens, 16}, {});
}

TEST_CASE_TEMPLATE("channels of ordinary blocks are quantized and dequantized in lanes", S,
                   KVQ_TEST_CHANNEL_SCHEMES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const kvq::tensor role : {kvq::tensor::key, kvq::tensor::value})
        for (const int dim : {48, 64, 80, 96, 128, 256}) {
            if (!codes<S>(role) || (test::is_slow && dim > 80)) continue;
            const kvq::block_shape shape{role, 128, dim};
            const S scheme;
            auto x = uneven_block(random, shape);
            std::vector<std::byte> block(scheme.block_bytes(shape));
            const bool key = role == kvq::tensor::key;
            const int group = scheme.layout().cut(shape).group;
            INFO(scheme.name(), ", ", shape);
            CHECK(native::quantizes_in_vectors(scheme, shape, {}, x.data(), block.data()) ==
                  (key ? !S::encoder_type::corrects_mean : group % 32 == 0));
            CHECK(native::dequantizes_in_vectors(scheme, shape, {}, block.data(), kvq::float_type::fp32,
                                                 x.data(), dim, x.data()) ==
                  (key || group % 32 == 0 || kvq::kernels::composed_scheme<S>));
        }
}

}  // namespace channel_codec_tests
