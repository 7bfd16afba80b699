// Prefill on one rank, decode on another: a sequence goes over layer by layer, while the next layer is
// computed.
//
//   kvq::sequence_sender sender(channel, to, cache);              waits for the request of the other rank
//   for each layer: sequence.prefill(layer, ...); sender.send_layer(sequence, layer);
//   sender.finish(sequence);                                      the recurrent state, if it has one, and how
//                                                                 many tokens it has
//
//   kvq::sequence_receiver receiver(channel, from, cache, {.key = "...", .value = "..."});
//   auto [sequence, report] = receiver.receive();                 on the other rank
//
// A layer is a stream of page messages (io/page_wire.hpp), cut into messages of at most 8 MiB. The receiver
// may ask for another format: committed pages are then requantized before they are sent, in a fork, so that
// the sender's sequence stays as it is; the result is, byte for byte, that of requantizing after the
// transfer. Caches fit as io/page_transfer.hpp says. Layers with recurrent state are sent together, by
// finish(), snapshots included.
// Errors: a cut, damaged or missing message raises kvq::error; the receiving cache then holds no page of it.
// Memory: one layer of pages in messages at the sender, and one in new pages if it requantizes; one message
// and one page at the receiver.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "../../cache/requantize.hpp"
#include "../../cache/sequence_access.hpp"
#include "../../io/page_transfer.hpp"
#include "../../io/state_wire.hpp"
#include "message.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// Names of the formats in which committed pages shall arrive, among those listed in the sender's cache:
/// "std4", or the name of its scheme. Empty: as they are.
struct transfer_request {
    std::string key = {};
    std::string value = {};
};

struct transfer_report {
    int tokens = 0;
    std::uint64_t bytes = 0;        ///< data of the pages that were sent, and the message of the state
    std::uint64_t bytes_as_is = 0;  ///< what they would have had without a request
    std::uint64_t saved() const noexcept { return bytes < bytes_as_is ? bytes_as_is - bytes : 0; }
};

namespace detail {

inline std::uint64_t layer_bytes(const sequence& s, int layer) {
    std::uint64_t bytes = 0;
    const page_table& table = sequence_access::tables(s)[static_cast<std::size_t>(layer)];
    for (std::size_t role = 0; role < 2; ++role)
        table.for_each_page(role, [&](const held_page& p) { bytes += p.held.bytes; });
    return bytes;
}

/// 0-based index among the listed formats.
inline int requested_format(const cache& of, tensor role, const std::string& name) {
    if (name.empty()) return requantize_request::keep;
    const format_table& table = of.table(role);
    std::string listed;
    for (int i = 0; i < table.listed(); ++i) {
        const format& f = table[i + 1];
        const std::vector<std::string> built_in = built_in_names(f.name(), role);
        if (f.asked_name() == name || f.name() == name ||
            std::find(built_in.begin(), built_in.end(), name) != built_in.end())
            return i;
        listed += (listed.empty() ? "" : ", ") + format_text(f);
    }
    fail("pages of ", role == tensor::key ? "keys" : "values", " are asked for in ", scheme_text(name, role),
         ", which is not among the formats of the sending cache: ", listed);
}

inline void add_text(message& m, const std::string& text) {
    m.add(static_cast<std::uint32_t>(text.size()));
    m.add(text.data(), text.size());
}
inline std::string take_text(message& m) {
    const auto bytes = m.take<std::uint32_t>();
    expect(bytes <= m.left(), "a request has a name of ", bytes, " bytes and ends after ", m.left());
    std::string text(bytes, '\0');
    m.take(text.data(), bytes);
    return text;
}

/// In front of every message of pages and of a state.
struct part_of_layer {
    std::int32_t layer = 0;  ///< of a state: the number of all layers
    std::int32_t last = 0;   ///< 1: the layer ends with this message
};

/// Tells the other ranks when a transfer ends early.
template <transport Transport>
struct transfer_guard {
    message_channel<Transport>& channel;
    const char* what;
    bool done = false;
    ~transfer_guard() {
        if (!done) channel.announce_failure(what);
    }
};

}  // namespace detail

