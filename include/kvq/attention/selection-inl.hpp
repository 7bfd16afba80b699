// Definitions of selection.hpp.
#pragma once

#include "../core/error.hpp"
#include "selection.hpp"

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC void selected_pages::check(int) const {
    detail::expect(tokens >= 1, "selected_pages reads at least 1 token, got ", tokens);
}

KVQ_FUNC void skipped_values::check(int) const {
    detail::expect(mass >= 0.0f && mass < 1.0f,
                   "skipped_values leaves out at least 0 and less than 1 of the weights, got ",
                   static_cast<double>(mass));
}

}}
