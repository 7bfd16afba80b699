// Definitions of restore.hpp.
#pragma once

#include "../cache/convert.hpp"
#include "../cache/sequence_access.hpp"
#include "../schemes/full.hpp"
#include "restore.hpp"
#include "saved_index.hpp"
#include "state_wire.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

class sequence_reader {
public:
    sequence_reader(cache& of, const source_view& read, const restore_options& options)
        : cache_(of), options_(options), source_(read), index_(source_), scratch_(of.pool().memory()) {
        check_cache();
        for (const tensor role : {tensor::key, tensor::value}) find_formats(role);
        for (int layer = 0; layer < of.layer_count(); ++layer)
            for (const tensor role : of.tensors(layer)) expect_tensors(role, layer);
        if (of.state_layout()) state_bytes_ = index_.take_state();
        index_.expect_no_more();
    }

    sequence run() {
        sequence s = cache_.new_sequence();
        for (int layer = 0; layer < cache_.layer_count(); ++layer) {
            if (same_layout_) {
                page_table& table = sequence_access::tables(s)[static_cast<std::size_t>(layer)];
                table.spans.reserve(table_capacity(saved(layer).spans.size() +
                                                   static_cast<std::size_t>(page_table::freed_spans(
                                                       saved(layer).freed[1], cache_.geometry()))));
                table.spans.assign(saved(layer).spans.begin(), saved(layer).spans.end());
                for (const tensor role : cache_.tensors(layer)) place(role, layer, table);
                table.restored(saved(layer).committed, cache_.geometry(layer), cache_.options().rollback,
                               index_.says_all());
                if (!options_.convert && cache_.holds_tokens(layer))
                    table.plan = plans_[static_cast<std::size_t>(saved(tensor::key, layer).target)];
            } else if (cache_.holds_tokens(layer)) {
                append_again(s, layer);
            }
        }
        if (cache_.state_layout()) read_state(s);
        sequence_access::commit_due(s);
        return s;
    }

private:
    // ---- before the first page ----

    const saved_layer& saved(int layer) const { return index_.layers()[static_cast<std::size_t>(layer)]; }
    const saved_table& saved(tensor role, int layer) const {
        return saved(layer).tables[static_cast<int>(role)];
    }
    const scheme_identity& identity(tensor role, std::size_t format) const {
        return index_.description().schemes[static_cast<std::size_t>(role)][format];
    }
    /// Index, in the cache's table, of a format of the file; -1 if the table does not have it.
    int mapped(tensor role, std::size_t format) const { return formats_[static_cast<int>(role)][format]; }

    void check_cache() {
        const saved_description& file = index_.description();
        expect(options_.model.empty() || options_.model == file.model, "the sequence was saved for model ",
               file.model, ", not for ", options_.model);
        const auto same = [](const char* name, int theirs, int mine) {
            expect(theirs == mine, "the saved sequence has ", name, " ", theirs, ", the cache ", mine);
        };
        const int layers = cache_.layer_count();
        same("layers", file.layers, layers);
        for (int layer = 0; layer < layers; ++layer) {
            const saved_shape theirs = file.shape_of(layer),
                              mine = saved_shape::of(cache_.layers()[static_cast<std::size_t>(layer)]);
            const auto same_in_layer = [&](const char* name, int their_number, int my_number) {
                if (their_number != my_number)
                    fail("the saved sequence has ", name, " ", their_number, ", the cache ", my_number,
                         ", in ", describe_layer(layer, cache_.layers()[static_cast<std::size_t>(layer)]));
            };
            same_in_layer("kind", theirs.kind, mine.kind);
            same_in_layer("kv_heads", theirs.kv_heads, mine.kv_heads);
            same_in_layer("head_dim", theirs.head_dim, mine.head_dim);
            same_in_layer("value_dim", theirs.value_dim, mine.value_dim);
            same_in_layer(mine.holds_keys_alone() ? "rotary channels" : "window", theirs.window, mine.window);
            same_in_layer("visible sinks", theirs.sinks, mine.sinks);
        }

        const auto same_option = [&](const char* name, int theirs, int mine) {
            expect(options_.convert || theirs == mine, "the saved sequence has ", name, " ", theirs,
                   ", the cache ", mine, "; restore_options::convert allows that");
            same_layout_ = same_layout_ && theirs == mine;
        };
        const page_geometry g = cache_.geometry();
        same_option("sinks", file.geometry.sinks, g.sinks);
        same_option("recent", file.geometry.recent, g.recent);
        same_option("page_tokens", file.geometry.page_tokens, g.page_tokens);
        const std::string mine = cache_.window().name();
        expect(options_.convert || file.window == mine, "the saved sequence has a window of ", file.window,
               ", the cache one of ", mine, "; restore_options::convert allows that");
        same_layout_ = same_layout_ && file.window == mine;
        for (int layer = 0; layer < layers; ++layer) {
            if (saved(layer).freed[1] > 0 && !same_layout_)
                fail(describe_layer(layer, cache_.layers()[static_cast<std::size_t>(layer)]),
                     ", has freed tokens ", saved(layer).freed[0], " to ", saved(layer).freed[1],
                     " of the saved sequence: sinks, recent, page_tokens and window format must be the same");
            const auto said = file.rotary.find(layer);
            for (const page_span& s : saved(layer).spans)
                expect_moved_alike(cache_.rotations(), layer, s.shift,
                                   said == file.rotary.end() ? nullptr : &said->second, !index_.says_all(),
                                   "the saved sequence has keys that");
        }
    }

