// Which page of a sequence lies where in which slice of a transfer (nccl_transfer.cuh), and sequences made
// from what came.
//
//   plan_sending     what the receiver's window and format make of a sequence: pages as they are, pages that
//                    are quantized on the way
//   plan_receiving   takes pages for what is offered; an error has changed nothing
//   pack, unpack     pages of one layer to and from a slice: one launch, and one for each run of pages that
//                    are quantized
//
// Both sides lay out the same slices from the list of formats. Contract: see nccl_transfer.cuh.
#pragma once

#include "nccl_wire.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

inline constexpr int window_kind = most_formats, sink_kind = most_formats + 1, page_kinds = most_formats + 2;

/// A page and its place in a slice. number -1: it is quantized to its place.
struct moved_page {
    int kind, number;  // of this rank's cache
    long long key_at, key_end, value_at, value_end;
};
/// Pages of a slice that are quantized from one kind to a format.
struct slice_conversion {
    int source;  // -1: the window
    int target, first, count;
    std::size_t key_at, value_at;  // of the target's pages in the slice
};
/// What a page shows: its tokens [begin, end).
struct wire_cut {
    std::int32_t page, begin, end;
};
struct transfer_plan {
    static constexpr std::size_t message_limit = std::size_t{144} << 20;
    struct slice {
        int first, end;  // pages
        std::size_t bytes;
        int first_conversion, end_conversion;
    };
    /// Of quantized pages, as the sender numbers them; then a wire_cut for each page that hides tokens.
    std::vector<std::int8_t> formats;
    std::vector<slice> list;
    std::vector<slice_conversion> conversions;

    /// Slices [first, end) of all layers, counted through, that travel together: large messages take less
    /// time.
    struct message {
        int first, end;
        std::size_t bytes;
    };
    std::vector<message> messages;
    void pack_messages(int layers) {
        messages.clear();
        for (int i = 0; i < layers * slices(); ++i) {
            const std::size_t bytes = slice_at(i % slices()).bytes;
            if (messages.empty() || messages.back().bytes + bytes > message_limit)
                messages.push_back({i, i, 0});
            messages.back().end = i + 1;
            messages.back().bytes += bytes;
        }
    }

    int slices() const noexcept { return static_cast<int>(list.size()); }
    const slice& slice_at(int i) const noexcept { return list[static_cast<std::size_t>(i)]; }
    std::size_t most_bytes() const noexcept {
        std::size_t most = 0;
        for (const message& m : messages) most = kvq::detail::larger(most, m.bytes);
        return most;
    }
};
/// The plan's lists on the device.
struct plan_memory {
    device_memory pages, from, to;
};

