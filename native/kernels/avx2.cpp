// Kernels for x86-64 with AVX2 and FMA.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "table.h"

namespace lockstep {
namespace {

#define LOCKSTEP_INSTRUCTION_SET "avx2"
#define LOCKSTEP_FUSED_256
constexpr int64_t rows_tile_max = 6;
constexpr int64_t groups_tile = 1;
#include "instruction_set.inc"

}  // namespace

const KernelTable* avx2_kernels() { return &table; }

}  // namespace lockstep
