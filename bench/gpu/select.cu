// Models that select tokens, one step: scores of an index, the selection of 2048 tokens, attention over them,
// of latents and of keys and values.
//
//   select [--json] [--quick]
//
// 16 sequences of 131072 tokens, pages in random order: an index of 128 channels in one byte, int8 or e4m3,
// with 64 heads; 512 latent and 64 rotary channels, the values 512 of them. Lists are random, another one for
// every launch. "dense": attention over all tokens, in kivi-4-g64; factors are times the dense 4 bit of as
// many heads. Keys and values: 32 query heads over 8 of 128 channels, std4, beside attention over all of
// them. Pages that caches select: the same heads in std4, several layers in turns, 4096 tokens of random
// keys. In host memory: device memory for 32768 and 16384 tokens of each head; queries of neighbouring steps
// differ so much that the printed share of the chosen pages is there. "fetched ahead": fetch_ahead() of the
// next layer, by its own query, in another stream while a layer runs: the most that a guess of it can gain.
// Pages hold random numbers: times do not depend on them. GB/s: bytes of pages.
#include <kvq/cuda/decode/attend_lists.cuh>
#include <kvq/cuda/host/cache.hpp>
#include <kvq/cuda/host/make_device_format.cuh>
#include <kvq/cuda/latent/latent_lists.cuh>
#include <kvq/cuda/select/index_scores.cuh>
#include <kvq/cuda/select/select_top.cuh>
#include <kvq/schemes/presets.hpp>

#include <cmath>
#include <cstring>
#include <string>

#include "shuffled_pages.cuh"

namespace {

using namespace kvq;
using bench::on_device;

constexpr int sequences = 16, length = 131072, selected = 2048, latent = 512, rotary = 64,
              dim = latent + rotary, value_dim = 512, index_heads = 64, launches = 4;

bool json = false;
void print(const std::string& name, double us, double factor, double gb = 0.0) {
    if (json)
        std::printf("{\"name\": \"select/%s\", \"us\": %.1f, \"factor\": %.2f, \"GB/s\": %.0f}\n",
                    name.c_str(), us, factor, gb);
    else
        std::printf("%-44s %9.1f us  x %-7.2f %5.0f GB/s\n", name.c_str(), us, factor, gb);
    std::fflush(stdout);
}

template <class Scheme, int PageTokens>
using pair = cuda::latent_pair<Scheme, latent, rotary, value_dim, PageTokens>;
using index_pair = cuda::index_pair<128, 64>;
using float_index_pair = cuda::index_pair<128, 64, float_rows<e4m3>>;

/// What every step has.
struct step_memory {
    int* tokens = bench::on_device(std::vector<int>(sequences, length));
    bfloat16* q = on_device<bfloat16>(std::size_t{1} * sequences * 128 * dim);
    bfloat16* out = on_device<bfloat16>(std::size_t{1} * sequences * 128 * value_dim);
    std::byte* workspace = on_device<std::byte>(std::size_t{1} << 28);
    bfloat16* index_q = on_device<bfloat16>(sequences * index_heads * 128);
    float* weights = on_device<float>(sequences * index_heads);
    float* scores = on_device<float>(std::size_t{1} * sequences * length);
    int* positions = on_device<int>(sequences * selected);
    int* lists[launches];

