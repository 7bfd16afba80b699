// A sequence page by page from one process to another: prefill here, decode there.
//
//   send_pages(sequence, layer, sink)         every page of one layer as messages, as soon as the layer is prefilled
//   page_receiver receiver(cache);            in the other process
//   receiver.accept(parse_page(bytes));      in any order
//   auto sequence = receiver.finish(tokens);  after all messages
//
// The receiving cache has the sender's shape, window, sinks, recent and page_tokens, and lists the schemes of the pages, in any
// order; later pages are quantized to its own formats. If both caches are alike, the two sequences stay alike in the future.
#pragma once

#include <algorithm>
#include <map>

#include "../cache/sequence.hpp"
#include "clean_page.hpp"
#include "page_wire.hpp"

namespace kvq::inline KVQ_TAGGED {

/// Writes the pages of one layer to a sink, a message each: by spans, 16-bit copies before their pages, first K, then V.
template <byte_sink Sink>
void send_pages(const sequence& s, int layer, Sink&& write) {
    const cache& of = detail::sequence_access::cache(s);
    const cache_shape& shape = of.shape();
    detail::expect(layer >= 0 && layer < shape.layers, "layer ", layer, " is not among the ", shape.layers,
                   " layers of the cache");
    const detail::layer_track& track = detail::sequence_access::tracks(s)[static_cast<std::size_t>(layer)];
    const page_geometry g = of.geometry();
    page_pool scratch(of.pool().memory());
    const auto send = [&](tensor role, page_kind kind, const page_ref& p, int i) {
        page_message m;
        m.role = role;
        m.kind = kind;
        m.committed = i < track.committed;
        m.layer = layer;
        m.first_token = track[i].first_token;
        m.tokens = p->tokens;
        m.used = track[i].tokens;
        m.skip = track[i].skip;
        m.room = track[i].room;
        m.sinks = track[i].sinks;
        m.shift = track[i].shift;
        m.kv_heads = shape.kv_heads;
        m.dim = shape.dim(role);
        m.layer_tokens = track.tokens;
        m.not_finite = p->not_finite;
        m.scheme = identity_of(of.table(role)[p->format]);
        m.data = {p->data(), p->bytes};
        quantize_page(write, m);
    };
    for (const tensor role : {tensor::key, tensor::value})
        for (int i = 0; i < track.size(); ++i) {
            if (const page_ref& copy = track[i].copies[static_cast<int>(role)])
                send(role, page_kind::copy, copy, i);
            send(role, page_kind::page, detail::clean_page(of.window(), track, i, role, shape, g, scratch),
                 i);
        }
}

/// Collects the pages of one sequence. Not for several threads at once.
class page_receiver {
public:
    explicit page_receiver(cache& of)
        : cache_(of), received_(2 * static_cast<std::size_t>(of.shape().layers)) {}

    /// Copies a page into the cache. Raises kvq::error if it does not fit the cache; nothing changes then.
    void accept(const page_message& m) { accept_as(m, m.role); }

    /// The sequence, if its pages are complete and every layer has this many tokens (kvq::error otherwise). The receiver is then empty.
    /// Only this check detects that all pages of a layer are lost.
    [[nodiscard]] sequence finish(int tokens) {
        for (std::size_t layer = 0; 2 * layer < received_.size(); ++layer) {
            const int came = check(layer, 0, received_[2 * layer]).tokens;
            detail::expect(came == tokens, detail::layer_text(layer, tensor::key), ": ", came,
                           " tokens were received, not ", tokens);
        }
        return finish();
    }
    /// The same; the messages give the length of each layer.
    [[nodiscard]] sequence finish() {
        sequence s = cache_.new_sequence();
        auto& tracks = detail::sequence_access::tracks(s);
        for (std::size_t layer = 0; layer < tracks.size(); ++layer) {
            extent found[2];
            for (std::size_t role = 0; role < 2; ++role)
                found[role] = check(layer, role, received_[2 * layer + role]);
            const bool same_spans = std::equal(
                received_[2 * layer].begin(), received_[2 * layer].end(), received_[2 * layer + 1].begin(),
                received_[2 * layer + 1].end(),
                [](const auto& k, const auto& v) { return k.first == v.first && k.second.alike(v.second); });
            detail::expect(same_spans && found[0].committed == found[1].committed, "layer ", layer,
                           " was received with keys of ", found[0].tokens, " tokens (", found[0].committed,
                           " pages committed) and values of ", found[1].tokens, " (", found[1].committed,
                           ")");
            detail::layer_track& track = tracks[layer];
            fill(track, &received_[2 * layer]);
            track.tokens = found[0].tokens;
            track.committed = found[0].committed;
            track.drop_copies(cache_.geometry(), cache_.options().rollback);
            track.join_copies();
            track.join_pages();
        }
        for (auto& list : received_) list.clear();
        return s;
    }

private:
    struct received {
        page_span span;  // without pages
        int layer_tokens;
        bool committed;
        page_ref page, copy;

        bool alike(const received& o) const noexcept {
            return span.tokens == o.span.tokens && span.skip == o.span.skip && span.room == o.span.room &&
                   span.sinks == o.span.sinks && span.shift == o.span.shift;
        }
    };
    /// The key is the position of the first token.
    using received_pages = std::map<int, received>;
    struct extent {
        int tokens = 0;
        int committed = 0;
    };

