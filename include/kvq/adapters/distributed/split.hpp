// How heads and contexts are divided among ranks. Every rank computes the same division, so nothing is
// exchanged for it.
//
//   split(n, weights)
//     [0, n) in consecutive ranges, in proportion to the weights: kv heads, pages, layers
//   context_split          the tokens of one sequence: whole units of pages, in proportion; one rank, the
//                          home of the sequence, holds the sinks, the first unit, the recent window and the
//                          unit that is being filled
//
// Every rank keeps its tokens in a sequence of its own, whose cache has geometry(rank): that of the whole at
// home, no sinks and no recent tokens elsewhere. All ranks together then hold the pages, byte for byte, that
// one cache would hold. A unit is by default what attention sums into one softmax state (about 2048 tokens),
// so that attention does the same sums on any number of ranks; smaller units round the 16-bit weights of
// quantized values differently (about 1e-5 of the norm). Sequences of a batch may have different homes.
// Cost: O(ranks) per chunk, O(parts) memory. No transport, no device: the same division serves MPI and NCCL.
#pragma once

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "../../attention/plan.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

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
    expect(sum > 0, "none of ", weights.size(), " ranks has a weight above zero");
    expect(sum <= (std::numeric_limits<int>::max)(), "the weights of ", weights.size(), " ranks add up to ",
           sum, ", more than ", (std::numeric_limits<int>::max)());
    return sum;
}

}  // namespace detail

/// One range per weight. Weights that are all equal give ranges that differ by at most 1; weight 0 gives an
/// empty range.
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

    /// `whole`: geometry of the cache that would hold all tokens. weights: one per rank; 0: no tokens. home:
    /// a rank with a weight; -1: the last one. unit_tokens: a multiple of the page size; 0: one softmax state
    /// of attention.
    context_split(const page_geometry& whole, std::span<const int> weights, int home = -1,
                  int unit_tokens = 0)
        : whole_(whole), weights_(weights.begin(), weights.end()), held_(weights.size()) {
        detail::check_weights(weights);
        detail::expect(whole.sinks >= 0 && whole.recent >= 0 && whole.page_tokens >= 1 && unit_tokens >= 0 &&
                           unit_tokens % whole.page_tokens == 0,
                       "a context with ", whole.sinks, " sinks, ", whole.recent,
                       " recent tokens and pages of ", whole.page_tokens, " cannot be divided into units of ",
                       unit_tokens, " tokens");
        unit_ = unit_tokens > 0
                    ? unit_tokens
                    : detail::larger(1, detail::most_split_tokens / whole.page_tokens) * whole.page_tokens;
        // Attention cuts by the positions of first tokens: the sinks belong to the first state.
        first_unit_ = whole.sinks +
                      detail::round_up((whole.sinks / unit_ + 1) * unit_ - whole.sinks, whole.page_tokens);
        home_ = home;
        if (home < 0)
            for (int r = 0; r < ranks(); ++r)
                if (weights[static_cast<std::size_t>(r)] > 0) home_ = r;
        check(home_);
        detail::expect(weights[static_cast<std::size_t>(home_)] > 0, "rank ", home_,
                       " cannot be the home of a sequence, its weight is 0");
    }

    int ranks() const noexcept { return static_cast<int>(weights_.size()); }
    int home() const noexcept { return home_; }
    int unit_tokens() const noexcept { return unit_; }
    /// Sinks, recent tokens and page size of a rank's cache.
    page_geometry geometry(int rank) const {
        check(rank);
        return {rank == home_ ? whole_.sinks : 0, rank == home_ ? whole_.recent : 0, whole_.page_tokens};
    }

    /// Divides the next n tokens: home fills its open unit, whole units that the chunk leaves behind the
    /// recent window go to ranks that lack tokens of their share, home takes what is left. So a decoded token
    /// belongs to home, and the chunks of a prompt should hold several units for every rank. Returns the
    /// parts of the chunk.
    std::vector<part> add(int n) {
        detail::expect(n >= 0 && n <= (std::numeric_limits<int>::max)() - tokens_ - first_unit_ - unit_,
                       "a context of ", tokens_, " tokens cannot take ", n, " more");
        std::vector<part> chunk;
        int at = tokens_;
        const int end = tokens_ + n;
        const auto take = [&](int rank, int to) {
            if (to <= at) return;
            join(chunk, {rank, at, to});
            join(parts_, {rank, at, to});
            held_[static_cast<std::size_t>(rank)] += to - at;
            at = to;
        };
        take(home_, detail::smaller(
                        end, first_unit_ + detail::round_up(detail::larger(0, at - first_unit_), unit_)));
        const int first = at, units = detail::larger(0, end - whole_.recent - at) / unit_;
        const std::vector<index_range> ranges = split(units, lacking(end, end - first - units * unit_));
        for (std::size_t r = 0; r < ranges.size(); ++r)
            take(static_cast<int>(r), first + ranges[r].end * unit_);
        take(home_, end);
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

    /// Sets counts[i] to the tokens of a rank at positions up to first + i: the leading keys of its sequence
    /// that a query at this position attends to. O(parts + counts)
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
    /// Tokens that each rank lacks of its share of n, if home takes `rest` more; the weights if no rank lacks
    /// any.
    std::vector<int> lacking(int n, int rest) const {
        const long long sum = std::accumulate(weights_.begin(), weights_.end(), 0LL);
        std::vector<int> lacks(weights_.size());
        for (int r = 0; r < ranks(); ++r) {
            const auto i = static_cast<std::size_t>(r);
            const auto share = static_cast<int>(static_cast<long long>(n) * weights_[i] / sum);
            lacks[i] = detail::larger(0, share - held_[i] - (r == home_ ? rest : 0));
        }
        const bool some = std::any_of(lacks.begin(), lacks.end(), [](int t) { return t > 0; });
        return some ? lacks : weights_;
    }
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
    int home_ = 0, unit_ = 0, first_unit_ = 0, tokens_ = 0;
};

}}  // namespace kvq
