// Device memory of a cache: who allocates it, and the pages of one format in it.
//
// Pages of a format are one allocation with the same page numbers in every layer of a group, so these share
// one block table. A pool that is full moves to a larger one: that waits for the stream, happens between
// steps only, and gives graphs another generation. The memory is zeroed once: bytes of a page that no value
// has are zero, as on the CPU.
// Contract: allocated() is what the allocator was asked for. An allocation that fails leaves the pool as it
// was.
#pragma once

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../../core/allocate.hpp"
#include "../../core/bits.hpp"
#include "../layout/status.hpp"
#include "../store/page_memory.hpp"
#include "free_pages.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

/// Where device memory comes from. allocate: 256-byte aligned memory, or null if there is none.
struct device_allocator {
    void* (*allocate)(std::size_t bytes, void* user) = [](std::size_t bytes, void*) {
        void* p = nullptr;
        if (cudaMalloc(&p, bytes) == cudaSuccess) return p;
        (void)cudaGetLastError();
        return static_cast<void*>(nullptr);
    };
    void (*release)(void* p, std::size_t bytes, void* user) = [](void* p, std::size_t, void*) {
        (void)cudaFree(p);
    };
    void* user = nullptr;
};

namespace detail {

/// A range of device memory.
class device_memory {
public:
    device_memory() = default;
    device_memory(device_memory&& other) noexcept
        : from_(other.from_),
          data_(std::exchange(other.data_, nullptr)),
          bytes_(std::exchange(other.bytes_, 0)) {}
    device_memory& operator=(device_memory&& other) noexcept {
        std::swap(from_, other.from_);
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~device_memory() {
        if (data_ != nullptr) from_.release(data_, bytes_, from_.user);
    }

    /// Zeroed memory, in the order of the stream. Must be empty before.
    status allocate(const device_allocator& from, std::size_t bytes, const char* what, cudaStream_t stream) {
        from_ = from;
        const bool possible = bytes > 0 && bytes <= common::most_bytes;
        data_ = possible ? from.allocate(bytes, from.user) : nullptr;
        if (data_ == nullptr && bytes > 0) {
            status s = bad_value("%zu bytes of device memory for %s are not there", bytes, what);
            s.code = cudaErrorMemoryAllocation;
            return s;
        }
        bytes_ = bytes;
        if (bytes == 0) return {};
        const cudaError_t code = cudaMemsetAsync(data_, 0, bytes, stream);
        return code == cudaSuccess ? status{} : runtime_error(code, "zeroing device memory");
    }
    template <class T = std::byte>
    T* as() const noexcept {
        return static_cast<T*>(data_);
    }
    std::size_t bytes() const noexcept { return bytes_; }

private:
    device_allocator from_;
    void* data_ = nullptr;
    std::size_t bytes_ = 0;
};

/// More memory than there is, for several that grow together: all of it is found before any is taken.
class larger_memories {
public:
    status find(device_memory& of, const device_allocator& from, std::size_t bytes, const char* what,
                cudaStream_t stream) {
        if (bytes <= of.bytes()) return {};
        status s = found_.emplace_back(&of, device_memory()).second.allocate(from, bytes, what, stream);
        // The caller gives the others back, which are being zeroed.
        if (!s && found_.size() > 1) (void)cudaStreamSynchronize(stream);
        if (!s) found_.pop_back();
        return s;
    }
    /// Waits for the stream, since launches may still use what is given back.
    status take(cudaStream_t stream) {
        if (found_.empty()) return {};
        const cudaError_t code = cudaStreamSynchronize(stream);
        if (code != cudaSuccess) return runtime_error(code, "growing device memory");
        for (auto& [of, memory] : found_) *of = std::move(memory);
        found_.clear();
        return {};
    }

private:
    std::vector<std::pair<device_memory*, device_memory>> found_;
};

/// All pages of one format.
class device_pages {
public:
    /// format: page::format of these pages. upper: of a format with two planes the pages of the upper ones;
    /// these are the lower ones, and a page is one of each. planes: these are upper ones.
    void open(const device_allocator& from, std::string name, int format, int page_tokens, int layers,
              std::size_t key_page_bytes, std::size_t value_page_bytes, bool planes = false,
              const device_pages* upper = nullptr) {
        from_ = from;
        name_ = std::move(name);
        layers_ = layers;
        upper_ = upper;
        most_ = upper != nullptr ? most_lower_pages
                : planes         ? most_upper_pages
                                 : (std::numeric_limits<int>::max)();
        memory_ = {nullptr, key_page_bytes, value_page_bytes, 0};
        pages_ = std::make_unique<free_pages>(format, page_tokens, page_bytes(),
                                              upper == nullptr ? nullptr : &upper->pages());
    }
    const device_pages* upper() const noexcept { return upper_; }
    /// Of a page of two planes that of the upper one; null: it has one plane.
    const page_ref* upper_page(const page& p) const noexcept {
        return upper_ == nullptr ? nullptr : &pages_->upper(p);
    }
    /// Memory that a page's number names, and where in it.
    const pool_memory& memory_of_upper() const noexcept {
        return (upper_ != nullptr ? upper_ : this)->memory_;
    }
    free_pages& pages() const noexcept { return *pages_; }
    const pool_memory& memory() const noexcept { return memory_; }
    const std::string& name() const noexcept { return name_; }
    /// Bytes of a page in all layers, K and V; of two planes, and of those that are in this memory.
    std::size_t page_bytes() const noexcept {
        return own_bytes() + (upper_ != nullptr ? upper_->page_bytes() : 0);
    }
    std::size_t own_bytes() const noexcept {
        return static_cast<std::size_t>(layers_) * (memory_.key_page_bytes + memory_.value_page_bytes);
    }
    std::size_t allocated() const noexcept { return held_.bytes(); }
    std::size_t used_bytes() const noexcept { return static_cast<std::size_t>(pages_->used()) * own_bytes(); }
    /// Changes when pages have moved.
    unsigned generation() const noexcept { return generation_; }