    step_memory() {
        bench::fill_normal(q, std::size_t{1} * sequences * 128 * dim * 2, 1);
        bench::fill_normal(index_q, sequences * index_heads * 128 * 2, 2);
        std::mt19937 r(7);
        std::normal_distribution<float> normal;
        std::vector<float> numbers(sequences * index_heads);
        for (float& x : numbers) x = normal(r);
        BENCH_OK(cudaMemcpy(weights, numbers.data(), numbers.size() * 4, cudaMemcpyHostToDevice));
        for (int*& list : lists) {
            std::vector<int> all, own(length);
            std::iota(own.begin(), own.end(), 0);
            for (int b = 0; b < sequences; ++b) {
                std::shuffle(own.begin(), own.end(), r);
                std::sort(own.begin(), own.begin() + selected);
                all.insert(all.end(), own.begin(), own.begin() + selected);
            }
            list = bench::on_device(all);
        }
    }
};

template <class Pair>
double time_dense(const step_memory& m, int heads) {
    const bench::shuffled_pages<Pair> pages(sequences, length, m.tokens);
    const auto mix = cuda::make_mixed(0, pages.ref);
    return bench::time_launches(
        2,
        [&](int, cudaStream_t stream) {
            bench::check(cuda::attend_latents<bfloat16>(mix, {m.q, sequences, heads, dim},
                                                        {m.out, sequences, heads, value_dim}, {}, m.workspace,
                                                        std::size_t{1} << 28, stream));
        },
        5);
}

template <class Index>
void score(const step_memory& m, const bench::shuffled_pages<Index>& index, cudaStream_t stream) {
    bench::check(cuda::index_scores<Index, bfloat16>(index.ref, {m.index_q, sequences, index_heads, 128},
                                                     m.weights, 1, m.scores, stream));
}
template <class Index>
void time_scores(const char* name, const step_memory& m, const bench::shuffled_pages<Index>& index,
                 double dense) {
    const double us =
        bench::time_launches(launches, [&](int, cudaStream_t stream) { score(m, index, stream); });
    print(name, us, dense / us, 1e-3 * sequences * length * 132.0 / us);
}

template <class Pair>
void time_lists(const char* name, const step_memory& m, const bench::shuffled_pages<index_pair>& index,
                const bench::shuffled_pages<float_index_pair>& floats, const double (&dense)[2]) {
    const bench::shuffled_pages<Pair> pages(sequences, length, m.tokens);
    const auto mix = cuda::make_mixed(0, pages.ref);
    const cuda::row_scores rows{m.scores, m.tokens, sequences, 1, length};
    const auto attend = [&](int heads, const int* list, cudaStream_t stream) {
        bench::check(cuda::attend_latent_lists<bfloat16>(
            mix, {m.q, sequences, heads, dim}, {m.out, sequences, heads, value_dim},
            {.selected = {list, selected}}, m.workspace, std::size_t{1} << 28, stream));
    };
    for (const int heads : {16, 128}) {
        const double base = dense[heads == 16 ? 0 : 1];
        const double us = bench::time_launches(
            launches, [&](int i, cudaStream_t stream) { attend(heads, m.lists[i], stream); });
        print(name + (", " + std::to_string(heads) + " heads, given lists"), us, base / us);
        const auto time_all = [&](const auto& own, const char* words) {
            const double all = bench::time_launches(launches, [&](int, cudaStream_t stream) {
                score(m, own, stream);
                bench::check(
                    cuda::select_top(rows, selected, m.positions, m.workspace, std::size_t{1} << 28, stream));
                attend(heads, m.positions, stream);
            });
            print(name + (", " + std::to_string(heads) + words), all, base / all);
        };
        time_all(index, " heads, with the index");
        time_all(floats, " heads, e4m3");
    }
}

/// Layers with keys and values.
void time_values(const step_memory& m) {
    using format = cuda::preset_pair<std4, 128>;
    constexpr int heads = 32, kv_heads = 8;
    const bench::shuffled_pages<format> pages(sequences, length, m.tokens, kv_heads);
    const kvq::token_view<const bfloat16> q(m.q, sequences, heads, 128);
    const kvq::token_view<bfloat16> out(m.out, sequences, heads, 128);
    const std::size_t bytes = cuda::attend_workspace_bytes<format, bfloat16>(heads / kv_heads, 1);
    auto* const zeros = on_device<std::byte>(bytes);
    BENCH_OK(cudaMemset(zeros, 0, bytes));
    const double dense = bench::time_launches(launches, [&](int, cudaStream_t stream) {
        bench::check(cuda::attend(pages.ref, q, out, cuda::attention_options{}, zeros, bytes, stream));
    });
    const double token_bytes = static_cast<double>(kv_heads) / format::page_tokens *
                               static_cast<double>(format::key_block_bytes + format::value_block_bytes);
    print("std4, 32/8 heads, dense", dense, 1.0, 1e-3 * sequences * length * token_bytes / dense);
    const double us = bench::time_launches(launches, [&](int i, cudaStream_t stream) {
        bench::check(cuda::attend_lists<bfloat16>(cuda::make_mixed(0, pages.ref), q, out,
                                                  {.selected = {m.lists[i], selected}}, m.workspace,
                                                  std::size_t{1} << 28, stream));
    });
    print("std4, 32/8 heads, given lists", us, dense / us);
    cudaFree(zeros);
}

/// Caches that select pages. resident: tokens of each head in device memory, of pages in host memory; 0: all.
/// dense: microseconds over all pages, or 0 before they are known.
void time_pages(const cuda::device_format& compiled, int batch, int resident, double& dense) {
    constexpr int heads = 32, kv_heads = 8, channels = 128, most = 4096, chunk = 16384, steps = 32;
    const int layers = resident > 0 || batch > 1 ? 4 : 8;
    cudaStream_t stream;
    BENCH_OK(cudaStreamCreate(&stream));
    cuda::cache cache;
    bench::check(cache.open({.layers = layers, .kv_heads = kv_heads, .head_dim = channels},
                            {.formats = {"std4"},
                             .sinks = 4,
                             .recent = 128,
                             .max_batch = batch,
                             .max_tokens = length,
                             .cut_pages = 0,
                             .query_heads = heads,
                             .listed_tokens = most,
                             .resident_tokens = resident,
                             .pool_tokens = batch * length,
                             .pool_sequences = batch + 1,
                             .growing = false},
                            std::span(&compiled, 1), stream));
    constexpr std::size_t values = std::size_t{chunk} * kv_heads * channels;
    auto* const k = on_device<float16>(values);
    auto* const v = on_device<float16>(values);
    std::vector<cuda::sequence_id> ids;
    unsigned seed = 1;
    for (int b = 0; b < batch; ++b) {
        ids.push_back(cache.new_sequence());
        for (int done = 0; done < length; done += chunk) {
            bench::fill_normal(k, 2 * values, ++seed);
            bench::fill_normal(v, 2 * values, ++seed);
            bench::check(cache.begin_prompt(ids.back(), chunk, stream));
            for (int l = 0; l < layers; ++l)
                bench::check(cache.append(l, token_view<const float16>(k, chunk, kv_heads, channels),
                                          token_view<const float16>(v, chunk, kv_heads, channels), stream));
            BENCH_OK(cudaStreamSynchronize(stream));
        }
    }
    bench::check(cache.begin_step(ids, 0, stream));
    const std::size_t row = static_cast<std::size_t>(batch) * heads * channels;
    auto* const q = on_device<float16>(steps * row);
    auto* const out = on_device<float16>(row);
    cudaStream_t other;
    cudaEvent_t begun, fetched;
    BENCH_OK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    for (cudaEvent_t* const e : {&begun, &fetched})
        BENCH_OK(cudaEventCreateWithFlags(e, cudaEventDisableTiming));
    const auto query = [&](int i) {
        return token_view<const float16>(q + static_cast<std::size_t>(i / layers % steps) * row, batch, heads,
                                         channels);
    };
    // ahead: pages of the next layer are fetched while a layer runs.
    const auto time = [&](int tokens, bool ahead = false) {
        return bench::time_launches(
            steps * layers,
            [&](int i, cudaStream_t s) {
                if (ahead) {
                    if (i > 0) BENCH_OK(cudaStreamWaitEvent(s, fetched));
                    BENCH_OK(cudaEventRecord(begun, s));
                    BENCH_OK(cudaStreamWaitEvent(other, begun));
                    bench::check(cache.fetch_ahead((i + 1) % layers, query(i + 1), tokens, other));
                    BENCH_OK(cudaEventRecord(fetched, other));
                }
                bench::check(cache.attend(i % layers, query(i),
                                          token_view<float16>(out, batch, heads, channels),
                                          {.selected_tokens = tokens}, s));
                if (ahead && (i == 0 || i == steps * layers - 1)) BENCH_OK(cudaStreamWaitEvent(s, fetched));
            },
            5);
    };
    std::mt19937 r(3);
    std::normal_distribution<float> normal;
    const std::string name = std::to_string(batch) + " x 131072, ";
    for (const float change : {0.03f, 0.1f, 0.3f}) {
        std::vector<float> x(row);
        std::vector<float16> all;
        for (float& y : x) y = normal(r);
        for (int t = 0; t < steps; ++t)
            for (float& y : x) {
                y = std::sqrt(1.0f - change * change) * y + change * normal(r);
                all.push_back(float16(y));
            }
        BENCH_OK(cudaMemcpy(q, all.data(), all.size() * sizeof(float16), cudaMemcpyHostToDevice));
        if (resident == 0) {
            dense = time(0);
            print(name + "std4 dense", dense, 1.0);
            const double us = time(most);
            print(name + "4096 selected", us, dense / us);
            break;
        }
        cuda::fetch_report before, after;
        bench::check(cache.fetches(0, before, stream));
        const double us = time(most);
        bench::check(cache.fetches(0, after, stream));
        const double hits = 100.0 - 100.0 * static_cast<double>(after.fetched - before.fetched) /
                                        static_cast<double>(after.read - before.read);
        print(name + "4096 of the host, " + std::to_string(resident) + " held, hits " +
                  std::to_string(static_cast<int>(std::lround(hits))) + " %",
              us, dense / us);
        const double ahead = time(most, true);
        print(name + "the same, fetched ahead", ahead, dense / ahead);
    }
    for (const cudaEvent_t e : {begun, fetched}) BENCH_OK(cudaEventDestroy(e));
    BENCH_OK(cudaStreamDestroy(other));
    for (void* p :
         {static_cast<void*>(k), static_cast<void*>(v), static_cast<void*>(q), static_cast<void*>(out)})
        BENCH_OK(cudaFree(p));
}

}  // namespace

