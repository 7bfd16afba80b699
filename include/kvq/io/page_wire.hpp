// One page as a message: sends pages to another process in quantized form (docs/reference/files.md).
//
//   offset                                      offset
//    0  "kvqpage" and a zero                     36  tokens that the page has memory for
//    8  version, 3                               40  tokens that it shows
//   12  bytes of this header, H                  44  kv heads
//   16  bytes of data, D (64 bits)               48  channels of a head
//   24  0: keys, 1: values (8 bits)              52  values that were not finite
//   25  0: 16-bit copy, 1: page (8 bits)         56  fingerprint of the scheme (64 bits), 0 if it has none
//   26  flags (16 bits): 1 committed,            64  bytes of the scheme's name
//       2 the scheme has a fingerprint, 4 sinks  68  CRC32C of the data
//   28  layer                                    72  tokens of the layer, 0: unknown
//   80  tokens before the first shown one        84  tokens that may be shown, 0: all
//   88  shift of the keys (64 bits, signed)      96  name of the scheme, filled up with zeros to a multiple of 16
//    H  data: kv_heads blocks (docs/reference/format.md)
//
// Little-endian, 32 bits unless another width is given. Every flipped bit and every truncation is found. A reader raises kvq::error
// for other versions; a change of the page bytes is a new version.
#pragma once

#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "byte_stream.hpp"
#include "page_kind.hpp"
#include "scheme_identity.hpp"

namespace kvq::inline KVQ_TAGGED {

/// A page and its header.
struct page_message {
    tensor role = tensor::key;
    page_kind kind = page_kind::page;
    bool committed = false;  ///< past the recent window
    int layer = 0;
    int first_token = 0;
    int tokens = 0;  ///< capacity of the page
    int used = 0;    ///< shown tokens
    int skip = 0;    ///< tokens before the first shown one
    int room =
        0;  ///< tokens that may be shown (page_span::room); 0: all that the page has memory for when it is full
    bool sinks = false;      ///< a page of sinks
    std::int64_t shift = 0;  ///< by how much its keys moved (page_span::shift)
    int kv_heads = 0;
    int dim = 0;
    int layer_tokens = 0;  ///< tokens of the layer when the page was sent; 0: not known yet
    std::uint32_t not_finite = 0;
    scheme_identity scheme;
    std::span<const std::byte> data;
};

namespace detail {

inline constexpr char page_wire_magic[8] = "kvqpage";
inline constexpr std::uint32_t page_wire_version = 3;

struct page_wire_header {
    char magic[8];
    std::uint32_t version;
    std::uint32_t header_bytes;
    std::uint64_t data_bytes;
    std::uint8_t role;
    std::uint8_t kind;
    std::uint16_t flags;
    std::int32_t layer, first_token, tokens, used, kv_heads, dim;
    std::uint32_t not_finite;
    std::uint64_t fingerprint;
    std::uint32_t name_bytes;
    std::uint32_t data_checksum;
    std::int32_t layer_tokens;
    std::uint32_t header_checksum;
    std::int32_t skip, room;
    std::int64_t shift;

