// The rest: every width, head and page size, value parameters per channel, other types, shapes outside the
// warp kernel.
#include "attention_test.cuh"

using namespace kvq;

// Pages of 16 tokens are many engines' default.
static_assert(cuda::detail::warps_can<cuda::block_pair<full<bfloat16>, full<bfloat16>, 128, 16>>);
static_assert(cuda::detail::warps_can<cuda::block_pair<int8, int8, 128, 16>>);
static_assert(
    cuda::detail::warps_can<cuda::block_pair<affine<4, per_token<>>, affine<4, per_token<32>>, 96, 16>>);
static_assert(cuda::detail::warps_can<cuda::kivi_pair<4, 64, 128, 16>>);
static_assert(cuda::detail::warps_can<cuda::kivi_pair<2, 32, 80, 16>>);
static_assert(cuda::detail::joins_pages<cuda::block_pair<full<float16>, int8, 128, 16>>);
static_assert(!cuda::detail::joins_pages<cuda::block_pair<int8, affine<3, per_token<>>, 128, 16>>);
static_assert(!cuda::detail::joins_pages<cuda::kivi_pair<2, 32, 80, 16>>);

// 16 rows of a block need more shared memory than any device has: 8 rows are taken.
using wide_half = cuda::block_pair<full<float16>, full<float16>, 640, 16>;
static_assert(cuda::detail::attention_memory<wide_half, 4>::bytes > 227 * 1024);
static_assert(cuda::detail::warps_can<wide_half>);
// And here 4 do.
static_assert(!cuda::detail::warps_can<cuda::block_pair<full<float16>, full<float16>, 576, 64, 512>>);

// Keys in short groups are dequantized where 8 or 16 rows share them.
using short_groups =
    cuda::block_pair<scheme<bits<2>, symmetric, per_channel<32>>, affine<4, per_token<32>>, 64, 64>;
template <class Format, int Rows4>
constexpr bool dequantizes =
    cuda::detail::dequantizes_keys<typename cuda::detail::attention_memory<Format, Rows4>::keys, Rows4>;
static_assert(!dequantizes<short_groups, 1> && dequantizes<short_groups, 2> && dequantizes<short_groups, 4>);
static_assert(!dequantizes<cuda::kivi_pair<4, 32, 128, 64>, 2> &&
              dequantizes<cuda::kivi_pair<4, 32, 128, 64>, 4>);

