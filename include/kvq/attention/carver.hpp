// Aligned parts of one buffer, in the order in which they are taken.
//
// Contract: bytes are counted with the code that carves them: carver(nullptr) takes the same parts and gives
// null for each.
#pragma once

#include <cstddef>

#include "../core/bits.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

/// Cuts a buffer into aligned parts. Without a buffer it only counts bytes.
class carver {
public:
    explicit carver(std::byte* memory) noexcept : memory_(memory) {}
    std::byte* take(std::size_t bytes) noexcept {
        std::byte* const p = memory_ ? memory_ + used_ : nullptr;
        used_ += round_up(bytes, std::size_t{64});
        return p;
    }
    float* floats(std::size_t n) noexcept { return reinterpret_cast<float*>(take(n * sizeof(float))); }
    std::size_t used() const noexcept { return used_; }

private:
    std::byte* memory_;
    std::size_t used_ = 0;
};

}}}  // namespace kvq::detail
