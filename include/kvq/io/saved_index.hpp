// The checked contents of a saved sequence: everything in the file except the pages, which follow in the
// source.
//
// No value is used before the seal is verified. Afterwards values are still checked: against each other,
// against the tensors of the file, and by restore.hpp against the cache.
#pragma once

#include <span>

#include "../page/page_table.hpp"
#include "saved_sequence.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

/// K or V of one layer in the file.
struct saved_table {
    int target = 0;
    std::span<const saved_page> rows;  ///< copies, then pages
    std::size_t copies = 0;            ///< number of the former
    std::vector<std::array<std::int32_t, 2>>
        of_span;  ///< rows of the page and of the copy of each span; -1: no copy
};

struct saved_layer {
    int tokens = 0;
    int committed = 0;
    std::array<std::int32_t, 2> freed{};  ///< tokens [first, last) were freed or dropped; 0, 0: none
    saved_table tables[2];
    std::vector<page_span> spans;  ///< without pages
};

class saved_index {
public:
    /// Reads up to the first byte of the first page.
    explicit saved_index(exact_source& source) {
        source.restart();
        header_ = read_header(source);
        const auto& metadata = header_.metadata;
        const auto format = metadata.find("format");
        expect(format != metadata.end() && format->second == saved_format_name,
               "this safetensors file is not a saved sequence of kvq: its format is ",
               format == metadata.end() ? "not given" : format->second.c_str());
        const int version = saved_description::parse<int>(
            "format_version", saved_description::text(metadata, "format_version"), 10);
        expect(version >= oldest_saved_version && version <= saved_format_version,
               "the saved sequence has format version ", version, ", this library reads versions ",
               oldest_saved_version, " to ", saved_format_version);
        version_ = version;
        read_sealed(source);
        description_ = saved_description::from_metadata(metadata, version);
        read_layers();
    }

    const saved_description& description() const noexcept { return description_; }
    const std::vector<saved_layer>& layers() const noexcept { return layers_; }
    /// Does the file say which spans share a page, and how keys were rotated?
    bool says_all() const noexcept { return version_ > oldest_saved_version; }

