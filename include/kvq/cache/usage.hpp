// Where the bytes of a sequence are: by layer, tensor and format, codes and parameters apart.
#pragma once

#include "cache.hpp"

namespace kvq::inline v0_1 {

/// Pages of one layer and tensor that are in one format. Format 0 is the window: sinks, recent tokens, pages not yet coded.
struct usage_row {
    int layer = 0;
    tensor role = tensor::key;
    int format = 0;
    std::string scheme;
    int pages = 0;
    int tokens = 0;
    std::size_t codes = 0;  ///< bytes of codes or of 16/32-bit values
    std::size_t parameters =
        0;  ///< bytes of scales, biases and padding; all of the block where codes stand nowhere apart
    std::size_t slack = 0;        ///< part of `codes` that no token uses yet
    std::size_t bookkeeping = 0;  ///< page headers
};

/// One row per layer, tensor and format that occurs, in this order. Their codes and parameters add up to
/// usage_report::coded + window. O(pages).
template <class Cache>
[[nodiscard]] std::vector<usage_row> usage_rows(const sequence<Cache>& s) {
    const Cache& cache = detail::sequence_access::cache(s);
    const cache_shape& shape = cache.shape();
    std::vector<usage_row> rows;
    const auto add = [&]<tensor Role>(int layer) {
        std::vector<usage_row> formats(static_cast<std::size_t>(
            Role == tensor::key ? Cache::key_table::size : Cache::value_table::size));
        const layer_pages pages = s.pages(layer);
        for (int e = 0; e < pages.entries(); ++e) {
            const layer_pages::entry entry = pages.at(e);
            const page& p = Role == tensor::key ? *entry.keys : *entry.values;
            usage_row& row = formats[static_cast<std::size_t>(p.format)];
            const block_shape block{Role, p.tokens, shape.dim(Role)};
            cache.template table<Role>().visit(p.format, [&]<class S>(const S& scheme) {
                std::size_t codes = 0;
                if constexpr (full_precision<S>)
                    codes = scheme.block_bytes(block);
                else if constexpr (foldable<S>)
                    codes = scheme.codes(block).bytes();
                row.codes += codes * static_cast<std::size_t>(shape.kv_heads);
                row.parameters += p.bytes - codes * static_cast<std::size_t>(shape.kv_heads);
                row.scheme = scheme.name();
            });
            if (p.format == 0)
                row.slack += p.bytes - p.bytes / static_cast<std::size_t>(p.tokens) *
                                           static_cast<std::size_t>(entry.tokens);
            ++row.pages;
            row.tokens += entry.tokens;
            row.bookkeeping += sizeof(page);
        }
        for (std::size_t f = 0; f < formats.size(); ++f) {
            if (formats[f].pages == 0) continue;
            formats[f].layer = layer;
            formats[f].role = Role;
            formats[f].format = static_cast<int>(f);
            rows.push_back(std::move(formats[f]));
        }
    };
    for (int layer = 0; layer < shape.layers; ++layer) {
        add.template operator()<tensor::key>(layer);
        add.template operator()<tensor::value>(layer);
    }
    return rows;
}

}  // namespace kvq::inline v0_1
