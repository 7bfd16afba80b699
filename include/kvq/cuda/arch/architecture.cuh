// What kernels may know of an architecture, and the one function that chooses a kernel for a device.
//
//   sm_80 ... sm_120               what the devices of each have: shared memory, features
//   targets()                      of which kinds are the architectures that this program is compiled for?
//   shared_memory_budget<Pair>   what thread blocks take where they have a choice
//   with_kernel(list, rows, f)     calls f with the first kernel of a list that the current device runs, and
//                                  can say why it is this one
//
// Contract: whatever depends on an architecture stands in this folder: numbers here, instructions in ptx.cuh
// and wgmma.cuh. A kernel has at most two sizes, one for devices of little shared memory and one for others
// (two_sizes), and may need features.
// A new architecture is one value here, in the order of capabilities. What only its code may contain gets a
// macro as KVQ_WARPGROUP_PRODUCTS.
// Source: CUDA C++ Programming Guide, "Compute Capabilities".
#pragma once

#include <cuda_runtime_api.h>

#include <cstdarg>
#include <cstdio>
#include <type_traits>

#include "../../config.hpp"

/// Does the code that is being compiled have warpgroup products? Only the target sm_90a knows them;
/// __CUDA_ARCH_LIST__ and __CUDA_ARCH__ say 900 for sm_90 too.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KVQ_WARPGROUP_PRODUCTS 1
#else
#define KVQ_WARPGROUP_PRODUCTS 0
#endif

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

struct feature {
    enum : unsigned {
        early_launch = 1,        // programmatic dependent launch
        clusters = 2,            // thread blocks that see each other's shared memory
        bulk_copies = 4,         // copies of any size that a barrier counts
        warpgroup_products = 8,  // wgmma, and registers moved between warpgroups
    };
    static constexpr unsigned since_90 = early_launch | clusters | bulk_copies;
};

struct architecture {
    const char* target;  // which the compiler must be told for all of its features
    int capability;      // the first compute capability that is such: 100 major + 10 minor
    int shared_memory;   // of a thread block, in bytes
    unsigned features;
};

inline constexpr architecture sm_80{"sm_80", 800, 163 * 1024, 0};
inline constexpr architecture sm_86{"sm_86", 860, 99 * 1024, 0};
inline constexpr architecture sm_87{"sm_87", 870, 163 * 1024, 0};
inline constexpr architecture sm_89{"sm_89", 890, 99 * 1024, 0};
inline constexpr architecture sm_90a{"sm_90a", 900, 227 * 1024,
                                     feature::since_90 | feature::warpgroup_products};
inline constexpr architecture sm_100{"sm_100", 1000, 227 * 1024, feature::since_90};
inline constexpr architecture sm_120{"sm_120", 1200, 99 * 1024, feature::since_90};

/// In the order of capabilities. All keep 1 KB of shared memory for themselves per thread block, and give 48
/// KB to launches that ask for no more.
inline constexpr architecture architectures[] = {sm_80, sm_86, sm_87, sm_89, sm_90a, sm_100, sm_120};
inline constexpr int reserved_shared_memory = 1024, default_shared_memory = 48 * 1024;

/// Of a compute capability: the newest known one that is not newer.
constexpr architecture architecture_of(int capability) noexcept {
    architecture found = architectures[0];
    for (const architecture& a : architectures)
        if (a.capability <= capability) found = a;
    return found;
}

/// Shared memory of a thread block of the devices that have least (Small) or most: what the two sizes of a
/// kernel are made for.
template <bool Small>
inline constexpr int most_shared_memory = [] {
    int bytes = architectures[0].shared_memory;
    for (const architecture& a : architectures)
        if (Small ? a.shared_memory < bytes : a.shared_memory > bytes) bytes = a.shared_memory;
    return bytes;
}();

