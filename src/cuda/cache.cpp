// Caches on a device, their sequences and steps: the functions of kvq_cuda.h.
#include <kvq/cuda/host/host_pages.hpp>
#include <kvq/cuda/host/self_calibration.hpp>

#include "arguments.hpp"
#include "objects.hpp"

namespace kvq::c {

namespace {

/// Rows of a batch; NULL is a row that is not there.
void expect_layer(const cuda::cache& of, int i) {
    expect(i >= 0 && i < of.layer_count(), KVQ_ERROR_ARGUMENT, "layer ", i, " is not among the ",
           of.layer_count(), " layers of the cache");
}

/// The layers of a cache. names: its formats, to which those of the layers are added.
std::vector<layer> read_layers(const kvq_cuda_cache_options& o, std::vector<std::string>& names) {
    expect(o.layers >= 1, KVQ_ERROR_ARGUMENT, "a cache needs at least 1 layer, got ", o.layers);
    expect(o.layers <= 65535, KVQ_ERROR_ARGUMENT, "a cache of ", o.layers,
           " layers, but it has at most 65535");
    expect(o.layer_list == nullptr || (o.kv_heads == 0 && o.head_dim == 0), KVQ_ERROR_ARGUMENT,
           "layer_list says the shape of each layer, so that kv_heads and head_dim must be 0, not ",
           o.kv_heads, " and ", o.head_dim);
    const auto number = [&](const char* name) {
        if (name == nullptr) return 0;
        const auto at = std::find(names.begin(), names.end(), name);
        if (at != names.end()) return static_cast<int>(at - names.begin());
        names.emplace_back(name);
        return static_cast<int>(names.size()) - 1;
    };
    std::vector<layer> all;
    for (std::int32_t i = 0; i < o.layers; ++i) {
        layer made{o.kv_heads, o.head_dim};
        if (o.layer_list != nullptr) {
            const kvq_layer& l = o.layer_list[i];
            expect(l.kind >= KVQ_FULL_ATTENTION && l.kind <= KVQ_INDEX, KVQ_ERROR_UNSUPPORTED, "layer ", i,
                   " has kind ", l.kind,
                   ": caches on a device have the kinds KVQ_FULL_ATTENTION to KVQ_INDEX");
            made = layer_of(l);
        }
        if (o.layer_formats != nullptr)
            made.formats = {number(o.layer_formats[i].keys), number(o.layer_formats[i].values)};
        all.push_back(made);
    }
    add_parts(all, o.state_parts, o.state_part_count);
    return all;
}

/// What attention refuses, before a call has appended anything.
void expect_queries(const device_state& of, int layer, const query_view& q, const output_view& out) {
    expect_layer(of.cache, layer);
    expect(of.cache.layers()[static_cast<std::size_t>(layer)].kind != layer_kind::state, KVQ_ERROR_ARGUMENT,
           "layer ", layer, " has a state: it holds no keys and values");
    const cache_shape s = of.cache.shape(layer);
    const int width = s.dim(tensor::value);
    expect(q.tokens == out.tokens && q.heads == out.heads && q.dim == s.head_dim && out.dim == width &&
               q.heads >= 1 && q.heads % s.kv_heads == 0,
           KVQ_ERROR_ARGUMENT, "q is ", q.tokens, " x ", q.heads, " x ", q.dim, " and out ", out.tokens,
           " x ", out.heads, " x ", out.dim, ", but the layer has ", s.kv_heads, " kv heads of ", s.head_dim,
           " channels, and values of ", width);
}

void attend_layer(device_state& of, int layer, const query_view& q, const output_view& out,
                  const cuda::attention_options& a, const kvq_cuda_attend_options& o, cudaStream_t stream) {
    if (has_lists(o)) return check(of.cache.attend_lists(layer, q, out, lists_of(o, a.query_tokens), stream));
    check(of.alibi ? of.cache.attend(layer, q, out, a, stream, cuda::alibi{o.alibi_slopes})
                   : of.cache.attend(layer, q, out, a, stream));
    add_learned_sinks(out, o, stream);
}

/// Begins what is of one sequence: a prompt, or the text of layers with cross attention.
kvq_status begin_text(kvq_cuda_cache* cache, kvq_cuda_sequence* sequence, std::int32_t tokens, void* stream,
                      cuda::status (cuda::cache::*begin)(cuda::sequence_id, int, cudaStream_t)) {
    return guard([&] {
        const shared_device& of = get(cache, "cache").state;
        const kvq_cuda_sequence& s = get(sequence, "sequence");
        expect(s.of == of, KVQ_ERROR_HANDLE, "sequence belongs to another cache");
        const device_call call(*of);
        check((of->cache.*begin)(s.id, tokens, stream_of(stream)));
        of->step = {1, tokens, true};
    });
}

}  // namespace

device_state::device_state(const kvq_cuda_cache_options& o, cudaStream_t stream) {
    place(o.formats, "options.formats");
    if (o.allocator != nullptr) {
        memory = read_struct(o.allocator, "options.allocator");
        expect(memory.allocate != nullptr && memory.deallocate != nullptr, KVQ_ERROR_HANDLE,
               "an allocator needs both functions, allocate and deallocate");
    }
    check(cudaGetDevice(&device), "asking for the current device");
    expect_kernels();
    alibi = o.alibi != 0;
    cuda::cache_options c;
    c.formats = listed_names(o.formats, "formats");
    c.type = window_type(o.window);
    c.page_tokens = o.page_tokens == 0 ? default_page_tokens : o.page_tokens;
    c.sinks = or_default(o.sinks, 4);
    c.recent = or_default(o.recent, 64);
    c.rollback = or_default(o.rollback, 16);
    c.max_batch = o.max_batch == 0 ? 1 : o.max_batch;
    c.max_tokens = o.max_tokens == 0 ? 32768 : o.max_tokens;
    c.step_tokens = o.step_tokens == 0 ? 1 : o.step_tokens;
    c.draft_tokens = o.draft_tokens;
    c.listed_tokens = o.listed_tokens;
    c.resident_tokens = o.resident_tokens;
    c.statistics = statistics_of(o.key_statistics);
    if (o.statistics != nullptr) c.statistics = key_statistics::off;  // all keys that take some have them
    if (o.statistics_tokens != 0) c.statistics_tokens = o.statistics_tokens;
    if (o.query_heads != 0) c.query_heads = o.query_heads;
    c.pool_tokens = o.pool_tokens;
    c.pool_sequences = o.pool_sequences;
    c.growing = o.fixed == 0;
    expect(o.prompt_scratch_mib >= 0 || o.prompt_scratch_mib == KVQ_NONE, KVQ_ERROR_ARGUMENT,
           "options.prompt_scratch_mib is ", o.prompt_scratch_mib);
    if (o.prompt_scratch_mib != 0)
        c.prompt_scratch = static_cast<std::size_t>(or_default(o.prompt_scratch_mib, 0)) << 20;
    c.pool_states = o.pool_states;
    c.snapshots = snapshots_of(o);
    c.rotary = rotary_list(o);
    std::vector<layer> layers = read_layers(o, c.formats);
    const bool equal = o.layer_list == nullptr && o.layer_formats == nullptr;
    if (c.formats.size() == 1 && holds_values(c.formats[0])) {
        const char* const window = c.type == float_type::fp16 ? "fp16" : "bf16";
        expect(c.formats[0] == window, KVQ_ERROR_ARGUMENT, "a cache of ", c.formats[0], " needs a window of ",
               c.formats[0], ", not of ", window);
        // Nothing leaves the window: the kernels of any entry will do, those with the fewest formats.
        c.formats.clear();
        const auto kind_of = [](const layer& l) {
            return detail::holds_keys_alone(l.kind) ? l.kind : layer_kind::full;
        };
        for (const layer_kind kind : {layer_kind::full, layer_kind::latent, layer_kind::index}) {
            const auto is_one = [&](const layer& l) { return l.head_dim > 0 && kind_of(l) == kind; };
            const auto held = std::find_if(layers.begin(), layers.end(), is_one);
            if (held == layers.end()) continue;
            const auto number = static_cast<int>(c.formats.size());
            c.formats.push_back(find_compiled({}, *held, c.page_tokens, c.type, alibi).kinds[0].name);
            for (layer& l : layers)
                if (is_one(l)) l.formats = {number, number};
        }
        expect(!c.formats.empty(), KVQ_ERROR_ARGUMENT,
               "a cache on a device has a layer with keys and values; all ", o.layers, " have state");
        c.sinks = c.rollback = c.pool_tokens = 0;
        c.recent = c.max_tokens;
        if (o.pool_tokens > 0 && c.max_tokens > 0)
            c.pool_sequences =
                detail::larger(c.pool_sequences, detail::ceil_div(o.pool_tokens, c.max_tokens));
    } else {
        for (const std::string& name : c.formats)
            expect(!holds_values(name), KVQ_ERROR_ARGUMENT, name,
                   " is the format of the window; a list of formats for pages cannot name it");
    }
    if (o.allocator != nullptr)
        c.memory = {[](std::size_t bytes, void* user) {
                        const auto& from = *static_cast<const kvq_cuda_allocator*>(user);
                        return from.allocate(from.user, bytes);
                    },
                    [](void* p, std::size_t bytes, void* user) {
                        const auto& from = *static_cast<const kvq_cuda_allocator*>(user);
                        from.deallocate(from.user, p, bytes);
                    },
                    &memory};
    // Of equal layers the refusal says what was compiled.
    std::vector<cuda::device_format> kernels;
    if (equal)
        kernels.push_back(
            find_compiled(c.formats, layer{o.kv_heads, o.head_dim}, c.page_tokens, c.type, alibi));
    for (const cuda::device_format& f : cuda::library_formats())
        if (!equal && is_alibi(f) == alibi) kernels.push_back(f);
    check(cache.open(layers, c, kernels, stream));
    if (o.statistics != nullptr)
        for (const std::string& name : cache.options().formats)
            check(cache.calibrate(name, get(o.statistics, "statistics").sums, stream));
}

}  // namespace kvq::c

