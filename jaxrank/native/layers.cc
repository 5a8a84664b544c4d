// Dense layers on CPU: matrix products of float32, or of numbers rounded to bfloat16 with float32 sums,
// and the operations of a layer before and after them. See models/native_layers.py.
//
// One factor is packed in strips of kRows rows, the other in panels of kLanes or 2 * kLanes columns. A
// tile of the result stays in registers while it is summed (Goto and van de Geijn, Anatomy of
// High-Performance Matrix Multiplication, ACM TOMS 2008). A step of the sum is a word: one float32
// number, or two bfloat16 numbers if the processor multiplies these. The input of the next tiles is
// prefetched during the current ones.
//
// Results do not depend on the number of threads: the shape alone determines where a sum is cut.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#define JAXRANK_HAS_LAYERS 1
#endif

#include "each.h"
#include "xla/ffi/api/ffi.h"

#ifdef JAXRANK_HAS_LAYERS

#include "tiles.h"

namespace {

using namespace jaxrank;

constexpr int64_t kGroup = 4 * kRows;     // columns whose strips are packed together
constexpr int64_t kSteps = 1024;          // maximum words of a strip
constexpr int64_t kStride = kSteps + 16;  // from one row of a strip to the next
constexpr int64_t kTogether = 4;          // strips that are packed at a time
constexpr int64_t kCached = 1 << 18;      // words of panels that a core's cache holds
constexpr int64_t kWide = 768;            // maximum columns packed at a time

// The operation of a layer after the product x W and its bias b, and on the incoming gradient.
enum Form : int64_t {
  kPlain,  // x W + b; the gradient unchanged
  kRelu,   // the positive part y; the gradient where y > 0
  kCross,  // x0 (x W + b) + past; the gradient times x0
};

// Calls function(form), with the form as a type.
template <typename Function>
auto WithForm(Form form, const Function& function) {
  switch (form) {
    case kRelu: return function(std::integral_constant<Form, kRelu>());
    case kCross: return function(std::integral_constant<Form, kCross>());
    default: return function(std::integral_constant<Form, kPlain>());
  }
}

// The gradient of x0, which is summed while the rows of the gradient are read: each of their numbers
// times the factor of x0, whose rows are `stride` apart.
struct X0Gradient {
  const float* x0_grad = nullptr;
  const float* multiplied = nullptr;
  int64_t stride = 0;
  float* to = nullptr;  // null: nothing is added
};

// The rows of a factor: x, or a gradient together with y or x0.
struct Rows {
  const float* x;
  const float* by;  // null for kPlain
  int64_t width;
  Form form;
  X0Gradient of_x0;

  // Reads `count` numbers, at most kLanes, from (row, column). With `of_x0` each is read once.
  template <Form kForm>
  Vec At(int64_t row, int64_t column, int64_t count) const {
    const int64_t at = row * width + column;
    const Vec values = LoadUpTo(x + at, count);
    if (kForm == kPlain) return values;
    const Vec factor = LoadUpTo(by + at, count);
    if (kForm == kRelu) return WherePositive(factor, values);
    if (of_x0.to && count > 0) {
      const Vec more = LoadUpTo(of_x0.multiplied + row * of_x0.stride + column, count);
      StoreUpTo(of_x0.to + at, count,
                Add(LoadUpTo(of_x0.x0_grad + at, count), Times(values, more)));
    }
    return Times(values, factor);
  }
};

// Packs one step, the numbers of a row and the next from at(column, count), into consecutive pieces
// [steps][kWidth], with zeros behind the last column.
template <class Kind, int64_t kWidth, typename At>
void PackStep(const At& at, int64_t columns, int64_t steps, Word* to) {
  for (int64_t j = 0; j < columns; j += kWidth, to += steps * kWidth) {
    for (int64_t v = 0; v < kWidth; v += kLanes) {
      const auto [row, next] = at(j + v, columns - j - v);
      Store(to + v, Kind::Beside(row, next));
    }
  }
}

// Packs `numbers` numbers from at(first, count) into the words to[k]. There must be room for kLanes
// words behind the last.
template <class Kind, typename At>
void PackRow(const At& at, int64_t numbers, Word* to) {
  constexpr int64_t kEach = Kind::kNumbers * kLanes;
  for (int64_t k = 0; k < numbers; k += kEach, to += kLanes) {
    const Vec low = at(k, numbers - k);
    const bool has_high = kEach > kLanes;
    Store(to, Kind::Behind(low, has_high ? at(k + kLanes, numbers - k - kLanes) : low));
  }
}

// Memory of a thread, kept between calls.
Word* Memory(int64_t words) {
  thread_local std::vector<Word> memory;
  if (int64_t(memory.size()) < words + 16) memory.resize(words + 16);
  return memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) / sizeof(Word);
}

