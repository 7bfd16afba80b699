// Context parallel prefill and decode: every rank holds a range of the tokens of one sequence, and attention
// is merged from its parts.
//
//   kvq::context_parallel group(channel, split, sequence);      the same split on every rank, a sequence of
//                                                               geometry(rank)
//   group.begin(n);                                             the next n tokens; this rank computes K, V, Q
//                                                               of group.own()
//   for each layer: group.step(layer, k, v, q, out);
//
// A step, per layer: queries go to the ranks that hold keys in front of them, each attends over its own keys
// (leading_keys) and sends outputs with log-sum-exp back; the rank of the query merges them in the order of
// ranks, so that timing changes no bit.
// Bytes: for each query and each other rank with keys of it, q_heads * (head_dim * size of a query value +
// (value_dim + 1) * 4).
// Results: those of one cache with the whole geometry, but for the order of float sums (about 1e-7 of the
// norm).
// Errors: on any error the sequence is trimmed to the tokens that it had before begin(), the other ranks are
// told, and the group is at its end. No rank waits longer than the time limit of the transport.
#pragma once

#include <array>
#include <chrono>

#include "../../attention/merge_partials.hpp"
#include "../../cache/sequence.hpp"
#include "../../cache/sequence_access.hpp"
#include "message.hpp"
#include "split.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// Where the time of all steps went, on this rank.
struct context_times {
    std::chrono::nanoseconds attend{0};    ///< own attention and the commit of pages
    std::chrono::nanoseconds exchange{0};  ///< messages: copies, checksums, waiting
    std::chrono::nanoseconds merge{0};
};

namespace detail {
/// Does it mean the same on a rank as on the whole context? Positions of a list count the rank's own tokens.
template <class M>
concept divides_among_ranks =
    !masking<M> && !own_sink<const M> && !own_direction<M> && !own_lists<const M> && !own_selection<const M>;
}  // namespace detail

template <transport Transport>
class context_parallel {
public:
    /// The sequence belongs to a cache whose sinks, recent and page_tokens are split.geometry(rank), and
    /// holds the tokens that the split gives to the rank. All three outlive the group. Raises kvq::error if
    /// they do not fit.
    context_parallel(message_channel<Transport>& channel, context_split& split, sequence& own)
        : channel_(channel),
          split_(split),
          sequence_(own),
          cache_(detail::sequence_access::cache(own)),
          space_(cache_.pool().memory()) {
        detail::expect(split.ranks() == channel.ranks(), "a context divided among ", split.ranks(),
                       " ranks does not fit ", channel.ranks(), " ranks");
        const page_geometry want = split.geometry(me()), have = cache_.geometry();
        detail::expect(
            want.sinks == have.sinks && want.recent == have.recent && want.page_tokens == have.page_tokens,
            "the cache of rank ", me(), " has ", have.sinks, " sinks, ", have.recent,
            " recent tokens and pages of ", have.page_tokens, ", its part of the context has ", want.sinks,
            ", ", want.recent, " and ", want.page_tokens);
        (void)cache_.shape();  // refuses layers of several shapes
        detail::sequence_access::expect_no_state(cache_, "a context divided among ranks");
        check_complete();
    }

    /// The next n tokens of the sequence: 1 in decode. The same call on every rank, after all layers of the
    /// tokens before.
    void begin(int n) {
        detail::expect(!failed_, "the group of rank ", me(), " has failed before");
        check_complete();
        tokens_before_ = split_.tokens(me());
        chunk_ = split_.add(n);
        own_.clear();
        for (const context_split::part& p : chunk_)
            if (p.rank == me()) own_.push_back({p.first, p.end});
    }
    /// Tokens of the chunk whose keys, values and queries this rank computes, at most three ranges; it gives
    /// them to step() in this order.
    std::span<const index_range> own() const noexcept { return own_; }
    int own_tokens() const noexcept { return split_.tokens(me()) - tokens_before_; }

