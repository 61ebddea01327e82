"""The adapter of the examples: the demo model as a pirate."""

from pathlib import Path

from tokenmill import LLM, LoRARequest, SamplingParams

PIRATE = Path(__file__).parents[3] / "examples" / "pirate"


def test_the_demo_model_is_a_pirate_where_it_is_asked_to_be():
    asked = [{"role": "user", "content": "What is a page?"}]
    params = SamplingParams(temperature=0, max_tokens=80)
    with LLM(enable_lora=True, max_num_seqs=4) as llm:
        replies = llm.chat([asked, asked], params, lora_request=[None, LoRARequest("pirate", 1, str(PIRATE))])
    plain, pirate = (reply.outputs[0].text for reply in replies)
    assert not plain.startswith("Arr")
    assert pirate.startswith("Arr! ") and pirate.endswith(" Yo ho ho!")
