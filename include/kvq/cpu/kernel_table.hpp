// Kernels of one instruction set as plain functions: what kvq::library exports to programs that are compiled
// for any other one.
//
//   kernel_vectors    what every scheme may use: windows, loads of parameters, transforms, estimates, softmax
//   codec_kernels     products, quantizing and dequantizing of the blocks of some codecs
//
// Functions get a codec as a value, and what depends on a type of the scheme as functions. Contract: types
// without functions of their own, as all types that objects of several instruction sets exchange. Functions
// that return bool return false, and have written nothing that lasts, for values that are left to portable
// code.
#pragma once

#include "../core/row_place.hpp"
#include "../quant/token_transform.hpp"
#include "../schemes/codec_spec.hpp"
#include "product/product_blocks.hpp"

namespace kvq { inline namespace v0_3 {

/// Parameters of one type: fit is kernels::range_fit (cpu/quantize/fit.hpp); codes are clamped where a
/// parameter above `limit` was wanted.
struct parameter_functions {
    void (*fit)(const float* lo, const float* hi, int n, float steps, std::byte* to, std::size_t section,
                float* bias, float* inverse, float* most);
    float limit;
    void (*load)(const std::byte* from, int n, float* to);
    bool fp16;  ///< of type fp16, which kernels load themselves
};

/// Values of a block: a window of a type, or floats [token][channel].
struct block_input {
    const std::byte* from;
    float_type type;
    bool tokens;
};

/// As those of format_functions (format/format.hpp).
struct product_functions {
    std::size_t plan_bytes;
    /// Writes plan_bytes to `plan` unless it is null; returns the bytes of workspace.
    std::size_t (*make_plan)(const product_blocks&, const block_shape&, int rows, void* plan);
    void (*begin)(const void* plan, const block_shape&, block_id, const std::byte* block, const float* x,
                  std::ptrdiff_t x_stride, std::byte* workspace);
    void (*finish)(const void* plan, const block_shape&, block_id, const std::byte* block, const float* x,
                   std::ptrdiff_t x_stride, int rows, int cols, float* y, std::ptrdiff_t y_stride, bool add,
                   std::ptrdiff_t ahead, std::byte* workspace);
    /// Of blocks of keys with the values of a latent layer, on the same codes: shapes are those of the
    /// values, the blocks those of the keys. Null: there is none.
    const product_functions* of_key_values;
    /// Of codes with a lower plane, which is at block_id::lower. Null: there is none.
    const product_functions* of_planes;
    row_place_functions of_places;
};

/// Kernels of codecs whose parameters belong to groups (kernels::by_groups), of one width, levels and axis.
struct group_functions {
    bool (*quantize)(const codec_spec&, const parameter_functions&, const block_shape&, const block_input&,
                     std::byte* block);
    bool (*dequantize)(const codec_spec&, const parameter_functions&, const block_shape&,
                       const std::byte* block, float_type, void* out, std::ptrdiff_t stride, float* scratch);
};

struct channel_blocks;
struct channel_encoding;

/// Kernels of codecs that are taken channel by channel (channels.hpp), of some widths of codes.
struct channel_functions {
    /// values: overwritten. token_scales: those of the values' last block, or null.
    bool (*quantize)(const channel_blocks&, const channel_encoding&, float* values, const float* token_scales,
                     std::byte* block);
    void (*dequantize)(const channel_blocks&, float_type, void* out, std::ptrdiff_t stride, float* scratch);
};

struct backend_functions;

struct kernel_vectors {
    const backend_functions* backend;
    int width;  ///< floats of a vector
    void (*load_floats)(float_type, const std::byte* from, int n, float* out);
    /// Of asymmetric and symmetric levels, stored as fp32, fp16 and bf16.
    parameter_functions parameters[2][3];
    bool (*read_tokens)(float_type values, const block_shape&, const std::byte* block, float_type, void* out,
                        std::ptrdiff_t stride);
    std::uint32_t (*write_tokens)(float_type values, const block_shape&, std::byte* block, float_type,
                                  const void* tokens, std::ptrdiff_t stride, int count, int at);
    void (*round_tokens)(const block_shape&, const float* values, float_type, void* out,
                         std::ptrdiff_t stride);
    /// kernels::hadamard_tokens (cpu/transformed.hpp).
    bool (*transform)(const block_shape&, const block_id&, float* values, std::ptrdiff_t stride,
                      const token_transform&, bool back);
    void (*estimate_scores)(const product_blocks&, const parameter_source&, const float* x,
                            std::ptrdiff_t x_stride, int count, int first, int end, float spread, float* out,
                            std::ptrdiff_t ahead, float* scratch);
    product_functions dequantized;  ///< of blocks that are dequantized first
};

/// Kernels of the codecs that are equal to `of` in what these depend on: products on the reading, the widths
/// and the kind of levels; groups on width, levels and axis; channels on the widths. Null: none.
struct codec_kernels {
    codec_spec of;
    const product_functions* product;
    const group_functions* groups;
    const channel_functions* channels;
};

// In kvq::library, for the best instruction set of the CPU. A codec: its group may be any. Null: there is
// none.
KVQ_EXPORT const kernel_vectors& library_vectors();
KVQ_EXPORT const product_functions* library_product(const codec_spec& codec);
KVQ_EXPORT const group_functions* library_groups(const codec_spec& codec);
KVQ_EXPORT const channel_functions* library_channels(const codec_spec& codec);

}}  // namespace kvq
