// The checked contents of a saved sequence: everything in the file except the pages, which follow in the source.
//
// No value is used before the seal is verified. Afterwards values are still checked: against each other,
// against the tensors of the file, and by restore.hpp against the cache.
#pragma once

#include <span>

#include "../cache/layer_track.hpp"
#include "saved_sequence.hpp"

namespace kvq::inline KVQ_TAGGED::detail {

/// K or V of one layer in the file.
struct saved_table {
    int target = 0;
    std::span<const saved_page> copies, pages;
};

struct saved_layer {
    int tokens = 0;
    int committed = 0;
    saved_table tables[2];
    std::vector<page_span> spans;  ///< without pages
};

class saved_index {
public:
    /// Reads up to the first byte of the first page.
    template <class Source>
    explicit saved_index(exact_source<Source>& source) {
        source.restart();
        header_ = read_header(source);
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

    /// Raises kvq::error unless the next tensor of the file is this one.
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
        // In parts, so that a false size does not allocate memory.
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
        const auto rows = [&] {
            return next_ < header_.tensors.size() && !header_.tensors[next_].shape.empty()
                       ? header_.tensors[next_].shape[0]
                       : 0;
        };
        const auto spans = take<saved_span>("spans", "I32", {rows(), saved_span::columns});
        rows_ = take<saved_page>("index", "U32", {rows(), saved_page::columns});
        expect_tensor("seal", "U32", {1});
        sealed_ = {};

        std::size_t row = 0, span = 0;
        layers_.resize(tokens.size());
        for (std::size_t l = 0; l < layers_.size(); ++l) {
            saved_layer& layer = layers_[l];
            layer.tokens = tokens[l];
            layer.committed = committed[l];
            const std::size_t first_span = span;
            while (span < spans.size() && spans[span].layer == static_cast<std::int32_t>(l)) ++span;
            find_spans(static_cast<int>(l), layer,
                       std::span<const saved_span>(spans).subspan(first_span, span - first_span));
            for (std::size_t r = 0; r < 2; ++r) {
                saved_table& table = layer.tables[r];
                table.target = targets[2 * l + r];
                const auto take_rows = [&](page_kind kind) {
                    const std::size_t first = row;
                    while (row < rows_.size() && rows_[row].layer == l && rows_[row].role == r &&
                           rows_[row].kind == static_cast<std::uint32_t>(kind))
                        ++row;
                    return std::span<const saved_page>(rows_).subspan(first, row - first);
                };
                table.copies = take_rows(page_kind::copy);
                table.pages = take_rows(page_kind::page);
                check_table(static_cast<int>(l), r, layer, table);
            }
        }
        expect(span == spans.size(), "the saved sequence has ", spans.size(), " spans, but span ", span,
               " is out of order");
        expect(row == rows_.size(), "the index of the saved sequence has ", rows_.size(), " rows, but row ",
               row, " is out of order");
    }

    void find_spans(int l, saved_layer& layer, std::span<const saved_span> rows) const {
        const page_geometry& g = description_.geometry;
        expect(layer.tokens >= 0 && layer.tokens <= (std::numeric_limits<int>::max)() - g.page_tokens,
               "layer ", l, " of the saved sequence has ", layer.tokens, " tokens");
        const auto count = static_cast<int>(rows.size());
        expect(layer.committed >= 0 && layer.committed <= count, "layer ", l, " of the saved sequence has ",
               layer.committed, " committed spans of ", count);
        int at = 0;
        for (int i = 0; i < count; ++i) {
            const page_span s = rows[static_cast<std::size_t>(i)].at(at);
            const bool sinks = rows[static_cast<std::size_t>(i)].sinks == 0 ||
                               (rows[static_cast<std::size_t>(i)].sinks == 1 && g.sinks > 0);
            expect(sinks && layer_track::is_possible(s, i < layer.committed, i == count - 1, g) &&
                       s.tokens <= layer.tokens - at,
                   "layer ", l, " of the saved sequence shows ", s.tokens, " tokens in span ", i,
                   " from token ", at, " on, behind ", s.skip, " hidden ones, which has room for ",
                   g.capacity(s.sinks), " of ", layer.tokens, ", out of place");
            layer.spans.push_back(s);
            at = s.end();
        }
        expect(at == layer.tokens, "layer ", l, " of the saved sequence has ", layer.tokens,
               " tokens, its pages show ", at);
        const auto committed = static_cast<std::size_t>(layer.committed);
        expect(layer_track::may_wait(layer.spans, committed, layer.tokens, g), "layer ", l,
               " of the saved sequence has ", layer.committed, " committed spans of ", count, " and ",
               layer.tokens, " tokens, by which span ", layer.committed, " is due");
    }

    void check_table(int l, std::size_t r, const saved_layer& layer, const saved_table& table) const {
        const page_geometry& g = description_.geometry;
        const std::string who = layer_text(static_cast<std::size_t>(l), static_cast<tensor>(r));
        const auto formats = static_cast<std::uint32_t>(description_.schemes[r].size());
        expect(table.target >= 0 && static_cast<std::uint32_t>(table.target) < formats, who,
               " of the saved sequence is quantized to format ", table.target, " of ", formats);
        expect(table.pages.size() == layer.spans.size(), who, " of the saved sequence has ",
               table.pages.size(), " pages instead of ", layer.spans.size());

        // Strictly ascending order, so that no page appears twice.
        const auto check_page = [&](const saved_page& p, bool in_order, bool possible) {
            expect(in_order && possible, who, " of the saved sequence has a page of span ", p.span,
                   " in format ", p.format, " for ", p.tokens, " tokens out of place");
        };
        for (const auto list : {table.copies, table.pages})
            for (std::size_t i = 0; i < list.size(); ++i) {
                const saved_page& p = list[i];
                check_page(p, i == 0 || list[i - 1].order() < p.order(), p.span < layer.spans.size());
                const page_span& s = layer.spans[p.span];
                const bool committed = static_cast<int>(p.span) < layer.committed;
                const bool copy = list.data() == table.copies.data() && !table.copies.empty();
                const int tokens =
                    committed ? g.capacity(s.sinks) : g.window_tokens(s.first_token, s.tokens, s.room);
                check_page(
                    p, true,
                    p.tokens == static_cast<std::uint32_t>(tokens) &&
                        p.format < (copy || s.sinks || !committed ? 1 : formats) &&
                        (!copy || (committed && !s.sinks && s.skip == 0 && s.full() &&
                                   layer_track::keeps_copies(s, layer.tokens, g, description_.rollback))));
            }
        std::vector<bool> seen(layer.spans.size());
        for (const saved_page& p : table.pages) {
            check_page(p, !seen[p.span], true);
            seen[p.span] = true;
        }
    }

    safetensors_header header_;
    std::size_t next_ = 0;
    std::vector<std::byte> sealed_;
    saved_description description_;
    std::vector<saved_page> rows_;
    std::vector<saved_layer> layers_;
};

}  // namespace kvq::inline KVQ_TAGGED::detail
