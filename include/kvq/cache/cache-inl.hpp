// Definitions of cache.hpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "../attention/attention_batch.hpp"
#include "../core/bits.hpp"
#include "../core/error.hpp"
#include "../format/latent.hpp"
#include "../quant/calibration.hpp"
#include "../state/recurrent_state.hpp"
#include "cache.hpp"

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC cache::cache(const cache_shape& shape, const cache_options& options)
    : cache(detail::equal_layers(shape), options) {}

KVQ_FUNC cache::cache(std::vector<layer> layers, const cache_options& options)
    : layers_(detail::with_owners(with_formats(std::move(layers), options))),
      shared_(layers_.size()),
      shapes_(layers_),
      state_(detail::state_of(layers_)),
      options_(checked(shapes_, options)),
      keys_(tensor::key, window_of(options), options.keys),
      values_(tensor::value, window_of(options), options.values.empty() ? options.keys : options.values),
      rotations_(detail::rotations_of(layers_, options.rotary)),
      pool_(options.memory, options.byte_budget, options.preallocate) {
    for (int i = 0; i < layer_count(); ++i) {
        const layer& l = layers_[static_cast<std::size_t>(i)];
        if (owner(i) != i) shared_[static_cast<std::size_t>(owner(i))] = true;
        detail::expect(l.sinks <= options_.sinks, detail::describe_layer(i, l), ": its queries see ", l.sinks,
                       " sinks, the cache has ", options_.sinks);
        expect_listed(tensor::key, l.formats.key);
        expect_listed(tensor::value, l.formats.value);
    }
    for (const tensor role : {tensor::key, tensor::value})
        for (int i = 0; i < table(role).listed(); ++i) check(role, table(role)[i + 1], i);
    if (shapes_.distinct().size() > 1)
        for (const int layer : shapes_.distinct()) {
            const std::pair dims(shape(layer).kv_heads, shape(layer).head_dim);
            const auto place = fitting_keys_.emplace(dims, detail::format_table(tensor::key, keys_[0], {}));
            for (int i = 1; place.second && i < keys_.size(); ++i)
                place.first->second.add(fitting(layer, keys_[i]));
        }
    for (int i = 0; i < layer_count(); ++i)
        expect_holds_rotary(i, layers_[static_cast<std::size_t>(i)].formats.key);
    detail::check_backends(keys_, values_);
    for (int layer = 0; layer < layer_count(); ++layer) {
        const kvq::layer& l = layers_[static_cast<std::size_t>(layer)];
        const std::pair dims(l.head_dim, l.value_dim);
        if (!detail::holds_keys_alone(l.kind) || latent_values_.count(dims) > 0) continue;
        const detail::format_table& keys = table(tensor::key, layer);
        const auto values = [&](int i) { return detail::values_of_keys(keys[i], dims.first, dims.second); };
        detail::format_table read(tensor::value, values(0), {});
        for (int i = 1; i < keys.size(); ++i) read.add(values(i));
        latent_values_.emplace(dims, std::move(read));
    }
    if (state_) (void)recurrent_state(*state_, pool_, options.snapshots);  // checks the policy
    commits_from_.resize(layers_.size());
    wait_for_plans();
}

KVQ_FUNC void cache::wait_for_plans() noexcept {
    for (int i = 0; i < layer_count(); ++i) {
        const int index = holds_tokens(i) ? target_format(tensor::key, i) : 0;
        // Never fewer tokens than before: pages of a sequence may be waiting.
        int& from = commits_from_[static_cast<std::size_t>(i)];
        if (index > 0 && keys_[index].wants_plan()) from = detail::larger(from, plan_tokens(i));
    }
}

KVQ_FUNC cache::~cache() = default;

KVQ_FUNC page_geometry cache::geometry() const noexcept {
    return {options_.sinks, options_.recent, options_.page_tokens};
}

