// A section of float16 values in a block of a scheme: one value per slot, the section padded to 16 bytes.
//
//   bytes = 2 n, rounded up to a multiple of 16
//
// Contract: store_half rounds to nearest, ties to even, and saturates at +-65504; load_half is exact.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <kvq/core/float_formats.hpp>

namespace baselines {

/// `bytes` rounded up to a multiple of 16, as every section of a block is.
constexpr std::size_t padded(std::size_t bytes) noexcept { return (bytes + 15) / 16 * 16; }

/// Bytes of a section of `slots` values.
constexpr std::size_t half_section(int slots) noexcept { return padded(2 * static_cast<std::size_t>(slots)); }

/// Stores `value`, which is not NaN, in slot `slot` of the section.
inline void store_half(std::byte* section, int slot, double value) noexcept {
    constexpr double limit = 65504.0;
    const kvq::float16 stored(static_cast<float>(std::clamp(value, -limit, limit)));
    std::memcpy(section + 2 * static_cast<std::size_t>(slot), &stored, sizeof stored);
}

/// Loads the value in slot `slot` of the section.
inline float load_half(const std::byte* section, int slot) noexcept {
    kvq::float16 stored;
    std::memcpy(&stored, section + 2 * static_cast<std::size_t>(slot), sizeof stored);
    return static_cast<float>(stored);
}

}  // namespace baselines