    void find_formats(tensor role) {
        const auto& list = index_.description().schemes[static_cast<std::size_t>(role)];
        for (const scheme_identity& id : list) {
            found_identity found = find_identity(cache_.table(role), id);
            formats_[static_cast<int>(role)].push_back(found.index);
            if (role == tensor::key) plans_.push_back(std::move(found.plan));
        }
    }

    /// Checks that the tensors of this table's pages are the next ones of the file, and that this cache can
    /// use them.
    void expect_tensors(tensor role, int layer) {
        const saved_table& table = saved(role, layer);
        if (!options_.convert && mapped(role, static_cast<std::size_t>(table.target)) < 0)
            raise_unknown_format(
                cache_.table(role), identity(role, static_cast<std::size_t>(table.target)),
                layer_text(static_cast<std::size_t>(layer), role) + " of the saved sequence is to be");
        if (const int target = mapped(role, static_cast<std::size_t>(table.target));
            role == tensor::key && target >= 0)
            cache_.expect_fits(layer, target);
        const page_geometry& g = index_.description().geometry;
        const auto heads = static_cast<std::uint64_t>(cache_.shape(layer).kv_heads);
        const auto expect_pages = [&](const std::string& name, std::size_t count, std::uint32_t format,
                                      int tokens) {
            if (count == 0) return;
            index_.expect_tensor(name, "U8", {count, heads, block_bytes(role, layer, format, tokens)});
        };
        const auto check_plan = [&](std::size_t format) {
            const kvq::format plan = role == tensor::key ? plans_[format] : kvq::format{};
            if (plan) plan.functions().check(plan.scheme(), cache_.shape(layer), tensor::key);
        };
        check_plan(static_cast<std::size_t>(table.target));
        for (const saved_page& row : table.rows) check_plan(row.format);
        for (std::size_t first = 0; first < table.rows.size();) {
            const bool copies = first < table.copies;
            const std::size_t end = copies ? table.copies : table.rows.size();
            const auto& [format, tokens] = std::pair(table.rows[first].format, table.rows[first].tokens);
            std::size_t count = 1;
            while (first + count < end && table.rows[first + count].format == format &&
                   table.rows[first + count].tokens == tokens)
                ++count;
            expect_pages(
                copies ? copies_name(layer, role, tokens, g) : pages_name(layer, role, format, tokens, g),
                count, format, static_cast<int>(tokens));
            first += count;
        }
    }

    std::size_t block_bytes(tensor role, int layer, std::uint32_t format, int tokens) const {
        const block_shape shape{role, tokens, cache_.shape(layer).dim(role)};
        const int index = mapped(role, format);
        if (index >= 0 && role == tensor::key) cache_.expect_fits(layer, index);
        if (index >= 0) return cache_.table(role)[index].block_bytes(shape);
        return visit_float_type(other_window(role, layer, format),
                                [&]<class T>(T) { return full<T>{}.block_bytes(shape); });
    }

    /// Any format of the file that the cache does not have must be another window.
    float_type other_window(tensor role, int layer, std::uint32_t format) const {
        const scheme_identity& id = identity(role, format);
        if (format == 0)
            for (const float_type type : {float_type::fp16, float_type::bf16, float_type::fp32})
                if (id == scheme_identity{visit_float_type(type, []<class T>(T) { return full<T>{}.name(); }),
                                          std::nullopt})
                    return type;
        raise_unknown_format(cache_.table(role), id,
                             layer_text(static_cast<std::size_t>(layer), role) + " of the saved sequence is");
    }

