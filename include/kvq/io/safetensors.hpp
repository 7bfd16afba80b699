// The safetensors container: a list of named tensors in one file. safetensors-inl.hpp takes nlohmann-json.
//
//   8 bytes    length N of the header, little-endian
//   N bytes    JSON object: "__metadata__": {text: text}, and for every tensor
//              name: {"dtype": text, "shape": [sizes], "data_offsets": [begin, end]}; may end in spaces
//   the rest   the tensors, without gaps or overlaps; offsets count from here
//
// Any other form raises kvq::error. So do more than 100000 tensors or texts, and shapes of more than 16
// sizes: parsed, short names take twenty times their bytes. Source: the format's README,
// github.com/huggingface/safetensors.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "byte_stream.hpp"

namespace kvq { inline namespace KVQ_COMMON {

struct safetensors_tensor {
    std::string name;
    std::string dtype;  ///< U8, I32, F16, ...
    std::vector<std::uint64_t> shape;
    std::uint64_t begin = 0, end = 0;  ///< bytes of the data section
};

struct safetensors_header {
    static constexpr std::uint64_t most_bytes = 100'000'000;  ///< longest header, a limit of the format
    static constexpr std::size_t most_names = 100'000;        ///< of tensors and of texts, each
    static constexpr std::size_t most_sizes = 16;             ///< of a shape

    std::vector<safetensors_tensor> tensors;  ///< in the order of their data
    std::map<std::string, std::string> metadata;

    std::uint64_t data_bytes() const noexcept { return tensors.empty() ? 0 : tensors.back().end; }
};

/// Gives the tensors their offsets, one after the other, and returns the first bytes of the file: everything
/// before the data.
std::string write_safetensors_header(safetensors_header& header);

namespace detail {
safetensors_header read_header(exact_source& source);
safetensors_header read_safetensors_header_from(const source_view& read);
}

/// Reads length and header; the rest of the source is the data.
template <byte_source Source>
safetensors_header read_safetensors_header(Source&& read) {
    return detail::read_safetensors_header_from(detail::held_source<std::remove_reference_t<Source>>{read});
}

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "safetensors-inl.hpp"
#endif
