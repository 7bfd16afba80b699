// SPDX-License-Identifier: MIT
// Formats with two planes: the upper one alone is the format of 4 bits, both are one of 8 bits, and a step
// down frees the lower one where it lies.
#include <doctest/doctest.h>

#include <cmath>
#include <kvq/io/page_transfer.hpp>

#include "support/attention_error.hpp"
#include "support/memory.hpp"
#include "support/messages.hpp"
#include "support/saved.hpp"

namespace planes_tests {

namespace {

using nested_cache = test::typed_cache<
    test::formats<test::with_planes<kvq::std4::keys>, kvq::std4::keys, kvq::int8>,
    test::formats<test::with_planes<kvq::nested4::values>, kvq::nested4::values, kvq::int8>>;
using one_plane = test::typed_cache<kvq::nested4>;
/// Other ways to hold 4 bits: parameters of tokens, symmetric codes, a transform.
using grouped_cache =
    test::typed_cache<test::formats<test::with_planes<kvq::affine<4, kvq::per_token<32>>>>,
                      test::formats<test::with_planes<kvq::affine<4, kvq::per_channel<32>>>>>;
using turned_cache = test::typed_cache<
    test::formats<test::with_planes<kvq::std4_h::keys>>,
    test::formats<test::with_planes<kvq::scheme<kvq::bits<4>, kvq::symmetric, kvq::per_token<16>>>>>;

double error(const test::tensor<float>& a, const test::tensor<float>& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.values().size(); ++i) {
        const double d = static_cast<double>(a.values()[i]) - static_cast<double>(b.values()[i]);
        sum += d * d;
    }
    return std::sqrt(sum);
}

kvq::cache_options small_pages(test::generator& random) {
    kvq::cache_options o;
    o.sinks = random.pick(std::vector<int>{0, 4});
    o.recent = random.pick(std::vector<int>{0, 16, 40});
    o.page_tokens = random.pick(std::vector<int>{32, 64, 96});
    return o;
}

}  // namespace

TEST_CASE("the upper plane alone is the format of 4 bits: bytes, values and attention, bit for bit") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(8); ++round) {
        const kvq::cache_shape shape{1, random.between(1, 2), random.between(1, 40) * 4,
                                     random.between(1, 40) * 4};
        const auto options = small_pages(random);
        nested_cache cache(shape, options);
        one_plane other(shape, options);
        const test::stream s(random, shape, 300);
        auto two = cache.new_sequence();
        auto one = other.new_sequence();
        test::append(two, 1, s, 0, 300);
        test::append(one, 1, s, 0, 300);
        const auto a = two.pages(0), b = one.pages(0);
        REQUIRE(a.entries() == b.entries());
        for (int e = 0; e < a.entries(); ++e)
            for (const auto& [p, q] :
                 {std::pair(a.at(e).keys, b.at(e).keys), std::pair(a.at(e).values, b.at(e).values)}) {
                CHECK((p->lower != nullptr) == (p->format != 0));
                REQUIRE(p->upper_bytes() == q->bytes);
                CHECK(std::memcmp(p->data(), q->data(), q->bytes) == 0);
            }
        for (const int rows : {1, 3, 20}) {
            const auto q = test::random_tensor(random, rows, 2 * shape.kv_heads, shape.head_dim);
            test::tensor<float> upper(rows, 2 * shape.kv_heads, shape.value_dim),
                alone(rows, 2 * shape.kv_heads, shape.value_dim);
            two.attend(0, q.view(), upper.view(), kvq::upper_plane{});
            one.attend(0, q.view(), alone.view());
            CHECK(upper.values() == alone.values());
            two.attend(0, q.view(), upper.view(), kvq::mods(kvq::causal{}, kvq::upper_plane{false}));
            CHECK(upper.values() != alone.values());
        }
    }
}

TEST_CASE_TEMPLATE("both planes: products are exact, and errors those of 8 bits", C, nested_cache,
                   grouped_cache, turned_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(6); ++round) {
        // 64 channels and more, so that rows of int8 have as many numbers as the groups of 4 bits.
        const kvq::cache_shape shape{1, random.between(1, 2), 16 * random.between(4, 9),
                                     16 * random.between(4, 9)};
        const auto options = small_pages(random);
        C cache(shape, options);
        test::int8_cache bytes(shape, options);
        const test::stream s(random, shape, 300);
        auto sequence = cache.new_sequence();
        auto int8 = bytes.new_sequence();
        test::append(sequence, 1, s, 0, 300);
        test::append(int8, 1, s, 0, 300);
        for (const auto role : {kvq::tensor::key, kvq::tensor::value}) {
            const auto& x = role == kvq::tensor::key ? s.k : s.v;
            CHECK(error(test::dequantized(sequence, shape, 0, role), x) <
                  2 * error(test::dequantized(int8, shape, 0, role), x));
        }
        for (const int rows : {1, 2, 40}) {
            const auto q = test::random_tensor(random, rows, 2 * shape.kv_heads, shape.head_dim);
            const auto e = test::measure_attention(cache, sequence, 0, q);
            CHECK(e.relative < 5e-4);
            CHECK(e.of_terms < 5e-4);
        }
    }
}

