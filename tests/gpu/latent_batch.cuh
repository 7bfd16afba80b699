// Pages of latents for the GPU tests: quantized pages behind a window and sinks of 16-bit values, and what
// attention over some of their tokens is in double arithmetic.
#pragma once

#include <kvq/cuda/layout/latent_pair.cuh>

#include "support.cuh"

namespace test {

using namespace kvq;

/// Pages of latents of a batch, made by the CPU's encoders; dequantized latents beside them.
template <class Pair>
struct latent_batch {
    static constexpr int page = Pair::page_tokens, dim = Pair::head_dim;
    int columns = 1, pages = 3;
    std::vector<int> table;
    std::vector<std::byte> bytes;
    std::vector<std::vector<float>> values;  // [sequence][token][dim]

    latent_batch(rng& r, const std::vector<int>& lengths) {
        for (const int n : lengths) {
            columns = std::max(columns, (n + page - 1) / page);
            pages += (n + page - 1) / page;
        }
        std::vector<int> order(static_cast<std::size_t>(pages));
        for (int i = 0; i < pages; ++i) order[static_cast<std::size_t>(i)] = i;
        std::shuffle(order.begin(), order.end(), r);
        bytes.assign(static_cast<std::size_t>(pages) * Pair::key_block_bytes, std::byte{0xff});
        table.assign(lengths.size() * static_cast<std::size_t>(columns), pages - 1);
        std::size_t next = 0;
        for (std::size_t b = 0; b < lengths.size(); ++b) {
            values.emplace_back(static_cast<std::size_t>(lengths[b]) * dim);
            for (int first = 0; first < lengths[b]; first += page) {
                const int number = order[next++], used = std::min(page, lengths[b] - first);
                table[b * static_cast<std::size_t>(columns) + static_cast<std::size_t>(first / page)] =
                    number;
                std::byte* const block = &bytes[static_cast<std::size_t>(number) * Pair::key_block_bytes];
                half<typename Pair::keys, Pair::first_channels>(r, block, b, first, used, 0, 1.0f);
                if constexpr (Pair::second_channels > 0)
                    half<typename Pair::last, Pair::second_channels>(r, block + Pair::second_block, b, first,
                                                                     used, Pair::first_channels, 20.0f);
            }
        }
    }

private:
    template <class S, int Channels>
    void half(rng& r, std::byte* block, std::size_t b, int first, int used, int channel, float size) {
        const block_shape shape{tensor::key, page, Channels};
        const S scheme{};
        std::vector<float> x = tensor_values(r, page, Channels);
        for (float& number : x) number *= size;
        scheme.quantize(shape, {0, 0}, x.data(), block);
        scheme.dequantize(shape, {0, 0}, block, x.data());
        for (int t = 0; t < used; ++t)
            std::copy_n(
                &x[static_cast<std::size_t>(t) * Channels], Channels,
                &values[b][static_cast<std::size_t>(first + t) * dim + static_cast<std::size_t>(channel)]);
        poison_tokens<S>(shape, block, used);
    }
};
template <class Pair>
struct device_latents {
    device_buffer<std::byte> bytes;
    device_buffer<int> table;
    cuda::cache_ref<Pair> ref;

    device_latents(const latent_batch<Pair>& b, const device_buffer<int>& lengths, int first_token)
        : bytes(b.bytes), table(b.table) {
        ref.key_pages = bytes.get();
        ref.key_page_bytes = Pair::key_block_bytes;
        ref.block_table = table.get();
        ref.tokens = lengths.get();
        ref.sequences = static_cast<int>(lengths.size());
        ref.table_columns = b.columns;
        ref.kv_heads = 1;
        ref.first_token = first_token;
    }
};

/// Sequences whose pages have several formats.
template <class Quantized, class Window>
struct mixed_latents {
    static constexpr int dim = Quantized::head_dim, page = Quantized::page_tokens;
    using sinks_pair = cuda::latent_pair<typename Window::keys, dim, 0, Quantized::value_dim, 16>;
    std::vector<int> lengths, behind, committed;
    int sinks, recent;
    latent_batch<sinks_pair> of_sinks;
    latent_batch<Window> of_window;
    latent_batch<Quantized> pages;
    device_buffer<int> lengths_device;
    std::unique_ptr<device_latents<sinks_pair>> sinks_device;
    std::unique_ptr<device_latents<Window>> window_device;
    std::unique_ptr<device_latents<Quantized>> pages_device;

