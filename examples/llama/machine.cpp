#include "machine.hpp"

#include "kvq_cache.hpp"
#include "stopwatch.hpp"

#include <algorithm>
#include <fstream>
#include <random>
#include <stdexcept>

#include <unistd.h>

namespace llama {
namespace {

std::vector<float> random_floats(std::size_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& x : values) {
        x = normal(random);
    }
    return values;
}

kvq::cache_options options_of(const scheme_choice& scheme) {
    kvq::cache_options options = options_of(scheme.settings);
    options.keys = scheme.formats.keys;
    options.values = scheme.formats.values;
    return options;
}

machine_row measure(const scheme_choice& scheme, const machine_settings& settings,
                    kvq::thread_pool& workers) {
    constexpr int chunk = 512, least = 5;
    const auto rows_of = [&](int heads, unsigned seed) {
        return random_floats(static_cast<std::size_t>(chunk) * static_cast<std::size_t>(heads) *
                                 static_cast<std::size_t>(settings.head_dim),
                             seed);
    };
    const std::vector<float> keys = rows_of(settings.kv_heads, 1), values = rows_of(settings.kv_heads, 2),
                             queries = rows_of(settings.heads, 3);
    std::vector<float> out(queries.size());
    std::vector<char> others(std::size_t{64} << 20);
    machine_row row{scheme.label, {}, 0};

    kvq::cache cache({.layers = 1, .kv_heads = settings.kv_heads, .head_dim = settings.head_dim},
                     options_of(scheme));
    kvq::sequence sequence = cache.new_sequence();
    kvq::workspace space;
    const auto attend = [&] {
        sequence.attend(0, {queries.data(), 1, settings.heads, settings.head_dim},
                        {out.data(), 1, settings.heads, settings.head_dim}, kvq::causal{}, workers, space);
    };
    for (const int length : settings.tokens) {
        while (sequence.tokens() < length) {
            const int n = std::min(chunk, length - sequence.tokens());
            sequence.append(0, {keys.data(), n, settings.kv_heads, settings.head_dim},
                            {values.data(), n, settings.kv_heads, settings.head_dim});
        }
        attend();
        std::vector<double> times;
        for (const stopwatch all;
             static_cast<int>(times.size()) < least || all.seconds() < settings.seconds;) {
            std::fill(others.begin(), others.end(), static_cast<char>(times.size()));
            const stopwatch time;
            attend();
            times.push_back(time.seconds());
        }
        const auto middle = times.begin() + std::ssize(times) / 2;
        std::nth_element(times.begin(), middle, times.end());
        row.costs.push_back({*middle, sequence.usage().bytes});
    }

    const kvq::cache model(
        {.layers = settings.layers, .kv_heads = settings.kv_heads, .head_dim = settings.head_dim},
        options_of(scheme));
    const kvq::attention_use use{.q_heads = settings.heads, .threads = settings.threads, .chunk = chunk};
    row.longest = std::max(0, kvq::longest_context(model, static_cast<std::size_t>(settings.memory), 1, use));
    return row;
}

}  // namespace

std::vector<machine_row> measure_machine(std::span<const scheme_choice> schemes,
                                         const machine_settings& settings) {
    for (const scheme_choice& scheme : schemes) {
        if (!scheme.formats.keys || scheme.use_statistics || scheme.own_statistics > 0) {
            throw std::invalid_argument(scheme.label + " needs a model; here are formats and +own alone");
        }
    }
    kvq::thread_pool workers(settings.threads);
    std::vector<machine_row> rows;
    for (const scheme_choice& scheme : schemes) {
        rows.push_back(measure(scheme, settings, workers));
    }
    return rows;
}

double free_memory() {
    std::ifstream file("/proc/meminfo");
    for (std::string name; file >> name;) {
        double kilobytes = 0.0;
        if (name == "MemAvailable:" && file >> kilobytes) {
            return 1024.0 * kilobytes;
        }
        file.ignore(256, '\n');
    }
#if defined(_SC_AVPHYS_PAGES)
    return static_cast<double>(sysconf(_SC_AVPHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
#else
    return 0.0;
#endif
}

}  // namespace llama
