// Formats of the target table and of every path through the warp kernel: 16 bit, INT8, 4 and 2 bit. Which
// formats share kernels, and which have none.
#include "attention_test.cuh"

using namespace kvq;

namespace {

using token4 = affine<4, per_token<>>;
using fitted_token4 = affine<4, per_token<>, params<float16>, least_squares>;
template <class Keys, class Values = int8, int PageTokens = 64>
using pair_of = cuda::block_pair<Keys, Values, 128, PageTokens>;
template <class A, class B>
inline constexpr bool read_alike = std::is_same_v<cuda::detail::read_pair<A>, cuda::detail::read_pair<B>>;
template <class A, class B>
inline constexpr bool quantized_alike =
    std::is_same_v<cuda::detail::quantized_pair<A>, cuda::detail::quantized_pair<B>>;

// Kernels that read know codecs, and nothing of encoders. A group of all tokens is no group.
static_assert(read_alike<pair_of<token4>, pair_of<fitted_token4>>);
static_assert(read_alike<pair_of<affine<4, per_channel<64>>>, pair_of<affine<4, per_channel<>>>>);
static_assert(read_alike<pair_of<affine<3, per_channel<32>, byte_params, min_max>>,
                         pair_of<affine<3, per_channel<32>, byte_params, mean_corrected<shrink_search>>>>);
static_assert(!read_alike<pair_of<affine<4, per_channel<32>>>, pair_of<affine<4, per_channel<>>>>);
static_assert(!read_alike<pair_of<affine<4, per_channel<64>>, int8, 128>,
                          pair_of<affine<4, per_channel<>>, int8, 128>>);
static_assert(!read_alike<pair_of<affine<4, per_channel<>, params<float16>, min_max>>,
                          pair_of<affine<4, per_channel<>, params<bfloat16>, min_max>>>);
static_assert(
    !read_alike<pair_of<affine<4, per_channel<>, byte_params, min_max>>,
                pair_of<affine<4, per_channel<>, byte_params, min_max, token_scales<byte_params>>>>);
// Those that quantize do.
static_assert(quantized_alike<pair_of<affine<4, per_channel<64>>>, pair_of<affine<4, per_channel<>>>>);
static_assert(!quantized_alike<pair_of<affine<4, per_channel<>>>,
                               pair_of<affine<4, per_channel<>, params<float16>, min_max>>>);
// The scheme of a codec has this codec.
template <class S>
inline constexpr bool comes_back =
    codec_of<cuda::detail::codec_scheme<cuda::detail::codec_constant<S>,
                                        typename cuda::detail::encoder_of<S>::type>>() == codec_of<S>();
static_assert(comes_back<full<float>> && comes_back<full<float16>> && comes_back<full<bfloat16>> &&
              comes_back<int8> && comes_back<fitted_token4> && comes_back<std4::keys> &&
              comes_back<std4::values> && comes_back<low3::keys> && comes_back<ref8::values> &&
              comes_back<scheme<bits<3>, symmetric, per_channel<20>, params<float>>>);

// Why there are no kernels.
constexpr std::string_view unread(const char* reason) { return reason == nullptr ? "" : reason; }
template <class S>
inline constexpr std::string_view no_keys = unread(cuda::detail::no_reader_of<S>(tensor::key));
static_assert(no_keys<std4::keys> == "" && no_keys<fitted_token4> == "");
static_assert(no_keys<affine<4, per_token<any_group>>> == "the group size is known at run time only");
static_assert(no_keys<std4_h::keys> == "" && no_keys<rotated<token4>> == "");
struct own_transform {};
static_assert(no_keys<transformed<own_transform, token4>> ==
              "the transform in front of it is not the library's");
static_assert(no_keys<hadamard<full<float16>>> == "16-bit values are not transformed");
// Transforms are values: formats that differ in nothing else share kernels, other formats have none of their
// code.
static_assert(read_alike<pair_of<hadamard<token4>>, pair_of<hadamard<token4, 32, 7>>> &&
              read_alike<pair_of<hadamard<token4>>, pair_of<rotated<token4>>> &&
              !read_alike<pair_of<hadamard<token4>>, pair_of<token4>>);
static_assert(unread(cuda::detail::no_reader_of<low3::keys>(tensor::value)) == "several widths are for keys");
static_assert(unread(cuda::detail::no_quantizer(codec_of<fitted_token4>(), tensor::key)) ==
              "parameters per token are fitted by the encoder enclosing alone");
static_assert(unread(cuda::detail::no_quantizer(codec_of<std4::values>(), tensor::value)) == "");
template <class Pair>
inline constexpr std::string_view no_warps = unread(cuda::detail::no_warps<Pair>);
static_assert(no_warps<pair_of<token4>> == "");
static_assert(no_warps<cuda::block_pair<int8, int8, 24, 64>> == "a head size is not a multiple of 16");
static_assert(no_warps<pair_of<int8, int8, 24>> == "pages have neither 16 tokens nor a multiple of 32");
static_assert(no_warps<pair_of<full<float>>> == "pages hold fp32 values");
static_assert(no_warps<pair_of<affine<4, per_channel<20>>>> == "groups are not a multiple of 32");
static_assert(
    no_warps<pair_of<affine<4, per_channel<32>, byte_params, min_max, token_scales<params<float16>>>>> ==
    "either parameters or token scales have 8 bits, not both");
static_assert(no_warps<cuda::block_pair<full<float16>, full<float16>, 576, 64, 512>> ==
              "warps' units of pages need more shared memory than a thread block has");

}  // namespace

int main() {
    using test::check_format;
#if !defined(PART) || PART == 0
    check_format<cuda::block_pair<full<float16>, full<float16>, 128, 64>, float16>("fp16, page 64");
#ifdef __CUDACC__  // emulated, targets checks it
    check_format<cuda::block_pair<int8, int8, 128, 64>, float16>("int8, page 64");
#endif
    check_format<cuda::block_pair<token4, token4, 128, 64>, float16>("4 bit token, page 64");
    check_format<cuda::block_pair<fitted_token4, fitted_token4, 128, 64>, float16>(
        "4 bit token, least squares, page 64");
#endif
#if !defined(PART) || PART == 1
    check_format<cuda::kivi_pair<4, 64, 128, 64>, float16>("kivi4 g64, page 64");
    check_format<cuda::kivi_pair<2, 128, 128, 128>, float16>("kivi2 g128, page 128");
    check_format<cuda::kivi_pair<4, 32, 128, 64>, float16>("kivi4 g32, page 64");
#endif
    return test::report("attention_main");
}