// The cuts of a sum of many steps.
struct Cut {
  int64_t steps;
  int64_t parts;

  Cut(int64_t steps, int64_t most) : steps(steps), parts(Ceil(steps, most)) {}

  int64_t Begin(int64_t part) const { return steps * part / parts; }
  int64_t Size(int64_t part) const { return Begin(part + 1) - Begin(part); }
};

// Packs kernel[k, n], or [n, k] if it is transposed, into panels [part][panel][step][kPanel].
template <class Kind>
void PackKernel(const float* kernel, int64_t k, int64_t n, bool is_transposed, const Cut& cut,
                int64_t panel, Word* packed) {
  const int64_t j = panel * kPanel, columns = std::min(kPanel, n - j);
  for (int64_t part = 0; part < cut.parts; ++part) {
    const int64_t steps = cut.Size(part), first = cut.Begin(part) * Kind::kNumbers;
    const int64_t numbers = std::min(k, cut.Begin(part + 1) * Kind::kNumbers) - first;
    Word* to = packed + cut.Begin(part) * Ceil(n, kPanel) * kPanel + j * steps;
    if (!is_transposed) {
      for (int64_t step = 0; step < steps; ++step) {
        const int64_t row = step * Kind::kNumbers;
        const bool has_next = Kind::kNumbers > 1 && row + 1 < numbers;
        const auto at = [&](int64_t column, int64_t count) {
          const float* from = kernel + (first + row) * n + j + column;
          return std::pair(LoadUpTo(from, count), has_next ? LoadUpTo(from + n, count) : Vec{});
        };
        PackStep<Kind, kPanel>(at, columns, steps, to + step * kPanel);
      }
      continue;
    }
    Word row[kStride];
    for (int64_t column = 0; column < kPanel; ++column) {
      if (column < columns) {
        const float* from = kernel + (j + column) * k + first;
        PackRow<Kind>([&](int64_t i, int64_t count) { return LoadUpTo(from + i, count); }, numbers,
                      row);
      }
      for (int64_t step = 0; step < steps; ++step) {
        to[step * kPanel + column] = column < columns ? row[step] : 0;
      }
    }
  }
}

// Minimum rows per thread, if each row is read or written once.
constexpr int64_t kFew = 64;

