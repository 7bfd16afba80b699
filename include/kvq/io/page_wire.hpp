// One page as a message: sends pages to another process in quantized form (docs/reference/files.md).
//
//   offset                                      offset
//    0  "kvqpage" and a zero                     64  bytes of the scheme's name
//    8  version, 4                               68  CRC32C of the data
//   12  bytes of header and names, H             72  tokens of the layer, 0: unknown
//   16  bytes of data, D (64 bits)               76  CRC32C of header and names, with zeros here
//   24  0: keys, 1: values (8 bits)              80  tokens before the first shown one
//   25  0: 16-bit copy, 1: page (8 bits)         84  tokens that may be shown, 0: all
//   26  flags (16 bits), see below               88  shift of the keys (64 bits, signed)
//   28  layer                                    96  fingerprint of the rotary embedding by which they moved (64 bits)
//   32  first token                             104  fingerprint of the target (64 bits)
//   36  tokens that the page has memory for     112  bytes of the target's name
//   40  tokens that it shows                    116  bytes of the embedding in words, 0: keys did not move
//   44  kv heads                                120  number of the page, 0: not said
//   48  channels of a head                      124  zero
//   52  values that were not finite             128  names of scheme and target, the embedding in words; zeros to a multiple of 16
//   56  fingerprint of the scheme (64 bits)       H  data: kv_heads blocks (docs/reference/format.md)
//
// Flags: 1 committed, 2 the scheme has a fingerprint, 4 sinks, 8 later pages of the layer are quantized to a target of their own,
// 16 the target has a fingerprint, 32 the data come with the message of another span that has this page.
// Version 3 has the scheme's name at 96, and none of what follows.
// Little-endian, 32 bits unless another width is given. Every flipped bit and every truncation is found. A reader raises kvq::error
// for other versions than 3 and 4; a change of the page bytes is a new version.
#pragma once

#include <cstddef>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "byte_stream.hpp"
#include "page_kind.hpp"
#include "scheme_identity.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

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
    /// What later pages of the layer are quantized to, if the sender's cache would choose another format.
    std::optional<scheme_identity> target = {};
    std::optional<rotary_identity> rotary = {};  ///< of keys that moved
    std::uint32_t number =
        0;  ///< of the page in its layer and tensor, from 1 on; several spans may have it. 0: not said
    bool is_elsewhere = false;  ///< the data come with another message of this number
    std::span<const std::byte> data;
};

namespace detail {

inline constexpr char page_wire_magic[8] = "kvqpage";
inline constexpr std::uint32_t page_wire_version = 4, oldest_page_wire_version = 3;

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
    // From version 4 on.
    std::uint64_t rotary_fingerprint, target_fingerprint;
    std::uint32_t target_bytes, rotary_bytes, number, zero;

    static constexpr std::uint32_t most_name_bytes = 1024;
    static constexpr std::size_t prefix = 96;  ///< all of version 3

    std::size_t own_bytes() const noexcept { return version == 3 ? prefix : sizeof(page_wire_header); }
    std::uint32_t names_bytes() const noexcept { return name_bytes + target_bytes + rotary_bytes; }
};
static_assert(sizeof(page_wire_header) == 128 && std::is_trivially_copyable_v<page_wire_header>);
static_assert(offsetof(page_wire_header, rotary_fingerprint) == page_wire_header::prefix);

enum page_wire_flags : std::uint16_t {
    wire_committed = 1,
    wire_scheme_fingerprint = 2,
    wire_sinks = 4,
    wire_target = 8,
    wire_target_fingerprint = 16,
    wire_elsewhere = 32
};

inline std::uint32_t page_header_checksum(const page_wire_header& h, const char* names,
                                          std::size_t names_space) {
    crc32c c;
    page_wire_header without = h;
    without.header_checksum = 0;
    c.add(&without, h.own_bytes());
    c.add(names, names_space);
    return c.value();
}

/// The part of the header that gives the length of the rest; not yet covered by a checksum. bytes: page_wire_header::prefix.
inline page_wire_header check_page_prefix(const std::byte* bytes) {
    page_wire_header h{};
    std::memcpy(static_cast<void*>(&h), bytes, page_wire_header::prefix);
    expect(std::memcmp(h.magic, page_wire_magic, sizeof(h.magic)) == 0,
           "not a page of kvq: the message does not begin with kvqpage");
    expect(h.version >= oldest_page_wire_version && h.version <= page_wire_version, "the page has version ",
           h.version, ", this library reads versions ", oldest_page_wire_version, " to ", page_wire_version);
    const std::size_t least = h.own_bytes() + round_up(std::size_t{h.name_bytes}, std::size_t{16}),
                      most = h.version == 3 ? least : least + 2 * page_wire_header::most_name_bytes;
    expect(h.name_bytes <= page_wire_header::most_name_bytes && h.header_bytes >= least &&
               h.header_bytes <= most && h.header_bytes % 16 == 0,
           "the page is damaged: a header of ", h.header_bytes, " bytes with a name of ", h.name_bytes);
    return h;
}

