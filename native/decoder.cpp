#include "decoder.h"

#include "forward_pass.h"

namespace tokenmill {

int64_t Decoder::scratch_numbers(int64_t tokens) const {
  const Strides strides(*this);
  return tokens * (strides.own() + (gathering.meeting ? 0 : strides.gathered()));
}

int64_t Decoder::shared_numbers(int64_t tokens) const { return tokens * Strides(*this).gathered(); }

bool Decoder::forward(const DecoderCall& call) const { return ForwardPass(*this, call).run(); }

}  // namespace tokenmill