/// Is the program compiled for devices of little shared memory, and for others? Where the compiler does not
/// say it, for others.
struct target_kinds {
    bool large, small;
};
constexpr target_kinds targets() noexcept {
#ifdef __CUDA_ARCH_LIST__
    target_kinds kinds{false, false};
    for (const int target : {__CUDA_ARCH_LIST__})
        (architecture_of(target).shared_memory == most_shared_memory<true> ? kinds.small : kinds.large) =
            true;
    return kinds;
#else
    return {true, false};
#endif
}

/// Does a kernel whose blocks take so many bytes where they have a choice come in two sizes, of which the
/// host takes the right one?
template <int Bytes>
inline constexpr bool two_sizes = (targets().large && targets().small && Bytes > most_shared_memory<true>);

/// Is this code for devices that never take a kernel of this size? Its kernel is left empty then. Code for
/// sm_90a runs on no other device; other code may run on later devices of either kind.
template <bool Small, int Bytes>
inline constexpr bool never_taken = (KVQ_WARPGROUP_PRODUCTS != 0 && Small && two_sizes<Bytes>);

/// The bound of a kernel with warpgroup products. Where it is empty, its bound is one warp: a
/// kernel's `maxThreadsPerBlock` is that of the code which the driver has loaded.
template <int Threads>
inline constexpr int warpgroup_threads = KVQ_WARPGROUP_PRODUCTS ? Threads : 32;

/// Do the registers that producers leave suffice for what consumers take? The block has a multiprocessor to
/// itself, and its threads start with the same number. A warpgroup that takes more waits forever.
template <class Shape>
inline constexpr bool registers_suffice = [] {
    constexpr int warps = Shape::producer_warps + Shape::consumer_warps,
                  at_start = 65536 / 32 / warps / 8 * 8;
    return Shape::producer_warps * Shape::producer_registers +
               Shape::consumer_warps * Shape::consumer_registers <=
           warps * at_start;
}();

}  // namespace detail

/// Shared memory that a thread block may take where it has a choice, in bytes: what compute capability 8.0
/// has. (9.0 and 10.0 have more, which hardly ever helps.) Programs may specialize it for their formats.
/// Devices that have less take what they have.
template <class Pair>
inline constexpr int shared_memory_budget = detail::sm_80.shared_memory;

/// The kernel that a call takes on the current device. attend_kernel() and prefill_kernel() find it.
struct kernel_choice {
    const char* kernel = "";  ///< its name; empty if the device runs none of them
    int query_rows = 0;       ///< of a thread block
    int shared_memory = 0;    ///< of a thread block, in bytes
    char why[448] = "";  ///< what the device has, and what the kernels lack that would have been preferred
};