int main() {
    using test::check_format;
#if !defined(PART) || PART == 0
    check_format<cuda::block_pair<full<bfloat16>, full<bfloat16>, 128, 16>, bfloat16>("bf16, page 16");
    check_format<cuda::block_pair<int8, full<float16>, 64, 32>, float>(
        "int8 keys, fp16 values, dim 64, page 32");
    check_format<cuda::kivi_pair<2, 32, 128, 32>, bfloat16>("kivi2 g32, page 32, bf16 query");
    check_format<cuda::block_pair<int8, int8, 128, 16>, float16>("int8, page 16");
    check_format<cuda::block_pair<affine<4, per_token<>>, affine<4, per_token<32>>, 96, 16>, float16>(
        "4 bit token, dim 96, page 16");
    check_format<
        cuda::block_pair<affine<3, per_token<>>, affine<6, per_token<40>, params<float>>, 64, 16, 80>,
        float16>("3 bit keys, 6 bit values of dim 80, page 16");
    check_format<cuda::kivi_pair<4, 64, 128, 16>, float16>("kivi4, page 16");
    check_format<cuda::kivi_pair<2, 32, 80, 16>, float16>("kivi2, dim 80, page 16");
    check_format<cuda::block_pair<int8, affine<3, per_token<>>, 128, 16>, float16>("int8 and 3 bit, page 16");
    check_format<cuda::kivi_pair<4, 128, 128, 256>, float16>("kivi4 g128, page 256");
    check_format<wide_half, float16>("fp16, dim 640, page 16");
#endif
#if !defined(PART) || PART == 1
    check_format<cuda::block_pair<affine<3, per_token<32>>, affine<3, per_channel<64>>, 128, 64>, float16>(
        "3 bit");
    check_format<cuda::block_pair<affine<5, per_channel<32>>, affine<6, per_token<32>>, 64, 64>, float16>(
        "5 and 6 bit");
    check_format<cuda::block_pair<affine<7, per_token<64>>, affine<1, per_token<64>>, 128, 128>, float16>(
        "7 and 1 bit");
    check_format<cuda::block_pair<affine<8, per_token<32>>, affine<8, per_channel<>>, 128, 64>, float16>(
        "8 bit");
    // Warp tiles so short that lanes share words.
    check_format<cuda::block_pair<affine<5, per_token<>>, affine<1, per_channel<>>, 64, 64>, float16>(
        "5 and 1 bit, dim 64");
    check_format<cuda::block_pair<affine<7, per_channel<>>, affine<3, per_token<>>, 64, 32>, float16>(
        "7 and 3 bit, dim 64, page 32");
    check_format<cuda::block_pair<affine<2, per_token<>>, affine<2, per_token<>>, 128, 16>, float16>(
        "2 bit token, page 16");
    // The largest sums of codes at the top of their bytes.
    check_format<cuda::block_pair<affine<3, per_channel<>>, affine<3, per_channel<>>, 256, 128>, float16>(
        "3 bit, dim 256, page 128");
#endif
#if !defined(PART) || PART == 2
    check_format<cuda::block_pair<int8, int8, 80, 64>, float16>("int8, dim 80");
    check_format<cuda::block_pair<affine<4, per_token<>>, affine<4, per_token<32>>, 96, 16>, float16>(
        "4 bit, dim 96, page 16");
    check_format<cuda::block_pair<affine<4, per_token<64>>, affine<4, per_token<64>>, 256, 32>, float16>(
        "4 bit, dim 256");
    check_format<cuda::block_pair<full<float16>, full<float16>, 80, 32>, float16>("fp16, dim 80");
#endif
#if !defined(PART) || PART == 3
    check_format<cuda::block_pair<scheme<bits<4>, symmetric, per_channel<>, params<float>>,
                                  scheme<bits<4>, symmetric, per_channel<>, params<bfloat16>>, 128, 64>,
                 float16>("symmetric 4 bit per channel");
    check_format<short_groups, float>("symmetric 2 bit in groups of 32, dim 64, float query");
    check_format<cuda::kivi_pair<4, 32, 256, 32>, float16>("kivi4 g32, dim 256, page 32");
    check_format<cuda::block_pair<int8, affine<2, per_token<32>>, 128, 256, 64>, float16>(
        "dims 128 and 64, page 256");
    check_format<cuda::block_pair<affine<4, per_token<16>>, full<float>, 48, 24>, float>(
        "outside the warp kernel: dim 48, page 24");
    check_format<cuda::block_pair<affine<3, per_channel<20>>, affine<4, per_token<24>>, 72, 40>, float16>(
        "outside: odd groups");
#endif
#if !defined(PART) || PART == 4
    // Channels in bands of several warps.
    check_format<cuda::block_pair<full<float16>, full<bfloat16>, 512, 16>, float16>(
        "fp16 and bf16, dim 512, page 16");
    check_format<cuda::preset_pair<std4, 512>, bfloat16>("std4, dim 512");
    check_format<cuda::block_pair<affine<3, per_token<64>>, affine<8, per_token<256>>, 512, 64, 256>, float>(
        "3 bit keys of dim 512, 8 bit values of dim 256, groups of channels");
#if defined(__CUDACC__) || !defined(PART)
    check_format<cuda::block_pair<int8, int8, 512, 16>, float16>("int8, dim 512, page 16");
    check_format<cuda::kivi_pair<4, 64, 192, 64>, float16>("kivi4 g64, dim 192");
    check_format<cuda::kivi_pair<4, 64, 512, 64>, float16>("kivi4 g64, dim 512");
#endif
#endif
    return test::report("attention_wide");
}
