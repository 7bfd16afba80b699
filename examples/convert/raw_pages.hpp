// Raw pages: rows of tokens in memory of another system, described by JSON.
//
//   {"format": "fp8", "layers": 2, "kv_heads": 8, "head_dim": 128, "tokens": 1000,
//    "block_tokens": 16, "blocks": [7, 0, 3], "tensor_scales": [0.03, 0.05],
//    "strides": {"layer": 8388608, "tensor": 4194304, "block": 16384, "token": 1024, "head": 128}}
//
// Token t is token t % block_tokens of block blocks[t / block_tokens]. Its row of one head begins at the sum
// of index times stride, in bytes; "tensor" is the stride from keys to values, and "at" the place of the
// first row. "scales" has the same strides for formats whose scales lie apart from the numbers (nvfp4, mxfp8,
// mxfp4, mla-584, index-132, mlx-4-g64), "biases" for MLX. "latent": [512, 64] says that there are keys
// alone, whose first 512 channels are values, and the last 64 rotated. Without "blocks" they follow one
// another, without "block_tokens" all tokens are in one. "format": fp16, bf16, fp32, or a layout of rows or
// records (kvq/schemes/row_layout.hpp, record_layout.hpp).
// Contract: read_description() refuses unknown members and impossible numbers, and the first access rows that
// overlap or lie outside the data, in one sentence.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <kvq/cache/layers.hpp>
#include <kvq/core/error.hpp>
#include <kvq/schemes/rotated_records.hpp>
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

/// Rows or records: what a token and head has in each place, and its values.
class row_codec {
public:
    row_codec(const std::string& format, float tensor_scale) {
        for (const kvq::record_layout& l : kvq::record_layouts)
            if (format == l.name) records_.emplace(l);
        if (format == kvq::int4_token_head.name) rotated_.emplace(kvq::int4_token_head);
        if (records() && tensor_scale != 1.0f) refuse(format, " takes no tensor_scales");
        if (records() && records()->in_turns)
            refuse(format, " has scales of four tokens in turns, which a description of rows cannot say");
        if (!records()) rows_.emplace(kvq::row_layout_named(format.c_str()), tensor_scale);
    }
    void check(const kvq::cache_shape& shape, kvq::tensor role) const {
        each([&](const auto& scheme) { scheme.check(shape, role); });
    }
    int row_bytes(int n) const { return records() ? records()->row_bytes(n) : rows_->layout().row_bytes(n); }
    int scale_bytes(int n) const {
        return records() ? records()->bytes_behind(n) : rows_->layout().scales_behind(n);
    }
    int bias_bytes(int n) const { return records() && records()->biased() ? scale_bytes(n) : 0; }

