// A prompt's attention over pages of several formats and over its own tokens, against double arithmetic on
// the dequantized values; and the same bits for every sequence of a batch alone, and on every run.
#if !defined(__CUDACC__) && \
    (!defined(PART) || PART == 0 || PART == 5)  // emulated; otherwise nvcc lists what it compiles for
#define __CUDA_ARCH_LIST__ 800, 890
#endif
#include <kvq/cuda/prefill/prefill.cuh>
#include <kvq/page/key_window.hpp>
#include <string_view>

#include "support.cuh"

using namespace kvq;

namespace {

#ifdef __CUDACC__
constexpr int repeats = 3, random_cases = 8;
[[maybe_unused]] constexpr bool few = false;  // parts differ in what they check
#else
constexpr int repeats = 0, random_cases = 1;
constexpr bool few = true;  // cases, where another format is checked with all of them
#endif

struct prefill_case {
    int kv_heads = 2, group = 4, window = 0;
    bool keep_sinks = false, logits = false, holes = false, chunked = false;
    float softcap = 0.0f, key_size = 1.0f;  // of quantized keys
    int sinks = 4, recent = 128;
    std::vector<int> lengths;     // before the new tokens, sinks included
    std::vector<int> new_tokens;  // of every sequence
};

template <class Format>
bool held(const test::quantized_batch<Format>& b, std::size_t sequence, int token) {
    return b.table[sequence * static_cast<std::size_t>(b.columns) +
                   static_cast<std::size_t>(token / Format::page_tokens)] >= 0;
}

/// A score modifier: slopes of heads, some keys hidden, a logit for each sum.
struct own_score {
    KVQ_HD float score(float s, int head, int query, int key) const {
        return key % 7 == 3 && query % 2 == 0
                   ? -INFINITY
                   : s - 0.01f * static_cast<float>(head + 1) * static_cast<float>(query - key);
    }
    KVQ_HD float sink_logit(int head) const { return 0.5f * static_cast<float>(head) - 1.0f; }
};

/// Second: pages of another format among those of the first one. alone: without scratch memory. Does the
/// device take some?
template <class T, class Quantized, class Window, class Sinks, class Second = Quantized,
          class Score = cuda::unmodified>
bool check_prefill(test::rng& r, const prefill_case& c, const char* name, double* worst, bool alone) {
    constexpr bool scored = cuda::detail::has_score<Score>;
    constexpr int dim = Quantized::head_dim, page = Quantized::page_tokens;
    const std::size_t sequences = c.lengths.size();
    std::vector<int> sinks, behind, quantized, starts = {0};
    for (std::size_t b = 0; b < sequences; ++b) {
        const int n = c.lengths[b];
        sinks.push_back(std::min(n, c.sinks));
        behind.push_back(std::max(0, n - c.sinks));
        quantized.push_back(cuda::committed_pages(n - c.sinks, c.recent, page) * page);
        starts.push_back(starts.back() + c.new_tokens[b]);
    }
    const int tokens = starts.back(), q_heads = c.kv_heads * c.group;
    const test::quantized_batch<Sinks> of_sinks(r, c.kv_heads, sinks);
    test::quantized_batch<Window> of_window(r, c.kv_heads, behind);
    test::quantized_batch<Quantized> pages(r, c.kv_heads, quantized, false, {1.0f}, {c.key_size});
    constexpr bool two = !std::is_same_v<Second, Quantized>;
    test::quantized_batch<Second> seconds(r, c.kv_heads, two ? quantized : std::vector<int>(sequences));
    for (std::size_t i = 0; two && i < pages.table.size(); ++i)
        (test::uniform(r, 0, 1) == 0 ? pages.table : seconds.table)[i] = -1;
    if (c.holes)
        for (int& entry : pages.table)
            if (test::uniform(r, 0, 2) == 0) entry = -1;
    const int columns = cuda::window_columns(c.recent, page, 0) + test::uniform(r, 0, 1);
    std::vector<int> ring(sequences * static_cast<std::size_t>(columns), of_window.pages - 1);
    for (std::size_t b = 0; b < sequences; ++b)
        for (int i = quantized[b] / page; i * page < behind[b]; ++i)
            ring[b * static_cast<std::size_t>(columns) + static_cast<std::size_t>(i % columns)] =
                of_window
                    .table[b * static_cast<std::size_t>(of_window.columns) + static_cast<std::size_t>(i)];
    of_window.table = ring;
    of_window.columns = columns;
    test::device_batch<Sinks> sinks_device(of_sinks);
    test::device_batch<Window> window_device(of_window);
    test::device_batch<Quantized> pages_device(pages);
    test::device_batch<Second> seconds_device(seconds);
    const test::device_buffer<int> lengths(c.lengths);
    window_device.ref.tokens = pages_device.ref.tokens = sinks_device.ref.tokens = lengths.get();
    window_device.ref.first_token = pages_device.ref.first_token = c.sinks;
    seconds_device.ref.tokens = lengths.get();
    seconds_device.ref.first_token = c.sinks;
    const auto mixed = [&](const auto& some) {
        const auto first = cuda::behind_window(some(pages_device.ref));
        const auto window = cuda::in_window(some(window_device.ref));
        const auto of_sinks = cuda::sink_tokens(some(sinks_device.ref), c.sinks);
        if constexpr (two)
            return cuda::make_mixed(c.recent, first, cuda::behind_window(some(seconds_device.ref)), window,
                                    of_sinks);
        else
            return cuda::make_mixed(c.recent, first, window, of_sinks);
    };

    const auto tensor = [&](int heads) {
        std::vector<T> x(static_cast<std::size_t>(tokens * heads * dim) + 1);
        for (T& value : x) value = T(test::normal(r));
        return x;
    };
    const std::vector<T> q = tensor(q_heads), k = tensor(c.kv_heads), v = tensor(c.kv_heads);
    std::vector<float> logits(static_cast<std::size_t>(q_heads));
    for (float& x : logits) x = 2.0f * test::normal(r);
    const test::device_buffer<T> q_device(q), k_device(k), v_device(v);
    const test::device_buffer<float> logits_device(logits);
    test::device_buffer<T> out(q.size());
    test::device_buffer<float> lse(static_cast<std::size_t>(tokens * q_heads) + 1);
    /// Sequences first to first + count - 1.
    cuda::prefill_scratch scratch;
    const auto start = [&](std::size_t first, std::size_t count, T* to, float* to_lse) {
        const auto some = [&](auto ref) {
            ref.tokens += first;
            ref.block_table += first * static_cast<std::size_t>(ref.table_columns);
            ref.sequences = static_cast<int>(count);
            return ref;
        };
        std::vector<int> own_starts;
        for (std::size_t b = first; b <= first + count; ++b) own_starts.push_back(starts[b] - starts[first]);
        const test::device_buffer<int> starts_device(own_starts);
        const int n = own_starts.back(), before = starts[first];
        const auto rows = [&](auto* x, int heads) { return x + before * heads * dim; };
        cuda::prefill_options options;
        options.window = c.window;
        options.window_sinks = c.keep_sinks;
        options.chunked = c.chunked;
        options.softcap = c.softcap;
        options.sink_logits = c.logits ? logits_device.get() : nullptr;
        options.lse = to_lse;
        options.scratch = scratch;
        return cuda::prefill<T>(
            mixed(some), {rows(k_device.get(), c.kv_heads), n, c.kv_heads, dim},
            {rows(v_device.get(), c.kv_heads), n, c.kv_heads, dim},
            {rows(q_device.get(), q_heads), n, q_heads, dim},
            token_view<T>(rows(to, q_heads), n, q_heads, dim), starts_device.get(),
            *std::max_element(c.new_tokens.begin() + static_cast<std::ptrdiff_t>(first),
                              c.new_tokens.begin() + static_cast<std::ptrdiff_t>(first + count)),
            options, nullptr, Score{});
    };
    const auto run = [&](std::size_t first, std::size_t count, T* to, float* to_lse) {
        const auto status = start(first, count, to, to_lse);
        CUDA_OK(cudaDeviceSynchronize());
        CHECK(status, "%s: %s", name, status.message);
    };
    const int most = *std::max_element(c.lengths.begin(), c.lengths.end()),
              most_new = *std::max_element(c.new_tokens.begin(), c.new_tokens.end());
    const auto whole = mixed([](auto ref) { return ref; });
    const std::size_t all = cuda::prefill_scratch_bytes<T>(whole, most, most_new);
    const auto choice = cuda::prefill_kernel<std::remove_const_t<decltype(whole)>, T>();
    CHECK((all > 0) == (std::strcmp(choice.kernel, "prefill_wgmma_kernel") == 0), "%s: %zu bytes of scratch",
          name, all);
    const test::device_buffer<std::byte> memory(all);
    const cuda::prefill_scratch in_memory =
        alone ? cuda::prefill_scratch{} : cuda::prefill_scratch{memory.get(), all, most};
    scratch = in_memory;
    run(0, sequences, out.get(), lse.get());
    const std::vector<T> got = out.download();
    test::device_buffer<T> again(q.size());
    const auto check_again = [&](const char* how) {
        const std::vector<T> other = again.download();
        CHECK(std::memcmp(got.data(), other.data(), got.size() * sizeof(T)) == 0, "%s: other bits %s", name,
              how);
    };
    for (int repeat = 0; repeat < repeats; ++repeat) {
        again.poison();
        run(0, sequences, again.get(), nullptr);
        check_again("on another run");
    }
    if (all > 0 && !alone) {
        if (c.kv_heads > 1) {
            scratch.bytes = all / 4 * 3;
            again.poison();
            run(0, sequences, again.get(), nullptr);
            check_again("with scratch memory for one head at a time");
        }
        scratch.bytes = 1024;
        const auto status = start(0, sequences, again.get(), nullptr);
        CHECK(most_new == 0
                  ? static_cast<bool>(status)
                  : !status && std::strstr(status.message, "scratch memory of 1024 bytes, but one kv head"),
              "%s: %s", name, status.message);
        if (sequences == 1 && most >= 600 && c.window == 0) {
            scratch = {memory.get(), all, 1};
            run(0, 1, again.get(), nullptr);
            std::size_t numbers = 0;
            for (const T x : again.download()) numbers += std::isnan(static_cast<float>(x)) ? 0 : 1;
            CHECK(numbers <= 1, "%s: %zu numbers of a sequence longer than scratch memory knows", name,
                  numbers);
        }
    }
    for (const cuda::prefill_scratch& bad :
         {cuda::prefill_scratch{lse.get() + 1, 4, 1}, cuda::prefill_scratch{lse.get(), 4, -1}}) {
        scratch = bad;
        const auto status = start(0, sequences, again.get(), nullptr);
        CHECK(!status && std::strstr(status.message, "scratch memory at") != nullptr, "%s: %s", name,
              status.message);
    }
    scratch = in_memory;
    if (sequences > 1) {
        again.poison();
        for (std::size_t b = 0; b < sequences; ++b) run(b, 1, again.get(), nullptr);
        check_again("alone");
    }
    // Queries without those in front of them have the same bits; their softmax states make the same outputs,
    // and a new token that no query sees changes nothing.
    for (std::size_t b = 0; b < sequences; ++b) {
        const int n = c.new_tokens[b], lead = n / 3, count = n - lead;
        if (n == 0) continue;
        const test::device_buffer<float> states(static_cast<std::size_t>(count * q_heads * (dim + 2)));
        const auto part = [&](int keys, int shift, T* to) {
            const auto one = [&](auto ref) {
                ref.tokens += b;
                ref.block_table += b * static_cast<std::size_t>(ref.table_columns);
                ref.sequences = 1;
                return ref;
            };
            cuda::prefill_options options;
            options.window = c.window;
            options.window_sinks = c.keep_sinks;
            options.chunked = c.chunked;
            options.softcap = c.softcap;
            options.sink_logits = c.logits ? logits_device.get() : nullptr;
            options.state_out = states.get();
            options.lead = shift;
            options.scratch = in_memory;
            const int first = starts[b];
            const auto status = cuda::prefill<T>(
                mixed(one), {k_device.get() + first * c.kv_heads * dim, keys, c.kv_heads, dim},
                {v_device.get() + first * c.kv_heads * dim, keys, c.kv_heads, dim},
                {q_device.get() + (first + lead) * q_heads * dim, count, q_heads, dim},
                token_view<T>(to, count, q_heads, dim), nullptr, count, options, nullptr, Score{});
            CHECK(status, "%s: %s", name, status.message);
            CUDA_OK(cudaDeviceSynchronize());
            return states.download();
        };
        again.poison();
        std::vector<float> state = part(n, lead, again.get());
        const std::vector<T> other = again.download();
        const std::size_t at = static_cast<std::size_t>((starts[b] + lead) * q_heads) * dim,
                          size = static_cast<std::size_t>(count * q_heads) * dim;
        CHECK(std::memcmp(got.data() + at, other.data(), size * sizeof(T)) == 0,
              "%s: other bits without the %d queries before", name, lead);
        std::size_t off = 0;
        for (std::size_t i = 0; i < size; ++i) {
            const float* const row = &state[i / dim * (dim + 2)];
            const double want = static_cast<double>(static_cast<float>(other[i])),
                         have = row[1] == 0.0f
                                    ? 0.0
                                    : static_cast<double>(row[2 + i % dim]) / static_cast<double>(row[1]);
            off += std::abs(have - want) <= 0x1p-8 * std::abs(want) + 1e-7 ? 0 : 1;
        }
        CHECK(off == 0, "%s: %zu of %zu outputs are not those of their states", name, off, size);
        if (c.window > 0 || scored) continue;  // they count from the query's place
        state = part(n, -n, nullptr);
        CHECK(state == part(0, 0, nullptr), "%s: new tokens that are not seen change states", name);
        if (c.lengths[b] == 0 && !c.logits)
            CHECK(state[0] == -INFINITY && state[1] == 0.0f, "%s: a query that sees nothing has state %g, %g",
                  name, static_cast<double>(state[0]), static_cast<double>(state[1]));
    }
    const std::vector<float> got_lse = lse.download();
    const auto index = [&](int token, int head, int heads) {
        return (static_cast<std::size_t>(token) * static_cast<std::size_t>(heads) +
                static_cast<std::size_t>(head)) *
               dim;
    };
    for (std::size_t b = 0; b < sequences; ++b)
        for (int i = 0; i < c.new_tokens[b]; ++i)
            for (int h = 0; h < q_heads; ++h) {
                const auto head = static_cast<std::size_t>(h / c.group);
                const int position = c.lengths[b] + i;
                const std::size_t row = index(starts[b] + i, h, q_heads);
                std::vector<double> scores, sums(dim, 0.0);
                std::vector<const float*> values;
                std::vector<std::vector<float>> own;  // new tokens as floats
                own.reserve(static_cast<std::size_t>(2 * i + 2));
                double top = -INFINITY, sum = 0.0, error = 0.0, size = 0.0;
                std::vector<double>
                    rounding;  // standard deviation of scores whose keys are rounded to half floats
                for (int t = 0; t <= position; ++t) {
                    const int n = t - c.sinks;
                    const bool kept = c.keep_sinks && n < 0;
                    if (!kept && t < key_window{c.window, c.chunked}.first_seen(position)) continue;
                    const float *key, *value;
                    if (t >= c.lengths[b]) {
                        const std::size_t at =
                            index(starts[b] + t - c.lengths[b], static_cast<int>(head), c.kv_heads);
                        for (const auto* x : {&k, &v}) {
                            own.emplace_back(dim);
                            for (std::size_t d = 0; d < dim; ++d)
                                own.back()[d] = static_cast<float>((*x)[at + d]);
                        }
                        key = own[own.size() - 2].data();
                        value = own.back().data();
                    } else if (n < 0) {
                        key = &of_sinks.key_values[b][head][static_cast<std::size_t>(t * dim)];
                        value = &of_sinks.value_values[b][head][static_cast<std::size_t>(t * dim)];
                    } else if (n >= quantized[b]) {
                        key = &of_window.key_values[b][head][static_cast<std::size_t>(n * dim)];
                        value = &of_window.value_values[b][head][static_cast<std::size_t>(n * dim)];
                    } else {
                        const auto at = static_cast<std::size_t>(n * dim);
                        if (held(pages, b, n)) {
                            key = &pages.key_values[b][head][at];
                            value = &pages.value_values[b][head][at];
                        } else if (two && held(seconds, b, n)) {
                            key = &seconds.key_values[b][head][at];
                            value = &seconds.value_values[b][head][at];
                        } else {
                            continue;
                        }
                    }
                    double s = 0.0, squares = 0.0;
                    for (std::size_t d = 0; d < dim; ++d) {
                        const double product =
                            static_cast<double>(static_cast<float>(q[row + d])) * static_cast<double>(key[d]);
                        s += product;
                        squares += product * product;
                    }
                    s /= std::sqrt(static_cast<double>(dim));
                    // Half an ulp of 2^-11 to either side, for x^ and for its scale: a variance of 2
                    // (2^-11)^2 / 12 each.
                    rounding.push_back(0x1p-11 * std::sqrt(squares / dim / 6.0));
                    if (c.softcap > 0.0f) s = c.softcap * std::tanh(s / c.softcap);
                    if constexpr (scored)
                        s = static_cast<double>(Score{}.score(static_cast<float>(s), h, position, t));
                    scores.push_back(s);
                    values.push_back(value);
                    top = std::max(top, s);
                }
                double moved = 0.0;
                std::vector<double> sink_logits;
                if (c.logits) sink_logits.push_back(static_cast<double>(logits[static_cast<std::size_t>(h)]));
                if constexpr (scored) sink_logits.push_back(static_cast<double>(Score{}.sink_logit(h)));
                for (const double x : sink_logits) top = std::max(top, x);
                for (std::size_t t = 0; t < scores.size(); ++t) {
                    const double p = std::exp(scores[t] - top);
                    sum += p;
                    moved = std::max(moved, p * rounding[t]);
                    for (std::size_t d = 0; d < dim; ++d) sums[d] += p * static_cast<double>(values[t][d]);
                }
                for (const double x : sink_logits) sum += std::exp(x - top);
                for (std::size_t d = 0; d < dim; ++d) {
                    const double want = sums[d] / sum,
                                 have = static_cast<double>(static_cast<float>(got[row + d]));
                    error += (have - want) * (have - want);
                    size += want * want;
                    if (!(have == have)) error = INFINITY;
                }
                const double relative = std::sqrt(error / size);
                *worst = std::max(*worst, relative);
                // Weights and values are rounded too; bf16 output moves a number by up to 2^-8 of itself.
                const double limit = 1e-3 + 6.0 * moved + (std::is_same_v<T, bfloat16> ? 0x1p-8 : 0.0);
                CHECK(relative <= limit,
                      "%s: error %.3g (sequence %zu of %d + %d tokens, query %d, head %d, group %d, window "
                      "%d, cap %g, sinks %d, "
                      "recent %d)",
                      name, relative, b, c.lengths[b], c.new_tokens[b], i, h, c.group, c.window,
                      static_cast<double>(c.softcap), c.sinks, c.recent);
                const double want_lse = top + std::log(sum),
                             have_lse = static_cast<double>(got_lse[row / static_cast<std::size_t>(dim)]);
                CHECK(std::abs(want_lse - have_lse) < 2e-3 * (1.0 + std::abs(want_lse)),
                      "%s: lse %g, expected %g", name, have_lse, want_lse);
            }
    return all > 0;
}

/// `few`: what else differs is the same as for other formats.
template <class Quantized, class T, class Second = Quantized, class Score = cuda::unmodified>
void check_format(const char* name, bool few = false) {
    constexpr int page = Quantized::page_tokens, dim = Quantized::head_dim;
    using window = cuda::block_pair<full<float16>, full<float16>, dim, page>;
    using sinks = cuda::block_pair<full<float16>, full<float16>, dim, 16>;
    const auto seed = static_cast<unsigned>(page * 7 + dim);
    test::rng r(seed);
    double worst = 0.0;
    int cases = 0;
    const auto check = [&](const prefill_case& c) {
        const auto one = [&](bool alone) {
            return check_prefill<T, Quantized, window, sinks, Second, Score>(r, c, name, &worst, alone);
        };
        if (one(false) && !few && cases++ % 3 == 0) one(true);
    };
    check({.lengths = {0, 700, 132 + page, 131 + page, 3}, .new_tokens = {150, 40, 1, 0, 33}});
    // Numbers of 4 bits have scales that 64 times as large are no half floats.
    if constexpr (cuda::detail::token_row_scheme<typename Quantized::keys>)
        check({.kv_heads = 1, .group = 2, .key_size = 900.0f, .lengths = {300}, .new_tokens = {5}});
    if (few) {
        std::printf("%s: largest error %.2e, seed %u\n", name, worst, seed);
        return;
    }
    check({.kv_heads = 1, .group = 1, .lengths = {300}, .new_tokens = {200}});
    check({.kv_heads = 1,
           .group = 3,
           .window = 90,
           .recent = 32,
           .lengths = {400, 90},
           .new_tokens = {70, 140}});
    check({.kv_heads = 1,
           .group = 8,
           .window = 150,
           .keep_sinks = true,
           .recent = 32,
           .lengths = {500},
           .new_tokens = {37}});
    check({.kv_heads = 1,
           .group = 2,
           .window = 90,
           .keep_sinks = true,
           .chunked = true,
           .recent = 32,
           .lengths = {400, 0, 81},
           .new_tokens = {170, 95, 10}});
    // Sinks that are new themselves: behind no history, and behind one that ends among them; more than a tile
    // of them.
    check({.kv_heads = 1,
           .group = 4,
           .window = 20,
           .keep_sinks = true,
           .lengths = {0, 2, 0},
           .new_tokens = {190, 90, 3}});
    check({.kv_heads = 1,
           .group = 2,
           .window = 40,
           .keep_sinks = true,
           .sinks = 150,
           .lengths = {70, 0, 149, 150},
           .new_tokens = {260, 330, 140, 60}});
    check({.kv_heads = 1,
           .group = 4,
           .logits = true,
           .softcap = 5.0f,
           .recent = 0,
           .lengths = {333},
           .new_tokens = {65}});
    check({.kv_heads = 1, .group = 4, .holes = true, .recent = 32, .lengths = {600}, .new_tokens = {33}});
    for (int i = 0; i < random_cases; ++i) {
        prefill_case c;
        c.kv_heads = test::uniform(r, 1, 2);
        c.group = test::uniform(r, 1, 5);
        c.recent = test::uniform(r, 0, 150);
        c.window = test::uniform(r, 0, 1) * test::uniform(r, 1, 400);
        c.keep_sinks = c.window > 0 && test::uniform(r, 0, 1) == 0;
        c.chunked = c.window > 0 && test::uniform(r, 0, 1) == 0;
        c.sinks = test::uniform(r, 0, 1) == 0 ? 4 : test::uniform(r, 1, 100);
        c.logits = test::uniform(r, 0, 3) == 0;
        c.softcap = test::uniform(r, 0, 3) == 0 ? 5.0f : 0.0f;
        for (int b = test::uniform(r, 1, 4); b > 0; --b) {
            c.lengths.push_back(test::uniform(r, 0, 2) * test::uniform(r, 0, 250));
            c.new_tokens.push_back(test::uniform(r, 0, 4) == 0 ? test::uniform(r, 0, 1)
                                                               : test::uniform(r, 1, 300 / c.group));
        }
        check(c);
    }
    std::printf("%s: largest error %.2e, seed %u\n", name, worst, seed);
}

/// What docs/guide/gpu.md says of formats that have no kernels.
template <class Format>
constexpr bool refused(std::string_view why) {
    return !cuda::detail::prefills<Format> && cuda::detail::no_prefill<Format> == why;
}
/// Rows of tokens in the bytes of other systems.
template <int Keys, int Values, int Dim, int PageTokens>
using rows = cuda::block_pair<rows_of<Keys>, rows_of<Values>, Dim, PageTokens>;
[[maybe_unused]] constexpr int fp8 = row_layout_number("fp8"), fp8_e5m2 = row_layout_number("fp8-e5m2"),
                               nvfp4 = row_layout_number("nvfp4"), mxfp8 = row_layout_number("mxfp8"),
                               mxfp4 = row_layout_number("mxfp4"), q8_0 = row_layout_number("q8_0");
template <int... Bits>
using widths = mixed_affine<code_widths<Bits...>, average_eighths<28>, per_channel<>>;
static_assert(refused<rows<q8_0, fp8, 128, 64>>("the scheme alone reads its bytes"));
static_assert(refused<rows<fp8, fp8, 384, 64>>("head_dim is not a multiple of 32 up to 256, or 512"));
static_assert(cuda::detail::prefills<cuda::strided_rows<rows<fp8, fp8, 128, 1>>>);
static_assert(refused<cuda::kivi_pair<4, 64, 384, 64>>("head_dim is not a multiple of 32 up to 256, or 512"));
static_assert(
    refused<cuda::block_pair<int8, int8, 80, 64>>("head_dim is not a multiple of 32 up to 256, or 512"));
static_assert(
    refused<cuda::preset_pair<std4_h, 512>>("heads of more than 256 channels are behind a transform"));
static_assert(refused<cuda::block_pair<int8, int8, 128, 64, 64>>("keys and values differ in head_dim"));
static_assert(
    refused<cuda::block_pair<int8, int8, 64, 48>>("pages have neither 16 tokens nor a multiple of 32"));
static_assert(refused<cuda::block_pair<full<float>, int8, 64, 64>>("pages hold fp32 values"));
static_assert(
    refused<cuda::block_pair<affine<4, per_channel<48>>, int8, 64, 96>>("groups are not a multiple of 32"));
static_assert(
    refused<cuda::block_pair<widths<4, 2>, int8, 64, 16>>("pages of keys of several widths have 16 tokens"));
static_assert(
    refused<cuda::block_pair<widths<7, 0>, int8, 64, 64>>("7 bits are among several widths of keys"));
static_assert(refused<cuda::block_pair<widths<4, 2>, int8, 256, 1024>>(
    "a block has more than 64 KB of codes of several widths"));
static_assert(cuda::detail::prefills<cuda::block_pair<widths<4, 2>, int8, 256, 256>>);

}  // namespace

