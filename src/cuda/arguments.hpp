// What calls of kvq_cuda.h take: names of formats, tensors in device memory, options of attention.
#pragma once

#include <algorithm>
#include <cmath>
#include <kvq/schemes/record_layout.hpp>
#include <kvq/schemes/row_layout.hpp>
#include <set>
#include <string_view>

#include "device_code.hpp"
#include "objects.hpp"

namespace kvq::c {

template <>
inline constexpr std::size_t first_size<kvq_cuda_requantize_request> = offsetof(kvq_cuda_requantize_request,
                                                                                dry_run);

inline bool holds_values(const std::string& name) { return name == "fp16" || name == "bf16"; }

inline std::vector<cuda::sequence_id> rows_of(kvq_cuda_sequence* const* rows, std::int32_t count,
                                              const shared_device& of, bool holes) {
    expect_list(rows, count, "rows");
    std::vector<cuda::sequence_id> ids(static_cast<std::size_t>(count));
    for (std::int32_t i = 0; i < count; ++i) {
        if (rows[i] == nullptr && holes) continue;
        const kvq_cuda_sequence& s = get(rows[i], "a sequence of the list");
        expect(s.of == of, KVQ_ERROR_HANDLE, "a sequence of the list belongs to another cache");
        ids[static_cast<std::size_t>(i)] = s.id;
    }
    return ids;
}

inline std::vector<cuda::tier> tiers_of(const kvq_cuda_tier* tiers, std::int32_t count) {
    expect_list(tiers, count, "tiers");
    std::vector<cuda::tier> all;
    for (std::int32_t i = 0; i < count; ++i) {
        expect_data(tiers[i].format, "the format of a tier");
        all.push_back({tiers[i].age, tiers[i].format});
    }
    return all;
}

/// The type of a window. name: NULL for fp16.
inline float_type window_type(const char* name) {
    const std::string window = name != nullptr ? name : "fp16";
    expect(holds_values(window), KVQ_ERROR_ARGUMENT, "the window is ", window, ", neither fp16 nor bf16");
    return window == "fp16" ? float_type::fp16 : float_type::bf16;
}

inline bool is_alibi(const cuda::device_format& f) {
    return f.functions->score == cuda::detail::score_mark::of<cuda::alibi>();
}

/// Raises for the bytes of other systems that no library has on a device.
inline void expect_of_devices(std::string_view name) {
    static constexpr std::string_view on_devices[] = {"fp8",          "fp8-e5m2", "nvfp4",
                                                      "nvfp4-4over6", "mxfp8",    "mxfp4"};
    for (std::string_view rest = name; !rest.empty();) {
        const std::string one(rest.substr(0, rest.find('/')));
        rest.remove_prefix(std::min(rest.size(), one.size() + 1));
        const auto is = [&](const auto& layout) { return layout.name == one; };
        const char* const latents = one.starts_with("mla-")
                                        ? ": records of latents are for caches of KVQ_LATENT, and in C++ "
                                          "(records_of) for pages of an engine"
                                        : "";
        expect(!std::ranges::any_of(record_layouts, is), KVQ_ERROR_UNSUPPORTED, one,
               " has no kernels for keys and values on a GPU", latents, "; kvq_convert_rows is for the CPU");
        expect(!std::ranges::any_of(row_layouts, is) ||
                   std::ranges::find(on_devices, std::string_view(one)) != std::end(on_devices),
               KVQ_ERROR_UNSUPPORTED, one,
               " has no kernels on a GPU but in C++ (rows_of); fp8, fp8-e5m2, "
               "nvfp4, nvfp4-4over6, mxfp8 and mxfp4 have, kvq_convert_rows is for the CPU");
    }
}

/// The entry for layers like `of` with the fewest formats that has all of these, with or without ALiBi.
/// Raises a failure that says what was compiled.
inline const cuda::device_format& find_compiled(const std::vector<std::string>& wanted_names, const layer& of,
                                                int page_tokens, float_type type, bool alibi) {
    const bool latent = detail::holds_keys_alone(of.kind), index = of.kind == layer_kind::index;
    const int head_dim = of.head_dim, value_dim = of.value_dim == 0 ? head_dim : of.value_dim;
    const auto score = alibi ? cuda::detail::score_mark::of<cuda::alibi>()
                             : cuda::detail::score_mark::of<cuda::unmodified>();
    const auto* const found = cuda::find_device_format(cuda::library_formats(), wanted_names, head_dim,
                                                       value_dim, page_tokens, type, &score, latent, index);
    if (found != nullptr) return *found;
    expect(!index, KVQ_ERROR_ARGUMENT, "this library has no kernels for an index of ", head_dim,
           " channels in pages of ", page_tokens, " tokens; build it with KVQ_CUDA_INDEXES=", head_dim,
           " KVQ_CUDA_PAGE_TOKENS=", page_tokens);
    expect(!latent, KVQ_ERROR_ARGUMENT, "this library has no kernels for latents of ", value_dim, " + ",
           head_dim - value_dim, " channels in pages of ", page_tokens,
           " tokens; build it with KVQ_CUDA_LATENTS=", value_dim, "+", head_dim - value_dim,
           " KVQ_CUDA_PAGE_TOKENS=", page_tokens);
    for (const std::string& name : wanted_names) expect_of_devices(name);
    std::string names;
    std::set<std::pair<int, int>> geometries;
    bool geometry = false, any = false, compiled = false;  // these formats, for other geometries
    for (const cuda::device_format& f : cuda::library_formats()) {
        if (is_alibi(f) != alibi || f.latent) continue;
        any = true;
        const bool fits = f.head_dim == head_dim && f.value_dim == head_dim && f.page_tokens == page_tokens &&
                          f.type == type;
        geometry = geometry || fits;
        std::string own;
        for (const cuda::device_format::kind& k : f.kinds) own += (own.empty() ? "" : "+") + k.name;
        if (fits) names += (names.empty() ? "" : ", ") + own;
        if (f.type == type) geometries.insert({f.page_tokens, f.head_dim});
        bool has_all = true;
        for (const std::string& name : wanted_names) has_all = has_all && f.find(name) >= 0;
        compiled = compiled || has_all;
    }
    std::string wanted;
    for (const std::string& name : wanted_names) wanted += (wanted.empty() ? "" : "+") + name;
    const std::string option = alibi ? "KVQ_CUDA_ALIBI" : "KVQ_CUDA_FORMATS";
    expect(any, KVQ_ERROR_ARGUMENT, "this library has no kernels with ALiBi; build it with ", option, "=",
           wanted);
    std::string other;
    bool has_dim = false, has_pages = false;
    for (const auto& [tokens, dim] : geometries) {
        other += (other.empty() ? "" : ", ") + std::to_string(dim) + " and " + std::to_string(tokens);
        has_dim = has_dim || dim == head_dim;
        has_pages = has_pages || tokens == page_tokens;
    }
    const bool both = has_dim && has_pages;  // but not together
    const std::string missing =
        (has_dim && !both ? "" : " KVQ_CUDA_HEAD_DIMS=" + std::to_string(head_dim)) +
        (has_pages && !both ? "" : " KVQ_CUDA_PAGE_TOKENS=" + std::to_string(page_tokens)) +
        (compiled ? "" : " " + option + "=" + wanted);
    expect(geometry, KVQ_ERROR_ARGUMENT, "this library has kernels for heads and pages of ", other,
           " channels and tokens, none for ", head_dim, " and ", page_tokens, "; build it with", missing);
    fail(KVQ_ERROR_ARGUMENT, "this library has kernels for ", names, ", none for ", wanted,
         "; build it with ", option, "=", wanted);
}

/// Kernels for much shared memory alone do not start on a device that has little.
inline void expect_kernels() {
    const auto [least, has] = shared_memory_of_kernels();
    expect(has == 0 || has >= least, KVQ_ERROR_UNSUPPORTED,
           "this library has kernels for devices whose blocks may have ", least,
           " bytes of shared memory, this one's have ", has,
           "; build it with 86 among CMAKE_CUDA_ARCHITECTURES");
}

inline void expect_dtype(const kvq_tensor* x, float_type type, const char* name) {
    expect(x != nullptr, KVQ_ERROR_HANDLE, name, " is NULL");
    const kvq_dtype wanted = type == float_type::fp16 ? KVQ_FP16 : KVQ_BF16;
    expect(x->dtype == wanted, KVQ_ERROR_ARGUMENT, name, " has dtype ", x->dtype,
           ", but the window of the cache is ", wanted == KVQ_FP16 ? "fp16" : "bf16");
    expect(x->data != nullptr || x->tokens == 0, KVQ_ERROR_HANDLE, name, ".data is NULL");
}

/// Rows of the type of a window, in device memory.
inline input_view input_of(const kvq_tensor* x, float_type type, const char* name) {
    expect_dtype(x, type, name);
    return input_of(x, name);
}
inline query_view query_of(const kvq_tensor* x, float_type type, const char* name) {
    expect_dtype(x, type, name);
    return query_of(x, name);
}
inline output_view output_of(const kvq_tensor* x, float_type type, const char* name) {
    expect_dtype(x, type, name);
    return output_of(x, name);
}

inline cuda::attention_options attention_of(const kvq_cuda_attend_options& o) {
    const auto fits = [](float x) { return x >= 0.0f && std::isfinite(x); };
    expect(fits(o.scale) && fits(o.softcap) && o.window >= 0, KVQ_ERROR_ARGUMENT, "scale is ", o.scale,
           ", softcap ", o.softcap, ", window ", o.window, "; none may be negative or infinite");
    cuda::attention_options a;
    a.scale = o.scale;
    a.softcap = o.softcap;
    a.window = o.window;
    a.window_sinks = o.window_sinks != 0;
    a.ancestors = o.ancestors;
    a.lse = o.lse;
    a.selected_tokens = o.selected_tokens;
    expect(o.upper_only == 0 || o.upper_only == 1, KVQ_ERROR_ARGUMENT, "options: upper_only is ",
           o.upper_only, ", not 0 or 1");
    a.upper_only = o.upper_only != 0;
    return a;
}
/// Are there lists of tokens?
inline bool has_lists(const kvq_cuda_attend_options& o) {
    return o.listed_count != 0 || o.listed_window_count != 0;
}
inline cuda::list_options lists_of(const kvq_cuda_attend_options& o, int query_tokens) {
    const cuda::attention_options a = attention_of(o);
    expect(a.softcap == 0.0f && a.window == 0 && o.alibi_slopes == nullptr && a.selected_tokens == 0,
           KVQ_ERROR_ARGUMENT,
           "attention over lists of tokens takes no softcap, window, ALiBi or selected pages; got "
           "softcap ",
           a.softcap, ", window ", a.window, ", selected_tokens ", a.selected_tokens);
    cuda::list_options lists;
    lists.scale = a.scale;
    lists.selected = {o.listed_tokens, o.listed_count};
    lists.window = {o.listed_window, o.listed_window_count};
    lists.query_tokens = query_tokens;
    lists.ancestors = a.ancestors;
    if (o.list_kv_heads != 0) lists.kv_heads = o.list_kv_heads;
    lists.sink_logits = o.sink_logits;
    lists.lse = o.lse;
    return lists;
}
inline void expect_slopes(const kvq_cuda_attend_options& o, bool alibi) {
    expect(alibi || o.alibi_slopes == nullptr, KVQ_ERROR_ARGUMENT,
           "options.alibi_slopes needs a cache with kernels for them: kvq_cuda_cache_options.alibi");
    expect(!alibi || o.alibi_slopes != nullptr, KVQ_ERROR_HANDLE,
           "the cache has kernels with ALiBi, but options.alibi_slopes is NULL");
}
/// What attention by append() and attend() needs for learned sinks, and for ALiBi.
inline void expect_modifiers(const kvq_cuda_attend_options& o, bool alibi) {
    expect(o.sink_logits == nullptr || o.lse != nullptr || has_lists(o), KVQ_ERROR_HANDLE,
           "options.sink_logits needs options.lse, which is NULL");
    expect_slopes(o, alibi);
}
/// out: of the type of a window.
inline void add_learned_sinks(const output_view& out, const kvq_cuda_attend_options& o, cudaStream_t stream) {
    if (o.sink_logits == nullptr) return;
    const auto of = out.as<float16>();  // strides in values of 16 bits
    check(add_learned_sinks({out.data, out.type == float_type::bf16, out.tokens, out.heads, out.dim,
                             of.token_stride, of.head_stride},
                            o.sink_logits, o.lse, stream),
          "launching learned sinks");
}
inline cuda::prefill_options prefill_of(const kvq_cuda_attend_options& o) {
    const cuda::attention_options a = attention_of(o);
    expect(a.selected_tokens == 0, KVQ_ERROR_UNSUPPORTED, "prompts read all pages; selected_tokens is ",
           a.selected_tokens);
    return {.scale = a.scale,
            .softcap = a.softcap,
            .window = a.window,
            .window_sinks = a.window_sinks,
            .sink_logits = o.sink_logits,
            .lse = a.lse};
}

}  // namespace kvq::c
