"""vLLM in one process: requests in, finished samples out, weights from the bridge in between.

With tensor parallelism vLLM starts a worker process a rank; they end with `shutdown` or with this process.
"""

from __future__ import annotations

import itertools
import logging
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from grpo_mlm.bridge.sync_plan import SyncShape
from grpo_mlm.config.schema import Config
from grpo_mlm.config.world import World
from grpo_mlm.errors import PeerGone, RunFailure
from grpo_mlm.rollout.request import Completion, Request, Sampling
from grpo_mlm.rollout.stepper import Stepper
from grpo_mlm.rollout.vllm_options import end_tokens, engine_arguments, prepare_environment, sampling_params

if TYPE_CHECKING:
    from vllm.logprobs import Logprob
    from vllm.outputs import RequestOutput

Results = queue.SimpleQueue["tuple[str, Completion] | RunFailure"]


class RolloutEngine:
    """One engine. Thread-safe: a generation, a sync and a shutdown may be asked for from different threads."""

    def __init__(self, config: Config, model_folder: Path, world: World, index: int, on_cpu: bool) -> None:
        prepare_environment(config, on_cpu)
        from vllm import EngineArgs, LLMEngine

        # When a step fails it prints every request's parameters, and the cause is lost among them.
        logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL)
        self.config, self.index, self.name = config, index, f"engine {index}"
        self.model_folder = model_folder
        self.weight_version = -1  # the weights of the model's folder
        self._whole = True  # False while weights are given up, or from the start of an update to its commit
        self._received: int | None = None  # the version that came whole since the weights were last given up
        self._given_up: set[str] = set()  # parts of the memory that was given up
        self._stop_token_ids = end_tokens(model_folder)
        self._numbers = itertools.count()
        arguments = EngineArgs(**engine_arguments(config, model_folder, on_cpu))
        self._engine = LLMEngine.from_engine_args(arguments)
        self._stepper = Stepper(self._engine, self.name)

    def ready(self) -> None:
        """Returns once the engine can be used."""

    def generate(self, requests: list[Request], sampling: Sampling) -> Iterator[Completion]:
        """One completion a request, in the order in which they finish.

        A prompt that does not fit the engine comes back with finish_reason "abort" and no tokens. Requests whose
        completions nobody takes any more, because the iterator is closed, are dropped.
        RunFailure while weights are half written, or when the engine breaks.
        """
        results: Results = queue.SimpleQueue()
        waiting: set[str] = set()
        try:
            self._stepper.call(lambda: self._admit(requests, sampling, results, waiting))
            for _ in requests:
                item = results.get()
                if isinstance(item, RunFailure):
                    raise item
                request_id, completion = item
                waiting.discard(request_id)
                yield completion
        finally:
            if waiting:
                self._stepper.drop(waiting)

    def record(self) -> list[dict[str, Any]]:
        """What each rank's loaders make of the model's tensors, `Recorded.packed`."""
        folder = str(self.model_folder)
        return self._stepper.call(lambda: self._on_workers("bridge_record", model_folder=folder))

    def join(self, host: str, port: int, handoffs: list[str], shape: SyncShape) -> str:
        """Meet the trainer, anew after a sync that failed; returns the digest of the plan.

        `handoffs`: colocated, where each rank of this engine finds the trainer rank on its device. RunFailure listing
        names and shapes where the plan and the engine's weights differ.
        """
        from grpo_mlm.rollout.weight_transfer import JoinInfo

        bridge, timeout_s = self.config.bridge, self.config.cluster.call_timeout_s
        info = JoinInfo(
            host, port, handoffs, self.index, bridge.bucket_mb << 20, bridge.verify, timeout_s, shape
        )
        replies = self._stepper.call(lambda: self._on_workers("bridge_join", info=dict(vars(info))))
        digests = {reply["digest"] for reply in replies}
        if len(digests) != 1:
            raise RunFailure(f"{self.name}: its ranks planned different transfers: {sorted(digests)}")
        return str(digests.pop())

    def receive_weights(self, version: int) -> dict[str, int]:
        """Take the weights of `version` while the trainer sends them; nothing is sampled until they are committed.

        After an update that broke off, trainer and engines have to join again. Returns the numbers of bytes, tensors
        and checked pieces, over all ranks.
        """
        return self._stepper.call(lambda: self._receive(version))

    def commit_weights(self, version: int) -> None:
        """All engines have the new weights: from now on samples carry `version`."""
        self._stepper.call(lambda: self._commit(version))

    def release_memory(self) -> None:
        """Give up the memory of weights and KV cache (on GPUs) until it is taken back; the weights are lost."""
        self._stepper.call(self._release)

    def retake_memory(self, part: Literal["weights", "kv_cache"]) -> None:
        """Take back what was given up: `weights` before the sync that fills them, `kv_cache` after it."""
        self._stepper.call(lambda: self._retake(part))

    def shutdown(self) -> None:
        """End the step thread and vLLM's own processes. Whoever still waits for a sample gets a RunFailure."""
        self._stepper.close()
        self._engine.engine_core.shutdown()

    def _receive(self, version: int) -> dict[str, int]:
        try:
            self._check_idle("a weight update")
        except RunFailure:
            self._on_workers("bridge_leave")  # or the trainer would wait for this engine
            raise
        self._whole, self._received = False, None
        replies = self._on_workers("bridge_receive", version=version)
        self._received = version
        return {key: sum(reply[key] for reply in replies) for key in ("bytes", "tensors", "verified")}

    def _commit(self, version: int) -> None:
        if self._received != version:
            raise RunFailure(f"{self.name}: version {version} of the weights has not arrived")
        # Only now: the cache of keys and values belongs to the weights that just left.
        if not self._engine.reset_prefix_cache():
            raise RunFailure(f"{self.name}: the prefix cache could not be reset after the weight update")
        self.weight_version, self._whole = version, True

    def _release(self) -> None:
        self._check_idle("giving memory up")
        self._whole, self._received = False, None
        self._engine.sleep(level=2)
        self._given_up = {"weights", "kv_cache"}

    def _retake(self, part: Literal["weights", "kv_cache"]) -> None:
        if part in self._given_up:
            self._engine.wake_up([part])
            self._given_up.remove(part)

    def _check_idle(self, what: str) -> None:
        if self._stepper.running:
            raise RunFailure(f"{self.name}: {what} while {self._stepper.running} samples are being drawn")

    def _on_workers(self, method: str, **kwargs: Any) -> list[dict[str, Any]]:
        """Call the worker extension on every rank; RunFailure with the ranks' errors."""
        try:
            replies = self._engine.collective_rpc(method, kwargs=kwargs)
        except RuntimeError as error:  # a worker process died
            raise RunFailure(f"{self.name}: {method} failed: {error}") from error
        failed = {rank: reply for rank, reply in enumerate(replies) if "error" in reply}
        if failed:
            let_down = all(reply.get("peer_gone") for reply in failed.values())
            errors = [f"rank {rank}: {reply['error']}" for rank, reply in failed.items()]
            raise (PeerGone if let_down else RunFailure)(
                f"{self.name}: {method} failed\n" + "\n".join(errors)
            )
        return replies

    def _admit(
        self, requests: list[Request], sampling: Sampling, results: Results, waiting: set[str]
    ) -> None:
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs import TokensPrompt

        if not self._whole:
            raise RunFailure(
                f"{self.name} has no whole weights: its last update broke off, or its memory was given up; "
                "sync before sampling"
            )
        for request in requests:
            request_id = f"{request.request_id}/{next(self._numbers)}"
            if len(request.prompt_ids) >= self._engine.model_config.max_model_len:
                results.put((request_id, self._aborted(request)))
                continue
            params = sampling_params(sampling, request.seed, self._stop_token_ids)
            prompt = TokensPrompt(prompt_token_ids=list(request.prompt_ids))
            try:
                self._stepper.add(request_id, prompt, params, self._sink(request, results))
            except VLLMValidationError as error:
                raise RunFailure(f"{self.name} refused request {request.request_id}: {error}") from error
            waiting.add(request_id)

    def _sink(self, request: Request, results: Results) -> Callable[[RequestOutput | RunFailure], None]:
        began, version = time.monotonic(), self.weight_version

        def take(output: RequestOutput | RunFailure) -> None:
            if isinstance(output, RunFailure):
                results.put(output)
            else:
                seconds = time.monotonic() - began
                results.put((output.request_id, _completion(request, output, version, seconds)))

        return take

    def _aborted(self, request: Request) -> Completion:
        ids, logprobs = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        group, index = request.group_id, request.sample_index
        return Completion(group, index, ids, logprobs, "", "abort", self.weight_version, 0.0)


def _completion(request: Request, output: RequestOutput, version: int, seconds: float) -> Completion:
    """What vLLM finished, as plain data: every id with the log-prob it was sampled at."""
    done = output.outputs[0]
    ids, entries = list(done.token_ids), cast("list[dict[int, Logprob]]", done.logprobs or [])
    logprobs = [entry[token].logprob for token, entry in zip(ids, entries, strict=True)]
    return Completion(
        request.group_id,
        request.sample_index,
        np.array(ids, dtype=np.int64),
        np.array(logprobs, dtype=np.float32),
        done.text,
        done.finish_reason or "abort",
        version,
        seconds,
    )