    /// Sees to `more` free pages.
    status ensure(int more, bool may_grow, cudaStream_t stream) {
        if (more <= pages_->available()) return {};
        const int wanted = pages_->used() + more;
        if (!may_grow) {
            status s =
                bad_value("%d more pages of %s are needed, but %d of %d are in use and the pool may not grow",
                          more, name_.c_str(), pages_->used(), pages_->size());
            s.code = cudaErrorMemoryAllocation;
            return s;
        }
        status s =
            grow(common::larger(wanted, common::smaller(most_, pages_->size() + pages_->size() / 2)), stream);
        if (!s && s.code == cudaErrorMemoryAllocation) s = grow(wanted, stream);
        return s;
    }
    /// To so many pages.
    status grow(int pages, cudaStream_t stream) {
        if (pages <= pages_->size()) return {};
        if (pages > most_) {
            status s = bad_value("%d pages of %s, which %s: there can be %d", pages, name_.c_str(),
                                 upper_ != nullptr ? "has two planes" : "kernels of two planes read", most_);
            s.code = cudaErrorMemoryAllocation;
            return s;
        }
        pool_memory next = memory_;
        next.pages = pages;
        device_memory bigger;
        if (status s = bigger.allocate(
                from_,
                common::bounded_product(
                    common::bounded_product(static_cast<std::size_t>(pages), next.page_bytes()),
                    static_cast<std::size_t>(layers_)),
                name_.c_str(), stream);
            !s)
            return s;
        next.data = bigger.as<>();
        cudaError_t code = cudaSuccess;
        for (int layer = 0; layer < layers_ && memory_.pages > 0 && code == cudaSuccess; ++layer)
            for (const tensor role : {tensor::key, tensor::value})
                if (code == cudaSuccess)
                    code = cudaMemcpyAsync(next.page(role, layer, 0), memory_.page(role, layer, 0),
                                           static_cast<std::size_t>(memory_.pages) * memory_.page_bytes(role),
                                           cudaMemcpyDeviceToDevice, stream);
        if (code == cudaSuccess && memory_.pages > 0) code = cudaStreamSynchronize(stream);
        if (code != cudaSuccess) return runtime_error(code, "moving pages to a larger pool");
        pages_->grow(pages);
        held_ = std::move(bigger);
        memory_ = next;
        ++generation_;
        return {};
    }

private:
    device_allocator from_;
    std::string name_;
    int layers_ = 0;
    int most_ = (std::numeric_limits<int>::max)();  // pages that tables can name
    const device_pages* upper_ = nullptr;
    std::unique_ptr<free_pages> pages_ = std::make_unique<free_pages>(0, 0, 0);  // pages know where it is
    pool_memory memory_;
    device_memory held_;
    unsigned generation_ = 0;
};

}  // namespace detail
}}}  // namespace kvq::cuda
