// Kernels of a device_format for pages of another system: rows of tokens with any strides of tokens and
// heads, read in place by calls on memory of the caller (kvq_cuda_pages_attend, ...).
//
//   row of (page, token, head)      pages + page * page_bytes + token * token_bytes + head * head_bytes
//
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

template <class T, class... Pairs>
struct strided_table {
    using table = device_table<unmodified, T, typename with_strides_of<Pairs>::type...>;

    static constexpr unsigned formats = [] {
        unsigned found = 0, bit = 1;
        ((found |= lies_anywhere<Pairs> ? bit : 0u, bit <<= 1), ...);
        return found;
    }();
    static constexpr strided_functions functions{formats, &table::attend, &table::prefill, &table::dequantize,
                                                 &table::workspace_bytes};
};

}  // namespace detail

/// Gives a format made of the same types these kernels; nothing where no pair has strides.
template <class T, class... Pairs>
void add_strides(device_format& f) {
    if constexpr ((detail::lies_anywhere<Pairs> || ...))
        f.strided = &detail::strided_table<T, Pairs...>::functions;
}

}}}  // namespace kvq::cuda
