// SPDX-License-Identifier: MIT
// Bad input: kvq::error, one sentence with the numbers, and nothing changed.
#include <doctest/doctest.h>

#include <atomic>
#include <functional>
#include <kvq/core/thread_pool.hpp>
#include <limits>
#include <memory>

#include "support/caches.hpp"
#include "support/memory.hpp"
#include "support/messages.hpp"

using kvq::token_view;

namespace errors_tests {

namespace {

/// One sentence that names the library and contains all of the given parts.
void check_message(const std::function<void()>& f, const std::vector<std::string>& parts) {
    const std::string message = test::message_of(f);
    INFO(message);
    CHECK(message.starts_with("kvq: "));
    CHECK(message.find('\n') == std::string::npos);
    for (const std::string& part : parts) {
        INFO("lacks ", part);
        CHECK(message.find(part) != std::string::npos);
    }
}

using cache_type = test::typed_cache<test::formats<kvq::int8, kvq::affine<4>>>;
void make(const kvq::cache_shape& shape, const kvq::cache_options& options = {}) {
    cache_type cache(shape, options);
}

/// Blocks have to be a multiple of 16 bytes; these are not.
struct ragged_blocks {
    static std::string name() { return "ragged"; }
    static std::size_t block_bytes(kvq::block_shape) { return 24; }
    static std::uint32_t quantize(kvq::block_shape, kvq::block_id, float*, std::byte*) { return 0; }
    static void dequantize(kvq::block_shape, kvq::block_id, const std::byte*, float*) {}
};

/// A pool of threads that grows.
struct growing_executor {
    int asked = 0;
    int concurrency() { return ++asked; }
    void parallel_for(int n, const auto& f) {
        CHECK(n == 1);
        for (int i = 0; i < n; ++i) f(i);
    }
};

}  // namespace

TEST_CASE("a cache of impossible shape or options is not made") {
    check_message([] { make({.layers = 0, .kv_heads = 1, .head_dim = 8}); }, {"layer", "0"});
    check_message([] { make({.layers = 1, .kv_heads = -3, .head_dim = 8}); }, {"kv head", "-3"});
    check_message([] { make({.layers = 1, .kv_heads = 1, .head_dim = 0}); }, {"head_dim", "0"});
    check_message([] { make({.layers = 1, .kv_heads = 1, .head_dim = 8, .value_dim = -1}); },
                  {"value_dim", "-1"});
    constexpr int too_large = std::numeric_limits<int>::max();
    check_message([] { make({.layers = 1, .kv_heads = 1, .head_dim = too_large}); },
                  {"head_dim", "2147483647"});
    check_message([] { make({.layers = 1, .kv_heads = too_large, .head_dim = 8}); },
                  {"kv head", "2147483647"});
    const kvq::cache_shape good{.layers = 2, .kv_heads = 1, .head_dim = 8};
    make(good);
    check_message([&] { make(good, {.sinks = -1}); }, {"sinks", "-1"});
    check_message([&] { make(good, {.recent = -2}); }, {"recent", "-2"});
    check_message([&] { make(good, {.rollback = -5}); }, {"rollback", "-5"});
    constexpr int huge = std::numeric_limits<int>::max();
    check_message([&] { make(good, {.sinks = 4, .recent = huge}); }, {"recent", "2147483647"});
    check_message([&] { make(good, {.rollback = huge}); }, {"rollback", "2147483647"});
    check_message([&] { make(good, {.page_tokens = 0}); }, {"page_tokens", "0"});
    check_message([&] { make(good, {.page_tokens = 65537}); }, {"page_tokens", "65537", "65536"});
    // Tokens times channels are counted with int.
    const kvq::cache_shape wide{.layers = 1, .kv_heads = 1, .head_dim = 1 << 20, .value_dim = 8};
    const kvq::cache_shape wide_values{.layers = 1, .kv_heads = 1, .head_dim = 8, .value_dim = 1 << 20};
    make(wide, {.page_tokens = 256});
    for (const kvq::cache_shape& shape : {wide, wide_values}) {
        check_message([&] { make(shape, {.page_tokens = 257}); },
                      {"257 tokens x 1048576 channels", "268435456"});
        check_message([&] { make(shape, {.page_tokens = 65536}); }, {"65536 tokens x 1048576 channels"});
        check_message([&] { make(shape, {.sinks = 500000000, .page_tokens = 128}); },
                      {"500000000 tokens x ", " channels is too large"});
    }
    check_message([&] { make(good, {.memory = nullptr}); }, {"memory resource"});
    check_message([&] { make(good, {.layers = {{}, {}, {}}}); }, {"3 layers", "2"});
    check_message([&] { make(good, {.layers = {{.key = 2}, {}}}); }, {"key format 2", "2 listed"});
    check_message([&] { make(good, {.layers = {{}, {.value = -1}}}); }, {"value format -1", "2 listed"});
    check_message([&] { test::typed_cache<ragged_blocks, ragged_blocks, test::usual> c(good); },
                  {"key format 0", "24 bytes"});
}

TEST_CASE("the largest numbers that are allowed do not overflow") {
    constexpr int most = std::numeric_limits<int>::max();
    const cache_type cache({.layers = 1, .kv_heads = 1, .head_dim = 8}, {.page_tokens = 4});
    // One state for every key split of 2048 tokens: 2^20, 2^19, 2^18 of them.
    const auto workspace = [&](int tokens) { return cache.attention_workspace(tokens, 1); };
    const std::size_t quarter = workspace(1 << 29), half = workspace(1 << 30);
    CHECK(half - quarter >= (std::size_t{1} << 18) * 8 * sizeof(float));
    CHECK(workspace(most - 4) - half == 2 * (half - quarter));
    CHECK(cache.attention_workspace(100, 1, most) == cache.attention_workspace(100, 1, most / 2));

    // The last page of a sequence that takes no more tokens, in the longest window.
    const kvq::page_geometry g{0, most / 4, 4};
    const kvq::page_span last{most - 8, 4, 4, {}, {}};
    CHECK(!kvq::detail::page_table::is_due(last, most - 4, g));
    CHECK(kvq::detail::page_table::keeps_copies(last, most - 4, g, most / 4));

    const std::vector<kvq::token_range> ranges{{0, 4}};
    const int starts[] = {0, 1};
    CHECK(kvq::token_ranges{ranges, starts, 5}.of(5).size() == 1);
    for (const int first_query : {most, 5 - most, -most - 1})
        CHECK(kvq::token_ranges{ranges, starts, first_query}.of(5).empty());
}

TEST_CASE("append refuses what does not fit, and changes nothing") {
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 2, .head_dim = 8, .value_dim = 6};
    cache_type cache(shape, {.recent = 3, .page_tokens = 8});
    test::generator random(1);
    const test::stream s(random, shape, 20);
    auto sequence = cache.new_sequence();
    test::append(sequence, 2, s, 0, 20);
    const auto held = test::contents(cache, sequence, true);
    const auto in_use = cache.bytes_in_use();