// Multiplies rows by a kernel of one column, which is a sum per row, or of one row.
template <class Kind, typename Finish>
void MultiplyRows(ffi::ThreadPool pool, const Rows& rows, const float* kernel, int64_t batch,
                  int64_t m, int64_t n, float* out, const Finish& finish) {
  const int64_t k = rows.width, width = std::max(k, n), blocks = Ceil(m, kFew);
  Each<Nothing>(pool, batch * blocks, [&](int64_t item, Nothing&) {
    const int64_t of = item / blocks, first = item % blocks * kFew;
    auto* line = reinterpret_cast<float*>(Memory(width + kLanes));
    for (int64_t j = 0; j < width; j += kLanes) {
      Store(line + j, Kind::Rounded(LoadUpTo(kernel + of * width + j, width - j)));
    }
    WithForm(rows.form, [&](auto form) {
      for (int64_t i = of * m + first; i < of * m + std::min(m, first + kFew); ++i) {
        if (n == 1) {
          Vec sums[4] = {};
          for (int64_t j = 0; j < k; j += 4 * kLanes) {
            for (int64_t v = 0; v < 4; ++v) {
              const int64_t at = j + v * kLanes;
              if (at >= k) break;
              const Vec x = Kind::Rounded(rows.At<form>(i, at, k - at));
              sums[v] = MultiplyAdd(x, Load(line + at), sums[v]);
            }
          }
          const float sum = SumOf(Add(Add(sums[0], sums[1]), Add(sums[2], sums[3])));
          StoreUpTo(out + i, 1, finish(i, 0, 1, LoadUpTo(&sum, 1)));
          continue;
        }
        const float x = SumOf(Kind::Rounded(rows.At<form>(i, 0, 1)));  // the other lanes are zero
        for (int64_t j = 0; j < n; j += kLanes) {
          const Vec y = Times(Spread(x), Load(line + j));
          StoreUpTo(out + i * n + j, n - j, finish(i, j, n - j, y));
        }
      }
    });
    Streamed();
  });
}

// Computes out[batch, m, n] = finish(row, column, count, sums) for the product of rows [batch, m, k]
// and a kernel. `finish` reads `also` [batch, m, n] if it is not null.
template <class Kind, typename Finish>
ffi::Error MultiplyByKernel(ffi::ThreadPool pool, const Rows& rows, Floats kernel,
                            bool is_transposed, const float* also, FloatsOut out, FloatsOut work,
                            const Finish& finish) {
  const auto dims = out->dimensions();
  const int64_t batch = dims[0], m = dims[1], n = dims[2], k = rows.width;
  if (n == 1 || k == 1) {
    MultiplyRows<Kind>(pool, rows, kernel.typed_data(), batch, m, n, out->typed_data(), finish);
    return ffi::Error::Success();
  }
  const Cut cut(Ceil(k, Kind::kNumbers), kSteps);
  const int64_t panels = Ceil(n, kPanel);
  const int64_t words = cut.steps * panels * kPanel;  // per kernel
  if (int64_t(work->element_count()) < batch * words) {
    return ffi::Error::InvalidArgument("work: too small for the packed words");
  }
  auto* packed = reinterpret_cast<Word*>(work->typed_data());
  Each<Nothing>(pool, batch * panels, [&](int64_t item, Nothing&) {
    const int64_t of = item / panels;
    PackKernel<Kind>(kernel.typed_data() + of * k * n, k, n, is_transposed, cut, item % panels,
                     packed + of * words);
  });
  const int64_t strips = Ceil(m, kRows), threads = pool.num_threads();
  const int64_t together = std::clamp<int64_t>(strips / (4 * threads), 1, kTogether);
  const int64_t blocks = Ceil(strips, together);
  Each<Nothing>(pool, batch * blocks, [&](int64_t item, Nothing&) {
    const auto begin_of = [&](int64_t item) {  // a row of the whole batch
      return item / blocks * m + item % blocks * together * kRows;
    };
    const int64_t of = item / blocks, begin = begin_of(item);
    const int64_t end = std::min((of + 1) * m, begin + together * kRows);
    // Most likely the next item of this thread.
    Ahead ahead[5];
    const int64_t next = item + threads < batch * blocks ? begin_of(item + threads) : batch * m;
    const int64_t coming = std::min(batch * m - next, together * kRows);
    const int64_t tiles = Ceil(end - begin, kRows) * panels * cut.parts;
    ahead[0].Begin(rows.x + next * k, k, coming, k, tiles);
    if (rows.by) ahead[1].Begin(rows.by + next * k, k, coming, k, tiles);
    if (also) ahead[2].Begin(also + next * n, n, coming, n, tiles);
    if (rows.of_x0.to) {
      const auto& [x0_grad, multiplied, stride, to] = rows.of_x0;
      ahead[3].Begin(x0_grad + next * k, k, coming, k, tiles);
      ahead[4].Begin(multiplied + next * stride, stride, coming, k, tiles);
    }
    const auto ask = [&] {
      for (Ahead& each : ahead) each.Ask();
    };
    Word* memory = Memory(kTogether * kRows * kStride);
    for (int64_t part = 0; part < cut.parts; ++part) {
      const int64_t steps = cut.Size(part), first = cut.Begin(part) * Kind::kNumbers;
      const int64_t numbers = std::min(k, cut.Begin(part + 1) * Kind::kNumbers) - first;
      const bool is_last = part == cut.parts - 1;
      for (int64_t i = begin; i < end; ++i) {
        WithForm(rows.form, [&](auto form) {
          const auto at = [&](int64_t j, int64_t count) {
            return rows.At<form>(i, first + j, count);
          };
          PackRow<Kind>(at, numbers, memory + (i - begin) * kStride);
        });
      }
      const Word* panel = packed + of * words + cut.Begin(part) * panels * kPanel;
      const Cut columns(panels, std::max<int64_t>(1, kCached / (steps * kPanel)));
      for (int64_t block = 0; block < columns.parts; ++block) {
        const int64_t j = columns.Begin(block) * kPanel;
        const int64_t width = std::min(columns.Size(block) * kPanel, n - j);
        for (int64_t i = begin; i < end; i += kRows) {
          const auto done = [&](int64_t row, int64_t column, int64_t count, Vec sums) {
            return is_last ? finish(i + row, j + column, count, sums) : sums;
          };
          Strip<Kind, kStride, 1>(memory + (i - begin) * kStride, panel + j * steps, steps,
                                  out->typed_data() + i * n + j, n,
                                  std::min<int64_t>(kRows, end - i), width, part > 0, ask, done);
        }
      }
    }
    Streamed();
  });
  return ffi::Error::Success();
}

