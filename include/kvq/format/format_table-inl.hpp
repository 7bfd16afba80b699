// Definitions of format_table.hpp.
#pragma once

#include "../core/error.hpp"
#include "check_products.hpp"
#include "format_table.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

KVQ_FUNC format_table::format_table(tensor role, const format& window, const format_list& listed)
    : role_(role) {
    formats_.push_back(window);
    for (const format& f : listed) formats_.push_back(f);
}

KVQ_FUNC int format_table::index_of(int i) const {
    const format& f = (*this)[i + 1];
    return f.holds_values() && f.functions().value_type == window_type() ? 0 : find(f) + 1;
}

KVQ_FUNC bool format_table::drops_lower(int from, int to) const noexcept {
    const format& f = (*this)[from];
    if (!f.functions().upper) return false;
    const format& upper = f.functions().upper(f.scheme());
    const format_record &a = upper.record(), &b = (*this)[to].record();
    return std::string_view(a.name) == b.name && a.has_fingerprint == b.has_fingerprint &&
           a.fingerprint == b.fingerprint && (a.has_fingerprint || !(a.has_state || b.has_state));
}

KVQ_FUNC std::size_t format_table::block_bytes(int index, const block_shape& shape) const {
    return (*this)[index].block_bytes(shape);
}

KVQ_FUNC int format_table::find(const format& f) const noexcept {
    int i = 0;
    while (i < listed() && !(*this)[i + 1].same_as(f)) ++i;
    return i;
}

KVQ_FUNC std::size_t format_table::transforming_before(int index) const noexcept {
    std::size_t n = 0;
    for (int i = 0; i < index; ++i) n += (*this)[i].functions().transforms;
    return n;
}

KVQ_FUNC void check_format(const format& f, const cache_shape& shape, tensor role, int page_tokens,
                           const std::string& what) {
    expect(static_cast<bool>(f), what, " is empty");
    expect(f.supports(role), what, ", ", format_text(f), ", holds ", role == tensor::key ? "values" : "keys",
           " only");
    f.functions().check(f.scheme(), shape, role);
    const std::size_t bytes = f.block_bytes({role, page_tokens, shape.dim(role)});
    expect(bytes % 16 == 0, "blocks of ", what, " have ", bytes, " bytes, which is no multiple of 16");
    check_products(f, {role, page_tokens, shape.dim(role)}, what);
}

KVQ_FUNC void check_backends(const format_table& keys, const format_table& values, const format& added) {
    const backend_functions* tiles = nullptr;
    const auto look = [&](const format& f) {
        const backend_functions* const backend = f.functions().backend;
        if (backend->open_tiles == nullptr) return;
        expect(tiles == nullptr || same_tiles(*tiles, *backend), "formats of the backends ",
               tiles ? tiles->name : "", " and ", backend->name,
               " cannot be in one cache: both multiply tiles");
        tiles = backend;
    };
    for (const format_table* table : {&keys, &values})
        for (int i = 0; i < table->size(); ++i) look((*table)[i]);
    if (added) look(added);
}

KVQ_FUNC const char* name_of(tensor role) noexcept { return role == tensor::key ? "key" : "value"; }

}}}