KVQ_FUNC page_geometry cache::geometry(int layer) const noexcept {
    page_geometry g = geometry();
    g.window = layers_[static_cast<std::size_t>(owner(layer))].sees();
    g.commits_from = commits_from_[static_cast<std::size_t>(owner(layer))];
    return g;
}

KVQ_FUNC int cache::plan_tokens(int layer) const noexcept {
    const kvq::layer& of = layers_[static_cast<std::size_t>(layer)];
    if (options_.statistics == key_statistics::off || !holds_tokens(layer) || tensors(layer).size() < 2)
        return 0;
    const bool ends = of.kind == layer_kind::sliding || of.kind == layer_kind::chunked;
    const int tokens =
        ends ? detail::smaller(options_.statistics_tokens, of.window) : options_.statistics_tokens;
    return tokens < calibration::group ? 0 : tokens;
}

KVQ_FUNC void cache::drop_plan(int layer, int index, const format& plan) noexcept {
    if (options_.statistics != key_statistics::shared) return;
    const std::lock_guard dropping(shared_plans_mutex_);
    const auto held = shared_plans_.find({layer, index});
    // The list's reference and this one.
    if (held != shared_plans_.end() && plan && &held->second.record() == &plan.record() &&
        plan.record().references.load(std::memory_order_relaxed) == 2)
        held->second = {};
}

KVQ_FUNC bool cache::trims_to_every_token() const noexcept {
    bool every = !state_;
    for (int i = 0; i < layer_count(); ++i) every = every && !geometry(i).window;
    return every;
}

KVQ_FUNC const detail::format_table& cache::table(tensor role) const noexcept {
    return role == tensor::key ? keys_ : values_;
}

KVQ_FUNC const detail::format_table& cache::table(tensor role, int layer) const noexcept {
    if (role == tensor::value) return values_;
    const auto found = fitting_keys_.find({shape(layer).kv_heads, shape(layer).head_dim});
    return found == fitting_keys_.end() ? keys_ : found->second;
}

KVQ_FUNC const format& cache::fitting(int layer, const format& f) const {
    return detail::accepted([&] { check(tensor::key, f, 0, layer); }) ? f : keys_.window();
}

KVQ_FUNC int cache::add_format(tensor role, const format& f) {
    detail::format_table& list = role == tensor::key ? keys_ : values_;
    check(role, f, list.listed());
    if (const int i = list.find(f); i < list.listed()) return i;
    detail::check_backends(keys_, values_, f);
    // All that takes memory comes first, so that no table is ahead of another one.
    list.reserve(1);
    std::map<std::pair<int, int>, format> fits;
    std::vector<format> of_values;
    if (role == tensor::key) {
        for (const int layer : shapes_.distinct())
            fits.emplace(std::pair(shape(layer).kv_heads, shape(layer).head_dim), fitting(layer, f));
        of_values.reserve(latent_values_.size());
        for (auto& [dims, read] : latent_values_) {
            of_values.push_back(detail::values_of_keys(fits.at({1, dims.first}), dims.first, dims.second));
            read.reserve(1);
        }
        for (auto& [dims, formats] : fitting_keys_) formats.reserve(1);
        std::size_t next = 0;
        for (auto& [dims, read] : latent_values_) read.add(of_values[next++]);
        for (auto& [dims, formats] : fitting_keys_) formats.add(fits.at(dims));
    }
    list.add(f);
    return list.listed() - 1;
}

