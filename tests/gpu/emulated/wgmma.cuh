// The instructions of include/kvq/cuda/arch/wgmma.cuh on the CPU that latent attention uses, where a program
// says that it has code for sm_90a (__CUDA_ARCH_FEAT_SM90_ALL). A product is done where it is asked for:
// whoever asks too early finds NaN, but whoever forgets to wait for it is not found. Clusters are not
// emulated.
#pragma once

#include "architecture.cuh"
#include "ptx.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

// Beside those of ptx.cuh: where kernels with the 128-byte swizzle have their shared memory.
alignas(1024) inline thread_local std::byte swizzled_memory[emulated::most_shared_memory];

inline const bool spoils_swizzled = [] {
    emulated::spoil_shared_memory = [](std::size_t bytes) {
        for (std::byte* const memory : {shared, page_memory, swizzled_memory})
            std::memset(memory, 0xff, bytes);
    };
    return spoils;
}();

inline std::uint32_t operand_at(std::uint32_t address) { return ((address & 0x3ffffu) >> 4) | 1u << 16; }
inline std::uint32_t transposed_operand_at(std::uint32_t address, int bytes) {
    return ((address & 0x3ffffu) >> 4) | static_cast<std::uint32_t>(bytes >> 4) << 16;
}
inline std::uint64_t operand(std::uint32_t low, int bytes) {
    return std::uint64_t{0x40000040u} << 32 | (low + static_cast<std::uint32_t>(bytes >> 4));
}
inline void products_begin() {}
inline void products_commit() {}
template <int Pending>
void products_wait() {}
template <int N>
void products_there(float (&)[N]) {}
template <class Shape>
void take_registers() {
    static_assert(registers_suffice<Shape>);
}
template <class Shape>
void leave_registers() {}
inline void publish_to_products() {}

/// Number k of row (or column) i of an operand, as the bits of its descriptor say.
inline float operand_number(std::uint64_t operand, bool transposed, int i, int k) {
    static const std::vector<float> floats = [] {
        std::vector<float> all(65536);
        for (std::size_t bits = 0; bits < all.size(); ++bits)
            all[bits] = static_cast<float>(float16::from_bits(static_cast<std::uint16_t>(bits)));
        return all;
    }();
    const auto field = [&](int shift) { return static_cast<int>(operand >> shift & 0x3fff) << 4; };
    const int start = field(0), next_64 = field(16), next_8 = field(32);
    int at = start + (transposed ? i / 64 * next_64 + k / 8 * next_8 + k % 8 * 128 + i % 64 * 2
                                 : i / 8 * next_8 + i % 8 * 128 + k * 2);
    at ^= (at >> 7 & 7) << 4;
    if (at + 2 > static_cast<int>(emulated::most_shared_memory))
        emulated::fail("a product reads behind shared memory");
    std::uint16_t bits;
    std::memcpy(&bits, swizzled_memory + at, sizeof bits);
    return floats[bits];
}
/// Every thread has its own numbers of D.
template <int N>
void multiply(float (&d)[N], std::uint64_t a, std::uint64_t b, bool accumulate, bool transposed_a,
              bool transposed_b) {
    const int warp = emulated::thread->number / 32 % 4, g = emulated::thread->lane / 4,
              t = emulated::thread->lane % 4;
    float rows[2][16];
    for (int r = 0; r < 2; ++r)
        for (int k = 0; k < 16; ++k) rows[r][k] = operand_number(a, transposed_a, 16 * warp + g + 8 * r, k);
    for (int i = 0; i < N / 2; ++i) {
        const int column = i / 2 * 8 + 2 * t + i % 2;
        float sums[2] = {};
        for (int k = 0; k < 16; ++k) {
            const float x = operand_number(b, transposed_b, column, k);
            for (int r = 0; r < 2; ++r) sums[r] += rows[r][k] * x;
        }
        for (int r = 0; r < 2; ++r) {
            float& to = d[i / 2 * 4 + 2 * r + i % 2];
            to = accumulate ? to + sums[r] : sums[r];
        }
    }
}
template <bool Accumulate, bool Transposed, int N>
void multiply_few(float (&d)[N], std::uint64_t a, std::uint64_t b) {
    multiply(d, a, b, Accumulate, Transposed, false);
}
template <bool Accumulate, bool Transposed = false, int N>
void multiply_shared(float (&d)[N], std::uint64_t a, std::uint64_t b) {
    multiply(d, a, b, Accumulate, false, Transposed);
}

