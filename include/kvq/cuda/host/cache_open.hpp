// cache::open(), rotate(), and the reports of a cache on the device (cache.hpp): usage(), not_finite(),
// graph_id().
//
// open() checks all options, takes the compiled entry that has all formats and as few others as possible, and
// allocates tables, workspace and the pools that the options ask for.
// Contract: every refusal names the option and its range, or the line that compiles the missing format;
// nothing is allocated then. open() runs once. rotate() and not_finite() wait for the stream.
#pragma once

#include <set>

#include "cache_lists.hpp"
#include "group_plans.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

inline status cache::check_options(const cache_options& o) const {
    if (o.formats.empty()) return detail::bad_value("a cache needs a format, such as kivi-4-g64");
    if (o.page_tokens < 1) return detail::bad_value("page_tokens is %d", o.page_tokens);
    if (o.sinks < 0 || o.rollback < 0)
        return detail::bad_value("sinks is %d and rollback %d; they must not be negative", o.sinks,
                                 o.rollback);
    if (o.recent < 0 || o.step_tokens < 0 || o.step_tokens > o.page_tokens || o.step_tokens > o.recent)
        return detail::bad_value("step_tokens is %d, but must be 0 to page_tokens (%d) and to recent (%d)",
                                 o.step_tokens, o.page_tokens, o.recent);
    if (o.draft_tokens < 0 || o.draft_tokens > common::smaller(64, common::smaller(o.page_tokens, o.recent)))
        return detail::bad_value(
            "draft_tokens is %d, but must be 0 to 64, to page_tokens (%d) and to recent (%d)", o.draft_tokens,
            o.page_tokens, o.recent);
    if (o.statistics_tokens < calibration::group || o.statistics_tokens > detail::most_tokens)
        return detail::bad_value("statistics_tokens is %d, but must be %d to %d", o.statistics_tokens,
                                 calibration::group, detail::most_tokens);
    if (o.cut_pages < 0 || o.cut_pages > detail::most_tokens)
        return detail::bad_value("cut_pages is %d", o.cut_pages);
    if (o.page_tokens > 65535)
        return detail::bad_value("page_tokens is %d, but must be at most 65535", o.page_tokens);
    if (o.max_batch < 1) return detail::bad_value("max_batch is %d", o.max_batch);
    const int most = common::larger(o.step_tokens, o.draft_tokens);
    if (1LL * o.max_batch * most > (std::numeric_limits<int>::max)())
        return detail::bad_value("a step of %d sequences (max_batch) of %d tokens has more than 2^31 - 1",
                                 o.max_batch, most);
    if (o.listed_tokens < 0 || o.listed_tokens > detail::most_tokens)
        return detail::bad_value("listed_tokens is %d, but must be 0 to %d", o.listed_tokens,
                                 detail::most_tokens);
    if (o.query_heads < 1 || o.query_heads > 65535)
        return detail::bad_value("query_heads is %d, but must be 1 to 65535", o.query_heads);
    if (o.max_tokens < 1 || o.max_tokens > detail::most_tokens)
        return detail::bad_value("max_tokens is %d, but must be 1 to %d", o.max_tokens, detail::most_tokens);
    for (const int x : {o.sinks, o.recent, o.rollback})
        if (x > detail::most_tokens)
            return detail::bad_value("sinks %d, recent %d and rollback %d must not be more than %d", o.sinks,
                                     o.recent, o.rollback, detail::most_tokens);
    if (o.pool_tokens < 0 || o.pool_sequences < 0 || o.pool_states < 0)
        return detail::bad_value("pool_tokens is %d, pool_sequences %d and pool_states %d", o.pool_tokens,
                                 o.pool_sequences, o.pool_states);
    return {};
}

