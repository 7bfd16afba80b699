// Definitions of page_transfer.hpp.
#pragma once

#include <algorithm>
#include <cstring>

#include "../cache/convert.hpp"
#include "../cache/sequence_access.hpp"
#include "../core/error.hpp"
#include "../format/format_names.hpp"
#include "page_transfer.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

KVQ_FUNC std::optional<latent_channels> latent_channels_of(const layer& l) noexcept {
    if (l.kind == layer_kind::index) return latent_channels{};
    if (l.kind != layer_kind::latent) return {};
    return latent_channels{l.value_dim == 0 ? l.head_dim : l.value_dim, l.rotary_channels};
}

KVQ_FUNC void sent_pages::add(const sequence& s, int layer) {
    for (const tensor role : sequence_access::cache(s).tensors(layer))
        extents_.add(sequence_access::tables(s)[static_cast<std::size_t>(layer)], role,
                     sequence_access::cache(s).geometry());
}

KVQ_FUNC const page_extents& sent_pages::extents() const noexcept { return extents_; }

KVQ_FUNC std::pair<std::uint32_t, bool> sent_pages::number_of(const page& p) {
    const auto [found, is_new] = numbers_.try_emplace(&p, static_cast<std::uint32_t>(numbers_.size() + 1));
    return {found->second, is_new};
}

/// The planes of a page, copied to one place.
inline std::span<const std::byte> in_a_row(const page& p, std::vector<std::byte>& copy) {
    copy.clear();
    p.for_each_plane([&](const std::byte* data, std::size_t n) { copy.insert(copy.end(), data, data + n); });
    return copy;
}

KVQ_FUNC void send_pages(const sequence& s, int layer, const sink_view& write, sent_pages& sent) {
    const cache& of = sequence_access::cache(s);
    const cache_shape& shape = of.shape(layer);
    const page_table& table = sequence_access::tables(s)[static_cast<std::size_t>(layer)];
    sequence_access::expect_none_dropped(s, "send");  // a lost page would look the same
    page_pool scratch(of.pool().memory());
    for (const tensor role : of.tensors(layer)) {
        const written_pages pages(of.window(), table, role, shape, scratch, sent.extents());
        std::vector<std::byte> planes;
        const auto send = [&](page_kind kind, int entry, int i) {
            const written_pages::entry& e = pages.all()[static_cast<std::size_t>(entry)];
            const auto [number, is_new] = sent.number_of(*e.held);
            const int target = table.targets[static_cast<int>(role)];
            page_message m;
            m.role = role;
            m.kind = kind;
            m.committed = i < table.committed;
            m.layer = layer;
            m.first_token = table[i].first_token;
            m.tokens = e.page->tokens;
            m.used = table[i].tokens;
            m.skip = table[i].skip;
            m.room = table[i].room;
            m.sinks = table[i].sinks;
            m.shift = table[i].shift;
            m.kv_heads = shape.kv_heads;
            m.dim = shape.dim(role);
            m.latent = latent_channels_of(of.layers()[static_cast<std::size_t>(layer)]);
            m.layer_tokens = table.tokens;
            m.not_finite = e.page->not_finite;
            m.scheme = identity_of_page(of.table(role), *e.page);
            if (role == tensor::key && table.plan && !table.shows_plan())
                m.target = identity_of_plan(table.plan);
            else if (target != of.target_format(role, layer))
                m.target = identity_of(of.table(role)[target]);
            if (m.shift != 0) m.rotary = of.rotations().identity(layer);
            m.number = number;
            m.is_elsewhere = !is_new;
            if (is_new) m.data = {e.page->data(), e.page->bytes};
            // One message is one run of bytes: the upper plane first.
            if (is_new && e.page->lower) m.data = in_a_row(*e.page, planes);
            quantize_page(write, m);
        };
        for (int i = 0; i < table.size(); ++i) {
            const auto [own, copy] = pages.of_span(i);
            if (copy >= 0) send(page_kind::copy, copy, i);
            send(page_kind::page, own, i);
        }
    }
}

