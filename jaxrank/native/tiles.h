// Tiles of a matrix product, with sums in registers.

#ifndef JAXRANK_NATIVE_TILES_H_
#define JAXRANK_NATIVE_TILES_H_

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "lanes.h"

namespace jaxrank {

constexpr int64_t kPanel = 2 * kLanes;  // columns
constexpr int64_t kLine = 64 / sizeof(float);  // numbers per cache line

inline int64_t Ceil(int64_t x, int64_t y) { return (x + y - 1) / y; }

// Prefetches memory that is read soon, in small pieces.
class Ahead {
 public:
  // Prefetches `columns` columns of x[rows, stride] in `calls` calls of Ask.
  void Begin(const float* x, int64_t stride, int64_t rows, int64_t columns, int64_t calls) {
    if (columns == stride) columns *= std::exchange(rows, std::min<int64_t>(rows, 1));
    row_ = x, stride_ = stride, rows_ = x ? rows : 0, columns_ = columns, column_ = 0;
    lines_ = Ceil(rows_ * Ceil(columns, kLine), std::max<int64_t>(calls, 1));
  }

  void Ask() {
    for (int64_t i = 0; i < lines_ && rows_ > 0; ++i) {
      __builtin_prefetch(row_ + column_, 0, 2);
      column_ += kLine;
      if (column_ >= columns_) row_ += stride_, column_ = 0, --rows_;
    }
  }

 private:
  const float* row_ = nullptr;
  int64_t stride_ = 0, rows_ = 0, columns_ = 0, column_ = 0, lines_ = 0;
};

// Sums that are not always in registers take half as long again.
#define JAXRANK_UNROLL _Pragma("GCC unroll 12")

// Computes c[rows, columns] = strip x panel, or += it, and then done(row, column, count, sums) of the
// result. Rows of the strip are kRow words apart, steps kStep. A partial tile has `rows` rows and
// `columns` columns.
template <class Kind, int kVecs, bool kIsWhole, int64_t kRow, int64_t kStep, typename Done>
void Tile(const Word* __restrict a, const Word* __restrict b, int64_t steps, float* __restrict c,
          int64_t stride, int64_t rows, int64_t columns, bool add, const Done& done) {
JAXRANK_UNROLL
  for (int i = 0; i < kRows; ++i) {  // memory that is only written is waited for, too
JAXRANK_UNROLL
    for (int v = 0; v < kVecs; ++v) __builtin_prefetch(c + i * stride + v * kLanes, 1);
    __builtin_prefetch(c + i * stride + kVecs * kLanes - 1, 1);
  }
  Vec sum[kRows][kVecs];
JAXRANK_UNROLL
  for (int i = 0; i < kRows; ++i) {
JAXRANK_UNROLL
    for (int v = 0; v < kVecs; ++v) sum[i][v] = Vec{};
  }
  for (int64_t k = 0; k < steps; ++k) {
    Vec row[kVecs];
JAXRANK_UNROLL
    for (int v = 0; v < kVecs; ++v) row[v] = Load(b + v * kLanes);
JAXRANK_UNROLL
    for (int i = 0; i < kRows; ++i) {
JAXRANK_UNROLL
      for (int v = 0; v < kVecs; ++v) sum[i][v] = Kind::Product(a[i * kRow], row[v], sum[i][v]);
    }
    a += kStep;
    b += kPanel;
  }
  const auto put = [&](int64_t i, int64_t v, int64_t count, Vec sums) {
    float* to = c + i * stride + v * kLanes;
    const Vec total = add ? Add(LoadUpTo(to, count), sums) : sums;
    StoreUpTo(to, count, done(i, v * kLanes, count, total));
  };
  if constexpr (kIsWhole) {
JAXRANK_UNROLL
    for (int i = 0; i < kRows; ++i) {
JAXRANK_UNROLL
      for (int v = 0; v < kVecs; ++v) put(i, v, kLanes, sum[i][v]);
    }
  } else {  // partial tiles are rare, and unrolled code would be compiled for every `done`
    float sums[kRows][kVecs][kLanes];
JAXRANK_UNROLL
    for (int i = 0; i < kRows; ++i) {
JAXRANK_UNROLL
      for (int v = 0; v < kVecs; ++v) Store(sums[i][v], sum[i][v]);
    }
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t v = 0; v < kVecs; ++v) put(i, v, columns - v * kLanes, Load(sums[i][v]));
    }
  }
}

// Multiplies a strip by consecutive panels with `columns` columns in total. Calls ask() after each
// panel, and `done` as for a tile.
template <class Kind, int64_t kRow, int64_t kStep, typename Ask, typename Done>
void Strip(const Word* a, const Word* panels, int64_t steps, float* c, int64_t stride, int64_t rows,
           int64_t columns, bool add, const Ask& ask, const Done& done) {
  for (int64_t j = 0; j < columns; j += kPanel, panels += steps * kPanel) {
    const int64_t width = std::min(kPanel, columns - j);
    const auto done_here = [&](int64_t row, int64_t column, int64_t count, Vec sums) {
      return done(row, j + column, count, sums);
    };
    const auto make = [&](auto vecs, auto is_whole) {
      Tile<Kind, vecs, is_whole, kRow, kStep>(a, panels, steps, c + j, stride, rows, width, add,
                                              done_here);
    };
    if (width <= kLanes) {
      make(std::integral_constant<int, 1>(), std::false_type());
    } else if (rows < kRows || width < kPanel) {
      make(std::integral_constant<int, 2>(), std::false_type());
    } else {
      make(std::integral_constant<int, 2>(), std::true_type());
    }
    ask();
  }
}

}  // namespace jaxrank

#endif  // JAXRANK_NATIVE_TILES_H_
