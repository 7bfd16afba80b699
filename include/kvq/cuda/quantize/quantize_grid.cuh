// Quantizes blocks with parameters per channel on the device, one thread block for each: the steps of
// schemes/scheme.hpp, schemes/scheme_codes.hpp and quant/quantize_group.hpp.
//
//   numbers of the page -> token scales -> grids of channels -> stored biases and scales -> codes, errors ->
//     words
//
// Formulas are those of quant/. Where sums of other numbers, or in another order, do not certainly decide as
// the CPU's do, the CPU's are added up in its order. Where a page holds NaN or infinities, finite members
// move together for the fit, and numbers are read again to be quantized.
// Contract: every byte of the block is written and equals what scheme::quantize writes for the same values.
#pragma once

#include "grid_feedback.cuh"
#include "grid_memory.cuh"
#include "quantize.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

template <class From, class To, tensor Role, int Threads>
class grid_encoder {
    using S = scheme_of<Role, To>;
    using memory = grid_memory<To, Role>;
    using encoder = typename memory::encoder;
    using parameters = typename S::parameters;
    static constexpr int dim = memory::dim, groups = memory::groups, slot_count = memory::slot_count;
    static constexpr int place_slots = kvq::detail::round_up(dim, 4);  // of the parameters
    static constexpr int most_lines = groups * memory::fit_channels, lanes = Threads >= 4 * most_lines   ? 4
                                                                             : Threads >= 2 * most_lines ? 2
                                                                                                         : 1;
    static_assert(!may_search<encoder> || ceil_div(memory::group, lanes) <= most_lane_numbers);
    /// Do quads of codes lie in registers until all of the block's are there?
    static constexpr int line_quads = memory::group / (4 * lanes);
    static constexpr bool has_quads =
        memory::whole && slot_count == memory::tokens && memory::tokens % memory::group == 0 &&
        memory::group % (4 * lanes) == 0 && memory::lines * lanes <= Threads && line_quads <= 16;
    /// Are numbers divided by token scales where ranges are found?
    static constexpr bool divides_lines = has_token_scales<S> && memory::whole &&
                                          slot_count == memory::tokens &&
                                          memory::tokens % memory::group == 0 && memory::group % 8 == 0;
    /// Are numbers half floats?
    static constexpr bool halves = [] {
        if constexpr (full_precision<scheme_of<Role, From>> && !turns<Role, From, To>)
            return std::is_same_v<typename scheme_of<Role, From>::value_type, float16>;
        else
            return false;
    }();
    /// Are token scales of few bits fitted in registers first?
    static constexpr bool quick_scales = [] {
        constexpr int warps = Threads / warp_size, channels = dim / warps, tokens = slot_count / warp_size;
        if constexpr (has_token_scales<S>)
            return std::is_same_v<typename S::token_scale_type, token_scales<byte_params>> && memory::whole &&
                   slot_count == memory::tokens && slot_count % warp_size == 0 && dim % warps == 0 &&
                   warps <= 16 && channels * tokens <= 64 && (channels & (channels - 1)) == 0 &&
                   channels <= 32;
        else
            return false;
    }();

public:
    __device__ __forceinline__ grid_encoder(const cache_ref<From>& source, int from,
                                            const cache_ref<To>& target, int to, int head, std::byte* shared)
        : source_(source),
          target_(target),
          from_(from),
          head_(head),
          block_(target.template block<Role>(to, head)),
          shared_(shared),
          token_scales_{at<float>(memory::inverse_token_scales), at<float>(memory::weights),
                        at<double>(memory::parts), at<float>(memory::token_scales)} {
        if constexpr (codec<S>.several_widths()) {
            plan_ = target.key_plan(0, head);
            quads_ = quads_of<S, dim>(plan_);
        }
        if constexpr (memory::feedback)
            if (target.key_feedback != nullptr)
                matrix_ = target.key_feedback + static_cast<std::size_t>(head) * dim * dim;
    }