/// Layers by shape and formats, with the kernels of each group. Empties the list of groups first.
inline status cache::make_groups(std::span<const device_format> compiled) {
    const auto n = static_cast<int>(options_.formats.size());
    // Formats that some layer has, and the others.
    std::vector<char> own(options_.formats.size(), 0);
    for (int i = 0; i < layer_count(); ++i) {
        const layer& l = layers_[static_cast<std::size_t>(i)];
        const auto text = [&] { return common::describe_layer(i, l); };
        if (l.kind == layer_kind::shared || l.kind == layer_kind::state) continue;
        if (l.sinks != 0 && l.sinks != options_.sinks)
            return detail::bad_value(
                "%s: its queries see %d sinks; on a device they see all %d of the cache, or none",
                text().c_str(), l.sinks, options_.sinks);
        const layer_format& f = l.formats;
        if (f.key < 0 || f.key >= n || f.value < 0 || f.value >= n)
            return detail::bad_value("%s: formats %d and %d are not among the %d of the cache",
                                     text().c_str(), f.key, f.value, n);
        own[static_cast<std::size_t>(f.key)] = 1;
        if (!common::holds_keys_alone(l.kind)) own[static_cast<std::size_t>(f.value)] = 1;
    }
    bool latents = false, others = false;
    for (const layer& l : layers_) {
        latents = latents || l.kind == layer_kind::latent;
        others = others || !(common::holds_keys_alone(l.kind) || l.kind == layer_kind::state);
    }
    // Is a format that no layer has for layers like this one? Where there are both, latents take those with
    // last channels in a format of their own.
    const auto is_for = [&](const std::string& format, const layer& l) {
        if (l.kind == layer_kind::index) return false;
        if (!latents || !others) return true;
        return (l.kind == layer_kind::latent) == (common::last_channels_of(format).channels > 0);
    };
    places_.assign(layers_.size(), {-1, -1});
    const auto add = [&](int i, const layer& l) -> status {
        if (l.kind == layer_kind::shared) {
            places_[static_cast<std::size_t>(i)] = places_[static_cast<std::size_t>(l.owner)];
            chunk* c = shared_chunk(i);
            if (c == nullptr) {
                c = &chunks_.emplace_back();
                c->owner = l.owner;
            }
            c->readers.push_back(i);
            c->waits_for.push_back(0);
            return {};
        }
        int group = 0;
        const auto same = [&](const layer& a) {
            const auto values = [](const layer& x) { return x.value_dim == 0 ? x.head_dim : x.value_dim; };
            return a.kv_heads == l.kv_heads && a.head_dim == l.head_dim && values(a) == values(l) &&
                   a.formats == l.formats && a.kind == l.kind && a.sees() == l.sees() &&
                   a.rotary_channels == l.rotary_channels;
        };
        while (group < static_cast<int>(groups_.size()) &&
               !same(layers_[static_cast<std::size_t>(groups_[static_cast<std::size_t>(group)].members[0])]))
            ++group;
        if (group == static_cast<int>(groups_.size())) {
            const bool latent = common::holds_keys_alone(l.kind), index = l.kind == layer_kind::index;
            const std::string& keys = options_.formats[static_cast<std::size_t>(l.formats.key)];
            const std::string& values = options_.formats[static_cast<std::size_t>(l.formats.value)];
            std::vector<std::string> names{latent || l.formats.key == l.formats.value
                                               ? keys
                                               : keys.substr(0, keys.find('/')) + "/" +
                                                     values.substr(values.find('/') + 1)};
            for (std::size_t f = 0; f < own.size(); ++f)
                if (own[f] == 0 && is_for(options_.formats[f], l)) names.push_back(options_.formats[f]);
            const cache_shape shape = this->shape(i);
            const device_format* const best =
                find_device_format(compiled, names, shape.head_dim, shape.dim(tensor::value),
                                   options_.page_tokens, options_.type, nullptr, latent, index);
            if (best == nullptr) {
                std::string text;
                for (const std::string& name : names) text += (text.empty() ? "" : "+") + name;
                return detail::bad_value(
                    "nothing was compiled for %.40s, head_dim %d, pages of %d%s: add it to "
                    "KVQ_CUDA_FORMATS, or make_device_format<%.8s, ...>()",
                    text.c_str(), shape.head_dim, options_.page_tokens,
                    index    ? " of an index"
                    : latent ? " of latents"
                             : "",
                    options_.type == float_type::bf16 ? "bfloat16" : "float16");
            }
            detail::layer_group& g = groups_.emplace_back();
            g.shape = shape;
            g.shape.layers = 0;
            g.format = *best;
            g.target = best->find(names[0]);
            g.options = &options_;
            g.list = &layers_;
            g.geometry.window = l.sees();
            g.members.push_back(i);  // errors name it
            for (const std::string& name : names)
                if (status s = g.check_rotary(best->find(name)); !s) return s;
            g.members.clear();
        }
        detail::layer_group& g = groups_[static_cast<std::size_t>(group)];
        places_[static_cast<std::size_t>(i)] = {group, g.shape.layers++};
        g.members.push_back(i);
        return {};
    };
    // Groups whose layers take steps come first.
    for (const bool crosses : {false, true})
        for (int i = 0; i < layer_count(); ++i) {
            const layer& l = layers_[static_cast<std::size_t>(i)];
            if (l.kind == layer_kind::state || (l.kind == layer_kind::cross) != crosses) continue;
            if (status s = add(i, l); !s) return s;
        }
    if (step_groups() == 0)
        return detail::bad_value(
            "a cache on a device has a layer with keys and values of its own text; all %d have others, or "
            "state",
            layer_count());
    return {};
}

