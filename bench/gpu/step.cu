// A decode step of one layer: `store` of one token per sequence, then `attend` over all of them.
//
//   step [--json]
//
// Launches follow each other as in an engine that does nothing else; 32 query heads, 8 kv heads. "early": attention_options::early;
// "attend": without `store`. Every step has the cache of another layer; together they take 0.75 GB or more.
#include <kvq/backends/cuda.cuh>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>

#include "timing.cuh"

namespace {

using namespace kvq;

constexpr int heads = 8, q_heads = 32, dim = 128, page_tokens = 64;

float16* random_numbers(std::size_t n) {
    float16* numbers = nullptr;
    BENCH_OK(cudaMalloc(&numbers, n * sizeof(float16)));
    bench::fill_normal(numbers, n * sizeof(float16), static_cast<std::uint32_t>(n));
    return numbers;
}

template <class Format>
void run(const char* name, int batch, int tokens, bool json) {
    const int columns = tokens / page_tokens, pages = batch * columns, most = 8192;  // tokens of a prefill
    const std::size_t key_page = cuda::cache_ref<Format>::dense_key_page(heads),
                      value_page = cuda::cache_ref<Format>::dense_value_page(heads),
                      bytes = (key_page + value_page) * static_cast<std::size_t>(pages);
    const int layers = static_cast<int>(std::max<std::size_t>(2, (std::size_t{3} << 28) / bytes + 1));
    std::byte* memory = nullptr;
    BENCH_OK(cudaMalloc(&memory, bytes * static_cast<std::size_t>(layers)));

    std::vector<int> table(static_cast<std::size_t>(pages));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(5));
    std::vector<long long> newest, all(static_cast<std::size_t>(pages) * page_tokens);
    for (int b = 1; b <= batch; ++b)
        newest.push_back((table[static_cast<std::size_t>(b * columns - 1)] + 1LL) * page_tokens - 1);
    std::iota(all.begin(), all.end(), 0LL);
    int* const table_device = bench::on_device(table);
    int* const lengths = bench::on_device(std::vector<int>(static_cast<std::size_t>(batch), tokens));
    long long* const newest_device = bench::on_device(newest);
    long long* const all_device = bench::on_device(all);

    const auto cache_of = [&](int layer) {
        cuda::cache_ref<Format> c;
        c.kv_heads = heads;
        c.key_page_bytes = key_page;
        c.value_page_bytes = value_page;
        c.key_pages = memory + static_cast<std::size_t>(layer) * bytes;
        c.value_pages = c.key_pages + key_page * static_cast<std::size_t>(pages);
        c.block_table = table_device;
        c.tokens = lengths;
        c.sequences = batch;
        c.table_columns = columns;
        return c;
    };
    float16* const k = random_numbers(std::size_t{most} * heads * dim);
    float16* const v = random_numbers(std::size_t{most} * heads * dim);
    const auto store = [&](int layer, int count, const long long* mapping, cudaStream_t stream) {
        bench::check(cuda::store<Format, float16>(
            cache_of(layer), token_view<const float16>(k, count, heads, dim),
            token_view<const float16>(v, count, heads, dim), mapping, nullptr, stream));
    };
    for (int layer = 0; layer < layers; ++layer)
        for (int first = 0; first < pages * page_tokens; first += most)
            store(layer, std::min(most, pages * page_tokens - first), all_device + first, nullptr);
    BENCH_OK(cudaDeviceSynchronize());

    const std::size_t q_count = static_cast<std::size_t>(batch) * q_heads * dim;
    float16* const q = random_numbers(q_count);
    float16* const out = random_numbers(q_count);
    const std::size_t space = cuda::attend_workspace_bytes<Format, float16>(q_heads / heads);
    std::byte* workspace = nullptr;
    BENCH_OK(cudaMalloc(&workspace, space));
    BENCH_OK(cudaMemset(workspace, 0, space));
    const auto time = [&](bool stores, bool early) {
        return bench::time_launches(std::max(16, layers), [&](int i, cudaStream_t stream) {
            if (stores) store(i % layers, batch, newest_device, stream);
            bench::check(cuda::attend(cache_of(i % layers), token_view<const float16>(q, batch, q_heads, dim),
                                      token_view<float16>(out, batch, q_heads, dim), {.early = early},
                                      workspace, space, stream));
        });
    };
    const double step = time(true, false), early = time(true, true), attend = time(false, false);
    if (json)
        std::printf(
            "{\"op\": \"step\", \"scheme\": \"%s\", \"batch\": %d, \"tokens\": %d, \"q_heads\": %d, "
            "\"kv_heads\": %d, \"head_dim\": %d, \"us\": %.2f, \"us_early\": %.2f, \"us_attend\": %.2f}\n",
            name, batch, tokens, q_heads, heads, dim, step, early, attend);
    else
        std::printf("step  %-12s %4d x %6d: store and attend %7.1f us, early %7.1f us; attend %7.1f us\n",
                    name, batch, tokens, step, early, attend);
    std::fflush(stdout);
    for (void* p : {static_cast<void*>(memory), static_cast<void*>(table_device), static_cast<void*>(lengths),
                    static_cast<void*>(newest_device), static_cast<void*>(all_device), static_cast<void*>(k),
                    static_cast<void*>(v), static_cast<void*>(q), static_cast<void*>(out),
                    static_cast<void*>(workspace)})
        BENCH_OK(cudaFree(p));
}

}  // namespace

int main(int argc, char** argv) {
    bool json = false;
    for (int i = 1; i < argc; ++i) json = json || std::string(argv[i]) == "--json";
    const std::pair<int, int> shapes[] = {{16, 2048}, {64, 1024}, {128, 4096}};
    for (const auto& [batch, tokens] : shapes) {
        run<cuda::format<full<float16>, full<float16>, dim, page_tokens>>("fp16", batch, tokens, json);
        run<cuda::format<int8, int8, dim, page_tokens>>("int8", batch, tokens, json);
        run<cuda::format<affine<4, per_token<>>, affine<4, per_token<>>, dim, page_tokens>>(
            "token4-g128", batch, tokens, json);
    }
    return 0;
}
