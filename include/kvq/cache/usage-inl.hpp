// Definitions of usage.hpp.
#pragma once

#include "../core/error.hpp"
#include "sequence_access.hpp"
#include "usage.hpp"

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC std::vector<usage_row> usage_rows(const sequence& s) {
    const cache& of = detail::sequence_access::cache(s);
    const cache_shape& shape = of.shape();
    std::vector<usage_row> rows;
    const auto add = [&](int layer, tensor role) {
        const detail::format_table& listed = of.table(role);
        std::vector<usage_row> formats(static_cast<std::size_t>(listed.size()));
        const detail::page_table& table = detail::sequence_access::tables(s)[static_cast<std::size_t>(layer)];
        table.for_each_page(static_cast<std::size_t>(role), [&](const page& p, int shown) {
            usage_row& row = formats[static_cast<std::size_t>(p.format)];
            const format& f = listed[p.format];
            const std::size_t codes =
                f.functions().code_bytes(f.scheme(), {role, p.tokens, shape.dim(role)}) *
                static_cast<std::size_t>(shape.kv_heads);
            row.codes += codes;
            row.parameters += p.bytes - codes;
            row.name = f.asked_name();
            row.scheme = f.name();
            if (p.format == 0)
                row.slack +=
                    p.bytes - p.bytes / static_cast<std::size_t>(p.tokens) * static_cast<std::size_t>(shown);
            ++row.pages;
            row.tokens += shown;
            row.bookkeeping += sizeof(page);
        });
        for (std::size_t f = 0; f < formats.size(); ++f) {
            if (formats[f].pages == 0) continue;
            formats[f].layer = layer;
            formats[f].role = role;
            formats[f].format = static_cast<int>(f);
            rows.push_back(std::move(formats[f]));
        }
    };
    for (int layer = 0; layer < shape.layers; ++layer)
        for (const tensor role : {tensor::key, tensor::value}) add(layer, role);
    return rows;
}

}}
