// Latent attention, one step: all query heads over latents of 512 and 64 rotary channels, the values 512 of
// them.
//
//   latent [--json] [--quick] [FORMAT]...      --quick: of 8192 tokens; of these formats and bf16 alone
//
// Compiled with -DFLASH_MLA (scripts/gpu-bench latent with FLASH_MLA=FOLDER): also FlashMLA's kernel on bf16.
//
// 16 heads (tensor parallel 8) and 128, batches of one length, pages of 128 tokens (kivi-4-g64 and bf16: 64)
// in random order. Latents are normal numbers, quantized on the device; rotary channels are fp16, those of
// mla-656 bf16. "bf16": this library's kernel on pages of 16-bit values, the baseline of the factors. GB/s:
// bytes of pages; TFLOP/s: 2 (576 + 512) per head and token. Error: of some rows, against double on the
// dequantized latents. Last: the kernel that was chosen.
#include <kvq/cuda/latent/latent.cuh>
#include <kvq/cuda/quantize/pages.cuh>
#include <kvq/schemes/presets.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "shuffled_pages.cuh"
#if defined(FLASH_MLA)
#include "flash_mla.cuh"
#endif

namespace {

using namespace kvq;
using bench::on_device;

constexpr int latent = 512, rotary = 64, dim = latent + rotary, value_dim = 512;

/// Copies blocks to where pages have them.
__global__ void place_blocks(const std::byte* from, std::size_t bytes, std::byte* to, std::size_t stride) {
    const auto* const source = reinterpret_cast<const uint4*>(from + blockIdx.x * bytes);
    auto* const target = reinterpret_cast<uint4*>(to + blockIdx.x * stride);
    for (std::size_t i = threadIdx.x; i < bytes / 16; i += blockDim.x) target[i] = source[i];
}

/// Half floats become bfloat16.
__global__ void round_to_bfloat16(std::uint16_t* x, std::size_t n) {
    for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n;
         i += std::size_t{gridDim.x} * blockDim.x)
        x[i] = bfloat16(static_cast<float>(float16::from_bits(x[i]))).bits;
}

/// Pages that hold latents.
template <class Pair>
struct latent_pages : bench::shuffled_pages<Pair> {
    using bench::shuffled_pages<Pair>::memory;

    latent_pages(int sequences, int length, const int* tokens)
        : bench::shuffled_pages<Pair>(sequences, length, tokens) {
        if constexpr (full_precision<typename Pair::keys>) {
            if constexpr (std::is_same_v<typename Pair::keys::value_type, bfloat16>)
                round_to_bfloat16<<<1024, 256>>>(reinterpret_cast<std::uint16_t*>(memory), this->bytes / 2);
        } else {
            // Some pages are quantized, and all others are copies of them.
            constexpr std::size_t few = 64;
            using source_pair = cuda::latent_pair<full<float16>, dim, 0, value_dim, Pair::page_tokens>;
            std::byte* const source = on_device<std::byte>(few * source_pair::key_block_bytes);
            bench::fill_normal(source, few * source_pair::key_block_bytes, 3);
            std::vector<int> numbers(few);
            std::iota(numbers.begin(), numbers.end(), 0);
            int* const all = bench::on_device(numbers);
            cuda::cache_ref<source_pair> from;
            from.key_pages = source;
            from.key_page_bytes = source_pair::key_block_bytes;
            from.kv_heads = 1;
            bench::check(
                cuda::requantize_pages(from, this->ref, all, all, static_cast<int>(few), nullptr, nullptr));
            for (std::size_t i = few; i < this->count; i += few)
                place_blocks<<<static_cast<unsigned>(std::min(few, this->count - i)), 256>>>(
                    memory, Pair::key_block_bytes, memory + i * Pair::key_block_bytes, Pair::key_block_bytes);
            BENCH_OK(cudaDeviceSynchronize());
            for (void* p : {static_cast<void*>(source), static_cast<void*>(all)}) cudaFree(p);
        }
    }
};

/// Values of pages, for the reference.
template <class Pair>
struct page_values {
    cuda::cache_ref<Pair> cache;
    __device__ double operator()(int sequence, int t, int c) const {
        const int page = cache.block_table[cache.table_entry(sequence, t / Pair::page_tokens)];
        return static_cast<double>(
            cuda::detail::read_value<tensor::key>(cache, page, 0, t % Pair::page_tokens, c));
    }
};