/// How the keys of all layers are rotated.
inline status cache::make_rotations() {
    rotations_ = common::rotations_of(layers_, options_.rotary);
    for (int i = 0; i < layer_count(); ++i)
        if (const common::rotation* const r = rotations_.at(i); r != nullptr && r->is_function())
            return detail::bad_value(
                "keys on a device are rotated by frequencies, not by a function of the engine");
    return {};
}
inline status cache::send_rotations(cudaStream_t stream) {
    std::vector<double> all;
    first_turn_.assign(layers_.size(), 0);
    for (int i = 0; i < layer_count(); ++i) {
        const common::rotation* const r = rotations_.at(i);
        if (r == nullptr) continue;
        first_turn_[static_cast<std::size_t>(i)] = all.size();
        all.insert(all.end(), r->turns().begin(), r->turns().end());
    }
    if (all.empty()) return {};
    const std::size_t bytes = all.size() * sizeof(double);
    if (status s = turns_.allocate(options_.memory, bytes, "rotary embeddings", stream); !s) return s;
    cudaError_t code = cudaMemcpyAsync(turns_.as<>(), all.data(), bytes, cudaMemcpyHostToDevice, stream);
    if (code == cudaSuccess) code = cudaStreamSynchronize(stream);
    return code == cudaSuccess ? status{} : detail::runtime_error(code, "copying rotary embeddings");
}

/// Tables and pools of a group whose layers and kernels are known, without memory for tables.
inline status cache::open_group(detail::layer_group& g) const {
    const cache_options& o = options_;
    g.geometry = {{o.sinks, o.recent, o.page_tokens, g.geometry.window},
                  o.rollback,
                  common::larger(window_columns(o.recent + o.rollback + o.draft_tokens, o.page_tokens, 0),
                                 window_columns(o.recent, o.page_tokens, o.step_tokens))};
    if (status s = detail::open_plans(g); !s) return s;
    if (g.geometry.commits_from > 0)  // all of them are in 16 bit, and wait for a trim within `rollback`
        g.geometry.ring = common::larger(
            g.geometry.ring,
            window_columns(g.plans.tokens + o.rollback + o.draft_tokens, o.page_tokens, o.step_tokens));
    g.columns = common::larger(1, g.geometry.pages(o.max_tokens));
    g.columns += common::smaller(o.cut_pages, detail::most_tokens / o.page_tokens - g.columns);
    g.sink_columns = common::larger(1, g.geometry.sink_pages(o.sinks));
    g.runs.open(o.max_batch, g.kinds(), g.columns, g.geometry.ring, g.sink_columns);
    const int sink_pages = g.geometry.sink_pages(o.sinks),
              most = (std::numeric_limits<int>::max)() / common::larger(g.geometry.ring, sink_pages);
    if (o.pool_sequences > most)
        return detail::bad_value(
            "pool_sequences is %d, but must be at most %d: each takes %d pages for its recent tokens and %d "
            "for sinks",
            o.pool_sequences, most, g.geometry.ring, sink_pages);
    if (status s = place_pages(g); !s) return s;
    const auto heads = static_cast<std::size_t>(g.shape.kv_heads);
    g.quantized.resize(g.format.kinds.size());
    g.keys.resize(g.format.kinds.size());
    for (std::size_t i = 0; i < g.keys.size(); ++i)
        std::copy_n(g.format.kinds[i].fingerprints, 2, g.keys[i].fingerprints);
    const auto open_pages = [&](std::size_t i, const detail::device_pages* upper) {
        const device_format::kind& k = g.format.kinds[i];
        const std::size_t of_keys = upper != nullptr ? k.lower_blocks[0] : k.key_block,
                          of_values = upper != nullptr ? k.lower_blocks[1] : k.value_block;
        const bool planes = std::ranges::any_of(g.format.kinds, [&](const device_format::kind& other) {
            return other.upper == static_cast<int>(i);
        });
        g.quantized[i].open(g.is_in_host_memory(i) ? detail::pinned_allocator() : o.memory, k.name,
                            static_cast<int>(i) + 1, o.page_tokens, g.shape.layers, of_keys * heads,
                            of_values * heads, planes, upper);
    };
    for (std::size_t i = 0; i < g.quantized.size(); ++i)
        if (g.format.kinds[i].upper < 0) open_pages(i, nullptr);
    for (std::size_t i = 0; i < g.quantized.size(); ++i)
        if (const int upper = g.format.kinds[i].upper; upper >= 0)
            open_pages(i, &g.quantized[static_cast<std::size_t>(upper)]);
    g.window.open(o.memory, "the window", 0, o.page_tokens, g.shape.layers, g.format.window_block[0] * heads,
                  g.format.window_block[1] * heads);
    g.sinks.open(o.memory, "sinks", 0, detail::device_geometry::sink_page_tokens, g.shape.layers,
                 g.format.sink_block[0] * heads, g.format.sink_block[1] * heads);
    return {};
}

