// Definitions of scheme_identity.hpp.
#pragma once

#include "../core/error.hpp"
#include "../format/format_names.hpp"
#include "scheme_identity.hpp"

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC scheme_identity identity_of(const format& f) {
    const format_record& r = f.record();
    detail::expect(r.has_fingerprint || !r.has_state, "pages of ", format_text(f),
                   " cannot be saved or sent: it holds state, so its scheme must have std::uint64_t "
                   "fingerprint() const");
    return {f.name(), r.has_fingerprint ? std::optional(r.fingerprint) : std::nullopt};
}

namespace detail {

KVQ_FUNC std::string fingerprint_text(const std::optional<std::uint64_t>& fingerprint) {
    if (!fingerprint) return "none";
    std::string text(16, '0');
    for (std::size_t i = 0; i < 16; ++i) text[15 - i] = "0123456789abcdef"[*fingerprint >> 4 * i & 15];
    return text;
}

KVQ_FUNC std::string layer_text(std::size_t layer, tensor role) {
    return "layer " + std::to_string(layer) + (role == tensor::key ? " (keys)" : " (values)");
}

KVQ_FUNC void expect_moved_alike(const rotation_table& rotations, int layer, std::int64_t shift,
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

KVQ_FUNC int index_of_identity(const format_table& table, const scheme_identity& id) {
    for (int i = 0; i < table.size(); ++i)
        if (identity_of(table[i]) == id) return i;
    return -1;
}

[[noreturn]] KVQ_FUNC void raise_unknown_format(const format_table& table, const scheme_identity& id,
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