int main(int argc, char** argv) {
    bool quick = false;
    for (int i = 1; i < argc; ++i) {
        json = json || std::strcmp(argv[i], "--json") == 0;
        quick = quick || std::strcmp(argv[i], "--quick") == 0;
    }
    const step_memory m;
    const double dense[2] = {time_dense<pair<typename kivi<4, 64>::keys, 64>>(m, 16),
                             time_dense<pair<typename kivi<4, 64>::keys, 64>>(m, 128)};
    print("dense kivi-4-g64, 16 heads", dense[0], 1.0, 1e-3 * sequences * length * 416.0 / dense[0]);
    print("dense kivi-4-g64, 128 heads", dense[1], 1.0, 1e-3 * sequences * length * 416.0 / dense[1]);
    const bench::shuffled_pages<index_pair> index(sequences, length, m.tokens);
    const cuda::row_scores rows{m.scores, m.tokens, sequences, 1, length};
    const bench::shuffled_pages<float_index_pair> floats(sequences, length, m.tokens);
    time_scores("scores of the index, 64 heads", m, index, dense[0]);
    time_scores("scores of the index, 64 heads, e4m3", m, floats, dense[0]);
    const double top = bench::time_launches(launches, [&](int, cudaStream_t stream) {
        bench::check(
            cuda::select_top(rows, selected, m.positions, m.workspace, std::size_t{1} << 28, stream));
    });
    print("2048 of 131072", top, dense[0] / top);
    using affine4 = affine<4, per_token<128>>;
    time_lists<pair<affine4, 64>>("affine-4-g128, pages of 64", m, index, floats, dense);
    time_lists<pair<affine4, 4>>("affine-4-g128, pages of 4", m, index, floats, dense);
    time_lists<pair<records_of<record_layout_number("mla-656")>, 64>>("mla-656, pages of 64", m, index,
                                                                      floats, dense);
    time_values(m);
    const cuda::device_format compiled = cuda::make_device_format<float16, cuda::preset_pair<std4, 128>>();
    double all = 0.0;
    for (const int batch : {4, 1}) time_pages(compiled, batch, 0, all);
    for (const int resident : {32768, 16384}) time_pages(compiled, 1, resident, all);
    if (quick) return 0;
    time_lists<pair<int8, 64>>("int8, pages of 64", m, index, floats, dense);
    time_lists<pair<int8, 4>>("int8, pages of 4", m, index, floats, dense);
    time_lists<pair<full<bfloat16>, 64>>("bf16, pages of 64", m, index, floats, dense);
}
