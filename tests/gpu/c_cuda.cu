// kvq_cuda.h against kvq.h: the same scenario on a device and on the CPU through both C interfaces. Outputs
// agree, pages have the same bytes; graphs, memory of the caller, and bad input.
#define KVQ_HAS_JSON 1

#include <kvq/attention/copy_rows.hpp>
#include <kvq/format/builtin_schemes.hpp>
#include <set>

#include "../../src/c/batch.cpp"
#include "../../src/c/cache.cpp"
#include "../../src/c/convert.cpp"
#include "../../src/c/formats.cpp"
#include "../../src/c/policy.cpp"
#include "../../src/c/resources.cpp"
#include "../../src/c/saved.cpp"
#include "../../src/c/sequence.cpp"
#include "../../src/c/statistics.cpp"
#include "../../src/c/status.cpp"
#include "../../src/c/wire.cpp"
#include "../../src/cuda/cache.cpp"
#include "../../src/cuda/device_code.cu"
#include "../../src/cuda/format.cuh"
#include "../../src/cuda/pages.cpp"
#include "../../src/cuda/prefixes.cpp"
#include "../../src/cuda/saved.cpp"
#include "support.cuh"

namespace kvq { inline namespace v0_3 {
/// A small library.
const builtin_format* builtin_formats(std::size_t* count) {
    using kivi4 = kvq::kivi<4, 64>;
    static const builtin_format all[] = {
        KVQ_TAGGED::detail::builtin_entry<scalar, full<float16>>("fp16", true, true),
        KVQ_TAGGED::detail::builtin_entry<scalar, full<bfloat16>>("bf16", true, true),
        KVQ_TAGGED::detail::builtin_entry<scalar, full<float>>("fp32", true, true),
        KVQ_TAGGED::detail::builtin_entry<scalar, int8>("int8", true, true),
        KVQ_TAGGED::detail::builtin_entry<scalar, kivi4::keys>("kivi-4-g64", true, false, 64),
        KVQ_TAGGED::detail::builtin_entry<scalar, kivi4::values>("kivi-4-g64", false, true, 64),
        KVQ_TAGGED::detail::builtin_entry<scalar, mix4::keys>("mix4", true, false),
        KVQ_TAGGED::detail::builtin_entry<scalar, mix4::values>("mix4", false, true),
        KVQ_TAGGED::detail::builtin_entry<scalar, std4_h::keys>("std4-h", true, false),
        KVQ_TAGGED::detail::builtin_entry<scalar, std4_h::values>("std4-h", false, true)};
    *count = sizeof(all) / sizeof(all[0]);
    return all;
}
}}  // namespace kvq

/// On a device three programs, which compile side by side, each with its own formats; emulated one.
constexpr bool has(int part) {
#ifdef PART
    return part == PART;
#else
    return part >= 0;
#endif
}

kvq::library_format_list kvq::library_device_formats() noexcept {
    using of = named<64, 64>;
    static device_formats all = [] {
        device_formats list;
        const auto add = [&]<class... Pairs>(std::type_identity<Pairs>...) {
            list.push_back(kvq::cuda::make_device_format<kvq::float16, Pairs...>());
            kvq::cuda::add_strides<kvq::float16, Pairs...>(list.back());
        };
#if !defined(PART) || PART == 0
        add(std::type_identity<of::kivi_4_g64>(), std::type_identity<of::int8>());
#else
        add(std::type_identity<of::int8>());
#endif
#if !defined(PART) || PART == 1
        add(std::type_identity<of::mix4>());
#endif
#if !defined(PART) || PART == 0
        list.push_back(
            kvq::cuda::make_scored_format<kvq::cuda::alibi, kvq::float16,
                                          keys_and_values<named<64>::int8, named<64>::kivi_4_g64>>());
#endif
#if !defined(PART) || PART == 2
        add(std::type_identity<of::std4_h>());
        add(std::type_identity<named<64, 32>::fp8>());
#endif
#if !defined(PART) || PART == 1
        add(std::type_identity<kvq::cuda::latent_pair<kvq::kivi<4, 32>::keys, 64, 16, 64, 64>>(),
            std::type_identity<kvq::cuda::latent_pair<kvq::int8, 64, 16, 64, 64>>());
        add(std::type_identity<kvq::cuda::index_pair<64, 64>>());
#endif
#ifndef __CUDACC__  // presets7 and prefill6 have the kernels
        add(std::type_identity<keys_and_values<named<64, 32>::fp8, named<64, 32>::nvfp4>>());
#endif
        return list;
    }();
    return {all.data(), all.size(), sizeof(all[0])};
}

namespace {

constexpr int layers = 2, kv_heads = 2, q_heads = 4, dim = 64, room = 160;

void ok(kvq_status s, int line) {
    CHECK(s == KVQ_OK, "line %d: %s: %s", line, kvq_status_name(s), kvq_last_error());
}
#define OK(call) ok(call, __LINE__)

/// A refusal with this status, whose message contains the text.
void refused(kvq_status s, kvq_status wanted, const char* text, int line) {
    CHECK(s == wanted && std::strstr(kvq_last_error(), text) != nullptr, "line %d: %s, \"%s\"", line,
          kvq_status_name(s), s == KVQ_OK ? "" : kvq_last_error());
}
#define REFUSED(call, wanted, text) refused(call, wanted, text, __LINE__)

kvq_tensor tensor_of(const void* data, int tokens, int heads, kvq_dtype type = KVQ_FP16) {
    return {const_cast<void*>(data), type, tokens, heads, dim, 0, 0};
}

/// Device memory with a count.
struct counted {
    std::size_t bytes = 0, limit = std::size_t{1} << 40;
    kvq_cuda_allocator functions{};

    counted() {
        KVQ_INIT(functions);
        functions.user = this;
        functions.allocate = [](void* user, std::size_t n) -> void* {
            auto& c = *static_cast<counted*>(user);
            void* p = nullptr;
            if (c.bytes + n > c.limit || cudaMalloc(&p, n) != cudaSuccess) return nullptr;
            CUDA_OK(cudaMemset(p, 0xff, n));
            c.bytes += n;
            return p;
        };
        functions.deallocate = [](void* user, void* p, std::size_t n) {
            CUDA_OK(cudaFree(p));
            static_cast<counted*>(user)->bytes -= n;
        };
    }
};

kvq_cuda_cache_options device_options() {
    kvq_cuda_cache_options o;
    KVQ_INIT(o);
    o.layers = layers;
    o.kv_heads = kv_heads;
    o.head_dim = dim;
    o.page_tokens = 64;
    o.formats = "kivi-4-g64, int8";
    o.recent = 40;
    o.max_batch = 3;
    o.max_tokens = 600;
    o.draft_tokens = 12;
    return o;
}
kvq_cache_options host_options() {
    kvq_cache_options o;
    KVQ_INIT(o);
    o.layers = layers;
    o.kv_heads = kv_heads;
    o.head_dim = dim;
    o.keys = "kivi-4-g64, int8";
    o.page_tokens = 64;
    o.recent = 40;
    o.repack = -1.0f;  // as the device
    return o;
}

/// New tokens of one call: on the host and on the device.
struct tokens {
    std::vector<kvq::float16> k, v, q;
    test::device_buffer<kvq::float16> dk, dv, dq, out;

    tokens()
        : k(room * kv_heads * dim),
          v(k.size()),
          q(room * q_heads * dim),
          dk(k.size()),
          dv(k.size()),
          dq(q.size()),
          out(q.size()) {}
    void write(test::rng& r) {
        for (auto* x : {&k, &v, &q})
            for (kvq::float16& y : *x) y = kvq::float16(test::normal(r));
        dk.upload(k);
        dv.upload(v);
        dq.upload(q);
    }
    kvq_tensor keys(int n) const { return tensor_of(dk.get(), n, kv_heads); }
    kvq_tensor values(int n) const { return tensor_of(dv.get(), n, kv_heads); }
    kvq_tensor queries(int n) const { return tensor_of(dq.get(), n, q_heads); }
    kvq_tensor outputs(int n) const { return tensor_of(out.get(), n, q_heads); }
    kvq_tensor host_rows(const std::vector<kvq::float16>& x, int first, int n, int heads) const {
        return tensor_of(x.data() + first * heads * dim, n, heads);
    }
};

/// Both caches and the rows of a batch on both sides.
struct both {
    test::rng r{11};
    cudaStream_t stream;
    counted memory;
    kvq_cuda_cache* gpu = nullptr;
    kvq_cache* cpu = nullptr;
    std::vector<kvq_cuda_sequence*> rows;
    std::vector<kvq_sequence*> host;
    tokens x;
    double worst = 0.0;
    int page_tokens;

