// A hash of what the kernels make of fixed inputs: two builds or processors with one hash may claim one set of numerics.
#pragma once

#include <cstdint>

#include "kernels/table.h"

namespace lockstep {

uint32_t numerics_probe(const KernelTable& kernels);

}  // namespace lockstep
