// Messages between ranks: a transport of bytes, and frames by which a cut, damaged, lost or repeated message
// is noticed.
//
//   transport   int rank() const, int ranks() const
//               void send(int to, std::vector<std::byte> bytes)      starts to send and takes the bytes over;
//                                                                    returns at once
//               std::vector<std::byte> receive(int from)             the next message of this rank, in the
//                                                                    order of sending
//               void progress()                                      lets messages that were started go on;
//                                                                    returns at once
//               void flush()                                         waits until all of them are sent
//   receive() and flush() raise kvq::error when a time limit of the transport is over.
//     adapters/distributed/mpi.hpp is one.
//
//   frame       offset 0  "kvqmsg" and two zeros            24  CRC32C of the content
//                      8  kind                              28  CRC32C of these 32 bytes with zeros here
//                     12  number of the message             32  content
//                     16  bytes of the content (64 bits)
//
// Little-endian, 32 bits unless another width is given. Messages from one rank to another are numbered from 0
// on. CRC32C finds every flipped bit and every damaged run of up to 32 bits.
#pragma once

#include <concepts>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "../../io/byte_stream.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

template <class T>
concept transport = requires(T& t, const T& reading, std::vector<std::byte> bytes) {
    { reading.rank() } -> std::convertible_to<int>;
    { reading.ranks() } -> std::convertible_to<int>;
    t.send(0, std::move(bytes));
    { t.receive(0) } -> std::same_as<std::vector<std::byte>>;
    t.progress();
    t.flush();
};

enum class message_kind : std::uint32_t {
    failure,   ///< the sender has failed: a sentence
    queries,   ///< rows of queries
    partials,  ///< outputs and log-sum-exps
    outputs,   ///< rows of outputs
    request,   ///< formats that a receiver of pages asks for
    pages,     ///< pages of one layer (io/page_wire.hpp), or a recurrent state
    report     ///< what was sent
};

constexpr const char* name(message_kind k) noexcept {
    constexpr const char* names[] = {"failure", "queries", "partials", "outputs",
                                     "request", "pages",   "report"};
    return names[static_cast<std::uint32_t>(k)];
}

namespace detail {

struct message_header {
    char magic[8];
    std::uint32_t kind, number;
    std::uint64_t bytes;
    std::uint32_t content_checksum, header_checksum;

    std::uint32_t checksum() const {
        message_header without = *this;
        without.header_checksum = 0;
        return crc32c::of(&without, sizeof(without));
    }
};
static_assert(sizeof(message_header) == 32 && std::is_trivially_copyable_v<message_header>);
inline constexpr char message_magic[8] = "kvqmsg";

}  // namespace detail

/// The content of a message, behind a space for its header.
class message {
public:
    static constexpr std::size_t header_bytes = sizeof(detail::message_header);

    message() : bytes_(header_bytes) {}
    explicit message(std::vector<std::byte> bytes) : bytes_(std::move(bytes)) {}

    std::size_t size() const noexcept { return bytes_.size() - header_bytes; }
    std::byte* data() noexcept { return bytes_.data() + header_bytes; }
    const std::byte* data() const noexcept { return bytes_.data() + header_bytes; }

    void reserve(std::size_t bytes) { bytes_.reserve(header_bytes + bytes); }
    void add(const void* from, std::size_t bytes) {
        const auto* const p = static_cast<const std::byte*>(from);
        bytes_.insert(bytes_.end(), p, p + bytes);
    }
    template <class T>
    requires std::is_trivially_copyable_v<T>
    void add(const T& value) { add(&value, sizeof(value)); }

    /// Takes values from the front, one after the other. Raises kvq::error when the content ends before.
    void take(void* to, std::size_t bytes) {
        detail::expect(bytes <= size() - taken_, "a message with ", size(), " bytes ends before value ",
                       taken_, " + ", bytes);
        if (bytes > 0) std::memcpy(to, data() + taken_, bytes);
        taken_ += bytes;
    }
    template <class T>
    requires std::is_trivially_copyable_v<T> T take() {
        T value;
        take(&value, sizeof(value));
        return value;
    }
    std::size_t left() const noexcept { return size() - taken_; }

private:
    template <transport>
    friend class message_channel;
    std::vector<std::byte> bytes_;
    std::size_t taken_ = 0;
};

