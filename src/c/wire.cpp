// Pages on the wire, of the C interface.
#include <cstring>
#include <kvq/io/page_transfer.hpp>
#include <kvq/io/state_wire.hpp>

#include "objects.hpp"

struct kvq_receiver : kvq::c::handle<kvq_receiver> {
    static constexpr std::uint32_t word = 0x706b7631;
    static constexpr const char* kind = "receiver";
    kvq::c::shared_cache of;
    kvq::page_receiver pages;

    explicit kvq_receiver(kvq::c::shared_cache c) : of(std::move(c)), pages(of->cache) {}
};

using namespace kvq::c;

namespace {

void accept_state(kvq_receiver& r, const void* message, std::size_t bytes) {
    kvq::cache& of = r.of->cache;
    expect(of.state_layout() != nullptr, KVQ_ERROR_DATA,
           "a state was received, but no layer of the cache has state");
    std::size_t at = 0;
    kvq::recurrent_state state = kvq::read_recurrent_state(
        [&](void* to, std::size_t n) {
            n = std::min(n, bytes - at);
            if (n > 0) std::memcpy(to, static_cast<const std::byte*>(message) + at, n);
            at += n;
            return n;
        },
        *of.state_layout(), of.pool(), of.options().snapshots);
    expect(at == bytes, KVQ_ERROR_DATA, "a state of ", at, " bytes came in a message of ", bytes);
    r.pages.accept(std::move(state));
}

}  // namespace

extern "C" {

kvq_status kvq_sequence_send_pages(const kvq_sequence* sequence, int32_t layer, kvq_write write, void* user) {
    return guard([&] {
        const kvq::sequence& s = get(sequence, "sequence").sequence;
        expect(write != nullptr, KVQ_ERROR_HANDLE, "write is NULL");
        const kvq::cache& of = get(sequence, "sequence").of->cache;
        if (layer >= 0 && layer < of.layer_count() && !of.holds_tokens(layer)) {
            if (layer != of.state_layout()->layers()[0].number) return;  // the first one sends all state
            std::vector<std::byte> state;
            kvq::write_recurrent_state(
                [&](const void* data, std::size_t bytes) {
                    const auto* const first = static_cast<const std::byte*>(data);
                    state.insert(state.end(), first, first + bytes);
                },
                s.state());
            return caller_sink{write, user}(state.data(), state.size());
        }
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

kvq_status kvq_receiver_convert(kvq_receiver* receiver, int32_t sinks, int32_t recent, int32_t page_tokens) {
    return guard([&] {
        kvq_receiver& r = get(receiver, "receiver");
        const kvq::cache_options& mine = r.of->cache.options();
        r.pages.convert_pages({sinks == -1 ? mine.sinks : sinks, recent == -1 ? mine.recent : recent,
                               page_tokens == -1 ? mine.page_tokens : page_tokens});
    });
}

kvq_status kvq_receiver_accept(kvq_receiver* receiver, const void* message, size_t bytes) {
    return guard(
        [&] {
            kvq_receiver& r = get(receiver, "receiver");
            expect_data(message, "message");
            if (bytes >= 8 && std::memcmp(message, "kvqstat", 8) == 0) return accept_state(r, message, bytes);
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
