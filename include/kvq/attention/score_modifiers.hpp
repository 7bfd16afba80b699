// Ready-made score modifiers (attention/mods.hpp), on scores that are already scaled.
//
//   score_scale     q . k times a number instead of 1 / sqrt(head_dim)
//   softcap         cap * tanh(score / cap)                Gemma 2, arXiv 2408.00118, section 2
//   alibi           score - slope[q_head] * distance       Press et al., arXiv 2108.12409
//   learned_sinks   exp(logit[q_head]) more in the softmax sum of a row, without a value; gpt-oss, arXiv
//                   2508.10925, section 2
//
// Contract: one number per query head where a modifier has numbers per head; another number of query heads is
// refused, and so are numbers that are not finite. A score that a modifier makes NaN or +infinity gives a row
// of NaN.
#pragma once

#include <span>

#include "../core/float_formats.hpp"
#include "mods.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// scores * value
struct score_scale {
    float value;
    float scale(int) const noexcept { return value; }
    void check(int) const {
        detail::expect(detail::is_finite(value), "a score_scale of ", value,
                       " is not a number to multiply by");
    }
};

namespace detail {
/// tanh with a relative error below 5e-7, as a quotient of polynomials, so that compilers vectorise loops
/// over it. NaN stays NaN.
/// Source: coefficients of Eigen's ptanh_float.
inline float rational_tanh(float x) noexcept {
    constexpr float most = 7.90531110763549805f;
    const float y = x > most ? most : x < -most ? -most : x;
    const float z = y * y;
    float p = -2.76076847742355e-16f;
    p = p * z + 2.00018790482477e-13f;
    p = p * z - 8.60467152213735e-11f;
    p = p * z + 5.12229709037114e-08f;
    p = p * z + 1.48572235717979e-05f;
    p = p * z + 6.37261928875436e-04f;
    p = p * z + 4.89352455891786e-03f;
    float q = 1.19825839466702e-06f;
    q = q * z + 1.18534705686654e-04f;
    q = q * z + 2.26843463243900e-03f;
    q = q * z + 4.89352518554385e-03f;
    return y * p / q;
}
}  // namespace detail

/// cap * tanh(score / cap)
struct softcap {
    float cap;
    float score(float score, int, int, int) const noexcept {
        return cap * detail::rational_tanh(score / cap);
    }
    void check(int) const {
        detail::expect(detail::is_finite(cap) && cap != 0.0f, "a softcap of ", cap,
                       " is not a number other than 0");
    }
};

/// score - slopes[q_head] * (q_pos - k_pos). The span is not copied.
struct alibi {
    std::span<const float> slopes;  ///< one per query head

    float score(float score, int q_head, int q_pos, int k_pos) const noexcept {
        return score - slopes[static_cast<std::size_t>(q_head)] * static_cast<float>(q_pos - k_pos);
    }
    void check(int q_heads) const {
        detail::expect(slopes.size() == static_cast<std::size_t>(q_heads), "ALiBi has ", slopes.size(),
                       " slopes for ", q_heads, " query heads");
        for (std::size_t h = 0; h < slopes.size(); ++h)
            detail::expect(detail::is_finite(slopes[h]), "the ALiBi slope of query head ", h, " is ",
                           slopes[h], ", which is not finite");
    }
};

/// softmax over the visible keys and one more score, logits[q_head], whose value is zero. Other modifiers do
/// not change it. The log-sum-exp of a row includes it, so of outputs that will be merged over parts of the
/// keys only one takes the sinks. A row without visible keys gives zeros. -infinity: no sink; any other logit
/// that is not finite is refused. The span is not copied.
struct learned_sinks {
    std::span<const float> logits;  ///< one per query head

    float sink_logit(int q_head) const noexcept { return logits[static_cast<std::size_t>(q_head)]; }
    void check(int q_heads) const {
        detail::expect(logits.size() == static_cast<std::size_t>(q_heads), "there are ", logits.size(),
                       " learned sinks for ", q_heads, " query heads");
        for (std::size_t h = 0; h < logits.size(); ++h)
            detail::expect(logits[h] < 0.0f || detail::is_finite(logits[h]), "the sink logit of query head ",
                           h, " is ", logits[h], ", neither finite nor -infinity");
    }
};

}}  // namespace kvq