    std::vector<float> data(4096);
    const auto view = [&](int tokens, int heads, int dim) {
        return token_view<const float>(data.data(), tokens, heads, dim);
    };
    check_message([&] { sequence.append(2, view(1, 2, 8), view(1, 2, 6)); }, {"layer 2", "2 layers"});
    check_message([&] { sequence.append(-1, view(1, 2, 8), view(1, 2, 6)); }, {"layer -1"});
    check_message([&] { sequence.append(0, view(1, 3, 8), view(1, 2, 6)); }, {"k is 3 heads x 8", "2 x 8"});
    check_message([&] { sequence.append(0, view(1, 2, 7), view(1, 2, 6)); }, {"k is 2 heads x 7", "2 x 8"});
    check_message([&] { sequence.append(0, view(1, 2, 8), view(1, 2, 8)); }, {"v is 2 heads x 8", "2 x 6"});
    check_message([&] { sequence.append(0, view(2, 2, 8), view(3, 2, 6)); }, {"k has 2 tokens", "v has 3"});
    check_message([&] { sequence.append(0, view(-4, 2, 8), view(-4, 2, 6)); }, {"-4 tokens"});
    const token_view<const float> nothing(nullptr, 5, 2, 8);
    check_message([&] { sequence.append(0, nothing, view(5, 2, 6)); }, {"no data", "5 tokens"});
    check_message([&] { sequence.append(0, view(2147483640, 2, 8), view(2147483640, 2, 6)); },
                  {"20", "2147483640"});

