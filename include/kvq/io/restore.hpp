// Restores a saved sequence into a cache: restore(cache, source).
//
// Everything that can be known before the first page is checked before the first page: form, checksum of header and index,
// model, shape, options, schemes. Pages are checked as they come, each by its own checksum, before anything looks inside. The
// sequence is new, so on any error the cache is as it was.
//
// A cache with the same options and a list of formats that has all of the file's (in any order) gets the sequence back as it
// was: the same bytes, the same future. Any other needs restore_options::convert:
//   other formats for a layer           quantized pages become the cache's, page by page (error: cache/convert.hpp); from their
//                                       16-bit copies where the file has them
//   other sinks, recent, page_tokens    tokens are dequantized and appended again; holds one layer of the file at a time
//   or window
#pragma once

#include "../cache/convert.hpp"
#include "../cache/sequence.hpp"
#include "saved_index.hpp"

namespace kvq::inline v0_1 {

struct restore_options {
    std::string model = {};  ///< what save_options::model must have been; empty: anything
    bool convert =
        false;  ///< pages may change: coded to the cache's own formats, laid out by its own options
};

namespace detail {

template <class Cache, class Source>
class sequence_reader {
public:
    using window = typename Cache::window;
    using backend = typename Cache::backend;

    sequence_reader(Cache& cache, Source& read, const restore_options& options)
        : cache_(cache), options_(options), source_(read), index_(source_), scratch_(cache.pool().memory()) {
        check_cache();
        find_formats<tensor::key>();
        find_formats<tensor::value>();
        for (int layer = 0; layer < cache.shape().layers; ++layer) {
            expect_tensors<tensor::key>(layer);
            expect_tensors<tensor::value>(layer);
        }
        index_.expect_no_more();
    }

    sequence<Cache> run() {
        sequence<Cache> s = cache_.new_sequence();
        for (int layer = 0; layer < cache_.shape().layers; ++layer) {
            if (same_layout_) {
                layer_track& track = sequence_access::tracks(s)[static_cast<std::size_t>(layer)];
                track.spans.reserve(table_capacity(saved(layer).spans.size()));
                track.spans.assign(saved(layer).spans.begin(), saved(layer).spans.end());
                place<tensor::key>(layer, track);
                place<tensor::value>(layer, track);
                track.tokens = saved(layer).tokens;
                track.committed = saved(layer).committed;
                track.drop_copies(cache_.geometry(), cache_.options().rollback);
                track.join_copies();
            } else {
                append_again(s, layer);
            }
        }
        return s;
    }

private:
    // ---- before the first page ----

    const saved_layer& saved(int layer) const { return index_.layers()[static_cast<std::size_t>(layer)]; }
    template <tensor Role>
    const saved_table& saved(int layer) const {
        return saved(layer).tables[static_cast<int>(Role)];
    }
    template <tensor Role>
    const scheme_identity& identity(std::size_t format) const {
        return index_.description().schemes[static_cast<std::size_t>(Role)][format];
    }
    /// Index in the cache's table of a format of the file; -1 if it is not there.
    template <tensor Role>
    int mapped(std::size_t format) const {
        return formats_[static_cast<int>(Role)][format];
    }

    void check_cache() {
        const saved_description& file = index_.description();
        expect(options_.model.empty() || options_.model == file.model, "the sequence was saved for model ",
               file.model, ", not for ", options_.model);
        const auto same = [](const char* name, int theirs, int mine) {
            expect(theirs == mine, "the saved sequence has ", name, " ", theirs, ", the cache ", mine);
        };
        const cache_shape& shape = cache_.shape();
        same("layers", file.shape.layers, shape.layers);
        same("kv_heads", file.shape.kv_heads, shape.kv_heads);
        same("head_dim", file.shape.head_dim, shape.head_dim);
        same("value_dim", file.shape.dim(tensor::value), shape.dim(tensor::value));

        const auto same_option = [&](const char* name, int theirs, int mine) {
            expect(options_.convert || theirs == mine, "the saved sequence has ", name, " ", theirs,
                   ", the cache ", mine, "; restore_options::convert allows that");
            same_layout_ = same_layout_ && theirs == mine;
        };
        const page_geometry g = cache_.geometry();
        same_option("sinks", file.geometry.sinks, g.sinks);
        same_option("recent", file.geometry.recent, g.recent);
        same_option("page_tokens", file.geometry.page_tokens, g.page_tokens);
        const std::string mine = full<window>{}.name();
        expect(options_.convert || file.window == mine, "the saved sequence has a window of ", file.window,
               ", the cache one of ", mine, "; restore_options::convert allows that");
        same_layout_ = same_layout_ && file.window == mine;
    }

