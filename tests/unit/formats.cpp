// SPDX-License-Identifier: MIT
// Formats as values: made, found by name, mixed, added to a living cache, refused.
#include <doctest/doctest.h>

#include <kvq/cpu/simd.hpp>
#include <kvq/format/builtin_schemes.hpp>
#include <kvq/format/find_format.hpp>
#include <kvq/io/scheme_identity.hpp>
#include <memory>
#include <vector>

#include "support/caches.hpp"
#include "support/messages.hpp"

using test::contains;
using test::message_of;

namespace formats_tests { namespace {

/// Holds state that dequantizing needs, and does not say which.
struct shifted : kvq::affine<4> {
    float shift = 0;
};
struct values_only : kvq::affine<4> {
    static constexpr bool supports(kvq::tensor role) { return role == kvq::tensor::value; }
};

const std::vector<kvq::builtin_format>& listed() {
    using kvq::detail::builtin_entry;
    static const std::vector<kvq::builtin_format> all{
        builtin_entry<kvq::scalar, kvq::full<kvq::float16>>("fp16", true, true),
        builtin_entry<kvq::scalar, kvq::int8>("int8", true, true),
        builtin_entry<kvq::scalar, kvq::affine<4, kvq::per_channel<kvq::any_group>>>("kivi-4-g32", true,
                                                                                     false, 32),
        builtin_entry<kvq::scalar, kvq::affine<4, kvq::per_token<kvq::any_group>>>("kivi-4-g32", false, true,
                                                                                   32),
        builtin_entry<kvq::scalar, kvq::low2::keys>("low2", true, false),
        builtin_entry<kvq::scalar, kvq::low2::values>("low2", false, true)};
    return all;
}

constexpr kvq::cache_shape shape{.layers = 2, .kv_heads = 2, .head_dim = 32};

}  // namespace

}  // namespace formats_tests

// What kvq::library defines elsewhere.
const kvq::builtin_format* kvq::builtin_formats(std::size_t* count) {
    *count = formats_tests::listed().size();
    return formats_tests::listed().data();
}

