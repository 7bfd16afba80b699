// Plans of keys (cache_plans.hpp) of a sequence that goes to the CPU or comes from there: the numbers of a
// plan page are formats of pages there (page::plan), and the other way round.
//
// Contract: even widths are no plan on the CPU. A sequence has one plan here, so one with several of a layer
// and format is refused.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "../../page/page_table.hpp"
#include "../../schemes/plan_text.hpp"
#include "layer_group.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

class moved_plans {
public:
    /// Of a plan page, for a CPU's cache whose formats of keys are base(number of the device's). Waits for
    /// the stream.
    template <class Base>
    status fetch(const layer_group& g, const page_ref& plan, Base&& base, cudaStream_t stream) {
        formats_.assign(static_cast<std::size_t>(g.shape.layers * g.kinds()), {});
        kinds_ = g.kinds();
        if (!plan || plan.get() == g.plans.even.get()) return {};
        std::vector<std::uint16_t> words(static_cast<std::size_t>(g.plans.words()));
        for (int member = 0; member < g.shape.layers; ++member) {
            if (status s = copy(g, member, plan->number, words, cudaMemcpyDeviceToHost, stream); !s) return s;
            for (int f = 0; f < g.kinds(); ++f) {
                if (!g.plans.takes(f)) continue;
                const format& of = base(f);
                if (!of || !of.wants_plan()) continue;
                const std::string text = text_of(g, f, &words[first(g, f)]);
                formats_[at(member, f)] = of.functions().plans->from_text(of, text.data(), text.size());
            }
        }
        return {};
    }
    /// Empty: even widths.
    const format& of(int member, int f) const noexcept { return formats_[at(member, f)]; }

