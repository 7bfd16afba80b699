// SPDX-License-Identifier: MIT
// A small random model, its forward pass in double precision, and writers of it in every kind of file.
#pragma once

#include <stored_type.hpp>

#include <kvq/core/float_formats.hpp>
#include <kvq/io/safetensors.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "gguf_writer.hpp"
#include "support/random.hpp"
#include "temporary_folder.hpp"

namespace test {

/// Bits of one value of a block, straight from the layouts in stored_type.hpp: the oracle of the
/// dequantizers.
inline double reference_value(const llama::stored_type& type, const unsigned char* b, int i) {
    const auto half = [&](int at) {
        const int bits = b[at] | b[at + 1] << 8, exponent = bits >> 10 & 31, fraction = bits & 1023;
        const double size = exponent == 0    ? std::ldexp(fraction, -24)
                            : exponent == 31 ? (fraction == 0 ? INFINITY : NAN)
                                             : std::ldexp(1024 + fraction, exponent - 25);
        return bits >> 15 ? -size : size;
    };
    const std::string name = type.name;
    if (name == "F32" || name == "BF16") {
        float value = 0.0f;
        std::memcpy(reinterpret_cast<char*>(&value) + (name == "F32" ? 0 : 2), b, name == "F32" ? 4 : 2);
        return value;
    }
    if (name == "F16") return half(0);
    if (name == "Q8_0") return half(0) * static_cast<signed char>(b[2 + i]);
    const auto nibble = [&](int first) { return i < 16 ? b[first + i] & 15 : b[first + i - 16] >> 4; };
    const auto bit = [&](int first, int index) { return b[first + index / 8] >> (index % 8) & 1; };
    if (name == "Q4_0") return half(0) * (nibble(2) - 8);
    if (name == "Q4_1") return half(0) * nibble(4) + half(2);
    if (name == "Q5_0") return half(0) * (nibble(6) + 16 * bit(2, i) - 16);
    if (name == "Q5_1") return half(0) * (nibble(8) + 16 * bit(4, i)) + half(2);
    if (name == "Q4_K" || name == "Q5_K") {
        const int g = i / 32, codes = name == "Q4_K" ? 16 : 48;
        const int s = g < 4 ? b[4 + g] & 63 : (b[8 + g] & 15) + 16 * (b[g] >> 6);
        const int t = g < 4 ? b[8 + g] & 63 : (b[8 + g] >> 4) + 16 * (b[4 + g] >> 6);
        const int pair = b[codes + 32 * (g / 2) + i % 32];
        const int q = (g % 2 ? pair >> 4 : pair & 15) + (name == "Q5_K" ? 16 * (b[16 + i % 32] >> g & 1) : 0);
        return half(0) * s * q - half(2) * t;
    }
    if (name == "Q2_K" || name == "Q3_K") {
        const int codes = name == "Q2_K" ? 16 : 32, g = i / 16;
        const int q = b[codes + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
        if (name == "Q2_K") return half(80) * (b[g] & 15) * q - half(82) * (b[g] >> 4);
        const int s = (g < 8 ? b[96 + g] & 15 : b[88 + g] >> 4) + 16 * (b[104 + g % 4] >> (g / 4 * 2) & 3);
        return half(108) * (s - 32) * (q + 4 * bit(i % 32, i / 32) - 4);
    }
    if (name == "IQ2_XXS") {
        static const std::uint16_t table[256] = {
#include <data/iq2_xxs_table.inc>
        };
        const int g = i / 32, part = i % 32 / 8, at = i % 8;
        const unsigned char* const group = b + 2 + 8 * g;
        std::uint64_t bits = 0;
        for (int k = 7; k >= 4; --k) bits = bits << 8 | group[k];
        int negative = 0, count = 0;
        for (int k = 0; k < 7; ++k) {
            const int sign = static_cast<int>(bits >> (7 * part + k)) & 1;
            count += sign;
            negative = k == at ? sign : negative;
        }
        if (at == 7) negative = count % 2;
        int digit = table[group[part]];
        for (int k = 0; k < at; ++k) digit /= 3;
        const int size[3] = {8, 25, 43};
        return (negative ? -1 : 1) * half(0) * (0.5 + static_cast<double>(bits >> 28)) / 4 * size[digit % 3];
    }
    // Q6_K
    const int part = i / 128, j = i % 128 / 32, at = i % 32;
    const int low = b[64 * part + 32 * (j % 2) + at], high = b[128 + 32 * part + at];
    const int q = (j < 2 ? low & 15 : low >> 4) + 16 * (high >> (2 * j) & 3);
    return half(208) * static_cast<signed char>(b[192 + i / 16]) * (q - 32);
}

/// Random blocks whose values are of the order of `size`.
inline std::string random_blocks(generator& random, const llama::stored_type& type, std::size_t values,
                                 float size) {
    const auto half = [](std::string& to, std::size_t at, float x) {
        const std::uint16_t bits = kvq::float16(x).bits;
        std::memcpy(to.data() + at, &bits, 2);
    };
    const std::string name = type.name;
    std::string bytes;
    for (std::size_t block = 0; block < values / static_cast<std::size_t>(type.block_values); ++block) {
        std::string one(static_cast<std::size_t>(type.block_bytes), '\0');
        for (char& c : one) c = static_cast<char>(random.between(0, 255));
        const float x = size * random.normal();
        if (name == "F32") {
            std::memcpy(one.data(), &x, 4);
        } else if (name == "BF16") {
            const std::uint16_t bits = kvq::bfloat16(x).bits;
            std::memcpy(one.data(), &bits, 2);
        } else if (name == "F16") {
            half(one, 0, x);
        } else if (name == "Q8_0") {
            half(one, 0, x / 64);
        } else if (name == "Q6_K") {
            half(one, 208, x / 2048);
        } else if (name == "Q2_K") {
            half(one, 80, x / 16);
            half(one, 82, x / 16);
        } else if (name == "Q3_K") {
            half(one, 108, x / 64);
        } else if (name == "IQ2_XXS") {
            half(one, 0, x / 64);
        } else if (name == "Q4_0" || name == "Q5_0") {
            half(one, 0, x / 8);
        } else {
            const bool is_k = name == "Q4_K" || name == "Q5_K";
            half(one, 0, x / (is_k ? 256 : 8));
            half(one, 2, x / (is_k ? 32 : -1));
        }
        bytes += one;
    }
    return bytes;
}

struct tiny_model {
    std::string architecture = "llama";  // as in GGUF files
    int dim = 256, hidden_dim = 256, layers = 2, heads = 4, kv_heads = 2, head_dim = 64, vocab = 40,
        context = 512;
    float epsilon = 1e-5f, theta = 10000.0f;
    bool tied = false, biases = false, head_norms = false, output_norms = false, gelu = false;
    bool half_split = false;  // pairs of the rotation
    float attention_softcap = 0.0f, logit_softcap = 0.0f, embedding_scale = 1.0f;
    std::vector<int> windows;                        // by layer
    std::vector<std::vector<double>> frequencies{};  // by layer; empty: of theta
    double amplitude = 1.0;
    // Qwen3.5: by layer, whether it is recurrent; a gate behind attention; channels of a head that are
    // rotated (0: all).
    std::vector<bool> recurrent{};
    bool attention_gate = false;
    int rotated = 0;
    int key_heads = 2, value_heads = 4, key_channels = 8, value_channels = 12, kernel = 4;

    bool is_recurrent(int layer) const {
        return !recurrent.empty() && recurrent[static_cast<std::size_t>(layer)];
    }
    int mixed_dim() const { return 2 * key_heads * key_channels + value_heads * value_channels; }

    /// By name in GGUF files. A matrix has sizes {inputs, outputs}.
    struct tensor {
        std::vector<std::uint64_t> sizes;
        std::vector<float> values;
        const llama::stored_type* type = &llama::type_f32;  // of `bytes`
        std::string bytes{};
    };
    std::map<std::string, tensor> tensors;

    void fill(generator& random, const llama::stored_type& type = llama::type_f32) {
        const auto add = [&](const std::string& name, std::vector<int> sizes, float size,
                             const llama::stored_type& as) {
            tensor t;
            std::size_t count = 1;
            for (const int n : sizes) {
                t.sizes.push_back(static_cast<std::uint64_t>(n));
                count *= static_cast<std::size_t>(n);
            }
            t.type = &as;
            t.bytes = random_blocks(random, as, count, size);
            const auto* const b = reinterpret_cast<const unsigned char*>(t.bytes.data());
            for (std::size_t i = 0; i < count; ++i) {
                const auto block = static_cast<std::size_t>(as.block_values);
                t.values.push_back(static_cast<float>(
                    reference_value(as, b + i / block * static_cast<std::size_t>(as.block_bytes),
                                    static_cast<int>(i % block))));
            }
            tensors[name] = t;
        };
        const auto matrix = [&](const std::string& name, int inputs, int outputs) {
            add(name + ".weight", {inputs, outputs}, 1.5f / std::sqrt(static_cast<float>(inputs)), type);
        };
        const auto norm = [&](const std::string& name, int size) {
            add(name + ".weight", {size}, 0.2f, llama::type_f32);
            for (float& w : tensors[name + ".weight"].values) w += 1.0f;
            store_f32(tensors[name + ".weight"]);
        };
        tensors.clear();
        add("token_embd.weight", {dim, vocab}, 1.0f, type);
        if (!tied) matrix("output", dim, vocab);
        norm("output_norm", dim);
        for (int layer = 0; layer < layers; ++layer) {
            const std::string of = "blk." + std::to_string(layer) + ".";
            norm(of + "attn_norm", dim);
            norm(of + "ffn_norm", dim);
            matrix(of + "ffn_gate", dim, hidden_dim);
            matrix(of + "ffn_up", dim, hidden_dim);
            matrix(of + "ffn_down", hidden_dim, dim);
            if (is_recurrent(layer)) {
                matrix(of + "delta_mixed", dim, mixed_dim());
                matrix(of + "delta_gate", dim, value_heads * value_channels);
                matrix(of + "delta_beta", dim, value_heads);
                matrix(of + "delta_decay", dim, value_heads);
                add(of + "delta_kernel.weight", {kernel, 1, mixed_dim()}, 0.7f, llama::type_f32);
                add(of + "delta_decay_bias", {value_heads}, 1.0f, llama::type_f32);
                add(of + "delta_log_decay", {value_heads}, 1.0f, llama::type_f32);
                norm(of + "delta_norm", value_channels);
                matrix(of + "delta_output", value_heads * value_channels, dim);
                continue;
            }
            matrix(of + "attn_q", dim, (attention_gate ? 2 : 1) * heads * head_dim);
            matrix(of + "attn_k", dim, kv_heads * head_dim);
            matrix(of + "attn_v", dim, kv_heads * head_dim);
            matrix(of + "attn_output", heads * head_dim, dim);
            if (biases) {
                add(of + "attn_q.bias", {heads * head_dim}, 0.5f, llama::type_f32);
                add(of + "attn_k.bias", {kv_heads * head_dim}, 5.0f, llama::type_f32);
                add(of + "attn_v.bias", {kv_heads * head_dim}, 0.5f, llama::type_f32);
            }
            if (head_norms) {
                norm(of + "attn_q_norm", head_dim);
                norm(of + "attn_k_norm", head_dim);
            }
            if (output_norms) {
                norm(of + "post_attention_norm", dim);
                norm(of + "post_ffw_norm", dim);
            }
        }
    }

    static void store_f32(tensor& t) {
        t.type = &llama::type_f32;
        t.bytes.assign(reinterpret_cast<const char*>(t.values.data()), t.values.size() * 4);
    }
    /// The same values in F32.
    tiny_model in_f32() const {
        tiny_model copy = *this;
        for (auto& [name, t] : copy.tensors) store_f32(t);
        return copy;
    }

    /// Textbook forward pass: logits of every token, [tokens][vocab].
    std::vector<double> logits(const std::vector<int>& tokens) const {
        using vector = std::vector<double>;
        const auto weights = [&](const std::string& name) -> const std::vector<float>& {
            return tensors.at(name).values;
        };
        const auto product = [&](const std::string& name, const vector& x) {
            const std::vector<float>& w = weights(name + ".weight");
            vector y(w.size() / x.size());
            for (std::size_t o = 0; o < y.size(); ++o)
                for (std::size_t i = 0; i < x.size(); ++i)
                    y[o] += x[i] * static_cast<double>(w[o * x.size() + i]);
            if (tensors.count(name + ".bias"))
                for (std::size_t o = 0; o < y.size(); ++o)
                    y[o] += static_cast<double>(weights(name + ".bias")[o]);
            return y;
        };
        // Norms of parts as long as the weights.
        const auto norm = [&](const std::string& name, vector x) {
            const std::vector<float>& w = weights(name + ".weight");
            for (std::size_t first = 0; first < x.size(); first += w.size()) {
                double squares = 0.0;
                for (std::size_t i = 0; i < w.size(); ++i) squares += x[first + i] * x[first + i];
                const double root =
                    std::sqrt(squares / static_cast<double>(w.size()) + static_cast<double>(epsilon));
                for (std::size_t i = 0; i < w.size(); ++i) x[first + i] *= static_cast<double>(w[i]) / root;
            }
            return x;
        };
        const auto rotate = [&](vector& x, std::size_t position, int layer) {
            const auto pairs = static_cast<std::size_t>(rotated > 0 ? rotated : head_dim) / 2;
            for (std::size_t head = 0; head < x.size(); head += static_cast<std::size_t>(head_dim))
                for (std::size_t p = 0; p < pairs; ++p) {
                    const double f = frequencies.empty()
                                         ? std::pow(static_cast<double>(theta),
                                                    -static_cast<double>(p) / static_cast<double>(pairs))
                                         : frequencies[static_cast<std::size_t>(layer)][p];
                    const double a = static_cast<double>(position) * f;
                    double& u = x[head + (half_split ? p : 2 * p)];
                    double& v = x[head + (half_split ? p + pairs : 2 * p + 1)];
                    const double u0 = u, v0 = v;
                    u = amplitude * (u0 * std::cos(a) - v0 * std::sin(a));
                    v = amplitude * (u0 * std::sin(a) + v0 * std::cos(a));
                }
        };
        const auto cap = [](double x, float c) {
            return c > 0.0f ? static_cast<double>(c) * std::tanh(x / static_cast<double>(c)) : x;
        };

        std::vector<vector> states;
        for (const int token : tokens) {
            vector x;
            for (int i = 0; i < dim; ++i)
                x.push_back(static_cast<double>(embedding_scale) *
                            static_cast<double>(
                                weights("token_embd.weight")[static_cast<std::size_t>(token * dim + i)]));
            states.push_back(x);
        }
        for (int layer = 0; layer < layers; ++layer) {
            const std::string of = "blk." + std::to_string(layer) + ".";
            const auto n = static_cast<std::size_t>(head_dim);
            std::vector<vector> q, k, v, gates;
            if (is_recurrent(layer)) add_recurrent(layer, states, product, norm);
            for (std::size_t t = 0; !is_recurrent(layer) && t < states.size(); ++t) {
                const vector x = norm(of + "attn_norm", states[t]);
                q.push_back(product(of + "attn_q", x));
                gates.push_back({});
                if (attention_gate) {
                    const vector both = q[t];
                    q[t].clear();
                    for (std::size_t i = 0; i < both.size(); ++i)
                        (i / n % 2 == 0 ? q[t] : gates[t]).push_back(both[i]);
                }
                k.push_back(product(of + "attn_k", x));
                v.push_back(product(of + "attn_v", x));
                if (head_norms) {
                    q[t] = norm(of + "attn_q_norm", q[t]);
                    k[t] = norm(of + "attn_k_norm", k[t]);
                }
                rotate(q[t], t, layer);
                rotate(k[t], t, layer);
            }
            const int window = windows.empty() ? 0 : windows[static_cast<std::size_t>(layer)];
            for (std::size_t t = 0; !is_recurrent(layer) && t < states.size(); ++t) {
                vector out(q[t].size());
                for (std::size_t head = 0; head < static_cast<std::size_t>(heads); ++head) {
                    const std::size_t kv = head / static_cast<std::size_t>(heads / kv_heads);
                    const std::size_t from = window > 0 && t + 1 > static_cast<std::size_t>(window)
                                                 ? t + 1 - static_cast<std::size_t>(window)
                                                 : 0;
                    vector p;
                    double sum = 0.0, most = -INFINITY;
                    for (std::size_t s = from; s <= t; ++s) {
                        double score = 0.0;
                        for (std::size_t i = 0; i < n; ++i) score += q[t][head * n + i] * k[s][kv * n + i];
                        p.push_back(cap(score / std::sqrt(static_cast<double>(n)), attention_softcap));
                        most = std::max(most, p.back());
                    }
                    for (double& x : p) sum += x = std::exp(x - most);
                    for (std::size_t s = from; s <= t; ++s)
                        for (std::size_t i = 0; i < n; ++i)
                            out[head * n + i] += p[s - from] / sum * v[s][kv * n + i];
                }
                for (std::size_t i = 0; i < gates[t].size(); ++i) out[i] /= 1.0 + std::exp(-gates[t][i]);
                vector y = product(of + "attn_output", out);
                if (output_norms) y = norm(of + "post_attention_norm", y);
                for (std::size_t i = 0; i < y.size(); ++i) states[t][i] += y[i];
            }
            for (std::size_t t = 0; t < states.size(); ++t) {
                const vector x = norm(of + "ffn_norm", states[t]);
                vector g = product(of + "ffn_gate", x), u = product(of + "ffn_up", x);
                for (std::size_t i = 0; i < g.size(); ++i) {
                    const double act = gelu ? 0.5 * g[i] *
                                                  (1.0 + std::tanh(std::sqrt(2.0 / std::acos(-1.0)) *
                                                                   (g[i] + 0.044715 * g[i] * g[i] * g[i])))
                                            : g[i] / (1.0 + std::exp(-g[i]));
                    g[i] = act * u[i];
                }
                vector y = product(of + "ffn_down", g);
                if (output_norms) y = norm(of + "post_ffw_norm", y);
                for (std::size_t i = 0; i < y.size(); ++i) states[t][i] += y[i];
            }
        }
        vector all;
        for (const vector& state : states)
            for (const double x : product(tied ? "token_embd" : "output", norm("output_norm", state)))
                all.push_back(cap(x, logit_softcap));
        return all;
    }

    /// A recurrent layer: adds to the states what it makes of their norms, token by token.
    template <class Product, class Norm>
    void add_recurrent(int layer, std::vector<std::vector<double>>& states, const Product& product,
                       const Norm& norm) const {
        using vector = std::vector<double>;
        const std::string of = "blk." + std::to_string(layer) + ".";
        const auto weights = [&](const std::string& name) { return tensors.at(of + name).values; };
        const auto taps = static_cast<std::size_t>(kernel), channels = static_cast<std::size_t>(mixed_dim()),
                   keys = static_cast<std::size_t>(key_channels),
                   values = static_cast<std::size_t>(value_channels);
        const std::vector<float> conv = weights("delta_kernel.weight"), bias = weights("delta_decay_bias"),
                                 log_decay = weights("delta_log_decay");
        std::vector<vector> inputs;
        std::vector<vector> memory(static_cast<std::size_t>(value_heads), vector(keys * values));
        for (vector& state : states) {
            const vector x = norm(of + "attn_norm", state), z = product(of + "delta_gate", x),
                         b = product(of + "delta_beta", x), a = product(of + "delta_decay", x);
            inputs.push_back(product(of + "delta_mixed", x));
            vector mixed(channels);
            for (std::size_t c = 0; c < channels; ++c) {
                for (std::size_t back = 0; back < std::min(taps, inputs.size()); ++back)
                    mixed[c] += static_cast<double>(conv[c * taps + taps - 1 - back]) *
                                inputs[inputs.size() - 1 - back][c];
                mixed[c] /= 1.0 + std::exp(-mixed[c]);
            }
            vector out;
            for (std::size_t h = 0; h < memory.size(); ++h) {
                const std::size_t of_keys = h / static_cast<std::size_t>(value_heads / key_heads) * keys,
                                  all_keys = static_cast<std::size_t>(key_heads) * keys;
                const auto unit = [&](std::size_t first) {
                    vector u(mixed.begin() + static_cast<std::ptrdiff_t>(first),
                             mixed.begin() + static_cast<std::ptrdiff_t>(first + keys));
                    double squares = 1e-6;
                    for (const double e : u) squares += e * e;
                    for (double& e : u) e /= std::sqrt(squares);
                    return u;
                };
                const vector q = unit(of_keys), k = unit(all_keys + of_keys);
                const double rate = std::log1p(std::exp(a[h] + static_cast<double>(bias[h])));
                const double kept = std::exp(-std::exp(static_cast<double>(log_decay[h])) * rate);
                const double beta = 1.0 / (1.0 + std::exp(-b[h]));
                vector heads_out(values);
                for (std::size_t i = 0; i < values; ++i) {
                    double known = 0.0;
                    for (std::size_t c = 0; c < keys; ++c)
                        known += (memory[h][c * values + i] *= kept) * k[c];
                    const double change = beta * (mixed[2 * all_keys + h * values + i] - known);
                    for (std::size_t c = 0; c < keys; ++c) {
                        memory[h][c * values + i] += k[c] * change;
                        heads_out[i] +=
                            memory[h][c * values + i] * q[c] / std::sqrt(static_cast<double>(keys));
                    }
                }
                heads_out = norm(of + "delta_norm", heads_out);
                for (std::size_t i = 0; i < values; ++i) {
                    const double gate = z[h * values + i];
                    out.push_back(heads_out[i] * gate / (1.0 + std::exp(-gate)));
                }
            }
            const vector y = product(of + "delta_output", out);
            for (std::size_t i = 0; i < y.size(); ++i) state[i] += y[i];
        }
    }

    // ---- files -------------------------------------------------------------------------------------------

    /// The values of a GGUF file; tests may add to them.
    gguf_writer gguf_values() const {
        gguf_writer file;
        const std::string a = architecture + ".";
        file.add("general.architecture", architecture.c_str());
        file.add(a + "block_count", layers);
        file.add(a + "context_length", context);
        file.add(a + "embedding_length", dim);
        file.add(a + "feed_forward_length", hidden_dim);
        file.add(a + "attention.head_count", heads);
        file.add(a + "attention.head_count_kv", kv_heads);
        file.add(a + "attention.layer_norm_rms_epsilon", epsilon);
        file.add(a + "rope.freq_base", theta);
        if (head_dim * heads != dim) {
            file.add(a + "attention.key_length", head_dim);
            file.add(a + "attention.value_length", head_dim);
        }
        if (attention_softcap > 0) file.add(a + "attn_logit_softcapping", attention_softcap);
        if (logit_softcap > 0) file.add(a + "final_logit_softcapping", logit_softcap);
        if (!windows.empty())
            file.add(a + "attention.sliding_window", *std::max_element(windows.begin(), windows.end()));
        return file;
    }
    void add_tensors(gguf_writer& file, const std::function<bool(const std::string&)>& wanted = {}) const {
        for (const auto& [name, t] : tensors)
            if (!wanted || wanted(name)) file.tensor(name, t.sizes, t.type->ggml_number, t.bytes);
    }
    std::string gguf() const {
        gguf_writer file = gguf_values();
        add_tensors(file);
        return file.file();
    }

    std::string llama2c() const {
        std::string file;
        for (const int value : {dim, hidden_dim, layers, heads, kv_heads, tied ? vocab : -vocab, context})
            put(file, value);
        const auto add = [&](const std::string& name) {
            for (const float x : tensors.at(name + ".weight").values) put(file, x);
        };
        add("token_embd");
        for (const char* const kind : {"attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm",
                                       "ffn_gate", "ffn_down", "ffn_up"})
            for (int layer = 0; layer < layers; ++layer) add("blk." + std::to_string(layer) + "." + kind);
        add("output_norm");
        file.append(static_cast<std::size_t>(context * head_dim) * 4, '\0');  // rotations, unused
        if (!tied) add("output");
        return file;
    }

    /// config.json; `more`: members to add, each with a comma in front.
    std::string config(const std::string& more = "") const {
        const auto number = [](auto x) {
            char text[40];
            std::snprintf(text, sizeof text, "%.9g", static_cast<double>(x));
            return std::string(text);
        };
        std::string json =
            "{\"model_type\": \"" + architecture + "\", \"hidden_size\": " + number(dim) +
            ", \"intermediate_size\": " + number(hidden_dim) + ", \"num_hidden_layers\": " + number(layers) +
            ", \"num_attention_heads\": " + number(heads) + ", \"num_key_value_heads\": " + number(kv_heads) +
            ", \"head_dim\": " + number(head_dim) + ", \"vocab_size\": " + number(vocab) +
            ", \"max_position_embeddings\": " + number(context) + ", \"rms_norm_eps\": " + number(epsilon) +
            ", \"rope_theta\": " + number(theta) + ", \"tie_word_embeddings\": " + (tied ? "true" : "false");
        if (gelu) json += ", \"hidden_activation\": \"gelu_pytorch_tanh\"";
        if (attention_softcap > 0) json += ", \"attn_logit_softcapping\": " + number(attention_softcap);
        if (logit_softcap > 0) json += ", \"final_logit_softcapping\": " + number(logit_softcap);
        if (!windows.empty())
            json += ", \"sliding_window\": " + number(*std::max_element(windows.begin(), windows.end()));
        if (!recurrent.empty()) {
            json += ", \"linear_num_key_heads\": " + number(key_heads) +
                    ", \"linear_num_value_heads\": " + number(value_heads) +
                    ", \"linear_key_head_dim\": " + number(key_channels) +
                    ", \"linear_value_head_dim\": " + number(value_channels) +
                    ", \"linear_conv_kernel_dim\": " + number(kernel) +
                    ", \"rope_parameters\": {\"rope_theta\": " + number(theta) +
                    ", \"partial_rotary_factor\": " + number(static_cast<double>(rotated) / head_dim) +
                    "}, \"layer_types\": [";
            for (int layer = 0; layer < layers; ++layer)
                json += std::string(layer > 0 ? ", " : "") +
                        (is_recurrent(layer) ? "\"linear_attention\"" : "\"full_attention\"");
            json += "]";
        }
        return json + more + "}";
    }
    /// The name of a tensor in Hugging Face's files.
    std::string folder_name(const std::string& name) const {
        const std::map<std::string, std::string> names = {
            {"attn_norm", "input_layernorm"},
            {"attn_q", "self_attn.q_proj"},
            {"attn_k", "self_attn.k_proj"},
            {"attn_v", "self_attn.v_proj"},
            {"attn_output", "self_attn.o_proj"},
            {"attn_q_norm", "self_attn.q_norm"},
            {"attn_k_norm", "self_attn.k_norm"},
            {"ffn_norm", output_norms ? "pre_feedforward_layernorm" : "post_attention_layernorm"},
            {"post_attention_norm", "post_attention_layernorm"},
            {"post_ffw_norm", "post_feedforward_layernorm"},
            {"ffn_gate", "mlp.gate_proj"},
            {"ffn_up", "mlp.up_proj"},
            {"ffn_down", "mlp.down_proj"},
            {"delta_mixed", "linear_attn.in_proj_qkv"},
            {"delta_gate", "linear_attn.in_proj_z"},
            {"delta_beta", "linear_attn.in_proj_b"},
            {"delta_decay", "linear_attn.in_proj_a"},
            {"delta_kernel", "linear_attn.conv1d"},
            {"delta_decay_bias", "linear_attn.dt_bias"},
            {"delta_log_decay", "linear_attn.A_log"},
            {"delta_norm", "linear_attn.norm"},
            {"delta_output", "linear_attn.out_proj"}};
        if (name == "token_embd.weight") return "model.embed_tokens.weight";
        if (name == "output_norm.weight") return "model.norm.weight";
        if (name == "output.weight") return "lm_head.weight";
        const std::size_t second = name.find('.', 4), third = name.find('.', second + 1);
        return "model.layers." + name.substr(4, second - 4) + "." +
               names.at(name.substr(second + 1, third - second - 1)) +
               (third == std::string::npos ? "" : name.substr(third));
    }
    /// A safetensors file of some of the tensors. norm_offset: subtracted from the weights of norms.
    std::string safetensors(float norm_offset = 0.0f,
                            const std::function<bool(const std::string&)>& wanted = {}) const {
        kvq::safetensors_header header;
        std::string data;
        for (const auto& [name, t] : tensors) {
            if (wanted && !wanted(name)) continue;
            std::string bytes = t.bytes;
            if (norm_offset != 0.0f && name.ends_with("norm.weight") &&
                !name.ends_with("delta_norm.weight")) {
                std::vector<float> values = t.values;
                for (float& x : values) x -= norm_offset;
                bytes.assign(reinterpret_cast<const char*>(values.data()), values.size() * 4);
            }
            header.tensors.push_back(
                {folder_name(name), t.type->name, {t.sizes.rbegin(), t.sizes.rend()}, 0, 0});
            data += bytes;
        }
        return kvq::write_safetensors_header(header) + data;
    }
    void write_folder(const temporary_folder& folder, float norm_offset = 0.0f,
                      const std::string& more = "") const {
        write_file(folder / "config.json", config(more));
        write_file(folder / "model.safetensors", safetensors(norm_offset));
    }
};

}  // namespace test
