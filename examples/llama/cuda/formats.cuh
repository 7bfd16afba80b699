// The formats that a program has compiled for its cache on the device. Every formats.cu adds one; engines
// choose among them by name.
#pragma once

#include <kvq/cuda.cuh>

#include <vector>

namespace llama::device {

inline std::vector<kvq::cuda::device_format>& compiled_formats() {
    static std::vector<kvq::cuda::device_format> all;
    return all;
}

template <class T, class... Formats>
bool add_format() {
    compiled_formats().push_back(kvq::cuda::make_device_format<T, Formats...>());
    return true;
}

}  // namespace llama::device
