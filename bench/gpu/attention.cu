// Fused decode attention: time, bandwidth of the format's own bytes, share of the read ceiling, error.
//
//   attention [--json] [--quick] [--only NAME] [--batch N] [--baseline FILE]
//
// FILE has lines "batch tokens q_heads kv_heads head_dim microseconds", as torch_sdpa.py prints them. Every
// launch reads other pages than the one before (the set is larger than the second-level cache), pages are in
// random order, contents are random. Rows with ~: ragged batches, of so many tokens on average. "early": with
// attention_options::early, where launches that follow each other overlap. The error is against the float
// kernel for any shape (attend_any.cuh) on the same pages.
//
// With -DLARGE_HEADS: heads of 256 and 512 channels. With -DROWS: pages in the bytes of other systems.
// With -DMINE: one row for a table of cards (scripts/gpu-bench --mine), in less memory. With -DPRESETS=1 (5
// to 8 bits) or 2 (the narrower ones): the presets, each behind the plain affine format of its width;
// With -DPLANES: a format with two planes, and its upper plane alone, beside int8 and std4. "-plan": channels
// of different widths, where importance differs between channels by factors of exp(4) and more, otherwise
// mixed widths are even.
#include <kvq/cuda/decode/attend.cuh>
#include <kvq/schemes/presets.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <tuple>

#include "key_plans.cuh"
#include "timing.cuh"