struct layer_kinds {
    layer_memory of[page_kinds];
};
/// Packs pages into a slice, or takes them out of it, and adds the checksum. A block takes keys or values of
/// every so-manieth page; those that were quantized to their place are only read.
template <bool Pack>
__global__ void __launch_bounds__(1024)
    move_pages_kernel(const __grid_constant__ layer_kinds kinds, const moved_page* pages, int count,
                      std::byte* slice, unsigned long long* checksum) {
    unsigned long long sum = 0;
    for (int job = static_cast<int>(blockIdx.x); job < 2 * count; job += static_cast<int>(gridDim.x)) {
        const moved_page p = pages[job / 2];
        const layer_memory& m = kinds.of[p.kind];
        const bool keys = job % 2 == 0, there = p.number >= 0;
        const long long at = keys ? p.key_at : p.value_at, end = keys ? p.key_end : p.value_end;
        const auto words = static_cast<std::size_t>(end - at) / sizeof(uint4);
        auto* const place = reinterpret_cast<uint4*>(slice + at);
        auto* const page = there
                               ? reinterpret_cast<uint4*>((keys ? m.keys : m.values) +
                                                          static_cast<std::size_t>(p.number) *
                                                              (keys ? m.key_page_bytes : m.value_page_bytes))
                               : place;
        const uint4* const from = Pack ? page : place;
        uint4* const to = Pack ? place : page;
        const std::uint64_t first_word = static_cast<std::uint64_t>(at) / 4;
        const auto put = [&](std::size_t i, const uint4& v) {
            if (there) to[i] = v;
            sum += checksum_of(v, first_word + 4 * i);
        };
        const std::size_t threads = blockDim.x;
        std::size_t i = threadIdx.x;
        for (; i + 3 * threads < words; i += 4 * threads) {  // four loads under way
            const uint4 a = from[i], b = from[i + threads], c = from[i + 2 * threads],
                        d = from[i + 3 * threads];
            put(i, a);
            put(i + threads, b);
            put(i + 2 * threads, c);
            put(i + 3 * threads, d);
        }
        for (; i < words; i += threads) put(i, from[i]);
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % 32 == 0) atomicAdd(checksum, sum);
}
/// On three quarters of the multiprocessors: a block of NCCL's kernels needs one for itself.
template <bool Pack>
status move_pages(const layer_kinds& kinds, const moved_page* pages, int count, std::byte* slice,
                  unsigned long long* checksum, cudaStream_t stream) {
    int device = 0, multiprocessors = 0;
    cudaError_t code = cudaGetDevice(&device);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (code != cudaSuccess) return runtime_error(code, "counting multiprocessors");
    const int blocks = kvq::detail::smaller(2 * count, kvq::detail::larger(1, multiprocessors * 3 / 4));
    return launch("launching copies of pages", overlap::no, move_pages_kernel<Pack>,
                  dim3(static_cast<unsigned>(blocks)), 1024, 0, stream, kinds, pages, count, slice, checksum);
}

/// Reads and makes sequences of a cache.
struct transfer_access {
    static status check(const cache& c, sequence_id id) {
        if (status s = c.check_equal_layers("a transfer"); !s) return s;
        if (status s = c.check_here(id); !s) return s;
        if (!pages_of(c, id).moved.empty())
            return bad_value("sequence %d has keys that erase or shift have moved: its pages do not say so",
                             id.index);
        return {};
    }
    /// All layers of a cache that check() has let through.
    static const layer_group& group(const cache& c) { return c.groups_[0]; }
    static std::uint64_t generation(const cache& c) { return group(c).generation(); }
    static const sequence_pages& pages_of(const cache& c, sequence_id id) { return c.entry_of(id).pages[0]; }
    static const device_pages& pool(const cache& c, int kind) {
        return kind == window_kind ? group(c).window
               : kind == sink_kind ? group(c).sinks
                                   : group(c).quantized[static_cast<std::size_t>(kind)];
    }

    static status check_name(const std::string& name) {
        if (name.size() < most_name) return {};
        return bad_value("the name of format %.60s has %zu bytes, a message takes %zu", name.c_str(),
                         name.size(), most_name - 1);
    }
    static status make_request(const cache& c, std::string_view format, transfer_request& r) {
        if (status s = c.check_equal_layers("a transfer"); !s) return s;
        const std::string name(format);
        if (!name.empty() && group(c).format.find(name) < 0)
            return bad_value("%.60s is not a format of the receiving cache", name.c_str());
        if (status f = check_name(name); !f) return f;
        r.layers = group(c).shape.layers;
        r.kv_heads = group(c).shape.kv_heads;
        r.head_dim = group(c).shape.head_dim;
        r.value_dim = group(c).shape.dim(tensor::value);
        r.type = static_cast<int>(group(c).format.type);
        r.page_tokens = group(c).geometry.page_tokens;
        r.sinks = group(c).geometry.sinks;
        r.recent = group(c).geometry.recent;
        r.rollback = group(c).geometry.rollback;
        r.ring = group(c).geometry.ring;
        std::memcpy(r.format, name.data(), name.size());
        return {};
    }

