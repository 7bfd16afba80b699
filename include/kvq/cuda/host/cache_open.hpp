// cache::open(), calibrate(), and the reports of a cache on the device (cache.hpp): usage(), not_finite(), graph_id().
//
// open() checks all options, takes the compiled entry that has all formats and as few others as possible, and allocates tables, workspace and
// the pools that the options ask for. calibrate() sends plans of widths and matrices of feedback.
// Contract: every refusal names the option and its range, or the line that compiles the missing format; nothing is allocated then. open()
// runs once. calibrate() and not_finite() wait for the stream.
#pragma once

#include "cache_class.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

inline status cache::check_options(const cache_shape& shape, const cache_options& o) const {
    if (shape.layers < 1 || shape.layers > 65535 || shape.kv_heads < 1 || shape.head_dim < 1 ||
        shape.value_dim < 0)
        return detail::bad_value("a cache of %d layers, %d kv heads, head_dim %d and value_dim %d",
                                 shape.layers, shape.kv_heads, shape.head_dim, shape.value_dim);
    if (o.formats.empty()) return detail::bad_value("a cache needs a format, such as kivi-4-g64");
    if (o.page_tokens < 1) return detail::bad_value("page_tokens is %d", o.page_tokens);
    if (o.sinks < 0 || o.rollback < 0)
        return detail::bad_value("sinks is %d and rollback %d; they must not be negative", o.sinks,
                                 o.rollback);
    if (o.recent < 0 || o.step_tokens < 0 || o.step_tokens > o.page_tokens || o.step_tokens > o.recent)
        return detail::bad_value("step_tokens is %d, but must be 0 to page_tokens (%d) and to recent (%d)",
                                 o.step_tokens, o.page_tokens, o.recent);
    if (o.draft_tokens < 0 || o.draft_tokens > common::smaller(64, common::smaller(o.page_tokens, o.recent)))
        return detail::bad_value(
            "draft_tokens is %d, but must be 0 to 64, to page_tokens (%d) and to recent (%d)", o.draft_tokens,
            o.page_tokens, o.recent);
    if (o.cut_pages < 0 || o.cut_pages > detail::most_tokens)
        return detail::bad_value("cut_pages is %d", o.cut_pages);
    if (o.page_tokens > 65535)
        return detail::bad_value("page_tokens is %d, but must be at most 65535", o.page_tokens);
    if (o.max_batch < 1) return detail::bad_value("max_batch is %d", o.max_batch);
    if (o.max_tokens < 1 || o.max_tokens > detail::most_tokens)
        return detail::bad_value("max_tokens is %d, but must be 1 to %d", o.max_tokens, detail::most_tokens);
    for (const int x : {o.sinks, o.recent, o.rollback})
        if (x > detail::most_tokens)
            return detail::bad_value("sinks %d, recent %d and rollback %d must not be more than %d", o.sinks,
                                     o.recent, o.rollback, detail::most_tokens);
    if (o.pool_tokens < 0 || o.pool_sequences < 0)
        return detail::bad_value("pool_tokens is %d and pool_sequences %d", o.pool_tokens, o.pool_sequences);
    return {};
}

inline status cache::choose_format(const cache_shape& shape, const cache_options& o,
                                   std::span<const device_format> compiled) {
    const device_format* const best = find_device_format(compiled, o.formats, shape.head_dim,
                                                         shape.dim(tensor::value), o.page_tokens, o.type);
    if (best == nullptr) {
        std::string names;
        for (const std::string& name : o.formats) names += (names.empty() ? "" : "+") + name;
        return detail::bad_value(
            "nothing was compiled for %.48s, head_dim %d, pages of %d: add make_device_format<%.8s, ...>(), "
            "or name it in KVQ_CUDA_FORMATS",
            names.c_str(), shape.head_dim, o.page_tokens,
            o.type == float_type::bf16 ? "bfloat16" : "float16");
    }
    format_ = *best;
    return {};
}

