// Ranks over NCCL (adapters/distributed/nccl*.cuh), a thread for each: decode and prompts over contexts that
// are divided, heads, sequences sent between caches, ranks that are silent or gone, damaged messages. The
// program's argument is the number of ranks.
#include <kvq/adapters/distributed/nccl_attention.cuh>
#include <kvq/adapters/distributed/nccl_prefill.cuh>
#include <kvq/adapters/distributed/nccl_transfer.cuh>
#include <kvq/adapters/distributed/peer_attention.cuh>
#include <kvq/cuda.cuh>

#include <functional>
#include <map>
#include <mutex>
#include <thread>

#ifdef __CUDACC__
#include <sys/wait.h>
#include <unistd.h>
#include <csignal>
#endif

#include "support.cuh"

using namespace kvq;
using namespace std::chrono_literals;

namespace {

// Emulated, the formats of c_cuda, whose kernels are compiled anyway.
constexpr int dim = 64, layers = 2, page_size = test::emulated_or(64, 32);
using kivi4 = cuda::kivi_pair<4, page_size, dim, page_size>;
using wide = cuda::block_pair<int8, int8, dim, page_size>;
const std::string kivi4_name = "kivi-4-g" + std::to_string(page_size);

/// across: of caches whose attention is one launch on all ranks.
const cuda::device_format& compiled(bool across) {
    static const cuda::device_format plain = cuda::make_device_format<float16, kivi4, wide>(),
                                     ranks = cuda::make_scored_format<cuda::across_ranks, float16, kivi4>();
    return across ? ranks : plain;
}

std::mutex checking;
#define RANK_CHECK(...)                       \
    do {                                      \
        const std::lock_guard lock(checking); \
        CHECK(__VA_ARGS__);                   \
    } while (0)
void ok(const cuda::status& s, int line) {
    const std::lock_guard lock(checking);
    CHECK(s, "line %d: %s", line, s.message);
}
#define OK(call) ok((call), __LINE__)
void refused(const cuda::status& s, const char* part, int line) {
    const std::lock_guard lock(checking);
    CHECK(!s && std::strstr(s.message, part) != nullptr, "line %d: expected '%s', got '%s'", line, part,
          s.message);
}
#define REFUSED(call, part) refused((call), part, __LINE__)

/// Calls f(rank, group, stream) in a thread for each rank.
using rank_task = std::function<void(int, cuda::nccl_group&, cudaStream_t)>;
void run_ranks(int ranks, std::chrono::milliseconds limit, const rank_task& f) {
    ncclUniqueId id;
    OK(cuda::nccl_group::make_id(id));
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; ++r)
        threads.emplace_back([&, r] {
            CUDA_OK(cudaSetDevice(r));
            cudaStream_t stream;
            CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
            cuda::nccl_group group;
            OK(group.open(id, r, ranks, limit));
            RANK_CHECK(group.rank() == r && group.ranks() == ranks, "rank %d", r);
            f(r, group, stream);
            CUDA_OK(cudaStreamSynchronize(stream));
            group.close();
            CUDA_OK(cudaStreamDestroy(stream));
        });
    for (std::thread& t : threads) t.join();
}

/// The same random values on every rank, by layer and position: [tokens][heads][dim].
struct tokens_of {
    int heads, tokens;
    std::vector<std::vector<float16>> keys, values;

    tokens_of(unsigned seed, int h, int n) : heads(h), tokens(n), keys(layers), values(layers) {
        test::rng r(seed);
        for (int layer = 0; layer < layers; ++layer)
            for (auto* x : {&keys[at(layer)], &values[at(layer)]}) {
                x->resize(at(n * h * dim));
                for (float16& y : *x) y = float16(test::normal(r));
            }
    }
    static std::size_t at(int i) { return static_cast<std::size_t>(i); }
    /// Rows of some positions and heads.
    std::vector<float16> rows(const std::vector<float16>& all, const std::vector<index_range>& positions,
                              index_range of_heads) const {
        std::vector<float16> x;
        for (const index_range& p : positions)
            for (int t = p.first; t < p.end; ++t) {
                const auto row = all.begin() + (t * heads + of_heads.first) * dim;
                x.insert(x.end(), row, row + of_heads.size() * dim);
            }
        return x;
    }
};

struct held_cache {
    cuda::cache cache;
    int heads;
    cudaStream_t stream;

    held_cache(int h, const page_geometry& g, cudaStream_t s, int batch = 4, int max_tokens = 3000,
               std::vector<std::string> formats = {kivi4_name, "int8"}, bool across = false)
        : heads(h), stream(s) {
        cuda::cache_options o;
        o.formats = std::move(formats);
        o.page_tokens = g.page_tokens;
        o.sinks = g.sinks;
        o.recent = g.recent;
        o.rollback = g.recent > 0 ? 16 : 0;
        o.step_tokens = g.recent > 0 ? 1 : 0;
        o.max_batch = batch;
        o.max_tokens = max_tokens;
        OK(cache.open({.layers = layers, .kv_heads = h, .head_dim = dim}, o, std::span(&compiled(across), 1),
                      stream));
    }
    std::size_t used_pages() const { return cache.bytes_in_use(); }
    void prompt(cuda::sequence_id id, const tokens_of& x, const std::vector<index_range>& positions,
                index_range of_heads) {
        int n = 0;
        for (const index_range& p : positions) n += p.size();
        if (n == 0) return;
        OK(cache.begin_prompt(id, n, stream));
        for (int layer = 0; layer < layers; ++layer) {
            const test::device_buffer<float16> k(x.rows(x.keys[x.at(layer)], positions, of_heads)),
                v(x.rows(x.values[x.at(layer)], positions, of_heads));
            OK(cache.append(layer, token_view<const float16>(k.get(), n, heads, dim),
                            token_view<const float16>(v.get(), n, heads, dim), stream));
            CUDA_OK(cudaStreamSynchronize(stream));
        }
    }
    /// One token per sequence, at `positions` of x[i].
    void step(std::span<const cuda::sequence_id> batch, const std::vector<tokens_of>& x,
              const std::vector<int>& positions, index_range of_heads) {
        OK(cache.begin_step(batch, 1, stream));
        for (int layer = 0; layer < layers; ++layer) {
            std::vector<float16> k, v;
            for (std::size_t i = 0; i < batch.size(); ++i) {
                const std::vector<index_range> one{{positions[i], positions[i] + 1}};
                const auto a = x[i].rows(x[i].keys[x[i].at(layer)], one, of_heads),
                           b = x[i].rows(x[i].values[x[i].at(layer)], one, of_heads);
                k.insert(k.end(), a.begin(), a.end());
                v.insert(v.end(), b.begin(), b.end());
            }
            const test::device_buffer<float16> kd(k), vd(v);
            const int n = static_cast<int>(batch.size());
            OK(cache.append(layer, token_view<const float16>(kd.get(), n, heads, dim),
                            token_view<const float16>(vd.get(), n, heads, dim), stream));
            CUDA_OK(cudaStreamSynchronize(stream));
        }
    }
    /// Output of a layer as floats, from softmax states: [rows][q_heads][dim].
    std::vector<float> attend(int layer, const std::vector<float16>& q, int rows, int q_heads) {
        const test::device_buffer<float16> x(q);
        const test::device_buffer<float> state(static_cast<std::size_t>(rows * q_heads * (dim + 2)));
        OK(cache.attend(layer, token_view<const float16>(x.get(), rows, q_heads, dim), token_view<float16>{},
                        {.state_out = state.get()}, stream));
        CUDA_OK(cudaStreamSynchronize(stream));
        const auto s = state.download();
        std::vector<float> out;
        for (std::size_t row = 0; row * (dim + 2) < s.size(); ++row)
            for (std::size_t c = 0; c < dim; ++c) {
                const float sum = s[row * (dim + 2) + 1];
                out.push_back(sum == 0.0f ? 0.0f : s[row * (dim + 2) + 2 + c] / sum);
            }
        return out;
    }
};