KVQ_FUNC void cache::commit_to(tensor role, int listed, int first_layer, int last_layer) {
    expect_listed(role, listed);
    detail::expect(first_layer >= 0 && first_layer <= last_layer &&
                       (last_layer <= layer_count() || last_layer == requantize_request::all),
                   "layers ", first_layer, " to ", last_layer, " are not a range of the ", layer_count(),
                   " layers of the cache");
    for (int i = first_layer; role == tensor::key && i < detail::smaller(last_layer, layer_count()); ++i)
        expect_holds_rotary(i, listed);
    options_.layers.reserve(layers_.size());
    for (int i = first_layer; i < detail::smaller(last_layer, layer_count()); ++i) {
        layer_format& f = layers_[static_cast<std::size_t>(i)].formats;
        (role == tensor::key ? f.key : f.value) = listed;
    }
    options_.layers.clear();
    for (int i = 0; i < layer_count(); ++i) {
        layers_[static_cast<std::size_t>(i)].formats = layers_[static_cast<std::size_t>(owner(i))].formats;
        options_.layers.push_back(layers_[static_cast<std::size_t>(i)].formats);
    }
    wait_for_plans();
}

KVQ_FUNC int cache::target_format(tensor role, int layer) const {
    const layer_format f = layers_[static_cast<std::size_t>(layer)].formats;
    if (static_cast<std::size_t>(role) >= tensors(layer).size()) return 0;
    return table(role).index_of(role == tensor::key ? f.key : f.value);
}

KVQ_FUNC const cache_shape& cache::shape() const {
    const auto text = [&](int i) { return detail::describe_layer(i, layers_[static_cast<std::size_t>(i)]); };
    const std::vector<int>& kinds = shapes_.distinct();
    if (kinds.empty()) detail::fail("no layer of the cache holds keys and values: ", text(0));
    if (kinds.size() > 1)
        detail::fail("the layers of the cache have several shapes: ", text(kinds[0]), "; ", text(kinds[1]));
    for (int i = 0; i < layer_count(); ++i) {
        if (geometry(i).window != key_window{} || owner(i) != i)
            detail::fail("not all layers of the cache hold all of their tokens: ", text(i));
        if (tensors(i).size() < 2) detail::fail("not all layers of the cache hold values: ", text(i));
    }
    return shapes_[kinds[0]];
}

KVQ_FUNC void cache::expect_all_tokens(const char* who) const {
    for (int i = 0; i < layer_count(); ++i)
        if (geometry(i).window != key_window{} || owner(i) != i || tensors(i).size() < 2)
            detail::fail(who, " needs layers that hold all of their tokens",
                         tensors(i).size() < 2 ? ", keys and values" : "", ", not ",
                         detail::describe_layer(i, layers_[static_cast<std::size_t>(i)]));
}

KVQ_FUNC std::size_t cache::page_bytes(tensor role, int layer, int index, int tokens) const {
    return table(role, layer).block_bytes(index, {role, tokens, shape(layer).dim(role)}) *
           static_cast<std::size_t>(shape(layer).kv_heads);
}

KVQ_FUNC std::size_t cache::lower_bytes(tensor role, int layer, int index, int tokens) const {
    return table(role, layer)[index].lower_bytes({role, tokens, shape(layer).dim(role)}) *
           static_cast<std::size_t>(shape(layer).kv_heads);
}

KVQ_FUNC std::size_t cache::page_bytes(tensor role, int index, int tokens) const {
    (void)shape();
    return page_bytes(role, shapes_.distinct()[0], index, tokens);
}

KVQ_FUNC std::vector<layer> cache::with_formats(std::vector<layer> layers, const cache_options& options) {
    if (options.layers.empty()) return layers;
    detail::expect(options.layers.size() == layers.size(), "formats are given for ", options.layers.size(),
                   " layers of a cache with ", layers.size());
    for (std::size_t i = 0; i < layers.size(); ++i) {
        layer_format &own = layers[i].formats, other = options.layers[i];
        detail::expect(own == layer_format{} || own == other,
                       detail::describe_layer(static_cast<int>(i), layers[i]), ": it has formats ", own.key,
                       " and ", own.value, ", cache_options::layers gives it ", other.key, " and ",
                       other.value);
        own = other;
    }
    return layers;
}