    /// What a page of the sequence is, here and on its way.
    struct entry {
        int kind, number;        // here, or where it goes to
        int wire;                // as it travels, in the sender's numbers
        bool converted = false;  // kind and number are those of its source
    };
    static status plan_sending(const cache& c, sequence_id id, const transfer_request& r,
                               transfer_offer& offer, transfer_plan& plan, plan_memory& memory,
                               cudaStream_t stream) {
        transfer_request own;
        (void)make_request(c, {}, own);
        if (r.layers != own.layers || r.kv_heads != own.kv_heads || r.head_dim != own.head_dim ||
            r.value_dim != own.value_dim || r.type != own.type)
            return bad_value(
                "the receiver has %d layers of %d x %d and %d, the sender %d of %d x %d and %d, or "
                "another type",
                r.layers, r.kv_heads, r.head_dim, r.value_dim, own.layers, own.kv_heads, own.head_dim,
                own.value_dim);
        if (r.sinks != own.sinks || r.page_tokens != own.page_tokens || r.recent > own.recent)
            return bad_value(
                "sinks, page_tokens and recent are %d, %d, %d at the receiver, %d, %d, %d at the sender",
                r.sinks, r.page_tokens, r.recent, own.sinks, own.page_tokens, own.recent);
        int asked = -1;
        if (r.format[0] != '\0') {
            asked = group(c).format.find(r.format);
            if (asked < 0) return bad_value("%.60s is not a format of the sending cache", r.format);
        }
        const sequence_pages& s = pages_of(c, id);
        if (status t = check_no_plans(c); !t) return t;
        const device_geometry g{{r.sinks, r.recent, r.page_tokens}, r.rollback, r.ring};
        const int n = s.paged_tokens(g), pages = s.pages(), committed = s.committed_after(0, g);
        // 16-bit values that the receiver would have kept for its rollback, where the sender has them.
        int first_copy = kvq::detail::larger(s.first_in_window(), pages - r.ring);
        while (first_copy < committed && g.commit_at(first_copy) <= n - r.rollback) ++first_copy;
        first_copy = kvq::detail::smaller(first_copy, committed);

        std::vector<entry> entries;
        plan.formats.clear();
        for (int i = 0; i < committed; ++i) {
            const bool quantized = i < s.committed();
            const int kind = quantized ? s.format_of(s[i]) : window_kind;
            const int wire = asked >= 0 ? asked : quantized ? kind : s.target();
            entries.push_back({kind, s.number_of(s[i]), wire, wire != kind});
            plan.formats.push_back(static_cast<std::int8_t>(wire));
        }
        offer.cut_pages = s.cut_pages(g);
        for (int i = 0; i < s.committed(); ++i) {
            if (!s.is_cut(s[i], g)) continue;
            const wire_cut cut{i, s[i].skip, s[i].skip + s[i].tokens};
            const auto* const bytes = reinterpret_cast<const std::int8_t*>(&cut);
            plan.formats.insert(plan.formats.end(), bytes, bytes + sizeof cut);
        }
        for (int i = first_copy; i < pages; ++i)
            entries.push_back({window_kind, s.window_page(i)->number, window_kind});
        for (const page_ref& p : s.sinks) entries.push_back({sink_kind, p->number, sink_kind});

        offer.tokens = s.tokens();
        offer.committed = committed;
        offer.first_copy = first_copy;
        offer.target = asked >= 0 ? asked : s.target();
        offer.bytes = 0;
        for (const entry& e : entries) offer.bytes += pool(c, e.wire).page_bytes();
        offer.bytes_as_is = 0;
        for (int i = 0; i < s.committed(); ++i) offer.bytes_as_is += s[i].pages[0]->bytes;
        for (int i = s.first_in_window(); i < pages; ++i) offer.bytes_as_is += group(c).window.page_bytes();
        offer.bytes_as_is += s.sinks.size() * group(c).sinks.page_bytes();
        for (std::size_t f = 0; f < group(c).format.kinds.size(); ++f) {
            const std::string& name = group(c).format.kinds[f].name;
            if (status r = check_name(name); !r) return r;
            std::memcpy(offer.names[f], name.data(), name.size());
            offer.fingerprints[f] = group(c).keys[f].fingerprint();
        }
        offer.formats_checksum = host_checksum(plan.formats.data(), plan.formats.size());
        std::vector<int> same(page_kinds);
        for (int k = 0; k < page_kinds; ++k) same[static_cast<std::size_t>(k)] = k;
        return lay_out(c, entries, same, plan, memory, stream);
    }