/// One row in double: a thread block per row, threads share tokens, then channels.
template <class Values>
__global__ void reference_kernel(Values values, const bfloat16* q, int heads, int length, float scale,
                                 double* scores, double* out) {
    const int sequence = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y),
              thread = static_cast<int>(threadIdx.x);
    const auto row = static_cast<std::size_t>(blockIdx.x * gridDim.y + blockIdx.y);
    double* const own = scores + row * static_cast<std::size_t>(length);
    const bfloat16* const query = q + (static_cast<std::size_t>(sequence) * static_cast<std::size_t>(heads) +
                                       static_cast<std::size_t>(head)) *
                                          dim;
    for (int t = thread; t < length; t += static_cast<int>(blockDim.x)) {
        double s = 0.0;
        for (int c = 0; c < dim; ++c)
            s += static_cast<double>(static_cast<float>(query[c])) * values(sequence, t, c);
        own[t] = s * static_cast<double>(scale);
    }
    __syncthreads();
    double top = -1e300, sum = 0.0, output = 0.0;
    for (int t = 0; t < length; ++t) top = fmax(top, own[t]);
    for (int t = 0; t < length; ++t) {
        const double w = exp(own[t] - top);
        sum += w;
        output += w * values(sequence, t, thread);
    }
    out[row * value_dim + static_cast<std::size_t>(thread)] = output / sum;
}

struct shape {
    int heads, sequences, length;
};
const float scale_of_scores = 1.0f / std::sqrt(192.0f);

/// attend(q, out, stream) over tokens of so many bytes.
template <class Values, class Attend>
double time_rows(const char* name, const char* kernel, const shape& c, bool json, double baseline,
                 double token_bytes, const Values& values, const Attend& attend) {
    const auto rows = static_cast<std::size_t>(c.sequences * c.heads);
    bfloat16* const q = on_device<bfloat16>(rows * dim);
    bench::fill_normal(q, rows * dim * 2, 7);
    round_to_bfloat16<<<1024, 256>>>(reinterpret_cast<std::uint16_t*>(q), rows * dim);
    bfloat16* const out = on_device<bfloat16>(rows * value_dim);
    const double us = bench::time_launches(
        4, [&](int, cudaStream_t stream) { attend(q, out, stream); }, 5);
    std::vector<bfloat16> got(rows * value_dim);
    BENCH_OK(cudaMemcpy(got.data(), out, got.size() * 2, cudaMemcpyDeviceToHost));

    const int some = 2;  // sequences and heads
    double* const scores = on_device<double>(static_cast<std::size_t>(some * some * c.length));
    double* const wanted = on_device<double>(static_cast<std::size_t>(some * some * value_dim));
    reference_kernel<<<dim3(some, some), value_dim>>>(values, q, c.heads, c.length, scale_of_scores, scores,
                                                      wanted);
    std::vector<double> want(static_cast<std::size_t>(some * some * value_dim));
    BENCH_OK(cudaMemcpy(want.data(), wanted, want.size() * 8, cudaMemcpyDeviceToHost));
    double off = 0.0, size = 0.0;
    for (std::size_t i = 0; i < want.size(); ++i) {
        const std::size_t row = i / value_dim, sequence = row / some, head = row % some;
        const double have = static_cast<double>(static_cast<float>(
            got[(sequence * static_cast<std::size_t>(c.heads) + head) * value_dim + i % value_dim]));
        off += (have - want[i]) * (have - want[i]);
        size += want[i] * want[i];
    }
    const double all_tokens = static_cast<double>(c.sequences) * c.length;
    const double gb = all_tokens * token_bytes / us * 1e-3;
    const double tflops = all_tokens * c.heads * 2.0 * (dim + value_dim) / us * 1e-6;
    const double factor = baseline == 0.0 ? 1.0 : baseline / us;
    if (json)
        std::printf(
            "{\"name\": \"latent/%d heads/%d x %d/%s\", \"us\": %.1f, \"factor\": %.2f, \"GB/s\": %.0f, "
            "\"TFLOP/s\": %.0f, \"error\": %.2g, \"kernel\": \"%s\"}\n",
            c.heads, c.sequences, c.length, name, us, factor, gb, tflops, std::sqrt(off / size), kernel);
    else
        std::printf(
            "%4d heads %3d x %-6d %-18s %9.1f us  x %.2f  %5.0f GB/s  %4.0f TFLOP/s  error %.2g  %s\n",
            c.heads, c.sequences, c.length, name, us, factor, gb, tflops, std::sqrt(off / size), kernel);
    for (void* p : {static_cast<void*>(q), static_cast<void*>(out), static_cast<void*>(scores),
                    static_cast<void*>(wanted)})
        cudaFree(p);
    return us;
}