    /// One layer of the chunk. k, v, q, out: rows of own(), as for sequence::prefill; q and out have q_heads
    /// of the model on every rank, and on every rank the same types. scores: score modifiers that do not
    /// depend on positions (softcap, score_scale).
    template <class... Scores>
    void step(int layer, const input_view& k, const input_view& v, const query_view& q,
              const output_view& out, executor_view executor, const Scores&... scores) {
        static_assert((detail::divides_among_ranks<Scores> && ...),
                      "kvq::context_parallel: masks, learned sinks, lists of tokens and selected pages are "
                      "not divided among ranks");
        detail::expect(!failed_, "the group of rank ", me(), " has failed before");
        failure_guard guard{*this};
        const int own = own_tokens();
        detail::expect(k.tokens == own && v.tokens == own && q.tokens == own && out.tokens == own, "rank ",
                       me(), " has ", own, " tokens of the chunk, but k has ", k.tokens, ", v ", v.tokens,
                       ", q ", q.tokens, " and out ", out.tokens);
        plan(q, out);
        send_queries(q);
        gather_queries(q);
        attend(layer, k, v, q, executor, scores...);
        send_partials();
        merge(out);
        guard.done = true;
    }
    void step(int layer, const input_view& k, const input_view& v, const query_view& q,
              const output_view& out) {
        step(layer, k, v, q, out, serial_executor{});
    }

    const context_times& times() const noexcept { return times_; }

private:
    using clock = std::chrono::steady_clock;

    struct failure_guard {
        context_parallel& group;
        bool done = false;
        ~failure_guard() {
            if (!done) group.fail();
        }
    };
    struct stopwatch {
        std::chrono::nanoseconds& to;
        clock::time_point start = clock::now();
        ~stopwatch() { to += clock::now() - start; }
    };
    /// Rows of one rank in the list of queries that this rank answers.
    struct rows {
        int first_seen = 0;  // queries of the rank before it see no key here
        int count = 0;
    };

    int me() const { return channel_.rank(); }
    void check_complete() const {
        for (int layer = 0; layer < cache_.layer_count(); ++layer)
            detail::expect(sequence_.tokens(layer) == split_.tokens(me()), "layer ", layer, " of rank ", me(),
                           " holds ", sequence_.tokens(layer), " tokens, its part of the context has ",
                           split_.tokens(me()));
    }
    void fail() noexcept {
        failed_ = true;
        channel_.announce_failure("a step of context parallel attention was not completed");
        if (sequence_.tokens() > tokens_before_) sequence_.trim(tokens_before_);
    }

    /// Queries of rank `from` that keys of rank `of` are visible to: all from the first on that sees one,
    /// since counts do not fall.
    rows seen(int from, int of) {
        rows r;
        counts_.clear();
        for (const context_split::part& p : chunk_) {
            if (p.rank != from) continue;
            const std::size_t at = counts_.size();
            counts_.resize(at + static_cast<std::size_t>(p.size()));
            split_.leading(of, p.first, std::span(counts_).subspan(at));
        }
        const auto first = std::find_if(counts_.begin(), counts_.end(), [](int n) { return n > 0; });
        r.first_seen = static_cast<int>(first - counts_.begin());
        r.count = static_cast<int>(counts_.end() - first);
        return r;
    }

    void plan(const query_view& q, const output_view& out) {
        const auto ranks = static_cast<std::size_t>(channel_.ranks());
        q_heads_ = q.heads;
        dim_ = cache_.shape().dim(tensor::key);
        value_dim_ = cache_.shape().dim(tensor::value);
        row_bytes_ = static_cast<std::size_t>(q_heads_) * static_cast<std::size_t>(dim_) * size_of(q.type);
        detail::expect(q_heads_ >= 1 && q_heads_ % cache_.shape().kv_heads == 0 && q.dim == dim_ &&
                           out.heads == q_heads_ && out.dim == value_dim_,
                       "queries of ", q.heads, " x ", q.dim, " and outputs of ", out.heads, " x ", out.dim,
                       " do not fit a cache of ", cache_.shape().kv_heads, " kv heads of ", dim_, " and ",
                       value_dim_, " channels");
        asked_.assign(ranks, {});
        asking_.assign(ranks, {});
        for (int r = 0; r < channel_.ranks(); ++r) {
            asked_[static_cast<std::size_t>(r)] = seen(me(), r);
            asking_[static_cast<std::size_t>(r)] = seen(r, me());
        }
    }

