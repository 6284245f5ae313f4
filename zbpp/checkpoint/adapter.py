"""The adapter of a checkpoint, as a LoRA, as files that peft reads.

adapter_model.safetensors    base_model.model.<name, without that of the adapter>
adapter_config.json          written by the configuration itself
"""

from pathlib import Path
from typing import Protocol

from zbpp.checkpoint.manifest import CheckpointError
from zbpp.checkpoint.plain import read_model
from zbpp.checkpoint.tensor_files import write_file

__all__ = ["AdapterConfig", "export_adapter"]


class AdapterConfig(Protocol):
    """What is needed of a `peft.PeftConfig`."""

    def save_pretrained(self, save_directory: str) -> None:
        """Write ``adapter_config.json`` into a folder."""


def export_adapter(
    path: str | Path,
    out: str | Path,
    config: AdapterConfig,
    *,
    adapter: str = "default",
) -> list[Path]:
    """Write the adapter that a checkpoint holds, for ``PeftModel.from_pretrained``.

    Args:
        path: a checkpoint of ``peft_model.get_base_model()``, whole or of its
            trainable parameters, or a folder of them (the newest undamaged one counts).
        out: a folder, made if it is not there.
        config: ``peft_model.peft_config[adapter]``.
        adapter: its name in the model.

    Returns:
        The two files.

    Raises:
        CheckpointError: there is no undamaged checkpoint, or no such adapter in it.
    """
    tensors = {
        _peft_name(name, adapter): tensor
        for name, tensor in read_model(path).items()
        if adapter in name.split(".")
    }
    if not tensors:
        raise CheckpointError(
            f"{path} holds no parameter of an adapter {adapter!r}; save a pipeline of "
            "peft_model.get_base_model(), and give adapter= its name"
        )
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "adapter_model.safetensors"
    write_file(file, tensors, {"format": "pt"})
    config.save_pretrained(str(out))
    return [file, out / "adapter_config.json"]


def _peft_name(name: str, adapter: str) -> str:
    """Name in peft's files of a tensor of the model that peft has changed.

    >>> _peft_name("model.q_proj.lora_A.default.weight", "default")
    'base_model.model.model.q_proj.lora_A.weight'
    """
    parts = name.split(".")
    at = parts.index(adapter)
    above = parts[:at]
    if above and above[-1] == "modules_to_save":
        above = above[:-1]
    return ".".join(["base_model", "model", *above, *parts[at + 1 :]])