/// Quantized pages that are allocated up front. A window needs some for each sequence, and during a prompt
/// twice as many.
inline int cache::pool_pages(const detail::layer_group& g) const noexcept {
    const int pages = common::ceil_div(options_.pool_tokens, options_.page_tokens);
    if (!g.geometry.window) return pages;
    const long long of_sequence =
        2LL * ((std::int64_t{g.geometry.window.tokens} + options_.rollback) / options_.page_tokens + 2);
    const long long all = of_sequence * common::larger(options_.pool_sequences, options_.max_batch);
    return static_cast<int>(common::smaller(static_cast<long long>(pages), all));
}

inline status cache::open(const cache_shape& shape, const cache_options& options,
                          std::span<const device_format> compiled, cudaStream_t stream) {
    if (shape.layers < 1 || shape.layers > 65535 || shape.kv_heads < 1 || shape.head_dim < 1 ||
        shape.value_dim < 0)
        return detail::bad_value("a cache of %d layers, %d kv heads, head_dim %d and value_dim %d",
                                 shape.layers, shape.kv_heads, shape.head_dim, shape.value_dim);
    return open(std::vector<layer>(static_cast<std::size_t>(shape.layers),
                                   full_attention({shape.kv_heads, shape.head_dim, shape.value_dim})),
                options, compiled, stream);
}