KVQ_FUNC void send_layer(const sequence& s, int layer, const sink_view& write) {
    const int layers = sequence_access::cache(s).layer_count();
    expect(layer >= 0 && layer < layers, "layer ", layer, " is not among the ", layers,
           " layers of the cache");
    if (!sequence_access::cache(s).holds_tokens(layer))
        fail(describe_layer(layer, sequence_access::cache(s).layers()[static_cast<std::size_t>(layer)]),
             sequence_access::cache(s).owner(layer) == layer
                 ? ": it has no pages of tokens, write_recurrent_state(write, sequence.state()) sends all "
                   "state"
                 : ": it has no pages of tokens, those of its owner are sent once");
    sent_pages sent;
    sent.add(s, layer);
    send_pages(s, layer, write, sent);
}

}  // namespace detail

KVQ_FUNC page_receiver::page_receiver(cache& of)
    : cache_(of), received_(2 * static_cast<std::size_t>(of.layer_count())), known_(received_.size()) {}

KVQ_FUNC void page_receiver::accept(const page_message& m) {
    if (staged_)
        staged_->accept(m);
    else
        accept_as(m, m.role);
}

KVQ_FUNC void page_receiver::accept(recurrent_state state) {
    detail::expect(cache_.state_layout() == &state.layout(), "a state of another cache was received");
    state_.emplace(std::move(state));
}

KVQ_FUNC sequence page_receiver::finish(int tokens) {
    (staged_ ? *staged_ : *this).expect_tokens(tokens);
    return finish();
}

KVQ_FUNC sequence page_receiver::finish() {
    // What came stays until nothing can fail.
    sequence s = staged_ ? appended(staged_->built()) : built();
    (staged_ ? *staged_ : *this).forget();
    if (state_) s.state() = std::move(*state_);
    state_.reset();
    return s;
}

KVQ_FUNC void page_receiver::expect_tokens(int tokens) const {
    for (std::size_t layer = 0; 2 * layer < received_.size(); ++layer) {
        if (!cache_.takes_steps(static_cast<int>(layer))) continue;
        const int came = check(layer, 0).tokens;
        detail::expect(came == tokens, detail::layer_text(layer, tensor::key), ": ", came,
                       " tokens were received, not ", tokens);
    }
    detail::expect(!state_ || state_->tokens() == tokens, "a state of ", state_ ? state_->tokens() : 0,
                   " tokens was received, not of ", tokens);
}

KVQ_FUNC sequence page_receiver::built() const {
    detail::expect(!cache_.state_layout() || state_, "the state of the layers was not received");
    sequence s = cache_.new_sequence();
    auto& tables = detail::sequence_access::tables(s);
    for (std::size_t layer = 0; layer < tables.size(); ++layer) {
        extent found[2];
        const bool has_values = cache_.tensors(static_cast<int>(layer)).size() == 2;
        found[0] = found[1] = check(layer, 0);
        if (has_values) found[1] = check(layer, 1);
        const bool same_spans =
            !has_values || std::equal(received_[2 * layer].begin(), received_[2 * layer].end(),
                                      received_[2 * layer + 1].begin(), received_[2 * layer + 1].end(),
                                      [](const auto& k, const auto& v) {
                                          return k.first == v.first && k.second.alike(v.second);
                                      });
        detail::expect(same_spans && found[0].committed == found[1].committed, "layer ", layer,
                       " was received with keys of ", found[0].tokens, " tokens (", found[0].committed,
                       " pages committed) and values of ", found[1].tokens, " (", found[1].committed, ")");
        fill(tables[layer], layer);
        if (converts_) convert(tables[layer], static_cast<int>(layer), found[0].committed);
        tables[layer].restored(found[0].committed, cache_.geometry(static_cast<int>(layer)),
                               cache_.options().rollback, says_all_);
        for (const auto& [first, r] : received_[2 * layer])
            if (r.plan && !converts_) tables[layer].plan = r.plan;
    }
    for (std::size_t layer = 0; layer < tables.size(); ++layer)  // shared layers hold nothing
        std::copy_n(tables[static_cast<std::size_t>(cache_.owner(static_cast<int>(layer)))].targets, 2,
                    tables[layer].targets);
    detail::sequence_access::commit_due(s);
    return s;
}

