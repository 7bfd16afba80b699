// Saved sequences and pages on the wire, of the C interface. KVQ_HAS_JSON: the library was built with nlohmann-json.
#include <kvq/io/page_transfer.hpp>

#include "objects.hpp"
#if KVQ_HAS_JSON
#include <kvq/io/file.hpp>
#endif

struct kvq_receiver : kvq::c::handle<kvq_receiver> {
    static constexpr std::uint32_t word = 0x706b7631;
    static constexpr const char* kind = "receiver";
    kvq::c::shared_cache of;
    kvq::page_receiver pages;

    explicit kvq_receiver(kvq::c::shared_cache c) : of(std::move(c)), pages(of->cache) {}
};

using namespace kvq::c;

namespace {

/// A sink of the caller.
struct caller_sink {
    kvq_write write;
    void* user;

    void operator()(const void* data, std::size_t bytes) const {
        const std::int32_t result = write(user, data, bytes);
        expect(result == 0, KVQ_ERROR_CALLBACK, "write returned ", result, " for ", bytes, " bytes");
    }
};

#if KVQ_HAS_JSON
kvq::save_options to_save(const kvq_save_options* given) {
    const kvq_save_options o = read_optional(given, "options");
    return {o.model ? o.model : ""};
}
kvq::restore_options to_restore(const kvq_save_options* given) {
    const kvq_save_options o = read_optional(given, "options");
    return {o.model ? o.model : "", o.convert != 0};
}
#endif

/// Runs f where the library can save.
template <class F>
kvq_status saving(F&& f) {
    return guard(
        [&] {
#if KVQ_HAS_JSON
            f();
#else
            fail(KVQ_ERROR_UNSUPPORTED, "this library was built without nlohmann-json, which saving needs");
#endif
        },
        KVQ_ERROR_DATA);
}

}  // namespace

extern "C" {

kvq_status kvq_sequence_save(const kvq_sequence* sequence, const kvq_save_options* options, kvq_write write,
                             void* user) {
    return saving([&] {
        const kvq::sequence& s = get(sequence, "sequence").sequence;
        expect(write != nullptr, KVQ_ERROR_HANDLE, "write is NULL");
#if KVQ_HAS_JSON
        kvq::save(s, caller_sink{write, user}, to_save(options));
#endif
    });
}

kvq_status kvq_sequence_save_file(const kvq_sequence* sequence, const kvq_save_options* options,
                                  const char* path) {
    return saving([&] {
        const kvq::sequence& s = get(sequence, "sequence").sequence;
        place(path, "path");
#if KVQ_HAS_JSON
        kvq::save(s, path, to_save(options));
#endif
    });
}

kvq_status kvq_sequence_restore(kvq_cache* cache, const kvq_save_options* options, kvq_read read, void* user,
                                kvq_sequence** out) {
    return saving([&] {
        const shared_cache& of = get(cache, "cache").state;
        place(out, "out");
        expect(read != nullptr, KVQ_ERROR_HANDLE, "read is NULL");
#if KVQ_HAS_JSON
        const auto source = [&](void* to, std::size_t bytes) { return read(user, to, bytes); };
        *out = make<kvq_sequence>(of, kvq::restore(of->cache, source, to_restore(options)));
#endif
    });
}

kvq_status kvq_sequence_restore_file(kvq_cache* cache, const kvq_save_options* options, const char* path,
                                     kvq_sequence** out) {
    return saving([&] {
        const shared_cache& of = get(cache, "cache").state;
        place(out, "out");
        place(path, "path");
#if KVQ_HAS_JSON
        *out = make<kvq_sequence>(of, kvq::restore(of->cache, std::string(path), to_restore(options)));
#endif
    });
}

kvq_status kvq_sequence_send_pages(const kvq_sequence* sequence, int32_t layer, kvq_write write, void* user) {
    return guard([&] {
        const kvq::sequence& s = get(sequence, "sequence").sequence;
        expect(write != nullptr, KVQ_ERROR_HANDLE, "write is NULL");
        // A message comes in three parts, the last one of which is the data.
        std::vector<std::byte> message;
        int parts = 0;
        kvq::send_pages(s, layer, [&](const void* data, std::size_t bytes) {
            const auto* const first = static_cast<const std::byte*>(data);
            message.insert(message.end(), first, first + bytes);
            if (++parts % 3 != 0) return;
            caller_sink{write, user}(message.data(), message.size());
            message.clear();
        });
    });
}

kvq_status kvq_receiver_create(kvq_cache* cache, kvq_receiver** out) {
    return guard([&] {
        const shared_cache& of = get(cache, "cache").state;
        place(out, "out");
        *out = make<kvq_receiver>(of);
    });
}

kvq_status kvq_receiver_free(kvq_receiver* receiver) { return free_handle(receiver, "receiver"); }

kvq_status kvq_receiver_accept(kvq_receiver* receiver, const void* message, size_t bytes) {
    return guard(
        [&] {
            kvq_receiver& r = get(receiver, "receiver");
            expect_data(message, "message");
            r.pages.accept(kvq::parse_page({static_cast<const std::byte*>(message), bytes}));
        },
        KVQ_ERROR_DATA);
}

kvq_status kvq_receiver_finish(kvq_receiver* receiver, int32_t tokens, kvq_sequence** out) {
    return guard(
        [&] {
            kvq_receiver& r = get(receiver, "receiver");
            place(out, "out");
            *out = make<kvq_sequence>(r.of, tokens < 0 ? r.pages.finish() : r.pages.finish(tokens));
        },
        KVQ_ERROR_DATA);
}
}
