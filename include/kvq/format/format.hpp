// A format: a scheme and a backend, ready to run, as a value. All layers above a block use formats, not
// schemes.
//
//   format f = make_format<affine<4, per_channel<64>>, simd<>>();     format/make_format.hpp
//   format f = find_format("kivi-4-g64", tensor::key);                format/find_format.hpp
//
// A format is a table of plain functions (format_functions) and the state of one scheme. Copies share the
// state, so that a copy costs an atomic increment. A call through the table covers one block: thousands of
// multiply-adds.
// Contract: const functions may be called from any thread. The bytes of a block are the same for every
// backend. A format may be made in one object and used in another one that was compiled for other
// instructions: all functions of this header are forced inline.
#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "../core/float_type.hpp"
#include "../core/row_place.hpp"
#include "../core/shape.hpp"

namespace kvq { inline namespace v0_3 {

class format;

/// Functions of a backend that attention needs besides the products of blocks.
struct backend_functions {
    static constexpr std::size_t tile_state_bytes = 128;

    const char* name;
    int query_rows;  ///< per task, at most

    /// Turns scores [0, n) of `rows` rows, `stride` apart, into weights (cpu/softmax.hpp).
    void (*softmax)(float* scores, std::ptrdiff_t stride, int rows, int n, float* max, float* sum,
                    float* factor);
    /// Reads n values of a query and multiplies them by `scale`. Returns whether all results are finite.
    bool (*load_query)(float_type type, const void* from, int n, float scale, float* to);
    /// Called before and after the products of `rows` rows on architectures with a tile state; else null.
    /// `state`: tile_state_bytes.
    void (*open_tiles)(int rows, void* state);
    void (*close_tiles)(void* state);
    /// 16-bit values on this backend, the usual window.
    const format& (*fp16)();

    /// Bounds of the channels of values [tokens][dim], and an estimate of products from them
    /// (cpu/product/channel_ranges.hpp).
    void (*find_bounds)(const float* values, int tokens, int dim, std::byte* bounds);
    void (*estimate_within)(const std::byte* bounds, int dim, const float* x, std::ptrdiff_t x_stride,
                            int rows, float spread, float* out, std::ptrdiff_t ahead, float* scratch);
    std::size_t (*estimate_floats)(int dim);

    /// Products with n tokens that are rows of floats, `stride` apart (cpu/product/token_products.hpp):
    /// scores y[i][t]; outputs, which are added to y[i][c]; sums over rows of w[i] max(scores[i][t], 0),
    /// which are added to y[t].
    void (*score_tokens)(const float* tokens, std::ptrdiff_t stride, int n, int dim, const float* x,
                         std::ptrdiff_t x_stride, int rows, float* y, std::ptrdiff_t y_stride);
    void (*add_tokens)(const float* tokens, std::ptrdiff_t stride, int n, int dim, const float* w,
                       std::ptrdiff_t w_stride, int rows, float* y, std::ptrdiff_t y_stride);
    void (*add_rectified)(const float* scores, std::ptrdiff_t stride, int rows, int n, const float* w,
                          float* y);
};

/// Are the tile states of both backends the same? A program and the library may have a table each for one
/// backend.
KVQ_NO_COPY bool same_tiles(const backend_functions& a, const backend_functions& b) noexcept {
    const char *x = a.name, *y = b.name;
    while (*x != '\0' && *x == *y) ++x, ++y;
    return *x == *y;
}

/// Which functions of a format are vectorised for blocks of some shape; the others are portable loops, which
/// are slower.
struct format_description {
    using text = char[104];

    bool quantize = false;    ///< from a block of a window, the transform of its tokens included
    bool dequantize = false;  ///< to fp16 and fp32, the transform of the tokens included
    bool attend = false;      ///< products on the block itself, or on a copy that is dequantized in vectors
    /// The transform of tokens, queries and outputs; true for schemes without one.
    bool transform = false;
    /// Attention multiplies a copy that it dequantizes, because codes cannot be folded
    /// (schemes/concepts.hpp).
    bool dequantizes_first = false;
    /// The header of the kernel, or "portable: " and the reason (cpu/registry.hpp).
    text quantize_by = {}, dequantize_by = {}, attend_by = {}, transform_by = {};

