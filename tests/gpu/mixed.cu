// Attention over sequences whose pages have several formats, in one launch, against double arithmetic on the
// dequantized values.
#include <bit>

#include <kvq/page/key_window.hpp>

#include "attention_test.cuh"
#include "random_tree.hpp"

using namespace kvq;

namespace {

struct mixed_case {
    int kv_heads = 2, group = 4, query_tokens = 1, window = 0;
    float softcap = 0.0f;
    int sinks = 4, recent = 128;
    std::vector<int> lengths;  // sinks included
    // pages of the quantized formats in any order, named by negative entries; otherwise they follow each
    // other
    bool scattered = false;
    int drafted = 0;  // a random tree of so many tokens, of which the last query_tokens ask
    bool sink_logits = false, window_sinks = false, chunked = false, all_keys = false;
};

/// Trees, logits of sinks: what else the options point to.
struct other_options {
    std::vector<std::uint64_t> ancestors;
    std::vector<float> logits;
    test::device_buffer<std::uint64_t> ancestors_device;
    test::device_buffer<float> logits_device;

    static std::vector<std::uint64_t> random_trees(test::rng& r, const mixed_case& c) {
        std::vector<std::uint64_t> words;
        test::rng widths(static_cast<unsigned>(c.drafted));  // apart from r, which makes the tensors
        for (std::size_t b = 0; b < c.lengths.size() && c.drafted > 0; ++b) {
            const int width = test::uniform(widths, 1, 7);
            test::random_tree(r, c.drafted, width).newest(c.query_tokens, words);
        }
        return words;
    }
    static std::vector<float> random_logits(test::rng& r, int q_heads) {
        std::vector<float> x;
        for (int h = 0; h < q_heads; ++h) x.push_back(h % 5 == 3 ? -INFINITY : 3.0f * test::normal(r));
        return x;
    }
    other_options(test::rng& r, const mixed_case& c, cuda::attention_options& o)
        : ancestors(random_trees(r, c)),
          logits(random_logits(r, c.kv_heads * c.group)),
          ancestors_device(ancestors),
          logits_device(logits) {
        o.query_tokens = c.query_tokens;
        o.window = c.window;
        o.window_sinks = c.window_sinks;
        o.chunked = c.chunked;
        o.all_keys = c.all_keys;
        o.softcap = c.softcap;
        o.drafted = c.drafted;
        if (c.drafted > 0) o.ancestors = ancestors_device.get();
    }
    /// Does query token i of sequence b see token t?
    bool sees(const mixed_case& c, std::size_t b, int i, int t) const {
        const int draft = c.lengths[b] - c.drafted, bit = t - draft;
        // Drafted tokens count as the text that the query's path makes of them.
        int position = c.lengths[b] - c.query_tokens + i, key = t;
        if (c.drafted > 0) {
            const std::uint64_t word =
                ancestors[b * static_cast<std::size_t>(c.query_tokens) + static_cast<std::size_t>(i)];
            if (bit >= 0 && (word >> bit & 1) == 0) return false;
            position = draft + std::popcount(word) - 1;
            if (bit >= 0) key = draft + std::popcount(word & ((std::uint64_t{1} << bit) - 1));
        }
        return c.window == 0 || (c.window_sinks && key < c.sinks) ||
               key >= key_window{c.window, c.chunked}.first_seen(position);
    }
};

/// The numbers of a token and head, dequantized.
struct token_numbers {
    const float *key, *value;
};

/// A sequence's tokens, each of the format that holds it; null: held by none.
template <class Format>
token_numbers numbers_of(const test::quantized_batch<Format>& b, std::size_t sequence, std::size_t head,
                         int token) {
    return {&b.key_values[sequence][head][static_cast<std::size_t>(token) * Format::head_dim],
            &b.value_values[sequence][head][static_cast<std::size_t>(token) * Format::value_dim]};
}

/// Compares output and log-sum-exp with double arithmetic. numbers(sequence, kv head, token): that token's,
/// dequantized.
template <int dim, int value_dim, class T, class Score, class Numbers>
void check_rows(const mixed_case& c, const other_options& others, [[maybe_unused]] const Score& score,
                const std::vector<T>& q, const std::vector<T>& got, const std::vector<float>& got_lse,
                const Numbers& numbers, const char* name, double* worst) {
    const int q_heads = c.kv_heads * c.group;
    for (std::size_t b = 0; b < c.lengths.size(); ++b)
        for (int i = 0; i < c.query_tokens; ++i)
            for (int h = 0; h < q_heads; ++h) {
                const std::size_t row =
                    static_cast<std::size_t>((static_cast<int>(b) * c.query_tokens + i) * q_heads + h);
                const auto head = static_cast<std::size_t>(h / c.group);
                const int position = c.all_keys ? i : c.lengths[b] - c.query_tokens + i;
                std::vector<double> scores, sums(value_dim, 0.0);
                std::vector<const float*> values;
                double top = -INFINITY, sum = 0.0, error = 0.0, size = 0.0;
                for (int t = 0; t < c.lengths[b] && (c.all_keys || t <= position); ++t) {
                    if (!others.sees(c, b, i, t)) continue;
                    const token_numbers x = numbers(b, head, t);
                    double s = 0.0;
                    for (int d = 0; d < dim; ++d)
                        s += static_cast<double>(
                                 static_cast<float>(q[row * dim + static_cast<std::size_t>(d)])) *
                             x.key[d];
                    s /= std::sqrt(static_cast<double>(dim));
                    if (c.softcap > 0.0f) s = c.softcap * std::tanh(s / c.softcap);
                    if constexpr (cuda::detail::has_score<Score>)
                        s = static_cast<double>(score.score(static_cast<float>(s), h, position, t));
                    if (s == -INFINITY) continue;
                    scores.push_back(s);
                    values.push_back(x.value);
                    top = std::max(top, s);
                }
                if (c.sink_logits && !scores.empty()) {
                    const double logit = static_cast<double>(others.logits[static_cast<std::size_t>(h)]),
                                 next = std::max(top, logit);
                    sum = std::exp(logit - next);
                    top = next;
                }
                for (std::size_t t = 0; t < scores.size(); ++t) {
                    const double p = std::exp(scores[t] - top);
                    sum += p;
                    for (int d = 0; d < value_dim; ++d) sums[static_cast<std::size_t>(d)] += p * values[t][d];
                }
                for (int d = 0; d < value_dim; ++d) {
                    const double want = sum > 0.0 ? sums[static_cast<std::size_t>(d)] / sum : 0.0,
                                 have =
                                     static_cast<float>(got[row * value_dim + static_cast<std::size_t>(d)]);
                    error += (have - want) * (have - want);
                    size += want * want;
                    if (!(have == have)) error = INFINITY;
                }
                const double relative = size > 0.0 ? std::sqrt(error / size) : std::sqrt(error);
                *worst = std::max(*worst, relative);
                const double limit = 2e-3 + (std::is_same_v<T, bfloat16> ? 0x1p-8 : 0.0);
                CHECK(relative <= limit,
                      "%s: error %.3g (sequence %zu of %d tokens, query %d of %d, head %d, group %d, window "
                      "%d, cap %g, "
                      "sinks %d, recent %d, drafted %d)",
                      name, relative, b, c.lengths[b], i, c.query_tokens, h, c.group, c.window,
                      static_cast<double>(c.softcap), c.sinks, c.recent, c.drafted);
                const double want_lse = sum > 0.0 ? top + std::log(sum) : -INFINITY, have_lse = got_lse[row];
                CHECK(
                    want_lse == have_lse || std::abs(want_lse - have_lse) < 1e-3 * (1.0 + std::abs(want_lse)),
                    "%s: lse %g, expected %g", name, have_lse, want_lse);
            }
}

/// Old and New: quantized formats, the same for caches of one.
template <class T, class Old, class New, class Window, class Sinks, class Score = cuda::unmodified>
void check_mix(test::rng& r, const mixed_case& c, const char* name, double* worst, Score score = {}) {
    constexpr int dim = New::head_dim, value_dim = New::value_dim, page = New::page_tokens;
    constexpr bool two = !std::is_same_v<Old, New>;
    const std::size_t sequences = c.lengths.size();
    std::vector<int> sinks, behind, committed, middle;
    for (const int n : c.lengths) {
        sinks.push_back(std::min(n, c.sinks));
        behind.push_back(std::max(0, n - c.sinks));
        committed.push_back(cuda::committed_pages(n - c.sinks, c.recent, page));
        middle.push_back(two && committed.back() > 0 ? test::uniform(r, 0, committed.back()) : 0);
    }
    const test::quantized_batch<Sinks> of_sinks(r, c.kv_heads, sinks);
    test::quantized_batch<Window> of_window(r, c.kv_heads, behind);
    std::vector<int> quantized;
    for (const int n : committed) quantized.push_back(n * page);
    test::quantized_batch<Old> of_old(r, c.kv_heads, quantized);
    test::quantized_batch<New> of_new(r, c.kv_heads, quantized);
    const auto at = [](std::size_t b, int columns, int column) {
        return b * static_cast<std::size_t>(columns) + static_cast<std::size_t>(column);
    };

    // The window's table is a ring; what is behind the window is not in it.
    const int columns = cuda::window_columns(c.recent, page, 0) + test::uniform(r, 0, 1);
    std::vector<int> ring(sequences * static_cast<std::size_t>(columns), of_window.pages - 1);
    std::vector<std::vector<int>> owner(sequences);  // of the quantized pages: is it the old format?
    for (std::size_t b = 0; b < sequences; ++b) {
        for (int i = committed[b]; i * page < behind[b]; ++i)
            ring[at(b, columns, i % columns)] = of_window.table[at(b, of_window.columns, i)];
        for (int i = 0; i < committed[b]; ++i) {
            const bool old = two && (c.scattered ? test::uniform(r, 0, 1) == 0 : i < middle[b]);
            owner[b].push_back(old);
            // Where pages follow each other, whoever looks at an entry of the other format finds no page.
            const int nobody = c.scattered ? -1 : of_old.pages - 1;
            if (two && !old) of_old.table[at(b, of_old.columns, i)] = nobody;
            if (old) of_new.table[at(b, of_new.columns, i)] = c.scattered ? -1 : of_new.pages - 1;
        }
    }
    of_window.table = ring;
    of_window.columns = columns;

    test::device_batch<Sinks> sinks_device(of_sinks);
    test::device_batch<Window> window_device(of_window);
    test::device_batch<Old> old_device(of_old);
    test::device_batch<New> new_device(of_new);
    const test::device_buffer<int> lengths(c.lengths), middle_device(middle);
    window_device.ref.tokens = old_device.ref.tokens = new_device.ref.tokens = sinks_device.ref.tokens =
        lengths.get();
    window_device.ref.first_token = old_device.ref.first_token = new_device.ref.first_token = c.sinks;

    const int q_heads = c.kv_heads * c.group, rows = static_cast<int>(sequences) * c.query_tokens;
    std::vector<T> q(static_cast<std::size_t>(rows * q_heads * dim));
    for (T& x : q) x = test::as<T>(test::normal(r));
    const test::device_buffer<T> q_device(q);
    test::device_buffer<T> out(static_cast<std::size_t>(rows * q_heads * value_dim));
    test::device_buffer<float> lse(static_cast<std::size_t>(rows * q_heads));
    cuda::attention_options options;
    const other_options others(r, c, options);
    if constexpr (std::is_same_v<Score, cuda::learned_sinks>) score.logits = others.logits_device.get();
    options.lse = lse.get();
    const auto attend = [&](const auto& cache) {
        using mix = std::remove_cvref_t<decltype(cache)>;
        const std::size_t bytes = cuda::attend_workspace_bytes<mix, T, Score>(c.group, c.query_tokens);
        test::device_buffer<std::byte> workspace(bytes);
        workspace.clear();
        std::vector<T> first;
        // The second call finds the workspace as the first left it; lengths and tables are old. Where the GPU
        // is emulated, the launch before the third one writes lengths while that one starts.
        int repeats = 2;
#ifndef __CUDACC__
        ++repeats;
        std::vector<int> halves;
        for (const int n : c.lengths) halves.push_back(n / 2);
#endif
        for (int repeat = 0; repeat < repeats; ++repeat) {
#ifndef __CUDACC__
            if (repeat == 2)
                emulated::predecessor = [&](bool over) {
                    std::ranges::copy(over ? c.lengths : halves, lengths.get());
                };
#endif
            out.poison();
            options.early = repeat == 1;
            const auto status =
                cuda::attend<T>(cache, token_view<const T>(q_device.get(), rows, q_heads, dim),
                                token_view<T>(out.get(), rows, q_heads, value_dim), options, workspace.get(),
                                bytes, nullptr, score);
            CHECK(status, "%s: %s", name, status.message);
            CUDA_OK(cudaDeviceSynchronize());
#ifndef __CUDACC__
            emulated::predecessor = nullptr;
#endif
            const std::vector<T> got = out.download();
            if (repeat == 0) first = got;
            CHECK(std::memcmp(first.data(), got.data(), got.size() * sizeof(T)) == 0,
                  "%s: not the same bits again", name);
        }
    };
    auto part = cuda::behind_window(new_device.ref);
    if constexpr (two) {
        auto old_part = cuda::behind_window(old_device.ref);
        if (!c.scattered) old_part.end_page = part.first_page = middle_device.get();
        attend(cuda::make_mixed(c.recent, old_part, part, cuda::in_window(window_device.ref),
                                cuda::sink_tokens(sinks_device.ref, c.sinks)));
    } else {
        attend(cuda::make_mixed(c.recent, part, cuda::in_window(window_device.ref),
                                cuda::sink_tokens(sinks_device.ref, c.sinks)));
    }

    const auto numbers = [&](std::size_t b, std::size_t head, int t) {
        const int n = t - c.sinks;
        return n < 0                                          ? numbers_of(of_sinks, b, head, t)
               : n / page >= committed[b]                     ? numbers_of(of_window, b, head, n)
               : owner[b][static_cast<std::size_t>(n / page)] ? numbers_of(of_old, b, head, n)
                                                              : numbers_of(of_new, b, head, n);
    };
    check_rows<dim, value_dim>(c, others, score, q, out.download(), lse.download(), numbers, name, worst);
}

template <class T, class Old, class New, class Window, class Sinks>
void check_mixes(const char* name) {
    constexpr int page = New::page_tokens;
    test::rng r(static_cast<unsigned>(page * 7 + 3));
    double worst = 0.0;
    const auto check = [&](const mixed_case& c) {
        check_mix<T, Old, New, Window, Sinks>(r, c, name, &worst);
    };
    const std::vector<int> ragged = {page + 5, 0, 1, 4, 3 * page + 17, 132, 133, 132 + page, 131 + page, 900};
    check({.group = 4, .lengths = ragged});
    check({.kv_heads = 1, .group = 4, .lengths = {3000}});
    check({.kv_heads = 1, .group = 8, .sinks = 3, .recent = 32, .lengths = ragged});
    check({.kv_heads = 1, .group = 16, .recent = 0, .lengths = {4, 4 + page, 3 + page, 5 + page, 700}});
    check({.group = 1, .query_tokens = 3, .recent = page, .lengths = {3, 2 * page + 1, 501, 1000}});
    check({.kv_heads = 1,
           .group = 4,
           .query_tokens = 2,
           .window = 90,
           .lengths = {1000, 2 * page + 1, 5, 400}});
    check({.kv_heads = 1,
           .group = 4,
           .query_tokens = 5,
           .window = 90,
           .lengths = {992, 2 * page + 1, 5, 364},
           .chunked = true});
    check({.kv_heads = 1, .group = 2, .query_tokens = 6, .lengths = {500, 2, 0}, .all_keys = true});
    check({.kv_heads = 1, .group = 2, .window = 300, .softcap = 5.0f, .lengths = {40, 900, page, 300}});
    check({.sinks = 0, .recent = 200, .lengths = ragged});
    check({.group = 2, .lengths = {700, 700, 700}});
    check({.kv_heads = 3, .group = 2, .lengths = std::vector<int>(30, 2 * page + 150)});
    // Trees of drafted tokens; they may be longer than a sequence, and lie in pages of any format.
    check({.kv_heads = 1,
           .group = 4,
           .query_tokens = 9,
           .lengths = {500, 9, 0, 3, 2 * page + 9},
           .drafted = 9});
    check({.kv_heads = 2,
           .group = 1,
           .query_tokens = 5,
           .recent = 20,
           .lengths = {700, 64, 130},
           .drafted = 64});
    check({.kv_heads = 1, .group = 3, .query_tokens = 64, .lengths = {300, 70}, .drafted = 64});
    check({.kv_heads = 1,
           .group = 2,
           .query_tokens = 12,
           .window = 40,
           .softcap = 5.0f,
           .lengths = {400, 40},
           .drafted = 12});
    for (const bool chunked : {false, true})
        check({.kv_heads = 1,
               .group = 1,
               .query_tokens = 40,
               .window = 7,
               .sinks = 3,
               .lengths = {300, 47},
               .drafted = 45,
               .window_sinks = true,
               .chunked = chunked});
    check({.kv_heads = 1,
           .group = 2,
           .query_tokens = 3,
           .window = 90,
           .sinks = 20,
           .lengths = {1000, 20, 130, 5, 0},
           .window_sinks = true});
    check({.kv_heads = 1,
           .group = 8,
           .query_tokens = 2,
           .window = 50,
           .sinks = 37,
           .lengths = {800, 90},
           .drafted = 2,
           .window_sinks = true});
    if (!std::is_same_v<Old, New>) {
        check({.kv_heads = 1, .group = 4, .lengths = {3000, 1, 640}, .scattered = true});
        check({.kv_heads = 2, .group = 8, .lengths = ragged, .scattered = true});
    }
    std::printf("  %-44s largest error %.2e\n", name, worst);
}

#if !defined(PART) || PART == 4
/// A score modifier of the user's: slopes of heads, and keys that only some queries see.
struct tilted {
    float slope[4];
    int hidden;

