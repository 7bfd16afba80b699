// A cache that owns its pages (kvq/cuda/host/cache.hpp) against a CPU cache that does the same: random
// histories of steps, prompts, trims, forks, drafted trees, requantizing and offload with the same bytes
// afterwards, attention against double arithmetic, graphs that are replayed while contexts grow, bytes of
// memory, refusals.
#include <unistd.h>

#include <bit>
#include <cstdio>
#include <filesystem>
#include <map>
#include <numeric>
#include <set>

#include <kvq/attention/masks.hpp>
#include <kvq/cache/rearrange.hpp>
#include <kvq/cache/requantize.hpp>
#include <kvq/cache/retain.hpp>
#include <kvq/cache/sequence_access.hpp>
#include <kvq/cache/step_down.hpp>
#include <kvq/cuda.cuh>
#include <kvq/cuda/host/prefixes.hpp>
#include <kvq/cuda/host/self_calibration.hpp>
#include <kvq/format/make_format.hpp>
#include <kvq/policy/prefix_cache.hpp>
#include <kvq/policy/prefix_tiers.hpp>
#include <kvq/policy/ring.hpp>

#include "counted_memory.cuh"
#include "random_tree.hpp"
#include "saved_sequence.cuh"
#include "support.cuh"

using namespace kvq;

