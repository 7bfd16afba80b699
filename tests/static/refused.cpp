// SPDX-License-Identifier: MIT
// Programs that must not compile. Every case is a test, static/NAME: compiled alone, it must be refused with
// its sentence.
//
//   #if CASE == 7  // NAME
//   // expect: a part of the message, to the end of the line
//   #include what it needs
//   ...
//   #endif
//
// A new case takes the next number and stands in any place. More than 3 errors bury the sentence; a line
// "// errors: 5" allows more.
// By hand: g++ -std=c++20 -fsyntax-only -DCASE=7 -Iinclude -Ibench tests/static/refused.cpp

// ---- Arguments of schemes. ----

#if CASE == 1  // bits_0
// expect: kvq::bits<B>: a code has 1 to 8 bits
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

const auto made = kvq::make_format<kvq::affine<0>, kvq::scalar>();
#endif

#if CASE == 2  // bits_9
// expect: kvq::bits<B>: a code has 1 to 8 bits
#include <kvq/schemes/affine.hpp>

kvq::scheme<kvq::bits<9>, kvq::asymmetric, kvq::per_token<64>> scheme;
auto bytes = scheme.block_bytes({kvq::tensor::key, 64, 64});
#endif

#if CASE == 3  // symmetric_1_bit
// expect: kvq::scheme: symmetric levels need at least 2 bits
#include <kvq/schemes/affine.hpp>

kvq::scheme<kvq::bits<1>, kvq::symmetric, kvq::per_token<64>> scheme;
auto bytes = scheme.block_bytes({kvq::tensor::key, 64, 64});
#endif

#if CASE == 4  // negative_group
// expect: kvq::per_channel<G>: the group size G must be at least 1 (or 0 for the whole page)
#include <kvq/schemes/affine.hpp>

kvq::affine<4, kvq::per_channel<-32>> scheme;
auto bytes = scheme.block_bytes({kvq::tensor::key, 64, 64});
#endif

#if CASE == 5  // policies_in_wrong_order
// expect: kvq::scheme<bits<B>, levels, granularity, params<P>>: in this order
#include <kvq/schemes/affine.hpp>

kvq::scheme<kvq::bits<4>, kvq::per_token<64>, kvq::asymmetric> scheme;
#endif

#if CASE == 6  // affine_without_granularity
// expect: kvq::scheme<bits<B>, levels, granularity, params<P>>: in this order
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

const auto made = kvq::make_format<kvq::affine<4, kvq::params<float>>, kvq::scalar>();
#endif

#if CASE == 7  // affine_params_forgotten
// expect: kvq::scheme: parameters are params<P>, packed_params<P> or byte_params: params<float16>, not float16
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

const auto made = kvq::make_format<kvq::affine<4, kvq::per_token<64>, kvq::float16>, kvq::scalar>();
#endif

#if CASE == 8  // grid_params_forgotten
// expect: kvq::scheme: parameters are params<P>, packed_params<P> or byte_params: params<float16>, not float16
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

const auto made =
    kvq::make_format<kvq::affine<4, kvq::per_channel<64>, kvq::float16, kvq::min_max>, kvq::scalar>();
#endif

#if CASE == 9  // mixed_params_forgotten
// expect: kvq::scheme: parameters are params<P>, packed_params<P> or byte_params: params<float16>, not float16
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

const auto made = kvq::make_format<
    kvq::mixed_affine<kvq::code_widths<4, 2, 0>, kvq::average_eighths<16>, kvq::per_channel<64>, float>,
    kvq::scalar>();
#endif

#if CASE == 10  // grid_without_encoder
// expect: kvq::scheme<bits<B>, levels, granularity, params<P>, encoder>: the fifth argument must be an encoder
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

const auto made =
    kvq::make_format<kvq::affine<4, kvq::per_channel<64>, kvq::byte_params, kvq::params<kvq::float16>>,
                     kvq::scalar>();
#endif

#if CASE == 11  // mixed_without_encoder
// expect: kvq::scheme<bits<B>, levels, granularity, params<P>, encoder>: the fifth argument must be an encoder
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

const auto made =
    kvq::make_format<kvq::mixed_affine<kvq::code_widths<4, 2, 0>, kvq::average_eighths<16>,
                                       kvq::per_channel<64>, kvq::byte_params, kvq::byte_params>,
                     kvq::scalar>();
#endif

#if CASE == 12  // grid_token_scales_forgotten
// expect: kvq::scheme<bits<B>, levels, granularity, params<P>, encoder, token scales>: token scales are no_token_scales, token_scales<byte_params>
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

const auto made =
    kvq::make_format<kvq::affine<4, kvq::per_channel<64>, kvq::byte_params, kvq::min_max, kvq::byte_params>,
                     kvq::scalar>();
#endif