TEST_CASE("a step down to the upper plane frees the lower one where it lies; forks keep theirs") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{2, 2, 64, 0};
    kvq::cache_options options;
    options.page_tokens = 32;
    options.recent = 32;
    nested_cache cache(shape, options);
    const test::stream s(random, shape, 256);
    auto sequence = cache.new_sequence();
    test::append(sequence, 2, s, 0, 256);
    std::vector<const kvq::page*> before;
    std::size_t lower = 0;
    const auto each = [&](auto&& f) {
        for (int layer = 0; layer < 2; ++layer)
            for (int e = 0; e < sequence.pages(layer).entries(); ++e) {
                const auto entry = sequence.pages(layer).at(e);
                f(*entry.keys);
                f(*entry.values);
            }
    };
    each([&](const kvq::page& p) {
        before.push_back(&p);
        lower += p.lower_bytes();
    });
    REQUIRE(lower > 0);
    const std::size_t full = cache.bytes_in_use(), used = sequence.usage().bytes;
    kvq::step_down_policy policy{.tiers = {{.age = 0, .format = {0, 0}}, {.age = 1 << 20, .format = {1, 1}}}};
    SUBCASE("by age") {
        policy.tiers[1].age = 0;
        const auto plan = kvq::plan_step_down(cache, sequence, policy);
        const auto report = kvq::step_down(cache, sequence, policy);
        CHECK(plan.bytes_after == report.bytes_after);
        CHECK(plan.bytes_peak == report.bytes_peak);
        CHECK(plan.fits == report.fits);
        CHECK(plan.steps.size() == report.steps.size());
        CHECK(report.bytes_after == full - lower);
        CHECK(report.bytes_peak == full);
        CHECK(cache.bytes_in_use() == full - lower);
        CHECK(sequence.usage().bytes == used - lower);
        std::size_t i = 0;
        each([&](const kvq::page& p) {
            CHECK(&p == before[i++]);
            CHECK(p.lower == nullptr);
            CHECK(p.format == (p.format == 0 ? 0 : 2));
        });
    }
    SUBCASE("by budget, the oldest first") {
        policy.byte_budget = full - lower / 3;
        const auto plan = kvq::plan_step_down(cache, sequence, policy);
        const auto report = kvq::step_down(cache, sequence, policy);
        CHECK(plan.bytes_after == report.bytes_after);
        CHECK(plan.bytes_peak == report.bytes_peak);
        CHECK(plan.fits == report.fits);
        CHECK(plan.steps.size() == report.steps.size());
        CHECK(report.fits);
        CHECK(report.bytes_peak == full);
        CHECK(cache.bytes_in_use() == report.bytes_after);
        CHECK(sequence.pages(0).at(0).keys->lower == nullptr);
        CHECK(sequence.pages(0).at(6).keys->lower != nullptr);
    }
    SUBCASE("a fork that stays behind") {
        auto fork = sequence.fork();
        const auto was = test::contents(cache, fork);
        policy.tiers[1].age = 0;
        const kvq::requantize_request down{.key = 1, .value = 1};
        const auto planned = cache.plan_requantize(sequence, down);
        const auto report = cache.requantize(sequence, down);
        CHECK(planned.bytes_after == report.bytes_after);
        CHECK(report.bytes_after == cache.bytes_in_use());
        CHECK(test::contents(cache, fork) == was);
        // The upper planes were copied as they are.
        for (int e = 0; e < sequence.pages(0).entries(); ++e) {
            const kvq::page &mine = *sequence.pages(0).at(e).keys, &theirs = *fork.pages(0).at(e).keys;
            CHECK(std::memcmp(mine.data(), theirs.data(), mine.bytes) == 0);
        }
    }
}

