// Definitions of state_wire.hpp.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "../core/allocate.hpp"
#include "../state/snapshot_codec.hpp"
#include "state_wire.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

struct state_wire_header {
    char magic[8];
    std::uint32_t version, header_bytes;
    std::uint64_t data_bytes;
    std::int32_t tokens;
    std::uint32_t pages, layers, snapshots, checksum, accessed;
};
static_assert(sizeof(state_wire_header) == 48 && std::is_trivially_copyable_v<state_wire_header>);

inline constexpr char state_wire_magic[8] = "kvqstat";
inline constexpr std::uint32_t state_wire_version = 1;

enum class written_page : std::uint8_t { zeros, same, next };

KVQ_FUNC std::uint32_t state_header_checksum(state_wire_header h, std::span<const std::byte> description) {
    crc32c c;
    h.checksum = 0;
    c.add(&h, sizeof(h));
    c.add(description.data(), description.size());
    return c.value();
}

/// Reads a description from its bytes, whose checksum was right.
class description_reader {
public:
    explicit description_reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

    /// n elements of `bytes` bytes follow, or kvq::error.
    void expect_room(std::uint64_t n, std::size_t bytes, const char* what) const {
        expect(n <= (bytes_.size() - at_) / bytes,
               "the state is damaged: its description ends in the middle of ", what, ", of which there are ",
               n);
    }
    template <class T>
    T take(const char* what) {
        expect_room(1, sizeof(T), what);
        const T value = load_as<T>(bytes_.data() + at_);
        at_ += sizeof(T);
        return value;
    }
    std::string take_text(std::size_t n, const char* what) {
        expect_room(n, 1, what);
        std::string text(reinterpret_cast<const char*>(bytes_.data()) + at_, n);
        at_ += n;
        return text;
    }
    std::size_t left() const noexcept { return bytes_.size() - at_; }

private:
    std::span<const std::byte> bytes_;
    std::size_t at_ = 0;
};

struct state_access {
    using bytes = std::vector<std::byte>;

    template <class T>
    static void put(bytes& to, T value) {
        const auto* const p = reinterpret_cast<const std::byte*>(&value);
        to.insert(to.end(), p, p + sizeof(value));
    }

    static void put_layers(bytes& to, const state_layout& layout) {
        for (const state_layer& l : layout.layers()) {
            put(to, static_cast<std::int32_t>(l.number));
            put(to, static_cast<std::uint32_t>(l.parts.size()));
            for (const state_part& p : l.parts) {
                put(to, static_cast<std::uint8_t>(p.type));
                put(to, static_cast<std::uint8_t>(p.snapshot));
                put(to, static_cast<std::uint16_t>(p.name.size()));
                for (const int n : {p.heads, p.rows, p.columns}) put(to, static_cast<std::int32_t>(n));
                const auto* const name = reinterpret_cast<const std::byte*>(p.name.data());
                to.insert(to.end(), name, name + p.name.size());
            }
        }
    }

    /// The header, the description and the pages of a state. Data: false leaves checksums of pages out.
    static state_wire_header describe(const recurrent_state& s, bytes& description,
                                      std::vector<const page*>& pages, bool data) {
        state_wire_header h{};
        put_layers(description, s.layout());
        for (std::int32_t rank = 1; const snapshot_mark& m : s.marks_) {
            put(description, static_cast<std::int32_t>(m.tokens));
            put(description, rank++);
        }
        for (std::size_t layer = 0; layer < s.layers(); ++layer) {
            const page* before = nullptr;
            for (std::size_t i = 0; i <= s.marks_.size(); ++i) {
                const page* const p = s.held_page(layer, i).get();
                put(description, !p            ? written_page::zeros
                                 : p == before ? written_page::same
                                               : written_page::next);
                if (p && p != before) {
                    pages.push_back(p);
                    h.data_bytes += p->bytes;
                }
                before = p;
            }
        }
        for (const page* p : pages) {
            put(description, data ? crc32c::of(p->data(), p->bytes) : 0u);
            put(description, static_cast<std::uint32_t>(p->format));
        }
        description.resize(round_up(description.size(), std::size_t{16}));
        expect(description.size() <= UINT32_MAX - sizeof(h), "a state whose description has ",
               description.size(), " bytes cannot be written");
        std::memcpy(h.magic, state_wire_magic, sizeof(h.magic));
        h.version = state_wire_version;
        h.header_bytes = static_cast<std::uint32_t>(sizeof(h) + description.size());
        h.tokens = s.tokens_;
        h.accessed = s.accessed_ ? 1 : 0;
        h.pages = static_cast<std::uint32_t>(pages.size());
        h.layers = static_cast<std::uint32_t>(s.layers());
        h.snapshots = static_cast<std::uint32_t>(s.marks_.size());
        h.checksum = state_header_checksum(h, description);
        return h;
    }

