// Saved sequences, of the C interface. KVQ_HAS_JSON: the library was built with nlohmann-json.
#include "saved.hpp"

using namespace kvq::c;

#if KVQ_HAS_JSON

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
            const caller_source source{read, user};
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

extern "C" {

kvq_status kvq_sequence_save(const kvq_sequence*, const kvq_save_options*, kvq_write, void*) {
    return saves_nothing();
}
kvq_status kvq_sequence_save_file(const kvq_sequence*, const kvq_save_options*, const char*) {
    return saves_nothing();
}
kvq_status kvq_sequence_restore(kvq_cache*, const kvq_save_options*, kvq_read, void*, kvq_sequence**) {
    return saves_nothing();
}
kvq_status kvq_sequence_restore_file(kvq_cache*, const kvq_save_options*, const char*, kvq_sequence**) {
    return saves_nothing();
}
}

#endif
