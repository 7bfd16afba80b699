// The formats that kvq::library has for its caches on the device. Every entry adds its own (format.cu).
#pragma once

#include <kvq/cuda/host/make_strided_format.cuh>
#include <vector>

namespace kvq::c {

using device_formats = std::vector<cuda::device_format>;

/// Keys of one format and values of another.
template <class Keys, class Values>
using keys_and_values =
    cuda::block_pair<typename Keys::keys, typename Values::values, Keys::head_dim, Keys::page_tokens>;

/// Formats by the names of kvq.h, with _ for -.
template <int HeadDim, int PageTokens = default_page_tokens>
struct named {
    using int8 = cuda::block_pair<kvq::int8, kvq::int8, HeadDim, PageTokens>;
    using kivi_2_g32 = cuda::kivi_pair<2, 32, HeadDim, PageTokens>;
    using kivi_2_g64 = cuda::kivi_pair<2, 64, HeadDim, PageTokens>;
    using kivi_4_g32 = cuda::kivi_pair<4, 32, HeadDim, PageTokens>;
    using kivi_4_g64 = cuda::kivi_pair<4, 64, HeadDim, PageTokens>;
    using ref8 = cuda::preset_pair<kvq::ref8, HeadDim, PageTokens>;
    using hi6 = cuda::preset_pair<kvq::hi6, HeadDim, PageTokens>;
    using std5 = cuda::preset_pair<kvq::std5, HeadDim, PageTokens>;
    using std4 = cuda::preset_pair<kvq::std4, HeadDim, PageTokens>;
    using std4_h = cuda::preset_pair<kvq::std4_h, HeadDim, PageTokens>;
    using hi6_h = cuda::preset_pair<kvq::hi6_h, HeadDim, PageTokens>;
    using std5_h = cuda::preset_pair<kvq::std5_h, HeadDim, PageTokens>;
    using low3_h = cuda::preset_pair<kvq::low3_h, HeadDim, PageTokens>;
    using low2_h = cuda::preset_pair<kvq::low2_h, HeadDim, PageTokens>;
    // Pages of two planes: nested8+nested4, since the upper ones lie in pages of nested4.
    using nested4 = cuda::preset_pair<kvq::nested4, HeadDim, PageTokens>;
    using nested8 = cuda::plane_pair<nested4>;
    using mix4 = cuda::preset_pair<kvq::mix4, HeadDim, PageTokens>;
    using mix5 = cuda::preset_pair<kvq::mix5, HeadDim, PageTokens>;
    using mix6 = cuda::preset_pair<kvq::mix6, HeadDim, PageTokens>;
    using low3 = cuda::preset_pair<kvq::low3, HeadDim, PageTokens>;
    using low2 = cuda::preset_pair<kvq::low2, HeadDim, PageTokens>;
    // Rows of tokens in the bytes of other systems.
    template <class Rows>
    using rows = cuda::block_pair<Rows, Rows, HeadDim, PageTokens>;
    using fp8 = rows<kvq::rows_of<kvq::row_layout_number("fp8")>>;
    using fp8_e5m2 = rows<kvq::rows_of<kvq::row_layout_number("fp8-e5m2")>>;
    using nvfp4 = rows<kvq::rows_of<kvq::row_layout_number("nvfp4")>>;
    using nvfp4_4over6 = rows<kvq::rows_of<kvq::row_layout_number("nvfp4-4over6")>>;
    using mxfp8 = rows<kvq::rows_of<kvq::row_layout_number("mxfp8")>>;
    using mxfp4 = rows<kvq::rows_of<kvq::row_layout_number("mxfp4")>>;
    // Records of latents.
    template <class Records>
    struct records {
        using keys = Records;
    };
    using mla_656 = records<kvq::records_of<kvq::record_layout_number("mla-656")>>;
    using mla_656_pow2 = records<kvq::records_of<kvq::record_layout_number("mla-656-pow2")>>;
    using mla_584 = records<kvq::records_of<kvq::record_layout_number("mla-584")>>;
    using mla_528 = records<kvq::records_of<kvq::record_layout_number("mla-528")>>;
    using mla_288 = records<kvq::records_of<kvq::record_layout_number("mla-288")>>;
};

}  // namespace kvq::c
