// Caches of the C interface: made from formats by name.
#include <algorithm>
#include <kvq/format/find_format.hpp>

#include "objects.hpp"

namespace kvq::c {

namespace {

static_assert(static_cast<int>(layer_kind::sliding) == KVQ_SLIDING_ATTENTION);
static_assert(static_cast<int>(layer_kind::chunked) == KVQ_CHUNKED_ATTENTION);
static_assert(static_cast<int>(layer_kind::shared) == KVQ_SHARED);
static_assert(static_cast<int>(layer_kind::cross) == KVQ_CROSS_ATTENTION);
static_assert(static_cast<int>(layer_kind::state) == KVQ_STATE);
static_assert(static_cast<int>(layer_kind::latent) == KVQ_LATENT);
static_assert(static_cast<int>(layer_kind::index) == KVQ_INDEX);

void write_layer(const kvq::cache& of, std::int32_t layer, kvq_layer* out) {
    place(out, "out");
    expect(layer >= 0 && layer < of.layer_count(), KVQ_ERROR_ARGUMENT, "layer ", layer, " is not among the ",
           of.layer_count(), " layers of the cache");
    *out = layer_of(of, layer);
}

}  // namespace

rotary_embedding rotary_of(const kvq_rotary& r) {
    expect(r.layout == KVQ_HALF_SPLIT || r.layout == KVQ_INTERLEAVED, KVQ_ERROR_ARGUMENT,
           "the layout of a rotary embedding is ", r.layout, ", neither KVQ_HALF_SPLIT nor KVQ_INTERLEAVED");
    expect_list(r.frequencies, r.frequency_count, "frequencies");
    rotary_embedding e;
    e.dims = r.dims;
    e.first_channel = r.first_channel;
    e.layout = r.layout == KVQ_HALF_SPLIT ? rotary_layout::half_split : rotary_layout::interleaved;
    if (r.base != 0.0) e.base = r.base;
    if (r.frequency_count > 0) e.frequencies.assign(r.frequencies, r.frequencies + r.frequency_count);
    if (r.rotate != nullptr)
        e.rotate = [rotate = r.rotate, user = r.user](float* row, int head_dim, std::int64_t by) {
            rotate(user, row, head_dim, by);
        };
    return e;
}

int cache_state::list(tensor role, const std::string& name, format_list& formats,
                      const calibration* statistics) {
    std::vector<named>& known = names[static_cast<std::size_t>(role)];
    for (const named& n : known)
        if (n.name == name) return n.listed;
    // Presets share value schemes, as affine and kivi do; bounds are for keys alone: two names, one index.
    const format found = found_format(name, role, statistics);
    int listed = 0;
    while (listed < formats.size() && !formats[listed].same_as(found)) ++listed;
    if (listed == formats.size()) formats.push_back(found);
    known.push_back({name, listed});
    return listed;
}

cache_options cache_state::read(const kvq_cache_options& o) {
    place(o.keys, "options.keys");
    const calibration* const statistics = o.statistics ? &get(o.statistics, "statistics").sums : nullptr;
    const std::string keys = o.keys, values = o.values ? o.values : o.keys;
    cache_options c;
    for (const std::string& n : listed_names(keys, "options.keys")) list(tensor::key, n, c.keys, statistics);
    for (const std::string& n : listed_names(values, "options.values"))
        list(tensor::value, n, c.values, statistics);
    if (o.window != nullptr) c.window = find_format(o.window, tensor::key);
    c.sinks = or_default(o.sinks, 4);
    c.recent = or_default(o.recent, 32);
    c.rollback = or_default(o.rollback, 16);
    c.page_tokens = o.page_tokens == 0 ? default_page_tokens : o.page_tokens;
    if (o.byte_budget != 0) c.byte_budget = o.byte_budget;
    c.preallocate = o.preallocate != 0;
    if (o.repack != 0.0f) c.repack = o.repack < 0.0f ? 0.0f : o.repack;
    for (std::int32_t i = 0; o.layer_formats != nullptr && i < o.layers; ++i) {
        const kvq_layer_formats& f = o.layer_formats[i];
        c.layers.push_back({f.keys ? list(tensor::key, f.keys, c.keys, statistics) : 0,
                            f.values ? list(tensor::value, f.values, c.values, statistics) : 0});
    }
    c.rotary = rotary_list(o);
    c.snapshots = snapshots_of(o);
    c.statistics = statistics_of(o.key_statistics);
    if (o.statistics_tokens != 0) c.statistics_tokens = o.statistics_tokens;
    c.memory = &memory;
    return c;
}

layer layer_of(const kvq_layer& given) {
    layer made{given.kv_heads, given.head_dim, given.value_dim};
    made.kind = static_cast<layer_kind>(given.kind);
    (made.kind == layer_kind::latent ? made.rotary_channels : made.window) = given.window;
    made.sinks = given.sinks;
    made.owner = given.owner;
    return made;
}

void add_parts(std::vector<layer>& layers, const kvq_state_part* parts, std::int32_t count) {
    expect_list(parts, count, "state_parts");
    for (std::int32_t i = 0; i < count; ++i) {
        const kvq_state_part& p = parts[i];
        expect(p.layer >= 0 && static_cast<std::size_t>(p.layer) < layers.size(), KVQ_ERROR_ARGUMENT,
               "state_parts[", i, "] is of layer ", p.layer, " of ", layers.size());
        expect(p.snapshot >= KVQ_SNAPSHOT_EXACT && p.snapshot <= KVQ_SNAPSHOT_E4M3, KVQ_ERROR_ARGUMENT,
               "state_parts[", i, "] has snapshot ", p.snapshot,
               ", not KVQ_SNAPSHOT_EXACT to KVQ_SNAPSHOT_E4M3");
        place(p.name, "the name of a part of a state");
        layers[static_cast<std::size_t>(p.layer)].parts.push_back(
            {p.name, type_of(p.dtype, "a part of a state"), p.heads, p.rows, p.columns,
             static_cast<snapshot_type>(p.snapshot)});
    }
}

std::vector<layer> cache_state::layers_of(const kvq_cache_options& o) {
    expect(o.layer_list != nullptr || o.state_part_count == 0, KVQ_ERROR_ARGUMENT, "there are ",
           o.state_part_count, " parts of state, but no layer_list that says which layers have state");
    if (o.layer_list == nullptr) return detail::equal_layers({o.layers, o.kv_heads, o.head_dim, o.value_dim});
    expect(
        o.kv_heads == 0 && o.head_dim == 0 && o.value_dim == 0, KVQ_ERROR_ARGUMENT,
        "layer_list says the shape of each layer, so that kv_heads, head_dim and value_dim must be 0, not ",
        o.kv_heads, ", ", o.head_dim, " and ", o.value_dim);
    expect(o.layers >= 1, KVQ_ERROR_ARGUMENT, "a cache needs at least 1 layer, got ", o.layers);
    expect(o.layers <= detail::most_layers, KVQ_ERROR_ARGUMENT, "a cache has at most ", detail::most_layers,
           " layers, got ", o.layers);
    std::vector<layer> all;
    for (std::int32_t i = 0; i < o.layers; ++i) {
        const kvq_layer& l = o.layer_list[i];
        expect(l.kind >= KVQ_FULL_ATTENTION && l.kind <= KVQ_INDEX, KVQ_ERROR_ARGUMENT, "layer ", i,
               " has kind ", l.kind, ", none of KVQ_FULL_ATTENTION, ...");
        all.push_back(layer_of(l));
    }
    add_parts(all, o.state_parts, o.state_part_count);
    return all;
}

cache_state::cache_state(const kvq_cache_options& o) : memory(o.allocator), cache(layers_of(o), read(o)) {}

cache_state::cache_state(std::vector<layer> layers, const cache_options& o,
                         std::shared_ptr<std::pmr::memory_resource> of_pages)
    : memory(nullptr), pages(std::move(of_pages)), cache(std::move(layers), o) {
    for (const tensor role : {tensor::key, tensor::value})
        for (int i = 0; i < cache.table(role).listed(); ++i)
            names[static_cast<std::size_t>(role)].push_back({cache.table(role)[i + 1].name(), i});
}

int cache_state::listed(tensor role, const char* name) const {
    place(name, "the name of a format");
    std::string all;
    for (const named& n : names_of(role)) {
        if (n.name == name) return n.listed;
        all += (all.empty() ? "" : ", ") + n.name;
    }
    fail(KVQ_ERROR_ARGUMENT, "the cache lists no ", detail::name_of(role), " format \"", name, "\", only ",
         all);
}

std::vector<sequence*> sequences_of(kvq_sequence* const* list, std::int32_t count, const shared_cache& of) {
    expect_list(list, count, "sequences");
    std::vector<sequence*> all;
    for (std::int32_t i = 0; i < count; ++i) {
        kvq_sequence& s = get(list[i], "a sequence of the list");
        expect_same(s.of, of, "a sequence of the list");
        all.push_back(&s.sequence);
    }
    return all;
}

}  // namespace kvq::c

