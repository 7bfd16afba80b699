// A ring over a sequence, for layers that see a sliding window of W tokens: what no query can see any more is given
// back.
//
//   kvq::ring<cache> ring(cache.new_sequence(), {.window = 4096});
//   ring.append(layer, k, v);     ring.attend(layer, q, out);     ring.trim(n);
//
// Whole pages are dropped in front, so no token is ever moved or coded again, and pages may be of any format. Positions
// count from the first token ever appended. Attention is that of sliding_window{W} over all tokens
// (attention/variant.hpp): at decoding time, and for the queries of the tokens appended last. A cache without sinks:
// dropped tokens are gone for good. Held: at most W + slack tokens before those appended last, and less than a page
// more. Variants see positions that count from first_token(); what depends on distances, as all of kvq's own do, sees
// no difference. Thread safety: as sequence.
#pragma once

#include <span>

#include "../cache/sequence.hpp"

namespace kvq::inline v0_1 {

struct ring_options {
    int window = 0;  ///< W: a query sees itself and the W - 1 tokens before it
    int slack = 16;  ///< trims to this many tokens less than there have ever been are always possible
};

template <class Cache>
class ring {
public:
    using sequence_type = sequence<Cache>;

    /// A sequence with as many tokens in every layer, e.g. none. Raises kvq::error for options out of range or with
    /// sinks.
    ring(sequence_type s, const ring_options& options) : sequence_(std::move(s)), options_(options) {
        detail::expect(options.window >= 1, "a window has at least 1 token, got ", options.window);
        detail::expect(options.slack >= 0, "slack must not be negative, got ", options.slack);
        const page_geometry g = geometry();
        detail::expect(g.sinks == 0, "a ring cannot keep ", g.sinks, " sinks");
        for (int layer = 1; layer < layers(); ++layer)
            detail::expect(sequence_.tokens(layer) == sequence_.tokens(0), "layer ", layer, " holds ",
                           sequence_.tokens(layer), " tokens but layer 0 ", sequence_.tokens(0));
        detail::expect(options.window <= (std::numeric_limits<int>::max)() - options.slack - g.page_tokens,
                       "a window of ", options.window, " tokens is too long");
    }

    /// Appends tokens to one layer; drops pages that lie before the window of the first of them, in all layers, as soon
    /// as every layer has come that far. As sequence::append otherwise.
    template <class K, class V>
    void append(int layer, const token_view<K>& k, const token_view<V>& v) {
        const int pages = droppable();
        sequence_.append(layer, k, v);
        drop(pages);
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
    template <class Variant, class Executor>
    void attend(int layer, const query_view& q, const output_view& out, const Variant& v, Executor&& executor,
                workspace& space) const {
        static_assert(!std::is_same_v<Variant, sliding_window>, "kvq::ring: a ring has its window already");
        if (q.tokens >= 1 && q.tokens <= sequence_.tokens(layer))
            check_window(tokens(layer) - q.tokens, "attend from");
        sequence_.attend(layer, q, out, variant{sliding_window{options_.window}, v}, executor, space);
    }

    /// Forgets every token from position n on. Raises kvq::error when the window before n was overwritten.
    void trim(int n) {
        detail::expect(n >= 0 && n <= tokens(), "cannot trim to ", n, " tokens: ", tokens(),
                       " were appended");
        check_window(n, "trim to");
        sequence_.trim(n - dropped_);
    }

    /// Tokens appended so far, those dropped included.
    [[nodiscard]] int tokens(int layer) const { return dropped_ + sequence_.tokens(layer); }
    [[nodiscard]] int tokens() const noexcept { return dropped_ + sequence_.tokens(); }
    /// Position of the first token that is still held.
    [[nodiscard]] int first_token() const noexcept { return dropped_; }
    /// What is held, as a sequence that begins at first_token(): to look at, decode, measure.
    [[nodiscard]] const sequence_type& held() const noexcept { return sequence_; }
    /// Writes x^ of tokens [first, first + out.tokens) of one layer's K or V.
    template <float_format T>
    void decode(int layer, tensor role, int first, const token_view<T>& out) const {
        detail::expect(first >= dropped_, "tokens before ", dropped_,
                       " were overwritten, cannot decode from ", first);
        sequence_.decode(layer, role, first - dropped_, out);
    }
    const ring_options& options() const noexcept { return options_; }

private:
    page_geometry geometry() const noexcept { return detail::sequence_access::cache(sequence_).geometry(); }
    int layers() const noexcept { return detail::sequence_access::cache(sequence_).shape().layers; }

    /// Is everything there that a query at position n sees?
    void check_window(int n, const char* what) const {
        const int first = detail::larger(0, n - options_.window + 1);
        detail::expect(dropped_ <= first, "cannot ", what, " position ", n, ": its window of ",
                       options_.window, " tokens begins at ", first, ", but tokens before ", dropped_,
                       " were overwritten");
    }

    /// Pages that no query sees in any layer, from the next token on or after a trim by `slack`.
    int droppable() const {
        int shortest = (std::numeric_limits<int>::max)();
        for (const detail::layer_track& track : detail::sequence_access::tracks(sequence_))
            shortest = detail::smaller(shortest, track.tokens);
        const int first = shortest - options_.slack - options_.window + 1;
        return first <= 0 ? 0 : first / geometry().page_tokens;
    }

    void drop(int pages) noexcept {
        if (pages == 0) return;
        const int tokens = pages * geometry().page_tokens;
        for (detail::layer_track& track : detail::sequence_access::tracks(sequence_)) {
            for (detail::page_table& table : track.tables) {
                table.pages.erase(table.pages.begin(), table.pages.begin() + pages);
                // Originals of the dropped pages go with them.
                const int first = table.originals_end - static_cast<int>(table.originals.size());
                const int gone = detail::smaller(static_cast<int>(table.originals.size()),
                                                 detail::larger(0, pages - first));
                table.originals.erase(table.originals.begin(), table.originals.begin() + gone);
                table.originals_end = detail::larger(0, table.originals_end - pages);
            }
            track.tokens -= tokens;
            track.committed = detail::larger(0, track.committed - pages);
        }
        dropped_ += tokens;
    }

    sequence_type sequence_;
    ring_options options_;
    int dropped_ = 0;
};

}  // namespace kvq::inline v0_1