    CHECK(test::contents(cache, sequence, true) == held);
    CHECK(cache.bytes_in_use() == in_use);
    CHECK(sequence.tokens() == 20);
}

TEST_CASE("attend, trim and dequantize refuse what does not fit, and write nothing") {
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 2, .head_dim = 8, .value_dim = 6};
    cache_type cache(shape, {.recent = 3, .page_tokens = 8});
    test::generator random(1);
    const test::stream s(random, shape, 20);
    auto sequence = cache.new_sequence();
    sequence.append(0, s.k.view(), s.v.view());
    const auto held = test::contents(cache, sequence, true);

    const std::vector<float> from(4096);
    std::vector<float> to(4096, -1.0f);
    const auto q = [&](int tokens, int heads, int dim) {
        return token_view<const float>(from.data(), tokens, heads, dim);
    };
    const auto out = [&](int tokens, int heads, int dim) {
        return token_view<float>(to.data(), tokens, heads, dim);
    };
    check_message([&] { sequence.attend(2, q(1, 4, 8), out(1, 4, 6)); }, {"layer 2", "2 layers"});
    check_message([&] { sequence.attend(0, q(1, 3, 8), out(1, 3, 6)); }, {"3 heads", "2 kv heads"});
    check_message([&] { sequence.attend(0, q(1, 0, 8), out(1, 0, 6)); }, {"0 heads"});
    check_message([&] { sequence.attend(0, q(1, 4, 9), out(1, 4, 6)); }, {"head_dim 9", "8"});
    check_message([&] { sequence.attend(0, q(1, 4, 8), out(1, 4, 8)); }, {"1 x 4 x 8", "1 x 4 x 6"});
    check_message([&] { sequence.attend(0, q(2, 4, 8), out(1, 4, 6)); }, {"1 x 4 x 6", "2 x 4 x 6"});
    check_message([&] { sequence.attend(0, q(21, 4, 8), out(21, 4, 6)); }, {"21 tokens", "20"});
    check_message([&] { sequence.attend(1, q(1, 4, 8), out(1, 4, 6)); }, {"1 tokens", "layer 1", "0"});
    check_message([&] { sequence.trim(21); }, {"21", "20"});
    check_message([&] { sequence.trim(-1); }, {"-1", "20"});
    check_message([&] { (void)sequence.tokens(7); }, {"layer 7"});
    check_message([&] { sequence.dequantize(0, kvq::tensor::key, 15, out(6, 2, 8)); },
                  {"6 tokens from 15", "20"});
    check_message([&] { sequence.dequantize(0, kvq::tensor::key, 2147483647, out(1, 2, 8)); },
                  {"2147483647", "20"});
    check_message([&] { (void)cache.attention_workspace(20, 3); }, {"3 query heads", "2 kv heads"});
    check_message([&] { (void)cache.attention_workspace(20, 0); }, {"0 query heads"});
    check_message([&] { (void)cache.attention_workspace(-5, 4); }, {"-5 tokens"});
    check_message([&] { (void)cache.attention_workspace(20, 4, 2147483647); }, {"2147483647 query tokens"});
    check_message([&] { (void)cache.attention_workspace(20, 4, 1, 0); }, {"0 threads"});
    check_message([&] { sequence.dequantize(0, kvq::tensor::key, -1, out(2, 2, 8)); }, {"-1"});
    check_message([&] { sequence.dequantize(0, kvq::tensor::value, 0, out(2, 2, 8)); }, {"2 x 8", "2 x 6"});
    check_message([&] { sequence.dequantize(3, kvq::tensor::value, 0, out(2, 2, 6)); }, {"layer 3"});
    const token_view<const float> no_q(nullptr, 1, 4, 8);
    const token_view<float> nowhere(nullptr, 1, 4, 6), no_keys(nullptr, 1, 2, 8);
    check_message([&] { sequence.attend(0, no_q, out(1, 4, 6)); }, {"q", "no data", "1 tokens"});
    check_message([&] { sequence.attend(0, q(1, 4, 8), nowhere); }, {"out", "no data", "1 tokens"});
    check_message([&] { sequence.dequantize(0, kvq::tensor::key, 0, no_keys); },
                  {"out", "no data", "1 tokens"});
    check_message([&] { (void)sequence.pages(2); }, {"layer 2", "2 layers"});
    check_message([] { const kvq::thread_pool pool(0); }, {"thread", "0"});

    CHECK(std::vector<float>(4096, -1.0f) == to);
    CHECK(test::contents(cache, sequence, true) == held);

    const auto other = std::move(sequence);
    check_message([&] { sequence.append(0, s.k.view(), s.v.view()); }, {"layer 0", "0 layers"});
    check_message([&] { sequence.attend(0, q(1, 4, 8), out(1, 4, 6)); }, {"layer 0", "0 layers"});
    CHECK(test::contents(cache, other, true) == held);
}

