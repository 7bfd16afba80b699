// Attention of ggml's CPU backend, for rows beside this library's own: flash attention (ggml_flash_attn_ext)
// on caches whose rows lie head after head or token after token, and two matrix products with a softmax
// between them. With KVQ_BENCH_IK_LLAMA: of the ggml in ik_llama.cpp, which has no thread pools and wants
// masks in blocks of 16 rows.
#pragma once

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml.h>
#if !defined(KVQ_BENCH_IK_LLAMA)
#include <ggml-cpu.h>
#endif

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#if defined(KVQ_BENCH_IK_LLAMA)
#define PEER "ik_llama"
#else
#define PEER "ggml"
#endif

namespace bench {

/// How ggml attends, and how the cache lies in memory:
///   head_major    flash attention, [kv_heads][tokens][head_dim]: what its kernel reads fastest
///   token_major   flash attention, [tokens][kv_heads][head_dim]: llama.cpp's cache
///   no_flash      products of matrices, K token-major, V [kv_heads][head_dim][tokens]: llama.cpp's cache
///                 without flash attention
///   latents       flash attention, one kv head whose values are the first value_dim channels of its keys
enum class ggml_path { head_major, token_major, no_flash, latents };

/// One layer: q is [query tokens, q_heads, head_dim], k and v are [tokens, kv_heads, head_dim], the queries
/// are the last tokens. Latents have no v.
class ggml_attention {
public:
    ggml_attention(ggml_path path, ggml_type type, int q_tokens, int q_heads, int kv_heads, int head_dim,
                   int tokens, int threads, int value_dim = 0)
        : path_(path),
          kv_heads_(static_cast<std::size_t>(kv_heads)),
          head_dim_(static_cast<std::size_t>(head_dim)),
          tokens_(static_cast<std::size_t>(tokens)),
          backend_(ggml_backend_cpu_init()),
          context_(ggml_init({32 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true})) {
        if (!backend_ || !context_) throw std::runtime_error("ggml does not start");
        ggml_backend_cpu_set_n_threads(backend_.get(), threads);
#if !defined(KVQ_BENCH_IK_LLAMA)
        ggml_threadpool_params params = ggml_threadpool_params_default(threads);
        pool_.reset(ggml_threadpool_new(&params));
        ggml_backend_cpu_set_threadpool(backend_.get(), pool_.get());
#endif

        ggml_context* const c = context_.get();
        const auto by_head = [&](ggml_tensor* t) { return ggml_permute(c, t, 0, 2, 1, 3); };
        q_ = ggml_new_tensor_3d(c, GGML_TYPE_F32, head_dim, q_heads, q_tokens);
#if defined(KVQ_BENCH_IK_LLAMA)
        mask_ = ggml_new_tensor_2d(c, GGML_TYPE_F16, tokens, GGML_PAD(q_tokens, GGML_KQ_MASK_PAD));
#else
        if (q_tokens > 1) mask_ = ggml_new_tensor_2d(c, GGML_TYPE_F16, tokens, q_tokens);
#endif
        const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
        if (path == ggml_path::head_major) {
            k_ = ggml_new_tensor_3d(c, type, head_dim, tokens, kv_heads);
            v_ = ggml_new_tensor_3d(c, type, head_dim, tokens, kv_heads);
            out_ = ggml_flash_attn_ext(c, by_head(q_), k_, v_, mask_, scale, 0.0f, 0.0f);
        } else if (path == ggml_path::latents) {
            k_ = ggml_new_tensor_3d(c, type, head_dim, tokens, 1);
            v_ = ggml_view_3d(c, k_, value_dim, tokens, 1, k_->nb[1], k_->nb[2], 0);
            out_ = ggml_flash_attn_ext(c, by_head(q_), k_, v_, mask_, scale, 0.0f, 0.0f);
        } else if (path == ggml_path::token_major) {
            k_ = ggml_new_tensor_3d(c, type, head_dim, kv_heads, tokens);
            v_ = ggml_new_tensor_3d(c, type, head_dim, kv_heads, tokens);
            out_ = ggml_flash_attn_ext(c, by_head(q_), by_head(k_), by_head(v_), mask_, scale, 0.0f, 0.0f);
        } else {
            k_ = ggml_new_tensor_3d(c, type, head_dim, kv_heads, tokens);
            v_ = ggml_new_tensor_3d(c, type, tokens, head_dim, kv_heads);
            ggml_tensor* const scores = ggml_mul_mat(c, by_head(k_), by_head(q_));
            ggml_mul_mat_set_prec(scores, GGML_PREC_F32);
            ggml_tensor* const weights = ggml_soft_max_ext(c, scores, mask_, scale, 0.0f);
            out_ = ggml_cont(c, by_head(ggml_mul_mat(c, v_, weights)));
        }
        graph_ = ggml_new_graph(c);
        ggml_build_forward_expand(graph_, out_);
        memory_.reset(ggml_backend_alloc_ctx_tensors(c, backend_.get()));
        if (!memory_) throw std::runtime_error("ggml finds no memory");
    }

