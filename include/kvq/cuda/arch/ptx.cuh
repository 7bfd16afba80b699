// The instructions that C++ has no word for: tensor-core products, asynchronous copies, byte permutes, exp2.
//
//   m16n8k32 (8-bit)    D[16][8] += A[16][32] B[32][8], integer sums, exact
//   m16n8k16 (16-bit)   the same with fp16 or bf16 products and float sums
//
// Lane (g, t) = (lane / 4, lane % 4) holds of A rows g (registers 0, 2) and g+8 (1, 3), words t (0, 1) and
// t+4 (2, 3); of B column g, words t (0) and t+4 (1); of D rows g (0, 1) and g+8 (2, 3), columns 2t and 2t+1.
// Which number of the summed axis a word holds does not matter as long as A and B agree: pages use that
// freedom.
// Contract: exp2 has a relative error of about 2e-7 and flushes subnormal results to zero (ex2.approx.ftz).
// Nothing else is here: tests/gpu/emulated/ptx.cuh has the same functions for the CPU.
// Source: PTX ISA 8.x, "Matrix multiply-accumulate operation using mma instruction"; sm_80 and later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "../../core/float_formats.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Unsigned codes times signed high and low bytes (keys x query).
__device__ __forceinline__ void mma_codes_signed(int (&d)[4], std::uint32_t a0, std::uint32_t a1,
                                                 std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                                 std::uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// Unsigned codes times unsigned high and low bytes (values x weights).
__device__ __forceinline__ void mma_codes_unsigned(int (&d)[4], std::uint32_t a0, std::uint32_t a1,
                                                   std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                                   std::uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// Signed times signed bytes (keys of an index x query).
__device__ __forceinline__ void mma_signed(int (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                                           std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <class T>
__device__ __forceinline__ void mma_values(float (&d)[4], std::uint32_t a0, std::uint32_t a1,
                                           std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                           std::uint32_t b1) {
    static_assert(std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>);
    if constexpr (std::is_same_v<T, float16>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// `factor`, of which the compiler does not see that it is a power of two: products with it stay products,
/// since shifts by a number of bits that varies would go to the integer pipe.
__device__ __forceinline__ std::uint32_t opaque_factor(std::uint32_t factor) {
    std::uint32_t same;
    asm("mov.b32 %0, %1;" : "=r"(same) : "r"(factor));
    return same;
}

/// a + b, at most `top` and at least 0.
__device__ __forceinline__ int clamped_sum(int a, int b, int top) { return __viaddmin_s32_relu(a, b, top); }

/// Two floats as one word of two 16-bit floats, the first in the low half; round to nearest even.
template <class T>
__device__ __forceinline__ std::uint32_t pack_halves(float low, float high) {
    std::uint32_t word;
    if constexpr (std::is_same_v<T, float16>)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

__device__ __forceinline__ float half_bits_to_float(std::uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

/// The low (0) or high (1) half of a word of two 16-bit floats.
template <class T, int Half>
__device__ __forceinline__ float unpack_half(std::uint32_t word) {
    if constexpr (std::is_same_v<T, float16>)
        return half_bits_to_float(static_cast<std::uint16_t>(Half ? word >> 16 : word & 0xffffu));
    else
        return __uint_as_float(Half ? word & 0xffff0000u : word << 16);
}

/// Bits of the nearest half floats that are not below and not above x.
__device__ __forceinline__ std::uint16_t half_above(float x) {
    std::uint16_t bits;
    asm("cvt.rp.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
__device__ __forceinline__ std::uint16_t half_below(float x) {
    std::uint16_t bits;
    asm("cvt.rm.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

/// A stored number as float, by hardware conversion where there is one.
template <class T>
__device__ __forceinline__ float to_float(T value) {
    if constexpr (std::is_same_v<T, float16>)
        return half_bits_to_float(value.bits);
    else
        return static_cast<float>(value);
}

/// Float to T, rounded to nearest even.
template <class T>
__device__ __forceinline__ T from_float(float value) {
    if constexpr (std::is_same_v<T, float16>)
        return float16::from_bits(static_cast<std::uint16_t>(pack_halves<float16>(value, 0.0f) & 0xffffu));
    else if constexpr (std::is_same_v<T, bfloat16>)
        return bfloat16::from_bits(static_cast<std::uint16_t>(pack_halves<bfloat16>(value, 0.0f) & 0xffffu));
    else
        return T(value);
}

/// Smallest and largest (of a number and NaN: NaN; -0 < +0) of two 16-bit floats at a time.
template <class T>
__device__ __forceinline__ std::uint32_t min_halves(std::uint32_t a, std::uint32_t b) {
    std::uint32_t c;
    if constexpr (std::is_same_v<T, float16>)
        asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    else
        asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
template <class T>
__device__ __forceinline__ std::uint32_t max_halves(std::uint32_t a, std::uint32_t b) {
    std::uint32_t c;
    if constexpr (std::is_same_v<T, float16>)
        asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    else
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
/// Products of two half floats each, rounded to nearest; subnormal numbers are numbers.
__device__ __forceinline__ std::uint32_t multiply_halves(std::uint32_t a, std::uint32_t b) {
    std::uint32_t c;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
/// a b + c, rounded once.
__device__ __forceinline__ std::uint32_t multiply_add_halves(std::uint32_t a, std::uint32_t b,
                                                             std::uint32_t c) {
    std::uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
/// The low or high two bytes of `codes`, numbers of e4m3, as half floats: exact. NaN is 480 on devices before
/// sm_89.
template <int Half>
__device__ __forceinline__ std::uint32_t halves_of_e4m3(std::uint32_t codes) {
#if __CUDA_ARCH__ >= 890
    std::uint32_t two;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"(static_cast<std::uint16_t>(codes >> 16 * Half)));
    return two;
#else
    const std::uint32_t two = __byte_perm(codes, 0, Half == 0 ? 0x1404 : 0x3424);
    return multiply_halves((two & 0x80008000u) | (two >> 1 & 0x3f803f80u), 0x5c005c00u);
#endif
}
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// 1 / x to about 1e-7, for normal x; without the care for subnormal numbers that __fdividef takes.
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// Shared memory, by address.
__device__ __forceinline__ uint4 load_shared_16(std::uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at));
    return v;
}
__device__ __forceinline__ uint2 load_shared_8(std::uint32_t at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}
__device__ __forceinline__ std::uint32_t load_shared_4(std::uint32_t at) {
    std::uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ std::uint32_t load_shared_1(std::uint32_t at) {
    std::uint32_t v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ std::uint32_t load_shared_2(std::uint32_t at) {
    std::uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
    return v;
}

__device__ __forceinline__ void store_shared_16(std::uint32_t at, const float4& v) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}
/// Four times 16 bytes, `Behind` bytes behind four places. One statement, so that each has registers of its
/// own: a store reads them late, and whatever wrote the same ones again would wait for it.
template <int Behind>
__device__ __forceinline__ void store_shared_4x16(const std::uint32_t (&at)[4],
                                                  const std::uint32_t (&x)[4][4]) {
    asm volatile(
        "st.shared.v4.b32 [%0+%20], {%4,%5,%6,%7};\n"
        "st.shared.v4.b32 [%1+%20], {%8,%9,%10,%11};\n"
        "st.shared.v4.b32 [%2+%20], {%12,%13,%14,%15};\n"
        "st.shared.v4.b32 [%3+%20], {%16,%17,%18,%19};" ::"r"(at[0]),
        "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(x[0][0]), "r"(x[0][1]), "r"(x[0][2]), "r"(x[0][3]),
        "r"(x[1][0]), "r"(x[1][1]), "r"(x[1][2]), "r"(x[1][3]), "r"(x[2][0]), "r"(x[2][1]), "r"(x[2][2]),
        "r"(x[2][3]), "r"(x[3][0]), "r"(x[3][1]), "r"(x[3][2]), "r"(x[3][3]), "n"(Behind)
        : "memory");
}
/// Four matrices of 8 rows of 16 bytes: lane i gives the address of row i % 8 of matrix i / 8, and gets word
/// i % 4 of row i / 4 of each. Transposed: of column i / 4.
template <bool Transposed = false>
__device__ __forceinline__ uint4 load_matrices(std::uint32_t at) {
    uint4 v;
    if constexpr (Transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(at));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(at));
    return v;
}
__device__ __forceinline__ void store_word(std::uint32_t at, std::uint32_t word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
}

__device__ __forceinline__ void store_words(std::uint32_t at, std::uint32_t a, std::uint32_t b) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ void store_half_word(std::uint32_t at, std::uint16_t half) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(half) : "memory");
}

/// Words of pages, asked for here and nowhere later: the compiler would move loads to where their result is
/// needed.
__device__ __forceinline__ std::uint32_t fetch_word(const std::uint32_t* from) {
    std::uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(from));
    return v;
}
__device__ __forceinline__ uint4 fetch_16(const uint4* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}
__device__ __forceinline__ std::uint32_t fetch_word(const std::uint16_t* from) {
    std::uint16_t v;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(from));
    return v;
}
__device__ __forceinline__ std::uint32_t fetch_word(const std::uint8_t* from) {
    std::uint32_t v;
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(from));
    return v;
}

__device__ __forceinline__ uint2 fetch_two_words(const uint2* from) {
    uint2 v;
    asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
    return v;
}

/// Waits for a word that was fetched. No later load comes earlier and no earlier one later: the assembler
/// takes it for a way out, which it is not, since a block has less than 2^24 bytes of shared memory.
__device__ __forceinline__ void wait_for(std::uint32_t word) {
    asm volatile(
        "{.reg .pred never; .reg .u32 zero;\n"
        "mov.u32 zero, %%dynamic_smem_size;\n"
        "shr.u32 zero, zero, 24;\n"
        "and.b32 zero, zero, %0;\n"
        "setp.ne.u32 never, zero, 0;\n"
        "@never exit;}\n" ::"r"(word)
        : "memory");
}

/// Words that other thread blocks read or have written in the same launch, without any order among them.
__device__ __forceinline__ void store_relaxed(std::uint32_t* to, std::uint32_t word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}
__device__ __forceinline__ void store_relaxed(uint4* to, const uint4& v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}
/// Loads only if `wanted`, without a branch, so that several are under way together.
__device__ __forceinline__ void load_relaxed_if(bool wanted, std::uint32_t& word, const std::uint32_t* from) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld.relaxed.gpu.global.u32 %0, [%1];}"
                 : "+r"(word)
                 : "l"(from), "r"(static_cast<std::uint32_t>(wanted)));
}
__device__ __forceinline__ void load_relaxed_if(bool wanted, uint4& v, const uint4* from) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];}"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
                 : "l"(from), "r"(static_cast<std::uint32_t>(wanted)));
}

/// Words that other devices read or have written, without any order among them.
__device__ __forceinline__ void store_system(uint4* to, const uint4& v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}
__device__ __forceinline__ uint4 load_system(const uint4* from) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}
__device__ __forceinline__ unsigned long long nanoseconds() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

/// 16 bytes from device memory to shared memory, past the first-level cache; behind the first `bytes` of them
/// zeros: nothing is read where that is 0.
__device__ __forceinline__ void copy_async(std::uint32_t to, const void* from, std::uint32_t bytes = 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}
/// 4 bytes, or zeros where `bytes` is 0.
__device__ __forceinline__ void copy_word_async(std::uint32_t to, const void* from, std::uint32_t bytes = 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
/// Waits until so many threads of the block, whole warps, stand at the barrier of this number;
/// __syncthreads() is number 0.
__device__ __forceinline__ void wait_at_barrier(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
/// Arrives where others wait, and does not wait.
__device__ __forceinline__ void arrive_at_barrier(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
/// Waits as wait_at_barrier(); is it true for one of the threads?
__device__ __forceinline__ bool any_at_barrier(int number, int threads, bool own) {
    std::uint32_t any;
    asm volatile(
        "{.reg .pred p, q; setp.ne.u32 p, %3, 0; bar.red.or.pred q, %1, %2, p; selp.u32 %0, 1, 0, q;}"
        : "=r"(any)
        : "r"(number), "r"(threads), "r"(static_cast<std::uint32_t>(own))
        : "memory");
    return any != 0;
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most `Pending` of this thread's groups are still under way.
template <int Pending>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

/// Asks for memory in the second-level cache: a line, or `bytes` by all lanes of a warp.
__device__ __forceinline__ void prefetch_line(const void* at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}
__device__ __forceinline__ void prefetch_lines(const std::byte* from, int bytes, int lane) {
    constexpr int line = 128;
#pragma unroll 1
    for (int at = lane * line; at < bytes; at += 32 * line) prefetch_line(from + at);
}

/// A word by which another thread block says that what it wrote before can be read: loads behind this one see
/// that, also where the multiprocessor holds older values.
__device__ __forceinline__ unsigned load_acquired(const unsigned* from) {
    unsigned v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

/// Programmatic dependent launch: lets the next launch of the stream take its place early, and waits until
/// the one before has finished. Both do nothing where the launch was an ordinary one.
__device__ __forceinline__ void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Clusters: thread blocks of sm_90 and later that see each other's shared memory.
__device__ __forceinline__ int cluster_rank() {
    std::uint32_t rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
#endif
    return static_cast<int>(rank);
}
/// Waits for all threads of the cluster; barriers initialized before are then known to all.
__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile(
        "fence.mbarrier_init.release.cluster;\n"
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
#endif
}
/// What stands at this place of shared memory in a block of the cluster.
template <class T>
__device__ __forceinline__ T* in_block(int rank, T* p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm("mapa.u64 %0, %1, %2;" : "=l"(p) : "l"(p), "r"(rank));
#endif
    return p;
}
/// Dynamic shared memory of this block (emulated: of its part of that of the cluster).
__device__ __forceinline__ std::byte* own_memory(std::byte* dynamic) { return dynamic; }

}}}  // namespace kvq::cuda::detail
