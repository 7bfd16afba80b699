// Pages on the wire, of the C interface.
#include <kvq/io/page_transfer.hpp>

#include "objects.hpp"

struct kvq_receiver : kvq::c::handle<kvq_receiver> {
    static constexpr std::uint32_t word = 0x706b7631;
    static constexpr const char* kind = "receiver";
    kvq::c::shared_cache of;
    kvq::page_receiver pages;

    explicit kvq_receiver(kvq::c::shared_cache c) : of(std::move(c)), pages(of->cache) {}
};

using namespace kvq::c;

extern "C" {

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
            *out = make<kvq_sequence>(r.of,
                                      [&] { return tokens < 0 ? r.pages.finish() : r.pages.finish(tokens); });
        },
        KVQ_ERROR_DATA);
}
}
