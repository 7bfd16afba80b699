// Definitions of page_wire.hpp.
#pragma once

#include <cstring>
#include <limits>

#include "../core/error.hpp"
#include "page_wire.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

inline constexpr char page_wire_magic[8] = "kvqpage";
inline constexpr std::uint32_t page_wire_version = 4, latent_page_wire_version = 5,
                               oldest_page_wire_version = 3;

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
    // In version 5.
    latent_channels latent;
    std::uint64_t latent_zero;

    static constexpr std::uint32_t most_name_bytes = 1 << 18;
    static constexpr std::size_t prefix = 96;  ///< all of version 3

    bool is_latent() const noexcept { return version == latent_page_wire_version; }
    std::size_t own_bytes() const noexcept;
    std::uint32_t names_bytes() const noexcept { return name_bytes + target_bytes + rotary_bytes; }
};
static_assert(sizeof(page_wire_header) == 144 && std::is_trivially_copyable_v<page_wire_header>);
static_assert(offsetof(page_wire_header, rotary_fingerprint) == page_wire_header::prefix);

inline std::size_t page_wire_header::own_bytes() const noexcept {
    return version == 3 ? prefix : is_latent() ? sizeof(*this) : offsetof(page_wire_header, latent);
}

enum page_wire_flags : std::uint16_t {
    wire_committed = 1,
    wire_scheme_fingerprint = 2,
    wire_sinks = 4,
    wire_target = 8,
    wire_target_fingerprint = 16,
    wire_elsewhere = 32
};

KVQ_FUNC std::uint32_t page_header_checksum(const page_wire_header& h, const char* names,
                                            std::size_t names_space) {
    crc32c c;
    page_wire_header without = h;
    without.header_checksum = 0;
    c.add(&without, h.own_bytes());
    c.add(names, names_space);
    return c.value();
}

/// The part of the header that gives the length of the rest; not yet covered by a checksum. bytes:
/// page_wire_header::prefix.
KVQ_FUNC page_wire_header check_page_prefix(const std::byte* bytes) {
    page_wire_header h{};
    std::memcpy(static_cast<void*>(&h), bytes, page_wire_header::prefix);
    expect(std::memcmp(h.magic, page_wire_magic, sizeof(h.magic)) == 0,
           "not a page of kvq: the message does not begin with kvqpage");
    expect(h.version >= oldest_page_wire_version && h.version <= latent_page_wire_version,
           "the page has version ", h.version, ", this library reads versions ", oldest_page_wire_version,
           " to ", latent_page_wire_version);
    const std::size_t least = h.own_bytes() + round_up(std::size_t{h.name_bytes}, std::size_t{16}),
                      most = h.version == 3 ? least : least + 2 * page_wire_header::most_name_bytes;
    expect(h.name_bytes <= page_wire_header::most_name_bytes && h.header_bytes >= least &&
               h.header_bytes <= most && h.header_bytes % 16 == 0,
           "the page is damaged: a header of ", h.header_bytes, " bytes with a name of ", h.name_bytes);
    return h;
}

/// `rest`: the bytes between the prefix and the data.
KVQ_FUNC page_message check_page_header(page_wire_header h, const char* rest) {
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
               (!elsewhere || (h.number > 0 && h.data_bytes == 0)) &&
               (!h.is_latent() || (h.role == 0 && h.latent.values >= 0 && h.latent.values <= h.dim &&
                                   h.latent.rotary >= 0 && h.latent.rotary < h.dim && h.latent_zero == 0 &&
                                   (h.latent.values > 0 || h.latent.rotary == 0))),
           "the page is impossible: tensor ", h.role, ", kind ", h.kind, ", layer ", h.layer, ", tokens ",
           h.first_token, " + ", h.used, " of ", h.tokens, ", ", h.kv_heads, " heads of ", h.dim,
           h.is_latent() ? ", a latent with values of " + std::to_string(h.latent.values) + " and " +
                               std::to_string(h.latent.rotary) + " rotary channels"
                         : "");
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
    if (h.is_latent()) m.latent = h.latent;
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

KVQ_FUNC void check_page_data(const page_wire_header& h, std::span<const std::byte> data) {
    const std::uint32_t checksum = crc32c::of(data.data(), data.size());
    expect(checksum == h.data_checksum, "the page is damaged: its data have checksum ", checksum, ", not ",
           h.data_checksum);
}

KVQ_FUNC void write_page(const sink_view& write, const page_message& m) {
    const std::string target = m.target ? m.target->name : "", rotary = m.rotary ? m.rotary->text : "";
    for (const std::string* name : {&m.scheme.name, &target, &rotary})
        expect(name->size() <= page_wire_header::most_name_bytes, "the name ", *name, " has ", name->size(),
               " bytes, more than ", page_wire_header::most_name_bytes);
    std::string names = m.scheme.name + target + rotary;
    names.resize(round_up(names.size(), std::size_t{16}));
    page_wire_header h{};
    std::memcpy(h.magic, page_wire_magic, sizeof(h.magic));
    h.version = m.latent ? latent_page_wire_version : page_wire_version;
    h.latent = m.latent.value_or(latent_channels{});
    h.header_bytes = static_cast<std::uint32_t>(h.own_bytes() + names.size());
    h.data_bytes = m.data.size();
    h.role = static_cast<std::uint8_t>(m.role);
    h.kind = static_cast<std::uint8_t>(m.kind);
    h.flags = static_cast<std::uint16_t>((m.committed ? wire_committed : 0) |
                                         (m.scheme.fingerprint ? wire_scheme_fingerprint : 0) |
                                         (m.sinks ? wire_sinks : 0) | (m.target ? wire_target : 0) |
                                         (m.target && m.target->fingerprint ? wire_target_fingerprint : 0) |
                                         (m.is_elsewhere ? wire_elsewhere : 0));
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
    h.header_checksum = page_header_checksum(h, names.data(), names.size());
    write(&h, h.own_bytes());
    write(names.data(), names.size());
    write(m.data.data(), m.data.size());
}

KVQ_FUNC page_message read_page_from(const source_view& read, std::vector<std::byte>& storage) {
    exact_source source(read);
    std::byte prefix[page_wire_header::prefix];
    source.read(prefix, sizeof(prefix), "the header of a page");
    const page_wire_header h = check_page_prefix(prefix);
    std::string rest(h.header_bytes - sizeof(prefix), '\0');
    source.read(rest.data(), rest.size(), "the header of a page");
    page_message m = check_page_header(h, rest.data());
    storage.clear();
    source.append(storage, h.data_bytes, "a page");
    m.data = storage;
    check_page_data(h, m.data);
    return m;
}

}  // namespace detail

KVQ_FUNC page_message parse_page(std::span<const std::byte> message) {
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

}}  // namespace kvq
