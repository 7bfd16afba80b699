// The list of built-in formats for the CPU that the program runs on. kvq_levels.inc, which CMake writes,
// defines
//   KVQ_LEVELS(X)          X(level) of every instruction set in the library, the best one first
//   KVQ_PARTS(X, level)    X(level, part) of every part of the formats (format/builtin_schemes.hpp)
#include <kvq/cpu/arch/arch.hpp>
#include <kvq/format/builtin_format.hpp>
#include <vector>

#include "kvq_levels.inc"

using add_entry = void (*)(void*, const kvq::builtin_format*);

#define KVQ_DECLARE_PART(level, part) extern "C" void kvq_builtin_##level##_##part(void*, add_entry);
#define KVQ_DECLARE(level) KVQ_PARTS(KVQ_DECLARE_PART, level)
KVQ_LEVELS(KVQ_DECLARE)

namespace {

using format_vector = std::vector<kvq::builtin_format>;

format_vector make_list() {
    format_vector list;
    const add_entry add = [](void* to, const kvq::builtin_format* entry) {
        static_cast<format_vector*>(to)->push_back(*entry);
    };
#define KVQ_ADD_PART(level, part) kvq_builtin_##level##_##part(&list, add);
#define KVQ_ADD(level)                   \
    if (kvq::arch::level::available()) { \
        KVQ_PARTS(KVQ_ADD_PART, level)   \
        return list;                     \
    }
    KVQ_LEVELS(KVQ_ADD)
    return list;
}

}  // namespace

const kvq::builtin_format* kvq::builtin_formats(std::size_t* count) {
    static const format_vector list = make_list();
    *count = list.size();
    return list.data();
}
