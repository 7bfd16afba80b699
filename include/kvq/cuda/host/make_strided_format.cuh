// Kernels of a device_format for pages of another system: rows of tokens with any strides of tokens and
// heads, read in place by calls on memory of the caller (kvq_cuda_pages_attend, ...).
//
//   row of (page, token, head)      pages + page * page_bytes + token * token_bytes + head * head_bytes
//
// Contract: formats of rows without scales beside them (fp8, fp8-e5m2) have strides, others of the entry
// none. An entry costs a program its kernels of attention once more.
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

template <class T, class... Pairs>
struct strided_table {
    using table = device_table<unmodified, T, typename with_strides_of<Pairs>::type...>;

    static status check(const layer_view& l) {
        status result;
        int i = 0;
        const auto of = [&](bool has_strides) {
            if (!has_strides && l.quantized[i].token_bytes != 0)
                result =
                    bad_value("format %d has scales beside its rows, or no rows: tokens have no strides", i);
            ++i;
        };
        (of(lies_anywhere<Pairs>), ...);
        return result;
    }
    static status attend(const layer_view& l, const input_rows& q, const output_rows& out,
                         const attention_options& options, void* workspace, std::size_t bytes,
                         cudaStream_t stream, const void* score) {
        if (status s = check(l); !s) return s;
        return table::attend(l, q, out, options, workspace, bytes, stream, score);
    }
    static status prefill(const layer_view& l, const input_rows& k, const input_rows& v, const input_rows& q,
                          const output_rows& out, const int* starts, int new_tokens,
                          const prefill_options& options, cudaStream_t stream, const void* score) {
        if (status s = check(l); !s) return s;
        return table::prefill(l, k, v, q, out, starts, new_tokens, options, stream, score);
    }
    static status dequantize(const layer_view& l, int part, const output_rows& keys,
                             const output_rows& values, const int* starts, cudaStream_t stream) {
        if (status s = check(l); !s) return s;
        return table::dequantize(l, part, keys, values, starts, stream);
    }
    static constexpr strided_functions functions{&attend, &prefill, &dequantize, &table::workspace_bytes};
};

}  // namespace detail

/// Gives a format made of the same types these kernels; nothing where no pair has strides.
template <class T, class... Pairs>
void add_strides(device_format& f) {
    if constexpr ((detail::lies_anywhere<Pairs> || ...))
        f.strided = &detail::strided_table<T, Pairs...>::functions;
}

}}}  // namespace kvq::cuda
