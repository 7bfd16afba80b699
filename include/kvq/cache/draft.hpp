// Drafted tokens of a layer: they wait in 16-bit pages of their own, behind the accepted tokens, until keep()
// takes a path of them.
//
//   [sinks][page] ... [open page][draft]     the draft is the last span; no other page is written, quantized
//                                            or moved for it
//
//   keep(path):  remove the draft from every layer, then append rows path[0], path[1], ... of it, as
//                sequence::append does
//
// Contract: after keep() a sequence has the pages, bytes and tables that appending the accepted tokens alone
// would have given: a draft changes no page of the accepted text, and a row of a 16-bit page is read back
// exactly. keep() takes all memory before anything changes (strong exception guarantee). One writer per
// sequence.
#pragma once

#include <cstring>
#include <span>

#include "../attention/token_tree.hpp"
#include "../core/float_environment.hpp"
#include "chunk.hpp"
#include "window.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

inline constexpr int most_drafted = page_geometry::most_drafted;
static_assert(most_drafted == token_tree::most_tokens);

/// Tokens for which the pages of a draft have memory.
constexpr int draft_room(int tokens) noexcept { return round_up(tokens, page_geometry::window_step); }

/// Upper bound of the bytes of drafts of n tokens in all layers. A page that becomes too short is held until
/// the longer one is written.
inline std::size_t draft_pages_bytes(const cache& of, int n) {
    const int room = draft_room(n), shorter = larger(0, room - page_geometry::window_step);
    std::size_t all = 0, most_shorter = 0;
    for (int layer = 0; layer < of.layer_count(); ++layer) {
        if (!of.takes_steps(layer)) continue;
        const auto pages = [&](int tokens) {
            std::size_t bytes = 0;
            for (const tensor role : of.tensors(layer))
                bytes += tokens == 0 ? 0 : page_pool::allocation(of.page_bytes(role, layer, 0, tokens));
            return bytes;
        };
        all += pages(room);
        most_shorter = larger(most_shorter, pages(shorter));
    }
    return all + most_shorter;
}

/// Adds k.tokens tokens to the draft of a layer. k: [n][kv_heads][head_dim], v: [n][kv_heads][value_dim],
/// checked by the caller.
inline void append_draft(cache& of, int layer, page_table& table, const input_view& k, const input_view& v) {
    const bool begins = table.draft == 0;
    const int drafted = table.draft + k.tokens;
    page_span span{table.tokens - table.draft, drafted, drafted, {}, {}};
    if (!begins) span.pages = table.spans.back().pages;
    for (const tensor tensor_of : of.tensors(layer)) {
        const auto role = static_cast<std::size_t>(tensor_of);
        page_ref& held = span.pages[role];
        // This reference is the second one of a page that only this sequence holds.
        if (held && held.references() == 2 && held->tokens >= drafted) continue;
        page_ref larger_page = new_window_page(of, layer, static_cast<int>(role), draft_room(drafted));
        if (held)
            copy_tokens(of.table(tensor_of).window_type(), *held, *larger_page, tensor_of,
                        of.shape(layer).dim(tensor_of), of.shape(layer).kv_heads, table.draft);
        held = std::move(larger_page);
    }
    if (begins) {
        const std::size_t capacity = table.spans.capacity();
        table.spans.reserve(table_capacity(table.spans.size() + 1 + static_cast<std::size_t>(table.freed)));
        table.table_before = capacity;
        table.spans.emplace_back();
    }
    for (const tensor tensor_of : of.tensors(layer)) {
        const input_view& rows = tensor_of == tensor::key ? k : v;
        write_tokens(of.window(), *span.pages[static_cast<std::size_t>(tensor_of)], tensor_of, rows.dim, rows,
                     0, rows.tokens, table.draft);
    }
    table.tokens += k.tokens;
    table.draft = drafted;
    table.spans.back() = std::move(span);
}

/// keep() on its way: the drafts of all layers, and the accepted tokens that take their places.
///
///   kept_drafts kept(cache, tables);   removes the drafts
///   kept.append(path, scratch);        stages and writes the accepted tokens in every layer that had a draft
///   kept.commit();                     cannot fail; without it, the destructor puts the drafts back
class kept_drafts {
public:
    kept_drafts(cache& of, resource_vector<page_table>& tables)
        : cache_(&of),
          drafts_(of.pool().memory()),
          chunks_(of.pool().memory()),
          scratch_(of.pool().memory()),
          rows_{resource_vector<std::byte>(of.pool().memory()),
                resource_vector<std::byte>(of.pool().memory())} {
        int most = 0, drafts = 0;
        for (const page_table& table : tables) {
            most = larger(most, table.draft == 0 ? 0 : table.spans.back().pages[0]->tokens);
            drafts += table.draft != 0;
        }
        drafts_.reserve(static_cast<std::size_t>(drafts));
        chunks_.reserve(static_cast<std::size_t>(drafts));
        for (const tensor role : {tensor::key, tensor::value}) {
            std::size_t row = 0;
            for (std::size_t layer = 0; layer < tables.size(); ++layer)
                if (tables[layer].draft > 0) row = larger(row, row_values(static_cast<int>(layer), role));
            const std::size_t values = static_cast<std::size_t>(most) * row;
            rows_[static_cast<std::size_t>(role)].resize(values * size_of(type()));
            scratch_.resize(larger(scratch_.size(), values));
        }
        for (std::size_t layer = 0; layer < tables.size(); ++layer) {
            page_table& table = tables[layer];
            if (table.draft == 0) continue;
            drafts_.push_back({&table, static_cast<int>(layer), table.draft, table.table_before,
                               std::move(table.spans.back()),
                               resource_vector<page_span>(drafts_.get_allocator())});
            table.drop_draft();
        }
    }
    kept_drafts(const kept_drafts&) = delete;
    kept_drafts& operator=(const kept_drafts&) = delete;
    // NOLINTNEXTLINE(bugprone-exception-escape): tables grow within their capacity
    ~kept_drafts() {
        chunks_.clear();
        for (draft& d : drafts_) {
            d.table->spans.push_back(std::move(d.span));  // within the capacity
            d.table->tokens += d.tokens;
            d.table->draft = d.tokens;
            d.table->table_before = d.table_before;
        }
    }

