// Latent attention over pages of several formats, against double arithmetic on the dequantized latents; the
// same bits on every run; refusals.
#include <kvq/cuda/latent/latent.cuh>
#include <kvq/cuda/store/store.cuh>

#include "latent_batch.cuh"
#include "random_tree.hpp"

using namespace kvq;

namespace {

struct latent_case {
    int heads = 16, query_tokens = 1, sinks = 4, recent = 100;
    std::vector<int> lengths;
    bool holes = false, peaked = false;
    int drafted = 0;  // a random tree of so many tokens, of which the last query_tokens ask
    int window = 0;
    bool chunked = false, window_sinks = false, sink_logits = false;
    float softcap = 0.0f;

    /// Does query i of sequence b see token t?
    bool sees(const test::random_words& trees, std::size_t b, int i, int t) const {
        const int n = lengths[b];
        if (!trees.sees(b, n, i, t)) return false;
        if (window == 0 || (window_sinks && t < sinks)) return true;
        const int query = trees.place(b, n, i, n - query_tokens + i);
        return trees.place(b, n, i, t) >= (chunked ? query / window * window : query - window + 1);
    }
};

template <class T, class Quantized, class Window, bool InTwo = std::is_same_v<T, float16>>
void check_case(test::rng& r, const latent_case& c, const char* name, double* worst) {
    constexpr int dim = Quantized::head_dim, value_dim = Quantized::value_dim;
    const std::size_t sequences = c.lengths.size();
    const test::mixed_latents<Quantized, Window> latents(r, c.lengths, c.sinks, c.recent, c.holes);
    const auto mix = latents.mix();
    using mix_type = std::remove_const_t<decltype(mix)>;

    const int tokens = static_cast<int>(sequences) * c.query_tokens;
    const auto rows = static_cast<std::size_t>(tokens * c.heads);
    std::vector<T> q(rows * dim);
    for (T& x : q) x = T((c.peaked ? 3.0f : 0.5f) * test::normal(r));
    const test::device_buffer<T> q_device(q);
    test::device_buffer<T> out(rows * value_dim);
    test::device_buffer<float> lse(rows), states(rows * (value_dim + 2));
    const float scale = 1.0f / 14.0f;
    const std::size_t bytes =
        cuda::latent_workspace_bytes<mix_type, T>(static_cast<int>(sequences), c.heads, c.query_tokens);
    test::device_buffer<std::byte> workspace(bytes);
    const test::random_words trees(r, sequences, c.drafted, c.query_tokens);
    std::vector<float> logits(static_cast<std::size_t>(c.heads));
    if (c.sink_logits)
        for (float& x : logits) x = 3.0f * test::normal(r);
    const test::device_buffer<float> sinks(logits);
    const cuda::attention_options options{.scale = scale,
                                          .softcap = c.softcap,
                                          .window = c.window,
                                          .chunked = c.chunked,
                                          .window_sinks = c.window_sinks,
                                          .query_tokens = c.query_tokens,
                                          .ancestors = trees.get(),
                                          .drafted = c.drafted,
                                          .sink_logits = c.sink_logits ? sinks.get() : nullptr,
                                          .lse = lse.get()};
    const token_view<const T> q_view{q_device.get(), tokens, c.heads, dim};
    const token_view<T> out_view{out.get(), tokens, c.heads, value_dim};
    const auto run = [&](const auto& pages_of, const cuda::attention_options& o) {
        const cuda::status s =
            cuda::attend_latents<T>(pages_of, q_view, out_view, o, workspace.get(), bytes, nullptr);
        CHECK(s, "%s: %s", name, s.message);
        CUDA_OK(cudaDeviceSynchronize());
    };
    run(mix, options);
    const std::vector<T> got = out.download();
    const std::vector<float> got_lse = lse.download();
    for (int i = 0; i < test::repeats(3); ++i) {
        out.poison();
        run(mix, options);
        CHECK(std::memcmp(got.data(), out.download().data(), got.size() * sizeof(T)) == 0,
              "%s: other bits on another run", name);
    }

    double off = 0.0, size = 0.0;
    for (std::size_t b = 0; b < sequences; ++b)
        for (int i = 0; i < c.query_tokens; ++i)
            for (int h = 0; h < c.heads; ++h) {
                const std::size_t at =
                    (b * static_cast<std::size_t>(c.query_tokens) + static_cast<std::size_t>(i)) *
                        static_cast<std::size_t>(c.heads) +
                    static_cast<std::size_t>(h);
                std::vector<const float*> seen;
                for (int t = 0; t < c.lengths[b]; ++t)
                    if (c.sees(trees, b, i, t))
                        if (const float* const x = latents.at(b, t); x != nullptr) seen.push_back(x);
                test::latent_row(
                    &q[at * dim], seen, dim, value_dim, static_cast<double>(scale),
                    c.sink_logits ? static_cast<double>(logits[static_cast<std::size_t>(h)]) : -INFINITY,
                    static_cast<double>(c.softcap))
                    .compare(&got[at * value_dim], got_lse[at], off, size, name);
            }
    const double error = size == 0.0 ? off : std::sqrt(off / size);
    *worst = std::max(*worst, error);
    // Queries times the scales of last channels in codes are rounded to half floats: at most 2^-11 of each
    // product, and independent, so less than 2^-12 of the deviation of their scores. These channels have a
    // size of 20 (latent_batch.cuh).
    double of_last = 0.0;
    if constexpr (Quantized::second_channels > 0 && !std::is_same_v<typename Quantized::last, full<float16>>)
        of_last = 0x1p-12 * (c.peaked ? 3.0 : 0.5) * 20.0 * std::sqrt(Quantized::second_channels) *
                  static_cast<double>(scale);
    CHECK(error < (std::is_same_v<T, bfloat16> ? 4e-3 : 2e-3) + of_last,
          "%s: relative error %g (%d heads, %d tokens a sequence)", name, error, c.heads, c.query_tokens);

    // The same in two launches, from the state that the first one has left.
    if constexpr (InTwo) {
        if (c.query_tokens > 1) return;
        cuda::attention_options first = options, second = options;
        first.lse = second.lse = nullptr;
        first.sink_logits = nullptr;
        first.state_out = states.get();
        second.state_in = states.get();
        run(cuda::make_mixed(c.recent, cuda::behind_window(latents.pages_device->ref)), first);
        run(cuda::make_mixed(c.recent, cuda::in_window(latents.window_device->ref),
                             cuda::sink_tokens(latents.sinks_device->ref, c.sinks)),
            second);
        const std::vector<T> other = out.download();
        double apart = 0.0;
        for (std::size_t i = 0; i < got.size(); ++i) {
            const double d = static_cast<double>(static_cast<float>(got[i])) -
                             static_cast<double>(static_cast<float>(other[i]));
            apart += d * d;
        }
        CHECK(apart <= 1e-5 * size + 1e-12, "%s: two launches are %g apart", name, std::sqrt(apart / size));
    }
}

template <class Quantized, class Window>
void check_format(const char* name) {
    using mix = cuda::mixed_cache_ref<cuda::cache_part<Quantized>>;
    constexpr bool tiles = Quantized::head_dim % 64 == 0,
                   clusters = !cuda::detail::token_record_scheme<typename Quantized::keys>;
#if defined(TARGET_SM_90A) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const char *few = "latent_wgmma_kernel", *many = clusters ? "latent_cluster_kernel" : few;
#else
    const char *few = "latent_mma_kernel", *many = few;
    (void)clusters;
#endif
    for (const int heads : {16, 128}) {
        const cuda::kernel_choice choice = cuda::latent_kernel<mix, float16>(heads);
        CHECK(std::strcmp(choice.kernel, !tiles       ? "latent_plain_kernel"
                                         : heads > 16 ? many
                                                      : few) == 0,
              "%s: the kernel of %d heads is %s, %s", name, heads, choice.kernel, choice.why);
    }
    test::rng r(static_cast<unsigned>(Quantized::page_tokens + Quantized::head_dim));
    double worst = 0.0;
    check_case<float16, Quantized, Window>(r, {.lengths = {300, 0, 65, 3}}, name, &worst);
    check_case<bfloat16, Quantized, Window>(
        r, {.heads = 20, .query_tokens = 3, .lengths = {400, 3}, .holes = true}, name, &worst);
    check_case<float16, Quantized, Window>(r, {.lengths = {130, 130, 130, 130, 130}, .peaked = true}, name,
                                           &worst);
    check_case<float16, Quantized, Window>(r, {.query_tokens = 2, .lengths = {500, 66, 2}, .peaked = true},
                                           name, &worst);
    check_case<float16, Quantized, Window>(
        r, {.query_tokens = 3, .lengths = {200, 0, 69, 9}, .holes = true, .drafted = 9}, name, &worst);
    // What hides tokens, caps scores and adds to sums.
    check_case<float16, Quantized, Window>(
        r,
        {.query_tokens = 3, .lengths = {300, 0, 65, 3}, .window = 70, .window_sinks = true, .softcap = 2.0f},
        name, &worst);
    check_case<float16, Quantized, Window>(r,
                                           {.heads = 33,
                                            .query_tokens = 2,
                                            .lengths = {330, 2},
                                            .holes = true,
                                            .window = 150,
                                            .chunked = true,
                                            .sink_logits = true},
                                           name, &worst);
    check_case<float16, Quantized, Window>(
        r, {.lengths = {260, 0, 5}, .window = 130, .sink_logits = true, .softcap = 1.0f}, name, &worst);
    for (const int window : {4, 100})
        check_case<float16, Quantized, Window>(r,
                                               {.query_tokens = 3,
                                                .lengths = {200, 0, 20},
                                                .drafted = 12,
                                                .window = window,
                                                .window_sinks = window > 4},
                                               name, &worst);
#if !defined(__CUDACC__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
    check_case<float16, Quantized, Window>(r, {.heads = 40, .lengths = {150, 3}}, name, &worst);  // 64 rows
    check_case<bfloat16, Quantized, Window>(r, {.heads = 20, .lengths = {150, 3}}, name, &worst);
    emulated::device_shared_memory = 99 * 1024;
    check_case<float16, Quantized, Window>(
        r, {.heads = 20, .query_tokens = 2, .lengths = {300, 0, 67}, .holes = true, .drafted = 5}, name,
        &worst);
    emulated::device_shared_memory = emulated::most_shared_memory;
#endif
#if !defined(__CUDACC__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
    check_case<float16, Quantized, Window>(r, {.heads = 100, .lengths = {330, 0, 65}, .holes = true}, name,
                                           &worst);  // clusters
#endif
#ifdef __CUDACC__
    for (const int heads : {1, 8, 16, 128})  // trees: each kernel, within a tile and over two
        for (const int n : {5, 64})
            check_case<float16, Quantized, Window>(
                r, {.heads = heads, .query_tokens = 2, .lengths = {70, 0, 350, n}, .drafted = n}, name,
                &worst);
    check_case<bfloat16, Quantized, Window>(
        r, {.query_tokens = 64, .lengths = {129, 77}, .peaked = true, .drafted = 64}, name, &worst);
    check_case<float16, Quantized, Window>(r, {.heads = 1, .lengths = {1000}}, name, &worst);
    for (const int heads : {8, 32, 128})
        check_case<bfloat16, Quantized, Window>(r,
                                                {.heads = heads,
                                                 .query_tokens = 2,
                                                 .lengths = {900, 64, 2},
                                                 .peaked = true,
                                                 .window = 333,
                                                 .window_sinks = true,
                                                 .sink_logits = true,
                                                 .softcap = 5.0f},
                                                name, &worst);
    check_case<float16, Quantized, Window>(r, {.heads = 128, .lengths = {900, 64, 1}}, name, &worst);
    check_case<bfloat16, Quantized, Window>(
        r, {.heads = 128, .query_tokens = 2, .lengths = {500, 130}, .peaked = true}, name, &worst);
    check_case<float16, Quantized, Window>(
        r, {.heads = 100, .lengths = {6000, 10, 0}, .holes = true, .peaked = true}, name, &worst);
    check_case<float16, Quantized, Window>(r, {.heads = 36, .query_tokens = 4, .lengths = {777, 68, 4}}, name,
                                           &worst);
    check_case<float16, Quantized, Window>(
        r, {.heads = 128, .lengths = std::vector<int>(70, 130), .peaked = true}, name, &worst);
    for (const int n : {4, 8, 40})  // drafts, and a prompt
        check_case<float16, Quantized, Window>(r, {.query_tokens = n, .lengths = {777, 64 + n, n}}, name,
                                               &worst);
    check_case<float16, Quantized, Window>(r, {.lengths = std::vector<int>(150, 130), .peaked = true}, name,
                                           &worst);
    check_case<float16, Quantized, Window>(r, {.lengths = {6000, 10}, .holes = true, .peaked = true}, name,
                                           &worst);
#endif
    std::printf("%s: relative error %.2g\n", name, worst);
}

/// A captured launch reads lengths when it runs. A query with a NaN makes its own rows NaN, and others stay
/// what they were but for the order of additions.
template <class Pair>
void check_captured(const char* name) {
    constexpr int heads = 16, dim = Pair::head_dim, value_dim = Pair::value_dim;
    test::rng r(31);
    const std::vector<int> longest = {300, 130, 70}, shorter = {60, 0, 70};
    const test::latent_batch<Pair> batch(r, longest);
    test::device_buffer<int> lengths(shorter);
    const test::device_latents<Pair> device(batch, lengths, 0);
    const auto pages = cuda::make_mixed(0, device.ref);
    const int n = static_cast<int>(longest.size());
    const auto rows = static_cast<std::size_t>(n * heads);
    std::vector<float16> q(rows * dim);
    for (float16& x : q) x = float16(test::normal(r));
    test::device_buffer<float16> q_device(q), out(rows * value_dim);
    const std::size_t bytes =
        cuda::latent_workspace_bytes<std::remove_const_t<decltype(pages)>, float16>(n, heads);
    test::device_buffer<std::byte> workspace(bytes);
    cudaStream_t stream;
    CUDA_OK(cudaStreamCreate(&stream));
    const auto attend = [&] {
        CHECK(cuda::attend_latents<float16>(pages, {q_device.get(), n, heads, dim},
                                            {out.get(), n, heads, value_dim}, {.scale = 0.05f},
                                            workspace.get(), bytes, stream),
              "%s", name);
    };
    attend();
    CUDA_OK(cudaStreamSynchronize(stream));
    CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    attend();
    cudaGraph_t graph;
    CUDA_OK(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t exec;
    CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
    std::vector<float16> want;
    for (const std::vector<int>& now : {shorter, longest}) {
        lengths.upload(now);
        out.poison();
        attend();
        CUDA_OK(cudaStreamSynchronize(stream));
        want = out.download();
        out.poison();
        CUDA_OK(cudaGraphLaunch(exec, stream));
        CUDA_OK(cudaStreamSynchronize(stream));
        CHECK(std::memcmp(want.data(), out.download().data(), want.size() * sizeof(float16)) == 0,
              "%s: a captured launch has other bits, %d tokens", name, now[0]);
    }
    constexpr std::size_t bad = heads + 3;  // of the second sequence
    q[bad * dim + 5] = float16(NAN);
    q_device.upload(q);
    attend();
    CUDA_OK(cudaStreamSynchronize(stream));
    const std::vector<float16> got = out.download();
    for (std::size_t row = 0; row < rows; ++row) {
        bool right = true;
        for (std::size_t i = row * value_dim; i < (row + 1) * value_dim; ++i) {
            const float a = static_cast<float>(got[i]), b = static_cast<float>(want[i]);
            right = right && (row == bad ? a != a : std::abs(a - b) <= 2e-3f * (1.0f + std::abs(b)));
        }
        CHECK(right, "%s: row %zu, %s", name, row, row == bad ? "which has a NaN" : "beside one with a NaN");
    }
    CUDA_OK(cudaGraphExecDestroy(exec));
    CUDA_OK(cudaGraphDestroy(graph));
    CUDA_OK(cudaStreamDestroy(stream));
}

template <class Scheme, int PageTokens, class Last = full<float16>>
using v3 = cuda::latent_pair<Scheme, 512, 64, 512, PageTokens, Last>;

// Tiles are not made where 32 neighbouring numbers may have parameters of two groups.
static_assert(cuda::detail::no_latent_tiles<v3<affine<4, per_token<80>>, 32>> != nullptr);
static_assert(cuda::detail::no_latent_tiles<v3<typename kivi<4, 48>::keys, 96>> != nullptr);

/// Each way in which blocks store codes and parameters, with few channels.
template <class Scheme, int PageTokens, class Last = full<float16>>
[[maybe_unused]] void check_codec(const char* name) {
    using quantized = cuda::latent_pair<Scheme, 128, 64, 128, PageTokens, Last>;
    using window = cuda::latent_pair<full<bfloat16>, 128, 64, 128, PageTokens>;
    test::rng r(static_cast<unsigned>(PageTokens));
    double worst = 0.0;
    check_case<float16, quantized, window, false>(r, {.lengths = {400, 0, 65, 3}, .holes = true}, name,
                                                  &worst);
    std::printf("%s: relative error %.2g\n", name, worst);
}

/// Records of other systems: attention, and the bytes of the CPU.
template <class Pair>
[[maybe_unused]] void check_records(const char* name);

/// Tokens in any order, and in a row: the bytes of the CPU in both blocks.
template <class Pair>
[[maybe_unused]] void check_store(const char* name) {
    using keys = typename Pair::keys;
    constexpr int page = Pair::page_tokens, dim = Pair::head_dim, first = Pair::first_channels, n = 3 * page;
    test::rng r(17);
    std::vector<long long> slots(n);
    for (int i = 0; i < n; ++i) slots[static_cast<std::size_t>(i)] = i;
    std::shuffle(slots.begin(), slots.begin() + 2 * page, r);
    std::vector<float16> x(n * dim);
    std::vector<float> left(n * first), right(n * (dim - first));  // of slots
    for (int i = 0; i < n; ++i)
        for (int c = 0; c < dim; ++c) {
            const float16 y((c < first ? 1.0f : 8.0f) * test::normal(r));
            const auto slot = static_cast<int>(slots[static_cast<std::size_t>(i)]);
            x[static_cast<std::size_t>(i * dim + c)] = y;
            (c < first ? left[static_cast<std::size_t>(slot * first + c)]
                       : right[static_cast<std::size_t>(slot * (dim - first) + c - first)]) =
                static_cast<float>(y);
        }
    std::vector<std::byte> want(3 * Pair::key_block_bytes, std::byte{0xff});
    for (std::size_t p = 0; p < 3; ++p) {
        std::byte* const block = &want[p * Pair::key_block_bytes];
        keys{}.quantize({tensor::key, page, first}, {0, 0}, &left[p * page * first], block);
        if constexpr (first < dim)
            typename Pair::last{}.quantize({tensor::key, page, dim - first}, {0, 0},
                                           &right[p * page * (dim - first)], block + Pair::second_block);
    }
    test::device_buffer<std::byte> memory(std::vector<std::byte>(want.size()));
    const test::device_buffer<float16> x_device(x);
    const test::device_buffer<long long> mapping(slots);
    cuda::cache_ref<Pair> ref;
    ref.key_pages = memory.get();
    ref.key_page_bytes = Pair::key_block_bytes;
    ref.kv_heads = 1;
    const cuda::status s = cuda::store<Pair, float16>(
        ref, {x_device.get(), n, 1, dim}, {nullptr, 0, 1, Pair::value_dim}, mapping.get(), nullptr, nullptr);
    CHECK(s, "%s: %s", name, s.message);
    CHECK(memory.download() == want, "%s: stored tokens have other bytes than the CPU's", name);
}

template <class Pair>
void check_records(const char* name) {
    using window = cuda::latent_pair<full<float16>, Pair::head_dim, 0, Pair::value_dim, Pair::page_tokens>;
    test::rng r(static_cast<unsigned>(Pair::page_tokens + Pair::head_dim));
    double worst = 0.0;
    check_case<float16, Pair, window, false>(r, {.recent = 40, .lengths = {200, 0, 65}, .holes = true}, name,
                                             &worst);
    std::printf("%s: relative error %.2g\n", name, worst);
    check_store<Pair>(name);
}

[[maybe_unused]] void check_refusals() {  // of the first part
    using pair = v3<full<float16>, 64>;
    using mix = cuda::mixed_cache_ref<cuda::cache_part<pair>>;
    test::device_buffer<int> numbers(4);
    test::device_buffer<std::byte> memory(pair::key_block_bytes);
    const test::device_buffer<float16> q(576 * 16);
    test::device_buffer<float16> out(512 * 16);
    cuda::cache_ref<pair> ref;
    ref.key_pages = memory.get();
    ref.key_page_bytes = pair::key_block_bytes;
    ref.block_table = ref.tokens = numbers.get();
    ref.sequences = ref.table_columns = ref.kv_heads = 1;
    const std::size_t bytes = cuda::latent_workspace_bytes<mix, float16>(1, 16);
    test::device_buffer<std::byte> workspace(bytes);
    const auto refused = [&](const char* words, cuda::cache_ref<pair> c,
                             const cuda::attention_options& options, std::size_t room, int dim = 576) {
        const cuda::status s =
            cuda::attend_latents<float16>(cuda::make_mixed(0, c), {q.get(), 1, 16, dim},
                                          {out.get(), 1, 16, 512}, options, workspace.get(), room, nullptr);
        CHECK(s.code == cudaErrorInvalidValue && std::strstr(s.message, words) != nullptr,
              "\"%s\" is not in \"%s\"", words, s.message);
    };
    refused("softcap is -1", ref, {.softcap = -1.0f}, bytes);
    refused("the window is -2 tokens", ref, {.window = -2}, bytes);
    refused("a causal mask or a tree", ref, {.all_keys = true}, bytes);
    const test::device_buffer<std::uint64_t> words(64);
    refused("a tree has 1 to 64", ref, {.ancestors = words.get(), .drafted = 65}, bytes);
    refused("workspace", ref, {}, bytes - 1);
    const std::size_t most = cuda::latent_workspace_bytes<mix, float16>(1, 1 << 20, 1 << 20);
    CHECK(most > std::size_t{1} << 40, "2^40 query rows have a workspace of %zu bytes", most);
    refused("q has head_dim 512", ref, {}, bytes, 512);
    cuda::cache_ref<pair> two = ref;
    two.kv_heads = 2;
    two.key_page_bytes *= 2;
    refused("one kv head, the cache has 2", two, {}, bytes);
    two = ref;
    two.key_page_bytes -= 16;
    refused("page strides", two, {}, bytes);
}

}  // namespace

int main() {
#if !defined(PART) || PART == 0
    check_refusals();
    check_store<cuda::latent_pair<affine<4, per_token<64>>, 128, 64, 128, 32>>("affine-4-g64");
    check_store<cuda::latent_pair<affine<4, per_token<64>>, 128, 64, 128, 32, int8>>("affine-4-g64-int8x64");
    check_captured<v3<typename kivi<4, 64>::keys, 64>>("kivi-4-g64");
    check_format<v3<typename kivi<4, 64>::keys, 64>, v3<full<float16>, 64>>("kivi-4-g64");
    check_format<cuda::latent_pair<affine<4, per_token<>>, 40, 8, 40, 12>,
                 cuda::latent_pair<full<bfloat16>, 40, 8, 40, 12>>("affine-4, few channels");
#endif
#if PART == 0
    check_records<cuda::latent_pair<records_of<record_layout_number("mla-656")>, 512, 64, 512, 64>>(
        "mla-656");
    check_records<cuda::latent_pair<records_of<record_layout_number("mla-584")>, 448, 64, 512, 32>>(
        "mla-584");
    check_records<cuda::latent_pair<records_of<record_layout_number("mla-528")>, 512, 0, 512, 16>>("mla-528");
    check_records<cuda::latent_pair<records_of<record_layout_number("mla-288")>, 512, 0, 512, 64>>("mla-288");
    check_codec<typename std4::keys, 128>("std4, few channels");
    check_codec<typename kivi<3, 32>::keys, 32>("kivi-3-g32, pages of 32");
    check_codec<affine<5, per_token<96>>, 96, int8>("affine-5-g96-int8x64, pages of 96");
    check_codec<typename std4::keys, 128, ref8::keys>("std4-ref8x64, few channels");
#endif
#ifdef __CUDACC__
#if PART == 1
    check_format<v3<typename std4::keys, 128>, v3<full<bfloat16>, 128>>("std4");
    check_format<v3<typename std4::keys, 128, ref8::keys>, v3<full<float16>, 128>>("std4-ref8x64");
    check_format<v3<int8, 128>, v3<full<float16>, 128>>("int8");
    check_codec<int8, 32>("int8, pages of 32");
    check_codec<typename hi6::keys, 128>("hi6, few channels");
    check_codec<affine<1, per_token<32>>, 64>("affine-1-g32, few channels");
#elif PART == 2
    check_format<v3<typename kivi<4, 64>::keys, 64, int8>, v3<full<bfloat16>, 64>>("kivi-4-g64-int8x64");
    check_format<v3<records_of<record_layout_number("mla-656")>, 64>, v3<full<bfloat16>, 64>>("mla-656");
    check_format<v3<full<bfloat16>, 64>, v3<full<bfloat16>, 64>>("bf16");
    check_format<cuda::latent_pair<typename kivi<2, 32>::keys, 448, 64, 512, 32>,
                 cuda::latent_pair<full<float16>, 448, 64, 512, 32>>("kivi-2-g32, V4");
    {
        test::rng r(16);
        double worst = 0.0;
        check_case<float16, v3<full<float16>, 16>, v3<full<float16>, 16>>(
            r, {.heads = 128, .lengths = {400, 33}, .holes = true}, "fp16, pages of 16", &worst);
    }
#endif
#endif
    return test::report("latent");
}