    static void write(const sink_view& write, const recurrent_state& s) {
        bytes description;
        std::vector<const page*> pages;
        const state_wire_header h = describe(s, description, pages, true);
        write(&h, sizeof(h));
        write(description.data(), description.size());
        for (const page* p : pages) write(p->data(), p->bytes);
    }

    /// The layout that the writer had. Raises kvq::error where another one cannot hold the same live state.
    static state_layout read_layout(description_reader& from, std::uint32_t layers, const state_layout& own) {
        std::vector<std::vector<state_part>> list;
        from.expect_room(layers, 8, "the layers");
        expect(layers == own.layers().size(), "the state has ", layers, " layers, this one ",
               own.layers().size());
        for (const state_layer& l : own.layers()) {
            const auto number = from.take<std::int32_t>("a layer");
            const auto parts = from.take<std::uint32_t>("a layer");
            from.expect_room(parts, 16, "the parts of a layer");
            expect(number == l.number && parts == l.parts.size(), "the state has layer ", number, " with ",
                   parts, " parts where this one has layer ", l.number, " with ", l.parts.size());
            list.resize(static_cast<std::size_t>(number) + 1);
            for (const state_part& p : l.parts) {
                state_part read;
                read.type = static_cast<float_type>(from.take<std::uint8_t>("a part"));
                read.snapshot = static_cast<snapshot_type>(from.take<std::uint8_t>("a part"));
                const auto name_bytes = from.take<std::uint16_t>("a part");
                for (int* n : {&read.heads, &read.rows, &read.columns})
                    *n = from.take<std::int32_t>("a part");
                read.name = from.take_text(name_bytes, "the name of a part");
                state_part same = read;
                same.snapshot = p.snapshot;
                expect(same == p, "layer ", number, " of the state has part ", read.name, ", type ",
                       static_cast<int>(read.type), ", ", read.heads, " x ", read.rows, " x ", read.columns,
                       ", where this one has ", p.name, ", type ", static_cast<int>(p.type), ", ", p.heads,
                       " x ", p.rows, " x ", p.columns);
                list.back().push_back(std::move(read));
            }
        }
        return state_layout(list);
    }

    static void read_marks(description_reader& from, const state_wire_header& h, recurrent_state& s) {
        from.expect_room(h.snapshots, 8, "the snapshots");
        s.marks_.reserve(h.snapshots);
        std::vector<bool> ranks(h.snapshots);
        for (std::uint32_t i = 0; i < h.snapshots; ++i) {
            const auto tokens = from.take<std::int32_t>("a snapshot"),
                       rank = from.take<std::int32_t>("a snapshot");
            expect(tokens > (s.marks_.empty() ? -1 : s.marks_.back().tokens) && tokens <= h.tokens &&
                       rank >= 1 && static_cast<std::uint32_t>(rank) <= h.snapshots &&
                       !ranks[static_cast<std::size_t>(rank) - 1],
                   "the state is impossible: snapshot ", i, " of ", h.snapshots, " at token ", tokens, " of ",
                   h.tokens, ", rank ", rank);
            ranks[static_cast<std::size_t>(rank) - 1] = true;
            s.marks_.push_back({tokens, 0});
        }
    }

    /// A page of a layer as `own` keeps it, from one as `from` does.
    static page_ref read_page(exact_source& source, const state_layout& from, recurrent_state& own,
                              std::size_t layer, state_form form, std::uint32_t checksum) {
        const state_layer &theirs = from.layers()[layer], &ours = own.layout_->layers()[layer];
        page_ref p = own.pool_->allocate(theirs.page_bytes(form), static_cast<int>(form), 0);
        source.restart();
        source.read(p->data(), p->bytes, "a page");
        expect(source.checksum() == checksum, "the state is damaged: a page of layer ", theirs.number,
               " has checksum ", source.checksum(), ", not ", checksum);
        if (form == state_form::live || theirs.parts == ours.parts) return p;
        page_ref live = own.new_page(layer, state_form::live);
        for (std::size_t i = 0; i < theirs.parts.size(); ++i)
            dequantize_part(theirs.parts[i], p->data() + theirs.place(form, i).offset,
                            live->data() + theirs.place(state_form::live, i).offset);
        return live;
    }

