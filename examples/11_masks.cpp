// Every example of docs/guide/attention.md, run: masks, score modifiers, drafted trees, pages worth reading,
// moved tokens. Outputs are compared with a softmax in double over the dequantized tokens. Exit status 1: one
// of them is off.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <kvq/core/thread_pool.hpp>
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>
#include <random>
#include <utility>
#include <vector>

namespace {

using tokens_in = kvq::token_view<const float>;
using tokens_out = kvq::token_view<float>;

// ---- what the guide shows --------------------------------------------------------------------------------

void masks(kvq::sequence& sequence, kvq::sequence& encoder, int layer, tokens_in k, tokens_in v, tokens_in q,
           tokens_out out, kvq::thread_pool& executor, kvq::workspace& workspace) {
    sequence.attend(layer, q, out, kvq::sliding_window{4096});
    sequence.attend(layer, q, out,
                    kvq::mods{kvq::softcap{50.0f}, kvq::sink_window{.tokens = 4096, .sinks = 4}});

    const std::vector<int> starts{0, 700, 1500};
    sequence.prefill(layer, k, v, q, out, kvq::document_mask{starts}, executor, workspace);
    sequence.attend(layer, q, out, kvq::mods{kvq::bidirectional{}, kvq::document_mask{starts}});
    encoder.attend(layer, q, out, kvq::cross_attention{});
}

struct dilated {
    bool mask(int q_pos, int k_pos) const { return k_pos > q_pos - 64 || k_pos % 4 == 0; }
    kvq::page_visibility mask_page(int /*first_q*/, int last_q, int first_k, int /*end_k*/) const {
        return first_k > last_q - 64 ? kvq::page_visibility::all : kvq::page_visibility::some;
    }
};
struct recency {
    float strength;
    float score(float score, int /*q_head*/, int q_pos, int k_pos) const {
        return score - strength * std::log1p(static_cast<float>(q_pos - k_pos));
    }
};

/// The share of the pages that was read, and the share of the weights that was left out.
std::pair<double, double> pages(kvq::sequence& sequence, int layer, tokens_in q, tokens_out out) {
    kvq::selection_report report;
    sequence.attend(layer, q, out, kvq::selected_pages{.tokens = 4096, .report = &report});
    const double read = static_cast<double>(report.read) / static_cast<double>(report.pages);

    kvq::skipping_report skipped;
    sequence.attend(layer, q, out, kvq::skipped_values{.mass = 1e-3f, .report = &skipped});
    const double left_out = skipped.left_out / static_cast<double>(skipped.rows);
    sequence.attend(layer, q, out, kvq::mods{kvq::selected_pages{4096}, kvq::skipped_values{1e-3f}});

    const std::vector<kvq::token_range> blocks{{0, 64}, {512, 768}, {4032, 4096}};
    sequence.attend(layer, q, out, kvq::token_ranges{blocks});
    const std::vector<int> starts{0, 2, 3};
    sequence.attend(layer, q, out, kvq::token_ranges{blocks, starts, sequence.tokens(layer) - q.tokens});
    return {read, left_out};
}

/// int8 has no parameters per channel, by which pages could be ranked.
kvq::cache_options bounded(const kvq::format& int8) {
    kvq::cache_options options{.keys = kvq::with_bounds(int8), .values = int8};
    return options;
}

void requests(kvq::cache& cache, std::vector<kvq::sequence>& sequences, std::vector<tokens_in>& q,
              std::vector<tokens_out>& out, std::vector<kvq::token_tree>& trees, int layer,
              kvq::thread_pool& executor, kvq::workspace& workspace) {
    std::vector<kvq::attention_request> batch;
    for (std::size_t i = 0; i < trees.size(); ++i)
        batch.push_back({.sequence = &sequences[i], .q = q[i], .out = out[i], .mods = trees[i]});
    cache.attend(layer, batch, kvq::causal{}, executor, workspace);
}

void trees(kvq::sequence& sequence, int layers, tokens_in k, tokens_in v, tokens_in q, tokens_out out) {
    const std::vector<int> parents{-1, 0, 0, -1, 3};
    const kvq::token_tree tree(sequence.tokens(), parents);
    for (int layer = 0; layer < layers; ++layer) {
        sequence.append_draft(layer, k, v);
        sequence.attend(layer, q, out, tree);
    }
    const std::vector<int> accepted{0, 2};
    sequence.keep(accepted);
}

/// Tokens [first, last) go; those of a document from the fifth on follow; the first n keys move by `by`.
/// use(sequence) sees the result.
template <class Fill, class Use>
void moves(kvq::cache_shape shape, kvq::cache_options options, int first, int last, int n, int by,
           const Fill& fill, const Use& use) {
    kvq::rotary_embedding rotary;
    rotary.dims = 128;
    rotary.frequencies = kvq::llama3_frequencies(128, 500000.0, {.factor = 8.0, .original_context = 8192.0});
    options.rotary = {rotary};
    kvq::cache cache(shape, options);
    auto sequence = cache.new_sequence(), document = cache.new_sequence();
    fill(sequence, document);
    sequence.erase(first, last);
    sequence.splice(document, 4, document.tokens());
    sequence.shift(0, n, by);
    use(sequence);
}

// ---- what it is compared with ----------------------------------------------------------------------------

constexpr int q_heads = 2, dim = 32;
int failures = 0;

void expect(bool holds, const char* what) {
    std::printf("%-64s %s\n", what, holds ? "ok" : "WRONG");
    failures += holds ? 0 : 1;
}

struct tensor {
    int tokens, heads, width;
    std::vector<float> x;