template <class Pair>
double time_format(const char* name, const shape& c, bool json, double baseline) {
    int* const tokens = bench::on_device(std::vector<int>(static_cast<std::size_t>(c.sequences), c.length));
    const latent_pages<Pair> pages(c.sequences, c.length, tokens);
    const auto mix = cuda::make_mixed(0, pages.ref);
    using mix_type = std::remove_const_t<decltype(mix)>;
    const std::size_t bytes = cuda::latent_workspace_bytes<mix_type, bfloat16>(c.sequences, c.heads);
    void* const workspace = on_device<std::byte>(bytes);
    const double us =
        time_rows(name, cuda::latent_kernel<mix_type, bfloat16>(c.heads).kernel, c, json, baseline,
                  static_cast<double>(Pair::key_block_bytes) / Pair::page_tokens,
                  page_values<Pair>{pages.ref}, [&](const bfloat16* q, bfloat16* out, cudaStream_t stream) {
                      bench::check(cuda::attend_latents<bfloat16>(
                          mix, {q, c.sequences, c.heads, dim}, {out, c.sequences, c.heads, value_dim},
                          {.scale = scale_of_scores}, workspace, bytes, stream));
                  });
    for (void* p : {workspace, static_cast<void*>(tokens)}) cudaFree(p);
    return us;
}

#if defined(FLASH_MLA)
/// Rows of bf16 in FlashMLA's pages.
struct row_values {
    const bfloat16* pages;
    const int* table;
    int columns;
    __device__ double operator()(int sequence, int t, int c) const {
        const auto page =
            static_cast<std::size_t>(table[sequence * columns + t / bench::flash_mla::page_tokens]);
        return static_cast<double>(static_cast<float>(
            pages[(page * bench::flash_mla::page_tokens + t % bench::flash_mla::page_tokens) * dim + c]));
    }
};

void time_flash_mla(const shape& c, bool json, double baseline) {
    // Pages of as many bytes as those of bf16 here.
    using same_size =
        cuda::latent_pair<full<bfloat16>, latent, rotary, value_dim, bench::flash_mla::page_tokens>;
    int* const tokens = bench::on_device(std::vector<int>(static_cast<std::size_t>(c.sequences), c.length));
    const latent_pages<same_size> pages(c.sequences, c.length, tokens);
    auto* const rows = reinterpret_cast<bfloat16*>(pages.memory);
    bench::flash_mla peer(rows, pages.table, tokens, c.sequences, c.length, c.heads, scale_of_scores);
    time_rows("FlashMLA, bf16", "FlashMLA", c, json, baseline, dim * 2.0,
              row_values{rows, pages.table, pages.ref.table_columns},
              [&](bfloat16* q, bfloat16* out, cudaStream_t stream) { peer.attend(q, out, stream); });
    cudaFree(tokens);
}
#endif

template <class Scheme, int PageTokens, class Last = full<float16>>
using pair = cuda::latent_pair<Scheme, latent, rotary, value_dim, PageTokens, Last>;

}  // namespace

int main(int argc, char** argv) {
    bool json = false, quick = false;
    std::vector<const char*> formats;
    for (int i = 1; i < argc; ++i)
        if (std::strcmp(argv[i], "--json") == 0)
            json = true;
        else if (std::strcmp(argv[i], "--quick") == 0)
            quick = true;
        else if (std::strncmp(argv[i], "--", 2) != 0)
            formats.push_back(argv[i]);
    for (const shape& c :
         {shape{16, 64, 4096}, shape{16, 64, 8192}, shape{16, 8, 65536}, shape{128, 64, 1024},
          shape{128, 64, 2048}, shape{128, 64, 4096}, shape{128, 64, 8192}, shape{128, 8, 65536}}) {
        if (quick && (c.length != 8192)) continue;
        const double baseline = time_format<pair<full<bfloat16>, 64>>("bf16", c, json, 0.0);
#if defined(FLASH_MLA)
        time_flash_mla(c, json, baseline);
#endif
        const auto time = [&]<class Pair>(std::type_identity<Pair>, const char* name) {
            if (formats.empty() ||
                std::ranges::any_of(formats, [&](const char* own) { return std::strcmp(own, name) == 0; }))
                time_format<Pair>(name, c, json, baseline);
        };
        time(std::type_identity<pair<typename kivi<4, 64>::keys, 64>>{}, "kivi-4-g64");
        time(std::type_identity<pair<typename std4::keys, 128>>{}, "std4");
        time(std::type_identity<pair<typename std4::keys, 128, ref8::keys>>{}, "std4-ref8x64");
        time(std::type_identity<pair<typename kivi<4, 64>::keys, 64, int8>>{}, "kivi-4-g64-int8x64");
        time(std::type_identity<pair<int8, 128>>{}, "int8");
        time(std::type_identity<pair<records_of<record_layout_number("mla-656")>, 64>>{}, "mla-656");
    }
}
