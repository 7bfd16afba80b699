// Definitions of layer_pages.hpp.
#pragma once

#include "layer_pages.hpp"

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC const std::byte* layer_pages::data(const page& p) const noexcept {
    return of_a_pool ? p.data_behind_header() : p.data();
}

KVQ_FUNC layer_pages::entry layer_pages::at(int index) const noexcept {
    const page_span& s = spans[index];
    const page* const keys = s.pages[0].get();
    return {s.first_token, s.tokens, keys, s.pages[1] ? s.pages[1].get() : keys, s.skip, s.shift};
}

KVQ_FUNC int layer_pages::lower_bound(int token) const noexcept {
    int low = 0, high = count;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (spans[middle].first_token < token)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

}}
