// Allocators, workspaces and executors of the C interface.
#include "objects.hpp"

namespace kvq::c {

caller_memory::caller_memory(const kvq_allocator* allocator)
    : functions_(read_optional(allocator, "allocator")) {
    expect(allocator == nullptr || (functions_.allocate != nullptr && functions_.deallocate != nullptr),
           KVQ_ERROR_HANDLE, "an allocator needs both functions, allocate and deallocate");
}

void* caller_memory::do_allocate(std::size_t bytes, std::size_t alignment) {
    if (functions_.allocate == nullptr) return std::pmr::new_delete_resource()->allocate(bytes, alignment);
    void* const memory = functions_.allocate(functions_.user, bytes, alignment);
    if (memory == nullptr) throw std::bad_alloc();
    if (reinterpret_cast<std::uintptr_t>(memory) % alignment == 0) return memory;
    functions_.deallocate(functions_.user, memory, bytes, alignment);
    fail(KVQ_ERROR_CALLBACK, "the allocator returned memory for ", bytes, " bytes that is not aligned to ",
         alignment);
}

void caller_memory::do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) {
    if (functions_.deallocate == nullptr)
        std::pmr::new_delete_resource()->deallocate(memory, bytes, alignment);
    else
        functions_.deallocate(functions_.user, memory, bytes, alignment);
}

executor_view executor_of(kvq_executor* executor) {
    static const serial_executor serial;
    if (executor == nullptr) return serial;
    return get(executor, "executor").threads;
}

}  // namespace kvq::c

using namespace kvq::c;

extern "C" {

kvq_status kvq_workspace_create(const kvq_allocator* allocator, size_t bytes, kvq_workspace** out) {
    return guard([&] {
        place(out, "out");
        kvq_workspace* const made = make<kvq_workspace>(allocator);
        try {
            if (bytes > 0) made->space.reserve(bytes);
        } catch (...) {
            free_handle(made, "workspace");
            throw;
        }
        *out = made;
    });
}

kvq_status kvq_workspace_free(kvq_workspace* workspace) { return free_handle(workspace, "workspace"); }

kvq_status kvq_workspace_reserve(kvq_workspace* workspace, size_t bytes) {
    return guard([&] { get(workspace, "workspace").space.reserve(bytes); });
}

kvq_status kvq_workspace_bytes(const kvq_workspace* workspace, size_t* bytes) {
    return guard([&] { place(bytes, "bytes") = get(workspace, "workspace").space.size(); });
}

kvq_status kvq_executor_create(const kvq_executor_callbacks* callbacks, kvq_executor** out) {
    return guard([&] {
        place(out, "out");
        const kvq_executor_callbacks c = read_struct(callbacks, "callbacks");
        expect(c.parallel_for != nullptr, KVQ_ERROR_HANDLE, "an executor needs parallel_for");
        expect(c.concurrency >= 1, KVQ_ERROR_ARGUMENT, "an executor runs at least 1 task at once, got ",
               c.concurrency);
        *out = make<kvq_executor>(c);
    });
}

kvq_status kvq_executor_create_threads(int32_t threads, kvq_executor** out) {
    return guard([&] {
        place(out, "out");
        *out = make<kvq_executor>(threads);
    });
}

kvq_status kvq_executor_free(kvq_executor* executor) { return free_handle(executor, "executor"); }
}