template <transport Transport>
class sequence_sender {
public:
    /// Receives the request. Raises kvq::error if the cache does not list a requested format.
    sequence_sender(message_channel<Transport>& channel, int to, cache& of)
        : channel_(channel), to_(to), cache_(of) {
        detail::transfer_guard<Transport> guard{channel, "the request for a sequence cannot be met"};
        message m = channel.receive(to, message_kind::request);
        const std::string key = detail::take_text(m), value = detail::take_text(m);
        request_.key = detail::requested_format(of, tensor::key, key);
        request_.value = detail::requested_format(of, tensor::value, value);
        guard.done = true;
    }

    /// Starts to send a layer whose tokens are all there. Layers in order. Returns as soon as the message is
    /// made. A layer with state sends nothing yet, one that shares the keys and values of another layer never
    /// does. A chunk that waits for such layers goes on waiting: its pages are quantized in a fork.
    void send_layer(const sequence& s, int layer) {
        detail::transfer_guard<Transport> guard{channel_, "a layer of a sequence cannot be sent"};
        detail::expect(layer == layer_, "layer ", layer, " is sent, but layer ", layer_, " is the next one");
        if (cache_.holds_tokens(layer)) {
            if (request_.key < 0 && request_.value < 0 && !detail::sequence_access::waits(s)) {
                report_.bytes_as_is += detail::layer_bytes(s, layer);
                send(s, layer);
            } else {
                sequence other = s.fork();
                (void)detail::sequence_access::committed_tables(other);
                report_.bytes_as_is += detail::layer_bytes(other, layer);
                request_.first_layer = layer;
                request_.last_layer = layer + 1;
                cache_.requantize(other, request_);
                send(other, layer);
            }
        }
        ++layer_;
        guard.done = true;
    }

    /// After the last layer: says how many tokens all layers have, and waits until everything is sent. Raises
    /// kvq::error in the middle of a step, when they have different numbers.
    transfer_report finish(const sequence& s) {
        detail::transfer_guard<Transport> guard{channel_, "the layers of a sequence were not all sent"};
        detail::expect(layer_ == cache_.layer_count(), "a sequence ends after ", layer_, " of ",
                       cache_.layer_count(), " layers");
        report_.tokens = s.tokens();
        for (int layer = 0; layer < layer_; ++layer)
            detail::expect(!cache_.takes_steps(layer) || s.tokens(layer) == report_.tokens,
                           "a sequence is sent in the middle of a step: layer ", layer, " holds ",
                           s.tokens(layer), " tokens, another one ", report_.tokens);
        if (cache_.state_layout()) {
            const std::size_t bytes = written_bytes(s.state());
            report_.bytes += bytes;
            report_.bytes_as_is += bytes;
            send(bytes, [&](const auto& write) { write_recurrent_state(write, s.state()); });
        }
        message m;
        m.add(report_);
        channel_.send(to_, message_kind::report, std::move(m));
        channel_.over().flush();
        guard.done = true;
        return report_;
    }

private:
    void send(const sequence& s, int layer) {
        const std::uint64_t bytes = detail::layer_bytes(s, layer);
        report_.bytes += bytes;
        send(bytes + bytes / 8, [&](const auto& write) { send_pages(s, layer, write); });
    }
    /// Messages of what write_all(sink) writes, about `bytes`.
    template <class WriteAll>
    void send(std::uint64_t bytes, WriteAll&& write_all) {
        message m = part(detail::smaller(bytes, std::uint64_t{most_bytes}));
        write_all([&](const void* data, std::size_t n) {
            const auto* from = static_cast<const std::byte*>(data);
            while (n > 0) {
                if (m.size() == most_bytes) {
                    send(std::exchange(m, part(most_bytes)), false);
                    channel_.over().progress();
                }
                const std::size_t now = detail::smaller(n, most_bytes - m.size());
                m.add(from, now);
                from += now;
                n -= now;
            }
        });
        send(std::move(m), true);
        channel_.over().progress();
    }
    static message part(std::size_t bytes) {
        message m;
        m.reserve(bytes);
        m.add(detail::part_of_layer{});
        return m;
    }
    void send(message m, bool last) {
        const detail::part_of_layer head{layer_, last ? 1 : 0};
        std::memcpy(m.data(), &head, sizeof(head));
        channel_.send(to_, message_kind::pages, std::move(m));
    }

