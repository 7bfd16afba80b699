// Handles of the C interface, and the way from a C++ error to a status.
//
//   struct kvq_cache : kvq::c::handle<kvq_cache> { ... };        a handle; kvq_cache::word says which kind it
//                                                                is
//   return guard([&] { cache& of = get(handle, "cache"); ... });   every function of kvq.h
//
// A handle begins with a word that names its kind. The memory of a freed handle is used for handles of the
// same kind alone, and not before `resting` others have been freed: so a call with a freed handle reads a
// word that says so, in all builds.
#pragma once

#include <kvq/kvq.h>

#include <atomic>
#include <cstdint>
#include <kvq/core/error.hpp>
#include <memory>
#include <mutex>
#include <utility>

namespace kvq::c {

// Of the two namespaces of this name (config.hpp); it shows the names of both.
namespace detail = KVQ_TAGGED::detail;

/// An error with a status of its own. The message is one sentence.
struct failure {
    kvq_status status;
    short_text message;
};

template <class... Parts>
[[noreturn]] void fail(kvq_status status, const Parts&... parts) {
    short_text message = "kvq: ";
    ((message += detail::to_text(parts)), ...);
    throw failure{status, message};
}
template <class... Parts>
void expect(bool condition, kvq_status status, const Parts&... parts) {
    if (!condition) [[unlikely]]
        fail(status, parts...);
}

/// Called in a catch block: keeps the message of the current exception for kvq_last_error() and returns its
/// status. of_errors: the status of kvq::error.
kvq_status report(kvq_status of_errors) noexcept;

/// Runs the body of a function of kvq.h.
template <class F>
kvq_status guard(F&& f, kvq_status of_errors = KVQ_ERROR_ARGUMENT) noexcept {
    try {
        f();
        return KVQ_OK;
    } catch (...) {
        return report(of_errors);
    }
}

/// Freed handles of one size, the oldest one first.
class handle_memory {
public:
    explicit handle_memory(std::size_t bytes) noexcept : bytes_(bytes) {}
    void* take();
    /// The word at the address is already that of a freed handle.
    void put(void* memory) noexcept;

private:
    static constexpr std::size_t resting = 256;
    struct freed {
        std::uint32_t word;
        freed* next;
    };
    std::size_t bytes_;
    std::mutex mutex_;
    freed* first_ = nullptr;
    freed* last_ = nullptr;
    std::size_t count_ = 0;
};

inline constexpr std::uint32_t freed_word = 0x66766b00;

template <class T>
struct handle {
    std::atomic<std::uint32_t> word_{T::word};

    static handle_memory& handles() {
        // Never destroyed, so that handles may be freed while the program ends.
        static handle_memory& all = *new handle_memory(sizeof(T));
        return all;
    }
};

/// A new handle.
template <class T, class... Args>
T* make(Args&&... args) {
    static_assert(alignof(T) <= alignof(std::max_align_t));
    void* const memory = T::handles().take();
    try {
        return ::new (memory) T(std::forward<Args>(args)...);
    } catch (...) {
        ::new (memory) std::atomic<std::uint32_t>(freed_word);
        T::handles().put(memory);
        throw;
    }
}

/// Raises a failure unless the handle is one that is in use. name: that of the parameter.
template <class T>
void expect_handle(const T* h, const char* name) {
    expect(h != nullptr, KVQ_ERROR_HANDLE, name, " is NULL");
    expect(reinterpret_cast<std::uintptr_t>(h) % alignof(T) == 0, KVQ_ERROR_HANDLE, name, " is no handle");
    const std::uint32_t word = reinterpret_cast<const std::atomic<std::uint32_t>*>(h)->load();
    expect(word != freed_word, KVQ_ERROR_HANDLE, name, " was freed before this call");
    expect(word == T::word, KVQ_ERROR_HANDLE, name, " is no handle of a ", T::kind);
}
template <class T>
T& get(T* h, const char* name) {
    expect_handle(h, name);
    return *h;
}

template <class T>
kvq_status free_handle(T* h, const char* name) noexcept {
    return guard([&] {
        if (h == nullptr) return;
        expect_handle(h, name);
        // Of two threads that free one handle, one gets here.
        std::uint32_t word = T::word;
        expect(h->word_.compare_exchange_strong(word, freed_word), KVQ_ERROR_HANDLE, name,
               " was freed before this call");
        std::destroy_at(h);
        ::new (static_cast<void*>(h)) std::atomic<std::uint32_t>(freed_word);
        T::handles().put(h);
    });
}

/// What is not NULL: data of the caller, or a place for a result.
inline void expect_data(const void* data, const char* name) {
    expect(data != nullptr, KVQ_ERROR_HANDLE, name, " is NULL");
}
template <class T>
T& place(T* to, const char* name) {
    expect(to != nullptr, KVQ_ERROR_HANDLE, name, " is NULL");
    return *to;
}

}  // namespace kvq::c
