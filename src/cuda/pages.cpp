// Pages in device memory of the caller: the functions of kvq_cuda.h that no cache has to know of.
#include <kvq/schemes/token_rows.hpp>

#include "arguments.hpp"

struct kvq_cuda_kernels : kvq::c::handle<kvq_cuda_kernels> {
    static constexpr std::uint32_t word = 0x6e6b7631;
    static constexpr const char* kind = "set of kernels";
    const kvq::cuda::device_format& format;

    explicit kvq_cuda_kernels(const kvq::cuda::device_format& f) : format(f) {}
};

namespace kvq::c { namespace {

constexpr int sink_page_tokens = 16;  // of pages of sinks

/// The number of a format, or -1 for that of the window.
int number_of(const cuda::device_format& kernels, const char* name, const char* what) {
    expect_data(name, what);
    if (name == std::string_view(kernels.type == float_type::fp16 ? "fp16" : "bf16")) return -1;
    const int number = kernels.find(name);
    expect(number >= 0, KVQ_ERROR_ARGUMENT, what, " is ", std::string(name),
           ", none of the formats that the kernels were found for");
    return number;
}

/// The layer of pages in format `number`, from 0. layer: of other pages of the same call, or -1.
int layer_of(const cuda::device_format& kernels, const kvq_cuda_pages& p, int number, int layer,
             const char* name) {
    if (number < 0) return layer;
    const cuda::device_format::kind& kind = kernels.kinds[static_cast<std::size_t>(number)];
    if (!kind.turned) return layer;
    expect(p.layer >= 1, KVQ_ERROR_ARGUMENT, name, " has layer ", p.layer, ": signs of ", kind.name,
           " depend on the layer of the model, counted from 1");
    expect(layer < 0 || layer == p.layer - 1, KVQ_ERROR_ARGUMENT, name, " is of layer ", p.layer,
           ", other pages of this call of layer ", layer + 1);
    return p.layer - 1;
}

/// A page of all heads, up to the next 16 bytes, as the pages of a pool follow each other.
std::size_t page_bytes(std::size_t block, int kv_heads) {
    return common::round_up(block * static_cast<std::size_t>(kv_heads), std::size_t{16});
}

cuda::detail::layer_memory memory_of(const cuda::device_format& kernels, const kvq_cuda_pages& p, int number,
                                     int kv_heads, const char* name) {
    expect(p.page_tokens == 0 || p.page_tokens == kernels.page_tokens ||
               (number < 0 && p.page_tokens == sink_page_tokens) || (number >= 0 && p.page_tokens == 1),
           KVQ_ERROR_ARGUMENT, name, " has pages of ", p.page_tokens, " tokens, neither of ",
           kernels.page_tokens,
           " nor, of sinks in the window's type, of 16, nor, of quantized ones with strides, of 1");
    expect(p.keys != nullptr && p.values != nullptr, KVQ_ERROR_HANDLE, name, " has no pages (NULL)");
    expect(p.page_tokens != 1 || kernels.page_tokens == 1 || (p.key_stride != 0 && p.value_stride != 0),
           KVQ_ERROR_ARGUMENT, "pages of 1 token need key_stride and value_stride");
    const std::size_t* const blocks =
        p.page_tokens == sink_page_tokens ? kernels.sink_block : kernels.window_block;
    std::size_t key = blocks[0], value = blocks[1];
    if (number >= 0) {
        const cuda::device_format::kind& kind = kernels.kinds[static_cast<std::size_t>(number)];
        expect(kind.upper < 0, KVQ_ERROR_ARGUMENT, name, " has pages of ", kind.name,
               ", whose two planes lie in a cache's own pools");
        key = kind.key_block;
        value = kind.value_block;
    }
    return {static_cast<std::byte*>(p.keys), static_cast<std::byte*>(p.values),
            p.key_stride == 0 ? page_bytes(key, kv_heads) : p.key_stride,
            p.value_stride == 0 ? page_bytes(value, kv_heads) : p.value_stride};
}

/// The scales that pages of rows have. Raises for formats without one.
void set_scales(const cuda::device_format& kernels, const kvq_cuda_pages& p, int number,
                cuda::detail::layer_view::part& to, const char* name) {
    const float given[] = {p.key_scale, p.value_scale};
    if (given[0] == 0.0f && given[1] == 0.0f) return;
    expect(number >= 0, KVQ_ERROR_ARGUMENT, name,
           " has a scale of the tensor, but the window's type has none");
    const cuda::device_format::kind& kind = kernels.kinds[static_cast<std::size_t>(number)];
    const std::string* const names[] = {&kind.key_names[0], &kind.value_names[0]};
    for (int i = 0; i < 2; ++i)
        if (given[i] != 0.0f) {
            const row_layout* found = nullptr;
            for (const row_layout& l : row_layouts)
                if (l.name == *names[i]) found = &l;
            expect(found != nullptr, KVQ_ERROR_ARGUMENT, name, " has a scale of the tensor, but ", *names[i],
                   " has none");
            (void)token_rows(*found, given[i]);  // raises where the scale is not possible
            to.scales[i] = given[i];
        }
}

constexpr kvq_cuda_rows kvq_cuda_pages::*both_rows[] = {&kvq_cuda_pages::key_rows,
                                                        &kvq_cuda_pages::value_rows};

/// Sets the strides of pages that lie as another system has them. number: -1: of the window's type, or in a
/// list.
void set_strides(const cuda::device_format& kernels, const kvq_cuda_pages& p, int number,
                 cuda::detail::layer_view::part& to, const char* name) {
    for (int i = 0; i < 2; ++i) {
        const kvq_cuda_rows& r = p.*both_rows[i];
        if (r.token_stride == 0) {
            expect(r.head_stride == 0 && r.scales == nullptr, KVQ_ERROR_ARGUMENT, name, " has heads ",
                   r.head_stride, " bytes apart, or scales, but no stride of tokens");
            continue;
        }
        expect(number >= 0, KVQ_ERROR_UNSUPPORTED, name, " has tokens ", r.token_stride, " and heads ",
               r.head_stride,
               " bytes apart: strides are for quantized pages that a table names; kvq_cuda_pages_convert "
               "requantizes such pages");
        expect(kernels.strided != nullptr && (kernels.strided->formats >> number & 1) != 0,
               KVQ_ERROR_UNSUPPORTED, name, " has tokens ", r.token_stride, " bytes apart, but ",
               kernels.kinds[static_cast<std::size_t>(number)].name, " of ", kernels.head_dim,
               " channels has no strides: rows of others have (fp8, nvfp4, mxfp8, mxfp4), with multiples of "
               "16 bytes and of 4 bytes of scales");
        to.places[i] = {r.token_stride,      r.head_stride,        static_cast<const std::byte*>(r.scales),
                        r.scale_page_stride, r.scale_token_stride, r.scale_head_stride};
    }
}
void expect_dense(const cuda::device_format& kernels, const kvq_cuda_pages& p, const char* name) {
    expect(p.page_tokens != 1 || kernels.page_tokens == 1, KVQ_ERROR_UNSUPPORTED, name,
           " has pages of 1 token, not of ", kernels.page_tokens);
    cuda::detail::layer_view::part none;
    set_strides(kernels, p, -1, none, name);
}
/// The kernels of a call over these parts that read strides; null: no part has any. page_tokens: of a part.
const cuda::detail::strided_functions* strided_of(const cuda::device_format& kernels,
                                                  const cuda::detail::layer_view& l, int page_tokens) {
    bool found[2] = {};
    for (const auto& part : l.quantized)
        for (int i = 0; i < 2; ++i) found[i] = found[i] || part.places[i].token_bytes != 0;
    if (page_tokens != 1 || kernels.page_tokens == 1) return found[0] || found[1] ? kernels.strided : nullptr;
    expect(found[0] && found[1] && kernels.strided != nullptr && kernels.strided->tokens != nullptr,
           KVQ_ERROR_UNSUPPORTED,
           "pages of 1 token are for kernels of one format of rows, with key_rows and "
           "value_rows");
    return kernels.strided->tokens;
}
int page_tokens_of(const kvq_cuda_layer& l) {
    for (std::int32_t i = 0; i < l.part_count; ++i)
        if (l.parts[i].pages.page_tokens == 1) {
            expect(l.part_count == 1 && l.sink_tokens == 0, KVQ_ERROR_ARGUMENT,
                   "pages of 1 token hold all of a sequence, but there are ", l.part_count, " parts and ",
                   l.sink_tokens, " sinks");
            return 1;
        }
    return 0;
}

/// Pages on one side of a conversion.
cuda::detail::layer_view side_of_conversion(const cuda::device_format& kernels, const kvq_cuda_part& part,
                                            int columns, int kv_heads, int sequences, const int* tokens,
                                            int& number, const char* name) {
    expect_data(part.table, name);
    expect(columns >= 1, KVQ_ERROR_ARGUMENT, name, " has ", columns, " columns");
    expect(part.first_page == nullptr && part.end_page == nullptr, KVQ_ERROR_ARGUMENT, name,
           " has first_page or end_page; a table says by negative entries what is not there");
    number = number_of(kernels, part.pages.format, name);
    expect(part.pages.page_tokens == 0 || part.pages.page_tokens == kernels.page_tokens, KVQ_ERROR_ARGUMENT,
           name, " has pages of ", part.pages.page_tokens, " tokens, not of ", kernels.page_tokens);
    cuda::detail::layer_view l{};
    l.layer = layer_of(kernels, part.pages, number, -1, name);
    l.window = memory_of(kernels, part.pages, number, kv_heads, name);
    l.window_table = part.table;
    l.ring = l.columns = columns;
    l.tokens = tokens;
    l.sequences = sequences;
    l.kv_heads = kv_heads;
    if (number < 0) {
        expect_dense(kernels, part.pages, name);
    } else {
        cuda::detail::layer_view::part& p = l.quantized[number];
        p.pages = l.window;
        p.table = part.table;
        set_strides(kernels, part.pages, number, p, name);
        set_scales(kernels, part.pages, number, p, name);
    }
    return l;
}

cuda::detail::float_page float_page_of(const cuda::device_format& kernels, int kv_heads) {
    return {kv_heads, kernels.page_tokens, kernels.head_dim, kernels.value_dim};
}

void expect_heads(int kv_heads) {
    expect(kv_heads >= 1 && kv_heads <= 1 << 20, KVQ_ERROR_ARGUMENT, "kv_heads is ", kv_heads);
}

/// Of a layer whose struct was read.
cuda::detail::layer_view view_of_layer(const cuda::device_format& kernels, const kvq_cuda_layer& l) {
    expect_heads(l.kv_heads);
    expect(l.sequences >= 1 && l.columns >= 1 && l.window_columns >= 1 && l.sink_tokens >= 0,
           KVQ_ERROR_ARGUMENT, "a layer of ", l.sequences, " sequences with ", l.columns, " columns, ",
           l.window_columns, " columns of the window and ", l.sink_tokens, " sinks");
    expect_data(l.tokens, "layer.tokens");
    expect_data(l.committed, "layer.committed");
    expect_data(l.window_table, "layer.window_table");
    expect_list(l.parts, l.part_count, "layer.parts");
    cuda::detail::layer_view v{};
    v.window = memory_of(kernels, l.window, -1, l.kv_heads, "layer.window");
    expect_dense(kernels, l.window, "layer.window");
    v.window_table = l.window_table;
    v.ring = l.window_columns;
    v.sinks = v.window;
    v.sink_table = l.window_table;
    v.sink_columns = 1;
    if (l.sink_tokens > 0) {
        kvq_cuda_pages sinks = l.sinks;
        sinks.page_tokens = sink_page_tokens;
        v.sinks = memory_of(kernels, sinks, -1, l.kv_heads, "layer.sinks");
        expect_dense(kernels, sinks, "layer.sinks");
        expect_data(l.sink_table, "layer.sink_table");
        v.sink_table = l.sink_table;
        v.sink_columns = common::ceil_div(l.sink_tokens, sink_page_tokens);
    }
    v.tokens = l.tokens;
    v.committed = l.committed;
    v.sequences = l.sequences;
    v.columns = l.columns;
    v.kv_heads = l.kv_heads;
    v.first_token = l.sink_tokens;
    // A format that has no part has no page: its range is empty.
    for (cuda::detail::layer_view::part& p : v.quantized) {
        p = {v.window, l.window_table, l.window_table, l.committed, l.committed};
        p.lower = v.window;
    }
    if (l.part_count == 0) v.columns = l.window_columns;
    v.layer = -1;
    bool seen[cuda::detail::most_formats] = {};
    for (std::int32_t i = 0; i < l.part_count; ++i) {
        const kvq_cuda_part& part = l.parts[i];
        const int number = number_of(kernels, part.pages.format, "the format of a part");
        expect(number >= 0, KVQ_ERROR_ARGUMENT, "the format of a part is that of the window");
        expect(!seen[number], KVQ_ERROR_ARGUMENT, "two parts of a layer have the format ",
               std::string(part.pages.format));
        seen[number] = true;
        expect_data(part.table, "the table of a part");
        v.layer = layer_of(kernels, part.pages, number, v.layer, "a part");
        v.quantized[number] = {memory_of(kernels, part.pages, number, l.kv_heads, "a part"), part.table,
                               part.table, part.first_page,
                               part.end_page != nullptr ? part.end_page : l.committed};
        set_strides(kernels, part.pages, number, v.quantized[number], "a part");
        set_scales(kernels, part.pages, number, v.quantized[number], "a part");
    }
    return v;
}

/// The same, of a prompt: formats without a part take no scratch memory.
cuda::detail::layer_view view_before_prompt(const cuda::device_format& kernels, const kvq_cuda_layer& l) {
    expect(l.most_tokens >= 0, KVQ_ERROR_ARGUMENT, "layer.most_tokens is ", l.most_tokens);
    cuda::detail::layer_view v = view_of_layer(kernels, l);
    for (cuda::detail::layer_view::part& p : v.quantized)
        if (p.first_page == l.committed && p.end_page == l.committed) p.span = 0;
    return v;
}

}  // namespace
}  // namespace kvq::c

