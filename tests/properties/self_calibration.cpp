// SPDX-License-Identifier: MIT
// A cache that calibrates itself has the bytes of a cache that had these statistics from the beginning.
#include <doctest/doctest.h>

#include <cstring>
#include <kvq/policy/self_calibration.hpp>
#include <stdexcept>

#include "support/caches.hpp"
#include "support/messages.hpp"

namespace self_calibration_tests {

namespace {

kvq::format low3_of(const kvq::calibration& statistics) {
    return test::made_from<test::usual, kvq::low3::keys>(statistics);
}
kvq::format fp16() { return test::made<test::usual>(kvq::full<kvq::float16>{}); }

kvq::cache_options options_with(test::generator& random, const kvq::format& keys) {
    kvq::cache_options options;
    options.keys = {keys};
    options.values = {test::made<test::usual>(kvq::std4::values{})};
    options.sinks = random.pick(std::vector<int>{0, 1, 4});
    options.recent = random.pick(std::vector<int>{0, 7, 40});
    options.rollback = random.pick(std::vector<int>{0, 8, 50});
    options.page_tokens = random.pick(std::vector<int>{32, 64});
    return options;
}
kvq::cache_shape small_shape(test::generator& random) {
    return {random.between(1, 3), random.between(1, 2), 8 * random.between(2, 8), 32};
}

void check_equal_pages(const kvq::sequence& a, const kvq::sequence& b, int layers) {
    for (int layer = 0; layer < layers; ++layer) {
        const kvq::layer_pages left = a.pages(layer), right = b.pages(layer);
        REQUIRE(left.entries() == right.entries());
        for (int e = 0; e < left.entries(); ++e) {
            const auto x = left.at(e), y = right.at(e);
            CHECK(x.tokens == y.tokens);
            CHECK((x.keys->bytes == y.keys->bytes &&
                   std::memcmp(x.keys->data(), y.keys->data(), x.keys->bytes) == 0));
            CHECK((x.values->bytes == y.values->bytes &&
                   std::memcmp(x.values->data(), y.values->data(), x.values->bytes) == 0));
        }
    }
}

}  // namespace

TEST_CASE("self calibration: behind 16-bit keys, every page is the one of a cache that had the statistics") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 12; ++round) {
        const kvq::cache_shape shape = small_shape(random);
        const kvq::cache_options options = options_with(random, fp16());
        const int total = 400, tokens = random.between(64, 200),
                  q_heads = shape.kv_heads * random.between(1, 3);
        const test::stream s(random, shape, total);
        const test::tensor<float> q = test::random_tensor(random, total, q_heads, shape.head_dim);
        kvq::cache cache(shape, options);
        kvq::self_calibration own(cache, tokens, random.one_in(2));
        kvq::sequence sequence = cache.new_sequence();
        int at = 0;
        while (at < total) {
            const int n = std::min(total - at, random.between(1, 60));
            for (int layer = 0; layer < shape.layers; ++layer) own.add_queries(layer, q.slice(at, n));
            test::append(sequence, shape.layers, s, at, n);
            at += n;
            CHECK(own.apply(sequence, low3_of) == (at >= tokens));
            CHECK(own.done() == (at >= tokens));
        }
        CHECK(own.format_number() == 1);
        CHECK(own.statistics().keys(0, 0) > 0.0);

        kvq::cache_options known = options;
        known.keys = {low3_of(own.statistics())};
        kvq::cache with_statistics(shape, known);
        kvq::sequence expected = with_statistics.new_sequence();
        test::append(expected, shape.layers, s, 0, total);
        check_equal_pages(sequence, expected, shape.layers);
        // Trims within `rollback`, and sequences that begin now.
        const int back = random.between(0, options.rollback);
        sequence.trim(total - back);
        expected.trim(total - back);
        check_equal_pages(sequence, expected, shape.layers);
        kvq::sequence next = cache.new_sequence(), next_expected = with_statistics.new_sequence();
        test::append(next, shape.layers, s, 0, total);
        test::append(next_expected, shape.layers, s, 0, total);
        check_equal_pages(next, next_expected, shape.layers);
    }
}

TEST_CASE("self calibration: pages that are quantized keep their bytes, later ones have the plan") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 6; ++round) {
        const kvq::cache_shape shape = small_shape(random);
        // low3 without statistics has pages of the same size, so that nothing shrinks.
        const kvq::cache_options options = options_with(random, test::made<test::usual>(kvq::low3::keys{}));
        const int before = random.between(100, 200), total = 400;
        const test::stream s(random, shape, total);
        kvq::cache cache(shape, options);
        kvq::sequence sequence = cache.new_sequence();
        test::append(sequence, shape.layers, s, 0, before);
        const kvq::sequence as_it_was = sequence.fork();
        kvq::self_calibration own(cache, 64);
        REQUIRE(own.apply(sequence, low3_of));
        check_equal_pages(sequence, as_it_was, shape.layers);
        test::append(sequence, shape.layers, s, before, total - before);

        kvq::cache_options known = options;
        known.keys = {low3_of(own.statistics())};
        kvq::cache with_statistics(shape, known), without(shape, options);
        kvq::sequence planned = with_statistics.new_sequence(), plain = without.new_sequence();
        test::append(planned, shape.layers, s, 0, total);
        test::append(plain, shape.layers, s, 0, total);
        const kvq::page_geometry g = cache.geometry();
        for (int layer = 0; layer < shape.layers; ++layer)
            for (int e = 0; e < sequence.pages(layer).entries(); ++e) {
                const auto entry = sequence.pages(layer).at(e);
                const bool early = e < (g.sinks > 0 ? 1 : 0) + g.committed(before);
                const auto& of = early ? plain : planned;
                const kvq::page& like = *of.pages(layer).at(e).keys;
                CHECK((entry.keys->bytes == like.bytes &&
                       std::memcmp(entry.keys->data(), like.data(), like.bytes) == 0));
            }
    }
}

