// Bytes: what the device stores, commits and requantizes is what the CPU writes; what it dequantizes is what
// the CPU dequantizes.
#include <kvq/cuda.cuh>

#include "support.cuh"

using namespace kvq;

namespace {

/// Ordinary numbers with everything unpleasant among them.
std::vector<float> hostile_values(test::rng& r, int tokens, int dim) {
    std::vector<float> x = test::tensor_values(r, tokens, dim);
    const float odd[] = {NAN,   INFINITY, -INFINITY, 65504.0f, -65504.0f, 0.0f,
                         -0.0f, 6e-8f,    -1e-7f,    1e-4f,    3.0f};
    for (float& v : x)
        if (test::uniform(r, 0, 40) == 0) v = odd[test::uniform(r, 0, 10)];
    for (int c = 0; c < dim; ++c) {
        if (tokens > 3) x[static_cast<std::size_t>(3 * dim + c)] = 1.5f;  // a constant token
        if (tokens > 4)
            x[static_cast<std::size_t>(4 * dim + c)] = c % 2 ? 0.0f : -0.0f;  // zeros of both signs
        if (tokens > 5) x[static_cast<std::size_t>(5 * dim + c)] = NAN;
        if (tokens > 6) x[static_cast<std::size_t>(6 * dim + c)] = c % 3 ? 2.0f : -0.0f;
        if (tokens > 7) x[static_cast<std::size_t>(7 * dim + c)] = static_cast<float>(c % 5) * 6e-8f;
        if (tokens > 8) x[static_cast<std::size_t>(8 * dim + c)] = static_cast<float>(c % 7) * 1e-37f;
        if (tokens > 9) x[static_cast<std::size_t>(9 * dim + c)] = static_cast<float>(c % 7 - 3) * 2e33f;
        if (tokens > 10) x[static_cast<std::size_t>(10 * dim + c)] = static_cast<float>(c % 3 - 1) * 3.3e38f;
    }
    for (int t = 0; t < tokens; ++t)
        x[static_cast<std::size_t>(t * dim + dim / 2)] = -2.25f;  // a constant channel
    return x;
}

template <class T>
std::vector<float> rounded(std::vector<float> x) {
    for (float& v : x)
        if constexpr (!std::is_same_v<T, float>) v = static_cast<float>(T(v));
    return x;
}

/// The scheme of K or V: always the same.
template <class S>
S scheme_of(int heads, int dim) {
    test::rng r(5);
    return test::make_scheme<S>(r, 1, heads, dim);
}

template <class Format>
struct pool {
    int heads, pages;
    test::device_buffer<std::byte> keys, values;
    test::device_rotation<typename Format::keys> key_rotation;
    test::device_rotation<typename Format::values> value_rotation;
    cuda::cache_ref<Format> ref;
    pool(int h, int p)
        : heads(h),
          pages(p),
          keys(cuda::cache_ref<Format>::dense_key_page(h) * static_cast<std::size_t>(p)),
          values(cuda::cache_ref<Format>::dense_value_page(h) * static_cast<std::size_t>(p)),
          key_rotation(scheme_of<typename Format::keys>(h, Format::head_dim), 0, h, Format::head_dim),
          value_rotation(scheme_of<typename Format::values>(h, Format::value_dim), 0, h, Format::value_dim) {
        key_rotation.set(ref, tensor::key, 0);
        value_rotation.set(ref, tensor::value, 0);
        ref.key_pages = keys.get();
        ref.value_pages = values.get();
        ref.key_page_bytes = cuda::cache_ref<Format>::dense_key_page(h);
        ref.value_page_bytes = cuda::cache_ref<Format>::dense_value_page(h);
        ref.kv_heads = h;
    }
};

std::size_t first_difference(const std::byte* a, const std::byte* b, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i)
        if (a[i] != b[i]) return i;
    return n;
}

/// Compares one page of the pool with CPU blocks of [token][head][dim] values.
template <class Format>
void compare_page(const pool<Format>& p, const std::vector<std::byte>& keys,
                  const std::vector<std::byte>& values, int page, const std::vector<float>& k,
                  const std::vector<float>& v, const char* what, const char* name) {
    const auto compare = [&](auto role, const std::vector<std::byte>& bytes, const std::vector<float>& x) {
        constexpr tensor Role = decltype(role)::value;
        using S = cuda::detail::scheme_of<Role, Format>;
        constexpr block_shape s = cuda::detail::shape_of<Role, Format>;
        const S scheme = scheme_of<S>(p.heads, s.dim);
        const std::size_t size = scheme.block_bytes(s);
        for (int h = 0; h < p.heads; ++h) {
            std::vector<float> values_of_head(s.values());
            for (int t = 0; t < s.tokens; ++t)
                for (int c = 0; c < s.dim; ++c)
                    values_of_head[static_cast<std::size_t>(t * s.dim + c)] =
                        x[static_cast<std::size_t>((t * p.heads + h) * s.dim + c)];
            std::vector<std::byte> expected(size);
            scheme.quantize(s, {0, h}, values_of_head.data(), expected.data());
            const std::byte* const got =
                &bytes[(static_cast<std::size_t>(page) * static_cast<std::size_t>(p.heads) +
                        static_cast<std::size_t>(h)) *
                       size];
            const std::size_t at = first_difference(got, expected.data(), size);
            CHECK(at == size, "%s %s: %s byte %zu of %zu of page %d head %d is %02x, expected %02x", name,
                  what, Role == tensor::key ? "key" : "value", at, size, page, h,
                  at < size ? static_cast<unsigned>(got[at]) : 0u,
                  at < size ? static_cast<unsigned>(expected[at]) : 0u);
        }
    };
    compare(std::integral_constant<tensor, tensor::key>{}, keys, k);
    compare(std::integral_constant<tensor, tensor::value>{}, values, v);
}

