// Raw pages: rows of tokens in memory of another system, described by JSON.
//
//   {"format": "fp8", "layers": 2, "kv_heads": 8, "head_dim": 128, "tokens": 1000,
//    "block_tokens": 16, "blocks": [7, 0, 3], "tensor_scales": [0.03, 0.05],
//    "strides": {"layer": 8388608, "tensor": 4194304, "block": 16384, "token": 1024, "head": 128}}
//
// Token t is token t % block_tokens of block blocks[t / block_tokens]. Its row of one head begins at the sum
// of index times stride, in bytes; "tensor" is the stride from keys to values, and "at" the place of the
// first row. "scales" has the same strides for formats whose scales lie apart from the numbers (nvfp4, mxfp8,
// mxfp4). Without "blocks" they follow one another, without "block_tokens" all tokens are in one. "format":
// fp16, bf16, fp32, or a row layout (kvq/schemes/row_layout.hpp).
// Contract: read_description() refuses unknown members and impossible numbers, and the first access rows that
// overlap or lie outside the data, in one sentence.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <kvq/core/error.hpp>
#include <kvq/schemes/token_rows.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace convert {

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
    std::ostringstream all;
    all << "kvq_convert: ";
    (all << ... << parts);
    throw kvq::argument_error(all.str());
}

/// Where rows or scales lie.
struct places {
    std::int64_t at = 0, layer = 0, tensor = 0, block = 0, token = 0, head = 0;
};

struct row_place {
    int layer;
    kvq::tensor role;
    int token, head;
};
inline std::string text(const row_place& p) {
    return "layer " + std::to_string(p.layer) +
           (p.role == kvq::tensor::key ? ", keys, token " : ", values, token ") + std::to_string(p.token) +
           ", head " + std::to_string(p.head);
}

class raw_pages {
public:
    int layers = 0, kv_heads = 0, head_dim = 0, value_dim = 0, tokens = 0;
    std::string format;

    static raw_pages from(const nlohmann::json& j) {
        raw_pages p;
        if (!j.is_object()) refuse("a description of pages is a JSON object");
        for (const auto& [name, value] : j.items()) {
            if (name == "format") {
                if (!value.is_string()) refuse("format must be a text");
                p.format = value.get<std::string>();
            } else if (name == "strides") {
                p.rows_ = places_of(value, name);
            } else if (name == "scales") {
                p.scales_ = places_of(value, name);
            } else if (name == "blocks") {
                if (!value.is_array()) refuse("blocks must be a list of numbers");
                for (const auto& number : value)
                    p.blocks_.push_back(static_cast<int>(integer(number, "a block", 0, most)));
            } else if (name == "tensor_scales") {
                if (!value.is_array() || value.size() != 2 || !value[0].is_number() || !value[1].is_number())
                    refuse("tensor_scales must be two numbers, of keys and of values");
                for (int i = 0; i < 2; ++i)
                    p.tensor_scales_[i] = value[static_cast<std::size_t>(i)].get<float>();
            } else {
                int* const member = name == "layers"         ? &p.layers
                                    : name == "kv_heads"     ? &p.kv_heads
                                    : name == "head_dim"     ? &p.head_dim
                                    : name == "value_dim"    ? &p.value_dim
                                    : name == "tokens"       ? &p.tokens
                                    : name == "block_tokens" ? &p.block_tokens_
                                                             : nullptr;
                if (member == nullptr) refuse("a description of pages has no member ", name);
                *member = static_cast<int>(integer(value, name, 1, most));
            }
        }
        const std::pair<const char*, bool> said[] = {
            {"format", !p.format.empty()}, {"layers", p.layers > 0}, {"kv_heads", p.kv_heads > 0},
            {"head_dim", p.head_dim > 0},  {"tokens", p.tokens > 0}, {"strides", p.rows_.has_value()}};
        for (const auto& [name, is_there] : said)
            if (!is_there) refuse("a description of pages must say ", name);
        if (p.value_dim == 0) p.value_dim = p.head_dim;
        p.check();
        return p;
    }

    kvq::cache_shape shape() const { return {layers, kv_heads, head_dim, value_dim}; }
    int dim(kvq::tensor role) const { return role == kvq::tensor::key ? head_dim : value_dim; }
    /// Bytes from the first to behind the last one that belongs to a row or a scale.
    std::size_t bytes() const { return bytes_; }

    void check_size(std::size_t size) const {
        if (size < bytes_)
            refuse("the pages of the description end at byte ", bytes_, ", but there are ", size, " bytes");
    }

