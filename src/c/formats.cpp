// Formats of the C interface: by name, described, and on pages in memory of the caller.
#include <cstring>
#include <kvq/core/float_environment.hpp>
#include <kvq/format/find_format.hpp>
#include <kvq/schemes/presets.hpp>

#include "objects.hpp"

namespace kvq::c {

format found_format(const std::string& name, tensor role, const calibration* statistics) {
    return statistics ? find_format(name, role, *statistics) : find_format(name, role);
}

namespace {

const builtin_format* listed_formats(std::int32_t& count) {
    std::size_t n = 0;
    const builtin_format* const list = builtin_formats(&n);
    count = static_cast<std::int32_t>(n);
    return list;
}

bool is_preset(const char* format_name) {
    bool found = false;
    for_each_preset(
        [&]<class Preset>(Preset) { found = found || std::strcmp(Preset::name, format_name) == 0; });
    return found;
}

/// The format of the values of a dtype.
const format& values_format(float_type type) {
    static const format of[] = {find_format("fp32", tensor::key), find_format("fp16", tensor::key),
                                find_format("bf16", tensor::key)};
    return of[static_cast<std::size_t>(type)];
}

/// A page in memory of the caller, checked. has_bytes: it is read or written, not only described.
struct caller_page {
    const format& f;
    block_shape block;
    int heads, layer, first_head;
    std::size_t block_bytes;

    caller_page(const kvq_format* handle, const kvq_page_shape* given, bool has_bytes = true)
        : f(get(handle, "format").format) {
        const kvq_page_shape& s = place(given, "shape");
        const tensor role = role_of(s.role);
        expect(s.tokens >= 1 && s.tokens <= 65536, KVQ_ERROR_ARGUMENT, "a page has 1 to 65536 tokens, not ",
               s.tokens);
        expect(s.layer >= 0 && s.first_head >= 0 && s.first_head <= detail::most_heads, KVQ_ERROR_ARGUMENT,
               "layer ", s.layer, " and first_head ", s.first_head, " of a page");
        expect(f.supports(role), KVQ_ERROR_ARGUMENT, format_text(f), " holds ",
               role == tensor::key ? "values" : "keys", " only");
        expect(!has_bytes || !f.functions().upper, KVQ_ERROR_ARGUMENT, format_text(f),
               " has two planes, pages in memory of the caller have one");
        expect(s.heads >= 1, KVQ_ERROR_ARGUMENT, "a page has at least 1 head, got ", s.heads);
        detail::check_shape({1, s.heads, s.dim, 0});
        detail::check_page(s.tokens, s.dim);
        const cache_shape& of = get(handle, "format").model;
        expect(of.layers == 0 ||
                   (s.layer < of.layers && s.first_head <= of.kv_heads - s.heads && s.dim == of.dim(role)),
               KVQ_ERROR_ARGUMENT, "a page of layer ", s.layer, ", heads from ", s.first_head, " on, ", s.dim,
               " channels, but the format was made for ", of.layers, " layers of ", of.kv_heads, " heads x ",
               of.dim(role));
        block = {role, s.tokens, s.dim};
        heads = s.heads;
        layer = s.layer;
        first_head = s.first_head;
        block_bytes = f.block_bytes(block);
    }

    std::size_t bytes() const { return block_bytes * static_cast<std::size_t>(heads); }
    /// Scratch of floats, then a block of plain values.
    std::size_t scratch_bytes() const {
        return detail::round_up(block.values() * sizeof(float), std::size_t{64});
    }
    std::size_t workspace_bytes() const {
        return scratch_bytes() + values_format(float_type::fp32).block_bytes(block);
    }
    block_id id(int head) const { return {layer, first_head + head}; }

