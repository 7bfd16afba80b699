#include "engine.hpp"

#include "device_weights.cuh"
#include "formats.cuh"
#include "products.cuh"

#include <algorithm>
#include <map>

namespace llama::device {

static void check(const kvq::cuda::status& s) {
    if (s) return;
    if (s.code == cudaErrorMemoryAllocation) throw out_of_memory(s.message);
    throw std::runtime_error(s.message);
}

namespace {

using kvq::token_view;
using cache_format = kvq::cuda::device_format;

constexpr kvq::float_type cache_type(precision type) {
    return type == precision::fp16 ? kvq::float_type::fp16 : kvq::float_type::bf16;
}
bool is_16_bit(std::string_view name) { return name == "fp16" || name == "bf16"; }

// The narrowest heads that some format was compiled for and that the model's fit into.
int padded_dim(int head_dim, precision type) {
    int best = 0;
    for (const cache_format& f : compiled_formats())
        if (f.type == cache_type(type) && f.head_dim >= head_dim && (best == 0 || f.head_dim < best))
            best = f.head_dim;
    if (best == 0)
        throw std::invalid_argument("no format was compiled for heads of " + std::to_string(head_dim) +
                                    " channels and activations in " +
                                    (type == precision::fp16 ? "fp16" : "bf16"));
    return best;
}

// Device memory with a limit.
struct limited_memory {
    std::size_t used = 0, limit = 0;

    kvq::cuda::device_allocator allocator() {
        kvq::cuda::device_allocator a;
        a.user = this;
        a.allocate = [](std::size_t bytes, void* user) -> void* {
            auto& self = *static_cast<limited_memory*>(user);
            if (self.limit > 0 && bytes > self.limit - std::min(self.limit, self.used)) return nullptr;
            void* p = nullptr;
            if (cudaMalloc(&p, bytes) != cudaSuccess) {
                (void)cudaGetLastError();
                return nullptr;
            }
            self.used += bytes;
            return p;
        };
        a.release = [](void* p, std::size_t bytes, void* user) {
            (void)cudaFree(p);
            static_cast<limited_memory*>(user)->used -= bytes;
        };
        return a;
    }
};

struct owned_stream {
    cudaStream_t get = nullptr;
    owned_stream() { check(cudaStreamCreateWithFlags(&get, cudaStreamNonBlocking), "creating a stream"); }
    owned_stream(const owned_stream&) = delete;
    owned_stream& operator=(const owned_stream&) = delete;
    ~owned_stream() { (void)cudaStreamDestroy(get); }
};

// A captured decode step.
struct step_graph {
    cudaGraphExec_t exec = nullptr;
    std::uint64_t id = 0;
    bool warm = false;  // the step has run outside of a capture, so that its kernels are loaded

    step_graph() = default;
    step_graph(const step_graph&) = delete;
    step_graph& operator=(const step_graph&) = delete;
    ~step_graph() { clear(); }
    void clear() {
        if (exec != nullptr) (void)cudaGraphExecDestroy(exec);
        exec = nullptr;
    }
};

template <class T>
class engine_on final : public engine {
public:
    engine_on(std::shared_ptr<const device_weights<T>> weights, const engine_options& chosen)
        : weights_(std::move(weights)),
          options_(chosen),
          shape_(weights_->config.shape),
          products_(stream_.get) {
        if (options_.max_tokens == 0) options_.max_tokens = shape_.context;
        if (options_.chunk < 1 || options_.max_batch < 1)
            throw std::invalid_argument("chunks of " + std::to_string(options_.chunk) +
                                        " tokens and batches of " + std::to_string(options_.max_batch));
        open_cache();
        make_angles();
        const int rows = std::max(options_.chunk, rounded(options_.max_batch));
        const auto of = [&](int n, int width) {
            return static_cast<std::size_t>(n) * static_cast<std::size_t>(width);
        };
        states_ = buffer<float>(of(rows, shape_.dim));
        input_ = buffer<T>(of(rows, shape_.dim));
        head_products_ = buffer<float>(of(rows, weights_->products()));
        q_ = buffer<T>(of(rows, inner()));
        out_ = buffer<T>(of(rows, inner()));
        k_ = buffer<T>(of(rows, shape_.kv_heads * dim()));
        v_ = buffer<T>(of(rows, shape_.kv_heads * dim()));
        gate_up_ = buffer<T>(of(rows, 2 * shape_.hidden_dim));
        gate_ = buffer<T>(of(rows, shape_.hidden_dim));
        const device_layer<T>& first = weights_->layers.front();
        if (first.attention_output_bias.size() + first.attention_output_norm.size() +
                first.feed_forward_output_norm.size() >
            0)
            update_ = buffer<float>(of(rows, shape_.dim));
        logit_rows_ = std::max(std::min(rows, logit_block), rounded(options_.max_batch));
        logits_ = buffer<float>(of(logit_rows_, shape_.vocab));
        tokens_ = buffer<int>(static_cast<std::size_t>(rows));
        positions_ = buffer<int>(static_cast<std::size_t>(rows));
        choices_ = buffer<int>(static_cast<std::size_t>(logit_rows_));
        check(cudaStreamSynchronize(stream_.get), "opening an engine");
    }
    ~engine_on() override { (void)cudaStreamSynchronize(stream_.get); }

