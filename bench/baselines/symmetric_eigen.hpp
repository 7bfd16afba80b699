// Eigenvectors of a symmetric matrix, by Jacobi rotations.
//
//   A = U diag(lambda) U^T;   lambda descending, row i of the result is eigenvector i
//
// Contract: double, cyclic sweeps until the off-diagonal part is 1e-12 of the matrix or 60 sweeps are done.
// O(n^3) per sweep.
// Source: Jacobi, 1846; Golub and Van Loan, Matrix Computations, section 8.5.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

namespace baselines {

/// a: [n][n], symmetric. Returns [n][n]: eigenvectors as rows, the largest eigenvalue first.
inline std::vector<double> eigenvectors(std::vector<double> a, int n) {
    const auto size = static_cast<std::size_t>(n);
    std::vector<double> v(size * size, 0.0);
    for (std::size_t i = 0; i < size; ++i) v[i * size + i] = 1.0;
    for (int sweep = 0; sweep < 60; ++sweep) {
        double off = 0.0, all = 0.0;
        for (std::size_t i = 0; i < size; ++i)
            for (std::size_t j = 0; j < size; ++j) (i == j ? all : off) += a[i * size + j] * a[i * size + j];
        if (off <= 1e-24 * (all + off)) break;
        for (std::size_t p = 0; p + 1 < size; ++p)
            for (std::size_t q = p + 1; q < size; ++q) {
                const double apq = a[p * size + q];
                if (apq == 0.0) continue;
                const double theta = (a[q * size + q] - a[p * size + p]) / (2.0 * apq);
                const double t = (theta < 0.0 ? -1.0 : 1.0) / (std::fabs(theta) + std::hypot(theta, 1.0));
                const double c = 1.0 / std::hypot(t, 1.0), s = t * c;
                for (std::size_t k = 0; k < size; ++k) {
                    const double x = a[k * size + p], y = a[k * size + q];
                    a[k * size + p] = c * x - s * y;
                    a[k * size + q] = s * x + c * y;
                }
                for (std::size_t k = 0; k < size; ++k) {
                    const double x = a[p * size + k], y = a[q * size + k];
                    a[p * size + k] = c * x - s * y;
                    a[q * size + k] = s * x + c * y;
                    const double u = v[p * size + k], w = v[q * size + k];
                    v[p * size + k] = c * u - s * w;
                    v[q * size + k] = s * u + c * w;
                }
            }
    }
    std::vector<std::size_t> order(size);
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t i, std::size_t j) { return a[i * size + i] > a[j * size + j]; });
    std::vector<double> sorted(size * size);
    for (std::size_t i = 0; i < size; ++i)
        std::copy_n(v.begin() + static_cast<std::ptrdiff_t>(order[i] * size), n,
                    sorted.begin() + static_cast<std::ptrdiff_t>(i * size));
    return sorted;
}

}  // namespace baselines
