// Reads, sums and updates rows of tables on CPU and removes duplicates, on all threads of XLA's pool.
//
// Results do not depend on the number of threads: one thread computes each sum, in the order of the
// ids. See embedding/backends/cpu_rows.py for the functions and their use.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "each.h"
#include "xla/ffi/api/ffi.h"

namespace {

using jaxrank::Each;
using jaxrank::Floats;
using jaxrank::FloatsOut;
using jaxrank::Ints;
using jaxrank::IntsOut;
using jaxrank::Nothing;

constexpr int32_t kPad = std::numeric_limits<int32_t>::max();
constexpr int64_t kAhead = 64;       // rows that are prefetched
constexpr int64_t kSmall = 1 << 11;  // ids that are too few for another thread
constexpr int64_t kDealt = 1 << 12;  // mean number of ids per part whose duplicates are removed

void Prefetch(const float* row, int64_t width) {
  for (int64_t i = 0; i < width; i += 16) __builtin_prefetch(row + i);
}

template <typename Function>
auto WithWidth(int64_t width, const Function& function) {
  switch (width) {  // loops over rows of common widths are unrolled
    case 1: return function(std::integral_constant<int64_t, 1>());
    case 8: return function(std::integral_constant<int64_t, 8>());
    case 16: return function(std::integral_constant<int64_t, 16>());
    case 32: return function(std::integral_constant<int64_t, 32>());
    case 64: return function(std::integral_constant<int64_t, 64>());
    case 128: return function(std::integral_constant<int64_t, 128>());
    default: return function(width);
  }
}

// Computes out[i] = source[index[i]], zero if index[i] is not a row.
ffi::Error Take(ffi::ThreadPool pool, Floats source, Ints index, FloatsOut out) {
  const int64_t rows = source.dimensions()[0], stride = source.dimensions()[1];
  const int64_t count = index.element_count(), dim = out->dimensions()[1];
  const float* from = source.typed_data();
  const int32_t* at = index.typed_data();
  float* to = out->typed_data();
  const int64_t parts = std::clamp<int64_t>(count / kSmall, 1, 64);
  return WithWidth(dim, [&](auto width) {
    Each<Nothing>(pool, parts, [&](int64_t part, Nothing&) {
      const int64_t begin = count * part / parts, end = count * (part + 1) / parts;
      for (int64_t i = begin; i < end; ++i) {
        if (i + kAhead < end && uint32_t(at[i + kAhead]) < rows) {
          Prefetch(from + at[i + kAhead] * stride, width);
        }
        float* row = to + i * width;
        if (uint32_t(at[i]) < rows) {
          std::memcpy(row, from + at[i] * stride, width * sizeof(float));
        } else {
          std::memset(row, 0, width * sizeof(float));
        }
      }
    });
    return ffi::Error::Success();
  });
}

// The vectors of ids: source[index[i]] * scale[i]. An empty index means 0, 1, ..., an empty scale 1.
struct Vectors {
  const float* source;
  const int32_t* index;
  const float* scale;
  int64_t stride;
  int64_t rows;

  Vectors(Floats source, Ints index, Floats scale)
      : source(source.typed_data()),
        index(index.element_count() ? index.typed_data() : nullptr),
        scale(scale.element_count() ? scale.typed_data() : nullptr),
        stride(source.dimensions()[1]),
        rows(source.dimensions()[0]) {}

  // Returns the row of id i, or null if it has none.
  const float* Row(int64_t i) const {
    const int64_t row = index ? index[i] : i;
    return uint64_t(row) < uint64_t(rows) ? source + row * stride : nullptr;
  }

  float Scale(int64_t i) const { return scale ? scale[i] : 1.0f; }
};

template <typename Width>
void AddRow(float* __restrict to, const float* __restrict from, float scale, Width width) {
  for (int64_t j = 0; j < width; ++j) to[j] += from[j] * scale;
}

// A row of a common width, in the longest vectors of the processor.
template <int64_t kWidth>
struct Lines {
  static constexpr int64_t kNumbers = std::min<int64_t>(kWidth, 16);
  typedef float Line __attribute__((vector_size(kNumbers * sizeof(float))));
  Line lines[kWidth / kNumbers];

  explicit Lines(const float* row) { std::memcpy(lines, row, sizeof(lines)); }
  void Write(float* row) const { std::memcpy(row, lines, sizeof(lines)); }
  void Add(const float* from, float scale) {
    for (Line& sum : lines) {
      Line line;
      std::memcpy(&line, from, sizeof(line));
      sum += line * scale;
      from += kNumbers;
    }
  }
};

template <int64_t kWidth>
void AddRow(float* to, const float* from, float scale, std::integral_constant<int64_t, kWidth>) {
  Lines<kWidth> sum(to);
  sum.Add(from, scale);
  sum.Write(to);
}

// A row to which vectors are added in turn, in registers if it has a common width. Writing it after
// each addition would wait for memory each time.
template <typename Width>
class Sum {
 public:
  Sum(float* row, Width width) : row_(row), width_(width) {}
  void Add(const float* from, float scale) { AddRow(row_, from, scale, width_); }
  void Write() const {}

