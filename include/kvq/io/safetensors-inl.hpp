// Definitions of safetensors.hpp. The only header that includes nlohmann-json.
#pragma once

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>

#include "../core/error.hpp"
#include "safetensors.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

/// Bytes of an element, 0 for an unknown dtype.
KVQ_FUNC std::uint64_t safetensors_element_bytes(std::string_view dtype) noexcept {
    for (const auto* name : {"BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"})
        if (dtype == name) return 1;
    for (const auto* name : {"I16", "U16", "F16", "BF16"})
        if (dtype == name) return 2;
    for (const auto* name : {"I32", "U32", "F32"})
        if (dtype == name) return 4;
    for (const auto* name : {"I64", "U64", "F64"})
        if (dtype == name) return 8;
    return 0;
}

KVQ_FUNC std::uint64_t safetensors_bytes(const safetensors_tensor& t) {
    std::uint64_t bytes = safetensors_element_bytes(t.dtype);
    expect(bytes > 0, "tensor ", t.name, " has the unknown dtype ", t.dtype);
    for (const std::uint64_t size : t.shape) {
        expect(size == 0 || bytes <= (std::numeric_limits<std::uint64_t>::max)() / size, "tensor ", t.name,
               " has more elements than there are numbers");
        bytes *= size;
    }
    return bytes;
}

/// Sorts the tensors by their data and checks that they fill it without gaps and overlaps.
KVQ_FUNC void check_safetensors(safetensors_header& header) {
    auto& tensors = header.tensors;
    for (const safetensors_tensor& t : tensors) {
        expect(t.begin <= t.end, "tensor ", t.name, " ends at byte ", t.end, " before it begins at ",
               t.begin);
        const std::uint64_t bytes = safetensors_bytes(t);
        expect(bytes == t.end - t.begin, "tensor ", t.name, " has a shape of ", bytes, " bytes but data of ",
               t.end - t.begin);
    }
    std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
        return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
    });
    std::uint64_t expected = 0;
    for (const safetensors_tensor& t : tensors) {
        expect(t.begin == expected, "tensor ", t.name, " begins at byte ", t.begin,
               " of the data, but the one before ends at ", expected);
        expected = t.end;
    }
}

/// Builds the header during parsing and accepts only the documented form: no other nesting, no
/// other types, no name twice.
class safetensors_parser : public nlohmann::json_sax<nlohmann::json> {
public:
    explicit safetensors_parser(safetensors_header& header) : header_(header) {}

    bool null() override { return unexpected("null"); }
    bool boolean(bool) override { return unexpected("a boolean"); }
    bool number_integer(number_integer_t) override { return unexpected("a negative number"); }
    bool number_float(number_float_t, const string_t&) override {
        return unexpected("a fraction or too large a number");
    }
    bool binary(binary_t&) override { return unexpected("binary data"); }

    bool number_unsigned(number_unsigned_t number) override {
        if (!numbers_) return unexpected("a number");
        expect(numbers_->size() < safetensors_header::most_sizes, "tensor ", tensor().name,
               " has a list of more than ", safetensors_header::most_sizes, " numbers");
        numbers_->push_back(number);
        return true;
    }
    bool string(string_t& text) override {
        if (depth_ == 2 && in_metadata_ && !numbers_) {
            expect(header_.metadata.size() < safetensors_header::most_names,
                   "the header of a safetensors file has more than ", safetensors_header::most_names,
                   " texts");
            expect(header_.metadata.emplace(key_, text).second, "metadata ", key_, " is duplicated");
        } else if (depth_ == 2 && key_ == "dtype" && !numbers_)
            tensor().dtype = text;
        else
            return unexpected("text");
        return true;
    }
    bool start_object(std::size_t) override {
        if (depth_ == 2 || numbers_) return unexpected("an object");
        ++depth_;
        if (depth_ == 2) {
            in_metadata_ = key_ == "__metadata__";
            expect(header_.tensors.size() < safetensors_header::most_names,
                   "the header of a safetensors file has more than ", safetensors_header::most_names,
                   " tensors");
            if (!in_metadata_) header_.tensors.push_back({key_, {}, {}, 0, 0});
            seen_.clear();
            offsets_.clear();
        }
        return true;
    }
    bool key(string_t& name) override {
        key_ = name;
        if (depth_ == 1)
            expect(names_.emplace(name, true).second, "tensor ", name, " is duplicated");
        else if (in_metadata_)
            expect(!header_.metadata.count(name), "metadata ", name, " is duplicated");
        else {
            expect(name == "dtype" || name == "shape" || name == "data_offsets", "tensor ", tensor().name,
                   " must have dtype, shape and data_offsets and nothing else, but has ", name);
            expect(seen_.emplace(name, true).second, name, " is duplicated");
        }
        return true;
    }
    bool end_object() override {
        if (depth_ == 2 && !in_metadata_) {
            expect(seen_.size() == 3 && seen_.count("dtype") && seen_.count("shape") &&
                       seen_.count("data_offsets"),
                   "tensor ", tensor().name, " must have dtype, shape and data_offsets and nothing else");
            expect(offsets_.size() == 2, "tensor ", tensor().name, " has ", offsets_.size(),
                   " data offsets instead of 2");
            tensor().begin = offsets_[0];
            tensor().end = offsets_[1];
        }
        --depth_;
        return true;
    }
    bool start_array(std::size_t) override {
        const bool known = depth_ == 2 && !in_metadata_ && !numbers_;
        if (known && key_ == "shape")
            numbers_ = &tensor().shape;
        else if (known && key_ == "data_offsets")
            numbers_ = &offsets_;
        else
            return unexpected("a list");
        return true;
    }
    bool end_array() override {
        numbers_ = nullptr;
        return true;
    }
    bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&) override {
        expect(false, "the header of a safetensors file is not JSON at its byte ", position);
        return false;
    }

