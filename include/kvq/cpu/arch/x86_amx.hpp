// AMX: products of tiles in one instruction, for several operands at once: of bytes (16 x 64 by 64 x 16) and
// of bfloat16 (16 x 32 by 32 x 16).
//
//   C[i][r] += sum_k A[i][k] B[r][k]     A: rows of signed bytes; B: words of four unsigned bytes, row k / 4
//                                        holds those of all r
//
// B has the layout of vectors of codes (pack/tile_layout.hpp), so unpacked codes are stored in their order;
// cpu/product/tile_product.hpp.
// The same with rows of two bfloat16 to a word, and sums of floats. Contract: sums of bytes have 32 bits and
// are exact. Between begin() and end() the thread's tile registers have the shapes of
// the kernels, afterwards their former shapes; their contents are lost, as the calling convention allows. A
// process must request tiles from Linux once; ready() does it. Source: Intel 64 and IA-32 Architectures SDM,
// volume 1, chapter 18.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "../../config.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace arch {

// Inline assembly: intrinsics of g++ 12 do not declare that they read and write memory.
struct amx_tiles {
    /// Can this process use tiles? The first call requests them from the operating system.
    static bool ready() noexcept {
        static const bool granted = [] {
#if defined(__linux__) && defined(SYS_arch_prctl)
            constexpr long request_component = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM
            return syscall(SYS_arch_prctl, request_component, tile_data) == 0;
#else
            return false;
#endif
        }();
        return granted;
    }

    struct alignas(64) shapes {
        std::uint8_t palette = 0, start_row = 0, reserved[14] = {};
        std::uint16_t row_bytes[16] = {};
        std::uint8_t rows[16] = {};
    };

    /// Tiles 0, 1 and 4 get first_rows rows, tiles 2, 3 and 5 second_rows, tiles 6 and 7 sixteen. 1 to 16
    /// rows of 64 bytes. Returns the former shapes, which other code of the thread may need.
    static shapes begin(int first_rows, int second_rows) noexcept {
        shapes before, wanted;
        __asm__ volatile("sttilecfg %0" : "=m"(before));
        wanted.palette = 1;
        for (int tile = 0; tile < 8; ++tile) {
            const bool first = tile < 2 || tile == 4, second = !first && tile < 6;
            wanted.row_bytes[tile] = 64;
            wanted.rows[tile] = static_cast<std::uint8_t>(first ? first_rows : second ? second_rows : 16);
        }
        __asm__ volatile("ldtilecfg %0" ::"m"(wanted));
        return before;
    }
    static void end(const shapes& before) noexcept { __asm__ volatile("ldtilecfg %0" ::"m"(before)); }

    template <int Tile>
    static KVQ_INLINE void zero() {
        __asm__ volatile("tilezero %%tmm%c0" ::"i"(Tile));
    }
    /// Rows are `stride` bytes apart.
    template <int Tile>
    static KVQ_INLINE void load(const std::byte* from, std::ptrdiff_t stride) {
        __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile) : "memory");
    }
    template <int Tile>
    static KVQ_INLINE void store(std::byte* to, std::ptrdiff_t stride) {
        __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Tile) : "memory");
    }
    template <int C, int A, int B>
    static KVQ_INLINE void multiply() {
        __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
    template <int C, int A, int B>
    static KVQ_INLINE void multiply_floats() {
        __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
};

}}}  // namespace kvq::arch
