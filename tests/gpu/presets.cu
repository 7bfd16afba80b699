// Attention over the presets' formats, with 8-bit parameters, token scales and widths that differ between
// channels.
#include <kvq/cuda/quantize/pages.cuh>

#include "../../bench/baselines/nvfp4.hpp"
#include "attention_test.cuh"
#include "small_budget.cuh"

using namespace kvq;

namespace {

template <int Bits, int Group, class Params = byte_params>
using keys = affine<Bits, per_channel<Group>, Params, min_max>;
template <int Bits, class Params = byte_params, int Group = 0, class TokenScales = token_scales<byte_params>>
using values = affine<Bits, per_channel<Group>, Params, min_max, TokenScales>;

/// Schemes of their own, with a scale of the tensor.
template <class Base>
struct scaled : Base {
    constexpr scaled() : Base(0.37f) {}
};
using nvfp4 = scaled<baselines::nvfp4>;
using nvfp4_rows = scaled<baselines::nvfp4_rows>;
static_assert(cuda::detail::no_warps<cuda::block_pair<nvfp4, int8, 64, 32>> == cuda::detail::own_blocks);
// device_value() knows no transform in front of it.
static_assert(cuda::detail::no_reader_of<hadamard<nvfp4>>(tensor::key) == cuda::detail::own_blocks);

/// Every preset has the fast kernel, with a plan of its keys as well.
template <class... Presets>
constexpr bool in_warps = (... && (cuda::detail::no_warps<cuda::preset_pair<Presets, 128>> == nullptr &&
                                   cuda::detail::no_warps<cuda::preset_pair<Presets, 64>> == nullptr));
static_assert(in_warps<low2, low3, std4, nested4, mix4, mix5, std5, mix6, hi6, ref8>);

/// Rows of tokens with a scale of the tensor, where they have one.
template <int Layout>
struct scaled_rows : rows_of<Layout> {
    using base = rows_of<Layout>;
    constexpr scaled_rows()
        : base(base::scale == row_layout::stored::none || base::scale == row_layout::stored::e4m3 ? 0.37f
                                                                                                  : 1.0f) {}
};
template <int Keys, int Values, int Dim, int PageTokens>
using rows_pair = cuda::block_pair<scaled_rows<Keys>, scaled_rows<Values>, Dim, PageTokens>;
constexpr int fp8 = row_layout_number("fp8"), e5m2_rows = row_layout_number("fp8-e5m2"),
              nvfp4_of_others = row_layout_number("nvfp4"), mxfp8 = row_layout_number("mxfp8"),
              mxfp4 = row_layout_number("mxfp4"), q5_1 = row_layout_number("q5_1");

/// What the device dequantizes is what the CPU dequantizes, bit for bit.
template <class Format>
void check_dequantize(const char* name) {
    test::rng r(19);
    constexpr int heads = 2, dim = Format::head_dim, value_dim = Format::value_dim;
    const std::vector<int> lengths = {Format::page_tokens + 3, 0, 2 * Format::page_tokens, 1}, starts = [&] {
        std::vector<int> at = {0};
        for (const int n : lengths) at.push_back(at.back() + n);
        return at;
    }();
    const test::quantized_batch<Format> batch(r, heads, lengths);
    const test::device_batch<Format> device(batch);
    const int rows = starts.back();
    test::device_buffer<float> k(static_cast<std::size_t>(rows) * heads * dim),
        v(static_cast<std::size_t>(rows) * heads * value_dim);
    const test::device_buffer<int> starts_device(starts);
    const auto status = cuda::dequantize_tokens<Format, float>(
        device.ref, token_view<float>(k.get(), rows, heads, dim),
        token_view<float>(v.get(), rows, heads, value_dim), starts_device.get(), nullptr);
    CHECK(status, "%s: %s", name, status.message);
    CUDA_OK(cudaDeviceSynchronize());
    const auto compare = [&](const std::vector<float>& got, const auto& want, int size, const char* what) {
        for (std::size_t b = 0; b < lengths.size(); ++b)
            for (std::size_t h = 0; h < heads; ++h) {
                int differ = 0;
                for (int i = 0; i < lengths[b] * size; ++i)
                    differ +=
                        got[(static_cast<std::size_t>(starts[b] + i / size) * heads + h) *
                                static_cast<std::size_t>(size) +
                            static_cast<std::size_t>(i % size)] != want[b][h][static_cast<std::size_t>(i)];
                CHECK(differ == 0, "%s: %d dequantized %s differ", name, differ, what);
            }
    };
    compare(k.download(), batch.key_values, dim, "keys");
    compare(v.download(), batch.value_values, value_dim, "values");
}

/// On a device as check_format; emulated a case for each number of rows, since others run the same way as
/// without a transform.
template <class Format, class T>
void check_turned(const char* name) {
    if constexpr (test::emulated_or(0, 1) == 1) {
        test::check_format<Format, T>(name);
    } else {
        constexpr int page = Format::page_tokens;
        test::rng r(static_cast<unsigned>(page + Format::head_dim));
        double worst = 0.0;
        for (const auto& c :
             {test::attention_case{.group = 4, .lengths = {page + 1, 0, 1, 3 * page + page / 2, 700}},
              test::attention_case{.kv_heads = 1,
              .group = 4,
              .query_tokens = 2,
              .window = 100,
              .lengths = {2 * page + 1, 300}},
              test::attention_case{.kv_heads = 1, .group = 16, .softcap = 5.0f, .lengths = {300, 40}}})
            test::check_attention<Format, T>(r, c, name, &worst);
        std::printf("  %-44s largest error %.2e\n", name, worst);
    }
}

/// Strides of other systems' rows that no kernel could read.
[[maybe_unused]] void check_strides() {
    using format = cuda::strided_rows<rows_pair<nvfp4_of_others, fp8, 128, 16>>;
    test::rng r(5);
    const test::device_batch<format> device(test::quantized_batch<format>(r, 2, {20}));
    const auto refused = [&](const char* part, auto&& change) {
        auto ref = device.ref;
        change(ref);
        const auto status = cuda::detail::check_ref(ref, true);
        CHECK(!status && std::strstr(status.message, part) != nullptr, "\"%s\" is not in \"%s\"", part,
              status.message);
    };
    CHECK(cuda::detail::check_ref(device.ref, true), "strides of a batch");
    refused("64 bytes, but tokens are 48", [](auto& c) { c.own_keys.memory.token_bytes = 48; });
    refused("multiples of 16", [](auto& c) { c.own_values.memory.head_bytes += 8; });
    refused("rows of keys have 8 bytes of scales", [](auto& c) { c.own_keys.memory.scales = nullptr; });
    refused("rows of values have 0 bytes of scales",
            [](auto& c) { c.own_values.memory.scales = c.value_pages; });
    refused("80 bytes apart and 2 heads 80 share bytes", [](auto& c) { c.own_keys.memory.token_bytes = 80; });
    refused("pages of values that are 0 bytes apart share bytes", [](auto& c) { c.value_page_bytes = 0; });
    refused("keys that are 2528 bytes apart share bytes: 16 tokens",
            [](auto& c) { c.key_page_bytes = 2528; });
    refused("scales of keys whose pages are 248 bytes apart",
            [](auto& c) { c.own_keys.memory.scale_page_bytes -= 8; });
    refused("scales of keys whose pages are 0 bytes apart",
            [](auto& c) { c.own_keys.memory.scale_page_bytes = 0; });
    refused("8 bytes of scales a row", [](auto& c) { c.own_keys.memory.scale_token_bytes = 0; });
    refused("more than 2 GB", [](auto& c) { c.own_keys.memory.token_bytes = std::size_t{1} << 28; });
    refused("not multiples of 4", [](auto& c) { c.own_keys.memory.scale_token_bytes = 2; });
}

/// Rows of tokens: attention of warps, on a device as check_format.
template <class Format>
void check_rows(const char* name) {
    static_assert(cuda::detail::warps_can<Format>);
    check_dequantize<Format>(name);
    check_turned<Format, float16>(name);
}

}  // namespace