    KVQ_NO_COPY bool all() const noexcept { return quantize && dequantize && attend && transform; }
};

/// Functions of a format whose codes of 4 bits may have a lower plane, which is at block_id::lower
/// (format/planes.hpp). Values are those that the codes stand for, behind the transform of the format.
struct plane_functions {
    std::size_t plan_bytes;
    std::size_t (*make_plan)(const void* scheme, const block_shape&, block_id, int rows, void* plan);
    void (*begin)(const void* plan, const block_shape&, block_id, const std::byte* block, const float* x,
                  std::ptrdiff_t x_stride, std::byte* workspace);
    void (*finish)(const void* plan, const block_shape&, block_id, const std::byte* block, const float* x,
                   std::ptrdiff_t x_stride, int rows, int cols, float* y, std::ptrdiff_t y_stride, bool add,
                   std::ptrdiff_t ahead, std::byte* workspace);
    /// A block of the window as values [tokens][dim].
    void (*window_values)(const block_shape&, float_type, const std::byte* block, float* values);
    /// Writes the lower plane of values [tokens][dim], which the block has quantized.
    void (*write)(const void* scheme, const block_shape&, block_id, const std::byte* block,
                  const float* values);
    /// x^ of both planes.
    void (*read)(const void* scheme, const block_shape&, block_id, const std::byte* block, float* values);
};

/// of(keys, channel): a caller's function of the keys of a head.
struct channel_importance {
    double (*of)(const void* keys, int channel);
    const void* keys;

    KVQ_NO_COPY double operator[](int channel) const { return of(keys, channel); }
};

/// Plans of channel widths, which a format of keys may get once keys are known (schemes/scheme_codes.hpp).
/// Such a plan is of one layer and serves every layer: a page holds its format (page/page.hpp).
struct plan_functions {
    bool (*has_plan)(const void* scheme);
    /// The format with the plan of keys; statistics: the bytes of calibration::save(), of one layer.
    format (*from_statistics)(const format& of, const std::byte* statistics, std::size_t bytes);
    /// A plan as text, and back. Returns the number of letters, which are written unless `to` is null.
    std::size_t (*write_text)(const void* scheme, char* to);
    format (*from_text)(const format& of, const char* text, std::size_t letters);
    /// The error that the plan expects of a head whose channels have these importances, as a part of that of
    /// even widths. Each channel is asked for twice.
    double (*relative_error)(const void* scheme, const block_shape&, block_id, const channel_importance&);
};

/// The functions of one scheme on one backend. `scheme` is the state of the format. Shapes, ids and blocks:
/// schemes/concepts.hpp.
struct format_functions {
    const backend_functions* backend;
    bool keys, values;       ///< tensors that it can hold
    bool dequantizes_first;  ///< attention multiplies a dequantized copy, because codes cannot be folded
    bool transforms;         ///< transform_query and restore_output are not null
    bool estimates_first;    ///< estimate_scores takes vectors before transform_query
    bool begins_once[2];     ///< K, V: begin() serves every block of a layer and head
    bool holds_values;       ///< full precision
    bool reads_own_blocks;   ///< of a scheme that is not of the library (format/check_products.hpp)
    float_type value_type;   ///< type of the values, if holds_values
    std::size_t plan_bytes;

    /// Raises kvq::error when the state belongs to another shape.
    void (*check)(const void* scheme, const cache_shape&, tensor);
    std::size_t (*block_bytes)(const void* scheme, const block_shape&);
    /// Bytes of codes in a block, or of values; 0 when codes do not lie apart from parameters.
    std::size_t (*code_bytes)(const void* scheme, const block_shape&);