    static recurrent_state read(const source_view& read, const state_layout& layout, page_pool& pool,
                                const snapshot_policy& policy) {
        exact_source source(read);
        state_wire_header h{};
        source.read(&h, sizeof(h), "the header of a state");
        expect(std::memcmp(h.magic, state_wire_magic, sizeof(h.magic)) == 0,
               "not a state of kvq: the bytes do not begin with kvqstat");
        expect(h.version == state_wire_version, "the state has version ", h.version,
               ", this library reads version ", state_wire_version);
        expect(h.header_bytes >= sizeof(h) && h.header_bytes % 16 == 0, "the state is damaged: a header of ",
               h.header_bytes, " bytes");
        bytes description;
        source.append(description, h.header_bytes - sizeof(h), "the description of a state");
        const std::uint32_t checksum = state_header_checksum(h, description);
        expect(checksum == h.checksum, "the state is damaged: its header has checksum ", checksum, ", not ",
               h.checksum);
        expect(h.tokens >= 0 && h.accessed <= 1, "the state is impossible: ", h.tokens, " tokens, step ",
               h.accessed);
        description_reader from(description);
        const state_layout theirs = read_layout(from, h.layers, layout);
        recurrent_state s(layout, pool, policy);
        read_marks(from, h, s);
        s.tokens_ = h.tokens;
        s.accessed_ = h.accessed == 1;

        const std::size_t columns = std::size_t{h.snapshots} + 1;
        from.expect_room(std::uint64_t{h.layers} * columns, 1, "the pages of layers");
        std::vector<written_page> kinds(h.layers * columns);
        for (written_page& kind : kinds) kind = from.take<written_page>("the pages of a layer");
        from.expect_room(h.pages, 8, "the pages");
        s.pages_.resize(h.layers * std::size_t{h.snapshots});
        std::uint64_t pages = 0, data_bytes = 0;
        for (std::size_t layer = 0; layer < h.layers; ++layer) {
            page_ref before;
            for (std::size_t i = 0; i < columns; ++i) {
                const written_page kind = kinds[layer * columns + i];
                expect(kind <= written_page::next && (kind != written_page::same || before) &&
                           (kind != written_page::next || pages < h.pages),
                       "the state is impossible: page ", i, " of layer ", theirs.layers()[layer].number,
                       " is of kind ", static_cast<int>(kind), " behind ", pages, " pages of ", h.pages);
                if (kind == written_page::next) {
                    const auto page_checksum = from.take<std::uint32_t>("a page"),
                               form = from.take<std::uint32_t>("a page");
                    expect(form == 0 || (form == 1 && !theirs.layers()[layer].is_exact),
                           "the state is impossible: a page of form ", form);
                    before =
                        read_page(source, theirs, s, layer, static_cast<state_form>(form), page_checksum);
                    data_bytes += theirs.layers()[layer].page_bytes(static_cast<state_form>(form));
                    ++pages;
                } else if (kind == written_page::zeros) {
                    before = {};
                }
                (i < h.snapshots ? s.pages_[i * h.layers + layer] : s.live_[layer]) = before;
                if (i < h.snapshots && before) s.marks_[i].bytes += page_pool::allocation(before->bytes);
            }
        }
        expect(pages == h.pages && data_bytes == h.data_bytes && from.left() < 16,
               "the state is impossible: ", pages, " pages of ", data_bytes, " bytes, its header says ",
               h.pages, " and ", h.data_bytes);
        s.drop_to_budget();
        return s;
    }
};

KVQ_FUNC void write_recurrent_state_to(const sink_view& write, const recurrent_state& s) {
    state_access::write(write, s);
}

KVQ_FUNC recurrent_state read_recurrent_state_from(const source_view& read, const state_layout& layout,
                                                   page_pool& pool, const snapshot_policy& policy) {
    return state_access::read(read, layout, pool, policy);
}

}}}

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC std::size_t written_bytes(const recurrent_state& s) {
    detail::state_access::bytes description;
    std::vector<const page*> pages;
    const detail::state_wire_header h = detail::state_access::describe(s, description, pages, false);
    return h.header_bytes + static_cast<std::size_t>(h.data_bytes);
}

}}
