// FP8 or NVFP4 rows with a scale of the tensor for each kv head, as checkpoints of llm-compressor have them
// for vLLM.
//
//   head_rows scheme(row_layout_named("fp8"), scales, kv_heads);   scales: [kv_heads], or [layers][kv_heads]
//
//   block of head h     that of token_rows(layout, scale of h)
//
// Contract: that of schemes/token_rows.hpp; a cache of another number of heads or layers is refused. The
// scales are part of the fingerprint, by which files and messages tell formats apart.
#pragma once

#include <span>

#include "../core/tagged_vector.hpp"
#include "token_rows.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

struct head_rows {
    using attends_as = head_rows;

    /// Raises std::invalid_argument as token_rows() does, and for scales that are not those of whole layers.
    head_rows(const row_layout& layout, std::span<const float> scales, int kv_heads)
        : layout_(layout), kv_heads_(kv_heads) {
        if (kv_heads < 1 || scales.empty() || scales.size() % static_cast<std::size_t>(kv_heads) != 0)
            detail::fail(layout.name, " needs a scale for each of ", kv_heads, " heads, but got ",
                         scales.size());
        for (const float scale : scales) rows_.push_back(token_rows(layout, scale));
    }

    short_text name() const {
        short_text text = layout_.name;
        text += "-heads";
        return text;
    }
    const row_layout& layout() const noexcept { return layout_; }
    float tensor_scale(const block_id& id) const noexcept { return of(id).tensor_scale(); }
    std::uint64_t fingerprint() const noexcept {
        std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a of the bits
        for (const token_rows& rows : rows_) hash = (hash ^ rows.fingerprint()) * 0x100000001b3u;
        return hash;
    }

    std::size_t block_bytes(const block_shape& s) const noexcept { return rows_[0].block_bytes(s); }
    void check(const cache_shape& shape, tensor role) const {
        const auto layers = static_cast<int>(rows_.size()) / kv_heads_;
        if (shape.kv_heads != kv_heads_ || (layers != 1 && layers != shape.layers))
            detail::fail(layout_.name, " has scales for ", layers, " layers of ", kv_heads_,
                         " heads, but there are ", shape.layers, " of ", shape.kv_heads);
        rows_[0].check(shape, role);
    }
    std::uint32_t quantize(const block_shape& s, const block_id& id, const float* values,
                           std::byte* block) const {
        return of(id).quantize(s, id, values, block);
    }
    void dequantize(const block_shape& s, const block_id& id, const std::byte* block, float* values) const {
        of(id).dequantize(s, id, block, values);
    }

private:
    const token_rows& of(const block_id& id) const noexcept {
        const auto heads = static_cast<std::size_t>(kv_heads_),
                   at = static_cast<std::size_t>(id.layer) * heads + static_cast<std::size_t>(id.head);
        return rows_[rows_.size() == heads ? static_cast<std::size_t>(id.head) : at];
    }

    row_layout layout_;
    int kv_heads_;
    detail::tagged_vector<token_rows> rows_;
};

template <>
struct detail::codec_maker<head_rows> {
    static constexpr codec_spec of_type() noexcept { return codec_of<token_rows>(); }
    static constexpr codec_spec of(const head_rows&) noexcept { return of_type(); }
};

static_assert(key_scheme<head_rows> && value_scheme<head_rows>);

}}  // namespace kvq
