// One page as a message: sends pages to another process in quantized form (docs/reference/files.md).
//
//   offset                                      offset
//    0  "kvqpage" and a zero                     64  bytes of the scheme's name
//    8  version, 4 or 5                          68  CRC32C of the data
//   12  bytes of header and names, H             72  tokens of the layer, 0: unknown
//   16  bytes of data, D (64 bits)               76  CRC32C of header and names, with zeros here
//   24  0: keys, 1: values (8 bits)              80  tokens before the first shown one
//   25  0: 16-bit copy, 1: page (8 bits)         84  tokens that may be shown, 0: all
//   26  flags (16 bits), see below               88  shift of the keys (64 bits, signed)
//   28  layer                                    96  fingerprint of the rotary embedding by which they moved
//                                                    (64 bits)
//   32  first token                             104  fingerprint of the target (64 bits)
//   36  tokens that the page has memory for     112  bytes of the target's name
//   40  tokens that it shows                    116  bytes of the embedding in words, 0: keys did not move
//   44  kv heads                                120  number of the page, 0: not said
//   48  channels of a head                      124  zero
//   52  values that were not finite             128  names of scheme and target, the embedding in words;
//                                                    zeros to a multiple of 16
//   56  fingerprint of the scheme (64 bits)       H  data: kv_heads blocks (docs/reference/format.md)
//
// A page of a latent layer has version 5: at 128 the channels of its values, at 132 its rotary channels, at
// 136 a zero (64 bits), and the names behind them. So has one of an index, with no values and no rotary
// channels. Other layers have version 4.
//
// Flags: 1 committed, 2 the scheme has a fingerprint, 4 sinks, 8 later pages of the layer are quantized to a
// target of their own, 16 the target has a fingerprint, 32 the data come with the message of another span
// that has this page. Version 3 has the scheme's name at 96, and none of what follows.
// Little-endian, 32 bits unless another width is given. Every flipped bit and every truncation is found. A
// reader raises kvq::error for versions other than 3 to 5; a change of the page bytes is a new version.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "byte_stream.hpp"
#include "page_kind.hpp"
#include "scheme_identity.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// What the keys of a latent layer are: their first `values` channels are its values, and the last `rotary`
/// ones are rotated. Those of an index have neither.
struct latent_channels {
    std::int32_t values = 0, rotary = 0;

    friend bool operator==(const latent_channels&, const latent_channels&) = default;
};

/// A page and its header.
struct page_message {
    tensor role = tensor::key;
    page_kind kind = page_kind::page;
    bool committed = false;  ///< past the recent window
    int layer = 0;
    int first_token = 0;
    int tokens = 0;  ///< capacity of the page
    int used = 0;    ///< shown tokens
    int skip = 0;    ///< tokens before the first shown one
    /// Tokens that may be shown (page_span::room); 0: all that the page has memory for when it is full.
    int room = 0;
    bool sinks = false;      ///< a page of sinks
    std::int64_t shift = 0;  ///< by how much its keys moved (page_span::shift)
    int kv_heads = 0;
    int dim = 0;
    std::optional<latent_channels> latent = {};  ///< of a latent layer or an index
    int layer_tokens = 0;  ///< tokens of the layer when the page was sent; 0: not known yet
    std::uint32_t not_finite = 0;
    scheme_identity scheme;
    /// What later pages of the layer are quantized to, if the sender's cache would choose another format.
    std::optional<scheme_identity> target = {};
    std::optional<rotary_identity> rotary = {};  ///< of keys that moved
    /// Of the page in its layer and tensor, from 1 on; several spans may have it. 0: not said.
    std::uint32_t number = 0;
    bool is_elsewhere = false;  ///< the data come with another message of this number
    std::span<const std::byte> data;
};

namespace detail {
void write_page(const sink_view& write, const page_message& m);
page_message read_page_from(const source_view& read, std::vector<std::byte>& storage);
}  // namespace detail

/// Writes a page as one message.
template <byte_sink Sink>
void quantize_page(Sink&& write, const page_message& m) {
    detail::write_page(detail::held_sink<std::remove_reference_t<Sink>>{write}, m);
}

/// Parses a message; the data stay in place. Raises kvq::error if it is not exactly one whole, undamaged
/// message.
page_message parse_page(std::span<const std::byte> message);

/// Reads one message from a source of many, such as a socket. `storage` holds the data of the result.
template <byte_source Source>
page_message read_page(Source&& read, std::vector<std::byte>& storage) {
    return detail::read_page_from(detail::held_source<std::remove_reference_t<Source>>{read}, storage);
}

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "page_wire-inl.hpp"
#endif
