// Formats whose kernels may have less shared memory than others: a specialization stands outside of every
// test.
#pragma once

#include <kvq/cuda/decode/attend.cuh>
#include <kvq/cuda/quantize/pages.cuh>

namespace test {

// A budget also holds for the kernel that reads keys of mixed widths without a plan.
using small_mix4 = kvq::cuda::preset_pair<kvq::mix4, 128, 64>;
// Its keys are quantized in parts of 16 tokens.
using small_std4 = kvq::cuda::preset_pair<kvq::std4, 512>;

}  // namespace test

template <>
inline constexpr int kvq::cuda::shared_memory_budget<test::small_mix4> = 99 * 1024;
template <>
inline constexpr int kvq::cuda::shared_memory_budget<test::small_std4> = 99 * 1024;
static_assert(kvq::cuda::detail::even_keys<test::small_mix4>::known);
static_assert(kvq::cuda::detail::attention_memory<kvq::cuda::detail::even_keys<test::small_mix4>::pair_type,
                                                  4>::bytes <= 99 * 1024);
static_assert(kvq::cuda::detail::grid_memory<test::small_std4, kvq::tensor::key>::code_slots == 16);