#if CASE == 13  // plain_token_scales
// expect: kvq::scheme: token scales and several widths take packed_params<P> or byte_params
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

const auto made = kvq::make_format<kvq::affine<4, kvq::per_channel<64>, kvq::params<kvq::float16>,
                                               kvq::min_max, kvq::token_scales<kvq::byte_params>>,
                                   kvq::scalar>();
#endif

#if CASE == 14  // byte_params_per_token
// expect: kvq::scheme: per_token takes bits<B> and params<P>, since packed and 8-bit parameters, token scales and several widths are per channel
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

const auto made = kvq::make_format<kvq::affine<4, kvq::per_token<64>, kvq::byte_params>, kvq::scalar>();
#endif

#if CASE == 15  // mixed_per_token
// expect: kvq::scheme: several widths are per channel
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

const auto made = kvq::make_format<
    kvq::mixed_affine<kvq::code_widths<4, 2, 0>, kvq::average_eighths<16>, kvq::per_token<64>>,
    kvq::scalar>();
#endif

#if CASE == 16  // grid_widths_not_falling
// expect: kvq::code_widths: 2 to 8 different widths of 0 to 8 bits, the widest first
#include <kvq/schemes/affine.hpp>

kvq::mixed_affine<kvq::code_widths<2, 4>, kvq::average_eighths<24>> made;
#endif

#if CASE == 17  // params_not_a_number
// expect: kvq::params<P>: P must be trivially copyable, constructible from float and convertible to float
#include <kvq/schemes/affine.hpp>
#include <string>

kvq::affine<4, kvq::per_token<64>, kvq::params<std::string>> scheme;
auto bytes = scheme.block_bytes({kvq::tensor::key, 64, 64});
#endif

#if CASE == 18  // params_without_name
// expect: kvq::params<P>: P must be trivially copyable, constructible from float and convertible to float, and have a name
#include <kvq/schemes/affine.hpp>

struct half_byte_log {
    half_byte_log() = default;
    explicit half_byte_log(float) {}
    operator float() const { return 1.0f; }
    unsigned char code = 0;
};
kvq::affine<4, kvq::per_token<64>, kvq::params<half_byte_log>> scheme;
auto bytes = scheme.block_bytes({kvq::tensor::key, 64, 64});
#endif

#if CASE == 19  // params_with_a_taken_name
// expect: kvq::params<P>: the name of P has letters and digits alone, and is not fp32, fp16 or bf16
#include <kvq/schemes/affine.hpp>

struct another_half {
    static constexpr const char* name = "fp16";
    another_half() = default;
    explicit another_half(float) {}
    operator float() const { return 1.0f; }
    unsigned short bits = 0;
};
kvq::affine<4, kvq::per_token<64>, kvq::params<another_half>> scheme;
auto bytes = scheme.block_bytes({kvq::tensor::key, 64, 64});
#endif

#if CASE == 20  // turboquant_5
// expect: baselines::normal_levels<B>: there are tables for codes of 2, 3 and 4 bits (turboquant<2> to <4>)
#include <kvq/format/make_format.hpp>

#include "baselines/published.hpp"

const auto made = kvq::make_format<baselines::turboquant<5>, kvq::scalar>();
#endif

#if CASE == 42  // encoder_without_rounding
// expect: the fifth argument must be an encoder, such as least_squares
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

struct widest {
    static const char* name() { return ""; }
    static kvq::grid_range fit(const float*, int, int, float*) { return {-1.0f, 1.0f}; }
};

const auto made =
    kvq::make_format<kvq::affine<4, kvq::per_channel<>, kvq::params<float>, widest>, kvq::scalar>();
#endif

#if CASE == 43  // granularity_of_ones_own
// expect: the granularity per_token<G> or per_channel<G>
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

struct per_pair : kvq::per_token<2> {};

const auto made = kvq::make_format<kvq::affine<4, per_pair>, kvq::scalar>();
#endif

#if CASE == 44  // levels_without_name
// expect: kvq::scheme: levels of your own need a name (static constexpr const char*) of letters, digits, - and _, which is not affine or int
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/scheme.hpp>

struct quarter_steps : kvq::symmetric {
    template <int Bits>
    static constexpr float value(int code, float scale, float) {
        return 0.25f * scale * static_cast<float>(code - 8);
    }
};

const auto made =
    kvq::make_format<kvq::scheme<kvq::bits<4>, quarter_steps, kvq::per_token<>, kvq::params<float>>,
                     kvq::scalar>();
#endif

// ---- Schemes of one's own, and what make_format takes. ----

#if CASE == 21  // scheme_without_name
// expect: kvq::make_format: a scheme needs `std::string name() const`
#include <kvq/format/make_format.hpp>

