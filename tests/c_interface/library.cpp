// SPDX-License-Identifier: MIT
// kvq/library.hpp against the headers: the same calls, the same bytes, outputs and errors. Functions of kvq.h are called through library.hpp alone,
// each of them (library_calls.cmake).
#include <doctest/doctest.h>
#include <kvq/library.hpp>

#include <algorithm>
#include <cstring>
#include <kvq/core/thread_pool.hpp>
#include <kvq/format/find_format.hpp>
#include <kvq/kvq.hpp>
#include <kvq/policy/prefix_cache.hpp>
#include <kvq/policy/ring.hpp>
#include <kvq/policy/self_calibration.hpp>
#include <memory_resource>
#include <string>
#include <thread>
#include <vector>

#include "c_interface/same_pages.hpp"
#include "support/random.hpp"

namespace library_tests {

namespace {

namespace library = kvq::library;
constexpr int layers = 2, kv_heads = 2, q_heads = 4, dim = 32;
using bytes = std::vector<std::byte>;

struct rows {
    int tokens, heads;
    std::vector<float> x;

    rows(int n, int h) : tokens(n), heads(h), x(static_cast<std::size_t>(n * h * dim)) {}
    rows(test::generator& random, int n, int h) : rows(n, h) { x = random.normals(n * h * dim); }
    kvq_tensor in() const { return library::input(x.data(), tokens, heads, dim); }
    kvq_tensor out() { return library::output(x.data(), tokens, heads, dim); }
    kvq::token_view<float> view() { return {x.data(), tokens, heads, dim}; }
};

/// Keys and values of n tokens, queries, and outputs of both sides.
struct chunk {
    rows k, v, q, out, same;

    chunk(test::generator& random, int n, int m)
        : k(random, n, kv_heads),
          v(random, n, kv_heads),
          q(random, m, q_heads),
          out(m, q_heads),
          same(m, q_heads) {}
    explicit chunk(test::generator& random, int n = 1) : chunk(random, n, n) {}
};

/// Rotates by nothing else than kvq does with base 5000.
kvq::rotary_embedding rotary() {
    kvq::rotary_embedding r;
    r.dims = dim;
    r.base = 5000.0;
    return r;
}

/// A cache and a sequence of each side, with the same contents.
struct twins {
    library::cache cache;
    library::sequence sequence;
    kvq::cache same_cache;
    kvq::sequence same;

    explicit twins(kvq_allocator* memory = nullptr, std::size_t budget = 0)
        : cache(options(memory, budget)),
          sequence(cache.new_sequence()),
          same_cache({layers, kv_heads, dim}, same_options(budget)),
          same(same_cache.new_sequence()) {}

    static kvq_cache_options options(kvq_allocator* memory, std::size_t budget) {
        static const kvq_rotary rotated{dim, 0, KVQ_HALF_SPLIT, 0, 5000.0, nullptr, nullptr, nullptr};
        library::cache_options o;
        o.layers = layers, o.kv_heads = kv_heads, o.head_dim = dim;
        o.keys = "std4, low2, int8", o.values = "kivi-4-g64,low2,int8";
        o.page_tokens = 64, o.byte_budget = budget;
        o.rotary = &rotated, o.rotary_count = 1;
        o.allocator = memory;
        return o;
    }
    static kvq::cache_options same_options(std::size_t budget) {
        kvq::cache_options o = kvq::preset_options();
        for (const char* name : {"std4", "low2", "int8"})
            o.keys.push_back(kvq::find_format(name, kvq::tensor::key));
        for (const char* name : {"kivi-4-g64", "low2", "int8"})
            o.values.push_back(kvq::find_format(name, kvq::tensor::value));
        o.page_tokens = 64;
        if (budget > 0) o.byte_budget = budget;
        o.rotary = {rotary()};
        return o;
    }

