// One part of the built-in formats for one instruction set. CMake compiles this file once for each of them:
// KVQ_PART is a number, KVQ_LEVEL an architecture of cpu/arch/arch.hpp, or `best` for the best one that the
// flags allow. KVQ_FORMATS, if it is defined, lists the names, without group sizes, of the wanted formats.
#include <kvq/cpu/simd.hpp>
#include <kvq/format/builtin_kernels.hpp>
#include <kvq/format/builtin_schemes.hpp>
#include <string_view>

#define KVQ_NAME_OF(prefix, level, part) prefix##_##level##_##part
#define KVQ_NAME(prefix, level, part) KVQ_NAME_OF(prefix, level, part)

#define KVQ_OF_ALL_PARTS(prefix)                                                                  \
    prefix template struct kvq::detail::backend_table<kvq::simd<kvq::arch::KVQ_LEVEL>>;           \
    prefix template void kvq::kernels::multiply_turned<kvq::simd<kvq::arch::KVQ_LEVEL>>(          \
        const kvq::kernels::code_plan<8>&, kvq::parameter_source, const std::byte*, const float*, \
        std::ptrdiff_t, float*, std::ptrdiff_t, bool, std::byte*);
#if KVQ_PART > 0 && !defined(KVQ_HAS_FIRST_PART)
KVQ_OF_ALL_PARTS(extern)
#endif

// Its name says the part, since several parts may be one translation unit.
static constexpr bool KVQ_NAME(kvq_wants, KVQ_LEVEL, KVQ_PART)(std::string_view name) {
#if defined(KVQ_FORMATS)
    for (const std::string_view wanted : {KVQ_FORMATS})
        if (name == wanted) return true;
    return false;
#else
    return kvq::detail::every_format(name);
#endif
}

// Entries cross one by one through a function with C linkage: the type of a list belongs to one instruction
// set.
extern "C" void KVQ_NAME(kvq_builtin, KVQ_LEVEL,
                         KVQ_PART)(void* list, void (*add)(void* list, const kvq::builtin_format* entry)) {
    kvq::detail::builtin_list entries;
    kvq::detail::add_builtin_part<kvq::simd<kvq::arch::KVQ_LEVEL>, KVQ_PART,
                                  KVQ_NAME(kvq_wants, KVQ_LEVEL, KVQ_PART)>(entries);
    for (const kvq::builtin_format& entry : entries) add(list, &entry);
}

extern "C" void KVQ_NAME(kvq_kernels, KVQ_LEVEL,
                         KVQ_PART)(void* list, void (*add)(void* list, const kvq::codec_kernels* entry)) {
    kvq::detail::add_kernels<kvq::simd<kvq::arch::KVQ_LEVEL>, KVQ_PART>(list, add);
}

// What all parts need is compiled with the first one, which every library has. Several parts may be one
// translation unit.
#if KVQ_PART == 0
#define KVQ_HAS_FIRST_PART
KVQ_OF_ALL_PARTS()

extern "C" const kvq::kernel_vectors* KVQ_NAME(kvq_vectors, KVQ_LEVEL, KVQ_PART)() {
    return &kvq::detail::vectors_of<kvq::simd<kvq::arch::KVQ_LEVEL>>::functions;
}
#endif