    void check(const void* page, std::size_t page_bytes, const kvq_tensor* x, const char* name,
               const void* workspace, std::size_t given_bytes) const {
        expect(page != nullptr, KVQ_ERROR_HANDLE, "page is NULL");
        expect(workspace != nullptr, KVQ_ERROR_HANDLE, "workspace is NULL");
        expect(reinterpret_cast<std::uintptr_t>(page) % 16 == 0, KVQ_ERROR_ARGUMENT,
               "page is not at an address that is a multiple of 16");
        expect(reinterpret_cast<std::uintptr_t>(workspace) % 64 == 0, KVQ_ERROR_ARGUMENT,
               "workspace is not at an address that is a multiple of 64");
        expect(page_bytes == bytes(), KVQ_ERROR_ARGUMENT, "a page of this shape has ", bytes(),
               " bytes, not ", page_bytes);
        expect(given_bytes >= workspace_bytes(), KVQ_ERROR_ARGUMENT, "the workspace has ", given_bytes,
               " bytes, a page of this shape needs ", workspace_bytes());
        expect(x->tokens == block.tokens && x->heads == heads && x->dim == block.dim, KVQ_ERROR_ARGUMENT,
               name, " is ", x->tokens, " tokens x ", x->heads, " heads x ", x->dim,
               " channels but the page is ", block.tokens, " x ", heads, " x ", block.dim);
        expect(x->data != nullptr, KVQ_ERROR_HANDLE, name, " has no data");
    }
};

}  // namespace
}  // namespace kvq::c

using namespace kvq::c;

