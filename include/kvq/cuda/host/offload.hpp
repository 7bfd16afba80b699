// A sequence from a cache on the device to one on the CPU, and back: pages are copied, nothing is converted.
//
//   auto on_host = cpu.new_sequence();
//   s = cuda::offload(gpu, id, on_host, stream);      gpu keeps its sequence until gpu.free(id)
//   s = cuda::onload(on_host, gpu, id, stream);       a new sequence of gpu
//
// Both caches have the same layers, window type, sinks, recent, rollback and page_tokens, and formats of the
// same names. Quantized pages and full 16-bit pages are the same bytes on both sides; pages that are not full
// differ in how many tokens they have room for. Pages show the same tokens on both sides, and their keys have
// moved by the same numbers of positions.
// Contract: both calls wait for the stream. A status that is not success has changed nothing. Memory that the
// CPU's pool does not have raises kvq::out_of_memory or std::bad_alloc, as in all calls on that cache.
// O(bytes).
#pragma once

#include <map>
#include <utility>

#include "../../cache/sequence.hpp"
#include "../../cache/sequence_access.hpp"
#include "../../cache/window.hpp"
#include "cache.hpp"
#include "offload_plans.hpp"
#include "offload_state.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

struct cache_access {
    using page_list = std::vector<page_ref>;
    using page_table = common::page_table;