namespace formats_tests {

TEST_CASE("formats are found by name, for each tensor its own") {
    CHECK(std::string(kvq::find_format("kivi-4-g32", kvq::tensor::key).name()) == "affine4-channel-g32-fp16");
    CHECK(std::string(kvq::find_format("kivi-4-g32", kvq::tensor::value).name()) == "affine4-token-g32-fp16");
    int count = 0;
    kvq::for_each_format([&](const kvq::builtin_format& f) { count += f.name != nullptr; });
    CHECK(count == 6);
    const auto options = kvq::preset("kivi-4-g32");
    CHECK(options.page_tokens == 128);
    CHECK(kvq::cache(shape, options).table(kvq::tensor::key)[1].supports(kvq::tensor::key));
}

TEST_CASE("a name takes any group size, and the pages are those of the type with this group") {
    const auto any = kvq::find_format("kivi-4-g24", kvq::tensor::key);
    CHECK(std::string(any.name()) == "affine4-channel-g24-fp16");
    CHECK(kvq::identity_of(any) == kvq::identity_of(kvq::make_format<kvq::kivi<4, 24>::keys, kvq::scalar>()));
    const kvq::block_shape block{kvq::tensor::key, 60, 17};
    test::generator random(11);
    auto x = random.normals(60 * 17);
    std::vector<std::byte> expected(kvq::kivi<4, 24>::keys{}.block_bytes(block)), got(any.block_bytes(block));
    REQUIRE(expected.size() == got.size());
    kvq::kivi<4, 24>::keys{}.quantize(block, {}, x.data(), expected.data());
    any.functions().quantize_values(any.scheme(), block, {}, x.data(), got.data());
    CHECK(got == expected);
    for (const char* name :
         {"kivi-4-g0", "kivi-4-g-8", "kivi-4-g", "kivi-4-g8x", "kivi-4", "int8-g32", "-g32"}) {
        INFO(name);
        CHECK_THROWS_AS((void)kvq::find_format(name, kvq::tensor::key), kvq::error);
    }
    CHECK_THROWS_AS(kvq::per_token<kvq::any_group>(-1), kvq::error);
}

TEST_CASE("bounds of keys are a part of a format's name, and are taken where keys have no others") {
    const auto plain = kvq::find_format("int8", kvq::tensor::key),
               bounded = kvq::find_format("int8-bounds", kvq::tensor::key);
    CHECK(std::string(bounded.name()) == std::string(plain.name()) + "-bounds");
    CHECK((plain.functions().estimate_scores == nullptr));
    CHECK((bounded.functions().estimate_scores != nullptr));
    for (const int dim : {1, 17, 64, 128}) {
        const kvq::block_shape keys{kvq::tensor::key, 60, dim}, values{kvq::tensor::value, 60, dim};
        CHECK(bounded.block_bytes(keys) ==
              plain.block_bytes(keys) + static_cast<std::size_t>((4 * dim + 15) / 16 * 16));
        CHECK(bounded.block_bytes(values) == plain.block_bytes(values));
    }
    CHECK(kvq::with_bounds(bounded).is(bounded));
    CHECK(std::string(kvq::find_format("int8-bounds", kvq::tensor::value).name()) == plain.name());
    CHECK(std::string(kvq::find_format("kivi-4-g32-bounds", kvq::tensor::key).name()) ==
          "affine4-channel-g32-fp16");
    const auto only = kvq::make_format<values_only, kvq::scalar>();
    CHECK(kvq::with_bounds(only).is(only));
    CHECK(contains(message_of([] { (void)kvq::with_bounds(kvq::format{}); }), "not an empty one"));
    CHECK(contains(message_of([] { (void)kvq::find_format("int9-bounds", kvq::tensor::key); }),
                   "there is no format \"int9\""));
    // 16-bit values with bounds are pages of their own, with the same values.
    const auto halves = kvq::find_format("fp16-bounds", kvq::tensor::key);
    CHECK(!halves.holds_values());
    CHECK(kvq::cache(shape, {.keys = halves}).target_format(kvq::tensor::key, 0) == 1);
}

TEST_CASE("formats know the name that was asked for; what they are does not depend on it") {
    using kvq::tensor;
    const auto asked = kvq::find_format("int8", tensor::key),
               made = kvq::make_format<kvq::int8, kvq::scalar>();
    CHECK(std::string(asked.asked_name()) == "int8");
    CHECK(std::string(asked.name()) == "int8-token-fp32");
    CHECK(std::string(made.asked_name()) == "int8-token-fp32");
    CHECK(asked.same_as(made));
    CHECK(made.same_as(asked));
    CHECK(kvq::identity_of(asked) == kvq::identity_of(made));
    CHECK(kvq::format_text(asked) == "int8 (int8-token-fp32)");
    CHECK(kvq::format_text(made) == "int8-token-fp32");
    CHECK(kvq::format_text(kvq::find_format("fp16", tensor::key)) == "fp16");
    CHECK(kvq::format_text(kvq::find_format("kivi-4-g48", tensor::value)) ==
          "kivi-4-g48 (affine4-token-g48-fp16)");
    CHECK(kvq::format_text(kvq::find_format("int8-bounds", tensor::key)) ==
          "int8-bounds (int8-token-fp32-bounds)");
    CHECK(kvq::format_text(kvq::with_bounds(asked)) == "int8-bounds (int8-token-fp32-bounds)");
    CHECK(kvq::format_text(kvq::find_format("int8-bounds", tensor::value)) ==
          "int8-bounds (int8-token-fp32)");
    CHECK(kvq::find_format("int8-bounds", tensor::value).same_as(asked));
}

TEST_CASE("a scheme of another cache is shown with every built-in name that it has") {
    using kvq::tensor;
    const auto has = [](const kvq::short_text& scheme, tensor role, const std::string& name) {
        for (const char* ending : {"", "-bounds"}) {
            const auto names = kvq::detail::built_in_names(std::string(scheme) + ending, role);
            INFO(std::string(scheme), ending, ": ", kvq::scheme_text(std::string(scheme) + ending, role));
            CHECK(std::find(names.begin(), names.end(), name + ending) != names.end());
        }
    };
    std::size_t presets = 0;
    kvq::for_each_preset([&]<class Preset>(Preset) {
        ++presets;
        has(typename Preset::keys{}.name(), tensor::key, Preset::name);
        has(typename Preset::values{}.name(), tensor::value, Preset::name);
    });
    CHECK(presets == std::size(kvq::detail::schemes_of_presets));
    has(kvq::int8{}.name(), tensor::key, "int8");
    has(kvq::affine<1>{}.name(), tensor::value, "affine-1-g64");
    has(kvq::kivi<8, 96>::keys{}.name(), tensor::key, "kivi-8-g96");
    has(kvq::kivi<8, 96>::values{}.name(), tensor::value, "kivi-8-g96");
    CHECK(kvq::scheme_text("channel4-coded-dual", tensor::value) ==
          "std4, std4-h, mix4 or mix5 (channel4-coded-dual)");
    for (const char* other : {"", "fp16", "affine", "affine4-token-g-fp16", "affine4-token-gx-fp16",
                              "affine4-token-fp16", "affine4-channel-g32-fp32", "-bounds", "mine"})
        CHECK(kvq::scheme_text(other, tensor::key) == other);
    // KIVI's values are per token, and no built-in format has values of this kind per channel.
    CHECK(kvq::scheme_text("affine4-channel-g32-fp16", tensor::value) == "affine4-channel-g32-fp16");
}

TEST_CASE("an unknown name is refused with the names that are most like it") {
    const auto message = message_of([] { (void)kvq::find_format("kivi-5-g32", kvq::tensor::key); });
    CHECK(contains(message, "there is no format \"kivi-5-g32\" for keys"));
    CHECK(contains(message, "kivi-4-g32"));
    int for_keys = 0;
    kvq::for_each_format([&](const kvq::builtin_format& f) { for_keys += f.keys ? 1 : 0; });
    CHECK(message.find("; the nearest of " + std::to_string(for_keys) + " are ") != std::string::npos);
    CHECK(contains(message_of([] { (void)kvq::find_format("", kvq::tensor::value); }), "fp16"));
}

TEST_CASE("statistics make keys, where a format takes them") {
    test::generator random(7);
    kvq::calibration statistics(shape);
    for (int layer = 0; layer < shape.layers; ++layer) {
        const auto k = test::random_tensor(random, 128, shape.kv_heads, shape.head_dim);
        statistics.add_keys(layer, k.view());
    }
    const auto with = kvq::find_format("low2", kvq::tensor::key, statistics);
    const auto without = kvq::find_format("low2", kvq::tensor::key);
    CHECK(with.record().fingerprint != without.record().fingerprint);
    CHECK(with.record().fingerprint == kvq::low2::keys(statistics).fingerprint());
    CHECK(std::string(kvq::find_format("int8", kvq::tensor::key, statistics).name()) == "int8-token-fp32");
    // Of another shape.
    CHECK_THROWS_AS(
        kvq::cache({.layers = 3, .kv_heads = 2, .head_dim = 32}, {.keys = with, .values = without}),
        kvq::error);
}

TEST_CASE("caches of different formats have one type; backends may be mixed, with the same bytes") {
    std::vector<std::unique_ptr<kvq::cache>> caches;
    const auto scalar = kvq::make_formats<kvq::kivi<4, 32>, kvq::scalar>();
    const kvq::format_pair simd{test::made<kvq::simd<>>(kvq::kivi<4, 32>::keys{}),
                                test::made<kvq::simd<>>(kvq::kivi<4, 32>::values{})};
    for (const auto& [keys, values] : {scalar, simd, kvq::format_pair{scalar.keys, simd.values}})
        caches.push_back(std::make_unique<kvq::cache>(
            shape, kvq::cache_options{.keys = keys, .values = values, .page_tokens = 32}));
    test::generator random(5);
    const test::stream words(random, shape, 200);
    std::vector<std::vector<test::held_page>> held;
    for (auto& cache : caches) {
        auto sequence = cache->new_sequence();
        for (int layer = 0; layer < shape.layers; ++layer)
            sequence.append(layer, words.k.view(), words.v.view());
        const auto pages = sequence.pages(0);
        std::vector<test::held_page> all;
        for (int e = 0; e < pages.entries(); ++e) {
            const kvq::page& p = *pages.at(e).keys;
            all.push_back(
                {p.format, pages.at(e).first_token, pages.at(e).tokens, {p.data(), p.data() + p.bytes}});
        }
        held.push_back(std::move(all));
        for (const auto bits : test::attention_bits(*cache, sequence))
            CHECK(kvq::detail::is_finite(kvq::detail::bit_cast<float>(bits)));
    }
    CHECK(held[0] == held[1]);
    CHECK(held[0] == held[2]);
}

TEST_CASE("a live cache takes further formats") {
    kvq::cache cache(shape, {.keys = kvq::find_format("fp16", kvq::tensor::key), .page_tokens = 16});
    auto sequence = cache.new_sequence();
    test::generator random(3);
    const test::stream words(random, shape, 100);
    for (int layer = 0; layer < shape.layers; ++layer) sequence.append(layer, words.k.view(), words.v.view());
    CHECK(sequence.usage().quantized == 0);

    const auto int8 = kvq::find_format("int8", kvq::tensor::key);
    const int key = cache.add_format(kvq::tensor::key, int8),
              value = cache.add_format(kvq::tensor::value, int8);
    CHECK(key == 1);
    CHECK(value == 1);
    CHECK(cache.add_format(kvq::tensor::key, int8) == key);
    const auto plan = cache.plan_requantize(sequence, {.key = key, .value = value});
    const auto report = cache.requantize(sequence, {.key = key, .value = value});
    CHECK(report.pages == plan.pages);
    CHECK(report.bytes_after == plan.bytes_after);
    CHECK(report.bytes_after < report.bytes_before);
    CHECK(sequence.usage().quantized > 0);
    CHECK_THROWS_AS(cache.add_format(kvq::tensor::key, kvq::make_format<values_only, kvq::scalar>()),
                    kvq::error);
    CHECK(cache.table(kvq::tensor::key).listed() == 2);
}

TEST_CASE("what a cache cannot use is refused with a sentence") {
    const auto keys = kvq::find_format("int8", kvq::tensor::key);
    const auto refused = [&](const kvq::cache_options& options, const char* part) {
        const auto message = message_of([&] { kvq::cache(shape, options); });
        INFO(message);
        CHECK(contains(message, part));
    };
    refused({}, "a cache needs a format for its keys");
    refused({.keys = kvq::format()}, "a format of the cache is empty");
    refused({.keys = keys, .window = keys},
            "the window format must be fp32, fp16 or bf16, got int8 (int8-token-fp32)");
    const auto only = kvq::make_format<values_only, kvq::scalar>();
    refused({.keys = only}, "key format 0, affine4-token-g64-fp16, holds values only");
    CHECK_NOTHROW(kvq::cache(shape, {.keys = keys, .values = only}));
    refused({.keys = keys, .layers = {{0, 0}, {1, 0}}}, "key format 1 is not among the 1 listed ones");
}

TEST_CASE("pages of a scheme with state and without fingerprint are neither saved nor sent") {
    kvq::cache cache(shape, {.keys = kvq::make_format<kvq::scalar>(shifted{})});
    const auto sequence = cache.new_sequence();
    const auto message = message_of([&] { (void)kvq::identity_of(cache.table(kvq::tensor::key)[1]); });
    CHECK(contains(message, "it holds state, so its scheme must have std::uint64_t fingerprint() const"));
}

TEST_CASE("a format may be listed twice: its pages have the first number; one that holds state is its own") {
    const auto int8 = [] { return kvq::find_format("int8", kvq::tensor::key); };
    const auto kivi = [](const char* name) { return kvq::find_format(name, kvq::tensor::key); };
    kvq::cache twice(shape, {.keys = {int8(), kivi("kivi-4-g32"), int8()}, .values = {int8(), int8()}});
    CHECK(twice.table(kvq::tensor::key).index_of(2) == 1);
    CHECK(twice.table(kvq::tensor::value).index_of(1) == 1);
    CHECK(twice.add_format(kvq::tensor::value, int8()) == 0);
    // Other groups, another backend: other formats.
    kvq::cache cache(shape, {.keys = {kivi("kivi-4-g32"), kivi("kivi-4-g64"),
                                      kvq::make_format<kvq::int8, kvq::simd<>>(), int8()}});
    CHECK(cache.add_format(kvq::tensor::key, kivi("kivi-4-g64")) == 1);
    CHECK(cache.add_format(kvq::tensor::key, int8()) == 3);
    CHECK(cache.table(kvq::tensor::key).listed() == 4);
    // An encoder of keys may hold statistics, which no name tells.
    CHECK(cache.add_format(kvq::tensor::key, kivi("low2")) == 4);
    CHECK(cache.add_format(kvq::tensor::key, kivi("low2")) == 5);
}

TEST_CASE("a format says what runs in vectors") {
    const kvq::block_shape block{kvq::tensor::key, 64, 64};
    const auto fast = kvq::make_formats<kvq::kivi<4, 32>>().keys.describe(block);
    CHECK(fast.quantize);
    CHECK(fast.dequantize);
    CHECK(fast.attend);
    CHECK(!kvq::find_format("int8", kvq::tensor::key).describe(block).quantize);
    // Only ranges are fitted in vectors.
    const kvq::format least_squares =
        kvq::make_format<kvq::affine<4, kvq::per_token<32>, kvq::params<kvq::float16>, kvq::least_squares>>();
    const auto fitted = least_squares.describe(block);
    CHECK(!fitted.quantize);
    CHECK(std::string(fitted.quantize_by).find("portable: parameters per token") == 0);
    CHECK(fitted.dequantize);
    CHECK(fitted.attend);
    // Groups that fill no vector.
    CHECK(!kvq::make_format<kvq::affine<4, kvq::per_token<7>>>()
               .describe({kvq::tensor::key, 64, 70})
               .dequantize);
}

TEST_CASE("formats of one width share the functions of their products") {
    const kvq::format keys = kvq::make_formats<kvq::kivi<4, 32>>().keys,
                      fitted = kvq::make_format<kvq::affine<4, kvq::per_token<32>, kvq::params<kvq::float16>,
                                                            kvq::least_squares>>();
    CHECK((&keys.functions() != &fitted.functions()));
    CHECK((keys.functions().begin == fitted.functions().begin));
    CHECK((keys.functions().finish == fitted.functions().finish));
}

}  // namespace formats_tests
