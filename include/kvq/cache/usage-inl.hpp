// Definitions of usage.hpp.
#pragma once

#include "../core/error.hpp"
#include "sequence_access.hpp"
#include "usage.hpp"

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC std::vector<usage_row> usage_rows(const sequence& s) {
    const cache& of = detail::sequence_access::cache(s);
    std::vector<usage_row> rows;
    for (int layer = 0; layer < of.layer_count(); ++layer)
        for (const tensor role : of.tensors(layer)) {
            const cache_shape& shape = of.shape(layer);
            const detail::format_table& formats = of.table(role);
            std::vector<usage_row> by_format(static_cast<std::size_t>(formats.size()));
            const auto add = [&](const detail::held_page& p) {
                if (p.copy) return;
                usage_row& row = by_format[static_cast<std::size_t>(p.held.format)];
                const format& f = formats[p.held.format];
                const std::size_t codes =
                    f.functions().code_bytes(f.scheme(), {role, p.held.tokens, shape.dim(role)}) *
                    static_cast<std::size_t>(shape.kv_heads);
                row.layer = layer;
                row.role = role;
                row.format = p.held.format;
                row.name = f.asked_name();
                row.scheme = f.name();
                row.codes += codes;
                row.parameters += p.held.bytes - codes;
                row.slack += p.slack();
                row.shared += p.shared() ? p.held.bytes : 0;
                ++row.pages;
                row.tokens += p.shown;
                row.room += p.held.tokens;
                row.bookkeeping += sizeof(page);
            };
            detail::sequence_access::tables(s)[static_cast<std::size_t>(layer)].for_each_page(
                static_cast<std::size_t>(role), add);
            for (usage_row& row : by_format)
                if (row.pages > 0) rows.push_back(std::move(row));
        }
    return rows;
}

}}
