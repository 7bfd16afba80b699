// What spans several launches: mixed formats over one softmax state, graphs, merging across caches; bad
// arguments.
#include "attention_test.cuh"

#include <kvq/cuda.cuh>

#include <algorithm>

using namespace kvq;

namespace {

using window = cuda::block_pair<full<float16>, full<float16>, 128, 64>;
using quantized = cuda::kivi_pair<4, 64, 128, 64>;
using sink = cuda::block_pair<full<float16>, full<float16>, 128, 4>;
constexpr int kv_heads = 2, group = 4, q_heads = kv_heads * group, dim = 128;

template <class Format>
void dequantize_into(const test::quantized_batch<Format>& from, std::size_t b, int first, int count, int at,
                     std::vector<std::vector<float>>& k, std::vector<std::vector<float>>& v) {
    for (std::size_t h = 0; h < kv_heads; ++h)
        for (int t = 0; t < count; ++t)
            for (int c = 0; c < dim; ++c) {
                k[h][static_cast<std::size_t>((at + t) * dim + c)] =
                    from.key_values[b][h][static_cast<std::size_t>((first + t) * dim + c)];
                v[h][static_cast<std::size_t>((at + t) * dim + c)] =
                    from.value_values[b][h][static_cast<std::size_t>((first + t) * dim + c)];
            }
}

/// 4 sinks, quantized pages and window pages in one sequence: three launches, one softmax; captured and
/// replayed.
void check_mixed() {
    test::rng r(77);
    const std::vector<int> lengths = {4 + 5 * 64 + 17, 4 + 64, 3, 0, 4 + 2 * 64 + 63};
    const int sequences = static_cast<int>(lengths.size());
    std::vector<int> sink_lengths, rest_lengths;
    for (const int n : lengths) {
        sink_lengths.push_back(std::min(n, 4));
        rest_lengths.push_back(std::max(0, n - 4));
    }
    const test::quantized_batch<sink> sinks(r, kv_heads, sink_lengths);
    test::quantized_batch<quantized> middle(r, kv_heads, rest_lengths, true);
    test::quantized_batch<window> recent(r, kv_heads, rest_lengths, true);
    // Pages 0, 2, 4, ... are quantized while the last one never is.
    const auto is_quantized = [&](int b, int page) {
        return page % 2 == 0 && (page + 1) * 64 <= rest_lengths[static_cast<std::size_t>(b)];
    };
    test::quantized_batch<window> whole = recent;  // reference values, all of them held
    ++whole.columns;
    whole.table.assign(static_cast<std::size_t>(sequences * whole.columns), 0);
    for (int b = 0; b < sequences; ++b) {
        const auto at = static_cast<std::size_t>(b);
        const int n = lengths[at];
        std::vector<std::vector<float>> k(kv_heads, std::vector<float>(static_cast<std::size_t>(n * dim))),
            v = k;
        dequantize_into(sinks, at, 0, std::min(n, 4), 0, k, v);
        for (int page = 0; page * 64 < rest_lengths[at]; ++page) {
            const int count = std::min(64, rest_lengths[at] - page * 64);
            const auto entry = at * static_cast<std::size_t>(middle.columns) + static_cast<std::size_t>(page);
            if (is_quantized(b, page)) {
                dequantize_into(middle, at, page * 64, count, 4 + page * 64, k, v);
                recent.table[entry] = -1;
            } else {
                dequantize_into(recent, at, page * 64, count, 4 + page * 64, k, v);
                middle.table[entry] = -1;
            }
        }
        whole.key_values[at] = k;
        whole.value_values[at] = v;
    }
    test::device_batch<sink> sinks_device(sinks);
    test::device_batch<quantized> middle_device(middle);
    test::device_batch<window> recent_device(recent);
    const test::device_buffer<int> lengths_device(lengths);
    sinks_device.ref.tokens = middle_device.ref.tokens = recent_device.ref.tokens = lengths_device.get();
    middle_device.ref.first_token = recent_device.ref.first_token = 4;

    std::vector<float16> q(static_cast<std::size_t>(sequences * q_heads * dim));
    std::vector<float> qf(q.size());
    test::device_buffer<float16> q_device(q.size()), out(q.size());
    const std::size_t bytes = std::max(cuda::attend_workspace_bytes<quantized, float16>(group),
                                       cuda::attend_workspace_bytes<window, float16>(group));
    test::device_buffer<std::byte> workspace(bytes);
    workspace.clear();
    test::device_buffer<float> state(static_cast<std::size_t>(sequences * q_heads * (dim + 2)));
    test::device_buffer<float> lse(static_cast<std::size_t>(sequences * q_heads));
    const token_view<const float16> q_view(q_device.get(), sequences, q_heads, dim);
    const token_view<float16> out_view(out.get(), sequences, q_heads, dim);
    cudaStream_t stream;
    CUDA_OK(cudaStreamCreate(&stream));
    const auto step = [&] {
        cuda::attention_options first, second, third;
        first.state_out = state.get();
        second.state_in = second.state_out = state.get();
        third.state_in = state.get();
        third.lse = lse.get();
        CHECK((cuda::attend<sink, float16>(sinks_device.ref, q_view, {}, first, nullptr, 0, stream)),
              "sinks");
        CHECK((cuda::attend<quantized, float16>(middle_device.ref, q_view, {}, second, workspace.get(), bytes,
                                                stream)),
              "quantized");
        CHECK((cuda::attend<window, float16>(recent_device.ref, q_view, out_view, third, workspace.get(),
                                             bytes, stream)),
              "window");
    };
    const auto compare = [&](const char* what) {
        const auto got = out.download();
        const auto got_lse = lse.download();
        for (int b = 0; b < sequences; ++b)
            for (int h = 0; h < q_heads; ++h) {
                const std::size_t row = static_cast<std::size_t>(b * q_heads + h);
                const auto want = test::reference_row(whole, static_cast<std::size_t>(b),
                                                      static_cast<std::size_t>(h / group), &qf[row * dim], 0,
                                                      lengths[static_cast<std::size_t>(b)], 0.0f);
                double error = 0.0, size = 0.0;
                for (int c = 0; c < dim; ++c) {
                    const double w =
                        want.sum > 0.0 ? want.output[static_cast<std::size_t>(c)] / want.sum : 0.0;
                    const double g = static_cast<float>(got[row * dim + static_cast<std::size_t>(c)]);
                    error += (g - w) * (g - w);
                    size += w * w;
                }
                CHECK(std::sqrt(error) <= 2e-3 * std::sqrt(size) + 1e-12,
                      "%s: mixed formats, sequence %d head %d: error %g", what, b, h,
                      std::sqrt(error / size));
                const double l = want.sum > 0.0 ? want.max + std::log(want.sum) : -INFINITY;
                CHECK(l == got_lse[row] || std::abs(l - got_lse[row]) < 1e-3, "%s: lse %g, expected %g", what,
                      got_lse[row], l);
            }
    };
    const auto new_queries = [&] {
        for (std::size_t i = 0; i < q.size(); ++i) {
            q[i] = float16(test::normal(r));
            qf[i] = static_cast<float>(q[i]);
        }
        q_device.upload(q);
        out.poison();
    };
    new_queries();
    step();
    CUDA_OK(cudaStreamSynchronize(stream));
    compare("direct");
    CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    step();
    cudaGraph_t graph;
    CUDA_OK(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t exec;
    CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
    for (int replay = 0; replay < 3; ++replay) {
        new_queries();
        CUDA_OK(cudaGraphLaunch(exec, stream));
        CUDA_OK(cudaStreamSynchronize(stream));
        compare("graph");
    }
    CUDA_OK(cudaGraphExecDestroy(exec));
    CUDA_OK(cudaGraphDestroy(graph));
    CUDA_OK(cudaStreamDestroy(stream));
    std::printf("  mixed formats, graph\n");
}

/// The same bits on every run, and more sequences than lanes.
void check_repeatable() {
    test::rng r(5);
    std::vector<int> lengths;
    for (int i = 0; i < test::many(150); ++i)
        lengths.push_back(test::uniform(r, 0, 3) == 0 ? 0 : test::uniform(r, 1, 400));
    lengths[test::many(70)] = test::many(5000);
    const test::quantized_batch<quantized> batch(r, kv_heads, lengths);
    const test::device_batch<quantized> device(batch);
    const int n = static_cast<int>(lengths.size());
    std::vector<float16> q(static_cast<std::size_t>(n * q_heads * dim));
    for (float16& x : q) x = float16(test::normal(r));
    const test::device_buffer<float16> q_device(q);
    test::device_buffer<float16> out(q.size());
    const std::size_t bytes = cuda::attend_workspace_bytes<quantized, float16>(group);
    test::device_buffer<std::byte> workspace(bytes);
    workspace.clear();
    std::vector<float16> first;
    for (int run = 0; run < test::repeats(20); ++run) {
        out.poison();
        // Two launches that overlap, where the second one fetches early.
        for (const bool early : {false, true})
            CHECK((cuda::attend<quantized, float16>(device.ref, {q_device.get(), n, q_heads, dim},
                                                    {out.get(), n, q_heads, dim}, {.early = early && run > 0},
                                                    workspace.get(), bytes, nullptr)),
                  "attend");
        CUDA_OK(cudaDeviceSynchronize());
        const auto got = out.download();
        if (run == 0) first = got;
        CHECK(std::memcmp(first.data(), got.data(), got.size() * 2) == 0, "run %d differs from the first",
              run);
    }
    for (const int b : {0, test::many(70), n - 1})
        for (int h = 0; h < q_heads; ++h) {
            const std::size_t row = static_cast<std::size_t>(b * q_heads + h);
            std::vector<float> qf(dim);
            for (int c = 0; c < dim; ++c)
                qf[static_cast<std::size_t>(c)] =
                    static_cast<float>(q[row * dim + static_cast<std::size_t>(c)]);
            const auto want =
                test::reference_row(batch, static_cast<std::size_t>(b), static_cast<std::size_t>(h / group),
                                    qf.data(), 0, lengths[static_cast<std::size_t>(b)], 0.0f);
            double error = 0.0, size = 0.0;
            for (int c = 0; c < dim; ++c) {
                const double w = want.sum > 0.0 ? want.output[static_cast<std::size_t>(c)] / want.sum : 0.0;
                const double g = static_cast<float>(first[row * dim + static_cast<std::size_t>(c)]);
                error += (g - w) * (g - w);
                size += w * w;
            }
            CHECK(std::sqrt(error) <= 2e-3 * std::sqrt(size) + 1e-12, "many sequences: error %g",
                  std::sqrt(error / size));
        }
    std::printf("  repeatable\n");
}

/// Launches that share the device, so that blocks of one wait for multiprocessors of the other, and for parts
/// of their items.
void check_side_by_side() {
    test::rng r(9);
    const test::quantized_batch<quantized> one(r, kv_heads, {test::many(20000)}),
        many(r, kv_heads, {test::many(3000), 1, test::many(9000), 700, 64, test::many(5000), 2});
    const test::device_batch<quantized> devices[2] = {test::device_batch<quantized>(one),
                                                      test::device_batch<quantized>(many)};
    const int n[2] = {1, 7};
    const std::size_t bytes = cuda::attend_workspace_bytes<quantized, float16>(group);
    std::vector<float16> q(static_cast<std::size_t>(7 * q_heads * dim));
    for (float16& x : q) x = float16(test::normal(r));
    const test::device_buffer<float16> q_device(q);
    test::device_buffer<float16> outs[2] = {test::device_buffer<float16>(q.size()),
                                            test::device_buffer<float16>(q.size())};
    test::device_buffer<std::byte> workspaces[2] = {test::device_buffer<std::byte>(bytes),
                                                    test::device_buffer<std::byte>(bytes)};
    cudaStream_t streams[2];
    for (cudaStream_t& stream : streams) CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    std::vector<float16> want[2];
    for (int i = 0; i < 2; ++i) workspaces[i].clear();
    CUDA_OK(cudaDeviceSynchronize());
    for (int run = 0; run < test::repeats(12); ++run) {
        for (int i = 0; i < 2; ++i) outs[i].poison();
        CUDA_OK(cudaDeviceSynchronize());
        for (int repeat = 0; repeat < (run == 0 ? 1 : test::repeats(8)); ++repeat)
            for (int i = 0; i < 2; ++i) {
                CHECK((cuda::attend<quantized, float16>(devices[i].ref, {q_device.get(), n[i], q_heads, dim},
                                                        {outs[i].get(), n[i], q_heads, dim},
                                                        {.early = run % 2 != 0 && repeat > 0},
                                                        workspaces[i].get(), bytes, streams[i])),
                      "attend");
                if (run == 0) CUDA_OK(cudaDeviceSynchronize());  // alone
            }
        CUDA_OK(cudaDeviceSynchronize());
        for (int i = 0; i < 2; ++i) {
            const auto got = outs[i].download();
            if (run == 0) want[i] = got;
            CHECK(std::memcmp(want[i].data(), got.data(),
                              static_cast<std::size_t>(n[i] * q_heads * dim) * 2) == 0,
                  "run %d of batch %d differs from the one alone", run, i);
        }
    }
    for (int i = 0; i < 2; ++i) {
        const auto left = workspaces[i].download();
        CHECK(std::all_of(left.begin(), left.end(), [](std::byte x) { return x == std::byte{0}; }),
              "the workspace is not zero after the last launch");
    }
    for (const cudaStream_t stream : streams) CUDA_OK(cudaStreamDestroy(stream));
    std::printf("  side by side\n");
}

/// Newest tokens that are stored right before an early launch are seen by it.
void check_early() {
    test::rng r(6);
    std::vector<int> lengths;
    for (int i = 0; i < test::many(60); ++i)
        lengths.push_back(test::uniform(r, 1, 5) * test::uniform(r, 1, 200));
    const test::quantized_batch<window> batch(r, kv_heads, lengths);
    const test::device_batch<window> device(batch);
    const int n = static_cast<int>(lengths.size());
    std::vector<float16> q(static_cast<std::size_t>(n * q_heads * dim)), k, v;
    for (float16& x : q) x = float16(test::normal(r));
    std::vector<long long> mapping;
    for (int b = 0; b < n; ++b) {
        const int last = lengths[static_cast<std::size_t>(b)] - 1;
        mapping.push_back(
            static_cast<long long>(batch.table[static_cast<std::size_t>(b * batch.columns + last / 64)]) *
                64 +
            last % 64);
        for (std::size_t h = 0; h < kv_heads; ++h)
            for (int c = 0; c < dim; ++c) {
                const std::size_t at = static_cast<std::size_t>(last * dim + c);
                k.push_back(float16(batch.key_values[static_cast<std::size_t>(b)][h][at]));
                v.push_back(float16(batch.value_values[static_cast<std::size_t>(b)][h][at]));
            }
    }
    const test::device_buffer<float16> q_device(q), k_device(k), v_device(v),
        wrong(std::vector<float16>(k.size(), float16(9.0f)));
    const test::device_buffer<long long> slots_device(mapping);
    test::device_buffer<float16> out(q.size());
    const std::size_t bytes = cuda::attend_workspace_bytes<window, float16>(group);
    test::device_buffer<std::byte> workspace(bytes);
    workspace.clear();
    const auto store = [&](const float16* keys, const float16* values) {
        CHECK((cuda::store<window, float16>(device.ref, {keys, n, kv_heads, dim}, {values, n, kv_heads, dim},
                                            slots_device.get(), nullptr, nullptr)),
              "store");
    };
    const auto attend = [&](bool early) {
        CHECK((cuda::attend<window, float16>(device.ref, {q_device.get(), n, q_heads, dim},
                                             {out.get(), n, q_heads, dim}, {.early = early}, workspace.get(),
                                             bytes, nullptr)),
              "attend");
    };
    attend(false);
    CUDA_OK(cudaDeviceSynchronize());
    const auto want = out.download();
    for (int run = 0; run < test::repeats(20); ++run) {
        store(wrong.get(), wrong.get());
        attend(false);
        CUDA_OK(cudaDeviceSynchronize());
        if (run == 0)
            CHECK(std::memcmp(want.data(), out.download().data(), want.size() * 2) != 0,
                  "the newest tokens do not matter");
        out.poison();
        CUDA_OK(cudaDeviceSynchronize());
        store(k_device.get(), v_device.get());
        attend(true);
        CUDA_OK(cudaDeviceSynchronize());
        CHECK(std::memcmp(want.data(), out.download().data(), want.size() * 2) == 0, "early run %d", run);
    }
    std::printf("  early\n");
}

/// A window that no sequence fills is none, also where the numbers of tokens are near the ends of int.
void check_endless_window() {
    test::rng r(21);
    constexpr int first_token = 4, query_tokens = 5;
    const std::vector<int> lengths = {6, 5, 70, 3, 0, 300};
    const int n = static_cast<int>(lengths.size());
    std::vector<int> held;
    for (const int length : lengths) held.push_back(std::max(0, length - first_token));
    const test::quantized_batch<window> batch(r, kv_heads, held);
    test::device_batch<window> device(batch);
    const test::device_buffer<int> lengths_device(lengths);
    device.ref.tokens = lengths_device.get();
    device.ref.first_token = first_token;
    std::vector<float16> q(static_cast<std::size_t>(n * query_tokens * q_heads * dim));
    for (float16& x : q) x = float16(test::normal(r));
    const test::device_buffer<float16> q_device(q);
    test::device_buffer<float16> out(q.size());
    const std::size_t bytes = cuda::attend_workspace_bytes<window, float16>(group, query_tokens);
    test::device_buffer<std::byte> workspace(bytes);
    workspace.clear();
    std::vector<float16> want;
    for (const int tokens : {0, 1 << 20, 2147483647}) {
        out.poison();
        CHECK((cuda::attend<window, float16>(device.ref, {q_device.get(), n * query_tokens, q_heads, dim},
                                             {out.get(), n * query_tokens, q_heads, dim},
                                             {.window = tokens, .query_tokens = query_tokens},
                                             workspace.get(), bytes, nullptr)),
              "attend");
        CUDA_OK(cudaDeviceSynchronize());
        const auto got = out.download();
        if (tokens == 0) want = got;
        CHECK(std::memcmp(want.data(), got.data(), got.size() * 2) == 0, "a window of %d tokens hides some",
              tokens);
    }
    std::printf("  endless window\n");
}

/// A query that is not finite makes its own rows NaN and changes no bit of the others.
template <class Format>
void check_bad_queries(const char* name) {
    test::rng r(22);
    constexpr int query_tokens = 2;
    const std::vector<int> lengths = {test::many(9000), 70, 2, 300, 0};
    const int n = static_cast<int>(lengths.size()) * query_tokens;
    const test::quantized_batch<Format> batch(r, kv_heads, lengths);
    const test::device_batch<Format> device(batch);
    std::vector<float16> q(static_cast<std::size_t>(n * q_heads * Format::head_dim));
    for (float16& x : q) x = float16(test::normal(r));
    std::vector<bool> bad(static_cast<std::size_t>(n * q_heads));
    std::vector<float16> bad_q = q;
    for (std::size_t row = 0; row < bad.size(); ++row) {
        bad[row] = test::uniform(r, 0, 3) == 0;
        if (!bad[row]) continue;
        const float odd[] = {NAN, INFINITY, -INFINITY};
        bad_q[row * Format::head_dim + static_cast<std::size_t>(test::uniform(r, 0, Format::head_dim - 1))] =
            float16(odd[test::uniform(r, 0, 2)]);
    }
    test::device_buffer<float16> q_device(q.size());
    test::device_buffer<float16> out(bad.size() * Format::value_dim);
    test::device_buffer<float> lse(bad.size());
    const std::size_t bytes = cuda::attend_workspace_bytes<Format, float16>(group, query_tokens);
    test::device_buffer<std::byte> workspace(bytes);
    workspace.clear();
    const auto run = [&](const std::vector<float16>& queries) {
        q_device.upload(queries);
        out.poison();
        CHECK((cuda::attend<Format, float16>(device.ref, {q_device.get(), n, q_heads, Format::head_dim},
                                             {out.get(), n, q_heads, Format::value_dim},
                                             {.query_tokens = query_tokens, .lse = lse.get()},
                                             workspace.get(), bytes, nullptr)),
              "attend");
        CUDA_OK(cudaDeviceSynchronize());
        return out.download();
    };
    const auto want = run(q);
    for (int repeat = 0; repeat < 2; ++repeat) {
        const auto got = run(bad_q);
        const auto got_lse = lse.download();
        for (std::size_t row = 0; row < bad.size(); ++row) {
            const auto at = row * Format::value_dim;
            // Without a token to see there is no softmax.
            const std::size_t token = row / q_heads;
            const bool sees =
                lengths[token / query_tokens] + static_cast<int>(token % query_tokens) >= query_tokens;
            bool right = true;
            for (std::size_t c = 0; c < Format::value_dim; ++c)
                right = right && (bad[row] && sees ? got[at + c] != got[at + c]
                                                   : got[at + c].bits == want[at + c].bits);
            CHECK(right, "%s: row %zu, %s", name, row, bad[row] ? "not finite" : "beside rows that are not");
            if (bad[row] && sees)
                CHECK(got_lse[row] != got_lse[row], "%s: lse of row %zu is a number", name, row);
        }
    }
    const auto again = run(q);
    CHECK(std::memcmp(want.data(), again.data(), want.size() * 2) == 0, "%s: queries left something behind",
          name);
    std::printf("  queries that are not finite, %s\n", name);
}

void check_bad_queries() {
    check_bad_queries<quantized>("kivi4");
    check_bad_queries<window>("fp16");
#ifdef __CUDACC__  // emulated, formats that other checks compile
    check_bad_queries<cuda::block_pair<int8, int8, 128, 16>>("int8, page 16");
#endif
    check_bad_queries<cuda::preset_pair<low2, 128>>("low2");
    check_bad_queries<cuda::block_pair<full<float>, affine<4, per_token<20>>, 100, 24>>("any shape");
}

/// Lets its successor begin, waits, and only then writes lengths and block table.
__global__ void write_late(int* lengths, const int* new_lengths, int n, int* table, const int* new_table,
                           int entries) {
    cuda::detail::launch_dependents();
    const long long begin = clock64();
    while (clock64() - begin < 60000) {
    }
    for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x))
        lengths[i] = new_lengths[i];
    for (int i = static_cast<int>(threadIdx.x); i < entries; i += static_cast<int>(blockDim.x))
        table[i] = new_table[i];
}

