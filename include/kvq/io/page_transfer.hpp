// A sequence page by page from one process to another: prefill here, decode there.
//
//   send_pages(sequence, layer, sink)         every page of one layer as messages, as soon as the layer is read
//   page_receiver receiver(cache);            elsewhere
//   receiver.accept(decode_page(bytes));      in any order
//   auto sequence = receiver.finish(tokens);  when all have come
//
// The receiving cache has the sender's shape, window, sinks, recent and page_tokens, and lists the schemes of its pages, in any
// order; later pages are coded to its own formats. If both caches are alike, the two sequences have the same future.
#pragma once

#include <algorithm>
#include <map>

#include "../cache/sequence.hpp"
#include "clean_page.hpp"
#include "page_wire.hpp"

namespace kvq::inline v0_1 {

/// Writes the pages of one layer to a sink, a message each: sinks, originals, pages, first K, then V.
template <class Cache, byte_sink Sink>
void send_pages(const sequence<Cache>& s, int layer, Sink&& write) {
    const Cache& cache = detail::sequence_access::cache(s);
    const cache_shape& shape = cache.shape();
    detail::expect(layer >= 0 && layer < shape.layers, "layer ", layer, " is not among the ", shape.layers,
                   " layers of the cache");
    const detail::layer_track& track = detail::sequence_access::tracks(s)[static_cast<std::size_t>(layer)];
    const page_geometry g = cache.geometry();
    page_pool scratch(cache.pool().memory());
    const auto send = [&](tensor role, page_kind kind, const page_ref& p, int first, bool committed) {
        page_message m;
        m.role = role;
        m.kind = kind;
        m.committed = committed;
        m.layer = layer;
        m.first_token = first;
        m.tokens = p->tokens;
        m.used = detail::smaller(p->tokens, track.tokens - first);
        m.kv_heads = shape.kv_heads;
        m.dim = shape.dim(role);
        m.layer_tokens = track.tokens;
        m.not_finite = p->not_finite;
        const auto name = [&](const auto& table) {
            m.scheme = table.visit(p->format, [](const auto& scheme) { return identity_of(scheme); });
        };
        role == tensor::key ? name(cache.keys()) : name(cache.values());
        const page_ref clean = detail::clean_page<typename Cache::window>(p, role, shape, m.used, scratch);
        m.data = {clean->data(), clean->bytes};
        encode_page(write, m);
    };
    for (const tensor role : {tensor::key, tensor::value}) {
        const detail::page_table& table = track[role];
        if (table.sink) send(role, page_kind::sink, table.sink, 0, false);
        int position = table.first_original();
        for (const page_ref& p : table.originals)
            send(role, page_kind::original, p, g.first_token(position++), true);
        for (int i = 0; i < static_cast<int>(table.pages.size()); ++i)
            send(role, page_kind::page, table.pages[static_cast<std::size_t>(i)], g.first_token(i),
                 i < track.committed);
    }
}

/// Collects the pages of one sequence. Not for several threads at once.
template <class Cache>
class page_receiver {
public:
    explicit page_receiver(Cache& cache)
        : cache_(cache), received_(2 * static_cast<std::size_t>(cache.shape().layers)) {}

    /// Copies a page into the cache. Raises kvq::error if it does not belong there; nothing has changed then.
    void accept(const page_message& m) {
        m.role == tensor::key ? accept_as<tensor::key>(m) : accept_as<tensor::value>(m);
    }

    /// The sequence, if its pages are complete and every layer has this many tokens (kvq::error otherwise). The receiver is empty then.
    /// Only so is the loss of all pages of a layer noticed.
    [[nodiscard]] sequence<Cache> finish(int tokens) {
        for (std::size_t layer = 0; 2 * layer < received_.size(); ++layer) {
            const int came = check(layer, 0, received_[2 * layer]).tokens;
            detail::expect(came == tokens, detail::layer_text(layer, tensor::key), ": ", came,
                           " tokens were received, not ", tokens);
        }
        return finish();
    }
    /// The same for layers of whatever length their messages say.
    [[nodiscard]] sequence<Cache> finish() {
        sequence<Cache> s = cache_.new_sequence();
        auto& tracks = detail::sequence_access::tracks(s);
        for (std::size_t layer = 0; layer < tracks.size(); ++layer) {
            extent found[2];
            for (std::size_t role = 0; role < 2; ++role)
                found[role] = check(layer, role, received_[2 * layer + role]);
            detail::expect(found[0].tokens == found[1].tokens && found[0].committed == found[1].committed,
                           "layer ", layer, " was received with keys of ", found[0].tokens, " tokens (",
                           found[0].committed, " pages committed) and values of ", found[1].tokens, " (",
                           found[1].committed, ")");
            detail::layer_track& track = tracks[layer];
            track.tokens = found[0].tokens;
            track.committed = found[0].committed;
            for (std::size_t role = 0; role < 2; ++role)
                fill(track.tables[role], received_[2 * layer + role], track.tokens);
        }
        for (auto& list : received_) list.clear();
        return s;
    }

private:
    struct received {
        int used;
        int layer_tokens;
        bool committed;
        page_ref page;
    };
    /// In the order of (kind, position).
    using received_pages = std::map<std::pair<page_kind, int>, received>;
    struct extent {
        int tokens = 0;
        int committed = 0;
    };

