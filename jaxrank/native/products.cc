// Matrix products on CPU: of numbers rounded to bfloat16, added up in float32.
//
// One factor lies in strips of kRows rows, the other in panels of kLanes or twice as many columns; a
// tile of the result stays in registers while its sum is made (Goto and van de Geijn, Anatomy of
// High-Performance Matrix Multiplication, ACM TOMS 2008). A step of the sum is a word: two numbers of
// bfloat16, or one as float32 where the processor multiplies no others.
//
// What is computed does not depend on the threads: where a sum is cut is decided by the shape alone.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#define JAXRANK_HAS_PRODUCTS 1
#include <immintrin.h>
#endif

#include "each.h"
#include "xla/ffi/api/ffi.h"

#ifdef JAXRANK_HAS_PRODUCTS

namespace {

using jaxrank::Each;
using jaxrank::Floats;
using jaxrank::FloatsOut;
using jaxrank::Nothing;
using Word = uint32_t;

#ifdef __AVX512F__
using Vec = __m512;
constexpr int kLanes = 16;
constexpr int kRows = 12;
inline Vec Load(const void* from) { return _mm512_loadu_ps(from); }
inline void Store(float* to, Vec v) { _mm512_storeu_ps(to, v); }
inline Vec Multiply(Vec sum, Word a, Vec b) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(a)), b, sum);
}
#else
using Vec = __m256;
constexpr int kLanes = 8;
constexpr int kRows = 6;
inline Vec Load(const void* from) { return _mm256_loadu_ps(static_cast<const float*>(from)); }
inline void Store(float* to, Vec v) { _mm256_storeu_ps(to, v); }
inline Vec Multiply(Vec sum, Word a, Vec b) {
  return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_set1_epi32(a)), b, sum);
}
#endif

inline Word Bits(float x) {
  Word bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

// To the nearest bfloat16, the even one of two, in the upper half; the lower is zero.
inline Word Rounded(float x) {
  const Word bits = Bits(x);
  const Word rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
  return x == x ? rounded : (bits | 0x400000) & 0xffff0000;  // NaN stays so
}

#ifdef __AVX512BF16__
constexpr int kNumbers = 2;  // of a word
inline Word WordOf(float x, float next) { return (Rounded(x) >> 16) | Rounded(next); }
// kLanes numbers at `low`, and behind them as many at `high`. The processor takes subnormal numbers for
// zero here, as it does when it multiplies them.
inline __m512i RoundedBoth(const float* low, const float* high) {
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(high), _mm512_loadu_ps(low));
}
inline Vec MultiplyAdd(Vec sum, Word a, Vec b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
}
#else
constexpr int kNumbers = 1;  // the products of two are float32 numbers
inline Word WordOf(float x, float) { return Rounded(x); }
inline Vec MultiplyAdd(Vec sum, Word a, Vec b) { return Multiply(sum, a, b); }
#endif

constexpr int64_t kPanel = 2 * kLanes;   // columns
constexpr int64_t kSteps = 512;          // words that a strip has at most
constexpr int64_t kStride = kSteps + 16;  // from one row of a strip to the next
constexpr int64_t kWide = 512;            // columns that are packed at a time at most
constexpr int64_t kCached = 1 << 17;     // words of panels that a core's cache holds

int64_t Ceil(int64_t x, int64_t y) { return (x + y - 1) / y; }

// c[rows, columns] = a strip by a panel, or += it. A row of the strip is kRow words from the next, a
// step kStep.
template <int kVecs, int64_t kRow, int64_t kStep>
void Tile(const Word* __restrict a, const Word* __restrict b, int64_t steps, float* __restrict c,
          int64_t stride, bool add) {
  if (!add) {  // what is only written is otherwise waited for at the end
    for (int i = 0; i < kRows; ++i) {
      for (int v = 0; v < kVecs; ++v) __builtin_prefetch(c + i * stride + v * kLanes, 1);
      __builtin_prefetch(c + i * stride + kVecs * kLanes - 1, 1);
    }
  }
  Vec sum[kRows][kVecs];
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kVecs; ++v) sum[i][v] = add ? Load(c + i * stride + v * kLanes) : Vec{};
  }
  for (int64_t k = 0; k < steps; ++k) {
    Vec row[kVecs];
    for (int v = 0; v < kVecs; ++v) row[v] = Load(b + v * kLanes);
    for (int i = 0; i < kRows; ++i) {
      for (int v = 0; v < kVecs; ++v) sum[i][v] = MultiplyAdd(sum[i][v], a[i * kRow], row[v]);
    }
    a += kStep;
    b += kPanel;
  }
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kVecs; ++v) Store(c + i * stride + v * kLanes, sum[i][v]);
  }
}