std::vector<float16> random_rows(unsigned seed, int n) {
    test::rng r(seed);
    std::vector<float16> x(static_cast<std::size_t>(n));
    for (float16& y : x) y = float16(test::normal(r));
    return x;
}
/// To attention on one rank, in float outputs. The emulated device has three multiprocessors: a warp sums
/// many tokens, in another order.
#ifdef __CUDACC__
constexpr double most_distance = 1e-6;
#else
constexpr double most_distance = 5e-5;
#endif
/// Largest distance of a row, relative to its norm.
double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double worst = a.size() == b.size() ? 0.0 : INFINITY;
    for (std::size_t row = 0; row + dim <= a.size() && row + dim <= b.size(); row += dim) {
        double error = 0.0, size = 0.0;
        for (std::size_t c = row; c < row + dim; ++c) {
            error += std::pow(static_cast<double>(a[c]) - static_cast<double>(b[c]), 2.0);
            size += std::pow(static_cast<double>(b[c]), 2.0);
        }
        if (!(error == error)) error = INFINITY;
        worst = std::max(worst, std::sqrt(error / std::max(size, 1e-30)));
    }
    return worst;
}

/// What softmax states of several ranks make together, in double arithmetic.
std::vector<float> merged_states(const std::vector<std::vector<float>>& states) {
    std::vector<float> merged;
    for (std::size_t row = 0; row < states[0].size(); row += dim + 2) {
        double top = -INFINITY, sum = 0.0;
        for (const auto& s : states) top = std::max(top, static_cast<double>(s[row]));
        const auto weight = [&](const std::vector<float>& s) {
            return s[row] == -INFINITY ? 0.0 : std::exp2(static_cast<double>(s[row]) - top);
        };
        for (const auto& s : states) sum += weight(s) * static_cast<double>(s[row + 1]);
        for (std::size_t c = 2; c < dim + 2; ++c) {
            double x = 0.0;
            for (const auto& s : states) x += weight(s) * static_cast<double>(s[row + c]);
            merged.push_back(static_cast<float>(x / sum));
        }
    }
    return merged;
}

// ---- contexts ----

void check_context(int ranks, const std::vector<int>& weights, int group, int unit, unsigned seed,
                   const std::vector<int>& lengths = {700, 90, 1500}, double bound = most_distance) {
    constexpr int heads = 2;
    const int q_heads = heads * group;
    const page_geometry whole{4, 40, page_size};
    // The second one may be too short for some ranks.
    const int most_tokens = *std::max_element(lengths.begin(), lengths.end()) + 100;
    constexpr int steps = 40;
    std::vector<tokens_of> x;
    for (std::size_t i = 0; i < lengths.size(); ++i)
        x.emplace_back(seed + static_cast<unsigned>(i), heads, lengths[i] + steps);
    std::vector<std::vector<float>> outputs(static_cast<std::size_t>(ranks)), states(outputs.size());
    std::vector<float> want, logs;
    std::mutex waits;
    run_ranks(ranks, 60s, [&](int rank, cuda::nccl_group& g, cudaStream_t stream) {
        std::vector<context_split> splits(lengths.size(), context_split(whole, weights, -1, unit));
        const bool home = splits[0].home() == rank;
        const bool across = seed % 2 == 1;
        const std::vector<std::string> formats =
            across ? std::vector{kivi4_name} : std::vector<std::string>{kivi4_name, "int8"};
        held_cache own(heads, splits[0].geometry(rank), stream, 4, most_tokens, formats, across);
        held_cache one(heads, whole, stream, 4, most_tokens);
        std::vector<cuda::sequence_id> batch, all;
        for (std::size_t i = 0; i < lengths.size(); ++i) {
            const cuda::sequence_id id = own.cache.new_sequence();
            if (home) all.push_back(one.cache.new_sequence());
            for (const index_range chunk :
                 {index_range{0, lengths[i] / 3}, index_range{lengths[i] / 3, lengths[i]}}) {
                std::vector<index_range> mine;
                for (const auto& p : splits[i].add(chunk.size()))
                    if (p.rank == rank) mine.push_back({p.first, p.end});
                own.prompt(id, x[i], mine, {0, heads});
                if (home) one.prompt(all.back(), x[i], {chunk}, {0, heads});
            }
            RANK_CHECK(own.cache.tokens(id) == splits[i].tokens(rank), "rank %d holds %d tokens of %d", rank,
                       own.cache.tokens(id), splits[i].tokens(rank));
            // A rank without tokens of a sequence may name it, or leave its row empty.
            batch.push_back(own.cache.tokens(id) == 0 && seed % 2 == 0 ? cuda::sequence_id{} : id);
        }
        cuda::context_attention merge;
        OK(merge.open(g, 3, q_heads, dim, stream));
        cuda::peer_context_attention peers;
        OK(peers.open(g, 3, q_heads, dim, stream));
        std::vector<float>& mine = outputs[static_cast<std::size_t>(rank)];
        const int rows = static_cast<int>(lengths.size());
        test::device_buffer<float> out(static_cast<std::size_t>(rows * q_heads * dim));
        test::device_buffer<float> lse(static_cast<std::size_t>(rows * q_heads));
        test::device_buffer<float16> half(out.size());
        for (int step = 0; step < steps; ++step) {
            std::vector<int> at;
            for (std::size_t i = 0; i < lengths.size(); ++i) {
                at.push_back(lengths[i] + step);
                splits[i].add(1);
            }
            if (home) {
                own.step(batch, x, at, {0, heads});
                one.step(all, x, at, {0, heads});
            } else {
                OK(own.cache.begin_step(batch, 0, stream));
            }
            if (step % 13 != 0) continue;
            const auto q = random_rows(seed + 100 + static_cast<unsigned>(step), rows * q_heads * dim);
            const test::device_buffer<float16> query(q);
            const token_view<const float16> view(query.get(), rows, q_heads, dim);
            for (int layer = 0; layer < layers; ++layer) {
                OK(merge.attend(own.cache, layer, view, token_view<float>(out.get(), rows, q_heads, dim),
                                {.lse = lse.get()}, stream));
                OK(merge.attend(own.cache, layer, view, token_view<float16>(half.get(), rows, q_heads, dim),
                                {}, stream));
                OK(g.wait(stream, "for outputs"));
                const auto y = out.download();
                const auto z = half.download();
                std::size_t rounded = 0;
                for (std::size_t i = 0; i < y.size(); ++i) rounded += float16(y[i]).bits == z[i].bits;
                RANK_CHECK(rounded == y.size(), "%zu of %zu float16 outputs are the float ones, rounded",
                           rounded, y.size());
                mine.insert(mine.end(), y.begin(), y.end());
                // Outputs of the cache's type come from the launch of attention itself, if `across`.
                const auto sums = lse.download();
                out.poison();
                half.poison();
                lse.poison();
                CUDA_OK(cudaDeviceSynchronize());
                OK(peers.attend(own.cache, layer, view, token_view<float>(out.get(), rows, q_heads, dim),
                                {.early = true}, stream));
                OK(peers.attend(own.cache, layer, view, token_view<float16>(half.get(), rows, q_heads, dim),
                                {.lse = lse.get(), .early = true}, stream));
                OK(peers.wait(stream, "for outputs"));
                const auto same = [](const auto& a, const auto& b) {
                    return std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
                };
                RANK_CHECK(same(out.download(), y) && same(half.download(), z) && same(lse.download(), sums),
                           "rank %d, step %d: outputs over peer memory differ", rank, step);
                std::vector<float> own_states(static_cast<std::size_t>(rows * q_heads * (dim + 2)));
                CUDA_OK(cudaMemcpy(own_states.data(), merge.own_states(), own_states.size() * sizeof(float),
                                   cudaMemcpyDeviceToHost));
                auto& kept = states[static_cast<std::size_t>(rank)];
                kept.insert(kept.end(), own_states.begin(), own_states.end());
                if (!home) continue;
                const auto expected = one.attend(layer, q, rows, q_heads);
                const std::lock_guard lock(waits);
                want.insert(want.end(), expected.begin(), expected.end());
                const auto l = lse.download();
                logs.insert(logs.end(), l.begin(), l.end());
            }
        }
        CUDA_OK(cudaStreamSynchronize(stream));
    });
    bool same = true;
    for (const auto& o : outputs)
        same = same && o.size() == want.size() &&
               std::memcmp(o.data(), outputs[0].data(), o.size() * sizeof(float)) == 0;
    CHECK(same, "%d ranks have different outputs", ranks);
    for (const float l : logs) CHECK(std::isfinite(l), "lse is %g", static_cast<double>(l));
    const double merged = distance(outputs[0], merged_states(states));
    CHECK(merged <= 1e-6, "%d ranks, group %d, unit %d: the merge is %.3g off", ranks, group, unit, merged);
    const double worst = distance(outputs[0], want);
    CHECK(worst <= bound, "%d ranks, group %d, unit %d: distance to one rank %.3g", ranks, group, unit,
          worst);
    std::printf(
        "  context on %d ranks, %d query heads per kv head, units of %d: merge %.2e, distance to one rank "
        "%.2e\n",
        ranks, group, unit, merged, worst);
}

