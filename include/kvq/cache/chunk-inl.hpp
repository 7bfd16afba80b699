// Definitions of chunk.hpp.
#pragma once

#include <cstring>
#include <utility>

#include "chunk.hpp"
#include "convert.hpp"
#include "window.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

KVQ_FUNC chunk_pages pages_of_append(const cache& of, int layer, const page_table& table, int n) noexcept {
    const int tokens = of.plan_tokens(layer);
    const bool plans = tokens > 0 && !table.plan && table.tokens + n >= tokens &&
                       of.table(tensor::key)[table.targets[0]].wants_plan();
    return plans ? chunk_pages::after_attend : chunk_pages::at_once;
}

KVQ_FUNC page_ref new_page(cache& of, int layer, int role, int format, int tokens, page_stock* stock) {
    const auto tensor_of = static_cast<tensor>(role);
    const std::size_t bytes = of.page_bytes(tensor_of, layer, format, tokens),
                      lower = of.lower_bytes(tensor_of, layer, format, tokens);
    if (stock)
        if (page_ref p = stock->take({bytes, lower}, format, tokens)) return p;
    return of.pool().allocate(bytes, format, tokens, lower);
}

KVQ_FUNC page_ref new_window_page(cache& of, int layer, int role, int tokens, page_stock* stock) {
    page_ref p = new_page(of, layer, role, 0, tokens, stock);
    std::memset(p->data(), 0, p->bytes);
    return p;
}

KVQ_FUNC page_ref shorter_page(cache& of, int layer, const page& from, int role, int tokens,
                               page_stock* stock) {
    const auto tensor_of = static_cast<tensor>(role);
    page_ref p = new_window_page(of, layer, role, tokens, stock);
    copy_tokens(of.table(tensor::key).window_type(), from, *p, tensor_of, of.shape(layer).dim(tensor_of),
                of.shape(layer).kv_heads, tokens);
    return p;
}

KVQ_FUNC chunk::chunk(cache& of, page_table& table, int layer, int tokens, chunk_pages when,
                      page_stock* stock) noexcept
    : cache_(&of),
      table_(&table),
      stock_(stock),
      layer_(layer),
      before_(table.tokens),
      after_(table.tokens + tokens),
      when_(when),
      spans_before_(table.size()),
      shorter_(of.pool().memory()),
      quantized_(of.pool().memory()) {
    if (!stock_) return;
    shorter_.swap(stock_->shorter);
    quantized_.swap(stock_->quantized);
}

KVQ_FUNC chunk::chunk(chunk&& other) noexcept
    : cache_(other.cache_),
      table_(std::exchange(other.table_, nullptr)),
      stock_(other.stock_),
      layer_(other.layer_),
      before_(other.before_),
      after_(other.after_),
      when_(other.when_),
      plan_(std::move(other.plan_)),
      spans_before_(other.spans_before_),
      first_written_(other.first_written_),
      last_before_(std::move(other.last_before_)),
      temporary_{std::move(other.temporary_[0]), std::move(other.temporary_[1])},
      shorter_(std::move(other.shorter_)),
      quantized_(std::move(other.quantized_)),
      jobs_(other.jobs_) {}

KVQ_FUNC chunk::~chunk() {
    if (table_ == nullptr) return;
    for (const page_ref& p : quantized_)
        if (p) p->plan = {};
    return_staged();
    table_->spans.erase(table_->spans.begin() + spans_before_, table_->spans.end());
    if (last_before_.pages[0]) table_->spans.back() = std::move(last_before_);
    table_->tokens = before_;
    end_lists();
    if (plan_) cache_->drop_plan(layer_, table_->targets[0], plan_);
}

KVQ_FUNC void chunk::stage() {
    page_table& table = *table_;
    const page_geometry g = geometry();
    const std::size_t capacity = table.capacity_after(after_ - before_, g);
    if (stock_)
        stock_->grow(table.spans, static_cast<std::size_t>(layer_), capacity);
    else
        table.spans.reserve(capacity);
    first_written_ = table.has_open_span() ? spans_before_ - 1 : spans_before_;
    if (table.has_open_span() && after_ > before_) stage_open_span();
    table.grow(after_, g, [&](page_span& s) { stage_span(s); });
    const int due = when_ == chunk_pages::shared ? table.committed : table.due(after_, g);
    const std::size_t places = 2 * static_cast<std::size_t>(due - table.committed);
    shorter_.reserve(places);
    quantized_.reserve(places);
    for (int i = table.committed; i < due; ++i) stage_commit(i);
}

KVQ_FUNC void chunk::write(const input_view& k, const input_view& v, float* scratch) {
    for (const tensor role : cache_->tensors(layer_)) write(role, role == tensor::key ? k : v, scratch);
    move_keys(scratch);
}