    template <tensor Role>
    void find_formats() {
        const auto& list = index_.description().schemes[static_cast<std::size_t>(Role)];
        for (const scheme_identity& id : list)
            formats_[static_cast<int>(Role)].push_back(find_format(cache_.template table<Role>(), id));
    }

    /// The tensors that hold this table's pages are the next ones of the file, and this cache can use them.
    template <tensor Role>
    void expect_tensors(int layer) {
        const saved_table& table = saved<Role>(layer);
        const auto& formats = cache_.template table<Role>();
        if (!options_.convert && mapped<Role>(static_cast<std::size_t>(table.target)) < 0)
            raise_unknown_format(
                formats, identity<Role>(static_cast<std::size_t>(table.target)),
                layer_text(static_cast<std::size_t>(layer), Role) + " of the saved sequence is to be");
        const page_geometry& g = index_.description().geometry;
        const auto heads = static_cast<std::uint64_t>(cache_.shape().kv_heads);
        const auto expect_pages = [&](const std::string& name, std::size_t count, std::uint32_t format,
                                      int tokens) {
            if (count == 0) return;
            index_.expect_tensor(name, "U8", {count, heads, block_bytes<Role>(layer, format, tokens)});
        };
        expect_pages(tensor_name(layer, Role, "copies"), table.copies.size(), 0, g.page_tokens);
        for (std::size_t first = 0; first < table.pages.size();) {
            const auto& [format, tokens] = std::pair(table.pages[first].format, table.pages[first].tokens);
            std::size_t count = 1;
            while (first + count < table.pages.size() && table.pages[first + count].format == format &&
                   table.pages[first + count].tokens == tokens)
                ++count;
            expect_pages(pages_name(layer, Role, format, tokens, g), count, format, static_cast<int>(tokens));
            first += count;
        }
    }

    template <tensor Role>
    std::size_t block_bytes(int layer, std::uint32_t format, int tokens) {
        std::size_t bytes = 0;
        visit<Role>(layer, format, [&](const auto& scheme) {
            bytes = scheme.block_bytes({Role, tokens, cache_.shape().dim(Role)});
        });
        return bytes;
    }

    /// Calls f(scheme) with the scheme of a format of the file. The window may be another than the cache's.
    template <tensor Role, class F>
    void visit(int layer, std::uint32_t format, F&& f) {
        const scheme_identity& id = identity<Role>(format);
        const int index = mapped<Role>(format);
        if (index >= 0)
            cache_.template table<Role>().visit(index, f);
        else if (format == 0 && id == identity_of(full<float16>{}))
            f(full<float16>{});
        else if (format == 0 && id == identity_of(full<bfloat16>{}))
            f(full<bfloat16>{});
        else if (format == 0 && id == identity_of(full<float>{}))
            f(full<float>{});
        else
            raise_unknown_format(
                cache_.template table<Role>(), id,
                layer_text(static_cast<std::size_t>(layer), Role) + " of the saved sequence is");
    }

    // ---- pages ----

    template <tensor Role>
    void read_page(int layer, const saved_page& row, page& p) {
        source_.restart();
        source_.read(p.data(), p.bytes, "a page");
        expect(source_.checksum() == row.checksum, "the saved sequence is damaged: the page of span ",
               row.span, " of ", layer_text(static_cast<std::size_t>(layer), Role), " has checksum ",
               source_.checksum(), ", not ", row.checksum);
        p.not_finite = row.not_finite;
    }
    template <tensor Role>
    page_ref read_page(int layer, const saved_page& row, page_pool& pool) {
        const auto tokens = static_cast<int>(row.tokens);
        const std::size_t bytes =
            block_bytes<Role>(layer, row.format, tokens) * static_cast<std::size_t>(cache_.shape().kv_heads);
        page_ref p = pool.allocate(bytes, mapped<Role>(row.format), tokens);
        read_page<Role>(layer, row, *p);
        return p;
    }