inline status cache::open(std::vector<layer> layers, const cache_options& options,
                          std::span<const device_format> compiled, cudaStream_t stream) {
    if (is_open()) return detail::bad_value("the cache is open already");
    if (status s = check_options(options); !s) return s;
    layers = common::with_owners(std::move(layers));
    (void)common::layer_shapes(layers);  // both check them
    if (layers.size() > 65535)
        return detail::bad_value("a cache of %zu layers, but it has at most 65535", layers.size());
    std::unique_ptr<detail::state_pages> states;
    if (const std::optional<kvq::state_layout> of = common::state_of(layers)) {
        states = std::make_unique<detail::state_pages>(*of, options.memory);
        (void)states->make(options.snapshots);  // checks the policy
    }
    layers_ = std::move(layers);
    options_ = options;
    states_ = std::move(states);
    status s = make_rotations();
    if (s) s = make_groups(compiled);
    if (s && states_) states_->use(*groups_[0].format.functions);
    long long words = 0;
    for (std::size_t i = 0; i < groups_.size() && s; ++i) {
        detail::layer_group& g = groups_[i];
        s = open_group(g);
        g.first_word = static_cast<int>(words);
        words +=
            common::round_up(g.word_count(), 64LL);  // as memory of pages, view() gives them in place of none
        if (s && words > 1 << 30)
            s = detail::bad_value("tables of %d sequences of %d tokens are too large", options.max_batch,
                                  options.max_tokens);
    }
    first_slot_ = static_cast<int>(words);
    if (states_) words += options.max_batch;
    if (s)
        s = words_.allocate(options.memory, static_cast<std::size_t>(words) * sizeof(int), "tables", stream);
    std::size_t workspace = 0, scratch = 0;
    for (const detail::layer_group& g : groups_) {
        std::size_t& bytes = g.format.latent ? scratch : workspace;
        const auto add = [&](int sequences, int heads, int tokens) {
            bytes = common::larger(bytes, g.format.functions->workspace_bytes(sequences, heads, tokens));
        };
        if (!g.format.latent) {
            for (const int rows : {4, 8, 16}) add(1, 1, rows);
            continue;
        }
        // A step or a draft of all sequences, and slices of a prompt (prefill).
        add(options.max_batch, options.query_heads, most_queries());
        add(1, options.query_heads, 64);
    }
    std::size_t lines = 0;
    for (const detail::layer_group& g : groups_) {
        const int listed = options.listed_tokens, queries = options.max_batch * most_queries(),
                  heads = g.shape.kv_heads;
        if (listed == 0) break;
        const auto add = [&](std::size_t bytes) { scratch = common::larger(scratch, bytes); };
        if (g.format.index)
            add(g.format.functions->select_workspace_bytes(queries, options.max_tokens, listed));
        if (!g.format.latent && !g.format.index) {
            add(g.format.functions->page_selection_bytes(
                options.max_batch, common::larger(1, options.query_heads / heads) * heads, heads, g.columns,
                g.geometry.ring, listed));
            lines = common::larger(lines, static_cast<std::size_t>(options.max_batch * heads));
        }
        // The most is between one query and all of them: where parts of lists are no more than needed.
        for (const int n : {1, queries})
            if (!g.format.index)
                add(g.format.functions->list_workspace_bytes(
                    n, common::larger(1, options.query_heads / heads) * heads, heads, listed));
    }
    if (s) s = workspace_.allocate(options.memory, workspace, "the workspace", stream);
    if (s) s = scratch_.allocate(options.memory, scratch, "the workspace of latents and lists", stream);
    if (s) s = tickets_.allocate(options.memory, sizeof(unsigned) * lines, "selected pages", stream);
    for (detail::layer_group& g : groups_) {
        g.words = words_.as<int>() + g.first_word;
        const int upper = g.format.kinds[static_cast<std::size_t>(g.target)].upper;
        for (const int f : {upper, g.target})
            if (s && f >= 0) s = g.quantized[static_cast<std::size_t>(f)].grow(pool_pages(g), stream);
        if (s) s = g.window.grow(options.pool_sequences * g.geometry.ring, stream);
        if (s) s = g.sinks.grow(options.pool_sequences * g.geometry.sink_pages(options.sinks), stream);
    }
    for (detail::layer_group& g : groups_)
        if (s) s = detail::make_plans(g, stream);
    if (s && states_) s = states_->grow(options.pool_states, stream);
    if (s) s = open_scratch();
    if (s) s = send_rotations(stream);
    if (s) s = open_resident(stream);
    if (s) {
        step_ = {};
        forget_rows();
        return s;
    }
    groups_.clear();
    chunks_.clear();
    states_.reset();
    places_.clear();
    layers_.clear();
    words_ = {};
    workspace_ = {};
    scratch_ = {};
    tickets_ = {};
    turns_ = {};
    return s;
}

inline status cache::check_equal_layers(const char* who) const {
    if (!is_open()) return detail::bad_value("the cache is not open");
    int other = groups_.back().members[0];
    if (!chunks_.empty()) other = chunks_[0].readers[0];
    if (states_) other = states_->layers().layers()[0].number;
    const detail::layer_group& first = groups_[0];
    if (!states_ && chunks_.empty() && groups_.size() == 1 && !first.geometry.window && !first.format.latent)
        return {};
    return detail::bad_value("%s takes caches of equal layers with full attention only, not %s", who,
                             describe(other).c_str());
}

