// K and V in the memory of other engines, copied into a quantized sequence and back. The layouts are those of
// docs/guide/adapters.md.
#include <cstdio>
#include <kvq/adapters/paged.hpp>
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>
#include <kvq/policy/ring.hpp>
#include <vector>

namespace {

constexpr int layers = 2, heads = 2, dim = 64, tokens = 100, layer = 1;
using half = kvq::float16;

std::vector<half> numbers(std::size_t n) {
    std::vector<half> x(n);
    std::uint32_t state = 1;
    for (half& h : x) {
        state = state * 1664525u + 1013904223u;
        h = half(static_cast<float>(state >> 8) * 0x1p-23f - 1.0f);
    }
    return x;
}

int failures = 0;

/// The first key of token 0 must equal the engine's, within the error of 8 bits.
void report(const char* engine, const kvq::sequence& s, float first_key) {
    std::vector<float> k(heads * dim);
    s.dequantize(layer, kvq::tensor::key, 0, kvq::token_view(k.data(), 1, heads, dim));
    const bool close = k[0] - first_key < 0.01f && first_key - k[0] < 0.01f;
    std::printf("%-24s %d tokens; key[0] = %8.5f, was %8.5f\n", engine, s.tokens(layer),
                static_cast<double>(k[0]), static_cast<double>(first_key));
    failures += !close || s.tokens(layer) != tokens;
}

}  // namespace

int main() {
    kvq::cache cache({.layers = layers, .kv_heads = heads, .head_dim = dim},
                     {.keys = kvq::make_format<kvq::affine<8>, kvq::scalar>(), .recent = 16});

    {  // vLLM (FlashAttention): [2][blocks][block_size][heads][dim] per layer
        const int blocks = 10, block_size = 16;
        auto memory = numbers(std::size_t{2} * blocks * block_size * heads * dim);
        const auto keys = kvq::paged_nhd(memory.data(), blocks, block_size, heads, dim);
        const auto values = kvq::paged_nhd(memory.data() + memory.size() / 2, blocks, block_size, heads, dim);
        const std::vector<std::int32_t> block_table{7, 2, 9, 0, 1, 5, 3};

        auto sequence = cache.new_sequence();
        kvq::append_from_blocks(sequence, layer, keys, values, std::span(block_table), tokens);
        report("vLLM blocks", sequence, keys.at(7 * block_size, 0)[0]);

        const std::vector<std::int64_t> slot_mapping{64, 65, -1, 67};  // tokens 96 to 99; one is not wanted
        kvq::write_slots(sequence, layer, tokens - 4, std::span(slot_mapping), keys, values);
    }
    {  // nano-vllm: [2][layers][blocks][block_size][heads][dim]
        const int blocks = 3, block_size = 64;
        auto memory = numbers(std::size_t{2} * layers * blocks * block_size * heads * dim);
        const auto of = [&](int tensor) {
            const std::size_t one_layer = std::size_t{blocks} * block_size * heads * dim;
            return kvq::paged_nhd(
                memory.data() + static_cast<std::size_t>(tensor * layers + layer) * one_layer, blocks,
                block_size, heads, dim);
        };
        const std::vector<std::int32_t> block_table{2, 0};
        auto sequence = cache.new_sequence();
        kvq::append_from_blocks(sequence, layer, of(0), of(1), std::span(block_table), tokens);
        report("nano-vllm blocks", sequence, of(0).at(2 * block_size, 0)[0]);
    }
    {  // FlashInfer, HND: [pages][2][heads][page_size][dim], with indptr, indices, last_page_len
        const int pages = 16, page_size = 8;
        auto memory = numbers(std::size_t{2} * pages * page_size * heads * dim);
        auto keys = kvq::paged_hnd(memory.data(), pages, page_size, heads, dim), values = keys;
        keys.block_stride = values.block_stride = 2 * page_size * heads * dim;
        values.data += page_size * heads * dim;
        const std::vector<std::int32_t> indptr{0, 1, 14},
            indices{3, 15, 14, 12, 11, 10, 9, 8, 7, 6, 5, 4, 2, 1}, last_page_len{8, 4};

        const std::size_t request = 1;
        const auto table =
            std::span(indices).subspan(static_cast<std::size_t>(indptr[request]),
                                       static_cast<std::size_t>(indptr[request + 1] - indptr[request]));
        auto sequence = cache.new_sequence();
        kvq::append_from_blocks(sequence, layer, keys, values, table,
                                (static_cast<int>(table.size()) - 1) * page_size + last_page_len[request]);
        report("FlashInfer pages, HND", sequence, keys.at(15 * page_size, 0)[0]);
    }
    {  // llama.cpp: a row of heads * dim per cell; the cells of a sequence lie anywhere: blocks of one token
        const int cells = 256;
        auto k = numbers(std::size_t{cells} * heads * dim), v = k;
        std::vector<std::int32_t> cells_of_sequence;
        for (int i = 0; i < tokens; ++i) cells_of_sequence.push_back(255 - 2 * i);
        auto sequence = cache.new_sequence();
        kvq::append_from_blocks(sequence, layer, kvq::paged_nhd(k.data(), cells, 1, heads, dim),
                                kvq::paged_nhd(v.data(), cells, 1, heads, dim), std::span(cells_of_sequence),
                                tokens);
        report("llama.cpp cells", sequence, k[std::size_t{255} * heads * dim]);
    }
    {  // MLX: [batch][heads][capacity][dim]; a view has any strides
        const int capacity = 256;
        const auto x = numbers(std::size_t{heads} * capacity * dim);
        const kvq::token_view<const half> held(x.data(), tokens, heads, dim, dim, capacity * dim);
        auto sequence = cache.new_sequence();
        sequence.append(layer, held, held);
        report("MLX buffers", sequence, x[0]);
    }
    {  // A layer with a sliding window of 32 tokens
        kvq::ring ring(cache.new_sequence(), {.window = 32, .slack = 4});
        const auto x = numbers(std::size_t{heads} * dim);
        const kvq::token_view<const half> one(x.data(), 1, heads, dim);
        for (int i = 0; i < 1000; ++i)
            for (int l = 0; l < layers; ++l) ring.append(l, one, one);
        try {
            ring.trim(500);
            ++failures;
        } catch (const kvq::error& e) {
            std::printf("%-24s %lld tokens, %d of them held; %s\n", "ring",
                        static_cast<long long>(ring.tokens()), ring.held().tokens(), e.what());
        }
    }
    return failures == 0 ? 0 : 1;
}
