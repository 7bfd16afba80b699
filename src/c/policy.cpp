// Prefix caches and rings of the C interface.
#include <kvq/policy/prefix_cache.hpp>
#include <kvq/policy/ring.hpp>

#include "convert.hpp"
#include "mods.hpp"
#include "objects.hpp"

struct kvq_prefix_cache : kvq::c::handle<kvq_prefix_cache> {
    static constexpr std::uint32_t word = 0x626b7631;
    static constexpr const char* kind = "prefix cache";
    kvq::c::shared_cache of;
    kvq::prefix_cache store;

    kvq_prefix_cache(kvq::c::shared_cache c, const kvq::prefix_cache_options& o)
        : of(std::move(c)), store(of->cache, o) {}
};

struct kvq_ring : kvq::c::handle<kvq_ring> {
    static constexpr std::uint32_t word = 0x726b7631;
    static constexpr const char* kind = "ring";
    kvq::c::shared_cache of;
    kvq::ring ring;

    kvq_ring(kvq::c::shared_cache c, kvq::ring r) : of(std::move(c)), ring(std::move(r)) {}
};

using namespace kvq::c;

namespace {

/// The parts of kvq_attend_options for a ring.
struct ring_call {
    kvq_attend_options o;
    held_mods mods;
    call_workspace space;

    ring_call(const kvq_attend_options* options, const kvq::cache& of)
        : o(read_optional(options, "options")), mods(o.mods, "options.mods"), space(o.workspace, of) {
        expect(!mods.has_window(), KVQ_ERROR_ARGUMENT,
               "a ring has its window already: options.mods.window is ", "for sequences");
    }
};

}  // namespace

