// Scratch memory of attention, owned by the caller: once it is large enough, attention allocates nothing.
//
// Size: cache::attention_workspace(tokens, q_heads, q_tokens, threads). Contract: reserve() makes one
// allocation from the memory resource, or throws and holds nothing; size() is the held size. One thread at a
// time.
#pragma once

#include <cstddef>
#include <memory_resource>

#include "../config.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// A buffer that only grows. Not for use by two attention calls at once.
class workspace {
public:
    explicit workspace(std::pmr::memory_resource* memory = std::pmr::get_default_resource()) noexcept;
    workspace(const workspace&) = delete;
    workspace& operator=(const workspace&) = delete;
    workspace(workspace&& other) noexcept;
    ~workspace() { release(); }

    /// At least `bytes` bytes, aligned to 64. Contents are lost when it grows. Raises kvq::out_of_memory for
    /// more bytes than PTRDIFF_MAX, else what the memory resource raises; then it holds nothing.
    std::byte* reserve(std::size_t bytes);
    std::size_t size() const noexcept { return size_; }

private:
    void release() noexcept;

    std::pmr::memory_resource* memory_;
    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
};

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "workspace-inl.hpp"
#endif
