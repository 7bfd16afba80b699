// One part of the built-in formats for one instruction set. CMake compiles this file once for each of them: KVQ_PART is a number,
// KVQ_LEVEL an architecture of backends/simd/arch.hpp, or `best` for the best one that the flags allow.
#include <kvq/backends/simd.hpp>
#include <kvq/format/builtin_schemes.hpp>

#define KVQ_NAME_OF(level, part) kvq_builtin_##level##_##part
#define KVQ_NAME(level, part) KVQ_NAME_OF(level, part)

// Entries cross one by one through a function with C linkage: the type of a list belongs to one instruction set.
extern "C" void KVQ_NAME(KVQ_LEVEL, KVQ_PART)(void* list,
                                              void (*add)(void* list, const kvq::builtin_format* entry)) {
    kvq::detail::builtin_list entries;
    kvq::detail::add_builtin_part<kvq::simd<kvq::arch::KVQ_LEVEL>, KVQ_PART>(entries);
    for (const kvq::builtin_format& entry : entries) add(list, &entry);
}