// A strip by panels of `columns` columns, one behind the other. At the edges of the result a tile
// is made aside.
template <int64_t kRow, int64_t kStep>
void Strip(const Word* a, const Word* panels, int64_t steps, float* c, int64_t stride, int64_t rows,
           int64_t columns, bool add) {
  for (int64_t j = 0; j < columns; j += kPanel, panels += steps * kPanel) {
    const int64_t width = std::min(kPanel, columns - j);
    const auto tile = [&](float* to, int64_t stride) {
      if (width > kLanes) {
        Tile<2, kRow, kStep>(a, panels, steps, to, stride, add);
      } else {
        Tile<1, kRow, kStep>(a, panels, steps, to, stride, add);
      }
    };
    if (rows == kRows && width % kLanes == 0) {
      tile(c + j, stride);
      continue;
    }
    float aside[kRows * kPanel];
    for (int64_t i = 0; add && i < rows; ++i) {
      std::memcpy(aside + i * kPanel, c + i * stride + j, width * sizeof(float));
    }
    tile(aside, kPanel);
    for (int64_t i = 0; i < rows; ++i) {
      std::memcpy(c + i * stride + j, aside + i * kPanel, width * sizeof(float));
    }
  }
}

// to[j] = the word of row[j] and next[j].
void PackBeside(const float* row, const float* next, int64_t columns, Word* to) {
  int64_t j = 0;
#ifdef __AVX512BF16__
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (; j + kLanes <= columns; j += kLanes) {
    const __m512i words = _mm512_permutexvar_epi16(order, RoundedBoth(row + j, next + j));
    _mm512_storeu_si512(to + j, words);
  }
#endif
  for (; j < columns; ++j) to[j] = WordOf(row[j], next[j]);
}

// to[k] = the word k of x.
void PackBehind(const float* x, int64_t words, Word* to) {
  int64_t k = 0;
#ifdef __AVX512BF16__
  for (; k + kLanes <= words; k += kLanes) {
    _mm512_storeu_si512(to + k, RoundedBoth(x + 2 * k, x + 2 * k + kLanes));
  }
#endif
  for (; k < words; ++k) to[k] = WordOf(x[kNumbers * k], x[kNumbers * (k + 1) - 1]);
}

// Of x[numbers, stride]: pieces [step][kWidth] of so many columns, one behind the other, with zeros
// behind the last column.
template <int64_t kWidth>
void PackColumns(const float* x, int64_t stride, int64_t numbers, int64_t columns, Word* to) {
  const int64_t steps = Ceil(numbers, kNumbers);
  for (int64_t k = 0; k < steps; ++k, to += kWidth) {
    const float* row = x + k * kNumbers * stride;
    const bool is_last = (k + 1) * kNumbers > numbers;
    const float* next = row + (is_last ? 0 : (kNumbers - 1) * stride);
    Word line[kWide];
    PackBeside(row, next, columns, line);
    for (int64_t j = 0; is_last && j < columns; ++j) line[j] &= 0xffff;  // no number is behind it
    const int64_t whole = columns / kWidth * kWidth;
    Word* piece = to;
    for (int64_t j = 0; j < whole; j += kWidth, piece += steps * kWidth) {
      std::memcpy(piece, line + j, kWidth * sizeof(Word));
    }
    if (whole == columns) continue;
    std::memset(piece, 0, kWidth * sizeof(Word));
    std::memcpy(piece, line + whole, (columns - whole) * sizeof(Word));
  }
}

