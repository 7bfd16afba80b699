// The list of compiled formats. kvq_cuda_formats.inc, which the build writes, defines KVQ_CUDA_ENTRIES(X): X(name) of every function that an
// entry defines.
#include "format.cuh"

#include "kvq_cuda_formats.inc"

namespace kvq::c {

#define KVQ_DECLARE(entry) void entry(device_formats&);
KVQ_CUDA_ENTRIES(KVQ_DECLARE)

const device_formats& compiled_formats() {
    static const device_formats all = [] {
        device_formats list;
#define KVQ_ADD(entry) entry(list);
        KVQ_CUDA_ENTRIES(KVQ_ADD)
        return list;
    }();
    return all;
}

}  // namespace kvq::c