namespace detail {

/// The budget on devices of little shared memory, or of enough.
template <class Pair, bool Small>
inline constexpr int budget_on =
    shared_memory_budget<Pair> < most_shared_memory<Small> ? shared_memory_budget<Pair>
                                                           : most_shared_memory<Small>;
/// On all devices that the program is compiled for.
template <class Pair>
inline constexpr int common_budget = budget_on<Pair, targets().small>;

/// Of the current device: 100 major + 10 minor; 0 if there is none.
inline int compute_capability() noexcept {
    int device = 0, major = 0, minor = 0;
    if (cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess)
        return 100 * major + 10 * minor;
    (void)cudaGetLastError();
    return 0;
}
/// Of a thread block on the current device, in bytes; 0 if there is none.
inline int device_shared_memory() noexcept {
    int device = 0, bytes = 0;
    if (cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess)
        return bytes;
    (void)cudaGetLastError();
    return 0;
}
/// Which of these features does a device of this capability lack?
constexpr unsigned lacks(int capability, unsigned features) noexcept {
    return capability == 0 ? features : features & ~architecture_of(capability).features;
}

/// What a kernel is and needs.
struct kernel_facts {
    const char* name;
    int query_rows;      // of a thread block
    int more_rows_than;  // it is taken for more query rows than these
    int shared_memory;   // of a thread block, in bytes
    int device_memory;   // it is for devices whose thread blocks may have so much
    int threads = 0;     // of a thread block, where it needs features
    unsigned features = 0;
};

/// Kernels of one purpose, the preferred one first. A Kernel has `facts` and `kernel`, the function.
template <class... Kernels>
struct kernel_list {};

template <class First, class Second>
struct joined_lists;
template <class... First, class... Second>
struct joined_lists<kernel_list<First...>, kernel_list<Second...>> {
    using type = kernel_list<First..., Second...>;
};
template <class First, class Second>
using joined = typename joined_lists<First, Second>::type;

/// Those of both sizes, or those of the one that the program's targets take. Bytes: as in two_sizes.
template <int Bytes, class Large, class Small>
using both_sizes = std::conditional_t<two_sizes<Bytes> && !std::is_same_v<Large, Small>, joined<Large, Small>,
                                      std::conditional_t<targets().small, Small, Large>>;

/// Adds a part of a sentence; what does not fit is left out.
inline void add_words(kernel_choice& choice, const char* format, ...) noexcept {
    std::size_t length = 0;
    while (choice.why[length] != 0) ++length;
    std::va_list arguments;
    va_start(arguments, format);
    (void)std::vsnprintf(choice.why + length, sizeof choice.why - length, format, arguments);
    va_end(arguments);
}
inline const char* word_of(unsigned features) noexcept {
    return features & feature::warpgroup_products ? "warpgroup products"
           : features & feature::clusters         ? "clusters of thread blocks"
           : features & feature::bulk_copies      ? "bulk copies"
                                                  : "early launches";
}

struct device_facts {
    int capability, shared_memory;
};

/// Does the device not run this kernel? `choice`, unless null, gets the reason.
template <class Kernel>
bool refuses(const device_facts& device, kernel_choice* choice) noexcept {
    constexpr kernel_facts facts = Kernel::facts;
    const auto because = [&](const char* format, auto... numbers) {
        if (choice != nullptr) {
            add_words(*choice, "; %s with %d query rows needs ", facts.name, facts.query_rows);
            add_words(*choice, format, numbers...);
        }
        return true;
    };
    if (const unsigned missing = lacks(device.capability, facts.features); missing != 0)
        return because("%s", word_of(missing));
    if (facts.device_memory > device.shared_memory) return because("%d KB", facts.device_memory / 1024);
    if constexpr (facts.features != 0) {
        cudaFuncAttributes loaded{};
        if (cudaFuncGetAttributes(&loaded, Kernel::kernel) != cudaSuccess) (void)cudaGetLastError();
        if (loaded.maxThreadsPerBlock < facts.threads)
            return because("code for %s, which this program does not have",
                           architecture_of(device.capability).target);
    }
    return false;
}

template <class First, class... Others, class F>
auto with_first_kernel(const device_facts& device, int rows, kernel_choice* choice, F&& f) {
    constexpr kernel_facts facts = First::facts;
    if constexpr (sizeof...(Others) > 0) {
        if (rows <= facts.more_rows_than || refuses<First>(device, choice))
            return with_first_kernel<Others...>(device, rows, choice, f);
    } else {
        if (choice != nullptr && refuses<First>(device, choice)) return f(First{});
    }
    if (choice != nullptr) {
        choice->kernel = facts.name;
        choice->query_rows = facts.query_rows;
        choice->shared_memory = facts.shared_memory;
    }
    return f(First{});
}

/// Calls f with the first kernel of the list that is for so many query rows and that the current device runs.
/// With the last one if there is none: its launch says what it lacks. `choice`, unless null, gets what was
/// chosen and why.
template <class... Kernels, class F>
auto with_kernel(kernel_list<Kernels...>, int rows, F&& f, kernel_choice* choice = nullptr) {
    const device_facts device{compute_capability(), device_shared_memory()};
    if (choice != nullptr) {
        *choice = {};
        add_words(*choice, "compute capability %d.%d has %d KB of shared memory per thread block",
                  device.capability / 100, device.capability / 10 % 10, device.shared_memory / 1024);
    }
    return with_first_kernel<Kernels...>(device, rows, choice, f);
}

}  // namespace detail
}}}  // namespace kvq::cuda
