// A cache that owns its pages (kvq/backends/cuda/cache.cuh) against a CPU cache that does the same: random histories of steps, prompts,
// trims, forks, requantizing and offload with the same bytes afterwards, attention against double arithmetic, a graph that is
// replayed while contexts grow, bytes of memory, refusals.
#include <kvq/backends/cuda.cuh>
#include <kvq/backends/cuda/offload.cuh>
#include <kvq/cache/requantize.hpp>
#include <kvq/cache/step_down.hpp>
#include <kvq/format/make_format.hpp>

#include "support.cuh"

using namespace kvq;

namespace {

constexpr int dim = 64, layers = 2, heads = 2, q_heads = 4;

#if PART == 0
#ifdef __CUDACC__
constexpr int long_run = 4000, graph_steps = 400;
#else
constexpr int long_run = 350, graph_steps = 100;
#endif
constexpr int page = 32;
using kivi4 = cuda::kivi_format<4, 32, dim, page>;
using wide = cuda::format<int8, int8, dim, page>;

const cuda::device_format& compiled() {
    static const cuda::device_format f = cuda::make_device_format<float16, kivi4, wide>();
    return f;
}
/// The same formats on the CPU.
struct host_formats {
    format_list keys = {make_format<kivi4::keys, scalar>(), make_format<int8, scalar>()};
    format_list values = {make_format<kivi4::values, scalar>(), make_format<int8, scalar>()};
    std::vector<std::string> names = {"kivi-4-g32", "int8"};
};
#else
constexpr int page = 64;

const cuda::device_format& compiled() {
    static const cuda::device_format f =
        cuda::make_device_format<float16, cuda::preset_format<low2, dim, page>>();
    return f;
}
/// Keys with a plan of widths and feedback from random statistics.
const calibration& statistics() {
    static const calibration all = [] {
        calibration c({.layers = layers, .kv_heads = heads, .head_dim = dim}, true);
        test::rng r(3);
        std::vector<float> x(128 * q_heads * dim);
        for (int layer = 0; layer < layers; ++layer)
            for (const int rows : {heads, q_heads}) {
                for (std::size_t i = 0; i < x.size(); ++i)
                    x[i] = test::normal(r) * (i % 7 == static_cast<std::size_t>(layer) ? 5.0f : 1.0f);
                if (rows == heads)
                    c.add_keys(layer, token_view<const float>(x.data(), 128, rows, dim));
                else
                    c.add_queries(layer, token_view<const float>(x.data(), 128, rows, dim));
            }
        return c;
    }();
    return all;
}
struct host_formats {
    format_list keys = make_format<scalar>(low2::keys(statistics()));
    format_list values = make_format<low2::values, scalar>();
    std::vector<std::string> names = {"low2"};
};
#endif

/// Device memory with a count of its bytes.
struct counted_memory {
    static inline std::size_t bytes = 0, limit = std::size_t{1} << 40;
    static cuda::device_allocator allocator() {
        cuda::device_allocator a;
        a.allocate = [](std::size_t n, void*) -> void* {
            void* p = nullptr;
            if (bytes + n > limit || cudaMalloc(&p, n) != cudaSuccess) return nullptr;
            CUDA_OK(cudaMemset(p, 0xff, n));
            bytes += n;
            return p;
        };
        a.release = [](void* p, std::size_t n, void*) {
            CUDA_OK(cudaFree(p));
            bytes -= n;
        };
        return a;
    }
};

struct both_options {
    int sinks = 4, recent = 40, rollback = 16, max_batch = 4, max_tokens = 1200, step_tokens = 3;
    int pool_tokens = 0, pool_sequences = 0;
    bool growing = true;
};

/// The same cache on both sides.
struct both_caches {
    both_options o;
    cudaStream_t stream;
    kvq::cache cpu;
    cuda::cache gpu;
    test::device_buffer<float16> k, v, q, out;

    static constexpr int room = 256;  // tokens of a launch

    explicit both_caches(const both_options& options)
        : o(options),
          cpu({.layers = layers, .kv_heads = heads, .head_dim = dim}, {.keys = host_formats().keys,
                                                                       .values = host_formats().values,
                                                                       .sinks = o.sinks,
                                                                       .recent = o.recent,
                                                                       .page_tokens = page,
                                                                       .rollback = o.rollback}),
          k(layers * room * heads * dim),
          v(k.size()),
          q(room * q_heads * dim),
          out(q.size()) {
        CUDA_OK(cudaStreamCreate(&stream));
        cuda::cache_options g;
        g.formats = host_formats().names;
        g.page_tokens = page;
        g.sinks = o.sinks;
        g.recent = o.recent;
        g.rollback = o.rollback;
        g.max_batch = o.max_batch;
        g.max_tokens = o.max_tokens;
        g.step_tokens = o.step_tokens;
        g.pool_tokens = o.pool_tokens;
        g.pool_sequences = o.pool_sequences;
        g.growing = o.growing;
        g.memory = counted_memory::allocator();
        const cuda::status s = gpu.open(cpu.shape(), g, std::span(&compiled(), 1), stream);
        CHECK(s, "%s", s.message);
    }
    ~both_caches() {
        CUDA_OK(cudaStreamSynchronize(stream));
        CUDA_OK(cudaStreamDestroy(stream));
    }

