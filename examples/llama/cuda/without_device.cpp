#include "on_device.hpp"

#include <stdexcept>

namespace llama {
namespace {

[[noreturn]] void refuse() {
    throw std::invalid_argument(
        "--device cuda: this program was built without CUDA; kvq_llama_cuda has it (CMake's KVQ_LLAMA_CUDA)");
}

}  // namespace

generation_result generate_on_device(const model_weights&, const tokenizer&, const scheme_choice&,
                                     const generation_settings&, const std::vector<std::string>&, int,
                                     const device_settings&, std::ostream&) {
    refuse();
}

std::vector<scheme_result> evaluate_on_device(const model_weights&, std::span<const int>,
                                              std::span<const scheme_choice>, const evaluation_settings&,
                                              const device_settings&) {
    refuse();
}

}  // namespace llama
