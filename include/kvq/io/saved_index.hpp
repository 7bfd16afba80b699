// The checked inside of a saved sequence: everything in the file but the pages, which follow in the source.
//
// Nothing here is believed before the seal was right, and nothing after that either: numbers are checked against each other,
// against the tensors of the file, and by restore.hpp against the cache.
#pragma once

#include <span>

#include "saved_sequence.hpp"

namespace kvq::inline v0_1::detail {

/// K or V of one layer, as the file has it.
struct saved_table {
    int target = 0;
    int originals_end = 0;
    std::span<const saved_page> sinks, originals, pages;
};

struct saved_layer {
    int tokens = 0;
    int committed = 0;
    saved_table tables[2];
};

class saved_index {
public:
    /// Reads up to the first byte of the first page.
    template <class Source>
    explicit saved_index(exact_source<Source>& source) {
        source.restart();
        header_ = read_safetensors_header(source);
        const auto& metadata = header_.metadata;
        const auto format = metadata.find("format");
        expect(format != metadata.end() && format->second == saved_format_name,
               "this safetensors file is not a saved sequence of kvq: its format is ",
               format == metadata.end() ? "not given" : format->second.c_str());
        const int version = saved_description::parse<int>(
            "format_version", saved_description::text(metadata, "format_version"), 10);
        expect(version == saved_format_version, "the saved sequence has format version ", version,
               ", this library reads version ", saved_format_version);
        read_sealed(source);
        description_ = saved_description::from_metadata(metadata);
        read_layers();
    }

    const saved_description& description() const noexcept { return description_; }
    const std::vector<saved_layer>& layers() const noexcept { return layers_; }

