// SPDX-License-Identifier: MIT
// Comparison family: exact. A restored sequence is the saved one, now and after whatever happens to it.
#include <doctest/doctest.h>

#include <cstdio>
#include <kvq/cache/sequence_access.hpp>
#include <kvq/io/file.hpp>

#include "support/memory.hpp"
#include "support/saved.hpp"

using test::append;
using test::attention_bits;
using test::contents;
using test::message_of;
using test::restored;
using test::saved;

namespace save_restore_tests {

namespace {

/// A sequence with a past: tokens, trims, forks, pages of several formats.
template <class C>
kvq::sequence random_history(test::generator& random, C& cache, const test::stream& s, int steps) {
    const int layers = cache.shape().layers;
    auto sequence = cache.new_sequence();
    for (int step = 0; step < steps; ++step) {
        const int held = sequence.tokens(), what = random.between(0, 9);
        if (what < 6 && held < s.k.tokens() - 40)
            append(sequence, layers, s, held, random.between(0, 40));
        else if (what < 8)
            sequence.trim(random.between(held / 2, held));
        else if (what == 8)
            sequence = sequence.fork();
        else
            cache.requantize(sequence, {.key = random.between(0, C::key_table::size - 2),
                                        .value = random.between(0, C::value_table::size - 2),
                                        .first_layer = random.between(0, layers - 1),
                                        .last_token = held / 2,
                                        .new_pages = random.one_in(2)});
    }
    // Layers may differ in length.
    const int held = sequence.tokens(0);
    if (random.one_in(2)) sequence.append(0, s.k.slice(held, 5), s.v.slice(held, 5));
    return sequence;
}

template <class C>
kvq::cache_options options_for(test::generator& random, int layers) {
    auto options = test::random_options(random);
    options.page_tokens = random.pick(std::vector<int>{1, 4, 7, 8, 33});
    options.layers = test::rotate_formats<C>(layers);
    return options;
}

}  // namespace

TEST_CASE_TEMPLATE("a restored sequence is the saved one, now and later", C, test::kivi_cache,
                   test::mixed_cache, test::custom_cache, test::rotated_cache, test::bounded_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 12; ++round) {
        const auto shape = test::random_cache_shape(random, C::key_table::size, 10);
        const auto options = options_for<C>(random, shape.layers);
        auto cache = test::make_cache<C>(shape, options), other = test::make_cache<C>(shape, options);
        test::stream s(random, shape, 500);
        // Some of it no numbers, so that there is something to count.
        for (auto* x : {&s.k, &s.v})
            for (float& value : x->values())
                if (random.one_in(200)) value = random.pick(test::hostile_values());
        auto sequence = random_history(random, cache, s, random.between(0, 12));

        const auto file = saved(sequence, {.model = "some model"});
        test::memory_source pieces{file, static_cast<std::size_t>(random.between(1, 100))};
        auto copy = kvq::restore(other, pieces, {.model = "some model"});
        test::require_same(cache, sequence, other, copy);
        // A cache with the same formats for every layer has nothing to convert, unless pages were
        // requantized.
        const bool as_listed = [&] {
            for (const auto& table : kvq::detail::sequence_access::tables(sequence))
                for (int role = 0; role < 2; ++role)
                    for (int i = options.sinks > 0 ? 1 : 0; i < table.committed; ++i)
                        if (table[i].pages[role]->format != table.targets[role]) return false;
            return true;
        }();
        auto fresh = other.new_sequence();
        bool same_targets = true;
        for (std::size_t layer = 0; layer < static_cast<std::size_t>(shape.layers); ++layer)
            for (std::size_t role = 0; role < 2; ++role)
                same_targets =
                    same_targets && kvq::detail::sequence_access::tables(sequence)[layer].targets[role] ==
                                        kvq::detail::sequence_access::tables(fresh)[layer].targets[role];
        if (as_listed && same_targets)
            test::require_same(cache, sequence, other, restored(other, file, {.convert = true}));

        for (int step = 0; step < 8; ++step) {
            const int what = random.between(0, 3);
            const int n = what == 0 ? random.between(0, sequence.tokens()) : random.between(0, 20);
            for (auto* one : {&sequence, &copy}) {
                if (what == 0)
                    one->trim(n);
                else if (one->tokens() < 450)
                    append(*one, shape.layers, s, one->tokens(), n);
            }
            test::require_same(cache, sequence, other, copy);
        }
    }
}