/// Has any layer a format of this name? As requantize_request::format.
inline status cache::check_format(std::string_view format) const {
    bool found = false;
    for (const detail::layer_group& g : groups_)
        for (int f = 0; f < g.kinds(); ++f) {
            if (!g.is_named(f, format)) continue;
            found = true;
            if (status s = g.check_rotary(f); !s) return s;
        }
    if (found) return {};
    return detail::bad_value(
        "%.60s is not a format of this cache: list it in options.formats, and add it to its "
        "make_device_format<...>()",
        std::string(format).c_str());
}

/// Of arrays with `count` numbers for all layers of the cache: those of a group's layers, behind one another.
/// Waits for the stream.
template <class T>
status cache::put_layers(detail::device_memory& to, const detail::layer_group& g,
                         std::initializer_list<const T*> arrays, std::size_t count,
                         cudaStream_t stream) const {
    const std::size_t of_layer = count / layers_.size();
    std::vector<T> chosen;
    for (const T* const all : arrays)
        for (const int layer : g.members) {
            const T* const first = all + static_cast<std::size_t>(layer) * of_layer;
            chosen.insert(chosen.end(), first, first + of_layer);
        }
    const std::size_t bytes = chosen.size() * sizeof(T);
    if (status s = to.allocate(options_.memory, bytes, "statistics", stream); !s || bytes == 0) return s;
    cudaError_t code = cudaMemcpyAsync(to.as<>(), chosen.data(), bytes, cudaMemcpyHostToDevice, stream);
    if (code == cudaSuccess) code = cudaStreamSynchronize(stream);
    return code == cudaSuccess ? status{} : detail::runtime_error(code, "copying statistics");
}

/// The formats that a name of requantize_request::format names.
inline std::vector<cache::named_format> cache::find_named(std::string_view format) {
    std::vector<named_format> found;
    for (detail::layer_group& g : groups_)
        for (int f = 0; f < g.kinds(); ++f)
            if (g.is_named(f, format)) found.push_back({g, f});
    return found;
}

inline status cache::rotate(std::string_view format, tensor role, const rotation& matrices,
                            cudaStream_t stream) {
    if (status s = check_format(format); !s) return s;
    const std::vector<named_format> named = find_named(format);
    struct made_rotation {
        detail::device_memory memory;
        std::uint64_t fingerprint;
    };
    std::vector<made_rotation> made;
    for (const auto& [g, f] : named) {
        matrices.check(shape(g.members[0]), role);
        const std::uint64_t fingerprint =
            g.format.functions->rotated_fingerprint(f, role, matrices.fingerprint());
        if (fingerprint == 0)
            return detail::bad_value("%s of %.60s are not rotated", role == tensor::key ? "keys" : "values",
                                     std::string(format).c_str());
        if (g.quantized[static_cast<std::size_t>(f)].pages().used() > 0)
            return detail::bad_value("pages of %.60s are in use; rotations come before the first page",
                                     std::string(format).c_str());
        made.push_back({{}, fingerprint});
    }
    const auto dim = static_cast<std::size_t>(matrices.dim());
    const std::size_t count = layers_.size() * static_cast<std::size_t>(matrices.heads()) * dim * dim;
    for (std::size_t i = 0; i < named.size(); ++i)
        if (status s = put_layers<float>(made[i].memory, named[i].group,
                                         {matrices.columns(), matrices.rows()}, count, stream);
            !s)
            return s;
    for (std::size_t i = 0; i < named.size(); ++i) {
        detail::device_keys& held = named[i].group.keys[static_cast<std::size_t>(named[i].number)];
        held.rotations[static_cast<int>(role)] = std::move(made[i].memory);
        held.fingerprints[static_cast<int>(role)] = made[i].fingerprint;
    }
    step_.begun = false;
    return {};
}

inline status cache::check_target(std::string_view format) const {
    if (status s = check_format(format); !s) return s;
    for (const detail::layer_group& g : groups_)
        if (g.has_named(format) && g.target_of(g.target, format) < 0) return no_pair(g, g.target, format);
    return {};
}

inline status cache::commit_to(std::string_view format) {
    if (status s = check_target(format); !s) return s;
    for (detail::layer_group& g : groups_)
        if (g.has_named(format)) g.target = g.target_of(g.target, format);
    return {};
}

