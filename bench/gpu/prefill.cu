// A prompt's attention: chunks of new tokens over a long context in one format.
//
//   prefill [--json] [--quick] [--baseline FILE]       with -DPART=0 to 8: the rows of one format; with
//                                                      -DHEAD_DIM=256 or 512, too
//
// Times with scratch memory for all heads, and without.
// 32 query heads, 8 kv heads, head_dim 128 or HEAD_DIM, one sequence, fp16 tensors. 4 sinks and a recent
// window of 128 tokens in 16 bit, everything else quantized; new tokens in 16 bit, causal among each other.
// Baseline: torch's scaled_dot_product_attention (cuDNN) on 16-bit keys and values of all tokens
// (torch_prefill.py), the same number of products. Error: of some rows, against double on the dequantized
// values. "-plan": with widths of keys that differ between channels and heads.
#include <kvq/cuda/prefill/prefill.cuh>
#include <kvq/cuda/quantize/pages.cuh>
#include <kvq/schemes/presets.hpp>

#include <cmath>
#include <cstring>
#include <fstream>
#include <numeric>
#include <random>

#include "key_plans.cuh"
#include "timing.cuh"

namespace {

using namespace kvq;

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
constexpr int heads = 8, q_heads = 32, dim = HEAD_DIM, usual_page = 64, sinks = 4, recent = 128;

/// Rows of tokens in the bytes of other systems.
template <int Layout, int PageTokens = usual_page>
using row_pair = cuda::block_pair<rows_of<Layout>, rows_of<Layout>, dim, PageTokens>;

float16* random_numbers(std::size_t n) {
    float16* numbers = nullptr;
    BENCH_OK(cudaMalloc(&numbers, n * sizeof(float16)));
    bench::fill_normal(numbers, n * sizeof(float16), static_cast<std::uint32_t>(n));
    return numbers;
}

template <class Format>
struct pages_of {
    static constexpr int page_tokens = Format::page_tokens;
    std::byte* memory = nullptr;
    int* table = nullptr;
    std::uint16_t* plans = nullptr;
    cuda::cache_ref<Format> ref;

    pages_of(int columns, const int* tokens, int first_token, [[maybe_unused]] bool planned = false) {
        if constexpr (cuda::detail::codec<typename Format::keys>.several_widths())
            if (planned) ref.key_plans = plans = bench::key_plans<Format>(heads);
        const std::size_t key_page = ref.dense_key_page(heads), value_page = ref.dense_value_page(heads);
        std::size_t lower_keys = 0, lower_values = 0;
        if constexpr (cuda::detail::has_lower<Format>) {
            lower_keys = heads * Format::lower_key_bytes;
            lower_values = heads * Format::lower_value_bytes;
        }
        const auto count = static_cast<std::size_t>(columns);
        BENCH_OK(cudaMalloc(&memory, (key_page + value_page + lower_keys + lower_values) * count));
        std::vector<int> order(static_cast<std::size_t>(columns));
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), std::mt19937(5));
        std::vector<int> numbers = order;
        if constexpr (cuda::detail::has_lower<Format>) {
            for (int& number : numbers) number = cuda::detail::plane_number(number, columns - 1 - number);
            std::byte* const lower = memory + (key_page + value_page) * count;
            ref.lower = {{lower, lower + lower_keys * count, lower_keys, lower_values}};
        }
        table = bench::on_device(numbers);
        ref.kv_heads = heads;
        ref.key_page_bytes = key_page;
        ref.value_page_bytes = value_page;
        ref.key_pages = memory;
        ref.value_pages = memory + key_page * static_cast<std::size_t>(columns);
        ref.block_table = table;
        ref.tokens = tokens;
        ref.sequences = 1;
        ref.table_columns = columns;
        ref.first_token = first_token;
        if constexpr (cuda::detail::is_strided<Format>) {  // [token][head], as vLLM has them
            constexpr std::size_t row = Format::key_block_bytes / page_tokens;
            ref.own_keys.memory = ref.own_values.memory = {row * heads, row};
        }
        if constexpr (full_precision<typename Format::keys>) {
            bench::fill_normal(memory, (key_page + value_page) * static_cast<std::size_t>(columns), 3);
        } else {
            using source_format = cuda::block_pair<full<float16>, full<float16>, dim, page_tokens>;
            const pages_of<source_format> source(columns, tokens, first_token);
            int *const all = bench::on_device(order), *const to = bench::on_device(numbers);
            bench::check(cuda::requantize_pages(source.ref, ref, all, to, columns, nullptr, nullptr));
            BENCH_OK(cudaDeviceSynchronize());
            cudaFree(all);
            cudaFree(to);
        }
    }
    pages_of(const pages_of&) = delete;
    pages_of& operator=(const pages_of&) = delete;
    ~pages_of() {
        cudaFree(memory);
        cudaFree(table);
        cudaFree(plans);
    }
};

