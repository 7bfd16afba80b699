// expect: kvq::sequence::append: K and V must both be float, float16 or bfloat16
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

void append(kvq::cache<kvq::int8>::sequence_type& sequence, const float* k, const kvq::float16* v) {
    sequence.append(0, kvq::token_view<const float>(k, 1, 1, 8),
                    kvq::token_view<const kvq::float16>(v, 1, 1, 8));
}
