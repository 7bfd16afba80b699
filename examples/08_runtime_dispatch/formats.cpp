// Compiled once for each instruction set, with its own flags and -DFORMATS_ARCH=avx2, ... All functions of
// one instruction set are in a namespace of that name, so the objects share no function of kvq.
#include "formats.hpp"

#include <kvq/cpu/simd.hpp>
#include <kvq/schemes/kivi.hpp>

#define JOIN_NAMES(a, b) a##b
#define JOINED(a, b) JOIN_NAMES(a, b)

namespace {
using scheme = kvq::kivi<4>;
using backend = kvq::simd<kvq::arch::FORMATS_ARCH>;
}  // namespace

kvq::format JOINED(keys_, FORMATS_ARCH)() { return kvq::make_format<scheme::keys, backend>(); }
kvq::format JOINED(values_, FORMATS_ARCH)() { return kvq::make_format<scheme::values, backend>(); }
