// Zeroed memory straight from the operating system: page-aligned, and costing nothing until it is touched.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace lockstep {

class ZeroedMemory {
 public:
  ZeroedMemory() = default;
  explicit ZeroedMemory(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    if (bytes_ == 0) return;
#ifdef LOCKSTEP_SANITIZE
    data_ = std::aligned_alloc(4096, (bytes_ + 4095) / 4096 * 4096);  // from the heap, where the sanitizer watches the edges
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(data_, 0, bytes_);
#else
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) {
      data_ = nullptr;
      throw std::bad_alloc();
    }
#endif
  }
  ZeroedMemory(ZeroedMemory&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  ZeroedMemory& operator=(ZeroedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ZeroedMemory(const ZeroedMemory&) = delete;
  ZeroedMemory& operator=(const ZeroedMemory&) = delete;
  ~ZeroedMemory() {
#ifdef LOCKSTEP_SANITIZE
    std::free(data_);
#else
    if (data_ != nullptr) munmap(data_, bytes_);
#endif
  }

  void* data() const { return data_; }
  float* floats() const { return static_cast<float*>(data_); }
  int64_t bytes() const { return static_cast<int64_t>(bytes_); }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace lockstep