#if !defined(PART) || PART == 0
/// The kernel that is taken, for head_dim 128, and the reason.
[[maybe_unused]] void check_choice(const char* kernel, int query_rows, const char* reason) {
    using format = cuda::kivi_pair<4, 64, 128, 64>;
    const auto choice = cuda::prefill_kernel<cuda::mixed_cache_ref<cuda::cache_part<format>>, float16>();
    std::printf("prefill: %s, %d query rows: %s\n", choice.kernel, choice.query_rows, choice.why);
    CHECK(std::string_view(choice.kernel).starts_with(kernel) && choice.query_rows >= query_rows &&
              std::strstr(choice.why, reason) != nullptr,
          "not %s of %d: %s", kernel, query_rows, reason);
    using narrow = cuda::block_pair<int8, int8, 80, 64>;
    const auto none = cuda::prefill_kernel<cuda::mixed_cache_ref<cuda::cache_part<narrow>>, float16>();
    CHECK(none.kernel == std::string_view() &&
              none.why == std::string_view("prefill has no kernels for these pages: head_dim is not a "
                                           "multiple of 32 up to 256, or 512"),
          "80 channels: %s", none.why);
}
#endif

/// Pages of any size: the bits of a prompt over pages of 16 that hold the same rows. Pages: strided or dense.
template <class Pages, class T>
void check_page_sizes(const char* name) {
    constexpr int dim = Pages::head_dim, page = Pages::page_tokens, heads = 2, group = 2,
                  q_heads = heads * group;
    using sixteen = cuda::block_pair<typename Pages::keys, typename Pages::values, dim, 16>;
    static_assert(cuda::detail::split_slices<Pages> && !cuda::detail::split_slices<sixteen>);
    test::rng r(41 + page);
    const std::vector<int> lengths = {75, 0, 33, 150}, starts = {0, 3, 5, 22, 23};
    const int tokens = starts.back(), most = 17;
    test::quantized_batch<Pages> small(r, heads, lengths);
    test::quantized_batch<sixteen> large(r, heads, lengths);
    large.key_scheme = small.key_scheme, large.value_scheme = small.value_scheme;
    const auto copy_rows = [&]<class S>(const S&, std::vector<std::byte>& to,
                                        const std::vector<std::byte>& from) {
        constexpr auto layout = S::fixed_layout();
        constexpr std::size_t row = static_cast<std::size_t>(layout.row_bytes(dim)),
                              scale = static_cast<std::size_t>(layout.scales_behind(dim));
        for (std::size_t b = 0; b < lengths.size(); ++b)
            for (int i = 0; i < lengths[b] * heads; ++i) {
                const auto at = [&](auto& batch, auto& bytes, std::size_t block_bytes, int of) {
                    const int number = batch.table[b * static_cast<std::size_t>(batch.columns) +
                                                   static_cast<std::size_t>(i / heads / of)];
                    return &bytes[static_cast<std::size_t>(number * heads + i % heads) * block_bytes];
                };
                const auto t = static_cast<std::size_t>(i / heads);
                std::byte* const block =
                    at(large, to, to.size() / static_cast<std::size_t>(large.pages * heads), 16);
                const std::byte* const rows =
                    at(small, from, from.size() / static_cast<std::size_t>(small.pages * heads), page);
                std::copy_n(rows + t % page * row, row, block + t % 16 * row);
                std::copy_n(rows + page * row + t % page * scale, scale, block + 16 * row + t % 16 * scale);
            }
    };
    copy_rows(small.key_scheme, large.keys, small.keys);
    copy_rows(small.value_scheme, large.values, small.values);
    const auto random = [&](int n) {
        std::vector<T> x(static_cast<std::size_t>(tokens * n * dim));
        for (T& y : x) y = T(test::normal(r));
        return test::device_buffer<T>(x);
    };
    const auto q = random(q_heads), k = random(heads), v = random(heads);
    const test::device_buffer<int> first(starts);
    test::device_batch<Pages> of_small(small);
    test::device_batch<sixteen> of_large(large);
    const auto outputs = [&](const auto& cache, bool scratch, int window) {
        const auto mix = cuda::make_mixed(0, cache);
        const std::size_t bytes = scratch ? cuda::prefill_scratch_bytes<T>(mix, 150, most) : 0;
        test::device_buffer<std::byte> memory(bytes);
        test::device_buffer<T> out(q.size());
        const cuda::status s = cuda::prefill<T>(
            mix, token_view<const T>(k.get(), tokens, heads, dim),
            token_view<const T>(v.get(), tokens, heads, dim),
            token_view<const T>(q.get(), tokens, q_heads, dim),
            token_view<T>(out.get(), tokens, q_heads, dim), first.get(), most,
            {.window = window, .scratch = {bytes > 0 ? memory.get() : nullptr, bytes, 150}}, nullptr);
        CHECK(s, "%s: %s", name, s.message);
        CUDA_OK(cudaStreamSynchronize(nullptr));
        return out.download();
    };
    std::size_t wrong = 0, nans = 0;
    const auto compare = [&](int row, int end, const std::vector<T>& a, const std::vector<T>& b) {
        for (int i = row * q_heads * dim; i < end * q_heads * dim; ++i) {
            const auto at = static_cast<std::size_t>(i);
            wrong += std::memcmp(&a[at], &b[at], sizeof(T)) != 0;
            nans += !(static_cast<float>(b[at]) == static_cast<float>(b[at]));
        }
    };
    for (const bool scratch : {false, true})
        for (const int window : {0, 40})
            compare(0, tokens, outputs(of_small.ref, scratch, window),
                    outputs(of_large.ref, scratch, window));
    CHECK(wrong == 0 && nans == 0, "%s: %zu numbers differ from those of pages of 16, %zu are NaN", name,
          wrong, nans);
    // A page that the table lacks: rows of that sequence are NaN, others are as they were.
    const std::vector<T> before = outputs(of_large.ref, true, 0);
    small.table[static_cast<std::size_t>(2 * small.columns + 20 / page)] = -1;
    of_small.table.upload(small.table);
    for (const bool scratch : {false, true}) {
        const std::vector<T> lacking = outputs(of_small.ref, scratch, 0);
        if (scratch) compare(0, starts[2], lacking, before), compare(starts[3], tokens, lacking, before);
        for (int i = starts[2] * q_heads * dim; i < starts[3] * q_heads * dim; ++i)
            nans += !(static_cast<float>(lacking[static_cast<std::size_t>(i)]) ==
                      static_cast<float>(lacking[static_cast<std::size_t>(i)]));
    }
    CHECK(wrong == 0 && nans == std::size_t{2} * 17 * q_heads * dim,
          "%s: %zu other numbers differ, %zu are NaN where a page is lacking", name, wrong, nans);
}

