// Decode steps in a graph that is replayed while sequences grow: commit_due_pages, store_new_tokens and one
// attend over sinks, quantized pages and window, or one attend that stores as well. Bytes of all pages are
// those of the CPU, attention is compared with double arithmetic on what pages dequantize to.
#include <kvq/cuda.cuh>

#include "support.cuh"

using namespace kvq;

namespace {

#ifdef __CUDACC__
constexpr int long_run = 1000, short_run = 700;
#else
constexpr int long_run = 150, short_run = 150;
#endif

struct step_case {
    int sinks, recent, new_tokens, steps;
    std::vector<int> lengths;  // before the first step; 0: not there
    int kv_heads = 2, group = 4;
    bool one_launch = false;  // stores and attends
};

template <class Format>
struct page_pool {
    test::device_buffer<std::byte> keys, values;
    test::device_buffer<int> table;
    cuda::cache_ref<Format> ref;

    page_pool(int heads, int pages, const std::vector<int>& entries, int columns, int sequences,
              const int* tokens)
        : keys(cuda::cache_ref<Format>::dense_key_page(heads) * static_cast<std::size_t>(pages)),
          values(cuda::cache_ref<Format>::dense_value_page(heads) * static_cast<std::size_t>(pages)),
          table(entries) {
        ref.key_pages = keys.get();
        ref.value_pages = values.get();
        ref.key_page_bytes = cuda::cache_ref<Format>::dense_key_page(heads);
        ref.value_page_bytes = cuda::cache_ref<Format>::dense_value_page(heads);
        ref.block_table = table.get();
        ref.tokens = tokens;
        ref.sequences = sequences;
        ref.table_columns = columns;
        ref.kv_heads = heads;
    }
};

std::vector<int> shuffled(test::rng& r, int n) {
    std::vector<int> order(static_cast<std::size_t>(n));
    for (int i = 0; i < n; ++i) order[static_cast<std::size_t>(i)] = i;
    std::shuffle(order.begin(), order.end(), r);
    return order;
}

/// Does one head of a window page hold these tokens?
template <tensor Role, class Format>
bool same_tokens(const std::vector<std::byte>& pages, int page, int heads, int head,
                 const std::vector<float16>& x, std::size_t first, int count) {
    using S = cuda::detail::scheme_of<Role, Format>;
    constexpr block_shape s = cuda::detail::shape_of<Role, Format>;
    const std::byte* const block = &pages[static_cast<std::size_t>(page * heads + head) * S{}.block_bytes(s)];
    for (int t = 0; t < count; ++t)
        for (int c = 0; c < s.dim; ++c) {
            float16 have;
            std::memcpy(&have, block + 2 * S::element(value_layout<float16>(s), s, t, c), 2);
            const float16 want = x[((first + static_cast<std::size_t>(t)) * static_cast<std::size_t>(heads) +
                                    static_cast<std::size_t>(head)) *
                                       static_cast<std::size_t>(s.dim) +
                                   static_cast<std::size_t>(c)];
            if (have.bits != want.bits) return false;
        }
    return true;
}

template <class Quantized, bool Sinks = true>
void check_steps(const step_case& c, const char* name) {
    using window_format =
        cuda::block_pair<full<float16>, full<float16>, Quantized::head_dim, Quantized::page_tokens>;
    using sink_format = cuda::block_pair<full<float16>, full<float16>, Quantized::head_dim, 16>;
    constexpr int dim = Quantized::head_dim, page = Quantized::page_tokens;
    test::rng r(77);
    const int sequences = static_cast<int>(c.lengths.size()), heads = c.kv_heads, n = c.new_tokens;
    const auto all = static_cast<std::size_t>(sequences);
    const int most = *std::max_element(c.lengths.begin(), c.lengths.end()) + c.steps * n;
    const int columns = most / page + 1, ring = cuda::window_columns(c.recent, page, n);
    test::device_buffer<int> tokens(c.lengths);
    page_pool<Quantized> quantized(heads, sequences * columns, shuffled(r, sequences * columns), columns,
                                   sequences, tokens.get());
    page_pool<window_format> window(heads, sequences * ring, shuffled(r, sequences * ring), ring, sequences,
                                    tokens.get());
    page_pool<sink_format> sinks(heads, sequences, shuffled(r, sequences), 1, sequences, tokens.get());
    quantized.ref.first_token = window.ref.first_token = c.sinks;
    quantized.keys.clear();  // padding is zero on the CPU
    quantized.values.clear();

    // The graph: a launch that commits, one that stores, one that attends.
    const int rows = sequences * n, q_heads = heads * c.group;
    const std::size_t row = static_cast<std::size_t>(heads * dim);
    test::device_buffer<float16> k(static_cast<std::size_t>(rows) * row),
        v(static_cast<std::size_t>(rows) * row), q(static_cast<std::size_t>(rows * q_heads * dim)),
        out(static_cast<std::size_t>(rows * q_heads * dim));
    const auto mix = cuda::make_mixed(c.recent, cuda::behind_window(quantized.ref),
                                      cuda::in_window(window.ref), cuda::sink_tokens(sinks.ref, c.sinks));
    const std::size_t bytes =
        cuda::attend_workspace_bytes<std::remove_cvref_t<decltype(mix)>, float16>(c.group, n);
    test::device_buffer<std::byte> workspace(bytes);
    workspace.clear();
    test::device_buffer<unsigned> bad(1);
    bad.clear();
    const token_view<const float16> kv(k.get(), rows, heads, dim), vv(v.get(), rows, heads, dim);
    cuda::attention_options options;
    options.query_tokens = n;
    cudaStream_t stream;
    CUDA_OK(cudaStreamCreate(&stream));
    const auto step = [&] {
        cuda::status s = cuda::commit_due_pages(quantized.ref, window.ref, c.recent, n, bad.get(), stream);
        CHECK(s, "%s: %s", name, s.message);
        const token_view<const float16> queries(q.get(), rows, q_heads, dim);
        const token_view<float16> outputs(out.get(), rows, q_heads, dim);
        if (c.one_launch) {
            if constexpr (Sinks)
                s = cuda::attend(mix, cuda::new_token_rows<float16>{kv, vv, n, bad.get()}, queries, outputs,
                                 options, workspace.get(), bytes, stream);
            else
                s = cuda::attend(cuda::make_mixed(c.recent, cuda::behind_window(quantized.ref),
                                                  cuda::in_window(window.ref)),
                                 cuda::new_token_rows<float16>{kv, vv, n, bad.get()}, queries, outputs,
                                 options, workspace.get(), bytes, stream);
            CHECK(s, "%s: %s", name, s.message);
            return;
        }
        if constexpr (Sinks)
            s = cuda::store_new_tokens(window.ref, sinks.ref, kv, vv, n, bad.get(), stream, {.early = true});
        else
            s = cuda::store_new_tokens(window.ref, kv, vv, n, bad.get(), stream);
        CHECK(s, "%s: %s", name, s.message);
        s = cuda::attend(mix, queries, outputs, options, workspace.get(), bytes, stream);
        CHECK(s, "%s: %s", name, s.message);
    };
#ifdef __CUDACC__
    // Kernels are loaded outside the capture; without tokens a step changes nothing.
    tokens.clear();
    step();
    CUDA_OK(cudaStreamSynchronize(stream));
#endif
    CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    step();
    cudaGraph_t graph;
    CUDA_OK(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t exec;
    CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));

