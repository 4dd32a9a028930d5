"""Conversations from JSON lines, and their token ids with the answers marked. Floor 4. Source: Megatron-LM's --sft.

A line is a chat (`messages` with role and content, or `conversations` with from and value) or one instruction with its
answer. As in Megatron a system message in the middle of a line begins a conversation of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_parm.data.text_chunks import BrokenTextError
from megatron_parm.tokenizers.base import Tokenizer

ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}  # ShareGPT's names and others
QUESTIONS = ("instruction", "prompt", "question")
ANSWERS = ("output", "completion", "response", "answer")


@dataclass(frozen=True)
class Message:
    """One turn; `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class PromptFormat:
    """What stands before and after a turn of each role. What follows `before` in an answer is trained."""

    before: dict[str, str]
    after: dict[str, str]
    strips: bool = True


def _of_every_role(before: str, after: str) -> PromptFormat:
    roles = ("system", "user", "assistant")
    return PromptFormat(
        {role: before.format(role=role, title=role.capitalize()) for role in roles}, dict.fromkeys(roles, after)
    )


PROMPT_FORMATS = {
    "nemotron-h-aligned": PromptFormat(
        {"system": "<SPECIAL_10>System\n", "user": "<SPECIAL_11>User\n", "assistant": ""},
        {"system": "\n", "user": "\n<SPECIAL_11>Assistant\n", "assistant": "\n"},
    ),
    "nemotron-nano-v2": PromptFormat(
        {"system": "<SPECIAL_10>System\n", "user": "<SPECIAL_11>User\n", "assistant": "<SPECIAL_11>Assistant\n"},
        {"system": "\n", "user": "\n", "assistant": "\n<SPECIAL_12>\n"},
    ),
    "chatml": _of_every_role("<|im_start|>{role}\n", "<|im_end|>\n"),
    "sections": _of_every_role("### {title}:\n", "\n\n"),
    "identity": PromptFormat(
        dict.fromkeys(("system", "user", "assistant"), ""), dict.fromkeys(("system", "user", "assistant"), ""), False
    ),
}


@dataclass(frozen=True)
class EncodedConversation:
    """Ids of one conversation with its end, and which of them are answers."""

    ids: NDArray[np.int32]
    is_answer: NDArray[np.bool_]


def conversations_of(fields: dict[str, object]) -> list[list[Message]]:
    """The conversations of one line. Raises BrokenTextError for a line that is none, or has no answer."""
    if "messages" in fields:
        messages = _messages(fields["messages"], "messages", "role", "content")
    elif "conversations" in fields:
        messages = _messages(fields["conversations"], "conversations", "from", "value")
    else:
        messages = _instruction(fields)
    found: list[list[Message]] = []
    for message in messages:
        if message.role == "system" or not found:
            found.append([])
        found[-1].append(message)
    for conversation in found:
        answers = [message for message in conversation if message.role == "assistant"]
        if not answers:
            raise BrokenTextError("a conversation without an answer (role assistant): nothing to learn from it")
        if not all(message.content.strip() for message in answers):
            raise BrokenTextError("an empty answer (role assistant)")
    return found


def encode_conversation(messages: Sequence[Message], tokenizer: Tokenizer, form: PromptFormat) -> EncodedConversation:
    """The ids of a conversation; answers, what follows them, and the end of document after an answer are marked.

    A control token of the format is its own id where the tokenizer has it, else its text. Turns and what stands
    around them are encoded apart, so that an answer begins at a token.
    """
    ids: list[int] = []
    is_answer: list[bool] = []
    for message in messages:
        content = message.content.strip() if form.strips else message.content
        for text, is_marker in ((form.before[message.role], True), (content, False), (form.after[message.role], True)):
            part = _marker_ids(text, tokenizer) if is_marker else tokenizer.encode_part(text)
            is_trained = message.role == "assistant" and not (is_marker and text is form.before[message.role])
            ids += part
            is_answer += [is_trained] * len(part)
    if not ids or ids[-1] != tokenizer.eod:
        ids.append(tokenizer.eod)
        is_answer.append(messages[-1].role == "assistant")
    return EncodedConversation(np.array(ids, dtype=np.int32), np.array(is_answer, dtype=bool))


def _marker_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of a text of the format, its control tokens as ids."""
    places = [(text.find(name), -len(name), name) for name in tokenizer.special_tokens if name and name in text]
    if not places:
        return tokenizer.encode_part(text) if text else []
    place, _, name = min(places)
    left = tokenizer.encode_part(text[:place]) if place else []
    return [*left, tokenizer.special_tokens[name], *_marker_ids(text[place + len(name) :], tokenizer)]


def _messages(value: object, field: str, role_name: str, content_name: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise BrokenTextError(f"field {field!r} must be a list of messages, found {type(value).__name__}")
    messages = []
    for number, entry in enumerate(value, start=1):
        role, content = (entry.get(role_name), entry.get(content_name)) if isinstance(entry, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise BrokenTextError(
                f"message {number} of {field!r} must have the texts {role_name!r} and {content_name!r}"
            )
        plain = ROLES.get(role.lower(), role.lower())
        if plain not in ("system", "user", "assistant"):
            raise BrokenTextError(f"message {number} of {field!r}: role {role!r}; use system, user or assistant")
        messages.append(Message(plain, content))
    return messages


def _instruction(fields: dict[str, object]) -> list[Message]:
    question = next((fields[name] for name in QUESTIONS if name in fields), None)
    answer = next((fields[name] for name in ANSWERS if name in fields), None)
    more, system = fields.get("input") or "", fields.get("system") or ""
    if not all(isinstance(text, str) for text in (question, answer, more, system)):
        raise BrokenTextError(
            f"neither a chat ('messages', 'conversations') nor an instruction ({', '.join(QUESTIONS)}) with its answer "
            f"({', '.join(ANSWERS)}) as text; the fields are: {', '.join(list(fields)[:8]) or 'none'}"
        )
    user = Message("user", f"{question}\n\n{more}" if more else str(question))
    return [*([Message("system", str(system))] if system else []), user, Message("assistant", str(answer))]
