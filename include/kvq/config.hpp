// Compiler probes, and every macro of kvq except the version (version.hpp).
//
// KVQ_HD       marks functions that run on the host and, under nvcc, on the device
// KVQ_INLINE   forces inlining of functions that are parts of a kernel
// KVQ_INLINE_LAMBDA  the same for lambdas, after their parameters
// KVQ_UNROLL   unrolls the loop that follows, up to 16 times
// KVQ_NO_COPY  a function that is inlined everywhere, so that the linker has no copy of it to merge across
// translation units of
//              different instruction sets
// KVQ_COMPILE_FAST  to be defined by programs that should compile fast (-Og) and need not run fast, such as
// tests: kernels are functions
//              that call each other, and loops stay loops. Results are the same.
// KVQ_COMPILED to be defined by programs that link kvq::library, whose targets and packages do it: what is no
// template is declared, and
//              its code is that of the library. Without it everything is in the headers.
// KVQ_HEADER_ONLY  to be defined by files that use the headers alone beside the library: as without
// KVQ_COMPILED
// KVQ_TAGGED   the inline namespace of everything that is compiled for one instruction set
// KVQ_COMMON   the inline namespace of everything else: KVQ_TAGGED without KVQ_COMPILED
// KVQ_FUNC     before definitions in x-inl.hpp: inline without KVQ_COMPILED
// KVQ_EXPORT   marks the symbols that a shared library exports
// KVQ_EXCEPTIONS  1 when errors are thrown, 0 when they go to the error handler (core/error.hpp)
#pragma once

#if !defined(__GNUC__) && !defined(__clang__)
#error "kvq needs GCC or Clang (clang-cl on Windows)"
#endif
#if __cplusplus < 202002L
#error "kvq needs C++20: compile with -std=c++20"
#endif

// An empty softmax state has the maximum -infinity. A compiler that may assume finite values turns it into
// NaN.
#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#error "kvq needs infinities and NaN: compile without -ffast-math and -ffinite-math-only"
#endif
// Sums in another order change the bytes of pages. (Clang has no macro that says that it may reorder sums.)
#if defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__)
#error "kvq needs sums in the order in which they are written: compile without -funsafe-math-optimizations"
#endif

#if defined(__CUDACC__)
#define KVQ_HD __host__ __device__
#else
#define KVQ_HD
#endif

// All code that a compiler may turn into other instructions lives in an inline namespace that is named after
// the instruction set: kvq::KVQ_TAGGED. Objects of different -march can then be linked in any order. Types
// that such objects exchange, formats above all, live in kvq::v0_3 and have no functions that could be
// compiled twice.
#define KVQ_JOIN_PARTS(a, b, c, d) v0_3_##a##_##b##_##c##_##d
#define KVQ_JOIN(a, b, c, d) KVQ_JOIN_PARTS(a, b, c, d)
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && defined(__BMI2__) && defined(__LZCNT__) && \
    defined(__MOVBE__)
#define KVQ_TAG_BASE v3
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define KVQ_TAG_BASE avx2_fma_f16c
#elif defined(__AVX2__)
#define KVQ_TAG_BASE avx2
#elif defined(__AVX__)
#define KVQ_TAG_BASE avx
#elif defined(__SSE4_2__) && defined(__POPCNT__)
#define KVQ_TAG_BASE v2
#elif defined(__SSE4_1__)
#define KVQ_TAG_BASE sse41
#elif defined(__SSSE3__)
#define KVQ_TAG_BASE ssse3
#elif defined(__SSE2__)
#define KVQ_TAG_BASE sse2
#elif defined(__ARM_FEATURE_SVE)
#define KVQ_TAG_BASE sve
#elif defined(__ARM_NEON)
#define KVQ_TAG_BASE neon
#else
#define KVQ_TAG_BASE plain
#endif
#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define KVQ_TAG_WIDE avx512bw
#elif defined(__AVX512F__)
#define KVQ_TAG_WIDE avx512f
#elif defined(__ARM_FEATURE_DOTPROD)
#define KVQ_TAG_WIDE dotprod
#else
#define KVQ_TAG_WIDE 0
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define KVQ_TAG_DOT vnni_bf16
#elif defined(__AVX512VNNI__)
#define KVQ_TAG_DOT vnni
#elif defined(__AVXVNNI__)
#define KVQ_TAG_DOT avxvnni
#elif defined(__ARM_FEATURE_BF16)
#define KVQ_TAG_DOT bf16
#else
#define KVQ_TAG_DOT 0
#endif
#if defined(__AMX_INT8__) || defined(__AMXINT8__)
#define KVQ_TAG_TILES amx
#else
#define KVQ_TAG_TILES 0
#endif
#define KVQ_TAGGED KVQ_JOIN(KVQ_TAG_BASE, KVQ_TAG_WIDE, KVQ_TAG_DOT, KVQ_TAG_TILES)

// Marks the symbols that a shared kvq::library exports.
#define KVQ_EXPORT __attribute__((visibility("default")))

// What needs no kernel, such as a cache, is compiled once for the weakest CPU if the library is linked, and
// may be used from objects of any instruction set. Its functions are declared in x.hpp and defined in
// x-inl.hpp, which x.hpp includes without KVQ_COMPILED. Then they are compiled with each file, and have the
// name of its instruction set. Templates and short functions of x.hpp are compiled with each file either way,
// so types of users and of KVQ_TAGGED are arguments of such templates. Files for nvcc take headers alone.
#if defined(KVQ_HEADER_ONLY) || defined(__CUDACC__)
#undef KVQ_COMPILED
#endif
#if defined(KVQ_COMPILED)
#define KVQ_COMMON v0_3 KVQ_EXPORT
#define KVQ_FUNC
namespace kvq {
inline namespace KVQ_TAGGED { namespace detail {
}}  // namespace detail
inline namespace KVQ_COMMON { namespace detail {
using namespace kvq::KVQ_TAGGED::detail;
}}  // namespace detail
inline namespace KVQ_TAGGED { namespace detail {
using namespace kvq::v0_3::detail;
}}  // namespace detail
}  // namespace kvq
#else
#define KVQ_COMMON KVQ_TAGGED
#define KVQ_FUNC inline
#endif

// kvq::detail is two namespaces with KVQ_COMPILED. This name means both, for those who have a `detail` of
// their own (kvq::cuda).
namespace kvq { inline namespace KVQ_TAGGED {
namespace detail {
}
namespace common = detail;
}}  // namespace kvq

#define KVQ_NO_COPY inline __attribute__((always_inline))
#define KVQ_NOINLINE __attribute__((noinline))
#if defined(KVQ_COMPILE_FAST)
#define KVQ_INLINE inline
#define KVQ_INLINE_LAMBDA
#define KVQ_UNROLL
#else
// Large programs exhaust the inlining budget; kernels must be inlined anyway.
#define KVQ_INLINE KVQ_NO_COPY
#define KVQ_INLINE_LAMBDA __attribute__((always_inline))
// Loops over a few registers must be unrolled before registers are assigned. Compilers do not do it by
// themselves.
#if defined(__CUDACC__)
#define KVQ_UNROLL
#else
#define KVQ_UNROLL _Pragma("GCC unroll 16")
#endif
#endif

#if defined(__cpp_exceptions) || defined(__EXCEPTIONS) || defined(_CPPUNWIND)
#define KVQ_EXCEPTIONS 1
#else
#define KVQ_EXCEPTIONS 0
#endif