struct lacks_name {
    std::size_t block_bytes(const kvq::block_shape&) const { return 16; }
    std::uint32_t quantize(const kvq::block_shape&, kvq::block_id, float*, std::byte*) const { return 0; }
    void dequantize(const kvq::block_shape&, kvq::block_id, const std::byte*, float*) const {}
};
const auto made = kvq::make_format<lacks_name, kvq::scalar>();
#endif

#if CASE == 22  // scheme_without_block_bytes
// expect: kvq::make_format: a scheme needs `std::size_t block_bytes(block_shape) const`
#include <kvq/format/make_format.hpp>

struct lacks_block_bytes {
    std::string name() const { return "lacks"; }
    std::uint32_t quantize(const kvq::block_shape&, kvq::block_id, float*, std::byte*) const { return 0; }
    void dequantize(const kvq::block_shape&, kvq::block_id, const std::byte*, float*) const {}
};
const auto made = kvq::make_format<lacks_block_bytes, kvq::scalar>();
#endif

#if CASE == 23  // scheme_without_quantize
// expect: kvq::make_format: a scheme needs `std::uint32_t quantize(block_shape, block_id, float* values, std::byte* block) const`
#include <kvq/format/make_format.hpp>

struct lacks_quantize {
    std::string name() const { return "lacks"; }
    std::size_t block_bytes(const kvq::block_shape&) const { return 16; }
    void dequantize(const kvq::block_shape&, kvq::block_id, const std::byte*, float*) const {}
};
const auto made = kvq::make_format<lacks_quantize, kvq::scalar>();
#endif

#if CASE == 24  // scheme_without_dequantize
// expect: kvq::make_format: a scheme needs `void dequantize(block_shape, block_id, const std::byte* block, float* values) const`
#include <kvq/format/make_format.hpp>

struct lacks_dequantize {
    std::string name() const { return "lacks"; }
    std::size_t block_bytes(const kvq::block_shape&) const { return 16; }
    std::uint32_t quantize(const kvq::block_shape&, kvq::block_id, float*, std::byte*) const { return 0; }
};
const auto made = kvq::make_format<lacks_dequantize, kvq::scalar>();
#endif

#if CASE == 25  // scheme_not_copyable
// expect: kvq::make_format: a scheme must be copyable and destructible
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>
#include <memory>

struct holds_state : kvq::affine<4> {
    std::unique_ptr<float> state;
};
const auto made = kvq::make_format<holds_state, kvq::scalar>();
#endif

#if CASE == 26  // rotated_without_matrices
// expect: kvq::make_format: this scheme holds state that it cannot make up, such as the matrices of rotated<>
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>
#include <kvq/schemes/transformed.hpp>

const auto made = kvq::make_format<kvq::rotated<kvq::affine<4>>, kvq::scalar>();
#endif

#if CASE == 27  // format_of_a_backend
// expect: kvq::make_format: the argument must be a scheme (kv_scheme)
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/int8.hpp>

// The scheme comes first.
const auto made = kvq::make_format<kvq::scalar, kvq::int8>();
#endif

#if CASE == 28  // attends_as_without_fold
// expect: kvq::make_format: this scheme says `attends_as`, so it needs code_bits
#include <kvq/format/make_format.hpp>

struct read_as_it_is {
    using attends_as = read_as_it_is;
    std::string name() const { return "read as it is"; }
    std::size_t block_bytes(const kvq::block_shape&) const { return 16; }
    std::uint32_t quantize(const kvq::block_shape&, kvq::block_id, float*, std::byte*) const { return 0; }
    void dequantize(const kvq::block_shape&, kvq::block_id, const std::byte*, float*) const {}
};
const auto made = kvq::make_format<read_as_it_is, kvq::scalar>();
#endif

#if CASE == 29  // fold_without_row_parameters
// expect: kvq::make_format: fold() of this scheme says that rows have parameters
#include <kvq/format/make_format.hpp>
#include <kvq/pack/code_layout.hpp>

// Misspelt: without a word, attention would read memory that nobody has written.
struct folded {
    using attends_as = folded;
    static constexpr int code_bits = 4, zero_code = 0;
    static constexpr kvq::fold_use fold(kvq::tensor) { return {.row_scale = true}; }
    kvq::code_layout<4> codes(const kvq::block_shape& s) const {
        return {{s.rows(), s.rows()}, {s.cols(), s.cols()}};
    }
    template <class Backend>
    void row_paramters(const kvq::block_shape&, kvq::block_id, const std::byte*, int, float*, float*) const {}

    std::string name() const { return "folded"; }
    std::size_t block_bytes(const kvq::block_shape&) const { return 16; }
    std::uint32_t quantize(const kvq::block_shape&, kvq::block_id, float*, std::byte*) const { return 0; }
    void dequantize(const kvq::block_shape&, kvq::block_id, const std::byte*, float*) const {}
};
const auto made = kvq::make_format<folded, kvq::scalar>();
#endif

