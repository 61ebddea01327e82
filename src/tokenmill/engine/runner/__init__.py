"""Run plans on a device: the page and token tables, the inputs of a step, the model, the sampler."""