// Computes the kernel's gradient for one column: to[j] = sum over rows [begin, end) of x[row, j] * rows[row].
template <class Kind>
void AddRows(const float* x, int64_t stride, const Rows& rows, int64_t begin, int64_t end,
             float* to, int64_t columns, float* bias) {
  std::memset(to, 0, columns * sizeof(float));
  WithForm(rows.form, [&](auto form) {
    for (int64_t i = begin; i < end; ++i) {
      const Vec row = rows.At<form>(i, 0, 1);
      const Vec by = Spread(SumOf(Kind::Rounded(row)));
      if (bias) *bias += SumOf(row);
      for (int64_t j = 0; j < columns; j += kLanes) {
        const Vec of = Kind::Rounded(LoadUpTo(x + i * stride + j, columns - j));
        StoreUpTo(to + j, columns - j, MultiplyAdd(of, by, LoadUpTo(to + j, columns - j)));
      }
    }
  });
}

// Computes out[batch, m, n] = the sum over k of x[batch, k, m] * rows[batch, k, n], and the sum of the
// rows in of_bias[batch, n] if it is not empty. Sums are computed in parts in `work`
// [parts, batch, (m + 1) n], which are then added up. A single part is the result itself.
template <class Kind>
ffi::Error KernelGradient(ffi::ThreadPool pool, Floats x, const Rows& rows, int64_t most_parts,
                          FloatsOut out, FloatsOut of_bias, FloatsOut work) {
  const auto dims = out->dimensions();
  const int64_t batch = dims[0], m = dims[1], n = dims[2], k = x.dimensions()[1];
  const bool has_bias = of_bias->element_count() > 0;
  const int64_t size = batch * m * n, biases = has_bias ? batch * n : 0;
  const Cut cut(k, Ceil(k, std::max<int64_t>(1, most_parts)));
  const int64_t parts = cut.parts, threads = pool.num_threads();
  if (parts > 1 && int64_t(work->element_count()) < parts * (size + biases)) {
    return ffi::Error::InvalidArgument("work: too small for the packed words");
  }
  float* sums = parts > 1 ? work->typed_data() : out->typed_data();
  float* sums_of_bias = parts > 1 ? sums + parts * size : of_bias->typed_data();
  // A thread processes a block of groups, so that many threads do not wait. Each block packs its rows.
  const int64_t groups = Ceil(m, kGroup);
  const Cut blocks(groups, std::max<int64_t>(
                               1, std::min(kWide / kGroup, groups * parts * batch / (2 * threads))));
  const Cut wide(n, kWide);
  constexpr int64_t kExamples = Kind::kHere * Kind::kNumbers;  // examples at a time
  const int64_t items = parts * batch * blocks.parts * wide.parts;
  Each<Nothing>(pool, items, [&](int64_t item, Nothing&) {
    struct Place {
      int64_t j, columns, i, rows, of, part;
    };
    const auto place = [&](int64_t item) {
      const int64_t of_wide = item % wide.parts, block = item / wide.parts % blocks.parts;
      const int64_t rest = item / wide.parts / blocks.parts, i = blocks.Begin(block) * kGroup;
      return Place{wide.Begin(of_wide), wide.Size(of_wide), i,
                   std::min(m, blocks.Begin(block + 1) * kGroup) - i, rest % batch, rest / batch};
    };
    const Place current = place(item), next = place(std::min(item + threads, items - 1));
    float* to = sums + current.part * size + (current.of * m + current.i) * n + current.j;
    float* bias = nullptr;
    if (has_bias && current.i == 0) {
      bias = sums_of_bias + current.part * biases + current.of * n + current.j;
      std::memset(bias, 0, current.columns * sizeof(float));
    }
    Word* strips = Memory(Kind::kHere * (Ceil(current.rows, kGroup) * kGroup + kWide + kPanel));
    Word* panels = strips + Kind::kHere * Ceil(current.rows, kGroup) * kGroup;
    const int64_t tiles = Ceil(current.rows, kRows) * Ceil(current.columns, kPanel);
    const int64_t begin = cut.Begin(current.part), end = cut.Begin(current.part + 1);
    if (n == 1) {
      AddRows<Kind>(x.typed_data() + current.i, m, rows, current.of * k + begin,
                    current.of * k + end, to, current.rows, bias);
      return;
    }
    for (int64_t e = begin; e < end; e += kExamples) {
      const int64_t numbers = std::min(kExamples, end - e), steps = Ceil(numbers, Kind::kNumbers);
      for (int64_t step = 0; step < steps; ++step) {
        const int64_t row = current.of * k + e + step * Kind::kNumbers;
        const bool has_next = Kind::kNumbers > 1 && step * Kind::kNumbers + 1 < numbers;
        const auto x_pair = [&](int64_t j, int64_t count) {
          const float* from = x.typed_data() + row * m + current.i + j;
          return std::pair(LoadUpTo(from, count), has_next ? LoadUpTo(from + m, count) : Vec{});
        };
        PackStep<Kind, kGroup>(x_pair, current.rows, steps, strips + step * kGroup);
        WithForm(rows.form, [&](auto form) {
          const auto grad_pair = [&](int64_t j, int64_t count) {
            const std::pair both(rows.At<form>(row, current.j + j, count),
                                 has_next ? rows.At<form>(row + 1, current.j + j, count) : Vec{});
            if (bias && count > 0) {
              const Vec sum = has_next ? Add(both.first, both.second) : both.first;
              StoreUpTo(bias + j, count, Add(LoadUpTo(bias + j, count), sum));
            }
            return both;
          };
          PackStep<Kind, kPanel>(grad_pair, current.columns, steps, panels + step * kPanel);
        });
      }
      // The next examples, of this item or, most likely, of the next item of this thread.
      const bool is_last = e + kExamples >= end;
      const Place& soon = is_last ? next : current;
      const int64_t first = is_last ? cut.Begin(next.part) : e + kExamples;
      const int64_t coming = std::min(kExamples, cut.Begin(soon.part + 1) - first);
      const int64_t row = soon.of * k + first;
      Ahead ahead[3];
      ahead[0].Begin(x.typed_data() + row * m + soon.i, m, coming, soon.rows, tiles);
      ahead[1].Begin(rows.x + row * n + soon.j, n, coming, soon.columns, tiles);
      if (rows.by) ahead[2].Begin(rows.by + row * n + soon.j, n, coming, soon.columns, tiles);
      const auto ask = [&] {
        for (Ahead& each : ahead) each.Ask();
      };
      for (int64_t i = 0; i < current.rows; i += kRows) {
        const Word* strip = strips + i / kGroup * kGroup * steps + i % kGroup;
        Strip<Kind, 1, kGroup>(strip, panels, steps, to + i * n, n,
                               std::min<int64_t>(kRows, current.rows - i), current.columns,
                               e > begin, ask,
                               [](int64_t, int64_t, int64_t, Vec sums) { return sums; });
      }
    }
  });
  if (parts == 1) return ffi::Error::Success();
  const auto add_up = [&](const float* sums, int64_t size, float* to) {
    const int64_t pieces = std::clamp<int64_t>(size >> 13, 1, 64);
    Each<Nothing>(pool, pieces, [&](int64_t piece, Nothing&) {
      const int64_t begin = size * piece / pieces, end = size * (piece + 1) / pieces;
      for (int64_t i = begin; i < end; ++i) {
        float sum = sums[i];
        for (int64_t part = 1; part < parts; ++part) sum += sums[part * size + i];
        to[i] = sum;
      }
    });
  };
  add_up(sums, size, out->typed_data());
  if (has_bias) add_up(sums_of_bias, biases, of_bias->typed_data());
  return ffi::Error::Success();
}

