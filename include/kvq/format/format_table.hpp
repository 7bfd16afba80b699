// The formats of the pages of a cache, for keys or for values: the window format and the listed formats. A page stores an index.
//
//   index 0       the window (fp32, fp16 or bf16): sinks, recent tokens, pages not quantized yet
//   index i + 1   listed format i
//
// A listed format that equals the window format needs no quantizing: its pages have index 0.
#pragma once

#include "check_products.hpp"
#include "format_names.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

class format_table {
public:
    format_table(tensor role, const format& window, const format_list& listed) : role_(role) {
        formats_.push_back(window);
        for (const format& f : listed) formats_.push_back(f);
    }

    tensor role() const noexcept { return role_; }
    /// The window included.
    int size() const noexcept { return static_cast<int>(formats_.size()); }
    int listed() const noexcept { return size() - 1; }
    const format& operator[](int index) const noexcept { return formats_[static_cast<std::size_t>(index)]; }
    const format& window() const noexcept { return formats_.front(); }
    float_type window_type() const noexcept { return window().functions().value_type; }

    /// Index of the format of pages that are quantized to listed format `i`.
    int index_of(int i) const {
        const format& f = (*this)[i + 1];
        return f.holds_values() && f.functions().value_type == window_type() ? 0 : i + 1;
    }
    std::size_t block_bytes(int index, const block_shape& shape) const {
        return (*this)[index].block_bytes(shape);
    }
    /// Number of the first listed format that is the same as f, or listed().
    int find(const format& f) const noexcept {
        int i = 0;
        while (i < listed() && !(*this)[i + 1].same_as(f)) ++i;
        return i;
    }
    void add(format f) { formats_.push_back(std::move(f)); }

    /// Formats with a transform, and the position of format `index` among them.
    std::size_t transforming() const noexcept { return transforming_before(size()); }
    std::size_t transforming_before(int index) const noexcept {
        std::size_t n = 0;
        for (int i = 0; i < index; ++i) n += (*this)[i].functions().transforms;
        return n;
    }

private:
    tensor role_;
    std::vector<format> formats_;
};

/// Raises kvq::error for a format whose blocks do not fit this tensor of such a cache. what: "key format 2".
inline void check_format(const format& f, const cache_shape& shape, tensor role, int page_tokens,
                         const std::string& what) {
    expect(static_cast<bool>(f), what, " is empty");
    expect(f.supports(role), what, ", ", format_text(f), ", holds ", role == tensor::key ? "values" : "keys",
           " only");
    f.functions().check(f.scheme(), shape, role);
    const std::size_t bytes = f.block_bytes({role, page_tokens, shape.dim(role)});
    expect(bytes % 16 == 0, "blocks of ", what, " have ", bytes, " bytes, which is no multiple of 16");
    check_products(f, {role, page_tokens, shape.dim(role)}, what);
}

/// Raises kvq::error when the formats of a cache, and `added`, have two backends that multiply tiles: a thread has one tile state.
inline void check_backends(const format_table& keys, const format_table& values, const format& added = {}) {
    const backend_functions* tiles = nullptr;
    const auto look = [&](const format& f) {
        const backend_functions* const backend = f.functions().backend;
        if (backend->open_tiles == nullptr) return;
        expect(tiles == nullptr || tiles == backend, "formats of the backends ", tiles ? tiles->name : "",
               " and ", backend->name, " cannot be in one cache: both multiply tiles");
        tiles = backend;
    };
    for (const format_table* table : {&keys, &values})
        for (int i = 0; i < table->size(); ++i) look((*table)[i]);
    if (added) look(added);
}

inline const char* name_of(tensor role) noexcept { return role == tensor::key ? "key" : "value"; }

}}}  // namespace kvq::detail