    // What the CPU knows: all tokens of every sequence, [token][head][dim].
    std::vector<int> lengths = c.lengths;
    std::vector<std::vector<float16>> keys(all), values(all);
    const auto normal = [&](std::size_t count) {
        std::vector<float16> x(count);
        for (float16& y : x) y = float16(test::normal(r));
        return x;
    };
    double worst = 0.0;
    const auto replay = [&](int count, bool counts_bad) {
        // Sequences that are there grow by n tokens; `count` queries of each are looked at.
        std::vector<float16> k_new, v_new;
        for (std::size_t b = 0; b < all; ++b) {
            auto a = normal(static_cast<std::size_t>(n) * row), d = normal(static_cast<std::size_t>(n) * row);
            if (counts_bad && b == 0) a[5] = float16::from_bits(0x7c00);
            k_new.insert(k_new.end(), a.begin(), a.end());
            v_new.insert(v_new.end(), d.begin(), d.end());
            if (lengths[b] <= 0) continue;
            lengths[b] += n;
            keys[b].insert(keys[b].end(), a.begin(), a.end());
            values[b].insert(values[b].end(), d.begin(), d.end());
        }
        const auto q_new = normal(q.size());
        k.upload(k_new);
        v.upload(v_new);
        q.upload(q_new);
        tokens.upload(lengths);
        out.poison();
        CUDA_OK(cudaDeviceSynchronize());
        CUDA_OK(cudaGraphLaunch(exec, stream));
        CUDA_OK(cudaStreamSynchronize(stream));
        if (count == 0) return;
        const auto got = out.download();
        std::vector<float> block_keys(static_cast<std::size_t>(page * dim)), block_values(block_keys);
        std::vector<std::byte> key_block(Quantized::key_block_bytes),
            value_block(Quantized::value_block_bytes);
        for (std::size_t b = 0; b < all; ++b) {
            const auto h = static_cast<std::size_t>(test::uniform(r, 0, heads - 1));
            const int committed = cuda::committed_pages(lengths[b] - c.sinks, c.recent, page);
            // Keys and values of the head as attention sees them.
            std::vector<float> xk(static_cast<std::size_t>(std::max(0, lengths[b]) * dim)), xv(xk);
            for (std::size_t i = 0; i < xk.size(); ++i) {
                const std::size_t from = i / dim * row + h * dim + i % dim;
                xk[i] = static_cast<float>(keys[b][from]);
                xv[i] = static_cast<float>(values[b][from]);
            }
            for (int p = 0; p < committed; ++p) {
                const auto through = [&](auto scheme, const block_shape& s, std::vector<float>& x,
                                         std::vector<std::byte>& block) {
                    float* const at = &x[static_cast<std::size_t>((c.sinks + p * page) * dim)];
                    scheme.quantize(s, {}, at, block.data());
                    scheme.dequantize(s, {}, block.data(), at);
                };
                through(typename Quantized::keys{}, Quantized::key_shape(), xk, key_block);
                through(typename Quantized::values{}, Quantized::value_shape(), xv, value_block);
            }
            for (int i = 0; i < n; ++i) {
                const std::size_t head = h * static_cast<std::size_t>(c.group) +
                                         static_cast<std::size_t>(i % c.group),
                                  at = (b * static_cast<std::size_t>(n) + static_cast<std::size_t>(i)) *
                                           static_cast<std::size_t>(q_heads) +
                                       head;
                const int seen = lengths[b] <= 0 ? 0 : lengths[b] - n + i + 1;
                std::vector<double> scores, want(dim, 0.0);
                double top = -INFINITY, sum = 0.0, error = 0.0, size = 0.0;
                for (int t = 0; t < seen; ++t) {
                    double s = 0.0;
                    for (int d = 0; d < dim; ++d)
                        s += static_cast<double>(
                                 static_cast<float>(q_new[at * dim + static_cast<std::size_t>(d)])) *
                             xk[static_cast<std::size_t>(t * dim + d)];
                    scores.push_back(s / std::sqrt(static_cast<double>(dim)));
                    top = std::max(top, scores.back());
                }
                for (int t = 0; t < seen; ++t) {
                    const double p = std::exp(scores[static_cast<std::size_t>(t)] - top);
                    sum += p;
                    for (int d = 0; d < dim; ++d)
                        want[static_cast<std::size_t>(d)] += p * xv[static_cast<std::size_t>(t * dim + d)];
                }
                for (int d = 0; d < dim; ++d) {
                    const double x = sum > 0.0 ? want[static_cast<std::size_t>(d)] / sum : 0.0,
                                 y = static_cast<float>(got[at * dim + static_cast<std::size_t>(d)]);
                    error += (x - y) * (x - y);
                    size += x * x;
                    if (!(y == y)) error = INFINITY;
                }
                const double relative = size > 0.0 ? std::sqrt(error / size) : std::sqrt(error);
                worst = std::max(worst, relative);
                CHECK(relative <= 2e-3, "%s: error %.3g of sequence %zu at %d tokens", name, relative, b,
                      lengths[b]);
            }
        }
    };
    // Prompts go in by the same launches, a step at a time, those of some sequences longer than others: in
    // the end one sequence stands among rows that are not there.
    lengths.assign(all, 0);
    q.upload(normal(q.size()));
    for (int t = 0; t < *std::max_element(c.lengths.begin(), c.lengths.end()); t += n) {
        std::vector<float16> k_new(k.size()), v_new(v.size());
        std::vector<int> now(all, 0);
        for (std::size_t b = 0; b < all; ++b) {
            if (c.lengths[b] <= t) continue;
            auto a = normal(static_cast<std::size_t>(n) * row), d = normal(static_cast<std::size_t>(n) * row);
            std::copy(a.begin(), a.end(),
                      k_new.begin() + static_cast<std::ptrdiff_t>(b * static_cast<std::size_t>(n) * row));
            std::copy(d.begin(), d.end(),
                      v_new.begin() + static_cast<std::ptrdiff_t>(b * static_cast<std::size_t>(n) * row));
            keys[b].insert(keys[b].end(), a.begin(), a.end());
            values[b].insert(values[b].end(), d.begin(), d.end());
            lengths[b] = now[b] = t + n;
        }
        k.upload(k_new);
        v.upload(v_new);
        tokens.upload(now);
        out.poison();
        CUDA_OK(cudaDeviceSynchronize());
        CUDA_OK(cudaGraphLaunch(exec, stream));
        CUDA_OK(cudaStreamSynchronize(stream));
        const auto got = out.download();
        for (std::size_t b = 0, i = 0; b < all; ++b) {
            // Single numbers of a row may be 0; a row that was passed by has NaN, one without tokens zeros.
            bool finite = true, any = false;
            for (; i < (b + 1) * got.size() / all; ++i) {
                finite = finite && kvq::detail::is_finite(got[i]);
                any = any || got[i].bits != 0;
            }
            CHECK(finite && any == (now[b] > 0), "%s: outputs of sequence %zu at %d tokens", name, b, now[b]);
        }
    }
    for (int i = 0; i < c.steps; ++i) replay(i % (c.steps / 12) == 0 || i + 1 == c.steps ? 1 : 0, false);
    CHECK(bad.download()[0] == 0, "%s: finite tokens were counted as not finite", name);