/// One row in double: thread block per row, threads share the tokens.
__global__ void reference_kernel(const float16* q, const float* k, const float* v, int row_stride, int first,
                                 int step, int history, double* out) {
    __shared__ double sums[dim], top;
    const int i = first + static_cast<int>(blockIdx.x) * step, head = static_cast<int>(blockIdx.y);
    const int seen = history + i + 1;
    const float16* const query =
        q + (static_cast<std::size_t>(i) * q_heads + static_cast<std::size_t>(head)) * dim;
    const auto score = [&](int t) {
        double s = 0.0;
        for (int c = 0; c < dim; ++c)
            s += static_cast<double>(static_cast<float>(query[c])) *
                 static_cast<double>(k[static_cast<std::size_t>(t) * static_cast<std::size_t>(row_stride) +
                                       static_cast<std::size_t>(head / (q_heads / heads) * dim + c)]);
        return s / sqrt(static_cast<double>(dim));
    };
    extern __shared__ double scores[];
    double own = -1e300;
    for (int t = static_cast<int>(threadIdx.x); t < seen; t += dim) own = fmax(own, score(t));
    sums[threadIdx.x] = own;
    __syncthreads();
    if (threadIdx.x == 0) {
        top = sums[0];
        for (int j = 1; j < dim; ++j) top = fmax(top, sums[j]);
    }
    __syncthreads();
    double sum = 0.0, output = 0.0;
    for (int t0 = 0; t0 < seen; t0 += dim) {
        const int t = t0 + static_cast<int>(threadIdx.x);
        scores[threadIdx.x] = t < seen ? exp(score(t) - top) : 0.0;
        __syncthreads();
        for (int j = 0; j < dim && t0 + j < seen; ++j) {
            sum += scores[j];
            output +=
                scores[j] * static_cast<double>(
                                v[static_cast<std::size_t>(t0 + j) * static_cast<std::size_t>(row_stride) +
                                  static_cast<std::size_t>(head / (q_heads / heads) * dim) + threadIdx.x]);
        }
        __syncthreads();
    }
    out[(static_cast<std::size_t>(blockIdx.x) * q_heads + static_cast<std::size_t>(head)) * dim +
        threadIdx.x] = output / sum;
}

__global__ void to_floats(const float16* from, float* to, std::size_t n) {
    const std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x;
    if (i < n) to[i] = static_cast<float>(from[i]);
}

