// SPDX-License-Identifier: MIT
// Comparison family: exact where bytes are kept, the schemes' own bounds where they are quantized again.
// Restoring into a cache with other formats, options or parameters.
#include <doctest/doctest.h>
#include <kvq/cache/sequence_access.hpp>

#include "support/saved.hpp"
#include "support/typed_cache.hpp"

using test::append;
using test::contents;
using test::message_of;
using test::restored;
using test::saved;

namespace save_convert_tests {

namespace {

/// x^ of every token, bit for bit.
bool same_numbers(const kvq::sequence& a, const kvq::sequence& b) {
    const kvq::cache_shape& shape = kvq::detail::sequence_access::cache(a).shape();
    for (int layer = 0; layer < shape.layers; ++layer)
        for (const auto role : {kvq::tensor::key, kvq::tensor::value}) {
            const auto x = test::dequantized(a, shape, layer, role),
                       y = test::dequantized(b, shape, layer, role);
            const std::size_t bytes = x.values().size() * sizeof(float);
            if (x.values().size() != y.values().size() ||
                (bytes > 0 && std::memcmp(x.values().data(), y.values().data(), bytes) != 0))
                return false;
        }
    return true;
}

}  // namespace

TEST_CASE("formats are recognized by name, wherever they stand in the list") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 2, .head_dim = 32};
    using a = kvq::affine<4, kvq::per_channel<32>>;
    using b = kvq::affine<2, kvq::per_token<16>>;
    kvq::cache_options options{.sinks = 2, .recent = 5, .page_tokens = 16, .layers = {{0, 0}, {1, 0}}};
    test::typed_cache<test::formats<a, b>, test::formats<a>> cache(shape, options);
    options.layers = {};
    test::typed_cache<test::formats<kvq::int8, b, a>, test::formats<b, a>> other(shape, options);
    const test::stream s(random, shape, 150);
    auto sequence = cache.new_sequence();
    append(sequence, 2, s, 0, 100);
    auto copy = restored(other, saved(sequence));
    for (int step = 0; step < 5; ++step) {
        CHECK(same_numbers(sequence, copy));
        CHECK(sequence.usage().bytes == copy.usage().bytes);
        append(sequence, 2, s, 100 + 10 * step, 10);
        append(copy, 2, s, 100 + 10 * step, 10);
        if (step == 3)
            for (int n : {115, 60}) {
                sequence.trim(n);
                copy.trim(n);
            }
    }
    // And back again.
    CHECK(contents(cache, sequence) == contents(cache, restored(cache, saved(copy))));
}

