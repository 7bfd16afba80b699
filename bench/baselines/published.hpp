// Published methods under their own names, to compare the library with. Each is a pair of schemes, for keys
// and for values.
// Contract: they follow the published arithmetic; the layout of bits in memory is kvq's own.
//
// | pair                   | what                                                                | source                   |
// |------------------------|---------------------------------------------------------------------|--------------------------|
// | turboquant<K, V>       | Hadamard, Lloyd-Max codes, norm in fp16, renormalized               | arXiv 2504.19874, vLLM   |
// | turboquant_plain<K, V> | the same without renormalizing                                      | arXiv 2504.19874         |
// | quarot<B>              | Hadamard, min-max per token and head, fp16 scale and minimum        | arXiv 2404.00456         |
// | vllm_int4              | Hadamard, min-max per token and head, integer zero inside the scale | vLLM int4_per_token_head |
// | exllamav3<B>           | Hadamard over 32 channels, midpoint grid, fp16 scale per 32         | exllamav3                |
// | nf4_groups<G>          | NormalFloat table, fp16 largest magnitude per G channels            | arXiv 2305.14314         |
// | ggml_iq4_nl, ggml_q4_0 | 32 channels under one fp16 scale                                    | ggml                     |
// | ggml_q8_0              | the same, 8 bits, symmetric                                         | ggml                     |
// | fp8_per_token_head     | E4M3 under one fp32 scale per token and head                        | vLLM                     |
// | kvarn<K, V>            | kvarn.hpp                                                           | arXiv 2606.03458         |
// | rotating<Pair>         | Hadamard without signs before a pair, as for quantized caches       | llama.cpp                |
#pragma once

#include <kvq/schemes/affine.hpp>
#include <kvq/schemes/transformed.hpp>

#include "codebook.hpp"
#include "kvarn.hpp"
#include "published_codebooks.hpp"

namespace baselines {

/// The same scheme for keys and values.
template <class S>
struct both {
    using keys = S;
    using values = S;
};

template <int KeyBits, int ValueBits = KeyBits, bool Renormalized = true>
struct turboquant {
    using keys =
        kvq::hadamard<codebook_scheme<by_norm<normal_levels<KeyBits>, Renormalized>, kvq::per_token<>>>;
    using values =
        kvq::hadamard<codebook_scheme<by_norm<normal_levels<ValueBits>, Renormalized>, kvq::per_token<>>>;
};
template <int KeyBits, int ValueBits = KeyBits>
using turboquant_plain = turboquant<KeyBits, ValueBits, false>;

template <int Bits>
using quarot = both<kvq::hadamard<kvq::affine<Bits, kvq::per_token<>>>>;

using vllm_int4 = both<kvq::hadamard<codebook_scheme<integer_zero<4>, kvq::per_token<>, kvq::params<float>>>>;

template <int Bits>
using exllamav3 = both<kvq::hadamard<codebook_scheme<midpoint<Bits>, kvq::per_token<32>>, 32, 0>>;

template <int Group = 64>
using nf4_groups = both<codebook_scheme<nf4, kvq::per_token<Group>>>;

using ggml_iq4_nl = both<codebook_scheme<iq4_nl, kvq::per_token<32>>>;
using ggml_q4_0 = both<codebook_scheme<q4_0, kvq::per_token<32>>>;
using ggml_q8_0 = both<kvq::scheme<kvq::bits<8>, kvq::symmetric, kvq::per_token<32>>>;

using fp8_per_token_head = both<codebook_scheme<fp8_e4m3, kvq::per_token<>, kvq::params<float>>>;

/// A pair behind a Hadamard transform without signs.
template <class Pair>
struct rotating {
    using keys = kvq::hadamard<typename Pair::keys, 0, 0>;
    using values = kvq::hadamard<typename Pair::values, 0, 0>;
};

}  // namespace baselines
