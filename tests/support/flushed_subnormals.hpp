// SPDX-License-Identifier: MIT
// Sets a thread as crtfastmath.o or torch.set_flush_denormal leave it: subnormal floats count as zero.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__SSE2__) || defined(__aarch64__)
#define KVQ_TEST_FLUSHES 1

namespace test {

struct flushed_subnormals {
#if defined(__SSE2__)
    unsigned saved = _mm_getcsr();
    flushed_subnormals() { _mm_setcsr(saved | 0x8040u); }
    ~flushed_subnormals() { _mm_setcsr(saved); }
#else
    std::uint64_t saved = 0;
    flushed_subnormals() {
        asm volatile("mrs %0, fpcr" : "=r"(saved));
        asm volatile("msr fpcr, %0" : : "r"(saved | 0x1080000u));
    }
    ~flushed_subnormals() { asm volatile("msr fpcr, %0" : : "r"(saved)); }
#endif
};

}  // namespace test
#endif
