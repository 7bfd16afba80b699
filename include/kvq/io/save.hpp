// Saves a sequence as a safetensors file that describes itself (docs/guide/save.md): save(sequence, sink).
//
// Pages are written as they lie in memory, one after the other; besides them only the header and one row of
// integers per page and span need memory. A sequence in the same state always gives the same bytes: in 16-bit
// pages that are not full, the values of trimmed tokens are written as zeros.
#pragma once

#include <string>

#include "../cache/sequence.hpp"
#include "byte_stream.hpp"

namespace kvq { inline namespace KVQ_COMMON {

struct save_options {
    std::string model = {};  ///< model of these tokens: any text by which the engine recognizes it
    /// With the 16-bit copies of quantized pages that `rollback` keeps. Without, what is restored has the
    /// same tokens and attention, but a trim into pages that are quantized now keeps their codes
    /// (sequence::drop_copies).
    bool copies = true;
    /// Of pages with two planes the upper one alone, as pages of its format, which the cache must list: half
    /// of the bytes, for what is kept long (format/planes.hpp).
    bool upper_only = false;
};

namespace detail {
void save_to(const sequence& s, const sink_view& write, const save_options& options);
}

/// Writes the sequence to a sink: a callable write(const void*, std::size_t) that takes all bytes or throws.
template <byte_sink Sink>
void save(const sequence& s, Sink&& write, const save_options& options = {}) {
    detail::save_to(s, detail::held_sink<std::remove_reference_t<Sink>>{write}, options);
}

/// The bytes that save() writes. Reads every page once, for its checksum.
[[nodiscard]] std::size_t saved_bytes(const sequence& s, const save_options& options = {});

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "save-inl.hpp"
#endif