namespace {

using namespace kvq;

struct shape {
    int batch, tokens, q_heads, kv_heads;
    bool ragged = false;  // lengths between an eighth of `tokens` and nearly twice as many
    bool operator<(const shape& o) const {
        return std::tie(batch, tokens, q_heads, kv_heads, ragged) <
               std::tie(o.batch, o.tokens, o.q_heads, o.kv_heads, o.ragged);
    }
};

struct settings {
    bool json = false, quick = false;
    std::string only;
    int batch = 0;
    std::map<shape, double> baseline, own_fp16;
    bench::ceilings ceiling{};
    std::byte* memory = nullptr;
    std::size_t bytes = 0;
};

/// Random scales around `step` and biases around -2, for every group and slot, in 8 or 16 bits.
template <class Parameters, class Noise>
__device__ void fill_channels(std::byte* at, int groups, int slot_count, float step, const Noise& noise) {
    for (int i = static_cast<int>(threadIdx.x); i < groups * slot_count; i += static_cast<int>(blockDim.x)) {
        const float a = noise(static_cast<std::size_t>(i)), b = noise(static_cast<std::size_t>(i) + 31);
        if constexpr (std::is_same_v<Parameters, block_parameters<byte_params>>) {
            at[i] = static_cast<std::byte>(208 + static_cast<int>(31.9f * a));  // 0.75 to 1.5 units
            at[groups * slot_count + i] = static_cast<std::byte>(static_cast<int>(255.9f * b));
        } else {
            kvq::detail::store_as(at + 2 * i, float16(step * (0.7f + 0.6f * a)));
            kvq::detail::store_as(at + 2 * (groups * slot_count + i), float16(-2.0f + 0.3f * b));
        }
    }
    if constexpr (std::is_same_v<Parameters, block_parameters<byte_params>>)
        if (static_cast<int>(threadIdx.x) < groups) {
            std::byte* const line = Parameters::shared(at, groups, slot_count, static_cast<int>(threadIdx.x));
            kvq::detail::store_as(line, bfloat16(step));
            kvq::detail::store_as(line + 2, bfloat16(-2.0f));
            kvq::detail::store_as(line + 4, bfloat16(0.3f / 255.0f));
        }
}

/// Random parameters (or 16-bit numbers) in every block; codes are random already.
template <class S>
__global__ void fill_parameters(std::byte* pages, std::size_t blocks, std::size_t block_bytes,
                                block_shape s) {
    const std::size_t block = blockIdx.x;
    if (block >= blocks) return;
    std::byte* const at = pages + block * block_bytes;
    const auto noise = [&](std::size_t i) {
        std::uint32_t x = static_cast<std::uint32_t>(block * 977 + i) * 0x9e3779b9u;
        x = (x ^ (x >> 15)) * 0x85ebca6bu;
        return static_cast<float>((x ^ (x >> 13)) >> 8) * (1.0f / 16777216.0f);
    };
    if constexpr (cuda::detail::token_row_scheme<S>) {
        // Random numbers; of 8 bits without the patterns of NaN. Scales around 1/2 of e4m3, or from 1/2 to 4.
        constexpr row_layout layout = S::fixed_layout();
        const auto numbers = static_cast<std::size_t>(s.tokens * layout.row_bytes(s.dim));
        for (std::size_t i = threadIdx.x; i < block_bytes; i += blockDim.x) {
            const auto x = static_cast<unsigned>(255.9f * noise(i));
            if (i >= numbers)
                at[i] =
                    static_cast<std::byte>(S::scale == row_layout::stored::e8m0 ? 126 + x % 4 : 48 + x % 8);
            else if (layout.bits() == 8)
                at[i] = static_cast<std::byte>(x & 0xbf);
        }
    } else if constexpr (full_precision<S>) {
        using T = typename S::value_type;
        for (std::size_t i = threadIdx.x; i < block_bytes / sizeof(T); i += blockDim.x)
            kvq::detail::store_as(at + i * sizeof(T), T(3.0f * (noise(i) + noise(i + 7919) - 1.0f)));
    } else if constexpr (cuda::detail::codec<S>.several_widths()) {
        fill_channels<typename S::parameters>(at + typename S::layout_type{}.scale_offset(s),
                                              typename S::layout_type{}.groups(s),
                                              typename S::layout_type{}.slot_count(s), 4.0f / 15.0f, noise);
    } else if constexpr (cuda::detail::codes_grids<S>) {
        const int groups = typename S::layout_type{}.groups(s),
                  slot_count = typename S::layout_type{}.slot_count(s);
        const float step = 4.0f / static_cast<float>((1 << S::code_bits) - 1);
        std::byte* const parameters = at + typename S::layout_type{}.scale_offset(s);
        fill_channels<typename S::parameters>(parameters, groups, slot_count, step, noise);
        if constexpr (S::token_scale_type::present)
            for (int i = static_cast<int>(threadIdx.x); i < s.tokens; i += static_cast<int>(blockDim.x)) {
                const float x = noise(static_cast<std::size_t>(i) + 77);
                if constexpr (S::token_scale_type::bytes(1) == 1)  // 0.5 to 31/16
                    at[typename S::layout_type{}.token_scale_offset(s) + static_cast<std::size_t>(i)] =
                        static_cast<std::byte>(224 + static_cast<int>(31.9f * x));
                else
                    kvq::detail::store_as(at + typename S::layout_type{}.token_scale_offset(s) +
                                              2 * static_cast<std::size_t>(i),
                                          float16(0.5f + x));
            }
    } else {
        using P = typename S::parameter;
        const std::size_t scales = typename S::layout_type{}.scale_offset(s),
                          section = typename S::layout_type{}.section_bytes(s);
        const float step = 4.0f / static_cast<float>((1 << S::code_bits) - 1);
        for (std::size_t i = threadIdx.x; i < section / sizeof(P); i += blockDim.x) {
            kvq::detail::store_as(at + scales + i * sizeof(P), P(step * (0.7f + 0.6f * noise(i))));
            if constexpr (S::levels::has_bias)
                kvq::detail::store_as(at + scales + section + i * sizeof(P), P(-2.0f + 0.3f * noise(i + 31)));
        }
    }
}

double relative_error(const std::vector<float16>& got, const std::vector<float>& want) {
    double error = 0.0, size = 0.0;
    for (std::size_t i = 0; i < got.size(); ++i) {
        const double d = static_cast<double>(static_cast<float>(got[i])) - static_cast<double>(want[i]);
        error += d * d;
        size += static_cast<double>(want[i]) * static_cast<double>(want[i]);
    }
    return std::sqrt(error / size);
}

/// What was measured: microseconds, and that of the same shape in fp16 over it. Zeros where it was not.
struct measured {
    double us = 0.0, times_fp16 = 0.0;
};

template <class Format>
measured run(const char* name, const shape& s, settings& set) {
    if ((!set.only.empty() && set.only != name) || (set.batch && set.batch != s.batch)) return {};
    using ref_type = cuda::cache_ref<Format>;
    std::mt19937 random(5);
    std::vector<int> lengths(static_cast<std::size_t>(s.batch), s.tokens);
    if (s.ragged)
        for (int& length : lengths)
            length = std::uniform_int_distribution<int>(s.tokens / 8, 2 * s.tokens - s.tokens / 8)(random);
    const auto pages_of = [](int tokens_of) {
        return (tokens_of + Format::page_tokens - 1) / Format::page_tokens;
    };
    const int columns = pages_of(*std::max_element(lengths.begin(), lengths.end()));
    const std::size_t key_page = ref_type::dense_key_page(s.kv_heads),
                      value_page = ref_type::dense_value_page(s.kv_heads);
    std::size_t lower_keys = 0, lower_values = 0;
    if constexpr (cuda::detail::has_lower<Format>) {
        lower_keys = Format::lower_key_bytes * static_cast<std::size_t>(s.kv_heads);
        lower_values = Format::lower_value_bytes * static_cast<std::size_t>(s.kv_heads);
    }
    const std::size_t page_bytes = key_page + value_page + lower_keys + lower_values;
    std::size_t case_pages = 0;
    for (const int length : lengths) case_pages += static_cast<std::size_t>(pages_of(length));
    const std::size_t case_bytes = case_pages * page_bytes;
    // As many caches as take 0.75 GB together, at most what fits.
    const std::size_t sets = std::max<std::size_t>(
        1, std::min<std::size_t>((std::size_t{3} << 28) / case_bytes + 1, set.bytes / case_bytes));
    const std::size_t pages = sets * case_pages;
    if (pages * page_bytes > set.bytes ||
        (cuda::detail::names_planes<Format> && pages > cuda::detail::most_lower_pages))
        return {};
    ref_type cache;
    cache.key_pages = set.memory;
    cache.value_pages = set.memory + pages * key_page;
    cache.key_page_bytes = key_page;
    cache.value_page_bytes = value_page;
    if constexpr (cuda::detail::has_lower<Format>)
        cache.lower = {{set.memory + pages * (key_page + value_page),
                        set.memory + pages * (key_page + value_page + lower_keys), lower_keys, lower_values}};
    cache.sequences = s.batch;
    cache.table_columns = columns;
    cache.kv_heads = s.kv_heads;
    if constexpr (cuda::detail::is_strided<Format>) {  // [token][head], as vLLM has them
        const auto row = Format::key_block_bytes / static_cast<std::size_t>(Format::page_tokens);
        cache.own_keys.memory = cache.own_values.memory = {row * static_cast<std::size_t>(s.kv_heads), row};
    }
    cache.set_transform(tensor::key, 0);
    const std::size_t blocks = pages * static_cast<std::size_t>(s.kv_heads);
    bench::random_kernel<<<1056, 256>>>(reinterpret_cast<std::uint32_t*>(set.memory), pages * page_bytes / 4,
                                        17u);
    fill_parameters<typename Format::keys><<<static_cast<unsigned>(blocks), 128>>>(
        cache.key_pages, blocks, Format::key_block_bytes, Format::key_shape());
    fill_parameters<typename Format::values><<<static_cast<unsigned>(blocks), 128>>>(
        cache.value_pages, blocks, Format::value_block_bytes, Format::value_shape());
    BENCH_OK(cudaGetLastError());

    std::vector<int> order(pages);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    if constexpr (cuda::detail::names_planes<Format>) {
        std::vector<int> lower = order;
        std::shuffle(lower.begin(), lower.end(), random);
        for (std::size_t i = 0; i < pages; ++i) order[i] = cuda::detail::plane_number(order[i], lower[i]);
    }
    const std::size_t case_entries = static_cast<std::size_t>(s.batch) * static_cast<std::size_t>(columns);
    std::vector<int> entries(sets * case_entries, -1);
    std::size_t next = 0;
    for (std::size_t row = 0; row < sets * lengths.size(); ++row)
        for (int i = 0; i < pages_of(lengths[row % lengths.size()]); ++i)
            entries[row * static_cast<std::size_t>(columns) + static_cast<std::size_t>(i)] = order[next++];
    int *table = nullptr, *tokens = nullptr;
    BENCH_OK(cudaMalloc(&table, entries.size() * sizeof(int)));
    BENCH_OK(cudaMalloc(&tokens, lengths.size() * sizeof(int)));
    BENCH_OK(cudaMemcpy(table, entries.data(), entries.size() * sizeof(int), cudaMemcpyHostToDevice));
    BENCH_OK(cudaMemcpy(tokens, lengths.data(), lengths.size() * sizeof(int), cudaMemcpyHostToDevice));
    cache.tokens = tokens;

    std::uint16_t* plans = nullptr;
    if constexpr (cuda::detail::codec<typename Format::keys>.several_widths())
        if (std::strstr(name, "-plan") != nullptr)
            cache.key_plans = plans = bench::key_plans<Format>(s.kv_heads);

    const std::size_t q_count =
        static_cast<std::size_t>(s.batch) * static_cast<std::size_t>(s.q_heads) * Format::head_dim;
    std::vector<float16> q(q_count);
    std::normal_distribution<float> normal;
    for (float16& x : q) x = float16(normal(random));
    float16 *q_device = nullptr, *out = nullptr;
    float *wide_q = nullptr, *wide_out = nullptr;
    BENCH_OK(cudaMalloc(&q_device, q_count * sizeof(float16)));
    BENCH_OK(cudaMalloc(&out, q_count * sizeof(float16)));
    BENCH_OK(cudaMalloc(&wide_q, q_count * sizeof(float)));
    BENCH_OK(cudaMalloc(&wide_out, q_count * sizeof(float)));
    BENCH_OK(cudaMemcpy(q_device, q.data(), q_count * sizeof(float16), cudaMemcpyHostToDevice));
    const std::vector<float> qf(q.begin(), q.end());
    BENCH_OK(cudaMemcpy(wide_q, qf.data(), q_count * sizeof(float), cudaMemcpyHostToDevice));
    const std::size_t space = cuda::attend_workspace_bytes<Format, float16>(s.q_heads / s.kv_heads);
    std::byte* workspace = nullptr;
    BENCH_OK(cudaMalloc(&workspace, space));
    BENCH_OK(cudaMemset(workspace, 0, space));
    BENCH_OK(cudaMemset(out, 0xff, q_count * sizeof(float16)));

    const token_view<const float16> q_view(q_device, s.batch, s.q_heads, Format::head_dim);
    const token_view<float16> out_view(out, s.batch, s.q_heads, Format::value_dim);
    bool early = false;
    const auto launch = [&](int i, cudaStream_t stream) {
        ref_type c = cache;
        c.block_table = table + static_cast<std::size_t>(i) % sets * case_entries;
        bench::check(cuda::attend(c, q_view, out_view, {.early = early}, workspace, space, stream));
    };
    launch(0, nullptr);
    std::vector<float16> got(q_count);
    std::vector<float> want(q_count);
    BENCH_OK(cudaMemcpy(got.data(), out, q_count * sizeof(float16), cudaMemcpyDeviceToHost));
    double error = -1.0;
    if (!set.quick) {
        cuda::detail::attention_args<Format, float> a{};
        a.cache = cache;
        a.cache.block_table = table;
        a.work = {tokens, s.batch, 0, 0, 0, columns * Format::page_tokens, 1, 0};
        a.q = token_view<const float>(wide_q, s.batch, s.q_heads, Format::head_dim);
        a.out = token_view<float>(wide_out, s.batch, s.q_heads, Format::value_dim);
        a.scale = cuda::detail::log2e / std::sqrt(static_cast<float>(Format::head_dim));
        a.set_group(s.q_heads);
        if (!cuda::detail::run_any(a, cuda::unmodified{}, nullptr)) std::exit(2);
        BENCH_OK(cudaMemcpy(want.data(), wide_out, q_count * sizeof(float), cudaMemcpyDeviceToHost));
        error = relative_error(got, want);
    }
    const int count = static_cast<int>(
        std::max<std::size_t>(sets, std::min<std::size_t>(40, (std::size_t{1} << 31) / case_bytes + 1)));
    const double us = bench::time_launches(count, launch, set.quick ? 5 : 9);
    early = true;
    const double early_us = bench::time_launches(count, launch, set.quick ? 5 : 9);
    const double gbps = static_cast<double>(case_bytes) / us * 1e-3;
    if (std::strcmp(name, "fp16") == 0) set.own_fp16[s] = us;
    const double own = set.own_fp16.count(s) ? set.own_fp16[s] / us : 0.0;
    const double torch = set.baseline.count(s) ? set.baseline[s] / us : 0.0;
    if (set.json)
        std::printf(
            "{\"op\": \"attention\", \"scheme\": \"%s\", \"batch\": %d, \"tokens\": %d, \"ragged\": %s, "
            "\"q_heads\": %d, "
            "\"kv_heads\": %d, "
            "\"head_dim\": %d, \"page_tokens\": %d, \"us\": %.2f, \"gbps\": %.1f, \"ceiling_share\": %.3f, "
            "\"vs_own_fp16\": %.3f, "
            "\"vs_torch_cudnn\": %.3f, \"us_early\": %.2f, \"rel_error\": %.2e}\n",
            name, s.batch, s.tokens, s.ragged ? "true" : "false", s.q_heads, s.kv_heads, Format::head_dim,
            Format::page_tokens, us, gbps, gbps / set.ceiling.read, own, torch, early_us, error);
    else
        std::printf(
            "%-14s %4d x %c%6d  %2d/%-2d %9.1f us %7.0f GB/s %5.1f %%  own fp16 %5.2f x  torch %5.2f x  "
            "early %.1f us  error %.1e\n",
            name, s.batch, s.ragged ? '~' : ' ', s.tokens, s.q_heads, s.kv_heads, us, gbps,
            100.0 * gbps / set.ceiling.read, own, torch, early_us, error);
    std::fflush(stdout);
    for (void* p : {static_cast<void*>(table), static_cast<void*>(tokens), static_cast<void*>(q_device),
                    static_cast<void*>(out), static_cast<void*>(wide_q), static_cast<void*>(wide_out),
                    static_cast<void*>(workspace), static_cast<void*>(plans)})
        BENCH_OK(cudaFree(p));
    return {us, own};
}

/// Of the presets' widths: affine codes per channel with 16-bit parameters, in groups as theirs.
template <int Bits>
using plain = cuda::block_pair<affine<Bits, per_channel<64>>, affine<Bits, per_channel<>>, 128, 128>;

/// Pages in the bytes of other systems.
template <int Layout, int PageTokens = 64>
using rows = cuda::block_pair<rows_of<Layout>, rows_of<Layout>, 128, PageTokens>;
constexpr int row_fp8 = row_layout_number("fp8"), row_nvfp4 = row_layout_number("nvfp4"),
              row_mxfp8 = row_layout_number("mxfp8"), row_mxfp4 = row_layout_number("mxfp4");

template <int PageTokens>
void small_pages(const std::vector<shape>& shapes, settings& set) {
    if (!set.json) std::printf("pages of %d tokens\n", PageTokens);
    for (const shape& s : shapes) {
        if (s.q_heads != 32 || s.kv_heads != 8) continue;
        run<cuda::block_pair<full<float16>, full<float16>, 128, PageTokens>>("fp16", s, set);
        run<cuda::block_pair<int8, int8, 128, PageTokens>>("int8", s, set);
        run<cuda::block_pair<affine<4, per_token<>>, affine<4, per_token<>>, 128, PageTokens>>("token4-g128",
                                                                                               s, set);
    }
}

/// Heads of more than 128 channels.
template <int Dim>
void large_heads(const shape& s, settings& set) {
    if (!set.json) std::printf("head_dim %d\n", Dim);
    run<cuda::block_pair<full<float16>, full<float16>, Dim, 64>>("fp16", s, set);
    run<cuda::block_pair<int8, int8, Dim, 64>>("int8", s, set);
    run<cuda::kivi_pair<4, 64, Dim, 64>>("kivi-4-g64", s, set);
    run<cuda::preset_pair<std4, Dim>>("std4", s, set);
}

#ifdef MINE
/// The row of this card: what it is, which kernel it takes, and how much faster than fp16 formats are.
void print_row(settings& set) {
    int device = 0;
    cudaDeviceProp card{};
    BENCH_OK(cudaGetDevice(&device));
    BENCH_OK(cudaGetDeviceProperties(&card, device));
    const cuda::kernel_choice choice = cuda::attend_kernel<cuda::preset_pair<std4, 128>, float16>(4);
    std::fprintf(stderr, "std4, 4 query heads per kv head: kernel %s, %d KB of shared memory; %s\n",
                 choice.kernel, choice.shared_memory / 1024, choice.why);
    std::string row = std::string("| ") + card.name + " | ";
    const auto add = [&](const char* format, auto... numbers) {
        char text[64];
        std::snprintf(text, sizeof text, format, numbers...);
        row += text;
    };
    add("%d.%d | %.0f |", card.major, card.minor, set.ceiling.read);
    const shape shapes[] = {{16, 2048, 32, 8}, {8, 32768, 32, 8}};
    const auto column = [&]<class Format>(std::type_identity<Format>, const char* name) {
        for (const shape& s : shapes) {
            const measured m = run<Format>(name, s, set);
            if (m.us == 0.0)
                row += " -";
            else if (std::strcmp(name, "fp16") == 0)
                add(" %.1f", m.us);
            else
                add(" %.2f", m.times_fp16);
            row += &s == shapes ? ";" : " |";
        }
    };
    column(std::type_identity<cuda::block_pair<full<float16>, full<float16>, 128, 64>>{}, "fp16");
    column(std::type_identity<cuda::block_pair<int8, int8, 128, 64>>{}, "int8");
    column(std::type_identity<cuda::kivi_pair<4, 64, 128, 64>>{}, "kivi-4-g64");
    column(std::type_identity<cuda::preset_pair<std4, 128>>{}, "std4");
    column(std::type_identity<cuda::preset_pair<low2, 128>>{}, "low2");
    std::printf(
        "| card | capability | reads GB/s | fp16, us | int8 | kivi-4-g64 | std4 | low2 |\n"
        "|---|---|---:|---:|---:|---:|---:|---:|\n%s\n",
        row.c_str());
}
#endif

}  // namespace