/// Slices [token][head][dim] rows [first, first + n).
std::vector<float> tokens_of(const std::vector<float>& x, int first, int n, int row) {
    return {x.begin() + static_cast<std::ptrdiff_t>(first) * row,
            x.begin() + static_cast<std::ptrdiff_t>(first + n) * row};
}

/// Stores other tokens into slots [0, pages * page_tokens).
template <class Format, class T>
void fill_with_others(test::rng& r, pool<Format>& p, int) {
    const int n = p.pages * Format::page_tokens;
    const auto random = [&](int dim) {
        std::vector<T> x(static_cast<std::size_t>(n) * static_cast<std::size_t>(p.heads * dim));
        for (T& v : x) v = T(test::normal(r));
        return x;
    };
    const test::device_buffer<T> k(random(Format::head_dim)), v(random(Format::value_dim));
    std::vector<long long> mapping(static_cast<std::size_t>(n));
    for (int i = 0; i < n; ++i) mapping[static_cast<std::size_t>(i)] = i;
    const test::device_buffer<long long> slots_device(mapping);
    CHECK((cuda::store<Format, T>(p.ref, token_view<const T>(k.get(), n, p.heads, Format::head_dim),
                                  token_view<const T>(v.get(), n, p.heads, Format::value_dim),
                                  slots_device.get(), nullptr, nullptr)),
          "store of other tokens");
    CUDA_OK(cudaDeviceSynchronize());
}

/// Stores pages in several ways: whole, at odd places, with skipped and shuffled tokens, few at a time, rows
/// aligned for nothing. `used` pages; one more is no multiple of 3.
template <class Format, class T>
void check_store(const char* name, int heads = 3, int used = 4) {
    test::rng r(static_cast<unsigned>(Format::page_tokens + 7 * Format::head_dim));
    constexpr int page_tokens = Format::page_tokens;
    const int n = used * page_tokens, pages = used + 1;
    const int k_row = heads * Format::head_dim, v_row = heads * Format::value_dim;
    const std::vector<float> k = rounded<T>(hostile_values(r, n, k_row)),
                             v = rounded<T>(hostile_values(r, n, v_row));
    pool<Format> p(heads, pages);
    p.keys.clear();  // padding is zero on the CPU
    p.values.clear();
    for (int way = 0; way < 5; ++way) {
        fill_with_others<Format, T>(r, p, n);  // what is stored now must replace what was there
        std::vector<int> token_of_row, slot_of_row;
        const auto page_of = [&](int i) { return (3 * i + 2) % pages; };
        const auto slot = [&](int t) { return page_of(t / page_tokens) * page_tokens + t % page_tokens; };
        for (int t = 0; t < n; ++t) {
            if (way == 1 && t == 5) {  // the rows are no longer aligned with the pages
                token_of_row.push_back(0);
                slot_of_row.push_back(-1);
            }
            token_of_row.push_back(t);
            slot_of_row.push_back(slot(t));
        }
        if (way == 2) {
            std::vector<std::size_t> order(token_of_row.size());
            for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
            std::shuffle(order.begin(), order.end(), r);
            std::vector<int> a, b;
            for (const std::size_t i : order) {
                a.push_back(token_of_row[i]);
                b.push_back(slot_of_row[i]);
            }
            token_of_row = a;
            slot_of_row = b;
        }
        const int rows = static_cast<int>(token_of_row.size());
        const bool hnd = way == 1;
        const int lead = way == 4 ? 1 : 0;  // a number before the first row
        const auto gather = [&](const std::vector<float>& x, int dim) {
            std::vector<T> out(static_cast<std::size_t>(rows * heads * dim + lead));
            for (int i = 0; i < rows; ++i)
                for (int h = 0; h < heads; ++h)
                    for (int c = 0; c < dim; ++c) {
                        const float value = x[static_cast<std::size_t>(
                            (token_of_row[static_cast<std::size_t>(i)] * heads + h) * dim + c)];
                        const auto at = static_cast<std::size_t>(
                            lead + (hnd ? (h * rows + i) * dim + c : (i * heads + h) * dim + c));
                        if constexpr (std::is_same_v<T, float>)
                            out[at] = value;
                        else
                            out[at] = T(value);
                    }
            return out;
        };
        const test::device_buffer<T> kd(gather(k, Format::head_dim)), vd(gather(v, Format::value_dim));
        std::vector<long long> wide_slots(slot_of_row.begin(), slot_of_row.end());
        for (long long& s : wide_slots)
            if (s < 0) s = -(1LL << 32);  // negative, but 0 in 32 bits
        const test::device_buffer<long long> mapping(wide_slots);
        test::device_buffer<unsigned> bad(1);
        bad.clear();
        const auto view = [&](const T* buffer, int dim) {
            const T* const data = buffer + lead;
            return hnd ? token_view<const T>(data, rows, heads, dim, dim,
                                             static_cast<std::ptrdiff_t>(rows) * dim)
                       : token_view<const T>(data, rows, heads, dim);
        };
        const int step = way == 3 ? 7 : way == 4 ? 100 : rows;
        for (int first = 0; first < rows; first += step) {
            const int count = std::min(step, rows - first);
            const auto status =
                cuda::store<Format, T>(p.ref, view(kd.get(), Format::head_dim).slice(first, count),
                                       view(vd.get(), Format::value_dim).slice(first, count),
                                       mapping.get() + first, bad.get(), nullptr);
            CHECK(status, "%s: %s", name, status.message);
        }
        CUDA_OK(cudaDeviceSynchronize());
        const auto keys = p.keys.download(), values = p.values.download();
        for (int i = 0; i < used; ++i)
            compare_page(p, keys, values, page_of(i), tokens_of(k, i * page_tokens, page_tokens, k_row),
                         tokens_of(v, i * page_tokens, page_tokens, v_row),
                         way == 0   ? "store"
                         : way == 1 ? "store, shifted"
                         : way == 2 ? "store, shuffled"
                         : way == 3 ? "store, few"
                                    : "store, not aligned",
                         name);
        unsigned expected = 0;
        for (const float x : k) expected += !kvq::detail::is_finite(x);
        for (const float x : v) expected += !kvq::detail::is_finite(x);
        CHECK(bad.download()[0] == expected, "%s: counted %u not finite, expected %u", name,
              bad.download()[0], expected);
    }
    std::printf("  store %s\n", name);
}

