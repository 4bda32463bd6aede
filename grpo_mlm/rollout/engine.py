"""vLLM in one process: requests in, finished samples out, weights from the bridge in between.

The engine runs inside this process and one thread steps it; all other threads hand that thread closures and wait.
With tensor parallelism vLLM starts a worker process a rank; `shutdown` ends them.
"""

from __future__ import annotations

import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from grpo_mlm.bridge.sync_plan import SyncShape
from grpo_mlm.config.schema import Config
from grpo_mlm.config.world import World
from grpo_mlm.errors import RunFailure
from grpo_mlm.rollout.request import Completion, Request, Sampling

if TYPE_CHECKING:
    from vllm import LLMEngine, SamplingParams
    from vllm.logprobs import Logprob
    from vllm.outputs import RequestOutput

Results = queue.SimpleQueue[Completion | BaseException]


def prepare_environment(on_cpu: bool) -> None:
    """What vLLM reads when it is imported. Without GPUs nothing is compiled: it starts in 9 s instead of 30."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core lives in this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    if on_cpu:
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"


def engine_arguments(config: Config, model_folder: Path, on_cpu: bool) -> dict[str, Any]:
    """vLLM's engine arguments for this configuration."""
    rollout, data = config.rollout, config.data
    length = rollout.max_model_len or data.max_prompt_length + data.max_response_length
    arguments: dict[str, Any] = {
        "model": str(model_folder),
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": rollout.dtype or config.actor.dtype,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "max_model_len": length,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enforce_eager": rollout.enforce_eager or on_cpu,
        "seed": 0,  # never used: every request brings its own
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled, temperature included
        "generation_config": "vllm",  # the model's generation_config.json has no say
        "weight_transfer_config": {"backend": "grpo_mlm"},
        "worker_extension_cls": "grpo_mlm.rollout.weight_transfer.WorkerExtension",
        "distributed_executor_backend": "mp" if rollout.tensor_model_parallel_size > 1 else "uni",
        "disable_log_stats": True,
    }
    if not on_cpu:
        return arguments | {"gpu_memory_utilization": rollout.gpu_memory_utilization}
    # A seeded request whose prompt is split over steps would rewind its generator, which a CPU generator cannot:
    # prompts are computed whole, and a step has room for the longest.
    budget = max(rollout.max_num_batched_tokens or 0, length, rollout.max_num_seqs)
    cache = math.ceil(rollout.kv_cache_gb * 2**30)
    return arguments | {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": budget,
        "kv_cache_memory_bytes": cache,
        "block_size": 32,
    }


def sampling_params(sampling: Sampling, seed: int, stop_token_ids: list[int]) -> SamplingParams:
    """Every field that changes what is sampled is stated, so no default of model or engine can leak in."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        seed=seed,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        stop_token_ids=stop_token_ids,
        ignore_eos=False,
        max_tokens=sampling.max_tokens,
        min_tokens=0,
        logprobs=0,
        skip_special_tokens=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def end_tokens(model_folder: Path) -> list[int]:
    """Ids that end a response besides the tokenizer's end-of-sequence: chat models list several."""
    ends: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = model_folder / name
        ids = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        ends.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return sorted(ends)