int main(int argc, char** argv) {
    settings set;
    for (int i = 1; i < argc; ++i) {
        const std::string arg = argv[i];
        if (arg == "--json") set.json = true;
        if (arg == "--quick") set.quick = true;
        if (arg == "--batch" && i + 1 < argc) set.batch = std::atoi(argv[++i]);
        if (arg == "--only" && i + 1 < argc) set.only = argv[++i];
        if (arg == "--baseline" && i + 1 < argc)
            for (const auto& [of, us] : bench::read_baseline(argv[++i]))
                if (std::get<4>(of) == 128)
                    set.baseline[{std::get<0>(of), std::get<1>(of), std::get<2>(of), std::get<3>(of)}] = us;
    }
    set.bytes = std::size_t{18} << 30;
#ifdef MINE
    set.bytes = std::size_t{5} << 29;
#endif
    BENCH_OK(cudaMalloc(&set.memory, set.bytes));
    const std::size_t some = std::min(set.bytes, std::size_t{4} << 30);
    bench::random_kernel<<<1056, 256>>>(reinterpret_cast<std::uint32_t*>(set.memory), some / 4, 1u);
    set.ceiling = bench::measure_ceilings(set.memory, some);
#ifndef MINE
    if (!set.json)
        std::printf("read ceiling %.0f GB/s, copy ceiling %.0f GB/s\n", set.ceiling.read, set.ceiling.copy);
#endif

    [[maybe_unused]] std::vector<shape> shapes = {
        {1, 131072, 32, 8}, {8, 32768, 32, 8}, {16, 2048, 32, 8}, {64, 4096, 32, 8}, {128, 8192, 32, 8}};
    if (!set.quick) {
        for (const auto& [q, kv] : {std::pair{64, 8}, std::pair{32, 32}})
            for (const auto& [b, t] : {std::pair{1, 131072}, std::pair{8, 32768}, std::pair{16, 2048},
                                       std::pair{64, 4096}, std::pair{128, 8192}})
                if (!(kv == 32 && b == 128)) shapes.push_back({b, t, q, kv});
        for (const int q : {32, 64}) shapes.push_back({64, 4096, q, 8, true});
    }
#if defined(MINE)
    print_row(set);
#elif defined(PRESETS) && PRESETS == 1
    for (const shape& s : shapes) {
        run<plain<8>>("plain8", s, set);
        run<cuda::preset_pair<ref8, 128>>("ref8", s, set);
        run<plain<6>>("plain6", s, set);
        run<cuda::preset_pair<hi6, 128>>("hi6", s, set);
        run<plain<5>>("plain5", s, set);
        run<cuda::preset_pair<std5, 128>>("std5", s, set);
    }
#elif defined(PRESETS)
    for (const shape& s : shapes) {
        run<plain<4>>("plain4", s, set);
        run<cuda::preset_pair<std4, 128>>("std4", s, set);
        run<cuda::preset_pair<std4_h, 128>>("std4-h", s, set);
        run<cuda::preset_pair<mix4, 128>>("mix4", s, set);
        run<cuda::preset_pair<mix4, 128>>("mix4-plan", s, set);
        run<cuda::preset_pair<mix5, 128>>("mix5-plan", s, set);
        run<cuda::preset_pair<mix6, 128>>("mix6-plan", s, set);
        run<plain<3>>("plain3", s, set);
        run<cuda::preset_pair<low3, 128>>("low3", s, set);
        run<cuda::preset_pair<low3, 128>>("low3-plan", s, set);
        run<plain<2>>("plain2", s, set);
        run<cuda::preset_pair<low2, 128>>("low2", s, set);
        run<cuda::preset_pair<low2, 128>>("low2-plan", s, set);
    }
#elif defined(PLANES)
    for (const shape& s : shapes) {
        run<cuda::preset_pair<std4, 128>>("std4", s, set);
        run<cuda::upper_plane_pair<cuda::preset_pair<nested4, 128>>>("nested8 upper", s, set);
        run<cuda::block_pair<int8, int8, 128, 128>>("int8", s, set);
        run<cuda::plane_pair<cuda::preset_pair<nested4, 128>>>("nested8", s, set);
    }
#elif defined(ROWS)
    shapes.push_back({64, 1024, 32, 8});
    shapes.push_back({64, 1024, 64, 8});
    for (const shape& s : shapes) {
        run<cuda::block_pair<full<float16>, full<float16>, 128, 64>>("fp16", s, set);
        run<rows<row_fp8>>("fp8", s, set);
        run<cuda::strided_rows<rows<row_fp8, 16>>>("fp8 NHD, 16", s, set);
        run<rows<row_nvfp4>>("nvfp4", s, set);
        run<rows<row_mxfp8>>("mxfp8", s, set);
        run<rows<row_mxfp4>>("mxfp4", s, set);
    }
#elif defined(LARGE_HEADS)
    // Full layers of 512 channels and windows of 256, and 256 with more query rows.
    large_heads<512>({8, 32768, 32, 4}, set);
    large_heads<256>({64, 1024, 32, 16}, set);
    large_heads<256>({8, 32768, 32, 4}, set);
#elif defined(SMALL_PAGES)
    small_pages<16>(shapes, set);
    small_pages<32>(shapes, set);
#else
    for (const shape& s : shapes) {
        run<cuda::block_pair<full<float16>, full<float16>, 128, 64>>("fp16", s, set);
        run<cuda::block_pair<int8, int8, 128, 64>>("int8", s, set);
        run<cuda::block_pair<affine<4, per_token<>>, affine<4, per_token<>>, 128, 64>>("token4-g128", s, set);
        run<cuda::kivi_pair<4, 64, 128, 64>>("kivi-4-g64", s, set);
        run<cuda::kivi_pair<4, 128, 128, 128>>("kivi-4-g128", s, set);
        run<cuda::kivi_pair<4, 32, 128, 64>>("kivi-4-g32", s, set);
        run<cuda::kivi_pair<2, 128, 128, 128>>("kivi-2-g128", s, set);
        run<cuda::kivi_pair<2, 32, 128, 64>>("kivi-2-g32", s, set);
    }
#endif
    BENCH_OK(cudaFree(set.memory));
    return 0;
}
