"""Everything that can be checked before a process starts: model, layout, prompts. `--dry-run` ends here."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from grpo_mlm.bridge.hf_files import check_headers, hub_folder
from grpo_mlm.config.check import check_model
from grpo_mlm.config.functions import load_function
from grpo_mlm.config.schema import Config, ModelConfig
from grpo_mlm.config.world import World, resolve_world
from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.data.prompts import Prompt, load_prompts, load_tokenizer
from grpo_mlm.errors import UserError
from grpo_mlm.layouts.model import read_model_spec
from grpo_mlm.rewards.scorer import build_scorer


@dataclass(frozen=True)
class Prepared:
    """What the run starts from."""

    model_folder: Path
    device: str  # "cpu" or "cuda"
    world: World
    train_prompts: list[Prompt]
    val_prompts: list[Prompt]
    dropped: dict[str, int]  # reason -> rows
    total_steps: int


def prepare(config: Config) -> Prepared:
    """Resolve the model and the devices, read and render every prompt; the first mistake is a UserError."""
    device, gpus = resolve_device(config)
    world = resolve_world(config, gpus)
    folder = model_folder(config.model)
    spec = read_model_spec(folder)
    check_model(config, spec)
    check_headers(folder, spec)
    tokenizer = load_tokenizer(folder, config.model.trust_remote_code)
    train = load_prompts(config.data.train_files, config.data, tokenizer)
    if len(train.prompts) < config.data.train_batch_size and config.trainer.debug.load_rollouts is None:
        raise UserError(
            f"data.train_files: {len(train.prompts)} usable prompts ({train.dropped or 'none dropped'}), "
            f"fewer than data.train_batch_size={config.data.train_batch_size}"
        )
    val = load_prompts(config.data.val_files, config.data, tokenizer)
    with closing(build_scorer(config.reward)) as scorer:
        scorer.check_rows([*train.prompts, *val.prompts])
    if config.trainer.debug.load_rollouts is not None:
        RolloutBatch.load(config.trainer.debug.load_rollouts)
    dropped = {f"train/{k}": n for k, n in train.dropped.items()} | {
        f"val/{k}": n for k, n in val.dropped.items()
    }
    steps = config.trainer.total_training_steps or max(
        1, config.trainer.total_epochs * len(train.prompts) // config.data.train_batch_size
    )
    return Prepared(folder, device, world, train.prompts, val.prompts, dropped, steps)


def resolve_device(config: Config) -> tuple[str, int | None]:
    """The accelerator, and how many of them a node has (None on a CPU: as many as the layout asks for)."""
    import torch

    visible = torch.cuda.device_count()
    device = config.cluster.device if config.cluster.device != "auto" else ("cuda" if visible else "cpu")
    if device == "cpu":
        return device, config.cluster.n_devices_per_node
    count = config.cluster.n_devices_per_node or visible
    if not count:
        raise UserError(
            "cluster.device=cuda: no GPU is visible here; set cluster.n_devices_per_node, or cluster.device=cpu"
        )
    return device, count


def model_folder(config: ModelConfig) -> Path:
    """A local folder, one that `model.maker` makes now, or a hub id's local copy."""
    folder = Path(config.path)
    if config.maker and not folder.exists():
        make = load_function(config.maker, "model.maker")
        try:
            make(folder)
        except UserError:
            raise
        except Exception as error:  # whatever the user's function does
            raise UserError(
                f"model.maker: {config.maker}({str(folder)!r}) failed: {type(error).__name__}: {error}"
            ) from error
    return hub_folder(config.path)
