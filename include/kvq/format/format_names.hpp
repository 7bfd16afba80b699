// Names of formats in messages: the one that was asked for, with the scheme behind it in brackets if it
// differs.
//
//   format_text(find_format("std4", tensor::key))              "std4 (channel4-g64-coded)"
//   format_text(make_format<affine<4>>())                      "affine4-token-g64-fp16": made without a name
//   scheme_text("channel4-coded-dual", tensor::value)          "std4, std4-h, mix4 or mix5 (...)"
//
// scheme_text is for pages from elsewhere, whose identity is the scheme's (io/scheme_identity.hpp). It lists
// the built-in names that the scheme has. tests/unit/formats.cpp compares them with the presets.
// Contract: text alone; needs neither the built-in formats nor their schemes.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "format.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

/// The names by which find_format gives formats of this scheme.
std::vector<std::string> built_in_names(std::string_view scheme, tensor role);

/// NAME of "NAME-bounds"; else empty.
std::string_view name_before_bounds(std::string_view name) noexcept;

/// A name that ends in "-fp16x64", "-int8x64" or "-ref8x64", such as "std4-fp16x64".
struct last_channels_name {
    std::string_view inner;  ///< what stands before the ending; empty: the name has none
    std::string_view last;   ///< "fp16"
    int channels = 0;
};
last_channels_name last_channels_of(std::string_view name) noexcept;

/// The name by which a name has last channels of this scheme; empty: there are none.
const char* last_channels_name_of(std::string_view scheme) noexcept;

}  // namespace detail

/// The name that was asked for, and the scheme's in brackets if it is another one.
[[nodiscard]] std::string format_text(const format& f);

/// The same for a scheme that another cache has, with every built-in name that it has.
[[nodiscard]] std::string scheme_text(const std::string& scheme, tensor role);

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "format_names-inl.hpp"
#endif
