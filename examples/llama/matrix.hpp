// Rows of floats: the matrices of the forward pass on the CPU.
#pragma once

#include <Eigen/Core>

namespace llama {

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using matrix_view = Eigen::Map<const matrix>;
using row_vector = Eigen::RowVectorXf;

}  // namespace llama
