// What the bench programs share: timing by Google Benchmark (median of repetitions), random tensors, read
// bandwidth, and memory on huge pages where the system has them.
#pragma once

#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <kvq/core/thread_pool.hpp>
#include <memory_resource>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace bench {

/// Memory that is never given back before the end: large aligned pieces on huge pages.
class huge_page_resource : public std::pmr::memory_resource {
    void* do_allocate(std::size_t bytes, std::size_t) override {
        constexpr std::size_t huge = std::size_t{2} << 20;
        const std::size_t size = (bytes + huge - 1) / huge * huge;
        void* p = std::aligned_alloc(huge, size);
        if (!p) throw std::bad_alloc();
        madvise(p, size, MADV_HUGEPAGE);
        return p;
    }
    void do_deallocate(void* p, std::size_t, std::size_t) override { std::free(p); }
    bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
        return this == &other;
    }
};

inline std::vector<float> random_floats(std::size_t n, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> x(n);
    for (float& f : x) f = normal(random);
    return x;
}

/// Median nanoseconds of one call of each, by Google Benchmark: of CPU time on one thread (what else the
/// machine does then counts less), of real time on several. Repetitions of all are mixed at random, so that a
/// machine whose speed changes does not change ratios.
inline std::vector<double> median_ns(const std::vector<std::function<void()>>& works, int threads,
                                     int repetitions = 7, double seconds = 0.05) {
    struct quiet : benchmark::BenchmarkReporter {
        bool cpu_time;
        std::vector<double> median;
        bool ReportContext(const Context&) override { return true; }
        void ReportRuns(const std::vector<Run>& runs) override {
            for (const Run& run : runs)
                if (run.aggregate_name == "median")
                    median[std::stoul(run.run_name.function_name)] =
                        cpu_time ? run.GetAdjustedCPUTime() : run.GetAdjustedRealTime();
        }
    };
    static const bool mixed = [] {
        std::string program = "bench", option = "--benchmark_enable_random_interleaving=true";
        char* arguments[] = {program.data(), option.data()};
        int count = 2;
        benchmark::Initialize(&count, arguments);
        return count == 1;
    }();
    if (!mixed) throw std::runtime_error("Google Benchmark does not know how to mix repetitions");
    benchmark::ClearRegisteredBenchmarks();
    for (std::size_t i = 0; i < works.size(); ++i)
        benchmark::RegisterBenchmark(std::to_string(i).c_str(),
                                     [&works, i](benchmark::State& state) {
                                         for (auto _ : state) works[i]();
                                     })
            ->UseRealTime()
            ->Repetitions(repetitions)
            ->ReportAggregatesOnly(true)
            ->MinTime(seconds)
            ->Unit(benchmark::kNanosecond);
    quiet reporter;
    reporter.cpu_time = threads == 1;
    reporter.median.resize(works.size());
    benchmark::RunSpecifiedBenchmarks(&reporter);
    return reporter.median;
}
inline double median_ns(const std::function<void()>& work, int threads, double seconds = 0.05) {
    return median_ns(std::vector{work}, threads, 7, seconds).front();
}

/// Bytes per nanosecond (GB/s) that a plain read of `bytes` reaches on `threads` threads.
inline double read_bandwidth(std::size_t bytes, int threads) {
    static huge_page_resource memory;
    std::pmr::vector<std::uint64_t> data(bytes / 8 + 64, 1, &memory);
    const kvq::thread_pool executor(threads);
    std::vector<std::uint64_t> sums(static_cast<std::size_t>(threads) * 8);
    const auto read = [&] {
        executor.parallel_for(threads, [&](int t) {
            const std::size_t part = data.size() / static_cast<std::size_t>(threads);
            const std::uint64_t* const p = data.data() + part * static_cast<std::size_t>(t);
            std::uint64_t sum[8] = {};
            for (std::size_t i = 0; i + 64 <= part; i += 64)
                for (std::size_t k = 0; k < 64; k += 8)
                    for (std::size_t lane = 0; lane < 8; ++lane) sum[lane] += p[i + k + lane];
            for (std::size_t lane = 0; lane < 8; ++lane)
                sums[static_cast<std::size_t>(t) * 8 + lane] = sum[lane];
        });
        benchmark::DoNotOptimize(sums.data());
    };
    return static_cast<double>(bytes) / median_ns(read, threads);
}

}  // namespace bench
