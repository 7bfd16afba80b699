// Definitions of format.hpp.
#pragma once

#include "format.hpp"

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC format_list::format_list(format only) { formats_.push_back(std::move(only)); }

KVQ_FUNC format_list::format_list(std::initializer_list<format> formats) : formats_(formats) {}

KVQ_FUNC format_list::format_list(std::vector<format> formats) : formats_(std::move(formats)) {}

KVQ_FUNC int format_list::size() const noexcept { return static_cast<int>(formats_.size()); }

KVQ_FUNC bool format_list::empty() const noexcept { return formats_.empty(); }

KVQ_FUNC const format& format_list::operator[](int i) const { return formats_[static_cast<std::size_t>(i)]; }

KVQ_FUNC void format_list::push_back(format f) { formats_.push_back(std::move(f)); }

}}
