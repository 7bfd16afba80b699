// The description of a saved sequence: the metadata and the index of the file (docs/reference/files.md).
//
//   metadata     format, versions, model, shape, options, window, schemes and rotary embeddings with their
//                fingerprints: all as text
//   shapes       I32 [layers, 6]
//     version 5: kind, kv heads, channels of a key and of a value, window (of a latent layer its rotary
//                                  channels) and visible sinks of each layer
//   freed        I32 [layers, 2]
//     version 5: tokens [first, last) that a layer with a window has freed, or that were dropped of
//                                  another one (cache/retain.hpp), whose kept tokens follow; 0, 0: none
//   tokens       I32 [layers]       committed     I32 [layers]
//   targets      I32 [layers, 2]                                        (K, V)
//   spans        I32 [spans, 11]    one row per span, layer by layer: layer, tokens that it shows, tokens of
//                                   its pages that it may show, tokens of its pages before the first shown
//                                   one, 1 for sinks, shift of its keys (64 bits), rows of its K page, K
//                                   copy, V page and V copy among those of its layer and tensor, -1: none
//   index        U32 [pages, 8]     one row per page of the file, in its order: layer, tensor, kind, first
//                                   span that has it, format, tokens that the page has memory for, values
//                                   that were not finite, CRC32C of the page's data
//   seal         U32 [1]            CRC32C of all bytes before it, from the first byte of the file
//   layers.<l>.<key|value>.<copies|pages.<format>>[.<tokens>]   U8 [pages, kv_heads, bytes of a block]
#pragma once

#include <array>
#include <charconv>

#include "../cache/layers.hpp"
#include "../page/page_table.hpp"
#include "../version.hpp"
#include "page_kind.hpp"
#include "safetensors.hpp"
#include "scheme_identity.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

inline constexpr const char* saved_format_name = "kvq sequence";
/// Changes whenever a reader of the version before would misread the file, page bytes included. A file has
/// the oldest version whose readers understand it: 4 says one shape of all layers, which are full attention,
/// 5 kind and shape of each layer.
inline constexpr int saved_format_version = 5;
inline constexpr int version_of_equal_layers = 4;
/// The oldest one that is read. It says neither how keys were rotated nor which spans share a page.
inline constexpr int oldest_saved_version = 3;

/// One row of the spans.
struct saved_span {
    std::int32_t layer = 0;
    std::int32_t tokens = 0;
    std::int32_t room = 0;
    std::int32_t skip = 0;
    std::int32_t sinks = 0;
    std::uint32_t shift[2] = {0, 0};  ///< low and high half of a two's complement number
    /// Rows of the index, counted from the first one of the layer and tensor: [K, V][page, copy]; -1: there
    /// is no copy.
    std::int32_t pages[2][2] = {{-1, -1}, {-1, -1}};

    static constexpr std::size_t columns = 11;
    static constexpr std::size_t columns_of_version_3 = 7;  ///< without rows of the index

    /// Without rows of the index.
    static saved_span of(std::size_t layer, const page_span& s) noexcept {
        const auto bits = static_cast<std::uint64_t>(s.shift);
        return {static_cast<std::int32_t>(layer),
                s.tokens,
                s.room,
                s.skip,
                s.sinks ? 1 : 0,
                {static_cast<std::uint32_t>(bits), static_cast<std::uint32_t>(bits >> 32)},
                {{-1, -1}, {-1, -1}}};
    }
    page_span at(int first_token) const noexcept {
        const std::uint64_t bits = shift[0] | static_cast<std::uint64_t>(shift[1]) << 32;
        return {first_token, tokens, room, {}, {}, skip, sinks != 0, static_cast<std::int64_t>(bits)};
    }
};
static_assert(sizeof(saved_span) == 4 * saved_span::columns);

/// What a layer is, in version 5.
struct saved_shape {
    std::int32_t kind = 0;  ///< layer_kind
    std::int32_t kv_heads = 0, head_dim = 0, value_dim = 0;
    std::int32_t window =
        0;  ///< of a shared layer the number of its owner, of a latent one its rotary channels
    std::int32_t sinks = 0;