 private:
  float* row_;
  Width width_;
};

template <int64_t kWidth>
class Sum<std::integral_constant<int64_t, kWidth>> {
 public:
  Sum(float* row, std::integral_constant<int64_t, kWidth>) : row_(row), sum_(row) {}
  void Add(const float* from, float scale) { sum_.Add(from, scale); }
  void Write() const { sum_.Write(row_); }

 private:
  float* row_;
  Lines<kWidth> sum_;
};

// Computes block[at[i]] += the vector of id i, in the order of ids. If `at` rises, no row of the block
// follows the first index that is not a row.
ffi::Error Add(ffi::ThreadPool pool, Floats block, Ints at, Floats source, Ints index,
               Floats scale, bool rising, FloatsOut out) {
  const int64_t rows = block.dimensions()[0], dim = block.dimensions()[1];
  const int64_t count = at.element_count();
  const int32_t* to = at.typed_data();
  float* sums = out->typed_data();
  if (sums != block.typed_data()) std::memcpy(sums, block.typed_data(), block.size_bytes());
  const Vectors vectors(source, index, scale);
  return WithWidth(dim, [&](auto width) {
    if (rising) {
      const int64_t parts = std::clamp<int64_t>(std::min(count / kSmall, rows), 1, 64);
      Each<Nothing>(pool, parts, [&](int64_t part, Nothing&) {
        const auto first = [&](int64_t row) { return std::lower_bound(to, to + count, row) - to; };
        int64_t i = first(rows * part / parts);
        const int64_t end = first(rows * (part + 1) / parts);
        while (i < end) {
          const int64_t row = to[i];
          Sum<decltype(width)> sum(sums + row * width, width);
          for (; i < end && to[i] == row; ++i) {
            if (i + kAhead < end) Prefetch(vectors.Row(i + kAhead), width);
            const float* vector = vectors.Row(i);
            if (vector) sum.Add(vector, vectors.Scale(i));
          }
          sum.Write();
        }
      });
      return ffi::Error::Success();
    }
    // Each part reads all ids, so there are no more parts than threads.
    const int64_t parts =
        std::clamp<int64_t>(std::min({count / kSmall, rows, pool.num_threads()}), 1, 16);
    Each<Nothing>(pool, parts, [&](int64_t part, Nothing&) {
      const int64_t low = rows * part / parts, size = rows * (part + 1) / parts - low;
      const auto is_here = [&](int64_t i) { return uint64_t(to[i] - low) < uint64_t(size); };
      for (int64_t i = 0; i < count; ++i) {
        if (i + kAhead < count && is_here(i + kAhead)) Prefetch(vectors.Row(i + kAhead), width);
        const float* row = is_here(i) ? vectors.Row(i) : nullptr;
        if (row) AddRow(sums + to[i] * width, row, vectors.Scale(i), width);
      }
    });
    return ffi::Error::Success();
  });
}

// Hash table of the distinct ids of one part, with open addressing.
class Ranks {
 public:
  // Makes room for `ids` ids. `different` gets the distinct ids in the order of their ranks.
  void Clear(int64_t ids, int32_t* different) {
    for (bits_ = 1; (int64_t{2} << bits_) <= 3 * ids; ++bits_) {
    }
    slots_.assign(size_t{1} << bits_, -1);
    different_ = different;
    size_ = 0;
  }

  int32_t Find(int32_t id) {
    const size_t mask = slots_.size() - 1;
    for (size_t i = (uint32_t(id) * 0x9E3779B1u) >> (32 - bits_);; i = (i + 1) & mask) {
      int32_t& rank = slots_[i];
      if (rank < 0) {
        rank = size_++;
        different_[rank] = id;
      }
      if (different_[rank] == id) return rank;
    }
  }

  int32_t size() const { return size_; }