#if CASE == 30  // fold_without_col_parameters
// expect: kvq::make_format: fold() of this scheme says that columns have parameters
#include <kvq/format/make_format.hpp>
#include <kvq/pack/code_layout.hpp>

struct folded {
    using attends_as = folded;
    static constexpr int code_bits = 4, zero_code = 0;
    static constexpr kvq::fold_use fold(kvq::tensor) { return {.row_scale = true, .col_bias = true}; }
    kvq::code_layout<4> codes(const kvq::block_shape& s) const {
        return {{s.rows(), s.rows()}, {s.cols(), s.cols()}};
    }
    template <class Backend>
    void row_parameters(const kvq::block_shape&, kvq::block_id, const std::byte*, int, float*, float*) const {
    }

    std::string name() const { return "folded"; }
    std::size_t block_bytes(const kvq::block_shape&) const { return 16; }
    std::uint32_t quantize(const kvq::block_shape&, kvq::block_id, float*, std::byte*) const { return 0; }
    void dequantize(const kvq::block_shape&, kvq::block_id, const std::byte*, float*) const {}
};
const auto made = kvq::make_format<folded, kvq::scalar>();
#endif

// ---- Hooks of attention. ----

#if CASE == 31  // mods_without_hooks
// expect: a mask has mask(int, int) or mask_row(float*, int, int, int), a score modifier has score(float, int, int, int)
#include <kvq/attention/mods.hpp>

// A name that attention does not know.
struct halved {
    float scores(float score, int, int, int) const { return score / 2; }
};

void attend(const kvq::mods_view& mods);
void f() { attend(halved{}); }
#endif

#if CASE == 32  // mods_not_const
// expect: the hooks of a mask or score modifier must be const
#include <kvq/attention/mods.hpp>

struct halved {
    float scale(int) const { return 1.0f; }
    float score(float score, int, int, int) { return score / 2; }
};

void attend(const kvq::mods_view& mods);
void f() { attend(halved{}); }
#endif

#if CASE == 33  // mods_mask_page_not_const
// expect: the hooks of a mask or score modifier must be const
#include <kvq/attention/mods.hpp>
#include <kvq/attention/score_modifiers.hpp>

// As a part of mods.
struct even {
    bool mask(int, int k_pos) const { return k_pos % 2 == 0; }
    kvq::page_visibility mask_page(int, int, int, int) { return kvq::page_visibility::some; }
};

void attend(const kvq::mods_view& mods);
void f() { attend(kvq::mods{kvq::softcap{30.0f}, even{}}); }
#endif

#if CASE == 34  // mods_page_without_mask
// expect: mask_page answers for whole pages only, it needs a mask or mask_row
#include <kvq/attention/mods.hpp>

struct nothing {
    static constexpr bool is_causal = false;
    kvq::page_visibility mask_page(int, int, int, int) const { return kvq::page_visibility::none; }
};

void attend(const kvq::mods_view& mods);
void f() { attend(nothing{}); }
#endif

#if CASE == 35  // mods_two_scales
// expect: kvq::mods: two parts have a scale
#include <kvq/attention/mods.hpp>
#include <kvq/attention/score_modifiers.hpp>

void attend(const kvq::mods_view& mods);
void f() { attend(kvq::mods{kvq::score_scale{0.1f}, kvq::score_scale{0.2f}}); }
#endif

// ---- Caches. ----

#if CASE == 38  // append_doubles
// expect: kvq::input_view: keys and values must be float, float16 or bfloat16
#include <kvq/cache/sequence.hpp>

void append(kvq::sequence& sequence, const double* x) {
    const kvq::token_view<const double> view(x, 1, 1, 8);
    sequence.append(0, view, view);
}
#endif

#if CASE == 39  // copy_a_sequence
// expect: use fork()
#include <kvq/cache/sequence.hpp>

// Sharing pages is what fork() is for; a copy would hide it. Compilers show the line that says so.
auto copy(const kvq::sequence& sequence) {
    kvq::sequence other(sequence);
    return other.tokens();
}
#endif

// ---- Options of compilers. ----

#if CASE == 45  // cplusplus_17
// expect: kvq needs C++20: compile with -std=c++20
// What -std=c++17 defines, the default of g++ 12.
#undef __cplusplus
#define __cplusplus 201703L
#include <kvq/config.hpp>
#endif

#if CASE == 40  // finite_math_only
// expect: kvq needs infinities and NaN: compile without -ffast-math
// What -ffast-math and -Ofast define.
#undef __FINITE_MATH_ONLY__
#define __FINITE_MATH_ONLY__ 1
#include <kvq/config.hpp>
#endif

#if CASE == 41  // reassociating_math
// expect: kvq needs sums in the order in which they are written
#define __ASSOCIATIVE_MATH__ 1
#include <kvq/config.hpp>
#endif
