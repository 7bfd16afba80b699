// The index cache and the selection of tokens: bytes against the CPU's encoder, scores against double
// arithmetic, positions against sorting; refusals. Estimates of scores, by which pages are selected: the
// CPU's (whole selections: cache.cu).
#include <kvq/cuda/select/best_pages.cuh>
#include <kvq/cuda/select/index_scores.cuh>
#include <kvq/cuda/select/score_estimate.cuh>
#include <kvq/cuda/select/select_top.cuh>
#include <kvq/cuda/store/store.cuh>
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/presets.hpp>

#include "support.cuh"

using namespace kvq;

namespace {

struct index_case {
    int heads = 64, query_tokens = 1;
    std::vector<int> lengths;
    bool holes = false, spoiled = false;
};

/// Scores of random keys, stored in random order.
template <class T, int Channels, int Page, class Scheme = int8>
void check_scores(test::rng& r, const index_case& c) {
    using pair = cuda::index_pair<Channels, Page, Scheme>;
    constexpr bool floats = !std::is_same_v<Scheme, int8>;
    int columns = 1, pages = 2;
    for (const int n : c.lengths) {
        columns = std::max(columns, (n + Page - 1) / Page);
        pages += (n + Page - 1) / Page;
    }
    const auto room = static_cast<std::size_t>(columns * Page);
    std::vector<int> order(static_cast<std::size_t>(pages)),
        table(c.lengths.size() * static_cast<std::size_t>(columns), -1);
    for (int i = 0; i < pages; ++i) order[static_cast<std::size_t>(i)] = i;
    std::shuffle(order.begin(), order.end(), r);

    std::vector<T> keys;
    std::vector<long long> mapping;
    std::vector<std::byte> want(static_cast<std::size_t>(pages) * pair::key_block_bytes, std::byte{0xff});
    std::vector<std::vector<float>> dequantized(c.lengths.size());
    constexpr block_shape shape{tensor::key, Page, Channels};
    std::size_t next = 0;
    for (std::size_t b = 0; b < c.lengths.size(); ++b) {
        const int n = c.lengths[b];
        for (int first = 0; first < n; first += Page) {
            const int number = order[next++], used = std::min(Page, n - first);
            std::vector<float> x = test::tensor_values(r, Page, Channels);
            if (c.spoiled) x[static_cast<std::size_t>(Channels) + 3] = NAN, x[5] = INFINITY;
            for (float& y : x) y = static_cast<float>(T(y));
            for (int i = 0; i < used; ++i) {
                mapping.push_back(1LL * number * Page + i);
                for (int ch = 0; ch < Channels; ++ch)
                    keys.push_back(T(x[static_cast<std::size_t>(i * Channels + ch)]));
            }
            std::byte* const block = &want[static_cast<std::size_t>(number) * pair::key_block_bytes];
            Scheme{}.quantize(shape, {0, 0}, x.data(), block);
            Scheme{}.dequantize(shape, {0, 0}, block, x.data());
            dequantized[b].insert(dequantized[b].end(), x.begin(), x.begin() + used * Channels);
            // What no token has stays as it was.
            if constexpr (!floats) test::poison_tokens<int8>(shape, block, used);
            for (int t = used; t < Page; ++t) {
                for (int ch = 0; ch < Channels; ++ch)
                    block[floats ? t * Channels + ch
                                 : t / 32 * 32 * Channels + ch / 4 * 128 + t % 32 * 4 + ch % 4] =
                        std::byte{0xff};
                for (int i = 0; floats && i < 4; ++i) block[Page * Channels + 4 * t + i] = std::byte{0xff};
            }
            if (!c.holes || first == 0 || first + Page >= n)
                table[b * static_cast<std::size_t>(columns) + static_cast<std::size_t>(first / Page)] =
                    number;
        }
    }
    // Tokens in any order, between two of which one is skipped.
    std::vector<std::size_t> turn(mapping.size());
    for (std::size_t i = 0; i < turn.size(); ++i) turn[i] = i;
    std::shuffle(turn.begin(), turn.end(), r);
    std::vector<T> mixed(keys.size() + Channels);
    std::vector<long long> places(mapping.size() + 1, -1);
    for (std::size_t i = 0; i < turn.size(); ++i) {
        const std::size_t at = i < turn.size() / 2 ? i : i + 1;
        places[at] = mapping[turn[i]];
        std::copy_n(&keys[turn[i] * Channels], Channels, &mixed[at * Channels]);
    }

    test::device_buffer<std::byte> memory(want.size());
    const test::device_buffer<int> table_device(table);
    test::device_buffer<int> lengths(c.lengths);
    const test::device_buffer<T> keys_device(mixed);
    const test::device_buffer<long long> places_device(places);
    test::device_buffer<unsigned> not_finite(1);
    not_finite.clear();
    cuda::cache_ref<pair> index;
    index.key_pages = memory.get();
    index.key_page_bytes = pair::key_block_bytes;
    index.block_table = table_device.get();
    index.tokens = lengths.get();
    index.sequences = static_cast<int>(c.lengths.size());
    index.table_columns = columns;
    index.kv_heads = 1;
    const token_view<const T> new_keys(keys_device.get(), static_cast<int>(places.size()), 1, Channels);
    cuda::status s = cuda::store(index, new_keys, token_view<const T>(nullptr, 0, 1, Channels),
                                 places_device.get(), not_finite.get(), nullptr);
    CHECK(s, "store: %s", s.message);
    CHECK(memory.download() == want, "bytes of an index of %d channels differ from the CPU's", Channels);
    const unsigned bad = not_finite.download()[0];
    CHECK((bad > 0) == (c.spoiled && !keys.empty()), "%u numbers are not finite", bad);

    const int rows = index.sequences * c.query_tokens;
    std::vector<T> q(static_cast<std::size_t>(rows * c.heads * Channels));
    std::vector<float> weights(static_cast<std::size_t>(rows * c.heads));
    for (T& x : q) x = T(test::normal(r));
    for (float& w : weights) w = test::normal(r);
    if (c.spoiled) q[7] = T(NAN);
    const test::device_buffer<T> q_device(q);
    const test::device_buffer<float> weights_device(weights);
    constexpr std::size_t behind = 64;
    test::device_buffer<float> scores(static_cast<std::size_t>(rows) * room + behind);
    s = cuda::index_scores<pair, T>(index, {q_device.get(), rows, c.heads, Channels}, weights_device.get(),
                                    c.query_tokens, scores.get(), nullptr);
    CHECK(s, "index_scores: %s", s.message);
    const std::vector<float> have = scores.download();
    double off = 0.0, size = 0.0;
    for (int row = 0; row < rows; ++row) {
        const auto b = static_cast<std::size_t>(row / c.query_tokens);
        const int seen = c.lengths[b] - c.query_tokens + row % c.query_tokens + 1;
        for (int t = 0; t < static_cast<int>(room); ++t) {
            const float score = have[static_cast<std::size_t>(row) * room + static_cast<std::size_t>(t)];
            if (t >= seen) {
                CHECK(score != score, "score %d of %d is written", t, seen);
                continue;
            }
            if (table[b * static_cast<std::size_t>(columns) + static_cast<std::size_t>(t / Page)] < 0) {
                CHECK(score == -INFINITY, "a token that is not held has score %g",
                      static_cast<double>(score));
                continue;
            }
            double exact = 0.0, rounded = 0.0, terms = 0.0;
            bool broken = false;
            for (int h = 0; h < c.heads; ++h) {
                const T* const head = &q[static_cast<std::size_t>((row * c.heads + h) * Channels)];
                float top = 0.0f;
                for (int ch = 0; ch < Channels; ++ch)
                    top = std::max(top, std::abs(static_cast<float>(head[ch])));
                double with = 0.0, plain = 0.0, sizes = 0.0;
                const float unit = top > 0.0f ? std::exp2(std::floor(std::log2(top))) : 1.0f;
                for (int ch = 0; ch < Channels; ++ch) {
                    const auto k =
                        static_cast<double>(dequantized[b][static_cast<std::size_t>(t * Channels + ch)]);
                    const float x = static_cast<float>(head[ch]);
                    broken = broken || x != x;
                    with +=
                        k * static_cast<double>(floats ? static_cast<float>(float16(x / unit)) * unit
                                                       : std::nearbyint(x * (127.0f / top)) * (top / 127.0f));
                    sizes += std::abs(k * static_cast<double>(x));
                    plain += k * static_cast<double>(x);
                }
                const auto w = static_cast<double>(weights[static_cast<std::size_t>(row * c.heads + h)]);
                rounded += w * std::max(with, 0.0);
                exact += w * std::max(plain, 0.0);
                terms += std::abs(w) * (floats ? sizes : std::abs(with));
            }
            if (broken) {
                CHECK(score != score, "a query with NaN has score %g", static_cast<double>(score));
                continue;
            }
            const auto have_score = static_cast<double>(score);
            CHECK(std::abs(have_score - rounded) <= 3e-6 * terms + 1e-30, "score %g, %g expected", have_score,
                  rounded);
            off += (have_score - exact) * (have_score - exact);
            size += exact * exact;
        }
    }
    // Lengths beyond the table count as all that it names.
    std::vector<int> longer = c.lengths;
    longer.back() += static_cast<int>(room) + 1000;
    lengths.upload(longer);
    s = cuda::index_scores<pair, T>(index, {q_device.get(), rows, c.heads, Channels}, weights_device.get(),
                                    c.query_tokens, scores.get(), nullptr);
    CHECK(s, "index_scores: %s", s.message);
    const std::vector<float> now = scores.download();
    for (std::size_t i = now.size() - behind; i < now.size(); ++i)
        CHECK(std::memcmp(&now[i], &have[i], sizeof(float)) == 0, "score %zu behind the last row is written",
              i + behind - now.size());
    if (size > 0.0)
        CHECK(std::sqrt(off / size) < (floats ? 1e-3 : 0.02), "rounded queries: scores are %g off",
              std::sqrt(off / size));
}

/// Positions of random scores, many of them equal.
void check_top(test::rng& r, const std::vector<int>& lengths, int room, int query_tokens, int count,
               int different) {
    const auto sequences = static_cast<int>(lengths.size());
    const auto rows = static_cast<std::size_t>(sequences * query_tokens);
    std::vector<float> scores(rows * static_cast<std::size_t>(room), NAN);
    const float odd[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e-40f, 3e38f};
    const auto seen = [&](std::size_t row) {
        const int query = static_cast<int>(row) % query_tokens;
        return std::max(0, lengths[row / static_cast<std::size_t>(query_tokens)] - query_tokens + query + 1);
    };
    for (std::size_t row = 0; row < rows; ++row)
        for (int t = 0; t < seen(row); ++t)
            scores[row * static_cast<std::size_t>(room) + static_cast<std::size_t>(t)] =
                test::uniform(r, 0, 99) == 0 ? odd[test::uniform(r, 0, 6)]
                : different > 0              ? static_cast<float>(test::uniform(r, 0, different))
                                             : test::normal(r);
    const test::device_buffer<float> scores_device(scores);
    const test::device_buffer<int> tokens(lengths);
    const cuda::row_scores from{scores_device.get(), tokens.get(), sequences, query_tokens, room};
    const std::size_t bytes = from.workspace_bytes(count);
    test::device_buffer<std::byte> workspace(bytes + 16);
    test::device_buffer<int> positions(rows * static_cast<std::size_t>(count));
    for (int run = 0; run < test::repeats(5); ++run) {
        positions.poison();
        const cuda::status s =
            cuda::select_top(from, count, positions.get(), workspace.get(), bytes, nullptr);
        CHECK(s, "select_top: %s", s.message);
        const std::vector<int> got = positions.download();
        for (std::size_t row = 0; row < rows; ++row) {
            const float* const own = &scores[row * static_cast<std::size_t>(room)];
            std::vector<int> want(static_cast<std::size_t>(seen(row)));
            for (std::size_t i = 0; i < want.size(); ++i) want[i] = static_cast<int>(i);
            std::stable_sort(want.begin(), want.end(), [&](int i, int j) {
                return own[i] == own[i] && (own[j] != own[j] || own[i] > own[j]);
            });
            want.resize(std::min(want.size(), static_cast<std::size_t>(count)));
            std::sort(want.begin(), want.end());
            want.resize(static_cast<std::size_t>(count), -1);
            CHECK(
                std::equal(want.begin(), want.end(), got.begin() + static_cast<std::ptrdiff_t>(row) * count),
                "the best %d of %d scores (%d different) are others", count, seen(row), different);
        }
    }
}

template <int = 0>
__global__ void take_kernel(const unsigned* keys, int count, int* out) {
    __shared__ cuda::detail::top_memory<> memory;
    cuda::detail::take_largest(memory, keys[threadIdx.x], count, [&](int at, int i) { out[at] = i; });
}

/// One key for each thread, most of them alike.
void check_take(test::rng& r) {
    for (const int different : {2, 30, 1 << 30})
        for (const int there : {0, 1, 31, 700, 1024}) {
            const int count = there == 31 ? 0 : test::uniform(r, 0, there);
            std::vector<unsigned> keys(1024, 0);
            std::vector<int> want;
            for (int i = 0; i < there; ++i) {
                keys[static_cast<std::size_t>(i)] = static_cast<unsigned>(test::uniform(r, 1, different))
                                                    << test::uniform(r, 0, 1);
                want.push_back(i);
            }
            std::stable_sort(want.begin(), want.end(), [&](int a, int b) {
                return keys[static_cast<std::size_t>(a)] > keys[static_cast<std::size_t>(b)];
            });
            want.resize(static_cast<std::size_t>(count));
            std::sort(want.begin(), want.end());
            want.resize(keys.size(), -1);  // nothing is written behind them
            const test::device_buffer<unsigned> on_device(keys);
            const test::device_buffer<int> places(std::vector<int>(keys.size(), -1));
            const unsigned* const from = on_device.get();
            int* const to = places.get();
            const cuda::status s =
                cuda::detail::launch("taking", cuda::detail::overlap::no, take_kernel<0>, dim3(1),
                                     cuda::detail::choice_threads, 0, nullptr, from, count, to);
            CHECK(s, "%s", s.message);
            CUDA_OK(cudaDeviceSynchronize());
            CHECK(places.download() == want, "the largest %d of %d keys (%d different) are others", count,
                  there, different);
        }
}

template <class Pair>
__global__ void estimate_kernel(const __grid_constant__ cuda::cache_ref<Pair> cache, const float* query,
                                int rows, float* out) {
    const cuda::detail::key_ranges<Pair> ranges(cache, 0, 0);
    ranges.estimate_block(cache.key_block(0, 0), query, rows, [&](int r, float x) {
        if (threadIdx.x < 4) out[r + static_cast<int>(threadIdx.x)] = x;
    });
    if constexpr (cuda::detail::range_products<Pair>::can) {
        using products = cuda::detail::range_products<Pair>;
        __shared__ typename products::query_rows of_query;
        of_query.store(cache, 0, 0, ranges, query, rows);
        __syncthreads();
        // One of eight blocks is there.
        const int lane = static_cast<int>(threadIdx.x), place = 8 + 2 * (lane % 4);
        const float2 x = products::estimate(lane / 4 == 5 ? cache.key_block(0, 0) : nullptr, of_query);
        if (lane / 4 != 5) return;
        out[place] = x.x;
        out[place + 1] = x.y;
    }
}

/// Queries are those behind the transform of the keys.
template <class Keys, int Dim, int Page>
void check_estimates(test::rng& r) {
    using pair = cuda::detail::read_pair<cuda::block_pair<Keys, std4::values, Dim, Page>>;
    constexpr block_shape shape{tensor::key, Page, Dim};
    const format f = make_format<Keys, scalar>();
    const format_functions& cpu = f.functions();
    test::device_buffer<std::byte> memory(pair::key_block_bytes);
    test::device_buffer<float> out(16);
    cuda::cache_ref<pair> cache;
    cache.key_pages = memory.get();
    cache.key_page_bytes = pair::key_block_bytes;
    cache.kv_heads = 1;
    for (const int rows : {1, 3, 4, 7}) {
        std::vector<float> x = test::tensor_values(r, Page, Dim), q(static_cast<std::size_t>(rows) * Dim);
        for (float& y : q) y = test::normal(r);
        std::vector<std::byte> block(pair::key_block_bytes);
        Keys{}.quantize(shape, {0, 0}, x.data(), block.data());
        memory.upload(block);
        const test::device_buffer<float> q_device(q);
        const float* const query = q_device.get();
        float* const to = out.get();
        const cuda::status s =
            cuda::detail::launch("estimating", cuda::detail::overlap::no, estimate_kernel<pair>, dim3(1), 32,
                                 0, nullptr, cache, query, rows, to);
        CHECK(s, "%s", s.message);
        CUDA_OK(cudaDeviceSynchronize());
        const std::vector<float> got = out.download();
        std::vector<float> want(static_cast<std::size_t>(rows)),
            scratch(cpu.estimate_floats(f.scheme(), shape));
        cpu.estimate_scores(f.scheme(), shape, {0, 0}, block.data(), q.data(), Dim, rows, 0, Page,
                            cuda::detail::page_spread, want.data(), 0, scratch.data());
        for (std::size_t i = 0; i < 8 + want.size(); ++i) {
            const bool product = i >= 8;
            if (product ? !cuda::detail::range_products<pair>::can : i >= want.size()) continue;
            const float wanted = want[i % 8];
            CHECK(std::abs(got[i] - wanted) <= 1e-4f * (1.0f + std::abs(wanted)),
                  "%s: the estimate of row %zu of %d is %g%s, the CPU's %g", f.name(), i % 8, rows,
                  static_cast<double>(got[i]), product ? " by products" : "", static_cast<double>(wanted));
        }
    }
}

void check_refusals() {
    using pair = cuda::index_pair<128, 64>;
    test::device_buffer<std::byte> memory(pair::key_block_bytes);
    test::device_buffer<int> numbers(4);
    test::device_buffer<float> floats(128 * 64);
    test::device_buffer<long long> mapping(4);
    cuda::cache_ref<pair> index;
    index.key_pages = memory.get();
    index.key_page_bytes = pair::key_block_bytes;
    index.block_table = index.tokens = numbers.get();
    index.sequences = index.table_columns = index.kv_heads = 1;
    const auto refused = [&](const char* words, const cuda::status& s) {
        CHECK(s.code == cudaErrorInvalidValue && std::strstr(s.message, words) != nullptr,
              "\"%s\" is not in \"%s\"", words, s.message);
    };
    const auto scores = [&](const cuda::cache_ref<pair>& c, int dim, int query_tokens = 1) {
        return cuda::index_scores<pair, float>(c, {floats.get(), 1, 64, dim}, floats.get(), query_tokens,
                                               floats.get(), nullptr);
    };
    refused("q is 1 x 64 x 64, the index has 1 sequences of 1 query tokens and 128 channels",
            scores(index, 64));
    refused("1 sequences of 2 query tokens", scores(index, 128, 2));
    cuda::cache_ref<pair> other = index;
    other.kv_heads = 2;
    refused("one kv head, the cache has 2", scores(other, 128));
    other = index;
    other.key_page_bytes -= 16;
    refused("page strides", scores(other, 128));
    other = index;
    other.tokens = nullptr;
    refused("lengths are null pointers", scores(other, 128));
    refused("k is 2 x 128",
            cuda::store(index, token_view<const float>(floats.get(), 1, 2, 128),
                        token_view<const float>(nullptr, 0, 1, 128), mapping.get(), nullptr, nullptr));
    const cuda::row_scores rows{floats.get(), numbers.get(), 1, 1, 40000};
    refused("workspace", cuda::select_top(rows, 100, numbers.get(), floats.get(), 1, nullptr));
    for (const int count : {-1, 0, 8193, 16384, 1 << 30}) {
        CHECK(rows.workspace_bytes(count) == 0, "%d tokens cannot be selected", count);
        refused("are to be selected, 1 to 8192",
                cuda::select_top(rows, count, numbers.get(), floats.get(), 0, nullptr));
    }
    refused("0 tokens are to be selected, 1 to 8192",
            cuda::select_top(rows, 0, numbers.get(), floats.get(), 1, nullptr));
}

}  // namespace