    const model_config& config() const override { return weights_->config; }
    const engine_options& options() const override { return options_; }

    int new_sequence() override { return add(cache_.new_sequence()); }
    int fork(int sequence) override {
        kvq::cuda::sequence_id copy;
        check(cache_.fork(id_of(sequence), copy, stream_.get));
        return add(copy);
    }
    void free(int sequence) override {
        check(cache_.free(id_of(sequence)));
        ids_[static_cast<std::size_t>(sequence)] = {};
    }
    void trim(int sequence, int n) override {
        check(cache_.trim(id_of(sequence), n));
        batch_.clear();
    }
    int tokens(int sequence) const override { return cache_.tokens(id_of(sequence)); }
    std::size_t bytes(int sequence) const override { return cache_.usage(id_of(sequence)).bytes; }

    void read(int sequence, std::span<const int> tokens, float* states) override {
        const kvq::cuda::sequence_id id = id_of(sequence);
        check_tokens(tokens);
        const int count = static_cast<int>(tokens.size());
        if (count == 0) throw std::invalid_argument("a prompt without tokens");
        batch_.clear();
        for (int first = 0; first < count; first += options_.chunk) {
            const int n = std::min(options_.chunk, count - first), before = cache_.tokens(id);
            check(cache_.begin_prompt(id, n, stream_.get));
            check(cudaStreamSynchronize(stream_.get),
                  "reading a prompt");  // before host memory is copied from again
            check(cudaMemcpyAsync(tokens_.get(), tokens.data() + first,
                                  static_cast<std::size_t>(n) * sizeof(int), cudaMemcpyHostToDevice,
                                  stream_.get),
                  "copying tokens");
            forward(n, before, true);
            if (states != nullptr) copy_states(n, states + static_cast<std::size_t>(first) * row_size());
            if (first + n == count) {
                // The last row alone.
                const std::size_t last = static_cast<std::size_t>(n - 1) * row_size();
                find_logits(input_.get() + last, 1);
                choose(1, false);
            }
        }
        rows_ = 1;
        step_down();
    }

    void decode(std::span<const int> sequences, std::span<const int> tokens) override {
        if (sequences.empty() || static_cast<int>(sequences.size()) > options_.max_batch)
            throw std::invalid_argument("a step of " + std::to_string(sequences.size()) +
                                        " sequences, max_batch is " + std::to_string(options_.max_batch));
        if (!tokens.empty() && tokens.size() != sequences.size())
            throw std::invalid_argument(std::to_string(tokens.size()) + " tokens for " +
                                        std::to_string(sequences.size()) + " sequences");
        check_tokens(tokens);
        const int rows = rounded(static_cast<int>(sequences.size()));
        if (tokens.empty() && batch_ != std::vector<int>(sequences.begin(), sequences.end()))
            throw std::invalid_argument("a step without tokens follows a step of the same sequences");
        ids_of_batch_.assign(static_cast<std::size_t>(rows), {});
        for (std::size_t i = 0; i < sequences.size(); ++i) ids_of_batch_[i] = id_of(sequences[i]);
        if (!tokens.empty()) {
            host_tokens_.assign(static_cast<std::size_t>(rows), 0);
            host_positions_.assign(static_cast<std::size_t>(rows), 0);
            for (std::size_t i = 0; i < sequences.size(); ++i) {
                host_tokens_[i] = tokens[i];
                host_positions_[i] = cache_.tokens(ids_of_batch_[i]);
            }
        }
        check(cache_.begin_step(ids_of_batch_, 1, stream_.get));
        if (!tokens.empty()) {
            const std::size_t size = static_cast<std::size_t>(rows) * sizeof(int);
            check(cudaMemcpyAsync(tokens_.get(), host_tokens_.data(), size, cudaMemcpyHostToDevice,
                                  stream_.get),
                  "copying tokens");
            check(cudaMemcpyAsync(positions_.get(), host_positions_.data(), size, cudaMemcpyHostToDevice,
                                  stream_.get),
                  "copying positions");
        }
        run_step(rows);
        batch_.assign(sequences.begin(), sequences.end());
        rows_ = static_cast<int>(sequences.size());
        step_down();
    }

