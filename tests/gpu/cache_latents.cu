// Layers with latent attention and an index in a cache that owns its pages, beside layers with keys and
// values, against a CPU cache that does the same: random histories of steps, prompts, drafts, trims, forks,
// requantizing, moves, erase, shift and splice with the same bytes afterwards, attention over all tokens and
// over lists against double arithmetic, steps down, stores of prefixes, tokens that an index selects, bytes
// of a latent, refusals.
#include <kvq/cache/rearrange.hpp>
#include <kvq/cache/requantize.hpp>
#include <kvq/cache/sequence_access.hpp>
#include <kvq/cuda.cuh>
#include <kvq/cuda/host/prefixes.hpp>
#include <kvq/format/latent.hpp>
#include <kvq/format/make_format.hpp>

#include "counted_memory.cuh"
#include "random_tree.hpp"
#include "saved_sequence.cuh"
#include "support.cuh"

using namespace kvq;

namespace {

#ifdef __CUDACC__
constexpr int max_tokens = 900, longest_prompt = 200;
#else
constexpr int max_tokens = 300, longest_prompt = 110;
#endif

/// Latents of Latent + Rotary channels; the other layer has kv_heads x dim, and the last one is an index.
template <int Latent, int Rotary, int Page, int QueryHeads, class IndexKeys = int8>
struct caches {
    static constexpr int channels = Latent + Rotary, values = Latent, page = Page, group = 32;
    static constexpr int q_heads = QueryHeads, dim = 64, kv_heads = 2, room = 256;
    using kivi4 = kivi<4, group>;
    /// The layer with keys and values, and its formats: all formats must fit it, so that its keys have more
    /// channels than the rotary ones.
    static constexpr bool mixed = Rotary < dim;
    /// The other formats of latents. No page is requantized to std4: the CPU would keep its grids.
    static constexpr int wide = mixed ? 3 : 1, std4_keys = wide + 1;
    static constexpr int index_channels = mixed ? 64 : 128, index_heads = 3, index_format = mixed ? 2 : 3;
    const std::vector<kvq::layer> list = [] {
        std::vector<kvq::layer> all(3, latent_attention(Latent, Rotary));
        all[1].formats = {std4_keys, 0};
        all[2].formats = {wide, 0};
        if (mixed)
            all.insert(all.begin() + 1,
                       full_attention({.kv_heads = kv_heads, .head_dim = dim, .formats = {1, 1}}));
        all.push_back(index_layer(index_channels));
        all.back().formats.key = index_format;
        return all;
    }();
    std::vector<std::string> names;
    cudaStream_t stream;
    kvq::cache cpu;
    cuda::cache gpu;
    test::device_buffer<float16> k, v, q, out;
    test::device_buffer<float> lse, states;

    static const std::vector<cuda::device_format>& compiled() {
        static const std::vector<cuda::device_format> all = [] {
            std::vector<cuda::device_format> list{
                cuda::make_device_format<
                    float16, cuda::latent_pair<typename kivi4::keys, Latent, Rotary, values, Page, int8>,
                    cuda::latent_pair<int8, Latent, Rotary, values, Page>,
                    cuda::latent_pair<std4::keys, Latent, Rotary, values, Page, ref8::keys>>(),
                cuda::make_device_format<float16, cuda::index_pair<index_channels, Page, IndexKeys>>()};
            if constexpr (mixed)
                list.push_back(cuda::make_device_format<float16, cuda::kivi_pair<4, group, dim, Page>,
                                                        cuda::block_pair<int8, int8, dim, Page>>());
            return list;
        }();
        return all;
    }
    static std::vector<std::string> format_names() {
        const std::string n = std::to_string(Rotary), kivi = "kivi-4-g32-int8x" + n, bytes = "int8-fp16x" + n,
                          preset = "std4-ref8x" + n;
        const std::string index = std::is_same_v<IndexKeys, int8> ? "int8" : "e4m3";
        if (!mixed) return {kivi, bytes, preset, index};
        return {kivi, "kivi-4-g32", index, bytes, preset};
    }
    static format_list key_formats() {
        const format narrow = make_format<typename kivi4::keys, scalar>(),
                     bytes = make_format<int8, scalar>(), index = make_format<IndexKeys, scalar>();
        const format_list latents = {
            with_last_channels(narrow, bytes, Rotary), with_fp16_channels(bytes, Rotary),
            with_last_channels(make_format<std4::keys, scalar>(), make_format<ref8::keys, scalar>(), Rotary)};
        if (mixed) return {latents[0], narrow, index, latents[1], latents[2]};
        return {latents[0], latents[1], latents[2], index};
    }
    /// Latents turn their rotary channels, an index and keys some of theirs.
    std::vector<rotary_embedding> rotations() const {
        std::vector<rotary_embedding> all;
        for (const kvq::layer& l : list)
            all.push_back(l.kind == layer_kind::latent
                              ? rotary_embedding{.dims = Rotary, .first_channel = Latent, .base = 500.0}
                              : rotary_embedding{.dims = 32, .layout = rotary_layout::interleaved});
        return all;
    }
    cuda::cache_options options(int sinks, int recent, int rollback) const {
        cuda::cache_options o;
        o.formats = names;
        o.page_tokens = page;
        o.sinks = sinks;
        o.recent = recent;
        o.rollback = rollback;
        o.max_batch = 3;
        o.max_tokens = max_tokens;
        o.step_tokens = o.draft_tokens = 3;
        o.query_heads = std::max(q_heads, index_heads);  // both turn queries
        o.listed_tokens = 200;
        o.rotary = rotations();
        o.memory = test::counted_memory::allocator();
        return o;
    }
    caches(int sinks, int recent, int rollback)
        : names(format_names()),
          cpu(list, {.keys = key_formats(),
                     .values = {make_format<affine<2, per_token<32>>, scalar>(),
                                make_format<typename kivi4::values, scalar>(), make_format<int8, scalar>()},
                     .sinks = sinks,
                     .recent = recent,
                     .page_tokens = page,
                     .rollback = rollback,
                     .rotary = rotations(),
                     .repack = 0.0f}),
          k(list.size() * room * row),
          v(k.size()),
          q(room * q_heads * channels),
          out(q.size()),
          lse(room * q_heads),
          states(room * q_heads * (std::max(values, dim) + 2)) {
        CUDA_OK(cudaStreamCreate(&stream));
        const cuda::status s = gpu.open(list, options(sinks, recent, rollback), compiled(), stream);
        CHECK(s, "%s", s.message);
    }
    ~caches() {
        CUDA_OK(cudaStreamSynchronize(stream));
        CUDA_OK(cudaStreamDestroy(stream));
    }

