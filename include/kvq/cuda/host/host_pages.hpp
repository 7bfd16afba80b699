// A CPU cache for the pages of a cache on the device: bytes in pinned memory, of the same layers, options and
// formats. Nothing is compiled for its formats, and it computes nothing.
//
//   kvq::cuda::host_pages pages(gpu, 8ull << 30);        pinned memory, allocated at once
//   auto s = pages.cache().new_sequence();
//   offload(gpu, id, s, stream);  ... onload(s, gpu, id, stream);
//
// What works on pages works on its sequences: save and send, fork, trim, prefix caches and their files.
// x^ of formats without a plan or a rotation can be read (sequence::dequantize). What quantizes or attends
// raises kvq::error.
// Contract: made after calibrate() and rotate(); pages of a format that has got statistics since then do not
// come, and offload() refuses such a sequence. Its sequences must be gone before it is.
#pragma once

#include <memory_resource>
#include <optional>
#include <string>

#include "../../cpu/scalar.hpp"
#include "../../format/make_format.hpp"
#include "../../schemes/plan_text.hpp"
#include "offload.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

/// Pinned host memory, from 64 KiB on; less comes from the heap. Any thread may call it.
class pinned_memory final : public std::pmr::memory_resource {
    static constexpr std::size_t least = std::size_t{1} << 16;

    void* do_allocate(std::size_t bytes, std::size_t alignment) override {
        if (bytes < least) return std::pmr::new_delete_resource()->allocate(bytes, alignment);
        void* p = nullptr;
        if (cudaMallocHost(&p, bytes) == cudaSuccess) return p;
        (void)cudaGetLastError();
        common::raise<out_of_memory>("kvq: " + std::to_string(bytes) +
                                     " bytes of pinned host memory are not there");
    }
    void do_deallocate(void* p, std::size_t bytes, std::size_t alignment) override {
        if (bytes < least)
            std::pmr::new_delete_resource()->deallocate(p, bytes, alignment);
        else
            (void)cudaFreeHost(p);
    }
    bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
        return this == &other;
    }
};

namespace detail {

/// Blocks of a format of the device, on the host.
struct held_format : format_record {
    host_blocks blocks;
    format_functions table{};
    std::string held_name;
    std::shared_ptr<const width_plan> plan;  // of one layer; null: even widths
    int plan_widths = 0;                     // in the list of keys that take a plan