    KVQ_HD float score(float score, int q_head, int q_pos, int k_pos) const {
        return k_pos % hidden == 1 && q_pos % 2 == 0
                   ? -INFINITY
                   : score - slope[q_head % 4] * static_cast<float>(q_pos - k_pos);
    }
};

/// A cache of one format with a score modifier, a tree and sinks in the softmax; pages need not be of sizes
/// that the warp kernel takes.
template <class T, class Format, class Score>
void check_single(const char* name, Score score) {
    constexpr int dim = Format::head_dim, value_dim = Format::value_dim;
    test::rng r(static_cast<unsigned>(Format::page_tokens));
    double worst = 0.0;
    for (mixed_case c :
         {mixed_case{.kv_heads = 2, .group = 4, .sinks = 0, .lengths = {300, 0, 1, 70}},
          mixed_case{.kv_heads = 1,
          .group = 3,
          .query_tokens = 8,
          .softcap = 5.0f,
          .sinks = 0,
          .lengths = {100, 8, 700, 5},
          .drafted = 10},
          mixed_case{
              .kv_heads = 1, .group = 16, .query_tokens = 2, .window = 60, .sinks = 0, .lengths = {500}},
          mixed_case{.kv_heads = 1,
          .group = 2,
          .query_tokens = 8,
          .window = 6,
          .sinks = 0,
          .lengths = {100, 33},
          .drafted = 30},
          mixed_case{.kv_heads = 1,
          .group = 2,
          .query_tokens = 9,
          .window = 60,
          .sinks = 0,
          .lengths = {487, 30},
          .chunked = true},
          mixed_case{.kv_heads = 1,
          .group = 2,
          .query_tokens = 5,
          .sinks = 0,
          .lengths = {90, 3},
          .all_keys = true}}) {
        const test::quantized_batch<Format> batch(r, c.kv_heads, c.lengths);
        const test::device_batch<Format> device(batch);
        const int q_heads = c.kv_heads * c.group, rows = static_cast<int>(c.lengths.size()) * c.query_tokens;
        std::vector<T> q(static_cast<std::size_t>(rows * q_heads * dim));
        for (T& x : q) x = test::as<T>(test::normal(r));
        const test::device_buffer<T> q_device(q);
        test::device_buffer<T> out(static_cast<std::size_t>(rows * q_heads * value_dim));
        test::device_buffer<float> lse(static_cast<std::size_t>(rows * q_heads));
        cuda::attention_options options;
        const other_options others(r, c, options);
        if constexpr (std::is_same_v<Score, cuda::learned_sinks>) {
            score.logits = others.logits_device.get();
            c.sink_logits = true;
        }
        options.lse = lse.get();
        const std::size_t bytes = cuda::attend_workspace_bytes<Format, T, Score>(c.group, c.query_tokens);
        test::device_buffer<std::byte> workspace(bytes);
        workspace.clear();
        const auto s = cuda::attend(device.ref, token_view<const T>(q_device.get(), rows, q_heads, dim),
                                    token_view<T>(out.get(), rows, q_heads, value_dim), options,
                                    workspace.get(), bytes, nullptr, score);
        CHECK(s, "%s: %s", name, s.message);
        CUDA_OK(cudaDeviceSynchronize());
        check_rows<dim, value_dim>(
            c, others, score, q, out.download(), lse.download(),
            [&](std::size_t b, std::size_t head, int t) { return numbers_of(batch, b, head, t); }, name,
            &worst);
    }
    std::printf("  %-44s largest error %.2e\n", name, worst);
}
#endif

template <class T, int Dim, int Page>
using full_pages = cuda::block_pair<full<T>, full<T>, Dim, Page>;

/// A batch; a draft through a window that keeps sinks; softcap with `group` query heads per kv head.
[[maybe_unused]] std::vector<mixed_case> batch_draft_and_softcap(int group) {
    return {mixed_case{.group = 4, .lengths = {700, 0, 1, 90, 133}},
            mixed_case{.kv_heads = 1,
                       .group = 8,
                       .query_tokens = 3,
                       .window = 70,
                       .sinks = 20,
                       .recent = 32,
                       .lengths = {600, 90, 2},
                       .drafted = 5,
                       .window_sinks = true},
            mixed_case{.kv_heads = 1, .group = group, .softcap = 4.0f, .lengths = {500, 60}}};
}

}  // namespace