    void append(test::generator& random, int n) {
        for (int layer = 0; layer < layers; ++layer) {
            chunk c(random, n);
            sequence.append(layer, c.k.in(), c.v.in());
            same.append(layer, c.k.view(), c.v.view());
        }
    }
    void check_equal() const { check_equal(sequence, same); }
    static void check_equal(const library::sequence& a, const kvq::sequence& b) {
        for (int layer = 0; layer < layers; ++layer) {
            const kvq::layer_pages pages = b.pages(layer);
            std::vector<kvq_page> held(static_cast<std::size_t>(a.pages(layer, {})));
            CHECK(a.pages(layer, held) == pages.entries());
            test::check_same_pages(held, pages);
        }
        CHECK(a.usage().bytes == b.usage().bytes);
        CHECK(a.tokens() == b.tokens());
    }
};

/// Memory that can end, and counts what is held.
class bounded_memory : public std::pmr::memory_resource {
public:
    std::size_t held = 0, most = SIZE_MAX;

private:
    void* do_allocate(std::size_t n, std::size_t alignment) override {
        if (n > most - held) throw std::bad_alloc();
        void* const p = std::pmr::new_delete_resource()->allocate(n, alignment);
        held += n;
        return p;
    }
    void do_deallocate(void* p, std::size_t n, std::size_t alignment) override {
        held -= n;
        std::pmr::new_delete_resource()->deallocate(p, n, alignment);
    }
    bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
        return this == &other;
    }
};

/// Both statements raise kvq::error with one message.
#define SAME_ERROR(a, b)                \
    do {                                \
        std::string first, second;      \
        try {                           \
            a;                          \
        } catch (const kvq::error& e) { \
            first = e.what();           \
        }                               \
        try {                           \
            b;                          \
        } catch (const kvq::error& e) { \
            second = e.what();          \
        }                               \
        CHECK(first != "");             \
        CHECK(first == second);         \
    } while (false)

/// The status and the message of what a call raises.
template <class F>
std::string raised(F&& f) {
    try {
        f();
    } catch (const kvq::library_error& e) {
        return library::status_name(e.status()) + std::string(", ") + e.what();
    } catch (const kvq::out_of_memory& e) {
        return e.what();
    }
    return "nothing";
}

template <class T>
constexpr bool only_moves = std::is_nothrow_move_constructible_v<T>&& std::is_nothrow_move_assignable_v<T> &&
                            !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T>;
static_assert(only_moves<library::cache> && only_moves<library::sequence> && only_moves<library::format> &&
              only_moves<library::statistics> && only_moves<library::executor> &&
              only_moves<library::workspace> && only_moves<library::receiver> &&
              only_moves<library::prefix_cache> && only_moves<library::ring>);

}  // namespace

TEST_CASE("prefill in chunks and decode steps, on threads of the engine, of kvq and of the headers") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    twins both;
    int calls = 0;
    auto own_threads = [&](int n, auto task) {
        ++calls;
        std::vector<std::thread> all;
        for (int i = 0; i < n; ++i) all.emplace_back(task, i);
        for (std::thread& t : all) t.join();
    };
    kvq::thread_pool pool(2);
    library::executor executors[] = {library::executor(3, own_threads), library::executor(2),
                                     library::executor(pool)};
    library::workspace workspace;
    for (const int n : {100, 100, 77, 1, 1, 1, 30, 1, 1}) {
        library::attend_options o;
        o.executor = executors[static_cast<std::size_t>(n) % 3].get();
        o.workspace = workspace.get();
        for (int layer = 0; layer < layers; ++layer) {
            chunk c(random, n);
            std::vector<float> lse(static_cast<std::size_t>(n * q_heads)), same_lse(lse.size());
            o.lse = lse.data();
            kvq::workspace space;
            both.sequence.prefill(layer, c.k.in(), c.v.in(), c.q.in(), c.out.out(), o);
            both.same.prefill(layer, c.k.view(), c.v.view(), c.q.view(),
                              kvq::output_view(c.same.view()).with_lse(same_lse.data()), kvq::causal{},
                              kvq::serial_executor{}, space);
            CHECK(c.out.x == c.same.x);
            CHECK(lse == same_lse);
        }
    }
    CHECK(calls > 0);
    CHECK(workspace.bytes() > 0);
    both.check_equal();
    CHECK(both.sequence.tokens(1) == 312);
}

