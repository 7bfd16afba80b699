// A ring over a sequence, for layers with a sliding window of W tokens: pages that no query attends to any
// more are freed.
//
//   kvq::ring ring(cache.new_sequence(), {.window = 4096});
//   ring.append(layer, k, v);     ring.attend(layer, q, out);     ring.trim(n);
//
// Whole pages are dropped at the front, so no token is moved or quantized again. Positions count from the
// first token ever appended, in 64 bits. Sinks of the cache stay, and the window slides behind them (Xiao et
// al., arXiv 2309.17453): attention is that of sink_window{W, sinks} over all tokens, in decode and for the
// tokens appended last. A ring holds the sinks, at most W + slack tokens before those appended last, and less
// than a page more.
// Masks and score modifiers get positions in held(), which has no gap between sinks and window: distances
// within the window are those of the text, sinks are nearer. Rotated keys keep the positions of the text;
// with sink_positions::in_cache the sinks move along and stay directly before the window, as StreamingLLM has
// it. The engine rotates keys and queries at their positions in the text in both cases.
// Drafts: held().append_draft(), attend() under a tree that begins at held().tokens(layer), held().keep().
// To continue elsewhere: fork(); or save held() and first_token(), from which a ring can be made again.
// Thread safety: as sequence.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "../cache/sequence_access.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// Where the rotary embedding sees the sinks of a ring.
enum class sink_positions : bool {
    in_text,  ///< at the positions at which they were rotated
    in_cache  ///< directly before the first token behind them that is held
};

struct ring_options {
    int window = 0;  ///< W: a query attends to itself and the W - 1 tokens before it
    int slack = 16;  ///< a trim to `slack` tokens less than the most so far is always possible
    sink_positions sinks = sink_positions::in_text;  ///< in_cache needs cache_options::rotary
};

class ring {
public:
    /// s: a sequence with the same number of tokens in every layer, possibly none. first_token: 0 if s begins
    /// at the first token of the text. Otherwise the number of tokens of the text before the first token that
    /// s holds behind its sinks; the sinks are then the first tokens of the text. For held() of another ring
    /// with as many sinks: that ring's first_token(). Raises kvq::error for options out of range, for a
    /// position before the end of the sinks, and when s does not hold the whole window of the next token.
    ring(sequence s, const ring_options& options, std::int64_t first_token = 0)
        : sequence_(std::move(s)), options_(options) {
        detail::sequence_access::cache(sequence_).expect_all_tokens("a ring");
        detail::expect(options.window >= 1, "a window has at least 1 token, got ", options.window);
        detail::expect(options.slack >= 0, "slack must not be negative, got ", options.slack);
        detail::expect(
            options.sinks == sink_positions::in_text ||
                detail::sequence_access::cache(sequence_).rotations().known(),
            "the sinks of a ring cannot move: set cache_options::rotary to say how keys are rotated");
        detail::sequence_access::expect_no_state(detail::sequence_access::cache(sequence_), "a ring");
        const page_geometry g = geometry();
        for (int layer = 1; layer < layers(); ++layer)
            detail::expect(sequence_.tokens(layer) == sequence_.tokens(0), "layer ", layer, " holds ",
                           sequence_.tokens(layer), " tokens but layer 0 ", sequence_.tokens(0));
        for (const detail::page_table& table : detail::sequence_access::tables(sequence_))
            detail::expect(g.sinks == 0 || table.size() == 0 ||
                               (table[0].sinks && table[0].skip == 0 &&
                                (table.size() == 1 || table[0].tokens == g.sinks)),
                           "a ring cannot begin with a sequence whose ", g.sinks,
                           " sinks were erased in part");
        detail::expect(options.window <= (std::numeric_limits<int>::max)() - options.slack - g.page_tokens,
                       "a window of ", options.window, " tokens is too long");
        constexpr std::int64_t most = (std::numeric_limits<std::int64_t>::max)() / 2;
        detail::expect(first_token >= 0 && first_token <= most, "a sequence cannot begin at position ",
                       first_token, ", only at 0 to ", most);
        if (first_token == 0) return;
        detail::expect(first_token >= g.sinks && sequence_.tokens() >= g.sinks, "tokens before position ",
                       first_token, " cannot have been dropped behind ", g.sinks, " sinks of a sequence of ",
                       sequence_.tokens(), " tokens");
        dropped_ = first_token - g.sinks;
        check_window(tokens(), "begin at");
    }