// ---- prompts of divided contexts ----

/// Quantized pages by layer, keys or values, and number in the whole context.
using page_bytes = std::map<std::array<int, 3>, std::vector<std::byte>>;
void collect_pages(const held_cache& c, cuda::sequence_id id, const page_geometry& own,
                   const page_geometry& whole, const std::vector<index_range>& positions, page_bytes& to) {
    using access = cuda::detail::transfer_access;
    if (c.cache.tokens(id) == 0) return;
    const auto& pages = access::pages_of(c.cache, id);
    for (int i = 0; i < pages.committed(); ++i) {
        // Where the page's first token stands in the whole context.
        int left = own.sinks + i * page_size, position = 0;
        for (const index_range& p : positions) {
            position = p.first + left;
            if (left < p.size()) break;
            left -= p.size();
        }
        const kvq::page& page = *pages[i].pages[0];
        for (int layer = 0; layer < layers; ++layer)
            for (const tensor role : {tensor::key, tensor::value}) {
                const auto& m = access::pool(c.cache, page.format - 1).memory();
                std::vector<std::byte> bytes(m.page_bytes(role));
                CUDA_OK(cudaMemcpy(bytes.data(), m.page(role, layer, page.number), bytes.size(),
                                   cudaMemcpyDeviceToHost));
                to[{layer, role == tensor::key ? 0 : 1, (position - whole.sinks) / page_size}] = bytes;
            }
    }
}

struct prompt_case {
    std::vector<int> weights;
    int home, group, unit;
    std::vector<int> chunks;
    float softcap = 0.0f;
    bool broken = false;  // one query of the last chunk is NaN
};