    static status check_no_plans(const cache& c) {
        if (group(c).geometry.commits_from == 0) return {};
        return bad_value(
            "keys have plans of their sequences, which are not sent between GPUs: key_statistics::off, or "
            "statistics");
    }

    /// Takes pages for the sequence of an offer. An error has changed nothing.
    static status plan_receiving(cache& c, const transfer_offer& offer, transfer_plan& plan,
                                 plan_memory& memory, sequence_id& made, cudaStream_t stream) {
        if (offer.formats_checksum != host_checksum(plan.formats.data(), plan.formats.size()))
            return bad_value("the formats of %zu pages came damaged", plan.formats.size());
        const device_geometry& g = group(c).geometry;
        if (status t = check_no_plans(c); !t) return t;
        const auto committed = static_cast<std::size_t>(offer.committed);
        sequence_pages s;
        if (group(c).plans.tokens > 0) s.plan = group(c).plans.even;
        kvq::detail::page_table& table = s.table;
        std::vector<wire_cut> shows(committed, {0, 0, g.page_tokens});
        for (int i = 0, next = 0; i < offer.cut_pages; ++i) {
            wire_cut cut;
            std::memcpy(&cut, &plan.formats[committed + static_cast<std::size_t>(i) * sizeof cut],
                        sizeof cut);
            if (cut.page < next || cut.page >= offer.committed || cut.begin < 0 || cut.begin >= cut.end ||
                cut.end > g.page_tokens)
                return bad_value("page %d of %d shows its tokens %d to %d", cut.page, offer.committed,
                                 cut.begin, cut.end);
            shows[static_cast<std::size_t>(cut.page)] = cut;
            next = cut.page + 1;
        }
        const auto add = [&](page_span span) {
            table.tokens = span.end();
            table.spans.push_back(std::move(span));
        };
        if (g.sinks > 0 && offer.tokens > 0) add(table.next_span(offer.tokens, g));
        for (const wire_cut& cut : shows)
            add({table.tokens, cut.end - cut.begin, g.page_tokens, {}, {}, cut.begin});
        if (table.tokens > offer.tokens)
            return bad_value("%d pages of %d tokens show %d", offer.committed, offer.tokens, table.tokens);
        table.committed = s.sink_spans() != 0 && offer.tokens < g.sinks ? 0 : table.size();
        while (table.tokens < offer.tokens) add(table.next_span(offer.tokens, g));
        table.restored(table.committed, g, g.rollback);
        const int pages = s.pages(), sinks = g.sink_pages(offer.tokens);
        if (offer.tokens > c.options_.max_tokens || pages > group(c).columns)
            return bad_value("a sequence of %d tokens in %d pages, but max_tokens is %d and cut_pages %d",
                             offer.tokens, pages, c.options_.max_tokens, c.options_.cut_pages);
        if (pages - offer.first_copy > g.ring || offer.first_copy > offer.committed)
            return bad_value("%d pages from page %d on do not fit a window of %d pages", pages,
                             offer.first_copy, g.ring);
        std::vector<int> local(page_kinds, -1);
        local[window_kind] = window_kind;
        local[sink_kind] = sink_kind;
        const auto map = [&](int wire) -> status {
            if (wire < 0 || wire >= most_formats)
                return bad_value("a page has format %d of the sender", wire);
            int& f = local[static_cast<std::size_t>(wire)];
            if (f < 0) f = group(c).format.find(offer.names[wire]);
            if (f < 0) return bad_value("%.60s is not a format of the receiving cache", offer.names[wire]);
            if (group(c).keys[static_cast<std::size_t>(f)].fingerprint() != offer.fingerprints[wire])
                return bad_value("%.60s was made from other statistics, or is rotated by other matrices",
                                 offer.names[wire]);
            return {};
        };
        if (status r = map(offer.target); !r) return r;
        s.set_target(local[static_cast<std::size_t>(offer.target)]);
        std::vector<int> wanted(group(c).quantized.size(), 0);
        for (std::size_t i = 0; i < committed; ++i) {
            if (status r = map(plan.formats[i]); !r) return r;
            ++wanted[static_cast<std::size_t>(local[static_cast<std::size_t>(plan.formats[i])])];
        }
        if (status r = c.groups_[0].ensure_free(wanted, pages - offer.first_copy, sinks, stream); !r)
            return r;
        cache::unfinished_sequence fresh{c, c.new_sequence()};
        std::vector<entry> entries;
        const auto take = [&](page_ref& p, int kind, int wire) {
            p = pool(c, kind).pages().take();
            entries.push_back({kind, p->number, wire});
        };
        for (std::size_t i = 0; i < committed; ++i)
            take(table[static_cast<int>(i) + s.sink_spans()].pages[0],
                 local[static_cast<std::size_t>(plan.formats[i])], plan.formats[i]);
        for (int i = offer.first_copy; i < pages; ++i) {
            page_span& span = table[i + s.sink_spans()];
            take(i < offer.committed ? span.copies[0] : span.pages[0], window_kind, window_kind);
        }
        for (int i = 0; i < sinks; ++i) take(s.sinks.emplace_back(), sink_kind, sink_kind);
        table.copies_from = kvq::detail::smaller(table.committed, offer.first_copy + s.sink_spans());
        c.entry_of(fresh.id).pages[0] = std::move(s);
        const status result = lay_out(c, entries, local, plan, memory, stream);
        if (result) made = fresh.take();
        return result;
    }

