// Two planes: a format of 4 bits and, in memory of its own, a plane of 4 further bits for every code. The
// upper plane alone is a page of the 4-bit format, both together are codes of 8 bits.
//
//   format keys = with_lower_plane(make_format<nested4::keys>());
//   format keys = find_format("nested8", tensor::key);                the same by name
//
//   x^ = b + s (u + (l - 7.5) / 16)     u = 0 .. 15 of the upper plane, l = 0 .. 15 of the lower one; s and b
//                                       as the upper format has them, token scales included
//
//   page     [upper: the blocks of the 4-bit format] and, apart,
//            [lower: for every head the words of l, in the layout of the codes of u, padded to 16 bytes]
//
// Attention reads both planes, or with the hook upper_only() (attention/mods.hpp) the upper one. Requantizing
// and stepping down to the format of the upper plane frees the lower one; no byte is read or written.
// Contract: the upper plane has the bytes of the upper format, and read alone gives its outputs bit for bit.
// |x - x^| <= s / 32 where the upper format is within s / 2 of x; beyond that, by what it clamps.
// Source: nested codes of a cache for self-speculation, QuantSpec, arXiv 2502.10424.
#pragma once

#include "format.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// The format with a lower plane. Raises kvq::error for formats whose codes do not have 4 bits.
[[nodiscard]] format with_lower_plane(const format& f);

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "planes-inl.hpp"
#endif