TEST_CASE(
    "attention takes as many threads as its workspace was sized for, whatever the executor says later") {
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 8};
    cache_type cache(shape, {.recent = 3, .page_tokens = 8});
    test::generator random(1);
    const test::stream s(random, shape, 20);
    auto sequence = cache.new_sequence();
    sequence.append(0, s.k.view(), s.v.view());
    kvq::workspace space;
    const std::vector<float> q(32);
    std::vector<float> out(32);
    sequence.attend(0, token_view<const float>(q.data(), 1, 4, 8), token_view<float>(out.data(), 1, 4, 8),
                    kvq::causal{}, growing_executor{}, space);
}

TEST_CASE("numbers that make no sense are refused, whoever is asked") {
    constexpr int most = std::numeric_limits<int>::max();
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 2, .head_dim = 8};
    cache_type cache(shape, {.page_tokens = 8});
    test::generator random(1);
    const test::stream s(random, shape, 20);
    auto sequence = cache.new_sequence();
    test::append(sequence, 2, s, 0, 20);
    const std::vector<float> q(16, 1.0f);
    std::vector<float> out(16, 7.0f);
    const token_view<const float> one(q.data(), 1, 2, 8);
    const token_view<float> to(out.data(), 1, 2, 8);
    for (const int window : {0, -5, std::numeric_limits<int>::min()}) {
        check_message([&] { sequence.attend(0, one, to, kvq::sliding_window{window}); },
                      {"window", std::to_string(window)});
        check_message(
            [&] {
                sequence.attend(0, one, to, kvq::mods{kvq::softcap{3}, kvq::sliding_window{window}});
            },
            {"window", std::to_string(window)});
    }
    check_message([&] { sequence.attend(0, one, to, kvq::sink_window{0, 2}); }, {"window", "0 and 2"});
    check_message([&] { sequence.attend(0, one, to, kvq::sink_window{4, -1}); }, {"window", "4 and -1"});
    const auto refused = [&](const auto& mods, const std::vector<std::string>& parts) {
        check_message([&] { sequence.attend(0, one, to, mods); }, parts);
        check_message([&] { sequence.attend(0, one, to, kvq::mods{kvq::causal{}, mods}); }, parts);
        kvq::workspace space;
        const auto k = s.k.slice(0, 1), v = s.v.slice(0, 1);
        check_message([&] { sequence.prefill(0, k, v, one, to, mods, kvq::serial_executor{}, space); },
                      parts);
        CHECK(sequence.tokens(0) == 20);
    };
    const std::vector<float> three(3, 0.5f);
    refused(kvq::alibi{three}, {"3 slopes", "2 query heads"});
    refused(kvq::learned_sinks{three}, {"3 learned sinks", "2 query heads"});
    refused(kvq::prefix_lm{-1}, {"prefix", "-1"});
    const std::vector<int> late{1, 4}, falling{0, 7, 5};
    refused(kvq::document_mask{}, {"at least one document"});
    refused(kvq::document_mask{late}, {"starts at 0, not at 1"});
    refused(kvq::document_mask{falling}, {"document 2 starts at 5", "document 1 at 7"});
    const std::vector<float> many(21 * 16, 1.0f);
    std::vector<float> outs(21 * 16, 7.0f);
    check_message(
        [&] {
            sequence.attend(0, token_view<const float>(many.data(), 21, 2, 8),
                            token_view<float>(outs.data(), 21, 2, 8), kvq::bidirectional{});
        },
        {"21 tokens", "holds 20"});
    CHECK(out == std::vector<float>(16, 7.0f));
    check_message([&] { (void)cache.attention_workspace(most, 2); }, {"2147483647 tokens"});
    check_message([&] { (void)kvq::footprint(cache, most - 8, most); }, {"2147483647 sequences"});
    const kvq::format int8 = test::made<test::usual>(kvq::int8{});
    check_message([&] { (void)kvq::bytes_per_token(shape, 0, int8, int8); }, {"page", "0"});
    check_message([&] { (void)kvq::bits_per_value<kvq::int8>({kvq::tensor::key, 0, 16}); }, {"0 tokens"});
}