TEST_CASE("masks and score modifiers are lambdas, or the types of the headers") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    twins both;
    both.append(random, 300);
    struct third {
        bool mask(int q_pos, int k_pos) const { return (q_pos - k_pos) % 3 != 1; }
    };
    struct raised_heads {
        float score(float s, int q_head, int, int k_pos) const {
            return s + 0.01f * static_cast<float>(q_head * (k_pos % 7));
        }
    };
    struct all_rows {
        void mask_row(float* scores, int n, int q_pos, int first_k) const {
            for (int i = 0; i < n; ++i)
                if (first_k + i < 64 || !third{}.mask(q_pos, first_k + i)) scores[i] = kvq::hidden_score;
        }
        mutable int pages = 0;
        kvq::page_visibility mask_page(int, int, int, int end_k) const {
            ++pages;
            return end_k <= 64 ? kvq::page_visibility::none : kvq::page_visibility::some;
        }
        void score_row(float* s, int n, int q_head, int q_pos, int first_k) const {
            for (int i = 0; i < n; ++i) s[i] = raised_heads{}.score(s[i], q_head, q_pos, first_k + i);
        }
    };
    const auto check = [&](const library::mods& mods, const kvq::mods_view& same) {
        chunk c(random, 1, 40);
        kvq::workspace space;
        library::attend_options o;
        o.mods = &mods;
        both.sequence.attend(1, c.q.in(), c.out.out(), o);
        both.same.attend(1, c.q.view(), c.same.view(), same, kvq::serial_executor{}, space);
        CHECK(c.out.x == c.same.x);
    };
    const auto mask = [](int query, int key) { return third{}.mask(query, key); };
    const auto score = [](float s, int head, int query, int key) {
        return raised_heads{}.score(s, head, query, key);
    };
    check(library::mods().use(mask), third{});
    check(library::mods().use(score), raised_heads{});
    const third masking;
    const all_rows in_rows;
    const kvq::softcap cap{2.0f};
    check(library::mods().use(masking), third{});
    check(library::mods().use(in_rows), all_rows{});
    CHECK(in_rows.pages > 0);
    check(library::mods().use(cap), cap);
    library::mods m;
    m.window = 50, m.softcap = 2.0f;
    check(m.use(mask), kvq::mods{cap, kvq::sliding_window{50}, third{}});
    check(m.use(in_rows), kvq::mods{cap, kvq::sliding_window{50}, all_rows{}});
}

TEST_CASE("batches of a reserved step, with memory of a std::pmr::memory_resource that ends") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    bounded_memory resource;
    library::allocator memory(resource);
    {
        twins both(&memory);
        library::sequence other = both.cache.new_sequence();
        kvq::sequence same_other = both.same_cache.new_sequence();
        library::workspace workspace(0, &memory);
        library::attend_options o;
        o.workspace = workspace.get();
        for (const int n : {150, 1, 20}) {
            const kvq_step_request steps[] = {{both.sequence.get(), n, n, nullptr},
                                              {other.get(), 1, 1, nullptr}};
            both.cache.reserve(steps, q_heads, o);
            resource.most = resource.held;  // from here on nothing can be allocated
            for (int layer = 0; layer < layers; ++layer) {
                chunk a(random, n), b(random);
                const kvq_prefill_request batch[] = {
                    {both.sequence.get(), a.k.in(), a.v.in(), a.q.in(), a.out.out(), nullptr, nullptr},
                    {other.get(), b.k.in(), b.v.in(), b.q.in(), b.out.out(), nullptr, nullptr}};
                both.cache.prefill(layer, batch, o);
                both.same.prefill(layer, a.k.view(), a.v.view(), a.q.view(), a.same.view());
                same_other.prefill(layer, b.k.view(), b.v.view(), b.q.view(), b.same.view());
                CHECK(a.out.x == a.same.x);
                CHECK(b.out.x == b.same.x);
                const kvq_attend_request again[] = {{other.get(), b.q.in(), b.out.out(), nullptr, nullptr}};
                both.cache.attend(layer, again, o);
                same_other.attend(layer, b.q.view(), b.same.view());
                CHECK(b.out.x == b.same.x);
            }
            const kvq_step_request many[] = {{both.sequence.get(), 200, 1, nullptr},
                                             {other.get(), 1, 1, nullptr}};
            CHECK(raised([&] { both.cache.reserve(many, q_heads, o); }) == "kvq: out of memory");
            CHECK_THROWS_AS(both.append(random, 200), kvq::out_of_memory);
            CHECK_THROWS_AS(both.append(random, 200), kvq::error);
            CHECK_THROWS_AS(both.append(random, 200), std::exception);
            resource.most = SIZE_MAX;
            both.cache.reserve(many, q_heads, o);
            CHECK(both.sequence.usage().reserved > 0);
            both.sequence.release_reserved();
            CHECK(both.sequence.usage().reserved == 0);
            other.release_reserved();
        }
        both.check_equal();
        twins::check_equal(other, same_other);
        workspace.reserve(100000);
        CHECK(workspace.bytes() >= 100000);
        CHECK(both.cache.workspace_bytes(500, q_heads, 3, 2) ==
              both.same_cache.attention_workspace(500, q_heads, 3, 2));
    }
    CHECK(resource.held == 0);
}