KVQ_FUNC void page_receiver::forget() {
    std::vector<numbered_pages> kept;
    for (std::size_t i = 0; keeps_ && i < received_.size(); ++i) kept.push_back(numbered(i));
    // No step after this line can fail.
    for (std::size_t i = 0; i < received_.size(); ++i) {
        if (keeps_) known_[i].merge(kept[i]);
        received_[i].clear();
    }
    says_all_ = true;
}

KVQ_FUNC void page_receiver::keep_pages() noexcept {
    keeps_ = true;
    if (staged_) staged_->keep_pages();
}

KVQ_FUNC void page_receiver::convert_pages() noexcept { converts_ = true; }

KVQ_FUNC void page_receiver::convert_pages(const page_layout& sender) {
    for (const received_pages& came : (staged_ ? *staged_ : *this).received_)
        detail::expect(came.empty(), "a receiver is told the pages of its sender before the first one comes");
    cache_options o = cache_.options();
    if (sender.sinks == o.sinks && sender.recent == o.recent && sender.page_tokens == o.page_tokens) {
        staged_.reset();
        staging_.reset();
        return convert_pages();
    }
    detail::sequence_access::expect_no_state(cache_, "a receiver of other pages");
    const auto listed = [&](tensor role) {
        std::vector<format> all;
        for (int i = 1; i < cache_.table(role).size(); ++i) all.push_back(cache_.table(role)[i]);
        return format_list(std::move(all));
    };
    o.keys = listed(tensor::key);
    o.values = listed(tensor::value);
    o.sinks = sender.sinks;
    o.recent = sender.recent;
    o.page_tokens = sender.page_tokens;
    o.byte_budget = page_pool::no_budget;
    o.preallocate = false;
    auto staging =
        std::make_unique<cache>(std::vector<layer>(cache_.layers().begin(), cache_.layers().end()), o);
    auto staged = std::make_unique<page_receiver>(*staging);
    if (keeps_) staged->keep_pages();
    converts_ = true;
    staged_ = std::move(staged);
    staging_ = std::move(staging);
}

KVQ_FUNC sequence page_receiver::appended(sequence from) const {
    auto& tables = detail::sequence_access::tables(from);
    for (std::size_t layer = 0; layer < tables.size(); ++layer) {
        int at = 0;
        for (page_span& s : tables[layer].spans) {
            if (s.first_token != at)
                detail::fail(detail::describe_layer(static_cast<int>(layer), cache_.layers()[layer]),
                             ", has freed tokens ", at, " to ", s.first_token,
                             ": sinks, recent and page_tokens must be the same");
            at = s.end();
            for (std::size_t role = 0; role < 2; ++role)
                if (s.copies[role]) s.pages[role] = s.copies[role];
        }
    }
    sequence to = cache_.new_sequence();
    for (int layer = 0; layer < cache_.layer_count(); ++layer) {
        if (!cache_.holds_tokens(layer)) continue;
        const bool has_values = cache_.tensors(layer).size() == 2;
        const int all = from.tokens(layer), heads = cache_.shape(layer).kv_heads,
                  most = cache_.takes_steps(layer) ? 1024 : all;
        std::vector<float> rows[2];
        for (int first = 0; first < all; first += most) {
            const int n = detail::smaller(most, all - first);
            const auto read = [&](tensor role) {
                const int dim = cache_.shape(layer).dim(role);
                std::vector<float>& x = rows[static_cast<std::size_t>(role)];
                x.resize(static_cast<std::size_t>(n) * static_cast<std::size_t>(heads) *
                         static_cast<std::size_t>(dim));
                from.dequantize(layer, role, first, output_view(x.data(), n, heads, dim));
                return token_view<const float>(x.data(), n, heads, dim);
            };
            const auto k = read(tensor::key);
            to.append(layer, k, has_values ? read(tensor::value) : token_view<const float>());
        }
    }
    return to;
}