    /// Raises kvq::error unless the next tensor of the file is this one.
    void expect_tensor(const std::string& name, const char* dtype, const std::vector<std::uint64_t>& shape) {
        expect(next_ < header_.tensors.size(), "the saved sequence has no tensor ", name);
        const safetensors_tensor& t = header_.tensors[next_++];
        expect(t.name == name && t.dtype == dtype && t.shape == shape, "the saved sequence has tensor ",
               text(t.name, t.dtype, t.shape), " where ", text(name, dtype, shape), " was expected");
    }
    /// Bytes of the next tensor, which must be the recurrent state.
    std::uint64_t take_state() {
        const bool is_there = next_ < header_.tensors.size() && header_.tensors[next_].shape.size() == 1;
        const std::uint64_t bytes = is_there ? header_.tensors[next_].shape[0] : 0;
        expect_tensor("state", "U8", {bytes});
        return bytes;
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

    void read_sealed(exact_source& source) {
        const safetensors_tensor* seal = nullptr;
        for (const safetensors_tensor& t : header_.tensors)
            if (t.name == "seal") seal = &t;
        expect(seal && seal->end - seal->begin == 4, "the saved sequence has no seal");
        source.append(sealed_, seal->begin, "the index");
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

    std::vector<saved_span> take_spans(std::uint64_t count) {
        if (says_all()) return take<saved_span>("spans", "I32", {count, saved_span::columns});
        constexpr std::size_t columns = saved_span::columns_of_version_3;
        const auto numbers = take<std::int32_t>("spans", "I32", {count, columns});
        std::vector<saved_span> spans(numbers.size() / columns);
        for (std::size_t i = 0; i < spans.size(); ++i)
            std::memcpy(static_cast<void*>(&spans[i]), numbers.data() + i * columns,
                        columns * sizeof(std::int32_t));
        return spans;
    }

    void read_layers() {
        const auto n = static_cast<std::uint64_t>(description_.layers);
        if (version_ > version_of_equal_layers)
            description_.set_shapes(take<saved_shape>("shapes", "I32", {n, saved_shape::columns}));
        const auto freed = version_ > version_of_equal_layers ? take<std::int32_t>("freed", "I32", {n, 2})
                                                              : std::vector<std::int32_t>();
        const auto tokens = take<std::int32_t>("tokens", "I32", {n});
        const auto committed = take<std::int32_t>("committed", "I32", {n});
        const auto targets = take<std::int32_t>("targets", "I32", {n, 2});
        const auto rows = [&] {
            return next_ < header_.tensors.size() && !header_.tensors[next_].shape.empty()
                       ? header_.tensors[next_].shape[0]
                       : 0;
        };
        const std::vector<saved_span> spans = take_spans(rows());
        rows_ = take<saved_page>("index", "U32", {rows(), saved_page::columns});
        expect_tensor("seal", "U32", {1});
        sealed_ = {};

        std::size_t row = 0, span = 0;
        layers_.resize(tokens.size());
        for (std::size_t l = 0; l < layers_.size(); ++l) {
            saved_layer& layer = layers_[l];
            layer.tokens = tokens[l];
            layer.committed = committed[l];
            if (!freed.empty()) layer.freed = {freed[2 * l], freed[2 * l + 1]};
            const std::size_t first_span = span;
            while (span < spans.size() && spans[span].layer == static_cast<std::int32_t>(l)) ++span;
            find_spans(static_cast<int>(l), layer,
                       std::span<const saved_span>(spans).subspan(first_span, span - first_span));
            for (std::size_t r = 0; r < 2; ++r) {
                saved_table& table = layer.tables[r];
                table.target = targets[2 * l + r];
                const std::size_t first = row;
                const auto skip_rows = [&](page_kind kind) {
                    while (row < rows_.size() && rows_[row].layer == l && rows_[row].role == r &&
                           rows_[row].kind == static_cast<std::uint32_t>(kind))
                        ++row;
                    return row - first;
                };
                table.copies = skip_rows(page_kind::copy);
                table.rows = std::span<const saved_page>(rows_).subspan(first, skip_rows(page_kind::page));
                for (std::size_t i = first_span; i < span; ++i)
                    table.of_span.push_back({spans[i].pages[r][0], spans[i].pages[r][1]});
                check_table(static_cast<int>(l), r, layer, table);
            }
        }
        expect(span == spans.size(), "the saved sequence has ", spans.size(), " spans, but span ", span,
               " is out of order");
        expect(row == rows_.size(), "the index of the saved sequence has ", rows_.size(), " rows, but row ",
               row, " is out of order");
    }

    void find_spans(int l, saved_layer& layer, std::span<const saved_span> rows) const {
        page_geometry g = description_.geometry;
        g.commits_from = description_.commits_from;
        expect(layer.tokens >= 0 && layer.tokens <= (std::numeric_limits<int>::max)() - g.page_tokens,
               "layer ", l, " of the saved sequence has ", layer.tokens, " tokens");
        expect(description_.shape_of(l).holds_tokens() || layer.tokens == 0, "layer ", l,
               " of the saved sequence has ", layer.tokens, " tokens, but no pages of its own");
        const auto count = static_cast<int>(rows.size());
        expect(layer.committed >= 0 && layer.committed <= count, "layer ", l, " of the saved sequence has ",
               layer.committed, " committed spans of ", count);
        const key_window window = description_.shape_of(l).sees();
        int at = 0;
        const int gap = layer.freed[0], front = layer.freed[1];
        const auto expect_gap = [&](bool possible) {
            expect(possible, "layer ", l, " of the saved sequence has ", layer.tokens,
                   " tokens, and has freed tokens ", gap, " to ", front, ", out of place");
        };
        bool found = gap == 0 && front == 0, in_sinks = true;
        expect_gap(found ||
                   (gap >= 0 && gap < front && front < layer.tokens &&
                    (description_.shape_of(l).retains() || window.first_seen(layer.tokens) >= front)));
        for (int i = 0; i < count; ++i) {
            if (!found && in_sinks && at == gap) {
                found = true;
                at = front;
            }
            in_sinks = in_sinks && rows[static_cast<std::size_t>(i)].sinks != 0;
            const page_span s = rows[static_cast<std::size_t>(i)].at(at);
            const bool sinks = rows[static_cast<std::size_t>(i)].sinks == 0 ||
                               (rows[static_cast<std::size_t>(i)].sinks == 1 && g.sinks > 0);
            expect(sinks && page_table::is_possible(s, i < layer.committed, i == count - 1, g) &&
                       s.tokens <= layer.tokens - at,
                   "layer ", l, " of the saved sequence shows ", s.tokens, " tokens in span ", i,
                   " from token ", at, " on, behind ", s.skip, " hidden ones, which has room for ",
                   g.capacity(s.sinks), " of ", layer.tokens, ", out of place");
            layer.spans.push_back(s);
            at = s.end();
        }
        expect_gap(found);
        expect(at == layer.tokens, "layer ", l, " of the saved sequence has ", layer.tokens,
               " tokens, its pages show ", at);
        const auto committed = static_cast<std::size_t>(layer.committed);
        expect(page_table::may_wait(layer.spans, committed, layer.tokens, g), "layer ", l,
               " of the saved sequence has ", layer.committed, " committed spans of ", count, " and ",
               layer.tokens, " tokens, by which span ", layer.committed, " is due");
    }

    void check_table(int l, std::size_t r, const saved_layer& layer, saved_table& table) const {
        page_geometry g = description_.geometry;
        g.commits_from = description_.commits_from;
        if (r == 1 && description_.shape_of(l).holds_keys_alone()) {
            bool some = table.target != 0 || !table.rows.empty();
            for (const auto& rows : table.of_span) some = some || rows[0] != -1 || rows[1] != -1;
            expect(!some, "layer ", l, " of the saved sequence holds keys alone, with ", table.rows.size(),
                   " pages of values in format ", table.target);
            return;
        }
        const std::string who = layer_text(static_cast<std::size_t>(l), static_cast<tensor>(r));
        const auto formats = static_cast<std::uint32_t>(description_.schemes[r].size());
        expect(table.target >= 0 && static_cast<std::uint32_t>(table.target) < formats, who,
               " of the saved sequence is quantized to format ", table.target, " of ", formats);
        const auto check_page = [&](const saved_page& p, bool possible) {
            expect(possible, who, " of the saved sequence has a page of span ", p.span, " in format ",
                   p.format, " for ", p.tokens, " tokens out of place");
        };
        // Strictly ascending order, so that no page appears twice.
        for (std::size_t i = 0; i < table.rows.size(); ++i)
            check_page(table.rows[i], table.rows[i].span < layer.spans.size() &&
                                          table.rows[i].format < formats &&
                                          (i == 0 || table.rows[i - 1].order() < table.rows[i].order()));
        if (!says_all())
            for (std::size_t i = 0; i < table.rows.size(); ++i) {
                std::int32_t& row = table.of_span[table.rows[i].span][i < table.copies ? 1 : 0];
                check_page(table.rows[i], row < 0);
                row = static_cast<std::int32_t>(i);
            }

        // Version 3 was written with copies that no trim restores any more, after some erases. They are
        // dropped.
        const int rollback = says_all() ? description_.rollback : saved_description::most_recent;
        const auto count = static_cast<std::int32_t>(table.rows.size());
        for (std::size_t i = 0; i < layer.spans.size(); ++i) {
            const page_span& s = layer.spans[i];
            const bool committed = static_cast<int>(i) < layer.committed;
            const auto [row, copy] = table.of_span[i];
            expect(
                row >= static_cast<std::int32_t>(table.copies) && row < count && copy >= -1 && copy < count,
                who, " of the saved sequence has page ", row, " and copy ", copy, " in span ", i, ", of ",
                table.copies, " copies and ", table.rows.size() - table.copies, " pages");
            const auto fits = [&](const saved_page& p) {
                return p.tokens <= static_cast<std::uint32_t>(g.longest_page()) &&
                       page_table::may_have_memory(s, committed, static_cast<int>(p.tokens), g);
            };
            const saved_page& own = table.rows[static_cast<std::size_t>(row)];
            check_page(own, fits(own) && (own.format == 0 || (committed && !s.sinks)));
            if (copy < 0) continue;
            const saved_page& c = table.rows[static_cast<std::size_t>(copy)];
            check_page(c, fits(c) && c.format == 0 && committed &&
                              page_table::may_have_copies(s, layer.tokens, g, rollback));
        }
        // The span that a row names has its page.
        for (std::size_t i = 0; i < table.rows.size(); ++i)
            check_page(table.rows[i], table.of_span[table.rows[i].span][i < table.copies ? 1 : 0] ==
                                          static_cast<std::int32_t>(i));
    }

    safetensors_header header_;
    std::size_t next_ = 0;
    std::vector<std::byte> sealed_;
    int version_ = saved_format_version;
    saved_description description_;
    std::vector<saved_page> rows_;
    std::vector<saved_layer> layers_;
};

}}}  // namespace kvq::detail
