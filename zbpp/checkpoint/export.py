"""The weights of a checkpoint as safetensors files with the model's own keys.

    model.safetensors                        one file, or several and an index:
    model-00001-of-00003.safetensors, ..., model.safetensors.index.json

These are the names that `transformers` looks for, so a folder with a ``config.json``
beside them is one for its ``from_pretrained``. Tied weights are there once.
"""

import json
from pathlib import Path

from torch import Tensor

from zbpp.checkpoint.manifest import write_durably
from zbpp.checkpoint.plain import find
from zbpp.checkpoint.state import read_state
from zbpp.checkpoint.tensor_files import write_file

__all__ = ["export_safetensors"]

_INDEX = "model.safetensors.index.json"


def export_safetensors(
    path: str | Path, out: str | Path, *, max_bytes: int = 5 * 2**30
) -> list[Path]:
    """Write parameters and persistent buffers of a checkpoint for other programs.

    Args:
        path: a checkpoint, or a folder of them (the newest undamaged one counts).
        out: a folder, made if it is not there.
        max_bytes: of the tensors in one file; more go into several, with an index.

    Returns:
        The files, the index last if there is one.

    Raises:
        CheckpointError: there is no checkpoint that is undamaged.
    """
    folder, manifest = find(path)
    model = read_state(folder, manifest, None, model_only=True)["model"]
    tensors = {name: one for name, one in model.items() if isinstance(one, Tensor)}
    parts = _parts(tensors, max_bytes)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    about = {"format": "pt"}  # transformers asks for it
    if len(parts) == 1:
        file = out / "model.safetensors"
        write_file(file, parts[0], about)
        return [file]
    files, where = [], dict[str, str]()
    for number, part in enumerate(parts, start=1):
        file = out / f"model-{number:05}-of-{len(parts):05}.safetensors"
        write_file(file, part, about)
        files.append(file)
        where |= dict.fromkeys(part, file.name)
    size = sum(one.nbytes for one in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    write_durably(out / _INDEX, json.dumps(index, indent=2) + "\n")
    return [*files, out / _INDEX]


def _parts(tensors: dict[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, one in tensors.items():
        if parts[-1] and size + one.nbytes > max_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = one
        size += one.nbytes
    return parts