TEST_CASE("another cache: what does not fit is named, and convert makes it fit") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 2, .head_dim = 16, .value_dim = 8};
    const kvq::cache_options options{.sinks = 3, .recent = 9, .page_tokens = 8, .rollback = 8};
    using wide = kvq::affine<8, kvq::per_token<0>>;
    using narrow = kvq::affine<4, kvq::per_token<0>>;
    test::typed_cache<wide> cache(shape, options);
    const test::stream s(random, shape, 200);
    auto sequence = cache.new_sequence();
    append(sequence, 2, s, 0, 90);
    sequence.trim(85);
    const auto file = saved(sequence, {.model = "m1"});
    const auto x = test::dequantized(sequence, shape, 1, kvq::tensor::key);

    const auto check_refused = [&](auto& target, const kvq::restore_options& how, const char* part) {
        const std::size_t bytes = target.bytes_in_use();
        const std::string message = message_of([&] { restored(target, file, how); });
        INFO(message);
        CHECK(test::contains(message, part));
        CHECK(target.bytes_in_use() == bytes);
    };
    check_refused(cache, {.model = "m2"}, "model m1, not for m2");
    for (auto [member, name] : {std::pair{&kvq::cache_shape::layers, "layers 2, the cache 3"},
                                {&kvq::cache_shape::kv_heads, "kv_heads 2, the cache 3"},
                                {&kvq::cache_shape::head_dim, "head_dim 16, the cache 17"},
                                {&kvq::cache_shape::value_dim, "value_dim 8, the cache 9"}}) {
        auto other_shape = shape;
        ++(other_shape.*member);
        test::typed_cache<wide> other(other_shape, options);
        check_refused(other, {.convert = true}, name);
    }
    for (auto [member, name] : {std::pair{&kvq::cache_options::sinks, "sinks 3, the cache 4"},
                                {&kvq::cache_options::recent, "recent 9, the cache 10"},
                                {&kvq::cache_options::page_tokens, "page_tokens 8, the cache 9"}}) {
        auto other_options = options;
        ++(other_options.*member);
        test::typed_cache<wide> other(shape, other_options);
        check_refused(other, {}, name);
        // Laid out anew: every token is there, and the newest are still what they were.
        auto copy = restored(other, file, {.convert = true});
        REQUIRE(copy.tokens(0) == 85);
        auto fresh = other.new_sequence();
        append(fresh, 2, s, 0, 85);
        CHECK(copy.usage().bytes == fresh.usage().bytes);
        const auto y = test::dequantized(copy, shape, 1, kvq::tensor::key);
        // Quantized twice with 8 bits: off by half a step twice, a step being range / 255 of a token.
        for (int t = 0; t < 85; ++t)
            for (int h = 0; h < 2; ++h) {
                float lo = x.view().at(t, h)[0], hi = lo;
                for (int c = 0; c < 16; ++c) {
                    lo = std::fmin(lo, x.view().at(t, h)[c]);
                    hi = std::fmax(hi, x.view().at(t, h)[c]);
                }
                for (int c = 0; c < 16; ++c) {
                    const float difference = std::fabs(x.view().at(t, h)[c] - y.view().at(t, h)[c]);
                    if (t >= 85 - 9 || t < 3)
                        CHECK(difference == 0);
                    else
                        CHECK(difference <= 1.02f * (hi - lo) / 255);
                }
            }
    }

    // A deeper or shallower rollback is the cache's own matter.
    for (const int rollback : {0, 3, 100}) {
        auto other_options = options;
        other_options.rollback = rollback;
        test::typed_cache<wide> other(shape, other_options);
        auto copy = restored(other, file);
        CHECK(same_numbers(sequence, copy));
        append(copy, 2, s, 85, 20);
        copy.trim(70);
        CHECK(copy.tokens(1) == 70);
        if (rollback == 0) CHECK(copy.usage().rollback == 0);
    }

    // Formats that the cache does not have: even convert cannot read them.
    test::typed_cache<narrow> stranger(shape, options);
    check_refused(stranger, {}, "quantized with ");
    check_refused(stranger, {}, "not among the formats of this cache: fp16, ");
    check_refused(stranger, {.convert = true}, "not among the formats of this cache: fp16, ");

    // Not even if they are numbers as they are.
    test::typed_cache<test::formats<kvq::full<float>, wide>> precise(shape, options);
    auto exact_numbers = precise.new_sequence();
    append(exact_numbers, 2, s, 0, 50);
    const auto exact_file = saved(exact_numbers);
    for (const bool convert : {false, true})
        CHECK(test::contains(message_of([&] { restored(cache, exact_file, {.convert = convert}); }),
                             "quantized with fp32, which is not among the formats"));

    // Formats that it has, but does not use: pages stay what they are, or become its own.
    test::typed_cache<test::formats<narrow, wide>> smaller(shape, options);
    auto kept = restored(smaller, file);
    CHECK(same_numbers(sequence, kept));
    CHECK(kept.usage().bytes == sequence.usage().bytes);
    auto converted = restored(smaller, file, {.convert = true});
    auto fresh = smaller.new_sequence();
    append(fresh, 2, s, 0, 90);
    fresh.trim(85);
    CHECK(converted.usage().bytes == fresh.usage().bytes);
    // It is what requantizing the pages that have no 16-bit copies any more gives.
    auto by_hand = restored(smaller, file);
    smaller.requantize(by_hand, {.key = 0, .value = 0, .new_pages = true});
    const auto expected = contents(smaller, by_hand), got = contents(smaller, converted),
               exact = contents(smaller, fresh);
    REQUIRE(got.size() == expected.size());
    int from_copies = 0, from_codes = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
        CHECK((got[i] == expected[i] || got[i] == exact[i]));
        CHECK(got[i].format == exact[i].format);
        if (got[i].format == 0) CHECK(got[i] == exact[i]);
        from_copies += got[i].format != 0 && got[i] == exact[i];
        from_codes += got[i].format != 0 && got[i] == expected[i];
    }
    CHECK(from_copies >= 2 * 2);
    CHECK(from_codes > 2 * 2);
    append(converted, 2, s, 85, 30);
    CHECK(converted.tokens(0) == 115);

    // To a cache that keeps the window format.
    test::typed_cache<test::formats<kvq::full<kvq::float16>, wide>> plain(shape, options);
    auto opened = restored(plain, file, {.convert = true});
    CHECK(opened.usage().quantized == 0);
    for (int layer = 0; layer < 2; ++layer)
        for (const auto role : {kvq::tensor::key, kvq::tensor::value}) {
            const auto before = test::dequantized(sequence, shape, layer, role),
                       after = test::dequantized(opened, shape, layer, role);
            const auto original = test::dequantized(restored(plain, file), shape, layer, role);
            CHECK(before.values() == original.values());
            for (std::size_t i = 0; i < before.values().size(); ++i)
                CHECK(std::fabs(after.values()[i] - before.values()[i]) <= 0.05f);
        }

    // Another window.
    test::typed_cache<wide, wide, test::usual, float> floats(shape, options);
    check_refused(floats, {}, "a window of fp16, the cache one of fp32");
    auto in_floats = restored(floats, file, {.convert = true});
    CHECK(in_floats.tokens(1) == 85);
    const auto y = test::dequantized(in_floats, shape, 1, kvq::tensor::key);
    for (int t = 85 - 9; t < 85; ++t)
        for (int h = 0; h < 2; ++h)
            for (int c = 0; c < 16; ++c) CHECK(x.view().at(t, h)[c] == y.view().at(t, h)[c]);
}

TEST_CASE("a scheme with other parameters is another scheme") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 8};
    const kvq::cache_options options{.page_tokens = 4};
    using C = test::typed_cache<test::magnitude_bytes>;
    const auto make = [&](float step) {
        return C(shape, options, C::key_table(test::magnitude_bytes(step)),
                 C::value_table(test::magnitude_bytes(0.5f)));
    };
    C cache = make(0.25f), same = make(0.25f), other = make(0.125f);
    const test::stream s(random, shape, 40);
    auto sequence = cache.new_sequence();
    append(sequence, 1, s, 0, 30);
    CHECK(saved(sequence) == saved(restored(same, saved(sequence))));
    const std::string message = message_of([&] { restored(other, saved(sequence), {.convert = true}); });
    CHECK(test::contains(message, "fingerprint 000000003e800000, here 000000003e000000"));
    // It can have both.
    test::typed_cache<test::formats<test::magnitude_bytes, test::magnitude_bytes>, test::magnitude_bytes>
    both(shape, options,
         decltype(both)::key_table(test::magnitude_bytes(0.125f), test::magnitude_bytes(0.25f)),
         decltype(both)::value_table(test::magnitude_bytes(0.5f)));
    CHECK(same_numbers(sequence, restored(both, saved(sequence))));
}

}  // namespace save_convert_tests