    /// A ring over a fork of the sequence: it shares every page. Otherwise as sequence::fork.
    [[nodiscard]] ring fork() const { return ring(*this, 0); }

    /// Appends tokens to one layer; drops pages that lie before the window of the first of them, in all
    /// layers, once every layer has these tokens. Otherwise as sequence::append.
    void append(int layer, const input_view& k, const input_view& v) {
        const int tokens = droppable();
        sequence_.append(layer, k, v);
        drop(tokens);
    }
    /// sequence::prefill of a chunk or of one token over the window; then drops pages as append() does. Every
    /// query of the chunk has its whole window, since pages are dropped only after attention.
    void prefill(int layer, const input_view& k, const input_view& v, const query_view& q,
                 const output_view& out) {
        workspace space(detail::sequence_access::cache(sequence_).pool().memory());
        prefill(layer, k, v, q, out, causal{}, serial_executor{}, space);
    }
    template <class Mods>
    void prefill(int layer, const input_view& k, const input_view& v, const query_view& q,
                 const output_view& out, const Mods& more, executor_view executor, workspace& space) {
        static_assert(!std::is_same_v<Mods, sliding_window> && !std::is_same_v<Mods, sink_window>,
                      "kvq::ring: a ring has its window already");
        const std::int64_t held = std::int64_t{sequence_.tokens(layer)} + k.tokens;
        if (q.tokens >= 1 && q.tokens <= held) check_window(dropped_ + held - q.tokens, "attend from");
        const int tokens = droppable();
        sequence_.prefill(layer, k, v, q, out, mods{sink_window{options_.window, sinks()}, more}, executor,
                          space);
        drop(tokens);
    }

    /// cache::reserve for the next append() or prefill() of `tokens` tokens in every layer. Drops what that
    /// call would drop, before it.
    void reserve(int tokens, int q_tokens, int q_heads, int threads, workspace& space) {
        drop(droppable());
        const step_request one{&sequence_, tokens, q_tokens};
        detail::sequence_access::cache(sequence_).reserve(std::span(&one, 1), q_heads, threads, space);
    }

    /// As sequence::attend, over the window. Raises kvq::error when part of a query's window was dropped:
    /// queries of tokens that were appended before the last ones.
    void attend(int layer, const query_view& q, const output_view& out) const {
        attend(layer, q, out, causal{});
    }
    template <class Mods>
    void attend(int layer, const query_view& q, const output_view& out, const Mods& more) const {
        workspace space(detail::sequence_access::cache(sequence_).pool().memory());
        attend(layer, q, out, more, serial_executor{}, space);
    }
    template <class Mods>
    void attend(int layer, const query_view& q, const output_view& out, const Mods& more,
                executor_view executor, workspace& space) const {
        static_assert(!std::is_same_v<Mods, sliding_window> && !std::is_same_v<Mods, sink_window>,
                      "kvq::ring: a ring has its window already");
        if (q.tokens >= 1 && q.tokens <= sequence_.tokens(layer))
            check_window(tokens(layer) - q.tokens, "attend from");
        sequence_.attend(layer, q, out, mods{sink_window{options_.window, sinks()}, more}, executor, space);
    }

    /// Removes every token from position n on. Raises kvq::error when part of the window before n was
    /// dropped.
    void trim(std::int64_t n) {
        detail::expect(n >= 0 && n <= tokens(), "cannot trim to ", n, " tokens: ", tokens(),
                       " were appended");
        check_window(n, "trim to");
        sequence_.trim(static_cast<int>(n - dropped_));
    }

