// Latent attention over lists of tokens, against double arithmetic on the dequantized latents; the same bits
// on every run; refusals.
#include <kvq/cuda/latent/latent_lists.cuh>

#include "latent_batch.cuh"
#include "random_tree.hpp"

#ifndef __CUDACC__
#include <sys/mman.h>
#endif

using namespace kvq;

namespace {

template <class Scheme, int PageTokens, class Last = full<float16>>
using v3 = cuda::latent_pair<Scheme, 512, 64, 512, PageTokens, Last>;

struct list_case {
    int heads = 16, query_tokens = 1, selected = 100, window = 30;
    std::vector<int> lengths;
    bool holes = false, sink_logits = false;
    int drafted = 0;  // a random tree of so many tokens, of which the last query_tokens ask
};

template <class T, class Quantized, class Window>
void check_case(test::rng& r, const list_case& c, const char* name, double* worst) {
    constexpr int dim = Quantized::head_dim, value_dim = Quantized::value_dim;
    const test::mixed_latents<Quantized, Window> latents(r, c.lengths, 4, 40, c.holes);
    const auto mix = latents.mix();
    using mix_type = std::remove_const_t<decltype(mix)>;
    const int queries = static_cast<int>(c.lengths.size()) * c.query_tokens;
    const auto rows = static_cast<std::size_t>(queries * c.heads);
    // Any tokens in any order, some of them twice, some of them not there; the last query has none at all.
    const auto make_list = [&](int count) {
        std::vector<int> list;
        for (int i = 0; i < queries * count; ++i) {
            const int n = c.lengths[static_cast<std::size_t>(i / count / c.query_tokens)];
            list.push_back(i / count == queries - 1 || test::uniform(r, 0, 9) == 0
                               ? (test::uniform(r, 0, 1) == 0 ? -1 : n + test::uniform(r, 0, 1000))
                               : test::uniform(r, 0, std::max(n, 1) - 1));
        }
        return list;
    };
    const std::vector<int> selected = make_list(c.selected), window = make_list(c.window);
    const test::device_buffer<int> selected_device(selected), window_device(window);
    std::vector<T> q(rows * dim);
    for (T& x : q) x = T(test::normal(r));
    std::vector<float> logits(static_cast<std::size_t>(c.heads));
    for (float& x : logits) x = 3.0f * test::normal(r);
    logits[0] = -INFINITY;
    const test::device_buffer<T> q_device(q);
    const test::device_buffer<float> logits_device(logits);
    test::device_buffer<T> out(rows * value_dim);
    test::device_buffer<float> lse(rows);
    const std::size_t bytes = cuda::latent_list_workspace_bytes<mix_type, T>(queries, c.heads);
    test::device_buffer<std::byte> workspace(bytes);
    const float scale = 1.0f / 14.0f;
    const test::random_words trees(r, c.lengths.size(), c.drafted, c.query_tokens);
    const cuda::list_options options{.scale = scale,
                                     .selected = {selected_device.get(), c.selected},
                                     .window = {c.window > 0 ? window_device.get() : nullptr, c.window},
                                     .query_tokens = c.query_tokens,
                                     .ancestors = trees.get(),
                                     .drafted = c.drafted,
                                     .sink_logits = c.sink_logits ? logits_device.get() : nullptr,
                                     .lse = lse.get()};
    std::vector<T> got;
    for (int i = 0; i < test::repeats(4); ++i) {
        out.poison();
        const cuda::status s = cuda::attend_latent_lists<T>(mix, {q_device.get(), queries, c.heads, dim},
                                                            {out.get(), queries, c.heads, value_dim}, options,
                                                            workspace.get(), bytes, nullptr);
        CHECK(s, "%s: %s", name, s.message);
        const std::vector<T> now = out.download();
        CHECK(i == 0 || std::memcmp(got.data(), now.data(), got.size() * sizeof(T)) == 0,
              "%s: other bits on another run", name);
        got = now;
    }
    const std::vector<float> got_lse = lse.download();
    double off = 0.0, size = 0.0;
    for (int query = 0; query < queries; ++query) {
        const auto b = static_cast<std::size_t>(query / c.query_tokens);
        const int n = c.lengths[b];
        std::vector<const float*> listed;
        const auto add = [&](const std::vector<int>& list, int count) {
            for (int i = 0; i < count; ++i)
                if (const int t = list[static_cast<std::size_t>(query * count + i)];
                    t >= 0 && t < n && trees.sees(b, n, query % c.query_tokens, t) &&
                    latents.at(b, t) != nullptr)
                    listed.push_back(latents.at(b, t));
        };
        add(selected, c.selected);
        add(window, c.window);
        for (int h = 0; h < c.heads; ++h) {
            const auto at = static_cast<std::size_t>(query * c.heads + h);
            const double sink =
                c.sink_logits ? static_cast<double>(logits[static_cast<std::size_t>(h)]) : -INFINITY;
            test::latent_row(&q[at * dim], listed, dim, value_dim, static_cast<double>(scale), sink)
                .compare(&got[at * value_dim], got_lse[at], off, size, name);
        }
    }
    const double error = size == 0.0 ? off : std::sqrt(off / size);
    *worst = std::max(*worst, error);
    CHECK(error < (std::is_same_v<T, bfloat16> ? 4e-3 : 2e-3),
          "%s: relative error %g (%d heads, %d + %d tokens)", name, error, c.heads, c.selected, c.window);
}

/// Places in pages in place of positions: the same numbers. pool: of so many bytes, pages of which far apart
/// give the same numbers, too.
template <class Pair>
[[maybe_unused]] void check_places(test::rng& r, int heads = 16, std::byte* pool = nullptr,
                                   std::size_t pool_bytes = 0) {
    constexpr int columns = 4, length = columns * Pair::page_tokens, count = 70;
    const test::latent_batch<Pair> batch(r, {length});
    const test::device_buffer<int> lengths(std::vector<int>{length});
    const test::device_latents<Pair> device(batch, lengths, 0);
    std::vector<int> positions, places, far;
    for (int i = 0; i < count; ++i) {
        const int t = test::uniform(r, -1, length - 1);
        positions.push_back(t);
        places.push_back(t < 0 ? -1
                               : batch.table[static_cast<std::size_t>(t / Pair::page_tokens)] *
                                         Pair::page_tokens +
                                     t % Pair::page_tokens);
    }
    for (std::size_t i = 0; pool != nullptr && i < columns; ++i) {
        constexpr std::size_t bytes = Pair::key_block_bytes;
        const std::size_t number = i * (pool_bytes / bytes - 1) / (columns - 1);
        far.push_back(static_cast<int>(number));
        CUDA_OK(cudaMemcpy(pool + number * bytes,
                           &batch.bytes[static_cast<std::size_t>(batch.table[i]) * bytes], bytes,
                           cudaMemcpyHostToDevice));
    }
    const test::device_buffer<int> far_table(far);
    auto mix = cuda::make_mixed(0, device.ref);
    std::vector<float16> q(static_cast<std::size_t>(heads) * Pair::head_dim);
    for (float16& x : q) x = float16(test::normal(r));
    const test::device_buffer<float16> q_device(q);
    test::device_buffer<float16> out(static_cast<std::size_t>(heads) * Pair::value_dim);
    const std::size_t bytes = cuda::latent_list_workspace_bytes<decltype(mix), float16>(1, heads);
    test::device_buffer<std::byte> workspace(bytes);
    std::vector<float16> got[3];
    for (int i = 0; i < (pool == nullptr ? 2 : 3); ++i) {
        if (i == 2) {
            cuda::cache_ref<Pair> ref = device.ref;
            ref.key_pages = pool;
            ref.block_table = far_table.get();
            mix = cuda::make_mixed(0, ref);
        }
        const test::device_buffer<int> list(i == 1 ? places : positions);
        const cuda::status s = cuda::attend_latent_lists<float16>(
            mix, {q_device.get(), 1, heads, Pair::head_dim}, {out.get(), 1, heads, Pair::value_dim},
            {.selected = {list.get(), count}, .places = i == 1}, workspace.get(), bytes, nullptr);
        CHECK(s, "%s", s.message);
        got[i] = out.download();
        CHECK(std::memcmp(got[0].data(), got[i].data(), got[0].size() * 2) == 0,
              "%s give other numbers than positions", i == 1 ? "places in pages" : "pages far apart");
    }
}

/// Records in a pool that 32 bits do not count, neither in words nor in vectors of 16 bytes.
[[maybe_unused]] void check_large_pool(test::rng& r) {
    constexpr std::size_t bytes = std::size_t{80} << 30;
    std::byte* pool = nullptr;
#ifdef __CUDACC__
    if (cudaMalloc(&pool, bytes) != cudaSuccess) {
        (void)cudaGetLastError();
        pool = nullptr;
    }
#else
    void* const mapped =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped != MAP_FAILED) pool = static_cast<std::byte*>(mapped);
#endif
    if (pool == nullptr) {
        std::printf("records in pools of more than 64 GiB: not tested, no memory of 80 GiB\n");
        return;
    }
    for (const int heads : {16, 100}) {
        check_places<v3<records_of<record_layout_number("mla-656")>, 64>>(r, heads, pool, bytes);
        check_places<cuda::latent_pair<records_of<record_layout_number("mla-584")>, 448, 64, 512, 64>>(
            r, heads, pool, bytes);
    }
#ifdef __CUDACC__
    CUDA_OK(cudaFree(pool));
#else
    munmap(pool, bytes);
#endif
}

