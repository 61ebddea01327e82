// Layers that keep a state of each request: what their kernels are given, the same for every instruction set.
#pragma once

#include <cstdint>

namespace tokenmill {

// Which tokens of a step run through which states: [starts[i], stops[i]) through that of slot slots[i]. No two slots are
// alike, and the spans are in order; tokens between two of them are left alone.
struct StateRows {
  const int64_t* slots;           // [requests]
  const int32_t *starts, *stops;  // [requests]
  int64_t requests;
  bool keeps;  // the states that the tokens come to; else the slots stay as they are: these tokens are drafts

  int64_t tokens() const {
    int64_t sum = 0;
    for (int64_t i = 0; i < requests; ++i) sum += stops[i] - starts[i];
    return sum;
  }
};

// A causal convolution of bf16, channel by channel; see model/kernels/recurrence.py.
struct ShortConvCall {
  const uint16_t* x;  // [T][channels]
  int64_t x_stride;
  const uint16_t* weight;  // [channels][width], the last of which meets a token itself
  const uint16_t* bias;    // [channels], or null
  uint16_t* state;         // [slots][channels][width - 1], the oldest input first
  int64_t state_stride;    // from one slot to the next
  uint16_t* out;           // [T][channels]
  int64_t out_stride;
  int64_t channels, width;
  bool silu;
};

constexpr int64_t MAX_CONV_WIDTH = 8;

// The gated delta rule; see model/kernels/recurrence.py and the head of isa/delta_rule.cpp.
struct DeltaRuleCall {
  const uint16_t* mixed;  // [T][2 * key_heads * key_size + value_heads * value_size]: q, k, v
  int64_t mixed_stride;
  const uint16_t* gates;  // [T][2 * value_heads]: b, a
  int64_t gates_stride;
  const uint16_t *a_log, *dt_bias;  // [value_heads]
  float* state;                     // [slots][value_heads][key_size][value_size]
  int64_t state_stride;             // from one slot to the next
  uint16_t* out;                    // [T][value_heads * value_size]
  int64_t out_stride;
  int64_t key_heads, value_heads, key_size, value_size;
};

// The state space of Mamba-2; see model/kernels/recurrence.py and the head of isa/state_space.cpp.
struct StateSpaceCall {
  const uint16_t* mixed;  // [T][heads * size + 2 * groups * state_size]: x, B, C
  int64_t mixed_stride;
  const uint16_t* steps;  // [T][heads]
  int64_t steps_stride;
  const uint16_t *a_log, *dt_bias, *skip;  // [heads]
  float* state;                            // [slots][heads][state_size][size]
  int64_t state_stride;                    // from one slot to the next
  uint16_t* out;                           // [T][heads * size]
  int64_t out_stride;
  int64_t heads, groups, size, state_size;
};

// Heads have a multiple of HEAD_STEP numbers, at most MAX_HEAD_SIZE.
constexpr int64_t HEAD_STEP = 16, MAX_HEAD_SIZE = 256;

}  // namespace tokenmill