    /// One layer's part of the buffers.
    token_view<const float16> rows(const test::device_buffer<float16>& x, int layer, int tokens) const {
        return {x.get() + layer * room * heads * dim, tokens, heads, dim};
    }
    /// New values of all layers, [layer][room][head][dim], on both sides.
    void write(test::rng& r, std::vector<float16>& keys, std::vector<float16>& values) {
        keys.resize(k.size());
        values.resize(v.size());
        for (auto* x : {&keys, &values})
            for (float16& y : *x) y = float16(test::normal(r));
        k.upload(keys);
        v.upload(values);
    }
    void appended(kvq::sequence& s, const std::vector<float16>& keys, const std::vector<float16>& values,
                  int first, int count) {
        for (int layer = 0; layer < layers; ++layer) {
            const std::size_t at =
                static_cast<std::size_t>(layer * room + first) * static_cast<std::size_t>(heads * dim);
            s.append(layer, token_view<const float16>(&keys[at], count, heads, dim),
                     token_view<const float16>(&values[at], count, heads, dim));
        }
    }
};

struct pair {
    cuda::sequence_id id;
    kvq::sequence host;
};

/// Do two 16-bit pages hold the same first `count` tokens?
bool same_values(const kvq::page& a, const kvq::page& b, tensor role, int count) {
    const block_shape sa{role, a.tokens, dim}, sb{role, b.tokens, dim};
    using S = full<float16>;
    for (std::size_t h = 0; h < heads; ++h)
        for (int t = 0; t < count; ++t)
            for (int c = 0; c < dim; ++c)
                if (std::memcmp(a.data() + h * S{}.block_bytes(sa) +
                                    2 * S::element(value_layout<float16>(sa), sa, t, c),
                                b.data() + h * S{}.block_bytes(sb) +
                                    2 * S::element(value_layout<float16>(sb), sb, t, c),
                                2) != 0)
                    return false;
    return true;
}

/// Are both sides the same? The device's pages come by offload().
void compare(both_caches& c, const pair& p, const char* name, int step) {
    kvq::sequence moved = c.cpu.new_sequence();
    const cuda::status s = cuda::offload(c.gpu, p.id, moved, c.stream);
    CHECK(s, "%s, step %d: %s", name, step, s.message);
    CHECK(c.gpu.tokens(p.id) == p.host.tokens(), "%s, step %d: %d tokens, the CPU has %d", name, step,
          c.gpu.tokens(p.id), p.host.tokens());
    const auto &have = kvq::detail::sequence_access::tracks(moved),
               &want = kvq::detail::sequence_access::tracks(p.host);
    for (std::size_t layer = 0; layer < layers; ++layer) {
        const auto &a = have[layer], &b = want[layer];
        const bool same = a.size() == b.size() && a.committed == b.committed &&
                          a.first_copy == b.first_copy && a.tokens == b.tokens &&
                          a.targets[0] == b.targets[0] && a.targets[1] == b.targets[1];
        CHECK(same,
              "%s, step %d, layer %zu: %d spans, %d committed, copies from %d, %d tokens, target %d; the CPU "
              "has %d, %d, %d, %d, %d",
              name, step, layer, a.size(), a.committed, a.first_copy, a.tokens, a.targets[0], b.size(),
              b.committed, b.first_copy, b.tokens, b.targets[0]);
        if (!same) continue;
        for (int i = 0; i < a.size(); ++i) {
            const page_span &x = a[i], &y = b[i];
            CHECK(x.first_token == y.first_token && x.tokens == y.tokens && x.room == y.room,
                  "%s, step %d: span %d has tokens %d to %d, the CPU's %d to %d", name, step, i,
                  x.first_token, x.end(), y.first_token, y.end());
            for (const tensor role : {tensor::key, tensor::value}) {
                const auto at = static_cast<std::size_t>(role);
                const kvq::page &m = *x.pages[at], &n = *y.pages[at];
                CHECK(m.format == n.format, "%s, step %d, layer %zu: page %d has format %d, the CPU's %d",
                      name, step, layer, i, m.format, n.format);
                if (m.format != n.format) continue;
                const bool equal = m.format == 0
                                       ? same_values(m, n, role, x.tokens)
                                       : m.bytes == n.bytes && std::memcmp(m.data(), n.data(), m.bytes) == 0;
                CHECK(equal, "%s, step %d, layer %zu: %s of page %d (tokens %d to %d, format %d) differ",
                      name, step, layer, at == 0 ? "keys" : "values", i, x.first_token, x.end(), m.format);
                CHECK(static_cast<bool>(x.copies[at]) == static_cast<bool>(y.copies[at]),
                      "%s, step %d: page %d has %s 16-bit copy", name, step, i, x.copies[at] ? "a" : "no");
                if (x.copies[at] && y.copies[at])
                    CHECK(same_values(*x.copies[at], *y.copies[at], role, x.tokens),
                          "%s, step %d: 16-bit copies of page %d differ", name, step, i);
            }
        }
    }
}

/// Relative error of a row of the output against double arithmetic on what the CPU dequantizes.
double error_of(const kvq::sequence& s, int layer, int head, int seen, const float16* q, const float16* out) {
    std::vector<float> x[2];
    const int tokens = s.tokens();
    for (const tensor role : {tensor::key, tensor::value}) {
        auto& to = x[static_cast<int>(role)];
        to.resize(static_cast<std::size_t>(tokens) * heads * dim);
        s.dequantize(layer, role, 0, token_view<float>(to.data(), tokens, heads, dim));
    }
    std::vector<double> scores, want(dim, 0.0);
    double top = -INFINITY, sum = 0.0, error = 0.0, size = 0.0;
    const auto at = [&](int t, int c) {
        return static_cast<std::size_t>((t * heads + head / (q_heads / heads)) * dim + c);
    };
    for (int t = 0; t < seen; ++t) {
        double score = 0.0;
        for (int d = 0; d < dim; ++d)
            score += static_cast<double>(static_cast<float>(q[d])) * static_cast<double>(x[0][at(t, d)]);
        scores.push_back(score / std::sqrt(static_cast<double>(dim)));
        top = std::max(top, scores.back());
    }
    for (int t = 0; t < seen; ++t) {
        const double p = std::exp(scores[static_cast<std::size_t>(t)] - top);
        sum += p;
        for (int d = 0; d < dim; ++d)
            want[static_cast<std::size_t>(d)] += p * static_cast<double>(x[1][at(t, d)]);
    }
    for (int d = 0; d < dim; ++d) {
        const double a = sum > 0.0 ? want[static_cast<std::size_t>(d)] / sum : 0.0,
                     b = static_cast<double>(static_cast<float>(out[d]));
        error += (a - b) * (a - b);
        size += a * a;
        if (!(b == b)) error = INFINITY;
    }
    return size > 0.0 ? std::sqrt(error / size) : std::sqrt(error);
}

#if PART == 0
/// What both caches are asked to do, at random.
struct history {
    both_caches c;
    test::rng r;
    const char* name;
    std::vector<pair> pairs;
    int step = 0, refused = 0, deep = 0, moved = 0, requantized = 0;
    double worst = 0.0;

