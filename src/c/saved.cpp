// Saved sequences, of the C interface. KVQ_HAS_JSON: the library was built with nlohmann-json.
#include "objects.hpp"
#if KVQ_HAS_JSON
#include <kvq/io/file.hpp>
#endif

using namespace kvq::c;

#if KVQ_HAS_JSON

namespace {

kvq::save_options to_save(const kvq_save_options* given) {
    const kvq_save_options o = read_optional(given, "options");
    return {o.model ? o.model : ""};
}
kvq::restore_options to_restore(const kvq_save_options* given) {
    const kvq_save_options o = read_optional(given, "options");
    return {o.model ? o.model : "", o.convert != 0};
}

}  // namespace

extern "C" {

kvq_status kvq_sequence_save(const kvq_sequence* sequence, const kvq_save_options* options, kvq_write write,
                             void* user) {
    return guard(
        [&] {
            const kvq::sequence& s = get(sequence, "sequence").sequence;
            expect(write != nullptr, KVQ_ERROR_HANDLE, "write is NULL");
            kvq::save(s, caller_sink{write, user}, to_save(options));
        },
        KVQ_ERROR_DATA);
}

kvq_status kvq_sequence_save_file(const kvq_sequence* sequence, const kvq_save_options* options,
                                  const char* path) {
    return guard(
        [&] {
            const kvq::sequence& s = get(sequence, "sequence").sequence;
            kvq::save(s, std::string(&place(path, "path")), to_save(options));
        },
        KVQ_ERROR_DATA);
}

kvq_status kvq_sequence_restore(kvq_cache* cache, const kvq_save_options* options, kvq_read read, void* user,
                                kvq_sequence** out) {
    return guard(
        [&] {
            const shared_cache& of = get(cache, "cache").state;
            place(out, "out");
            expect(read != nullptr, KVQ_ERROR_HANDLE, "read is NULL");
            const auto source = [&](void* to, std::size_t bytes) { return read(user, to, bytes); };
            *out = make<kvq_sequence>(of, kvq::restore(of->cache, source, to_restore(options)));
        },
        KVQ_ERROR_DATA);
}

kvq_status kvq_sequence_restore_file(kvq_cache* cache, const kvq_save_options* options, const char* path,
                                     kvq_sequence** out) {
    return guard(
        [&] {
            const shared_cache& of = get(cache, "cache").state;
            place(out, "out");
            const std::string from = &place(path, "path");
            *out = make<kvq_sequence>(of, kvq::restore(of->cache, from, to_restore(options)));
        },
        KVQ_ERROR_DATA);
}
}

#else

namespace {

kvq_status unsupported() {
    return guard([] {
        fail(KVQ_ERROR_UNSUPPORTED, "this library was built without nlohmann-json, which saving needs");
    });
}

}  // namespace

extern "C" {

kvq_status kvq_sequence_save(const kvq_sequence*, const kvq_save_options*, kvq_write, void*) {
    return unsupported();
}
kvq_status kvq_sequence_save_file(const kvq_sequence*, const kvq_save_options*, const char*) {
    return unsupported();
}
kvq_status kvq_sequence_restore(kvq_cache*, const kvq_save_options*, kvq_read, void*, kvq_sequence**) {
    return unsupported();
}
kvq_status kvq_sequence_restore_file(kvq_cache*, const kvq_save_options*, const char*, kvq_sequence**) {
    return unsupported();
}
}

#endif
