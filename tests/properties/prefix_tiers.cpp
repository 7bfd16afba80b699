// SPDX-License-Identifier: MIT
// Comparison family: exact. What memory evicts comes back from its file byte for byte; budgets hold; a
// damaged file is only a miss.
#include <doctest/doctest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <kvq/policy/prefix_tiers.hpp>
#include <map>

#include "support/caches.hpp"
#include "support/memory.hpp"
#include "support/messages.hpp"
#include "support/saved.hpp"

namespace prefix_tiers_tests {

namespace {

namespace fs = std::filesystem;
using ids = std::vector<kvq::token_id>;

struct folder {
    fs::path path =
        fs::temp_directory_path() / ("kvq-tiers-" + std::to_string(reinterpret_cast<std::uintptr_t>(this)) +
                                     "-" + std::to_string(std::rand()));
    folder() { fs::create_directory(path); }
    ~folder() { fs::remove_all(path); }
    /// Of all stores, each of which has a folder of its own here.
    std::vector<fs::path> files() const {
        std::vector<fs::path> list;
        for (const auto& f : fs::recursive_directory_iterator(path))
            if (!f.is_directory()) list.push_back(f.path());
        return list;
    }
    std::size_t bytes() const {
        std::size_t sum = 0;
        for (const auto& f : files()) sum += static_cast<std::size_t>(fs::file_size(f));
        return sum;
    }
};

constexpr kvq::cache_shape shape{.layers = 2, .kv_heads = 1, .head_dim = 32};

kvq::cache_options options() {
    static const kvq::format_pair f = kvq::make_formats<kvq::kivi<4, 32>, kvq::scalar>();
    return {.keys = f.keys, .values = f.values, .sinks = 4, .recent = 16, .page_tokens = 32};
}

/// Tokens of a prompt: `shared` common ones, then those of the prompt's number.
ids prompt(int number, int shared, int tokens) {
    ids t(static_cast<std::size_t>(tokens));
    for (int i = 0; i < tokens; ++i) t[static_cast<std::size_t>(i)] = i < shared ? i : 1000 * number + i;
    return t;
}

/// Appends the tokens behind those that the sequence has; K and V depend on the token and its position alone.
void fill(kvq::sequence& s, const ids& tokens) {
    for (auto t = static_cast<std::size_t>(s.tokens()); t < tokens.size(); ++t) {
        test::generator random(static_cast<std::uint64_t>(tokens[t]) * 100003 + t);
        const auto k = random.normals(32), v = random.normals(32);
        for (int layer = 0; layer < 2; ++layer) s.append(layer, {k.data(), 1, 1, 32}, {v.data(), 1, 1, 32});
    }
}

}  // namespace

TEST_CASE("entries leave memory for files and come back byte for byte") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    folder f;
    kvq::cache cache(shape, options());
    kvq::prefix_tiers store(cache, {.memory = {.byte_limit = 60000, .min_prefix_tokens = 8},
                                    .folder = f.path.string(),
                                    .file_bytes = 150000});
    std::vector<ids> asked;
    std::map<ids, test::file_bytes> bytes;  // of what was stored last
    std::size_t from_files = 0, exact = 0;
    for (int round = 0; round < 80; ++round) {
        const bool known = !asked.empty() && random.one_in(2);
        const ids t = known ? asked[random.bits() % asked.size()]
                            : prompt(round, random.between(0, 60), random.between(20, 300));
        const auto expected = store.lookup(t);
        auto [match, n, s, tier] = store.fetch(t);
        REQUIRE(s.tokens() == n);
        REQUIRE((expected.match == match && expected.tokens == n && expected.tier == tier));
        REQUIRE((tier == kvq::prefix_tier::none) == !kvq::is_hit(match));
        from_files += tier == kvq::prefix_tier::file;
        if (match == kvq::prefix_match::exact) {
            REQUIRE(test::saved(s) == bytes[t]);
            ++exact;
        } else {
            fill(s, t);
            if (!known) asked.push_back(t);
            bytes[t] = test::saved(s);
            REQUIRE(store.store(t, s) == kvq::store_outcome::stored);
        }
        const auto now = store.statistics();
        REQUIRE(store.memory().bytes() <= 60000);
        REQUIRE(now.file_bytes <= 150000);
        REQUIRE(now.file_bytes == f.bytes());
        REQUIRE(now.files == f.files().size());
        REQUIRE(now.failed == 0);
    }
    REQUIRE(from_files > 3);
    REQUIRE(exact > 3);
    REQUIRE(store.statistics().dropped > 0);
}

