// How heads and contexts are divided among ranks. Every rank computes the same division, so nothing is exchanged for it.
//
//   split(n, weights)      [0, n) in consecutive ranges, in proportion to the weights: kv heads, pages, layers
//   context_split          the tokens of one sequence: whole pages, in proportion; the sinks belong to the first rank with a weight,
//                          the recent window and the page that is being filled to the last one
//
// Every rank keeps its tokens in a sequence of its own, whose cache has geometry(rank). All ranks together then hold the pages, byte for
// byte, that one cache with the whole geometry would hold. Parts are in the order of their tokens; several may belong to one rank.
// Cost: O(ranks) per chunk, O(parts) memory. No transport, no device: the same division serves MPI and NCCL.
#pragma once

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "../../core/error.hpp"
#include "../../page/layer_pages.hpp"

namespace kvq::inline KVQ_TAGGED {

/// [first, end)
struct index_range {
    int first = 0;
    int end = 0;

    constexpr int size() const noexcept { return end - first; }
    bool operator==(const index_range&) const = default;
};

namespace detail {

/// Raises kvq::error unless there is a weight above zero; returns the sum.
inline long long check_weights(std::span<const int> weights) {
    long long sum = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
        expect(weights[i] >= 0, "rank ", i, " has weight ", weights[i], ", which is negative");
        sum += weights[i];
    }
    expect(sum > 0, "no one of ", weights.size(), " ranks has a weight above zero");
    expect(sum <= (std::numeric_limits<int>::max)(), "the weights of ", weights.size(), " ranks add up to ",
           sum, ", more than ", (std::numeric_limits<int>::max)());
    return sum;
}

}  // namespace detail

/// One range per weight. Weights that are all equal give ranges that differ by at most 1; weight 0 gives an empty range.
inline std::vector<index_range> split(int n, std::span<const int> weights) {
    detail::expect(n >= 0, "cannot divide ", n, " among ranks");
    const long long sum = detail::check_weights(weights);
    std::vector<index_range> ranges;
    ranges.reserve(weights.size());
    long long before = 0;
    for (const int w : weights) {
        const auto first = static_cast<int>(n * before / sum);
        before += w;
        ranges.push_back({first, static_cast<int>(n * before / sum)});
    }
    return ranges;
}

/// The tokens of one sequence by rank. All ranks make the same calls.
class context_split {
public:
    /// Tokens [first, end) of the sequence, on one rank.
    struct part {
        int rank = 0;
        int first = 0;
        int end = 0;

        int size() const noexcept { return end - first; }
        bool operator==(const part&) const = default;
    };

    /// `whole`: geometry of the cache that would hold all tokens. weights: one per rank; 0: no tokens.
    context_split(const page_geometry& whole, std::span<const int> weights)
        : whole_(whole), weights_(weights.begin(), weights.end()), held_(weights.size()) {
        detail::check_weights(weights);
        detail::expect(whole.sinks >= 0 && whole.recent >= 0 && whole.page_tokens >= 1, "a context with ",
                       whole.sinks, " sinks, ", whole.recent, " recent tokens and pages of ",
                       whole.page_tokens, " cannot be divided");
        const auto above_zero = [](int w) { return w > 0; };
        head_ = static_cast<int>(std::find_if(weights_.begin(), weights_.end(), above_zero) -
                                 weights_.begin());
        tail_ = ranks() - 1 -
                static_cast<int>(std::find_if(weights_.rbegin(), weights_.rend(), above_zero) -
                                 weights_.rbegin());
    }

    int ranks() const noexcept { return static_cast<int>(weights_.size()); }
    /// The rank of the sinks, and that of the newest tokens.
    int head() const noexcept { return head_; }
    int tail() const noexcept { return tail_; }
    /// Sinks, recent tokens and page size of a rank's cache.
    page_geometry geometry(int rank) const {
        check(rank);
        return {rank == head_ ? whole_.sinks : 0, rank == tail_ ? whole_.recent : 0, whole_.page_tokens};
    }

    /// Divides the next n tokens: the last rank fills its open page, whole pages that the chunk leaves behind the recent window are
    /// spread, the last rank takes what is left. A decoded token belongs to the last rank. Returns the parts of the chunk.
    std::vector<part> add(int n) {
        detail::expect(n >= 0 && n <= (std::numeric_limits<int>::max)() - tokens_ - whole_.page_tokens,
                       "a context of ", tokens_, " tokens cannot take ", n, " more");
        std::vector<part> chunk;
        int at = tokens_;
        const int end = tokens_ + n, p = whole_.page_tokens;
        const auto take = [&](int rank, int to) {
            if (to <= at) return;
            join(chunk, {rank, at, to});
            join(parts_, {rank, at, to});
            held_[static_cast<std::size_t>(rank)] += to - at;
            at = to;
        };
        take(head_, detail::smaller(end, whole_.sinks));
        if (at >= whole_.sinks)
            take(tail_, detail::smaller(end, whole_.sinks + detail::round_up(at - whole_.sinks, p)));
        const int first_page = at, pages = detail::larger(0, end - whole_.recent - at) / p;
        const std::vector<index_range> ranges = split(pages, weights_);
        for (std::size_t r = 0; r < ranges.size(); ++r)
            take(static_cast<int>(r), first_page + ranges[r].end * p);
        take(tail_, end);
        tokens_ = end;
        return chunk;
    }
    /// Removes every token from position n on. A rank trims its sequence to tokens(rank).
    void trim(int n) {
        detail::expect(n >= 0 && n <= tokens_, "cannot trim a context of ", tokens_, " tokens to ", n);
        tokens_ = n;
        while (!parts_.empty() && parts_.back().end > n) {
            part& last = parts_.back();
            const int kept = detail::larger(last.first, n);
            held_[static_cast<std::size_t>(last.rank)] -= last.end - kept;
            last.end = kept;
            if (last.size() == 0) parts_.pop_back();
        }
    }

    int tokens() const noexcept { return tokens_; }
    int tokens(int rank) const {
        check(rank);
        return held_[static_cast<std::size_t>(rank)];
    }
    /// All parts, in the order of their tokens.
    std::span<const part> parts() const noexcept { return parts_; }

    /// Sets counts[i] to the tokens of a rank at positions up to first + i: the leading keys of its sequence that a query at this
    /// position attends to. O(parts + counts)
    void leading(int rank, int first, std::span<int> counts) const {
        check(rank);
        std::size_t at = 0;
        int before = 0;  // tokens of the rank in front of part `at`
        for (std::size_t i = 0; i < counts.size(); ++i) {
            const int position = first + static_cast<int>(i);
            for (; at < parts_.size() && parts_[at].end <= position; ++at)
                before += parts_[at].rank == rank ? parts_[at].size() : 0;
            counts[i] = before + (at < parts_.size() && parts_[at].rank == rank
                                      ? detail::larger(0, position + 1 - parts_[at].first)
                                      : 0);
        }
    }

private:
    static void join(std::vector<part>& list, const part& p) {
        if (!list.empty() && list.back().rank == p.rank)
            list.back().end = p.end;
        else
            list.push_back(p);
    }
    void check(int rank) const {
        detail::expect(rank >= 0 && rank < ranks(), "rank ", rank, " is not among the ", ranks(), " ranks");
    }

    page_geometry whole_;
    std::vector<int> weights_, held_;
    std::vector<part> parts_;
    int head_ = 0, tail_ = 0, tokens_ = 0;
};

}  // namespace kvq::inline KVQ_TAGGED