    /// Stores the tensors; k and v become what their type holds of them.
    void fill(const std::vector<float>& q, std::vector<float>& k, std::vector<float>& v) {
        ggml_backend_tensor_set(q_, q.data(), 0, ggml_nbytes(q_));
        store(k, k_);
        if (path_ != ggml_path::latents) store(v, v_);
        if (!mask_) return;
        std::vector<ggml_fp16_t> seen(static_cast<std::size_t>(ggml_nelements(mask_)));
        const std::int64_t tokens = mask_->ne[0], queries = q_->ne[2];
        for (std::int64_t i = 0; i < queries; ++i)
            for (std::int64_t t = 0; t < tokens; ++t)
                seen[static_cast<std::size_t>(i * tokens + t)] =
                    ggml_fp32_to_fp16(t <= tokens - queries + i ? 0.0f : -INFINITY);
        ggml_backend_tensor_set(mask_, seen.data(), 0, ggml_nbytes(mask_));
    }

    void run() {
        if (ggml_backend_graph_compute(backend_.get(), graph_) != GGML_STATUS_SUCCESS)
            throw std::runtime_error("ggml does not compute");
    }

    std::size_t cache_bytes() const {
        return ggml_nbytes(k_) + (path_ == ggml_path::latents ? 0 : ggml_nbytes(v_));
    }

    /// [query tokens, q_heads, head_dim or value_dim]
    std::vector<float> output() const {
        std::vector<float> out(static_cast<std::size_t>(ggml_nelements(out_)));
        ggml_backend_tensor_get(out_, out.data(), 0, ggml_nbytes(out_));
        return out;
    }

private:
    template <auto Free>
    struct freed_by {
        template <class T>
        void operator()(T* p) const {
            Free(p);
        }
    };

    /// f(index in [tokens, heads, dim], index in the tensor).
    template <class F>
    void for_each_value(const ggml_tensor* t, F f) const {
        std::size_t from = 0;
        for (std::size_t token = 0; token < tokens_; ++token)
            for (std::size_t head = 0; head < kv_heads_; ++head)
                for (std::size_t channel = 0; channel < head_dim_; ++channel, ++from)
                    if (path_ == ggml_path::head_major)
                        f(from, (head * tokens_ + token) * head_dim_ + channel);
                    else if (path_ == ggml_path::no_flash && t == v_)
                        f(from, (head * head_dim_ + channel) * tokens_ + token);
                    else
                        f(from, from);
    }

    void store(std::vector<float>& x, ggml_tensor* t) const {
        std::vector<float> turned(x.size());
        for_each_value(t, [&](std::size_t from, std::size_t to) { turned[to] = x[from]; });
        std::vector<std::byte> quantized(ggml_nbytes(t));
#if defined(KVQ_BENCH_IK_LLAMA)
        ggml_quantize_chunk(t->type, turned.data(), quantized.data(), 0, ggml_nrows(t), t->ne[0], nullptr,
                            nullptr);
        const auto to_float = ggml_internal_get_type_traits(t->type).to_float;
#else
        ggml_quantize_chunk(t->type, turned.data(), quantized.data(), 0, ggml_nrows(t), t->ne[0], nullptr);
        const auto to_float = ggml_get_type_traits(t->type)->to_float;
#endif
        ggml_backend_tensor_set(t, quantized.data(), 0, quantized.size());
        to_float(quantized.data(), turned.data(), ggml_nelements(t));
        for_each_value(t, [&](std::size_t from, std::size_t to) { x[from] = turned[to]; });
    }

    ggml_path path_;
    std::size_t kv_heads_, head_dim_, tokens_;
    std::unique_ptr<ggml_backend, freed_by<ggml_backend_free>> backend_;
    std::unique_ptr<ggml_context, freed_by<ggml_free>> context_;
#if !defined(KVQ_BENCH_IK_LLAMA)
    std::unique_ptr<ggml_threadpool, freed_by<ggml_threadpool_free>> pool_;
#endif
    std::unique_ptr<ggml_backend_buffer, freed_by<ggml_backend_buffer_free>> memory_;
    ggml_tensor *q_ = nullptr, *k_ = nullptr, *v_ = nullptr, *mask_ = nullptr, *out_ = nullptr;
    ggml_cgraph* graph_ = nullptr;
};

}  // namespace bench