    /// Codes the block. Returns this thread's count of values that are not finite.
    __device__ __forceinline__ unsigned run() {
        clear_rest();
        if constexpr (codec<S>.several_widths()) write_tops();
        bool dirty = false;  // are there NaN or infinities where numbers lie in memory?
        if constexpr (has_token_scales<S>) {
            dirty = fit_token_scales();
            if (memory::whole && !dirty && !divides_lines) divide(dim, slot_count);
        }
        for (int first = 0; first < dim; first += memory::fit_channels) {
            const int count = smaller(memory::fit_channels, dim - first);
            if (!(has_token_scales<S> && memory::whole) || dirty) {
                dirty = read<false>(first, count, 0, slot_count, !has_token_scales<S>);
                if constexpr (has_token_scales<S>) divide(count, slot_count);
            }
            fit(first, count, dirty);
        }
        store_biases(encoder::rounding);
        store_scales();
        for (int first = 0; first < slot_count; first += memory::code_slots) {
            const int count = smaller(memory::code_slots, slot_count - first);
            if (!memory::whole || dirty) {
                read<false>(0, dim, first, count, false);
                if constexpr (has_token_scales<S>) divide(dim, count, first);
            }
            code(first, count, dirty);
        }
        if constexpr (encoder::corrects_mean) {
            for (int l = thread(); l < memory::lines; l += Threads)
                if (members()[l] > 0)
                    biases()[l] =
                        static_cast<float>(static_cast<double>(biases()[l]) + sums()[l] / members()[l]);
            __syncthreads();
            store_biases(parameter_rounding::nearest);
        }
        return not_finite_;
    }

private:
    static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }
    template <class T>
    __device__ __forceinline__ T* at(int offset) const {
        return reinterpret_cast<T*>(shared_ + offset);
    }
    __device__ __forceinline__ float* numbers() const { return at<float>(memory::numbers); }
    __device__ __forceinline__ float* biases() const { return at<float>(memory::biases); }
    __device__ __forceinline__ float* scales() const { return at<float>(memory::scales); }
    __device__ __forceinline__ float* inverses() const { return at<float>(memory::inverses); }
    __device__ __forceinline__ double* sums() const { return at<double>(memory::sums); }
    __device__ __forceinline__ std::uint16_t* members() const { return at<std::uint16_t>(memory::members); }
    __device__ __forceinline__ std::byte* parameter_section() const {
        return block_ + typename S::layout_type{}.scale_offset(shape());
    }

    static __device__ __forceinline__ constexpr block_shape shape() { return shape_of<Role, To>; }
    /// Tokens as groups and slots.
    static __device__ __forceinline__ constexpr grouped_axis axis() {
        return typename S::layout_type{}.cut(shape());
    }
    static __device__ __forceinline__ bool holds_token(int slot) {
        return slot_count == memory::tokens || axis().index(slot) >= 0;
    }
    __device__ __forceinline__ int top(int place) const {
        if constexpr (codec<S>.several_widths())
            return static_cast<int>(at<std::uint8_t>(memory::tops)[place]);
        else
            return S::top;
    }
    __device__ __forceinline__ int place_of(int channel) const {
        if constexpr (codec<S>.several_widths())
            if (plan_ != nullptr) return static_cast<int>(plan_[channel]);
        return channel;
    }

    /// Calls f(integral_constant<int, bits>, segment) for all codes of the block.
    template <class F>
    __device__ __forceinline__ void for_each_segment(const F& f) const {
        if constexpr (codec<S>.several_widths())
            static_for<S::width_list::count>([&](auto w) {
                constexpr int W = decltype(w)::value;
                const code_segment segment = S::template segment<W>(shape(), quads_);
                if (segment.columns > 0) f(std::integral_constant<int, S::width_list::values[W]>{}, segment);
            });
        else
            f(std::integral_constant<int, S::code_bits>{}, code_segment{0, dim, 0});
    }
    template <int Bits>
    static __device__ __forceinline__ code_layout<Bits> layout_of(const code_segment& segment) {
        if constexpr (codec<S>.several_widths())
            return S::template segment_layout<Bits>(shape(), segment);
        else
            return typename S::layout_type{}.codes(shape());
    }

    /// Zeros behind the codes: parameters without a channel, padding.
    __device__ __forceinline__ void clear_rest() const {
        std::size_t end = 0;
        for_each_segment([&](auto bits, const code_segment& segment) {
            constexpr int Bits = decltype(bits)::value;
            if constexpr (Bits > 0) end = segment.offset + layout_of<Bits>(segment).bytes();
        });
        constexpr std::size_t bytes = Role == tensor::key ? To::key_block_bytes : To::value_block_bytes;
        for (std::size_t i = end / 4 + static_cast<std::size_t>(thread()); i < bytes / 4; i += Threads)
            reinterpret_cast<std::uint32_t*>(block_)[i] = 0;
    }
    __device__ __forceinline__ void write_tops() const {
        for_each_segment([&](auto bits, const code_segment& segment) {
            for (int c = thread(); c < segment.columns; c += Threads)
                at<std::uint8_t>(memory::tops)[segment.first + c] =
                    static_cast<std::uint8_t>((1 << decltype(bits)::value) - 1);
        });
    }

    /// Reads `places` places from `first` on of `count` slots from `slot` on. Zeroed: what is not finite
    /// becomes 0. Returns whether anything is not finite. Begins and ends with a barrier.
    template <bool Zeroed>
    __device__ __forceinline__ bool read(int first, int places, int slot, int count, bool counts) {
        float* const to = numbers();
        const int stride = numbers_stride(count);
        __syncthreads();
        if constexpr (slot_count != memory::tokens) {  // token scales need zeros where there is no token
            for (int i = thread(); i < places * stride; i += Threads) to[i] = 0.0f;
            __syncthreads();
        }
        unsigned bad = 0;
        if constexpr (turns<Role, From, To>) {
            static_assert(
                memory::whole,
                "kvq::cuda: a transform needs all channels of a page in shared memory: pages of fewer "
                "tokens have room");
            const odd_numbers odd = turn_page<Threads, Role>(
                source_, target_, from_, head_, to, stride, [](int token) { return axis().slot(token); },
                [this](int channel) { return place_of(channel); },
                [](float x, bool finite) {
                    return finite ? kvq::detail::bound_magnitude(x) : Zeroed ? 0.0f : x;
                });
            if (counts) not_finite_ += odd.not_finite;
            return __syncthreads_or(odd.dirty) != 0;
        }
        visit_page<Threads, Role>(source_, from_, head_, [&](int channel, int token, const auto& x, int n) {
            constexpr int N = sizeof(x) / sizeof(float);
            const int place = place_of(channel) - first;
            if (!memory::whole && (place < 0 || place >= places)) return;
            float y[N], size = 0.0f;
#pragma unroll
            for (int k = 0; k < N; ++k) size += fabsf(y[k] = x[k]);
            if (halves && N == 1) {
                const bool finite = size < INFINITY;
                if (Zeroed && !finite) y[0] = 0.0f;
                bad += !finite;
            } else if (!(size < 0x1p99f)) {
#pragma unroll
                for (int k = 0; k < N; ++k) {
                    const bool finite = kvq::detail::is_finite(x[k]);
                    y[k] = finite ? kvq::detail::bound_magnitude(x[k]) : Zeroed ? 0.0f : x[k];
                    bad += !finite && (k == 0 || k < n);
                }
            }
            if constexpr (N == 4 && memory::whole && memory::tokens % 4 == 0 &&
                          (groups == 1 || memory::group % 4 == 0)) {
                *reinterpret_cast<float4*>(to + place * stride + token) = {y[0], y[1], y[2], y[3]};
            } else {
#pragma unroll
                for (int k = 0; k < N; ++k) {
                    const int s = axis().slot(token + k) - slot;
                    if (k < n && (memory::whole || (s >= 0 && s < count))) to[place * stride + s] = y[k];
                }
            }
        });
        if (counts) not_finite_ += bad;
        return __syncthreads_or(bad != 0) != 0;
    }

    /// Values over the scales of their tokens. Begins and ends with a barrier.
    __device__ __forceinline__ void divide(int places, int count, int slot = 0) const {
        const int stride = numbers_stride(count), quads = count / 4;
        for (int i = thread(); i < places * quads; i += Threads) {
            const int t = i % quads * 4;
            auto& x = *reinterpret_cast<float4*>(numbers() + i / quads * stride + t);
            const auto f = *reinterpret_cast<const float4*>(token_scales_.token_scale + slot + t);
            const auto r = *reinterpret_cast<const float4*>(token_scales_.inverse + slot + t);
            x = {quotient(x.x, f.x, r.x, ordinary_), quotient(x.y, f.y, r.y, ordinary_),
                 quotient(x.z, f.z, r.z, ordinary_), quotient(x.w, f.w, r.w, ordinary_)};
        }
        __syncthreads();
    }

    /// Returns whether any number is not finite.
    __device__ __forceinline__ bool fit_token_scales() {
        bool dirty = false;
        const auto store = [&](int slot, float token_scale) {
            S::token_scale_type::store(block_ + typename S::layout_type{}.token_scale_offset(shape()), slot,
                                       &token_scale, 1);
            return token_scale;
        };
        if constexpr (memory::whole) dirty = read<true>(0, dim, 0, slot_count, true);
        if constexpr (quick_scales) {
            const bool certain = quick_token_scales<Threads, slot_count, dim, halves>(
                token_scales_, numbers(), numbers_stride(slot_count), ordinary_, store);
            ordinary_ = ordinary_ && !dirty;  // infinities are divided, too
            if (certain) return dirty;
        }
        for (int t = thread(); t < slot_count; t += Threads)
            token_scales_.inverse[t] = holds_token(t) ? 1.0f : 0.0f;
        __syncthreads();
        constexpr int iterations = 8;
        for (int i = 0; i < iterations; ++i) {
            for (int first = 0; first < dim; first += memory::fit_channels) {
                const int count = smaller(memory::fit_channels, dim - first);
                if constexpr (!memory::whole) dirty |= read<true>(first, count, 0, slot_count, i == 0);
                add_squares<Threads, slot_count>(token_scales_, numbers(), numbers_stride(slot_count), first,
                                                 count, memory::tokens);
            }
            normalize_token_scales<Threads, slot_count>(
                token_scales_, dim, holds_token, [&](int slot, float token_scale) {
                    return i == iterations - 1 && holds_token(slot) ? store(slot, token_scale) : token_scale;
                });
        }
        return dirty;
    }

    /// The line of a number in [0, groups * count) and its first number in memory.
    struct line_place {
        int place, group, line;
        float* x;
    };
    __device__ __forceinline__ line_place line_at(int i, int first, int count) const {
        const int group = groups == 1 ? 0 : i / count, c = i - group * count;
        return {first + c, group, group * dim + first + c,
                numbers() + c * numbers_stride(slot_count) + axis().group_begin(group)};
    }

    /// Grids of `count` places from `first` on, into biases (first value) and scales (last). Then a barrier.
    __device__ __forceinline__ void fit(int first, int count, bool dirty) const {
        const int lines = groups * count;
        const bool feedback = memory::feedback && matrix_ != nullptr;
        for_each_line<Threads, lanes>(lines, [&](int i, int q) {
            const bool real = i < lines;
            const line_place l = line_at(real ? i : 0, first, count);
            grid_line line;
            line.x = l.x;
            line.top = top(l.place);
            int n = real ? axis().group_size(l.group) : 0;
            if (dirty) {
                int finite = 0;
                if (q == 0)
                    for (int t = 0; t < n; ++t) {
                        const float x = l.x[t];
                        if (kvq::detail::is_finite(x)) l.x[finite++] = x;
                    }
                n = of_first_lane<lanes>(finite);
                __syncwarp();
            }
            float lo = INFINITY, hi = -INFINITY;
            if (divides_lines && !dirty)
                divide_line<lanes>(l.x, real ? memory::group : 0, q, token_scales_,
                                   axis().group_begin(l.group), ordinary_, lo, hi);
            else
                visit_parts<lanes>(line.x, n, q, [&](float x, int) { lo = fminf(lo, x), hi = fmaxf(hi, x); });
            const grid_range own{lo, hi};
            lo = over_line<lanes>(lo, [](float a, float b) { return fminf(a, b); });
            hi = over_line<lanes>(hi, [](float a, float b) { return fmaxf(a, b); });
            if (n > 0) line.range = {lo + 0.0f, hi + 0.0f};
            if (codec<S>.several_widths() && line.top == 0 && n > 0) {
                double sum = 0.0;
                for (int t = 0; t < n; ++t) sum += static_cast<double>(l.x[t]);
                line.range.first = line.range.last = static_cast<float>(sum / n);
            }
            if constexpr (may_search<encoder>) {
                const grid_fit wanted = line.top == 0 ? grid_fit::range : fit_of<encoder>(line.top, feedback);
                if (__any_sync(~0u, wanted >= grid_fit::search))
                    line.range = fitted<lanes, may_refit<encoder>>(line, wanted >= grid_fit::search ? n : 0,
                                                                   q, own, wanted >= grid_fit::squares);
            }
            if (real && q == 0) {
                members()[l.line] = static_cast<std::uint16_t>(n);
                biases()[l.line] = line.range.first;
                scales()[l.line] = line.range.last;
            }
        });
        __syncthreads();
    }

    /// Calls f(group, line shared by its parameters): line(smallest, largest) over values(line number) of a
    /// group's channels.
    template <class Values, class Line, class F>
    __device__ __forceinline__ void for_each_group(const Values& values, const Line& line, const F& f) const {
        using shared_line = decltype(line(0.0f, 0.0f));
        static_assert(sizeof(shared_line) <= 4 && alignof(shared_line) <= 4);
        auto* const shared_lines = at<shared_line>(memory::group_lines);
        const int lane = thread() % warp_size;
        for (int g = thread() / warp_size; g < groups; g += Threads / warp_size) {
            float lo = INFINITY, hi = -INFINITY;
            if constexpr (std::is_same_v<parameters, block_parameters<byte_params>>) {
                for (int c = lane; c < dim; c += warp_size) {
                    const float x = values(g * dim + c);
                    lo = fminf(lo, x);
                    hi = fmaxf(hi, x);
                }
                lo = over_line<warp_size>(lo, [](float a, float b) { return fminf(a, b); });
                hi = over_line<warp_size>(hi, [](float a, float b) { return fmaxf(a, b); });
            }
            if (lane == 0) {
                shared_lines[g] = line(lo, hi);
                parameters::store_line(parameter_section(), groups, place_slots, g, shared_lines[g]);
            }
        }
        __syncthreads();
        for (int i = thread(); i < groups * dim; i += Threads) f(i / dim, i % dim, shared_lines[i / dim]);
        __syncthreads();
    }
    __device__ __forceinline__ void store_biases(parameter_rounding rounding) const {
        for_each_group([&](int l) { return biases()[l]; },
                       [](float lo, float hi) { return parameters::bias_line(lo, hi); },
                       [&](int g, int c, const auto& line) {
                           float& bias = biases()[g * dim + c];
                           bias = parameters::store_bias(parameter_section(), groups, place_slots, g, c, bias,
                                                         line, rounding);
                       });
    }
    __device__ __forceinline__ void store_scales() const {
        const auto wanted = [&](int l) {
            const int highest = top(l % dim);
            return highest > 0 ? __fdiv_rn(scales()[l] - biases()[l], static_cast<float>(highest)) : 0.0f;
        };
        for_each_group(
            wanted, [](float, float hi) { return parameters::scale_line(fmaxf(hi, 0.0f)); },
            [&](int g, int c, const auto& line) {
                const int l = g * dim + c;
                const float scale = parameters::store_scale(parameter_section(), groups, place_slots, g, c,
                                                            wanted(l), line, encoder::rounding);
                scales()[l] = scale;
                inverses()[l] = inverse_scale(scale);
                if constexpr (encoder::corrects_mean) sums()[l] = 0.0;
            });
    }

    /// Codes of all lines, whose numbers lie in memory and are finite; sums() of their errors. Ends with a
    /// barrier, behind which quads of codes lie where numbers were.
    __device__ __forceinline__ void code_quads() const {
        constexpr int lines = memory::lines, together = lines_together<lanes>;
        const int lane = thread() % warp_size, i = thread() / warp_size * together + lane % together,
                  q = lane / together, l = i < lines ? i : 0, c = l % dim, g = l / dim;
        std::uint32_t quads[line_quads];
        const double sum = code_line<lanes, memory::group, encoder::corrects_mean>(
            numbers() + c * numbers_stride(slot_count) + axis().group_begin(g), q,
            {biases()[l], scales()[l], inverses()[l], top(c)}, quads);
        if (encoder::corrects_mean && i < lines && q == 0) sums()[l] = sum;
        __syncthreads();
        auto* const to = at<std::uint32_t>(memory::numbers) + c * quads_pitch + axis().group_begin(g) / 4;
        if (i < lines)
#pragma unroll
            for (int j = 0; j < line_quads; ++j) to[q + lanes * j] = quads[j];
        __syncthreads();
    }
    /// Words from one channel's quads to the next one's.
    static constexpr int quads_pitch = numbers_stride(slot_count) / 4;

    /// Writes the words of a block from quads of codes.
    __device__ __forceinline__ void write_quads(const std::uint32_t* quads) const {
        for_each_segment([&](auto bits, const code_segment& segment) {
            constexpr int Bits = decltype(bits)::value;
            if constexpr (Bits > 0)
                pack_code_words<Threads>(
                    layout_of<Bits>(segment), block_ + segment.offset, [](int, int) { return true; },
                    [&](int row, int slot) {
                        if constexpr (Role == tensor::value) {
                            return quads[row * quads_pitch + slot / 4];
                        } else {
                            // Four channels of a token.
                            std::uint32_t of[4];
#pragma unroll
                            for (int k = 0; k < 4; ++k)
                                of[k] =
                                    (dim % 4 == 0 && !codec<S>.several_widths()) || slot + k < segment.columns
                                        ? quads[(segment.first + slot + k) * quads_pitch + row / 4]
                                        : 0u;
                            const auto from = static_cast<std::uint32_t>(row % 4) * 0x11u + 0x40u;
                            return __byte_perm(__byte_perm(of[0], of[1], from),
                                               __byte_perm(of[2], of[3], from), 0x5410);
                        }
                    });
        });
        __syncthreads();
    }

    /// Codes `count` slots from `first` on, whose numbers lie in memory.
    __device__ __forceinline__ void code(int first, int count, bool dirty) const {
        const int stride = numbers_stride(count);
        if constexpr (memory::feedback)
            if (matrix_ != nullptr) {
                auto* const codes = at<std::uint8_t>(memory::codes);
                code_with_feedback<Threads, dim>(
                    matrix_, at<double>(memory::rows), numbers(), stride, codes, count,
                    [&](int slot) { return holds_token(first + slot); },
                    [&](int place, int slot) {
                        const int l = (groups == 1 ? 0 : (first + slot) / axis().stride) * dim + place;
                        return stored_grid{biases()[l], scales()[l], inverses()[l], top(place)};
                    });
                if constexpr (encoder::corrects_mean) {
                    add_errors(first, count);
                    __syncthreads();
                }
                if constexpr (has_quads) {
                    write_quads(reinterpret_cast<const std::uint32_t*>(codes));
                    return;
                }
                write(first, count, [&](int place, int slot) {
                    return static_cast<std::uint32_t>(codes[place * stride + slot]);
                });
                return;
            }
        if constexpr (has_quads)
            if (!dirty) {
                code_quads();
                write_quads(at<std::uint32_t>(memory::numbers));
                return;
            }
        // Where errors are added up, a line belongs to one thread.
        constexpr int slices = encoder::corrects_mean ? 1 : larger(1, Threads / memory::lines);
        for (int i = thread(); i < memory::lines * slices; i += Threads) {
            const int l = i % memory::lines, g = l / dim, c = l % dim;
            const int begin = axis().group_begin(g), end = begin + axis().group_size(g);
            const stored_grid grid{biases()[l], scales()[l], inverses()[l], top(c)};
            double sum = encoder::corrects_mean ? sums()[l] : 0.0;
            for (int s = larger(begin, first) + i / memory::lines * 4; s < smaller(end, first + count);
                 s += 4 * slices) {
                auto& at = *reinterpret_cast<float4*>(numbers() + c * stride + s - first);
                const float x[4] = {at.x, at.y, at.z, at.w};
                unsigned codes[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int code = grid.code(x[k]);
                    if (encoder::corrects_mean && s + k < end)
                        sum += static_cast<double>(grid.error(x[k], code));
                    codes[k] = s + k < end ? static_cast<unsigned>(code) : 0u;
                }
                at = {__uint_as_float(codes[0]), __uint_as_float(codes[1]), __uint_as_float(codes[2]),
                      __uint_as_float(codes[3])};
            }
            if constexpr (encoder::corrects_mean) sums()[l] = sum;
        }
        __syncthreads();
        write(first, count,
              [&](int place, int slot) { return __float_as_uint(numbers()[place * stride + slot]); });
    }

    /// Adds what feedback has left as errors where numbers were, token after token.
    __device__ __forceinline__ void add_errors(int first, int count) const {
        for (int l = thread(); l < memory::lines; l += Threads) {
            const int g = l / dim, c = l % dim;
            const int begin = axis().group_begin(g), end = begin + axis().group_size(g);
            double sum = sums()[l];
            for (int s = larger(begin, first); s < smaller(end, first + count); ++s)
                sum += static_cast<double>(numbers()[c * numbers_stride(count) + s - first]);
            sums()[l] = sum;
        }
    }

    /// Writes the words of `count` slots from `first` on. code(place, slot - first). Ends with a barrier.
    template <class Code>
    __device__ __forceinline__ void write(int first, int count, const Code& code) const {
        for_each_segment([&](auto bits, const code_segment& segment) {
            constexpr int Bits = decltype(bits)::value;
            if constexpr (Bits > 0) {
                const auto inside = [&](int slot) { return slot >= first && slot < first + count; };
                pack_code_words<Threads>(
                    layout_of<Bits>(segment), block_ + segment.offset,
                    [&](int row, int slot) {
                        if (memory::whole) return true;
                        if (Role == tensor::value) return inside(slot);
                        return row < 0 ? first == 0 : inside(axis().slot(row));
                    },
                    [&](int row, int slot) {
                        std::uint32_t quad = 0;
                        if constexpr (Role == tensor::key) {
                            const int s = axis().slot(row) - first;
#pragma unroll
                            for (int k = 0; k < 4; ++k)
                                if (slot + k < segment.columns)
                                    quad |= code(segment.first + slot + k, s) << (8 * k);
                        } else {
#pragma unroll
                            for (int k = 0; k < 4; ++k) quad |= code(row, slot + k - first) << (8 * k);
                        }
                        return quad;
                    });
            }
        });
        __syncthreads();
    }

    const cache_ref<From>& source_;
    const cache_ref<To>& target_;
    int from_, head_;
    std::byte* block_;
    std::byte* shared_;
    token_scale_scratch token_scales_;
    unsigned not_finite_ = 0;
    bool ordinary_ = false;  // is every number 0 or of an ordinary size?
    const float* matrix_ = nullptr;
    const std::uint16_t* plan_ = nullptr;
    struct no_quads {};
    template <class Scheme>
    struct quads_type {
        using type = no_quads;
    };
    template <class Scheme>
    requires(codec<Scheme>.several_widths()) struct quads_type<Scheme> {
        using type = typename Scheme::width_quads;
    };
    [[no_unique_address]] typename quads_type<S>::type quads_;
};

}}}  // namespace kvq::cuda::detail
