// Shared memory of a thread block that quantizes a block with parameters per channel, of one width or
// several; and which blocks it takes in parts.
//
//   numbers    of the channels that are fitted together, all tokens; then of the tokens that are quantized
//              together, all channels
//   lines      of every channel and group of tokens: grid, 1 / scale, sum of errors, number of finite
//              members; what the parameters of a group share
//   tokens     token scales and the sums that make them
//   feedback   codes (errors take the place of numbers) and the matrix rows of eight or four channels, twice
//
// Pages of 128 tokens x 128 channels fit at once, and two thread blocks on a multiprocessor. Larger ones are
// read several times, a part at a time; a part is a multiple of 32 channels or token slots (of keys, whose
// words are of one token, 16), so that words of codes belong to one part.
#pragma once

#include "fit_grids.cuh"
#include "fit_token_scales.cuh"
#include "page_numbers.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

template <class S>
inline constexpr bool has_token_scales = codec<S>.has_token_scales();

/// Channels that feedback codes between two barriers: fewer where rows of the matrix are long.
template <int Dim>
inline constexpr int feedback_channels = Dim <= 256 ? 8 : 4;

template <class Pair, tensor Role>
struct grid_memory {
    using S = scheme_of<Role, Pair>;
    using encoder = typename S::encoder_type;
    static_assert(encoder_traits<encoder>::known,
                  "kvq::cuda: schemes are quantized with the encoders of quant/encoders.hpp");
    static constexpr bool feedback = Role == tensor::key && encoder_traits<encoder>::feedback;
    static_assert(Role == tensor::key || encoder_traits<encoder>::fits == encoder_traits<encoder>::alone,
                  "kvq::cuda: values have no feedback; name another encoder for them");

    static constexpr block_shape shape = shape_of<Role, Pair>;
    static constexpr int tokens = shape.tokens, dim = shape.dim;
    static constexpr int group = typename S::layout_type{}.cut(shape).group,
                         groups = typename S::layout_type{}.cut(shape).groups();
    static constexpr int slot_count = typename S::layout_type{}.cut(shape).padded_size();
    static constexpr int lines = groups * dim;
    static constexpr bool has_sums = encoder::corrects_mean;

    // Offsets; doubles first, what is read 16 bytes at a time on multiples of 16.
    static constexpr int sums = 0;
    static constexpr int inverse_token_scales = sums + (has_sums ? round_up(8 * lines, 16) : 0);
    static constexpr int weights = inverse_token_scales + (has_token_scales<S> ? 4 * slot_count : 0);
    static constexpr int parts = weights + (has_token_scales<S> ? round_up(4 * dim, 16) : 0);
    static constexpr int token_scales = parts + (has_token_scales<S> ? 64 * slot_count : 0);
    static constexpr int biases = token_scales + (has_token_scales<S> ? 4 * slot_count : 0);
    static constexpr int scales = biases + 4 * lines;
    static constexpr int inverses = scales + 4 * lines;
    static constexpr int members = inverses + 4 * lines;
    static constexpr int group_lines = round_up(members + 2 * lines, 4);  // what a group's parameters share
    static constexpr int tops = group_lines + 4 * groups;
    static constexpr int numbers = round_up(tops + (codec<S>.several_widths() ? dim : 0), 16);

    static constexpr int budget = quantizer_budget<Pair>;
    static constexpr int fit_bytes(int channels) { return 4 * channels * numbers_stride(slot_count); }
    static constexpr int code_bytes(int some) {
        return 4 * dim * numbers_stride(some) +
               (feedback ? dim * numbers_stride(some) + 2 * 8 * feedback_channels<dim> * dim : 0);
    }
    static constexpr int fit_channels = [] {
        if (numbers + fit_bytes(dim) <= budget) return dim;
        int n = dim / 32 * 32;
        while (n > 0 && numbers + fit_bytes(n) > budget) n -= 32;
        return n;
    }();
    static constexpr int code_slots = [] {
        if (numbers + code_bytes(slot_count) <= budget) return slot_count;
        int n = slot_count / 32 * 32;
        while (n > 0 && numbers + code_bytes(n) > budget) n -= 32;
        if (n == 0 && Role == tensor::key && slot_count % 16 == 0 && numbers + code_bytes(16) <= budget)
            return 16;
        return n;
    }();
    static_assert(fit_channels > 0 && code_slots > 0,
                  "kvq::cuda: blocks of so many channels and groups of tokens are too large for the shared "
                  "memory of the devices that the program is compiled for");
    /// Is everything in shared memory at once?
    static constexpr bool whole = fit_channels == dim && code_slots == slot_count;
    static constexpr int bytes = numbers + larger(fit_bytes(fit_channels), code_bytes(code_slots));

    // Behind the numbers while there is feedback.
    static constexpr int rows = numbers + 4 * dim * numbers_stride(code_slots);
    static constexpr int codes = rows + 2 * 8 * feedback_channels<dim> * dim;
};

}}}  // namespace kvq::cuda::detail