inline std::uint64_t cache::graph_id() const noexcept {
    const int tokens = step_.draft == 0 ? step_.new_tokens : 1 << 15 | step_.draft << 7 | step_.new_tokens;
    std::uint64_t id = step_.number;
    for (const detail::layer_group& g : groups_) {
        const bool unranked = options_.listed_tokens > 0 && detail::has_unranked(g, step_.rows);
        id = id * 0x9e3779b97f4a7c15u ^
             (g.generation() << 40 | static_cast<std::uint64_t>(step_.rows) << 20 |
              static_cast<std::uint64_t>(tokens) << 4 | g.now.targets) ^
             (g.now.runs == 1 ? 0
                              : std::uint64_t{g.runs.generation() + moving_generation_} << 32 |
                                    static_cast<std::uint64_t>(g.now.runs) << 8) ^
             (unranked ? std::uint64_t{1} << 39 : 0);
    }
    return states_ ? id ^ std::uint64_t{states_->pages().generation()} << 56 : id;
}

inline usage_report cache::usage(sequence_id id) const {
    usage_report u;
    if (!is_here(id)) return u;
    for (const detail::sequence_pages& s : entry_of(id).pages) s.add_to(u);
    u.tokens = entry_of(id).pages[0].tokens();
    if (const std::optional<recurrent_state>& state = entry_of(id).state) {
        const state_usage held = state->usage();
        u.state = held.live + held.snapshots;
        u.shared += held.shared;
        u.pages += held.pages;
    }
    common::add_up(u);
    return u;
}

inline usage_report cache::usage() const {
    usage_report u;
    std::set<const page*> counted;
    for (const entry& e : entries_)
        for (const detail::sequence_pages& s : e.pages) {
            s.add_window(u, &counted);
            u.tokens = common::larger(u.tokens, e.pages[0].tokens());
        }
    for (const detail::layer_group& g : groups_) {
        for (const detail::device_pages& p : g.quantized) {
            u.quantized += p.used_bytes();
            if (p.upper() == nullptr) u.pages += static_cast<std::size_t>(p.pages().used());
        }
        for (const detail::device_keys& k : g.keys) u.bookkeeping += k.bytes();
        u.bookkeeping += g.runs.bytes() + g.plans.pages.allocated();
    }
    if (states_) {
        u.state = states_->used_bytes();
        u.pages += states_->used();
    }
    u.reserved += bytes_held() - bytes_in_use();
    u.bookkeeping += words_.bytes() + turns_.bytes();
    u.workspace = workspace_.bytes() + scratch_.bytes() + tickets_.bytes() + ahead_.bytes() +
                  moving_.bytes() + prompt_bytes();
    common::add_up(u);
    return u;
}

inline std::size_t cache::bytes_in_use() const noexcept {
    std::size_t sum = states_ ? states_->used_bytes() : 0;
    for (const detail::layer_group& g : groups_) sum += g.bytes_in_use();
    return sum;
}

inline std::size_t cache::bytes_held() const noexcept {
    std::size_t sum = states_ ? states_->allocated() : 0;
    for (const detail::layer_group& g : groups_) sum += g.bytes_held();
    return sum;
}

inline status cache::not_finite(std::span<unsigned> by_layer, cudaStream_t stream) const {
    if (static_cast<int>(by_layer.size()) != layer_count() || !is_open())
        return detail::bad_value("counts of %zu layers, but the cache has %d", by_layer.size(),
                                 layer_count());
    std::vector<std::vector<unsigned>> counts;
    cudaError_t code = cudaSuccess;
    for (const detail::layer_group& g : groups_) {
        std::vector<unsigned>& of = counts.emplace_back(g.members.size());
        if (code == cudaSuccess)
            code = cudaMemcpyAsync(of.data(), g.words + g.not_finite_at(0), of.size() * sizeof(unsigned),
                                   cudaMemcpyDeviceToHost, stream);
    }
    if (code == cudaSuccess) code = cudaStreamSynchronize(stream);
    if (code != cudaSuccess) return detail::runtime_error(code, "reading counts");
    for (int i = 0; i < layer_count(); ++i) {
        const place& p = places_[static_cast<std::size_t>(i)];
        by_layer[static_cast<std::size_t>(i)] =
            is_shared(i) || has_state(i)
                ? 0
                : counts[static_cast<std::size_t>(p.group)][static_cast<std::size_t>(p.member)];
    }
    return {};
}

}}}  // namespace kvq::cuda
