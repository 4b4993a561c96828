// Kernels for x86-64 with AVX-512 (F, BW, DQ, VL).
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "table.h"

namespace lockstep {
namespace {

#define LOCKSTEP_INSTRUCTION_SET "avx512"
#define LOCKSTEP_FUSED_512
constexpr int64_t rows_tile_max = 6;
constexpr int64_t groups_tile = 4;
#include "instruction_set.inc"

}  // namespace

const KernelTable* avx512_kernels() { return &table; }

}  // namespace lockstep
