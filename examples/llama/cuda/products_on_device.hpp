// Matrix products of the CPU's model on a GPU, in fp32: `--device cuda-products`. The cache and attention
// stay on the CPU, so that every format can be judged on models that are too large for a CPU's products.
#pragma once

#include "../weights.hpp"

#include <memory>

namespace llama {

// Weights go to the device when they are first used. Programs without CUDA refuse (without_products.cpp).
std::shared_ptr<product_device> make_product_device();

}  // namespace llama