/// A context that is divided from its first token on, against a cache of all tokens in the same run.
void check_prompt(const prompt_case& c, unsigned seed) {
    constexpr int heads = 2, steps = 3;
    constexpr double bound = 1e-3;  // the error of prefill itself
    const int ranks = static_cast<int>(c.weights.size()), q_heads = heads * c.group,
              n = std::accumulate(c.chunks.begin(), c.chunks.end(), 0);
    const page_geometry whole{4, 40, page_size};
    const std::vector<tokens_of> x{tokens_of(seed, heads, n + steps)};
    const auto size = [&](int tokens) { return static_cast<std::size_t>(tokens * q_heads * dim); };
    // By layer, of all positions; rows of a rank are written by that rank alone.
    std::vector<std::vector<float>> have(layers), want(layers), logs(layers), want_logs(layers), decoded,
        want_decoded;
    for (int layer = 0; layer < layers; ++layer)
        for (auto* y : {&have[x[0].at(layer)], &want[x[0].at(layer)]}) {
            y->resize(size(n));
            (y == &have[x[0].at(layer)] ? logs : want_logs)[x[0].at(layer)].resize(x[0].at(n * q_heads));
        }
    decoded.resize(x[0].at(ranks));
    want_decoded.resize(1);
    page_bytes pages, want_pages;
    std::size_t sent = 0, formula = 0;
    std::mutex gathering;
    const int bad = c.broken ? n - 1 - c.chunks.back() / 2 : -1;
    run_ranks(ranks, 60s, [&](int rank, cuda::nccl_group& g, cudaStream_t stream) {
        context_split split(whole, c.weights, c.home, c.unit);
        const bool home = split.home() == rank;
        held_cache own(heads, split.geometry(rank), stream, 1, n + 100),
            one(heads, whole, stream, 1, n + 100);
        const cuda::sequence_id id = own.cache.new_sequence(), all = one.cache.new_sequence();
        cuda::context_prefill prompt;
        OK(prompt.open(g, q_heads));
        int begin = 0;
        for (const int tokens : c.chunks) {
            std::vector<int> held;
            for (int r = 0; r < ranks; ++r) held.push_back(split.tokens(r));
            OK(prompt.begin(own.cache, id, split, tokens, stream));
            const int count = prompt.own_tokens();
            RANK_CHECK(own.cache.tokens(id) == split.tokens(rank) && split.tokens() == begin + tokens,
                       "rank %d holds %d tokens of %d", rank, own.cache.tokens(id), split.tokens(rank));
            const std::vector<index_range> positions(prompt.own().begin(), prompt.own().end());
            if (home) OK(one.cache.begin_prompt(all, tokens, stream));
            for (int layer = 0; layer < layers; ++layer) {
                const std::size_t l = x[0].at(layer);
                auto q = random_rows(seed + 1000 + static_cast<unsigned>(begin * layers + layer),
                                     static_cast<int>(size(tokens)));
                if (bad >= begin && bad < begin + tokens) q[size(bad - begin) + 5] = float16(NAN);
                std::vector<float16> mine;
                for (const index_range& p : positions)
                    mine.insert(mine.end(), q.begin() + static_cast<std::ptrdiff_t>(size(p.first - begin)),
                                q.begin() + static_cast<std::ptrdiff_t>(size(p.end - begin)));
                // Rows of q have something behind them.
                std::vector<float16> wide(static_cast<std::size_t>(count * (q_heads + 1) * dim));
                for (int t = 0; t < count; ++t)
                    std::copy_n(mine.begin() + static_cast<std::ptrdiff_t>(size(t)), q_heads * dim,
                                wide.begin() + t * (q_heads + 1) * dim);
                const test::device_buffer<float16> query(wide),
                    k(x[0].rows(x[0].keys[l], positions, {0, heads})),
                    v(x[0].rows(x[0].values[l], positions, {0, heads})), half(size(count));
                const test::device_buffer<float> out(size(count)), lse(x[0].at(count * q_heads));
                const token_view<const float16> qv(query.get(), count, q_heads, dim, (q_heads + 1) * dim,
                                                   dim),
                    kv(k.get(), count, heads, dim), vv(v.get(), count, heads, dim);
                const cuda::prefill_options options{.softcap = c.softcap, .lse = lse.get()};
                // Of the first layer in float, of the second one in half floats.
                OK(layer == 0
                       ? prompt.prefill(layer, kv, vv, qv, token_view<float>(out.get(), count, q_heads, dim),
                                        options, stream)
                       : prompt.prefill(layer, kv, vv, qv,
                                        token_view<float16>(half.get(), count, q_heads, dim), options,
                                        stream));
                OK(g.wait(stream, "for the outputs"));
                std::vector<float> y = out.download();
                if (layer > 0) {
                    const auto z = half.download();
                    std::transform(z.begin(), z.end(), y.begin(),
                                   [](float16 f) { return static_cast<float>(f); });
                }
                const auto own_lse = lse.download();
                int row = 0;
                for (const index_range& p : positions) {
                    std::copy_n(y.begin() + static_cast<std::ptrdiff_t>(size(row)), size(p.size()),
                                have[l].begin() + static_cast<std::ptrdiff_t>(size(p.first)));
                    std::copy_n(own_lse.begin() + row * q_heads, p.size() * q_heads,
                                logs[l].begin() + p.first * q_heads);
                    row += p.size();
                }
                if (!home) continue;
                const std::vector<index_range> everything{{begin, begin + tokens}};
                const test::device_buffer<float16> query_1(q),
                    k_1(x[0].rows(x[0].keys[l], everything, {0, heads})),
                    v_1(x[0].rows(x[0].values[l], everything, {0, heads})), out_1(q.size());
                const test::device_buffer<float> lse_1(x[0].at(tokens * q_heads));
                OK(one.cache.prefill(layer, token_view<const float16>(k_1.get(), tokens, heads, dim),
                                     token_view<const float16>(v_1.get(), tokens, heads, dim),
                                     token_view<const float16>(query_1.get(), tokens, q_heads, dim),
                                     token_view<float16>(out_1.get(), tokens, q_heads, dim),
                                     {.softcap = c.softcap, .lse = lse_1.get()}, stream));
                CUDA_OK(cudaStreamSynchronize(stream));
                const auto z = out_1.download();
                std::transform(z.begin(), z.end(), want[l].begin() + static_cast<std::ptrdiff_t>(size(begin)),
                               [](float16 f) { return static_cast<float>(f); });
                const auto l_1 = lse_1.download();
                std::copy(l_1.begin(), l_1.end(), want_logs[l].begin() + begin * q_heads);
            }
            {
                // Each query goes once to every other rank that holds tokens before the chunk or gets some at
                // or before it.
                const std::lock_guard lock(gathering);
                sent += prompt.sent_bytes();
                for (const index_range& p : positions)
                    for (int t = p.first; t < p.end; ++t)
                        for (int r = 0; r < ranks; ++r) {
                            int leading = 0;
                            split.leading(r, t, std::span(&leading, 1));
                            if (r != rank && leading > 0)
                                formula += static_cast<std::size_t>(q_heads * (dim * 2 + (dim + 2) * 4));
                        }
            }
            begin += tokens;
        }
        std::vector<index_range> positions;
        for (const auto& p : split.parts())
            if (p.rank == rank) positions.push_back({p.first, p.end});
        {
            const std::lock_guard lock(gathering);
            collect_pages(own, id, split.geometry(rank), whole, positions, pages);
            if (home) collect_pages(one, all, whole, whole, {{0, n}}, want_pages);
        }
        // Decode goes on.
        const std::vector<cuda::sequence_id> batch{id}, whole_batch{all};
        cuda::context_attention merge;
        OK(merge.open(g, 1, q_heads, dim, stream));
        for (int step = 0; step < steps; ++step) {
            split.add(1);
            if (home) {
                own.step(batch, x, {n + step}, {0, heads});
                one.step(whole_batch, x, {n + step}, {0, heads});
            } else {
                OK(own.cache.begin_step(batch, 0, stream));
            }
            const auto q = random_rows(seed + 1 + static_cast<unsigned>(step), q_heads * dim);
            const test::device_buffer<float16> query(q);
            const test::device_buffer<float> out(size(1));
            OK(merge.attend(own.cache, step % layers, token_view<const float16>(query.get(), 1, q_heads, dim),
                            token_view<float>(out.get(), 1, q_heads, dim), {}, stream));
            OK(g.wait(stream, "for outputs"));
            const auto y = out.download();
            auto& to = decoded[static_cast<std::size_t>(rank)];
            to.insert(to.end(), y.begin(), y.end());
            if (!home) continue;
            const auto z = one.attend(step % layers, q, 1, q_heads);
            want_decoded[0].insert(want_decoded[0].end(), z.begin(), z.end());
        }
        CUDA_OK(cudaStreamSynchronize(stream));
    });
    double worst = 0.0, worst_log = 0.0;
    for (int layer = 0; layer < layers; ++layer) {
        const std::size_t l = x[0].at(layer);
        if (bad >= 0) {
            // Of the head with the NaN; the others of the token are as ever.
            std::size_t nan = 0;
            for (std::size_t i = size(bad); i < size(bad) + dim; ++i) {
                nan += std::isnan(have[l][i]) ? 1 : 0;
                have[l][i] = want[l][i] = 0.0f;
            }
            CHECK(nan == dim, "seed %u: a query with a NaN has %zu channels of NaN of %d", seed, nan, dim);
            logs[l][x[0].at(bad * q_heads)] = want_logs[l][x[0].at(bad * q_heads)] = 0.0f;
        }
        worst = std::max(worst, distance(have[l], want[l]));
        for (std::size_t i = 0; i < logs[l].size(); ++i) {
            const double off =
                std::abs(static_cast<double>(logs[l][i]) - static_cast<double>(want_logs[l][i]));
            worst_log = off <= worst_log ? worst_log : off;
        }
    }
    CHECK(worst <= bound, "seed %u: a prompt on %d ranks is %.3g off", seed, ranks, worst);
    CHECK(worst_log <= bound, "seed %u: log-sum-exps are %.3g off", seed, worst_log);
    int different = 0;
    for (const auto& [place, bytes] : want_pages) different += pages[place] != bytes;
    CHECK(pages.size() == want_pages.size() && different == 0,
          "seed %u: %zu pages of all ranks, %zu of one cache, %d of them differ", seed, pages.size(),
          want_pages.size(), different);
    CHECK(sent == formula, "seed %u: %zu bytes are sent per layer, expected are %zu", seed, sent, formula);
    for (const auto& y : decoded)
        CHECK(distance(y, want_decoded[0]) <= most_distance, "seed %u: decode behind the prompt is %.3g off",
              seed, distance(y, want_decoded[0]));
    std::string list;
    for (const int t : c.chunks) list += (list.empty() ? "" : ", ") + std::to_string(t);
    std::printf(
        "  prompt on %d ranks, seed %u: chunks of %s, %d query heads per kv head, units of %d, home %d: "
        "distance to one GPU %.2e, %zu pages\n",
        ranks, seed, list.c_str(), c.group, c.unit, c.home, worst, want_pages.size());
}

void check_prompts(int ranks) {
    const auto at = [](int i) { return static_cast<std::size_t>(i); };
    for (unsigned seed = 1; seed <= 4; ++seed) {
        test::rng r(seed * 77 + static_cast<unsigned>(ranks));
        const auto below = [&](int n) { return static_cast<int>(r() % static_cast<unsigned>(n)); };
        prompt_case c;
        for (int i = 0; i < ranks; ++i) c.weights.push_back(below(4));
        c.home = below(ranks);
        c.weights[at(c.home)] = 1 + below(3);
        c.group = 1 << below(4);
        c.unit = page_size << below(3);
        c.softcap = seed % 3 == 0 ? 20.0f : 0.0f;
        c.broken = seed % 2 == 0;
        for (const int most : {500, 40, 3, 300}) c.chunks.push_back(1 + below(most));
        check_prompt(c, seed);
    }
    // Equal shares, long chunks; a chunk that stays at home as a whole, since a unit is longer.
    check_prompt({std::vector<int>(at(ranks), 1), ranks - 1, 4, page_size, {300, 513}}, 11);
    check_prompt({std::vector<int>(at(ranks), 1), 0, 2, 0, {200, 100}}, 12);
}