template <typename Function>
ffi::Error WithKind(bool is_bfloat16, const Function& function) {
  return is_bfloat16 ? function(Bfloat16()) : function(Float32());
}

// Computes out[batch, m, n] from x[batch, m, k], kernel[batch, k, n] and bias[batch, n] or an empty one.
// For kCross, x0 and `past` have the shape of out, or are empty for x itself. `multiplied` gets the
// factor of x0 if it is not empty: [batch, m, n padded to whole cache lines], so that whole lines are
// written past the caches.
ffi::Error Layer(ffi::ThreadPool pool, Floats x, Floats kernel, Floats bias, Floats x0, Floats past,
                 bool is_bfloat16, int64_t form, FloatsOut out, FloatsOut multiplied,
                 FloatsOut work) {
  const auto dims = out->dimensions();
  const int64_t m = dims[1], n = dims[2];
  const int64_t stride = Ceil(n, kLine) * kLine;
  const bool has_bias = bias.element_count() > 0, keeps = multiplied->element_count() > 0;
  const Floats& of_x0 = x0.element_count() > 0 ? x0 : x;
  const Floats& beside = past.element_count() > 0 ? past : x;
  if (keeps && int64_t(multiplied->element_count()) < dims[0] * m * stride) {
    return ffi::Error::InvalidArgument("multiplied: too small for the factor of x0");
  }
  if (form == kCross && (of_x0.element_count() != out->element_count() ||
                         beside.element_count() != out->element_count())) {
    return ffi::Error::InvalidArgument("x0 and past must have the shape of out");
  }
  const float* also = x0.element_count() > 0 ? x0.typed_data() : nullptr;
  const Rows rows{x.typed_data(), nullptr, int64_t(x.dimensions()[2]), kPlain};
  return WithForm(Form(form), [&](auto form) {
    const auto finish = [&](int64_t row, int64_t j, int64_t count, Vec y) {
      const int64_t at = row * n + j;
      if (has_bias) y = Add(y, LoadUpTo(bias.typed_data() + row / m * n + j, count));
      if (form == kRelu) return Positive(y);
      if (form == kPlain) return y;
      if (keeps) Stream(multiplied->typed_data() + row * stride + j, y);
      const Vec times = LoadUpTo(of_x0.typed_data() + at, count);
      return Add(Times(times, y), LoadUpTo(beside.typed_data() + at, count));
    };
    return WithKind(is_bfloat16, [&](auto kind) {
      return MultiplyByKernel<decltype(kind)>(pool, rows, kernel, false, also, out, work, finish);
    });
  });
}

