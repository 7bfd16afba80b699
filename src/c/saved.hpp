// What functions that save and restore take. KVQ_HAS_JSON: the library was built with nlohmann-json.
#pragma once

#include "objects.hpp"
#if KVQ_HAS_JSON
#include <kvq/io/file.hpp>
#endif

namespace kvq::c {

/// The bytes that a caller reads.
struct caller_source {
    kvq_read read;
    void* user;

    std::size_t operator()(void* to, std::size_t bytes) const { return read(user, to, bytes); }
};

#if KVQ_HAS_JSON

inline save_options to_save(const kvq_save_options* given) {
    const kvq_save_options o = read_optional(given, "options");
    expect(o.upper_only == 0 || o.upper_only == 1, KVQ_ERROR_ARGUMENT, "options: upper_only is ",
           o.upper_only, ", not 0 or 1");
    return {.model = o.model ? o.model : "", .upper_only = o.upper_only != 0};
}
inline restore_options to_restore(const kvq_save_options* given) {
    const kvq_save_options o = read_optional(given, "options");
    expect(o.upper_only == 0, KVQ_ERROR_ARGUMENT, "options: upper_only is ", o.upper_only,
           ", but a file is restored with the planes that it has: it is for saving");
    return {o.model ? o.model : "", o.convert != 0};
}

#else

inline kvq_status saves_nothing() {
    return guard([] {
        fail(KVQ_ERROR_UNSUPPORTED, "this library was built without nlohmann-json, which saving needs");
    });
}

#endif

}  // namespace kvq::c
