// A weight in the layout that the kernels read. Immutable; the same layout for every instruction set.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "engine/memory.h"
#include "kernels/table.h"

namespace lockstep {

enum class Layout : int32_t {
  panels,  // a matrix, and an embedding tied to one: see LinearCall
  rows,    // an embedding alone: [rows][columns] of dtype
  vector,  // float32 [columns], padded to 16
};

// Memory for weights in large pieces, so that huge pages can hold them: a decode step reads every weight once, and with small pages
// waits for address translation instead of memory. A piece lives as long as any weight in it.
class WeightArena {
 public:
  struct Span {
    std::shared_ptr<const ZeroedMemory> piece;
    char* data;
  };
  // Zeroed, 64-byte aligned. May be called from several threads.
  Span allocate(int64_t bytes);

 private:
  std::mutex mutex_;
  std::shared_ptr<const ZeroedMemory> piece_;
  char* next_ = nullptr;
  char* end_ = nullptr;
};

struct PackedWeight {
  Layout layout;
  DType dtype;
  int64_t rows;  // as the checkpoint stores it: [N, K]
  int64_t columns;
  int64_t bytes;
  WeightArena::Span memory;

  const void* data() const { return memory.data; }
  const float* floats() const { return reinterpret_cast<const float*>(memory.data); }
};

// values: [rows][columns] float32.
PackedWeight pack_weight(WeightArena& arena, const float* values, int64_t rows, int64_t columns, DType dtype, Layout layout);

// Row `row` (of [0, rows)) widened to float32 into y[columns]; for layouts panels and rows.
void unpack_row(const PackedWeight& weight, int64_t row, float* y);

}  // namespace lockstep