    both(kvq_cuda_cache_options o, kvq_cache_options h)
        : page_tokens(h.page_tokens == 0 ? kvq::default_page_tokens : h.page_tokens) {
        CUDA_OK(cudaStreamCreate(&stream));
        o.allocator = &memory.functions;
        OK(kvq_cuda_cache_create(&o, stream, &gpu));
        OK(kvq_cache_create(&h, &cpu));
    }
    both() : both(device_options(), host_options()) {}
    ~both() {
        for (kvq_cuda_sequence* s : rows) OK(kvq_cuda_sequence_free(s));
        for (kvq_sequence* s : host) OK(kvq_sequence_free(s));
        OK(kvq_cuda_cache_free(gpu));
        OK(kvq_cache_free(cpu));
        CHECK(memory.bytes == 0, "%zu bytes are left", memory.bytes);
        CUDA_OK(cudaStreamDestroy(stream));
    }
    void add() {
        rows.push_back(nullptr);
        host.push_back(nullptr);
        OK(kvq_cuda_sequence_create(gpu, &rows.back()));
        OK(kvq_sequence_create(cpu, &host.back()));
    }
    /// Tokens [first, first + n) of a layer on the CPU, and its outputs against the device's. A step
    /// quantizes the page that leaves the window before its attention.
    void compare(int row, int layer, int first, int n, const std::vector<kvq::float16>& got, bool in_step,
                 const kvq_attend_options* options = nullptr) {
        std::vector<float> want(static_cast<std::size_t>(n) * q_heads * dim);
        const kvq_tensor k = x.host_rows(x.k, first, n, kv_heads), v = x.host_rows(x.v, first, n, kv_heads),
                         q = x.host_rows(x.q, first, n, q_heads),
                         out = tensor_of(want.data(), n, q_heads, KVQ_FP32);
        kvq_sequence* const to = host[static_cast<std::size_t>(row)];
        if (in_step) {
            OK(kvq_sequence_append(to, layer, &k, &v));
            OK(kvq_sequence_attend(to, layer, &q, &out, options));
        } else {
            OK(kvq_sequence_prefill(to, layer, &k, &v, &q, &out, options));
        }
        double error = 0.0, size = 0.0;
        for (std::size_t i = 0; i < want.size(); ++i) {
            const double a = static_cast<double>(want[i]),
                         b = static_cast<double>(
                             static_cast<float>(got[static_cast<std::size_t>(first) * q_heads * dim + i]));
            error += (a - b) * (a - b);
            size += a * a;
            if (!(b == b)) error = INFINITY;
        }
        worst = std::max(worst, std::sqrt(error / size));
        CHECK(std::sqrt(error / size) <= (in_step ? 2e-3 : 3e-3), "row %d, layer %d: error %.3g", row, layer,
              std::sqrt(error / size));
    }
    void prompt(int row, int n, const kvq_cuda_attend_options* options = nullptr,
                const kvq_attend_options* host_call = nullptr) {
        OK(kvq_cuda_cache_begin_prompt(gpu, rows[static_cast<std::size_t>(row)], n, stream));
        const kvq_tensor k = x.keys(n), v = x.values(n), q = x.queries(n), out = x.outputs(n);
        for (int layer = 0; layer < layers; ++layer) {
            x.write(r);
            x.out.poison();
            OK(kvq_cuda_cache_prefill(gpu, layer, &k, &v, &q, &out, options, stream));
            CUDA_OK(cudaStreamSynchronize(stream));
            compare(row, layer, 0, n, x.out.download(), false, host_call);
        }
    }
    /// A step with n new tokens of all rows; row `hole` is not there.
    void step(int n, int hole = -1, const kvq_cuda_attend_options* options = nullptr,
              const kvq_attend_options* host_call = nullptr) {
        std::vector<kvq_cuda_sequence*> batch = rows;
        if (hole >= 0) batch[static_cast<std::size_t>(hole)] = nullptr;
        const int count = static_cast<int>(rows.size()), all = count * n;
        OK(kvq_cuda_cache_begin_step(gpu, batch.data(), count, n, stream));
        const kvq_tensor k = x.keys(all), v = x.values(all), q = x.queries(all), out = x.outputs(all);
        for (int layer = 0; layer < layers; ++layer) {
            x.write(r);
            x.out.poison();
            OK(kvq_cuda_cache_prefill(gpu, layer, &k, &v, &q, &out, options, stream));
            CUDA_OK(cudaStreamSynchronize(stream));
            const auto got = x.out.download();
            for (int row = 0; row < count; ++row)
                if (row == hole)
                    for (int i = 0; i < n * q_heads * dim; ++i)
                        CHECK(static_cast<float>(
                                  got[static_cast<std::size_t>(row * n * q_heads * dim + i)]) == 0.0f,
                              "a row that is not there has output");
                else
                    compare(row, layer, row * n, n, got, true, host_call);
        }
    }
    /// How many formats quantized pages of a row have.
    int quantized_formats(int row) {
        kvq_page pages[32];
        int count = 0;
        OK(kvq_sequence_get_pages(host[static_cast<std::size_t>(row)], 0, pages, 32, &count));
        std::set<int> formats;
        for (int i = 0; i < count; ++i)
            if (pages[i].key_format != 0) formats.insert(pages[i].key_format);
        return static_cast<int>(formats.size());
    }
    /// The same tokens and bytes on both sides?
    void same_bytes(int row, const char* when) {
        kvq_sequence *const want = host[static_cast<std::size_t>(row)], *have = nullptr;
        OK(kvq_cuda_sequence_offload(rows[static_cast<std::size_t>(row)], cpu, stream, &have));
        if (have == nullptr) return;
        int a = 0, b = 0, on_device = 0;
        OK(kvq_sequence_tokens(have, KVQ_ALL_LAYERS, &a));
        OK(kvq_sequence_tokens(want, KVQ_ALL_LAYERS, &b));
        OK(kvq_cuda_sequence_tokens(rows[static_cast<std::size_t>(row)], &on_device));
        CHECK(a == b && a == on_device, "%s: %d and %d tokens, the CPU has %d", when, a, on_device, b);
        for (int layer = 0; layer < layers && a == b; ++layer) {
            kvq_page p[2][32];
            int count[2] = {};
            OK(kvq_sequence_get_pages(have, layer, p[0], 32, &count[0]));
            OK(kvq_sequence_get_pages(want, layer, p[1], 32, &count[1]));
            CHECK(count[0] == count[1] && count[0] <= 32, "%s: %d pages, the CPU has %d", when, count[0],
                  count[1]);
            for (int i = 0; i < count[0] && i < count[1]; ++i) {
                const kvq_page &m = p[0][i], &n = p[1][i];
                CHECK(
                    m.key_format == n.key_format && m.value_format == n.value_format && m.tokens == n.tokens,
                    "%s, layer %d, page %d: formats %d, %d and %d tokens, the CPU's %d, %d and %d", when,
                    layer, i, m.key_format, m.value_format, m.tokens, n.key_format, n.value_format, n.tokens);
                if (m.key_format == 0 || m.key_format != n.key_format) continue;
                for (const kvq_role role : {KVQ_KEY, KVQ_VALUE}) {
                    kvq_format* f = nullptr;
                    OK(kvq_cache_get_format(cpu, role, m.key_format, &f));
                    const kvq_page_shape shape = {role, page_tokens, kv_heads, dim, layer, 0};
                    std::size_t bytes = 0;
                    OK(kvq_format_page_bytes(f, &shape, &bytes, nullptr));
                    CHECK(bytes > 0 && std::memcmp(role == KVQ_KEY ? m.keys : m.values,
                                                   role == KVQ_KEY ? n.keys : n.values, bytes) == 0,
                          "%s, layer %d, page %d: bytes of %s differ", when, layer, i,
                          role == KVQ_KEY ? "keys" : "values");
                    OK(kvq_format_free(f));
                }
            }
            std::vector<float> y[2];
            int limit = 0;
            OK(kvq_sequence_trim_limit(want, &limit));
            if (limit > 0) continue;  // a window has freed tokens
            for (const kvq_role role : {KVQ_KEY, KVQ_VALUE}) {
                for (int i = 0; i < 2; ++i) {
                    y[i].assign(static_cast<std::size_t>(a) * kv_heads * dim, NAN);
                    const kvq_tensor to = tensor_of(y[i].data(), a, kv_heads, KVQ_FP32);
                    OK(kvq_sequence_dequantize(i == 0 ? have : want, layer, role, 0, &to));
                }
                CHECK(y[0] == y[1], "%s, layer %d: values differ", when, layer);
            }
        }
        OK(kvq_sequence_free(have));
    }
};

void scenario() {
    // Keys that move.
    kvq_rotary rotary{};
    rotary.dims = dim / 2;
    rotary.layout = KVQ_INTERLEAVED;
    kvq_cuda_cache_options device = device_options();
    kvq_cache_options host = host_options();
    device.rotary = host.rotary = &rotary;
    device.rotary_count = host.rotary_count = 1;
    both c(device, host);
    c.add();
    c.add();
    c.prompt(0, 150);
    c.prompt(0, 33);
    c.prompt(1, 5);
    for (int i = 0; i < 70; ++i) c.step(1, i % 9 == 4 ? i % 2 : -1);
    for (const int row : {0, 1}) c.same_bytes(row, "steps");

    // A fork goes its own way.
    c.rows.push_back(nullptr);
    c.host.push_back(nullptr);
    OK(kvq_cuda_sequence_fork(c.rows[0], c.stream, &c.rows[2]));
    OK(kvq_sequence_fork(c.host[0], &c.host[2]));
    int n = 0;
    OK(kvq_cuda_sequence_tokens(c.rows[0], &n));
    OK(kvq_cuda_sequence_trim(c.rows[0], n - 16));
    OK(kvq_sequence_trim(c.host[0], n - 16));
    for (int i = 0; i < 10; ++i) c.step(1);
    for (const int row : {0, 1, 2}) c.same_bytes(row, "fork and trim");

    // Drafts: a chain of 9 tokens, of which some stay.
    kvq_tensor k = c.x.keys(27), v = c.x.values(27), q = c.x.queries(27), out = c.x.outputs(27);
    OK(kvq_cuda_cache_begin_draft(c.gpu, c.rows.data(), 3, 9, c.stream));
    for (int layer = 0; layer < layers; ++layer) {
        c.x.write(c.r);
        OK(kvq_cuda_cache_prefill(c.gpu, layer, &k, &v, &q, &out, nullptr, c.stream));
        CUDA_OK(cudaStreamSynchronize(c.stream));
        for (int row = 0; row < 3; ++row) {
            const kvq_tensor hk = c.x.host_rows(c.x.k, row * 9, 9, kv_heads),
                             hv = c.x.host_rows(c.x.v, row * 9, 9, kv_heads);
            OK(kvq_sequence_append_draft(c.host[static_cast<std::size_t>(row)], layer, &hk, &hv));
        }
    }
    const int paths[] = {0, 1, 2, 5, 8}, starts[] = {0, 3, 3, 5};
    OK(kvq_cuda_cache_keep(c.gpu, c.rows.data(), 3, paths, starts, c.stream));
    for (int row = 0; row < 3; ++row)
        OK(kvq_sequence_keep(c.host[static_cast<std::size_t>(row)], paths + starts[row],
                             starts[row + 1] - starts[row]));
    for (const int row : {0, 1, 2}) c.same_bytes(row, "keep");
    c.step(1);

    // Onload: what was offloaded goes on with the same bits.
    kvq_sequence* moved = nullptr;
    OK(kvq_cuda_sequence_offload(c.rows[1], c.cpu, c.stream, &moved));
    OK(kvq_cuda_sequence_free(c.rows[1]));
    OK(kvq_cuda_sequence_onload(c.gpu, moved, c.stream, &c.rows[1]));
    OK(kvq_sequence_free(moved));
    c.step(1);
    c.same_bytes(1, "onload");

    // The same through a file of the CPU's sequence, and one of the device's.
    struct file {
        std::vector<unsigned char> data;
        std::size_t at = 0;

        static int32_t write(void* user, const void* from, std::size_t n) {
            auto& f = *static_cast<file*>(user);
            const auto* const p = static_cast<const unsigned char*>(from);
            f.data.insert(f.data.end(), p, p + n);
            return 0;
        }
        static std::size_t read(void* user, void* to, std::size_t n) {
            auto& f = *static_cast<file*>(user);
            n = std::min(n, f.data.size() - f.at);
            std::memcpy(to, f.data.data() + f.at, n);
            f.at += n;
            return n;
        }
    } of_cpu, of_device;
    OK(kvq_sequence_save(c.host[1], nullptr, &file::write, &of_cpu));
    OK(kvq_cuda_sequence_save(c.rows[1], nullptr, &file::write, &of_device, c.stream));
    CHECK(of_cpu.data == of_device.data, "files of %zu and %zu bytes differ", of_cpu.data.size(),
          of_device.data.size());
    OK(kvq_cuda_sequence_free(c.rows[1]));
    OK(kvq_cuda_sequence_restore(c.gpu, nullptr, &file::read, &of_cpu, c.stream, &c.rows[1]));
    OK(kvq_sequence_free(c.host[1]));
    OK(kvq_sequence_restore(c.cpu, nullptr, &file::read, &of_device, &c.host[1]));
    c.step(1);
    c.same_bytes(1, "restore");
    of_device.data[200] ^= 1;
    of_device.at = 0;
    kvq_cuda_sequence* damaged = nullptr;
    REFUSED(kvq_cuda_sequence_restore(c.gpu, nullptr, &file::read, &of_device, c.stream, &damaged),
            KVQ_ERROR_DATA, "");
    CHECK(damaged == nullptr, "a damaged file has made a sequence");

    // Statistics of the own first tokens: not yet, or not of so few.
    kvq_statistics* own = nullptr;
    OK(kvq_statistics_create(layers, kv_heads, dim, 0, &own));
    int32_t is_done = 1;
    OK(kvq_cuda_cache_self_calibrate(c.gpu, c.rows.data(), 3, "int8", own, 100000, c.stream, &is_done));
    CHECK(is_done == 0, "a cache has calibrated itself from 100000 tokens");
    REFUSED(kvq_cuda_cache_self_calibrate(c.gpu, c.rows.data(), 3, "int8", own, 63, c.stream, &is_done),
            KVQ_ERROR_ARGUMENT, "from at least 64 tokens");
    REFUSED(kvq_cuda_cache_self_calibrate(c.gpu, c.rows.data(), 3, "kivi-4-g64", own, 64, c.stream, &is_done),
            KVQ_ERROR_ARGUMENT, "are in use");
    OK(kvq_statistics_free(own));

    // A trim into a quantized page, which shows fewer tokens then.
    OK(kvq_cuda_sequence_trim(c.rows[0], 90));
    OK(kvq_sequence_trim(c.host[0], 90));
    c.step(1);
    c.prompt(0, 75);
    c.step(1);
    c.same_bytes(0, "deep trim");

    // An erase, and a shift of what is left.
    OK(kvq_cuda_sequence_erase(c.rows[0], 10, 40));
    OK(kvq_sequence_erase(c.host[0], 10, 40));
    c.step(1);
    OK(kvq_cuda_sequence_shift(c.rows[0], 20, 30, -7));
    OK(kvq_sequence_shift(c.host[0], 20, 30, -7));
    c.step(1);
    c.same_bytes(0, "erase and shift");
    REFUSED(kvq_cuda_sequence_erase(c.rows[0], 0, 2), KVQ_ERROR_ARGUMENT,
            "are sinks of which some were erased");

    // A splice, behind a whole page.
    int32_t held = 0;
    OK(kvq_cuda_sequence_tokens(c.rows[2], &held));
    kvq_cuda_sequence* two = nullptr;
    OK(kvq_cuda_sequence_create(c.gpu, &two));
    kvq_sequence* host_two = nullptr;
    OK(kvq_sequence_create(c.cpu, &host_two));
    OK(kvq_cuda_sequence_splice(two, c.rows[2], 0, held, c.stream));
    OK(kvq_sequence_splice(host_two, c.host[2], 0, held));
    REFUSED(kvq_cuda_sequence_splice(two, c.rows[2], 0, held + 1, c.stream), KVQ_ERROR_ARGUMENT, "holds");
    std::swap(two, c.rows[2]);
    std::swap(host_two, c.host[2]);
    c.step(1);
    c.same_bytes(2, "splice");
    OK(kvq_cuda_sequence_free(two));
    OK(kvq_sequence_free(host_two));

    // Pages in host memory: messages, and prefixes.
    kvq_cache* pages = nullptr;
    OK(kvq_cuda_cache_host_pages(c.gpu, std::size_t{1} << 24, &pages));
    kvq_sequence *sent = nullptr, *came = nullptr;
    OK(kvq_cuda_sequence_offload(c.rows[1], pages, c.stream, &sent));
    kvq_receiver* receiver = nullptr;
    OK(kvq_receiver_create(pages, &receiver));
    const kvq_write accept = [](void* user, const void* message, std::size_t bytes) {
        return kvq_receiver_accept(static_cast<kvq_receiver*>(user), message, bytes) == KVQ_OK ? 0 : 1;
    };
    for (int layer = 0; layer < layers; ++layer) OK(kvq_sequence_send_pages(sent, layer, accept, receiver));
    OK(kvq_receiver_finish(receiver, -1, &came));
    OK(kvq_receiver_free(receiver));
    OK(kvq_sequence_free(sent));
    OK(kvq_cuda_sequence_free(c.rows[1]));
    OK(kvq_cuda_sequence_onload(c.gpu, came, c.stream, &c.rows[1]));
    c.step(1);
    c.same_bytes(1, "messages");
    kvq_prefix_cache_options of_store;
    KVQ_INIT(of_store);
    of_store.min_prefix_tokens = 1;
    kvq_prefix_cache* store = nullptr;
    OK(kvq_prefix_cache_create(pages, &of_store, &store));
    int32_t count = 0, outcome = -1, match = -1, found = 0;
    OK(kvq_sequence_tokens(came, 0, &count));
    std::vector<int32_t> text(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<int32_t>(i * i % 97);
    OK(kvq_prefix_cache_store(store, text.data(), count, came, &outcome));
    OK(kvq_sequence_free(came));
    text.push_back(5);
    kvq_cuda_sequence* again = nullptr;
    OK(kvq_prefix_cache_fetch(store, text.data(), count + 1, &match, &found, &came));
    OK(kvq_cuda_sequence_onload(c.gpu, came, c.stream, &again));
    OK(kvq_cuda_sequence_tokens(again, &held));
    CHECK(outcome == KVQ_STORED && found == count && held == count, "%d of %d tokens of a prefix", held,
          count);
    OK(kvq_cuda_sequence_free(again));
    OK(kvq_sequence_free(came));
    OK(kvq_prefix_cache_free(store));
    OK(kvq_cache_free(pages));

    // The same over three tiers, and a sequence that waits.
    kvq_cuda_prefix_options of_tiers;
    KVQ_INIT(of_tiers);
    of_tiers.device_bytes = 1;
    of_tiers.host_bytes = std::size_t{1} << 22;
    of_tiers.min_prefix_tokens = 1;
    of_tiers.folder = "/no such folder";
    kvq_cuda_prefix_cache* tiered = nullptr;
    REFUSED(kvq_cuda_prefix_cache_create(c.gpu, &of_tiers, &tiered), KVQ_ERROR_ARGUMENT, "is not a folder");
    of_tiers.folder = ".";
    OK(kvq_cuda_prefix_cache_create(c.gpu, &of_tiers, &tiered));
    OK(kvq_cuda_sequence_tokens(c.rows[0], &held));
    text.assign(static_cast<std::size_t>(held), 5);
    text[0] = 6;
    int32_t where = -1;
    REFUSED(kvq_cuda_prefix_cache_park(tiered, text.data(), held - 1, c.rows[0], c.stream),
            KVQ_ERROR_ARGUMENT, "tokens of a sequence that holds");
    OK(kvq_cuda_prefix_cache_store(tiered, text.data(), held, c.rows[0], c.stream));
    OK(kvq_cuda_prefix_cache_park(tiered, text.data(), held, c.rows[0], c.stream));
    OK(kvq_cuda_sequence_tokens(c.rows[0], &count));
    CHECK(count == 0, "a parked sequence holds %d tokens", count);
    OK(kvq_cuda_sequence_free(c.rows[0]));
    OK(kvq_cuda_prefix_cache_lookup(tiered, text.data(), held, &match, &found, &where));
    CHECK(match == KVQ_MATCH_EXACT && found == held && where == KVQ_CUDA_PLACE_HOST, "%d tokens of %d", found,
          held);
    OK(kvq_cuda_prefix_cache_fetch(tiered, text.data(), held, c.stream, &match, &found, &where, &c.rows[0]));
    CHECK(match == KVQ_MATCH_EXACT && found == held && where == KVQ_CUDA_PLACE_HOST, "%d tokens of %d", found,
          held);
    c.same_bytes(0, "a sequence that waited");
    c.step(1);
    c.same_bytes(0, "a sequence that waited, and a step");
    OK(kvq_cuda_prefix_cache_fetch(tiered, text.data() + 1, held - 1, c.stream, &match, &found, &where,
                                   &again));
    CHECK(found == 0 && where == KVQ_CUDA_PLACE_NONE, "%d tokens of no text", found);
    REFUSED(kvq_cuda_prefix_cache_store(tiered, text.data(), 1, again, c.stream), KVQ_ERROR_ARGUMENT,
            "1 tokens of a sequence that holds 0");
    OK(kvq_cuda_sequence_free(again));
    OK(kvq_cuda_prefix_cache_release(tiered, 1, c.stream));
    kvq_cuda_prefix_statistics seen;
    KVQ_INIT(seen);
    OK(kvq_cuda_prefix_cache_get_statistics(tiered, &seen));
    CHECK(seen.entries == 0 && seen.bytes == 0 && seen.host_bytes > 0 && seen.files == 0 &&
              seen.fetches[KVQ_CUDA_PLACE_HOST] == 1 && seen.fetches[KVQ_CUDA_PLACE_NONE] == 1 &&
              seen.tokens_saved == static_cast<std::uint64_t>(held) && seen.lowered == 3 && seen.lost == 0,
          "%zu entries, %zu bytes on the host", seen.entries, seen.host_bytes);
    OK(kvq_cuda_prefix_cache_free(tiered));

    // Other formats.
    kvq_cuda_requantize_request to;
    KVQ_INIT(to);
    to.format = "int8";
    to.last_token = 140;
    kvq_requantize_request host_to;
    KVQ_INIT(host_to);
    host_to.keys = host_to.values = "int8";
    host_to.last_token = 140;
    OK(kvq_cuda_cache_requantize(c.gpu, c.rows.data(), 3, &to, c.stream));
    OK(kvq_cache_requantize(c.cpu, c.host.data(), 3, &host_to, nullptr));
    for (const int row : {0, 1, 2}) c.same_bytes(row, "requantize");
    // The same again: a dry run has nothing to do, and says so.
    kvq_requantize_report report;
    KVQ_INIT(report);
    to.dry_run = 1;
    to.report = &report;
    OK(kvq_cuda_cache_requantize(c.gpu, c.rows.data(), 3, &to, c.stream));
    CHECK(report.pages == 0 && report.bytes_after == report.bytes_before && report.bytes_before > 0,
          "%zu pages, %zu bytes", report.pages, report.bytes_after);
    to.last_token = 0;
    OK(kvq_cuda_cache_requantize(c.gpu, c.rows.data(), 3, &to, c.stream));
    CHECK(report.pages > 0 && report.bytes_after > report.bytes_before, "%zu pages", report.pages);
    to.format = "int8/";
    REFUSED(kvq_cuda_cache_requantize(c.gpu, c.rows.data(), 3, &to, c.stream), KVQ_ERROR_ARGUMENT,
            "add the pair of both");
    c.step(1);
    CHECK(c.quantized_formats(2) == 2, "pages have %d formats", c.quantized_formats(2));
    c.prompt(2, 70);  // over pages of both formats, int8 and what new pages have
    c.same_bytes(2, "a prompt behind requantize");
    std::size_t before = 0, after = 0;
    OK(kvq_cuda_sequence_bytes(c.rows[0], &before));
    const kvq_cuda_tier tiers[] = {{0, "int8"}, {60, "kivi-4-g64"}};
    kvq_usage used, on_host;
    KVQ_INIT(used);
    KVQ_INIT(on_host);
    OK(kvq_cuda_sequence_get_usage(c.rows[0], &used));
    OK(kvq_sequence_get_usage(c.host[0], &on_host));
    CHECK(used.bytes == before && used.quantized == on_host.quantized && used.rollback == on_host.rollback &&
              used.tokens == on_host.tokens,
          "%zu bytes quantized, the CPU has %zu", used.quantized, on_host.quantized);
    REFUSED(kvq_cuda_cache_commit_to(c.gpu, "std5"), KVQ_ERROR_ARGUMENT,
            "std5 is not a format of this cache");
    kvq_step_down_report plan;
    KVQ_INIT(plan);
    OK(kvq_cuda_cache_plan_step_down(c.gpu, c.rows.data(), 3, tiers, 2, 1, &plan));
    CHECK(plan.pages > 0 && plan.bytes_after < plan.bytes_before && plan.fits == 0, "%zu pages", plan.pages);
    OK(kvq_cuda_cache_plan_step_down(c.gpu, c.rows.data(), 3, tiers, 2, 0, &plan));
    // With an entry that shares pages, which stay shared.
    OK(kvq_cuda_prefix_cache_create(c.gpu, nullptr, &tiered));
    OK(kvq_cuda_sequence_tokens(c.rows[0], &held));
    text.assign(static_cast<std::size_t>(held), 7);
    OK(kvq_cuda_prefix_cache_store(tiered, text.data(), held, c.rows[0], c.stream));
    REFUSED(kvq_cuda_prefix_cache_step_down(tiered, c.rows.data(), 3, nullptr, 2, 0, c.stream),
            KVQ_ERROR_HANDLE, "tiers");
    OK(kvq_cuda_prefix_cache_step_down(tiered, c.rows.data(), 3, tiers, 2, 0, c.stream));
    KVQ_INIT(seen);
    OK(kvq_cuda_prefix_cache_get_statistics(tiered, &seen));
    OK(kvq_cuda_sequence_bytes(c.rows[0], &after));
    CHECK(seen.entries == 1 && seen.bytes == after, "an entry of %zu bytes, its sequence has %zu", seen.bytes,
          after);
    OK(kvq_cuda_prefix_cache_free(tiered));
    OK(kvq_cuda_cache_step_down(c.gpu, c.rows.data(), 3, tiers, 2, 0, c.stream));
    OK(kvq_cuda_sequence_bytes(c.rows[0], &after));
    CHECK(after < before, "step down: %zu bytes before, %zu after", before, after);

    kvq_cuda_cache_info info;
    KVQ_INIT(info);
    OK(kvq_cuda_cache_get_info(c.gpu, &info));
    CHECK(plan.fits == 1 && plan.bytes_after == info.quantized + info.window &&
              plan.bytes_after < plan.bytes_before,
          "a plan of %zu bytes, in use are %zu", plan.bytes_after, info.quantized + info.window);
    CHECK(info.bytes == c.memory.bytes && info.bytes == info.quantized + info.window + info.unused +
                                                            info.tables + info.workspace + info.prompt,
          "%zu bytes, the allocator gave %zu", info.bytes, c.memory.bytes);
    CHECK(info.sinks == 4 && info.recent == 40 && info.rollback == 16 && info.page_tokens == 64 &&
              info.step_tokens == 1 && info.max_tokens == 600 && info.quantized > 0 && info.window > 0,
          "info");
    std::uint32_t counts[layers] = {7, 7};
    OK(kvq_cuda_cache_not_finite(c.gpu, counts, layers, c.stream));
    CHECK(counts[0] == 0 && counts[1] == 0, "%u and %u NaN", counts[0], counts[1]);
    std::printf("scenario: worst error %.2g\n", c.worst);
}

/// Scale, softcap, window; tokens several at a time; fp16.
/// A window and another format beside full attention: the same pages as the CPU's, freed ones included.
void list_of_layers() {
    const kvq_layer list[layers] = {{KVQ_SLIDING_ATTENTION, kv_heads, dim, 0, 40, 0, 0},
                                    {KVQ_FULL_ATTENTION, kv_heads, dim, 0, 0, 0, 0}};
    const kvq_layer_formats formats[layers] = {{nullptr, nullptr}, {"int8", "int8"}};
    kvq_cuda_cache_options o = device_options();
    kvq_cache_options h = host_options();
    o.kv_heads = o.head_dim = h.kv_heads = h.head_dim = 0;
    o.formats = "kivi-4-g64";
    o.layer_list = h.layer_list = list;
    o.layer_formats = h.layer_formats = formats;
    both c(o, h);
    c.add();
    c.add();
    c.prompt(0, 150);
    c.prompt(1, 5);
    for (int i = 0; i < 140; ++i) c.step(1, i % 9 == 4 ? i % 2 : -1);
    for (const int row : {0, 1}) {
        int limits[2] = {}, n = 0;
        OK(kvq_cuda_sequence_trim_limit(c.rows[static_cast<std::size_t>(row)], &limits[0]));
        OK(kvq_sequence_trim_limit(c.host[static_cast<std::size_t>(row)], &limits[1]));
        CHECK(limits[0] == limits[1] && limits[0] > 0, "trims reach %d, the CPU's %d", limits[0], limits[1]);
        kvq_page pages[32];
        OK(kvq_sequence_get_pages(c.host[static_cast<std::size_t>(row)], 0, pages, 32, &n));
        CHECK(n <= 4, "a window holds %d pages", n);
        REFUSED(kvq_cuda_sequence_trim(c.rows[static_cast<std::size_t>(row)], limits[0] - 1),
                KVQ_ERROR_ARGUMENT, "layer 0, sliding window of 40, 2 x 64: cannot trim");
        c.same_bytes(row, "a list of layers");
    }
    kvq_layer own{};
    OK(kvq_cuda_cache_get_layer(c.gpu, 0, &own));
    CHECK(own.kind == KVQ_SLIDING_ATTENTION && own.window == 40 && own.value_dim == dim, "layer 0");
    REFUSED(kvq_cuda_cache_get_layer(c.gpu, 2, &own), KVQ_ERROR_ARGUMENT, "layer 2 is not among the 2");
    kvq_cuda_cache* made = nullptr;
    o.kv_heads = 2;
    REFUSED(kvq_cuda_cache_create(&o, nullptr, &made), KVQ_ERROR_ARGUMENT, "must be 0, not 2 and 0");
    o.kv_heads = 0;
    const kvq_layer unknown[layers] = {list[1], {99, kv_heads, dim, 0, 0, 0, 0}};
    o.layer_list = unknown;
    REFUSED(kvq_cuda_cache_create(&o, nullptr, &made), KVQ_ERROR_UNSUPPORTED, "layer 1 has kind 99");
    // A layer that shares the keys and values of another one sees what this one sees.
    const kvq_layer sharing[layers] = {list[1], {KVQ_SHARED, 0, 0, 0, 0, 0, 0}};
    o.layer_list = sharing;
    o.layer_formats = nullptr;
    OK(kvq_cuda_cache_create(&o, nullptr, &made));
    kvq_cuda_sequence* one = nullptr;
    OK(kvq_cuda_sequence_create(made, &one));
    for (const int n : {150, 1}) {
        OK(n == 1 ? kvq_cuda_cache_begin_step(made, &one, 1, n, c.stream)
                  : kvq_cuda_cache_begin_prompt(made, one, n, c.stream));
        c.x.write(c.r);
        const kvq_tensor k = c.x.keys(n), v = c.x.values(n), q = c.x.queries(n), out = c.x.outputs(n),
                         none = c.x.keys(0);
        std::vector<kvq::float16> got[layers];
        for (int layer = 0; layer < layers; ++layer) {
            c.x.out.poison();
            const bool own = layer == 0;
            OK(kvq_cuda_cache_prefill(made, layer, own ? &k : &none, own ? &v : &none, &q, &out, nullptr,
                                      c.stream));
            CUDA_OK(cudaStreamSynchronize(c.stream));
            got[layer] = c.x.out.download();
        }
        CHECK(std::memcmp(got[0].data(), got[1].data(), static_cast<std::size_t>(n) * q_heads * dim * 2) == 0,
              "a shared layer sees other tokens in %d", n);
        REFUSED(kvq_cuda_cache_prefill(made, 1, &k, &v, &q, &out, nullptr, c.stream), KVQ_ERROR_ARGUMENT,
                "takes 0 of k and v");
    }
    OK(kvq_cuda_sequence_free(one));
    OK(kvq_cuda_cache_free(made));
    // A layer with cross attention, whose text has the same tokens as the sequence: the last query sees the
    // same.
    const kvq_layer crossing[layers] = {list[1], {KVQ_CROSS_ATTENTION, kv_heads, dim, 0, 0, 0, 0}};
    o.layer_list = crossing;
    OK(kvq_cuda_cache_create(&o, nullptr, &made));
    OK(kvq_cuda_sequence_create(made, &one));
    {
        c.x.write(c.r);
        constexpr int n = 151;
        kvq_tensor k = c.x.keys(n), v = c.x.values(n);
        const kvq_tensor q = c.x.queries(n - 1), out = c.x.outputs(n - 1), q1 = c.x.queries(1),
                         out1 = c.x.outputs(1), none = c.x.keys(0);
        OK(kvq_cuda_cache_begin_cross(made, one, n, c.stream));
        OK(kvq_cuda_cache_append(made, 1, &k, &v, c.stream));
        REFUSED(kvq_cuda_cache_begin_cross(made, one, 1, c.stream), KVQ_ERROR_ARGUMENT, "holds 151 tokens");
        OK(kvq_cuda_cache_begin_prompt(made, one, n - 1, c.stream));
        k.tokens = v.tokens = n - 1;
        OK(kvq_cuda_cache_prefill(made, 0, &k, &v, &q, &out, nullptr, c.stream));
        OK(kvq_cuda_cache_prefill(made, 1, &none, &none, &q, &out, nullptr, c.stream));
        OK(kvq_cuda_cache_begin_step(made, &one, 1, 1, c.stream));
        for (kvq_tensor* const x : {&k, &v}) {
            x->data = static_cast<std::byte*>(x->data) + (n - 1) * kv_heads * dim * 2;
            x->tokens = 1;
        }
        REFUSED(kvq_cuda_cache_prefill(made, 1, &k, &v, &q1, &out1, nullptr, c.stream), KVQ_ERROR_ARGUMENT,
                "takes 0 of k and v");
        std::vector<kvq::float16> got[layers];
        for (int layer = 0; layer < layers; ++layer) {
            c.x.out.poison();
            OK(kvq_cuda_cache_prefill(made, layer, layer == 0 ? &k : &none, layer == 0 ? &v : &none, &q1,
                                      &out1, nullptr, c.stream));
            CUDA_OK(cudaStreamSynchronize(c.stream));
            got[layer] = c.x.out.download();
        }
        CHECK(std::memcmp(got[0].data(), got[1].data(), std::size_t{q_heads} * dim * 2) == 0,
              "cross attention sees other tokens");
    }
    OK(kvq_cuda_sequence_free(one));
    OK(kvq_cuda_cache_free(made));
    // A window that is refused comes before the tokens: layer 0 has not quantized for layer 1, either.
    const kvq_layer with_sinks{KVQ_SLIDING_ATTENTION, kv_heads, dim, 0, 40, 4, 0},
        windows[layers] = {with_sinks, with_sinks};
    o.layer_list = windows;
    OK(kvq_cuda_cache_create(&o, nullptr, &made));
    OK(kvq_cuda_sequence_create(made, &one));
    OK(kvq_cuda_cache_begin_step(made, &one, 1, 1, c.stream));
    kvq_cuda_attend_options wider;
    KVQ_INIT(wider);
    wider.window = 60;
    const kvq_tensor k = c.x.keys(1), v = c.x.values(1), q = c.x.queries(1), out = c.x.outputs(1);
    REFUSED(kvq_cuda_cache_prefill(made, 0, &k, &v, &q, &out, &wider, c.stream), KVQ_ERROR_ARGUMENT,
            "is no window together with it");
    wider.window = 0;
    for (float* const x : {&wider.scale, &wider.softcap}) {
        *x = INFINITY;
        REFUSED(kvq_cuda_cache_prefill(made, 0, &k, &v, &q, &out, &wider, c.stream), KVQ_ERROR_ARGUMENT,
                "none may be negative or infinite");
        *x = 0.0f;
    }
    REFUSED(kvq_cuda_cache_append(made, 1, &k, &v, c.stream), KVQ_ERROR_ARGUMENT, "comes before layer 0");
    OK(kvq_cuda_sequence_free(one));
    OK(kvq_cuda_cache_free(made));
    o.layer_list = nullptr;
    o.kv_heads = kv_heads, o.head_dim = dim;
    o.layers = 1 << 30;
    REFUSED(kvq_cuda_cache_create(&o, nullptr, &made), KVQ_ERROR_ARGUMENT, "it has at most 65535");
    std::printf("  a list of layers             error %.2e\n", c.worst);
}

/// Latents, in a prompt and steps. Queries of zeros see the mean of all values. Pages are those of the CPU;
/// with formats "fp16" nothing is quantized.
void latents(const char* formats, double tolerance) {
    constexpr int channels = 80, width = 64, page = 64, queries = 2;
    const bool quantizes = std::strcmp(formats, "fp16") != 0;
    const kvq_layer list[] = {{KVQ_LATENT, 1, channels, width, 16, 0, 0}};
    kvq_cuda_cache_options o = device_options();
    kvq_cache_options h = host_options();
    o.layers = h.layers = 1;
    o.kv_heads = o.head_dim = h.kv_heads = h.head_dim = 0;
    o.page_tokens = h.page_tokens = page;
    o.formats = h.keys = formats;
    o.layer_list = h.layer_list = list;
    o.query_heads = queries;
    kvq_cuda_cache* gpu = nullptr;
    kvq_cache* cpu = nullptr;
    kvq_cuda_sequence* one = nullptr;
    kvq_sequence *want = nullptr, *have = nullptr;
    OK(kvq_cuda_cache_create(&o, nullptr, &gpu));
    OK(kvq_cache_create(&h, &cpu));
    OK(kvq_cuda_sequence_create(gpu, &one));
    OK(kvq_sequence_create(cpu, &want));
    test::rng r(5);
    std::vector<kvq::float16> x(100 * channels);
    test::device_buffer<kvq::float16> keys(x.size()), q(100 * queries * channels), out(100 * queries * width);
    q.upload(std::vector<kvq::float16>(q.size(), kvq::float16(0.0f)));
    const auto rows = [](const void* data, int n, int heads, int dims) {
        return kvq_tensor{const_cast<void*>(data), KVQ_FP16, n, heads, dims, 0, 0};
    };
    std::vector<double> sums(width, 0.0);
    int tokens = 0;
    for (int i = 0; i < 20; ++i) {
        const int n = i == 0 ? 100 : 1;
        for (kvq::float16& y : x) y = kvq::float16(test::normal(r));
        keys.upload(x);
        out.poison();
        OK(i == 0 ? kvq_cuda_cache_begin_prompt(gpu, one, n, nullptr)
                  : kvq_cuda_cache_begin_step(gpu, &one, 1, n, nullptr));
        const kvq_tensor k = rows(keys.get(), n, 1, channels), none = rows(keys.get(), 0, 1, channels),
                         own = rows(x.data(), n, 1, channels), nothing = rows(x.data(), 0, 1, channels),
                         asked = rows(q.get(), n, queries, channels), to = rows(out.get(), n, queries, width);
        if (i < 2) {  // refused before anything is appended
            kvq_cuda_attend_options softcap;
            KVQ_INIT(softcap);
            softcap.softcap = -30.0f;
            REFUSED(kvq_cuda_cache_prefill(gpu, 0, &k, &none, &asked, &to, &softcap, nullptr),
                    KVQ_ERROR_ARGUMENT, "softcap -30");
        }
        OK(kvq_cuda_cache_prefill(gpu, 0, &k, &none, &asked, &to, nullptr, nullptr));
        OK(kvq_sequence_append(want, 0, &own, &nothing));
        CUDA_OK(cudaDeviceSynchronize());
        tokens += n;
        for (int t = 0; t < n; ++t)
            for (int c = 0; c < width; ++c)
                sums[static_cast<std::size_t>(c)] +=
                    static_cast<double>(static_cast<float>(x[static_cast<std::size_t>(t * channels + c)]));
        const std::vector<kvq::float16> got = out.download();
        for (int c = 0; c < queries * width; ++c) {
            const double y = static_cast<double>(static_cast<float>(
                             got[static_cast<std::size_t>((n - 1) * queries * width + c)])),
                         mean = sums[static_cast<std::size_t>(c % width)] / tokens;
            CHECK(std::abs(y - mean) < tolerance, "%s: an output of latents is %g, not %g", formats, y, mean);
        }
    }
    if (quantizes) {
        OK(kvq_cuda_sequence_offload(one, cpu, nullptr, &have));
        kvq_page p[2][16];
        int count[2] = {}, quantized = 0;
        OK(kvq_sequence_get_pages(have, 0, p[0], 16, &count[0]));
        OK(kvq_sequence_get_pages(want, 0, p[1], 16, &count[1]));
        CHECK(count[0] == count[1], "%d pages of latents, the CPU has %d", count[0], count[1]);
        kvq_format* f = nullptr;
        OK(kvq_cache_get_format(cpu, KVQ_KEY, 1, &f));
        const kvq_page_shape shape = {KVQ_KEY, page, 1, channels, 0, 0};
        std::size_t bytes = 0;
        OK(kvq_format_page_bytes(f, &shape, &bytes, nullptr));
        for (int i = 0; i < count[0] && i < count[1]; ++i) {
            CHECK(p[0][i].values == p[0][i].keys && p[0][i].key_format == p[1][i].key_format,
                  "page %d of latents", i);
            if (p[0][i].key_format != 1) continue;
            ++quantized;
            CHECK(std::memcmp(p[0][i].keys, p[1][i].keys, bytes) == 0, "page %d of latents differs", i);
        }
        CHECK(quantized == 1, "%d pages of latents are quantized", quantized);
        OK(kvq_format_free(f));
        OK(kvq_sequence_free(have));
    }
    OK(kvq_cuda_sequence_free(one));
    OK(kvq_sequence_free(want));
    OK(kvq_cuda_cache_free(gpu));
    OK(kvq_cache_free(cpu));
    kvq_cuda_cache* made = nullptr;
    o.formats = "std4-fp16x16";
    REFUSED(kvq_cuda_cache_create(&o, nullptr, &made), KVQ_ERROR_ARGUMENT, "std4-fp16x16");
    o.formats = "fp16";
    const kvq_layer mixed[] = {list[0], {KVQ_FULL_ATTENTION, 2, 64, 0, 0, 0, 0}};
    o.layers = 2;
    o.layer_list = mixed;
    OK(kvq_cuda_cache_create(&o, nullptr, &made));
    OK(kvq_cuda_cache_free(made));
    o.layers = 1;
    o.page_tokens = 48;
    REFUSED(kvq_cuda_cache_create(&o, nullptr, &made), KVQ_ERROR_ARGUMENT, "KVQ_CUDA_LATENTS=64+16");
}

/// An index selects tokens for lists of the other layer: what the CPU selects, and its outputs.
void lists() {
    constexpr int best = 20, heads = 3, n = 150, page = 64;
    const kvq_layer list[] = {{KVQ_FULL_ATTENTION, kv_heads, dim, 0, 0, 0, 0},
                              {KVQ_INDEX, 1, dim, 0, 0, 0, 0}};
    kvq_cuda_cache_options o = device_options();
    kvq_cache_options h = host_options();
    o.layers = h.layers = 2;
    o.kv_heads = o.head_dim = h.kv_heads = h.head_dim = 0;
    o.page_tokens = h.page_tokens = page;
    o.formats = h.keys = h.values = "int8";
    o.layer_list = h.layer_list = list;
    o.listed_tokens = best;
    kvq_cuda_cache* gpu = nullptr;
    kvq_cache* cpu = nullptr;
    kvq_cuda_sequence* one = nullptr;
    kvq_sequence* want = nullptr;
    OK(kvq_cuda_cache_create(&o, nullptr, &gpu));
    OK(kvq_cache_create(&h, &cpu));
    OK(kvq_cuda_sequence_create(gpu, &one));
    OK(kvq_sequence_create(cpu, &want));
    test::rng r(61);
    const auto numbers = [&](std::size_t count) {
        std::vector<kvq::float16> x(count);
        for (kvq::float16& y : x) y = kvq::float16(test::normal(r));
        return x;
    };
    const auto rows = [](const void* data, int tokens, int of) {
        return kvq_tensor{const_cast<void*>(data), KVQ_FP16, tokens, of, dim, 0, 0};
    };
    const auto k = numbers(n * kv_heads * dim), v = numbers(n * kv_heads * dim), keys = numbers(n * dim),
               q = numbers(q_heads * dim);
    // Whole numbers up to 127, which the device rounds to themselves.
    std::vector<kvq::float16> index_q(heads * dim);
    for (std::size_t i = 0; i < index_q.size(); ++i)
        index_q[i] = kvq::float16(i % dim == 0 ? 127.0f : static_cast<float>(test::uniform(r, -127, 127)));
    const std::vector<float> weights{0.7f, -0.3f, 1.1f};
    const test::device_buffer<kvq::float16> kd(k), vd(v), kid(keys), qd(q), iqd(index_q);
    const test::device_buffer<float> wd(weights);
    test::device_buffer<int> positions(best);
    test::device_buffer<kvq::float16> out(q_heads * dim);
    const auto append = [&](int layer, const void* a, const void* b, const void* c, const void* d, int of) {
        const kvq_tensor x = rows(a, n, of), y = rows(b, layer == 0 ? n : 0, of), own = rows(c, n, of),
                         other = rows(d, layer == 0 ? n : 0, of);
        OK(kvq_cuda_cache_append(gpu, layer, &x, &y, nullptr));
        OK(kvq_sequence_append(want, layer, &own, &other));
    };
    OK(kvq_cuda_cache_begin_prompt(gpu, one, n, nullptr));
    append(1, kid.get(), kid.get(), keys.data(), keys.data(), 1);
    append(0, kd.get(), vd.get(), k.data(), v.data(), kv_heads);
    const kvq_tensor iq = rows(iqd.get(), 1, heads), own_iq = rows(index_q.data(), 1, heads),
                     queries = rows(qd.get(), 1, q_heads), own_q = rows(q.data(), 1, q_heads),
                     to = rows(out.get(), 1, q_heads);
    REFUSED(kvq_cuda_cache_select(gpu, 0, &iq, wd.get(), best, positions.get(), nullptr), KVQ_ERROR_ARGUMENT,
            "it is no index");
    OK(kvq_cuda_cache_select(gpu, 1, &iq, wd.get(), best, positions.get(), nullptr));
    std::vector<int> chosen(best);
    OK(kvq_sequence_select(want, 1, &own_iq, weights.data(), best, chosen.data(), nullptr));
    std::sort(chosen.begin(), chosen.end());
    CUDA_OK(cudaDeviceSynchronize());
    CHECK(positions.download() == chosen, "the index selects other tokens than the CPU's");
    kvq_cuda_attend_options a;
    KVQ_INIT(a);
    a.listed_tokens = positions.get();
    a.listed_count = best;
    REFUSED(kvq_cuda_cache_attend(gpu, 1, &iq, &iq, &a, nullptr), KVQ_ERROR_ARGUMENT, "values to attend to");
    OK(kvq_cuda_cache_attend(gpu, 0, &queries, &to, &a, nullptr));
    kvq_mods m;
    KVQ_INIT(m);
    m.listed_tokens = chosen.data();
    m.listed_count = best;
    m.list_queries = 1;
    kvq_attend_options how;
    KVQ_INIT(how);
    how.mods = &m;
    std::vector<float> expected(q_heads * dim);
    kvq_tensor own_out = rows(expected.data(), 1, q_heads);
    own_out.dtype = KVQ_FP32;
    OK(kvq_sequence_attend(want, 0, &own_q, &own_out, &how));
    CUDA_OK(cudaDeviceSynchronize());
    const std::vector<kvq::float16> got = out.download();
    double off = 0.0, size = 0.0;
    for (std::size_t i = 0; i < got.size(); ++i) {
        const double x = static_cast<double>(static_cast<float>(got[i])),
                     y = static_cast<double>(expected[i]);
        off += (x - y) * (x - y);
        size += y * y;
    }
    CHECK(std::sqrt(off / size) < 1e-3, "attention over lists is %g off", std::sqrt(off / size));
    a.softcap = 30.0f;
    REFUSED(kvq_cuda_cache_attend(gpu, 0, &queries, &to, &a, nullptr), KVQ_ERROR_ARGUMENT,
            "takes no softcap");
    KVQ_INIT(a);
    a.selected_tokens = best;
    REFUSED(kvq_cuda_cache_attend(gpu, 0, &queries, &to, &a, nullptr), KVQ_ERROR_ARGUMENT,
            "pages in int8 are not ranked, since their keys have parameters per token");
    a.selected_tokens = best + 1;
    REFUSED(kvq_cuda_cache_attend(gpu, 0, &queries, &to, &a, nullptr), KVQ_ERROR_ARGUMENT,
            "21 selected tokens, but 1 to listed_tokens, 20, can be");
    REFUSED(kvq_cuda_cache_fetch_ahead(gpu, 0, &queries, best, nullptr), KVQ_ERROR_ARGUMENT,
            "its pages are not in host memory");
    std::int64_t read = -1, fetched = -1;
    OK(kvq_cuda_cache_fetches(gpu, 0, &read, &fetched, nullptr));
    CHECK(read == 0 && fetched == 0, "%lld pages were read", static_cast<long long>(read));
    // A step is refused before it takes its tokens.
    const kvq_tensor new_k = rows(kd.get(), 1, kv_heads), new_v = rows(vd.get(), 1, kv_heads);
    OK(kvq_cuda_cache_begin_step(gpu, &one, 1, 1, nullptr));
    a.selected_tokens = best;
    REFUSED(kvq_cuda_cache_prefill(gpu, 0, &new_k, &new_v, &queries, &to, &a, nullptr), KVQ_ERROR_ARGUMENT,
            "pages in int8 are not ranked");
    a.selected_tokens = 0;
    OK(kvq_cuda_cache_prefill(gpu, 0, &new_k, &new_v, &queries, &to, &a, nullptr));
    o.resident_tokens = 64;
    kvq_cuda_cache* none = nullptr;
    REFUSED(kvq_cuda_cache_create(&o, nullptr, &none), KVQ_ERROR_ARGUMENT,
            "resident_tokens is 64: pages in host memory need");
    OK(kvq_cuda_sequence_free(one));
    OK(kvq_sequence_free(want));
    OK(kvq_cuda_cache_free(gpu));
    OK(kvq_cache_free(cpu));
}

/// State beside full attention: views, snapshots, trims, a fork, and the way to the CPU.
void layers_with_state() {
    const kvq_layer list[layers] = {{KVQ_STATE, 0, 0, 0, 0, 0, 0},
                                    {KVQ_FULL_ATTENTION, kv_heads, dim, 0, 0, 0, 0}};
    const kvq_state_part parts[] = {{"recurrent", 0, KVQ_FP32, 2, 3, 8, KVQ_SNAPSHOT_EXACT},
                                    {"convolution", 0, KVQ_BF16, 1, 1, 30, KVQ_SNAPSHOT_EXACT}};
    kvq_cuda_cache_options o = device_options();
    kvq_cache_options h = host_options();
    o.kv_heads = o.head_dim = h.kv_heads = h.head_dim = 0;
    o.layer_list = h.layer_list = list;
    o.state_parts = h.state_parts = parts;
    o.state_part_count = h.state_part_count = 2;
    o.snapshot_every = h.snapshot_every = 16;
    o.snapshot_prompt_end = KVQ_NONE;
    o.draft_tokens = 0;
    both c(o, h);
    kvq_cuda_sequence* s = nullptr;
    OK(kvq_cuda_sequence_create(c.gpu, &s));
    const kvq_tensor k = c.x.keys(10), v = c.x.values(10), q = c.x.queries(10), out = c.x.outputs(10);
    kvq_cuda_state_view view;
    KVQ_INIT(view);
    const auto write = [&](float value) {
        OK(kvq_cuda_cache_state(c.gpu, 0, 0, &view));
        int slot = -1;
        CUDA_OK(cudaStreamSynchronize(c.stream));
        CUDA_OK(cudaMemcpy(&slot, view.row_slots, sizeof(slot), cudaMemcpyDeviceToHost));
        const std::vector<float> values(48, value);
        CHECK(view.bytes == 48 * sizeof(float) && view.rows == 1 && slot >= 0, "a view of %zu bytes",
              view.bytes);
        CUDA_OK(cudaMemcpy(static_cast<char*>(view.data) + static_cast<std::size_t>(slot) * view.slot_bytes,
                           values.data(), view.bytes, cudaMemcpyHostToDevice));
    };
    const auto value = [&](kvq_cuda_sequence* of) {
        void* data = nullptr;
        std::size_t bytes = 0;
        float x = 0.0f;
        OK(kvq_cuda_sequence_state(of, 0, 0, &data, &bytes));
        CHECK(bytes == 48 * sizeof(float), "%zu bytes", bytes);
        if (data != nullptr) CUDA_OK(cudaMemcpy(&x, data, sizeof(x), cudaMemcpyDeviceToHost));
        return x;
    };
    for (int i = 1; i <= 3; ++i) {
        c.x.write(c.r);
        OK(kvq_cuda_cache_begin_prompt(c.gpu, s, 10, c.stream));
        write(static_cast<float>(i));
        OK(kvq_cuda_cache_append(c.gpu, 1, &k, &v, c.stream));
    }
    REFUSED(kvq_cuda_cache_state(c.gpu, 1, 0, &view), KVQ_ERROR_ARGUMENT, "it has no state");
    REFUSED(kvq_cuda_cache_prefill(c.gpu, 0, &k, &v, &q, &out, nullptr, c.stream), KVQ_ERROR_ARGUMENT,
            "layer 0 has a state: it holds no keys and values");
    int n = 0, reached = 0;
    kvq_snapshot marks[2];
    OK(kvq_cuda_sequence_get_snapshots(s, marks, 2, &n));
    CHECK(n == 1 && marks[0].tokens == 20, "%d snapshots", n);
    OK(kvq_cuda_sequence_snapshot(s));
    kvq_cuda_sequence* fork = nullptr;
    OK(kvq_cuda_sequence_fork(s, c.stream, &fork));
    kvq_cuda_cache_info info;
    KVQ_INIT(info);
    OK(kvq_cuda_cache_get_info(c.gpu, &info));
    // Two pages: that of snapshot 20, and that of 30, which both sequences hold.
    CHECK(info.state == 2 * view.slot_bytes && info.head_dim == dim && info.bytes == c.memory.bytes,
          "%zu bytes of state", info.state);
    OK(kvq_cuda_sequence_reach(s, 29, &reached));
    CHECK(reached == 20, "a trim to 29 reaches %d", reached);
    REFUSED(kvq_cuda_sequence_reach(s, 31, &reached), KVQ_ERROR_ARGUMENT, "the sequence holds 30");
    OK(kvq_cuda_sequence_trim(s, 29));
    OK(kvq_cuda_sequence_tokens(s, &n));
    CHECK(n == 20 && value(s) == 2.0f && value(fork) == 3.0f, "%d tokens, state %g", n,
          static_cast<double>(value(s)));
    kvq_sequence* moved = nullptr;
    OK(kvq_cuda_sequence_offload(s, c.cpu, c.stream, &moved));
    void* data = nullptr;
    std::size_t bytes = 0;
    OK(kvq_sequence_state(moved, 0, 0, &data, &bytes));
    CHECK(static_cast<const float*>(data)[47] == 2.0f, "state has other values on the CPU");
    OK(kvq_sequence_free(moved));
    OK(kvq_cuda_sequence_drop_snapshots(s));
    OK(kvq_cuda_sequence_get_snapshots(s, nullptr, 0, &n));
    CHECK(n == 0, "%d snapshots", n);
    OK(kvq_cuda_sequence_free(s));
    OK(kvq_cuda_sequence_free(fork));
    kvq_cuda_cache* made = nullptr;
    kvq_state_part rounded[] = {parts[0], parts[1]};
    rounded[0].snapshot = KVQ_SNAPSHOT_E4M3;
    o.state_parts = rounded;
    OK(kvq_cuda_cache_create(&o, nullptr, &made));
    OK(kvq_cuda_cache_free(made));
}

void variants() {
    {
        kvq_cuda_cache_options o = device_options();
        kvq_cache_options h = host_options();
        o.step_tokens = 5;
        both c(o, h);
        c.add();
        c.add();
        kvq_cuda_attend_options a;
        KVQ_INIT(a);
        a.scale = 0.2f;
        a.softcap = 3.0f;
        a.window = 50;
        kvq_mods mods;
        KVQ_INIT(mods);
        mods.scale = 0.2f;
        mods.softcap = 3.0f;
        mods.window = 50;
        kvq_attend_options b;
        KVQ_INIT(b);
        b.mods = &mods;
        c.prompt(0, 130, &a, &b);
        for (int i = 0; i < 4; ++i) c.step(5, -1, &a, &b);
        c.step(3);
        for (const int row : {0, 1}) c.same_bytes(row, "variants");
    }
    kvq_cuda_cache_options o = device_options();
    kvq_cache_options h = host_options();
    o.formats = "fp16";
    o.pool_tokens = 700;
    h.keys = "fp16";
    both c(o, h);
    c.add();
    c.prompt(0, 150);
    c.prompt(0, 90);
    for (int i = 0; i < 3; ++i) c.step(1);
    kvq_cuda_cache_info info;
    KVQ_INIT(info);
    OK(kvq_cuda_cache_get_info(c.gpu, &info));
    CHECK(info.quantized == 0 && info.sinks == 0 && info.unused > 0, "%zu bytes are quantized",
          info.quantized);
}

/// Keys of several widths, by a plan from statistics: a prompt in chunks, and steps between them.
void several_widths() {
    tokens x;
    test::rng r(5);
    x.write(r);
    for (std::size_t i = 0; i < x.k.size(); ++i)
        if (i % dim % 7 == 2) x.k[i] = kvq::float16(6.0f * static_cast<float>(x.k[i]));
    const kvq_tensor k = tensor_of(x.k.data(), room, kv_heads);
    kvq_statistics* sums = nullptr;
    OK(kvq_statistics_create(layers, kv_heads, dim, 0, &sums));
    for (int layer = 0; layer < layers; ++layer) OK(kvq_statistics_add_keys(sums, layer, &k));
    kvq_cuda_cache_options o = device_options();
    kvq_cache_options h = host_options();
    o.formats = h.keys = "mix4";
    o.statistics = h.statistics = sums;
    both c(o, h);
    c.add();
    c.add();
    for (const int n : {150, 33, 97}) c.prompt(0, n);
    c.prompt(1, 70);
    for (int i = 0; i < 3; ++i) c.step(1);
    c.prompt(1, 110);
    c.step(1);
    for (const int row : {0, 1}) c.same_bytes(row, "several widths");
    std::printf("several widths: worst error %.2g\n", c.worst);
    OK(kvq_statistics_free(sums));
}

/// ALiBi, with learned sinks beside it. Keys and values of different
/// formats. Pages of the default size on both sides.
void alibi() {
    kvq_cuda_cache_options o = device_options();
    kvq_cache_options h = host_options();
    o.page_tokens = h.page_tokens = 0;
    o.formats = "kivi-4-g64";
    o.alibi = 1;
    kvq_cuda_cache* none = nullptr;
    REFUSED(kvq_cuda_cache_create(&o, nullptr, &none), KVQ_ERROR_ARGUMENT,
            "kernels for int8/kivi-4-g64, none for kivi-4-g64; build it with KVQ_CUDA_ALIBI=kivi-4-g64");
    o.formats = "int8/affine-4-g64";  // these values have two names
    o.step_tokens = 40;
    h.keys = "int8";
    h.values = "kivi-4-g64";
    both c(o, h);
    c.add();
    c.add();
    const std::vector<float> slopes{0.5f, 0.25f, 0.02f, 0.0f}, logits{1.0f, -1.0f, 0.0f, 2.0f};
    const test::device_buffer<float> device_slopes(slopes), device_logits(logits),
        lse(static_cast<std::size_t>(room * q_heads));
    kvq_cuda_attend_options a;
    KVQ_INIT(a);
    a.alibi_slopes = device_slopes.get();
    kvq_mods mods;
    KVQ_INIT(mods);
    mods.alibi_slopes = slopes.data();
    mods.alibi_heads = q_heads;
    kvq_attend_options b;
    KVQ_INIT(b);
    b.mods = &mods;
    for (int i = 0; i < 5; ++i) c.step(40, -1, &a, &b);
    c.prompt(0, 70, &a, &b);
    for (int i = 0; i < 4; ++i) c.step(1, -1, &a, &b);
    a.sink_logits = device_logits.get();
    a.lse = lse.get();
    mods.sink_logits = logits.data();
    mods.sink_heads = q_heads;
    for (int i = 0; i < 4; ++i) c.step(1, -1, &a, &b);
    c.prompt(1, 30, &a, &b);
    for (const int row : {0, 1}) c.same_bytes(row, "ALiBi");
    kvq_cuda_cache_info info;
    KVQ_INIT(info);
    OK(kvq_cuda_cache_get_info(c.gpu, &info));
    CHECK(info.page_tokens == kvq::default_page_tokens && info.quantized > 0,
          "pages of %d, %zu bytes of them", info.page_tokens, info.quantized);

    const kvq_tensor k = c.x.keys(2), v = c.x.values(2), q = c.x.queries(2), out = c.x.outputs(2);
    OK(kvq_cuda_cache_begin_step(c.gpu, c.rows.data(), 2, 1, c.stream));
    a.lse = nullptr;
    REFUSED(kvq_cuda_cache_prefill(c.gpu, 0, &k, &v, &q, &out, &a, c.stream), KVQ_ERROR_HANDLE,
            "sink_logits needs options.lse");
    REFUSED(kvq_cuda_cache_prefill(c.gpu, 0, &k, &v, &q, &out, nullptr, c.stream), KVQ_ERROR_HANDLE,
            "alibi_slopes is NULL");
    a.sink_logits = nullptr;
    both plain;
    plain.add();
    OK(kvq_cuda_cache_begin_step(plain.gpu, plain.rows.data(), 1, 1, plain.stream));
    const kvq_tensor k1 = plain.x.keys(1), v1 = plain.x.values(1), q1 = plain.x.queries(1),
                     out1 = plain.x.outputs(1);
    REFUSED(kvq_cuda_cache_prefill(plain.gpu, 0, &k1, &v1, &q1, &out1, &a, plain.stream), KVQ_ERROR_ARGUMENT,
            "needs a cache with kernels for them");
}

/// A step that was captured is replayed while contexts grow.
void graphs() {
    kvq_cuda_cache_options o = device_options();
    o.pool_tokens = 300;
    o.pool_sequences = 1;
    both c(o, host_options());
    c.add();
    c.prompt(0, 100);
    const kvq_tensor k = c.x.keys(1), v = c.x.values(1), q = c.x.queries(1), out = c.x.outputs(1);
    c.step(1);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    OK(kvq_cuda_cache_begin_step(c.gpu, c.rows.data(), 1, 1, c.stream));
    std::uint64_t id = 0, now = 0;
    OK(kvq_cuda_cache_graph_id(c.gpu, &id));
    CUDA_OK(cudaStreamBeginCapture(c.stream, cudaStreamCaptureModeThreadLocal));
    for (int layer = 0; layer < layers; ++layer)
        OK(kvq_cuda_cache_prefill(c.gpu, layer, &k, &v, &q, &out, nullptr, c.stream));
    CUDA_OK(cudaStreamEndCapture(c.stream, &graph));
    CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 90; ++i) {
        if (i > 0) OK(kvq_cuda_cache_begin_step(c.gpu, c.rows.data(), 1, 1, c.stream));
        OK(kvq_cuda_cache_graph_id(c.gpu, &now));
        c.x.write(c.r);
        CHECK(now == id, "step %d needs another graph", i);
        CUDA_OK(cudaGraphLaunch(exec, c.stream));
        CUDA_OK(cudaStreamSynchronize(c.stream));
        // Both layers got the same tokens; the output is that of the last one.
        const kvq_tensor hk = c.x.host_rows(c.x.k, 0, 1, kv_heads), hv = c.x.host_rows(c.x.v, 0, 1, kv_heads);
        OK(kvq_sequence_append(c.host[0], 0, &hk, &hv));
        c.compare(0, 1, 0, 1, c.x.out.download(), true);
    }
    c.same_bytes(0, "graphs");
    CUDA_OK(cudaGraphExecDestroy(exec));
    CUDA_OK(cudaGraphDestroy(graph));
}

/// Relative error of the norm.
double error_of(const std::vector<kvq::float16>& got, int first_row, const std::vector<float>& want) {
    double error = 0.0, size = 0.0;
    for (std::size_t i = 0; i < want.size(); ++i) {
        const double a = static_cast<double>(want[i]),
                     b = static_cast<double>(
                         static_cast<float>(got[static_cast<std::size_t>(first_row) * q_heads * dim + i]));
        if (!(b == b)) return INFINITY;
        error += (a - b) * (a - b);
        size += a * a;
    }
    return std::sqrt(error / size);
}

/// Device memory with the contents of a list.
template <class T>
struct uploaded : test::device_buffer<T> {
    explicit uploaded(const std::vector<T>& x) : test::device_buffer<T>(x.size()) { this->upload(x); }
};

/// Pages in memory of the caller, without a cache: bytes and outputs of the CPU's sequences; bad input.
void pages_of_the_caller() {
    test::rng r{5};
    cudaStream_t const stream = nullptr;
    constexpr int sequences = 2, lengths[] = {180, 120}, committed[] = {2, 1}, page = 64, sinks = 4,
                  columns = 4, ring = 3, all = lengths[0] + lengths[1], added[] = {5, 3}, many = 8;
    kvq_cuda_kernels* kernels = nullptr;
    OK(kvq_cuda_kernels_find("kivi-4-g64,int8", dim, page, nullptr, &kernels));
    kvq_cache_options h = host_options();
    h.layers = 1;
    kvq_cache* cpu = nullptr;
    OK(kvq_cache_create(&h, &cpu));

    const auto random = [&](int tokens, int heads) {
        std::vector<kvq::float16> x(static_cast<std::size_t>(tokens * heads * dim));
        for (kvq::float16& y : x) y = kvq::float16(test::normal(r));
        return x;
    };
    const std::vector<kvq::float16> k = random(all, kv_heads), v = random(all, kv_heads),
                                    q = random(sequences, q_heads), k2 = random(many, kv_heads),
                                    v2 = random(many, kv_heads), q2 = random(many, q_heads);
    const uploaded<kvq::float16> dk(k), dv(v), dq(q), dk2(k2), dv2(v2), dq2(q2);
    const auto rows = [](const std::vector<kvq::float16>& x, int first, int n, int heads) {
        return tensor_of(x.data() + first * heads * dim, n, heads);
    };
    kvq_sequence* host[sequences];
    for (int s = 0, first = 0; s < sequences; first += lengths[s++]) {
        const kvq_tensor hk = rows(k, first, lengths[s], kv_heads), hv = rows(v, first, lengths[s], kv_heads);
        OK(kvq_sequence_create(cpu, &host[s]));
        OK(kvq_sequence_append(host[s], 0, &hk, &hv));
    }

    // Pools: page p of sequence s is page 4 s + p of the window; sinks are page s; quantized pages are 0, 1
    // and 2.
    const auto bytes_of = [&](const char* format, int tokens) {
        std::size_t keys = 0, values = 0;
        OK(kvq_cuda_kernels_page_bytes(kernels, format, tokens, kv_heads, &keys, &values));
        return std::pair(keys, values);
    };
    struct pool {
        uploaded<std::byte> keys, values;
        kvq_cuda_pages c;
        pool(const char* format, std::pair<std::size_t, std::size_t> bytes, int count, int tokens)
            : keys(std::vector<std::byte>(bytes.first * static_cast<std::size_t>(count))),
              values(std::vector<std::byte>(bytes.second * static_cast<std::size_t>(count))),
              c{} {
            c.format = format;
            c.keys = keys.get();
            c.values = values.get();
            c.page_tokens = tokens;
        }
    };
    pool window("fp16", bytes_of("fp16", 0), 8, 0), sink_pages("fp16", bytes_of("fp16", 16), 2, 16),
        kivi("kivi-4-g64", bytes_of("kivi-4-g64", 0), 3, 0), int8("int8", bytes_of("int8", 0), 1, 0);
    std::vector<std::int64_t> to_window, to_sinks;
    for (int s = 0; s < sequences; ++s)
        for (int t = 0; t < lengths[s]; ++t) {
            to_sinks.push_back(t < sinks ? s * 16 + t : -1);
            to_window.push_back(t < sinks ? -1 : s * 4 * page + t - sinks);
        }
    const uploaded<std::int64_t> window_slots(to_window), sink_slots(to_sinks);
    const kvq_tensor ck = tensor_of(dk.get(), all, kv_heads), cv = tensor_of(dv.get(), all, kv_heads);
    OK(kvq_cuda_pages_store(kernels, &window.c, &ck, &cv, window_slots.get(), stream));
    OK(kvq_cuda_pages_store(kernels, &sink_pages.c, &ck, &cv, sink_slots.get(), stream));
    const uploaded<std::int32_t> from({0, 1, 4, -1}), to({0, 1, 2, 0});
    const uploaded<std::uint32_t> not_finite({0});
    OK(kvq_cuda_pages_requantize(kernels, kv_heads, &window.c, from.get(), &kivi.c, to.get(), 4,
                                 not_finite.get(), stream));
    CUDA_OK(cudaStreamSynchronize(stream));
    CHECK(not_finite.download()[0] == 0, "NaN");
    // The bytes of the CPU's pages.
    const auto key_bytes = kivi.keys.download(), value_bytes = kivi.values.download();
    for (int s = 0, number = 0; s < sequences; ++s) {
        kvq_page p[8];
        int count = 0;
        OK(kvq_sequence_get_pages(host[s], 0, p, 8, &count));
        for (int i = 0, found = 0; i < count; ++i) {
            if (p[i].key_format == 0) continue;
            const auto [keys, values] = bytes_of("kivi-4-g64", 0);
            CHECK(std::memcmp(p[i].keys, key_bytes.data() + static_cast<std::size_t>(number) * keys, keys) ==
                          0 &&
                      std::memcmp(p[i].values, value_bytes.data() + static_cast<std::size_t>(number) * values,
                                  values) == 0,
                  "bytes of page %d of sequence %d", found, s);
            ++number;
            CHECK(++found <= committed[s], "sequence %d has more pages", s);
        }
    }

    // Tables.
    const uploaded<std::int32_t> tokens({lengths[0], lengths[1]}), behind({committed[0], committed[1]}),
        table({0, 1, -1, -1, 2, -1, -1, -1}), window_table({-1, -1, 2, -1, 5, -1}), sink_table({0, 1}),
        without_first({-1, 1, -1, -1, 2, -1, -1, -1}), first_alone({0, -1, -1, -1, -1, -1, -1, -1});
    kvq_cuda_part parts[] = {{kivi.c, table.get(), nullptr, nullptr},
                             {int8.c, first_alone.get(), nullptr, nullptr}};
    kvq_cuda_layer layer;
    KVQ_INIT(layer);
    layer.sequences = sequences;
    layer.kv_heads = kv_heads;
    layer.tokens = tokens.get();
    layer.committed = behind.get();
    layer.parts = parts;
    layer.part_count = 1;
    layer.columns = columns;
    layer.window = window.c;
    layer.window_table = window_table.get();
    layer.window_columns = ring;
    layer.sink_tokens = sinks;
    layer.sinks = sink_pages.c;
    layer.sink_table = sink_table.get();

    // Values, rounded once.
    {
        const uploaded<std::int32_t> quantized({committed[0] * page, committed[1] * page}),
            starts({0, committed[0] * page});
        test::device_buffer<kvq::float16> yk(static_cast<std::size_t>(3 * page * kv_heads * dim)),
            yv(yk.size());
        yk.poison();
        yv.poison();
        const kvq_tensor tk = tensor_of(yk.get(), 3 * page, kv_heads),
                         tv = tensor_of(yv.get(), 3 * page, kv_heads);
        OK(kvq_cuda_pages_dequantize(kernels, kv_heads, &parts[0], sequences, columns, quantized.get(), &tk,
                                     &tv, starts.get(), stream));
        CUDA_OK(cudaStreamSynchronize(stream));
        const std::vector<kvq::float16> got[] = {yk.download(), yv.download()};
        for (int s = 0, first = 0; s < sequences; first += committed[s++] * page)
            for (const kvq_role role : {KVQ_KEY, KVQ_VALUE}) {
                std::vector<kvq::float16> want(
                    static_cast<std::size_t>(committed[s] * page * kv_heads * dim));
                const kvq_tensor to_host = tensor_of(want.data(), committed[s] * page, kv_heads);
                OK(kvq_sequence_dequantize(host[s], 0, role, sinks, &to_host));
                CHECK(std::memcmp(want.data(), got[role].data() + first * kv_heads * dim,
                                  want.size() * sizeof(want[0])) == 0,
                      "dequantized values of sequence %d, role %d", s, role);
            }
    }

    // Attention.
    std::size_t bytes = 0;
    OK(kvq_cuda_kernels_workspace_bytes(kernels, q_heads, kv_heads, 1, &bytes));
    uploaded<std::byte> workspace{std::vector<std::byte>(bytes + 16)};
    test::device_buffer<kvq::float16> out(static_cast<std::size_t>(many * q_heads * dim));
    test::device_buffer<float> lse(static_cast<std::size_t>(many * q_heads));
    const float logits[q_heads] = {1.5f, -2.0f, 4.0f, 0.25f};
    const uploaded<float> device_logits(std::vector<float>(logits, logits + q_heads));
    kvq_cuda_attend_options options;
    KVQ_INIT(options);
    options.lse = lse.get();
    kvq_mods mods;
    KVQ_INIT(mods);
    kvq_attend_options host_call;
    KVQ_INIT(host_call);
    host_call.mods = &mods;
    const auto expect_attention = [&](const char* when) {
        const kvq_tensor tq = tensor_of(dq.get(), sequences, q_heads),
                         to_device = tensor_of(out.get(), sequences, q_heads);
        out.poison();
        OK(kvq_cuda_pages_attend(kernels, &layer, &tq, &to_device, &options, workspace.get(), bytes, stream));
        CUDA_OK(cudaStreamSynchronize(stream));
        const auto got = out.download();
        const auto sums = lse.download();
        for (int s = 0; s < sequences; ++s) {
            std::vector<float> want(q_heads * dim), want_sums(q_heads);
            const kvq_tensor hq = rows(q, s, 1, q_heads), ho = tensor_of(want.data(), 1, q_heads, KVQ_FP32);
            host_call.lse = want_sums.data();
            OK(kvq_sequence_attend(host[s], 0, &hq, &ho, &host_call));
            const double e = error_of(got, s, want);
            CHECK(e <= 2e-3, "%s, sequence %d: error %.3g", when, s, e);
            for (int i = 0; i < q_heads; ++i)
                CHECK(std::fabs(sums[static_cast<std::size_t>(s * q_heads + i)] -
                                want_sums[static_cast<std::size_t>(i)]) < 2e-3f,
                      "%s, sequence %d, head %d: log-sums %g and %g", when, s, i,
                      static_cast<double>(sums[static_cast<std::size_t>(s * q_heads + i)]),
                      static_cast<double>(want_sums[static_cast<std::size_t>(i)]));
        }
    };
    const auto expect_prefill = [&](const char* when) {
        const uploaded<std::int32_t> starts({0, added[0], many});
        const kvq_tensor tk = tensor_of(dk2.get(), many, kv_heads), tv = tensor_of(dv2.get(), many, kv_heads),
                         tq = tensor_of(dq2.get(), many, q_heads),
                         to_device = tensor_of(out.get(), many, q_heads);
        out.poison();
        std::size_t bytes = 0, of_all = 0;
        OK(kvq_cuda_pages_prefill_bytes(kernels, &layer, added[0], 1, &bytes));
        OK(kvq_cuda_pages_prefill_bytes(kernels, &layer, added[0], 0, &of_all));
        CHECK(bytes == 0 ? of_all == 0 : of_all > bytes, "%zu bytes for a head, %zu for all", bytes, of_all);
        const test::device_buffer<std::byte> space(bytes);
        OK(kvq_cuda_pages_prefill(kernels, &layer, &tk, &tv, &tq, &to_device, starts.get(), added[0],
                                  &options, space.get(), bytes, stream));
        CUDA_OK(cudaStreamSynchronize(stream));
        const auto got = out.download();
        host_call.lse = nullptr;
        for (int s = 0, first = 0; s < sequences; first += added[s++]) {
            kvq_sequence* fork = nullptr;
            OK(kvq_sequence_fork(host[s], &fork));
            std::vector<float> want(static_cast<std::size_t>(added[s] * q_heads * dim));
            const kvq_tensor hk = rows(k2, first, added[s], kv_heads),
                             hv = rows(v2, first, added[s], kv_heads),
                             hq = rows(q2, first, added[s], q_heads),
                             ho = tensor_of(want.data(), added[s], q_heads, KVQ_FP32);
            OK(kvq_sequence_prefill(fork, 0, &hk, &hv, &hq, &ho, &host_call));
            const double e = error_of(got, first, want);
            CHECK(e <= 3e-3, "%s, prefill of sequence %d: error %.3g", when, s, e);
            OK(kvq_sequence_free(fork));
        }
    };
    expect_attention("pages");
    expect_prefill("pages");
    options.sink_logits = device_logits.get();
    mods.sink_logits = logits;
    mods.sink_heads = q_heads;
    expect_attention("learned sinks");
    expect_prefill("learned sinks");
    options.sink_logits = nullptr;
    mods.sink_logits = nullptr;
    mods.sink_heads = 0;

    // A page in another format.
    const uploaded<std::int32_t> first({0});
    OK(kvq_cuda_pages_requantize(kernels, kv_heads, &kivi.c, first.get(), &int8.c, first.get(), 1, nullptr,
                                 stream));
    kvq_requantize_request request;
    KVQ_INIT(request);
    request.keys = request.values = "int8";
    request.last_token = sinks + page;
    OK(kvq_cache_requantize(cpu, host, 1, &request, nullptr));
    parts[0].table = without_first.get();
    layer.part_count = 2;
    expect_attention("two formats");
    expect_prefill("two formats");

    // Bad input.
    const kvq_tensor tq = tensor_of(dq.get(), sequences, q_heads),
                     to_device = tensor_of(out.get(), sequences, q_heads);
    const auto attend = [&](const kvq_cuda_layer& l) {
        return kvq_cuda_pages_attend(kernels, &l, &tq, &to_device, &options, workspace.get(), bytes, stream);
    };
    kvq_cuda_kernels* none = nullptr;
    REFUSED(kvq_cuda_kernels_find("std4", dim, page, nullptr, &none), KVQ_ERROR_ARGUMENT,
            "build it with KVQ_CUDA_FORMATS=std4");
    REFUSED(kvq_cuda_kernels_find("int8", 80, page, nullptr, &none), KVQ_ERROR_ARGUMENT,
            "none for 80 and 64; build it with KVQ_CUDA_HEAD_DIMS=80");
    REFUSED(kvq_cuda_kernels_find("int8", dim, 0, nullptr, &none), KVQ_ERROR_ARGUMENT,
            "none for 64 and 128; build it with KVQ_CUDA_PAGE_TOKENS=128");
    REFUSED(kvq_cuda_kernels_find("nvfp4", dim, 16, nullptr, &none), KVQ_ERROR_ARGUMENT,
            "none for 64 and 16; build it with KVQ_CUDA_PAGE_TOKENS=16 KVQ_CUDA_FORMATS=nvfp4");
    REFUSED(kvq_cuda_kernels_find("mla-656", dim, page, nullptr, &none), KVQ_ERROR_UNSUPPORTED,
            "mla-656 has no kernels for keys and values on a GPU: records of latents");
    REFUSED(kvq_cuda_kernels_find("fp8/nvfp4-v4", dim, page, nullptr, &none), KVQ_ERROR_UNSUPPORTED,
            "nvfp4-v4 has no kernels for keys and values on a GPU; kvq_convert_rows");
    REFUSED(kvq_cuda_kernels_find("q8_0", dim, page, nullptr, &none), KVQ_ERROR_UNSUPPORTED,
            "q8_0 has no kernels on a GPU but in C++");
    REFUSED(kvq_cuda_kernels_find(nullptr, dim, page, nullptr, &none), KVQ_ERROR_HANDLE, "formats is NULL");
    REFUSED(kvq_cuda_kernels_find("int8", dim, page, "fp32", &none), KVQ_ERROR_ARGUMENT,
            "neither fp16 nor bf16");
    std::size_t n = 0;
    REFUSED(kvq_cuda_kernels_page_bytes(kernels, "std4", 0, 2, &n, &n), KVQ_ERROR_ARGUMENT, "format is std4");
    REFUSED(kvq_cuda_kernels_page_bytes(kernels, "int8", 16, 2, &n, &n), KVQ_ERROR_ARGUMENT,
            "pages of 16 tokens");
    REFUSED(kvq_cuda_kernels_workspace_bytes(kernels, 3, 2, 1, &n), KVQ_ERROR_ARGUMENT, "3 query heads on 2");
    kvq_cuda_layer bad = layer;
    bad.tokens = nullptr;
    REFUSED(attend(bad), KVQ_ERROR_HANDLE, "layer.tokens is NULL");
    bad = layer;
    bad.window.keys = nullptr;
    REFUSED(attend(bad), KVQ_ERROR_HANDLE, "layer.window has no pages");
    bad = layer;
    bad.window.key_stride = 24;
    REFUSED(attend(bad), KVQ_ERROR_ARGUMENT, "16 bytes");
    bad = layer;
    bad.sequences = 0;
    REFUSED(attend(bad), KVQ_ERROR_ARGUMENT, "a layer of 0 sequences");
    bad = layer;
    bad.size = 4;
    REFUSED(attend(bad), KVQ_ERROR_STRUCT, "the size of layer is 4");
    const kvq_cuda_part twice[] = {parts[1], parts[1]};
    bad = layer;
    bad.parts = twice;
    REFUSED(attend(bad), KVQ_ERROR_ARGUMENT, "two parts of a layer have the format int8");
    options.sink_logits = device_logits.get();
    options.lse = nullptr;
    REFUSED(attend(layer), KVQ_ERROR_HANDLE, "sink_logits needs options.lse");
    REFUSED(kvq_cuda_pages_store(kernels, &kivi.c, &ck, &cv, window_slots.get(), stream), KVQ_ERROR_ARGUMENT,
            "kvq_cuda_pages_requantize quantizes");
    REFUSED(kvq_cuda_pages_requantize(kernels, kv_heads, &kivi.c, first.get(), &window.c, first.get(), 1,
                                      nullptr, stream),
            KVQ_ERROR_ARGUMENT, "kvq_cuda_pages_dequantize");
    for (kvq_sequence* s : host) OK(kvq_sequence_free(s));
    OK(kvq_cache_free(cpu));
    OK(kvq_cuda_kernels_free(kernels));
    REFUSED(kvq_cuda_kernels_free(kernels), KVQ_ERROR_HANDLE, "was freed");
}

/// vLLM's pages of fp8, [page][token][head], with scales of the tensors, to pages of int8 of another size and
/// back: the CPU's bytes; bad input.
void conversion_of_pages() {
    test::rng r{9};
    constexpr int heads = 3, sequences = 3, lengths[sequences] = {70, 0, 33}, small = 32, large = 64,
                  from_columns = 4, to_columns = 2, row = dim, count = 12;
    constexpr float scales[] = {0.5f, 2.0f};
    kvq_cuda_kernels *of_rows = nullptr, *of_codes = nullptr;
    OK(kvq_cuda_kernels_find("fp8", dim, small, nullptr, &of_rows));
    OK(kvq_cuda_kernels_find("int8", dim, large, nullptr, &of_codes));
    std::vector<std::int32_t> numbers(count);
    std::iota(numbers.begin(), numbers.end(), 0);
    std::shuffle(numbers.begin(), numbers.end(), r);
    const std::vector<std::int32_t> small_table(numbers.begin(), numbers.begin() + sequences * from_columns),
        large_table{4, 1, -1, -1, 2, -1};
    const uploaded<std::int32_t> from_table(small_table), to_table(large_table),
        tokens(std::vector<std::int32_t>(lengths, lengths + sequences));
    constexpr std::size_t page_bytes = std::size_t{small} * heads * row;
    std::vector<std::byte> bytes[2];
    for (auto& b : bytes) {
        b.resize(count * page_bytes);
        for (std::byte& x : b) x = static_cast<std::byte>(r() % 0x7fu | (r() & 0x80u));
    }
    const uploaded<std::byte> keys(bytes[0]), values(bytes[1]);
    const auto byte_at = [&](int v, int s, int t, int h) {
        const int page = small_table[static_cast<std::size_t>(s * from_columns + t / small)];
        return &bytes[v][static_cast<std::size_t>(page) * page_bytes +
                         static_cast<std::size_t>((t % small * heads + h) * row)];
    };
    // Pages of int8, and what they hold.
    std::size_t size[2];
    OK(kvq_cuda_kernels_page_bytes(of_codes, "int8", 0, heads, &size[0], &size[1]));
    std::vector<std::byte> want[2], back[2] = {bytes[0], bytes[1]};
    for (int v = 0; v < 2; ++v) {
        want[v].resize(5 * size[v]);
        const kvq::block_shape shape{v == 0 ? kvq::tensor::key : kvq::tensor::value, large, dim};
        for (int s = 0; s < sequences; ++s)
            for (int c = 0; c * large < lengths[s]; ++c)
                for (int h = 0; h < heads; ++h) {
                    std::vector<float> x(shape.values());
                    const int n = std::min(large, lengths[s] - c * large);
                    for (int t = 0; t < n; ++t)
                        for (int i = 0; i < dim; ++i)
                            x[static_cast<std::size_t>(t * dim + i)] =
                                scales[v] * kvq::e4m3::to_float(std::to_integer<std::uint8_t>(
                                                byte_at(v, s, c * large + t, h)[i]));
                    const int page = large_table[static_cast<std::size_t>(s * to_columns + c)];
                    const std::size_t block = kvq::int8{}.block_bytes(shape);
                    std::byte* const to = &want[v][static_cast<std::size_t>(page) * size[v] +
                                                   static_cast<std::size_t>(h) * block];
                    kvq::int8{}.quantize(shape, {0, h}, x.data(), to);
                    kvq::int8{}.dequantize(shape, {0, h}, to, x.data());
                    const kvq::token_rows rows(kvq::row_layout_named("fp8"), scales[v]);
                    std::vector<std::byte> codes(rows.block_bytes(shape));
                    rows.quantize(shape, {0, h}, x.data(), codes.data());
                    for (int t = 0; t < n; ++t)
                        std::copy_n(&codes[static_cast<std::size_t>(t * row)], row,
                                    back[v].data() + (byte_at(v, s, c * large + t, h) - bytes[v].data()));
                }
    }
    const uploaded<std::byte> coded_keys(std::vector<std::byte>(want[0].size())),
        coded_values(std::vector<std::byte>(want[1].size()));
    kvq_cuda_part rows{}, codes{};
    rows.table = from_table.get();
    rows.pages.format = "fp8";
    rows.pages.keys = keys.get();
    rows.pages.values = values.get();
    rows.pages.key_stride = rows.pages.value_stride = page_bytes;
    rows.pages.key_scale = scales[0];
    rows.pages.value_scale = scales[1];
    rows.pages.key_rows = rows.pages.value_rows = {heads * row, row, nullptr, 0, 0, 0};
    codes.table = to_table.get();
    codes.pages.format = "int8";
    codes.pages.keys = coded_keys.get();
    codes.pages.values = coded_values.get();
    std::size_t of_turn = 0, of_back = 0;
    OK(kvq_cuda_kernels_convert_bytes(of_codes, heads, 2, &of_turn));
    OK(kvq_cuda_kernels_convert_bytes(of_rows, heads, 100, &of_back));
    const uploaded<std::byte> workspace(std::vector<std::byte>(std::max(of_turn, of_back)));
    const auto there = [&](const kvq_cuda_part& from, const kvq_cuda_part& to, std::size_t space) {
        return kvq_cuda_pages_convert(of_rows, &from, from_columns, of_codes, &to, to_columns, heads,
                                      sequences, tokens.get(), workspace.get(), space, nullptr, nullptr);
    };
    OK(there(rows, codes, of_turn));
    CUDA_OK(cudaStreamSynchronize(nullptr));
    CHECK(coded_keys.download() == want[0] && coded_values.download() == want[1], "pages of int8");
    OK(kvq_cuda_pages_convert(of_codes, &codes, to_columns, of_rows, &rows, from_columns, heads, sequences,
                              tokens.get(), workspace.get(), of_back, nullptr, nullptr));
    CUDA_OK(cudaStreamSynchronize(nullptr));
    for (int v = 0; v < 2; ++v) {
        const auto got = (v == 0 ? keys : values).download();
        for (int s = 0; s < sequences; ++s)
            for (int t = 0; t < lengths[s] * heads; ++t) {
                const auto at = byte_at(v, s, t / heads, t % heads) - bytes[v].data();
                CHECK(std::memcmp(&got[static_cast<std::size_t>(at)], &back[v][static_cast<std::size_t>(at)],
                                  row) == 0,
                      "row %d of sequence %d", t, s);
            }
    }
    // Bad input.
    REFUSED(there(rows, codes, 100), KVQ_ERROR_ARGUMENT, "bytes of workspace");
    kvq_cuda_part bad = codes;
    bad.pages.key_scale = 2.0f;
    REFUSED(there(rows, bad, of_turn), KVQ_ERROR_ARGUMENT, "int8");
    bad.pages.key_scale = 0.0f;
    bad.pages.key_rows.token_stride = 64;
    REFUSED(there(rows, bad, of_turn), KVQ_ERROR_UNSUPPORTED, "but int8 of 64 channels has no strides");
    bad = codes;
    bad.first_page = to_table.get();
    REFUSED(there(rows, bad, of_turn), KVQ_ERROR_ARGUMENT, "first_page");
    bad = codes;
    bad.pages.format = "fp16";
    REFUSED(there(rows, bad, of_turn), KVQ_ERROR_ARGUMENT, "to has the window's type");
    bad = rows;
    bad.pages.format = "fp16";
    bad.pages.page_tokens = 16;
    REFUSED(there(bad, codes, of_turn), KVQ_ERROR_ARGUMENT, "pages of 16 tokens, not of");
    bad = rows;
    bad.pages.value_rows.head_stride = 24;
    REFUSED(there(bad, codes, of_turn), KVQ_ERROR_ARGUMENT, "multiples of 16");
    const uploaded<std::int32_t> one({0});
    kvq_cuda_pages window{};
    window.keys = window.values = keys.get();
    window.format = "fp16";
    REFUSED(kvq_cuda_pages_requantize(of_rows, heads, &window, one.get(), &rows.pages, one.get(), 1, nullptr,
                                      nullptr),
            KVQ_ERROR_UNSUPPORTED, "kvq_cuda_pages_convert requantizes such pages");
    OK(kvq_cuda_kernels_free(of_rows));
    OK(kvq_cuda_kernels_free(of_codes));
}

/// An engine's pages, [token][head] with gaps, in place: attention and prompts against double, and what is
/// dequantized. K and V have strides of their own; values of nvfp4 have a tensor of scales.
void strided_pages(const char* format) {
    test::rng r{10};
    const bool fours = std::strcmp(format, "fp8") != 0;  // values
    constexpr int heads = 3, group = 2, queries = heads * group, sequences = 3,
                  lengths[sequences] = {70, 0, 33}, page = 32, columns = 3, row = dim, added[] = {3, 2, 0},
                  many = 5, pages = sequences * columns;
    constexpr float scales[] = {0.5f, 2.0f};
    const std::size_t row_bytes[] = {row, static_cast<std::size_t>(fours ? row / 2 : row)};
    const std::size_t head_bytes[] = {row + 16, row_bytes[1]},
                      token_bytes[] = {heads * head_bytes[0] + 32, heads * head_bytes[1] + 16};
    constexpr std::size_t of_head = 8, of_token = heads * of_head + 4, of_page = page * of_token + 16;
    constexpr float e2m1[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    kvq_cuda_kernels* kernels = nullptr;
    OK(kvq_cuda_kernels_find(format, dim, page, nullptr, &kernels));
    std::vector<std::int32_t> table(pages);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), r);
    // NaN wherever there is no token.
    std::vector<std::byte> bytes[2];
    std::vector<double> numbers[2];  // [sequence][columns * page][head][dim]
    std::vector<std::byte> of_values_scales(pages * of_page, std::byte{0x7f});
    for (int v = 0; v < 2; ++v) {
        bytes[v].assign(pages * page * token_bytes[v], std::byte{0x7f});
        numbers[v].resize(static_cast<std::size_t>(pages * page * heads * dim));
        for (int s = 0; s < sequences; ++s)
            for (int i = 0; i < lengths[s] * heads * dim; ++i) {
                const int t = i / dim / heads, p = table[static_cast<std::size_t>(s * columns + t / page)];
                const int head = i / dim % heads, channel = i % dim;
                const auto code = static_cast<std::uint8_t>(r() % 0x50u | (r() & 0x80u));
                std::byte* const at =
                    &bytes[v][static_cast<std::size_t>(p * page + t % page) * token_bytes[v] +
                              static_cast<std::size_t>(head) * head_bytes[v]];
                float number = kvq::e4m3::to_float(code);
                if (v == 0 || !fours) {
                    at[channel] = std::byte{code};
                } else {
                    std::byte& scale = of_values_scales[static_cast<std::size_t>(p) * of_page +
                                                        static_cast<std::size_t>(t % page) * of_token +
                                                        static_cast<std::size_t>(head) * of_head +
                                                        static_cast<std::size_t>(channel / 16)];
                    if (channel % 16 == 0) scale = std::byte(r() % 0x50u);
                    const unsigned shift = channel % 2 * 4u;
                    at[channel / 2] =
                        at[channel / 2] & std::byte(0xf0u >> shift) | std::byte((code & 15u) << shift);
                    number = e2m1[code & 7u] * ((code & 8u) != 0 ? -1.0f : 1.0f) *
                             kvq::e4m3::to_float(static_cast<std::uint8_t>(scale));
                }
                numbers[v][static_cast<std::size_t>(s * columns * page * heads * dim + i)] =
                    static_cast<double>(scales[v] * number);
            }
    }
    uploaded<std::byte> keys(bytes[0]), values(bytes[1]), value_scales(of_values_scales);
    const uploaded<std::int32_t> tables(table), committed({3, 0, 2}),
        tokens(std::vector<std::int32_t>(lengths, lengths + sequences));
    kvq_cuda_part part{};
    part.table = tables.get();
    part.pages.format = format;
    part.pages.keys = keys.get();
    part.pages.values = values.get();
    part.pages.key_stride = page * token_bytes[0];
    part.pages.value_stride = page * token_bytes[1];
    part.pages.key_scale = scales[0];
    part.pages.value_scale = scales[1];
    part.pages.key_rows = {token_bytes[0], head_bytes[0], nullptr, 0, 0, 0};
    part.pages.value_rows = {token_bytes[1], head_bytes[1], nullptr, 0, 0, 0};
    if (fours) {
        kvq_cuda_rows& v = part.pages.value_rows;
        v.scales = value_scales.get();
        v.scale_page_stride = of_page;
        v.scale_token_stride = of_token;
        v.scale_head_stride = of_head;
    }
    kvq_cuda_layer layer;
    KVQ_INIT(layer);
    layer.sequences = sequences;
    layer.kv_heads = heads;
    layer.tokens = tokens.get();
    layer.committed = committed.get();
    layer.parts = &part;
    layer.part_count = 1;
    layer.columns = columns;
    layer.window.keys = layer.window.values = keys.get();  // it has no pages
    layer.window_table = tables.get();
    layer.window_columns = 1;

