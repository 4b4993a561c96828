// A fixed team of threads that share one list of items at a time. Which thread takes which item is left to chance: no item's
// result may depend on it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace lockstep {

class ThreadTeam {
 public:
  // size: threads in all, the caller included; with 1 none is created.
  explicit ThreadTeam(int64_t size);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int64_t size() const { return static_cast<int64_t>(workers_.size()) + 1; }

  // Wake parked workers now, for a `run` that comes in some microseconds.
  void wake();

  // body(item, thread) for item in [0, items), items < 2^32, thread in [0, size); returns when all are done. `body` must not throw.
  template <class Body>
  void run(int64_t items, const Body& body) {
    if (workers_.empty() || items <= 1) {
      for (int64_t item = 0; item < items; ++item) body(item, 0);
      return;
    }
    start([](const void* context, int64_t item, int64_t thread) { (*static_cast<const Body*>(context))(item, thread); }, &body, items);
  }

 private:
  using Call = void (*)(const void* context, int64_t item, int64_t thread);

  void start(Call call, const void* context, int64_t items);
  void take_items(int64_t thread);
  void work(int64_t thread);
  bool wait_for_region(uint32_t seen);
  uint32_t region() const { return static_cast<uint32_t>(ticket_.load(std::memory_order_acquire) >> 32); }

  // A region is one call of `start`. The ticket is (region, items not yet taken), and taking an item is subtracting one. Only a ticket with items
  // left is ever exchanged, and while there are any `start` has not returned: so a thread that comes late can take nothing of a region that has
  // ended, nor of one that is only being prepared. `start` waits for items, not for threads: a thread that the operating system keeps off its core
  // holds up nobody unless it holds an item.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> items_done_{0};
  // Of the current region; written only when all items of the one before are done.
  alignas(64) std::atomic<Call> call_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int64_t> items_{0};
  std::atomic<uint64_t> calls_to_wake_{0};
  std::atomic<bool> closing_{false};
  std::mutex mutex_;
  std::condition_variable parked_;
  int64_t parked_count_ = 0;  // under mutex_
  std::vector<std::thread> workers_;
};

}  // namespace lockstep