    history(const both_options& o, unsigned seed, const char* n) : c(o), r(seed), name(n) { add(); }

    int any(int low, int high) { return test::uniform(r, low, high); }
    pair& one() { return pairs[static_cast<std::size_t>(any(0, static_cast<int>(pairs.size()) - 1))]; }
    void ok(const cuda::status& s) { CHECK(s, "%s, step %d: %s", name, step, s.message); }
    void add() { pairs.push_back({c.gpu.new_sequence(), c.cpu.new_sequence()}); }
    bool fits(const pair& p, int n) const { return p.host.tokens() + n <= c.o.max_tokens; }

    /// Attends with the last `queries` tokens of the rows that a begin has named, in one layer, and compares some rows.
    void attend(const std::vector<pair*>& rows, int queries) {
        const int layer = any(0, layers - 1), n = static_cast<int>(rows.size()) * queries;
        std::vector<float16> x(c.q.size());
        for (float16& y : x) y = float16(test::normal(r));
        c.q.upload(x);
        c.out.poison();
        cuda::attention_options options;
        options.query_tokens = queries;
        options.early = any(0, 1) == 0;
        ok(c.gpu.attend(layer, token_view<const float16>(c.q.get(), n, q_heads, dim),
                        token_view<float16>(c.out.get(), n, q_heads, dim), options, c.stream));
        CUDA_OK(cudaStreamSynchronize(c.stream));
        const auto y = c.out.download();
        for (std::size_t b = 0; b < rows.size(); ++b)
            for (int i = 0; i < queries; ++i) {
                const int head = any(0, q_heads - 1);
                const std::size_t at =
                    ((b * static_cast<std::size_t>(queries) + static_cast<std::size_t>(i)) * q_heads +
                     static_cast<std::size_t>(head)) *
                    dim;
                if (rows[b] == nullptr) {
                    for (std::size_t d = 0; d < dim; ++d)
                        CHECK(static_cast<float>(y[at + d]) == 0.0f, "%s: a row that is not there has output",
                              name);
                    continue;
                }
                const int seen = rows[b]->host.tokens() - queries + i + 1;
                const double error = error_of(rows[b]->host, layer, head, std::max(0, seen), &x[at], &y[at]);
                worst = std::max(worst, error);
                CHECK(error <= 2e-3, "%s, step %d: error %.3g of row %zu at %d tokens", name, step, error, b,
                      rows[b]->host.tokens());
            }
    }