TEST_CASE("trim, fork, erase, shift, splice, drafts, requantizing with a dry run, stepping down, estimates") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    twins both;
    both.append(random, 360);
    CHECK(both.sequence.usage().rollback > 0);
    both.sequence.drop_copies();
    both.same.drop_copies();
    CHECK(both.sequence.usage().rollback == 0);
    both.append(random, 40);
    both.sequence.trim(333);
    both.same.trim(333);
    library::sequence fork = both.sequence.fork();
    kvq::sequence same_fork = both.same.fork();
    both.append(random, 70);
    both.sequence.erase(100, 150);
    both.same.erase(100, 150);
    both.sequence.shift(0, 200, 17);
    both.same.shift(0, 200, 17);
    both.sequence.splice(fork, 10, 300);
    both.same.splice(same_fork, 10, 300);
    both.check_equal();
    twins::check_equal(fork, same_fork);

    for (int layer = 0; layer < layers; ++layer) {
        chunk c(random, 5);
        both.sequence.append_draft(layer, c.k.in(), c.v.in());
        both.same.append_draft(layer, c.k.view(), c.v.view());
    }
    const std::int32_t path[] = {0, 2};
    both.sequence.keep(path);
    both.same.keep(path);
    both.check_equal();
    CHECK(both.sequence.append_bytes(50) == both.same.append_bytes(50));
    CHECK(both.sequence.prefill_bytes(50) == both.same.prefill_bytes(50));
    CHECK(both.sequence.draft_bytes(9) == both.same.draft_bytes(9));

    kvq_sequence* const list[] = {both.sequence.get(), fork.get()};
    kvq::sequence* const same_list[] = {&both.same, &same_fork};
    library::requantize_request request;
    request.keys = "int8", request.values = "low2";
    request.last_layer = 1;
    request.dry_run = 1;
    const kvq_requantize_report planned = both.cache.requantize(list, request);
    both.check_equal();
    request.dry_run = 0;
    const kvq_requantize_report done = both.cache.requantize(list, request);
    kvq::workspace space;
    const auto same_done = both.same_cache.requantize(same_list, {.key = 2, .value = 1, .last_layer = 1}, {},
                                                      kvq::serial_executor{}, space);
    CHECK(planned.pages > 0);
    CHECK(planned.pages == done.pages);
    CHECK(planned.bytes_after == done.bytes_after);
    CHECK(done.pages == same_done.pages);
    CHECK(done.bytes_after == same_done.bytes_after);
    CHECK(done.bytes_peak == same_done.bytes_peak);
    both.check_equal();

    const kvq_tier tiers[] = {{0, 0, "int8", "int8"}, {100, 0, "low2", "low2"}};
    library::step_down_policy policy;
    policy.tiers = tiers, policy.tier_count = 2;
    policy.last_layers_kept = 1;
    const kvq_step_down_report down = both.cache.step_down(list, policy);
    const kvq::step_down_policy same_policy{.tiers = {{0, {2, 2}}, {100, {1, 1}}}, .last_layers_kept = 1};
    const auto same_down = kvq::step_down(both.same_cache, same_list, same_policy);
    CHECK(down.pages > 0);
    CHECK(down.bytes_after == same_down.bytes_after);
    both.check_equal();

    library::footprint_query query;
    query.sequences = 3, query.q_heads = q_heads, query.policy = &policy;
    const kvq_footprint bytes_of = both.cache.footprint(1000, query);
    CHECK(bytes_of.total ==
          kvq::footprint(both.same_cache, 1000, 3, {.q_heads = q_heads}, same_policy).total);
    CHECK(both.cache.longest_context(bytes_of.total, query) ==
          kvq::longest_context(both.same_cache, bytes_of.total, 3, {.q_heads = q_heads}, same_policy));
    CHECK(both.cache.footprint(1000).total > 0);
    library::budget_query asked;
    asked.tokens = 500, asked.chunk = 64;
    CHECK(library::cache::budget(twins::options(nullptr, 1), asked) ==
          kvq::budget(twins::same_options(1), both.same_cache.shape(), {.tokens = 500, .chunk = 64}));

    chunk c(random, 30);
    both.sequence.dequantize(1, KVQ_KEY, 40, c.k.out());
    chunk same_c(random, 30);
    both.same.dequantize(1, kvq::tensor::key, 40, same_c.k.view());
    CHECK(c.k.x == same_c.k.x);
}