KVQ_FUNC void page_receiver::accept_as(const page_message& m, tensor tensor_of) {
    detail::expect(m.layer >= 0 && m.layer < cache_.layer_count(), "a page of layer ", m.layer,
                   " does not belong to a cache of ", cache_.layer_count(), " layers");
    detail::expect(cache_.holds_tokens(m.layer),
                   detail::describe_layer(m.layer, cache_.layers()[static_cast<std::size_t>(m.layer)]),
                   ": it has no pages of tokens");
    detail::expect(static_cast<std::size_t>(tensor_of) < cache_.tensors(m.layer).size(),
                   detail::describe_layer(m.layer, cache_.layers()[static_cast<std::size_t>(m.layer)]),
                   ": it has no pages of values");
    const cache_shape& shape = cache_.shape(m.layer);
    const page_geometry g = cache_.geometry();
    detail::expect(m.kv_heads == shape.kv_heads && m.dim == shape.dim(tensor_of), "a page of layer ", m.layer,
                   ", ", m.kv_heads, " heads x ", m.dim, " channels does not belong to a cache of ",
                   shape.layers, " layers, ", shape.kv_heads, " x ", shape.dim(tensor_of));
    const kvq::layer& mine = cache_.layers()[static_cast<std::size_t>(m.layer)];
    if (m.latent != detail::latent_channels_of(mine)) {
        kvq::layer theirs{m.kv_heads, m.dim};
        if (m.latent) {
            theirs.kind = m.latent->values == 0 ? layer_kind::index : layer_kind::latent;
            theirs.value_dim = m.latent->values;
            theirs.rotary_channels = m.latent->rotary;
        }
        detail::fail("a page of ",
                     m.latent ? detail::describe_layer(m.layer, theirs) : "a layer with keys and values",
                     " does not belong to ", detail::describe_layer(m.layer, mine));
    }
    const auto layer = static_cast<std::size_t>(m.layer), role = static_cast<std::size_t>(tensor_of);
    const int capacity = g.capacity(m.sinks);
    const page_span span{m.first_token, m.used, m.room == 0 ? capacity : m.room, {}, {}, m.skip,
                         m.sinks,       m.shift};
    const bool last = !span.full();  // check() looks for others behind it
    detail::expect(detail::page_table::is_possible(span, m.committed, last, g) &&
                       detail::page_table::may_have_memory(span, m.committed, m.tokens, g),
                   detail::layer_text(layer, tensor_of), ": a page of ", m.tokens, " tokens at ",
                   m.first_token, ", of which it shows ", m.used, ", does not belong to a cache with ",
                   g.sinks, " sinks and ", g.page_tokens, " tokens per page");
    detail::expect_moved_alike(cache_.rotations(), m.layer, m.shift, m.rotary ? &*m.rotary : nullptr,
                               m.number == 0, detail::layer_text(layer, tensor_of) + ": keys that");
    cache_.expect_values_stay(m.layer, m.shift);
    const bool copy = m.kind == page_kind::copy;
    const auto [format, plan] = found(tensor_of, m.scheme);
    const auto check_plan = [&](const kvq::format& f) {
        if (f) f.functions().check(f.scheme(), cache_.shape(m.layer), tensor::key);
    };
    check_plan(plan);
    if (format < 0)
        detail::raise_unknown_format(cache_.table(tensor_of), m.scheme,
                                     detail::layer_text(layer, tensor_of) + " is");
    if (tensor_of == tensor::key) cache_.expect_fits(m.layer, format);
    detail::expect(copy ? format == 0 && m.committed && m.skip == 0 && span.full() && !m.sinks
                        : format == 0 || (m.committed && !m.sinks),
                   detail::layer_text(layer, tensor_of), ": the page at ", m.first_token,
                   " is quantized or copied, but not committed");
    const std::size_t bytes = cache_.page_bytes(tensor_of, m.layer, format, m.tokens);
    detail::expect(m.is_elsewhere || bytes == m.data.size(), detail::layer_text(layer, tensor_of),
                   ": a page of ", format_text(cache_.table(tensor_of)[format]), " has ", m.data.size(),
                   " bytes, here it would have ", bytes);
    int target = -1;
    kvq::format target_plan;
    if (m.target && !converts_) {
        detail::found_identity to = detail::find_identity(cache_.table(tensor_of), *m.target);
        target = to.index;
        target_plan = std::move(to.plan);
        check_plan(target_plan);
        if (target < 0)
            detail::raise_unknown_format(cache_.table(tensor_of), *m.target,
                                         detail::layer_text(layer, tensor_of) + " is to be");
        if (tensor_of == tensor::key) cache_.expect_fits(m.layer, target);
    }
    received_pages& list = received_[2 * layer + role];
    const received fresh{span, m.layer_tokens, m.committed, target, {}, {}, std::move(target_plan)};
    const auto known = list.find(m.first_token);
    if (known != list.end()) {
        const received& r = known->second;
        detail::expect(!(copy ? r.copy : r.own).came, detail::layer_text(layer, tensor_of), ": the page at ",
                       m.first_token, " came twice");
        detail::expect(r.alike(fresh) && r.committed == m.committed && r.layer_tokens == m.layer_tokens &&
                           r.target == target,
                       detail::layer_text(layer, tensor_of), ": the page at ", m.first_token,
                       " and its 16-bit copy do not belong together");
    }
    page_ref p;
    if (!m.is_elsewhere) {
        p = cache_.pool().allocate(bytes, format, m.tokens,
                                   cache_.lower_bytes(tensor_of, m.layer, format, m.tokens));
        std::memcpy(p->data(), m.data.data(), p->upper_bytes());
        if (p->lower) std::memcpy(p->lower, m.data.data() + p->upper_bytes(), p->lower_bytes());
        p->not_finite = m.not_finite;
        p->plan = plan;
    }
    received& r = known != list.end() ? known->second : list.insert({m.first_token, fresh}).first->second;
    (copy ? r.copy : r.own) = slot{true, m.number, std::move(p)};
    says_all_ = says_all_ && m.number > 0;
}

