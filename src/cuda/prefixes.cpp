// Prefix caches of caches on a device. KVQ_HAS_JSON: the library was built with nlohmann-json, without which
// they have no files.
#include <kvq/cuda/host/prefixes.hpp>

#include "arguments.hpp"
#if KVQ_HAS_JSON
#include <kvq/policy/prefix_tiers.hpp>
#endif

namespace kvq::c {

#if KVQ_HAS_JSON
using lower_tiers = prefix_tiers;
#else
using lower_tiers = prefix_cache;
#endif

}  // namespace kvq::c

struct kvq_cuda_prefix_cache : kvq::c::handle<kvq_cuda_prefix_cache> {
    static constexpr std::uint32_t word = 0x706b7631;
    static constexpr const char* kind = "prefix cache on a device";
    kvq::c::shared_device of;
    std::optional<kvq::cuda::prefixes<kvq::c::lower_tiers>> store;

    kvq_cuda_prefix_cache(kvq::c::shared_device s, const kvq::cuda::prefix_options& o) : of(std::move(s)) {
        const kvq::c::device_call call(*of);
        store.emplace(of->cache, o);
    }
    ~kvq_cuda_prefix_cache() {
        const std::lock_guard lock(of->mutex);
        store.reset();
    }
};

using namespace kvq::c;

namespace {

void write_found(const kvq::cuda::found_prefix& from, int32_t* match, int32_t* found, int32_t* place) {
    if (match) *match = static_cast<int32_t>(from.match);
    if (found) *found = from.tokens;
    if (place) *place = static_cast<int32_t>(from.place);
}

/// A sequence of the store's cache.
kvq_cuda_sequence& sequence_of(kvq_cuda_sequence* s, const kvq_cuda_prefix_cache& store) {
    kvq_cuda_sequence& of = get(s, "sequence");
    expect(of.of == store.of, KVQ_ERROR_ARGUMENT, "sequence belongs to another cache");
    return of;
}

}  // namespace

