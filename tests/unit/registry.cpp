// SPDX-License-Identifier: MIT
// The registry of kernels says what runs: its kernels take the blocks that it gives them, and write the bytes
// of the reference. Its reasons.
#include <doctest/doctest.h>

#include <kvq/cpu/simd.hpp>
#include <kvq/schemes/float_rows.hpp>
#include <kvq/schemes/int8.hpp>
#include <kvq/schemes/kivi.hpp>
#include <kvq/schemes/presets.hpp>
#include <string>
#include <utility>
#include <vector>

#include "support/peaked.hpp"
#include "support/random.hpp"

namespace registry_tests { namespace {

using kvq::float_type;
using kvq::tensor;
using native = kvq::simd<>;

constexpr int channels[] = {16, 32, 48, 64, 80, 96, 112, 128, 192, 256};
constexpr int pages[] = {16, 32, 48, 64, 100, 128, 256, 512, 1024};

template <class Scheme>
kvq::format_description described(const Scheme& scheme, const kvq::block_shape& shape,
                                  float_type window = float_type::fp16, int width = 16) {
    return kvq::kernels::described(codec_of(scheme), kvq::kernels::transform_of<Scheme>, shape, window,
                                   width);
}

/// Quantizes and dequantizes random values of such blocks, and compares what runs with what is said.
template <class Scheme>
void check_shape(test::generator& random, const Scheme& scheme, const kvq::block_shape& shape) {
    const kvq::block_id id{0, 0};
    const std::vector<float> x = random.normals(shape.values(), 1.0f);
    std::vector<float> values = x, out(shape.values() + 64), expected(shape.values() + 64);
    const std::size_t bytes = scheme.block_bytes(shape);
    std::vector<std::byte> block(bytes + 64), reference(bytes + 64);
    INFO(scheme.name(), ", ", shape.role == tensor::key ? "keys" : "values", " of ", shape.tokens, " x ",
         shape.dim);

    const bool quantizes = native::quantizes_in_vectors(scheme, shape, id, values.data(), block.data());
    for (const float_type window : {float_type::fp16, float_type::bf16, float_type::fp32}) {
        const auto d = native::describe(scheme, shape, window);
        const bool reads =
            kvq::kernels::window_choice(codec_of(scheme), shape, window, native::lanes::width).header;
        CHECK(d.quantize == (quantizes && reads));
        CHECK(d.quantize == (std::string(d.quantize_by).find("portable") != 0));
    }
    values = x;
    scheme.quantize(shape, id, values.data(), reference.data());
    if (quantizes)
        CHECK(
            std::equal(block.begin(), block.begin() + static_cast<std::ptrdiff_t>(bytes), reference.begin()));

    const bool dequantizes = native::dequantizes_in_vectors(
        scheme, shape, id, reference.data(), float_type::fp32, out.data(), shape.dim, values.data());
    CHECK(native::describe(scheme, shape, float_type::fp16).dequantize == dequantizes);
    scheme.dequantize(shape, id, reference.data(), expected.data());
    if (dequantizes)
        CHECK(std::equal(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(shape.values()),
                         expected.begin()));
}

template <class Scheme>
void check_scheme(test::generator& random, const Scheme& scheme) {
    for (const tensor role : {tensor::key, tensor::value}) {
        if (!kvq::detail::supports<Scheme>(role)) continue;
        for (const int dim : channels)
            for (const int tokens : pages)
                if (test::long_tests() || random.one_in(9)) check_shape(random, scheme, {role, tokens, dim});
    }
}

template <class Granularity, int Bits>
void check_groups(test::generator& random) {
    for (const int group : {0, 16, 20, 32, 48, 64})
        check_scheme(random, kvq::affine<Bits, Granularity>(Granularity(group)));
}

TEST_CASE("what the registry admits runs, and writes the bytes of the reference") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    check_groups<kvq::per_token<kvq::any_group>, 4>(random);
    check_groups<kvq::per_channel<kvq::any_group>, 3>(random);
    check_scheme(random, kvq::int8());
    check_scheme(random, kvq::std4::keys());
    check_scheme(random, kvq::std4::values());
    check_scheme(random, kvq::low3::keys());
    check_scheme(random, kvq::affine<2, kvq::per_channel<48>, kvq::byte_params, kvq::min_max>());
}

/// Blocks of a built-in format of every usual size, for vectors of every instruction set.
template <class Scheme>
void check_usual_sizes(const char* name, tensor role) {
    constexpr auto codec = kvq::codec_of<Scheme>();
    for (const int width : {4, 8, 16})
        for (const int dim : {48, 64, 80, 96, 112, 128, 192, 256})
            for (const int tokens : {64, 128})
                for (const float_type window : {float_type::fp16, float_type::bf16, float_type::fp32}) {
                    const auto d = kvq::kernels::described(codec, kvq::kernels::transform_of<Scheme>,
                                                           {role, tokens, dim}, window, width);
                    INFO(name, ", ", tokens, " x ", dim, ", width ", width, ": ", d.quantize_by, ", ",
                         d.dequantize_by, ", ", d.attend_by, ", ", d.transform_by);
                    CHECK(d.all());
                }
}
template <class Pair>
void check_usual_pair(const char* name) {
    check_usual_sizes<typename Pair::keys>(name, tensor::key);
    check_usual_sizes<typename Pair::values>(name, tensor::value);
}
template <int... Bits>
void check_usual_widths(std::integer_sequence<int, Bits...>) {
    (check_usual_pair<kvq::kivi<Bits + 1, 32>>("kivi"), ...);
}

TEST_CASE("built-in formats have kernels for every usual size, on every instruction set") {
    check_usual_widths(std::make_integer_sequence<int, 8>());
    check_usual_sizes<kvq::int8>("int8", tensor::key);
    check_usual_sizes<kvq::int8>("int8", tensor::value);
    check_usual_sizes<kvq::float_rows<kvq::e4m3>>("e4m3", tensor::key);
    check_usual_sizes<kvq::float_rows<kvq::e4m3>>("e4m3", tensor::value);
    kvq::for_each_preset([]<class Preset>(Preset) { check_usual_pair<Preset>(Preset::name); });
}

TEST_CASE("every portable path has a reason") {
    const kvq::block_shape keys{tensor::key, 128, 80}, values{tensor::value, 100, 70};
    CHECK(std::string(described(kvq::std4::keys(), keys).quantize_by) ==
          "cpu/quantize/quantize_channels.hpp");
    CHECK(std::string(described(kvq::std4::keys(), keys).attend_by) == "cpu/product/code_product.hpp");
    CHECK(std::string(described(kvq::std4::keys(), keys, float_type::fp16, 32).quantize_by) ==
          "portable: 80 channels are no multiple of 32, the width of a vector");
    CHECK(std::string(described(kvq::std4::values(), values).dequantize_by) ==
          "portable: 70 channels are no multiple of 4");
    CHECK(std::string(described(kvq::std4::values(), {tensor::value, 512, 64}).quantize_by) ==
          "portable: 512 tokens are more than 256");
    CHECK(std::string(described(kvq::affine<3, kvq::per_channel<20>, kvq::byte_params, kvq::min_max>(),
                                {tensor::value, 80, 64})
                          .quantize_by) ==
          "portable: groups of 20 tokens are no multiple of 32, a word of codes");
    CHECK(std::string(described(kvq::affine<4, kvq::per_token<7>>(), {tensor::key, 64, 70}).dequantize_by) ==
          "portable: groups of 7 are no multiple of 16, the width of a vector");
    CHECK(std::string(
              described(kvq::affine<4, kvq::per_token<32>, kvq::params<kvq::float16>, kvq::least_squares>(),
                        keys)
                  .quantize_by) ==
          "portable: parameters per token are fitted in vectors by the encoder enclosing alone");
    CHECK(std::string(described(kvq::affine<4, kvq::per_channel<32>, kvq::byte_params,
                                            kvq::mean_corrected<kvq::least_squares>>(),
                                keys)
                          .quantize_by) == "portable: the encoder corrects means, and these are keys");
    CHECK(std::string(described(kvq::std4_h::keys(), {tensor::key, 128, 72}).transform_by) ==
          "portable: 72 channels have Hadamard blocks of less than 16, the width of a vector");
    struct derived : kvq::affine<4> {};
    CHECK(std::string(described(derived(), keys).attend_by) == "portable: the scheme alone reads its bytes");
    CHECK(std::string(kvq::scalar::describe(kvq::int8(), keys, float_type::fp16).attend_by) ==
          "portable: the backend has no vectors");
}

TEST_CASE("the kernels of a codec are known at compile time") {
    using namespace kvq::kernels;
    static_assert(quantizer_of(kvq::codec_of<kvq::int8>()) == quantizer::ranges);
    static_assert(quantizer_of(kvq::codec_of<kvq::std4::values>()) == quantizer::channels);
    static_assert(dequantizer_of(kvq::codec_of<kvq::ref8::keys>()) == dequantizer::groups);
    static_assert(dequantizer_of(kvq::codec_of<kvq::low3::keys>()) == dequantizer::channels);
    static_assert(attend_choice(kvq::codec_of<kvq::low3::keys>(), {tensor::key, 64, 128}, 16).header);
    // A scheme that is read behind a transform has its codec, and none that kernels quantize as they are.
    static_assert(plain_codec<kvq::std4_h::keys>.content == kvq::block_content::own);
    static_assert(transformed_scheme<kvq::std4_h::keys> && !channel_scheme<kvq::std4_h::keys>);
}

}}  // namespace registry_tests
