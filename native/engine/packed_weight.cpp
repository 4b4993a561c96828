#include "engine/packed_weight.h"

#include <algorithm>

#include "engine/bfloat16.h"

namespace lockstep {
namespace {

constexpr int64_t huge_page_bytes = int64_t{2} << 20;
constexpr int64_t arena_piece_bytes = int64_t{32} << 20;

int64_t panels_of(int64_t rows) { return (rows + panel_columns - 1) / panel_columns; }

void pack_panels(const float* values, PackedWeight& w) {
  const int64_t k = w.columns, pairs = (k + 1) / 2;
  for (int64_t row = 0; row < w.rows; ++row) {
    const int64_t panel = row / panel_columns, column = row % panel_columns;
    const float* from = values + row * k;
    if (w.dtype == DType::float32) {
      float* to = reinterpret_cast<float*>(w.memory.data) + panel * k * panel_columns + column;
      for (int64_t i = 0; i < k; ++i) to[i * panel_columns] = from[i];
    } else {
      uint16_t* to = reinterpret_cast<uint16_t*>(w.memory.data) + (panel * pairs * panel_columns + column) * 2;
      for (int64_t i = 0; i < k; ++i) to[(i / 2) * panel_columns * 2 + i % 2] = to_bfloat16(from[i]);
    }
  }
}

void pack_rows(const float* values, PackedWeight& w) {
  const int64_t count = w.rows * w.columns;
  if (w.dtype == DType::float32) {
    std::memcpy(w.memory.data, values, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  auto* to = reinterpret_cast<uint16_t*>(w.memory.data);
  for (int64_t i = 0; i < count; ++i) to[i] = to_bfloat16(values[i]);
}

int64_t bytes_of(int64_t rows, int64_t columns, DType dtype, Layout layout) {
  const int64_t element = dtype == DType::float32 ? 4 : 2;
  if (layout == Layout::vector) return (columns + lane_count - 1) / lane_count * lane_count * 4;
  if (layout == Layout::rows) return rows * columns * element;
  return panels_of(rows) * panel_columns * (dtype == DType::float32 ? columns * 4 : (columns + 1) / 2 * 4);
}

}  // namespace

WeightArena::Span WeightArena::allocate(int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t rounded = (bytes + 63) / 64 * 64;
  if (end_ - next_ < rounded) {
    const int64_t piece_bytes = std::max(arena_piece_bytes, rounded) + huge_page_bytes;
    piece_ = std::make_shared<const ZeroedMemory>(piece_bytes);
    const auto address = reinterpret_cast<uintptr_t>(piece_->data());
    const auto skipped = static_cast<int64_t>((huge_page_bytes - address % huge_page_bytes) % huge_page_bytes);
    next_ = static_cast<char*>(piece_->data()) + skipped;
    end_ = static_cast<char*>(piece_->data()) + piece_bytes;
#if defined(MADV_HUGEPAGE) && !defined(LOCKSTEP_SANITIZE)
    madvise(next_, static_cast<size_t>(piece_bytes - skipped) / huge_page_bytes * huge_page_bytes, MADV_HUGEPAGE);  // refusal costs speed only
#endif
  }
  char* data = next_;
  next_ += rounded;
  return {piece_, data};
}

PackedWeight pack_weight(WeightArena& arena, const float* values, int64_t rows, int64_t columns, DType dtype, Layout layout) {
  const int64_t bytes = bytes_of(rows, columns, dtype, layout);
  PackedWeight w{layout, dtype, rows, columns, bytes, arena.allocate(bytes)};
  if (layout == Layout::vector) {
    std::memcpy(w.memory.data, values, static_cast<size_t>(columns) * sizeof(float));
  } else if (layout == Layout::rows) {
    pack_rows(values, w);
  } else {
    pack_panels(values, w);
  }
  return w;
}

void unpack_row(const PackedWeight& w, int64_t row, float* y) {
  const int64_t k = w.columns;
  if (w.layout == Layout::rows) {
    if (w.dtype == DType::float32) {
      std::memcpy(y, w.floats() + row * k, static_cast<size_t>(k) * sizeof(float));
    } else {
      const uint16_t* from = static_cast<const uint16_t*>(w.data()) + row * k;
      for (int64_t i = 0; i < k; ++i) y[i] = from_bfloat16(from[i]);
    }
    return;
  }
  const int64_t panel = row / panel_columns, column = row % panel_columns;
  if (w.dtype == DType::float32) {
    const float* from = w.floats() + panel * k * panel_columns + column;
    for (int64_t i = 0; i < k; ++i) y[i] = from[i * panel_columns];
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(w.data()) + (panel * ((k + 1) / 2) * panel_columns + column) * 2;
    for (int64_t i = 0; i < k; ++i) y[i] = from_bfloat16(from[(i / 2) * panel_columns * 2 + i % 2]);
  }
}

}  // namespace lockstep