TEST_CASE("without a folder there are no files") {
    kvq::cache cache(shape, options());
    kvq::prefix_tiers store(cache, {.memory = {.min_prefix_tokens = 8}, .folder = ""});
    const ids t = prompt(1, 0, 200), other = prompt(2, 0, 200);
    for (const ids& x : {t, other}) {
        auto s = cache.new_sequence();
        fill(s, x);
        store.store(x, s);
    }
    REQUIRE(store.refresh(t));  // used behind the other one
    REQUIRE(!store.refresh(prompt(3, 0, 20)));
    REQUIRE(store.release(1) > 0);
    REQUIRE(store.lookup(t).tier == kvq::prefix_tier::memory);
    REQUIRE(!kvq::is_hit(store.fetch(other).match));
    REQUIRE((store.statistics().files == 0 && store.statistics().failed == 0));
}

TEST_CASE("a file that is damaged, cut or gone is a miss, and is dropped") {
    for (int kind = 0; kind < 3; ++kind) {
        folder f;
        kvq::cache cache(shape, options());
        {
            kvq::prefix_tiers store(cache, {.memory = {.min_prefix_tokens = 8}, .folder = f.path.string()});
            const ids t = prompt(1, 0, 200);
            auto s = cache.new_sequence();
            fill(s, t);
            store.store(t, s);
            REQUIRE(store.release(1) > 0);
            REQUIRE(f.files().size() == 1);
            const fs::path path = f.files()[0];
            if (kind == 0) {
                std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
                file.seekp(static_cast<std::streamoff>(fs::file_size(path) / 2));
                file.put('\x55').put('\x2a').put('\x55');
            }
            if (kind == 1) fs::resize_file(path, fs::file_size(path) - 100);
            if (kind == 2) fs::remove(path);
            const auto got = store.fetch(t);
            REQUIRE(!kvq::is_hit(got.match));
            REQUIRE(got.sequence.tokens() == 0);
            REQUIRE(store.statistics().failed == 1);
            REQUIRE(!store.statistics().last_failure.empty());
            REQUIRE(store.statistics().files == 0);
            // Then a second one works.
            store.store(t, s);
            store.release(1);
            REQUIRE(store.fetch(t).tier == kvq::prefix_tier::file);
        }
        REQUIRE(fs::is_empty(f.path));
    }
}

TEST_CASE("when the longest entry cannot be read, the next one is") {
    const ids big = prompt(1, 0, 600), begin(big.begin(), big.begin() + 100);
    ids branch = prompt(2, 0, 400);
    std::copy_n(big.begin(), 200, branch.begin());
    for (const bool damaged : {true, false}) {
        INFO(damaged);
        folder f;
        kvq::cache_options o = options();
        {
            kvq::cache whole(shape, o);
            auto s = whole.new_sequence();
            fill(s, big);
            o.byte_budget = whole.bytes_in_use() * 3 / 2;
        }
        kvq::cache cache(shape, o);
        kvq::prefix_tiers store(cache, {.memory = {.min_prefix_tokens = 8}, .folder = f.path.string()});
        std::vector<test::file_bytes> bytes;  // of what each has in common with the longest
        fs::path longest;
        for (const ids& tokens : {big, branch, begin}) {
            auto s = cache.new_sequence();
            fill(s, tokens);
            store.store(tokens, s);
            store.release(static_cast<std::size_t>(-1));
            if (longest.empty()) longest = f.files().at(0);
            if (tokens == branch) s.trim(200);
            bytes.push_back(test::saved(s));
        }
        REQUIRE(store.statistics().files == 3);
        if (damaged) {
            fs::resize_file(longest, fs::file_size(longest) - 100);
            const auto got = store.fetch(big);
            CHECK(got.match == kvq::prefix_match::lcp);
            CHECK(got.tier == kvq::prefix_tier::file);
            CHECK(got.tokens == 200);
            CHECK(test::saved(got.sequence) == bytes[1]);
            CHECK(store.statistics().failed == 1);
            CHECK(store.statistics().files == 2);
            continue;
        }
        {
            // Half of the longest has room: not the branch either, but the beginning.
            auto live = cache.new_sequence();
            fill(live, prompt(3, 0, 600));
            const auto got = store.fetch(big);
            CHECK(got.match == kvq::prefix_match::prefix);
            CHECK(got.tier == kvq::prefix_tier::file);
            CHECK(got.tokens == 100);
            CHECK(test::saved(got.sequence) == bytes[2]);
            CHECK(store.statistics().failed == 2);
            CHECK(store.statistics().files == 3);
        }
        const auto got = store.fetch(big);
        CHECK(got.match == kvq::prefix_match::exact);
        CHECK(test::saved(got.sequence) == bytes[0]);
    }
}

