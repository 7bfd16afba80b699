// FlashMLA's decode kernel for sm_90 on bf16 latents, without torch: scripts/gpu-bench latent with
// FLASH_MLA=FOLDER. Its parameters are those that csrc/api/dense_decode.h passes for one query token. How the
// work is divided is computed once: engines do so once for all layers of a step.
#pragma once

#include <params.h>
#include <sm90/decode/dense/splitkv_mla.h>
#include <smxx/decode/combine/combine.h>
#include <smxx/decode/get_decoding_sched_meta/get_decoding_sched_meta.h>

#include <algorithm>
#include <cmath>

#include "shuffled_pages.cuh"

namespace bench {

class flash_mla {
public:
    static constexpr int page_tokens = 64, dim = 576, value_dim = 512;

    /// Pages of bf16 latents, token after token, in an order that the table gives. All sequences have this
    /// length.
    flash_mla(kvq::bfloat16* pages, int* table, int* tokens, int sequences, int length, int heads,
              float scale) {
        int processors = 0;
        BENCH_OK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
        const int parts = std::max(processors / ((heads + 63) / 64), 1), splits = sequences + parts;
        const std::size_t rows = static_cast<std::size_t>(heads),
                          all = static_cast<std::size_t>(splits) * rows;
        parts_ = on_device<DecodingSchedMeta>(static_cast<std::size_t>(parts));
        splits_ = on_device<int>(static_cast<std::size_t>(sequences) + 1);
        sums_ = on_device<float>(static_cast<std::size_t>(sequences) * rows);
        part_sums_ = on_device<float>(all);
        part_outputs_ = on_device<float>(all * value_dim);

        GetDecodeSchedMetaParams divide{};
        divide.b = sequences, divide.s_q = 1, divide.block_size_n = page_tokens;
        divide.fixed_overhead_num_blocks = 5, divide.topk = divide.extra_topk = -1;
        divide.seqlens_k_ptr = tokens, divide.tile_scheduler_metadata_ptr = parts_;
        divide.num_splits_ptr = splits_, divide.num_sm_parts = parts;
        smxx::decode::run_get_decoding_sched_meta_kernel(divide);
        BENCH_OK(cudaDeviceSynchronize());

        decode_.b = sequences, decode_.s_q = 1,
        decode_.q_seq_per_hk = decode_.q_head_per_hk = decode_.h_q = heads;
        decode_.d = dim, decode_.d_v = value_dim, decode_.h_k = 1;
        decode_.num_blocks = sequences * (length / page_tokens);
        decode_.scale_softmax = scale, decode_.scale_softmax_log2 = scale * 1.44269504f;
        decode_.k_ptr = pages, decode_.softmax_lse_ptr = sums_;
        decode_.q_batch_stride = static_cast<std::int64_t>(heads) * dim;
        decode_.k_batch_stride = page_tokens * dim;
        decode_.o_batch_stride = decode_.o_head_stride = static_cast<std::int64_t>(heads) * value_dim;
        decode_.q_row_stride = decode_.k_row_stride = decode_.q_head_stride = decode_.k_head_stride = dim;
        decode_.o_row_stride = value_dim;
        decode_.block_table = table, decode_.block_table_batch_stride = length / page_tokens;
        decode_.page_block_size = page_tokens, decode_.seqlens_k_ptr = tokens;
        decode_.tile_scheduler_metadata_ptr = parts_, decode_.num_sm_parts = parts;
        decode_.num_splits_ptr = splits_, decode_.total_num_splits = splits;
        decode_.softmax_lseaccum_ptr = part_sums_, decode_.oaccum_ptr = part_outputs_;

        const int row = value_dim, block = heads * value_dim;
        combine_ = {sequences, 1,     heads,  value_dim,  sums_,         nullptr, heads,  heads,
                    block,     block, row,    part_sums_, part_outputs_, heads,   heads,  block,
                    block,     row,   parts_, splits_,    parts,         nullptr, nullptr};
    }
    flash_mla(const flash_mla&) = delete;
    flash_mla& operator=(const flash_mla&) = delete;
    ~flash_mla() {
        for (void* p : {static_cast<void*>(parts_), static_cast<void*>(splits_), static_cast<void*>(sums_),
                        static_cast<void*>(part_sums_), static_cast<void*>(part_outputs_)})
            cudaFree(p);
    }

    void attend(kvq::bfloat16* q, kvq::bfloat16* out, cudaStream_t stream) {
        decode_.q_ptr = q, decode_.o_ptr = combine_.out = out;
        decode_.stream = combine_.stream = stream;
        sm90::run_flash_splitkv_mla_kernel<cutlass::bfloat16_t>(decode_);
        smxx::decode::run_flash_mla_combine_kernel<cutlass::bfloat16_t>(combine_);
    }

private:
    DecodingSchedMeta* parts_;
    int* splits_;
    float *sums_, *part_sums_, *part_outputs_;
    DenseAttnDecodeParams decode_{};
    CombineParams combine_{};
};

}  // namespace bench
