// Restores a saved sequence into a cache: restore(cache, source).
//
// Checked before the first page: form, checksum of header and index, model, shape, options, schemes. Each
// page is checked by its own checksum as it is read, before its contents are used. The sequence is new, so an
// error leaves the cache unchanged.
//
// A cache with the same options and a list of formats that has all of the file's (in any order) gets the same
// sequence back: the same bytes, now and after later calls. Any other cache needs restore_options::convert:
//   other formats for a layer
//     quantized pages are converted to the cache's, page by page (error: cache/convert.hpp); from
//                                       their 16-bit copies if the file has them
//   other sinks, recent, page_tokens    tokens are dequantized and appended again; holds one layer of the
//                                       file at a time
//   or window
#pragma once

#include <string>

#include "../cache/sequence.hpp"
#include "byte_stream.hpp"

namespace kvq { inline namespace KVQ_COMMON {

struct restore_options {
    std::string model = {};  ///< required save_options::model; empty: any
    bool convert =
        false;  ///< pages may change: quantized to the cache's own formats, laid out by its own options
};

namespace detail {
sequence restore_from(cache& of, const source_view& read, const restore_options& options);
}

/// Reads a saved sequence from a source: a callable read(void*, std::size_t) -> std::size_t, which is called
/// for exactly the bytes of the file. Raises kvq::error when the file is damaged, truncated, not a saved
/// sequence, or does not fit this cache.
template <byte_source Source>
[[nodiscard]] sequence restore(cache& of, Source&& read, const restore_options& options = {}) {
    return detail::restore_from(of, detail::held_source<std::remove_reference_t<Source>>{read}, options);
}

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "restore-inl.hpp"
#endif
