// Kernels of one format: -DFORMAT=0 to 4, -DHEAD_DIM=64 or 128, -DTYPE=bfloat16 or float16, -DPAGE_TOKENS=64
// for other pages than of 128 tokens. The last format has pages of two, for step down.
#include "formats.cuh"

#ifndef PAGE_TOKENS
#define PAGE_TOKENS kvq::default_page_tokens
#endif

namespace llama::device { namespace {

static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM <= 256 && PAGE_TOKENS % 32 == 0,
              "prompts have kernels for heads of a multiple of 32 channels, up to 256, and pages of a "
              "multiple of 32 tokens");

using namespace kvq;

using int8_pair = cuda::block_pair<int8, int8, HEAD_DIM, PAGE_TOKENS>;
using kivi_pair = cuda::kivi_pair<4, 64, HEAD_DIM, PAGE_TOKENS>;

#if FORMAT == 0
[[maybe_unused]] const bool added = add_format<TYPE, kivi_pair>();
#elif FORMAT == 1
[[maybe_unused]] const bool added = add_format<TYPE, int8_pair>();
#elif FORMAT == 2
[[maybe_unused]] const bool added = add_format<TYPE, cuda::preset_pair<std4, HEAD_DIM, PAGE_TOKENS>>();
#elif FORMAT == 3
[[maybe_unused]] const bool added = add_format<TYPE, cuda::preset_pair<low2, HEAD_DIM, PAGE_TOKENS>>();
#else
[[maybe_unused]] const bool added = add_format<TYPE, int8_pair, kivi_pair>();
#endif

}  // namespace
}  // namespace llama::device
