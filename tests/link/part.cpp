// SPDX-License-Identifier: MIT
// The parts of kvq::library in library.cpp.
#define KVQ_LEVEL sse2
#define KVQ_PART 0
#define KVQ_FORMATS "fp16"
#include "../../src/builtin_part.cpp"
#undef KVQ_PART
#undef KVQ_FORMATS
#define KVQ_PART 4
#define KVQ_FORMATS "none"
#include "../../src/builtin_part.cpp"