void check_prompt_refusals() {
    run_ranks(2, 60s, [&](int rank, cuda::nccl_group& g, cudaStream_t stream) {
        const page_geometry whole{4, 40, page_size};
        const int weights[] = {1, 1}, three[] = {1, 1, 1};
        context_split split(whole, weights, 0, page_size), other(whole, three, 0, page_size);
        held_cache own(2, split.geometry(rank), stream), wrong(2, {3, 40, page_size}, stream);
        const cuda::sequence_id id = own.cache.new_sequence();
        cuda::context_prefill prompt;
        const token_view<const float16> none(nullptr, 0, 2, dim);
        const token_view<float> out(nullptr, 0, 4, dim);
        REFUSED(prompt.begin(own.cache, id, split, 5, stream), "not open");
        REFUSED(prompt.open(g, 0), "0 query heads");
        OK(prompt.open(g, 4));
        REFUSED(prompt.open(g, 4), "open already");
        REFUSED(prompt.prefill(0, none, none, none, out, {}, stream), "no chunk");
        REFUSED(prompt.begin(own.cache, id, other, 5, stream), "among 3 ranks does not fit 2 ranks");
        REFUSED(prompt.begin(wrong.cache, id, split, 5, stream),
                ("has 3 sinks, 40 recent tokens and pages of " + std::to_string(page_size)).c_str());
        REFUSED(prompt.begin(own.cache, id, split, 0, stream), "a chunk of 0 tokens");
        REFUSED(prompt.begin(own.cache, id, split, 8000, stream), "max_tokens is 3000");
        RANK_CHECK(split.tokens() == 0 && own.cache.tokens(id) == 0, "a refused chunk has %d tokens",
                   split.tokens());
        own.prompt(id, tokens_of(1, 2, 3), {{0, 3}}, {0, 2});
        REFUSED(prompt.begin(own.cache, id, split, 5, stream),
                "holds 3 tokens, its part of the context has 0");
        OK(own.cache.trim(id, 0));
        OK(prompt.begin(own.cache, id, split, 200, stream));
        const int n = prompt.own_tokens();
        RANK_CHECK(n > 0 && prompt.bytes() > 0, "rank %d has no tokens", rank);
        const test::device_buffer<float16> x(static_cast<std::size_t>(n * 4 * dim));
        const test::device_buffer<float> y(x.size());
        const token_view<const float16> q(x.get(), n, 4, dim), kv(x.get(), n, 2, dim);
        const token_view<float> to(y.get(), n, 4, dim);
        const auto attempt = [&](int layer, const token_view<const float16>& queries,
                                 const token_view<const float16>& keys, const cuda::prefill_options& options,
                                 const char* part) {
            REFUSED(prompt.prefill(layer, keys, kv, queries, to, options, stream), part);
        };
        attempt(2, q, kv, {}, "layer 2 is not among the 2 layers");
        attempt(0, q.slice(1, n - 1), kv, {}, "tokens of the chunk, but q has");
        attempt(0, kv, kv, {}, "q, k, v, out have 2, 2, 2, 4 heads");
        attempt(0, q, q, {}, "q, k, v, out have 4, 4, 2, 4 heads");
        attempt(0, q, kv, {.window = 5}, "no sliding window (got 5)");
        attempt(0, q, kv, {.sink_logits = y.get()}, "no learned sinks");
        attempt(0, q, kv, {.softcap = -1.0f}, "softcap -1");
        attempt(0, {x.get(), n, 4, 32}, kv, {}, "32, 64, 64, 64 channels");
        // Refusals have changed nothing.
        for (int layer = 0; layer < layers; ++layer) OK(prompt.prefill(layer, kv, kv, q, to, {}, stream));
        OK(g.wait(stream, "for outputs"));
    });
}

// ---- heads ----

void check_heads(int ranks, const std::vector<int>& weights) {
    constexpr int heads = 5, group = 4, q_heads = heads * group, n = 500;
    const page_geometry geometry{4, 40, page_size};
    const tokens_of x(7, heads, n);
    const auto kv = split(heads, weights);
    std::vector<index_range> queries;
    for (const index_range& r : kv) queries.push_back({r.first * group, r.end * group});
    const auto q = random_rows(8, q_heads * dim);
    std::vector<double> worst(static_cast<std::size_t>(ranks));
    run_ranks(ranks, 60s, [&](int rank, cuda::nccl_group& g, cudaStream_t stream) {
        const index_range mine = kv[static_cast<std::size_t>(rank)],
                          own_q = queries[static_cast<std::size_t>(rank)];
        std::vector<float16> own(static_cast<std::size_t>(own_q.size() * dim)), part;
        part.assign(q.begin() + own_q.first * dim, q.begin() + own_q.end * dim);
        const test::device_buffer<float16> out(static_cast<std::size_t>(own_q.size() * dim)), query(part);
        held_cache one(heads, geometry, stream);
        const cuda::sequence_id whole[] = {one.cache.new_sequence()};
        one.prompt(whole[0], x, {{0, n}}, {0, heads});
        OK(one.cache.begin_step(whole, 0, stream));
        const auto want = one.attend(1, q, 1, q_heads);
        if (mine.size() > 0) {
            held_cache c(mine.size(), geometry, stream), twin(mine.size(), geometry, stream);
            const cuda::sequence_id id[] = {c.cache.new_sequence()}, other[] = {twin.cache.new_sequence()};
            c.prompt(id[0], x, {{0, n}}, mine);
            twin.prompt(other[0], x, {{0, n}}, mine);
            OK(c.cache.begin_step(id, 0, stream));
            OK(twin.cache.begin_step(other, 0, stream));
            OK(c.cache.attend(1, token_view<const float16>(query.get(), 1, own_q.size(), dim),
                              token_view<float16>(out.get(), 1, own_q.size(), dim), {}, stream));
            const auto a = c.attend(1, part, 1, own_q.size()), b = twin.attend(1, part, 1, own_q.size());
            RANK_CHECK(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0,
                       "rank %d is not repeatable", rank);
            worst[static_cast<std::size_t>(rank)] = distance(
                a, std::vector<float>(want.begin() + own_q.first * dim, want.begin() + own_q.end * dim));
        }
        const test::device_buffer<float16> all(static_cast<std::size_t>(q_heads * dim)), scratch(all.size());
        OK(cuda::gather_heads<float16>(g, queries, token_view<const float16>(out.get(), 1, own_q.size(), dim),
                                       token_view<float16>(all.get(), 1, q_heads, dim), scratch.get(),
                                       stream));
        OK(g.wait(stream, "for heads"));
        const auto y = all.download(), z = out.download();
        RANK_CHECK(std::memcmp(y.data() + own_q.first * dim, z.data(), z.size() * 2) == 0,
                   "own heads have moved");
        std::vector<float> floats;
        for (const float16 v : y) floats.push_back(static_cast<float>(v));
        RANK_CHECK(distance(floats, want) <= 1e-3, "rank %d: gathered heads are %.3g off", rank,
                   distance(floats, want));
    });
    const double most = *std::max_element(worst.begin(), worst.end());
    CHECK(most <= most_distance, "heads on %d ranks: %.3g off", ranks, most);
    std::printf("  heads on %d ranks: distance to one rank %.2e\n", ranks, most);
}

