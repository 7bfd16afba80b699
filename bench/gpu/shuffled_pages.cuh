// Pages in random order: keys and values, or keys alone (latents, an index).
#pragma once

#include <numeric>
#include <random>

#include "timing.cuh"

namespace bench {

/// Memory that is not set, with room for 16 bytes behind it.
template <class T>
T* on_device(std::size_t n) {
    T* data = nullptr;
    BENCH_OK(cudaMalloc(&data, n * sizeof(T) + 16));
    return data;
}

/// Pages of so many sequences of one length. Their bytes are those of normal numbers as half floats, for
/// every format.
template <class Pair>
struct shuffled_pages {
    std::size_t count, bytes;  // of pages of keys
    std::byte *memory, *values = nullptr;
    int* table;
    kvq::cuda::cache_ref<Pair> ref;

    shuffled_pages(int sequences, int length, const int* tokens, int kv_heads = 1)
        : count(static_cast<std::size_t>(length / Pair::page_tokens) * static_cast<std::size_t>(sequences)),
          bytes(count * static_cast<std::size_t>(kv_heads) * Pair::key_block_bytes),
          memory(on_device<std::byte>(bytes)) {
        fill_normal(memory, bytes, 3);
        if constexpr (Pair::value_block_bytes > 0) {
            ref.value_page_bytes = static_cast<std::size_t>(kv_heads) * Pair::value_block_bytes;
            values = on_device<std::byte>(count * ref.value_page_bytes);
            fill_normal(values, count * ref.value_page_bytes, 4);
            ref.value_pages = values;
        }
        std::vector<int> order(count);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), std::mt19937(5));
        table = on_device(order);
        ref.key_pages = memory;
        ref.key_page_bytes = static_cast<std::size_t>(kv_heads) * Pair::key_block_bytes;
        ref.block_table = table;
        ref.tokens = tokens;
        ref.sequences = sequences;
        ref.table_columns = length / Pair::page_tokens;
        ref.kv_heads = kv_heads;
    }
    shuffled_pages(const shuffled_pages&) = delete;
    shuffled_pages& operator=(const shuffled_pages&) = delete;
    ~shuffled_pages() {
        cudaFree(memory);
        cudaFree(values);
        cudaFree(table);
    }
};

}  // namespace bench
