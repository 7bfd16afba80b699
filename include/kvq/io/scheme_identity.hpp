// The identity of a page outside of its cache: the name of its scheme and a fingerprint of the scheme's
// parameters; and, if its keys have moved, the rotary embedding by which they did.
//
// A scheme that holds state (a rotation, a permutation, a codebook, a step) must have
//
//   std::uint64_t fingerprint() const     equal for two schemes of one name only if they dequantize the same
//
// so that pages are never dequantized with the parameters of another scheme; without a fingerprint they
// cannot be saved or sent. The index in a table of formats is no identity: other caches have other lists.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "../attention/rotary.hpp"
#include "../format/format_table.hpp"
#include "../page/page.hpp"

namespace kvq { inline namespace KVQ_COMMON {

struct scheme_identity {
    std::string name;
    std::optional<std::uint64_t> fingerprint;  ///< none: a scheme without state

    bool operator==(const scheme_identity&) const = default;
};

/// Raises kvq::error for a format with state that has no fingerprint.
scheme_identity identity_of(const format& f);

namespace detail {

std::string fingerprint_text(const std::optional<std::uint64_t>& fingerprint);

/// The subject of a message: "layer 3 (keys)".
std::string layer_text(std::size_t layer, tensor role);

/// Raises kvq::error unless a cache may have keys of a layer that moved by `shift` positions under the
/// embedding `theirs`. Null: not said, which is believed of version 3 only. keys: "the saved sequence has
/// keys that".
void expect_moved_alike(const rotation_table& rotations, int layer, std::int64_t shift,
                        const rotary_identity* theirs, bool may_be_silent, const std::string& keys);

/// Of a format with a plan of its keys, which is a part of the name:
/// "mixed-4-2-0-avg2-g64-coded@8x128:0011...".
scheme_identity identity_of_plan(const format& plan);
scheme_identity identity_of_page(const format_table& table, const page& p);

/// A format of a table, and the plan of a page that has its own.
struct found_identity {
    int index = -1;  ///< -1: the table does not have it. If several have one identity: the first
    format plan = {};
};
/// Raises kvq::error for a damaged plan.
found_identity find_identity(const format_table& table, const scheme_identity& id);

/// Raises kvq::error: `id`, the scheme of `what` ("... is"), is not in the table.
[[noreturn]] void raise_unknown_format(const format_table& table, const scheme_identity& id,
                                       const std::string& what);

}  // namespace detail
}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "scheme_identity-inl.hpp"
#endif