 private:
  int bits_ = 1;
  int32_t size_ = 0;
  int32_t* different_ = nullptr;
  std::vector<int32_t> slots_;
};

// The vectors of consecutive ids, in several pieces.
class Pieces {
 public:
  // Makes pieces from (source, index, scale) each.
  static ffi::ErrorOr<Pieces> Of(const ffi::RemainingArgs& operands) {
    Pieces pieces;
    for (size_t i = 0; i + 2 < operands.size(); i += 3) {
      auto source = operands.get<Floats>(i);
      auto index = operands.get<Ints>(i + 1);
      auto scale = operands.get<Floats>(i + 2);
      if (!source.has_value() || !index.has_value() || !scale.has_value()) {
        return ffi::Unexpected(ffi::Error::InvalidArgument("each piece must be (f32, s32, f32)"));
      }
      const int64_t ids = index->element_count();
      pieces.all_.emplace_back(*source, *index, *scale);
      pieces.ends_.push_back(pieces.count() + (ids ? ids : source->dimensions()[0]));
    }
    return pieces;
  }

  int64_t count() const { return ends_.empty() ? 0 : ends_.back(); }

  // Calls function(i, vectors of its piece, index in the piece) for ids [begin, end).
  template <typename Function>
  void ForEach(int64_t begin, int64_t end, const Function& function) const {
    int64_t first = 0;
    for (size_t piece = 0; piece < all_.size(); first = ends_[piece++]) {
      for (int64_t i = std::max(begin, first); i < std::min(end, ends_[piece]); ++i) {
        function(i, all_[piece], i - first);
      }
    }
  }

 private:
  std::vector<Vectors> all_;
  std::vector<int64_t> ends_;
};

struct Dealt {
  const float* row;
  float scale;
  int32_t id;  // later its rank among the ids of its part
};
static_assert(sizeof(Dealt) == 4 * sizeof(int32_t));

// Distributes ids, in their order, to parts of the rows: id >> shift. Returns the begin of each part in
// `dealt`, then the end of the last part.
std::vector<int64_t> Deal(ffi::ThreadPool& pool, const int32_t* id, const Pieces& pieces,
                          int64_t rows, int shift, Dealt* dealt) {
  const int64_t count = pieces.count(), parts = ((rows - 1) >> shift) + 1;
  const int64_t blocks = std::clamp<int64_t>(count / kSmall, 1, 32);
  const auto begin_of = [&](int64_t block) { return count * block / blocks; };
  // First the number of ids of each block in each part, then their destinations.
  std::vector<int64_t> place(blocks * parts);
  Each<Nothing>(pool, blocks, [&](int64_t block, Nothing&) {
    int64_t* counts = &place[block * parts];
    for (int64_t i = begin_of(block); i < begin_of(block + 1); ++i) {
      if (uint32_t(id[i]) < rows) ++counts[id[i] >> shift];
    }
  });
  std::vector<int64_t> begin;
  int64_t total = 0;
  for (int64_t part = 0; part < parts; ++part) {
    begin.push_back(total);
    for (int64_t block = 0; block < blocks; ++block) {
      int64_t& offset = place[block * parts + part];
      total += std::exchange(offset, total);
    }
  }
  begin.push_back(total);
  Each<Nothing>(pool, blocks, [&](int64_t block, Nothing&) {
    int64_t* next = &place[block * parts];
    pieces.ForEach(begin_of(block), begin_of(block + 1),
                   [&](int64_t i, const Vectors& vectors, int64_t index) {
                     if (uint32_t(id[i]) >= rows) return;
                     Dealt* to = dealt + next[id[i] >> shift]++;
                     __builtin_prefetch(to + 8, 1);
                     *to = {vectors.Row(index), vectors.Scale(index), id[i]};
                   });
  });
  return begin;
}

// Computes the distinct ids and the sum of the vectors of each, in the order of ids. Ids are first
// distributed to parts of the rows, so that the data of a part fits a core's cache.
ffi::Error SumById(ffi::ThreadPool pool, Ints ids, ffi::RemainingArgs operands, int64_t rows,
                   IntsOut unique, FloatsOut sums, IntsOut work) {
  const auto pieces = Pieces::Of(operands);
  if (!pieces.has_value()) return pieces.error();
  const int64_t count = ids.element_count(), dim = sums->dimensions()[1];
  if (pieces->count() != count) {
    return ffi::Error::InvalidArgument("there must be as many vectors as ids");
  }

  const int64_t most = std::clamp<int64_t>(count / kDealt, 1, 256);
  int shift = 0;
  while (((rows - 1) >> shift) >= most) ++shift;
  auto* dealt = reinterpret_cast<Dealt*>(work->typed_data());
  const std::vector<int64_t> begin = Deal(pool, ids.typed_data(), *pieces, rows, shift, dealt);
  const int64_t parts = begin.size() - 1;

  int32_t* different = work->typed_data() + 4 * count;
  std::vector<int64_t> first_key(parts + 1);  // total before each part
  Each<Ranks>(pool, parts, [&](int64_t part, Ranks& ranks) {
    ranks.Clear(begin[part + 1] - begin[part], different + begin[part]);
    for (int64_t k = begin[part]; k < begin[part + 1]; ++k) dealt[k].id = ranks.Find(dealt[k].id);
    first_key[part + 1] = ranks.size();
  });
  for (int64_t part = 0; part < parts; ++part) first_key[part + 1] += first_key[part];

  int32_t* keys = unique->typed_data();
  float* all_sums = sums->typed_data();
  WithWidth(dim, [&](auto width) {
    Each<Nothing>(pool, parts, [&](int64_t part, Nothing&) {
      const int64_t size = first_key[part + 1] - first_key[part], end = begin[part + 1];
      std::memcpy(keys + first_key[part], different + begin[part], size * sizeof(int32_t));
      float* to = all_sums + first_key[part] * width;
      std::memset(to, 0, size * width * sizeof(float));
      for (int64_t k = begin[part]; k < end; ++k) {
        if (k + kAhead < end) Prefetch(dealt[k + kAhead].row, width);
        if (dealt[k].row) AddRow(to + dealt[k].id * width, dealt[k].row, dealt[k].scale, width);
      }
    });
  });
  std::fill(keys + first_key[parts], keys + count, kPad);
  return ffi::Error::Success();
}

// Sums the squares of a row in an order that suits vectors.
template <typename Width>
float SumOfSquares(const float* row, Width width) {
  constexpr int64_t kTogether = 16;
  float sums[kTogether] = {};
  int64_t j = 0;
  for (; j + kTogether <= width; j += kTogether) {
    for (int64_t i = 0; i < kTogether; ++i) sums[i] += row[j + i] * row[j + i];
  }
  for (int64_t i = 0; j + i < width; ++i) sums[i] += row[j + i] * row[j + i];
  for (int64_t half = kTogether / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) sums[i] += sums[half + i];
  }
  return sums[0];
}