    /// Slices, places and conversions. local: this cache's kind of each of the sender's.
    static status lay_out(const cache& c, const std::vector<entry>& entries, const std::vector<int>& local,
                          transfer_plan& plan, plan_memory& memory, cudaStream_t stream) {
        const auto layers = static_cast<std::size_t>(group(c).shape.layers);
        std::size_t all = 0;
        for (const entry& e : entries)
            all += pool(c, local[static_cast<std::size_t>(e.wire)]).page_bytes() / layers;
        const std::size_t count = entries.size(), slices = all / transfer_plan::message_limit + 1,
                          per_slice = kvq::detail::larger<std::size_t>(1, (count + slices - 1) / slices);
        std::vector<moved_page> moved;
        std::vector<int> from, to;
        plan.list.clear();
        plan.conversions.clear();
        for (std::size_t first = 0; first < count; first += per_slice) {
            const std::size_t end = kvq::detail::smaller(count, first + per_slice);
            std::size_t pages[page_kinds] = {}, key_at[page_kinds] = {}, value_at[page_kinds] = {},
                        at = sizeof(slice_header);
            for (std::size_t i = first; i < end; ++i) ++pages[entries[i].wire];
            for (int k = 0; k < page_kinds; ++k) {
                if (pages[k] == 0) continue;
                const pool_memory& m = pool(c, local[static_cast<std::size_t>(k)]).memory();
                key_at[k] = at;
                value_at[k] = key_at[k] + pages[k] * m.key_page_bytes;
                at = value_at[k] + pages[k] * m.value_page_bytes;
                pages[k] = 0;
            }
            const auto first_conversion = static_cast<int>(plan.conversions.size());
            for (std::size_t i = first; i < end; ++i) {
                const entry& e = entries[i];
                const pool_memory& m = pool(c, local[static_cast<std::size_t>(e.wire)]).memory();
                const std::size_t number = pages[e.wire]++;
                const auto key = static_cast<long long>(key_at[e.wire] + number * m.key_page_bytes),
                           value = static_cast<long long>(value_at[e.wire] + number * m.value_page_bytes);
                moved.push_back({e.kind, e.converted ? -1 : e.number, key,
                                 key + static_cast<long long>(m.key_page_bytes), value,
                                 value + static_cast<long long>(m.value_page_bytes)});
                if (!e.converted) continue;
                const int source = e.kind == window_kind ? -1 : e.kind;
                if (static_cast<int>(plan.conversions.size()) == first_conversion ||
                    plan.conversions.back().source != source || plan.conversions.back().target != e.wire)
                    plan.conversions.push_back(
                        {source, e.wire, static_cast<int>(from.size()), 0, key_at[e.wire], value_at[e.wire]});
                ++plan.conversions.back().count;
                from.push_back(e.number);
                to.push_back(static_cast<int>(number));
            }
            plan.list.push_back({static_cast<int>(first), static_cast<int>(end), at, first_conversion,
                                 static_cast<int>(plan.conversions.size())});
        }
        plan.pack_messages(group(c).shape.layers);
        status result;
        const auto put = [&](device_memory& m, const auto& list) {
            const std::size_t bytes = list.size() * sizeof(list[0]);
            m = device_memory();
            if (result) result = m.allocate(c.options_.memory, bytes, "a list of pages", stream);
            if (!result || bytes == 0) return;
            const cudaError_t code =
                cudaMemcpyAsync(m.as<>(), list.data(), bytes, cudaMemcpyHostToDevice, stream);
            if (code != cudaSuccess) result = runtime_error(code, "copying a list of pages");
        };
        put(memory.pages, moved);
        put(memory.from, from);
        put(memory.to, to);
        return result;
    }