/// [token][head][dim] values of a page of a batch, as the CPU dequantizes them.
template <class Format, tensor Role>
std::vector<float> dequantized_page(const pool<Format>& p, const std::vector<std::byte>& bytes, int page) {
    using S = cuda::detail::scheme_of<Role, Format>;
    constexpr block_shape s = cuda::detail::shape_of<Role, Format>;
    const std::size_t size = S{}.block_bytes(s);
    std::vector<float> out(s.values() * static_cast<std::size_t>(p.heads)), block(s.values());
    for (int h = 0; h < p.heads; ++h) {
        S{}.dequantize(s, {},
                       &bytes[(static_cast<std::size_t>(page) * static_cast<std::size_t>(p.heads) +
                               static_cast<std::size_t>(h)) *
                              size],
                       block.data());
        for (int t = 0; t < s.tokens; ++t)
            for (int c = 0; c < s.dim; ++c)
                out[static_cast<std::size_t>((t * p.heads + h) * s.dim + c)] =
                    block[static_cast<std::size_t>(t * s.dim + c)];
    }
    return out;
}

/// Window pages -> quantized pages -> pages of another scheme, byte by byte; then dequantizing.
template <class Window, class Quantized, class Other>
void check_requantize(const char* name) {
    using T = typename Window::keys::value_type;
    test::rng r(11u + Quantized::page_tokens);
    constexpr int heads = 2, pages = 4, page_tokens = Window::page_tokens;
    const int n = pages * page_tokens;
    const std::vector<float> k = rounded<T>(hostile_values(r, n, heads * Window::head_dim));
    const std::vector<float> v = rounded<T>(hostile_values(r, n, heads * Window::value_dim));
    pool<Window> window(heads, pages);
    pool<Quantized> quantized(heads, pages + 1);
    pool<Other> other(heads, pages);
    std::vector<T> kt, vt;
    for (const float x : k) kt.push_back(T(x));
    for (const float x : v) vt.push_back(T(x));
    std::vector<long long> mapping(static_cast<std::size_t>(n));
    for (int i = 0; i < n; ++i) mapping[static_cast<std::size_t>(i)] = i;
    const test::device_buffer<T> kd(kt), vd(vt);
    const test::device_buffer<long long> slots_device(mapping);
    CHECK((cuda::store<Window, T>(window.ref, token_view<const T>(kd.get(), n, heads, Window::head_dim),
                                  token_view<const T>(vd.get(), n, heads, Window::value_dim),
                                  slots_device.get(), nullptr, nullptr)),
          "%s: store", name);
    const test::device_buffer<int> from(std::vector<int>{0, 1, -1, 3}), to(std::vector<int>{4, 0, 2, 1});
    test::device_buffer<unsigned> bad(1);
    bad.clear();
    auto status =
        cuda::requantize_pages(window.ref, quantized.ref, from.get(), to.get(), 4, bad.get(), nullptr);
    CHECK(status, "%s: %s", name, status.message);
    CUDA_OK(cudaDeviceSynchronize());
    auto quantized_keys = quantized.keys.download(), quantized_values = quantized.values.download();
    const int source[3] = {0, 1, 3}, target[3] = {4, 0, 1};
    const int k_row = heads * Window::head_dim, v_row = heads * Window::value_dim;
    unsigned expected_bad = 0;
    for (int i = 0; i < 3; ++i) {
        const auto kp = tokens_of(k, source[i] * page_tokens, page_tokens, k_row),
                   vp = tokens_of(v, source[i] * page_tokens, page_tokens, v_row);
        compare_page(quantized, quantized_keys, quantized_values, target[i], kp, vp, "commit", name);
        for (const float x : kp) expected_bad += !kvq::detail::is_finite(x);
        for (const float x : vp) expected_bad += !kvq::detail::is_finite(x);
    }
    CHECK(bad.download()[0] == expected_bad, "%s: counted %u not finite, expected %u", name,
          bad.download()[0], expected_bad);
    CHECK(quantized_keys[2 * quantized.keys.size() / static_cast<std::size_t>(pages + 1) + 5] ==
              std::byte{0xff},
          "%s: a page that was not named changed", name);

    const test::device_buffer<int> again(std::vector<int>{4, 0, 1}), places(std::vector<int>{0, 1, 2});
    status = cuda::requantize_pages(quantized.ref, other.ref, again.get(), places.get(), 3, nullptr, nullptr);
    CHECK(status, "%s: %s", name, status.message);
    CUDA_OK(cudaDeviceSynchronize());
    const auto other_keys = other.keys.download(), other_values = other.values.download();
    for (int i = 0; i < 3; ++i)
        compare_page(other, other_keys, other_values, i,
                     dequantized_page<Quantized, tensor::key>(quantized, quantized_keys, target[i]),
                     dequantized_page<Quantized, tensor::value>(quantized, quantized_values, target[i]),
                     "requantize", name);

    // Dequantizing: two sequences, one of which has a page that this format does not hold.
    const std::vector<int> table = {4, 0, 1, -1}, lengths = {2 * page_tokens - 3, 2 * page_tokens};
    const test::device_buffer<int> table_device(table), lengths_device(lengths),
        starts(std::vector<int>{1, 1 + lengths[0]});
    const int rows = 1 + lengths[0] + lengths[1];
    test::device_buffer<float> ko(static_cast<std::size_t>(rows * k_row)),
        vo(static_cast<std::size_t>(rows * v_row));
    quantized.ref.block_table = table_device.get();
    quantized.ref.tokens = lengths_device.get();
    quantized.ref.sequences = 2;
    quantized.ref.table_columns = 2;
    status = cuda::dequantize_tokens<Quantized, float>(
        quantized.ref, token_view<float>(ko.get(), rows, heads, Window::head_dim),
        token_view<float>(vo.get(), rows, heads, Window::value_dim), starts.get(), nullptr);
    CHECK(status, "%s: %s", name, status.message);
    CUDA_OK(cudaDeviceSynchronize());
    const auto kh = ko.download(), vh = vo.download();
    const auto same = [&](const std::vector<float>& got, int row, const std::vector<float>& want, int first,
                          int count, const char* what) {
        bool equal = true;
        for (int i = 0; i < count * row; ++i)
            equal =
                equal && got[static_cast<std::size_t>(first * row + i)] == want[static_cast<std::size_t>(i)];
        CHECK(equal, "%s: dequantized %s differ", name, what);
    };
    same(kh, k_row, dequantized_page<Quantized, tensor::key>(quantized, quantized_keys, 4), 1, page_tokens,
         "keys");
    same(vh, v_row, dequantized_page<Quantized, tensor::value>(quantized, quantized_values, 0),
         1 + page_tokens, page_tokens - 3, "values");
    same(vh, v_row, dequantized_page<Quantized, tensor::value>(quantized, quantized_values, 1),
         1 + lengths[0], page_tokens, "values");
    CHECK(std::isnan(kh[static_cast<std::size_t>((1 + lengths[0] + page_tokens) * k_row)]),
          "%s: a page that is not held was dequantized", name);
    std::printf("  requantize %s\n", name);
}

