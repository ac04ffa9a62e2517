// The CPU siblings in one table.
#include "kernels/ops/ops.h"

namespace twinspark {
namespace {

constexpr OpTable kCpuOps = {
    .embed = EmbedCpu,
    .add = AddCpu,
    .rms_norm = RmsNormCpu,
    .linear = LinearCpu,
    .linear_batch = LinearBatchCpu,
    .collapse_norm = CollapseNormCpu,
    .hc_mix = HcMixCpu,
    .hc_post = HcPostCpu,
    .stream_mean = StreamMeanCpu,
    .rope_table = RopeTableCpu,
    .rope = RopeCpu,
    .quantize_values = QuantizeValuesCpu,
    .store_rows = StoreRowsCpu,
    .load_rows = LoadRowsCpu,
    .copy_rows = CopyRowsCpu,
    .compress_pool = CompressPoolCpu,
    .index_select = IndexSelectCpu,
    .attention = AttentionCpu,
    .router = RouterCpu,
    .swiglu = SwiGluCpu,
    .moe = MoeCpu,
    .engram_dequantize = EngramDequantizeCpu,
    .engram_gate = EngramGateCpu,
    .argmax = ArgmaxCpu,
    .choose_tokens = ChooseTokensCpu,
    .join_slices = JoinSlicesCpu,
};

}  // namespace

const OpTable& CpuOps() {
  return kCpuOps;
}

}  // namespace twinspark