    void choices(std::span<int> out) override {
        check_rows(out.size(), static_cast<std::size_t>(rows_), "choices");
        download(choices_.get(), out.data(), out.size());
    }
    void logits(std::span<float> out) override {
        check_rows(out.size(), static_cast<std::size_t>(rows_) * static_cast<std::size_t>(shape_.vocab),
                   "logits");
        download(logits_.get(), out.data(), out.size());
    }
    void logits_of(std::span<const float> states, std::span<float> out) override {
        const std::size_t vocab = static_cast<std::size_t>(shape_.vocab), rows = states.size() / row_size();
        check_rows(states.size(), rows * row_size(), "states");
        check_rows(out.size(), rows * vocab, "logits");
        for (std::size_t first = 0; first < rows; first += static_cast<std::size_t>(logit_rows_)) {
            const std::size_t n = std::min(static_cast<std::size_t>(logit_rows_), rows - first);
            host_states_.resize(n * row_size());
            for (std::size_t i = 0; i < host_states_.size(); ++i)
                host_states_[i] = T(states[first * row_size() + i]);
            check(cudaStreamSynchronize(stream_.get), "waiting for a step");
            // On the engine's stream, which waits for no other: cudaMemcpy may return before the device has
            // the numbers.
            check(cudaMemcpyAsync(input_.get(), host_states_.data(), host_states_.size() * sizeof(T),
                                  cudaMemcpyHostToDevice, stream_.get),
                  "copying states");
            find_logits(input_.get(), static_cast<int>(n));
            choose(static_cast<int>(n), false);
            download(logits_.get(), out.data() + first * vocab, n * vocab);
        }
        rows_ = 0;
    }
    void wait() override { check(cudaStreamSynchronize(stream_.get), "waiting for the device"); }

    engine_usage usage() const override {
        return {cache_.usage().bytes, cache_.bytes_in_use(), activation_bytes_ + products::workspace_bytes};
    }
    std::size_t bytes_for(int tokens) const override {
        const kvq::cuda::cache_options& o = cache_.options();
        const cache_format& f = cache_.formats(0);
        const cache_format::kind& kind = f.kinds[static_cast<std::size_t>(f.find(o.formats[0]))];
        const int behind = std::max(0, tokens - o.sinks),
                  quantized = std::max(0, behind - o.recent) / o.page_tokens,
                  in_window = std::min(ring(o), (behind + o.page_tokens - 1) / o.page_tokens),
                  of_sinks = (std::min(tokens, o.sinks) + 15) / 16;
        const auto pages = [&](int count, std::size_t keys, std::size_t values) {
            return static_cast<std::size_t>(count) * static_cast<std::size_t>(shape_.layers) *
                   static_cast<std::size_t>(shape_.kv_heads) * (keys + values);
        };
        return pages(quantized, kind.key_block, kind.value_block) +
               pages(in_window, f.window_block[0], f.window_block[1]) +
               pages(of_sinks, f.sink_block[0], f.sink_block[1]);
    }
    int captures() const override { return captures_; }

    void record(int n) override {
        recorded_ = 0;
        record_room_ = n;
        const std::size_t size =
            static_cast<std::size_t>(shape_.layers) * static_cast<std::size_t>(n) * kv_size();
        recorded_keys_ = device_buffer<T>(size);
        recorded_values_ = device_buffer<T>(size);
    }
    void append_recorded(int sequence, int first, int n) override {
        if (first < 0 || n < 1 || first + n > recorded_)
            throw std::invalid_argument("tokens " + std::to_string(first) + " to " +
                                        std::to_string(first + n) + " of " + std::to_string(recorded_) +
                                        " recorded ones");
        check(cache_.begin_prompt(id_of(sequence), n, stream_.get));
        for (int layer = 0; layer < shape_.layers; ++layer)
            check(cache_.append(layer, rows_of(recorded_keys_, layer, first, n),
                                rows_of(recorded_values_, layer, first, n), stream_.get));
    }

private:
    static constexpr int logit_block = 64;