    const auto random = [&](int rows, int of) {
        std::vector<kvq::float16> x(static_cast<std::size_t>(rows * of * dim));
        for (kvq::float16& y : x) y = kvq::float16(0.3f * test::normal(r));
        return x;
    };
    const std::vector<kvq::float16> q = random(many, queries), k = random(many, heads),
                                    v = random(many, heads);
    const uploaded<kvq::float16> dq(q), dk(k), dv(v);
    test::device_buffer<kvq::float16> out(static_cast<std::size_t>(many * queries * dim));
    // Row `row_number` of q, at position `position` of a sequence whose new tokens begin with row `first`.
    const auto error_of_row = [&](const std::vector<kvq::float16>& got, int s, int row_number, int position,
                                  int first) {
        double error = 0.0, size = 0.0;
        for (int h = 0; h < queries; ++h) {
            std::vector<double> weights, sums(dim);
            const auto number = [&](int role, int t, int c) {
                const auto at = static_cast<std::size_t>(h / group * dim + c);
                if (t < lengths[s])
                    return numbers[role]
                                  [static_cast<std::size_t>((s * columns * page + t) * heads * dim) + at];
                return static_cast<double>(static_cast<float>(
                    (role == 0 ? k
                               : v)[static_cast<std::size_t>((first + t - lengths[s]) * heads * dim) + at]));
            };
            const auto at = static_cast<std::size_t>((row_number * queries + h) * dim);
            double sum = 0.0;
            for (int t = 0; t <= position; ++t) {
                double score = 0.0;
                for (int c = 0; c < dim; ++c)
                    score += static_cast<double>(static_cast<float>(q[at + static_cast<std::size_t>(c)])) *
                             number(0, t, c);
                const double w = std::exp(score / std::sqrt(static_cast<double>(dim)));
                sum += w;
                for (int c = 0; c < dim; ++c) sums[static_cast<std::size_t>(c)] += w * number(1, t, c);
            }
            for (int c = 0; c < dim; ++c) {
                const double want = sum > 0.0 ? sums[static_cast<std::size_t>(c)] / sum : 0.0,
                             have = static_cast<double>(
                                 static_cast<float>(got[at + static_cast<std::size_t>(c)]));
                error += have == have ? (have - want) * (have - want) : INFINITY;
                size += want * want;
            }
        }
        return size > 0.0 ? std::sqrt(error / size) : std::sqrt(error);
    };
    std::size_t bytes_of_workspace = 0, of_tiles = 0;
    OK(kvq_cuda_kernels_workspace_bytes(kernels, queries, heads, 1, &bytes_of_workspace));
    const uploaded<std::byte> workspace{std::vector<std::byte>(bytes_of_workspace + 16)};
    const kvq_tensor tq = tensor_of(dq.get(), sequences, queries),
                     to = tensor_of(out.get(), sequences, queries), tk = tensor_of(dk.get(), many, heads),
                     tv = tensor_of(dv.get(), many, heads);
    const auto attend = [&] {
        out.poison();
        return kvq_cuda_pages_attend(kernels, &layer, &tq, &to, nullptr, workspace.get(), bytes_of_workspace,
                                     nullptr);
    };
    const auto check_all = [&](const char* what, int own_columns) {
        OK(attend());
        CUDA_OK(cudaStreamSynchronize(nullptr));
        std::vector<kvq::float16> got = out.download();
        for (int s = 0; s < sequences; ++s) {
            const double e = error_of_row(got, s, s, lengths[s] - 1, 0);
            CHECK(e <= 2e-3, "%s, sequence %d: error %.3g", what, s, e);
        }
        const uploaded<std::int32_t> starts({0, added[0], added[0] + added[1], many});
        const kvq_tensor tq2 = tensor_of(dq.get(), many, queries), to2 = tensor_of(out.get(), many, queries);
        layer.columns = 10000;
        std::size_t of_tables = 0;
        OK(kvq_cuda_pages_prefill_bytes(kernels, &layer, added[0], 0, &of_tables));
        layer.most_tokens = lengths[0];
        OK(kvq_cuda_pages_prefill_bytes(kernels, &layer, added[0], 0, &of_tiles));
        CHECK(of_tables == 0 ? of_tiles == 0 : of_tables > 15 * of_tiles,
              "%zu bytes for a prompt, %zu for tables", of_tiles, of_tables);
        layer.columns = own_columns;
        const test::device_buffer<std::byte> tiles(of_tiles);
        for (const std::size_t memory : {std::size_t{0}, of_tiles}) {
            out.poison();
            OK(kvq_cuda_pages_prefill(kernels, &layer, &tk, &tv, &tq2, &to2, starts.get(), added[0], nullptr,
                                      memory == 0 ? nullptr : tiles.get(), memory, nullptr));
            CUDA_OK(cudaStreamSynchronize(nullptr));
            got = out.download();
            for (int s = 0, first = 0; s < sequences; first += added[s++])
                for (int i = 0; i < added[s]; ++i) {
                    const double e = error_of_row(got, s, first + i, lengths[s] + i, first);
                    CHECK(e <= 2e-3, "%s, a prompt with %zu bytes, sequence %d: error %.3g", what, memory, s,
                          e);
                }
        }
        const int rows = lengths[0] + lengths[2];
        test::device_buffer<kvq::float16> of_keys(static_cast<std::size_t>(rows * heads * dim)),
            of_values(of_keys.size());
        const uploaded<std::int32_t> first_rows({0, lengths[0], lengths[0]});
        const kvq_tensor to_keys = tensor_of(of_keys.get(), rows, heads),
                         to_values = tensor_of(of_values.get(), rows, heads);
        OK(kvq_cuda_pages_dequantize(kernels, heads, &part, sequences, own_columns, tokens.get(), &to_keys,
                                     &to_values, first_rows.get(), nullptr));
        CUDA_OK(cudaStreamSynchronize(nullptr));
        for (int role = 0; role < 2; ++role) {
            const auto read = (role == 0 ? of_keys : of_values).download();
            std::size_t wrong = 0;
            for (int s = 0, first = 0; s < sequences; first += lengths[s++])
                for (int i = 0; i < lengths[s] * heads * dim; ++i)
                    wrong += static_cast<double>(static_cast<float>(
                                 read[static_cast<std::size_t>(first * heads * dim + i)])) !=
                             numbers[role][static_cast<std::size_t>(s * columns * page * heads * dim + i)];
            CHECK(wrong == 0, "%s: %zu numbers of role %d differ", what, wrong, role);
        }
    };
    check_all("strided pages", columns);
    if (!fours) {  // the same tokens in pages of one
        std::vector<std::int32_t> singles(pages * page);
        for (int i = 0; i < pages * page; ++i)
            singles[static_cast<std::size_t>(i)] =
                table[static_cast<std::size_t>(i / page)] * page + i % page;
        const uploaded<std::int32_t> of_tokens(singles);
        const kvq_cuda_part whole = part;
        part.table = of_tokens.get();
        part.pages.page_tokens = 1;
        part.pages.key_stride = token_bytes[0];
        part.pages.value_stride = token_bytes[1];
        layer.columns = columns * page;
        layer.most_tokens = 0;
        check_all("pages of one token", columns * page);
        layer.sink_tokens = 1;
        layer.sinks = layer.window;
        layer.sink_table = tables.get();
        std::size_t any = 0;
        REFUSED(kvq_cuda_pages_prefill_bytes(kernels, &layer, 1, 0, &any), KVQ_ERROR_ARGUMENT,
                "pages of 1 token hold all of a sequence, but there are 1 parts and 1 sinks");
        layer.sink_tokens = 0;
        part.pages.value_rows.token_stride = part.pages.value_rows.head_stride = 0;
        REFUSED(kvq_cuda_pages_prefill_bytes(kernels, &layer, 1, 0, &any), KVQ_ERROR_UNSUPPORTED,
                "with key_rows and value_rows");
        part.pages.key_stride = 0;
        REFUSED(kvq_cuda_pages_prefill_bytes(kernels, &layer, 1, 0, &any), KVQ_ERROR_ARGUMENT,
                "pages of 1 token need key_stride");
        part = whole;
        layer.columns = columns;
    }

