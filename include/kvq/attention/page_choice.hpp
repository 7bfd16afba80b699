// Memory and decisions of selected_pages and skipped_values for one sequence of an attention call.
//
//   floors   log2 of a lower bound of the softmax sum of every row: of the first page and the last two, which
//            are always read
//   ranks    of every page, kv head and block of query rows: sum over rows of 2^(estimated score - floor),
//            the weight of a key that has the estimated score; afterwards: chosen or not
//   left     share of the weights of every row that was left out
//
// Contract: equal ranks are resolved by position (later pages first), so that the choice is unique. Empty,
// without bytes, when neither is asked for. Bytes depend on the number of pages; a sequence without cuts has
// page_geometry::spans() of them.
#pragma once

#include "mods.hpp"
#include "plan.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

struct page_choice {
    static constexpr float always =
        std::numeric_limits<float>::infinity();  ///< rank of a page that is always read
    static constexpr float hidden =
        -std::numeric_limits<float>::infinity();  ///< rank of a page that masks hide
    /// Weight of the distance from the middle of a score's range to its end. 1 ranks by the upper bound,
    /// which keeps less of the mass on real tensors: it is far above all scores, and wide ranges outrank high
    /// middles (scripts/quality select).
    static constexpr float spread = 0.3f;

    /// The format of a page, and the tokens that it has memory for.
    struct page_form {
        int index, tokens;
        const format* of;
    };

    const selected_pages* selection = nullptr;  ///< null: all pages are read
    const skipped_values* skipping = nullptr;
    int count = 0;   ///< pages
    int stride = 0;  ///< of the lists of pages
    int blocks = 0, rows = 0, block_rows = 0;
    float* ranks = nullptr;        // [kv_heads][row_blocks][stride]
    int* order = nullptr;          // the same shape
    page_form* formats = nullptr;  // [count]: of the pages of keys
    float* floors = nullptr;       // [kv_heads][rows]
    float* left = nullptr;         // [kv_heads][rows]
    int (*counts)[2] = nullptr;    // [tasks]: value pages seen, skipped
    std::size_t bytes = 0;

    page_choice() = default;
    page_choice(const attention_plan& plan, const layer_pages& pages, const mods_view& mods,
                std::byte* memory)
        : count(pages.count),
          stride(larger(pages.count, pages.geometry.spans(pages.tokens))),
          blocks(plan.row_blocks()),
          rows(plan.rows()),
          block_rows(plan.block_rows) {
        carver c(memory);
        const auto lists = static_cast<std::size_t>(plan.kv_heads) * static_cast<std::size_t>(blocks),
                   all_rows = static_cast<std::size_t>(plan.kv_heads) * static_cast<std::size_t>(rows);
        // A selection of all pages is none.
        if (mods.selection() && wanted(*mods.selection(), pages.geometry) < stride) {
            selection = mods.selection();
            ranks = c.floats(lists * static_cast<std::size_t>(stride));
            order = reinterpret_cast<int*>(c.take(lists * static_cast<std::size_t>(stride) * sizeof(int)));
        }
        if (selection)
            formats =
                reinterpret_cast<page_form*>(c.take(static_cast<std::size_t>(stride) * sizeof(page_form)));
        if (selection || mods.skipping()) floors = c.floats(all_rows);
        if (mods.skipping()) {
            skipping = mods.skipping();
            left = c.floats(all_rows);
            counts =
                reinterpret_cast<int(*)[2]>(c.take(static_cast<std::size_t>(plan.tasks()) * sizeof(int[2])));
        }
        bytes = c.used();
    }

    /// Pages that a selection reads besides those that are always read.
    static int wanted(const selected_pages& of, const page_geometry& g) noexcept {
        return 1 + (of.tokens - 1) / g.page_tokens;
    }

    /// The ranks of a block of rows; null without a selection.
    float* ranks_of(int head, int first_row) const noexcept {
        return selection ? ranks + list(head, first_row) : nullptr;
    }
    static bool chosen(float rank) noexcept { return rank > 0.0f; }

    /// Reads the formats of all pages. Page headers lie far apart: every kv head would wait for each of them
    /// again.
    void read_formats(const format_table& keys, const layer_pages& pages) const noexcept {
        constexpr int early = 16;
        for (int e = 0; e < count; ++e) {
            prefetch(pages.at(smaller(e + early, count - 1)).keys);
            const page& p = *pages.at(e).keys;
            formats[e] = {p.format, p.tokens, &keys.of(p)};
        }
    }
    const float* floors_of(int head, int first_row) const noexcept {
        return floors + head * rows + first_row;
    }

    /// Replaces ranks by 1 for pages that are read and 0 for the others; `hidden` stays. O(pages)
    void choose(int head, int first_row, const page_geometry& g) const noexcept {
        float* const rank = ranks_of(head, first_row);
        int* const best = order + list(head, first_row);
        int n = 0;
        for (int e = 0; e < count; ++e)
            if (rank[e] != always && rank[e] != hidden) best[n++] = e;
        const int k = smaller(n, wanted(*selection, g));
        if (k < n)
            std::nth_element(best, best + k, best + n, [&](int a, int b) {
                return rank[a] > rank[b] || (rank[a] == rank[b] && a > b);
            });
        for (int e = 0; e < count; ++e)
            if (rank[e] == always) rank[e] = 1.0f;
        for (int i = 0; i < n; ++i) rank[best[i]] = i < k ? 1.0f : 0.0f;
    }
    /// 2^x within 7 %, increasing, for a rank: finite, and 0 for NaN. (The mantissa of the result is the
    /// fraction of x.)
    static float rough_exp2(float x) noexcept {
        const float bounded = x > -126.0f ? smaller(x, 110.0f) : -127.0f;
        return bit_cast<float>(static_cast<std::uint32_t>((bounded + 127.0f) * 0x1p23f));
    }

    /// Adds a kv head and block of rows; next(e): the first page from e on that masks show. run: without
    /// tokens.
    template <class Next>
    static void report_pages(selection_report& r, chosen_tokens run, const float* ranks,
                             const layer_pages& pages, const Next& next) {
        const auto add = [&] {
            if (r.chosen && run.tokens.end > 0) r.chosen->push_back(run);
        };
        for (int e = next(0); e < pages.entries(); e = next(e + 1)) {
            ++r.pages;
            if (ranks && !chosen(ranks[e])) continue;
            ++r.read;
            const layer_pages::entry entry = pages.at(e);
            if (run.tokens.end != entry.first_token) {
                add();
                run.tokens.begin = entry.first_token;
            }
            run.tokens.end = entry.first_token + entry.tokens;
        }
        add();
    }
    /// Sums in the order of tasks and rows.
    void report_skipping(const attention_plan& plan) const noexcept {
        if (!skipping->report) return;
        skipping_report& r = *skipping->report;
        for (int task = 0; task < plan.tasks(); ++task) {
            r.pages += counts[task][0];
            r.skipped += counts[task][1];
        }
        const int all_rows = plan.kv_heads * plan.rows();
        r.rows += all_rows;
        for (int i = 0; i < all_rows; ++i) {
            r.left_out += static_cast<double>(left[i]);
            r.most_left_out = larger(r.most_left_out, left[i]);
        }
    }

private:
    std::ptrdiff_t list(int head, int first_row) const noexcept {
        return (static_cast<std::ptrdiff_t>(head) * blocks + first_row / block_rows) * stride;
    }
};

}}}  // namespace kvq::detail
