// A program for devices of little and of much shared memory: the host takes the kernels that were made for
// the current one.
#ifndef __CUDACC__  // emulated, see scripts/gpu-test; otherwise nvcc lists what it compiles for
#define __CUDA_ARCH_LIST__ 800, 890
#endif
#include <kvq/cuda/quantize/pages.cuh>

#include "attention_test.cuh"

using namespace kvq;

namespace {

using eight_bits = cuda::block_pair<int8, int8, 128, 64>;
using preset = cuda::preset_pair<low3, 128>;

static_assert(cuda::detail::two_sizes<cuda::shared_memory_budget<eight_bits>> &&
              cuda::detail::two_sizes<cuda::shared_memory_budget<preset>>);
static_assert(!cuda::detail::two_sizes<99 * 1024>);  // fits everywhere
template <class Format, int Rows4>
constexpr int bytes_on_small = cuda::detail::attention_memory<Format, Rows4, true>::bytes;
static_assert(bytes_on_small<eight_bits, 1> <= 99 * 1024 && bytes_on_small<preset, 2> <= 99 * 1024 &&
              cuda::detail::attention_memory<eight_bits, 1>::bytes > 99 * 1024);

/// Kernels that commit pages have a list of sequences beside what quantizing takes.
template <class Format>
constexpr bool commits_on_small = cuda::detail::page_quantizer<Format>::shared_bytes + 4 * (16 + 512) <=
                                  99 * 1024;
static_assert(commits_on_small<cuda::preset_pair<std4, 256>> &&
              commits_on_small<cuda::preset_pair<low2, 256>> &&
              commits_on_small<cuda::preset_pair<hi6, 96, 256>>);

/// Attention over a window and pages of this format: a block of 8 warps, which can be 4 teams.
template <class Format, int Rows4>
constexpr bool fills_blocks = [] {
    using window = cuda::block_pair<full<float16>, full<float16>, 128, Format::page_tokens>;
    using memory = cuda::detail::mixed_memory<Rows4, false, window, Format>;
    return memory::warps == 8 && memory::most_teams == 4 &&
           memory::bytes <= cuda::shared_memory_budget<Format>;
}();
template <class Preset>
constexpr bool fills_both =
    fills_blocks<cuda::preset_pair<Preset, 128>, 1>&& fills_blocks<cuda::preset_pair<Preset, 128>, 2>;
static_assert(fills_both<std4> && fills_both<mix4> && fills_both<low3> && fills_both<low2>);

/// What stands in the C++ Programming Guide of a compute capability, and of those without a line of their
/// own.
constexpr bool has(int capability, int shared_memory, bool early_launch, bool warpgroup_products) {
    const cuda::detail::architecture a = cuda::detail::architecture_of(capability);
    return a.shared_memory == shared_memory * 1024 &&
           (cuda::detail::lacks(capability, cuda::detail::feature::early_launch) == 0) == early_launch &&
           (cuda::detail::lacks(capability, cuda::detail::feature::warpgroup_products) == 0) ==
               warpgroup_products;
}
static_assert(has(800, 163, false, false) && has(860, 99, false, false) && has(870, 163, false, false) &&
              has(890, 99, false, false) && has(900, 227, true, true) && has(1000, 227, true, false) &&
              has(1030, 227, true, false) && has(1200, 99, true, false) && has(1210, 99, true, false));

/// The kernel and the reason that a user reads. large: has the device the budget of every format?
template <class Format>
void check_choice(int rows, bool large) {
    using memory = cuda::detail::attention_memory<Format, 1>;
    using small_memory = cuda::detail::attention_memory<Format, 1, true>;
    const cuda::kernel_choice choice = cuda::attend_kernel<Format, float16>(rows);
    CHECK(choice.kernel == std::string("attend_warps_kernel"), "kernel %s: %s", choice.kernel, choice.why);
    CHECK(choice.query_rows >= rows || choice.query_rows == 16, "%d rows for %d", choice.query_rows, rows);
    if (choice.query_rows == 4)
        CHECK(choice.shared_memory == (large ? memory::bytes : small_memory::bytes), "%d bytes",
              choice.shared_memory);
    const bool says_why = std::strstr(choice.why, "attend_warps_kernel with ") != nullptr;
    CHECK(says_why == !large, "%s", choice.why);
}
void check_choices() {
    const int bytes = cuda::detail::device_shared_memory();
    for (const int rows : {1, 4, 5, 8, 9, 40}) {
        check_choice<eight_bits>(rows, bytes >= cuda::shared_memory_budget<eight_bits>);
        check_choice<preset>(rows, bytes >= cuda::shared_memory_budget<preset>);
    }
    using any = cuda::block_pair<int8, int8, 24, 24>;
    const cuda::kernel_choice slow = cuda::attend_kernel<any, float16>(1);
    CHECK(slow.kernel == std::string("attend_any_kernel") &&
              std::strstr(slow.why, "a head size is not a multiple of 16") != nullptr,
          "24 channels: %s", slow.why);
    const cuda::kernel_choice choice = cuda::attend_kernel<preset, float16>(40);
    std::printf("attend: %s, %d query rows: %s\n", choice.kernel, choice.query_rows, choice.why);
}

void check_formats() {
    test::check_format<eight_bits, float16>("int8, page 64");
    test::check_format<preset, float16>("low3, page 128");
}

}  // namespace

int main() {
    check_choices();
    check_formats();
#ifndef __CUDACC__
    emulated::device_shared_memory = 99 * 1024;  // launches that ask for more fail
    check_choices();
    CHECK(std::strstr(cuda::attend_kernel<preset, float16>(1).why,
                      "compute capability 8.9 has 99 KB of shared memory per thread block; "
                      "attend_warps_kernel with 4 query rows needs 163 KB") != nullptr,
          "%s", (cuda::attend_kernel<preset, float16>(1).why));
    check_formats();
    emulated::device_shared_memory = 16 * 1024;  // no kernel fits
    CHECK((cuda::attend_kernel<preset, float16>(1).kernel == std::string()), "a kernel for 16 KB");
#endif
    return test::report("targets");
}