    /// Refuses scales that are NaN or infinite. Returns how many numbers are.
    std::uint32_t read(const row_place& at, const std::byte* data, float* to) const {
        const int n = dim(at.role);
        const std::byte* const row = data + offset(*rows_, at);
        if (!scheme(at.role)) {
            for (int c = 0; c < n; ++c) to[c] = value_at(row, c);
        } else {
            std::vector<std::byte> block(scheme(at.role)->block_bytes({at.role, 1, n}));
            const kvq::row_layout& l = scheme(at.role)->layout();
            const auto of_row = static_cast<std::size_t>(l.row_bytes(n)),
                       of_scales = static_cast<std::size_t>(l.scales_behind(n));
            std::memcpy(block.data(), row, of_row);
            if (of_scales > 0) std::memcpy(block.data() + of_row, data + offset(*scales_, at), of_scales);
            for (int g = 0; g < n / l.group_of(n); ++g)
                if (!scale_is_finite(l, block.data() + g * l.group_bytes(l.group_of(n)),
                                     block.data() + of_row + g))
                    refuse(text(at), ": the scale of channels ", g * l.channels, " to ",
                           (g + 1) * l.channels - 1, " is not finite");
            scheme(at.role)->dequantize({at.role, 1, n}, {}, block.data(), to);
        }
        return static_cast<std::uint32_t>(
            std::count_if(to, to + n, [](float x) { return !(x - x == 0.0f); }));
    }

    /// Writes a row, and gives back the values that it then stands for.
    void write(const row_place& at, float* values, std::byte* data) const {
        const int n = dim(at.role);
        std::byte* const row = data + offset(*rows_, at);
        if (!scheme(at.role)) {
            for (int c = 0; c < n; ++c) values[c] = put_value(row, c, values[c]);
            return;
        }
        std::vector<std::byte> block(scheme(at.role)->block_bytes({at.role, 1, n}));
        scheme(at.role)->quantize({at.role, 1, n}, {}, values, block.data());
        const auto of_row = static_cast<std::size_t>(scheme(at.role)->layout().row_bytes(n)),
                   of_scales = static_cast<std::size_t>(scheme(at.role)->layout().scales_behind(n));
        std::memcpy(row, block.data(), of_row);
        if (of_scales > 0) std::memcpy(data + offset(*scales_, at), block.data() + of_row, of_scales);
        scheme(at.role)->dequantize({at.role, 1, n}, {}, block.data(), values);
    }

    /// f(row_place) for all rows of a layer and tensor.
    template <class F>
    void each_row(int layer, kvq::tensor role, F&& f) const {
        for (int t = 0; t < tokens; ++t)
            for (int h = 0; h < kv_heads; ++h) f(row_place{layer, role, t, h});
    }

private:
    static constexpr std::int64_t most = std::int64_t{1} << 20, most_bytes = std::int64_t{1} << 36;

    static std::int64_t integer(const nlohmann::json& j, const std::string& name, std::int64_t least,
                                std::int64_t top) {
        if (!j.is_number_integer() ||
            (j.is_number_unsigned() && j.get<std::uint64_t>() > std::uint64_t{1} << 62) ||
            j.get<std::int64_t>() < least || j.get<std::int64_t>() > top)
            refuse(name, " must be a whole number from ", least, " to ", top, ", but is ", j.dump());
        return j.get<std::int64_t>();
    }
    static places places_of(const nlohmann::json& j, const std::string& of) {
        if (!j.is_object()) refuse(of, " must be a JSON object");
        places p;
        for (const auto& [name, value] : j.items()) {
            std::int64_t* const member = name == "at"       ? &p.at
                                         : name == "layer"  ? &p.layer
                                         : name == "tensor" ? &p.tensor
                                         : name == "block"  ? &p.block
                                         : name == "token"  ? &p.token
                                         : name == "head"   ? &p.head
                                                            : nullptr;
            if (member == nullptr) refuse(of, " has no member ", name);
            *member = integer(value, of + "." + name, 0, most_bytes);
        }
        return p;
    }

    const std::optional<kvq::token_rows>& scheme(kvq::tensor role) const {
        return schemes_[static_cast<std::size_t>(role)];
    }
    std::int64_t offset(const places& p, const row_place& at) const {
        const int block = at.token / block_tokens_;
        const auto number = blocks_.empty() ? block : blocks_[static_cast<std::size_t>(block)];
        return p.at + at.layer * p.layer + static_cast<int>(at.role) * p.tensor + number * p.block +
               at.token % block_tokens_ * p.token + at.head * p.head;
    }