/// What a launch finds out while the previous one runs holds only if that one does not change it.
void check_late_lengths() {
    test::rng r(8);
    constexpr int n = 5, longest = test::many(3000);
    const test::quantized_batch<quantized> batch(r, kv_heads, std::vector<int>(n, longest));
    test::device_batch<quantized> device(batch);
    std::vector<float16> q(static_cast<std::size_t>(n * q_heads * dim));
    for (float16& x : q) x = float16(test::normal(r));
    const test::device_buffer<float16> q_device(q);
    test::device_buffer<float16> out(q.size());
    const std::size_t bytes = cuda::attend_workspace_bytes<quantized, float16>(group);
    test::device_buffer<std::byte> workspace(bytes);
    workspace.clear();
    const auto attend = [&] {
        CHECK((cuda::attend<quantized, float16>(device.ref, {q_device.get(), n, q_heads, dim},
                                                {out.get(), n, q_heads, dim}, {}, workspace.get(), bytes,
                                                nullptr)),
              "attend");
    };
    std::vector<int> other_table = batch.table;
    std::reverse(other_table.begin(), other_table.end());
    const std::vector<std::vector<int>> lengths = {
        std::vector<int>(n, test::many(1000)),
        std::vector<int>(n, test::many(1000) + 1),  // as many warp tiles
        std::vector<int>(n, longest),
        {1, 64, test::many(2000), 0, 65},
        {2, 64, test::many(2000) - 1, 1, 70}};
    int differ = 0;
    for (const auto& before : lengths)
        for (const auto& after : lengths)
            for (const bool new_table : {false, true}) {
                const test::device_buffer<int> next_lengths(after);
                const test::device_buffer<int> next_table(batch.table);
                device.lengths.upload(after);
                device.table.upload(batch.table);
                out.poison();
                attend();
                CUDA_OK(cudaDeviceSynchronize());
                const auto want = out.download();
                device.lengths.upload(before);
                device.table.upload(new_table ? other_table : batch.table);
                out.poison();
                attend();
                CUDA_OK(cudaDeviceSynchronize());
                const auto stale = out.download();
                differ += std::memcmp(want.data(), stale.data(), want.size() * 2) != 0;
                out.poison();
                CUDA_OK(cudaDeviceSynchronize());
                CHECK(cuda::detail::launch("write_late", cuda::detail::overlap::no, write_late, dim3(1), 128,
                                           0, nullptr, device.lengths.get(), next_lengths.get(), n,
                                           device.table.get(), next_table.get(),
                                           static_cast<int>(batch.table.size())),
                      "write_late");
                attend();
                CUDA_OK(cudaDeviceSynchronize());
                CHECK(std::memcmp(want.data(), out.download().data(), want.size() * 2) == 0,
                      "lengths that begin with %d become ones that begin with %d", before[0], after[0]);
            }
    CHECK(differ >= 40, "old lengths and tables hardly matter: %d of 50", differ);
    std::printf("  late lengths\n");
}