// Computes the gradients of_x[batch, m, k], of_kernel[batch, k, n], of_bias[batch, n] or empty, and
// of_x0[batch, m, n] or empty, which may share the memory of `x0_grad`.
//
// Inputs: grad[batch, m, n], x[batch, m, k], kernel[batch, k, n]. `by` is y or x0, with the shape of
// grad, or empty. `multiplied` as above. x0_grad[batch, m, n] or empty.
//
// of_x is the gradient through the kernel. `adds_grad` adds grad, the gradient of `past`, and `adds_x0`
// adds the gradient of x0.
//
// All in one call, so that nothing reads a kernel after its gradient is computed. XLA would otherwise
// copy the kernel, in case it is changed before.
ffi::Error LayerGradient(ffi::ThreadPool pool, Floats grad, Floats x, Floats kernel, Floats by,
                         Floats multiplied, Floats x0_grad, bool adds_grad, bool adds_x0,
                         int64_t parts, bool is_bfloat16, int64_t form, FloatsOut of_x,
                         FloatsOut of_kernel, FloatsOut of_bias, FloatsOut of_x0, FloatsOut work) {
  const int64_t m = grad.dimensions()[1], n = grad.dimensions()[2], width = of_x->dimensions()[2];
  if (form != kPlain && by.element_count() != grad.element_count()) {
    return ffi::Error::InvalidArgument("by must have the shape of grad");
  }
  const float* with = form == kPlain ? nullptr : by.typed_data();
  const Rows rows{grad.typed_data(), with, n, Form(form)};
  Rows once = rows;
  if (form == kCross) {
    const int64_t size = grad.element_count(), stride = Ceil(n, kLine) * kLine;
    if (int64_t(of_x0->element_count()) < size || int64_t(x0_grad.element_count()) < size ||
        int64_t(multiplied.element_count()) < grad.dimensions()[0] * m * stride) {
      return ffi::Error::InvalidArgument("of_x0, x0_grad and multiplied must hold the gradient of x0");
    }
    once.of_x0 = {x0_grad.typed_data(), multiplied.typed_data(), stride, of_x0->typed_data()};
  }
  const auto finish = [&](int64_t row, int64_t j, int64_t count, Vec sums) {
    const int64_t at = row * width + j;
    if (adds_grad) sums = Add(sums, LoadUpTo(grad.typed_data() + at, count));
    return adds_x0 ? Add(sums, LoadUpTo(of_x0->typed_data() + at, count)) : sums;
  };
  return WithKind(is_bfloat16, [&](auto kind) {
    using Kind = decltype(kind);
    const auto error =
        MultiplyByKernel<Kind>(pool, once, kernel, true, nullptr, of_x, work, finish);
    if (error.failure()) return error;
    return KernelGradient<Kind>(pool, x, rows, parts, of_kernel, of_bias, work);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxrankLayer, Layer,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Attr<bool>("is_bfloat16")
                                  .Attr<int64_t>("form")
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxrankLayerGradient, LayerGradient,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Attr<bool>("adds_grad")
                                  .Attr<bool>("adds_x0")
                                  .Attr<int64_t>("parts")
                                  .Attr<bool>("is_bfloat16")
                                  .Attr<int64_t>("form")
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>());

#endif  // JAXRANK_HAS_LAYERS