extern "C" {

kvq_status kvq_cuda_prefix_cache_create(kvq_cuda_cache* cache, const kvq_cuda_prefix_options* options,
                                        kvq_cuda_prefix_cache** out) {
    return guard([&] {
        const shared_device& of = get(cache, "cache").state;
        place(out, "out");
        const kvq_cuda_prefix_options o = read_optional(options, "options");
        kvq::cuda::prefix_options wanted;
        if (o.device_bytes != 0) wanted.bytes.device = o.device_bytes;
        if (o.host_bytes != 0) wanted.bytes.host = o.host_bytes;
        if (o.file_bytes != 0) wanted.bytes.files = o.file_bytes;
        wanted.min_prefix_tokens = or_default(o.min_prefix_tokens, wanted.min_prefix_tokens);
        wanted.min_quantize_tokens = or_default(o.min_quantize_tokens, wanted.min_quantize_tokens);
        if (o.format) wanted.format = o.format;
        if (o.folder) wanted.folder = o.folder;
        if (o.model) wanted.model = o.model;
#if !KVQ_HAS_JSON
        expect(wanted.folder.empty(), KVQ_ERROR_UNSUPPORTED,
               "this library was built without nlohmann-json, which files need");
#endif
        *out = make<kvq_cuda_prefix_cache>(of, wanted);
    });
}

kvq_status kvq_cuda_prefix_cache_free(kvq_cuda_prefix_cache* store) { return free_handle(store, "store"); }

kvq_status kvq_cuda_prefix_cache_lookup(const kvq_cuda_prefix_cache* store, const int32_t* tokens,
                                        int32_t count, int32_t* match, int32_t* found, int32_t* place) {
    return guard([&] {
        const kvq_cuda_prefix_cache& in = get(store, "store");
        const kvq::token_ids ids = ids_of(tokens, count);
        const device_call call(*in.of);
        write_found(in.store->lookup(ids), match, found, place);
    });
}

kvq_status kvq_cuda_prefix_cache_fetch(kvq_cuda_prefix_cache* store, const int32_t* tokens, int32_t count,
                                       void* stream, int32_t* match, int32_t* found, int32_t* place,
                                       kvq_cuda_sequence** out) {
    return guard([&] {
        kvq_cuda_prefix_cache& in = get(store, "store");
        kvq::c::place(out, "out");
        const kvq::token_ids ids = ids_of(tokens, count);
        kvq::cuda::found_prefix result;
        kvq_cuda_sequence* const made = new_sequence(in.of, [&](kvq::cuda::sequence_id& id) {
            check(in.store->fetch(ids, result, stream_of(stream)));
            id = result.tokens > 0 ? result.id : in.of->cache.new_sequence();
        });
        write_found(result, match, found, place);
        *out = made;
    });
}

kvq_status kvq_cuda_prefix_cache_store(kvq_cuda_prefix_cache* store, const int32_t* tokens, int32_t count,
                                       const kvq_cuda_sequence* sequence, void* stream) {
    return guard([&] {
        kvq_cuda_prefix_cache& in = get(store, "store");
        const kvq_cuda_sequence& s = sequence_of(const_cast<kvq_cuda_sequence*>(sequence), in);
        const kvq::token_ids ids = ids_of(tokens, count);
        const device_call call(*in.of);
        check(in.store->store(ids, s.id, stream_of(stream)));
    });
}

kvq_status kvq_cuda_prefix_cache_park(kvq_cuda_prefix_cache* store, const int32_t* tokens, int32_t count,
                                      kvq_cuda_sequence* sequence, void* stream) {
    return guard([&] {
        kvq_cuda_prefix_cache& in = get(store, "store");
        kvq_cuda_sequence& s = sequence_of(sequence, in);
        const kvq::token_ids ids = ids_of(tokens, count);
        const device_call call(*in.of);
        /// What the handle has in the place of a sequence that the store took, however the call ends.
        struct replacement {
            kvq::cuda::cache& of;
            kvq::cuda::sequence_id& taken;
            kvq::cuda::sequence_id empty = of.new_sequence();

            ~replacement() {
                if (taken == kvq::cuda::sequence_id{}) std::swap(taken, empty);
                (void)of.free(empty);
            }
        } const kept{in.of->cache, s.id};
        check(in.store->park(ids, s.id, stream_of(stream)));
    });
}

kvq_status kvq_cuda_prefix_cache_release(kvq_cuda_prefix_cache* store, size_t bytes, void* stream) {
    return guard([&] {
        kvq_cuda_prefix_cache& in = get(store, "store");
        const device_call call(*in.of);
        check(in.store->release(bytes, stream_of(stream)));
    });
}

kvq_status kvq_cuda_prefix_cache_step_down(kvq_cuda_prefix_cache* store, kvq_cuda_sequence* const* live,
                                           int32_t count, const kvq_cuda_tier* tiers, int32_t tier_count,
                                           size_t byte_budget, void* stream) {
    return guard([&] {
        kvq_cuda_prefix_cache& in = get(store, "store");
        const auto ids = rows_of(live, count, in.of, false);
        const auto all = tiers_of(tiers, tier_count);
        const device_call call(*in.of);
        check(in.store->step_down(ids, all, stream_of(stream),
                                  byte_budget == 0 ? kvq::cuda::cache::no_budget : byte_budget));
    });
}

kvq_status kvq_cuda_prefix_cache_get_statistics(const kvq_cuda_prefix_cache* store,
                                                kvq_cuda_prefix_statistics* statistics) {
    return guard([&] {
        const kvq_cuda_prefix_cache& in = get(store, "store");
        expect_struct(statistics, "statistics");
        const device_call call(*in.of);
        const kvq::cuda::prefix_report r = in.store->report();
        kvq_cuda_prefix_statistics all{};
        all.entries = r.entries;
        all.bytes = r.bytes;
        all.host_bytes = r.host_bytes;
        std::copy(std::begin(r.fetches), std::end(r.fetches), all.fetches);
        all.tokens_saved = r.tokens_saved;
        all.stored = r.stored;
        all.lowered = r.lowered;
        all.lost = r.lost;
#if KVQ_HAS_JSON
        const kvq::prefix_tier_statistics of_files = in.store->below().statistics();
        all.files = of_files.files;
        all.file_bytes = of_files.file_bytes;
        all.failed = of_files.failed;
#endif
        write_struct(statistics, all);
    });
}
}
