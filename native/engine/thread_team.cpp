#include "engine/thread_team.h"

#include <chrono>

namespace lockstep {
namespace {

// How long a worker watches for the next region before it parks. Between the ops of a step regions follow each other in microseconds;
// between steps there is Python, and a core that other processes may want.
constexpr auto spin_limit = std::chrono::microseconds(100);
constexpr int64_t pauses_before_yield = 200;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

}  // namespace

ThreadTeam::ThreadTeam(int64_t size) {
  for (int64_t thread = 1; thread < size; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

ThreadTeam::~ThreadTeam() {
  closing_.store(true);
  wake();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadTeam::wake() {
  if (workers_.empty()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  calls_to_wake_.fetch_add(1);
  if (parked_count_ > 0) parked_.notify_all();
}

void ThreadTeam::start(Call call, const void* context, int64_t items) {
  call_.store(call, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  items_.store(items, std::memory_order_relaxed);
  items_done_.store(0, std::memory_order_relaxed);
  ticket_.store(static_cast<uint64_t>(region() + 1) << 32 | static_cast<uint64_t>(items));  // publishes all of the above
  bool parked;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    parked = parked_count_ > 0;
  }
  if (parked) parked_.notify_all();
  take_items(0);
  for (int64_t pauses = 0; items_done_.load(std::memory_order_acquire) != items; ++pauses) {
    if (pauses < pauses_before_yield) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

void ThreadTeam::take_items(int64_t thread) {
  for (;;) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    const auto left = static_cast<int64_t>(ticket & 0xffffffffu);
    if (left == 0) return;
    // What is read here belongs to the ticket's region if the exchange succeeds: with an item left, `start` of that region has not returned.
    const Call call = call_.load(std::memory_order_relaxed);
    const void* context = context_.load(std::memory_order_relaxed);
    const int64_t items = items_.load(std::memory_order_relaxed);
    if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
    call(context, items - left, thread);
    items_done_.fetch_add(1, std::memory_order_release);
  }
}

void ThreadTeam::work(int64_t thread) {
  for (uint32_t seen = 0; wait_for_region(seen);) {
    seen = region();
    take_items(thread);
  }
}

// Returns when a region other than `seen` has begun (true) or the team closes (false).
bool ThreadTeam::wait_for_region(uint32_t seen) {
  for (;;) {
    const uint64_t woken = calls_to_wake_.load();
    const auto limit = std::chrono::steady_clock::now() + spin_limit;
    for (int64_t pauses = 1;; ++pauses) {
      if (region() != seen) return true;
      if (closing_.load(std::memory_order_relaxed)) return false;
      if (pauses % 64 == 0 && std::chrono::steady_clock::now() > limit) break;
      pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    ++parked_count_;
    parked_.wait(lock, [&] { return region() != seen || closing_.load() || calls_to_wake_.load() != woken; });
    --parked_count_;
  }
}

}  // namespace lockstep