/// A decode loop: window pages are quantized on the device as soon as they lie behind the recent window.
/// Steps of `step` tokens; the second sequence starts late, and a fresh page comes to it later than a page is
/// due: `second` are quantized.
void check_commit(int step, int second) {
    using window = cuda::block_pair<full<float16>, full<float16>, 64, 32>;
    using quantized = cuda::kivi_pair<4, 32, 64, 32>;
    test::rng r(3);
    constexpr int heads = 2, recent = 20, sequences = 2, columns = 4;
    pool<window> w(heads, 8);
    pool<quantized> c(heads, 8);
    test::device_buffer<int> wt(std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7}), ct(std::vector<int>(8, -1)),
        fresh(2);
    test::device_buffer<int> lengths(std::vector<int>{0, 0});
    w.ref.block_table = wt.get();
    c.ref.block_table = ct.get();
    w.ref.tokens = c.ref.tokens = lengths.get();
    w.ref.sequences = c.ref.sequences = sequences;
    w.ref.table_columns = c.ref.table_columns = columns;
    std::vector<float> k[sequences], v[sequences];
    std::vector<int> fresh_pages{3, -1}, spare[sequences] = {{1, 5}, {2, 6}};  // used from the back
    int committed[sequences] = {};
    for (int begin = 0; begin < 118; begin += step) {
        std::vector<float16> kt, vt;
        std::vector<long long> mapping;
        std::vector<int> now;
        for (int b = 0; b < sequences; ++b) {
            for (int t = begin; t < begin + step; ++t) {
                const int position = t - 3 * b;
                const bool there = position >= 0 && position < columns * 32;
                mapping.push_back(there ? (columns * b + position / 32) * 32 + position % 32 : -1);
                for (int i = 0; i < heads * 64; ++i) {
                    kt.push_back(float16(test::normal(r)));
                    vt.push_back(float16(test::normal(r)));
                    if (there) {
                        k[b].push_back(static_cast<float>(kt.back()));
                        v[b].push_back(static_cast<float>(vt.back()));
                    }
                }
            }
            now.push_back(static_cast<int>(k[b].size()) / (heads * 64));
        }
        if (begin >= 80 && committed[1] == 0) fresh_pages[1] = 0;
        const test::device_buffer<float16> kd(kt), vd(vt);
        const test::device_buffer<long long> sd(mapping);
        lengths.upload(now);
        fresh.upload(fresh_pages);
        const int rows = sequences * step;
        CHECK((cuda::store<window, float16>(w.ref, token_view<const float16>(kd.get(), rows, heads, 64),
                                            token_view<const float16>(vd.get(), rows, heads, 64), sd.get(),
                                            nullptr, nullptr)),
              "store");
        const auto status =
            cuda::commit_full_pages(w.ref, c.ref, wt.get(), ct.get(), recent, fresh.get(), nullptr, nullptr);
        CHECK(status, "%s", status.message);
        CUDA_OK(cudaDeviceSynchronize());
        const auto after = fresh.download(), quantized_table = ct.download(), window_table = wt.download();
        for (int b = 0; b < sequences; ++b) {
            const int done = committed[b], page = columns * b + done;
            const bool due = now[b] >= (done + 1) * 32 + recent && fresh_pages[b] >= 0;
            CHECK(after[b] == (due ? -2 - page : fresh_pages[b]), "sequence %d of %d tokens: fresh page %d",
                  b, now[b], after[b]);
            if (!due) continue;
            CHECK(quantized_table[page] == fresh_pages[b] && window_table[page] == -1, "tables %d %d",
                  quantized_table[page], window_table[page]);
            const auto keys = c.keys.download(), values = c.values.download();
            compare_page(c, keys, values, fresh_pages[b], tokens_of(k[b], 32 * done, 32, heads * 64),
                         tokens_of(v[b], 32 * done, 32, heads * 64), "commit", "kivi4");
            ++committed[b];
            fresh_pages[b] = spare[b].empty() ? -1 : spare[b].back();
            if (!spare[b].empty()) spare[b].pop_back();
        }
    }
    CHECK(committed[0] == 3 && committed[1] == second, "%d and %d pages were quantized", committed[0],
          committed[1]);
    std::printf("  commit on the device, %d tokens a step\n", step);
}

