// Trees of drafted tokens for the GPU tests.
#pragma once

#include <kvq/attention/token_tree.hpp>

#include <bit>

#include "support.cuh"

namespace test {

struct random_tree {
    std::vector<int> parents;

    /// width: a token's parent is one of so many before it; 1: a chain.
    random_tree(rng& r, int tokens, int width) {
        for (int i = 0; i < tokens; ++i) parents.push_back(uniform(r, std::max(-1, i - width), i - 1));
    }
    random_tree(rng& r, int tokens) : random_tree(r, tokens, uniform(r, 1, 8)) {}

    kvq::token_tree tree() const { return kvq::token_tree(0, parents); }
    /// From the root to a token, or nothing.
    std::vector<int> random_path(rng& r) const {
        std::vector<int> path;
        for (int i = uniform(r, -1, static_cast<int>(parents.size()) - 1); i >= 0;
             i = parents[static_cast<std::size_t>(i)])
            path.insert(path.begin(), i);
        return path;
    }
    /// The words of the newest n tokens.
    void newest(int n, std::vector<std::uint64_t>& to) const {
        const kvq::token_tree all = tree();
        const int drafted = static_cast<int>(parents.size());
        for (int i = drafted - n; i < drafted; ++i) to.push_back(all.ancestors(i));
    }
};

/// Words of a tree for each of some sequences, of whose `drafted` tokens the last `queries` ask; a causal
/// mask without drafted tokens.
struct random_words {
    int drafted, queries;
    std::vector<std::uint64_t> words;
    device_buffer<std::uint64_t> device;

    random_words(rng& r, std::size_t sequences, int drafted_tokens, int query_tokens)
        : drafted(drafted_tokens),
          queries(query_tokens),
          words(make(r, sequences, drafted_tokens, query_tokens)),
          device(words) {}
    const std::uint64_t* get() const { return drafted > 0 ? device.get() : nullptr; }
    /// Does query i of sequence b, which has n tokens, see token t?
    bool sees(std::size_t b, int n, int i, int t) const {
        if (t > n - queries + i) return false;
        const int bit = t - (n - drafted);
        return drafted == 0 || bit < 0 ||
               (words[b * static_cast<std::size_t>(queries) + static_cast<std::size_t>(i)] >> bit & 1) != 0;
    }
    /// The position of token t as query i of this sequence sees it: of drafted tokens, that on its path.
    int place(std::size_t b, int n, int i, int t) const {
        const int bit = t - (n - drafted);
        if (drafted == 0 || bit < 0) return t;
        const std::uint64_t word = words[b * static_cast<std::size_t>(queries) + static_cast<std::size_t>(i)];
        return n - drafted + std::popcount(word & ((std::uint64_t{1} << bit) - 1));
    }

private:
    static std::vector<std::uint64_t> make(rng& r, std::size_t sequences, int drafted, int queries) {
        std::vector<std::uint64_t> all;
        for (std::size_t b = 0; b < sequences && drafted > 0; ++b)
            random_tree(r, drafted).newest(queries, all);
        return all;
    }
};

}  // namespace test