    void decode() {
        const int n = any(1, c.o.step_tokens);
        std::vector<pair*> rows;
        for (pair& p : pairs)
            if (static_cast<int>(rows.size()) < c.o.max_batch && any(0, 3) > 0 && fits(p, n))
                rows.push_back(&p);
        if (rows.empty()) return;
        std::shuffle(rows.begin(), rows.end(), r);
        if (static_cast<int>(rows.size()) < c.o.max_batch && any(0, 4) == 0)
            rows.insert(rows.begin() + any(0, static_cast<int>(rows.size())), nullptr);
        std::vector<cuda::sequence_id> batch;
        for (const pair* p : rows) batch.push_back(p ? p->id : cuda::sequence_id{});
        // Several steps of the same batch.
        for (int i = any(1, 12); i > 0; --i) {
            for (const pair* p : rows)
                if (p && !fits(*p, n)) return;
            std::vector<float16> keys, values;
            c.write(r, keys, values);
            ok(c.gpu.begin_step(batch, n, c.stream));
            const int tokens = n * static_cast<int>(rows.size());
            for (int layer = 0; layer < layers; ++layer)
                ok(c.gpu.append(layer, c.rows(c.k, layer, tokens), c.rows(c.v, layer, tokens), c.stream));
            for (std::size_t b = 0; b < rows.size(); ++b)
                if (rows[b]) c.appended(rows[b]->host, keys, values, static_cast<int>(b) * n, n);
            if (i == 1 && any(0, 3) == 0) attend(rows, n);
            CUDA_OK(cudaStreamSynchronize(c.stream));
        }
    }
    void prompt() {
        pair& p = one();
        const int n = any(1, any(0, 1) == 0 ? 20 : 200);
        if (!fits(p, n)) return;
        std::vector<float16> keys, values;
        c.write(r, keys, values);
        ok(c.gpu.begin_prompt(p.id, n, c.stream));
        for (int layer = 0; layer < layers; ++layer)
            ok(c.gpu.append(layer, c.rows(c.k, layer, n), c.rows(c.v, layer, n), c.stream));
        c.appended(p.host, keys, values, 0, n);
        if (any(0, 3) == 0) attend({&p}, std::min(n, 5));
    }
    void trim() {
        pair& p = one();
        const int tokens = p.host.tokens();
        int n = std::max(0, tokens - any(0, c.o.rollback));
        const int kind = any(0, 5);
        if (kind == 0) n = any(0, tokens);
        if (kind == 1 && tokens > c.o.sinks) n = c.o.sinks + any(0, (tokens - c.o.sinks) / page) * page;
        const cuda::status s = c.gpu.trim(p.id, n);
        if (s) {
            p.host.trim(n);
            deep += kind <= 1;
            return;
        }
        // The CPU, too, has lost the 16-bit values of the page, and would keep its codes.
        const auto& track = kvq::detail::sequence_access::tracks(p.host)[0];
        bool cuts = false;
        for (int i = c.o.sinks > 0 ? 1 : 0; i < track.committed; ++i)
            cuts = cuts || (track[i].first_token < n && n < track[i].end() && !track[i].copies[0]);
        CHECK(cuts, "%s, step %d: a trim from %d to %d is refused: %s", name, step, tokens, n, s.message);
        CHECK(std::strstr(s.message, "cut the quantized page") != nullptr, "%s", s.message);
        ++refused;
    }
    std::vector<pair*> some() {
        std::vector<pair*> chosen;
        for (pair& p : pairs)
            if (any(0, 1) == 0) chosen.push_back(&p);
        if (chosen.empty()) chosen.push_back(&one());
        return chosen;
    }
    void requantize() {
        std::vector<cuda::sequence_id> ids;
        std::vector<kvq::sequence*> hosts;
        for (pair* p : some()) {
            ids.push_back(p->id);
            hosts.push_back(&p->host);
        }
        workspace space;
        if (any(0, 3) == 0) {
            const int age = any(0, 200);
            const cuda::tier tiers[] = {{age, "int8"}, {age + any(0, 300), "kivi-4-g32"}};
            ok(c.gpu.step_down(ids, tiers, c.stream));
            const step_down_policy policy{
                .tiers = {{.age = tiers[0].age, .format = {1, 1}}, {.age = tiers[1].age, .format = {0, 0}}}};
            kvq::step_down(c.cpu, std::span<kvq::sequence* const>(hosts), policy);
            return;
        }
        const int format = any(0, 1), first = any(0, 1) * any(0, 300);
        cuda::requantize_request g;
        g.format = format == 0 ? "kivi-4-g32" : "int8";
        g.first_token = first;
        if (any(0, 1) == 0) g.last_token = first + any(0, 300);
        g.new_pages = any(0, 2) == 0;
        g.only_smaller = any(0, 3) == 0;
        requantize_request h;
        h.key = h.value = format;
        h.first_token = g.first_token;
        h.last_token = g.last_token;
        h.new_pages = g.new_pages;
        h.only_smaller = g.only_smaller;
        ok(c.gpu.requantize(ids, g, c.stream));
        requantized += static_cast<int>(
            c.cpu.requantize(std::span<kvq::sequence* const>(hosts), h, {}, serial_executor{}, space).pages);
    }
    /// The CPU goes on with what came from the device: neither side shares these pages with a fork any more.
    void offload() {
        pair& p = one();
        compare(c, p, name, step);
        const std::size_t bytes = c.gpu.bytes(p.id);
        CHECK((bytes > 0) == (p.host.tokens() > 0), "%s: %d tokens in %zu bytes", name, p.host.tokens(),
              bytes);
        kvq::sequence away = c.cpu.new_sequence();
        ok(cuda::offload(c.gpu, p.id, away, c.stream));
        ok(c.gpu.free(p.id));
        p.host = std::move(away);
        // Half of the time it stays on the CPU for a while.
        if (any(0, 1) == 0 && fits(p, 40)) {
            std::vector<float16> keys, values;
            c.write(r, keys, values);
            c.appended(p.host, keys, values, 0, 40);
        }
        ok(cuda::onload(p.host, c.gpu, p.id, c.stream));
        ++moved;
    }

