// Quantizing and dequantizing of blocks of one head: time against passes over the same memory in the same
// run.
//
//   read, store, copy     a read-only pass over the input, a store-only pass over the output, memcpy of the
//                         float side
//   quantize              float32, float16 or bfloat16 values of a window block of the cache to codes
//   dequantize            codes to tokens in float32, float16 or bfloat16
//   requantize            from a 16-bit window or 8-bit codes to 4 bits
//
// roofline: share of the speed of the read-only pass (quantize, requantize) or of the store-only pass
// (dequantize) over the bytes of the float side (requantize from codes: of the codes). vs_copy: the same
// against memcpy. --portable: schemes that have no kernel for quantizing or dequantizing, beside
// affine-4-g64; which of the two stands behind the name.
// Working sets: L2 64 Ki values; DRAM 64 Mi values, walked through from end to end.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <kvq/cpu/simd.hpp>
#include <kvq/kvq.hpp>
#include <nlohmann/json.hpp>

#include "support.hpp"

namespace {

using backend = kvq::simd<>;
using lanes = backend::lanes;

struct settings {
    int tokens = 64, dim = 128, threads = 1;
    std::string only;
    bool json = false, portable = false;
};

/// Memory for all blocks of a working set, and the passes that bound them.
class working_set {
public:
    const char* name;
    int blocks, threads;
    std::size_t values;  // of a block
    std::pmr::vector<std::byte> floats, codes, more;

    working_set(const char* n, std::size_t total, const settings& s)
        : name(n),
          blocks(static_cast<int>(total / static_cast<std::size_t>(s.tokens * s.dim))),
          threads(s.threads),
          values(static_cast<std::size_t>(s.tokens * s.dim)),
          floats(total * 4, &memory()),
          codes(total * 2, &memory()),
          more(total * 2, &memory()),
          executor_(s.threads) {}