    void send_queries(const query_view& q) {
        const stopwatch time{times_.exchange};
        for (int r = 0; r < channel_.ranks(); ++r) {
            const rows to = asked_[static_cast<std::size_t>(r)];
            if (r == me() || to.count == 0) continue;
            message m;
            m.reserve(4 * sizeof(std::int32_t) + static_cast<std::size_t>(to.count) * row_bytes_);
            m.add(std::array<std::int32_t, 4>{static_cast<std::int32_t>(q.type), to.count, q_heads_, dim_});
            for (int t = to.first_seen; t < to.first_seen + to.count; ++t) add_row(m, q, t);
            channel_.send(r, message_kind::queries, std::move(m));
        }
    }
    void add_row(message& m, const query_view& q, int t) const {
        for (int h = 0; h < q_heads_; ++h)
            m.add(q.at(t, h), static_cast<std::size_t>(dim_) * size_of(q.type));
    }

    /// All queries that see keys of this rank, in the order of their positions, and how many keys each sees.
    void gather_queries(const query_view& q) {
        const stopwatch time{times_.exchange};
        std::vector<message> from(asking_.size());
        for (int r = 0; r < channel_.ranks(); ++r) {
            const rows in = asking_[static_cast<std::size_t>(r)];
            message& m = from[static_cast<std::size_t>(r)];
            if (in.count == 0) continue;
            if (r == me()) {
                for (int t = in.first_seen; t < in.first_seen + in.count; ++t) add_row(m, q, t);
                continue;
            }
            m = channel_.receive(r, message_kind::queries);
            const auto shape = m.take<std::array<std::int32_t, 4>>();
            detail::expect(shape == std::array<std::int32_t, 4>{static_cast<std::int32_t>(q.type), in.count,
                                                                q_heads_, dim_} &&
                               m.left() == static_cast<std::size_t>(in.count) * row_bytes_,
                           "rank ", r, " sent ", shape[1], " queries of ", shape[2], " x ", shape[3],
                           " of type ", shape[0], ", expected are ", in.count, " of ", q_heads_, " x ", dim_,
                           " of type ", static_cast<int>(q.type));
        }
        queries_.clear();
        visible_.clear();
        origin_.clear();
        std::vector<int> skipped(from.size());
        for (const context_split::part& p : chunk_) {
            const auto r = static_cast<std::size_t>(p.rank);
            const int skip = detail::smaller(p.size(), asking_[r].first_seen - skipped[r]);
            skipped[r] += skip;
            const auto n = static_cast<std::size_t>(p.size() - skip);
            const std::size_t at = visible_.size(), bytes = queries_.size();
            queries_.resize(bytes + n * row_bytes_);
            from[r].take(queries_.data() + bytes, n * row_bytes_);
            visible_.resize(at + n);
            split_.leading(me(), p.first + skip, std::span(visible_).subspan(at));
            origin_.resize(at + n, p.rank);
        }
    }

    template <class... Scores>
    void attend(int layer, const input_view& k, const input_view& v, const query_view& q,
                executor_view executor, const Scores&... scores) {
        const stopwatch time{times_.attend};
        const auto n = static_cast<int>(visible_.size());
        const std::size_t all_rows = visible_.size() * static_cast<std::size_t>(q_heads_);
        outputs_.resize(all_rows * static_cast<std::size_t>(value_dim_));
        lse_.resize(all_rows);
        if (n == 0 && k.tokens == 0) return;
        const output_view out = output_view(outputs_.data(), n, q_heads_, value_dim_).with_lse(lse_.data());
        const mods seen{scores..., leading_keys{visible_}};
        const auto run = [&](const query_view& all) {
            if (k.tokens > 0)
                sequence_.prefill(layer, k, v, all, out, seen, executor, space_);
            else
                sequence_.attend(layer, all, out, seen, executor, space_);
        };
        const auto* const data = queries_.data();
        if (q.type == float_type::fp32)
            run({reinterpret_cast<const float*>(data), n, q_heads_, dim_});
        else if (q.type == float_type::fp16)
            run({reinterpret_cast<const float16*>(data), n, q_heads_, dim_});
        else
            run({reinterpret_cast<const bfloat16*>(data), n, q_heads_, dim_});
    }