extern "C" {

kvq_status kvq_format_count(int32_t* count) {
    return guard([&] { listed_formats(place(count, "count")); });
}

kvq_status kvq_format_list(int32_t index, kvq_format_entry* entry) {
    return guard([&] {
        expect_struct(entry, "entry");
        std::int32_t count = 0;
        const kvq::builtin_format* const list = listed_formats(count);
        expect(index >= 0 && index < count, KVQ_ERROR_ARGUMENT, "format ", index, " is not among the ", count,
               " of this library");
        const kvq::builtin_format& f = list[index];
        write_struct(entry, kvq_format_entry{0, f.name, f.keys, f.values, f.takes_statistics, f.group,
                                             is_preset(f.name)});
    });
}

kvq_status kvq_format_find(const char* name, kvq_role role, const kvq_statistics* statistics,
                           kvq_format** out) {
    return guard([&] {
        place(name, "name");
        place(out, "out");
        const kvq::calibration* const sums = statistics ? &get(statistics, "statistics").sums : nullptr;
        *out = make<kvq_format>(found_format(name, role_of(role), sums), name,
                                sums ? sums->shape() : kvq::cache_shape{});
    });
}

kvq_status kvq_format_find_rows(const char* name, float tensor_scale, kvq_format** out) {
    return guard([&] {
        place(name, "name");
        place(out, "out");
        *out = make<kvq_format>(kvq::find_rows_format(name, tensor_scale), name, kvq::cache_shape{});
    });
}

kvq_status kvq_format_find_head_rows(const char* name, const float* scales, int32_t count, int32_t kv_heads,
                                     kvq_format** out) {
    return guard([&] {
        place(name, "name");
        place(scales, "scales");
        place(out, "out");
        const std::span all(scales, static_cast<std::size_t>(count < 0 ? 0 : count));
        *out = make<kvq_format>(kvq::find_rows_format(name, all, kv_heads), name, kvq::cache_shape{});
    });
}

kvq_status kvq_format_row_bytes(const kvq_format* format, int32_t dim, int32_t* row, int32_t* scales,
                                int32_t* biases) {
    return guard([&] {
        const kvq::row_bytes bytes = kvq::bytes_of_row(get(format, "format").format, dim);
        if (row) *row = bytes.row;
        if (scales) *scales = bytes.scales;
        if (biases) *biases = bytes.biases;
    });
}

kvq_status kvq_format_free(kvq_format* format) { return free_handle(format, "format"); }

kvq_status kvq_format_describe(const kvq_format* format, kvq_role role, int32_t tokens, int32_t dim,
                               kvq_format_description* description) {
    return guard([&] {
        expect_struct(description, "description");
        const kvq_page_shape shape{role, tokens, 1, dim, 0, 0};
        const caller_page page(format, &shape, false);
        const kvq::format_description d = page.f.describe(page.block);
        kvq_format_description made{0,
                                    page.f.name(),
                                    page.f.backend(),
                                    page.f.bits(page.block),
                                    page.block_bytes,
                                    d.quantize,
                                    d.dequantize,
                                    d.attend,
                                    d.dequantizes_first,
                                    page.f.holds_values(),
                                    get(format, "format").name.c_str(),
                                    {},
                                    {},
                                    {}};
        static_assert(sizeof(made.attend_by) == sizeof(d.attend_by));
        std::memcpy(made.quantize_by, d.quantize_by, sizeof(d.quantize_by));
        std::memcpy(made.dequantize_by, d.dequantize_by, sizeof(d.dequantize_by));
        std::memcpy(made.attend_by, d.attend_by, sizeof(d.attend_by));
        write_struct(description, made);
    });
}

kvq_status kvq_format_page_bytes(const kvq_format* format, const kvq_page_shape* shape, size_t* page_bytes,
                                 size_t* workspace_bytes) {
    return guard([&] {
        const caller_page page(format, shape);
        place(page_bytes, "page_bytes") = page.bytes();
        if (workspace_bytes) *workspace_bytes = page.workspace_bytes();
    });
}

kvq_status kvq_format_quantize(const kvq_format* format, const kvq_page_shape* shape,
                               const kvq_tensor* values, void* page, size_t page_bytes, void* workspace,
                               size_t workspace_bytes, size_t* not_finite) {
    return guard([&] {
        const caller_page to(format, shape);
        const kvq::input_view from = input_of(values, "values");
        to.check(page, page_bytes, values, "values", workspace, workspace_bytes);
        const detail::default_arithmetic arithmetic;
        const kvq::format& plain = values_format(from.type);
        auto* const scratch = static_cast<float*>(workspace);
        std::byte* const block_of_values = static_cast<std::byte*>(workspace) + to.scratch_bytes();
        std::size_t count = 0;
        for (int h = 0; h < to.heads; ++h) {
            std::byte* const block =
                static_cast<std::byte*>(page) + to.block_bytes * static_cast<std::size_t>(h);
            // A format of plain values writes tokens itself; others read a block of the type of the values.
            const bool holds_values = to.f.holds_values();
            std::byte* const written = holds_values ? block : block_of_values;
            const kvq::format& writer = holds_values ? to.f : plain;
            std::memset(written, 0, writer.block_bytes(to.block));
            const std::uint32_t found = writer.functions().write_tokens(
                to.block, written, from.type, from.at(0, h), from.token_stride(), from.tokens, 0);
            count += holds_values ? found
                                  : to.f.functions().quantize(to.f.scheme(), to.block, to.id(h), from.type,
                                                              written, block, scratch);
        }
        if (not_finite) *not_finite = count;
    });
}

kvq_status kvq_format_dequantize(const kvq_format* format, const kvq_page_shape* shape, const void* page,
                                 size_t page_bytes, const kvq_tensor* out, void* workspace,
                                 size_t workspace_bytes) {
    return guard([&] {
        const caller_page from(format, shape);
        const kvq::output_view to = output_of(out, "out");
        from.check(page, page_bytes, out, "out", workspace, workspace_bytes);
        const detail::default_arithmetic arithmetic;
        for (int h = 0; h < from.heads; ++h)
            from.f.functions().dequantize(
                from.f.scheme(), from.block, from.id(h),
                static_cast<const std::byte*>(page) + from.block_bytes * static_cast<std::size_t>(h), to.type,
                to.at(0, h), to.token_stride(), static_cast<float*>(workspace));
    });
}
}
