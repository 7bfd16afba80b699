// A sequence from a cache on the device to one on the CPU, and back: pages are copied, nothing is converted.
//
//   auto on_host = cpu.new_sequence();
//   s = cuda::offload(gpu, id, on_host, stream);      gpu keeps its sequence until gpu.free(id)
//   s = cuda::onload(on_host, gpu, id, stream);       a new sequence of gpu
//
// Both caches have the same shape, window type, sinks, recent, rollback and page_tokens, and formats of the same names. Quantized pages and
// full 16-bit pages are the same bytes on both sides; pages that are not full differ in how many tokens they have room for. Quantized pages
// show the same tokens on both sides; keys that have moved (erase, shift, splice of a cache with rotary options) stay on the CPU.
// Contract: both calls wait for the stream. A status that is not success has changed nothing. Memory that the CPU's pool does not have
// raises kvq::out_of_memory or std::bad_alloc, as in all calls on that cache. O(bytes).
#pragma once

#include "../../cache/sequence.hpp"
#include "cache.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

struct cache_access {
    using page_list = std::vector<page_ref>;

    /// Index in the CPU's table of a format of the device's cache; -1: it is not there.
    static int cpu_format(const kvq::cache& cpu, const cache& gpu, tensor role, int kind) {
        const device_format::kind& k = gpu.format_.kinds[static_cast<std::size_t>(kind)];
        const auto& table = cpu.table(role);
        for (int i = 1; i < table.size(); ++i) {
            const format_record& r = table[i].record();
            // Keys of a plan of widths have its fingerprint.
            const std::uint64_t plan =
                role == tensor::key ? gpu.keys_[static_cast<std::size_t>(kind)].fingerprint : 0;
            if ((role == tensor::key ? k.keys : k.values) == table[i].name() &&
                (r.has_fingerprint ? r.fingerprint : 0) == plan)
                return i;
        }
        return -1;
    }
    static status check(const kvq::cache& cpu, const cache& gpu) {
        if (gpu.format_.functions == nullptr) return bad_value("the cache on the device is not open");
        const kvq::cache_shape &a = cpu.shape(), &b = gpu.shape_;
        if (a.layers != b.layers || a.kv_heads != b.kv_heads || a.head_dim != b.head_dim ||
            a.dim(tensor::value) != b.dim(tensor::value))
            return bad_value(
                "the CPU's cache has %d layers of %d x %d and %d, the device's %d of %d x %d and %d",
                a.layers, a.kv_heads, a.head_dim, a.dim(tensor::value), b.layers, b.kv_heads, b.head_dim,
                b.dim(tensor::value));
        const kvq::cache_options& o = cpu.options();
        const page_rules& r = gpu.rules_;
        if (o.sinks != r.sinks || o.recent != r.recent || o.rollback != r.rollback ||
            o.page_tokens != r.page_tokens)
            return bad_value(
                "sinks, recent, rollback and page_tokens are %d, %d, %d, %d on the CPU, but %d, %d, %d, %d "
                "on the device",
                o.sinks, o.recent, o.rollback, o.page_tokens, r.sinks, r.recent, r.rollback, r.page_tokens);
        if (cpu.window().functions().value_type != gpu.format_.type)
            return bad_value("the windows of both caches have different types");
        return {};
    }
    static status unknown(const cache& gpu, int kind) {
        return bad_value("the CPU's cache does not list %.60s, or made it from other statistics",
                         gpu.format_.kinds[static_cast<std::size_t>(kind)].name.c_str());
    }
    static status copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                       cudaStream_t stream) {
        const cudaError_t code = cudaMemcpyAsync(to, from, bytes, kind, stream);
        return code == cudaSuccess ? status{} : runtime_error(code, "moving pages");
    }
    static status wait(cudaStream_t stream) {
        const cudaError_t code = cudaStreamSynchronize(stream);
        return code == cudaSuccess ? status{} : runtime_error(code, "moving pages");
    }
    static page_ref zeroed(page_pool& pool, std::size_t bytes, int tokens) {
        page_ref p = pool.allocate(bytes, 0, tokens);
        std::memset(p->data(), 0, bytes);
        return p;
    }
    /// Tokens [from_at, from_at + count) of a 16-bit page to those from to_at on of another.
    static void copy_values(float_type type, const page& from, int from_at, page& to, int to_at, int count,
                            tensor role, int dim, int heads) {
        kvq::detail::visit_float_type(type, [&]<class T>(T) {
            const block_shape source{role, from.tokens, dim}, target{role, to.tokens, dim};
            const value_layout<T> source_layout(source), target_layout(target);
            for (int h = 0; h < heads; ++h) {
                const std::byte* const a =
                    from.data() + full<T>{}.block_bytes(source) * static_cast<std::size_t>(h);
                std::byte* const b = to.data() + full<T>{}.block_bytes(target) * static_cast<std::size_t>(h);
                for (int t = 0; t < count; ++t)
                    for (int c = 0; c < dim; ++c)
                        std::memcpy(b + sizeof(T) * full<T>::element(target_layout, target, to_at + t, c),
                                    a + sizeof(T) * full<T>::element(source_layout, source, from_at + t, c),
                                    sizeof(T));
            }
        });
    }

    /// A page of 16-bit values that comes from, or goes to, pages of another room.
    struct conversion {
        page_ref other;  // as it is on the device
        page* here;
        int at, count;  // tokens of `here`
        tensor role;
    };

    static status offload(const cache& gpu, sequence_id id, sequence& to, cudaStream_t stream) {
        kvq::cache& cpu = kvq::detail::sequence_access::cache(to);
        if (status s = check(cpu, gpu); !s) return s;
        if (status s = gpu.check_here(id); !s) return s;
        if (to.tokens() != 0)
            return bad_value("the CPU's sequence holds %d tokens, but must be empty", to.tokens());
        if (status s = gpu.check_no_draft(std::span(&id, 1)); !s) return s;
        const sequence_pages& s = gpu.entry_of(id).pages;
        const page_rules& rules = gpu.rules_;
        const page_geometry g = cpu.geometry();
        int formats[2][most_formats];
        for (const tensor role : {tensor::key, tensor::value})
            for (int f = 0; f < gpu.kinds(); ++f)
                formats[static_cast<int>(role)][f] = cpu_format(cpu, gpu, role, f);
        const auto listed = [&](int f) { return formats[0][f] >= 0 && formats[1][f] >= 0; };
        if (!listed(s.target)) return unknown(gpu, s.target);
        for (const held_page& p : s.quantized)
            if (!listed(p.format)) return unknown(gpu, p.format);

        page_pool scratch(cpu.pool().memory());
        std::vector<conversion> conversions;
        std::vector<std::vector<page_span>> layers(static_cast<std::size_t>(cpu.shape().layers));
        status result;
        const int pages = rules.pages(s.places());
        const bool sinks = rules.sinks > 0 && s.tokens > 0;
        for (int layer = 0; layer < cpu.shape().layers && result; ++layer) {
            auto& spans = layers[static_cast<std::size_t>(layer)];
            spans.reserve(static_cast<std::size_t>(pages) + 1);
            const auto get = [&](page& p, const device_pages& pool, tensor role, int number) {
                if (result)
                    result = copy(p.data(), pool.memory().page(role, layer, number),
                                  pool.memory().page_bytes(role), cudaMemcpyDeviceToHost, stream);
            };
            const auto window_page = [&](tensor role, int number, int tokens) {
                const int room = g.window_tokens(tokens, g.page_tokens);
                page_ref p = zeroed(cpu.pool(), cpu.page_bytes(role, 0, room), room);
                if (room == g.page_tokens && tokens == room) {
                    get(*p, gpu.window_, role, number);
                } else {
                    page_ref whole = zeroed(scratch, gpu.window_.memory().page_bytes(role), g.page_tokens);
                    get(*whole, gpu.window_, role, number);
                    conversions.push_back({std::move(whole), p.get(), 0, tokens, role});
                }
                return p;
            };
            if (sinks) {
                const int held = kvq::detail::smaller(s.tokens, g.sinks),
                          room = g.window_tokens(held, g.sinks);
                page_span span;
                span.tokens = held;
                span.room = g.sinks;
                span.sinks = true;
                for (const tensor role : {tensor::key, tensor::value}) {
                    page_ref p = zeroed(cpu.pool(), cpu.page_bytes(role, 0, room), room);
                    for (int i = 0; i < rules.sink_pages(held); ++i) {
                        constexpr int size = page_rules::sink_page_tokens;
                        page_ref part = zeroed(scratch, gpu.sinks_.memory().page_bytes(role), size);
                        get(*part, gpu.sinks_, role, s.sinks[static_cast<std::size_t>(i)]);
                        conversions.push_back({std::move(part), p.get(), i * size,
                                               kvq::detail::smaller(size, held - i * size), role});
                    }
                    span.pages[static_cast<std::size_t>(role)] = std::move(p);
                }
                spans.push_back(std::move(span));
            }
            for (int i = 0; i < pages; ++i) {
                const bool quantized = i < s.committed();
                const held_page held = quantized ? s.quantized[static_cast<std::size_t>(i)] : held_page{};
                const int first = quantized ? held.position : rules.first_place(i) - s.hidden,
                          tokens = quantized ? held.shown()
                                             : kvq::detail::smaller(g.page_tokens, s.tokens - first);
                page_span span;
                span.first_token = first;
                span.tokens = tokens;
                span.skip = held.begin;
                span.room = g.page_tokens;
                const auto number = [&] { return s.window[static_cast<std::size_t>(i % rules.ring)]; };
                for (const tensor role : {tensor::key, tensor::value}) {
                    const auto at = static_cast<std::size_t>(role);
                    if (!quantized) {
                        span.pages[at] = window_page(role, number(), tokens);
                        continue;
                    }
                    const device_pages& pool = gpu.quantized_[static_cast<std::size_t>(held.format)];
                    span.pages[at] = cpu.pool().allocate(pool.memory().page_bytes(role),
                                                         formats[at][held.format], g.page_tokens);
                    get(*span.pages[at], pool, role, held.number);
                    if (i >= s.first_copy) span.copies[at] = window_page(role, number(), tokens);
                }
                spans.push_back(std::move(span));
            }
        }
        if (result) result = wait(stream);
        if (!result) return result;
        for (const conversion& c : conversions)
            copy_values(gpu.format_.type, *c.other, 0, *c.here, c.at, c.count, c.role,
                        cpu.shape().dim(c.role), cpu.shape().kv_heads);
        auto& tracks = kvq::detail::sequence_access::tracks(to);
        for (auto& track : tracks)
            track.spans.reserve(kvq::detail::table_capacity(static_cast<std::size_t>(pages) + 1));
        const int before = sinks && s.tokens >= rules.sinks ? 1 : 0;  // the CPU counts the sinks as a span
        for (std::size_t layer = 0; layer < layers.size(); ++layer) {
            auto& track = tracks[layer];
            for (page_span& span : layers[layer]) track.spans.push_back(std::move(span));
            track.tokens = s.tokens;
            track.committed = s.committed() + before;
            track.first_copy = s.first_copy + before;
            for (const held_page& p : s.quantized) track.rearranged = track.rearranged || p.begin > 0;
            for (int role = 0; role < 2; ++role) track.targets[role] = formats[role][s.target];
        }
        return result;
    }

    /// The format of the device's cache that a pair of the CPU's is; -1: none.
    static int gpu_format(const kvq::cache& cpu, const cache& gpu, int keys, int values) {
        for (int f = 0; f < gpu.kinds(); ++f)
            if (cpu_format(cpu, gpu, tensor::key, f) == keys &&
                cpu_format(cpu, gpu, tensor::value, f) == values)
                return f;
        return -1;
    }
    static status no_format(const kvq::cache& cpu, int keys, int values) {
        return bad_value(
            "keys in %.55s with values in %.55s: add their format to the make_device_format<...>()",
            format_text(cpu.table(tensor::key)[keys]).c_str(),
            format_text(cpu.table(tensor::value)[values]).c_str());
    }

    static status onload(const sequence& from, cache& gpu, sequence_id& made, cudaStream_t stream) {
        const kvq::cache& cpu = kvq::detail::sequence_access::cache(from);
        if (status s = check(cpu, gpu); !s) return s;
        const auto& tracks = kvq::detail::sequence_access::tracks(from);
        const auto& first = tracks[0];
        const page_rules& rules = gpu.rules_;
        for (const auto& track : tracks)
            if (track.draft > 0)
                return bad_value("a layer holds a draft of %d tokens: keep() a part of it first",
                                 track.draft);
        const int tokens = first.tokens, sinks = rules.sinks > 0 && tokens > 0 ? 1 : 0,
                  before = sinks != 0 && tokens >= rules.sinks ? 1 : 0, committed = first.committed - before;
        if (tokens > gpu.options_.max_tokens)
            return bad_value("a sequence of %d tokens, but max_tokens is %d", tokens,
                             gpu.options_.max_tokens);
        sequence_pages s;
        s.tokens = tokens;
        s.target = gpu_format(cpu, gpu, first.targets[0], first.targets[1]);
        if (s.target < 0) return no_format(cpu, first.targets[0], first.targets[1]);
        s.first_copy = kvq::detail::larger(0, committed);
        for (std::size_t layer = 0; layer < tracks.size(); ++layer) {
            const auto& track = tracks[layer];
            if (track.tokens != tokens || track.committed != first.committed ||
                track.targets[0] != first.targets[0] || track.targets[1] != first.targets[1])
                return bad_value(
                    "layer %zu has other tokens or formats than layer 0; the device has one table for all",
                    layer);
            for (int i = 0; i < track.size(); ++i) {
                const page_span& span = track[i];
                const bool of_sinks = sinks != 0 && i == 0;
                if (span.sinks != of_sinks || span.shift != 0 ||
                    (of_sinks && span.tokens != kvq::detail::smaller(tokens, rules.sinks)))
                    return bad_value(
                        "tokens %d to %d were moved by erase, shift or splice, or are sinks that were; the "
                        "device has sinks and keys in their place only",
                        span.first_token, span.end());
            }
            for (int i = 0; i + sinks < track.size(); ++i) {
                const page_span& span = track[i + sinks];
                if (i >= committed) {
                    const bool last = i + sinks + 1 == track.size();
                    if (span.skip != 0 || (last ? span.room : span.tokens) != rules.page_tokens)
                        return bad_value(
                            "tokens %d to %d are in a 16-bit page that an erase has closed; the device has "
                            "none in its window",
                            span.first_token, span.end());
                    continue;
                }
                for (const page_ref& p : span.pages)
                    if (p->tokens != rules.page_tokens)
                        return bad_value(
                            "tokens %d to %d are in a page for %d tokens, which a cut has left; the device "
                            "has pages "
                            "for %d only (cache_options::repack)",
                            span.first_token, span.end(), p->tokens, rules.page_tokens);
                const int format = gpu_format(cpu, gpu, span.pages[0]->format, span.pages[1]->format);
                if (format < 0) return no_format(cpu, span.pages[0]->format, span.pages[1]->format);
                const held_page held{format, -1, span.first_token, span.skip, span.skip + span.tokens};
                if (layer == 0) s.quantized.push_back(held);
                const held_page& same = s.quantized[static_cast<std::size_t>(i)];
                if (same.format != format || same.position != held.position || same.begin != held.begin ||
                    same.end != held.end)
                    return bad_value(
                        "layer %zu has other tokens or formats than layer 0; the device has one table for "
                        "all",
                        layer);
                if (held.shown() < rules.page_tokens) s.cut_end = i + 1;
            }
            // From here on. A page that an erase has closed never returns to the window here.
            int copies = kvq::detail::larger(0, committed);
            while (copies > s.cut_end && track[copies - 1 + sinks].copies[0] &&
                   track[copies - 1 + sinks].copies[1])
                --copies;
            s.first_copy = layer == 0 ? copies : kvq::detail::larger(s.first_copy, copies);
        }
        const int pages = first.size() - sinks;
        if (s.committed() > 0)
            s.hidden =
                rules.first_place(s.committed()) - (s.quantized.back().position + s.quantized.back().shown());
        s.first_copy = kvq::detail::larger(s.first_copy, pages - rules.ring);
        if (pages > gpu.columns_)
            return bad_value("a sequence of %d tokens in %d pages, but max_tokens is %d and cut_pages %d",
                             tokens, pages, gpu.options_.max_tokens, gpu.options_.cut_pages);

        // Memory, then numbers, then bytes.
        std::vector<int> wanted(gpu.quantized_.size(), 0);
        for (const held_page& p : s.quantized) ++wanted[static_cast<std::size_t>(p.format)];
        const bool may_grow = gpu.options_.growing;
        for (std::size_t f = 0; f < wanted.size(); ++f)
            if (status r = gpu.quantized_[f].ensure(wanted[f], may_grow, stream); !r) return r;
        if (status r = gpu.window_.ensure(pages - s.first_copy, may_grow, stream); !r) return r;
        if (status r = gpu.sinks_.ensure(rules.sink_pages(tokens), may_grow, stream); !r) return r;
        const sequence_id id = gpu.new_sequence();
        s.window.assign(static_cast<std::size_t>(rules.ring), -1);
        for (held_page& p : s.quantized)
            p.number = gpu.quantized_[static_cast<std::size_t>(p.format)].numbers.take();
        for (int i = s.first_copy; i < pages; ++i)
            s.window[static_cast<std::size_t>(i % rules.ring)] = gpu.window_.numbers.take();
        for (int i = 0; i < rules.sink_pages(tokens); ++i) s.sinks.push_back(gpu.sinks_.numbers.take());
        gpu.entry_of(id).pages = s;

        page_pool scratch(cpu.pool().memory());
        page_list held;
        status result;
        for (int layer = 0; layer < cpu.shape().layers && result; ++layer) {
            const auto& track = tracks[static_cast<std::size_t>(layer)];
            for (const tensor role : {tensor::key, tensor::value}) {
                const auto at = static_cast<std::size_t>(role);
                const auto put = [&](const page& p, const device_pages& pool, int number) {
                    if (result)
                        result = copy(pool.memory().page(role, layer, number), p.data(),
                                      pool.memory().page_bytes(role), cudaMemcpyHostToDevice, stream);
                };
                // 16-bit tokens [from_at, from_at + count) of a page, in the room of the device's.
                const auto put_values = [&](const page& p, int from_at, int count, int room,
                                            const device_pages& pool, int number) {
                    if (p.tokens == room && from_at == 0) return put(p, pool, number);
                    held.push_back(zeroed(scratch, pool.memory().page_bytes(role), room));
                    copy_values(gpu.format_.type, p, from_at, *held.back(), 0, count, role,
                                cpu.shape().dim(role), cpu.shape().kv_heads);
                    put(*held.back(), pool, number);
                };
                for (std::size_t i = 0; i < s.sinks.size(); ++i) {
                    constexpr int size = page_rules::sink_page_tokens;
                    const int from_at = static_cast<int>(i) * size;
                    put_values(*track[0].pages[at], from_at,
                               kvq::detail::smaller(size, track[0].tokens - from_at), size, gpu.sinks_,
                               s.sinks[i]);
                }
                for (int i = 0; i < pages; ++i) {
                    const page_span& span = track[i + sinks];
                    if (i < committed) {
                        const held_page p = s.quantized[static_cast<std::size_t>(i)];
                        put(*span.pages[at], gpu.quantized_[static_cast<std::size_t>(p.format)], p.number);
                    }
                    if (i >= s.first_copy)
                        put_values(i < committed ? *span.copies[at] : *span.pages[at], 0, span.tokens,
                                   rules.page_tokens, gpu.window_,
                                   s.window[static_cast<std::size_t>(i % rules.ring)]);
                }
            }
        }
        if (result) result = wait(stream);
        if (!result) {
            (void)gpu.free(id);
            return result;
        }
        made = id;
        return result;
    }
};

}  // namespace detail

/// Copies a sequence to `to`, an empty one of a CPU cache with the same options.
inline status offload(const cache& from, sequence_id id, sequence& to, cudaStream_t stream) {
    return detail::cache_access::offload(from, id, to, stream);
}

/// Makes a sequence of the device's cache from one of the CPU's. All layers must hold the same tokens, and keys must be where they were
/// appended. A page that two parts of the sequence share (after an erase) becomes two.
inline status onload(const sequence& from, cache& to, sequence_id& made, cudaStream_t stream) {
    return detail::cache_access::onload(from, to, made, stream);
}

}}}  // namespace kvq::cuda
