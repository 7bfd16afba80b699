// A program for devices of little and of much shared memory: the host takes the kernels that were made for the current one.
#ifndef __CUDACC__  // emulated, see scripts/gpu-test; otherwise nvcc lists what it compiles for
#define __CUDA_ARCH_LIST__ 800, 890
#endif
#include "attention_test.cuh"

using namespace kvq;

namespace {

using eight_bits = cuda::format<int8, int8, 128, 64>;
using preset = cuda::preset_format<low3, 128>;

static_assert(cuda::detail::two_sizes<eight_bits> && cuda::detail::two_sizes<preset>);
template <class Format, int Rows4>
constexpr int bytes_on_small = cuda::detail::attention_memory<Format, Rows4, true>::bytes;
static_assert(bytes_on_small<eight_bits, 1> <= 99 * 1024 && bytes_on_small<preset, 2> <= 99 * 1024 &&
              cuda::detail::attention_memory<eight_bits, 1>::bytes > 99 * 1024);

void check_formats() {
    test::check_format<eight_bits, float16>("int8, page 64");
    test::check_format<preset, float16>("low3, page 128");
}

}  // namespace

int main() {
    check_formats();
#ifndef __CUDACC__
    emulated::device_shared_memory = 99 * 1024;  // launches that ask for more fail
    check_formats();
#endif
    return test::report("targets");
}