// A panel [step][kPanel] of the transpose of x[columns, stride].
void PackTransposed(const float* x, int64_t stride, int64_t numbers, int64_t columns, Word* to) {
  for (int64_t k = 0; k < numbers; k += kNumbers, to += kPanel) {
    const bool is_last = k + kNumbers > numbers;
    for (int64_t j = 0; j < columns; ++j) {
      const float* at = x + j * stride + k;
      to[j] = WordOf(at[0], is_last ? 0.0f : at[kNumbers - 1]);
    }
    for (int64_t j = columns; j < kPanel; ++j) to[j] = 0;
  }
}

// to[row][step], kStride words a row, of rows x[rows, stride].
void PackRows(const float* x, int64_t stride, int64_t numbers, int64_t rows, Word* to) {
  for (int64_t i = 0; i < rows; ++i, x += stride, to += kStride) {
    const int64_t whole = numbers / kNumbers;
    PackBehind(x, whole, to);
    if (numbers % kNumbers) to[whole] = WordOf(x[numbers - 1], 0.0f);
  }
}

// Of a thread, kept from call to call.
Word* Memory(int64_t words) {
  thread_local std::vector<Word> memory;
  if (int64_t(memory.size()) < words + 16) memory.resize(words + 16);
  return memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) / sizeof(Word);
}

// Where a sum of so many steps is cut.
struct Cut {
  int64_t steps;
  int64_t parts;

  Cut(int64_t steps, int64_t most) : steps(steps), parts(Ceil(steps, most)) {}

  int64_t Begin(int64_t part) const { return steps * part / parts; }
  int64_t Size(int64_t part) const { return Begin(part + 1) - Begin(part); }
};

// out[batch, m, n] = x[batch, m, k] by kernel[batch, k, n], or [batch, n, k] if it is transposed.
ffi::Error OfRows(ffi::ThreadPool pool, Floats x, Floats kernel, bool is_transposed, FloatsOut out,
                  FloatsOut work) {
  const auto dims = out->dimensions();
  const int64_t batch = dims[0], m = dims[1], n = dims[2], k = x.dimensions()[2];
  const Cut cut(Ceil(k, kNumbers), kSteps);
  const int64_t panels = Ceil(n, kPanel);
  const int64_t words = cut.steps * panels * kPanel;  // of one kernel
  if (work->element_count() < batch * words) return ffi::Error::InvalidArgument("too little work");
  auto* packed = reinterpret_cast<Word*>(work->typed_data());
  const auto numbers = [&](int64_t part) {
    return std::min(k, cut.Begin(part + 1) * kNumbers) - cut.Begin(part) * kNumbers;
  };
  // The panels of a part lie behind each other, and those of the next part behind them.
  Each<Nothing>(pool, batch * panels, [&](int64_t item, Nothing&) {
    const float* from = kernel.typed_data() + item / panels * k * n;
    const int64_t j = item % panels * kPanel, columns = std::min(kPanel, n - j);
    for (int64_t part = 0; part < cut.parts; ++part) {
      const int64_t begin = cut.Begin(part), first = begin * kNumbers;
      Word* to = packed + item / panels * words + begin * panels * kPanel + j * cut.Size(part);
      if (is_transposed) {
        PackTransposed(from + j * k + first, k, numbers(part), columns, to);
      } else {
        PackColumns<kPanel>(from + first * n + j, n, numbers(part), columns, to);
      }
    }
  });
  const int64_t strips = Ceil(m, kRows);
  const int64_t together = std::clamp<int64_t>(strips / (4 * pool.num_threads()), 1, 8);
  const int64_t blocks = Ceil(strips, together);
  Each<Nothing>(pool, batch * blocks, [&](int64_t item, Nothing&) {
    const int64_t of = item / blocks;
    const int64_t begin = item % blocks * together * kRows;
    const int64_t end = std::min(m, begin + together * kRows);
    Word* memory = Memory(together * kRows * kStride);
    for (int64_t part = 0; part < cut.parts; ++part) {
      const int64_t steps = cut.Size(part);
      PackRows(x.typed_data() + (of * m + begin) * k + cut.Begin(part) * kNumbers, k,
                     numbers(part), end - begin, memory);
      const Word* here = packed + of * words + cut.Begin(part) * panels * kPanel;
      const Cut columns(panels, std::max<int64_t>(1, kCached / (steps * kPanel)));
      for (int64_t block = 0; block < columns.parts; ++block) {
        const int64_t j = columns.Begin(block) * kPanel;
        const int64_t width = std::min(columns.Size(block) * kPanel, n - j);
        for (int64_t i = begin; i < end; i += kRows) {
          Strip<kStride, 1>(memory + (i - begin) * kStride, here + j * steps, steps,
                                  out->typed_data() + (of * m + i) * n + j, n,
                                  std::min<int64_t>(kRows, end - i), width, part > 0);
        }
      }
    }
  });
  return ffi::Error::Success();
}