    template <tensor Role>
    void accept_as(const page_message& m) {
        const cache_shape& shape = cache_.shape();
        const page_geometry g = cache_.geometry();
        detail::expect(m.layer >= 0 && m.layer < shape.layers && m.kv_heads == shape.kv_heads &&
                           m.dim == shape.dim(Role),
                       "a page of layer ", m.layer, ", ", m.kv_heads, " heads x ", m.dim,
                       " channels does not belong to a cache of ", shape.layers, " layers, ", shape.kv_heads,
                       " x ", shape.dim(Role));
        const auto layer = static_cast<std::size_t>(m.layer), role = static_cast<std::size_t>(Role);
        const bool sink = m.kind == page_kind::sink;
        const int offset = m.first_token - g.sinks;
        detail::expect(m.tokens == (sink ? g.sinks : g.page_tokens) &&
                           (sink ? m.first_token == 0 : offset >= 0 && offset % g.page_tokens == 0),
                       detail::layer_text(layer, Role), ": a page of ", m.tokens, " tokens at ",
                       m.first_token, " does not belong to a cache with ", g.sinks, " sinks and ",
                       g.page_tokens, " tokens per page");
        const int format = detail::find_format(cache_.template table<Role>(), m.scheme);
        if (format < 0)
            detail::raise_unknown_format(cache_.template table<Role>(), m.scheme,
                                         detail::layer_text(layer, Role) + " is");
        detail::expect(format == 0 || (m.kind == page_kind::page && m.committed && m.used == m.tokens),
                       detail::layer_text(layer, Role), ": the page at ", m.first_token,
                       " is coded before its time");
        const std::size_t bytes = cache_.template page_bytes<Role>(format, m.tokens);
        detail::expect(bytes == m.data.size(), detail::layer_text(layer, Role), ": a page of ", m.scheme.name,
                       " has ", m.data.size(), " bytes, here it would have ", bytes);
        const int position = sink ? 0 : offset / g.page_tokens;
        received_pages& list = received_[2 * layer + role];
        detail::expect(list.count({m.kind, position}) == 0, detail::layer_text(layer, Role), ": the page at ",
                       m.first_token, " came twice");
        page_ref p = cache_.pool().allocate(bytes, format, m.tokens);
        std::memcpy(p->data(), m.data.data(), bytes);
        p->not_finite = m.not_finite;
        list.insert({{m.kind, position}, {m.used, m.layer_tokens, m.committed, std::move(p)}});
    }

    /// Checks that the pages are a sequence without holes.
    extent check(std::size_t layer, std::size_t role, const received_pages& list) const {
        const page_geometry g = cache_.geometry();
        const std::string me = detail::layer_text(layer, static_cast<tensor>(role));
        extent found;
        int pages = 0, originals_end = -1, expected = 0;
        for (const auto& [where, r] : list) {
            const auto [kind, position] = where;
            expected = detail::larger(expected, r.layer_tokens);
            if (kind == page_kind::sink) {
                found.tokens = r.used;
            } else if (kind == page_kind::original) {
                detail::expect(r.committed && (originals_end < 0 || position == originals_end), me,
                               ": originals with a gap before page ", position);
                originals_end = position + 1;
            } else {
                detail::expect(position == pages && r.used > 0 && found.tokens == g.first_token(pages), me,
                               ": the page before token ", g.first_token(position), " is missing");
                detail::expect(!r.committed || found.committed == pages, me, ": page ", position,
                               " is committed, but not the one before");
                found.committed += r.committed;
                found.tokens += r.used;
                ++pages;
            }
        }
        detail::expect(list.empty() == (found.tokens == 0) && found.committed >= g.committed(found.tokens) &&
                           (found.committed == 0 || g.first_token(found.committed) <= found.tokens) &&
                           originals_end <= found.committed,
                       me, " was received with ", found.tokens, " tokens and ", found.committed,
                       " committed pages, which is inconsistent");
        detail::expect(expected == 0 || found.tokens == expected, me, ": ", found.tokens,
                       " tokens were received, of ", expected);
        return found;
    }

    void fill(detail::page_table& table, const received_pages& list, int tokens) const {
        const page_geometry g = cache_.geometry();
        const int rollback = cache_.options().rollback;
        if (tokens == 0) return;
        table.pages.reserve(detail::table_capacity(static_cast<std::size_t>(g.pages(tokens))));
        const auto originals = static_cast<std::size_t>(std::count_if(
            list.begin(), list.end(), [](const auto& r) { return r.first.first == page_kind::original; }));
        const std::size_t usual = table.target == 0 ? 0 : detail::originals_capacity(rollback, g.page_tokens);
        table.originals.reserve(detail::larger(usual, originals));
        for (const auto& [where, r] : list) {
            const auto [kind, position] = where;
            if (kind == page_kind::sink)
                table.sink = r.page;
            else if (kind == page_kind::page)
                table.pages.push_back(r.page);
            else if (g.commit_at(position) > tokens - rollback)
                table.keep_original(position, r.page);
        }
        table.join_originals();
    }

    Cache& cache_;
    std::vector<received_pages> received_;  // [layer][K, V]
};

}  // namespace kvq::inline v0_1
