// SPDX-License-Identifier: MIT
// The CUDA examples of docs/, as snippets.cpp.
#include <cstdio>
#include <kvq/backends/cuda.cuh>

void attend(const kvq::float16* q, kvq::float16* out, float* lse, int batch, int q_heads, void* workspace,
            std::size_t workspace_bytes, cudaStream_t stream) {
    using coded = kvq::cuda::kivi_format<4, 64, /*head_dim*/ 128, /*page_tokens*/ 64>;
    kvq::cuda::cache_ref<coded> cache = {};
    auto s = kvq::cuda::attend<coded, kvq::float16>(
        cache, {q, batch, q_heads, 128}, {out, batch, q_heads, 128},
        {.softcap = 30.f, .window = 4096, .query_tokens = 1, .lse = lse}, workspace, workspace_bytes, stream);
    if (!s) std::puts(s.message);
}