    void run(int steps) {
        for (step = 0; step < steps; ++step) {
            const int what = any(0, 99);
            if (what < 50)
                decode();
            else if (what < 60)
                prompt();
            else if (what < 74)
                trim();
            else if (what < 80)
                requantize();
            else if (what < 86)
                offload();
            else if (what < 91 && pairs.size() < 6) {
                pair& p = one();
                cuda::sequence_id copy;
                ok(c.gpu.fork(p.id, copy, c.stream));
                kvq::sequence host = p.host.fork();
                pairs.push_back({copy, std::move(host)});
            } else if (what < 93 && pairs.size() < 6) {
                add();
            } else if (what < 97 && pairs.size() > 1) {
                const auto i = static_cast<std::size_t>(any(0, static_cast<int>(pairs.size()) - 1));
                ok(c.gpu.free(pairs[i].id));
                std::swap(pairs[i], pairs.back());
                pairs.pop_back();
            }
            const cuda::usage_report u = c.gpu.usage();
            CHECK(u.bytes == counted_memory::bytes, "%s, step %d: usage is %zu bytes, allocated are %zu",
                  name, step, u.bytes, counted_memory::bytes);
            if (step % 25 == 24) compare(c, one(), name, step);
        }
        for (const pair& p : pairs) compare(c, p, name, step);
        for (const pair& p : pairs) ok(c.gpu.free(p.id));
        const cuda::usage_report u = c.gpu.usage();
        std::size_t used = u.window + u.sinks;
        for (const std::size_t n : u.quantized) used += n;
        CHECK(used == 0, "%s: %zu bytes are in use by no sequence", name, used);
        std::printf(
            "  %-28s %d steps, %d deep trims and %d refused, %d pages requantized, %d moves, error %.2e\n",
            name, steps, deep, refused, requantized, moved, worst);
    }
};

/// A captured step, replayed while contexts grow. Pools are allocated up front.
void check_graph() {
    both_options o;
    o.step_tokens = 1;
    o.growing = false;
    o.pool_tokens = 4 * (graph_steps + 300);
    o.pool_sequences = 3;
    both_caches c(o);
    test::rng r(5);
    std::vector<pair> pairs;
    std::vector<cuda::sequence_id> batch;
    for (int i = 0; i < 3; ++i) {
        pairs.push_back({c.gpu.new_sequence(), c.cpu.new_sequence()});
        batch.push_back(pairs.back().id);
    }
    std::vector<float16> keys, values;
    c.write(r, keys, values);
    const auto ok = [](const cuda::status& s) { CHECK(s, "graph: %s", s.message); };
    ok(c.gpu.begin_prompt(pairs[1].id, 150, c.stream));
    for (int layer = 0; layer < layers; ++layer)
        ok(c.gpu.append(layer, c.rows(c.k, layer, 150), c.rows(c.v, layer, 150), c.stream));
    c.appended(pairs[1].host, keys, values, 0, 150);
    const auto record = [&] {
        for (int layer = 0; layer < layers; ++layer) {
            ok(c.gpu.append(layer, c.rows(c.k, layer, 3), c.rows(c.v, layer, 3), c.stream));
            ok(c.gpu.attend(layer, token_view<const float16>(c.q.get(), 3, q_heads, dim),
                            token_view<float16>(c.out.get(), 3, q_heads, dim), {.early = true}, c.stream));
        }
    };
    std::uint64_t id = 0;
    cudaGraphExec_t exec = nullptr;
    double worst = 0.0;
    for (int step = 0; step < graph_steps; ++step) {
        CUDA_OK(cudaStreamSynchronize(c.stream));
        c.write(r, keys, values);
        std::vector<float16> x(c.q.size());
        for (float16& y : x) y = float16(test::normal(r));
        c.q.upload(x);
        ok(c.gpu.begin_step(batch, 1, c.stream));
        if (step == 0) {
            record();  // kernels are loaded outside the capture
        } else {
            if (step == 1) {
                CUDA_OK(cudaStreamSynchronize(c.stream));
                CUDA_OK(cudaStreamBeginCapture(c.stream, cudaStreamCaptureModeThreadLocal));
                record();
                cudaGraph_t graph;
                CUDA_OK(cudaStreamEndCapture(c.stream, &graph));
                CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
                CUDA_OK(cudaGraphDestroy(graph));
                id = c.gpu.graph_id();
            }
            CHECK(c.gpu.graph_id() == id, "graph: step %d has another graph", step);
            CUDA_OK(cudaGraphLaunch(exec, c.stream));
        }
        for (std::size_t b = 0; b < 3; ++b) c.appended(pairs[b].host, keys, values, static_cast<int>(b), 1);
        if (step % 50 != 49) continue;
        CUDA_OK(cudaStreamSynchronize(c.stream));
        const auto y = c.out.download();
        for (std::size_t b = 0; b < 3; ++b) {
            const std::size_t at = (b * q_heads + 3) * dim;
            const double error =
                error_of(pairs[b].host, layers - 1, 3, pairs[b].host.tokens(), &x[at], &y[at]);
            worst = std::max(worst, error);
            CHECK(error <= 2e-3, "graph: error %.3g of sequence %zu in step %d", error, b, step);
        }
    }
    for (const pair& p : pairs) compare(c, p, "graph", graph_steps);
    if (exec) CUDA_OK(cudaGraphExecDestroy(exec));
    std::printf("  %-28s %d steps, error %.2e\n", "a captured step, replayed", graph_steps, worst);
}

void refused(const cuda::status& s, const char* part) {
    CHECK(!s && std::strstr(s.message, part) != nullptr, "expected '%s', got '%s'", part, s.message);
}

void check_refusals() {
    const cache_shape shape{.layers = layers, .kv_heads = heads, .head_dim = dim};
    const auto open = [&](auto change, const cache_shape& of) {
        cuda::cache c;
        cuda::cache_options o;
        o.formats = {"kivi-4-g32"};
        o.page_tokens = page;
        change(o);
        return c.open(of, o, std::span(&compiled(), 1), nullptr);
    };
    refused(open([](auto& o) { o.formats = {"std4"}; }, shape),
            "nothing was compiled for std4 with head_dim 64 and pages of 32: add make_device_format<float16");
    refused(open([](auto& o) { o.page_tokens = 64; }, shape), "pages of 64");
    refused(open([](auto& o) { o.type = float_type::bf16; }, shape), "make_device_format<bfloat16");
    refused(open([](auto&) {}, {.layers = 1, .kv_heads = 1, .head_dim = 128}), "head_dim 128");
    refused(open([](auto& o) { o.formats = {}; }, shape), "needs a format");
    refused(open([](auto& o) { o.recent = 0; }, shape), "step_tokens is 1");
    refused(open([](auto& o) { o.rollback = -1; }, shape), "rollback");
    refused(open([](auto& o) { o.max_batch = 0; }, shape), "max_batch");
    refused(open([](auto& o) { o.max_tokens = 0; }, shape), "max_tokens");
    refused(open([](auto&) {}, {.layers = 0, .kv_heads = 1, .head_dim = 64}), "0 layers");

    both_options o;
    o.max_tokens = 300;
    o.max_batch = 2;
    o.growing = false;
    o.pool_tokens = 4 * page;
    o.pool_sequences = 2;
    both_caches c(o);
    const auto a = c.gpu.new_sequence(), b = c.gpu.new_sequence(), gone = c.gpu.new_sequence();
    CHECK(c.gpu.free(gone), "free");
    refused(c.gpu.free(gone), "was freed");
    const token_view<const float16> kv = c.rows(c.k, 0, 1);
    refused(c.gpu.append(0, kv, kv, c.stream), "no step has begun");
    const cuda::sequence_id three[] = {a, b, gone}, twice[] = {a, a}, one[] = {a}, lost[] = {gone};
    refused(c.gpu.begin_step(three, 1, c.stream), "max_batch");
    refused(c.gpu.begin_step(twice, 1, c.stream), "twice");
    refused(c.gpu.begin_step(lost, 1, c.stream), "was freed");
    refused(c.gpu.begin_step(one, 4, c.stream), "step_tokens");
    refused(c.gpu.begin_prompt(a, 301, c.stream), "max_tokens");
    refused(c.gpu.begin_prompt(a, 0, c.stream), "0 tokens");
    // 4 quantized pages are there: 4 + 40 + 5 * 32 tokens need 5.
    refused(c.gpu.begin_prompt(a, 4 + 40 + 5 * page, c.stream), "may not grow");
    CHECK(c.gpu.tokens(a) == 0 && c.gpu.bytes(a) == 0, "a refused prompt has left something");
    CHECK(c.gpu.begin_step(one, 1, c.stream), "begin");
    refused(c.gpu.append(2, kv, kv, c.stream), "layer 2");
    refused(c.gpu.append(0, c.rows(c.k, 0, 2), kv, c.stream), "the step has 1 x 1");
    const token_view<const float> other(nullptr, 1, heads, dim);
    refused(c.gpu.append(0, other, other, c.stream), "another type");
    CHECK(c.gpu.append(0, kv, kv, c.stream), "append");
    refused(c.gpu.attend(0, token_view<const float16>(c.q.get(), 1, 3, dim),
                         token_view<float16>(c.out.get(), 1, 3, dim), {}, c.stream),
            "not a multiple");
    refused(c.gpu.trim(a, 2), "cannot trim to 2");
    refused(c.gpu.requantize(one, {.format = "std4"}, c.stream), "not compiled");
    refused(c.gpu.requantize(one, {.format = "int8", .first_token = 3, .last_token = 2}, c.stream), "range");
    const cuda::tier descending[] = {{10, "int8"}, {5, "kivi-4-g32"}}, missing[] = {{0, "std4"}};
    refused(c.gpu.step_down(one, descending, c.stream), "age 5, before 10");
    refused(c.gpu.step_down(one, missing, c.stream), "not compiled");
    // A CPU cache that has other options, or other formats.
    kvq::cache narrow(c.cpu.shape(), {.keys = make_format<int8, scalar>(), .sinks = 3, .page_tokens = page}),
        lacks(c.cpu.shape(), {.keys = make_format<int8, scalar>(),
                              .sinks = o.sinks,
                              .recent = o.recent,
                              .page_tokens = page,
                              .rollback = o.rollback});
    kvq::sequence to = narrow.new_sequence(), there = lacks.new_sequence();
    refused(cuda::offload(c.gpu, a, to, c.stream), "sinks, recent, rollback and page_tokens");
    refused(cuda::offload(c.gpu, a, there, c.stream), "does not list kivi-4-g32");
    // A sequence that a trim has cut stays on the CPU.
    kvq::sequence cut = c.cpu.new_sequence();
    std::vector<float16> keys, values;
    test::rng r(1);
    c.write(r, keys, values);
    c.appended(cut, keys, values, 0, 200);
    cut.trim(50);
    c.appended(cut, keys, values, 0, 100);
    cuda::sequence_id made;
    refused(cuda::onload(cut, c.gpu, made, c.stream), "cut by a trim");
    CHECK(made == cuda::sequence_id{}, "a refused onload has made a sequence");

    // No memory: everything as before.
    both_options growing;
    both_caches g(growing);
    const auto s = g.gpu.new_sequence();
    counted_memory::limit = counted_memory::bytes + 1000;
    refused(g.gpu.begin_prompt(s, 100, g.stream), "device memory");
    CHECK(g.gpu.tokens(s) == 0 && g.gpu.usage().bytes > 0, "a prompt without memory has left something");
    counted_memory::limit = std::size_t{1} << 40;
    CHECK(g.gpu.begin_prompt(s, 100, g.stream), "begin");
}

#else

/// Keys from statistics: the same bytes as the CPU's, there and back.
void check_statistics() {
    both_caches c({});
    test::rng r(9);
    const auto ok = [](const cuda::status& s) { CHECK(s, "statistics: %s", s.message); };
    kvq::sequence host = c.cpu.new_sequence();
    std::vector<float16> keys, values;
    cuda::sequence_id id = c.gpu.new_sequence();
    const auto append = [&](int n) {
        for (int layer = 0; layer < layers; ++layer)
            ok(c.gpu.append(layer, c.rows(c.k, layer, n), c.rows(c.v, layer, n), c.stream));
        c.appended(host, keys, values, 0, n);
        CUDA_OK(cudaStreamSynchronize(c.stream));
    };
    cuda::status s = c.gpu.calibrate("std4", statistics(), c.stream);
    CHECK(!s && std::strstr(s.message, "std4 is not a format"), "%s", s.message);
    s = c.gpu.calibrate("low2", calibration({.layers = 1, .kv_heads = heads, .head_dim = dim}), c.stream);
    CHECK(!s && std::strstr(s.message, "1 layers"), "%s", s.message);
    kvq::sequence lacks = c.cpu.new_sequence();
    s = cuda::offload(c.gpu, id, lacks, c.stream);
    CHECK(!s && std::strstr(s.message, "other statistics"), "%s", s.message);
    ok(c.gpu.calibrate("low2", statistics(), c.stream));
    c.write(r, keys, values);
    ok(c.gpu.begin_prompt(id, 250, c.stream));
    append(250);
    s = c.gpu.calibrate("low2", statistics(), c.stream);
    CHECK(!s && std::strstr(s.message, "are in use"), "%s", s.message);
    double worst = 0.0;
    for (int i = 0; i < 70; ++i) {
        c.write(r, keys, values);
        const cuda::sequence_id batch[] = {id};
        ok(c.gpu.begin_step(batch, 1, c.stream));
        append(1);
        if (i == 40) {
            kvq::sequence moved = c.cpu.new_sequence();
            ok(cuda::offload(c.gpu, id, moved, c.stream));
            ok(c.gpu.free(id));
            ok(cuda::onload(moved, c.gpu, id, c.stream));
        }
        if (i != 39 && i != 69) continue;
        std::vector<float16> x(c.q.size());
        for (float16& y : x) y = float16(test::normal(r));
        c.q.upload(x);
        ok(c.gpu.attend(1, token_view<const float16>(c.q.get(), 1, q_heads, dim),
                        token_view<float16>(c.out.get(), 1, q_heads, dim), {}, c.stream));
        CUDA_OK(cudaStreamSynchronize(c.stream));
        const auto y = c.out.download();
        for (std::size_t head = 0; head < q_heads; ++head)
            worst = std::max(worst, error_of(host, 1, static_cast<int>(head), host.tokens(), &x[head * dim],
                                             &y[head * dim]));
    }
    CHECK(worst <= 2e-3, "statistics: error %.3g", worst);
    CHECK(c.gpu.usage().bytes == counted_memory::bytes, "usage");
    compare(c, {id, std::move(host)}, "statistics", 0);
    std::printf("  %-28s error %.2e\n", "low2 from statistics", worst);
}
#endif

}  // namespace

int main() {
#if PART == 0
    check_refusals();
    CHECK(counted_memory::bytes == 0, "%zu bytes were not given back", counted_memory::bytes);
    check_graph();
    history({}, 1, "4 sinks, 40 recent").run(long_run);
    history({.sinks = 0, .recent = 3, .rollback = 0}, 2, "no sinks, 3 recent").run(long_run / 2);
    history({.sinks = 37, .recent = 70, .rollback = 100, .step_tokens = 1}, 3, "37 sinks, rollback 100")
        .run(long_run / 2);
#else
    check_statistics();
#endif
    CHECK(counted_memory::bytes == 0, "%zu bytes were not given back", counted_memory::bytes);
    return test::report("cache");
}