    /// Median time of f(block) over all blocks.
    double time(const std::function<void(int)>& f) const {
        return bench::median_ns(
            [&] {
                if (threads == 1)
                    for (int i = 0; i < blocks; ++i) f(i);
                else
                    executor_.parallel_for(threads, [&](int t) {
                        for (int i = blocks * t / threads; i < blocks * (t + 1) / threads; ++i) f(i);
                    });
            },
            threads, 0.02);
    }
    double read_ns(std::size_t block_bytes) const {
        return time([&](int i) {
            const std::byte* const p = floats.data() + static_cast<std::size_t>(i) * block_bytes;
            lanes::ints any[4] = {lanes::splat(0), lanes::splat(0), lanes::splat(0), lanes::splat(0)};
            constexpr std::size_t step = 4 * lanes::width;
            for (std::size_t b = 0; b < block_bytes; b += 4 * step)
                for (std::size_t k = 0; k < 4; ++k)
                    any[k] = lanes::bit_or(any[k], lanes::load(p + b + k * step));
            any[0] = lanes::bit_or(lanes::bit_or(any[0], any[1]), lanes::bit_or(any[2], any[3]));
            benchmark::DoNotOptimize(any[0]);
        });
    }
    double store_ns(std::size_t block_bytes) {
        return time([&](int i) {
            std::byte* const p = floats.data() + static_cast<std::size_t>(i) * block_bytes;
            const auto x = lanes::splat(i);
            for (std::size_t b = 0; b < block_bytes; b += 4 * lanes::width) lanes::store(p + b, x);
            benchmark::ClobberMemory();
        });
    }
    double copy_ns(std::size_t block_bytes) {
        std::byte* const to =
            block_bytes * static_cast<std::size_t>(blocks) <= more.size() ? more.data() : nullptr;
        return time([&](int i) {
            const std::size_t at = static_cast<std::size_t>(i) * block_bytes;
            // 32-bit sets are copied in halves: to two buffers of half their size.
            if (to) {
                std::memcpy(to + at, floats.data() + at, block_bytes);
            } else {
                std::memcpy(more.data() + at / 2, floats.data() + at, block_bytes / 2);
                std::memcpy(codes.data() + at / 2, floats.data() + at + block_bytes / 2, block_bytes / 2);
            }
            benchmark::ClobberMemory();
        });
    }

private:
    static std::pmr::memory_resource& memory() {
        static bench::huge_page_resource huge;
        return huge;
    }
    kvq::thread_pool executor_;
};

class report {
public:
    explicit report(const settings& s) : settings_(s) {
        if (!s.json)
            std::printf(
                "%s, blocks of %d x %d, %d thread(s)\n%-11s %-14s %-6s %-6s %-7s %-5s %11s %9s %9s %9s %8s\n",
                backend::name(), s.tokens, s.dim, s.threads, "op", "scheme", "tensor", "input", "layout",
                "where", "ns", "Gelem/s", "GB/s", "roofline", "vs copy");
    }
    void row(const char* op, const std::string& scheme, kvq::tensor role, const char* input,
             const char* layout, const working_set& set, double ns, double bytes, double bound_ns,
             double copy_ns) const {
        const double elements = static_cast<double>(set.values) * set.blocks;
        const char* const tensor = role == kvq::tensor::key ? "K" : "V";
        if (settings_.json) {
            const nlohmann::json line{{"op", op},
                                      {"scheme", scheme},
                                      {"tensor", tensor},
                                      {"input", input},
                                      {"layout", layout},
                                      {"where", set.name},
                                      {"threads", set.threads},
                                      {"ns", ns},
                                      {"elements", elements},
                                      {"bytes", bytes},
                                      {"roofline", bound_ns / ns},
                                      {"vs_copy", copy_ns / ns}};
            std::printf("%s\n", line.dump().c_str());
        } else {
            std::printf("%-11s %-14s %-6s %-6s %-7s %-5s %11.0f %9.2f %9.2f %8.0f%% %7.2fx\n", op,
                        scheme.c_str(), tensor, input, layout, set.name, ns, elements / ns, bytes / ns,
                        100.0 * bound_ns / ns, copy_ns / ns);
        }
        std::fflush(stdout);
    }

private:
    const settings& settings_;
};

template <class T>
void fill(working_set& set, const settings& s, kvq::tensor role) {
    const kvq::block_shape shape{role, s.tokens, s.dim};
    const auto x = bench::random_floats(set.values, 5);
    std::vector<std::byte> one(set.values * sizeof(T));
    kvq::full<T>{}.quantize(shape, {}, x.data(), one.data());
    for (int i = 0; i < set.blocks; ++i)
        std::memcpy(set.floats.data() + static_cast<std::size_t>(i) * one.size(), one.data(), one.size());
}

struct bounds {
    double read, store, copy;
};
template <class T>
bounds bounds_of(working_set& set, const report& out, const char* input) {
    const std::size_t bytes = set.values * sizeof(T);
    bounds b{};
    b.read = set.read_ns(bytes);
    b.store = set.store_ns(bytes);
    b.copy = set.copy_ns(bytes);
    const double all = static_cast<double>(bytes) * set.blocks;
    out.row("read", "-", kvq::tensor::key, input, "-", set, b.read, all, b.read, b.copy);
    out.row("store", "-", kvq::tensor::key, input, "-", set, b.store, all, b.store, b.copy);
    out.row("copy", "-", kvq::tensor::key, input, "-", set, b.copy, all, b.read, b.copy);
    return b;
}

template <class T, class Scheme>
void measure(const char* name, const char* input, kvq::tensor role, const settings& s, working_set& set,
             const bounds& b, const report& out) {
    const Scheme scheme;
    const kvq::block_shape shape{role, s.tokens, s.dim};
    const std::size_t quantized = scheme.block_bytes(shape), plain = set.values * sizeof(T);
    const double bytes = static_cast<double>(quantized + plain) * set.blocks;
    const auto float_at = [&](int i) { return set.floats.data() + static_cast<std::size_t>(i) * plain; };
    const auto code_at = [&](int i) { return set.codes.data() + static_cast<std::size_t>(i) * quantized; };
    thread_local std::vector<float> scratch;
    const auto space = [&] {
        scratch.resize(set.values + 64);
        return scratch.data();
    };

    fill<T>(set, s, role);
    out.row("quantize", name, role, input, "block", set, set.time([&](int i) {
        backend::quantize(scheme, shape, {}, kvq::float_type_of<T>, float_at(i), code_at(i), space());
    }),
            bytes, b.read, b.copy);
    out.row("dequantize", name, role, input, "tokens", set, set.time([&](int i) {
        backend::dequantize(scheme, shape, {}, code_at(i), kvq::float_type_of<T>, float_at(i), s.dim,
                            space());
    }),
            bytes, b.store, b.copy);
}

template <class Scheme>
void measure_all(const char* name, kvq::tensor role, const settings& s, working_set& set,
                 const bounds (&b)[3], const report& out) {
    if (std::string(name).find(s.only) == std::string::npos) return;
    measure<float, Scheme>(name, "f32", role, s, set, b[0], out);
    measure<kvq::float16, Scheme>(name, "f16", role, s, set, b[1], out);
    measure<kvq::bfloat16, Scheme>(name, "bf16", role, s, set, b[2], out);
}

/// A scheme of a user with the four members that must be there: 8 bits, one scale for all values of a block.
struct own_scheme {
    std::string name() const { return "own"; }
    constexpr std::size_t block_bytes(const kvq::block_shape& s) const {
        return (s.values() + 4 + 15) / 16 * 16;
    }
    std::uint32_t quantize(const kvq::block_shape& s, kvq::block_id, float* values, std::byte* block) const {
        float largest = 0.0f;
        for (std::size_t i = 0; i < s.values(); ++i) largest = std::max(largest, std::fabs(values[i]));
        const float scale = largest / 127.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        std::memcpy(block, &scale, 4);
        for (std::size_t i = 0; i < s.values(); ++i)
            block[4 + i] = static_cast<std::byte>(std::lrintf(values[i] * inverse));
        return 0;
    }
    void dequantize(const kvq::block_shape& s, kvq::block_id, const std::byte* block, float* values) const {
        float scale = 0.0f;
        std::memcpy(&scale, block, 4);
        for (std::size_t i = 0; i < s.values(); ++i)
            values[i] = scale * static_cast<float>(static_cast<std::int8_t>(block[4 + i]));
    }
};

template <class Scheme>
void measure_portable(const char* name, const settings& s, working_set& set, const bounds (&b)[3],
                      const report& out) {
    const auto d = backend::describe(Scheme{}, {kvq::tensor::key, s.tokens, s.dim}, kvq::float_type::fp16);
    const std::string full = std::string(name) + (d.quantize ? "" : " q") + (d.dequantize ? "" : " d");
    measure_all<Scheme>(full.c_str(), kvq::tensor::key, s, set, b, out);
}

/// From a 16-bit window or 8-bit codes to 4 bits, as a live cache does it.
template <class To>
void requantize(const char* name, kvq::tensor role, const settings& s, working_set& set, const bounds (&b)[3],
                const report& out) {
    if (std::string("requantize").find(s.only) == std::string::npos) return;
    const kvq::block_shape shape{role, s.tokens, s.dim};
    const To to;
    const kvq::affine<8, kvq::per_token<64>> from;
    const std::size_t target = to.block_bytes(shape), window = set.values * 2,
                      quantized = from.block_bytes(shape);
    thread_local std::vector<float> scratch;
    const auto space = [&] {
        scratch.resize(set.values + 64);
        return scratch.data();
    };
    fill<kvq::float16>(set, s, role);
    out.row("requantize", name, role, "16", "block", set, set.time([&](int i) {
        backend::quantize(to, shape, {}, kvq::float_type::fp16,
                          set.floats.data() + static_cast<std::size_t>(i) * window,
                          set.more.data() + static_cast<std::size_t>(i) * target, space());
    }),
            static_cast<double>(window + target) * set.blocks, b[1].read, b[1].copy);
    for (int i = 0; i < set.blocks; ++i)
        backend::quantize(from, shape, {}, kvq::float_type::fp16,
                          set.floats.data() + static_cast<std::size_t>(i) * window,
                          set.codes.data() + static_cast<std::size_t>(i) * quantized, space());
    const double scale = static_cast<double>(quantized) / static_cast<double>(window);
    out.row("requantize", name, role, "8", "block", set, set.time([&](int i) {
        float* const values = space();
        backend::dequantize(from, shape, {}, set.codes.data() + static_cast<std::size_t>(i) * quantized,
                            kvq::float_type::fp32, values, s.dim, values);
        backend::requantize_values(to, shape, {}, values, nullptr,
                                   set.more.data() + static_cast<std::size_t>(i) * target);
    }),
            static_cast<double>(quantized + target) * set.blocks, b[1].read * scale, b[1].copy * scale);
}

}  // namespace