/// Pages of one block of keys and one of values a head, in any order: [sequence][token][head][channel] as
/// floats to pages of Format, or the other way round, by the CPU's schemes.
template <class Format>
struct paged {
    int heads, first_token, columns = 0, count = 0;
    std::vector<int> lengths, table;
    std::vector<std::byte> bytes[2];

    paged(test::rng& r, int kv_heads, int first, const std::vector<int>& tokens)
        : heads(kv_heads), first_token(first), lengths(tokens) {
        for (const int n : tokens) columns = std::max(columns, (n - first) / Format::page_tokens + 2);
        count = columns * static_cast<int>(tokens.size()) + 1;
        std::vector<int> order(static_cast<std::size_t>(count));
        for (int i = 0; i < count; ++i) order[static_cast<std::size_t>(i)] = i;
        std::shuffle(order.begin(), order.end(), r);
        table.assign(order.begin(), order.end() - 1);
        bytes[0].assign(static_cast<std::size_t>(count * heads) * Format::key_block_bytes, std::byte{0x7f});
        bytes[1].assign(static_cast<std::size_t>(count * heads) * Format::value_block_bytes, std::byte{0x7f});
    }
    /// f(shape, scheme, block, id, tensor, page's first token, sequence) of every block that holds tokens.
    template <class F>
    void each_block(const F& f) {
        for (std::size_t b = 0; b < lengths.size(); ++b)
            for (int c = 0; first_token + c * Format::page_tokens < lengths[b]; ++c)
                for (int h = 0; h < heads; ++h) {
                    const int page =
                        table[b * static_cast<std::size_t>(columns) + static_cast<std::size_t>(c)];
                    const auto at = static_cast<std::size_t>(page * heads + h);
                    const int first = first_token + c * Format::page_tokens;
                    if (page < 0) continue;
                    f(block_shape{tensor::key, Format::page_tokens, Format::head_dim},
                      typename Format::keys{}, &bytes[0][at * Format::key_block_bytes], h, 0, first, b);
                    if constexpr (Format::value_block_bytes > 0)
                        f(block_shape{tensor::value, Format::page_tokens, Format::value_dim},
                          typename Format::values{}, &bytes[1][at * Format::value_block_bytes], h, 1, first,
                          b);
                }
    }
    /// Of [sequence] and K or V: [token][head][channel].
    using numbers = std::vector<std::vector<float>>;
    void quantize(const numbers (&x)[2]) {
        each_block([&](const block_shape& s, const auto& scheme, std::byte* block, int h, int v, int first,
                       std::size_t b) {
            std::vector<float> page(s.values(), 0.0f);
            for (int t = 0; t < s.tokens && first + t < lengths[b]; ++t)
                for (int c = 0; c < s.dim; ++c)
                    page[static_cast<std::size_t>(t * s.dim + c)] =
                        x[v][b][static_cast<std::size_t>(((first + t) * heads + h) * s.dim + c)];
            scheme.quantize(s, {0, h}, page.data(), block);
        });
    }
    void dequantize(numbers (&x)[2]) {
        for (int v = 0; v < 2; ++v) {
            x[v].clear();
            for (const int n : lengths)
                x[v].emplace_back(
                    static_cast<std::size_t>(n * heads * (v == 0 ? Format::head_dim : Format::value_dim)),
                    0.0f);
        }
        each_block([&](const block_shape& s, const auto& scheme, std::byte* block, int h, int v, int first,
                       std::size_t b) {
            std::vector<float> page(s.values());
            scheme.dequantize(s, {0, h}, block, page.data());
            for (int t = 0; t < s.tokens && first + t < lengths[b]; ++t)
                for (int c = 0; c < s.dim; ++c)
                    x[v][b][static_cast<std::size_t>(((first + t) * heads + h) * s.dim + c)] =
                        page[static_cast<std::size_t>(t * s.dim + c)];
        });
    }
};

