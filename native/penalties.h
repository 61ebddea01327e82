// Penalties of tokens that a row has had, on its logits.
#pragma once

#include <cstdint>

namespace tokenmill {

// Of row i, logits[indices[i]] are penalized for tokens[rows[i]][0 .. positions[i]), of which the output begins at
// num_prompt_tokens[i]. Repetition divides a positive logit and multiplies any other; then frequency, for each time that
// a token is in the output, and presence, once, are subtracted.
struct PenaltyCall {
  float* logits;
  int64_t stride;
  int64_t count;
  const int64_t *indices, *rows, *num_prompt_tokens, *positions;  // [count]
  const float *presence, *frequency, *repetition;                 // [count]
  const int32_t* tokens;
  int64_t tokens_stride;
};

void penalize(const PenaltyCall& call, int threads);

}  // namespace tokenmill