int main() {
#if !defined(PART) || PART == 0
    using kivi4 = cuda::kivi_pair<4, 64, 128, 64>;
    check_mixes<float16, kivi4, kivi4, full_pages<float16, 128, 64>, full_pages<float16, 128, 16>>(
        "kivi4 g64, fp16 window and sinks");
#endif
#if !defined(PART) || PART == 1
    using packed = cuda::block_pair<int8, affine<4, per_token<>>, 64, 32>;
    check_mixes<bfloat16, packed, packed, full_pages<bfloat16, 64, 32>, full_pages<bfloat16, 64, 16>>(
        "int8 keys, 4 bit values, bf16 window, page 32");
#endif
#if !defined(PART) || PART == 2
    check_mixes<float16, cuda::preset_pair<low2, 128>, cuda::preset_pair<std4, 128>,
                full_pages<float16, 128, 128>, full_pages<float16, 128, 16>>("low2, then std4, fp16 window");
#endif
#if !defined(PART) || PART == 3
    check_mixes<float, cuda::block_pair<affine<4, per_token<>>, affine<4, per_token<>>, 96, 16>,
                cuda::kivi_pair<2, 32, 96, 16>, full_pages<float16, 96, 16>, full_pages<bfloat16, 96, 32>>(
        "4 bit token, then kivi2, pages of 16");
#endif
#if !defined(PART) || PART == 6
    // Channels in bands of several warps; beside keys of a plan, which have one band.
    test::rng wide(13);
    double of_wide = 0.0;
    for (const mixed_case& c : batch_draft_and_softcap(16)) {
        check_mix<float16, cuda::preset_pair<std4, 512>, cuda::block_pair<int8, int8, 512, 128>,
                  full_pages<float16, 512, 128>, full_pages<float16, 512, 16>>(
            wide, c, "std4, then int8, dim 512", &of_wide);
        check_mix<bfloat16, cuda::preset_pair<mix4, 256, 64>, cuda::kivi_pair<4, 64, 256, 64>,
                  full_pages<bfloat16, 256, 64>, full_pages<bfloat16, 256, 16>>(
            wide, c, "mix4, then kivi4, dim 256", &of_wide);
    }
    std::printf("  %-44s largest error %.2e\n", "dims 512 and 256", of_wide);
#endif
#if !defined(PART) || PART == 5
    // Keys behind a transform have a query of their own, beside that of the window and in a mix with keys of
    // a plan.
    using turned = cuda::block_pair<
        hadamard<affine<4, per_channel<32>, byte_params, min_max, token_scales<byte_params>>>,
        rotated<affine<4, per_token<>>>, 64, 32>;
    using with_plan = cuda::preset_pair<low2, 64, 32>;
    test::rng random(12);
    double error = 0.0;
    for (const mixed_case& c : batch_draft_and_softcap(2)) {
        using window = full_pages<float16, 64, 32>;
        using sinks = full_pages<float16, 64, 16>;
        check_mix<float16, turned, turned, window, sinks>(random, c, "behind transforms", &error);
        check_mix<float16, with_plan, turned, window, sinks>(random, c, "low2, then behind transforms",
                                                             &error);
    }
    std::printf("  %-44s largest error %.2e\n", "behind transforms", error);
#endif
#if !defined(PART) || PART == 4
    using small = cuda::kivi_pair<4, 32, 64, 32>;
    using window = full_pages<float16, 64, 32>;
    test::rng r(11);
    double worst = 0.0;
    const tilted score{{0.0f, 0.005f, 0.05f, 0.5f}, 3};
    // Rows of tokens, of which a warp takes two pages; of another system, then the same of a cache.
    using rows =
        cuda::block_pair<rows_of<row_layout_number("nvfp4")>, rows_of<row_layout_number("fp8")>, 64, 16>;
    using pages_of_16 = full_pages<float16, 64, 16>;
    for (const bool scattered : {false, true})
        for (mixed_case c : batch_draft_and_softcap(16)) {
            c.scattered = scattered;
            check_mix<float16, cuda::strided_rows<rows>, rows, pages_of_16, pages_of_16>(
                r, c, "strided rows, then rows, in pages of 16", &worst);
        }
    for (const mixed_case& c : batch_draft_and_softcap(16))
        check_mix<float16, small, small, window, full_pages<float16, 64, 16>>(r, c, "score modifier, kivi4",
                                                                              &worst, score);
    for (const mixed_case& c :
         {mixed_case{.group = 4, .lengths = {700, 0, 1, 90, 133, 3000}, .sink_logits = true},
          mixed_case{.kv_heads = 1,
          .group = 8,
          .query_tokens = 6,
          .window = 70,
          .lengths = {600, 90, 6, 0},
          .drafted = 6,
          .sink_logits = true}})
        check_mix<float16, small, small, window, full_pages<float16, 64, 16>, cuda::learned_sinks>(
            r, c, "learned sinks, kivi4", &worst);
    std::printf("  %-44s largest error %.2e\n", "score modifier, kivi4", worst);
    check_single<float16, window>("score modifier, fp16 alone", score);
    using any_shape = cuda::block_pair<int8, int8, 40, 24>;
    check_single<float, any_shape>("score modifier, any shape", score);
    check_single<float16, window>("learned sinks, fp16 alone", cuda::learned_sinks{});
    check_single<float, any_shape>("learned sinks, any shape", cuda::learned_sinks{});
#endif
    return test::report("mixed");
}