// Applies the row optimizer `rowwise_adagrad` in place to rows[row[i]] with gradients sums[i]. Only PAD
// follows the first PAD in `row`. `rates` has one learning rate, or one per row. Rows are `stride`
// apart.
ffi::Error RowwiseAdagrad(ffi::ThreadPool pool, Floats rows, Floats accumulators, Ints row,
                          Floats sums, Floats rates, int64_t stride, float eps,
                          FloatsOut new_rows, FloatsOut new_accumulators) {
  const int64_t dim = sums.dimensions()[1];
  const int32_t* at = row.typed_data();
  const auto is_row = [](int32_t row) { return row != kPad; };
  const int64_t count = std::partition_point(at, at + row.element_count(), is_row) - at;
  float* to = new_rows->typed_data();
  float* accumulator = new_accumulators->typed_data();
  if (to != rows.typed_data()) std::memcpy(to, rows.typed_data(), rows.size_bytes());
  if (accumulator != accumulators.typed_data()) {
    std::memcpy(accumulator, accumulators.typed_data(), accumulators.size_bytes());
  }
  const float* rate = rates.typed_data();
  const int64_t next_rate = rates.element_count() > 1;
  const int64_t parts = std::clamp<int64_t>(count / kSmall, 1, 64);
  return WithWidth(dim, [&](auto width) {
    Each<Nothing>(pool, parts, [&](int64_t part, Nothing&) {
      const int64_t begin = count * part / parts, end = count * (part + 1) / parts;
      for (int64_t i = begin; i < end; ++i) {
        if (i + kAhead < end) {
          Prefetch(to + at[i + kAhead] * stride, width);
          Prefetch(accumulator + at[i + kAhead], 1);
        }
        const float* gradient = sums.typed_data() + i * width;
        const float mean = SumOfSquares(gradient, width) / width;
        const float sum = accumulator[at[i]] + mean;
        accumulator[at[i]] = sum;
        const float scale = sum + eps > 0 ? 1 / std::sqrt(sum + eps) : 0;
        const float by = -rate[i * next_rate];
        float* __restrict changed = to + at[i] * stride;
        for (int64_t j = 0; j < width; ++j) changed[j] += by * gradient[j] * scale;
      }
    });
    return ffi::Error::Success();
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxrankTake, Take,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Ints>().Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxrankAdd, Add,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Attr<bool>("rising")
                                  .Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxrankSumById, SumById,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Ints>()
                                  .RemainingArgs()
                                  .Attr<int64_t>("rows")
                                  .Ret<Ints>()
                                  .Ret<Floats>()
                                  .Ret<Ints>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxrankRowwiseAdagrad, RowwiseAdagrad,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Attr<int64_t>("stride")
                              .Attr<float>("eps")
                                  .Ret<Floats>()
                                  .Ret<Floats>());