template <class Format>
void rows(const char* name, bool json, bool quick, const char* baseline) {
    constexpr int page_tokens = Format::page_tokens;
    using window_format = cuda::block_pair<full<float16>, full<float16>, dim, page_tokens>;
    using sink_format = cuda::block_pair<full<float16>, full<float16>, dim, 16>;
    // Pages of a token: all of the text, as an engine has them.
    constexpr bool whole = cuda::detail::split_slices<Format>;
    constexpr int behind = whole ? 0 : sinks;
    for (const int context : {32768, 131072})
        for (const int chunk : {512, 2048}) {
            if (quick && (context != 32768 || chunk != 2048)) continue;
            int* const tokens = bench::on_device(std::vector<int>{context});
            int* const starts = bench::on_device(std::vector<int>{0, chunk});
            const bool planned = std::strstr(name, "-plan") != nullptr;
            const pages_of<Format> pages((context - behind) / page_tokens + 1, tokens, behind, planned);
            const pages_of<window_format> window(cuda::window_columns(recent, page_tokens), tokens, sinks);
            const pages_of<sink_format> sink(1, tokens, 0);
            const auto cache = [&] {
                if constexpr (whole)
                    return cuda::make_mixed(0, pages.ref);
                else
                    return cuda::make_mixed(recent, cuda::behind_window(pages.ref),
                                            cuda::in_window(window.ref), cuda::sink_tokens(sink.ref, sinks));
            }();
            const auto size = static_cast<std::size_t>(chunk * dim);
            float16 *const q = random_numbers(size * q_heads), *const k = random_numbers(size * heads),
                           *const v = random_numbers(size * heads + 8),
                           *const out = random_numbers(size * q_heads);
            using mix = std::remove_const_t<decltype(cache)>;
            cuda::prefill_options options;
            const auto run = [&](int, cudaStream_t stream) {
                bench::check(cuda::prefill<float16>(cache, {k, chunk, heads, dim}, {v, chunk, heads, dim},
                                                    {q, chunk, q_heads, dim}, {out, chunk, q_heads, dim},
                                                    starts, chunk, options, stream));
            };
            if (!json && context == 32768 && chunk == 2048) {
                const auto taken = cuda::prefill_kernel<mix, float16>();
                std::printf("%s: %s, %s\n", name, taken.kernel, taken.why);
            }
            const double alone = bench::time_launches(3, run, 5);
            options.scratch.bytes = cuda::prefill_scratch_bytes<float16>(cache, context, chunk);
            options.scratch.tokens = context;
            BENCH_OK(cudaMalloc(&options.scratch.memory, options.scratch.bytes + 1));
            const double us = bench::time_launches(3, run, 5);
            cudaFree(options.scratch.memory);

            // Error.
            const std::size_t row = heads * dim, all = static_cast<std::size_t>(context + chunk);
            float *key_floats = nullptr, *value_floats = nullptr;
            BENCH_OK(cudaMalloc(&key_floats, all * row * 4));
            BENCH_OK(cudaMalloc(&value_floats, all * row * 4));
            const token_view<float> key_view(key_floats, context + chunk, heads, dim),
                value_view(value_floats, context + chunk, heads, dim);
            const int committed =
                whole ? context : cuda::committed_pages(context - sinks, recent, page_tokens) * page_tokens;
            // The window's pages by their place in the ring; sinks and quantized pages as the cache has them.
            const auto dequantize = [&](auto ref, int length, int first, int at,
                                        const std::vector<int>& table) {
                int* const length_device = bench::on_device(std::vector<int>{length});
                int* const table_device = bench::on_device(table);
                int* const start = bench::on_device(std::vector<int>{at});
                ref.tokens = length_device;
                ref.first_token = first;
                ref.block_table = table_device;
                ref.table_columns = static_cast<int>(table.size());
                bench::check(cuda::dequantize_tokens(ref, key_view, value_view, start, nullptr));
                BENCH_OK(cudaDeviceSynchronize());
                for (int* p : {length_device, table_device, start}) cudaFree(p);
            };
            const auto table_of = [](const int* device, int n) {
                std::vector<int> host(static_cast<std::size_t>(n));
                BENCH_OK(cudaMemcpy(host.data(), device, host.size() * 4, cudaMemcpyDeviceToHost));
                return host;
            };
            dequantize(pages.ref, behind + committed, behind, 0,
                       table_of(pages.table, pages.ref.table_columns));
            const auto ring = table_of(window.table, window.ref.table_columns);
            std::vector<int> in_order;
            for (int p = committed / page_tokens; p * page_tokens < context - sinks; ++p)
                in_order.push_back(ring[static_cast<std::size_t>(p) % ring.size()]);
            if constexpr (!whole) {
                dequantize(window.ref, context - committed, sinks, committed, in_order);
                dequantize(sink.ref, sinks, 0, 0, table_of(sink.table, 1));
            }
            const unsigned grid = static_cast<unsigned>((size * heads + 255) / 256);
            to_floats<<<grid, 256>>>(k, key_floats + static_cast<std::size_t>(context) * row, size * heads);
            to_floats<<<grid, 256>>>(v, value_floats + static_cast<std::size_t>(context) * row, size * heads);
            constexpr int sampled = 4;
            double* reference = nullptr;
            BENCH_OK(cudaMalloc(&reference, sampled * q_heads * dim * sizeof(double)));
            const int step = (chunk - 1) / (sampled - 1);
            reference_kernel<<<dim3(sampled, q_heads), dim, dim * 8>>>(
                q, key_floats, value_floats, static_cast<int>(row), 0, step, context, reference);
            BENCH_OK(cudaDeviceSynchronize());
            std::vector<double> want(sampled * q_heads * dim);
            std::vector<float16> got(size * q_heads);
            BENCH_OK(cudaMemcpy(want.data(), reference, want.size() * 8, cudaMemcpyDeviceToHost));
            BENCH_OK(cudaMemcpy(got.data(), out, got.size() * 2, cudaMemcpyDeviceToHost));
            double worst = 0.0;
            for (std::size_t i = 0; i < sampled * q_heads; ++i) {
                double error = 0.0, norm = 0.0;
                for (std::size_t c = 0; c < dim; ++c) {
                    const double
                        w = want[i * dim + c],
                        have = static_cast<double>(static_cast<float>(
                            got[(i / q_heads * static_cast<std::size_t>(step) * q_heads + i % q_heads) * dim +
                                c]));
                    error += (w - have) * (w - have);
                    norm += w * w;
                }
                const double relative = std::sqrt(error / norm);
                if (!(relative <= worst)) worst = relative;
            }

            double other = 0.0;
            if (baseline != nullptr) {
                std::ifstream file(baseline);
                int c = 0, n = 0;
                double t = 0.0;
                while (file >> c >> n >> t)
                    if (c == chunk && n == context) other = t;
            }
            const double products = 4.0 * q_heads * dim * chunk * (context + chunk / 2.0);
            if (json)
                std::printf(
                    "{\"bench\": \"prefill\", \"format\": \"%s\", \"chunk\": %d, \"context\": %d, \"us\": "
                    "%.1f, \"tflops\": "
                    "%.1f, \"error\": %.2e, \"vs_torch\": %.3f, \"scratch_bytes\": %zu, \"us_without\": "
                    "%.1f}\n",
                    name, chunk, context, us, products / us * 1e-6, worst, other / us, options.scratch.bytes,
                    alone);
            else
                std::printf(
                    "%-10s %6d over %6d  %9.1f us  %6.1f TFLOP/s  error %.1e  %5.2f x torch  scratch %3zu "
                    "MiB, without %9.1f us\n",
                    name, chunk, context, us, products / us * 1e-6, worst, other / us,
                    options.scratch.bytes >> 20, alone);
            std::fflush(stdout);
            for (void* p : {static_cast<void*>(q), static_cast<void*>(k), static_cast<void*>(v),
                            static_cast<void*>(out), static_cast<void*>(tokens), static_cast<void*>(starts),
                            static_cast<void*>(key_floats), static_cast<void*>(value_floats),
                            static_cast<void*>(reference)})
                cudaFree(p);
        }
}

}  // namespace

