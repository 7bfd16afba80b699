// What the handles of kvq_cuda.h hold, and the way from a status of the CUDA backend to one of the interface.
#pragma once

#include <kvq/kvq_cuda.h>

#include <kvq/cuda/host/cache.hpp>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../c/objects.hpp"

namespace kvq::c {

/// Raises a failure unless the call has succeeded.
inline void check(const cuda::status& s) {
    if (s) return;
    throw failure{s.code == cudaErrorInvalidValue       ? KVQ_ERROR_ARGUMENT
                  : s.code == cudaErrorMemoryAllocation ? KVQ_ERROR_MEMORY
                                                        : kvq_status{KVQ_ERROR_CUDA},
                  short_text(s.message)};
}
inline void check(cudaError_t code, const char* what) {
    if (code != cudaSuccess) check(cuda::detail::runtime_error(code, what));
}

inline cudaStream_t stream_of(void* stream) noexcept { return static_cast<cudaStream_t>(stream); }

/// Makes a device the current one, and sets it back.
class on_device {
public:
    explicit on_device(int device) {
        check(cudaGetDevice(&before_), "asking for the current device");
        if (before_ != device) check(cudaSetDevice(device), "choosing the device of the cache");
        changed_ = before_ != device;
    }
    on_device(const on_device&) = delete;
    on_device& operator=(const on_device&) = delete;
    ~on_device() {
        if (changed_) (void)cudaSetDevice(before_);
    }

private:
    int before_ = 0;
    bool changed_ = false;
};

/// A cache on the device. Kept by all that belongs to it.
struct device_state {
    /// What has begun.
    struct begun {
        int rows = 1, new_tokens = 0;
        bool prompt = false;
    };
    /// Sets a device back, once the cache has given back its memory.
    struct device_setter {
        int device = -1;
        ~device_setter() {
            if (device >= 0) (void)cudaSetDevice(device);
        }
    };

    kvq_cuda_allocator memory{};
    int device = 0;
    bool alibi = false;  // kernels with it
    std::mutex mutex;
    begun step;
    device_setter last;
    cuda::cache cache;

    device_state(const kvq_cuda_cache_options& o, cudaStream_t stream);
    ~device_state() {
        int before = device;
        (void)cudaGetDevice(&before);
        if (before == device) return;
        last.device = before;
        (void)cudaSetDevice(device);
    }
};
using shared_device = std::shared_ptr<device_state>;

/// One call on a cache.
class device_call {
public:
    explicit device_call(device_state& of) : lock_(of.mutex), device_(of.device) {}

private:
    std::lock_guard<std::mutex> lock_;
    on_device device_;
};

}  // namespace kvq::c

struct kvq_cuda_cache : kvq::c::handle<kvq_cuda_cache> {
    static constexpr std::uint32_t word = 0x646b7631;
    static constexpr const char* kind = "cache on a device";
    kvq::c::shared_device state;

    explicit kvq_cuda_cache(kvq::c::shared_device s) : state(std::move(s)) {}
};

struct kvq_cuda_sequence : kvq::c::handle<kvq_cuda_sequence> {
    static constexpr std::uint32_t word = 0x756b7631;
    static constexpr const char* kind = "sequence on a device";
    kvq::c::shared_device of;
    kvq::cuda::sequence_id id;

    kvq_cuda_sequence(kvq::c::shared_device s, kvq::cuda::sequence_id i) : of(std::move(s)), id(i) {}
    ~kvq_cuda_sequence() {
        const std::lock_guard lock(of->mutex);
        (void)of->cache.free(id);
    }
};

namespace kvq::c {

/// A new sequence, which take(id) gives its id. The handle is made before, so that nothing fails once there
/// is one.
template <class Take>
kvq_cuda_sequence* new_sequence(const shared_device& of, Take&& take) {
    struct free_sequence {
        void operator()(kvq_cuda_sequence* s) const noexcept { (void)free_handle(s, "sequence"); }
    };
    std::unique_ptr<kvq_cuda_sequence, free_sequence> made(make<kvq_cuda_sequence>(of, cuda::sequence_id{}));
    {
        const device_call call(*of);
        take(made->id);
    }
    return made.release();
}

}  // namespace kvq::c
