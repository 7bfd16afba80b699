// How snapshots of recurrent state quantize a part: a byte per value, and a scale for a group of values.
//
//   int8   scale = max(amax / 127, 2^-126),  code = round_half_even(x / scale),  x^ = scale * code
//   e4m3   scale = max(amax / 240, 2^-126),  code = e4m3(x / scale),             x^ = scale * code
//
// amax is the largest finite |x| of the group: a head and row, a head and column, or a head and 32 rows
// (state/state_part.hpp). x^ is rounded once to the type of the part; int8 is that of quant/symmetric.hpp. A
// quantized part is its codes, its scales, and what quantizing did to it (snapshot_sums).
// Contract: |x - x^| <= scale/2 for int8, and <= max(|x|/16, scale/1024) for e4m3, plus float evaluation.
// What was zero stays zero. NaN becomes 0, infinities the largest code of their sign; both are
// counted. The bytes are the same on every machine. O(values), no memory.
// Source: int8 per head and k channel, as SGLang keeps checkpoints of Gated DeltaNet and Kimi Linear
// (sgl-project/sglang#28185); e4m3 per head and 32 rows with 240 as the largest code
// (sgl-project/sglang#40706).
#pragma once

#include <cstddef>
#include <cstdint>

#include "state_part.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

/// Bytes of a part in a snapshot. The part has been checked by state_layout.
std::size_t snapshot_bytes_of(const state_part& p) noexcept;

/// Writes the snapshot of a part. Exact parts are copied.
void quantize_part(const state_part& p, const std::byte* live, std::byte* to) noexcept;
void dequantize_part(const state_part& p, const std::byte* from, std::byte* live) noexcept;
/// Of a quantized part.
snapshot_sums sums_of_part(const state_part& p, const std::byte* snapshot) noexcept;

}}}  // namespace kvq::detail

#if !defined(KVQ_COMPILED)
#include "snapshot_codec-inl.hpp"
#endif
