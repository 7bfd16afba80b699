// SPDX-License-Identifier: MIT
// Comparison family: exact. What goes through a block table or a slot mapping arrives as if it had never been
// in blocks.
#include <doctest/doctest.h>

#include <kvq/adapters/paged.hpp>
#include <limits>
#include <numeric>

#include "support/caches.hpp"
#include "support/memory.hpp"

namespace adapters_paged_tests {

namespace {

using kvq::paged_view;

/// Memory of an engine: K and V in one allocation, [2][blocks][...] or [blocks][2][...], in either order.
template <class T>
struct engine_memory {
    enum class placing { apart, side_by_side };
    std::vector<T> data;
    paged_view<T> keys, values;

    engine_memory(int blocks, int block_tokens, int heads, int dim, test::order order, placing place)
        : data(2 * static_cast<std::size_t>(blocks * block_tokens * heads * dim), T(-77.0f)) {
        const auto make = [&](T* at) {
            return order == test::order::nhd ? kvq::paged_nhd(at, blocks, block_tokens, heads, dim)
                                             : kvq::paged_hnd(at, blocks, block_tokens, heads, dim);
        };
        keys = make(data.data());
        const std::ptrdiff_t block = block_tokens * heads * dim;
        values = make(data.data() + (place == placing::apart ? blocks * block : block));
        if (place == placing::side_by_side) keys.block_stride = values.block_stride = 2 * block;
    }
    std::vector<float> numbers() const { return {data.begin(), data.end()}; }
};

template <class T>
void put(const paged_view<T>& pages, std::int64_t slot, const test::tensor<T>& from, int token) {
    for (int h = 0; h < pages.heads; ++h)
        for (int c = 0; c < pages.dim; ++c)
            // By the book: slot = block * block_tokens + offset.
            pages.block(static_cast<int>(slot / pages.block_tokens), pages.block_tokens)
                .at(static_cast<int>(slot % pages.block_tokens), h)[c] = from.view().at(token, h)[c];
}

std::vector<std::int32_t> shuffled_blocks(test::generator& random, int blocks) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(blocks));
    std::iota(order.begin(), order.end(), 0);
    for (std::size_t i = order.size(); i > 1; --i)
        std::swap(order[i - 1], order[static_cast<std::size_t>(random.between(0, static_cast<int>(i) - 1))]);
    return order;
}

}  // namespace

TEST_CASE("addresses are those of the dense layouts") {
    std::vector<int> memory(3 * 4 * 5 * 6);
    std::iota(memory.begin(), memory.end(), 0);
    const auto nhd = kvq::paged_nhd(memory.data(), 3, 4, 5, 6),
               hnd = kvq::paged_hnd(memory.data(), 3, 4, 5, 6);
    for (int b = 0; b < 3; ++b)
        for (int t = 0; t < 4; ++t)
            for (int h = 0; h < 5; ++h) {
                REQUIRE(*nhd.at(b * 4 + t, h) == ((b * 4 + t) * 5 + h) * 6);
                REQUIRE(*hnd.at(b * 4 + t, h) == ((b * 5 + h) * 4 + t) * 6);
                REQUIRE(*nhd.block(b, 4).at(t, h) == ((b * 4 + t) * 5 + h) * 6);
                REQUIRE(*hnd.block(b, 4).at(t, h) == ((b * 5 + h) * 4 + t) * 6);
            }
}

