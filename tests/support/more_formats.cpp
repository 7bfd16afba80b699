// SPDX-License-Identifier: MIT
// Formats of inconvenient schemes that many tests use (caches.hpp).
#define KVQ_TEST_FORMATS_HERE
#include "support/caches.hpp"

KVQ_TEST_OWN_SCHEMES(KVQ_TEST_INSTANTIATE)
