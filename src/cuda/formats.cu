// The list of compiled formats. kvq_cuda_formats.inc, which the build writes, defines KVQ_CUDA_ENTRIES(X):
// X(name) of every function that an entry defines.
#include "format.cuh"

#include "kvq_cuda_formats.inc"

namespace kvq {
namespace c {
#define KVQ_DECLARE(entry) void entry(device_formats&);
KVQ_CUDA_ENTRIES(KVQ_DECLARE)
}  // namespace c

inline namespace v0_3 {

library_format_list library_device_formats() noexcept {
    static const c::device_formats all = [] {
        c::device_formats list;
#define KVQ_ADD(entry) c::entry(list);
        KVQ_CUDA_ENTRIES(KVQ_ADD)
        return list;
    }();
    return {all.data(), all.size(), sizeof(all[0])};
}

}  // namespace v0_3
}  // namespace kvq