    /// The block of one token, which has its bytes of all places one behind the other.
    std::vector<std::byte> block(int n) const {
        std::size_t bytes = 0;
        each([&](const auto& scheme) { bytes = scheme.block_bytes({kvq::tensor::key, 1, n}); });
        return std::vector<std::byte>(bytes);
    }
    void quantize(int n, const float* values, std::byte* to) const {
        std::vector<float> own(values, values + n);
        each([&](const auto& scheme) { scheme.quantize({kvq::tensor::key, 1, n}, {}, own.data(), to); });
    }
    void dequantize(int n, const std::byte* from, float* values) const {
        each([&](const auto& scheme) { scheme.dequantize({kvq::tensor::key, 1, n}, {}, from, values); });
    }
    /// The first of `n` channels whose scale or bias is NaN or infinite, and how many have it; -1: none.
    std::pair<int, int> wrong_scale(int n, const std::byte* block) const {
        if (rows_) {
            const kvq::row_layout& l = rows_->layout();
            const int of = l.group_of(n);
            for (int g = 0; g < n / of; ++g) {
                const std::byte* const group = block + g * l.group_bytes(of);
                const bool good =
                    l.scale == kvq::row_layout::stored::fp16
                        ? half_is_finite(group) && (!l.minimum || half_is_finite(group + 2))
                    : l.scale == kvq::row_layout::stored::none
                        ? true
                        : byte_is_finite(l.scale == kvq::row_layout::stored::e4m3, block[l.row_bytes(n) + g]);
                if (!good) return {g * of, of};
            }
            return {-1, 0};
        }
        using stored = kvq::record_layout::stored;
        const kvq::record_layout& l = *records();
        const std::byte* const scales = block + (l.behind ? l.row_bytes(n) : l.number_bytes(n));
        for (int g = 0; g < l.groups(n); ++g) {
            const std::byte* const at = scales + g * l.scale_bytes();
            const bool good =
                l.scale == stored::fp32   ? float_is_finite(at)
                : l.scale == stored::bf16 ? bfloat_is_finite(at) && bfloat_is_finite(at + l.bytes_behind(n))
                : l.scale == stored::fp16 ? half_is_finite(at) && half_is_finite(at + l.bytes_behind(n))
                                          : byte_is_finite(l.scale == stored::e4m3, *at);
            if (!good) return {g * l.group_of(n), l.group_of(n)};
        }
        return {-1, 0};
    }

private:
    /// Null: rows.
    const kvq::record_layout* records() const {
        return records_ ? &records_->layout() : rotated_ ? &rotated_->layout() : nullptr;
    }
    template <class F>
    void each(F&& f) const {
        if (rows_) f(*rows_);
        if (records_) f(*records_);
        if (rotated_) f(*rotated_);
    }
    static bool half_is_finite(const std::byte* at) {
        std::uint16_t bits;
        std::memcpy(&bits, at, 2);
        return (bits & 0x7c00u) != 0x7c00u;
    }
    static bool bfloat_is_finite(const std::byte* at) {
        std::uint16_t bits;
        std::memcpy(&bits, at, 2);
        return (bits & 0x7f80u) != 0x7f80u;
    }
    static bool float_is_finite(const std::byte* at) {
        std::uint32_t bits;
        std::memcpy(&bits, at, 4);
        return (bits & 0x7f800000u) != 0x7f800000u;
    }
    static bool byte_is_finite(bool is_e4m3, std::byte code) {
        const auto bits = static_cast<unsigned>(code);
        return is_e4m3 ? (bits & 0x7fu) != 0x7fu : bits != 0xffu;
    }

    std::optional<kvq::token_rows> rows_;
    std::optional<kvq::token_records> records_;
    std::optional<kvq::rotated_records> rotated_;
};