    static constexpr std::size_t columns = 6;

    static saved_shape of(const layer& l) noexcept {
        return {static_cast<std::int32_t>(l.kind),
                l.kv_heads,
                l.head_dim,
                l.value_dim == 0 ? l.head_dim : l.value_dim,
                l.kind == layer_kind::shared   ? l.owner
                : l.kind == layer_kind::latent ? l.rotary_channels
                                               : l.window,
                l.sinks};
    }
    bool holds_tokens() const noexcept {
        return kind != static_cast<std::int32_t>(layer_kind::state) &&
               kind != static_cast<std::int32_t>(layer_kind::shared);
    }
    bool holds_keys_alone() const noexcept {
        return kind == static_cast<std::int32_t>(layer_kind::latent) ||
               kind == static_cast<std::int32_t>(layer_kind::index);
    }
    /// Can tokens be dropped from it (cache/retain.hpp)?
    bool retains() const noexcept {
        return is_full() || kind == static_cast<std::int32_t>(layer_kind::latent);
    }
    bool is_full() const noexcept { return kind == static_cast<std::int32_t>(layer_kind::full); }
    key_window sees() const noexcept {
        if (kind == static_cast<std::int32_t>(layer_kind::shared) || holds_keys_alone()) return {};
        return {window, kind == static_cast<std::int32_t>(layer_kind::chunked), sinks};
    }
    friend bool operator==(const saved_shape&, const saved_shape&) = default;
};
static_assert(sizeof(saved_shape) == 4 * saved_shape::columns);

/// One row of the index.
struct saved_page {
    std::uint32_t layer = 0;
    std::uint32_t role = 0;
    std::uint32_t kind = 0;
    std::uint32_t span = 0;    ///< index in the layer
    std::uint32_t format = 0;  ///< index in the file's list of schemes; 0 is the window
    std::uint32_t tokens = 0;  ///< capacity of the page in tokens
    std::uint32_t not_finite = 0;
    std::uint32_t checksum = 0;

    static constexpr std::size_t columns = 8;
    /// Rows of one layer and tensor follow each other in this order.
    std::array<std::uint32_t, 4> order() const noexcept { return {kind, format, tokens, span}; }
};
static_assert(sizeof(saved_page) == 4 * saved_page::columns);

inline std::string tensor_name(int layer, tensor role, const char* what) {
    return "layers." + std::to_string(layer) + (role == tensor::key ? ".key." : ".value.") + what;
}
/// tokens: capacity of the pages; the name omits the usual capacity.
inline std::string sized_name(const std::string& name, std::uint32_t tokens, const page_geometry& g) {
    return tokens == static_cast<std::uint32_t>(g.page_tokens) ? name : name + "." + std::to_string(tokens);
}
inline std::string copies_name(int layer, tensor role, std::uint32_t tokens, const page_geometry& g) {
    return sized_name(tensor_name(layer, role, "copies"), tokens, g);
}
inline std::string pages_name(int layer, tensor role, std::uint32_t format, std::uint32_t tokens,
                              const page_geometry& g) {
    return sized_name(tensor_name(layer, role, "pages.") + std::to_string(format), tokens, g);
}

/// The metadata, parsed.
struct saved_description {
    std::string model, library, window;
    int version = version_of_equal_layers;
    int layers = 0, layers_with_state = 0;
    std::vector<saved_shape> shapes;  // of the layers, or the one of all
    page_geometry geometry;
    int rollback = 0;
    int commits_from = 0;  // page_geometry::commits_from of the layers, at most
    std::array<std::vector<scheme_identity>, 2> schemes;  // K, V; behind those of the cache plans of keys
    std::map<int, rotary_identity> rotary;                // of layers whose keys moved

private:
    template <class Description>
    static auto numbers(Description& d) {
        using number = decltype(&d.rollback);
        return std::array<std::pair<const char*, number>, 5>{{{"layers", &d.layers},
                                                              {"sinks", &d.geometry.sinks},
                                                              {"recent", &d.geometry.recent},
                                                              {"page_tokens", &d.geometry.page_tokens},
                                                              {"rollback", &d.rollback}}};
    }