KVQ_FUNC detail::found_identity page_receiver::found(tensor role, const scheme_identity& id) {
    // Most pages have the plan of the page before.
    if (!plan_.plan || id != plan_of_) {
        plan_ = detail::find_identity(cache_.table(role), id);
        plan_of_ = id;
        if (!plan_.plan) return std::exchange(plan_, {});
    }
    return plan_;
}

KVQ_FUNC std::string page_receiver::text_of(std::size_t list) const {
    return detail::layer_text(list / 2, static_cast<tensor>(list % 2));
}

KVQ_FUNC page_receiver::numbered_pages page_receiver::numbered(std::size_t list) const {
    numbered_pages pages;
    for (const auto& [first, r] : received_[list])
        for (const slot* s : {&r.own, &r.copy})
            if (s->page && s->number > 0)
                detail::expect(known_[list].count(s->number) == 0 && pages.emplace(s->number, s->page).second,
                               text_of(list), ": page ", s->number, " at ", first, " came twice");
    return pages;
}

KVQ_FUNC page_ref page_receiver::page_of(const slot& s, std::size_t list, const numbered_pages& pages) const {
    if (s.page || !s.came) return s.page;
    for (const numbered_pages* from : {&pages, &known_[list]})
        if (const auto found = from->find(s.number); found != from->end()) return found->second;
    return {};
}

