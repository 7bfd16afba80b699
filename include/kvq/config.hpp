// Compiler probes and every macro of kvq but its version (version.hpp).
//
// KVQ_HD       marks functions that run on the host and, under nvcc, on the device
// KVQ_INLINE   forces inlining of small functions: what is inlined everywhere cannot be merged by the linker
//              across translation units that were built for different instruction sets
// KVQ_INLINE_LAMBDA  the same for lambdas, after their parameters
// KVQ_UNROLL   unrolls the loop that follows, up to 16 times
// KVQ_EXCEPTIONS  1 when errors are thrown, 0 when they go to the error handler (core/error.hpp)
#pragma once

#if !defined(__GNUC__) && !defined(__clang__)
#error "kvq needs GCC or Clang (clang-cl on Windows)"
#endif

// An empty softmax state is a maximum of -infinity. Compilers that may assume that there is none make NaN of it.
#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#error "kvq needs infinities and NaN: compile without -ffast-math and -ffinite-math-only"
#endif
// Sums in another order are other bytes of pages. (Clang does not say that it may change it.)
#if defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__)
#error \
    "kvq needs sums in the order in which they are written: compile without -funsafe-math-optimizations and its parts"
#endif

#if defined(__CUDACC__)
#define KVQ_HD __host__ __device__
#else
#define KVQ_HD
#endif

#define KVQ_INLINE inline __attribute__((always_inline))
// The same for lambdas: after the parameters. A kernel must not be called once per vector because a program is large.
#define KVQ_INLINE_LAMBDA __attribute__((always_inline))

// Loops over a handful of registers must be unrolled before registers are assigned; compilers need telling.
#if defined(__GNUC__) && !defined(__CUDACC__)
#define KVQ_UNROLL _Pragma("GCC unroll 16")
#else
#define KVQ_UNROLL
#endif

#if defined(__cpp_exceptions) || defined(__EXCEPTIONS) || defined(_CPPUNWIND)
#define KVQ_EXCEPTIONS 1
#else
#define KVQ_EXCEPTIONS 0
#endif