namespace {

constexpr int dim = 64, layers = 2, heads = 2, q_heads = 4;

#ifdef __CUDACC__
[[maybe_unused]] int long_run = 4000, graph_steps = 400;
#else
#ifndef PART
#define PART 0
#endif
[[maybe_unused]] int long_run = PART == 0 ? 350 : 120, graph_steps = 100;
#endif
#if PART == 0
constexpr int page = 32;
using kivi4 = cuda::kivi_pair<4, 32, dim, page>;
using wide = cuda::block_pair<int8, int8, dim, page>;
using both = cuda::block_pair<kivi4::keys, int8, dim, page>;  // of three pairs: K and V are requantized apart

const cuda::device_format& compiled() {
    static const cuda::device_format f = cuda::make_device_format<float16, kivi4, wide, both>();
    return f;
}
/// The same formats on the CPU.
struct host_formats {
    format_list keys = {make_format<kivi4::keys, scalar>(), make_format<int8, scalar>()};
    format_list values = {make_format<kivi4::values, scalar>(), make_format<int8, scalar>()};
    std::vector<std::string> names = {"kivi-4-g32", "int8"};
};
#elif PART == 3
// Rows of tokens in the bytes of other systems.
constexpr int page = 32;
using fp8 = rows_of<row_layout_number("fp8")>;
using nvfp4 = rows_of<row_layout_number("nvfp4")>;
using mxfp8 = rows_of<row_layout_number("mxfp8")>;

const cuda::device_format& compiled() {
    static const cuda::device_format f =
        cuda::make_device_format<float16, cuda::block_pair<fp8, nvfp4, dim, page>,
                                 cuda::block_pair<mxfp8, fp8, dim, page>>();
    return f;
}
struct host_formats {
    format_list keys = {make_format<fp8, scalar>(), make_format<mxfp8, scalar>()};
    format_list values = {make_format<nvfp4, scalar>(), make_format<fp8, scalar>()};
    std::vector<std::string> names = {"fp8/nvfp4", "mxfp8/fp8"};
};
#elif PART == 2
// Two pages are a warp tile. One format is behind transforms, and both its pages are the larger ones: a page
// on the device is a pair, so "only smaller" means the same on both sides.
constexpr int page = 16;
using affine4 = affine<4, per_token<32>>;
using affine2 = affine<2, per_token<32>>;
using turned_keys = hadamard<int8>;
using turned_values = rotated<affine4>;

const cuda::device_format& compiled() {
    static const cuda::device_format f =
        cuda::make_device_format<float16, cuda::block_pair<affine4, affine2, dim, page>,
                                 cuda::block_pair<turned_keys, turned_values, dim, page>>();
    return f;
}
const rotation& matrices() {
    static const rotation all = [] {
        test::rng r(3);
        return rotation(layers, heads, dim, test::random_rotations(r, layers * heads, dim));
    }();
    return all;
}
struct host_formats {
    format_list keys = {make_format<affine4, scalar>(), make_format<turned_keys, scalar>()};
    format_list values = {make_format<affine2, scalar>(), make_format<scalar>(turned_values(matrices()))};
    std::vector<std::string> names = {compiled().kinds[0].name, compiled().kinds[1].name};
};
#else
constexpr int page = 64;

const cuda::device_format& compiled() {
    static const cuda::device_format f =
        cuda::make_device_format<float16, cuda::preset_pair<low2, dim, page>,
                                 cuda::block_pair<int8, low2::values, dim, page>>();
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

struct both_options {
    int sinks = 4, recent = 40, rollback = 16, max_batch = 4, max_tokens = 1200, step_tokens = 3,
        draft_tokens = 24;
    int pool_tokens = 0, pool_sequences = 0, cut_pages = 64, listed_tokens = 0, resident_tokens = 0;
    bool growing = true;
    std::vector<kvq::layer> list = {};  // empty: equal layers
    bool rotates = true;                // keys may move
    key_statistics statistics = key_statistics::off;
    int statistics_tokens = 512;
    std::size_t prompt_scratch = cuda::automatic_scratch;
};

/// How keys are rotated: layers differ in where the pairs are, and in how many channels turn.
std::vector<rotary_embedding> rotations(const both_options& o) {
    std::vector<rotary_embedding> list;
    const std::size_t count = o.list.empty() ? layers : o.list.size();
    for (std::size_t i = 0; i < count && o.rotates; ++i) {
        // Those that share a layer rotate as it does.
        const bool shares = !o.list.empty() && o.list[i].kind == layer_kind::shared;
        const std::size_t as = shares && o.list[i].owner >= 0 ? static_cast<std::size_t>(o.list[i].owner) : i;
        list.push_back(as % 2 == 0 ? rotary_embedding{.dims = dim, .base = 500.0}
                                   : rotary_embedding{.dims = dim / 2,
                                                      .first_channel = dim / 4,
                                                      .layout = rotary_layout::interleaved});
    }
    return list;
}

/// The same cache on both sides.
struct both_caches {
    both_options o;
    cudaStream_t stream;
    kvq::cache cpu;
    cuda::cache gpu;
    test::device_buffer<float16> k, v, q, out;

    static constexpr int room = 256, most_layers = 8;  // tokens of a launch; of a list

    explicit both_caches(const both_options& options, const cuda::device_format& format = compiled())
        : o(options),
          cpu(o.list.empty() ? std::vector<kvq::layer>(layers, full_attention({heads, dim})) : o.list,
              {.keys = keys_of(o),
               .values = host_formats().values,
               .sinks = o.sinks,
               .recent = o.recent,
               .page_tokens = page,
               .rollback = o.rollback,
               .rotary = rotations(o),
               .repack = 0.0f,  // as the device
               .statistics = o.statistics,
               .statistics_tokens = o.statistics_tokens}),
          k(most_layers * room * heads * dim),
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
        g.draft_tokens = o.draft_tokens;
        g.pool_tokens = o.pool_tokens;
        g.pool_sequences = o.pool_sequences;
        g.growing = o.growing;
        g.prompt_scratch = o.prompt_scratch;
        g.cut_pages = o.cut_pages;
        g.listed_tokens = o.listed_tokens;
        g.resident_tokens = o.resident_tokens;
        g.query_heads = q_heads;
        g.rotary = rotations(o);
        g.statistics = o.statistics;
        g.statistics_tokens = o.statistics_tokens;
        g.memory = test::counted_memory::allocator();
        cuda::status s = o.list.empty() ? gpu.open(cpu.shape(), g, std::span(&format, 1), stream)
                                        : gpu.open(o.list, g, std::span(&format, 1), stream);
        CHECK(s, "%s", s.message);
#if PART == 2
        s = gpu.rotate(g.formats[1], tensor::value, matrices(), stream);
        CHECK(s, "%s", s.message);
#endif
    }
    ~both_caches() {
        CUDA_OK(cudaStreamSynchronize(stream));
        CUDA_OK(cudaStreamDestroy(stream));
    }

    static format_list keys_of([[maybe_unused]] const both_options& o) {
#if PART == 1
        if (o.statistics != key_statistics::off) return make_format<low2::keys, scalar>();
#endif
        return host_formats().keys;
    }
    int count() const { return cpu.layer_count(); }
    int heads_of(int layer) const { return cpu.shape(layer).kv_heads; }
    bool is_cross(int layer) const {
        return cpu.layers()[static_cast<std::size_t>(layer)].kind == layer_kind::cross;
    }
    /// Does a layer take the tokens of steps and prompts?
    bool takes_tokens(int layer) const { return cpu.takes_steps(layer); }
    key_window window_of(int layer) const {
        return cpu.layers()[static_cast<std::size_t>(cpu.owner(layer))].sees();
    }
    /// One layer's part of the buffers.
    token_view<const float16> rows(const test::device_buffer<float16>& x, int layer, int tokens) const {
        return {x.get() + layer * room * heads * dim, tokens, heads_of(layer), dim};
    }
    /// New values of the first `tokens` rows of all layers, [layer][room][head][dim], on both sides; the
    /// other rows are NaN. Most of the time of a history is random numbers.
    void write(test::rng& r, std::vector<float16>& keys, std::vector<float16>& values, int tokens = room) {
        keys.assign(k.size(), float16(NAN));
        values.assign(v.size(), float16(NAN));
        for (auto* x : {&keys, &values})
            for (int layer = 0; layer < count(); ++layer) {
                float16* y = x->data() + layer * room * heads * dim;
                for (int i = 0; i < tokens * heads_of(layer) * dim; ++i) y[i] = float16(test::normal(r));
            }
        k.upload(keys);
        v.upload(values);
    }
    void appended(kvq::sequence& s, const std::vector<float16>& keys, const std::vector<float16>& values,
                  int first, int count) {
        for (int layer = 0; layer < this->count(); ++layer) {
            if (takes_tokens(layer)) append_to(s, layer, keys, values, first, count);
        }
    }
    void append_to(kvq::sequence& s, int layer, const std::vector<float16>& keys,
                   const std::vector<float16>& values, int first, int count) {
        const int h = heads_of(layer);
        const auto at = static_cast<std::size_t>(layer * room * heads * dim + first * h * dim);
        s.append(layer, token_view<const float16>(&keys[at], count, h, dim),
                 token_view<const float16>(&values[at], count, h, dim));
    }
};

struct pair {
    cuda::sequence_id id;
    kvq::sequence host;
};

/// Do two 16-bit pages hold the same first `count` tokens?
bool same_values(const kvq::page& a, const kvq::page& b, tensor role, int count, int of_heads) {
    const block_shape sa{role, a.tokens, dim}, sb{role, b.tokens, dim};
    using S = full<float16>;
    for (std::size_t h = 0; h < static_cast<std::size_t>(of_heads); ++h)
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

/// K and V of a layer's tokens as the CPU dequantizes them, [tokens][heads][dim].
struct held_rows {
    std::vector<float> x[2];
    int tokens;

    held_rows(const kvq::sequence& s, int layer) : tokens(s.tokens(layer)) {
        const int h = kvq::detail::sequence_access::cache(s).shape(layer).kv_heads;
        for (const tensor role : {tensor::key, tensor::value}) {
            auto& to = x[static_cast<int>(role)];
            const auto row = static_cast<std::size_t>(h * dim);
            to.resize(static_cast<std::size_t>(tokens) * row);
            // What a window has freed stays 0.
            int sinks = 0, front = 0;
            while (sinks < tokens && s.holds(layer, sinks, sinks + 1)) ++sinks;
            for (front = sinks; front < tokens && !s.holds(layer, front, front + 1);) ++front;
            s.dequantize(layer, role, 0, token_view<float>(to.data(), sinks, h, dim));
            if (front < tokens)
                s.dequantize(
                    layer, role, front,
                    token_view<float>(&to[static_cast<std::size_t>(front) * row], tokens - front, h, dim));
        }
    }
    void append(int count, const float16* keys, const float16* values, int of_heads) {
        for (const auto& [to, from] : {std::pair(&x[0], keys), {&x[1], values}})
            to->insert(to->end(), from, from + count * of_heads * dim);
        tokens += count;
    }
};

/// Relative error of a row of the output against double arithmetic on what the CPU dequantizes. Of tokens
/// from draft_begin on, the row sees those whose bits are set, which are the text before it; of others, sinks
/// that it keeps and the last `window` ones. rounding: the largest product of a weight, 1 at the top, and the
/// standard deviation of its score if keys and their scales are rounded to half floats: half an ulp of 2^-11
/// to either side, a variance of 2 (2^-11)^2 / 12 each.
template <class Out>
double error_of(const kvq::cache& of, const held_rows& held, int layer, int head, int seen, const float16* q,
                const Out* out, int draft_begin, std::uint64_t visible, double slope, int window,
                int kept_sinks, double* rounding = nullptr) {
    const key_window own = of.layers()[static_cast<std::size_t>(layer)].sees();
    const int h = of.shape(layer).kv_heads;
    // The position of a token in the text that the row continues.
    const auto in_text = [&](int t) {
        return t < draft_begin
                   ? t
                   : draft_begin + std::popcount(visible & ((std::uint64_t{1} << (t - draft_begin)) - 1));
    };
    const int position = in_text(seen - 1);
    const auto hidden = [&](int t) {
        const int at = in_text(t);
        return (own && at < own.first_seen(position) && at >= own.sinks) ||
               (t >= draft_begin && (visible >> (t - draft_begin) & 1) == 0) ||
               (window > 0 && at <= position - window && at >= kept_sinks);
    };
    std::vector<double> scores, deviations, want(dim, 0.0);
    double top = -INFINITY, sum = 0.0, error = 0.0, size = 0.0;
    const auto at = [&](int t, int c) {
        return static_cast<std::size_t>((t * h + head / (q_heads / h)) * dim + c);
    };
    for (int t = 0; t < seen; ++t) {
        double score = 0.0, squares = 0.0;
        for (int d = 0; d < dim; ++d) {
            const double product =
                static_cast<double>(static_cast<float>(q[d])) * static_cast<double>(held.x[0][at(t, d)]);
            score += product;
            squares += product * product;
        }
        scores.push_back(hidden(t) ? -INFINITY
                                   : score / std::sqrt(static_cast<double>(dim)) - slope * (seen - 1 - t));
        deviations.push_back(0x1p-11 * std::sqrt(squares / dim / 6.0));
        top = std::max(top, scores.back());
    }
    for (int t = 0; t < seen; ++t) {
        const double p = std::exp(scores[static_cast<std::size_t>(t)] - top);
        sum += p;
        if (rounding != nullptr) *rounding = std::max(*rounding, p * deviations[static_cast<std::size_t>(t)]);
        for (int d = 0; d < dim; ++d)
            want[static_cast<std::size_t>(d)] += p * static_cast<double>(held.x[1][at(t, d)]);
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
double error_of(const kvq::sequence& s, int layer, int head, int seen, const float16* q, const float16* out,
                int draft_begin = 1 << 30, std::uint64_t visible = 0, double slope = 0.0, int window = 0,
                int kept_sinks = 0) {
    const kvq::cache& of = kvq::detail::sequence_access::cache(s);
    layer = of.owner(layer);
    if (!of.takes_steps(layer)) seen = s.tokens(layer), draft_begin = 1 << 30;
    return error_of(of, held_rows(s, layer), layer, head, seen, q, out, draft_begin, visible, slope, window,
                    kept_sinks);
}

/// A prompt that has begun with its queries, against the CPU's prefill, whose outputs are floats. keys,
/// values: what write() gave. slopes: of ALiBi, or none; on_device: the same.
[[maybe_unused]] void prefill(test::rng& r, both_caches& c, pair& p, int n, const std::vector<float16>& keys,
                              const std::vector<float16>& values, int window, bool keeps_sinks,
                              const char* name, int step,
                              const std::vector<float>& slopes = std::vector<float>(q_heads, 0.0f),
                              const float* on_device = nullptr) {
    std::vector<float16> x(static_cast<std::size_t>(n) * q_heads * dim);
    for (float16& y : x) y = float16(test::normal(r));
    c.q.upload(x);
    for (int layer = 0; layer < c.count(); ++layer) {
        if (c.is_cross(layer) && p.host.tokens(layer) == 0) continue;
        const int h = c.heads_of(layer), w = c.window_of(layer).chunked || c.is_cross(layer) ? 0 : window;
        c.out.poison();
        const int own = c.takes_tokens(layer) ? n : 0;
        const auto attend = [&](const auto&... score) {
            return c.gpu.prefill(layer, c.rows(c.k, layer, own), c.rows(c.v, layer, own),
                                 token_view<const float16>(c.q.get(), n, q_heads, dim),
                                 token_view<float16>(c.out.get(), n, q_heads, dim),
                                 {.window = w, .window_sinks = keeps_sinks}, c.stream, score...);
        };
        const cuda::status s = on_device == nullptr ? attend() : attend(cuda::alibi{on_device});
        CHECK(s, "%s, step %d: %s", name, step, s.message);
        CUDA_OK(cudaStreamSynchronize(c.stream));
        const auto got = c.out.download();
        std::vector<float> want(x.size());
        const std::size_t at = static_cast<std::size_t>(layer * c.room) * heads * dim;
        workspace space;
        const int owner = c.cpu.owner(layer);
        held_rows seen_rows(p.host, owner);
        seen_rows.append(own, &keys[at], &values[at], h);
        p.host.prefill(
            layer, token_view<const float16>(&keys[at], own, h, dim),
            token_view<const float16>(&values[at], own, h, dim),
            token_view<const float16>(x.data(), n, q_heads, dim),
            token_view<float>(want.data(), n, q_heads, dim),
            kvq::mods{kvq::alibi{slopes}, sink_window{w > 0 ? w : 1 << 24, keeps_sinks ? c.o.sinks : 0}},
            serial_executor{}, space);
        for (std::size_t row = 0; row < static_cast<std::size_t>(n) * q_heads; ++row) {
            double error = 0.0, size = 0.0;
            for (std::size_t d = row * dim; d < (row + 1) * dim; ++d) {
                const double a = static_cast<double>(want[d]),
                             b = static_cast<double>(static_cast<float>(got[d]));
                error += (a - b) * (a - b);
                size += a * a;
                if (!(b == b)) error = INFINITY;
            }
            // Weights, values and outputs are rounded to half floats as well.
            if (std::sqrt(error / size) <= 1e-3) continue;
            const int head = static_cast<int>(row % q_heads), token = static_cast<int>(row / q_heads),
                      seen = c.is_cross(layer) ? seen_rows.tokens : seen_rows.tokens - n + token + 1;
            const auto against_double = [&](const auto* out, double* rounding) {
                return error_of(c.cpu, seen_rows, owner, head, seen, &x[row * dim], out, 1 << 30, 0,
                                static_cast<double>(slopes[static_cast<std::size_t>(head)]), w,
                                keeps_sinks ? c.o.sinks : 0, rounding);
            };
            double rounding = 0.0;
            const double of_device = against_double(&got[row * dim], &rounding),
                         of_cpu = against_double(&want[row * dim], nullptr);
            CHECK(of_cpu <= 1e-3 && of_device <= 1e-3 + 6.0 * rounding,
                  "%s, step %d: error %.3g, the CPU's %.3g, of prompt row %zu of %d behind %d tokens, limit "
                  "%.3g",
                  name, step, of_device, of_cpu, row, n, p.host.tokens() - n, 1e-3 + 6.0 * rounding);
        }
    }
}

/// Are both sides the same? The device's pages come by offload().
void compare(both_caches& c, const pair& p, const char* name, int step) {
    kvq::sequence moved = c.cpu.new_sequence();
    const cuda::status s = cuda::offload(c.gpu, p.id, moved, c.stream);
    CHECK(s, "%s, step %d: %s", name, step, s.message);
    CHECK(c.gpu.tokens(p.id) == p.host.tokens(), "%s, step %d: %d tokens, the CPU has %d", name, step,
          c.gpu.tokens(p.id), p.host.tokens());
    const usage_report here = c.gpu.usage(p.id), there = p.host.usage();
    CHECK(here.quantized == there.quantized && here.rollback == there.rollback && here.tokens == there.tokens,
          "%s, step %d: %zu bytes quantized and %zu of copies for %d tokens, the CPU has %zu and %zu for %d",
          name, step, here.quantized, here.rollback, here.tokens, there.quantized, there.rollback,
          there.tokens);
    const auto &have = kvq::detail::sequence_access::tables(moved),
               &want = kvq::detail::sequence_access::tables(p.host);
    CHECK(c.gpu.trim_limit(p.id) == p.host.trim_limit(), "%s, step %d: trims reach %d, the CPU's %d", name,
          step, c.gpu.trim_limit(p.id), p.host.trim_limit());
    for (std::size_t layer = 0; layer < have.size(); ++layer) {
        const auto &a = have[layer], &b = want[layer];
        const int h = c.heads_of(static_cast<int>(layer));
        const bool same = a.size() == b.size() && a.committed == b.committed &&
                          a.copies_from == b.copies_from && a.tokens == b.tokens &&
                          a.targets[0] == b.targets[0] && a.targets[1] == b.targets[1];
        CHECK(same,
              "%s, step %d, layer %zu: %d spans, %d committed, copies from %d, %d tokens, target %d; the CPU "
              "has %d, %d, %d, %d, %d",
              name, step, layer, a.size(), a.committed, a.copies_from, a.tokens, a.targets[0], b.size(),
              b.committed, b.copies_from, b.tokens, b.targets[0]);
        if (!same) continue;
        for (int i = 0; i < a.size(); ++i) {
            const page_span &x = a[i], &y = b[i];
            // A quantized page that an erase has closed has no room on the CPU; nothing reads that any more.
            CHECK(
                x.first_token == y.first_token && x.tokens == y.tokens && x.skip == y.skip &&
                    x.shift == y.shift && (x.room == y.room || i < a.committed),
                "%s, step %d: span %d has tokens %d to %d behind %d hidden ones, moved by %lld, the CPU's %d "
                "to %d behind %d, moved by %lld",
                name, step, i, x.first_token, x.end(), x.skip, static_cast<long long>(x.shift), y.first_token,
                y.end(), y.skip, static_cast<long long>(y.shift));
            for (const tensor role : {tensor::key, tensor::value}) {
                const auto at = static_cast<std::size_t>(role);
                const kvq::page &m = *x.pages[at], &n = *y.pages[at];
                CHECK(m.format == n.format, "%s, step %d, layer %zu: page %d has format %d, the CPU's %d",
                      name, step, layer, i, m.format, n.format);
                if (m.format != n.format) continue;
                const bool equal = m.format == 0
                                       ? same_values(m, n, role, x.tokens, h)
                                       : m.bytes == n.bytes && std::memcmp(m.data(), n.data(), m.bytes) == 0;
                CHECK(equal, "%s, step %d, layer %zu: %s of page %d (tokens %d to %d, format %d) differ",
                      name, step, layer, at == 0 ? "keys" : "values", i, x.first_token, x.end(), m.format);
                CHECK(static_cast<bool>(x.copies[at]) == static_cast<bool>(y.copies[at]),
                      "%s, step %d: page %d has %s 16-bit copy", name, step, i, x.copies[at] ? "a" : "no");
                if (x.copies[at] && y.copies[at])
                    CHECK(same_values(*x.copies[at], *y.copies[at], role, x.tokens, h),
                          "%s, step %d: 16-bit copies of page %d differ", name, step, i);
            }
        }
    }
}

/// Sequences whose drafts grow together: trees, their words, what both sides do.
struct drafts {
    both_caches& c;
    std::vector<pair*> rows;
    std::vector<cuda::sequence_id> batch;
    std::vector<test::random_tree> trees;
    std::vector<int> accepted;
    int drafted = 0;
    test::device_buffer<std::uint64_t> words;

    drafts(test::rng& r, both_caches& of, std::vector<pair*> sequences, int tokens)
        : c(of), rows(std::move(sequences)), words(rows.size() * 64) {
        for (const pair* p : rows) {
            batch.push_back(p->id);
            trees.emplace_back(r, tokens);
            accepted.push_back(p->host.tokens());
        }
    }
    /// The words of the newest n drafted tokens.
    std::vector<std::uint64_t> newest(int n) const {
        std::vector<std::uint64_t> all;
        for (const test::random_tree& t : trees)
            for (int i = drafted - n; i < drafted; ++i) all.push_back(t.tree().ancestors(i));
        all.resize(rows.size() * 64);
        return all;
    }
    /// n more drafted tokens on both sides; the device's launches are the caller's, between these two.
    cuda::status begin(test::rng& r, int n, std::vector<float16>& keys, std::vector<float16>& values) {
        CUDA_OK(cudaStreamSynchronize(c.stream));
        c.write(r, keys, values, n * static_cast<int>(rows.size()));
        drafted += n;
        words.upload(newest(n));
        return c.gpu.begin_draft(batch, n, c.stream);
    }
    void host_append(int n, const std::vector<float16>& keys, const std::vector<float16>& values) {
        for (std::size_t b = 0; b < rows.size(); ++b)
            for (int layer = 0; layer < c.count(); ++layer) {
                if (!c.takes_tokens(layer)) continue;
                const int h = c.heads_of(layer);
                const auto at = static_cast<std::size_t>(layer * c.room * heads * dim +
                                                         static_cast<int>(b) * n * h * dim);
                rows[b]->host.append_draft(layer, token_view<const float16>(&keys[at], n, h, dim),
                                           token_view<const float16>(&values[at], n, h, dim));
            }
    }
    void attend(int layer, int n, int window = 0, bool keeps_sinks = false) {
        const int count = n * static_cast<int>(rows.size());
        const cuda::status s = c.gpu.attend(
            layer, token_view<const float16>(c.q.get(), count, q_heads, dim),
            token_view<float16>(c.out.get(), count, q_heads, dim),
            {.window = window, .window_sinks = keeps_sinks, .query_tokens = n, .ancestors = words.get()},
            c.stream);
        CHECK(s, "draft: %s", s.message);
    }
    /// The largest error of a random row of every sequence.
    double error(test::rng& r, int layer, int n, const std::vector<float16>& q, int window = 0,
                 bool keeps_sinks = false) {
        CUDA_OK(cudaStreamSynchronize(c.stream));
        const auto y = c.out.download();
        double worst = 0.0;
        for (std::size_t b = 0; b < rows.size(); ++b) {
            const int i = test::uniform(r, 0, n - 1), head = test::uniform(r, 0, q_heads - 1);
            const std::size_t at =
                ((b * static_cast<std::size_t>(n) + static_cast<std::size_t>(i)) * q_heads +
                 static_cast<std::size_t>(head)) *
                dim;
            const int token = drafted - n + i;
            worst = std::max(worst, error_of(rows[b]->host, layer, head, accepted[b] + token + 1, &q[at],
                                             &y[at], accepted[b], trees[b].tree().ancestors(token), 0.0,
                                             window, keeps_sinks ? c.o.sinks : 0));
        }
        return worst;
    }
    /// A random path of every tree.
    cuda::status keep(test::rng& r) {
        std::vector<std::vector<int>> paths;
        std::vector<std::span<const int>> spans;
        for (const test::random_tree& t : trees) paths.push_back(t.random_path(r));
        for (std::size_t b = 0; b < rows.size(); ++b) {
            spans.emplace_back(paths[b]);
            rows[b]->host.keep(paths[b]);
        }
        return c.gpu.keep(batch, spans, c.stream);
    }
};

/// Random queries on the device.
std::vector<float16> random_queries(test::rng& r, both_caches& c) {
    std::vector<float16> x(c.q.size());
    for (float16& y : x) y = float16(test::normal(r));
    c.q.upload(x);
    return x;
}

#if PART != 1
/// What both caches are asked to do, at random.
struct history {
    both_caches c;
    test::rng r;
    const char* name;
    std::vector<pair> pairs;
    int step = 0, deep = 0, cut = 0, spliced = 0, unspliced = 0, moved = 0, requantized = 0, kept = 0,
        unreached = 0, apart = 0, refused = 0, parted = 0, rearranged = 0, unmoved = 0;
    double worst = 0.0;

    history(const both_options& o, unsigned seed, const char* n) : c(o), r(seed), name(n) { add(); }

    int any(int low, int high) { return test::uniform(r, low, high); }
    pair& one() { return pairs[static_cast<std::size_t>(any(0, static_cast<int>(pairs.size()) - 1))]; }
    void ok(const cuda::status& s) { CHECK(s, "%s, step %d: %s", name, step, s.message); }
    void add() {
        pairs.push_back({c.gpu.new_sequence(), c.cpu.new_sequence()});
        if (any(0, 3) > 0) read_text(pairs.back());
    }
    /// The text that layers with cross attention see.
    void read_text(pair& p) {
        int last = c.count() - 1;
        while (last >= 0 && !c.is_cross(last)) --last;
        if (last < 0 || p.host.tokens(last) > 0) return;
        const int n = any(1, 200);
        std::vector<float16> keys, values;
        c.write(r, keys, values, n);
        ok(c.gpu.begin_cross(p.id, n, c.stream));
        for (int layer = 0; layer < c.count(); ++layer)
            if (c.is_cross(layer)) {
                ok(c.gpu.append(layer, c.rows(c.k, layer, n), c.rows(c.v, layer, n), c.stream));
                c.append_to(p.host, layer, keys, values, 0, n);
            }
        CHECK(c.gpu.tokens(p.id, last) == n, "%s: %d tokens of another text", name, c.gpu.tokens(p.id, last));
        CUDA_OK(cudaStreamSynchronize(c.stream));
    }
    bool fits(const pair& p, int n) const { return p.host.tokens() + n <= c.o.max_tokens; }

    /// Attends with the last `queries` tokens of the rows that a begin has named, in one layer, and compares
    /// some rows.
    void attend(const std::vector<pair*>& rows, int queries) {
        const int layer = any(0, c.count() - 1), n = static_cast<int>(rows.size()) * queries;
        std::vector<float16> x(static_cast<std::size_t>(n * q_heads * dim));
        for (float16& y : x) y = float16(test::normal(r));
        c.q.upload(x);
        c.out.poison();
        cuda::attention_options options;
        options.query_tokens = queries;
        options.early = any(0, 1) == 0;
        if (any(0, 2) == 0) {
            options.window = any(1, 400);
            options.window_sinks = any(0, 1) == 0;
            // Two windows that are one together.
            const key_window own = c.window_of(layer);
            if (own) options.window_sinks = own.sinks > 0;
            if (own.chunked || own.cross) options.window = 0;
        }
        ok(c.gpu.attend(layer, token_view<const float16>(c.q.get(), n, q_heads, dim),
                        token_view<float16>(c.out.get(), n, q_heads, dim), options, c.stream));
        check_rows(rows, queries, layer, x, options);
    }
    /// Compares a head of every row of a layer's output. x: the queries.
    void check_rows(const std::vector<pair*>& rows, int queries, int layer, const std::vector<float16>& x,
                    const cuda::attention_options& options) {
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
                // A step on the device still holds what more of its queries see than the CPU's sequence does
                // behind it.
                const key_window own = c.window_of(layer);
                if (own && !rows[b]->host.holds(c.cpu.owner(layer), own.first_seen(seen - 1), seen)) continue;
                const double error =
                    error_of(rows[b]->host, layer, head, std::max(0, seen), &x[at], &y[at], 1 << 30, 0, 0.0,
                             options.window, options.window_sinks ? c.o.sinks : 0);
                worst = std::max(worst, error);
                CHECK(error <= 2e-3, "%s, step %d: error %.3g of row %zu, %d of %d tokens, window %d", name,
                      step, error, b, seen, rows[b]->host.tokens(), options.window);
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
            std::vector<float16> keys, values, x;
            const int tokens = n * static_cast<int>(rows.size());
            int stored = -1;  // the layer whose attention stores them
            c.write(r, keys, values, tokens);
            ok(c.gpu.begin_step(batch, n, c.stream));
            for (int layer = 0; layer < c.count(); ++layer) {
                if (!c.takes_tokens(layer)) continue;
                const auto k = c.rows(c.k, layer, tokens), v = c.rows(c.v, layer, tokens);
                if (any(0, 7) > 0 || stored >= 0) {
                    ok(c.gpu.append(layer, k, v, c.stream));
                    continue;
                }
                stored = layer;
                x.resize(static_cast<std::size_t>(tokens * q_heads * dim));
                for (float16& y : x) y = float16(test::normal(r));
                c.q.upload(x);
                c.out.poison();
                ok(c.gpu.attend(layer, k, v, token_view<const float16>(c.q.get(), tokens, q_heads, dim),
                                token_view<float16>(c.out.get(), tokens, q_heads, dim),
                                {.query_tokens = n, .early = any(0, 1) == 0}, c.stream));
            }
            for (std::size_t b = 0; b < rows.size(); ++b)
                if (rows[b]) c.appended(rows[b]->host, keys, values, static_cast<int>(b) * n, n);
            if (stored >= 0 && any(0, 1) == 0) check_rows(rows, n, stored, x, {.query_tokens = n});
            // Queries of older tokens, too.
            if (i == 1 && any(0, 1) == 0)
                attend(rows, any(0, 2) == 0 ? any(n, std::min(6, n + c.o.rollback)) : n);
            CUDA_OK(cudaStreamSynchronize(c.stream));
        }
    }
    void prompt() {
        pair& p = one();
        const int n = any(1, any(0, 1) == 0 ? 20 : 200);
        if (!fits(p, n)) return;
        const bool listed = !c.o.list.empty();
        const int window =
            any(0, 2) > 0 || (listed && p.host.tokens() < c.o.sinks) ? 0 : any(listed ? 71 : 1, 400);
        std::vector<float16> keys, values;
        c.write(r, keys, values, n);
        ok(c.gpu.begin_prompt(p.id, n, c.stream));
        if (any(0, 1) == 0) {
            // Sinks among the new tokens are those of no page.
            const bool keeps_sinks = window > 0 && p.host.tokens() >= c.o.sinks && (listed || any(0, 1) == 0);
            prefill(r, c, p, n, keys, values, window, keeps_sinks, name, step);
            return;
        }
        for (int layer = 0; layer < c.count(); ++layer)
            if (c.takes_tokens(layer))
                ok(c.gpu.append(layer, c.rows(c.k, layer, n), c.rows(c.v, layer, n), c.stream));
        c.appended(p.host, keys, values, 0, n);
        if (any(0, 3) == 0) attend({&p}, std::min({n, 5, c.o.rollback + 1}));
    }
    void trim() {
        pair& p = one();
        const int tokens = p.host.tokens();
        int n = std::max(0, tokens - any(0, c.o.rollback));
        const int kind = any(0, 5);
        if (kind == 0) n = any(0, tokens);
        if (kind == 1) n = any(tokens * 3 / 4, tokens);
        if (kind == 2 && tokens > c.o.sinks) n = c.o.sinks + any(0, (tokens - c.o.sinks) / page) * page;
        if (n < tokens && n < p.host.trim_limit() && n > 0) {
            // A window has freed what the next token needs, on both sides.
            const cuda::status s = c.gpu.trim(p.id, n);
            if (s) {  // to sinks alone
                p.host.trim(n);
                return;
            }
            CHECK(std::strstr(s.message, "it has freed what they need"), "%s, step %d: %s", name, step,
                  s.message);
            bool raised = false;
            try {
                p.host.trim(n);
            } catch (const kvq::error&) {
                raised = true;
            }
            CHECK(raised, "%s, step %d: the CPU trims to %d", name, step, n);
            ++unreached;
            return;
        }
        ok(c.gpu.trim(p.id, n));
        p.host.trim(n);
        deep += kind <= 2;
        cut += hides_tokens(p.host);
        if (any(0, 7) == 0) compare(c, p, name, step);
    }
    bool hides_tokens(const kvq::sequence& s) const {
        const auto& table = kvq::detail::sequence_access::tables(s)[0];
        for (int i = c.o.sinks > 0 ? 1 : 0; i < table.committed; ++i)
            if (table[i].tokens < page) return true;
        return false;
    }
    /// Would new tokens go to a page whose keys have moved?
    bool opened(const pair& p) const {
        for (const auto& table : kvq::detail::sequence_access::tables(p.host))
            if (table.has_open_span() && table.spans.back().shift != 0) return true;
        return false;
    }
    /// Erases or shifts tokens of one sequence. The device refuses what would leave gaps in its 16-bit pages.
    void move() {
        pair& p = one();
        const int tokens = p.host.tokens();
        if (tokens < 2) return;
        int first = any(0, tokens - 1), last = any(first, tokens);
        // Often behind the sinks, and in front of the window.
        const int behind = any(0, 3) > 0 ? c.o.sinks : 0;
        if (any(0, 3) > 0 && tokens > behind + c.o.recent + page) {
            first = any(behind, tokens - c.o.recent - page);
            last = any(0, 2) == 0 ? tokens : any(first, tokens - c.o.recent - page);
        }
        const bool erases = any(0, 1) == 0;
        if (erases && any(0, 2) > 0) last = std::min(last, first + 40);
        const int by = any(0, 3) == 0 ? -7 : any(-900, 900);
        const cuda::status s = erases ? c.gpu.erase(p.id, first, last) : c.gpu.shift(p.id, first, last, by);
        if (!s) {
            bool named = false;
            for (const char* const reason :
                 {"within a 16-bit page", "are sinks of which", "that an erase has closed", "are freed",
                  "its sinks: they cannot", "has freed what they need"})
                named = named || std::strstr(s.message, reason) != nullptr;
            CHECK(named, "%s, step %d: %s", name, step, s.message);
            ++unmoved;
            return;
        }
        if (erases)
            p.host.erase(first, last);
        else
            p.host.shift(first, last, by);
        ++rearranged;
        if (any(0, 3) == 0) compare(c, p, name, step);
    }
    /// Tokens of another sequence, or of the same one, behind those of one sequence. Pages then hide first
    /// tokens, too.
    void splice() {
        pair &a = one(), &b = one();
        part({&a, &b});
        const int tokens = a.host.tokens(), sinks = c.o.sinks;
        int n = any(0, 2) == 0 ? tokens : sinks + page * any(0, std::max(0, tokens - sinks) / page);
        if (any(0, 9) == 0) n = 0;
        if (n < tokens && n < a.host.trim_limit()) return;
        if (n < tokens) {
            ok(c.gpu.trim(a.id, n));
            a.host.trim(n);
        }
        const int held = a.host.tokens(), theirs = b.host.tokens();
        int first = std::min(held == 0 ? 0 : any(0, 1) == 0 ? sinks : any(0, theirs), theirs), last = theirs;
        if (any(0, 1) == 0) last = any(first, last);
        last = std::min(last, first + c.o.max_tokens - held);
        const std::size_t bytes = c.gpu.bytes_in_use();
        if (const cuda::status s = c.gpu.splice(a.id, b.id, first, last, c.stream); !s) {
            bool named = false;
            for (const char* const reason :
                 {"within a 16-bit page", "are sinks of which", "quantizes whole pages; trim to",
                  "fewer than its", "are freed", "its sinks: they cannot", "belong to another text",
                  "has freed tokens", "of which cuts show a part"})
                named = named || std::strstr(s.message, reason) != nullptr;
            CHECK(named && bytes == c.gpu.bytes_in_use(), "%s, step %d: %s", name, step, s.message);
            ++unspliced;
            return;
        }
        a.host.splice(b.host, first, last);
        spliced += first < last;
        compare(c, a, name, step);
    }
    void draft() {
        std::vector<pair*> rows;
        for (pair* p : some())
            if (static_cast<int>(rows.size()) < c.o.max_batch && fits(*p, c.o.draft_tokens) && !opened(*p))
                rows.push_back(p);
        if (rows.empty()) return;
        const int n = any(1, std::min(c.o.draft_tokens, both_caches::room / static_cast<int>(rows.size())));
        std::vector<int> limits;
        for (const pair* p : rows) limits.push_back(p->host.trim_limit());
        drafts d(r, c, rows, n);
        // Level by level, or at once.
        for (int left = n; left > 0;) {
            const int level = any(0, 1) == 0 ? left : any(1, left);
            std::vector<float16> keys, values;
            ok(d.begin(r, level, keys, values));
            const int tokens = level * static_cast<int>(rows.size());
            for (int layer = 0; layer < c.count(); ++layer)
                if (c.takes_tokens(layer))
                    ok(c.gpu.append(layer, c.rows(c.k, layer, tokens), c.rows(c.v, layer, tokens), c.stream));
            d.host_append(level, keys, values);
            if (any(0, 1) == 0) {
                const int layer = any(0, c.count() - 1);
                const std::vector<float16> x = random_queries(r, c);
                c.out.poison();
                const bool windowed = any(0, 2) == 0 && !c.window_of(layer) && !c.is_cross(layer);
                const int window = windowed ? any(1, any(0, 1) == 0 ? 12 : 100) : 0;
                const bool keeps_sinks = windowed && any(0, 1) == 0;
                d.attend(layer, level, window, keeps_sinks);
                const double error = d.error(r, layer, level, x, window, keeps_sinks);
                worst = std::max(worst, error);
                CHECK(error <= 2e-3, "%s, step %d: error %.3g of a draft of %d in layer %d, window %d", name,
                      step, error, n, layer, window);
            }
            left -= level;
        }
        CUDA_OK(cudaStreamSynchronize(c.stream));
        const int what = any(0, 7);
        if (what == 0) {  // all of it is gone, and more
            for (std::size_t b = 0; b < rows.size(); ++b) {
                CHECK(rows[b]->host.trim_limit() == c.gpu.trim_limit(rows[b]->id), "%s, step %d: a draft",
                      name, step);
                const int left = std::max(limits[b], d.accepted[b] - any(0, 2 * c.o.rollback));
                ok(c.gpu.trim(rows[b]->id, left));
                rows[b]->host.trim(left);
            }
            return;
        }
        if (what == 1 && pairs.size() < 6) {  // a fork keeps another path
            pair copy{{}, rows[0]->host.fork()};
            ok(c.gpu.fork(rows[0]->id, copy.id, c.stream));
            drafts other(r, c, {&copy}, n);
            other.trees = {d.trees[0]};
            ok(other.keep(r));
            ok(d.keep(r));
            compare(c, copy, name, step);
            pairs.push_back(std::move(copy));
        } else {
            ok(d.keep(r));
        }
        kept += static_cast<int>(d.batch.size());
        for (const cuda::sequence_id id : d.batch)
            for (const pair& p : pairs)
                if (p.id == id && any(0, 3) == 0) compare(c, p, name, step);
    }
    /// A page of the device is K and V together, those of the CPU are apart: behind requests for one of them,
    /// forks share the other one there. Requests that name a part of the holders, and splices, then see other
    /// pages on both sides: such sequences get pages of their own.
    void part(const std::vector<pair*>& of) {
        std::map<const kvq::page*, std::pair<const kvq::page*, std::vector<pair*>>> seen;
        std::set<pair*> mixed;
        const auto note = [&](pair* p, const page_ref& a, const page_ref& b) {
            if (!a || !b || a->format == 0) return;
            auto& [with, holders] = seen.try_emplace(a.get(), b.get(), std::vector<pair*>{}).first->second;
            holders.push_back(p);
            if (with != b.get()) mixed.insert(holders.begin(), holders.end());
        };
        for (pair* const p : of)
            for (const auto& table : kvq::detail::sequence_access::tables(p->host))
                for (int i = 0; i < table.committed; ++i) {
                    note(p, table[i].pages[0], table[i].pages[1]);
                    note(p, table[i].pages[1], table[i].pages[0]);
                }
        for (pair* const p : mixed) {
            kvq::sequence away = c.cpu.new_sequence();
            ok(cuda::offload(c.gpu, p->id, away, c.stream));
            ok(c.gpu.free(p->id));
            p->host = std::move(away);
            ok(cuda::onload(p->host, c.gpu, p->id, c.stream));
            ++parted;
        }
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
        // Stepping down leaves what others hold, so that a page must have as many holders on both sides.
        std::vector<pair*> everyone;
        for (pair& p : pairs) everyone.push_back(&p);
        part(everyone);
        const std::vector<pair*> all = some();
        for (pair* p : all) {
            ids.push_back(p->id);
            hosts.push_back(&p->host);
        }
        workspace space;
        if (any(0, 3) == 0) {
            const int age = any(0, 200);
            const std::string narrow = host_formats().names[0];
            const std::string wide = host_formats().names.back();
            const cuda::tier tiers[] = {{age, wide}, {age + any(0, 300), narrow}};
            requantize_report plan;
            const std::size_t before = c.gpu.bytes_in_use();
            ok(c.gpu.plan_step_down(ids, tiers, plan));
            ok(c.gpu.step_down(ids, tiers, c.stream));
            CHECK(plan.bytes_before == before && plan.bytes_after == c.gpu.bytes_in_use() &&
                      plan.bytes_peak >= before && plan.bytes_peak - plan.bytes_freed <= plan.bytes_after,
                  "%s, step %d: a plan of %zu, %zu and at most %zu bytes, in use %zu and %zu", name, step,
                  plan.bytes_before, plan.bytes_after, plan.bytes_peak, before, c.gpu.bytes_in_use());
            const step_down_policy policy{
                .tiers = {{.age = tiers[0].age, .format = {1, 1}}, {.age = tiers[1].age, .format = {0, 0}}}};
            kvq::step_down(c.cpu, std::span<kvq::sequence* const>(hosts), policy);
            return;
        }
        const int format = any(0, 1), first = any(0, 1) * any(0, 300);
        const int tensors = PART == 0 ? any(1, 3) : 3;  // K, V or both
        cuda::requantize_request g;
        const std::string name = host_formats().names[static_cast<std::size_t>(format)];
        const std::string to = tensors == 1 ? name + "/" : tensors == 2 ? "/" + name : name;
        g.format = to;
        g.first_token = first;
        if (any(0, 1) == 0) g.last_token = first + any(0, 300);
        g.new_pages = any(0, 2) == 0;
        g.only_smaller = any(0, 3) == 0;
        requantize_request h;
        if ((tensors & 1) != 0) h.key = format;
        if ((tensors & 2) != 0) h.value = format;
        h.first_token = g.first_token;
        h.last_token = g.last_token;
        h.new_pages = g.new_pages;
        h.only_smaller = g.only_smaller;
        requantize_report planned, done;
        if (const cuda::status s = c.gpu.plan_requantize(ids, g, planned); !s) {
            CHECK(tensors != 3 && std::strstr(s.message, "add the pair of both"), "%s", s.message);
            CHECK(!c.gpu.requantize(ids, g, c.stream), "%s, step %d: no refusal", this->name, step);
            ++refused;
            return;
        }
        ok(c.gpu.requantize(ids, g, c.stream, &done));
        CHECK(std::memcmp(&planned, &done, sizeof done) == 0 && done.bytes_after == c.gpu.bytes_in_use() &&
                  (done.pages > 0 || done.bytes_before == done.bytes_after) &&
                  done.bytes_peak - done.bytes_freed == done.bytes_after,
              "%s, step %d: %zu pages, %zu bytes, planned were %zu and %zu, in use are %zu", this->name, step,
              done.pages, done.bytes_after, planned.pages, planned.bytes_after, c.gpu.bytes_in_use());
        apart += tensors != 3 && done.pages > 0;
        requantized += static_cast<int>(
            c.cpu.requantize(std::span<kvq::sequence* const>(hosts), h, {}, serial_executor{}, space).pages);
    }
    /// The CPU goes on with what came from the device: neither side shares these pages with a fork any more.
    void offload() {
        pair& p = one();
        compare(c, p, name, step);
        const std::size_t bytes = c.gpu.usage(p.id).bytes;
        int longest = 0;
        for (int layer = 0; layer < c.count(); ++layer) longest = std::max(longest, p.host.tokens(layer));
        CHECK((bytes > 0) == (longest > 0), "%s: %d tokens in %zu bytes", name, longest, bytes);
        ++moved;
        const int how = any(0, 3);
        if (how == 0) return test::move_by_file(c.gpu, p.id, c.cpu, p.host, c.stream, name);
        if (how == 1) test::move_by_messages(c.gpu, p.id, c.stream, name);
        kvq::sequence away = c.cpu.new_sequence();
        ok(cuda::offload(c.gpu, p.id, away, c.stream));
        p.host = std::move(away);
        if (how == 1) return;
        ok(c.gpu.free(p.id));
        // Half of the time it stays on the CPU for a while.
        if (any(0, 1) == 0 && fits(p, 40)) {
            std::vector<float16> keys, values;
            c.write(r, keys, values, 40);
            c.appended(p.host, keys, values, 0, 40);
        }
        ok(cuda::onload(p.host, c.gpu, p.id, c.stream));
    }

    /// moves: of 100 actions so many move tokens.
    void run(int steps, int moves = 3) {
        for (step = 0; step < steps; ++step) {
            const int what = any(0, 99);
            if (what < 38)
                decode();
            else if (what < 50)
                draft();
            else if (what < 60)
                prompt();
            else if (what < 74)
                trim();
            else if (what < 80)
                requantize();
            else if (what < 84)
                offload();
            else if (what < 86)
                splice();
            else if (what < 91 && pairs.size() < 6) {
                pair& p = one();
                cuda::sequence_id copy;
                ok(c.gpu.fork(p.id, copy, c.stream));
                kvq::sequence host = p.host.fork();
                pairs.push_back({copy, std::move(host)});
            } else if (what < 93 && pairs.size() < 6) {
                add();
            } else if (what < 94) {
                read_text(one());
            } else if (what < 97 && pairs.size() > 1) {
                const auto i = static_cast<std::size_t>(any(0, static_cast<int>(pairs.size()) - 1));
                ok(c.gpu.free(pairs[i].id));
                std::swap(pairs[i], pairs.back());
                pairs.pop_back();
            }
            if (any(0, 99) < moves) any(0, 4) == 0 ? splice() : move();
            const usage_report u = c.gpu.usage();
            CHECK(u.bytes == test::counted_memory::bytes,
                  "%s, step %d: usage is %zu bytes, allocated are %zu", name, step, u.bytes,
                  test::counted_memory::bytes);
            std::size_t held = 0, shared = 0;
            for (const pair& p : pairs) {
                const usage_report one = c.gpu.usage(p.id);
                held += one.bytes;
                shared += one.shared;
            }
            CHECK(held - shared <= c.gpu.bytes_in_use() && c.gpu.bytes_in_use() <= held &&
                      (shared > 0 || c.gpu.bytes_in_use() == held),
                  "%s, step %d: sequences hold %zu bytes, %zu of them shared, but %zu are in use", name, step,
                  held, shared, c.gpu.bytes_in_use());
            if (step % 25 == 24) compare(c, one(), name, step);
        }
        for (const pair& p : pairs) compare(c, p, name, step);
        for (const pair& p : pairs) ok(c.gpu.free(p.id));
        const usage_report u = c.gpu.usage();
        const std::size_t used = u.quantized + u.window + u.rollback + c.gpu.bytes_in_use();
        CHECK(used == 0, "%s: %zu bytes are in use by no sequence", name, used);
        std::printf(
            "  %-28s %d steps, %d deep trims (%d times pages were cut), %d drafts kept, %d pages "
            "requantized (%d requests of K or V, %d refused, %d parted), %d moves, %d splices, %d refused, "
            "%d trims "
            "refused, "
            "%d erases and shifts, %d refused, error %.2e\n",
            name, steps, deep, cut, kept, requantized, apart, refused, parted, moved, spliced, unspliced,
            unreached, rearranged, unmoved, worst);
    }
};

#endif

#if PART != 2
[[maybe_unused]] void refused(const cuda::status& s, const char* part) {
    CHECK(!s && std::strstr(s.message, part) != nullptr, "expected '%s', got '%s'", part, s.message);
}

/// What is fetched ahead is not fetched again.
[[maybe_unused]] void check_fetched_ahead(both_caches& c, cuda::sequence_id id) {
    const auto ok = [](const cuda::status& s) { CHECK(s, "fetched ahead: %s", s.message); };
    test::rng r(5);
    const token_view<const float16> q(c.q.get(), 1, q_heads, dim);
    const token_view<float16> out(c.out.get(), 1, q_heads, dim);
    ok(c.gpu.begin_step(std::span(&id, 1), 1, c.stream));
    refused(c.gpu.fetch_ahead(0, q, 64, c.stream), "behind the append() of the first layer of a step");
    for (int layer = 0; layer < layers; ++layer)
        ok(c.gpu.append(layer, c.rows(c.k, layer, 1), c.rows(c.v, layer, 1), c.stream));
    refused(c.gpu.fetch_ahead(0, q, 0, c.stream), "0 selected tokens");
    for (int i = 0; i < 8; ++i) {
        (void)random_queries(r, c);
        cuda::fetch_report before, ahead, behind;
        ok(c.gpu.fetches(0, before, c.stream));
        ok(c.gpu.fetch_ahead(0, q, 64, c.stream));
        ok(c.gpu.fetches(0, ahead, c.stream));
        ok(c.gpu.attend(0, q, out, {.selected_tokens = 64}, c.stream));
        ok(c.gpu.fetches(0, behind, c.stream));
        CHECK(behind.fetched == ahead.fetched && behind.read == 2 * ahead.read - before.read,
              "%lld and then %lld pages were fetched", static_cast<long long>(ahead.fetched - before.fetched),
              static_cast<long long>(behind.fetched - ahead.fetched));
    }
}

/// Attention over selected pages: the pages that the CPU chooses, in random batches of sequences, with K and
/// V of the first format alone. in_host: pages lie in host memory, and slots are few.
[[maybe_unused]] void check_selected_pages(bool in_host) {
    both_options o{.recent = 70, .listed_tokens = 1000};
    if (in_host) {
        o.listed_tokens = 64;
        o.resident_tokens = 20 * page;
        o.pool_tokens = 6000;
        o.pool_sequences = 4;
        o.growing = false;
    }
    both_caches c(o);
    const int most = c.o.listed_tokens;
    test::rng r(21);
    const auto ok = [](const cuda::status& s) { CHECK(s, "selected pages: %s", s.message); };
#if PART == 1
    ok(c.gpu.calibrate("low2", statistics(), c.stream));
#endif
    std::vector<pair> all;
    std::vector<float16> keys, values;
    const auto prompt = [&](pair& p, int n) {
        c.write(r, keys, values);
        ok(c.gpu.begin_prompt(p.id, n, c.stream));
        for (int layer = 0; layer < layers; ++layer)
            ok(c.gpu.append(layer, c.rows(c.k, layer, n), c.rows(c.v, layer, n), c.stream));
        c.appended(p.host, keys, values, 0, n);
    };
    for (const int tokens : {3, 200, 900}) {
        all.push_back({c.gpu.new_sequence(), c.cpu.new_sequence()});
        for (int left = tokens; left > 0; left -= 250) prompt(all.back(), std::min(left, 250));
    }
    double worst = 0.0;
    long long seen = 0, read = 0;
    for (int step = 0; step < 40; ++step) {
        std::vector<pair*> rows;
        std::vector<cuda::sequence_id> batch;
        if (step % 9 == 8) {  // its pages, and the numbers of others that are gone, become those of a new one
            pair& p = all[static_cast<std::size_t>(step / 9 % 3)];
            ok(c.gpu.free(p.id));
            p = {c.gpu.new_sequence(), c.cpu.new_sequence()};
            for (int i = 0; i < 3; ++i) prompt(p, 240);
        }
        for (pair& p : all) rows.push_back(&p);
        std::shuffle(rows.begin(), rows.end(), r);
        rows.resize(static_cast<std::size_t>(test::uniform(r, 1, 3)));
        if (step % 5 == 0) rows.insert(rows.begin(), nullptr);
        for (const pair* p : rows) batch.push_back(p == nullptr ? cuda::sequence_id{} : p->id);
        const int n = static_cast<int>(rows.size()), layer = step % layers,
                  tokens = test::uniform(r, 1, step % 4 == 0 ? most : std::min(most, 200));
        const float cap = step % 3 == 0 ? 5.0f : 0.0f;
        c.write(r, keys, values, n);
        ok(c.gpu.begin_step(batch, 1, c.stream));
        const std::vector<float16> x = random_queries(r, c);
        const token_view<const float16> q(c.q.get(), n, q_heads, dim);
        const token_view<float16> out(c.out.get(), n, q_heads, dim);
        const cuda::attention_options options{
            .softcap = cap, .selected_tokens = tokens, .early = step % 4 < 2};
        for (int i = 0; i < layers; ++i)
            if (i != layer || step % 2 == 0)
                ok(c.gpu.append(i, c.rows(c.k, i, n), c.rows(c.v, i, n), c.stream));
        if (step % 2 == 0)
            ok(c.gpu.attend(layer, q, out, options, c.stream));
        else
            ok(c.gpu.attend(layer, c.rows(c.k, layer, n), c.rows(c.v, layer, n), q, out, options, c.stream));
        CUDA_OK(cudaStreamSynchronize(c.stream));
        const auto y = c.out.download();
        for (std::size_t b = 0; b < rows.size(); ++b) {
            constexpr std::size_t row = q_heads * dim;
            if (rows[b] == nullptr) continue;
            c.appended(rows[b]->host, keys, values, static_cast<int>(b), 1);
            std::vector<float> want(row);
            selection_report report;
            const selected_pages best{.tokens = tokens, .report = &report};
            const token_view<const float16> host_q(&x[b * row], 1, q_heads, dim);
            const token_view<float> to(want.data(), 1, q_heads, dim);
            if (cap > 0.0f)
                rows[b]->host.attend(layer, host_q, to, mods{best, softcap{cap}});
            else
                rows[b]->host.attend(layer, host_q, to, best);
            seen += report.pages;
            read += report.read;
            for (std::size_t head = 0; head < q_heads; ++head) {
                double error = 0.0, size = 0.0;
                for (std::size_t d = head * dim; d < (head + 1) * dim; ++d) {
                    const double a = static_cast<double>(want[d]),
                                 e = a - static_cast<double>(static_cast<float>(y[b * row + d]));
                    error += e * e;
                    size += a * a;
                }
                worst = std::max(worst, std::sqrt(error / size));
                CHECK(error <= 9e-6 * size,
                      "selected pages, step %d, row %zu, head %zu: %d of %d tokens, error %.3g", step, b,
                      head, tokens, rows[b]->host.tokens(), std::sqrt(error / size));
            }
        }
    }
    CHECK(4 * read < 3 * seen, "%lld of %lld pages were read", read, seen);
    cuda::fetch_report report;
    ok(c.gpu.fetches(0, report, c.stream));
    CHECK(in_host ? 0 < report.fetched && report.fetched < report.read : report.read == 0,
          "%lld pages of %lld were fetched", static_cast<long long>(report.fetched),
          static_cast<long long>(report.read));
    std::printf("  %-28s error %.2e, %.0f %% of the pages; %lld of %lld fetched\n",
                in_host ? "selected pages, of the host" : "selected pages", worst,
                100.0 * static_cast<double>(read) / static_cast<double>(seen),
                static_cast<long long>(report.fetched), static_cast<long long>(report.read));
    if (in_host) return check_fetched_ahead(c, all[2].id);

    const cuda::sequence_id id = all[2].id;
    const token_view<const float16> q(c.q.get(), 1, q_heads, dim);
    const token_view<float16> out(c.out.get(), 1, q_heads, dim);
    const auto attend = [&](const cuda::attention_options& o) {
        return c.gpu.attend(0, q, out, o, c.stream);
    };
    ok(c.gpu.begin_step(std::span(&id, 1), 0, c.stream));
    refused(attend({.selected_tokens = 1001}), "1001 selected tokens, but 1 to listed_tokens, 1000, can be");
    refused(attend({.window = 40, .selected_tokens = 32}), "without tree or window; got 1, window 40");
    refused(attend({.selected_tokens = -1}), "-1 selected tokens");
    const std::uint64_t graph = c.gpu.graph_id();
    ok(c.gpu.trim(id, 97));
    ok(c.gpu.begin_step(std::span(&id, 1), 0, c.stream));
    refused(attend({.selected_tokens = 32}), "row 0 has pages of which a trim or an erase shows a part");
    CHECK(graph != c.gpu.graph_id(), "a graph with selected pages may be replayed over cut ones");
#if PART == 0
    ok(c.gpu.commit_to("int8"));
    pair p{c.gpu.new_sequence(), c.cpu.new_sequence()};
    prompt(p, 30);
    ok(c.gpu.begin_step(std::span(&p.id, 1), 0, c.stream));
    ok(attend({.selected_tokens = 32}));
    const std::uint64_t ranked = c.gpu.graph_id();
    prompt(p, 200);
    ok(c.gpu.begin_step(std::span(&p.id, 1), 0, c.stream));
    refused(attend({.selected_tokens = 32}), "pages in int8 are not ranked, since their keys have");
    CHECK(ranked != c.gpu.graph_id(), "a graph with selected pages may be replayed over int8 ones");
#endif
}
#endif

#if PART == 0
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
    // Queries turn for keys that have moved, new keys for the page that they go to.
    ok(c.gpu.erase(pairs[1].id, 10, 57));
    pairs[1].host.erase(10, 57);
    const auto record = [&] {
        for (int layer = 0; layer < layers; ++layer) {
            const token_view<const float16> q(c.q.get(), 3, q_heads, dim);
            const token_view<float16> out(c.out.get(), 3, q_heads, dim);
            const auto k = c.rows(c.k, layer, 3), v = c.rows(c.v, layer, 3);
            if (layer % 2 == 0) {
                ok(c.gpu.attend(layer, k, v, q, out, {.early = true}, c.stream));
            } else {
                ok(c.gpu.append(layer, k, v, c.stream));
                ok(c.gpu.attend(layer, q, out, {.early = true}, c.stream));
            }
        }
    };
    std::uint64_t id = 0;
    cudaGraphExec_t exec = nullptr;
    double worst = 0.0;
    for (int step = 0; step < graph_steps; ++step) {
        CUDA_OK(cudaStreamSynchronize(c.stream));
        c.write(r, keys, values, 3);
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

/// A captured check of drafted trees, replayed while contexts grow by the paths that are kept.
void check_draft_graph() {
    both_options o;
    o.growing = false;
    o.pool_tokens = 4 * 1200;
    o.pool_sequences = 3;
    both_caches c(o);
    test::rng r(6);
    constexpr int n = 12;
    std::vector<pair> pairs;
    for (int i = 0; i < 3; ++i) pairs.push_back({c.gpu.new_sequence(), c.cpu.new_sequence()});
    std::vector<pair*> rows{&pairs[0], &pairs[1], &pairs[2]};
    const auto ok = [](const cuda::status& s) { CHECK(s, "draft graph: %s", s.message); };
    drafts d(r, c, rows, n);
    std::vector<float16> keys, values;
    const auto record = [&] {
        for (int layer = 0; layer < layers; ++layer) {
            ok(c.gpu.append(layer, c.rows(c.k, layer, 3 * n), c.rows(c.v, layer, 3 * n), c.stream));
            d.attend(layer, n);
        }
    };
    std::uint64_t id = 0;
    cudaGraphExec_t exec = nullptr;
    double worst = 0.0;
    for (int step = 0; step < graph_steps / 3; ++step) {
        for (std::size_t b = 0; b < 3; ++b) {
            d.trees[b] = test::random_tree(r, n);
            d.accepted[b] = pairs[b].host.tokens();
        }
        d.drafted = 0;
        const std::vector<float16> x = random_queries(r, c);
        ok(d.begin(r, n, keys, values));
        if (step == 0) {
            record();
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
            CHECK(c.gpu.graph_id() == id, "draft graph: step %d has another graph", step);
            CUDA_OK(cudaGraphLaunch(exec, c.stream));
        }
        d.host_append(n, keys, values);
        if (step % 10 == 9) worst = std::max(worst, d.error(r, layers - 1, n, x));
        ok(d.keep(r));
    }
    CHECK(worst <= 2e-3, "draft graph: error %.3g", worst);
    for (const pair& p : pairs) compare(c, p, "draft graph", graph_steps / 3);
    if (exec) CUDA_OK(cudaGraphExecDestroy(exec));
    std::printf("  %-28s %d steps, %d tokens, error %.2e\n", "captured drafts, replayed", graph_steps / 3,
                c.gpu.tokens(pairs[0].id), worst);
}

/// Keys that have moved: a refused call of a step can be made again, and a prompt that waits for the layers
/// that share it is there when a step of other sequences, with more moves, begins.
void check_moved() {
    const auto ok = [](const cuda::status& s) { CHECK(s, "moved: %s", s.message); };
    both_options o;
    o.list = {full_attention({heads, dim}), shared_with(0)};
    both_caches c(o);
    test::rng r(15);
    pair one{c.gpu.new_sequence(), c.cpu.new_sequence()}, many{c.gpu.new_sequence(), c.cpu.new_sequence()};
    std::vector<float16> keys, values;
    const auto queries = [&](int n, int h) { return token_view<const float16>(c.q.get(), n, h, dim); };
    const auto outs = [&](int n, int h) { return token_view<float16>(c.out.get(), n, h, dim); };
    const auto prompt = [&](pair& p, int n, bool waits) {
        c.write(r, keys, values);
        ok(c.gpu.begin_prompt(p.id, n, c.stream));
        const auto k = c.rows(c.k, 0, n), v = c.rows(c.v, 0, n);
        ok(waits ? c.gpu.prefill(0, k, v, queries(n, q_heads), outs(n, q_heads), {}, c.stream)
                 : c.gpu.append(0, k, v, c.stream));
        c.appended(p.host, keys, values, 0, n);
        CUDA_OK(cudaStreamSynchronize(c.stream));
    };
    prompt(one, 110, false);
    prompt(many, 250, false);
    const auto shift = [&](pair& p, int first, int by) {
        ok(c.gpu.shift(p.id, first, p.host.tokens(), by));
        p.host.shift(first, p.host.tokens(), by);
    };
    shift(one, 0, 7);
    for (int i = 0; i < 4; ++i) shift(many, c.o.sinks + i * page, 5);
    prompt(one, 20, true);
    ok(c.gpu.begin_step(std::span(&many.id, 1), 1, c.stream));
    c.write(r, keys, values);
    const auto k = c.rows(c.k, 0, 1), v = c.rows(c.v, 0, 1), q = queries(1, q_heads);
    const auto out = outs(1, q_heads);
    refused(c.gpu.attend(0, k, v, token_view<const float16>(nullptr, 1, q_heads, dim), out, {}, c.stream),
            "q is a null pointer");
    refused(c.gpu.attend(0, k, v, queries(1, 3), outs(1, 3), {}, c.stream), "3");
    refused(c.gpu.attend(0, k, v, q, out, {.softcap = -1.0f}, c.stream), "softcap");
    ok(c.gpu.attend(0, k, v, q, out, {}, c.stream));
    refused(c.gpu.attend(0, k, v, q, out, {}, c.stream), "it has the tokens of this step already");
    c.appended(many.host, keys, values, 0, 1);
    compare(c, one, "moved, a prompt that waits", 0);
    compare(c, many, "moved, a step that was refused", 0);
}

/// NaN and infinities by layer, from a prompt and from steps, as the CPU counts them.
void check_counts() {
    both_caches c({});
    test::rng r(8);
    const auto ok = [](const cuda::status& s) { CHECK(s, "counts: %s", s.message); };
    pair p{c.gpu.new_sequence(), c.cpu.new_sequence()};
    const cuda::sequence_id batch[] = {p.id};
    std::vector<float16> keys, values;
    const auto append = [&](int n, const std::vector<std::size_t>& bad_keys,
                            const std::vector<std::size_t>& bad_values) {
        c.write(r, keys, values);
        for (const std::size_t i : bad_keys) keys[i] = float16(NAN);
        for (const std::size_t i : bad_values) values[i] = float16(INFINITY);
        c.k.upload(keys);
        c.v.upload(values);
        ok(n == 1 ? c.gpu.begin_step(batch, 1, c.stream) : c.gpu.begin_prompt(p.id, n, c.stream));
        for (int layer = 0; layer < layers; ++layer)
            ok(c.gpu.append(layer, c.rows(c.k, layer, n), c.rows(c.v, layer, n), c.stream));
        c.appended(p.host, keys, values, 0, n);
        CUDA_OK(cudaStreamSynchronize(c.stream));
    };
    const std::size_t row = heads * dim, layer = both_caches::room * row;
    append(150, {20 * row + 5, layer + 30 * row, layer + 31 * row + 70}, {layer + 99 * row + 3});
    for (int i = 0; i < 80; ++i)
        append(1, i % 20 == 3 ? std::vector<std::size_t>{layer + 7} : std::vector<std::size_t>{}, {});
    // The CPU counts what is in 16-bit pages, too: until all of them are quantized.
    append(150, {}, {});
    std::vector<unsigned> counts(layers);
    ok(c.gpu.not_finite(counts, c.stream));
    CHECK(counts[0] == 1 && counts[1] > 3, "counts: %u and %u", counts[0], counts[1]);
    CHECK(counts[0] + counts[1] == p.host.usage().not_finite, "counts: %u and %u, the CPU's sum is %zu",
          counts[0], counts[1], p.host.usage().not_finite);
    const cuda::status s = c.gpu.not_finite(std::span(counts).first(1), c.stream);
    CHECK(!s && std::strstr(s.message, "counts of 1 layers"), "%s", s.message);
}

/// Stepping down by bytes: the oldest pages, as many as needed; not those that a fork outside of the call
/// holds.
void check_budget() {
    both_caches c({});
    test::rng r(10);
    const auto ok = [](const cuda::status& s) { CHECK(s, "budget: %s", s.message); };
    pair p{c.gpu.new_sequence(), c.cpu.new_sequence()};
    const cuda::sequence_id ids[] = {p.id};
    workspace space;
    kvq::sequence* const hosts[] = {&p.host};
    const auto to_both = [&](const char* name, int number, int last, bool new_pages) {
        if (new_pages) ok(c.gpu.requantize(ids, {.format = name, .new_pages = true}, c.stream));
        requantize_request h;
        h.key = h.value = number;
        h.last_token = last;
        h.new_pages = new_pages;
        c.cpu.requantize(std::span<kvq::sequence* const>(hosts), h, {}, serial_executor{}, space);
    };
    to_both("int8", 1, requantize_request{}.last_token, true);
    std::vector<float16> keys, values;
    const auto append = [&](int n) {
        c.write(r, keys, values);
        ok(c.gpu.begin_prompt(p.id, n, c.stream));
        for (int layer = 0; layer < layers; ++layer)
            ok(c.gpu.append(layer, c.rows(c.k, layer, n), c.rows(c.v, layer, n), c.stream));
        c.appended(p.host, keys, values, 0, n);
        CUDA_OK(cudaStreamSynchronize(c.stream));
    };
    append(4 + 3 * page + 40);
    cuda::sequence_id fork;
    ok(c.gpu.fork(p.id, fork, c.stream));  // holds the first three pages
    append(7 * page);
    const auto& kinds = c.gpu.formats(0).kinds;
    const std::size_t before = c.gpu.bytes_in_use(), saved = layers * heads *
                                                             (kinds[1].key_block + kinds[1].value_block -
                                                              kinds[0].key_block - kinds[0].value_block);
    const cuda::tier tiers[] = {{0, "int8"}, {100000, "kivi-4-g32"}};
    ok(c.gpu.step_down(ids, tiers, c.stream, before));
    CHECK(c.gpu.bytes_in_use() == before, "budget: pages changed below the budget");
    // Two pages and a bit: three of those that the fork does not hold.
    ok(c.gpu.step_down(ids, tiers, c.stream, before - 2 * saved - 1));
    CHECK(c.gpu.bytes_in_use() == before - 3 * saved, "budget: %zu bytes, expected %zu", c.gpu.bytes_in_use(),
          before - 3 * saved);
    requantize_request h;
    h.key = h.value = 0;
    h.first_token = 4 + 3 * page;
    h.last_token = 4 + 6 * page;
    c.cpu.requantize(std::span<kvq::sequence* const>(hosts), h, {}, serial_executor{}, space);
    compare(c, p, "budget", 1);
    // All of them, together with the fork.
    const cuda::sequence_id both[] = {p.id, fork};
    ok(c.gpu.step_down(both, tiers, c.stream, 0));
    CHECK(c.gpu.bytes_in_use() == before - 10 * saved, "budget: %zu bytes, expected %zu",
          c.gpu.bytes_in_use(), before - 10 * saved);
    to_both("kivi-4-g32", 0, requantize_request{}.last_token, false);
    compare(c, p, "budget", 2);
    // Dry runs, with holders outside of the call, and cuts.
    std::vector<cuda::sequence_id> all = {p.id, fork};
    std::size_t changed = 0;
    for (int i = 0; i < 24; ++i) {
        ok(c.gpu.requantize(std::span(&all[static_cast<std::size_t>(test::uniform(r, 0, 1))], 1),
                            {.format = "int8", .last_token = test::uniform(r, 4 + page, 9 * page)},
                            c.stream));
        if (i % 6 == 1) ok(c.gpu.fork(all[0], all.emplace_back(), c.stream));
        if (i % 6 == 3) ok(c.gpu.erase(all.back(), 4 + page, 4 + page + test::uniform(r, 1, page)));
        if (i % 6 == 5) ok(c.gpu.trim(all[1], c.gpu.tokens(all[1]) - test::uniform(r, 0, 20)));
        const std::span<const cuda::sequence_id> some(
            all.data(), static_cast<std::size_t>(test::uniform(r, 1, static_cast<int>(all.size()))));
        const cuda::tier down[] = {{0, "int8"}, {test::uniform(r, 0, 1) * 200000 + 60, "kivi-4-g32"}};
        const std::size_t now = c.gpu.bytes_in_use(),
                          budget = now - static_cast<std::size_t>(test::uniform(r, 0, 12)) * saved;
        requantize_report plan;
        const auto usage = c.gpu.usage(p.id);
        ok(c.gpu.plan_step_down(some, down, plan, budget));
        CHECK(c.gpu.bytes_in_use() == now && c.gpu.usage(p.id).quantized == usage.quantized &&
                  c.gpu.usage(p.id).shared == usage.shared && plan.bytes_before == now,
              "budget: a dry run has changed pages");
        ok(c.gpu.step_down(some, down, c.stream, budget));
        CHECK(plan.bytes_after == c.gpu.bytes_in_use() && plan.bytes_peak >= now &&
                  (plan.pages > 0) == (plan.bytes_freed > 0 || plan.bytes_peak > now),
              "budget: %zu bytes in use, not the %zu of the dry run", c.gpu.bytes_in_use(), plan.bytes_after);
        changed += plan.pages;
    }
    CHECK(changed > 20, "dry runs of %zu pages", changed);
    requantize_report none;
    const cuda::tier back[] = {{10, "int8"}, {5, "int8"}};
    refused(c.gpu.plan_step_down(all, back, none), "age 5, before 10");
    refused(c.gpu.plan_step_down(std::vector{p.id, p.id}, tiers, none), "is in the batch twice");
}

/// First tokens of another sequence, which end within its sinks, behind them, or where pages are committed.
void check_spliced_sinks() {
    const auto ok = [](const cuda::status& s) { CHECK(s, "spliced sinks: %s", s.message); };
    both_caches c({.sinks = 37, .recent = 70, .rollback = 100});
    test::rng r(16);
    std::vector<float16> keys, values;
    const auto prompt = [&](pair& p, int n) {
        c.write(r, keys, values, n);
        ok(c.gpu.begin_prompt(p.id, n, c.stream));
        for (int l = 0; l < layers; ++l) ok(c.gpu.append(l, c.rows(c.k, l, n), c.rows(c.v, l, n), c.stream));
        c.appended(p.host, keys, values, 0, n);
        CUDA_OK(cudaStreamSynchronize(c.stream));
    };
    pair from{c.gpu.new_sequence(), c.cpu.new_sequence()};
    prompt(from, 37 + 4 * page);
    for (const int n : {12, 37, 37 + page, 37 + 3 * page + 5}) {
        pair to{c.gpu.new_sequence(), c.cpu.new_sequence()};
        ok(c.gpu.splice(to.id, from.id, 0, n, c.stream));
        to.host.splice(from.host, 0, n);
        compare(c, to, "spliced sinks", n);
        prompt(to, 40);
        compare(c, to, "spliced sinks and a prompt", n);
    }
}

/// Text without an end: the pages of a kvq::ring.
void check_ring() {
    test::rng r(21);
    const auto ok = [](const cuda::status& s) { CHECK(s, "ring: %s", s.message); };
    double worst = 0.0;
    for (const bool moves : {false, true}) {
        constexpr int window = 90;
        both_caches c({.max_tokens = 400});
        ring of(c.cpu.new_sequence(), {.window = window,
                                       .slack = c.o.rollback,
                                       .sinks = moves ? sink_positions::in_cache : sink_positions::in_text});
        const cuda::sequence_id id = c.gpu.new_sequence(), batch[] = {id};
        std::vector<float16> keys, values;
        int all = 0;
        for (int step = 0; step < 40; ++step) {
            const int n = step % 8 == 0 ? 101 : 2;
            c.write(r, keys, values, n);
            // The ring drops at the next append what no query from then on sees.
            int dropped = 0;
            ok(c.gpu.drop_front(id, window, moves, dropped));
            all += dropped;
            ok(n > 3 ? c.gpu.begin_prompt(id, n, c.stream) : c.gpu.begin_step(batch, n, c.stream));
            for (int layer = 0; layer < layers; ++layer) {
                ok(c.gpu.append(layer, c.rows(c.k, layer, n), c.rows(c.v, layer, n), c.stream));
                const auto at = static_cast<std::size_t>(layer * c.room * heads * dim);
                of.append(layer, token_view<const float16>(&keys[at], n, heads, dim),
                          token_view<const float16>(&values[at], n, heads, dim));
            }
            CHECK(of.first_token() == (all == 0 ? 0 : all + c.o.sinks), "ring: %d tokens dropped", all);
            compare(c, pair{id, of.held().fork()}, "ring", step);
            if (n > 3) continue;
            const std::vector<float16> x = random_queries(r, c);
            ok(c.gpu.attend(1, token_view<const float16>(c.q.get(), 1, q_heads, dim),
                            token_view<float16>(c.out.get(), 1, q_heads, dim),
                            {.window = window, .window_sinks = true}, c.stream));
            CUDA_OK(cudaStreamSynchronize(c.stream));
            const auto y = c.out.download();
            const kvq::sequence& held = of.held();
            worst = std::max(worst, error_of(held, 1, 2, held.tokens(), &x[2 * dim], &y[2 * dim], 1 << 30, 0,
                                             0.0, window, c.o.sinks));
        }
        CHECK(all > 300 && c.gpu.tokens(id) < 400 && of.tokens() == c.gpu.tokens(id) + all,
              "%d tokens dropped, %d held", all, c.gpu.tokens(id));
        int dropped = 1;
        refused(c.gpu.drop_front(id, 0, false, dropped), "at least 1 token, got 0");
        CHECK(dropped == 0, "%d tokens were dropped", dropped);
    }
    CHECK(worst <= 2e-3, "ring: error %.3g", worst);
    std::printf("  %-28s error %.2e\n", "text without an end", worst);
}

/// K and V apart: the other tensor keeps its bytes, and the report says what a run does.
void check_apart() {
    both_caches c({});
    test::rng r(12);
    const auto ok = [](const cuda::status& s) { CHECK(s, "apart: %s", s.message); };
    pair p{c.gpu.new_sequence(), c.cpu.new_sequence()};
    const cuda::sequence_id ids[] = {p.id};
    workspace space;
    kvq::sequence* const hosts[] = {&p.host};
    std::vector<float16> keys, values;
    const auto append = [&](int n) {
        c.write(r, keys, values);
        ok(c.gpu.begin_prompt(p.id, n, c.stream));
        for (int layer = 0; layer < layers; ++layer)
            ok(c.gpu.append(layer, c.rows(c.k, layer, n), c.rows(c.v, layer, n), c.stream));
        c.appended(p.host, keys, values, 0, n);
        CUDA_OK(cudaStreamSynchronize(c.stream));
    };
    const auto& kinds = c.gpu.formats(0).kinds;
    const auto page_bytes = [&](std::size_t kind) {
        return layers * heads * (kinds[kind].key_block + kinds[kind].value_block);
    };
    const auto both_do = [&](const char* name, int key, int value, std::size_t pages, std::size_t from,
                             std::size_t to, std::size_t held) {
        requantize_report plan, done;
        const cuda::requantize_request request{.format = name, .new_pages = true};
        ok(c.gpu.plan_requantize(ids, request, plan));
        ok(c.gpu.requantize(ids, request, c.stream, &done));
        CHECK(std::memcmp(&plan, &done, sizeof plan) == 0 && done.pages == pages && done.pages_left == 0 &&
                  done.bytes_peak == done.bytes_before + pages * page_bytes(to) &&
                  done.bytes_freed == (pages - held) * page_bytes(from) &&
                  done.bytes_after == c.gpu.bytes_in_use(),
              "%s: %zu pages, %zu bytes freed, %zu at most", name, done.pages, done.bytes_freed,
              done.bytes_peak);
        requantize_request h;
        h.key = key;
        h.value = value;
        h.new_pages = true;
        c.cpu.requantize(std::span<kvq::sequence* const>(hosts), h, {}, serial_executor{}, space);
        append(page);
        compare(c, p, name, 0);
    };
    append(4 + 3 * page + 40);
    both_do("/int8", requantize_request::keep, 1, 3, 0, 2, 0);
    both_do("int8/", 1, requantize_request::keep, 4, 2, 1, 0);
    both_do("int8/", 1, requantize_request::keep, 0, 2, 1, 0);
    cuda::sequence_id fork;
    ok(c.gpu.fork(p.id, fork, c.stream));  // holds all pages so far, 6
    both_do("kivi-4-g32/", 0, requantize_request::keep, 6, 1, 2, 6);
    both_do("/kivi-4-g32", requantize_request::keep, 0, 7, 2, 0, 0);
    const std::size_t bytes = c.gpu.bytes_in_use();
    requantize_report plan;
    for (const char* name : {"int8/", "kivi-4-g32/int8/"})
        refused(c.gpu.plan_requantize(ids, {.format = name}, plan),
                name[4] == '/' ? "what is kivi-4-g32 cannot become int8/: add the pair of both"
                               : "is not a format of this cache");
    refused(c.gpu.requantize(ids, {.format = "/"}, c.stream), "/ is not a format of this cache");
    const cuda::tier tiers[] = {{0, "int8"}, {20, "int8/"}};
    refused(c.gpu.step_down(ids, tiers, c.stream), "cannot become int8/");
    CHECK(c.gpu.bytes_in_use() == bytes, "a refused request has changed pages");
    compare(c, p, "apart, refused", 0);
    // A fork whose values have changed has pages of its own, of which a range that names the other's pages
    // changes none. The CPU's forks still share the keys.
    ok(c.gpu.commit_to("kivi-4-g32"));
    const cuda::sequence_id one[] = {c.gpu.new_sequence()};
    c.write(r, keys, values);
    ok(c.gpu.begin_prompt(one[0], 4 + 3 * page + 40, c.stream));
    for (int layer = 0; layer < layers; ++layer)
        ok(c.gpu.append(layer, c.rows(c.k, layer, 4 + 3 * page + 40), c.rows(c.v, layer, 4 + 3 * page + 40),
                        c.stream));
    cuda::sequence_id two;
    ok(c.gpu.fork(one[0], two, c.stream));
    ok(c.gpu.requantize(one, {.format = "/int8"}, c.stream));
    ok(c.gpu.erase(two, 4, 4 + page));
    const cuda::sequence_id forks[] = {one[0], two};
    requantize_report done;
    ok(c.gpu.requantize(forks, {.format = "int8", .first_token = 4, .last_token = 4 + page}, c.stream,
                        &done));
    kvq::sequence away = c.cpu.new_sequence();
    ok(cuda::offload(c.gpu, one[0], away, c.stream));
    const auto& table = kvq::detail::sequence_access::tables(away)[0];
    CHECK(done.pages == 2 && table[1].pages[0]->format == 2 && table[2].pages[0]->format == 1 &&
              table[2].pages[1]->format == 2,
          "%zu pages changed, keys have formats %d and %d", done.pages, table[1].pages[0]->format,
          table[2].pages[0]->format);
}

/// Pages of the device in host memory: prefixes of what it has read, without formats of the CPU.
void check_host_pages() {
    both_caches c({});
    test::rng r(13);
    const auto ok = [](const cuda::status& s) { CHECK(s, "host pages: %s", s.message); };
    pair p{c.gpu.new_sequence(), c.cpu.new_sequence()};
    std::vector<float16> keys, values;
    const auto append = [&](int n) {
        c.write(r, keys, values);
        ok(c.gpu.begin_prompt(p.id, n, c.stream));
        for (int layer = 0; layer < layers; ++layer)
            ok(c.gpu.append(layer, c.rows(c.k, layer, n), c.rows(c.v, layer, n), c.stream));
        c.appended(p.host, keys, values, 0, n);
        CUDA_OK(cudaStreamSynchronize(c.stream));
    };
    append(250);
    cuda::host_pages pages(c.gpu, std::size_t{1} << 22);
    const auto bytes = pages.cache().bytes_held();
    CHECK(bytes == std::size_t{1} << 22, "%zu bytes are held", bytes);
    std::vector<token_id> text(250);
    for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<token_id>(i * i % 101);
    prefix_cache store(pages.cache(), {.byte_limit = std::size_t{1} << 22});
    {
        kvq::sequence s = pages.cache().new_sequence();
        ok(cuda::offload(c.gpu, p.id, s, c.stream));
        CHECK(store.store(text, s) == store_outcome::stored, "not stored");
        // What the device has quantized is read as the CPU reads it; it is neither quantized nor attended to.
        std::vector<float> x(250 * heads * dim), y(x.size());
        for (const tensor role : {tensor::key, tensor::value}) {
            s.dequantize(1, role, 0, token_view<float>(x.data(), 250, heads, dim));
            p.host.dequantize(1, role, 0, token_view<float>(y.data(), 250, heads, dim));
            CHECK(x == y, "other values");
        }
        const auto raises = [&](auto&& call, std::string_view part) {
            std::string message;
            try {
                call();
            } catch (const kvq::error& e) {
                message = e.what();
            }
            CHECK(message.find(part) != message.npos, "expected '%s', got '%s'", part.data(),
                  message.c_str());
        };
        raises(
            [&] {
                s.attend(0, token_view<const float>(x.data(), 1, heads, dim),
                         token_view<float>(y.data(), 1, heads, dim));
            },
            "cannot be attended to on the host");
        raises([&] { pages.cache().requantize(s, {.key = 1, .value = 1}); },
               "cannot be quantized on the host");
    }
    ok(c.gpu.free(p.id));
    text.resize(200);
    text.push_back(-1);
    auto found = store.fetch(text);
    CHECK(found.match == prefix_match::lcp && found.tokens == 200, "%d tokens", found.tokens);
    ok(cuda::onload(found.sequence, c.gpu, p.id, c.stream));
    p.host.trim(200);
    append(100);
    // A deep trim gives the copies back that it cannot restore; so did the store.
    kvq::sequence moved = c.cpu.new_sequence();
    ok(cuda::offload(c.gpu, p.id, moved, c.stream));
    CHECK(moved.tokens() == 300, "%d tokens", moved.tokens());
    compare(c, p, "host pages", 0);
    refused(cuda::restore(
                c.gpu, [](void*, std::size_t) { return std::size_t{0}; }, {.convert = true}, p.id, c.stream),
            "convert them in a CPU cache");
}

/// Prefixes and parked sequences on the device, in host memory and in files, under small budgets. faults:
/// files are damaged, cut and removed, and at last cannot be written.
void check_prefixes(unsigned seed, bool faults) {
    both_caches c({});
    test::rng r(seed);
    int step = -1;
    const auto ok = [&](const cuda::status& s) {
        CHECK(s, "prefixes, seed %u, step %d: %s", seed, step, s.message);
    };
    std::vector<float16> keys, values;
    const auto append = [&](pair& p, int n) {
        c.write(r, keys, values, n);
        ok(c.gpu.begin_prompt(p.id, n, c.stream));
        for (int layer = 0; layer < layers; ++layer)
            ok(c.gpu.append(layer, c.rows(c.k, layer, n), c.rows(c.v, layer, n), c.stream));
        c.appended(p.host, keys, values, 0, n);
        CUDA_OK(cudaStreamSynchronize(c.stream));
    };
    namespace fs = std::filesystem;
    const fs::path folder =
        fs::temp_directory_path() / ("kvq-test-" + std::to_string(seed) + "-" + std::to_string(getpid()));
    fs::create_directories(folder);
    const cuda::tier_bytes budget{400000, 300000, faults ? 400000 : ~std::size_t{0}};
    const std::size_t before = c.gpu.bytes_in_use();
    {
        cuda::prefixes<prefix_tiers> store(
            c.gpu, {.bytes = budget, .min_prefix_tokens = 1, .folder = folder.string()});
        struct known_text {
            std::vector<token_id> tokens;
            kvq::sequence host;
        };
        std::vector<known_text> texts;
        std::size_t misses = 0, parked = 0;
        for (step = 0; step < 40; ++step) {
            const auto stats = store.below().statistics();
            const cuda::prefix_report now = store.report();
            CHECK(now.bytes <= budget.device && now.host_bytes <= budget.host &&
                      stats.file_bytes <= budget.files,
                  "prefixes, seed %u, step %d: %zu bytes on the device, %zu on the host, %zu in files", seed,
                  step, now.bytes, now.host_bytes, stats.file_bytes);
            if (texts.size() < 8 || (texts.size() < 14 && test::uniform(r, 0, 2) == 0)) {
                const int n = test::uniform(r, 20, 240);
                pair p{c.gpu.new_sequence(), c.cpu.new_sequence()};
                append(p, n);
                std::vector<token_id> tokens;
                for (int t = 0; t < n; ++t) tokens.push_back(1000 * static_cast<int>(texts.size()) + t);
                if (step % 2 == 0) {
                    ok(store.store(tokens, p.id, c.stream));
                    ok(store.store(tokens, p.id, c.stream));  // it is there
                    ok(c.gpu.free(p.id));
                } else {
                    ok(store.park(tokens, p.id, c.stream));
                    CHECK(p.id == cuda::sequence_id{}, "a parked sequence is the caller's");
                }
                texts.push_back({std::move(tokens), std::move(p.host)});
                continue;
            }
            const known_text& from =
                texts[static_cast<std::size_t>(test::uniform(r, 0, static_cast<int>(texts.size()) - 1))];
            if (faults && step > 12 && step < 30)
                for (const auto& file : fs::recursive_directory_iterator(folder)) {
                    if (!file.is_regular_file() || test::uniform(r, 0, 1) == 0) continue;
                    const auto bytes = fs::file_size(file.path());
                    if (step % 3 == 0) {
                        fs::remove(file.path());
                    } else if (step % 3 == 1) {
                        fs::resize_file(file.path(), bytes / 2);
                    } else if (std::FILE* const f = std::fopen(file.path().c_str(), "r+b")) {
                        std::fseek(f, static_cast<long>(bytes * 2 / 3), SEEK_SET);
                        std::fputs("other bytes", f);
                        std::fclose(f);
                    }
                }
            if (faults && step == 30) fs::remove_all(folder);
            // All of a text, or a part of it and a token of no text.
            const int all = static_cast<int>(from.tokens.size()),
                      n = test::uniform(r, 0, 1) == 0 ? all : test::uniform(r, all / 2, all);
            std::vector<token_id> wanted(from.tokens.begin(), from.tokens.begin() + n);
            if (n < all) wanted.push_back(-5);
            const cuda::found_prefix expected = store.lookup(wanted);
            cuda::found_prefix found;
            ok(store.fetch(wanted, found, c.stream));
            CHECK(found.tokens <= n && c.gpu.tokens(found.id) == found.tokens &&
                      (faults || (found.tokens == n && expected.tokens == n &&
                                  found.match == expected.match && found.place == expected.place)),
                  "prefixes, seed %u, step %d: %d tokens of %d, where %d were expected", seed, step,
                  found.tokens, n, expected.tokens);
            misses += found.tokens == 0;
            if (found.tokens == 0) continue;
            pair p{found.id, from.host.fork()};
            p.host.trim(found.tokens);
            compare(c, p, "prefixes", step);
            if (found.tokens == all && test::uniform(r, 0, 1) == 0) {
                ok(store.park(wanted, p.id, c.stream));
                ++parked;
                continue;
            }
            append(p, 30);
            compare(c, p, "prefixes", step);
            ok(c.gpu.free(p.id));
        }
        const cuda::prefix_report end = store.report();
        CHECK(c.gpu.bytes_in_use() - before == end.bytes, "%zu bytes in use, %zu of entries",
              c.gpu.bytes_in_use() - before, end.bytes);
        CHECK(
            end.fetches[1] > 0 && end.fetches[2] > 0 && (end.fetches[3] > 0 || faults) && parked > 0 &&
                (misses > 0) == faults && (store.below().statistics().failed > 0) == faults &&
                end.lost == 0 && end.lowered > 0,
            "prefixes, seed %u: %zu fetches from the device, %zu from the host, %zu from files, %zu misses, "
            "%zu lost, %zu files failed, %zu parked",
            seed, end.fetches[1], end.fetches[2], end.fetches[3], misses, end.lost,
            store.below().statistics().failed, parked);
        cuda::found_prefix none;
        ok(store.fetch(std::vector<token_id>{-1, -2}, none, c.stream));
        CHECK(!is_hit(none.match) && none.tokens == 0, "%d tokens of no text", none.tokens);
        refused(store.store(texts[0].tokens, none.id, c.stream), "tokens of a sequence that holds 0");
        // Room is made, and entries go to another format.
        pair p{c.gpu.new_sequence(), c.cpu.new_sequence()};
        append(p, 200);
        const std::vector<token_id> last(200, 3);
        ok(store.store(last, p.id, c.stream));
        const cuda::tier tiers[] = {{0, "kivi-4-g32"}};
        ok(store.step_down(std::span(&p.id, 1), tiers, c.stream));
        ok(store.release(store.bytes() / 2, c.stream));
        CHECK(store.entries() < end.entries + 1, "%zu entries", store.entries());
        ok(store.release(~std::size_t{0}, c.stream));
        CHECK(store.entries() == 0 && store.bytes() == 0, "%zu entries", store.entries());
        ok(c.gpu.free(p.id));
    }
    CHECK(c.gpu.bytes_in_use() == before, "%zu bytes are left", c.gpu.bytes_in_use() - before);
    CHECK(faults || fs::is_empty(folder), "files are left in %s", folder.c_str());
    fs::remove_all(folder);
}

/// Room for one more copy of the recent window: a prefix is fetched, but no entry holds it. Formats of
/// entries.
void check_full_device() {
    const auto ok = [](const cuda::status& s) { CHECK(s, "prefixes: %s", s.message); };
    both_caches small({.pool_tokens = 800, .pool_sequences = 4, .growing = false});
    test::rng r(22);
    std::vector<float16> keys, values;
    pair p{small.gpu.new_sequence(), small.cpu.new_sequence()};
    small.write(r, keys, values);
    ok(small.gpu.begin_prompt(p.id, 240, small.stream));
    for (int layer = 0; layer < layers; ++layer)
        ok(small.gpu.append(layer, small.rows(small.k, layer, 240), small.rows(small.v, layer, 240),
                            small.stream));
    cuda::prefixes store(small.gpu, {.min_prefix_tokens = 1});
    const std::vector<token_id> text(240, 7);
    ok(store.store(text, p.id, small.stream));
    ok(store.release(~std::size_t{0}, small.stream));
    cuda::sequence_id other;
    int forks = 0;
    while (small.gpu.fork(p.id, other, small.stream)) ++forks;
    ok(small.gpu.free(p.id));
    cuda::found_prefix found;
    ok(store.fetch(text, found, small.stream));
    CHECK(forks > 0 && found.tokens == 240 && small.gpu.tokens(found.id) == 240 && store.entries() == 0 &&
              found.place == cuda::prefix_place::host,
          "%d tokens of 240, %zu entries, %d forks", found.tokens, store.entries(), forks);
    // An entry without room for a copy comes back by the host; so does what cannot be copied to be stored.
    const std::vector<token_id> again(240, 8);
    ok(store.park(again, found.id, small.stream));
    ok(store.fetch(again, found, small.stream));
    CHECK(found.tokens == 240 && found.place == cuda::prefix_place::host && store.entries() == 0,
          "%d tokens, %zu entries", found.tokens, store.entries());
    const std::vector<token_id> third(200, 9);
    ok(store.store(third, found.id, small.stream));
    CHECK(store.entries() == 0 && store.lookup(third).tokens == 200 &&
              store.lookup(third).place == cuda::prefix_place::host,
          "%zu entries, %d tokens", store.entries(), store.lookup(third).tokens);
    // int8 pages of an entry become smaller, those of its sequence stay.
    both_caches c({.growing = true});
    cuda::prefixes narrow(c.gpu, {.min_quantize_tokens = 1, .format = "kivi-4-g32"});
    const cuda::sequence_id wide_pages = c.gpu.new_sequence();
    ok(c.gpu.begin_prompt(wide_pages, 240, c.stream));
    c.write(r, keys, values);
    for (int layer = 0; layer < layers; ++layer)
        ok(c.gpu.append(layer, c.rows(c.k, layer, 240), c.rows(c.v, layer, 240), c.stream));
    ok(c.gpu.requantize(std::span(&wide_pages, 1), {.format = "int8"}, c.stream));
    const std::size_t quantized = c.gpu.usage(wide_pages).quantized;
    ok(narrow.store(text, wide_pages, c.stream));
    ok(narrow.fetch(text, found, c.stream));
    CHECK(
        c.gpu.usage(found.id).quantized * 3 < quantized * 2 && c.gpu.usage(wide_pages).quantized == quantized,
        "%zu bytes of an entry, %zu of its sequence", c.gpu.usage(found.id).quantized, quantized);
    ok(c.gpu.free(found.id));
    // A host with room for none of an entry: it is computed again.
    cuda::prefixes none(c.gpu, {.bytes = {.device = 1000, .host = 4096}, .min_prefix_tokens = 1});
    ok(none.store(text, wide_pages, c.stream));
    ok(none.fetch(text, found, c.stream));
    CHECK(found.tokens == 0 && found.match == prefix_match::miss && none.report().lost == 1 &&
              none.entries() == 0 && none.report().host_bytes == 0,
          "%d tokens, %zu entries were lost", found.tokens, none.report().lost);
    bool raised = false;
    try {
        cuda::prefixes<> no_files(c.gpu, {.folder = "."});
    } catch (const kvq::error& e) {
        raised = std::string_view(e.what()).find("take kvq::prefix_tiers") != std::string_view::npos;
    }
    CHECK(raised, "a folder without files");
}

/// The least prompt_scratch that a cache takes; 0: its kernels take none.
std::size_t least_scratch() {
    cuda::cache c;
    cuda::cache_options o;
    o.formats = {"kivi-4-g32", "int8"};
    const both_options of;
    o.page_tokens = page;
    o.sinks = of.sinks;
    o.recent = of.recent;
    o.rollback = of.rollback;
    o.max_tokens = of.max_tokens;
    o.step_tokens = of.step_tokens;
    o.draft_tokens = of.draft_tokens;
    o.prompt_scratch = 1;
    const cuda::status s =
        c.open({.layers = layers, .kv_heads = heads, .head_dim = dim}, o, std::span(&compiled(), 1), nullptr);
    const char* const needs = s ? nullptr : std::strstr(s.message, "needs ");
    CHECK(s || needs != nullptr, "%s", s.message);
    return needs == nullptr ? 0 : std::strtoull(needs + 6, nullptr, 10);
}

/// Memory for half floats of prompts, and of parts of prompts in steps: for the tokens that there are, where
/// the device has it, and not in graphs.
void check_scratch() {
    const std::size_t least = least_scratch();
    // Tiles of 128 tokens: for all tokens once, and a few for what begins one of its own, of 3 formats.
    const both_options usual;
    const int tiles = (usual.max_tokens + usual.cut_pages * page + 127) / 128 + 8;
    CHECK(least <= static_cast<std::size_t>(tiles) * (128 * dim * 4 + 64), "%zu bytes for %d tiles", least,
          tiles);
    const auto ok = [](const cuda::status& s) { CHECK(s, "%s", s.message); };
    both_options options;
    if (least > 0) options.prompt_scratch = least;
    options.growing = false;  // so that a graph stays valid
    options.pool_tokens = 3000;
    options.pool_sequences = 2;
    both_caches c(options);
    test::rng r(29);
    std::vector<float16> keys, values, x(c.q.size());
    for (float16& y : x) y = float16(test::normal(r));
    c.q.upload(x);
    const cuda::sequence_id id = c.gpu.new_sequence(), other = c.gpu.new_sequence();
    const auto prompt = [&](cuda::sequence_id of, int n) {
        c.write(r, keys, values);
        ok(c.gpu.begin_prompt(of, n, c.stream));
        for (int layer = 0; layer < layers; ++layer)
            ok(c.gpu.append(layer, c.rows(c.k, layer, n), c.rows(c.v, layer, n), c.stream));
    };
    // A prompt takes none where the device lacks it.
    c.write(r, keys, values);
    test::counted_memory::limit = test::counted_memory::bytes;
    while (!c.gpu.begin_prompt(id, 250, c.stream)) test::counted_memory::limit += 4096;
    test::counted_memory::limit = std::size_t{1} << 40;
    CHECK(least == 0 || c.gpu.prompt_bytes() < least / 4, "%zu bytes of a prompt", c.gpu.prompt_bytes());
    for (int layer = 0; layer < layers; ++layer)
        ok(c.gpu.append(layer, c.rows(c.k, layer, 250), c.rows(c.v, layer, 250), c.stream));
    constexpr int n = 5;
    test::device_buffer<float> states(n * q_heads * (dim + 2));
    const auto part = [&] {
        const token_view<const float16> nothing(nullptr, 0, heads, dim);
        ok(c.gpu.prefill_part(1, nothing, nothing, token_view<const float16>(c.q.get(), n, q_heads, dim),
                              {.state_out = states.get()}, c.stream));
    };
    const auto begin = [&] { ok(c.gpu.begin_step(std::span(&id, 1), 0, c.stream)); };
    const auto outputs = [&] {
        CUDA_OK(cudaStreamSynchronize(c.stream));
        std::vector<float> s = states.download();
        states.upload(std::vector<float>(s.size(), NAN));
        for (std::size_t i = 0; i < s.size(); i += dim + 2)
            for (std::size_t j = 0; j < dim; ++j) s[i + 2 + j] /= s[i + 1];
        return s;
    };
    const auto equal = [&](const std::vector<float>& a, const std::vector<float>& b, const char* what) {
        double error = 0.0;
        for (std::size_t i = 0; i < a.size(); ++i)
            if (i % (dim + 2) > 1)
                error = a[i] == a[i] ? std::max(error, std::abs(double{a[i]} - b[i])) : 1.0;
        CHECK(error < 3e-3, "parts of prompts %s: error %g", what, error);
    };
    // Tests' memory stays as it was where the device has no more.
    const std::size_t before = test::counted_memory::bytes;
    begin();
    test::counted_memory::limit = before;
    part();
    test::counted_memory::limit = std::size_t{1} << 40;
    const std::vector<float> without = outputs();
    CHECK(test::counted_memory::bytes == before, "a part of a prompt took memory that was not there");
    part();
    equal(outputs(), without, "with memory");
    const std::size_t taken = test::counted_memory::bytes - before;
    CHECK(least == 0 ? taken == 0 : taken > 0 && taken < least, "%zu bytes for 250 tokens, %zu for 1200",
          taken, least);
    // A graph stays right when a longer prompt moves the memory, and does not write where it was.
    CUDA_OK(cudaStreamBeginCapture(c.stream, cudaStreamCaptureModeThreadLocal));
    part();
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA_OK(cudaStreamEndCapture(c.stream, &graph));
    CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
    const std::size_t held = test::counted_memory::bytes;
    const std::uint64_t graph_id = c.gpu.graph_id();
    for (int i = 0; i < 4; ++i) prompt(other, 256);
    ok(c.gpu.begin_prompt(other, 100, c.stream));
    for (int layer = 0; layer < layers; ++layer) {
        const auto k = c.rows(c.k, layer, 100), v = c.rows(c.v, layer, 100);
        ok(c.gpu.prefill(layer, k, v, token_view<const float16>(c.q.get(), 100, q_heads, dim),
                         token_view<float16>(c.out.get(), 100, q_heads, dim), {}, c.stream));
    }
    CHECK(least == 0 || test::counted_memory::bytes > held, "prompts took no memory");
    const test::device_buffer<float> others(std::vector<float>(std::max<std::size_t>(taken, 64) / 4, 3.0f));
    begin();
    CHECK(c.gpu.graph_id() == graph_id, "a prompt between them gives steps another graph");
    CUDA_OK(cudaGraphLaunch(exec, c.stream));
    equal(outputs(), without, "in a graph");
    for (const float y : others.download()) CHECK(y == 3.0f, "a graph writes to memory that was given back");
    CUDA_OK(cudaGraphExecDestroy(exec));
    CUDA_OK(cudaGraphDestroy(graph));
}

/// A second append of a layer; and what reads or follows a prompt that some layer lacks.
void check_unfinished() {
    both_caches c({});
    pair p{c.gpu.new_sequence(), c.cpu.new_sequence()};
    const cuda::sequence_id other = c.gpu.new_sequence(), one[] = {p.id}, others[] = {other};
    const std::span<const int> no_path;
    std::vector<float16> keys, values;
    test::rng r(2);
    const auto append = [&](int layer, int n) {
        CHECK(c.gpu.append(layer, c.rows(c.k, layer, n), c.rows(c.v, layer, n), c.stream), "append");
        refused(c.gpu.append(layer, c.rows(c.k, layer, n), c.rows(c.v, layer, n), c.stream),
                "it has the tokens of this step already");
    };
    const auto write = [&](int n) {
        c.write(r, keys, values);
        c.appended(p.host, keys, values, 0, n);
    };
    for (const int n : {150, 70}) {
        const int held = c.gpu.tokens(p.id);
        write(n);
        CHECK(c.gpu.begin_prompt(p.id, n, c.stream), "begin");
        for (int layer = 0; layer < layers; ++layer) {
            cuda::sequence_id copy;
            kvq::sequence away = c.cpu.new_sequence();
            const cuda::tier tiers[] = {{0, "int8"}};
            for (const cuda::status& s :
                 {c.gpu.fork(p.id, copy, c.stream), cuda::offload(c.gpu, p.id, away, c.stream),
                  c.gpu.requantize(one, {.format = "int8"}, c.stream), c.gpu.step_down(one, tiers, c.stream),
                  c.gpu.begin_prompt(other, 1, c.stream), c.gpu.begin_step(others, 0, c.stream),
                  c.gpu.begin_draft(one, 1, c.stream), c.gpu.keep(others, std::span(&no_path, 1), c.stream)})
                refused(s, layer == 0 ? "2 layers lack tokens" : "1 layers lack tokens");
            refused(c.gpu.trim(p.id, held + n - 1), "lack the prompt that has begun; trim to at most");
            CHECK(copy == cuda::sequence_id{} && away.tokens() == 0 && c.gpu.tokens(p.id) == held + n &&
                      c.gpu.trim_limit(p.id) == held + n,
                  "a refused call has changed something");
            append(layer, n);
            const token_view<const float16> q(c.q.get(), n, q_heads, dim);
            refused(c.gpu.prefill(layer, c.rows(c.k, layer, n), c.rows(c.v, layer, n), q,
                                  token_view<float16>(c.out.get(), n, q_heads, dim), {}, c.stream),
                    "already");
            refused(c.gpu.prefill_part(layer, c.rows(c.k, layer, n), c.rows(c.v, layer, n), q, {}, c.stream),
                    "already");
        }
        compare(c, p, "a prompt that was given twice", n);
    }
    for (int i = 0; i < 40; ++i) {
        write(1);
        CHECK(c.gpu.begin_step(one, 1, c.stream), "begin");
        for (int layer = 0; layer < layers; ++layer) append(layer, 1);
    }
    compare(c, p, "steps that were given twice", 0);
    // A prompt that another call has ended is taken back, and given again.
    CHECK(c.gpu.begin_prompt(p.id, 9, c.stream) && c.gpu.trim(other, 0) && c.gpu.free(other), "free");
    refused(c.gpu.begin_step(one, 1, c.stream), "or trim the sequence to 260");
    CHECK(c.gpu.trim(p.id, 260) && c.gpu.begin_prompt(p.id, 9, c.stream), "begin");
    write(9);
    for (int layer = 0; layer < layers; ++layer) append(layer, 9);
    compare(c, p, "a prompt that was taken back", 0);
    // A draft.
    CHECK(c.gpu.begin_draft(one, 2, c.stream), "begin");
    append(0, 2);
    CHECK(c.gpu.trim(p.id, c.gpu.tokens(p.id) - 2), "trim");
    compare(c, p, "a draft that was given twice", 0);
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
            "nothing was compiled for std4, head_dim 64, pages of 32: add it to KVQ_CUDA_FORMATS, or "
            "make_device_format<float16");
    refused(open([](auto& o) { o.page_tokens = 64; }, shape), "pages of 64");
    refused(open([](auto& o) { o.type = float_type::bf16; }, shape), "make_device_format<bfloat16");
    refused(open([](auto&) {}, {.layers = 1, .kv_heads = 1, .head_dim = 128}), "head_dim 128");
    refused(open([](auto& o) { o.formats = {}; }, shape), "needs a format");
    refused(open([](auto& o) { o.recent = 0; }, shape), "step_tokens is 1");
    refused(open([](auto& o) { o.rollback = -1; }, shape), "rollback");
#ifdef TARGET_SM_90A
    refused(open([](auto& o) { o.prompt_scratch = 1000; }, shape),
            "prompt_scratch is 1000 bytes, but one kv head of");
#endif
    refused(open([](auto& o) { o.max_batch = 0; }, shape), "max_batch");
    refused(open([](auto& o) { o.pool_sequences = 1 << 30; }, shape), "pool_sequences is 1073741824");
    refused(open([](auto& o) { o.max_tokens = 0; }, shape), "max_tokens");
    refused(open([](auto& o) { o.draft_tokens = 33; }, shape), "draft_tokens is 33");
    refused(open(
                [](auto& o) {
                    o.resident_tokens = (std::numeric_limits<int>::max)();
                    o.listed_tokens = o.pool_tokens = page;
                    o.growing = false;
                },
                shape),
            "resident_tokens is 2147483647, but must be at most 524288");
    refused(open([](auto&) {}, {.layers = 0, .kv_heads = 1, .head_dim = 64}), "0 layers");

    {
        cuda::cache short_text;
        cuda::cache_options long_texts;
        long_texts.formats = {"kivi-4-g32"};
        long_texts.page_tokens = page;
        long_texts.max_tokens = 100000;
        long_texts.memory = test::counted_memory::allocator();
        long_texts.pool_tokens = 2000;
        long_texts.pool_sequences = 1;
        CHECK(short_text.open(shape, long_texts, std::span(&compiled(), 1), nullptr), "open");
        const cuda::sequence_id text = short_text.new_sequence();
        const test::device_buffer<float16> rows(1300 * heads * dim);
        std::size_t most = 2 << 20;
        std::uint64_t graph = 0;
        for (const int n : {10, 1300, 10}) {  // formats that have no pages take no memory
            if (n == 1300) test::counted_memory::limit = test::counted_memory::bytes + (800 << 10);
            CHECK(short_text.begin_prompt(text, n, nullptr), "begin");
            CHECK(short_text.prompt_bytes() <= most, "a prompt of %d tokens behind %d takes %zu bytes", n,
                  short_text.tokens(text) - n, short_text.prompt_bytes());
            test::counted_memory::limit = std::size_t{1} << 40;
            if (n == 1300) most = 1088 << 10;  // without room it was one head's
            CHECK(std::exchange(graph, short_text.graph_id()) != short_text.graph_id(), "a graph of prompts");
            const token_view<const float16> kv(rows.get(), n, heads, dim);
            for (int layer = 0; layer < layers; ++layer)
                CHECK(short_text.append(layer, kv, kv, nullptr), "append");
        }
    }
    both_options o;
    o.max_tokens = 300;
    o.max_batch = 2;
    o.growing = false;
    o.pool_tokens = 4 * page;
    o.pool_sequences = 2;
    o.rotates = false;
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
    CHECK(c.gpu.tokens(a) == 0 && c.gpu.usage(a).bytes == 0, "a refused prompt has left something");
    CHECK(c.gpu.begin_step(one, 1, c.stream), "begin");
    refused(c.gpu.append(2, kv, kv, c.stream), "layer 2");
    refused(c.gpu.append(0, c.rows(c.k, 0, 2), kv, c.stream), "the step has 1 x 1");
    const token_view<const float> other(nullptr, 1, heads, dim);
    refused(c.gpu.append(0, other, other, c.stream), "another type");
    refused(c.gpu.append(0, kv, other, c.stream), "another type");
    const token_view<const float16> query(c.q.get(), 1, q_heads, dim);
    const token_view<float16> output(c.out.get(), 1, q_heads, dim);
    refused(c.gpu.attend(2, kv, kv, query, output, {}, c.stream), "layer 2");
    refused(c.gpu.attend(0, kv, other, query, output, {}, c.stream), "another type");
    refused(c.gpu.attend(0, kv, kv, query, output, {.query_tokens = 0}, c.stream),
            "attention of 0 tokens that appends 1");
    CHECK(c.gpu.append(0, kv, kv, c.stream), "append");
    refused(c.gpu.attend(0, kv, kv, query, output, {}, c.stream), "it has the tokens of this step already");
    refused(c.gpu.attend(0, token_view<const float16>(c.q.get(), 1, 3, dim),
                         token_view<float16>(c.out.get(), 1, 3, dim), {}, c.stream),
            "not a multiple");
    refused(c.gpu.trim(a, 2), "cannot trim to 2");
    // A draft, and what has to wait for its end.
    refused(c.gpu.begin_draft(one, 25, c.stream), "draft_tokens is 24");
    CHECK(c.gpu.begin_draft(one, 3, c.stream), "begin_draft");
    CHECK(c.gpu.tokens(a) == 4, "%d tokens", c.gpu.tokens(a));
    const cuda::sequence_id both[] = {a, b};
    refused(c.gpu.begin_draft(both, 1, c.stream), "grow together");
    refused(c.gpu.begin_draft(one, 22, c.stream), "behind 3");
    refused(c.gpu.begin_step(one, 1, c.stream), "holds a draft of 3 tokens");
    refused(c.gpu.begin_prompt(a, 1, c.stream), "holds a draft");
    refused(c.gpu.requantize(one, {.format = "int8"}, c.stream), "holds a draft");
    kvq::sequence away = c.cpu.new_sequence();
    refused(cuda::offload(c.gpu, a, away, c.stream), "holds a draft");
    refused(c.gpu.trim(a, 2), "are a draft");
    const int wrong[] = {1, 1}, outside[] = {3};
    const std::span<const int> paths[] = {wrong, outside};
    refused(c.gpu.keep(one, std::span(paths, 1), c.stream), "paths ascend");
    refused(c.gpu.keep(one, std::span(paths + 1, 1), c.stream), "token 3");
    refused(c.gpu.keep(one, paths, c.stream), "2 paths for 1");
    CHECK(c.gpu.tokens(a) == 4, "a refused keep has changed something");
    // No key moves.
    refused(c.gpu.erase(a, 1, 3), "set cache_options::rotary");
    refused(c.gpu.erase(a, 1, 5), "holds 4");
    refused(c.gpu.shift(a, 0, 1, 3), "keys cannot move by 3 positions");
    refused(c.gpu.splice(b, a, 1, 2, c.stream), "keys cannot move by -1 positions");
    CHECK(c.gpu.erase(a, 1, 1) && c.gpu.shift(a, 0, 4, 0) && c.gpu.splice(b, a, 2, 2, c.stream) &&
              c.gpu.tokens(a) == 4,
          "what moves nothing");
    CHECK(c.gpu.erase(a, 1, 4) && c.gpu.tokens(a) == 1, "an erase to the end is a trim");
    CHECK(c.gpu.begin_step(one, 0, c.stream), "begin");
    refused(c.gpu.requantize(one, {.format = "std4"}, c.stream), "std4 is not a format of this cache");
    refused(c.gpu.requantize(one, {.format = "int8", .first_token = 3, .last_token = 2}, c.stream), "range");
    const cuda::tier descending[] = {{10, "int8"}, {5, "kivi-4-g32"}}, missing[] = {{0, "std4"}};
    refused(c.gpu.step_down(one, descending, c.stream), "age 5, before 10");
    refused(c.gpu.step_down(one, missing, c.stream), "std4 is not a format of this cache");
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
    // What an erase has moved needs a device that turns queries.
    kvq::cache rotates(c.cpu.shape(), {.keys = host_formats().keys,
                                       .values = host_formats().values,
                                       .sinks = o.sinks,
                                       .recent = o.recent,
                                       .page_tokens = page,
                                       .rollback = o.rollback,
                                       .rotary = {rotary_embedding{.dims = dim}}});
    kvq::sequence erased = rotates.new_sequence();
    std::vector<float16> keys, values;
    test::rng r(1);
    c.write(r, keys, values);
    c.appended(erased, keys, values, 0, 200);
    erased.erase(50, 60);
    cuda::sequence_id made;
    refused(cuda::onload(erased, c.gpu, made, c.stream), "but layer 0 turns them by");
    erased.trim(0);
    c.appended(erased, keys, values, 0, 200);
    erased.erase(1, 60);
    refused(cuda::onload(erased, c.gpu, made, c.stream), "are sinks of which");
    // 16-bit pages that wait, behind the window.
    kvq::sequence waits = rotates.new_sequence();
    waits.hold();
    c.appended(waits, keys, values, 0, 200);
    refused(cuda::onload(waits, c.gpu, made, c.stream), "are held in 16 bit");
    waits.release();
    CHECK(made == cuda::sequence_id{}, "a refused onload has made a sequence");

    // Pages that trims have cut take places of the table.
    both_options few;
    few.max_tokens = 300;
    few.cut_pages = 0;
    both_caches f(few);
    const auto x = f.gpu.new_sequence();
    CHECK(f.gpu.begin_prompt(x, 200, f.stream), "begin");
    // The pages of a prompt that some layer does not have are not quantized there.
    for (int l = 0; l < layers; ++l) {
        refused(f.gpu.trim(x, 70), l == 0 ? "2 layers lack the prompt" : "1 layers lack the prompt");
        CHECK(f.gpu.append(l, f.rows(f.k, l, 200), f.rows(f.v, l, 200), f.stream), "append");
    }
    CHECK(f.gpu.trim(x, 70), "a trim into a quantized page");
    const auto back = f.gpu.new_sequence();
    CHECK(f.gpu.begin_prompt(back, 200, f.stream) && f.gpu.trim(back, 0) && f.gpu.tokens(back) == 0,
          "a prompt that is taken back");
    CHECK(f.gpu.free(back), "free");
    refused(
        f.gpu.begin_prompt(x, 230, f.stream),
        "holds 70 tokens and 1 pages that trims have cut, and cannot take 230 tokens more: max_tokens is 300 "
        "and cut_pages 0");
    CHECK(f.gpu.begin_prompt(x, 224, f.stream) && f.gpu.tokens(x) == 294, "begin");
    refused(f.gpu.begin_prompt(x, 1, f.stream), "cut_pages 0");

    // No memory: everything as before.
    both_options growing;
    both_caches g(growing);
    const auto s = g.gpu.new_sequence();
    test::counted_memory::limit = test::counted_memory::bytes + 1000;
    refused(g.gpu.begin_prompt(s, 100, g.stream), "device memory");
    CHECK(g.gpu.tokens(s) == 0 && g.gpu.usage().bytes > 0, "a prompt without memory has left something");
    test::counted_memory::limit = std::size_t{1} << 40;
    CHECK(g.gpu.begin_prompt(s, 100, g.stream), "begin");

    // A keep() without memory leaves the step that has begun as it was.
    both_options fixed;
    fixed.growing = false;
    fixed.recent = page;
    fixed.rollback = 0;
    fixed.draft_tokens = page;
    fixed.pool_tokens = page;
    fixed.pool_sequences = 2;
    both_caches h(fixed);
    pair p{h.gpu.new_sequence(), h.cpu.new_sequence()};
    const cuda::sequence_id drafted = h.gpu.new_sequence();
    const auto append = [&](int n) {
        for (int l = 0; l < layers; ++l)
            CHECK(h.gpu.append(l, h.rows(h.k, l, n), h.rows(h.v, l, n), h.stream), "append");
    };
    const int full_window = fixed.sinks + 2 * page - 1;
    h.write(r, keys, values);
    CHECK(h.gpu.begin_prompt(drafted, full_window, h.stream), "begin");
    append(full_window);
    CHECK(h.gpu.requantize(std::span(&drafted, 1), {.format = host_formats().names[1], .new_pages = true},
                           h.stream),
          "new pages of another format");
    CHECK(h.gpu.begin_draft(std::span(&drafted, 1), 1, h.stream), "begin");
    append(1);
    CHECK(h.gpu.begin_prompt(p.id, full_window, h.stream), "begin");
    append(full_window);
    h.appended(p.host, keys, values, 0, full_window);
    h.write(r, keys, values);
    CHECK(h.gpu.begin_step(std::span(&p.id, 1), 1, h.stream), "begin");
    const int first[] = {0};
    const std::span<const int> path(first);
    refused(h.gpu.keep(std::span(&drafted, 1), std::span(&path, 1), h.stream), "pool");
    append(1);
    h.appended(p.host, keys, values, 0, 1);
    compare(h, p, "a keep without memory", 0);
}

/// Lists of layers that the device does not hold, and what windows refuse.
void check_lists() {
    const layer of{heads, dim};
    const auto open = [&](const std::vector<layer>& list, int sinks) {
        cuda::cache c;
        cuda::cache_options o;
        o.formats = {"kivi-4-g32", "int8"};
        o.page_tokens = page;
        o.sinks = sinks;
        return c.open(list, o, std::span(&compiled(), 1), nullptr);
    };
    const layer full = full_attention(of);
    refused(open({cross_layer(of), state_layer({{.name = "state"}})}, 0),
            "has a layer with keys and values of its own text; all 2 have others, or state");
    layer sees_two = sliding_attention(64, of), mixed = full;
    sees_two.sinks = 2;
    refused(open({sees_two}, 4), "sliding window of 64, 2 x 64: its queries see 2 sinks");
    mixed.formats = {0, 2};
    refused(open({full, mixed}, 0), "layer 1, full attention of 2 x 64: formats 0 and 2 are not among the 2");
    mixed.formats = {1, 0};
    refused(open({full, mixed}, 0), "nothing was compiled for int8/kivi-4-g32, head_dim 64");
    bool raised = false;
    try {
        (void)open({full, sliding_attention(0, of)}, 0);
    } catch (const kvq::error&) {
        raised = true;
    }
    CHECK(raised, "a window of 0 tokens");

    // A window and a layer with other heads. Pages of the window go, the sinks stay.
    both_options options;
    options.list = {full_attention({1, dim}), sliding_attention(40, of)};
    options.list[1].sinks = options.sinks;
    both_caches c(options);
    const cuda::sequence_id id = c.gpu.new_sequence();
    const auto append = [&](int n) {
        CHECK(c.gpu.begin_prompt(id, n, c.stream), "begin");
        for (int l = 0; l < 2; ++l)
            CHECK(c.gpu.append(l, c.rows(c.k, l, n), c.rows(c.v, l, n), c.stream), "append");
    };
    append(250);
    append(1);  // gives back what the prompt has read
    const auto& kinds = c.gpu.formats(1).kinds;
    const auto block = kinds[0].key_block + kinds[0].value_block;
    // 250 tokens: 6 pages are behind 40 recent ones; a trim by 16 leaves queries that see tokens from 195 on.
    const std::size_t pages = 6 + 2 * 1, held = c.gpu.usage(id).quantized;
    CHECK(held == pages * block, "%zu bytes, expected %zu", held, pages * block);
    refused(c.gpu.trim(id, 100), "layer 1, sliding window of 40, 2 x 64: cannot trim to 100 tokens");
    CHECK(c.gpu.tokens(id) == 251 && c.gpu.trim_limit(id) == 203, "trims reach %d", c.gpu.trim_limit(id));
    const token_view<const float16> q(c.q.get(), 18, q_heads, dim);
    const token_view<float16> out(c.out.get(), 18, q_heads, dim);
    refused(c.gpu.attend(1, q, out, {.query_tokens = 18}, c.stream), "that more than 17 see");
    CHECK(c.gpu.attend(0, q, out, {.query_tokens = 18}, c.stream), "full attention");
    const token_view<const float16> q1(c.q.get(), 1, q_heads, dim);
    const token_view<float16> out1(c.out.get(), 1, q_heads, dim);
    refused(c.gpu.attend(1, q1, out1, {.window = 60}, c.stream),
            "a window of 60 tokens without sinks is no window together with it");
    CHECK(c.gpu.trim(id, 203) && c.gpu.trim_limit(id) == 203, "a trim to what is held");

    // A prompt reads pages that a trim has cut and that it frees.
    both_options cutting;
    cutting.list = {sliding_attention(40, of)};
    cutting.list[0].sinks = cutting.sinks;
    cutting.recent = 3;
    cutting.rollback = cutting.draft_tokens = 0;
    both_caches w(cutting);
    pair cut{w.gpu.new_sequence(), w.cpu.new_sequence()};
    test::rng random(14);
    std::vector<float16> some, others;
    for (const int n : {106, 150}) {
        w.write(random, some, others);
        CHECK(w.gpu.begin_prompt(cut.id, n, w.stream), "begin");
        prefill(random, w, cut, n, some, others, 0, false, "a prompt behind a cut", n);
        if (n == 150) break;
        CHECK(w.gpu.trim(cut.id, 80), "a trim into a quantized page of a window");
        cut.host.trim(80);
    }
    compare(w, cut, "a prompt behind a cut", 0);

    // A shared layer: what it refuses, and a prompt that it has not attended to when the next step begins.
    both_options sharing;
    sharing.list = {full_attention(of), shared_with(0)};
    both_caches d(sharing);
    pair p{d.gpu.new_sequence(), d.cpu.new_sequence()};
    test::rng r(4);
    std::vector<float16> keys, values;
    d.write(r, keys, values);
    const auto rows = [&](const auto& x, int n) { return d.rows(x, 0, n); };
    const token_view<const float16> queries(d.q.get(), 150, q_heads, dim);
    const token_view<float16> outs(d.out.get(), 150, q_heads, dim);
    CHECK(d.gpu.begin_prompt(p.id, 150, d.stream), "begin");
    refused(d.gpu.prefill(1, rows(d.k, 0), rows(d.v, 0), queries, outs, {}, d.stream),
            "layer 1, shared with layer 0, 2 x 64: no prompt of its owner waits for it");
    refused(d.gpu.append(1, rows(d.k, 150), rows(d.v, 150), d.stream), "it takes queries only");
    CHECK(d.gpu.prefill(0, rows(d.k, 150), rows(d.v, 150), queries, outs, {}, d.stream), "prefill");
    refused(d.gpu.prefill(1, rows(d.k, 150), rows(d.v, 150), queries, outs, {}, d.stream),
            "takes 0 of k and v");
    refused(d.gpu.attend(0, q1, out1, {}, d.stream), "its prompt waits for 1 layers");
    refused(d.gpu.trim(p.id, 149), "1 layers share the keys of a prompt");
    // Without memory nothing ends the wait.
    cuda::sequence_id more[] = {p.id, d.gpu.new_sequence()}, copy;
    test::counted_memory::limit = test::counted_memory::bytes;
    for (const cuda::status& s : {d.gpu.begin_step(more, 1, d.stream), d.gpu.begin_draft(more, 1, d.stream),
                                  d.gpu.begin_prompt(p.id, 500, d.stream), d.gpu.fork(p.id, copy, d.stream)})
        refused(s, "device memory");
    test::counted_memory::limit = std::size_t{1} << 40;
    CHECK(d.gpu.free(more[1]), "free");
    refused(d.gpu.trim(p.id, 149), "1 layers share the keys of a prompt");
    d.appended(p.host, keys, values, 0, 150);
    d.write(r, keys, values);  // what waits is the cache's own
    CHECK(d.gpu.begin_step(std::span(&p.id, 1), 1, d.stream), "begin");
    CHECK(d.gpu.append(0, rows(d.k, 1), rows(d.v, 1), d.stream), "append");
    CHECK(d.gpu.attend(1, q1, out1, {}, d.stream), "attend");
    d.appended(p.host, keys, values, 0, 1);
    compare(d, p, "a prompt that waits", 0);
    // What waits is appended before a keep() as well.
    const auto wait_with = [&](int n) {
        d.write(r, keys, values);
        CHECK(d.gpu.begin_prompt(p.id, n, d.stream), "begin");
        CHECK(d.gpu.prefill(0, rows(d.k, n), rows(d.v, n),
                            token_view<const float16>(d.q.get(), n, q_heads, dim),
                            token_view<float16>(d.out.get(), n, q_heads, dim), {}, d.stream),
              "prefill");
        CHECK(d.gpu.trim_limit(p.id) == d.gpu.tokens(p.id), "trims reach %d within a prompt that waits",
              d.gpu.trim_limit(p.id));
    };
    const cuda::sequence_id other = d.gpu.new_sequence();
    const std::span<const int> no_path;
    wait_with(100);
    CHECK(d.gpu.keep(std::span(&other, 1), std::span(&no_path, 1), d.stream), "keep");
    d.appended(p.host, keys, values, 0, 100);
    compare(d, p, "a prompt that waits for a keep", 0);
    // A prompt that another call has ended has not quantized more than before.
    wait_with(100);
    CHECK(d.gpu.free(other), "free");
    refused(d.gpu.trim(p.id, 230), "1 layers lack the prompt");
    CHECK(d.gpu.trim(p.id, 32), "a trim to pages that were quantized before");
    d.appended(p.host, keys, values, 0, 100);
    p.host.trim(32);
    compare(d, p, "a prompt that another call has ended", 0);
    // A prompt whose pages are there, but no memory for its chunk or its scratch, does not end the wait.
    wait_with(20);
    int refusals = 0;
    for (test::counted_memory::limit = test::counted_memory::bytes;; test::counted_memory::limit += 16384) {
        const cuda::status begun = d.gpu.begin_prompt(p.id, 250, d.stream);
        if (begun) break;
        refused(begun, "bytes of device memory for");
        refused(d.gpu.trim(p.id, 51), "1 layers share the keys of a prompt");
        ++refusals;
    }
    test::counted_memory::limit = std::size_t{1} << 40;
    CHECK(refusals > 4, "%d prompts were refused", refusals);
    d.appended(p.host, keys, values, 0, 20);
    d.write(r, keys, values);
    CHECK(d.gpu.append(0, rows(d.k, 250), rows(d.v, 250), d.stream), "append");
    d.appended(p.host, keys, values, 0, 250);
    compare(d, p, "a prompt that had no memory at first", 0);

    // The text of another sequence is there once, and forks hold its pages together.
    both_options crossing;
    crossing.list = {full_attention(of), cross_layer(of)};
    both_caches f(crossing);
    cuda::sequence_id beam, fork;
    beam = f.gpu.new_sequence();
    const token_view<const float16> text = f.rows(f.k, 1, 100), one = f.rows(f.k, 1, 1);
    refused(c.gpu.begin_cross(id, 10, c.stream), "no layer of the cache has cross attention");
    refused(f.gpu.begin_cross(beam, 5000, f.stream), "cannot take 5000 more: max_tokens is 1200");
    CHECK(f.gpu.begin_cross(beam, 100, f.stream), "begin_cross");
    refused(f.gpu.append(0, text, text, f.stream), "takes the tokens of begin_step, begin_prompt");
    refused(f.gpu.begin_step(std::span(&beam, 1), 1, f.stream),
            "1 layers lack the 100 tokens of begin_cross() for sequence 0: append them first, or free");
    CHECK(f.gpu.append(1, text, text, f.stream), "append");
    refused(f.gpu.append(1, text, text, f.stream), "it has the tokens of this step already");
    refused(f.gpu.begin_cross(beam, 1, f.stream), "holds 100 tokens in its layers with cross attention");
    CHECK(f.gpu.tokens(beam) == 0 && f.gpu.tokens(beam, 1) == 100, "tokens");
    const std::size_t in_use = f.gpu.bytes_in_use();
    CHECK(f.gpu.fork(beam, fork, f.stream) && f.gpu.bytes_in_use() == in_use, "a fork has copied pages");
    CHECK(f.gpu.begin_step(std::span(&fork, 1), 1, f.stream), "begin");
    refused(f.gpu.append(1, one, one, f.stream), "takes the tokens of begin_cross()");
    refused(f.gpu.attend(1, q1, out1, {.window = 60}, f.stream), "its queries see all tokens");
    refused(f.gpu.attend_lists(1, q1, out1, {}, f.stream),
            "layer 1, cross attention of 2 x 64: lists are for layers whose queries see all tokens before");
    CHECK(f.gpu.append(0, one, one, f.stream) && f.gpu.attend(1, q1, out1, {}, f.stream), "attend");
    CHECK(f.gpu.trim(fork, 0) && f.gpu.tokens(fork, 1) == 100, "a trim");

    // A value_dim that is head_dim says nothing new: one group, of which layer 0 comes first.
    both_options named;
    named.list = {full, full_attention({heads, dim, dim})};
    both_caches e(named);
    const cuda::sequence_id of_both = e.gpu.new_sequence();
    CHECK(e.gpu.begin_step(std::span(&of_both, 1), 1, e.stream), "begin");
    refused(e.gpu.append(1, e.rows(e.k, 1, 1), e.rows(e.v, 1, 1), e.stream), "comes before layer 0");
}

#elif PART == 2

/// Rotations that are missing, of another shape, of a format without them, or too late.
void check_rotations() {
    const auto refused = [](const cuda::status& s, const char* part) {
        CHECK(!s && std::strstr(s.message, part) != nullptr, "expected '%s', got '%s'", part, s.message);
    };
    const auto raises = [](auto&& call, std::string_view part) {
        std::string message;
        try {
            (void)call();
        } catch (const kvq::error& e) {
            message = e.what();
        }
        CHECK(message.find(part) != std::string::npos, "expected '%s', got '%s'", part.data(),
              message.c_str());
    };
    const std::string turned = compiled().kinds[1].name;
    cuda::cache c;
    cuda::cache_options o;
    o.formats = {turned};
    o.page_tokens = page;
    o.recent = 20;
    CHECK(
        c.open({.layers = layers, .kv_heads = heads, .head_dim = dim}, o, std::span(&compiled(), 1), nullptr),
        "open");
    const cuda::sequence_id s = c.new_sequence();
    const test::device_buffer<float16> x(std::vector<float16>(heads * dim, float16(1.0f)));
    const token_view<const float16> token(x.get(), 1, heads, dim);
    CHECK(c.begin_step(std::span(&s, 1), 1, nullptr), "begin");
    refused(c.append(0, token, token, nullptr), "values are rotated, but no matrices were given");
    refused(c.rotate("int8", tensor::value, matrices(), nullptr), "int8 is not a format of this cache");
    refused(c.rotate(turned, tensor::key, matrices(), nullptr), "are not rotated");
    const rotation one(1, heads, dim, {matrices().rows(), matrices().rows() + heads * dim * dim});
    raises([&] { return c.rotate(turned, tensor::value, one, nullptr); }, "a rotation of 1 layers");
    CHECK(c.rotate(turned, tensor::value, matrices(), nullptr), "rotate");
    CHECK(c.begin_prompt(s, 64, nullptr), "begin");
    refused(c.rotate(turned, tensor::value, matrices(), nullptr), "are in use; rotations come before");
}

#elif PART == 1

/// A cache whose attention has ALiBi.
void check_alibi() {
    const std::vector<float> slopes = {0.5f, 0.1f, 0.02f, 0.004f};
    const test::device_buffer<float> on_device(slopes);
    const cuda::device_format scored[] = {
        cuda::make_scored_format<cuda::alibi, float16, cuda::preset_pair<low2, dim, page>>()};
    both_caches c({.listed_tokens = 64}, scored[0]);
    test::rng r(12);
    const auto ok = [](const cuda::status& s) { CHECK(s, "ALiBi: %s", s.message); };
    kvq::sequence host = c.cpu.new_sequence();
    std::vector<float16> keys, values;
    const cuda::sequence_id id = c.gpu.new_sequence();
    ok(c.gpu.calibrate("low2", statistics(), c.stream));
    c.write(r, keys, values);
    ok(c.gpu.begin_prompt(id, 230, c.stream));
    for (int layer = 0; layer < layers; ++layer)
        ok(c.gpu.append(layer, c.rows(c.k, layer, 230), c.rows(c.v, layer, 230), c.stream));
    c.appended(host, keys, values, 0, 230);
    const std::vector<float16> x = random_queries(r, c);
    const token_view<const float16> q(c.q.get(), 1, q_heads, dim);
    const token_view<float16> out(c.out.get(), 1, q_heads, dim);
    const cuda::status without = c.gpu.attend(0, q, out, {}, c.stream);
    CHECK(!without && std::strstr(without.message, "another score modifier"), "%s", without.message);
    refused(c.gpu.attend(0, q, out, {.selected_tokens = 64}, c.stream, cuda::alibi{on_device.get()}),
            "layer 0, full attention of 2 x 64: these kernels have a score modifier that needs positions");
    double worst = 0.0;
    const auto attend = [&](int window) {
        const cuda::sequence_id batch[] = {id};
        c.q.upload(x);
        ok(c.gpu.begin_step(batch, 0, c.stream));
        ok(c.gpu.attend(0, q, out, {.window = window}, c.stream, cuda::alibi{on_device.get()}));
        CUDA_OK(cudaStreamSynchronize(c.stream));
        const auto y = c.out.download();
        for (std::size_t h = 0; h < q_heads; ++h)
            worst =
                std::max(worst, error_of(host, 0, static_cast<int>(h), host.tokens(), &x[h * dim],
                                         &y[h * dim], 1 << 30, 0, static_cast<double>(slopes[h]), window));
    };
    attend(0);
    // Positions are those of the tokens that are shown.
    for (const int n : {150, 110, 91}) {
        ok(c.gpu.trim(id, n));
        host.trim(n);
        attend(0);
        ok(c.gpu.begin_prompt(id, 99, c.stream));
        pair p{id, std::move(host)};
        prefill(r, c, p, 99, keys, values, n == 91 ? 120 : 0, false, "ALiBi", n, slopes, on_device.get());
        host = std::move(p.host);
        attend(0);
        attend(113);
        attend(186);
    }
    CHECK(worst <= 2e-3, "ALiBi: error %.3g", worst);
    std::printf("  %-28s error %.2e\n", "ALiBi", worst);
}

/// Keys with a plan from the own first tokens: the plan and the bytes of the CPU. Some of these tokens are
/// quantized, or all are in 16 bit.
void check_self_calibration() {
    const auto ok = [](const cuda::status& s) { CHECK(s, "self calibration: %s", s.message); };
    const auto make = [](const calibration& all) { return make_format<scalar>(low2::keys(all)); };
    const cache_shape shape{.layers = layers, .kv_heads = heads, .head_dim = dim};
    for (const int recent : {40, 300}) {
        kvq::cache cpu(shape, {.keys = make_format<int8, scalar>(),
                               .values = make_format<low2::values, scalar>(),
                               .sinks = 4,
                               .recent = recent,
                               .page_tokens = page,
                               .repack = 0.0f});
        cuda::cache gpu;
        cuda::cache_options o;
        o.formats = {"int8/low2"};
        o.page_tokens = page;
        o.sinks = 4;
        o.recent = recent;
        o.memory = test::counted_memory::allocator();
        ok(gpu.open(shape, o, std::span(&compiled(), 1), nullptr));
        test::rng r(static_cast<unsigned>(recent));
        kvq::self_calibration own(cpu, 200);
        calibration mine(shape, true);
        bool done = false;
        const auto append = [&](cuda::sequence_id id, kvq::sequence& host, int n) {
            ok(gpu.begin_prompt(id, n, nullptr));
            for (int layer = 0; layer < layers; ++layer) {
                const auto rows = static_cast<std::size_t>(n) * dim;
                std::vector<float16> k(rows * heads), v(rows * heads), q(rows * q_heads);
                for (std::size_t i = 0; i < k.size(); ++i)
                    k[i] =
                        float16(test::normal(r) * (i % 5 == static_cast<std::size_t>(layer) ? 6.0f : 1.0f));
                for (auto* x : {&v, &q})
                    for (float16& y : *x) y = float16(test::normal(r));
                test::device_buffer<float16> on_device[2] = {test::device_buffer<float16>(k.size()),
                                                             test::device_buffer<float16>(v.size())};
                on_device[0].upload(k);
                on_device[1].upload(v);
                ok(gpu.append(layer, token_view<const float16>(on_device[0].get(), n, heads, dim),
                              token_view<const float16>(on_device[1].get(), n, heads, dim), nullptr));
                CUDA_OK(cudaStreamSynchronize(nullptr));
                host.append(layer, token_view<const float16>(k.data(), n, heads, dim),
                            token_view<const float16>(v.data(), n, heads, dim));
                const token_view<const float16> queries(q.data(), n, q_heads, dim);
                own.add_queries(layer, queries);
                if (!done) mine.add_queries(layer, queries);
            }
        };
        const cuda::sequence_id id = gpu.new_sequence();
        kvq::sequence host = cpu.new_sequence();
        for (int i = 0; i < 6; ++i) {
            append(id, host, 70 + i);
            const bool want = own.done() || own.apply(host, make);
            if (!done) ok(cuda::self_calibrate(gpu, std::span(&id, 1), "low2/", mine, 200, nullptr, done));
            CHECK(done == want && done == (i >= 2), "%d tokens: %s", gpu.tokens(id),
                  done ? "done" : "not done");
        }
        const cuda::sequence_id later = gpu.new_sequence();
        kvq::sequence host_later = cpu.new_sequence();
        append(later, host_later, 400);
        for (const auto& [a, b] : {std::pair(id, &host), std::pair(later, &host_later)}) {
            kvq::sequence moved = cpu.new_sequence();
            ok(cuda::offload(gpu, a, moved, nullptr));  // refused where plans differ
            // Pages that were int8 are fitted anew on the device.
            if (recent == 40 && b == &host) continue;
            CHECK(test::saved(moved) == test::saved(*b), "%d recent tokens: other bytes", recent);
        }
        bool again = false;
        const cuda::status s =
            cuda::self_calibrate(gpu, std::span(&id, 1), "low2/", mine, 200, nullptr, again);
        CHECK(!s && std::strstr(s.message, "are in use") != nullptr, "%s", s.message);
        CHECK(!cuda::self_calibrate(gpu, std::span(&id, 1), "low2/", mine, 20, nullptr, again), "20 tokens");
        CHECK(gpu.usage().bytes == test::counted_memory::bytes, "usage");
    }
}

/// Dry runs while pages wait for a plan, which requantize() and step_down() make first.
void check_waiting_plans() {
    both_caches c(
        {.rollback = 0, .draft_tokens = 3, .statistics = key_statistics::own, .statistics_tokens = 150});
    test::rng r(11);
    std::vector<float16> keys, values;
    const auto ok = [](const cuda::status& s) { CHECK(s, "waiting plans: %s", s.message); };
    const auto append = [&](int n) {
        c.write(r, keys, values, n);
        for (int l = 0; l < layers; ++l) ok(c.gpu.append(l, c.rows(c.k, l, n), c.rows(c.v, l, n), c.stream));
    };
    const auto make = [&] {
        const cuda::sequence_id id = c.gpu.new_sequence();
        ok(c.gpu.begin_prompt(id, 149, c.stream));
        append(149);
        ok(c.gpu.begin_step(std::span(&id, 1), 1, c.stream));
        append(1);
        return id;
    };
    for (const bool tiers : {false, true}) {
        const cuda::sequence_id id = make();
        const std::size_t before = c.gpu.bytes_in_use();
        requantize_report plan, done;
        const cuda::tier down[] = {{0, "low2"}};
        if (tiers) {
            ok(c.gpu.plan_step_down(std::span(&id, 1), down, plan));
            CHECK(plan.bytes_before == before, "waiting plans: a dry run of %zu bytes", plan.bytes_before);
        } else {
            ok(c.gpu.plan_requantize(std::span(&id, 1), {.format = "low2"}, plan));
        }
        CHECK(c.gpu.bytes_in_use() == before, "waiting plans: a dry run has changed pages");
        if (tiers)
            ok(c.gpu.step_down(std::span(&id, 1), down, c.stream));
        else
            ok(c.gpu.requantize(std::span(&id, 1), {.format = "low2"}, c.stream, &done));
        CHECK(c.gpu.bytes_in_use() != before && plan.bytes_after == c.gpu.bytes_in_use() &&
                  (tiers || (plan.bytes_before == done.bytes_before && plan.bytes_peak == done.bytes_peak)),
              "waiting plans: %zu bytes in use, not the %zu of the dry run", c.gpu.bytes_in_use(),
              plan.bytes_after);
        ok(c.gpu.free(id));
    }
    // Those of sequences that wait themselves: no more of them go down than need to.
    cuda::prefixes<kvq::prefix_cache> store(c.gpu, {});
    for (int first = 0; first < 2; ++first) {
        cuda::sequence_id id = make();
        std::vector<std::int32_t> text(150);
        std::iota(text.begin(), text.end(), first);
        ok(store.park(text, id, c.stream));
    }
    ok(store.release(store.bytes() / 2, c.stream));
    CHECK(store.entries() == 1, "waiting plans: %zu entries on the device", store.entries());
}

/// Plans of the sequences' own first tokens: whatever the history, the pages are those of the CPU.
void check_own_plans(unsigned seed, const both_options& o, int steps) {
    both_caches c(o);
    test::rng r(seed);
    std::vector<pair> pairs;
    std::vector<float16> keys, values;
    int step = 0, planned = 0;
    double worst = 0.0;
    const auto any = [&](int low, int high) { return test::uniform(r, low, high); };
    const auto ok = [&](const cuda::status& s) {
        CHECK(s, "own plans, seed %u, step %d: %s", seed, step, s.message);
    };
    const auto one = [&]() -> pair& {
        return pairs[static_cast<std::size_t>(any(0, static_cast<int>(pairs.size()) - 1))];
    };
    const auto fits = [&](const pair& p, int n) { return p.host.tokens() + n <= o.max_tokens; };
    // Which channels are large depends on the sequence. (The CPU has even widths in pages that a plan does
    // not fit.)
    std::vector<std::size_t> kinds;  // by sequence
    const auto write = [&](int n, std::size_t first, std::size_t sequences) {
        c.write(r, keys, values, n * static_cast<int>(sequences));
        constexpr std::size_t of_layer = both_caches::room * heads * dim;
        for (std::size_t i = 0; i < of_layer * static_cast<std::size_t>(c.count()); ++i) {
            const std::size_t row =
                i % of_layer / dim / static_cast<std::size_t>(c.heads_of(static_cast<int>(i / of_layer)) * n);
            if (row < sequences && i % dim % 7 == kinds[first + row])
                keys[i] = float16(4.0f * static_cast<float>(keys[i]));
        }
        c.k.upload(keys);
    };
    const auto compare_plans = [&](const pair& p) {
        kvq::sequence moved = c.cpu.new_sequence();
        ok(cuda::offload(c.gpu, p.id, moved, c.stream));
        for (int layer = 0; layer < c.count(); ++layer) {
            const auto &a = kvq::detail::sequence_access::tables(moved)[static_cast<std::size_t>(layer)],
                       &b = kvq::detail::sequence_access::tables(p.host)[static_cast<std::size_t>(layer)];
            const auto same_plan = [](const format& x, const format& y) {
                return static_cast<bool>(x) == static_cast<bool>(y) &&
                       (!x || x.record().fingerprint == y.record().fingerprint);
            };
            bool same = same_plan(a.plan, b.plan);
            for (int i = 0; i < a.size() && a.size() == b.size(); ++i) {
                const format &x = a[i].pages[0]->plan, &y = b[i].pages[0]->plan;
                same = same && same_plan(x, y);
                planned += static_cast<bool>(x);
            }
            CHECK(same, "own plans, seed %u, step %d, layer %d: another plan than the CPU's", seed, step,
                  layer);
        }
        CHECK(test::saved(moved) == test::saved(p.host), "own plans, seed %u, step %d: other bytes", seed,
              step);
        compare(c, p, "own plans", step);
    };
    for (; step < steps; ++step) {
        if (pairs.empty() || (pairs.size() < 4 && any(0, 9) == 0)) {
            pairs.push_back({c.gpu.new_sequence(), c.cpu.new_sequence()});
            kinds.push_back(static_cast<std::size_t>(o.statistics == key_statistics::own ? any(0, 6) : 3));
        }
        pair& p = one();
        const auto number = static_cast<std::size_t>(&p - pairs.data());
        const int what = any(0, 11);
        if (what < 3) {
            const int n = any(1, o.statistics_tokens + 60);
            if (!fits(p, n)) continue;
            write(n, number, 1);
            ok(c.gpu.begin_prompt(p.id, n, c.stream));
            prefill(r, c, p, n, keys, values, 0, false, "own plans", step);
        } else if (what < 7) {  // steps of all sequences
            const int n = any(1, o.step_tokens), rows = static_cast<int>(pairs.size());
            std::vector<cuda::sequence_id> batch;
            for (const pair& x : pairs) batch.push_back(x.id);
            if (!std::ranges::all_of(pairs, [&](const pair& x) { return fits(x, 40 * n); })) continue;
            for (int times = any(1, 40); times > 0; --times) {
                write(n, 0, pairs.size());
                ok(c.gpu.begin_step(batch, n, c.stream));
                for (int layer = 0; layer < c.count(); ++layer)
                    if (c.takes_tokens(layer))
                        ok(c.gpu.append(layer, c.rows(c.k, layer, n * rows), c.rows(c.v, layer, n * rows),
                                        c.stream));
                for (int b = 0; b < rows; ++b)
                    c.appended(pairs[static_cast<std::size_t>(b)].host, keys, values, b * n, n);
                CUDA_OK(cudaStreamSynchronize(c.stream));
            }
            const std::vector<float16> x = random_queries(r, c);
            ok(c.gpu.begin_step(batch, 0, c.stream));  // what the last step left is quantized now
            ok(c.gpu.attend(1, token_view<const float16>(c.q.get(), rows, q_heads, dim),
                            token_view<float16>(c.out.get(), rows, q_heads, dim), {}, c.stream));
            CUDA_OK(cudaStreamSynchronize(c.stream));
            const auto y = c.out.download();
            for (std::size_t row = 0; row < pairs.size() * q_heads; ++row)
                worst = std::max(worst,
                                 error_of(pairs[row / q_heads].host, 1, static_cast<int>(row % q_heads),
                                          pairs[row / q_heads].host.tokens(), &x[row * dim], &y[row * dim]));
        } else if (what == 7 && fits(p, 24)) {
            const int n = o.draft_tokens;
            drafts d(r, c, {&p}, n);
            ok(d.begin(r, n, keys, values));
            for (int layer = 0; layer < c.count(); ++layer)
                if (c.takes_tokens(layer))
                    ok(c.gpu.append(layer, c.rows(c.k, layer, n), c.rows(c.v, layer, n), c.stream));
            d.host_append(n, keys, values);
            ok(d.keep(r));
        } else if (what == 8) {
            const int n = any(p.host.trim_limit(), p.host.tokens());
            ok(c.gpu.trim(p.id, n));
            p.host.trim(n);
        } else if (what == 9 && pairs.size() < 4) {
            cuda::sequence_id copy;
            ok(c.gpu.fork(p.id, copy, c.stream));
            pair forked{copy, p.host.fork()};
            kinds.push_back(kinds[number]);
            pairs.push_back(std::move(forked));
            compare_plans(pairs.back());
            continue;
        } else if (what == 10) {  // to the CPU, into a file, and back
            kvq::sequence moved = c.cpu.new_sequence();
            ok(cuda::offload(c.gpu, p.id, moved, c.stream));
            std::vector<std::byte> file;
            ok(cuda::save(
                c.gpu, p.id,
                [&](const void* data, std::size_t n) {
                    const auto* from = static_cast<const std::byte*>(data);
                    file.insert(file.end(), from, from + n);
                },
                {}, c.stream));
            ok(c.gpu.free(p.id));
            std::size_t at = 0;
            if (any(0, 1) == 0)
                ok(cuda::onload(moved, c.gpu, p.id, c.stream));
            else
                ok(cuda::restore(
                    c.gpu,
                    [&](void* data, std::size_t n) {
                        n = std::min(n, file.size() - at);
                        std::memcpy(data, &file[at], n);
                        at += n;
                        return n;
                    },
                    {}, p.id, c.stream));
            // A file forgets the plan that no page has.
            p.host = std::move(moved);
        } else if (what == 11 && pairs.size() > 1) {
            ok(c.gpu.free(p.id));
            pairs.erase(pairs.begin() + static_cast<std::ptrdiff_t>(number));
            kinds.erase(kinds.begin() + static_cast<std::ptrdiff_t>(number));
            continue;
        }
        compare_plans(p);
    }
    CHECK(worst <= 2e-3, "own plans: error %.3g", worst);
    CHECK(planned > 0 && c.gpu.usage().bytes == test::counted_memory::bytes, "own plans, seed %u: usage",
          seed);
    std::printf("  %-28s %d pages with a plan, error %.2e\n", "own plans", planned, worst);
}

/// Keys that come to a format with plans when a window has freed the first tokens: they have even widths.
void check_late_plan() {
    const auto ok = [](const cuda::status& s) { CHECK(s, "late plan: %s", s.message); };
    cuda::cache gpu;
    ok(gpu.open(std::vector{sliding_attention(90, {.kv_heads = heads, .head_dim = dim})},
                {.formats = {"low2", "int8/low2"},
                 .page_tokens = page,
                 .recent = 2 * page,
                 .memory = test::counted_memory::allocator()},
                std::span(&compiled(), 1), nullptr));
    const cuda::sequence_id id = gpu.new_sequence();
    constexpr int n = 100;
    const test::device_buffer<float16> x(std::vector<float16>(n * heads * dim, float16(1.0f)));
    const token_view<const float16> rows(x.get(), n, heads, dim);
    for (const char* const format : {"int8/low2", "low2"}) {
        ok(gpu.requantize(std::span(&id, 1), {.format = format, .new_pages = true}, nullptr));
        for (int i = 0; i < 4; ++i) {
            ok(gpu.begin_prompt(id, n, nullptr));
            ok(gpu.append(0, rows, rows, nullptr));
        }
    }
    requantize_report report;
    ok(gpu.requantize(std::span(&id, 1), {.format = "low2"}, nullptr, &report));
    CHECK(gpu.tokens(id) == 8 * n && gpu.trim_limit(id) > 6 * n, "late plan: %d tokens, trims reach %d",
          gpu.tokens(id), gpu.trim_limit(id));
}

/// Splicing to a sequence that is too short for a plan: refused where each has its own.
void check_spliced_plans(key_statistics statistics) {
    both_caches c({.sinks = 0, .rollback = 0, .statistics = statistics, .statistics_tokens = 150});
    test::rng r(8);
    std::vector<float16> keys, values;
    const auto ok = [](const cuda::status& s) { CHECK(s, "spliced plans: %s", s.message); };
    std::size_t loud = 0;  // of each sequence another channel of seven, so that plans differ
    const auto make = [&](int n, both_caches* in = nullptr) {
        cuda::cache& gpu = in != nullptr ? in->gpu : c.gpu;
        const cuda::sequence_id id = gpu.new_sequence();
        c.write(r, keys, values, n);
        for (std::size_t i = 0; i < keys.size(); ++i)
            if (i % dim % 7 == loud) keys[i] = float16(4.0f * static_cast<float>(keys[i]));
        c.k.upload(keys);
        ++loud;
        ok(gpu.begin_prompt(id, n, c.stream));
        for (int layer = 0; layer < layers; ++layer)
            ok(gpu.append(layer, c.rows(c.k, layer, n), c.rows(c.v, layer, n), c.stream));
        CUDA_OK(cudaStreamSynchronize(c.stream));
        return id;
    };
    kvq::sequence first = c.cpu.new_sequence();
    if (statistics == key_statistics::shared) {  // the plan of the cache is that of one that is gone
        const cuda::sequence_id id = make(3 * page);
        c.appended(first, keys, values, 0, 3 * page);
        ok(c.gpu.free(id));
    }
    cuda::sequence_id from = make(3 * page + 9);
    const cuda::sequence_id to = make(page);
    // To the CPU, and back to a cache that may be another one.
    const auto away = [&](cuda::sequence_id& id, both_caches& back) {
        kvq::sequence there = c.cpu.new_sequence();
        ok(cuda::offload(c.gpu, id, there, c.stream));
        if (&back == &c) ok(c.gpu.free(id));
        ok(cuda::onload(there, back.gpu, id, c.stream));
    };
    const auto splices = [&](both_caches& in, cuda::sequence_id other, cuda::sequence_id id) {
        ok(in.gpu.trim(other, 3 * page));
        ok(in.gpu.splice(other, id, page, 2 * page, c.stream));
        ok(in.gpu.free(other));
    };
    if (statistics == key_statistics::shared) {  // one that was away has that plan still
        away(from, c);
        splices(c, make(3 * page), from);
        // Nor has a cache another one where it comes first.
        both_caches fresh({.sinks = 0, .rollback = 0, .statistics = statistics, .statistics_tokens = 150});
        cuda::sequence_id id = from;
        away(id, fresh);
        splices(fresh, make(3 * page, &fresh), id);
    } else {  // forks have one plan, one of them away, or both
        for (const bool both : {false, true}) {
            cuda::sequence_id fork{};
            ok(c.gpu.fork(from, fork, c.stream));
            if (both) {
                kvq::sequence there[2] = {c.cpu.new_sequence(), c.cpu.new_sequence()};
                ok(cuda::offload(c.gpu, from, there[0], c.stream));
                ok(cuda::offload(c.gpu, fork, there[1], c.stream));
                ok(c.gpu.free(from));
                ok(c.gpu.free(fork));
                ok(c.gpu.free(make(3 * page)));  // its plan lies where theirs was
                ok(cuda::onload(there[0], c.gpu, from, c.stream));
                ok(cuda::onload(there[1], c.gpu, fork, c.stream));
            } else {
                away(fork, c);
            }
            splices(c, fork, from);
        }
    }
    const cuda::status s = c.gpu.splice(to, from, page, 3 * page, c.stream);
    if (statistics == key_statistics::own) {
        CHECK(!s && std::strstr(s.message, "get plans of their own") && c.gpu.tokens(to) == page,
              "spliced plans: %s", s.message);
        return;
    }
    ok(s);
    kvq::sequence moved[2] = {c.cpu.new_sequence(), c.cpu.new_sequence()};
    ok(cuda::offload(c.gpu, from, moved[0], c.stream));
    ok(cuda::offload(c.gpu, to, moved[1], c.stream));
    const auto& want = kvq::detail::sequence_access::tables(first)[0][0].pages[0]->plan;
    const auto& table = kvq::detail::sequence_access::tables(moved[1])[0];
    CHECK(table.tokens == 3 * page && table.committed == 2 && want, "spliced plans: %d tokens", table.tokens);
    for (int i = 0; i < table.committed; ++i) {
        const format& have = table[i].pages[0]->plan;
        CHECK(want && have && have.record().fingerprint == want.record().fingerprint,
              "spliced plans: page %d", i);
    }
}

/// New sequences could not be committed to the keys: nothing gets a plan. The refused pair is not compiled.
void check_other_target() {
    cuda::device_format known = compiled();
    known.kinds.push_back(known.kinds[1]);
    known.kinds[2].name = known.kinds[2].values = "int8";
    known.kinds[2].value_names = {"int8"};
    const cache_shape shape{.layers = layers, .kv_heads = heads, .head_dim = dim};
    cuda::cache gpu;
    cuda::cache_options o;
    o.formats = {"int8/low2", "int8"};
    o.page_tokens = page;
    o.memory = test::counted_memory::allocator();
    CHECK(gpu.open(shape, o, std::span(&known, 1), nullptr), "open");
    const cuda::sequence_id id = gpu.new_sequence();
    const test::device_buffer<float16> x(std::vector<float16>(64 * heads * dim, float16(1.0f)));
    const token_view<const float16> rows(x.get(), 64, heads, dim);
    CHECK(gpu.begin_prompt(id, 64, nullptr), "begin");
    for (int layer = 0; layer < layers; ++layer) CHECK(gpu.append(layer, rows, rows, nullptr), "append");
    CHECK(gpu.commit_to("int8"), "commit_to");
    calibration mine(shape, true);
    const std::size_t bytes = test::counted_memory::bytes;
    bool done = false;
    const cuda::status s = cuda::self_calibrate(gpu, std::span(&id, 1), "low2/", mine, 64, nullptr, done);
    CHECK(!s && std::strstr(s.message, "what is int8 cannot become low2/") != nullptr, "%s", s.message);
    CHECK(!done && mine.keys(0, 0) == 0 && test::counted_memory::bytes == bytes,
          "a refused calibration has changed something");
}

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
    pair p{id, std::move(host)};
    for (int i = 0; i < 20; ++i) {
        drafts d(r, c, {&p}, 24);
        const std::vector<float16> x = random_queries(r, c);
        ok(d.begin(r, 24, keys, values));
        for (int layer = 0; layer < layers; ++layer)
            ok(c.gpu.append(layer, c.rows(c.k, layer, 24), c.rows(c.v, layer, 24), c.stream));
        d.host_append(24, keys, values);
        d.attend(1, 24);
        worst = std::max(worst, d.error(r, 1, 24, x));
        ok(d.keep(r));
    }
    // A slot that is cut back to the same prompt again and again; others are read in two chunks.
    for (int i = 0; i < 6; ++i) {
        const int n = 130 - i / 3 * 40, first = i % 2 == 0 ? 180 : 111;
        ok(c.gpu.trim(p.id, n));
        p.host.trim(n);
        for (const int count : {first, 180 - first}) {
            if (count == 0) continue;
            c.write(r, keys, values);
            ok(c.gpu.begin_prompt(p.id, count, c.stream));
            prefill(r, c, p, count, keys, values, i == 4 ? 150 : 0, false, "statistics", i);
        }
        const std::vector<float16> x = random_queries(r, c);
        for (const int window : {0, 200}) {
            ok(c.gpu.attend(1, token_view<const float16>(c.q.get(), 1, q_heads, dim),
                            token_view<float16>(c.out.get(), 1, q_heads, dim), {.window = window}, c.stream));
            CUDA_OK(cudaStreamSynchronize(c.stream));
            const auto y = c.out.download();
            for (std::size_t head = 0; head < q_heads; ++head)
                worst = std::max(worst, error_of(p.host, 1, static_cast<int>(head), p.host.tokens(),
                                                 &x[head * dim], &y[head * dim], 1 << 30, 0, 0.0, window));
        }
        compare(c, p, "statistics", i + 1);
    }
    CHECK(worst <= 2e-3, "statistics: error %.3g", worst);
    CHECK(c.gpu.usage().bytes == test::counted_memory::bytes, "usage");
    compare(c, p, "statistics", 0);
    std::printf("  %-28s error %.2e\n", "low2 from statistics", worst);
}
#endif

}  // namespace

int main([[maybe_unused]] int argc, [[maybe_unused]] char** argv) {
#if PART == 0
    // Steps: fewer under compute-sanitizer, more emulated. Then the seed of the only history that is run.
    if (argc > 1) {
        long_run = std::atoi(argv[1]);
        graph_steps = std::min(graph_steps, long_run);
    }
    const int only = argc > 2 ? std::atoi(argv[2]) : 0;
    // rearranged: so many erases, shifts and splices at the least.
    const auto run = [&](const both_options& o, int seed, const char* name, int steps, int moves = 3,
                         int rearranged = 0) {
        if (only != 0 && only != seed) return;
        history h(o, static_cast<unsigned>(seed), name);
        h.run(steps, moves);
        CHECK(h.rearranged + h.spliced >= rearranged, "%s: %d erases and shifts, %d splices", name,
              h.rearranged, h.spliced);
    };
    if (only == 0) {
        check_refusals();
        check_unfinished();
        CHECK(test::counted_memory::bytes == 0, "%zu bytes were not given back", test::counted_memory::bytes);
        check_graph();
        check_draft_graph();
        check_moved();
        check_spliced_sinks();
        check_counts();
        check_budget();
        check_apart();
        check_ring();
        check_host_pages();
        check_selected_pages(false);
        check_selected_pages(true);
        check_prefixes(22, false);
        check_prefixes(23, true);
        check_full_device();
        check_scratch();
        check_lists();
    }
    run({}, 1, "4 sinks, 40 recent", long_run);
    run({.prompt_scratch = 0}, 9, "keys that move", long_run / 2, 75, long_run < 350 ? 0 : long_run / 4);
    run({.sinks = 0, .recent = 3, .rollback = 0, .draft_tokens = 3}, 2, "no sinks, 3 recent", long_run / 2,
        10);
    // Four groups: windows of two lengths, full attention of two shapes and formats.
    const std::vector<kvq::layer> list = {sliding_attention(70, {.kv_heads = heads, .head_dim = dim}),
                                          full_attention({.kv_heads = 1, .head_dim = dim, .formats = {1, 1}}),
                                          sliding_attention(70, {.kv_heads = heads, .head_dim = dim}),
                                          full_attention({.kv_heads = heads, .head_dim = dim}),
                                          sliding_attention(9, {.kv_heads = 1, .head_dim = dim, .sinks = 4}),
                                          shared_with(0),
                                          shared_with(3),
                                          shared_with(3)};
    run({.list = list}, 6, "windows and formats", std::min(long_run / 2, 250));
    run({.recent = 90, .rollback = 1, .list = list}, 7, "windows, rollback 1", std::min(long_run / 4, 125));
    const std::vector<kvq::layer> chunks = {
        chunked_attention(70, {.kv_heads = heads, .head_dim = dim}),
        full_attention({.kv_heads = 1, .head_dim = dim}),
        chunked_attention(9, {.kv_heads = 1, .head_dim = dim, .sinks = 4}),
        shared_with(0),
        cross_layer({.kv_heads = heads, .head_dim = dim}),
        cross_layer({.kv_heads = heads, .head_dim = dim}),
        cross_layer({.kv_heads = 1, .head_dim = dim, .formats = {1, 1}})};
    run({.list = chunks}, 8, "chunks and another text", std::min(long_run / 2, 250));
    run({.sinks = 37, .recent = 70, .rollback = 100, .step_tokens = 1, .draft_tokens = 32}, 3,
        "37 sinks, rollback 100", long_run / 2, 10);
#elif PART == 3
    if (argc > 1) long_run = std::atoi(argv[1]);
    history({.draft_tokens = 16}, 10, "rows of tokens").run(long_run);
#elif PART == 2
    if (argc > 1) long_run = std::atoi(argv[1]);
    check_rotations();
    history({.draft_tokens = 16}, 4, "pages of 16").run(long_run);
    history({.sinks = 16, .recent = 20, .rollback = 3, .draft_tokens = 16}, 5, "pages of 16, 16 sinks")
        .run(long_run / 2, 10);
#else
    check_statistics();
    check_self_calibration();
    check_other_target();
    check_waiting_plans();
    check_late_plan();
    check_spliced_plans(key_statistics::own);
    check_spliced_plans(key_statistics::shared);
    check_own_plans(1, {.statistics = key_statistics::own, .statistics_tokens = 150}, 100);
    check_own_plans(2,
                    {.sinks = 20,
                     .recent = 3,
                     .rollback = 0,
                     .draft_tokens = 3,
                     .statistics = key_statistics::own,
                     .statistics_tokens = 64},
                    60);
    const std::vector<kvq::layer> list = {sliding_attention(90, {.kv_heads = heads, .head_dim = dim}),
                                          full_attention({.kv_heads = 1, .head_dim = dim}), shared_with(0),
                                          shared_with(1),
                                          sliding_attention(9, {.kv_heads = heads, .head_dim = dim})};
    check_own_plans(1, {.list = list, .statistics = key_statistics::own, .statistics_tokens = 150}, 80);
    check_own_plans(2, {.statistics = key_statistics::shared, .statistics_tokens = 150}, 60);
    check_alibi();
    check_selected_pages(false);
    check_selected_pages(true);
#endif
    CHECK(test::counted_memory::bytes == 0, "%zu bytes were not given back", test::counted_memory::bytes);
    return test::report("cache");
}