template <class From, class To>
void check_convert_refusals(const cuda::cache_ref<From>& source, const cuda::cache_ref<To>& target,
                            std::byte* workspace, std::size_t bytes, const char* name) {
    const auto refused = [&](const char* part, const cuda::cache_ref<From>& from,
                             const cuda::cache_ref<To>& to, std::byte* memory, std::size_t size) {
        const auto status = cuda::convert_pages(from, to, memory, size, nullptr, nullptr);
        CHECK(!status && std::strstr(status.message, part) != nullptr, "%s: \"%s\" is not in \"%s\"", name,
              part, status.message);
    };
    const std::size_t of_page = cuda::convert_workspace_bytes<To>(target.kv_heads, 1);
    refused("bytes of workspace", source, target, nullptr, bytes);
    refused("bytes of workspace", source, target, workspace, of_page - 1);
    refused("a multiple of 16", source, target, workspace + 8, bytes);
    auto from = source;
    from.sequences -= 1;
    refused("source has 2 sequences", from, target, workspace, bytes);
    from = source;
    from.kv_heads -= 1;
    refused(from.kv_heads == 0 ? "0 kv heads" : "target 3 of", from, target, workspace, bytes);
    from = source;
    from.key_pages = nullptr;
    refused("no pages", from, target, workspace, bytes);
    from = source;
    from.block_table = nullptr;
    refused("null pointers", from, target, workspace, bytes);
    auto to = target;
    to.key_page_bytes += 8;
    refused("multiple of 16 bytes apart", source, to, workspace, bytes);
    to = target;
    to.key_page_bytes -= 16;
    if constexpr (!cuda::detail::is_strided<To>) refused("are smaller than", source, to, workspace, bytes);
    to = target;
    to.table_columns = 0;
    refused("0 block table columns", source, to, workspace, bytes);
    to.table_columns = 1 << 28;
    refused("more than 2^28 tokens", source, to, workspace, bytes);
}