TEST_CASE_TEMPLATE("blocks to a sequence and back to slots: as if there had been no blocks", T, float,
                   kvq::float16, kvq::bfloat16) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    using cache_type = test::typed_cache<test::formats<kvq::full<T>, kvq::int8>,
                                         test::formats<kvq::full<T>, kvq::int8>, test::usual, T>;
    for (int round = 0; round < 40; ++round) {
        kvq::cache_shape shape{
            .layers = 2, .kv_heads = random.between(1, 3), .head_dim = random.between(1, 20)};
        auto options = test::random_options(random);
        if (random.one_in(2)) options.layers = {{1, 1}, {0, 1}};
        cache_type cache(shape, options);
        const int block_tokens = random.pick(std::vector<int>{1, 3, 16, 32});
        const int blocks = random.between(1, 12);
        const auto order = random.one_in(2) ? test::order::nhd : test::order::hnd;
        using memory_type = engine_memory<T>;
        const auto place =
            random.one_in(2) ? memory_type::placing::apart : memory_type::placing::side_by_side;
        memory_type engine(blocks, block_tokens, shape.kv_heads, shape.head_dim, order, place);
        const auto table = shuffled_blocks(random, blocks);
        const int tokens = random.between(0, blocks * block_tokens);
        const test::stream s(random, shape, tokens + 5);
        const auto k = test::converted<T>(s.k, test::order::nhd),
                   v = test::converted<T>(s.v, test::order::nhd);
        const auto slot_of = [&](int t) {
            return static_cast<std::int64_t>(table[static_cast<std::size_t>(t / block_tokens)]) *
                       block_tokens +
                   t % block_tokens;
        };
        for (int t = 0; t < tokens; ++t) {
            put(engine.keys, slot_of(t), k, t);
            put(engine.values, slot_of(t), v, t);
        }

        auto gathered = cache.new_sequence(), direct = cache.new_sequence();
        const int before = random.between(0, 5);
        gathered.append(1, k.slice(tokens, before), v.slice(tokens, before));
        direct.append(1, k.slice(tokens, before), v.slice(tokens, before));
        const paged_view<const T> read_only = engine.keys;
        if (random.one_in(2))
            kvq::append_from_blocks(gathered, 1, engine.keys, engine.values, std::span(table), tokens);
        else
            kvq::append_from_blocks(gathered, 1, read_only, paged_view<const T>(engine.values),
                                    std::span(table), tokens);
        direct.append(1, k.slice(0, tokens), v.slice(0, tokens));
        REQUIRE(test::contents(cache, gathered) == test::contents(cache, direct));

        // Back into other memory: exactly the slots that were asked for.
        const int held = before + tokens, first = random.between(0, held),
                  count = random.between(0, held - first);
        memory_type other(blocks + 1, block_tokens, shape.kv_heads, shape.head_dim,
                          random.one_in(2) ? test::order::nhd : test::order::hnd, place);
        memory_type expected = other;
        const auto shift = [&](paged_view<T> view) {
            view.data = expected.data.data() + (view.data - other.data.data());
            return view;
        };
        const auto free_blocks = shuffled_blocks(random, blocks + 1);
        std::vector<std::int64_t> mapping;
        for (int i = 0; i < count; ++i) {
            const int at = i % ((blocks + 1) * block_tokens);
            mapping.push_back(
                random.one_in(5)
                    ? -1
                    : static_cast<std::int64_t>(free_blocks[static_cast<std::size_t>(at / block_tokens)]) *
                              block_tokens +
                          at % block_tokens);
        }
        const auto exact_k = test::dequantized(direct, shape, 1, kvq::tensor::key);
        const auto exact_v = test::dequantized(direct, shape, 1, kvq::tensor::value);
        for (int i = 0; i < count; ++i) {
            const std::int64_t slot = mapping[static_cast<std::size_t>(i)];
            if (slot < 0) continue;
            put(shift(other.keys), slot, test::converted<T>(exact_k, test::order::nhd), first + i);
            put(shift(other.values), slot, test::converted<T>(exact_v, test::order::nhd), first + i);
        }
        // With 32-bit slots as with 64-bit ones.
        if (random.one_in(2)) {
            const std::vector<std::int32_t> narrow(mapping.begin(), mapping.end());
            kvq::write_slots(gathered, 1, first, std::span(narrow), other.keys, other.values);
        } else {
            kvq::write_slots(gathered, 1, first, std::span(mapping), other.keys, other.values);
        }
        REQUIRE(other.numbers() == expected.numbers());
    }
}

