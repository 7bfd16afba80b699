// The q8_0 cache tensors of llama.cpp, attended by kvq where they lie, and taken into a sequence. A layer's K
// is one tensor, its V another: a row for each cell, which has the blocks of all kv heads one after the
// other, {fp16 scale, 32 int8} for every 32 channels. The cells of a sequence lie in any order. Pages of
// format q8_0 have the same rows, head by head.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <kvq/attention/copy_rows.hpp>
#include <kvq/attention/reference.hpp>
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>
#include <kvq/schemes/token_rows.hpp>
#include <numeric>
#include <random>
#include <vector>

namespace {

constexpr int cells = 400, tokens = 300, kv_heads = 2, q_heads = 8, dim = 64, page_tokens = 64;
constexpr std::size_t block_bytes = 34, head_bytes = dim / 32 * block_bytes,
                      row_bytes = kv_heads * head_bytes;

/// What llama.cpp has written: as quantize_row_q8_0 does, by the definition of the type.
std::vector<std::byte> cache_tensor(unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<std::byte> tensor(cells * row_bytes);
    for (std::size_t block = 0; block < tensor.size(); block += block_bytes) {
        float x[32], largest = 0;
        for (float& v : x) largest = std::max(largest, std::fabs(v = normal(random)));
        const float step = largest / 127.0f;
        const std::uint16_t stored = kvq::float16(step).bits;
        std::memcpy(tensor.data() + block, &stored, 2);
        for (std::size_t i = 0; i < 32; ++i)
            tensor[block + 2 + i] = static_cast<std::byte>(static_cast<int>(std::round(x[i] / step)));
    }
    return tensor;
}

}  // namespace

int main() {
    const auto k_tensor = cache_tensor(1), v_tensor = cache_tensor(2);
    std::vector<std::int32_t> of_sequence(cells);
    std::iota(of_sequence.begin(), of_sequence.end(), 0);
    std::shuffle(of_sequence.begin(), of_sequence.end(), std::mt19937(3));
    of_sequence.resize(tokens);

    const auto q8_0 = kvq::make_format<kvq::scalar>(kvq::token_rows(kvq::row_layout_named("q8_0")));
    // Tokens wait in fp32 for their page: fp16 would round them.
    kvq::cache cache({.layers = 1, .kv_heads = kv_heads, .head_dim = dim},
                     {.keys = q8_0,
                      .values = q8_0,
                      .window = kvq::make_format<kvq::full<float>, kvq::scalar>(),
                      .page_tokens = page_tokens});
    auto sequence = cache.new_sequence();
    // Every cell is a block of one token, and the cells of the sequence are its block table.
    const auto view = [&](const std::vector<std::byte>& tensor) {
        return kvq::rows_view{
            .rows = q8_0, .data = tensor.data(), .head_stride = head_bytes, .block_stride = row_bytes};
    };
    const kvq::row_blocks blocks{of_sequence.data(), tokens, 1, cells};
    kvq::workspace memory;
    std::vector<float> k(tokens * kv_heads * dim), v(k.size());
    const kvq::token_view keys(k.data(), tokens, kv_heads, dim), values(v.data(), tokens, kv_heads, dim);
    kvq::read_rows(view(k_tensor), blocks, 0, keys, memory);
    kvq::read_rows(view(v_tensor), blocks, 0, values, memory);
    sequence.append(0, keys, values);

    // Pages that are whole hold llama.cpp's bytes, page by page: head, token, row of the head.
    int equal = 0, rows = 0;
    const kvq::layer_pages pages = sequence.pages(0);
    for (int i = 0; i < pages.entries(); ++i) {
        const auto entry = pages.at(i);
        if (entry.tokens < page_tokens) continue;  // still 16 bit
        for (int h = 0; h < kv_heads; ++h)
            for (int t = 0; t < page_tokens; ++t) {
                const std::byte* const mine =
                    pages.data(*entry.keys) + static_cast<std::size_t>(h * page_tokens + t) * head_bytes;
                const std::byte* const theirs =
                    k_tensor.data() +
                    static_cast<std::size_t>(of_sequence[static_cast<std::size_t>(entry.first_token + t)]) *
                        row_bytes +
                    static_cast<std::size_t>(h) * head_bytes;
                equal += std::memcmp(mine, theirs, head_bytes) == 0;
                ++rows;
            }
    }
    std::printf("%d of %d rows of whole pages have llama.cpp's bytes\n", equal, rows);

    std::mt19937 random(4);
    std::normal_distribution<float> normal;
    std::vector<float> q(q_heads * dim), of_pages(q.size()), in_place(q.size());
    for (float& x : q) x = normal(random);
    const kvq::token_view<const float> queries(q.data(), 1, q_heads, dim);
    sequence.attend(0, queries, kvq::token_view(of_pages.data(), 1, q_heads, dim));

    // Nothing copied.
    kvq::attend_rows(view(k_tensor), view(v_tensor), blocks,
                     {.tokens = tokens, .kv_heads = kv_heads, .head_dim = dim}, queries,
                     kvq::token_view(in_place.data(), 1, q_heads, dim), memory);

    std::vector<double> exact(q.size());
    kvq::reference_attend(keys, values, queries, kvq::token_view(exact.data(), 1, q_heads, dim),
                          kvq::causal{});
    const auto off = [&](const std::vector<float>& out) {
        double error = 0, norm = 0;
        for (std::size_t i = 0; i < out.size(); ++i) {
            error += (static_cast<double>(out[i]) - exact[i]) * (static_cast<double>(out[i]) - exact[i]);
            norm += exact[i] * exact[i];
        }
        return std::sqrt(error / norm);
    };
    std::printf("%d tokens, output off by %.1e in place, %.1e from pages\n", tokens, off(in_place),
                off(of_pages));
    return equal == rows && rows > 0 && off(in_place) < 1e-4 && off(of_pages) < 1e-4 ? 0 : 1;
}
