#include "kernel_table.h"

#include "isa/activate.h"
#include "isa/adapters.h"
#include "isa/attention.h"
#include "isa/delta_rule.h"
#include "isa/float_rows.h"
#include "isa/token_bitmask.h"
#include "isa/linear.h"
#include "isa/draw.h"
#include "isa/gates.h"
#include "isa/norm.h"
#include "isa/logprobs.h"
#include "isa/page_copy.h"
#include "isa/rotary_tables.h"
#include "isa/route.h"
#include "isa/short_conv.h"
#include "isa/state_space.h"

namespace tokenmill::TM_ISA {

#define TM_TEXT(name) #name
#define TM_NAME(name) TM_TEXT(name)

const KernelTable& table() {
  static const KernelTable kernels = {
      .name = TM_NAME(TM_ISA),
      .pack = pack,
      .pack_integers = pack_integers,
      .pack_blocks = pack_blocks,
      .linear = linear,
      .argmax = argmax,
      .lookup = lookup,
      .attention = attention,
      .add_adapters = add_adapters,
      .gate = gate,
      .rms_norm = rms_norm,
      .layer_norm = layer_norm,
      .activate = activate,
      .gated_norm = gated_norm,
      .gate_rows = gate_rows,
      .scaled_sum = scaled_sum,
      .add_weighted = add_weighted,
      .rotary_tables = rotary_tables,
      .route = route,
      .draw = draw,
      .logprobs = logprobs,
      .apply_token_bitmask = apply_token_bitmask,
      .norm_floats = norm_floats,
      .attend_texts = attend_texts,
      .short_conv = short_conv,
      .delta_rule = delta_rule,
      .state_space = state_space,
      .copy_pages = copy_pages,
  };
  return kernels;
}

}  // namespace tokenmill::TM_ISA