TEST_CASE("out_of_memory is a bad_alloc that says how much was wanted, used and allowed") {
    test::typed_cache<kvq::int8> cache({.layers = 1, .kv_heads = 1, .head_dim = 8},
                                       {.page_tokens = 64, .byte_budget = 1000});
    auto sequence = cache.new_sequence();
    const std::vector<float> data(8);
    const token_view<const float> x(data.data(), 1, 1, 8);
    std::string message;
    try {
        sequence.append(0, x, x);
    } catch (const std::bad_alloc& e) {
        message = e.what();
    }
    INFO(message);
    CHECK(message.find(std::to_string(32 * 8 * 2 + 64)) != std::string::npos);
    CHECK(message.find("1000") != std::string::npos);
    CHECK(sequence.tokens() == 0);
    CHECK(cache.bytes_in_use() == 0);
}

TEST_CASE(
    "one handler of kvq::error takes a bad argument and a budget that is used up, as do their standard "
    "handlers") {
    test::typed_cache<kvq::int8> cache({.layers = 1, .kv_heads = 1, .head_dim = 8},
                                       {.page_tokens = 64, .byte_budget = 1000});
    auto sequence = cache.new_sequence();
    const std::vector<float> data(8);
    const token_view<const float> x(data.data(), 1, 1, 8);
    const auto no_room = [&] { sequence.append(0, x, x); };
    const auto no_layer = [&] { sequence.append(1, x, x); };
    const auto message = []<class Handler>(auto&& call, const Handler*) {
        std::string said;
        try {
            call();
        } catch (const Handler& e) {
            said = e.what();
        } catch (...) {
            said = "another handler";
        }
        return said;
    };
    constexpr const kvq::error* any = nullptr;
    constexpr const std::exception* standard = nullptr;
    const std::string budget = message(no_room, any), layer = message(no_layer, any);
    CHECK(budget.find("budget of 1000 bytes") != std::string::npos);
    CHECK(layer.find("layer 1") != std::string::npos);
    CHECK(message(no_room, standard) == budget);
    CHECK(message(no_layer, standard) == layer);
    CHECK(message(no_room, static_cast<const std::bad_alloc*>(nullptr)) == budget);
    CHECK(message(no_layer, static_cast<const std::bad_alloc*>(nullptr)) == "another handler");
    CHECK(message(no_layer, static_cast<const std::invalid_argument*>(nullptr)) == layer);
    CHECK(message(no_room, static_cast<const std::invalid_argument*>(nullptr)) == "another handler");
    // A copy has a message of its own.
    const auto copied = [&](auto&& call) {
        return [&] {
            try {
                call();
            } catch (const kvq::out_of_memory& e) {
                auto once = std::make_unique<kvq::out_of_memory>(e);
                const kvq::out_of_memory twice(*once);
                once.reset();
                throw twice;
            } catch (const kvq::argument_error& e) {
                auto once = std::make_unique<kvq::argument_error>(e);
                const kvq::argument_error twice(*once);
                once.reset();
                throw twice;
            }
        };
    };
    CHECK(message(copied(no_room), any) == budget);
    CHECK(message(copied(no_room), standard) == budget);
    CHECK(message(copied(no_layer), any) == layer);
    const auto arena = [] { throw kvq::out_of_memory(64, 10, 20, 8); };
    CHECK(message(arena, any).ends_with("the longest free range has 8"));
}

