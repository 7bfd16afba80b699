// The formats of the pages of a cache, for keys or for values: the window format and the listed formats. A
// page stores an index.
//
//   index 0       the window (fp32, fp16 or bf16): sinks, recent tokens, pages not quantized yet
//   index i + 1   listed format i
//
// A listed format that equals the window format needs no quantizing: its pages have index 0. Several numbers
// of a list may be one format, as values of mix5 and mix4 are: its pages have the first one's index.
#pragma once

#include <string>
#include <vector>

#include "format_names.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

class format_table {
public:
    format_table(tensor role, const format& window, const format_list& listed);

    tensor role() const noexcept { return role_; }
    /// The window included.
    int size() const noexcept { return static_cast<int>(formats_.size()); }
    int listed() const noexcept { return size() - 1; }
    const format& operator[](int index) const noexcept { return formats_[static_cast<std::size_t>(index)]; }
    /// The format of a page: of the list, or with a plan of its own (page/page.hpp).
    template <class Page>
    const format& of(const Page& p) const noexcept {
        return p.plan ? p.plan : (*this)[p.format];
    }
    const format& window() const noexcept { return formats_.front(); }
    float_type window_type() const noexcept { return window().functions().value_type; }

    /// Index of the format of pages that are quantized to listed format `i`.
    int index_of(int i) const;
    std::size_t block_bytes(int index, const block_shape& shape) const;
    /// Has format `from` two planes, of which the upper one alone is a page of format `to`?
    bool drops_lower(int from, int to) const noexcept;
    /// Number of the first listed format that is the same as f, or listed().
    int find(const format& f) const noexcept;
    void reserve(int more) { formats_.reserve(formats_.size() + static_cast<std::size_t>(more)); }
    void add(format f) { formats_.push_back(std::move(f)); }

    /// Formats with a transform, and the position of format `index` among them.
    std::size_t transforming() const noexcept { return transforming_before(size()); }
    std::size_t transforming_before(int index) const noexcept;

private:
    tensor role_;
    std::vector<format> formats_;
};

/// Raises kvq::error for a format whose blocks do not fit this tensor of such a cache. what: "key format 2".
void check_format(const format& f, const cache_shape& shape, tensor role, int page_tokens,
                  const std::string& what);

/// Raises kvq::error when the formats of a cache, and `added`, have two backends that multiply tiles: a
/// thread has one tile state.
void check_backends(const format_table& keys, const format_table& values, const format& added = {});

const char* name_of(tensor role) noexcept;

}}}  // namespace kvq::detail

#if !defined(KVQ_COMPILED)
#include "format_table-inl.hpp"
#endif
