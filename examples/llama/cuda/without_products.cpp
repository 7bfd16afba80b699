#include "products_on_device.hpp"

#include <stdexcept>

namespace llama {

std::shared_ptr<product_device> make_product_device() {
    throw std::invalid_argument(
        "--device cuda-products: this program was built without cuBLAS (CMake's KVQ_LLAMA_CUDA_PRODUCTS)");
}

}  // namespace llama