    /// Quantizes a block of 16- or 32-bit values. scratch: shape.values() floats. Returns how many values
    /// were not finite.
    std::uint32_t (*quantize)(const void* scheme, const block_shape&, block_id, float_type,
                              const std::byte* from, std::byte* block, float* scratch);
    /// Quantizes values [tokens][dim], which may be overwritten.
    std::uint32_t (*quantize_values)(const void* scheme, const block_shape&, block_id, float* values,
                                     std::byte* block);
    /// The same for values that were quantized before; token_scales: the token scales of their last block, or
    /// null.
    std::uint32_t (*requantize_values)(const void* scheme, const block_shape&, block_id, float* values,
                                       float* token_scales, std::byte* block);
    /// Token scales of a block; null for schemes without token scales.
    void (*read_token_scales)(const void* scheme, const block_shape&, const std::byte* block, float* scales);
    /// Writes token t to out + t * stride, rounded once. scratch: shape.values() floats.
    void (*dequantize)(const void* scheme, const block_shape&, block_id, const std::byte* block, float_type,
                       void* out, std::ptrdiff_t stride, float* scratch);
    /// Writes x^ of tokens[0, n) to rows `stride` floats apart (cpu/listed_tokens.hpp). scratch:
    /// shape.values() + 4 * shape.dim + 64 floats.
    void (*dequantize_tokens)(const void* scheme, const block_shape&, block_id, const std::byte* block,
                              const std::int32_t* tokens, int n, float* out, std::ptrdiff_t stride,
                              float* scratch);

    /// Full precision only, else null: writes `count` tokens, `stride` values apart, to tokens [at, at +
    /// count) of a block. Returns how many written values are not finite, those beyond the type of the block
    /// included.
    std::uint32_t (*write_tokens)(const block_shape&, std::byte* block, float_type, const void* tokens,
                                  std::ptrdiff_t stride, int count, int at);

    /// Products of `rows` vectors with blocks of one layer and head (cpu/block_product.hpp). make_plan:
    /// writes plan_bytes to `plan` unless it is null; returns the bytes of workspace.
    std::size_t (*make_plan)(const void* scheme, const block_shape&, block_id, int rows, void* plan);
    void (*begin)(const void* plan, const block_shape&, block_id, const std::byte* block, const float* x,
                  std::ptrdiff_t x_stride, std::byte* workspace);
    void (*finish)(const void* plan, const block_shape&, block_id, const std::byte* block, const float* x,
                   std::ptrdiff_t x_stride, int rows, int cols, float* y, std::ptrdiff_t y_stride, bool add,
                   std::ptrdiff_t ahead, std::byte* workspace);

    /// The same where rows lie in memory of another system (attention/attend_rows.hpp).
    row_place_functions of_places;

    /// The same for rows of weights and the first `channels` channels of blocks of keys, which are the values
    /// of a latent layer; a block is read where it lies. Returns 0 where there is no such product; null:
    /// there never is. Outputs of a format that transforms are restored afterwards.
    std::size_t key_values_plan_bytes;
    std::size_t (*plan_key_values)(const void* scheme, const block_shape& keys, block_id, int channels,
                                   int rows, void* plan);
    void (*begin_key_values)(const void* plan, const block_shape&, block_id, const std::byte* block,
                             const float* x, std::ptrdiff_t x_stride, std::byte* workspace);
    void (*finish_key_values)(const void* plan, const block_shape&, block_id, const std::byte* block,
                              const float* x, std::ptrdiff_t x_stride, int rows, int cols, float* y,
                              std::ptrdiff_t y_stride, bool add, std::ptrdiff_t ahead, std::byte* workspace);

    /// Null for formats whose keys have neither parameters of channels nor bounds (format/bounds.hpp). An
    /// estimate of the products of `rows` vectors with tokens [first, end) of a block of keys, from these
    /// alone (cpu/product/score_estimate.hpp); with spread 1 it is at least the largest product.
    void (*estimate_scores)(const void* scheme, const block_shape&, block_id, const std::byte* block,
                            const float* x, std::ptrdiff_t x_stride, int rows, int first, int end,
                            float spread, float* out, std::ptrdiff_t ahead, float* scratch);
    /// Floats of `scratch`.
    std::size_t (*estimate_floats)(const void* scheme, const block_shape&);