TEST_CASE("stores on one folder keep their files apart, and a file with other tokens is not served") {
    folder f;
    kvq::cache cache(shape, options());
    const kvq::prefix_tier_options o{.memory = {.min_prefix_tokens = 8}, .folder = f.path.string()};
    const fs::path victim = f.path / "victim";
    std::ofstream(victim) << "unchanged";
#if !defined(_WIN32)
    // Names that somebody may foretell.
    fs::create_symlink(victim, f.path / "prefix-0.safetensors.tmp");
    fs::create_symlink(victim, f.path / "prefix-0.safetensors");
#endif
    kvq::prefix_tiers a(cache, o);
    const ids ta = prompt(1, 0, 200), tb = prompt(2, 0, 200), tc = prompt(3, 0, 200);
    auto sa = cache.new_sequence(), sb = cache.new_sequence(), sc = cache.new_sequence();
    fill(sa, ta);
    fill(sb, tb);
    fill(sc, tc);
    const auto put = [](kvq::prefix_tiers& store, const ids& t, const kvq::sequence& s) {
        store.store(t, s);
        store.release(static_cast<std::size_t>(-1));
    };
    const auto has = [](kvq::prefix_tiers& store, const ids& t, const kvq::sequence& s) {
        const auto got = store.fetch(t);
        return got.tier == kvq::prefix_tier::file && test::saved(got.sequence) == test::saved(s);
    };
    {
        kvq::prefix_tiers b(cache, o);
        put(a, ta, sa);
        put(b, tb, sb);
        CHECK(has(a, ta, sa));
        CHECK(has(b, tb, sb));
    }
    a.release(static_cast<std::size_t>(-1));
    CHECK(has(a, ta, sa));
    std::string text;
    std::ifstream(victim) >> text;
    CHECK(text == "unchanged");

    // Two files of one store change places.
    a.release(static_cast<std::size_t>(-1));
    put(a, tc, sc);
    std::vector<fs::path> mine;
    for (const auto& path : f.files())
        if (path.parent_path() != f.path) mine.push_back(path);
    REQUIRE(mine.size() == 2);
#if !defined(_WIN32)
    CHECK((fs::status(mine[0].parent_path()).permissions() &
           (fs::perms::group_all | fs::perms::others_all)) == fs::perms::none);
#endif
    const fs::path between = f.path / "between";
    fs::rename(mine[0], between);
    fs::rename(mine[1], mine[0]);
    fs::rename(between, mine[1]);
    CHECK(a.fetch(ta).match == kvq::prefix_match::miss);
    CHECK(a.fetch(tc).match == kvq::prefix_match::miss);
    CHECK(a.statistics().failed == 2);
    CHECK(test::contains(a.statistics().last_failure, "200 tokens"));
}

TEST_CASE("memory makes room for an entry that comes from a file") {
    folder f;
    kvq::cache_options o = options();
    kvq::cache whole(shape, o);
    auto big = whole.new_sequence();
    fill(big, prompt(1, 0, 600));
    o.byte_budget = whole.bytes_in_use() * 3 / 2;
    kvq::cache cache(shape, o);
    kvq::prefix_tiers store(cache, {.memory = {.min_prefix_tokens = 8}, .folder = f.path.string()});
    for (int number : {1, 2, 1, 2}) {
        const ids t = prompt(number, 0, 600);
        auto [match, n, s, tier] = store.fetch(t);
        if (kvq::is_hit(match)) REQUIRE(tier == kvq::prefix_tier::file);
        if (n == 0) store.release(static_cast<std::size_t>(-1));
        fill(s, t);
        store.store(t, s);
    }
    REQUIRE(store.statistics().read == 2);
}

