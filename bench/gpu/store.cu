// Storing new tokens: time and bandwidth of what is read (fp16) and written (the format), against a plain copy.
//
//   store [--json]
//
// Up to 512 tokens: one per sequence, each to a page of its own. "rows": a plain 16-bit store into pages of [token][head]
// [channel], as engines without quantization have it; nothing but copies.
#include <kvq/backends/cuda/store.cuh>

#include <cstring>
#include <string>

#include "timing.cuh"

namespace {

using namespace kvq;

/// Random bits become finite fp16 numbers of ordinary size.
__global__ void make_finite(std::uint32_t* words, std::size_t n) {
    const std::size_t threads = static_cast<std::size_t>(gridDim.x) * blockDim.x;
    for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += threads)
        words[i] = (words[i] & 0x9fff9fffu) | 0x20002000u;
}

/// One thread block copies all heads of a token.
__global__ void store_rows(const uint4* from, uint4* to, std::size_t page_rows, const long long* slots) {
    const std::size_t slot = static_cast<std::size_t>(slots[blockIdx.x]);
    to[(blockIdx.y * page_rows + slot) * blockDim.x + threadIdx.x] =
        from[(static_cast<std::size_t>(blockIdx.y) * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x];
}

template <class Format>
void run(const char* name, int tokens, const bench::ceilings& ceiling, bool json, std::byte* memory,
         std::size_t bytes, bool rows = false) {
    constexpr int heads = 8;
    const std::size_t in = static_cast<std::size_t>(tokens) * heads * Format::head_dim * 2;
    const bool single = tokens <= 512;  // one token for each of many sequences
    const int pages = single ? tokens : (tokens + Format::page_tokens - 1) / Format::page_tokens;
    const std::size_t block_bytes = Format::key_block_bytes + Format::value_block_bytes;
    const std::size_t out = static_cast<std::size_t>(tokens) * heads * block_bytes / Format::page_tokens;
    const std::size_t set = 2 * in + static_cast<std::size_t>(pages) * heads * block_bytes;
    const std::size_t sets =
        std::max<std::size_t>(1, std::min<std::size_t>((std::size_t{3} << 28) / set + 1, bytes / set));
    std::vector<long long> slots(static_cast<std::size_t>(tokens));
    for (int i = 0; i < tokens; ++i) slots[static_cast<std::size_t>(i)] = i;
    if (single)
        for (int i = 0; i < tokens; ++i)
            slots[static_cast<std::size_t>(i)] =
                static_cast<long long>(i) * Format::page_tokens + 37 * i % Format::page_tokens;
    long long* slots_device = nullptr;
    BENCH_OK(cudaMalloc(&slots_device, slots.size() * sizeof(long long)));
    BENCH_OK(
        cudaMemcpy(slots_device, slots.data(), slots.size() * sizeof(long long), cudaMemcpyHostToDevice));
    const auto launch = [&](int i, cudaStream_t stream) {
        std::byte* const at = memory + static_cast<std::size_t>(i) % sets * set;
        cuda::cache_ref<Format> cache;
        cache.kv_heads = heads;
        cache.key_page_bytes = cuda::cache_ref<Format>::dense_key_page(heads);
        cache.value_page_bytes = cuda::cache_ref<Format>::dense_value_page(heads);
        cache.key_pages = at + 2 * in;
        cache.value_pages = cache.key_pages + static_cast<std::size_t>(pages) * cache.key_page_bytes;
        const auto* const k = reinterpret_cast<const float16*>(at);
        if (rows) {
            store_rows<<<dim3(static_cast<unsigned>(tokens), 2), heads * Format::head_dim / 8, 0, stream>>>(
                reinterpret_cast<const uint4*>(at), reinterpret_cast<uint4*>(at + 2 * in),
                static_cast<std::size_t>(pages) * Format::page_tokens, slots_device);
            return;
        }
        const auto status = cuda::store<Format, float16>(
            cache, token_view<const float16>(k, tokens, heads, Format::head_dim),
            token_view<const float16>(k + in / 2, tokens, heads, Format::value_dim), slots_device, nullptr,
            stream);
        if (!status) {
            std::fprintf(stderr, "%s\n", status.message);
            std::exit(2);
        }
    };
    // What earlier runs wrote is no input.
    bench::random_kernel<<<1056, 256>>>(reinterpret_cast<std::uint32_t*>(memory), sets * set / 4, 7u);
    make_finite<<<1056, 256>>>(reinterpret_cast<std::uint32_t*>(memory), sets * set / 4);
    const int count = static_cast<int>(std::max<std::size_t>(sets, 20));
    const double us = bench::time_launches(count, launch);
    const double gbps = static_cast<double>(2 * in + out) / us * 1e-3;
    if (json)
        std::printf(
            "{\"op\": \"store\", \"scheme\": \"%s\", \"batch\": 1, \"tokens\": %d, \"q_heads\": 0, "
            "\"kv_heads\": %d, \"head_dim\": %d, "
            "\"us\": %.2f, \"gbps\": %.1f, \"ceiling_share\": %.3f}\n",
            name, tokens, heads, Format::head_dim, us, gbps, gbps / ceiling.copy);
    else
        std::printf("store %-12s %6d tokens x %d heads %9.1f us %7.0f GB/s %5.1f %% of a copy\n", name,
                    tokens, heads, us, gbps, 100.0 * gbps / ceiling.copy);
    std::fflush(stdout);
    BENCH_OK(cudaFree(slots_device));
}

}  // namespace

int main(int argc, char** argv) {
    bool json = false;
    for (int i = 1; i < argc; ++i) json = json || std::string(argv[i]) == "--json";
    const std::size_t bytes = std::size_t{4} << 30;
    std::byte* memory = nullptr;
    BENCH_OK(cudaMalloc(&memory, bytes));
    bench::random_kernel<<<1056, 256>>>(reinterpret_cast<std::uint32_t*>(memory), bytes / 4, 1u);
    const bench::ceilings ceiling = bench::measure_ceilings(memory, bytes);
    for (const int tokens : {128, 1024, 4096, 65536}) {
        run<cuda::format<full<float16>, full<float16>, 128, 64>>("fp16 rows", tokens, ceiling, json, memory,
                                                                 bytes, true);
        run<cuda::format<full<float16>, full<float16>, 128, 64>>("fp16", tokens, ceiling, json, memory,
                                                                 bytes);
        run<cuda::format<int8, int8, 128, 64>>("int8", tokens, ceiling, json, memory, bytes);
        run<cuda::format<affine<4, per_token<>>, affine<4, per_token<>>, 128, 64>>(
            "token4-g128", tokens, ceiling, json, memory, bytes);
        run<cuda::format<affine<4, per_token<64>>, affine<4, per_token<64>>, 128, 64>>(
            "token4-g64", tokens, ceiling, json, memory, bytes);
    }
    BENCH_OK(cudaFree(memory));
    return 0;
}