// out[batch, m, n] = the sum over k of x[batch, k, m] by grad[batch, k, n]. It is taken in as many
// parts as `work` [parts, batch, m, n] has room for, and these are then added up.
ffi::Error OfColumns(ffi::ThreadPool pool, Floats x, Floats grad, FloatsOut out, FloatsOut work) {
  const auto dims = out->dimensions();
  const int64_t batch = dims[0], m = dims[1], n = dims[2], k = x.dimensions()[1];
  const int64_t size = batch * m * n;
  const Cut cut(k, Ceil(k, std::max<int64_t>(1, work->element_count() / std::max<int64_t>(1, size))));
  const int64_t parts = cut.parts;
  float* sums = parts > 1 ? work->typed_data() : out->typed_data();
  constexpr int64_t kHere = kSteps / 2 * kNumbers;  // examples at a time
  constexpr int64_t kTogether = 8;                        // strips that are packed at a time
  // A thread has a block of strips, so that one of many need not wait; each block packs `grad`.
  const int64_t strips = Ceil(m, kRows);
  const int64_t blocks = std::clamp<int64_t>(Ceil(2 * pool.num_threads(), parts * batch), 1, strips);
  Each<Nothing>(pool, parts * batch * blocks, [&](int64_t item, Nothing&) {
    const int64_t block = item % blocks, of = item / blocks % batch, part = item / blocks / batch;
    const int64_t first = strips * block / blocks * kRows;
    const int64_t last = std::min(m, strips * (block + 1) / blocks * kRows);
    float* to = sums + part * size + of * m * n;
    Word* panels = Memory(kSteps / 2 * (kWide + kTogether * kRows));
    Word* packed = panels + kSteps / 2 * kWide;
    const int64_t end = cut.Begin(part + 1);
    for (int64_t e = cut.Begin(part); e < end; e += kHere) {
      const int64_t numbers = std::min(kHere, end - e), steps = Ceil(numbers, kNumbers);
      for (int64_t j = 0; j < n; j += kWide) {
        const int64_t width = std::min(kWide, n - j);
        PackColumns<kPanel>(grad.typed_data() + (of * k + e) * n + j, n, numbers, width,
                                  panels);
        for (int64_t i = first; i < last; i += kRows) {
          const int64_t strip = (i - first) / kRows % kTogether;
          if (strip == 0) {
            PackColumns<kRows>(x.typed_data() + (of * k + e) * m + i, m, numbers,
                                     std::min(kTogether * kRows, last - i), packed);
          }
          Strip<1, kRows>(packed + strip * steps * kRows, panels, steps, to + i * n + j, n,
                                std::min<int64_t>(kRows, last - i), width, e > cut.Begin(part));
        }
      }
    }
  });
  if (parts == 1) return ffi::Error::Success();
  const int64_t pieces = std::clamp<int64_t>(size >> 13, 1, 64);
  Each<Nothing>(pool, pieces, [&](int64_t piece, Nothing&) {
    const int64_t begin = size * piece / pieces, end = size * (piece + 1) / pieces;
    for (int64_t i = begin; i < end; ++i) {
      float sum = sums[i];
      for (int64_t part = 1; part < parts; ++part) sum += sums[part * size + i];
      out->typed_data()[i] = sum;
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxrankProductOfRows, OfRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Attr<bool>("is_transposed")
                                  .Ret<Floats>()
                                  .Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxrankProductOfColumns, OfColumns,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>());

#endif  // JAXRANK_HAS_PRODUCTS