// ---- transfers ----

/// Are all quantized pages of two sequences the same bytes in the same formats?
void same_pages(const held_cache& a, cuda::sequence_id ia, const held_cache& b, cuda::sequence_id ib,
                const char* name) {
    using access = cuda::detail::transfer_access;
    const auto &x = access::pages_of(a.cache, ia), &y = access::pages_of(b.cache, ib);
    RANK_CHECK(x.tokens() == y.tokens() && x.pages() == y.pages() && x.committed() == y.committed() &&
                   x.target() == y.target() && x.first_in_window() == y.first_in_window(),
               "%s: %d tokens, %d quantized pages, copies from %d; expected %d, %d, %d", name, x.tokens(),
               x.committed(), x.first_in_window(), y.tokens(), y.committed(), y.first_in_window());
    int different = 0;
    for (int i = 0; i < x.committed() && i < y.committed(); ++i) {
        const page_span &of_x = x[i], &of_y = y[i];
        const int kind = x.format_of(of_x);
        RANK_CHECK(kind == y.format_of(of_y), "%s: page %d has format %d, not %d", name, i, kind,
                   y.format_of(of_y));
        RANK_CHECK(
            of_x.first_token == of_y.first_token && of_x.skip == of_y.skip && of_x.tokens == of_y.tokens,
            "%s: page %d shows tokens from %d on, not from %d on", name, i, of_x.first_token,
            of_y.first_token);
        if (kind != y.format_of(of_y)) continue;
        for (int layer = 0; layer < layers; ++layer)
            for (const tensor role : {tensor::key, tensor::value}) {
                const auto &m = access::pool(a.cache, kind).memory(),
                           &n = access::pool(b.cache, kind).memory();
                std::vector<std::byte> p(m.page_bytes(role)), q(p.size());
                CUDA_OK(cudaMemcpy(p.data(), m.page(role, layer, x.number_of(of_x)), p.size(),
                                   cudaMemcpyDeviceToHost));
                CUDA_OK(cudaMemcpy(q.data(), n.page(role, layer, y.number_of(of_y)), q.size(),
                                   cudaMemcpyDeviceToHost));
                different += p != q;
            }
    }
    RANK_CHECK(different == 0, "%s: %d pages differ", name, different);
}

struct transfer_case {
    const char* name;
    page_geometry from, to;
    const char* asked;  // format
    int n;
    bool mixed = false;  // the sender has pages of two formats
    bool cut = false;    // a trim has ended in one of them
};

/// Rank 0 sends to rank `to`; both go on with the same tokens as a cache that was never moved.
void check_transfer(int ranks, int to, const transfer_case& t) {
    constexpr int heads = 2, q_heads = 8, more = 70;
    const std::vector<tokens_of> x{tokens_of(21, heads, t.n + more)};
    run_ranks(ranks, 60s, [&](int rank, cuda::nccl_group& g, cudaStream_t stream) {
        const auto prompt = [&](held_cache& c) {
            const cuda::sequence_id id = c.cache.new_sequence();
            c.prompt(id, x[0], {{0, t.n / 2}}, {0, heads});
            if (t.mixed)
                OK(c.cache.requantize(std::span(&id, 1),
                                      {.format = "int8", .first_token = 64, .last_token = 200}, stream));
            const int left = t.cut ? t.n / 2 - 100 : t.n / 2;
            OK(c.cache.trim(id, left));
            c.prompt(id, x[0], {{left, t.n}}, {0, heads});
            return id;
        };
        if (rank == 0) {
            held_cache c(heads, t.from, stream);
            const cuda::sequence_id id = prompt(c);
            cuda::sequence_sender sender;
            OK(sender.open(g, to, c.cache, id, stream));
            REFUSED(sender.send_layer(1, stream), "layer 0 is the next one");
            REFUSED(sender.finish(), "after 0 of 2 layers");
            for (int layer = 0; layer < layers; ++layer) OK(sender.send_layer(layer, stream));
            cuda::sequence_report report;
            OK(sender.finish(&report));
            RANK_CHECK(report.tokens == t.n && report.bytes > 0 &&
                           (t.asked[0] != '\0' || report.bytes <= report.bytes_as_is),
                       "%s: %d tokens, %zu of %zu bytes", t.name, report.tokens, report.bytes,
                       report.bytes_as_is);
            std::printf("  %-44s %zu bytes, as they are %zu, saved %zu\n", t.name, report.bytes,
                        report.bytes_as_is, report.saved());
        }
        if (rank != to) return;
        held_cache c(heads, t.to, stream), twin(heads, t.to, stream);
        const cuda::sequence_id want = prompt(twin);
        if (t.asked[0] != '\0')
            OK(twin.cache.requantize(std::span(&want, 1), {.format = t.asked, .new_pages = true}, stream));
        cuda::sequence_receiver receiver;
        OK(receiver.open(g, 0, c.cache, stream, t.asked));
        cuda::sequence_id id;
        cuda::sequence_report report;
        OK(receiver.receive(id, &report));
        RANK_CHECK(c.cache.tokens(id) == t.n, "%s: %d tokens", t.name, c.cache.tokens(id));
        if (c.cache.tokens(id) != t.n) return;
        std::size_t data = 0;
        data = c.cache.usage(id).bytes;
        RANK_CHECK(report.bytes == data && report.bytes == c.used_pages(),
                   "%s: %zu bytes came, the sequence has %zu", t.name, report.bytes, data);
        same_pages(c, id, twin, want, t.name);
        const cuda::sequence_id a[] = {id}, b[] = {want};
        for (int i = 0; i < more; ++i) {
            c.step(a, x, {t.n + i}, {0, heads});
            twin.step(b, x, {t.n + i}, {0, heads});
            if (i % 23 != 0) continue;
            const auto q = random_rows(30, q_heads * dim);
            const auto y = c.attend(1, q, 1, q_heads), z = twin.attend(1, q, 1, q_heads);
            RANK_CHECK(std::memcmp(y.data(), z.data(), y.size() * sizeof(float)) == 0, "%s: outputs differ",
                       t.name);
        }
        same_pages(c, id, twin, want, t.name);
        OK(c.cache.free(id));
        RANK_CHECK(c.used_pages() == 0, "%s: %zu bytes are in use by no sequence", t.name, c.used_pages());
    });
}

void check_refusals() {
    constexpr int heads = 2, n = 300;
    const tokens_of x(21, heads, n);
    const page_geometry geometry{4, 40, page_size};
    const auto attempt = [&](const page_geometry& to, const std::vector<std::string>& formats,
                             const char* asked, int max_tokens, const char* at_sender,
                             const char* at_receiver) {
        run_ranks(2, 60s, [&](int rank, cuda::nccl_group& g, cudaStream_t stream) {
            if (rank == 0) {
                held_cache c(heads, geometry, stream);
                const cuda::sequence_id id = c.cache.new_sequence();
                c.prompt(id, x, {{0, n}}, {0, heads});
                cuda::sequence_sender sender;
                REFUSED(sender.open(g, 0, c.cache, id, stream), "no pages with rank 0");
                REFUSED(sender.open(g, 1, c.cache, {}, stream), "not one of this cache");
                REFUSED(sender.open(g, 1, c.cache, id, stream), at_sender);
                return;
            }
            held_cache c(heads, to, stream, 4, max_tokens, formats);
            cuda::sequence_receiver receiver;
            REFUSED(receiver.open(g, 0, c.cache, stream, "std4"), "not a format of the receiving cache");
            OK(receiver.open(g, 0, c.cache, stream, asked));
            cuda::sequence_id id;
            REFUSED(receiver.receive(id), at_receiver);
            RANK_CHECK(id == cuda::sequence_id{} && c.used_pages() == 0, "a refused sequence has left pages");
        });
    };
    attempt({4, 40, page_size}, {kivi4_name}, "", 200, "rank 1 refuses the sequence: kvq: a sequence of 300",
            "max_tokens is 200");
    attempt({4, 41, page_size}, {kivi4_name}, "", 3000, "sinks, page_tokens and recent",
            "rank 0 cannot send the sequence: kvq: sinks");
    attempt({3, 40, page_size}, {kivi4_name}, "", 3000, "sinks, page_tokens and recent",
            "rank 0 cannot send");
}

