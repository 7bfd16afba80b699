// SPDX-License-Identifier: MIT
// Attention of the caches that all tests use, compiled once.
#include "caches.hpp"

namespace test {

KVQ_TEST_ATTENTION_BITS(kivi_cache);
KVQ_TEST_ATTENTION_BITS(mixed_cache);
KVQ_TEST_ATTENTION_BITS(custom_cache);
#if !defined(KVQ_TEST_FEWER_SCHEMES)
KVQ_TEST_ATTENTION_BITS(int8_cache);
KVQ_TEST_ATTENTION_BITS(product_cache);
KVQ_TEST_ATTENTION_BITS(rotated_cache);
KVQ_TEST_ATTENTION_BITS(plain_cache);
#endif

}  // namespace test