    int count() const { return static_cast<int>(list.size()); }
    bool is_index(int layer) const { return layer == count() - 1; }
    bool is_latent(int layer) const { return !is_index(layer) && (!mixed || layer != 1); }
    bool keys_alone(int layer) const { return is_index(layer) || is_latent(layer); }
    int key_dim(int layer) const { return cpu.shape(layer).head_dim; }
    int value_dim(int layer) const { return cpu.shape(layer).dim(tensor::value); }
    int heads(int layer) const { return cpu.shape(layer).kv_heads; }
    static constexpr std::size_t row = std::max(channels, kv_heads* dim);
    /// Tokens of a layer: keys, or values, of which latents have none.
    template <class T>
    auto rows(T* x, int layer, int first, int n, tensor role) const {
        x += (static_cast<std::size_t>(layer) * room) * row +
             static_cast<std::size_t>(first * heads(layer) * cpu.shape(layer).dim(role));
        const bool none = keys_alone(layer) && role == tensor::value;
        return token_view<const float16>(x, none ? 0 : n, heads(layer), cpu.shape(layer).dim(role));
    }
    /// Random keys and values of n tokens on both sides. Rotary channels are large, and some numbers are not
    /// finite.
    void write(test::rng& r, std::vector<float16>& keys, std::vector<float16>& of_values, int n) {
        keys.assign(k.size(), float16(NAN));
        of_values.assign(v.size(), float16(NAN));
        for (int layer = 0; layer < count(); ++layer)
            for (auto* x : {&keys, &of_values}) {
                float16* const at = x->data() + static_cast<std::size_t>(layer) * room * row;
                const int width = x == &keys ? heads(layer) * key_dim(layer) : heads(layer) * dim;
                for (int i = 0; i < n * width; ++i) {
                    const bool large = is_latent(layer) && i % channels >= Latent;
                    at[i] = float16((large ? 8.0f : 1.0f) * test::normal(r));
                }
            }
        k.upload(keys);
        v.upload(of_values);
    }
};

struct pair {
    cuda::sequence_id id;
    kvq::sequence host;
};

template <class Caches>
struct history {
    Caches c;
    test::rng r;
    const char* name;
    int sinks, rollback;
    std::vector<pair> pairs;
    int step = 0, requantized = 0, prompts = 0, kept = 0, moved = 0, selected = 0, rearranged = 0,
        spliced = 0, unmoved = 0, lowered = 0;
    double worst = 0.0;
    std::vector<float16> keys, values;

    history(int sink_tokens, int recent, int reach, unsigned seed, const char* n)
        : c(sink_tokens, recent, reach), r(seed), name(n), sinks(sink_tokens), rollback(reach) {
        add();
    }
    int any(int low, int high) { return test::uniform(r, low, high); }
    pair& one() { return pairs[static_cast<std::size_t>(any(0, static_cast<int>(pairs.size()) - 1))]; }
    void ok(const cuda::status& s) { CHECK(s, "%s, step %d: %s", name, step, s.message); }
    void add() { pairs.push_back({c.gpu.new_sequence(), c.cpu.new_sequence()}); }
    bool fits(const pair& p, int n) const { return p.host.tokens() + n <= max_tokens; }