    // New tokens in the engine's bytes: those of write_rows(), of numbers that are not finite as well, and no
    // other byte.
    std::vector<kvq::float16> new_keys = random(many, heads), new_values = random(many, heads);
    for (std::vector<kvq::float16>* const x : {&new_keys, &new_values})
        for (const float y : {NAN, INFINITY, -INFINITY, 6e4f, -1e-7f, 0.0f})
            (*x)[r() % x->size()] = kvq::float16(y);
    const uploaded<kvq::float16> stored_keys(new_keys), stored_values(new_values);
    const std::vector<std::int64_t> to_slots = {page - 1, 3 * page + 5, -1, pages * page - 1, 4 * page};
    const uploaded<std::int64_t> device_slots(to_slots);
    const kvq_tensor sk = tensor_of(stored_keys.get(), many, heads),
                     sv = tensor_of(stored_values.get(), many, heads);
    const auto check_store = [&](const char* what, const kvq_cuda_pages& to_pages, bool dense) {
        keys.upload(bytes[0]);
        values.upload(bytes[1]);
        value_scales.upload(of_values_scales);
        std::vector<std::byte> want[] = {bytes[0], bytes[1]}, want_scales = of_values_scales;
        kvq::workspace space;
        for (int role = 0; role < 2; ++role) {
            const bool beside = role == 1 && fours;
            const kvq::row_layout& layout = kvq::row_layout_named(beside ? "nvfp4" : "fp8");
            kvq::rows_view rows{.rows = kvq::make_format<kvq::scalar>(kvq::token_rows(layout, scales[role])),
                                .data = want[role].data(),
                                .token_stride = static_cast<std::ptrdiff_t>(token_bytes[role]),
                                .head_stride = static_cast<std::ptrdiff_t>(head_bytes[role]),
                                .block_stride = static_cast<std::ptrdiff_t>(page * token_bytes[role]),
                                .scales = beside ? want_scales.data() : nullptr,
                                .scale_token_stride = of_token,
                                .scale_head_stride = of_head,
                                .scale_block_stride = of_page};
            if (dense) {
                const std::size_t of_scales = beside ? row / 16 : 0;
                rows.token_stride = static_cast<std::ptrdiff_t>(row_bytes[role]);
                rows.head_stride = static_cast<std::ptrdiff_t>(page * (row_bytes[role] + of_scales));
                rows.scales = beside ? want[role].data() + page * row_bytes[role] : nullptr;
                rows.scale_token_stride = static_cast<std::ptrdiff_t>(of_scales);
                rows.scale_head_stride = rows.head_stride;
                rows.scale_block_stride = rows.block_stride;
            }
            for (int i = 0; i < many; ++i) {
                const auto slot = static_cast<int>(to_slots[static_cast<std::size_t>(i)]);
                if (slot < 0) continue;
                const std::int32_t number = slot / page;
                kvq::write_rows(rows, {&number, 1, page, pages}, slot % page,
                                kvq::input_view((role == 0 ? new_keys : new_values).data() + i * heads * dim,
                                                1, heads, dim),
                                space);
            }
        }
        OK(kvq_cuda_pages_store(kernels, &to_pages, &sk, &sv, device_slots.get(), nullptr));
        CUDA_OK(cudaStreamSynchronize(nullptr));
        for (int role = 0; role < 2; ++role) {
            const auto got = (role == 0 ? keys : values).download();
            CHECK(want[role] != bytes[role] && got == want[role], "%s: bytes of role %d", what, role);
        }
        CHECK(value_scales.download() == want_scales, "%s: scales", what);
    };
    check_store("stored in strided pages", part.pages, false);
    {
        kvq_cuda_pages as = part.pages;
        as.key_rows = as.value_rows = {};
        check_store("stored in pages of kvq", as, true);
        as = part.pages;
        as.page_tokens = 1;
        as.key_stride = token_bytes[0];
        as.value_stride = token_bytes[1];
        if (!fours) check_store("stored in pages of one token", as, false);
        as.value_rows = {};
        REFUSED(kvq_cuda_pages_store(kernels, &as, &sk, &sv, device_slots.get(), nullptr),
                KVQ_ERROR_UNSUPPORTED, "with key_rows and value_rows");
        as = part.pages;
        as.key_rows.head_stride = 24;
        REFUSED(kvq_cuda_pages_store(kernels, &as, &sk, &sv, device_slots.get(), nullptr), KVQ_ERROR_ARGUMENT,
                "multiples of 16");
        as = part.pages;
        as.key_stride = 0;  // not of these strides
        REFUSED(kvq_cuda_pages_store(kernels, &as, &sk, &sv, device_slots.get(), nullptr), KVQ_ERROR_ARGUMENT,
                "pages of keys that are 6144 bytes apart share bytes");
        kvq_cuda_pages dense = part.pages;
        dense.key_rows = dense.value_rows = {};
        as = dense;
        as.page_tokens = 1;
        REFUSED(kvq_cuda_pages_requantize(kernels, heads, &as, table.data(), &dense, table.data(), 1, nullptr,
                                          nullptr),
                KVQ_ERROR_UNSUPPORTED, "from has pages of 1 token, not of 32");
        REFUSED(kvq_cuda_pages_requantize(kernels, heads, &dense, table.data(), &as, table.data(), 1, nullptr,
                                          nullptr),
                KVQ_ERROR_UNSUPPORTED, "to has pages of 1 token");
        const kvq_tensor one_less = tensor_of(stored_keys.get(), many, heads - 1);
        REFUSED(kvq_cuda_pages_store(kernels, &part.pages, &one_less, &sv, device_slots.get(), nullptr),
                KVQ_ERROR_ARGUMENT, "but the cache holds");
    }