    // ---- pages ----

    void read_page(tensor role, int layer, const saved_page& row, page& p) {
        source_.restart();
        source_.read(p.data(), p.upper_bytes(), "a page");
        if (p.lower) source_.read(p.lower, p.lower_bytes(), "a page");
        expect(source_.checksum() == row.checksum, "the saved sequence is damaged: the page of span ",
               row.span, " of ", layer_text(static_cast<std::size_t>(layer), role), " has checksum ",
               source_.checksum(), ", not ", row.checksum);
        p.not_finite = row.not_finite;
    }
    page_ref read_page(tensor role, int layer, const saved_page& row, page_pool& pool) {
        const auto tokens = static_cast<int>(row.tokens);
        const std::size_t bytes = block_bytes(role, layer, row.format, tokens) *
                                  static_cast<std::size_t>(cache_.shape(layer).kv_heads);
        const int format = mapped(role, row.format);
        page_ref p = pool.allocate(bytes, format, tokens,
                                   format < 0 ? 0 : cache_.lower_bytes(role, layer, format, tokens));
        if (role == tensor::key) p->plan = plans_[row.format];
        read_page(role, layer, row, *p);
        return p;
    }

    /// Pages of a cache with the layout of the file: unchanged, or one by one in another format. Spans share
    /// the pages that they shared.
    void place(tensor role, int layer, page_table& table) {
        const auto at = static_cast<std::size_t>(role);
        const saved_table& from = saved(role, layer);
        int& target = table.targets[at];
        if (!options_.convert) target = mapped(role, static_cast<std::size_t>(from.target));
        // The spans that show each row, or have it as their copy.
        std::vector<std::pair<std::int32_t, std::size_t>> shown, copied;
        for (std::size_t i = 0; i < from.of_span.size(); ++i) {
            shown.emplace_back(from.of_span[i][0], i);
            if (from.of_span[i][1] >= 0) copied.emplace_back(from.of_span[i][1], i);
        }
        std::sort(shown.begin(), shown.end());
        std::sort(copied.begin(), copied.end());
        auto shows = shown.begin();
        auto copies = copied.begin();
        for (std::size_t row = 0; row < from.rows.size(); ++row) {
            const auto number = static_cast<std::int32_t>(row);
            auto shows_end = shows, copies_end = copies;
            while (shows_end != shown.end() && shows_end->first == number) ++shows_end;
            while (copies_end != copied.end() && copies_end->first == number) ++copies_end;
            const bool changes = options_.convert && mapped(role, from.rows[row].format) != target;
            const auto stays = [&](const auto& show) {
                return !changes || static_cast<int>(show.second) >= saved(layer).committed ||
                       table.spans[show.second].sinks;
            };
            const bool is_kept = copies != copies_end || std::any_of(shows, shows_end, stays);
            const page_ref page = read_page(role, layer, from.rows[row], is_kept ? cache_.pool() : scratch_);
            // Copies that this cache would drop may still be needed to quantize a page to another format.
            for (; copies != copies_end; ++copies) table.spans[copies->second].copies[at] = page;
            page_ref exact, changed;
            for (auto show = shows; show != shows_end; ++show)
                if (const page_ref& copy = table.spans[show->second].copies[at]) exact = copy;
            for (; shows != shows_end; ++shows) {
                page_span& span = table.spans[shows->second];
                if (stays(*shows)) {
                    span.pages[at] = page;
                    continue;
                }
                if (!changed)
                    changed = exact && target == 0 ? exact
                                                   : converted_page(cache_, role, layer,
                                                                    exact ? *exact : *page, target, numbers_);
                if (target == 0) span.copies[at] = page_ref{};
                span.pages[at] = changed;
            }
        }
    }
    void read_state(sequence& s) {
        const std::size_t before = source_.position();
        const auto read = [](void* source, void* to, std::size_t bytes) {
            static_cast<exact_source*>(source)->read(to, bytes, "the state");
            return bytes;
        };
        s.state() = read_recurrent_state_from({&source_, read}, *cache_.state_layout(), cache_.pool(),
                                              cache_.options().snapshots);
        expect(source_.position() - before == state_bytes_, "the state of the saved sequence has ",
               source_.position() - before, " bytes, not ", state_bytes_);
    }

    // ---- a cache with another page layout ----

    /// Pages of a layer's K or V, by span. A 16-bit copy replaces its quantized page.
    struct loaded {
        std::vector<page_ref> pages;
        std::vector<std::uint32_t> formats;
    };