TEST_CASE("keys that a lambda rotates") {
    test::generator random(3);
    int calls = 0;
    const auto turn = [&](float* row, int head_dim, std::int64_t by) {
        ++calls;
        for (int i = 0; i < head_dim; ++i) row[i] += static_cast<float>(by);
    };
    const kvq_rotary rotated = library::rotated_by(turn);
    auto o = twins::options(nullptr, 0);
    o.keys = "fp32", o.values = nullptr, o.window = "fp32", o.rotary = &rotated;
    library::cache cache(o);
    library::sequence s = cache.new_sequence();
    chunk c(random, 10);
    for (int layer = 0; layer < layers; ++layer) s.append(layer, c.k.in(), c.v.in());
    s.shift(0, 10, 3);
    rows moved(10, kv_heads);
    s.dequantize(0, KVQ_KEY, 0, moved.out());
    CHECK(calls > 0);
    for (std::size_t i = 0; i < moved.x.size(); ++i) CHECK(moved.x[i] == c.k.x[i] + 3.0f);

    std::vector<double> frequencies(32);
    library::rotary_llama3(frequencies, 5e5, 8.0, 1.0, 4.0, 8192.0);
    CHECK(frequencies == kvq::llama3_frequencies(64, 5e5, {}));
    library::rotary_yarn(frequencies, 1e4, 4.0, 4096.0, 32.0, 1.0);
    CHECK(frequencies == kvq::yarn_frequencies(64, 1e4, {.factor = 4.0}));
}

TEST_CASE("saved and restored, sent page by page; what a stream throws is thrown on") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    twins both;
    both.append(random, 350);
    bytes saved;
    const auto write = [&](const void* data, std::size_t n) {
        const auto* const first = static_cast<const std::byte*>(data);
        saved.insert(saved.end(), first, first + n);
    };
    std::size_t at = 0;
    const auto read = [&](void* to, std::size_t n) {
        n = std::min(n, saved.size() - at);
        std::memcpy(to, saved.data() + at, n);
        at += n;
        return n;
    };
    struct stop {
        int number;
    };
    const auto number = [](auto&& f) {
        try {
            f();
        } catch (const stop& s) {
            return s.number;
        }
        return 0;
    };
    try {
        both.sequence.save(write);
    } catch (const kvq::library_error& e) {
        CHECK(e.status() == KVQ_ERROR_UNSUPPORTED);  // without nlohmann-json
    }
    if (!saved.empty()) {
        twins::check_equal(both.cache.restore(read), both.same);
        library::save_options options;
        options.model = "another";
        at = 0;
        CHECK(raised([&] { both.cache.restore(read, options); }).find("KVQ_ERROR_DATA, kvq: ") == 0);
        CHECK(number([&] { both.sequence.save([](const void*, std::size_t) { throw stop{7}; }); }) == 7);
        CHECK(number([&] { both.cache.restore([](void*, std::size_t) -> std::size_t { throw stop{8}; }); }) ==
              8);
        const auto refuses = [](const void*, std::size_t) { return false; };
        CHECK(raised([&] { both.sequence.save(refuses, {}); }).find("KVQ_ERROR_CALLBACK, kvq: ") == 0);
        const std::string path = "library_test.safetensors";
        both.sequence.save_file(path.c_str());
        twins::check_equal(both.cache.restore_file(path.c_str()), both.same);
        std::remove(path.c_str());
    }

    library::receiver receiver(both.cache);
    for (int layer = layers - 1; layer >= 0; --layer)
        both.sequence.send_pages(layer, [&](const void* data, std::size_t n) {
            receiver.accept({static_cast<const std::byte*>(data), n});
        });
    twins::check_equal(receiver.finish(350), both.same);
    CHECK(number([&] { both.sequence.send_pages(0, [](const void*, std::size_t) { throw stop{9}; }); }) == 9);
}