KVQ_FUNC void chunk::write_head(tensor tensor_of, const input_view& source, int head) {
    const auto role = static_cast<std::size_t>(tensor_of);
    for (int i = first_written_; i < table_->size(); ++i) {
        const page_span& s = (*table_)[i];
        const int from = larger(s.first_token, before_);
        write_tokens(cache_->window(), *s.pages[role], tensor_of, source.dim, source, head, from - before_,
                     s.end() - from, from - s.first_token);
    }
}

KVQ_FUNC void chunk::move_keys(float* scratch) {
    if (first_written_ >= spans_before_ || after_ == before_) return;
    const page_span& s = (*table_)[first_written_];
    const rotation* const rotate = cache_->rotations().at(layer_);
    if (s.shift == 0 || !rotate) return;
    rotate_tokens(cache_->table(tensor::key).window_type(), *s.pages[0], *rotate, -s.shift,
                  shape().dim(tensor::key), shape().kv_heads, before_ - s.first_token, s.end() - before_,
                  scratch);
}

KVQ_FUNC void chunk::write(tensor tensor_of, const input_view& source, float* scratch) {
    const auto role = static_cast<std::size_t>(tensor_of);
    const int dim = shape().dim(tensor_of);
    for (int i = first_written_; i < table_->size(); ++i) {
        const page_span& s = (*table_)[i];
        if (!s.pages[role] && leaves(s)) continue;
        const int from = larger(s.first_token, before_);
        page& to = s.pages[role] ? *s.pages[role] : *temporary_[role];
        if (!s.pages[role]) to.not_finite = 0;  // of the page before
        write_tokens(cache_->window(), to, tensor_of, dim, source, from - before_, s.end() - from,
                     from - s.first_token);
        if (!s.pages[role] && role == 0 && table_->plan)
            choose_plan(*cache_, layer_, to, table_->plan, *quantized(i, role));
        if (!s.pages[role])
            convert_page(cache_->table(tensor_of), shape(), layer_, to, *quantized(i, role), scratch);
    }
}

KVQ_FUNC void chunk::plan_keys() {
    if (when_ == chunk_pages::shared) return;
    if (!table_->plan) plan_ = plan_of_keys(*cache_, *table_, layer_, table_->targets[0]);
    const format& plan = plan_ ? plan_ : table_->plan;
    for (std::size_t at = 0; at < quantized_.size() && plan; at += 2) {
        const int i = table_->committed + static_cast<int>(at / 2);
        const page_ref& from = shorter_[at] ? shorter_[at] : (*table_)[i].pages[0];
        if (quantized_[at] && quantized_[at]->format != 0 && from)
            choose_plan(*cache_, layer_, *from, plan, *quantized_[at]);
    }
}

KVQ_FUNC void chunk::quantize(int job, float* scratch) {
    const int heads = shape().kv_heads, head = job % heads;
    int index = job / heads;
    for (std::size_t at = 0; at < quantized_.size(); ++at) {
        const int i = table_->committed + static_cast<int>(at / 2);
        const page_ref& from = shorter_[at] ? shorter_[at] : (*table_)[i].pages[at % 2];
        if (!quantized_[at] || quantized_[at]->format == 0 || !from || index-- > 0) continue;
        page& to = *quantized_[at];
        const std::uint32_t found = convert_block(cache_->table(static_cast<tensor>(at % 2)), shape(), layer_,
                                                  *from, to, head, scratch);
        add_not_finite(to, found);
        return;
    }
}

KVQ_FUNC void chunk::commit() noexcept {
    page_table& table = *table_;
    const page_geometry g = geometry();
    const int rollback = cache_->options().rollback;
    for (std::size_t at = 0; at < quantized_.size(); ++at) {
        if (!quantized_[at]) continue;
        const int i = table.committed + static_cast<int>(at / 2);
        page_ref& page = table[i].pages[at % 2];
        if (shorter_[at]) put(page, shorter_[at]);
        if (quantized_[at]->format == 0) {  // the page of a closed span, which stays 16 bit
            put(page, quantized_[at]);
            continue;
        }
        page_ref left = table.commit_page(i, at % 2, std::move(quantized_[at]), after_, g, rollback);
        if (stock_) stock_->give_back(std::move(left));
    }
    table.committed += static_cast<int>(quantized_.size() / 2);
    if (plan_) table.plan = std::move(plan_);
    table.drop_copies(g, rollback);
    table.waits = when_ == chunk_pages::shared;
    if (!table.waits)
        table.free_unseen(g, rollback, [this](page_ref p) {
            if (stock_) stock_->give_back(std::move(p));
        });
    table_ = nullptr;
    end_lists();
    if (!stock_) return;
    for (page_ref& p : temporary_) stock_->give_back(std::move(p));
    if (!table.waits) stock_->end_step();
}

KVQ_FUNC chunk::needs chunk::needs_of(const cache& of, int layer, const page_table& table, int tokens,
                                      chunk_pages when) {
    needs n;
    const auto take = [&](const plane_bytes& bytes) { n.taken += page_pool::allocation(bytes.all); };
    if (table.waits)
        for_each_need(of, layer, table, 0, chunk_pages::after_attend, take, [](const plane_bytes&) {});
    for_each_need(of, layer, table, tokens, when, take,
                  [&](const plane_bytes& bytes) { n.returned += page_pool::allocation(bytes.all); });
    return n;
}