int main(int argc, char** argv) {
    bool json = false, quick = false;
    const char* baseline = nullptr;
    for (int i = 1; i < argc; ++i) {
        if (std::strcmp(argv[i], "--json") == 0) json = true;
        if (std::strcmp(argv[i], "--quick") == 0) quick = true;
        if (std::strcmp(argv[i], "--baseline") == 0 && i + 1 < argc) baseline = argv[++i];
    }
#if PART == 0
    rows<cuda::block_pair<full<float16>, full<float16>, dim, usual_page>>("fp16", json, quick, baseline);
#elif PART == 1
    rows<cuda::block_pair<int8, int8, dim, usual_page>>("int8", json, quick, baseline);
#elif PART == 2
    rows<cuda::kivi_pair<4, 64, dim, usual_page>>("kivi-4-g64", json, quick, baseline);
#elif PART == 3
    rows<cuda::preset_pair<std4, dim, usual_page>>("std4", json, quick, baseline);
#elif PART == 4
    for (const char* const name : {"mix4", "mix4-plan"})
        rows<cuda::preset_pair<mix4, dim, usual_page>>(name, json, quick, baseline);
#elif PART == 5
    for (const char* const name : {"low2", "low2-plan"})
        rows<cuda::preset_pair<low2, dim, usual_page>>(name, json, quick, baseline);
#elif PART == 6
    constexpr int fp8 = row_layout_number("fp8");
    rows<row_pair<fp8>>("fp8", json, quick, baseline);
    rows<cuda::strided_rows<row_pair<fp8, 16>>>("fp8 NHD, 16", json, quick, baseline);
    rows<cuda::strided_rows<row_pair<fp8, 1>>>("fp8 NHD, 1", json, quick, baseline);
#elif PART == 7
    rows<row_pair<row_layout_number("nvfp4")>>("nvfp4", json, quick, baseline);
#else
    rows<cuda::plane_pair<cuda::preset_pair<nested4, dim, usual_page>>>("nested8", json, quick, baseline);
#endif
}