int main() {
    const unsigned seed = 60;
    std::printf("seed %u\n", seed);
    test::rng r(seed);
    check_refusals();
    check_scores<bfloat16, 128, 64>(r, {.lengths = {300, 0, 65, 3}});
    check_scores<float16, 128, 32>(r,
                                   {.heads = 5, .query_tokens = 3, .lengths = {100, 2, 70}, .holes = true});
    check_scores<float, 64, 96>(r, {.heads = 70, .lengths = {130}, .spoiled = true});
    check_scores<bfloat16, 128, 64, float_rows<e4m3>>(r, {.lengths = {300, 0, 65, 3}});
    check_scores<float, 64, 96, float_rows<e4m3>>(
        r, {.heads = 70, .query_tokens = 2, .lengths = {130, 2}, .holes = true, .spoiled = true});
    check_take(r);
    check_estimates<std4::keys, 128, 128>(r);
    check_estimates<std4_h::keys, 64, 128>(r);
    check_estimates<low3::keys, 128, 64>(r);
    check_estimates<hi6::keys, 80, 32>(r);
    check_estimates<affine<2, per_channel<32>, params<float16>>, 64, 96>(r);
    static_assert(cuda::detail::range_products<cuda::preset_pair<std4, 128>>::can &&
                  cuda::detail::range_products<cuda::preset_pair<low3, 128, 64>>::can &&
                  cuda::detail::range_products<cuda::kivi_pair<2, 32, 64, 96>>::can &&
                  !cuda::detail::range_products<cuda::preset_pair<hi6, 80, 32>>::can);
    check_top(r, {90, 0, 7, 2}, 128, 3, 20, 0);
    check_top(r, {2000, 1000, 33}, 2048, 1, 512, 9);
    check_top(r, {40000, 5, 17000}, 40960, 1, 700, 0);
#ifdef __CUDACC__
    check_scores<bfloat16, 128, 128>(r, {.query_tokens = 4, .lengths = {3000, 70, 1}});
    check_scores<bfloat16, 128, 64>(r, {.heads = 32, .lengths = std::vector<int>(100, 77)});
    check_scores<float16, 128, 64>(r, {.lengths = {20000, 10, 9000}, .holes = true});
    check_scores<float16, 128, 64, float_rows<e4m3>>(r, {.heads = 32, .lengths = {20000, 10, 9000}});
    check_top(r, {131072, 131072, 70000}, 131072, 1, 2048, 0);
    check_top(r, {131072, 40000, 16385}, 131072, 2, 2048, 3);
    check_top(r, {1000000, 12}, 1000000, 1, 2048, 100000);
    check_top(r, {5000}, 8192, 1, 8192, 2);
#endif
    return test::report("select");
}