    tensor(int n, int h, int d)
        : tokens(n), heads(h), width(d), x(static_cast<std::size_t>(n) * static_cast<std::size_t>(h * d)) {}
    tensor(int n, int h, int d, std::mt19937& random) : tensor(n, h, d) {
        std::normal_distribution<float> normal;
        for (float& f : x) f = normal(random);
    }
    tokens_in in() const { return {x.data(), tokens, heads, width}; }
    tokens_in in(int first, int n) const { return in().slice(first, n); }
    tokens_out out() { return {x.data(), tokens, heads, width}; }
    double at(int t, int h, int c) const {
        return static_cast<double>(x[static_cast<std::size_t>((t * heads + h) * width + c)]);
    }
};

/// The largest |out - softmax(...) V| over the rows of q, whose last row is token `last`. One kv head.
double error(
    const kvq::sequence& s, const tensor& q, const tensor& out, int last,
    const std::function<bool(int, int)>& visible,
    const std::function<double(double, int, int)>& score = [](double x, int, int) { return x; }) {
    tensor k(s.tokens(0), 1, dim), v(s.tokens(0), 1, dim);
    s.dequantize(0, kvq::tensor::key, 0, k.out());
    s.dequantize(0, kvq::tensor::value, 0, v.out());
    double worst = 0.0;
    for (int t = 0; t < q.tokens; ++t)
        for (int h = 0; h < q.heads; ++h) {
            const int at = last - q.tokens + 1 + t;
            std::vector<double> sum(dim);
            double weights = 0.0;
            for (int j = 0; j < k.tokens; ++j) {
                if (!visible(at, j)) continue;
                double dot = 0.0;
                for (int c = 0; c < dim; ++c) dot += q.at(t, h, c) * k.at(j, 0, c);
                const double w = std::exp(score(dot / std::sqrt(dim), at, j));
                weights += w;
                for (int c = 0; c < dim; ++c) sum[static_cast<std::size_t>(c)] += w * v.at(j, 0, c);
            }
            for (int c = 0; c < dim; ++c)
                worst =
                    std::max(worst, std::abs(out.at(t, h, c) - sum[static_cast<std::size_t>(c)] / weights));
        }
    return worst;
}
/// Outputs of this size are means of normal values; kernels multiply a high and a low byte of a query with
/// codes.
constexpr double near = 2e-3;

}  // namespace

