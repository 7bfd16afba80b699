// Quantizing to schemes with encoders and to the presets on the device: the bytes that the CPU writes,
// whatever the numbers are.
//
//   quantize [seed]
#include <kvq/schemes/presets.hpp>

#include <kvq/cuda/quantize/pages.cuh>

#include "small_budget.cuh"
#include "support.cuh"

using namespace kvq;

namespace {

constexpr int layer = 1, layers = 2, heads = 2;
unsigned seed = std::random_device{}();

enum class numbers { ordinary, hostile, huge, tiny, flat, coarse, count };

/// Numbers of one head of a page: [token][channel].
std::vector<float> make_numbers(test::rng& r, numbers kind, int tokens, int dim) {
    std::vector<float> x = test::tensor_values(r, tokens, dim);
    const auto at = [&](int t, int c) -> float& {
        return x[static_cast<std::size_t>(t) * static_cast<std::size_t>(dim) + static_cast<std::size_t>(c)];
    };
    if (kind == numbers::hostile) {
        const float odd[] = {NAN, INFINITY, -INFINITY, 65504.0f, -65504.0f, 0.0f, -0.0f, 6e-8f, -1e-7f, 3.0f};
        for (float& v : x)
            if (test::uniform(r, 0, 30) == 0) v = odd[test::uniform(r, 0, 9)];
        for (int c = 0; c < dim; ++c) {
            at(tokens / 2, c) = NAN;  // a token without numbers
            at(tokens / 3, c) = c % 2 ? 0.0f : -0.0f;
        }
        for (int t = 0; t < tokens; ++t) {
            at(t, dim / 2) = t % 2 ? INFINITY : NAN;  // a channel without numbers
            at(t, dim / 3) = -2.25f;
            at(t, 0) = t == tokens - 1 ? 1.0f : NAN;
        }
    } else if (kind == numbers::huge) {
        for (float& v : x) v *= test::uniform(r, 0, 3) == 0 ? 3e36f : 1e4f;
    } else if (kind == numbers::tiny) {
#if defined(FLUSHED)  // subnormal numbers are zeros on the device
        for (float& v : x) v *= test::uniform(r, 0, 3) == 0 ? 1e-34f : 1e-30f;
#else
        for (float& v : x) v *= test::uniform(r, 0, 3) == 0 ? 1e-44f : 1e-38f;
#endif
    } else if (kind == numbers::coarse) {
        // Few values, so that candidates of a search and turns of a refit are often equally good; some far
        // from zero, where fits in float are the least certain.
        const float step = test::uniform(r, 0, 1) == 0 ? 0.5f : 0.03125f;
        for (int t = 0; t < tokens; ++t)
            for (int c = 0; c < dim; ++c) {
                float& v = at(t, c);
                v = std::round(v / step) * step + (c % 3 == 0 ? 50.0f * static_cast<float>(c % 5) : 0.0f);
            }
    } else if (kind == numbers::flat) {
        const int way = test::uniform(r, 0, 2);
        for (int t = 0; t < tokens; ++t)
            for (int c = 0; c < dim; ++c)
                at(t, c) = way == 0   ? 0.0f
                           : way == 1 ? 0.1f * static_cast<float>(c - 3)
                           : c == 1   ? NAN
                                      : -0.0f;
    }
    return x;
}

template <class Scheme>
std::vector<std::byte> quantized_block(const Scheme& scheme, const block_shape& s, block_id id,
                                       std::vector<float> x, unsigned& bad) {
    std::vector<std::byte> block(scheme.block_bytes(s));
    bad += scheme.quantize(s, id, x.data(), block.data());
    return block;
}

/// What queries and keys might be, for all heads but the last one, which has no queries.
calibration statistics(test::rng& r, int heads, int dim, bool products) {
    calibration c({layers, heads, dim, dim}, products);
    const int tokens = 3 * dim + 64;
    std::vector<float> k = test::tensor_values(r, tokens, heads * dim);
    std::vector<float> q = test::tensor_values(r, tokens, 2 * heads * dim);
    for (int t = 0; t < tokens; ++t)
        for (int h = 0; h < 2 * heads; ++h)
            for (int i = 1; i < dim; ++i) {
                float* const x = &q[static_cast<std::size_t>((t * 2 * heads + h) * dim)];
                x[i] += 0.9f * x[i - 1];
                if (h >= 2 * heads - 2 && heads > 1) x[i] = NAN;
            }
    for (int l = 0; l < layers; ++l) {
        c.add_keys(l, token_view<const float>(k.data(), tokens, heads, dim));
        c.add_queries(l, token_view<const float>(q.data(), tokens, 2 * heads, dim));
    }
    return c;
}

/// Plans and feedback of a scheme in device memory.
template <class Format>
struct device_statistics {
    std::vector<std::uint16_t> plans;
    std::vector<float> feedback;