    // Bad input.
    layer.most_tokens = -1;
    REFUSED(kvq_cuda_pages_prefill_bytes(kernels, &layer, 1, 0, &of_tiles), KVQ_ERROR_ARGUMENT,
            "layer.most_tokens is -1");
    layer.window.key_rows.token_stride = row;
    REFUSED(attend(), KVQ_ERROR_UNSUPPORTED, "layer.window has tokens 64");
    layer.window.key_rows.token_stride = 0;
    kvq_cuda_pages fp16{};
    fp16.keys = fp16.values = out.get();
    fp16.value_rows.token_stride = row;
    REFUSED(
        kvq_cuda_pages_store(kernels, &fp16, &tk, &tv, reinterpret_cast<const int64_t*>(out.get()), nullptr),
        KVQ_ERROR_UNSUPPORTED, "to has tokens 64");
    part.pages.key_rows.scales = keys.get();
    REFUSED(attend(), KVQ_ERROR_ARGUMENT, "rows of keys have 0 bytes of scales beside them");
    part.pages.key_rows.token_stride = 0;
    REFUSED(attend(), KVQ_ERROR_ARGUMENT, "but no stride of tokens");
    part.pages.key_rows = {24, 0, nullptr, 0, 0, 0};
    REFUSED(attend(), KVQ_ERROR_ARGUMENT, "multiples of 16");
    part.pages.key_rows = {token_bytes[0], head_bytes[0], nullptr, 0, 0, 0};
    if (fours) {
        part.pages.value_rows.scales = nullptr;
        REFUSED(attend(), KVQ_ERROR_ARGUMENT, "rows of values have 4 bytes of scales beside them");
    }
    OK(kvq_cuda_kernels_free(kernels));
    OK(kvq_cuda_kernels_find("int8", dim, 64, nullptr, &kernels));
    part.pages.format = "int8";
    part.pages.key_scale = part.pages.value_scale = 0.0f;
    REFUSED(attend(), KVQ_ERROR_UNSUPPORTED, "but int8 of 64 channels has no strides");
    OK(kvq_cuda_kernels_free(kernels));
}