    loaded load(tensor role, int layer) {
        const saved_table& from = saved(role, layer);
        std::vector<page_ref> rows;
        for (const saved_page& row : from.rows) rows.push_back(read_page(role, layer, row, scratch_));
        loaded l;
        for (const auto& [page, copy] : from.of_span) {
            const auto row = static_cast<std::size_t>(copy < 0 ? page : copy);
            l.pages.push_back(rows[row]);
            l.formats.push_back(from.rows[row].format);
        }
        return l;
    }

    /// x^ of the tokens that a span shows, [head][token][channel], at their positions.
    token_view<const float> dequantize(tensor role, int layer, const page& p, std::uint32_t format,
                                       const page_span& span, std::vector<float>& values) {
        const block_shape shape{role, p.tokens, cache_.shape(layer).dim(role)};
        const int heads = cache_.shape(layer).kv_heads;
        values.resize(shape.values() * static_cast<std::size_t>(heads));
        const std::size_t bytes = block_bytes(role, layer, format, p.tokens);
        const int index = mapped(role, format);
        const default_arithmetic arithmetic;
        for (int h = 0; h < heads; ++h) {
            const std::byte* const block = p.data() + bytes * static_cast<std::size_t>(h);
            float* const to = values.data() + shape.values() * static_cast<std::size_t>(h);
            if (index < 0) {
                visit_float_type(other_window(role, layer, format), [&]<class T>(T) {
                    full<T>{}.dequantize(shape, block_id{layer, h}, block, to);
                });
                continue;
            }
            const kvq::format& f = cache_.table(role).of(p);
            block_id id{layer, h};
            const std::byte* const of_head = f.block_at(shape, p.data(), p.lower, h, id);
            f.functions().dequantize(f.scheme(), shape, id, of_head, float_type::fp32, to, shape.dim, to);
        }
        const detail::rotation* const rotate = role == tensor::key ? cache_.rotations().at(layer) : nullptr;
        if (rotate && span.shift != 0) (*rotate)(values.data(), p.tokens * heads, shape.dim, span.shift);
        return {values.data() + span.skip * shape.dim,      span.tokens, heads, shape.dim, shape.dim,
                static_cast<std::ptrdiff_t>(shape.values())};
    }

    void append_again(sequence& s, int layer) {
        const bool has_values = cache_.tensors(layer).size() == 2;
        const loaded keys = load(tensor::key, layer),
                     values = has_values ? load(tensor::value, layer) : loaded{};
        std::vector<float> k, v;
        if (!cache_.takes_steps(layer)) return append_at_once(s, layer, keys, values);
        for (std::size_t i = 0; i < keys.pages.size(); ++i) {
            const page_span& span = saved(layer).spans[i];
            s.append(layer, dequantize(tensor::key, layer, *keys.pages[i], keys.formats[i], span, k),
                     has_values
                         ? dequantize(tensor::value, layer, *values.pages[i], values.formats[i], span, v)
                         : token_view<const float>());
        }
    }

    /// All tokens of a layer with those of another text.
    void append_at_once(sequence& s, int layer, const loaded& keys, const loaded& values) {
        std::vector<float> all[2], page;
        const int n = saved(layer).tokens, heads = cache_.shape(layer).kv_heads;
        const auto rows = [&](tensor role, const loaded& of) {
            const int dim = cache_.shape(layer).dim(role);
            std::vector<float>& to = all[static_cast<std::size_t>(role)];
            for (std::size_t i = 0; i < of.pages.size(); ++i) {
                const auto x =
                    dequantize(role, layer, *of.pages[i], of.formats[i], saved(layer).spans[i], page);
                for (int t = 0; t < x.tokens; ++t)
                    for (int h = 0; h < heads; ++h) to.insert(to.end(), x.at(t, h), x.at(t, h) + dim);
            }
            return token_view<const float>(to.data(), n, heads, dim);
        };
        s.append(layer, rows(tensor::key, keys), rows(tensor::value, values));
    }

    cache& cache_;
    const restore_options& options_;
    exact_source source_;
    saved_index index_;
    page_pool scratch_;
    std::vector<int> formats_[2];
    std::vector<format> plans_;  // of keys, by format of the file; empty: none
    std::vector<float> numbers_;
    bool same_layout_ = true;
    std::uint64_t state_bytes_ = 0;
};

KVQ_FUNC sequence restore_from(cache& of, const source_view& read, const restore_options& options) {
    return sequence_reader(of, read, options).run();
}

}  // namespace detail
}}  // namespace kvq
