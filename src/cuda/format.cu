// One entry of the formats of kvq::library on the device. The build writes a file for each of them that
// includes this one: KVQ_TYPE is float16 or bfloat16, KVQ_HEAD_DIM and KVQ_PAGE_TOKENS numbers, KVQ_FORMATS
// members of `of`, such as of::int8, of::std4, KVQ_ENTRY the name of the function, KVQ_SCORE a score modifier
// or not defined. Of latents KVQ_ROTARY channels come behind those of KVQ_HEAD_DIM, and KVQ_FORMATS are such
// as latent<of::std4>, latent<of::std4, ref8::keys>, latent<of::mla_656>. Of indexes it is of_index, with
// keys in KVQ_INDEX_KEYS.
#include "format.cuh"

namespace kvq::c {

namespace {
using of = named<KVQ_HEAD_DIM, KVQ_PAGE_TOKENS>;
#ifdef KVQ_ROTARY
template <class Pair, class Last = full<float16>>
using latent =
    cuda::latent_pair<typename Pair::keys, KVQ_HEAD_DIM, KVQ_ROTARY, KVQ_HEAD_DIM, KVQ_PAGE_TOKENS, Last>;
#endif
#ifdef KVQ_INDEX_KEYS
using of_index = cuda::index_pair<KVQ_HEAD_DIM, KVQ_PAGE_TOKENS, KVQ_INDEX_KEYS>;
#endif
}

#ifdef KVQ_SCORE
void KVQ_ENTRY(device_formats& list) {
    list.push_back(cuda::make_scored_format<KVQ_SCORE, KVQ_TYPE, KVQ_FORMATS>());
}
#else
void KVQ_ENTRY(device_formats& list) {
    list.push_back(cuda::make_device_format<KVQ_TYPE, KVQ_FORMATS>());
    cuda::add_strides<KVQ_TYPE, KVQ_FORMATS>(list.back());
}
#endif

}  // namespace kvq::c