    /// path: ascending, below the tokens of every draft. scratch: as for chunk::quantize().
    void append(std::span<const int> path, float* scratch) {
        const int accepted = static_cast<int>(path.size());
        for (draft& d : drafts_) {
            // A table that only the draft made longer becomes as short as it was.
            std::size_t capacity = d.table_before;
            if (accepted > 0)
                capacity = larger(capacity, d.table->capacity_after(accepted, cache_->geometry()));
            d.shorter = capacity < d.table->spans.capacity();
            if (d.shorter) d.spans.reserve(capacity);
            if (accepted == 0) continue;
            chunks_.emplace_back(*cache_, *d.table, d.layer, accepted,
                                 pages_of_append(*cache_, d.layer, *d.table, accepted), nullptr);
            chunks_.back().stage();
        }
        for (std::size_t i = 0; i < chunks_.size(); ++i) {
            visit_float_type(type(), [&]<class Window>(Window) {
                chunks_[i].write(rows<Window>(drafts_[i], tensor::key, path),
                                 rows<Window>(drafts_[i], tensor::value, path), scratch);
            });
            chunks_[i].plan_keys();
            for (int job = 0; job < chunks_[i].jobs(); ++job) chunks_[i].quantize(job, scratch);
        }
    }
    // NOLINTNEXTLINE(bugprone-exception-escape): as above
    void commit() noexcept {
        for (chunk& c : chunks_) c.commit();
        for (draft& d : drafts_) {
            if (!d.shorter) continue;
            for (page_span& span : d.table->spans) d.spans.push_back(std::move(span));
            d.table->spans.swap(d.spans);
        }
        drafts_.clear();
    }

private:
    struct draft {
        page_table* table;
        int layer, tokens;
        std::size_t table_before;
        page_span span;
        resource_vector<page_span> spans;
        bool shorter = false;  // `spans` take the place of a longer table
    };

    float_type type() const noexcept { return cache_->table(tensor::key).window_type(); }
    std::size_t row_values(int layer, tensor role) const noexcept {
        return static_cast<std::size_t>(cache_->shape(layer).kv_heads) *
               static_cast<std::size_t>(cache_->shape(layer).dim(role));
    }
    /// The accepted rows of a draft, in the type of the window: exactly what its pages hold.
    template <class Window>
    input_view rows(const draft& d, tensor role, std::span<const int> path) {
        const int dim = cache_->shape(d.layer).dim(role), heads = cache_->shape(d.layer).kv_heads;
        if (static_cast<std::size_t>(role) >= cache_->tensors(d.layer).size())
            return token_view<Window>(nullptr, 0, heads, dim);
        const page& from = *d.span.pages[static_cast<std::size_t>(role)];
        const block_shape block{role, from.tokens, dim};
        const format& window = cache_->table(role)[0];
        const std::size_t bytes = window.block_bytes(block);
        auto* const to = reinterpret_cast<Window*>(rows_[static_cast<std::size_t>(role)].data());
        const token_view<Window> all(to, from.tokens, heads, dim);
        const default_arithmetic arithmetic;
        for (int h = 0; h < heads; ++h)
            window.functions().dequantize(window.scheme(), block, block_id{d.layer, h},
                                          from.data() + bytes * static_cast<std::size_t>(h), type(),
                                          all.at(0, h), all.token_stride, scratch_.data());
        const std::size_t row_bytes = row_values(d.layer, role) * sizeof(Window);
        for (std::size_t i = 0; i < path.size(); ++i)
            std::memmove(static_cast<void*>(all.at(static_cast<int>(i), 0)), all.at(path[i], 0), row_bytes);
        return all.slice(0, static_cast<int>(path.size()));
    }

    cache* cache_;
    resource_vector<draft> drafts_;
    resource_vector<chunk> chunks_;
    resource_vector<float> scratch_;
    resource_vector<std::byte> rows_[2];  // K, V: one draft
};

}}}  // namespace kvq::detail
