// Views of an engine's paged cache: blocks of 16- or 32-bit tokens, ordered by a block table or a slot
// mapping.
//
//   slot = block * block_tokens + offset in the block
//   NHD   [blocks][block_tokens][heads][dim]       vLLM, nano-vllm, FlashInfer's default
//   HND   [blocks][heads][block_tokens][dim]       FlashInfer's other layout
//
//   kvq::paged_view<kvq::float16> keys = kvq::paged_nhd(k_data, blocks, 16, heads, dim), values = ...;
//   kvq::append_from_blocks(sequence, layer, keys, values, block_table, tokens);    // into kvq pages
//   kvq::write_slots(sequence, layer, first, mapping, keys, values);                  // back, -1 skips a
//     token
//
// Views own no memory and no function keeps them. K and V in one allocation ([blocks][2][...] and the like)
// are two views whose block_stride steps over both. Blocks may be shared and in any order; slots are integers
// of 32 or 64 bits. Shapes, blocks and slots are all checked before anything is written; append_from_blocks
// appends all tokens or none (strong exception guarantee).
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "../cache/sequence.hpp"
#include "../cache/sequence_access.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// T may be const. Strides count elements; channels are contiguous.
template <class T>
struct paged_view {
    T* data = nullptr;
    int blocks = 0;
    int block_tokens = 0;
    int heads = 0;
    int dim = 0;
    std::ptrdiff_t block_stride = 0;
    std::ptrdiff_t token_stride = 0;
    std::ptrdiff_t head_stride = 0;

    /// The first `tokens` tokens of a block.
    token_view<T> block(int index, int tokens) const noexcept {
        return {data + index * block_stride, tokens, heads, dim, token_stride, head_stride};
    }
    T* at(std::int64_t slot, int head) const noexcept {
        return data + slot / block_tokens * block_stride + slot % block_tokens * token_stride +
               head * head_stride;
    }
    std::int64_t slot_count() const noexcept { return static_cast<std::int64_t>(blocks) * block_tokens; }

    operator paged_view<const T>() const noexcept requires(!std::is_const_v<T>) {
        return {data, blocks, block_tokens, heads, dim, block_stride, token_stride, head_stride};
    }
};

/// Dense [blocks][block_tokens][heads][dim].
template <class T>
constexpr paged_view<T> paged_nhd(T* data, int blocks, int block_tokens, int heads, int dim) noexcept {
    const std::ptrdiff_t token = static_cast<std::ptrdiff_t>(heads) * dim;
    return {data, blocks, block_tokens, heads, dim, block_tokens * token, token, dim};
}
/// Dense [blocks][heads][block_tokens][dim].
template <class T>
constexpr paged_view<T> paged_hnd(T* data, int blocks, int block_tokens, int heads, int dim) noexcept {
    const std::ptrdiff_t head = static_cast<std::ptrdiff_t>(block_tokens) * dim;
    return {data, blocks, block_tokens, heads, dim, heads * head, dim, head};
}

