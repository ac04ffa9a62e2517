// The keyed draw: argmax of logit + noise over the candidates (keyed_noise.h), the lowest id on
// ties. Internal to sampling.
#pragma once

#include <cstdint>

#include "kernels/sampling/candidates.h"
#include "kernels/sampling/keyed_noise.h"

namespace twinspark {

// -1 if there is no candidate.
int32_t Draw(const NoiseKey& key, const Candidates& candidates);

}  // namespace twinspark