TEST_CASE("stored by token ids, kept in a ring") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    twins both;
    both.append(random, 350);
    library::prefix_cache_options limits;
    limits.min_prefix_tokens = KVQ_NONE;
    library::prefix_cache store(both.cache, limits);
    std::vector<std::int32_t> ids(350);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i * i % 1000);
    CHECK(store.store(ids, both.sequence) == KVQ_STORED);
    CHECK(store.store(ids, both.sequence) == KVQ_STORE_DUPLICATE);
    auto [match, tokens, sequence] = store.fetch(ids);
    CHECK(match == KVQ_MATCH_EXACT);
    CHECK(tokens == 350);
    twins::check_equal(sequence, both.same);
    ids[200] = -5;
    CHECK(store.lookup(ids).match == KVQ_MATCH_LCP);
    CHECK(store.lookup(ids).tokens == 200);
    CHECK(!store.erase(ids));
    const kvq_tier tier{0, 0, "low2", "low2"};
    library::step_down_policy policy;
    policy.tiers = &tier, policy.tier_count = 1;
    CHECK(store.step_down({}, policy).pages > 0);
    CHECK(store.release_bytes(1) > 0);
    CHECK(store.statistics().fetches[KVQ_MATCH_EXACT] == 1);
    CHECK(store.statistics().entries == 0);
    store.clear();

    library::ring_options window;
    window.window = 100;
    library::ring ring(both.cache.new_sequence(), window);
    kvq::ring same(both.same_cache.new_sequence(), {.window = 100});
    for (const int n : {60, 60, 60, 60, 60, 60, 60, 60, 1, 1})
        for (int layer = 0; layer < layers; ++layer) {
            chunk c(random, n);
            ring.prefill(layer, c.k.in(), c.v.in(), c.q.in(), c.out.out());
            same.prefill(layer, c.k.view(), c.v.view(), c.q.view(), c.same.view());
            CHECK(c.out.x == c.same.x);
            ring.attend(layer, c.q.in(), c.out.out());
            same.attend(layer, c.q.view(), c.same.view());
            CHECK(c.out.x == c.same.x);
        }
    ring.trim(480);
    same.trim(480);
    for (int layer = 0; layer < layers; ++layer) {
        chunk c(random, 3);
        ring.append(layer, c.k.in(), c.v.in());
        same.append(layer, c.k.view(), c.v.view());
    }
    for (int layer = 0; layer < layers; ++layer) {
        chunk c(random, 3);
        ring.append_draft(layer, c.k.in(), c.v.in());
        same.held().append_draft(layer, c.k.view(), c.v.view());
    }
    const std::int32_t path[] = {1};
    ring.keep(path);
    same.held().keep(path);
    CHECK(ring.tokens().tokens == 484);
    CHECK(ring.tokens(0).first_token == same.first_token());
    twins::check_equal(ring.held(), same.held());
    twins::check_equal(ring.fork().held(), same.held());
}

