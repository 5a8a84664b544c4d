// Vectors of the processor, and conversions of numbers to the words that it multiplies. The caller
// ensures that the processor has AVX-512 or AVX2.

#ifndef JAXRANK_NATIVE_LANES_H_
#define JAXRANK_NATIVE_LANES_H_

#include <immintrin.h>

#include <cstdint>

namespace jaxrank {

using Word = uint32_t;

#ifdef __AVX512F__
using Vec = __m512;
constexpr int kLanes = 16;
constexpr int kRows = 12;
inline Vec Load(const void* from) { return _mm512_loadu_ps(from); }
inline void Store(void* to, Vec v) { _mm512_storeu_ps(to, v); }
inline void StorePast(float* to, Vec v) { _mm512_stream_ps(to, v); }
inline __mmask16 Mask(int64_t count) { return (1u << count) - 1; }
// Loads the first `count` of kLanes numbers, then zeros.
inline Vec LoadPart(const float* from, int64_t count) {
  return _mm512_maskz_loadu_ps(Mask(count), from);
}
inline void StorePart(float* to, int64_t count, Vec v) { _mm512_mask_storeu_ps(to, Mask(count), v); }
inline Vec Add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec Times(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec Positive(Vec a) { return _mm512_max_ps(Vec{}, a); }  // NaN stays NaN
inline Vec WherePositive(Vec a, Vec b) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, Vec{}, _CMP_GT_OQ), b);
}
inline Vec Spread(Word a) { return _mm512_castsi512_ps(_mm512_set1_epi32(a)); }
inline Vec Spread(float a) { return _mm512_set1_ps(a); }
inline Vec MultiplyAdd(Vec a, Vec b, Vec sum) { return _mm512_fmadd_ps(a, b, sum); }
#else
using Vec = __m256;
constexpr int kLanes = 8;
constexpr int kRows = 6;
inline Vec Load(const void* from) { return _mm256_loadu_ps(static_cast<const float*>(from)); }
inline void Store(void* to, Vec v) { _mm256_storeu_ps(static_cast<float*>(to), v); }
inline void StorePast(float* to, Vec v) { _mm256_stream_ps(to, v); }
inline __m256i Mask(int64_t count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec LoadPart(const float* from, int64_t count) {
  return _mm256_maskload_ps(from, Mask(count));
}
inline void StorePart(float* to, int64_t count, Vec v) { _mm256_maskstore_ps(to, Mask(count), v); }
inline Vec Add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec Times(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec Positive(Vec a) { return _mm256_max_ps(Vec{}, a); }
inline Vec WherePositive(Vec a, Vec b) {
  return _mm256_and_ps(_mm256_cmp_ps(a, Vec{}, _CMP_GT_OQ), b);
}
inline Vec Spread(Word a) { return _mm256_castsi256_ps(_mm256_set1_epi32(a)); }
inline Vec Spread(float a) { return _mm256_set1_ps(a); }
inline Vec MultiplyAdd(Vec a, Vec b, Vec sum) { return _mm256_fmadd_ps(a, b, sum); }
#endif

// Loads `count` numbers, at most kLanes, then zeros.
inline Vec LoadUpTo(const float* from, int64_t count) {
  return count >= kLanes ? Load(from) : count > 0 ? LoadPart(from, count) : Vec{};
}
inline void StoreUpTo(float* to, int64_t count, Vec v) {
  count >= kLanes ? Store(to, v) : StorePart(to, count, v);
}

// Stores past the caches if the address is aligned, for whole cache lines that are read much later.
// Other threads see the numbers after Streamed().
inline void Stream(float* to, Vec v) {
  reinterpret_cast<uintptr_t>(to) % sizeof(Vec) ? Store(to, v) : StorePast(to, v);
}
inline void Streamed() { _mm_sfence(); }

inline float SumOf(Vec v) {
  float numbers[kLanes];
  Store(numbers, v);
  float sum = 0;
  for (float x : numbers) sum += x;
  return sum;
}

// Conversions of numbers to words. Beside: of a column in one row and the next. Behind: of consecutive
// numbers, kLanes in `low` and, if a word has two numbers, kLanes in `high`. Rounded: to the values
// that are multiplied, in float32.
struct Float32 {
  static constexpr int kNumbers = 1;  // per word
  static constexpr int64_t kHere = 96;  // words of a sum over examples, packed at a time
  static Vec Beside(Vec row, Vec) { return row; }
  static Vec Behind(Vec low, Vec) { return low; }
  static Vec Rounded(Vec x) { return x; }
  static Vec Product(Word a, Vec b, Vec sum) { return MultiplyAdd(Spread(a), b, sum); }
};

#ifdef __AVX512BF16__
// The processor treats subnormal numbers as zero here, as in its products.
struct Bfloat16 {
  static constexpr int kNumbers = 2;
  static constexpr int64_t kHere = 64;
  static Vec Behind(Vec low, Vec high) {
    return _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
  static Vec Beside(Vec row, Vec next) {
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_castsi512_ps(
        _mm512_permutexvar_epi16(order, _mm512_castps_si512(Behind(row, next))));
  }
  static Vec Rounded(Vec x) {
    const __m512i words = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  }
  static Vec Product(Word a, Vec b, Vec sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
  }
};
#else
// Products of two bfloat16 numbers are exact in float32.
struct Bfloat16 : Float32 {
  static Vec Behind(Vec low, Vec) {
    Word bits[kLanes];
    Store(bits, low);
    for (Word& x : bits) {  // round to nearest even; NaN stays NaN
      const bool is_nan = (x & 0x7fffffff) > 0x7f800000;
      x = (is_nan ? x | 0x400000 : x + 0x7fff + ((x >> 16) & 1)) & 0xffff0000;
    }
    return Load(bits);
  }
  static Vec Beside(Vec row, Vec next) { return Behind(row, next); }
  static Vec Rounded(Vec x) { return Behind(x, x); }
};
#endif

}  // namespace jaxrank

#endif  // JAXRANK_NATIVE_LANES_H_