TEST_CASE("the file does not depend on what was trimmed, nor on how pages are shared") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 2, .head_dim = 8, .value_dim = 4};
    test::kivi_cache cache(shape, {.sinks = 3, .recent = 6, .page_tokens = 8, .rollback = 1000});
    const test::stream s(random, shape, 100), drafts(random, shape, 100);
    auto plain = cache.new_sequence();
    append(plain, 2, s, 0, 2);
    auto drafted = plain.fork();
    for (int held = 2; held < 60; held += 3) {
        CHECK(saved(plain) == saved(drafted));
        const int k = random.between(0, 9);
        append(drafted, 2, drafts, held, k);
        drafted.trim(held);
        CHECK(saved(plain) == saved(drafted));
        append(drafted, 2, s, held, 3);
        append(plain, 2, s, held, 3);
    }
}

TEST_CASE_TEMPLATE("without 16-bit copies all is the same but trims into pages that are quantized", C,
                   test::kivi_cache, test::mixed_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(6); ++round) {
        const auto shape = test::random_cache_shape(random, random.between(1, 3), 20);
        auto options = test::random_options(random);
        options.page_tokens = random.pick(std::vector<int>{8, 16, 33});
        // The page of token n - 1, below, is quantized and has copies, and would not be quantized at n.
        options.recent = random.between(1, 8);
        options.rollback = options.recent + options.page_tokens + random.between(0, 20);
        options.repack = 0.0f;  // codes stay
        options.layers = test::rotate_formats<C>(shape.layers);
        auto cache = test::make_cache<C>(shape, options);
        const test::stream s(random, shape, 300);
        const int held = random.between(70, 150);
        auto sequence = cache.new_sequence();
        append(sequence, shape.layers, s, 0, held);
        const auto u = sequence.usage();
        REQUIRE(u.rollback > 0);
        const test::file_bytes whole = saved(sequence), without = saved(sequence, {.copies = false});
        CHECK(kvq::saved_bytes(sequence) == whole.size());
        CHECK(kvq::saved_bytes(sequence, {.copies = false}) == without.size());
        CHECK(without.size() < whole.size());
        CHECK(saved(sequence) == whole);
        auto a = restored(cache, whole), b = restored(cache, without);
        CHECK(saved(b) == without);
        CHECK(b.usage().rollback == 0);
        CHECK(b.usage().quantized == u.quantized);
        // Later tokens: the same pages, and copies of those that are quantized from now on.
        auto later_a = a.fork(), later_b = b.fork();
        append(later_a, shape.layers, s, held, 100);
        append(later_b, shape.layers, s, held, 100);
        CHECK(saved(later_a) == saved(later_b));
        // A trim within `rollback`: exact with copies; without, the tokens keep their codes.
        const int n = held - options.rollback;
        auto exact = cache.new_sequence();
        append(exact, shape.layers, s, 0, n);
        for (int layer = 0; layer < shape.layers; ++layer)
            for (const kvq::tensor role : {kvq::tensor::key, kvq::tensor::value}) {
                test::tensor<float> before(n, shape.kv_heads, shape.dim(role)),
                    after(n, shape.kv_heads, shape.dim(role));
                b.dequantize(layer, role, 0, before.view());
                auto cut = b.fork();
                cut.trim(n);
                cut.dequantize(layer, role, 0, after.view());
                CHECK(after.values() == before.values());
            }
        a.trim(n);
        b.trim(n);
        CHECK(saved(a, {.copies = false}) == saved(exact, {.copies = false}));
        CHECK(saved(b, {.copies = false}) != saved(exact, {.copies = false}));
        CHECK(b.usage().quantized > exact.usage().quantized);
    }
}