    device_statistics(const typename Format::keys& keys, int heads) {
        if constexpr (cuda::detail::codec<typename Format::keys>.several_widths())
            if (keys.plan()) {
                plans.resize(static_cast<std::size_t>(heads * cuda::key_plan_words<Format>));
                cuda::write_key_plan<Format>(*keys.plan(), layer, plans.data());
            }
        if constexpr (requires { keys.encoder.matrices; })
            if (keys.encoder.matrices) {
                feedback.resize(static_cast<std::size_t>(heads * Format::head_dim * Format::head_dim));
                cuda::write_key_feedback<Format>(*keys.encoder.matrices, layer, feedback.data());
            }
    }
};

/// All blocks of pages that the CPU codes, [page][head], and the numbers that they dequantize to.
template <class Format>
struct host_pages {
    test::rng random{seed + 1};
    typename Format::keys key_scheme =
        test::make_scheme<typename Format::keys>(random, layers, heads, Format::head_dim);
    typename Format::values value_scheme =
        test::make_scheme<typename Format::values>(random, layers, heads, Format::value_dim);
    std::vector<std::byte> keys, values;
    std::vector<std::vector<float>> key_numbers, value_numbers;
    unsigned bad = 0;

    void add(int head, const std::vector<float>& k, const std::vector<float>& v) {
        const block_id id{layer, head};
        const auto one = [&](const auto& scheme, const block_shape& s, const std::vector<float>& x,
                             std::vector<std::byte>& blocks, std::vector<std::vector<float>>& dequantized) {
            const auto block = quantized_block(scheme, s, id, x, bad);
            blocks.insert(blocks.end(), block.begin(), block.end());
            dequantized.emplace_back(s.values());
            scheme.dequantize(s, id, block.data(), dequantized.back().data());
        };
        one(key_scheme, Format::key_shape(), k, keys, key_numbers);
        one(value_scheme, Format::value_shape(), v, values, value_numbers);
    }
};

/// Pages of a format in device memory.
template <class Format>
struct pool {
    int heads, pages;
    test::device_buffer<std::byte> keys, values;
    test::device_buffer<std::uint16_t> plans;
    test::device_buffer<float> feedback;
    test::device_rotation<typename Format::keys> key_rotation;
    test::device_rotation<typename Format::values> value_rotation;
    cuda::cache_ref<Format> ref;

