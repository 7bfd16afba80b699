// Records of tokens in the bytes of other systems: latents of DeepSeek, index keys, scales per token and
// head, MLX.
//
//   x^ = scale * number + bias
//
//   format           head_dim  bytes of a token, in order                          behind the page
//   mla-656          576       e4m3 x 512, fp32 x 4 (128 channels each), bf16 x 64
//   mla-656-pow2     576       the same, scales rounded up to powers of two
//   mla-584          512       e4m3 x 448, bf16 x 64                               e8m0 x 7, a zero
//   mla-528          512       e4m3 x 512, e8m0 x 16 (32 channels each)
//   mla-288          512       e2m1 x 512, e4m3 x 32 (16 channels each)
//   index-132        128       e4m3 x 128                                          fp32
//   index-68         128       e2m1 x 128                                          e8m0 x 4
//   int8-token-head  any       int8 x n, fp32
//   fp8-token-head   any       e4m3 x n, fp32
//   mlx-B-g64        64 k      B bits x n                                          fp16 x k, fp16 biases x k
//   mlx-B-g64-bf16   64 k      the same                                            bf16 x k, bf16 biases x k
//   nvfp4-v4         16 k      e2m1 x n                                            e4m3 x k of four tokens
//   mxfp4-g16        16 k      e2m1 x n                                            e8m0 x k
//
//   rule             scale, with M the largest number (448, 6, 127)
//   quotient         max(max|x|, least) / M; of mla-656 max(max|x| / 448, 2^-126)
//   power_of_two     2^ceil(log2(max(max|x| / M, 1e-4)))
//   halves_up        2^ceil(log2(max(max|x| / M, 1e-10))); e2m1 halfway between two is the larger one
//   by_inverse       max(max|x| / M, 1e-6); numbers are x * (1 / scale), int8 without its fraction
//   edges            of the end with the larger magnitude: a whole number of steps from zero
//   zero_point       s = max((max - min) / 15, 1e-6) without its lowest four bits, which hold z = -min / s,
//                    and numbers x / s + z, both rounded to the nearest of 0 to 15 (rotated_records.hpp)
//
// Pages of mla-584 are zeros up to a multiple of 576 bytes, others of 16. Two e2m1 in a byte: the even
// channel in its low half. B bits: a stream from the lowest bit of the first byte on, which is MLX's words.
// mlx: the scales of all tokens, then their biases. nvfp4-v4, TensorRT-LLM's values: the scales of four
// tokens take turns, [tokens / 4][k][4]; else it is nvfp4. schemes/token_records.hpp is the scheme.
// Contract: that of schemes/row_layout.hpp; magnitudes above 2^126 saturate.
// Sources: FlashMLA, README and tests/quant.py (656, 584); vLLM, fp8_ds_mla, indexer_k_quant_and_cache and
// *_per_token_head; vllm#56893 (528, 288: bytes; the rules are those of 584 and of nvfp4); MLX, quantize;
// FlashInfer, nvfp4_quantize_paged_kv_cache (nvfp4-v4); SGLang, fp4_e2m1 (mxfp4-g16).
#pragma once

#include "row_layout.hpp"

namespace kvq { inline namespace v0_3 {

/// What a record of a token holds: a value, of which one scheme reads all.
struct record_layout {
    enum class number : unsigned char { e4m3, e2m1, int8, bits };
    enum class stored : unsigned char { fp32, fp16, e4m3, e8m0, bf16 };
    enum class rule : unsigned char { quotient, power_of_two, by_inverse, edges, zero_point, halves_up };

    const char* name;
    int head_dim;  ///< 0: any
    number numbers;
    int bits;      ///< of a number
    int channels;  ///< that share a scale; 0: all but the wide ones
    stored scale;
    rule fit;
    float least;             ///< quotient: of the largest magnitude
    bool behind = false;     ///< scales behind the page, not behind the numbers of a token
    int wide = 0;            ///< last channels, in bf16 behind all else of a token
    int padding = 0;         ///< bytes behind the scales of a token
    int page_multiple = 16;  ///< bytes
    bool in_turns = false;   ///< scales of four tokens take turns