inline status cache::open(const cache_shape& shape, const cache_options& options,
                          std::span<const device_format> compiled, cudaStream_t stream) {
    if (format_.functions != nullptr) return detail::bad_value("the cache is open already");
    if (status s = check_options(shape, options); !s) return s;
    if (status s = choose_format(shape, options, compiled); !s) return s;
    const auto undo = [&](const status& s) {
        format_ = {};
        quantized_.clear();
        keys_.clear();
        words_ = {};
        workspace_ = {};
        window_ = {};
        sinks_ = {};
        return s;
    };
    shape_ = shape;
    options_ = options;
    geometry_ = {{options.sinks, options.recent, options.page_tokens},
                 options.rollback,
                 common::larger(window_columns(options.recent + options.rollback + options.draft_tokens,
                                               options.page_tokens, 0),
                                window_columns(options.recent, options.page_tokens, options.step_tokens))};
    columns_ = common::larger(1, geometry_.pages(options.max_tokens));
    columns_ += common::smaller(options.cut_pages, detail::most_tokens / options.page_tokens - columns_);
    sink_columns_ = common::larger(1, geometry_.sink_pages(options.sinks));
    const long long words =
        static_cast<long long>(options.max_batch) * (5 + 2 * kinds() + (2LL * kinds() + 2) * columns_ +
                                                     geometry_.ring + sink_columns_ + options.draft_tokens) +
        2LL * columns_ + shape.layers + prompt_words;
    if (words > 1 << 30)
        return undo(detail::bad_value("tables of %d sequences of %d tokens are too large", options.max_batch,
                                      options.max_tokens));
    const int sink_pages = geometry_.sink_pages(options.sinks),
              most = (std::numeric_limits<int>::max)() / common::larger(geometry_.ring, sink_pages);
    if (options.pool_sequences > most)
        return undo(detail::bad_value(
            "pool_sequences is %d, but must be at most %d: each takes %d pages for its recent tokens and %d "
            "for sinks",
            options.pool_sequences, most, geometry_.ring, sink_pages));
    const auto heads = static_cast<std::size_t>(shape.kv_heads);
    quantized_.resize(format_.kinds.size());
    keys_.resize(format_.kinds.size());
    for (std::size_t i = 0; i < keys_.size(); ++i)
        std::copy_n(format_.kinds[i].fingerprints, 2, keys_[i].fingerprints);
    for (std::size_t i = 0; i < quantized_.size(); ++i)
        quantized_[i].open(options.memory, format_.kinds[i].name, static_cast<int>(i) + 1,
                           options.page_tokens, shape.layers, format_.kinds[i].key_block * heads,
                           format_.kinds[i].value_block * heads);
    window_.open(options.memory, "the window", 0, options.page_tokens, shape.layers,
                 format_.window_block[0] * heads, format_.window_block[1] * heads);
    sinks_.open(options.memory, "sinks", 0, detail::device_geometry::sink_page_tokens, shape.layers,
                format_.sink_block[0] * heads, format_.sink_block[1] * heads);
    if (status s =
            words_.allocate(options.memory, static_cast<std::size_t>(words) * sizeof(int), "tables", stream);
        !s)
        return undo(s);
    std::size_t workspace = 0;
    for (const int rows : {4, 8, 16})
        workspace = common::larger(workspace, format_.functions->workspace_bytes(1, rows));
    if (status s = workspace_.allocate(options.memory, workspace, "the workspace", stream); !s)
        return undo(s);
    const auto first = static_cast<std::size_t>(format_.find(options.formats[0]));
    if (status s = quantized_[first].grow(common::ceil_div(options.pool_tokens, options.page_tokens), stream);
        !s)
        return undo(s);
    if (status s = window_.grow(options.pool_sequences * geometry_.ring, stream); !s) return undo(s);
    if (status s = sinks_.grow(options.pool_sequences * sink_pages, stream); !s) return undo(s);
    mirror_.resize(static_cast<std::size_t>(list_at(false)));
    rows_.resize(static_cast<std::size_t>(options.max_batch));
    step_ = {};
    target_ = static_cast<int>(first);
    forget_rows();
    return {};
}