KVQ_FUNC const cache_options& cache::checked(const detail::layer_shapes& shapes,
                                             const cache_options& options) {
    detail::expect(options.memory != nullptr, "a cache needs a memory resource");
    detail::expect(options.sinks >= 0, "sinks must not be negative, got ", options.sinks);
    detail::expect(options.recent >= 0, "recent must not be negative, got ", options.recent);
    detail::expect(!options.preallocate || options.byte_budget != page_pool::no_budget,
                   "a cache can allocate its pages up front only within a byte_budget");
    detail::expect(options.rollback >= 0, "rollback must not be negative, got ", options.rollback);
    detail::expect(options.snapshots.every >= 0, "snapshots every ", options.snapshots.every, " tokens");
    detail::expect(options.page_tokens >= 1 && options.page_tokens <= 65536,
                   "page_tokens must be between 1 and 65536, got ", options.page_tokens);
    constexpr int most = (std::numeric_limits<int>::max)() / 4;
    detail::expect(options.sinks <= most && options.recent <= most && options.rollback <= most, "sinks ",
                   options.sinks, ", recent ", options.recent, " and rollback ", options.rollback,
                   " must not be more than ", most);
    detail::expect(options.statistics_tokens >= calibration::group && options.statistics_tokens <= most,
                   "statistics_tokens must be between ", calibration::group, " and ", most, ", got ",
                   options.statistics_tokens);
    detail::expect(options.repack >= 0.0f && options.repack <= 0.5f, "repack ", options.repack,
                   " must be 0, for never, or at most 0.5");
    const page_geometry g{options.sinks, options.recent, options.page_tokens};
    for (const int layer : shapes.distinct())
        for (const tensor role : {tensor::key, tensor::value})
            detail::check_page(g.longest_page(), shapes[layer].dim(role));
    detail::expect(!options.keys.empty(), "a cache needs a format for its keys, such as fp16");
    for (const format_list* list : {&options.keys, &options.values})
        for (const format& f : *list) detail::expect(static_cast<bool>(f), "a format of the cache is empty");
    detail::expect(!options.window || options.window.holds_values(), "the window format must be ",
                   "fp32, fp16 or bf16, got ", options.window ? format_text(options.window) : "none");
    return options;
}

KVQ_FUNC bool cache::is_shared(int layer) const noexcept { return shared_[static_cast<std::size_t>(layer)]; }

KVQ_FUNC const format& cache::window_of(const cache_options& options) {
    if (options.window) return options.window;
    return options.keys[0].functions().backend->fp16();
}

KVQ_FUNC void cache::check(tensor role, const format& f, int number, int layer) const {
    std::string what = std::string(detail::name_of(role)) + " format " + std::to_string(number);
    if (shapes_.distinct().size() > 1) what += " in layer " + std::to_string(layer);
    detail::check_format(f, shape(layer), role, options_.page_tokens, what);
}

/// Keys of latents and of an index are seldom in one format: in a list for several shapes, a format fits one
/// of them at least. Without exceptions it fits all.
KVQ_FUNC void cache::check(tensor role, const format& f, int number) const {
    const std::vector<int>& kinds = shapes_.distinct();
    if (role == tensor::key)
        for (const int layer : kinds)
            if (kinds.size() > 1 && detail::accepted([&] { check(role, f, number, layer); })) return;
    for (const int layer : kinds)
        if (static_cast<std::size_t>(role) < tensors(layer).size()) check(role, f, number, layer);
}

KVQ_FUNC void cache::expect_fits(int layer, int index) const {
    if (!table(tensor::key, layer)[index].is(keys_[index]))
        check(tensor::key, keys_[index], index - 1, layer);
}