    // Bytes of all pages.
    const auto quantized_keys = quantized.keys.download(), quantized_values = quantized.values.download();
    const auto window_keys = window.keys.download(), window_values = window.values.download();
    const auto sink_keys = sinks.keys.download(), sink_values = sinks.values.download();
    const auto tables = quantized.table.download(), rings = window.table.download(),
               sink_table = sinks.table.download();
    int compared = 0;
    for (std::size_t b = 0; b < all; ++b) {
        if (lengths[b] <= 0) continue;
        const int behind = lengths[b] - c.sinks, committed = cuda::committed_pages(behind, c.recent, page);
        for (int h = 0; h < heads; ++h) {
            for (int p = 0; p < committed; ++p, ++compared) {
                const int number =
                    tables[b * static_cast<std::size_t>(columns) + static_cast<std::size_t>(p)];
                const auto compare = [&](auto scheme, const block_shape& s, const std::vector<float16>& x,
                                         const std::vector<std::byte>& pages, std::size_t size,
                                         const char* what) {
                    std::vector<float> block(s.values());
                    for (std::size_t i = 0; i < block.size(); ++i)
                        block[i] = static_cast<float>(
                            x[(static_cast<std::size_t>(c.sinks + p * page) + i / dim) * row +
                              static_cast<std::size_t>(h * dim) + i % dim]);
                    std::vector<std::byte> expected(size);
                    scheme.quantize(s, {}, block.data(), expected.data());
                    CHECK(std::memcmp(expected.data(),
                                      &pages[static_cast<std::size_t>(number * heads + h) * size], size) == 0,
                          "%s: %s of page %d of sequence %zu, head %d differ", name, what, p, b, h);
                };
                compare(typename Quantized::keys{}, Quantized::key_shape(), keys[b], quantized_keys,
                        Quantized::key_block_bytes, "keys");
                compare(typename Quantized::values{}, Quantized::value_shape(), values[b], quantized_values,
                        Quantized::value_block_bytes, "values");
            }
            for (int p = committed; p * page < behind; ++p) {
                const int number =
                              rings[b * static_cast<std::size_t>(ring) + static_cast<std::size_t>(p % ring)],
                          count = std::min(page, behind - p * page);
                const auto first = static_cast<std::size_t>(c.sinks + p * page);
                CHECK((same_tokens<tensor::key, window_format>(window_keys, number, heads, h, keys[b], first,
                                                               count)) &&
                          (same_tokens<tensor::value, window_format>(window_values, number, heads, h,
                                                                     values[b], first, count)),
                      "%s: window page %d of sequence %zu, head %d differs", name, p, b, h);
            }
            if (Sinks) {
                const int number = sink_table[b], count = std::min(c.sinks, lengths[b]);
                CHECK(
                    (same_tokens<tensor::key, sink_format>(sink_keys, number, heads, h, keys[b], 0, count)) &&
                        (same_tokens<tensor::value, sink_format>(sink_values, number, heads, h, values[b], 0,
                                                                 count)),
                    "%s: sinks of sequence %zu, head %d differ", name, b, h);
            }
        }
    }
    replay(0, true);
    if (lengths[0] > 0) CHECK(bad.download()[0] >= 1, "%s: an infinity was not counted", name);
    CUDA_OK(cudaGraphExecDestroy(exec));
    CUDA_OK(cudaGraphDestroy(graph));
    CUDA_OK(cudaStreamDestroy(stream));
    std::printf("  %-36s %d steps, %d quantized blocks, largest error %.2e\n", name, c.steps, compared,
                worst);
}

