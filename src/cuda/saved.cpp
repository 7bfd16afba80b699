// Saved sequences of caches on a device.
#include "../c/saved.hpp"
#include "objects.hpp"
#if KVQ_HAS_JSON
#include <kvq/cuda/host/save.hpp>
#endif

using namespace kvq::c;

#if KVQ_HAS_JSON

namespace {

/// to: a sink, or a path.
template <class To>
void save_to(const kvq_cuda_sequence* sequence, const kvq_save_options* options, void* stream, To&& to) {
    const kvq_cuda_sequence& s = get(sequence, "sequence");
    const device_call call(*s.of);
    check(kvq::cuda::save(s.of->cache, s.id, to, to_save(options), stream_of(stream)));
}
/// from: a source, or a path.
template <class From>
void restore_from(kvq_cuda_cache* cache, const kvq_save_options* options, void* stream,
                  kvq_cuda_sequence** out, From&& from) {
    const shared_device& of = get(cache, "cache").state;
    place(out, "out");
    *out = new_sequence(of, [&](kvq::cuda::sequence_id& id) {
        check(kvq::cuda::restore(of->cache, from, to_restore(options), id, stream_of(stream)));
    });
}

}  // namespace

extern "C" {

kvq_status kvq_cuda_sequence_save(const kvq_cuda_sequence* sequence, const kvq_save_options* options,
                                  kvq_write write, void* user, void* stream) {
    return guard(
        [&] {
            expect(write != nullptr, KVQ_ERROR_HANDLE, "write is NULL");
            save_to(sequence, options, stream, caller_sink{write, user});
        },
        KVQ_ERROR_DATA);
}

kvq_status kvq_cuda_sequence_save_file(const kvq_cuda_sequence* sequence, const kvq_save_options* options,
                                       const char* path, void* stream) {
    return guard([&] { save_to(sequence, options, stream, std::string(&place(path, "path"))); },
                 KVQ_ERROR_DATA);
}

kvq_status kvq_cuda_sequence_restore(kvq_cuda_cache* cache, const kvq_save_options* options, kvq_read read,
                                     void* user, void* stream, kvq_cuda_sequence** out) {
    return guard(
        [&] {
            expect(read != nullptr, KVQ_ERROR_HANDLE, "read is NULL");
            restore_from(cache, options, stream, out, caller_source{read, user});
        },
        KVQ_ERROR_DATA);
}

kvq_status kvq_cuda_sequence_restore_file(kvq_cuda_cache* cache, const kvq_save_options* options,
                                          const char* path, void* stream, kvq_cuda_sequence** out) {
    return guard([&] { restore_from(cache, options, stream, out, std::string(&place(path, "path"))); },
                 KVQ_ERROR_DATA);
}
}

#else

extern "C" {

kvq_status kvq_cuda_sequence_save(const kvq_cuda_sequence*, const kvq_save_options*, kvq_write, void*,
                                  void*) {
    return saves_nothing();
}
kvq_status kvq_cuda_sequence_save_file(const kvq_cuda_sequence*, const kvq_save_options*, const char*,
                                       void*) {
    return saves_nothing();
}
kvq_status kvq_cuda_sequence_restore(kvq_cuda_cache*, const kvq_save_options*, kvq_read, void*, void*,
                                     kvq_cuda_sequence**) {
    return saves_nothing();
}
kvq_status kvq_cuda_sequence_restore_file(kvq_cuda_cache*, const kvq_save_options*, const char*, void*,
                                          kvq_cuda_sequence**) {
    return saves_nothing();
}
}

#endif