    int dim() const { return weights_->padded; }
    int inner() const { return shape_.heads * dim(); }
    std::size_t row_size() const { return static_cast<std::size_t>(shape_.dim); }
    std::size_t kv_size() const {
        return static_cast<std::size_t>(shape_.kv_heads) * static_cast<std::size_t>(dim());
    }
    // Batches of some sizes only, so that few graphs are captured.
    static int rounded(int rows) {
        int most = 1;
        while (most < rows && most < 8) most *= 2;
        return rows <= most ? most : (rows + 7) / 8 * 8;
    }

    template <class X>
    device_buffer<X> buffer(std::size_t size) {
        activation_bytes_ += size * sizeof(X);
        return device_buffer<X>(size);
    }

    // Columns of the window's table, with a rollback of 0.
    static int ring(const kvq::cuda::cache_options& o) {
        return kvq::cuda::window_columns(o.recent, o.page_tokens);
    }

    // ---- opening ----

    void open_cache() {
        const bool in_window = is_16_bit(options_.format);
        kvq::cuda::cache_options o;
        o.page_tokens = options_.page_tokens;
        o.type = cache_type(weights_->type);
        o.sinks = in_window ? 0 : options_.sinks;
        // Where nothing leaves the window, nothing is quantized: any entry's kernels will do.
        o.recent = in_window ? options_.max_tokens : options_.recent;
        o.rollback = 0;
        o.max_batch = rounded(options_.max_batch);
        o.max_tokens = options_.max_tokens;
        o.statistics = kvq::key_statistics::off;  // as a name without +own on the CPU
        if (!in_window) o.formats.push_back(options_.format);
        for (const format_tier& t : options_.tiers)
            if (std::find(o.formats.begin(), o.formats.end(), t.format) == o.formats.end())
                o.formats.push_back(t.format);
        if (in_window && !options_.tiers.empty())
            throw std::invalid_argument("tiers need a quantized format for new pages, not " +
                                        options_.format);
        std::string known;
        for (const cache_format& f : compiled_formats()) {
            if (f.head_dim != dim() || f.type != o.type || f.page_tokens != o.page_tokens) continue;
            for (const cache_format::kind& kind : f.kinds) {
                if (in_window && o.formats.empty()) o.formats.push_back(kind.name);
                if (known.find(kind.name) == std::string::npos)
                    known += (known.empty() ? "" : ", ") + kind.name;
            }
        }
        o.pool_tokens = in_window ? 0 : options_.pool_tokens;
        o.pool_sequences = options_.pool_sequences;
        if (in_window) {  // a ring has one column more than a sequence of max_tokens fills
            const int filled = (o.max_tokens + o.page_tokens - 1) / o.page_tokens;
            o.pool_sequences = (options_.pool_sequences * filled + ring(o) - 1) / ring(o);
        }
        o.growing = options_.growing;
        memory_.limit = options_.cache_bytes;
        o.memory = memory_.allocator();
        const auto opened =
            cache_.open({.layers = shape_.layers, .kv_heads = shape_.kv_heads, .head_dim = dim()}, o,
                        compiled_formats(), stream_.get);
        if (!opened) {
            if (opened.code == cudaErrorMemoryAllocation) throw out_of_memory(opened.message);
            throw std::invalid_argument(std::string(opened.message) + "; compiled are fp16, bf16" +
                                        (known.empty() ? "" : ", ") + known);
        }
        for (const format_tier& t : options_.tiers) tiers_.push_back({t.age, t.format});
    }
    void make_angles() {
        const rotary_angles* const kinds[2] = {&config().rotary, &config().window_rotary};
        for (int kind = 0; kind < 2; ++kind) {
            const int pairs = static_cast<int>(kinds[kind]->frequencies.size());
            if (pairs == 0) continue;
            device_buffer<double> frequencies(static_cast<std::size_t>(pairs));
            check(cudaMemcpyAsync(frequencies.get(), kinds[kind]->frequencies.data(), frequencies.bytes(),
                                  cudaMemcpyHostToDevice, stream_.get),
                  "copying frequencies");
            angles_[kind] = buffer<float2>(static_cast<std::size_t>(options_.max_tokens) *
                                           static_cast<std::size_t>(pairs));
            launch(angles_kernel, dim3(static_cast<unsigned>(options_.max_tokens)), row_threads, stream_.get,
                   frequencies.get(), kinds[kind]->amplitude, pairs, angles_[kind].get());
            check(cudaStreamSynchronize(stream_.get), "computing angles");
        }
    }
    // ---- the forward pass ----

