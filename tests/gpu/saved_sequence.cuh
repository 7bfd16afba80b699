// Files and messages of sequences, written and read by a cache on the device and by one on the CPU.
#pragma once

#include <kvq/cuda/host/save.hpp>
#include <kvq/io/page_transfer.hpp>

#include "support.cuh"

namespace test {

/// A sink, and a source of what went into it.
struct file_bytes {
    std::vector<std::byte> data;

    void operator()(const void* from, std::size_t n) {
        const auto* const p = static_cast<const std::byte*>(from);
        data.insert(data.end(), p, p + n);
    }
    auto read() const {
        return [this, at = std::size_t{0}](void* to, std::size_t n) mutable {
            n = std::min(n, data.size() - at);
            std::memcpy(to, data.data() + at, n);
            at += n;
            return n;
        };
    }
};

inline std::vector<std::byte> saved(const kvq::sequence& s) {
    file_bytes file;
    kvq::save(s, file);
    return file.data;
}
inline file_bytes saved(const kvq::cuda::cache& gpu, kvq::cuda::sequence_id id, cudaStream_t stream,
                        const char* name) {
    file_bytes file;
    const kvq::cuda::status s = kvq::cuda::save(gpu, id, file, {}, stream);
    CHECK(s, "%s: save: %s", name, s.message);
    return file;
}

/// Both sides go on with sequences that a file of the device has brought. same_lists: both list the same
/// formats in the same order.
inline void move_by_file(kvq::cuda::cache& gpu, kvq::cuda::sequence_id& id, kvq::cache& cpu,
                         kvq::sequence& host, cudaStream_t stream, const char* name, bool same_lists = true) {
    kvq::sequence moved = cpu.new_sequence();
    kvq::cuda::status s = kvq::cuda::offload(gpu, id, moved, stream);
    CHECK(s, "%s: offload: %s", name, s.message);
    const file_bytes file = saved(gpu, id, stream, name);
    CHECK(!same_lists || file.data == saved(moved), "%s: a file of the device is not that of the CPU", name);
    s = gpu.free(id);
    CHECK(s, "%s: free: %s", name, s.message);
    host = kvq::restore(cpu, file.read());
    file_bytes again;
    kvq::save(host, again);
    CHECK(again.data == saved(moved), "%s: the CPU has restored another sequence", name);
    s = kvq::cuda::restore(gpu, again.read(), {}, id, stream);
    CHECK(s, "%s: restore: %s", name, s.message);
    CHECK(saved(gpu, id, stream, name).data == file.data, "%s: the device has restored another sequence",
          name);
}

/// The device goes on with a sequence whose pages came as messages.
inline void move_by_messages(kvq::cuda::cache& gpu, kvq::cuda::sequence_id& id, cudaStream_t stream,
                             const char* name) {
    kvq::cuda::host_pages here(gpu), there(gpu, std::size_t{1} << 24);
    kvq::sequence sent = here.cache().new_sequence();
    kvq::cuda::status s = kvq::cuda::offload(gpu, id, sent, stream);
    CHECK(s, "%s: offload: %s", name, s.message);
    kvq::page_receiver receiver(there.cache());
    file_bytes messages;
    for (int layer = 0; layer < gpu.layer_count(); ++layer)
        if (there.cache().holds_tokens(layer)) kvq::send_pages(sent, layer, messages);
    std::size_t left = messages.data.size();
    auto source = [read = messages.read(), &left](void* to, std::size_t n) mutable {
        const std::size_t got = read(to, n);
        left -= got;
        return got;
    };
    std::vector<std::byte> storage;
    while (left > 0) receiver.accept(kvq::read_page(source, storage));
    const kvq::sequence came = receiver.finish(gpu.tokens(id));
    CHECK(saved(came) == saved(sent), "%s: messages have brought another sequence", name);
    s = gpu.free(id);
    CHECK(s, "%s: free: %s", name, s.message);
    s = kvq::cuda::onload(came, gpu, id, stream);
    CHECK(s, "%s: onload: %s", name, s.message);
}

}  // namespace test
