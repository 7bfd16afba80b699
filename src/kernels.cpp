// The kernels of kvq::library for schemes of a program (cpu/library_kernels.hpp), of the instruction set that
// builtin_formats.cpp takes, too.
#include <kvq/core/error.hpp>
#include <kvq/cpu/arch/arch.hpp>
#include <kvq/cpu/kernel_table.hpp>
#include <vector>

#include "kvq_levels.inc"

using add_kernels = void (*)(void*, const kvq::codec_kernels*);

#define KVQ_DECLARE_KERNELS_OF(level, part) extern "C" void kvq_kernels_##level##_##part(void*, add_kernels);
#define KVQ_DECLARE_KERNELS(level) KVQ_PARTS(KVQ_DECLARE_KERNELS_OF, level)
KVQ_LEVELS(KVQ_DECLARE_KERNELS)
#define KVQ_DECLARE_VECTORS(level) extern "C" const kvq::kernel_vectors* kvq_vectors_##level##_0();
KVQ_LEVELS(KVQ_DECLARE_VECTORS)

namespace {

using kernel_list = std::vector<kvq::codec_kernels>;

/// Of the best instruction set of the CPU.
struct library_level {
    const kvq::kernel_vectors* vectors = nullptr;
    kernel_list kernels;
};

const library_level& best_level() {
    static const library_level best = [] {
        library_level of;
        const add_kernels add = [](void* to, const kvq::codec_kernels* entry) {
            static_cast<kernel_list*>(to)->push_back(*entry);
        };
#define KVQ_ADD_KERNELS_OF(level, part) kvq_kernels_##level##_##part(&of.kernels, add);
#define KVQ_ADD_KERNELS(level)                  \
    if (kvq::arch::level::available()) {        \
        of.vectors = kvq_vectors_##level##_0(); \
        KVQ_PARTS(KVQ_ADD_KERNELS_OF, level)    \
        return of;                              \
    }
        KVQ_LEVELS(KVQ_ADD_KERNELS)
        return of;
    }();
    return best;
}

bool same_widths(const kvq::codec_spec& a, const kvq::codec_spec& b) {
    if (a.width_count != b.width_count) return false;
    for (int i = 0; i < a.width_count; ++i)
        if (a.widths[i] != b.widths[i]) return false;
    return true;
}

}  // namespace

const kvq::kernel_vectors& kvq::library_vectors() {
    common::expect(best_level().vectors != nullptr,
                   "kvq::library has no kernels for this CPU: build it with a weaker instruction set in "
                   "KVQ_LIBRARY_LEVELS");
    return *best_level().vectors;
}

const kvq::product_functions* kvq::library_product(const codec_spec& codec) {
    const auto is_table = [](const codec_spec& c) { return c.levels == level_kind::table; };
    for (const codec_kernels& k : best_level().kernels)
        if (k.product && k.of.reading == codec.reading && same_widths(k.of, codec) &&
            is_table(k.of) == is_table(codec) &&
            (codec.reading != block_reading::values || k.of.value_type == codec.value_type))
            return k.product;
    return nullptr;
}

const kvq::group_functions* kvq::library_groups(const codec_spec& codec) {
    for (const codec_kernels& k : best_level().kernels)
        if (k.groups && same_widths(k.of, codec) && k.of.levels == codec.levels &&
            k.of.per_token == codec.per_token)
            return k.groups;
    return nullptr;
}

const kvq::channel_functions* kvq::library_channels(const codec_spec& codec) {
    for (const codec_kernels& k : best_level().kernels)
        if (k.channels && same_widths(k.of, codec)) return k.channels;
    return nullptr;
}
