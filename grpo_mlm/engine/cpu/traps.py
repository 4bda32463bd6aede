"""Settings under which megatron-core 0.16 to 0.19 trains on gloo with wrong numbers and no error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_mlm.errors import RunFailure

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def check_traps(config: TransformerConfig) -> None:
    """RunFailure on a configuration that was seen to give wrong gradients on a CPU."""
    virtual = config.virtual_pipeline_model_parallel_size is not None
    if virtual and config.batch_p2p_comm:
        raise RunFailure(
            "virtual pipeline on gloo with batch_p2p_comm gives wrong gradients; set it to False"
        )
    if config.overlap_p2p_comm and config.deallocate_pipeline_outputs:
        raise RunFailure(
            "overlap_p2p_comm with deallocate_pipeline_outputs: gloo sends from memory that is already freed"
        )
    expert_tp = config.expert_tensor_parallel_size or config.tensor_model_parallel_size
    if config.expert_model_parallel_size == 1 and expert_tp != config.tensor_model_parallel_size:
        raise RunFailure(
            "expert_tensor_parallel_size differs from tensor_model_parallel_size without expert parallelism: "
            "expert gradients would be summed over the wrong ranks"
        )