    pool(int h, int p, const host_pages<Format>& host)
        : pool(h, p, host, device_statistics<Format>(host.key_scheme, h)) {}
    pool(int h, int p, const host_pages<Format>& host, const device_statistics<Format>& s)
        : heads(h),
          pages(p),
          keys(cuda::cache_ref<Format>::dense_key_page(h) * static_cast<std::size_t>(p)),
          values(cuda::cache_ref<Format>::dense_value_page(h) * static_cast<std::size_t>(p)),
          plans(s.plans),
          feedback(s.feedback),
          key_rotation(host.key_scheme, layer, h, Format::head_dim),
          value_rotation(host.value_scheme, layer, h, Format::value_dim) {
        key_rotation.set(ref, tensor::key, layer);
        value_rotation.set(ref, tensor::value, layer);
        ref.key_pages = keys.get();
        ref.value_pages = values.get();
        ref.key_page_bytes = cuda::cache_ref<Format>::dense_key_page(h);
        ref.value_page_bytes = cuda::cache_ref<Format>::dense_value_page(h);
        ref.kv_heads = h;
        if (!s.plans.empty()) ref.key_plans = plans.get();
        if (!s.feedback.empty()) ref.key_feedback = feedback.get();
    }
};

template <class Format>
void compare(const pool<Format>& got, const host_pages<Format>& expected, const char* name,
             const char* what) {
    const auto bytes = [&](const std::vector<std::byte>& a, const std::vector<std::byte>& b,
                           std::size_t block, const char* which) {
        int blocks = 0;
        for (std::size_t at = 0; at < b.size(); at += block) {
            std::size_t i = at;
            while (i < at + block && a[i] == b[i]) ++i;
            if (i < at + block && ++blocks <= 2)
                CHECK(false, "%s, %s: %s block %zu byte %zu of %zu is %02x, expected %02x", name, what, which,
                      at / block, i - at, block, static_cast<unsigned>(a[i]), static_cast<unsigned>(b[i]));
        }
        CHECK(blocks == 0, "%s, %s: %d of %zu %s blocks differ", name, what, blocks, b.size() / block, which);
    };
    bytes(got.keys.download(), expected.keys, Format::key_block_bytes, "key");
    bytes(got.values.download(), expected.values, Format::value_block_bytes, "value");
}

/// 16- or 32-bit pages -> Quantized, and from there -> Other if that is another format. Statistics: 0 none, 1
/// for plans, 2 for feedback too.
template <class T, class Quantized, class Other = Quantized>
void check(const char* name, int with = 0) {
    using window_format =
        cuda::block_pair<full<T>, full<T>, Quantized::head_dim, Quantized::page_tokens, Quantized::value_dim>;
    test::rng r(seed);
    constexpr int kinds = static_cast<int>(numbers::count), pages = kinds;
    host_pages<window_format> window;
    host_pages<Quantized> quantized;
    host_pages<Other> other;
    if (with > 0) {
        const calibration c = statistics(r, heads, Quantized::head_dim, with > 1);
        const auto scheme = [&](auto& keys) {
            using S = std::remove_reference_t<decltype(keys)>;
            if constexpr (std::constructible_from<S, const calibration&>) keys = S(c);
        };
        scheme(quantized.key_scheme);
        scheme(other.key_scheme);
    }
    for (int p = 0; p < pages; ++p)
        for (int h = 0; h < heads; ++h)
            window.add(
                h,
                make_numbers(r, static_cast<numbers>(p % kinds), Quantized::page_tokens, Quantized::head_dim),
                make_numbers(r, static_cast<numbers>(p % kinds), Quantized::page_tokens,
                             Quantized::value_dim));
    for (std::size_t i = 0; i < window.key_numbers.size(); ++i)
        quantized.add(static_cast<int>(i) % heads, window.key_numbers[i], window.value_numbers[i]);
    pool<window_format> from(heads, pages, window);
    pool<Quantized> to(heads, pages, quantized);
    from.keys.upload(window.keys);
    from.values.upload(window.values);
    std::vector<int> all(pages);
    for (int i = 0; i < pages; ++i) all[static_cast<std::size_t>(i)] = i;
    const test::device_buffer<int> list(all);
    test::device_buffer<unsigned> bad(1);
    bad.clear();
    auto status = cuda::requantize_pages(from.ref, to.ref, list.get(), list.get(), pages, bad.get(), nullptr);
    CHECK(status, "%s: %s", name, status.message);
    CUDA_OK(cudaDeviceSynchronize());
    compare(to, quantized, name, "quantized");
    CHECK(bad.download()[0] == quantized.bad, "%s: %u numbers are not finite, expected %u", name,
          bad.download()[0], quantized.bad);
    if constexpr (!std::is_same_v<Quantized, Other>) {
        for (std::size_t i = 0; i < quantized.key_numbers.size(); ++i)
            other.add(static_cast<int>(i) % heads, quantized.key_numbers[i], quantized.value_numbers[i]);
        pool<Other> third(heads, pages, other);
        status = cuda::requantize_pages(to.ref, third.ref, list.get(), list.get(), pages, nullptr, nullptr);
        CHECK(status, "%s: %s", name, status.message);
        CUDA_OK(cudaDeviceSynchronize());
        compare(third, other, name, "requantized");
    }
    std::printf("  %s%s\n", name, with == 0 ? "" : with == 1 ? ", statistics" : ", statistics with products");
}

/// Many sequences in a decode loop, a page of some of them due at every step.
template <class Quantized>
void check_commit(int sequences, int steps) {
    using window_format =
        cuda::block_pair<full<float16>, full<float16>, Quantized::head_dim, Quantized::page_tokens>;
    test::rng r(seed);
    constexpr int recent = 5, page_tokens = Quantized::page_tokens, columns = 3;
    host_pages<window_format> window;
    host_pages<Quantized> quantized, none;
    quantized.key_scheme = typename Quantized::keys(statistics(r, heads, Quantized::head_dim, true));
    const int pages = sequences * columns;
    for (int i = 0; i < pages * heads; ++i)
        window.add(
            i % heads,
            make_numbers(r, i % 5 ? numbers::ordinary : numbers::hostile, page_tokens, Quantized::head_dim),
            make_numbers(r, numbers::ordinary, page_tokens, Quantized::head_dim));
    pool<window_format> from(heads, pages, window);
    pool<Quantized> to(heads, pages, quantized);
    from.keys.upload(window.keys);
    from.values.upload(window.values);

    std::vector<int> window_table, lengths, fresh;
    for (int i = 0; i < pages; ++i) window_table.push_back(i);
    for (int b = 0; b < sequences; ++b) lengths.push_back(test::uniform(r, 0, page_tokens + recent + 1));
    // What the steps should lead to.
    std::vector<int> expected_window = window_table, expected_quantized(window_table.size(), -1), next;
    std::vector<std::byte> expected_keys = to.keys.download(), expected_values = to.values.download();
    test::device_buffer<int> window_device(window_table), quantized_device(expected_quantized),
        lengths_device(lengths), fresh_device(static_cast<std::size_t>(sequences));
    from.ref.block_table = window_device.get();
    to.ref.block_table = quantized_device.get();
    from.ref.tokens = to.ref.tokens = lengths_device.get();
    from.ref.sequences = to.ref.sequences = sequences;
    from.ref.table_columns = to.ref.table_columns = columns;
    test::device_buffer<unsigned> bad(1);
    bad.clear();
    int used = 0, committed = 0;
    for (int step = 0; step < steps; ++step) {
        next.clear();
        fresh.clear();
        for (int b = 0; b < sequences; ++b) {
            int i = 0;  // the oldest page that is not quantized
            while (i < columns && expected_window[static_cast<std::size_t>(b * columns + i)] < 0) ++i;
            const bool due = lengths[static_cast<std::size_t>(b)] >= recent + (i + 1) * page_tokens;
            const bool given = b % 7 != 3;  // some have no page to go to
            fresh.push_back(given ? used++ % pages : -1);
            next.push_back(fresh.back());
            if (!due || !given || i >= columns) continue;
            const auto entry = static_cast<std::size_t>(b * columns + i);
            const auto page = static_cast<std::size_t>(expected_window[entry]);
            for (std::size_t h = 0; h < heads; ++h) {
                const auto block = [&](const auto& scheme, const block_shape& s, const std::vector<float>& x,
                                       std::vector<std::byte>& all) {
                    const auto bytes =
                        quantized_block(scheme, s, {layer, static_cast<int>(h)}, x, quantized.bad);
                    std::copy(bytes.begin(), bytes.end(),
                              all.begin() +
                                  static_cast<std::ptrdiff_t>(
                                      (static_cast<std::size_t>(fresh.back()) * heads + h) * bytes.size()));
                };
                block(quantized.key_scheme, Quantized::key_shape(), window.key_numbers[page * heads + h],
                      expected_keys);
                block(quantized.value_scheme, Quantized::value_shape(),
                      window.value_numbers[page * heads + h], expected_values);
            }
            expected_quantized[entry] = fresh.back();
            expected_window[entry] = -1;
            next.back() = -2 - static_cast<int>(page);
            ++committed;
        }
        fresh_device.upload(fresh);
        lengths_device.upload(lengths);
        const auto status =
            cuda::commit_full_pages(from.ref, to.ref, window_device.get(), quantized_device.get(), recent,
                                    fresh_device.get(), bad.get(), nullptr);
        CHECK(status, "%s", status.message);
        CUDA_OK(cudaDeviceSynchronize());
        CHECK(fresh_device.download() == next, "step %d: fresh pages", step);
        for (int& n : lengths) ++n;
    }
    CHECK(committed > sequences / 2, "only %d pages were committed", committed);
    CHECK(window_device.download() == expected_window, "table of window pages");
    CHECK(quantized_device.download() == expected_quantized, "table of quantized pages");
    CHECK(to.keys.download() == expected_keys, "keys of %d committed pages", committed);
    CHECK(to.values.download() == expected_values, "values of %d committed pages", committed);
    CHECK(bad.download()[0] == quantized.bad, "%u numbers are not finite, expected %u", bad.download()[0],
          quantized.bad);
    std::printf("  %d pages of %d sequences committed in %d steps\n", committed, sequences, steps);
}

template <int Bits, int Group, class Encoder, class Params = byte_params, class TokenScales = no_token_scales>
using encoded_grid = affine<Bits, per_channel<Group>, Params, Encoder, TokenScales>;
template <class K, class V, int D, int P, int VD = D>
using f = cuda::block_pair<K, V, D, P, VD>;
template <int K, int V, int D, int P>
using rows = f<rows_of<K>, rows_of<V>, D, P>;
constexpr int fp8 = row_layout_number("fp8"), fp8_e5m2 = row_layout_number("fp8-e5m2"),
              nvfp4 = row_layout_number("nvfp4"), mxfp8 = row_layout_number("mxfp8"),
              mxfp4 = row_layout_number("mxfp4"), q8_0 = row_layout_number("q8_0"),
              q4_0 = row_layout_number("q4_0"), q4_1 = row_layout_number("q4_1"),
              q5_0 = row_layout_number("q5_0"), q5_1 = row_layout_number("q5_1"),
              over6 = row_layout_number("nvfp4-4over6"), q6_0 = row_layout_number("q6_0"),
              iq4_nl = row_layout_number("iq4_nl");

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1) seed = static_cast<unsigned>(std::strtoul(argv[1], nullptr, 10));
    std::printf("seed %u\n", seed);
