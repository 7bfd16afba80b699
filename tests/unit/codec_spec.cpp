// SPDX-License-Identifier: MIT
// The spec of a scheme: what it says of the library's schemes, which schemes are equal to kernels, and what
// it says of others.
#include <doctest/doctest.h>

#include <kvq/schemes/full.hpp>
#include <kvq/schemes/int8.hpp>
#include <kvq/schemes/kivi.hpp>
#include <kvq/schemes/presets.hpp>
#include <string>

namespace codec_spec_tests { namespace {

template <class Scheme>
std::string text() {
    return codec_text(kvq::codec_of<Scheme>());
}

struct derived : kvq::affine<4> {};
struct read_as_it_is : kvq::affine<4> {
    using attends_as = read_as_it_is;
};
struct mine : kvq::least_squares {};
struct log8 {
    static constexpr const char* name = "log8";
    unsigned char code = 0;
    log8() = default;
    explicit log8(float) {}
    operator float() const { return 0.0f; }
};
struct rising {
    static constexpr bool has_bias = false;
    static constexpr int min_bits = 1;
    static constexpr const char* name = "rising";
    template <int Bits>
    static constexpr int zero_code = 0;
    template <int Bits, class P>
    static kvq::stored_parameters<P> fit(float, float hi) {
        return {P(hi), P(0.0f)};
    }
    template <int Bits>
    static int code(float x, float, float inverse) {
        return x * inverse > 0.5f;
    }
    template <int Bits>
    static constexpr float value(int code, float scale, float) {
        return scale * static_cast<float>(code * code);
    }
};

/// A kernel that knows a block by its spec alone.
template <kvq::codec_spec Spec>
struct kernel {
    static constexpr int number = Spec.width();
};

TEST_CASE("the spec of every scheme of the presets and of the simple formats, in words") {
    CHECK(text<kvq::full<kvq::bfloat16>>() == "bf16 values");
    CHECK(text<kvq::int8>() == "8-bit codes, symmetric, per token over all channels, fp32 parameters");
    CHECK(text<kvq::kivi<4, 64>::keys>() ==
          "4-bit codes, asymmetric, per channel over 64 tokens, fp16 parameters");
    CHECK(text<kvq::kivi<2, 32>::values>() ==
          "2-bit codes, asymmetric, per token over 32 channels, fp16 parameters");
    CHECK(text<kvq::ref8::values>() ==
          "8-bit codes, asymmetric, per channel over the page, fp16 parameters, fp16 token scales");
    CHECK(text<kvq::hi6::keys>() == "6-bit codes, asymmetric, per channel over the page, 8-bit parameters");
    CHECK(text<kvq::std4_h::keys>() ==
          "4-bit codes, asymmetric, per channel over 64 tokens, 8-bit parameters, 8-bit token scales");
    CHECK(text<kvq::low3::keys>() ==
          "6/4/3/2/0-bit codes, asymmetric, per channel over 64 tokens, 8-bit parameters");
    CHECK(text<kvq::affine<3, kvq::per_token<kvq::any_group>>>() ==
          "3-bit codes, asymmetric, per token over any number of channels, fp16 parameters");
    CHECK(codec_text(codec_of(kvq::affine<3, kvq::per_token<kvq::any_group>>(kvq::per_token<kvq::any_group>(
              48)))) == "3-bit codes, asymmetric, per token over 48 channels, fp16 parameters");
    CHECK(text<kvq::affine<2, kvq::per_token<8>, kvq::params<log8>>>() ==
          "2-bit codes, asymmetric, per token over 8 channels, own parameters");
}

TEST_CASE("what kernels do not tell apart has one spec") {
    using kvq::codec_of;
    // Encoders of the library, unless they correct the mean.
    static_assert(codec_of<kvq::affine<4, kvq::per_channel<64>, kvq::byte_params, kvq::min_max>>() ==
                  codec_of<kvq::std4::keys>());
    static_assert(codec_of<kvq::affine<4, kvq::per_channel<64>, kvq::byte_params, kvq::least_squares>>() ==
                  codec_of<kvq::std4::keys>());
    static_assert(codec_of<kvq::affine<4, kvq::per_channel<64>, kvq::byte_params, mine>>() !=
                  codec_of<kvq::std4::keys>());
    static_assert(codec_of<kvq::affine<4, kvq::per_channel<64>, kvq::byte_params,
                                       kvq::mean_corrected<kvq::least_squares>>>() !=
                  codec_of<kvq::std4::keys>());
    // A transform is before the codec.
    static_assert(codec_of<kvq::hadamard<kvq::affine<4>>>() == codec_of<kvq::affine<4>>());
    // A group size as a value.
    const kvq::affine<4, kvq::per_channel<kvq::any_group>> any(kvq::per_channel<kvq::any_group>(64));
    CHECK(codec_of(any) == codec_of<kvq::affine<4, kvq::per_channel<64>>>());
    CHECK(codec_of(any) != codec_of<kvq::affine<4, kvq::per_channel<32>>>());
    CHECK(codec_of(any) != codec_of<kvq::affine<4, kvq::per_token<64>>>());
    // As a template argument.
    static_assert(
        std::is_same_v<
            kernel<codec_of<kvq::std4::keys>()>,
            kernel<codec_of<kvq::affine<4, kvq::per_channel<64>, kvq::byte_params, kvq::shrink_search>>()>>);
}

TEST_CASE("schemes of one's own") {
    using kvq::block_content;
    using kvq::block_reading;
    constexpr kvq::codec_spec own = kvq::codec_of<derived>(), read = kvq::codec_of<read_as_it_is>(),
                              levels = kvq::codec_of<kvq::scheme<kvq::bits<1>, rising, kvq::per_token<>>>();
    static_assert(own.content == block_content::own && own.reading == block_reading::dequantized);
    static_assert(read.content == block_content::own && read.reading == block_reading::codes &&
                  read.width() == 4);
    static_assert(levels.content == block_content::codes && levels.reading == block_reading::codes);
}

TEST_CASE("a layout follows from the spec and the shape alone") {
    const kvq::block_shape shapes[] = {{kvq::tensor::key, 64, 80},
                                       {kvq::tensor::key, 50, 7},
                                       {kvq::tensor::value, 128, 128},
                                       {kvq::tensor::value, 33, 96}};
    const auto compare = [&]<class Scheme>(const Scheme& scheme) {
        for (const kvq::block_shape& s : shapes)
            CHECK(kvq::block_layout{codec_of(scheme)}.bytes(s) == scheme.block_bytes(s));
    };
    compare(kvq::int8());
    compare(kvq::affine<5, kvq::per_channel<kvq::any_group>>(kvq::per_channel<kvq::any_group>(24)));
    compare(kvq::affine<3, kvq::per_token<32>, kvq::params<log8>>());
    compare(kvq::std4::values());
    compare(kvq::ref8::values());
    // 40 quads of 24 bits on average: the words of a row, then 8-bit parameters of 2 groups, and their 3
    // shared ones.
    const kvq::block_layout low3{kvq::codec_of<kvq::low3::keys>()};
    const kvq::block_shape keys{kvq::tensor::key, 128, 160};
    CHECK(low3.code_bytes(keys) == 128 * 160 * 3 / 8);
    CHECK(low3.scale_offset(keys) == low3.code_bytes(keys));
    CHECK(low3.bytes(keys) ==
          kvq::detail::round_up(low3.scale_offset(keys) + 2 * (160 + 160 + 6), std::size_t{16}));
}

}}  // namespace codec_spec_tests
