// An engine whose memory are growing buffers, as MLX has them, with kvq beside it: tokens go into a quantized
// sequence, drafted ones are trimmed away on both sides, and what remains goes back and into MLX's own bits.
#include <cstdio>
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>
#include <vector>

#include "growing_buffers.hpp"

namespace {

constexpr int layers = 2, heads = 2, dim = 64, layer = 1;
using half = kvq::float16;

}  // namespace

int main() {
    kvq::cache cache({.layers = layers, .kv_heads = heads, .head_dim = dim},
                     {.keys = kvq::make_format<kvq::affine<8>, kvq::scalar>(), .recent = 16});
    auto sequence = cache.new_sequence();
    growing::buffers<half> buffers({.batch = 1, .heads = heads, .head_dim = dim});

    std::vector<half> x;
    for (int i = 0; i < 300 * heads * dim; ++i) x.push_back(half(static_cast<float>(i * 37 % 101) / 50 - 1));
    const kvq::token_view<const half> tokens(x.data(), 300, heads, dim);
    growing::append_to(sequence, layer, buffers.append(tokens, tokens));

    // 10 of them were drafts that the model did not accept. A sequence keeps no pages that it does not show.
    buffers.trim(290);
    sequence.trim(290);
    const std::size_t ahead = buffers.bytes();
    buffers.trim_to_offset();
    std::printf("buffers: %d tokens, %zu bytes, %zu with what was allocated ahead\n", buffers.tokens(),
                buffers.bytes(), ahead);

    growing::buffers<half> back(buffers.shape());
    const auto all = growing::append_from(back, sequence, layer);
    float largest = 0;
    for (int t = 0; t < all.tokens; ++t)
        for (int c = 0; c < dim; ++c) {
            const float error = all.keys().at(t, 0)[c] - buffers.view().keys().at(t, 0)[c];
            largest = error > largest ? error : -error > largest ? -error : largest;
        }
    std::printf("through a sequence of 8 bits and back: %d tokens, error at most %.4f\n", all.tokens,
                static_cast<double>(largest));

    const growing::quantized<half> small(buffers, {.bits = 4, .group = 64});
    std::printf("in MLX's 4 bits: %zu bytes\n", small.bytes());
    return all.tokens == 290 && largest < 0.01f && small.bytes() < buffers.bytes() / 3 ? 0 : 1;
}
