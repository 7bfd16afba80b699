// Pages whose scores are known and whose values are not read yet: which values can be left out
// (selection.hpp, skipped_values).
//
//   share of page j in row i:   w_ij = sum of its weights / L_i,   L_i a lower bound of the sum of the row
//                                                                  over all keys
//   pages are left out in the order of max_i w_ij, as long as every row has lost at most its budget
//
// The pages of a key split are held, or as many as fit, so that the result does not depend on threads.
// Weights are those of the online softmax, page by page, in the order and with the factors that they have
// when no value is skipped: pages that are read add the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>

#include "../page/layer_pages.hpp"
#include "carver.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

struct held_pages {
    struct one {
        int entry;   ///< of the layer
        int at;      ///< first weight in a row of `weights`
        int tokens;  ///< shown tokens
        bool skipped;
        float most;  ///< its largest share of a row
    };

    int most, rows, stride;
    one* pages;
    int* order;
    float* weights;             // [rows][stride], first scores
    float *factor, *max, *sum;  // [most][rows]: of the online softmax at this page; sum of its own weights
    float *left, *left_max;     // [rows]: weights left out in this split, in units of 2^left_max
    float* lost;                // [rows]: share left out of the held pages
    int count = 0, tokens = 0;  ///< held
    int seen = 0, skipped = 0;  ///< pages, since the counts were last set to 0

    /// Null when the carver only counts.
    static held_pages* carve(carver& c, int n, int split_tokens, const page_geometry& g) {
        std::byte* const self = c.take(sizeof(held_pages));
        held_pages h{};
        h.most = split_tokens / g.page_tokens + 8;
        h.rows = n;
        // The last page of a split may end behind it, and kernels write the scores of whole pages.
        h.stride = round_up(split_tokens + 2 * g.longest_page(), 16) + 32;
        const auto r = static_cast<std::size_t>(n), m = static_cast<std::size_t>(h.most);
        h.pages = reinterpret_cast<one*>(c.take(m * sizeof(one)));
        h.order = reinterpret_cast<int*>(c.take(m * sizeof(int)));
        h.weights = c.floats(r * static_cast<std::size_t>(h.stride));
        for (float** const part : {&h.factor, &h.max, &h.sum}) *part = c.floats(m * r);
        for (float** const part : {&h.left, &h.left_max, &h.lost}) *part = c.floats(r);
        return self ? ::new (self) held_pages(h) : nullptr;
    }

    void begin_split() noexcept {
        count = tokens = 0;
        std::fill_n(left, rows, 0.0f);
        std::fill_n(left_max, rows, -std::numeric_limits<float>::infinity());
    }
    /// Holds the page whose weights were just made, for n rows with these maxima.
    void hold(int entry, int page_tokens, int n, const float* maxima) noexcept {
        pages[count] = {entry, tokens, page_tokens, false, 0.0f};
        for (int i = 0; i < n; ++i) {
            max[count * rows + i] = maxima[i];
            sum[count * rows + i] = sum_of(weights + i * stride + tokens, page_tokens);
        }
        tokens += page_tokens;
        ++count;
        ++seen;
    }
    /// Marks the held pages whose values are skipped. budget: share of a row; floors: log2 of a lower bound
    /// of the sum of each of n rows; maxima and sums: of the split up to the last held page.
    void choose(int n, float budget, const float* floors, const float* maxima, const float* sums) noexcept {
        const auto share = [&](int j, int i) {
            const float s = sum[j * rows + i];
            if (s == 0.0f) return 0.0f;
            const float known = larger(floors[i], maxima[i] + std::log2(sums[i]));
            // No weight is rounded to none: a budget of 0 leaves every bit as it was.
            return larger(s * std::exp2(max[j * rows + i] - known), (std::numeric_limits<float>::min)());
        };
        for (int j = 0; j < count; ++j) {
            float largest = 0.0f;
            for (int i = 0; i < n; ++i) {
                const float one_row = share(j, i);
                // Written so that NaN is the largest.
                if (!(one_row <= largest)) largest = one_row == one_row ? one_row : infinity;
            }
            pages[j].most = largest;
            order[j] = j;
        }
        std::sort(order, order + count, [&](int a, int b) {
            return pages[a].most < pages[b].most || (pages[a].most == pages[b].most && a < b);
        });
        std::fill_n(lost, n, 0.0f);
        for (int k = 0; k < count; ++k) {
            const int j = order[k];
            bool fits = pages[j].most <= budget;
            for (int i = 0; i < n && fits; ++i) fits = lost[i] + share(j, i) <= budget;
            if (!fits) break;
            pages[j].skipped = true;
            ++skipped;
            for (int i = 0; i < n; ++i) lost[i] += share(j, i);
        }
        for (int i = 0; i < n; ++i) {
            if (left[i] > 0.0f) left[i] *= std::exp2(left_max[i] - maxima[i]);
            left_max[i] = maxima[i];
            for (int j = 0; j < count; ++j)
                if (pages[j].skipped && sum[j * rows + i] > 0.0f)
                    left[i] += sum[j * rows + i] * std::exp2(max[j * rows + i] - maxima[i]);
        }
    }

private:
    static constexpr float infinity = std::numeric_limits<float>::infinity();

    /// In an order that compilers vectorise.
    static float sum_of(const float* x, int n) noexcept {
        float parts[16] = {};
        int t = 0;
        for (; t + 16 <= n; t += 16)
            for (int k = 0; k < 16; ++k) parts[k] += x[t + k];
        for (int k = 0; t + k < n; ++k) parts[k] += x[t + k];
        for (int width = 8; width > 0; width /= 2)
            for (int k = 0; k < width; ++k) parts[k] += parts[k + width];
        return parts[0];
    }
};

}}}  // namespace kvq::detail
