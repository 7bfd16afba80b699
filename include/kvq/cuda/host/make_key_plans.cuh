// What keys of several widths need of a device_format: state of keys that were made from statistics, plans
// that the device makes of a sequence's own first keys (quantize/plan_keys.cuh), and even ones.
//
// Contract: keys behind transforms, and those of one width, take no plan.
#pragma once

#include "../quantize/plan_keys.cuh"
#include "device_format.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

template <class Window, class Sinks, class T, class... Pairs>
struct key_plan_functions {
    /// 16-bit numbers of a head's plan; 0: its keys take none.
    template <class Pair>
    static constexpr int words = [] {
        if constexpr (requires { Pair::keys::doubt_of_keys(1.0); })
            return key_plan_words<Pair>;
        else
            return 0;
    }();

    template <class Pair>
    static constexpr int widths = [] {
        if constexpr (words < Pair >> 0)
            return Pair::keys::width_list::count;
        else
            return 0;
    }();

    /// Calls f(std::type_identity<pair number i>{}).
    template <class F>
    static void with_pair(int number, F&& f) {
        int i = 0;
        ((i++ == number ? f(std::type_identity<Pairs>{}) : void()), ...);
    }

    static key_state make_keys(int number, const calibration& statistics) {
        key_state state;
        const cache_shape& shape = statistics.shape();
        with_pair(number, [&]<class Pair>(std::type_identity<Pair>) {
            using K = typename Pair::keys;
            if constexpr (Pair::value_block_bytes > 0 && std::is_constructible_v<K, const calibration&>) {
                const K keys(statistics);
                const auto blocks = static_cast<std::size_t>(shape.layers * shape.kv_heads);
                if constexpr (codec<K>.several_widths()) {
                    state.fingerprint = keys.fingerprint();
                    state.plans.resize(blocks * key_plan_words<Pair>);
                    for (int layer = 0; layer < shape.layers; ++layer)
                        write_key_plan<Pair>(*keys.plan(), layer,
                                             &state.plans[static_cast<std::size_t>(layer * shape.kv_heads) *
                                                          key_plan_words<Pair>]);
                }
                if constexpr (requires { keys.encoder.matrices; })
                    if (keys.encoder.matrices) {
                        constexpr std::size_t matrix =
                            static_cast<std::size_t>(Pair::head_dim) * Pair::head_dim;
                        state.feedback.resize(blocks * matrix);
                        for (int layer = 0; layer < shape.layers; ++layer)
                            write_key_feedback<Pair>(
                                *keys.encoder.matrices, layer,
                                &state.feedback[static_cast<std::size_t>(layer * shape.kv_heads) * matrix]);
                    }
            }
        });
        return state;
    }
    static status plan(const layer_view& l, int number, const plan_source& from, std::uint16_t* plans,
                       cudaStream_t stream) {
        status result;
        with_pair(number, [&]<class Pair>(std::type_identity<Pair>) {
            if constexpr (words < Pair >> 0) {
                planned_keys<Window, Sinks, T> keys;
                keys.window = pages_of<Window>(l, l.window);
                keys.window.first_token = l.first_token;
                keys.sinks = pages_of<Sinks>(l, l.sinks);
                keys.window_pages = from.window_pages;
                keys.sink_pages = from.sink_pages;
                keys.before = from.before;
                keys.opened = from.opened.as<const T>();
                keys.rows = from.rows.as<const T>();
                keys.tokens = from.tokens;
                int counted = 0;
                for (int first = 0; from.tokens - first >= 16; first += calibration::group)
                    counted += kvq::detail::smaller(calibration::group, from.tokens - first);
                result = plan_keys<Pair>(keys, plans, Pair::keys::doubt_of_keys(counted), stream);
            }
        });
        return result;
    }
    static void even_plan(int number, std::uint16_t* words_of_head) {
        with_pair(number, [&]<class Pair>(std::type_identity<Pair>) {
            if constexpr (words < Pair >> 0) {
                const auto quads = Pair::keys::even_quads(Pair::head_dim);
                for (int i = 0; i < words<Pair>; ++i)
                    words_of_head[i] = static_cast<std::uint16_t>(
                        i < Pair::head_dim                                   ? i
                        : i < Pair::head_dim + Pair::keys::width_list::count ? quads.of[i - Pair::head_dim]
                                                                             : 0);
            }
        });
    }

private:
    template <class Pages>
    static cache_ref<Pages> pages_of(const layer_view& l, const layer_memory& memory) noexcept {
        cache_ref<Pages> c;
        c.key_pages = memory.keys;
        c.value_pages = memory.values;
        c.key_page_bytes = memory.key_page_bytes;
        c.value_page_bytes = memory.value_page_bytes;
        c.kv_heads = l.kv_heads;
        return c;
    }
};

}}}  // namespace kvq::cuda::detail