int main() {
    std::mt19937 random(1);
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = dim};
    const kvq::format_pair formats = kvq::make_formats<kvq::kivi<4, 64>, kvq::scalar>();
    const kvq::cache_options options{
        .keys = formats.keys, .values = formats.values, .sinks = 4, .recent = 64, .page_tokens = 64};
    kvq::cache cache(shape, options);
    kvq::thread_pool executor(2);
    kvq::workspace workspace;

    {  // Masks. The sequence has 1500 tokens, and 60 of a third document follow; the encoder has 200.
        const tensor k(1560, 1, dim, random), v(1560, 1, dim, random), q(60, q_heads, dim, random);
        tensor out(60, q_heads, dim);
        auto sequence = cache.new_sequence(), encoder = cache.new_sequence();
        sequence.append(0, k.in(0, 1500), v.in(0, 1500));
        encoder.append(0, k.in(0, 200), v.in(0, 200));
        masks(sequence, encoder, 0, k.in(1500, 60), v.in(1500, 60), q.in(), out.out(), executor, workspace);
        expect(sequence.tokens() == 1560, "prefill with documents appends its chunk");
        expect(error(encoder, q, out, 199, [](int, int) { return true; }) < near,
               "cross attention sees all tokens");

        const std::vector<int> starts{0, 700, 1500};
        sequence.attend(0, q.in(), out.out(), kvq::mods{kvq::bidirectional{}, kvq::document_mask{starts}});
        expect(error(sequence, q, out, 1559, [](int, int j) { return j >= 1500; }) < near,
               "a document sees itself, in both directions");
        const tensor one(1, q_heads, dim, random);
        tensor row(1, q_heads, dim);
        sequence.attend(0, one.in(), row.out(), kvq::mods{kvq::softcap{2.0f}, kvq::sink_window{100, 4}});
        expect(error(
                   sequence, one, row, 1559, [](int at, int j) { return j < 4 || j > at - 100; },
                   [](double x, int, int) { return 2.0 * std::tanh(x / 2.0); }) < near,
               "softcap, a window and the first four tokens");
        sequence.attend(0, q.in(), out.out(), kvq::mods{dilated{}, recency{0.1f}});
        expect(
            error(
                sequence, q, out, 1559, [](int at, int j) { return j <= at && (j > at - 64 || j % 4 == 0); },
                [](double x, int at, int j) { return x - 0.1 * std::log1p(at - j); }) < near,
            "a mask and a modifier of one's own");
    }
    {  // Pages worth reading: 6000 tokens, two queries.
        // Tokens 1000 to 2999 have next to no weight: their scores are about 28 below the others.
        tensor k(6000, 1, dim, random), q(2, q_heads, dim, random), out(2, q_heads, dim);
        const tensor v(6000, 1, dim, random);
        for (int t = 1000; t < 3000; ++t) k.x[static_cast<std::size_t>(t * dim)] = -40.0f;
        for (std::size_t row = 0; row < 2 * q_heads; ++row) q.x[row * dim] = 4.0f;
        auto sequence = cache.new_sequence();
        sequence.append(0, k.in(), v.in());
        const auto [read, left_out] = pages(sequence, 0, q.in(), out.out());
        expect(read > 4096.0 / 6000 && read < 0.8, "4096 of 6000 tokens are in the best pages");
        expect(left_out > 0.0 && left_out <= 1e-3, "at most 1e-3 of the weights is left out");
        expect(error(sequence, q, out, 5999,
                     [](int at, int j) {
                         return at == 5998 ? j < 64 || (j >= 512 && j < 768) : j >= 4032 && j < 4096;
                     }) < near,
               "a list of ranges for each query");

        kvq::cache with_bounds(shape, bounded(kvq::make_format<kvq::int8, kvq::scalar>()));
        auto ranked = with_bounds.new_sequence();
        ranked.append(0, k.in(), v.in());
        std::vector<kvq::chosen_tokens> chosen;
        kvq::selection_report report{.chosen = &chosen};
        ranked.attend(0, q.in(), out.out(), kvq::selected_pages{.tokens = 1024, .report = &report});
        const auto shown = [&](int j) {
            return std::any_of(chosen.begin(), chosen.end(), [&](const kvq::chosen_tokens& run) {
                return run.tokens.begin <= j && j < run.tokens.end;
            });
        };
        expect(report.pages == 47 && report.read == 8 + 3,
               "1024 tokens: 8 of 47 pages, the first one and the last two");
        expect(!shown(1500) && !shown(2500), "tokens without weight are not read");
        expect(error(ranked, q, out, 5999, [&](int at, int j) { return j <= at && shown(j); }) < near,
               "the chosen pages are a mask");
    }
    {  // Trees: what is kept is what appending the path alone gives.
        const tensor k(505, 1, dim, random), v(505, 1, dim, random), q(5, q_heads, dim, random);
        tensor out(5, q_heads, dim);
        std::vector<kvq::sequence> both;
        for (int i = 0; i < 2; ++i) {
            both.push_back(cache.new_sequence());
            both[static_cast<std::size_t>(i)].append(0, k.in(0, 500), v.in(0, 500));
        }
        auto alone = both[0].fork(), drafted = both[0].fork();
        trees(drafted, 1, k.in(500, 5), v.in(500, 5), q.in(), out.out());
        for (const int t : {500, 502}) alone.append(0, k.in(t, 1), v.in(t, 1));
        tensor a(502, 1, dim), b(502, 1, dim);
        drafted.dequantize(0, kvq::tensor::key, 0, a.out());
        alone.dequantize(0, kvq::tensor::key, 0, b.out());
        expect(drafted.tokens() == 502 && a.x == b.x, "a path of a tree is kept");

        // A batch of two sequences with drafts, each with the tree of its own.
        const std::vector<int> chain{-1, 0, 1, 2, 3}, siblings{-1, -1, -1, -1, -1};
        std::vector<kvq::token_tree> of{kvq::token_tree(500, chain), kvq::token_tree(500, siblings)};
        std::vector<tensor> outs(2, tensor(5, q_heads, dim));
        std::vector<tokens_in> queries(2, q.in());
        std::vector<tokens_out> to{outs[0].out(), outs[1].out()};
        for (kvq::sequence& s : both) s.append_draft(0, k.in(500, 5), v.in(500, 5));
        requests(cache, both, queries, to, of, 0, executor, workspace);
        const double chained = error(both[0], q, outs[0], 504, [](int at, int j) { return j <= at; });
        const double beside =
            error(both[1], q, outs[1], 504, [](int at, int j) { return j < 500 || j == at; });
        expect(chained < near && beside < near, "a batch in which every request has its tree");
    }
    // Moves: 300 tokens of which 50 go, 100 of a document without its first four, and every key moves by 7.
    {
        const kvq::cache_shape wide{.layers = 1, .kv_heads = 1, .head_dim = 128};
        const tensor k(400, 1, 128, random), v(400, 1, 128, random);
        const auto fill = [&](kvq::sequence& sequence, kvq::sequence& document) {
            sequence.append(0, k.in(0, 300), v.in(0, 300));
            document.append(0, k.in(300, 100), v.in(300, 100));
        };
        tensor a(346, 1, 128), b(346, 1, 128), c(346, 1, 128), d(346, 1, 128);
        moves(wide, options, 100, 150, 0, 0, fill, [&](const kvq::sequence& stays) {
            stays.dequantize(0, kvq::tensor::value, 0, a.out());
            stays.dequantize(0, kvq::tensor::key, 0, c.out());
        });
        moves(wide, options, 100, 150, 346, 7, fill, [&](const kvq::sequence& moved) {
            expect(moved.tokens() == 346, "50 of 300 tokens went, 96 of a document came");
            moved.dequantize(0, kvq::tensor::value, 0, b.out());
            moved.dequantize(0, kvq::tensor::key, 0, d.out());
        });
        double longer = 0.0, turned = 0.0;  // rotations keep lengths and change channels
        for (int t = 0; t < 346; ++t) {
            double before = 0.0, after = 0.0;
            for (int i = 0; i < 128; ++i) {
                before += c.at(t, 0, i) * c.at(t, 0, i);
                after += d.at(t, 0, i) * d.at(t, 0, i);
                turned = std::max(turned, std::abs(c.at(t, 0, i) - d.at(t, 0, i)));
            }
            longer = std::max(longer, std::abs(std::sqrt(after / before) - 1.0));
        }
        expect(a.x == b.x, "a shift leaves values alone");
        expect(longer < 1e-5 && turned > 0.1, "shift rotates the keys");
    }
    return failures == 0 ? 0 : 1;
}
