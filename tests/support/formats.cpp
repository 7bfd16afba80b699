// SPDX-License-Identifier: MIT
// The library's own formats that many tests use (typed_cache.hpp).
#define KVQ_TEST_FORMATS_HERE
#include "support/typed_cache.hpp"

KVQ_TEST_SHARED_SCHEMES(KVQ_TEST_INSTANTIATE)
