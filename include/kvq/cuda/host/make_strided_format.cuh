// Kernels of a device_format for pages of another system: rows of tokens with any strides of tokens and
// heads, read in place by calls on memory of the caller (kvq_cuda_pages_attend, ...).
//
//   row of (page, token, head)      pages + page * page_bytes + token * token_bytes + head * head_bytes
//
// Pages of one token (SGLang) hold all of a sequence, without window and sinks.
// Contract: formats of rows of a multiple of 16 bytes, and of 4 bytes of scales beside them, have strides,
// others of the entry none. K and V have their own, also none. An entry costs a program its kernels of
// attention once more.
#pragma once

#include "make_device_format.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

template <class Pair>
struct with_strides_of {
    using type = Pair;
};
template <class Pair>
requires lies_anywhere<Pair>
struct with_strides_of<Pair> {
    using type = strided_rows<Pair>;
};

/// Store of a table of strided rows.
template <class T, class Table>
status store_strided(const layer_view& l, int part, const input_rows& k, const input_rows& v,
                     const long long* slot_list, cudaStream_t stream) {
    return Table::with_pair(part, [&]<class Pair>(std::type_identity<Pair>) -> status {
        if constexpr (is_strided<Pair>)
            return cuda::store(Table::template quantized<Pair>(l, part, nullptr), k.as<const T>(),
                               v.as<const T>(), slot_list, l.not_finite, stream);
        else
            return bad_value("format %d has no rows of tokens", part);
    });
}

/// Of pages of one token.
template <class T, class Pair>
struct token_table {
    using pair = strided_rows<
        block_pair<typename Pair::keys, typename Pair::values, Pair::head_dim, 1, Pair::value_dim>>;
    using table = device_table<unmodified, T, pair>;

    static cache_ref<pair> all(const layer_view& l) noexcept {
        return table::template quantized<pair>(l, 0, l.quantized[0].table);
    }
    static status attend(const layer_view& l, const input_rows& q, const output_rows& out,
                         const attention_options& options, void* workspace, std::size_t bytes,
                         cudaStream_t stream, const void*) {
        return cuda::attend(all(l), q.as<const T>(), out.as<T>(), options, workspace, bytes, stream);
    }
    static status prefill(const layer_view& l, const input_rows& k, const input_rows& v, const input_rows& q,
                          const output_rows& out, const int* starts, int new_tokens,
                          const prefill_options& options, cudaStream_t stream, const void*) {
        if constexpr (prefills<pair>)
            return cuda::prefill<T>(make_mixed(0, all(l)), k.as<const T>(), v.as<const T>(), q.as<const T>(),
                                    out.as<T>(), starts, new_tokens, options, stream);
        else
            return bad_value("prefill has no kernels for these pages: %s", no_prefill<pair>);
    }
    static std::size_t workspace_bytes(int, int q_heads, int query_tokens) {
        return attend_workspace_bytes<pair, T>(q_heads, query_tokens);
    }
    static std::size_t scratch_bytes(const layer_view& l, int tokens, int new_tokens, int heads) {
        return prefill_scratch_bytes<T>(make_mixed(0, all(l)), tokens, new_tokens, heads);
    }
    static constexpr strided_functions functions{1,
                                                 &attend,
                                                 &prefill,
                                                 &table::dequantize,
                                                 &workspace_bytes,
                                                 &scratch_bytes,
                                                 &store_strided<T, table>,
                                                 nullptr};
};

template <class T, class... Pairs>
struct strided_table {
    using table = device_table<unmodified, T, typename with_strides_of<Pairs>::type...>;

    static constexpr unsigned formats = [] {
        unsigned found = 0, bit = 1;
        ((found |= lies_anywhere<Pairs> ? bit : 0u, bit <<= 1), ...);
        return found;
    }();
    static constexpr const strided_functions* tokens = [] {
        if constexpr (sizeof...(Pairs) == 1) return (&token_table<T, Pairs>::functions, ...);
        return static_cast<const strided_functions*>(nullptr);
    }();
    static constexpr strided_functions functions{formats,
                                                 &table::attend,
                                                 &table::prefill,
                                                 &table::dequantize,
                                                 &table::workspace_bytes,
                                                 &table::prompt_scratch_bytes,
                                                 &store_strided<T, table>,
                                                 tokens};
};

}  // namespace detail

/// Gives a format made of the same types these kernels; nothing where no pair has strides.
template <class T, class... Pairs>
void add_strides(device_format& f) {
    if constexpr ((detail::lies_anywhere<Pairs> || ...))
        f.strided = &detail::strided_table<T, Pairs...>::functions;
}

}}}  // namespace kvq::cuda
