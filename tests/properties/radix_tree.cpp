// SPDX-License-Identifier: MIT
// Comparison family: exact. A radix tree answers like a sorted map of token vectors that is searched from end
// to end.
#include <doctest/doctest.h>

#include <kvq/policy/radix_tree.hpp>
#include <map>

#include "support/random.hpp"

namespace radix_tree_tests {

namespace {

using key = std::vector<kvq::token_id>;
using tree = kvq::radix_tree<int>;

key key_of(const tree::node* n) { return {n->tokens().begin(), n->tokens().end()}; }

std::size_t common_prefix(const key& a, const key& b) {
    std::size_t n = 0;
    while (n < a.size() && n < b.size() && a[n] == b[n]) ++n;
    return n;
}
bool begins_with(const key& longer, const key& prefix) {
    return common_prefix(longer, prefix) == prefix.size();
}

struct model {
    std::map<key, tree::node*> keys;

    void check(const tree& t, const key& query) const {
        std::size_t common = 0;
        const key* prefix = nullptr;
        for (const auto& [k, node] : keys) {
            common = std::max(common, common_prefix(k, query));
            if (!k.empty() && k.size() < query.size() && begins_with(query, k) &&
                (!prefix || k.size() > prefix->size()))
                prefix = &k;
        }
        // Every key with a token in common once, with that number, which never rises.
        std::size_t last = query.size() + 1, visited = 0, near_keys = 0;
        t.visit_closest(query, [&](const tree::node* n, std::size_t same) {
            const key k = key_of(n);
            REQUIRE((keys.at(k) == n && same == common_prefix(k, query) && same > 0 && same <= last));
            last = same;
            return ++visited <= keys.size();
        });
        for (const auto& [k, node] : keys) near_keys += common_prefix(k, query) > 0;
        REQUIRE(visited == near_keys);
        const key head(query.begin(), query.begin() + static_cast<std::ptrdiff_t>(common));
        const auto extension = keys.upper_bound(head);
        const auto exact = keys.find(query);

        const auto m = t.find(query);
        REQUIRE(m.tokens == common);
        REQUIRE(m.exact == (exact == keys.end() ? nullptr : exact->second));
        REQUIRE(m.prefix == (prefix ? keys.at(*prefix) : nullptr));
        REQUIRE(
            m.extension ==
            (extension != keys.end() && begins_with(extension->first, head) ? extension->second : nullptr));
    }
    /// Every key is there under the address it had from the start, with its value; nothing else is.
    void check_all(const tree& t) const {
        REQUIRE(t.size() == keys.size());
        REQUIRE(t.nodes() <= 2 * keys.size());
        for (const auto& [k, node] : keys) {
            REQUIRE(t.find(k).exact == node);
            REQUIRE(key_of(node) == k);
            REQUIRE(node->value == static_cast<int>(k.size()));
            const tree::node* const shorter = node->shorter();
            const key* expected = nullptr;
            for (const auto& [other, unused] : keys)
                if (other.size() < k.size() && begins_with(k, other) &&
                    (!expected || other.size() > expected->size()))
                    expected = &other;
            REQUIRE(shorter == (expected ? keys.at(*expected) : nullptr));
        }
    }
};

}  // namespace

TEST_CASE("random insertions and erasures: every search finds what a search of everything finds") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 30; ++round) {
        tree t;
        model m;
        const int alphabet = random.between(1, 5), longest = random.between(1, 20);
        const bool empty_key = random.one_in(4);
        const auto random_key = [&] {
            key k;
            if (!m.keys.empty() && random.one_in(2)) {  // near what is stored
                k = std::next(m.keys.begin(), random.between(0, static_cast<int>(m.keys.size()) - 1))->first;
                k.resize(static_cast<std::size_t>(random.between(0, static_cast<int>(k.size()))));
            }
            for (int more = random.between(k.empty() && !empty_key ? 1 : 0, longest); more > 0; --more)
                k.push_back(random.between(-1, alphabet - 2));
            return k;
        };
        for (int step = 0; step < 300; ++step) {
            const key k = random_key();
            if (random.one_in(step < 150 ? 4 : 2) && !m.keys.empty()) {
                const auto victim =
                    std::next(m.keys.begin(), random.between(0, static_cast<int>(m.keys.size()) - 1));
                t.erase(victim->second);
                m.keys.erase(victim);
            } else if (empty_key || !k.empty()) {
                const auto [node, fresh] = t.insert(k);
                REQUIRE(fresh == !m.keys.count(k));
                node->value = static_cast<int>(k.size());
                m.keys[k] = node;
            }
            for (int i = 0; i < 4; ++i) m.check(t, random_key());
            if (step % 20 == 0) m.check_all(t);
        }
        m.check_all(t);
        while (!m.keys.empty()) {
            t.erase(m.keys.begin()->second);
            m.keys.erase(m.keys.begin());
        }
        CHECK(t.size() == 0);
        CHECK(t.nodes() == 0);
    }
}

TEST_CASE("keys that nest thousands deep are destroyed without recursion") {
    tree t;
    key k;
    for (int i = 0; i < 20000; ++i) {
        k.push_back(i);
        if (i % 4 == 0) t.insert(k);
    }
    CHECK(t.size() == 5000);
    CHECK(t.find(k).tokens == 19997);
    t.clear();
    CHECK(t.size() == 0);
    CHECK(t.nodes() == 0);
    CHECK(t.find(k).tokens == 0);
}

}  // namespace radix_tree_tests
