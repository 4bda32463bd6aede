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
    row_index: int  # in its source, from 0; messages count from 1


@dataclass(frozen=True)
class PromptSet:
    """The usable prompts, and how many rows were left out for which reason."""

    prompts: list[Prompt]
    dropped: dict[str, int]


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The model's tokenizer; UserError names the folder when it has none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # damaged files raise anything from KeyError to the tokenizers' bare Exception
        raise UserError(
            f"{folder}: no usable tokenizer: {type(error).__name__}: {error}; the model folder needs the tokenizer's "
            "files, such as tokenizer.json and tokenizer_config.json"
        ) from error
    # From config.json alone transformers makes up a tokenizer that encodes every text to nothing.
    if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():
        raise UserError(f"{folder}: no usable tokenizer: no vocabulary, is tokenizer.json missing?")
    return tokenizer


def load_prompts(specs: Sequence[str], config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """Every row of every source, rendered. UserError names source, row and column of the first mistake.

    Rows without text and rows over the limit are treated as `data.truncation` says; no usable row is an error.
    """
    prompts, dropped = [], Counter[str]()
    for spec in specs:
        for index, row in enumerate(read_rows(spec)):
            where = f"{spec}, row {index + 1}"
            ids, text = render(_messages_of(row, config, where), config, tokenizer, where)
            if fault := _fault(ids, text, config.max_prompt_length):
                kind, sentence = fault
                if config.truncation == "error":
                    raise UserError(f"{where}: {sentence}")
                dropped[kind] += 1
                continue
            source = str(row.get(config.source_key) or (spec if spec.startswith(GYM) else Path(spec).stem))
            prompts.append(Prompt(tuple(ids), text, row.get(config.answer_key), row, source, index))
    if specs and not prompts:
        counts = ", ".join(f"{count} {kind}" for kind, count in dropped.items())
        raise UserError(
            f"{', '.join(specs)}: no usable prompt, all were dropped ({counts}); "
            f"data.max_prompt_length is {config.max_prompt_length}"
        )
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
    # Parquet gives every message every field; a template must not take those of other rows for set.
    messages = [{name: value for name, value in m.items() if value is not None} for m in prompt]
    if config.system_prompt is not None and not any(m["role"] == "system" for m in messages):
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return messages


def render(
    prompt: str | Messages, config: DataConfig, tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[list[int], str]:
    """Ids and text of a prompt, cut to the limit under `truncation: left`; no ids where it has no text."""
    ids = _encode(prompt, config, tokenizer, where)
    if config.truncation == "left" and len(ids) > config.max_prompt_length:
        ids = _cut_left(prompt, ids, config, tokenizer, where)
    return ids, _text(ids, tokenizer)


def _encode(
    prompt: str | Messages, config: DataConfig, tokenizer: PreTrainedTokenizerBase, where: str
) -> list[int]:
    try:  # JSON can hold half a surrogate pair; tokenizers refuse it without saying so
        "".join([prompt] if isinstance(prompt, str) else [m["content"] for m in prompt]).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: the prompt is not valid Unicode text: {error}") from error
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


def _text(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _one_bos(ids: list[Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Template and tokenizer may both have put a beginning-of-sequence token; one is enough."""
    while len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        ids = ids[1:]
    return list(ids)


def _cut_left(
    prompt: str | Messages, ids: list[int], config: DataConfig, tokenizer: PreTrainedTokenizerBase, where: str
) -> list[int]:
    """Cut the oldest content. Chat rows are rendered again from shortened messages, so that system prompt, template
    and generation prompt stay whole; where those leave no room, and in plain prompts, the first ids go. BOS stays.
    """
    limit = config.max_prompt_length
    if isinstance(prompt, list):
        shorter = _cut_messages(prompt, len(ids), config, tokenizer, where)
        if shorter:
            return shorter
    bos = ids[:1] if limit > 1 and ids[0] == tokenizer.bos_token_id else []
    return bos + ids[len(ids) - limit + len(bos) :]


def _cut_messages(
    prompt: Messages, length: int, config: DataConfig, tokenizer: PreTrainedTokenizerBase, where: str
) -> list[int] | None:
    """Ids of the prompt without the beginning of its oldest messages, the system's aside; None where that would
    leave no text at all.
    """
    limit = config.max_prompt_length
    messages = [dict(m) for m in prompt]
    for message in (m for m in messages if m["role"] != "system"):
        content = tokenizer(message["content"], add_special_tokens=False)["input_ids"]
        while content and length > limit:
            content = content[length - limit :]
            # A character that was cut in two decodes to U+FFFD.
            message["content"] = _text(content, tokenizer).lstrip("\ufffd")
            ids = _encode(messages, config, tokenizer, where)
            if not ids:
                return None
            if len(ids) <= limit:
                return ids
            length = len(ids)
    return None


def _fault(ids: list[int], text: str, limit: int) -> tuple[str, str] | None:
    """Why a prompt cannot be sent: the kind to count it under, and a sentence; None where it can."""
    if not ids or not text.strip():
        return "empty", (
            "the prompt has no text; remove the row, or set data.truncation=drop to skip and count such rows"
        )
    if len(ids) > limit:
        return "too_long", (
            f"the prompt has {len(ids)} tokens, data.max_prompt_length is {limit}; raise it, or set data.truncation "
            "to drop or left"
        )
    return None