    void check() {
        if (block_tokens_ == 0) block_tokens_ = tokens;
        const int needed = (tokens - 1) / block_tokens_ + 1;
        if (!blocks_.empty() && static_cast<int>(blocks_.size()) < needed)
            refuse(tokens, " tokens in blocks of ", block_tokens_, " need ", needed,
                   " blocks, but there are ", blocks_.size());
        const bool is_values = format == "fp16" || format == "bf16" || format == "fp32";
        bool behind = false;
        for (const auto role : {kvq::tensor::key, kvq::tensor::value}) {
            const auto i = static_cast<std::size_t>(role);
            if (is_values) {
                if (tensor_scales_[i] != 1.0f) refuse(format, " takes no tensor_scales");
                continue;
            }
            schemes_[i].emplace(kvq::row_layout_named(format.c_str()), tensor_scales_[i]);
            schemes_[i]->check(shape(), role);
            behind = schemes_[i]->layout().scales_behind(dim(role)) > 0;
        }
        if (behind != scales_.has_value())
            refuse(format, behind ? " has scales apart from its numbers: the description must say scales"
                                  : " has no scales apart from its numbers, but the description says some");
        // Every place once: nothing is read or written outside of these ranges.
        std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
        const auto rows = std::int64_t{2} * layers * kv_heads * tokens;
        if (rows > std::int64_t{1} << 27) refuse("the description has ", rows, " rows, more than ", 1 << 27);
        for (int layer = 0; layer < layers; ++layer)
            for (const auto role : {kvq::tensor::key, kvq::tensor::value}) {
                const int n = dim(role);
                const std::int64_t bytes = is_values ? n * value_bytes() : schemes_[0]->layout().row_bytes(n),
                                   scales = behind ? schemes_[0]->layout().scales_behind(n) : 0;
                each_row(layer, role, [&](const row_place& at) {
                    ranges.emplace_back(offset(*rows_, at), bytes);
                    if (behind) ranges.emplace_back(offset(*scales_, at), scales);
                });
            }
        std::sort(ranges.begin(), ranges.end());
        for (std::size_t i = 0; i + 1 < ranges.size(); ++i)
            if (ranges[i].first + ranges[i].second > ranges[i + 1].first)
                refuse("two rows or scales of the description overlap at byte ", ranges[i + 1].first);
        const std::int64_t end = ranges.back().first + ranges.back().second;
        if (end > most_bytes)
            refuse("the description has pages up to byte ", end, ", more than ", most_bytes);
        bytes_ = static_cast<std::size_t>(end);
    }

    static bool scale_is_finite(const kvq::row_layout& l, const std::byte* group, const std::byte* scale) {
        using stored = kvq::row_layout::stored;
        const auto half_is_finite = [&](int at) {
            std::uint16_t bits;
            std::memcpy(&bits, group + at, 2);
            return (bits & 0x7c00u) != 0x7c00u;
        };
        switch (l.scale) {
            case stored::fp16:
                return half_is_finite(0) && (!l.minimum || half_is_finite(2));
            case stored::e4m3:
                return (static_cast<unsigned>(*scale) & 0x7fu) != 0x7fu;
            case stored::e8m0:
                return static_cast<unsigned>(*scale) != 0xffu;
            default:
                return true;
        }
    }

    int value_bytes() const { return format == "fp32" ? 4 : 2; }
    float value_at(const std::byte* row, int c) const {
        if (format == "fp32") return loaded<float>(row, c);
        const auto bits = loaded<std::uint16_t>(row, c);
        return format == "fp16" ? kvq::float16::to_float(bits) : kvq::bfloat16::to_float(bits);
    }
    float put_value(std::byte* row, int c, float x) const {
        if (format == "fp32") return store(row, c, x), x;
        const std::uint16_t bits = format == "fp16" ? kvq::float16(x).bits : kvq::bfloat16(x).bits;
        store(row, c, bits);
        return value_at(row, c);
    }
    template <class T>
    static T loaded(const std::byte* row, int c) {
        T x;
        std::memcpy(&x, row + static_cast<std::size_t>(c) * sizeof(T), sizeof(T));
        return x;
    }
    template <class T>
    static void store(std::byte* row, int c, T x) {
        std::memcpy(row + static_cast<std::size_t>(c) * sizeof(T), &x, sizeof(T));
    }

    int block_tokens_ = 0;
    std::vector<int> blocks_;
    float tensor_scales_[2] = {1.0f, 1.0f};
    std::optional<places> rows_, scales_;
    std::optional<kvq::token_rows> schemes_[2];
    std::size_t bytes_ = 0;
};

}  // namespace convert
