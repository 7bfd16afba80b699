// register_ops<Arch>: the operations that xsimd does not have, one header per instruction set.
//
//   width, row_vectors, value_vectors, ints, floats, doubles
//   word_products                             products of 16-bit words are faster here than two of bytes
//                                             (folded.hpp)
//   load_words(p, n), store_words(p, a, n), load_floats(p, n), store_floats(p, a, n)     first n lanes only
//   dot<Bits>(acc, codes, x)                  acc + sums of four u8 x s8 products
//   sixteen_bytes(p), lookup_bytes(table, a)  16 bytes, as often as they fit; for every byte of a, 0 to 15,
//                                             that byte of the 16 of `table` around it
//   even_bytes(a), odd_bytes(a)               bytes 0 and 2, 1 and 3 of every word, as 16-bit words
//   dot_words(acc, a, x)                      acc + sums of two s16 x s16 products
//   store_word_pairs(out, stride, a)          the low words of four lanes: 0 and 2 in one word, 1 and 3 in
//                                             the next
//   widen<Half>(a), narrow(low, high)         half of the lanes as doubles, and back
//   limited(a, top)                           to [0, top]; NaN becomes 0
//   to_floats, round, as_floats               between words and floats
//   store_high_low(out, stride, high, low)      lowest bytes, packed to words and interleaved
//   shift_signed<S>(a)
//   ordered_halves, min_halves, max_halves     16-bit floats as integers of the same order (or back), and
//                                              their extremes
//   pack_bytes<Signed>(a, b, c, d), add_bytes  word i of 128-bit lane l of the result: the bytes of lane l of
//                                              vector i
//   transpose, load_bytes, load_halfwords, store_halfwords, half_bits<T>, rounded_product, in_register
//   load_values<T>(p[, n]), halves<T, H>(w)   16- and 32-bit floats
//   splat_pair, add_pairs, keep_even, sum, largest, smallest
//   optional, where the xsimd or generic version is too slow or not exact: divide, directed_float16,
//     store_float16, merge_lanes
//   optional, for kernels that other instruction sets do not have
//     store_high_low_of_four(out, a)
//       folded.hpp: store_high_low of four vectors of values 256 high + low
//     store_high_low_rows(high, low, a)          folded.hpp: the high bytes of four vectors of such values,
//                                                then the low ones, in order
//     larger_magnitude(a, b)                  folded.hpp: the larger magnitude in one instruction
//     select_bits(mask, a, b)                 unpack_codes.hpp: (mask & a) | (~mask & b) in one instruction
//     distance_to_whole, scale_by_power       softmax.hpp: exponent arithmetic in one instruction each
//     dot_word_pairs(acc, a, x)               word_product.hpp: dot_words in one instruction
//     store_as_halfwords(p, a, b), repeat_lanes<Half>(a)     word_product.hpp: the lanes of a, then b, as
//                                                            signed 16-bit words that
//         saturate; every lane of half of a twice
//     store_lanes(out, stride, v), split_lanes(v)            turned_product.hpp: lanes of 128 bits of four
//                                                            vectors side by side; halves of those of two
//     load_signed_bytes(p), load_e4m3(p, v)   rows/row_numbers.hpp: width bytes as signed words; 2 * width
//                                             e4m3 times 2^-8, even ones in v[0]; NaN is 480
//     load_e4m3_words(p, v), turn_e4m3(two, v)     rows/row_scales.hpp: as load_e4m3, byte k of words in
//                                                  v[k]; byte k of 16 rows of 8 bytes
//     runs_pairs, multiplies_pairs, dot_pairs, lookup_128, interleave_bytes, interleave_words
//                                             rows/row_pairs.hpp: products of bfloat16, if the CPU has
//                                             them, and if they are fast; bytes of a table
//     load_parts(p, behind), turn_sixteen, turn_thirty_two, high_low_pairs, sum_lanes, lookup(a, b, index)
//                                             rows/row_codes.hpp: two or four equal parts, at p and as many
//                                             bytes behind it; bytes of four rows in words
//     transpose_fours, split_halves, spread_codes, code_table, lookup_table    dequantize_table.hpp
#pragma once

#include "arch.hpp"

#if defined(__SSE2__)
#include "x86_sse.hpp"
#endif
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "x86_avx2.hpp"
#endif
#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "x86_avx512.hpp"
#endif
#if defined(__aarch64__)
#include "neon.hpp"
#endif