    static constexpr std::size_t most_bytes = std::size_t{8} << 20;

    message_channel<Transport>& channel_;
    int to_;
    cache& cache_;
    requantize_request request_;
    transfer_report report_;
    int layer_ = 0;
};

struct received_sequence {
    kvq::sequence sequence;
    transfer_report report;
};

template <transport Transport>
class sequence_receiver {
public:
    /// Sends the request; receive() may follow much later.
    sequence_receiver(message_channel<Transport>& channel, int from, cache& of,
                      const transfer_request& request = {})
        : channel_(channel), from_(from), cache_(of), pages_(of) {
        message m;
        detail::add_text(m, request.key);
        detail::add_text(m, request.value);
        channel.send(from, message_kind::request, std::move(m));
        channel.over().progress();
    }

    /// Receives one layer and returns its index. For engines that do other work in between; receive()
    /// receives what is left.
    int receive_layer() {
        detail::transfer_guard<Transport> guard{channel_, "a layer of a sequence was not received"};
        if (cache_.holds_tokens(layer_)) {
            incoming in{*this};
            const auto read = [&](void* to, std::size_t n) { return in.read(to, n); };
            while (in.more()) {
                const page_message p = read_page(read, storage_);
                detail::expect(p.layer == layer_, "a page of layer ", p.layer, " came with layer ", layer_);
                pages_.accept(p);
            }
        }
        guard.done = true;
        return layer_++;
    }

    /// The sequence, complete. Raises kvq::error otherwise; its pages are then freed with the receiver.
    [[nodiscard]] received_sequence receive() {
        while (layer_ < cache_.layer_count()) receive_layer();
        detail::transfer_guard<Transport> guard{channel_, "a sequence was not received completely"};
        if (const state_layout* const layout = cache_.state_layout()) {
            incoming in{*this};
            pages_.accept(read_recurrent_state([&](void* to, std::size_t n) { return in.read(to, n); },
                                               *layout, cache_.pool(), cache_.options().snapshots));
            detail::expect(!in.more(), "a state of a sequence was received with bytes behind it");
        }
        message m = channel_.receive(from_, message_kind::report);
        const auto report = m.take<transfer_report>();
        sequence s = pages_.finish(report.tokens);
        guard.done = true;
        return {std::move(s), report};
    }

private:
    /// The messages of layer_ as a stream.
    struct incoming {
        sequence_receiver& of;
        message m = {};
        bool last = false;

        bool more() {
            while (m.left() == 0 && !last) {
                m = of.channel_.receive(of.from_, message_kind::pages);
                const auto head = m.take<detail::part_of_layer>();
                detail::expect(head.layer == of.layer_, "pages of layer ", head.layer, " came where layer ",
                               of.layer_, " was expected");
                last = head.last != 0;
            }
            return m.left() > 0;
        }
        std::size_t read(void* to, std::size_t n) {
            if (!more()) return 0;
            n = detail::smaller(n, m.left());
            m.take(to, n);
            return n;
        }
    };

    message_channel<Transport>& channel_;
    int from_;
    cache& cache_;
    page_receiver pages_;
    std::vector<std::byte> storage_;
    int layer_ = 0;
};

}}  // namespace kvq
