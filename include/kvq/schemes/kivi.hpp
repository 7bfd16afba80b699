// KIVI: keys per channel over G tokens, values per token over G channels, recent tokens in 16 bit.
//
// Key outliers stay in few channels, so the values of a channel share a scale; value outliers do not.
// Paper settings: G = 32, 128 recent tokens (cache_options::recent), 2 or 4 bits. Any width 1..8 works here.
// Source: KIVI, arXiv 2402.02750, section 4. Contract: quant/affine.hpp.
#pragma once

#include "affine.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// A pair of schemes; pass it to a cache that takes one scheme for K and V, or use its types `keys` and
/// `values`.
template <int Bits, int Group = 32, class Params = params<float16>>
struct kivi {
    using keys = affine<Bits, per_channel<Group>, Params>;
    using values = affine<Bits, per_token<Group>, Params>;
};

}}  // namespace kvq
