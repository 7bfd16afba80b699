// Fused attention against double arithmetic on the dequantized values.
#pragma once

#include <kvq/cuda/decode/attend.cuh>
#include <kvq/page/key_window.hpp>

#include "support.cuh"

namespace test {

struct attention_case {
    int kv_heads = 2;
    int group = 4;
    int query_tokens = 1;
    int window = 0;
    float softcap = 0.0f;
    std::vector<int> lengths;
    bool holes = false;                       // pages that the format does not hold
    std::vector<float> value_sizes = {1.0f};  // blocks of values are multiplied by one of them
    std::vector<float> key_sizes = {1.0f};    // the same of keys
    bool peaked = false;                      // one key of every page dominates
    bool chunked = false;                     // of the window
};

/// Softmax state of one query row in double, over those tokens of [from, to) of one head whose pages are
/// held.
struct reference_state {
    double max = -INFINITY, sum = 0.0;
    std::vector<double> output;
};

template <class Format>
reference_state reference_row(const quantized_batch<Format>& b, std::size_t sequence, std::size_t head,
                              const float* q, int from, int to, float softcap) {
    constexpr int dim = Format::head_dim, value_dim = Format::value_dim;
    reference_state r;
    r.output.assign(value_dim, 0.0);
    std::vector<double> scores;
    const auto held = [&](int t) {
        return b.table[sequence * static_cast<std::size_t>(b.columns) +
                       static_cast<std::size_t>(t / Format::page_tokens)] >= 0;
    };
    for (int t = from; t < to; ++t) {
        if (!held(t)) continue;
        double s = 0.0;
        for (int c = 0; c < dim; ++c)
            s += static_cast<double>(q[c]) *
                 b.key_values[sequence][head][static_cast<std::size_t>(t * dim + c)];
        s /= std::sqrt(static_cast<double>(dim));
        if (softcap > 0.0f) s = softcap * std::tanh(s / softcap);
        scores.push_back(s);
        r.max = std::max(r.max, s);
    }
    std::size_t next = 0;
    for (int t = from; t < to; ++t) {
        if (!held(t)) continue;
        const double p = std::exp(scores[next++] - r.max);
        r.sum += p;
        for (int c = 0; c < value_dim; ++c)
            r.output[static_cast<std::size_t>(c)] +=
                p * b.value_values[sequence][head][static_cast<std::size_t>(t * value_dim + c)];
    }
    return r;
}

template <class T>
T as(float x) {
    if constexpr (std::is_same_v<T, float>)
        return x;
    else
        return T(x);
}

/// The largest relative error of a sequence's output rows. `name` goes into messages.
template <class Format, class T>
void check_attention(rng& r, const attention_case& c, const char* name, double* worst = nullptr,
                     double* worst_state = nullptr) {
    // A score of 11.2: the other weights are fractions of a step of 16-bit numbers.
    const float peak = 11.2f / std::sqrt(static_cast<float>(Format::head_dim));
    quantized_batch<Format> batch(r, c.kv_heads, c.lengths, false, c.value_sizes, c.key_sizes,
                                  c.peaked ? peak : 0.0f);
    if (c.holes)
        for (int& entry : batch.table)
            if (uniform(r, 0, 2) == 0) entry = -1;
    const device_batch<Format> device(batch);
    const int sequences = static_cast<int>(c.lengths.size()), q_heads = c.kv_heads * c.group;
    const int tokens = sequences * c.query_tokens;
    constexpr int dim = Format::head_dim, value_dim = Format::value_dim;
    std::vector<T> q(static_cast<std::size_t>(tokens) * q_heads * dim);
    std::vector<float> qf(q.size());
    for (std::size_t i = 0; i < q.size(); ++i) {
        const float x = normal(r);
        q[i] = as<T>(c.peaked ? 0.5f * x + quantized_batch<Format>::direction(static_cast<int>(i) % dim) : x);
        qf[i] = static_cast<float>(q[i]);
    }
    device_buffer<T> q_device(q);
    device_buffer<T> out(static_cast<std::size_t>(tokens) * q_heads * value_dim);
    device_buffer<float> lse(static_cast<std::size_t>(tokens) * q_heads);
    device_buffer<float> state(static_cast<std::size_t>(tokens) * q_heads * (value_dim + 2));
    const std::size_t bytes = kvq::cuda::attend_workspace_bytes<Format, T>(c.group, c.query_tokens);
    device_buffer<std::byte> workspace(bytes);
    workspace.clear();
    kvq::cuda::attention_options options;
    options.query_tokens = c.query_tokens;
    options.window = c.window;
    options.chunked = c.chunked;
    options.softcap = c.softcap;
    options.lse = lse.get();
    options.state_out = state.get();
    for (int repeat = 0; repeat < 2; ++repeat) {  // the second call finds the workspace as the first left it
        out.poison();
        const auto status = kvq::cuda::attend<Format, T>(
            device.ref, kvq::token_view<const T>(q_device.get(), tokens, q_heads, dim),
            kvq::token_view<T>(out.get(), tokens, q_heads, value_dim), options, workspace.get(), bytes,
            nullptr);
        CHECK(status, "%s: %s", name, status.message);
        CUDA_OK(cudaDeviceSynchronize());
    }
    const std::vector<T> got = out.download();
    const std::vector<float> got_lse = lse.download(), got_state = state.download();
    double largest = 0.0, all_errors = 0.0, all_sizes = 0.0;
    for (int b = 0; b < sequences; ++b)
        for (int i = 0; i < c.query_tokens; ++i)
            for (int h = 0; h < q_heads; ++h) {
                const std::size_t row = static_cast<std::size_t>((b * c.query_tokens + i) * q_heads + h);
                const int position = c.lengths[static_cast<std::size_t>(b)] - c.query_tokens + i;
                const int from = std::max(0, kvq::key_window{c.window, c.chunked}.first_seen(position));
                const auto expected =
                    reference_row(batch, static_cast<std::size_t>(b), static_cast<std::size_t>(h / c.group),
                                  &qf[row * dim], from, std::max(from, position + 1), c.softcap);
                double error = 0.0, size = 0.0, state_error = 0.0;
                const float* const state_row = &got_state[row * (value_dim + 2)];
                for (int d = 0; d < value_dim; ++d) {
                    const double want = expected.sum > 0.0
                                            ? expected.output[static_cast<std::size_t>(d)] / expected.sum
                                            : 0.0;
                    const double have =
                        static_cast<float>(got[row * value_dim + static_cast<std::size_t>(d)]);
                    error += (have - want) * (have - want);
                    size += want * want;
                    const double in_state =
                        state_row[1] > 0.0f ? static_cast<double>(state_row[2 + d]) / state_row[1] : 0.0;
                    state_error += (in_state - want) * (in_state - want);
                    if (!(have == have)) error = INFINITY;
                }
                const double relative = size > 0.0 ? std::sqrt(error / size) : std::sqrt(error);
                largest = std::max(largest, relative);
                all_errors += state_error;
                all_sizes += size;
                // Float outputs (state_out) of a row within 2e-3; rounding them to bf16 moves a number by up
                // to 2^-8 of itself.
                CHECK(size == 0.0 || std::sqrt(state_error / size) <= 2e-3,
                      "%s: state error %.3g (sequence %d of %d tokens, group %d)", name,
                      std::sqrt(state_error / size), b, c.lengths[static_cast<std::size_t>(b)], c.group);
                if (worst_state && size > 0.0 && !c.peaked)
                    *worst_state = std::max(*worst_state, std::sqrt(state_error / size));
                const double limit = 2e-3 + (std::is_same_v<T, kvq::bfloat16> ? 0x1p-8 : 0.0);
                CHECK(relative <= limit,
                      "%s: error %.3g (sequence %d of %d tokens, query %d of %d, head %d, group %d, window "
                      "%d, cap %g)",
                      name, relative, b, c.lengths[static_cast<std::size_t>(b)], i, c.query_tokens, h,
                      c.group, c.window, static_cast<double>(c.softcap));
                const double want_lse =
                    expected.sum > 0.0 ? expected.max + std::log(expected.sum) : -INFINITY;
                const double have_lse = got_lse[row];
                CHECK(
                    want_lse == have_lse || std::abs(want_lse - have_lse) < 1e-3 * (1.0 + std::abs(want_lse)),
                    "%s: lse %g, expected %g", name, have_lse, want_lse);
            }
    if (worst) *worst = std::max(*worst, largest);
    const double all = all_sizes > 0.0 ? std::sqrt(all_errors / all_sizes) : 0.0;
    CHECK(!c.peaked || all <= 1e-3, "%s: %.3g of the norm of all outputs, group %d, where keys dominate",
          name, all, c.group);
    if (worst_state && c.peaked) *worst_state = std::max(*worst_state, all);
}

/// Shapes that a format must get right.
template <class Format, class T>
void check_format(const char* name) {
    constexpr int page = Format::page_tokens;
    rng r(static_cast<unsigned>(page * 131 + Format::head_dim));
    double worst = 0.0, state = 0.0;
    const std::vector<int> ragged = {page + 1, 0, 1, page - 1, page, 3 * page + page / 2, 700};
    check_attention<Format, T>(r, {.kv_heads = 2, .group = 4, .lengths = ragged}, name, &worst, &state);
    check_attention<Format, T>(r, {.kv_heads = 3, .group = 1, .lengths = ragged}, name, &worst, &state);
    check_attention<Format, T>(r, {.kv_heads = 1, .group = 5, .lengths = {many(2000), 5, 77}}, name, &worst,
                               &state);
    check_attention<Format, T>(r, {.kv_heads = 2, .group = 8, .lengths = ragged}, name, &worst, &state);
    check_attention<Format, T>(r, {.kv_heads = 1, .group = 16, .lengths = {300, 40}}, name, &worst, &state);
    check_attention<Format, T>(
        r, {.kv_heads = 2, .group = 4, .query_tokens = 3, .lengths = {3, 2 * page + 1, 501}}, name, &worst,
        &state);
    check_attention<Format, T>(
        r, {.kv_heads = 1, .group = 2, .query_tokens = 8, .window = 40, .lengths = {page + 3, 600}}, name,
        &worst, &state);
    check_attention<Format, T>(r,
                               {.kv_heads = 1,
                                .group = 2,
                                .query_tokens = 8,
                                .window = 40,
                                .lengths = {page + 3, 603},
                                .chunked = true},
                               name, &worst, &state);
    check_attention<Format, T>(
        r, {.kv_heads = 2, .group = 2, .window = 100, .softcap = 5.0f, .lengths = {40, 900, page}}, name,
        &worst, &state);
    check_attention<Format, T>(r, {.kv_heads = 1, .group = 4, .lengths = {many(6000)}}, name, &worst, &state);
    check_attention<Format, T>(r, {.kv_heads = 2, .group = 4, .lengths = ragged, .holes = true}, name, &worst,
                               &state);
    check_attention<Format, T>(r,
                               {.kv_heads = 1,
                                .group = 3,
                                .query_tokens = 2,
                                .window = 150,
                                .lengths = {1000, 2 * page + 1, 1500},
                                .holes = true},
                               name, &worst, &state);
    // Equal lengths, so that shares are cut on items: fewer items than thread blocks, and more.
    check_attention<Format, T>(r, {.kv_heads = 2, .group = 4, .lengths = std::vector<int>(3, many(1900))},
                               name, &worst, &state);
    check_attention<Format, T>(r,
                               {.kv_heads = 4, .group = 2, .lengths = std::vector<int>(many(96), page + 5)},
                               name, &worst, &state);
    // Values far from 1: growing and shrinking from page to page, all of them large, all of them small.
    const std::vector<int> pages = {9 * page + 5, 700};
    for (const int group : {4, 8, 16})
        for (const auto& sizes :
             {std::vector<float>{1.0f, 8.0f}, std::vector<float>{300.0f}, std::vector<float>{0.01f}})
            check_attention<Format, T>(
                r, {.kv_heads = 2, .group = group, .lengths = pages, .value_sizes = sizes}, name, &worst,
                &state);
    // Scores that rise by much from page to page, and so many pages that a warp has three or four.
    if constexpr (page >= 64) {
        int multiprocessors = 0;
        CUDA_OK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
        check_attention<Format, T>(r,
                                   {.kv_heads = 3,
                                    .group = 8,
                                    .lengths = std::vector<int>(
                                        static_cast<std::size_t>(multiprocessors * 8 / 10 + 1), 9 * page + 5),
                                    .key_sizes = {0.02f, 0.02f, 0.02f, 0.3f, 1.0f}},
                                   name, &worst, &state);
    }
    std::printf("  %-44s largest error %.2e, of float outputs %.2e\n", name, worst, state);
}

}  // namespace test