#if !defined(PART) || PART == 0
    check<float16, cuda::preset_pair<std4, 128>, cuda::preset_pair<low2, 128>>("std4 -> low2");
    check<float16, cuda::preset_pair<std4, 128>, cuda::preset_pair<low2, 128>>("std4 -> low2", 2);
    check<float16, cuda::preset_pair<low2, 128>, cuda::preset_pair<std4, 128>>("low2 -> std4");
    check<float16, cuda::preset_pair<low2, 128>, cuda::preset_pair<std4, 128>>("low2 -> std4", 1);
    check<bfloat16, cuda::preset_pair<low2, 128>>("low2", 2);
#endif
#if !defined(PART) || PART == 1
    check<bfloat16, cuda::preset_pair<ref8, 128>, cuda::preset_pair<hi6, 128>>("ref8 -> hi6");
    check<float16, cuda::preset_pair<hi6, 128>, cuda::preset_pair<std5, 128>>("hi6 -> std5", 2);
    check<float, cuda::preset_pair<std5, 128>>("std5");
    check_commit<cuda::preset_pair<low3, 32, 16>>(700, 30);
    check_commit<cuda::preset_pair<std4, 64, 32>>(3, 80);
#endif
#if !defined(PART) || PART == 2
    check<bfloat16, cuda::preset_pair<mix5, 128>, cuda::preset_pair<low3, 128>>("mix5 -> low3");
    check<float16, cuda::preset_pair<mix4, 128>, cuda::preset_pair<low3, 128>>("mix4 -> low3", 2);
    check<float16, cuda::preset_pair<low3, 128>>("low3", 1);
    check<bfloat16, cuda::preset_pair<low3, 80, 32>>("low3, dim 80, page 32", 2);
