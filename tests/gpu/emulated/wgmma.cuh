// The instructions of include/kvq/cuda/arch/wgmma.cuh on the CPU that latent attention uses, where a program
// says that it has code for sm_90a (__CUDA_ARCH_FEAT_SM90_ALL). A product is done where it is asked for:
// whoever asks too early finds NaN, but whoever forgets to wait for it is not found. Copies to the other
// block of a cluster take place when they are waited for.
#pragma once

#include "architecture.cuh"
#include "ptx.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

// Beside those of ptx.cuh: where kernels with the 128-byte swizzle have their shared memory.
alignas(1024) inline thread_local std::byte swizzled_memory[emulated::most_cluster * block_bytes];

inline const bool spoils_swizzled = [] {
    emulated::spoil_shared_memory = [](std::size_t bytes, int blocks) {
        std::memset(shared, 0xff, bytes);
        for (std::byte* const memory : {page_memory, swizzled_memory})
            for (int i = 0; i < blocks; ++i) std::memset(memory + i * block_bytes, 0xff, bytes);
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
template <int Pending>
void products_wait_behind(bool) {}
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
    std::memcpy(&bits, swizzled_memory + own_part() + at, sizeof bits);
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

/// The same with 256 columns, B transposed.
inline void multiply_shared_wide(float (&d)[128], std::uint64_t a, std::uint64_t b) {
    multiply(d, a, b, true, false, true);
}

/// A from registers of the lanes.
template <bool Transposed = false, int N>
void multiply_registers(float (&d)[N], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                        std::uint64_t b) {
    const auto all = emulated::exchange(emulated::meeting::product, a0, a1, a2, a3, 0u, 0u);
    const int g = emulated::thread->lane / 4, t = emulated::thread->lane % 4;
    for (int i = 0; i < N / 2; ++i)
        for (int k = 0; k < 16; ++k) {
            const float x = operand_number(b, Transposed, i / 2 * 8 + 2 * t + i % 2, k);
            for (int r = 0; r < 2; ++r) {
                const std::uint32_t two = all[static_cast<std::size_t>(4 * g + k % 8 / 2)][r + k / 8 * 2];
                d[i / 2 * 4 + 2 * r + i % 2] +=
                    static_cast<float>(float16::from_bits(static_cast<std::uint16_t>(two >> k % 2 * 16))) * x;
            }
        }
}

/// Copies to shared memory that are under way.
struct bulk_copy {
    std::uint32_t to;
    const void* from;
    int bytes;
    std::uint32_t barrier;
};
inline thread_local std::vector<bulk_copy> bulk_copies;

/// What a barrier in shared memory holds. bytes: that are still to come.
struct phase_barrier {
    std::uint8_t arrivals, missing;
    std::uint16_t phase;
    std::int32_t bytes;
};
template <class F>
void change_barrier(std::uint32_t at, F&& f) {
    auto b = read_shared<phase_barrier>(at);
    f(b);
    if (b.missing == 0 && b.bytes == 0) {
        b.missing = b.arrivals;
        ++b.phase;
    }
    write_shared(at, b);
}
inline void barrier_init(std::uint32_t at, int arrivals) {
    const auto n = static_cast<std::uint8_t>(arrivals);
    write_shared(at, phase_barrier{n, n, 0, 0});
}
inline void barrier_arrive(std::uint32_t at) {
    change_barrier(at, [](phase_barrier& b) { --b.missing; });
}
inline void barrier_expect(std::uint32_t at, int bytes) {
    change_barrier(at, [&](phase_barrier& b) {
        --b.missing;
        b.bytes += bytes;
    });
}
inline bool barrier_passed(std::uint32_t at, std::uint32_t parity) {
    return (read_shared<phase_barrier>(at).phase & 1u) != parity;
}
/// Finishes the copies that a barrier counts.
inline void finish_copies(std::uint32_t barrier) {
    const std::vector<bulk_copy> all = std::exchange(bulk_copies, {});
    for (const bulk_copy& c : all)
        if (c.barrier != barrier) {
            bulk_copies.push_back(c);
        } else {
            std::memcpy(at_shared(c.to, 16), c.from, static_cast<std::size_t>(c.bytes));
            change_barrier(barrier, [&](phase_barrier& b) { b.bytes -= c.bytes; });
        }
}
inline void barrier_wait(std::uint32_t at, std::uint32_t parity) {
    emulated::wait_until([=] {
        if (!barrier_passed(at, parity)) finish_copies(at);
        return barrier_passed(at, parity);
    });
}

inline std::uint32_t place_in(int rank, std::uint32_t at) {
    return at - at % declared_bytes + static_cast<std::uint32_t>(rank) * block_bytes + at % block_bytes;
}
inline void barrier_arrive_cluster(std::uint32_t there) { barrier_arrive(there); }
inline void copy_bulk_to(std::uint32_t to, std::uint32_t from, int bytes, std::uint32_t barrier) {
    bulk_copies.push_back({to, at_shared(from, 16), bytes, barrier});
}
inline void copy_bulk(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier) {
    bulk_copies.push_back({to, from, bytes, barrier});
}
inline void copy_bulk_to_all(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier,
                             int blocks) {
    for (int rank = 0; rank < blocks; ++rank)
        copy_bulk(place_in(rank, to), from, bytes, place_in(rank, barrier));
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