TEST_CASE(
    "formats by name, from statistics, in memory of the engine, and those that a cache is given later") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    bool listed = false;
    for (std::int32_t i = 0; i < library::format_count(); ++i)
        listed = listed || std::strcmp(library::format_at(i).name, "std4") == 0;
    CHECK(listed);
    const library::format four("kivi-4-g32", KVQ_KEY);
    const kvq::format same_four = kvq::find_format("kivi-4-g32", kvq::tensor::key);
    CHECK(std::string(four.describe(KVQ_KEY, 64, 128).name) == same_four.name());
    CHECK(four.describe(KVQ_KEY, 64, 128).block_bytes == same_four.block_bytes({kvq::tensor::key, 64, 128}));

    library::statistics statistics(layers, kv_heads, dim, true);
    kvq::calibration same_statistics({layers, kv_heads, dim}, true);
    twins both;
    both.append(random, 300);
    for (int layer = 0; layer < layers; ++layer) {
        chunk c(random, 128);
        statistics.add_keys(layer, c.k.in());
        statistics.add_queries(layer, c.q.in());
        same_statistics.add_keys(layer, c.k.view());
        same_statistics.add_queries(layer, c.q.view());
        kvq::add_keys(same_statistics, both.same_cache, both.same, layer, 10, 200);
    }
    statistics.add_sequence(both.sequence.get(), 10, 200);
    bytes saved;
    const auto write = [&](const void* data, std::size_t n) {
        const auto* const first = static_cast<const std::byte*>(data);
        saved.insert(saved.end(), first, first + n);
    };
    statistics.save(write);
    CHECK(saved == same_statistics.save());
    const library::statistics loaded = library::statistics::load(saved);

    const library::format low2("low2", KVQ_KEY, loaded.get());
    both.cache.add_format(KVQ_KEY, low2, "made");
    both.cache.add_format(KVQ_KEY, four);
    const int made = both.same_cache.add_format(kvq::tensor::key,
                                                kvq::find_format("low2", kvq::tensor::key, same_statistics));
    const int four_index = both.same_cache.add_format(kvq::tensor::key, same_four);
    CHECK(both.cache.find_format(KVQ_KEY, "kivi-4-g32") == four_index + 1);  // 0 is the window format
    library::requantize_request request;
    request.keys = "made";
    kvq_sequence* const one[] = {both.sequence.get()};
    both.cache.requantize(one, request);
    both.same_cache.requantize(both.same, {.key = made});
    both.check_equal();
    both.cache.commit_to(KVQ_KEY, "kivi-4-g32", 1);
    both.same_cache.commit_to(kvq::tensor::key, four_index, 1, layers);
    both.sequence = both.cache.new_sequence();
    both.same = both.same_cache.new_sequence();
    both.append(random, 300);
    both.check_equal();

    // The first page behind the sinks, written by the engine; and attention over a copy of it.
    std::vector<kvq_page> pages(static_cast<std::size_t>(both.sequence.pages(1, {})));
    both.sequence.pages(1, pages);
    const kvq_page& page = pages[1];
    const library::format of_page = both.cache.get_format(KVQ_KEY, page.key_format);
    const kvq_page_shape shape{KVQ_KEY, page.key_capacity, kv_heads, dim, 1, 0};
    const library::format::bytes size = of_page.page_bytes(shape);
    std::vector<std::max_align_t> copy(size.page / sizeof(std::max_align_t) + 1);
    const std::span<std::byte> copied(reinterpret_cast<std::byte*>(copy.data()), size.page);
    std::memcpy(copied.data(), page.keys, size.page);
    struct alignas(64) line {
        std::byte of[64];
    };
    std::vector<line> scratch(size.workspace / 64 + 1);
    const std::span<std::byte> workspace(scratch[0].of, size.workspace);
    rows held(page.tokens, kv_heads), read(page.tokens, kv_heads);
    both.sequence.dequantize(1, KVQ_KEY, 4, held.out());
    of_page.dequantize(shape, copied, read.out(), workspace);
    CHECK(read.x == held.x);
    held.x[5] = NAN;
    CHECK(of_page.quantize(shape, held.in(), copied, workspace) == 1);
    std::memcpy(copied.data(), page.keys, size.page);
    pages[1].keys = copied.data();
    chunk c(random, 1);
    both.cache.attend_pages(1, pages, c.q.in(), c.out.out());
    both.same.attend(1, c.q.view(), c.same.view());
    CHECK(c.out.x == c.same.x);
}