class RolloutEngine:
    """One engine. Thread-safe: a generation, a sync and a shutdown may be asked for from different threads."""

    def __init__(self, config: Config, model_folder: Path, world: World, index: int, on_cpu: bool) -> None:
        prepare_environment(on_cpu)
        from vllm import EngineArgs, LLMEngine

        self.config, self.index = config, index
        megatron = (world.tp, world.pp, world.dp)
        self.shape = SyncShape(str(model_folder), *megatron, not on_cpu, world.rollout_tp, world.num_engines)
        self.weight_version = -1  # the weights of the model's folder
        self._syncing = False  # weights are half written: nothing may be sampled
        self._stop_token_ids = end_tokens(model_folder)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._running: dict[str, tuple[Request, Results, float]] = {}
        self._engine: LLMEngine = LLMEngine.from_engine_args(
            EngineArgs(**engine_arguments(config, model_folder, on_cpu))
        )
        self._thread = threading.Thread(target=self._step_forever, name="vllm-step", daemon=True)
        self._thread.start()

    def ready(self) -> None:
        """Returns once the engine can be used."""

    def generate(self, requests: list[Request], sampling: Sampling) -> Iterator[Completion]:
        """One completion a request, in the order in which they finish.

        A prompt that does not fit the engine comes back with finish_reason "abort" and no tokens.
        RunFailure while weights are half written, or when the engine breaks.
        """
        results: Results = queue.SimpleQueue()
        self._on_engine(lambda: self._admit(requests, sampling, results))
        for _ in requests:
            item = results.get()
            if isinstance(item, BaseException):
                raise RunFailure(f"engine {self.index}: {type(item).__name__}: {item}") from item
            yield item

    def join(self, host: str, port: int, first_rank: int, world: int) -> str:
        """Meet the trainer in the joint group, as ranks `first_rank` and on; returns the plan's digest."""
        from grpo_mlm.rollout.weight_transfer import JoinInfo, join_request

        info = JoinInfo(
            host,
            port,
            first_rank,
            world,
            self.index,
            self.config.bridge.bucket_mb << 20,
            self.config.cluster.call_timeout_s,
            vars(self.shape),
        )
        rpc = self._engine.collective_rpc
        self._on_engine(lambda: rpc("init_weight_transfer_engine", kwargs={"init_info": join_request(info)}))
        digests = set(self._on_engine(lambda: rpc("transfer_digest")))
        assert len(digests) == 1, f"ranks of engine {self.index} planned different transfers: {digests}"
        return str(digests.pop())

    def receive_weights(self, version: int) -> dict[str, int]:
        """Take new weights while the trainer sends them; from then on samples carry `version`.

        All or nothing: until a whole update has arrived nothing is sampled and the old version's number stays.
        """
        return self._on_engine(lambda: self._receive(version))

    def shutdown(self) -> None:
        """End the step thread and vLLM's own processes."""
        self._calls.put(None)
        self._thread.join(timeout=10)
        self._engine.engine_core.shutdown()

    def _receive(self, version: int) -> dict[str, int]:
        if self._running:
            raise RunFailure(
                f"engine {self.index}: a weight update while {len(self._running)} samples decode"
            )
        rpc = self._engine.collective_rpc
        self._syncing = True
        rpc("start_weight_update")
        rpc("update_weights", kwargs={"update_info": {}})
        rpc("finish_weight_update")
        # Only now: the cache of keys and values belongs to the weights that just left.
        if not self._engine.reset_prefix_cache():
            raise RunFailure(
                f"engine {self.index}: the prefix cache could not be reset after the weight update"
            )
        self._engine.set_weight_version(str(version))
        self.weight_version, self._syncing = version, False
        return {"bytes": sum(rpc("transfer_received"))}

    def _admit(self, requests: list[Request], sampling: Sampling, results: Results) -> None:
        from vllm.inputs import TokensPrompt

        if self._syncing:
            raise RunFailure(
                f"engine {self.index}: its last weight update was not completed; sync again first"
            )
        for request in requests:
            if len(request.prompt_ids) >= self._engine.model_config.max_model_len:
                results.put(self._aborted(request))
                continue
            params = sampling_params(sampling, request.seed, self._stop_token_ids)
            prompt = TokensPrompt(prompt_token_ids=list(request.prompt_ids))
            self._engine.add_request(request.request_id, prompt, params)
            self._running[request.request_id] = (request, results, time.monotonic())

    def _aborted(self, request: Request) -> Completion:
        none = np.zeros(0)
        return Completion(
            request.group_id,
            request.sample_index,
            none.astype(np.int64),
            none.astype(np.float32),
            "",
            "abort",
            self.weight_version,
            0.0,
        )

    def _step_forever(self) -> None:
        while True:
            try:
                while True:
                    call = self._calls.get(block=not self._running)
                    if call is None:
                        return
                    call()
            except queue.Empty:
                pass
            try:
                for output in self._engine.step():
                    if output.finished:
                        self._finish(cast("RequestOutput", output))
            except Exception as error:  # the engine is broken: whoever waits for a sample must hear of it
                for _, results, _ in self._running.values():
                    results.put(error)
                self._running.clear()

    def _finish(self, output: RequestOutput) -> None:
        request, results, began = self._running.pop(output.request_id)
        done = output.outputs[0]
        ids, entries = list(done.token_ids), cast("list[dict[int, Logprob]]", done.logprobs or [])
        logprobs = [entry[token].logprob for token, entry in zip(ids, entries, strict=True)]
        results.put(
            Completion(
                request.group_id,
                request.sample_index,
                np.array(ids, dtype=np.int64),
                np.array(logprobs, dtype=np.float32),
                done.text,
                done.finish_reason or "abort",
                self.weight_version,
                time.monotonic() - began,
            )
        )

    def _on_engine(self, call: Callable[[], Any]) -> Any:
        """Run a closure on the step thread; its result, or its exception."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(run)
        return future.result()
