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

KVQ_FUNC scheme_identity identity_of_plan(const format& plan) {
    scheme_identity id = identity_of(plan);
    const plan_functions& plans = *plan.functions().plans;
    const std::size_t before = id.name.size() + 1;
    id.name += '@';
    id.name.resize(before + plans.write_text(plan.scheme(), nullptr));
    (void)plans.write_text(plan.scheme(), id.name.data() + before);
    return id;
}

KVQ_FUNC scheme_identity identity_of_page(const format_table& table, const page& p) {
    return p.plan ? identity_of_plan(p.plan) : identity_of(table[p.format]);
}

KVQ_FUNC found_identity find_identity(const format_table& table, const scheme_identity& id) {
    for (int i = 0; i < table.size(); ++i)
        if (identity_of(table[i]) == id) return {i, {}};
    const std::size_t at = id.name.find('@');
    if (at == std::string::npos || table.role() != tensor::key) return {};
    for (int i = 1; i < table.size(); ++i) {
        const plan_functions* const plans = table[i].functions().plans;
        if (plans == nullptr || id.name.compare(0, at, table[i].name()) != 0) continue;
        const format plan = plans->from_text(table[i], id.name.data() + at + 1, id.name.size() - at - 1);
        expect(identity_of(plan).fingerprint == id.fingerprint, "a plan of ", format_text(table[i]),
               " has fingerprint ", fingerprint_text(identity_of(plan).fingerprint), ", not ",
               fingerprint_text(id.fingerprint));
        return {i, plan};
    }
    return {};
}

[[noreturn]] KVQ_FUNC void raise_unknown_format(const format_table& table, const scheme_identity& id,
                                                const std::string& what) {
    std::string listed;
    if (const std::size_t at = id.name.find('@'); at != std::string::npos)
        fail(what, " quantized with a plan of ", scheme_text(id.name.substr(0, at), table.role()),
             ", which is not among the formats of this cache");
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
