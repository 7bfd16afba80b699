// Architectures: an instruction set is a type, and everything in this folder is a template over such a type.
//
// Types of xsimd are used if it has them; for types that the oldest supported xsimd (8.1) lacks, this header
// derives one. `available()` checks the running CPU. `best` is the best one of this build's -march flags.
//
//   sse2, sse4_1, avx2 (with FMA and F16C), avxvnni, avx512bw, avx512vnni, amx (avx512vnni with tiles) |
//     neon64, neon64_dot
//
// Objects built with different -march may be linked together in any order: everything that is compiled lives
// in a namespace of its instruction set (config.hpp; tests/link).
#pragma once

#if defined(__CUDACC__)
#error "kvq/cpu/simd.hpp must not be included from CUDA code: xsimd does not compile under nvcc"
#endif

#if defined(__x86_64__)
#include <cpuid.h>

#include "x86_amx.hpp"
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include <xsimd/xsimd.hpp>

#include "../../config.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace arch {

#if defined(__x86_64__)

struct sse2 : xsimd::sse2 {
    using registers = xsimd::sse2;
    static constexpr const char* name() noexcept { return "sse2"; }
    static bool available() noexcept { return true; }
};
struct sse4_1 : xsimd::sse4_1 {
    using registers = xsimd::sse4_1;
    static constexpr const char* name() noexcept { return "sse4.1"; }
    static bool available() noexcept { return __builtin_cpu_supports("sse4.1"); }
};
struct avx2 : xsimd::fma3<xsimd::avx2> {
    using registers = xsimd::fma3<xsimd::avx2>;
    static constexpr const char* name() noexcept { return "avx2"; }
    static bool available() noexcept {
        // Some compilers lack the name F16C: leaf 1, bit 29 of ecx.
        unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx >> 29 & 1u) != 0;
    }
};
struct avxvnni : avx2 {
    static constexpr const char* name() noexcept { return "avxvnni"; }
    static bool available() noexcept {
        // Some compilers lack this name: leaf 7, subleaf 1, bit 4 of eax. AVX-512 has the instructions as
        // well.
        unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
        const bool own = __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 4 & 1u) != 0;
        return avx2::available() &&
               (own || (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl")));
    }
};
struct avx512bw : xsimd::avx512bw {
    using registers = xsimd::avx512bw;
    static constexpr const char* name() noexcept { return "avx512bw"; }
    static bool available() noexcept {
        return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl");
    }
};
struct avx512vnni : avx512bw {
    static constexpr const char* name() noexcept { return "avx512vnni"; }
    static bool available() noexcept { return avx512bw::available() && __builtin_cpu_supports("avx512vnni"); }
};
/// If the operating system does not allow tiles, kernels are those of avx512vnni.
struct amx : avx512vnni {
    using tiles = amx_tiles;
    static constexpr const char* name() noexcept { return "amx"; }
    static bool available() noexcept {
        // Leaf 7: tiles are bit 24 of edx, their products of bytes bit 25, those of bfloat16 bit 22.
        unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
        return avx512vnni::available() && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 &&
               (edx >> 22 & 13u) == 13 && tiles::ready();
    }
};

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#if defined(__AMX_INT8__) || defined(__AMXINT8__)  // the latter: clang before 17
using best = amx;
#else
using best = avx512vnni;
#endif
#elif defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
using best = avx512bw;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && defined(__AVXVNNI__)
using best = avxvnni;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
using best = avx2;
#elif defined(__SSE4_1__)
using best = sse4_1;
#else
using best = sse2;
#endif

#elif defined(__aarch64__)

struct neon64 : xsimd::neon64 {
    using registers = xsimd::neon64;
    static constexpr const char* name() noexcept { return "neon64"; }
    static bool available() noexcept { return true; }
};
struct neon64_dot : neon64 {
    static constexpr const char* name() noexcept { return "neon64+dotprod"; }
    // Returns the same for every -march: the linker keeps one copy.
    static bool available() noexcept {
#if defined(__linux__)
        constexpr unsigned long dot_product = 1ul << 20;  // HWCAP_ASIMDDP
        return (getauxval(AT_HWCAP) & dot_product) != 0;
#elif defined(__APPLE__)
        return true;  // every Apple CPU since the A11 and the M1
#else
        return false;
#endif
    }
};

#if defined(__ARM_FEATURE_DOTPROD)
using best = neon64_dot;
#else
using best = neon64;
#endif

#else
#error "kvq/cpu/simd.hpp supports x86-64 and AArch64; use kvq::scalar elsewhere"
#endif

/// Operations that xsimd does not have, per instruction set; register_ops.hpp lists them.
template <class Arch>
struct register_ops;

}}}  // namespace kvq::arch
