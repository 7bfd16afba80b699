// Saves a sequence of a cache on the device, and restores one: the files of kvq::save (io/save.hpp), without
// a cache on the CPU.
//
//   cuda::save(gpu, id, "chat.kvq", {.model = "my-model"}, stream);           or any sink of bytes
//   cuda::restore(gpu, "chat.kvq", {.model = "my-model"}, id, stream);        or any source
//
// A file of a device's cache restores in a CPU cache and the other way round. Of sequences with the same
// history both write the same bytes, if the formats are listed in the same order; numbers that are not finite
// are counted by the CPU alone.
// Contract: pages go through pinned memory of the size of the sequence. Both calls wait for the stream. A
// status that is not success has changed nothing. Files of other layers, formats or options, damaged files,
// and sequences that onload() refuses, raise kvq::error or are refused; restore_options::convert needs a
// cache on the CPU. O(bytes)
#pragma once

#include "../../io/file.hpp"
#include "host_pages.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

/// to: a path, or a callable write(const void*, std::size_t).
template <class To>
status save(const cache& from, sequence_id id, To&& to, const save_options& options, cudaStream_t stream) {
    pinned_memory pinned;
    std::pmr::monotonic_buffer_resource memory(from.usage(id).bytes + (std::size_t{1} << 16), &pinned);
    host_pages pages(from, page_pool::no_budget, &memory);
    sequence s = pages.cache().new_sequence();
    if (status r = offload(from, id, s, stream); !r) return r;
    kvq::save(s, std::forward<To>(to), options);
    return {};
}

/// from: a path, or a callable read(void*, std::size_t) -> std::size_t.
template <class From>
status restore(cache& to, From&& from, const restore_options& options, sequence_id& made,
               cudaStream_t stream) {
    if (options.convert)
        return detail::bad_value("pages come to a device as they were saved: convert them in a CPU cache");
    pinned_memory pinned;
    std::pmr::monotonic_buffer_resource memory(std::size_t{1} << 24, &pinned);
    host_pages pages(to, page_pool::no_budget, &memory);
    const sequence s = kvq::restore(pages.cache(), std::forward<From>(from), options);
    return onload(s, to, made, stream);
}

}}}  // namespace kvq::cuda
