// Real q, k and v, read from files.
//
// A folder:       L02_k_f16_T2048_H4_D64.bin, L02_q_..., L02_v_...: layer, tensor, type (f16, bf16 or f32),
//                 tokens, heads, channels; raw little-endian [token][head][channel], positions already
//                 applied to q and k. q are the last positions, and its number of heads is a multiple of that
//                 of k.
// A .safetensors file: tensors "L02.k", "L02.q", "L02.v" of shape [token, head, channel], types F16, BF16 or
// F32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <kvq/core/float_formats.hpp>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace bench {

struct tensor_dump {
    int tokens = 0, heads = 0, dim = 0;
    std::vector<float> values;  // [token][head][channel]

    const float* at(int token, int head) const {
        return values.data() + (static_cast<std::size_t>(token) * static_cast<std::size_t>(heads) +
                                static_cast<std::size_t>(head)) *
                                   static_cast<std::size_t>(dim);
    }
};

struct layer_dump {
    std::string source;
    int layer = 0;
    tensor_dump q, k, v;
};

inline tensor_dump read_values(const char* data, std::size_t bytes, std::string type, int tokens, int heads,
                               int dim, const std::string& name) {
    std::transform(type.begin(), type.end(), type.begin(),
                   [](char c) { return static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c); });
    const auto count =
        static_cast<std::size_t>(tokens) * static_cast<std::size_t>(heads) * static_cast<std::size_t>(dim);
    const std::size_t size = type == "f32" ? 4 : 2;
    if (type != "f16" && type != "bf16" && type != "f32")
        throw std::runtime_error(name + ": type " + type + " is not f16, bf16 or f32");
    if (bytes != count * size)
        throw std::runtime_error(name + ": " + std::to_string(bytes) + " bytes, its shape needs " +
                                 std::to_string(count * size));
    tensor_dump t{tokens, heads, dim, std::vector<float>(count)};
    for (std::size_t i = 0; i < count; ++i) {
        std::uint16_t half = 0;
        if (size == 4) {
            std::memcpy(&t.values[i], data + 4 * i, 4);
        } else {
            std::memcpy(&half, data + 2 * i, 2);
            t.values[i] = type == "f16" ? static_cast<float>(kvq::float16::from_bits(half))
                                        : static_cast<float>(kvq::bfloat16::from_bits(half));
        }
    }
    return t;
}

inline std::string read_bytes(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error("cannot read " + path.string());
    return {std::istreambuf_iterator<char>(file), {}};
}

/// The layers of one sequence, in order.
inline std::vector<layer_dump> read_dump(const std::filesystem::path& path) {
    std::map<int, layer_dump> layers;
    const auto add = [&](int layer, char role, tensor_dump tensor) {
        layer_dump& l = layers[layer];
        (role == 'q' ? l.q : role == 'k' ? l.k : l.v) = std::move(tensor);
    };
    if (std::filesystem::is_directory(path)) {
        for (const auto& file : std::filesystem::directory_iterator(path)) {
            const std::string name = file.path().filename().string();
            int layer = 0, tokens = 0, heads = 0, dim = 0;
            char role = 0, type[5] = {};
            if (std::sscanf(name.c_str(), "L%d_%c_%4[a-z0-9]_T%d_H%d_D%d.bin", &layer, &role, type, &tokens,
                            &heads, &dim) != 6 ||
                std::string("qkv").find(role) == std::string::npos)
                continue;
            const std::string bytes = read_bytes(file.path());
            add(layer, role, read_values(bytes.data(), bytes.size(), type, tokens, heads, dim, name));
        }
    } else {
        const std::string bytes = read_bytes(path);
        std::uint64_t length = 0;
        if (bytes.size() >= 8) std::memcpy(&length, bytes.data(), 8);
        if (bytes.size() < 8 || length > bytes.size() - 8)
            throw std::runtime_error(path.string() + " is no safetensors file");
        const std::size_t start = 8 + static_cast<std::size_t>(length);
        const auto header =
            nlohmann::json::parse(bytes.begin() + 8, bytes.begin() + static_cast<std::ptrdiff_t>(start));
        for (const auto& [name, entry] : header.items()) {
            int layer = 0;
            char role = 0;
            if (std::sscanf(name.c_str(), "L%d.%c", &layer, &role) != 2) continue;
            const auto shape = entry.at("shape").get<std::vector<int>>();
            const auto at = entry.at("data_offsets").get<std::vector<std::size_t>>();
            if (shape.size() != 3 || at.size() != 2 || at[0] > at[1] || at[1] > bytes.size() - start)
                throw std::runtime_error(path.string() + ": " + name + " is not [token, head, channel]");
            add(layer, role,
                read_values(bytes.data() + start + at[0], at[1] - at[0], entry.at("dtype").get<std::string>(),
                            shape[0], shape[1], shape[2], name));
        }
    }
    std::vector<layer_dump> list;
    for (auto& [layer, l] : layers) {
        l.layer = layer;
        l.source = path.string();
        const std::string name = path.string() + ", layer " + std::to_string(layer);
        if (l.q.tokens < 1 || l.k.tokens < 1 || l.v.tokens < 1)
            throw std::runtime_error(name + ": q, k or v is missing");
        if (l.k.tokens != l.v.tokens || l.k.heads != l.v.heads || l.k.dim != l.q.dim ||
            l.q.heads % l.k.heads != 0 || l.q.tokens > l.k.tokens)
            throw std::runtime_error(name + ": the shapes of q, k and v do not belong together");
        list.push_back(std::move(l));
    }
    if (list.empty()) throw std::runtime_error(path.string() + " holds no q, k and v (see bench/dump.hpp)");
    return list;
}

}  // namespace bench