    format_description (*describe)(const void* scheme, const block_shape&, float_type window);

    /// Of `count` rows, `stride` apart.
    void (*transform_query)(const void* scheme, const block_shape&, block_id, float* x, std::ptrdiff_t stride,
                            int count);
    void (*restore_output)(const void* scheme, const block_shape&, block_id, float* y, std::ptrdiff_t stride,
                           int count);

    /// Null: the codes cannot have a lower plane.
    const plane_functions* planes;
    /// Of formats with two planes (format/planes.hpp), else null. Bytes of the lower plane of a block, which
    /// are part of block_bytes; the format of the upper plane alone.
    std::size_t (*lower_bytes)(const void* scheme, const block_shape&);
    const format& (*upper)(const void* scheme);
    const plan_functions* plans;  ///< null: the format takes no plan of keys
};

/// A format's functions and state, shared by its copies.
struct format_record {
    const format_functions* functions = nullptr;
    const void* scheme = nullptr;
    const char* name = nullptr;
    bool has_state = false, has_fingerprint = false;
    bool all_in_name = false;  ///< formats of these functions and this name quantize and dequantize the same
    std::uint64_t fingerprint = 0;
    /// The name that find_format was asked for; empty: the format was made without one. Messages show it
    /// (format/format_names.hpp). What a format is, `name` says.
    char asked_name[64] = {};
    void (*destroy)(format_record*) = nullptr;
    std::atomic<std::uint32_t> references{1};

    KVQ_NO_COPY format_record() noexcept = default;
};

class format {
public:
    /// An empty format; it can only be assigned to.
    KVQ_NO_COPY format() = default;
    KVQ_NO_COPY explicit format(format_record* owned) noexcept : record_(owned) {}
    KVQ_NO_COPY format(const format& other) noexcept : record_(other.record_) {
        if (record_) record_->references.fetch_add(1, std::memory_order_relaxed);
    }
    KVQ_NO_COPY format(format&& other) noexcept : record_(other.record_) { other.record_ = nullptr; }
    KVQ_NO_COPY format& operator=(const format& other) noexcept {
        format copy(other);
        return *this = static_cast<format&&>(copy);
    }
    KVQ_NO_COPY format& operator=(format&& other) noexcept {
        format_record* const mine = record_;
        record_ = other.record_;
        other.record_ = mine;
        return *this;
    }
    KVQ_NO_COPY ~format() {
        if (record_ && record_->references.fetch_sub(1, std::memory_order_acq_rel) == 1)
            record_->destroy(record_);
    }
    KVQ_NO_COPY explicit operator bool() const noexcept { return record_ != nullptr; }

