"""Check that the class of `--scheduler-cls` serves what flags and the model ask for, before weights are read."""

from __future__ import annotations

from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.scheduling import Feature
from tokenmill.engine.scheduler.scheduler import find_scheduler
from tokenmill.model.architecture.architecture import Architecture

# Fields of `EngineConfig` that need a feature when they differ from their defaults.
NEEDED_BY = {
    "scheduling_policy": Feature.ORDER,
    "batch_policy": Feature.BATCHES,
    "admission": Feature.BATCHES,
    "enable_chunked_prefill": Feature.WHOLE_PROMPTS,
    "pipeline_parallel_size": Feature.STAGES,
    "speculative_config": Feature.DRAFTS,
    "kv_disk": Feature.TRANSFERS,
    "slot_save_path": Feature.TRANSFERS,
    "kv_host_size": Feature.TRANSFERS,
    "kv_source": Feature.TRANSFERS,
    "kv_transfer_config": Feature.TRANSFERS,
    "encoder_store": Feature.TRANSFERS,
    "encoder_urls": Feature.TRANSFERS,
    "ec_transfer_config": Feature.TRANSFERS,
    "enable_lora": Feature.ADAPTERS,
}


def check_scheduler_flags(config: EngineConfig) -> None:
    """Refuse flags that need a feature which the scheduler does not serve.

    Raises:
        InvalidConfig: names the flag, the class and the feature; or there is no such class.
    """
    serves, plain = find_scheduler(config.scheduler_cls).serves, EngineConfig()
    for name, feature in NEEDED_BY.items():
        if feature not in serves and getattr(config, name) != getattr(plain, name):
            flag = "--" + ("no-" if getattr(plain, name) is True else "") + name.replace("_", "-")
            raise InvalidConfig(f"{flag} needs {feature}, which --scheduler-cls {config.scheduler_cls} does not serve")


def check_scheduler_model(config: EngineConfig, architecture: Architecture, platform: object) -> None:
    """Refuse a model that needs a feature which the scheduler does not serve.

    Raises:
        InvalidConfig: names the model's kind, the class and the feature.
    """
    serves = find_scheduler(config.scheduler_cls).serves
    cuts_images = Feature.IMAGES in serves and Feature.WHOLE_PROMPTS not in serves
    if architecture.spans_see_ahead and cuts_images:
        raise InvalidConfig(
            f"{architecture.name} runs an image in one step, and --scheduler-cls {config.scheduler_cls} does not serve "
            f"{Feature.WHOLE_PROMPTS}: --language-model-only leaves images out"
        )
    if architecture.recurrences and Feature.STATES not in serves:
        raise InvalidConfig(
            f"{architecture.name} has {Feature.STATES}, which --scheduler-cls {config.scheduler_cls} does not serve"
        )
