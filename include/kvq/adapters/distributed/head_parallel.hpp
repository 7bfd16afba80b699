// Head parallel attention: every rank holds some kv heads of every token, and attends with the query heads of
// these.
//
//   const auto heads = kvq::split(kv_heads, weights);                       the same on every rank
//   kvq::cache cache({.kv_heads = heads[rank].size(), ...}, options);       a rank without heads has no cache
//   sequence.attend(layer, own queries, own outputs);                       no message
//   kvq::gather_heads(channel, heads, own outputs, all outputs);            only where every rank needs all
//                                                                           heads
//
// Heads do not meet in attention, so outputs are those of one cache, bit for bit. A model that multiplies
// outputs with its part of the output projection, and sums over ranks, needs no gather. Formats whose state
// differs by head (rotations, plans of widths) are made for the heads of the rank. Bytes of gather_heads: for
// each token, what a rank has goes to each other rank once.
#pragma once

#include "../../core/token_view.hpp"
#include "message.hpp"
#include "split.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// heads: query heads of each rank, consecutive from 0 on. own: [tokens][heads of this rank][dim], all:
/// [tokens][all heads][dim], of the same type on every rank. Raises the errors of message_channel; `all` may
/// then be written in part.
template <transport Transport, float_format T>
void gather_heads(message_channel<Transport>& channel, std::span<const index_range> heads,
                  const token_view<const T>& own, const token_view<T>& all) {
    const int me = channel.rank();
    detail::expect(static_cast<int>(heads.size()) == channel.ranks() && !heads.empty(), "heads of ",
                   heads.size(), " ranks do not fit ", channel.ranks(), " ranks");
    const auto mine = heads[static_cast<std::size_t>(me)];
    detail::expect(own.heads == mine.size() && all.heads == heads.back().end && own.tokens == all.tokens &&
                       (own.dim == all.dim || own.heads == 0),
                   "rank ", me, " has ", mine.size(), " of ", heads.back().end, " heads, but outputs are ",
                   own.tokens, " x ", own.heads, " x ", own.dim, " of ", all.tokens, " x ", all.heads, " x ",
                   all.dim);
    const std::size_t row = static_cast<std::size_t>(all.dim) * sizeof(T);
    const auto bytes = [&](index_range r) {
        return static_cast<std::size_t>(all.tokens) * static_cast<std::size_t>(r.size()) * row;
    };
    const auto peers = [&](auto&& use) {
        for (int r = 0; r < channel.ranks(); ++r)
            if (r != me && all.tokens > 0) use(r, heads[static_cast<std::size_t>(r)]);
    };
    peers([&](int r, index_range) {
        if (mine.size() == 0) return;
        message m;
        m.reserve(bytes(mine));
        for (int t = 0; t < own.tokens; ++t)
            for (int h = 0; h < own.heads; ++h) m.add(own.at(t, h), row);
        channel.send(r, message_kind::outputs, std::move(m));
    });
    for (int t = 0; t < own.tokens; ++t)
        for (int h = 0; h < own.heads; ++h) std::memcpy(all.at(t, mine.first + h), own.at(t, h), row);
    peers([&](int r, index_range theirs) {
        if (theirs.size() == 0) return;
        message m = channel.receive(r, message_kind::outputs);
        detail::expect(m.size() == bytes(theirs), "rank ", r, " sent ", m.size(), " bytes of outputs for ",
                       theirs.size(), " heads, expected are ", bytes(theirs));
        for (int t = 0; t < all.tokens; ++t)
            for (int h = theirs.first; h < theirs.end; ++h) m.take(all.at(t, h), row);
    });
}

}}  // namespace kvq
