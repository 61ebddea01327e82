#include "decoder.h"

#include "forward_pass.h"
#include "text_pass.h"

namespace tokenmill {

int64_t Decoder::scratch_numbers(int64_t tokens) const {
  if (TextPass::runs(*this)) return TextPass::scratch_numbers(*this, tokens);
  const Strides strides(*this);
  return tokens * (strides.own() + (gathering.meeting ? 0 : strides.gathered()));
}

int64_t Decoder::shared_numbers(int64_t tokens) const { return tokens * Strides(*this).gathered(); }

bool Decoder::forward(const DecoderCall& call) const {
  if (!TextPass::runs(*this)) return ForwardPass(*this, call).run();
  TextPass::run(*this, call);
  return true;
}

}  // namespace tokenmill