/// `rest`: the bytes between the prefix and the data.
inline page_message check_page_header(page_wire_header h, const char* rest) {
    std::memcpy(reinterpret_cast<char*>(&h) + page_wire_header::prefix, rest,
                h.own_bytes() - page_wire_header::prefix);
    const char* const names = rest + (h.own_bytes() - page_wire_header::prefix);
    const std::uint32_t checksum = page_header_checksum(h, names, h.header_bytes - h.own_bytes());
    expect(checksum == h.header_checksum, "the page is damaged: its header has checksum ", checksum, ", not ",
           h.header_checksum);
    const bool elsewhere = (h.flags & wire_elsewhere) != 0;
    expect(h.role <= 1 && h.kind <= 1 && h.flags <= (h.version == 3 ? 7 : 63) && h.layer_tokens >= 0 &&
               h.layer >= 0 && h.first_token >= 0 && h.tokens >= 1 && h.used >= 0 && h.skip >= 0 &&
               h.skip <= h.tokens && h.used <= h.tokens - h.skip && h.room >= 0 && h.kv_heads >= 1 &&
               h.dim >= 1 && h.first_token <= (std::numeric_limits<int>::max)() - h.tokens &&
               h.target_bytes <= page_wire_header::most_name_bytes &&
               h.rotary_bytes <= page_wire_header::most_name_bytes && h.zero == 0 &&
               h.header_bytes == h.own_bytes() + round_up(h.names_bytes(), std::uint32_t{16}) &&
               (!elsewhere || (h.number > 0 && h.data_bytes == 0)),
           "the page is impossible: tensor ", h.role, ", kind ", h.kind, ", layer ", h.layer, ", tokens ",
           h.first_token, " + ", h.used, " of ", h.tokens, ", ", h.kv_heads, " heads of ", h.dim);
    page_message m;
    m.role = static_cast<tensor>(h.role);
    m.kind = static_cast<page_kind>(h.kind);
    m.committed = (h.flags & wire_committed) != 0;
    m.layer = h.layer;
    m.first_token = h.first_token;
    m.tokens = h.tokens;
    m.used = h.used;
    m.skip = h.skip;
    m.room = h.room;
    m.sinks = (h.flags & wire_sinks) != 0;
    m.shift = h.shift;
    m.kv_heads = h.kv_heads;
    m.dim = h.dim;
    m.layer_tokens = h.layer_tokens;
    m.not_finite = h.not_finite;
    m.scheme.name.assign(names, h.name_bytes);
    if (h.flags & wire_scheme_fingerprint) m.scheme.fingerprint = h.fingerprint;
    if (h.flags & wire_target) {
        m.target.emplace();
        m.target->name.assign(names + h.name_bytes, h.target_bytes);
        if (h.flags & wire_target_fingerprint) m.target->fingerprint = h.target_fingerprint;
    }
    if (h.rotary_bytes > 0)
        m.rotary = {std::string(names + h.name_bytes + h.target_bytes, h.rotary_bytes), h.rotary_fingerprint};
    m.number = h.number;
    m.is_elsewhere = elsewhere;
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
    const std::string target = m.target ? m.target->name : "", rotary = m.rotary ? m.rotary->text : "";
    for (const std::string* name : {&m.scheme.name, &target, &rotary})
        detail::expect(name->size() <= detail::page_wire_header::most_name_bytes, "the name ", *name, " has ",
                       name->size(), " bytes, more than ", detail::page_wire_header::most_name_bytes);
    std::string names = m.scheme.name + target + rotary;
    names.resize(detail::round_up(names.size(), std::size_t{16}));
    detail::page_wire_header h{};
    std::memcpy(h.magic, detail::page_wire_magic, sizeof(h.magic));
    h.version = detail::page_wire_version;
    h.header_bytes = static_cast<std::uint32_t>(sizeof(h) + names.size());
    h.data_bytes = m.data.size();
    h.role = static_cast<std::uint8_t>(m.role);
    h.kind = static_cast<std::uint8_t>(m.kind);
    h.flags =
        static_cast<std::uint16_t>((m.committed ? detail::wire_committed : 0) |
                                   (m.scheme.fingerprint ? detail::wire_scheme_fingerprint : 0) |
                                   (m.sinks ? detail::wire_sinks : 0) | (m.target ? detail::wire_target : 0) |
                                   (m.target && m.target->fingerprint ? detail::wire_target_fingerprint : 0) |
                                   (m.is_elsewhere ? detail::wire_elsewhere : 0));
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
    h.target_fingerprint = m.target ? m.target->fingerprint.value_or(0) : 0;
    h.target_bytes = static_cast<std::uint32_t>(target.size());
    h.rotary_fingerprint = m.rotary ? m.rotary->fingerprint : 0;
    h.rotary_bytes = static_cast<std::uint32_t>(rotary.size());
    h.number = m.number;
    h.data_checksum = crc32c::of(m.data.data(), m.data.size());
    h.layer_tokens = m.layer_tokens;
    h.header_checksum = detail::page_header_checksum(h, names.data(), names.size());
    write(static_cast<const void*>(&h), sizeof(h));
    write(static_cast<const void*>(names.data()), names.size());
    write(static_cast<const void*>(m.data.data()), m.data.size());
}

/// Parses a message; the data stay in place. Raises kvq::error if it is not exactly one whole, undamaged message.
inline page_message parse_page(std::span<const std::byte> message) {
    const std::size_t prefix = detail::page_wire_header::prefix;
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
    std::byte prefix[detail::page_wire_header::prefix];
    source.read(prefix, sizeof(prefix), "the header of a page");
    const detail::page_wire_header h = detail::check_page_prefix(prefix);
    std::string rest(h.header_bytes - sizeof(prefix), '\0');
    source.read(rest.data(), rest.size(), "the header of a page");
    page_message m = detail::check_page_header(h, rest.data());
    storage.clear();
    source.append(storage, h.data_bytes, "a page");
    m.data = storage;
    detail::check_page_data(h, m.data);
    return m;
}

}}  // namespace kvq
