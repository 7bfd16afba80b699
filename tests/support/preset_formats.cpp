// SPDX-License-Identifier: MIT
// The library's other formats that many tests use (typed_cache.hpp).
#define KVQ_TEST_FORMATS_HERE
#include "support/typed_cache.hpp"

KVQ_TEST_SHARED_PRESETS(KVQ_TEST_INSTANTIATE)