TEST_CASE("a sequence that is assigned takes along the memory resource of its cache") {
    test::counting_resource first;
    test::counting_resource second;
    const auto options = [](test::counting_resource& memory) {
        kvq::cache_options o;
        o.page_tokens = 8;
        o.memory = &memory;
        return o;
    };
    cache_type other({2, 1, 8}, options(second));
    const std::vector<float> x(64 * 8, 1.0f);
    const kvq::token_view<const float> tokens(x.data(), 64, 1, 8);
    {
        auto cache = std::make_unique<cache_type>(kvq::cache_shape{2, 1, 8}, options(first));
        auto sequence = cache->new_sequence();
        sequence.append(0, tokens, tokens);
        auto another = other.new_sequence();
        another.append(1, tokens, tokens);
        second.arm(0);  // nothing may be allocated: the operator is noexcept
        first.arm(0);
        sequence = std::move(another);
        second.arm(test::counting_resource::never);
        CHECK(first.bytes() == 0);
        cache.reset();
        CHECK(sequence.tokens(1) == 64);
        sequence.append(0, tokens, tokens);
        CHECK(sequence.tokens(0) == 64);
        auto& same = sequence;
        sequence = std::move(same);
        CHECK(sequence.tokens(0) == 64);
    }
    CHECK(first.bytes() == 0);
}

TEST_CASE("what a task throws reaches the caller, after all tasks have ended") {
    // Returns how many tasks came to their end.
    const auto run = [](const auto& executor, int failing) {
        std::atomic<int> ended{0};
        CHECK_THROWS_AS(executor.parallel_for(5,
                                              [&](int i) {
                                                  if (i % failing == 0) throw std::bad_alloc();
                                                  ++ended;
                                              }),
                        std::bad_alloc);
        return ended.load();
    };
    CHECK(run(kvq::thread_pool(3), 3) == 3);
    CHECK(run(kvq::thread_pool(3), 1) == 0);
    run(kvq::serial_executor{}, 2);
}

TEST_CASE("errors belong to the families that callers already catch") {
    static_assert(std::is_base_of_v<std::invalid_argument, kvq::argument_error>);
    static_assert(std::is_base_of_v<std::bad_alloc, kvq::out_of_memory>);
    // A second std::exception in a type would make handlers of std::exception miss it.
    static_assert(std::is_convertible_v<kvq::argument_error*, std::exception*>);
    static_assert(std::is_convertible_v<kvq::out_of_memory*, std::exception*>);
    static_assert(!std::is_base_of_v<std::exception, kvq::error> &&
                  !std::is_copy_constructible_v<kvq::error>);
    // What must not throw says so: sequences move into containers, pages are released in destructors.
    using sequence = cache_type::sequence_type;
    static_assert(std::is_nothrow_move_constructible_v<sequence> &&
                  std::is_nothrow_move_assignable_v<sequence>);
    static_assert(std::is_nothrow_destructible_v<sequence> && !std::is_copy_constructible_v<sequence>);
    static_assert(!std::is_copy_constructible_v<cache_type>);
}

}  // namespace errors_tests