    /// Tokens appended so far, including dropped ones.
    [[nodiscard]] std::int64_t tokens(int layer) const { return dropped_ + sequence_.tokens(layer); }
    [[nodiscard]] std::int64_t tokens() const noexcept { return dropped_ + sequence_.tokens(); }
    /// Position from which on every token is still held. Of earlier tokens only the sinks are held.
    [[nodiscard]] std::int64_t first_token() const noexcept { return dropped_ == 0 ? 0 : dropped_ + sinks(); }
    /// The held tokens as a sequence: the sinks, then the tokens from first_token() on. Use it to read,
    /// measure and save; and, if it is not const, to requantize and to step down, alone or with other
    /// sequences (token positions of a request count held tokens). Append and trim through the ring only
    /// (drafts aside): otherwise the positions of later tokens move.
    [[nodiscard]] const sequence& held() const noexcept { return sequence_; }
    [[nodiscard]] sequence& held() noexcept { return sequence_; }
    /// Writes x^ of tokens [first, first + out.tokens) of one layer's K or V: of sinks, or of tokens from
    /// first_token() on.
    void dequantize(int layer, tensor role, std::int64_t first, const output_view& out) const {
        detail::expect(first >= 0 && out.tokens >= 0 && first <= tokens(layer) - out.tokens,
                       "cannot dequantize ", out.tokens, " tokens from ", first, " on: ", tokens(layer),
                       " were appended");
        const bool of_sinks = dropped_ > 0 && first + out.tokens <= sinks();
        detail::expect(of_sinks || first >= first_token(), "tokens from ", sinks(), " to ", first_token(),
                       " were overwritten, cannot dequantize ", out.tokens, " from ", first, " on");
        sequence_.dequantize(layer, role, static_cast<int>(of_sinks ? first : first - dropped_), out);
    }
    const ring_options& options() const noexcept { return options_; }

private:
    ring(const ring& other, int)
        : sequence_(other.sequence_.fork()), options_(other.options_), dropped_(other.dropped_) {}

    int sinks() const noexcept { return geometry().sinks; }
    page_geometry geometry() const noexcept { return detail::sequence_access::cache(sequence_).geometry(); }
    int layers() const noexcept { return detail::sequence_access::cache(sequence_).layer_count(); }

    /// Raises kvq::error unless every token that a query at position n attends to is held.
    void check_window(std::int64_t n, const char* what) const {
        const std::int64_t first = detail::larger(std::int64_t{0}, n - options_.window + 1);
        detail::expect(first_token() <= first, "cannot ", what, " position ", n, ": its window of ",
                       options_.window, " tokens begins at ", first, ", but tokens before ", first_token(),
                       " were overwritten");
    }

    /// Tokens behind the sinks, in whole pages of every layer, that no query attends to, from the next token
    /// on or after a trim by `slack`.
    int droppable() const {
        const auto& tables = detail::sequence_access::tables(sequence_);
        int shortest = (std::numeric_limits<int>::max)();
        for (const detail::page_table& table : tables) shortest = detail::smaller(shortest, table.tokens);
        const int seen = shortest - options_.slack - options_.window + 1;
        const auto begins = [](const detail::page_table& table, int token) {
            return std::any_of(table.spans.begin(), table.spans.end(),
                               [&](const page_span& span) { return span.first_token == token; });
        };
        int first = sinks();
        for (const page_span& span : tables.front().spans) {
            if (span.first_token > seen) break;
            if (span.first_token <= first) continue;
            const bool everywhere = std::all_of(tables.begin(), tables.end(), [&](const auto& table) {
                return begins(table, span.first_token);
            });
            if (everywhere) first = span.first_token;
        }
        return first - sinks();
    }

    void drop(int tokens) noexcept {
        if (tokens == 0) return;
        for (detail::page_table& table : detail::sequence_access::tables(sequence_)) {
            table.drop_front(tokens, geometry());
            if (options_.sinks == sink_positions::in_cache && sinks() > 0) table[0].shift += tokens;
        }
        dropped_ += tokens;
    }

    sequence sequence_;
    ring_options options_;
    std::int64_t dropped_ = 0;  // tokens behind the sinks
};

}}  // namespace kvq