int main() {
#if !defined(PART) || PART == 0
#if defined(TARGET_SM_90A)
    check_choice("prefill_wgmma_kernel", 128, "compute capability 9.0 has 227 KB");
#elif defined(__CUDACC__)
    check_choice("prefill_", 128, "compute capability ");
#else
    check_choice("prefill_mma_kernel", 256, "prefill_wgmma_kernel with 128 query rows needs code for sm_90a");
#endif
    check_format<cuda::kivi_pair<4, 64, 128, 64>, float16>("kivi-4-g64");
#ifndef __CUDACC__
    emulated::device_shared_memory = 99 * 1024;  // launches that ask for more fail
    check_choice("prefill_mma_kernel", 128,
                 "8.9 has 99 KB of shared memory per thread block; prefill_wgmma_kernel with 128 query rows "
                 "needs warpgroup products; prefill_mma_kernel with 256 query rows needs ");
    check_format<cuda::kivi_pair<4, 64, 128, 64>, float16>("kivi-4-g64 on a device with 99 KB", few);
    emulated::device_shared_memory = emulated::most_shared_memory;
#endif
    check_format<cuda::preset_pair<std4, 128, 128>, float16>("std4", few);
    check_format<cuda::block_pair<int8, int8, 128, 64>, float16>("int8", few);
    check_format<cuda::block_pair<full<bfloat16>, full<bfloat16>, 128, 64>, bfloat16>("bf16", few);
    check_format<cuda::block_pair<mixed_affine<code_widths<8, 5, 2, 0>, average_eighths<28>, per_channel<32>,
                                               packed_params<float16>, min_max>,
                                  int8, 96, 32>,
                 bfloat16>("8, 5, 2 and 0 bits, groups of 32, head_dim 96", few);
#endif
#if !defined(PART) || PART == 1
    check_format<cuda::kivi_pair<4, 64, 128, 64>, float16, cuda::kivi_pair<4, 64, 128, 64>, own_score>(
        "a score modifier");
    check_format<cuda::kivi_pair<2, 32, 64, 32>, float16>("kivi-2-g32, head_dim 64");
    check_format<cuda::block_pair<affine<3, per_token<32>>, affine<5, per_channel<>>, 128, 96>, float16>(
        "3 and 5 bits");
    check_format<cuda::block_pair<affine<4, per_token<>>, affine<6, per_token<>>, 128, 16>, float16>(
        "pages of 16");
    check_format<cuda::block_pair<affine<1, per_channel<>>, affine<7, per_token<>, params<float>>, 64, 16>,
                 float>("1 and 7 bits");
#endif
#if !defined(PART) || PART == 2
    check_format<cuda::preset_pair<hi6, 128, 64>, bfloat16>("hi6");
    check_format<cuda::preset_pair<ref8, 64, 64>, float16>("ref8, head_dim 64");
    check_format<cuda::preset_pair<std4, 64, 64>, float16>("std4, head_dim 64");
    check_format<cuda::kivi_pair<4, 32, 256, 64>, float16>("head_dim 256");
    check_format<cuda::kivi_pair<4, 32, 96, 32>, float16>("head_dim 96");
    check_format<cuda::kivi_pair<4, 64, 128, 96>, float16>("groups that end with a page of 96");
    check_format<cuda::preset_pair<std4_h, 64, 64>, float16>("std4-h, head_dim 64");
    check_format<
        cuda::block_pair<rotated<affine<4, per_token<>>>, hadamard<affine<4, per_channel<>>>, 96, 64>,
        float16>("rotated keys, Hadamard before values, head_dim 96", few);
    check_format<cuda::block_pair<hadamard<widths<4, 2>, 32>, rotated<std4::values>, 128, 64>, bfloat16>(
        "Hadamard before keys of 4 and 2 bits, rotated values", few);
#endif
#if !defined(PART) || PART == 3
    check_format<cuda::preset_pair<mix5, 128>, float16>("mix5");
    check_page_sizes<rows<mxfp8, nvfp4, 64, 24>, float16>("mxfp8, nvfp4, pages of 24");
#endif
#if !defined(PART) || PART == 5
    check_format<cuda::kivi_pair<4, 64, 512, 64>, float16>("kivi-4-g64, head_dim 512", few);
    check_format<cuda::preset_pair<std4, 512>, bfloat16>("std4, head_dim 512", few);
    check_format<cuda::block_pair<int8, full<bfloat16>, 512, 16>, float16>(
        "int8 keys, bf16 values, head_dim 512, page 16", few);
#ifndef __CUDACC__
    emulated::device_shared_memory = 163 * 1024;
    check_format<cuda::kivi_pair<4, 64, 256, 64>, float16>("kivi-4-g64, head_dim 256 on a device with 163 KB",
                                                           few);
    emulated::device_shared_memory = 99 * 1024;
    check_format<cuda::kivi_pair<4, 64, 512, 64>, float16>("kivi-4-g64, head_dim 512 on a device with 99 KB",
                                                           few);
    emulated::device_shared_memory = emulated::most_shared_memory;
#endif
#endif
#if !defined(PART) || PART == 6
    check_format<rows<fp8, fp8, 128, 64>, float16>("fp8");
    check_format<rows<nvfp4, nvfp4, 128, 64>, bfloat16>("nvfp4", few);
    check_format<rows<mxfp4, mxfp8, 64, 16>, float16>("mxfp4, mxfp8, head_dim 64, page 16", few);
    check_format<rows<mxfp8, fp8_e5m2, 96, 96>, float16>("mxfp8, fp8-e5m2, head_dim 96, page 96", few);
    check_format<rows<nvfp4, fp8, 256, 64>, float16>("nvfp4, fp8, head_dim 256", few);
    check_format<cuda::strided_rows<rows<nvfp4, fp8, 128, 16>>, float16>("nvfp4, fp8, NHD with gaps", few);
    check_format<cuda::strided_rows<rows<fp8, mxfp8, 128, 32>>, bfloat16, rows<fp8, fp8, 128, 32>>(
        "fp8, mxfp8, NHD, beside fp8", few);
    check_page_sizes<cuda::strided_rows<rows<fp8, fp8, 128, 1>>, float16>("fp8, NHD, pages of 1");
    check_page_sizes<cuda::strided_rows<rows<nvfp4, fp8_e5m2, 64, 3>>, bfloat16>(
        "nvfp4, fp8-e5m2, pages of 3");
#ifdef __CUDACC__
    check_format<rows<fp8, mxfp4, 512, 64>, bfloat16>("fp8, mxfp4, head_dim 512", few);
#endif
#endif
#if !defined(PART) || PART == 4
    check_format<cuda::preset_pair<low2, 64, 64>, float16, cuda::preset_pair<mix4, 64, 64>>(
        "low2 and mix4 in turns, head_dim 64");
#if defined(__CUDACC__) || !defined(PART)  // emulated, they would take minutes
    check_format<cuda::preset_pair<low3, 128, 64>, float16>("low3");
    check_format<cuda::block_pair<mixed_affine<code_widths<6, 1>, average_eighths<24>, per_channel<>,
                                               packed_params<float>, min_max>,
                                  full<float16>, 128, 96>,
                 float16>("6 and 1 bits, fp32 parameters, page 96");
#endif
#endif
    return test::report("prefill");
}