    static constexpr std::uint32_t most_name_bytes = 1024;
};
static_assert(sizeof(page_wire_header) == 96 && std::is_trivially_copyable_v<page_wire_header>);

inline std::uint32_t page_header_checksum(const page_wire_header& h, const char* name,
                                          std::size_t name_space) {
    crc32c c;
    page_wire_header without = h;
    without.header_checksum = 0;
    c.add(&without, sizeof(without));
    c.add(name, name_space);
    return c.value();
}

/// The part of the header that gives the length of the rest; not yet covered by a checksum.
inline page_wire_header check_page_prefix(const std::byte* bytes) {
    const auto h = load_as<page_wire_header>(bytes);
    expect(std::memcmp(h.magic, page_wire_magic, sizeof(h.magic)) == 0,
           "not a page of kvq: the message does not begin with kvqpage");
    expect(h.version == page_wire_version, "the page has version ", h.version,
           ", this library reads version ", page_wire_version);
    expect(h.name_bytes <= page_wire_header::most_name_bytes &&
               h.header_bytes == sizeof(h) + round_up(h.name_bytes, std::uint32_t{16}),
           "the page is damaged: a header of ", h.header_bytes, " bytes with a name of ", h.name_bytes);
    return h;
}

/// `rest`: the bytes between the prefix and the data.
inline page_message check_page_header(const page_wire_header& h, const char* rest) {
    const std::uint32_t checksum = page_header_checksum(h, rest, h.header_bytes - sizeof(h));
    expect(checksum == h.header_checksum, "the page is damaged: its header has checksum ", checksum, ", not ",
           h.header_checksum);
    expect(h.role <= 1 && h.kind <= 1 && h.flags <= 7 && h.layer_tokens >= 0 && h.layer >= 0 &&
               h.first_token >= 0 && h.tokens >= 1 && h.used >= 0 && h.skip >= 0 && h.skip <= h.tokens &&
               h.used <= h.tokens - h.skip && h.room >= 0 && h.kv_heads >= 1 && h.dim >= 1 &&
               h.first_token <= (std::numeric_limits<int>::max)() - h.tokens,
           "the page is impossible: tensor ", h.role, ", kind ", h.kind, ", layer ", h.layer, ", tokens ",
           h.first_token, " + ", h.used, " of ", h.tokens, ", ", h.kv_heads, " heads of ", h.dim);
    page_message m;
    m.role = static_cast<tensor>(h.role);
    m.kind = static_cast<page_kind>(h.kind);
    m.committed = (h.flags & 1) != 0;
    m.layer = h.layer;
    m.first_token = h.first_token;
    m.tokens = h.tokens;
    m.used = h.used;
    m.skip = h.skip;
    m.room = h.room;
    m.sinks = (h.flags & 4) != 0;
    m.shift = h.shift;
    m.kv_heads = h.kv_heads;
    m.dim = h.dim;
    m.layer_tokens = h.layer_tokens;
    m.not_finite = h.not_finite;
    m.scheme.name.assign(rest, h.name_bytes);
    if (h.flags & 2) m.scheme.fingerprint = h.fingerprint;
    return m;
}

inline void check_page_data(const page_wire_header& h, std::span<const std::byte> data) {
    const std::uint32_t checksum = crc32c::of(data.data(), data.size());
    expect(checksum == h.data_checksum, "the page is damaged: its data have checksum ", checksum, ", not ",
           h.data_checksum);
}

}  // namespace detail

/// Writes a page as one message.
template <byte_sink Sink>
void quantize_page(Sink&& write, const page_message& m) {
    detail::expect(m.scheme.name.size() <= detail::page_wire_header::most_name_bytes,
                   "the name of a scheme has ", m.scheme.name.size(), " bytes, more than ",
                   detail::page_wire_header::most_name_bytes);
    std::string name = m.scheme.name;
    name.resize(detail::round_up(name.size(), std::size_t{16}));
    detail::page_wire_header h{};
    std::memcpy(h.magic, detail::page_wire_magic, sizeof(h.magic));
    h.version = detail::page_wire_version;
    h.header_bytes = static_cast<std::uint32_t>(sizeof(h) + name.size());
    h.data_bytes = m.data.size();
    h.role = static_cast<std::uint8_t>(m.role);
    h.kind = static_cast<std::uint8_t>(m.kind);
    h.flags = static_cast<std::uint16_t>((m.committed ? 1 : 0) | (m.scheme.fingerprint ? 2 : 0) |
                                         (m.sinks ? 4 : 0));
    h.layer = m.layer;
    h.first_token = m.first_token;
    h.tokens = m.tokens;
    h.used = m.used;
    h.skip = m.skip;
    h.room = m.room;
    h.shift = m.shift;
    h.kv_heads = m.kv_heads;
    h.dim = m.dim;
    h.not_finite = m.not_finite;
    h.fingerprint = m.scheme.fingerprint.value_or(0);
    h.name_bytes = static_cast<std::uint32_t>(m.scheme.name.size());
    h.data_checksum = crc32c::of(m.data.data(), m.data.size());
    h.layer_tokens = m.layer_tokens;
    h.header_checksum = detail::page_header_checksum(h, name.data(), name.size());
    write(static_cast<const void*>(&h), sizeof(h));
    write(static_cast<const void*>(name.data()), name.size());
    write(static_cast<const void*>(m.data.data()), m.data.size());
}

/// Parses a message; the data stay in place. Raises kvq::error if it is not exactly one whole, undamaged message.
inline page_message parse_page(std::span<const std::byte> message) {
    const std::size_t prefix = sizeof(detail::page_wire_header);
    detail::expect(message.size() >= prefix, "truncated: a page of ", message.size(),
                   " bytes has no room for its header of ", prefix);
    const detail::page_wire_header h = detail::check_page_prefix(message.data());
    detail::expect(message.size() >= h.header_bytes, "truncated: a page of ", message.size(),
                   " bytes has no room for its header of ", h.header_bytes);
    page_message m = detail::check_page_header(h, reinterpret_cast<const char*>(message.data()) + prefix);
    m.data = message.subspan(h.header_bytes);
    detail::expect(m.data.size() == h.data_bytes, m.data.size() < h.data_bytes ? "truncated: " : "",
                   "a page has ", m.data.size(), " bytes of data, its header says ", h.data_bytes);
    detail::check_page_data(h, m.data);
    return m;
}

/// Reads one message from a source of many, such as a socket. `storage` holds the data of the result.
template <byte_source Source>
page_message read_page(Source&& read, std::vector<std::byte>& storage) {
    detail::exact_source source(read);
    std::byte prefix[sizeof(detail::page_wire_header)];
    source.read(prefix, sizeof(prefix), "the header of a page");
    const detail::page_wire_header h = detail::check_page_prefix(prefix);
    std::string rest(h.header_bytes - sizeof(prefix), '\0');
    source.read(rest.data(), rest.size(), "the header of a page");
    page_message m = detail::check_page_header(h, rest.data());
    // In parts, so that a false size does not allocate memory.
    storage.clear();
    while (storage.size() < h.data_bytes) {
        const std::size_t had = storage.size();
        storage.resize(had +
                       static_cast<std::size_t>(detail::smaller(h.data_bytes - had, std::uint64_t{1} << 20)));
        source.read(storage.data() + had, storage.size() - had, "a page");
    }
    m.data = storage;
    detail::check_page_data(h, m.data);
    return m;
}

}  // namespace kvq::inline KVQ_TAGGED