int main(int argc, char** argv) {
    CLI::App app("Quantizing, dequantizing and requantizing blocks");
    settings s;
    std::string where;
    app.add_option("--tokens", s.tokens, "tokens of a block");
    app.add_option("--head-dim", s.dim);
    app.add_option("--threads", s.threads);
    app.add_option("--scheme", s.only, "only rows whose scheme's name contains this");
    app.add_option("--where", where, "L2 or DRAM; both if not given");
    app.add_flag("--json", s.json, "one JSON object a line");
    app.add_flag("--portable", s.portable,
                 "schemes without kernels; q: quantized by portable code, d: dequantized");
    CLI11_PARSE(app, argc, argv);

    const report out(s);
    for (const auto& [name, total] : {std::pair<const char*, std::size_t>{"L2", 64u << 10},
                                      std::pair<const char*, std::size_t>{"DRAM", 64u << 20}}) {
        if (!where.empty() && where != name) continue;
        working_set set(name, total * static_cast<std::size_t>(s.threads), s);
        using kvq::tensor;
        fill<float>(set, s, tensor::key);
        const bounds b[3] = {bounds_of<float>(set, out, "f32"), bounds_of<kvq::float16>(set, out, "f16"),
                             bounds_of<kvq::bfloat16>(set, out, "bf16")};
        if (s.portable) {
            using namespace kvq;
            measure_portable<affine<4>>("affine-4-g64", s, set, b, out);
            measure_portable<kvq::scheme<bits<4>, asymmetric, per_token<64>, params<float16>, least_squares>>(
                "4 bit, l. s.", s, set, b, out);
            measure_portable<affine<4, per_token<20>>>("affine-4-g20", s, set, b, out);
            measure_portable<affine<4, per_channel<20>>>("kivi-4-g20", s, set, b, out);
            measure_portable<own_scheme>("own struct", s, set, b, out);
            continue;
        }
        measure_all<kvq::int8>("int8", tensor::key, s, set, b, out);
        measure_all<kvq::affine<8>>("affine-8-g64", tensor::key, s, set, b, out);
        measure_all<kvq::affine<4>>("affine-4-g64", tensor::key, s, set, b, out);
        measure_all<kvq::affine<4>>("affine-4-g64", tensor::value, s, set, b, out);
        measure_all<kvq::affine<3>>("affine-3-g64", tensor::key, s, set, b, out);
        measure_all<kvq::affine<2>>("affine-2-g64", tensor::key, s, set, b, out);
        measure_all<kvq::kivi<4, 64>::keys>("kivi-4-g64", tensor::key, s, set, b, out);
        measure_all<kvq::kivi<2, 64>::keys>("kivi-2-g64", tensor::key, s, set, b, out);
        measure_all<kvq::std4::keys>("std4", tensor::key, s, set, b, out);
        measure_all<kvq::std4::values>("std4", tensor::value, s, set, b, out);
        measure_all<kvq::low2::keys>("low2", tensor::key, s, set, b, out);
        measure_all<kvq::low2::values>("low2", tensor::value, s, set, b, out);
        requantize<kvq::affine<4>>("affine-4-g64", tensor::key, s, set, b, out);
        requantize<kvq::kivi<4, 64>::keys>("kivi-4-g64", tensor::key, s, set, b, out);
    }
}
