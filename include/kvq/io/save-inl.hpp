// Definitions of save.hpp.
#pragma once

#include <algorithm>

#include "../cache/sequence_access.hpp"
#include "save.hpp"
#include "saved_sequence.hpp"
#include "state_wire.hpp"
#include "written_pages.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

class sequence_writer {
public:
    sequence_writer(const sequence& s, const save_options& options)
        : sequence_(s),
          cache_(sequence_access::cache(s)),
          upper_only_(options.upper_only),
          scratch_(cache_.pool().memory()) {
        const saved_description d = describe(cache_, s, options);
        header_.metadata = d.to_metadata();
        plans_.assign(d.schemes[0].begin() + cache_.table(tensor::key).size(), d.schemes[0].end());
        if (d.version > version_of_equal_layers) {
            shapes_ = d.shapes;
            add_tensor("shapes", "I32", {layers(), saved_shape::columns});
            add_tensor("freed", "I32", {layers(), 2});
        }
        add_tensor("tokens", "I32", {layers()});
        add_tensor("committed", "I32", {layers()});
        add_tensor("targets", "I32", {layers(), 2});
        for (std::size_t layer = 0; layer < sequence_access::tables(s).size(); ++layer) {
            first_spans_.push_back(spans_.size());
            for (const page_span& span : sequence_access::tables(s)[layer].spans)
                spans_.push_back(saved_span::of(layer, span));
        }
        add_tensor("spans", "I32", {spans_.size(), saved_span::columns});
        add_tensor("index", "U32", {0, saved_page::columns});
        add_tensor("seal", "U32", {1});
        const std::size_t index = header_.tensors.size() - 2;
        for_each_page([&](const saved_page& row, const page& p) {
            index_.push_back(row);
            crc32c checksum;
            for_each_plane(p, [&](const void* data, std::size_t bytes) { checksum.add(data, bytes); });
            index_.back().checksum = checksum.value();
            add_page(row, p);
        });
        header_.tensors[index].shape[0] = index_.size();
        if (cache_.state_layout()) add_tensor("state", "U8", {written_bytes(s.state())});
    }

    void write(const sink_view& sink) {
        crc32c seal;
        const auto sealed = [&](const void* data, std::size_t bytes) {
            seal.add(data, bytes);
            sink(data, bytes);
        };
        const std::string header = write_safetensors_header(header_);
        sealed(header.data(), header.size());
        const auto numbers = [&](auto&& get) {
            for (const page_table& table : sequence_access::tables(sequence_)) {
                const auto values = get(table);
                sealed(values.data(), sizeof(values));
            }
        };
        using one = std::array<std::int32_t, 1>;
        using two = std::array<std::int32_t, 2>;
        if (!shapes_.empty()) {
            sealed(shapes_.data(), shapes_.size() * sizeof(saved_shape));
            numbers([](const page_table& t) {
                return t.front() == 0 ? two{0, 0} : two{t.end_of_sinks(), t.front()};
            });
        }
        numbers([](const page_table& t) { return one{t.tokens}; });
        numbers([](const page_table& t) { return one{t.committed}; });
        numbers([this](const page_table& t) {
            return two{static_cast<std::int32_t>(format_of(t.targets[0], t.plan)), t.targets[1]};
        });
        if (!spans_.empty()) sealed(spans_.data(), spans_.size() * sizeof(saved_span));
        if (!index_.empty()) sealed(index_.data(), index_.size() * sizeof(saved_page));
        const std::uint32_t checksum = seal.value();
        sink(&checksum, sizeof(checksum));
        for_each_page([&](const saved_page&, const page& p) {
            for_each_plane(p, [&](const void* data, std::size_t bytes) { sink(data, bytes); });
        });
        if (cache_.state_layout()) write_recurrent_state_to(sink, sequence_.state());
    }

private:
    std::size_t written_bytes_of(const page& p) const noexcept {
        return upper_only_ ? p.upper_bytes() : p.bytes;
    }
    template <class F>
    void for_each_plane(const page& p, F&& f) const {
        p.for_each_plane([&](const std::byte* data, std::size_t bytes) {
            if (data != p.lower || !upper_only_) f(data, bytes);
        });
    }
    /// The format that a page has in the file.
    int written_format(const page& p, tensor role) const {
        if (!upper_only_ || !p.lower) return p.format;
        const format_table& table = cache_.table(role);
        int i = 0;
        while (i < table.size() && !table.drops_lower(p.format, i)) ++i;
        expect(i < table.size(), "pages of ", format_text(table[p.format]),
               " are saved without their lower planes, and the cache does not list the format of the upper "
               "one, ",
               format_text(table[p.format].functions().upper(table[p.format].scheme())));
        return i;
    }

    std::uint64_t layers() const { return static_cast<std::uint64_t>(cache_.layer_count()); }

