// See small_model.h.
#include "engram_service/testing/small_model.h"

#include "common/file_util.h"
#include "common/status_macros.h"
#include "engram_service/store/synthetic.h"

namespace twinspark::engram {

EngramShape SmallShape(uint64_t bucket_start) {
  EngramShape shape;
  shape.layer_ids = {1, 4};
  shape.max_ngram_size = 4;
  shape.num_heads = 4;
  shape.head_dim = 256;
  shape.bucket_start = bucket_start;
  shape.num_classes = 1000;
  shape.pad_token_id = 2;
  shape.vocab_size = 4096;
  return shape;
}

absl::Status WriteSmallModel(const std::string& dir, uint64_t bucket_start) {
  ASSIGN_OR_RETURN(const std::string config,
                   ReadFile(TWINSPARK_DEMO_MODEL "/config.json", size_t{1} << 20));
  return WriteSyntheticModel(dir, SmallShape(bucket_start), config);
}

}  // namespace twinspark::engram