/// Pages of From to pages of To and back, in turns of two pages and in one: the CPU's bytes; what no table
/// names stays. Refusals write nothing.
template <class From, class To>
void check_convert(const char* name, int heads = 2) {
    test::rng r(static_cast<unsigned>(From::page_tokens * 3 + To::page_tokens));
    const std::vector<int> lengths = {3 * To::page_tokens + 5, 0, From::page_tokens + 1};
    paged<From> a(r, heads, 0, lengths);
    paged<To> b(r, heads, 4, lengths);
    paged<From> c(r, heads, 0, lengths);
    typename paged<From>::numbers x[2];
    for (const int n : lengths)
        for (int v = 0; v < 2; ++v)
            x[v].push_back(test::tensor_values(r, n * heads, v == 0 ? From::head_dim : From::value_dim));
    a.quantize(x);
    a.table[1] = -1;  // not held: zeros
    b.table[0] = -1;  // not written
    const auto run = [&]<class S, class T>(const paged<S>& source, paged<T>& target, int turn) {
        const test::device_buffer<std::byte> from_keys(source.bytes[0]), from_values(source.bytes[1]);
        test::device_buffer<std::byte> keys(target.bytes[0]), values(target.bytes[1]);
        const test::device_buffer<int> from_table(source.table), table(target.table), tokens(lengths);
        const auto ref = [&]<class P>(const paged<P>& p, std::byte* k, std::byte* v, int* entries) {
            cuda::cache_ref<P> f;
            f.key_pages = k;
            f.value_pages = v;
            f.key_page_bytes = cuda::cache_ref<P>::dense_key_page(heads);
            f.value_page_bytes = cuda::cache_ref<P>::dense_value_page(heads);
            f.block_table = entries;
            f.tokens = tokens.get();
            f.sequences = static_cast<int>(lengths.size());
            f.table_columns = p.columns;
            f.kv_heads = heads;
            f.first_token = p.first_token;
            if constexpr (cuda::detail::is_strided<P>) {  // dense pages, said by strides
                const auto memory = [](std::byte* pages, int row, int scales, std::size_t block,
                                       std::size_t page_bytes) {
                    const std::size_t behind = static_cast<std::size_t>(P::page_tokens * row);
                    return cuda::row_memory{static_cast<std::size_t>(row),         block,
                                            scales > 0 ? pages + behind : nullptr, page_bytes,
                                            static_cast<std::size_t>(scales),      block};
                };
                constexpr auto of_keys = P::keys::fixed_layout(), of_values = P::values::fixed_layout();
                f.own_keys.memory =
                    memory(k, of_keys.row_bytes(P::head_dim), of_keys.scales_behind(P::head_dim),
                           P::key_block_bytes, f.key_page_bytes);
                f.own_values.memory =
                    memory(v, of_values.row_bytes(P::value_dim), of_values.scales_behind(P::value_dim),
                           P::value_block_bytes, f.value_page_bytes);
            }
            return f;
        };
        const std::size_t bytes = cuda::convert_workspace_bytes<T>(heads, turn);
        const test::device_buffer<std::byte> workspace(bytes);
        auto* const memory = const_cast<std::byte*>(workspace.get());
        const cuda::cache_ref<S> of_source =
            ref(source, const_cast<std::byte*>(from_keys.get()), const_cast<std::byte*>(from_values.get()),
                const_cast<int*>(from_table.get()));
        const cuda::cache_ref<T> of_target =
            ref(target, keys.get(), values.get(), const_cast<int*>(table.get()));
        check_convert_refusals(of_source, of_target, memory, bytes, name);
        CUDA_OK(cudaDeviceSynchronize());
        CHECK(keys.download() == target.bytes[0] && values.download() == target.bytes[1],
              "%s: a refusal wrote", name);
        const auto status = cuda::convert_pages(of_source, of_target, memory, bytes, nullptr, nullptr);
        CHECK(status, "%s: %s", name, status.message);
        CUDA_OK(cudaDeviceSynchronize());
        paged<S> held = source;
        typename paged<S>::numbers numbers[2];
        held.dequantize(numbers);
        target.quantize(numbers);
        CHECK(keys.download() == target.bytes[0] && values.download() == target.bytes[1],
              "%s: other bytes than the CPU's, %d pages in turn", name, turn);
    };
    run(a, b, 2);
    run(b, c, 1000);
}

template <class K, class V, int D, int P, int VD = D>
using f = cuda::block_pair<K, V, D, P, VD>;

}  // namespace