KVQ_FUNC void cache::expect_holds_rotary(int layer, int listed) const {
    const kvq::layer& of = layers_[static_cast<std::size_t>(layer)];
    if (holds_tokens(layer)) expect_fits(layer, listed + 1);
    if (of.rotary_channels == 0) return;
    const format& f = keys_[listed + 1];
    const std::string_view name = f.name(), inner = detail::name_before_bounds(name);
    const int apart = detail::last_channels_of(inner.empty() ? name : inner).channels;
    // Bits of codes: parameters make no number finer. Those of a short page would count, and its padding.
    const block_shape block{tensor::key, 1024, of.head_dim};
    const std::size_t codes = f.functions().code_bytes(f.scheme(), block);
    if (apart != of.rotary_channels &&
        (apart > 0 || (codes > 0 ? codes : f.block_bytes(block)) < block.values()))
        detail::fail(detail::describe_layer(layer, of), ": key format ", listed, ", ", format_text(f),
                     ", does not keep its ", of.rotary_channels,
                     " rotary channels in 8 or 16 bits: name one that ends in -fp16x", of.rotary_channels,
                     ", -int8x", of.rotary_channels, " or -ref8x", of.rotary_channels,
                     ", or has codes of 8 bits");
}

KVQ_FUNC void cache::expect_values_stay(int layer, std::int64_t by) const {
    const kvq::layer& of = layers_[static_cast<std::size_t>(layer)];
    if (by != 0 && of.kind == layer_kind::latent && rotations_.at(layer) &&
        of.value_dim > of.head_dim - of.rotary_channels)
        detail::fail(detail::describe_layer(layer, of), ": its ", of.value_dim,
                     " values have rotary channels, which do not turn when keys move by ", by, " positions");
}

KVQ_FUNC const detail::format_table& cache::read_values(int layer) const noexcept {
    const kvq::layer& of = layers_[static_cast<std::size_t>(layer)];
    return detail::holds_keys_alone(of.kind) ? latent_values_.at({of.head_dim, of.value_dim}) : values_;
}

KVQ_FUNC void cache::expect_listed(tensor role, int number) const {
    detail::expect(number >= 0 && number < table(role).listed(), detail::name_of(role), " format ", number,
                   " is not among the ", table(role).listed(), " listed ones");
}

KVQ_FUNC void cache::expect_tokens(int layer) const {
    if (holds_tokens(owner(layer))) return;
    detail::fail(detail::describe_layer(layer, layers_[static_cast<std::size_t>(layer)]),
                 ": it holds no keys and values");
}

KVQ_FUNC void cache::check_attention(int layer, int held, const query_view& q, const output_view& out,
                                     const mods_view& mods) const {
    expect_tokens(layer);
    if (layers_[static_cast<std::size_t>(layer)].kind == layer_kind::index && q.tokens > 0)
        detail::fail(detail::describe_layer(layer, layers_[static_cast<std::size_t>(layer)]),
                     ": it selects tokens (select), and has no values to attend to");
    const cache_shape& of = shape(layer);
    detail::expect(q.heads >= 1 && q.heads % of.kv_heads == 0, "q has ", q.heads,
                   " heads, not a multiple of the ", of.kv_heads, " kv heads");
    detail::expect(q.dim == of.dim(tensor::key), "q has head_dim ", q.dim, " but keys have ",
                   of.dim(tensor::key));
    detail::expect(out.tokens == q.tokens && out.heads == q.heads && out.dim == of.dim(tensor::value),
                   "out is ", out.tokens, " x ", out.heads, " x ", out.dim, " but must be ", q.tokens, " x ",
                   q.heads, " x ", of.dim(tensor::value));
    const bool positions = mods.has_query_positions() && !geometry(layer).window.cross;
    const int most = positions ? held : (std::numeric_limits<int>::max)() / q.heads;
    detail::expect(q.tokens >= 0 && q.tokens <= most, "q has ", q.tokens, " tokens but layer ", layer,
                   " holds ", held);
    detail::expect(q.data != nullptr || q.tokens == 0, "q has no data for ", q.tokens, " tokens");
    detail::expect(out.data != nullptr || q.tokens == 0, "out has no data for ", out.tokens, " tokens");
    if (geometry(layer).window && !positions)
        detail::fail(detail::describe_layer(layer, layers_[static_cast<std::size_t>(layer)]),
                     ": its queries need positions, which cross_attention and leading_keys do not give them");
    mods.check(q.heads);
    check_lists(layer, held, q, mods);
    detail::expect(std::isfinite(mods.scale(q.dim)), "scores cannot be scaled by ", mods.scale(q.dim));
}