using namespace kvq::c;

extern "C" {

kvq_status kvq_cache_create(const kvq_cache_options* options, kvq_cache** out) {
    return guard([&] {
        const kvq_cache_options o = read_reserved(options, "options");
        place(out, "out");
        *out = make<kvq_cache>(std::make_shared<cache_state>(o));
    });
}

kvq_status kvq_cache_free(kvq_cache* cache) { return free_handle(cache, "cache"); }

kvq_status kvq_cache_get_info(const kvq_cache* cache, kvq_cache_info* info) {
    return guard([&] {
        const kvq::cache& of = get(cache, "cache").state->cache;
        expect_struct(info, "info");
        kvq_layer all = layer_of(of, 0);
        for (int i = 1; i < of.layer_count(); ++i) {
            const kvq_layer own = layer_of(of, i);
            for (const auto number : {&kvq_layer::kv_heads, &kvq_layer::head_dim, &kvq_layer::value_dim})
                if (own.*number != all.*number) all.*number = 0;
        }
        const kvq::cache_options& o = of.options();
        write_struct(info, kvq_cache_info{0, of.layer_count(), all.kv_heads, all.head_dim, all.value_dim,
                                          o.page_tokens, o.sinks, o.recent, o.rollback, o.byte_budget,
                                          of.bytes_in_use(), of.pool().pages_in_use(), of.bytes_held()});
    });
}

kvq_status kvq_cache_get_layer(const kvq_cache* cache, int32_t layer, kvq_layer* out) {
    return guard([&] { write_layer(get(cache, "cache").state->cache, layer, out); });
}

kvq_status kvq_sequence_get_layer(const kvq_sequence* sequence, int32_t layer, kvq_layer* out) {
    return guard([&] { write_layer(get(sequence, "sequence").of->cache, layer, out); });
}

kvq_status kvq_cache_add_format(kvq_cache* cache, kvq_role role, const kvq_format* format, const char* name) {
    return guard([&] {
        cache_state& state = *get(cache, "cache").state;
        const kvq_format& f = get(format, "format");
        const kvq::tensor of = role_of(role);
        const std::string known_as = name ? name : f.name;
        for (const auto& n : state.names_of(of))
            expect(n.name != known_as, KVQ_ERROR_ARGUMENT, "the cache lists a ", detail::name_of(of),
                   " format \"", known_as, "\" already");
        auto& names = state.names[static_cast<std::size_t>(of)];
        names.reserve(names.size() + 1);
        cache_state::named added{known_as, 0};
        added.listed = state.cache.add_format(of, f.format);
        names.push_back(std::move(added));
    });
}

kvq_status kvq_cache_commit_to(kvq_cache* cache, kvq_role role, const char* name, int32_t first_layer,
                               int32_t last_layer) {
    return guard([&] {
        cache_state& state = *get(cache, "cache").state;
        const kvq::tensor of = role_of(role);
        state.cache.commit_to(of, state.listed(of, name), first_layer,
                              last_layer == 0 ? kvq::requantize_request::all : last_layer);
    });
}

kvq_status kvq_cache_find_format(const kvq_cache* cache, kvq_role role, const char* name, int32_t* index) {
    return guard([&] {
        const cache_state& state = *get(cache, "cache").state;
        place(index, "index");
        const kvq::tensor of = role_of(role);
        *index = state.cache.table(of).index_of(state.listed(of, name));
    });
}

kvq_status kvq_cache_get_format(const kvq_cache* cache, kvq_role role, int32_t index, kvq_format** out) {
    return guard([&] {
        const cache_state& state = *get(cache, "cache").state;
        place(out, "out");
        const kvq::tensor of = role_of(role);
        const auto& table = state.cache.table(of);
        expect(index >= 0 && index < table.size(), KVQ_ERROR_ARGUMENT, "format ", index, " is not among the ",
               table.size(), " of the cache");
        std::string name = table[index].name();
        const auto& names = state.names_of(of);
        const auto first =
            std::find_if(names.begin(), names.end(), [&](const auto& n) { return n.listed == index - 1; });
        if (first != names.end()) name = first->name;
        *out = make<kvq_format>(table[index], name,
                                state.cache.has_equal_layers() ? state.cache.shape() : kvq::cache_shape{});
    });
}

kvq_status kvq_cache_workspace_bytes(const kvq_cache* cache, int32_t tokens, int32_t q_heads,
                                     int32_t q_tokens, int32_t threads, size_t* bytes) {
    return guard([&] {
        const kvq::cache& of = get(cache, "cache").state->cache;
        place(bytes, "bytes") = of.attention_workspace(tokens, q_heads, q_tokens, threads);
    });
}

kvq_status kvq_rotary_llama3(int32_t dims, double base, double factor, double low_freq_factor,
                             double high_freq_factor, double original_context, double* frequencies) {
    return guard([&] {
        place(frequencies, "frequencies");
        const auto f = kvq::llama3_frequencies(dims, base,
                                               {factor, low_freq_factor, high_freq_factor, original_context});
        std::copy(f.begin(), f.end(), frequencies);
    });
}

kvq_status kvq_rotary_yarn(int32_t dims, double base, double factor, double original_context,
                           double beta_fast, double beta_slow, double* frequencies) {
    return guard([&] {
        place(frequencies, "frequencies");
        const auto f = kvq::yarn_frequencies(dims, base, {factor, original_context, beta_fast, beta_slow});
        std::copy(f.begin(), f.end(), frequencies);
    });
}
}