    held_format(const format& window, tensor role, std::string text, const host_blocks& b,
                std::uint64_t state)
        : blocks(b), held_name(std::move(text)) {
        functions = &table;
        scheme = this;
        name = held_name.c_str();
        has_fingerprint = b.has_fingerprint;
        fingerprint = state;
        destroy = [](format_record* self) { delete static_cast<held_format*>(self); };
        table.backend = window.functions().backend;
        table.keys = role == tensor::key;
        table.values = role == tensor::value;
        table.check = [](const void*, const cache_shape&, tensor) {};
        table.block_bytes = [](const void* self, const block_shape& s) { return of(self).blocks.bytes(s); };
        if (b.lower_bytes != nullptr)
            table.lower_bytes = [](const void* self, const block_shape& s) {
                return of(self).blocks.lower_bytes(s);
            };
        table.code_bytes = [](const void*, const block_shape&) { return std::size_t{0}; };
        table.dequantize = [](const void* self, const block_shape& s, block_id id, const std::byte* block,
                              float_type type, void* out, std::ptrdiff_t stride, float* scratch) {
            const held_format& f = of(self);
            if (f.blocks.dequantize == nullptr) f.refuse("dequantized");
            f.blocks.dequantize(s, id, block, scratch);
            common::visit_float_type(type, [&]<class T>(T) {
                for (int t = 0; t < s.tokens; ++t)
                    for (int c = 0; c < s.dim; ++c)
                        static_cast<T*>(out)[t * stride + c] = T(scratch[t * s.dim + c]);
            });
        };
        table.quantize = [](const void* self, const block_shape&, block_id, float_type, const std::byte*,
                            std::byte*, float*) -> std::uint32_t { of(self).refuse("quantized"); };
        table.quantize_values = [](const void* self, const block_shape&, block_id, float*,
                                   std::byte*) -> std::uint32_t { of(self).refuse("quantized"); };
        table.requantize_values = [](const void* self, const block_shape&, block_id, float*, float*,
                                     std::byte*) -> std::uint32_t { of(self).refuse("quantized"); };
        table.dequantize_tokens = [](const void* self, const block_shape&, block_id, const std::byte*,
                                     const std::int32_t*, int, float*, std::ptrdiff_t,
                                     float*) { of(self).refuse("read by lists"); };
        table.make_plan = [](const void* self, const block_shape&, block_id, int, void*) -> std::size_t {
            of(self).refuse("attended to");
        };
        table.describe = [](const void*, const block_shape&, float_type) { return format_description{}; };
    }
    /// Keys that a sequence may give a plan of so many widths.
    void take_plans(int widths) {
        static constexpr plan_functions plans{
            [](const void* self) { return of(self).plan != nullptr; },
            [](const format& from, const std::byte*, std::size_t) -> format {
                of(from.scheme()).refuse("planned");
            },
            [](const void* self, char* to) { return common::write_plan_text(*of(self).plan, to); },
            [](const format& from, const char* text, std::size_t letters) {
                const held_format& f = of(from.scheme());
                auto made = std::make_unique<held_format>(f);
                made->plan =
                    std::make_shared<const width_plan>(common::plan_of_text(text, letters, f.plan_widths));
                made->fingerprint = common::plan_fingerprint(made->plan.get());
                made->blocks.dequantize = nullptr;
                return format(made.release());
            },
            [](const void*, const block_shape&, block_id, const channel_importance&) { return 1.0; }};
        plan_widths = widths;
        table.plans = &plans;
    }
    held_format(const held_format& other)
        : format_record(),
          blocks(other.blocks),
          table(other.table),
          held_name(other.held_name),
          plan(other.plan),
          plan_widths(other.plan_widths) {
        functions = &table;
        scheme = this;
        name = held_name.c_str();
        has_fingerprint = other.has_fingerprint;
        fingerprint = other.fingerprint;
        destroy = other.destroy;
    }

private:
    static const held_format& of(const void* self) noexcept { return *static_cast<const held_format*>(self); }
    [[noreturn]] void refuse(const char* what) const {
        common::fail("pages of ", name, " in host_pages are bytes of a device: they cannot be ", what,
                     " on the host");
    }
};

/// The formats of a device's cache for one tensor, each once: those of cache_options::formats in their order,
/// then the others that its kernels know.
class held_formats {
public:
    held_formats(const cache& gpu, const format& window, tensor role) : window_(window), role_(role) {
        for (std::size_t i = 0; i < gpu.options().formats.size(); ++i) {
            const std::string& text = gpu.options().formats[i];
            const std::size_t cut = text.find('/');
            const std::string name = cut == text.npos      ? text
                                     : role == tensor::key ? text.substr(0, cut)
                                                           : text.substr(cut + 1);
            int first = -1;
            for (const layer_group& g : cache_access::groups(gpu))
                for (int kind = 0; kind < g.kinds() && holds(g); ++kind) {
                    const device_format::kind& k = g.format.kinds[static_cast<std::size_t>(kind)];
                    const std::vector<std::string>& names = role == tensor::key ? k.key_names : k.value_names;
                    if (std::ranges::find(names, name) == names.end()) continue;
                    const int at = add(g, kind);
                    if (first < 0) first = at;
                }
            numbers_.push_back(first);
        }
        for (const layer_group& g : cache_access::groups(gpu))
            for (int kind = 0; kind < g.kinds() && holds(g); ++kind) (void)add(g, kind);
    }
    const format_list& list() const noexcept { return list_; }
    /// Of the format with this number in cache_options::formats, 0 if it has no such tensor.
    int number(int listed) const noexcept {
        return common::larger(0, numbers_[static_cast<std::size_t>(listed)]);
    }

private:
    bool holds(const layer_group& g) const { return role_ == tensor::key || g.tensors().size() == 2; }
    int add(const layer_group& g, int kind) {
        const device_format::kind& k = g.format.kinds[static_cast<std::size_t>(kind)];
        const auto at = static_cast<std::size_t>(role_);
        const std::uint64_t state = g.keys[static_cast<std::size_t>(kind)].fingerprints[at];
        const std::string& name = role_ == tensor::key ? k.keys : k.values;
        int i = 0;
        while (i < list_.size() && !(list_[i].name() == name && list_[i].record().fingerprint == state)) ++i;
        if (i == list_.size()) {
            host_blocks blocks = k.blocks[at];
            if (state != k.fingerprints[at]) blocks.dequantize = nullptr;  // it takes a plan or matrices
            auto made = std::make_unique<held_format>(window_, role_, name, blocks, state);
            if (role_ == tensor::key && g.plans.takes(kind)) made->take_plans(k.plan_widths);
            list_.push_back(format(made.release()));
        }
        return i;
    }

    const format& window_;
    tensor role_;
    format_list list_;
    std::vector<int> numbers_;
};

}  // namespace detail

class host_pages {
public:
    /// memory: of all pages and lists, thread-safe; it outlives this object. Null: pinned memory.
    /// byte_budget: of pages with their headers, allocated at once; without one every page is an allocation.
    /// Raises kvq::error for a cache that is not open, std::bad_alloc.
    explicit host_pages(const cuda::cache& of, std::size_t byte_budget = page_pool::no_budget,
                        std::pmr::memory_resource* memory = nullptr) {
        description d = describe(of, byte_budget, memory != nullptr ? memory : &pinned_);
        cache_.emplace(std::move(d.layers), d.options);
    }
    /// What a CPU cache of such pages is made of.
    struct description {
        std::vector<layer> layers;
        kvq::cache_options options;
    };
    static description describe(const cuda::cache& of, std::size_t byte_budget,
                                std::pmr::memory_resource* memory) {
        common::expect(of.is_open(), "the cache on the device is not open");
        const format window = common::visit_float_type(
            of.options().type, []<class T>(T) { return make_format<full<T>, scalar>(); });
        const detail::held_formats keys(of, window, tensor::key), values(of, window, tensor::value);
        std::vector<layer> layers = of.layers();
        for (layer& l : layers)
            if (l.kind != layer_kind::state)
                l.formats = {keys.number(l.formats.key), values.number(l.formats.value)};
        const cache_options& o = of.options();
        return {std::move(layers),
                {.keys = keys.list(),
                 .values = values.list(),
                 .window = window,
                 .sinks = o.sinks,
                 .recent = o.recent,
                 .page_tokens = o.page_tokens,
                 .rollback = o.rollback,
                 .byte_budget = byte_budget,
                 .preallocate = byte_budget != page_pool::no_budget,
                 .rotary = o.rotary,
                 .repack = 0.0f,
                 .statistics = o.statistics,
                 .statistics_tokens = o.statistics_tokens,
                 .snapshots = o.snapshots,
                 .memory = memory}};
    }
    kvq::cache& cache() noexcept { return *cache_; }

private:
    pinned_memory pinned_;
    std::optional<kvq::cache> cache_;
};

}}}  // namespace kvq::cuda