    /// Of all layers, up to version 4.
    template <class Shape>
    static auto numbers_of(Shape& s) {
        using number = decltype(&s.kv_heads);
        return std::array<std::pair<const char*, number>, 3>{
            {{"kv_heads", &s.kv_heads}, {"head_dim", &s.head_dim}, {"value_dim", &s.value_dim}}};
    }

    static std::string scheme_key(tensor role, std::size_t i) {
        return (role == tensor::key ? "key_scheme." : "value_scheme.") + std::to_string(i);
    }

    static std::string rotary_key(int layer) { return "rotary." + std::to_string(layer); }

public:
    std::map<std::string, std::string> to_metadata() const {
        std::map<std::string, std::string> m;
        m["format"] = saved_format_name;
        m["format_version"] = std::to_string(version);
        m["kvq_version"] = library;
        m["model"] = model;
        m["window"] = window;
        for (const auto& [name, number] : numbers(*this)) m[name] = std::to_string(*number);
        if (commits_from > 0) m["commits_from"] = std::to_string(commits_from);
        if (version == version_of_equal_layers)
            for (const auto& [name, number] : numbers_of(shapes[0])) m[name] = std::to_string(*number);
        for (const tensor role : {tensor::key, tensor::value}) {
            const auto& list = schemes[static_cast<std::size_t>(role)];
            for (std::size_t i = 0; i < list.size(); ++i) {
                m[scheme_key(role, i)] = list[i].name;
                if (list[i].fingerprint)
                    m[scheme_key(role, i) + ".fingerprint"] = fingerprint_text(list[i].fingerprint);
            }
        }
        for (const auto& [layer, embedding] : rotary) {
            m[rotary_key(layer)] = embedding.text;
            m[rotary_key(layer) + ".fingerprint"] = fingerprint_text(embedding.fingerprint);
        }
        return m;
    }

    /// Without the shapes of version 5: then set_shapes().
    static saved_description from_metadata(const std::map<std::string, std::string>& m, int version) {
        saved_description d;
        d.version = version;
        d.library = text(m, "kvq_version");
        d.model = text(m, "model");
        d.window = text(m, "window");
        for (const auto& [name, number] : numbers(d)) *number = parse<int>(name, text(m, name), 10);
        if (m.count("commits_from")) d.commits_from = parse<int>("commits_from", m.at("commits_from"), 10);
        expect(d.commits_from >= 0 && d.commits_from <= most_recent, "a saved sequence commits pages from ",
               d.commits_from, " tokens on");
        expect(d.layers >= 1, "a cache needs at least 1 layer, got ", d.layers);
        const page_geometry& g = d.geometry;
        expect(g.sinks >= 0 && g.recent >= 0 && d.rollback >= 0 && g.page_tokens >= 1 &&
                   g.page_tokens <= 65536 && g.sinks <= most_sinks && g.recent <= most_recent &&
                   d.rollback <= most_recent,
               "a saved sequence has impossible options: ", g.sinks, " sinks, ", g.recent, " recent, ",
               g.page_tokens, " page_tokens, ", d.rollback, " rollback");
        if (version <= version_of_equal_layers) {
            saved_shape shape;
            for (const auto& [name, number] : numbers_of(shape))
                *number = parse<int>(name, text(m, name), 10);
            d.set_shapes({shape});
        }
        for (const tensor role : {tensor::key, tensor::value}) {
            auto& list = d.schemes[static_cast<std::size_t>(role)];
            for (std::size_t i = 0; m.count(scheme_key(role, i)); ++i) {
                scheme_identity id{m.at(scheme_key(role, i)), std::nullopt};
                const std::string key = scheme_key(role, i) + ".fingerprint";
                if (m.count(key)) id.fingerprint = parse<std::uint64_t>(key, m.at(key), 16);
                list.push_back(std::move(id));
            }
            expect(!list.empty() && list[0] == scheme_identity{d.window, std::nullopt},
                   "the first scheme of a saved sequence is not its window, ", d.window);
        }
        for (int layer = 0; layer < d.layers; ++layer) {
            const auto said = m.find(rotary_key(layer));
            if (said == m.end()) continue;
            const std::string key = rotary_key(layer) + ".fingerprint";
            d.rotary[layer] = {said->second, parse<std::uint64_t>(key, text(m, key), 16)};
        }
        return d;
    }