inline status cache::calibrate(std::string_view format, const calibration& statistics, cudaStream_t stream) {
    const int f = format_.find(format);
    if (f < 0) return detail::bad_value("%.60s is not a format of this cache", std::string(format).c_str());
    const cache_shape& s = statistics.shape();
    if (s.layers != shape_.layers || s.kv_heads != shape_.kv_heads || s.head_dim != shape_.head_dim)
        return detail::bad_value(
            "statistics of %d layers, %d kv heads and head_dim %d, but the cache has %d, %d, %d", s.layers,
            s.kv_heads, s.head_dim, shape_.layers, shape_.kv_heads, shape_.head_dim);
    if (quantized_[static_cast<std::size_t>(f)].pages().used() > 0)
        return detail::bad_value("pages of %.60s are in use; statistics come before the first page",
                                 std::string(format).c_str());
    const detail::key_state made = format_.functions->make_keys(f, statistics);
    device_keys& held = keys_[static_cast<std::size_t>(f)];
    detail::device_memory plans, feedback;
    const auto put = [&](detail::device_memory& to, const void* from, std::size_t bytes) -> status {
        if (status r = to.allocate(options_.memory, bytes, "statistics", stream); !r || bytes == 0) return r;
        const cudaError_t code = cudaMemcpyAsync(to.as<>(), from, bytes, cudaMemcpyHostToDevice, stream);
        return code == cudaSuccess ? status{} : detail::runtime_error(code, "copying statistics");
    };
    status r = put(plans, made.plans.data(), made.plans.size() * sizeof(std::uint16_t));
    if (r) r = put(feedback, made.feedback.data(), made.feedback.size() * sizeof(float));
    if (!r) return r;
    const cudaError_t code = cudaStreamSynchronize(stream);
    if (code != cudaSuccess) return detail::runtime_error(code, "copying statistics");
    held.plans = std::move(plans);
    held.feedback = std::move(feedback);
    if (!made.plans.empty()) held.fingerprints[0] = made.fingerprint;
    step_.begun = false;
    return {};
}

inline status cache::rotate(std::string_view format, tensor role, const rotation& matrices,
                            cudaStream_t stream) {
    const int f = format_.find(format);
    if (f < 0) return detail::bad_value("%.60s is not a format of this cache", std::string(format).c_str());
    matrices.check(shape_, role);
    const std::uint64_t fingerprint = format_.functions->rotated_fingerprint(f, role, matrices.fingerprint());
    if (fingerprint == 0)
        return detail::bad_value("%s of %.60s are not rotated", role == tensor::key ? "keys" : "values",
                                 std::string(format).c_str());
    if (quantized_[static_cast<std::size_t>(f)].pages().used() > 0)
        return detail::bad_value("pages of %.60s are in use; rotations come before the first page",
                                 std::string(format).c_str());
    const auto dim = static_cast<std::size_t>(shape_.dim(role));
    const std::size_t bytes = static_cast<std::size_t>(shape_.layers) *
                              static_cast<std::size_t>(shape_.kv_heads) * dim * dim * sizeof(float);
    detail::device_memory made;
    if (status s = made.allocate(options_.memory, 2 * bytes, "rotations", stream); !s) return s;
    cudaError_t code =
        cudaMemcpyAsync(made.as<>(), matrices.columns(), bytes, cudaMemcpyHostToDevice, stream);
    if (code == cudaSuccess)
        code = cudaMemcpyAsync(made.as<>() + bytes, matrices.rows(), bytes, cudaMemcpyHostToDevice, stream);
    if (code == cudaSuccess) code = cudaStreamSynchronize(stream);
    if (code != cudaSuccess) return detail::runtime_error(code, "copying rotations");
    device_keys& keys = keys_[static_cast<std::size_t>(f)];
    keys.rotations[static_cast<int>(role)] = std::move(made);
    keys.fingerprints[static_cast<int>(role)] = fingerprint;
    step_.begun = false;
    return {};
}

inline void cache::forget_rows() {
    std::fill(mirror_.begin(), mirror_.end(), (std::numeric_limits<int>::min)());
    std::fill(rows_.begin(), rows_.end(), row{});
}

inline std::uint64_t cache::graph_id() const noexcept {
    std::uint64_t moved = window_.generation() + sinks_.generation();
    for (const detail::device_pages& p : quantized_) moved += p.generation();
    const int tokens = step_.draft == 0 ? step_.new_tokens : 1 << 15 | step_.draft << 7 | step_.new_tokens;
    return moved << 40 | static_cast<std::uint64_t>(step_.rows) << 20 |
           static_cast<std::uint64_t>(tokens) << 4 | step_.targets;
}

inline std::vector<detail::layer_view> cache::all_layers() const {
    std::vector<detail::layer_view> layers;
    for (int i = 0; i < shape_.layers; ++i) layers.push_back(view(i));
    return layers;
}

