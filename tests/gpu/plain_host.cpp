// A program without nvcc: a cache on the device with the kernels of the library (kvq/cuda.hpp). The host's
// compiler builds this file, for a CPU of its own, and links it with c_cuda.cu; emulated, that file includes
// it.
#include <kvq/cuda.hpp>

#include <string>
#include <vector>

namespace plain_host {

using namespace kvq;

/// What went wrong, or nothing. Values are 1 in every channel, so attention must return 1 whatever the keys
/// are.
std::string run() {
    constexpr int dim = 64, heads = 2, q_heads = 4, prompt = 150, steps = 3;
    if (cuda::find_device_format("kivi-4-g64", dim, 64) == nullptr) return "kivi-4-g64 was not compiled";
    if (cuda::find_device_format("kivi-4-g64", dim, 32) != nullptr) return "pages of 32 tokens were compiled";
    std::string wrong;
    const auto check = [&](const cuda::status& s, const char* what) {
        if (!s && wrong.empty()) wrong = std::string(what) + ": " + s.message;
    };
    cuda::cache cache;
    const cache_shape shape{.layers = 1, .kv_heads = heads, .head_dim = dim};
    const cuda::cache_options options{.formats = {"kivi-4-g64"}, .page_tokens = 64, .recent = 40};
    if (cache.open(shape, {.formats = {"low2"}, .page_tokens = 64, .recent = 40}, cuda::library_formats(),
                   nullptr))
        return "low2 was not compiled, but a cache was opened";
    check(cache.open(shape, options, cuda::library_formats(), nullptr), "open");
    if (!wrong.empty()) return wrong;

    std::vector<float16> rows(static_cast<std::size_t>(prompt) * (2 * heads + 2 * q_heads) * dim);
    for (std::size_t i = 0; i < rows.size(); ++i)
        rows[i] = float16(static_cast<float>(i * 7919 % 257) / 128.0f - 1.0f);
    const std::size_t of_kv = static_cast<std::size_t>(prompt) * heads * dim,
                      of_q = static_cast<std::size_t>(prompt) * q_heads * dim;
    for (std::size_t i = of_kv; i < 2 * of_kv; ++i) rows[i] = float16(1.0f);
    void* memory = nullptr;
    const std::size_t bytes = rows.size() * sizeof(float16);
    if (cudaMalloc(&memory, bytes) != cudaSuccess) return "no device memory";
    if (cudaMemcpy(memory, rows.data(), bytes, cudaMemcpyHostToDevice) != cudaSuccess) return "copying";
    auto* const k = static_cast<float16*>(memory);
    float16 *const v = k + of_kv, *const q = v + of_kv, *const out = q + of_q;
    const auto view = [](const float16* data, int tokens, int of_heads) {
        return token_view<const float16>(data, tokens, of_heads, dim);
    };

    const cuda::sequence_id sequence = cache.new_sequence();
    check(cache.begin_prompt(sequence, prompt, nullptr), "begin_prompt");
    check(cache.prefill(0, view(k, prompt, heads), view(v, prompt, heads), view(q, prompt, q_heads),
                        token_view<float16>(out, prompt, q_heads, dim), {}, nullptr),
          "prefill");
    for (int i = 0; i < steps; ++i) {
        check(cache.begin_step(std::span(&sequence, 1), 1, nullptr), "begin_step");
        check(cache.append(0, view(k, 1, heads), view(v, 1, heads), nullptr), "append");
        check(cache.attend(0, view(q, 1, q_heads), token_view<float16>(out, 1, q_heads, dim), {}, nullptr),
              "attend");
    }
    cuda::sequence_id copy;
    check(cache.fork(sequence, copy, nullptr), "fork");
    if (cudaDeviceSynchronize() != cudaSuccess && wrong.empty()) wrong = "a kernel failed";
    if (cudaMemcpy(rows.data(), memory, bytes, cudaMemcpyDeviceToHost) != cudaSuccess && wrong.empty())
        wrong = "copying back";
    (void)cudaFree(memory);
    if (cache.tokens(copy) != prompt + steps && wrong.empty()) wrong = "the fork has other tokens";
    for (std::size_t i = rows.size() - of_q; i < rows.size() && wrong.empty(); ++i)
        if (const float x = static_cast<float>(rows[i]); !(x > 0.998f && x < 1.002f))
            wrong = "an output is " + std::to_string(x) + ", not 1";
    return wrong;
}

}  // namespace plain_host