/// Calls that must be refused.
void check_refusals() {
    using quantized_format = cuda::kivi_pair<4, 32, 64, 32>;
    using window_format = cuda::block_pair<full<float16>, full<float16>, 64, 32>;
    using sink_format = cuda::block_pair<full<float16>, full<float16>, 64, 16>;
    const test::device_buffer<int> tokens(std::vector<int>{100, 100}), others(std::vector<int>{100, 100});
    const std::vector<int> table(8, 0);
    page_pool<quantized_format> quantized(1, 4, table, 4, 2, tokens.get());
    page_pool<window_format> window(1, 4, table, 4, 2, tokens.get());
    page_pool<sink_format> sinks(1, 4, table, 1, 2, tokens.get());
    quantized.ref.first_token = window.ref.first_token = 4;
    const test::device_buffer<float16> x(2 * 4 * 64);
    test::device_buffer<float16> y(2 * 4 * 64);
    const token_view<const float16> kv(x.get(), 2, 1, 64), q(x.get(), 2, 4, 64);
    const token_view<float16> out(y.get(), 2, 4, 64);
    const auto refused = [](const cuda::status& s, const char* part) {
        CHECK(s.code == cudaErrorInvalidValue && std::strstr(s.message, part) != nullptr,
              "expected '%s', got '%s'", part, s.message);
    };
    const auto commit = [&](int recent, int new_tokens) {
        return cuda::commit_due_pages(quantized.ref, window.ref, recent, new_tokens, nullptr, nullptr);
    };
    const auto store = [&](int new_tokens) {
        return cuda::store_new_tokens(window.ref, sinks.ref, kv, kv, new_tokens, nullptr, nullptr);
    };
    refused(commit(0, 1), "new tokens a sequence");
    refused(commit(64, 33), "new tokens a sequence");
    refused(commit(200, 1), "columns");
    refused(store(33), "new tokens a sequence");
    refused(store(2), "new ones each");
    refused(cuda::store_new_tokens(window.ref, kv, kv, 1, nullptr, nullptr), "sinks");
    const auto attend = [&](int recent, int sink_count) {
        return cuda::attend(
            cuda::make_mixed(recent, cuda::behind_window(quantized.ref), cuda::in_window(window.ref),
                             cuda::sink_tokens(sinks.ref, sink_count)),
            q, out, {}, nullptr, 0, nullptr);
    };
    const auto attend_new = [&](int recent, int new_tokens, int queries) {
        return cuda::attend(cuda::make_mixed(recent, cuda::behind_window(quantized.ref),
                                             cuda::in_window(window.ref), cuda::sink_tokens(sinks.ref, 4)),
                            cuda::new_token_rows<float16>{kv, kv, new_tokens}, q, out,
                            {.query_tokens = queries}, nullptr, 0, nullptr);
    };
    refused(attend_new(0, 1, 1), "1 new tokens a sequence, but the recent window has 0");
    refused(attend_new(64, 2, 1), "2 new tokens a sequence, but queries of 1");
    refused(attend_new(64, 0, 1), "new tokens a sequence, but pages");
    refused(attend_new(64, 2, 2), "new ones each");
    refused(attend_new(200, 1, 1), "columns");
    refused(attend_new(64, 1, 1), "workspace");
    refused(attend(-1, 4), "recent window");
    refused(attend(200, 4), "columns");
    refused(attend(64, 5), "sinks");
    refused(attend(64, 4), "workspace");
    window.ref.tokens = others.get();
    refused(attend(64, 4), "different sequences");
    refused(commit(64, 1), "different caches");
    window.ref.tokens = tokens.get();
    window.ref.first_token = 5;
    refused(attend(64, 4), "other sizes or sinks");
    window.ref.first_token = 4;
    auto second = quantized.ref;
    second.kv_heads = 2;
    const cuda::cache_ref<quantized_format> layers[] = {quantized.ref, second};
    const cuda::cache_ref<window_format> windows[] = {window.ref, window.ref};
    using quantized_layers = std::span<const cuda::cache_ref<quantized_format>>;
    using window_layers = std::span<const cuda::cache_ref<window_format>>;
    refused(cuda::commit_due_pages(quantized_layers(layers), window_layers(windows), 64, 1, nullptr, nullptr),
            "strides");
    refused(
        cuda::commit_due_pages(quantized_layers(layers, 1), window_layers(windows), 64, 1, nullptr, nullptr),
        "layers");
}

}  // namespace