    token_view<const T> queries(int n) const { return {q_.get(), n, shape_.heads, dim()}; }
    token_view<T> outputs(int n) const { return {out_.get(), n, shape_.heads, dim()}; }
    token_view<const T> rows_of(const device_buffer<T>& recorded, int layer, int first, int n) const {
        return {recorded.get() + (static_cast<std::size_t>(layer) * static_cast<std::size_t>(record_room_) +
                                  static_cast<std::size_t>(first)) *
                                     kv_size(),
                n, shape_.kv_heads, dim()};
    }

    // n tokens of a prompt from position `first` on, or a token of every sequence of the step. Leaves the
    // normed states in input_.
    void forward(int n, int first, bool prompt) {
        const model_config& c = config();
        const dim3 rows(static_cast<unsigned>(n));
        const auto tiles = [&](int width) {
            return dim3(static_cast<unsigned>(n),
                        static_cast<unsigned>((width + row_threads - 1) / row_threads));
        };
        const auto norm = [&](const device_buffer<float>& weight) {
            launch(norm_kernel<T>, rows, row_threads, stream_.get, states_.get(), weight.get(), shape_.dim,
                   c.norm_epsilon, input_.get());
        };
        // states += x W^T + bias, or the norm of it.
        const auto add_product = [&](const T* x, const device_buffer<T>& weights, int inputs,
                                     const device_buffer<float>& bias,
                                     const device_buffer<float>& output_norm) {
            const bool plain = bias.size() + output_norm.size() == 0;
            products_.multiply(x, n, weights.get(), shape_.dim, inputs, plain ? states_.get() : update_.get(),
                               plain);
            if (!plain)
                launch(add_kernel, rows, row_threads, stream_.get, update_.get(), bias.get(),
                       output_norm.get(), shape_.dim, c.norm_epsilon, states_.get());
        };
        launch(embed_kernel<T>, rows, row_threads, stream_.get, weights_->embedding.get(), tokens_.get(),
               shape_.dim, c.embedding_scale, states_.get());
        int layer = 0;
        for (const device_layer<T>& w : weights_->layers) {
            norm(w.attention_norm);
            products_.multiply(input_.get(), n, w.query_key_value.get(), weights_->products(), shape_.dim,
                               head_products_.get(), false);
            const bool has_window = shape_.window(layer) > 0;
            const head_args<T> heads{head_products_.get(),
                                     w.query_bias.get(),
                                     w.key_bias.get(),
                                     w.value_bias.get(),
                                     w.query_norm.get(),
                                     w.key_norm.get(),
                                     angles_[has_window && angles_[1].size() > 0 ? 1 : 0].get(),
                                     prompt ? nullptr : positions_.get(),
                                     first,
                                     shape_.heads,
                                     shape_.kv_heads,
                                     shape_.head_dim(),
                                     dim(),
                                     c.pairs == kvq::rotary_layout::interleaved,
                                     c.norm_epsilon,
                                     c.query_scale,
                                     q_.get(),
                                     k_.get(),
                                     v_.get()};
            const int warps = row_threads / 32;
            launch(heads_kernel<T>,
                   dim3(static_cast<unsigned>(n),
                        static_cast<unsigned>((shape_.heads + 2 * shape_.kv_heads + warps - 1) / warps)),
                   row_threads, stream_.get, heads);
            attend(layer, n, prompt);
            add_product(out_.get(), w.attention_output, inner(), w.attention_output_bias,
                        w.attention_output_norm);
            norm(w.feed_forward_norm);
            products_.multiply(input_.get(), n, w.gate_up.get(), 2 * shape_.hidden_dim, shape_.dim,
                               gate_up_.get(), false);
            launch(gate_kernel<T>, tiles(shape_.hidden_dim), row_threads, stream_.get, gate_up_.get(),
                   shape_.hidden_dim, c.gate == activation::gelu_tanh, gate_.get());
            add_product(gate_.get(), w.down, shape_.hidden_dim, no_floats_, w.feed_forward_output_norm);
            ++layer;
        }
        norm(weights_->final_norm);
        if (prompt && recorded_ < record_room_) recorded_ += std::min(n, record_room_ - recorded_);
    }
    void attend(int layer, int n, bool prompt) {
        const token_view<const T> k(k_.get(), n, shape_.kv_heads, dim()),
            v(v_.get(), n, shape_.kv_heads, dim());
        const float scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim()));
        if (prompt) {
            record_rows(layer, n);
            kvq::cuda::prefill_options o;
            o.scale = scale;
            o.softcap = shape_.attention_softcap;
            o.window = shape_.window(layer);
            check(cache_.prefill(layer, k, v, queries(n), outputs(n), o, stream_.get));
            return;
        }
        kvq::cuda::attention_options o;
        o.scale = scale;
        o.softcap = shape_.attention_softcap;
        o.window = shape_.window(layer);
        o.early = true;
        check(cache_.attend(layer, k, v, queries(n), outputs(n), o, stream_.get));
    }
    void record_rows(int layer, int n) {
        const int count = std::min(n, record_room_ - recorded_);
        if (count <= 0) return;
        const std::size_t bytes = static_cast<std::size_t>(count) * kv_size() * sizeof(T);
        for (const auto& [from, to] : {std::pair{&k_, &recorded_keys_}, std::pair{&v_, &recorded_values_}})
            check(cudaMemcpyAsync(const_cast<T*>(rows_of(*to, layer, recorded_, count).data), from->get(),
                                  bytes, cudaMemcpyDeviceToDevice, stream_.get),
                  "recording keys and values");
    }
    void find_logits(const T* states, int n) {
        products_.multiply(states, n, weights_->logits(), shape_.vocab, shape_.dim, logits_.get(), false);
    }
    void choose(int n, bool step) {
        launch(choose_kernel, dim3(static_cast<unsigned>(n)), row_threads, stream_.get, logits_.get(),
               shape_.vocab, config().logit_softcap, choices_.get(), tokens_.get(),
               step ? positions_.get() : nullptr);
    }

