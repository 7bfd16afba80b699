// Definitions of workspace.hpp.
#pragma once

#include "allocate.hpp"
#include "workspace.hpp"

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC workspace::workspace(std::pmr::memory_resource* memory) noexcept : memory_(memory) {}

KVQ_FUNC workspace::workspace(workspace&& other) noexcept
    : memory_(other.memory_), data_(other.data_), size_(other.size_) {
    other.data_ = nullptr;
    other.size_ = 0;
}

KVQ_FUNC std::byte* workspace::reserve(std::size_t bytes) {
    if (bytes > size_) {
        release();
        data_ = static_cast<std::byte*>(detail::allocate_bytes(*memory_, bytes, 64));
        size_ = bytes;
    }
    return data_;
}

KVQ_FUNC void workspace::release() noexcept {
    if (data_) memory_->deallocate(data_, size_, 64);
    data_ = nullptr;
    size_ = 0;
}

}}