int main() {
    check_refusals();
    using kivi = cuda::kivi_pair<4, 32, 64, 32>;
    check_steps<kivi>({4, 40, 1, long_run, {7, 0, 1, 44, 45, 30}, 2, 4, true}, "kivi4 g32, one launch");
    check_steps<kivi>({3, 32, 3, short_run / 3, {3, 9, 0, 60}}, "three tokens at a time");
    // 20 rows of a kv head: more than a row block.
    check_steps<kivi>({3, 32, 5, short_run / 5, {5, 10, 0, 60}, 2, 4, true}, "five tokens, one launch");
#ifdef __CUDACC__
    check_steps<kivi>({4, 40, 1, long_run, {7, 0, 1, 44, 45, 30}}, "kivi4 g32, page 32");
    check_steps<cuda::block_pair<int8, int8, 128, 32>, false>({0, 20, 1, short_run / 2, {1, 50}},
                                                              "int8, no sinks");
    for (const bool one_launch : {false, true}) {
        check_steps<cuda::preset_pair<std4, 128, 128>>({4, 32, 1, short_run, {150, 2}, 1, 4, one_launch},
                                                       one_launch ? "std4, one launch" : "std4");
        // Values of 80 channels are not copied line by line: two launches.
        check_steps<cuda::block_pair<int8, int8, 80, 32>>(
            {4, 40, 1, short_run, {30, 0, 70}, 2, 4, one_launch}, "80 channels");
    }
    std::vector<int> lone(300, 0);
    lone.back() = 100;
    check_steps<kivi>({4, 40, 1, 12, lone, 2, 4, true}, "one of 300 rows");
    // Many warps have parts of an item; two bands of channels.
    check_steps<cuda::kivi_pair<4, 32, 256, 32>>({4, 100, 2, short_run, {2000, 30}, 1, 4, true},
                                                 "256 channels, one launch");
#else  // emulated, one format
    check_steps<kivi, false>({0, 20, 1, short_run / 2, {1, 50}, 2, 4, true}, "no sinks, one launch");
#endif
    return test::report("step");
}