/// A sender whose messages go wrong, made of the parts of sequence_sender.
void check_damage(unsigned seed) {
    constexpr int heads = 2, n = 300;
    const tokens_of x(21, heads, n);
    const page_geometry geometry{4, 40, page_size};
    run_ranks(2, 60s, [&](int rank, cuda::nccl_group& g, cudaStream_t stream) {
        namespace d = cuda::detail;
        held_cache c(heads, geometry, stream);
        if (rank == 1) {
            cuda::sequence_receiver receiver;
            OK(receiver.open(g, 0, c.cache, stream));
            cuda::sequence_id id;
            REFUSED(receiver.receive(id), "layer 1 from rank 0 is damaged");
            RANK_CHECK(id == cuda::sequence_id{} && c.used_pages() == 0, "a damaged sequence has left pages");
            return;
        }
        const cuda::sequence_id id = c.cache.new_sequence();
        c.prompt(id, x, {{0, n}}, {0, heads});
        test::rng r(seed);
        d::transfer_pipe pipe;
        OK(pipe.open(g, 1, {}, stream));
        d::transfer_request request;
        d::transfer_offer offer;
        d::transfer_plan plan;
        d::plan_memory memory;
        d::transfer_answer answer;
        OK(pipe.receive_words(request, "for a request"));
        OK(d::transfer_access::plan_sending(c.cache, id, request, offer, plan, memory, stream));
        OK(pipe.send_words(offer, "for an offer"));
        OK(pipe.send_list(plan.formats, "for formats"));
        OK(pipe.receive_words(answer, "for an answer"));
        OK(pipe.reserve(plan.most_bytes(), {}, stream));
        RANK_CHECK(plan.messages.size() == 1 && plan.slices() == 1, "%zu messages", plan.messages.size());
        const std::size_t bytes = plan.slice_at(0).bytes;
        for (int layer = 0; layer < layers; ++layer)
            OK(d::transfer_access::pack(c.cache, plan, plan.slice_at(0), layer, 0,
                                        pipe.next() + static_cast<std::size_t>(layer) * bytes, memory,
                                        pipe.messages));
        CUDA_OK(cudaStreamSynchronize(pipe.messages));
        // One bit of the second layer; words behind the header's checksum are the receiver's.
        std::size_t at = r() % (bytes - 32);
        if (at >= 32) at += 32;
        std::byte b{};
        CUDA_OK(cudaMemcpy(&b, pipe.next() + bytes + at, 1, cudaMemcpyDeviceToHost));
        b ^= static_cast<std::byte>(1u << r() % 8);
        CUDA_OK(cudaMemcpy(pipe.next() + bytes + at, &b, 1, cudaMemcpyHostToDevice));
        CUDA_OK(cudaDeviceSynchronize());
        OK(g.send(pipe.next(), plan.messages[0].bytes, 1, pipe.messages));
        OK(g.wait(pipe.messages, "until layers are sent"));
    });
}

// ---- ranks that are silent or gone ----

void check_silence(int ranks) {
#ifndef __CUDACC__
    emulated_patience = 100ms;
#endif
    constexpr auto limit = 2s;
    const auto start = std::chrono::steady_clock::now();
    // The last rank takes no part in a merge, and stays until the others have noticed.
    std::mutex mutex;
    int noticed = 0;
    const auto all_noticed = [&] {
        const std::lock_guard lock(mutex);
        return noticed == ranks - 1;
    };
    run_ranks(ranks, limit, [&](int rank, cuda::nccl_group& g, cudaStream_t stream) {
        cuda::context_attention merge;
        OK(merge.open(g, 1, 4, dim, stream));
        if (rank == ranks - 1) {
            while (!all_noticed()) std::this_thread::sleep_for(5ms);
            return;
        }
        const test::device_buffer<float> out(4 * dim);
        const token_view<float> view(out.get(), 1, 4, dim);
        cuda::status s = merge.merge(view, nullptr, stream);
        if (s) s = g.wait(stream, "for the partial outputs");
        REFUSED(s, "rank");
        RANK_CHECK(s.code == cudaErrorTimeout || s.code == cudaErrorUnknown, "code %d",
                   static_cast<int>(s.code));
        REFUSED(merge.merge(view, nullptr, stream), "failed before");
        REFUSED(g.wait(stream, "again"), "failed before");
        const std::lock_guard lock(mutex);
        ++noticed;
    });
    noticed = 0;
    run_ranks(ranks, limit, [&](int rank, cuda::nccl_group& g, cudaStream_t stream) {
        cuda::peer_context_attention peers;
        OK(peers.open(g, 1, 4, dim, stream));
        if (rank == ranks - 1) {
            while (!all_noticed()) std::this_thread::sleep_for(5ms);
            return;
        }
        const test::device_buffer<float> out(4 * dim);
        cuda::status s = peers.merge(token_view<float>(out.get(), 1, 4, dim), nullptr, stream);
        if (s) s = peers.wait(stream, "for the partial outputs");
        REFUSED(s, "which is the time limit");
        CUDA_OK(cudaStreamSynchronize(stream));
        const std::lock_guard lock(mutex);
        ++noticed;
    });
    // A rank that takes no part in a layer of a prompt; all queries go to it.
    noticed = 0;
    run_ranks(ranks, limit, [&](int rank, cuda::nccl_group& g, cudaStream_t stream) {
        const std::vector<int> weights(static_cast<std::size_t>(ranks), 1);
        context_split split({4, 40, page_size}, weights, ranks - 1, page_size);
        held_cache own(2, split.geometry(rank), stream);
        const cuda::sequence_id id = own.cache.new_sequence();
        cuda::context_prefill prompt;
        OK(prompt.open(g, 4));
        OK(prompt.begin(own.cache, id, split, 300, stream));
        if (rank == ranks - 1) {
            while (!all_noticed()) std::this_thread::sleep_for(5ms);
            return;
        }
        const int n = prompt.own_tokens();
        const test::device_buffer<float16> x(static_cast<std::size_t>(n * 4 * dim)), y(x.size());
        const token_view<const float16> kv(x.get(), n, 2, dim);
        const auto step = [&](int layer) {
            return prompt.prefill(layer, kv, kv, token_view<const float16>(x.get(), n, 4, dim),
                                  token_view<float16>(y.get(), n, 4, dim), {}, stream);
        };
        cuda::status s = step(0);
        if (s) s = g.wait(stream, "for the outputs");
        REFUSED(s, "rank");
        RANK_CHECK(s.code == cudaErrorTimeout || s.code == cudaErrorUnknown, "code %d",
                   static_cast<int>(s.code));
        RANK_CHECK(!step(1), "a chunk goes on behind an error");
        REFUSED(prompt.begin(own.cache, id, split, 1, stream), "failed before");
        OK(own.cache.free(id));
        RANK_CHECK(own.used_pages() == 0, "a freed sequence has left pages");
        const std::lock_guard lock(mutex);
        ++noticed;
    });
    // A sender that stops after a layer.
#ifndef __CUDACC__
    emulated_patience = 4s;
#endif
    const tokens_of x(21, 2, 300);
    std::mutex ended;
    bool over = false;
    run_ranks(2, limit, [&](int rank, cuda::nccl_group& g, cudaStream_t stream) {
        held_cache c(2, {4, 40, page_size}, stream);
        if (rank == 0) {
            const cuda::sequence_id id = c.cache.new_sequence();
            c.prompt(id, x, {{0, 300}}, {0, 2});
            cuda::sequence_sender sender;
            OK(sender.open(g, 1, c.cache, id, stream));
            OK(sender.send_layer(0, stream));
            while (true) {
                std::this_thread::sleep_for(5ms);
                const std::lock_guard lock(ended);
                if (over) break;
            }
            return;
        }
        cuda::sequence_receiver receiver;
        OK(receiver.open(g, 0, c.cache, stream));
        cuda::sequence_id id;
        const cuda::status s = receiver.receive(id);
        RANK_CHECK(!s, "half a sequence was received");
        RANK_CHECK(id == cuda::sequence_id{} && c.used_pages() == 0, "half a sequence has left pages");
        const std::lock_guard lock(ended);
        over = true;
    });
    // Nobody joins.
    ncclUniqueId id;
    OK(cuda::nccl_group::make_id(id));
    cuda::nccl_group alone;
    CUDA_OK(cudaSetDevice(0));
    REFUSED(alone.open(id, 0, 2, 500ms), "waited 500 ms, which is the time limit: joining the group");
    REFUSED(alone.open(id, 2, 2, 500ms), "rank 2 is not among 2 ranks");
    REFUSED(alone.open(id, 0, 2, 0ms), "time limit of a group is 0 ms");
    REFUSED(alone.adopt(nullptr), "communicator of the engine");
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    CHECK(seconds < 60.0, "silent ranks took %.1f s", seconds);
    std::printf("  silent ranks: noticed, %.1f s in all\n", seconds);
}

