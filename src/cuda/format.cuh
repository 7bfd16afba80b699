// The formats that kvq::library has for its caches on the device. Every entry adds its own (format.cu).
#pragma once

#include <kvq/cuda/host/make_device_format.cuh>
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
    using mix4 = cuda::preset_pair<kvq::mix4, HeadDim, PageTokens>;
    using low3 = cuda::preset_pair<kvq::low3, HeadDim, PageTokens>;
    using low2 = cuda::preset_pair<kvq::low2, HeadDim, PageTokens>;
};

}  // namespace kvq::c