TEST_CASE_TEMPLATE("no memory, no budget: the cache is as it was", C, test::mixed_cache) {
    test::generator random(test::seed());
    test::counting_resource memory;
    const kvq::cache_shape shape{.layers = 3, .kv_heads = 1, .head_dim = 6};
    kvq::cache_options options{.sinks = 2, .recent = 6, .page_tokens = 4, .rollback = 5};
    options.layers = test::rotate_formats<C>(3);
    auto source = test::make_cache<C>(shape, options);
    const test::stream s(random, shape, 60);
    auto sequence = source.new_sequence();
    append(sequence, 3, s, 0, 50);
    const auto file = saved(sequence);

    options.memory = &memory;
    auto other_layers = options, other_pages = options;
    other_layers.layers = test::rotate_formats<C>(3, 1);
    other_pages.page_tokens = 5;
    for (const auto& o : {options, other_layers, other_pages}) {
        auto cache = test::make_cache<C>(shape, o);
        auto held = cache.new_sequence();
        append(held, 3, s, 0, 20);
        const std::size_t in_use = cache.bytes_in_use(), bytes = memory.bytes(), blocks = memory.blocks();
        int failures = 0;
        for (bool failed = true; failed; ++failures) {
            REQUIRE(failures < 10000);
            memory.arm(failures);
            failed = false;
            try {
                auto copy = restored(cache, file, {.convert = true});
            } catch (const std::bad_alloc&) {
                failed = true;
            }
            memory.arm(test::counting_resource::never);
            REQUIRE(cache.bytes_in_use() == in_use);
            REQUIRE(memory.bytes() == bytes);
            REQUIRE(memory.blocks() == blocks);
        }
        CHECK(failures > 50);
        // Saving takes memory only for a page that is not full.
        for (int i = 0; i < 20; ++i) {
            memory.arm(i);
            bool failed = false;
            try {
                saved(held);
            } catch (const std::bad_alloc&) {
                failed = true;
            }
            memory.arm(test::counting_resource::never);
            REQUIRE(memory.bytes() == bytes);
            if (!failed) break;
            REQUIRE(i < 19);
        }
    }
    auto measured = test::make_cache<C>(shape, options);
    std::size_t needed = 0;
    {
        auto copy = restored(measured, file);
        needed = measured.bytes_in_use();
    }
    CHECK(measured.bytes_in_use() == 0);
    options.byte_budget = needed;
    auto enough = test::make_cache<C>(shape, options);
    { CHECK(restored(enough, file).tokens(0) == 50); }
    options.byte_budget = needed - 1;
    auto little = test::make_cache<C>(shape, options);
    CHECK_THROWS_AS(restored(little, file), kvq::out_of_memory);
    CHECK(little.bytes_in_use() == 0);
}

TEST_CASE("files: written beside their place, refused when they go on, missing or in the way") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 8};
    test::int8_cache cache(shape, {.recent = 4, .page_tokens = 8});
    const test::stream s(random, shape, 40);
    auto sequence = cache.new_sequence();
    append(sequence, 1, s, 0, 30);
    const std::string path = "kvq_test_save_restore.safetensors";
    const auto exists = [](const std::string& name) {
        std::FILE* const f = std::fopen(name.c_str(), "rb");
        if (f) std::fclose(f);
        return f != nullptr;
    };
    kvq::save(sequence, path, {.model = "m"});
    CHECK(!exists(path + ".tmp"));
    test::require_same(cache, sequence, cache, kvq::restore(cache, path));
    // Over an old file, and one that cannot be written leaves the old one.
    sequence.trim(20);
    kvq::save(sequence, path);
    test::require_same(cache, sequence, cache, kvq::restore(cache, path));
    CHECK_THROWS_AS(kvq::save(sequence, path, {.model = "\xff"}), kvq::error);
    CHECK(!exists(path + ".tmp"));
    test::require_same(cache, sequence, cache, kvq::restore(cache, path));

    const std::size_t in_use = cache.bytes_in_use();
    std::FILE* const f = std::fopen(path.c_str(), "ab");
    std::fputc(0, f);
    std::fclose(f);
    CHECK(test::contains(message_of([&] { (void)kvq::restore(cache, path); }), "has data after"));
    CHECK(std::remove(path.c_str()) == 0);
    CHECK(test::contains(message_of([&] { (void)kvq::restore(cache, path); }), "cannot open"));
    CHECK(test::contains(message_of([&] { kvq::save(sequence, "no/such/folder/file"); }), "cannot open"));
    const std::string folder = message_of([&] { (void)kvq::restore(cache, "."); });  // Windows opens none
    CHECK((test::contains(folder, "cannot read .: ") || test::contains(folder, "cannot open .: ")));
    CHECK(cache.bytes_in_use() == in_use);
}

}  // namespace save_restore_tests