TEST_CASE("tables and mappings are checked as a whole before anything is written") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 4};
    test::typed_cache<kvq::full<float>, kvq::full<float>, test::usual, float> cache(shape,
                                                                                    {.page_tokens = 4});
    using memory_type = engine_memory<float>;
    memory_type engine(3, 4, 2, 4, test::order::nhd, memory_type::placing::apart);
    const auto untouched = engine.numbers();
    auto s = cache.new_sequence();
    const test::stream words(random, shape, 6);
    s.append(0, words.k.view(), words.v.view());
    const auto held = test::contents(cache, s, true);
    const std::size_t bytes = cache.bytes_in_use();

    const auto gather = [&](std::vector<std::int32_t> table, int tokens) {
        kvq::append_from_blocks(s, 0, engine.keys, engine.values, std::span<const std::int32_t>(table),
                                tokens);
    };
    CHECK_THROWS_WITH_AS(gather({0, 1}, 9),
                         doctest::Contains("9 tokens lie in 3 blocks of 4 but the table has 2"), kvq::error);
    CHECK_THROWS_WITH_AS(gather({0, 3}, 8),
                         doctest::Contains("entry 1 of the table is block 3, not one of 3"), kvq::error);
    CHECK_THROWS_WITH_AS(gather({0, -1}, 5), doctest::Contains("block -1"), kvq::error);
    CHECK_THROWS_AS(gather({0}, -1), kvq::error);
    constexpr int most = std::numeric_limits<int>::max();
    CHECK_THROWS_WITH_AS(
        gather({0}, most),
        doctest::Contains("2147483647 tokens lie in 536870912 blocks of 4 but the table has 1"), kvq::error);
    gather({2, -1, 99}, 0);  // entries that no token needs are not read
    CHECK(test::contents(cache, s, true) == held);
    CHECK(cache.bytes_in_use() == bytes);
    auto narrow = engine.values;
    narrow.dim = 3;
    const std::vector<std::int32_t> one{0};
    CHECK_THROWS_WITH_AS(kvq::append_from_blocks(s, 0, engine.keys, narrow, std::span(one), 1),
                         doctest::Contains("values are 2 heads x 3 channels"), kvq::error);
    auto fewer = engine.values;
    fewer.blocks = 2;
    CHECK_THROWS_WITH_AS(kvq::append_from_blocks(s, 0, engine.keys, fewer, std::span(one), 1),
                         doctest::Contains("but values 2 of 4"), kvq::error);
    for (const int tokens : {0, 1})
        CHECK_THROWS_WITH_AS(
            kvq::append_from_blocks(s, 1, engine.keys, engine.values, std::span(one), tokens),
            doctest::Contains("layer 1"), kvq::error);

    const auto scatter = [&](int first, std::vector<std::int64_t> mapping) {
        kvq::write_slots(s, 0, first, std::span<const std::int64_t>(mapping), engine.keys, engine.values);
    };
    CHECK_THROWS_WITH_AS(scatter(0, {0, 12}),
                         doctest::Contains("entry 1 of the mapping is slot 12, neither -1 nor one of 12"),
                         kvq::error);
    CHECK_THROWS_WITH_AS(scatter(0, {0, -2}), doctest::Contains("slot -2"), kvq::error);
    CHECK_THROWS_WITH_AS(scatter(5, {0, 1}),
                         doctest::Contains("cannot write 2 tokens from token 5 of layer 0: it holds 6"),
                         kvq::error);
    CHECK_THROWS_AS(scatter(-1, {0}), kvq::error);
    CHECK_THROWS_AS(scatter(7, {}), kvq::error);
    const auto scatter_narrow = [&](std::vector<std::int32_t> mapping) {
        kvq::write_slots(s, 0, 0, std::span<const std::int32_t>(mapping), engine.keys, engine.values);
    };
    CHECK_THROWS_WITH_AS(scatter_narrow({0, 12}), doctest::Contains("entry 1 of the mapping is slot 12"),
                         kvq::error);
    CHECK_THROWS_WITH_AS(scatter_narrow({-2}), doctest::Contains("slot -2"), kvq::error);
    CHECK(engine.numbers() == untouched);
    scatter(0, {-1, -1});
    CHECK(engine.numbers() == untouched);
    CHECK(test::contents(cache, s, true) == held);
}

TEST_CASE("more tokens than can be counted are refused before they are gathered") {
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1 << 16, .head_dim = 1 << 20};
    test::typed_cache<kvq::full<float>, kvq::full<float>, test::usual, float> cache(shape,
                                                                                    {.page_tokens = 1});
    auto s = cache.new_sequence();
    float one = 1.0f;
    // Every token of every block is the same memory; the bytes of all of them are 0 in 64 bits.
    const paged_view<float> x{&one, 2, 1 << 27, shape.kv_heads, shape.head_dim, 0, 0, 0};
    const std::vector<std::int32_t> table{1, 0};
    CHECK_THROWS_WITH_AS(kvq::append_from_blocks(s, 0, x, x, std::span(table), 1 << 28),
                         doctest::Contains("cannot gather 268435456 tokens x 65536 heads x 1048576 channels"),
                         kvq::error);
    CHECK(s.tokens() == 0);
}