TEST_CASE("a file that memory has no room for stays, and memory serves what it has") {
    folder f;
    kvq::cache_options o = options();
    const ids big = prompt(1, 0, 600), begin(big.begin(), big.begin() + 100), foreign = prompt(2, 0, 600);
    {
        kvq::cache whole(shape, o);
        auto s = whole.new_sequence();
        fill(s, big);
        o.byte_budget = whole.bytes_in_use() * 3 / 2;
    }
    const auto all = static_cast<std::size_t>(-1);
    kvq::cache cache(shape, o);
    kvq::prefix_tiers store(cache, {.memory = {.min_prefix_tokens = 8}, .folder = f.path.string()});
    test::file_bytes bytes;
    {
        auto s = cache.new_sequence();
        fill(s, big);
        bytes = test::saved(s);
        store.store(big, s);
    }
    store.release(all);
    {
        auto live = cache.new_sequence();
        fill(live, foreign);
        {
            auto s = cache.new_sequence();
            fill(s, begin);
            store.store(begin, s);
        }
        // All that memory could release would not be enough.
        const auto got = store.fetch(big);
        CHECK(got.match == kvq::prefix_match::prefix);
        CHECK(got.tier == kvq::prefix_tier::memory);
        CHECK(got.tokens == 100);
        CHECK(store.memory().entries() == 1);
        CHECK(store.statistics().failed == 1);
        CHECK(test::contains(store.statistics().last_failure, "room"));
        CHECK(store.statistics().files == 1);

        // It would be, but these pages are also those of a live sequence.
        store.store(foreign, live);
        // Memory was emptied for them; the beginning that was there comes back from its own file.
        const auto less = store.fetch(big);
        CHECK(less.match == kvq::prefix_match::prefix);
        CHECK(less.tier == kvq::prefix_tier::file);
        CHECK(less.tokens == 100);
        CHECK(store.statistics().failed == 2);
    }
    const auto got = store.fetch(big);
    CHECK(got.tier == kvq::prefix_tier::file);
    CHECK(test::saved(got.sequence) == bytes);
}

TEST_CASE("memory that runs out anywhere leaves a miss, or the sequence of the file") {
    folder f;
    test::counting_resource memory;
    kvq::cache_options o = options();
    o.memory = &memory;
    kvq::cache cache(shape, o);
    const ids t = prompt(1, 0, 200);
    const auto all = static_cast<std::size_t>(-1);
    kvq::prefix_tiers store(cache, {.memory = {.min_prefix_tokens = 8}, .folder = f.path.string()});
    test::file_bytes bytes;
    {
        auto s = cache.new_sequence();
        fill(s, prompt(1, 0, 204));
        // A file that cannot be written: the entry is lost.
        store.store(t, s);
        memory.arm(0);
        store.release(all);
        memory.arm(test::counting_resource::never);
        REQUIRE(store.statistics().failed == 1);
        REQUIRE(store.statistics().files == 0);
        REQUIRE(f.files().empty());
        store.store(t, s);
        store.release(all);
        REQUIRE(store.statistics().files == 1);
        s.trim(200);
        bytes = test::saved(s);
    }
    int misses = 0, alone = 0, i = 0;
    for (bool done = false; !done; ++i) {
        const auto failed = store.statistics().failed;
        memory.arm(i);
        const auto got = store.fetch(t);
        done = memory.allocations() <= i;
        memory.arm(test::counting_resource::never);
        REQUIRE(store.statistics().files == 1);
        if (got.tier == kvq::prefix_tier::file) {
            REQUIRE(test::saved(got.sequence) == bytes);
            alone += store.memory().entries() == 0;
        } else {
            REQUIRE(got.match == kvq::prefix_match::miss);
            REQUIRE(store.statistics().failed == failed + 1);
            ++misses;
        }
        store.release(all);
    }
    CHECK(misses > 3);
    CHECK(alone > 0);
    CHECK(misses + alone == i - 1);
}

TEST_CASE("short entries: what is asked for as a whole needs no least number of tokens, in either tier") {
    folder f;
    kvq::cache cache(shape, options());
    const ids t = prompt(1, 0, 20), begin(t.begin(), t.begin() + 10), longer = prompt(1, 0, 30);
    for (const bool file : {false, true}) {
        kvq::prefix_tiers store(cache, {.folder = f.path.string()});
        auto s = cache.new_sequence();
        fill(s, t);
        store.store(t, s);
        const kvq::prefix_tier tier = file ? kvq::prefix_tier::file : kvq::prefix_tier::memory;
        for (const ids& asked : {t, begin, longer}) {
            if (file) store.release(static_cast<std::size_t>(-1));
            const auto got = store.fetch(asked);
            CHECK(got.tokens == (asked == longer ? 0 : static_cast<int>(asked.size())));
            CHECK(got.sequence.tokens() == got.tokens);
            CHECK(got.tier == (asked == longer ? kvq::prefix_tier::none : tier));
            CHECK(kvq::is_hit(got.match) == (asked != longer));
        }
    }
}

TEST_CASE("options of tiers that are out of range are refused") {
    kvq::cache cache(shape, options());
    CHECK(test::contains(
        test::message_of([&] { kvq::prefix_tiers store(cache, {.folder = "/no/such/folder"}); }),
        "/no/such/folder"));
    kvq::prefix_tier_options own;
    own.memory.evicted = [](kvq::token_ids, const kvq::sequence&) {};
    CHECK(test::contains(test::message_of([&] { kvq::prefix_tiers store(cache, own); }), "evicted"));
}

}  // namespace prefix_tiers_tests