KVQ_FUNC std::size_t chunk::count_reserved(const cache& of, int layer, const page_table& table, int n,
                                           page_stock& stock) {
    return for_each_need(
        of, layer, table, n, chunk_pages::after_attend, [&](const plane_bytes& bytes) { stock.takes(bytes); },
        [&](const plane_bytes& bytes) { stock.gives_back(bytes); });
}

KVQ_FUNC bool chunk::needs_copy(const page_span& s, int role, int tokens, const page_geometry& g) noexcept {
    const page_ref& p = s.pages[static_cast<std::size_t>(role)];
    if (!p) return g.window_tokens(s.tokens, s.room) < tokens;
    return p.shared() || p->tokens < tokens;
}

KVQ_FUNC void chunk::put(page_ref& place, page_ref& p) noexcept {
    std::swap(place, p);
    if (stock_) stock_->give_back(std::move(p));
    p = page_ref{};
}

KVQ_FUNC void chunk::return_staged() noexcept {
    if (!stock_) return;
    for (int i = spans_before_; i < table_->size(); ++i)
        for (page_ref& p : table_->spans[static_cast<std::size_t>(i)].pages) stock_->give_back(std::move(p));
    if (last_before_.pages[0])
        for (std::size_t role = 0; role < tensors().size(); ++role) {
            page_ref& p = table_->spans[static_cast<std::size_t>(spans_before_ - 1)].pages[role];
            if (p.get() != last_before_.pages[role].get()) stock_->give_back(std::move(p));
        }
    for (page_ref& p : temporary_) stock_->give_back(std::move(p));
    for (auto* const list : {&shorter_, &quantized_})
        for (page_ref& p : *list) stock_->give_back(std::move(p));
}

KVQ_FUNC void chunk::end_lists() noexcept {
    shorter_.clear();
    quantized_.clear();
    if (!stock_ || !stock_->reserved()) return;
    stock_->shorter.swap(shorter_);
    stock_->quantized.swap(quantized_);
}

KVQ_FUNC page_ref& chunk::quantized(int i, std::size_t role) {
    return quantized_[2 * static_cast<std::size_t>(i - table_->committed) + role];
}

KVQ_FUNC void chunk::stage_open_span() {
    page_span& s = table_->spans.back();
    const int tokens = s.tokens + smaller(after_ - before_, s.room - s.tokens);
    page_ref larger_pages[2];
    for (const tensor tensor_of : tensors()) {
        const int role = static_cast<int>(tensor_of);
        page& now = *s.pages[static_cast<std::size_t>(role)];
        const float_type window = cache_->table(tensor::key).window_type();
        const int dim = shape().dim(tensor_of), heads = shape().kv_heads;
        if (!needs_copy(s, role, tokens, geometry())) {
            now.not_finite = held_not_finite(window, now, tensor_of, dim, heads, s.tokens);
            continue;
        }
        larger_pages[role] = window_page(role, geometry().window_tokens(tokens, s.room));
        copy_tokens(window, now, *larger_pages[role], tensor_of, dim, heads, s.tokens);
    }
    last_before_ = s;
    for (int role = 0; role < 2; ++role)
        if (larger_pages[role]) s.pages[role] = std::move(larger_pages[role]);
}

KVQ_FUNC void chunk::stage_span(page_span& s) {
    const page_geometry g = geometry();
    if (when_ == chunk_pages::at_once && leaves(s)) return;
    const bool passes = when_ == chunk_pages::at_once && !table_->held &&
                        page_table::passes(s, after_, g, cache_->options().rollback);
    for (int role = 0; role < static_cast<int>(tensors().size()); ++role) {
        if (!passes || table_->targets[role] == 0)
            s.pages[role] = window_page(role, g.window_tokens(s.tokens, s.room));
        else if (!temporary_[role])
            temporary_[role] = window_page(role, s.room);
    }
}

KVQ_FUNC void chunk::stage_commit(int i) {
    const page_span& s = (*table_)[i];
    for (int role = 0; role < 2; ++role) {
        const int target = s.sinks ? 0 : table_->targets[role];
        quantized_.emplace_back();
        shorter_.emplace_back();
        if (leaves(s) || role == static_cast<int>(tensors().size())) continue;
        page_ref shorter;
        if (s.pages[role] && s.pages[role]->tokens != s.room)
            shorter = shorter_page(*cache_, layer_, *s.pages[role], role, s.room, stock_);
        if (target == 0) {
            quantized_.back() = std::move(shorter);
            continue;
        }
        shorter_.back() = std::move(shorter);
        quantized_.back() = new_page(*cache_, layer_, role, target, s.room, stock_);
        jobs_ += s.pages[role] ? shape().kv_heads : 0;
    }
}

}}}