/// Pages whose signs depend on the layer: those of the second layer are the CPU's, and no other layer's.
void pages_with_signs() {
    test::rng r{6};
    cudaStream_t const stream = nullptr;
    constexpr int page = 64, length = 2 * page, many = 5;
    kvq_cuda_kernels* kernels = nullptr;
    OK(kvq_cuda_kernels_find("std4-h", dim, page, nullptr, &kernels));
    kvq_cache_options h = host_options();
    h.keys = "std4-h";
    h.sinks = h.recent = h.rollback = KVQ_NONE;
    kvq_cache* cpu = nullptr;
    kvq_sequence* host = nullptr;
    OK(kvq_cache_create(&h, &cpu));
    OK(kvq_sequence_create(cpu, &host));
    const auto random = [&](int tokens, int heads) {
        std::vector<kvq::float16> x(static_cast<std::size_t>(tokens * heads * dim));
        for (kvq::float16& y : x) y = kvq::float16(test::normal(r));
        return x;
    };
    const std::vector<kvq::float16> k = random(length, kv_heads), v = random(length, kv_heads),
                                    q = random(1, q_heads), k2 = random(many, kv_heads),
                                    v2 = random(many, kv_heads), q2 = random(many, q_heads);
    const uploaded<kvq::float16> dk(k), dv(v), dq(q), dk2(k2), dv2(v2), dq2(q2);
    const kvq_tensor hk = tensor_of(k.data(), length, kv_heads), hv = tensor_of(v.data(), length, kv_heads);
    for (int layer = 0; layer < layers; ++layer) OK(kvq_sequence_append(host, layer, &hk, &hv));

    std::size_t keys = 0, values = 0, window_keys = 0, window_values = 0, bytes = 0;
    OK(kvq_cuda_kernels_page_bytes(kernels, "std4-h", 0, kv_heads, &keys, &values));
    OK(kvq_cuda_kernels_page_bytes(kernels, "fp16", 0, kv_heads, &window_keys, &window_values));
    const uploaded<std::byte> coded_keys(std::vector<std::byte>(2 * keys)),
        coded_values(std::vector<std::byte>(2 * values)), plain_keys(std::vector<std::byte>(2 * window_keys)),
        plain_values(std::vector<std::byte>(2 * window_values));
    kvq_cuda_pages coded{}, plain{};
    coded.format = "std4-h";
    coded.keys = coded_keys.get();
    coded.values = coded_values.get();
    plain.format = "fp16";
    plain.keys = plain_keys.get();
    plain.values = plain_values.get();
    std::vector<std::int64_t> slots(length);
    for (int t = 0; t < length; ++t) slots[static_cast<std::size_t>(t)] = t;
    const uploaded<std::int64_t> all(slots);
    const uploaded<std::int32_t> both_pages({0, 1}), tokens({length}), committed({2}), zero({0});
    const kvq_tensor tk = tensor_of(dk.get(), length, kv_heads), tv = tensor_of(dv.get(), length, kv_heads);
    OK(kvq_cuda_pages_store(kernels, &plain, &tk, &tv, all.get(), stream));
    const auto quantize = [&] {
        return kvq_cuda_pages_requantize(kernels, kv_heads, &plain, both_pages.get(), &coded,
                                         both_pages.get(), 2, nullptr, stream);
    };
    REFUSED(quantize(), KVQ_ERROR_ARGUMENT,
            "to has layer 0: signs of std4-h depend on the layer of the model, counted from 1");
    coded.layer = 2;
    OK(quantize());
    CUDA_OK(cudaStreamSynchronize(stream));
    const auto same = [&](int layer) {
        const auto got_keys = coded_keys.download(), got_values = coded_values.download();
        kvq_page p[4];
        int count = 0;
        OK(kvq_sequence_get_pages(host, layer, p, 4, &count));
        CHECK(count == 2, "%d pages", count);
        bool equal = true;
        for (std::size_t i = 0; i < 2; ++i)
            equal = equal && std::memcmp(p[i].keys, got_keys.data() + i * keys, keys) == 0 &&
                    std::memcmp(p[i].values, got_values.data() + i * values, values) == 0;
        return equal;
    };
    CHECK(same(1), "the bytes of layer 2 are not the CPU's");
    CHECK(!same(0), "layers 1 and 2 have the same signs");

    kvq_cuda_part part{coded, both_pages.get(), nullptr, nullptr};
    test::device_buffer<kvq::float16> yk(k.size()), yv(v.size()),
        out(static_cast<std::size_t>(many * q_heads * dim));
    const kvq_tensor to_k = tensor_of(yk.get(), length, kv_heads),
                     to_v = tensor_of(yv.get(), length, kv_heads);
    OK(kvq_cuda_pages_dequantize(kernels, kv_heads, &part, 1, 2, tokens.get(), &to_k, &to_v, zero.get(),
                                 stream));
    CUDA_OK(cudaStreamSynchronize(stream));
    const std::vector<kvq::float16> got[] = {yk.download(), yv.download()};
    for (const kvq_role role : {KVQ_KEY, KVQ_VALUE}) {
        std::vector<kvq::float16> want(k.size());
        const kvq_tensor to_host = tensor_of(want.data(), length, kv_heads);
        OK(kvq_sequence_dequantize(host, 1, role, 0, &to_host));
        double error = 0.0, size = 0.0;
        for (std::size_t i = 0; i < want.size(); ++i) {
            const double a = static_cast<double>(static_cast<float>(want[i]));
            const double e = a - static_cast<double>(static_cast<float>(got[role][i]));
            error += e * e;
            size += a * a;
        }
        CHECK(std::sqrt(error / size) < 1e-3, "dequantized values of role %d: %.3g", role,
              std::sqrt(error / size));
    }

    kvq_cuda_layer layer;
    KVQ_INIT(layer);
    layer.sequences = 1;
    layer.kv_heads = kv_heads;
    layer.tokens = tokens.get();
    layer.committed = committed.get();
    layer.parts = &part;
    layer.part_count = 1;
    layer.columns = 2;
    layer.window = plain;
    layer.window_table = zero.get();
    layer.window_columns = 1;
    OK(kvq_cuda_kernels_workspace_bytes(kernels, q_heads, kv_heads, 1, &bytes));
    const uploaded<std::byte> workspace{std::vector<std::byte>(bytes + 16)};
    const kvq_tensor tq = tensor_of(dq.get(), 1, q_heads), to_device = tensor_of(out.get(), 1, q_heads);
    const auto attend = [&] {
        return kvq_cuda_pages_attend(kernels, &layer, &tq, &to_device, nullptr, workspace.get(), bytes,
                                     stream);
    };
    OK(attend());
    CUDA_OK(cudaStreamSynchronize(stream));
    std::vector<float> want(q_heads * dim);
    const kvq_tensor hq = tensor_of(q.data(), 1, q_heads), ho = tensor_of(want.data(), 1, q_heads, KVQ_FP32);
    OK(kvq_sequence_attend(host, 1, &hq, &ho, nullptr));
    CHECK(error_of(out.download(), 0, want) <= 2e-3, "attention: %.3g", error_of(out.download(), 0, want));

    const uploaded<std::int32_t> starts({0, many});
    const kvq_tensor tk2 = tensor_of(dk2.get(), many, kv_heads), tv2 = tensor_of(dv2.get(), many, kv_heads),
                     tq2 = tensor_of(dq2.get(), many, q_heads), to2 = tensor_of(out.get(), many, q_heads);
    OK(kvq_cuda_pages_prefill(kernels, &layer, &tk2, &tv2, &tq2, &to2, starts.get(), many, nullptr, nullptr,
                              0, stream));
    CUDA_OK(cudaStreamSynchronize(stream));
    want.resize(static_cast<std::size_t>(many * q_heads * dim));
    const kvq_tensor hk2 = tensor_of(k2.data(), many, kv_heads), hv2 = tensor_of(v2.data(), many, kv_heads),
                     hq2 = tensor_of(q2.data(), many, q_heads),
                     ho2 = tensor_of(want.data(), many, q_heads, KVQ_FP32);
    OK(kvq_sequence_prefill(host, 1, &hk2, &hv2, &hq2, &ho2, nullptr));
    CHECK(error_of(out.download(), 0, want) <= 3e-3, "a prompt: %.3g", error_of(out.download(), 0, want));

    part.pages.layer = 0;
    REFUSED(attend(), KVQ_ERROR_ARGUMENT, "a part has layer 0: signs of std4-h depend on the layer");
    OK(kvq_sequence_free(host));
    OK(kvq_cache_free(cpu));
    OK(kvq_cuda_kernels_free(kernels));
}