/// Framed messages over a transport. Not for several threads at once. The transport outlives it.
template <transport Transport>
class message_channel {
public:
    explicit message_channel(Transport& over)
        : over_(over),
          sent_(static_cast<std::size_t>(over.ranks())),
          received_(static_cast<std::size_t>(over.ranks())) {}

    int rank() const { return over_.rank(); }
    int ranks() const { return over_.ranks(); }
    Transport& over() noexcept { return over_; }
    std::uint64_t bytes_sent() const noexcept { return bytes_sent_; }
    std::uint64_t bytes_received() const noexcept { return bytes_received_; }

    void send(int to, message_kind kind, message m) {
        check(to);
        detail::message_header h{};
        std::memcpy(h.magic, detail::message_magic, sizeof(h.magic));
        h.kind = static_cast<std::uint32_t>(kind);
        h.number = sent_[static_cast<std::size_t>(to)]++;
        h.bytes = m.size();
        h.content_checksum = crc32c::of(m.data(), m.size());
        h.header_checksum = h.checksum();
        std::memcpy(m.bytes_.data(), &h, sizeof(h));
        bytes_sent_ += m.bytes_.size();
        over_.send(to, std::move(m.bytes_));
    }

    /// The next message of a rank. Raises kvq::error if it is cut, damaged, not of this kind or not the next
    /// one, if the other rank says that it has failed, and when the time limit of the transport is over.
    message receive(int from, message_kind kind) {
        check(from);
        message m(over_.receive(from));
        const std::size_t bytes = m.bytes_.size();
        detail::expect(bytes >= sizeof(detail::message_header), "truncated: a message of ", bytes,
                       " bytes from rank ", from, " has no room for its header of ",
                       sizeof(detail::message_header));
        detail::message_header h;
        std::memcpy(&h, m.bytes_.data(), sizeof(h));
        detail::expect(std::memcmp(h.magic, detail::message_magic, sizeof(h.magic)) == 0 &&
                           h.header_checksum == h.checksum(),
                       "the message from rank ", from, " is damaged: its header has checksum ", h.checksum(),
                       ", not ", h.header_checksum);
        detail::expect(m.size() == h.bytes, m.size() < h.bytes ? "truncated: " : "", "a message from rank ",
                       from, " has ", m.size(), " bytes, its header says ", h.bytes);
        const std::uint32_t checksum = crc32c::of(m.data(), m.size());
        detail::expect(checksum == h.content_checksum, "the message from rank ", from,
                       " is damaged: its content has checksum ", checksum, ", not ", h.content_checksum);
        detail::expect(h.kind <= static_cast<std::uint32_t>(message_kind::report), "the message from rank ",
                       from, " has kind ", h.kind, ", which does not exist");
        if (h.kind == static_cast<std::uint32_t>(message_kind::failure))
            detail::fail("rank ", from,
                         " has failed: ", std::string(reinterpret_cast<const char*>(m.data()), m.size()));
        std::uint32_t& next = received_[static_cast<std::size_t>(from)];
        detail::expect(h.number == next, "message ", h.number, " from rank ", from, " came where message ",
                       next, " was expected");
        ++next;
        detail::expect(h.kind == static_cast<std::uint32_t>(kind), "rank ", from, " sent ",
                       name(static_cast<message_kind>(h.kind)), " where ", name(kind), " were expected");
        bytes_received_ += bytes;
        return m;
    }

    /// Tells all other ranks that this one has failed, so that they need not wait for their time limit.
    /// Raises nothing.
    void announce_failure(const char* why) noexcept {
        // If this fails, the other ranks run into their time limit.
        (void)detail::caught([&] {
            for (int to = 0; to < ranks(); ++to) {
                if (to == rank()) continue;
                message m;
                m.add(why, std::strlen(why));
                send(to, message_kind::failure, std::move(m));
            }
            over_.progress();
        });
    }

private:
    void check(int peer) const {
        detail::expect(peer >= 0 && peer < ranks() && peer != rank(), "rank ", rank(),
                       " exchanges no messages with rank ", peer, " of ", ranks());
    }

    Transport& over_;
    std::vector<std::uint32_t> sent_, received_;  // messages, by rank
    std::uint64_t bytes_sent_ = 0, bytes_received_ = 0;
};

}}  // namespace kvq
