// Sees the intermediate tensors of a forward pass: golden programs and tests. Names are those of
// the golden vectors: "L3.attn.x", "M0.q", "final.h", "logits", "taps", "dspark.h". Values hold
// only during the call; rows are the rows of the step, queries and heads are this rank's share.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/tensor_view.h"

namespace twinspark {

class ForwardObserver {
 public:
  virtual ~ForwardObserver() = default;

  virtual void Tensor(const std::string& name, const ConstTensorView& value) = 0;
  // A list per row, `counts` entries of each row valid ("L2.sel", "L5.cand").
  virtual void Lists(const std::string& name,
                     const ConstTensorView& lists,
                     const int32_t* counts) = 0;
  // Whether index scores ([rows, visible groups]) are wanted; they are not kept otherwise.
  virtual bool WantsScores() const { return true; }
};

}  // namespace twinspark
