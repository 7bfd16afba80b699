// Storing new tokens, and quantizing full pages: time and bandwidth of what is read and written, against a
// plain copy.
//
//   store [--json]
//
// Store: up to 512 tokens: one per sequence, each to a page of its own. "rows": a plain 16-bit store into
// pages of [token][head] [channel], as engines without quantization have it; nothing but copies.
// Pages: requantize_pages, from 16-bit window pages of 128 tokens if no other format is named; "plan":
// channels of different widths, "feedback": error feedback. Commit: commit_full_pages of 128 sequences, of
// which so many have a page that is due.
#include <kvq/cuda/quantize/pages.cuh>
#include <kvq/cuda/store/store.cuh>
#include <kvq/schemes/presets.hpp>

#include <cmath>
#include <cstring>
#include <random>
#include <string>

#include "timing.cuh"

namespace {

using namespace kvq;

constexpr int heads = 8;

/// Random bits become finite fp16 numbers of ordinary size.
__global__ void make_finite(std::uint32_t* words, std::size_t n) {
    const std::size_t threads = static_cast<std::size_t>(gridDim.x) * blockDim.x;
    for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += threads)
        words[i] = (words[i] & 0x9fff9fffu) | 0x20002000u;
}

/// One thread block copies all heads of a token.
__global__ void store_rows(const uint4* from, uint4* to, std::size_t page_rows, const long long* mapping) {
    const std::size_t slot = static_cast<std::size_t>(mapping[blockIdx.x]);
    to[(blockIdx.y * page_rows + slot) * blockDim.x + threadIdx.x] =
        from[(static_cast<std::size_t>(blockIdx.y) * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x];
}

template <class Format>
void run(const char* name, int tokens, const bench::ceilings& ceiling, bool json, std::byte* memory,
         std::size_t bytes, bool rows = false) {
    const std::size_t in = static_cast<std::size_t>(tokens) * heads * Format::head_dim * 2;
    const bool single = tokens <= 512;  // one token for each of many sequences
    const int pages = single ? tokens : (tokens + Format::page_tokens - 1) / Format::page_tokens;
    const std::size_t block_bytes = Format::key_block_bytes + Format::value_block_bytes;
    const std::size_t out = static_cast<std::size_t>(tokens) * heads * block_bytes / Format::page_tokens;
    const std::size_t set = 2 * in + static_cast<std::size_t>(pages) * heads * block_bytes;
    const std::size_t sets =
        std::max<std::size_t>(1, std::min<std::size_t>((std::size_t{3} << 28) / set + 1, bytes / set));
    std::vector<long long> mapping(static_cast<std::size_t>(tokens));
    for (int i = 0; i < tokens; ++i) mapping[static_cast<std::size_t>(i)] = i;
    if (single)
        for (int i = 0; i < tokens; ++i)
            mapping[static_cast<std::size_t>(i)] =
                static_cast<long long>(i) * Format::page_tokens + 37 * i % Format::page_tokens;
    long long* slots_device = nullptr;
    BENCH_OK(cudaMalloc(&slots_device, mapping.size() * sizeof(long long)));
    BENCH_OK(
        cudaMemcpy(slots_device, mapping.data(), mapping.size() * sizeof(long long), cudaMemcpyHostToDevice));
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
        bench::check(cuda::store<Format, float16>(
            cache, token_view<const float16>(k, tokens, heads, Format::head_dim),
            token_view<const float16>(k + in / 2, tokens, heads, Format::value_dim), slots_device, nullptr,
            stream));
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

constexpr int dim = 128, page_tokens = 128;
using window_format = cuda::block_pair<full<float16>, full<float16>, dim, page_tokens>;

template <class Format>
cuda::cache_ref<Format> pages_at(std::byte* keys, int pages) {
    cuda::cache_ref<Format> cache;
    cache.kv_heads = heads;
    cache.key_page_bytes = cuda::cache_ref<Format>::dense_key_page(heads);
    cache.value_page_bytes = cuda::cache_ref<Format>::dense_value_page(heads);
    cache.key_pages = keys;
    cache.value_pages = keys + static_cast<std::size_t>(pages) * cache.key_page_bytes;
    cache.set_transform(tensor::key, 0);
    return cache;
}
template <class Format>
std::size_t bytes_of(int pages) {
    return static_cast<std::size_t>(pages) * heads * (Format::key_block_bytes + Format::value_block_bytes);
}

/// Channels of different importance and queries whose neighbouring channels are alike.
const calibration& statistics() {
    static const calibration c = [] {
        calibration all({1, heads, dim, dim}, true);
        std::mt19937 r(5);
        std::normal_distribution<float> normal;
        std::vector<float> x(512 * heads * dim), size(heads * dim);
        for (float& s : size) s = std::exp(normal(r));
        const auto fill = [&] {
            for (std::size_t i = 0; i < x.size(); ++i)
                x[i] = normal(r) * size[i % size.size()] + (i % dim ? 0.7f * x[i - 1] : 0.0f);
        };
        fill();
        all.add_keys(0, token_view<const float>(x.data(), 512, heads, dim));
        fill();
        all.add_queries(0, token_view<const float>(x.data(), 512, heads, dim));
        return all;
    }();
    return c;
}

template <class Format>
void add_statistics(cuda::cache_ref<Format>& cache, bool plan, bool feedback) {
    const typename Format::keys keys = [] {
        if constexpr (std::constructible_from<typename Format::keys, const calibration&>)
            return typename Format::keys(statistics());
        else
            return typename Format::keys();
    }();
    if constexpr (cuda::detail::codec<typename Format::keys>.several_widths())
        if (plan) {
            std::vector<std::uint16_t> plans(static_cast<std::size_t>(heads * cuda::key_plan_words<Format>));
            cuda::write_key_plan<Format>(*keys.plan(), 0, plans.data());
            cache.key_plans = bench::on_device(plans);
        }
    if constexpr (requires { keys.encoder.matrices; })
        if (feedback) {
            std::vector<float> matrices(static_cast<std::size_t>(heads * dim * dim));
            cuda::write_key_feedback<Format>(*keys.encoder.matrices, 0, matrices.data());
            cache.key_feedback = bench::on_device(matrices);
        }
}

void report(const char* op, const char* name, int pages, double us, double bytes,
            const bench::ceilings& ceiling, bool json) {
    const double gbps = bytes / us * 1e-3, numbers = 2.0 * pages * page_tokens * heads * dim;
    if (json)
        std::printf(
            "{\"op\": \"%s\", \"scheme\": \"%s\", \"batch\": 1, \"tokens\": %d, \"q_heads\": 0, "
            "\"kv_heads\": %d, \"head_dim\": %d, \"us\": %.2f, \"gbps\": %.1f, "
            "\"ceiling_share\": %.3f, \"numbers_per_ns\": %.2f}\n",
            op, name, pages * page_tokens, heads, dim, us, gbps, gbps / ceiling.copy, numbers / us * 1e-3);
    else
        std::printf("%-6s %-20s %4d pages x %d heads %9.1f us %7.2f numbers/ns %5.1f %% of a copy\n", op,
                    name, pages, heads, us, numbers / us * 1e-3, 100.0 * gbps / ceiling.copy);
    std::fflush(stdout);
}

/// `pages` pages of From -> To, from other memory every time.
template <class From, class To>
void run_pages(const char* name, int pages, const bench::ceilings& ceiling, bool json, std::byte* memory,
               std::size_t bytes, bool plan = false, bool feedback = false) {
    const std::size_t one = bytes_of<window_format>(pages), two = bytes_of<From>(pages),
                      set = one + two + bytes_of<To>(pages);
    const int sets = static_cast<int>(
        std::max<std::size_t>(1, std::min<std::size_t>((std::size_t{3} << 28) / set + 1, bytes / set)));
    bench::fill_normal(memory, static_cast<std::size_t>(sets) * set, 7u);
    std::vector<int> numbers(static_cast<std::size_t>(pages));
    for (int i = 0; i < pages; ++i) numbers[static_cast<std::size_t>(i)] = i;
    int* const list = bench::on_device(numbers);
    auto to = pages_at<To>(nullptr, pages);
    add_statistics(to, plan, feedback);
    const auto go = [&](const auto& source, const auto& target, cudaStream_t stream) {
        bench::check(cuda::requantize_pages(source, target, list, list, pages, nullptr, stream));
    };
    const auto base = [&](int i) { return memory + static_cast<std::size_t>(i % sets) * set; };
    if constexpr (!std::is_same_v<From, window_format>)
        for (int i = 0; i < sets; ++i)
            go(pages_at<window_format>(base(i), pages), pages_at<From>(base(i) + one, pages), nullptr);
    const double us =
        bench::time_launches(std::max(sets, pages < 64 ? 20 : 4), [&](int i, cudaStream_t stream) {
            auto target = pages_at<To>(base(i) + one + two, pages);
            target.key_plans = to.key_plans;
            target.key_feedback = to.key_feedback;
            if constexpr (std::is_same_v<From, window_format>)
                go(pages_at<From>(base(i), pages), target, stream);
            else
                go(pages_at<From>(base(i) + one, pages), target, stream);
        });
    report("pages", name, pages, us, static_cast<double>(two + bytes_of<To>(pages)), ceiling, json);
    BENCH_OK(cudaFree(list));
}

/// A commit of 128 sequences, `due` of which have a page that is due.
template <class To>
void run_commit(const char* name, int due, const bench::ceilings& ceiling, bool json, std::byte* memory) {
    constexpr int sequences = 128, recent = 32, columns = 2;
    std::vector<int> table(sequences * columns), lengths(sequences, page_tokens), fresh(sequences);
    for (int i = 0; i < sequences * columns; ++i) table[static_cast<std::size_t>(i)] = i;
    for (int b = 0; b < sequences; ++b) fresh[static_cast<std::size_t>(b)] = b;
    for (int i = 0; i < due; ++i)
        lengths[static_cast<std::size_t>(i * sequences / std::max(due, 1))] = page_tokens + recent;
    bench::fill_normal(memory, bytes_of<window_format>(sequences * columns), 7u);
    auto window = pages_at<window_format>(memory, sequences * columns);
    auto to = pages_at<To>(memory + bytes_of<window_format>(sequences * columns), sequences * columns);
    const std::size_t entries = table.size();
    // Every launch finds the tables as they were.
    int* const state = bench::on_device([&] {
        std::vector<int> all = table;
        all.resize(2 * entries, -1);
        all.insert(all.end(), fresh.begin(), fresh.end());
        return all;
    }());
    const std::size_t state_bytes = (2 * entries + sequences) * sizeof(int);
    int* const work = bench::on_device(std::vector<int>(2 * entries + sequences));
    int* const lengths_device = bench::on_device(lengths);
    window.block_table = work;
    to.block_table = work + entries;
    window.tokens = to.tokens = lengths_device;
    window.sequences = to.sequences = sequences;
    window.table_columns = to.table_columns = columns;
    const auto reset = [&](int, cudaStream_t stream) {
        BENCH_OK(cudaMemcpyAsync(work, state, state_bytes, cudaMemcpyDeviceToDevice, stream));
    };
    const double copies = bench::time_launches(20, reset);
    const double us = bench::time_launches(20, [&](int i, cudaStream_t stream) {
        reset(i, stream);
        bench::check(cuda::commit_full_pages(window, to, work, work + entries, recent, work + 2 * entries,
                                             nullptr, stream));
    });
    report("commit", name, due, us - copies,
           static_cast<double>(bytes_of<window_format>(due) + bytes_of<To>(due)), ceiling, json);
    BENCH_OK(cudaFree(state));
    BENCH_OK(cudaFree(work));
    BENCH_OK(cudaFree(lengths_device));
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
        run<cuda::block_pair<full<float16>, full<float16>, 128, 64>>("fp16 rows", tokens, ceiling, json,
                                                                     memory, bytes, true);
        run<cuda::block_pair<full<float16>, full<float16>, 128, 64>>("fp16", tokens, ceiling, json, memory,
                                                                     bytes);
        run<cuda::block_pair<int8, int8, 128, 64>>("int8", tokens, ceiling, json, memory, bytes);
        run<cuda::block_pair<affine<4, per_token<>>, affine<4, per_token<>>, 128, 64>>(
            "token4-g128", tokens, ceiling, json, memory, bytes);
        run<cuda::block_pair<affine<4, per_token<64>>, affine<4, per_token<64>>, 128, 64>>(
            "token4-g64", tokens, ceiling, json, memory, bytes);
    }
    using std4_format = cuda::preset_pair<std4, dim>;
    using std4_h_format = cuda::preset_pair<std4_h, dim>;
    using low3_format = cuda::preset_pair<low3, dim>;
    using low2_format = cuda::preset_pair<low2, dim>;
    using kivi4_format = cuda::kivi_pair<4, 64, dim, page_tokens>;
    for (const int pages : {1, 8, 512}) {
        const auto all = [&](auto from, auto to, const char* name, bool plan = false, bool feedback = false) {
            run_pages<typename decltype(from)::pair_type, typename decltype(to)::pair_type>(
                name, pages, ceiling, json, memory, bytes, plan, feedback);
        };
        const cuda::cache_ref<window_format> window;
        const cuda::cache_ref<std4_format> std4_pages;
        const cuda::cache_ref<low3_format> low3_pages;
        const cuda::cache_ref<low2_format> low2_pages;
        all(window, cuda::cache_ref<cuda::block_pair<int8, int8, dim, page_tokens>>(), "int8");
        all(window, cuda::cache_ref<kivi4_format>(), "kivi-4-g64");
        all(window, std4_pages, "std4");
        all(window, cuda::cache_ref<std4_h_format>(), "std4-h");
        all(window, std4_pages, "std4 feedback", false, true);
        all(window, low3_pages, "low3");
        all(window, low3_pages, "low3 plan", true);
        all(window, low3_pages, "low3 plan feedback", true, true);
        all(window, low2_pages, "low2");
        all(window, low2_pages, "low2 plan", true);
        all(window, low2_pages, "low2 plan feedback", true, true);
        all(std4_pages, low2_pages, "std4 -> low2");
        all(low2_pages, std4_pages, "low2 -> std4");
    }
    for (const int due : {0, 1, 16, 128}) {
        run_commit<kivi4_format>("kivi-4-g64", due, ceiling, json, memory);
        run_commit<std4_format>("std4", due, ceiling, json, memory);
        run_commit<std4_h_format>("std4-h", due, ceiling, json, memory);
        run_commit<low2_format>("low2", due, ceiling, json, memory);
    }
    BENCH_OK(cudaFree(memory));
    return 0;
}