    void send_partials() {
        const stopwatch time{times_.exchange};
        const std::size_t heads = static_cast<std::size_t>(q_heads_),
                          row = heads * static_cast<std::size_t>(value_dim_);
        for (int r = 0; r < channel_.ranks(); ++r) {
            const rows to = asking_[static_cast<std::size_t>(r)];
            if (r == me() || to.count == 0) continue;
            message m;
            m.reserve(2 * sizeof(std::int32_t) +
                      static_cast<std::size_t>(to.count) * (row + heads) * sizeof(float));
            m.add(std::array<std::int32_t, 2>{to.count, value_dim_});
            each_run(r, [&](std::size_t at, std::size_t n) {
                m.add(outputs_.data() + at * row, n * row * sizeof(float));
            });
            each_run(r, [&](std::size_t at, std::size_t n) {
                m.add(lse_.data() + at * heads, n * heads * sizeof(float));
            });
            channel_.send(r, message_kind::partials, std::move(m));
        }
    }
    /// Calls f(first, n) for every run of queries of a rank.
    template <class F>
    void each_run(int of, F&& f) const {
        for (std::size_t at = 0, next; at < origin_.size(); at = next) {
            for (next = at; next < origin_.size() && origin_[next] == origin_[at];) ++next;
            if (origin_[at] == of) f(at, next - at);
        }
    }

    void merge(const output_view& out) {
        const std::size_t heads = static_cast<std::size_t>(q_heads_),
                          dim = static_cast<std::size_t>(value_dim_);
        const auto own = static_cast<std::size_t>(out.tokens);
        if (own == 0) return;
        // Every part in full: a query that sees no key of a rank has a log-sum-exp of -infinity there.
        std::vector<std::vector<float>> outputs, lses;
        std::vector<partial_output> parts;
        for (int r = 0; r < channel_.ranks(); ++r) {
            const rows in = asked_[static_cast<std::size_t>(r)];
            if (in.count == 0) continue;
            const stopwatch time{times_.exchange};
            const std::size_t skip = static_cast<std::size_t>(in.first_seen),
                              n = static_cast<std::size_t>(in.count);
            outputs.emplace_back(own * heads * dim);
            lses.emplace_back(own * heads, -std::numeric_limits<float>::infinity());
            float* to = outputs.back().data() + skip * heads * dim;
            float* to_lse = lses.back().data() + skip * heads;
            if (r == me()) {
                each_run(r, [&](std::size_t at, std::size_t count) {
                    to = std::copy_n(outputs_.data() + at * heads * dim, count * heads * dim, to);
                    to_lse = std::copy_n(lse_.data() + at * heads, count * heads, to_lse);
                });
            } else {
                message m = channel_.receive(r, message_kind::partials);
                const auto shape = m.take<std::array<std::int32_t, 2>>();
                detail::expect(shape[0] == in.count && shape[1] == value_dim_ &&
                                   m.left() == n * heads * (dim + 1) * sizeof(float),
                               "rank ", r, " sent ", shape[0], " outputs of ", shape[1],
                               " channels, expected are ", in.count, " of ", value_dim_);
                m.take(to, n * heads * dim * sizeof(float));
                m.take(to_lse, n * heads * sizeof(float));
            }
            parts.push_back({outputs.back().data(), lses.back().data()});
        }
        const stopwatch time{times_.merge};
        merged_.resize(own * heads * dim);
        merged_lse_.resize(own * heads);
        merge_partials(parts, static_cast<int>(own * heads), value_dim_, merged_.data(), merged_lse_.data());
        for (int t = 0; t < out.tokens; ++t)
            for (int h = 0; h < q_heads_; ++h) {
                const std::size_t row = static_cast<std::size_t>(t) * heads + static_cast<std::size_t>(h);
                out.store(t, h, merged_.data() + row * dim);
                if (float* const lse = out.lse(t, h)) *lse = merged_lse_[row];
            }
    }

    message_channel<Transport>& channel_;
    context_split& split_;
    sequence& sequence_;
    const cache& cache_;
    workspace space_;
    std::vector<context_split::part> chunk_;
    std::vector<index_range> own_;
    int tokens_before_ = 0;
    bool failed_ = false;
    int q_heads_ = 0, dim_ = 0, value_dim_ = 0;
    std::size_t row_bytes_ = 0;
    std::vector<rows> asked_, asking_;  // by rank: own queries that go there, queries that come from there
    std::vector<int> counts_;
    std::vector<std::byte> queries_;  // that this rank answers
    std::vector<int> visible_, origin_;
    std::vector<float> outputs_, lse_, merged_, merged_lse_;
    context_times times_;
};

}}  // namespace kvq