using namespace kvq::c;

extern "C" {

kvq_status kvq_cuda_format_count(int32_t* count) {
    return guard([&] { place(count, "count") = static_cast<int32_t>(kvq::cuda::library_formats().size()); });
}

kvq_status kvq_cuda_format_list(int32_t index, kvq_cuda_format_entry* entry) {
    return guard([&] {
        expect_struct(entry, "entry");
        const auto count = static_cast<int32_t>(kvq::cuda::library_formats().size());
        expect(index >= 0 && index < count, KVQ_ERROR_ARGUMENT, "format ", index, " is not among ", count);
        static const std::vector<std::string> names = [] {
            std::vector<std::string> all;
            for (const kvq::cuda::device_format& f : kvq::cuda::library_formats()) {
                std::string of;
                for (const auto& k : f.kinds) of += (of.empty() ? "" : ",") + k.name;
                all.push_back(of);
            }
            return all;
        }();
        const kvq::cuda::device_format& f = kvq::cuda::library_formats()[static_cast<std::size_t>(index)];
        write_struct(entry, kvq_cuda_format_entry{
                                0, names[static_cast<std::size_t>(index)].c_str(), f.head_dim, f.page_tokens,
                                f.type == kvq::float_type::fp16 ? KVQ_FP16 : KVQ_BF16, is_alibi(f) ? 1 : 0});
    });
}

kvq_status kvq_cuda_cache_create(const kvq_cuda_cache_options* options, void* stream, kvq_cuda_cache** out) {
    return guard([&] {
        const kvq_cuda_cache_options o = read_struct(options, "options");
        place(out, "out");
        *out = make<kvq_cuda_cache>(std::make_shared<device_state>(o, stream_of(stream)));
    });
}

kvq_status kvq_cuda_cache_free(kvq_cuda_cache* cache) { return free_handle(cache, "cache"); }

kvq_status kvq_cuda_cache_get_info(const kvq_cuda_cache* cache, kvq_cuda_cache_info* info) {
    return guard([&] {
        device_state& of = *get(cache, "cache").state;
        expect_struct(info, "info");
        const device_call call(of);
        kvq_layer s{};
        const int layers = of.cache.layer_count();
        bool first = true;
        for (int i = 0; i < layers; ++i) {
            const kvq_layer own = layer_of(of.cache, i);
            if (own.kind == KVQ_STATE) continue;
            if (std::exchange(first, false)) s = own;
            if (own.kv_heads != s.kv_heads) s.kv_heads = 0;
            if (own.head_dim != s.head_dim) s.head_dim = 0;
        }
        const kvq::cuda::cache_options& o = of.cache.options();
        const kvq::usage_report u = of.cache.usage();
        const std::size_t in_use = of.cache.bytes_in_use(), window = in_use - u.quantized - u.state,
                          free = of.cache.bytes_held() - in_use, prompt = of.cache.prompt_bytes();
        write_struct(
            info, kvq_cuda_cache_info{
                      0,         layers,      s.kv_heads,  s.head_dim,   o.page_tokens, o.sinks,
                      o.recent,  o.rollback,  o.max_batch, o.max_tokens, o.step_tokens, o.draft_tokens,
                      of.device, u.quantized, window,      free,         u.bookkeeping, u.workspace - prompt,
                      prompt,    u.bytes,     u.state});
    });
}

kvq_status kvq_cuda_cache_get_layer(const kvq_cuda_cache* cache, int32_t layer, kvq_layer* out) {
    return guard([&] {
        const kvq::cuda::cache& of = get(cache, "cache").state->cache;
        place(out, "out");
        expect_layer(of, layer);
        *out = layer_of(of, layer);
    });
}

kvq_status kvq_cuda_cache_not_finite(const kvq_cuda_cache* cache, uint32_t* by_layer, int32_t layers,
                                     void* stream) {
    return guard([&] {
        device_state& of = *get(cache, "cache").state;
        expect_list(by_layer, layers, "counts");
        const device_call call(of);
        check(of.cache.not_finite({by_layer, static_cast<std::size_t>(layers)}, stream_of(stream)));
    });
}

kvq_status kvq_cuda_sequence_create(kvq_cuda_cache* cache, kvq_cuda_sequence** out) {
    return guard([&] {
        const shared_device& of = get(cache, "cache").state;
        place(out, "out");
        *out = new_sequence(of, [&](kvq::cuda::sequence_id& id) { id = of->cache.new_sequence(); });
    });
}

kvq_status kvq_cuda_sequence_free(kvq_cuda_sequence* sequence) { return free_handle(sequence, "sequence"); }

kvq_status kvq_cuda_sequence_fork(const kvq_cuda_sequence* sequence, void* stream, kvq_cuda_sequence** out) {
    return guard([&] {
        const kvq_cuda_sequence& from = get(sequence, "sequence");
        place(out, "out");
        *out = new_sequence(from.of, [&](kvq::cuda::sequence_id& id) {
            check(from.of->cache.fork(from.id, id, stream_of(stream)));
        });
    });
}

kvq_status kvq_cuda_sequence_tokens(const kvq_cuda_sequence* sequence, int32_t* tokens) {
    return guard([&] {
        const kvq_cuda_sequence& s = get(sequence, "sequence");
        const std::lock_guard lock(s.of->mutex);
        place(tokens, "tokens") = s.of->cache.tokens(s.id);
    });
}

kvq_status kvq_cuda_sequence_bytes(const kvq_cuda_sequence* sequence, size_t* bytes) {
    return guard([&] {
        const kvq_cuda_sequence& s = get(sequence, "sequence");
        const std::lock_guard lock(s.of->mutex);
        place(bytes, "bytes") = s.of->cache.usage(s.id).bytes;
    });
}

kvq_status kvq_cuda_sequence_get_usage(const kvq_cuda_sequence* sequence, kvq_usage* usage) {
    return guard([&] {
        const kvq_cuda_sequence& s = get(sequence, "sequence");
        expect_struct(usage, "usage");
        const std::lock_guard lock(s.of->mutex);
        write_usage(usage, s.of->cache.usage(s.id));
    });
}

kvq_status kvq_cuda_sequence_trim(kvq_cuda_sequence* sequence, int32_t tokens) {
    return guard([&] {
        const kvq_cuda_sequence& s = get(sequence, "sequence");
        const device_call call(*s.of);
        check(s.of->cache.trim(s.id, tokens));
    });
}

kvq_status kvq_cuda_sequence_erase(kvq_cuda_sequence* sequence, int32_t first, int32_t last) {
    return guard([&] {
        const kvq_cuda_sequence& s = get(sequence, "sequence");
        const device_call call(*s.of);
        check(s.of->cache.erase(s.id, first, last));
    });
}

kvq_status kvq_cuda_sequence_shift(kvq_cuda_sequence* sequence, int32_t first, int32_t last, int64_t by) {
    return guard([&] {
        const kvq_cuda_sequence& s = get(sequence, "sequence");
        const device_call call(*s.of);
        check(s.of->cache.shift(s.id, first, last, by));
    });
}

kvq_status kvq_cuda_sequence_splice(kvq_cuda_sequence* sequence, const kvq_cuda_sequence* other,
                                    int32_t first, int32_t last, void* stream) {
    return guard([&] {
        const kvq_cuda_sequence &s = get(sequence, "sequence"), &from = get(other, "other");
        expect(s.of == from.of, KVQ_ERROR_HANDLE, "other belongs to another cache");
        const device_call call(*s.of);
        check(s.of->cache.splice(s.id, from.id, first, last, stream_of(stream)));
    });
}

kvq_status kvq_cuda_sequence_drop_front(kvq_cuda_sequence* sequence, int32_t window, int32_t move_sinks,
                                        int32_t* dropped) {
    return guard([&] {
        const kvq_cuda_sequence& s = get(sequence, "sequence");
        place(dropped, "dropped") = 0;
        const device_call call(*s.of);
        check(s.of->cache.drop_front(s.id, window, move_sinks != 0, *dropped));
    });
}

kvq_status kvq_cuda_cache_state(kvq_cuda_cache* cache, int32_t layer, int32_t part,
                                kvq_cuda_state_view* view) {
    return guard([&] {
        device_state& of = *get(cache, "cache").state;
        expect_struct(view, "view");
        const device_call call(of);
        kvq::cuda::state_view found;
        check(of.cache.state(layer, part, found));
        write_struct(view, kvq_cuda_state_view{0, found.data, found.slot_bytes, found.bytes, found.row_slots,
                                               found.slot_count, found.rows});
    });
}

kvq_status kvq_cuda_sequence_state(kvq_cuda_sequence* sequence, int32_t layer, int32_t part, void** data,
                                   size_t* bytes) {
    return guard([&] {
        const kvq_cuda_sequence& s = get(sequence, "sequence");
        place(data, "data");
        place(bytes, "bytes");
        const std::lock_guard lock(s.of->mutex);
        std::byte* found = nullptr;
        check(s.of->cache.state(s.id, layer, part, found));
        const kvq::state_part& p = s.of->cache.state_layout()->parts(layer)[static_cast<std::size_t>(part)];
        *data = found;
        *bytes = p.values() * kvq::size_of(p.type);
    });
}

kvq_status kvq_cuda_sequence_snapshot(kvq_cuda_sequence* sequence) {
    return guard([&] {
        const kvq_cuda_sequence& s = get(sequence, "sequence");
        const std::lock_guard lock(s.of->mutex);
        check(s.of->cache.snapshot(s.id));
    });
}

kvq_status kvq_cuda_sequence_drop_snapshots(kvq_cuda_sequence* sequence) {
    return guard([&] {
        const kvq_cuda_sequence& s = get(sequence, "sequence");
        const std::lock_guard lock(s.of->mutex);
        check(s.of->cache.drop_snapshots(s.id));
    });
}

kvq_status kvq_cuda_sequence_reach(const kvq_cuda_sequence* sequence, int32_t tokens, int32_t* reached) {
    return guard([&] {
        const kvq_cuda_sequence& s = get(sequence, "sequence");
        place(reached, "reached");
        const std::lock_guard lock(s.of->mutex);
        const int held = s.of->cache.tokens(s.id);
        expect(tokens >= 0 && tokens <= held, KVQ_ERROR_ARGUMENT, "cannot trim to ", tokens,
               " tokens: the sequence holds ", held);
        *reached = s.of->cache.reach(s.id, tokens);
    });
}

kvq_status kvq_cuda_sequence_get_snapshots(const kvq_cuda_sequence* sequence, kvq_snapshot* snapshots,
                                           int32_t capacity, int32_t* count) {
    return guard([&] {
        const kvq_cuda_sequence& s = get(sequence, "sequence");
        expect_list(snapshots, capacity, "snapshots");
        place(count, "count");
        const std::lock_guard lock(s.of->mutex);
        const auto marks = s.of->cache.snapshots(s.id);
        *count = static_cast<std::int32_t>(marks.size());
        for (std::size_t i = 0; i < marks.size() && i < static_cast<std::size_t>(capacity); ++i)
            snapshots[i] = {marks[i].tokens, 0, marks[i].bytes, 0.0};
    });
}

kvq_status kvq_cuda_sequence_trim_limit(const kvq_cuda_sequence* sequence, int32_t* tokens) {
    return guard([&] {
        const kvq_cuda_sequence& s = get(sequence, "sequence");
        const std::lock_guard lock(s.of->mutex);
        place(tokens, "tokens") = s.of->cache.trim_limit(s.id);
    });
}

kvq_status kvq_cuda_cache_begin_step(kvq_cuda_cache* cache, kvq_cuda_sequence* const* rows, int32_t count,
                                     int32_t new_tokens, void* stream) {
    return guard([&] {
        const shared_device& of = get(cache, "cache").state;
        const auto ids = rows_of(rows, count, of, true);
        const device_call call(*of);
        check(of->cache.begin_step(ids, new_tokens, stream_of(stream)));
        of->step = {count, new_tokens, false};
    });
}

kvq_status kvq_cuda_cache_begin_prompt(kvq_cuda_cache* cache, kvq_cuda_sequence* sequence, int32_t new_tokens,
                                       void* stream) {
    return begin_text(cache, sequence, new_tokens, stream, &kvq::cuda::cache::begin_prompt);
}

kvq_status kvq_cuda_cache_begin_cross(kvq_cuda_cache* cache, kvq_cuda_sequence* sequence, int32_t tokens,
                                      void* stream) {
    return begin_text(cache, sequence, tokens, stream, &kvq::cuda::cache::begin_cross);
}

kvq_status kvq_cuda_cache_begin_draft(kvq_cuda_cache* cache, kvq_cuda_sequence* const* rows, int32_t count,
                                      int32_t new_tokens, void* stream) {
    return guard([&] {
        const shared_device& of = get(cache, "cache").state;
        const auto ids = rows_of(rows, count, of, true);
        const device_call call(*of);
        check(of->cache.begin_draft(ids, new_tokens, stream_of(stream)));
        of->step = {count, new_tokens, false};
    });
}

kvq_status kvq_cuda_cache_keep(kvq_cuda_cache* cache, kvq_cuda_sequence* const* rows, int32_t count,
                               const int32_t* paths, const int32_t* starts, void* stream) {
    return guard([&] {
        const shared_device& of = get(cache, "cache").state;
        const auto ids = rows_of(rows, count, of, false);
        expect_data(starts, "starts");
        std::vector<std::span<const int>> spans;
        expect(starts[0] == 0, KVQ_ERROR_ARGUMENT, "starts begins with ", starts[0], ", not with 0");
        for (std::int32_t i = 0; i < count; ++i) {
            expect(starts[i] <= starts[i + 1], KVQ_ERROR_ARGUMENT, "starts goes down from ", starts[i],
                   " to ", starts[i + 1]);
            expect(paths != nullptr || starts[i + 1] == 0, KVQ_ERROR_HANDLE, "paths is NULL");
            spans.emplace_back(paths + starts[i], static_cast<std::size_t>(starts[i + 1] - starts[i]));
        }
        const device_call call(*of);
        check(of->cache.keep(ids, spans, stream_of(stream)));
    });
}

kvq_status kvq_cuda_cache_append(kvq_cuda_cache* cache, int32_t layer, const kvq_tensor* k,
                                 const kvq_tensor* v, void* stream) {
    return guard([&] {
        device_state& of = *get(cache, "cache").state;
        const auto type = of.cache.options().type;
        const auto keys = input_of(k, type, "k"), values = input_of(v, type, "v");
        const device_call call(of);
        check(of.cache.append(layer, keys, values, stream_of(stream)));
    });
}

kvq_status kvq_cuda_cache_attend(kvq_cuda_cache* cache, int32_t layer, const kvq_tensor* q,
                                 const kvq_tensor* out, const kvq_cuda_attend_options* options,
                                 void* stream) {
    return guard([&] {
        device_state& of = *get(cache, "cache").state;
        const kvq_cuda_attend_options o = read_optional(options, "options");
        const auto queries = query_of(q, of.cache.options().type, "q");
        const auto to = output_of(out, of.cache.options().type, "out");
        const device_call call(of);
        expect_modifiers(o, of.alibi);
        const int rows = of.step.rows;
        expect(q->tokens % rows == 0, KVQ_ERROR_ARGUMENT, "q has ", q->tokens, " tokens, for ", rows,
               " rows of the step");
        kvq::cuda::attention_options a = attention_of(o);
        a.query_tokens = q->tokens / rows;
        attend_layer(of, layer, queries, to, a, o, stream_of(stream));
    });
}

kvq_status kvq_cuda_cache_prefill(kvq_cuda_cache* cache, int32_t layer, const kvq_tensor* k,
                                  const kvq_tensor* v, const kvq_tensor* q, const kvq_tensor* out,
                                  const kvq_cuda_attend_options* options, void* stream) {
    return guard([&] {
        device_state& of = *get(cache, "cache").state;
        const kvq_cuda_attend_options o = read_optional(options, "options");
        const auto type = of.cache.options().type;
        const auto keys = input_of(k, type, "k"), values = input_of(v, type, "v");
        const auto queries = query_of(q, type, "q");
        const auto to = output_of(out, type, "out");
        expect(!has_lists(o), KVQ_ERROR_ARGUMENT,
               "lists of tokens are for kvq_cuda_cache_append, then kvq_cuda_cache_attend");
        const device_call call(of);
        expect_queries(of, layer, queries, to);
        if (of.step.prompt) {
            expect_slopes(o, of.alibi);
            expect(o.ancestors == nullptr, KVQ_ERROR_ARGUMENT, "a prompt has no tree of drafted tokens");
            const auto prompt = [&](const auto&... score) {
                return check(of.cache.prefill(layer, keys, values, queries, to, prefill_of(o),
                                              stream_of(stream), score...));
            };
            return of.alibi ? prompt(kvq::cuda::alibi{o.alibi_slopes}) : prompt();
        }
        expect_modifiers(o, of.alibi);
        const bool takes = of.cache.takes_tokens(layer);
        expect(takes ? queries.tokens == keys.tokens : keys.tokens == 0 && values.tokens == 0,
               KVQ_ERROR_ARGUMENT, "q has ", queries.tokens, " tokens, k ", keys.tokens, " and v ",
               values.tokens, "; a layer that is shared or has cross attention takes 0 of k and v");
        kvq::cuda::attention_options a = attention_of(o);
        a.query_tokens = of.step.new_tokens;
        a.early = true;  // what it fetches early is older than the launches of append
        check(of.cache.check_options(layer, queries.heads, a));
        if (takes) check(of.cache.append(layer, keys, values, stream_of(stream)));
        attend_layer(of, layer, queries, to, a, o, stream_of(stream));
    });
}

kvq_status kvq_cuda_cache_select(kvq_cuda_cache* cache, int32_t layer, const kvq_tensor* q,
                                 const float* weights, int32_t best, int32_t* positions, void* stream) {
    return guard([&] {
        device_state& of = *get(cache, "cache").state;
        const auto queries = query_of(q, of.cache.options().type, "q");
        expect_data(weights, "weights");
        expect_data(positions, "positions");
        const device_call call(of);
        const int rows = of.step.rows;
        expect(rows > 0 && q->tokens % rows == 0, KVQ_ERROR_ARGUMENT, "q has ", q->tokens, " tokens, for ",
               rows, " rows of the step");
        check(of.cache.select(layer, queries, weights, q->tokens / rows, best, positions, stream_of(stream)));
    });
}

kvq_status kvq_cuda_cache_fetch_ahead(kvq_cuda_cache* cache, int32_t layer, const kvq_tensor* q,
                                      int32_t selected_tokens, void* stream) {
    return guard([&] {
        device_state& of = *get(cache, "cache").state;
        const auto queries = query_of(q, of.cache.options().type, "q");
        const device_call call(of);
        check(of.cache.fetch_ahead(layer, queries, selected_tokens, stream_of(stream)));
    });
}

kvq_status kvq_cuda_cache_fetches(kvq_cuda_cache* cache, int32_t layer, int64_t* read, int64_t* fetched,
                                  void* stream) {
    return guard([&] {
        device_state& of = *get(cache, "cache").state;
        place(read, "read");
        place(fetched, "fetched");
        const device_call call(of);
        kvq::cuda::fetch_report report;
        check(of.cache.fetches(layer, report, stream_of(stream)));
        *read = report.read;
        *fetched = report.fetched;
    });
}

kvq_status kvq_cuda_cache_graph_id(const kvq_cuda_cache* cache, uint64_t* id) {
    return guard([&] {
        device_state& of = *get(cache, "cache").state;
        place(id, "id");
        const std::lock_guard lock(of.mutex);
        *id = of.cache.graph_id();
    });
}

kvq_status kvq_cuda_cache_requantize(kvq_cuda_cache* cache, kvq_cuda_sequence* const* sequences,
                                     int32_t count, const kvq_cuda_requantize_request* request,
                                     void* stream) {
    return guard([&] {
        const shared_device& of = get(cache, "cache").state;
        const auto ids = rows_of(sequences, count, of, false);
        const kvq_cuda_requantize_request r = read_reserved(request, "request");
        if (r.report) expect_struct(r.report, "request.report");
        kvq::cuda::requantize_request to;
        to.format = place(r.format, "request.format") ? r.format : "";
        to.first_token = r.first_token;
        if (r.last_token != 0) to.last_token = r.last_token;
        to.only_smaller = r.only_smaller != 0;
        to.new_pages = r.new_pages != 0;
        kvq::requantize_report report;
        {
            const device_call call(*of);
            check(r.dry_run != 0 ? of->cache.plan_requantize(ids, to, report)
                                 : of->cache.requantize(ids, to, stream_of(stream), &report));
        }
        if (r.report) write_report(r.report, report);
    });
}

kvq_status kvq_cuda_cache_commit_to(kvq_cuda_cache* cache, const char* format) {
    return guard([&] {
        device_state& of = *get(cache, "cache").state;
        expect_data(format, "format");
        const device_call call(of);
        check(of.cache.commit_to(format));
    });
}

kvq_status kvq_cuda_cache_self_calibrate(kvq_cuda_cache* cache, kvq_cuda_sequence* const* sequences,
                                         int32_t count, const char* format, kvq_statistics* statistics,
                                         int32_t tokens, void* stream, int32_t* done) {
    return guard([&] {
        const shared_device& of = get(cache, "cache").state;
        const auto ids = rows_of(sequences, count, of, false);
        expect_data(format, "format");
        kvq::calibration& sums = get(statistics, "statistics").sums;
        place(done, "done") = 0;
        bool is_done = false;
        const device_call call(*of);
        check(kvq::cuda::self_calibrate(of->cache, ids, format, sums, tokens, stream_of(stream), is_done));
        *done = is_done ? 1 : 0;
    });
}

kvq_status kvq_cuda_cache_step_down(kvq_cuda_cache* cache, kvq_cuda_sequence* const* sequences, int32_t count,
                                    const kvq_cuda_tier* tiers, int32_t tier_count, size_t byte_budget,
                                    void* stream) {
    return guard([&] {
        const shared_device& of = get(cache, "cache").state;
        const auto ids = rows_of(sequences, count, of, false);
        const auto all = tiers_of(tiers, tier_count);
        const device_call call(*of);
        check(of->cache.step_down(ids, all, stream_of(stream),
                                  byte_budget == 0 ? kvq::cuda::cache::no_budget : byte_budget));
    });
}

kvq_status kvq_cuda_cache_plan_step_down(const kvq_cuda_cache* cache, kvq_cuda_sequence* const* sequences,
                                         int32_t count, const kvq_cuda_tier* tiers, int32_t tier_count,
                                         size_t byte_budget, kvq_step_down_report* report) {
    return guard([&] {
        const shared_device& of = get(cache, "cache").state;
        const auto ids = rows_of(sequences, count, of, false);
        const auto all = tiers_of(tiers, tier_count);
        expect_struct(report, "report");
        const std::size_t budget = byte_budget == 0 ? kvq::cuda::cache::no_budget : byte_budget;
        kvq::requantize_report plan;
        {
            const device_call call(*of);
            check(of->cache.plan_step_down(ids, all, plan, budget));
        }
        write_struct(report, kvq_step_down_report{0, plan.pages, plan.bytes_before, plan.bytes_after,
                                                  plan.bytes_peak, plan.bytes_after <= budget});
    });
}

kvq_status kvq_cuda_cache_host_pages(kvq_cuda_cache* cache, size_t byte_budget, kvq_cache** out) {
    return guard([&] {
        const shared_device& of = get(cache, "cache").state;
        place(out, "out");
        const auto memory = std::make_shared<kvq::cuda::pinned_memory>();
        const device_call call(*of);
        auto pages = kvq::cuda::host_pages::describe(
            of->cache, byte_budget == 0 ? kvq::page_pool::no_budget : byte_budget, memory.get());
        *out = make<kvq_cache>(std::make_shared<cache_state>(std::move(pages.layers), pages.options, memory));
    });
}

kvq_status kvq_cuda_sequence_offload(const kvq_cuda_sequence* sequence, kvq_cache* to, void* stream,
                                     kvq_sequence** out) {
    return guard([&] {
        const kvq_cuda_sequence& s = get(sequence, "sequence");
        const shared_cache& host = get(to, "to").state;
        place(out, "out");
        kvq::sequence made = host->cache.new_sequence();
        {
            const device_call call(*s.of);
            check(kvq::cuda::offload(s.of->cache, s.id, made, stream_of(stream)));
        }
        *out = make<kvq_sequence>(host, std::move(made));
    });
}

kvq_status kvq_cuda_sequence_onload(kvq_cuda_cache* cache, const kvq_sequence* from, void* stream,
                                    kvq_cuda_sequence** out) {
    return guard([&] {
        const shared_device& of = get(cache, "cache").state;
        const kvq_sequence& host = get(from, "from");
        place(out, "out");
        *out = new_sequence(of, [&](kvq::cuda::sequence_id& id) {
            check(kvq::cuda::onload(host.sequence, of->cache, id, stream_of(stream)));
        });
    });
}
}