int main() {
    using test::check_format;
#if !defined(PART) || PART == 0
    check_format<cuda::preset_pair<std4, 128>, float16>("std4");
    check_dequantize<cuda::preset_pair<std4, 128>>("std4");
    check_format<cuda::block_pair<keys<4, 32>, values<4>, 64, 256>, bfloat16>(
        "4 bit, groups of 32, dim 64, page 256");
#endif
#if !defined(PART) || PART == 1
    check_dequantize<cuda::preset_pair<ref8, 128>>("ref8");
    check_dequantize<cuda::preset_pair<hi6, 128>>("hi6");
    check_dequantize<cuda::preset_pair<std5, 128>>("std5");
    check_format<cuda::preset_pair<ref8, 128>, float16>("ref8");
    check_format<cuda::preset_pair<hi6, 128>, float16>("hi6");
    check_format<cuda::preset_pair<std5, 128>, float16>("std5");
    check_format<cuda::preset_pair<std4, 80, 32>, float16>("std4, dim 80, page 32");
#endif
#if !defined(PART) || PART == 2
    check_format<
        cuda::block_pair<keys<3, 64>, values<2, packed_params<float16>, 0, token_scales<params<float16>>>, 96,
                         64>,
        float16>("3 bit, 8-bit parameters, 2 bit fp16, dim 96");
    check_format<cuda::block_pair<keys<2, 0, params<bfloat16>>, values<3, byte_params, 64>, 128, 128>, float>(
        "2 bit bf16, 3 bit, 8-bit parameters in groups of 64");
    check_format<cuda::block_pair<values<4>, keys<4, 0>, 256, 16>, float16>("token scales of keys, dim 256");
    check_format<cuda::block_pair<values<4, byte_params, 32>, keys<4, 32>, 64, 64>, float16>(
        "token scales of keys, groups of 32");
    check_dequantize<cuda::block_pair<keys<4, 20>, values<4>, 72, 40>>("odd shapes");
    check_format<cuda::block_pair<keys<4, 20>, values<4>, 72, 40>, float16>("outside: odd shapes");
#endif
#if !defined(PART) || PART == 6
    check_dequantize<cuda::preset_pair<std4_h, 128>>("std4-h");
    check_turned<cuda::preset_pair<std4_h, 128>, float16>("std4-h");
    const std::string_view kernel = cuda::attend_kernel<cuda::preset_pair<std4_h, 128>, float16>(4).kernel;
    CHECK(kernel == "attend_warps_kernel", "std4-h: %s", kernel.data());
    check_turned<cuda::block_pair<rotated<affine<4, per_channel<32>>>, hadamard<values<4>, 0, 7>, 80, 64, 48>,
                 bfloat16>("rotated keys of 80, Hadamard before values of 48");
    check_turned<
        cuda::block_pair<hadamard<mixed_affine<code_widths<4, 2, 0>, average_eighths<16>, per_channel<32>>>,
                         values<2>, 64, 32>,
        float16>("Hadamard before keys of 4, 2 and 0 bits");
    check_dequantize<cuda::block_pair<hadamard<keys<4, 20>, 8>, rotated<values<4>>, 72, 40>>(
        "transforms: odd shapes");
    check_turned<cuda::block_pair<hadamard<keys<4, 20>, 8>, rotated<values<4>>, 72, 40>, float16>(
        "outside: transforms, odd shapes");
#endif
#if !defined(PART) || PART == 5
    check_dequantize<cuda::block_pair<nvfp4, nvfp4_rows, 64, 32>>("NVFP4: keys in tiles, values in rows");
    check_format<cuda::block_pair<nvfp4_rows, nvfp4, 64, 32>, float16>(
        "NVFP4: keys in the published rows, values in tiles");
#endif
#if !defined(PART) || PART == 7
    check_dequantize<rows_pair<q5_1, nvfp4_of_others, 64, 48>>("rows: q5_1, nvfp4");
    check_rows<rows_pair<fp8, fp8, 128, 64>>("fp8");
    check_rows<rows_pair<nvfp4_of_others, nvfp4_of_others, 128, 64>>("nvfp4");
    check_rows<rows_pair<mxfp8, mxfp4, 128, 256>>("mxfp8, mxfp4, page 256");
    check_rows<rows_pair<e5m2_rows, fp8, 80, 32>>("fp8-e5m2, fp8, dim 80");
    check_rows<rows_pair<mxfp4, mxfp8, 256, 16>>("mxfp4, mxfp8, dim 256");
    check_rows<rows_pair<nvfp4_of_others, e5m2_rows, 64, 16>>("nvfp4, fp8-e5m2, dim 64");
    check_rows<cuda::strided_rows<rows_pair<nvfp4_of_others, fp8, 128, 16>>>("nvfp4, fp8, NHD with gaps");
    check_turned<cuda::strided_rows<rows_pair<fp8, fp8, 64, 1>>, float16>("fp8, NHD, page 1");
    check_strides();
#endif
#if !defined(PART) || PART == 3
    check_dequantize<cuda::preset_pair<mix4, 128>>("mix4");
    check_dequantize<cuda::preset_pair<mix5, 128>>("mix5");
    check_dequantize<cuda::preset_pair<mix6, 64>>("mix6, dim 64");
    check_dequantize<cuda::preset_pair<low3, 128>>("low3");
    check_dequantize<cuda::preset_pair<low2, 128>>("low2");
    check_format<cuda::preset_pair<low2, 128>, float16>("low2");
    check_format<cuda::preset_pair<mix6, 128>, float16>("mix6");
    check_format<cuda::block_pair<mixed_affine<code_widths<4, 2, 0>, average_eighths<16>, per_channel<32>>,
                                  values<2>, 64, 96>,
                 float16>("4, 2 and 0 bits, groups of 32, dim 64, page 96");
#endif
#if !defined(PART) || PART == 4
    check_format<cuda::preset_pair<mix4, 128>, float16>("mix4");
    check_format<cuda::preset_pair<mix5, 64>, bfloat16>("mix5, dim 64");
    check_format<cuda::preset_pair<low3, 80, 32>, bfloat16>("low3, dim 80, page 32");
    check_format<cuda::block_pair<mixed_affine<code_widths<7, 5, 1, 0>, average_eighths<28>, per_channel<32>>,
                                  values<3>, 64, 256>,
                 float16>("7, 5, 1 and 0 bits, groups of 32, dim 64, page 256");
    check_format<cuda::block_pair<mixed_affine<code_widths<4, 2, 0>, average_eighths<20>, per_channel<>,
                                               packed_params<float16>, min_max>,
                                  full<float16>, 256, 32>,
                 float16>("4, 2 and 0 bits, fp16 parameters, fp16 values, dim 256, page 32");
    check_dequantize<cuda::block_pair<mixed_affine<code_widths<8, 3>, average_eighths<40>, per_channel<20>>,
                                      values<4>, 72, 40>>("odd shapes, mixed");
    check_format<cuda::block_pair<mixed_affine<code_widths<8, 3>, average_eighths<40>, per_channel<20>>,
                                  values<4>, 72, 40>,
                 float16>("outside: mixed, odd shapes");
#endif
    return test::report("presets");
}
