// tagged_vector: std::vector for code that is compiled for several instruction sets.
//
// A function of std::vector has no name of an instruction set, so objects of several share one copy,
// whichever the linker keeps (config.hpp, KVQ_TAGGED). The name of this allocator has one, and so have the
// functions of a vector that takes its memory with it. resource_vector would do, but schemes need no memory
// resource, and <memory_resource> takes long to compile.
// Contract: a std::vector in all else, of types that operator new aligns. Algorithms of std over float and
// double have no such name either, and copies are assigned with one of them: code for an instruction set has
// loops and copy constructors (tests/link).
#pragma once

#include <cstddef>
#include <new>
#include <utility>
#include <vector>

#include "../config.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

template <class T>
struct tagged_allocator {
    using value_type = T;

    tagged_allocator() = default;
    template <class U>
    tagged_allocator(const tagged_allocator<U>&) noexcept {}

    T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T))); }
    void deallocate(T* data, std::size_t) noexcept { ::operator delete(data); }
    // Here, since std::construct_at has no name of an instruction set.
    template <class... Arguments>
    void construct(T* at, Arguments&&... arguments) {
        ::new (static_cast<void*>(at)) T(std::forward<Arguments>(arguments)...);
    }

    template <class U>
    bool operator==(const tagged_allocator<U>&) const noexcept {
        return true;
    }
};

template <class T>
using tagged_vector = std::vector<T, tagged_allocator<T>>;

/// For code of KVQ_COMMON, which no kernel shares where the library holds it.
#if defined(KVQ_COMPILED)
template <class T>
using common_vector = std::vector<T>;
#else
template <class T>
using common_vector = tagged_vector<T>;
#endif

}}}  // namespace kvq::detail