    void append(int n) {
        for (int layer = 0; layer < c.count(); ++layer)
            ok(c.gpu.append(layer, c.rows(c.k.get(), layer, 0, n, tensor::key),
                            c.rows(c.v.get(), layer, 0, n, tensor::value), c.stream));
    }
    void host_append(kvq::sequence& s, int first, int n, bool draft = false) {
        for (int layer = 0; layer < c.count(); ++layer) {
            const auto own_keys = c.rows(keys.data(), layer, first, n, tensor::key);
            const auto own_values = c.rows(values.data(), layer, first, n, tensor::value);
            if (draft)
                s.append_draft(layer, own_keys, own_values);
            else
                s.append(layer, own_keys, own_values);
        }
    }
    std::vector<float16> queries(int n, int layer) {
        std::vector<float16> x(static_cast<std::size_t>(n * c.q_heads * c.key_dim(layer)));
        for (float16& y : x) y = float16(0.5f * test::normal(r));
        std::vector<float16> all(c.q.size());
        std::copy(x.begin(), x.end(), all.begin());
        c.q.upload(all);
        c.out.poison();
        return x;
    }
    /// What hides tokens, caps scores and adds to sums, in some of the calls.
    struct modifiers {
        int window = 0;
        bool window_sinks = false, sink_logits = false;
        float softcap = 0.0f;
    };
    modifiers some_modifiers(bool sink_logits) {
        if (any(0, 1) == 0) return {};
        modifiers m;
        if (any(0, 2) > 0) m.window = any(1, any(0, 1) == 0 ? 40 : 300);
        m.window_sinks = m.window > 0 && any(0, 1) == 0;
        m.sink_logits = sink_logits && any(0, 1) == 0;
        if (any(0, 1) == 0) m.softcap = 1.5f;
        return m;
    }
    /// Of a row of the output, against double arithmetic on what the CPU dequantizes of these tokens.
    double error_of(const kvq::sequence& s, int layer, int head, const std::vector<int>& tokens, double sink,
                    const float16* x, const float16* got, double softcap = 0.0) {
        const int dim = c.key_dim(layer), width = c.value_dim(layer), h = c.heads(layer),
                  own = head / (c.q_heads / h);
        std::vector<float> k(static_cast<std::size_t>(s.tokens() * h * dim)),
            v(static_cast<std::size_t>(s.tokens() * h * width));
        s.dequantize(layer, tensor::key, 0, token_view<float>(k.data(), s.tokens(), h, dim));
        s.dequantize(layer, tensor::value, 0, token_view<float>(v.data(), s.tokens(), h, width));
        std::vector<double> scores, want(static_cast<std::size_t>(width), 0.0);
        double top = sink, sum = 0.0, error = 0.0, size = 0.0;
        for (const int t : tokens) {
            double score = 0.0;
            for (int d = 0; d < dim; ++d)
                score += static_cast<double>(static_cast<float>(x[d])) *
                         static_cast<double>(k[static_cast<std::size_t>((t * h + own) * dim + d)]);
            score /= 8.0;
            scores.push_back(softcap == 0.0 ? score : softcap * std::tanh(score / softcap));
            top = std::max(top, scores.back());
        }
        if (!tokens.empty()) sum = std::exp(sink - top);
        for (std::size_t i = 0; i < tokens.size(); ++i) {
            const int t = tokens[i];
            const double w = std::exp(scores[i] - top);
            sum += w;
            for (int d = 0; d < width; ++d)
                want[static_cast<std::size_t>(d)] +=
                    w * static_cast<double>(v[static_cast<std::size_t>((t * h + own) * width + d)]);
        }
        for (int d = 0; d < width; ++d) {
            const double a = sum == 0.0 ? 0.0 : want[static_cast<std::size_t>(d)] / sum,
                         b = static_cast<double>(static_cast<float>(got[d]));
            error += (a - b) * (a - b);
            size += a * a;
            if (!(b == b)) error = INFINITY;
        }
        return size == 0.0 ? error : std::sqrt(error / size);
    }
    static const kvq::detail::page_table& tables_of(const pair& p, int layer) {
        return kvq::detail::sequence_access::tables(p.host)[static_cast<std::size_t>(layer)];
    }
    /// Attention of the last n tokens of the rows that a begin has named, of so many drafted ones.
    void attend(const std::vector<pair*>& rows, int n, int drafted = 0) {
        const int layer = any(0, c.count() - 2), all = n * static_cast<int>(rows.size()),
                  dim = c.key_dim(layer), width = c.value_dim(layer);
        const std::vector<float16> x = queries(all, layer);
        const token_view<const float16> q(c.q.get(), all, c.q_heads, dim);
        const token_view<float16> out(c.out.get(), all, c.q_heads, width);
        // Lists of any tokens, of each kv head or of all, some of them twice or not there.
        const bool listed = any(0, 2) == 0;
        const int list_heads = any(0, 1) == 0 ? 1 : c.heads(layer),
                  counts[2] = {any(1, any(0, 3) == 0 ? 200 : 30), any(0, 10)};
        std::vector<int> lists[2];
        for (int i = 0; i < 2; ++i)
            for (int at = 0; at < all * list_heads * counts[i]; ++at) {
                const pair* const of = rows[static_cast<std::size_t>(at / (n * list_heads * counts[i]))];
                const int tokens = of == nullptr ? 5 : of->host.tokens();
                lists[i].push_back(any(0, 9) == 0 ? any(0, 1) * (tokens + 1) - 1 : any(0, tokens - 1));
            }
        // Learned sinks would count in a launch that has tokens of the row alone. Tables of a draft are not
        // shown.
        bool moved_keys = drafted > 0;
        for (const pair* const p : rows)
            for (int i = 0; p != nullptr && drafted == 0 && i < tables_of(*p, layer).size(); ++i)
                moved_keys = moved_keys || tables_of(*p, layer)[i].shift != 0;
        const bool with_sinks = listed && any(0, 1) == 0 && !moved_keys;
        const modifiers how = listed ? modifiers{} : some_modifiers(c.is_latent(layer));
        const test::device_buffer<int> selected_list(lists[0]), window_list(lists[1]);
        const test::random_words trees(r, rows.size(), any(0, 3) == 0 ? 0 : drafted, n);
        const test::device_buffer<float> logits(
            std::vector<float>(static_cast<std::size_t>(c.q_heads), 1.5f));
        if (listed)
            ok(c.gpu.attend_lists(layer, q, out,
                                  {.scale = 0.125f,
                                   .selected = {selected_list.get(), counts[0]},
                                   .window = {counts[1] == 0 ? nullptr : window_list.get(), counts[1]},
                                   .query_tokens = n,
                                   .kv_heads = list_heads,
                                   .ancestors = trees.get(),
                                   .sink_logits = with_sinks ? logits.get() : nullptr},
                                  c.stream));
        else
            ok(c.gpu.attend(layer, q, out,
                            {.scale = 0.125f,
                             .softcap = how.softcap,
                             .window = how.window,
                             .window_sinks = how.window_sinks,
                             .query_tokens = n,
                             .ancestors = trees.get(),
                             .sink_logits = how.sink_logits ? logits.get() : nullptr},
                            c.stream));
        CUDA_OK(cudaStreamSynchronize(c.stream));
        const auto y = c.out.download();
        for (std::size_t b = 0; b < rows.size(); ++b) {
            const int i = any(0, n - 1), head = any(0, c.q_heads - 1),
                      at = (static_cast<int>(b) * n + i) * c.q_heads + head;
            if (rows[b] == nullptr) continue;
            const int held = rows[b]->host.tokens(), seen = held - n + i + 1;
            if (seen < 1) continue;
            std::vector<int> tokens;
            if (!listed)
                for (int t = 0; t < seen; ++t)
                    if (trees.sees(b, held, i, t) &&
                        (how.window == 0 || (how.window_sinks && t < sinks) ||
                         trees.place(b, held, i, t) > trees.place(b, held, i, seen - 1) - how.window))
                        tokens.push_back(t);
            for (int k = 0; k < 2 && listed; ++k) {
                const int own = head / (c.q_heads / c.heads(layer)),
                          line = (static_cast<int>(b) * n + i) * list_heads + (list_heads == 1 ? 0 : own);
                for (int j = line * counts[k]; j < (line + 1) * counts[k]; ++j)
                    if (const int t = lists[k][static_cast<std::size_t>(j)];
                        t >= 0 && t < held && trees.sees(b, held, i, t))
                        tokens.push_back(t);
            }
            const double error =
                error_of(rows[b]->host, layer, head, tokens, with_sinks || how.sink_logits ? 1.5 : -INFINITY,
                         &x[static_cast<std::size_t>(at * dim)], &y[static_cast<std::size_t>(at * width)],
                         static_cast<double>(how.softcap));
            worst = std::max(worst, error);
            CHECK(error <= 3e-3, "%s, step %d, layer %d: error %.3g of row %zu, %d of %d tokens", name, step,
                  layer, error, b, seen, held);
        }
    }
    /// The index selects, for the last n tokens of each row, what the CPU selects.
    void select(const std::vector<pair*>& rows, int n) {
        const int layer = c.count() - 1, all = n * static_cast<int>(rows.size()), dim = c.index_channels,
                  count = any(1, 40);
        const auto heads = static_cast<std::size_t>(c.index_heads);
        // Whole numbers up to 127, which the device rounds to themselves.
        std::vector<float16> q(static_cast<std::size_t>(all * dim) * heads);
        std::vector<float> weights(static_cast<std::size_t>(all) * heads);
        for (std::size_t i = 0; i < q.size(); ++i)
            q[i] =
                float16(i % static_cast<std::size_t>(dim) == 0 ? 127.0f : static_cast<float>(any(-127, 127)));
        for (float& w : weights) w = test::normal(r);
        const test::device_buffer<float16> q_device(q);
        const test::device_buffer<float> weights_device(weights);
        test::device_buffer<int> positions(static_cast<std::size_t>(all * count));
        positions.poison();
        ok(c.gpu.select(layer, token_view<const float16>(q_device.get(), all, c.index_heads, dim),
                        weights_device.get(), n, count, positions.get(), c.stream));
        CUDA_OK(cudaStreamSynchronize(c.stream));
        const std::vector<int> got = positions.download();
        workspace space;
        for (std::size_t b = 0; b < rows.size(); ++b) {
            const auto own = got.begin() + static_cast<std::ptrdiff_t>(b) * n * count;
            if (rows[b] == nullptr) {
                CHECK(std::count(own, own + n * count, -1) == n * count, "%s: a row that is not there", name);
                continue;
            }
            const kvq::sequence& s = rows[b]->host;
            const int held = s.tokens(), m = std::min(n, held);
            std::vector<int> want(static_cast<std::size_t>(m * count));
            const std::size_t first =
                (b * static_cast<std::size_t>(n) + static_cast<std::size_t>(n - m)) * heads;
            rows[b]->host.select(
                layer,
                token_view<const float16>(&q[first * static_cast<std::size_t>(dim)], m, c.index_heads, dim),
                &weights[first], count, want.data(), serial_executor{}, space);
            std::vector<float> k(static_cast<std::size_t>(held * dim));
            s.dequantize(layer, tensor::key, 0, token_view<float>(k.data(), held, 1, dim));
            // Queries that turn for moved keys are rounded to 8 bits, and are no whole numbers then.
            bool turned = false;
            for (const page_span& span :
                 kvq::detail::sequence_access::tables(s)[static_cast<std::size_t>(layer)].spans)
                turned = turned || span.shift != 0;
            const auto score = [&](int query, int t, double& terms, double& rounded) {
                double sum = 0.0;
                for (std::size_t h = 0; h < heads; ++h) {
                    const std::size_t at = first + static_cast<std::size_t>(query) * heads + h;
                    double dot = 0.0;
                    for (int d = 0; d < dim; ++d)
                        dot += static_cast<double>(k[static_cast<std::size_t>(t * dim + d)]) *
                               static_cast<double>(static_cast<float>(
                                   q[at * static_cast<std::size_t>(dim) + static_cast<std::size_t>(d)]));
                    for (int d = 0; d < dim && turned; ++d)
                        rounded += std::abs(static_cast<double>(weights[at]) *
                                            static_cast<double>(k[static_cast<std::size_t>(t * dim + d)])) *
                                   127.0 * std::sqrt(2.0) / 253.0;
                    sum += static_cast<double>(weights[at]) * std::max(dot, 0.0);
                    terms += std::abs(static_cast<double>(weights[at]) * dot);
                }
                return sum;
            };
            for (int i = 0; i < m; ++i) {
                std::vector<int> have(own + (n - m + i) * count, own + (n - m + i + 1) * count),
                    best(want.begin() + i * count, want.begin() + (i + 1) * count), more, less;
                const int found = std::min(count, held - m + i + 1);
                const auto end = have.begin() + found;
                CHECK(std::is_sorted(have.begin(), end) && std::count(end, have.end(), -1) == count - found &&
                          have.front() >= 0,
                      "%s, step %d: positions of %d of %d tokens", name, step, found, count);
                best.resize(static_cast<std::size_t>(found));
                std::sort(best.begin(), best.end());
                // Others only where scores are as close as products are exact.
                std::set_difference(have.begin(), end, best.begin(), best.end(), std::back_inserter(more));
                std::set_difference(best.begin(), best.end(), have.begin(), end, std::back_inserter(less));
                for (std::size_t j = 0; j < more.size() && more.size() == less.size(); ++j) {
                    double terms = 0.0, rounded = 0.0;
                    const double x = score(i, more[j], terms, rounded), y = score(i, less[j], terms, rounded);
                    CHECK(std::abs(x - y) <= 3e-4 * terms + rounded,
                          "%s, step %d: token %d of score %g in place of %d, %g", name, step, more[j], x,
                          less[j], y);
                }
                CHECK(more.size() == less.size(), "%s, step %d: %zu of %zu tokens differ", name, step,
                      more.size(), best.size());
                ++selected;
            }
        }
    }
    void decode() {
        const int n = any(1, 3);
        std::vector<pair*> rows;
        for (pair& p : pairs)
            if (rows.size() < 3 && any(0, 3) > 0 && fits(p, 12 * n)) rows.push_back(&p);
        if (rows.empty()) return;
        if (rows.size() < 3 && any(0, 4) == 0) rows.insert(rows.begin(), nullptr);
        std::vector<cuda::sequence_id> batch;
        for (const pair* p : rows) batch.push_back(p ? p->id : cuda::sequence_id{});
        for (int i = any(1, 12); i > 0; --i) {
            const int all = n * static_cast<int>(rows.size());
            c.write(r, keys, values, all);
            ok(c.gpu.begin_step(batch, n, c.stream));
            append(all);
            for (std::size_t b = 0; b < rows.size(); ++b)
                if (rows[b]) host_append(rows[b]->host, static_cast<int>(b) * n, n);
            if (i == 1) {
                attend(rows, any(1, n));
                select(rows, any(1, n));
            }
            CUDA_OK(cudaStreamSynchronize(c.stream));
        }
    }
    /// Would new tokens go to a page whose keys have moved?
    bool opened(const pair& p) const {
        const auto& table = kvq::detail::sequence_access::tables(p.host)[0];
        return table.has_open_span() && table.spans.back().shift != 0;
    }
    void draft() {
        std::vector<pair*> rows;
        for (pair& p : pairs)
            if (rows.size() < 3 && any(0, 1) == 0 && fits(p, 3) && !opened(p)) rows.push_back(&p);
        if (rows.empty()) return;
        const int n = any(1, 3), all = n * static_cast<int>(rows.size());
        std::vector<cuda::sequence_id> batch;
        std::vector<std::vector<int>> paths;
        std::vector<std::span<const int>> spans;
        for (const pair* p : rows) {
            batch.push_back(p->id);
            std::vector<int>& path = paths.emplace_back();
            for (int i = 0; i < n; ++i)
                if (any(0, 2) > 0) path.push_back(i);
        }
        c.write(r, keys, values, all);
        ok(c.gpu.begin_draft(batch, n, c.stream));
        append(all);
        for (std::size_t b = 0; b < rows.size(); ++b)
            host_append(rows[b]->host, static_cast<int>(b) * n, n, true);
        attend(rows, any(1, n), n);
        for (std::size_t b = 0; b < rows.size(); ++b) {
            spans.emplace_back(paths[b]);
            rows[b]->host.keep(paths[b]);
        }
        CUDA_OK(cudaStreamSynchronize(c.stream));
        ok(c.gpu.keep(batch, spans, c.stream));
        ++kept;
    }
    void prompt() {
        pair& p = one();
        const int n = any(1, any(0, 2) > 0 ? 20 : longest_prompt);
        if (!fits(p, n)) return;
        c.write(r, keys, values, n);
        ok(c.gpu.begin_prompt(p.id, n, c.stream));
        if (any(0, 2) == 0) {
            append(n);
            host_append(p.host, 0, n);
            CUDA_OK(cudaStreamSynchronize(c.stream));
            return;
        }
        ++prompts;
        workspace space;
        const int last = c.count() - 1;
        const auto index_keys = c.rows(keys.data(), last, 0, n, tensor::key);
        ok(c.gpu.append(last, c.rows(c.k.get(), last, 0, n, tensor::key), no_rows(), c.stream));
        p.host.append(last, index_keys, no_rows());
        select({&p}, n);
        for (int layer = 0; layer < last; ++layer) {
            const int dim = c.key_dim(layer), width = c.value_dim(layer);
            const std::vector<float16> x = queries(n, layer);
            const modifiers how = some_modifiers(c.is_latent(layer));
            const std::vector<float> sink(static_cast<std::size_t>(c.q_heads),
                                          how.sink_logits ? 1.5f : -INFINITY);
            const test::device_buffer<float> logits(sink);
            ok(c.gpu.prefill(layer, c.rows(c.k.get(), layer, 0, n, tensor::key),
                             c.rows(c.v.get(), layer, 0, n, tensor::value),
                             token_view<const float16>(c.q.get(), n, c.q_heads, dim),
                             token_view<float16>(c.out.get(), n, c.q_heads, width),
                             {.scale = 0.125f,
                              .softcap = how.softcap,
                              .window = how.window,
                              .window_sinks = how.window_sinks,
                              .sink_logits = how.sink_logits ? logits.get() : nullptr,
                              .lse = c.lse.get()},
                             c.stream));
            CUDA_OK(cudaStreamSynchronize(c.stream));
            const auto y = c.out.download();
            const auto got_lse = c.lse.download();
            std::vector<float> want(static_cast<std::size_t>(n * c.q_heads * width)),
                want_lse(static_cast<std::size_t>(n * c.q_heads));
            output_view to = token_view<float>(want.data(), n, c.q_heads, width);
            to = to.with_lse(want_lse.data());
            p.host.prefill(
                layer, c.rows(keys.data(), layer, 0, n, tensor::key),
                c.rows(values.data(), layer, 0, n, tensor::value),
                token_view<const float16>(x.data(), n, c.q_heads, dim), to,
                mods{sink_window{how.window == 0 ? max_tokens : how.window, how.window_sinks ? sinks : 0},
                     learned_sinks{sink}, softcap{how.softcap == 0.0f ? 1e4f : how.softcap},
                     score_scale{0.125f}},
                serial_executor{}, space);
            for (int i = 0; i < n * c.q_heads; ++i) {
                double error = 0.0, size = 0.0;
                for (int d = i * width; d < (i + 1) * width; ++d) {
                    const double a = static_cast<double>(want[static_cast<std::size_t>(d)]),
                                 b = static_cast<double>(static_cast<float>(y[static_cast<std::size_t>(d)]));
                    error += (a - b) * (a - b);
                    size += a * a;
                    if (!(b == b)) error = INFINITY;
                }
                const auto at = static_cast<std::size_t>(i);
                CHECK(std::sqrt(error / size) <= 4e-3,
                      "%s, step %d, layer %d: error %.3g of prompt row %d of %d behind %d tokens", name, step,
                      layer, std::sqrt(error / size), i / c.q_heads, n, p.host.tokens() - n);
                CHECK(std::abs(got_lse[at] - want_lse[at]) <= 3e-3f * (1.0f + std::abs(want_lse[at])),
                      "%s, step %d, layer %d: lse %g of prompt row %d, the CPU's %g", name, step, layer,
                      static_cast<double>(got_lse[at]), i / c.q_heads, static_cast<double>(want_lse[at]));
            }
        }
    }
    void requantize() {
        std::vector<cuda::sequence_id> ids;
        std::vector<kvq::sequence*> hosts;
        for (pair& p : pairs)
            if (any(0, 1) == 0) {
                ids.push_back(p.id);
                hosts.push_back(&p.host);
            }
        workspace space;
        const auto on_the_cpu = [&](std::span<kvq::sequence* const> some, requantize_request h) {
            for (int layer = 0; layer < c.count(); ++layer) {
                if (!c.is_latent(layer)) continue;
                h.first_layer = layer;
                h.last_layer = layer + 1;
                requantized +=
                    static_cast<int>(c.cpu.requantize(some, h, {}, serial_executor{}, space).pages);
            }
        };
        if (any(0, 2) == 0) {
            // All sequences: stepping down leaves pages that others hold.
            ids.clear();
            hosts.clear();
            for (pair& p : pairs) {
                ids.push_back(p.id);
                hosts.push_back(&p.host);
            }
            const int ages[] = {any(0, 200), any(200, 300)}, formats[] = {c.wide, 0};
            const cuda::tier tiers[] = {{ages[0], c.names[static_cast<std::size_t>(formats[0])]},
                                        {ages[1], c.names[static_cast<std::size_t>(formats[1])]}};
            ok(c.gpu.step_down(ids, tiers, c.stream));
            for (int i = 0; i < 2; ++i)
                for (kvq::sequence* const h : hosts)
                    on_the_cpu(std::span(&h, 1), {.key = formats[i],
                                                  .last_token = std::max(0, h->tokens() - ages[i]),
                                                  .only_smaller = true});
            ++lowered;
            return;
        }
        const int format = any(0, 1) * c.wide, first = any(0, 1) * any(0, 300);
        cuda::requantize_request g;
        g.format = c.names[static_cast<std::size_t>(format)];
        g.first_token = first;
        g.last_token = any(0, 1) == 0 ? first + any(0, 300) : g.all;
        g.new_pages = any(0, 2) == 0;
        g.only_smaller = any(0, 3) == 0;
        ok(c.gpu.requantize(ids, g, c.stream));
        on_the_cpu(hosts, {.key = format,
                           .first_token = g.first_token,
                           .last_token = g.last_token,
                           .only_smaller = g.only_smaller,
                           .new_pages = g.new_pages});
    }
    bool same_values(const kvq::page& a, const kvq::page& b, tensor role, int dim, int of_heads, int count) {
        const block_shape sa{role, a.tokens, dim}, sb{role, b.tokens, dim};
        using S = full<float16>;
        for (std::size_t h = 0; h < static_cast<std::size_t>(of_heads); ++h)
            for (int t = 0; t < count; ++t)
                for (int d = 0; d < dim; ++d)
                    if (std::memcmp(a.data() + h * S{}.block_bytes(sa) +
                                        2 * S::element(value_layout<float16>(sa), sa, t, d),
                                    b.data() + h * S{}.block_bytes(sb) +
                                        2 * S::element(value_layout<float16>(sb), sb, t, d),
                                    2) != 0)
                        return false;
        return true;
    }
    /// Are both sides the same, and are there no pages of values of latents?
    void compare(const pair& p) {
        kvq::sequence came = c.cpu.new_sequence();
        ok(cuda::offload(c.gpu, p.id, came, c.stream));
        const usage_report here = c.gpu.usage(p.id), there = p.host.usage();
        CHECK(here.tokens == there.tokens && here.quantized == there.quantized &&
                  here.rollback == there.rollback,
              "%s, step %d: %zu bytes quantized and %zu of copies for %d tokens, the CPU has %zu and %zu for "
              "%d",
              name, step, here.quantized, here.rollback, here.tokens, there.quantized, there.rollback,
              there.tokens);
        CHECK(c.gpu.trim_limit(p.id) == p.host.trim_limit(), "%s, step %d: trims reach %d, the CPU's %d",
              name, step, c.gpu.trim_limit(p.id), p.host.trim_limit());
        const auto &have = kvq::detail::sequence_access::tables(came),
                   &want = kvq::detail::sequence_access::tables(p.host);
        for (int layer = 0; layer < c.count(); ++layer) {
            const auto &a = have[static_cast<std::size_t>(layer)], &b = want[static_cast<std::size_t>(layer)];
            const bool same = a.size() == b.size() && a.committed == b.committed && a.tokens == b.tokens &&
                              a.targets[0] == b.targets[0] && a.targets[1] == b.targets[1];
            CHECK(same, "%s, step %d, layer %d: %d spans, %d committed, %d tokens; the CPU has %d, %d, %d",
                  name, step, layer, a.size(), a.committed, a.tokens, b.size(), b.committed, b.tokens);
            if (!same) continue;
            for (int i = 0; i < a.size(); ++i)
                for (const tensor role : {tensor::key, tensor::value}) {
                    const auto at = static_cast<std::size_t>(role);
                    const page_ref &m = a[i].pages[at], &n = b[i].pages[at];
                    CHECK(static_cast<bool>(m) == (role == tensor::key || !c.keys_alone(layer)) &&
                              static_cast<bool>(m) == static_cast<bool>(n),
                          "%s, step %d, layer %d: page %d of tensor %zu", name, step, layer, i, at);
                    if (!m || !n) continue;
                    const int dim = c.cpu.shape(layer).dim(role);
                    const bool equal =
                        m->format == n->format &&
                        (m->format == 0
                             ? same_values(*m, *n, role, dim, c.heads(layer), a[i].tokens)
                             : m->bytes == n->bytes && std::memcmp(m->data(), n->data(), m->bytes) == 0);
                    CHECK(equal,
                          "%s, step %d, layer %d: page %d (tokens %d to %d, formats %d and %d) differs", name,
                          step, layer, i, a[i].first_token, a[i].end(), m->format, n->format);
                }
        }
    }
    void move() {
        pair& p = one();
        compare(p);
        ++moved;
        if (any(0, 2) == 0) return test::move_by_file(c.gpu, p.id, c.cpu, p.host, c.stream, name, false);
        kvq::sequence away = c.cpu.new_sequence();
        if (any(0, 1) == 0) {  // to a store of prefixes, on the device or in host memory
            std::vector<token_id> text(static_cast<std::size_t>(p.host.tokens()) + 1);
            for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<token_id>(i * i % 101);
            cuda::prefixes<> store(
                c.gpu, {.bytes = {.device = any(0, 1) == 0 ? 0 : ~std::size_t{0}}, .min_prefix_tokens = 1});
            cuda::found_prefix found;
            ok(store.park(std::span(text).first(text.size() - 1), p.id, c.stream));
            ok(store.fetch(text, found, c.stream));
            CHECK(found.tokens == p.host.tokens(), "%s, step %d: %d tokens of %d are a prefix", name, step,
                  found.tokens, p.host.tokens());
            p.id = found.id;
            ok(cuda::offload(c.gpu, p.id, away, c.stream));
            for (int layer = 0; layer < c.count(); ++layer) {
                const int n = p.host.tokens(), of_heads = c.heads(layer), channels = c.key_dim(layer);
                std::vector<float> x[2];
                for (const kvq::sequence* const from : {&p.host, &away}) {
                    auto& to = x[from == &away];
                    to.resize(static_cast<std::size_t>(n * of_heads * channels));
                    from->dequantize(layer, tensor::key, 0,
                                     token_view<float>(to.data(), n, of_heads, channels));
                }
                CHECK(std::memcmp(x[0].data(), x[1].data(), x[0].size() * sizeof(float)) == 0,
                      "%s, step %d: a prefix has other keys in layer %d", name, step, layer);
            }
            p.host = std::move(away);
            return;
        }
        ok(cuda::offload(c.gpu, p.id, away, c.stream));
        ok(c.gpu.free(p.id));
        p.host = std::move(away);
        if (any(0, 1) == 0 && fits(p, 40)) {
            c.write(r, keys, values, 40);
            host_append(p.host, 0, 40);
        }
        ok(cuda::onload(p.host, c.gpu, p.id, c.stream));
    }
    /// Erases, shifts or splices, where the device does not refuse it.
    void rearrange() {
        pair &p = one(), &other = one();
        const int tokens = p.host.tokens();
        if (tokens < sinks + 2) return;
        const bool old = tokens > sinks + 2 * c.page && any(0, 3) > 0;
        const int end = old ? tokens - c.page : tokens;
        int first = any(sinks, end), last = any(first, end);
        const int what = any(0, 2), by = any(-300, 300);
        cuda::status s;
        if (what == 2) {
            const int n = sinks + (tokens - sinks) / c.page * c.page;
            ok(c.gpu.trim(p.id, n));
            p.host.trim(n);
            const int theirs = other.host.tokens();
            first = std::min(sinks, theirs);
            last = std::min(theirs, first + max_tokens / 2 - n);
            if (last < first) return;
            s = c.gpu.splice(p.id, other.id, first, last, c.stream);
        } else {
            s = what == 0 ? c.gpu.erase(p.id, first, last) : c.gpu.shift(p.id, first, last, by);
        }
        if (!s) {
            bool named = false;
            for (const char* const reason :
                 {"within a 16-bit page", "are sinks of which", "whole pages; trim",
                  "that an erase has closed", "fewer than its"})
                named = named || std::strstr(s.message, reason) != nullptr;
            CHECK(named, "%s, step %d: %s", name, step, s.message);
            ++unmoved;
            return;
        }
        if (what == 0)
            p.host.erase(first, last);
        else if (what == 1)
            p.host.shift(first, last, by);
        else
            p.host.splice(other.host, first, last);
        ++(what == 2 ? spliced : rearranged);
        compare(p);
    }
    /// NaN and infinities in both parts of a latent: the CPU's bytes, and each is counted.
    void check_odd() {
        const pair p{c.gpu.new_sequence(), c.cpu.new_sequence()};
        const int n = 4 * c.page;
        c.write(r, keys, values, n);
        const int last = c.count() - 2;
        for (const int layer : {0, last})
            for (const int channel : {0, 5, c.values - 1, c.values, c.channels - 1}) {
                const float odd[] = {NAN, INFINITY, -INFINITY};
                const int at = (sinks + 3 + channel % 7) * c.channels + channel;
                keys[static_cast<std::size_t>(layer * c.room) * c.row + static_cast<std::size_t>(at)] =
                    float16(odd[channel % 3]);
            }
        c.k.upload(keys);
        ok(c.gpu.begin_prompt(p.id, n, c.stream));
        append(n);
        auto host = p.host.fork();
        host_append(host, 0, n);
        compare({p.id, std::move(host)});
        std::vector<unsigned> counts(static_cast<std::size_t>(c.count()));
        ok(c.gpu.not_finite(counts, c.stream));
        const auto count = [&](int layer) { return counts[static_cast<std::size_t>(layer)]; };
        CHECK(count(0) == 5 && count(last) == 5 && count(last - 1) == 0,
              "%s: %u, %u and %u numbers are not finite", name, count(0), count(last - 1), count(last));
        ok(c.gpu.free(p.id));
    }
    void run(int steps) {
        check_odd();
        for (step = 0; step < steps; ++step) {
            const int what = any(0, 99);
            if (what < 40) {
                decode();
            } else if (what < 50) {
                draft();
            } else if (what < 64) {
                prompt();
            } else if (what < 76) {
                pair& p = one();
                const int tokens = p.host.tokens();
                const int n = any(0, 2) == 0 ? any(0, tokens) : std::max(0, tokens - any(0, rollback));
                ok(c.gpu.trim(p.id, n));
                p.host.trim(n);
            } else if (what < 84) {
                requantize();
            } else if (what < 89) {
                move();
            } else if (what < 94 && pairs.size() < 5) {
                pair& p = one();
                cuda::sequence_id copy;
                ok(c.gpu.fork(p.id, copy, c.stream));
                pairs.push_back({copy, p.host.fork()});
            } else if (what < 96 && pairs.size() < 5) {
                add();
            } else if (what < 98 && pairs.size() > 1) {
                ok(c.gpu.free(pairs.back().id));
                pairs.pop_back();
            }
            if (any(0, 4) == 0) rearrange();
            CHECK(c.gpu.usage().bytes == test::counted_memory::bytes,
                  "%s, step %d: usage is %zu bytes, allocated are %zu", name, step, c.gpu.usage().bytes,
                  test::counted_memory::bytes);
            if (step % 20 == 19) compare(one());
        }
        for (const pair& p : pairs) compare(p);
        std::printf(
            "  %-28s %d steps, %d prompts, %d drafts, %d pages requantized, %d steps down, %d moves, "
            "%d selections, %d erases and shifts, %d splices, %d refused, error %.2e\n",
            name, steps, prompts, kept, requantized, lowered, moved, selected, rearranged, spliced, unmoved,
            worst);
    }
};

[[maybe_unused]] void refused(const cuda::status& s, const char* words) {
    CHECK(!s && std::strstr(s.message, words) != nullptr, "\"%s\" is not in \"%s\"", words, s.message);
}

/// Latents in the records of DeepSeek V3.2, and requantized to another format and back: the bytes of the CPU;
/// outputs in double arithmetic on what the CPU dequantizes.
[[maybe_unused]] void check_records() {
    constexpr int page = 32, dim = 576, values = 512, heads = 2, n = 3 * page + 50, room = n + 2;
    using kivi4 = typename kivi<4, 32>::keys;
    using records = records_of<record_layout_number("mla-656")>;
    static const cuda::device_format compiled[] = {
        cuda::make_device_format<bfloat16, cuda::latent_pair<records, values, 64, values, page>,
                                 cuda::latent_pair<kivi4, values, 64, values, page>>()};
    const std::vector<kvq::layer> list(1, latent_attention(values, 64));
    kvq::cache cpu(list, {.keys = {make_format<scalar>(token_records(record_layout_named("mla-656"))),
                                   with_fp16_channels(make_format<kivi4, scalar>(), 64)},
                          .values = make_format<int8, scalar>(),
                          .window = make_format<full<bfloat16>, scalar>(),
                          .sinks = 4,
                          .recent = 40,
                          .page_tokens = page});
    cuda::cache_options o;
    o.type = float_type::bf16;
    o.formats = {"mla-656", "kivi-4-g32-fp16x64"};
    o.page_tokens = page;
    o.sinks = 4;
    o.recent = 40;
    o.max_tokens = room;
    o.query_heads = heads;
    cudaStream_t stream;
    CUDA_OK(cudaStreamCreate(&stream));
    {
        cuda::cache gpu;
        const auto ok = [](const cuda::status& s) { CHECK(s, "records: %s", s.message); };
        ok(gpu.open(list, o, compiled, stream));
        test::rng r(13);
        std::vector<bfloat16> keys(room * dim), q(heads * dim);
        for (std::size_t i = 0; i < keys.size(); ++i)
            keys[i] = bfloat16((i % dim >= values ? 8.0f : 1.0f) * test::normal(r));
        for (bfloat16& x : q) x = bfloat16(0.5f * test::normal(r));
        const test::device_buffer<bfloat16> keys_device(keys), q_device(q);
        test::device_buffer<bfloat16> out(heads * values);
        cuda::sequence_id id = gpu.new_sequence();
        kvq::sequence host = cpu.new_sequence();
        const auto rows = [&](const bfloat16* x, int first, int count) {
            return token_view<const bfloat16>(x + first * dim, count, 1, dim);
        };
        const auto compare = [&](const char* when) {
            kvq::sequence came = cpu.new_sequence();
            ok(cuda::offload(gpu, id, came, stream));
            CHECK(test::saved(came) == test::saved(host), "records, %s: not the bytes of the CPU", when);
        };
        ok(gpu.begin_prompt(id, n, stream));
        ok(gpu.append(0, rows(keys_device.get(), 0, n), no_rows(), stream));
        host.append(0, rows(keys.data(), 0, n), no_rows());
        compare("a prompt");
        workspace space;
        kvq::sequence* const hosts[] = {&host};
        for (const int format : {1, 0}) {
            cuda::requantize_request g;
            g.format = o.formats[static_cast<std::size_t>(format)];
            g.last_token = 4 + 2 * page;
            ok(gpu.requantize(std::span(&id, 1), g, stream));
            cpu.requantize(hosts, {.key = format, .last_token = g.last_token}, {}, serial_executor{}, space);
            compare(format == 1 ? "records to codes" : "codes to records");
        }
        ok(gpu.begin_step(std::span(&id, 1), 1, stream));
        ok(gpu.attend(0, rows(keys_device.get(), n, 1), no_rows(),
                      token_view<const bfloat16>(q_device.get(), 1, heads, dim),
                      token_view<bfloat16>(out.get(), 1, heads, values), {.scale = 0.07f}, stream));
        host.append(0, rows(keys.data(), n, 1), no_rows());
        CUDA_OK(cudaStreamSynchronize(stream));
        compare("a step");
        std::vector<float> x((n + 1) * dim);
        host.dequantize(0, tensor::key, 0, token_view<float>(x.data(), n + 1, 1, dim));
        const std::vector<bfloat16> got = out.download();
        for (int h = 0; h < heads; ++h) {
            std::vector<double> weights;
            double sum = 0.0, error = 0.0, size = 0.0;
            for (int t = 0; t <= n; ++t) {
                double score = 0.0;
                for (int c = 0; c < dim; ++c)
                    score +=
                        static_cast<double>(static_cast<float>(q[static_cast<std::size_t>(h * dim + c)])) *
                        static_cast<double>(x[static_cast<std::size_t>(t * dim + c)]);
                weights.push_back(std::exp(0.07 * score));
                sum += weights.back();
            }
            for (int c = 0; c < values; ++c) {
                double want = 0.0;
                for (int t = 0; t <= n; ++t)
                    want += weights[static_cast<std::size_t>(t)] / sum *
                            static_cast<double>(x[static_cast<std::size_t>(t * dim + c)]);
                const double have =
                    static_cast<double>(static_cast<float>(got[static_cast<std::size_t>(h * values + c)]));
                error += (have - want) * (have - want);
                size += want * want;
            }
            CHECK(error <= 16e-6 * size, "records: relative error %g of head %d", std::sqrt(error / size), h);
        }
    }
    CUDA_OK(cudaStreamDestroy(stream));
}

template <class Caches>
void check_refusals() {
    Caches c(4, 40, 0);
    const auto open = [&](std::vector<kvq::layer> list, auto change) {
        cuda::cache_options o = c.options(4, 40, 0);
        if (list.size() != o.rotary.size()) o.rotary.clear();
        change(o);
        cuda::cache other;
        return other.open(std::move(list), o, c.compiled(), c.stream);
    };
    const auto as_it_is = [](cuda::cache_options&) {};
    refused(open({latent_attention(c.values + 16, c.channels - c.values)}, as_it_is), "of latents");
    refused(open({latent_attention(c.channels, 0, c.values)},
                 [&](cuda::cache_options& o) { o.formats = {"kivi-4-g32"}; }),
            "nothing was compiled for kivi-4-g32");
    const int off = c.channels - c.values - 1;
    refused(open({latent_attention(c.channels - off, off, c.values)},
                 [&](cuda::cache_options& o) { o.formats = {c.names[0]}; }),
            "rotary channels in 8 or 16 bits");
    refused(open(c.list, [](cuda::cache_options& o) { o.query_heads = 0; }), "query_heads is 0");
    refused(c.gpu.check_equal_layers("this"), "this takes caches of equal layers");

    cuda::sequence_id id = c.gpu.new_sequence();
    refused(c.gpu.calibrate(c.names[0], calibration({.layers = 4, .kv_heads = 1, .head_dim = c.values}),
                            c.stream),
            "latents");
    CHECK(c.gpu.begin_step(std::span(&id, 1), 1, c.stream), "a step");
    const auto keys = c.rows(c.k.get(), 0, 0, 1, tensor::key);
    refused(c.gpu.append(0, keys, keys, c.stream), "keys alone");
    CHECK(c.gpu.append(0, keys, no_rows(), c.stream), "latents");
    const int heads = 60000;  // more than fit beside the shares of any device
    refused(c.gpu.attend(0, token_view<const float16>(c.q.get(), 1, heads, c.channels),
                         token_view<float16>(c.out.get(), 1, heads, c.values), {.query_tokens = 1}, c.stream),
            "query_heads");
    refused(
        c.gpu.attend(0, token_view<const float16>(c.q.get(), 1, c.q_heads, c.channels),
                     token_view<float16>(c.out.get(), 1, c.q_heads, c.values), {.softcap = -30.0f}, c.stream),
        "softcap is -30");
    CHECK(c.gpu.begin_step(std::span(&id, 1), 1, c.stream), "a step");
    CHECK(c.gpu.attend(0, keys, no_rows(), token_view<const float16>(c.q.get(), 1, c.q_heads, c.channels),
                       token_view<float16>(c.out.get(), 1, c.q_heads, c.values), {}, c.stream),
          "latents that are stored and attended");
    refused(c.gpu.append(0, keys, no_rows(), c.stream), "it has the tokens of this step already");

    // A prompt that is refused is as if nobody had tried it. States alone, of slices: zeros as queries, so
    // that every token has the weight 1.
    constexpr int n = 100;
    test::rng r(7);
    std::vector<float16> x, y;
    c.write(r, x, y, n);
    c.q.clear();
    c.states.poison();
    id = c.gpu.new_sequence();
    CHECK(c.gpu.begin_prompt(id, n, c.stream), "a prompt");
    const auto prefill = [&](int dim, int q_heads, float16* out, const cuda::prefill_options& how) {
        return c.gpu.prefill(0, c.rows(c.k.get(), 0, 0, n, tensor::key), no_rows(),
                             token_view<const float16>(c.q.get(), n, q_heads, dim),
                             token_view<float16>(out, n, q_heads, c.values), how, c.stream);
    };
    refused(prefill(c.channels, c.q_heads, c.out.get(), {.softcap = -30.0f}), "softcap is -30");
    refused(prefill(c.values, c.q_heads, c.out.get(), {}), "q 2 x 64");
    refused(prefill(c.channels, 0, c.out.get(), {}), "q 0 x 80");
    refused(prefill(c.channels, heads, c.out.get(), {}), "query_heads");
    refused(prefill(c.channels, c.q_heads, nullptr, {}), "null pointer");
    CHECK(prefill(c.channels, c.q_heads, nullptr, {.state_out = c.states.get()}), "states of a prompt");
    const std::vector<float> states = c.states.download();
    for (int i = 0; i < n * c.q_heads; ++i) {
        const float sum = states[static_cast<std::size_t>(i * (c.values + 2) + 1)];
        CHECK(sum == static_cast<float>(i / c.q_heads + 1), "row %d of a prompt sees %g tokens", i,
              static_cast<double>(sum));
    }
}

}  // namespace

// Parts, each compiled for itself.
#ifndef PART
#define PART 0
#endif
int main([[maybe_unused]] int argc, [[maybe_unused]] char** argv) {
#ifdef __CUDACC__
    int steps = 600;
#else
    int steps = 120;
#endif
    if (argc > 1) steps = std::atoi(argv[1]);
#if PART == 0
    using few = caches<64, 16, 32, 2>;
    check_refusals<few>();
    history<few>(4, 40, 16, 1, "latents of 64 + 16").run(steps);
#elif PART == 1
    check_records();
    history<caches<64, 16, 32, 2, float_rows<e4m3>>>(0, 3, 0, 2, "no sinks, 3 recent").run(steps / 2);
#else
    history<caches<512, 64, 32, 16>>(4, 64, 16, 3, "latents of 512 + 64").run(steps / 10);
#endif
    CHECK(test::counted_memory::bytes == 0, "%zu bytes were not given back", test::counted_memory::bytes);
    return test::report("cache_latents");
}