    // ---- decode steps ----

    void launch_step(int rows) {
        forward(rows, 0, false);
        find_logits(input_.get(), rows);
        choose(rows, true);
    }
    void run_step(int rows) {
        step_graph& graph = graphs_[rows];
        const std::uint64_t id = cache_.graph_id();
        if (!options_.graphs || !graph.warm) {
            launch_step(rows);
            graph.warm = true;
            return;
        }
        if (graph.exec == nullptr || graph.id != id) {
            graph.clear();
            check(cudaStreamSynchronize(stream_.get), "waiting for a step");
            check(cudaStreamBeginCapture(stream_.get, cudaStreamCaptureModeThreadLocal), "capturing a step");
            cudaGraph_t captured = nullptr;
            try {
                launch_step(rows);
            } catch (...) {
                if (cudaStreamEndCapture(stream_.get, &captured) == cudaSuccess)
                    (void)cudaGraphDestroy(captured);
                throw;
            }
            check(cudaStreamEndCapture(stream_.get, &captured), "capturing a step");
            const cudaError_t made = cudaGraphInstantiate(&graph.exec, captured, 0);
            (void)cudaGraphDestroy(captured);
            check(made, "making a graph");
            graph.id = id;
            ++captures_;
        }
        check(cudaGraphLaunch(graph.exec, stream_.get), "launching a graph");
    }
    // Once for every page of tokens that passed.
    void step_down() {
        if (tiers_.empty() || ++passed_ % options_.page_tokens != 0) return;
        std::vector<kvq::cuda::sequence_id> all;
        for (const kvq::cuda::sequence_id id : ids_)
            if (id != kvq::cuda::sequence_id{}) all.push_back(id);
        std::vector<kvq::cuda::tier> tiers;
        for (const format_tier& t : tiers_) tiers.push_back({t.age, t.format});
        check(cache_.step_down(all, tiers, stream_.get,
                               options_.budget > 0 ? options_.budget : kvq::cuda::cache::no_budget));
    }

    // ---- small help ----