private:
    safetensors_tensor& tensor() { return header_.tensors.back(); }
    bool unexpected(const char* what) const {
        expect(false, "the header of a safetensors file has ", what, " where none belongs",
               key_.empty() ? "" : ", behind ", key_);
        return false;
    }

    safetensors_header& header_;
    int depth_ = 0;
    bool in_metadata_ = false;
    std::string key_;
    std::map<std::string, bool> names_, seen_;
    std::vector<std::uint64_t> offsets_;
    std::vector<std::uint64_t>* numbers_ = nullptr;
};

/// Is the text UTF-8, as JSON requires?
KVQ_FUNC bool is_utf8(const std::string& text) {
    using json = nlohmann::json;
    const std::string quoted = json(text).dump(-1, ' ', false, json::error_handler_t::ignore);
    return json::parse(quoted).get_ref<const std::string&>() == text;
}

}  // namespace detail

KVQ_FUNC std::string write_safetensors_header(safetensors_header& header) {
    for (const std::size_t n : {header.tensors.size(), header.metadata.size()})
        detail::expect(n <= safetensors_header::most_names, "a header of ", n,
                       " tensors or texts, the limit is ", safetensors_header::most_names);
    nlohmann::ordered_json json;
    if (!header.metadata.empty()) {
        auto& metadata = json["__metadata__"];
        for (const auto& [name, text] : header.metadata) {
            detail::expect(detail::is_utf8(name) && detail::is_utf8(text), "metadata ", name,
                           " is not UTF-8");
            metadata[name] = text;
        }
    }
    std::uint64_t offset = 0;
    for (safetensors_tensor& t : header.tensors) {
        detail::expect(t.shape.size() <= safetensors_header::most_sizes, "tensor ", t.name, " has ",
                       t.shape.size(), " sizes, the limit is ", safetensors_header::most_sizes);
        detail::expect(detail::is_utf8(t.name) && !json.contains(t.name), "tensor ", t.name,
                       " has a name that is duplicated or not UTF-8");
        t.begin = offset;
        t.end = offset += detail::safetensors_bytes(t);
        json[t.name] = {{"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {t.begin, t.end}}};
    }
    std::string text = json.is_null() ? "{}" : json.dump();
    text.resize(detail::round_up(text.size(), std::size_t{8}), ' ');
    detail::expect(text.size() <= safetensors_header::most_bytes, "a header of ", text.size(),
                   " bytes is more than the ", safetensors_header::most_bytes, " of the format");
    std::string bytes(8, '\0');
    detail::store_as(bytes.data(), static_cast<std::uint64_t>(text.size()));
    return bytes + text;
}

namespace detail {

/// Reads length and header; the rest of the source is the data.
KVQ_FUNC safetensors_header read_header(exact_source& source) {
    std::byte length_bytes[8];
    source.read(length_bytes, 8, "the length of the header");
    const auto length = detail::load_as<std::uint64_t>(length_bytes);
    detail::expect(length >= 2 && length <= safetensors_header::most_bytes,
                   "not a safetensors file: its header would have ", length, " bytes, not 2 to ",
                   safetensors_header::most_bytes);
    std::string text;
    source.append(text, 1, "the header");
    detail::expect(text[0] == '{', "not a safetensors file: its header does not begin with {");
    source.append(text, length - 1, "the header");
    safetensors_header header;
    detail::safetensors_parser parser(header);
    nlohmann::json::sax_parse(text, &parser);
    detail::check_safetensors(header);
    return header;
}

KVQ_FUNC safetensors_header read_safetensors_header_from(const source_view& read) {
    exact_source source(read);
    return read_header(source);
}

}  // namespace detail
}}  // namespace kvq