TEST_CASE("self calibration: several sequences count together; what fails changes nothing") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{2, 2, 32, 0};
    const kvq::cache_options options = options_with(random, fp16());
    const test::stream s(random, shape, 300);
    kvq::cache cache(shape, options);
    kvq::sequence a = cache.new_sequence(), b = cache.new_sequence();
    test::append(a, shape.layers, s, 0, 100);
    test::append(b, shape.layers, s, 100, 90);
    kvq::sequence* both[] = {&a, &b};
    kvq::self_calibration own(cache, 180);
    const auto bytes = cache.bytes_in_use();
    CHECK_FALSE(own.apply(a, low3_of));
    CHECK_THROWS_AS(
        own.apply(both, [](const kvq::calibration&) -> kvq::format { throw std::runtime_error("no"); }),
        std::runtime_error);
    CHECK(test::contains(
        test::message_of([&] { own.apply(both, [](const auto&) { return kvq::format{}; }); }), "format"));
    kvq::sequence* twice[] = {&a, &a};
    kvq::sequence* missing[] = {&a, nullptr};
    CHECK(test::contains(test::message_of([&] { own.apply(twice, low3_of); }), "again"));
    CHECK(test::contains(test::message_of([&] { own.apply(missing, low3_of); }), "null"));
    CHECK_FALSE(own.done());
    CHECK(cache.bytes_in_use() == bytes);
    CHECK(cache.table(kvq::tensor::key).listed() == 1);
    CHECK(own.apply(both, low3_of));
    // 100 tokens of the first sequence and 80 of the second; whole groups of 64, and rests of at least 16.
    CHECK(own.statistics().keys(1, 1) == 180.0);
    const auto sums = own.statistics().save();
    own.add_queries(0, s.k.slice(0, 10));
    CHECK(own.statistics().save() == sums);
    CHECK(own.apply(both, low3_of));
    CHECK(cache.table(kvq::tensor::key).listed() == 2);
    for (const kvq::sequence* x : both)
        for (int e = options.sinks > 0 ? 1 : 0; e < x->pages(0).entries(); ++e)
            if (x->pages(0).at(e).tokens == options.page_tokens &&
                x->pages(0).at(e).first_token + options.page_tokens + options.recent <= x->tokens())
                CHECK(x->pages(0).at(e).keys->format == 2);

    // Many short sequences hold enough tokens and no statistics.
    std::vector<kvq::sequence> shorts;
    std::vector<kvq::sequence*> listed;
    for (int i = 0; i < 10; ++i) {
        shorts.push_back(cache.new_sequence());
        test::append(shorts.back(), shape.layers, s, 0, 15);
    }
    for (kvq::sequence& x : shorts) listed.push_back(&x);
    kvq::self_calibration none(cache, 64);
    CHECK_FALSE(none.apply(listed, low3_of));

    // Pages that the format makes smaller are requantized to it, whatever they were.
    kvq::cache_options wide = options;
    wide.keys = {test::made<test::usual>(kvq::int8{})};
    kvq::cache eight(shape, wide);
    kvq::sequence eights = eight.new_sequence();
    test::append(eights, shape.layers, s, 0, 300);
    kvq::self_calibration narrower(eight, 64);
    REQUIRE(narrower.apply(eights, low3_of));
    const int committed = (options.sinks > 0 ? 1 : 0) + eight.geometry().committed(300);
    for (int e = options.sinks > 0 ? 1 : 0; e < committed; ++e)
        CHECK(eights.pages(1).at(e).keys->format == eight.table(kvq::tensor::key).index_of(1));

    kvq::calibration sums_of_some(shape);
    CHECK(test::contains(test::message_of([&] { kvq::add_keys(sums_of_some, cache, a, 0, 90, 11); }), "100"));
    CHECK(test::contains(test::message_of([&] { kvq::add_keys(sums_of_some, cache, a, 0, -1, 5); }), "-1"));
    CHECK(test::contains(test::message_of([&] { kvq::self_calibration few(cache, 63); }), "64"));
    CHECK(test::contains(test::message_of([&] { cache.commit_to(kvq::tensor::key, 7); }), "7"));
    CHECK(test::contains(test::message_of([&] { cache.commit_to(kvq::tensor::key, 0, 2, 1); }), "2"));
}

TEST_CASE("commit_to: sequences that are made later take the format, in these layers") {
    const kvq::cache_shape shape{3, 1, 16, 0};
    kvq::cache_options options;
    options.keys = {fp16(), test::made<test::usual>(kvq::int8{})};
    kvq::cache cache(shape, options);
    const kvq::sequence before = cache.new_sequence();
    cache.commit_to(kvq::tensor::key, 1, 1, 2);
    for (int layer = 0; layer < 3; ++layer) {
        CHECK(cache.target_format(kvq::tensor::key, layer) == (layer == 1 ? 2 : 0));
        CHECK(cache.target_format(kvq::tensor::value, layer) == 0);
    }
    CHECK(test::contains(test::message_of([&] { cache.commit_to(kvq::tensor::key, 0, 1, 9); }), "1 to 9"));
    cache.commit_to(kvq::tensor::value, 1);
    for (int layer = 0; layer < 3; ++layer) CHECK(cache.target_format(kvq::tensor::value, layer) == 2);
}

}  // namespace self_calibration_tests