    int add(kvq::cuda::sequence_id id) {
        const auto place = std::find(ids_.begin(), ids_.end(), kvq::cuda::sequence_id{});
        const auto index = static_cast<std::size_t>(place - ids_.begin());
        if (place == ids_.end()) ids_.push_back(id);
        ids_[index] = id;
        return static_cast<int>(index);
    }
    kvq::cuda::sequence_id id_of(int sequence) const {
        if (sequence < 0 || sequence >= static_cast<int>(ids_.size()) ||
            ids_[static_cast<std::size_t>(sequence)] == kvq::cuda::sequence_id{})
            throw std::invalid_argument("there is no sequence " + std::to_string(sequence));
        return ids_[static_cast<std::size_t>(sequence)];
    }
    void check_tokens(std::span<const int> tokens) const {
        for (const int token : tokens)
            if (token < 0 || token >= shape_.vocab)
                throw std::invalid_argument("token " + std::to_string(token) + " is not in a vocabulary of " +
                                            std::to_string(shape_.vocab));
    }
    static void check_rows(std::size_t have, std::size_t want, const char* what) {
        if (have != want)
            throw std::invalid_argument("room for " + std::to_string(have) + " " + what + ", there are " +
                                        std::to_string(want));
    }
    template <class X>
    void download(const X* from, X* to, std::size_t count) {
        check(cudaMemcpyAsync(to, from, count * sizeof(X), cudaMemcpyDeviceToHost, stream_.get),
              "copying results");
        check(cudaStreamSynchronize(stream_.get), "waiting for results");
    }
    void copy_states(int n, float* to) {
        host_states_.resize(static_cast<std::size_t>(n) * row_size());
        download(input_.get(), host_states_.data(), host_states_.size());
        for (std::size_t i = 0; i < host_states_.size(); ++i) to[i] = static_cast<float>(host_states_[i]);
    }

    owned_stream stream_;
    std::shared_ptr<const device_weights<T>> weights_;
    engine_options options_;
    model_shape shape_;
    products products_;
    limited_memory memory_;
    kvq::cuda::cache cache_;
    std::vector<format_tier> tiers_;
    int passed_ = 0;
    std::vector<kvq::cuda::sequence_id> ids_;  // by the engine's numbers

    device_buffer<float> states_, head_products_, update_, logits_, no_floats_;
    device_buffer<T> input_, q_, k_, v_, out_, gate_up_, gate_;
    device_buffer<float2> angles_[2];  // of all layers, and of those with a window
    device_buffer<int> tokens_, positions_, choices_;
    std::size_t activation_bytes_ = 0;
    int logit_rows_ = 0;

    std::map<int, step_graph> graphs_;  // by rows
    int captures_ = 0, rows_ = 0;
    std::vector<int> batch_, host_tokens_, host_positions_;
    std::vector<kvq::cuda::sequence_id> ids_of_batch_;
    std::vector<T> host_states_;

    int recorded_ = 0, record_room_ = 0;
    device_buffer<T> recorded_keys_, recorded_values_;
};

}  // namespace

std::shared_ptr<const device_model> upload(const weights_source& weights, precision type) {
    const int padded = padded_dim(weights.config.shape.head_dim(), type);
    if (type == precision::fp16) return std::make_shared<device_weights<kvq::float16>>(weights, padded);
    return std::make_shared<device_weights<kvq::bfloat16>>(weights, padded);
}

std::unique_ptr<engine> make_engine(std::shared_ptr<const device_model> model,
                                    const engine_options& options) {
    if (auto fp16 = std::dynamic_pointer_cast<const device_weights<kvq::float16>>(model))
        return std::make_unique<engine_on<kvq::float16>>(std::move(fp16), options);
    return std::make_unique<engine_on<kvq::bfloat16>>(
        std::dynamic_pointer_cast<const device_weights<kvq::bfloat16>>(model), options);
}

std::vector<std::string> format_names(int head_dim, precision type) {
    std::vector<std::string> names{"fp16", "bf16"};
    const int padded = padded_dim(head_dim, type);
    for (const cache_format& f : compiled_formats())
        for (const cache_format::kind& kind : f.kinds)
            if (f.type == cache_type(type) && f.head_dim == padded &&
                std::find(names.begin(), names.end(), kind.name) == names.end())
                names.push_back(kind.name);
    return names;
}

}  // namespace llama::device
