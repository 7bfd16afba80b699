// Handles of kvq.h with an owner, statuses as exceptions, structs with their size set.
//
//   class sequence : public detail::owner<kvq_sequence, kvq_sequence_free> ...    frees the handle; moves, does not copy
//   sequence s(kvq_sequence_create, cache.get());                                 the handle that a function makes
//   detail::ask<size_t>(kvq_sequence_append_bytes, s.get(), n)                    what a function writes to its last parameter
//
// Contract: any status but KVQ_OK is raised with the message of kvq_last_error(). library.hpp is made of these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "../core/error.hpp"
#include "../kvq.h"

namespace kvq { inline namespace v0_3 {

/// What a function of the compiled library reported.
class library_error : public argument_error {
public:
    KVQ_NO_COPY library_error(kvq_status status, const char* message)
        : argument_error(message), status_(status) {}
    KVQ_NO_COPY kvq_status status() const noexcept { return status_; }

private:
    kvq_status status_;
};

}}  // namespace kvq

namespace kvq { inline namespace KVQ_TAGGED { namespace library {

namespace detail {

/// Raises what a status says.
inline void check(kvq_status status) {
    if (status == KVQ_OK) [[likely]]
        return;
    if (status == KVQ_ERROR_MEMORY) kvq::detail::raise<out_of_memory>(kvq_last_error());
    kvq::detail::raise<library_error>(status, kvq_last_error());
}

template <class T>
concept with_size = std::is_class_v<T> && requires(T& t) {
    t.size = sizeof(T);
};

/// The struct with its size set, for functions that take it.
template <with_size T>
T* sized(T& t) noexcept {
    t.size = sizeof(T);
    return &t;
}

/// Entries of a list that a function takes.
template <class T>
int32_t count(std::span<T> list) {
    constexpr size_t most = INT32_MAX;
    kvq::detail::expect(list.size() <= most, "a list of ", list.size(), " entries is longer than ", most);
    return static_cast<int32_t>(list.size());
}

/// The result that a function writes to its last parameter.
template <class Result, class... Parameters, class... Arguments>
Result ask(kvq_status (*f)(Parameters...), Arguments... arguments) {
    Result result{};
    if constexpr (with_size<Result>) sized(result);
    check(f(arguments..., &result));
    return result;
}

/// Owns a handle.
template <class Handle, kvq_status (*Free)(Handle*)>
class owner {
public:
    /// Takes over a handle of kvq.h, or NULL.
    explicit owner(Handle* handle) noexcept : handle_(handle) {}
    /// The handle that a function of kvq.h makes.
    template <class... Parameters, class... Arguments>
    owner(kvq_status (*f)(Parameters...), Arguments... arguments)
        : handle_(detail::ask<Handle*>(f, arguments...)) {}
    owner(owner&& other) noexcept : handle_(other.release()) {}
    owner& operator=(owner&& other) noexcept {
        if (this != &other) {
            Free(handle_);
            handle_ = other.release();
        }
        return *this;
    }

    Handle* get() const noexcept { return handle_; }
    /// The handle, which is then the caller's to free.
    [[nodiscard]] Handle* release() noexcept { return std::exchange(handle_, nullptr); }
    explicit operator bool() const noexcept { return handle_ != nullptr; }

protected:
    ~owner() { Free(handle_); }

    /// f(handle, arguments...), with a result or without one.
    template <class F, class... Arguments>
    void call(F* f, Arguments... arguments) const {
        check(f(handle_, arguments...));
    }
    template <class Result, class F, class... Arguments>
    Result ask(F* f, Arguments... arguments) const {
        return detail::ask<Result>(f, handle_, arguments...);
    }

private:
    Handle* handle_;
};

}  // namespace detail

/// A struct of kvq.h after KVQ_INIT. Functions below set `size` themselves: kvq_attend_options{.mods = &mods} will do as well.
template <detail::with_size Struct>
struct initialized : Struct {
    initialized() noexcept : Struct{} { KVQ_INIT(static_cast<Struct&>(*this)); }
};

}}}  // namespace kvq::library