template <class Quantized, class Window>
void check_format(const char* name, const char* kernel, unsigned seed) {
    const bool clusters =
        std::strcmp(kernel, "latent_wgmma_kernel") == 0 && cuda::detail::listed_in_cuts<Quantized>;
    const cuda::kernel_choice choice =
        cuda::latent_list_kernel<cuda::mixed_cache_ref<cuda::cache_part<Quantized>>, float16>(16);
    CHECK(std::strcmp(choice.kernel, kernel) == 0, "%s: the kernel is %s, %s", name, choice.kernel,
          choice.why);
    const cuda::kernel_choice many =
        cuda::latent_list_kernel<cuda::mixed_cache_ref<cuda::cache_part<Quantized>>, float16>(128);
    CHECK(std::strcmp(many.kernel, clusters ? "latent_cluster_kernel" : kernel) == 0,
          "%s, 128 heads: the kernel is %s, %s", name, many.kernel, many.why);
    std::printf("%s: seed %u\n", name, seed);
    test::rng r(seed);
    double worst = 0.0;
    check_case<float16, Quantized, Window>(r, {.lengths = {200, 0, 65, 3}, .sink_logits = true}, name,
                                           &worst);
    check_case<bfloat16, Quantized, Window>(
        r, {.heads = 20, .query_tokens = 2, .selected = 200, .window = 0, .lengths = {150, 5}, .holes = true},
        name, &worst);
    check_case<float16, Quantized, Window>(r, {.selected = 0, .window = 0, .lengths = {70}}, name, &worst);
    check_case<float16, Quantized, Window>(
        r, {.query_tokens = 4, .selected = 70, .lengths = {40, 0, 21}, .sink_logits = true, .drafted = 20},
        name, &worst);
#if !defined(__CUDACC__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
    check_case<float16, Quantized, Window>(
        r, {.heads = 100, .selected = 290, .lengths = {200, 0, 33}, .holes = true, .sink_logits = true}, name,
        &worst);  // clusters
#endif
#ifdef __CUDACC__
    check_case<float16, Quantized, Window>(r, {.heads = 128, .selected = 700, .lengths = {900, 64}}, name,
                                           &worst);
    check_case<float16, Quantized, Window>(
        r, {.heads = 1, .selected = 2048, .window = 128, .lengths = {5000}}, name, &worst);
    check_case<bfloat16, Quantized, Window>(r,
                                            {.heads = 64,
                                             .query_tokens = 3,
                                             .selected = 130,
                                             .lengths = std::vector<int>(60, 300),
                                             .holes = true,
                                             .sink_logits = true},
                                            name, &worst);
#endif
    std::printf("%s: relative error %.2g\n", name, worst);
}