/// A from registers of the lanes.
inline void multiply_registers(float (&d)[32], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                               std::uint32_t a3, std::uint64_t b) {
    const auto all = emulated::exchange(emulated::meeting::product, a0, a1, a2, a3, 0u, 0u);
    const int g = emulated::thread->lane / 4, t = emulated::thread->lane % 4;
    for (int i = 0; i < 16; ++i)
        for (int k = 0; k < 16; ++k) {
            const float x = operand_number(b, false, i / 2 * 8 + 2 * t + i % 2, k);
            for (int r = 0; r < 2; ++r) {
                const std::uint32_t two = all[static_cast<std::size_t>(4 * g + k % 8 / 2)][r + k / 8 * 2];
                d[i / 2 * 4 + 2 * r + i % 2] +=
                    static_cast<float>(float16::from_bits(static_cast<std::uint16_t>(two >> k % 2 * 16))) * x;
            }
        }
}

/// What a barrier in shared memory holds.
struct phase_barrier {
    std::uint16_t arrivals, missing;
    std::uint32_t phase;
};
inline void barrier_init(std::uint32_t at, int arrivals) {
    const auto n = static_cast<std::uint16_t>(arrivals);
    write_shared(at, phase_barrier{n, n, 0});
}
inline void barrier_arrive(std::uint32_t at) {
    auto b = read_shared<phase_barrier>(at);
    if (--b.missing == 0) {
        b.missing = b.arrivals;
        ++b.phase;
    }
    write_shared(at, b);
}
inline void barrier_wait(std::uint32_t at, std::uint32_t parity) {
    emulated::wait_until([=] { return (read_shared<phase_barrier>(at).phase & 1u) != parity; });
}
inline bool barrier_passed(std::uint32_t at, std::uint32_t parity) {
    return (read_shared<phase_barrier>(at).phase & 1u) != parity;
}

// Kernels with clusters compile, and are not run.
[[noreturn]] inline void no_clusters() { emulated::fail("clusters are not emulated"); }
inline int cluster_rank() { no_clusters(); }
inline void cluster_wait() { no_clusters(); }
inline std::uint32_t place_in(int, std::uint32_t) { no_clusters(); }
inline void barrier_arrive_cluster(std::uint32_t) { no_clusters(); }
inline void barrier_expect(std::uint32_t, int) { no_clusters(); }
inline void copy_bulk_to(std::uint32_t, std::uint32_t, int, std::uint32_t) { no_clusters(); }
inline void multiply_shared_wide(float (&)[128], std::uint64_t, std::uint64_t) { no_clusters(); }
template <bool Transposed, int N>
void multiply_registers(float (&)[N], std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t,
                        std::uint64_t) {
    no_clusters();
}
inline int read_lane() { return emulated::thread->lane; }

template <bool Transposed>
void store_matrices(std::uint32_t at, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
    const int lane = emulated::thread->lane, row = lane / 4, word = lane % 4;
    const auto places = emulated::exchange(emulated::meeting::product, at, 0u, 0u, 0u, 0u, 0u);
    const std::uint32_t own[4] = {a, b, c, d};
    for (int m = 0; m < 4; ++m)
        for (int k = 0; k < 2; ++k) {
            const int line = Transposed ? 2 * word + k : row, number = Transposed ? row : 2 * word + k;
            write_shared(places[8 * m + line][0] + 2u * static_cast<std::uint32_t>(number),
                         static_cast<std::uint16_t>(own[m] >> 16 * k));
        }
}

}}}  // namespace kvq::cuda::detail

#endif