KVQ_FUNC void cache::check_lists(int layer, int held, const query_view& q, const mods_view& mods) const {
    const listed_tokens* const lists = mods.lists();
    if (lists == nullptr) return;
    detail::expect(mods.selection() == nullptr && mods.skipping() == nullptr,
                   "queries attend to the tokens of their lists: they select no pages and skip no values");
    const int heads = shape(layer).kv_heads;
    detail::expect(lists->queries == q.tokens && (lists->kv_heads == 1 || lists->kv_heads == heads),
                   "tokens are listed for ", lists->queries, " queries and ", lists->kv_heads,
                   " kv heads, not for the ", q.tokens, " queries and ", heads == 1 ? "" : "1 or ", heads,
                   " kv heads of layer ", layer);
    for (const token_lists& of : {lists->selected, lists->window}) {
        const std::ptrdiff_t all = std::ptrdiff_t{of.count} * lists->kv_heads * lists->queries;
        for (std::ptrdiff_t i = 0; i < all; ++i)
            detail::expect(of.tokens[i] >= -1 && of.tokens[i] < held, "query ",
                           i / (std::ptrdiff_t{of.count} * lists->kv_heads), " lists token ", of.tokens[i],
                           ", layer ", layer, " holds ", held, " tokens (-1: none)");
    }
}

KVQ_FUNC std::size_t cache::attention_workspace(int tokens, int q_heads, int q_tokens, int threads,
                                                const mods_view& mods) const {
    detail::expect(
        tokens >= 0 && tokens <= (std::numeric_limits<int>::max)() - options_.page_tokens && q_tokens >= 0 &&
            (q_heads < 1 || q_tokens <= (std::numeric_limits<int>::max)() / q_heads),
        "a workspace for ", q_tokens, " query tokens of ", q_heads, " heads over ", tokens, " tokens");
    expect_query_heads("a workspace for ", q_heads);
    detail::expect(threads >= 1, "a workspace for ", threads, " threads");
    layer_pages pages;
    pages.geometry = geometry();
    pages.tokens = tokens;
    std::size_t most = 0;
    for (const int layer : shapes_.distinct()) {
        const token_view<float> rows(nullptr, q_tokens, q_heads, shape(layer).dim(tensor::key));
        const detail::attention_item item{pages, rows, rows, nullptr};
        const detail::attention_items items{&item, layer, 1, [](const void* of, int, int) {
                                                return *static_cast<const detail::attention_item*>(of);
                                            }};
        most = detail::larger(most, detail::attention_batch(table(tensor::key, layer), read_values(layer),
                                                            shape(layer), geometry(), rotations_, items, mods)
                                        .bytes(threads));
    }
    return most;
}

KVQ_FUNC std::size_t cache::scratch_floats() const noexcept {
    int dim = 0;
    for (const int layer : shapes_.distinct())
        for (const tensor role : {tensor::key, tensor::value})
            dim = detail::larger(dim, shape(layer).dim(role));
    return static_cast<std::size_t>(options_.page_tokens) * static_cast<std::size_t>(dim);
}

KVQ_FUNC void cache::expect_query_heads(const char* what, int q_heads) const {
    for (const int layer : shapes_.distinct())
        detail::expect(q_heads >= 1 && q_heads % shape(layer).kv_heads == 0, what, q_heads,
                       " query heads, not a multiple of the ", shape(layer).kv_heads, " kv heads of layer ",
                       layer);
}

KVQ_FUNC std::size_t cache::scratch_bytes() const noexcept {
    return detail::round_up(scratch_floats() * sizeof(float), std::size_t{64});
}

}}