using affine4 = affine<4, per_token<128>>;
using affine4_g96 = affine<4, per_token<96>>;  // the last group has 32 of 512 channels

[[maybe_unused]] void check_refusals() {  // of the first part
    using pair = v3<full<float16>, 64>;
    test::device_buffer<int> numbers(4);
    test::device_buffer<std::byte> memory(pair::key_block_bytes);
    const test::device_buffer<float16> q(576 * 16);
    test::device_buffer<float16> out(512 * 16);
    cuda::cache_ref<pair> ref;
    ref.key_pages = memory.get();
    ref.key_page_bytes = pair::key_block_bytes;
    ref.block_table = ref.tokens = numbers.get();
    ref.sequences = ref.table_columns = ref.kv_heads = 1;
    const auto refused = [&](const char* words, const cuda::list_options& options) {
        const cuda::status s =
            cuda::attend_latent_lists<float16>(cuda::make_mixed(0, ref), {q.get(), 1, 16, 576},
                                               {out.get(), 1, 16, 512}, options, nullptr, 0, nullptr);
        CHECK(s.code == cudaErrorInvalidValue && std::strstr(s.message, words) != nullptr,
              "\"%s\" is not in \"%s\"", words, s.message);
    };
    refused("a list has -1 tokens", {.selected = {numbers.get(), -1}});
    refused("a list of 5 tokens is a null pointer", {.window = {nullptr, 5}});
    refused("2 query tokens", {.query_tokens = 2});
    refused("workspace", {.selected = {numbers.get(), 4}});
}

}  // namespace