    const saved_shape& shape_of(int layer) const noexcept {
        return shapes[shapes.size() == 1 ? 0 : static_cast<std::size_t>(layer)];
    }
    /// Raises kvq::error for impossible shapes.
    void set_shapes(std::vector<saved_shape> of) {
        layers_with_state = 0;
        const auto least = static_cast<std::int32_t>(version <= version_of_equal_layers ? 0 : 1);
        for (std::size_t i = 0; i < of.size(); ++i) {
            saved_shape& s = of[i];
            if (s.kind == static_cast<std::int32_t>(layer_kind::state)) {
                expect(
                    s.kv_heads == 0 && s.head_dim == 0 && s.value_dim == 0 && s.window == 0 && s.sinks == 0,
                    "layer ", i, " of the saved sequence is a state of ", s.kv_heads, " x ", s.head_dim);
                ++layers_with_state;
                continue;
            }
            if (s.kind == static_cast<std::int32_t>(layer_kind::shared)) {
                expect(s.window >= 0 && s.window < static_cast<std::int32_t>(i), "layer ", i,
                       " of the saved sequence is shared with layer ", s.window);
                const saved_shape& owner = of[static_cast<std::size_t>(s.window)];
                expect(owner.kind <= static_cast<std::int32_t>(layer_kind::chunked) && s.sinks == 0 &&
                           s.kv_heads == owner.kv_heads && s.head_dim == owner.head_dim &&
                           s.value_dim == owner.value_dim,
                       "layer ", i, " of the saved sequence has another shape than layer ", s.window,
                       ", with which it is shared");
                continue;
            }
            const bool cross = s.kind == static_cast<std::int32_t>(layer_kind::cross);
            expect(cross || s.holds_keys_alone() ||
                       (s.kind >= 0 && s.kind <= static_cast<std::int32_t>(layer_kind::chunked)),
                   "layer ", i, " of the saved sequence is of kind ", s.kind,
                   ", which this library does not know");
            if (s.holds_keys_alone())
                expect(s.window >= 0 && s.window < s.head_dim && s.value_dim <= s.head_dim && s.sinks == 0,
                       "layer ", i, " of the saved sequence holds keys of ", s.head_dim, " channels alone, ",
                       s.window, " of them rotary, with ", s.value_dim, " values");
            else
                expect(s.is_full() || cross ? s.window == 0 && s.sinks == 0
                                            : s.window >= 1 && s.window <= most_recent && s.sinks >= 0 &&
                                                  s.sinks <= geometry.sinks,
                       "layer ", i, " of the saved sequence has a window of ", s.window, " tokens and ",
                       s.sinks, " sinks");
            expect(s.value_dim >= least, "layer ", i, " of the saved sequence has value_dim ", s.value_dim);
            check_shape({layers, s.kv_heads, s.head_dim, s.value_dim});
            if (s.value_dim == 0) s.value_dim = s.head_dim;
            for (const int dim : {s.head_dim, s.value_dim}) check_page(geometry.longest_page(), dim);
        }
        shapes = std::move(of);
    }

    /// Sinks are one page; this keeps its size from overflowing.
    static constexpr int most_sinks = 1 << 20;
    static constexpr int most_recent = (std::numeric_limits<int>::max)() / 4;  // as of a cache

    static const std::string& text(const std::map<std::string, std::string>& m, const std::string& name) {
        const auto found = m.find(name);
        expect(found != m.end(), "a saved sequence must say its ", name, " in the metadata, but does not");
        return found->second;
    }
    template <class Number>
    static Number parse(const std::string& name, const std::string& text, int base) {
        Number number{};
        const auto result = std::from_chars(text.data(), text.data() + text.size(), number, base);
        expect(result.ec == std::errc{} && result.ptr == text.data() + text.size(), "metadata ", name,
               " is no number: ", text);
        return number;
    }
};

}}}  // namespace kvq::detail
