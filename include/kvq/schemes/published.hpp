// Published methods under their own names, made of the library's parts. Each is a pair: pass it where a cache takes one.
//
// | pair                    | what                                                                  | source                    |
// |-------------------------|-----------------------------------------------------------------------|---------------------------|
// | turboquant<K, V>        | Hadamard, Lloyd-Max codes, norm in fp16, renormalised                 | arXiv 2504.19874, vLLM    |
// | turboquant_plain<K, V>  | the same without renormalising                                        | arXiv 2504.19874          |
// | quarot<B>               | Hadamard, min-max per token and head, fp16 scale and minimum          | arXiv 2404.00456          |
// | vllm_int4               | Hadamard, min-max per token and head, integer zero inside the scale   | vLLM int4_per_token_head  |
// | exllamav3<B>            | Hadamard over 32 channels, midpoint grid, fp16 scale per 32           | exllamav3                 |
// | nf4_groups<G>           | NormalFloat table, fp16 largest magnitude per G channels              | arXiv 2305.14314          |
// | ggml_iq4_nl, ggml_q4_0  | 32 channels under one fp16 scale                                      | ggml                      |
// | ggml_q8_0               | the same, 8 bits, symmetric                                           | ggml                      |
// | fp8_per_token_head      | E4M3 under one fp32 scale per token and head                          | vLLM                      |
// | kvarn<K, V>             | schemes/kvarn.hpp                                                     | arXiv 2606.03458          |
// | kivi<B, G>              | schemes/kivi.hpp                                                      | arXiv 2402.02750          |
//
// They follow the published arithmetic; where bits lie in memory is kvq's own. rotating<Pair> puts a Hadamard transform in
// front of a pair that has none (llama.cpp does so for its quantized caches).
#pragma once

#include "../quant/published_codebooks.hpp"
#include "codebook.hpp"
#include "kivi.hpp"
#include "kvarn.hpp"

namespace kvq::inline KVQ_TAGGED {

namespace detail {
template <class S>
struct both {
    using keys = S;
    using values = S;
};
}  // namespace detail

template <int KeyBits, int ValueBits = KeyBits, bool Renormalized = true>
struct turboquant {
    using keys = hadamard<codebook_scheme<by_norm<normal_levels<KeyBits>, Renormalized>, per_token<>>>;
    using values = hadamard<codebook_scheme<by_norm<normal_levels<ValueBits>, Renormalized>, per_token<>>>;
};
template <int KeyBits, int ValueBits = KeyBits>
using turboquant_plain = turboquant<KeyBits, ValueBits, false>;

template <int Bits>
using quarot = detail::both<hadamard<affine<Bits, per_token<>>>>;

using vllm_int4 = detail::both<hadamard<codebook_scheme<integer_zero<4>, per_token<>, params<float>>>>;

template <int Bits>
using exllamav3 = detail::both<hadamard<codebook_scheme<midpoint<Bits>, per_token<32>>, 32, 0>>;

template <int Group = 64>
using nf4_groups = detail::both<codebook_scheme<nf4, per_token<Group>>>;

using ggml_iq4_nl = detail::both<codebook_scheme<iq4_nl, per_token<32>>>;
using ggml_q4_0 = detail::both<codebook_scheme<q4_0, per_token<32>>>;
using ggml_q8_0 = detail::both<scheme<bits<8>, symmetric, per_token<32>>>;

using fp8_per_token_head = detail::both<codebook_scheme<fp8_e4m3, per_token<>, params<float>>>;

/// A pair behind a Hadamard transform without signs.
template <class Pair>
struct rotating {
    using keys = hadamard<typename Pair::keys, 0, 0>;
    using values = hadamard<typename Pair::values, 0, 0>;
};

}  // namespace kvq::inline KVQ_TAGGED