    /// Of a sequence on the CPU: takes note of a page of keys of this format, or with `page` false of the
    /// plan of those to come. layer: for errors. O(1): plans of pages are compared by their fingerprints.
    status add(const layer_group& g, int member, int f, const format& plan, bool page, int layer) {
        if (formats_.empty()) {
            kinds_ = g.kinds();
            formats_.resize(static_cast<std::size_t>(g.shape.layers * kinds_));
            even_.resize(formats_.size());
        }
        if (!plan && !page) return {};
        if (plan && !g.plans.takes(f))
            return bad_value(
                "layer %d: keys have a plan of their sequence, which the device's cache does not take: "
                "key_statistics::own",
                layer);
        if (!g.plans.takes(f)) return {};
        any_ = true;
        format& held = formats_[at(member, f)];
        const auto same = [&] { return plan.record().fingerprint == held.record().fingerprint; };
        if ((plan && even_[at(member, f)] != 0) || (held && !(plan && same())))
            return bad_value(
                "layer %d: keys of the sequence have several plans, of which the device takes one", layer);
        if (plan)
            held = plan;
        else
            even_[at(member, f)] = 1;
        return {};
    }
    /// Has the sequence keys that a plan, or the even one, must read?
    bool any() const noexcept { return any_; }
    /// The plan page of a sequence: the even one, or one of `known` that holds what is known of its plans, so
    /// that splice() finds one plan; else a new one, of which a page is free. Waits for the stream.
    status place(layer_group& g, std::vector<page_ref> known, page_ref& plan, cudaStream_t stream) const {
        known.insert(known.begin(), {g.plans.even, g.plans.shared});
        const auto each = static_cast<std::size_t>(g.plans.words());
        // One copy of all plans of the first layer tells them apart.
        std::vector<std::uint16_t> words, there(each),
            of_first(each * static_cast<std::size_t>(g.plans.pages.memory().pages));
        if (status s = copy(g, 0, 0, of_first, cudaMemcpyDeviceToHost, stream); !s) return s;
        std::vector<std::uint16_t> own;
        write(g, 0, own);
        for (const page_ref& page : known) {
            bool same = page && are_of(g, 0, own, &of_first[each * static_cast<std::size_t>(page->number)]);
            for (int member = 1; member < g.shape.layers && same; ++member) {
                if (status s = copy(g, member, page->number, there, cudaMemcpyDeviceToHost, stream); !s)
                    return s;
                write(g, member, words);
                same = are_of(g, member, words, there.data());
            }
            if (!same) continue;
            plan = page;
            return {};
        }
        plan = g.plans.pages.pages().take();
        for (int member = 0; member < g.shape.layers; ++member) {
            write(g, member, words);
            if (status s = copy(g, member, plan->number, words, cudaMemcpyHostToDevice, stream); !s) return s;
        }
        return {};
    }
    /// Has every layer a plan for the pages to come, as one that a prompt has made?
    bool whole(const layer_group& g) const noexcept {
        for (int member = 0; member < g.shape.layers; ++member)
            if (!any_ || !g.plans.takes(g.target) || !of(member, g.target)) return false;
        return true;
    }

private:
    /// Are numbers of a layer, of formats of which something is known, those of its plans?
    bool are_of(const layer_group& g, int member, const std::vector<std::uint16_t>& words,
                const std::uint16_t* there) const {
        for (int f = 0; f < g.kinds(); ++f) {
            if (!of(member, f) && even_[at(member, f)] == 0) continue;
            const auto from = words.begin() + static_cast<std::ptrdiff_t>(first(g, f));
            if (!std::equal(from, from + g.shape.kv_heads * words_of(g, f), there + first(g, f)))
                return false;
        }
        return true;
    }
    /// The numbers of a layer's plans.
    void write(const layer_group& g, int member, std::vector<std::uint16_t>& words) const {
        words.assign(static_cast<std::size_t>(g.plans.words()), 0);
        for (int f = 0; f < g.kinds(); ++f) {
            if (!g.plans.takes(f)) continue;
            const int of_head = words_of(g, f);
            std::uint16_t* const to = &words[first(g, f)];
            for (int head = 0; head < g.shape.kv_heads; ++head)
                g.format.functions->even_plan(f, to + head * of_head);
            if (const format& plan = of(member, f)) {
                std::string text(plan.functions().plans->write_text(plan.scheme(), nullptr), ' ');
                (void)plan.functions().plans->write_text(plan.scheme(), text.data());
                write_words(common::plan_of_text(text.data(), text.size(), widths_of(g, f)), of_head, to);
            }
        }
    }
    static status copy(const layer_group& g, int member, int number, std::vector<std::uint16_t>& words,
                       cudaMemcpyKind kind, cudaStream_t stream) {
        void* const page = g.plans.pages.memory().page(tensor::key, member, number);
        const bool down = kind == cudaMemcpyDeviceToHost;
        cudaError_t code = cudaMemcpyAsync(down ? words.data() : page, down ? page : words.data(),
                                           words.size() * sizeof(std::uint16_t), kind, stream);
        if (code == cudaSuccess) code = cudaStreamSynchronize(stream);
        return code == cudaSuccess ? status{} : runtime_error(code, "moving plans");
    }
    std::size_t at(int member, int f) const noexcept { return static_cast<std::size_t>(member * kinds_ + f); }
    static std::size_t first(const layer_group& g, int f) noexcept {
        return static_cast<std::size_t>(g.plans.first[static_cast<std::size_t>(f)]);
    }
    static int words_of(const layer_group& g, int f) noexcept {
        return g.format.kinds[static_cast<std::size_t>(f)].plan_words;
    }
    static int widths_of(const layer_group& g, int f) noexcept {
        return g.format.kinds[static_cast<std::size_t>(f)].plan_widths;
    }
    static std::string text_of(const layer_group& g, int f, const std::uint16_t* words) {
        const int dim = g.shape.head_dim, heads = g.shape.kv_heads;
        std::string text = std::to_string(heads) + "x" + std::to_string(dim) + ":";
        for (int head = 0; head < heads; ++head, words += words_of(g, f))
            for (int c = 0; c < dim; ++c) {
                int w = 0;
                for (int end = 4 * words[dim]; words[c] >= end; end += 4 * words[dim + w]) ++w;
                text += static_cast<char>('0' + w);
            }
        return text;
    }
    /// As write_key_plan() does.
    static void write_words(const width_plan& plan, int of_head, std::uint16_t* to) noexcept {
        for (const channel_allocation& a : plan.blocks) {
            for (std::size_t place = 0; place < a.order.size(); ++place)
                to[a.order[place]] = static_cast<std::uint16_t>(place);
            std::copy(a.quads.begin(), a.quads.end(), to + plan.head_dim);
            to += of_head;
        }
    }

    int kinds_ = 0;
    bool any_ = false;
    std::vector<format> formats_;
    std::vector<char> even_;
};

}}}  // namespace kvq::cuda::detail
