// A ring over a sequence, for layers that see a sliding window of W tokens: what no query can see any more is given
// back.
//
//   kvq::ring ring(cache.new_sequence(), {.window = 4096});
//   ring.append(layer, k, v);     ring.attend(layer, q, out);     ring.trim(n);
//
// Whole pages are dropped in front, so no token is ever moved or coded again, and pages may be of any format. Positions
// count from the first token ever appended, in 64 bits: a ring has no end. Sinks of the cache stay where they are, and
// the window slides behind them (Xiao et al., arXiv 2309.17453). Attention is that of sink_window{W, sinks} over all
// tokens (attention/variant.hpp), without sinks that of sliding_window{W}: at decoding time, and for the queries of the
// tokens appended last. Held: the sinks, at most W + slack tokens before those appended last, and less than a page more.
// Variants see positions in held(), where nothing lies between sinks and window. What depends on distances, as all of
// kvq's own do, sees no difference within the window; sinks are nearer than in the text. Keys stay as they were appended,
// so whatever positions went into them stay, too: rotated sinks do not come nearer.
// To go on elsewhere: fork(); or save held() and first_token() beside it, of which a ring can be made again.
// Thread safety: as sequence.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "../cache/sequence.hpp"

namespace kvq::inline KVQ_TAGGED {

struct ring_options {
    int window = 0;  ///< W: a query sees itself and the W - 1 tokens before it
    int slack = 16;  ///< trims to this many tokens less than there have ever been are always possible
};

class ring {
public:
    /// s: a sequence with as many tokens in every layer, e.g. none. first_token: how many tokens of the text lie before
    /// what s holds behind its sinks, which then are the first of the text; 0 if s begins where the text does. For what was
    /// held() by another ring of as many sinks, that ring's first_token(). Raises kvq::error for options out of range, for
    /// a position before the end of the sinks, and when the window before the next token is not whole.
    ring(sequence s, const ring_options& options, std::int64_t first_token = 0)
        : sequence_(std::move(s)), options_(options) {
        detail::expect(options.window >= 1, "a window has at least 1 token, got ", options.window);
        detail::expect(options.slack >= 0, "slack must not be negative, got ", options.slack);
        const page_geometry g = geometry();
        for (int layer = 1; layer < layers(); ++layer)
            detail::expect(sequence_.tokens(layer) == sequence_.tokens(0), "layer ", layer, " holds ",
                           sequence_.tokens(layer), " tokens but layer 0 ", sequence_.tokens(0));
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

    /// A ring over a fork of the sequence: it shares every page. As sequence::fork otherwise.
    [[nodiscard]] ring fork() const { return ring(*this, 0); }

    /// Appends tokens to one layer; drops pages that lie before the window of the first of them, in all layers, as soon
    /// as every layer has come that far. As sequence::append otherwise.
    void append(int layer, const input_view& k, const input_view& v) {
        const int tokens = droppable();
        sequence_.append(layer, k, v);
        drop(tokens);
    }
    /// sequence::prefill of a chunk or of one token over the window; then drops as append() does. Every query of the chunk sees its
    /// own window, since nothing goes before it was asked.
    void prefill(int layer, const input_view& k, const input_view& v, const query_view& q,
                 const output_view& out) {
        workspace space(detail::sequence_access::cache(sequence_).pool().memory());
        prefill(layer, k, v, q, out, causal{}, serial_executor{}, space);
    }
    template <class Variant>
    void prefill(int layer, const input_view& k, const input_view& v, const query_view& q,
                 const output_view& out, const Variant& variant_of, executor_view executor,
                 workspace& space) {
        static_assert(!std::is_same_v<Variant, sliding_window> && !std::is_same_v<Variant, sink_window>,
                      "kvq::ring: a ring has its window already");
        if (q.tokens >= 1 && q.tokens <= sequence_.tokens(layer) + k.tokens)
            check_window(tokens(layer) + k.tokens - q.tokens, "attend from");
        const int tokens = droppable();
        sequence_.prefill(layer, k, v, q, out, variant{sink_window{options_.window, sinks()}, variant_of},
                          executor, space);
        drop(tokens);
    }

    /// As sequence::attend, over the window. Raises kvq::error when a query's window was partly dropped: queries of
    /// tokens that were appended before the last ones.
    void attend(int layer, const query_view& q, const output_view& out) const {
        attend(layer, q, out, causal{});
    }
    template <class Variant>
    void attend(int layer, const query_view& q, const output_view& out, const Variant& v) const {
        workspace space(detail::sequence_access::cache(sequence_).pool().memory());
        attend(layer, q, out, v, serial_executor{}, space);
    }
    template <class Variant>
    void attend(int layer, const query_view& q, const output_view& out, const Variant& v,
                executor_view executor, workspace& space) const {
        static_assert(!std::is_same_v<Variant, sliding_window> && !std::is_same_v<Variant, sink_window>,
                      "kvq::ring: a ring has its window already");
        if (q.tokens >= 1 && q.tokens <= sequence_.tokens(layer))
            check_window(tokens(layer) - q.tokens, "attend from");
        sequence_.attend(layer, q, out, variant{sink_window{options_.window, sinks()}, v}, executor, space);
    }

    /// Forgets every token from position n on. Raises kvq::error when the window before n was overwritten.
    void trim(std::int64_t n) {
        detail::expect(n >= 0 && n <= tokens(), "cannot trim to ", n, " tokens: ", tokens(),
                       " were appended");
        check_window(n, "trim to");
        sequence_.trim(static_cast<int>(n - dropped_));
    }

    /// Tokens appended so far, those dropped included.
    [[nodiscard]] std::int64_t tokens(int layer) const { return dropped_ + sequence_.tokens(layer); }
    [[nodiscard]] std::int64_t tokens() const noexcept { return dropped_ + sequence_.tokens(); }
    /// Position from which on every token is still held. Before it only the sinks are.
    [[nodiscard]] std::int64_t first_token() const noexcept { return dropped_ == 0 ? 0 : dropped_ + sinks(); }
    /// What is held, as a sequence: the sinks, then the tokens from first_token() on. To look at, measure, save; and, if it
    /// is not const, to requantize and to step down, alone or with other sequences (token numbers of a request count what is
    /// held). Appending and trimming are the ring's: whoever does so here moves the positions of what comes after.
    [[nodiscard]] const sequence& held() const noexcept { return sequence_; }
    [[nodiscard]] sequence& held() noexcept { return sequence_; }
    /// Writes x^ of tokens [first, first + out.tokens) of one layer's K or V: of sinks, or of tokens from first_token() on.
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
    int layers() const noexcept { return detail::sequence_access::cache(sequence_).shape().layers; }

    /// Is everything there that a query at position n sees?
    void check_window(std::int64_t n, const char* what) const {
        const std::int64_t first = detail::larger(std::int64_t{0}, n - options_.window + 1);
        detail::expect(first_token() <= first, "cannot ", what, " position ", n, ": its window of ",
                       options_.window, " tokens begins at ", first, ", but tokens before ", first_token(),
                       " were overwritten");
    }

    /// Tokens behind the sinks, in whole pages of every layer, that no query sees, from the next token on or after a trim by `slack`.
    int droppable() const {
        const auto& tracks = detail::sequence_access::tracks(sequence_);
        int shortest = (std::numeric_limits<int>::max)();
        for (const detail::layer_track& track : tracks) shortest = detail::smaller(shortest, track.tokens);
        const int seen = shortest - options_.slack - options_.window + 1;
        const auto begins = [](const detail::layer_track& track, int token) {
            return std::any_of(track.spans.begin(), track.spans.end(),
                               [&](const page_span& span) { return span.first_token == token; });
        };
        int first = sinks();
        for (const page_span& span : tracks.front().spans) {
            if (span.first_token > seen) break;
            if (span.first_token <= first) continue;
            const bool everywhere = std::all_of(tracks.begin(), tracks.end(), [&](const auto& track) {
                return begins(track, span.first_token);
            });
            if (everywhere) first = span.first_token;
        }
        return first - sinks();
    }

    void drop(int tokens) noexcept {
        if (tokens == 0) return;
        const int kept = sinks() > 0 ? 1 : 0;
        for (detail::layer_track& track : detail::sequence_access::tracks(sequence_)) {
            int end = kept;
            while (end < track.size() && track[end].first_token < sinks() + tokens) ++end;
            track.spans.erase(track.spans.begin() + kept, track.spans.begin() + end);
            for (int i = kept; i < track.size(); ++i) track[i].first_token -= tokens;
            track.tokens -= tokens;
            track.committed = detail::larger(kept, track.committed - (end - kept));
            track.first_copy = detail::larger(0, track.first_copy - (end - kept));
        }
        dropped_ += tokens;
    }

    sequence sequence_;
    ring_options options_;
    std::int64_t dropped_ = 0;  // tokens behind the sinks
};

}  // namespace kvq::inline KVQ_TAGGED
