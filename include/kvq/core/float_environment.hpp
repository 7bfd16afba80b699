// Scope guard: its thread rounds to nearest and keeps subnormal values, for any setting of the program.
//
// Programs that link crtfastmath.o or call torch.set_flush_denormal read subnormal floats as zero. The
// kernels that quantize 16-bit values compute with subnormal floats. Contract: the bytes of pages do not
// depend on such settings. If there is nothing to change, it costs a few cycles. x86 (MXCSR) and AArch64
// (FPCR); elsewhere it does nothing.
#pragma once

#include <cstdint>

#include "../config.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

class default_arithmetic {
public:
    default_arithmetic() noexcept : saved_(get()) {
        if ((saved_ & changed) != 0) set(saved_ & ~changed);
    }
    ~default_arithmetic() {
        if ((saved_ & changed) != 0) set(saved_);
    }
    default_arithmetic(const default_arithmetic&) = delete;
    default_arithmetic& operator=(const default_arithmetic&) = delete;

private:
#if defined(__SSE2__)
    using control = std::uint32_t;
    static constexpr control changed = 0xe040;  // flush to zero, rounding, denormals are zeros
    static control get() noexcept {
        control c;
        asm volatile("stmxcsr %0" : "=m"(c));
        return c;
    }
    static void set(control c) noexcept { asm volatile("ldmxcsr %0" : : "m"(c) : "memory"); }
#elif defined(__aarch64__)
    using control = std::uint64_t;
    static constexpr control changed = 0x1c80000;  // flush to zero (of 16-bit values too), rounding
    static control get() noexcept {
        control c;
        asm volatile("mrs %0, fpcr" : "=r"(c));
        return c;
    }
    static void set(control c) noexcept { asm volatile("msr fpcr, %0" : : "r"(c) : "memory"); }
#else
    using control = int;
    static constexpr control changed = 0;
    static control get() noexcept { return 0; }
    static void set(control) noexcept {}
#endif
    control saved_;
};

}}}  // namespace kvq::detail
