// The identity of a page outside of its cache: the name of its scheme and a fingerprint of the scheme's parameters; and, if its keys have
// moved, the rotary embedding by which they did.
//
// A scheme that holds state (a rotation, a permutation, a codebook, a step) must have
//
//   std::uint64_t fingerprint() const     equal for two schemes of one name only if they dequantize the same
//
// so that pages are never dequantized with the parameters of another scheme; without a fingerprint they cannot be saved or sent. The
// index in a table of formats is no identity: other caches have other lists.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "../attention/rotary.hpp"
#include "../format/format_table.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

struct scheme_identity {
    std::string name;
    std::optional<std::uint64_t> fingerprint;  ///< none: a scheme without state

    bool operator==(const scheme_identity&) const = default;
};

/// Raises kvq::error for a format with state that has no fingerprint.
inline scheme_identity identity_of(const format& f) {
    const format_record& r = f.record();
    detail::expect(r.has_fingerprint || !r.has_state, "pages of ", format_text(f),
                   " cannot be saved or sent: it holds state, so its scheme must have std::uint64_t "
                   "fingerprint() const");
    return {f.name(), r.has_fingerprint ? std::optional(r.fingerprint) : std::nullopt};
}

namespace detail {

inline std::string fingerprint_text(const std::optional<std::uint64_t>& fingerprint) {
    if (!fingerprint) return "none";
    std::string text(16, '0');
    for (std::size_t i = 0; i < 16; ++i) text[15 - i] = "0123456789abcdef"[*fingerprint >> 4 * i & 15];
    return text;
}

/// The subject of a message: "layer 3 (keys)".
inline std::string layer_text(std::size_t layer, tensor role) {
    return "layer " + std::to_string(layer) + (role == tensor::key ? " (keys)" : " (values)");
}

/// Raises kvq::error unless a cache may have keys of a layer that moved by `shift` positions under the embedding `theirs`. Null: not said,
/// which is believed of version 3 only. keys: "the saved sequence has keys that".
inline void expect_moved_alike(const rotation_table& rotations, int layer, std::int64_t shift,
                               const rotary_identity* theirs, bool may_be_silent, const std::string& keys) {
    expect_shift(rotations, shift, keys);
    if (shift == 0 || (theirs == nullptr && may_be_silent)) return;
    expect(theirs != nullptr, keys, " moved by ", shift, " positions in layer ", layer,
           ", without the rotary embedding by which they did");
    const rotary_identity& mine = rotations.identity(layer);
    expect(theirs->fingerprint == mine.fingerprint, keys, " moved by ", shift, " positions in layer ", layer,
           " under another rotary embedding: ", theirs->text, " (fingerprint ",
           fingerprint_text(theirs->fingerprint), "), in this cache ", mine.text, " (",
           fingerprint_text(mine.fingerprint), ")");
}

/// Index of the format in a table, or -1. If several have one identity: the first.
inline int index_of_identity(const format_table& table, const scheme_identity& id) {
    for (int i = 0; i < table.size(); ++i)
        if (identity_of(table[i]) == id) return i;
    return -1;
}

/// Raises kvq::error: `id`, the scheme of `what` ("... is"), is not in the table.
[[noreturn]] inline void raise_unknown_format(const format_table& table, const scheme_identity& id,
                                              const std::string& what) {
    std::string listed;
    for (int i = 0; i < table.size(); ++i) {
        const scheme_identity mine = identity_of(table[i]);
        expect(mine.name != id.name, what, " quantized with ", format_text(table[i]),
               ", whose parameters differ from this cache's: ", "fingerprint ",
               fingerprint_text(id.fingerprint), ", here ", fingerprint_text(mine.fingerprint));
        listed += (listed.empty() ? "" : ", ") + format_text(table[i]);
    }
    fail(what, " quantized with ", scheme_text(id.name, table.role()),
         ", which is not among the formats of this cache: ", listed);
}

}  // namespace detail
}}  // namespace kvq