TEST_CASE("when memory runs out in the middle of the blocks, the sequence is as it was") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 1, .head_dim = 8};
    test::counting_resource memory;
    test::typed_cache<kvq::int8> cache(shape, {.recent = 3, .page_tokens = 4, .memory = &memory});
    using memory_type = engine_memory<float>;
    const memory_type engine(6, 5, 1, 8, test::order::hnd, memory_type::placing::side_by_side);
    auto s = cache.new_sequence();
    const test::stream words(random, shape, 6);
    test::append(s, 2, words, 0, 6);
    const auto held = test::contents(cache, s, true);
    const std::size_t bytes = memory.bytes();
    const std::vector<std::int32_t> table{5, 0, 3, 3, 1};
    int failures = 0;
    for (bool done = false; !done; ++failures) {
        memory.arm(failures);
        try {
            kvq::append_from_blocks(s, 1, engine.keys, engine.values, std::span(table), 23);
            done = true;
        } catch (const std::bad_alloc&) {
            memory.arm(test::counting_resource::never);
            REQUIRE(test::contents(cache, s, true) == held);
            REQUIRE(memory.bytes() == bytes);
        }
    }
    CHECK(failures > 10);
    CHECK(s.tokens(1) == 29);
}

TEST_CASE(
    "what one layer takes from blocks costs no more than its own append, however long the other layers are") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 40; ++round) {
        const kvq::cache_shape shape{.layers = random.between(1, 6),
                                     .kv_heads = random.between(1, 3),
                                     .head_dim = random.between(1, 20)};
        test::counting_resource memory;
        auto options = test::random_options(random);
        options.memory = &memory;
        test::typed_cache<kvq::int8> cache(shape, options);
        const int block_tokens = random.pick(std::vector<int>{1, 3, 16}), blocks = 8;
        using memory_type = engine_memory<float>;
        memory_type engine(
            blocks, block_tokens, shape.kv_heads, shape.head_dim,
            random.one_in(2) ? test::order::nhd : test::order::hnd,
            random.one_in(2) ? memory_type::placing::apart : memory_type::placing::side_by_side);
        for (float& x : engine.data) x = random.normal();
        const int held = random.between(1, 200), tokens = random.between(1, blocks * block_tokens);
        const test::stream s(random, shape, held);
        auto gathered = cache.new_sequence(), direct = cache.new_sequence();
        test::append(gathered, shape.layers, s, 0, held);
        test::append(direct, shape.layers, s, 0, held);
        // In order, the blocks are read where they lie.
        auto table = shuffled_blocks(random, blocks);
        if (random.one_in(2)) std::iota(table.begin(), table.end(), 0);
        const int layer = random.between(0, shape.layers - 1);
        test::tensor<float> k(tokens, shape.kv_heads, shape.head_dim),
            v(tokens, shape.kv_heads, shape.head_dim);
        for (int t = 0; t < tokens; ++t)
            for (int h = 0; h < shape.kv_heads; ++h) {
                const auto block = static_cast<int>(table[static_cast<std::size_t>(t / block_tokens)]);
                const auto copy = [&](const paged_view<float>& from, auto& to) {
                    std::copy_n(from.block(block, block_tokens).at(t % block_tokens, h), shape.head_dim,
                                to.view().at(t, h));
                };
                copy(engine.keys, k);
                copy(engine.values, v);
            }
        memory.arm(test::counting_resource::never);
        direct.append(layer, k.view(), v.view());
        const int own = memory.allocations();
        memory.arm(test::counting_resource::never);
        kvq::append_from_blocks(gathered, layer, engine.keys, engine.values, std::span(table), tokens);
        CHECK(memory.allocations() <= own + 2);
        REQUIRE(test::contents(cache, gathered) == test::contents(cache, direct));
    }
}

}  // namespace adapters_paged_tests