#ifdef __CUDACC__
/// Ranks that are processes; the last one is killed. Before this process has used CUDA.
bool check_processes(int ranks) {
    std::fflush(stdout);
    std::vector<pid_t> children;
    int channel[2];
    if (pipe(channel) != 0) return false;
    for (int r = 0; r < ranks; ++r) {
        const pid_t child = fork();
        if (child == 0) {
            CUDA_OK(cudaSetDevice(r));
            ncclUniqueId id;
            if (r == 0) {
                OK(cuda::nccl_group::make_id(id));
                for (int i = 1; i < ranks; ++i)
                    if (write(channel[1], &id, sizeof id) != sizeof id) _exit(9);
            } else if (read(channel[0], &id, sizeof id) != sizeof id) {
                _exit(9);
            }
            cudaStream_t stream;
            CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
            cuda::nccl_group group;
            OK(group.open(id, r, ranks, 6s));
            cuda::context_attention merge;
            OK(merge.open(group, 1, 4, dim, stream));
            test::device_buffer<float> out(4 * dim);
            const token_view<float> view(out.get(), 1, 4, dim);
            std::vector<float> states;
            test::rng random(static_cast<unsigned>(r));
            for (int i = 0; i < 4 * (dim + 2); ++i) states.push_back(1.0f + std::abs(test::normal(random)));
            cuda::peer_context_attention peers;
            OK(peers.open(group, 1, 4, dim, stream));
            for (float* to : {merge.own_states(), peers.own_states()})
                CUDA_OK(cudaMemcpy(to, states.data(), states.size() * sizeof(float), cudaMemcpyHostToDevice));
            CUDA_OK(cudaDeviceSynchronize());
            cuda::status s = merge.merge(view, nullptr, stream);
            if (s) s = group.wait(stream, "for the partial outputs");
            OK(s);
            const auto want = out.download();
            for (int i = 0; i < 5; ++i) {
                out.poison();
                OK(peers.merge(view, nullptr, stream));
                OK(peers.wait(stream, "for the partial outputs"));
                const auto have = out.download();
                CHECK(std::memcmp(want.data(), have.data(), want.size() * sizeof(float)) == 0,
                      "outputs over peer memory of processes differ");
            }
            if (r == ranks - 1) {
                std::this_thread::sleep_for(200ms);
                kill(getpid(), SIGKILL);
            }
            const auto start = std::chrono::steady_clock::now();
            while (s && std::chrono::steady_clock::now() - start < 60s) {
                s = merge.merge(view, nullptr, stream);
                if (s) s = group.wait(stream, "for the partial outputs");
            }
            std::printf("  rank %d, %.1f s after the other was killed: %s\n", r,
                        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(),
                        s.message);
            std::fflush(stdout);
            _exit(!s && test::failures == 0 ? 0 : 1);
        }
        children.push_back(child);
    }
    bool good = true;
    for (int r = 0; r < ranks; ++r) {
        int state = 0;
        waitpid(children[static_cast<std::size_t>(r)], &state, 0);
        good = good && (r == ranks - 1 ? WIFSIGNALED(state) : WIFEXITED(state) && WEXITSTATUS(state) == 0);
    }
    close(channel[0]);
    close(channel[1]);
    return good;
}
#endif

void check_all(int ranks) {
#ifdef __CUDACC__
    CHECK(check_processes(ranks), "ranks that are processes");
#endif
    const std::vector<int> equal(static_cast<std::size_t>(ranks), 1);
    std::vector<int> uneven = equal;
    uneven[0] = 3;
    check_context(ranks, equal, 4, page_size, 1);
#ifndef __CUDACC__
    if (ranks == 2) {  // emulated, the rest on 3 ranks alone
        check_prompts(ranks);
        check_heads(ranks, equal);
        check_transfer(ranks, 1, {"as it is", {4, 40, page_size}, {4, 40, page_size}, "", 700});
        return;
    }
#endif
    check_context(ranks, uneven, 2, 64, 2);
    check_context(ranks, equal, 8, 128, 3);
#ifdef __CUDACC__
    check_context(ranks, equal, 4, page_size, 4, {40000, 90, 9000}, 2e-5);
#endif
    check_prompts(ranks);
    check_prompt_refusals();
    check_heads(ranks, equal);
    check_heads(ranks, uneven);
    const page_geometry usual{4, 40, page_size}, long_window{4, 1200, page_size};
    check_transfer(ranks, 1, {"as it is", usual, usual, "", 700});
    check_transfer(ranks, ranks - 1, {"4 and 8 bit pages, as they are", usual, usual, "", 700, true});
    check_transfer(ranks, 1, {"int8 asked for", usual, usual, "int8", 500, true});
    check_transfer(ranks, 1, {"16 bit to 4 bit on the way", long_window, usual, "", 800});
    check_transfer(ranks, 1, {"16 bit as it is", long_window, long_window, "", 800});
    check_transfer(ranks, 1, {"behind a trim, as it is", usual, usual, "", 700, false, true});
    check_transfer(ranks, 1, {"behind a trim, int8 asked for", usual, usual, "int8", 500, true, true});
    check_transfer(ranks, 1, {"sinks only", usual, usual, "", 3});
    check_refusals();
    for (unsigned seed = 1; seed <= 4; ++seed) check_damage(seed);
    check_silence(ranks);
}

}  // namespace

int main(int argc, char** argv) {
    const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
    if (ranks < 2) {
        std::printf("nccl: needs two ranks\n");
        return 2;
    }
    check_all(ranks);
#ifndef __CUDACC__
    emulated_patience = 60s;
    check_all(3);
#endif
    return test::report("nccl");
}