    mixed_latents(rng& r, const std::vector<int>& tokens, int sinks_of_each, int recent_of_each, bool holes)
        : lengths(tokens),
          behind(each(tokens, [&](int n) { return std::max(0, n - sinks_of_each); })),
          committed(each(
              tokens,
              [&](int n) { return cuda::committed_pages(n - sinks_of_each, recent_of_each, page) * page; })),
          sinks(sinks_of_each),
          recent(recent_of_each),
          of_sinks(r, each(tokens, [&](int n) { return std::min(n, sinks_of_each); })),
          of_window(r, behind),
          pages(r, committed),
          lengths_device(tokens) {
        if (holes)
            for (int& entry : pages.table)
                if (uniform(r, 0, 2) == 0) entry = -1;
        const int columns = cuda::window_columns(recent, page, 0) + uniform(r, 0, 1);
        std::vector<int> ring(lengths.size() * static_cast<std::size_t>(columns), of_window.pages - 1);
        for (std::size_t b = 0; b < lengths.size(); ++b)
            for (int i = committed[b] / page; i * page < behind[b]; ++i)
                ring[b * static_cast<std::size_t>(columns) + static_cast<std::size_t>(i % columns)] =
                    of_window
                        .table[b * static_cast<std::size_t>(of_window.columns) + static_cast<std::size_t>(i)];
        of_window.table = ring;
        of_window.columns = columns;
        sinks_device = std::make_unique<device_latents<sinks_pair>>(of_sinks, lengths_device, 0);
        window_device = std::make_unique<device_latents<Window>>(of_window, lengths_device, sinks);
        pages_device = std::make_unique<device_latents<Quantized>>(pages, lengths_device, sinks);
    }
    auto mix() const {
        return cuda::make_mixed(recent, cuda::behind_window(pages_device->ref),
                                cuda::in_window(window_device->ref),
                                cuda::sink_tokens(sinks_device->ref, sinks));
    }
    /// x^ of a token; null: its page is not held.
    const float* at(std::size_t b, int t) const {
        const int t_behind = t - sinks;
        if (t < sinks) return &of_sinks.values[b][static_cast<std::size_t>(t) * dim];
        if (t_behind >= committed[b]) return &of_window.values[b][static_cast<std::size_t>(t_behind) * dim];
        if (pages.table[b * static_cast<std::size_t>(pages.columns) +
                        static_cast<std::size_t>(t_behind / page)] < 0)
            return nullptr;
        return &pages.values[b][static_cast<std::size_t>(t_behind) * dim];
    }

private:
    template <class F>
    static std::vector<int> each(const std::vector<int>& tokens, const F& f) {
        std::vector<int> numbers;
        for (const int n : tokens) numbers.push_back(f(n));
        return numbers;
    }
};

/// A query over some latents, and a sink without a value.
struct latent_row {
    std::vector<double> output;
    double sum = 0.0, lse = -INFINITY;

    template <class T>
    latent_row(const T* q, const std::vector<const float*>& latents, int dim, int value_dim, double scale,
               double sink = -INFINITY, double softcap = 0.0)
        : output(static_cast<std::size_t>(value_dim)) {
        std::vector<double> scores;
        for (const float* x : latents) {
            double score = 0.0;
            for (int c = 0; c < dim; ++c)
                score += static_cast<double>(static_cast<float>(q[c])) * static_cast<double>(x[c]);
            score *= scale;
            scores.push_back(softcap == 0.0 ? score : softcap * std::tanh(score / softcap));
        }
        if (scores.empty()) return;
        const double top = std::max(sink, *std::max_element(scores.begin(), scores.end()));
        sum = std::exp(sink - top);
        for (std::size_t t = 0; t < scores.size(); ++t) {
            const double w = std::exp(scores[t] - top);
            sum += w;
            for (std::size_t c = 0; c < output.size(); ++c)
                output[c] += w * static_cast<double>(latents[t][c]);
        }
        for (double& x : output) x /= sum;
        lse = top + std::log(sum);
    }
    /// Compares a row with it: adds up squares, and checks the log-sum-exp.
    template <class T>
    void compare(const T* got, float got_lse, double& off, double& size, const char* name) const {
        for (std::size_t c = 0; c < output.size(); ++c) {
            const auto have = static_cast<double>(static_cast<float>(got[c]));
            size += output[c] * output[c];
            off += (have - output[c]) * (have - output[c]);
            if (!(have == have)) off = INFINITY;
        }
        if (sum == 0.0)
            CHECK(got_lse == -INFINITY, "%s: a row that sees nothing has lse %g", name,
                  static_cast<double>(got_lse));
        else
            CHECK(std::abs(static_cast<double>(got_lse) - lse) < 2e-3 * (1.0 + std::abs(lse)),
                  "%s: lse %g, %g expected", name, static_cast<double>(got_lse), lse);
    }
};

}  // namespace test
