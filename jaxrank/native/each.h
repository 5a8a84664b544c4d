// Work for all threads of XLA's pool, and the buffers that it is done on.

#ifndef JAXRANK_NATIVE_EACH_H_
#define JAXRANK_NATIVE_EACH_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxrank {

using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;
using FloatsOut = ffi::ResultBuffer<ffi::F32>;
using IntsOut = ffi::ResultBuffer<ffi::S32>;

// body(part, state) for each part, by the calling thread and by those of the pool that are free, each
// with a state of its own.
// Nobody waits for a task that has not begun, so any number of callers may share the pool.
template <typename State, typename Body>
void Each(ffi::ThreadPool& pool, int64_t parts, const Body& body) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  auto shared = std::make_shared<Shared>();
  // One that comes late finds no part left, and does not touch the body.
  auto work = [shared, parts, &body] {
    int64_t part = shared->next.fetch_add(1);
    if (part >= parts) return;
    State state;
    for (; part < parts; part = shared->next.fetch_add(1)) {
      body(part, state);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t helpers = std::min(parts, pool.num_threads()) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(decltype(work)(work));
  work();
  while (shared->done.load(std::memory_order_acquire) < parts) std::this_thread::yield();
}

struct Nothing {};  // of a body that keeps nothing from part to part

}  // namespace jaxrank

#endif  // JAXRANK_NATIVE_EACH_H_