    void accept_as(const page_message& m, tensor tensor_of) {
        const cache_shape& shape = cache_.shape();
        const page_geometry g = cache_.geometry();
        detail::expect(m.layer >= 0 && m.layer < shape.layers && m.kv_heads == shape.kv_heads &&
                           m.dim == shape.dim(tensor_of),
                       "a page of layer ", m.layer, ", ", m.kv_heads, " heads x ", m.dim,
                       " channels does not belong to a cache of ", shape.layers, " layers, ", shape.kv_heads,
                       " x ", shape.dim(tensor_of));
        const auto layer = static_cast<std::size_t>(m.layer), role = static_cast<std::size_t>(tensor_of);
        const int capacity = g.capacity(m.sinks);
        const page_span span{m.first_token, m.used, m.room == 0 ? capacity : m.room, {}, {}, m.skip,
                             m.sinks,       m.shift};
        const bool last = !span.full();  // check() looks for others behind it
        detail::expect(
            detail::layer_track::is_possible(span, m.committed, last, g) &&
                m.tokens == (m.committed ? capacity : g.window_tokens(m.first_token, m.used, span.room)),
            detail::layer_text(layer, tensor_of), ": a page of ", m.tokens, " tokens at ", m.first_token,
            ", of which it shows ", m.used, ", does not belong to a cache with ", g.sinks, " sinks and ",
            g.page_tokens, " tokens per page");
        detail::expect_shift(cache_.rotations(), m.shift, detail::layer_text(layer, tensor_of),
                             ": keys that");
        const bool copy = m.kind == page_kind::copy;
        const int format = detail::index_of_identity(cache_.table(tensor_of), m.scheme);
        if (format < 0)
            detail::raise_unknown_format(cache_.table(tensor_of), m.scheme,
                                         detail::layer_text(layer, tensor_of) + " is");
        detail::expect(copy ? format == 0 && m.committed && m.skip == 0 && span.full() && !m.sinks
                            : format == 0 || (m.committed && !m.sinks),
                       detail::layer_text(layer, tensor_of), ": the page at ", m.first_token,
                       " is quantized or copied, but not committed");
        const std::size_t bytes = cache_.page_bytes(tensor_of, format, m.tokens);
        detail::expect(bytes == m.data.size(), detail::layer_text(layer, tensor_of), ": a page of ",
                       format_text(cache_.table(tensor_of)[format]), " has ", m.data.size(),
                       " bytes, here it would have ", bytes);
        received_pages& list = received_[2 * layer + role];
        const received fresh{span, m.layer_tokens, m.committed, {}, {}};
        const auto known = list.find(m.first_token);
        if (known != list.end()) {
            const received& r = known->second;
            detail::expect(!(copy ? r.copy : r.page), detail::layer_text(layer, tensor_of), ": the page at ",
                           m.first_token, " came twice");
            detail::expect(r.alike(fresh) && r.committed == m.committed && r.layer_tokens == m.layer_tokens,
                           detail::layer_text(layer, tensor_of), ": the page at ", m.first_token,
                           " and its 16-bit copy do not belong together");
        }
        page_ref p = cache_.pool().allocate(bytes, format, m.tokens);
        std::memcpy(p->data(), m.data.data(), bytes);
        p->not_finite = m.not_finite;
        received& r = known != list.end() ? known->second : list.insert({m.first_token, fresh}).first->second;
        (copy ? r.copy : r.page) = std::move(p);
    }

    /// Checks that the pages form a sequence without gaps.
    extent check(std::size_t layer, std::size_t role, const received_pages& list) const {
        const page_geometry g = cache_.geometry();
        const std::string me = detail::layer_text(layer, static_cast<tensor>(role));
        extent found;
        int spans = 0, expected = 0;
        for (const auto& [first, r] : list) {
            expected = detail::larger(expected, r.layer_tokens);
            detail::expect(r.page && first == found.tokens, me, ": the page before token ",
                           r.page ? first : r.span.end(), " is missing");
            detail::expect(!r.committed || found.committed == spans, me, ": the page at ", first,
                           " is committed, but not the one before");
            found.committed += r.committed;
            found.tokens += r.span.tokens;
            ++spans;
        }
        std::vector<page_span> held;
        for (const auto& [first, r] : list) {
            held.push_back(r.span);
            detail::expect(
                detail::layer_track::is_possible(r.span, r.committed, r.span.end() == found.tokens, g), me,
                " was received with ", found.tokens, " tokens, of which ", r.span.tokens, " from ", first,
                " on are in a page for ", r.span.room);
        }
        const auto committed = static_cast<std::size_t>(found.committed);
        detail::expect(detail::layer_track::may_wait(held, committed, found.tokens, g), me,
                       " was received with ", found.tokens, " tokens and ", found.committed,
                       " committed pages, which is inconsistent");
        detail::expect(expected == 0 || found.tokens == expected, me, ": ", found.tokens,
                       " tokens were received, of ", expected);
        return found;
    }

    /// lists: those of K and V, which have the same spans.
    void fill(detail::layer_track& track, received_pages* lists) const {
        track.spans.reserve(detail::table_capacity(lists[0].size()));
        for (auto k = lists[0].begin(), v = lists[1].begin(); k != lists[0].end(); ++k, ++v) {
            track.spans.push_back(k->second.span);
            track.spans.back().pages = {k->second.page, v->second.page};
            track.spans.back().copies = {k->second.copy, v->second.copy};
        }
    }

    cache& cache_;
    std::vector<received_pages> received_;  // [layer][K, V]
};

}  // namespace kvq::inline KVQ_TAGGED