inline detail::layer_view cache::view(int layer) const noexcept {
    const int* const words = words_.as<int>();
    // Memory that is there stands for that of formats without pages: it is not read.
    const auto memory = [&](const detail::device_pages& p) {
        detail::pool_memory m = p.memory();
        if (m.data == nullptr) m.data = words_.as<>();
        return m.layer(m.data == words_.as<>() ? 0 : layer);
    };
    detail::layer_view v{};
    for (int f = 0; f < kinds(); ++f) {
        const device_keys& keys = keys_[static_cast<std::size_t>(f)];
        const auto of_layer = [&]<class T>(const detail::device_memory& all, const T*) {
            return all.bytes() == 0 ? nullptr
                                    : all.as<const T>() + all.bytes() / sizeof(T) /
                                                              static_cast<std::size_t>(shape_.layers) *
                                                              static_cast<std::size_t>(layer);
        };
        v.quantized[f] = {memory(quantized_[static_cast<std::size_t>(f)]),
                          words + table_at(f, false, 0),
                          words + table_at(f, true, 0),
                          words + first_at(f, 0),
                          words + end_at(f, 0),
                          of_layer(keys.plans, static_cast<const std::uint16_t*>(nullptr)),
                          of_layer(keys.feedback, static_cast<const float*>(nullptr))};
        for (int role = 0; role < 2; ++role)
            if (const auto& all = keys.rotations[role]; all.bytes() > 0) {
                const std::size_t half = all.bytes() / sizeof(float) / 2,
                                  at = half / static_cast<std::size_t>(shape_.layers) *
                                       static_cast<std::size_t>(layer);
                v.quantized[f].columns[role] = all.as<const float>() + at;
                v.quantized[f].rows[role] = all.as<const float>() + half + at;
            }
    }
    v.layer = layer;
    v.window = memory(window_);
    v.window_table = words + window_at(0);
    v.sinks = options_.sinks > 0 ? memory(sinks_) : v.window;
    v.sink_table = words + sinks_at(0);
    v.tokens = words + tokens_at(0);
    v.committed = words + committed_at(0);
    v.cuts = {words + cut_end_at(0), words + skipped_at(0), words + shown_at(0), columns_,
              options_.page_tokens,  options_.sinks};
    v.sequences = step_.rows;
    v.columns = columns_;
    v.ring = geometry_.ring;
    v.sink_columns = sink_columns_;
    v.kv_heads = shape_.kv_heads;
    v.first_token = options_.sinks;
    v.recent = options_.recent;
    v.not_finite = words_.as<unsigned>() + not_finite_at(layer);
    return v;
}

inline detail::layer_view cache::view_before_prompt(int layer) const noexcept {
    detail::layer_view v = view(layer);
    v.tokens = words_.as<int>() + prompt_at();
    v.committed = words_.as<int>() + prompt_at() + 1;
    for (int f = 0; f < kinds(); ++f) v.quantized[f].end_page = v.committed;
    return v;
}

inline usage_report cache::usage(sequence_id id) const {
    return is_here(id) ? entry_of(id).pages.usage() : usage_report{};
}

inline usage_report cache::usage() const {
    usage_report u;
    for (const entry& e : entries_) e.pages.add_window(u);
    for (const detail::device_pages& p : quantized_) {
        u.quantized += p.used_bytes();
        u.pages += static_cast<std::size_t>(p.pages().used());
    }
    u.reserved += bytes_held() - bytes_in_use();
    u.bookkeeping = words_.bytes();
    for (const device_keys& k : keys_)
        u.bookkeeping +=
            k.plans.bytes() + k.feedback.bytes() + k.rotations[0].bytes() + k.rotations[1].bytes();
    u.workspace = workspace_.bytes() + prompt_bytes();
    common::add_up(u);
    return u;
}

inline std::size_t cache::bytes_in_use() const noexcept {
    std::size_t sum = window_.used_bytes() + sinks_.used_bytes();
    for (const detail::device_pages& p : quantized_) sum += p.used_bytes();
    return sum;
}

inline std::size_t cache::bytes_held() const noexcept {
    std::size_t sum = window_.allocated() + sinks_.allocated();
    for (const detail::device_pages& p : quantized_) sum += p.allocated();
    return sum;
}

inline status cache::not_finite(std::span<unsigned> by_layer, cudaStream_t stream) const {
    if (static_cast<int>(by_layer.size()) != shape_.layers || format_.functions == nullptr)
        return detail::bad_value("counts of %zu layers, but the cache has %d", by_layer.size(),
                                 shape_.layers);
    cudaError_t code = cudaMemcpyAsync(by_layer.data(), words_.as<unsigned>() + not_finite_at(0),
                                       by_layer.size_bytes(), cudaMemcpyDeviceToHost, stream);
    if (code == cudaSuccess) code = cudaStreamSynchronize(stream);
    return code == cudaSuccess ? status{} : detail::runtime_error(code, "reading counts");
}

}}}  // namespace kvq::cuda