using namespace kvq::c;

extern "C" {

kvq_status kvq_cuda_kernels_find(const char* formats, int32_t head_dim, int32_t page_tokens,
                                 const char* window, kvq_cuda_kernels** out) {
    return guard([&] {
        expect_data(formats, "formats");
        place(out, "out");
        const kvq::float_type type = window_type(window);
        expect_kernels();
        const std::vector<std::string> names = listed_names(formats, "formats");
        const auto& found =
            find_compiled(names, kvq::layer{1, head_dim},
                          page_tokens == 0 ? kvq::default_page_tokens : page_tokens, type, false);
        *out = make<kvq_cuda_kernels>(found);
    });
}

kvq_status kvq_cuda_kernels_free(kvq_cuda_kernels* kernels) { return free_handle(kernels, "kernels"); }

kvq_status kvq_cuda_kernels_page_bytes(const kvq_cuda_kernels* kernels, const char* format,
                                       int32_t page_tokens, int32_t kv_heads, size_t* keys, size_t* values) {
    return guard([&] {
        const kvq::cuda::device_format& of = get(kernels, "kernels").format;
        expect_heads(kv_heads);
        std::byte any{};
        kvq_cuda_pages pages{};
        pages.format = format;
        pages.keys = pages.values = &any;
        pages.page_tokens = page_tokens;
        const auto m = memory_of(of, pages, number_of(of, format, "format"), kv_heads, format);
        place(keys, "keys") = m.key_page_bytes;
        place(values, "values") = m.value_page_bytes;
    });
}

kvq_status kvq_cuda_kernels_workspace_bytes(const kvq_cuda_kernels* kernels, int32_t q_heads,
                                            int32_t kv_heads, int32_t query_tokens, size_t* bytes) {
    return guard([&] {
        const kvq::cuda::device_format& of = get(kernels, "kernels").format;
        expect_heads(kv_heads);
        expect(q_heads >= kv_heads && q_heads % kv_heads == 0 && query_tokens >= 1, KVQ_ERROR_ARGUMENT,
               q_heads, " query heads on ", kv_heads, " kv heads, ", query_tokens, " query tokens");
        const int group = q_heads / kv_heads;
        std::size_t most = of.functions->workspace_bytes(1, group, query_tokens);
        for (const auto* s = of.strided; s != nullptr; s = s->tokens)
            most = std::max(most, s->workspace_bytes(1, group, query_tokens));
        place(bytes, "bytes") = most;
    });
}

kvq_status kvq_cuda_pages_store(const kvq_cuda_kernels* kernels, const kvq_cuda_pages* to,
                                const kvq_tensor* k, const kvq_tensor* v, const int64_t* slots,
                                void* stream) {
    return guard([&] {
        static_assert(sizeof(long long) == sizeof(int64_t));
        const kvq::cuda::device_format& of = get(kernels, "kernels").format;
        expect_data(to, "to");
        const auto keys = input_of(k, of.type, "k"), values = input_of(v, of.type, "v");
        expect_data(slots, "slots");
        expect_heads(k->heads);
        const auto* const slot_list = reinterpret_cast<const long long*>(slots);
        const int number = to->format == nullptr ? -1 : number_of(of, to->format, "to.format");
        kvq::cuda::detail::layer_view l{};
        l.kv_heads = k->heads;
        const auto memory = memory_of(of, *to, number, k->heads, "to");
        if (number >= 0) {  // rows that another system will read
            kvq::cuda::detail::layer_view::part& p = l.quantized[number];
            expect(
                of.strided != nullptr && (of.strided->formats >> number & 1) != 0, KVQ_ERROR_ARGUMENT,
                "to.format is ", std::string(to->format), " of ", of.head_dim,
                " channels; tokens are stored in rows of others (fp8, nvfp4, mxfp8, mxfp4), and in pages of "
                "the window's type, which kvq_cuda_pages_requantize quantizes");
            p.pages = memory;
            set_strides(of, *to, number, p, "to");
            set_scales(of, *to, number, p, "to");
            const auto* const strided = strided_of(of, l, to->page_tokens);
            check((strided != nullptr ? strided : of.strided)
                      ->store(l, number, keys, values, slot_list, stream_of(stream)));
            return;
        }
        expect_dense(of, *to, "to");
        const bool sinks = to->page_tokens == sink_page_tokens && of.page_tokens != sink_page_tokens;
        check(of.functions->store(l, memory, sinks, keys, values, slot_list, stream_of(stream)));
    });
}

kvq_status kvq_cuda_pages_requantize(const kvq_cuda_kernels* kernels, int32_t kv_heads,
                                     const kvq_cuda_pages* from, const int32_t* from_pages,
                                     const kvq_cuda_pages* to, const int32_t* to_pages, int32_t count,
                                     uint32_t* not_finite, void* stream) {
    return guard([&] {
        const kvq::cuda::device_format& of = get(kernels, "kernels").format;
        expect_data(from, "from");
        expect_data(to, "to");
        expect_heads(kv_heads);
        expect_list(from_pages, count, "from_pages");
        expect_list(to_pages, count, "to_pages");
        const int source = number_of(of, from->format, "from.format"),
                  target = number_of(of, to->format, "to.format");
        expect(target >= 0, KVQ_ERROR_ARGUMENT,
               "to.format is that of the window: kvq_cuda_pages_dequantize writes tensors in it");
        kvq::cuda::detail::layer_view l{};
        l.kv_heads = kv_heads;
        l.layer = layer_of(of, *to, target, layer_of(of, *from, source, -1, "from"), "to");
        l.not_finite = not_finite;
        const auto source_memory = memory_of(of, *from, source, kv_heads, "from");
        expect_dense(of, *from, "from");
        expect_dense(of, *to, "to");
        if (source >= 0) {
            l.quantized[source].pages = source_memory;
            set_scales(of, *from, source, l.quantized[source], "from");
        }
        l.quantized[target].pages = memory_of(of, *to, target, kv_heads, "to");
        set_scales(of, *to, target, l.quantized[target], "to");
        check(of.functions->requantize(l, source, source_memory, target, of.same_schemes(source, target),
                                       from_pages, to_pages, count, stream_of(stream)));
    });
}

kvq_status kvq_cuda_pages_dequantize(const kvq_cuda_kernels* kernels, int32_t kv_heads,
                                     const kvq_cuda_part* from, int32_t sequences, int32_t columns,
                                     const int32_t* tokens, const kvq_tensor* k, const kvq_tensor* v,
                                     const int32_t* starts, void* stream) {
    return guard([&] {
        const kvq::cuda::device_format& of = get(kernels, "kernels").format;
        expect_data(from, "from");
        expect_data(from->table, "from.table");
        expect_data(tokens, "tokens");
        expect_data(starts, "starts");
        expect_heads(kv_heads);
        expect(sequences >= 1 && columns >= 1, KVQ_ERROR_ARGUMENT, sequences, " sequences with ", columns,
               " columns");
        const int number = number_of(of, from->pages.format, "from.format");
        expect(number >= 0, KVQ_ERROR_ARGUMENT,
               "from.format is that of the window: there is nothing to dequantize");
        const auto keys = output_of(k, of.type, "k"), values = output_of(v, of.type, "v");
        kvq::cuda::detail::layer_view l{};
        l.layer = layer_of(of, from->pages, number, -1, "from");
        l.quantized[number] = {memory_of(of, from->pages, number, kv_heads, "from"), from->table};
        set_strides(of, from->pages, number, l.quantized[number], "from");
        set_scales(of, from->pages, number, l.quantized[number], "from");
        l.tokens = tokens;
        l.sequences = sequences;
        l.columns = columns;
        l.kv_heads = kv_heads;
        const auto* const strided = strided_of(of, l, from->pages.page_tokens);
        check((strided != nullptr ? strided->dequantize : of.functions->dequantize)(
            l, number, keys, values, starts, stream_of(stream)));
    });
}

kvq_status kvq_cuda_kernels_convert_bytes(const kvq_cuda_kernels* to_kernels, int32_t kv_heads, int32_t pages,
                                          size_t* bytes) {
    return guard([&] {
        const kvq::cuda::device_format& to = get(to_kernels, "to_kernels").format;
        expect_heads(kv_heads);
        expect(pages >= 1, KVQ_ERROR_ARGUMENT, "a turn has ", pages, " pages");
        place(bytes, "bytes") = float_page_of(to, kv_heads).workspace(static_cast<std::size_t>(pages));
    });
}

kvq_status kvq_cuda_pages_convert(const kvq_cuda_kernels* from_kernels, const kvq_cuda_part* from,
                                  int32_t from_columns, const kvq_cuda_kernels* to_kernels,
                                  const kvq_cuda_part* to, int32_t to_columns, int32_t kv_heads,
                                  int32_t sequences, const int32_t* tokens, void* workspace,
                                  size_t workspace_bytes, uint32_t* not_finite, void* stream) {
    return guard([&] {
        const kvq::cuda::device_format &source = get(from_kernels, "from_kernels").format,
                                       &target = get(to_kernels, "to_kernels").format;
        expect_data(from, "from");
        expect_data(to, "to");
        expect_data(tokens, "tokens");
        expect_heads(kv_heads);
        expect(sequences >= 0, KVQ_ERROR_ARGUMENT, sequences, " sequences");
        expect(source.head_dim == target.head_dim && source.value_dim == target.value_dim, KVQ_ERROR_ARGUMENT,
               "from_kernels are of heads of ", source.head_dim, " channels, to_kernels of ",
               target.head_dim);
        int from_number = 0, to_number = 0;
        const auto s =
            side_of_conversion(source, *from, from_columns, kv_heads, sequences, tokens, from_number, "from");
        auto t = side_of_conversion(target, *to, to_columns, kv_heads, sequences, tokens, to_number, "to");
        t.not_finite = not_finite;
        expect(to_number >= 0, KVQ_ERROR_ARGUMENT,
               "to has the window's type: kvq_cuda_pages_dequantize writes tensors in it");
        expect(1LL * sequences * to_columns <= 1LL << 28, KVQ_ERROR_ARGUMENT, sequences, " sequences with ",
               to_columns, " columns");
        const kvq::cuda::detail::target_columns columns{to->table, sequences, to_columns, target.page_tokens,
                                                        0};
        check(kvq::cuda::detail::convert_in_turns(
            float_page_of(target, kv_heads), columns, workspace, workspace_bytes,
            [&](const kvq::cuda::detail::convert_turn& turn) {
                if (auto r = source.functions->gather(s, from_number, columns, turn, stream_of(stream)); !r)
                    return r;
                return target.functions->quantize_turn(t, to_number, turn, stream_of(stream));
            }));
    });
}

kvq_status kvq_cuda_pages_attend(const kvq_cuda_kernels* kernels, const kvq_cuda_layer* layer,
                                 const kvq_tensor* q, const kvq_tensor* out,
                                 const kvq_cuda_attend_options* options, void* workspace,
                                 size_t workspace_bytes, void* stream) {
    return guard([&] {
        const kvq::cuda::device_format& of = get(kernels, "kernels").format;
        const kvq_cuda_layer given = read_struct(layer, "layer");
        const kvq_cuda_attend_options o = read_optional(options, "options");
        const auto queries = query_of(q, of.type, "q");
        const auto to = output_of(out, of.type, "out");
        expect(!has_lists(o), KVQ_ERROR_UNSUPPORTED, "lists of tokens are for caches");
        expect_modifiers(o, false);
        const auto l = view_of_layer(of, given);
        expect(q->tokens % l.sequences == 0, KVQ_ERROR_ARGUMENT, "q has ", q->tokens, " tokens, for ",
               l.sequences, " sequences");
        kvq::cuda::attention_options a = attention_of(o);
        a.query_tokens = q->tokens / l.sequences;
        static const kvq::cuda::unmodified plain{};
        const auto* const strided = strided_of(of, l, page_tokens_of(given));
        check((strided != nullptr ? strided->attend : of.functions->attend)(
            l, queries, to, a, workspace, workspace_bytes, stream_of(stream), &plain));
        add_learned_sinks(to, o, stream_of(stream));
    });
}

kvq_status kvq_cuda_pages_prefill(const kvq_cuda_kernels* kernels, const kvq_cuda_layer* layer,
                                  const kvq_tensor* k, const kvq_tensor* v, const kvq_tensor* q,
                                  const kvq_tensor* out, const int32_t* starts, int32_t most_new_tokens,
                                  const kvq_cuda_attend_options* options, void* workspace,
                                  size_t workspace_bytes, void* stream) {
    return guard([&] {
        const kvq::cuda::device_format& of = get(kernels, "kernels").format;
        const kvq_cuda_layer given = read_struct(layer, "layer");
        const kvq_cuda_attend_options o = read_optional(options, "options");
        const auto keys = input_of(k, of.type, "k"), values = input_of(v, of.type, "v");
        const auto queries = query_of(q, of.type, "q");
        const auto to = output_of(out, of.type, "out");
        expect_data(starts, "starts");
        expect(o.ancestors == nullptr && o.alibi_slopes == nullptr, KVQ_ERROR_ARGUMENT,
               "a prompt has no tree of drafted tokens and no ALiBi");
        const auto l = view_before_prompt(of, given);
        kvq::cuda::prefill_options p = prefill_of(o);
        p.scratch = {workspace, workspace_bytes, given.most_tokens};
        const auto* const strided = strided_of(of, l, page_tokens_of(given));
        check((strided != nullptr ? strided->prefill : of.functions->prefill)(
            l, keys, values, queries, to, starts, most_new_tokens, p, stream_of(stream), nullptr));
    });
}

kvq_status kvq_cuda_pages_prefill_bytes(const kvq_cuda_kernels* kernels, const kvq_cuda_layer* layer,
                                        int32_t most_new_tokens, int32_t heads, size_t* bytes) {
    return guard([&] {
        const kvq::cuda::device_format& of = get(kernels, "kernels").format;
        const kvq_cuda_layer given = read_struct(layer, "layer");
        const auto l = view_before_prompt(of, given);
        expect(most_new_tokens >= 0 && heads >= 0, KVQ_ERROR_ARGUMENT, most_new_tokens, " new tokens, ",
               heads, " heads");
        const auto* const strided = strided_of(of, l, page_tokens_of(given));
        place(bytes, "bytes") =
            (strided != nullptr ? strided->prompt_scratch_bytes : of.functions->prompt_scratch_bytes)(
                l, given.most_tokens, most_new_tokens, heads);
    });
}
}