    static layer_kinds kinds_of(const cache& c, int layer) {
        layer_kinds k;
        for (int i = 0; i < page_kinds; ++i)
            if (i >= most_formats || i < group(c).kinds()) k.of[i] = pool(c, i).memory().layer(layer);
        return k;
    }
    static status pack(const cache& c, const transfer_plan& plan, const transfer_plan::slice& of, int layer,
                       int number, std::byte* slice, const plan_memory& memory, cudaStream_t stream) {
        if (of.first_conversion < of.end_conversion) {
            // Bytes that no value has are zero.
            const cudaError_t code = cudaMemsetAsync(slice, 0, of.bytes, stream);
            if (code != cudaSuccess) return runtime_error(code, "zeroing a slice");
        }
        for (int i = of.first_conversion; i < of.end_conversion; ++i) {
            const slice_conversion& x = plan.conversions[static_cast<std::size_t>(i)];
            layer_view l = group(c).view(layer, 0);
            layer_memory& to = l.quantized[x.target].pages;
            to.keys = slice + x.key_at;
            to.values = slice + x.value_at;
            if (status s = group(c).format.functions->requantize(
                    l, x.source, l.window, x.target, {}, memory.from.as<const int>() + x.first,
                    memory.to.as<const int>() + x.first, x.count, stream);
                !s)
                return s;
        }
        if (status s = write_header(slice, of.bytes, layer, number, stream); !s) return s;
        return move_pages<true>(kinds_of(c, layer), memory.pages.as<const moved_page>() + of.first,
                                of.end - of.first, slice, &reinterpret_cast<slice_header*>(slice)->checksum,
                                stream);
    }
    static status unpack(const cache& c, const transfer_plan::slice& of, int layer, std::byte* slice,
                         slice_header* noted, const plan_memory& memory, cudaStream_t stream) {
        if (status s = note_header(slice, noted, stream); !s) return s;
        return move_pages<false>(kinds_of(c, layer), memory.pages.as<const moved_page>() + of.first,
                                 of.end - of.first, slice, &noted->computed, stream);
    }
};

}}}  // namespace kvq::cuda::detail
