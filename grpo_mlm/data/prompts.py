"""From rows to prompts: the exact ids that are sent, once, before training starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from grpo_mlm.config.schema import DataConfig
from grpo_mlm.data.sources import GYM, Row, read_rows
from grpo_mlm.errors import UserError

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """A prompt as it is sent. Engine and trainer get these ids; the text is for rewards and people."""

    token_ids: tuple[int, ...]
    text: str
    answer: Any  # None where the row has no answer column
    row: Row  # the whole row, untouched
    data_source: str
    row_index: int  # in its source, from 0


@dataclass(frozen=True)
class PromptSet:
    """The usable prompts, and how many rows were left out for which reason."""

    prompts: list[Prompt]
    dropped: dict[str, int]


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The model's tokenizer; UserError names the folder when it has none."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: no usable tokenizer: {error}") from error


def load_prompts(specs: Sequence[str], config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """Every row of every source, rendered. UserError names source, row and column of the first mistake."""
    prompts, dropped = [], Counter[str]()
    for spec in specs:
        for index, row in enumerate(read_rows(spec)):
            where = f"{spec}, row {index + 1}"
            ids, text = render(_messages_of(row, config, where), config, tokenizer, where)
            fault = _length_fault(ids, text, config)
            if fault and config.truncation == "error":
                raise UserError(f"{where}: {fault}; raise data.max_prompt_length or set data.truncation=drop")
            if fault:
                dropped[fault.split(":")[0]] += 1
                continue
            source = str(row.get(config.source_key) or (spec if spec.startswith(GYM) else Path(spec).stem))
            prompts.append(Prompt(tuple(ids), text, row.get(config.answer_key), row, source, index))
    return PromptSet(prompts, dict(dropped))


def _messages_of(row: Row, config: DataConfig, where: str) -> str | Messages:
    """The row's prompt: a string or checked chat messages, with the configured system prompt put first."""
    if config.prompt_key not in row:
        raise UserError(
            f"{where}: no column {config.prompt_key!r} (data.prompt_key); the row has {', '.join(row) or 'no column'}"
        )
    prompt = row[config.prompt_key]
    if isinstance(prompt, str):
        if not config.apply_chat_template:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    shaped = isinstance(prompt, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in prompt
    )
    if not shaped:
        raise UserError(
            f"{where}: column {config.prompt_key!r} is a string or a list of {{role, content}} messages, "
            f"this is {type(prompt).__name__}: {str(prompt)[:80]}"
        )
    has_system = any(m["role"] == "system" for m in prompt)
    if config.system_prompt is not None and not has_system:
        prompt = [{"role": "system", "content": config.system_prompt}, *prompt]
    return prompt


def render(
    prompt: str | Messages, config: DataConfig, tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[list[int], str]:
    """Ids and text of a prompt, cut to the limit under `truncation: left`."""
    ids = _encode(prompt, config, tokenizer, where)
    if config.truncation == "left" and len(ids) > config.max_prompt_length:
        ids = _cut_left(prompt, ids, config, tokenizer, where)
    return ids, str(tokenizer.decode(ids))


def _encode(
    prompt: str | Messages, config: DataConfig, tokenizer: PreTrainedTokenizerBase, where: str
) -> list[int]:
    if isinstance(prompt, str):
        return _one_bos(tokenizer(prompt)["input_ids"] if prompt.strip() else [], tokenizer)
    if not tokenizer.chat_template:
        raise UserError(
            f"{where}: the model's tokenizer has no chat template, which chat rows and data.apply_chat_template need; "
            "use a model that has one, or string prompts with data.apply_chat_template=false"
        )
    if not any(m["content"].strip() for m in prompt if m["role"] != "system"):
        return []
    try:
        ids = tokenizer.apply_chat_template(
            prompt,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
            **config.chat_template_kwargs,
        )
    except Exception as error:  # the template is the model's own program and raises what it likes
        raise UserError(f"{where}: the chat template refuses the messages: {error}") from error
    return _one_bos(list(ids), tokenizer)


def _one_bos(ids: list[Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Template and tokenizer may both have put a beginning-of-sequence token; one is enough."""
    while len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        ids = ids[1:]
    return list(ids)


def _cut_left(
    prompt: str | Messages, ids: list[int], config: DataConfig, tokenizer: PreTrainedTokenizerBase, where: str
) -> list[int]:
    """Cut the oldest content: of chat rows the beginning of the earliest message that is not the system's, so
    that the template around it stays whole; of plain prompts, and where that is not enough, the first ids.
    """
    limit = config.max_prompt_length
    messages = [dict(m) for m in prompt] if isinstance(prompt, list) else []
    for message in (m for m in messages if m["role"] != "system"):
        content = tokenizer(message["content"], add_special_tokens=False)["input_ids"]
        while content and len(ids) > limit:
            content = content[len(ids) - limit :]
            message["content"] = tokenizer.decode(content)
            ids = _encode(messages, config, tokenizer, where) or ids[-limit:]
        if len(ids) <= limit:
            return ids
    bos = ids[:1] if ids[0] == tokenizer.bos_token_id else []
    return bos + ids[len(ids) - limit + len(bos) :]


def _length_fault(ids: list[int], text: str, config: DataConfig) -> str | None:
    if not ids or not text.strip():
        return "empty: the prompt has no text"
    if len(ids) > config.max_prompt_length:
        return f"too_long: the prompt has {len(ids)} tokens, data.max_prompt_length is {config.max_prompt_length}"
    return None
