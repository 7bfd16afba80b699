// Formats with two planes (plane_pair): attention over both and over the upper one, and caches that own such
// pages against CPU caches that did the same.
#include <kvq/cache/requantize.hpp>
#include <kvq/cuda.cuh>
#include <kvq/cuda/host/save.hpp>
#include <kvq/format/make_format.hpp>
#include <kvq/format/planes.hpp>

#include "attention_test.cuh"
#include "saved_sequence.cuh"

using namespace kvq;

namespace {

constexpr int dim = 64, page = 64, heads = 2, q_heads = 8, layers = 2;
using upper_pair = cuda::preset_pair<nested4, dim, page>;
using both_pair = cuda::plane_pair<upper_pair>;
using third = kivi<2, 32>;

const cuda::device_format& compiled() {
    static const cuda::device_format f =
        cuda::make_device_format<float16, both_pair, upper_pair, cuda::kivi_pair<2, 32, dim, page>>();
    return f;
}

/// Numbers of blocks on the host: what the CPU's format makes of them.
void check_numbers() {
    test::rng r(5);
    const format f = with_lower_plane(make_format<nested4::values, scalar>());
    const block_shape s = both_pair::value_shape();
    std::vector<float> x = test::tensor_values(r, s.tokens, s.dim), y(x.size()), scratch(x.size());
    std::vector<std::byte> block(both_pair::value_block_bytes), lower(both_pair::lower_value_bytes);
    const block_id id{0, 0, lower.data()};
    f.functions().quantize_values(f.scheme(), s, id, std::vector<float>(x).data(), block.data());
    f.functions().dequantize(f.scheme(), s, id, block.data(), float_type::fp32, y.data(), s.dim,
                             scratch.data());
    int differ = 0;
    for (int t = 0; t < s.tokens; ++t)
        for (int c = 0; c < s.dim; ++c)
            differ += cuda::detail::read_planes<nested4::values>(s, block.data(), lower.data(), t, c) !=
                      y[static_cast<std::size_t>(t * s.dim + c)];
    CHECK(differ == 0, "%d numbers of both planes differ", differ);
    CHECK(lower.size() == f.lower_bytes(s), "%zu bytes of a lower plane, %zu on the CPU", lower.size(),
          f.lower_bytes(s));
}

/// Numbers of pages that tables can name: of both planes, and of the upper one, alone or in such a page.
void check_most_pages() {
    cuda::detail::device_pages upper, lower;
    const cuda::device_allocator memory;
    upper.open(memory, "nested4", 1, 64, 1, 16, 16, true);
    lower.open(memory, "nested8", 2, 64, 1, 16, 16, false, &upper);
    CHECK(upper.grow(65536, nullptr) && lower.grow(32768, nullptr), "as many pages as tables can name");
    for (auto* const of : {&upper, &lower}) {
        const int most = of->pages().size();
        const cuda::status s = of->grow(most + 1, nullptr);
        CHECK(s.code == cudaErrorMemoryAllocation &&
                  std::strstr(s.message, ("there can be " + std::to_string(most)).c_str()) != nullptr,
              "a page too many: %s", s.message);
    }
    std::vector<kvq::page_ref> held;
    for (int i = 0; i < 32768; ++i) held.push_back(upper.pages().take());
    for (int i = 0; i < 32768; ++i) {
        held.push_back(lower.pages().take());
        const int n = held.back()->number;
        CHECK(n >= 0 && cuda::detail::upper_of(n) == 32768 + i && cuda::detail::lower_of(n) == i,
              "page %d has the number %d", i, n);
    }
}

template <class Format>
void check_attention(const char* name) {
    test::rng r(11);
    double worst = 0.0, state = 0.0;
    constexpr int p = Format::page_tokens;
    for (const auto& c :
         {test::attention_case{.group = 4, .lengths = {p + 1, 0, 1, 3 * p + p / 2, 700}},
          test::attention_case{.kv_heads = 1, .group = 16, .lengths = {300, 40}, .holes = true},
          test::attention_case{.kv_heads = 1,
          .group = 4,
          .query_tokens = 2,
          .window = 100,
          .softcap = 5.0f,
          .lengths = {2 * p + 1, 300}},
          test::attention_case{.group = 4, .lengths = {9 * p + 5, 700}, .value_sizes = {1.0f, 8.0f}},
          test::attention_case{.group = 2, .lengths = {700}, .peaked = true}})
        test::check_attention<Format, float16>(r, c, name, &worst, &state);
    std::printf("  %-44s largest error %.2e, of float outputs %.2e\n", name, worst, state);
}

/// A sequence on both sides.
struct pair {
    cuda::sequence_id id;
    sequence host;
};

struct history {
    test::rng r;
    cudaStream_t stream = nullptr;
    kvq::cache cpu;
    cuda::cache gpu;
    test::device_buffer<float16> k{layers * 256 * heads * dim}, v{k.size()}, q{4 * q_heads * dim},
        out{q.size()};
    std::vector<float16> keys, values;

