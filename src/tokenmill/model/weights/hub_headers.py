"""Read the contents of a model on the hub from its config and the headers of its weights: kilobytes, not gigabytes."""

from __future__ import annotations

from pathlib import Path

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.weights.checkpoint import CONFIG_NAME
from tokenmill.model.weights.hub import hub_errors


def read_headers(model: str, revision: str | None, folder: Path) -> list[tuple[str, int]]:
    """Return type and bytes of each tensor; ask for the first bytes of each file of weights, and no more.

    Args:
        folder: gets the model's config.json.

    Raises:
        InvalidCheckpoint: no such repository, no access, no connection, no safetensors; one sentence.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    with hub_errors(model, revision):
        hf_hub_download(model, CONFIG_NAME, revision=revision, local_dir=folder)
        try:
            files = HfApi().get_safetensors_metadata(model, revision=revision).files_metadata
        except (NotASafetensorsRepoError, SafetensorsParsingError) as error:
            raise InvalidCheckpoint(f"the hub's {model} has no weights in safetensors that can be read") from error
    tensors = [tensor for file in files.values() for tensor in file.tensors.values()]
    return [(tensor.dtype, tensor.data_offsets[1] - tensor.data_offsets[0]) for tensor in tensors]