extern "C" {

kvq_status kvq_prefix_cache_create(kvq_cache* cache, const kvq_prefix_cache_options* options,
                                   kvq_prefix_cache** out) {
    return guard([&] {
        const shared_cache& of = get(cache, "cache").state;
        place(out, "out");
        const kvq_prefix_cache_options o = read_optional(options, "options");
        kvq::prefix_cache_options wanted;
        if (o.byte_limit != 0) wanted.byte_limit = o.byte_limit;
        if (o.max_entries != 0) wanted.max_entries = o.max_entries;
        wanted.min_prefix_tokens = or_default(o.min_prefix_tokens, wanted.min_prefix_tokens);
        wanted.min_quantize_tokens = or_default(o.min_quantize_tokens, wanted.min_quantize_tokens);
        if (o.keys != nullptr || o.values != nullptr)
            wanted.format = kvq::layer_format{
                o.keys ? of->listed(kvq::tensor::key, o.keys) : kvq::requantize_request::keep,
                o.values ? of->listed(kvq::tensor::value, o.values) : kvq::requantize_request::keep};
        *out = make<kvq_prefix_cache>(of, wanted);
    });
}

kvq_status kvq_prefix_cache_free(kvq_prefix_cache* store) { return free_handle(store, "store"); }

kvq_status kvq_prefix_cache_lookup(const kvq_prefix_cache* store, const int32_t* tokens, int32_t count,
                                   int32_t* match, int32_t* found) {
    return guard([&] {
        const kvq::prefix_cache& in = get(store, "store").store;
        place(match, "match");
        place(found, "found");
        const auto result = in.lookup(ids_of(tokens, count));
        *match = static_cast<int32_t>(result.match);
        *found = result.tokens;
    });
}

kvq_status kvq_prefix_cache_fetch(kvq_prefix_cache* store, const int32_t* tokens, int32_t count,
                                  int32_t* match, int32_t* found, kvq_sequence** out) {
    return guard([&] {
        kvq_prefix_cache& in = get(store, "store");
        place(match, "match");
        place(found, "found");
        place(out, "out");
        auto result = in.store.fetch(ids_of(tokens, count));
        *out = make<kvq_sequence>(in.of, std::move(result.sequence));
        *match = static_cast<int32_t>(result.match);
        *found = result.tokens;
    });
}

kvq_status kvq_prefix_cache_store(kvq_prefix_cache* store, const int32_t* tokens, int32_t count,
                                  const kvq_sequence* sequence, int32_t* outcome) {
    return guard([&] {
        kvq_prefix_cache& in = get(store, "store");
        const kvq_sequence& s = get(sequence, "sequence");
        expect_same(s.of, in.of, "sequence");
        const auto result = in.store.store(ids_of(tokens, count), s.sequence);
        if (outcome) *outcome = static_cast<int32_t>(result);
    });
}

kvq_status kvq_prefix_cache_erase(kvq_prefix_cache* store, const int32_t* tokens, int32_t count,
                                  int32_t* erased) {
    return guard([&] {
        const bool done = get(store, "store").store.erase(ids_of(tokens, count));
        if (erased) *erased = done;
    });
}

kvq_status kvq_prefix_cache_clear(kvq_prefix_cache* store) {
    return guard([&] { get(store, "store").store.clear(); });
}

kvq_status kvq_prefix_cache_release(kvq_prefix_cache* store, size_t bytes, size_t* released) {
    return guard([&] {
        const std::size_t done = get(store, "store").store.release(bytes);
        if (released) *released = done;
    });
}

kvq_status kvq_prefix_cache_step_down(kvq_prefix_cache* store, kvq_sequence* const* live, int32_t count,
                                      const kvq_step_down_policy* policy, kvq_executor* executor,
                                      kvq_step_down_report* report) {
    return guard([&] {
        kvq_prefix_cache& in = get(store, "store");
        const std::vector<kvq::sequence*> all = sequences_of(live, count, in.of);
        if (report) expect_struct(report, "report");
        write_report(report, in.store.step_down(all, policy_of(policy, *in.of), executor_of(executor)));
    });
}

kvq_status kvq_prefix_cache_get_statistics(const kvq_prefix_cache* store,
                                           kvq_prefix_cache_statistics* statistics) {
    return guard([&] {
        const kvq::prefix_cache& in = get(store, "store").store;
        expect_struct(statistics, "statistics");
        const kvq::prefix_cache_statistics s = in.statistics();
        kvq_prefix_cache_statistics all{};
        std::copy(s.fetches.begin(), s.fetches.end(), all.fetches);
        all.tokens_saved = s.tokens_saved;
        all.stored = s.stored;
        all.duplicates = s.duplicates;
        all.rejections = s.rejections;
        all.replaced = s.replaced;
        all.evictions = s.evictions;
        all.entries = in.entries();
        all.bytes = in.bytes();
        write_struct(statistics, all);
    });
}

kvq_status kvq_ring_create(const kvq_sequence* sequence, const kvq_ring_options* options, kvq_ring** out) {
    return guard([&] {
        const kvq_sequence& s = get(sequence, "sequence");
        const kvq_ring_options o = read_reserved(options, "options");
        place(out, "out");
        const kvq::ring_options wanted{
            o.window, or_default(o.slack, 16),
            o.sinks_in_cache ? kvq::sink_positions::in_cache : kvq::sink_positions::in_text};
        *out = make<kvq_ring>(s.of, kvq::ring(s.sequence.fork(), wanted, o.first_token));
    });
}

kvq_status kvq_ring_free(kvq_ring* ring) { return free_handle(ring, "ring"); }

kvq_status kvq_ring_fork(const kvq_ring* ring, kvq_ring** out) {
    return guard([&] {
        const kvq_ring& r = get(ring, "ring");
        place(out, "out");
        *out = make<kvq_ring>(r.of, r.ring.fork());
    });
}

kvq_status kvq_ring_prefill(kvq_ring* ring, int32_t layer, const kvq_tensor* k, const kvq_tensor* v,
                            const kvq_tensor* q, const kvq_tensor* out, const kvq_attend_options* options) {
    return guard([&] {
        kvq_ring& r = get(ring, "ring");
        ring_call c(options, r.of->cache);
        const kvq::output_view to = output_of(out, "out").with_lse(c.o.lse);
        const kvq::executor_view executor = executor_of(c.o.executor);
        c.mods.use([&](const auto& mods) {
            r.ring.prefill(layer, input_of(k, "k"), input_of(v, "v"), query_of(q, "q"), to, mods, executor,
                           c.space);
        });
        c.mods.report();
    });
}

kvq_status kvq_ring_append(kvq_ring* ring, int32_t layer, const kvq_tensor* k, const kvq_tensor* v) {
    return guard([&] { get(ring, "ring").ring.append(layer, input_of(k, "k"), input_of(v, "v")); });
}

kvq_status kvq_ring_attend(const kvq_ring* ring, int32_t layer, const kvq_tensor* q, const kvq_tensor* out,
                           const kvq_attend_options* options) {
    return guard([&] {
        const kvq_ring& r = get(ring, "ring");
        ring_call c(options, r.of->cache);
        const kvq::output_view to = output_of(out, "out").with_lse(c.o.lse);
        const kvq::executor_view executor = executor_of(c.o.executor);
        c.mods.use(
            [&](const auto& mods) { r.ring.attend(layer, query_of(q, "q"), to, mods, executor, c.space); });
        c.mods.report();
    });
}

kvq_status kvq_ring_append_draft(kvq_ring* ring, int32_t layer, const kvq_tensor* k, const kvq_tensor* v) {
    return guard(
        [&] { get(ring, "ring").ring.held().append_draft(layer, input_of(k, "k"), input_of(v, "v")); });
}

kvq_status kvq_ring_keep(kvq_ring* ring, const int32_t* path, int32_t count) {
    return guard([&] {
        kvq_ring& r = get(ring, "ring");
        expect_list(path, count, "tokens of the path");
        r.ring.held().keep({path, static_cast<std::size_t>(count)});
    });
}

kvq_status kvq_ring_trim(kvq_ring* ring, int64_t tokens) {
    return guard([&] { get(ring, "ring").ring.trim(tokens); });
}

kvq_status kvq_ring_tokens(const kvq_ring* ring, int32_t layer, int64_t* tokens, int64_t* first_token) {
    return guard([&] {
        const kvq::ring& r = get(ring, "ring").ring;
        const std::int64_t n = layer == KVQ_ALL_LAYERS ? r.tokens() : r.tokens(layer);
        if (tokens) *tokens = n;
        if (first_token) *first_token = r.first_token();
    });
}

kvq_status kvq_ring_held(const kvq_ring* ring, kvq_sequence** out) {
    return guard([&] {
        const kvq_ring& r = get(ring, "ring");
        place(out, "out");
        *out = make<kvq_sequence>(r.of, r.ring.held().fork());
    });
}
}