    /// Index in the CPU's table of a format of layers of the device's cache; -1: it is not there.
    static int cpu_format(const kvq::cache& cpu, const layer_group& gpu, tensor role, int kind) {
        const device_format::kind& k = gpu.format.kinds[static_cast<std::size_t>(kind)];
        const auto& table = cpu.table(role);
        for (int i = 1; i < table.size(); ++i) {
            const format_record& r = table[i].record();
            // Keys of a plan of widths have its fingerprint, and formats behind a transform that of both.
            const std::uint64_t state =
                gpu.keys[static_cast<std::size_t>(kind)].fingerprints[static_cast<int>(role)];
            if ((role == tensor::key ? k.keys : k.values) == table[i].name() &&
                (r.has_fingerprint ? r.fingerprint : 0) == state)
                return i;
        }
        return -1;
    }
    static std::span<const layer_group> groups(const cache& gpu) noexcept { return gpu.groups_; }
    /// Calls f(page) for every page that a sequence holds, those of its states included; for one that several
    /// of its spans show more than once.
    template <class F>
    static void for_each_page(const cache& gpu, sequence_id id, F&& f) {
        const auto visit = [&](const page_ref& p) {
            if (p) f(std::as_const(*p));
        };
        const cache::entry& e = gpu.entry_of(id);
        for (const sequence_pages& s : e.pages) {
            for (const auto* const list : {&s.sinks, &s.ahead}) std::ranges::for_each(*list, visit);
            for (const page_span& span : s.table.spans)
                for (const page_ref* const p : {&span.pages[0], &span.copies[0]}) visit(*p);
            for (const sequence_pages::leaving_page& l : s.leaving) visit(l.held);
        }
        if (e.state) e.state->for_each_page(f);
    }
    /// Has a sequence no draft, and no layer that still waits for a prompt that has begun?
    static status check_settled(const cache& gpu, sequence_id id) {
        if (status s = gpu.check_here(id); !s) return s;
        if (status s = gpu.check_no_draft(std::span(&id, 1)); !s) return s;
        return gpu.check_whole(std::span(&id, 1));
    }
    /// Can a format get statistics of this shape, and new sequences the format?
    static status check_calibration(const cache& gpu, std::string_view format, const cache_shape& of) {
        if (status s = gpu.check_statistics(format, of); !s) return s;
        return gpu.check_target(format);
    }
    static status check(const kvq::cache& cpu, const cache& gpu) {
        if (!gpu.is_open()) return bad_value("the cache on the device is not open");
        const std::vector<layer>&a = cpu.layers(), &b = gpu.layers();
        if (a.size() != b.size())
            return bad_value("the CPU's cache has %zu layers, the device's %zu", a.size(), b.size());
        for (std::size_t i = 0; i < a.size(); ++i) {
            const auto layer = static_cast<int>(i);
            const kvq::cache_shape x = cpu.shape(layer), y = gpu.shape(layer);
            const bool exact = gpu.states_ && gpu.states_->is_exact();
            const auto same_parts = [&](std::span<const state_part> p, std::span<const state_part> q) {
                // The CPU's snapshots can be quantized where those of the device are exact.
                const auto same = [&](state_part of_cpu, const state_part& of_gpu) {
                    if (exact) of_cpu.snapshot = of_gpu.snapshot;
                    return of_cpu == of_gpu;
                };
                return std::equal(p.begin(), p.end(), q.begin(), q.end(), same);
            };
            if (!same_parts(a[i].parts, b[i].parts) || a[i].kind != b[i].kind || a[i].owner != b[i].owner ||
                a[i].rotary_channels != b[i].rotary_channels || !(a[i].sees() == b[i].sees()) ||
                x.kv_heads != y.kv_heads || x.head_dim != y.head_dim ||
                x.dim(tensor::value) != y.dim(tensor::value))
                return bad_value("the CPU's cache has %s; the device's has %s",
                                 common::describe_layer(layer, a[i]).c_str(),
                                 common::describe_layer(layer, b[i]).c_str());
        }
        const kvq::cache_options& o = cpu.options();
        const device_geometry& r = gpu.groups_[0].geometry;
        if (o.sinks != r.sinks || o.recent != r.recent || o.rollback != r.rollback ||
            o.page_tokens != r.page_tokens)
            return bad_value(
                "sinks, recent, rollback and page_tokens are %d, %d, %d, %d on the CPU, but %d, %d, %d, %d "
                "on the device",
                o.sinks, o.recent, o.rollback, o.page_tokens, r.sinks, r.recent, r.rollback, r.page_tokens);
        if (cpu.window().functions().value_type != gpu.options_.type)
            return bad_value("the windows of both caches have different types");
        return {};
    }
    /// Do both caches turn keys that have moved in the same way?
    static status check_moved(const kvq::cache& cpu, const cache& gpu, const layer_group& g,
                              const sequence_pages& s) {
        if (s.moved.empty()) return {};
        for (const int layer : g.members)
            if (!cpu.rotations().known() || !gpu.rotations_.known() ||
                cpu.rotations().identity(layer).fingerprint != gpu.rotations_.identity(layer).fingerprint)
                return bad_value(
                    "keys of the sequence have moved, but layer %d turns them by %.30s on the CPU and by "
                    "%.30s here",
                    layer,
                    cpu.rotations().known() ? cpu.rotations().identity(layer).text.c_str() : "not given",
                    gpu.rotations_.known() ? gpu.rotations_.identity(layer).text.c_str() : "not given");
        return {};
    }
    static status unknown(const layer_group& gpu, int kind) {
        return bad_value("the CPU's cache does not list %.60s, or made it from other statistics",
                         gpu.format.kinds[static_cast<std::size_t>(kind)].name.c_str());
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
    /// Waits where a call ends, whatever ends it: copies may still use pages that it gives back then.
    struct wait_at_end {
        cudaStream_t stream;

        ~wait_at_end() { (void)cudaStreamSynchronize(stream); }
    };
    static page_ref zeroed(page_pool& pool, std::size_t bytes, int tokens) {
        page_ref p = pool.allocate(bytes, 0, tokens);
        std::memset(p->data(), 0, bytes);
        return p;
    }
    /// A page of 16-bit values that comes from, or goes to, pages of another room.
    struct conversion {
        page_ref other;  // as it is on the device
        page* here;
        int at, count;  // tokens of `here`
        tensor role;
        int dim, heads;
    };
    /// A layer of a sequence on the CPU that is not there yet.
    struct made_layer {
        int layer;
        const page_table* from;
        int targets[2];
        resource_vector<page_span> spans;
        kvq::format plan;  // of keys to come
    };

    static status offload(const cache& gpu, sequence_id id, sequence& to, cudaStream_t stream) {
        kvq::cache& cpu = common::sequence_access::cache(to);
        if (status s = check(cpu, gpu); !s) return s;
        if (status s = gpu.check_here(id); !s) return s;
        for (int i = 0; i < cpu.layer_count(); ++i)
            if (const int held = common::sequence_access::tables(to)[static_cast<std::size_t>(i)].tokens;
                held != 0)
                return bad_value("the CPU's sequence holds %d tokens, but must be empty", held);
        if (gpu.states_ && to.state().tokens() != 0)
            return bad_value("the state of the CPU's sequence has taken %d tokens, but must be empty",
                             to.state().tokens());
        if (status s = gpu.check_no_draft(std::span(&id, 1)); !s) return s;
        if (status s = gpu.check_whole(std::span(&id, 1)); !s) return s;
        if (const int shared = gpu.waiting(); shared > 0)
            return bad_value("%d layers share the keys of a prompt and have not attended to it", shared);
        // No page of the CPU waits for a plan that can be made. The tokens stay as they are.
        if (status s = const_cast<cache&>(gpu).settle(std::span(&id, 1), stream); !s) return s;
        // All layers are made before the sequence gets any.
        std::vector<made_layer> made;
        page_pool scratch(cpu.pool().memory());
        std::vector<conversion> conversions;
        std::optional<recurrent_state> state;
        const wait_at_end end{stream};
        status result;
        for (std::size_t i = 0; i < gpu.groups_.size() && result; ++i)
            result = offload_group(gpu, gpu.groups_[i], gpu.entry_of(id).pages[i], cpu, scratch, made,
                                   conversions, stream);
        if (gpu.states_ && result) {
            state.emplace(*cpu.state_layout(), cpu.pool(), cpu.options().snapshots);
            result = offload_state(*gpu.entry_of(id).state, *gpu.states_, *state, cpu.pool(), stream);
        }
        if (result) result = wait(stream);
        if (!result) return result;
        if (state) to.state() = std::move(*state);
        for (const conversion& c : conversions)
            common::move_tokens(gpu.options_.type, *c.other, 0, *c.here, c.at, c.role, c.dim, c.heads,
                                c.count);
        auto& tables = common::sequence_access::tables(to);
        for (made_layer& m : made) {
            page_table& table = tables[static_cast<std::size_t>(m.layer)];
            table.spans.swap(m.spans);
            table.tokens = m.from->tokens;
            table.committed = m.from->committed;
            table.copies_from = m.from->copies_from;
            table.rearranged = m.from->rearranged;
            table.freed = m.from->freed;
            table.plan = m.plan;
            for (int role = 0; role < 2; ++role)
                if (m.targets[role] >= 0) table.targets[role] = m.targets[role];
        }
        for (int i = 0; i < cpu.layer_count(); ++i)  // shared layers hold nothing
            for (int role = 0; role < 2; ++role)
                tables[static_cast<std::size_t>(i)].targets[role] =
                    tables[static_cast<std::size_t>(cpu.owner(i))].targets[role];
        return result;
    }

    /// The layers of a group, in pages of the CPU's.
    static status offload_group(const cache& from_cache, const layer_group& gpu, const sequence_pages& s,
                                kvq::cache& cpu, page_pool& scratch, std::vector<made_layer>& made,
                                std::vector<conversion>& conversions, cudaStream_t stream) {
        const page_table& table = s.table;
        if (status moved = check_moved(cpu, from_cache, gpu, s); !moved) return moved;
        int formats[2][most_formats];  // -1: not listed, or the layers have no such tensor
        std::ranges::fill(formats[1], -1);
        for (const tensor role : gpu.tensors())
            for (int f = 0; f < gpu.kinds(); ++f)
                formats[static_cast<int>(role)][f] = cpu_format(cpu, gpu, role, f);
        const auto listed = [&](int f) {
            return std::ranges::all_of(gpu.tensors(),
                                       [&](tensor role) { return formats[static_cast<int>(role)][f] >= 0; });
        };
        if (!listed(s.target())) return unknown(gpu, s.target());
        for (int i = s.gone(); i < s.committed(); ++i)
            if (!listed(s.format_of(i))) return unknown(gpu, s.format_of(i));
        moved_plans plans;
        status result = plans.fetch(
            gpu, s.plan,
            [&](int f) { return formats[0][f] < 0 ? kvq::format() : cpu.table(tensor::key)[formats[0][f]]; },
            stream);
        for (int member = 0; member < gpu.shape.layers && result; ++member) {
            const int layer = gpu.members[static_cast<std::size_t>(member)];
            made.push_back({layer,
                            &table,
                            {formats[0][s.target()], formats[1][s.target()]},
                            resource_vector<page_span>(cpu.pool().memory()),
                            plans.of(member, s.target())});
            resource_vector<page_span>& spans = made.back().spans;
            spans.reserve(common::table_capacity(static_cast<std::size_t>(table.size() + table.freed)));
            const auto get = [&](page& p, const device_pages& pool, tensor role, int number) {
                const bool planes = pool.upper() != nullptr;
                const pool_memory& from = pool.memory_of_upper();
                if (result)
                    result = copy(p.data(), from.page(role, member, planes ? upper_of(number) : number),
                                  from.page_bytes(role), cudaMemcpyDeviceToHost, stream);
                if (result && planes)
                    result = copy(p.lower, pool.memory().page(role, member, lower_of(number)),
                                  pool.memory().page_bytes(role), cudaMemcpyDeviceToHost, stream);
            };
            // The first `tokens` tokens of 16-bit pages of the device, in a page as the CPU's cache makes it.
            const auto window_page = [&](const device_pages& pool, std::span<const page* const> parts,
                                         tensor role, int tokens, int capacity) {
                const int room = cpu.geometry().window_tokens(tokens, capacity);
                page_ref p = zeroed(cpu.pool(), cpu.page_bytes(role, layer, 0, room), room);
                for (std::size_t i = 0; i < parts.size(); ++i) {
                    const int size = parts[i]->tokens, first = static_cast<int>(i) * size;
                    if (size == room && tokens == room) {
                        get(*p, pool, role, parts[i]->number);
                        continue;
                    }
                    page_ref whole = zeroed(scratch, pool.memory().page_bytes(role), size);
                    get(*whole, pool, role, parts[i]->number);
                    conversions.push_back({std::move(whole), p.get(), first,
                                           common::smaller(size, tokens - first), role, gpu.shape.dim(role),
                                           gpu.shape.kv_heads});
                }
                return p;
            };
            std::map<const page*, std::size_t> known;  // quantized pages, and the first span that shows them
            for (const page_span& from : table.spans) {
                page_span& span = spans.emplace_back(from);
                span.pages = span.copies = {};
                const auto [first, fresh] = known.emplace(from.pages[0].get(), spans.size() - 1);
                if (!fresh && !from.sinks && from.pages[0]->format != 0) {
                    span.pages = spans[first->second].pages;
                    continue;
                }
                for (const tensor role : gpu.tensors()) {
                    const auto at = static_cast<std::size_t>(role);
                    const page* const own = from.pages[0].get();
                    const page* const copied = from.copies[0].get();
                    if (from.sinks) {
                        std::vector<const page*> parts;
                        for (int i = 0; i < gpu.geometry.sink_pages(from.tokens); ++i)
                            parts.push_back(s.sinks[static_cast<std::size_t>(i)].get());
                        span.pages[at] = window_page(gpu.sinks, parts, role, from.tokens, from.room);
                    } else if (own->format == 0) {
                        span.pages[at] =
                            window_page(gpu.window, std::span(&own, 1), role, from.tokens, from.room);
                    } else {
                        const int f = own->format - 1;
                        const device_pages& pool = gpu.quantized[static_cast<std::size_t>(f)];
                        const std::size_t lower =
                            pool.upper() != nullptr ? pool.memory().page_bytes(role) : 0;
                        span.pages[at] = cpu.pool().allocate(pool.memory_of_upper().page_bytes(role) + lower,
                                                             formats[at][f], own->tokens, lower);
                        get(*span.pages[at], pool, role, own->number);
                        if (role == tensor::key) span.pages[at]->plan = plans.of(member, f);
                        if (copied != nullptr)
                            span.copies[at] =
                                window_page(gpu.window, std::span(&copied, 1), role, from.tokens, from.room);
                    }
                }
            }
        }
        return result;
    }

    /// The format of the device's cache that a pair of the CPU's is; -1: none.
    static int gpu_format(const kvq::cache& cpu, const layer_group& gpu, int keys, int values) {
        for (int f = 0; f < gpu.kinds(); ++f)
            if (cpu_format(cpu, gpu, tensor::key, f) == keys &&
                (gpu.format.latent || cpu_format(cpu, gpu, tensor::value, f) == values))
                return f;
        return -1;
    }
    static status no_format(const kvq::cache& cpu, const layer_group& gpu, int keys, int values) {
        if (gpu.format.latent)
            return bad_value("%s in %.55s: add the format to the make_device_format<...>()",
                             gpu.describe(0).c_str(), format_text(cpu.table(tensor::key)[keys]).c_str());
        return bad_value(
            "keys in %.55s with values in %.55s: add their format to the make_device_format<...>()",
            format_text(cpu.table(tensor::key)[keys]).c_str(),
            format_text(cpu.table(tensor::value)[values]).c_str());
    }

    /// The pages of a group, as the CPU's layers have them: without numbers.
    struct planned_group {
        sequence_pages pages;
        std::vector<int> formats;  // by span, of committed pages
        std::vector<int> first;    // likewise: the first span that shows the same pages in all layers
        std::vector<char> copied;  // spans with 16-bit copies in all layers
        moved_plans plans;
    };
    static status plan_group(const resource_vector<page_table>& tables, const kvq::cache& cpu, cache& gpu,
                             layer_group& of, planned_group& plan, cudaStream_t stream) {
        const page_table& first = tables[static_cast<std::size_t>(of.members[0])];
        const device_geometry& g = of.geometry;
        sequence_pages& s = plan.pages;
        const int target = gpu_format(cpu, of, first.targets[0], first.targets[1]);
        if (target < 0) return no_format(cpu, of, first.targets[0], first.targets[1]);
        s.set_target(target);
        s.table.committed = first.committed;
        for (const page_span& span : first.spans)
            s.table.spans.push_back(
                {span.first_token, span.tokens, span.room, {}, {}, span.skip, span.sinks, span.shift});
        const auto size = static_cast<std::size_t>(first.size());
        plan.formats.assign(size, -1);
        plan.copied.assign(size, first.committed > 0);
        std::map<const page*, int> known;
        for (int i = 0; i < first.size(); ++i)
            plan.first.push_back(i < first.committed && !first[i].sinks
                                     ? known.emplace(first[i].pages[0].get(), i).first->second
                                     : i);
        for (int member = 0; member < of.shape.layers; ++member) {
            const int layer = of.members[static_cast<std::size_t>(member)];
            const page_table& table = tables[static_cast<std::size_t>(layer)];
            if (status r = plan.plans.add(of, member, target, table.plan, false, layer); !r) return r;
            bool same = table.tokens == first.tokens && table.committed == first.committed &&
                        table.targets[0] == first.targets[0] &&
                        (of.format.latent || table.targets[1] == first.targets[1]) &&
                        table.size() == first.size();
            for (int i = 0; i < table.size() && same; ++i) {
                const page_span &span = table[i], &of_first = first[i];
                const bool committed = i < table.committed;
                if (status r = check_span(span, i, committed, table.tokens, g); !r) return r;
                const auto at = static_cast<std::size_t>(i);
                for (const tensor role : of.tensors()) {
                    const auto piece = static_cast<std::size_t>(role);
                    if (span.pages[piece].get() != table[plan.first[at]].pages[piece].get())
                        plan.first[at] = i;
                }
                int format = -1;
                if (committed && !span.sinks) {
                    const int keys = span.pages[0]->format,
                              values = of.format.latent ? 0 : span.pages[1]->format;
                    format = gpu_format(cpu, of, keys, values);
                    if (format < 0) return no_format(cpu, of, keys, values);
                    if (status r = plan.plans.add(of, member, format, span.pages[0]->plan, true, layer); !r)
                        return r;
                }
                if (layer == of.members[0]) plan.formats[at] = format;
                same = plan.formats[at] == format && span.first_token == of_first.first_token &&
                       span.tokens == of_first.tokens && span.skip == of_first.skip &&
                       span.shift == of_first.shift;
                plan.copied[at] = plan.copied[at] && span.copies[0] && (of.format.latent || span.copies[1]);
            }
            if (!same)
                return bad_value(
                    "layer %d has other tokens or formats than layer %d; the device has one table for both",
                    layer, of.members[0]);
        }
        s.table.rearranged = first.rearranged;
        s.find_moved();
        if (status moved = check_moved(cpu, gpu, of, s); !moved) return moved;
        // Pages before the first one that the window holds are gone.
        const int sinks = s.sink_spans();
        s.gone_pages = common::ceil_div(common::larger(0, first.front() - g.sinks), g.page_tokens);
        const int pages = s.pages();
        if (pages > of.columns)
            return bad_value("a sequence of %d tokens in %d pages, but max_tokens is %d and cut_pages %d",
                             first.tokens, pages, gpu.options_.max_tokens, gpu.options_.cut_pages);
        if (pages - s.committed() > g.ring)
            return bad_value(
                "layer %d: %d tokens in 16 bit are more than the window has, where keys wait for a plan or "
                "are held",
                of.members[0], first.tokens);
        std::vector<int> wanted(of.quantized.size(), 0);
        int in_window = 0;
        for (int i = s.gone(); i < pages; ++i) {
            const auto at = static_cast<std::size_t>(i - s.gone() + sinks);
            if (i < pages - g.ring) plan.copied[at] = false;
            if (i < s.committed() && plan.first[at] == static_cast<int>(at))
                ++wanted[static_cast<std::size_t>(plan.formats[at])];
            in_window += i >= s.committed() || plan.copied[at];
        }
        if (plan.plans.any())
            if (status r = of.plans.pages.ensure(1, gpu.options_.growing, stream); !r) return r;
        return of.ensure_free(wanted, in_window, g.sink_pages(first.tokens), stream);
    }
    static void take_pages(layer_group& of, planned_group& plan) {
        const device_geometry& g = of.geometry;
        sequence_pages& s = plan.pages;
        const int committed = s.table.committed, gone = s.gone();
        for (int i = s.sink_spans(); i < s.table.size(); ++i) {
            const auto at = static_cast<std::size_t>(i);
            page_span& span = s.table[i];
            if (i < committed)
                span.pages[0] = plan.first[at] < i
                                    ? s.table[plan.first[at]].pages[0]
                                    : of.quantized[static_cast<std::size_t>(plan.formats[at])].pages().take();
            if (i >= committed || plan.copied[at])
                (i >= committed ? span.pages : span.copies)[0] = of.window.pages().take();
        }
        s.table.restored(committed, g, g.rollback);
        s.table.freed = common::smaller(gone, page_table::most_freed);
        for (int i = 0; i < g.sink_pages(s.tokens()); ++i) s.sinks.push_back(of.sinks.pages().take());
    }

    static status onload(const sequence& from, cache& gpu, sequence_id& made, cudaStream_t stream) {
        const kvq::cache& cpu = common::sequence_access::cache(from);
        if (status s = check(cpu, gpu); !s) return s;
        if (common::sequence_access::is_held(from))
            return bad_value("tokens of the sequence are held in 16 bit: release() them before");
        const auto& tables = common::sequence_access::tables(from);
        for (const page_table& of : tables)
            if (of.dropped > 0)
                return bad_value("a layer dropped some of its first %d tokens, which a GPU does not take",
                                 of.dropped);
        const int tokens = from.tokens();
        if (tokens > gpu.options_.max_tokens)
            return bad_value("a sequence of %d tokens, but max_tokens is %d", tokens,
                             gpu.options_.max_tokens);
        // Memory, then numbers, then bytes.
        std::vector<planned_group> plans(gpu.groups_.size());
        for (std::size_t i = 0; i < plans.size(); ++i) {
            if (status s = plan_group(tables, cpu, gpu, gpu.groups_[i], plans[i], stream); !s) return s;
            if (gpu.groups_[i].takes_steps() &&
                tables[static_cast<std::size_t>(gpu.groups_[i].members[0])].tokens != tokens)
                return bad_value("the layers of the CPU's sequence hold different numbers of tokens");
        }
        if (gpu.states_) {
            if (from.state().tokens() != tokens)
                return bad_value("the state of the CPU's sequence has taken %d tokens, its keys are of %d",
                                 from.state().tokens(), tokens);
            const state_pages_of_device missing(from.state(), gpu.states_->is_exact());
            if (status s = gpu.states_->ensure(missing.live, missing.snapshots, gpu.options_.growing, stream);
                !s)
                return s;
        }
        cache::unfinished_sequence fresh{gpu, gpu.new_sequence()};
        const sequence_id id = fresh.id;
        for (std::size_t i = 0; i < plans.size(); ++i) {
            take_pages(gpu.groups_[i], plans[i]);
            if (plans[i].plans.any())
                if (status s =
                        plans[i].plans.place(gpu.groups_[i], made_plans(gpu, i), plans[i].pages.plan, stream);
                    !s)
                    return s;
            gpu.entry_of(id).pages[i] = plans[i].pages;
        }
        page_pool scratch(cpu.pool().memory());
        page_list held;
        const wait_at_end end{stream};
        status result;
        for (std::size_t i = 0; i < plans.size() && result; ++i)
            for (int member = 0; member < gpu.groups_[i].shape.layers && result; ++member)
                result = onload_layer(gpu.groups_[i], member, plans[i], tables, scratch, held, stream);
        if (gpu.states_ && result)
            result = onload_state(from.state(), *gpu.states_, *gpu.entry_of(id).state, stream);
        if (result) result = wait(stream);
        if (!result) return result;
        for (std::size_t i = 0; i < plans.size(); ++i)
            if (plans[i].plans.whole(gpu.groups_[i])) adopt_plan(gpu.groups_[i], plans[i].pages.plan);
        made = fresh.take();
        return result;
    }
    /// Plans of the cache's sequences in a group. That of a prompt that has begun is still to be made.
    static std::vector<page_ref> made_plans(const cache& gpu, std::size_t group) {
        std::vector<page_ref> list;
        for (const cache::entry& e : gpu.entries_)
            if (e.alive && e.pages[group].plan &&
                e.pages[group].plan.get() != gpu.groups_[group].plans.begun.get())
                list.push_back(e.pages[group].plan);
        return list;
    }
    static status onload_layer(const layer_group& of, int member, const planned_group& plan,
                               const resource_vector<page_table>& tables, page_pool& scratch, page_list& held,
                               cudaStream_t stream) {
        const sequence_pages& s = plan.pages;
        const page_table& table =
            tables[static_cast<std::size_t>(of.members[static_cast<std::size_t>(member)])];
        status result;
        for (const tensor role : of.tensors()) {
            const auto at = static_cast<std::size_t>(role);
            const auto put = [&](const page& p, const device_pages& pool, const page& to) {
                const bool planes = pool.upper() != nullptr;
                const pool_memory& memory = pool.memory_of_upper();
                if (result)
                    result = copy(memory.page(role, member, planes ? upper_of(to.number) : to.number),
                                  p.data(), memory.page_bytes(role), cudaMemcpyHostToDevice, stream);
                if (result && planes)
                    result = copy(pool.memory().page(role, member, lower_of(to.number)), p.lower,
                                  pool.memory().page_bytes(role), cudaMemcpyHostToDevice, stream);
            };
            // 16-bit tokens [from_at, from_at + count) of a page, in the room of the device's.
            const auto put_values = [&](const page& p, int from_at, int count, const device_pages& pool,
                                        const page& to) {
                if (p.tokens == to.tokens && from_at == 0) return put(p, pool, to);
                held.push_back(zeroed(scratch, pool.memory().page_bytes(role), to.tokens));
                common::move_tokens(of.format.type, p, from_at, *held.back(), 0, role, of.shape.dim(role),
                                    of.shape.kv_heads, count);
                put(*held.back(), pool, to);
            };
            for (std::size_t i = 0; i < s.sinks.size(); ++i) {
                const int room = s.sinks[i]->tokens, from_at = static_cast<int>(i) * room;
                put_values(*table[0].pages[at], from_at, common::smaller(room, table[0].tokens - from_at),
                           of.sinks, *s.sinks[i]);
            }
            for (int i = s.sink_spans(); i < table.size(); ++i) {
                const page_span &span = table[i], &to = s.table[i];
                if (i >= table.committed) {
                    put_values(*span.pages[at], 0, span.tokens, of.window, *to.pages[0]);
                    continue;
                }
                const int format = plan.formats[static_cast<std::size_t>(i)];
                put(*span.pages[at], of.quantized[static_cast<std::size_t>(format)], *to.pages[0]);
                if (to.copies[0]) put_values(*span.copies[at], 0, span.tokens, of.window, *to.copies[0]);
            }
        }
        return result;
    }
};

}  // namespace detail

/// Copies a sequence to `to`, an empty one of a CPU cache with the same options.
inline status offload(const cache& from, sequence_id id, sequence& to, cudaStream_t stream) {
    return detail::cache_access::offload(from, id, to, stream);
}

/// Makes a sequence of the device's cache from one of the CPU's, if all layers hold the same tokens, those of
/// one shape in the same formats, and
///   its sinks     are those of its first tokens, all of them;
///   its keys      are where they were appended, or both caches have the same rotary embeddings;
///   its pages     have memory for page_tokens tokens: of those that are committed they may show any (a trim,
///                 an erase), but none that a repacking, or a splice before it was full, has made shorter; of
///                 16-bit pages in the window all but the last are full.
inline status onload(const sequence& from, cache& to, sequence_id& made, cudaStream_t stream) {
    return detail::cache_access::onload(from, to, made, stream);
}

}}}  // namespace kvq::cuda