    explicit history(unsigned seed)
        : r(seed),
          cpu(std::vector<kvq::layer>(layers, full_attention({heads, dim})),
              {.keys = formats<nested4::keys, third::keys>(),
               .values = formats<nested4::values, third::values>(),
               .sinks = 4,
               .recent = 40,
               .page_tokens = page,
               .rollback = 8,
               .repack = 0.0f}) {
        CUDA_OK(cudaStreamCreate(&stream));
        ok(gpu.open(cpu.shape(),
                    {.formats = {"nested8", "nested4", "kivi-2-g32"},
                     .page_tokens = page,
                     .sinks = 4,
                     .recent = 40,
                     .rollback = 8,
                     .max_batch = 2,
                     .max_tokens = 1200,
                     .draft_tokens = 8,
                     .step_tokens = 3},
                    std::span(&compiled(), 1), stream));
    }
    ~history() { CUDA_OK(cudaStreamDestroy(stream)); }
    template <class S, class Third>
    static format_list formats() {
        return {with_lower_plane(make_format<S, scalar>()), make_format<S, scalar>(),
                make_format<Third, scalar>()};
    }
    void ok(const cuda::status& s) { CHECK(s, "%s", s.message); }

    pair make() { return {gpu.new_sequence(), cpu.new_sequence()}; }
    std::size_t place(int layer) const { return static_cast<std::size_t>(layer * 256 * heads * dim); }
    /// New tokens of all layers, on both sides.
    void write(int n) {
        keys.assign(k.size(), float16(NAN));
        values.assign(v.size(), float16(NAN));
        for (auto* x : {&keys, &values})
            for (int layer = 0; layer < layers; ++layer)
                for (int i = 0; i < n * heads * dim; ++i)
                    (*x)[place(layer) + static_cast<std::size_t>(i)] =
                        float16(test::normal(r) * (i % dim == 5 ? 4.0f : 1.0f));
        k.upload(keys);
        v.upload(values);
    }
    void append(pair& p, int n, bool prompt) {
        write(n);
        ok(prompt ? gpu.begin_prompt(p.id, n, stream) : gpu.begin_step(std::span(&p.id, 1), n, stream));
        for (int layer = 0; layer < layers; ++layer) {
            ok(gpu.append(layer, {k.get() + place(layer), n, heads, dim},
                          {v.get() + place(layer), n, heads, dim}, stream));
            p.host.append(layer, token_view<const float16>(&keys[place(layer)], n, heads, dim),
                          token_view<const float16>(&values[place(layer)], n, heads, dim));
        }
        CUDA_OK(cudaStreamSynchronize(stream));
    }
    /// Attention of the last token, with both planes and with the upper one, against the CPU's.
    void attend(const pair& p, const char* name) {
        std::vector<float16> x(q_heads * dim);
        for (float16& y : x) y = float16(test::normal(r));
        q.upload(x);
        std::vector<float> results[2];
        for (const bool upper : {false, true})
            for (int layer = 0; layer < layers; ++layer) {
                out.poison();
                ok(gpu.attend(layer, {q.get(), 1, q_heads, dim}, {out.get(), 1, q_heads, dim},
                              {.upper_only = upper}, stream));
                CUDA_OK(cudaStreamSynchronize(stream));
                const auto got = out.download();
                std::vector<float> want(x.size());
                p.host.attend(layer, token_view<const float16>(x.data(), 1, q_heads, dim),
                              token_view<float>(want.data(), 1, q_heads, dim), upper_plane{upper});
                const double error = distance(got, want);
                CHECK(error <= 2e-3, "%s: error %.3g, layer %d, %s", name, error, layer,
                      upper ? "the upper plane" : "both planes");
                results[upper ? 1 : 0].insert(results[upper ? 1 : 0].end(), want.begin(), want.end());
            }
        differ += results[0] != results[1];
    }
    /// |got - want| / |want|.
    static double distance(const std::vector<float16>& got, const std::vector<float>& want) {
        double error = 0.0, size = 0.0;
        for (std::size_t i = 0; i < want.size(); ++i) {
            const double d = static_cast<double>(static_cast<float>(got[i])) - static_cast<double>(want[i]);
            error += d * d;
            size += static_cast<double>(want[i]) * static_cast<double>(want[i]);
        }
        return std::sqrt(error / size);
    }
    /// A prompt with its queries, against the CPU's prefill.
    void prefill(pair& p, int n) {
        write(n);
        std::vector<float16> x(static_cast<std::size_t>(n) * q_heads * dim);
        for (float16& y : x) y = float16(test::normal(r));
        const test::device_buffer<float16> queries(x), outputs(x.size());
        ok(gpu.begin_prompt(p.id, n, stream));
        for (int layer = 0; layer < layers; ++layer) {
            ok(gpu.prefill(layer, {k.get() + place(layer), n, heads, dim},
                           {v.get() + place(layer), n, heads, dim}, {queries.get(), n, q_heads, dim},
                           {outputs.get(), n, q_heads, dim}, {}, stream));
            CUDA_OK(cudaStreamSynchronize(stream));
            const auto got = outputs.download();
            std::vector<float> want(x.size());
            workspace space;
            p.host.prefill(layer, token_view<const float16>(&keys[place(layer)], n, heads, dim),
                           token_view<const float16>(&values[place(layer)], n, heads, dim),
                           token_view<const float16>(x.data(), n, q_heads, dim),
                           token_view<float>(want.data(), n, q_heads, dim), causal{}, serial_executor{},
                           space);
            const double error = distance(got, want);
            CHECK(error <= 2e-3, "a prompt behind %d tokens: error %.3g, layer %d", p.host.tokens() - n,
                  error, layer);
        }
    }
    void compare(const pair& p, const char* name) {
        sequence moved = cpu.new_sequence();
        ok(cuda::offload(gpu, p.id, moved, stream));
        CHECK(test::saved(moved) == test::saved(p.host), "%s: the device has other bytes", name);
    }
    int differ = 0;
};

void check_cache(unsigned seed) {
    history h(seed);
    pair p = h.make();
    h.append(p, 200, true);
    h.compare(p, "a prompt");
    for (int i = 0; i < 50; ++i) h.append(p, test::uniform(h.r, 1, 3), false);
    h.compare(p, "steps");
    h.attend(p, "steps");
    CHECK(h.differ > 0, "both planes and the upper one have the same outputs");

    h.prefill(p, 130);
    h.compare(p, "a prompt with its attention");

    // What stepping down frees: the lower planes, and it takes nothing.
    pair other{{}, p.host.fork()};
    h.ok(h.gpu.fork(p.id, other.id, h.stream));
    h.append(other, 70, true);
    const std::size_t before = h.gpu.usage().quantized;
    cuda::requantize_request request{.format = "nested4", .first_token = 0, .last_token = 140};
    requantize_report planned, done;
    const cuda::tier tiers[] = {{.age = 0, .format = "nested8"}, {.age = 90, .format = "nested4"}};
    h.ok(h.gpu.plan_step_down(std::span(&p.id, 1), tiers, planned));
    CHECK(planned.pages == 0 && planned.bytes_after == planned.bytes_before && planned.bytes_freed == 0,
          "a fork holds the pages, but the dry run changes %zu of them, from %zu to %zu bytes", planned.pages,
          planned.bytes_before, planned.bytes_after);
    const cuda::sequence_id forks[] = {p.id, other.id};
    h.ok(h.gpu.plan_step_down(forks, tiers, planned));
    CHECK(planned.bytes_freed > 0 && planned.bytes_after == planned.bytes_before - planned.bytes_freed &&
              planned.bytes_peak == planned.bytes_before,
          "the dry run frees %zu of %zu bytes, to %zu, at most %zu", planned.bytes_freed,
          planned.bytes_before, planned.bytes_after, planned.bytes_peak);
    h.ok(h.gpu.plan_requantize(std::span(&p.id, 1), request, planned));
    h.ok(h.gpu.requantize(std::span(&p.id, 1), request, h.stream, &done));
    CHECK(h.gpu.usage().quantized == before && done.bytes_freed == 0 && done.pages == 2,
          "a fork holds the pages, but %zu bytes are freed", done.bytes_freed);
    CHECK(done.bytes_peak == planned.bytes_peak && done.bytes_after == planned.bytes_after,
          "the dry run says %zu and %zu bytes, it was %zu and %zu", planned.bytes_peak, planned.bytes_after,
          done.bytes_peak, done.bytes_after);
    const auto on_cpu = [&](pair& of) {
        h.cpu.requantize(of.host, {.key = 1, .value = 1, .first_token = 0, .last_token = 140});
    };
    on_cpu(p);
    h.append(p, 1, false);
    h.attend(p, "stepped down, shared");
    // Both go: the fork's share, then the rest.
    h.ok(h.gpu.requantize(std::span(&other.id, 1), request, h.stream, &done));
    const std::size_t lower = layers * heads * (both_pair::lower_key_bytes + both_pair::lower_value_bytes);
    CHECK(done.bytes_freed == 2 * lower && before - h.gpu.usage().quantized == 2 * lower,
          "%zu bytes are freed, not the lower planes of 2 pages, %zu each", done.bytes_freed, lower);
    CHECK(done.bytes_peak == done.bytes_before, "stepping down takes %zu bytes",
          done.bytes_peak - done.bytes_before);
    on_cpu(other);
    h.compare(p, "stepped down");
    h.compare(other, "stepped down");
    h.append(p, 1, false);
    h.attend(p, "stepped down");

    // To two planes again, from the upper one: fitted anew, where the CPU keeps grids.
    request.format = "nested8";
    const cuda::sequence_id all[] = {p.id, other.id};
    h.ok(h.gpu.requantize(all, request, h.stream));
    sequence moved_other = h.cpu.new_sequence();
    h.ok(cuda::offload(h.gpu, other.id, moved_other, h.stream));
    other.host = std::move(moved_other);
    h.append(other, 2, false);
    h.compare(other, "requantized");
    h.attend(other, "requantized");

    // Files of both sides, and tokens behind them.
    pair moved = h.make();
    h.append(moved, 230, true);
    test::move_by_file(h.gpu, moved.id, h.cpu, moved.host, h.stream, "a file");
    for (int i = 0; i < 40; ++i) h.append(moved, test::uniform(h.r, 1, 3), false);
    h.compare(moved, "behind a file");
    h.attend(moved, "behind a file");
    test::move_by_messages(h.gpu, moved.id, h.stream, "messages");
    h.compare(moved, "messages");
    // All pages go back.
    for (const cuda::sequence_id id : {p.id, other.id, moved.id}) h.ok(h.gpu.free(id));
    CHECK(h.gpu.usage().quantized == 0, "%zu bytes of pages stay", h.gpu.usage().quantized);
}

/// A page of two planes goes while a fork holds its upper one.
void check_upper_stays() {
    history h(3);
    pair p = h.make();
    h.append(p, 230, true);
    pair other{{}, p.host.fork()};
    h.ok(h.gpu.fork(p.id, other.id, h.stream));
    h.ok(h.gpu.requantize(std::span(&p.id, 1), {.format = "nested4", .last_token = 140}, h.stream));
    const cuda::requantize_request request{.format = "kivi-2-g32", .last_token = 140};
    const cuda::tier tiers[] = {{.age = 0, .format = "kivi-2-g32"}};
    requantize_report planned, done, stepped;
    const std::size_t before = h.gpu.usage().quantized;
    h.ok(h.gpu.plan_step_down(std::span(&other.id, 1), tiers, stepped));
    h.ok(h.gpu.plan_requantize(std::span(&other.id, 1), request, planned));
    h.ok(h.gpu.requantize(std::span(&other.id, 1), request, h.stream, &done));
    const std::size_t lower = layers * heads * (both_pair::lower_key_bytes + both_pair::lower_value_bytes),
                      taken = h.gpu.usage().quantized + 2 * lower - before;
    CHECK(done.bytes_freed == 2 * lower && done.bytes_after + 2 * lower == done.bytes_before + taken,
          "%zu bytes are freed, not %zu; %zu to %zu", done.bytes_freed, 2 * lower, done.bytes_before,
          done.bytes_after);
    CHECK(planned.bytes_freed == done.bytes_freed && planned.bytes_after == done.bytes_after &&
              planned.bytes_peak == done.bytes_peak,
          "the dry run frees %zu bytes, to %zu, at most %zu", planned.bytes_freed, planned.bytes_after,
          planned.bytes_peak);
    CHECK(stepped.bytes_freed == done.bytes_freed, "the dry run of a step down frees %zu bytes",
          stepped.bytes_freed);
}

/// Pages that are not ranked do not lie in host memory.
void check_host_memory() {
    cuda::cache gpu;
    for (const char* const first : {"nested8", "nested4"}) {
        const cuda::status s = gpu.open({.layers = 1, .kv_heads = 1, .head_dim = dim},
                                        {.formats = {first},
                                         .page_tokens = page,
                                         .listed_tokens = page,
                                         .resident_tokens = page,
                                         .pool_tokens = 4 * page,
                                         .growing = false},
                                        std::span(&compiled(), 1), nullptr);
        CHECK(std::strstr(s.message, "do not lie in host memory, since") != nullptr &&
                  std::strstr(s.message, "two planes") != nullptr,
              "pages of %s in host memory: \"%s\"", first, s.message);
    }
}

}  // namespace

int main() {
    check_numbers();
    check_most_pages();
    check_host_memory();
    check_upper_stays();
    check_attention<both_pair>("nested8, dim 64, page 64");
    check_attention<cuda::upper_plane_pair<upper_pair>>("its upper plane");
    check_attention<cuda::plane_pair<cuda::preset_pair<nested4, 128>>>("nested8");
    for (const unsigned seed : {1u, 2u}) check_cache(seed);
    return test::report("planes");
}