int main() {
#if defined(TARGET_SM_90A) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    [[maybe_unused]] const char* tiles = "latent_wgmma_kernel";
#else
    [[maybe_unused]] const char* tiles = "latent_mma_kernel";
#endif
    [[maybe_unused]] const char* plain = "latent_plain_kernel";
#if !defined(PART) || PART == 0
    check_refusals();
    test::rng r(1);
    check_places<v3<affine4_g96, 32>>(r);
    check_format<v3<affine4_g96, 32, int8>, v3<full<float16>, 32>>("affine-4-g96-int8x64", tiles, 2);
    check_format<cuda::latent_pair<typename kivi<4, 32>::keys, 40, 8, 40, 32, ref8::keys>,
                 cuda::latent_pair<full<bfloat16>, 40, 8, 40, 32>>("kivi-4-g32-ref8x8, few channels", plain,
                                                                   3);
    check_places<cuda::latent_pair<records_of<record_layout_number("mla-288")>, 512, 0, 512, 16>>(r);
    check_large_pool(r);
    check_format<v3<records_of<record_layout_number("mla-656")>, 64>, v3<full<bfloat16>, 64>>("mla-656",
                                                                                              tiles, 8);
    check_format<cuda::latent_pair<records_of<record_layout_number("mla-584")>, 448, 64, 512, 64>,
                 cuda::latent_pair<full<bfloat16>, 448, 64, 512, 64>>("mla-584", tiles, 9);
#endif
#ifdef __CUDACC__
#if PART == 1
    check_format<v3<affine4, 4>, v3<full<bfloat16>, 4>>("affine-4-g128, pages of 4", tiles, 4);
    check_format<v3<int8, 64>, v3<full<bfloat16>, 64>>("int8", tiles, 5);
#elif PART == 2
    check_format<cuda::latent_pair<records_of<record_layout_number("mla-528")>, 512, 0, 512, 16>,
                 cuda::latent_pair<full<bfloat16>, 512, 0, 512, 16>>("mla-528", tiles, 10);
    check_format<cuda::latent_pair<records_of<record_layout_number("mla-288")>, 512, 0, 512, 64>,
                 cuda::latent_pair<full<bfloat16>, 512, 0, 512, 64>>("mla-288", tiles, 11);
    check_format<cuda::latent_pair<int8, 448, 64, 512, 8>, cuda::latent_pair<full<float16>, 448, 64, 512, 8>>(
        "int8, V4, pages of 8", tiles, 6);
    check_format<v3<full<bfloat16>, 64>, v3<full<bfloat16>, 64>>("bf16", tiles, 7);
#endif
#endif
    return test::report("latent_lists");
}