class raw_pages {
public:
    int layers = 0, kv_heads = 0, head_dim = 0, value_dim = 0, tokens = 0;
    std::string format;
    bool latent = false;  ///< keys alone
    int latent_values = 0, rotary_channels = 0;

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
            } else if (name == "biases") {
                p.biases_ = places_of(value, name);
            } else if (name == "latent") {
                if (!value.is_array() || value.size() != 2)
                    refuse("latent must be two numbers, channels that are values and rotated channels");
                p.latent = true;
                p.latent_values = static_cast<int>(integer(value[0], "the values of a latent", 1, most));
                p.rotary_channels = static_cast<int>(integer(value[1], "the rotated channels", 0, most));
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
        if (p.latent && (p.kv_heads != 1 || p.value_dim > 0 || p.latent_values > p.head_dim ||
                         p.rotary_channels >= p.head_dim))
            refuse("a latent of ", p.head_dim,
                   " channels has 1 kv head, no value_dim, and fewer values and rotated "
                   "channels, but the description says ",
                   p.kv_heads, ", ", p.value_dim, ", ", p.latent_values, " and ", p.rotary_channels);
        if (p.value_dim == 0) p.value_dim = p.head_dim;
        p.check();
        return p;
    }

    kvq::cache_shape shape() const { return {layers, kv_heads, head_dim, value_dim}; }
    kvq::layer layer() const {
        return latent ? kvq::latent_attention(head_dim - rotary_channels, rotary_channels, latent_values)
                      : kvq::layer{kv_heads, head_dim, value_dim};
    }
    bool has(kvq::tensor role) const { return role == kvq::tensor::key || !latent; }
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
        if (!codec(at.role)) {
            for (int c = 0; c < n; ++c) to[c] = value_at(data + offset(*rows_, at), c);
        } else {
            std::vector<std::byte> block = codec(at.role)->block(n);
            each_place(at, [&](std::int64_t place, std::size_t first, std::size_t bytes) {
                std::memcpy(block.data() + first, data + place, bytes);
            });
            const auto [wrong, channels] = codec(at.role)->wrong_scale(n, block.data());
            if (wrong >= 0)
                refuse(text(at), ": the scale of channels ", wrong, " to ", wrong + channels - 1,
                       " is not finite");
            codec(at.role)->dequantize(n, block.data(), to);
        }
        return static_cast<std::uint32_t>(
            std::count_if(to, to + n, [](float x) { return !(x - x == 0.0f); }));
    }

    /// Writes a row, and gives back the values that it then stands for.
    void write(const row_place& at, float* values, std::byte* data) const {
        const int n = dim(at.role);
        if (!codec(at.role)) {
            for (int c = 0; c < n; ++c) values[c] = put_value(data + offset(*rows_, at), c, values[c]);
            return;
        }
        std::vector<std::byte> block = codec(at.role)->block(n);
        codec(at.role)->quantize(n, values, block.data());
        each_place(at, [&](std::int64_t place, std::size_t first, std::size_t bytes) {
            std::memcpy(data + place, block.data() + first, bytes);
        });
        codec(at.role)->dequantize(n, block.data(), values);
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

    const std::optional<row_codec>& codec(kvq::tensor role) const {
        return codecs_[static_cast<std::size_t>(role)];
    }
    /// f(place in the data, place in the block of the token, bytes) for rows, scales and biases.
    template <class F>
    void each_place(const row_place& at, F&& f) const {
        const int n = dim(at.role);
        const auto row = static_cast<std::size_t>(codec(at.role) ? codec(at.role)->row_bytes(n)
                                                                 : n * value_bytes()),
                   scales = static_cast<std::size_t>(codec(at.role) ? codec(at.role)->scale_bytes(n) : 0);
        f(offset(*rows_, at), std::size_t{0}, row);
        if (scales_) f(offset(*scales_, at), row, scales);
        if (biases_) f(offset(*biases_, at), row + scales, scales);
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
        bool apart = false, biased = false;
        for (const auto role : {kvq::tensor::key, kvq::tensor::value}) {
            const auto i = static_cast<std::size_t>(role);
            if (!has(role)) continue;
            if (is_values) {
                if (tensor_scales_[i] != 1.0f) refuse(format, " takes no tensor_scales");
                continue;
            }
            codecs_[i].emplace(format, tensor_scales_[i]);
            codecs_[i]->check(shape(), role);
            apart = codecs_[i]->scale_bytes(dim(role)) > 0;
            biased = codecs_[i]->bias_bytes(dim(role)) > 0;
        }
        const auto expect = [&](bool has_them, bool says_them, const char* what) {
            if (has_them != says_them)
                refuse(format, has_them ? " has " : " has no ", what,
                       has_them ? " apart from its numbers: the description must say "
                                : " apart from its numbers, but the description names some",
                       has_them ? what : "");
        };
        expect(apart, scales_.has_value(), "scales");
        expect(biased, biases_.has_value(), "biases");
        // Every place once: nothing is read or written outside of these ranges.
        std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
        const auto rows = std::int64_t{2} * layers * kv_heads * tokens;
        if (rows > std::int64_t{1} << 27) refuse("the description has ", rows, " rows, more than ", 1 << 27);
        for (int layer = 0; layer < layers; ++layer)
            for (const auto role : {kvq::tensor::key, kvq::tensor::value})
                if (has(role))
                    each_row(layer, role, [&](const row_place& at) {
                        each_place(at, [&](std::int64_t place, std::size_t, std::size_t bytes) {
                            ranges.emplace_back(place, bytes);
                        });
                    });
        std::sort(ranges.begin(), ranges.end());
        for (std::size_t i = 0; i + 1 < ranges.size(); ++i)
            if (ranges[i].first + ranges[i].second > ranges[i + 1].first)
                refuse("two rows or scales of the description overlap at byte ", ranges[i + 1].first);
        const std::int64_t end = ranges.back().first + ranges.back().second;
        if (end > most_bytes)
            refuse("the description has pages up to byte ", end, ", more than ", most_bytes);
        bytes_ = static_cast<std::size_t>(end);
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
    std::optional<places> rows_, scales_, biases_;
    std::optional<row_codec> codecs_[2];
    std::size_t bytes_ = 0;
};

}  // namespace convert