namespace detail {

template <class T>
void check_paged(const paged_view<T>& x, const char* name, int heads, int dim) {
    expect(x.blocks >= 0 && x.block_tokens >= 1, name, " have ", x.blocks, " blocks of ", x.block_tokens,
           " tokens");
    expect(x.heads == heads && x.dim == dim, name, " are ", x.heads, " heads x ", x.dim,
           " channels but the cache holds ", heads, " x ", dim);
    expect(x.data != nullptr || x.blocks == 0, name, " have no data for ", x.blocks, " blocks");
}

/// K and V of one cache share their tables.
template <class T>
void check_paged_pair(const paged_view<T>& keys, const paged_view<T>& values, const sequence& s, int layer) {
    (void)s.tokens(layer);  // checks the layer
    const cache_shape& shape = sequence_access::cache(s).shape(layer);
    check_paged(keys, "keys", shape.kv_heads, shape.dim(tensor::key));
    check_paged(values, "values", shape.kv_heads, shape.dim(tensor::value));
    expect(keys.blocks == values.blocks && keys.block_tokens == values.block_tokens, "keys have ",
           keys.blocks, " blocks of ", keys.block_tokens, " tokens but values ", values.blocks, " of ",
           values.block_tokens);
}

/// Copies the tokens to contiguous memory.
template <class T>
token_view<const T> gather_blocks(const paged_view<T>& from, std::span<const std::int32_t> table, int tokens,
                                  resource_vector<std::remove_const_t<T>>& memory) {
    const std::size_t per_token = static_cast<std::size_t>(from.heads) * static_cast<std::size_t>(from.dim);
    constexpr std::size_t most = PTRDIFF_MAX / sizeof(T);
    expect(static_cast<std::size_t>(tokens) <= most / per_token, "cannot gather ", tokens, " tokens x ",
           from.heads, " heads x ", from.dim, " channels: more bytes than can be counted");
    memory.resize(static_cast<std::size_t>(tokens) * per_token);
    auto* to = memory.data();
    for (int t = 0; t < tokens; ++t) {
        const token_view<T> block =
            from.block(table[static_cast<std::size_t>(t / from.block_tokens)], from.block_tokens);
        for (int h = 0; h < from.heads; ++h, to += from.dim)
            std::copy_n(block.at(t % from.block_tokens, h), from.dim, to);
    }
    return token_view<const T>(memory.data(), tokens, from.heads, from.dim);
}

/// Slot: std::int32_t or std::int64_t.
template <class Slot, class T>
void write_slots(const sequence& s, int layer, int first, std::span<const Slot> mapping,
                 const paged_view<T>& keys, const paged_view<T>& values) {
    check_paged_pair(keys, values, s, layer);
    const int held = s.tokens(layer);
    expect(first >= 0 && first <= held && mapping.size() <= static_cast<std::size_t>(held - first),
           "cannot write ", mapping.size(), " tokens from token ", first, " of layer ", layer, ": it holds ",
           held);
    const auto count = static_cast<int>(mapping.size());
    expect(s.holds(layer, first, first + count), "cannot write tokens ", first, " to ", first + count,
           ": layer ", layer, " has freed some of them");
    for (std::size_t i = 0; i < mapping.size(); ++i)
        expect(mapping[i] >= -1 && mapping[i] < keys.slot_count(), "entry ", i, " of the mapping is slot ",
               mapping[i], ", neither -1 nor one of ", keys.slot_count());
    resource_vector<T> memory(sequence_access::cache(s).pool().memory());
    const layer_pages pages = s.pages(layer);
    for (const tensor role : {tensor::key, tensor::value}) {
        const paged_view<T>& to = role == tensor::key ? keys : values;
        for (int e = 0; e < pages.entries(); ++e) {
            const layer_pages::entry entry = pages.at(e);
            const int from = larger(first, entry.first_token);
            const int end = smaller(first + count, entry.first_token + entry.tokens);
            if (from >= end) continue;
            memory.resize(static_cast<std::size_t>(end - from) * static_cast<std::size_t>(to.heads) *
                          static_cast<std::size_t>(to.dim));
            const token_view<T> part(memory.data(), end - from, to.heads, to.dim);
            s.dequantize(layer, role, from, part);
            for (int t = from; t < end; ++t) {
                const Slot slot = mapping[static_cast<std::size_t>(t - first)];
                if (slot < 0) continue;
                for (int h = 0; h < to.heads; ++h) std::copy_n(part.at(t - from, h), to.dim, to.at(slot, h));
            }
        }
    }
}

}  // namespace detail

/// Appends `tokens` tokens, which lie in the blocks of `table` one after the other, to a layer of a sequence,
/// as one append. O(tokens): blocks that are adjacent in memory are read in place; others are gathered first,
/// in memory of the cache's resource. Raises kvq::error when shapes do not fit, when the table is too short,
/// or when it contains a block that does not exist; table entries behind the last token are not read.
template <class T>
void append_from_blocks(sequence& s, int layer, const paged_view<T>& keys, const paged_view<T>& values,
                        std::span<const std::int32_t> table, int tokens) {
    detail::check_paged_pair(keys, values, s, layer);
    const int per_block = keys.block_tokens;
    detail::expect(tokens >= 0, "cannot gather ", tokens, " tokens");
    // In 64 bits: the rounded-up sum may overflow an int.
    const std::int64_t used = (std::int64_t{tokens} + per_block - 1) / per_block;
    detail::expect(used <= static_cast<std::int64_t>(table.size()), tokens, " tokens lie in ", used,
                   " blocks of ", per_block, " but the table has ", table.size());
    bool neighbours = true;
    for (std::size_t i = 0; i < static_cast<std::size_t>(used); ++i) {
        detail::expect(table[i] >= 0 && table[i] < keys.blocks, "entry ", i, " of the table is block ",
                       table[i], ", not one of ", keys.blocks);
        neighbours = neighbours && (i == 0 || table[i] == table[i - 1] + 1);
    }
    std::pmr::memory_resource* const memory = detail::sequence_access::cache(s).pool().memory();
    resource_vector<std::remove_const_t<T>> key_memory(memory), value_memory(memory);
    const auto in_order = [&](const paged_view<T>& from, auto& gathered) -> token_view<const T> {
        if (used == 0) return {nullptr, 0, from.heads, from.dim};
        if (used == 1 || (neighbours && from.block_stride == per_block * from.token_stride))
            return from.block(table[0], tokens);
        return detail::gather_blocks(from, table, tokens, gathered);
    };
    const token_view<const T> k = in_order(keys, key_memory), v = in_order(values, value_memory);
    s.append(layer, k, v);
}

/// Writes x^ of tokens [first, first + mapping.size()) of a layer to these slots, rounded to T; -1 skips a
/// token.
/// Last write wins: of two tokens with one slot the later one stays. Slots have the engine's width, 32 or 64
/// bits. Raises kvq::error when shapes, tokens or slots are out of range.
template <float_format T>
void write_slots(const sequence& s, int layer, int first, std::span<const std::int64_t> mapping,
                 const paged_view<T>& keys, const paged_view<T>& values) {
    detail::write_slots(s, layer, first, mapping, keys, values);
}
template <float_format T>
void write_slots(const sequence& s, int layer, int first, std::span<const std::int32_t> mapping,
                 const paged_view<T>& keys, const paged_view<T>& values) {
    detail::write_slots(s, layer, first, mapping, keys, values);
}

}}  // namespace kvq