    /// Pages of a cache that lays them out as the file does: as they are, or one by one in another format.
    template <tensor Role>
    void place(int layer, layer_track& track) {
        constexpr auto role = static_cast<std::size_t>(Role);
        const saved_table& from = saved<Role>(layer);
        const int tokens = cache_.geometry().page_tokens;
        int& target = track.targets[role];
        if (!options_.convert) target = mapped<Role>(static_cast<std::size_t>(from.target));
        // Copies that this cache would not keep may still be needed to quantize a page to another format.
        for (const saved_page& row : from.copies)
            track.spans[row.span].copies[role] = read_page<Role>(layer, row, cache_.pool());
        for (const saved_page& row : from.pages) {
            page_span& span = track.spans[row.span];
            page_ref& page = span.pages[role];
            const bool quantized = static_cast<int>(row.span) < saved(layer).committed &&
                                   !(cache_.geometry().sinks > 0 && row.span == 0);
            if (!quantized || !options_.convert || mapped<Role>(row.format) == target) {
                page = read_page<Role>(layer, row, cache_.pool());
                continue;
            }
            const page_ref old = read_page<Role>(layer, row, scratch_);
            page_ref& copy = span.copies[role];
            if (copy && target == 0) {
                page = std::move(copy);
                continue;
            }
            page = cache_.pool().allocate(cache_.template page_bytes<Role>(target, tokens), target, tokens);
            numbers_.resize(static_cast<std::size_t>(tokens) *
                            static_cast<std::size_t>(cache_.shape().dim(Role)));
            convert_page<backend, window>(cache_.template table<Role>(), cache_.shape(), layer,
                                          copy ? *copy : *old, *page, numbers_.data());
        }
    }

    // ---- a cache that lays pages out in another way ----

    /// Pages of a layer's K or V, by span, from their 16-bit copies where there are some.
    struct loaded {
        std::vector<page_ref> pages;
        std::vector<std::uint32_t> formats;
    };

    template <tensor Role>
    loaded load(int layer) {
        const saved_table& from = saved<Role>(layer);
        loaded l;
        l.pages.resize(from.pages.size());
        l.formats.resize(from.pages.size());
        std::vector<page_ref> copies(from.pages.size());
        for (const saved_page& row : from.copies) copies[row.span] = read_page<Role>(layer, row, scratch_);
        for (const saved_page& row : from.pages) {
            l.pages[row.span] = read_page<Role>(layer, row, scratch_);
            l.formats[row.span] = row.format;
            if (!copies[row.span]) continue;
            l.pages[row.span] = std::move(copies[row.span]);
            l.formats[row.span] = 0;
        }
        return l;
    }

    /// x^ of a page, [head][token][channel].
    template <tensor Role>
    token_view<const float> decode(int layer, const page& p, std::uint32_t format, int used,
                                   std::vector<float>& values) {
        const block_shape shape{Role, p.tokens, cache_.shape().dim(Role)};
        const int heads = cache_.shape().kv_heads;
        values.resize(shape.values() * static_cast<std::size_t>(heads));
        visit<Role>(layer, format, [&](const auto& scheme) {
            const std::size_t bytes = scheme.block_bytes(shape);
            for (int h = 0; h < heads; ++h)
                scheme.decode(shape, block_id{layer, h}, p.data() + bytes * static_cast<std::size_t>(h),
                              values.data() + shape.values() * static_cast<std::size_t>(h));
        });
        return {values.data(), used,      heads,
                shape.dim,     shape.dim, static_cast<std::ptrdiff_t>(shape.values())};
    }

    void append_again(sequence<Cache>& s, int layer) {
        const loaded keys = load<tensor::key>(layer), values = load<tensor::value>(layer);
        std::vector<float> k, v;
        for (std::size_t i = 0; i < keys.pages.size(); ++i) {
            const int shown = saved(layer).spans[i].tokens;
            s.append(layer, decode<tensor::key>(layer, *keys.pages[i], keys.formats[i], shown, k),
                     decode<tensor::value>(layer, *values.pages[i], values.formats[i], shown, v));
        }
    }

    Cache& cache_;
    const restore_options& options_;
    exact_source<Source> source_;
    saved_index index_;
    page_pool scratch_;
    std::vector<int> formats_[2];
    std::vector<float> numbers_;
    bool same_layout_ = true;
};

}  // namespace detail

/// Reads a saved sequence from a source: a callable read(void*, std::size_t) -> std::size_t, which is asked for exactly the
/// bytes of the file. Raises kvq::error when it is damaged, cut short, something else, or does not fit this cache.
template <class Cache, byte_source Source>
[[nodiscard]] sequence<Cache> restore(Cache& cache, Source&& read, const restore_options& options = {}) {
    return detail::sequence_reader<Cache, std::remove_reference_t<Source>>(cache, read, options).run();
}

}  // namespace kvq::inline v0_1