    /// The name of the scheme, such as "affine4-token-g64-fp16".
    KVQ_NO_COPY const char* name() const noexcept { return record_->name; }
    /// The name that find_format was asked for, such as "std4"; of other formats the name of the scheme.
    KVQ_NO_COPY const char* asked_name() const noexcept {
        return record_->asked_name[0] != '\0' ? record_->asked_name : record_->name;
    }
    /// The name of the backend: "scalar", "avx2", ...
    KVQ_NO_COPY const char* backend() const noexcept { return record_->functions->backend->name; }
    KVQ_NO_COPY bool supports(tensor role) const noexcept {
        return role == tensor::key ? record_->functions->keys : record_->functions->values;
    }
    /// True for fp32, fp16 and bf16, the formats of a window.
    KVQ_NO_COPY bool holds_values() const noexcept { return record_->functions->holds_values; }
    /// Bytes of one head's block, a multiple of 16.
    KVQ_NO_COPY std::size_t block_bytes(const block_shape& shape) const {
        return record_->functions->block_bytes(record_->scheme, shape);
    }
    /// Those of them that the lower plane takes, which lies apart; 0: there is none.
    KVQ_NO_COPY std::size_t lower_bytes(const block_shape& shape) const {
        const auto bytes = record_->functions->lower_bytes;
        return bytes ? bytes(record_->scheme, shape) : 0;
    }
    /// Block h of the data of a page. id: learns where its lower plane is; lower: of the page, or null.
    KVQ_NO_COPY std::byte* block_at(const block_shape& shape, std::byte* data, std::byte* lower, int h,
                                    block_id& id) const {
        const std::size_t apart = lower_bytes(shape), at = static_cast<std::size_t>(h);
        id.lower = lower ? lower + apart * at : nullptr;
        return data + (block_bytes(shape) - apart) * at;
    }
    KVQ_NO_COPY const std::byte* block_at(const block_shape& shape, const std::byte* data, std::byte* lower,
                                          int h, block_id& id) const {
        return block_at(shape, const_cast<std::byte*>(data), lower, h, id);
    }
    /// Bits per value, parameters included, of a block with at least one token and channel.
    KVQ_NO_COPY double bits(const block_shape& shape) const {
        return 8.0 * static_cast<double>(block_bytes(shape)) / static_cast<double>(shape.values());
    }

    /// Which functions are fast for blocks of this shape, under a window of this type, and why others are
    /// not. No kernel runs.
    KVQ_NO_COPY format_description describe(const block_shape& shape,
                                            float_type window = float_type::fp16) const {
        format_description d = record_->functions->describe(record_->scheme, shape, window);
        d.dequantizes_first = record_->functions->dequantizes_first;
        return d;
    }

    /// Are both formats copies of one format?
    KVQ_NO_COPY bool is(const format& other) const noexcept { return record_ == other.record_; }
    /// Are both copies, or one scheme without state, of one name, on one backend?
    KVQ_NO_COPY bool same_as(const format& other) const noexcept {
        if (is(other)) return true;
        if (record_->functions != other.record_->functions || !record_->all_in_name) return false;
        const char *a = record_->name, *b = other.record_->name;
        while (*a != '\0' && *a == *b) ++a, ++b;
        return *a == *b;
    }

    /// Does it take a plan of keys, which it does not have yet?
    KVQ_NO_COPY bool wants_plan() const noexcept {
        return record_->functions->plans != nullptr && !record_->functions->plans->has_plan(record_->scheme);
    }

    /// The table and the state, for loops over blocks.
    KVQ_NO_COPY const format_functions& functions() const noexcept { return *record_->functions; }
    KVQ_NO_COPY const void* scheme() const noexcept { return record_->scheme; }
    KVQ_NO_COPY const format_record& record() const noexcept { return *record_; }
    /// For whoever has just made the format, and holds its only copy. A name that is too long is not kept.
    KVQ_NO_COPY void set_asked_name(const char* name, std::size_t length) noexcept {
        if (length >= sizeof(record_->asked_name)) return;
        for (std::size_t i = 0; i < length; ++i) record_->asked_name[i] = name[i];
        record_->asked_name[length] = '\0';
    }

private:
    format_record* record_ = nullptr;
};

}}  // namespace kvq

namespace kvq { inline namespace KVQ_COMMON {

/// K and V of a scheme that is a pair, such as kivi<4> or a preset.
struct format_pair {
    format keys, values;
};

/// The formats of one tensor. One format converts to a list.
class format_list {
public:
    format_list() = default;
    format_list(format only);
    format_list(std::initializer_list<format> formats);
    format_list(std::vector<format> formats);

    int size() const noexcept;
    bool empty() const noexcept;
    const format& operator[](int i) const;
    void push_back(format f);
    auto begin() const noexcept { return formats_.begin(); }
    auto end() const noexcept { return formats_.end(); }

private:
    std::vector<format> formats_;
};

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "format-inl.hpp"
#endif