#endif
#if !defined(PART) || PART == 3
    check<float, f<encoded_grid<3, 0, min_max>, encoded_grid<8, 0, enclosing>, 64, 64>>(
        "min_max, enclosing, dim 64");
    check<float, f<encoded_grid<4, 32, shrink_search, params<float16>>,
                   encoded_grid<2, 0, least_squares, params<bfloat16>>, 96, 64>>(
        "search with fp16, least squares with bf16 parameters, dim 96");
    check<bfloat16, f<encoded_grid<1, 16, least_squares_below_3_bits, params<float>>,
                      encoded_grid<7, 32, mean_corrected<enclosing>, params<float>>, 64, 48>>(
        "below 3 bits, corrected enclosing, fp32 parameters, page 48");
    check<float,
          f<encoded_grid<4, 20, mean_corrected<error_feedback<min_max>>>,
            encoded_grid<3, 0, mean_corrected<shrink_search>, byte_params, token_scales<params<bfloat16>>>,
            72, 40>>("corrected feedback, corrected search with bf16 token scales, odd shape", 2);
    check<float16, f<encoded_grid<5, 10, error_feedback<shrink_search, least_squares>, params<bfloat16>>,
                     encoded_grid<6, 7, least_squares, byte_params, token_scales<byte_params>>, 13, 17, 9>>(
        "very odd shape", 2);
