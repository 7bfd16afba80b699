// Definitions of selection.hpp.
#pragma once

#include "../core/error.hpp"
#include "selection.hpp"

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC void listed_tokens::check(int) const {
    constexpr int most = 1 << 24;
    for (const token_lists& of : {selected, window})
        detail::expect(of.count >= 0 && of.count <= most && (of.tokens != nullptr || of.count == 0),
                       "a query lists 0 to ", most, " tokens, got ", of.count,
                       of.tokens == nullptr ? " and no positions" : "");
    detail::expect(queries >= 0 && kv_heads >= 1, "tokens are listed for ", queries, " queries and ",
                   kv_heads, " kv heads, which are at least 0 and 1");
}

KVQ_FUNC void selected_pages::check(int) const {
    detail::expect(tokens >= 1, "selected_pages reads at least 1 token, got ", tokens);
}

KVQ_FUNC void skipped_values::check(int) const {
    detail::expect(mass >= 0.0f && mass < 1.0f,
                   "skipped_values leaves out at least 0 and less than 1 of the weights, got ",
                   static_cast<double>(mass));
}

}}
