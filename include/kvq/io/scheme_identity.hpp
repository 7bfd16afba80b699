// By what a page's scheme is recognized outside of the cache that coded it: its name, and a fingerprint of its parameters.
//
// A scheme that holds state (a rotation, a permutation, a codebook, a step) must have
//
//   std::uint64_t fingerprint() const     equal for two schemes of one name only if they decode the same
//
// so that pages are never decoded with somebody else's parameters; without it they cannot be saved or sent. The index in
// formats<...> says nothing: other caches have other lists.
#pragma once

#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

#include "../page/formats.hpp"

namespace kvq::inline v0_1 {

struct scheme_identity {
    std::string name;
    std::optional<std::uint64_t> fingerprint;  ///< none: a scheme without state

    bool operator==(const scheme_identity&) const = default;
};

template <kv_scheme S>
scheme_identity identity_of(const S& scheme) {
    constexpr bool has_fingerprint = requires {
        { scheme.fingerprint() } -> std::convertible_to<std::uint64_t>;
    };
    static_assert(has_fingerprint || std::is_empty_v<S>,
                  "kvq: to save or send pages of a scheme that holds state, it must have "
                  "std::uint64_t fingerprint() const");
    scheme_identity id{scheme.name(), std::nullopt};
    if constexpr (has_fingerprint) id.fingerprint = static_cast<std::uint64_t>(scheme.fingerprint());
    return id;
}

namespace detail {

inline std::string fingerprint_text(const std::optional<std::uint64_t>& fingerprint) {
    if (!fingerprint) return "none";
    std::string text(16, '0');
    for (std::size_t i = 0; i < 16; ++i) text[15 - i] = "0123456789abcdef"[*fingerprint >> 4 * i & 15];
    return text;
}

/// What a message is about: "layer 3 (keys)".
inline std::string layer_text(std::size_t layer, tensor role) {
    return "layer " + std::to_string(layer) + (role == tensor::key ? " (keys)" : " (values)");
}

/// Index of the scheme in a table, or -1. Several of one identity: the first.
template <class Table>
int find_format(const Table& table, const scheme_identity& id) {
    int found = -1;
    table.for_each([&](const auto& scheme, int index) {
        if (found < 0 && identity_of(scheme) == id) found = index;
    });
    return found;
}

/// Raises kvq::error: `id`, with which `what` is coded, is not in the table.
template <class Table>
void raise_unknown_format(const Table& table, const scheme_identity& id, const std::string& what) {
    std::string listed;
    table.for_each([&](const auto& scheme, int) {
        const scheme_identity mine = identity_of(scheme);
        expect(mine.name != id.name, what, " coded with ", id.name,
               ", whose parameters differ from this cache's: ", "fingerprint ",
               fingerprint_text(id.fingerprint), ", here ", fingerprint_text(mine.fingerprint));
        listed += (listed.empty() ? "" : ", ") + mine.name;
    });
    expect(false, what, " coded with ", id.name, ", which is not among the formats of this cache: ", listed);
}

}  // namespace detail
}  // namespace kvq::inline v0_1