    /// The next tensor of the file must be this one.
    void expect_tensor(const std::string& name, const char* dtype, const std::vector<std::uint64_t>& shape) {
        expect(next_ < header_.tensors.size(), "the saved sequence has no tensor ", name);
        const safetensors_tensor& t = header_.tensors[next_++];
        expect(t.name == name && t.dtype == dtype && t.shape == shape, "the saved sequence has tensor ",
               text(t.name, t.dtype, t.shape), " where ", text(name, dtype, shape), " was expected");
    }
    void expect_no_more() const {
        expect(next_ == header_.tensors.size(), "the saved sequence has ", header_.tensors.size(),
               " tensors instead of ", next_);
    }

private:
    static std::string text(const std::string& name, const std::string& dtype,
                            const std::vector<std::uint64_t>& shape) {
        std::string s = name + " " + dtype + " [";
        for (std::size_t i = 0; i < shape.size(); ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
        return s + "]";
    }

    template <class Source>
    void read_sealed(exact_source<Source>& source) {
        const safetensors_tensor* seal = nullptr;
        for (const safetensors_tensor& t : header_.tensors)
            if (t.name == "seal") seal = &t;
        expect(seal && seal->end - seal->begin == 4, "the saved sequence has no seal");
        // In pieces, so that a size that is not true does not take memory.
        while (sealed_.size() < seal->begin) {
            const std::size_t had = sealed_.size();
            sealed_.resize(had +
                           static_cast<std::size_t>(std::min<std::uint64_t>(seal->begin - had, 1 << 16)));
            source.read(sealed_.data() + had, sealed_.size() - had, "the index");
        }
        const std::uint32_t computed = source.checksum();
        std::uint32_t stored = 0;
        source.read(&stored, sizeof(stored), "the seal");
        expect(computed == stored, "the saved sequence is damaged: header and index have checksum ", computed,
               ", not ", stored);
    }

    template <class T>
    std::vector<T> take(const char* name, const char* dtype, const std::vector<std::uint64_t>& shape) {
        expect_tensor(name, dtype, shape);
        const safetensors_tensor& t = header_.tensors[next_ - 1];
        expect(t.end <= sealed_.size(), "tensor ", name, " lies behind the seal");
        std::vector<T> values(static_cast<std::size_t>(t.end - t.begin) / sizeof(T));
        if (!values.empty()) std::memcpy(values.data(), sealed_.data() + t.begin, values.size() * sizeof(T));
        return values;
    }

    void read_layers() {
        const auto n = static_cast<std::uint64_t>(description_.shape.layers);
        const auto tokens = take<std::int32_t>("tokens", "I32", {n});
        const auto committed = take<std::int32_t>("committed", "I32", {n});
        const auto targets = take<std::int32_t>("targets", "I32", {n, 2});
        const auto originals_end = take<std::int32_t>("originals_end", "I32", {n, 2});
        const std::uint64_t rows = next_ < header_.tensors.size() && !header_.tensors[next_].shape.empty()
                                       ? header_.tensors[next_].shape[0]
                                       : 0;
        rows_ = take<saved_page>("index", "U32", {rows, saved_page::columns});
        expect_tensor("seal", "U32", {1});
        sealed_ = {};

        std::size_t row = 0;
        layers_.resize(tokens.size());
        for (std::size_t l = 0; l < layers_.size(); ++l) {
            saved_layer& layer = layers_[l];
            layer.tokens = tokens[l];
            layer.committed = committed[l];
            check_counts(static_cast<int>(l), layer);
            for (std::size_t r = 0; r < 2; ++r) {
                saved_table& table = layer.tables[r];
                table.target = targets[2 * l + r];
                table.originals_end = originals_end[2 * l + r];
                const auto take_rows = [&](page_kind kind) {
                    const std::size_t first = row;
                    while (row < rows_.size() && rows_[row].layer == l && rows_[row].role == r &&
                           rows_[row].kind == static_cast<std::uint32_t>(kind))
                        ++row;
                    return std::span<const saved_page>(rows_).subspan(first, row - first);
                };
                table.sinks = take_rows(page_kind::sink);
                table.originals = take_rows(page_kind::original);
                table.pages = take_rows(page_kind::page);
                check_table(static_cast<int>(l), r, layer, table);
            }
        }
        expect(row == rows_.size(), "the index of the saved sequence has ", rows_.size(), " rows, but row ",
               row, " is out of order");
    }

    void check_counts(int l, const saved_layer& layer) const {
        const page_geometry& g = description_.geometry;
        expect(layer.tokens >= 0 && layer.tokens <= (std::numeric_limits<int>::max)() - g.page_tokens,
               "layer ", l, " of the saved sequence has ", layer.tokens, " tokens");
        expect(layer.committed >= g.committed(layer.tokens) && layer.committed <= g.pages(layer.tokens) &&
                   (layer.committed == 0 || g.first_token(layer.committed) <= layer.tokens),
               "layer ", l, " of the saved sequence has ", layer.committed, " coded pages, which ",
               layer.tokens, " tokens cannot have");
    }

    void check_table(int l, std::size_t r, const saved_layer& layer, const saved_table& table) const {
        const page_geometry& g = description_.geometry;
        const std::string who = layer_text(static_cast<std::size_t>(l), static_cast<tensor>(r));
        const auto formats = static_cast<std::uint32_t>(description_.schemes[r].size());
        const bool has_sink = g.sinks > 0 && layer.tokens > 0;
        expect(table.sinks.size() == (has_sink ? 1 : 0), who, " of the saved sequence has ",
               table.sinks.size(), " pages of sinks for ", layer.tokens, " tokens");
        expect(table.target >= 0 && static_cast<std::uint32_t>(table.target) < formats, who,
               " of the saved sequence is coded to format ", table.target, " of ", formats);

        const auto originals = static_cast<int>(table.originals.size());
        expect(originals == 0 || (table.originals_end >= originals && table.originals_end <= layer.committed),
               who, " of the saved sequence has ", originals, " originals up to page ", table.originals_end,
               " of ", layer.committed, " coded ones");
        const auto pages = static_cast<std::uint32_t>(g.pages(layer.tokens));
        expect(table.pages.size() == pages, who, " of the saved sequence has ", table.pages.size(),
               " pages instead of ", pages);

        const auto check_window_pages = [&](std::span<const saved_page> list, int first) {
            for (std::size_t i = 0; i < list.size(); ++i)
                expect(list[i].format == 0 && list[i].position == static_cast<std::uint32_t>(first) +
                                                                      static_cast<std::uint32_t>(i),
                       who, " of the saved sequence has window page ", list[i].position, " in format ",
                       list[i].format, " at place ", i);
        };
        check_window_pages(table.sinks, 0);
        check_window_pages(table.originals, table.originals_end - originals);
        // By format, then by position: whoever is behind its neighbour in this order is nowhere twice.
        std::vector<bool> seen(pages);
        for (std::size_t i = 0; i < pages; ++i) {
            const saved_page& p = table.pages[i];
            const bool in_order =
                i == 0 || table.pages[i - 1].format < p.format ||
                (table.pages[i - 1].format == p.format && table.pages[i - 1].position < p.position);
            expect(in_order && p.position < pages && !seen[p.position] && p.format < formats &&
                       (p.format == 0 || p.position < static_cast<std::uint32_t>(layer.committed)),
                   who, " of the saved sequence has page ", p.position, " in format ", p.format, " at place ",
                   i);
            seen[p.position] = true;
        }
    }

    safetensors_header header_;
    std::size_t next_ = 0;
    std::vector<std::byte> sealed_;
    saved_description description_;
    std::vector<saved_page> rows_;
    std::vector<saved_layer> layers_;
};

}  // namespace kvq::inline v0_1::detail
