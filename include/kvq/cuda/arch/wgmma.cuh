// Warpgroup products, registers and barriers of compute capability 9.0 (sm_90a alone).
//
//   D[64][N] += A[64][16] B[16][N]     halves, float sums; A in registers or shared memory, B in shared
//                                      memory
//
// Shared operands are K-major with the 128-byte swizzle (prefill_tile.cuh): rows of 128 bytes, 8 rows to 1024
// bytes, tiles on multiples of 1024 bytes. A step of 16 columns is 32 bytes further. Lane (g, t) of warp w
// holds of D rows 16 w + g (registers 4i, 4i + 1) and + 8 (4i + 2, 4i + 3), columns 8i + 2t and 8i + 2t + 1.
// Contract: registers of D and A must not be touched between the product and the wait for it.
// Source: PTX ISA 8.x, "Asynchronous warpgroup level matrix instructions".
#pragma once

#include "architecture.cuh"
#include "ptx.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

#if KVQ_WARPGROUP_PRODUCTS

/// Describes a shared operand: 128-byte swizzle, 1024 bytes from one group of 8 rows to the next. Only the
/// low word depends on the place.
__device__ __forceinline__ std::uint32_t operand_at(std::uint32_t address) {
    return ((address & 0x3ffffu) >> 4) | 1u << 16;
}
/// The same, read transposed: so many bytes from 64 rows of the operand to the next 64.
__device__ __forceinline__ std::uint32_t transposed_operand_at(std::uint32_t address, int bytes) {
    return ((address & 0x3ffffu) >> 4) | static_cast<std::uint32_t>(bytes >> 4) << 16;
}
/// The operand `bytes` further.
__device__ __forceinline__ std::uint64_t operand(std::uint32_t low, int bytes) {
    return std::uint64_t{0x40000040u} << 32 | (low + static_cast<std::uint32_t>(bytes >> 4));
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// All warps of a warpgroup must wait at the same place.
template <int Pending>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
/// The same behind what `rare` depends on, which the compiler would move behind the wait otherwise.
template <int Pending>
__device__ __forceinline__ void products_wait_behind(bool rare) {
    if (rare) asm volatile("nanosleep.u32 0;" ::: "memory");
    products_wait<Pending>();
}

/// Tells the compiler that products have written these registers before the wait that precedes this.
template <int N>
__device__ __forceinline__ void products_there(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The registers of D as operands, and the places of as many in a product.
#define KVQ_FLOATS_8(d, i)                                                                      \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define KVQ_FLOATS_16(d, i) KVQ_FLOATS_8(d, i), KVQ_FLOATS_8(d, i + 8)
#define KVQ_FLOATS_32(d, i) KVQ_FLOATS_16(d, i), KVQ_FLOATS_16(d, i + 16)
#define KVQ_FLOATS_64(d, i) KVQ_FLOATS_32(d, i), KVQ_FLOATS_32(d, i + 32)
#define KVQ_PLACES_32                                                                           \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24" \
    ",%25,%26,%27,%28,%29,%30,%31"
#define KVQ_PLACES_64                                                                              \
    KVQ_PLACES_32                                                                                  \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54" \
    ",%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define KVQ_PLACES_128                                                                             \
    KVQ_PLACES_64                                                                                  \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86" \
    ",%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107" \
    ",%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125"   \
    ",%126,%127"

/// D += A B, A from registers.
__device__ __forceinline__ void multiply_registers(float (&d)[32], std::uint32_t a0, std::uint32_t a1,
                                                   std::uint32_t a2, std::uint32_t a3, std::uint64_t b) {
    asm volatile(
        "{.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" KVQ_PLACES_32
        "}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;}"
        : KVQ_FLOATS_32(d, 0)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

/// D (+)= A B, both from shared memory. Accumulate: false writes D.
template <bool Accumulate>
__device__ __forceinline__ void multiply_shared(float (&d)[32], std::uint64_t a, std::uint64_t b) {
    asm volatile(
        "{.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" KVQ_PLACES_32 "}, %32, %33, p, 1, 1, 0, 0;}"
        : KVQ_FLOATS_32(d, 0)
        : "l"(a), "l"(b), "n"(Accumulate ? 1 : 0));
}
/// The same with 128 columns. Transposed: B stands as [16][128], columns side by side
/// (transposed_operand_at).
template <bool Accumulate, bool Transposed = false>
__device__ __forceinline__ void multiply_shared(float (&d)[64], std::uint64_t a, std::uint64_t b) {
    asm volatile(
        "{.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" KVQ_PLACES_64 "}, %64, %65, p, 1, 1, 0, %67;}"
        : KVQ_FLOATS_64(d, 0)
        : "l"(a), "l"(b), "n"(Accumulate ? 1 : 0), "n"(Transposed ? 1 : 0));
}
/// D += A B, A from registers.
__device__ __forceinline__ void multiply_registers(float (&d)[64], std::uint32_t a0, std::uint32_t a1,
                                                   std::uint32_t a2, std::uint32_t a3, std::uint64_t b) {
    asm volatile(
        "{.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" KVQ_PLACES_64
        "}, {%64,%65,%66,%67}, %68, p, 1, 1, 0;}"
        : KVQ_FLOATS_64(d, 0)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

/// The same with 256 columns. Transposed: as above.
template <bool Transposed = false>
__device__ __forceinline__ void multiply_registers(float (&d)[128], std::uint32_t a0, std::uint32_t a1,
                                                   std::uint32_t a2, std::uint32_t a3, std::uint64_t b) {
    asm volatile(
        "{.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" KVQ_PLACES_128
        "}, {%128,%129,%130,%131}, %132, p, 1, 1, %133;}"
        : KVQ_FLOATS_64(d, 0), KVQ_FLOATS_64(d, 64)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(Transposed ? 1 : 0));
}

/// The same with 256 columns, A from shared memory, B transposed.
__device__ __forceinline__ void multiply_shared_wide(float (&d)[128], std::uint64_t a, std::uint64_t b) {
    asm volatile(
        "{.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" KVQ_PLACES_128
        "}, %128, %129, p, 1, 1, 0, 1;}"
        : KVQ_FLOATS_64(d, 0), KVQ_FLOATS_64(d, 64)
        : "l"(a), "l"(b));
}

/// The same with few columns. Transposed: A stands as [16][64], its rows side by side.
template <bool Accumulate, bool Transposed>
__device__ __forceinline__ void multiply_few(float (&d)[8], std::uint64_t a, std::uint64_t b) {
    asm volatile(
        "{.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7"
        "}, %8, %9, p, 1, 1, %11, 0;}"
        : KVQ_FLOATS_8(d, 0)
        : "l"(a), "l"(b), "n"(Accumulate ? 1 : 0), "n"(Transposed ? 1 : 0));
}
template <bool Accumulate, bool Transposed>
__device__ __forceinline__ void multiply_few(float (&d)[16], std::uint64_t a, std::uint64_t b) {
    asm volatile(
        "{.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
        "}, %16, %17, p, 1, 1, %19, 0;}"
        : KVQ_FLOATS_16(d, 0)
        : "l"(a), "l"(b), "n"(Accumulate ? 1 : 0), "n"(Transposed ? 1 : 0));
}

#undef KVQ_FLOATS_8
#undef KVQ_FLOATS_16
#undef KVQ_FLOATS_32
#undef KVQ_FLOATS_64
#undef KVQ_PLACES_32
#undef KVQ_PLACES_64
#undef KVQ_PLACES_128

/// The registers of every thread of this warpgroup are those of a shape's consumers, or producers, from here
/// on.
template <class Shape>
__device__ __forceinline__ void take_registers() {
    static_assert(registers_suffice<Shape>);
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shape::consumer_registers));
}
template <class Shape>
__device__ __forceinline__ void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shape::producer_registers));
}

/// The lane, read anew: as a number of the whole kernel it would be spilled where registers are few.
__device__ __forceinline__ int read_lane() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

/// Makes stores to shared memory, this thread's and those that it knows of by a barrier, visible to products.
__device__ __forceinline__ void publish_to_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_init(std::uint32_t at, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
/// Arrives, and lets the phase wait for so many bytes that copies announce at this barrier.
__device__ __forceinline__ void barrier_expect(std::uint32_t at, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
/// Arrives; what this thread has written before is then seen by who waits.
__device__ __forceinline__ void barrier_arrive(std::uint32_t at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
/// Waits until the phase of this parity is over.
__device__ __forceinline__ void barrier_wait(std::uint32_t at, std::uint32_t parity) {
    asm volatile(
        "{.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;}\n" ::"r"(at),
        "r"(parity)
        : "memory");
}

/// Is the phase of this parity over? The same for all lanes of a warp.
__device__ __forceinline__ bool barrier_passed(std::uint32_t at, std::uint32_t parity) {
    std::uint32_t passed;
    asm volatile(
        "{.reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;}"
        : "=r"(passed)
        : "r"(at), "r"(parity)
        : "memory");
    return __all_sync(0xffffffffu, passed != 0);
}

// Clusters (ptx.cuh).
/// The same place in the shared memory of a block of the cluster.
__device__ __forceinline__ std::uint32_t place_in(int rank, std::uint32_t at) {
    std::uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}
/// Arrives at a barrier of any block of the cluster (place_in), without a fence: what came before are
/// products that were waited for.
__device__ __forceinline__ void barrier_arrive_cluster(std::uint32_t there) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}
/// Brings a multiple of 16 bytes of device memory to the second-level cache.
__device__ __forceinline__ void prefetch_bulk(const void* from, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
/// A multiple of 16 bytes from device memory to this block's shared memory; `barrier` counts them.
__device__ __forceinline__ void copy_bulk(std::uint32_t to, const void* from, int bytes,
                                          std::uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
/// The same to this place in all `blocks` blocks of the cluster; the barrier at this place of each counts
/// them.
__device__ __forceinline__ void copy_bulk_to_all(std::uint32_t to, const void* from, int bytes,
                                                 std::uint32_t barrier, int blocks) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], "
        "%2, "
        "[%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "h"(static_cast<std::uint16_t>((1 << blocks) - 1))
        : "memory");
}
/// Four matrices of 8 rows of 16 bytes: lane i gives the address of row i % 8 of matrix i / 8, and has word i
/// % 4 of row i / 4 of each. Transposed: of column i % 8.
template <bool Transposed>
__device__ __forceinline__ void store_matrices(std::uint32_t at, std::uint32_t a, std::uint32_t b,
                                               std::uint32_t c, std::uint32_t d) {
    if constexpr (Transposed)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1,%2,%3,%4};" ::"r"(at),
                     "r"(a), "r"(b), "r"(c), "r"(d)
                     : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a),
                     "r"(b), "r"(c), "r"(d)
                     : "memory");
}
/// As copy_bulk(), from this block's shared memory to another's; to, barrier: there (place_in).
__device__ __forceinline__ void copy_bulk_to(std::uint32_t to, std::uint32_t from, int bytes,
                                             std::uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            to),
        "r"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

#endif

}}}  // namespace kvq::cuda::detail