void check_errors() {
    test::device_buffer<std::byte> memory(1 << 16);
    test::device_buffer<int> numbers(16);
    cuda::cache_ref<quantized> c;
    c.kv_heads = 2;
    float16* const x = reinterpret_cast<float16*>(memory.get());
    const auto refused = [&](const cuda::cache_ref<quantized>& cache, int heads, int d, std::size_t bytes,
                             const char* words) {
        const auto s = cuda::attend<quantized, float16>(cache, {x, 1, heads, d}, {x, 1, heads, d}, {},
                                                        memory.get(), bytes, nullptr);
        CHECK(s.code == cudaErrorInvalidValue && std::strstr(s.message, words), "expected '%s', got '%s'",
              words, s.message);
        CHECK(cudaGetLastError() == cudaSuccess, "a refused call must not leave an error behind");
    };
    refused(c, 8, 128, 0, "null pointer");
    c.key_pages = c.value_pages = memory.get();
    refused(c, 8, 128, 0, "smaller than");
    c.key_page_bytes = c.value_page_bytes = 1 << 14;
    c.tokens = c.block_table = numbers.get();
    c.sequences = 1;
    refused(c, 8, 128, 0, "table columns");
    c.table_columns = 4;
    refused(c, 7, 128, 0, "7 heads");
    refused(c, 8, 64, 0, "head_dim 64");
    refused(c, 8, 128, 16, "workspace of");
    c.table_columns = 2147483647;
    refused(c, 8, 128, 0, "2^28");
    c.table_columns = 4;
    c.first_token = 2147483647;
    refused(c, 8, 128, 0, "first_token");
    c.first_token = 0;
    const auto refused_options = [&](int sequences, int tokens, const cuda::attention_options& o,
                                     const void* space, const char* words) {
        auto other = c;
        other.sequences = sequences;
        const auto s = cuda::attend<quantized, float16>(other, {x, tokens, 8, dim}, {x, tokens, 8, dim}, o,
                                                        const_cast<void*>(space), 1 << 16, nullptr);
        CHECK(s.code == cudaErrorInvalidValue && std::strstr(s.message, words), "expected '%s', got '%s'",
              words, s.message);
    };
    refused_options(65536, 0, {.query_tokens = 65536}, memory.get(), "are 4294967296");
    refused_options(1, 1 << 30, {.query_tokens = 1 << 30}, memory.get(), "8589934592 query rows");
    const auto many_rows =
        cuda::attend<quantized, float16>(c, {x, 1 << 20, 128, dim}, {x, 1 << 20, 128, dim},
                                         {.query_tokens = 1 << 20}, memory.get(), 1 << 16, nullptr);
    CHECK(many_rows.code == cudaErrorInvalidValue &&
              std::strstr(many_rows.message, "1048576 query tokens are too many"),
          "got '%s'", many_rows.message);
    refused_options(1, 1, {.softcap = INFINITY}, memory.get(), "softcap");
    refused_options(1, 1, {.scale = NAN}, memory.get(), "scale is nan");
    refused_options(1, 1, {}, memory.get() + 8, "workspace must start on 16 bytes");
    c.table_columns = 1 << 20;
    refused_options(4096, 4096, {}, memory.get(), "warp tiles of");
    c.table_columns = 4;
    // Nothing to do is no error, whatever has no memory then.
    auto none = c;
    none.sequences = none.table_columns = 0;
    none.tokens = none.block_table = nullptr;
    CHECK((cuda::attend<quantized, float16>(none, {nullptr, 0, 8, dim}, {nullptr, 0, 8, dim}, {}, nullptr, 0,
                                            nullptr)),
          "no sequences");
    c.key_pages += 4;
    refused(c, 8, 128, 0, "16 bytes");
    c.key_pages -= 4;

    // What others have left behind is not taken for an error of the launch.
    const std::size_t bytes = cuda::attend_workspace_bytes<quantized, float16>(4);
    test::device_buffer<std::byte> workspace(bytes);
    workspace.clear();
    void* none_left = nullptr;
    CHECK(cudaMalloc(&none_left, std::size_t{1} << 60) != cudaSuccess, "so much memory");
    CHECK(cudaPeekAtLastError() != cudaSuccess, "the error is not kept");
    const auto s = cuda::attend<quantized, float16>(c, {x, 1, 8, 128}, {x, 1, 8, 128}, {}, workspace.get(),
                                                    bytes, nullptr);
    CHECK(s, "an older error is reported as '%s'", s.message);
    (void)cudaGetLastError();
    CUDA_OK(cudaDeviceSynchronize());
    std::printf("  errors\n");
}

}  // namespace

/// So many sequences that thread blocks of any device are split into teams: of different lengths, of one
/// length, and with a sequence that is much longer than others, for which they are not.
template <class Format>
void check_many(const char* name) {
    test::rng r(17);
    std::vector<int> ragged(test::many(80)), even(test::many(80), 130);
    for (int& length : ragged) length = std::uniform_int_distribution<int>(0, 300)(r);
    std::vector<int> long_one = ragged;
    long_one[11] = 4000;
    for (const int heads_of_group : {4, 8, 16})
        for (const auto& lengths : {ragged, even, long_one})
            test::check_attention<Format, float16>(
                r, {.kv_heads = 8, .group = heads_of_group, .lengths = lengths}, name);
}

int main() {
#ifdef __CUDACC__  // emulated, one format
    check_many<cuda::block_pair<int8, int8, 64, 32>>("many sequences, int8");
#endif
    check_many<cuda::kivi_pair<4, 64, 64, 64>>("many sequences, kivi4");
    check_mixed();
    check_repeatable();
    check_early();
    check_late_lengths();
    check_endless_window();
    check_bad_queries();
    check_side_by_side();
    check_errors();
    return test::report("attention_features");
}