KVQ_FUNC page_receiver::extent page_receiver::check(std::size_t layer, std::size_t role) const {
    const page_geometry g = cache_.geometry(static_cast<int>(layer));
    const std::size_t list = 2 * layer + role;
    const std::string me = text_of(list);
    const numbered_pages pages = numbered(list);
    extent found;
    int expected = 0, target = -1, front = 0;
    bool in_sinks = true;
    std::vector<page_span> held;
    for (const auto& [first, r] : received_[list]) {
        const auto fits = [&, &r = r](const page_ref& p) {
            return detail::page_table::may_have_memory(r.span, r.committed, p->tokens, g) &&
                   (p->format == 0 || (r.committed && !r.span.sinks));
        };
        expected = detail::larger(expected, r.layer_tokens);
        const page_ref own = page_of(r.own, list, pages), copy = page_of(r.copy, list, pages);
        // Behind its sinks a layer with a window may have freed some.
        const bool follows =
            first == found.tokens || (g.window && in_sinks && front == 0 && first > found.tokens);
        in_sinks = in_sinks && r.span.sinks;
        if (first > found.tokens) front = first;
        detail::expect(own && (copy || !r.copy.came) && follows, me, ": the page before token ",
                       own ? first : r.span.end(), " is missing");
        detail::expect(!r.committed || found.committed == static_cast<int>(held.size()), me, ": the page at ",
                       first, " is committed, but not the one before");
        detail::expect(fits(own) && (!copy || (copy->format == 0 && fits(copy))), me, ": the page at ", first,
                       " cannot be that of another span, in format ", own->format, " for ", own->tokens,
                       " tokens");
        detail::expect(held.empty() || r.target == target, me, ": the page at ", first,
                       " names another format for later pages than the one before");
        target = r.target;
        held.push_back(r.span);
        found.committed += r.committed;
        found.tokens = r.span.end();
    }
    detail::expect(g.window.first_seen(found.tokens) >= front, me, ": the page before token ", front,
                   " is missing");
    for (const auto& [first, r] : received_[list])
        detail::expect(detail::page_table::is_possible(r.span, r.committed, r.span.end() == found.tokens, g),
                       me, " was received with ", found.tokens, " tokens, of which ", r.span.tokens, " from ",
                       first, " on are in a page for ", r.span.room);
    // Keys of the sender may wait for a plan that those of this cache do not have.
    page_geometry waits = g;
    waits.commits_from = detail::larger(g.commits_from, cache_.options().statistics_tokens);
    detail::expect(
        detail::page_table::may_wait(held, static_cast<std::size_t>(found.committed), found.tokens, waits),
        me, " was received with ", found.tokens, " tokens and ", found.committed,
        " committed pages, which is inconsistent");
    detail::expect(expected == 0 || found.tokens == expected, me, ": ", found.tokens,
                   " tokens were received, of ", expected);
    return found;
}

KVQ_FUNC void page_receiver::fill(detail::page_table& table, std::size_t layer) const {
    int freed = 0, at = 0;
    for (const auto& [first, r] : received_[2 * layer]) {
        if (first > at) freed = detail::page_table::freed_spans(first, cache_.geometry());
        at = r.span.end();
    }
    table.spans.reserve(
        detail::table_capacity(received_[2 * layer].size() + static_cast<std::size_t>(freed)));
    for (const auto& [first, r] : received_[2 * layer]) table.spans.push_back(r.span);
    for (std::size_t role = 0; role < 2; ++role) {
        const std::size_t list = 2 * layer + role;
        const numbered_pages pages = numbered(list);
        std::size_t i = 0;
        for (const auto& [first, r] : received_[list]) {
            table.spans[i].pages[role] = page_of(r.own, list, pages);
            table.spans[i++].copies[role] = page_of(r.copy, list, pages);
            if (r.target >= 0 && !converts_) table.targets[role] = r.target;
        }
    }
}

KVQ_FUNC void page_receiver::convert(detail::page_table& table, int layer, int committed) const {
    std::vector<float> numbers;
    for (const tensor role : cache_.tensors(layer)) {
        const auto at = static_cast<std::size_t>(role);
        const int target = cache_.target_format(role, layer);
        // Spans that share a page share the new one.
        std::unordered_map<const page*, page_ref> exact, changed;
        const auto each = [&](auto&& f) {
            for (int i = 0; i < committed; ++i)
                if (!table[i].sinks && table[i].pages[at]->format != target) f(table[i]);
        };
        each([&](page_span& s) {
            if (s.copies[at]) exact[s.pages[at].get()] = s.copies[at];
        });
        each([&](page_span& s) {
            page_ref& to = changed[s.pages[at].get()];
            if (!to) {
                const auto copy = exact.find(s.pages[at].get());
                const page_ref& from = copy == exact.end() ? s.pages[at] : copy->second;
                to = from->format == target
                         ? from
                         : detail::converted_page(cache_, role, layer, *from, target, numbers);
            }
            if (target == 0) s.copies[at] = page_ref{};
            s.pages[at] = to;
        });
    }
}

}}  // namespace kvq
