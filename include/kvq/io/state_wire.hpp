// A recurrent state with its snapshots as bytes: for files, and as one message to another process
// (docs/reference/files.md).
//
//   kvq::write_recurrent_state(sink, state);      smaller: state.fork(), with drop_live() or drop_snapshots()
//   kvq::recurrent_state other = kvq::read_recurrent_state(source, layout, pool, policy);
//
//   offset                                          offset
//    0  "kvqstat" and a zero                         32  layers with state, L
//    8  version, 1                                   36  snapshots, S
//   12  bytes of header and description, H           40  CRC32C of header and description, with zeros here
//   16  bytes of data, D (64 bits)                   44  1: a step was under way; else 0
//   24  tokens of the live state                     48  description; zeros to a multiple of 16
//   28  pages, P                                      H  data: the pages (state/state_layout.hpp)
//
//   description, one thing after the other:
//     L layers      number of the layer, parts; of each part: type (8 bits), snapshot type (8 bits),
//                   bytes of the name (16 bits), heads, rows, columns, name
//     S snapshots   tokens; its number, from 1 on
//     L layers      S + 1 times 8 bits, for the snapshots and the live state: 0 zeros, 1 the page before,
//                   2 the next page
//     P pages       layer by layer; CRC32C of the data, and the form: 0 live, 1 snapshot
//
// Little-endian, 32 bits unless another width is given. Every flipped bit and every truncation is found:
// kvq::error, and nothing has changed. A reader needs the layers, parts and types that the writer had.
// Snapshot types may differ: pages of snapshots that are quantized in another way are then dequantized to
// exact ones.
#pragma once

#include "../state/recurrent_state.hpp"
#include "byte_stream.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {
void write_recurrent_state_to(const sink_view& write, const recurrent_state& s);
recurrent_state read_recurrent_state_from(const source_view& read, const state_layout& layout,
                                          page_pool& pool, const snapshot_policy& policy);
}  // namespace detail

/// Writes a state. O(bytes)
template <byte_sink Sink>
void write_recurrent_state(Sink&& write, const recurrent_state& s) {
    detail::write_recurrent_state_to(detail::held_sink<std::remove_reference_t<Sink>>{write}, s);
}

/// The bytes that write_recurrent_state() writes. O(layers * snapshots)
[[nodiscard]] std::size_t written_bytes(const recurrent_state& s);

/// Reads a state. Snapshots that the policy has no room for are left out, the earliest ones first.
/// Raises kvq::error for damaged bytes or another layout, kvq::out_of_memory or std::bad_alloc; the pool is
/// then as before. O(bytes)
template <byte_source Source>
[[nodiscard]] recurrent_state read_recurrent_state(Source&& read, const state_layout& layout, page_pool& pool,
                                                   const snapshot_policy& policy = {}) {
    return detail::read_recurrent_state_from(detail::held_source<std::remove_reference_t<Source>>{read},
                                             layout, pool, policy);
}

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "state_wire-inl.hpp"
#endif
