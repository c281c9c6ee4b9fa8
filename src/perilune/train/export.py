"""The trained model as a checkpoint in the released layout."""

from __future__ import annotations

from pathlib import Path

from perilune.model.model import Transformer
from perilune.model.save import save_checkpoint
from perilune.train.config import TrainConfig

TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json")


def export(model: Transformer, config: TrainConfig) -> Path:
    """Writes `model` with its tokenizer to `out_dir`/model, replacing an earlier one.

    Raises:
        CheckpointError: a weight is not finite.
    """
    directory = Path(config.out_dir) / "model"
    tokenizer = [Path(config.tokenizer_dir) / name for name in TOKENIZER_FILES]
    save_checkpoint(
        model,
        directory,
        raw_config=config.model,
        extra_files=[path for path in tokenizer if path.is_file()],
        overwrite=True,
    )
    return directory