int main() {
    check_store<f<full<float16>, full<float16>, 128, 64>, float16>("fp16");
    check_store<f<full<bfloat16>, full<bfloat16>, 80, 16>, bfloat16>("bf16, page 16");
    check_store<f<int8, int8, 128, 64>, float16>("int8");
    check_store<f<affine<4, per_token<>>, affine<4, per_token<>>, 128, 64>, bfloat16>("4 bit");
    check_store<f<affine<4, per_token<32>>, affine<2, per_token<64>>, 128, 32>, float16>(
        "4 and 2 bit in groups");
    check_store<f<affine<3, per_token<>>, affine<1, per_token<>>, 64, 64>, float>("3 and 1 bit, float");
    check_store<f<affine<5, per_token<32>>, affine<6, per_token<32>>, 96, 128>, float16>("5 and 6 bit");
    check_store<f<affine<7, per_token<20>>, affine<8, per_token<24>>, 72, 24, 48>, float16>(
        "7 and 8 bit, odd shape");
    // Many tokens; few with two heads for each warp.
    check_store<f<full<float16>, full<float16>, 64, 64>, float16>("fp16, 576 tokens", 2, 9);
    check_store<f<affine<4, per_token<16>>, int8, 64, 64, 32>, bfloat16>("4 and 8 bit, 576 tokens", 2, 9);
    check_store<f<affine<4, per_token<64>>, affine<3, per_token<>>, 128, 64>, float16>("4 and 3 bit, 8 heads",
                                                                                       8);
    check_store<f<affine<2, per_token<128>, params<float>>, affine<4, per_token<128>>, 256, 32>, float>(
        "2 and 4 bit, head_dim 256, float");
    check_store<f<int8, full<float16>, 512, 16>, float16>("int8 and fp16, head_dim 512, page 16");
    check_store<f<full<float16>, full<bfloat16>, 48, 24, 40>, float>("fp16 and bf16 from float, page 24");
    check_store<f<hadamard<affine<4, per_token<>>>, affine<4, per_token<32>>, 128, 64>, float16>(
        "4 bit, keys behind Hadamard");
    check_store<f<rows_of<row_layout_number("fp8")>, rows_of<row_layout_number("nvfp4")>, 64, 32>, float16>(
        "fp8 and nvfp4");
    check_store<f<rows_of<row_layout_number("mxfp4")>, rows_of<row_layout_number("q8_0")>, 96, 16>, bfloat16>(
        "mxfp4 and q8_0, page 16");
    check_store<f<rotated<affine<3, per_token<20>>>, hadamard<affine<8, per_token<>>, 16, 9>, 72, 24, 48>,
                bfloat16>("rotated keys, Hadamard before values, odd shape");
    using w128 = f<full<float16>, full<float16>, 128, 64>;
    check_requantize<w128, cuda::kivi_pair<4, 64, 128, 64>, cuda::kivi_pair<2, 32, 128, 64>>(
        "kivi4 g64 -> kivi2 g32");
    check_requantize<w128, f<int8, int8, 128, 64>,
                     f<affine<4, per_token<>>, affine<4, per_token<>>, 128, 64>>("int8 -> 4 bit");
    check_requantize<f<full<float16>, full<float16>, 512, 64>, cuda::kivi_pair<4, 64, 512, 64>,
                     f<int8, int8, 512, 64>>("kivi4 g64 -> int8, head_dim 512");
    check_requantize<f<full<bfloat16>, full<bfloat16>, 96, 32>,
                     f<affine<3, per_channel<16>>, affine<5, per_channel<>>, 96, 32>,
                     f<full<float16>, full<float>, 96, 32>>("3 and 5 bit -> fp16 and fp32");
    check_requantize<f<full<float16>, full<float16>, 48, 24, 40>,
                     f<affine<7, per_channel<10>>, affine<6, per_token<16>>, 48, 24, 40>,
                     f<affine<1, per_token<>>, affine<2, per_channel<7>>, 48, 24, 40>>("odd shapes");
    using fp8 = rows_of<row_layout_number("fp8")>;
    using nvfp4 = rows_of<row_layout_number("nvfp4")>;
    using q8_0 = rows_of<row_layout_number("q8_0")>;
    check_convert<f<fp8, fp8, 64, 16>, cuda::kivi_pair<4, 32, 64, 64>>(
        "fp8, page 16 <-> kivi-4-g32, page 64");
    check_convert<f<nvfp4, nvfp4, 64, 64>, f<fp8, fp8, 64, 32>>("nvfp4, page 64 <-> fp8, page 32");
    check_convert<cuda::strided_rows<f<nvfp4, fp8, 64, 32>>, cuda::strided_rows<f<fp8, nvfp4, 64, 16>>>(
        "rows with strides");
    check_convert<f<q8_0, q8_0, 64, 32>, f<int8, int8, 64, 16>>("q8_0, page 32 <-> int8, page 16", 1);
    using mlx = records_of<record_layout_number("mlx-4-g64")>;
    using v4 = records_of<record_layout_number("nvfp4-v4")>;
    check_convert<f<mlx, v4, 64, 32>, f<int8, int8, 64, 16>>("mlx-4-g64 and nvfp4-v4 <-> int8");
    check_commit(1, 2);
    check_commit(5, 3);
    check_commit(32, 1);
    return test::report("pages");
}
