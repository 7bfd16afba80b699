// Formats of the target table and of every path through the warp kernel: 16 bit, INT8, 4 and 2 bit.
#include "attention_test.cuh"

using namespace kvq;

int main() {
    using test::check_format;
#if !defined(PART) || PART == 0
    check_format<cuda::block_pair<full<float16>, full<float16>, 128, 64>, float16>("fp16, page 64");
#ifdef __CUDACC__  // emulated, targets checks it
    check_format<cuda::block_pair<int8, int8, 128, 64>, float16>("int8, page 64");
#endif
    check_format<cuda::block_pair<affine<4, per_token<>>, affine<4, per_token<>>, 128, 64>, float16>(
        "4 bit token, page 64");
#endif
#if !defined(PART) || PART == 1
    check_format<cuda::kivi_pair<4, 64, 128, 64>, float16>("kivi4 g64, page 64");
    check_format<cuda::kivi_pair<2, 128, 128, 128>, float16>("kivi2 g128, page 128");
    check_format<cuda::kivi_pair<4, 32, 128, 64>, float16>("kivi4 g32, page 64");
#endif
    return test::report("attention_main");
}