TEST_CASE(
    "the codes of both planes lie in the same words: x^ from the bytes, as the page format draws them") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{1, 1, 64, 0};
    kvq::cache_options options;
    options.page_tokens = 32;
    options.sinks = options.recent = 0;
    nested_cache cache(shape, options);
    auto sequence = cache.new_sequence();
    test::append(sequence, 1, test::stream(random, shape, 64), 0, 64);
    const kvq::page& p = *sequence.pages(0).at(0).keys;
    // 32 tokens are one tile, and share their parameters; a word is 8 channels of a token.
    const auto code = [](const std::byte* plane, int token, int channel) {
        const auto byte = static_cast<int>(plane[4 * (channel / 8 * 32 + token) + channel % 4]);
        return channel % 8 < 4 ? byte & 15 : byte >> 4;
    };
    const auto both = test::dequantized(sequence, shape, 0, kvq::tensor::key);
    auto upper = sequence.fork();
    cache.requantize(upper, {.key = 1, .value = 1});
    const auto coarse = test::dequantized(upper, shape, 0, kvq::tensor::key);
    for (int c = 0; c < 64; ++c) {
        int least = 0, most = 0;
        for (int t = 0; t < 32; ++t) {
            if (code(p.data(), t, c) < code(p.data(), least, c)) least = t;
            if (code(p.data(), t, c) > code(p.data(), most, c)) most = t;
        }
        const auto of = [&](int t) { return static_cast<double>(coarse.view().at(t, 0)[c]); };
        const double step = (of(most) - of(least)) / (code(p.data(), most, c) - code(p.data(), least, c));
        for (int t = 0; t < 32; ++t) {
            const double wanted = of(t) + step * (code(p.lower, t, c) - 7.5) / 16.0;
            CHECK(std::fabs(static_cast<double>(both.view().at(t, 0)[c]) - wanted) < 1e-5);
        }
    }
}

TEST_CASE("a step that was reserved has memory for both planes") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{2, 2, 48, 0};
    test::counting_resource memory;
    kvq::cache_options options;
    options.page_tokens = 32;
    options.recent = 16;
    options.memory = &memory;
    nested_cache cache(shape, options);
    const test::stream s(random, shape, 200);
    auto sequence = cache.new_sequence(), plain = cache.new_sequence();
    test::append(plain, 2, s, 0, 100);
    test::append(plain, 2, s, 100, 80);
    test::append(sequence, 2, s, 0, 100);
    kvq::workspace space;
    const kvq::step_request step{&sequence, 80};
    cache.reserve(std::span(&step, 1), 4, 1, space);
    memory.fail_every(1);
    test::append(sequence, 2, s, 100, 80);
    memory.fail_every(0);
    CHECK(test::contents(cache, sequence) == test::contents(cache, plain));
}

TEST_CASE("files and messages: both planes, or the upper one as pages of its format") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{1, 2, 64, 32};
    kvq::cache_options options;
    options.page_tokens = 32;
    options.recent = 32;
    nested_cache cache(shape, options);
    one_plane other(shape, options);
    const test::stream s(random, shape, 256);
    auto sequence = cache.new_sequence();
    test::append(sequence, 1, s, 0, 256);
    CHECK(test::contents(cache, test::restored(cache, test::saved(sequence))) ==
          test::contents(cache, sequence));
    // Messages: the bytes of a page are in one piece, the upper plane first.
    kvq::page_receiver receiver(cache);
    std::vector<std::byte> sent;
    kvq::send_pages(sequence, 0, [&](const void* data, std::size_t n) {
        const auto* const bytes = static_cast<const std::byte*>(data);
        sent.insert(sent.end(), bytes, bytes + n);
    });
    for (test::memory_source source{sent}; source.position < sent.size();) {
        std::vector<std::byte> page;
        receiver.accept(kvq::read_page(source, page));
    }
    CHECK(test::contents(cache, receiver.finish(256)) == test::contents(cache, sequence));
    const auto upper = test::saved(sequence, {.upper_only = true});
    CHECK(upper.size() == kvq::saved_bytes(sequence, {.upper_only = true}));
    auto fork = sequence.fork();
    cache.requantize(fork, {.key = 1, .value = 1});
    CHECK(test::contents(cache, test::restored(cache, upper)) == test::contents(cache, fork));
    // A cache of the format alone reads them.
    auto one = other.new_sequence();
    test::append(one, 1, s, 0, 256);
    CHECK(test::contents(other, test::restored(other, upper, {.convert = true})) ==
          test::contents(other, one));
    test::typed_cache<test::with_planes<kvq::std4::keys>, test::with_planes<kvq::std4::values>> alone(
        shape, options);
    auto unlisted = alone.new_sequence();
    test::append(unlisted, 1, s, 0, 256);
    CHECK(test::contains(test::message_of([&] { (void)test::saved(unlisted, {.upper_only = true}); }),
                         "does not list the format of the upper one, channel4-g64-coded"));
}

TEST_CASE("what has no codes of 4 bits has no lower plane") {
    CHECK(test::contains(
        test::message_of([] { (void)kvq::with_lower_plane(test::made<test::usual>(kvq::int8{})); }),
        "codes of 4 bits"));
    CHECK(test::contains(test::message_of([] { (void)kvq::with_lower_plane({}); }), "empty"));
    const auto two = kvq::with_lower_plane(test::made<test::usual>(kvq::std4::keys{}));
    CHECK(test::contains(test::message_of([&] { (void)kvq::with_bounds(two); }), "two planes"));
    CHECK(test::contains(test::message_of([&] { (void)kvq::with_fp16_channels(two, 64); }), "two planes"));
    CHECK(test::contains(test::message_of([&] { (void)kvq::with_lower_plane(two); }), "codes of 4 bits"));
}

}  // namespace planes_tests