TEST_CASE("errors carry the status and the message of the library, which are those of the headers") {
    test::generator random(1);
    twins both(nullptr, 20000);
    both.append(random, 10);
    SAME_ERROR(both.sequence.trim(11), both.same.trim(11));
    SAME_ERROR(both.sequence.erase(5, 12), both.same.erase(5, 12));
    const auto too_much = [&](auto append) -> std::string {
        try {
            append();
        } catch (const kvq::out_of_memory& e) {
            return e.what();
        }
        return "";
    };
    const rows many(random, 400, kv_heads);
    rows same_many = many;
    const std::string message = too_much([&] { both.sequence.append(0, many.in(), many.in()); });
    CHECK(message.find("of a budget of 20000 bytes are in use") != std::string::npos);
    CHECK(message == too_much([&] { both.same.append(0, same_many.view(), same_many.view()); }));
    both.check_equal();

    CHECK(raised([&] { both.sequence.trim(11); }) ==
          "KVQ_ERROR_ARGUMENT, kvq: cannot trim to 11 tokens: the sequence holds 10");
    CHECK(raised([] { library::format f("std44", KVQ_KEY); }).find("std4") != std::string::npos);
    library::cache_options o;
    o.keys = "int8";
    CHECK(raised([&] { library::cache c(o); }).find("KVQ_ERROR_ARGUMENT, kvq: ") == 0);
    const std::int32_t one = 0;
    CHECK_THROWS_WITH_AS(both.sequence.keep(std::span(&one, std::size_t{1} << 31)),
                         "kvq: a list of 2147483648 entries is longer than 2147483647", kvq::error);
    library::requantize_request unknown;
    unknown.keys = "nothing";
    CHECK(raised([&] { both.cache.requantize({}, unknown); }).find("nothing") != std::string::npos);
    twins other;
    CHECK(raised([&] { both.sequence.splice(other.sequence, 0, 0); }).find("KVQ_ERROR_HANDLE, kvq: ") == 0);

    const auto stops = [](int, auto) { throw 1; };
    const library::executor fails(2, stops);
    library::attend_options options;
    options.executor = fails.get();
    chunk c(random, 1, 10);
    CHECK(raised([&] { both.sequence.attend(0, c.q.in(), c.out.out(), options); }) ==
          "KVQ_ERROR_CALLBACK, kvq: parallel_for returned 1");
    CHECK(library::abi_version() == KVQ_ABI_VERSION);
    CHECK(library::version() == std::to_string(KVQ_VERSION_MAJOR) + "." + std::to_string(KVQ_VERSION_MINOR) +
                                    "." + std::to_string(KVQ_VERSION_PATCH));
}

TEST_CASE("options as designated initializers: functions set the size") {
// The members that are not named are zero.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
    library::cache cache({.layers = layers, .kv_heads = kv_heads, .head_dim = dim, .keys = "std4"});
    library::sequence s = cache.new_sequence();
    test::generator random(1);
    chunk c(random, 10);
    library::mods window;
    window.window = 3;
    s.prefill(0, c.k.in(), c.v.in(), c.q.in(), c.out.out(), {.mods = &window});
    kvq::cache same_cache({layers, kv_heads, dim}, kvq::preset("std4"));
    kvq::sequence same = same_cache.new_sequence();
    kvq::workspace space;
    same.prefill(0, c.k.view(), c.v.view(), c.q.view(), c.same.view(), kvq::sliding_window{3},
                 kvq::serial_executor{}, space);
    CHECK(c.out.x == c.same.x);
    CHECK(cache.info().recent == 32);
#pragma GCC diagnostic pop
}

TEST_CASE("objects that were moved from hold nothing, and are refused") {
    test::generator random(1);
    twins both;
    both.append(random, 200);
    const auto in_use = [&] { return both.cache.info().pages_in_use; };
    library::sequence a = both.sequence.fork();
    library::sequence b = std::move(a);
    CHECK(!a);
    CHECK(a.get() == nullptr);
    CHECK(b.tokens() == 200);
    CHECK(raised([&] { a.trim(0); }) == "KVQ_ERROR_HANDLE, kvq: sequence is NULL");
    CHECK(raised([&] { both.sequence.splice(a, 0, 0); }).find("KVQ_ERROR_HANDLE") == 0);
    a = std::move(b);
    CHECK(a.tokens() == 200);
    library::sequence& itself = a;
    a = std::move(itself);
    CHECK(a.tokens() == 200);
    // An assignment frees what the target held.
    both.sequence = both.cache.new_sequence();
    CHECK(in_use() > 0);
    a = both.cache.new_sequence();
    CHECK(in_use() == 0);
    // A cache stays until its last sequence ends; a handle goes to C and comes back.
    library::cache moved = std::move(both.cache);
    CHECK(raised([&] { both.cache.new_sequence(); }).find("KVQ_ERROR_HANDLE") == 0);
    library::sequence last = moved.new_sequence();
    moved = library::cache(nullptr);
    last.append(0, chunk(random).k.in(), chunk(random).v.in());
    kvq_sequence* const raw = last.release();
    last = library::sequence(raw);
    CHECK(last.tokens(0) == 1);
}

}  // namespace library_tests