/// What callers get wrong.
void bad_input() {
    both c;
    c.add();
    c.add();
    cudaStream_t const s = c.stream;
    int n = 0;
    std::size_t bytes = 0;
    kvq_cuda_cache* made = nullptr;
    kvq_cuda_cache_options o = device_options();
    REFUSED(kvq_cuda_cache_create(nullptr, s, &made), KVQ_ERROR_HANDLE, "options is NULL");
    REFUSED(kvq_cuda_cache_create(&o, s, nullptr), KVQ_ERROR_HANDLE, "out is NULL");
    o.size = 8;
    REFUSED(kvq_cuda_cache_create(&o, s, &made), KVQ_ERROR_STRUCT, "the size of options is 8");
    o = device_options();
    o.formats = nullptr;
    REFUSED(kvq_cuda_cache_create(&o, s, &made), KVQ_ERROR_HANDLE, "options.formats is NULL");
    o.formats = "kivi-4-g64,,int8";
    REFUSED(kvq_cuda_cache_create(&o, s, &made), KVQ_ERROR_ARGUMENT, "lists an empty name");
    o.formats = "std4";
    REFUSED(kvq_cuda_cache_create(&o, s, &made), KVQ_ERROR_ARGUMENT,
            "kernels for kivi-4-g64+int8, mix4, std4-h, none for std4; build it with KVQ_CUDA_FORMATS=std4");
    o.formats = "bf16";
    REFUSED(kvq_cuda_cache_create(&o, s, &made), KVQ_ERROR_ARGUMENT, "needs a window of bf16");
    o.formats = "int8,fp16";
    REFUSED(kvq_cuda_cache_create(&o, s, &made), KVQ_ERROR_ARGUMENT, "fp16 is the format of the window");
    o = device_options();
    o.head_dim = 80;
    REFUSED(kvq_cuda_cache_create(&o, s, &made), KVQ_ERROR_ARGUMENT, "none for 80");
    o = device_options();
    o.window = "fp8";
    REFUSED(kvq_cuda_cache_create(&o, s, &made), KVQ_ERROR_ARGUMENT, "neither fp16 nor bf16");
    for (int kvq_cuda_cache_options::*const member :
         {&kvq_cuda_cache_options::layers, &kvq_cuda_cache_options::kv_heads,
          &kvq_cuda_cache_options::max_batch, &kvq_cuda_cache_options::max_tokens,
          &kvq_cuda_cache_options::pool_tokens, &kvq_cuda_cache_options::pool_sequences,
          &kvq_cuda_cache_options::draft_tokens, &kvq_cuda_cache_options::step_tokens,
          &kvq_cuda_cache_options::prompt_scratch_mib}) {
        o = device_options();
        o.*member = -5;
        REFUSED(kvq_cuda_cache_create(&o, s, &made), KVQ_ERROR_ARGUMENT, "-5");
    }
    o = device_options();
    kvq_cuda_allocator a;
    KVQ_INIT(a);
    o.allocator = &a;
    REFUSED(kvq_cuda_cache_create(&o, s, &made), KVQ_ERROR_HANDLE, "both functions");
    counted small;
    small.limit = 1000;
    o.allocator = &small.functions;
    REFUSED(kvq_cuda_cache_create(&o, s, &made), KVQ_ERROR_MEMORY, "bytes of device memory");
    CHECK(small.bytes == 0 && made == nullptr, "%zu bytes of a cache that was not made", small.bytes);

    CHECK(std::strcmp(kvq_status_name(KVQ_ERROR_CUDA), "KVQ_ERROR_CUDA") == 0, "the name of a status");

    // Handles.
    REFUSED(kvq_cuda_sequence_create(nullptr, &c.rows[0]), KVQ_ERROR_HANDLE, "cache is NULL");
    REFUSED(kvq_cuda_sequence_create(reinterpret_cast<kvq_cuda_cache*>(c.cpu), &c.rows[0]), KVQ_ERROR_HANDLE,
            "no handle of a cache on a device");
    REFUSED(kvq_cuda_sequence_tokens(reinterpret_cast<kvq_cuda_sequence*>(c.host[0]), &n), KVQ_ERROR_HANDLE,
            "no handle of a sequence on a device");
    REFUSED(kvq_cuda_sequence_tokens(c.rows[0], nullptr), KVQ_ERROR_HANDLE, "tokens is NULL");
    kvq_cuda_sequence* gone = nullptr;
    OK(kvq_cuda_sequence_create(c.gpu, &gone));
    OK(kvq_cuda_sequence_free(gone));
    REFUSED(kvq_cuda_sequence_free(gone), KVQ_ERROR_HANDLE, "was freed");
    REFUSED(kvq_cuda_sequence_bytes(gone, &bytes), KVQ_ERROR_HANDLE, "was freed");
    OK(kvq_cuda_sequence_free(nullptr));
    OK(kvq_cuda_cache_free(nullptr));
    {
        both other;
        other.add();
        REFUSED(kvq_cuda_cache_begin_prompt(c.gpu, other.rows[0], 3, s), KVQ_ERROR_HANDLE, "another cache");
        REFUSED(kvq_cuda_cache_begin_step(c.gpu, other.rows.data(), 1, 1, s), KVQ_ERROR_HANDLE,
                "another cache");
    }

    // Steps.
    kvq_tensor k = c.x.keys(2), v = c.x.values(2), q = c.x.queries(2), out = c.x.outputs(2);
    c.x.write(c.r);
    REFUSED(kvq_cuda_cache_prefill(c.gpu, 0, &k, &v, &q, &out, nullptr, s), KVQ_ERROR_ARGUMENT,
            "no step has begun");
    REFUSED(kvq_cuda_cache_begin_step(c.gpu, nullptr, 1, 1, s), KVQ_ERROR_HANDLE, "rows is NULL");
    REFUSED(kvq_cuda_cache_begin_step(c.gpu, c.rows.data(), -1, 1, s), KVQ_ERROR_ARGUMENT, "rows is -1");
    REFUSED(kvq_cuda_cache_begin_step(c.gpu, c.rows.data(), 2, 9, s), KVQ_ERROR_ARGUMENT,
            "a step of 9 tokens");
    kvq_cuda_sequence* const twice[] = {c.rows[0], c.rows[0]};
    REFUSED(kvq_cuda_cache_begin_step(c.gpu, twice, 2, 1, s), KVQ_ERROR_ARGUMENT, "in the batch twice");
    REFUSED(kvq_cuda_cache_begin_prompt(c.gpu, c.rows[0], 601, s), KVQ_ERROR_ARGUMENT, "max_tokens is 600");
    OK(kvq_cuda_cache_begin_step(c.gpu, c.rows.data(), 2, 1, s));
    REFUSED(kvq_cuda_cache_prefill(c.gpu, 2, &k, &v, &q, &out, nullptr, s), KVQ_ERROR_ARGUMENT, "layer 2");
    REFUSED(kvq_cuda_cache_prefill(c.gpu, 0, nullptr, &v, &q, &out, nullptr, s), KVQ_ERROR_HANDLE,
            "k is NULL");
    kvq_tensor bad = k;
    bad.data = nullptr;
    REFUSED(kvq_cuda_cache_prefill(c.gpu, 0, &bad, &v, &q, &out, nullptr, s), KVQ_ERROR_HANDLE,
            "k.data is NULL");
    bad = k;
    bad.dtype = KVQ_FP32;
    REFUSED(kvq_cuda_cache_prefill(c.gpu, 0, &bad, &v, &q, &out, nullptr, s), KVQ_ERROR_ARGUMENT,
            "k has dtype 0, but the window of the cache is fp16");
    bad = k;
    bad.tokens = 1;
    REFUSED(kvq_cuda_cache_prefill(c.gpu, 0, &bad, &v, &q, &out, nullptr, s), KVQ_ERROR_ARGUMENT, "tokens");
    bad = k;
    bad.token_stride = PTRDIFF_MAX;
    REFUSED(kvq_cuda_cache_append(c.gpu, 0, &bad, &v, s), KVQ_ERROR_ARGUMENT, "larger than memory");
    bad = q;
    bad.heads = 3;
    REFUSED(kvq_cuda_cache_prefill(c.gpu, 0, &k, &v, &bad, &out, nullptr, s), KVQ_ERROR_ARGUMENT,
            "2 kv heads of 64 channels");
    bad = q;
    bad.tokens = 3;
    REFUSED(kvq_cuda_cache_attend(c.gpu, 0, &bad, &out, nullptr, s), KVQ_ERROR_ARGUMENT,
            "q has 3 tokens, for 2 rows");
    kvq_cuda_attend_options options;
    KVQ_INIT(options);
    options.window = -1;
    REFUSED(kvq_cuda_cache_prefill(c.gpu, 0, &k, &v, &q, &out, &options, s), KVQ_ERROR_ARGUMENT, "window -1");
    for (int layer = 0; layer < layers; ++layer)
        OK(kvq_cuda_cache_prefill(c.gpu, layer, &k, &v, &q, &out, nullptr, s));
    CUDA_OK(cudaStreamSynchronize(s));
    for (int layer = 0; layer < layers; ++layer)
        for (const int row : {0, 1}) {
            const kvq_tensor hk = c.x.host_rows(c.x.k, row, 1, kv_heads),
                             hv = c.x.host_rows(c.x.v, row, 1, kv_heads);
            OK(kvq_sequence_append(c.host[static_cast<std::size_t>(row)], layer, &hk, &hv));
        }
    for (const int row : {0, 1}) c.same_bytes(row, "after refusals");

    // The rest.
    REFUSED(kvq_cuda_sequence_trim(c.rows[0], 5), KVQ_ERROR_ARGUMENT, "cannot trim to 5");
    const int starts[] = {0, 1, 0}, path[] = {0};
    REFUSED(kvq_cuda_cache_keep(c.gpu, c.rows.data(), 2, path, starts, s), KVQ_ERROR_ARGUMENT, "goes down");
    REFUSED(kvq_cuda_cache_keep(c.gpu, c.rows.data(), 2, path, nullptr, s), KVQ_ERROR_HANDLE,
            "starts is NULL");
    kvq_cuda_requantize_request to;
    KVQ_INIT(to);
    REFUSED(kvq_cuda_cache_requantize(c.gpu, c.rows.data(), 2, &to, s), KVQ_ERROR_HANDLE,
            "request.format is NULL");
    to.format = "low2";
    REFUSED(kvq_cuda_cache_requantize(c.gpu, c.rows.data(), 2, &to, s), KVQ_ERROR_ARGUMENT, "low2");
    const kvq_cuda_tier tiers[] = {{4, "int8"}, {2, "kivi-4-g64"}};
    REFUSED(kvq_cuda_cache_step_down(c.gpu, c.rows.data(), 2, tiers, 2, 0, s), KVQ_ERROR_ARGUMENT,
            "before 4");
    std::uint32_t counts[1];
    REFUSED(kvq_cuda_cache_not_finite(c.gpu, counts, 1, s), KVQ_ERROR_ARGUMENT, "the cache has 2");
    kvq_cache_options h = host_options();
    h.recent = 32;
    kvq_cache* narrow = nullptr;
    OK(kvq_cache_create(&h, &narrow));
    kvq_sequence* moved = nullptr;
    REFUSED(kvq_cuda_sequence_offload(c.rows[0], narrow, s, &moved), KVQ_ERROR_ARGUMENT, "on the CPU");
    OK(kvq_cache_free(narrow));
    kvq_cuda_format_entry e;
    KVQ_INIT(e);
    OK(kvq_cuda_format_count(&n));
    CHECK(n == 8, "%d entries", n);
    OK(kvq_cuda_format_list(0, &e));
    CHECK(std::strcmp(e.formats, "kivi-4-g64,int8") == 0 && e.head_dim == 64 && e.page_tokens == 64 &&
              e.window == KVQ_FP16 && e.alibi == 0,
          "entry %s", e.formats);
    OK(kvq_cuda_format_list(1, &e));
    CHECK(std::strcmp(e.formats, "mix4") == 0 && e.alibi == 0, "entry %s", e.formats);
    OK(kvq_cuda_format_list(2, &e));
    CHECK(std::strcmp(e.formats, "int8/kivi-4-g64") == 0 && e.alibi == 1, "entry %s", e.formats);
    OK(kvq_cuda_format_list(4, &e));
    CHECK(std::strcmp(e.formats, "fp8") == 0, "entry %s", e.formats);
    OK(kvq_cuda_format_list(5, &e));
    CHECK(std::strcmp(e.formats, "kivi-4-g32-fp16x16,int8-fp16x16") == 0 && e.head_dim == 80, "entry %s",
          e.formats);
    OK(kvq_cuda_format_list(6, &e));
    CHECK(std::strcmp(e.formats, "int8") == 0 && e.head_dim == 64, "entry %s of an index", e.formats);
    REFUSED(kvq_cuda_format_list(8, &e), KVQ_ERROR_ARGUMENT, "not among 8");
    const auto* const found = kvq::cuda::find_device_format("int8", 64, 64);
    CHECK(found != nullptr && found->kinds.size() == 2, "int8 is in the entry with kivi-4-g64");
    for (const char* name : {"int8/kivi-4-g64", "kivi-4-g64/int8", "std4", "int8/", "/int8", ""})
        CHECK(kvq::cuda::find_device_format(name, 64, 64) == nullptr, "%s", name);
    CHECK(kvq::cuda::find_device_format("int8", 64, 128) == nullptr, "kernels with ALiBi are others");

    // Pools that may not grow: a step that finds no page changes nothing.
    o = device_options();
    o.fixed = 1;
    o.pool_sequences = 1;
    OK(kvq_cuda_cache_create(&o, s, &made));
    kvq_cuda_sequence* two[2];
    for (kvq_cuda_sequence*& x : two) OK(kvq_cuda_sequence_create(made, &x));
    OK(kvq_cuda_cache_begin_step(made, two, 1, 1, s));
    REFUSED(kvq_cuda_cache_begin_prompt(made, two[0], 300, s), KVQ_ERROR_MEMORY, "may not grow");
    OK(kvq_cuda_sequence_tokens(two[0], &n));
    CHECK(n == 1, "%d tokens after a refusal", n);
    OK(kvq_cuda_cache_free(made));  // lives on until its sequences are freed
    for (kvq_cuda_sequence* x : two) OK(kvq_cuda_sequence_free(x));

        // A device whose blocks have little shared memory, and a library that was compiled for others.
#ifndef __CUDACC__
    emulated::device_shared_memory = 99 * 1024;
    o = device_options();
    REFUSED(kvq_cuda_cache_create(&o, s, &made), KVQ_ERROR_UNSUPPORTED,
            "build it with 86 among CMAKE_CUDA_ARCHITECTURES");
    emulated::device_shared_memory = emulated::most_shared_memory;
#endif
}

}  // namespace

#if !defined(__CUDACC__)
#include "plain_host.cpp"
#endif
namespace plain_host {
std::string run();
}

int main() {
    if (has(0)) {
        const std::string wrong = plain_host::run();
        CHECK(wrong.empty(), "a program without nvcc: %s", wrong.c_str());
        scenario();
        list_of_layers();
        layers_with_state();
        variants();
        alibi();
        graphs();
    }
    if (has(1)) {
        latents("int8-fp16x16", 0.01);
        latents("fp16", 2e-3);
        lists();
        several_widths();
    }
    if (has(2)) {
        conversion_of_pages();
        strided_pages("fp8");
#ifndef __CUDACC__
        strided_pages("fp8/nvfp4");
#endif
        pages_with_signs();
    }
#ifndef PART  // they name formats of all
    pages_of_the_caller();
    bad_input();
#else
    if (has(0)) pages_of_the_caller();
#endif
    return test::report("c_cuda");
}
