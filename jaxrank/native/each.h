// Parallel loops on all threads of XLA's pool, and types of buffers.

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

// Runs body(part, state) for each part, on the calling thread and on free threads of the pool. Each
// thread has its own state.
// No thread waits for a task that has not started, so any number of callers may share the pool.
template <typename State, typename Body>
void Each(ffi::ThreadPool& pool, int64_t parts, const Body& body) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  auto shared = std::make_shared<Shared>();
  // A task that starts late finds no part left and does not touch the body.
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

struct Nothing {};  // state of a body that keeps nothing between parts

}  // namespace jaxrank

#endif  // JAXRANK_NATIVE_EACH_H_