    static saved_description describe(const cache& of, const sequence& s, const save_options& options) {
        saved_description d;
        d.model = options.model;
        d.library = std::to_string(KVQ_VERSION_MAJOR) + "." + std::to_string(KVQ_VERSION_MINOR) + "." +
                    std::to_string(KVQ_VERSION_PATCH);
        d.window = of.window().name();
        d.layers = of.layer_count();
        for (const layer& l : of.layers()) {
            d.shapes.push_back(saved_shape::of(l));
            if (d.shapes.back() != d.shapes.front() || l.kind != layer_kind::full)
                d.version = saved_format_version;
        }
        d.geometry = of.geometry();
        d.rollback = of.options().rollback;
        expect(d.geometry.sinks <= saved_description::most_sinks, "a sequence with ", d.geometry.sinks,
               " sinks cannot be saved, the limit is ", saved_description::most_sinks);
        for (const tensor role : {tensor::key, tensor::value})
            for (int i = 0; i < of.table(role).size(); ++i)
                d.schemes[static_cast<std::size_t>(role)].push_back(identity_of(of.table(role)[i]));
        for (const page_table& table : sequence_access::tables(s))
            if (table.dropped > 0) d.version = saved_format_version;
        for (int layer = 0; layer < d.layers; ++layer) {
            if (of.holds_tokens(layer))
                d.commits_from = larger(d.commits_from, of.geometry(layer).commits_from);
            // Plans follow the listed formats.
            const auto add_plan = [&](const format& plan) {
                if (!plan) return;
                auto& keys = d.schemes[0];
                scheme_identity id = identity_of_plan(plan);
                if (std::find(keys.begin() + of.table(tensor::key).size(), keys.end(), id) == keys.end())
                    keys.push_back(std::move(id));
            };
            const page_table& table = sequence_access::tables(s)[static_cast<std::size_t>(layer)];
            add_plan(table.plan);
            for (const page_span& span : table.spans) {
                if (span.shift != 0) d.rotary[layer] = of.rotations().identity(layer);
                if (span.pages[0]) add_plan(span.pages[0]->plan);
            }
        }
        return d;
    }

    /// Index in the list of schemes.
    std::uint32_t format_of(int format, const kvq::format& plan) const {
        if (!plan) return static_cast<std::uint32_t>(format);
        const auto at = std::find(plans_.begin(), plans_.end(), identity_of_plan(plan));
        return static_cast<std::uint32_t>(cache_.table(tensor::key).size() + (at - plans_.begin()));
    }
    void add_tensor(std::string name, const char* dtype, std::vector<std::uint64_t> shape) {
        header_.tensors.push_back({std::move(name), dtype, std::move(shape), 0, 0});
    }
    /// Pages of one kind, format and size are one tensor.
    void add_page(const saved_page& row, const page& p) {
        const int layer = static_cast<int>(row.layer);
        const auto role = static_cast<tensor>(row.role);
        const std::string name = static_cast<page_kind>(row.kind) == page_kind::copy
                                     ? copies_name(layer, role, row.tokens, cache_.geometry())
                                     : pages_name(layer, role, row.format, row.tokens, cache_.geometry());
        const auto heads = static_cast<std::uint64_t>(cache_.shape(layer).kv_heads);
        if (header_.tensors.back().name != name)
            add_tensor(name, "U8", {0, heads, written_bytes_of(p) / heads});
        ++header_.tensors.back().shape[0];
    }

    /// Calls f(row, page) for every page in the order of the file: copies, then pages by format and size.
    /// Gives the spans their rows.
    template <class F>
    void for_each_page(F&& f) {
        for (std::size_t layer = 0; layer < sequence_access::tables(sequence_).size(); ++layer)
            for (const tensor role : cache_.tensors(static_cast<int>(layer))) {
                const page_table& table = sequence_access::tables(sequence_)[layer];
                page_extents extents;
                extents.add(table, role, cache_.geometry());
                const written_pages pages(cache_.window(), table, role, cache_.shape(static_cast<int>(layer)),
                                          scratch_, extents);
                std::vector<std::pair<saved_page, std::size_t>> rows;
                for (const written_pages::entry& e : pages.all())
                    rows.push_back({{static_cast<std::uint32_t>(layer), static_cast<std::uint32_t>(role),
                                     static_cast<std::uint32_t>(e.kind), static_cast<std::uint32_t>(e.span),
                                     format_of(written_format(*e.page, role), e.page->plan),
                                     static_cast<std::uint32_t>(e.page->tokens), e.page->not_finite, 0},
                                    rows.size()});
                std::sort(rows.begin(), rows.end(),
                          [](const auto& a, const auto& b) { return a.first.order() < b.first.order(); });
                std::vector<std::int32_t> row_of(rows.size());
                for (std::size_t i = 0; i < rows.size(); ++i) {
                    row_of[rows[i].second] = static_cast<std::int32_t>(i);
                    f(rows[i].first, *pages.all()[rows[i].second].page);
                }
                for (int i = 0; i < table.size(); ++i)
                    for (std::size_t kind = 0; kind < 2; ++kind)
                        if (const int n = pages.of_span(i)[kind]; n >= 0)
                            spans_[first_spans_[layer] + static_cast<std::size_t>(i)]
                                .pages[static_cast<std::size_t>(role)][kind] =
                                row_of[static_cast<std::size_t>(n)];
            }
    }

    const sequence& sequence_;
    const cache& cache_;
    bool upper_only_;
    page_pool scratch_;
    safetensors_header header_;
    std::vector<scheme_identity> plans_;  // of keys
    std::vector<saved_shape> shapes_;     // if they differ
    std::vector<saved_span> spans_;
    std::vector<std::size_t> first_spans_;  // of the layers
    std::vector<saved_page> index_;
};

KVQ_FUNC void save_to(const sequence& s, const sink_view& write, const save_options& options) {
    if (options.copies && !sequence_access::waits(s)) return sequence_writer(s, options).write(write);
    sequence committed = s.fork();
    (void)sequence_access::committed_tables(committed);
    if (!options.copies) committed.drop_copies();
    sequence_writer(committed, options).write(write);
}

}  // namespace detail

KVQ_FUNC std::size_t saved_bytes(const sequence& s, const save_options& options) {
    std::size_t sum = 0;
    save(
        s, [&](const void*, std::size_t bytes) { sum += bytes; }, options);
    return sum;
}

}}  // namespace kvq
