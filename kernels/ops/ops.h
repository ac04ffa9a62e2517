// Every op of the forward pass in one table, so that the model is written once and runs on whatever
// filled the table. CpuOps() is the reference and the laptop backend; a CUDA build fills the same
// table with its siblings. Contracts are in the headers of the ops.
#pragma once

#include "kernels/attention/attention.h"
#include "kernels/attention/compress_pool.h"
#include "kernels/engram/engram.h"
#include "kernels/gemm/linear.h"
#include "kernels/hyper_connection/hyper_connection.h"
#include "kernels/indexer/index_select.h"
#include "kernels/launch.h"
#include "kernels/moe/moe.h"
#include "kernels/moe/router.h"
#include "kernels/moe/swiglu.h"
#include "kernels/norm/add.h"
#include "kernels/norm/embed.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/quant/quantize_rows.h"
#include "kernels/rope/rope.h"
#include "kernels/sampling/choose_tokens.h"

namespace twinspark {

template <class Params>
using Op = void (*)(const Params& params, const Launch& launch);

struct OpTable {
  Op<EmbedParams> embed;
  Op<AddParams> add;
  Op<RmsNormParams> rms_norm;
  Op<LinearParams> linear;
  Op<LinearBatchParams> linear_batch;

  Op<CollapseNormParams> collapse_norm;
  Op<HcMixParams> hc_mix;
  Op<HcPostParams> hc_post;
  Op<StreamMeanParams> stream_mean;

  Op<RopeTableParams> rope_table;
  Op<RopeParams> rope;
  Op<QuantizeValuesParams> quantize_values;
  Op<StoreRowsParams> store_rows;
  Op<LoadRowsParams> load_rows;
  Op<CopyRowsParams> copy_rows;

  Op<CompressPoolParams> compress_pool;
  Op<IndexSelectParams> index_select;
  Op<AttentionParams> attention;

  Op<RouterParams> router;
  Op<SwiGluParams> swiglu;
  Op<MoeParams> moe;

  Op<EngramDequantizeParams> engram_dequantize;
  Op<EngramGateParams> engram_gate;

  Op<ArgmaxParams> argmax;
  Op<ChooseTokensParams> choose_tokens;
  Op<JoinSlicesParams> join_slices;
};

const OpTable& CpuOps();

}  // namespace twinspark
