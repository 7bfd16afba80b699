// Bytes of a sequence: by layer, tensor and format, with codes and parameters apart.
//
//   for (const usage_row& row : usage_rows(sequence)) ...      // where the bytes of usage() are
//
// Contract: codes and parameters of all rows add up to usage().quantized + window. A page that several spans show counts once for each tensor.
// A page that other sequences hold, too, counts here as well. Reads only; O(pages).
#pragma once

#include <string>
#include <vector>

#include "sequence.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// Pages of one layer and tensor that are in one format. Format 0 is the window: sinks, recent tokens, pages not yet quantized.
struct usage_row {
    int layer = 0;
    tensor role = tensor::key;
    int format = 0;
    std::string name;    ///< the name that was asked for (format::asked_name)
    std::string scheme;  ///< the scheme behind it
    int pages = 0;
    int tokens = 0;
    std::size_t codes = 0;  ///< bytes of codes or of 16/32-bit values
    std::size_t parameters =
        0;  ///< bytes of scales, biases and padding; all bytes of a block whose codes do not lie apart from the parameters
    std::size_t slack = 0;        ///< part of `codes` that holds no token yet
    std::size_t bookkeeping = 0;  ///< page headers
};

/// One row per layer, tensor and format in use, in this order. Codes and parameters of all rows add up to
/// usage_report::quantized + window. O(pages).
[[nodiscard]] inline std::vector<usage_row> usage_rows(const sequence& s) {
    const cache& of = detail::sequence_access::cache(s);
    const cache_shape& shape = of.shape();
    std::vector<usage_row> rows;
    const auto add = [&](int layer, tensor role) {
        const detail::format_table& table = of.table(role);
        std::vector<usage_row> formats(static_cast<std::size_t>(table.size()));
        const detail::page_table& track = detail::sequence_access::tracks(s)[static_cast<std::size_t>(layer)];
        track.for_each_page(static_cast<std::size_t>(role), [&](const page& p, int shown) {
            usage_row& row = formats[static_cast<std::size_t>(p.format)];
            const format& f = table[p.format];
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

}}  // namespace kvq
