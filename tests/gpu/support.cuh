// What the GPU tests share: checks, device memory that is poisoned, random tensors, caches built by the CPU's
// encoders.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvq/cuda/layout/block_access.cuh>

namespace test {

inline int failures = 0;
inline int checks = 0;

#define CHECK(condition, ...)                                     \
    do {                                                          \
        ++test::checks;                                           \
        if (!(condition)) {                                       \
            if (++test::failures <= 40) {                         \
                std::printf("FAILED %s:%d ", __FILE__, __LINE__); \
                std::printf(__VA_ARGS__);                         \
                std::printf("\n");                                \
            }                                                     \
        }                                                         \
    } while (0)

inline void cuda_ok(cudaError_t code, const char* what, int line) {
    if (code != cudaSuccess) {
        std::printf("FATAL line %d: %s: %s\n", line, what, cudaGetErrorString(code));
        std::exit(2);
    }
}
#define CUDA_OK(call) test::cuda_ok((call), #call, __LINE__)

inline int report(const char* name) {
    std::printf("%s: %d checks, %d failures\n", name, checks, failures);
    return failures ? 1 : 0;
}

/// How often to repeat what differs from run to run only where blocks run side by side: on a device `runs`
/// times; emulated, where every run is the same, twice, which shows what a run leaves behind.
constexpr int repeats(int runs) {
#ifdef __CUDACC__
    return runs;
#else
    return std::min(runs, 2);
#endif
}
/// The first number where kernels are emulated, the second one on a device.
constexpr int emulated_or([[maybe_unused]] int emulated, [[maybe_unused]] int on_device) {
#ifdef __CUDACC__
    return on_device;
#else
    return emulated;
#endif
}
/// A number of sequences of which every thread block has several, or their length: emulated, where there are
/// three multiprocessors and each token takes long, a quarter.
constexpr int many(int on_device) {
#ifdef __CUDACC__
    return on_device;
#else
    return on_device / 4;
#endif
}

/// Device memory, filled with 0xff (NaN in every float format) before use.
template <class T>
class device_buffer {
public:
    explicit device_buffer(std::size_t n) : size_(n) {
        CUDA_OK(cudaMalloc(&data_, n * sizeof(T) + 16));
        poison();
    }
    explicit device_buffer(const std::vector<T>& host) : device_buffer(host.size()) { upload(host); }
    device_buffer(const device_buffer&) = delete;
    device_buffer& operator=(const device_buffer&) = delete;
    ~device_buffer() { cudaFree(data_); }
    void poison() { CUDA_OK(cudaMemset(data_, 0xff, size_ * sizeof(T) + 16)); }
    void clear() { CUDA_OK(cudaMemset(data_, 0, size_ * sizeof(T) + 16)); }
    void upload(const std::vector<T>& host) {
        CUDA_OK(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
        CUDA_OK(cudaStreamSynchronize(nullptr));  // the copy may still be under way
    }
    std::vector<T> download() const {
        std::vector<T> host(size_);
        CUDA_OK(cudaMemcpy(host.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
        return host;
    }
    T* get() const { return data_; }
    std::size_t size() const { return size_; }

private:
    T* data_ = nullptr;
    std::size_t size_;
};

using rng = std::mt19937;

/// The number that std::normal_distribution<float> of libstdc++ begins with (polar method), without the
/// logarithms of long double that it spends on each.
inline float normal(rng& r) {
    const auto uniform = [&] { return std::min(static_cast<float>(r()) * 0x1p-32f, 0x1.fffffep-1f); };
    float x, y, size;
    do {
        x = 2.0f * uniform() - 1.0f;
        y = 2.0f * uniform() - 1.0f;
        size = x * x + y * y;
    } while (size > 1.0f || size == 0.0f);
    return y * std::sqrt(-2.0f * std::log(size) / size);
}
inline int uniform(rng& r, int lo, int hi) { return std::uniform_int_distribution<int>{lo, hi}(r); }

/// Keys and values as models make them: some channels are much larger than others, some tokens are spikes.
inline std::vector<float> tensor_values(rng& r, int tokens, int dim) {
    std::vector<float> factor(static_cast<std::size_t>(dim));
    for (float& f : factor) f = uniform(r, 0, 15) == 0 ? 4.0f : 1.0f;
    std::vector<float> x(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(dim));
    for (int t = 0; t < tokens; ++t) {
        const float size = uniform(r, 0, 31) == 0 ? 3.0f : 1.0f;
        for (int c = 0; c < dim; ++c)
            x[static_cast<std::size_t>(t * dim + c)] = size * factor[static_cast<std::size_t>(c)] * normal(r);
    }
    return x;
}

/// Of a rotation: random orthogonal matrices, from Householder reflections.
inline std::vector<float> random_rotations(rng& r, int count, int dim) {
    std::vector<float> all;
    const auto size = static_cast<std::size_t>(dim);
    for (int m = 0; m < count; ++m) {
        std::vector<double> x(size * size, 0.0), v(size);
        for (std::size_t i = 0; i < size; ++i) x[i * size + i] = 1.0;
        for (int reflection = 0; reflection < 4; ++reflection) {
            double square = 0.0;
            for (double& y : v) y = static_cast<double>(normal(r)), square += y * y;
            for (std::size_t i = 0; i < size; ++i) {
                double dot = 0.0;
                for (std::size_t c = 0; c < size; ++c) dot += x[i * size + c] * v[c];
                for (std::size_t c = 0; c < size; ++c) x[i * size + c] -= 2.0 / square * dot * v[c];
            }
        }
        for (const double y : x) all.push_back(static_cast<float>(y));
    }
    return all;
}
/// A scheme for caches of this shape; rotations are random.
template <class S>
S make_scheme([[maybe_unused]] rng& r, [[maybe_unused]] int layers, [[maybe_unused]] int heads,
              [[maybe_unused]] int dim) {
    if constexpr (std::is_default_constructible_v<S>)
        return S{};
    else
        return S(kvq::rotation(layers, heads, dim, random_rotations(r, layers * heads, dim)));
}

/// Makes what a block holds for tokens from `used` on unusable: a kernel that looks at it gets NaN.
template <class S>
void poison_tokens(const kvq::block_shape& s, std::byte* block, int used) {
    for (int t = used; t < s.tokens; ++t) {
        if constexpr (kvq::cuda::detail::token_row_scheme<S>) {
            constexpr kvq::row_layout l = S::fixed_layout();
            const int row = l.row_bytes(s.dim), scales = l.scales_behind(s.dim);
            std::memset(block + t * row, 0xff, static_cast<std::size_t>(row));
            std::memset(block + s.tokens * row + t * scales, 0xff, static_cast<std::size_t>(scales));
        } else if constexpr (kvq::cuda::detail::token_record_scheme<S>) {
            constexpr kvq::record_layout l = S::fixed_layout();
            const int row = l.row_bytes(s.dim), scales = l.bytes_behind(s.dim);
            std::memset(block + t * row, 0xff, static_cast<std::size_t>(row));
            std::memset(block + s.tokens * row + t * scales, 0xff, static_cast<std::size_t>(scales));
        } else if constexpr (kvq::codec_of<S>().content == kvq::block_content::own) {
            continue;  // nobody knows where their scales are
        } else if constexpr (kvq::full_precision<S>) {
            using T = typename S::value_type;
            for (int c = 0; c < s.dim; ++c)
                std::memset(block + sizeof(T) * S::element(kvq::value_layout<T>(s), s, t, c), 0xff,
                            sizeof(T));
        } else if constexpr (!kvq::cuda::detail::codes_ranges<S>) {
            if constexpr (S::token_scale_type::present &&
                          S::token_scale_type::bytes(1) > 1)  // codes are never NaN
                std::memset(
                    block + typename S::layout_type{}.token_scale_offset(s) + S::token_scale_type::bytes(t),
                    0xff, S::token_scale_type::bytes(1));
        } else {
            if (!S::granularity_type::on_tokens) continue;
            using P = typename S::parameter;
            const int group = S::granularity_type::group;
            const int groups = group > 0 && group < s.dim ? (s.dim + group - 1) / group : 1;
            for (int g = 0; g < groups; ++g) {
                std::byte* const at = block + typename S::layout_type{}.parameter_offset(s, g, t);
                std::memset(at, 0xff, sizeof(P));
                if (S::levels::has_bias)
                    std::memset(at + typename S::layout_type{}.section_bytes(s), 0xff, sizeof(P));
            }
        }
    }
}

/// What the transform of a scheme needs in device memory, for one layer of a cache.
template <class S>
struct device_rotation {
    device_buffer<float> columns, rows;

    device_rotation(const S& scheme, int layer, int heads, int dim)
        : columns(matrices(scheme, layer, heads, dim, true)),
          rows(matrices(scheme, layer, heads, dim, false)) {}
    template <class Ref>
    void set(Ref& ref, kvq::tensor role, int layer) const {
        ref.set_transform(role, layer, columns.size() > 0 ? columns.get() : nullptr,
                          rows.size() > 0 ? rows.get() : nullptr);
    }

private:
    static std::vector<float> matrices([[maybe_unused]] const S& scheme, [[maybe_unused]] int layer,
                                       [[maybe_unused]] int heads, [[maybe_unused]] int dim,
                                       [[maybe_unused]] bool columns) {
        if constexpr (kvq::cuda::detail::transform_in<S>.kind == kvq::transform_kind::matrix) {
            const float* const all = columns ? scheme.transform.columns() : scheme.transform.rows();
            const std::ptrdiff_t size = std::ptrdiff_t{1} * heads * dim * dim;
            return {all + layer * size, all + (layer + 1) * size};
        } else {
            return {};
        }
    }
};

/// A batch of sequences whose pages the CPU quantized; dequantized values beside them.
template <class Format>
struct quantized_batch {
    using F = Format;
    int kv_heads;
    std::vector<int> lengths;
    int columns, pages;
    std::vector<int> table;               // [sequences][columns]
    std::vector<std::byte> keys, values;  // pages
    std::vector<std::byte> lower[2];      // K, V: pages of lower planes
    typename F::keys key_scheme;
    typename F::values value_scheme;
    std::vector<std::uint16_t> plans;  // of keys of mixed widths, or none
    // Dequantized: [sequence][head][token][dim]
    std::vector<std::vector<std::vector<float>>> key_values, value_values;

    /// Of a channel: where dominant keys and the queries that they answer point.
    static float direction(int channel) { return channel % 3 == 0 ? -1.0f : 1.0f; }

    /// value_sizes, key_sizes: the values (keys) of every block are multiplied by one of them. peak: what one
    /// key of every page has in `direction` besides.
    quantized_batch(rng& r, int heads, std::vector<int> tokens, bool with_holes = false,
                    const std::vector<float>& value_sizes = {1.0f},
                    const std::vector<float>& key_sizes = {1.0f}, float peak = 0.0f)
        : kv_heads(heads),
          lengths(std::move(tokens)),
          key_scheme(make_scheme<typename F::keys>(r, 1, heads, F::head_dim)),
          value_scheme(make_scheme<typename F::values>(r, 1, heads, F::value_dim)) {
        int longest = 1, used_pages = 0;
        if constexpr (kvq::cuda::detail::codec<typename F::keys>.several_widths())
            if (uniform(r, 0, 3) > 0) {
                if constexpr (kvq::cuda::detail::has_transform<typename F::keys>)
                    key_scheme = typename F::keys(key_scheme.transform,
                                                  typename F::keys::inner_scheme(random_plan(r)));
                else
                    key_scheme = typename F::keys(random_plan(r));
                plans.resize(heads_() * static_cast<std::size_t>(kvq::cuda::key_plan_words<F>));
                kvq::cuda::write_key_plan<F>(*key_scheme.plan(), 0, plans.data());
            }
        for (const int n : lengths) {
            longest = std::max(longest, n);
            used_pages += (n + F::page_tokens - 1) / F::page_tokens;
        }
        columns = (longest + F::page_tokens - 1) / F::page_tokens;
        pages = used_pages + 3;
        std::vector<int> order(static_cast<std::size_t>(pages));
        for (int i = 0; i < pages; ++i) order[static_cast<std::size_t>(i)] = i;
        std::shuffle(order.begin(), order.end(), r);
        const std::size_t all_heads = heads_();
        keys.assign(static_cast<std::size_t>(pages) * all_heads * F::key_block_bytes, std::byte{0xff});
        values.assign(static_cast<std::size_t>(pages) * all_heads * F::value_block_bytes, std::byte{0xff});
        if constexpr (kvq::cuda::detail::has_lower<F>) {
            lower[0].assign(static_cast<std::size_t>(pages) * all_heads * F::lower_key_bytes,
                            std::byte{0xff});
            lower[1].assign(static_cast<std::size_t>(pages) * all_heads * F::lower_value_bytes,
                            std::byte{0xff});
        }
        table.assign(lengths.size() * static_cast<std::size_t>(columns),
                     with_holes ? -1 : number_of(pages - 1));
        key_values.resize(lengths.size());
        value_values.resize(lengths.size());
        std::size_t next = 0;
        for (std::size_t b = 0; b < lengths.size(); ++b) {
            const int n = lengths[b];
            key_values[b].assign(all_heads, std::vector<float>(static_cast<std::size_t>(n) * F::head_dim));
            value_values[b].assign(all_heads, std::vector<float>(static_cast<std::size_t>(n) * F::value_dim));
            for (int p = 0; p * F::page_tokens < n; ++p) {
                const int page = order[next++];
                table[b * static_cast<std::size_t>(columns) + static_cast<std::size_t>(p)] = number_of(page);
                for (std::size_t h = 0; h < all_heads; ++h) {
                    const std::size_t block = static_cast<std::size_t>(page) * all_heads + h;
                    const kvq::block_id id{0, static_cast<int>(h)};
                    std::byte *lower_keys = nullptr, *lower_values = nullptr;
                    if constexpr (kvq::cuda::detail::has_lower<F>) {
                        const std::size_t of = static_cast<std::size_t>(lower_of(page)) * all_heads + h;
                        lower_keys = &lower[0][of * F::lower_key_bytes];
                        lower_values = &lower[1][of * F::lower_value_bytes];
                    }
                    code(key_scheme, id, r, F::key_shape(), &keys[block * F::key_block_bytes], lower_keys,
                         key_values[b][h].data(), p * F::page_tokens, n, one_of(r, key_sizes), peak);
                    code(value_scheme, id, r, F::value_shape(), &values[block * F::value_block_bytes],
                         lower_values, value_values[b][h].data(), p * F::page_tokens, n,
                         one_of(r, value_sizes));
                }
            }
        }
    }

    /// Of a format with two planes: the page of lower planes that belongs to a page, and what tables say.
    int lower_of(int page) const { return pages - 1 - page; }
    int number_of(int page) const {
        return kvq::cuda::detail::names_planes<F> ? kvq::cuda::detail::plane_number(page, lower_of(page))
                                                  : page;
    }

private:
    std::size_t heads_() const { return static_cast<std::size_t>(kv_heads); }

    static float one_of(rng& r, const std::vector<float>& sizes) {
        return sizes.size() == 1
                   ? sizes[0]
                   : sizes[static_cast<std::size_t>(uniform(r, 0, static_cast<int>(sizes.size()) - 1))];
    }

    /// Some channels matter a thousand times more than others, in every second head a million times: more of
    /// them have the widest codes, and none.
    std::shared_ptr<const kvq::width_plan> random_plan(rng& r) const {
        kvq::width_plan plan{kv_heads, F::head_dim, {}};
        for (int h = 0; h < kv_heads; ++h) {
            std::vector<double> importance(F::head_dim);
            for (double& x : importance)
                x = std::exp((h % 2 == 0 ? 2.0 : 5.0) * static_cast<double>(normal(r)));
            plan.blocks.push_back(kvq::allocate_widths(importance, F::keys::width_list::values,
                                                       F::keys::row_words(F::head_dim)));
        }
        return std::make_shared<const kvq::width_plan>(std::move(plan));
    }

    struct block {
        std::vector<std::byte> bytes;
        std::vector<float> dequantized;
        std::vector<std::byte> lower = {};
    };
    template <class S>
    static block random_block(const S& scheme, kvq::block_id id, rng& r, const kvq::block_shape& s,
                              float size, float peak) {
        block made{std::vector<std::byte>(scheme.block_bytes(s)), tensor_values(r, s.tokens, s.dim)};
        for (float& number : made.dequantized) number *= size;
        for (int c = 0; c < s.dim && peak > 0.0f; ++c)
            made.dequantized[static_cast<std::size_t>(5 % s.tokens * s.dim + c)] += peak * direction(c);
        scheme.quantize(s, id, made.dequantized.data(), made.bytes.data());
        scheme.dequantize(s, id, made.bytes.data(), made.dequantized.data());
        if constexpr (kvq::cuda::detail::has_lower<F>) {
            // Any lower plane will do.
            made.lower.resize(s.role == kvq::tensor::key ? F::lower_key_bytes : F::lower_value_bytes);
            for (std::byte& b : made.lower) b = static_cast<std::byte>(r() & 0xffu);
            for (int t = 0; t < s.tokens; ++t)
                for (int c = 0; c < s.dim; ++c)
                    made.dequantized[static_cast<std::size_t>(t * s.dim + c)] =
                        kvq::cuda::detail::read_planes<S>(s, made.bytes.data(), made.lower.data(), t, c);
        }
        return made;
    }
    /// Emulated, where the CPU would quantize for longer than kernels run, blocks are drawn from a few, but
    /// for formats with plans and transforms, which differ from head to head.
    template <class S>
    static block one_block(const S& scheme, kvq::block_id id, rng& r, const kvq::block_shape& s, float size,
                           float peak) {
        constexpr int few = emulated_or(20, 0);
        if constexpr (few > 0 && !kvq::cuda::detail::codec<typename F::keys>.several_widths() &&
                      !kvq::cuda::detail::has_transform<S>) {
            static std::map<std::tuple<kvq::tensor, float, float>, std::vector<block>> all;
            std::vector<block>& made = all[{s.role, size, peak}];
            const auto i = static_cast<std::size_t>(few - uniform(r, 1, few));
            if (i < made.size()) return made[i];
            made.push_back(random_block(scheme, id, r, s, size, peak));
            return made.back();
        }
        return random_block(scheme, id, r, s, size, peak);
    }

    template <class S>
    static void code(const S& scheme, kvq::block_id id, rng& r, const kvq::block_shape& s, std::byte* to,
                     [[maybe_unused]] std::byte* lower, float* dequantized, int first, int n, float size,
                     float peak = 0.0f) {
        const block b = one_block(scheme, id, r, s, size, peak);
        std::copy(b.bytes.begin(), b.bytes.end(), to);
        std::copy(b.lower.begin(), b.lower.end(), lower);
        const int used = std::min(s.tokens, n - first);
        std::copy(b.dequantized.begin(), b.dequantized.begin() + used * s.dim,
                  dequantized + static_cast<std::size_t>(first) * s.dim);
        poison_tokens<S>(s, to, used);
    }
};

/// A quantized batch in device memory.
template <class Format>
struct device_batch {
    device_buffer<std::byte> keys, values, lower_keys, lower_values;
    device_buffer<int> table, lengths;
    device_buffer<std::uint16_t> plans;
    device_rotation<typename Format::keys> key_rotation;
    device_rotation<typename Format::values> value_rotation;
    kvq::cuda::cache_ref<Format> ref;

    std::unique_ptr<device_buffer<std::byte>> placed[2][2];  // strided rows of K and V, their scales

    explicit device_batch(const quantized_batch<Format>& b)
        : keys(b.keys),
          values(b.values),
          lower_keys(b.lower[0]),
          lower_values(b.lower[1]),
          table(b.table),
          lengths(b.lengths),
          plans(b.plans),
          key_rotation(b.key_scheme, 0, b.kv_heads, Format::head_dim),
          value_rotation(b.value_scheme, 0, b.kv_heads, Format::value_dim) {
        key_rotation.set(ref, kvq::tensor::key, 0);
        value_rotation.set(ref, kvq::tensor::value, 0);
        if (!b.plans.empty()) ref.key_plans = plans.get();
        ref.key_pages = keys.get();
        ref.value_pages = values.get();
        if constexpr (kvq::cuda::detail::has_lower<Format>) {
            const auto heads = static_cast<std::size_t>(b.kv_heads);
            ref.lower = {{lower_keys.get(), lower_values.get(), heads * Format::lower_key_bytes,
                          heads * Format::lower_value_bytes}};
        }
        ref.key_page_bytes = kvq::cuda::cache_ref<Format>::dense_key_page(b.kv_heads);
        ref.value_page_bytes = kvq::cuda::cache_ref<Format>::dense_value_page(b.kv_heads);
        if constexpr (kvq::cuda::detail::is_strided<Format>) {
            place_rows<kvq::tensor::key>(b, b.keys, placed[0]);
            place_rows<kvq::tensor::value>(b, b.values, placed[1]);
        }
        ref.block_table = table.get();
        ref.tokens = lengths.get();
        ref.sequences = static_cast<int>(b.lengths.size());
        ref.table_columns = b.columns;
        ref.kv_heads = b.kv_heads;
    }

private:
    /// As other systems have pages: [token][head] of rows that a gap follows, and room for the other tensor.
    /// Scales: [page][head][token], or of values [page][token][head].
    template <kvq::tensor Role>
    void place_rows(const quantized_batch<Format>& b, const std::vector<std::byte>& dense,
                    std::unique_ptr<device_buffer<std::byte>> (&to)[2]) {
        namespace of = kvq::cuda::detail;
        constexpr auto layout = of::scheme_of<Role, Format>::fixed_layout();
        constexpr int dim = of::dim_of<Role, Format>, page = Format::page_tokens;
        constexpr bool key = Role == kvq::tensor::key;
        const auto heads = static_cast<std::size_t>(b.kv_heads), count = static_cast<std::size_t>(b.pages),
                   row = static_cast<std::size_t>(layout.row_bytes(dim)),
                   scale = static_cast<std::size_t>(layout.scales_behind(dim)), tokens = std::size_t{page},
                   block = key ? Format::key_block_bytes : Format::value_block_bytes, gap = row + 16;
        kvq::cuda::row_memory m{heads * gap, gap};
        const std::size_t page_bytes = 2 * tokens * m.token_bytes;
        std::vector<std::byte> rows(count * page_bytes, std::byte{0xff}),
            of_rows(count * tokens * heads * scale);
        m.scale_page_bytes = tokens * heads * scale;
        m.scale_token_bytes = key ? scale : heads * scale;
        m.scale_head_bytes = key ? tokens * scale : scale;
        for (std::size_t p = 0; p < count; ++p)
            for (std::size_t h = 0; h < heads; ++h)
                for (std::size_t t = 0; t < tokens; ++t) {
                    const std::byte* const from = &dense[(p * heads + h) * block];
                    std::copy_n(from + t * row, row,
                                &rows[p * page_bytes + t * m.token_bytes + h * m.head_bytes]);
                    std::copy_n(from + tokens * row + t * scale, scale,
                                of_rows.data() + p * m.scale_page_bytes + t * m.scale_token_bytes +
                                    h * m.scale_head_bytes);
                }
        to[0] = std::make_unique<device_buffer<std::byte>>(rows);
        to[1] = std::make_unique<device_buffer<std::byte>>(of_rows);
        if (scale > 0) m.scales = to[1]->get();
        (key ? ref.key_pages : ref.value_pages) = to[0]->get();
        (key ? ref.key_page_bytes : ref.value_page_bytes) = page_bytes;
        if constexpr (key)
            ref.own_keys.memory = m;
        else
            ref.own_values.memory = m;
    }
};

}  // namespace test