#endif
#if !defined(PART) || PART == 4
    check<float16,
          f<encoded_grid<2, 16, error_feedback<least_squares>, byte_params, token_scales<params<float>>>,
            encoded_grid<1, 16, mean_corrected<least_squares>, packed_params<float16>,
                         token_scales<byte_params>>,
            256, 16>>("token scales of keys, dim 256, page 16", 2);
    check<float16, cuda::preset_pair<std4, 256, 256>>("std4, dim 256, page 256: part by part", 2);
    check<bfloat16, cuda::preset_pair<low2, 256, 256>>("low2, dim 256, page 256: part by part", 1);
    check<float16, test::small_std4>("std4, dim 512, for devices with 99 KB: part by part", 1);
    check<float16, f<encoded_grid<3, 12, min_max>, full<float16>, 256, 256>>(
        "groups of 12, fp16 values, dim 256, page 256: part by part");
    check<float16, f<full<bfloat16>, encoded_grid<3, 36, mean_corrected<least_squares>>, 256, 250>>(
        "bf16 keys, groups of 36, dim 256, page 250: part by part");
#endif
#if !defined(PART) || PART == 5
    check<bfloat16, f<mixed_affine<code_widths<7, 5, 1, 0>, average_eighths<28>, per_channel<32>, byte_params,
                                   error_feedback<least_squares>>,
                      affine<4, per_token<>>, 64, 256>>("7, 5, 1 and 0 bits, groups of 32, dim 64, page 256",
                                                        2);
    check<float16, f<mixed_affine<code_widths<4, 2, 0>, average_eighths<20>, per_channel<>,
                                  packed_params<float16>, mean_corrected<shrink_search>>,
                     full<float16>, 256, 32>>("4, 2 and 0 bits, fp16 parameters, dim 256, page 32", 1);
    check<float, f<mixed_affine<code_widths<8, 3>, average_eighths<40>, per_channel<20>, byte_params,
                                error_feedback<min_max, least_squares_below_3_bits>>,
                   detail::preset_values<4>, 72, 40>>("8 and 3 bits, odd shape", 2);
    check<float16,
          f<mixed_affine<code_widths<6, 3, 2>, average_eighths<25>, per_channel<64>>,
            detail::preset_values<3, packed_params<float16>, token_scales<params<float16>>>, 96, 128>>(
        "6, 3 and 2 bits, dim 96", 1);
    check<float16, f<encoded_grid<8, 0, least_squares>, detail::preset_values<8>, 64, 128>>("8 bits, dim 64");
#endif
#if !defined(PART) || PART == 7
    // Rows of tokens in the bytes of other systems.
    check<float16, rows<fp8, nvfp4, 64, 32>, rows<q8_0, mxfp4, 64, 32>>("fp8, nvfp4 -> q8_0, mxfp4");
    check<bfloat16, rows<over6, iq4_nl, 96, 16>, rows<mxfp8, q6_0, 96, 16>>(
        "nvfp4-4over6, iq4_nl -> mxfp8, q6_0");
    check<float, rows<q4_0, q4_1, 64, 17>, rows<q5_0, q5_1, 64, 17>>("q4_0, q4_1 -> q5_0, q5_1");
    check<float16, rows<fp8_e5m2, fp8, 80, 32>, f<affine<4, per_channel<32>>, int8, 80, 32>>(
        "fp8-e5m2, fp8 -> 4 bits, int8");
#endif
#if !defined(PART) || PART == 6
    // Behind transforms.
    check<float16, cuda::preset_pair<std4_h, 128>, cuda::preset_pair<std4, 128>>("std4-h -> std4");
    using turned_tokens =
        f<hadamard<affine<4, per_token<>>, 32>, rotated<affine<3, per_token<16>>>, 80, 32, 48>;
    using turned_channels =
        f<rotated<affine<4, per_channel<32>>>, hadamard<detail::preset_values<4>, 0, 7>, 80, 32, 48>;
    check<float, turned_tokens, turned_channels>(
        "Hadamard blocks of 32, rotated values -> rotated, Hadamard");
    check<bfloat16, turned_channels, f<full<float16>, full<bfloat16>, 80, 32, 48>>("the same -> 16 bit");
    check<float16, cuda::preset_pair<std4, 64, 64>, cuda::preset_pair<std4_h, 64, 64>>(
        "std4 -> std4-h, dim 64");
    check<bfloat16, cuda::preset_pair<std4_h, 64, 32>>("std4-h, dim 64, page 32");
    check<bfloat16, f<hadamard<affine<4, per_channel<>>, 16, 3>, affine<4, per_token<>>, 32, 64>>(
        "Hadamard blocks of 16, dim 32");
    check<float16, f<hadamard<mixed_affine<code_widths<4, 2, 0>, average_eighths<16>, per_channel<32>>>,
                     detail::preset_values<2>, 64, 32>>("Hadamard before 4, 2 and 0 bits");
#endif
    return test::report("quantize");
}
