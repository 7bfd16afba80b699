// State of a sequence_table as bytes: all sequences or one of them, with positions, in their formats.
//
//   kvq::write_state(table, sink);              sequences that share their tokens are written once
//   kvq::read_state(table, source);             replaces all sequences
//   kvq::write_state(table, sink, id);  kvq::read_state(table, source, id);       one of them, under any id
//
// Sink and source: callables (io/byte_stream.hpp). Pages travel as messages of io/page_transfer.hpp: the
// reading cache has the shape, window, sinks, recent and page_tokens of the writing one and lists the schemes
// of the pages.
// Contract: what was read attends with the bits of what was written. Damaged, truncated and hostile input
// raises kvq::error and leaves the table as it was. Bytes: an entry has a header of 8 bytes, its ids, 4 bytes
// per position, and its pages; a page that sequences share is there once, and shared again by those that are
// read. Recurrent state follows its pages.
#pragma once

#include "../io/byte_stream.hpp"
#include "sequence_table.hpp"

namespace kvq { inline namespace KVQ_COMMON {

struct state_options {
    bool copies = true;  ///< with the 16-bit copies of quantized pages, as save_options::copies
};

namespace detail {
void write_state_to(sequence_table& table, const sink_view& sink, int id, const state_options& options);
void read_state_from(sequence_table& table, const source_view& source, int id);
}  // namespace detail

/// Writes all sequences, or that of one id. A step that is open ends first.
template <byte_sink Sink>
void write_state(sequence_table& table, Sink&& sink, int id = -1, const state_options& options = {}) {
    detail::write_state_to(table, detail::held_sink<std::remove_reference_t<Sink>>{sink}, id, options);
}
/// The bytes that write_state() writes. Reads every page once, for its checksum.
[[nodiscard]] std::size_t state_bytes(sequence_table& table, int id = -1, const state_options& options = {});

/// Replaces all sequences, or that of one id, by what was written. Needs the memory of both while it reads.
template <byte_source Source>
void read_state(sequence_table& table, Source&& source, int id = -1) {
    detail::read_state_from(table, detail::held_source<std::remove_reference_t<Source>>{source}, id);
}

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "sequence_state-inl.hpp"
#endif