    KVQ_HD KVQ_NO_COPY constexpr bool biased() const noexcept { return fit == rule::edges; }
    KVQ_HD KVQ_NO_COPY constexpr int scale_bytes() const noexcept {
        return scale == stored::fp32 ? 4 : scale == stored::fp16 || scale == stored::bf16 ? 2 : 1;
    }
    KVQ_HD KVQ_NO_COPY constexpr int scaled_channels(int dim) const noexcept { return dim - wide; }
    KVQ_HD KVQ_NO_COPY constexpr int group_of(int dim) const noexcept {
        return channels > 0 ? channels : scaled_channels(dim);
    }
    KVQ_HD KVQ_NO_COPY constexpr int groups(int dim) const noexcept {
        return scaled_channels(dim) / group_of(dim);
    }
    KVQ_HD KVQ_NO_COPY constexpr int number_bytes(int dim) const noexcept {
        return scaled_channels(dim) * bits / 8;
    }
    KVQ_HD KVQ_NO_COPY constexpr int scales_bytes(int dim) const noexcept {
        return groups(dim) * scale_bytes() + padding;
    }
    /// Bytes of a token in its row, and behind the page without biases.
    KVQ_HD KVQ_NO_COPY constexpr int row_bytes(int dim) const noexcept {
        return number_bytes(dim) + (behind ? 0 : scales_bytes(dim)) + 2 * wide;
    }
    KVQ_HD KVQ_NO_COPY constexpr int bytes_behind(int dim) const noexcept {
        return behind ? scales_bytes(dim) : 0;
    }
    KVQ_HD KVQ_NO_COPY constexpr int token_bytes(int dim) const noexcept {
        return row_bytes(dim) + bytes_behind(dim) * (biased() ? 2 : 1);
    }
    KVQ_HD KVQ_NO_COPY constexpr kvq::row_bytes bytes(int dim) const noexcept {
        const int together = in_turns ? 4 : 1;
        return {row_bytes(dim), bytes_behind(dim),        biased() ? bytes_behind(dim) : 0,
                together,       scale_bytes() * together, behind ? padding : 0};
    }
};

/// All of them: find_format() has these names.
inline constexpr record_layout record_layouts[] = {
    {"mla-656", 576, record_layout::number::e4m3, 8, 128, record_layout::stored::fp32,
     record_layout::rule::quotient, 448 * 0x1p-126f, false, 64},
    {"mla-656-pow2", 576, record_layout::number::e4m3, 8, 128, record_layout::stored::fp32,
     record_layout::rule::power_of_two, 0, false, 64},
    {"mla-584", 512, record_layout::number::e4m3, 8, 64, record_layout::stored::e8m0,
     record_layout::rule::power_of_two, 0, true, 64, 1, 576},
    {"mla-528", 512, record_layout::number::e4m3, 8, 32, record_layout::stored::e8m0,
     record_layout::rule::power_of_two, 0},
    {"mla-288", 512, record_layout::number::e2m1, 4, 16, record_layout::stored::e4m3,
     record_layout::rule::quotient, 0},
    {"index-132", 128, record_layout::number::e4m3, 8, 128, record_layout::stored::fp32,
     record_layout::rule::quotient, 1e-4f, true},
    {"index-68", 128, record_layout::number::e2m1, 4, 32, record_layout::stored::e8m0,
     record_layout::rule::power_of_two, 0, true},
    {"int8-token-head", 0, record_layout::number::int8, 8, 0, record_layout::stored::fp32,
     record_layout::rule::by_inverse, 0},
    {"fp8-token-head", 0, record_layout::number::e4m3, 8, 0, record_layout::stored::fp32,
     record_layout::rule::by_inverse, 0},
    {"mlx-2-g64", 0, record_layout::number::bits, 2, 64, record_layout::stored::fp16,
     record_layout::rule::edges, 0, true},
    {"mlx-3-g64", 0, record_layout::number::bits, 3, 64, record_layout::stored::fp16,
     record_layout::rule::edges, 0, true},
    {"mlx-4-g64", 0, record_layout::number::bits, 4, 64, record_layout::stored::fp16,
     record_layout::rule::edges, 0, true},
    {"mlx-6-g64", 0, record_layout::number::bits, 6, 64, record_layout::stored::fp16,
     record_layout::rule::edges, 0, true},
    {"mlx-8-g64", 0, record_layout::number::bits, 8, 64, record_layout::stored::fp16,
     record_layout::rule::edges, 0, true},
    {"nvfp4-v4", 0, record_layout::number::e2m1, 4, 16, record_layout::stored::e4m3,
     record_layout::rule::quotient, 0, true, 0, 0, 16, true},
    {"mlx-2-g64-bf16", 0, record_layout::number::bits, 2, 64, record_layout::stored::bf16,
     record_layout::rule::edges, 0, true},
    {"mlx-3-g64-bf16", 0, record_layout::number::bits, 3, 64, record_layout::stored::bf16,
     record_layout::rule::edges, 0, true},
    {"mlx-4-g64-bf16", 0, record_layout::number::bits, 4, 64, record_layout::stored::bf16,
     record_layout::rule::edges, 0, true},
    {"mlx-6-g64-bf16", 0, record_layout::number::bits, 6, 64, record_layout::stored::bf16,
     record_layout::rule::edges, 0, true},
    {"mlx-8-g64-bf16", 0, record_layout::number::bits, 8, 64, record_layout::stored::bf16,
     record_layout::rule::edges, 0, true},
    {"mxfp4-g16", 0, record_layout::number::e2m1, 4, 16, record_layout::stored::e8m0,
     record_layout::rule::halves_up, 1e-10f, true},
};

}}  // namespace kvq
